// NAdam (Dozat 2016) with decoupled decay, as Ajanthan et al. (2025) use it against delay, CUDA. Constants of a step,
// the schedule of mu: optimizer.h.
//   g = grad * grad_scale;  m = b1*m + (1-b1)*g;  v = b2*v + (1-b2)*g^2;  den = sqrt(v/(1-b2^t)) + eps
//   param = param*(1 - lr*wd) - (lr(1-mu_t)/(1-Pi_t) * g + lr*mu_{t+1}/(1-Pi_t*mu_{t+1}) * m) / den
// param, m, v in place.
#ifndef LLMC_NESTEROV_CUH
#define LLMC_NESTEROV_CUH

#include <stdint.h> // fixed-width integers

#include "adamw.cuh"    // AdamOp
#include "device.cuh"   // Stream, LAUNCH
#include "elements.cuh" // elements_do
#include "optimizer.h"  // NesterovStep

static __device__ inline float adam_moved(const NesterovStep &step, float param, float g, float m, float v) {
    float den = sqrtf(v) / step.bias2_sqrt + step.eps;
    return param * step.keep - (step.grad_size * g + step.mean_size * m) / den;
}

// A thread for 4 values (elements.cuh), blocks of 256, any n and any addresses. No shared memory. Moves 28n bytes.
__global__ static void __launch_bounds__(ELEMENTS_BLOCK) nesterov_kernel(AdamOp<NesterovStep> op, Elements range) {
    elements_do<4>(op, range);
}

// Updates n values in place by nesterov_step's constants.
static inline void nesterov_update(float *param, const float *grad, float *m, float *v, int64_t n, NesterovStep at,
                                   Stream *stream) {
    AdamOp<NesterovStep> op = {param, grad, m, v, at};
    Elements range = elements_of(n, 4, aligned_16(param, grad, m, v));
    LAUNCH(nesterov_kernel, range.blocks, ELEMENTS_BLOCK, 0, stream, op, range);
}

#endif
