// Adapters' products, CUDA. Modules that take the same x (N, K) are a group: their A lie one below the other in
// a (n*R, K), the B of module i is (width[i], R), and its outputs are columns at[i] .. of y (N, M).
//   mid = scale * x A^T                    lora_reduce, (N, n*R), kept for backward
//   y[:, module] += mid[:, module] B^T     lora_expand
//   dmid = scale * dy[:, module] B         (N, n*R)
//   dB = dy[:, module]^T mid               lora_backward, overwritten or added to
//   dA = dmid^T x, dx += dmid A            the same; dx is added to
// cuBLASLt's products with the scale as their factor; A and B are rounded to bf16 at each, which their size allows.
// Source: Hu et al. 2021, section 4.1.
#ifndef LLMC_LORA_CUH
#define LLMC_LORA_CUH

#include "device.cuh"    // floatX, Stream
#include "lora_config.h" // LoraGroup
#include "matmul.cuh"    // matmul_run, matmul_weight

// A matrix that is kept as fp32 alone, as products read it.
static inline const void *lora_operand(const float *matrix, int rows, int cols, Stream *stream) {
    Weight weight = {matrix, NULL, 0};
    return matmul_weight(weight, cols, rows, stream);
}

// mid (N, n*R), x (N, K)
static inline void lora_reduce(floatX *mid, const floatX *x, const LoraGroup *group, int N, int K, Stream *stream) {
    int all = group->n * group->rank;
    MatmulShape down = {N, all, K, K, K, all, 0, 0, 0, 0, 1, MATMUL_BF16, MATMUL_BF16, 0, 0, 0, 0};
    matmul_run(mid, x, lora_operand(group->a, all, K, stream), down, group->scale, 0.0f, stream);
}

// y (N, M) +=, mid (N, n*R)
static inline void lora_expand(floatX *y, const floatX *mid, const LoraGroup *group, int N, int M, Stream *stream) {
    int R = group->rank, all = group->n * R;
    for (int i = 0; i < group->n; i++) {
        MatmulShape up = {N, group->width[i], R, all, R, M, 0, 0, 0, 0, 1, MATMUL_BF16, MATMUL_BF16, 0, 0, 0, 0};
        matmul_run(y + group->at[i], mid + i * R, lora_operand(group->b[i], group->width[i], R, stream), up, 1.0f, 1.0f,
                   stream);
    }
}

// dx (N, K) +=, group->da and db overwritten or added to, dmid (N, n*R) is scratch; dy (N, M), mid (N, n*R) and
// x (N, K) as they were.
static inline void lora_backward(floatX *dx, floatX *dmid, const floatX *dy, const floatX *mid, const floatX *x,
                                 const LoraGroup *group, int N, int K, int M, int accumulate, Stream *stream) {
    int R = group->rank, all = group->n * R;
    float beta = accumulate ? 1.0f : 0.0f;
    for (int i = 0; i < group->n; i++) {
        int width = group->width[i];
        MatmulShape down = {N, R, width, M, R, all, 0, 0, 0, 0, 0, MATMUL_BF16, MATMUL_BF16, 0, 0, 0, 0};
        MatmulShape of_b = {width, R, N, M, all, R, 0, 0, 0, 1, 0, MATMUL_BF16, 0, 0, 0, 0, 0};
        const floatX *grad = dy + group->at[i];
        matmul_run(dmid + i * R, grad, lora_operand(group->b[i], width, R, stream), down, group->scale, 0.0f, stream);
        matmul_run(group->db[i], grad, mid + i * R, of_b, 1.0f, beta, stream);
    }
    MatmulShape of_a = {all, K, N, all, K, K, 0, 0, 0, 1, 0, MATMUL_BF16, 0, 0, 0, 0, 0};
    MatmulShape up = {N, K, all, all, K, K, 0, 0, 0, 0, 0, MATMUL_BF16, MATMUL_BF16, 0, 0, 0, 0};
    matmul_run(group->da, dmid, x, of_a, 1.0f, beta, stream);
    matmul_run(dx, dmid, lora_operand(group->a, all, K, stream), up, 1.0f, 1.0f, stream);
}

#endif
