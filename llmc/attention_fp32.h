// Attention in fp32 (attention.h has the formulas), blocked over queries and keys. One task is one (sequence, key/value
// head) with all its query heads, so every sum has a fixed order and thread counts agree bit for bit.
#ifndef LLMC_ATTENTION_FP32_H
#define LLMC_ATTENTION_FP32_H

#include <math.h>   // logf, sqrtf
#include <stddef.h> // size_t

#include "attention_shape.h"
#include "device.h" // floatX, Stream
#include "vmath.h"  // exp_simd

#if defined(__AVX512F__)
#define TILE_LANES 16
#elif defined(__AVX__)
#define TILE_LANES 8
#else
#define TILE_LANES 4
#endif
enum { TILE_MAX_ROWS = 8, TILE_MAX_VECTORS = 4 };
typedef float TileVector __attribute__((vector_size(4 * TILE_LANES), aligned(4), may_alias));

#define ATTENTION_BLOCK 64 // queries and keys of one block of S

static inline int attention_padded(int n) {
    return (n + TILE_LANES - 1) / TILE_LANES * TILE_LANES;
}

// c (R, V*LANES) [+]= a (R, K) b (K, V*LANES); a's element (r,k) is a[r*row_step + k*col_step]. R and V are constants
// at every call, so that the sums stay in registers.
__attribute__((always_inline)) static inline void tile_product(float *c, int ldc, const float *a, int row_step,
                                                               int col_step, const float *b, int ldb, int K,
                                                               int accumulate, const int R, const int V) {
    TileVector sum[TILE_MAX_ROWS][TILE_MAX_VECTORS];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) {
            TileVector zero = {0};
            sum[r][v] = accumulate ? *(const TileVector *)(c + r * ldc + v * TILE_LANES) : zero;
        }
    }
    for (int k = 0; k < K; k++) {
        TileVector row[TILE_MAX_VECTORS];
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) row[v] = *(const TileVector *)(b + (size_t)k * ldb + v * TILE_LANES);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            float value = a[r * row_step + k * col_step];
#pragma GCC unroll 8
            for (int v = 0; v < V; v++) sum[r][v] += value * row[v];
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) *(TileVector *)(c + r * ldc + v * TILE_LANES) = sum[r][v];
    }
}

// All rows of a strip of V vectors: R at a time, then 4, 2 and 1. Few enough sums for 32 registers (16: the compiler
// spills some), enough to hide the latency of the multiply-add.
__attribute__((always_inline)) static inline void tile_strip(float *c, int ldc, const float *a, int row_step,
                                                             int col_step, const float *b, int ldb, int rows, int K,
                                                             int accumulate, const int R, const int V) {
    int r = 0;
    for (; r + R <= rows; r += R)
        tile_product(c + r * ldc, ldc, a + r * row_step, row_step, col_step, b, ldb, K, accumulate, R, V);
    for (; r + 4 <= rows; r += 4)
        tile_product(c + r * ldc, ldc, a + r * row_step, row_step, col_step, b, ldb, K, accumulate, 4, V);
    for (; r + 2 <= rows; r += 2)
        tile_product(c + r * ldc, ldc, a + r * row_step, row_step, col_step, b, ldb, K, accumulate, 2, V);
    for (; r < rows; r++)
        tile_product(c + r * ldc, ldc, a + r * row_step, row_step, col_step, b, ldb, K, accumulate, 1, V);
}

// c (rows, width) [+]= a b for any number of rows; width is a multiple of TILE_LANES.
static inline void tile_matmul(float *c, int ldc, const float *a, int row_step, int col_step, const float *b, int ldb,
                               int rows, int width, int K, int accumulate) {
    int left = width / TILE_LANES;
    while (left > 0) {
        int vectors = left >= 4 ? 4 : left >= 2 ? 2 : 1;
        if (vectors == 4)
            tile_strip(c, ldc, a, row_step, col_step, b, ldb, rows, K, accumulate, 6, 4);
        else if (vectors == 2)
            tile_strip(c, ldc, a, row_step, col_step, b, ldb, rows, K, accumulate, 8, 2);
        else
            tile_strip(c, ldc, a, row_step, col_step, b, ldb, rows, K, accumulate, 8, 1);
        c += vectors * TILE_LANES, b += vectors * TILE_LANES, left -= vectors;
    }
}

// to (rows, width) = from (rows, n) * scale with row stride ld, columns n..width-1 zero
static inline void attention_pack(float *to, int width, const floatX *from, size_t ld, int rows, int n, float scale) {
    for (int r = 0; r < rows; r++) {
#pragma omp simd
        for (int i = 0; i < n; i++) to[(size_t)r * width + i] = from[r * ld + i] * scale;
        for (int i = n; i < width; i++) to[(size_t)r * width + i] = 0.0f;
    }
}

// to (rows, n) with row stride ld = from (rows, width) * scale, padding dropped
static inline void attention_unpack(floatX *to, size_t ld, const float *from, int width, int rows, int n, float scale) {
    for (int r = 0; r < rows; r++) {
#pragma omp simd
        for (int i = 0; i < n; i++) to[r * ld + i] = from[(size_t)r * width + i] * scale;
    }
}

// to (n, ld_to) = the transpose of from (rows, n), columns rows..ld_to-1 zero
static inline void attention_transpose(float *to, int ld_to, const float *from, int ld, int rows, int n) {
    for (int i = 0; i < n; i++) {
        for (int r = 0; r < rows; r++) to[(size_t)i * ld_to + r] = from[(size_t)r * ld + i];
        for (int r = rows; r < ld_to; r++) to[(size_t)i * ld_to + r] = 0.0f;
    }
}

// Arguments as attention_forward.
static inline void attention_forward_fp32(floatX *out, float *lse, const floatX *q, const floatX *k, const floatX *v,
                                          AttentionShape s, Stream *stream) {
    enum { BLOCK = ATTENTION_BLOCK };
    int D = attention_padded(s.HD), T_pad = attention_padded(s.Tk), group = s.NH / s.NKV;
    float scale = 1.0f / sqrtf((float)s.HD);
    size_t per_thread = (size_t)s.Tk * D + (size_t)s.HD * T_pad + BLOCK * (2 * (size_t)D + BLOCK);
    float *scratch =
        (float *)scratch_get(&stream->scratch[SCRATCH_OP], sizeof(float) * per_thread * (size_t)stream->threads);
    if (scratch == NULL) {
        stream->failed = 1;
        return;
    }
#pragma omp parallel for num_threads(stream->threads) schedule(dynamic)
    for (int task = 0; task < s.B * s.NKV; task++) {
        int batch = task / s.NKV, kv_head = task % s.NKV;
        const int32_t *starts = attention_starts(&s, batch);
        float *values = scratch + per_thread * (size_t)omp_get_thread_num(); // (Tk, D)
        float *keys_t = values + (size_t)s.Tk * D;                           // (HD, T_pad)
        float *queries = keys_t + (size_t)s.HD * T_pad;                      // (BLOCK, D), scaled
        float *sums = queries + (size_t)BLOCK * D;                           // (BLOCK, D), out before dividing
        float *scores = sums + (size_t)BLOCK * D;                            // (BLOCK, BLOCK)
        size_t kv_at = (size_t)batch * s.Tk * s.kv_stride + (size_t)kv_head * s.HD;
        attention_pack(values, D, k + kv_at, (size_t)s.kv_stride, s.Tk, s.HD, 1.0f);
        attention_transpose(keys_t, T_pad, values, D, s.Tk, s.HD);
        attention_pack(values, D, v + kv_at, (size_t)s.kv_stride, s.Tk, s.HD, 1.0f);
        for (int head = kv_head * group; head < (kv_head + 1) * group; head++) {
            for (int i0 = 0; i0 < s.Tq; i0 += BLOCK) {
                int rows = s.Tq - i0 < BLOCK ? s.Tq - i0 : BLOCK;
                int last_key = s.Tk - s.Tq + i0 + rows - 1; // of the block's last query
                float max[BLOCK], total[BLOCK];
                attention_pack(queries, D, q + ((size_t)batch * s.Tq + i0) * s.q_stride + (size_t)head * s.HD,
                               (size_t)s.q_stride, rows, s.HD, scale);
                memset(sums, 0, sizeof(float) * (size_t)rows * D);
                for (int r = 0; r < rows; r++) max[r] = -INFINITY, total[r] = 0.0f;
                int first_key = attention_first(&s, starts, s.Tk - s.Tq + i0) / BLOCK * BLOCK;
                for (int j0 = first_key; j0 <= last_key; j0 += BLOCK) {
                    int keys = s.Tk - j0 < BLOCK ? s.Tk - j0 : BLOCK;
                    tile_matmul(scores, BLOCK, queries, D, 1, keys_t + j0, T_pad, rows, attention_padded(keys), s.HD,
                                0);
                    for (int r = 0; r < rows; r++) {
                        float *row = scores + r * BLOCK, block_max = -INFINITY, sum = 0.0f;
                        int seen = s.Tk - s.Tq + i0 + r - j0 + 1; // keys of this block the query may see
                        seen = seen < 0 ? 0 : seen > keys ? keys : seen;
                        int unseen = attention_unseen(&s, starts, s.Tk - s.Tq + i0 + r, j0, seen);
#pragma omp simd reduction(max : block_max)
                        for (int c = unseen; c < seen; c++) block_max = row[c] > block_max ? row[c] : block_max;
                        if (block_max > max[r]) { // rescale what was summed under the old maximum
                            float shrink = exp_simd(max[r] - block_max);
                            total[r] *= shrink;
                            max[r] = block_max;
#pragma omp simd
                            for (int d = 0; d < D; d++) sums[(size_t)r * D + d] *= shrink;
                        }
                        float top = max[r];
#pragma omp simd reduction(+ : sum)
                        for (int c = unseen; c < seen; c++) {
                            row[c] = exp_simd(row[c] - top);
                            sum += row[c];
                        }
                        for (int c = 0; c < unseen; c++) row[c] = 0.0f;
                        for (int c = seen; c < keys; c++) row[c] = 0.0f;
                        total[r] += sum;
                    }
                    tile_matmul(sums, D, scores, BLOCK, 1, values + (size_t)j0 * D, D, rows, D, keys, 1);
                }
                for (int r = 0; r < rows; r++) {
                    floatX *to = out + (((size_t)batch * s.Tq + i0 + r) * s.NH + head) * s.HD;
                    float inverse = 1.0f / total[r];
#pragma omp simd
                    for (int d = 0; d < s.HD; d++) to[d] = sums[(size_t)r * D + d] * inverse;
                    lse[((size_t)batch * s.NH + head) * s.Tq + i0 + r] = max[r] + logf(total[r]);
                }
            }
        }
    }
}

// Floats of scratch a thread of the backward uses, which is more than the forward's.
static inline size_t attention_floats_fp32(AttentionShape s) {
    size_t matrix = (size_t)s.Tk * attention_padded(s.HD), turned = (size_t)s.HD * attention_padded(s.Tk);
    return 7 * matrix + 2 * turned + (size_t)s.Tk + 2 * ATTENTION_BLOCK * ATTENTION_BLOCK;
}

static inline size_t attention_bytes_fp32(AttentionShape s, int threads) {
    return sizeof(float) * attention_floats_fp32(s) * (size_t)threads;
}

// Arguments as attention_backward.
static inline void attention_backward_fp32(floatX *dq, floatX *dk, floatX *dv, const floatX *dout, const floatX *out,
                                           const float *lse, const floatX *q, const floatX *k, const floatX *v,
                                           AttentionShape s, Stream *stream) {
    enum { BLOCK = ATTENTION_BLOCK };
    int T = s.Tk, D = attention_padded(s.HD), T_pad = attention_padded(T), group = s.NH / s.NKV;
    float scale = 1.0f / sqrtf((float)s.HD);
    size_t matrix = (size_t)T * D, turned = (size_t)s.HD * T_pad;
    size_t per_thread = attention_floats_fp32(s);
    float *scratch = (float *)scratch_get(&stream->scratch[SCRATCH_OP], attention_bytes_fp32(s, stream->threads));
    if (scratch == NULL) {
        stream->failed = 1;
        return;
    }
#pragma omp parallel for num_threads(stream->threads) schedule(dynamic)
    for (int task = 0; task < s.B * s.NKV; task++) {
        int batch = task / s.NKV, kv_head = task % s.NKV;
        const int32_t *starts = attention_starts(&s, batch);
        float *keys = scratch + per_thread * (size_t)omp_get_thread_num(); // (T, D) as all below but two
        float *values = keys + matrix, *queries = values + matrix, *grads = queries + matrix;
        float *dkeys = grads + matrix, *dvalues = dkeys + matrix, *dqueries = dvalues + matrix;
        float *keys_t = dqueries + matrix, *values_t = keys_t + turned; // (HD, T_pad)
        float *delta = values_t + turned;                               // (T)
        float *probs = delta + T, *dscores = probs + BLOCK * BLOCK;     // (BLOCK, BLOCK)
        size_t kv_at = (size_t)batch * T * s.kv_stride + (size_t)kv_head * s.HD;
        attention_pack(keys, D, k + kv_at, (size_t)s.kv_stride, T, s.HD, 1.0f);
        attention_pack(values, D, v + kv_at, (size_t)s.kv_stride, T, s.HD, 1.0f);
        attention_transpose(keys_t, T_pad, keys, D, T, s.HD);
        attention_transpose(values_t, T_pad, values, D, T, s.HD);
        memset(dkeys, 0, sizeof(float) * matrix);
        memset(dvalues, 0, sizeof(float) * matrix);
        for (int head = kv_head * group; head < (kv_head + 1) * group; head++) {
            size_t q_at = (size_t)batch * T * s.q_stride + (size_t)head * s.HD;
            size_t out_ld = (size_t)s.NH * s.HD, out_at = (size_t)batch * T * out_ld + (size_t)head * s.HD;
            const float *lse_row = lse + ((size_t)batch * s.NH + head) * T;
            attention_pack(queries, D, q + q_at, (size_t)s.q_stride, T, s.HD, scale);
            attention_pack(grads, D, dout + out_at, out_ld, T, s.HD, 1.0f);
            memset(dqueries, 0, sizeof(float) * matrix);
            for (int t = 0; t < T; t++) {
                float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
                for (int d = 0; d < s.HD; d++) sum += grads[(size_t)t * D + d] * out[out_at + t * out_ld + d];
                delta[t] = sum;
            }
            for (int j0 = 0; j0 < T; j0 += BLOCK) {
                int n_keys = T - j0 < BLOCK ? T - j0 : BLOCK, width = attention_padded(n_keys);
                for (int i0 = j0; i0 < T; i0 += BLOCK) {
                    int rows = T - i0 < BLOCK ? T - i0 : BLOCK;
                    if (attention_first(&s, starts, i0) >= j0 + n_keys) break; // nor do later ones see these keys
                    const float *query = queries + (size_t)i0 * D, *grad = grads + (size_t)i0 * D;
                    tile_matmul(probs, BLOCK, query, D, 1, keys_t + j0, T_pad, rows, width, s.HD, 0);
                    tile_matmul(dscores, BLOCK, grad, D, 1, values_t + j0, T_pad, rows, width, s.HD, 0);
                    for (int r = 0; r < rows; r++) {
                        float *p = probs + r * BLOCK, *ds = dscores + r * BLOCK;
                        float log_sum = lse_row[i0 + r], shift = delta[i0 + r];
                        int seen = i0 + r - j0 + 1;
                        seen = seen > n_keys ? n_keys : seen;
                        int unseen = attention_unseen(&s, starts, i0 + r, j0, seen);
#pragma omp simd
                        for (int c = unseen; c < seen; c++) {
                            p[c] = exp_simd(p[c] - log_sum);
                            ds[c] = p[c] * (ds[c] - shift);
                        }
                        for (int c = 0; c < unseen; c++) p[c] = 0.0f, ds[c] = 0.0f;
                        for (int c = seen; c < n_keys; c++) p[c] = 0.0f, ds[c] = 0.0f;
                    }
                    tile_matmul(dvalues + (size_t)j0 * D, D, probs, 1, BLOCK, grad, D, n_keys, D, rows, 1);
                    tile_matmul(dkeys + (size_t)j0 * D, D, dscores, 1, BLOCK, query, D, n_keys, D, rows, 1);
                    tile_matmul(dqueries + (size_t)i0 * D, D, dscores, BLOCK, 1, keys + (size_t)j0 * D, D, rows, D,
                                n_keys, 1);
                }
            }
            attention_unpack(dq + q_at, (size_t)s.q_stride, dqueries, D, T, s.HD, scale);
        }
        attention_unpack(dk + kv_at, (size_t)s.kv_stride, dkeys, D, T, s.HD, 1.0f);
        attention_unpack(dv + kv_at, (size_t)s.kv_stride, dvalues, D, T, s.HD, 1.0f);
    }
}

#endif
