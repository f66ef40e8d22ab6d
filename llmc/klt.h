// Ops of the transform codec, CPU. What they are for is in klt_codec.h (messages) and klt_learn.h (tables), which this
// file brings along.
//   embed      to[n] = embed[tokens[n]], rounded as states are                 overwritten
//   center     to[n] = x[n] - offset - predicted[kinds[n]]                     overwritten
//   place      x[n] = from[n] + offset + predicted[kinds[n]]                   overwritten
//   measure    out[n] = mean_k y[n,k]^2 weight[k]                              overwritten
//   quantize   symbols[n,k] = klt_symbol(y[n,k])                               overwritten
//   restore    y[n,k] = klt_value(symbols[n,k])                                overwritten
// offset and predicted, with kinds, may be NULL: nothing is added.
#ifndef LLMC_KLT_H
#define LLMC_KLT_H

#include <math.h>   // fabsf
#include <stddef.h> // size_t
#include <stdint.h> // fixed-width integers
#include <string.h> // memcpy

#include "device.h"        // floatX, Stream
#include "embedding.h"     // embedding_forward
#include "klt_coder.h"     // klt_coding_write
#include "klt_quantizer.h" // klt_symbol, klt_value
#include "linalg.h"        // eigh, linalg_columns
#include "matmul.h"        // matmul_product
#include "vector.h"        // vector_scale, vector_round_bf16, vector_dot

// to (n, H), tokens (n), embed (V, H)
static inline void klt_embed(float *to, const uint32_t *tokens, const float *embed, int n, int H, Stream *stream) {
    embedding_forward(to, tokens, embed, n, H, stream);
}

// to (n, H), x (n, H), offset (H), predicted (u, H), kinds (n) < u
static inline void klt_center(float *to, const floatX *x, const float *offset, const float *predicted,
                              const int32_t *kinds, int n, int H, Stream *stream) {
#pragma omp parallel for num_threads(stream->threads)
    for (int t = 0; t < n; t++) {
        size_t row = (size_t)t * (size_t)H;
        const float *known = predicted != NULL ? predicted + (size_t)kinds[t] * (size_t)H : NULL;
        for (int h = 0; h < H; h++)
            to[row + h] = x[row + h] - (offset != NULL ? offset[h] : 0.0f) - (known != NULL ? known[h] : 0.0f);
    }
}

// x (n, H), from (n, H), offset (H), predicted (u, H), kinds (n) < u
static inline void klt_place(floatX *x, const float *from, const float *offset, const float *predicted,
                             const int32_t *kinds, int n, int H, Stream *stream) {
#pragma omp parallel for num_threads(stream->threads)
    for (int t = 0; t < n; t++) {
        size_t row = (size_t)t * (size_t)H;
        const float *known = predicted != NULL ? predicted + (size_t)kinds[t] * (size_t)H : NULL;
        for (int h = 0; h < H; h++)
            x[row + h] = from[row + h] + (offset != NULL ? offset[h] : 0.0f) + (known != NULL ? known[h] : 0.0f);
    }
}

// out (n), y (n, K), weight (K)
static inline void klt_measure(float *out, const float *y, const float *weight, int n, int K, Stream *stream) {
#pragma omp parallel for num_threads(stream->threads)
    for (int t = 0; t < n; t++) {
        const float *row = y + (size_t)t * (size_t)K;
        float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
        for (int k = 0; k < K; k++) sum += row[k] * row[k] * weight[k];
        out[t] = sum / (float)K;
    }
}

// Floor of v as a symbol; NaN gives 0. Comparisons are of the bits, which compilers vectorize.
static inline int klt_floor(float v) {
    const float most = (float)RANS_MAX;
    uint32_t bits, most_bits;
    float kept;
    memcpy(&bits, &v, sizeof bits);
    memcpy(&most_bits, &most, sizeof most_bits);
    uint32_t size = bits & 0x7FFFFFFFu;
    size = size <= 0x7F800000u ? size : 0;
    size = size < most_bits ? size : most_bits;
    bits = (bits & 0x80000000u) | size;
    memcpy(&kept, &bits, sizeof kept);
    int whole = (int)kept;
    return whole - ((float)whole > kept);
}

// symbols (count), y (count) of components first on: as klt_symbol has it, of 16 values at once.
static inline void klt_quantize_run(int16_t *symbols, const float *y, KltQuantizer q, int first, int count,
                                    const uint32_t *draws) {
    const float step = q.step, theta = q.theta;
    if (q.half != NULL) {
        for (int i = 0; i < count; i++) symbols[i] = (int16_t)klt_symbol(&q, y[i], first + i, draws[i]);
    } else if (q.stochastic) {
#pragma omp simd
        for (int i = 0; i < count; i++) symbols[i] = (int16_t)klt_floor(y[i] / step + klt_uniform(draws[i]));
    } else {
#pragma omp simd
        for (int i = 0; i < count; i++) {
            float v = y[i] / step;
            int size = klt_floor(theta + fabsf(v));
            symbols[i] = (int16_t)(v < 0.0f ? -size : size);
        }
    }
}

// y (count), symbols (count) of a token of this scale: as klt_value has it, of 16 values at once.
static inline void klt_restore_run(float *y, const int16_t *symbols, int scale, KltQuantizer q, int first, int count,
                                   const uint32_t *draws) {
    const float *classes = q.first_class + first, *centroids = q.centroids;
    const float step = q.step, dithered = (float)(KLT_CLASS_DITHERED - scale);
    if (q.half != NULL) {
        for (int i = 0; i < count; i++) y[i] = klt_value(&q, symbols[i], first + i, scale, draws[i]);
    } else if (q.stochastic) {
#pragma omp simd
        for (int i = 0; i < count; i++) {
            float centered = 0.5f - klt_uniform(draws[i]);
            y[i] = ((float)symbols[i] + (classes[i] >= dithered ? centered : 0.0f)) * step;
        }
    } else {
#pragma omp simd
        for (int i = 0; i < count; i++) {
            int symbol = symbols[i], sign = symbol < 0 ? -1 : 1, size = symbol * sign;
            int number = klt_class((int)classes[i], scale);
            float centroid = centroids[2 * number + (size > 1)];
            y[i] = (float)sign * ((float)size + (size > 0 ? centroid : 0.0f)) * step;
        }
    }
}

// symbols (n, K), y (n, K)
static inline void klt_quantize(int16_t *symbols, const float *y, KltQuantizer q, int n, Stream *stream) {
#pragma omp parallel for num_threads(stream->threads)
    for (int t = 0; t < n; t++) {
        size_t row = (size_t)t * (size_t)q.K;
        uint32_t draws[KLT_RUN] = {0};
        for (int first = 0; first < q.K; first += KLT_RUN) {
            int count = q.K - first < KLT_RUN ? q.K - first : KLT_RUN;
            if (q.stochastic) klt_draws_run(draws, q.key, t, first);
            klt_quantize_run(symbols + row + first, y + row + first, q, first, count, draws);
        }
    }
}

// y (n, K), symbols (n, K), scales (n)
static inline void klt_restore(float *y, const int16_t *symbols, const int16_t *scales, KltQuantizer q, int n,
                               Stream *stream) {
#pragma omp parallel for num_threads(stream->threads)
    for (int t = 0; t < n; t++) {
        size_t row = (size_t)t * (size_t)q.K;
        uint32_t draws[KLT_RUN] = {0};
        for (int first = 0; first < q.K; first += KLT_RUN) {
            int count = q.K - first < KLT_RUN ? q.K - first : KLT_RUN;
            if (q.stochastic) klt_draws_run(draws, q.key, t, first);
            klt_restore_run(y + row + first, symbols + row + first, scales[t], q, first, count, draws);
        }
    }
}

// 1 if products of n rows round what they read to bf16.
static inline int klt_rounds(int n, const Stream *stream) {
    return matmul_is_bf16(n, stream);
}

#include "klt_codec.h" // klt_encode, klt_decode
#include "klt_learn.h" // KltMoments, klt_learn

#endif
