// AdamW (Loshchilov and Hutter 2019), CPU. Constants, schedule: adamw_config.h.
//   g = grad * grad_scale;  m = b1*m + (1-b1)*g;  v = b2*v + (1-b2)*g^2
//   param = param*(1 - lr*wd) - lr * (m/(1-b1^t)) / (sqrt(v/(1-b2^t)) + eps)            as PyTorch steps
#ifndef LLMC_ADAMW_H
#define LLMC_ADAMW_H

#include <math.h>   // sqrtf
#include <stdint.h> // fixed-width integers

#include "adamw_config.h" // AdamW, adamw_step
#include "device.h"       // Stream

// Updates n values in place; step counts from 1; weight_decay 0 for norms. One pass: reads 4n, writes 3n floats.
static inline void adamw_update(float *param, const float *grad, float *m, float *v, int64_t n, AdamW adam, float lr,
                                float weight_decay, float grad_scale, int64_t step, Stream *stream) {
    AdamWStep at = adamw_step(adam, lr, weight_decay, grad_scale, step);
#pragma omp parallel for simd num_threads(stream->threads) schedule(static) firstprivate(at)
    for (int64_t i = 0; i < n; i++) {
        float g = grad[i] * at.grad_scale;
        float mi = at.b1 * m[i] + (1.0f - at.b1) * g;
        float vi = at.b2 * v[i] + (1.0f - at.b2) * g * g;
        param[i] = param[i] * at.keep - at.step_size * mi / (sqrtf(vi) / at.bias2_sqrt + at.eps);
        m[i] = mi;
        v[i] = vi;
    }
}

#endif
