// AdamW (Loshchilov and Hutter 2019), the global gradient norm, and the learning-rate schedule that drives them. CPU.
//   g = grad * grad_scale;  m = b1*m + (1-b1)*g;  v = b2*v + (1-b2)*g^2
//   param = param*(1 - lr*wd) - lr * (m/(1-b1^t)) / (sqrt(v/(1-b2^t)) + eps)            as PyTorch steps
#ifndef LLMC_ADAMW_H
#define LLMC_ADAMW_H

#include <math.h>   // sqrtf, cos, pow
#include <stddef.h> // size_t

#include "device.h" // Stream

typedef struct {
    float beta1, beta2, eps;
} AdamW;

// Updates n values in place; step counts from 1; weight_decay 0 for norms. One pass: reads 4n, writes 3n floats.
static inline void adamw_update(float *param, const float *grad, float *m, float *v, int64_t n, AdamW adam, float lr,
                                float weight_decay, float grad_scale, int64_t step, Stream *stream) {
    float bias1 = (float)(1.0 - pow((double)adam.beta1, (double)step));
    float bias2_sqrt = (float)sqrt(1.0 - pow((double)adam.beta2, (double)step));
    float step_size = lr / bias1, keep = 1.0f - lr * weight_decay;
    float b1 = adam.beta1, b2 = adam.beta2, eps = adam.eps;
#pragma omp parallel for simd num_threads(stream->threads) schedule(static)
    for (int64_t i = 0; i < n; i++) {
        float g = grad[i] * grad_scale;
        float mi = b1 * m[i] + (1.0f - b1) * g;
        float vi = b2 * v[i] + (1.0f - b2) * g * g;
        param[i] = param[i] * keep - step_size * mi / (sqrtf(vi) / bias2_sqrt + eps);
        m[i] = mi;
        v[i] = vi;
    }
}

// sum x[i]^2 in double over fixed blocks, the blocks added in order: the same bits for any thread count.
static inline double sum_of_squares(const float *x, int64_t n, Stream *stream) {
    enum { BLOCK = 1 << 15, GROUP = 256 }; // a group of blocks at a time, so that the partial sums have a fixed place
    double total = 0.0;
    for (int64_t start = 0; start < n; start += (int64_t)BLOCK * GROUP) {
        double partial[GROUP] = {0};
#pragma omp parallel for num_threads(stream->threads)
        for (int b = 0; b < GROUP; b++) {
            int64_t from = start + (int64_t)b * BLOCK, to = from + BLOCK < n ? from + BLOCK : n;
            double sum = 0.0;
#pragma omp simd reduction(+ : sum)
            for (int64_t i = from; i < to; i++) sum += (double)x[i] * (double)x[i];
            partial[b] = sum;
        }
        for (int b = 0; b < GROUP; b++) total += partial[b];
    }
    return total;
}

typedef enum { LR_COSINE, LR_LINEAR, LR_CONSTANT } LrShape;

// Learning rate of a step (from 0): linear warm-up over `warmup` steps, then from `peak` to peak*final_share at the
// last of n_steps by the shape.
static inline float lr_at(LrShape shape, float peak, float final_share, int64_t step, int64_t warmup, int64_t n_steps) {
    if (step < warmup) return peak * (float)(step + 1) / (float)warmup;
    if (shape == LR_CONSTANT || n_steps <= warmup + 1) return peak;
    double progress = (double)(step - warmup) / (double)(n_steps - 1 - warmup);
    if (progress > 1.0) progress = 1.0;
    double share = shape == LR_COSINE ? 0.5 * (1.0 + cos(3.14159265358979323846 * progress)) : 1.0 - progress;
    return (float)((double)peak * ((double)final_share + (1.0 - (double)final_share) * share));
}

#endif
