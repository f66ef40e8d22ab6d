// Muon, the part that is the same on the CPU and on the GPU. All pointers are the backend's memory.
//
// No include guard: each of muon.h and muon.cuh includes it once, and a program that compares them has both.

// X (m,n) := about U V^T of X = U diag(s) V^T: singular values come to between 0.7 and 1.2 whatever they were, those
// below a few thousandths of the largest to something smaller. A zero matrix stays one. Y (m,n), A and B (k,k), k =
// min(m,n), are overwritten. Returns where the result lies, X or Y.
static inline float *muon_orthogonalize(float *X, float *Y, float *A, float *B, int m, int n, Stream *stream) {
    int tall = m > n, k = tall ? n : m, longer = tall ? m : n;
    int64_t count = (int64_t)m * n, square = (int64_t)k * k;
    double norm = sqrt(sum_of_squares(X, count, stream));
    vector_scale(X, count, norm > 0.0 ? (float)(1.0 / norm) : 0.0f, stream);
    for (int i = 0; i < MUON_STEPS; i++) {
        float *done = X;
        // A = X X^T, or X^T X where tall;  B = b A + c A A;  Y = a X + B X, or a X + X B
        matmul_product(A, k, X, n, tall, X, n, !tall, k, k, longer, 0, 0, stream);
        matmul_product(B, k, A, k, 0, A, k, 0, k, k, k, 0, 0, stream);
        vector_blend(B, A, MUON_C, MUON_B, 1.0f, square, stream);
        if (tall)
            matmul_product(Y, n, X, n, 0, B, n, 0, m, n, n, 0, 0, stream);
        else
            matmul_product(Y, n, B, m, 0, X, n, 0, m, n, m, 0, 0, stream);
        vector_blend(Y, X, 1.0f, MUON_A, 1.0f, count, stream);
        X = Y, Y = done;
    }
    return X;
}

// One step of a matrix param (m,n); momentum (m,n) starts as zero. Products are fp32 whatever the stream's precision.
// Waits for the stream. Fails it without memory.
static inline void muon_update(float *param, const float *grad, float *momentum, int m, int n, float lr,
                               float weight_decay, float grad_scale, Stream *stream) {
    int64_t count = (int64_t)m * n, k = m < n ? m : n;
    float *X = (float *)scratch_get(&stream->scratch[SCRATCH_STEP],
                                    sizeof(float) * (size_t)muon_scratch_floats(m, n)); // (m,n)
    if (X == NULL) {
        stream->failed = 1;
        return;
    }
    float *Y = X + count, *A = Y + count, *B = A + k * k;
    vector_blend(momentum, grad, MUON_MOMENTUM, 1.0f, grad_scale, count, stream);
    device_copy(X, momentum, sizeof(float) * (size_t)count, stream);
    vector_blend(X, grad, MUON_MOMENTUM, 1.0f, grad_scale, count, stream);
    X = muon_orthogonalize(X, Y, A, B, m, n, stream);
    vector_blend(param, X, 1.0f - lr * weight_decay, -lr * muon_scale(m, n), 1.0f, count, stream);
}
