// NAdam (Dozat 2016) with decoupled decay, as Ajanthan et al. (2025) use it against delay, CUDA. Constants of a step,
// the schedule of mu: optimizer.h.
//   g = grad * grad_scale;  m = b1*m + (1-b1)*g;  v = b2*v + (1-b2)*g^2;  den = sqrt(v/(1-b2^t)) + eps
//   param = param*(1 - lr*wd) - (lr(1-mu_t)/(1-Pi_t) * g + lr*mu_{t+1}/(1-Pi_t*mu_{t+1}) * m) / den
// param, m, v in place.
#ifndef LLMC_NESTEROV_CUH
#define LLMC_NESTEROV_CUH

#include <stdint.h> // fixed-width integers

#include "device.cuh"   // Stream, LAUNCH
#include "elements.cuh" // elements_do, values_load, values_store
#include "optimizer.h"  // NesterovStep

struct NesterovOp {
    float *param;
    const float *grad;
    float *m, *v;
    NesterovStep step;
    template <int WIDTH> __device__ void at(int64_t i) const {
        Values<WIDTH> p4 = values_load<WIDTH>(param + i), g4 = values_load<WIDTH>(grad + i);
        Values<WIDTH> m4 = values_load<WIDTH>(m + i), v4 = values_load<WIDTH>(v + i);
#pragma unroll
        for (int j = 0; j < WIDTH; j++) {
            float g = g4.v[j] * step.grad_scale;
            float mi = step.b1 * m4.v[j] + (1.0f - step.b1) * g;
            float vi = step.b2 * v4.v[j] + (1.0f - step.b2) * g * g;
            float den = sqrtf(vi) / step.bias2_sqrt + step.eps;
            p4.v[j] = p4.v[j] * step.keep - (step.grad_size * g + step.mean_size * mi) / den;
            m4.v[j] = mi;
            v4.v[j] = vi;
        }
        values_store(param + i, p4);
        values_store(m + i, m4);
        values_store(v + i, v4);
    }
};

// A thread for 4 values (elements.cuh), blocks of 256, any n and any addresses. No shared memory. Moves 28n bytes.
__global__ static void __launch_bounds__(ELEMENTS_BLOCK) nesterov_kernel(NesterovOp op, Elements range) {
    elements_do<4>(op, range);
}

// Updates n values in place by nesterov_step's constants.
static inline void nesterov_update(float *param, const float *grad, float *m, float *v, int64_t n, NesterovStep at,
                                   Stream *stream) {
    NesterovOp op = {param, grad, m, v, at};
    Elements range = elements_of(n, 4, aligned_16(param, grad, m, v));
    LAUNCH(nesterov_kernel, range.blocks, ELEMENTS_BLOCK, 0, stream, op, range);
}

#endif
