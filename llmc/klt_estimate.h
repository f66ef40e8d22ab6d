// What the transform codec will take before it has learned anything: memory and bytes of its tables, by formula. Part
// of a program that has klt.h or klt.cuh, whose sizes it names.
//
//   KltShape shape = {H, V, rows, sample, fixed, budget};
//   KltMemory cells = klt_memory_cells(&shape, H, n_boundaries), anchor = klt_memory_anchor(&shape, n_boundaries);
//   int64_t n_bytes = klt_estimate_table(&shape, CODEC_FORWARD);
//
// How many components a table keeps is found by the anchor. Memory is for all of them, the most there can be. Bytes on
// the wire are an estimate, with K = H (1 - exp(-0.9 bits / H)) components for so many bits a token: measured were, H
// 192 and -p 0.9, 0.95, 0.975, 141, 97 and 60 in the mean, where this says 146, 99 and 58.
#ifndef LLMC_KLT_ESTIMATE_H
#define LLMC_KLT_ESTIMATE_H

#include <math.h>   // exp
#include <stdint.h> // int64_t

#include "klt_table.h" // KltHeader, klt_table_bytes

typedef struct {
    int H, V;         // values of a token, tokens of the vocabulary; V 0: states are not predicted
    int rows;         // tokens of a message, at most
    int sample;       // rows of a sample, at most
    int fixed;        // 1: fixed bits
    int weighs;       // 1: states are weighed by their gradients
    double budget[2]; // bytes of a token, forward and backward
} KltShape;

// Bytes of tensors' memory and of the host's.
typedef struct {
    int64_t device, host;
} KltMemory;

static inline KltMemory klt_memory_sum(KltMemory a, KltMemory b) {
    KltMemory sum = {a.device + b.device, a.host + b.host};
    return sum;
}

// The head of a direction's table with K components.
static inline KltHeader klt_estimate_head(const KltShape *shape, int backward, int K) {
    int flags = (backward ? KLT_STOCHASTIC : KLT_OFFSET) | (shape->fixed ? KLT_FIXED : 0) |
                (!backward && shape->V > 0 ? KLT_PREDICTED : 0) | (!backward && shape->weighs ? KLT_DUAL : 0);
    KltHeader head = {1, shape->H, K, flags, 1.0f, 1.0f, 0.5f};
    return head;
}

// A table in use.
static inline KltMemory klt_memory_table(const KltHeader *head) {
    KltMemory bytes = {(int64_t)klt_table_memory(head),
                       klt_table_bytes(head) + (klt_scales(head->flags) + 1) * (int64_t)sizeof(RansTable)};
    return bytes;
}

// What messages pass through whose tables keep at most so many components forward and backward.
static inline KltMemory klt_memory_work(const KltShape *shape, int forward, int backward) {
    KltMemory most = {0, 0};
    size_t n = (size_t)shape->rows;
    for (int d = 0; d < 2; d++) {
        int K = d == 0 ? forward : backward;
        int64_t device = (int64_t)(klt_wide_bytes(n, (size_t)shape->H) + klt_own_bytes(n, (size_t)K));
        int64_t host = (int64_t)klt_host_bytes(shape->rows, K, 4 * klt_most_bytes(shape->budget[d], shape->rows));
        if (device > most.device) most.device = device;
        if (host > most.host) most.host = host;
    }
    return most;
}

// The tables of one boundary, K components each.
static inline KltMemory klt_memory_tables(const KltShape *shape, int K) {
    KltHeader forward = klt_estimate_head(shape, 0, K), backward = klt_estimate_head(shape, 1, K);
    return klt_memory_sum(klt_memory_table(&forward), klt_memory_table(&backward));
}

// What one GPU codes all messages of n_boundaries with, K components a table: the frozen embedding too.
static inline KltMemory klt_memory_cells(const KltShape *shape, int K, int n_boundaries) {
    KltMemory bytes = klt_memory_work(shape, K, K), tables = klt_memory_tables(shape, K);
    bytes.device += 4 * (int64_t)shape->V * shape->H + n_boundaries * tables.device;
    bytes.host += n_boundaries * tables.host;
    return bytes;
}

// What cells need besides so that the entropy coder has a thread of its own: each one message to write, two to read.
static inline KltMemory klt_memory_overlap(const KltShape *shape, int n_cells, int64_t message_bytes) {
    double budget = fmax(shape->budget[0], shape->budget[1]);
    int64_t room = 4 * klt_most_bytes(budget, shape->rows);
    KltMemory bytes = {(int64_t)klt_own_bytes((size_t)shape->rows, (size_t)shape->H),
                       3 * message_bytes + (int64_t)(klt_host_bytes(shape->rows, shape->H, room) +
                                                     2 * klt_host_bytes(shape->rows, shape->H, 0))};
    bytes.device *= n_cells, bytes.host *= n_cells;
    return bytes;
}

// Moments that klt_moments_alloc makes.
static inline KltMemory klt_memory_moments(int64_t H, int predicted, int64_t sample) {
    KltMemory bytes = {4 * (H * H * (predicted ? 2 : 1) + H + (sample > 0 ? sample : 1) * H), 4 * (sample + 1)};
    return bytes;
}

// What klt_learn takes while it makes a table: matrices, its own and the eigenvectors' (LAPACK's 3 H^2 + 6 H, about
// cuSOLVER's too), the projected sample, the plan and the table.
static inline KltMemory klt_memory_fit(const KltShape *shape) {
    int64_t H = shape->H, S = shape->sample;
    KltHeader head = klt_estimate_head(shape, 0, shape->H);
    KltMemory bytes = {4 * (6 * H * H + H) + 4 * (3 * H * H + 7 * H), 4 * (3 * H * H + H) + 16 * H + 4 * (S + 1) * H +
                                                                          (int64_t)sizeof(KltPlan) + 23 * H + 8 * S +
                                                                          klt_table_bytes(&head)};
    KltMemory report = klt_memory_table(&head); // a table on the host
    bytes.host += report.device + report.host;
    return bytes;
}

// What the anchor learns the tables of n_boundaries with: moments, the embeddings of a micro-batch and their moments,
// scratch, the tables of its last pass, and one fit at a time.
static inline KltMemory klt_memory_anchor(const KltShape *shape, int n_boundaries) {
    int64_t H = shape->H, n = shape->rows, S = shape->sample, rows = (S + 15) / 16 * 16;
    int64_t adding = 4 * (n * H + n), projecting = 4 * (2 * S * H + H + rows);
    KltMemory bytes = klt_memory_fit(shape);
    bytes.device += adding > projecting ? adding : projecting, bytes.host += 4 * (n > S ? n : S);
    for (int i = 0; i < 2 * n_boundaries; i++) {
        KltHeader head = klt_estimate_head(shape, i % 2, shape->H);
        bytes = klt_memory_sum(bytes, klt_memory_moments(H, shape->V > 0 && i % 2 == 0, S));
        bytes.host += klt_table_bytes(&head);
    }
    if (shape->V == 0) return bytes;
    bytes.device += 4 * n * H;
    return klt_memory_sum(bytes, klt_memory_moments(H, 0, 0));
}

// Components that a table keeps, an estimate.
static inline int klt_estimate_components(const KltShape *shape, int backward) {
    int K = (int)(shape->H * (1.0 - exp(-0.9 * 8.0 * shape->budget[backward] / shape->H)));
    return K < 1 ? 1 : K;
}

// Bytes of a direction's table on the wire to one side of its boundary, mean of both, an estimate.
static inline int64_t klt_estimate_table(const KltShape *shape, int backward) {
    KltHeader head = klt_estimate_head(shape, backward, klt_estimate_components(shape, backward));
    return klt_table_sent(&head) / 2;
}

#endif
