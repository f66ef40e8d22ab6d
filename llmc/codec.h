// The Codec, CPU: turns a boundary tensor x (n, H) into the bytes of a message and back.
//
//   dense    n*H values in order
//   masked   n*K values: of each token those of its mask (mask.h), in the mask's order, and nothing else; the receiver
//            multiplies them by `scale` and fills the rest with zeros. Gradients pass the same way: the masked function
//            is h~ = scale * mask * h, so dL/dh = scale * mask * dL/dh~
// A value is a little-endian bf16 (rounded to nearest even) or fp32. The length follows from n, H and the codec alone;
// decode takes any bytes of that length and refuses all others.
//
//   Codec codec;  codec_init(&codec, H, 0.95f, MASK_SCALE_NONE, WIRE_BF16, seed);
//   CodecContext context = {boundary, replica, micro_batch, step, 1};
//   int64_t n_bytes = codec_encode(&codec, &context, x, n, H, out, cap, stream);     // on one cell
//   if (codec_decode(&codec, &context, out, n_bytes, x, n, H, stream)) return -1;    // on the other
//
// Index, gather and rounding are one loop: there is no array of indices and no copy in fp32.
#ifndef LLMC_CODEC_H
#define LLMC_CODEC_H

#include <math.h>   // sqrt
#include <stdint.h> // fixed-width integers
#include <string.h> // memcpy, memset

#include "device.h" // Stream
#include "dtype.h"  // bf16_of_float, float_of_bf16
#include "error.h"  // error_set
#include "mask.h"   // mask_kept, mask_set, mask_lanes

typedef enum { WIRE_BF16, WIRE_FP32 } Wire;

typedef enum { MASK_SCALE_NONE, MASK_SCALE_SQRT, MASK_SCALE_INVERSE } MaskScale; // survivors * 1, sqrt(H/K), H/K

typedef struct {
    Wire wire;
    float mask_rate; // share of the values not sent, [0, 1)
    float scale;     // of the values that are sent masked
    uint64_t seed;
} Codec;

// Which message it is: the mask's key but for the seed. Direction is not in it: both take the same mask.
typedef struct {
    int boundary, replica, micro_batch;
    int64_t step;
    int masked; // 0: dense whatever the rate, for passes without a mask
} CodecContext;

// A codec for rows of H values.
static inline void codec_init(Codec *codec, int H, float mask_rate, MaskScale mask_scale, Wire wire, uint64_t seed) {
    double ratio = (double)H / mask_kept(mask_rate, H);
    codec->wire = wire;
    codec->mask_rate = mask_rate;
    codec->scale = mask_scale == MASK_SCALE_INVERSE ? (float)ratio
                   : mask_scale == MASK_SCALE_SQRT  ? (float)sqrt(ratio)
                                                    : 1.0f;
    codec->seed = seed;
}

// Values of a token on the wire. H of them means dense.
static inline int codec_values(const Codec *codec, const CodecContext *context, int H) {
    return context->masked ? mask_kept(codec->mask_rate, H) : H;
}

// Exact size of a message of n tokens.
static inline int64_t codec_bytes(const Codec *codec, const CodecContext *context, int n, int H) {
    return (int64_t)n * codec_values(codec, context, H) * (codec->wire == WIRE_FP32 ? 4 : 2);
}

static inline MaskKey codec_key(const Codec *codec, const CodecContext *context) {
    MaskKey key = {codec->seed, context->replica, context->boundary, context->step, context->micro_batch};
    return key;
}

// Value i of a row on the wire. The row may lie at any address.
static inline void codec_put(char *row, int i, float value, Wire wire) {
    if (wire == WIRE_FP32) {
        memcpy(row + (size_t)i * 4, &value, 4);
    } else {
        uint16_t half = bf16_of_float(value);
        memcpy(row + (size_t)i * 2, &half, 2);
    }
}

static inline float codec_get(const char *row, int i, Wire wire) {
    float value;
    uint16_t half;
    if (wire == WIRE_FP32) {
        memcpy(&value, row + (size_t)i * 4, 4);
        return value;
    }
    memcpy(&half, row + (size_t)i * 2, 2);
    return float_of_bf16(half);
}

// Writes x (n, H) as a message into out. Returns its bytes, codec_bytes() of them, or -1: they are more than cap, or
// the context of a masked message is out of range (mask_check).
static inline int64_t codec_encode(const Codec *codec, const CodecContext *context, const float *x, int n, int H,
                                   void *out, int64_t cap, Stream *stream) {
    int K = codec_values(codec, context, H);
    int64_t n_bytes = codec_bytes(codec, context, n, H), row_bytes = codec_bytes(codec, context, 1, H);
    MaskKey key = codec_key(codec, context);
    Wire wire = codec->wire;
    if (K < H && mask_check(key, n, H)) return -1;
    if (n_bytes > cap)
        return error_set("codec: the message has %lld bytes, the buffer %lld", (long long)n_bytes, (long long)cap);
#pragma omp parallel for num_threads(stream->threads)
    for (int token = 0; token < n; token++) {
        const float *from = x + (size_t)token * H;
        char *row = (char *)out + token * row_bytes;
        if (K == H) {
            for (int i = 0; i < H; i++) codec_put(row, i, from[i], wire);
        } else {
            MaskSet set = mask_set(key, token, H);
            uint16_t dim[MASK_LANES];
            for (int i = 0; i < K; i++) {
                if (i % MASK_LANES == 0) mask_lanes(dim, &set, i, K);
                codec_put(row, i, from[dim[i % MASK_LANES]], wire);
            }
        }
    }
    return n_bytes;
}

// x (n, H) = the message `in`. Returns 0, or -1 with x untouched: n_bytes is not the size of such a message, or the
// context of a masked message is out of range.
static inline int codec_decode(const Codec *codec, const CodecContext *context, const void *in, int64_t n_bytes,
                               float *x, int n, int H, Stream *stream) {
    int K = codec_values(codec, context, H);
    int64_t expected = codec_bytes(codec, context, n, H), row_bytes = codec_bytes(codec, context, 1, H);
    MaskKey key = codec_key(codec, context);
    Wire wire = codec->wire;
    if (K < H && mask_check(key, n, H)) return -1;
    if (n_bytes != expected)
        return error_set("codec: a message of %lld bytes where %d tokens take %lld", (long long)n_bytes, n,
                         (long long)expected);
#pragma omp parallel for num_threads(stream->threads)
    for (int token = 0; token < n; token++) {
        const char *row = (const char *)in + token * row_bytes;
        float *to = x + (size_t)token * H;
        if (K == H) {
            for (int i = 0; i < H; i++) to[i] = codec_get(row, i, wire);
        } else {
            MaskSet set = mask_set(key, token, H);
            uint16_t dim[MASK_LANES];
            memset(to, 0, sizeof(float) * (size_t)H);
            for (int i = 0; i < K; i++) {
                if (i % MASK_LANES == 0) mask_lanes(dim, &set, i, K);
                to[dim[i % MASK_LANES]] = codec->scale * codec_get(row, i, wire);
            }
        }
    }
    return 0;
}

#endif
