// cuBLASLt of the emulator: cublasLtMatmul of fp32 and bf16 matrices in columns, computed with OpenBLAS in fp32 when
// the stream reaches it. What the library refuses is refused with a status and a sentence that
// cublasLtGetStatusString gives back. Refused too, where the library would crash or silently read beyond: memory that
// is not the device's, matrices that leave their allocation, pointers less aligned than the heuristic was promised, an
// algorithm chosen for another product.
//
// To add a feature: an attribute goes into its enum with the toolkit's number, into the struct, and into
// emu_blas_check; whatever is not listed here is refused as not supported.
#ifndef EMULATOR_CUBLASLT_H
#define EMULATOR_CUBLASLT_H

#include <cuda_bf16.h>     // __nv_bfloat16
#include <cuda_runtime.h>  // cudaStream_t
#include <library_types.h> // cudaDataType_t
#include <stdint.h>        // fixed-width integers
#include <stdio.h>         // snprintf
#include <string.h>        // memcpy
#include <vector>          // operands in fp32

#include "library.h" // is_device, enqueue

// Fortran's interface of OpenBLAS: column-major, everything by address, lengths of texts last.
extern "C" {
void sgemm_(const char *trans_a, const char *trans_b, const int *m, const int *n, const int *k, const float *alpha,
            const float *a, const int *lda, const float *b, const int *ldb, const float *beta, float *c, const int *ldc,
            size_t, size_t);
void openblas_set_num_threads(int num_threads);
}

typedef enum {
    CUBLAS_STATUS_SUCCESS = 0,
    CUBLAS_STATUS_NOT_INITIALIZED = 1,
    CUBLAS_STATUS_INVALID_VALUE = 7,
    CUBLAS_STATUS_NOT_SUPPORTED = 15
} cublasStatus_t;
typedef enum { CUBLAS_OP_N = 0, CUBLAS_OP_T = 1 } cublasOperation_t;
typedef enum { CUBLAS_COMPUTE_32F = 68 } cublasComputeType_t;
typedef enum { CUBLASLT_MATMUL_DESC_TRANSA = 3, CUBLASLT_MATMUL_DESC_TRANSB = 4 } cublasLtMatmulDescAttributes_t;
typedef enum {
    CUBLASLT_REDUCTION_SCHEME_NONE = 0,
    CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE = 2
} cublasLtReductionScheme_t;
typedef enum {
    CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES = 1,
    CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK = 3,
    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES = 5,
    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES = 6,
    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES = 7,
    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES = 8
} cublasLtMatmulPreferenceAttributes_t;
typedef enum {
    CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT = 5,
    CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET = 6
} cublasLtMatrixLayoutAttribute_t;

typedef struct EmuBlas {
    uint32_t magic; // EMU_BLAS_MAGIC while it lives
    int device;     // current when it was made: the only one it works for
} * cublasLtHandle_t;

typedef struct EmuBlasProduct {
    cublasComputeType_t compute;
    cudaDataType_t scale;
    int trans_a, trans_b;
} * cublasLtMatmulDesc_t;

typedef struct EmuBlasLayout {
    cudaDataType_t type;
    int64_t rows, cols, ld, count, stride; // count matrices, stride elements apart
} * cublasLtMatrixLayout_t;

typedef struct EmuBlasPreference {
    uint64_t workspace_bytes;
    uint32_t reduction_mask, align[4]; // of A, B, C, D
} * cublasLtMatmulPreference_t;

// The problem an algorithm was chosen for, and what it was promised.
typedef struct {
    EmuBlasProduct product;
    EmuBlasLayout layout[4];
    uint32_t align[4];
    uint64_t workspace_bytes;
} cublasLtMatmulAlgo_t;

typedef struct {
    cublasLtMatmulAlgo_t algo;
    size_t workspaceSize;
    cublasStatus_t state;
    float wavesCount;
} cublasLtMatmulHeuristicResult_t;

enum { EMU_BLAS_MAGIC = 0x4C544D55, EMU_BLAS_WORKSPACE = 4096 }; // the workspace every stand-in algorithm asks for

static thread_local char emu_blas_message[256];

static inline cublasStatus_t emu_blas_refuse(cublasStatus_t status, const char *why) {
    snprintf(emu_blas_message, sizeof emu_blas_message, "cuBLASLt: %s", why);
    return status;
}

// A version as the library counts them.
static inline size_t cublasLtGetVersion(void) {
    return 0;
}

static inline const char *cublasLtGetStatusString(cublasStatus_t status) {
    return status == CUBLAS_STATUS_SUCCESS ? "success" : emu_blas_message;
}

static inline cublasStatus_t cublasLtCreate(cublasLtHandle_t *handle) {
    openblas_set_num_threads(1); // the same bits on every machine
    *handle = new EmuBlas{EMU_BLAS_MAGIC, emu::current_device};
    return CUBLAS_STATUS_SUCCESS;
}

static inline cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) {
    if (handle == NULL || handle->magic != EMU_BLAS_MAGIC)
        return emu_blas_refuse(CUBLAS_STATUS_NOT_INITIALIZED, "no such handle");
    emu::check_current(handle->device, "cublasLtDestroy");
    handle->magic = 0;
    delete handle;
    return CUBLAS_STATUS_SUCCESS;
}

static inline cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *desc, cublasComputeType_t compute,
                                                      cudaDataType_t scale) {
    *desc = new EmuBlasProduct{compute, scale, 0, 0};
    return CUBLAS_STATUS_SUCCESS;
}

static inline cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t desc) {
    delete desc;
    return CUBLAS_STATUS_SUCCESS;
}

static inline cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t desc,
                                                            cublasLtMatmulDescAttributes_t attribute, const void *value,
                                                            size_t n_bytes) {
    cublasOperation_t operation;
    if (n_bytes != sizeof operation) return emu_blas_refuse(CUBLAS_STATUS_INVALID_VALUE, "size of an attribute");
    memcpy(&operation, value, sizeof operation);
    if (attribute == CUBLASLT_MATMUL_DESC_TRANSA) desc->trans_a = operation == CUBLAS_OP_T;
    if (attribute == CUBLASLT_MATMUL_DESC_TRANSB) desc->trans_b = operation == CUBLAS_OP_T;
    return CUBLAS_STATUS_SUCCESS;
}

// A matrix in columns: element (row, col) at row + col * ld.
static inline cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *layout, cudaDataType_t type,
                                                        uint64_t rows, uint64_t cols, int64_t ld) {
    *layout = new EmuBlasLayout{type, (int64_t)rows, (int64_t)cols, ld, 1, 0};
    return CUBLAS_STATUS_SUCCESS;
}

static inline cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t layout,
                                                              cublasLtMatrixLayoutAttribute_t attribute,
                                                              const void *value, size_t n_bytes) {
    int32_t count;
    size_t expected = attribute == CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT ? sizeof count : sizeof layout->stride;
    if (n_bytes != expected) return emu_blas_refuse(CUBLAS_STATUS_INVALID_VALUE, "size of an attribute");
    if (attribute == CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT)
        memcpy(&count, value, sizeof count), layout->count = count;
    else
        memcpy(&layout->stride, value, sizeof layout->stride);
    return CUBLAS_STATUS_SUCCESS;
}

static inline cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) {
    delete layout;
    return CUBLAS_STATUS_SUCCESS;
}

static inline cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *preference) {
    *preference = new EmuBlasPreference{0, 7, {256, 256, 256, 256}}; // the library's defaults
    return CUBLAS_STATUS_SUCCESS;
}

static inline cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) {
    delete preference;
    return CUBLAS_STATUS_SUCCESS;
}

static inline cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                                  cublasLtMatmulPreferenceAttributes_t attribute,
                                                                  const void *value, size_t n_bytes) {
    size_t expected = attribute == CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES ? sizeof(uint64_t) : sizeof(uint32_t);
    if (n_bytes != expected) return emu_blas_refuse(CUBLAS_STATUS_INVALID_VALUE, "size of an attribute");
    if (attribute == CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES)
        memcpy(&preference->workspace_bytes, value, n_bytes);
    else if (attribute == CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK)
        memcpy(&preference->reduction_mask, value, n_bytes);
    else
        memcpy(&preference->align[attribute - CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES], value, n_bytes);
    return CUBLAS_STATUS_SUCCESS;
}

static inline int emu_blas_layout_ok(const EmuBlasLayout *layout) {
    return layout->rows > 0 && layout->cols > 0 && layout->ld >= layout->rows && layout->rows <= INT32_MAX &&
           layout->cols <= INT32_MAX && layout->ld <= INT32_MAX && layout->count > 0 && layout->stride >= 0;
}

// What can be said of a product without its data.
static inline cublasStatus_t emu_blas_check(cublasLtHandle_t handle, const EmuBlasProduct *product,
                                            const EmuBlasLayout *const layout[4]) {
    const EmuBlasLayout *a = layout[0], *b = layout[1], *c = layout[2], *d = layout[3];
    if (handle == NULL || handle->magic != EMU_BLAS_MAGIC)
        return emu_blas_refuse(CUBLAS_STATUS_NOT_INITIALIZED, "no such handle");
    if (product == NULL || a == NULL || b == NULL || c == NULL || d == NULL)
        return emu_blas_refuse(CUBLAS_STATUS_INVALID_VALUE, "a description is NULL");
    if (!emu_blas_layout_ok(a) || !emu_blas_layout_ok(b) || !emu_blas_layout_ok(c) || !emu_blas_layout_ok(d))
        return emu_blas_refuse(CUBLAS_STATUS_INVALID_VALUE, "a matrix is empty, too large, or its ld below its rows");
    int64_t m = product->trans_a ? a->cols : a->rows, k = product->trans_a ? a->rows : a->cols;
    int64_t n = product->trans_b ? b->rows : b->cols, inner = product->trans_b ? b->cols : b->rows;
    if (k != inner || d->rows != m || d->cols != n || c->rows != m || c->cols != n)
        return emu_blas_refuse(CUBLAS_STATUS_INVALID_VALUE, "the matrices' sizes do not fit");
    if (a->count != d->count || b->count != d->count || c->count != d->count)
        return emu_blas_refuse(CUBLAS_STATUS_INVALID_VALUE, "the matrices are not as many of each");
    if (d->count > 1 && d->stride < (d->cols - 1) * d->ld + d->rows)
        return emu_blas_refuse(CUBLAS_STATUS_INVALID_VALUE, "the results of a batch overlap");
    int inputs_ok = a->type == b->type && c->type == d->type;
    if (!inputs_ok || (a->type == CUDA_R_32F && d->type != CUDA_R_32F) || product->compute != CUBLAS_COMPUTE_32F ||
        product->scale != CUDA_R_32F)
        return emu_blas_refuse(CUBLAS_STATUS_NOT_SUPPORTED, "this combination of element types");
    return CUBLAS_STATUS_SUCCESS;
}

static inline cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t product,
                                                            cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                                            cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                                            cublasLtMatmulPreference_t preference, int requested,
                                                            cublasLtMatmulHeuristicResult_t results[], int *returned) {
    const EmuBlasLayout *const layout[4] = {a, b, c, d};
    cublasStatus_t status = emu_blas_check(handle, product, layout);
    if (status != CUBLAS_STATUS_SUCCESS) return status;
    *returned = 0;
    if (requested < 1 || preference->workspace_bytes < EMU_BLAS_WORKSPACE)
        return emu_blas_refuse(CUBLAS_STATUS_NOT_SUPPORTED, "no algorithm with so little workspace");
    cublasLtMatmulHeuristicResult_t result = {};
    result.algo.product = *product;
    for (int i = 0; i < 4; i++) result.algo.layout[i] = *layout[i], result.algo.align[i] = preference->align[i];
    result.algo.workspace_bytes = result.workspaceSize = EMU_BLAS_WORKSPACE;
    results[0] = result;
    *returned = 1;
    return CUBLAS_STATUS_SUCCESS;
}

static inline int64_t emu_blas_width(const EmuBlasLayout *layout) {
    return layout->type == CUDA_R_32F ? 4 : 2;
}

static inline int64_t emu_blas_bytes(const EmuBlasLayout *layout) {
    int64_t last = (layout->count - 1) * layout->stride + (layout->cols - 1) * layout->ld;
    return (last + layout->rows) * emu_blas_width(layout);
}

static inline std::vector<float> emu_blas_widen(const void *data, const EmuBlasLayout &layout) {
    std::vector<float> wide((size_t)(layout.rows * layout.cols));
    for (int64_t col = 0; col < layout.cols; col++) {
        for (int64_t row = 0; row < layout.rows; row++) {
            int64_t at = row + col * layout.ld;
            wide[(size_t)(row + col * layout.rows)] = layout.type == CUDA_R_32F
                                                          ? ((const float *)data)[at]
                                                          : __bfloat162float(((const __nv_bfloat16 *)data)[at]);
        }
    }
    return wide;
}

static inline void emu_blas_store(void *data, const EmuBlasLayout &layout, const std::vector<float> &values) {
    for (int64_t col = 0; col < layout.cols; col++) {
        for (int64_t row = 0; row < layout.rows; row++) {
            int64_t at = row + col * layout.ld;
            float value = values[(size_t)(row + col * layout.rows)];
            if (layout.type == CUDA_R_32F) ((float *)data)[at] = value;
            if (layout.type == CUDA_R_16BF) ((__nv_bfloat16 *)data)[at] = __float2bfloat16(value);
        }
    }
}

// D = alpha op(A) op(B) + beta C in fp32, rounded once. C is not read where beta is 0.
static inline void emu_blas_compute(const cublasLtMatmulAlgo_t &algo, float alpha, const void *A, const void *B,
                                    float beta, const void *C, void *D) {
    const EmuBlasLayout &a = algo.layout[0], &b = algo.layout[1], &c = algo.layout[2], &d = algo.layout[3];
    std::vector<float> left = emu_blas_widen(A, a), right = emu_blas_widen(B, b);
    std::vector<float> out = beta != 0.0f ? emu_blas_widen(C, c) : std::vector<float>((size_t)(d.rows * d.cols));
    int m = (int)d.rows, n = (int)d.cols, k = (int)(algo.product.trans_a ? a.rows : a.cols);
    int lda = (int)a.rows, ldb = (int)b.rows;
    sgemm_(algo.product.trans_a ? "T" : "N", algo.product.trans_b ? "T" : "N", &m, &n, &k, &alpha, left.data(), &lda,
           right.data(), &ldb, &beta, out.data(), &m, 1, 1);
    emu_blas_store(D, d, out);
}

static inline cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t product, const void *alpha,
                                            const void *A, cublasLtMatrixLayout_t a, const void *B,
                                            cublasLtMatrixLayout_t b, const void *beta, const void *C,
                                            cublasLtMatrixLayout_t c, void *D, cublasLtMatrixLayout_t d,
                                            const cublasLtMatmulAlgo_t *algo, void *workspace, size_t workspace_bytes,
                                            cudaStream_t stream) {
    const EmuBlasLayout *const layout[4] = {a, b, c, d};
    const void *const data[4] = {A, B, C, D};
    cublasStatus_t status = emu_blas_check(handle, product, layout);
    if (status != CUBLAS_STATUS_SUCCESS) return status;
    emu::check_current(handle->device, "cublasLtMatmul");
    if (emu::stream_of(stream)->device != handle->device)
        return emu_blas_refuse(CUBLAS_STATUS_INVALID_VALUE, "the stream is of another device than the handle");
    if (alpha == NULL || beta == NULL || algo == NULL)
        return emu_blas_refuse(CUBLAS_STATUS_INVALID_VALUE, "alpha, beta or the algorithm is NULL");
    if (memcmp(&algo->product, product, sizeof *product) != 0)
        return emu_blas_refuse(CUBLAS_STATUS_INVALID_VALUE, "the algorithm was chosen for another product");
    for (int i = 0; i < 4; i++) {
        const EmuBlasLayout *chosen = &algo->layout[i];
        if (chosen->type != layout[i]->type || chosen->rows != layout[i]->rows || chosen->cols != layout[i]->cols ||
            chosen->ld != layout[i]->ld || chosen->count != layout[i]->count || chosen->stride != layout[i]->stride)
            return emu_blas_refuse(CUBLAS_STATUS_INVALID_VALUE, "the algorithm was chosen for other shapes");
        uintptr_t apart = (uintptr_t)(chosen->count > 1 ? chosen->stride * emu_blas_width(chosen) : 0);
        if (((uintptr_t)data[i] | apart) % algo->align[i] != 0)
            return emu_blas_refuse(CUBLAS_STATUS_INVALID_VALUE, "a matrix is less aligned than was promised");
        if (!emu::is_device(data[i], (size_t)emu_blas_bytes(layout[i])))
            return emu_blas_refuse(CUBLAS_STATUS_INVALID_VALUE, "a matrix is not, or not wholly, in device memory");
    }
    if (C == D && memcmp(&algo->layout[2].ld, &algo->layout[3].ld, sizeof algo->layout[2].ld) != 0)
        return emu_blas_refuse(CUBLAS_STATUS_INVALID_VALUE, "C is D, with another ld");
    if (workspace_bytes < algo->workspace_bytes || !emu::is_device(workspace, workspace_bytes) ||
        (uintptr_t)workspace % 16 != 0)
        return emu_blas_refuse(CUBLAS_STATUS_INVALID_VALUE, "the workspace is too small or not aligned device memory");
    float scale, keep; // host pointers are read at once
    memcpy(&scale, alpha, sizeof scale);
    memcpy(&keep, beta, sizeof keep);
    cublasLtMatmulAlgo_t chosen = *algo;
    emu::enqueue(stream, [=] {
        memset(workspace, 0xFF, chosen.workspace_bytes); // NaN: nobody else may keep anything there
        for (int64_t i = 0; i < chosen.layout[3].count; i++) {
            const char *from[3] = {(const char *)A, (const char *)B, (const char *)C};
            for (int k = 0; k < 3; k++) from[k] += i * chosen.layout[k].stride * emu_blas_width(&chosen.layout[k]);
            char *to = (char *)D + i * chosen.layout[3].stride * emu_blas_width(&chosen.layout[3]);
            emu_blas_compute(chosen, scale, from[0], from[1], keep, from[2], to);
        }
    });
    return CUBLAS_STATUS_SUCCESS;
}

#endif
