// Token embedding, CPU.
//   out[n,:] = weight[tokens[n],:]            out overwritten
//   dweight[tokens[n],:] += dout[n,:]         dweight added to, in the order of n whatever the thread count
#ifndef LLMC_EMBEDDING_H
#define LLMC_EMBEDDING_H

#include <stddef.h> // size_t

#include "device.h" // floatX, Stream
#include "dtype.h"  // float_of_bf16

// out (N, C), tokens (N) each < V (checked by the data loader), weight (V, C)
static inline void embedding_forward(floatX *out, const uint32_t *tokens, const float *weight, int N, int C,
                                     Stream *stream) {
#pragma omp parallel for num_threads(stream->threads)
    for (int n = 0; n < N; n++) memcpy(out + (size_t)n * C, weight + (size_t)tokens[n] * C, sizeof(float) * (size_t)C);
}

// The same of a weight that is kept as bf16.
static inline void embedding_forward_bf16(floatX *out, const uint32_t *tokens, const uint16_t *weight, int N, int C,
                                          Stream *stream) {
#pragma omp parallel for num_threads(stream->threads)
    for (int n = 0; n < N; n++) {
        const uint16_t *row = weight + (size_t)tokens[n] * C;
        floatX *to = out + (size_t)n * C;
#pragma omp simd
        for (int c = 0; c < C; c++) to[c] = float_of_bf16(row[c]);
    }
}

// dweight (V, C) +=, dout (N, C). A thread owns the ids that fall to it, so no two add to one row and the sum of a row
// runs over n ascending.
static inline void embedding_backward(float *dweight, const floatX *dout, const uint32_t *tokens, int N, int C,
                                      Stream *stream) {
#pragma omp parallel num_threads(stream->threads)
    {
        uint32_t owner = (uint32_t)omp_get_thread_num(), owners = (uint32_t)omp_get_num_threads();
        for (int n = 0; n < N; n++) {
            if (tokens[n] % owners != owner) continue;
            float *row = dweight + (size_t)tokens[n] * C;
            const floatX *add = dout + (size_t)n * C;
#pragma omp simd
            for (int c = 0; c < C; c++) row[c] += add[c];
        }
    }
}

#endif
