// The spectral filter against the CPU's. Must fail for: U and V exchanged, d once instead of twice, alpha on the wrong
// term, the gradient touched at alpha 1.
#include "../../llmc/response.h"
namespace cpu {
#include "../../llmc/spectral.h"
}
#include "../../llmc/spectral.cuh"

// The CPU's bits: one division.
static void response_case(float tau, int relative) {
    static const float s[] = {INFINITY, 1e30f, 1.0f, 1e-3f, 1e-30f, 1e-44f, 0.0f, -1.0f, NAN};
    enum { R = 300, N_SPECIAL = sizeof s / sizeof *s };
    float *values = host_random(R, 323, 1e-3f), *expected = host_nan(R), *d = device_nan<float>(R);
    for (int i = 0; i < N_SPECIAL && !relative; i++) values[i] = s[i];
    if (relative) values[0] = 2e-3f;
    float *on = device_of_host(values, R);
    spectral_response(d, on, R, tau, relative, test_stream);
    cpu::spectral_response(expected, values, R, tau, relative, test_cpu_stream);
    float *result = host_of_device(d, R);
    check_same(result, expected, sizeof(float) * R, relative ? "relative response" : "response");
    device_release(on, R, "s");
    device_release(d, R, "d");
    free(values);
    free(expected);
    free(result);
}

static void filter_case(int m, int n, int r, float alpha) {
    float *grad = host_random(m * n, 320, 1e-3f), *U = host_orthonormal(m, r, 321), *V = host_orthonormal(n, r, 322);
    float *d = host_random(r, 323, 1.0f);
    for (int a = 0; a < r; a++) d[a] = 0.1f + 0.9f / (1.0f + d[a] * d[a]);
    float *on_grad = device_of_host(grad, m * n), *on_U = device_of_host(U, m * r), *on_V = device_of_host(V, n * r);
    float *on_d = device_of_host(d, r);
    spectral_filter(on_grad, on_U, on_d, on_V, m, n, r, 1.0f, test_stream);
    float *same = host_of_device(on_grad, m * n);
    check_same(same, grad, sizeof(float) * (size_t)(m * n), "alpha 1");
    spectral_filter(on_grad, on_U, on_d, on_V, m, n, r, alpha, test_stream);
    cpu::spectral_filter(grad, U, d, V, m, n, r, alpha, test_cpu_stream);
    check_device(on_grad, grad, m * n, 1e-6, "filtered");
    device_release(on_U, m * r, "U");
    device_release(on_V, n * r, "V");
    device_release(on_d, r, "d");
    free(same);
    free(U);
    free(V);
    free(d);
}

static void test_cuda_spectral(void) {
    response_case(1e-3f, 0);
    response_case(0.5f, 1);
    filter_case(1, 1, 1, 0.3f);
    filter_case(1, 5, 1, 0.3f);
    filter_case(5, 1, 1, 0.9f);
    filter_case(40, 17, 17, 0.3f);
    filter_case(17, 40, 17, 0.3f);
    filter_case(33, 33, 5, 0.3f);
    filter_case(65, 20, 7, 0.0f);
    filter_case(20, 65, 1, 0.0f);
    filter_case(300, 130, 20, 0.5f);
    filter_case(130, 300, 20, 0.5f);
}
