// Vectors: n around packs and blocks, any address. What is rounded once has the CPU's bits; dots have one value.
// Must fail for: the tail left out, n instead of the count in the mean, bf16 by truncation, beta and 1 - beta swapped,
// a block or a thread left out of the dot, dots in fp32, scale left out of the blend, now and before exchanged.
namespace cpu {
#include "../../llmc/vector.h"
}
#include "../../llmc/vector.cuh"

static void vector_case(int n, int offset) {
    int all = n + offset;
    float *x = host_random(all, 261, 1.0f), *m = host_random(all, 262, 1.0f), *rounded = host_random(all, 261, 1.0f);
    static const uint32_t special[] = {0x7FC00001u, 0x7F800000u, 0xFF800000u, 0x3F808000u, 0x3F818000u, 0x3F808001u,
                                       0x7F7FFFFFu, 0x00000001u, 0x80008000u, 0x80000000u, 0x00018000u};
    for (int i = 0; i < 11 && i < n; i++) rounded[offset + i] = float_of_bits(special[i]);
    float *scaled = device_of_host(x, all), *moved = device_of_host(m, all), *plain = device_of_host(x, all);
    float *device_rounded = device_of_host(rounded, all), *difference = host_random(all, 263, 1.0f);
    float *subtracted = device_of_host(difference, all);
    vector_subtract(subtracted + offset, plain + offset, n, test_stream);
    cpu::vector_subtract(difference + offset, x + offset, n, test_cpu_stream);
    float *ours_subtracted = host_of_device(subtracted, all);
    check_same(ours_subtracted, difference, sizeof(float) * (size_t)all, "subtract");
    device_release(subtracted, all, "subtract");
    free(ours_subtracted);
    free(difference);
    vector_scale(scaled + offset, n, 0.3f, test_stream);
    vector_momentum(moved + offset, plain + offset, 0.8f, n, test_stream);
    vector_round_bf16(device_rounded + offset, n, test_stream);
    cpu::vector_momentum(m + offset, x + offset, 0.8f, n, test_cpu_stream);
    cpu::vector_scale(x + offset, n, 0.3f, test_cpu_stream);
    cpu::vector_round_bf16(rounded + offset, n, test_cpu_stream);
    float *ours = host_of_device(scaled, all), *ours_rounded = host_of_device(device_rounded, all);
    check_same(ours, x, sizeof(float) * (size_t)all, "scale");
    check_same(ours_rounded, rounded, sizeof(float) * (size_t)all, "round");
    check_device(moved, m, all, 1e-6, "momentum");
    device_release(scaled, all, "scale");
    device_release(plain, all, "x");
    device_release(device_rounded, all, "round");
    free(ours);
    free(ours_rounded);
    free(rounded);
    free(x);
}

static void vector_blend_case(int n, int offset) {
    int all = n + offset;
    float *x = host_random(all, 265, 1.0f), *blended = host_random(all, 266, 1.0f),
          *moved = host_random(all, 267, 1.0f);
    float *now = host_random(all, 268, 1.0f), *on_x = device_of_host(x, all), *on_now = device_of_host(now, all);
    float *on_blended = device_of_host(blended, all), *on_moved = device_of_host(moved, all);
    vector_blend(on_blended + offset, on_x + offset, 0.9f, 0.2f, 0.3f, n, test_stream);
    vector_drift(on_moved + offset, on_now + offset, on_x + offset, 0.8f, n, test_stream);
    cpu::vector_blend(blended + offset, x + offset, 0.9f, 0.2f, 0.3f, n, test_cpu_stream);
    cpu::vector_drift(moved + offset, now + offset, x + offset, 0.8f, n, test_cpu_stream);
    check_device(on_blended, blended, all, 1e-6, "blend");
    check_device(on_moved, moved, all, 1e-6, "drift");
    device_release(on_x, all, "x");
    device_release(on_now, all, "now");
    free(x);
    free(now);
}

// to: which of the vectors the mean goes to, or count for another.
static void vector_mean_case(int n, int count, int to, int offset) {
    int all = n + offset;
    float *host[257], *device[257], *expected = host_nan(all);
    for (int r = 0; r <= count; r++) {
        float *values = host_random(all, 300 + (uint32_t)r, 1.0f);
        device[r] = device_of_host(values, all) + offset, host[r] = values + offset;
    }
    cpu::vector_mean(expected + offset, host, count, n, test_cpu_stream);
    vector_mean(device[to], device, count, n, test_stream);
    for (int r = 0; r <= count; r++) {
        float *ours = host_of_device(device[r], n);
        check_same(ours, r == to ? expected + offset : host[r], sizeof(float) * (size_t)n, "mean");
        device_release(device[r] - offset, all, "mean");
        free(ours);
        free(host[r] - offset);
    }
    free(expected);
}

// The sum goes on from what is there. In double, so that the order is not seen at this tolerance.
static void vector_sum_case(int n) {
    float *x = host_random(n, 281, 1.0f), *device_x = device_of_host(x, n);
    double expected = 3.25, sum = 3.25, *total = (double *)device_alloc(sizeof(double));
    device_copy(total, &sum, sizeof sum, test_stream);
    for (int twice = 0; twice < 2; twice++) {
        cpu::vector_sum(&expected, x, n, test_cpu_stream);
        vector_sum(total, device_x, n, test_stream);
    }
    device_copy(&sum, total, sizeof sum, test_stream);
    check(fabs(sum - expected) <= 1e-13 * n + 1e-13, "sum of %d: %.17g, %.17g", n, sum, expected);
    device_free(total);
    device_release(device_x, n, "x");
    free(x);
}

static void vector_dot_case(int n) {
    float *a = host_random(n + 3, 271, 1.0f), *b = host_random(n + 3, 272, 1.0f);
    double squares = cpu::sum_of_squares(a, n, test_cpu_stream), dot = cpu::vector_dot(a, b, n, test_cpu_stream);
    double scale = sqrt(squares * cpu::sum_of_squares(b, n, test_cpu_stream)), first[2] = {0};
    for (int offset = 0; offset < 4; offset++) {
        float *spaced = host_nan(n + offset);
        memcpy(spaced + offset, a, sizeof(float) * (size_t)n);
        float *device_a = device_of_host(spaced, n + offset), *device_b = device_of_host(b, n);
        double sums[2] = {sum_of_squares(device_a + offset, n, test_stream),
                          vector_dot(device_a + offset, device_b, n, test_stream)};
        check(fabs(sums[0] - squares) <= 1e-13 * squares, "sum of squares of %d: %.17g, %.17g", n, sums[0], squares);
        check(fabs(sums[1] - dot) <= 1e-13 * scale, "dot of %d: %.17g, %.17g", n, sums[1], dot);
        if (offset == 0) memcpy(first, sums, sizeof sums);
        check_same(sums, first, sizeof sums, "dots at another address");
        device_release(device_a, n + offset, "a");
        device_release(device_b, n, "b");
        free(spaced);
    }
    free(a);
    free(b);
}

static void test_cuda_vector(void) {
    static const int sizes[] = {1, 3, 4, 5, 1023, 1024, 4101}, dots[] = {1, 4, 1023, 1025, 4096, 4097, 70001};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) vector_case(sizes[i], 0), vector_blend_case(sizes[i], 0);
    for (int offset = 1; offset < 4; offset++) vector_case(1030, offset), vector_blend_case(1030, offset);
    for (size_t i = 0; i < sizeof dots / sizeof *dots; i++) vector_dot_case(dots[i]), vector_sum_case(dots[i]);
    vector_dot_case(DOT_BLOCKS * DOT_BLOCK * 4 + 7); // threads take a second quad
    vector_mean_case(1030, 1, 1, 0);
    vector_mean_case(1030, 2, 0, 0);
    vector_mean_case(7, 3, 2, 0);
    vector_mean_case(65, 5, 5, 1);
    vector_mean_case(9, 256, 255, 0);
    Stream *other = NULL;
    float *none[257] = {NULL};
    need(stream_create(&other, PRECISION_FP32, 1), "stream");
    vector_mean(NULL, none, 257, 1, other);
    check(stream_check(other) != 0, "257 vectors were accepted");
    check_message("257 vectors", "257 vectors");
    stream_destroy(other);
}
