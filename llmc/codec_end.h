// What one side of one boundary of one replica remembers between messages. Part of codec.h and codec.cuh.
//
//   CodecEnd end;
//   CodecShape shape = {H, n, T, slots, n_samples};
//   if (codec_end_init(&end, &codec, shape)) return -1;
//   ... codec_encode(&codec, &end, ...), codec_decode(&codec, &end, ...) ...
//   CodecState states[CODEC_STATES];  int n = codec_end_states(&end, states);    // what a checkpoint holds
//   codec_end_free(&end);
// All of it is host memory: a checkpoint reads and writes it as it lies, and any GPU of a cell may take its turn. The
// two sides of a boundary see the same messages, so they hold the same bytes.
#ifndef LLMC_CODEC_END_H
#define LLMC_CODEC_END_H

#include <math.h>   // sqrt
#include <stdint.h> // fixed-width integers
#include <stdlib.h> // calloc, free
#include <string.h> // memset, memcpy

#include "codec_format.h" // Codec, codec_topk_kept
#include "error.h"        // error_set
#include "rand.h"         // rand_normal
#include "topk_row.h"     // topk_set_bytes

typedef struct {
    int H, n, T;       // values of a row, the most rows of a message, tokens of a sequence
    int slots;         // micro-batches whose backward may be awaited at once
    int64_t n_samples; // windows of the training data; 0 without training
} CodecShape;

typedef struct {
    CodecShape shape;
    // topk: the sets of micro-batches whose backward is to come, slot micro-batch % slots
    int set_bytes;       // of a token
    unsigned char *sets; // (slots, n, set_bytes)
    int *set_rows;       // (slots) tokens of the set, 0: none
    // bottleneck: the projection (K, H) and its transpose
    float *basis, *basis_back;
    // aqsgd: each window's last activation in bf16
    uint16_t *cache;     // (n_samples, T, H)
    unsigned char *seen; // (n_samples)
    // klt: tables that the anchor has brought, and the controllers; by direction
    KltEnd klt[2];
} CodecEnd;

// A piece of an end's memory that outlives a step.
typedef struct {
    const char *name;
    void *data;
    int64_t n_bytes;
} CodecState;

enum { CODEC_STATES = 8 };

static inline void codec_end_free(CodecEnd *end) {
    free(end->sets);
    free(end->set_rows);
    free(end->basis);
    free(end->basis_back);
    free(end->cache);
    free(end->seen);
    memset(end, 0, sizeof *end);
}

// P (K, H) with P P^T = I from normals of the seed: Gram-Schmidt in double, twice, so that all kinds of cells find the
// same one. back (H, K): its transpose. Returns 0, or -1: no memory.
static inline int codec_basis(float *basis, float *back, int K, int H, uint64_t seed) {
    double *rows = (double *)malloc(sizeof(double) * (size_t)K * (size_t)H);
    if (rows == NULL) return -1;
    rand_normal(basis, (int64_t)K * H, seed, RAND_BOTTLENECK, 0);
    for (int k = 0; k < K; k++) {
        double *row = rows + (size_t)k * H, norm = 0.0;
        for (int h = 0; h < H; h++) row[h] = basis[(size_t)k * H + h];
        for (int i = 0; i < 2 * k; i++) {
            const double *other = rows + (size_t)(i % k) * H;
            double dot = 0.0;
            for (int h = 0; h < H; h++) dot += row[h] * other[h];
            for (int h = 0; h < H; h++) row[h] -= dot * other[h];
        }
        for (int h = 0; h < H; h++) norm += row[h] * row[h];
        for (int h = 0; h < H; h++) row[h] /= sqrt(norm);
    }
    for (int k = 0; k < K; k++)
        for (int h = 0; h < H; h++) basis[(size_t)k * H + h] = back[(size_t)h * K + k] = (float)rows[(size_t)k * H + h];
    free(rows);
    return 0;
}

static inline int codec_end_alloc(CodecEnd *end, const Codec *codec) {
    CodecShape shape = end->shape;
    size_t H = (size_t)shape.H, slots = (size_t)shape.slots, samples = (size_t)shape.n_samples;
    size_t K = (size_t)mask_kept(codec->mask_rate, shape.H);
    switch (codec->kind) {
    case CODEC_TOPK:
        end->set_bytes = topk_set_bytes(codec_topk_kept(codec, shape.H), shape.H);
        end->sets = (unsigned char *)calloc(slots * (size_t)shape.n, (size_t)end->set_bytes);
        end->set_rows = (int *)calloc(slots, sizeof(int));
        return end->sets == NULL || end->set_rows == NULL;
    case CODEC_BOTTLENECK:
        end->basis = (float *)malloc(sizeof(float) * K * H);
        end->basis_back = (float *)malloc(sizeof(float) * K * H);
        return end->basis == NULL || end->basis_back == NULL ||
               codec_basis(end->basis, end->basis_back, (int)K, shape.H, codec->seed);
    case CODEC_AQSGD:
        end->cache = (uint16_t *)calloc(samples * (size_t)shape.T + 1, 2 * H);
        end->seen = (unsigned char *)calloc(samples + 1, 1);
        return end->cache == NULL || end->seen == NULL;
    case CODEC_KLT:
        for (int d = 0; d < 2; d++) end->klt[d].budget = codec_klt_budget(codec, (CodecDirection)d, shape.H);
        return 0;
    default: return 0;
    }
}

// 0, or -1: no memory, and nothing is held.
static inline int codec_end_init(CodecEnd *end, const Codec *codec, CodecShape shape) {
    memset(end, 0, sizeof *end);
    end->shape = shape;
    if (codec_end_alloc(end, codec) == 0) return 0;
    codec_end_free(end);
    return error_set("out of memory for what --codec %s remembers of a boundary", codec_name(codec->kind));
}

// Bytes of what an end of this shape holds.
static inline int64_t codec_end_memory(const Codec *codec, const CodecShape *shape) {
    switch (codec->kind) {
    case CODEC_TOPK:
        return (int64_t)shape->slots * shape->n * topk_set_bytes(codec_topk_kept(codec, shape->H), shape->H);
    case CODEC_BOTTLENECK: return 8 * (int64_t)mask_kept(codec->mask_rate, shape->H) * shape->H;
    case CODEC_AQSGD: return shape->n_samples * (2 * (int64_t)shape->T * shape->H + 1);
    default: return 0;
    }
}

// Fills in the pieces to be saved and read back in place; returns how many. Sets are of a step, and no step is saved
// halfway.
static inline int codec_end_states(const CodecEnd *end, CodecState states[CODEC_STATES]) {
    if (end->klt[0].budget > 0.0) {
        for (int d = 0; d < 2; d++) {
            CodecState control = {d == CODEC_FORWARD ? "forward" : "backward", (void *)end->klt[d].control,
                                  sizeof end->klt[d].control};
            states[d] = control;
        }
        return 2;
    }
    if (end->cache == NULL) return 0;
    int64_t samples = end->shape.n_samples;
    CodecState cache = {"cache", end->cache, 2 * samples * end->shape.T * end->shape.H};
    CodecState seen = {"seen", end->seen, samples};
    states[0] = cache, states[1] = seen;
    return 2;
}

// Remembers a training message's n sets. 0, or -1: they are not the size the end was made for.
static inline int codec_end_keep(CodecEnd *end, const CodecContext *context, const unsigned char *sets, int n) {
    if (!context->training) return 0;
    int slot = context->micro_batch % end->shape.slots;
    if (n > end->shape.n) return error_set("topk: %d tokens where at most %d are expected", n, end->shape.n);
    memcpy(end->sets + (int64_t)slot * end->shape.n * end->set_bytes, sets, (size_t)n * (size_t)end->set_bytes);
    end->set_rows[slot] = n;
    return 0;
}

// The sets of the micro-batch's forward; NULL with a message if there was none.
static inline const unsigned char *codec_end_kept(const CodecEnd *end, const CodecContext *context, int n) {
    int slot = context->micro_batch % end->shape.slots;
    if (end->set_rows[slot] == n) return end->sets + (int64_t)slot * end->shape.n * end->set_bytes;
    error_set("topk: a gradient of %d tokens for micro-batch %d, whose forward had %d", n, context->micro_batch,
              end->set_rows[slot]);
    return NULL;
}

// 1 if sequence s of a message is the first visit of its window: not seen before, nor earlier in the message.
static inline int codec_end_is_first(const CodecEnd *end, const CodecContext *context, int s) {
    int is_first = !end->seen[context->samples[s]];
    for (int i = 0; i < s; i++) is_first = is_first && context->samples[i] != context->samples[s];
    return is_first;
}

// Bytes of aqsgd's forward message of n rows as both ends know it; -1 with a message: the context does not fit the end.
static inline int64_t codec_end_bytes(const Codec *codec, const CodecEnd *end, const CodecContext *context, int n,
                                      int H) {
    int64_t first = 2 * (int64_t)H, later = codec_row_bytes(codec, CODEC_FORWARD, H), n_bytes = 0;
    if (!context->training) return n * first;
    if (context->T != end->shape.T || H != end->shape.H || n % context->T != 0)
        return error_set("aqsgd: %d rows of %d values in sequences of %d; the caches have sequences of %d rows of %d",
                         n, H, context->T, end->shape.T, end->shape.H);
    for (int s = 0; s < n / context->T; s++) {
        if (context->samples[s] < 0 || context->samples[s] >= end->shape.n_samples)
            return error_set("aqsgd: window %lld of %lld", (long long)context->samples[s],
                             (long long)end->shape.n_samples);
        n_bytes += context->T * (codec_end_is_first(end, context, s) ? first : later);
    }
    return n_bytes;
}

// One sequence of a message, its cache (T, H), and its bytes.
typedef struct {
    int is_first;
    uint16_t *cache;
    int64_t n_bytes;
} CodecVisit;

// Visits sequence s of a message that codec_end_bytes has passed; in their order.
static inline CodecVisit codec_end_visit(const Codec *codec, CodecEnd *end, const CodecContext *context, int s, int H) {
    int64_t window = context->samples[s], row = codec_row_bytes(codec, CODEC_FORWARD, H);
    int is_first = !end->seen[window];
    CodecVisit visit = {is_first, end->cache + window * context->T * H, context->T * (is_first ? 2 * (int64_t)H : row)};
    end->seen[window] = 1;
    return visit;
}

#endif
