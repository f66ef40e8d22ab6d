// Reads and writes values that are kept as fp32, bf16 or in 8 bits (store_format.h), CUDA.
//   stored_read   to = values as floats                  overwritten
//   stored_write  values = from, rounded                 overwritten
// Pieces begin at multiples of STORE_BLOCK, but those of bf16 that are rounded to the nearest. The CPU's bits.
#ifndef LLMC_STORE_CUH
#define LLMC_STORE_CUH

#include <stdint.h> // fixed-width integers

#include "device.cuh"     // Stream, LAUNCH, device_copy
#include "store_format.h" // Stored, Rounding

// Values that pass through scratch at once.
#ifdef TESTING
#define STORE_PIECE ((int64_t)512) // small tensors take several pieces too
#else
#define STORE_PIECE ((int64_t)4 << 20)
#endif

// One thread a value, blocks of 256. Moves 6n bytes.
__global__ static void __launch_bounds__(STORE_BLOCK)
    store_read_bf16_kernel(float *to, const uint16_t *from, int64_t n) {
    int64_t i = (int64_t)blockIdx.x * STORE_BLOCK + threadIdx.x;
    if (i < n) to[i] = float_of_bf16(from[i]);
}

// The same; element i of the piece is number first + i of its tensor.
__global__ static void __launch_bounds__(STORE_BLOCK)
    store_write_bf16_kernel(uint16_t *to, const float *from, int64_t n, uint64_t first, Rounding r) {
    int64_t i = (int64_t)blockIdx.x * STORE_BLOCK + threadIdx.x;
    if (i >= n) return;
    to[i] = r.nearest ? bf16_of_float(from[i])
                      : bf16_stochastic(__float_as_uint(from[i]), rounding_bits(&r, first + (uint64_t)i));
}

// One block a block of values. Moves 5n bytes.
__global__ static void __launch_bounds__(STORE_BLOCK)
    store_read_int8_kernel(float *to, const uint8_t *from, const float *scales, int64_t n, int is_signed) {
    int64_t i = (int64_t)blockIdx.x * STORE_BLOCK + threadIdx.x;
    if (i < n) to[i] = store_value(from[i], scales[blockIdx.x], is_signed);
}

// One block a block of values; 1 KiB of shared memory. Moves 5n bytes.
__global__ static void __launch_bounds__(STORE_BLOCK)
    store_write_int8_kernel(uint8_t *to, float *scales, const float *from, int64_t n, int is_signed, uint64_t first,
                            Rounding r) {
    __shared__ float largest[STORE_BLOCK];
    int64_t i = (int64_t)blockIdx.x * STORE_BLOCK + threadIdx.x;
    float value = i < n ? from[i] : 0.0f, size = fabsf(value);
    largest[threadIdx.x] = size == size ? size : 0.0f;
    for (int half = STORE_BLOCK / 2; half > 0; half /= 2) {
        __syncthreads();
        if ((int)threadIdx.x < half && largest[threadIdx.x + half] > largest[threadIdx.x])
            largest[threadIdx.x] = largest[threadIdx.x + half];
    }
    __syncthreads();
    float scale = largest[0];
    if (threadIdx.x == 0) scales[blockIdx.x] = scale;
    if (i < n)
        to[i] = store_code(value, scale > 0.0f ? scale : 1.0f, is_signed, rounding_bits(&r, first + (uint64_t)i));
}

// to (n) = elements at .. at+n-1
static inline void stored_read(float *to, Stored from, int64_t at, int64_t n, Stream *stream) {
    unsigned blocks = (unsigned)((n + STORE_BLOCK - 1) / STORE_BLOCK);
    if (n == 0) return;
    if (from.store == STORE_FP32) {
        device_copy(to, (const float *)from.data + at, sizeof(float) * (size_t)n, stream);
    } else if (from.store == STORE_BF16) {
        LAUNCH(store_read_bf16_kernel, blocks, STORE_BLOCK, 0, stream, to, (const uint16_t *)from.data + at, n);
    } else {
        LAUNCH(store_read_int8_kernel, blocks, STORE_BLOCK, 0, stream, to, (const uint8_t *)from.data + at,
               (const float *)(from.scales + at / STORE_BLOCK), n, from.is_signed);
    }
}

// Elements at .. at+n-1 = from (n).
static inline void stored_write(Stored to, int64_t at, const float *from, int64_t n, Rounding r, Stream *stream) {
    unsigned blocks = (unsigned)((n + STORE_BLOCK - 1) / STORE_BLOCK);
    if (n == 0) return;
    if (to.store == STORE_FP32) {
        device_copy((float *)to.data + at, from, sizeof(float) * (size_t)n, stream);
    } else if (to.store == STORE_BF16) {
        LAUNCH(store_write_bf16_kernel, blocks, STORE_BLOCK, 0, stream, (uint16_t *)to.data + at, from, n, (uint64_t)at,
               r);
    } else {
        LAUNCH(store_write_int8_kernel, blocks, STORE_BLOCK, 0, stream, (uint8_t *)to.data + at,
               to.scales + at / STORE_BLOCK, from, n, to.is_signed, (uint64_t)at, r);
    }
}

#endif
