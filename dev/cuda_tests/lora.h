// Adapters' products against the CPU's in fp32 on the same rounded numbers: one module, two of three, three beside each
// other, at odd sizes. Must fail for: the scale left out of one direction, a module's columns shifted, dx overwritten.
#include "../../llmc/lora_config.h"

namespace cpu {
#include "../../llmc/lora.h"
}
#include "../../llmc/lora.cuh"

typedef struct {
    int N, K, M, rank, n;
    int at[3], width[3];
} LoraSizes;

// The weights as the products round them.
static void round_to_floatX(float *values, int64_t n) {
    for (int64_t i = 0; i < n; i++) values[i] = to_float(to_floatX(values[i]));
}

static void lora_case(const LoraSizes *c, int accumulate) {
    int64_t n_x = (int64_t)c->N * c->K, n_y = (int64_t)c->N * c->M, all = c->n * c->rank;
    int64_t n_mid = c->N * all, n_a = all * c->K;
    float *x = host_random_x(n_x, 251, 1.0f), *y = host_random_x(n_y, 252, 1.0f), *dy = host_random_x(n_y, 253, 1.0f);
    float *dx = host_random_x(n_x, 254, 1.0f), *a = host_random(n_a, 255, 1.0f), *da = host_random(n_a, 256, 1.0f);
    float *mid = host_nan(n_mid), *dmid = host_nan(n_mid), *b[3], *db[3];
    floatX *on_x = device_of_host_x(x, n_x), *on_y = device_of_host_x(y, n_y), *on_dy = device_of_host_x(dy, n_y);
    floatX *on_dx = device_of_host_x(dx, n_x), *on_mid = device_nan<floatX>(n_mid),
           *on_dmid = device_nan<floatX>(n_mid);
    float *on_da = accumulate ? device_of_host(da, n_a) : device_nan<float>(n_a), *on_a = device_of_host(a, n_a);
    LoraGroup host, device;
    memset(&host, 0, sizeof host);
    host.n = c->n, host.rank = c->rank, host.scale = 0.75f;
    device = host;
    for (int i = 0; i < c->n; i++) {
        int64_t n_b = (int64_t)c->width[i] * c->rank;
        b[i] = host_random(n_b, 257 + (uint64_t)i, 1.0f), db[i] = host_random(n_b, 261 + (uint64_t)i, 1.0f);
        host.at[i] = device.at[i] = c->at[i], host.width[i] = device.width[i] = c->width[i];
        device.b[i] = device_of_host(b[i], n_b);
        device.db[i] = accumulate ? device_of_host(db[i], n_b) : device_nan<float>(n_b);
        round_to_floatX(b[i], n_b);
        host.b[i] = b[i], host.db[i] = db[i];
    }
    device.a = on_a, device.da = on_da;
    round_to_floatX(a, n_a);
    host.a = a, host.da = da;
    lora_reduce(on_mid, on_x, &device, c->N, c->K, test_stream);
    lora_expand(on_y, on_mid, &device, c->N, c->M, test_stream);
    lora_backward(on_dx, on_dmid, on_dy, on_mid, on_x, &device, c->N, c->K, c->M, accumulate, test_stream);
    cpu::lora_reduce(mid, x, &host, c->N, c->K, test_cpu_stream);
    float *given = host_of_device_x(on_mid, n_mid); // what the other products see is rounded
    cpu::lora_expand(y, given, &host, c->N, c->M, test_cpu_stream);
    cpu::lora_backward(dx, dmid, dy, given, x, &host, c->N, c->K, c->M, accumulate, test_cpu_stream);
    check_device(on_mid, mid, n_mid, FLOATX_TOL, "mid");
    check_device(on_y, y, n_y, FLOATX_TOL, "y");
    check_device(on_dx, dx, n_x, 2 * FLOATX_TOL, "dx");
    check_device(on_dmid, dmid, n_mid, FLOATX_TOL, "dmid");
    check_device(on_da, da, n_a, 2 * FLOATX_TOL, "dA");
    for (int i = 0; i < c->n; i++) {
        int64_t n_b = (int64_t)c->width[i] * c->rank;
        check_device(device.db[i], db[i], n_b, 1e-6, "dB");
        device_release(device.b[i], n_b, "B");
        free(b[i]);
    }
    device_release(on_x, n_x, "x");
    device_release(on_dy, n_y, "dy");
    device_release(on_a, n_a, "A");
    free(given);
    free(x);
    free(dy);
    free(a);
}

static void test_cuda_lora(void) {
    static const LoraSizes cases[] = {{1, 3, 5, 1, 1, {0}, {5}},
                                      {5, 7, 11, 2, 1, {0}, {11}},
                                      {19, 24, 47, 3, 3, {0, 31, 39}, {31, 8, 8}},
                                      {33, 17, 40, 5, 2, {0, 30}, {20, 10}},
                                      {64, 65, 33, 8, 2, {0, 16}, {16, 17}}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (int accumulate = 0; accumulate < 2; accumulate++) lora_case(&cases[i], accumulate);
}
