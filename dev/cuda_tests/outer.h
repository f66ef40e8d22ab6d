// Outer steps: n around packs and blocks, any address.
// Must fail for: error overwritten, the plain momentum instead of Nesterov's, local mixed with the old global, the tail
// left out.
namespace cpu {
#include "../../llmc/outer.h"
}
#include "../../llmc/outer.cuh"

static void outer_case(int n, int offset) {
    enum { ERROR, GLOBAL, LOCAL, MOMENT, PENDING, COUNT };
    static const char *const names[COUNT] = {"error", "global", "local", "moment", "pending"};
    int all = n + offset;
    float *host[COUNT], *device[COUNT];
    for (int i = 0; i < COUNT; i++) {
        host[i] = host_random(all, 281 + (uint32_t)i, 1.0f);
        device[i] = device_of_host(host[i], all);
    }
    outer_delta(device[ERROR] + offset, device[GLOBAL] + offset, device[LOCAL] + offset, n, test_stream);
    outer_step(device[GLOBAL] + offset, device[MOMENT] + offset, device[LOCAL] + offset, device[PENDING] + offset, 0.7f,
               0.9f, 0.25f, n, test_stream);
    cpu::outer_delta(host[ERROR] + offset, host[GLOBAL] + offset, host[LOCAL] + offset, n, test_cpu_stream);
    cpu::outer_step(host[GLOBAL] + offset, host[MOMENT] + offset, host[LOCAL] + offset, host[PENDING] + offset, 0.7f,
                    0.9f, 0.25f, n, test_cpu_stream);
    for (int i = 0; i < COUNT; i++) check_device(device[i], host[i], all, 1e-6, names[i]);
}

static void test_cuda_outer(void) {
    static const int sizes[] = {1, 3, 4, 5, 1023, 1024, 4101};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) outer_case(sizes[i], 0);
    for (int offset = 1; offset < 4; offset++) outer_case(1030, offset);
}
