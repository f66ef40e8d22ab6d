// RMSNorm, CUDA (Zhang and Sennrich 2019). Statistics in fp32.
//   rstd[n]  = 1 / sqrt(mean_c x[n,c]^2 + eps)
//   out[n,:] = x[n,:] * rstd[n] * weight[:]                                        out, rstd overwritten
//   dx[n,:] += rstd[n] * (g - xhat * mean_c(g * xhat)),  g = dout * weight, xhat = x * rstd      added to
//   dweight[:] += sum_n dout[n,:] * x[n,:] * rstd[n]                               added to, in an order that N and C
//   fix
// Any N >= 1 and C >= 1; rows are read 16 bytes at a time where C and the addresses allow, else value by value.
#ifndef LLMC_RMSNORM_CUH
#define LLMC_RMSNORM_CUH

#include <stddef.h> // size_t

#include "device.cuh"   // floatX, Stream, LAUNCH, DYNAMIC_SHARED, scratch_get
#include "elements.cuh" // values_load, values_store, aligned_16
#include "warp.cuh"     // warp_sum, block_sum

#define RMSNORM_ROWS 4 // of a block in the forward
#define RMSNORM_KEPT 8 // packs of a row that a thread keeps: rows up to 2048 values of bf16 are read once

// grid ceil(N/4), block (32, 4): one warp a row. No shared memory.
// Moves 4*N*C + 4*N + 4*C bytes in bf16: 14 us at 4.8 TB/s for N 8192, C 2048; longer rows are read again from the
// cache.
template <int WIDTH>
__global__ static void __launch_bounds__(32 * RMSNORM_ROWS)
    rmsnorm_forward_kernel(floatX *out, float *rstd, const floatX *x, const float *weight, int N, int C, float eps) {
    int n = (int)blockIdx.x * RMSNORM_ROWS + (int)threadIdx.y, first = (int)threadIdx.x * WIDTH;
    if (n >= N) return; // the whole warp
    const floatX *row = x + (size_t)n * C;
    floatX *to = out + (size_t)n * C;
    Values<WIDTH> kept[RMSNORM_KEPT] = {};
    float sum = 0.0f;
#pragma unroll
    for (int k = 0; k < RMSNORM_KEPT; k++) {
        int c = first + k * 32 * WIDTH;
        if (c < C) kept[k] = values_load<WIDTH>(row + c);
    }
#pragma unroll
    for (int k = 0; k < RMSNORM_KEPT; k++)
        for (int j = 0; j < WIDTH; j++) sum += kept[k].v[j] * kept[k].v[j];
    int beyond = first + RMSNORM_KEPT * 32 * WIDTH;
    for (int c = beyond; c < C; c += 32 * WIDTH) {
        Values<WIDTH> values = values_load<WIDTH>(row + c);
        for (int j = 0; j < WIDTH; j++) sum += values.v[j] * values.v[j];
    }
    float scale = 1.0f / sqrtf(warp_sum(sum) / (float)C + eps);
    if (threadIdx.x == 0) rstd[n] = scale;
#pragma unroll
    for (int k = 0; k < RMSNORM_KEPT; k++) {
        int c = first + k * 32 * WIDTH;
        if (c >= C) break;
        Values<WIDTH> w = values_load<WIDTH>(weight + c);
        for (int j = 0; j < WIDTH; j++) kept[k].v[j] *= scale * w.v[j];
        values_store(to + c, kept[k]);
    }
    for (int c = beyond; c < C; c += 32 * WIDTH) {
        Values<WIDTH> values = values_load<WIDTH>(row + c), w = values_load<WIDTH>(weight + c);
        for (int j = 0; j < WIDTH; j++) values.v[j] *= scale * w.v[j];
        values_store(to + c, values);
    }
}

// Blocks of the backward: their partial sums of dweight cost 8*C bytes each, and about four of them fill a
// multiprocessor. A fixed number, so that the order of the sum is the same on every card.
#define RMSNORM_BLOCKS     512
#define RMSNORM_MAX_BLOCK  512
#define RMSNORM_SHARED_MAX 8192 // columns whose sums fit into shared memory; more are kept in `partial` itself

// Rows blockIdx.x, blockIdx.x + gridDim.x, ...: dx += and partial[blockIdx.x,:] = this block's share of dweight.
// grid min(N, 512), block: a thread for a pack of columns, up to 512. Shared memory: C floats up to C = 8192.
// Moves 8*N*C bytes in bf16, 8*C more for each block: 28 us at 4.8 TB/s for N 8192, C 2048.
template <int WIDTH>
__global__ static void __launch_bounds__(RMSNORM_MAX_BLOCK)
    rmsnorm_backward_kernel(floatX *dx, float *partial, const floatX *dout, const floatX *x, const float *weight,
                            const float *rstd, int N, int C) {
    DYNAMIC_SHARED(float, columns);
    __shared__ float warps[32];
    float *share = partial + (size_t)blockIdx.x * C, *sums = C <= RMSNORM_SHARED_MAX ? columns : share;
    int first = (int)threadIdx.x * WIDTH, step = (int)blockDim.x * WIDTH;
    for (int c = first; c < C; c += step) values_store(sums + c, Values<WIDTH>{});
    for (int n = (int)blockIdx.x; n < N; n += (int)gridDim.x) {
        const floatX *row = x + (size_t)n * C, *grad = dout + (size_t)n * C;
        floatX *to = dx + (size_t)n * C;
        float scale = rstd[n], dot = 0.0f;
        // The thread's first pack is loaded once, dx too, before the barriers; for C up to 4096 it is the only one.
        Values<WIDTH> x0 = {}, g0 = {}, d0 = {};
        for (int c = first; c < C; c += step) {
            Values<WIDTH> xs = values_load<WIDTH>(row + c), gs = values_load<WIDTH>(grad + c);
            Values<WIDTH> w = values_load<WIDTH>(weight + c);
            if (c == first) x0 = xs, g0 = gs, d0 = values_load<WIDTH>(to + c);
            for (int j = 0; j < WIDTH; j++) dot += gs.v[j] * w.v[j] * xs.v[j];
        }
        float mean = block_sum(dot, warps) * scale * scale / (float)C;
        for (int c = first; c < C; c += step) {
            Values<WIDTH> xs = c == first ? x0 : values_load<WIDTH>(row + c);
            Values<WIDTH> gs = c == first ? g0 : values_load<WIDTH>(grad + c);
            Values<WIDTH> w = values_load<WIDTH>(weight + c), sum = values_load<WIDTH>(sums + c);
            Values<WIDTH> d = c == first ? d0 : values_load<WIDTH>(to + c);
            for (int j = 0; j < WIDTH; j++) {
                d.v[j] += scale * (gs.v[j] * w.v[j] - xs.v[j] * mean);
                sum.v[j] += gs.v[j] * xs.v[j] * scale;
            }
            values_store(to + c, d);
            values_store(sums + c, sum);
        }
    }
    if (sums == share) return;
    for (int c = first; c < C; c += step) values_store(share + c, values_load<WIDTH>(sums + c));
}

// dweight[c] += partial[0,c] + ... + partial[blocks-1,c]: 32 interleaved sums, then those in order.
// grid ceil(C/32), block (32, 32). Moves 4*blocks*C bytes, which the cache still holds.
__global__ static void __launch_bounds__(1024)
    rmsnorm_dweight_kernel(float *dweight, const float *partial, int blocks, int C) {
    __shared__ float sums[32][32];
    int c = (int)blockIdx.x * 32 + (int)threadIdx.x;
    float sum = 0.0f;
    for (int b = (int)threadIdx.y; b < blocks && c < C; b += 32) sum += partial[(size_t)b * C + c];
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y > 0 || c >= C) return;
    float total = 0.0f;
    for (int i = 0; i < 32; i++) total += sums[i][threadIdx.x];
    dweight[c] += total;
}

// out, x (N, C), rstd (N), weight (C)
static inline void rmsnorm_forward(floatX *out, float *rstd, const floatX *x, const float *weight, int N, int C,
                                   float eps, Stream *stream) {
    dim3 block(32, RMSNORM_ROWS);
    unsigned grid = (unsigned)((N + RMSNORM_ROWS - 1) / RMSNORM_ROWS);
    if (C % FLOATX_WIDTH == 0 && aligned_16(out, x, weight))
        LAUNCH((rmsnorm_forward_kernel<FLOATX_WIDTH>), grid, block, 0, stream, out, rstd, x, weight, N, C, eps);
    else
        LAUNCH((rmsnorm_forward_kernel<1>), grid, block, 0, stream, out, rstd, x, weight, N, C, eps);
}

// dx (N, C) +=, dweight (C) += unless it is NULL, dout, x (N, C), weight (C), rstd (N). Needs min(N, 512)*C floats of
// scratch.
static inline void rmsnorm_backward(floatX *dx, float *dweight, const floatX *dout, const floatX *x,
                                    const float *weight, const float *rstd, int N, int C, Stream *stream) {
    int packed = C % FLOATX_WIDTH == 0 && aligned_16(dx, dout, x, weight), packs = packed ? C / FLOATX_WIDTH : C;
    int grid = N < RMSNORM_BLOCKS ? N : RMSNORM_BLOCKS;
    int block = packs < RMSNORM_MAX_BLOCK ? (packs + 31) / 32 * 32 : RMSNORM_MAX_BLOCK;
    size_t row_bytes = sizeof(float) * (size_t)C, shared_bytes = C <= RMSNORM_SHARED_MAX ? row_bytes : 0;
    float *partial = (float *)scratch_get(&stream->scratch[SCRATCH_OP], row_bytes * (size_t)grid);
    if (partial == NULL) {
        stream->failed = 1;
        return;
    }
    if (packed)
        LAUNCH((rmsnorm_backward_kernel<FLOATX_WIDTH>), grid, block, shared_bytes, stream, dx, partial, dout, x, weight,
               rstd, N, C);
    else
        LAUNCH((rmsnorm_backward_kernel<1>), grid, block, shared_bytes, stream, dx, partial, dout, x, weight, rstd, N,
               C);
    if (dweight == NULL) return;
    LAUNCH(rmsnorm_dweight_kernel, (unsigned)((C + 31) / 32), dim3(32, 32), 0, stream, dweight, (const float *)partial,
           grid, C);
}

#endif
