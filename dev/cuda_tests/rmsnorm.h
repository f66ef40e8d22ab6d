// RMSNorm: C straddles packs, what a warp keeps of a row (2048 in bf16, 1024 in fp32) and what fits into shared memory
// (8192); N the rows of a block and the 512 blocks of the backward; tiny x, where eps matters.
// Sums of a row: the CPU adds up to 8193 squares one after the other, which costs it 4e-6.
// Must fail for: eps left out, rows beyond the kept part left out of the sum, dx or dweight overwritten, a block's
// share of dweight left out.
#include <stddef.h> // size_t

namespace cpu {
#include "../../llmc/rmsnorm.h"
}
#include "../../llmc/rmsnorm.cuh"

static void rmsnorm_case(int N, int C, float scale, int offset) {
    int n = N * C;
    float *x = host_random_x(n, 211, scale), *weight = host_random(C, 212, 1.0f), *dout = host_random_x(n, 213, 1.0f);
    float *dx = host_random_x(n, 214, 1.0f), *dweight = host_random(C, 215, 1.0f);
    float *out = host_nan(n), *rstd = host_nan(N), *shifted = host_nan(n + offset);
    memcpy(shifted + offset, x, sizeof(float) * (size_t)n);
    floatX *device_x = device_of_host_x(shifted, n + offset), *device_dout = device_of_host_x(dout, n);
    floatX *device_out = device_nan<floatX>(n), *device_dx = device_of_host_x(dx, n);
    float *device_weight = device_of_host(weight, C), *device_dweight = device_of_host(dweight, C);
    float *again = device_of_host(dweight, C), *device_rstd = device_nan<float>(N);
    floatX *dx_again = device_of_host_x(dx, n);

    rmsnorm_forward(device_out, device_rstd, device_x + offset, device_weight, N, C, 1e-5f, test_stream);
    rmsnorm_backward(device_dx, device_dweight, device_dout, device_x + offset, device_weight, device_rstd, N, C,
                     test_stream);
    rmsnorm_backward(dx_again, again, device_dout, device_x + offset, device_weight, device_rstd, N, C, test_stream);
    cpu::rmsnorm_forward(out, rstd, x, weight, N, C, 1e-5f, test_cpu_stream);
    cpu::rmsnorm_backward(dx, dweight, dout, x, weight, rstd, N, C, test_cpu_stream);

    float *first = host_of_device(device_dweight, C), *second = host_of_device(again, C);
    check_same(first, second, sizeof(float) * (size_t)C, "dweight, twice");
    check_device(device_out, out, n, FLOATX_TOL, "out");
    check_device(device_rstd, rstd, N, 5e-6, "rstd");
    check_device(device_dx, dx, n, FLOATX_TOL, "dx");
    check_device(device_dweight, dweight, C, 5e-6, "dweight");
    device_release(device_x, n + offset, "x");
    device_release(device_dout, n, "dout");
    device_release(device_weight, C, "weight");
    device_release(again, C, "dweight");
    device_release(dx_again, n, "dx");
    free(first);
    free(second);
    free(shifted);
    free(x);
    free(weight);
    free(dout);
}

static void test_cuda_rmsnorm(void) {
    static const struct {
        int N, C;
        float scale;
    } cases[] = {{1, 8, 1},    {3, 7, 1},    {4, 64, 1},   {5, 576, 1},  {5, 576, 0.003f}, {2, 1, 1},
                 {130, 24, 1}, {3, 257, 1},  {2, 1028, 1}, {2, 2056, 1}, {3, 2049, 1},     {515, 16, 1},
                 {1030, 9, 1}, {2, 4104, 1}, {2, 8192, 1}, {2, 8200, 1}, {1, 8193, 1}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) rmsnorm_case(cases[i].N, cases[i].C, cases[i].scale, 0);
    rmsnorm_case(5, 64, 1.0f, 1); // addresses that are no multiples of 16
}
