// The Codec, CPU: turns a boundary tensor x (n, H) into the bytes of a message and back (codec_format.h).
//
//   Codec codec;  codec_init(&codec, H, 0.95f, MASK_SCALE_NONE, WIRE_BF16, seed);
//   CodecContext context = codec_context(boundary, replica, micro_batch, step, 1);
//   int64_t n_bytes = codec_encode(&codec, end, &context, x, n, H, out, cap, stream);     // on one cell
//   if (codec_decode(&codec, end, &context, out, n_bytes, x, n, H, stream)) return -1;    // on the other
// with the CodecEnd of the side at work (codec_end.h); what remembers nothing (mask, none, the quantizers) takes NULL;
// and for fp32 vectors, which are dense always: codec_encode_fp32, codec_decode_fp32.
//
// Index, gather and rounding are one loop: there is no array of indices and no copy in fp32.
#ifndef LLMC_CODEC_H
#define LLMC_CODEC_H

#include <stdint.h> // fixed-width integers
#include <string.h> // memset

#include "codec_aqsgd.h"      // codec_aqsgd_encode
#include "codec_bottleneck.h" // codec_bottleneck_encode
#include "codec_end.h"        // CodecEnd
#include "codec_format.h"     // Codec, CodecContext, codec_bytes
#include "codec_quant.h"      // codec_quant_encode
#include "codec_topk.h"       // codec_topk_encode
#include "codec_value.h"      // codec_put, codec_get
#include "device.h"           // floatX, Stream
#include "klt.h"              // klt_encode, klt_decode
#include "mask.h"             // mask_set, mask_lanes

// Writes x (n) as a dense message into out. Returns its bytes, or -1: they are more than cap.
static inline int64_t codec_encode_fp32(const Codec *codec, const float *x, int64_t n, void *out, int64_t cap,
                                        Stream *stream) {
    int64_t n_bytes = n * codec_size(codec);
    Wire wire = codec->wire;
    if (codec_fits(n_bytes, cap)) return -1;
#pragma omp parallel for num_threads(stream->threads)
    for (int64_t i = 0; i < n; i++) codec_put((char *)out, i, x[i], wire);
    return n_bytes;
}

// x (n) = the dense message `in`. Returns 0, or -1 with x untouched: n_bytes is not the size of such a message.
static inline int codec_decode_fp32(const Codec *codec, const void *in, int64_t n_bytes, float *x, int64_t n,
                                    Stream *stream) {
    Wire wire = codec->wire;
    if (codec_is_whole(n_bytes, n * codec_size(codec))) return -1;
#pragma omp parallel for num_threads(stream->threads)
    for (int64_t i = 0; i < n; i++) x[i] = codec_get((const char *)in, i, wire);
    return 0;
}

// codec_encode and codec_decode of a masked message.
static inline int64_t codec_mask_encode(const Codec *codec, const CodecContext *context, const floatX *x, int n, int H,
                                        void *out, int64_t cap, Stream *stream) {
    int K = codec_values(codec, context, H);
    int64_t n_bytes = codec_bytes(codec, context, n, H), row_bytes = codec_bytes(codec, context, 1, H);
    MaskKey key = codec_key(codec, context);
    Wire wire = codec->wire;
    if (mask_check(key, n, H) || codec_fits(n_bytes, cap)) return -1;
#pragma omp parallel for num_threads(stream->threads)
    for (int token = 0; token < n; token++) {
        const floatX *from = x + (size_t)token * H;
        char *row = (char *)out + token * row_bytes;
        MaskSet set = mask_set(key, token, H);
        uint16_t dim[MASK_LANES];
        for (int i = 0; i < K; i++) {
            if (i % MASK_LANES == 0) mask_lanes(dim, &set, i, K);
            codec_put(row, i, from[dim[i % MASK_LANES]], wire);
        }
    }
    return n_bytes;
}

static inline int codec_mask_decode(const Codec *codec, const CodecContext *context, const void *in, int64_t n_bytes,
                                    floatX *x, int n, int H, Stream *stream) {
    int K = codec_values(codec, context, H);
    int64_t expected = codec_bytes(codec, context, n, H), row_bytes = codec_bytes(codec, context, 1, H);
    MaskKey key = codec_key(codec, context);
    Wire wire = codec->wire;
    if (mask_check(key, n, H) || codec_is_whole(n_bytes, expected)) return -1;
#pragma omp parallel for num_threads(stream->threads)
    for (int token = 0; token < n; token++) {
        const char *row = (const char *)in + token * row_bytes;
        floatX *to = x + (size_t)token * H;
        MaskSet set = mask_set(key, token, H);
        uint16_t dim[MASK_LANES];
        memset(to, 0, sizeof(floatX) * (size_t)H);
        for (int i = 0; i < K; i++) {
            if (i % MASK_LANES == 0) mask_lanes(dim, &set, i, K);
            to[dim[i % MASK_LANES]] = codec->scale * codec_get(row, i, wire);
        }
    }
    return 0;
}

// Activations, which are fp32 here, as a dense message.
static inline int64_t codec_encode_dense(const Codec *codec, const floatX *x, int64_t n, void *out, int64_t cap,
                                         Stream *stream) {
    return codec_encode_fp32(codec, x, n, out, cap, stream);
}

static inline int codec_decode_dense(const Codec *codec, const void *in, int64_t n_bytes, floatX *x, int64_t n,
                                     Stream *stream) {
    return codec_decode_fp32(codec, in, n_bytes, x, n, stream);
}

#include "codec_dispatch.h" // codec_encode, codec_decode

#endif
