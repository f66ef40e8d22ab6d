// What the Codec is: which codec, its settings, which message it makes, and how long a message may be. Part of codec.h
// and codec.cuh; each codec's own bytes are drawn in its header.
//
//   dense    n*H values in order: `none`, and whatever is not compressed
//   mask     n*K values: of each token those of its mask (mask.h), in the mask's order, and nothing else; the receiver
//            multiplies them by `scale` and fills the rest with zeros. Gradients pass the same way: the masked function
//            is h~ = scale * mask * h, so dL/dh = scale * mask * dL/dh~
// A value is a little-endian bf16 (rounded to nearest even) or fp32. The length follows from n, H, the codec and what
// both ends remember; decode takes any bytes of that length and refuses all others.
//
// How to add a codec: a kind and its name below, codec_row_bytes or codec_cap, a line in the switches of codec.h,
// codec.cuh and codec_end.h, and the pair of headers with its ops.
#ifndef LLMC_CODEC_FORMAT_H
#define LLMC_CODEC_FORMAT_H

#include <math.h>   // sqrt, floor
#include <stddef.h> // NULL
#include <stdint.h> // fixed-width integers
#include <stdio.h>  // snprintf

#include "error.h" // error_set
#include "klt_table.h"
#include "mask_set.h"    // MaskKey, mask_kept
#include "quant_group.h" // QuantRow, quant_row_bytes
#include "topk_row.h"    // topk_kept, topk_set_bytes

typedef enum { WIRE_BF16, WIRE_FP32 } Wire;

typedef enum { MASK_SCALE_NONE, MASK_SCALE_SQRT, MASK_SCALE_INVERSE } MaskScale; // survivors * 1, sqrt(H/K), H/K

typedef enum {
    CODEC_MASK,
    CODEC_NONE,
    CODEC_QUANT8,
    CODEC_QUANT4,
    CODEC_TOPK,
    CODEC_BOTTLENECK,
    CODEC_AQSGD,
    CODEC_TAHQUANT,
    CODEC_KLT,
    CODEC_KINDS,
} CodecKind;

// The kinds in words, in their order.
#define CODEC_NAMES "mask|none|quant8|quant4|topk|bottleneck|aqsgd|tahquant|klt"

static inline const char *codec_name(CodecKind kind) {
    static const char *const names[CODEC_KINDS] = {"mask",       "none",  "quant8",   "quant4", "topk",
                                                   "bottleneck", "aqsgd", "tahquant", "klt"};
    return names[kind];
}

// The same on all cells.
typedef struct {
    CodecKind kind;
    Wire wire;
    float mask_rate;   // share of the bytes not sent, [0, 1)
    float scale;       // of the values that are sent masked
    float klt_forward; // share of the bytes of both directions that states get
    uint64_t seed;
} Codec;

typedef enum { CODEC_FORWARD, CODEC_BACKWARD } CodecDirection;

// Which message it is. The first four name the mask, of both directions.
typedef struct {
    int boundary, replica, micro_batch;
    int64_t step;
    int masked; // 0: dense whatever the codec, for passes that are not compressed
    CodecDirection direction;
    int training;           // 0: a pass without a backward, of which no end remembers anything
    int T;                  // tokens of a sequence
    const int64_t *samples; // (n / T) which window of the training data each sequence is; NULL where training is 0
    const uint32_t *tokens; // (n) what each row was made from, on the host; NULL where nobody knows
} CodecContext;

// The context of a message that goes forward and that nobody remembers.
static inline CodecContext codec_context(int boundary, int replica, int micro_batch, int64_t step, int masked) {
    CodecContext context = {boundary, replica, micro_batch, step, masked, CODEC_FORWARD, 0, 0, NULL, NULL};
    return context;
}

// A mask codec for rows of H values; another kind and klt's share are set afterwards.
static inline void codec_init(Codec *codec, int H, float mask_rate, MaskScale mask_scale, Wire wire, uint64_t seed) {
    double ratio = (double)H / mask_kept(mask_rate, H);
    codec->kind = CODEC_MASK, codec->wire = wire;
    codec->mask_rate = mask_rate;
    codec->scale = mask_scale == MASK_SCALE_INVERSE ? (float)ratio
                   : mask_scale == MASK_SCALE_SQRT  ? (float)sqrt(ratio)
                                                    : 1.0f;
    codec->seed = seed, codec->klt_forward = 0.5f;
}

// Bytes of a value on the wire.
static inline int64_t codec_size(const Codec *codec) {
    return codec->wire == WIRE_FP32 ? 4 : 2;
}

// 1 if the message is dense whatever its values.
static inline int codec_is_dense(const Codec *codec, const CodecContext *context, int H) {
    int whole = codec->kind == CODEC_MASK && mask_kept(codec->mask_rate, H) == H;
    return !context->masked || codec->kind == CODEC_NONE || whole;
}

// Values of a token on the wire of dense and masked messages. H of them means dense.
static inline int codec_values(const Codec *codec, const CodecContext *context, int H) {
    return codec_is_dense(codec, context, H) ? H : mask_kept(codec->mask_rate, H);
}

// Bytes of a token that -p leaves.
static inline int64_t codec_budget(const Codec *codec, int H) {
    return (int64_t)floor((1.0 - (double)codec->mask_rate) * (double)codec_size(codec) * H + 1e-3); // p is a float
}

// The same without rounding, for a codec whose messages have any length.
static inline double codec_exact_budget(const Codec *codec, int H) {
    return (1.0 - (double)codec->mask_rate) * (double)codec_size(codec) * H;
}

// What klt may send of a token in a direction, in the mean of its messages.
static inline double codec_klt_budget(const Codec *codec, CodecDirection direction, int H) {
    double forward = 2.0 * (double)codec->klt_forward;
    return codec_exact_budget(codec, H) * (direction == CODEC_FORWARD ? forward : 2.0 - forward);
}

// K of topk: what the budget holds, sets included.
static inline int codec_topk_kept(const Codec *codec, int H) {
    return topk_kept(codec_budget(codec, H), codec_size(codec), H);
}

// The quantized rows of a codec that has them: quant8, quant4; aqsgd, where the rows are differences; tahquant (after
// He et al., "TAH-Quant", 2025), forward 2 bits that go where groups need them, backward 8 bits of rotated groups.
static inline QuantRow codec_quant_row(const Codec *codec, CodecDirection direction, int H) {
    int forward = direction == CODEC_FORWARD, tiles = codec->kind == CODEC_TAHQUANT;
    int bits = codec->kind == CODEC_QUANT8 ? 8 : codec->kind == CODEC_QUANT4 ? 4 : forward ? 2 : 8;
    QuantRow row = {H, bits, tiles && forward, tiles && !forward};
    return row;
}

// Bytes of a token of a message that is not dense (aqsgd: of a window that was seen before).
static inline int64_t codec_row_bytes(const Codec *codec, CodecDirection direction, int H) {
    switch (codec->kind) {
    case CODEC_MASK:
    case CODEC_BOTTLENECK: return mask_kept(codec->mask_rate, H) * codec_size(codec);
    case CODEC_TOPK:
        return codec_topk_kept(codec, H) * codec_size(codec) +
               (direction == CODEC_FORWARD ? topk_set_bytes(codec_topk_kept(codec, H), H) : 0);
    case CODEC_QUANT8:
    case CODEC_QUANT4:
    case CODEC_AQSGD:
    case CODEC_TAHQUANT: return quant_row_bytes(H, codec_quant_row(codec, direction, H).bits);
    case CODEC_KLT: return (int64_t)floor(codec_klt_budget(codec, direction, H) + 1e-3);
    default: return H * codec_size(codec);
    }
}

// Size of a message of n tokens: exact for the codecs whose messages all have one.
static inline int64_t codec_bytes(const Codec *codec, const CodecContext *context, int n, int H) {
    return n *
           (codec_is_dense(codec, context, H) ? H * codec_size(codec) : codec_row_bytes(codec, context->direction, H));
}

// The most bytes a message of n tokens can have, compressed or dense.
static inline int64_t codec_cap(const Codec *codec, int n, int H) {
    int64_t forward = codec_row_bytes(codec, CODEC_FORWARD, H), backward = codec_row_bytes(codec, CODEC_BACKWARD, H);
    int64_t most = H * codec_size(codec);
    if (forward > most) most = forward;
    if (backward > most) most = backward;
    if (codec->kind != CODEC_KLT) return n * most;
    double budget = fmax(codec_klt_budget(codec, CODEC_FORWARD, H), codec_klt_budget(codec, CODEC_BACKWARD, H));
    int64_t coded = klt_most_bytes(budget, n);
    return coded > n * most ? coded : n * most;
}

// The codec and its rate for rows of H values, in words.
static inline void codec_describe(char *text, size_t size, const Codec *codec, int H) {
    static const char *const wires[] = {"bf16", "fp32"};
    if (codec->kind == CODEC_MASK)
        snprintf(text, size, "mask: %d of %d values a boundary and token (%s)", mask_kept(codec->mask_rate, H), H,
                 wires[codec->wire]);
    else
        snprintf(text, size, "%s: %lld bytes forward, %lld backward a boundary and token", codec_name(codec->kind),
                 (long long)codec_row_bytes(codec, CODEC_FORWARD, H),
                 (long long)codec_row_bytes(codec, CODEC_BACKWARD, H));
}

// The share of a dense message's bytes that is not sent, mean of both directions.
static inline float codec_rate(const Codec *codec, int H) {
    double sent = (double)(codec_row_bytes(codec, CODEC_FORWARD, H) + codec_row_bytes(codec, CODEC_BACKWARD, H));
    if (codec->kind == CODEC_MASK) return codec->mask_rate;
    return (float)fmax(0.0, 1.0 - sent / (2.0 * H * (double)codec_size(codec)));
}

// 0, or -1 with a message: the codec cannot meet the budget, (1 - mask_rate) of a dense message, or needs one.
static inline int codec_check(const Codec *codec, int H) {
    if (codec->kind == CODEC_NONE && codec->mask_rate > 0.0f)
        return error_set("--codec none sends all there is; leave out -p, or choose another codec");
    int takes_budget = codec->kind == CODEC_TOPK || codec->kind == CODEC_BOTTLENECK || codec->kind == CODEC_KLT;
    if (takes_budget && codec->mask_rate == 0.0f)
        return error_set("--codec %s sends what -p leaves; give -p, such as 0.95", codec_name(codec->kind));
    if (codec->kind == CODEC_TOPK && codec_topk_kept(codec, H) == 0)
        return error_set("--codec topk: -p %g leaves %lld bytes of a token's %d values, too few for one and its index",
                         (double)codec->mask_rate, (long long)codec_budget(codec, H), H);
    if (H > QUANT_GROUP * QUANT_MAX_GROUPS)
        return error_set("--codec %s: %d values of a token, at most %d are possible", codec_name(codec->kind), H,
                         QUANT_GROUP * QUANT_MAX_GROUPS);
    int64_t forward = codec_row_bytes(codec, CODEC_FORWARD, H), backward = codec_row_bytes(codec, CODEC_BACKWARD, H);
    int64_t most = forward > backward ? forward : backward;
    if (codec->kind >= CODEC_QUANT8 && !takes_budget && codec->mask_rate > 0.0f && most > codec_budget(codec, H))
        return error_set(
            "--codec %s has a rate of its own, %lld bytes a token, and -p %g leaves %lld; leave out -p, or "
            "choose another codec",
            codec_name(codec->kind), (long long)most, (double)codec->mask_rate, (long long)codec_budget(codec, H));
    return 0;
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
