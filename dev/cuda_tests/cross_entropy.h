// Cross-entropy: V straddles packs and the 1024 packs of a turn; rows begin at every offset to 16 bytes. Scale 20 gives
// rows with one large value, and some values are -inf.
// Must fail for: a maximum left out, the target's -1 left out, the loss from overwritten logits, rows without a target
// counted, values before the first pack or behind the last left out.
#include <stddef.h> // size_t

namespace cpu {
#include "../../llmc/cross_entropy.h"
}
#include "../../llmc/cross_entropy.cuh"

static void cross_entropy_case(int N, int V, float scale, int offset) {
    int n = N * V, all = n + offset;
    float *logits = host_random_x(all, 241, scale), *start = host_nan(all), *loss = host_nan(N);
    int32_t targets[8];
    for (int i = 0; i < N; i++) targets[i] = i % 3 == 1 ? -1 : (int32_t)((i * 37 + V - 1) % V);
    for (int i = 0; i < V / 4; i++) logits[offset + i] = V >= 64 && i != targets[0] ? -INFINITY : logits[offset + i];
    memcpy(start, logits, sizeof(float) * (size_t)all);
    floatX *device_logits = device_of_host_x(logits, all);
    int32_t *device_targets = device_of_host(targets, N);
    float *device_loss = device_nan<float>(N), *only_loss = device_nan<float>(N);

    cross_entropy(only_loss, device_logits + offset, device_targets, N, V, 0.25f, 0, test_stream);
    float *kept = host_of_device_x(device_logits, all);
    check_same(kept, start, sizeof(float) * (size_t)all, "logits after the loss alone");
    cross_entropy(device_loss, device_logits + offset, device_targets, N, V, 0.25f, 1, test_stream);
    cpu::cross_entropy(loss, logits + offset, targets, N, V, 0.25f, 1, test_cpu_stream);
    float *ours = host_of_device(device_loss, N), *alone = host_of_device(only_loss, N);
    float *gradient = host_of_device_x(device_logits, all);
    check_same(alone, ours, sizeof(float) * (size_t)N, "the loss alone");
    if (V > 1) check_close(ours, loss, N, 1e-6, "loss");
    check(V > 1 || ours[0] == 0.0f, "loss of a vocabulary of one");
    for (int i = 0; i < N; i++) {
        float *row = gradient + offset + i * V, *expected = logits + offset + i * V;
        if (targets[i] < 0) {
            int zero = ours[i] == 0.0f;
            for (int v = 0; v < V; v++) zero = zero && row[v] == 0.0f;
            check(zero, "a row without a target");
            continue;
        }
        float found = row[targets[i]], truth = expected[targets[i]]; // apart: the largest by far
        check(fabsf(found - truth) <= (float)FLOATX_TOL * 0.25f + 1e-9f, "gradient of the target %g, %g", (double)found,
              (double)truth);
        row[targets[i]] = expected[targets[i]] = 0.0f;
        if (V > 1) check_close(row, expected, V, 2 * FLOATX_TOL, "gradient of the others");
    }
    check_same(gradient, start, sizeof(float) * (size_t)offset, "in front");
    device_release(device_logits, all, "logits");
    device_release(device_targets, N, "targets");
    device_release(device_loss, N, "loss");
    device_release(only_loss, N, "loss");
    free(kept);
    free(ours);
    free(alone);
    free(gradient);
    free(logits);
    free(start);
    free(loss);
}

static void test_cuda_cross_entropy(void) {
    static const struct {
        int N, V;
        float scale;
    } cases[] = {{1, 1, 1},    {4, 3, 1},    {5, 101, 2},   {3, 258, 20}, {4, 64, 1},
                 {3, 8195, 1}, {2, 8192, 1}, {2, 16500, 1}, {1, 4096, 1}, {1, 9000, 20}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        cross_entropy_case(cases[i].N, cases[i].V, cases[i].scale, 0);
    for (int offset = 1; offset < 8; offset++) cross_entropy_case(3, 40, 2.0f, offset);
}
