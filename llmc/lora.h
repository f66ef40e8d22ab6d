// Adapters' products, CPU. Modules that take the same x (N, K) are a group: their A lie one below the other in
// a (n*R, K), the B of module i is (width[i], R), and its outputs are columns at[i] .. of y (N, M).
//   mid = scale * x A^T                    lora_reduce, (N, n*R), kept for backward
//   y[:, module] += mid[:, module] B^T     lora_expand
//   dmid = scale * dy[:, module] B         (N, n*R)
//   dB = dy[:, module]^T mid               lora_backward, overwritten or added to
//   dA = dmid^T x, dx += dmid A            the same; dx is added to
// Products round their inputs as those of matmul.h do. Source: Hu et al. 2021, section 4.1.
#ifndef LLMC_LORA_H
#define LLMC_LORA_H

#include "device.h"      // floatX, Stream
#include "lora_config.h" // LoraGroup
#include "matmul.h"      // matmul_product, matmul_operand
#include "vector.h"      // vector_scale

// A matrix that is kept as fp32 alone.
static inline Operand lora_operand(const float *matrix, int64_t rows, int64_t cols, int bf16, Stream *stream) {
    return matmul_operand(matrix, rows, cols, cols, bf16, SCRATCH_B, stream);
}

// mid (N, n*R), x (N, K)
static inline void lora_reduce(floatX *mid, const floatX *x, const LoraGroup *group, int N, int K, Stream *stream) {
    int bf16 = matmul_is_bf16(N, stream), R = group->rank, all = group->n * R;
    Operand input = matmul_operand(x, N, K, K, bf16, SCRATCH_A, stream);
    Operand a = lora_operand(group->a, all, K, bf16, stream);
    matmul_product(mid, all, input.data, input.ld, 0, a.data, a.ld, 1, N, all, K, bf16, 0, stream);
    vector_scale(mid, (int64_t)N * all, group->scale, stream);
}

// y (N, M) +=, mid (N, n*R)
static inline void lora_expand(floatX *y, const floatX *mid, const LoraGroup *group, int N, int M, Stream *stream) {
    int bf16 = matmul_is_bf16(N, stream), R = group->rank, all = group->n * R;
    for (int i = 0; i < group->n; i++) {
        Operand kept = matmul_operand(mid + i * R, N, R, all, bf16, SCRATCH_A, stream);
        Operand b = lora_operand(group->b[i], group->width[i], R, bf16, stream);
        matmul_product(y + group->at[i], M, kept.data, kept.ld, 0, b.data, b.ld, 1, N, group->width[i], R, bf16, 1,
                       stream);
    }
}

// dx (N, K) +=, group->da and db overwritten or added to, dmid (N, n*R) is scratch; dy (N, M), mid (N, n*R) and
// x (N, K) as they were.
static inline void lora_backward(floatX *dx, floatX *dmid, const floatX *dy, const floatX *mid, const floatX *x,
                                 const LoraGroup *group, int N, int K, int M, int accumulate, Stream *stream) {
    int bf16 = matmul_is_bf16(N, stream), R = group->rank, all = group->n * R;
    for (int i = 0; i < group->n; i++) {
        int width = group->width[i];
        Operand grad = matmul_operand(dy + group->at[i], N, width, M, bf16, SCRATCH_C, stream);
        Operand b = lora_operand(group->b[i], width, R, bf16, stream);
        matmul_product(dmid + i * R, all, grad.data, grad.ld, 0, b.data, b.ld, 0, N, R, width, bf16, 0, stream);
        Operand kept = matmul_operand(mid + i * R, N, R, all, bf16, SCRATCH_A, stream);
        matmul_product(group->db[i], R, grad.data, grad.ld, 1, kept.data, kept.ld, 0, width, R, N, bf16, accumulate,
                       stream);
    }
    vector_scale(dmid, (int64_t)N * all, group->scale, stream);
    Operand grad = matmul_operand(dmid, N, all, all, bf16, SCRATCH_C, stream);
    Operand input = matmul_operand(x, N, K, K, bf16, SCRATCH_A, stream);
    matmul_product(group->da, K, grad.data, grad.ld, 1, input.data, input.ld, 0, all, K, N, bf16, accumulate, stream);
    Operand a = lora_operand(group->a, all, K, bf16, stream);
    matmul_product(dx, K, grad.data, grad.ld, 0, a.data, a.ld, 0, N, K, all, bf16, 1, stream);
}

#endif
