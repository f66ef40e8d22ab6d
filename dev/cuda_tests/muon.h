// Muon: tall, wide and square matrices, three steps; the change of param and the momentum are compared.
// Must fail for: X X^T where X^T X is meant, B not squared, the momentum overwritten, decay left out.
#include "../../llmc/optimizer.h"

namespace cpu {
#include "../../llmc/muon.h"
}
#include "../../llmc/muon.cuh"

static void muon_case(int m, int n) {
    int64_t count = (int64_t)m * n;
    float *start = host_random(count, 351, 1.0f), *param = host_random(count, 351, 1.0f);
    float *momentum = host_random(count, 352, 0.0f);
    float *device_param = device_of_host(param, count), *device_momentum = device_of_host(momentum, count);
    for (int step = 1; step <= 3; step++) {
        float *grad = host_random(count, 352 + (uint32_t)step, 1.0f), *device_grad = device_of_host(grad, count);
        muon_update(device_param, device_grad, device_momentum, m, n, 0.1f, 0.3f, 0.5f, test_stream);
        cpu::muon_update(param, grad, momentum, m, n, 0.1f, 0.3f, 0.5f, test_cpu_stream);
        device_release(device_grad, count, "grad");
        free(grad);
    }
    float *ours = host_of_device(device_param, count);
    for (int64_t i = 0; i < count; i++) ours[i] -= start[i], param[i] -= start[i];
    check_close(ours, param, count, 2e-5, "the change of param");
    check_device(device_momentum, momentum, count, 1e-6, "momentum");
    device_release(device_param, count, "param");
    free(ours);
    free(param);
    free(start);
}

static void test_cuda_muon(void) {
    static const int shapes[][2] = {{1, 1}, {1, 7}, {7, 1}, {5, 3}, {16, 16}, {33, 40}, {65, 20}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) muon_case(shapes[i][0], shapes[i][1]);
}
