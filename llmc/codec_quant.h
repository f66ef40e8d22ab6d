// Codecs quant8 and quant4, CPU: groups of 64 values with an absmax scale, each value rounded to the nearest level,
// both directions (quant_group.h has the formulas and the bytes). Other codecs take the two ops here for rows of their
// own.
//   quant_encode   out = the message of x (n, H), overwritten
//   quant_decode   x (n, H) = what arrives, overwritten
#ifndef LLMC_CODEC_QUANT_H
#define LLMC_CODEC_QUANT_H

#include <stdint.h> // fixed-width integers
#include <string.h> // memcpy

#include "codec_format.h" // Codec, codec_fits, codec_is_whole, codec_quant_row
#include "device.h"       // floatX, Stream
#include "quant_group.h"  // QuantRow, quant_level

static inline int quant_group_size(int H, int group) {
    return H - group * QUANT_GROUP < QUANT_GROUP ? H - group * QUANT_GROUP : QUANT_GROUP;
}

// bits (groups) of a row with these scales.
static inline void quant_bits(unsigned char *bits, const uint16_t *scales, QuantRow row) {
    int full = row.H / QUANT_GROUP;
    for (int g = 0; g < quant_groups(row.H); g++) bits[g] = (unsigned char)(row.adaptive && g < full ? 0 : row.bits);
    for (int left = row.adaptive ? row.bits * full : 0; left > 0; left--) {
        uint32_t best = 0;
        for (int g = 0; g < full; g++) {
            uint32_t rank = quant_rank(scales[g], bits[g], g);
            if (rank > best) best = rank;
        }
        bits[quant_rank_group(best)]++;
    }
}

// x (8, 8) := the sums and differences of its rows by a Hadamard matrix of 8, in place.
#define QUANT_ROTATE_ROWS(x)                                                                                           \
    for (int half = 1; half < QUANT_OCTET; half *= 2)                                                                  \
        for (int i = 0; i < QUANT_OCTET; i++)                                                                          \
            for (int j = 0; j < QUANT_OCTET && (i & half) == 0; j++) {                                                 \
                __typeof__((x)[0][0]) a = (x)[i][j], b = (x)[i + half][j];                                             \
                (x)[i][j] = a + b, (x)[i + half][j] = a - b;                                                           \
            }

// A function that makes x (64) Hadamard_64 x, for values of a type: within octets, then between them. Octets lie across
// the rows of a table for the first half, so that both are sums of whole rows.
#define QUANT_ROTATE(name, type)                                                                                       \
    static inline void name(type *x) {                                                                                 \
        type across[QUANT_OCTET][QUANT_OCTET], along[QUANT_OCTET][QUANT_OCTET];                                        \
        for (int i = 0; i < QUANT_OCTET; i++)                                                                          \
            for (int j = 0; j < QUANT_OCTET; j++) across[j][i] = x[i * QUANT_OCTET + j];                               \
        QUANT_ROTATE_ROWS(across)                                                                                      \
        for (int i = 0; i < QUANT_OCTET; i++)                                                                          \
            for (int j = 0; j < QUANT_OCTET; j++) along[i][j] = across[j][i];                                          \
        QUANT_ROTATE_ROWS(along)                                                                                       \
        memcpy(x, along, sizeof along);                                                                                \
    }

QUANT_ROTATE(quant_rotate, float)
QUANT_ROTATE(quant_rotate_levels, int)

// y (size) = what is sent of a group: itself, or rotated.
static inline void quant_take(float *y, const float *x, int size, int rotated) {
    memcpy(y, x, sizeof(float) * (size_t)size);
    if (!rotated || size < QUANT_GROUP) return;
    quant_rotate(y);
    for (int i = 0; i < QUANT_GROUP; i++) y[i] *= 0.125f;
}

static inline uint16_t quant_group_scale(const float *y, int size) {
    uint32_t largest = 0;
    for (int i = 0; i < size; i++) largest = quant_size(y[i]) > largest ? quant_size(y[i]) : largest;
    return bf16_of_float(float_of_bits(largest));
}

static inline void quant_put_group(unsigned char *to, const float *y, int size, float scale, int bits) {
    int level[QUANT_GROUP];
    for (int i = 0; i < size; i++) level[i] = quant_level(y[i], scale, bits);
    for (int i = 0; i < size; i += QUANT_OCTET)
        quant_put(to + i / QUANT_OCTET * bits, level + i, size - i < QUANT_OCTET ? size - i : QUANT_OCTET, bits);
}

static inline void quant_get_group(float *x, const unsigned char *from, int size, float scale, int bits, int rotated) {
    int level[QUANT_GROUP];
    float step = quant_step(scale, bits);
    for (int i = 0; i < size; i += QUANT_OCTET)
        quant_get(level + i, from + i / QUANT_OCTET * bits, size - i < QUANT_OCTET ? size - i : QUANT_OCTET, bits);
    if (rotated && size == QUANT_GROUP) {
        quant_rotate_levels(level);
        step *= 0.125f;
    }
    for (int i = 0; i < size; i++) x[i] = (float)level[i] * step;
}

// scales (groups) and codes of one row. Bits that are not adaptive are known before all scales are: one pass is enough.
static inline void quant_encode_row(uint16_t *scales, unsigned char *codes, const float *x, QuantRow row) {
    int G = quant_groups(row.H);
    unsigned char bits[QUANT_MAX_GROUPS];
    float y[QUANT_GROUP];
    for (int g = 0; g < G; g++) {
        int size = quant_group_size(row.H, g);
        quant_take(y, x + g * QUANT_GROUP, size, row.rotated);
        scales[g] = quant_group_scale(y, size);
        if (row.adaptive) continue;
        quant_put_group(codes, y, size, quant_scale(scales[g]), row.bits);
        codes += quant_code_bytes(size, row.bits);
    }
    if (!row.adaptive) return;
    quant_bits(bits, scales, row);
    for (int g = 0; g < G; codes += quant_code_bytes(quant_group_size(row.H, g), bits[g]), g++) {
        quant_take(y, x + g * QUANT_GROUP, quant_group_size(row.H, g), row.rotated);
        quant_put_group(codes, y, quant_group_size(row.H, g), quant_scale(scales[g]), bits[g]);
    }
}

// out: n * quant_row_bytes, at any address.
static inline void quant_encode(void *out, const float *x, int n, QuantRow row, Stream *stream) {
    int G = quant_groups(row.H);
    int64_t code_bytes = quant_code_bytes(row.H, row.bits);
    unsigned char *codes = (unsigned char *)out + (int64_t)n * G * 2;
#pragma omp parallel for num_threads(stream->threads)
    for (int token = 0; token < n; token++) {
        uint16_t scales[QUANT_MAX_GROUPS];
        quant_encode_row(scales, codes + token * code_bytes, x + (size_t)token * row.H, row);
        memcpy((char *)out + (size_t)token * G * 2, scales, 2 * (size_t)G);
    }
}

// in: n * quant_row_bytes, any bytes at any address.
static inline void quant_decode(float *x, const void *in, int n, QuantRow row, Stream *stream) {
    int H = row.H, G = quant_groups(H);
    int64_t code_bytes = quant_code_bytes(H, row.bits);
    const unsigned char *codes = (const unsigned char *)in + (int64_t)n * G * 2;
#pragma omp parallel for num_threads(stream->threads)
    for (int token = 0; token < n; token++) {
        const unsigned char *from = codes + token * code_bytes;
        unsigned char bits[QUANT_MAX_GROUPS];
        uint16_t scales[QUANT_MAX_GROUPS];
        memcpy(scales, (const char *)in + (size_t)token * G * 2, 2 * (size_t)G);
        quant_bits(bits, scales, row);
        for (int g = 0; g < G; from += quant_code_bytes(quant_group_size(H, g), bits[g]), g++)
            quant_get_group(x + (size_t)token * H + g * QUANT_GROUP, from, quant_group_size(H, g),
                            quant_scale(scales[g]), bits[g], row.rotated);
    }
}

// codec_encode and codec_decode of messages that are quantized rows.
static inline int64_t codec_quant_encode(const Codec *codec, const CodecContext *context, const floatX *x, int n, int H,
                                         void *out, int64_t cap, Stream *stream) {
    int64_t n_bytes = n * codec_row_bytes(codec, context->direction, H);
    if (codec_fits(n_bytes, cap)) return -1;
    quant_encode(out, x, n, codec_quant_row(codec, context->direction, H), stream);
    return n_bytes;
}

static inline int codec_quant_decode(const Codec *codec, const CodecContext *context, const void *in, int64_t n_bytes,
                                     floatX *x, int n, int H, Stream *stream) {
    if (codec_is_whole(n_bytes, n * codec_row_bytes(codec, context->direction, H))) return -1;
    quant_decode(x, in, n, codec_quant_row(codec, context->direction, H), stream);
    return 0;
}

#endif
