// 16 bytes at a time: the widest access a thread has. Addresses must be multiples of 16.
//
//   Pack<floatX> x = pack_load(row + i);             // i a multiple of Pack<floatX>::size
//   for (int k = 0; k < x.size; k++) x[k] = to_floatX(2.0f * to_float(x[k]));
//   pack_store(row + i, x);
#ifndef LLMC_PACKED_CUH
#define LLMC_PACKED_CUH

#include <cuda_bf16.h>    // __nv_bfloat16
#include <cuda_runtime.h> // uint4
#include <stdint.h>       // uintptr_t
#include <string.h>       // memcpy

#include "device.cuh" // floatX

template <typename T> struct alignas(16) Pack {
    static constexpr int size = 16 / (int)sizeof(T); // 4 floats or 8 bf16
    T values[16 / sizeof(T)];
    __device__ T &operator[](int i) {
        return values[i];
    }
    __device__ const T &operator[](int i) const {
        return values[i];
    }
};

__device__ static inline void pack_check(const void *address) {
#ifdef CUDA_EMULATOR
    if ((uintptr_t)address % 16 != 0) emu::die("a 16-byte access at %p, which is no multiple of 16", address);
#else
    (void)address; // the device faults by itself
#endif
}

// 1 if all rows of `row_elements` values that start at this address can be read in packs.
template <typename T> HOST_DEVICE static inline int pack_fits(const T *rows, int64_t row_elements) {
    return (uintptr_t)rows % 16 == 0 && row_elements % (16 / (int)sizeof(T)) == 0;
}

template <typename T> __device__ static inline Pack<T> pack_of_words(uint4 words) {
    Pack<T> pack;
    memcpy(&pack, &words, sizeof pack);
    return pack;
}

template <typename T> __device__ static inline uint4 pack_words(Pack<T> pack) {
    uint4 words;
    memcpy(&words, &pack, sizeof words);
    return words;
}

template <typename T> __device__ static inline Pack<T> pack_load(const T *address) {
    pack_check(address);
    return pack_of_words<T>(*(const uint4 *)address);
}

// For what this kernel reads once: does not displace what the caches hold.
template <typename T> __device__ static inline Pack<T> pack_load_streaming(const T *address) {
    pack_check(address);
    return pack_of_words<T>(__ldcs((const uint4 *)address));
}

template <typename T> __device__ static inline void pack_store(T *address, Pack<T> pack) {
    pack_check(address);
    *(uint4 *)address = pack_words(pack);
}

// For what no kernel reads soon.
template <typename T> __device__ static inline void pack_store_streaming(T *address, Pack<T> pack) {
    pack_check(address);
    __stcs((uint4 *)address, pack_words(pack));
}

HOST_DEVICE static inline float to_float(float value) {
    return value;
}

HOST_DEVICE static inline float to_float(__nv_bfloat16 value) {
    return __bfloat162float(value);
}

// Rounds to nearest even where floatX is bf16.
HOST_DEVICE static inline floatX to_floatX(float value) {
#ifdef FLOATX_FP32
    return value;
#else
    return __float2bfloat16_rn(value);
#endif
}

#endif
