// Causal grouped-query attention over packed documents, CPU, in blocks of queries: no T x T matrix is ever stored, the
// backward recomputes its blocks from q, k and the saved lse (FlashAttention-2, Dao 2023).
//   S = q k^T / sqrt(HD) for keys of the query's document and window at or before it;  lse = log sum exp S;  P = exp(S
//   - lse) out = P v;  dv = P^T dout;  dS = P * (dout v^T - sum_d dout*out);  dq = dS k / sqrt(HD);  dk = dS^T q /
//   sqrt(HD)
// With PRECISION_BF16 the five products take bf16 inputs like all others; statistics are fp32 always.
#ifndef LLMC_ATTENTION_H
#define LLMC_ATTENTION_H

#include "attention_bf16.h"
#include "attention_fp32.h"
#include "attention_shape.h"
#include "device.h" // floatX, Stream
#include "matmul.h" // matmul_is_bf16

// out (B, Tq, NH*HD) packed; lse (B, NH, Tq); q (B, Tq, ...), k, v (B, Tk, ...) with the strides of the shape.
static inline void attention_forward(floatX *out, float *lse, const floatX *q, const floatX *k, const floatX *v,
                                     AttentionShape s, Stream *stream) {
    if (matmul_is_bf16(s.Tq, stream))
        attention_forward_bf16(out, lse, q, k, v, s, stream);
    else
        attention_forward_fp32(out, lse, q, k, v, s, stream);
}

// dq, dk, dv overwritten, laid out as q, k, v. dout, out (B, T, NH*HD) packed; lse (B, NH, T). Tq must equal Tk.
static inline void attention_backward(floatX *dq, floatX *dk, floatX *dv, const floatX *dout, const floatX *out,
                                      const float *lse, const floatX *q, const floatX *k, const floatX *v,
                                      AttentionShape s, Stream *stream) {
    if (matmul_is_bf16(s.Tq, stream))
        attention_backward_bf16(dq, dk, dv, dout, out, lse, q, k, v, s, stream);
    else
        attention_backward_fp32(dq, dk, dv, dout, out, lse, q, k, v, s, stream);
}

// Bytes of scratch a training stage's attention keeps.
static inline size_t attention_bytes(AttentionShape s, Precision precision, int threads) {
    return precision == PRECISION_BF16 ? attention_bytes_bf16(s, threads) : attention_bytes_fp32(s, threads);
}

#endif
