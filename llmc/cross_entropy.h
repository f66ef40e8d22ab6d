// Softmax cross-entropy of a chunk of rows, CPU.
//   loss[n] = lse[n] - logits[n, target[n]],  lse[n] = log sum_v exp(logits[n,v]);  0 where target[n] < 0
//   dlogits[n,v] = scale * (exp(logits[n,v] - lse[n]) - [v == target[n]]);          0 where target[n] < 0
// The gradient overwrites the logits: a chunk's logits are needed once.
#ifndef LLMC_CROSS_ENTROPY_H
#define LLMC_CROSS_ENTROPY_H

#include <math.h>   // logf
#include <stddef.h> // size_t

#include "device.h" // floatX, Stream
#include "vmath.h"  // exp_simd

// loss (N), logits (N, V), targets (N), -1 = not counted. backward != 0 also turns logits into dlogits.
static inline void cross_entropy(float *loss, floatX *logits, const int32_t *targets, int N, int V, float scale,
                                 int backward, Stream *stream) {
#pragma omp parallel for num_threads(stream->threads)
    for (int n = 0; n < N; n++) {
        floatX *row = logits + (size_t)n * V;
        loss[n] = 0.0f;
        if (targets[n] < 0) {
            if (backward) memset(row, 0, sizeof(float) * (size_t)V);
            continue;
        }
        float max = row[0], sum = 0.0f, target = row[targets[n]];
#pragma omp simd reduction(max : max)
        for (int v = 0; v < V; v++) max = row[v] > max ? row[v] : max;
        if (!backward) {
#pragma omp simd reduction(+ : sum)
            for (int v = 0; v < V; v++) sum += exp_simd(row[v] - max);
        } else {
#pragma omp simd reduction(+ : sum)
            for (int v = 0; v < V; v++) {
                row[v] = exp_simd(row[v] - max);
                sum += row[v];
            }
            float share = scale / sum;
#pragma omp simd
            for (int v = 0; v < V; v++) row[v] *= share;
            row[targets[n]] -= scale;
        }
        loss[n] = logf(sum) + max - target;
    }
}

#endif
