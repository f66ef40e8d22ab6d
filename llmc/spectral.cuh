// Spectral filter of a gradient by the singular vectors of the anchor's momentum M = U diag(s) V^T, CUDA.
//   d_i = s_i / (s_i + tau),   tau * s_0 for tau if relative                                            d overwritten
//   grad = alpha * grad + (1 - alpha) * U diag(d) (U^T grad V) diag(d) V^T                               in place
// All pointers are device memory.
#ifndef LLMC_SPECTRAL_CUH
#define LLMC_SPECTRAL_CUH

#include <stddef.h> // size_t

#include "device.cuh" // Stream, LAUNCH, scratch_get
#include "matmul.cuh" // matmul_product, matmul_scaled
#include "response.h" // response_of

// One thread a value, a few hundred of them.
__global__ void spectral_response_kernel(float *d, const float *s, int r, float tau, int relative) {
    int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < r) d[i] = response_of(s[i], relative ? tau * s[0] : tau);
}

// middle (r,r) [i,j] *= d[i] * d[j]. One thread a value; 8 bytes each, d comes from the caches.
__global__ void spectral_middle_kernel(float *middle, const float *d, int r) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < (int64_t)r * r) middle[i] *= d[i / r] * d[i % r];
}

// d (r) in [0, 1) from s (r), descending, tau > 0. 0 for s_i <= 0 and for NaN.
static inline void spectral_response(float *d, const float *s, int r, float tau, int relative, Stream *stream) {
    LAUNCH(spectral_response_kernel, (unsigned int)((r + 255) / 256), 256, 0, stream, d, s, r, tau, relative);
}

// grad (m,n) in place, U (m,r), d (r), V (n,r). alpha 1 touches nothing. Products are fp32 in every build; alpha and
// 1 - alpha are factors of the last one, so grad is read twice and written once. Costs 4*r*m*n + 4*r*r*min(m,n) flops
// and r*(r + 2*min(m,n)) floats of scratch.
static inline void spectral_filter(float *grad, const float *U, const float *d, const float *V, int m, int n, int r,
                                   float alpha, Stream *stream) {
    if (alpha == 1.0f) return;
    // The r x r middle is reached from the longer side first, so that everything left has the shorter side's length.
    int tall = m >= n, side = tall ? n : m;
    size_t n_strip = (size_t)side * (size_t)r;
    float *near = (float *)scratch_get(&stream->scratch[SCRATCH_OP],
                                       sizeof(float) * (2 * n_strip + (size_t)r * (size_t)r)); // strips (side, r)
    if (near == NULL) {
        stream->failed = 1;
        return;
    }
    float *far = near + n_strip, *middle = far + n_strip;     // (side, r), (r, r)
    const float *inner = tall ? V : U, *outer = tall ? U : V; // of the shorter side (side, r), of the longer
    int longer = tall ? m : n;
    // near = grad^T U or grad V;  middle = U^T grad V, transposed where tall;  far = inner (scaled middle)
    matmul_product(near, r, grad, n, tall, outer, r, 0, side, r, longer, 0, 0, stream);
    matmul_product(middle, r, inner, r, 1, near, r, 0, r, r, side, 0, 0, stream);
    LAUNCH(spectral_middle_kernel, (unsigned int)(((int64_t)r * r + 255) / 256), 256, 0, stream, middle, d, r);
    matmul_product(far, r, inner, r, 0, middle, r, 0, side, r, r, 0, 0, stream);
    const float *left = tall ? U : far, *right = tall ? far : V;
    matmul_scaled(grad, n, left, r, 0, right, r, 1, m, n, r, 1.0f - alpha, alpha, stream);
}

#endif
