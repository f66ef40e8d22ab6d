// NAdam: n around packs and blocks, any address, three steps; the change of param, m and v are compared.
// Must fail for: the gradient's and the mean's sizes exchanged, decay left out, the tail left out.
#include "../../llmc/optimizer.h"

namespace cpu {
#include "../../llmc/nesterov.h"
}
#include "../../llmc/nesterov.cuh"

static void nesterov_case(int n, int offset) {
    AdamW adam = {0.99f, 0.95f, 1e-8f};
    NesterovProduct kept = {0, 0.0}, cpu_kept = {0, 0.0};
    adam_case(
        n, offset,
        [&](float *param, const float *grad, float *m, float *v, int step) {
            nesterov_update(param, grad, m, v, n, nesterov_step(adam, 0.1f, 0.3f, 0.5f, step, &kept), test_stream);
        },
        [&](float *param, const float *grad, float *m, float *v, int step) {
            cpu::nesterov_update(param, grad, m, v, n, nesterov_step(adam, 0.1f, 0.3f, 0.5f, step, &cpu_kept),
                                 test_cpu_stream);
        });
}

static void test_cuda_nesterov(void) {
    adam_sizes(nesterov_case);
}
