// Causal grouped-query attention over packed documents, CUDA: the twin of attention.h. No T x T matrix is ever stored,
// the backward recomputes its tiles from q, k and the saved lse (FlashAttention-2, Dao 2023).
//   S = q k^T / sqrt(HD) for keys of the query's document and window at or before it;  lse = log sum exp S;  P = exp(S
//   - lse) out = P v;  dv = P^T dout;  dS = P * (dout v^T - sum_d dout*out);  dq = dS k / sqrt(HD);  dk = dS^T q /
//   sqrt(HD)
// bf16 with heads of 64, 96 or 128 goes to the tensor cores (attention_mma.cuh: products of bf16, sums in fp32), all
// else to attention_plain.cuh (products in fp32). Statistics are fp32. No atomics: every run gives the same bits.
// A failure (no memory, HD above 256, NH no multiple of NKV) is the stream's.
#ifndef LLMC_ATTENTION_CUH
#define LLMC_ATTENTION_CUH

#include <stddef.h> // size_t
#include <stdint.h> // uintptr_t

#include "attention_plain.cuh"
#include "attention_shape.h"
#include "device.cuh" // floatX, Stream, LAUNCH
#ifndef FLOATX_FP32
#include "attention_mma.cuh"
#endif

// Launches a kernel with more shared memory than the 48 KB that need no asking.
#define ATTENTION_LAUNCH(kernel, grid, block, shared_bytes, stream, ...)                                               \
    do {                                                                                                               \
        int asked_ = (int)(shared_bytes);                                                                              \
        stream_cuda(stream, cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, asked_));        \
        LAUNCH(kernel, grid, block, asked_, stream, __VA_ARGS__);                                                      \
    } while (0)

static inline unsigned attention_tiles(int n, int tile) {
    return (unsigned)((n + tile - 1) / tile);
}

// Bytes of scratch the backward keeps: log sum exp and sum_d dout*out of every query.
static inline size_t attention_bytes(AttentionShape s, Precision precision, int threads) {
    (void)precision, (void)threads;
    return sizeof(float2) * (size_t)s.B * (size_t)s.NH * (size_t)attention_rows(s.Tq);
}

// 0 with the stream failed if no kernel takes the shape.
static inline int attention_fits(AttentionShape s, Stream *stream) {
    if (stream->failed) return 0;
    if (s.HD >= 1 && s.HD <= 256 && s.NH % s.NKV == 0 && s.Tq >= 1 && s.Tq <= s.Tk && s.B <= 65535) return 1;
    error_set("attention: %d queries of %d keys, %d heads of %d over %d; heads of up to 256, queries no more than keys",
              s.Tq, s.Tk, s.NH, s.HD, s.NKV);
    stream->failed = 1;
    return 0;
}

#ifndef FLOATX_FP32
// 1 if rows can be copied 16 bytes at a time. tensors: n of them.
static inline int attention_aligned(const void *const *tensors, int n, AttentionShape s) {
    uintptr_t bits = ((uintptr_t)s.q_stride | (uintptr_t)s.kv_stride) * sizeof(floatX);
    for (int i = 0; i < n; i++) bits |= (uintptr_t)tensors[i];
    return bits % 16 == 0;
}

template <int HD>
static void attention_forward_tensor(floatX *out, float *lse, const floatX *q, const floatX *k, const floatX *v,
                                     AttentionShape s, Stream *stream) {
    dim3 grid((unsigned)s.NH, (unsigned)s.B, attention_tiles(s.Tq, forward_rows<HD>()));
    ATTENTION_LAUNCH((attention_forward_mma<HD>), grid, ATTENTION_THREADS, forward_shared<HD>(), stream, out, lse, q, k,
                     v, s);
}

template <int HD>
static void attention_backward_tensor(floatX *dq, floatX *dk, floatX *dv, float2 *stats, const floatX *dout,
                                      const floatX *out, const float *lse, const floatX *q, const floatX *k,
                                      const floatX *v, AttentionShape s, Stream *stream) {
    dim3 grid((unsigned)s.NH, (unsigned)s.B, attention_tiles(s.Tq, dq_rows<HD>()));
    ATTENTION_LAUNCH((attention_dq_mma<HD>), grid, ATTENTION_THREADS, dq_shared<HD>(), stream, dq, stats, dout, out,
                     lse, q, k, v, s);
    grid = dim3((unsigned)s.NKV, (unsigned)s.B, attention_tiles(s.Tk, dkv_rows<HD>()));
    ATTENTION_LAUNCH((attention_dkv_mma<HD>), grid, ATTENTION_THREADS, dkv_shared<HD>(), stream, dk, dv, dout, stats, q,
                     k, v, s);
}
#endif

template <int TILE>
static void attention_forward_tiled(floatX *out, float *lse, const floatX *q, const floatX *k, const floatX *v,
                                    AttentionShape s, Stream *stream) {
    dim3 grid((unsigned)s.NH, (unsigned)s.B, attention_tiles(s.Tq, TILE));
    ATTENTION_LAUNCH((attention_forward_plain<TILE>), grid, PLAIN_THREADS, plain_shared(3, s.HD), stream, out, lse, q,
                     k, v, s);
}

template <int TILE>
static void attention_backward_tiled(floatX *dq, floatX *dk, floatX *dv, float2 *stats, const floatX *dout,
                                     const floatX *out, const float *lse, const floatX *q, const floatX *k,
                                     const floatX *v, AttentionShape s, Stream *stream) {
    dim3 grid((unsigned)s.NH, (unsigned)s.B, attention_tiles(s.Tq, TILE));
    ATTENTION_LAUNCH((attention_dq_plain<TILE>), grid, PLAIN_THREADS, plain_shared(4, s.HD), stream, dq, stats, dout,
                     out, lse, q, k, v, s);
    grid = dim3((unsigned)s.NKV, (unsigned)s.B, attention_tiles(s.Tk, TILE));
    ATTENTION_LAUNCH((attention_dkv_plain<TILE>), grid, PLAIN_THREADS, plain_shared(4, s.HD), stream, dk, dv, dout,
                     stats, q, k, v, s);
}

// out (B, Tq, NH*HD) packed; lse (B, NH, Tq); q (B, Tq, ...), k, v (B, Tk, ...) with the strides of the shape.
static inline void attention_forward(floatX *out, float *lse, const floatX *q, const floatX *k, const floatX *v,
                                     AttentionShape s, Stream *stream) {
    if (!attention_fits(s, stream)) return;
#ifndef FLOATX_FP32
    const void *tensors[] = {out, q, k, v};
    int aligned = attention_aligned(tensors, 4, s);
    if (aligned && s.HD == 64) return attention_forward_tensor<64>(out, lse, q, k, v, s, stream);
    if (aligned && s.HD == 96) return attention_forward_tensor<96>(out, lse, q, k, v, s, stream);
    if (aligned && s.HD == 128) return attention_forward_tensor<128>(out, lse, q, k, v, s, stream);
#endif
    switch (plain_tile(s.HD)) {
    case 64: return attention_forward_tiled<64>(out, lse, q, k, v, s, stream);
    case 32: return attention_forward_tiled<32>(out, lse, q, k, v, s, stream);
    default: return attention_forward_tiled<16>(out, lse, q, k, v, s, stream);
    }
}

// dq, dk, dv overwritten, laid out as q, k, v. dout, out (B, T, NH*HD) packed; lse (B, NH, T). Tq must equal Tk.
static inline void attention_backward(floatX *dq, floatX *dk, floatX *dv, const floatX *dout, const floatX *out,
                                      const float *lse, const floatX *q, const floatX *k, const floatX *v,
                                      AttentionShape s, Stream *stream) {
    if (!attention_fits(s, stream)) return;
    float2 *stats = (float2 *)scratch_get(&stream->scratch[SCRATCH_OP], attention_bytes(s, stream->precision, 1));
    if (stats == NULL) {
        stream->failed = 1;
        return;
    }
#ifndef FLOATX_FP32
    const void *tensors[] = {dq, dk, dv, dout, out, q, k, v};
    int aligned = attention_aligned(tensors, 8, s);
    if (aligned && s.HD == 64)
        return attention_backward_tensor<64>(dq, dk, dv, stats, dout, out, lse, q, k, v, s, stream);
    if (aligned && s.HD == 96)
        return attention_backward_tensor<96>(dq, dk, dv, stats, dout, out, lse, q, k, v, s, stream);
    if (aligned && s.HD == 128)
        return attention_backward_tensor<128>(dq, dk, dv, stats, dout, out, lse, q, k, v, s, stream);
#endif
    switch (plain_tile(s.HD)) {
    case 64: return attention_backward_tiled<64>(dq, dk, dv, stats, dout, out, lse, q, k, v, s, stream);
    case 32: return attention_backward_tiled<32>(dq, dk, dv, stats, dout, out, lse, q, k, v, s, stream);
    default: return attention_backward_tiled<16>(dq, dk, dv, stats, dout, out, lse, q, k, v, s, stream);
    }
}

#endif
