// Outer steps of DiLoCo (Douillard et al. 2023), element by element, CUDA: what a replica adds to its pseudo-gradient
// and what it does with the average.
//   delta   error += global - local                                              added to
//   step    moment = momentum*moment + pending                                   in place
//           global -= lr * (pending + momentum*moment)                           Nesterov, in place
//           local   = mix*local + (1-mix)*global                                 in place
// A thread for 4 values (elements.cuh), blocks of 256, any n and any addresses. No shared memory.
#ifndef LLMC_OUTER_CUH
#define LLMC_OUTER_CUH

#include <stdint.h> // fixed-width integers

#include "device.cuh"   // Stream, LAUNCH
#include "elements.cuh" // elements_do, values_load, values_store

struct OuterDeltaOp {
    float *error;
    const float *global, *local;
    template <int WIDTH> __device__ void at(int64_t i) const {
        Values<WIDTH> e = values_load<WIDTH>(error + i);
        Values<WIDTH> g = values_load<WIDTH>(global + i), l = values_load<WIDTH>(local + i);
#pragma unroll
        for (int j = 0; j < WIDTH; j++) e.v[j] += g.v[j] - l.v[j];
        values_store(error + i, e);
    }
};

// Moves 16n bytes.
__global__ static void __launch_bounds__(ELEMENTS_BLOCK) outer_delta_kernel(OuterDeltaOp op, Elements range) {
    elements_do<4>(op, range);
}

struct OuterStepOp {
    float *global, *moment, *local;
    const float *pending;
    float lr, momentum, mix;
    template <int WIDTH> __device__ void at(int64_t i) const {
        Values<WIDTH> g = values_load<WIDTH>(global + i), m = values_load<WIDTH>(moment + i);
        Values<WIDTH> l = values_load<WIDTH>(local + i), p = values_load<WIDTH>(pending + i);
#pragma unroll
        for (int j = 0; j < WIDTH; j++) {
            m.v[j] = momentum * m.v[j] + p.v[j];
            g.v[j] -= lr * (p.v[j] + momentum * m.v[j]);
            l.v[j] = mix * l.v[j] + (1.0f - mix) * g.v[j];
        }
        values_store(moment + i, m);
        values_store(global + i, g);
        values_store(local + i, l);
    }
};

// Moves 28n bytes.
__global__ static void __launch_bounds__(ELEMENTS_BLOCK) outer_step_kernel(OuterStepOp op, Elements range) {
    elements_do<4>(op, range);
}

// error, global, local (n)
static inline void outer_delta(float *error, const float *global, const float *local, int64_t n, Stream *stream) {
    OuterDeltaOp op = {error, global, local};
    Elements range = elements_of(n, 4, aligned_16(error, global, local));
    LAUNCH(outer_delta_kernel, range.blocks, ELEMENTS_BLOCK, 0, stream, op, range);
}

// All (n). mix: share of the local values that stays.
static inline void outer_step(float *global, float *moment, float *local, const float *pending, float lr,
                              float momentum, float mix, int64_t n, Stream *stream) {
    OuterStepOp op = {global, moment, local, pending, lr, momentum, mix};
    Elements range = elements_of(n, 4, aligned_16(global, moment, local, pending));
    LAUNCH(outer_step_kernel, range.blocks, ELEMENTS_BLOCK, 0, stream, op, range);
}

#endif
