// SwiGLU, CPU (Shazeer 2020). gate and up are computed by one matrix product and lie side by side in a row.
//   out[n,f] = silu(gate[n,f]) * up[n,f],   silu(z) = z * sigmoid(z)                out overwritten
//   dgate = dout * up * sigmoid(gate) * (1 + gate * (1 - sigmoid(gate))),  dup = dout * silu(gate)   overwritten
#ifndef LLMC_SWIGLU_H
#define LLMC_SWIGLU_H

#include <stddef.h> // size_t

#include "device.h" // floatX, Stream
#include "vmath.h"  // sigmoid_simd

// out (N, F), gate_up (N, 2F): row = gate (F) | up (F)
static inline void swiglu_forward(floatX *out, const floatX *gate_up, int N, int F, Stream *stream) {
#pragma omp parallel for num_threads(stream->threads)
    for (int n = 0; n < N; n++) {
        const floatX *gate = gate_up + (size_t)n * 2 * F, *up = gate + F;
        floatX *to = out + (size_t)n * F;
#pragma omp simd
        for (int f = 0; f < F; f++) to[f] = gate[f] * sigmoid_simd(gate[f]) * up[f];
    }
}

// dgate_up (N, 2F) =, dout (N, F), gate_up (N, 2F). dgate_up may be gate_up itself.
static inline void swiglu_backward(floatX *dgate_up, const floatX *dout, const floatX *gate_up, int N, int F,
                                   Stream *stream) {
#pragma omp parallel for num_threads(stream->threads)
    for (int n = 0; n < N; n++) {
        const floatX *gate = gate_up + (size_t)n * 2 * F, *up = gate + F, *grad = dout + (size_t)n * F;
        floatX *dgate = dgate_up + (size_t)n * 2 * F, *dup = dgate + F;
#pragma omp simd
        for (int f = 0; f < F; f++) {
            float z = gate[f], u = up[f], g = grad[f], s = sigmoid_simd(z);
            dgate[f] = g * u * s * (1.0f + z * (1.0f - s));
            dup[f] = g * z * s;
        }
    }
}

#endif
