// SwiGLU: F straddles packs and the 256 packs of a turn; gates large enough for both ends of the sigmoid.
// Must fail for: gate and up swapped, (1 - s) left out, the second turn left out, in place reading what it has written.
#include <stddef.h> // size_t

namespace cpu {
#include "../../llmc/swiglu.h"
}
#include "../../llmc/swiglu.cuh"

static void swiglu_case(int N, int F, float scale, int offset) {
    int n = N * F;
    float *gate_up = host_random_x(2 * n + offset, 231, scale), *dout = host_random_x(n, 232, 1.0f);
    float *out = host_nan(n), *dgate_up = host_nan(2 * n);
    floatX *device_in = device_of_host_x(gate_up, 2 * n + offset), *device_dout = device_of_host_x(dout, n);
    floatX *device_out = device_nan<floatX>(n), *device_d = device_nan<floatX>(2 * n);
    swiglu_forward(device_out, device_in + offset, N, F, test_stream);
    swiglu_backward(device_d, device_dout, device_in + offset, N, F, test_stream);
    swiglu_backward(device_in + offset, device_dout, device_in + offset, N, F, test_stream);
    cpu::swiglu_forward(out, gate_up + offset, N, F, test_cpu_stream);
    cpu::swiglu_backward(dgate_up, dout, gate_up + offset, N, F, test_cpu_stream);
    floatX *apart = host_of_device(device_d, 2 * n), *in_place = host_of_device(device_in, 2 * n + offset);
    check_same(in_place + offset, apart, sizeof(floatX) * 2 * (size_t)n, "backward in place");
    check_device(device_out, out, n, FLOATX_TOL, "out");
    check_device(device_d, dgate_up, 2 * n, FLOATX_TOL, "dgate_up");
    device_release(device_in, 2 * n + offset, "gate_up");
    device_release(device_dout, n, "dout");
    free(apart);
    free(in_place);
    free(gate_up);
    free(dout);
}

static void test_cuda_swiglu(void) {
    static const struct {
        int N, F;
        float scale;
    } cases[] = {{1, 1, 1}, {3, 7, 1}, {5, 64, 1}, {5, 64, 30}, {2, 2056, 1}, {3, 2049, 1}, {2, 1028, 3}, {300, 8, 1}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) swiglu_case(cases[i].N, cases[i].F, cases[i].scale, 0);
    swiglu_case(3, 64, 1.0f, 1); // addresses that are no multiples of 16
}
