// Truncated singular value decompositions, the part that is the same on the CPU and on the GPU. It sees matrices only
// through what linalg.h and linalg.cuh both define: svd_full, orthonormalize, linalg_columns, linalg_unit_range,
// linalg_normal, and the products. All pointers are the backend's memory.
//
// No include guard: each of the two includes it once, and a program that compares them has both.

// Up to this min(m,n) the full factorization is as quick as subspace iteration.
#ifndef SVD_FULL_MAX
#ifdef TESTING
#define SVD_FULL_MAX 12 // small shapes meet the iteration too
#else
#define SVD_FULL_MAX 256
#endif
#define SVD_OVERSAMPLE      8 // columns iterated beyond the rank asked for: the last ones of the rank converge sooner
#define SVD_COLD_ITERATIONS 8 // a matrix's first visit only
#define SVD_WARM_ITERATIONS 2
#endif

// The r largest singular values of A (m,n) with their vectors, U (m,r), s (r), V (n,r), 1 <= r <= min(m,n), after
// `iterations` >= 1 products with A and A^T. Starts from V if warm, else from Gaussian numbers, which also fill the
// columns beyond r. Products are fp32 whatever the stream's precision. U and V are orthonormal however far the
// iteration has come. Costs about 4*m*n*(r+8)*iterations flops.
// Returns 0, or -1: no memory, A or the warm V not finite, no convergence, or the stream has failed.
static inline int svd_subspace(float *U, float *s, float *V, const float *A, int m, int n, int r, int warm,
                               int iterations, uint64_t seed, uint32_t sub, Stream *stream) {
    int k = m < n ? m : n, width = r + SVD_OVERSAMPLE < k ? r + SVD_OVERSAMPLE : k, kept = warm ? r : 0;
    size_t w = (size_t)width, n_left = (size_t)m * w, n_right = (size_t)n * w;
    float *left = (float *)scratch_get(&stream->scratch[SCRATCH_OP],
                                       sizeof(float) * (n_left + 2 * n_right + w * w + w)); // left (m,width)
    if (left == NULL) return -1;
    float *right = left + n_left, *turned = right + n_right;  // (n,width), (n,width)
    float *inner = turned + n_right, *values = inner + w * w; // (width,width), (width)
    if (kept > 0) linalg_columns(right, width, V, r, n, kept, stream);
    if (kept < width) {
        linalg_normal(turned, (int64_t)n * (width - kept), seed, sub, stream);
        linalg_columns(right + kept, width, turned, width - kept, n, width - kept, stream);
    }
    for (int iteration = 0; iteration < iterations; iteration++) {
        // Columns must be made orthonormal once a round, or all would turn to the first. Once is enough: those of left
        // are in order of size, so those of A^T left fall like s, and each keeps its digits. Only range could be lost.
        if (iteration > 0) linalg_unit_range(right, (int64_t)n_right, stream);
        matmul_product(left, width, A, n, 0, right, width, 0, m, width, n, 0, 0, stream);
        if (stream_check(stream) || orthonormalize(left, m, width, stream)) return -1;
        matmul_product(right, width, A, n, 1, left, width, 0, n, width, m, 0, 0, stream);
        if (stream_check(stream)) return -1;
    }
    // A is about left left^T A = left right^T, and right = turned diag(values) inner^T.
    if (svd_full(turned, values, inner, right, n, width, stream)) return -1;
    matmul_product(U, r, left, width, 0, inner, width, 0, m, r, width, 0, 0, stream);
    linalg_columns(V, r, turned, width, n, r, stream);
    linalg_columns(s, r, values, width, 1, r, stream);
    return stream_check(stream);
}

// The r largest singular values of A (m,n) with their vectors, by the quicker way: all of them, cut to r, where A is
// small or r is over half of min(m,n); else svd_subspace, from V if warm. Shapes and errors as there.
static inline int svd_truncated(float *U, float *s, float *V, const float *A, int m, int n, int r, int warm,
                                uint64_t seed, uint32_t sub, Stream *stream) {
    int k = m < n ? m : n;
    if (r == k) return svd_full(U, s, V, A, m, n, stream);
    if (k > SVD_FULL_MAX && r <= k / 2)
        return svd_subspace(U, s, V, A, m, n, r, warm, warm ? SVD_WARM_ITERATIONS : SVD_COLD_ITERATIONS, seed, sub,
                            stream);
    size_t wide = (size_t)k, n_left = (size_t)m * wide, n_right = (size_t)n * wide;
    float *left = (float *)scratch_get(&stream->scratch[SCRATCH_OP], sizeof(float) * (n_left + n_right + wide));
    if (left == NULL) return -1;
    float *right = left + n_left, *values = right + n_right; // (m,k), (n,k), (k)
    if (svd_full(left, values, right, A, m, n, stream)) return -1;
    linalg_columns(U, r, left, k, m, r, stream);
    linalg_columns(V, r, right, k, n, r, stream);
    linalg_columns(s, r, values, k, 1, r, stream);
    return stream_check(stream);
}
