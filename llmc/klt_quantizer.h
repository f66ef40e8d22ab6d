// The transform codec's quantizer, one value at a time: the same on the host and in kernels. Part of klt.h and klt.cuh.
//
//   nearest      s = sign(v) * floor(|v| + theta),   v = y / step;   theta < 1/2 widens the interval around 0
//   stochastic   s = floor(v + u),                   u uniform in [0, 1), known to both sides
//   fixed bits   s = floor(y / (step * grid[k]) + half[k] + (1/2 or u)), kept within 0 .. 2 * half[k]
// and back
//   nearest      y = (s + sign(s) * centroid) * step,   centroid of the value's class and of |s| = 1 or more
//   stochastic   y = (s + 1/2 - u) * step               or s * step in the lowest classes
//   fixed bits   y = (s - half[k] (+ 1/2 - u)) * step * grid[k]
// Both stochastic ways have the mean y whatever y is. Subtracting the draw leaves an error that is uniform in one step
// and independent of y, of variance step^2 / 12; without it the variance is that of rounding, up to step^2 / 4, but
// about step * |y| for small y: less for those below a tenth of a step. Given u a symbol is easier to guess, so the
// coder has a context for it: (v, u) and (-v, 1 - u) give s and -s, so u is folded to [0, 1/2) and cut in four.
//
// u is word k % 4 of the Philox block (k / 4, token) under the message's key: the same for any order of the values.
#ifndef LLMC_KLT_QUANTIZER_H
#define LLMC_KLT_QUANTIZER_H

#include <math.h>   // floorf, fabsf
#include <stdint.h> // fixed-width integers

#include "klt_table.h" // klt_class
#include "portable.h"  // HOST_DEVICE
#include "rand.h"      // philox

// From this class on draws are subtracted: sigma is a tenth of the step there, 2^((10 - 16) / 2) = 1/8.
enum { KLT_CLASS_DITHERED = 10 };

// Pointers are the backend's memory.
typedef struct {
    int K, stochastic;
    float step, theta;
    uint64_t key;             // of the message's draws
    const float *grid, *half; // (K) of fixed bits, else NULL
    const float *first_class; // (K) of entropy-coded values
    const float *centroids;   // (48, 2)
} KltQuantizer;

// Which message it is.
typedef struct {
    uint64_t seed;
    int replica, boundary;
    int64_t step;
    int micro_batch;
} KltMessage;

static inline uint64_t klt_message_key(const KltMessage *m) {
    uint64_t step = (uint64_t)m->step;
    Philox counter = {{(uint32_t)step, (uint32_t)(step >> 32) ^ (uint32_t)m->micro_batch << 12,
                       (uint32_t)m->replica << 16 | (uint32_t)m->boundary, (uint32_t)RAND_KLT}};
    Philox block = philox(counter, (uint32_t)m->seed, (uint32_t)(m->seed >> 32));
    return (uint64_t)block.v[0] << 32 | block.v[1];
}

// The draws of components 4*index .. 4*index+3 of a token.
static inline HOST_DEVICE Philox klt_draws(uint64_t key, int token, int index) {
    Philox counter = {{(uint32_t)index, (uint32_t)token, 0, (uint32_t)RAND_KLT}};
    return philox(counter, (uint32_t)key, (uint32_t)(key >> 32));
}

// Components that the host works on at once, 16 blocks of draws: as many as a register has lanes.
enum { KLT_RUN = 64 };

// The draws of components first .. first+63 of a token; first is a multiple of 4.
static inline void klt_draws_run(uint32_t draws[KLT_RUN], uint64_t key, int token, int first) {
#pragma omp simd
    for (int i = 0; i < KLT_RUN / 4; i++) {
        uint32_t a = (uint32_t)(first / 4 + i), b = (uint32_t)token, c = 0, d = (uint32_t)RAND_KLT;
        uint32_t key0 = (uint32_t)key, key1 = (uint32_t)(key >> 32);
        for (int round = 0; round < PHILOX_ROUNDS; round++, key0 += PHILOX_KEY0, key1 += PHILOX_KEY1) {
            uint64_t left = (uint64_t)PHILOX_A * a, right = (uint64_t)PHILOX_B * c;
            a = (uint32_t)(right >> 32) ^ b ^ key0, b = (uint32_t)right;
            c = (uint32_t)(left >> 32) ^ d ^ key1, d = (uint32_t)left;
        }
        draws[4 * i] = a, draws[4 * i + 1] = b, draws[4 * i + 2] = c, draws[4 * i + 3] = d;
    }
}

static inline HOST_DEVICE float klt_uniform(uint32_t draw) {
    return (float)(draw >> 8) * 0x1p-24f;
}

// The sign that a symbol takes in its draw's context, and the context: below .04, .12, .27 or beyond.
static inline int klt_sign(uint32_t draw) {
    return 1 - 2 * (int)(draw >> 31);
}
static inline int klt_context(uint32_t draw) {
    uint32_t folded = draw ^ (0u - (draw >> 31));
    return (folded >= 0x0A000000u) + (folded >= 0x1E000000u) + (folded >= 0x44000000u);
}

// The symbol of y, component k. NaN gives 0.
static inline HOST_DEVICE int klt_symbol(const KltQuantizer *q, float y, int k, uint32_t draw) {
    float u = klt_uniform(draw), v = y / (q->grid != NULL ? q->step * q->grid[k] : q->step);
    if (q->half != NULL) {
        float level = floorf(v + q->half[k] + (q->stochastic ? u : 0.5f)), top = 2.0f * q->half[k];
        return level > top ? (int)top : level > 0.0f ? (int)level : 0;
    }
    float s = q->stochastic ? floorf(v + u) : copysignf(floorf(q->theta + fabsf(v)), v);
    s = s == s ? s : 0.0f;
    s = s < (float)RANS_MAX ? s : (float)RANS_MAX;
    return (int)(s > -(float)RANS_MAX ? s : -(float)RANS_MAX);
}

// The value of a symbol, component k of a token of this scale.
static inline HOST_DEVICE float klt_value(const KltQuantizer *q, int symbol, int k, int scale, uint32_t draw) {
    float centered = q->stochastic ? 0.5f - klt_uniform(draw) : 0.0f;
    if (q->half != NULL) return ((float)symbol - q->half[k] + centered) * q->step * q->grid[k];
    int size = symbol < 0 ? -symbol : symbol, number = klt_class((int)q->first_class[k], scale);
    if (q->stochastic) return ((float)symbol + (number >= KLT_CLASS_DITHERED ? centered : 0.0f)) * q->step;
    float centroid = q->centroids[2 * number + (size > 1)], moved = (float)size + (size > 0 ? centroid : 0.0f);
    return (symbol < 0 ? -moved : moved) * q->step;
}

#endif
