// How much updates swing along the directions in which the loss curves most, instead of going down ([B], SPEC 7): of
// weights' coordinates along a few of them after each update
//   flips    how often a coordinate's update has the other sign than the one before, as a share
//   cosine   of successive updates, in those directions' space; the mean
//   travel   the way that the coordinates have gone, over the way from where they began to where they are
// Updates that jump over a valley and back flip each time, with a cosine of -1. Under a delay, with momentum, they
// swing slowly, once in some seven delays: hardly a sign changes from one update to the next, and only the travel
// tells.
//
//   Oscillation swing;  memset(&swing, 0, sizeof swing);
//   oscillation_add(&swing, coordinates, n);  ... and after every update
//   oscillation_flips(&swing), oscillation_cosine(&swing)      // NaN before two updates
//   oscillation_travel(&swing)                                 // NaN before one
#ifndef LLMC_OSCILLATION_H
#define LLMC_OSCILLATION_H

#include <math.h>   // sqrt, NAN
#include <stdint.h> // int64_t

#define OSCILLATION_MAX 16 // directions

typedef struct {
    double start[OSCILLATION_MAX], at[OSCILLATION_MAX], update[OSCILLATION_MAX]; // coordinates, and their last change
    int64_t seen, pairs, flips, signs; // calls; pairs of updates; signs compared, and of them other ones
    double cosines, travelled;
} Oscillation;

// Where the weights are, at first and after each update: (n) coordinates along orthonormal directions; n <=
// OSCILLATION_MAX, always the same. Of an update that is zero or not finite no cosine is taken.
static inline void oscillation_add(Oscillation *swing, const double *coordinates, int n) {
    double dot = 0.0, now2 = 0.0, last2 = 0.0;
    for (int k = 0; k < n; k++) {
        double now = coordinates[k] - swing->at[k], last = swing->update[k];
        dot += now * last, now2 += now * now, last2 += last * last;
        if (swing->seen == 0) swing->start[k] = coordinates[k];
        if (swing->seen > 0) swing->travelled += fabs(now);
        if (swing->seen > 1) swing->signs++, swing->flips += now * last < 0.0;
        swing->at[k] = coordinates[k], swing->update[k] = now;
    }
    double cosine = dot / sqrt(now2 * last2);
    if (swing->seen > 1 && isfinite(cosine)) swing->pairs++, swing->cosines += cosine;
    swing->seen++;
}

// Share of the signs that are not as before.
static inline double oscillation_flips(const Oscillation *swing) {
    return swing->signs > 0 ? (double)swing->flips / (double)swing->signs : (double)NAN;
}

// Mean cosine of successive updates.
static inline double oscillation_cosine(const Oscillation *swing) {
    return swing->pairs > 0 ? swing->cosines / (double)swing->pairs : (double)NAN;
}

// The way gone over the way made.
static inline double oscillation_travel(const Oscillation *swing) {
    double made = 0.0;
    for (int k = 0; k < OSCILLATION_MAX; k++) made += fabs(swing->at[k] - swing->start[k]);
    return made > 0.0 ? swing->travelled / made : (double)NAN;
}

#endif
