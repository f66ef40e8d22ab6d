// Sums over the rows of a matrix whose values a functor computes: gradients of what is the same for every row. CUDA.
//
//   struct Values { const floatX *dout; int M; __device__ float at(int n, int c) const { return ...; } };
//   columns_add(to, values, N, C, stream);     // to[c] += sum_n values.at(n, c), in an order that N and C fix
#ifndef LLMC_COLUMNS_CUH
#define LLMC_COLUMNS_CUH

#include <stddef.h> // size_t

#include "device.cuh" // Stream, LAUNCH, scratch_get

#define COLUMNS_BLOCKS 256 // blocks over the rows, a fixed number: the same order on every card
#define COLUMNS_ROWS   32  // of a block at once

// share[blockIdx.y,c] = the sum of the rows blockIdx.y*32 + threadIdx.y, and every gridDim.y*32 further, added in order
// in a thread and then over the block's 32. grid (ceil(C/32), up to 256), block (32, 32): a warp reads 32 columns of a
// row. 4 KiB of shared memory. Reads what the values are made of once, writes 4*C*gridDim.y bytes.
template <class Op>
__global__ static void __launch_bounds__(1024) columns_share_kernel(float *share, Op op, int N, int C) {
    __shared__ float sums[COLUMNS_ROWS][32];
    int c = (int)blockIdx.x * 32 + (int)threadIdx.x, step = (int)gridDim.y * COLUMNS_ROWS;
    float sum = 0.0f;
    for (int n = (int)blockIdx.y * COLUMNS_ROWS + (int)threadIdx.y; n < N && c < C; n += step) sum += op.at(n, c);
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y > 0 || c >= C) return;
    float total = 0.0f;
    for (int i = 0; i < COLUMNS_ROWS; i++) total += sums[i][threadIdx.x];
    share[(size_t)blockIdx.y * C + c] = total;
}

// to[c] += share[0,c] + share[1,c] + ... in this order. grid ceil(C/256), block 256. Moves 4*C*blocks bytes.
__global__ static void __launch_bounds__(256) columns_add_kernel(float *to, const float *share, int blocks, int C) {
    int c = (int)blockIdx.x * 256 + (int)threadIdx.x;
    float total = 0.0f;
    if (c >= C) return;
    for (int b = 0; b < blocks; b++) total += share[(size_t)b * C + c];
    to[c] += total;
}

// to (C) += the sums over N rows. Needs min(ceil(N/32), 256)*C floats of scratch.
template <class Op> static inline void columns_add(float *to, const Op &op, int N, int C, Stream *stream) {
    int rows = (N + COLUMNS_ROWS - 1) / COLUMNS_ROWS, blocks = rows < COLUMNS_BLOCKS ? rows : COLUMNS_BLOCKS;
    float *share = (float *)scratch_get(&stream->scratch[SCRATCH_OP], sizeof(float) * (size_t)C * (size_t)blocks);
    if (share == NULL) {
        stream->failed = 1;
        return;
    }
    dim3 grid((unsigned)((C + 31) / 32), (unsigned)blocks);
    LAUNCH((columns_share_kernel<Op>), grid, dim3(32, COLUMNS_ROWS), 0, stream, share, op, N, C);
    LAUNCH(columns_add_kernel, (unsigned)((C + 255) / 256), 256, 0, stream, to, (const float *)share, blocks, C);
}

#endif
