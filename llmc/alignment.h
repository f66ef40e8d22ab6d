// How much of a Hessian lies beside its diagonal: ||H||_{1,1} = sum_ij |H_ij|, which a basis that fits H makes small,
// estimated from products of H with random vectors ([B], SPEC 7). With v of independent standard Cauchy values, (Hv)_i
// is Cauchy with scale sum_j |H_ij|, which is the median of |(Hv)_i|. Medians over a few draws, summed over a sample of
// the rows i.
//
//   for (int d = 0; d < ALIGNMENT_DRAWS; d++) ... v_j = alignment_cauchy(seed, d, j) ... rows[i * ALIGNMENT_DRAWS + d]
//   double sum = alignment_sum(rows, n_rows) * n / n_rows;
//
// A median of K draws is off by about pi/2 / sqrt(K), 28% of 31, and the rows of a draw share v: the sum is off by that
// much too where H is dense (80 x 80 normal values, 20 seeds: up to 47%), less where it is near diagonal. Take
// several steps' estimates together.
#ifndef LLMC_ALIGNMENT_H
#define LLMC_ALIGNMENT_H

#include <math.h>   // tan, fabs
#include <stdint.h> // fixed-width integers
#include <stdlib.h> // qsort

#include "rand.h" // rand_block

#define ALIGNMENT_DRAWS 31   // odd
#define ALIGNMENT_ROWS  4096 // rows of H that are looked at, at most about

// What a median of 31 values of |Cauchy| is on average, of scale 1: the mean of tan(pi u / 2), u of Beta(16, 16).
#define ALIGNMENT_MEDIAN 1.0412

// Standard Cauchy value number `index` of a draw.
static inline float alignment_cauchy(uint64_t seed, uint32_t draw, uint64_t index) {
    uint32_t bits = rand_block(seed, RAND_ALIGNMENT, draw, index / 4).v[index % 4] >> 8;
    return (float)tan(3.14159265358979323846 * (((double)bits + 0.5) * 0x1p-24 - 0.5));
}

static inline int alignment_order(const void *a, const void *b) {
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

// Sum over the rows of the scale of each one's values, rows (n_rows, ALIGNMENT_DRAWS), which are made sizes and sorted.
static inline double alignment_sum(float *rows, int64_t n_rows) {
    double sum = 0.0;
    for (int64_t i = 0; i < n_rows; i++) {
        float *row = rows + i * ALIGNMENT_DRAWS;
        for (int d = 0; d < ALIGNMENT_DRAWS; d++) row[d] = fabsf(row[d]);
        qsort(row, ALIGNMENT_DRAWS, sizeof *row, alignment_order);
        sum += (double)row[ALIGNMENT_DRAWS / 2];
    }
    return sum / ALIGNMENT_MEDIAN;
}

#endif
