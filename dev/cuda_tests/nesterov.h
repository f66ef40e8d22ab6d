// NAdam: n around packs and blocks, any address, three steps; the change of param, m and v are compared.
// Must fail for: the gradient's and the mean's sizes exchanged, decay left out, the tail left out.
#include "../../llmc/optimizer.h"

namespace cpu {
#include "../../llmc/nesterov.h"
}
#include "../../llmc/nesterov.cuh"

static void nesterov_case(int n, int offset) {
    AdamW adam = {0.99f, 0.95f, 1e-8f};
    NesterovProduct kept = {0, 0.0};
    int all = n + offset;
    float *start = host_random(all, 251, 1.0f), *param = host_random(all, 251, 1.0f);
    float *m = host_random(all, 252, 0.0f), *v = host_random(all, 252, 0.0f);
    float *device_param = device_of_host(param, all), *device_m = device_of_host(m, all);
    float *device_v = device_of_host(v, all);
    for (int step = 1; step <= 3; step++) {
        float *grad = host_random(all, 252 + (uint32_t)step, 1.0f), *device_grad = device_of_host(grad, all);
        NesterovStep at = nesterov_step(adam, 0.1f, 0.3f, 0.5f, step, &kept);
        nesterov_update(device_param + offset, device_grad + offset, device_m + offset, device_v + offset, n, at,
                        test_stream);
        cpu::nesterov_update(param + offset, grad + offset, m + offset, v + offset, n, at, test_cpu_stream);
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

static void test_cuda_nesterov(void) {
    static const int sizes[] = {1, 3, 4, 5, 1023, 1024, 4101};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) nesterov_case(sizes[i], 0);
    for (int offset = 1; offset < 4; offset++) nesterov_case(1030, offset);
}
