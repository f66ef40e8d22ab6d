// Factorizations against what defines them (reconstruction and orthonormality in double, order), and against the CPU's
// values. Must fail for: U and V exchanged, a factor's transpose, ascending values, A changed, another start on each
// call, V not written back.
#include <float.h>   // FLT_MAX
#include <pthread.h> // pthread_once

namespace cpu {
#include "../../llmc/linalg.h"
}
#include "../../llmc/linalg.cuh"

// max |Q^T Q - I| of Q (m,r), in double; NaN if any is.
static double orthonormality_error(const float *Q, int m, int r) {
    double worst = 0.0;
    for (int a = 0; a < r; a++) {
        for (int b = 0; b < r; b++) {
            double sum = a == b ? -1.0 : 0.0;
            for (int i = 0; i < m; i++) sum += (double)Q[i * r + a] * (double)Q[i * r + b];
            if (!(fabs(sum) <= worst)) worst = fabs(sum);
        }
    }
    return worst;
}

// out (m,n) = U (m,r) diag(s) V (n,r)^T in double; s NULL: ones. Release with free.
static float *composed(const float *U, const float *s, const float *V, int m, int n, int r) {
    float *out = host_nan((int64_t)m * n);
    for (int i = 0; i < m; i++) {
        for (int j = 0; j < n; j++) {
            double sum = 0.0;
            for (int a = 0; a < r; a++)
                sum += (double)U[i * r + a] * (s != NULL ? (double)s[a] : 1.0) * (double)V[j * r + a];
            out[i * n + j] = (float)sum;
        }
    }
    return out;
}

// ||A - U diag(s) V^T|| / ||A||, or without the division where A is zero
static double residual(const float *A, const float *U, const float *s, const float *V, int m, int n, int r) {
    float *back = composed(U, s, V, m, n, r);
    double difference = 0.0, size = 0.0;
    for (int i = 0; i < m * n; i++) {
        difference += ((double)A[i] - (double)back[i]) * ((double)A[i] - (double)back[i]);
        size += (double)A[i] * (double)A[i];
    }
    free(back);
    return sqrt(difference) / (size > 0.0 ? sqrt(size) : 1.0);
}

// Orthonormal columns (m,r) made by the CPU. Release with free.
static float *host_orthonormal(int m, int r, uint32_t sub) {
    float *Q = host_random((int64_t)m * r, sub, 1.0f);
    check(cpu::orthonormalize(Q, m, r, test_cpu_stream) == 0, "%s", error_message);
    return Q;
}

// Factors on the device and, after factors_fetch, on the host.
typedef struct {
    int m, n, r;
    float *on_U, *on_s, *on_V, *U, *s, *V;
} Factors;

static Factors factors_new(int m, int n, int r) {
    Factors f = {m, n, r, device_nan<float>(m * r), device_nan<float>(r), device_nan<float>(n * r), NULL, NULL, NULL};
    return f;
}

static void factors_fetch(Factors *f) {
    free(f->U), free(f->s), free(f->V);
    f->U = host_of_device(f->on_U, f->m * f->r), f->s = host_of_device(f->on_s, f->r);
    f->V = host_of_device(f->on_V, f->n * f->r);
}

static void factors_free(Factors *f) {
    device_release(f->on_U, f->m * f->r, "U");
    device_release(f->on_s, f->r, "s");
    device_release(f->on_V, f->n * f->r, "V");
    free(f->U), free(f->s), free(f->V);
}

// best: the residual that this rank allows.
static void check_factors(Factors *f, const float *A, double best, const char *what) {
    factors_fetch(f);
    double left = orthonormality_error(f->U, f->m, f->r), right = orthonormality_error(f->V, f->n, f->r);
    double rest = residual(A, f->U, f->s, f->V, f->m, f->n, f->r);
    check(left <= 3e-6 && right <= 3e-6, "%s %d x %d: U^T U - I %.3g, V^T V - I %.3g", what, f->m, f->n, left, right);
    for (int i = 0; i < f->r; i++)
        check(f->s[i] >= 0.0f && (i == 0 || f->s[i - 1] >= f->s[i]), "%s %d x %d: s does not descend", what, f->m,
              f->n);
    check(rest <= 1.001 * best + 2e-6, "%s %d x %d: residual %.3g, the best is %.3g", what, f->m, f->n, rest, best);
}

static void check_equal(const Factors *a, const Factors *b) {
    check_same(a->U, b->U, sizeof(float) * (size_t)(a->m * a->r), "U of the same matrix");
    check_same(a->s, b->s, sizeof(float) * (size_t)a->r, "s of the same matrix");
    check_same(a->V, b->V, sizeof(float) * (size_t)(a->n * a->r), "V of the same matrix");
}

// rank 0: full.
static void svd_full_case(int m, int n, int rank, float scale) {
    int k = m < n ? m : n, count = m * n;
    float *A = host_random(count, 300, scale);
    if (rank > 0) {
        float *left = host_random(m * rank, 301, 1.0f), *right = host_random(n * rank, 302, 1.0f);
        free(A);
        A = composed(left, NULL, right, m, n, rank);
        free(left);
        free(right);
    }
    float *on_A = device_of_host(A, count), *values = host_nan(m * k + n * k + k);
    Factors f = factors_new(m, n, k), again = factors_new(m, n, k);
    check(svd_full(f.on_U, f.on_s, f.on_V, on_A, m, n, test_stream) == 0, "%s", error_message);
    check(svd_full(again.on_U, again.on_s, again.on_V, on_A, m, n, test_stream) == 0, "%s", error_message);
    check_factors(&f, A, 0.0, "svd_full");
    factors_fetch(&again);
    check_equal(&f, &again);
    check(cpu::svd_full(values, values + m * k, values + m * k + k, A, m, n, test_cpu_stream) == 0, "%s",
          error_message);
    check_close(f.s, values + m * k, k, 2e-6, "s");
    float *kept = host_of_device(on_A, count);
    check_same(kept, A, sizeof(float) * (size_t)count, "A");
    A[count - 1] = count % 2 ? NAN : -INFINITY;
    need_cuda(cudaMemcpy(on_A, A, sizeof(float) * (size_t)count, cudaMemcpyHostToDevice), "copy");
    check(svd_full(f.on_U, f.on_s, f.on_V, on_A, m, n, test_stream) != 0, "a matrix that is not finite was accepted");
    check_message("infinite or NaN", "svd_full");
    factors_free(&f);
    factors_free(&again);
    device_release(on_A, count, "A");
    free(kept);
    free(values);
    free(A);
}

// rank 0: any symmetric matrix, of both signs. What lies above the diagonal contradicts what is below.
static void eigh_case(int n, int rank, float scale) {
    float *A = host_random(n * n, 308, scale), *symmetric = host_nan(n * n);
    if (rank > 0) {
        float *side = host_random(n * rank, 309, 1.0f);
        free(A);
        A = composed(side, NULL, side, n, n, rank);
        free(side);
    }
    for (int row = 0; row < n; row++)
        for (int col = 0; col < n; col++) symmetric[row * n + col] = A[row >= col ? row * n + col : col * n + row];
    float *on_A = device_of_host(A, n * n), *on_V = device_nan<float>(n * n), *on_w = device_nan<float>(n);
    float *cpu_V = host_nan(n * n), *cpu_w = host_nan(n);
    check(eigh(on_V, on_w, on_A, n, test_stream) == 0, "%s", error_message);
    check(cpu::eigh(cpu_V, cpu_w, A, n, test_cpu_stream) == 0, "%s", error_message);
    float *V = host_of_device(on_V, n * n), *w = host_of_device(on_w, n), *kept = host_of_device(on_A, n * n);
    double rest = residual(symmetric, V, w, V, n, n, n);
    for (int i = 1; i < n; i++) check(w[i - 1] >= w[i], "w does not descend");
    check(orthonormality_error(V, n, n) <= 3e-6, "V^T V - I %.3g", orthonormality_error(V, n, n));
    check(rest <= 2e-6, "eigh %d: residual %.3g", n, rest);
    check_close(w, cpu_w, n, 2e-6, "w");
    check_same(kept, A, sizeof(float) * (size_t)(n * n), "A");
    A[n * n - 1] = n % 2 ? NAN : INFINITY;
    need_cuda(cudaMemcpy(on_A, A, sizeof(float) * (size_t)(n * n), cudaMemcpyHostToDevice), "copy");
    check(eigh(on_V, on_w, on_A, n, test_stream) != 0, "a matrix that is not finite was accepted");
    check_message("infinite or NaN", "eigh");
    device_release(on_A, n * n, "A");
    device_release(on_V, n * n, "V");
    device_release(on_w, n, "w");
    float *all[] = {A, symmetric, cpu_V, cpu_w, V, w, kept};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
}

// The same columns as the CPU's up to signs, since both are Householder's; then columns that depend on each other.
static void orthonormalize_case(int m, int r) {
    int count = m * r;
    float *A = host_random(count, 303, 1e-5f), *expected = host_nan(count), *on_Q = device_of_host(A, count);
    memcpy(expected, A, sizeof(float) * (size_t)count);
    check(orthonormalize(on_Q, m, r, test_stream) == 0, "%s", error_message);
    check(cpu::orthonormalize(expected, m, r, test_cpu_stream) == 0, "%s", error_message);
    float *Q = host_of_device(on_Q, count);
    check(orthonormality_error(Q, m, r) <= 3e-6, "Q^T Q - I %.3g", orthonormality_error(Q, m, r));
    for (int j = 0; j < r; j++) {
        double dot = 0.0;
        for (int i = 0; i < m; i++) dot += (double)Q[i * r + j] * (double)expected[i * r + j];
        for (int i = 0; i < m; i++) expected[i * r + j] *= dot < 0.0 ? -1.0f : 1.0f;
    }
    check_close(Q, expected, count, 2e-5, "Q"); // the last columns of a square one hang on differences
    free(Q);
    for (int which = 0; which < 2; which++) {
        for (int j = 0; j < count; j++) expected[j] = which ? 0.0f : A[j / r * r]; // one column r times, zero
        need_cuda(cudaMemcpy(on_Q, expected, sizeof(float) * (size_t)count, cudaMemcpyHostToDevice), "copy");
        check(orthonormalize(on_Q, m, r, test_stream) == 0, "%s", error_message);
        Q = host_of_device(on_Q, count);
        check(orthonormality_error(Q, m, r) <= 3e-6, "dependent: Q^T Q - I %.3g", orthonormality_error(Q, m, r));
        free(Q);
    }
    expected[count - 1] = NAN;
    need_cuda(cudaMemcpy(on_Q, expected, sizeof(float) * (size_t)count, cudaMemcpyHostToDevice), "copy");
    check(orthonormalize(on_Q, m, r, test_stream) != 0, "NaN was accepted");
    check_message("infinite or NaN", "orthonormalize");
    device_release(on_Q, count, "Q");
    free(A);
    free(expected);
}

// Against the spectrum a matrix was made with, s_i = scale * decay^i, through all ways; twice the same bits.
static void svd_truncated_case(int m, int n, int r, double decay, float scale) {
    int k = m < n ? m : n;
    float *left = host_orthonormal(m, k, 304), *right = host_orthonormal(n, k, 305), *truth = host_nan(k);
    double beyond = 0.0, total = 0.0;
    for (int j = 0; j < k; j++) {
        truth[j] = scale * (float)pow(decay, j);
        total += (double)truth[j] * (double)truth[j];
        if (j >= r) beyond += (double)truth[j] * (double)truth[j];
    }
    float *A = composed(left, truth, right, m, n, k), *on_A = device_of_host(A, m * n);
    Factors f = factors_new(m, n, r), again = factors_new(m, n, r);
    check(svd_truncated(f.on_U, f.on_s, f.on_V, on_A, m, n, r, 0, 3, 4, test_stream) == 0, "%s", error_message);
    check(svd_truncated(again.on_U, again.on_s, again.on_V, on_A, m, n, r, 0, 3, 4, test_stream) == 0, "%s",
          error_message);
    check_factors(&f, A, sqrt(beyond / total), "svd_truncated");
    check_close(f.s, truth, r, 1e-5, "s");
    factors_fetch(&again);
    check_equal(&f, &again);
    A[0] = NAN;
    need_cuda(cudaMemcpy(on_A, A, sizeof(float) * (size_t)(m * n), cudaMemcpyHostToDevice), "copy");
    check(svd_truncated(f.on_U, f.on_s, f.on_V, on_A, m, n, r, 0, 3, 4, test_stream) != 0, "NaN was accepted");
    check_message("infinite or NaN", "svd_truncated");
    factors_free(&f);
    factors_free(&again);
    device_release(on_A, m * n, "A");
    free(A);
    free(left);
    free(right);
    free(truth);
}

// A flat spectrum, one iteration: from a good V it is there, from noise it is not.
static void svd_warm_case(void) {
    enum { M = 90, N = 70, R = 8 };
    float *left = host_orthonormal(M, N, 306), *right = host_orthonormal(N, N, 307), truth[N], *V = host_nan(N * R);
    double beyond = 0.0, total = 0.0, excess[2];
    for (int j = 0; j < N; j++) {
        truth[j] = 1.0f / (1.0f + 0.3f * (float)j);
        total += (double)truth[j] * (double)truth[j], beyond += j < R ? 0.0 : (double)truth[j] * (double)truth[j];
    }
    for (int i = 0; i < N; i++)
        for (int j = 0; j < R; j++) V[i * R + j] = right[i * N + j];
    float *A = composed(left, truth, right, M, N, N), *on_A = device_of_host(A, M * N);
    for (int warm = 0; warm < 2; warm++) {
        Factors f = factors_new(M, N, R);
        if (warm) need_cuda(cudaMemcpy(f.on_V, V, sizeof(float) * N * R, cudaMemcpyHostToDevice), "copy");
        check(svd_subspace(f.on_U, f.on_s, f.on_V, on_A, M, N, R, warm, 1, 1, 2, test_stream) == 0, "%s",
              error_message);
        factors_fetch(&f);
        check(orthonormality_error(f.U, M, R) <= 3e-6 && orthonormality_error(f.V, N, R) <= 3e-6, "not orthonormal");
        excess[warm] = residual(A, f.U, f.s, f.V, M, N, R) - sqrt(beyond / total);
        factors_free(&f);
    }
    check(excess[1] >= -1e-6 && excess[1] <= 2e-6 && excess[0] > 0.01, "excess warm %.3g, cold %.3g", excess[1],
          excess[0]);
    device_release(on_A, M * N, "A");
    free(A);
    free(left);
    free(right);
    free(V);
}

// What svd.h stands on. The normals are the CPU's; a GPU's sine may differ in the last bit.
static void linalg_pieces(void) {
    static const int sizes[] = {1, 3, 4, 5, 1029};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        int n = sizes[i];
        float *on = device_nan<float>(n), *expected = host_nan(n), *scaled = host_random(n, 315, 1e-20f);
        float *on_scaled = device_of_host(scaled, n), *zeros = (float *)calloc((size_t)n, sizeof(float));
        float *on_zeros = device_of_host(zeros, n);
        linalg_normal(on, n, 5, 6, test_stream);
        cpu::linalg_normal(expected, n, 5, 6, test_cpu_stream);
        check_device(on, expected, n, 1e-6, "normals");
        linalg_unit_range(on_scaled, n, test_stream);
        linalg_unit_range(on_zeros, n, test_stream);
        cpu::linalg_unit_range(scaled, n, test_cpu_stream);
        float *still = host_of_device(on_zeros, n);
        check_same(still, zeros, sizeof(float) * (size_t)n, "zeros in unit range");
        check_device(on_scaled, scaled, n, 1e-7, "unit range");
        device_release(on_zeros, n, "zeros");
        free(still);
        free(zeros);
    }
}

static void test_cuda_linalg(void) {
    linalg_pieces();
    svd_full_case(1, 1, 0, 1.0f);
    svd_full_case(1, 5, 0, 1.0f);
    svd_full_case(5, 1, 0, 1.0f);
    svd_full_case(40, 7, 0, 1.0f);
    svd_full_case(7, 40, 0, 1.0f);
    svd_full_case(17, 17, 0, 1.0f);
    svd_full_case(33, 20, 3, 1.0f);
    svd_full_case(20, 33, 1, 1.0f);
    svd_full_case(65, 63, 0, 1e-6f);
    svd_full_case(9, 6, 0, 0.0f);
    svd_full_case(130, 67, 0, 1e15f);
    eigh_case(1, 0, 1.0f);
    eigh_case(2, 0, 1.0f);
    eigh_case(17, 0, 1.0f);
    eigh_case(65, 0, 1e-12f);
    eigh_case(40, 40, 1.0f);
    eigh_case(33, 3, 1.0f);
    eigh_case(9, 0, 0.0f);
    orthonormalize_case(1, 1);
    orthonormalize_case(5, 1);
    orthonormalize_case(17, 17);
    orthonormalize_case(130, 33);
    svd_truncated_case(60, 45, 10, 0.7, 1.0f);
    svd_truncated_case(45, 60, 10, 0.7, 1.0f);
    svd_truncated_case(60, 45, 18, 0.5, 1e-25f);
    svd_truncated_case(300, 41, 20, 0.8, 1e25f);
    svd_truncated_case(50, 50, 1, 0.5, 1.0f);
    svd_truncated_case(60, 45, 30, 0.8, 1.0f);
    svd_truncated_case(11, 9, 4, 0.8, 1.0f);
    svd_truncated_case(30, 26, 13, 0.0, 1.0f);
    svd_warm_case();
}
