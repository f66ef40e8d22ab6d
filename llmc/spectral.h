// Spectral filter of a gradient by the singular vectors of the anchor's momentum M = U diag(s) V^T, CPU. [A], SPEC 4.
//   d_i = s_i / (s_i + tau),   tau * s_0 for tau if relative                                            d overwritten
//   grad = alpha * grad + (1 - alpha) * U diag(d) (U^T grad V) diag(d) V^T                               in place
#ifndef LLMC_SPECTRAL_H
#define LLMC_SPECTRAL_H

#include <stddef.h> // size_t

#include "device.h"   // Stream, scratch_get
#include "matmul.h"   // matmul_product
#include "response.h" // response_of

// d (r) in [0, 1) from s (r), descending, tau > 0. 0 for s_i <= 0 and for NaN.
static inline void spectral_response(float *d, const float *s, int r, float tau, int relative, Stream *stream) {
    if (stream->failed) return;
    float scale = relative ? tau * s[0] : tau;
    for (int i = 0; i < r; i++) d[i] = response_of(s[i], scale);
}

// grad (m,n) in place, U (m,r), d (r), V (n,r). alpha 1 touches nothing. Products are fp32 whatever the stream's
// precision. Costs 4*r*m*n + 4*r*r*min(m,n) flops and r*(r + 2*min(m,n)) floats of scratch.
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
    for (int i = 0; i < r; i++)
        for (int j = 0; j < r; j++) middle[(size_t)i * (size_t)r + (size_t)j] *= (1.0f - alpha) * d[i] * d[j];
    matmul_product(far, r, inner, r, 0, middle, r, 0, side, r, r, 0, 0, stream);
    int64_t count = (int64_t)m * n;
    if (alpha != 0.0f) {
#pragma omp parallel for simd num_threads(stream->threads) schedule(static)
        for (int64_t i = 0; i < count; i++) grad[i] *= alpha;
    }
    const float *left = tall ? U : far, *right = tall ? far : V;
    matmul_product(grad, n, left, r, 0, right, r, 1, m, n, r, 0, alpha != 0.0f, stream);
}

#endif
