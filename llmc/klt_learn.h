// How the anchor learns the transform codec's tables, the part that is the same on the CPU and on the GPU: products,
// eigenvectors and elementwise work by ops, matrices of H x H otherwise on the host, off the critical path.
//
//   per pass    klt_moments_begin(m, decay); for each micro-batch klt_moments_add(m, x, ...);
//               KltSources from = {m, embedding or NULL, metric or NULL, embed};
//               blob = klt_learn(&from, &settings, &work, &n_bytes, &report, stream)         free() it
//
// Moments, decayed by `decay` a pass (sums and their weight alike, so early means are means):
//   xx = sum x x^T, sum = sum x;   with a predictor also xe = sum x e^T, and for all boundaries ee = sum e e^T, sum e
// x is a state, or a gradient divided by its micro-batch's root mean square: gradients shrink as a training goes on.
// Forward:   W = C_xe (C_ee + ridge * mean eigenvalue)^-1,   offset = mean x - W mean e,
//            C = C_xx - W C_ex - C_xe W^T + W C_ee W^T       with W as rounded for the wire
// Backward:  C = xx / weight: no mean is subtracted, so what is sent stays unbiased
// An error d of a state costs the loss about (g . d)^2, g its gradient. So with a metric states are coded as M c, where
// M = G^(gamma/2) and G = E g g^T of the same boundary, no eigenvalue of which counts as less than a thousandth of
// their mean: M C M = U diag(sigma^2) U^T, the basis is M U and its dual M^-1 U; without, C = U diag(sigma^2) U^T and
// the basis is its own dual. What is kept, and what it costs, is measured on rows of the last pass, projected on U as
// rounded for the wire: the step is found by bisection, so that their symbols, coded with their own frequencies, cost
// the budget. Components below `floor` steps are not kept (reverse water-filling: with one step for all, those of less
// variance than the distortion get nothing).
// Fixed bits are given out one after the other to where a bit takes most of the error.
//
// No include guard: klt.h and klt.cuh include it once each.

#ifndef KLT_FLOOR
#define KLT_FLOOR          0.35 // states: less than this many steps are not sent
#define KLT_FLOOR_BACKWARD 0.25 // gradients: what is not sent is a bias
#endif

typedef struct {
    int H, most; // most: rows of the sample
    int n_sample;
    double weight;        // rows, decayed
    int64_t n_floats;     // of what is kept between passes: xx, sum, xe
    float *xx, *sum, *xe; // (H, H), (H), (H, H) or NULL
    float *sample;        // (most, H)
    uint32_t *tokens;     // (most) host memory
} KltMoments;

typedef struct {
    uint32_t version;
    int stochastic, fixed;
    float theta;
    double floor, ridge;
    double bits; // of a token
    uint64_t seed;
    double metric; // gamma, 0: the identity
} KltSettings;

// What a table is learned from.
typedef struct {
    const KltMoments *moments;
    const KltMoments *embedding; // for a predictor, else NULL
    const KltMoments *metric;    // gradients of the states, or NULL: all directions count alike
    const float *embed;          // (V, H) for a predictor
} KltSources;

// What a table achieves on its sample, as shares of the variance it has to code (with a metric, of M c): what is lost,
// and the least that the same bits could lose if the covariance were that of a Gaussian.
typedef struct {
    double bits; // a token
    double lost, bound;
} KltReport;

// Symbols of the sample by class, where they fell within their steps, and the bits beyond symbols.
typedef struct {
    double counts[KLT_MAX_TABLES][RANS_SYMBOLS];
    double met[KLT_CLASSES][2], moved[KLT_CLASSES][2];
    double extra;
} KltTally;

static inline void klt_moments_free(KltMoments *m) {
    device_free(m->xx);
    device_free(m->sample);
    free(m->tokens);
    memset(m, 0, sizeof *m);
}

// Moments of rows of H values. predicted: of states with a predictor. Returns 0 or -1.
static inline int klt_moments_alloc(KltMoments *m, int H, int predicted, int most) {
    size_t wide = (size_t)H;
    memset(m, 0, sizeof *m);
    m->H = H, m->most = most;
    m->n_floats = (int64_t)(wide * wide * (predicted ? 2 : 1) + wide);
    m->xx = (float *)device_alloc(sizeof(float) * (size_t)m->n_floats);
    m->sample = (float *)device_alloc(sizeof(float) * (size_t)(most > 0 ? most : 1) * wide);
    m->tokens = (uint32_t *)calloc((size_t)most + 1, sizeof(uint32_t));
    if (m->xx == NULL || m->sample == NULL || m->tokens == NULL) return error_set("out of memory for moments");
    m->sum = m->xx + wide * wide, m->xe = predicted ? m->sum + wide : NULL;
    return 0;
}

static inline void klt_moments_begin(KltMoments *m, float decay, Stream *stream) {
    vector_scale(m->xx, m->n_floats, decay, stream);
    m->weight *= (double)decay, m->n_sample = 0;
}

// Adds x (n, H), and of embeddings e (n, H) fp32 the cross moments. stride: every stride-th row joins the sample while
// there is room. normalize: x is divided by its root mean square; x that is 0 or not finite is left out.
static inline int klt_moments_add(KltMoments *m, const floatX *x, const float *e, const uint32_t *tokens, int n,
                                  int stride, int normalize, KltWork *work, Stream *stream) {
    int H = m->H, rows = (n + stride - 1) / stride;
    size_t wide = (size_t)n * (size_t)H;
    float *values = (float *)scratch_get(&work->device, sizeof(float) * (wide + (size_t)n));
    float *ones = (float *)klt_host(work, sizeof(float) * (size_t)n);
    if (values == NULL || ones == NULL) return -1;
    float *device_ones = values + wide;
    for (int t = 0; t < n; t++) ones[t] = 1.0f;
    device_copy(device_ones, ones, sizeof(float) * (size_t)n, stream);
    klt_center(values, x, NULL, NULL, NULL, n, H, stream);
    double size = sqrt(vector_dot(values, values, (int64_t)wide, stream) / (double)wide);
    if (stream_check(stream)) return -1;
    if (!isfinite(size) || (normalize && size == 0.0)) return 0;
    if (normalize) vector_scale(values, (int64_t)wide, (float)(1.0 / size), stream);
    matmul_product(m->xx, H, values, H, 1, values, H, 0, H, H, n, 0, 1, stream);
    matmul_product(m->sum, H, device_ones, n, 0, values, H, 0, 1, H, n, 0, 1, stream);
    if (m->xe != NULL) matmul_product(m->xe, H, values, H, 1, e, H, 0, H, H, n, 0, 1, stream);
    m->weight += n;
    if (rows > m->most - m->n_sample) rows = m->most - m->n_sample;
    if (rows > 0)
        linalg_columns(m->sample + (size_t)m->n_sample * (size_t)H, H, values, (int64_t)H * stride, rows, H, stream);
    for (int i = 0; i < rows && tokens != NULL; i++) m->tokens[m->n_sample + i] = tokens[(size_t)i * (size_t)stride];
    m->n_sample += rows > 0 ? rows : 0;
    return stream_check(stream);
}

// Class of a component: half octaves of sigma / step.
static inline int klt_class_of(double sigma, double step) {
    double number = 2.0 * log2(sigma / step) + KLT_CLASS_OF_ONE;
    return number <= 0.0 ? 0 : number >= KLT_CLASSES - 1 ? KLT_CLASSES - 1 : (int)lround(number);
}

// Laplace's distribution function of unit variance.
static inline double klt_laplace(double v) {
    return v < 0.0 ? 0.5 * exp(M_SQRT2 * v) : 1.0 - 0.5 * exp(-M_SQRT2 * v);
}

// A guess at the symbols of a table before any has been seen, as heavy as a few observations: Laplace's distribution.
static inline void klt_prior(double counts[RANS_SYMBOLS], int table, const KltSettings *settings) {
    static const double draws[KLT_CONTEXTS] = {0.02, 0.08, 0.195, 0.385};
    int contexts = settings->stochastic ? KLT_CONTEXTS : 1, number = table / contexts, shift = klt_shift(number);
    double ratio = exp2(0.5 * (number - KLT_CLASS_OF_ONE)) / (double)(1 << shift);
    double dead = 1.0 - (double)settings->theta, u = draws[table % contexts];
    for (int i = 0; i < RANS_ESCAPE; i++) {
        int s = i - RANS_RANGE;
        double low = s > 0 ? s - 1 + dead : s - dead, high = s < 0 ? s + 1 - dead : s + dead;
        if (settings->stochastic || shift > 0) low = s - u, high = low + 1.0;
        counts[i] = 4.0 * (klt_laplace(high / ratio) - klt_laplace(low / ratio));
    }
    counts[RANS_ESCAPE] = 0.01;
}

// Sizes of the sample's tokens (S) in sigmas, and the root mean square of all; y (S, H) of which K components count.
static inline double klt_sizes(double *sizes, const float *y, const double *sigma, int S, int H, int K) {
    double sum = 0.0;
    for (int t = 0; t < S; t++) {
        double square = 0.0;
        for (int k = 0; k < K; k++) {
            double v = (double)y[(size_t)t * (size_t)H + (size_t)k] / sigma[k];
            square += v * v;
        }
        sizes[t] = sqrt(square / K);
        sum += square / K / S;
    }
    return sqrt(sum);
}

// A symbol of a class, met with `value` in table i.
static inline void klt_tally_symbol(KltTally *tally, int i, int number, int value, double v) {
    int shift = klt_shift(number), high = value >> shift, symbol = high + RANS_RANGE, size = abs(value);
    if (symbol < 0 || symbol >= RANS_ESCAPE) symbol = RANS_ESCAPE, tally->extra += rans_extra(symbol, high, 0);
    tally->counts[i][symbol] += 1.0;
    tally->extra += shift;
    if (size == 0 || size > 2) return;
    tally->met[number][size > 1] += 1.0;
    tally->moved[number][size > 1] += fabs(v) - size;
}

// Counts the symbols of y (S, H) with this step; classes (K).
static inline void klt_tally(KltTally *tally, const float *y, const double *sizes, const unsigned char *classes, int S,
                             int H, double rms, const KltHeader *head, const KltSettings *settings, int16_t *symbols,
                             uint32_t *draws) {
    int contexts = klt_contexts(head->flags);
    KltQuantizer q = {
        head->K, settings->stochastic, head->step, head->theta, settings->seed + head->version, NULL, NULL, NULL, NULL};
    memset(tally, 0, sizeof *tally);
    for (int t = 0; t < S; t++) {
        const float *row = y + (size_t)t * (size_t)H;
        int silent = 1, scale = klt_scale(sizes[t], rms);
        for (int k = 0; k < head->K; k++) {
            if (settings->stochastic && k % 4 == 0) {
                Philox four = klt_draws(q.key, t, k / 4);
                memcpy(draws + k, four.v, sizeof four.v);
            }
            symbols[k] = (int16_t)klt_symbol(&q, row[k], k, draws[k]);
            silent = silent && symbols[k] == 0;
        }
        tally->counts[klt_scales(head->flags)][(silent ? KLT_SILENT : scale) + RANS_RANGE] += 1.0;
        for (int k = 0; k < head->K && !silent; k++) {
            int number = klt_class(classes[k], scale), drawn = contexts > 1;
            int i = drawn ? number * contexts + klt_context(draws[k]) : number;
            klt_tally_symbol(tally, i, number, (drawn ? klt_sign(draws[k]) : 1) * symbols[k],
                             (double)row[k] / (double)head->step);
        }
    }
}

// Frequencies of table i of a tally; returns the bits its symbols cost.
static inline double klt_tally_bits(uint16_t freq[RANS_SYMBOLS], const KltTally *tally, int i,
                                    const KltSettings *settings) {
    double weights[RANS_SYMBOLS], bits = 0.0;
    if (i == (settings->stochastic ? KLT_CLASSES * KLT_CONTEXTS : KLT_CLASSES))
        for (int s = 0; s < RANS_SYMBOLS; s++) weights[s] = 0.1;
    else
        klt_prior(weights, i, settings);
    for (int s = 0; s < RANS_SYMBOLS; s++) weights[s] += tally->counts[i][s];
    rans_frequencies(freq, weights);
    for (int s = 0; s < RANS_SYMBOLS; s++) {
        if (tally->counts[i][s] == 0.0) continue;
        double each = freq[s] > 0
                          ? log2((double)RANS_TOTAL / freq[s])
                          : log2((double)RANS_TOTAL / freq[RANS_ESCAPE]) + rans_extra(RANS_ESCAPE, s - RANS_RANGE, 0);
        bits += each * tally->counts[i][s];
    }
    return bits;
}

// What goes into a table beside the basis.
typedef struct {
    KltHeader head;
    unsigned char *number; // (H) class or bits
    double *sigma;         // (H) of the covariance
    double *spread;        // (H) as the class has it
    double *sizes;         // (S)
    int16_t *symbols;      // (H)
    uint32_t *draws;       // (H + 3)
    KltTally tally;
} KltPlan;

// Fits the plan to a step; returns bits a token of the sample.
static inline double klt_plan_step(KltPlan *plan, double step, const float *y, int S, const KltSettings *settings) {
    uint16_t freq[RANS_SYMBOLS];
    int H = plan->head.H, K = 1;
    double bits;
    while (K < H && plan->sigma[K] >= settings->floor * step && plan->sigma[K] > 0.0) K++;
    plan->head.K = K, plan->head.step = (float)step;
    for (int k = 0; k < K; k++) {
        plan->number[k] = (unsigned char)klt_class_of(plan->sigma[k], step);
        plan->spread[k] = step * exp2(0.5 * (plan->number[k] - KLT_CLASS_OF_ONE));
    }
    double rms = klt_sizes(plan->sizes, y, plan->spread, S, H, K);
    plan->head.rms = (float)(rms > 0.0 ? rms : 1.0);
    klt_tally(&plan->tally, y, plan->sizes, plan->number, S, H, rms, &plan->head, settings, plan->symbols, plan->draws);
    bits = plan->tally.extra;
    for (int i = 0; i <= klt_scales(plan->head.flags); i++) bits += klt_tally_bits(freq, &plan->tally, i, settings);
    return bits / S;
}

// Finds the step; returns bits a token of the sample.
static inline double klt_plan_entropy(KltPlan *plan, const float *y, int S, const KltSettings *settings) {
    double low = log2(plan->sigma[0]) - 12.0, high = log2(plan->sigma[0]) + 3.0;
    for (int i = 0; i < 20; i++) {
        double middle = 0.5 * (low + high);
        if (klt_plan_step(plan, exp2(middle), y, S, settings) > settings->bits)
            low = middle;
        else
            high = middle;
    }
    return klt_plan_step(plan, exp2(high), y, S, settings);
}

// Gives settings->bits out: each time to the component, and as many bits, that take most of the error for each bit.
// Returns those given.
static inline double klt_plan_fixed(KltPlan *plan, const float *y, int S, const KltSettings *settings) {
    int H = plan->head.H, left = (int)settings->bits, K = 0;
    memset(plan->number, 0, (size_t)H);
    for (;;) {
        double best = 0.0;
        int at = -1, more = 0;
        for (int k = 0; k < H; k++) {
            int bits = plan->number[k];
            for (int j = 1; j <= 3 && j <= left && bits + j <= KLT_MAX_BITS; j++) {
                double gain = klt_error(bits, settings->stochastic) - klt_error(bits + j, settings->stochastic);
                gain *= plan->sigma[k] * plan->sigma[k] / j;
                if (gain > best) best = gain, at = k, more = j;
            }
            if (bits == 0 && k > 0 && plan->number[k - 1] == 0) break; // later ones have less variance
        }
        if (at < 0) break;
        plan->number[at] = (unsigned char)(plan->number[at] + more), left -= more;
    }
    while (K < H && plan->number[K] > 0) K++;
    if (K == 0) K = plan->number[0] = 1;
    plan->head.K = K, plan->head.step = 1.0f;
    double rms = klt_sizes(plan->sizes, y, plan->sigma, S, H, K);
    plan->head.rms = (float)(rms > 0.0 ? rms : 1.0);
    return (int)settings->bits - left;
}

static inline unsigned char *klt_put_bf16(unsigned char *to, float value) {
    uint16_t half = bf16_of_float(value);
    memcpy(to, &half, 2);
    return to + 2;
}

// The plan as a table. basis (H, H), offset (H) or NULL, predictor (H, H) or NULL: host memory. NULL without memory.
static inline unsigned char *klt_plan_blob(const KltPlan *plan, const float *basis, const float *dual,
                                           const float *offset, const float *predictor, const KltSettings *settings,
                                           int64_t *n_bytes) {
    size_t H = (size_t)plan->head.H, K = (size_t)plan->head.K;
    *n_bytes = klt_table_bytes(&plan->head);
    unsigned char *blob = (unsigned char *)malloc((size_t)*n_bytes), *at;
    if (blob == NULL) return NULL;
    at = blob + KLT_HEADER;
    klt_table_put_head(blob, &plan->head);
    for (size_t h = 0; h < H; h++)
        for (size_t k = 0; k < K; k++) at = klt_put_bf16(at, basis[h * H + k]);
    for (size_t h = 0; h < H && dual != NULL; h++)
        for (size_t k = 0; k < K; k++) at = klt_put_bf16(at, dual[h * H + k]);
    if (offset != NULL) memcpy(at, offset, 4 * H), at += 4 * H;
    for (size_t i = 0; i < H * H && predictor != NULL; i++) at = klt_put_bf16(at, predictor[i]);
    memcpy(at, plan->number, K), at += K;
    for (size_t k = 0; k < K && settings->fixed; k++, at += 4) {
        float sigma = (float)plan->sigma[k];
        memcpy(at, &sigma, 4);
    }
    for (int i = 0; i <= klt_scales(plan->head.flags) && !settings->fixed; i++, at += 2 * RANS_SYMBOLS) {
        uint16_t freq[RANS_SYMBOLS];
        klt_tally_bits(freq, &plan->tally, i, settings);
        memcpy(at, freq, sizeof freq);
    }
    for (int i = 0; i < KLT_CLASSES && !settings->fixed; i++) {
        for (int j = 0; j < 2; j++) {
            double met = plan->tally.met[i][j], moved = met > 0.0 ? plan->tally.moved[i][j] / (met + 4.0) : 0.0;
            *at++ =
                (unsigned char)(signed char)(settings->stochastic ? 0 : lround(fmax(fmin(moved, 0.49), -0.49) * 256));
        }
    }
    return blob;
}

// Host copies of the moments as covariances: C = sums / weight - mean mean^T.
static inline void klt_covariance(float *c, const double *left, const double *right, double weight, int H) {
    for (int i = 0; i < H; i++)
        for (int j = 0; j < H; j++) {
            size_t at = (size_t)i * (size_t)H + (size_t)j;
            c[at] = (float)((double)c[at] / weight - left[i] * right[j]);
        }
}

static inline void klt_mean(double *mean, const float *sum, double weight, int H) {
    for (int h = 0; h < H; h++) mean[h] = (double)sum[h] / weight;
}

// Matrices of a fit, (H, H) each on the device, and one on the host.
typedef struct {
    float *device, *c, *xe, *ee, *w, *v, *product, *values; // values (H)
    float *host, *offset, *predictor, *dual;                // host: (H, H), (H), (H, H), (H, H)
    double *mean, *mean_e;
} KltFit;

static inline void klt_fit_free(KltFit *fit) {
    device_free(fit->device);
    free(fit->host);
    free(fit->mean);
    memset(fit, 0, sizeof *fit);
}

static inline int klt_fit_alloc(KltFit *fit, int H) {
    size_t wide = (size_t)H, square = wide * wide;
    memset(fit, 0, sizeof *fit);
    fit->device = (float *)device_alloc(sizeof(float) * (6 * square + wide));
    fit->host = (float *)calloc(3 * square + wide, sizeof(float));
    fit->mean = (double *)calloc(2 * wide, sizeof(double));
    if (fit->device == NULL || fit->host == NULL || fit->mean == NULL)
        return error_set("out of memory for the transform codec's tables");
    fit->c = fit->device, fit->xe = fit->c + square, fit->ee = fit->xe + square, fit->w = fit->ee + square;
    fit->v = fit->w + square, fit->product = fit->v + square, fit->values = fit->product + square;
    fit->predictor = fit->host + square, fit->offset = fit->predictor + square, fit->mean_e = fit->mean + wide;
    fit->dual = fit->offset + wide;
    return 0;
}

// to = from's sums as a covariance, through host memory.
static inline void klt_fit_covariance(KltFit *fit, float *to, const float *from, const double *left,
                                      const double *right, double weight, int H, Stream *stream) {
    size_t bytes = sizeof(float) * (size_t)H * (size_t)H;
    device_copy(fit->host, from, bytes, stream);
    klt_covariance(fit->host, left, right, weight, H);
    device_copy(to, fit->host, bytes, stream);
}

// fit->w = C_xe (C_ee + ridge)^-1, rounded; fit->c becomes what it leaves, fit->predictor and offset are on the host.
static inline int klt_fit_predictor(KltFit *fit, const KltMoments *m, const KltMoments *embedding, double ridge, int H,
                                    Stream *stream) {
    size_t wide = (size_t)H, square = wide * wide;
    double average = 0.0;
    device_copy(fit->host, embedding->sum, sizeof(float) * wide, stream);
    klt_mean(fit->mean_e, fit->host, embedding->weight, H);
    klt_fit_covariance(fit, fit->ee, embedding->xx, fit->mean_e, fit->mean_e, embedding->weight, H, stream);
    klt_fit_covariance(fit, fit->xe, m->xe, fit->mean, fit->mean_e, m->weight, H, stream);
    if (stream_check(stream) || eigh(fit->v, fit->values, fit->ee, H, stream)) return -1;
    matmul_product(fit->product, H, fit->xe, H, 0, fit->v, H, 0, H, H, H, 0, 0, stream);
    device_copy(fit->host, fit->product, sizeof(float) * square, stream);
    device_copy(fit->offset, fit->values, sizeof(float) * wide, stream);
    for (size_t h = 0; h < wide; h++) average += fmax((double)fit->offset[h], 0.0) / H;
    for (size_t i = 0; i < square; i++)
        fit->host[i] =
            (float)((double)fit->host[i] / (fmax((double)fit->offset[i % wide], 0.0) + ridge * average + 1e-30));
    device_copy(fit->product, fit->host, sizeof(float) * square, stream);
    matmul_product(fit->w, H, fit->product, H, 0, fit->v, H, 1, H, H, H, 0, 0, stream);
    vector_round_bf16(fit->w, (int64_t)square, stream);
    // product = W C_ee - C_xe, then C - C_xe W^T + product W^T - W C_ex, whose last term is the second transposed
    matmul_product(fit->product, H, fit->w, H, 0, fit->ee, H, 0, H, H, H, 0, 0, stream);
    vector_subtract(fit->product, fit->xe, (int64_t)square, stream);
    matmul_product(fit->c, H, fit->product, H, 0, fit->w, H, 1, H, H, H, 0, 1, stream);
    matmul_product(fit->product, H, fit->w, H, 0, fit->xe, H, 1, H, H, H, 0, 0, stream);
    vector_subtract(fit->c, fit->product, (int64_t)square, stream);
    device_copy(fit->predictor, fit->w, sizeof(float) * square, stream);
    for (size_t i = 0; i < wide; i++) {
        double moved = fit->mean[i];
        for (size_t j = 0; j < wide; j++) moved -= (double)fit->predictor[i * wide + j] * fit->mean_e[j];
        fit->offset[i] = (float)moved;
    }
    return stream_check(stream);
}

// The covariance of what is coded in fit->c, and what is subtracted before.
static inline int klt_fit(KltFit *fit, const KltMoments *m, const KltMoments *embedding, const KltSettings *settings,
                          Stream *stream) {
    int H = m->H;
    if (!settings->stochastic) {
        device_copy(fit->host, m->sum, sizeof(float) * (size_t)H, stream);
        klt_mean(fit->mean, fit->host, m->weight, H);
    }
    klt_fit_covariance(fit, fit->c, m->xx, fit->mean, fit->mean, m->weight, H, stream);
    for (int h = 0; h < H; h++) fit->offset[h] = (float)fit->mean[h];
    if (embedding != NULL && klt_fit_predictor(fit, m, embedding, settings->ridge, H, stream)) return -1;
    return stream_check(stream);
}

// to = V diag(values^power) V^T of fit->v and its values (H) on the host.
static inline void klt_fit_power(KltFit *fit, float *to, const float *values, double power, int H, Stream *stream) {
    size_t wide = (size_t)H, bytes = sizeof(float) * wide * wide;
    device_copy(fit->host, fit->v, bytes, stream);
    for (size_t i = 0; i < wide * wide; i++) fit->host[i] *= (float)pow((double)values[i % wide], power);
    device_copy(fit->product, fit->host, bytes, stream);
    matmul_product(to, H, fit->product, H, 0, fit->v, H, 1, H, H, H, 0, 0, stream);
}

// fit->xe = M, fit->ee = M^-1, fit->c becomes M c M.
static inline int klt_fit_metric(KltFit *fit, const KltMoments *metric, double gamma, int H, Stream *stream) {
    double mean = 0.0;
    float *values = fit->dual; // free until the dual is there
    if (metric->weight <= 0.0) return error_set("klt: no gradient was seen to weigh states by");
    if (eigh(fit->v, fit->values, metric->xx, H, stream)) return -1;
    device_copy(values, fit->values, sizeof(float) * (size_t)H, stream);
    for (int h = 0; h < H; h++) mean += fmax((double)values[h], 0.0) / H;
    for (int h = 0; h < H; h++) values[h] = (float)fmax((double)values[h] / (mean + 1e-30), 1e-3);
    klt_fit_power(fit, fit->xe, values, 0.5 * gamma, H, stream);
    klt_fit_power(fit, fit->ee, values, -0.5 * gamma, H, stream);
    matmul_product(fit->product, H, fit->xe, H, 0, fit->c, H, 0, H, H, H, 0, 0, stream);
    matmul_product(fit->c, H, fit->product, H, 0, fit->xe, H, 0, H, H, H, 0, 0, stream);
    return stream_check(stream);
}

// fit->v = the basis as it travels, fit->values its variances, fit->dual what goes with it.
static inline int klt_fit_basis(KltFit *fit, const KltMoments *metric, double gamma, int H, Stream *stream) {
    size_t square = (size_t)H * (size_t)H;
    if (metric != NULL && klt_fit_metric(fit, metric, gamma, H, stream)) return -1;
    if (eigh(fit->v, fit->values, fit->c, H, stream)) return -1;
    if (metric != NULL) {
        matmul_product(fit->product, H, fit->ee, H, 0, fit->v, H, 0, H, H, H, 0, 0, stream);
        device_copy(fit->dual, fit->product, sizeof(float) * square, stream);
        matmul_product(fit->product, H, fit->xe, H, 0, fit->v, H, 0, H, H, H, 0, 0, stream);
        device_copy(fit->v, fit->product, sizeof(float) * square, stream);
    }
    vector_round_bf16(fit->v, (int64_t)square, stream);
    return stream_check(stream);
}

// y (S, H) on the host = the sample, centered and projected on all of fit->v.
static inline int klt_project_sample(float *y, const KltFit *fit, const KltMoments *m, const KltMoments *embedding,
                                     const float *embed, const KltSettings *settings, KltWork *work, Stream *stream) {
    int S = m->n_sample, H = m->H;
    size_t wide = (size_t)S * (size_t)H, rows = ((size_t)S + 15) / 16 * 16;
    float *values = (float *)scratch_get(&work->device, sizeof(float) * (2 * wide + (size_t)H + rows));
    if (values == NULL) return -1;
    float *other = values + wide, *offset = other + wide;
    uint32_t *tokens = (uint32_t *)(void *)(offset + H);
    device_copy(values, m->sample, sizeof(float) * wide, stream);
    if (embedding != NULL) {
        device_copy(tokens, m->tokens, sizeof *tokens * (size_t)S, stream);
        klt_embed(other, tokens, embed, S, H, stream);
        matmul_product(values, H, other, H, 0, fit->w, H, 1, S, H, H, 0, 0, stream);
        device_copy(other, m->sample, sizeof(float) * wide, stream);
        vector_subtract(other, values, (int64_t)wide, stream);
        device_copy(values, other, sizeof(float) * wide, stream);
    }
    if (!settings->stochastic) { // minus 1 offset^T, a product: there is no op for it in fp32
        float *ones = (float *)klt_host(work, sizeof(float) * (size_t)S);
        if (ones == NULL) return -1;
        for (int t = 0; t < S; t++) ones[t] = -1.0f;
        device_copy(offset, fit->offset, sizeof(float) * (size_t)H, stream);
        device_copy(tokens, ones, sizeof(float) * (size_t)S, stream);
        matmul_product(values, H, (float *)(void *)tokens, 1, 0, offset, H, 0, S, H, 1, 0, 1, stream);
    }
    matmul_product(other, H, values, H, 0, fit->v, H, 0, S, H, H, 0, 0, stream);
    device_copy(y, other, sizeof(float) * wide, stream);
    return stream_check(stream);
}

static inline void klt_plan_free(KltPlan *plan) {
    free(plan->number);
    free(plan->sigma);
    free(plan->symbols);
    free(plan->draws);
}

static inline int klt_plan_alloc(KltPlan *plan, int H, int S) {
    plan->head.H = H;
    plan->number = (unsigned char *)calloc((size_t)H, 1);
    plan->sigma = (double *)calloc(2 * (size_t)H + (size_t)S, sizeof(double));
    plan->symbols = (int16_t *)calloc((size_t)H, sizeof(int16_t));
    plan->draws = (uint32_t *)calloc((size_t)H + 3, sizeof(uint32_t));
    if (plan->number == NULL || plan->sigma == NULL || plan->symbols == NULL || plan->draws == NULL)
        return error_set("out of memory for the transform codec's tables");
    plan->spread = plan->sigma + H, plan->sizes = plan->spread + H;
    return 0;
}

// The least share of the variance, sum of sigma[k]^2, that `bits` a token leave of a Gaussian: reverse water-filling.
static inline double klt_bound(const double *sigma, int H, double bits) {
    double low = -200.0, high = 2.0 * log2(sigma[0]), left = 0.0, all = 0.0; // of the water's level, log2
    for (int i = 0; i < 100; i++) {
        double level = 0.5 * (low + high), needs = 0.0;
        for (int k = 0; k < H; k++) needs += fmax(log2(sigma[k]) - 0.5 * level, 0.0);
        if (needs > bits)
            low = level;
        else
            high = level;
    }
    for (int k = 0; k < H; k++) left += fmin(sigma[k] * sigma[k], exp2(high)), all += sigma[k] * sigma[k];
    return left / all;
}

// What a table as shipped loses of the sample y (S, H) it was planned on. 0, or -1 with a message.
static inline int klt_report(KltReport *report, const KltPlan *plan, const unsigned char *blob, const float *y, int S,
                             uint64_t key) {
    int H = plan->head.H, K = plan->head.K, fixed = (plan->head.flags & KLT_FIXED) != 0, result = -1;
    double lost = 0.0, all = 0.0;
    KltTable table;
    memset(&table, 0, sizeof table);
    table.head = plan->head, table.blob = (unsigned char *)blob;
    table.coder = (RansTable *)calloc((size_t)klt_scales(table.head.flags) + 1, sizeof(RansTable));
    table.memory = (float *)calloc(klt_table_memory(&table.head), 1); // on the host
    if (table.coder == NULL || table.memory == NULL)
        error_set("out of memory for a table of the transform codec");
    else
        result = klt_table_parse(&table, table.memory);
    klt_table_arrays(&table);
    KltQuantizer q = klt_quantizer(&table, fixed ? 1.0f : table.head.step, key);
    for (int t = 0; t < S && result == 0; t++) {
        Philox draws = {{0, 0, 0, 0}};
        int scale = klt_scale(plan->sizes[t], (double)plan->head.rms);
        for (int k = 0; k < H; k++) {
            float v = y[(size_t)t * (size_t)H + (size_t)k], kept = 0.0f;
            if (k % 4 == 0) draws = klt_draws(key, t, k / 4);
            if (k < K) kept = klt_value(&q, klt_symbol(&q, v, k, draws.v[k % 4]), k, scale, draws.v[k % 4]);
            lost += ((double)v - (double)kept) * ((double)v - (double)kept), all += (double)v * (double)v;
        }
    }
    report->lost = lost / (all + 1e-300);
    report->bound = klt_bound(plan->sigma, H, report->bits);
    free(table.coder);
    free(table.memory);
    return result;
}

// Basis, sample and plan of a fit; the blob, or NULL.
static inline unsigned char *klt_make(KltFit *fit, KltPlan *plan, float *y, const KltSources *from,
                                      const KltSettings *settings, KltWork *work, int64_t *n_bytes, KltReport *report,
                                      Stream *stream) {
    const KltMoments *m = from->moments;
    size_t wide = (size_t)m->H;
    int predicts = from->embedding != NULL;
    if (klt_fit(fit, m, from->embedding, settings, stream)) return NULL;
    if (klt_fit_basis(fit, from->metric, settings->metric, m->H, stream)) return NULL;
    if (klt_project_sample(y, fit, m, from->embedding, from->embed, settings, work, stream)) return NULL;
    device_copy(fit->host, fit->values, sizeof(float) * wide, stream);
    for (size_t h = 0; h < wide; h++)
        plan->sigma[h] = sqrt(fmax((double)fit->host[h], 1e-12 * fmax((double)fit->host[0], 1e-20)));
    device_copy(fit->host, fit->v, sizeof(float) * wide * wide, stream);
    if (stream_check(stream)) return NULL;
    KltHeader head = {settings->version, m->H, 1, 0, 1.0f, 1.0f, settings->theta};
    head.flags = (settings->stochastic ? KLT_STOCHASTIC : KLT_OFFSET) | (predicts ? KLT_PREDICTED : 0) |
                 (settings->fixed ? KLT_FIXED : 0) | (from->metric != NULL ? KLT_DUAL : 0);
    plan->head = head;
    report->bits = settings->fixed ? klt_plan_fixed(plan, y, m->n_sample, settings)
                                   : klt_plan_entropy(plan, y, m->n_sample, settings);
    unsigned char *blob =
        klt_plan_blob(plan, fit->host, from->metric != NULL ? fit->dual : NULL,
                      settings->stochastic ? NULL : fit->offset, predicts ? fit->predictor : NULL, settings, n_bytes);
    if (blob == NULL || klt_report(report, plan, blob, y, m->n_sample, settings->seed + settings->version) == 0)
        return blob;
    free(blob);
    return NULL;
}

// The table of what was seen, for settings->bits a token. Returns the blob, to be freed, and its bytes; NULL with a
// message: no memory, no rows yet, moments that are not finite, or the stream has failed.
static inline unsigned char *klt_learn(const KltSources *from, const KltSettings *settings, KltWork *work,
                                       int64_t *n_bytes, KltReport *report, Stream *stream) {
    const KltMoments *m = from->moments;
    KltFit fit;
    KltPlan *plan = (KltPlan *)calloc(1, sizeof *plan);
    unsigned char *blob = NULL;
    float *y = (float *)malloc(sizeof(float) * ((size_t)m->n_sample + 1) * (size_t)m->H);
    memset(&fit, 0, sizeof fit);
    if (plan == NULL || y == NULL || klt_fit_alloc(&fit, m->H) || klt_plan_alloc(plan, m->H, m->n_sample))
        error_set("out of memory for the transform codec's tables");
    else if (m->weight <= 0.0 || m->n_sample == 0)
        error_set("klt: there is nothing to learn a table from");
    else
        blob = klt_make(&fit, plan, y, from, settings, work, n_bytes, report, stream);
    if (plan != NULL) klt_plan_free(plan);
    klt_fit_free(&fit);
    free(plan);
    free(y);
    return blob;
}
