// Ops of the transform codec, CUDA: the names and results of klt.h. Projections are matrix products; the entropy coder
// is integer arithmetic on the host in both builds (rans.h), over symbols of two bytes that the device has quantized.
//   embed      to[n] = embed[tokens[n]], rounded as states are                 overwritten
//   center     to[n] = x[n] - offset - predicted[kinds[n]]                     overwritten
//   place      x[n] = from[n] + offset + predicted[kinds[n]]                   overwritten
//   measure    out[n] = mean_k y[n,k]^2 weight[k]                              overwritten
//   quantize   symbols[n,k] = klt_symbol(y[n,k])                               overwritten
//   restore    y[n,k] = klt_value(symbols[n,k])                                overwritten
// offset and predicted, with kinds, may be NULL: nothing is added. Any n >= 1, H, K >= 1.
#ifndef LLMC_KLT_CUH
#define LLMC_KLT_CUH

#include <stddef.h> // size_t
#include <stdint.h> // fixed-width integers

#include "device.cuh"      // floatX, Stream, LAUNCH
#include "elements.cuh"    // value_put, to_float
#include "klt_coder.h"     // klt_coding_write
#include "klt_quantizer.h" // klt_symbol, klt_value
#include "linalg.cuh"      // eigh, linalg_columns
#include "matmul.cuh"      // matmul_product
#include "vector.cuh"      // vector_scale, vector_round_bf16, vector_dot
#include "warp.cuh"        // warp_sum

#define KLT_BLOCK 256

// One thread a value: 4 bytes in and out.
__global__ static void __launch_bounds__(KLT_BLOCK)
    klt_embed_kernel(float *to, const uint32_t *tokens, const float *embed, int64_t n, int H) {
    int64_t i = (int64_t)blockIdx.x * KLT_BLOCK + threadIdx.x;
    if (i >= n) return;
    floatX value;
    value_put(&value, embed[(int64_t)tokens[i / H] * H + i % H]);
    to[i] = to_float(value);
}

// One thread a value: 4 bytes out, floatX in; the offset stays in the cache, and most of the predictions do.
__global__ static void __launch_bounds__(KLT_BLOCK)
    klt_center_kernel(float *to, const floatX *x, const float *offset, const float *predicted, const int32_t *kinds,
                      int64_t n, int H) {
    int64_t i = (int64_t)blockIdx.x * KLT_BLOCK + threadIdx.x;
    if (i >= n) return;
    float known = predicted != NULL ? predicted[(int64_t)kinds[i / H] * H + i % H] : 0.0f;
    to[i] = to_float(x[i]) - (offset != NULL ? offset[i % H] : 0.0f) - known;
}

__global__ static void __launch_bounds__(KLT_BLOCK)
    klt_place_kernel(floatX *x, const float *from, const float *offset, const float *predicted, const int32_t *kinds,
                     int64_t n, int H) {
    int64_t i = (int64_t)blockIdx.x * KLT_BLOCK + threadIdx.x;
    if (i >= n) return;
    float known = predicted != NULL ? predicted[(int64_t)kinds[i / H] * H + i % H] : 0.0f;
    value_put(x + i, from[i] + (offset != NULL ? offset[i % H] : 0.0f) + known);
}

// grid ceil(n/4), block (32, 4): one warp a row. Moves 4*n*K bytes.
__global__ static void __launch_bounds__(128)
    klt_measure_kernel(float *out, const float *y, const float *weight, int n, int K) {
    int t = (int)blockIdx.x * 4 + (int)threadIdx.y;
    if (t >= n) return; // the whole warp
    const float *row = y + (size_t)t * (size_t)K;
    float sum = 0.0f;
    for (int k = (int)threadIdx.x; k < K; k += 32) sum += row[k] * row[k] * weight[k];
    sum = warp_sum(sum);
    if (threadIdx.x == 0) out[t] = sum / (float)K;
}

// A thread for four components of a token, which share a block of random numbers. Moves 6 bytes a value.
__global__ static void __launch_bounds__(KLT_BLOCK)
    klt_quantize_kernel(int16_t *symbols, const float *y, KltQuantizer q, int n) {
    int64_t i = (int64_t)blockIdx.x * KLT_BLOCK + threadIdx.x;
    int groups = (q.K + 3) / 4, group = (int)(i % groups);
    int64_t token = i / groups, row = token * q.K;
    if (token >= n) return;
    Philox draws = {{0, 0, 0, 0}};
    if (q.stochastic) draws = klt_draws(q.key, (int)token, group);
    for (int k = 4 * group; k < 4 * group + 4 && k < q.K; k++)
        symbols[row + k] = (int16_t)klt_symbol(&q, y[row + k], k, draws.v[k % 4]);
}

// The same the other way.
__global__ static void __launch_bounds__(KLT_BLOCK)
    klt_restore_kernel(float *y, const int16_t *symbols, const int16_t *scales, KltQuantizer q, int n) {
    int64_t i = (int64_t)blockIdx.x * KLT_BLOCK + threadIdx.x;
    int groups = (q.K + 3) / 4, group = (int)(i % groups);
    int64_t token = i / groups, row = token * q.K;
    if (token >= n) return;
    Philox draws = {{0, 0, 0, 0}};
    if (q.stochastic) draws = klt_draws(q.key, (int)token, group);
    for (int k = 4 * group; k < 4 * group + 4 && k < q.K; k++)
        y[row + k] = klt_value(&q, symbols[row + k], k, scales[token], draws.v[k % 4]);
}

static inline unsigned int klt_blocks(int64_t threads) {
    return (unsigned int)((threads + KLT_BLOCK - 1) / KLT_BLOCK);
}

// to (n, H), tokens (n), embed (V, H)
static inline void klt_embed(float *to, const uint32_t *tokens, const float *embed, int n, int H, Stream *stream) {
    int64_t values = (int64_t)n * H;
    LAUNCH(klt_embed_kernel, klt_blocks(values), KLT_BLOCK, 0, stream, to, tokens, embed, values, H);
}

// to (n, H), x (n, H), offset (H), predicted (u, H), kinds (n) < u
static inline void klt_center(float *to, const floatX *x, const float *offset, const float *predicted,
                              const int32_t *kinds, int n, int H, Stream *stream) {
    int64_t values = (int64_t)n * H;
    LAUNCH(klt_center_kernel, klt_blocks(values), KLT_BLOCK, 0, stream, to, x, offset, predicted, kinds, values, H);
}

// x (n, H), from (n, H), offset (H), predicted (u, H), kinds (n) < u
static inline void klt_place(floatX *x, const float *from, const float *offset, const float *predicted,
                             const int32_t *kinds, int n, int H, Stream *stream) {
    int64_t values = (int64_t)n * H;
    LAUNCH(klt_place_kernel, klt_blocks(values), KLT_BLOCK, 0, stream, x, from, offset, predicted, kinds, values, H);
}

// out (n), y (n, K), weight (K)
static inline void klt_measure(float *out, const float *y, const float *weight, int n, int K, Stream *stream) {
    LAUNCH(klt_measure_kernel, (unsigned int)((n + 3) / 4), dim3(32, 4), 0, stream, out, y, weight, n, K);
}

// symbols (n, K), y (n, K)
static inline void klt_quantize(int16_t *symbols, const float *y, KltQuantizer q, int n, Stream *stream) {
    int64_t threads = (int64_t)n * ((q.K + 3) / 4);
    LAUNCH(klt_quantize_kernel, klt_blocks(threads), KLT_BLOCK, 0, stream, symbols, y, q, n);
}

// y (n, K), symbols (n, K), scales (n)
static inline void klt_restore(float *y, const int16_t *symbols, const int16_t *scales, KltQuantizer q, int n,
                               Stream *stream) {
    int64_t threads = (int64_t)n * ((q.K + 3) / 4);
    LAUNCH(klt_restore_kernel, klt_blocks(threads), KLT_BLOCK, 0, stream, y, symbols, scales, q, n);
}

// 1 if products of n rows round what they read to bf16.
static inline int klt_rounds(int n, const Stream *stream) {
    (void)n, (void)stream;
    return MATMUL_BF16;
}

#include "klt_codec.h" // klt_encode, klt_decode
#include "klt_learn.h" // KltMoments, klt_learn

#endif
