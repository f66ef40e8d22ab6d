// cuBLASLt of the emulator. First stand-in: types, handles.
#ifndef EMU_CUBLASLT_H
#define EMU_CUBLASLT_H

#include <cuda_runtime.h> // cudaStream_t

typedef enum { CUBLAS_STATUS_SUCCESS = 0, CUBLAS_STATUS_NOT_INITIALIZED = 1, CUBLAS_STATUS_INVALID_VALUE = 7 } cublasStatus_t;
typedef struct EmuCublasLt *cublasLtHandle_t;

static inline cublasStatus_t cublasLtCreate(cublasLtHandle_t *handle) {
    *handle = (cublasLtHandle_t) new int(1);
    return CUBLAS_STATUS_SUCCESS;
}

static inline cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) {
    delete (int *)handle;
    return CUBLAS_STATUS_SUCCESS;
}

static inline const char *cublasLtGetStatusString(cublasStatus_t) {
    return "cuBLASLt";
}

#endif
