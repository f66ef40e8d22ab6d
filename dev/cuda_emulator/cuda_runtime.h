// The CUDA emulator: with this folder in front of the include path, g++ compiles the program's .cuh files, and kernels
// run on the CPU. For correctness, not for speed: it finds
//   writes and reads outside device, shared and local memory   ASan; without it, guard bytes looked at after kernels
//   host code that touches device memory, and kernels that are given the host's
//   a missing __syncthreads, __syncwarp or cp_async_wait        threads run in shuffled orders, waits are real
//   divergent barriers, mismatched warp collectives, deadlocks
//   a missing order between streams, host memory that is reused too early   work is queued, drawn at random
//   reliance on the contents of fresh memory                    all of it starts as NaN
//   launches that CUDA refuses
// A fault prints one line and aborts; EMU_SEED repeats the orders. dev/cuda_tests/emulator.h plants each fault.
//
//   EMU_SEED=n        another order of blocks, warps, lanes and streams (1)
//   EMU_DEVICES=n     so many devices (1, at most 8)
//   EMU_MEMORY_MB=n   so much memory each (16384)
//
// Limits. Without ASan, reads past an end and writes past a __shared__ variable go unseen. While one host thread has
// the emulator at work, another's touch of device memory does. One CUDA thread runs at a time, and only changes where
// it waits: a race between two instructions without a wait between them shows only if the order of whole stretches
// matters. A __shared__ variable is a static variable: it must stand in the __global__ function itself (helpers get a
// pointer), and it may be better aligned than on a GPU, so say
// __align__(16) where 16-byte accesses need it. No textures, no cooperative groups, no dynamic parallelism, no graphs.
// Calls are those the program makes; add others here as they are needed. Source text is our own throughout.
#ifndef EMULATOR_CUDA_RUNTIME_H
#define EMULATOR_CUDA_RUNTIME_H

#include <algorithm>   // min, max
#include <assert.h>    // assert
#include <ctype.h>     // isalnum
#include <math.h>      // expf
#include <type_traits> // is_pointer

#define __global__
#define __device__
#define __host__
#define __constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
// used: so that g++ does not take it for unchanged where only other fibers write it.
#define __shared__ static __attribute__((used))

#include "device_functions.h"
#include "errors.h"
#include "launch.h"

// ---------------------------------------------------------------------------------------------------------------------
// Devices

enum cudaDeviceAttr {
    cudaDevAttrMaxThreadsPerBlock = 1,
    cudaDevAttrMaxSharedMemoryPerBlock = 8,
    cudaDevAttrClockRate = 13,
    cudaDevAttrMultiProcessorCount = 16,
    cudaDevAttrMemoryClockRate = 36,
    cudaDevAttrGlobalMemoryBusWidth = 37,
    cudaDevAttrL2CacheSize = 38,
    cudaDevAttrComputeCapabilityMajor = 75,
    cudaDevAttrComputeCapabilityMinor = 76,
    cudaDevAttrMaxSharedMemoryPerMultiprocessor = 81,
    cudaDevAttrMaxSharedMemoryPerBlockOptin = 97
};

struct cudaDeviceProp {
    char name[256];
    size_t totalGlobalMem, sharedMemPerBlock, sharedMemPerBlockOptin, sharedMemPerMultiprocessor;
    int major, minor, multiProcessorCount, warpSize, maxThreadsPerBlock, memoryBusWidth, l2CacheSize;
};

inline cudaError_t cudaGetDeviceCount(int *count) {
    *count = emu::n_devices;
    return emu::set_error(*count > 0 ? cudaSuccess : cudaErrorNoDevice);
}

inline cudaError_t cudaSetDevice(int device) {
    if (device < 0 || device >= emu::n_devices) return emu::set_error(cudaErrorInvalidDevice);
    emu::current_device = device;
    return cudaSuccess;
}

inline cudaError_t cudaGetDevice(int *device) {
    *device = emu::current_device;
    return cudaSuccess;
}

inline cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int device) {
    if (device < 0 || device >= emu::n_devices) return emu::set_error(cudaErrorInvalidDevice);
    switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock: *value = (int)emu::MAX_THREADS; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = (int)emu::SHARED_BYTES; break;
    case cudaDevAttrClockRate: *value = 1000000; break;
    case cudaDevAttrMultiProcessorCount: *value = 4; break; // few, so that grids made for them loop
    case cudaDevAttrMemoryClockRate: *value = 1000000; break;
    case cudaDevAttrGlobalMemoryBusWidth: *value = 1024; break;
    case cudaDevAttrL2CacheSize: *value = 4 << 20; break;
    case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
    case cudaDevAttrComputeCapabilityMinor: *value = 0; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = 228 << 10; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = (int)emu::SHARED_OPTIN_BYTES; break;
    }
    return cudaSuccess;
}

inline cudaError_t cudaGetDeviceProperties(cudaDeviceProp *properties, int device) {
    if (device < 0 || device >= emu::n_devices) return emu::set_error(cudaErrorInvalidDevice);
    *properties = cudaDeviceProp{"emulated device",
                                 (size_t)16 << 30,
                                 emu::SHARED_BYTES,
                                 emu::SHARED_OPTIN_BYTES,
                                 (size_t)228 << 10,
                                 9,
                                 0,
                                 4,
                                 32,
                                 1024,
                                 1024,
                                 4 << 20};
    return cudaSuccess;
}

inline cudaError_t cudaDriverGetVersion(int *version) {
    *version = 13000;
    return cudaSuccess;
}

inline cudaError_t cudaRuntimeGetVersion(int *version) {
    *version = 13000;
    return cudaSuccess;
}

inline cudaError_t cudaDeviceSynchronize() {
    std::lock_guard<std::recursive_mutex> guard(emu::lock);
    emu::drain_device(emu::current_device);
    return cudaSuccess;
}

// ---------------------------------------------------------------------------------------------------------------------
// Streams and events

enum { cudaStreamDefault = 0, cudaStreamNonBlocking = 1 };
enum { cudaEventDefault = 0, cudaEventBlockingSync = 1, cudaEventDisableTiming = 2 };

inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
    std::lock_guard<std::recursive_mutex> guard(emu::lock);
    *stream = new EmuStream{emu::current_device, flags != cudaStreamNonBlocking, false, {}};
    emu::streams.push_back(*stream);
    return cudaSuccess;
}

inline cudaError_t cudaStreamCreate(cudaStream_t *stream) {
    return cudaStreamCreateWithFlags(stream, cudaStreamDefault);
}

inline cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0, *greatest = -5;
    return cudaSuccess;
}

inline cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int) {
    return cudaStreamCreateWithFlags(stream, flags);
}

inline bool emu_is_stream(cudaStream_t stream) {
    return std::find(emu::streams.begin(), emu::streams.end(), stream) != emu::streams.end();
}

inline cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    std::lock_guard<std::recursive_mutex> guard(emu::lock);
    if (!emu_is_stream(stream)) return emu::set_error(cudaErrorInvalidResourceHandle);
    emu::drain_stream(stream);
    emu::streams.erase(std::find(emu::streams.begin(), emu::streams.end(), stream));
    delete stream;
    return cudaSuccess;
}

inline cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    std::lock_guard<std::recursive_mutex> guard(emu::lock);
    stream = emu::stream_of(stream);
    if (!emu_is_stream(stream)) return emu::set_error(cudaErrorInvalidResourceHandle);
    emu::drain_stream(stream);
    return cudaSuccess;
}

inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
    *event = new EmuEvent{emu::current_device, (flags & cudaEventDisableTiming) == 0};
    return cudaSuccess;
}

inline cudaError_t cudaEventCreate(cudaEvent_t *event) {
    return cudaEventCreateWithFlags(event, cudaEventDefault);
}

inline cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream = nullptr) {
    std::lock_guard<std::recursive_mutex> guard(emu::lock);
    if (emu::stream_of(stream)->device != event->device) return emu::set_error(cudaErrorInvalidResourceHandle);
    unsigned long long version = ++event->recorded;
    emu::enqueue(stream, [=] { event->done = version, event->at_ms = emu::now_ms(); });
    return cudaSuccess;
}

inline cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned = 0) {
    std::lock_guard<std::recursive_mutex> guard(emu::lock);
    emu::enqueue(stream, nullptr);
    emu::Work *work = &emu::stream_of(stream)->queue.back();
    work->event = event, work->version = event->recorded;
    return cudaSuccess;
}

inline cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    std::lock_guard<std::recursive_mutex> guard(emu::lock);
    emu::run_until([=] { return event->done >= event->recorded; });
    return cudaSuccess;
}

// Asking goes on with the work, so that a loop that asks ends.
inline cudaError_t cudaEventQuery(cudaEvent_t event) {
    std::lock_guard<std::recursive_mutex> guard(emu::lock);
    emu::Opening opening(0);
    if (event->done < event->recorded) emu::run_one();
    return event->done >= event->recorded ? cudaSuccess : cudaErrorNotReady;
}

inline cudaError_t cudaStreamQuery(cudaStream_t stream) {
    std::lock_guard<std::recursive_mutex> guard(emu::lock);
    stream = emu::stream_of(stream);
    emu::Opening opening(0);
    if (!stream->queue.empty()) emu::run_one();
    return stream->queue.empty() ? cudaSuccess : cudaErrorNotReady;
}

inline cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t to) {
    if (!from->timing || !to->timing || from->recorded == 0 || to->recorded == 0)
        return emu::set_error(cudaErrorInvalidResourceHandle);
    if (from->done < from->recorded || to->done < to->recorded) return cudaErrorNotReady;
    *ms = (float)(to->at_ms - from->at_ms);
    return cudaSuccess;
}

inline cudaError_t cudaEventDestroy(cudaEvent_t event) {
    std::lock_guard<std::recursive_mutex> guard(emu::lock);
    emu::run_until([=] { return event->done >= event->recorded; });
    for (EmuStream *stream : emu::streams)
        for (emu::Work &work : stream->queue)
            if (work.event == event) work.event = nullptr; // what they wait for is done
    delete event;
    return cudaSuccess;
}

typedef void (*cudaHostFn_t)(void *);

inline cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *argument) {
    emu::enqueue(stream, [=] {
        emu::set_open(0);
        function(argument);
    });
    return cudaSuccess;
}

// ---------------------------------------------------------------------------------------------------------------------
// Memory

enum cudaMemcpyKind {
    cudaMemcpyHostToHost,
    cudaMemcpyHostToDevice,
    cudaMemcpyDeviceToHost,
    cudaMemcpyDeviceToDevice,
    cudaMemcpyDefault
};
enum { cudaHostRegisterDefault = 0, cudaHostRegisterPortable = 1 };
enum { cudaHostAllocDefault = 0, cudaHostAllocPortable = 1, cudaHostAllocMapped = 2, cudaHostAllocWriteCombined = 4 };
enum cudaMemoryType { cudaMemoryTypeUnregistered, cudaMemoryTypeHost, cudaMemoryTypeDevice, cudaMemoryTypeManaged };

struct cudaPointerAttributes {
    cudaMemoryType type;
    int device;
    void *devicePointer, *hostPointer;
};

inline cudaError_t cudaMalloc(void **pointer, size_t n_bytes) {
    std::lock_guard<std::recursive_mutex> guard(emu::lock);
    *pointer = nullptr;
    if (n_bytes == 0) return cudaSuccess;
    *pointer = emu::arena_alloc(emu::current_device, n_bytes);
    return emu::set_error(*pointer != nullptr ? cudaSuccess : cudaErrorMemoryAllocation);
}

template <class T> cudaError_t cudaMalloc(T **pointer, size_t n_bytes) {
    return cudaMalloc((void **)pointer, n_bytes);
}

inline cudaError_t cudaFree(void *pointer) {
    std::lock_guard<std::recursive_mutex> guard(emu::lock);
    if (pointer == nullptr) return cudaSuccess;
    emu::drain_device(-1);
    return emu::set_error(emu::arena_free(pointer) == 0 ? cudaSuccess : cudaErrorInvalidValue);
}

inline cudaError_t cudaHostAlloc(void **pointer, size_t n_bytes, unsigned) {
    std::lock_guard<std::recursive_mutex> guard(emu::lock);
    *pointer = aligned_alloc(emu::PAGE_BYTES, emu::round_up(n_bytes + (n_bytes == 0), emu::PAGE_BYTES));
    if (*pointer == nullptr) return emu::set_error(cudaErrorMemoryAllocation);
    memset(*pointer, 0xFF, n_bytes);
    emu::pinned[(char *)*pointer] = n_bytes;
    return cudaSuccess;
}

template <class T> cudaError_t cudaHostAlloc(T **pointer, size_t n_bytes, unsigned flags) {
    return cudaHostAlloc((void **)pointer, n_bytes, flags);
}

template <class T> cudaError_t cudaMallocHost(T **pointer, size_t n_bytes) {
    return cudaHostAlloc((void **)pointer, n_bytes, cudaHostAllocDefault);
}

inline cudaError_t cudaFreeHost(void *pointer) {
    std::lock_guard<std::recursive_mutex> guard(emu::lock);
    if (pointer == nullptr) return cudaSuccess;
    emu::drain_device(-1);
    if (emu::pinned.erase((char *)pointer) == 0) return emu::set_error(cudaErrorInvalidValue);
    free(pointer);
    return cudaSuccess;
}

inline cudaError_t cudaHostRegister(void *pointer, size_t n_bytes, unsigned) {
    std::lock_guard<std::recursive_mutex> guard(emu::lock);
    if (emu::is_pinned(pointer)) return emu::set_error(cudaErrorInvalidValue);
    emu::pinned[(char *)pointer] = n_bytes;
    return cudaSuccess;
}

inline cudaError_t cudaHostUnregister(void *pointer) {
    std::lock_guard<std::recursive_mutex> guard(emu::lock);
    emu::drain_device(-1);
    return emu::set_error(emu::pinned.erase((char *)pointer) != 0 ? cudaSuccess : cudaErrorInvalidValue);
}

inline cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes) {
    std::lock_guard<std::recursive_mutex> guard(emu::lock);
    const char *text = getenv("EMU_MEMORY_MB");
    *total_bytes = (text != nullptr ? strtoull(text, nullptr, 0) : 16384) << 20;
    *free_bytes = *total_bytes - emu::arenas[emu::current_device].used;
    return cudaSuccess;
}

inline cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *attributes, const void *pointer) {
    std::lock_guard<std::recursive_mutex> guard(emu::lock);
    int device = emu::device_of(pointer);
    bool pinned = emu::is_pinned(pointer);
    void *address = const_cast<void *>(pointer);
    attributes->type = device >= 0 ? cudaMemoryTypeDevice : pinned ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
    attributes->device = device >= 0 ? device : pinned ? emu::current_device : -2;
    attributes->devicePointer = device >= 0 || pinned ? address : nullptr;
    attributes->hostPointer = device >= 0 ? nullptr : address;
    return cudaSuccess;
}

namespace emu {

// The copy itself, once its turn has come. Every byte is looked at under ASan.
inline void copy_now(void *to, const void *from, size_t n_bytes) {
    Opening opening(ALL_DEVICES);
    memcpy(to, from, n_bytes);
}

inline bool copy_kind_fits(void *to, const void *from, cudaMemcpyKind kind) {
    bool to_device = device_of(to) >= 0, from_device = device_of(from) >= 0;
    if (kind == cudaMemcpyDefault) return true;
    return to_device == (kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice) &&
           from_device == (kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice);
}

// Memory between opening and closing of a kernel is checked by ASan; for the rest there are bounds.
inline void check_range(const void *address, size_t n_bytes) {
    int device = device_of(address);
    if (device < 0) return;
    auto piece = piece_below(arenas[device].live, address);
    size_t offset = piece != arenas[device].live.end() ? (size_t)((const char *)address - piece->first) : 0;
    if (piece == arenas[device].live.end() || offset > piece->second || n_bytes > piece->second - offset)
        die("a copy or fill of %zu bytes at %p leaves its piece of device memory", n_bytes, address);
}

} // namespace emu

inline cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t n_bytes, cudaMemcpyKind kind,
                                   cudaStream_t stream = nullptr) {
    std::lock_guard<std::recursive_mutex> guard(emu::lock);
    if (!emu::copy_kind_fits(to, from, kind)) return emu::set_error(cudaErrorInvalidValue);
    if (n_bytes == 0) return cudaSuccess;
    emu::check_range(to, n_bytes);
    emu::check_range(from, n_bytes);
    bool to_pageable = emu::device_of(to) < 0 && !emu::is_pinned(to);
    bool from_pageable = emu::device_of(from) < 0 && !emu::is_pinned(from);
    if (from_pageable && !to_pageable) { // CUDA takes the bytes away before it returns
        std::vector<char> bytes((const char *)from, (const char *)from + n_bytes);
        emu::enqueue(stream, [to, bytes = std::move(bytes)] { emu::copy_now(to, bytes.data(), bytes.size()); });
    } else {
        emu::enqueue(stream, [=] { emu::copy_now(to, from, n_bytes); });
    }
    if (to_pageable) emu::drain_stream(emu::stream_of(stream)); // CUDA returns when all is there
    return cudaSuccess;
}

inline cudaError_t cudaMemcpy(void *to, const void *from, size_t n_bytes, cudaMemcpyKind kind) {
    std::lock_guard<std::recursive_mutex> guard(emu::lock);
    cudaError_t error = cudaMemcpyAsync(to, from, n_bytes, kind, nullptr);
    bool between_devices = emu::device_of(to) >= 0 && emu::device_of(from) >= 0;
    if (error == cudaSuccess && !between_devices) emu::drain_stream(emu::stream_of(nullptr));
    return error;
}

inline cudaError_t cudaMemcpyPeerAsync(void *to, int, const void *from, int, size_t n_bytes, cudaStream_t stream) {
    return cudaMemcpyAsync(to, from, n_bytes, cudaMemcpyDefault, stream);
}

inline cudaError_t cudaMemsetAsync(void *to, int value, size_t n_bytes, cudaStream_t stream = nullptr) {
    std::lock_guard<std::recursive_mutex> guard(emu::lock);
    if (n_bytes == 0) return cudaSuccess;
    if (emu::device_of(to) < 0) return emu::set_error(cudaErrorInvalidValue);
    emu::check_range(to, n_bytes);
    emu::enqueue(stream, [=] {
        emu::Opening opening(emu::ALL_DEVICES);
        memset(to, value, n_bytes);
    });
    return cudaSuccess;
}

inline cudaError_t cudaMemset(void *to, int value, size_t n_bytes) {
    return cudaMemsetAsync(to, value, n_bytes, nullptr);
}

// ---------------------------------------------------------------------------------------------------------------------
// Kernels

enum cudaFuncAttribute {
    cudaFuncAttributeMaxDynamicSharedMemorySize = 8,
    cudaFuncAttributePreferredSharedMemoryCarveout = 9
};

struct cudaFuncAttributes {
    size_t sharedSizeBytes, constSizeBytes, localSizeBytes;
    int maxThreadsPerBlock, numRegs, maxDynamicSharedSizeBytes;
};

template <class Kernel> cudaError_t cudaFuncSetAttribute(Kernel *kernel, cudaFuncAttribute attribute, int value) {
    std::lock_guard<std::recursive_mutex> guard(emu::lock);
    emu::KernelInfo *info = emu::kernel_info((void *)kernel);
    if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
    if (value < 0 || (size_t)value + info->shared_bytes > emu::SHARED_OPTIN_BYTES)
        return emu::set_error(cudaErrorInvalidValue);
    info->dynamic_limit = (size_t)value;
    return cudaSuccess;
}

template <class Kernel> cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *attributes, Kernel *kernel) {
    std::lock_guard<std::recursive_mutex> guard(emu::lock);
    emu::KernelInfo *info = emu::kernel_info((void *)kernel);
    *attributes = cudaFuncAttributes{info->shared_bytes, 0, 0, (int)emu::MAX_THREADS, 32, (int)info->dynamic_limit};
    return cudaSuccess;
}

// As if registers were no limit.
template <class Kernel>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *n_blocks, Kernel *kernel, int n_threads,
                                                          size_t dynamic_bytes) {
    std::lock_guard<std::recursive_mutex> guard(emu::lock);
    size_t bytes = emu::kernel_info((void *)kernel)->shared_bytes + dynamic_bytes + 1024;
    *n_blocks = std::min(std::min(32, 2048 / n_threads), (int)((228 << 10) / bytes));
    return cudaSuccess;
}

#endif
