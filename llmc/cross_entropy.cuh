// Softmax cross-entropy of a chunk of rows, CUDA.
//   loss[n] = lse[n] - logits[n, target[n]],  lse[n] = log sum_v exp(logits[n,v]);  0 where target[n] < 0
//   dlogits[n,v] = scale * (exp(logits[n,v] - lse[n]) - [v == target[n]]);          0 where target[n] < 0
// The gradient overwrites the logits: a chunk's logits are needed once.
#ifndef LLMC_CROSS_ENTROPY_CUH
#define LLMC_CROSS_ENTROPY_CUH

#include <float.h>  // FLT_MAX
#include <stddef.h> // size_t
#include <stdint.h> // fixed-width integers

#include "device.cuh"   // floatX, Stream, LAUNCH
#include "elements.cuh" // values_load, values_store, exp_fast
#include "packed.cuh"   // to_float
#include "warp.cuh"     // warp_sum, warp_max

#define CROSS_ENTROPY_BLOCK 1024

// sum of exp(x - max) over the values seen so far. The first max is finite, so that -inf adds 0.
struct SoftmaxSum {
    float max, sum;
};

template <int WIDTH> __device__ inline void softmax_add(SoftmaxSum *so_far, const Values<WIDTH> &x) {
    float max = so_far->max;
#pragma unroll
    for (int j = 0; j < WIDTH; j++) max = fmaxf(max, x.v[j]);
    if (max > so_far->max) {
        so_far->sum *= exp_fast(so_far->max - max);
        so_far->max = max;
    }
#pragma unroll
    for (int j = 0; j < WIDTH; j++) so_far->sum += exp_fast(x.v[j] - max);
}

// The sum over all threads of the block, the same for each of them. Has one barrier.
__device__ inline SoftmaxSum softmax_total(SoftmaxSum own, float *maxima, float *sums) {
    int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32, n_warps = CROSS_ENTROPY_BLOCK / 32;
    float max = warp_max(own.max), sum = warp_sum(own.sum * exp_fast(own.max - max));
    if (lane == 0) maxima[warp] = max, sums[warp] = sum;
    __syncthreads();
    max = lane < n_warps ? maxima[lane] : -FLT_MAX;
    sum = lane < n_warps ? sums[lane] : 0.0f;
    SoftmaxSum total = {warp_max(max), 0.0f};
    total.sum = warp_sum(sum * exp_fast(max - total.max));
    return total;
}

// A row of V values: n_packs packs of 16 bytes from value `head` on, the first whose address is a multiple of 16.
struct LogitsRow {
    floatX *at;
    int V, head, n_packs;
};

__device__ inline LogitsRow logits_row(floatX *logits, int V) {
    LogitsRow row = {logits + (size_t)blockIdx.x * V, V, 0, 0};
    row.head = (int)((16 - ((uintptr_t)row.at & 15)) % 16 / sizeof(floatX));
    if (row.head > V) row.head = V;
    row.n_packs = (V - row.head) / FLOATX_WIDTH;
    return row;
}

// The values outside the packs, a thread each: before them and, numbered on, behind them. -1 from `i` beyond the last.
__device__ inline int logits_single(const LogitsRow &row, int i) {
    int v = i < row.head ? i : i + row.n_packs * FLOATX_WIDTH;
    return v < row.V ? v : -1;
}

// x = scale * (softmax - [v == target]) for values v, v+1, ...
template <int WIDTH>
__device__ inline void logits_gradient(floatX *at, int v, int target, SoftmaxSum total, float scale) {
    Values<WIDTH> x = values_load<WIDTH>(at + v);
    float share = scale / total.sum;
#pragma unroll
    for (int j = 0; j < WIDTH; j++) x.v[j] = exp_fast(x.v[j] - total.max) * share - (v + j == target ? scale : 0.0f);
    values_store(at + v, x);
}

// grid N, block 1024: a block a row, any V and any address. 256 bytes of shared memory.
// Moves 2*V bytes a row in bf16 for the loss, 6*V with the gradient; the second reading runs from the row's end to its
// start, so that what the first has read last is met in the cache: 4*V from memory at best, 220 us at 4.8 TB/s for N
// 2048, V 128256.
__global__ static void __launch_bounds__(CROSS_ENTROPY_BLOCK)
    cross_entropy_kernel(float *loss, floatX *logits, const int32_t *targets, int V, float scale, int backward) {
    __shared__ float maxima[32], sums[32];
    LogitsRow row = logits_row(logits, V);
    int target = targets[blockIdx.x], thread = (int)threadIdx.x, single = logits_single(row, thread);
    floatX *packs = row.at + row.head;
    if (target < 0) {
        if (thread == 0) loss[blockIdx.x] = 0.0f;
        if (!backward) return;
        if (single >= 0) values_store(row.at + single, Values<1>{});
        for (int i = thread; i < row.n_packs; i += CROSS_ENTROPY_BLOCK)
            values_store(packs + (size_t)i * FLOATX_WIDTH, Values<FLOATX_WIDTH>{});
        return;
    }
    float at_target = to_float(row.at[target]); // before the barrier, after which rows are overwritten
    SoftmaxSum own = {-FLT_MAX, 0.0f};
    if (single >= 0) softmax_add(&own, values_load<1>(row.at + single));
    for (int i = thread; i < row.n_packs; i += CROSS_ENTROPY_BLOCK)
        softmax_add(&own, values_load<FLOATX_WIDTH>(packs + (size_t)i * FLOATX_WIDTH));
    SoftmaxSum total = softmax_total(own, maxima, sums);
    if (thread == 0) loss[blockIdx.x] = logf(total.sum) + total.max - at_target;
    if (!backward) return;
    int turns = (row.n_packs + CROSS_ENTROPY_BLOCK - 1) / CROSS_ENTROPY_BLOCK;
    for (int i = (turns - 1) * CROSS_ENTROPY_BLOCK + thread; i >= 0; i -= CROSS_ENTROPY_BLOCK)
        if (i < row.n_packs) logits_gradient<FLOATX_WIDTH>(row.at, row.head + i * FLOATX_WIDTH, target, total, scale);
    if (single >= 0) logits_gradient<1>(row.at, single, target, total, scale);
}

// loss (N), logits (N, V), targets (N), -1 = not counted. backward != 0 also turns logits into dlogits.
static inline void cross_entropy(float *loss, floatX *logits, const int32_t *targets, int N, int V, float scale,
                                 int backward, Stream *stream) {
    LAUNCH(cross_entropy_kernel, (unsigned)N, CROSS_ENTROPY_BLOCK, 0, stream, loss, logits, targets, V, scale,
           backward);
}

#endif
