// Magnitude pruning: the k values of a matrix that are nearest to zero become zero, of equal magnitudes the first ones.
// The matrix is looked at piece by piece, three times, and never sorted: the magnitude of number k is found by the
// upper half of its bits and then by the lower one, since floats that are not negative are ordered as their bits are.
//
//   PruneSearch search; prune_begin(&search, prune_share(n, 0.5));
//   for (search.pass = 0; search.pass < 2; prune_pass_end(&search))
//       every piece: prune_look(&search, piece, size);
//   every piece in order: prune_apply(&search, piece, size);
#ifndef LLMC_PRUNE_H
#define LLMC_PRUNE_H

#include <math.h>   // llround
#include <stdint.h> // fixed-width integers
#include <string.h> // memset

enum { PRUNE_BUCKETS = 1 << 16 };

typedef struct {
    int64_t counts[PRUNE_BUCKETS];
    int64_t left; // until number k is reached; after both passes: how many of the threshold's magnitude go
    uint32_t threshold;
    int pass;
} PruneSearch;

// How many of n values a share of them is. A share has at most six decimals, which a float would blur.
static inline int64_t prune_share(int64_t n, double share) {
    return llround((double)n * (double)llround(share * 1e6) / 1e6);
}

// The bits of |value|; NaN is larger than all.
static inline uint32_t prune_magnitude(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits & 0x7FFFFFFFu;
}

// A search for the k smallest, k at least 1 and at most the number of values.
static inline void prune_begin(PruneSearch *search, int64_t k) {
    memset(search, 0, sizeof *search);
    search->left = k;
}

// Counts a piece: in pass 0 by the upper half of the bits, in pass 1, of those in the bucket found, by the lower half.
static inline void prune_look(PruneSearch *search, const float *values, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits = prune_magnitude(values[i]);
        if (search->pass == 0)
            search->counts[bits >> 16]++;
        else if (bits >> 16 == search->threshold >> 16)
            search->counts[bits & 0xFFFFu]++;
    }
}

// After all pieces of a pass: finds the bucket of number k.
static inline void prune_pass_end(PruneSearch *search) {
    uint32_t bucket = 0;
    while (bucket + 1 < PRUNE_BUCKETS && search->counts[bucket] < search->left)
        search->left -= search->counts[bucket++];
    search->threshold |= search->pass == 0 ? bucket << 16 : bucket;
    search->pass++;
    memset(search->counts, 0, sizeof search->counts);
}

// Sets what goes to zero in a piece, the pieces in their order.
static inline void prune_apply(PruneSearch *search, float *values, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits = prune_magnitude(values[i]);
        int equal = bits == search->threshold && search->left > 0;
        if (bits < search->threshold || equal) values[i] = 0.0f;
        search->left -= equal;
    }
}

#endif
