// The GPUs of one box as one worker: their gradients are summed by NCCL while the backward goes on, CUDA. One process
// drives all of them; each computes with a stream of its own, and sums go on another stream of the same device.
//
//   Nccl *nccl;  nccl_create(&nccl, n_devices);                       // devices 0 .. n-1
//   nccl_share(nccl, params, n, streams);                             // device 0's values for all, at the start
//   ... backward of a layer on every device ...
//   nccl_sum(nccl, bucket, bucket_floats, streams);                   // its gradients: begins when they are there
//   ... backward of the next layer, beside the sum ...
//   nccl_wait(nccl, streams);                                         // before the optimizer
//   nccl_destroy(nccl);
//
// A bucket is a range of the gradients' arena, the same on every device, that nothing touches between nccl_sum and
// nccl_wait; one of a few MB and more keeps the links busy. NCCL's sums are the same bits on all devices, and from run
// to run as long as devices, links and the library stay. Nothing here waits on the host.
//
// Without -DWITH_NCCL there is no library to link: nccl_create then takes one device, and the rest does nothing.
#ifndef LLMC_NCCL_CUH
#define LLMC_NCCL_CUH

#include <stdint.h> // fixed-width integers
#include <stdlib.h> // calloc

#include "device.cuh" // Stream, CUDA_CHECK
#include "error.h"

// How many devices there are to choose from; 0 without a driver.
static inline int nccl_devices(void) {
    int present = 0;
    return cudaGetDeviceCount(&present) == cudaSuccess ? present : 0;
}

#ifdef WITH_NCCL
#include <nccl.h> // the collectives

#define NCCL_MAX_DEVICES 16

typedef struct {
    int n_devices;
    ncclComm_t comm[NCCL_MAX_DEVICES];
    cudaStream_t cuda[NCCL_MAX_DEVICES]; // sums only, before the backward's blocks that wait for a place
    cudaEvent_t ready[NCCL_MAX_DEVICES]; // the bucket's gradients are there
    cudaEvent_t done[NCCL_MAX_DEVICES];  // the sums begun so far are
} Nccl;

// 0, or -1 after a call of NCCL that failed: the message says which.
static inline int nccl_status(ncclResult_t result, const char *call, int line) {
    if (result == ncclSuccess) return 0;
    return error_set("nccl.cuh:%d: %s: %s: %s; NCCL_DEBUG=WARN in the environment tells more", line, call,
                     ncclGetErrorString(result), ncclGetLastError(NULL));
}
#define NCCL_TRY(call)                                                                                                 \
    do {                                                                                                               \
        if (nccl_status(call, #call, __LINE__)) return -1;                                                             \
    } while (0)

static inline void nccl_destroy(Nccl *nccl) {
    if (nccl == NULL) return;
    for (int i = 0; i < nccl->n_devices; i++)
        if (nccl->cuda[i] != NULL) cudaStreamSynchronize(nccl->cuda[i]);
    // The communicators of a process end together, with the last one's call: only then are the streams theirs no more.
    for (int i = 0; i < nccl->n_devices; i++)
        if (nccl->comm[i] != NULL) ncclCommDestroy(nccl->comm[i]);
    for (int i = 0; i < nccl->n_devices; i++) {
        if (nccl->ready[i] != NULL) cudaEventDestroy(nccl->ready[i]);
        if (nccl->done[i] != NULL) cudaEventDestroy(nccl->done[i]);
        if (nccl->cuda[i] != NULL) cudaStreamDestroy(nccl->cuda[i]);
    }
    free(nccl);
}

static inline int nccl_start(Nccl *nccl) {
    int devices[NCCL_MAX_DEVICES], before, least, first;
    CUDA_CHECK(cudaGetDevice(&before));
    for (int i = 0; i < nccl->n_devices; i++) {
        devices[i] = i;
        CUDA_CHECK(cudaSetDevice(i));
        CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&least, &first));
        CUDA_CHECK(cudaStreamCreateWithPriority(&nccl->cuda[i], cudaStreamNonBlocking, first));
        CUDA_CHECK(cudaEventCreateWithFlags(&nccl->ready[i], cudaEventDisableTiming));
        CUDA_CHECK(cudaEventCreateWithFlags(&nccl->done[i], cudaEventDisableTiming));
    }
    CUDA_CHECK(cudaSetDevice(before));
    NCCL_TRY(ncclCommInitAll(nccl->comm, nccl->n_devices, devices));
    return 0;
}

// Connects the first n_devices GPUs. Returns 0, or -1: there are fewer, no memory, or NCCL does not start.
static inline int nccl_create(Nccl **out, int n_devices) {
    int present = nccl_devices();
    if (n_devices < 1 || n_devices > present || n_devices > NCCL_MAX_DEVICES)
        return error_set("%d GPUs asked for, this machine has %d and %d is the most; try --gpus all", n_devices,
                         present, NCCL_MAX_DEVICES);
    Nccl *nccl = (Nccl *)calloc(1, sizeof *nccl);
    if (nccl == NULL) return error_set("out of memory for NCCL");
    nccl->n_devices = n_devices;
    if (nccl_start(nccl)) {
        nccl_destroy(nccl);
        return -1;
    }
    *out = nccl;
    return 0;
}

// The communication streams go on after what streams[i] hold now.
static inline int nccl_follow(Nccl *nccl, Stream *const *streams) {
    for (int i = 0; i < nccl->n_devices; i++) {
        CUDA_CHECK(cudaEventRecord(nccl->ready[i], streams[i]->cuda));
        CUDA_CHECK(cudaStreamWaitEvent(nccl->cuda[i], nccl->ready[i], 0));
    }
    return 0;
}

// Notes where the communication streams are, for nccl_wait.
static inline int nccl_mark(Nccl *nccl) {
    for (int i = 0; i < nccl->n_devices; i++) CUDA_CHECK(cudaEventRecord(nccl->done[i], nccl->cuda[i]));
    return 0;
}

// One collective in place, all devices in a group. The group is closed whatever happens in it.
static inline int nccl_begin(Nccl *nccl, float *const *values, int64_t n, Stream *const *streams, int sum) {
    for (int i = 0; i < nccl->n_devices; i++)
        if (stream_check(streams[i])) return -1;
    if (nccl_follow(nccl, streams)) return -1;
    NCCL_TRY(ncclGroupStart());
    int result = 0;
    for (int i = 0; i < nccl->n_devices && result == 0; i++) {
        ncclComm_t comm = nccl->comm[i];
        ncclResult_t begun =
            sum ? ncclAllReduce(values[i], values[i], (size_t)n, ncclFloat32, ncclSum, comm, nccl->cuda[i])
                : ncclBroadcast(values[i], values[i], (size_t)n, ncclFloat32, 0, comm, nccl->cuda[i]);
        result = nccl_status(begun, sum ? "ncclAllReduce" : "ncclBroadcast", __LINE__);
    }
    ncclResult_t ended = ncclGroupEnd();
    if (result == 0) result = nccl_status(ended, "ncclGroupEnd", __LINE__);
    return result == 0 ? nccl_mark(nccl) : -1;
}

// values[i] (n) on device i := the sum over all devices, begun when streams[i] have come to this point; returns at
// once. Returns 0, or -1: a stream has failed, or NCCL refuses.
static inline int nccl_sum(Nccl *nccl, float *const *values, int64_t n, Stream *const *streams) {
    return nccl_begin(nccl, values, n, streams, 1);
}

// values[i] (n) on device i := device 0's; otherwise as nccl_sum.
static inline int nccl_share(Nccl *nccl, float *const *values, int64_t n, Stream *const *streams) {
    return nccl_begin(nccl, values, n, streams, 0);
}

// What comes on streams[i] from here on waits for all that was begun before. Returns 0 or -1.
static inline int nccl_wait(Nccl *nccl, Stream *const *streams) {
    for (int i = 0; i < nccl->n_devices; i++) CUDA_CHECK(cudaStreamWaitEvent(streams[i]->cuda, nccl->done[i], 0));
    return 0;
}

#else

typedef struct {
    int n_devices; // 1
} Nccl;

static inline int nccl_create(Nccl **out, int n_devices) {
    if (n_devices != 1)
        return error_set("%d GPUs asked for, but this program was built without NCCL: make train DEVICE=cuda NCCL=1",
                         n_devices);
    *out = (Nccl *)calloc(1, sizeof **out);
    if (*out == NULL) return error_set("out of memory");
    (*out)->n_devices = 1;
    return 0;
}

static inline void nccl_destroy(Nccl *nccl) {
    free(nccl);
}

static inline int nccl_sum(Nccl *, float *const *, int64_t, Stream *const *) {
    return 0;
}

static inline int nccl_share(Nccl *, float *const *, int64_t, Stream *const *) {
    return 0;
}

static inline int nccl_wait(Nccl *, Stream *const *) {
    return 0;
}

#endif

#endif
