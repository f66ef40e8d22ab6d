// Factorizations of dense fp32 matrices, CPU. Small and full ones by LAPACK (OpenBLAS), truncated ones by subspace
// iteration (Halko, Martinsson and Tropp 2011) whose large products go through oneDNN. All matrices are row-major.
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
#include <math.h>    // fabsf, nextafterf
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

// Q (m,r) := the Q of its thin QR factorization, r <= m: orthonormal columns that span those of the input, by
// Householder reflections, so that dependent or zero columns become some orthonormal ones too.
// Returns 0, or -1: no memory, Q not finite, or the stream has failed.
static inline int orthonormalize(float *Q, int m, int r, Stream *stream) {
    // Read by columns, Q is Q^T (r,m) = L H with orthonormal rows in H, and H read by rows is what is asked for.
    int info = 0, query = -1;
    float answers[2] = {0.0f, 0.0f};
    if (stream_check(stream) || linalg_check(Q, (int64_t)m * r, "orthonormalization")) return -1;
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
