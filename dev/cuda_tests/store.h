// Values kept as bf16 and in 8 bits: sizes around blocks, pieces that begin inside a tensor, all ways to round.
// Must fail for: a block's scale that leaves out the tail, the random bits of another element, a sign lost.
namespace cpu {
#include "../../llmc/store.h"
}
#include "../../llmc/store.cuh"

// n values of a tensor from element `at` on, through the device's write and read and the CPU's: the same bits.
static void store_case(Store store, int is_signed, int n, int at, int nearest) {
    int all = at + n;
    float *values = host_random(n, 300 + (uint32_t)n, 1.0f), *back = host_random(n, 301, 0.0f);
    uint8_t *codes = (uint8_t *)calloc((size_t)all, 4);
    float *scales = (float *)calloc((size_t)all / STORE_BLOCK + 1, sizeof(float));
    int n_scales = all / STORE_BLOCK + 1;
    for (int i = 0; i < n; i++) {
        values[i] *= i % 7 == 0 ? 1e-4f : i % 11 == 0 ? 0.0f : 1.0f;
        if (!is_signed && values[i] < 0.0f) values[i] = -values[i];
    }
    uint8_t *on_codes = (uint8_t *)device_of_host((float *)codes, all);
    float *on_scales = device_of_host(scales, n_scales), *on_values = device_of_host(values, n);
    float *on_back = device_of_host(back, n);
    Stored here = {codes, scales, store, is_signed}, there = {on_codes, on_scales, store, is_signed};
    Rounding r = nearest ? rounding_nearest() : rounding_of(9, 4, ROUND_V, 17);
    cpu::stored_write(here, at, values, n, r, test_cpu_stream);
    cpu::stored_read(back, here, at, n, test_cpu_stream);
    stored_write(there, at, on_values, n, r, test_stream);
    stored_read(on_back, there, at, n, test_stream);
    float *ours = host_of_device(on_back, n);
    check_same(ours, back, sizeof(float) * (size_t)n, store == STORE_BF16 ? "bf16" : "int8");
    device_release(on_back, n, "back");
    free(ours);
    device_release(on_values, n, "values");
    device_release(on_scales, n_scales, "scales");
    device_release((float *)on_codes, all, "codes");
    free(values);
    free(back);
    free(codes);
    free(scales);
}

static void test_cuda_store(void) {
    static const int sizes[] = {1, 255, 256, 257, 1024, 2000};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        for (int nearest = 0; nearest < 2; nearest++) {
            store_case(STORE_BF16, 1, sizes[i], 0, nearest);
            store_case(STORE_BF16, 1, sizes[i], 3 * STORE_BLOCK, nearest);
            store_case(STORE_INT8, 1, sizes[i], 2 * STORE_BLOCK, nearest);
            store_case(STORE_INT8, 0, sizes[i], 2 * STORE_BLOCK, nearest);
        }
        store_case(STORE_BF16, 1, sizes[i], 5, 1);
        store_case(STORE_FP32, 1, sizes[i], 0, 1);
    }
}
