// AdamW in a rotated basis ([B], SPEC 7) of a weight matrix W (m,n) with gradient G, CUDA. Which sides are rotated, and
// when: optimizer.h. (2nd, bilateral) is SOAP, (1st, unilateral) is GaLore of full rank.
//   M = b1*M + (1-b1)*G
//   L = b2*L + (1-b2)*G G^T,  R = b2*R + (1-b2)*G^T G       if bases come of second moments
//   Q_L, Q_R refreshed where it is due: eigenvectors of L, R; or singular vectors of M
//   G' = Q_L^T G Q_R,  M' = Q_L^T M Q_R,  V = b2*V + (1-b2)*G'^2
//   W = W*(1 - lr*wd) - lr * Q_L [(M'/(1-b1^t)) / (sqrt(V/(1-b2^t)) + eps)] Q_R^T
// param, M, V, L, R, Q_L, Q_R in place, all in device memory. The steps: rotate_step.h; here are the ops it is made of.
// Costs, and where M lies, as in rotate.h. Only refreshes wait for the stream.
#ifndef LLMC_ROTATE_CUH
#define LLMC_ROTATE_CUH

#include <stdint.h> // fixed-width integers

#include "adamw.cuh"    // adamw_update
#include "device.cuh"   // Stream, LAUNCH, scratch_get
#include "elements.cuh" // elements_do, values_load, values_store
#include "linalg.cuh"   // eigh, svd_full, orthonormalize, linalg_columns, linalg_blocks
#include "matmul.cuh"   // matmul_product
#include "optimizer.h"  // Optimizer, rotate_sides
#include "vector.cuh"   // vector_blend

// Rows of a second moment that are one product; smaller ones leave a GPU idle. Matrices that are stepped together, with
// batched products, have at most so many values: larger ones fill it alone.
#ifdef TESTING
enum { ROTATE_BLOCK = 24, ROTATE_GROUP = 2000 };
#else
enum { ROTATE_BLOCK = 1024, ROTATE_GROUP = 1 << 22 };
#endif

struct RotateDirectionOp {
    float *grad, *mean, *v;
    AdamWStep step;
    float b1; // 1: mean is blended already
    template <int WIDTH> __device__ void at(int64_t i) const {
        Values<WIDTH> g4 = values_load<WIDTH>(grad + i), m4 = values_load<WIDTH>(mean + i);
        Values<WIDTH> v4 = values_load<WIDTH>(v + i);
#pragma unroll
        for (int j = 0; j < WIDTH; j++) {
            float g = g4.v[j] * step.grad_scale;
            float mi = b1 * m4.v[j] + (1.0f - b1) * g;
            float vi = step.b2 * v4.v[j] + (1.0f - step.b2) * g * g;
            g4.v[j] = step.step_size * mi / (sqrtf(vi) / step.bias2_sqrt + step.eps);
            m4.v[j] = mi;
            v4.v[j] = vi;
        }
        values_store(grad + i, g4);
        values_store(mean + i, m4);
        values_store(v + i, v4);
    }
};

// A thread for 4 values (elements.cuh), blocks of 256, any n and any addresses. No shared memory. Moves 24n bytes.
__global__ static void __launch_bounds__(ELEMENTS_BLOCK) rotate_direction_kernel(RotateDirectionOp op, Elements range) {
    elements_do<4>(op, range);
}

struct RotateApplyOp {
    float *param;
    const float *update;
    float keep;
    template <int WIDTH> __device__ void at(int64_t i) const {
        Values<WIDTH> p4 = values_load<WIDTH>(param + i), u4 = values_load<WIDTH>(update + i);
#pragma unroll
        for (int j = 0; j < WIDTH; j++) p4.v[j] = p4.v[j] * keep - u4.v[j];
        values_store(param + i, p4);
    }
};

// As above. Moves 12n bytes.
__global__ static void __launch_bounds__(ELEMENTS_BLOCK) rotate_apply_kernel(RotateApplyOp op, Elements range) {
    elements_do<4>(op, range);
}

#define ROTATE_LANES 8

// out (cols) = sums over the rows of a*b, (rows, cols). grid ceil(cols/32), block (32, 8): a thread of a column takes
// every eighth row, the eight sums are added in order. 2 KiB of shared memory. Moves 8 bytes a value.
__global__ static void rotate_column_dots_kernel(float *out, const float *a, const float *b, int rows, int cols) {
    __shared__ double sums[ROTATE_LANES][32];
    int x = (int)threadIdx.x, lane = (int)threadIdx.y, col = 32 * (int)blockIdx.x + x;
    double sum = 0.0;
    for (int i = lane; i < rows && col < cols; i += ROTATE_LANES) {
        int64_t at = (int64_t)i * cols + col;
        sum += (double)a[at] * (double)b[at];
    }
    sums[lane][x] = sum;
    __syncthreads();
    if (lane > 0 || col >= cols) return;
    for (int y = 1; y < ROTATE_LANES; y++) sum += sums[y][x];
    out[col] = (float)sum;
}

// order (n) = the indices of keys (n), descending. One thread a key counts those before it: n^2 comparisons, all reads
// from the caches.
__global__ static void rotate_order_kernel(int *order, const float *keys, int n) {
    int i = (int)(blockIdx.x * blockDim.x + threadIdx.x), rank = 0;
    if (i >= n) return;
    for (int j = 0; j < n; j++) rank += rotate_before(keys[j], j, keys[i], i);
    order[rank] = i;
}

// to (rows, cols) with row stride ldt = rows (axis 0) or columns (axis 1) of `from`, row stride ldf, in the order. One
// thread a value, 8 bytes each.
__global__ static void rotate_gather_kernel(float *to, int64_t ldt, const float *from, int64_t ldf, const int *order,
                                            int rows, int cols, int axis) {
    int64_t at = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, i = at / cols, j = at % cols;
    if (i < rows) to[i * ldt + j] = axis == 0 ? from[order[i] * ldf + j] : from[i * ldf + order[j]];
}

// to = keep*to + add*(scale*x), both (rows, width) with row stride ld. One thread a value, 12 bytes each.
__global__ static void rotate_blend_kernel(float *to, const float *x, int64_t ld, int64_t rows, int64_t width,
                                           float keep, float add, float scale) {
    int64_t at = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, i = at / width * ld + at % width;
    if (at >= rows * width) return;
    float scaled = x[i] * scale;
    to[i] = keep * to[i] + add * scaled;
}

static inline void rotate_blend(float *to, const float *x, int64_t ld, int64_t rows, int64_t width, float keep,
                                float add, float scale, Stream *stream) {
    LAUNCH(rotate_blend_kernel, linalg_blocks(rows * width), 256, 0, stream, to, x, ld, rows, width, keep, add, scale);
}

// A (n,n): what is above the diagonal = what is below it. grid (ceil(n/32), ceil(n/32)), block (32, 8): a tile on or
// below the diagonal is read by rows and written by rows where it belongs. 4.2 KB shared. Moves 4n^2 bytes.
__global__ static void rotate_mirror_kernel(float *A, int n) {
    __shared__ float tile[32][33];
    int row = 32 * (int)blockIdx.y, col = 32 * (int)blockIdx.x, x = (int)threadIdx.x;
    if (col > row) return;
    for (int y = (int)threadIdx.y; y < 32; y += 8)
        if (row + y < n && col + x < n) tile[y][x] = A[(int64_t)(row + y) * n + col + x];
    __syncthreads();
    for (int y = (int)threadIdx.y; y < 32; y += 8)
        if (col + y < row + x && row + x < n) A[(int64_t)(col + y) * n + row + x] = tile[x][y];
}

static inline void rotate_mirror(float *A, int n, Stream *stream) {
    unsigned int tiles = (unsigned int)((n + 31) / 32);
    LAUNCH(rotate_mirror_kernel, dim3(tiles, tiles), dim3(32, 8), 0, stream, A, n);
}

// With g = grad * grad_scale: mean = b1*mean + (1-b1)*g, unless it is blended already; V = b2*V + (1-b2)*g^2; grad =
// step_size * mean / (sqrt(V)/bias2_sqrt + eps). All (n), in the rotated basis, in place.
static inline void rotate_direction(float *grad, float *mean, float *v, AdamWStep at, int blended, int64_t n,
                                    Stream *stream) {
    RotateDirectionOp op = {grad, mean, v, at, blended ? 1.0f : at.b1};
    Elements range = elements_of(n, 4, aligned_16(grad, mean, v));
    LAUNCH(rotate_direction_kernel, range.blocks, ELEMENTS_BLOCK, 0, stream, op, range);
}

// param (n) = param*keep - update (n)
static inline void rotate_apply(float *param, const float *update, float keep, int64_t n, Stream *stream) {
    RotateApplyOp op = {param, update, keep};
    Elements range = elements_of(n, 4, aligned_16(param, update));
    LAUNCH(rotate_apply_kernel, range.blocks, ELEMENTS_BLOCK, 0, stream, op, range);
}

// out (cols) = sums over the rows of a*b, a and b (rows, cols); in double, rounded once.
static inline void rotate_column_dots(float *out, const float *a, const float *b, int rows, int cols, Stream *stream) {
    LAUNCH(rotate_column_dots_kernel, (unsigned)((cols + 31) / 32), dim3(32, ROTATE_LANES), 0, stream, out, a, b, rows,
           cols);
}

// order (n) = the indices of keys (n), descending; equal ones in their order, NaN last.
static inline void rotate_order(int *order, const float *keys, int n, Stream *stream) {
    LAUNCH(rotate_order_kernel, linalg_blocks(n), 256, 0, stream, order, keys, n);
}

// to (rows, cols) with row stride ldt = rows (axis 0) or columns (axis 1) of `from`, row stride ldf, in the order.
static inline void rotate_gather(float *to, int64_t ldt, const float *from, int64_t ldf, const int *order, int rows,
                                 int cols, int axis, Stream *stream) {
    LAUNCH(rotate_gather_kernel, linalg_blocks((int64_t)rows * cols), 256, 0, stream, to, ldt, from, ldf, order, rows,
           cols, axis);
}

#include "rotate_step.h" // rotate_update

#endif
