// How values are kept that are computed as floats: as they are, as bf16, or in 8 bits. What is the same on every
// device; reading and writing: store.h, store.cuh.
//
//   fp32   the value
//   bf16   one of the two bf16 neighbours, at random so that the mean is the value; or the nearest
//   int8   blocks of 256 values that belong together (Dettmers et al. 2022): a scale, the largest size among them, and
//          for each value the number of a level, value = sign * level * scale. The levels are dense near 1 and reach
//          down to 1e-7: in decade e = 0 .. 6 there are 2^(bits-1-e), at 10^-e * (0.1 + 0.9 j/2^(bits-1-e)), j = 1 ..,
//          and 0 is one. With a sign bits is 7, numbers -127 .. 127; without it is 8, numbers 0 .. 254.
//
// Dettmers et al. take the nearest level. Here too it is one of the two neighbours at random: a mean of squares whose
// beta2 is 0.999 moves by less than half the distance of two levels in a step, and would stand still. Without a sign a
// value above 0 never becomes 0: a second moment of 0 would make its step enormous.
//
// Random bits come from a counter: seed, step, which tensor of the whole model, which element of it. Neither threads
// nor stages nor processes change them.
#ifndef LLMC_STORE_FORMAT_H
#define LLMC_STORE_FORMAT_H

#include <math.h>   // fmaf, fabsf
#include <stdint.h> // fixed-width integers

#include "dtype.h"    // bf16_of_float
#include "portable.h" // HOST_DEVICE
#include "rand.h"     // rand_block

#define STORE_NAMES      "fp32|bf16|int8" // Store in words
#define STORE_HALF_NAMES "fp32|bf16"
#define STORE_BLOCK      256 // values that have a scale together; pieces begin at multiples of it

typedef enum { STORE_FP32, STORE_BF16, STORE_INT8 } Store;

// Values in tensor memory as they are kept.
typedef struct {
    void *data;    // (n) float, uint16_t, int8_t or uint8_t
    float *scales; // (n / STORE_BLOCK, rounded up) of int8, else not used
    Store store;
    int is_signed; // int8: numbers of levels have a sign
} Stored;

// What is rounded: the first number of each of a tensor's uses of random bits.
typedef enum { ROUND_PARAM, ROUND_M, ROUND_V, ROUND_ANCHOR } RoundUse;

// Whose random bits a value is rounded with.
typedef struct {
    uint64_t seed, step;
    uint32_t sub; // of the tensor and its use
    int nearest;  // 1: none, the nearest is taken
} Rounding;

static inline Rounding rounding_of(uint64_t seed, int tensor, RoundUse use, int64_t step) {
    Rounding rounding = {seed, (uint64_t)step, (uint32_t)tensor * 8 + (uint32_t)use, 0};
    return rounding;
}

static inline Rounding rounding_nearest(void) {
    Rounding rounding = {0, 0, 0, 1};
    return rounding;
}

static inline Stored stored_floats(float *values) {
    Stored stored = {values, NULL, STORE_FP32, 1};
    return stored;
}

// Bytes that n values take, without alignment.
static inline int64_t store_bytes(Store store, int64_t n) {
    return store == STORE_FP32 ? 4 * n : store == STORE_BF16 ? 2 * n : n + (n + STORE_BLOCK - 1) / STORE_BLOCK * 4;
}

static inline Dtype store_dtype(Store store, int is_signed) {
    return store == STORE_FP32 ? DTYPE_F32 : store == STORE_BF16 ? DTYPE_BF16 : is_signed ? DTYPE_I8 : DTYPE_U8;
}

// 16 random bits of element i of a tensor. 32 numbers of the generator serve a block: its first words the first 64
// elements, two each, and so on.
static inline HOST_DEVICE uint32_t rounding_bits(const Rounding *r, uint64_t i) {
    if (r->nearest) return 32768;
    uint64_t number = i / STORE_BLOCK * 32 + i % 64 / 2;
    Philox block = rand_block(r->seed, RAND_ROUND, r->sub, r->step << 32 | number);
    return block.v[i % STORE_BLOCK / 64] >> (i % 2 * 16) & 0xFFFFu;
}

// One of the two bf16 neighbours of a float of these bits: 16 random bits decide, so that the mean is the float.
// Infinity and NaN stay what they are.
static inline HOST_DEVICE uint16_t bf16_stochastic(uint32_t bits, uint32_t random) {
    uint32_t is_special = (bits & 0x7F800000u) == 0x7F800000u, is_nan = (bits & 0x7FFFFFFFu) > 0x7F800000u;
    return (uint16_t)(((bits + (is_special ? 0 : random)) >> 16) | (is_nan ? 0x40u : 0));
}

// Level number k >= 0. Each line is one rounding at most, so every device and compiler finds the same floats; without a
// table, whose look-ups cost ten times as much.
static inline HOST_DEVICE float store_level(int k, int is_signed) {
    float first = is_signed ? 1.0f : 2.0f, n = 64.0f * first, size = 1.0f; // levels of the decade, 10^e
    float q = (float)k + first - 1.0f;                                     // n <= q < 2n in its decade
    for (int e = 0; e < 6; e++) {
        int below = q < n;
        n = below ? 0.5f * n : n;
        size = below ? 10.0f * size : size;
    }
    float j = q + 1.0f - n, level = (n + 9.0f * j) / (10.0f * n * size); // whole numbers below 2^24
    return k > 0 ? level : 0.0f;
}

// The number of a level for x in [0, 1]: of one of the two beside it, the upper one with the probability that makes the
// mean x; 16 random bits say which.
static inline HOST_DEVICE int store_number(float x, int is_signed, uint32_t random) {
    float first = is_signed ? 1.0f : 2.0f, n = 64.0f * first, size = 10.0f, top = 1.0f;
    for (int e = 0; e < 6; e++) {
        top *= 0.1f;
        int below = x <= top;
        n = below ? 0.5f * n : n;
        size = below ? 10.0f * size : size;
    }
    float scaled = x * size, at = fmaf(scaled, n / 9.0f, -n / 9.0f); // how many levels of the decade are below
    float lowest = scaled * (is_signed ? 0.1f : 0.18181818f);        // the same between 0 and the first of all
    at = n == first && at < 1.0f ? (lowest < 1.0f ? lowest : 1.0f) : at;
    at += ((float)random + 0.5f) * 0x1p-16f;
    at = at < n ? at : n;
    return (int)(n - first) + (int)at;
}

// The code of a value whose block's largest size is `scale` > 0, or all of it 0. Infinity and NaN give any code.
static inline HOST_DEVICE uint8_t store_code(float value, float scale, int is_signed, uint32_t random) {
    float size = fabsf(value), x = size / scale;
    int k = store_number(x <= 1.0f ? x : 1.0f, is_signed, random), positive = k == 0 && size > 0.0f ? 1 : k;
    return (uint8_t)(!is_signed ? positive : value < 0.0f ? -k : k);
}

static inline HOST_DEVICE float store_value(uint8_t code, float scale, int is_signed) {
    int k = is_signed ? (int8_t)code : code;
    float level = store_level(k < 0 ? -k : k, is_signed);
    return (k < 0 ? -level : level) * scale;
}

#endif
