// Matrix products against the CPU's in fp32 on the same rounded numbers: odd sizes, all three directions, overwriting
// and adding, strides and addresses that no vector fits. Must fail for: operands or transposes exchanged, += for =,
// dweight in bf16, a product's description used for another of its size, strides of a batch exchanged.
#include <stddef.h> // size_t

namespace cpu {
#include "../../llmc/matmul.h"
}
#include "../../llmc/matmul.cuh"

// One layer's products. accumulate: 0, 1 in place, 2 from one place to another. kept: the bf16 copy of the weight is
// given, and nothing else of it.
static void matmul_case(int N, int K, int M, int accumulate, int kept) {
    int64_t n_x = (int64_t)N * K, n_w = (int64_t)M * K, n_out = (int64_t)N * M;
    float *x = host_random_x(n_x, 12, 1.0f), *w = host_random(n_w, 13, 1.0f), *dout = host_random_x(n_out, 14, 1.0f);
    float *out = host_random_x(n_out, 15, 1.0f), *dw = host_random(n_w, 16, 1.0f), *dx = host_nan(n_x);
    floatX *on_x = device_of_host_x(x, n_x), *on_dout = device_of_host_x(dout, n_out);
    floatX *on_out = accumulate ? device_of_host_x(out, n_out) : device_nan<floatX>(n_out);
    floatX *on_dx = device_nan<floatX>(n_x);
    float *on_w = device_of_host(w, n_w), *on_dw = accumulate ? device_of_host(dw, n_w) : device_nan<float>(n_w);
    uint16_t *rounded = device_nan<uint16_t>(n_w);
    bf16_round(rounded, on_w, M, K, K, test_stream);
    Weight weight = {on_w, kept ? rounded : NULL, 0};
    if (kept && MATMUL_BF16) weight.full = NULL;
    floatX *on_residual = accumulate == 2 ? on_out : NULL; // from one place to another
    if (accumulate == 2) on_out = device_nan<floatX>(n_out);
    matmul_forward(on_out, on_x, weight, N, K, M,
                   accumulate == 2 ? on_residual
                   : accumulate    ? on_out
                                   : NULL,
                   test_stream);
    matmul_backward(on_dx, on_dw, on_dout, on_x, weight, N, K, M, accumulate, test_stream);
    for (int64_t i = 0; i < n_w; i++) w[i] = to_float(to_floatX(w[i]));
    cpu::Weight same = {w, NULL, 0};
    float *residual = (float *)malloc(sizeof(float) * (size_t)n_out);
    memcpy(residual, out, sizeof(float) * (size_t)n_out);
    cpu::matmul_forward(out, x, same, N, K, M, accumulate == 2 ? residual : accumulate ? out : NULL, test_cpu_stream);
    cpu::matmul_backward(dx, dw, dout, x, same, N, K, M, accumulate, test_cpu_stream);
    if (accumulate == 2)
        check_device(on_residual, residual, n_out, FLOATX_TOL, "residual");
    else
        free(residual);
    check_device(on_out, out, n_out, FLOATX_TOL, "out");
    check_device(on_dx, dx, n_x, FLOATX_TOL, "dx");
    check_device(on_dw, dw, n_w, 1e-6, "dweight");
    device_release(on_x, n_x, "x");
    device_release(on_dout, n_out, "dout");
    device_release(on_w, n_w, "weight");
    device_release(rounded, n_w, "rounded");
    free(x);
    free(w);
    free(dout);
}

// The products of a weight that is kept as bf16 only, and its gradient too, in slices (MATMUL_SLICE); added to or not.
static void matmul_half_case(int N, int K, int M, int accumulate) {
    int64_t n_x = (int64_t)N * K, n_w = (int64_t)M * K, n_out = (int64_t)N * M;
    float *x = host_random_x(n_x, 12, 1.0f), *w = host_random(n_w, 13, 1.0f), *dout = host_random_x(n_out, 14, 1.0f);
    float *dx = host_nan(n_x), *out = host_nan(n_out), *dw = host_random(n_w, 16, 1.0f);
    uint16_t *halves = (uint16_t *)malloc(sizeof(uint16_t) * (size_t)n_w);
    uint16_t *grads = (uint16_t *)malloc(sizeof(uint16_t) * (size_t)n_w);
    for (int64_t i = 0; i < n_w; i++) halves[i] = bf16_of_float(w[i]), grads[i] = bf16_of_float(dw[i]);
    floatX *on_x = device_of_host_x(x, n_x), *on_dout = device_of_host_x(dout, n_out);
    floatX *on_out = device_nan<floatX>(n_out), *on_dx = device_nan<floatX>(n_x);
    uint16_t *on_halves = device_of_host(halves, n_w), *on_grads = device_of_host(grads, n_w);
    Weight weight = {NULL, on_halves, 1};
    cpu::Weight same = {NULL, halves, 1};
    matmul_forward(on_out, on_x, weight, N, K, M, NULL, test_stream);
    matmul_backward(on_dx, (float *)on_grads, on_dout, on_x, weight, N, K, M, accumulate, test_stream);
    cpu::matmul_forward(out, x, same, N, K, M, NULL, test_cpu_stream);
    cpu::matmul_backward(dx, (float *)grads, dout, x, same, N, K, M, accumulate, test_cpu_stream);
    uint16_t *ours = host_of_device(on_grads, n_w);
    float *values = host_nan(n_w);
    for (int64_t i = 0; i < n_w; i++) values[i] = float_of_bf16(ours[i]), dw[i] = float_of_bf16(grads[i]);
    check_close(values, dw, n_w, 4e-3, "dweight in bf16"); // a sum that falls on the other side of a tie
    check_device(on_out, out, n_out, FLOATX_TOL, "out");
    check_device(on_dx, dx, n_x, FLOATX_TOL, "dx");
    device_release(on_x, n_x, "x");
    device_release(on_dout, n_out, "dout");
    device_release(on_halves, n_w, "halves");
    device_release(on_grads, n_w, "gradient");
    free(x);
    free(w);
    free(dout);
    free(dw);
    free(values);
    free(ours);
    free(halves);
    free(grads);
}

// A matrix (rows, cols) with a gap of `gap` values behind each row, `shift` values off the usual alignment.
typedef struct {
    int64_t n, ld, shift;
    float *host;
    void *base, *data; // on the device, fp32 or bf16
    int bf16;
} ProductMatrix;

static ProductMatrix product_matrix(int64_t rows, int64_t cols, int64_t gap, int64_t shift, int bf16, uint32_t sub) {
    ProductMatrix matrix = {rows * (cols + gap) + shift, cols + gap, shift, NULL, NULL, NULL, bf16};
    matrix.host = host_random(matrix.n, sub, 1.0f);
    if (bf16) {
        __nv_bfloat16 *half = (__nv_bfloat16 *)malloc(sizeof(__nv_bfloat16) * (size_t)matrix.n);
        for (int64_t i = 0; i < matrix.n; i++)
            half[i] = __float2bfloat16(matrix.host[i]), matrix.host[i] = to_float(half[i]);
        matrix.base = device_of_host(half, matrix.n);
        matrix.data = (__nv_bfloat16 *)matrix.base + shift;
        free(half);
    } else {
        matrix.base = device_of_host(matrix.host, matrix.n);
        matrix.data = (float *)matrix.base + shift;
    }
    return matrix;
}

static void product_matrix_release(ProductMatrix *matrix, const char *what) {
    if (matrix->bf16)
        device_release((__nv_bfloat16 *)matrix->base, matrix->n, what);
    else
        device_release((float *)matrix->base, matrix->n, what);
    free(matrix->host);
}

// matmul_product with every gap and shift; what lies in out's gaps stays.
static void product_case(int64_t rows, int64_t cols, int64_t inner, int kind, int64_t gap, int64_t shift) {
    int trans_a = kind & 1, trans_b = kind >> 1 & 1, bf16 = kind >> 2 & 1, accumulate = kind >> 3 & 1;
    ProductMatrix a = product_matrix(trans_a ? inner : rows, trans_a ? rows : inner, gap, shift, bf16, 17);
    ProductMatrix b = product_matrix(trans_b ? cols : inner, trans_b ? inner : cols, gap, shift, bf16, 18);
    ProductMatrix out = product_matrix(rows, cols, gap, shift, 0, 19);
    matmul_product((float *)out.data, out.ld, a.data, a.ld, trans_a, b.data, b.ld, trans_b, rows, cols, inner, bf16,
                   accumulate, test_stream);
    float *result = host_of_device((const float *)out.base, out.n);
    for (int64_t i = 0; i < out.n; i++) {
        int64_t col = i < shift ? cols : (i - shift) % out.ld;
        if (col >= cols && result[i] != out.host[i])
            check(0, "a product wrote into its output's gap at %lld", (long long)i);
    }
    cpu::matmul_product(out.host + shift, out.ld, a.host + shift, a.ld, trans_a, b.host + shift, b.ld, trans_b, rows,
                        cols, inner, 0, accumulate, test_cpu_stream);
    check_close(result, out.host, out.n, 1e-6, "product");
    free(result);
    product_matrix_release(&a, "a");
    product_matrix_release(&b, "b");
    product_matrix_release(&out, "out");
}

// matmul_batch of matrices with gaps between them; what lies in out's gaps stays.
static void batch_case(int count, int64_t rows, int64_t cols, int64_t inner, int kind) {
    int trans_a = kind & 1, trans_b = kind >> 1 & 1;
    int64_t lda = (trans_a ? rows : inner) + 3, ldb = (trans_b ? inner : cols) + 1, ldo = cols + 2;
    int64_t stride_a = (trans_a ? inner : rows) * lda + 5, stride_b = (trans_b ? cols : inner) * ldb, n = count;
    int64_t stride_out = rows * ldo + 7;
    float *a = host_random(n * stride_a, 24, 1.0f), *b = host_random(n * stride_b, 25, 1.0f);
    float *out = host_random(n * stride_out, 26, 1.0f), *on_out = device_of_host(out, n * stride_out);
    float *on_a = device_of_host(a, n * stride_a), *on_b = device_of_host(b, n * stride_b);
    matmul_batch(on_out, ldo, stride_out, on_a, lda, stride_a, trans_a, on_b, ldb, stride_b, trans_b, rows, cols, inner,
                 count, test_stream);
    cpu::matmul_batch(out, ldo, stride_out, a, lda, stride_a, trans_a, b, ldb, stride_b, trans_b, rows, cols, inner,
                      count, test_cpu_stream);
    check_device(on_out, out, n * stride_out, 1e-6, "batch");
    device_release(on_a, n * stride_a, "a");
    device_release(on_b, n * stride_b, "b");
    free(a);
    free(b);
}

// Factors of the sum and of what was there.
static void scaled_case(void) {
    enum { M = 13, N = 22, R = 5 };
    float *a = host_random(M * R, 20, 1.0f), *b = host_random(N * R, 21, 1.0f), *out = host_random(M * N, 22, 1.0f);
    float *on_a = device_of_host(a, M * R), *on_b = device_of_host(b, N * R), *on_out = device_of_host(out, M * N);
    matmul_scaled(on_out, N, on_a, R, 0, on_b, R, 1, M, N, R, -0.75f, 0.3f, test_stream);
    for (int i = 0; i < M; i++) {
        for (int j = 0; j < N; j++) {
            double sum = 0.0;
            for (int k = 0; k < R; k++) sum += (double)a[i * R + k] * (double)b[j * R + k];
            out[i * N + j] = (float)(-0.75 * sum + (double)0.3f * (double)out[i * N + j]);
        }
    }
    check_device(on_out, out, M * N, 1e-6, "scaled");
    device_release(on_a, M * R, "a");
    device_release(on_b, N * R, "b");
    free(a);
    free(b);
}

// bf16 rounding: the CPU's bits, with and without gaps and alignment, ties, NaN and infinity.
static void round_cases(void) {
    static const uint32_t special[] = {0x3F800000, 0x3F808000, 0x3F818000, 0x3F808001, 0x7F800000, 0xFF800000,
                                       0x7F7FFFFF, 0x7F800001, 0x80000000, 0x00000001, 0xFFFFFFFF, 0x00008000};
    static const int64_t shapes[][4] = {{1, 1, 1, 0},   {1, 8, 8, 0},   {3, 5, 5, 0},  {1, 2049, 2049, 0},
                                        {5, 24, 24, 1}, {7, 16, 20, 0}, {4, 9, 11, 3}, {65, 130, 130, 0}}; // shift last
    enum { N_SPECIAL = sizeof special / sizeof *special };
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        int64_t rows = shapes[i][0], cols = shapes[i][1], ld = shapes[i][2], shift = shapes[i][3];
        float *from = host_random(rows * ld + shift, 23, 1.0f);
        for (int64_t j = 0; j < N_SPECIAL && j < rows * ld; j++) memcpy(&from[shift + j], &special[j], 4);
        float *on = device_of_host(from, rows * ld + shift);
        uint16_t *to = device_nan<uint16_t>(rows * cols), *expected = (uint16_t *)malloc(2 * (size_t)(rows * cols));
        bf16_round(to, on + shift, rows, cols, ld, test_stream);
        cpu::bf16_round(expected, from + shift, rows, cols, ld, test_cpu_stream);
        uint16_t *result = host_of_device(to, rows * cols);
        check_same(result, expected, 2 * (size_t)(rows * cols), "bf16_round");
        device_release(on, rows * ld + shift, "from");
        device_release(to, rows * cols, "to");
        free(result);
        free(expected);
        free(from);
    }
}

// A product that cuBLASLt refuses fails its stream, with the call in the message, and nothing runs after it.
static void refused_case(void) {
    Stream *stream = NULL;
    need(stream_create(&stream, PRECISION_BF16, 1), "stream");
    float *a = device_nan<float>(16), *out = device_nan<float>(16);
    matmul_product(out, 3, a, 4, 0, a, 4, 0, 4, 4, 4, 0, 0, stream); // rows of 4 do not fit a stride of 3
    check(stream_check(stream) != 0, "a stride below the row was accepted");
    check_message("matmul.cuh:", "refused product");
    need_cuda(cudaMemset(a, 0, sizeof(float) * 16), "fill");
    matmul_product(out, 4, a, 4, 0, a, 4, 0, 4, 4, 4, 0, 0, stream);
    float *result = host_of_device(out, 16);
    for (int i = 0; i < 16; i++) check(isnan(result[i]), "a failed stream computes on");
    free(result);
    device_release(a, 16, "a");
    device_release(out, 16, "out");
    stream_destroy(stream);
}

#ifdef CUDA_EMULATOR
// The emulator's cuBLASLt sees what would be silent on a GPU.
static void planted_case(const char *what, const char *message, void *out, const void *a, const void *b,
                         int64_t promised) {
    Stream *stream = NULL;
    MatmulShape shape = {4, 4, 4, 4, 4, 4, promised, promised, promised, 0, 0, 0, 0, 0, 0, 0, 0};
    need(stream_create(&stream, PRECISION_BF16, 1), "stream");
    check(matmul_try(out, out, a, b, &shape, 1.0f, 0.0f, stream) != 0, "%s: was accepted", what);
    check_message(message, what);
    stream_destroy(stream);
}

static void planted_cases(void) {
    float *a = device_nan<float>(16), *out = device_nan<float>(16), host[16];
    planted_case("alignment", "less aligned than was promised", out, a + 1, a, 16);
    planted_case("range", "not wholly, in device memory", out, a, (char *)a + 8 + TEST_GUARD, 4);
    planted_case("host memory", "not wholly, in device memory", out, host, a, 4);
    planted_case("NULL", "not wholly, in device memory", NULL, a, a, 4);
    device_release(a, 16, "a");
    device_release(out, 16, "out");
}
#endif

static void test_cuda_matmul(void) {
    for (int accumulate = 0; accumulate < 2; accumulate++) {
        matmul_half_case(20, 24, 40, accumulate);
        matmul_half_case(33, 37, 65, accumulate);
    }
    static const int layers[][3] = {{1, 1, 1}, {3, 5, 7}, {17, 33, 65}, {64, 128, 32}, {130, 65, 17}};
    static const int64_t products[][3] = {{1, 1, 1}, {3, 17, 5}, {65, 31, 130}, {40, 24, 16}};
    for (size_t i = 0; i < sizeof layers / sizeof *layers; i++)
        for (int kind = 0; kind < 6; kind++) matmul_case(layers[i][0], layers[i][1], layers[i][2], kind % 3, kind / 3);
    for (size_t i = 0; i < sizeof products / sizeof *products; i++)
        for (int kind = 0; kind < 16; kind++)
            for (int64_t gap = 0; gap < 6; gap += 5)
                product_case(products[i][0], products[i][1], products[i][2], kind, gap, gap > 0 ? 1 + kind % 3 : 0);
    for (int kind = 0; kind < 4; kind++) batch_case(1, 5, 7, 3, kind), batch_case(3, 9, 17, 12, kind);
    scaled_case();
    round_cases();
    refused_case();
#ifdef CUDA_EMULATOR
    planted_cases();
#endif
}
