// The thesis of [B] where nothing is random: a quadratic of a weight matrix, descended with gradients that are some
// updates old. AdamW scales each weight by itself, so it can hold the steep directions back only where they are
// weights; where they are turned against the weights it swings along them, and a basis that finds them helps. For the
// CPU; test_gpt.cu asserts it, bowl.cu prints it as a table.
//
//   f(W) = 1/2 sum_ij h_i h_j (A W B^T)_ij^2,  W (SIDE, SIDE), curvatures h from 1 down to 0.01, A and B orthonormal
//
// With identities for A and B the eigenvectors are W's axes.
#ifndef BOWL_H
#define BOWL_H

#include <math.h>   // pow, sqrt
#include <stdint.h> // int64_t
#include <stdlib.h> // calloc, free
#include <string.h> // memcpy, memset

#include "../llmc/oscillation.h"
#include "../llmc/rand.h"
#include "../llmc/rotate.h"

enum { BOWL_SIDE = 16, BOWL_SIZE = BOWL_SIDE * BOWL_SIDE, BOWL_STEPS = 600, BOWL_DELAY = 7 };
#define BOWL_LR 0.03f // at which updates of different optimizers are compared

// The three eigenvectors of the largest curvatures, 1 and twice 0.74, are those (i, j) with i + j < BOWL_LEADING.
enum { BOWL_LEADING = 2, BOWL_DIRECTIONS = BOWL_LEADING * (BOWL_LEADING + 1) / 2 };

typedef struct {
    double a[BOWL_SIZE], b[BOWL_SIZE];
} Bowl;

// What a descent came to.
typedef struct {
    double loss;                  // at the end, as a share of the first
    double flips, cosine, travel; // of updates along the leading eigenvectors (oscillation.h)
    float lr;
} BowlEnd;

// Rows of q become orthonormal: the identity, or those of random numbers by Gram and Schmidt.
static inline void bowl_basis(double *q, int seed, int turned) {
    for (int i = 0; i < BOWL_SIDE; i++) {
        double *row = q + (int64_t)i * BOWL_SIDE, length = 0.0;
        for (int k = 0; k < BOWL_SIDE; k++)
            row[k] = turned ? rand_uniform((uint64_t)seed, RAND_TEST, (uint64_t)(i * BOWL_SIDE + k)) - 0.5 : i == k;
        for (int j = 0; j < i; j++) {
            double dot = 0.0;
            for (int k = 0; k < BOWL_SIDE; k++) dot += row[k] * q[j * BOWL_SIDE + k];
            for (int k = 0; k < BOWL_SIDE; k++) row[k] -= dot * q[j * BOWL_SIDE + k];
        }
        for (int k = 0; k < BOWL_SIDE; k++) length += row[k] * row[k];
        for (int k = 0; k < BOWL_SIDE; k++) row[k] /= sqrt(length);
    }
}

static inline void bowl_init(Bowl *bowl, int turned) {
    bowl_basis(bowl->a, 1, turned);
    bowl_basis(bowl->b, 2, turned);
}

// out = A x B^T, or back: A^T x B.
static inline void bowl_turn(const Bowl *bowl, double *out, const double *x, int back) {
    double half[BOWL_SIZE] = {0.0};
    for (int i = 0; i < BOWL_SIDE; i++)
        for (int k = 0; k < BOWL_SIDE; k++)
            for (int j = 0; j < BOWL_SIDE; j++)
                half[i * BOWL_SIDE + j] += bowl->a[back ? k * BOWL_SIDE + i : i * BOWL_SIDE + k] * x[k * BOWL_SIDE + j];
    memset(out, 0, sizeof half);
    for (int i = 0; i < BOWL_SIDE; i++)
        for (int j = 0; j < BOWL_SIDE; j++)
            for (int k = 0; k < BOWL_SIDE; k++)
                out[i * BOWL_SIDE + j] +=
                    half[i * BOWL_SIDE + k] * bowl->b[back ? k * BOWL_SIDE + j : j * BOWL_SIDE + k];
}

// f(w), and its gradient.
static inline double bowl_loss(const Bowl *bowl, const float *w, float *grad) {
    double x[BOWL_SIZE], y[BOWL_SIZE], loss = 0.0;
    for (int i = 0; i < BOWL_SIZE; i++) x[i] = w[i];
    bowl_turn(bowl, y, x, 0);
    for (int i = 0; i < BOWL_SIZE; i++) {
        double curvature = pow(10.0, -2.0 * (i / BOWL_SIDE + i % BOWL_SIDE) / (BOWL_SIDE - 1));
        loss += 0.5 * curvature * y[i] * y[i];
        y[i] *= curvature;
    }
    bowl_turn(bowl, x, y, 1);
    for (int i = 0; i < BOWL_SIZE; i++) grad[i] = (float)x[i];
    return loss;
}

// Notes where w is along the leading eigenvectors.
static inline void bowl_watch(const Bowl *bowl, const float *w, Oscillation *swing) {
    double x[BOWL_SIZE], y[BOWL_SIZE], leading[BOWL_DIRECTIONS];
    int n = 0;
    for (int i = 0; i < BOWL_SIZE; i++) x[i] = w[i];
    bowl_turn(bowl, y, x, 0);
    for (int i = 0; i < BOWL_LEADING; i++)
        for (int j = 0; i + j < BOWL_LEADING; j++) leading[n++] = y[i * BOWL_SIDE + j];
    oscillation_add(swing, leading, n);
}

// Descends with gradients that are `delay` <= BOWL_DELAY updates old, from a point whose components along the
// eigenvectors are all 1 or -1. no memory: the loss is NaN.
static inline BowlEnd bowl_descend(const Bowl *bowl, const Optimizer *optimizer, float lr, int delay, Stream *stream) {
    enum { KEPT = BOWL_DELAY + 1 };
    float *versions = (float *)calloc(KEPT * BOWL_SIZE, sizeof(float));
    float *state = (float *)calloc(8 * BOWL_SIZE, sizeof(float)); // more than any rotation needs
    float grad[BOWL_SIZE], m[BOWL_SIZE] = {0.0f}, v[BOWL_SIZE] = {0.0f};
    double signs[BOWL_SIZE], start[BOWL_SIZE];
    AdamW adam = {0.9f, 0.999f, 1e-8f};
    Oscillation swing;
    BowlEnd end = {(double)NAN, (double)NAN, (double)NAN, (double)NAN, lr};
    memset(&swing, 0, sizeof swing);
    for (int i = 0; i < BOWL_SIZE; i++) signs[i] = rand_uniform(5, RAND_TEST, (uint64_t)i) < 0.5f ? -1.0 : 1.0;
    bowl_turn(bowl, start, signs, 1);
    for (int i = 0; i < BOWL_SIZE && versions != NULL; i++) versions[i] = (float)start[i];
    for (int step = 1; step <= BOWL_STEPS && versions != NULL && state != NULL; step++) {
        int seen = step - 1 > delay ? step - 1 - delay : 0;
        float *now = versions + (step - 1) % KEPT * BOWL_SIZE, *next = versions + step % KEPT * BOWL_SIZE;
        bowl_loss(bowl, versions + seen % KEPT * BOWL_SIZE, grad);
        memcpy(next, now, sizeof grad);
        float rate = lr_at(LR_COSINE, lr, 0.01f, step - 1, 10, BOWL_STEPS);
        RotateRefresh refresh = step == 1 ? ROTATE_COLD : step % 10 == 0 ? ROTATE_WARM : ROTATE_KEEP;
        if (optimizer->kind == OPTIMIZER_ROTATE)
            rotate_update(next, grad, m, v, state, BOWL_SIDE, BOWL_SIDE, optimizer, refresh, adam, rate, 0.0f, 1.0f,
                          step, stream);
        else
            adamw_update(next, grad, m, v, BOWL_SIZE, adam, rate, 0.0f, 1.0f, step, stream);
        if (step == 1) end.loss = bowl_loss(bowl, now, grad), bowl_watch(bowl, now, &swing);
        bowl_watch(bowl, next, &swing);
        if (step == BOWL_STEPS) end.loss = bowl_loss(bowl, next, grad) / end.loss;
    }
    end.flips = oscillation_flips(&swing), end.cosine = oscillation_cosine(&swing);
    end.travel = oscillation_travel(&swing);
    free(versions);
    free(state);
    return end;
}

// The end at the best of the learning rates.
static inline BowlEnd bowl_best(const Bowl *bowl, const Optimizer *optimizer, int delay, Stream *stream) {
    static const float rates[] = {0.003f, 0.01f, 0.03f, 0.1f};
    BowlEnd best = bowl_descend(bowl, optimizer, rates[0], delay, stream);
    for (int i = 1; i < 4; i++) {
        BowlEnd end = bowl_descend(bowl, optimizer, rates[i], delay, stream);
        if (end.loss < best.loss) best = end;
    }
    return best;
}

#endif
