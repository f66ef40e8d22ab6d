// What a message of the Codec is: its values, its size, and which mask it was made with. Part of codec.h and codec.cuh.
//
//   dense    n*H values in order
//   masked   n*K values: of each token those of its mask (mask.h), in the mask's order, and nothing else; the receiver
//            multiplies them by `scale` and fills the rest with zeros. Gradients pass the same way: the masked function
//            is h~ = scale * mask * h, so dL/dh = scale * mask * dL/dh~
// A value is a little-endian bf16 (rounded to nearest even) or fp32. The length follows from n, H and the codec alone;
// decode takes any bytes of that length and refuses all others.
#ifndef LLMC_CODEC_FORMAT_H
#define LLMC_CODEC_FORMAT_H

#include <math.h>   // sqrt
#include <stdint.h> // fixed-width integers

#include "error.h"    // error_set
#include "mask_set.h" // MaskKey, mask_kept

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

// Bytes of a value on the wire.
static inline int64_t codec_size(const Codec *codec) {
    return codec->wire == WIRE_FP32 ? 4 : 2;
}

// Values of a token on the wire. H of them means dense.
static inline int codec_values(const Codec *codec, const CodecContext *context, int H) {
    return context->masked ? mask_kept(codec->mask_rate, H) : H;
}

// Exact size of a message of n tokens.
static inline int64_t codec_bytes(const Codec *codec, const CodecContext *context, int n, int H) {
    return (int64_t)n * codec_values(codec, context, H) * codec_size(codec);
}

static inline MaskKey codec_key(const Codec *codec, const CodecContext *context) {
    MaskKey key = {codec->seed, context->replica, context->boundary, context->step, context->micro_batch};
    return key;
}

// 0, or -1 with a message: n_bytes do not fit into cap.
static inline int codec_fits(int64_t n_bytes, int64_t cap) {
    if (n_bytes <= cap) return 0;
    return error_set("codec: the message has %lld bytes, the buffer %lld", (long long)n_bytes, (long long)cap);
}

// 0, or -1 with a message: n_bytes is not what such a message has.
static inline int codec_is_whole(int64_t n_bytes, int64_t expected) {
    if (n_bytes == expected) return 0;
    return error_set("codec: a message of %lld bytes where %lld are expected", (long long)n_bytes, (long long)expected);
}

#endif
