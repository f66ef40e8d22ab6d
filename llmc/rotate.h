// AdamW in a rotated basis ([B], SPEC 7) of a weight matrix W (m,n) with gradient G, CPU. Which sides are rotated, and
// when: optimizer.h. (2nd, bilateral) is SOAP, (1st, unilateral) is GaLore of full rank.
//   M = b1*M + (1-b1)*G
//   L = b2*L + (1-b2)*G G^T,  R = b2*R + (1-b2)*G^T G       if bases come of second moments
//   Q_L, Q_R refreshed where it is due: eigenvectors of L, R; or singular vectors of M
//   G' = Q_L^T G Q_R,  M' = Q_L^T M Q_R,  V = b2*V + (1-b2)*G'^2
//   W = W*(1 - lr*wd) - lr * Q_L [(M'/(1-b1^t)) / (sqrt(V/(1-b2^t)) + eps)] Q_R^T
// param, M, V, L, R, Q_L, Q_R in place. The steps: rotate_step.h; here are the ops it is made of.
//
// Where M lies: the method leaves it unrotated and turns it in every step. Here M' is what is kept, blended with G',
// and a refresh turns it back by the old bases and in by the new ones: the same but for rounding, and one turn less in
// all steps without a refresh. L and R are computed on and below the diagonal, in blocks.
//
// Costs 2mn(m+n) flops for G' and as many for the way back, a little more than half of that for L and R together; a
// refresh as much as G' and the way back again, and about 5 s^3 for each side s.
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

// Rows of a second moment that are one product: wide enough for the matrix library, and of a side of 768 a third less
// is computed than of the whole square. Matrices that are stepped together have at most so many values; 0: each alone.
#ifdef TESTING
enum { ROTATE_BLOCK = 16, ROTATE_GROUP = 2000 };
#else
enum { ROTATE_BLOCK = 256, ROTATE_GROUP = 0 }; // batched products gain nothing on a CPU (matmul_batch)
#endif

// With g = grad * grad_scale: mean = b1*mean + (1-b1)*g, unless it is blended already; V = b2*V + (1-b2)*g^2; grad =
// step_size * mean / (sqrt(V)/bias2_sqrt + eps). All (n), in the rotated basis, in place.
static inline void rotate_direction(float *grad, float *mean, float *v, AdamWStep at, int blended, int64_t n,
                                    Stream *stream) {
    float b1 = blended ? 1.0f : at.b1;
#pragma omp parallel for simd num_threads(stream->threads) schedule(static) firstprivate(at, b1)
    for (int64_t i = 0; i < n; i++) {
        float g = grad[i] * at.grad_scale;
        float mi = b1 * mean[i] + (1.0f - b1) * g;
        float vi = at.b2 * v[i] + (1.0f - at.b2) * g * g;
        grad[i] = at.step_size * mi / (sqrtf(vi) / at.bias2_sqrt + at.eps);
        mean[i] = mi;
        v[i] = vi;
    }
}

// to = keep*to + add*(scale*x), both (rows, width) with row stride ld
static inline void rotate_blend(float *to, const float *x, int64_t ld, int64_t rows, int64_t width, float keep,
                                float add, float scale, Stream *stream) {
    if (stream->failed) return;
#pragma omp parallel for num_threads(stream->threads) schedule(static)
    for (int64_t i = 0; i < rows; i++) {
        float *row = to + i * ld;
        const float *with = x + i * ld;
#pragma omp simd
        for (int64_t j = 0; j < width; j++) {
            float scaled = with[j] * scale;
            row[j] = keep * row[j] + add * scaled;
        }
    }
}

// A (n,n): what is above the diagonal = what is below it.
static inline void rotate_mirror(float *A, int n, Stream *stream) {
    enum { TILE = 32 };
    if (stream->failed) return;
#pragma omp parallel for num_threads(stream->threads) schedule(dynamic)
    for (int from = 0; from < n; from += TILE)
        for (int row = from; row < n; row++)
            for (int col = from; col < from + TILE && col < row; col++)
                A[(int64_t)col * n + row] = A[(int64_t)row * n + col];
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
