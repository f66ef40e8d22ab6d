// What kernels over vectors and rows share: values as floats by 16-byte accesses, and one thread for each of them.
//
//   struct ScaleOp { float *x, factor;
//                    template <int WIDTH> __device__ void at(int64_t i) const { ... values_load<WIDTH>(x + i) ... } };
//   scale_kernel(ScaleOp op, Elements range) { elements_do<4>(op, range); }
//   Elements range = elements_of(n, 4, aligned_16(x));
//   LAUNCH(scale_kernel, range.blocks, ELEMENTS_BLOCK, 0, stream, op, range);
// Vectors whose addresses are no multiples of 16 are read value by value, and so is what is left after the last pack.
#ifndef LLMC_ELEMENTS_CUH
#define LLMC_ELEMENTS_CUH

#include <cuda_bf16.h> // __nv_bfloat16
#include <stdint.h>    // fixed-width integers

#include "device.cuh" // floatX
#include "packed.cuh" // Pack, pack_load, pack_store, to_float

#define FLOATX_WIDTH   ((int)(16 / sizeof(floatX))) // values of a 16-byte access
#define ELEMENTS_BLOCK 256

__device__ inline void value_put(float *to, float value) {
    *to = value;
}

__device__ inline void value_put(__nv_bfloat16 *to, float value) {
    *to = __float2bfloat16_rn(value); // to nearest even
}

template <int WIDTH> struct Values { float v[WIDTH]; };

// WIDTH values from an address: 1, or a multiple of what 16 bytes hold, and then the address is a multiple of 16.
template <int WIDTH, typename T> __device__ inline Values<WIDTH> values_load(const T *from) {
    Values<WIDTH> values;
    if constexpr (WIDTH == 1) {
        values.v[0] = to_float(*from);
    } else {
        constexpr int PACK = (int)(16 / sizeof(T));
        static_assert(WIDTH % PACK == 0, "whole packs");
#pragma unroll
        for (int i = 0; i < WIDTH; i += PACK) {
            Pack<T> pack = pack_load(from + i);
#pragma unroll
            for (int j = 0; j < PACK; j++) values.v[i + j] = to_float(pack[j]);
        }
    }
    return values;
}

template <int WIDTH, typename T> __device__ inline void values_store(T *to, const Values<WIDTH> &values) {
    if constexpr (WIDTH == 1) {
        value_put(to, values.v[0]);
    } else {
        constexpr int PACK = (int)(16 / sizeof(T));
        static_assert(WIDTH % PACK == 0, "whole packs");
#pragma unroll
        for (int i = 0; i < WIDTH; i += PACK) {
            Pack<T> pack;
#pragma unroll
            for (int j = 0; j < PACK; j++) value_put(&pack[j], values.v[i + j]);
            pack_store(to + i, pack);
        }
    }
}

// e^x by the hardware's 2^x: relative error about (2 + |x|/2) 2^-23.
__device__ inline float exp_fast(float x) {
    return exp2f(x * 1.44269504f);
}

// 1 if every pointer is a multiple of 16.
template <typename... Pointers> static inline int aligned_16(Pointers... pointers) {
    return (((uintptr_t)pointers | ...) & 15u) == 0;
}

// n values: n_packs packs first, a thread each; the rest one by one. blocks of ELEMENTS_BLOCK threads reach all.
typedef struct {
    int64_t n, n_packs;
    unsigned blocks;
} Elements;

static inline Elements elements_of(int64_t n, int width, int aligned) {
    int64_t n_packs = aligned ? n / width : 0, rest = n - n_packs * width;
    int64_t threads = n_packs > rest ? n_packs : rest;
    Elements range = {n, n_packs, threads > 0 ? (unsigned)((threads + ELEMENTS_BLOCK - 1) / ELEMENTS_BLOCK) : 1u};
    return range;
}

template <int WIDTH, class Op> __device__ inline void elements_do(const Op &op, Elements range) {
    int64_t i = (int64_t)blockIdx.x * ELEMENTS_BLOCK + threadIdx.x, rest = range.n_packs * WIDTH;
    if (i < range.n_packs) op.template at<WIDTH>(i * WIDTH);
    if (rest + i < range.n) op.template at<1>(rest + i);
}

#endif
