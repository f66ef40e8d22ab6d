// cuSOLVER of the emulator. First stand-in: types, handles.
#ifndef EMU_CUSOLVERDN_H
#define EMU_CUSOLVERDN_H

#include <cuda_runtime.h> // cudaStream_t

typedef enum { CUSOLVER_STATUS_SUCCESS = 0, CUSOLVER_STATUS_NOT_INITIALIZED = 1, CUSOLVER_STATUS_INVALID_VALUE = 3 } cusolverStatus_t;
typedef struct EmuCusolver {
    cudaStream_t stream;
} *cusolverDnHandle_t;

static inline cusolverStatus_t cusolverDnCreate(cusolverDnHandle_t *handle) {
    *handle = new EmuCusolver();
    return CUSOLVER_STATUS_SUCCESS;
}

static inline cusolverStatus_t cusolverDnDestroy(cusolverDnHandle_t handle) {
    delete handle;
    return CUSOLVER_STATUS_SUCCESS;
}

static inline cusolverStatus_t cusolverDnSetStream(cusolverDnHandle_t handle, cudaStream_t stream) {
    handle->stream = stream;
    return CUSOLVER_STATUS_SUCCESS;
}

#endif
