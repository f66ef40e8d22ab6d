// The ops that only some families of models need: biases, LayerNorm without parameters, norms of q and k, the residual
// sum. Sizes straddle packs, warps, the 256 threads of a row's block and the 32 x 256 rows of a column's sum.
#include <stddef.h> // size_t

namespace cpu {
#include "../../llmc/bias.h"
#include "../../llmc/layernorm.h"
#include "../../llmc/qk_norm.h"
#include "../../llmc/residual.h"
} // namespace cpu
#include "../../llmc/bias.cuh"
#include "../../llmc/layernorm.cuh"
#include "../../llmc/qk_norm.cuh"
#include "../../llmc/residual.cuh"

// Must fail for: columns behind the last pack left out, dbias overwritten, a block's share left out.
static void bias_case(int N, int M, int offset) {
    int n = N * M;
    float *x = host_random_x(n + offset, 241, 1.0f), *bias = host_random(M, 242, 1.0f);
    float *dbias = host_random(M, 243, 1.0f);
    floatX *device_x = device_of_host_x(x, n + offset), *device_add = device_of_host_x(x, n + offset);
    float *device_bias = device_of_host(bias, M), *device_dbias = device_of_host(dbias, M);
    float *again = device_of_host(dbias, M);
    bias_backward(device_dbias, device_x + offset, N, M, test_stream);
    bias_backward(again, device_x + offset, N, M, test_stream);
    bias_forward(device_x + offset, device_bias, N, M, test_stream);
    residual_add(device_add + offset, device_x + offset, n, test_stream);
    cpu::bias_backward(dbias, x + offset, N, M, test_cpu_stream);
    float *sum = host_nan(n + offset), *first = host_of_device(device_dbias, M), *second = host_of_device(again, M);
    memcpy(sum, x, sizeof(float) * (size_t)(n + offset));
    cpu::bias_forward(x + offset, bias, N, M, test_cpu_stream);
    cpu::residual_add(sum + offset, x + offset, n, test_cpu_stream);
    check_same(first, second, sizeof(float) * (size_t)M, "dbias, twice");
    check_device(device_x, x, n + offset, FLOATX_TOL, "x + bias");
    check_device(device_add, sum, n + offset, 2 * FLOATX_TOL, "x + (x + bias)");
    check_device(device_dbias, dbias, M, 5e-6, "dbias");
    device_release(device_bias, M, "bias");
    device_release(again, M, "dbias");
    free(first);
    free(second);
    free(bias);
}

// Must fail for: eps left out, RMSNorm, dx overwritten, the mean of dout left out, columns behind the first turn.
static void layernorm_case(int N, int C, float scale, float shift, int offset) {
    int n = N * C;
    float *x = host_random_x(n, 244, scale), *dout = host_random_x(n, 245, 1.0f), *dx = host_random_x(n, 246, 1.0f);
    float *out = host_nan(n), *rstd = host_nan(N), *shifted = host_nan(n + offset);
    for (int i = 0; i < n; i++) x[i] = to_float(to_floatX(x[i] + shift));
    memcpy(shifted + offset, x, sizeof(float) * (size_t)n);
    floatX *device_x = device_of_host_x(shifted, n + offset), *device_dout = device_of_host_x(dout, n);
    floatX *device_out = device_nan<floatX>(n), *device_dx = device_of_host_x(dx, n);
    float *device_rstd = device_nan<float>(N);
    layernorm_forward(device_out, device_rstd, device_x + offset, N, C, 1e-5f, test_stream);
    layernorm_backward(device_dx, device_dout, device_out, device_rstd, N, C, test_stream);
    cpu::layernorm_forward(out, rstd, x, N, C, 1e-5f, test_cpu_stream);
    float *given = host_of_device_x(device_out, n); // what the backward sees is rounded
    cpu::layernorm_backward(dx, dout, given, rstd, N, C, test_cpu_stream);
    check_device(device_out, out, n, FLOATX_TOL, "out");
    check_device(device_rstd, rstd, N, 5e-6, "rstd");
    check_device(device_dx, dx, n, FLOATX_TOL, "dx");
    device_release(device_x, n + offset, "x");
    device_release(device_dout, n, "dout");
    free(given);
    free(shifted);
    free(x);
    free(dout);
}

// Must fail for: a part's rstd of another part, what lies behind the parts written, dweight overwritten, a row's stride
// mistaken.
static void qk_norm_case(int N, int parts, int W, int behind, int kept_behind, float scale) {
    int stride = parts * W + behind, n = N * stride, kept_stride = parts * W + kept_behind, n_kept = N * kept_stride;
    float *x = host_random_x(n, 247, scale), *weight = host_random(W, 248, 1.0f), *d = host_random_x(n, 249, 1.0f);
    float *dweight = host_random(W, 250, 1.0f), *kept = host_random_x(n_kept, 251, 1.0f), *rstd = host_nan(N * parts);
    floatX *device_x = device_of_host_x(x, n), *device_d = device_of_host_x(d, n), *d_again = device_of_host_x(d, n);
    floatX *device_kept = device_of_host_x(kept, n_kept);
    float *device_weight = device_of_host(weight, W), *device_dweight = device_of_host(dweight, W);
    float *again = device_of_host(dweight, W), *device_rstd = device_nan<float>(N * parts);
    qk_norm_forward(device_x, device_kept, device_rstd, device_weight, N, parts, W, stride, kept_stride, 1e-5f,
                    test_stream);
    qk_norm_backward(device_d, device_dweight, device_kept, device_weight, device_rstd, N, parts, W, stride,
                     kept_stride, test_stream);
    qk_norm_backward(d_again, again, device_kept, device_weight, device_rstd, N, parts, W, stride, kept_stride,
                     test_stream);
    cpu::qk_norm_forward(x, kept, rstd, weight, N, parts, W, stride, kept_stride, 1e-5f, test_cpu_stream);
    cpu::qk_norm_backward(d, dweight, kept, weight, rstd, N, parts, W, stride, kept_stride, test_cpu_stream);
    float *first = host_of_device(device_dweight, W), *second = host_of_device(again, W);
    float *device_what = host_of_device_x(device_x, n), *gradients = host_of_device_x(device_d, n);
    for (int i = 0; i < n; i++)
        if (i % stride >= parts * W && !check(device_what[i] == x[i] && gradients[i] == d[i], "behind the parts"))
            break;
    check_same(first, second, sizeof(float) * (size_t)W, "dweight, twice");
    check_device(device_x, x, n, FLOATX_TOL, "out");
    check_device(device_kept, kept, n_kept, 1e-9, "kept");
    check_device(device_rstd, rstd, N * parts, 5e-6, "rstd");
    check_device(device_d, d, n, FLOATX_TOL, "dx");
    check_device(device_dweight, dweight, W, 5e-6, "dweight");
    device_release(device_weight, W, "weight");
    device_release(again, W, "dweight");
    device_release(d_again, n, "dx");
    free(first);
    free(second);
    free(device_what);
    free(gradients);
    free(weight);
}

static void test_cuda_families(void) {
    static const struct {
        int N, C;
    } sizes[] = {{1, 1}, {3, 7}, {5, 64}, {2, 2056}, {3, 2049}, {33, 33}, {8200, 9}, {40, 264}};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) bias_case(sizes[i].N, sizes[i].C, 0);
    bias_case(5, 64, 1); // addresses that are no multiples of 16
    layernorm_case(1, 2, 1.0f, 0.0f, 0);
    layernorm_case(3, 7, 1.0f, 2.0f, 0);
    layernorm_case(4, 64, 1.0f, 0.0f, 0);
    layernorm_case(5, 576, 0.003f, 0.0f, 0);
    layernorm_case(3, 2056, 1.0f, 1.0f, 0);
    layernorm_case(3, 2049, 1.0f, -1.0f, 0);
    layernorm_case(5, 64, 1.0f, 0.0f, 1);
    qk_norm_case(1, 1, 8, 0, 0, 1.0f);
    qk_norm_case(3, 5, 6, 7, 3, 1.0f);
    qk_norm_case(4, 2, 64, 64, 32, 1.0f);
    qk_norm_case(5, 3, 128, 8, 16, 0.003f);
    qk_norm_case(3, 1, 264, 8, 8, 1.0f);
    qk_norm_case(2, 1, 2049, 5, 0, 1.0f);
    qk_norm_case(2800, 3, 8, 8, 0, 1.0f); // more parts than a turn of the sum takes
}
