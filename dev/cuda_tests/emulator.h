// The ground the ops stand on: launches, shared memory, barriers, warps, packs, mma.
#include "../../llmc/mma.cuh"

// out[block] = sum over the block of in, by warp shuffles and shared memory.
__global__ static void sum_kernel(float *out, const float *in, int n) {
    __shared__ float partial[32];
    int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    float total = block_sum(i < n ? in[i] : 0.0f, partial);
    if (threadIdx.x == 0) out[blockIdx.x] = total;
}

static void test_block_sum(void) {
    int n = 1000;
    float *values = host_random(n, 1, 1.0f), *expected = host_nan(4);
    for (int b = 0; b < 4; b++) {
        double sum = 0.0;
        for (int i = 256 * b; i < 256 * b + 256 && i < n; i++) sum += (double)values[i];
        expected[b] = (float)sum;
    }
    float *in = device_of_host(values, n), *out = device_nan<float>(4);
    LAUNCH(sum_kernel, 4, 256, 0, test_stream, out, in, n);
    check_device(out, expected, 4, 1e-6, "block_sum");
    device_release(in, n, "in");
    free(values);
}

// d (16,8) = a (16,16) b (16,8) + c (16,8) by one warp; b comes as (8,16) rows: its transpose.
__global__ static void mma_kernel(float *d, const __nv_bfloat16 *a, const __nv_bfloat16 *b, const float *c) {
    DYNAMIC_SHARED(__nv_bfloat16, tile); // a, then b transposed
    int lane = (int)threadIdx.x, g = lane / 4, t = lane % 4;
    for (int i = lane; i < 16 * 16; i += 32) tile[i] = a[i];
    for (int i = lane; i < 8 * 16; i += 32) tile[256 + i] = b[i];
    __syncthreads();
    uint32_t fa[4], fb[2];
    float fc[4], fd[4];
    ldmatrix_x4(fa, tile + lane % 16 * 16 + lane / 16 * 8);
    ldmatrix_x2(fb, tile + 256 + lane % 8 * 16 + lane / 8 % 2 * 8);
    for (int i = 0; i < 4; i++) fc[i] = c[(g + i / 2 * 8) * 8 + 2 * t + i % 2];
    mma_bf16_16816(fd, fa, fb, fc);
    for (int i = 0; i < 4; i++) d[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = fd[i];
}

static void test_mma(void) {
    __nv_bfloat16 a[256], b[128];
    float c[128], *expected = host_nan(128);
    for (int i = 0; i < 256; i++) a[i] = __float2bfloat16((float)(i - 100));
    for (int i = 0; i < 128; i++) b[i] = __float2bfloat16((float)(3 * i % 128 - 60)), c[i] = (float)(1000 * i);
    for (int row = 0; row < 16; row++)
        for (int col = 0; col < 8; col++) {
            double sum = (double)c[row * 8 + col];
            for (int k = 0; k < 16; k++) sum += (double)to_float(a[row * 16 + k]) * (double)to_float(b[col * 16 + k]);
            expected[row * 8 + col] = (float)sum;
        }
    __nv_bfloat16 *da = device_of_host(a, 256), *db = device_of_host(b, 128);
    float *dc = device_of_host(c, 128), *dd = device_nan<float>(128);
    LAUNCH(mma_kernel, 1, 32, sizeof(__nv_bfloat16) * (256 + 128), test_stream, dd, da, db, dc);
    check_device(dd, expected, 128, 1e-7, "mma");
    device_release(da, 256, "a");
    device_release(db, 128, "b");
    device_release(dc, 128, "c");
}

static void test_cuda_emulator(void) {
    test_block_sum();
    test_mma();
}
