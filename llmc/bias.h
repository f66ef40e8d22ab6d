// Biases, CPU: one vector that is added to every row.
//   x[n,:] += bias[:]                            in place
//   dbias[:] += sum_n dout[n,:]                  added to, n ascending
#ifndef LLMC_BIAS_H
#define LLMC_BIAS_H

#include <stddef.h> // size_t

#include "device.h" // floatX, Stream

// x (N, M), bias (M)
static inline void bias_forward(floatX *x, const float *bias, int N, int M, Stream *stream) {
#pragma omp parallel for num_threads(stream->threads)
    for (int n = 0; n < N; n++) {
        floatX *row = x + (size_t)n * M;
#pragma omp simd
        for (int m = 0; m < M; m++) row[m] += bias[m];
    }
}

// dbias (M) +=, dout (N, M). A strip of columns a task: thread counts agree bit for bit.
static inline void bias_backward(float *dbias, const floatX *dout, int N, int M, Stream *stream) {
    enum { STRIP = 64 };
#pragma omp parallel for num_threads(stream->threads)
    for (int m0 = 0; m0 < M; m0 += STRIP) {
        float sum[STRIP] = {0};
        int width = M - m0 < STRIP ? M - m0 : STRIP;
        for (int n = 0; n < N; n++) {
            const floatX *row = dout + (size_t)n * M + m0;
#pragma omp simd
            for (int m = 0; m < width; m++) sum[m] += row[m];
        }
        for (int m = 0; m < width; m++) dbias[m0 + m] += sum[m];
    }
}

#endif
