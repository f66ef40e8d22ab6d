// AdamW in a rotated basis ([B], SPEC 7) of a weight matrix W (m,n) with gradient G, CPU. Which sides are rotated, and
// when: optimizer.h. (2nd, bilateral) is SOAP, (1st, unilateral) is GaLore of full rank.
//   M = b1*M + (1-b1)*G                 not rotated
//   L = b2*L + (1-b2)*G G^T,  R = b2*R + (1-b2)*G^T G       if bases come of second moments
//   Q_L, Q_R refreshed where it is due: eigenvectors of L, R; or singular vectors of M
//   G' = Q_L^T G Q_R,  M' = Q_L^T M Q_R,  V = b2*V + (1-b2)*G'^2
//   W = W*(1 - lr*wd) - lr * Q_L [(M'/(1-b1^t)) / (sqrt(V/(1-b2^t)) + eps)] Q_R^T
// param, M, V, L, R, Q_L, Q_R in place. The steps: rotate_step.h; here are the ops it is made of.
//
// Costs 2mn(m+n) flops for each of G', M', the way back, and for L and R together; a refresh of a side s about 5 s^3.
// In the very first step M' is diagonal if both sides are rotated, and what is beside the diagonal is rounding that the
// quotient makes as large as the rest: that step is partly noise of AdamW's size, the method has it so.
#ifndef LLMC_ROTATE_H
#define LLMC_ROTATE_H

#include <math.h>   // sqrtf
#include <stdint.h> // fixed-width integers

#include "adamw.h"     // adamw_update
#include "device.h"    // Stream, scratch_get
#include "linalg.h"    // eigh, svd_full, orthonormalize, linalg_columns
#include "matmul.h"    // matmul_product
#include "optimizer.h" // Optimizer, rotate_sides
#include "vector.h"    // vector_blend

// V = b2*V + (1-b2)*g^2 with g = grad * grad_scale; grad = step_size * mean / (sqrt(V)/bias2_sqrt + eps). All (n), in
// the rotated basis; grad and v in place.
static inline void rotate_direction(float *grad, const float *mean, float *v, AdamWStep at, int64_t n, Stream *stream) {
#pragma omp parallel for simd num_threads(stream->threads) schedule(static) firstprivate(at)
    for (int64_t i = 0; i < n; i++) {
        float g = grad[i] * at.grad_scale;
        float vi = at.b2 * v[i] + (1.0f - at.b2) * g * g;
        grad[i] = at.step_size * mean[i] / (sqrtf(vi) / at.bias2_sqrt + at.eps);
        v[i] = vi;
    }
}

// param (n) = param*keep - update (n)
static inline void rotate_apply(float *param, const float *update, float keep, int64_t n, Stream *stream) {
#pragma omp parallel for simd num_threads(stream->threads) schedule(static)
    for (int64_t i = 0; i < n; i++) param[i] = param[i] * keep - update[i];
}

// out (cols) = sums over the rows of a*b, a and b (rows, cols); in double, rounded once.
static inline void rotate_column_dots(float *out, const float *a, const float *b, int rows, int cols, Stream *stream) {
    enum { WIDTH = 64 };
    if (stream->failed) return;
#pragma omp parallel for num_threads(stream->threads)
    for (int from = 0; from < cols; from += WIDTH) {
        int width = cols - from < WIDTH ? cols - from : WIDTH;
        double sums[WIDTH] = {0.0};
        for (int i = 0; i < rows; i++) {
            const float *row_a = a + (int64_t)i * cols + from, *row_b = b + (int64_t)i * cols + from;
            for (int j = 0; j < width; j++) sums[j] += (double)row_a[j] * (double)row_b[j];
        }
        for (int j = 0; j < width; j++) out[from + j] = (float)sums[j];
    }
}

// order (n) = the indices of keys (n), descending; equal ones in their order, NaN last.
static inline void rotate_order(int *order, const float *keys, int n, Stream *stream) {
    if (stream->failed) return;
#pragma omp parallel for num_threads(stream->threads)
    for (int i = 0; i < n; i++) {
        int rank = 0;
        for (int j = 0; j < n; j++) rank += rotate_before(keys[j], j, keys[i], i);
        order[rank] = i;
    }
}

// to (rows, cols) with row stride ldt = rows (axis 0) or columns (axis 1) of `from`, row stride ldf, in the order.
static inline void rotate_gather(float *to, int64_t ldt, const float *from, int64_t ldf, const int *order, int rows,
                                 int cols, int axis, Stream *stream) {
    if (stream->failed) return;
#pragma omp parallel for num_threads(stream->threads)
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < cols; j++)
            to[i * ldt + j] = axis == 0 ? from[order[i] * ldf + j] : from[i * ldf + order[j]];
}

#include "rotate_step.h" // rotate_update

#endif
