// What drives AdamW on any device: its constants, those of one step, and the learning-rate schedule.
#ifndef LLMC_ADAMW_CONFIG_H
#define LLMC_ADAMW_CONFIG_H

#include <math.h>   // cos, pow, sqrt
#include <stdint.h> // fixed-width integers

typedef struct {
    float beta1, beta2, eps;
} AdamW;

// What is the same for all values of a step (adamw.h has the formula).
typedef struct {
    float b1, b2, eps, grad_scale;
    float keep;       // 1 - lr*wd
    float step_size;  // lr / (1 - b1^t)
    float bias2_sqrt; // sqrt(1 - b2^t)
} AdamWStep;

static inline AdamWStep adamw_step(AdamW adam, float lr, float weight_decay, float grad_scale, int64_t step) {
    float bias1 = (float)(1.0 - pow((double)adam.beta1, (double)step));
    float bias2_sqrt = (float)sqrt(1.0 - pow((double)adam.beta2, (double)step));
    AdamWStep at = {adam.beta1, adam.beta2, adam.eps, grad_scale, 1.0f - lr * weight_decay, lr / bias1, bias2_sqrt};
    return at;
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
