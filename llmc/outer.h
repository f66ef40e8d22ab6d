// Outer steps of DiLoCo (Douillard et al. 2023), element by element, CPU: what a replica adds to its pseudo-gradient
// and what it does with the average.
//   delta   error += global - local                                              added to
//   step    moment = momentum*moment + pending                                   in place
//           global -= lr * (pending + momentum*moment)                           Nesterov, in place
//           local   = mix*local + (1-mix)*global                                 in place
#ifndef LLMC_OUTER_H
#define LLMC_OUTER_H

#include <stdint.h> // fixed-width integers

#include "device.h" // Stream

// error, global, local (n)
static inline void outer_delta(float *error, const float *global, const float *local, int64_t n, Stream *stream) {
#pragma omp parallel for simd num_threads(stream->threads) schedule(static)
    for (int64_t i = 0; i < n; i++) error[i] += global[i] - local[i];
}

// All (n). mix: share of the local values that stays.
static inline void outer_step(float *global, float *moment, float *local, const float *pending, float lr,
                              float momentum, float mix, int64_t n, Stream *stream) {
#pragma omp parallel for simd num_threads(stream->threads) schedule(static)
    for (int64_t i = 0; i < n; i++) {
        moment[i] = momentum * moment[i] + pending[i];
        global[i] -= lr * (pending[i] + momentum * moment[i]);
        local[i] = mix * local[i] + (1.0f - mix) * global[i];
    }
}

#endif
