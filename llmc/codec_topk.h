// Codec topk, CPU: of each token the K values of the largest size and where they were; backward, the gradients at the
// same places (topk_row.h).
//
//   forward    K*n values, then n sets          h~ = h on the set, 0 elsewhere
//   backward   K*n values                       dL/dh = dL/dh~ on the set, 0 elsewhere: h~'s gradient
// Values are in the order of their set, bf16 or fp32. K is the most that the budget holds, sets included. Each end
// remembers the sets of the micro-batches whose backward is to come.
#ifndef LLMC_CODEC_TOPK_H
#define LLMC_CODEC_TOPK_H

#include <stdint.h> // fixed-width integers
#include <string.h> // memset

#include "codec_end.h"    // CodecEnd, codec_end_set
#include "codec_format.h" // Codec, codec_topk_kept
#include "codec_value.h"  // codec_put, codec_get
#include "device.h"       // floatX, Stream
#include "quant_group.h"  // quant_size
#include "topk_row.h"     // topk_put, topk_index

// The largest size that at least K of H values have.
static inline uint32_t topk_threshold(const float *x, int H, int K) {
    uint32_t threshold = 0;
    for (int bit = 30; bit >= 0; bit--) {
        uint32_t higher = threshold | 1u << bit;
        int count = 0;
        for (int h = 0; h < H; h++) count += quant_size(x[h]) >= higher;
        if (count >= K) threshold = higher;
    }
    return threshold;
}

// The set of one token.
static inline void topk_choose(unsigned char *set, const float *x, int H, int K) {
    uint32_t threshold = topk_threshold(x, H, K);
    int bits = topk_index_bits(H), equal = K, n = 0;
    uint16_t index[QUANT_OCTET];
    for (int h = 0; h < H; h++) equal -= quant_size(x[h]) > threshold;
    for (int h = 0; h < H && n < K; h++) {
        uint32_t size = quant_size(x[h]);
        if (size < threshold || (size == threshold && equal-- <= 0)) continue;
        index[n++ % QUANT_OCTET] = (uint16_t)h;
        if (n % QUANT_OCTET == 0 || n == K) {
            int count = (n - 1) % QUANT_OCTET + 1;
            topk_put(set + (n - count) / QUANT_OCTET * bits, index, count, bits);
        }
    }
}

// values (n, K) = x (n, H) at the sets
static inline void topk_gather(char *values, const float *x, const unsigned char *sets, int n, int H, int K, Wire wire,
                               Stream *stream) {
    int bits = topk_index_bits(H), set_bytes = topk_set_bytes(K, H);
#pragma omp parallel for num_threads(stream->threads)
    for (int token = 0; token < n; token++) {
        const unsigned char *set = sets + (int64_t)token * set_bytes;
        const float *from = x + (size_t)token * H;
        for (int i = 0; i < K; i++) codec_put(values, (int64_t)token * K + i, from[topk_index(set, i, bits)], wire);
    }
}

// x (n, H) = values (n, K) at the sets, 0 elsewhere
static inline void topk_scatter(float *x, const char *values, const unsigned char *sets, int n, int H, int K, Wire wire,
                                Stream *stream) {
    int bits = topk_index_bits(H), set_bytes = topk_set_bytes(K, H);
#pragma omp parallel for num_threads(stream->threads)
    for (int token = 0; token < n; token++) {
        const unsigned char *set = sets + (int64_t)token * set_bytes;
        float *to = x + (size_t)token * H;
        memset(to, 0, sizeof(float) * (size_t)H);
        for (int i = 0; i < K; i++) to[topk_index(set, i, bits)] = codec_get(values, (int64_t)token * K + i, wire);
    }
}

static inline int64_t codec_topk_encode(const Codec *codec, CodecEnd *end, const CodecContext *context, const floatX *x,
                                        int n, int H, void *out, int64_t cap, Stream *stream) {
    int K = codec_topk_kept(codec, H), set_bytes = topk_set_bytes(K, H);
    int64_t n_bytes = codec_bytes(codec, context, n, H);
    const unsigned char *sets = NULL;
    if (codec_fits(n_bytes, cap)) return -1;
    if (context->direction == CODEC_FORWARD) {
        unsigned char *made = (unsigned char *)out + (int64_t)n * K * codec_size(codec);
#pragma omp parallel for num_threads(stream->threads)
        for (int token = 0; token < n; token++)
            topk_choose(made + (int64_t)token * set_bytes, x + (size_t)token * H, H, K);
        if (codec_end_keep(end, context, made, n)) return -1;
        sets = made;
    } else {
        sets = codec_end_kept(end, context, n);
    }
    if (sets == NULL) return -1;
    topk_gather((char *)out, x, sets, n, H, K, codec->wire, stream);
    return n_bytes;
}

static inline int codec_topk_decode(const Codec *codec, CodecEnd *end, const CodecContext *context, const void *in,
                                    int64_t n_bytes, floatX *x, int n, int H, Stream *stream) {
    int K = codec_topk_kept(codec, H);
    const unsigned char *sets = (const unsigned char *)in + (int64_t)n * K * codec_size(codec);
    if (codec_is_whole(n_bytes, codec_bytes(codec, context, n, H))) return -1;
    if (context->direction == CODEC_FORWARD) {
        if (topk_check(sets, n, K, H) || codec_end_keep(end, context, sets, n)) return -1;
    } else {
        sets = codec_end_kept(end, context, n);
        if (sets == NULL) return -1;
    }
    topk_scatter(x, (const char *)in, sets, n, H, K, codec->wire, stream);
    return 0;
}

#endif
