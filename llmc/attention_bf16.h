// Attention with bf16 inputs to its products (attention.h has the formulas). One task is one (sequence, key/value head)
// with all its query heads, so every sum has a fixed order and thread counts agree bit for bit. A block of queries
// meets every key its last one sees at once, so its scores stay in the cache of the thread and the softmax of a row
// takes one go. Masked probabilities are zeros that are multiplied.
#ifndef LLMC_ATTENTION_BF16_H
#define LLMC_ATTENTION_BF16_H

#include <math.h>   // logf, sqrtf
#include <stddef.h> // size_t

#include "attention_shape.h"
#include "device.h" // floatX, Stream
#include "dtype.h"  // bf16_of_float
#include "matmul.h" // matmul_product
#include "vmath.h"  // exp_simd

#define ATTENTION_QUERIES 64 // of a block

// What a thread works on.
typedef struct {
    int ld;                    // elements between rows of scores
    uint16_t *keys, *values;   // (Tk, HD)
    uint16_t *queries, *grads; // (ATTENTION_QUERIES, HD) of q and dout
    uint16_t *probs, *dscores; // (ATTENTION_QUERIES, ld)
    float *scores, *dprobs;    // (ATTENTION_QUERIES, ld)
    float *out;                // (ATTENTION_QUERIES, HD)
    float *dkeys, *dvalues;    // (Tk, HD)
} AttentionBlock;

static inline void *attention_piece(char *base, size_t *used, size_t n_bytes) {
    void *piece = base != NULL ? base + *used : NULL;
    *used += (n_bytes + DEVICE_ALIGN - 1) / DEVICE_ALIGN * DEVICE_ALIGN;
    return piece;
}

// Lays a thread's memory out, or only counts when base is NULL; returns bytes.
static inline size_t attention_block(AttentionBlock *m, char *base, AttentionShape s) {
    size_t kv = (size_t)s.Tk * s.HD, used = 0, q = ATTENTION_QUERIES * (size_t)s.HD;
    m->ld = (s.Tk + 31) / 32 * 32;
    size_t square = ATTENTION_QUERIES * (size_t)m->ld;
    m->keys = (uint16_t *)attention_piece(base, &used, kv * 2);
    m->values = (uint16_t *)attention_piece(base, &used, kv * 2);
    m->queries = (uint16_t *)attention_piece(base, &used, q * 2);
    m->grads = (uint16_t *)attention_piece(base, &used, q * 2);
    m->probs = (uint16_t *)attention_piece(base, &used, square * 2);
    m->dscores = (uint16_t *)attention_piece(base, &used, square * 2);
    m->scores = (float *)attention_piece(base, &used, square * 4);
    m->dprobs = (float *)attention_piece(base, &used, square * 4);
    m->out = (float *)attention_piece(base, &used, q * 4);
    m->dkeys = (float *)attention_piece(base, &used, kv * 4);
    m->dvalues = (float *)attention_piece(base, &used, kv * 4);
    return used;
}

static inline size_t attention_bytes_bf16(AttentionShape s, int threads) {
    AttentionBlock m;
    return attention_block(&m, NULL, s) * (size_t)threads;
}

// to (rows, n) bf16 = from (rows, n) with row stride ld
static inline void attention_round(uint16_t *to, const floatX *from, size_t ld, int rows, int n) {
    for (int r = 0; r < rows; r++) {
#pragma omp simd
        for (int i = 0; i < n; i++) to[(size_t)r * n + i] = bf16_of_float(from[r * ld + i]);
    }
}

// to (rows, n) with row stride ld = from (rows, n)
static inline void attention_store(floatX *to, size_t ld, const float *from, int rows, int n) {
    for (int r = 0; r < rows; r++) memcpy(to + r * ld, from + (size_t)r * n, sizeof(float) * (size_t)n);
}

// Keys that no query from a position on sees, in whole blocks so that products come in few shapes.
static inline int attention_hidden_keys(const AttentionShape *s, const int32_t *starts, int position) {
    return attention_first(s, starts, position) / ATTENTION_QUERIES * ATTENTION_QUERIES;
}

// The block of queries first .. first+queries-1 of one head: out and lse, from m->keys and m->values. starts: of the
// sequence, or NULL.
static inline void attention_block_forward(floatX *out, float *lse, const floatX *q, const AttentionBlock *m, int first,
                                           int queries, const int32_t *starts, AttentionShape s, Stream *worker) {
    int HD = s.HD, at = s.Tk - s.Tq + first, hidden = attention_hidden_keys(&s, starts, at);
    int keys = at + queries - hidden;
    const uint16_t *k = m->keys + (size_t)hidden * HD, *v = m->values + (size_t)hidden * HD;
    float scale = 1.0f / sqrtf((float)HD);
    attention_round(m->queries, q, (size_t)s.q_stride, queries, HD);
    matmul_product(m->scores, m->ld, m->queries, HD, 0, k, HD, 1, queries, keys, HD, 1, 0, worker);
    float total[ATTENTION_QUERIES];
    for (int r = 0; r < queries; r++) {
        int seen = keys - queries + r + 1, unseen = attention_unseen(&s, starts, at + r, hidden, seen);
        const float *row = m->scores + (size_t)r * m->ld;
        uint16_t *p = m->probs + (size_t)r * m->ld;
        float max = row[unseen], sum = 0.0f;
#pragma omp simd reduction(max : max)
        for (int c = unseen; c < seen; c++) max = row[c] > max ? row[c] : max;
#pragma omp simd reduction(+ : sum)
        for (int c = unseen; c < seen; c++) {
            float e = exp_simd((row[c] - max) * scale);
            p[c] = bf16_of_float(e);
            sum += e;
        }
        memset(p, 0, sizeof *p * (size_t)unseen);
        memset(p + seen, 0, sizeof *p * (size_t)(keys - seen));
        total[r] = sum;
        lse[r] = max * scale;
    }
    matmul_product(m->out, HD, m->probs, m->ld, 0, v, HD, 0, queries, HD, keys, 1, 0, worker);
    for (int r = 0; r < queries; r++) {
        float inverse = 1.0f / total[r];
        lse[r] += logf(total[r]);
#pragma omp simd
        for (int d = 0; d < HD; d++) out[(size_t)r * s.NH * HD + d] = m->out[(size_t)r * HD + d] * inverse;
    }
}

// Arguments as attention_forward.
static inline void attention_forward_bf16(floatX *out, float *lse, const floatX *q, const floatX *k, const floatX *v,
                                          AttentionShape s, Stream *stream) {
    AttentionBlock counted;
    size_t per_thread = attention_block(&counted, NULL, s), ld = (size_t)s.NH * s.HD;
    char *base = (char *)scratch_get(&stream->scratch[SCRATCH_OP], attention_bytes_bf16(s, stream->threads));
    if (base == NULL || stream_workers(stream)) {
        stream->failed = 1;
        return;
    }
#pragma omp parallel num_threads(stream->threads)
    {
        AttentionBlock m;
        Stream *worker = stream_worker(stream);
        attention_block(&m, base + per_thread * (size_t)omp_get_thread_num(), s);
#pragma omp for schedule(dynamic)
        for (int task = 0; task < s.B * s.NKV; task++) {
            int b = task / s.NKV, kv_head = task % s.NKV, group = s.NH / s.NKV;
            size_t kv_at = (size_t)b * s.Tk * s.kv_stride + (size_t)kv_head * s.HD;
            attention_round(m.keys, k + kv_at, (size_t)s.kv_stride, s.Tk, s.HD);
            attention_round(m.values, v + kv_at, (size_t)s.kv_stride, s.Tk, s.HD);
            for (int head = kv_head * group; head < (kv_head + 1) * group; head++) {
                for (int first = 0; first < s.Tq; first += ATTENTION_QUERIES) {
                    int queries = s.Tq - first < ATTENTION_QUERIES ? s.Tq - first : ATTENTION_QUERIES;
                    size_t row = (size_t)b * s.Tq + first, stat = ((size_t)b * s.NH + head) * s.Tq + first;
                    attention_block_forward(out + row * ld + (size_t)head * s.HD, lse + stat,
                                            q + row * s.q_stride + (size_t)head * s.HD, &m, first, queries,
                                            attention_starts(&s, b), s, worker);
                }
            }
        }
    }
    stream_gather(stream, "attention");
}

// The block's dq, and its shares of m->dkeys and m->dvalues: written where add is 0.
static inline void attention_block_backward(floatX *dq, const floatX *dout, const floatX *out, const float *lse,
                                            const floatX *q, const AttentionBlock *m, int first, int queries, int add,
                                            const int32_t *starts, AttentionShape s, Stream *worker) {
    int HD = s.HD, hidden = attention_hidden_keys(&s, starts, first), keys = first + queries - hidden, ld = m->ld;
    size_t hidden_at = (size_t)hidden * HD;
    const uint16_t *k = m->keys + hidden_at, *v = m->values + hidden_at;
    size_t out_ld = (size_t)s.NH * HD;
    float scale = 1.0f / sqrtf((float)HD);
    attention_round(m->queries, q, (size_t)s.q_stride, queries, HD);
    attention_round(m->grads, dout, out_ld, queries, HD);
    matmul_product(m->scores, ld, m->queries, HD, 0, k, HD, 1, queries, keys, HD, 1, 0, worker);
    matmul_product(m->dprobs, ld, m->grads, HD, 0, v, HD, 1, queries, keys, HD, 1, 0, worker);
    for (int r = 0; r < queries; r++) {
        int seen = first + r + 1 - hidden, unseen = attention_unseen(&s, starts, first + r, hidden, seen);
        const float *score = m->scores + (size_t)r * ld, *dprob = m->dprobs + (size_t)r * ld;
        uint16_t *p = m->probs + (size_t)r * ld, *ds = m->dscores + (size_t)r * ld;
        float log_sum = lse[r], delta = 0.0f;
#pragma omp simd reduction(+ : delta)
        for (int d = 0; d < HD; d++) delta += dout[r * out_ld + d] * out[r * out_ld + d];
#pragma omp simd
        for (int c = unseen; c < seen; c++) {
            float e = exp_simd(score[c] * scale - log_sum);
            p[c] = bf16_of_float(e);
            ds[c] = bf16_of_float(e * (dprob[c] - delta) * scale);
        }
        memset(p, 0, sizeof *p * (size_t)unseen);
        memset(ds, 0, sizeof *ds * (size_t)unseen);
        memset(p + seen, 0, sizeof *p * (size_t)(keys - seen));
        memset(ds + seen, 0, sizeof *ds * (size_t)(keys - seen));
    }
    matmul_product(m->dvalues + hidden_at, HD, m->probs, ld, 1, m->grads, HD, 0, keys, HD, queries, 1, add, worker);
    matmul_product(m->dkeys + hidden_at, HD, m->dscores, ld, 1, m->queries, HD, 0, keys, HD, queries, 1, add, worker);
    matmul_product(m->out, HD, m->dscores, ld, 0, k, HD, 0, queries, HD, keys, 1, 0, worker);
    attention_store(dq, (size_t)s.q_stride, m->out, queries, HD);
}

// Arguments as attention_backward. The last block of a task's first head goes first: it meets every key and so writes
// dkeys and dvalues, all others add to them. With documents or a window no block need meet every key: all add to zeros.
static inline void attention_backward_bf16(floatX *dq, floatX *dk, floatX *dv, const floatX *dout, const floatX *out,
                                           const float *lse, const floatX *q, const floatX *k, const floatX *v,
                                           AttentionShape s, Stream *stream) {
    AttentionBlock counted;
    size_t per_thread = attention_block(&counted, NULL, s), ld = (size_t)s.NH * s.HD, stride = (size_t)s.kv_stride;
    char *base = (char *)scratch_get(&stream->scratch[SCRATCH_OP], attention_bytes_bf16(s, stream->threads));
    int T = s.Tk, last = (T - 1) / ATTENTION_QUERIES * ATTENTION_QUERIES;
    if (base == NULL || stream_workers(stream)) {
        stream->failed = 1;
        return;
    }
#pragma omp parallel num_threads(stream->threads)
    {
        AttentionBlock m;
        Stream *worker = stream_worker(stream);
        attention_block(&m, base + per_thread * (size_t)omp_get_thread_num(), s);
#pragma omp for schedule(dynamic)
        for (int task = 0; task < s.B * s.NKV; task++) {
            int b = task / s.NKV, kv_head = task % s.NKV, group = s.NH / s.NKV;
            size_t kv_at = (size_t)b * T * stride + (size_t)kv_head * s.HD;
            attention_round(m.keys, k + kv_at, stride, T, s.HD);
            attention_round(m.values, v + kv_at, stride, T, s.HD);
            if (!attention_sees_all(&s)) {
                memset(m.dkeys, 0, sizeof(float) * (size_t)T * (size_t)s.HD);
                memset(m.dvalues, 0, sizeof(float) * (size_t)T * (size_t)s.HD);
            }
            for (int head = kv_head * group; head < (kv_head + 1) * group; head++) {
                for (int first = last; first >= 0; first -= ATTENTION_QUERIES) {
                    int queries = T - first < ATTENTION_QUERIES ? T - first : ATTENTION_QUERIES;
                    int add = first < last || head > kv_head * group || !attention_sees_all(&s);
                    size_t row = (size_t)b * T + first, stat = ((size_t)b * s.NH + head) * T + first;
                    size_t q_at = row * s.q_stride + (size_t)head * s.HD, out_at = row * ld + (size_t)head * s.HD;
                    attention_block_backward(dq + q_at, dout + out_at, out + out_at, lse + stat, q + q_at, &m, first,
                                             queries, add, attention_starts(&s, b), s, worker);
                }
            }
            attention_store(dk + kv_at, stride, m.dkeys, T, s.HD);
            attention_store(dv + kv_at, stride, m.dvalues, T, s.HD);
        }
    }
    stream_gather(stream, "attention");
}

#endif
