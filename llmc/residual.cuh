// The residual stream where a matrix product does not add to it, CUDA.
//   to[i] += x[i]                                in place
#ifndef LLMC_RESIDUAL_CUH
#define LLMC_RESIDUAL_CUH

#include <stdint.h> // int64_t

#include "device.cuh"   // floatX, Stream, LAUNCH
#include "elements.cuh" // values_load, values_store, elements_do

struct ResidualOp {
    floatX *to;
    const floatX *x;
    template <int WIDTH> __device__ void at(int64_t i) const {
        Values<WIDTH> sum = values_load<WIDTH>(to + i), add = values_load<WIDTH>(x + i);
        for (int j = 0; j < WIDTH; j++) sum.v[j] += add.v[j];
        values_store(to + i, sum);
    }
};

// A thread a pack of 16 bytes. Moves 6*n bytes in bf16: 21 us at 4.8 TB/s for 8192 rows of 2048.
__global__ static void __launch_bounds__(ELEMENTS_BLOCK) residual_add_kernel(ResidualOp op, Elements range) {
    elements_do<FLOATX_WIDTH>(op, range);
}

// to, x (n)
static inline void residual_add(floatX *to, const floatX *x, int64_t n, Stream *stream) {
    ResidualOp op = {to, x};
    Elements range = elements_of(n, FLOATX_WIDTH, aligned_16(to, x));
    LAUNCH(residual_add_kernel, range.blocks, ELEMENTS_BLOCK, 0, stream, op, range);
}

#endif
