// Which values of a token the boundary mask keeps: K of its H. Sender and receiver each compute it, so no index
// travels. Integer arithmetic only: every CPU and GPU finds the same set. Part of mask.h and mask.cuh.
//
//   set(token) = { perm(0), ..., perm(K-1) },  perm a permutation of [0, H) keyed by (seed, replica, boundary, step,
//                                              micro-batch, token); the order is that of the values on the wire
//
// The key: one Philox block a token, from the 64 bits of the seed and this counter.
//   word     bits  field
//   index    0-35  step            < 2^36
//           36-47  replica         < 4096
//           48-59  boundary        < 4096
//           60-63  micro-batch, low 4 bits
//   sub       0-7  micro-batch, high 8 bits: < 4096
//            8-31  token           < 2^24
// The permutation: MASK_ROUNDS rounds of x = (x + add) * odd mod 2^b; x ^= x >> ceil(b/2), b = ceil(log2 H) in [8, 16],
// repeated until x < H (cycle walking, under two turns on average for H > 128). Chi-square over pairs of dims, H 256,
// K 2, asked for the rounds: 3 of them are 43 standard deviations off after 3 million tokens, 4 are 17 off after 20
// million, 5 and 6 show nothing; the sixth is margin. On fewer than 8 bits even 6 are off, so small H walk further.
// 16 bits are enough for any hidden size.
#ifndef LLMC_MASK_SET_H
#define LLMC_MASK_SET_H

#include <math.h>   // lround
#include <stdint.h> // fixed-width integers

#include "error.h"    // error_set
#include "portable.h" // HOST_DEVICE
#include "rand.h"     // rand_block

#define MASK_ROUNDS   6
#define MASK_MIN_BITS 8

typedef struct {
    uint64_t seed;
    int replica, boundary;
    int64_t step;
    int micro_batch;
} MaskKey;

// One token's permutation of [0, H).
typedef struct {
    int H;
    uint16_t low_bits, shift; // low_bits: 2^b - 1
    uint16_t add[MASK_ROUNDS], odd[MASK_ROUNDS];
} MaskSet;

// K: how many of H values survive when the share p is dropped. round((1-p)*H), halves away from zero, in [1, H].
static inline int mask_kept(float p, int H) {
    long kept = lround((1.0 - (double)p) * H);
    return kept < 1 ? 1 : kept > H ? H : (int)kept;
}

// 0 if the key, n tokens and H fit the fields above, else -1: a truncated key would repeat another's masks.
static inline int mask_check(MaskKey key, int n, int H) {
    if (H < 1 || H > 1 << 16) return error_set("mask: %d hidden dims: 1 to 65536 are possible", H);
    if (key.replica >> 12 || key.boundary >> 12 || key.micro_batch >> 12 || key.step >> 36 || n < 0 || n > 1 << 24)
        return error_set(
            "mask: replica %d, boundary %d, step %lld, micro-batch %d, %d tokens: below 4096, 4096, 2^36, "
            "4096 and at most 2^24 are possible; with more micro-batches than that use a larger --micro-batch",
            key.replica, key.boundary, (long long)key.step, key.micro_batch, n);
    return 0;
}

// The set of one token. All has passed mask_check.
static inline HOST_DEVICE MaskSet mask_set(MaskKey key, int token, int H) {
    int bits = MASK_MIN_BITS;
    while (H > 1 << bits) bits++;
    MaskSet set = {H, (uint16_t)((1u << bits) - 1), (uint16_t)((bits + 1) / 2), {0}, {0}};
    uint64_t index = (uint64_t)key.step | (uint64_t)key.replica << 36 | (uint64_t)key.boundary << 48 |
                     (uint64_t)key.micro_batch << 60;
    uint32_t sub = (uint32_t)key.micro_batch >> 4 | (uint32_t)token << 8;
    Philox block = rand_block(key.seed, RAND_MASK, sub, index);
    for (int round = 0; round < MASK_ROUNDS; round++) {
        uint32_t word = block.v[round & 3];
        if (round >= 4) word = word << 8 | word >> 24; // the block's words again, other bits of them in each place
        set.add[round] = (uint16_t)(word >> 16);
        set.odd[round] = (uint16_t)(word | 1);
    }
    return set;
}

// One turn of the walk: a permutation of [0, 2^b).
static inline HOST_DEVICE uint16_t mask_turn(const MaskSet *set, uint16_t x) {
    for (int round = 0; round < MASK_ROUNDS; round++) {
        x = (uint16_t)(((uint32_t)x + set->add[round]) * set->odd[round]) & set->low_bits;
        x ^= (uint16_t)(x >> set->shift);
    }
    return x;
}

// perm(i), 0 <= i < H: the dim that value i of the token belongs to.
static inline HOST_DEVICE int mask_index(const MaskSet *set, int i) {
    uint16_t x = (uint16_t)i;
    do x = mask_turn(set, x);
    while (x >= set->H);
    return x;
}

#endif
