// RMSNorm of queries and keys where they lie in the packed rows of qkv, CUDA (Qwen3: of each head; OLMo 2: of all heads
// together). Each row has `parts` parts of W values, one after the other from its start; they share the weight.
//   rstd   = 1 / sqrt(mean of the part's squares + eps)
//   kept   = x                                                                     overwritten, for the backward
//   x      = x * rstd * weight                                                     in place
//   dx     = rstd * (g - xhat * mean(g * xhat)),  g = dout * weight, xhat = x * rstd         in place of dout
//   dweight[:] += sum over rows and parts of dout * x * rstd                       added to, in an order the sizes fix
#ifndef LLMC_QK_NORM_CUH
#define LLMC_QK_NORM_CUH

#include <stddef.h> // size_t
#include <stdint.h> // int64_t

#include "columns.cuh"  // columns_add
#include "device.cuh"   // floatX, Stream, LAUNCH
#include "elements.cuh" // values_load, values_store, aligned_16
#include "warp.cuh"     // warp_sum

#define QK_NORM_PARTS 4 // of a block

// grid ceil(N*parts/4), block (32, 4): one warp a part. WIDTH > 1 needs W, the strides and the addresses to allow
// 16-byte accesses. No shared memory. Moves 6*N*parts*W bytes in bf16; what is read again lies in the cache.
template <int WIDTH>
__global__ static void __launch_bounds__(32 * QK_NORM_PARTS)
    qk_norm_forward_kernel(floatX *x, floatX *kept, float *rstd, const float *weight, int64_t n_parts, int parts, int W,
                           int x_stride, int kept_stride, float eps) {
    int64_t i = (int64_t)blockIdx.x * QK_NORM_PARTS + threadIdx.y, n = i / parts, p = i % parts;
    if (i >= n_parts) return; // the whole warp
    floatX *part = x + n * x_stride + p * W, *keep = kept + n * kept_stride + p * W;
    int first = (int)threadIdx.x * WIDTH, step = 32 * WIDTH;
    float sum = 0.0f;
    for (int c = first; c < W; c += step) {
        Values<WIDTH> values = values_load<WIDTH>(part + c);
        for (int j = 0; j < WIDTH; j++) sum += values.v[j] * values.v[j];
    }
    float scale = 1.0f / sqrtf(warp_sum(sum) / (float)W + eps);
    if (threadIdx.x == 0) rstd[i] = scale;
    for (int c = first; c < W; c += step) {
        Values<WIDTH> values = values_load<WIDTH>(part + c), w = values_load<WIDTH>(weight + c);
        values_store(keep + c, values);
        for (int j = 0; j < WIDTH; j++) values.v[j] *= scale * w.v[j];
        values_store(part + c, values);
    }
}

// As above; dout becomes dx. Moves 6*N*parts*W bytes in bf16.
template <int WIDTH>
__global__ static void __launch_bounds__(32 * QK_NORM_PARTS)
    qk_norm_backward_kernel(floatX *d, const floatX *kept, const float *weight, const float *rstd, int64_t n_parts,
                            int parts, int W, int d_stride, int kept_stride) {
    int64_t i = (int64_t)blockIdx.x * QK_NORM_PARTS + threadIdx.y, n = i / parts, p = i % parts;
    if (i >= n_parts) return;
    floatX *grad = d + n * d_stride + p * W;
    const floatX *part = kept + n * kept_stride + p * W;
    int first = (int)threadIdx.x * WIDTH, step = 32 * WIDTH;
    float dot = 0.0f, scale = rstd[i];
    for (int c = first; c < W; c += step) {
        Values<WIDTH> g = values_load<WIDTH>(grad + c), x = values_load<WIDTH>(part + c);
        Values<WIDTH> w = values_load<WIDTH>(weight + c);
        for (int j = 0; j < WIDTH; j++) dot += g.v[j] * w.v[j] * x.v[j];
    }
    float mean = warp_sum(dot) * scale * scale / (float)W;
    for (int c = first; c < W; c += step) {
        Values<WIDTH> g = values_load<WIDTH>(grad + c), x = values_load<WIDTH>(part + c);
        Values<WIDTH> w = values_load<WIDTH>(weight + c);
        for (int j = 0; j < WIDTH; j++) g.v[j] = scale * (g.v[j] * w.v[j] - x.v[j] * mean);
        values_store(grad + c, g);
    }
}

// Row i of the sum over parts: part i % parts of row i / parts.
struct QkNormColumns {
    const floatX *dout, *kept;
    const float *rstd;
    int parts, W, d_stride, kept_stride;
    __device__ float at(int i, int c) const {
        size_t n = (size_t)(i / parts), at = (size_t)(i % parts) * W + c;
        return to_float(dout[n * d_stride + at]) * to_float(kept[n * kept_stride + at]) * rstd[i];
    }
};

static inline unsigned qk_norm_grid(int64_t n_parts) {
    return (unsigned)((n_parts + QK_NORM_PARTS - 1) / QK_NORM_PARTS);
}

static inline int qk_norm_packed(int W, int x_stride, int kept_stride) {
    return W % FLOATX_WIDTH == 0 && x_stride % FLOATX_WIDTH == 0 && kept_stride % FLOATX_WIDTH == 0;
}

// x: N rows of x_stride values, kept: N rows of kept_stride; rstd (N, parts), weight (W)
static inline void qk_norm_forward(floatX *x, floatX *kept, float *rstd, const float *weight, int N, int parts, int W,
                                   int x_stride, int kept_stride, float eps, Stream *stream) {
    int64_t n_parts = (int64_t)N * parts;
    dim3 block(32, QK_NORM_PARTS);
    if (qk_norm_packed(W, x_stride, kept_stride) && aligned_16(x, kept, weight))
        LAUNCH((qk_norm_forward_kernel<FLOATX_WIDTH>), qk_norm_grid(n_parts), block, 0, stream, x, kept, rstd, weight,
               n_parts, parts, W, x_stride, kept_stride, eps);
    else
        LAUNCH((qk_norm_forward_kernel<1>), qk_norm_grid(n_parts), block, 0, stream, x, kept, rstd, weight, n_parts,
               parts, W, x_stride, kept_stride, eps);
}

// d: N rows of d_stride values, gradient of the normalised values in, of the plain ones out. dweight (W) += unless it
// is NULL. Needs up
// to 256*W floats of scratch. N*parts < 2^31.
static inline void qk_norm_backward(floatX *d, float *dweight, const floatX *kept, const float *weight,
                                    const float *rstd, int N, int parts, int W, int d_stride, int kept_stride,
                                    Stream *stream) {
    int64_t n_parts = (int64_t)N * parts;
    dim3 block(32, QK_NORM_PARTS);
    QkNormColumns columns = {d, kept, rstd, parts, W, d_stride, kept_stride};
    if (dweight != NULL) columns_add(dweight, columns, (int)n_parts, W, stream);
    if (qk_norm_packed(W, d_stride, kept_stride) && aligned_16(d, kept, weight))
        LAUNCH((qk_norm_backward_kernel<FLOATX_WIDTH>), qk_norm_grid(n_parts), block, 0, stream, d, kept, weight, rstd,
               n_parts, parts, W, d_stride, kept_stride);
    else
        LAUNCH((qk_norm_backward_kernel<1>), qk_norm_grid(n_parts), block, 0, stream, d, kept, weight, rstd, n_parts,
               parts, W, d_stride, kept_stride);
}

#endif
