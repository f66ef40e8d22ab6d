// The residual stream where a matrix product does not add to it, CPU.
//   to[i] += x[i]                                in place
#ifndef LLMC_RESIDUAL_H
#define LLMC_RESIDUAL_H

#include <stdint.h> // int64_t

#include "device.h" // floatX, Stream

// to, x (n)
static inline void residual_add(floatX *to, const floatX *x, int64_t n, Stream *stream) {
#pragma omp parallel for simd num_threads(stream->threads) schedule(static)
    for (int64_t i = 0; i < n; i++) to[i] += x[i];
}

#endif
