// cuSOLVER of the emulator: the dense factorizations that linalg.cuh uses, by LAPACK in fp32 when the stream reaches
// them. Matrices are in columns. As the library does, gesvd takes only matrices that are not wider than tall; refused
// besides: wrong leading dimensions, memory that is not the device's, workspace smaller than was asked for.
//
// To add a routine: its buffer size and its call, in the same form as those here.
#ifndef EMULATOR_CUSOLVERDN_H
#define EMULATOR_CUSOLVERDN_H

#include <cuda_runtime.h> // cudaStream_t
#include <math.h>         // isfinite
#include <stddef.h>       // size_t

#include "library.h" // is_device, enqueue

// Fortran's interface of LAPACK: everything by address, lengths of texts last.
extern "C" {
void sgesvd_(const char *jobu, const char *jobvt, const int *m, const int *n, float *a, const int *lda, float *s,
             float *u, const int *ldu, float *vt, const int *ldvt, float *work, const int *lwork, int *info, size_t,
             size_t);
void sgeqrf_(const int *m, const int *n, float *a, const int *lda, float *tau, float *work, const int *lwork,
             int *info);
void sorgqr_(const int *m, const int *n, const int *k, float *a, const int *lda, const float *tau, float *work,
             const int *lwork, int *info);
void ssyevd_(const char *jobz, const char *uplo, const int *n, float *a, const int *lda, float *w, float *work,
             const int *lwork, int *iwork, const int *liwork, int *info, size_t, size_t);
void openblas_set_num_threads(int num_threads);
}

typedef enum {
    CUSOLVER_STATUS_SUCCESS = 0,
    CUSOLVER_STATUS_NOT_INITIALIZED = 1,
    CUSOLVER_STATUS_INVALID_VALUE = 3
} cusolverStatus_t;
typedef enum { CUSOLVER_EIG_MODE_NOVECTOR = 0, CUSOLVER_EIG_MODE_VECTOR = 1 } cusolverEigMode_t;
typedef enum { CUBLAS_FILL_MODE_LOWER = 0, CUBLAS_FILL_MODE_UPPER = 1 } cublasFillMode_t;

typedef struct EmuSolver {
    cudaStream_t stream;
    int device; // current when it was made: the only one it works for
} * cusolverDnHandle_t;

static inline cusolverStatus_t cusolverDnCreate(cusolverDnHandle_t *handle) {
    openblas_set_num_threads(1); // the same bits on every machine
    *handle = new EmuSolver{NULL, emu::current_device};
    return CUSOLVER_STATUS_SUCCESS;
}

static inline cusolverStatus_t cusolverDnDestroy(cusolverDnHandle_t handle) {
    emu::check_current(handle->device, "cusolverDnDestroy");
    delete handle;
    return CUSOLVER_STATUS_SUCCESS;
}

static inline cusolverStatus_t cusolverDnSetStream(cusolverDnHandle_t handle, cudaStream_t stream) {
    handle->stream = stream;
    return CUSOLVER_STATUS_SUCCESS;
}

// Is (rows, cols) with ld a matrix in device memory?
static inline int emu_solver_matrix(const float *data, int rows, int cols, int ld) {
    return rows > 0 && cols > 0 && ld >= rows &&
           emu::is_device(data, sizeof(float) * ((size_t)(cols - 1) * (size_t)ld + (size_t)rows));
}

static inline int emu_solver_vector(const void *data, int n) {
    return n > 0 && emu::is_device(data, sizeof(float) * (size_t)n);
}

// Values that the iterations end on; on others the library may go on for ever.
static inline void emu_solver_finite(const float *A, int rows, int cols, int ld, const char *call) {
    for (int col = 0; col < cols; col++)
        for (int row = 0; row < rows; row++)
            if (!isfinite(A[(size_t)col * (size_t)ld + (size_t)row])) emu::die("%s is given infinity or NaN", call);
}

static inline cusolverStatus_t cusolverDnSgesvd_bufferSize(cusolverDnHandle_t handle, int m, int n, int *lwork) {
    float answer, none = 0.0f;
    int query = -1, info = 0;
    if (handle == NULL || m < n || n < 1) return CUSOLVER_STATUS_INVALID_VALUE;
    emu::check_current(handle->device, "cusolverDnSgesvd");
    sgesvd_("S", "S", &m, &n, &none, &m, &none, &none, &m, &none, &n, &answer, &query, &info, 1, 1);
    *lwork = (int)answer;
    return CUSOLVER_STATUS_SUCCESS;
}

static inline cusolverStatus_t cusolverDnSgesvd(cusolverDnHandle_t handle, signed char jobu, signed char jobvt, int m,
                                                int n, float *A, int lda, float *S, float *U, int ldu, float *VT,
                                                int ldvt, float *work, int lwork, float *rwork, int *info) {
    int needed;
    if (cusolverDnSgesvd_bufferSize(handle, m, n, &needed) != CUSOLVER_STATUS_SUCCESS || lwork < needed ||
        jobu != 'S' || jobvt != 'S' || !emu_solver_matrix(A, m, n, lda) || !emu_solver_matrix(U, m, n, ldu) ||
        !emu_solver_matrix(VT, n, n, ldvt) || !emu_solver_vector(S, n) || !emu_solver_vector(work, lwork) ||
        (n > 1 && !emu_solver_vector(rwork, n - 1)) || !emu_solver_vector(info, 1))
        return CUSOLVER_STATUS_INVALID_VALUE;
    emu::enqueue(handle->stream, [=] {
        emu_solver_finite(A, m, n, lda, "cusolverDnSgesvd");
        sgesvd_("S", "S", &m, &n, A, &lda, S, U, &ldu, VT, &ldvt, work, &lwork, info, 1, 1);
    });
    return CUSOLVER_STATUS_SUCCESS;
}

static inline cusolverStatus_t cusolverDnSgeqrf_bufferSize(cusolverDnHandle_t handle, int m, int n, float *, int lda,
                                                           int *lwork) {
    float answer, none = 0.0f;
    int query = -1, info = 0;
    if (handle == NULL || m < 1 || n < 1 || lda < m) return CUSOLVER_STATUS_INVALID_VALUE;
    emu::check_current(handle->device, "cusolverDnSgeqrf");
    sgeqrf_(&m, &n, &none, &lda, &none, &answer, &query, &info);
    *lwork = (int)answer;
    return CUSOLVER_STATUS_SUCCESS;
}

static inline cusolverStatus_t cusolverDnSgeqrf(cusolverDnHandle_t handle, int m, int n, float *A, int lda, float *tau,
                                                float *work, int lwork, int *info) {
    int needed;
    if (cusolverDnSgeqrf_bufferSize(handle, m, n, A, lda, &needed) != CUSOLVER_STATUS_SUCCESS || lwork < needed ||
        !emu_solver_matrix(A, m, n, lda) || !emu_solver_vector(tau, m < n ? m : n) || !emu_solver_vector(work, lwork) ||
        !emu_solver_vector(info, 1))
        return CUSOLVER_STATUS_INVALID_VALUE;
    emu::enqueue(handle->stream, [=] { sgeqrf_(&m, &n, A, &lda, tau, work, &lwork, info); });
    return CUSOLVER_STATUS_SUCCESS;
}

static inline cusolverStatus_t cusolverDnSorgqr_bufferSize(cusolverDnHandle_t handle, int m, int n, int k,
                                                           const float *, int lda, const float *, int *lwork) {
    float answer, none = 0.0f;
    int query = -1, info = 0;
    if (handle == NULL || n < 1 || m < n || k < 1 || k > n || lda < m) return CUSOLVER_STATUS_INVALID_VALUE;
    emu::check_current(handle->device, "cusolverDnSorgqr");
    sorgqr_(&m, &n, &k, &none, &lda, &none, &answer, &query, &info);
    *lwork = (int)answer;
    return CUSOLVER_STATUS_SUCCESS;
}

static inline cusolverStatus_t cusolverDnSorgqr(cusolverDnHandle_t handle, int m, int n, int k, float *A, int lda,
                                                const float *tau, float *work, int lwork, int *info) {
    int needed;
    if (cusolverDnSorgqr_bufferSize(handle, m, n, k, A, lda, tau, &needed) != CUSOLVER_STATUS_SUCCESS ||
        lwork < needed || !emu_solver_matrix(A, m, n, lda) || !emu_solver_vector(tau, k) ||
        !emu_solver_vector(work, lwork) || !emu_solver_vector(info, 1))
        return CUSOLVER_STATUS_INVALID_VALUE;
    emu::enqueue(handle->stream, [=] { sorgqr_(&m, &n, &k, A, &lda, tau, work, &lwork, info); });
    return CUSOLVER_STATUS_SUCCESS;
}

// LAPACK's integers lie behind its floats in the workspace.
static inline cusolverStatus_t cusolverDnSsyevd_bufferSize(cusolverDnHandle_t handle, cusolverEigMode_t jobz,
                                                           cublasFillMode_t, int n, const float *, int lda,
                                                           const float *, int *lwork) {
    if (handle == NULL || n < 1 || lda < n || jobz != CUSOLVER_EIG_MODE_VECTOR) return CUSOLVER_STATUS_INVALID_VALUE;
    emu::check_current(handle->device, "cusolverDnSsyevd");
    *lwork = 1 + 6 * n + 2 * n * n + 3 + 5 * n;
    return CUSOLVER_STATUS_SUCCESS;
}

static inline cusolverStatus_t cusolverDnSsyevd(cusolverDnHandle_t handle, cusolverEigMode_t jobz,
                                                cublasFillMode_t uplo, int n, float *A, int lda, float *W, float *work,
                                                int lwork, int *info) {
    int needed, floats = 1 + 6 * n + 2 * n * n, integers = 3 + 5 * n;
    if (cusolverDnSsyevd_bufferSize(handle, jobz, uplo, n, A, lda, W, &needed) != CUSOLVER_STATUS_SUCCESS ||
        lwork < needed || !emu_solver_matrix(A, n, n, lda) || !emu_solver_vector(W, n) ||
        !emu_solver_vector(work, lwork) || !emu_solver_vector(info, 1))
        return CUSOLVER_STATUS_INVALID_VALUE;
    emu::enqueue(handle->stream, [=] {
        emu_solver_finite(A, n, n, lda, "cusolverDnSsyevd");
        ssyevd_("V", uplo == CUBLAS_FILL_MODE_LOWER ? "L" : "U", &n, A, &lda, W, work, &floats, (int *)(work + floats),
                &integers, info, 1, 1);
    });
    return CUSOLVER_STATUS_SUCCESS;
}

#endif
