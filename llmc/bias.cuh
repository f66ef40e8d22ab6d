// Biases, CUDA: one vector that is added to every row.
//   x[n,:] += bias[:]                            in place
//   dbias[:] += sum_n dout[n,:]                  added to, in an order that N and M fix
#ifndef LLMC_BIAS_CUH
#define LLMC_BIAS_CUH

#include <stddef.h> // size_t

#include "columns.cuh"  // columns_add
#include "device.cuh"   // floatX, Stream, LAUNCH
#include "elements.cuh" // values_load, values_store, aligned_16

#define BIAS_BLOCK 256

// grid N, block 256: a block a row. WIDTH > 1 needs M and the addresses to allow 16-byte accesses. No shared memory.
// Moves 4*N*M bytes in bf16: 21 us at 4.8 TB/s for N 8192, M 3072.
template <int WIDTH>
__global__ static void __launch_bounds__(BIAS_BLOCK) bias_forward_kernel(floatX *x, const float *bias, int M) {
    floatX *row = x + (size_t)blockIdx.x * M;
    for (int m = (int)threadIdx.x * WIDTH; m < M; m += BIAS_BLOCK * WIDTH) {
        Values<WIDTH> values = values_load<WIDTH>(row + m), b = values_load<WIDTH>(bias + m);
        for (int j = 0; j < WIDTH; j++) values.v[j] += b.v[j];
        values_store(row + m, values);
    }
}

struct BiasColumns {
    const floatX *dout;
    int M;
    __device__ float at(int n, int m) const {
        return to_float(dout[(size_t)n * M + m]);
    }
};

// x (N, M), bias (M)
static inline void bias_forward(floatX *x, const float *bias, int N, int M, Stream *stream) {
    if (M % FLOATX_WIDTH == 0 && aligned_16(x, bias))
        LAUNCH((bias_forward_kernel<FLOATX_WIDTH>), (unsigned)N, BIAS_BLOCK, 0, stream, x, bias, M);
    else
        LAUNCH((bias_forward_kernel<1>), (unsigned)N, BIAS_BLOCK, 0, stream, x, bias, M);
}

// dbias (M) +=, dout (N, M). Needs up to 256*M floats of scratch.
static inline void bias_backward(float *dbias, const floatX *dout, int N, int M, Stream *stream) {
    BiasColumns columns = {dout, M};
    columns_add(dbias, columns, N, M, stream);
}

#endif
