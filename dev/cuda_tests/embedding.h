// Embedding: copies are exact, and the backward has the CPU's bits, since both add a row's positions in their order.
// N straddles the tiles of 1024 tokens and C the 256 packs of a turn; tokens that come once, often, only late, always.
// Must fail for: later tiles left out, two owners of one token, dweight overwritten, rows added in another order.
#include <stddef.h> // size_t

namespace cpu {
#include "../../llmc/embedding.h"
}
#include "../../llmc/embedding.cuh"

static void embedding_case(int N, int C, int V, int offset) {
    int n = N * C, n_weight = V * C;
    float *weight = host_random(n_weight + 1, 201, 1.0f), *dout = host_random_x(n, 202, 1.0f);
    float *dweight = host_random(n_weight + 1, 203, 1.0f), *expected = host_nan(n);
    uint32_t *tokens = (uint32_t *)malloc(sizeof(uint32_t) * (size_t)N);
    for (int i = 0; i < N; i++)
        tokens[i] = i % 7 == 3 ? 0 : rand_block(5, RAND_TEST, 0, (uint64_t)i).v[0] % (uint32_t)V;
    if (N > 1) tokens[N - 1] = (uint32_t)V - 1;
    for (int i = 0; i + 1 < N && V > 1; i++) tokens[i] %= (uint32_t)V - 1; // the last token comes last, and only there
    float *device_weight = device_of_host(weight, n_weight + offset);
    float *device_dweight = device_of_host(dweight, n_weight + offset);
    uint32_t *device_tokens = device_of_host(tokens, N);
    floatX *out = device_nan<floatX>(n), *device_dout = device_of_host_x(dout, n);

    embedding_forward(out, device_tokens, device_weight + offset, N, C, test_stream);
    for (int i = 0; i < n; i++) expected[i] = to_float(to_floatX(weight[offset + (int)tokens[i / C] * C + i % C]));
    float *ours = host_of_device_x(out, n);
    check_same(ours, expected, sizeof(float) * (size_t)n, "forward");

    uint16_t *halves = (uint16_t *)malloc(sizeof(uint16_t) * (size_t)(n_weight + offset));
    for (int i = 0; i < n_weight + offset; i++) halves[i] = bf16_of_float(weight[i]);
    uint16_t *device_halves = device_of_host(halves, n_weight + offset);
    embedding_forward_bf16(out, device_tokens, device_halves + offset, N, C, test_stream);
    cpu::embedding_forward_bf16(expected, tokens, halves + offset, N, C, test_cpu_stream);
    float *widened = host_of_device_x(out, n);
    check_same(widened, expected, sizeof(float) * (size_t)n, "forward of bf16");
    device_release(device_halves, n_weight + offset, "halves");
    free(widened);
    free(halves);

    embedding_backward(device_dweight + offset, device_dout, device_tokens, N, C, test_stream);
    cpu::embedding_backward(dweight + offset, dout, tokens, N, C, test_cpu_stream);
    float *sums = host_of_device(device_dweight, n_weight + offset);
    check_same(sums, dweight, sizeof(float) * (size_t)(n_weight + offset), "backward");

    device_release(out, n, "out");
    device_release(device_dout, n, "dout");
    device_release(device_tokens, N, "tokens");
    device_release(device_weight, n_weight + offset, "weight");
    device_release(device_dweight, n_weight + offset, "dweight");
    free(ours);
    free(sums);
    free(weight);
    free(dout);
    free(dweight);
    free(expected);
    free(tokens);
}

static void test_cuda_embedding(void) {
    static const struct {
        int N, C, V;
    } cases[] = {{1, 8, 5},    {37, 19, 11},    {37, 24, 11}, {1023, 8, 300},
                 {1025, 8, 2}, {2051, 16, 700}, {5, 2056, 4}, {9, 1, 1}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) embedding_case(cases[i].N, cases[i].C, cases[i].V, 0);
    embedding_case(37, 24, 11, 1); // addresses that are no multiples of 16
}
