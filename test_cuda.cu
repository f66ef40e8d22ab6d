// Checks every CUDA op against its CPU twin. Built by nvcc it runs on the GPU; built by g++ with -DCUDA_EMULATOR it
// runs anywhere (dev/cuda_emulator). Prints "N passed, N failed" and exits non-zero on a failure; `test_cuda NAMES`
// runs the tests whose name contains one of NAMES. A run of all tests also fails for a kernel that none of them
// launches.
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
#include "dev/cuda_tests/attention.h"
#include "dev/cuda_tests/codec.h"
#include "dev/cuda_tests/codecs.h"
#include "dev/cuda_tests/cross_entropy.h"
#include "dev/cuda_tests/embedding.h"
#include "dev/cuda_tests/families.h"
#include "dev/cuda_tests/klt.h"
#include "dev/cuda_tests/linalg.h"
#include "dev/cuda_tests/lora.h"
#include "dev/cuda_tests/mask.h"
#include "dev/cuda_tests/matmul.h"
#include "dev/cuda_tests/muon.h"
#include "dev/cuda_tests/nccl.h"
#include "dev/cuda_tests/nesterov.h"
#include "dev/cuda_tests/outer.h"
#include "dev/cuda_tests/powersgd.h"
#include "dev/cuda_tests/rmsnorm.h"
#include "dev/cuda_tests/rope.h"
#include "dev/cuda_tests/rotate.h"
#include "dev/cuda_tests/spectral.h"
#include "dev/cuda_tests/store.h"
#include "dev/cuda_tests/swiglu.h"
#include "dev/cuda_tests/vector.h"

static const struct {
    const char *name;
    void (*run)(void);
} tests[] = {
    // clang-format off
    {"emulator", test_cuda_emulator},
    {"adamw", test_cuda_adamw},
    {"attention", test_cuda_attention},
    {"codec", test_cuda_codec},
    {"codecs", test_cuda_codecs},
    {"cross_entropy", test_cuda_cross_entropy},
    {"embedding", test_cuda_embedding},
    {"families", test_cuda_families},
    {"klt", test_cuda_klt},
    {"linalg", test_cuda_linalg},
    {"lora", test_cuda_lora},
    {"mask", test_cuda_mask},
    {"matmul", test_cuda_matmul},
    {"muon", test_cuda_muon},
    {"nccl", test_cuda_nccl},
    {"nesterov", test_cuda_nesterov},
    {"outer", test_cuda_outer},
    {"powersgd", test_cuda_powersgd},
    {"rmsnorm", test_cuda_rmsnorm},
    {"rope", test_cuda_rope},
    {"rotate", test_cuda_rotate},
    {"spectral", test_cuda_spectral},
    {"store", test_cuda_store},
    {"swiglu", test_cuda_swiglu},
    {"vector", test_cuda_vector},
    // clang-format on
};

#if defined(CUDA_EMULATOR) && !defined(FLOATX_FP32) // with fp32, the kernels for bf16 have no work
#define SOURCE_MAX (1 << 20)

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

static void read_source(char text[SOURCE_MAX], const char *path) {
    FILE *file = fopen(path, "r");
    size_t n = file != NULL ? fread(text, 1, SOURCE_MAX - 1, file) : 0;
    text[n] = '\0';
    if (file != NULL) fclose(file);
    check(n > 0 && n < SOURCE_MAX - 1, "%s: not read whole from this folder", path);
}

// Every __global__ function of llmc has run.
static void test_all_launched(void) {
    glob_t files;
    int n_kernels = 0, column = 0;
    if (!check(glob("llmc/*.cuh", 0, NULL, &files) == 0, "llmc/*.cuh: not found from this folder")) return;
    for (size_t i = 0; i < files.gl_pathc; i++) {
        static char text[SOURCE_MAX];
        read_source(text, files.gl_pathv[i]);
        for (const char *at = strstr(text, "__global__"); at != NULL; at = strstr(at, "__global__")) {
            char name[128];
            at = kernel_name(name, at + strlen("__global__"));
            check(emu_launched(name), "%s: no test launches the kernel %s", files.gl_pathv[i], name);
            column += printf(column == 0 ? "kernels: %s" : " %s", name);
            if (column > 100) printf("\n"), column = 0;
            n_kernels++;
        }
    }
    printf("\n%d kernels have run\n", n_kernels);
    globfree(&files);
}

// 1 if text has a function of this name: the word, then a parenthesis.
static int has_function(const char *text, const char *name) {
    size_t n = strlen(name);
    for (const char *at = strstr(text, name); at != NULL; at = strstr(at + 1, name))
        if (at[n] == '(' && (at == text || (!isalnum((unsigned char)at[-1]) && at[-1] != '_'))) return 1;
    return 0;
}

// Every op of the CPU has its twin: a header that names the device has a .cuh of its name, and what the program or the
// tests of the CPU call of it on a stream is there too.
static void test_twins(void) {
    static char text[SOURCE_MAX], twin[SOURCE_MAX], program[SOURCE_MAX], tests_of_cpu[SOURCE_MAX];
    glob_t files;
    int n_ops = 0;
    if (!check(glob("llmc/*.h", 0, NULL, &files) == 0, "llmc/*.h: not found from this folder")) return;
    read_source(program, "train_gpt.cu");
    read_source(tests_of_cpu, "test_gpt.cu");
    for (size_t i = 0; i < files.gl_pathc; i++) {
        char path[300], name[128];
        const char *header = files.gl_pathv[i];
        read_source(text, header);
        int is_half = strstr(header, "attention_bf16") != NULL || strstr(header, "attention_fp32") != NULL;
        if (strstr(text, "#include \"device.h\"") == NULL || is_half) continue; // halves: attention.h calls them
        snprintf(path, sizeof path, "%.*s.cuh", (int)strlen(header) - 2, header);
        read_source(twin, path);
        for (const char *at = strstr(text, "static inline "); at != NULL; at = strstr(at, "static inline ")) {
            const char *open = strchr(at, '('), *close = open != NULL ? strchr(open, ')') : NULL;
            if (close == NULL) break;
            const char *stream = strstr(open, "Stream *stream"), *start = open;
            while (isalnum((unsigned char)start[-1]) || start[-1] == '_') start--;
            snprintf(name, sizeof name, "%.*s", (int)(open - start), start);
            at = close;
            if (stream == NULL || stream > close) continue;
            if (!has_function(program, name) && !has_function(tests_of_cpu, name)) continue;
            check(has_function(twin, name) || strstr(twin, "svd.h") != NULL, "%s: no twin of %s", path, name);
            n_ops++;
        }
    }
    check(n_ops > 40, "only %d ops were found", n_ops);
    globfree(&files);
}
#endif

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

// 1 if the words of the command line ask for a test.
static int is_asked(const char *name, int argc, char **argv) {
    int asked = argc == 1;
    for (int i = 1; i < argc; i++) asked |= strstr(name, argv[i]) != NULL;
    return asked;
}

int main(int argc, char **argv) {
#ifdef CUDA_EMULATOR
    if (getenv("EMU_DEVICES") == NULL) emu::n_devices = 3; // sums over devices take as many
#endif
    need(stream_create(&test_stream, PRECISION_BF16, 1), "start");
    need(cpu::stream_create(&test_cpu_stream, cpu::PRECISION_FP32, 1), "start");
    for (size_t i = 0; i < sizeof tests / sizeof *tests; i++) {
        if (!is_asked(tests[i].name, argc, argv)) continue;
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
    test_name = "twins";
    if (argc == 1) test_twins();
#endif
    stream_destroy(test_stream);
    cpu::stream_destroy(test_cpu_stream);
    printf("%d passed, %d failed\n", checks_passed, checks_failed);
    return checks_failed != 0 || checks_passed == 0; // a name that fits no test is a failure too
}
