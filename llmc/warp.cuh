// Sums and maxima over a warp and over a block. The order of the additions is fixed: the same bits every time.
#ifndef LLMC_WARP_CUH
#define LLMC_WARP_CUH

#include <cuda_runtime.h> // shuffles

#define WARP_SIZE 32
#define WARP_ALL  0xFFFFFFFFu

// The sum over the warp's 32 lanes, in every lane.
__device__ static inline float warp_sum(float value) {
    for (int bits = WARP_SIZE / 2; bits > 0; bits /= 2) value += __shfl_xor_sync(WARP_ALL, value, bits);
    return value;
}

__device__ static inline double warp_sum(double value) {
    for (int bits = WARP_SIZE / 2; bits > 0; bits /= 2) value += __shfl_xor_sync(WARP_ALL, value, bits);
    return value;
}

__device__ static inline float warp_max(float value) {
    for (int bits = WARP_SIZE / 2; bits > 0; bits /= 2) value = fmaxf(value, __shfl_xor_sync(WARP_ALL, value, bits));
    return value;
}

// The thread's number in its block, x fastest.
__device__ static inline int block_thread(void) {
    return (int)((threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x);
}

// The block's number of threads, a multiple of 32 wherever a warp's lanes work together.
__device__ static inline int block_threads(void) {
    return (int)(blockDim.x * blockDim.y * blockDim.z);
}

// The sum over the block, in every thread. shared: 32 values, free before and after; whole warps only. Two barriers.
template <typename T> __device__ static inline T block_sum(T value, T *shared) {
    int lane = block_thread() % WARP_SIZE, warp = block_thread() / WARP_SIZE;
    value = warp_sum(value);
    if (lane == 0) shared[warp] = value;
    __syncthreads();
    value = warp_sum(lane < block_threads() / WARP_SIZE ? shared[lane] : (T)0);
    __syncthreads(); // all have read: the caller may write there
    return value;
}

// The same for the maximum.
__device__ static inline float block_max(float value, float *shared) {
    int lane = block_thread() % WARP_SIZE, warp = block_thread() / WARP_SIZE;
    value = warp_max(value);
    if (lane == 0) shared[warp] = value;
    __syncthreads();
    value = warp_max(shared[lane < block_threads() / WARP_SIZE ? lane : 0]);
    __syncthreads();
    return value;
}

#endif
