// Reads and writes values that are kept as fp32, bf16 or in 8 bits (store_format.h), CPU.
//   stored_read   to = values as floats                  overwritten
//   stored_write  values = from, rounded                 overwritten
// Pieces begin at multiples of STORE_BLOCK, but those of bf16 that are rounded to the nearest.
#ifndef LLMC_STORE_H
#define LLMC_STORE_H

#include <math.h>   // fabsf
#include <stdint.h> // fixed-width integers
#include <string.h> // memcpy

#include "device.h"       // Stream, device_copy
#include "store_format.h" // Stored, Rounding

// Values that pass through scratch at once.
#ifdef TESTING
#define STORE_PIECE ((int64_t)512) // small tensors take several pieces too
#else
#define STORE_PIECE ((int64_t)1 << 18)
#endif

// Random bits of a block of elements, `first` its first: what rounding_bits gives one by one.
static inline void rounding_block(uint32_t random[STORE_BLOCK], const Rounding *r, uint64_t first) {
    enum { N = STORE_BLOCK / 8 };
    uint32_t c[4][N], key0 = (uint32_t)r->seed, key1 = (uint32_t)(r->seed >> 32);
    for (uint32_t i = 0; i < N; i++) {
        c[0][i] = (uint32_t)(first / 8) + i, c[1][i] = (uint32_t)r->step;
        c[2][i] = r->sub, c[3][i] = (uint32_t)RAND_ROUND;
    }
    for (int round = 0; round < PHILOX_ROUNDS; round++) {
#pragma omp simd
        for (int i = 0; i < N; i++) {
            uint64_t a = PHILOX_A * (uint64_t)c[0][i], b = PHILOX_B * (uint64_t)c[2][i];
            c[0][i] = (uint32_t)(b >> 32) ^ c[1][i] ^ key0, c[1][i] = (uint32_t)b;
            c[2][i] = (uint32_t)(a >> 32) ^ c[3][i] ^ key1, c[3][i] = (uint32_t)a;
        }
        key0 += PHILOX_KEY0, key1 += PHILOX_KEY1;
    }
    for (int w = 0; w < 4; w++) {
#pragma omp simd
        for (int i = 0; i < N; i++) {
            random[64 * w + 2 * i] = r->nearest ? 32768 : c[w][i] & 0xFFFFu;
            random[64 * w + 2 * i + 1] = r->nearest ? 32768 : c[w][i] >> 16;
        }
    }
}

static inline void store_block_bf16(uint16_t *to, const float *from, int n, const Rounding *r, uint64_t first) {
    uint32_t random[STORE_BLOCK], bits[STORE_BLOCK];
    rounding_block(random, r, first);
    memcpy(bits, from, sizeof(float) * (size_t)n);
#pragma omp simd
    for (int i = 0; i < n; i++) to[i] = bf16_stochastic(bits[i], random[i]);
}

// A block of up to STORE_BLOCK values; returns its scale.
static inline float store_block_int8(uint8_t *to, const float *from, int n, int is_signed, const Rounding *r,
                                     uint64_t first) {
    uint32_t random[STORE_BLOCK];
    float scale = 0.0f;
    rounding_block(random, r, first);
#pragma omp simd reduction(max : scale)
    for (int i = 0; i < n; i++) scale = fabsf(from[i]) > scale ? fabsf(from[i]) : scale;
    float divisor = scale > 0.0f ? scale : 1.0f;
#pragma omp simd
    for (int i = 0; i < n; i++) to[i] = store_code(from[i], divisor, is_signed, random[i]);
    return scale;
}

// to (n) = elements at .. at+n-1
static inline void stored_read(float *to, Stored from, int64_t at, int64_t n, Stream *stream) {
    int64_t n_blocks = (n + STORE_BLOCK - 1) / STORE_BLOCK;
    if (from.store == STORE_FP32) {
        device_copy(to, (const float *)from.data + at, sizeof(float) * (size_t)n, stream);
    } else if (from.store == STORE_BF16) {
        const uint16_t *halves = (const uint16_t *)from.data + at;
#pragma omp parallel for simd num_threads(stream->threads) schedule(static)
        for (int64_t i = 0; i < n; i++) to[i] = float_of_bf16(halves[i]);
    } else {
        const uint8_t *codes = (const uint8_t *)from.data + at;
#pragma omp parallel for num_threads(stream->threads) schedule(static)
        for (int64_t b = 0; b < n_blocks; b++) {
            int64_t i = b * STORE_BLOCK;
            int count = (int)(n - i < STORE_BLOCK ? n - i : STORE_BLOCK);
            float scale = from.scales[at / STORE_BLOCK + b];
#pragma omp simd
            for (int j = 0; j < count; j++) to[i + j] = store_value(codes[i + j], scale, from.is_signed);
        }
    }
}

// Elements at .. at+n-1 = from (n).
static inline void stored_write(Stored to, int64_t at, const float *from, int64_t n, Rounding r, Stream *stream) {
    int64_t n_blocks = (n + STORE_BLOCK - 1) / STORE_BLOCK;
    if (to.store == STORE_FP32) {
        device_copy((float *)to.data + at, from, sizeof(float) * (size_t)n, stream);
        return;
    }
    if (to.store == STORE_BF16 && r.nearest) {
        uint16_t *halves = (uint16_t *)to.data + at;
#pragma omp parallel for simd num_threads(stream->threads) schedule(static)
        for (int64_t i = 0; i < n; i++) halves[i] = bf16_of_float(from[i]);
        return;
    }
#pragma omp parallel for num_threads(stream->threads) schedule(static)
    for (int64_t b = 0; b < n_blocks; b++) {
        int64_t i = b * STORE_BLOCK;
        int count = (int)(n - i < STORE_BLOCK ? n - i : STORE_BLOCK);
        if (to.store == STORE_BF16)
            store_block_bf16((uint16_t *)to.data + at + i, from + i, count, &r, (uint64_t)(at + i));
        else
            to.scales[at / STORE_BLOCK + b] =
                store_block_int8((uint8_t *)to.data + at + i, from + i, count, to.is_signed, &r, (uint64_t)(at + i));
    }
}

#endif
