// Ops of the transform codec, CPU. What they are for is in klt_codec.h (messages) and klt_learn.h (tables), which this
// file brings along.
//   center     to = x - offset - predicted                                     overwritten
//   place      x = from + offset + predicted                                   overwritten
//   measure    out[n] = mean_k y[n,k]^2 weight[k]                              overwritten
//   quantize   symbols[n,k] = klt_symbol(y[n,k])                               overwritten
//   restore    y[n,k] = klt_value(symbols[n,k])                                overwritten
// offset and predicted may be NULL: nothing is added.
#ifndef LLMC_KLT_H
#define LLMC_KLT_H

#include <stddef.h> // size_t
#include <stdint.h> // fixed-width integers

#include "device.h"        // floatX, Stream
#include "embedding.h"     // embedding_forward
#include "klt_quantizer.h" // klt_symbol, klt_value
#include "linalg.h"        // eigh, linalg_columns
#include "matmul.h"        // matmul_product
#include "vector.h"        // vector_scale, vector_round_bf16, vector_dot

// to (n, H), x (n, H), offset (H), predicted (n, H)
static inline void klt_center(float *to, const floatX *x, const float *offset, const float *predicted, int n, int H,
                              Stream *stream) {
#pragma omp parallel for num_threads(stream->threads)
    for (int t = 0; t < n; t++) {
        size_t row = (size_t)t * (size_t)H;
        for (int h = 0; h < H; h++)
            to[row + h] =
                x[row + h] - (offset != NULL ? offset[h] : 0.0f) - (predicted != NULL ? predicted[row + h] : 0.0f);
    }
}

// x (n, H), from (n, H), offset (H), predicted (n, H)
static inline void klt_place(floatX *x, const float *from, const float *offset, const float *predicted, int n, int H,
                             Stream *stream) {
#pragma omp parallel for num_threads(stream->threads)
    for (int t = 0; t < n; t++) {
        size_t row = (size_t)t * (size_t)H;
        for (int h = 0; h < H; h++)
            x[row + h] =
                from[row + h] + (offset != NULL ? offset[h] : 0.0f) + (predicted != NULL ? predicted[row + h] : 0.0f);
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

// symbols (n, K), y (n, K)
static inline void klt_quantize(int16_t *symbols, const float *y, KltQuantizer q, int n, Stream *stream) {
#pragma omp parallel for num_threads(stream->threads)
    for (int t = 0; t < n; t++) {
        size_t row = (size_t)t * (size_t)q.K;
        Philox draws = {{0, 0, 0, 0}};
        for (int k = 0; k < q.K; k++) {
            if (q.stochastic && k % 4 == 0) draws = klt_draws(q.key, t, k / 4);
            symbols[row + k] = (int16_t)klt_symbol(&q, y[row + k], k, draws.v[k % 4]);
        }
    }
}

// y (n, K), symbols (n, K), scales (n)
static inline void klt_restore(float *y, const int16_t *symbols, const int16_t *scales, KltQuantizer q, int n,
                               Stream *stream) {
#pragma omp parallel for num_threads(stream->threads)
    for (int t = 0; t < n; t++) {
        size_t row = (size_t)t * (size_t)q.K;
        Philox draws = {{0, 0, 0, 0}};
        for (int k = 0; k < q.K; k++) {
            if (q.stochastic && k % 4 == 0) draws = klt_draws(q.key, t, k / 4);
            y[row + k] = klt_value(&q, symbols[row + k], k, scales[t], draws.v[k % 4]);
        }
    }
}

#include "klt_codec.h" // klt_encode, klt_decode
#include "klt_learn.h" // KltMoments, klt_learn

#endif
