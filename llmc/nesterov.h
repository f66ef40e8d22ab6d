// NAdam (Dozat 2016) with decoupled decay, as Ajanthan et al. (2025) use it against delay, CPU. Constants of a step,
// the schedule of mu: optimizer.h.
//   g = grad * grad_scale;  m = b1*m + (1-b1)*g;  v = b2*v + (1-b2)*g^2;  den = sqrt(v/(1-b2^t)) + eps
//   param = param*(1 - lr*wd) - (lr(1-mu_t)/(1-Pi_t) * g + lr*mu_{t+1}/(1-Pi_t*mu_{t+1}) * m) / den
#ifndef LLMC_NESTEROV_H
#define LLMC_NESTEROV_H

#include <math.h>   // sqrtf
#include <stdint.h> // fixed-width integers

#include "device.h"    // Stream
#include "optimizer.h" // NesterovStep

// Updates n values in place by nesterov_step's constants. One pass: reads 4n, writes 3n floats.
static inline void nesterov_update(float *param, const float *grad, float *m, float *v, int64_t n, NesterovStep at,
                                   Stream *stream) {
#pragma omp parallel for simd num_threads(stream->threads) schedule(static) firstprivate(at)
    for (int64_t i = 0; i < n; i++) {
        float g = grad[i] * at.grad_scale;
        float mi = at.b1 * m[i] + (1.0f - at.b1) * g;
        float vi = at.b2 * v[i] + (1.0f - at.b2) * g * g;
        param[i] = param[i] * at.keep - (at.grad_size * g + at.mean_size * mi) / (sqrtf(vi) / at.bias2_sqrt + at.eps);
        m[i] = mi;
        v[i] = vi;
    }
}

#endif
