// RMSNorm, CPU (Zhang and Sennrich 2019). Statistics in fp32.
//   rstd[n]  = 1 / sqrt(mean_c x[n,c]^2 + eps)
//   out[n,:] = x[n,:] * rstd[n] * weight[:]                                        out, rstd overwritten
//   dx[n,:] += rstd[n] * (g - xhat * mean_c(g * xhat)),  g = dout * weight, xhat = x * rstd      added to
//   dweight[:] += sum_n dout[n,:] * x[n,:] * rstd[n]                               added to, n ascending
#ifndef LLMC_RMSNORM_H
#define LLMC_RMSNORM_H

#include <math.h>   // sqrtf
#include <stddef.h> // size_t

#include "device.h" // floatX, Stream

// out, x (N, C), rstd (N), weight (C)
static inline void rmsnorm_forward(floatX *out, float *rstd, const floatX *x, const float *weight, int N, int C,
                                   float eps, Stream *stream) {
#pragma omp parallel for num_threads(stream->threads)
    for (int n = 0; n < N; n++) {
        const floatX *row = x + (size_t)n * C;
        floatX *to = out + (size_t)n * C;
        float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
        for (int c = 0; c < C; c++) sum += row[c] * row[c];
        float scale = 1.0f / sqrtf(sum / (float)C + eps);
#pragma omp simd
        for (int c = 0; c < C; c++) to[c] = row[c] * scale * weight[c];
        rstd[n] = scale;
    }
}

// dx (N, C) +=, dweight (C) += unless it is NULL, dout, x (N, C), weight (C), rstd (N)
static inline void rmsnorm_backward(floatX *dx, float *dweight, const floatX *dout, const floatX *x,
                                    const float *weight, const float *rstd, int N, int C, Stream *stream) {
    int wanted = dweight != NULL ? C : 0;
#pragma omp parallel num_threads(stream->threads)
    {
#pragma omp for
        for (int n = 0; n < N; n++) {
            const floatX *row = x + (size_t)n * C, *grad = dout + (size_t)n * C;
            floatX *to = dx + (size_t)n * C;
            float scale = rstd[n], dot = 0.0f;
#pragma omp simd reduction(+ : dot)
            for (int c = 0; c < C; c++) dot += grad[c] * weight[c] * row[c];
            float mean = dot * scale * scale / (float)C;
#pragma omp simd
            for (int c = 0; c < C; c++) to[c] += scale * (grad[c] * weight[c] - row[c] * mean);
        }
        // A strip of columns a task: every column sums its rows in one order, so thread counts agree bit for bit.
        enum { STRIP = 64 };
#pragma omp for
        for (int c0 = 0; c0 < wanted; c0 += STRIP) {
            float sum[STRIP] = {0};
            int width = C - c0 < STRIP ? C - c0 : STRIP;
            for (int n = 0; n < N; n++) {
                const floatX *row = x + (size_t)n * C + c0, *grad = dout + (size_t)n * C + c0;
                float scale = rstd[n];
#pragma omp simd
                for (int c = 0; c < width; c++) sum[c] += grad[c] * row[c] * scale;
            }
            for (int c = 0; c < width; c++) dweight[c0 + c] += sum[c];
        }
    }
}

#endif
