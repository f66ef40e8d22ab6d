// The mask: the golden sets on the device, the CPU's indices bit for bit, and what is gathered and scattered by them.
// n straddles the 4 tokens of a block, K the 32 lanes of a warp, H powers of two and packs.
// Must fail for: a round less, another order of the values, zeros left out or coming after the values, scale left out.
#include "../../llmc/mask_set.h"
#include "../mask_golden.h"
#include <stddef.h> // size_t

namespace cpu {
#include "../../llmc/mask.h"
}
#include "../../llmc/mask.cuh"

// dims (12) = the first values of the set of one token.
__global__ static void mask_golden_kernel(int *dims, MaskKey key, int token, int H) {
    MaskSet set = mask_set(key, token, H);
    if (threadIdx.x < 12) dims[threadIdx.x] = mask_index(&set, (int)threadIdx.x);
}

static void test_golden(void) {
    for (size_t i = 0; i < sizeof mask_golden / sizeof *mask_golden; i++) {
        int *dims = device_nan<int>(12);
        LAUNCH(mask_golden_kernel, 1, 32, 0, test_stream, dims, mask_golden[i].key, mask_golden[i].token,
               mask_golden[i].H);
        int *ours = host_of_device(dims, 12);
        check_same(ours, mask_golden[i].first, sizeof(int) * 12, "golden set");
        device_release(dims, 12, "dims");
        free(ours);
    }
}

static void mask_case(int n, int H, int K, int offset) {
    MaskKey key = {77 + (1ull << 40), 1, 2, 3 + (1ll << 33), 300};
    int n_x = n * H, n_values = n * K;
    float *x = host_random_x(n_x, 291, 1.0f), *v = host_random_x(n_values, 292, 1.0f);
    float *values = host_nan(n_values), *filled = host_nan(n_x);
    uint32_t *index = (uint32_t *)malloc(sizeof(uint32_t) * (size_t)n_values);
    uint32_t *device_index = device_nan<uint32_t>(n_values);
    floatX *device_x = device_of_host_x(x, n_x), *device_v = device_of_host_x(v, n_values);
    floatX *device_values = device_nan<floatX>(n_values), *device_filled = device_nan<floatX>(n_x + offset);
    mask_indices(device_index, key, n, H, K, test_stream);
    mask_gather(device_values, device_x, key, n, H, K, test_stream);
    mask_scatter(device_filled + offset, device_v, key, n, H, K, 1.5f, test_stream);
    cpu::mask_indices(index, key, n, H, K, test_cpu_stream);
    cpu::mask_gather(values, x, key, n, H, K, test_cpu_stream);
    cpu::mask_scatter(filled, v, key, n, H, K, 1.5f, test_cpu_stream);
    for (int i = 0; i < n_x; i++) filled[i] = to_float(to_floatX(filled[i]));
    uint32_t *ours_index = host_of_device(device_index, n_values);
    float *ours_values = host_of_device_x(device_values, n_values);
    float *ours_filled = host_of_device_x(device_filled, n_x + offset);
    check_same(ours_index, index, sizeof(uint32_t) * (size_t)n_values, "indices");
    check_same(ours_values, values, sizeof(float) * (size_t)n_values, "gather");
    check_same(ours_filled + offset, filled, sizeof(float) * (size_t)n_x, "scatter");
    device_release(device_index, n_values, "indices");
    device_release(device_x, n_x, "x");
    device_release(device_v, n_values, "v");
    device_release(device_values, n_values, "gather");
    device_release(device_filled, n_x + offset, "scatter");
    free(ours_index);
    free(ours_values);
    free(ours_filled);
    free(x);
    free(v);
    free(values);
    free(filled);
    free(index);
}

static void test_cuda_mask(void) {
    static const struct {
        int n, H, K;
    } cases[] = {{1, 1, 1},    {3, 5, 2},    {4, 70, 31},   {5, 70, 33},  {2, 64, 32},
                 {9, 192, 10}, {5, 768, 38}, {4, 192, 192}, {1, 4099, 4}, {2, 65536, 40}};
    test_golden();
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) mask_case(cases[i].n, cases[i].H, cases[i].K, 0);
    mask_case(5, 64, 9, 1); // addresses that are no multiples of 16
    MaskKey beyond = {1, 4096, 0, 0, 0};
    uint32_t *index = device_nan<uint32_t>(1);
    Stream *other = NULL;
    need(stream_create(&other, PRECISION_FP32, 1), "stream");
    mask_indices(index, beyond, 1, 8, 1, other);
    uint32_t *ours = host_of_device(index, 1);
    check(stream_check(other) != 0 && *ours == 0xFFFFFFFFu, "a replica beyond the key was accepted");
    check_message("replica 4096", "a replica beyond the key");
    stream_destroy(other);
    device_release(index, 1, "index");
    free(ours);
}
