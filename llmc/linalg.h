// Factorizations of dense fp32 matrices, CPU. Small and full ones by LAPACK (OpenBLAS), truncated ones by subspace
// iteration (Halko, Martinsson and Tropp 2011) whose large products go through oneDNN. All matrices are row-major.
//   A (m,n) = U (m,k) diag(s (k)) V (n,k)^T,  k = min(m,n),  U^T U = V^T V = I,  s descending
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
void openblas_set_num_threads(int num_threads);
#ifdef __cplusplus
}
#endif

// Up to this min(m,n) the full factorization is as quick as subspace iteration.
#ifdef TESTING
#define SVD_FULL_MAX 12 // small shapes meet the iteration too
#else
#define SVD_FULL_MAX 256
#endif
#define SVD_OVERSAMPLE      8 // columns iterated beyond the rank asked for: the last ones of the rank converge sooner
#define SVD_COLD_ITERATIONS 8 // a matrix's first visit only
#define SVD_WARM_ITERATIONS 2

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
// Returns 0, or -1: no memory, A not finite, or no convergence.
static inline int svd_full(float *U, float *s, float *V, const float *A, int m, int n) {
    // Read by columns, A is A^T = V diag(s) U^T: LAPACK's right factor, (k,m) by columns, is U by rows.
    int k = m < n ? m : n, info = 0, query = -1;
    float answer = 0.0f;
    if (linalg_check(A, (int64_t)m * n, "SVD")) return -1;
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
// Returns 0, or -1: no memory, or Q not finite.
static inline int orthonormalize(float *Q, int m, int r) {
    // Read by columns, Q is Q^T (r,m) = L H with orthonormal rows in H, and H read by rows is what is asked for.
    int info = 0, query = -1;
    float answers[2] = {0.0f, 0.0f};
    if (linalg_check(Q, (int64_t)m * r, "orthonormalization")) return -1;
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

// Divides n values by the largest of their sizes, unless that is 0.
static inline void linalg_unit_range(float *values, int64_t n) {
    float largest = 0.0f;
    for (int64_t i = 0; i < n; i++) largest = fabsf(values[i]) > largest ? fabsf(values[i]) : largest;
    for (int64_t i = 0; largest > 0.0f && i < n; i++) values[i] /= largest;
}

// The r largest singular values of A (m,n) with their vectors, U (m,r), s (r), V (n,r), 1 <= r <= min(m,n), after
// `iterations` >= 1 products with A and A^T. Starts from V if warm, else from Gaussian numbers, which also fill the
// columns beyond r. Products are fp32 whatever the stream's precision. U and V are orthonormal however far the
// iteration has come. Costs about 4*m*n*(r+8)*iterations flops.
// Returns 0, or -1: no memory, A or the warm V not finite, no convergence, or the stream has failed.
static inline int svd_subspace(float *U, float *s, float *V, const float *A, int m, int n, int r, int warm,
                               int iterations, uint64_t seed, uint32_t sub, Stream *stream) {
    int k = m < n ? m : n, width = r + SVD_OVERSAMPLE < k ? r + SVD_OVERSAMPLE : k, kept = warm ? r : 0;
    size_t w = (size_t)width, n_left = (size_t)m * w, n_right = (size_t)n * w;
    float *left = (float *)scratch_get(&stream->scratch[SCRATCH_OP],
                                       sizeof(float) * (n_left + 2 * n_right + w * w + w)); // left (m,width)
    if (left == NULL) return -1;
    float *right = left + n_left, *turned = right + n_right;  // (n,width), (n,width)
    float *inner = turned + n_right, *values = inner + w * w; // (width,width), (width)
    rand_normal(turned, (int64_t)n * (width - kept), seed, RAND_SVD, sub);
    for (int j = 0; j < n; j++) {
        memcpy(right + (size_t)j * w, V + (size_t)j * (size_t)r, sizeof(float) * (size_t)kept);
        memcpy(right + (size_t)j * w + kept, turned + (size_t)j * (size_t)(width - kept),
               sizeof(float) * (size_t)(width - kept));
    }
    for (int iteration = 0; iteration < iterations; iteration++) {
        // Columns must be made orthonormal once a round, or all would turn to the first. Once is enough: those of left
        // are in order of size, so those of A^T left fall like s, and each keeps its digits. Only range could be lost.
        if (iteration > 0) linalg_unit_range(right, (int64_t)n_right);
        matmul_product(left, width, A, n, 0, right, width, 0, m, width, n, 0, 0, stream);
        if (stream_check(stream) || orthonormalize(left, m, width)) return -1;
        matmul_product(right, width, A, n, 1, left, width, 0, n, width, m, 0, 0, stream);
        if (stream_check(stream)) return -1;
    }
    // A is about left left^T A = left right^T, and right = turned diag(values) inner^T.
    if (svd_full(turned, values, inner, right, n, width)) return -1;
    matmul_product(U, r, left, width, 0, inner, width, 0, m, r, width, 0, 0, stream);
    for (int j = 0; j < n; j++) memcpy(V + (size_t)j * (size_t)r, turned + (size_t)j * w, sizeof(float) * (size_t)r);
    memcpy(s, values, sizeof(float) * (size_t)r);
    return stream_check(stream);
}

// The r largest singular values of A (m,n) with their vectors, by the quicker way: all of them, cut to r, where A is
// small or r is over half of min(m,n); else svd_subspace, from V if warm. Shapes and errors as there.
static inline int svd_truncated(float *U, float *s, float *V, const float *A, int m, int n, int r, int warm,
                                uint64_t seed, uint32_t sub, Stream *stream) {
    int k = m < n ? m : n;
    if (r == k) return svd_full(U, s, V, A, m, n);
    if (k > SVD_FULL_MAX && r <= k / 2)
        return svd_subspace(U, s, V, A, m, n, r, warm, warm ? SVD_WARM_ITERATIONS : SVD_COLD_ITERATIONS, seed, sub,
                            stream);
    size_t wide = (size_t)k, n_left = (size_t)m * wide, n_right = (size_t)n * wide;
    float *left = (float *)scratch_get(&stream->scratch[SCRATCH_OP], sizeof(float) * (n_left + n_right + wide));
    if (left == NULL) return -1;
    float *right = left + n_left, *values = right + n_right; // (m,k), (n,k), (k)
    if (svd_full(left, values, right, A, m, n)) return -1;
    for (int i = 0; i < m; i++) memcpy(U + (size_t)i * (size_t)r, left + (size_t)i * wide, sizeof(float) * (size_t)r);
    for (int j = 0; j < n; j++) memcpy(V + (size_t)j * (size_t)r, right + (size_t)j * wide, sizeof(float) * (size_t)r);
    memcpy(s, values, sizeof(float) * (size_t)r);
    return 0;
}

#endif
