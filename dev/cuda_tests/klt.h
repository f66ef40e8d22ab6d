// The transform codec: every op against the CPU's, and whole messages made by one side and read by the other. Symbols
// are the same where y is: the quantizer is one function. The entropy coder is the host's on both sides.
// Must fail for: offset of the next row, a prediction that is added, draws of another token or component, weight left
// out, the bits of K % 4 components.
#include "../../llmc/klt_coder.h"
#include <stddef.h> // size_t

namespace cpu {
#include "../../llmc/klt.h"
}
#include "../../llmc/klt.cuh"

// center, place and measure of n rows of H values.
static void klt_ops_case(int n, int H, int given) {
    int64_t values = (int64_t)n * H;
    float *x = host_random_x(values, 600, 1.0f), *offset = host_random(H, 601, 1.0f);
    float *predicted = host_random(values, 602, 1.0f), *expected = host_nan(values), *sizes = host_nan(n);
    float *weight = host_random(H, 603, 1.0f), *back = host_nan(values), *embedded = host_nan(values);
    int32_t *kinds = (int32_t *)malloc(sizeof *kinds * (size_t)n);
    uint32_t *tokens = (uint32_t *)malloc(sizeof *tokens * (size_t)n);
    for (int t = 0; t < n; t++) kinds[t] = (5 * t + 3) % n, tokens[t] = (uint32_t)((3 * t + 1) % n);
    floatX *device_x = device_of_host_x(x, values), *device_back = device_nan<floatX>(values);
    float *device_offset = device_of_host(offset, H), *device_predicted = device_of_host(predicted, values);
    float *device_weight = device_of_host(weight, H), *centered = device_nan<float>(values);
    float *measured = device_nan<float>(n), *device_embedded = device_nan<float>(values);
    int32_t *device_kinds = device_of_host(kinds, n);
    uint32_t *device_tokens = device_of_host(tokens, n);
    cpu::klt_embed(embedded, tokens, predicted, n, H, test_cpu_stream);
    klt_embed(device_embedded, device_tokens, device_predicted, n, H, test_stream);
    check_device(device_embedded, embedded, values, FLOATX_TOL, "embed");
    cpu::klt_center(expected, x, given ? offset : NULL, given ? predicted : NULL, kinds, n, H, test_cpu_stream);
    cpu::klt_measure(sizes, expected, weight, n, H, test_cpu_stream);
    cpu::klt_place(back, expected, given ? offset : NULL, given ? predicted : NULL, kinds, n, H, test_cpu_stream);
    klt_center(centered, device_x, given ? device_offset : NULL, given ? device_predicted : NULL, device_kinds, n, H,
               test_stream);
    klt_measure(measured, centered, device_weight, n, H, test_stream);
    klt_place(device_back, centered, given ? device_offset : NULL, given ? device_predicted : NULL, device_kinds, n, H,
              test_stream);
    check_device(measured, sizes, n, 1e-5, "measure");
    check_device(device_back, back, values, FLOATX_TOL, "place");
    check_device(centered, expected, values, 1e-6, "center");
    device_release(device_x, values, "x");
    device_release(device_offset, H, "offset");
    device_release(device_predicted, values, "predicted");
    device_release(device_weight, H, "weight");
    device_release(device_kinds, n, "kinds");
    device_release(device_tokens, n, "tokens");
    free(kinds);
    free(tokens);
    free(x);
    free(offset);
    free(predicted);
    free(weight);
}

// Symbols and what they stand for, bit for bit up to the division's and the sum's rounding.
static void klt_quantizer_case(int n, int K, int stochastic, int fixed) {
    int64_t values = (int64_t)n * K;
    float *y = host_random(values, 610, 3.0f), *grid = host_random(K, 611, 1.0f), *half = host_nan(K);
    float *first = host_nan(K), *centroids = host_random(2 * KLT_CLASSES, 612, 0.1f), *expected = host_nan(values);
    int16_t *symbols = (int16_t *)malloc(sizeof *symbols * (size_t)values), *scales = (int16_t *)calloc((size_t)n, 2);
    for (int k = 0; k < K; k++) grid[k] = 0.5f + fabsf(grid[k]), half[k] = 3.5f, first[k] = (float)(k % 40);
    for (int t = 0; t < n; t++) scales[t] = (int16_t)(t % 7 - 3);
    float *device_y = device_of_host(y, values), *restored = device_nan<float>(values);
    float *device_grid = device_of_host(grid, K), *device_half = device_of_host(half, K);
    float *device_first = device_of_host(first, K), *device_centroids = device_of_host(centroids, 2 * KLT_CLASSES);
    int16_t *device_symbols = device_nan<int16_t>(values), *device_scales = device_of_host(scales, n);
    KltQuantizer q = {K, stochastic, 0.7f, 0.45f, 77, fixed ? grid : NULL, fixed ? half : NULL, first, centroids};
    KltQuantizer device_q = q;
    device_q.grid = fixed ? device_grid : NULL, device_q.half = fixed ? device_half : NULL;
    device_q.first_class = device_first, device_q.centroids = device_centroids;
    cpu::klt_quantize(symbols, y, q, n, test_cpu_stream);
    cpu::klt_restore(expected, symbols, scales, q, n, test_cpu_stream);
    klt_quantize(device_symbols, device_y, device_q, n, test_stream);
    klt_restore(restored, device_symbols, device_scales, device_q, n, test_stream);
    int16_t *ours = host_of_device(device_symbols, values);
    int64_t differ = 0;
    for (int64_t i = 0; i < values; i++) differ += ours[i] != symbols[i];
    check(differ <= values / 500, "%lld of %lld symbols differ", (long long)differ, (long long)values);
    if (differ == 0)
        check_device(restored, expected, values, 1e-6, "restore");
    else
        device_release(restored, values, "restore"), free(expected);
    device_release(device_y, values, "y");
    device_release(device_grid, K, "grid");
    device_release(device_half, K, "half");
    device_release(device_first, K, "classes");
    device_release(device_centroids, 2 * KLT_CLASSES, "centroids");
    device_release(device_symbols, values, "symbols");
    device_release(device_scales, n, "scales");
    free(ours);
    free(symbols);
    free(scales);
    free(y);
    free(grid);
    free(half);
    free(first);
    free(centroids);
}

// A table learned by the device, used by both: what one side sends the other reads, to the rounding of floatX.
static void klt_message_case(int stochastic, int fixed, int predicted) {
    enum { n = 300, H = 24, V = 50 };
    float *x = host_random_x(n * H, 620, 1.0f), *embed = host_random(V * H, 621, 1.0f), *e = host_nan(n * H);
    uint32_t tokens[n];
    for (int t = 0; t < n; t++) tokens[t] = (uint32_t)(7 * t % V);
    for (int i = 0; i < n * H; i++) x[i] = to_float(to_floatX(x[i] * expf(-0.2f * (float)(i % H))));
    for (int i = 0; i < n * H; i++) e[i] = embed[tokens[i / H] * H + i % H];
    floatX *device_x = device_of_host_x(x, n * H), *device_e = device_of_host_x(e, n * H);
    floatX *device_out = device_nan<floatX>(n * H);
    float *device_embed = device_of_host(embed, V * H), *plain_e = device_nan<float>(n * H);
    klt_center(plain_e, device_e, NULL, NULL, NULL, n, H, test_stream);
    KltMoments moments, embedding;
    KltWork work = {{NULL, 0}, {NULL, 0}, NULL, 0};
    cpu::KltWork cpu_work = {{NULL, 0}, {NULL, 0}, NULL, 0};
    KltTable table, cpu_table;
    int64_t n_bytes = 0;
    KltSettings settings = {9, stochastic, fixed, 0.45f, 0.3, 1e-3, 40.0, 5, 1.0};
    KltReport report;
    check(klt_moments_alloc(&moments, H, predicted, n) == 0 && klt_moments_alloc(&embedding, H, 0, 0) == 0, "memory");
    klt_moments_begin(&moments, 0.5f, test_stream);
    klt_moments_add(&moments, device_x, plain_e, tokens, n, 1, stochastic, &work, test_stream);
    klt_moments_add(&embedding, device_e, NULL, NULL, n, 1, 0, &work, test_stream);
    KltSources from = {&moments, predicted ? &embedding : NULL, predicted ? &moments : NULL, device_embed};
    unsigned char *blob = klt_learn(&from, &settings, &work, &n_bytes, &report, test_stream);
    check(blob != NULL, "%s", error_message);
    check(klt_table_load(&table, blob, n_bytes, H, test_stream) == 0, "%s", error_message);
    check(cpu::klt_table_load(&cpu_table, blob, n_bytes, H, test_cpu_stream) == 0, "%s", error_message);
    KltEnd ours = {&table, &work, device_embed, 5.0, {0.0, 0.0}},
           theirs = {&cpu_table, &cpu_work, embed, 5.0, {0.0, 0.0}};
    KltMessage which = {1, 2, 3, 4, 5};
    unsigned char message[1 << 14];
    float *direct = host_nan(n * H), *crossed = host_nan(n * H);
    int64_t sent = cpu::klt_encode(&theirs, &which, tokens, x, n, H, message, sizeof message, test_cpu_stream);
    check(sent > 0 && cpu::klt_decode(&theirs, &which, tokens, message, sent, direct, n, H, test_cpu_stream) == 0, "%s",
          error_message);
    check(klt_decode(&ours, &which, tokens, message, sent, device_out, n, H, test_stream) == 0, "%s", error_message);
    float *arrived = host_of_device_x(device_out, n * H);
    check_close(arrived, direct, n * H, 2 * FLOATX_TOL, "the CPU's message");
    sent = klt_encode(&ours, &which, tokens, device_x, n, H, message, sizeof message, test_stream);
    check(sent > 0, "%s", error_message);
    check(klt_decode(&ours, &which, tokens, message, sent - 1, device_out, n, H, test_stream) != 0, "a byte less");
    check(klt_decode(&ours, &which, tokens, message, sent, device_out, n, H, test_stream) == 0, "%s", error_message);
    check(cpu::klt_decode(&theirs, &which, tokens, message, sent, crossed, n, H, test_cpu_stream) == 0, "%s",
          error_message);
    check_device(device_out, crossed, n * H, 2 * FLOATX_TOL, "the device's message");
    check_close(arrived, x, n * H, 0.49, "what arrives");
    klt_moments_free(&moments);
    klt_moments_free(&embedding);
    klt_work_free(&work);
    cpu::klt_work_free(&cpu_work);
    klt_table_free(&table);
    cpu::klt_table_free(&cpu_table);
    device_release(device_x, n * H, "x");
    device_release(device_e, n * H, "e");
    device_release(device_embed, V * H, "embed");
    device_release(plain_e, n * H, "e in fp32");
    free(blob);
    free(arrived);
    free(direct);
    free(x);
    free(e);
    free(embed);
}

static void test_cuda_klt(void) {
    static const struct { int n, H; } sizes[] = {{1, 1}, {3, 5}, {17, 64}, {5, 129}, {9, 33}};
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
        for (int given = 0; given < 2; given++) klt_ops_case(sizes[s].n, sizes[s].H, given);
        for (int kind = 0; kind < 4; kind++) klt_quantizer_case(sizes[s].n, sizes[s].H, kind & 1, kind >> 1);
    }
    for (int kind = 0; kind < 4; kind++) klt_message_case(kind & 1, kind >> 1, 0);
    klt_message_case(0, 0, 1);
}
