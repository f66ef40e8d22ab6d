// The boundary mask, CPU: which K of a token's H values survive. Sender and receiver each compute it, so no index
// travels. Integer arithmetic only: every CPU and GPU finds the same set.
//
//   set(token) = { perm(0), ..., perm(K-1) },  perm a permutation of [0, H) keyed by (seed, replica, boundary, step,
//                                              micro-batch, token); the order is that of the values on the wire
//   gather   values[n,i] = x[n, perm_n(i)]                                                values overwritten
//   scatter  x[n, perm_n(i)] = scale * values[n,i], 0 elsewhere                           x overwritten
// The masked function is scatter(gather(x)); its gradient is the same two ops, so the backward message has the same K
// positions as the forward one.
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
// 16 bits are enough for any hidden size, and twice the lanes of 32: MASK_LANES outputs are made together.
#ifndef LLMC_MASK_H
#define LLMC_MASK_H

#include <math.h>   // lround
#include <stddef.h> // size_t
#include <stdint.h> // fixed-width integers
#include <string.h> // memset

#include "device.h" // Stream
#include "error.h"  // error_set
#include "rand.h"   // rand_block

#define MASK_ROUNDS   6
#define MASK_MIN_BITS 8
#define MASK_LANES    64 // of 16, 32, 64, 128 the fastest for K 38 and 77

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
static inline MaskSet mask_set(MaskKey key, int token, int H) {
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
static inline uint16_t mask_turn(const MaskSet *set, uint16_t x) {
    for (int round = 0; round < MASK_ROUNDS; round++) {
        x = (uint16_t)(((uint32_t)x + set->add[round]) * set->odd[round]) & set->low_bits;
        x ^= (uint16_t)(x >> set->shift);
    }
    return x;
}

// perm(i), 0 <= i < H: the dim that value i of the token belongs to.
static inline int mask_index(const MaskSet *set, int i) {
    uint16_t x = (uint16_t)i;
    do x = mask_turn(set, x);
    while (x >= set->H);
    return x;
}

// dim[j] = perm(first + j) for the j with first + j < K, perm(0) for those beyond: any of them can be looked up.
// The lanes walk together until all are inside: vectors of 16 bits, half the time of mask_index lane by lane.
static inline void mask_lanes(uint16_t dim[MASK_LANES], const MaskSet *set, int first, int K) {
    int outside;
    for (int j = 0; j < MASK_LANES; j++) dim[j] = mask_turn(set, (uint16_t)(first + j < K ? first + j : 0));
    do {
        outside = 0;
        for (int j = 0; j < MASK_LANES; j++) outside |= dim[j] >= set->H;
        if (outside)
            for (int j = 0; j < MASK_LANES; j++) dim[j] = dim[j] >= set->H ? mask_turn(set, dim[j]) : dim[j];
    } while (outside);
}

// index (n, K) =: perm(0..K-1) of tokens 0..n-1. What mask_check refuses fails the stream, here and below.
static inline void mask_indices(uint32_t *index, MaskKey key, int n, int H, int K, Stream *stream) {
    if (mask_check(key, n, H)) {
        stream->failed = 1;
        return;
    }
#pragma omp parallel for num_threads(stream->threads)
    for (int token = 0; token < n; token++) {
        MaskSet set = mask_set(key, token, H);
        uint32_t *to = index + (size_t)token * K;
        for (int i = 0; i < K; i++) to[i] = (uint32_t)mask_index(&set, i);
    }
}

// values (n, K) =, x (n, H)
static inline void mask_gather(float *values, const float *x, MaskKey key, int n, int H, int K, Stream *stream) {
    if (mask_check(key, n, H)) {
        stream->failed = 1;
        return;
    }
#pragma omp parallel for num_threads(stream->threads)
    for (int token = 0; token < n; token++) {
        MaskSet set = mask_set(key, token, H);
        const float *from = x + (size_t)token * H;
        float *to = values + (size_t)token * K;
        uint16_t dim[MASK_LANES];
        for (int i = 0; i < K; i++) {
            if (i % MASK_LANES == 0) mask_lanes(dim, &set, i, K);
            to[i] = from[dim[i % MASK_LANES]];
        }
    }
}

// x (n, H) =, values (n, K)
static inline void mask_scatter(float *x, const float *values, MaskKey key, int n, int H, int K, float scale,
                                Stream *stream) {
    if (mask_check(key, n, H)) {
        stream->failed = 1;
        return;
    }
#pragma omp parallel for num_threads(stream->threads)
    for (int token = 0; token < n; token++) {
        MaskSet set = mask_set(key, token, H);
        const float *from = values + (size_t)token * K;
        float *to = x + (size_t)token * H;
        uint16_t dim[MASK_LANES];
        memset(to, 0, sizeof(float) * (size_t)H);
        for (int i = 0; i < K; i++) {
            if (i % MASK_LANES == 0) mask_lanes(dim, &set, i, K);
            to[dim[i % MASK_LANES]] = scale * from[i];
        }
    }
}

#endif
