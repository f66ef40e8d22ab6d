// Checks every CUDA op against its CPU twin. Built by nvcc it runs on the GPU; built by g++ with -DCUDA_EMULATOR it
// runs anywhere (dev/cuda_emulator). Prints "N passed, N failed" and exits non-zero on a failure; `test_cuda NAME` runs
// the tests whose name contains NAME. A run of all tests also fails for a kernel that none of them launches.
//
// How to add a test: a header dev/cuda_tests/<op>.h with static void test_cuda_<op>(void); below, its include and its
// line in the table. The CPU's op is included within `namespace cpu { }`, the CUDA one outside; headers that both need
// (shapes, keys, conversions) come before, here. See dev/cuda_tests/emulator.h for a small one.
#define TESTING // small shapes meet the limits of large ones
#include "dev/cuda_tests/harness.h"

// ---------------------------------------------------------------------------------------------------------------------
// The tests

#include "dev/cuda_tests/emulator.h"
#include "dev/cuda_tests/adamw.h"
#include "dev/cuda_tests/codec.h"
#include "dev/cuda_tests/cross_entropy.h"
#include "dev/cuda_tests/embedding.h"
#include "dev/cuda_tests/mask.h"
#include "dev/cuda_tests/outer.h"
#include "dev/cuda_tests/rmsnorm.h"
#include "dev/cuda_tests/rope.h"
#include "dev/cuda_tests/swiglu.h"
#include "dev/cuda_tests/vector.h"
#include "dev/cuda_tests/linalg.h"
#include "dev/cuda_tests/mask.h"
#include "dev/cuda_tests/matmul.h"
#include "dev/cuda_tests/nccl.h"
#include "dev/cuda_tests/outer.h"
#include "dev/cuda_tests/powersgd.h"
#include "dev/cuda_tests/rmsnorm.h"
#include "dev/cuda_tests/rope.h"
#include "dev/cuda_tests/spectral.h"
#include "dev/cuda_tests/attention.h"

static const struct {
    const char *name;
    void (*run)(void);
} tests[] = {
    {"emulator", test_cuda_emulator},
    {"adamw", test_cuda_adamw},
    {"codec", test_cuda_codec},
    {"cross_entropy", test_cuda_cross_entropy},
    {"embedding", test_cuda_embedding},
    {"mask", test_cuda_mask},
    {"outer", test_cuda_outer},
    {"rmsnorm", test_cuda_rmsnorm},
    {"rope", test_cuda_rope},
    {"swiglu", test_cuda_swiglu},
    {"vector", test_cuda_vector},
    {"matmul", test_cuda_matmul},
    {"linalg", test_cuda_linalg},
    {"spectral", test_cuda_spectral},
    {"powersgd", test_cuda_powersgd},
    {"nccl", test_cuda_nccl},
    {"attention", test_cuda_attention},
};

#if defined(CUDA_EMULATOR) && !defined(FLOATX_FP32) // with fp32, the kernels for bf16 have no work
// The name of the kernel whose __global__ ends at text; returns where it ends.
static const char *kernel_name(char name[128], const char *text) {
    size_t n = 0;
    for (;;) {
        while (*text != '\0' && !isalnum((unsigned char)*text) && *text != '_') text++;
        for (n = 0; isalnum((unsigned char)text[n]) || text[n] == '_'; n++) {
        }
        if (n == 0 || (text[n] == '(' && strncmp(text, "__launch_bounds__", n) != 0)) break;
        text += n;
        if (*text == '(') text = strchr(text, ')');
        if (text == NULL) text = "";
    }
    snprintf(name, 128, "%.*s", (int)n, text);
    return text + n;
}

// Every __global__ function of llmc has run.
static void test_all_launched(void) {
    glob_t files;
    if (!check(glob("llmc/*.cuh", 0, NULL, &files) == 0, "llmc/*.cuh: not found from this folder")) return;
    for (size_t i = 0; i < files.gl_pathc; i++) {
        static char text[1 << 20];
        FILE *file = fopen(files.gl_pathv[i], "r");
        size_t n = file != NULL ? fread(text, 1, sizeof text - 1, file) : 0;
        text[n] = '\0';
        if (file != NULL) fclose(file);
        for (const char *at = strstr(text, "__global__"); at != NULL; at = strstr(at, "__global__")) {
            char name[128];
            at = kernel_name(name, at + strlen("__global__"));
            check(emu_launched(name), "%s: no test launches the kernel %s", files.gl_pathv[i], name);
        }
    }
    globfree(&files);
}
#endif

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

int main(int argc, char **argv) {
#ifdef CUDA_EMULATOR
    if (getenv("EMU_DEVICES") == NULL) emu::n_devices = 3; // sums over devices take as many
#endif
    need(stream_create(&test_stream, PRECISION_BF16, 1), "start");
    need(cpu::stream_create(&test_cpu_stream, cpu::PRECISION_FP32, 1), "start");
    for (size_t i = 0; i < sizeof tests / sizeof *tests; i++) {
        if (argc > 1 && strstr(tests[i].name, argv[1]) == NULL) continue;
        int failed = checks_failed;
        double start = seconds();
        test_name = tests[i].name;
        tests[i].run();
        check(stream_check(test_stream) == 0, "the stream has failed: %s", error_message);
        printf("%-4s %-40s %6.2f s\n", checks_failed == failed ? "ok" : "FAIL", test_name, seconds() - start);
        fflush(stdout);
    }
#if defined(CUDA_EMULATOR) && !defined(FLOATX_FP32)
    test_name = "all_launched";
    if (argc == 1) test_all_launched();
#endif
    stream_destroy(test_stream);
    cpu::stream_destroy(test_cpu_stream);
    printf("%d passed, %d failed\n", checks_passed, checks_failed);
    return checks_failed != 0 || checks_passed == 0; // a name that fits no test is a failure too
}
