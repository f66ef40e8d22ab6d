// LayerNorm without parameters, CPU (Ba et al. 2016; OLMo, Groeneveld et al. 2024). Statistics in fp32.
//   out[n,:] = (x[n,:] - mean[n]) * rstd[n],  rstd = 1 / sqrt(variance + eps)            out, rstd overwritten
//   dx[n,:] += rstd[n] * (dout - mean_c(dout) - out * mean_c(dout * out))                added to
// The backward takes what the forward gave, so neither the input nor its mean is kept.
#ifndef LLMC_LAYERNORM_H
#define LLMC_LAYERNORM_H

#include <math.h>   // sqrtf
#include <stddef.h> // size_t

#include "device.h" // floatX, Stream

// out, x (N, C), rstd (N)
static inline void layernorm_forward(floatX *out, float *rstd, const floatX *x, int N, int C, float eps,
                                     Stream *stream) {
#pragma omp parallel for num_threads(stream->threads)
    for (int n = 0; n < N; n++) {
        const floatX *row = x + (size_t)n * C;
        floatX *to = out + (size_t)n * C;
        float sum = 0.0f, squares = 0.0f;
#pragma omp simd reduction(+ : sum)
        for (int c = 0; c < C; c++) sum += row[c];
        float mean = sum / (float)C;
#pragma omp simd reduction(+ : squares)
        for (int c = 0; c < C; c++) squares += (row[c] - mean) * (row[c] - mean);
        float scale = 1.0f / sqrtf(squares / (float)C + eps);
#pragma omp simd
        for (int c = 0; c < C; c++) to[c] = (row[c] - mean) * scale;
        rstd[n] = scale;
    }
}

// dx (N, C) +=, dout, out (N, C), rstd (N)
static inline void layernorm_backward(floatX *dx, const floatX *dout, const floatX *out, const float *rstd, int N,
                                      int C, Stream *stream) {
#pragma omp parallel for num_threads(stream->threads)
    for (int n = 0; n < N; n++) {
        const floatX *row = out + (size_t)n * C, *grad = dout + (size_t)n * C;
        floatX *to = dx + (size_t)n * C;
        float scale = rstd[n], sum = 0.0f, dot = 0.0f;
#pragma omp simd reduction(+ : sum, dot)
        for (int c = 0; c < C; c++) sum += grad[c], dot += grad[c] * row[c];
        float mean = sum / (float)C, along = dot / (float)C;
#pragma omp simd
        for (int c = 0; c < C; c++) to[c] += scale * (grad[c] - mean - row[c] * along);
    }
}

#endif
