// The ground the ops stand on: launches, memory, shared memory, barriers, warps, packs, mma. And, under the emulator,
// that each of its detectors finds a fault planted for it: a fault that aborts does so in a child process, one that
// gives wrong results does so in some order of execution, while the same code without the fault is right in all.
#include "../../llmc/mma.cuh"

// ---------------------------------------------------------------------------------------------------------------------
// Sums, in blocks of three shapes

// sum[block], largest[block] = over the block of in
__global__ static void sum_kernel(float *sum, float *largest, const float *in, int n) {
    __shared__ float partial[WARP_SIZE];
    int i = (int)blockIdx.x * block_threads() + block_thread();
    float total = block_sum(i < n ? in[i] : 0.0f, partial);
    float top = block_max(i < n ? in[i] : -INFINITY, partial);
    if (block_thread() == 0) sum[blockIdx.x] = total, largest[blockIdx.x] = top;
}

static void test_block_sum(dim3 shape) {
    int n = 1000, n_threads = (int)(shape.x * shape.y * shape.z), n_blocks = (n + n_threads - 1) / n_threads;
    float *values = host_random(n, 1, 1.0f), *sums = host_nan(n_blocks), *tops = host_nan(n_blocks);
    for (int b = 0; b < n_blocks; b++) {
        double sum = 0.0;
        tops[b] = -INFINITY;
        for (int i = n_threads * b; i < n_threads * (b + 1) && i < n; i++)
            sum += (double)values[i], tops[b] = fmaxf(tops[b], values[i]);
        sums[b] = (float)sum;
    }
    float *in = device_of_host(values, n), *sum = device_nan<float>(n_blocks), *largest = device_nan<float>(n_blocks);
    LAUNCH(sum_kernel, n_blocks, shape, 0, test_stream, sum, largest, in, n);
    check_device(sum, sums, n_blocks, 1e-6, "block_sum");
    check_device(largest, tops, n_blocks, 1e-12, "block_max");
    device_release(in, n, "in");
    free(values);
}

// ---------------------------------------------------------------------------------------------------------------------
// Grids in three dimensions: each thread leaves its place once

__global__ static void grid_kernel(unsigned *out) {
    unsigned block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    unsigned thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
    atomicAdd(&out[block * blockDim.x * blockDim.y * blockDim.z + thread], 1000 * block + thread + 1);
}

static void test_grid(dim3 grid, dim3 block) {
    unsigned n_threads = block.x * block.y * block.z, n = grid.x * grid.y * grid.z * n_threads;
    unsigned *out = (unsigned *)device_alloc(n * sizeof *out), *expected = (unsigned *)malloc(n * sizeof *expected);
    for (unsigned i = 0; i < n; i++) expected[i] = 1000 * (i / n_threads) + i % n_threads + 1;
    LAUNCH(grid_kernel, grid, block, 0, test_stream, out);
    unsigned *values = host_of_device(out, n);
    check_same(values, expected, n * sizeof *values, "a grid");
    free(values);
    free(expected);
    device_free(out);
}

// What the launcher knows of a kernel: its static shared memory.
template <int N> __global__ static void two_arrays_kernel(int *x) {
    __shared__ int a[N], b[2 * N];
    int i = (int)threadIdx.x;
    a[i % N] = i, b[i % (2 * N)] = -i;
    __syncthreads();
    x[i] = a[(i + 1) % N] + b[(i + 1) % (2 * N)];
}

static void test_attributes(void) {
    int *x = (int *)device_alloc(32 * sizeof *x);
    LAUNCH((two_arrays_kernel<32>), 1, 32, 0, test_stream, x);
    cudaFuncAttributes found = {};
    need_cuda(cudaFuncGetAttributes(&found, sum_kernel), "attributes");
    check(found.sharedSizeBytes == 4 * WARP_SIZE, "shared memory of sum_kernel: %zu", found.sharedSizeBytes);
    need_cuda(cudaFuncGetAttributes(&found, two_arrays_kernel<32>), "attributes");
    check(found.sharedSizeBytes == 4 * 32 * 3, "shared memory of two_arrays_kernel: %zu", found.sharedSizeBytes);
    device_free(x);
}

// ---------------------------------------------------------------------------------------------------------------------
// Warps: every collective, on values that tell all lanes apart

enum { WARP_RESULTS = 16 };

__global__ static void warp_kernel(int *out) {
    int lane = (int)threadIdx.x, value = 100 + 7 * lane;
    int *to = out + lane * WARP_RESULTS;
    to[0] = __shfl_sync(WARP_ALL, value, 5);
    to[1] = __shfl_sync(WARP_ALL, value, lane / 2, 8);
    to[2] = __shfl_xor_sync(WARP_ALL, value, 9);
    to[3] = __shfl_up_sync(WARP_ALL, value, 3u);
    to[4] = __shfl_down_sync(WARP_ALL, value, 3u, 16);
    to[5] = (int)__ballot_sync(WARP_ALL, lane % 3 == 0);
    to[6] = __any_sync(WARP_ALL, lane == 31) * 2 + __any_sync(WARP_ALL, lane == 32);
    to[7] = __all_sync(WARP_ALL, lane < 32) * 2 + __all_sync(WARP_ALL, lane < 31);
    to[8] = __reduce_add_sync(WARP_ALL, value);
    to[9] = __reduce_max_sync(WARP_ALL, value);
    to[10] = (int)__reduce_xor_sync(WARP_ALL, (unsigned)value);
    if (lane < 16) // half the warp works on its own
        to[11] = __shfl_xor_sync(0x0000FFFFu, value, 1);
    else
        to[11] = __reduce_min_sync(0xFFFF0000u, value);
    __syncwarp();
    to[12] = __syncthreads_count(lane % 5 == 0);
    to[13] = __syncthreads_or(lane == 3) * 2 + __syncthreads_and(lane == 3);
    to[14] = __popc(0xF0F0u) + __clz(1) + __ffs(8) + (int)(__brev(1u) >> 31);
    to[15] = (int)__byte_perm(0x33221100u, 0x77665544u, 0x7250u);
}

static void test_warp(void) {
    int expected[32 * WARP_RESULTS];
    for (int lane = 0; lane < 32; lane++) {
        int *to = expected + lane * WARP_RESULTS, sum = 0, ballot = 0;
        unsigned all = 0;
        for (int i = 0; i < 32; i++) sum += 100 + 7 * i, all ^= (unsigned)(100 + 7 * i), ballot |= (i % 3 == 0) << i;
        to[0] = 100 + 7 * 5;
        to[1] = 100 + 7 * (lane / 8 * 8 + lane / 2 % 8);
        to[2] = 100 + 7 * (lane ^ 9);
        to[3] = 100 + 7 * (lane >= 3 ? lane - 3 : lane);
        to[4] = 100 + 7 * (lane % 16 + 3 < 16 ? lane + 3 : lane);
        to[5] = ballot, to[6] = 2, to[7] = 2;
        to[8] = sum, to[9] = 100 + 7 * 31, to[10] = (int)all;
        to[11] = lane < 16 ? 100 + 7 * (lane ^ 1) : 100 + 7 * 16;
        to[12] = 7, to[13] = 2;
        to[14] = 8 + 31 + 4 + 1;
        to[15] = 0x77225500;
    }
    int *out = device_nan<int>(32 * WARP_RESULTS);
    LAUNCH(warp_kernel, 1, 32, 0, test_stream, out);
    int *values = host_of_device(out, 32 * WARP_RESULTS);
    check_same(values, expected, sizeof expected, "warp collectives");
    free(values);
    device_release(out, 32 * WARP_RESULTS, "warp collectives");
}

// ---------------------------------------------------------------------------------------------------------------------
// Packs, atomics, arithmetic

// out = 2*in by packs of T; *n_threads += 1 from each thread.
template <typename T> __global__ static void pack_kernel(T *out, const T *in, int n, int *n_threads) {
    int i = (int)(blockIdx.x * blockDim.x + threadIdx.x) * Pack<T>::size;
    atomicAdd(n_threads, 1);
    if (i >= n) return;
    Pack<T> x = threadIdx.x % 2 ? pack_load(in + i) : pack_load_streaming(in + i);
    for (int k = 0; k < x.size; k++) x[k] = (T)(2.0f * to_float(x[k]));
    if (threadIdx.x % 4 < 2)
        pack_store(out + i, x);
    else
        pack_store_streaming(out + i, x);
}

template <typename T> static void test_pack(void) {
    int n = 40 * Pack<T>::size, zero = 0;
    T values[40 * Pack<T>::size], twice[40 * Pack<T>::size];
    for (int i = 0; i < n; i++) values[i] = (T)(float)(i - 50), twice[i] = (T)(2.0f * to_float(values[i]));
    T *in = device_of_host(values, n), *out = device_nan<T>(n);
    int *count = device_of_host(&zero, 1);
    check(pack_fits(in, 8) && !pack_fits(in + 1, 8) && !pack_fits(in, 7), "pack_fits");
    LAUNCH((pack_kernel<T>), 2, 64, 0, test_stream, out, in, n, count);
    T *result = host_of_device(out, n);
    int *threads = host_of_device(count, 1);
    check_same(result, twice, sizeof twice, "packs");
    check(*threads == 128, "%d of 128 threads counted", *threads);
    free(result);
    free(threads);
    device_release(in, n, "in");
    device_release(out, n, "out");
    device_release(count, 1, "count");
}

// bf16 conversion on the device equals the one of dtype.h, bit for bit but for NaN's payload.
__global__ static void bf16_kernel(uint16_t *out, const float *in, int n) {
    int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < n) out[i] = __bfloat16_as_ushort(__float2bfloat16_rn(in[i]));
}

static void test_bf16_rounding(void) {
    float edges[16] = {0.0f,          -0.0f,     1.0f,      0x1.01p0f,   0x1.03p0f, 0x1.010002p0f, 0x1.fffffep127f,
                       INFINITY,      -INFINITY, 0x1p-149f, 0x1.8p-133f, 3.14159f,  -2.71828f,     1e-40f,
                       0x1.00fffep0f, 65504.0f};
    uint16_t expected[16];
    for (int i = 0; i < 16; i++) expected[i] = bf16_of_float(edges[i]);
    float *in = device_of_host(edges, 16);
    uint16_t *out = device_nan<uint16_t>(16);
    LAUNCH(bf16_kernel, 1, 32, 0, test_stream, out, in, 16);
    uint16_t *result = host_of_device(out, 16);
    check_same(result, expected, sizeof expected, "rounding to bf16");
    free(result);
    device_release(in, 16, "in");
    device_release(out, 16, "out");
}

// Arithmetic of the device against the host's.
enum { ARITHMETIC_RESULTS = 18 };

__global__ static void arithmetic_kernel(float *out, const float *in, unsigned *words) {
    float x = __ldg(&in[0]), y = __ldcg(&in[1]), product = __fmul_rn(x, y); // the difference below is not fused
    out[0] = __expf(x), out[1] = __logf(x), out[2] = __log2f(x), out[3] = __sinf(x), out[4] = __cosf(x);
    out[5] = __fdividef(x, y), out[6] = rsqrtf(x), out[7] = __frcp_rn(x), out[8] = __fsqrt_rn(x);
    out[9] = __saturatef(x) + __saturatef(-x), out[10] = __fmaf_rn(x, y, -product);
    out[11] = __fadd_rn(product, -__fmul_rn(y, x)) + 1.0f, out[12] = exp2f(x), out[13] = max(x, y) - min(x, y);
    out[14] = (float)(rsqrt((double)x) * __dmul_rn(x, x));
    __nv_bfloat162 pair = __floats2bfloat162_rn(x, y);
    float2 both = __bfloat1622float2(__float22bfloat162_rn(make_float2(y, x)));
    out[15] = __low2float(pair) - both.y + 2.0f, out[16] = __high2float(pair) - both.x + 2.0f;
    out[17] = (float)(__halves2bfloat162(__float2bfloat16(x), __float2bfloat16(y)).y * __float2bfloat16(1.0f));
    unsigned bits = __float_as_uint(x);
    words[0] = (unsigned)__float_as_int(__int_as_float((int)bits)) ^ __float_as_uint(__uint_as_float(bits));
    words[1] = __umulhi(0x80000001u, 6u);
    __stcs(&words[2], (unsigned)__bfloat16_as_ushort(__ushort_as_bfloat16(0x3F81)));
    __stcg(&words[3], atomicCAS(&words[8], 5u, 6u) * 10 + atomicCAS(&words[8], 5u, 7u)); // 5, then 6
    words[4] = atomicExch(&words[8], 9u) * 10 + atomicMax(&words[8], 4u);                // 6, then 9
    words[5] = atomicMin(&words[8], 2u) * 10 + atomicAdd(&words[8], 1u);                 // 9, then 2
    __threadfence();
    words[6] = words[8];
    words[7] = (unsigned)__bfloat162float(__float2bfloat16_rn(3.0f));
}

static void test_arithmetic(void) {
    float in[2] = {0.7310586f, 0.2689414f}, x = in[0], y = in[1];
    float *expected = host_nan(ARITHMETIC_RESULTS);
    unsigned words[9] = {0, 0, 0, 0, 0, 0, 0, 0, 5}, expected_words[9] = {0, 3, 0x3F81, 56, 69, 92, 3, 3, 3};
    const float all[ARITHMETIC_RESULTS] = {expf(x),
                                           logf(x),
                                           log2f(x),
                                           sinf(x),
                                           cosf(x),
                                           x / y,
                                           1.0f / sqrtf(x),
                                           1.0f / x,
                                           sqrtf(x),
                                           x,
                                           (float)((double)x * y - (double)(float)((double)x * y)),
                                           1.0f,
                                           exp2f(x),
                                           x - y,
                                           (float)((double)x * x / sqrt((double)x)),
                                           2.0f,
                                           2.0f,
                                           float_of_bf16(bf16_of_float(y))};
    memcpy(expected, all, sizeof all);
    float *din = device_of_host(in, 2), *out = device_nan<float>(ARITHMETIC_RESULTS);
    unsigned *dwords = device_of_host(words, 9);
    LAUNCH(arithmetic_kernel, 1, 1, 0, test_stream, out, din, dwords);
    float *values = host_of_device(out, ARITHMETIC_RESULTS);
    for (int i = 0; i < ARITHMETIC_RESULTS; i++) {
        double error = fabs((double)values[i] - (double)all[i]) / fabs((double)all[i]);
        check(error <= 2e-6, "arithmetic, result %d: %.9g, expected %.9g", i, (double)values[i], (double)all[i]);
    }
    free(values);
    check_device(out, expected, ARITHMETIC_RESULTS, 2e-6, "arithmetic");
    unsigned *back = host_of_device(dwords, 9);
    check_same(back, expected_words, sizeof expected_words, "integers and atomics");
    free(back);
    device_release(din, 2, "in");
    device_release(dwords, 9, "words");
}

// ---------------------------------------------------------------------------------------------------------------------
// Tensor cores

// d (16,8) = a (16,16) b + c (16,8) by one warp, through cp.async and ldmatrix. b comes as `columns` (8,16), its
// transpose, or, with b_rows, as (16,8) itself. a_columns: a comes transposed.
__global__ static void mma_kernel(float *d, const __nv_bfloat16 *a, const __nv_bfloat16 *b, const float *c,
                                  int a_columns, int b_rows) {
    DYNAMIC_SHARED(__nv_bfloat16, tile); // a, then b
    int lane = (int)threadIdx.x, g = lane / 4, t = lane % 4;
    cp_async_16(tile + 8 * lane, a + 8 * lane);
    cp_async_commit();
    if (lane < 16) cp_async_16(tile + 256 + 8 * lane, b + 8 * lane);
    cp_async_commit();
    cp_async_wait<1>();
    __syncwarp();
    uint32_t fa[4], fb[2];
    float fc[4], fd[4];
    if (a_columns)
        ldmatrix_x4_trans(fa, tile + (lane / 16 * 8 + lane % 8) * 16 + lane / 8 % 2 * 8);
    else
        ldmatrix_x4(fa, tile + lane % 16 * 16 + lane / 16 * 8);
    cp_async_wait<0>();
    __syncwarp();
    if (b_rows)
        ldmatrix_x2_trans(fb, tile + 256 + lane % 16 * 8);
    else
        ldmatrix_x2(fb, tile + 256 + lane % 8 * 16 + lane / 8 % 2 * 8);
    for (int i = 0; i < 4; i++) fc[i] = c[(g + i / 2 * 8) * 8 + 2 * t + i % 2];
    mma_bf16_16816(fd, fa, fb, fc);
    for (int i = 0; i < 4; i++) d[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = fd[i];
}

// All values differ, and all products and sums are exact.
static void test_mma(int a_columns, int b_rows) {
    float a[16][16], b[16][8], c[128], *expected = host_nan(128);
    __nv_bfloat16 sent_a[256], sent_b[128];
    for (int i = 0; i < 256; i++) a[i / 16][i % 16] = (float)(i - 100);
    for (int i = 0; i < 128; i++) b[i / 8][i % 8] = (float)(i * 5 % 128 - 60), c[i] = (float)(1000 * i);
    for (int row = 0; row < 16; row++)
        for (int k = 0; k < 16; k++) sent_a[a_columns ? k * 16 + row : row * 16 + k] = __float2bfloat16(a[row][k]);
    for (int k = 0; k < 16; k++)
        for (int col = 0; col < 8; col++) sent_b[b_rows ? k * 8 + col : col * 16 + k] = __float2bfloat16(b[k][col]);
    for (int row = 0; row < 16; row++)
        for (int col = 0; col < 8; col++) {
            float sum = c[row * 8 + col];
            for (int k = 0; k < 16; k++) sum += a[row][k] * b[k][col];
            expected[row * 8 + col] = sum;
        }
    __nv_bfloat16 *da = device_of_host(sent_a, 256), *db = device_of_host(sent_b, 128);
    float *dc = device_of_host(c, 128), *dd = device_nan<float>(128);
    LAUNCH(mma_kernel, 1, 32, sizeof(__nv_bfloat16) * (256 + 128), test_stream, dd, da, db, dc, a_columns, b_rows);
    check_device(dd, expected, 128, 1e-12, "mma");
    device_release(da, 256, "a");
    device_release(db, 128, "b");
    device_release(dc, 128, "c");
}

// ---------------------------------------------------------------------------------------------------------------------
// device.cuh

__global__ static void add_kernel(float *x, float value, int n) {
    int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < n) x[i] += value;
}

static void test_device(void) {
    enum { N = 1000 };
    static float values[N], back[N];
    for (int i = 0; i < N; i++) values[i] = (float)i, back[i] = NAN;
    float *x = (float *)device_alloc(sizeof values), *y = (float *)device_alloc(sizeof values);
    check((uintptr_t)x % DEVICE_ALIGN == 0 && (uintptr_t)y % DEVICE_ALIGN == 0, "alignment of device_alloc");
    device_copy(back, x, sizeof back, test_stream);
    for (int i = 0; i < N; i++) check(back[i] == 0.0f, "device_alloc: value %d is %g", i, (double)back[i]);
    device_copy(x, values, sizeof values, test_stream);
    LAUNCH(add_kernel, (N + 127) / 128, 128, 0, test_stream, x, 1.0f, (int)N);
    device_copy(y, x, sizeof values, test_stream);
    device_zero(x, 4 * sizeof *x, test_stream);
    device_copy(back, y, sizeof back, test_stream);
    for (int i = 0; i < N; i++) check(back[i] == (float)(i + 1), "value %d is %g", i, (double)back[i]);
    device_copy(back, x, sizeof back, test_stream);
    check(back[0] == 0.0f && back[3] == 0.0f && back[4] == 5.0f, "device_zero: %g %g", (double)back[3],
          (double)back[4]);
    device_free(x);
    device_free(y);
    Scratch scratch = {NULL, 0};
    void *first = scratch_get(&scratch, 100), *second = scratch_get(&scratch, 50);
    check(first != NULL && first == second, "scratch of a smaller size is another one");
    check(scratch_get(&scratch, 1000) != NULL && scratch.n_bytes == 1000, "scratch does not grow");
    device_free(scratch.data);
}

__global__ static void idle_kernel(float *x) {
    DYNAMIC_SHARED(float, shared);
    if (threadIdx.x == 0) x[0] = 1.0f, shared[0] = 0.0f;
}

// What CUDA refuses fails the stream, and the message says where.
static void refused(dim3 grid, dim3 block, size_t shared_bytes, const char *what) {
    Stream *stream = NULL;
    need(stream_create(&stream, PRECISION_BF16, 1), "stream");
    float *x = (float *)device_alloc(4);
    error_set("none");
    LAUNCH(idle_kernel, grid, block, shared_bytes, stream, x);
    check(stream_check(stream) != 0, "%s: was launched", what);
    check_message("launch of idle_kernel", what);
    error_set("none");
    LAUNCH(idle_kernel, 1, 1, 4, stream, x); // nothing happens on a stream that has failed
    check_message("none", "a launch on a failed stream");
    stream_destroy(stream);
    device_free(x);
}

static void test_refused(void) {
    refused(1, 1025, 0, "1025 threads");
    refused(dim3(1, 1, 65536), 32, 0, "65536 blocks in z");
    refused(0, 32, 0, "no block");
    refused(1, dim3(1, 1, 65), 0, "65 threads in z");
    refused(1, 32, (48 << 10) + 16, "more than 48 KB of dynamic shared memory");
    int opted_in = (int)(cudaFuncSetAttribute(idle_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 64 << 10));
    check(opted_in == cudaSuccess, "64 KB of dynamic shared memory were not granted");
    float *x = (float *)device_alloc(4), back = NAN;
    LAUNCH(idle_kernel, 1, 32, 64 << 10, test_stream, x);
    device_copy(&back, x, sizeof back, test_stream);
    check(back == 1.0f, "64 KB of dynamic shared memory: %g", (double)back);
    device_free(x);
    refused(1, 32, (64 << 10) + 16, "more dynamic shared memory than was asked for");
    check(device_alloc((size_t)1 << 50) == NULL, "a petabyte was allocated");
    check_message("out of memory; try a smaller --micro-batch", "a petabyte");
}

#ifdef CUDA_EMULATOR
#include "emulator_faults.h"
#endif

static void test_cuda_emulator(void) {
    test_block_sum(dim3(256));
    test_block_sum(dim3(32, 4));
    test_block_sum(dim3(8, 4, 3));
    test_grid(dim3(3, 2, 4), dim3(5, 3, 2));
    test_grid(dim3(1000), dim3(1));
    test_grid(dim3(1), dim3(1024));
    test_attributes();
    test_warp();
    test_pack<float>();
    test_pack<__nv_bfloat16>();
    test_bf16_rounding();
    test_arithmetic();
    for (int layout = 0; layout < 4; layout++) test_mma(layout & 1, layout >> 1);
    test_device();
    test_refused();
#ifdef CUDA_EMULATOR
    test_faults();
#endif
}
