// Factorizations of dense fp32 matrices, CUDA: cuSOLVER, and subspace iteration whose products go through cuBLASLt. The
// names, shapes and results are those of linalg.h; U, s, V, A, Q, w are in device memory. All matrices are row-major.
//   A (m,n) = U (m,k) diag(s (k)) V (n,k)^T,  k = min(m,n),  U^T U = V^T V = I,  s descending       gesvd
//   A (n,n) = V (n,n) diag(w (n)) V^T,        A symmetric,   V^T V = I,          w descending       syevd
//   Q (m,r) := Q of its thin QR factorization                                                       geqrf, orgqr
//
// The SVD is gesvd, the QR iteration: it ends with fp32's accuracy and orthonormal factors for every matrix, of short
// rank too. Jacobi (gesvdj) is quicker on small ones but may stop short of its tolerance, and the polar way (gesvdp)
// moves small singular values. gesvd is for m >= n: the transpose is decomposed where A is wide.
//
// cuSOLVER goes on without end on NaN, so values are looked at first: each call waits for the stream, at most twice.
// The same card, library and matrix give the same bits. Signs of singular vectors are as they come.
#ifndef LLMC_LINALG_CUH
#define LLMC_LINALG_CUH

#include <cusolverDn.h> // the factorizations
#include <float.h>      // FLT_MAX
#include <math.h>       // NAN
#include <stdint.h>     // fixed-width integers
#include <stdlib.h>     // calloc

#include "device.cuh" // Stream, LAUNCH, scratch_get
#include "error.h"
#include "matmul.cuh" // matmul_product
#include "rand.h"     // rand_normal4

// to (cols, rows) = from (rows, cols)^T; flip: the columns of `to` in reverse order. Both packed.
// grid (ceil(cols/32), ceil(rows/32)), block (32, 8), by tiles so that both sides are read and written along rows.
// 4.2 KB shared (33 columns: a tile's column lies in 32 banks). Moves 8 bytes a value.
__global__ static void linalg_transpose_kernel(float *to, const float *from, int64_t rows, int64_t cols, int flip) {
    __shared__ float tile[32][33];
    int64_t row = 32 * (int64_t)blockIdx.y, col = 32 * (int64_t)blockIdx.x;
    int x = (int)threadIdx.x;
    for (int y = (int)threadIdx.y; y < 32; y += 8)
        if (row + y < rows && col + x < cols) tile[y][x] = from[(row + y) * cols + col + x];
    __syncthreads();
    for (int y = (int)threadIdx.y; y < 32; y += 8) {
        int64_t at = flip ? rows - 1 - (row + x) : row + x;
        if (col + y < cols && row + x < rows) to[(col + y) * rows + at] = tile[x][y];
    }
}

// to (rows, cols) with row stride ldt = from (rows, cols) with row stride ldf. One thread a value, 8 bytes each.
__global__ static void linalg_columns_kernel(float *to, int64_t ldt, const float *from, int64_t ldf, int64_t rows,
                                             int64_t cols) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < rows * cols) to[i / cols * ldt + i % cols] = from[i / cols * ldf + i % cols];
}

// largest = max(largest, bits of |values|): sizes order like their bits, and NaN comes after infinity. A maximum does
// not depend on its order. Grid as long as pays, each thread strides over it. 4 bytes a value.
__global__ static void linalg_largest_kernel(unsigned int *largest, const float *values, int64_t n) {
    unsigned int mine = 0;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x) {
        unsigned int bits = __float_as_uint(values[i]) & 0x7FFFFFFFu;
        mine = bits > mine ? bits : mine;
    }
    for (int lane = 16; lane > 0; lane /= 2) {
        unsigned int other = __shfl_xor_sync(0xFFFFFFFFu, mine, lane);
        mine = other > mine ? other : mine;
    }
    if (threadIdx.x % 32 == 0) atomicMax(largest, mine);
}

// values /= largest, unless that is 0. One thread a value, 8 bytes each.
__global__ static void linalg_divide_kernel(float *values, const unsigned int *largest, int64_t n) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n && *largest != 0) values[i] /= __uint_as_float(*largest);
}

// out (n) = standard normals of the sequence `sub`, four a thread.
__global__ static void linalg_normal_kernel(float *out, int64_t n, uint64_t seed, uint32_t sub) {
    int64_t index = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    float four[4];
    if (4 * index >= n) return;
    rand_normal4(four, seed, RAND_SVD, sub, (uint64_t)index);
    for (int64_t j = 0; j < 4 && 4 * index + j < n; j++) out[4 * index + j] = four[j];
}

static inline unsigned int linalg_blocks(int64_t threads) {
    return (unsigned int)((threads + 255) / 256);
}

static inline void linalg_transpose(float *to, const float *from, int64_t rows, int64_t cols, int flip,
                                    Stream *stream) {
    dim3 grid((unsigned int)((cols + 31) / 32), (unsigned int)((rows + 31) / 32));
    LAUNCH(linalg_transpose_kernel, grid, dim3(32, 8), 0, stream, to, from, rows, cols, flip);
}

static inline void linalg_columns(float *to, int64_t ldt, const float *from, int64_t ldf, int64_t rows, int64_t cols,
                                  Stream *stream) {
    LAUNCH(linalg_columns_kernel, linalg_blocks(rows * cols), 256, 0, stream, to, ldt, from, ldf, rows, cols);
}

static inline void linalg_normal(float *out, int64_t n, uint64_t seed, uint32_t sub, Stream *stream) {
    LAUNCH(linalg_normal_kernel, linalg_blocks((n + 3) / 4), 256, 0, stream, out, n, seed, sub);
}

static inline void linalg_kept_free(void *data) {
    device_free(((Scratch *)data)->data);
    free(data);
}

// n_bytes of the stream's device memory for one factorization, apart from the scratch of those who ask for it; NULL
// with a message without memory.
static inline void *linalg_scratch(size_t n_bytes, Stream *stream) {
    Kept *kept = &stream->kept[KEPT_LINALG];
    if (kept->data == NULL) kept->data = calloc(1, sizeof(Scratch)), kept->destroy = linalg_kept_free;
    if (kept->data != NULL) return scratch_get((Scratch *)kept->data, n_bytes);
    error_set("out of memory for a factorization");
    return NULL;
}

// The bits of the largest size among n values, in the solver's scratch until its next use; NULL without memory.
static inline unsigned int *linalg_largest(const float *values, int64_t n, Stream *stream) {
    unsigned int *largest = (unsigned int *)linalg_scratch(DEVICE_ALIGN, stream);
    if (largest == NULL) {
        stream->failed = 1;
        return NULL;
    }
    unsigned int blocks = linalg_blocks(n);
    device_zero(largest, sizeof *largest, stream);
    LAUNCH(linalg_largest_kernel, blocks < 1024 ? blocks : 1024, 256, 0, stream, largest, values, n);
    return largest;
}

// Divides n values by the largest of their sizes, unless that is 0.
static inline void linalg_unit_range(float *values, int64_t n, Stream *stream) {
    const unsigned int *largest = linalg_largest(values, n, stream);
    if (largest != NULL) LAUNCH(linalg_divide_kernel, linalg_blocks(n), 256, 0, stream, values, largest, n);
}

// The stream's cuSOLVER, made here and not with the stream: it takes memory and time that most streams never need.
static inline int linalg_start(Stream *stream) {
    cusolverDnHandle_t solver = NULL;
    if (stream->solver != NULL) return 0;
    if (cusolverDnCreate(&solver) == CUSOLVER_STATUS_SUCCESS &&
        cusolverDnSetStream(solver, stream->cuda) == CUSOLVER_STATUS_SUCCESS) {
        stream->solver = solver;
        return 0;
    }
    if (solver != NULL) (void)cusolverDnDestroy(solver);
    return error_set("cuSOLVER does not start on this GPU");
}

// Before a factorization: 0, or -1 if cuSOLVER does not start, one of n values is infinite or NaN, or the stream has
// failed. Waits for the stream.
static inline int linalg_check(const float *values, int64_t n, const char *what, Stream *stream) {
    if (stream_check(stream) || linalg_start(stream)) return -1;
    const unsigned int *largest = linalg_largest(values, n, stream);
    float size = NAN;
    if (largest != NULL) device_copy(&size, largest, sizeof size, stream);
    if (stream_check(stream)) return -1;
    return size <= FLT_MAX ? 0 : error_set("%s: a value of the matrix is infinite or NaN", what);
}

// 0, or -1 after a call of cuSOLVER that was refused: the message says which.
static inline int linalg_status(cusolverStatus_t status, const char *call, int line) {
    if (status == CUSOLVER_STATUS_SUCCESS) return 0;
    return error_set(
        "linalg.cuh:%d: %s: cuSOLVER status %d; does the installed cuSOLVER match the toolkit this was built "
        "with?",
        line, call, (int)status);
}
#define LINALG_TRY(call)                                                                                               \
    do {                                                                                                               \
        if (linalg_status(call, #call, __LINE__)) return -1;                                                           \
    } while (0)

// Waits for a factorization; 0, or -1 if its info says that it has failed. `what` goes with the sizes.
static inline int linalg_finish(const int *device_info, const char *what, int m, int n, Stream *stream) {
    int info = -1;
    device_copy(&info, device_info, sizeof info, stream);
    if (stream_check(stream)) return -1;
    return info == 0 ? 0 : error_set("%s of a %d x %d matrix gave %d, no convergence", what, m, n, info);
}

// Floats a piece of the solver's scratch takes: whole multiples of DEVICE_ALIGN bytes.
static inline size_t linalg_piece(size_t floats) {
    size_t unit = DEVICE_ALIGN / sizeof(float);
    return (floats + unit - 1) / unit * unit;
}

// A (m,n) = U (m,k) diag(s (k)) V (n,k)^T, k = min(m,n), s descending. A is kept.
// Returns 0, or -1: no memory, A not finite, no convergence, or the stream has failed.
static inline int svd_full(float *U, float *s, float *V, const float *A, int m, int n, Stream *stream) {
    // In columns, tall (long,k): A itself, which its transpose by rows is, or A^T, which A by rows is. The right factor
    // comes transposed, (k,k) by columns, and is by rows what is asked for; the left one must be turned.
    int tall = m > n, longer = tall ? m : n, k = tall ? n : m, work_size = 0;
    if (linalg_check(A, (int64_t)m * n, "SVD", stream)) return -1;
    LINALG_TRY(cusolverDnSgesvd_bufferSize(stream->solver, longer, k, &work_size));
    size_t matrix = linalg_piece((size_t)longer * (size_t)k), rest = linalg_piece((size_t)k);
    size_t n_floats = 2 * matrix + rest + linalg_piece((size_t)work_size) + linalg_piece(1);
    float *copy = (float *)linalg_scratch(sizeof(float) * n_floats, stream);
    if (copy == NULL) return -1;
    float *left = copy + matrix, *diagonal = left + matrix, *work = diagonal + rest;
    int *info = (int *)(copy + n_floats - linalg_piece(1));
    if (tall)
        linalg_transpose(copy, A, m, n, 0, stream);
    else
        device_copy(copy, A, sizeof(float) * (size_t)longer * (size_t)k, stream);
    if (stream_check(stream)) return -1;
    LINALG_TRY(cusolverDnSgesvd(stream->solver, 'S', 'S', longer, k, copy, longer, s, left, longer, tall ? V : U, k,
                                work, work_size, diagonal, info));
    linalg_transpose(tall ? U : V, left, k, longer, 0, stream);
    return linalg_finish(info, "SVD", m, n, stream);
}

// A (n,n) symmetric = V (n,n) diag(w (n)) V^T, w descending, an eigenvector a column of V. A is kept; only its lower
// triangle is read, and what lies above it must be finite too.
// Returns 0, or -1: no memory, A not finite, no convergence, or the stream has failed.
static inline int eigh(float *V, float *w, const float *A, int n, Stream *stream) {
    // The lower triangle by rows is the upper one by columns. cuSOLVER's order is ascending.
    int work_size = 0;
    if (linalg_check(A, (int64_t)n * n, "eigenvalues", stream)) return -1;
    LINALG_TRY(cusolverDnSsyevd_bufferSize(stream->solver, CUSOLVER_EIG_MODE_VECTOR, CUBLAS_FILL_MODE_UPPER, n, A, n, w,
                                           &work_size));
    size_t matrix = linalg_piece((size_t)n * (size_t)n), row = linalg_piece((size_t)n);
    size_t n_floats = matrix + row + linalg_piece((size_t)work_size) + linalg_piece(1);
    float *copy = (float *)linalg_scratch(sizeof(float) * n_floats, stream);
    if (copy == NULL) return -1;
    float *ascending = copy + matrix, *work = ascending + row;
    int *info = (int *)(copy + n_floats - linalg_piece(1));
    device_copy(copy, A, sizeof(float) * (size_t)n * (size_t)n, stream);
    if (stream_check(stream)) return -1;
    LINALG_TRY(cusolverDnSsyevd(stream->solver, CUSOLVER_EIG_MODE_VECTOR, CUBLAS_FILL_MODE_UPPER, n, copy, n, ascending,
                                work, work_size, info));
    linalg_transpose(V, copy, n, n, 1, stream);
    linalg_transpose(w, ascending, n, 1, 1, stream);
    return linalg_finish(info, "eigenvalues", n, n, stream);
}

// Q (m,r) := the Q of its thin QR factorization, r <= m: orthonormal columns that span those of the input, by
// Householder reflections, so that dependent or zero columns become some orthonormal ones too.
// Returns 0, or -1: no memory, Q not finite, or the stream has failed.
static inline int orthonormalize(float *Q, int m, int r, Stream *stream) {
    int factor_size = 0, form_size = 0;
    if (linalg_check(Q, (int64_t)m * r, "orthonormalization", stream)) return -1;
    LINALG_TRY(cusolverDnSgeqrf_bufferSize(stream->solver, m, r, Q, m, &factor_size));
    LINALG_TRY(cusolverDnSorgqr_bufferSize(stream->solver, m, r, r, Q, m, Q, &form_size));
    int work_size = factor_size > form_size ? factor_size : form_size;
    size_t matrix = linalg_piece((size_t)m * (size_t)r), row = linalg_piece((size_t)r);
    size_t n_floats = matrix + row + linalg_piece((size_t)work_size) + linalg_piece(1);
    float *columns = (float *)linalg_scratch(sizeof(float) * n_floats, stream);
    if (columns == NULL) return -1;
    float *tau = columns + matrix, *work = tau + row;
    int *info = (int *)(columns + n_floats - linalg_piece(1)); // only wrong arguments are told there
    linalg_transpose(columns, Q, m, r, 0, stream);
    if (stream_check(stream)) return -1;
    LINALG_TRY(cusolverDnSgeqrf(stream->solver, m, r, columns, m, tau, work, work_size, info));
    LINALG_TRY(cusolverDnSorgqr(stream->solver, m, r, r, columns, m, tau, work, work_size, info));
    linalg_transpose(Q, columns, r, m, 0, stream);
    return stream_check(stream);
}

#include "svd.h" // svd_subspace, svd_truncated

#endif
