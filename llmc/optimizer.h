// Which optimizer a run has, and what of it is the same on every device: names, constants, the learning rate of a stage
// whose gradients come late, and when a basis is refreshed. The steps themselves: adamw.h, nesterov.h, muon.h,
// rotate.h.
//
//   adamw         AdamW; under a pipeline's delay this is PipeDream (Narayanan et al. 2019)
//   rotate        AdamW in a rotated basis ([B], SPEC 7) on block matrices, AdamW elsewhere
//   pipedream-lr  AdamW, the learning rate smaller where gradients are old and the run is young
//   nesterov      NAdam with decoupled decay (Ajanthan et al. 2025)
//   pipemare      pipedream-lr's learning rate, and an average of how weights have moved (Yang et al. 2021)
//   muon          orthogonalised momentum (Jordan et al. 2024) on block matrices, AdamW elsewhere
#ifndef LLMC_OPTIMIZER_H
#define LLMC_OPTIMIZER_H

#include <math.h>   // pow, sqrt
#include <stdint.h> // fixed-width integers

#include "adamw_config.h" // AdamW
#include "portable.h"     // HOST_DEVICE

#define OPTIMIZER_NAMES "adamw|rotate|pipedream-lr|nesterov|pipemare|muon" // OptimizerKind in words
#define ROTATE_SOURCES  "1st|2nd"                                          // RotateSource
#define ROTATE_GEOMETRY "uni|bi"                                           // RotateGeometry
#define REFRESH_NAMES   "uniform|stage-aware|reversed"                     // Refresh

typedef enum {
    OPTIMIZER_ADAMW,
    OPTIMIZER_ROTATE,
    OPTIMIZER_PIPEDREAM_LR,
    OPTIMIZER_NESTEROV,
    OPTIMIZER_PIPEMARE,
    OPTIMIZER_MUON
} OptimizerKind;

// What bases are learned from: the momentum M, or the second moments L of rows and R of columns.
typedef enum { ROTATE_1ST, ROTATE_2ND } RotateSource;

// Which sides of a matrix are rotated: the smaller one, or both. (1st, uni) is GaLore (Zhao et al. 2024) of full rank,
// (2nd, bi) is SOAP (Vyas et al. 2024).
typedef enum { ROTATE_UNI, ROTATE_BI } RotateGeometry;

// How refreshes are spread over the stages of a pipeline: alike; in proportion to the delay; the other way round.
typedef enum { REFRESH_UNIFORM, REFRESH_STAGE_AWARE, REFRESH_REVERSED } Refresh;

// All zero is AdamW.
typedef struct {
    OptimizerKind kind;
    RotateSource source;
    RotateGeometry geometry;
    Refresh refresh;
    int every;   // steps between refreshes, on average over the stages
    int max_dim; // sides longer than this are not rotated
} Optimizer;

// beta1 where the user gives none.
static inline float optimizer_beta1(OptimizerKind kind) {
    return kind == OPTIMIZER_NESTEROV ? 0.99f : 0.9f;
}

// 1 if the kind's learning rate depends on the delay.
static inline int optimizer_anneals(OptimizerKind kind) {
    return kind == OPTIMIZER_PIPEDREAM_LR || kind == OPTIMIZER_PIPEMARE;
}

// The learning rate of a stage whose gradients are `delay` steps old, in global step k (from 0) of a run of n_steps: lr
// divided by max(delay,1)^(1 - min(k/Kw,1)), Kw a tenth of the run.
static inline float optimizer_lr(OptimizerKind kind, float lr, int delay, int64_t k, int64_t n_steps) {
    if (!optimizer_anneals(kind) || delay <= 1) return lr;
    double share = n_steps > 0 ? (double)k / (0.1 * (double)n_steps) : 1.0;
    return (float)((double)lr / pow((double)delay, share < 1.0 ? 1.0 - share : 0.0));
}

// PipeMare's g: how much of delta stays in a step.
static inline float pipemare_decay(int delay) {
    return (float)pow(0.135, 1.0 / (double)(delay > 1 ? delay : 1));
}

// ---------------------------------------------------------------------------------------------------------------------
// Nesterov

// mu_1 * ... * mu_step, kept between steps. Always multiplied in this order: a resumed run gets the same bits.
typedef struct {
    int64_t step;
    double product;
} NesterovProduct;

static inline double nesterov_mu(double beta1, int64_t step) {
    return beta1 * (1.0 - 0.5 * pow(0.96, 0.004 * (double)step));
}

static inline double nesterov_product(NesterovProduct *kept, double beta1, int64_t step) {
    if (kept->step == 0 || kept->step > step) kept->step = 0, kept->product = 1.0;
    while (kept->step < step) kept->product *= nesterov_mu(beta1, ++kept->step);
    return kept->product;
}

// What is the same for all values of a step (nesterov.h has the formula).
typedef struct {
    float b1, b2, eps, grad_scale;
    float keep;                 // 1 - lr*wd
    float grad_size, mean_size; // lr(1-mu_t)/(1-Pi_t), lr*mu_{t+1}/(1-Pi_t*mu_{t+1})
    float bias2_sqrt;           // sqrt(1 - b2^t)
} NesterovStep;

static inline NesterovStep nesterov_step(AdamW adam, float lr, float weight_decay, float grad_scale, int64_t step,
                                         NesterovProduct *kept) {
    AdamWStep plain = adamw_step(adam, lr, weight_decay, grad_scale, step);
    double product = nesterov_product(kept, (double)adam.beta1, step);
    double mu = nesterov_mu((double)adam.beta1, step), next = nesterov_mu((double)adam.beta1, step + 1);
    NesterovStep at = {plain.b1,
                       plain.b2,
                       plain.eps,
                       grad_scale,
                       plain.keep,
                       (float)((double)lr * (1.0 - mu) / (1.0 - product)),
                       (float)((double)lr * next / (1.0 - product * next)),
                       plain.bias2_sqrt};
    return at;
}

// ---------------------------------------------------------------------------------------------------------------------
// Muon

#define MUON_MOMENTUM 0.95f
#define MUON_STEPS    5 // of Newton and Schulz: X <- aX + b(XX^T)X + c(XX^T)^2 X, singular values come near 1
#define MUON_A        3.4445f
#define MUON_B        (-4.7750f)
#define MUON_C        2.0315f

// What an update is multiplied by, so that its values are about as large as AdamW's.
static inline float muon_scale(int m, int n) {
    return 0.2f * sqrtf((float)(m > n ? m : n));
}

// Floats of scratch that the step of a matrix (m,n) takes.
static inline int64_t muon_scratch_floats(int64_t m, int64_t n) {
    int64_t k = m < n ? m : n;
    return 2 * m * n + 2 * k * k;
}

// ---------------------------------------------------------------------------------------------------------------------
// Rotation

// Which sides of a matrix are rotated.
typedef struct {
    int left, right; // rows, columns
} RotateSides;

// Unilateral: the smaller side, the left one of a square matrix. Of two sides the one beyond max_dim is left as it is,
// so that such a matrix falls back to its smaller side, or to AdamW where both are too long.
static inline RotateSides rotate_sides(const Optimizer *optimizer, int64_t m, int64_t n) {
    int both = optimizer->geometry == ROTATE_BI;
    RotateSides sides = {(both || m <= n) && m <= optimizer->max_dim, (both || n < m) && n <= optimizer->max_dim};
    return sides;
}

// Floats of state beside M and V: the bases of the sides, (m,m) and (n,n), and as many second moments.
static inline int64_t rotate_state_floats(RotateSides sides, RotateSource source, int64_t m, int64_t n) {
    int64_t bases = (sides.left ? m * m : 0) + (sides.right ? n * n : 0);
    return source == ROTATE_2ND ? 2 * bases : bases;
}

// The longer of the rotated sides, 0 without any.
static inline int64_t rotate_longest(RotateSides sides, int64_t m, int64_t n) {
    int64_t left = sides.left ? m : 0, right = sides.right ? n : 0;
    return left > right ? left : right;
}

// Matrices of scratch for a step of `count` together: two of each, three for a refresh of one.
static inline int64_t rotate_scratch_matrices(int64_t count) {
    return count > 1 ? 2 * count : 3;
}

// Floats of it: those matrices, `count` squares of the longest side, its keys and their order.
static inline int64_t rotate_scratch_floats(RotateSides sides, int64_t m, int64_t n, int64_t count) {
    int64_t side = rotate_longest(sides, m, n), longer = m > n ? m : n;
    return rotate_scratch_matrices(count) * m * n + count * side * side + 2 * longer;
}

// What a step does to the bases.
typedef enum { ROTATE_KEEP, ROTATE_COLD, ROTATE_WARM } RotateRefresh;

// 1 if the bases of matrix number `phase` are refreshed in step t (from 1) by stage `position` of n_stages. Uniform: at
// (t + phase) mod every = 0. Phases keep the matrices of a stage from being refreshed all in one step; SPEC's rule, t
// mod f = 0, is phase 0. Otherwise at the rate (P/f) * tau/sum(tau), at most once a step, of tau = P-1-position, or
// tau = position if reversed: whenever the whole part of (t + phase) * rate grows. All in integers.
static inline int rotate_is_due(const Optimizer *optimizer, int position, int n_stages, int64_t t, int phase) {
    int64_t num = 1, den = optimizer->every, P = n_stages;
    if (optimizer->refresh != REFRESH_UNIFORM && n_stages > 1) {
        int64_t tau = optimizer->refresh == REFRESH_STAGE_AWARE ? P - 1 - position : position;
        num = P * tau, den = optimizer->every * (P * (P - 1) / 2);
    }
    return num >= den || (t + phase) * num / den > (t + phase - 1) * num / den;
}

// 1 if key a of index i comes before key b of index j in descending order: NaN last, equal ones by their index.
static inline HOST_DEVICE int rotate_before(float a, int i, float b, int j) {
    int a_nan = a != a, b_nan = b != b;
    if (a_nan != b_nan) return b_nan;
    return a > b || (!(b > a) && i < j);
}

// Multiplications and additions of a step of a matrix (m,n) beside AdamW's, refreshes on average over the steps: a
// refresh takes the momentum out of the old bases and into the new ones, and for a side s a product and a QR, 2 s^3 and
// 8/3 s^3; the first one, which costs more, is not counted.
static inline double optimizer_flops(const Optimizer *optimizer, double m, double n) {
    double k = m < n ? m : n;
    if (optimizer->kind == OPTIMIZER_MUON) return MUON_STEPS * (4.0 * m * n * k + 2.0 * k * k * k);
    if (optimizer->kind != OPTIMIZER_ROTATE) return 0.0;
    RotateSides sides = rotate_sides(optimizer, (int64_t)m, (int64_t)n);
    double left = sides.left ? m : 0.0, right = sides.right ? n : 0.0;
    double moments = optimizer->source == ROTATE_2ND ? 0.5 : 0.0; // symmetric: half of them is computed
    double products = 2.0 + 2.0 / optimizer->every + moments;     // G', the way back; M at refreshes; L or R
    return products * 2.0 * m * n * (left + right) +
           14.0 / 3.0 * (left * left * left + right * right * right) / optimizer->every;
}

#endif
