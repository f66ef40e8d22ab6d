// Factorizations of dense fp32 matrices, CPU. Small and full ones by LAPACK (OpenBLAS), truncated ones by subspace
// iteration (Halko, Martinsson and Tropp 2011) whose large products go through oneDNN, as do those of a QR of 256
// columns and more. All matrices are row-major.
//   A (m,n) = U (m,k) diag(s (k)) V (n,k)^T,  k = min(m,n),  U^T U = V^T V = I,  s descending
//   A (n,n) = V (n,n) diag(w (n)) V^T,        A symmetric,   V^T V = I,          w descending
//
//   float U[m * r], s[r], V[n * r];
//   if (svd_truncated(U, s, V, A, m, n, r, 0, seed, tensor, stream)) return -1;   // A drifts, then, from the last V:
//   if (svd_truncated(U, s, V, A, m, n, r, 1, seed, tensor, stream)) return -1;
//
// LAPACK computes with one thread, so that its bits do not depend on how many there are; any thread may call it. They
// do depend on the CPU: OpenBLAS has kernels for each kind. For one it does not know it takes the oldest (0.3.21 on an
// Emerald Rapids, for one): with OPENBLAS_CORETYPE=SkylakeX in the environment full SVDs are then 2.5 times as fast.
// Signs of singular vectors are as they come.
#ifndef LLMC_LINALG_H
#define LLMC_LINALG_H

#include <float.h>   // FLT_MAX
#include <math.h>    // fabsf, nextafterf, sqrt
#include <omp.h>     // omp_set_num_threads
#include <pthread.h> // pthread_once
#include <stdint.h>  // fixed-width integers
#include <stdlib.h>  // malloc
#include <string.h>  // memcpy

#include "device.h" // Stream, scratch_get
#include "error.h"
#include "matmul.h" // matmul_product
#include "rand.h"   // rand_normal

// Fortran's interface: column-major, everything by address, lengths of texts last.
#ifdef __cplusplus
extern "C" {
#endif
void sgesdd_(const char *jobz, const int *m, const int *n, float *a, const int *lda, float *s, float *u, const int *ldu,
             float *vt, const int *ldvt, float *work, const int *lwork, int *iwork, int *info, size_t jobz_length);
void sgelqf_(const int *m, const int *n, float *a, const int *lda, float *tau, float *work, const int *lwork,
             int *info);
void sorglq_(const int *m, const int *n, const int *k, float *a, const int *lda, const float *tau, float *work,
             const int *lwork, int *info);
void ssyevd_(const char *jobz, const char *uplo, const int *n, float *a, const int *lda, float *w, float *work,
             const int *lwork, int *iwork, const int *liwork, int *info, size_t jobz_length, size_t uplo_length);
void openblas_set_num_threads(int num_threads);
#ifdef __cplusplus
}
#endif

static pthread_once_t linalg_once = PTHREAD_ONCE_INIT;

static inline void linalg_single_thread(void) {
    openblas_set_num_threads(1);
}

// From here on LAPACK computes with the calling thread alone. Returns this thread's count of OpenMP threads, to be set
// again afterwards: OpenBLAS's OpenMP build takes, and overwrites, that one instead of its own.
static inline int linalg_alone(void) {
    int threads = omp_get_max_threads();
    omp_set_num_threads(1);
    pthread_once(&linalg_once, linalg_single_thread);
    return threads;
}

// 0, or -1 if one of n values is infinite or NaN, on which LAPACK may loop or crash.
static inline int linalg_check(const float *values, int64_t n, const char *what) {
    int bad = 0;
    for (int64_t i = 0; i < n; i++) bad |= !(fabsf(values[i]) <= FLT_MAX);
    return bad ? error_set("%s: a value of the matrix is infinite or NaN", what) : 0;
}

// LAPACK's answer to lwork = -1 is a float: beyond 2^24 it may be rounded down.
static inline int linalg_work_size(float answer) {
    return (int)nextafterf(answer, FLT_MAX);
}

// A (m,n) = U (m,k) diag(s (k)) V (n,k)^T, k = min(m,n), s descending. A is kept. LAPACK's sgesdd (divide and conquer).
// Returns 0, or -1: no memory, A not finite, no convergence, or the stream has failed.
static inline int svd_full(float *U, float *s, float *V, const float *A, int m, int n, Stream *stream) {
    // Read by columns, A is A^T = V diag(s) U^T: LAPACK's right factor, (k,m) by columns, is U by rows.
    int k = m < n ? m : n, info = 0, query = -1;
    float answer = 0.0f;
    if (stream_check(stream) || linalg_check(A, (int64_t)m * n, "SVD")) return -1;
    sgesdd_("S", &n, &m, NULL, &n, s, NULL, &n, U, &k, &answer, &query, NULL, &info, 1);
    int work_size = linalg_work_size(answer);
    size_t n_matrix = (size_t)m * (size_t)n, n_left = (size_t)n * (size_t)k;
    float *copy = (float *)malloc(sizeof(float) * (n_matrix + n_left + (size_t)work_size));
    int *integers = (int *)malloc(sizeof(int) * 8 * (size_t)k);
    if (copy == NULL || integers == NULL) {
        free(copy);
        free(integers);
        return error_set("out of memory for the SVD of a %d x %d matrix", m, n);
    }
    float *left = copy + n_matrix, *work = left + n_left;
    int threads = linalg_alone();
    memcpy(copy, A, sizeof(float) * n_matrix);
    sgesdd_("S", &n, &m, copy, &n, s, left, &n, U, &k, work, &work_size, integers, &info, 1);
    omp_set_num_threads(threads);
    for (int j = 0; j < n; j++)
        for (int i = 0; i < k; i++) V[(size_t)j * (size_t)k + (size_t)i] = left[(size_t)i * (size_t)n + (size_t)j];
    free(copy);
    free(integers);
    if (info != 0) return error_set("SVD of a %d x %d matrix: LAPACK's sgesdd gave %d, no convergence", m, n, info);
    return 0;
}

// Columns of a panel of the blocked QR factorization, and from how many columns on a matrix is factorized so. Panels of
// 32 and 128 took longer for sides of 768 and 2048.
#ifdef TESTING
enum { LINALG_PANEL = 8, LINALG_BLOCKED = 20 }; // small matrices have several panels too
#else
enum { LINALG_PANEL = 64, LINALG_BLOCKED = 256 };
#endif

// The reflector of column k of a panel A (rows, LINALG_PANEL), I - tau v v^T with v[k] = 1 and 0 above, applied to the
// columns behind k. v (rows) takes the column's place. Returns tau; 0: nothing to do.
static inline float linalg_reflect(float *A, float *v, int k, int rows) {
    enum { WIDTH = LINALG_PANEL };
    double below = 0.0, head = (double)A[(int64_t)k * WIDTH + k];
    float sums[WIDTH] = {0.0f};
    for (int64_t i = 0; i < rows; i++) v[i] = i < k ? 0.0f : A[i * WIDTH + k];
    for (int i = k + 1; i < rows; i++) below += (double)v[i] * (double)v[i];
    double beta = head > 0.0 ? -sqrt(head * head + below) : sqrt(head * head + below);
    float tau = below > 0.0 ? (float)((beta - head) / beta) : 0.0f;
    for (int i = k + 1; i < rows; i++) v[i] = below > 0.0 ? (float)((double)v[i] / (head - beta)) : 0.0f;
    v[k] = 1.0f;
    for (int64_t i = k; i < rows; i++)
        for (int j = 0; j < WIDTH; j++) sums[j] += v[i] * A[i * WIDTH + j];
    for (int j = 0; j < WIDTH; j++) sums[j] = j > k ? sums[j] * tau : 0.0f;
    for (int64_t i = k; i < rows; i++)
        for (int j = 0; j < WIDTH; j++) A[i * WIDTH + j] -= v[i] * sums[j];
    for (int64_t i = 0; i < rows; i++) A[i * WIDTH + k] = v[i];
    return tau;
}

// Memory of a blocked QR factorization of (m,r).
typedef struct {
    float *panels; // the reflectors, a panel (m - j, LINALG_PANEL) behind the other
    float *T;      // (r, LINALG_PANEL) of panel j: H_1 H_2 ... = I + V T V^T
    float *x, *y;  // (LINALG_PANEL, r)
    float *v;      // (m)
} LinalgBlocks;

// T (w,w) of a panel's reflectors V (rows,w): upper triangular, T[k,k] = -tau[k], the column above by those before.
// From V^T V in double, tau anew as 2 / v^T v of the v that is there: of fp32 sums Q^T Q was off by up to 10 times as
// much.
static inline void linalg_block_factor(float *T, const float *V, const float *tau, int rows, int w) {
    enum { WIDTH = LINALG_PANEL };
    double gram[WIDTH][WIDTH] = {{0.0}};
    for (int64_t i = 0; i < rows; i++)
        for (int j = 0; j < WIDTH; j++)
            for (int k = 0; k < WIDTH; k++) gram[j][k] += (double)V[i * WIDTH + j] * (double)V[i * WIDTH + k];
    for (int k = 0; k < w; k++) {
        double factor = tau[k] > 0.0f ? -2.0 / gram[k][k] : 0.0;
        for (int i = 0; i < w; i++) {
            double sum = 0.0;
            for (int j = i; j < k; j++) sum += (double)T[i * WIDTH + j] * gram[j][k];
            T[i * WIDTH + k] = i < k ? (float)(factor * sum) : i == k ? (float)factor : 0.0f;
        }
    }
}

// C (rows, cols) with row stride ldc += V T V^T C; transposed: T^T for T.
static inline void linalg_block_apply(float *C, int64_t ldc, int cols, const float *V, const float *T, int transposed,
                                      int rows, int w, const LinalgBlocks *work, Stream *stream) {
    enum { WIDTH = LINALG_PANEL };
    if (cols == 0) return;
    matmul_product(work->x, cols, V, WIDTH, 1, C, ldc, 0, w, cols, rows, 0, 0, stream);
    matmul_product(work->y, cols, T, WIDTH, transposed, work->x, cols, 0, w, cols, w, 0, 0, stream);
    matmul_product(C, ldc, V, WIDTH, 0, work->y, cols, 0, rows, cols, w, 0, 1, stream);
}

// The reflectors of all panels of Q (m,r), which is used up.
static inline void linalg_block_reflectors(float *Q, int m, int r, const LinalgBlocks *work, Stream *stream) {
    enum { WIDTH = LINALG_PANEL };
    float tau[WIDTH], *V = work->panels;
    for (int j = 0; j < r; j += WIDTH) {
        int w = r - j < WIDTH ? r - j : WIDTH, rows = m - j;
        float *T = work->T + (int64_t)j * WIDTH, *from = Q + (int64_t)j * r + j;
        for (int64_t i = 0; i < rows; i++)
            for (int k = 0; k < WIDTH; k++) V[i * WIDTH + k] = k < w ? from[i * r + k] : 0.0f;
        for (int k = 0; k < w; k++) tau[k] = linalg_reflect(V, work->v, k, rows);
        linalg_block_factor(T, V, tau, rows, w);
        linalg_block_apply(from + w, r, r - j - w, V, T, 1, rows, w, work, stream);
        V += (int64_t)rows * WIDTH;
    }
}

// Q (m,r) = the panels' reflectors, the last ones first, of the first r columns of the identity. What is left of a
// panel and above it is still the identity when its turn comes.
static inline void linalg_block_form(float *Q, int m, int r, const LinalgBlocks *work, Stream *stream) {
    enum { WIDTH = LINALG_PANEL };
    const float *V = work->panels;
    for (int j = 0; j < r; j += WIDTH) V += (int64_t)(m - j) * WIDTH;
    memset(Q, 0, sizeof(float) * (size_t)m * (size_t)r);
    for (int64_t i = 0; i < r; i++) Q[i * r + i] = 1.0f;
    for (int j = (r - 1) / WIDTH * WIDTH; j >= 0; j -= WIDTH) {
        V -= (int64_t)(m - j) * WIDTH;
        linalg_block_apply(Q + (int64_t)j * r + j, r, r - j, V, work->T + (int64_t)j * WIDTH, 0, m - j,
                           r - j < WIDTH ? r - j : WIDTH, work, stream);
    }
}

// Householder QR by panels whose reflectors are applied together (Schreiber and Van Loan 1989), so that nearly all of
// it is oneDNN's products: at sides of 768 and 2048 1.3 to 1.6 times as fast as LAPACK with OpenBLAS's kernels for
// AVX-512, four times with those it takes for a CPU it does not know, and Q^T Q as near to I. 0, or -1 without memory
// or if a product fails.
static inline int linalg_blocked_qr(float *Q, int m, int r, Stream *stream) {
    enum { WIDTH = LINALG_PANEL };
    size_t n_panels = (size_t)(r + WIDTH - 1) / WIDTH, wide = (size_t)r * WIDTH, panel = (size_t)m * WIDTH;
    float *memory = (float *)malloc(sizeof(float) * (n_panels * panel + 3 * wide + (size_t)m));
    if (memory == NULL) return error_set("out of memory to orthonormalize a %d x %d matrix", m, r);
    LinalgBlocks work;
    work.panels = memory, work.T = memory + n_panels * panel;
    work.x = work.T + wide, work.y = work.x + wide, work.v = work.y + wide;
    linalg_block_reflectors(Q, m, r, &work, stream);
    linalg_block_form(Q, m, r, &work, stream);
    free(memory);
    return stream_check(stream);
}

// The same by LAPACK.
static inline int linalg_lapack_qr(float *Q, int m, int r) {
    // Read by columns, Q is Q^T (r,m) = L H with orthonormal rows in H, and H read by rows is what is asked for.
    int info = 0, query = -1;
    float answers[2] = {0.0f, 0.0f};
    sgelqf_(&r, &m, Q, &r, NULL, &answers[0], &query, &info);
    sorglq_(&r, &m, &r, Q, &r, NULL, &answers[1], &query, &info);
    int work_size = linalg_work_size(answers[0] > answers[1] ? answers[0] : answers[1]);
    float *tau = (float *)malloc(sizeof(float) * ((size_t)r + (size_t)work_size));
    if (tau == NULL) return error_set("out of memory to orthonormalize a %d x %d matrix", m, r);
    int threads = linalg_alone();
    sgelqf_(&r, &m, Q, &r, tau, tau + r, &work_size, &info);
    sorglq_(&r, &m, &r, Q, &r, tau, tau + r, &work_size, &info);
    omp_set_num_threads(threads);
    free(tau);
    return 0;
}

// Q (m,r) := the Q of its thin QR factorization, r <= m: orthonormal columns that span those of the input, by
// Householder reflections, so that dependent or zero columns become some orthonormal ones too.
// Returns 0, or -1: no memory, Q not finite, or the stream has failed.
static inline int orthonormalize(float *Q, int m, int r, Stream *stream) {
    if (stream_check(stream) || linalg_check(Q, (int64_t)m * r, "orthonormalization")) return -1;
    return r < LINALG_BLOCKED ? linalg_lapack_qr(Q, m, r) : linalg_blocked_qr(Q, m, r, stream);
}

// A (n,n) symmetric = V (n,n) diag(w (n)) V^T, w descending, an eigenvector a column of V. A is kept; only its lower
// triangle is read, and what lies above it must be finite too. LAPACK's ssyevd (divide and conquer).
// Returns 0, or -1: no memory, A not finite, no convergence, or the stream has failed.
static inline int eigh(float *V, float *w, const float *A, int n, Stream *stream) {
    int info = 0, query = -1, n_integers = 0;
    float answer = 0.0f;
    if (stream_check(stream) || linalg_check(A, (int64_t)n * n, "eigenvalues")) return -1;
    ssyevd_("V", "U", &n, NULL, &n, w, &answer, &query, &n_integers, &query, &info, 1, 1); // U of the columns is L here
    int work_size = linalg_work_size(answer);
    size_t wide = (size_t)n;
    float *copy = (float *)malloc(sizeof(float) * (wide * wide + (size_t)work_size));
    int *integers = (int *)malloc(sizeof(int) * (size_t)n_integers);
    if (copy == NULL || integers == NULL) {
        free(copy);
        free(integers);
        return error_set("out of memory for the eigenvalues of a %d x %d matrix", n, n);
    }
    int threads = linalg_alone();
    memcpy(copy, A, sizeof(float) * wide * wide);
    ssyevd_("V", "U", &n, copy, &n, w, copy + wide * wide, &work_size, integers, &n_integers, &info, 1, 1);
    omp_set_num_threads(threads);
    for (int i = 0, j = n - 1; i < j; i++, j--) { // LAPACK's order is ascending
        float swapped = w[i];
        w[i] = w[j], w[j] = swapped;
    }
    for (size_t j = 0; j < wide; j++)
        for (size_t i = 0; i < wide; i++) V[i * wide + j] = copy[(wide - 1 - j) * wide + i];
    free(copy);
    free(integers);
    if (info != 0)
        return error_set("eigenvalues of a %d x %d matrix: LAPACK's ssyevd gave %d, no convergence", n, n, info);
    return 0;
}

// Divides n values by the largest of their sizes, unless that is 0.
static inline void linalg_unit_range(float *values, int64_t n, Stream *stream) {
    float largest = 0.0f;
    if (stream->failed) return;
    for (int64_t i = 0; i < n; i++) largest = fabsf(values[i]) > largest ? fabsf(values[i]) : largest;
    for (int64_t i = 0; largest > 0.0f && i < n; i++) values[i] /= largest;
}

// to (rows, cols) with row stride ldt = from (rows, cols) with row stride ldf
static inline void linalg_columns(float *to, int64_t ldt, const float *from, int64_t ldf, int64_t rows, int64_t cols,
                                  Stream *stream) {
    if (stream->failed) return;
    for (int64_t i = 0; i < rows; i++) memcpy(to + i * ldt, from + i * ldf, sizeof(float) * (size_t)cols);
}

// out (n) = standard normals of the sequence `sub`
static inline void linalg_normal(float *out, int64_t n, uint64_t seed, uint32_t sub, Stream *stream) {
    if (!stream->failed) rand_normal(out, n, seed, RAND_SVD, sub);
}

#include "svd.h" // svd_subspace, svd_truncated

#endif
