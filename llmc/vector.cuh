// Vectors of fp32 values: gradients, parameters and what replicas average. CUDA.
//   scale      x *= factor                                   in place
//   subtract   x -= y                                        in place
//   mean       to = (values[0] + values[1] + ...) / count    overwritten, added in the order of the pointers
//   round      x = bf16(x), nearest even                     in place, stays fp32
//   sum        total += x[0] + x[1] + ...                    in double, the same order every time
//   momentum   m = beta*m + (1-beta)*x                       in place
//   blend      to = keep*to + add*(scale*x)                  in place
//   drift      delta = decay*delta + (1-decay)*(now-before)  in place
//   dot        sum a*b, sum_of_squares  sum x*x              in double, the same bits every time
// All but dot: a thread for 4 values (elements.cuh), blocks of 256, any n and any addresses. No shared memory.
#ifndef LLMC_VECTOR_CUH
#define LLMC_VECTOR_CUH

#include <math.h>   // NAN
#include <stdint.h> // fixed-width integers

#include "device.cuh"   // Stream, LAUNCH, scratch_get, device_copy
#include "dtype.h"      // bf16_of_float, float_of_bf16
#include "elements.cuh" // elements_do, values_load, values_store
#include "error.h"      // error_set

struct VectorScaleOp {
    float *x, factor;
    template <int WIDTH> __device__ void at(int64_t i) const {
        Values<WIDTH> x4 = values_load<WIDTH>(x + i);
#pragma unroll
        for (int j = 0; j < WIDTH; j++) x4.v[j] *= factor;
        values_store(x + i, x4);
    }
};

// Moves 8n bytes.
__global__ static void __launch_bounds__(ELEMENTS_BLOCK) vector_scale_kernel(VectorScaleOp op, Elements range) {
    elements_do<4>(op, range);
}

struct VectorSubtractOp {
    float *x;
    const float *y;
    template <int WIDTH> __device__ void at(int64_t i) const {
        Values<WIDTH> x4 = values_load<WIDTH>(x + i), y4 = values_load<WIDTH>(y + i);
#pragma unroll
        for (int j = 0; j < WIDTH; j++) x4.v[j] -= y4.v[j];
        values_store(x + i, x4);
    }
};

// Moves 12n bytes.
__global__ void __launch_bounds__(ELEMENTS_BLOCK) vector_subtract_kernel(VectorSubtractOp op, Elements range) {
    elements_do<4>(op, range);
}

#define VECTOR_MEAN_MAX 256 // the pointers are a kernel's argument: 2 of the 4 KiB it may have

struct VectorMeanOp {
    float *to;
    int n_values;
    const float *values[VECTOR_MEAN_MAX];
    template <int WIDTH> __device__ void at(int64_t i) const {
        Values<WIDTH> sum = {};
        for (int r = 0; r < n_values; r++) {
            Values<WIDTH> add = values_load<WIDTH>(values[r] + i);
#pragma unroll
            for (int j = 0; j < WIDTH; j++) sum.v[j] += add.v[j];
        }
#pragma unroll
        for (int j = 0; j < WIDTH; j++) sum.v[j] /= (float)n_values;
        values_store(to + i, sum);
    }
};

// Moves 4n (n_values + 1) bytes. A value is written after all that go into it are read: to may be one of the vectors.
__global__ static void __launch_bounds__(ELEMENTS_BLOCK) vector_mean_kernel(VectorMeanOp op, Elements range) {
    elements_do<4>(op, range);
}

struct VectorRoundOp {
    float *x;
    template <int WIDTH> __device__ void at(int64_t i) const {
        Values<WIDTH> x4 = values_load<WIDTH>(x + i);
#pragma unroll
        for (int j = 0; j < WIDTH; j++) x4.v[j] = float_of_bf16(bf16_of_float(x4.v[j]));
        values_store(x + i, x4);
    }
};

// Moves 8n bytes.
__global__ static void __launch_bounds__(ELEMENTS_BLOCK) vector_round_kernel(VectorRoundOp op, Elements range) {
    elements_do<4>(op, range);
}

struct VectorMomentumOp {
    float *m;
    const float *x;
    float beta;
    template <int WIDTH> __device__ void at(int64_t i) const {
        Values<WIDTH> m4 = values_load<WIDTH>(m + i), x4 = values_load<WIDTH>(x + i);
#pragma unroll
        for (int j = 0; j < WIDTH; j++) m4.v[j] = beta * m4.v[j] + (1.0f - beta) * x4.v[j];
        values_store(m + i, m4);
    }
};

// Moves 12n bytes.
__global__ static void __launch_bounds__(ELEMENTS_BLOCK) vector_momentum_kernel(VectorMomentumOp op, Elements range) {
    elements_do<4>(op, range);
}

struct VectorBlendOp {
    float *to;
    const float *x;
    float keep, add, scale;
    template <int WIDTH> __device__ void at(int64_t i) const {
        Values<WIDTH> to4 = values_load<WIDTH>(to + i), x4 = values_load<WIDTH>(x + i);
#pragma unroll
        for (int j = 0; j < WIDTH; j++) {
            float scaled = x4.v[j] * scale;
            to4.v[j] = keep * to4.v[j] + add * scaled;
        }
        values_store(to + i, to4);
    }
};

// Moves 12n bytes.
__global__ static void __launch_bounds__(ELEMENTS_BLOCK) vector_blend_kernel(VectorBlendOp op, Elements range) {
    elements_do<4>(op, range);
}

struct VectorDriftOp {
    float *delta;
    const float *now, *before;
    float decay;
    template <int WIDTH> __device__ void at(int64_t i) const {
        Values<WIDTH> d4 = values_load<WIDTH>(delta + i);
        Values<WIDTH> n4 = values_load<WIDTH>(now + i), b4 = values_load<WIDTH>(before + i);
#pragma unroll
        for (int j = 0; j < WIDTH; j++) d4.v[j] = decay * d4.v[j] + (1.0f - decay) * (n4.v[j] - b4.v[j]);
        values_store(delta + i, d4);
    }
};

// Moves 16n bytes.
__global__ static void __launch_bounds__(ELEMENTS_BLOCK) vector_drift_kernel(VectorDriftOp op, Elements range) {
    elements_do<4>(op, range);
}

#define DOT_BLOCK  256
#define DOT_BLOCKS 1024 // at most; fixed, so that the order of the sum follows from n alone

// sums[0] = the sum of the block's DOT_BLOCK values, by halving. All threads call it.
__device__ inline void dot_reduce(double *sums, double sum) {
    sums[threadIdx.x] = sum;
    for (int half = DOT_BLOCK / 2; half > 0; half /= 2) {
        __syncthreads();
        if ((int)threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
    }
}

// partial[block] = sum of a[i]*b[i] over the block's quads of values. A quad goes to the same thread whether it is
// loaded at once or value by value. Moves 8n bytes, 4n for a == b; 2 KiB of shared memory.
__global__ static void __launch_bounds__(DOT_BLOCK)
    vector_dot_kernel(double *partial, const float *a, const float *b, int64_t n, int aligned) {
    __shared__ double sums[DOT_BLOCK];
    double sum = 0.0;
    int64_t step = (int64_t)gridDim.x * DOT_BLOCK * 4;
    for (int64_t i = ((int64_t)blockIdx.x * DOT_BLOCK + threadIdx.x) * 4; i < n; i += step) {
        if (aligned && i + 4 <= n) {
            Values<4> a4 = values_load<4>(a + i), b4 = a == b ? a4 : values_load<4>(b + i);
#pragma unroll
            for (int j = 0; j < 4; j++) sum += (double)a4.v[j] * (double)b4.v[j];
        } else {
            for (int64_t j = i; j < n && j < i + 4; j++) sum += (double)a[j] * (double)b[j];
        }
    }
    dot_reduce(sums, sum);
    if (threadIdx.x == 0) partial[blockIdx.x] = sums[0];
}

// total[0] = partial[0] + ... + partial[count-1] in a fixed order. One block.
__global__ static void __launch_bounds__(DOT_BLOCK)
    vector_total_kernel(double *total, const double *partial, int count) {
    __shared__ double sums[DOT_BLOCK];
    double sum = 0.0;
    for (int i = (int)threadIdx.x; i < count; i += DOT_BLOCK) sum += partial[i];
    dot_reduce(sums, sum);
    if (threadIdx.x == 0) total[0] = sums[0];
}

// total[0] += x[0] + ... + x[n-1]. One block: for the losses of a micro-batch. Moves 4n bytes.
__global__ void __launch_bounds__(DOT_BLOCK) vector_sum_kernel(double *total, const float *x, int64_t n) {
    __shared__ double sums[DOT_BLOCK];
    double sum = 0.0;
    for (int64_t i = threadIdx.x; i < n; i += DOT_BLOCK) sum += (double)x[i];
    dot_reduce(sums, sum);
    if (threadIdx.x == 0) total[0] += sums[0];
}

// x (n)
static inline void vector_scale(float *x, int64_t n, float factor, Stream *stream) {
    VectorScaleOp op = {x, factor};
    Elements range = elements_of(n, 4, aligned_16(x));
    LAUNCH(vector_scale_kernel, range.blocks, ELEMENTS_BLOCK, 0, stream, op, range);
}

// x, y (n)
static inline void vector_subtract(float *x, const float *y, int64_t n, Stream *stream) {
    VectorSubtractOp op = {x, y};
    Elements range = elements_of(n, 4, aligned_16(x, y));
    LAUNCH(vector_subtract_kernel, range.blocks, ELEMENTS_BLOCK, 0, stream, op, range);
}

// to (n) =, n_values vectors values[.] (n): an array on the host of vectors on the device, at most 256; more fail the
// stream. to may be one of them.
static inline void vector_mean(float *to, float *const *values, int n_values, int64_t n, Stream *stream) {
    VectorMeanOp op;
    int aligned = aligned_16(to);
    if (n_values > VECTOR_MEAN_MAX) {
        error_set("vector_mean: %d vectors, at most %d are possible", n_values, VECTOR_MEAN_MAX);
        stream->failed = 1;
        return;
    }
    op.to = to, op.n_values = n_values;
    for (int r = 0; r < VECTOR_MEAN_MAX; r++) op.values[r] = r < n_values ? values[r] : NULL;
    for (int r = 0; r < n_values; r++) aligned = aligned && aligned_16(values[r]);
    Elements range = elements_of(n, 4, aligned);
    LAUNCH(vector_mean_kernel, range.blocks, ELEMENTS_BLOCK, 0, stream, op, range);
}

// x (n)
static inline void vector_round_bf16(float *x, int64_t n, Stream *stream) {
    VectorRoundOp op = {x};
    Elements range = elements_of(n, 4, aligned_16(x));
    LAUNCH(vector_round_kernel, range.blocks, ELEMENTS_BLOCK, 0, stream, op, range);
}

// total (1) +=, x (n)
static inline void vector_sum(double *total, const float *x, int64_t n, Stream *stream) {
    LAUNCH(vector_sum_kernel, 1, DOT_BLOCK, 0, stream, total, x, n);
}

// m, x (n)
static inline void vector_momentum(float *m, const float *x, float beta, int64_t n, Stream *stream) {
    VectorMomentumOp op = {m, x, beta};
    Elements range = elements_of(n, 4, aligned_16(m, x));
    LAUNCH(vector_momentum_kernel, range.blocks, ELEMENTS_BLOCK, 0, stream, op, range);
}

// to, x (n)
static inline void vector_blend(float *to, const float *x, float keep, float add, float scale, int64_t n,
                                Stream *stream) {
    VectorBlendOp op = {to, x, keep, add, scale};
    Elements range = elements_of(n, 4, aligned_16(to, x));
    LAUNCH(vector_blend_kernel, range.blocks, ELEMENTS_BLOCK, 0, stream, op, range);
}

// delta, now, before (n)
static inline void vector_drift(float *delta, const float *now, const float *before, float decay, int64_t n,
                                Stream *stream) {
    VectorDriftOp op = {delta, now, before, decay};
    Elements range = elements_of(n, 4, aligned_16(delta, now, before));
    LAUNCH(vector_drift_kernel, range.blocks, ELEMENTS_BLOCK, 0, stream, op, range);
}

// a, b (n). The result is on the host: waits for the stream. NaN if the stream has failed.
static inline double vector_dot(const float *a, const float *b, int64_t n, Stream *stream) {
    double total = 0.0;
    int64_t blocks = (n + DOT_BLOCK * 16 - 1) / (DOT_BLOCK * 16); // four quads a thread, before threads take more
    blocks = blocks < 1 ? 1 : blocks > DOT_BLOCKS ? DOT_BLOCKS : blocks;
    double *sums = (double *)scratch_get(&stream->scratch[SCRATCH_OP], sizeof(double) * (DOT_BLOCKS + 1));
    if (sums == NULL) stream->failed = 1;
    if (stream->failed) return (double)NAN;
    LAUNCH(vector_dot_kernel, (unsigned)blocks, DOT_BLOCK, 0, stream, sums + 1, a, b, n, aligned_16(a, b));
    LAUNCH(vector_total_kernel, 1, DOT_BLOCK, 0, stream, sums, (const double *)(sums + 1), (int)blocks);
    device_copy(&total, sums, sizeof total, stream);
    return stream->failed ? (double)NAN : total;
}

static inline double sum_of_squares(const float *x, int64_t n, Stream *stream) {
    return vector_dot(x, x, n, stream);
}

#endif
