// PowerSGD's pieces against the CPU's. Must fail for: P and Q exchanged, the error's sign, the error without delta.
namespace cpu {
#include "../../llmc/powersgd.h"
}
#include "../../llmc/powersgd.cuh"

static void powersgd_case(int m, int n, int r) {
    float *delta = host_random(m * n, 340, 0.3f), *P = host_nan(m * r), *Q = host_nan(n * r), *own = host_nan(n * r);
    float *update = host_nan(m * n), *error = host_nan(m * n);
    float *on_delta = device_of_host(delta, m * n), *on_P = device_nan<float>(m * r), *on_Q = device_nan<float>(n * r);
    float *on_own = device_nan<float>(n * r), *on_update = device_nan<float>(m * n),
          *on_error = device_nan<float>(m * n);
    check(powersgd_init(on_Q, n, r, 7, (uint32_t)m, test_stream) == 0, "%s", error_message);
    check(cpu::powersgd_init(Q, n, r, 7, (uint32_t)m, test_cpu_stream) == 0, "%s", error_message);
    float *start = host_of_device(on_Q, n * r);
    check_same(start, Q, sizeof(float) * (size_t)(n * r), "the start");
    powersgd_left(on_P, on_delta, on_Q, m, n, r, test_stream);
    cpu::powersgd_left(P, delta, Q, m, n, r, test_cpu_stream);
    float *left = host_of_device(on_P, m * r);
    check_close(left, P, m * r, 1e-6, "left");
    check(cpu::orthonormalize(P, m, r, test_cpu_stream) == 0, "%s", error_message);
    device_copy(on_P, P, sizeof(float) * (size_t)(m * r), test_stream); // from here on the same
    powersgd_right(on_own, on_delta, on_P, m, n, r, test_stream);
    powersgd_expand(on_update, on_P, on_own, m, n, r, test_stream);
    powersgd_error(on_error, on_delta, on_P, on_own, m, n, r, test_stream);
    powersgd_error(on_delta, on_delta, on_P, on_own, m, n, r, test_stream);
    cpu::powersgd_right(own, delta, P, m, n, r, test_cpu_stream);
    cpu::powersgd_expand(update, P, own, m, n, r, test_cpu_stream);
    for (int i = 0; i < m * n; i++) error[i] = delta[i] - update[i];
    float *apart = host_of_device(on_error, m * n), *in_place = host_of_device(on_delta, m * n);
    check_same(in_place, apart, sizeof(float) * (size_t)(m * n), "the error in place");
    float *sum = host_of_device(on_update, m * n); // of what is sent and what is not: nothing is lost
    for (int i = 0; i < m * n; i++) sum[i] += apart[i];
    check_close(sum, delta, m * n, 1e-6, "update + error");
    if (r < m && r < n) check_close(apart, error, m * n, 2e-6, "error"); // at full rank it is rounding alone
    check_device(on_own, own, n * r, 1e-6, "right");
    check_device(on_update, update, m * n, 1e-6, "expand");
    device_release(on_delta, m * n, "delta");
    device_release(on_P, m * r, "P");
    device_release(on_Q, n * r, "Q");
    device_release(on_error, m * n, "error");
    float *all[] = {delta, P, Q, error, start, left, apart, in_place, sum};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
}

static void test_cuda_powersgd(void) {
    powersgd_case(1, 1, 1);
    powersgd_case(5, 1, 1);
    powersgd_case(1, 5, 1);
    powersgd_case(17, 9, 9);
    powersgd_case(24, 16, 2);
    powersgd_case(65, 130, 3);
}
