// The boundary mask, CPU: which K of a token's H values survive, perm_n(0..K-1) of token n (mask_set.h).
//
//   gather   values[n,i] = x[n, perm_n(i)]                                                values overwritten
//   scatter  x[n, perm_n(i)] = scale * values[n,i], 0 elsewhere                           x overwritten
// The masked function is scatter(gather(x)); its gradient is the same two ops, so the backward message has the same K
// positions as the forward one.
#ifndef LLMC_MASK_H
#define LLMC_MASK_H

#include <stddef.h> // size_t
#include <stdint.h> // fixed-width integers
#include <string.h> // memset

#include "device.h"   // floatX, Stream
#include "mask_set.h" // MaskKey, mask_check, mask_set, mask_turn, mask_index

#define MASK_LANES 64 // outputs made together: of 16, 32, 64, 128 the fastest for K 38 and 77

// dim[j] = perm(first + j) for the j with first + j < K, perm(0) for those beyond: any of them can be looked up.
// The lanes walk together until all are inside: vectors of 16 bits (twice the lanes of 32), half the time of mask_index
// lane by lane.
static inline void mask_lanes(uint16_t dim[MASK_LANES], const MaskSet *set, int first, int K) {
    int outside;
    for (int j = 0; j < MASK_LANES; j++) dim[j] = mask_turn(set, (uint16_t)(first + j < K ? first + j : 0));
    do {
        outside = 0;
        for (int j = 0; j < MASK_LANES; j++) outside |= dim[j] >= set->H;
        if (outside)
            for (int j = 0; j < MASK_LANES; j++) dim[j] = dim[j] >= set->H ? mask_turn(set, dim[j]) : dim[j];
    } while (outside);
}

// index (n, K) =: perm(0..K-1) of tokens 0..n-1. What mask_check refuses fails the stream, here and below.
static inline void mask_indices(uint32_t *index, MaskKey key, int n, int H, int K, Stream *stream) {
    if (mask_check(key, n, H)) {
        stream->failed = 1;
        return;
    }
#pragma omp parallel for num_threads(stream->threads)
    for (int token = 0; token < n; token++) {
        MaskSet set = mask_set(key, token, H);
        uint32_t *to = index + (size_t)token * K;
        for (int i = 0; i < K; i++) to[i] = (uint32_t)mask_index(&set, i);
    }
}

// values (n, K) =, x (n, H)
static inline void mask_gather(floatX *values, const floatX *x, MaskKey key, int n, int H, int K, Stream *stream) {
    if (mask_check(key, n, H)) {
        stream->failed = 1;
        return;
    }
#pragma omp parallel for num_threads(stream->threads)
    for (int token = 0; token < n; token++) {
        MaskSet set = mask_set(key, token, H);
        const floatX *from = x + (size_t)token * H;
        floatX *to = values + (size_t)token * K;
        uint16_t dim[MASK_LANES];
        for (int i = 0; i < K; i++) {
            if (i % MASK_LANES == 0) mask_lanes(dim, &set, i, K);
            to[i] = from[dim[i % MASK_LANES]];
        }
    }
}

// x (n, H) =, values (n, K)
static inline void mask_scatter(floatX *x, const floatX *values, MaskKey key, int n, int H, int K, float scale,
                                Stream *stream) {
    if (mask_check(key, n, H)) {
        stream->failed = 1;
        return;
    }
#pragma omp parallel for num_threads(stream->threads)
    for (int token = 0; token < n; token++) {
        MaskSet set = mask_set(key, token, H);
        const floatX *from = values + (size_t)token * K;
        floatX *to = x + (size_t)token * H;
        uint16_t dim[MASK_LANES];
        memset(to, 0, sizeof(floatX) * (size_t)H);
        for (int i = 0; i < K; i++) {
            if (i % MASK_LANES == 0) mask_lanes(dim, &set, i, K);
            to[dim[i % MASK_LANES]] = scale * from[i];
        }
    }
}

#endif
