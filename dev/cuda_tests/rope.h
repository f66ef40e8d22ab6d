// RoPE: half a head straddles a pack, a row the 256 packs of a block; what lies behind the rotated heads stays.
// Must fail for: positions ignored, the sign of the sine, pairs (2i, 2i+1), tables from the scaled frequencies of
// another head size, the values behind the heads touched.
#include <stddef.h> // size_t

namespace cpu {
#include "../../llmc/rope.h"
}
#include "../../llmc/rope.cuh"

static void rope_case(int N, int heads, int HD, int stride, int offset) {
    enum { T = 300 };
    RopeConfig config = {10000.0f, 1, 32.0f, 1.0f, 4.0f, 64};
    int half = HD / 2, n_table = T * half, n = N * stride;
    float *inv_freq = host_nan(half), *cosine = host_nan(n_table), *sine = host_nan(n_table);
    float *x = host_random_x(n + offset, 221, 1.0f), *start = host_nan(n + offset);
    int32_t *positions = (int32_t *)malloc(sizeof(int32_t) * (size_t)N);
    memcpy(start, x, sizeof(float) * (size_t)(n + offset));
    float *device_cos = device_nan<float>(n_table), *device_sin = device_nan<float>(n_table);
    floatX *device_x = device_of_host_x(x, n + offset);
    rope_inv_freq(inv_freq, HD, &config);
    rope_tables(device_cos, device_sin, inv_freq, T, HD, test_stream);
    cpu::rope_tables(cosine, sine, inv_freq, T, HD, test_cpu_stream);
    for (int i = 0; i < N; i++) positions[i] = (i * 97 + 5) % T;
    int32_t *device_positions = device_of_host(positions, N);

    rope_forward(device_x + offset, device_cos, device_sin, device_positions, N, heads, HD, stride, test_stream);
    cpu::rope_forward(x + offset, cosine, sine, positions, N, heads, HD, stride, test_cpu_stream);
    float *ours = host_of_device_x(device_x, n + offset);
    check_close(ours, x, n + offset, FLOATX_TOL, "forward");
    for (int i = 0; i < N; i++)
        check_same(ours + offset + i * stride + heads * HD, start + offset + i * stride + heads * HD,
                   sizeof(float) * (size_t)(stride - heads * HD), "behind the heads");
    check_same(ours, start, sizeof(float) * (size_t)offset, "in front");
    rope_backward(device_x + offset, device_cos, device_sin, device_positions, N, heads, HD, stride, test_stream);
    check_device(device_x, start, n + offset, 2 * FLOATX_TOL, "backward after forward");
    check_device(device_cos, cosine, n_table, 1e-6, "cos");
    check_device(device_sin, sine, n_table, 1e-6, "sin");
    device_release(device_positions, N, "positions");
    free(ours);
    free(x);
    free(inv_freq);
    free(positions);
}

static void test_cuda_rope(void) {
    static const struct {
        int N, heads, HD, stride;
    } cases[] = {{3, 2, 8, 24},  {5, 3, 64, 256}, {4, 5, 6, 40}, {2, 40, 64, 3072}, {2, 33, 128, 33 * 128 + 8},
                 {3, 3, 16, 51}, {1, 1, 2, 2}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        rope_case(cases[i].N, cases[i].heads, cases[i].HD, cases[i].stride, 0);
    rope_case(3, 3, 64, 256, 1); // addresses that are no multiples of 16
    int32_t *positions = device_nan<int32_t>(519);
    rope_positions(positions, 519, 100, 7, test_stream);
    int32_t *ours = host_of_device(positions, 519);
    int equal = 1;
    for (int i = 0; i < 519; i++) equal = equal && ours[i] == 7 + i % 100;
    check(equal, "positions");
    device_release(positions, 519, "positions");
    free(ours);
    int32_t starts[519]; // documents of 30 rows, of less at a sequence's end
    for (int i = 0; i < 519; i++) starts[i] = i % 100 / 30 * 30;
    int32_t *device_starts = device_of_host(starts, 519);
    positions = device_nan<int32_t>(519);
    rope_document_positions(positions, device_starts, 519, 100, test_stream);
    ours = host_of_device(positions, 519);
    for (int i = 0; i < 519; i++) equal = equal && ours[i] == i % 100 % 30;
    check(equal, "positions in documents");
    device_release(positions, 519, "positions in documents");
    device_release(device_starts, 519, "starts");
    free(ours);
}
