// What the tests of the CUDA ops share: both sides' ground, checks, and guarded arrays on the device.
#ifndef CUDA_TESTS_HARNESS_H
#define CUDA_TESTS_HARNESS_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <ctype.h>    // isalnum
#include <dnnl.h>     // the CPU's matrix products
#include <glob.h>     // glob
#include <limits.h>   // INT_MAX
#include <math.h>     // sqrt, NAN
#include <omp.h>      // the CPU's threads
#include <stdarg.h>   // va_list
#include <stdint.h>   // fixed-width integers
#include <stdio.h>    // printf
#include <stdlib.h>   // calloc
#include <string.h>   // strstr
#include <sys/mman.h> // the CPU's device.h
#include <time.h>     // clock_gettime
#include <unistd.h>   // chdir

#include <cuda_bf16.h>    // __nv_bfloat16
#include <cuda_runtime.h> // the device

#include "../../llmc/attention_shape.h"
#include "../../llmc/dtype.h"
#include "../../llmc/error.h"
#include "../../llmc/host_memory.h"
#include "../../llmc/portable.h"
#include "../../llmc/rand.h"
#include "../../llmc/rope_config.h"
#include "../../llmc/store_format.h"
#include "../../llmc/vmath.h"

namespace cpu {
#include "../../llmc/device.h"
}
#undef DEVICE_ALIGN
#undef DEVICE_KEEPS_BF16
#undef DEVICE_IS_HOST
#undef DEVICE_MICRO_TOKENS
#undef DEVICE_LOGITS
#undef DEVICE_GAP
#undef device_forbid
#include "../../llmc/device.cuh"
#include "../../llmc/packed.cuh"
#include "../../llmc/warp.cuh"

// ---------------------------------------------------------------------------------------------------------------------
// Checking

static int checks_passed, checks_failed;
static const char *test_name;
static Stream *test_stream;          // CUDA; floatX products
static cpu::Stream *test_cpu_stream; // fp32, so that the reference is the better of the two

__attribute__((format(printf, 2, 3))) static int check(int ok, const char *format, ...) {
    va_list args;
    if (ok) {
        checks_passed++;
        return 1;
    }
    checks_failed++;
    printf("FAIL %s: ", test_name);
    va_start(args, format);
    vprintf(format, args);
    va_end(args);
    printf("\n");
    return 0;
}

// ||a - b|| / ||b|| in double: an all-zero a scores 1, NaN anywhere scores NaN.
static double relative_error(const float *a, const float *b, int64_t n) {
    double difference = 0.0, size = 0.0;
    for (int64_t i = 0; i < n; i++) {
        difference += ((double)a[i] - (double)b[i]) * ((double)a[i] - (double)b[i]);
        size += (double)b[i] * (double)b[i];
    }
    return sqrt(difference) / (size > 0.0 ? sqrt(size) : 1e-30);
}

// Passes if a is within tol of b, relative to b's norm. tol must be below 1/2, or zeros might pass.
static inline int check_close(const float *a, const float *b, int64_t n, double tol, const char *what) {
    double error = relative_error(a, b, n);
    return check(error <= tol && tol < 0.5, "%s: relative error %.3g, at most %.3g allowed (n %lld)", what, error, tol,
                 (long long)n);
}

// Passes if the bytes are the same.
static inline int check_same(const void *a, const void *b, size_t n_bytes, const char *what) {
    size_t i = 0;
    while (i < n_bytes && ((const char *)a)[i] == ((const char *)b)[i]) i++;
    return check(i == n_bytes, "%s: byte %zu of %zu differs", what, i, n_bytes);
}

// Passes if the last error message contains part.
static inline int check_message(const char *part, const char *what) {
    return check(strstr(error_message, part) != NULL && strchr(error_message, '\n') == NULL,
                 "%s: the message '%s' does not say '%s' in one line", what, error_message, part);
}

// Tolerances of a value that is rounded to floatX once.
#ifdef FLOATX_FP32
#define FLOATX_TOL 1e-6
#else
#define FLOATX_TOL 3e-3
#endif

// ---------------------------------------------------------------------------------------------------------------------
// Buffers. Device arrays lie between guard bytes and start as NaN, so that stale and stray writes show.

#define TEST_GUARD 256

// n values of a standard normal times scale, reproducible by `sub`. Release with free.
static inline float *host_random(int64_t n, uint32_t sub, float scale) {
    float *values = (float *)calloc((size_t)n + 4, sizeof(float));
    for (int64_t i = 0; i < n; i += 4) rand_normal4(values + i, 99, RAND_TEST, sub, (uint64_t)i / 4);
    for (int64_t i = 0; i < n; i++) values[i] *= scale;
    return values;
}

// The same rounded to floatX, so that both twins get the same numbers.
static inline float *host_random_x(int64_t n, uint32_t sub, float scale) {
    float *values = host_random(n, sub, scale);
    for (int64_t i = 0; i < n; i++) values[i] = to_float(to_floatX(values[i]));
    return values;
}

// n values that are NaN.
static inline float *host_nan(int64_t n) {
    float *values = (float *)calloc((size_t)n + 1, sizeof(float));
    for (int64_t i = 0; i < n; i++) values[i] = NAN;
    return values;
}

// Stops the run: without a device no test can go on.
static void need(int result, const char *what) {
    if (result == 0) return;
    printf("test_cuda: %s: %s\n", what, error_message);
    exit(1);
}

static void need_cuda(cudaError_t error, const char *what) {
    if (error != cudaSuccess) need(error_set("%s", cudaGetErrorString(error)), what);
}

// An array of n values of T on the device, all bits set (NaN for floats), guarded. Release with device_release.
template <typename T> static T *device_nan(int64_t n) {
    char *base = NULL;
    size_t n_bytes = sizeof(T) * (size_t)n + 2 * TEST_GUARD;
    need_cuda(cudaMalloc((void **)&base, n_bytes), "device memory");
    need_cuda(cudaMemset(base, 0xFF, n_bytes), "fill");
    need_cuda(cudaDeviceSynchronize(), "fill");
    return (T *)(base + TEST_GUARD);
}

// A guarded copy of n host values of the same type.
template <typename T> static T *device_of_host(const T *values, int64_t n) {
    T *device = device_nan<T>(n);
    if (n > 0) need_cuda(cudaMemcpy(device, values, sizeof(T) * (size_t)n, cudaMemcpyHostToDevice), "copy");
    return device;
}

// A guarded copy of n floats, rounded to floatX.
static inline floatX *device_of_host_x(const float *values, int64_t n) {
    floatX *rounded = (floatX *)calloc((size_t)n + 1, sizeof(floatX));
    for (int64_t i = 0; i < n; i++) rounded[i] = to_floatX(values[i]);
    floatX *device = device_of_host(rounded, n);
    free(rounded);
    return device;
}

// What the device array holds once all work is done. Release with free.
template <typename T> static T *host_of_device(const T *device, int64_t n) {
    T *values = (T *)calloc((size_t)n + 1, sizeof(T));
    need_cuda(cudaDeviceSynchronize(), "the kernels of this test");
    if (n > 0) need_cuda(cudaMemcpy(values, device, sizeof(T) * (size_t)n, cudaMemcpyDeviceToHost), "copy");
    return values;
}

// The same as floats.
static inline float *host_of_device_x(const floatX *device, int64_t n) {
    floatX *rounded = host_of_device(device, n);
    float *values = (float *)calloc((size_t)n + 1, sizeof(float));
    for (int64_t i = 0; i < n; i++) values[i] = to_float(rounded[i]);
    free(rounded);
    return values;
}

// Passes if the guards of a device array are whole; frees it.
template <typename T> static void device_release(T *device, int64_t n, const char *what) {
    char *base = (char *)device - TEST_GUARD;
    size_t n_bytes = sizeof(T) * (size_t)n;
    unsigned char *all = (unsigned char *)host_of_device(base, (int64_t)(n_bytes + 2 * TEST_GUARD));
    int clean = 1;
    for (size_t i = 0; i < TEST_GUARD; i++) clean = clean && all[i] == 0xFF && all[TEST_GUARD + n_bytes + i] == 0xFF;
    check(clean, "%s: wrote outside its array", what);
    free(all);
    need_cuda(cudaFree(base), "free");
}

// check_close of a device array against the reference; frees both after looking at the guards.
static inline void check_device(float *device, float *expected, int64_t n, double tol, const char *what) {
    float *values = host_of_device(device, n);
    check_close(values, expected, n, tol, what);
    free(values);
    free(expected);
    device_release(device, n, what);
}

#ifndef FLOATX_FP32
static inline void check_device(floatX *device, float *expected, int64_t n, double tol, const char *what) {
    float *values = host_of_device_x(device, n);
    check_close(values, expected, n, tol, what);
    free(values);
    free(expected);
    device_release(device, n, what);
}
#endif

#endif
