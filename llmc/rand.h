// Random numbers from counters: the same (seed, stream, index) gives the same bits on every machine, in any order,
// from any thread. Generator: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).
//
//   float u = rand_uniform(seed, RAND_SAMPLE, i);            // in [0, 1)
//   uint64_t j = rand_permute(i, n, seed, RAND_SHUFFLE, e);  // the i-th element of permutation e of [0, n)
#ifndef LLMC_RAND_H
#define LLMC_RAND_H

#include <math.h>   // logf, cosf, sinf, sqrtf
#include <stdint.h> // fixed-width integers

#include "portable.h" // HOST_DEVICE

// Who draws. Add a line per use; never renumber, the numbers are part of every run's bits.
typedef enum {
    RAND_INIT = 1,
    RAND_SHUFFLE = 2,
    RAND_SAMPLE = 3,
    RAND_TEST = 4,
    RAND_MASK = 5,
    RAND_SVD = 6,
    RAND_POWERSGD = 7,
    RAND_BOTTLENECK = 8,
    RAND_KLT = 12,
    RAND_ALIGNMENT = 13,
    RAND_ROUND = 14,
    RAND_ADAPTER = 15
} RandStream;

typedef struct {
    uint32_t v[4];
} Philox;

#define PHILOX_ROUNDS 10
#define PHILOX_A      0xD2511F53u
#define PHILOX_B      0xCD9E8D57u
#define PHILOX_KEY0   0x9E3779B9u
#define PHILOX_KEY1   0xBB67AE85u

// One Philox4x32-10 block: counter (4 words), key (2 words) -> 4 words.
static inline HOST_DEVICE Philox philox(Philox counter, uint32_t key0, uint32_t key1) {
    for (int round = 0; round < PHILOX_ROUNDS; round++) {
        uint64_t a = PHILOX_A * (uint64_t)counter.v[0];
        uint64_t b = PHILOX_B * (uint64_t)counter.v[2];
        Philox next = {{(uint32_t)(b >> 32) ^ counter.v[1] ^ key0, (uint32_t)b,
                        (uint32_t)(a >> 32) ^ counter.v[3] ^ key1, (uint32_t)a}};
        counter = next;
        key0 += PHILOX_KEY0;
        key1 += PHILOX_KEY1;
    }
    return counter;
}

// The block number `index` of a stream; `sub` separates uses within a stream (a tensor, an epoch).
static inline HOST_DEVICE Philox rand_block(uint64_t seed, RandStream stream, uint32_t sub, uint64_t index) {
    Philox counter = {{(uint32_t)index, (uint32_t)(index >> 32), sub, (uint32_t)stream}};
    return philox(counter, (uint32_t)seed, (uint32_t)(seed >> 32));
}

// Uniform in [0, 1), 24 bits.
static inline HOST_DEVICE float rand_uniform(uint64_t seed, RandStream stream, uint64_t index) {
    return (float)(rand_block(seed, stream, 0, index).v[0] >> 8) * 0x1p-24f;
}

// Four standard normals by Box-Muller: elements 4*index .. 4*index+3 of the sequence `sub` of a stream.
static inline HOST_DEVICE void rand_normal4(float out[4], uint64_t seed, RandStream stream, uint32_t sub,
                                            uint64_t index) {
    Philox block = rand_block(seed, stream, sub, index);
    for (int pair = 0; pair < 2; pair++) {
        float u = ((float)(block.v[2 * pair] >> 8) + 1.0f) * 0x1p-24f; // (0, 1]
        float angle = (float)(block.v[2 * pair + 1] >> 8) * 0x1p-24f * 6.2831853071795864f;
        float radius = sqrtf(-2.0f * logf(u));
        out[2 * pair] = radius * cosf(angle);
        out[2 * pair + 1] = radius * sinf(angle);
    }
}

// out (n) = the first n standard normals of the sequence `sub` of a stream.
static inline void rand_normal(float *out, int64_t n, uint64_t seed, RandStream stream, uint32_t sub) {
    for (int64_t i = 0; i < n; i += 4) {
        float four[4];
        rand_normal4(four, seed, stream, sub, (uint64_t)i / 4);
        for (int64_t j = 0; j < 4 && i + j < n; j++) out[i + j] = four[j];
    }
}

// Image of index under a keyed permutation of [0, n), n >= 1: a four-round Feistel network over the next power of
// four, walked until it lands inside. No table, random access.
static inline HOST_DEVICE uint64_t rand_permute(uint64_t index, uint64_t n, uint64_t seed, RandStream stream,
                                                uint32_t sub) {
    int half_bits = 1;
    while (half_bits < 32 && (1ull << (2 * half_bits)) < n) half_bits++;
    uint64_t mask = (1ull << half_bits) - 1;
    uint64_t x = index;
    do {
        uint64_t left = x >> half_bits, right = x & mask;
        for (uint64_t round = 0; round < 4; round++) {
            uint64_t f = rand_block(seed, stream, sub, right | round << 60).v[0] & mask;
            uint64_t swapped = left ^ f;
            left = right;
            right = swapped;
        }
        x = left << half_bits | right;
    } while (x >= n);
    return x;
}

#endif
