// RMSNorm of queries and keys where they lie in the packed rows of qkv, CPU (Qwen3: of each head; OLMo 2: of all heads
// together). Each row has `parts` parts of W values, one after the other from its start; they share the weight.
//   rstd   = 1 / sqrt(mean of the part's squares + eps)
//   kept   = x                                                                     overwritten, for the backward
//   x      = x * rstd * weight                                                     in place
//   dx     = rstd * (g - xhat * mean(g * xhat)),  g = dout * weight, xhat = x * rstd         in place of dout
//   dweight[:] += sum over rows and parts of dout * x * rstd                       added to, in their order
#ifndef LLMC_QK_NORM_H
#define LLMC_QK_NORM_H

#include <math.h>   // sqrtf
#include <stddef.h> // size_t

#include "device.h" // floatX, Stream

// x: N rows of x_stride values, kept: N rows of kept_stride; rstd (N, parts), weight (W)
static inline void qk_norm_forward(floatX *x, floatX *kept, float *rstd, const float *weight, int N, int parts, int W,
                                   int x_stride, int kept_stride, float eps, Stream *stream) {
#pragma omp parallel for num_threads(stream->threads)
    for (int n = 0; n < N; n++) {
        for (int p = 0; p < parts; p++) {
            floatX *part = x + (size_t)n * x_stride + (size_t)p * W;
            floatX *keep = kept + (size_t)n * kept_stride + (size_t)p * W;
            float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
            for (int c = 0; c < W; c++) sum += part[c] * part[c];
            float scale = 1.0f / sqrtf(sum / (float)W + eps);
#pragma omp simd
            for (int c = 0; c < W; c++) {
                keep[c] = part[c];
                part[c] = keep[c] * scale * weight[c];
            }
            rstd[(size_t)n * parts + p] = scale;
        }
    }
}

// d: N rows of d_stride values, gradient of the normalised values in, of the plain ones out. dweight (W) += unless it
// is NULL.
static inline void qk_norm_backward(floatX *d, float *dweight, const floatX *kept, const float *weight,
                                    const float *rstd, int N, int parts, int W, int d_stride, int kept_stride,
                                    Stream *stream) {
    int wanted = dweight != NULL ? W : 0;
#pragma omp parallel num_threads(stream->threads)
    {
        // A strip of columns a task: every column sums in one order, so thread counts agree bit for bit.
        enum { STRIP = 64 };
#pragma omp for
        for (int c0 = 0; c0 < wanted; c0 += STRIP) {
            float sum[STRIP] = {0};
            int width = W - c0 < STRIP ? W - c0 : STRIP;
            for (int n = 0; n < N; n++) {
                for (int p = 0; p < parts; p++) {
                    const floatX *grad = d + (size_t)n * d_stride + (size_t)p * W + c0;
                    const floatX *x = kept + (size_t)n * kept_stride + (size_t)p * W + c0;
                    float scale = rstd[(size_t)n * parts + p];
#pragma omp simd
                    for (int c = 0; c < width; c++) sum[c] += grad[c] * x[c] * scale;
                }
            }
            for (int c = 0; c < width; c++) dweight[c0 + c] += sum[c];
        } // all have read d
#pragma omp for
        for (int n = 0; n < N; n++) {
            for (int p = 0; p < parts; p++) {
                floatX *grad = d + (size_t)n * d_stride + (size_t)p * W;
                const floatX *x = kept + (size_t)n * kept_stride + (size_t)p * W;
                float scale = rstd[(size_t)n * parts + p], dot = 0.0f;
#pragma omp simd reduction(+ : dot)
                for (int c = 0; c < W; c++) dot += grad[c] * weight[c] * x[c];
                float mean = dot * scale * scale / (float)W;
#pragma omp simd
                for (int c = 0; c < W; c++) grad[c] = scale * (grad[c] * weight[c] - x[c] * mean);
            }
        }
    }
}

#endif
