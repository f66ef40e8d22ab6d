// LayerNorm without parameters, CUDA (Ba et al. 2016; OLMo, Groeneveld et al. 2024). Statistics in fp32.
//   out[n,:] = (x[n,:] - mean[n]) * rstd[n],  rstd = 1 / sqrt(variance + eps)            out, rstd overwritten
//   dx[n,:] += rstd[n] * (dout - mean_c(dout) - out * mean_c(dout * out))                added to
// The backward takes what the forward gave, so neither the input nor its mean is kept.
// Any N >= 1 and C >= 1; rows are read 16 bytes at a time where C and the addresses allow, else value by value. What a
// row is read for again lies in the cache.
#ifndef LLMC_LAYERNORM_CUH
#define LLMC_LAYERNORM_CUH

#include <stddef.h> // size_t

#include "device.cuh"   // floatX, Stream, LAUNCH
#include "elements.cuh" // values_load, values_store, aligned_16
#include "warp.cuh"     // block_sum

#define LAYERNORM_BLOCK 256

// grid N, block 256: a block a row. Moves 4*N*C + 4*N bytes in bf16: 14 us at 4.8 TB/s for N 8192, C 2048.
template <int WIDTH>
__global__ static void __launch_bounds__(LAYERNORM_BLOCK)
    layernorm_forward_kernel(floatX *out, float *rstd, const floatX *x, int C, float eps) {
    __shared__ float warps[32];
    const floatX *row = x + (size_t)blockIdx.x * C;
    floatX *to = out + (size_t)blockIdx.x * C;
    int first = (int)threadIdx.x * WIDTH, step = LAYERNORM_BLOCK * WIDTH;
    float sum = 0.0f, squares = 0.0f;
    for (int c = first; c < C; c += step) {
        Values<WIDTH> values = values_load<WIDTH>(row + c);
        for (int j = 0; j < WIDTH; j++) sum += values.v[j];
    }
    float mean = block_sum(sum, warps) / (float)C;
    for (int c = first; c < C; c += step) {
        Values<WIDTH> values = values_load<WIDTH>(row + c);
        for (int j = 0; j < WIDTH; j++) squares += (values.v[j] - mean) * (values.v[j] - mean);
    }
    float scale = 1.0f / sqrtf(block_sum(squares, warps) / (float)C + eps);
    for (int c = first; c < C; c += step) {
        Values<WIDTH> values = values_load<WIDTH>(row + c);
        for (int j = 0; j < WIDTH; j++) values.v[j] = (values.v[j] - mean) * scale;
        values_store(to + c, values);
    }
    if (threadIdx.x == 0) rstd[blockIdx.x] = scale;
}

// grid N, block 256: a block a row. Moves 8*N*C bytes in bf16: 28 us at 4.8 TB/s for N 8192, C 2048.
template <int WIDTH>
__global__ static void __launch_bounds__(LAYERNORM_BLOCK)
    layernorm_backward_kernel(floatX *dx, const floatX *dout, const floatX *out, const float *rstd, int C) {
    __shared__ float warps[32];
    const floatX *row = out + (size_t)blockIdx.x * C, *grad = dout + (size_t)blockIdx.x * C;
    floatX *to = dx + (size_t)blockIdx.x * C;
    int first = (int)threadIdx.x * WIDTH, step = LAYERNORM_BLOCK * WIDTH;
    float sum = 0.0f, dot = 0.0f, scale = rstd[blockIdx.x];
    for (int c = first; c < C; c += step) {
        Values<WIDTH> g = values_load<WIDTH>(grad + c), y = values_load<WIDTH>(row + c);
        for (int j = 0; j < WIDTH; j++) sum += g.v[j], dot += g.v[j] * y.v[j];
    }
    float mean = block_sum(sum, warps) / (float)C, along = block_sum(dot, warps) / (float)C;
    for (int c = first; c < C; c += step) {
        Values<WIDTH> g = values_load<WIDTH>(grad + c), y = values_load<WIDTH>(row + c);
        Values<WIDTH> d = values_load<WIDTH>(to + c);
        for (int j = 0; j < WIDTH; j++) d.v[j] += scale * (g.v[j] - mean - y.v[j] * along);
        values_store(to + c, d);
    }
}

// out, x (N, C), rstd (N)
static inline void layernorm_forward(floatX *out, float *rstd, const floatX *x, int N, int C, float eps,
                                     Stream *stream) {
    if (C % FLOATX_WIDTH == 0 && aligned_16(out, x))
        LAUNCH((layernorm_forward_kernel<FLOATX_WIDTH>), (unsigned)N, LAYERNORM_BLOCK, 0, stream, out, rstd, x, C, eps);
    else
        LAUNCH((layernorm_forward_kernel<1>), (unsigned)N, LAYERNORM_BLOCK, 0, stream, out, rstd, x, C, eps);
}

// dx (N, C) +=, dout, out (N, C), rstd (N)
static inline void layernorm_backward(floatX *dx, const floatX *dout, const floatX *out, const float *rstd, int N,
                                      int C, Stream *stream) {
    if (C % FLOATX_WIDTH == 0 && aligned_16(dx, dout, out))
        LAUNCH((layernorm_backward_kernel<FLOATX_WIDTH>), (unsigned)N, LAYERNORM_BLOCK, 0, stream, dx, dout, out, rstd,
               C);
    else
        LAUNCH((layernorm_backward_kernel<1>), (unsigned)N, LAYERNORM_BLOCK, 0, stream, dx, dout, out, rstd, C);
}

#endif
