// The boundary mask, CUDA: which K of a token's H values survive, perm_n(0..K-1) of token n (mask_set.h).
//
//   gather   values[n,i] = x[n, perm_n(i)]                                                values overwritten
//   scatter  x[n, perm_n(i)] = scale * values[n,i], 0 elsewhere                           x overwritten
// The masked function is scatter(gather(x)); its gradient is the same two ops, so the backward message has the same K
// positions as the forward one. The sets are the CPU's bit for bit: both compile mask_set.h.
//
// Kernels: grid n/4 + 1, block (32, 4): a warp a token, a lane every 32nd of its values; no shared memory. An index
// takes some 100 integer instructions, of which a multiprocessor does 64 a cycle: for K of 5% of H about as long as
// reading the row.
#ifndef LLMC_MASK_CUH
#define LLMC_MASK_CUH

#include <stddef.h> // size_t
#include <stdint.h> // fixed-width integers

#include "device.cuh"   // floatX, Stream, LAUNCH
#include "elements.cuh" // value_put, values_store, aligned_16
#include "mask_set.h"   // MaskKey, mask_check, mask_set, mask_index
#include "packed.cuh"   // to_float

#define MASK_TOKENS 4 // of a block

// The warp's token.
__device__ inline int mask_token(void) {
    return (int)blockIdx.x * MASK_TOKENS + (int)threadIdx.y;
}

// Writes 4*n*K bytes.
__global__ static void __launch_bounds__(32 * MASK_TOKENS)
    mask_indices_kernel(uint32_t *index, MaskKey key, int n, int H, int K) {
    int token = mask_token();
    if (token >= n) return;
    MaskSet set = mask_set(key, token, H);
    for (int i = (int)threadIdx.x; i < K; i += 32) index[(size_t)token * K + i] = (uint32_t)mask_index(&set, i);
}

// T: floatX, or a message's type. Moves 2*n*K bytes and up to 2*n*H in bf16: memory is read 32 bytes at a time, so from
// K = H/16 on nearly all of x is.
template <typename T>
__global__ static void __launch_bounds__(32 * MASK_TOKENS)
    mask_gather_kernel(T *values, const floatX *x, MaskKey key, int n, int H, int K) {
    int token = mask_token();
    if (token >= n) return;
    MaskSet set = mask_set(key, token, H);
    for (int i = (int)threadIdx.x; i < K; i += 32)
        value_put(values + (size_t)token * K + i, to_float(x[(size_t)token * H + mask_index(&set, i)]));
}

// A row is zeroed, then its values are put in: both meet in the cache, and memory sees the row once. packed: rows begin
// at multiples of 16 bytes. Moves 2*n*K + 2*n*H bytes in bf16.
template <typename T>
__global__ static void __launch_bounds__(32 * MASK_TOKENS)
    mask_scatter_kernel(floatX *x, const T *values, MaskKey key, int n, int H, int K, float scale, int packed) {
    int token = mask_token(), lane = (int)threadIdx.x;
    if (token >= n) return;
    floatX *to = x + (size_t)token * H;
    if (packed)
        for (int h = lane * FLOATX_WIDTH; h < H; h += 32 * FLOATX_WIDTH) values_store(to + h, Values<FLOATX_WIDTH>{});
    else
        for (int h = lane; h < H; h += 32) value_put(to + h, 0.0f);
    MaskSet set = mask_set(key, token, H);
    __syncwarp(); // the zeros of all lanes come first
    for (int i = lane; i < K; i += 32)
        value_put(to + mask_index(&set, i), scale * to_float(values[(size_t)token * K + i]));
}

// What mask_check refuses fails the stream.
static inline int mask_refuses(MaskKey key, int n, int H, Stream *stream) {
    if (mask_check(key, n, H)) stream->failed = 1;
    return stream->failed;
}

// Blocks for n tokens; one at least, since no grid may be empty.
static inline unsigned mask_grid(int n) {
    return (unsigned)(n / MASK_TOKENS + 1);
}

// index (n, K) =: perm(0..K-1) of tokens 0..n-1
static inline void mask_indices(uint32_t *index, MaskKey key, int n, int H, int K, Stream *stream) {
    if (mask_refuses(key, n, H, stream)) return;
    LAUNCH(mask_indices_kernel, mask_grid(n), dim3(32, MASK_TOKENS), 0, stream, index, key, n, H, K);
}

// values (n, K) =, x (n, H); T: floatX, float or bf16, to which values are rounded to nearest even.
template <typename T>
static inline void mask_gather(T *values, const floatX *x, MaskKey key, int n, int H, int K, Stream *stream) {
    if (mask_refuses(key, n, H, stream)) return;
    LAUNCH((mask_gather_kernel<T>), mask_grid(n), dim3(32, MASK_TOKENS), 0, stream, values, x, key, n, H, K);
}

// x (n, H) =, values (n, K) of floatX, float or bf16
template <typename T>
static inline void mask_scatter(floatX *x, const T *values, MaskKey key, int n, int H, int K, float scale,
                                Stream *stream) {
    if (mask_refuses(key, n, H, stream)) return;
    int packed = H % FLOATX_WIDTH == 0 && aligned_16(x);
    LAUNCH((mask_scatter_kernel<T>), mask_grid(n), dim3(32, MASK_TOKENS), 0, stream, x, values, key, n, H, K, scale,
           packed);
}

#endif
