// Groups of 64 values of a row that share a scale, as codes of a few bits. Part of codec_quant.h and its twin: CPUs and
// GPUs find the same codes.
//
//   scale   the group's largest |x| as bf16, nearest even
//   level   from 4 bits on the nearest of 2^bits - 1 levels, one of them 0:  m = round(x/scale * L), |m| <= L,
//           L = 2^(bits-1) - 1, x ~ m * scale/L, off by at most scale/(2L)
//           of 1 to 3 bits the middle of one of 2^bits cells of [-scale, scale]:  m odd, |m| < 2^bits, x ~ m *
//           scale/2^bits, off by at most scale/2^bits
//           of 0 bits m = 0
//   code    of 4 bits and more m + 2^(bits-1), of fewer (m + 2^bits - 1) / 2
// (off: and by the scale's own rounding, 2^-9 of it.) A value that is not finite makes its group's scale infinite or
// NaN and all that is decoded of the group too: what went wrong before the wire shows behind it.
//
//   message   bytes                    n rows of G = ceil(H/64) groups
//   scales    2*n*G                    little-endian bf16, row after row
//   codes     n*ceil(H*bits/8)         groups without gaps, lowest bits first; a full group has 8*bits bytes, a short
//                                      last one is filled up to whole bytes with zeros
//
// Two variants, both of full groups only (a short last one has `bits`, and stands as it is):
//   adaptive   groups have 0 to 4 bits, `bits` on average: from the scales, which the receiver has, one more bit at a
//              time for the group with the largest scale/2^bits. Row sizes stay the same.
//   rotated    y = Hadamard_64 x / 8 is sent instead of x: an outlier spreads over its group. Levels are rotated back
//              as integers, so that nothing is rounded on the way and CPUs and GPUs agree.
#ifndef LLMC_QUANT_GROUP_H
#define LLMC_QUANT_GROUP_H

#include <float.h>  // FLT_MAX
#include <math.h>   // rintf, floorf
#include <stdint.h> // fixed-width integers
#include <string.h> // memcpy

#include "dtype.h"    // bf16_of_float, float_of_bits
#include "portable.h" // HOST_DEVICE

#define QUANT_GROUP      64
#define QUANT_OCTET      8    // values whose codes are whole bytes
#define QUANT_MAX_GROUPS 1024 // of a row: H is at most 65536
#define QUANT_MAX_BITS   4    // of adaptive groups

// A row's values, bits and variants.
typedef struct {
    int H, bits, adaptive, rotated;
} QuantRow;

static inline HOST_DEVICE int quant_groups(int H) {
    return (H + QUANT_GROUP - 1) / QUANT_GROUP;
}

// Bytes of the codes of a row.
static inline HOST_DEVICE int64_t quant_code_bytes(int H, int bits) {
    return ((int64_t)H * bits + 7) / 8;
}

// Bytes of a row, scales and codes.
static inline int64_t quant_row_bytes(int H, int bits) {
    return 2 * quant_groups(H) + quant_code_bytes(H, bits);
}

// |x| as an integer that orders as it does; infinity and NaN are the largest.
static inline HOST_DEVICE uint32_t quant_size(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits & 0x7FFFFFFFu;
}

// A scale that came over the wire: its sign does not count.
static inline HOST_DEVICE float quant_scale(uint16_t bits) {
    return float_of_bf16(bits & 0x7FFFu);
}

// What a level counts in.
static inline HOST_DEVICE float quant_step(float scale, int bits) {
    return bits == 0 ? scale : scale / (float)(bits >= 4 ? (1 << (bits - 1)) - 1 : 1 << bits);
}

static inline HOST_DEVICE int quant_clamp(int value, int low, int high) {
    return value < low ? low : value > high ? high : value;
}

static inline HOST_DEVICE int quant_level(float x, float scale, int bits) {
    int cells = 1 << bits, most = bits >= 4 ? cells / 2 - 1 : cells - 1;
    float ratio = scale > 0.0f && scale <= FLT_MAX ? x / scale : 0.0f;
    if (bits == 0) return 0;
    if (bits >= 4) return quant_clamp((int)rintf(ratio * (float)most), -most, most);
    return 2 * quant_clamp((int)floorf((ratio + 1.0f) * (float)(cells / 2)), 0, most) - most;
}

static inline HOST_DEVICE int quant_code(int level, int bits) {
    return bits >= 4 ? level + (1 << (bits - 1)) : (level + (1 << bits) - 1) / 2;
}

// Any code has a level: a hostile one is at most one level beyond the largest.
static inline HOST_DEVICE int quant_level_of(int code, int bits) {
    return bits >= 4 ? code - (1 << (bits - 1)) : 2 * code + 1 - (1 << bits);
}

// to =: the codes of count <= 8 levels, in (count * bits + 7) / 8 bytes.
static inline HOST_DEVICE void quant_put(unsigned char *to, const int *level, int count, int bits) {
    uint64_t word = 0;
    for (int j = 0; j < count && bits > 0; j++) word |= (uint64_t)quant_code(level[j], bits) << (j * bits);
    for (int b = 0; b < (count * bits + 7) / 8; b++) to[b] = (unsigned char)(word >> (8 * b));
}

static inline HOST_DEVICE void quant_get(int *level, const unsigned char *from, int count, int bits) {
    uint64_t word = 0;
    for (int b = 0; b < (count * bits + 7) / 8; b++) word |= (uint64_t)from[b] << (8 * b);
    for (int j = 0; j < count; j++)
        level[j] = bits == 0 ? 0 : quant_level_of((int)(word >> (j * bits) & ((1u << bits) - 1)), bits);
}

// Which group gets the next bit: the one whose rank is the largest. 0: this one has all it may have.
static inline HOST_DEVICE uint32_t quant_rank(uint16_t scale_bits, int bits, int group) {
    if (bits == QUANT_MAX_BITS) return 0;
    uint32_t halved = (scale_bits & 0x7FFFu) + 0x80u * (uint32_t)(QUANT_MAX_BITS - bits); // a bit halves: exponent - 1
    return (halved + 1) << 16 | (0xFFFFu - (uint32_t)group);
}

static inline HOST_DEVICE int quant_rank_group(uint32_t rank) {
    return (int)(0xFFFFu - (rank & 0xFFFFu));
}

#endif
