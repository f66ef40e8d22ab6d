// Where tensors live and who computes, CUDA: the twin of device.h. Host code moves tensor memory only through here;
// everything is queued on a stream and runs in its order.
//
//   Stream *stream;  stream_create(&stream, PRECISION_BF16, threads);    // on the calling thread's current device
//   float *x = (float *)device_alloc(n * sizeof *x);
//   LAUNCH(kernel, n_blocks, 256, 0, stream, x, n);                      // in an op
//   if (stream_check(stream)) return -1;      // an op has failed on this stream: the message says which
//
// Built by nvcc, or by g++ with -DCUDA_EMULATOR against dev/cuda_emulator.
#ifndef LLMC_DEVICE_CUH
#define LLMC_DEVICE_CUH

#include <cublasLt.h>     // matrix products
#include <cuda_bf16.h>    // __nv_bfloat16
#include <cuda_runtime.h> // streams, memory, launches
#include <cusolverDn.h>   // factorisations
#include <stdint.h>       // fixed-width integers
#include <omp.h>          // the host's own loops
#include <stdio.h>        // snprintf
#include <stdlib.h>       // calloc, free
#include <string.h>       // strcmp

#include "error.h"    // error_set
#include "portable.h" // HOST_DEVICE

#ifdef FLOATX_FP32
typedef float floatX; // storage type of activations on this backend
#else
typedef __nv_bfloat16 floatX;
#endif

typedef enum { PRECISION_FP32 = 0, PRECISION_BF16 = 1 } Precision; // inputs of matrix products; sums are fp32

#define DEVICE_ALIGN      256
#define DEVICE_KEEPS_BF16 1 // all products take bf16 weights
#define DEVICE_IS_HOST    0 // tensors live beside the host's memory
// Sizes that suit the device: tokens of a micro-batch, logits that exist at once.
#define DEVICE_MICRO_TOKENS 8192
#define DEVICE_LOGITS       ((int64_t)512 << 20)

// Under ASan, which watches the emulator's device memory, the gaps between the pieces of an arena are forbidden ground.
#if defined(CUDA_EMULATOR) && defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#define device_forbid(pointer, n_bytes) ASAN_POISON_MEMORY_REGION(pointer, n_bytes)
#define DEVICE_GAP                      256
#else
#define device_forbid(pointer, n_bytes) ((void)(pointer), (void)(n_bytes))
#define DEVICE_GAP                      0
#endif

// ---------------------------------------------------------------------------------------------------------------------
// Errors

// What the user can do about a CUDA error.
static inline const char *cuda_hint(cudaError_t error) {
    switch (error) {
    case cudaErrorMemoryAllocation: return "; try a smaller --micro-batch or --recompute";
    case cudaErrorNoDevice: return "; is an NVIDIA GPU here, and does nvidia-smi list it?";
    case cudaErrorInsufficientDriver: return "; install or update the NVIDIA driver, or build with DEVICE=cpu";
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorUnsupportedPtxVersion: return "; build on this machine: make clean, then make train DEVICE=cuda";
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchFailure: return "; the kernel at fault ran before: compute-sanitizer finds it";
    default: return "";
    }
}

// The line for a CUDA call that went wrong; returns -1.
static inline int cuda_error(cudaError_t error, const char *call, const char *file, int line) {
    return error_set("%s:%d: %s: %s%s", file, line, call, cudaGetErrorString(error), cuda_hint(error));
}

// In functions that return int: -1 with a message if the call fails.
#define CUDA_CHECK(call)                                                                                               \
    do {                                                                                                               \
        cudaError_t cuda_error_ = (call);                                                                              \
        if (cuda_error_ != cudaSuccess) return cuda_error(cuda_error_, #call, __FILE__, __LINE__);                     \
    } while (0)

// In ops: fails the stream if the call does. The first failure keeps its message.
#define stream_cuda(stream, call) stream_note(stream, call, #call, __FILE__, __LINE__)

// Queues kernel<<<grid, block, shared_bytes>>>(arguments...); nothing on a stream that has failed. A template's kernel
// stands in parentheses: LAUNCH((kernel<64, 1>), ...).
#ifdef CUDA_EMULATOR
#define LAUNCH(kernel, grid, block, shared_bytes, stream, ...)                                                         \
    do {                                                                                                               \
        if ((stream)->failed) break;                                                                                   \
        (void)emu::launch(#kernel, kernel, grid, block, shared_bytes, (stream)->cuda, __VA_ARGS__);                    \
        stream_note(stream, cudaGetLastError(), "launch of " #kernel, __FILE__, __LINE__);                             \
    } while (0)
#define DYNAMIC_SHARED(type, name) type *name = (type *)emu::dynamic_shared_start()
#else
#define LAUNCH(kernel, grid, block, shared_bytes, stream, ...)                                                         \
    do {                                                                                                               \
        if ((stream)->failed) break;                                                                                   \
        kernel<<<grid, block, shared_bytes, (stream)->cuda>>>(__VA_ARGS__);                                            \
        stream_note(stream, cudaGetLastError(), "launch of " #kernel, __FILE__, __LINE__);                             \
    } while (0)
// The block's dynamic shared memory as an array of type, 16 bytes aligned.
#define DYNAMIC_SHARED(type, name)                                                                                     \
    extern __shared__ __align__(16) unsigned char dynamic_shared_memory[];                                             \
    type *name = reinterpret_cast<type *>(dynamic_shared_memory)
#endif

// ---------------------------------------------------------------------------------------------------------------------
// Memory

// Zeroed device memory of n_bytes, at least 256 bytes aligned; NULL with an error message when there is none. Waits
// for the device: never in a step.
static inline void *device_alloc(size_t n_bytes) {
    void *pointer = NULL;
    cudaError_t error = cudaMalloc(&pointer, n_bytes > 0 ? n_bytes : 1);
    if (error == cudaSuccess) error = cudaMemset(pointer, 0, n_bytes);
    if (error == cudaSuccess) error = cudaDeviceSynchronize(); // the zeros are there for every stream
    if (error == cudaSuccess) return pointer;
    error_set("%.1f MB of device memory: %s%s", 1e-6 * (double)n_bytes, cudaGetErrorString(error), cuda_hint(error));
    (void)cudaGetLastError(); // said: the next launch shall not say it again
    if (pointer != NULL) (void)cudaFree(pointer);
    return NULL;
}

// Memory of the host from which and to which copies are quick and need not be waited for. Not zeroed; NULL with an
// error message when there is none.
static inline void *device_host_alloc(size_t n_bytes) {
    void *pointer = NULL;
    cudaError_t error = cudaHostAlloc(&pointer, n_bytes > 0 ? n_bytes : 1, cudaHostAllocPortable);
    if (error == cudaSuccess) return pointer;
    error_set("%.1f MB of pinned memory: %s%s", 1e-6 * (double)n_bytes, cudaGetErrorString(error), cuda_hint(error));
    (void)cudaGetLastError(); // as above
    return NULL;
}

static inline void device_host_free(void *pointer) {
    if (pointer != NULL) (void)cudaFreeHost(pointer);
}

// Waits for all work that may use it.
static inline void device_free(void *pointer) {
    if (pointer == NULL) return;
    (void)cudaDeviceSynchronize(); // an error here has been met by who waited for the work
    (void)cudaFree(pointer);
}

// A buffer that only grows: kept between calls, so that a step allocates nothing once it is warm.
typedef struct {
    void *data;
    size_t n_bytes;
} Scratch;

// At least n_bytes of scratch, contents undefined; NULL with an error message.
static inline void *scratch_get(Scratch *scratch, size_t n_bytes) {
    if (n_bytes > scratch->n_bytes) {
        device_free(scratch->data);
        scratch->data = device_alloc(n_bytes);
        scratch->n_bytes = scratch->data != NULL ? n_bytes : 0;
    }
    return scratch->data;
}

// ---------------------------------------------------------------------------------------------------------------------
// Streams

// Operands; an op's own temporaries; what an optimizer's step passes through; floats of what is kept
// as something else; activations of cells that compute in turn.
enum { SCRATCH_A, SCRATCH_B, SCRATCH_C, SCRATCH_OP, SCRATCH_STEP, SCRATCH_WIDE, SCRATCH_TURN, SCRATCH_COUNT };

// What an op keeps in a stream between calls (plans, handles), and how it goes when the stream does.
enum { KEPT_MATMUL, KEPT_LINALG, KEPT_COUNT };
typedef struct {
    void *data; // NULL: nothing yet
    void (*destroy)(void *data);
} Kept;

// A queue of work and what its ops keep between calls. One thread at a time uses a stream.
typedef struct Stream {
    Precision precision;
    int threads; // of the host's own loops
    int device;
    cudaStream_t cuda;
    cublasLtHandle_t blas;
    cusolverDnHandle_t solver; // bound to this stream; NULL until its first factorization
    Scratch scratch[SCRATCH_COUNT];
    Kept kept[KEPT_COUNT];
    int failed; // an op failed; error_message says which
} Stream;

// The result of a CUDA call on a stream: see stream_cuda.
static inline void stream_note(Stream *stream, cudaError_t error, const char *call, const char *file, int line) {
    if (error == cudaSuccess || stream->failed) return;
    stream->failed = 1;
    cuda_error(error, call, file, line);
}

// to (n_bytes) = 0, queued.
static inline void device_zero(void *to, size_t n_bytes, Stream *stream) {
    if (stream->failed || n_bytes == 0) return;
    stream_cuda(stream, cudaMemsetAsync(to, 0, n_bytes, stream->cuda));
}

// 1 if pointer is memory of a device.
static inline int device_owns(const void *pointer) {
    cudaPointerAttributes attributes;
    return cudaPointerGetAttributes(&attributes, pointer) == cudaSuccess && attributes.type == cudaMemoryTypeDevice;
}

// to (n_bytes) = from, in the order of the stream. Either may be host memory: then it is complete on return.
static inline void device_copy(void *to, const void *from, size_t n_bytes, Stream *stream) {
    if (stream->failed || n_bytes == 0) return;
    stream_cuda(stream, cudaMemcpyAsync(to, from, n_bytes, cudaMemcpyDefault, stream->cuda));
    if (!device_owns(to) || !device_owns(from)) stream_cuda(stream, cudaStreamSynchronize(stream->cuda));
}

// to = from, memory of device_host_alloc that stays as it is until the stream has been waited for; does not wait.
static inline void device_upload(void *to, const void *from, size_t n_bytes, Stream *stream) {
    if (stream->failed || n_bytes == 0) return;
    stream_cuda(stream, cudaMemcpyAsync(to, from, n_bytes, cudaMemcpyDefault, stream->cuda));
}

// The calling thread goes on with this stream's device.
static inline void stream_use(Stream *stream) {
    stream_cuda(stream, cudaSetDevice(stream->device));
}

// Returns when everything queued on the stream is done: before another stream may use what it has made.
static inline void stream_wait(Stream *stream) {
    stream_cuda(stream, cudaStreamSynchronize(stream->cuda));
}

// Which inputs the products of this build take: those of floatX.
static inline int device_has_bf16(void) {
    return sizeof(floatX) == 2;
}

static inline int device_has_fp32(void) {
    return sizeof(floatX) == 4;
}

// Bytes of memory the current device has; 0 where there is none.
static inline int64_t device_memory(void) {
    size_t free_bytes, bytes;
    return cudaMemGetInfo(&free_bytes, &bytes) == cudaSuccess ? (int64_t)bytes : 0;
}

// How much of it is free.
static inline int64_t device_memory_left(void) {
    size_t free_bytes, bytes;
    return cudaMemGetInfo(&free_bytes, &bytes) == cudaSuccess ? (int64_t)free_bytes : 0;
}

// The library of matrix products, in words.
static inline void device_library(char *text, size_t size) {
    snprintf(text, size, "cuBLASLt %zu", cublasLtGetVersion());
}

static inline void stream_destroy(Stream *stream) {
    int before = 0;
    if (stream == NULL) return;
    (void)cudaGetDevice(&before);
    (void)cudaSetDevice(stream->device); // a library's handle is destroyed where it was made
    if (stream->cuda != NULL) (void)cudaStreamSynchronize(stream->cuda);
    for (int i = 0; i < KEPT_COUNT; i++)
        if (stream->kept[i].data != NULL) stream->kept[i].destroy(stream->kept[i].data);
    for (int i = 0; i < SCRATCH_COUNT; i++) device_free(stream->scratch[i].data);
    if (stream->blas != NULL) (void)cublasLtDestroy(stream->blas);
    if (stream->solver != NULL) (void)cusolverDnDestroy(stream->solver);
    if (stream->cuda != NULL) (void)cudaStreamDestroy(stream->cuda);
    (void)cudaSetDevice(before);
    free(stream);
}

static inline int stream_start(Stream *stream) {
    int n_devices;
    CUDA_CHECK(cudaGetDeviceCount(&n_devices));
    CUDA_CHECK(cudaGetDevice(&stream->device));
    CUDA_CHECK(cudaStreamCreateWithFlags(&stream->cuda, cudaStreamNonBlocking));
    if (cublasLtCreate(&stream->blas) != CUBLAS_STATUS_SUCCESS) return error_set("cuBLASLt does not start on this GPU");
    return 0;
}

// Makes a stream on the calling thread's current device. threads: of loops that the host itself runs. Returns 0 or -1
// (no driver, no GPU, no memory).
static inline int stream_create(Stream **out, Precision precision, int threads) {
    Stream *stream = (Stream *)calloc(1, sizeof *stream);
    if (stream == NULL) return error_set("out of memory for a stream");
    stream->precision = precision;
    stream->threads = threads;
    if (stream_start(stream)) {
        stream_destroy(stream);
        return -1;
    }
    *out = stream;
    return 0;
}

// The same on a device of its number, which is the calling thread's current one from here on.
static inline int stream_create_on(Stream **out, int device, Precision precision, int threads) {
    CUDA_CHECK(cudaSetDevice(device));
    return stream_create(out, precision, threads);
}

// 0, or -1 if an op on this stream has failed since the stream was made. Does not wait: what a kernel does wrong shows
// at a later call.
static inline int stream_check(const Stream *stream) {
    return stream->failed ? -1 : 0;
}

#endif
