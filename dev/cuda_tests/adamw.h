// AdamW: n around packs and blocks, any address, three steps; the change of param, m and v are compared.
// Must fail for: the bias left uncorrected, decay left out, grad_scale left out of v, the tail left out.
#include "../../llmc/adamw_config.h"

namespace cpu {
#include "../../llmc/adamw.h"
}
#include "../../llmc/adamw.cuh"

// Three steps of n values behind `offset` others, by the device's step(param, grad, m, v, number) and the CPU's.
template <typename DeviceStep, typename CpuStep>
static void adam_case(int n, int offset, DeviceStep device_step, CpuStep cpu_step) {
    int all = n + offset;
    float *start = host_random(all, 251, 1.0f), *param = host_random(all, 251, 1.0f);
    float *m = host_random(all, 252, 0.0f), *v = host_random(all, 252, 0.0f);
    float *device_param = device_of_host(param, all), *device_m = device_of_host(m, all);
    float *device_v = device_of_host(v, all);
    for (int step = 1; step <= 3; step++) {
        float *grad = host_random(all, 252 + (uint32_t)step, 1.0f), *device_grad = device_of_host(grad, all);
        device_step(device_param + offset, device_grad + offset, device_m + offset, device_v + offset, step);
        cpu_step(param + offset, grad + offset, m + offset, v + offset, step);
        device_release(device_grad, all, "grad");
        free(grad);
    }
    float *ours = host_of_device(device_param, all);
    check_same(ours, start, sizeof(float) * (size_t)offset, "in front");
    for (int i = 0; i < all; i++) ours[i] -= start[i], param[i] -= start[i];
    check_close(ours + offset, param + offset, n, 3e-6, "the change of param");
    check_device(device_m, m, all, 1e-6, "m");
    check_device(device_v, v, all, 1e-6, "v");
    device_release(device_param, all, "param");
    free(ours);
    free(param);
    free(start);
}

// n around packs and blocks, any address.
template <typename Case> static void adam_sizes(Case run) {
    static const int sizes[] = {1, 3, 4, 5, 1023, 1024, 4101};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) run(sizes[i], 0);
    for (int offset = 1; offset < 4; offset++) run(1030, offset);
}

static void adamw_case(int n, int offset) {
    AdamW adam = {0.9f, 0.95f, 1e-8f};
    adam_case(
        n, offset,
        [=](float *param, const float *grad, float *m, float *v, int step) {
            adamw_update(param, grad, m, v, n, adam, 0.1f, 0.3f, 0.5f, step, test_stream);
        },
        [=](float *param, const float *grad, float *m, float *v, int step) {
            cpu::adamw_update(param, grad, m, v, n, adam, 0.1f, 0.3f, 0.5f, step, test_cpu_stream);
        });
}

static void test_cuda_adamw(void) {
    adam_sizes(adamw_case);
}
