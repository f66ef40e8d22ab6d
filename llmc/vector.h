// Vectors of fp32 values: gradients, parameters and what replicas average. CPU.
//   scale      x *= factor                                   in place
//   subtract   x -= y                                        in place
//   mean       to = (values[0] + values[1] + ...) / count    overwritten, added in the order of the pointers
//   round      x = bf16(x), nearest even                     in place, stays fp32
//   sum        total += x[0] + x[1] + ...                    in double, in this order
//   momentum   m = beta*m + (1-beta)*x                       in place
//   blend      to = keep*to + add*(scale*x)                  in place
//   drift      delta = decay*delta + (1-decay)*(now-before)  in place
//   dot        sum a*b, sum_of_squares  sum x*x              in double, the same bits for any thread count
#ifndef LLMC_VECTOR_H
#define LLMC_VECTOR_H

#include <stdint.h> // fixed-width integers

#include "device.h" // Stream
#include "dtype.h"  // bf16_of_float, float_of_bf16

// x (n)
static inline void vector_scale(float *x, int64_t n, float factor, Stream *stream) {
#pragma omp parallel for simd num_threads(stream->threads) schedule(static)
    for (int64_t i = 0; i < n; i++) x[i] *= factor;
}

// x, y (n)
static inline void vector_subtract(float *x, const float *y, int64_t n, Stream *stream) {
#pragma omp parallel for simd num_threads(stream->threads) schedule(static)
    for (int64_t i = 0; i < n; i++) x[i] -= y[i];
}

// to (n) =, n_values vectors values[.] (n). to may be one of them.
static inline void vector_mean(float *to, float *const *values, int n_values, int64_t n, Stream *stream) {
#pragma omp parallel for num_threads(stream->threads) schedule(static)
    for (int64_t i = 0; i < n; i++) {
        float sum = 0.0f;
        for (int r = 0; r < n_values; r++) sum += values[r][i];
        to[i] = sum / (float)n_values;
    }
}

// x (n)
static inline void vector_round_bf16(float *x, int64_t n, Stream *stream) {
#pragma omp parallel for simd num_threads(stream->threads) schedule(static)
    for (int64_t i = 0; i < n; i++) x[i] = float_of_bf16(bf16_of_float(x[i]));
}

// total (1) +=, x (n)
static inline void vector_sum(double *total, const float *x, int64_t n, Stream *stream) {
    double sum = total[0];
    (void)stream;
    for (int64_t i = 0; i < n; i++) sum += (double)x[i];
    total[0] = sum;
}

// m, x (n)
static inline void vector_momentum(float *m, const float *x, float beta, int64_t n, Stream *stream) {
#pragma omp parallel for simd num_threads(stream->threads) schedule(static)
    for (int64_t i = 0; i < n; i++) m[i] = beta * m[i] + (1.0f - beta) * x[i];
}

// to, x (n)
static inline void vector_blend(float *to, const float *x, float keep, float add, float scale, int64_t n,
                                Stream *stream) {
#pragma omp parallel for simd num_threads(stream->threads) schedule(static)
    for (int64_t i = 0; i < n; i++) {
        float scaled = x[i] * scale;
        to[i] = keep * to[i] + add * scaled;
    }
}

// delta, now, before (n)
static inline void vector_drift(float *delta, const float *now, const float *before, float decay, int64_t n,
                                Stream *stream) {
#pragma omp parallel for simd num_threads(stream->threads) schedule(static)
    for (int64_t i = 0; i < n; i++) delta[i] = decay * delta[i] + (1.0f - decay) * (now[i] - before[i]);
}

// a, b (n). Fixed blocks, each summed on its own and the blocks added in order.
static inline double vector_dot(const float *a, const float *b, int64_t n, Stream *stream) {
    enum { BLOCK = 1 << 15, GROUP = 256 }; // a group of blocks at a time, so that the partial sums have a fixed place
    double total = 0.0;
    for (int64_t start = 0; start < n; start += (int64_t)BLOCK * GROUP) {
        double partial[GROUP] = {0};
#pragma omp parallel for num_threads(stream->threads)
        for (int block = 0; block < GROUP; block++) {
            int64_t from = start + (int64_t)block * BLOCK, to = from + BLOCK < n ? from + BLOCK : n;
            double sum = 0.0;
#pragma omp simd reduction(+ : sum)
            for (int64_t i = from; i < to; i++) sum += (double)a[i] * (double)b[i];
            partial[block] = sum;
        }
        for (int block = 0; block < GROUP; block++) total += partial[block];
    }
    return total;
}

static inline double sum_of_squares(const float *x, int64_t n, Stream *stream) {
    return vector_dot(x, x, n, stream);
}

#endif
