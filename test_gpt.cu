// Checks the program against PyTorch dumps, float64, finite differences and itself. Prints "N passed, N failed" and
// exits non-zero on a failure. `make test` builds and runs it; `./test_gpt NAME` runs the tests whose name contains
// NAME.
//
// How to add a test: write static void test_<what>(void), call check...(), add a line to the table at the end.
#define TESTING
#include "train_gpt.cu"
#include "dev/mask_golden.h"
#ifndef DEVICE_CUDA
#include "dev/bowl.h"
#endif

#include <sched.h>        // sched_yield
#include <sys/resource.h> // setrlimit
#include <sys/wait.h>     // waitpid

// ---------------------------------------------------------------------------------------------------------------------
// Checking

static int checks_passed, checks_failed;
static const char *test_name;
static char test_folder[PATH_MAX]; // scratch, removed at the end

__attribute__((format(printf, 2, 3))) static int check(int ok, const char *format, ...) {
    va_list args;
    if (ok) {
        checks_passed++;
        return 1;
    }
    checks_failed++;
    printf("FAIL %s: ", test_name);
    va_start(args, format);
    vprintf(format, args);
    va_end(args);
    printf("\n");
    return 0;
}

// ||a - b|| / ||b|| in double: an all-zero a scores 1, NaN anywhere scores NaN.
static double relative_error(const float *a, const float *b, int64_t n) {
    double difference = 0.0, size = 0.0;
    for (int64_t i = 0; i < n; i++) {
        difference += ((double)a[i] - (double)b[i]) * ((double)a[i] - (double)b[i]);
        size += (double)b[i] * (double)b[i];
    }
    return sqrt(difference) / (size > 0.0 ? sqrt(size) : 1e-30);
}

// Passes if a is within tol of b, relative to b's norm. tol must be below 1, or zeros would pass.
static int check_close(const float *a, const float *b, int64_t n, double tol, const char *what) {
    double error = relative_error(a, b, n);
    return check(error <= tol && tol < 0.5, "%s: relative error %.3g, at most %.3g allowed (n %lld)", what, error, tol,
                 (long long)n);
}

static int check_error(int result, const char *part, const char *what) {
    if (!check(result != 0, "%s: was accepted", what)) return 0;
    return check(strstr(error_message, part) != NULL && strchr(error_message, '\n') == NULL,
                 "%s: the message '%s' does not say '%s' in one line", what, error_message, part);
}

// A buffer that starts as NaN between guard words: stale and stray writes show.
enum { GUARD = 16 };

static float *guarded(int64_t n) {
    float *base = (float *)malloc(sizeof(float) * (size_t)(n + 2 * GUARD));
    for (int64_t i = 0; i < n + 2 * GUARD; i++) base[i] = NAN;
    return base + GUARD;
}

static void release(float *buffer, int64_t n, const char *what) {
    int clean = 1;
    for (int i = 1; i <= GUARD; i++) clean = clean && isnan(buffer[-i]) && isnan(buffer[n + i - 1]);
    check(clean, "%s: wrote outside its buffer", what);
    free(buffer - GUARD);
}

// n values of a standard normal times scale, reproducible by `sub`.
static float *random_values(int64_t n, uint32_t sub, float scale) {
    float *values = (float *)malloc(sizeof(float) * (size_t)(n + 4));
    for (int64_t i = 0; i < n; i += 4) rand_normal4(values + i, 99, RAND_TEST, sub, (uint64_t)i / 4);
    for (int64_t i = 0; i < n; i++) values[i] *= scale;
    return values;
}

// Removes a folder of the scratch folder with all in it. 0 on success.
static int system_remove(const char *name) {
    char command[PATH_MAX + 128];
    snprintf(command, sizeof command, "rm -rf '%s/%s'", test_folder, name);
    return system(command);
}

static Stream *test_stream(Precision precision, int threads) {
    Stream *stream = NULL;
    if (stream_create(&stream, precision, threads)) {
        printf("%s\n", error_message);
        exit(1);
    }
    return stream;
}

// What `memory` (n values of T) holds, on the host: itself where tensors are there, else a copy. The last 16 are valid.
static const void *seen_bytes(const void *memory, size_t n_bytes, Stream *stream) {
#ifdef DEVICE_CUDA
    static void *copies[16];
    static int next;
    next = (next + 1) % 16;
    free(copies[next]);
    copies[next] = malloc(n_bytes);
    device_copy(copies[next], memory, n_bytes, stream);
    check(stream_check(stream) == 0, "%s", error_message);
    return copies[next];
#else
    (void)n_bytes, (void)stream;
    return memory;
#endif
}

static const float *seen(const float *memory, int64_t n, Stream *stream) {
    return (const float *)seen_bytes(memory, sizeof(float) * (size_t)n, stream);
}

#ifndef DEVICE_CUDA // test_cuda.cu has these for a device's ops
// ---------------------------------------------------------------------------------------------------------------------
// Ops against float64. A backward is checked against central differences of the float64 forward: the gradient of
// sum(out * dout) with respect to each input.

typedef struct {
    double (*value)(const double *input, const void *context); // sum(out * dout) in float64
    const void *context;
} Objective;

// expected (n) = d objective / d input, by central differences in double.
static void numeric_gradient(float *expected, const float *input, int64_t n, Objective objective) {
    double *x = (double *)malloc(sizeof(double) * (size_t)n);
    for (int64_t i = 0; i < n; i++) x[i] = (double)input[i];
    for (int64_t i = 0; i < n; i++) {
        double step = 1e-5, keep = x[i];
        x[i] = keep + step;
        double up = objective.value(x, objective.context);
        x[i] = keep - step;
        double down = objective.value(x, objective.context);
        x[i] = keep;
        expected[i] = (float)((up - down) / (2.0 * step));
    }
    free(x);
}

// The test of the tests: what a lazy kernel would leave behind must fail.
static void test_checks_can_fail(void) {
    enum { N = 64 };
    float *truth = random_values(N, 1, 1.0f), *stale = random_values(N, 2, 1.0f), *zeros = guarded(N),
          *nans = guarded(N);
    for (int i = 0; i < N; i++) zeros[i] = 0.0f;
    check(relative_error(zeros, truth, N) >= 0.999, "zeros pass");
    check(relative_error(stale, truth, N) > 0.5, "another call's output passes");
    check(!(relative_error(nans, truth, N) <= 1e30), "NaN passes");
    zeros[0] = truth[0] * 1.5f;
    for (int i = 1; i < N; i++) zeros[i] = truth[i];
    check(relative_error(zeros, truth, N) > 1e-3, "one wrong element passes at the tolerances used here");
    release(nans, N, "nans");
    release(zeros, N, "zeros");
    free(truth);
    free(stale);
}

// rmsnorm: C straddles vectors and the strips of the weight gradient; tiny x, where eps matters.
// Must fail for: zeros, last call's output, weight left out, eps 1e-6 for 1e-5.
typedef struct {
    int N, C, of; // of: 0 the input is x, 1 it is weight
    const float *x, *weight, *dout;
    float eps;
} NormCase;

static double norm_objective(const double *input, const void *context) {
    const NormCase *k = (const NormCase *)context;
    double total = 0.0;
    for (int n = 0; n < k->N; n++) {
        double sum = 0.0;
        for (int c = 0; c < k->C; c++) {
            double x = k->of == 0 ? input[n * k->C + c] : (double)k->x[n * k->C + c];
            sum += x * x;
        }
        double rstd = 1.0 / sqrt(sum / k->C + (double)k->eps);
        for (int c = 0; c < k->C; c++) {
            double x = k->of == 0 ? input[n * k->C + c] : (double)k->x[n * k->C + c];
            double w = k->of == 1 ? input[c] : (double)k->weight[c];
            total += x * rstd * w * (double)k->dout[n * k->C + c];
        }
    }
    return total;
}

static void test_rmsnorm(void) {
    static const struct {
        int N, C;
        float scale;
    } cases[] = {{1, 8, 1}, {3, 7, 1}, {5, 63, 1}, {2, 65, 0.003f}, {4, 130, 1}, {130, 17, 1}};
    Stream *stream = test_stream(PRECISION_FP32, 2);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int N = cases[i].N, C = cases[i].C, n = N * C;
        float *x = random_values(n, 3, cases[i].scale), *weight = random_values(C, 4, 1.0f);
        float *dout = random_values(n, 5, 1.0f), *out = guarded(n), *rstd = guarded(N);
        float *expected = (float *)malloc(sizeof(float) * (size_t)n), *dweight = guarded(C), *dx = guarded(n);
        rmsnorm_forward(out, rstd, x, weight, N, C, 1e-5f, stream);
        for (int r = 0; r < N; r++) {
            double sum = 0.0;
            for (int c = 0; c < C; c++) sum += (double)x[r * C + c] * (double)x[r * C + c];
            double scale = 1.0 / sqrt(sum / C + 1e-5);
            for (int c = 0; c < C; c++) expected[r * C + c] = (float)((double)x[r * C + c] * scale * (double)weight[c]);
            check(fabs((double)rstd[r] - scale) <= 1e-6 * scale, "rstd %g, %g", (double)rstd[r], scale);
        }
        check_close(out, expected, n, 3e-7, "out");
        NormCase context = {N, C, 0, x, weight, dout, 1e-5f};
        Objective objective = {norm_objective, &context};
        for (int j = 0; j < n; j++) dx[j] = 1.0f; // dx is added to
        for (int c = 0; c < C; c++) dweight[c] = -2.0f;
        rmsnorm_backward(dx, dweight, dout, x, weight, rstd, N, C, stream);
        numeric_gradient(expected, x, n, objective);
        for (int j = 0; j < n; j++) dx[j] -= 1.0f;
        check_close(dx, expected, n, 2e-5, "dx");
        context.of = 1;
        numeric_gradient(expected, weight, C, objective);
        for (int c = 0; c < C; c++) dweight[c] += 2.0f;
        check_close(dweight, expected, C, 5e-6, "dweight");
        release(out, n, "out");
        release(rstd, N, "rstd");
        release(dweight, C, "dweight");
        release(dx, n, "dx");
        free(x);
        free(weight);
        free(dout);
        free(expected);
    }
    stream_destroy(stream);
}

// swiglu: large |gate| too, where a careless sigmoid overflows. dgate_up may alias gate_up.
typedef struct {
    int N, F;
    const float *dout;
} GateCase;

static double gate_objective(const double *input, const void *context) {
    const GateCase *k = (const GateCase *)context;
    double total = 0.0;
    for (int n = 0; n < k->N; n++) {
        for (int f = 0; f < k->F; f++) {
            double gate = input[n * 2 * k->F + f], up = input[n * 2 * k->F + k->F + f];
            total += gate / (1.0 + exp(-gate)) * up * (double)k->dout[n * k->F + f];
        }
    }
    return total;
}

static void test_swiglu(void) {
    static const struct {
        int N, F;
        float scale;
    } cases[] = {{1, 1, 1}, {3, 17, 1}, {5, 71, 3}, {2, 33, 60}};
    Stream *stream = test_stream(PRECISION_FP32, 2);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int N = cases[i].N, F = cases[i].F, n = N * F;
        float *x = random_values(2 * n, 6, cases[i].scale), *dout = random_values(n, 7, 1.0f);
        float *out = guarded(n), *dx = guarded(2 * n), *expected = (float *)malloc(sizeof(float) * 2 * (size_t)n);
        swiglu_forward(out, x, N, F, stream);
        for (int r = 0; r < N; r++) {
            for (int f = 0; f < F; f++) {
                double gate = (double)x[r * 2 * F + f], up = (double)x[r * 2 * F + F + f];
                expected[r * F + f] = (float)(gate / (1.0 + exp(-gate)) * up);
            }
        }
        check_close(out, expected, n, 5e-7, "out");
        GateCase context = {N, F, dout};
        Objective objective = {gate_objective, &context};
        numeric_gradient(expected, x, 2 * n, objective);
        swiglu_backward(dx, dout, x, N, F, stream);
        check_close(dx, expected, 2 * n, 1e-6, "dgate_up");
        swiglu_backward(x, dout, x, N, F, stream);
        check(memcmp(x, dx, sizeof(float) * 2 * (size_t)n) == 0, "in place differs");
        release(out, n, "out");
        release(dx, 2 * n, "dx");
        free(x);
        free(dout);
        free(expected);
    }
    stream_destroy(stream);
}

// exp_simd over its whole range against libm in double, and NaN.
static void test_exp(void) {
    double worst = 0.0;
    for (int i = 0; i <= 100000; i++) {
        float x = -87.0f + 175.0f * (float)i / 100000.0f;
        double error = fabs((double)exp_simd(x) / exp((double)x) - 1.0);
        if (!(error <= worst)) worst = error;
    }
    check(worst <= 3e-7, "relative error %.3g", worst);
    check(isnan(exp_simd(NAN)), "NaN became %g", (double)exp_simd(NAN));
    check(exp_simd(-1000.0f) < 1e-37f && isfinite(exp_simd(1000.0f)), "ends of the range");
}

// Attention: T straddles blocks of 64, head sizes that are no multiple of a vector, heads != kv^2, T = 1; queries fewer
// than keys as in generation. Must fail for: zeros, a head mapped to the wrong kv head, the diagonal masked out.
typedef struct {
    AttentionShape s;
    const float *dout;
} AttentionCase;

// out (B, Tq, NH*HD) in double for input q | k | v, each packed (B, T, heads*HD)
static void attention_reference(double *out, const double *input, const AttentionShape *s) {
    const double *q = input, *k = q + (size_t)s->B * s->Tq * s->NH * s->HD,
                 *v = k + (size_t)s->B * s->Tk * s->NKV * s->HD;
    double *p = (double *)malloc(sizeof(double) * (size_t)s->Tk);
    for (int b = 0; b < s->B; b++) {
        for (int h = 0; h < s->NH; h++) {
            int kv = h / (s->NH / s->NKV);
            for (int i = 0; i < s->Tq; i++) {
                const double *query = q + (((size_t)b * s->Tq + i) * s->NH + h) * s->HD;
                double *to = out + (((size_t)b * s->Tq + i) * s->NH + h) * s->HD, total = 0.0;
                int seen = s->Tk - s->Tq + i + 1;
                for (int j = 0; j < seen; j++) {
                    double score = 0.0;
                    for (int d = 0; d < s->HD; d++)
                        score += query[d] * k[(((size_t)b * s->Tk + j) * s->NKV + kv) * s->HD + d];
                    total += p[j] = exp(score / sqrt((double)s->HD));
                }
                for (int d = 0; d < s->HD; d++) {
                    to[d] = 0.0;
                    for (int j = 0; j < seen; j++)
                        to[d] += p[j] / total * v[(((size_t)b * s->Tk + j) * s->NKV + kv) * s->HD + d];
                }
            }
        }
    }
    free(p);
}

static double attention_objective(const double *input, const void *context) {
    const AttentionCase *k = (const AttentionCase *)context;
    size_t n = (size_t)k->s.B * k->s.Tq * k->s.NH * k->s.HD;
    double *out = (double *)malloc(sizeof(double) * n), total = 0.0;
    attention_reference(out, input, &k->s);
    for (size_t i = 0; i < n; i++) total += out[i] * (double)k->dout[i];
    free(out);
    return total;
}

// With bf16 the operands keep 8 bits: 1% of the largest value is allowed.
static void attention_cases(Precision precision) {
    static const struct {
        AttentionShape s;
        int backward;
    } cases[] = {{{1, 1, 1, 1, 1, 2, 0, 0, NULL, 0}, 1},      {{2, 5, 5, 4, 2, 6, 0, 0, NULL, 0}, 1},
                 {{1, 17, 17, 6, 3, 10, 0, 0, NULL, 0}, 1},   {{1, 66, 66, 2, 1, 4, 0, 0, NULL, 0}, 1},
                 {{2, 130, 130, 6, 2, 20, 0, 0, NULL, 0}, 0}, {{1, 64, 64, 3, 1, 64, 0, 0, NULL, 0}, 0},
                 {{1, 65, 65, 2, 2, 96, 0, 0, NULL, 0}, 0},   {{1, 1, 70, 6, 3, 8, 0, 0, NULL, 0}, 0},
                 {{1, 3, 131, 4, 2, 10, 0, 0, NULL, 0}, 0},   {{1, 63, 127, 2, 1, 128, 0, 0, NULL, 0}, 0}};
    Stream *stream = test_stream(precision, 2);
    double tol = precision == PRECISION_BF16 ? 1e-2 : 1e-6;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        AttentionShape s = cases[i].s;
        int64_t n_q = (int64_t)s.B * s.Tq * s.NH * s.HD, n_k = (int64_t)s.B * s.Tk * s.NKV * s.HD, n = n_q + 2 * n_k;
        float *input = random_values(n, 8, 1.0f), *dout = random_values(n_q, 9, 1.0f);
        float *out = guarded(n_q), *lse = guarded((int64_t)s.B * s.NH * s.Tq), *grad = guarded(n);
        float *expected = (float *)malloc(sizeof(float) * (size_t)n);
        double *wide = (double *)malloc(sizeof(double) * (size_t)(n + n_q));
        s.q_stride = s.NH * s.HD, s.kv_stride = s.NKV * s.HD;
        for (int64_t j = 0; j < n; j++) wide[j] = (double)input[j];
        attention_reference(wide + n, wide, &s);
        for (int64_t j = 0; j < n_q; j++) expected[j] = (float)wide[n + j];
        attention_forward(out, lse, input, input + n_q, input + n_q + n_k, s, stream);
        check_close(out, expected, n_q, tol, "out");
        if (cases[i].backward) {
            AttentionCase context = {s, dout};
            Objective objective = {attention_objective, &context};
            numeric_gradient(expected, input, n, objective);
            attention_backward(grad, grad + n_q, grad + n_q + n_k, dout, out, lse, input, input + n_q,
                               input + n_q + n_k, s, stream);
            if (s.Tk > 1) { // with one key the softmax is constant and dq = dk = 0
                check_close(grad, expected, n_q, 2 * tol, "dq");
                check_close(grad + n_q, expected + n_q, n_k, 2 * tol, "dk");
            }
            check_close(grad + n_q + n_k, expected + n_q + n_k, n_k, 2 * tol, "dv");
        }
        release(out, n_q, "out");
        release(lse, (int64_t)s.B * s.NH * s.Tq, "lse");
        release(grad, n, "grad");
        free(input);
        free(dout);
        free(expected);
        free(wide);
    }
    stream_destroy(stream);
}

static void test_attention(void) {
    attention_cases(PRECISION_FP32);
    attention_cases(PRECISION_BF16);
}

// The backward at sizes where differences are too slow: T 200 over four blocks against a plain float64 backward.
static void attention_backward_blocks(Precision precision, double tol) {
    AttentionShape s = {2, 200, 200, 6, 2, 32, (6 + 4) * 32, (6 + 4) * 32, NULL, 0}; // one joint row, as in training
    int QKV = s.q_stride, T = s.Tk, A = s.NH * s.HD, KV = s.NKV * s.HD, group = s.NH / s.NKV;
    int64_t n = (int64_t)s.B * T * QKV, n_out = (int64_t)s.B * T * A;
    float *x = random_values(n, 10, 1.0f), *dout = random_values(n_out, 11, 1.0f), *out = guarded(n_out);
    float *lse = guarded((int64_t)s.B * s.NH * T), *dx = guarded(n),
          *expected = (float *)malloc(sizeof(float) * (size_t)n);
    double *wide = (double *)calloc((size_t)n, sizeof(double)), *p = (double *)malloc(sizeof(double) * (size_t)T);
    Stream *stream = test_stream(precision, 2);
    attention_forward(out, lse, x, x + A, x + A + KV, s, stream);
    attention_backward(dx, dx + A, dx + A + KV, dout, out, lse, x, x + A, x + A + KV, s, stream);
    for (int task = 0; task < s.B * s.NH * T; task++) {
        int b = task / (s.NH * T), h = task / T % s.NH, i = task % T, kv = h / group;
        size_t q_at = ((size_t)b * T + i) * QKV + (size_t)h * s.HD, g_at = ((size_t)b * T + i) * A + (size_t)h * s.HD;
        double total = 0.0, dot = 0.0, scale = 1.0 / sqrt((double)s.HD);
        for (int j = 0; j <= i; j++) {
            const float *key = x + ((size_t)b * T + j) * QKV + A + (size_t)kv * s.HD;
            double score = 0.0;
            for (int d = 0; d < s.HD; d++) score += (double)x[q_at + d] * (double)key[d];
            total += p[j] = exp(score * scale);
        }
        for (int j = 0; j <= i; j++) {
            const float *value = x + ((size_t)b * T + j) * QKV + A + KV + (size_t)kv * s.HD;
            p[j] /= total;
            for (int d = 0; d < s.HD; d++) dot += p[j] * (double)value[d] * (double)dout[g_at + d];
        }
        for (int j = 0; j <= i; j++) {
            size_t k_at = ((size_t)b * T + j) * QKV + A + (size_t)kv * s.HD, v_at = k_at + KV;
            double dp = 0.0;
            for (int d = 0; d < s.HD; d++) dp += (double)x[v_at + d] * (double)dout[g_at + d];
            double ds = p[j] * (dp - dot) * scale;
            for (int d = 0; d < s.HD; d++) {
                wide[v_at + d] += p[j] * (double)dout[g_at + d];
                wide[k_at + d] += ds * (double)x[q_at + d];
                wide[q_at + d] += ds * (double)x[k_at + d];
            }
        }
    }
    for (int64_t i = 0; i < n; i++) expected[i] = (float)wide[i];
    check_close(dx, expected, n, tol, "dqkv");
    release(out, n_out, "out");
    release(lse, (int64_t)s.B * s.NH * T, "lse");
    release(dx, n, "dqkv");
    free(x);
    free(dout);
    free(expected);
    free(wide);
    free(p);
    stream_destroy(stream);
}

static void test_attention_backward_blocks(void) {
    attention_backward_blocks(PRECISION_FP32, 2e-6);
    attention_backward_blocks(PRECISION_BF16, 1e-2);
}

// Packed documents against the plain float64 attention of each document on its own, forward and backward (by its
// differences: the gradient of a document knows nothing of its neighbours). Documents of one token, documents that end
// on a block's edge and that span blocks; queries fewer than keys, whose first document began before them.
// Must fail for: starts left out, the starts of another sequence, off by one, dk of skipped blocks left as it was.
static void attention_documents_case(AttentionShape s, const int *lengths, int backward, Precision precision) {
    double tol = precision == PRECISION_BF16 ? 1e-2 : 2e-6;
    int A = s.NH * s.HD, KV = s.NKV * s.HD, QKV = A + 2 * KV, skipped = s.Tk - s.Tq;
    int64_t n = (int64_t)s.B * s.Tk * QKV, n_out = (int64_t)s.B * s.Tq * A;
    float *x = random_values(n, 14, 1.0f), *dout = random_values(n_out, 15, 1.0f), *out = guarded(n_out);
    float *lse = guarded((int64_t)s.B * s.NH * s.Tq), *dx = guarded(n);
    float *expected = (float *)malloc(sizeof(float) * (size_t)n), *wanted = (float *)malloc(sizeof(float) * (size_t)n);
    double *wide = (double *)malloc(sizeof(double) * (size_t)n);
    int32_t *starts = (int32_t *)malloc(sizeof(int32_t) * (size_t)s.B * (size_t)s.Tk);
    Stream *stream = test_stream(precision, 2);
    for (int b = 0; b < s.B; b++) {
        for (int start = 0, i = b; start < s.Tk; start += lengths[i++]) { // other sequences: other documents
            int length = lengths[i] < s.Tk - start ? lengths[i] : s.Tk - start;
            int queries = start + length <= skipped ? 0 : start < skipped ? start + length - skipped : length;
            AttentionShape one = {1, queries, length, s.NH, s.NKV, s.HD, A, KV, NULL, 0};
            int64_t row = (int64_t)b * s.Tk + start, first = length - queries;
            int64_t out_row = row + first - (int64_t)skipped * (b + 1); // of its first query
            float *part = (float *)malloc(sizeof(float) * (size_t)length * (size_t)QKV), *k = part + queries * A;
            for (int t = 0; t < length; t++) {
                const float *from = x + (row + t) * QKV;
                starts[row + t] = start;
                if (t >= first) memcpy(part + (t - first) * A, from, sizeof(float) * (size_t)A);
                memcpy(k + t * KV, from + A, sizeof(float) * (size_t)KV);
                memcpy(k + (length + t) * KV, from + A + KV, sizeof(float) * (size_t)KV);
            }
            int64_t n_part = queries * A + 2 * length * KV;
            for (int64_t j = 0; j < n_part; j++) wide[j] = (double)part[j];
            double *result = (double *)malloc(sizeof(double) * (size_t)(queries * A + 1));
            attention_reference(result, wide, &one);
            for (int j = 0; j < queries * A; j++) expected[out_row * A + j] = (float)result[j];
            free(result);
            if (backward) {
                AttentionCase context = {one, dout + out_row * A};
                Objective objective = {attention_objective, &context};
                float *grad = (float *)malloc(sizeof(float) * (size_t)n_part);
                numeric_gradient(grad, part, n_part, objective);
                for (int t = 0; t < length; t++) {
                    float *to = wanted + (row + t) * QKV;
                    memcpy(to, grad + t * A, sizeof(float) * (size_t)A);
                    memcpy(to + A, grad + length * A + t * KV, sizeof(float) * (size_t)KV);
                    memcpy(to + A + KV, grad + length * A + (length + t) * KV, sizeof(float) * (size_t)KV);
                }
                free(grad);
            }
            free(part);
        }
    }
    float *q = (float *)malloc(sizeof(float) * (size_t)s.B * (size_t)s.Tq * (size_t)QKV); // the rows that ask
    for (int b = 0; b < s.B; b++)
        memcpy(q + (size_t)b * s.Tq * QKV, x + ((size_t)b * s.Tk + skipped) * QKV,
               sizeof(float) * (size_t)s.Tq * (size_t)QKV);
    s.q_stride = QKV, s.kv_stride = QKV, s.starts = starts;
    attention_forward(out, lse, q, x + A, x + A + KV, s, stream);
    check_close(out, expected, n_out, tol, "out");
    if (backward) {
        attention_backward(dx, dx + A, dx + A + KV, dout, out, lse, q, x + A, x + A + KV, s, stream);
        check_close(dx, wanted, n, tol, "dqkv");
    }
    release(out, n_out, "out");
    release(lse, (int64_t)s.B * s.NH * s.Tq, "lse");
    release(dx, n, "dqkv");
    free(x);
    free(dout);
    free(expected);
    free(wanted);
    free(wide);
    free(starts);
    free(q);
    stream_destroy(stream);
}

static void test_attention_documents(void) {
    static const int few[] = {1, 3, 2, 7, 1, 1, 4, 9, 9}, blocks[] = {64, 1, 63, 70, 40, 200, 200};
    for (int precision = 0; precision < 2; precision++) {
        attention_documents_case((AttentionShape){2, 17, 17, 4, 2, 6, 0, 0, NULL, 0}, few, 1, (Precision)precision);
        attention_documents_case((AttentionShape){1, 150, 150, 1, 1, 2, 0, 0, NULL, 0}, blocks, 1,
                                 (Precision)precision);
        attention_documents_case((AttentionShape){2, 230, 230, 4, 2, 10, 0, 0, NULL, 0}, blocks, 0,
                                 (Precision)precision);
        attention_documents_case((AttentionShape){2, 5, 230, 2, 1, 8, 0, 0, NULL, 0}, blocks, 0, (Precision)precision);
    }
}

// Matrix products at odd sizes, all three directions, overwriting and adding, fp32 and bf16, weights cut into slices.
static void matmul_case(int N, int K, int M, Precision precision, int accumulate) {
    double tol = precision == PRECISION_FP32 ? 1e-6 : 6e-3; // bf16 keeps 8 bits of each input
    Stream *stream = test_stream(precision, 2);
    float *x = random_values((int64_t)N * K, 12, 1.0f), *w = random_values((int64_t)M * K, 13, 1.0f);
    float *dout = random_values((int64_t)N * M, 14, 1.0f), *out = guarded((int64_t)N * M);
    float *dx = guarded((int64_t)N * K), *dw = guarded((int64_t)M * K);
    int64_t largest = (int64_t)N * M;
    if ((int64_t)N * K > largest) largest = (int64_t)N * K;
    if ((int64_t)M * K > largest) largest = (int64_t)M * K;
    float *expected = (float *)calloc((size_t)largest, sizeof(float));
    for (int64_t i = 0; accumulate == 1 && i < (int64_t)N * M; i++) out[i] = 1.0f;
    for (int64_t i = 0; accumulate && i < (int64_t)M * K; i++) dw[i] = 2.0f;
    Weight weight = {w, NULL, 0};
    float *residual = (float *)malloc(sizeof(float) * (size_t)N * (size_t)M);
    for (int64_t i = 0; i < (int64_t)N * M; i++) residual[i] = 1.0f;
    matmul_forward(out, x, weight, N, K, M, accumulate == 2 ? residual : accumulate ? out : NULL, stream);
    free(residual);
    matmul_backward(dx, dw, dout, x, weight, N, K, M, accumulate, stream);
    check(stream_check(stream) == 0, "%s", error_message);
    for (int n = 0; n < N; n++) {
        for (int m = 0; m < M; m++) {
            double sum = accumulate > 0;
            for (int k = 0; k < K; k++) sum += (double)x[n * K + k] * (double)w[m * K + k];
            expected[n * M + m] = (float)sum;
        }
    }
    check_close(out, expected, (int64_t)N * M, tol, "out");
    for (int n = 0; n < N; n++) {
        for (int k = 0; k < K; k++) {
            double sum = 0.0;
            for (int m = 0; m < M; m++) sum += (double)dout[n * M + m] * (double)w[m * K + k];
            expected[n * K + k] = (float)sum;
        }
    }
    check_close(dx, expected, (int64_t)N * K, tol, "dx");
    for (int m = 0; m < M; m++) {
        for (int k = 0; k < K; k++) {
            double sum = accumulate > 0 ? 2.0 : 0.0;
            for (int n = 0; n < N; n++) sum += (double)dout[n * M + m] * (double)x[n * K + k];
            expected[m * K + k] = (float)sum;
        }
    }
    check_close(dw, expected, (int64_t)M * K, tol, "dweight");
    release(out, (int64_t)N * M, "out");
    release(dx, (int64_t)N * K, "dx");
    release(dw, (int64_t)M * K, "dweight");
    free(x);
    free(w);
    free(dout);
    free(expected);
    stream_destroy(stream);
}

static void test_matmul(void) {
    for (int accumulate = 0; accumulate < 3; accumulate++) {
        for (int p = 0; p <= device_has_bf16(); p++) {
            matmul_case(1, 1, 1, (Precision)p, accumulate);
            matmul_case(3, 5, 7, (Precision)p, accumulate);
            matmul_case(17, 33, 65, (Precision)p, accumulate);
            matmul_case(64, 128, 31, (Precision)p, accumulate);
        }
    }
}

// bf16 rounding: ties to even, NaN and infinity kept, and equal to the file's conversion.
static void test_bf16(void) {
    static const uint32_t cases[][2] = {
        {0x3F800000, 0x3F80}, {0x3F808000, 0x3F80}, {0x3F818000, 0x3F82}, {0x3F808001, 0x3F81}, {0x7F800000, 0x7F80},
        {0xFF800000, 0xFF80}, {0x7F7FFFFF, 0x7F80}, {0x7F800001, 0x7FC0}, {0x80000000, 0x8000}, {0x00000001, 0x0000}};
    Stream *stream = test_stream(PRECISION_FP32, 1);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        float value = float_of_bits(cases[i][0]);
        uint16_t rounded;
        bf16_round(&rounded, &value, 1, 1, 1, stream);
        check(rounded == cases[i][1], "%08x -> %04x, expected %04x", cases[i][0], rounded, cases[i][1]);
        check(bf16_of_float(value) == rounded, "%08x: the file's conversion differs", cases[i][0]);
    }
    static const uint32_t halves[][2] = {{0x3C00, 0x3F800000}, {0xC000, 0xC0000000}, {0x0001, 0x33800000},
                                         {0x03FF, 0x387FC000}, {0x7C00, 0x7F800000}, {0x8000, 0x80000000},
                                         {0x7BFF, 0x477FE000}};
    for (size_t i = 0; i < sizeof halves / sizeof *halves; i++) {
        float value = float_of_half((uint16_t)halves[i][0]);
        uint32_t bits;
        memcpy(&bits, &value, 4);
        check(bits == halves[i][1], "half %04x -> %08x, expected %08x", halves[i][0], bits, halves[i][1]);
    }
    check(isnan(float_of_half(0x7C01)), "half NaN");
    stream_destroy(stream);
}

// Cross-entropy: ignored targets, huge logits, V that straddles vectors; gradient by differences.
typedef struct {
    int N, V;
    const int32_t *targets;
} LossCase;

static double loss_objective(const double *input, const void *context) {
    const LossCase *k = (const LossCase *)context;
    double total = 0.0;
    for (int n = 0; n < k->N; n++) {
        double sum = 0.0;
        if (k->targets[n] < 0) continue;
        for (int v = 0; v < k->V; v++) sum += exp(input[n * k->V + v] - input[n * k->V + k->targets[n]]);
        total += log(sum);
    }
    return total;
}

static void test_cross_entropy(void) {
    static const struct {
        int N, V;
        float scale;
    } cases[] = {{1, 1, 1}, {4, 3, 1}, {5, 101, 2}, {3, 258, 20}};
    Stream *stream = test_stream(PRECISION_FP32, 2);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int N = cases[i].N, V = cases[i].V, n = N * V;
        int32_t targets[8];
        float *logits = random_values(n, 15, cases[i].scale), *work = guarded(n), *loss = guarded(N);
        float *expected = (float *)malloc(sizeof(float) * (size_t)n), sum = 0.0f, only_loss[8];
        double *wide = (double *)malloc(sizeof(double) * (size_t)n);
        for (int r = 0; r < N; r++) targets[r] = r == 1 ? -1 : (r * 37) % V;
        LossCase context = {N, V, targets};
        Objective objective = {loss_objective, &context};
        memcpy(work, logits, sizeof(float) * (size_t)n);
        cross_entropy(only_loss, work, targets, N, V, 0.0f, 0, stream);
        check(memcmp(work, logits, sizeof(float) * (size_t)n) == 0, "the loss alone changed the logits");
        cross_entropy(loss, work, targets, N, V, 0.25f, 1, stream);
        for (int j = 0; j < n; j++) wide[j] = (double)logits[j];
        for (int r = 0; r < N; r++) sum += loss[r];
        double truth = loss_objective(wide, &context);
        check(fabs((double)sum - truth) <= 2e-6 * fabs(truth) + 1e-7, "loss %g, %g", (double)sum, truth);
        check(memcmp(only_loss, loss, sizeof(float) * (size_t)N) == 0, "forward alone gives another loss");
        check(N < 2 || loss[1] == 0.0f, "an ignored target has loss %g", N < 2 ? 0.0 : (double)loss[1]);
        numeric_gradient(expected, logits, n, objective);
        for (int j = 0; j < n; j++) expected[j] *= 0.25f;
        if (V > 1) check_close(work, expected, n, 3e-6, "dlogits");
        release(work, n, "dlogits");
        release(loss, N, "loss");
        free(logits);
        free(expected);
        free(wide);
    }
    stream_destroy(stream);
}

// Embedding: repeated ids add up in order, whatever the thread count.
static void test_embedding(void) {
    enum { N = 37, C = 19, V = 11 };
    uint32_t tokens[N];
    float *weight = random_values(V * C, 16, 1.0f), *dout = random_values(N * C, 17, 1.0f), *out = guarded(N * C);
    float *first = guarded(V * C), *other = guarded(V * C), expected[V * C] = {0};
    for (int n = 0; n < N; n++) tokens[n] = (uint32_t)(n * n % V);
    for (int threads = 1; threads <= 3; threads++) {
        Stream *stream = test_stream(PRECISION_FP32, threads);
        float *to = threads == 1 ? first : other;
        for (int i = 0; i < V * C; i++) to[i] = 0.5f;
        embedding_forward(out, tokens, weight, N, C, stream);
        embedding_backward(to, dout, tokens, N, C, stream);
        if (threads > 1) check(memcmp(first, other, sizeof expected) == 0, "%d threads give other bits", threads);
        stream_destroy(stream);
    }
    for (int n = 0; n < N; n++) {
        check(memcmp(out + n * C, weight + tokens[n] * C, sizeof(float) * C) == 0, "row %d", n);
        for (int c = 0; c < C; c++) expected[tokens[n] * C + (uint32_t)c] += dout[n * C + c];
    }
    for (int i = 0; i < V * C; i++) first[i] -= 0.5f;
    check_close(first, expected, V * C, 1e-6, "dweight");
    release(out, N * C, "out");
    release(first, V * C, "dweight");
    release(other, V * C, "dweight");
    free(weight);
    free(dout);
}

// AdamW in float64 over several steps with decay and scaling; the norm against a plain sum, at sizes around its blocks.
static void test_adamw(void) {
    enum { N = 77, STEPS = 5 };
    float *param = random_values(N, 18, 1.0f), *m = guarded(N), *v = guarded(N), expected[N];
    double p64[N], m64[N] = {0}, v64[N] = {0};
    AdamW adam = {0.9f, 0.95f, 1e-8f};
    Stream *stream = test_stream(PRECISION_FP32, 2);
    for (int i = 0; i < N; i++) m[i] = v[i] = 0.0f, p64[i] = (double)param[i];
    for (int step = 1; step <= STEPS; step++) {
        float *grad = random_values(N, 20 + (uint32_t)step, 1.0f);
        adamw_update(param, grad, m, v, N, adam, 1e-2f, 0.1f, 0.5f, step, stream);
        for (int i = 0; i < N; i++) {
            double g = (double)grad[i] * 0.5;
            m64[i] = 0.9 * m64[i] + 0.1 * g;
            v64[i] = 0.95 * v64[i] + 0.05 * g * g;
            p64[i] -= 1e-2 * 0.1 * p64[i];
            p64[i] -= 1e-2 * (m64[i] / (1.0 - pow(0.9, step))) / (sqrt(v64[i] / (1.0 - pow(0.95, step))) + 1e-8);
        }
        free(grad);
    }
    for (int i = 0; i < N; i++) expected[i] = (float)p64[i];
    check_close(param, expected, N, 1e-6, "param");
    for (int i = 0; i < N; i++) expected[i] = (float)v64[i];
    check_close(v, expected, N, 1e-6, "v");
    release(m, N, "m");
    release(v, N, "v");
    free(param);
    static const int64_t sizes[] = {1, 32767, 32768, 32769, 300000};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        float *x = random_values(sizes[i], 26, 1.0f);
        double sum = 0.0;
        for (int64_t j = 0; j < sizes[i]; j++) sum += (double)x[j] * (double)x[j];
        double ours = sum_of_squares(x, sizes[i], stream);
        check(fabs(ours - sum) <= 1e-12 * sum, "sum of squares of %lld", (long long)sizes[i]);
        Stream *other = test_stream(PRECISION_FP32, 3);
        check(ours == sum_of_squares(x, sizes[i], other), "thread counts differ");
        stream_destroy(other);
        free(x);
    }
    stream_destroy(stream);
}

// Every op whose sums are ours gives the same bits with 1, 2, 3 and 5 threads.
static void threads_agree(Precision precision) {
    enum {
        B = 2,
        T = 70,
        N = B * T,
        C = 100,
        NH = 6,
        NKV = 2,
        HD = 10,
        QKV = (NH + 2 * NKV) * HD,
        A = NH * HD,
        V = 77
    };
    static const int threads[] = {1, 2, 3, 5};
    enum { TOTAL = N * QKV + N * A + N * C + C + N * V + N };
    AttentionShape shape = {B, T, T, NH, NKV, HD, QKV, QKV, NULL, 0};
    float *qkv = random_values(N * QKV, 40, 1.0f), *dout = random_values(N * A, 41, 1.0f), *lse = guarded(N * NH);
    float *x = random_values(N * C, 42, 1.0f), *grad = random_values(N * C, 43, 1.0f), *rstd = guarded(N);
    float *weight = random_values(C, 44, 1.0f), *logits = random_values(N * V, 45, 1.0f), *out = guarded(N * C);
    float *results[4];
    int32_t targets[N];
    for (int n = 0; n < N; n++) targets[n] = n % V;
    for (int i = 0; i < 4; i++) {
        Stream *stream = test_stream(precision, threads[i]);
        float *dqkv = results[i] = (float *)calloc(TOTAL, sizeof(float)), *att = dqkv + N * QKV, *dx = att + N * A;
        float *dweight = dx + N * C, *dlogits = dweight + C, *loss = dlogits + N * V;
        attention_forward(att, lse, qkv, qkv + A, qkv + A + NKV * HD, shape, stream);
        attention_backward(dqkv, dqkv + A, dqkv + A + NKV * HD, dout, att, lse, qkv, qkv + A, qkv + A + NKV * HD, shape,
                           stream);
        rmsnorm_forward(out, rstd, x, weight, N, C, 1e-5f, stream);
        rmsnorm_backward(dx, dweight, grad, x, weight, rstd, N, C, stream);
        memcpy(dlogits, logits, sizeof(float) * N * V);
        cross_entropy(loss, dlogits, targets, N, V, 0.1f, 1, stream);
        check(memcmp(results[0], results[i], sizeof(float) * TOTAL) == 0, "%d threads give other bits", threads[i]);
        stream_destroy(stream);
    }
    for (int i = 0; i < 4; i++) free(results[i]);
    release(lse, N * NH, "lse");
    release(rstd, N, "rstd");
    release(out, N * C, "out");
    free(qkv);
    free(dout);
    free(x);
    free(grad);
    free(weight);
    free(logits);
}

static void test_threads(void) {
    threads_agree(PRECISION_FP32);
    threads_agree(PRECISION_BF16);
}

static void test_learning_rate(void) {
    check(lr_at(LR_COSINE, 1.0f, 0.1f, 0, 10, 100) == 0.1f, "first warm-up step");
    check(lr_at(LR_COSINE, 1.0f, 0.1f, 9, 10, 100) == 1.0f, "last warm-up step");
    check(lr_at(LR_COSINE, 1.0f, 0.1f, 10, 10, 100) == 1.0f, "peak");
    check(fabsf(lr_at(LR_COSINE, 1.0f, 0.1f, 99, 10, 100) - 0.1f) < 1e-7f, "end of cosine");
    check(fabsf(lr_at(LR_COSINE, 1.0f, 0.0f, 50, 0, 101) - 0.5f) < 1e-6f, "middle of cosine");
    check(fabsf(lr_at(LR_LINEAR, 2.0f, 0.5f, 25, 0, 101) - 1.75f) < 1e-6f, "linear");
    check(lr_at(LR_CONSTANT, 2.0f, 0.5f, 77, 0, 100) == 2.0f, "constant");
    check(lr_at(LR_COSINE, 2.0f, 0.5f, 0, 0, 1) == 2.0f, "a run of one step");
}

// RoPE: inverse frequencies from public figures, tables and rotation against transformers' dump.
static void test_rope(void) {
    RopeConfig scaled = {500000.0f, 1, 32.0f, 1.0f, 4.0f, 8192}, plain = {10000.0f, 0, 0, 0, 0, 0};
    RopeConfig unscaled = {500000.0f, 0, 0, 0, 0, 0};
    static const struct {
        int i;
        float inv_freq;
    } golden[] = {{15, 1.290548e-3f}, {16, 4.295568e-4f}, {17, 9.708288e-5f}, {18, 1.946164e-5f}, {31, 9.418307e-8f}};
    SafeTensors dump;
    float inv_freq[32], expected[32];
    Stream *stream = test_stream(PRECISION_FP32, 2);
    rope_inv_freq(inv_freq, 64, &unscaled);
    check(fabsf(inv_freq[14] / 3.211446e-3f - 1.0f) < 1e-6f, "unscaled i14 %g", (double)inv_freq[14]);
    rope_inv_freq(inv_freq, 64, &scaled);
    for (size_t i = 0; i < sizeof golden / sizeof *golden; i++)
        check(fabsf(inv_freq[golden[i].i] / golden[i].inv_freq - 1.0f) < 2e-6f, "i%d is %g, not %g", golden[i].i,
              (double)inv_freq[golden[i].i], (double)golden[i].inv_freq);
    if (!check(safetensors_open(&dump, "data/fixtures/rope.dump") == 0, "%s", error_message)) return;
    const int32_t *positions = (const int32_t *)(const void *)safetensors_find(&dump, "positions")->data;
    for (int which = 0; which < 2; which++) {
        const char *prefix = which == 0 ? "scaled" : "plain";
        enum { T = 8192 };
        char name[64];
        float *cos_table = guarded((int64_t)T * 32), *sin_table = guarded((int64_t)T * 32);
        rope_inv_freq(inv_freq, 64, which == 0 ? &scaled : &plain);
        rope_tables(cos_table, sin_table, inv_freq, T, 64, stream);
        snprintf(name, sizeof name, "%s.inv_freq", prefix);
        safetensor_read(expected, safetensors_find(&dump, name), 0, 32);
        check_close(inv_freq, expected, 32, 1e-7, "inv_freq");
        for (int i = 0; i < 6; i++) {
            double tol = 1e-6 + 2e-7 * positions[i]; // the angle itself is a float
            snprintf(name, sizeof name, "%s.cos", prefix);
            safetensor_read(expected, safetensors_find(&dump, name), 32 * i, 32);
            check_close(cos_table + 32 * (int64_t)positions[i], expected, 32, tol, "cos");
            snprintf(name, sizeof name, "%s.sin", prefix);
            safetensor_read(expected, safetensors_find(&dump, name), 32 * i, 32);
            if (positions[i] > 0) check_close(sin_table + 32 * (int64_t)positions[i], expected, 32, tol, "sin");
        }
        release(cos_table, (int64_t)T * 32, "cos");
        release(sin_table, (int64_t)T * 32, "sin");
    }
    safetensors_close(&dump);
    // rotation: against complex multiplication in double, and backward undoes forward
    enum { N = 5, HEADS = 3, HD = 6, STRIDE = HEADS * HD + 2 };
    float cos_table[N * HD / 2], sin_table[N * HD / 2], *x = random_values(N * STRIDE, 30, 1.0f);
    float *y = guarded(N * STRIDE), turned[N * STRIDE];
    int32_t rows[N] = {4, 0, 3, 3, 1};
    rope_inv_freq(inv_freq, HD, &plain);
    rope_tables(cos_table, sin_table, inv_freq, N, HD, stream);
    memcpy(y, x, sizeof turned);
    memcpy(turned, x, sizeof turned);
    rope_forward(y, cos_table, sin_table, rows, N, HEADS, HD, STRIDE, stream);
    for (int n = 0; n < N; n++) {
        for (int h = 0; h < HEADS; h++) {
            for (int i = 0; i < HD / 2; i++) {
                int at = n * STRIDE + h * HD + i;
                double angle = rows[n] * pow(10000.0, -2.0 * i / HD);
                turned[at] = (float)((double)x[at] * cos(angle) - (double)x[at + HD / 2] * sin(angle));
                turned[at + HD / 2] = (float)((double)x[at + HD / 2] * cos(angle) + (double)x[at] * sin(angle));
            }
        }
    }
    check_close(y, turned, N * STRIDE, 1e-6, "rotation");
    rope_backward(y, cos_table, sin_table, rows, N, HEADS, HD, STRIDE, stream);
    check_close(y, x, N * STRIDE, 1e-6, "rotation back");
    release(y, N * STRIDE, "rope");
    free(x);
    stream_destroy(stream);
}

#endif // ops of the CPU

// Philox's published vectors, and permutations that are permutations.
static void test_rand(void) {
    static const struct {
        uint32_t counter[4], key[2], out[4];
    } known[] = {
        {{0, 0, 0, 0}, {0, 0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
        {{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff},
         {0xffffffff, 0xffffffff},
         {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
        {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
         {0xa4093822, 0x299f31d0},
         {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
    };
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        Philox counter;
        memcpy(counter.v, known[i].counter, sizeof counter.v);
        Philox out = philox(counter, known[i].key[0], known[i].key[1]);
        check(memcmp(out.v, known[i].out, sizeof out.v) == 0, "vector %zu: %08x %08x %08x %08x", i, out.v[0], out.v[1],
              out.v[2], out.v[3]);
    }
    static const uint64_t sizes[] = {1, 2, 3, 5, 16, 17, 1000};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        unsigned char seen[1000] = {0};
        int fixed_points = 0, same_as_next_epoch = 0;
        for (uint64_t j = 0; j < sizes[i]; j++) {
            uint64_t image = rand_permute(j, sizes[i], 5, RAND_SHUFFLE, 0);
            if (check(image < sizes[i] && !seen[image], "n %llu: not a permutation", (unsigned long long)sizes[i]))
                seen[image] = 1;
            fixed_points += image == j;
            same_as_next_epoch += image == rand_permute(j, sizes[i], 5, RAND_SHUFFLE, 1);
        }
        check(sizes[i] < 1000 || (fixed_points < 10 && same_as_next_epoch < 10), "the permutation is no shuffle");
    }
    double sum = 0.0, squares = 0.0;
    float *values = random_values(100000, 31, 1.0f);
    for (int i = 0; i < 100000; i++) sum += (double)values[i], squares += (double)values[i] * (double)values[i];
    check(fabs(sum / 1e5) < 0.02 && fabs(squares / 1e5 - 1.0) < 0.02, "normal: mean %g variance %g", sum / 1e5,
          squares / 1e5);
    free(values);
}

// ---------------------------------------------------------------------------------------------------------------------
// The model against PyTorch

typedef struct {
    Stage stage;
    SafeTensors dump;
    Batch batch;
    Stream *stream;
} Fixture;

static int fixture_open(Fixture *f, const char *name, int micro_batch, int recompute, Precision precision,
                        int threads) {
    char path[PATH_MAX];
    ModelFile file;
    memset(f, 0, sizeof *f);
    snprintf(path, sizeof path, "data/fixtures/%s.dump", name);
    if (!check(safetensors_open(&f->dump, path) == 0, "%s", error_message)) return -1;
    const SafeTensor *tokens = safetensors_find(&f->dump, "tokens"), *targets = safetensors_find(&f->dump, "targets");
    int B = (int)tokens->shape[0], T = (int)tokens->shape[1];
    batch_alloc(&f->batch, B, T);
    memcpy(f->batch.tokens, tokens->data, sizeof(int32_t) * (size_t)B * (size_t)T);
    memcpy(f->batch.targets, targets->data, sizeof(int32_t) * (size_t)B * (size_t)T);
    for (int n = 0; n < B * T; n++) f->batch.n_valid += f->batch.targets[n] >= 0;
    snprintf(path, sizeof path, "data/fixtures/%s", name);
    f->stream = test_stream(precision, threads);
    int result = model_file_open(&file, path) || stage_table(&f->stage, &file.config, 0, file.config.n_layers) ||
                 model_match(&f->stage, &file) || stage_plan(&f->stage, micro_batch, T, 1, recompute) ||
                 stage_alloc(&f->stage, f->stream) || model_load(&f->stage, &file, 1);
    model_file_close(&file);
    return check(result == 0, "%s", error_message) ? 0 : -1;
}

static void fixture_close(Fixture *f) {
    stage_free(&f->stage);
    safetensors_close(&f->dump);
    batch_free(&f->batch);
    stream_destroy(f->stream);
}

// Reads a float tensor of the dump; the caller frees it.
static float *dump_values(const SafeTensors *dump, const char *prefix, const char *name, int64_t *n) {
    char full[160];
    snprintf(full, sizeof full, "%s%s", prefix, name);
    const SafeTensor *tensor = safetensors_find(dump, full);
    if (!check(tensor != NULL, "%s is not in the dump", full)) exit(1);
    *n = safetensor_count(tensor);
    float *values = (float *)malloc(sizeof(float) * (size_t)*n);
    safetensor_read(values, tensor, 0, *n);
    return values;
}

static void check_arena(const Fixture *f, const float *arena, const char *prefix, double tol) {
    const float *values = seen(arena, f->stage.arena_floats, f->stream);
    for (int i = 0; i < f->stage.n_tensors; i++) {
        const Tensor *tensor = &f->stage.tensors[i];
        int64_t n;
        float *expected = dump_values(&f->dump, prefix, tensor->name, &n);
        if (check(n == tensor->n, "%s%s: %lld values", prefix, tensor->name, (long long)n))
            check_close(values + tensor->offset, expected, n, tol, tensor->name);
        free(expected);
    }
}

// to (n) = activations as floats.
static void copy_activations(float *to, const floatX *from, int n, Stream *stream) {
    const floatX *values = (const floatX *)seen_bytes(from, sizeof(floatX) * (size_t)n, stream);
    for (int i = 0; i < n; i++) to[i] = (float)values[i];
}

// Tolerances of fp32 products, or of a build whose activations are bf16.
static double model_tol(double fp32, double bf16) {
    return device_has_fp32() ? fp32 : bf16;
}

#define MODEL_PRECISION (device_has_fp32() ? PRECISION_FP32 : PRECISION_BF16)

// Logits, loss, every gradient and the parameters after ten AdamW steps.
static void test_model_against_pytorch(void) {
    static const char *const names[] = {"tied", "untied"};
    for (int i = 0; i < 2; i++) {
        Fixture f;
        int64_t n;
        double loss;
        if (fixture_open(&f, names[i], 64, 0, MODEL_PRECISION, 2)) return;
        int V = f.stage.config.vocab, N = f.batch.b * f.batch.T;
        float *logits = dump_values(&f.dump, "", "logits", &n);
        stage_round(&f.stage, f.stream);
        stage_forward(&f.stage, 0, f.batch.tokens, NULL, f.batch.b, f.batch.T, NULL, NULL, f.stream);
        floatX *product = (floatX *)device_alloc(sizeof(floatX) * (size_t)n);
        matmul_forward(product, f.stage.normed, stage_weight(&f.stage, f.stage.p.head), N, f.stage.config.channels, V,
                       NULL, f.stream);
        float *ours = guarded(n);
        copy_activations(ours, product, (int)n, f.stream);
        check_close(ours, logits, n, model_tol(2e-6, 2e-2), "logits");
        device_free(product);
        release(ours, n, "logits");
        free(logits);
        float *expected = dump_values(&f.dump, "", "loss", &n);
        check(stage_gradients(&f.stage, &f.batch, 64, &loss, NULL, NULL, f.stream) == 0, "%s", error_message);
        check(fabs(loss - (double)expected[0]) <= model_tol(1e-6, 2e-3) * (double)expected[0],
              "loss %.8f, PyTorch %.8f", loss, (double)expected[0]);
        free(expected);
        check_arena(&f, f.stage.grads, "grad.", model_tol(5e-6, 6e-2));
        expected = dump_values(&f.dump, "", "losses", &n);
        for (int64_t step = 0; step < n; step++) {
            AdamW adam = {0.9f, 0.95f, 1e-8f};
            stage_gradients(&f.stage, &f.batch, 64, &loss, NULL, NULL, f.stream);
            check(fabs(loss - (double)expected[step]) <= model_tol(1e-4, 2e-2) * (double)expected[step],
                  "loss of step %lld: %.8f, %.8f", (long long)step, loss, (double)expected[step]);
            stage_update(&f.stage, adam, 3e-3f, 0.1f, stage_grad_norm(&f.stage, f.stream), 1.0f, step + 1, f.stream);
        }
        free(expected);
        check_arena(&f, f.stage.params, "after.", model_tol(1e-4, 2e-2));
        fixture_close(&f);
    }
}

// Recomputing and other thread counts give the same bits; accumulating micro-batches and bf16 products stay close. (For
// threads oneDNN decides: at larger shapes or more threads than here it may split a product's inner dimension.)
static void test_model_variants(void) {
    static const char *const names[] = {"tied", "untied"};
    for (int i = 0; i < 2; i++) {
        Fixture plain, other;
        double loss, other_loss;
        if (fixture_open(&plain, names[i], 64, 0, MODEL_PRECISION, 2)) return;
        int64_t n = plain.stage.arena_floats;
        stage_gradients(&plain.stage, &plain.batch, 64, &loss, NULL, NULL, plain.stream);
        if (fixture_open(&other, names[i], 64, 1, MODEL_PRECISION, 2)) return;
        stage_gradients(&other.stage, &other.batch, 64, &other_loss, NULL, NULL, other.stream);
        const float *grads = seen(plain.stage.grads, n, plain.stream);
        check(loss == other_loss && memcmp(grads, seen(other.stage.grads, n, other.stream), (size_t)n * 4) == 0,
              "--recompute changes the bits");
        check(other.stage.acts_bytes < plain.stage.acts_bytes, "--recompute saves nothing");
        fixture_close(&other);
        if (fixture_open(&other, names[i], 1, 0, MODEL_PRECISION, 2)) return;
        for (int twice = 0; twice < 2; twice++) // the second time over old gradients, which must not be added to
            stage_gradients(&other.stage, &other.batch, 1, &other_loss, NULL, NULL, other.stream);
        check(fabs(loss - other_loss) <= model_tol(1e-6, 1e-3) * loss, "micro-batches of 1: loss %g, %g", other_loss,
              loss);
        check_close(seen(other.stage.grads, n, other.stream), grads, n, model_tol(2e-6, 2e-2), "micro-batches of 1");
        fixture_close(&other);
        if (fixture_open(&other, names[i], 64, 0, MODEL_PRECISION, 3)) return;
        stage_gradients(&other.stage, &other.batch, 64, &other_loss, NULL, NULL, other.stream);
        check(loss == other_loss && memcmp(grads, seen(other.stage.grads, n, other.stream), (size_t)n * 4) == 0,
              "3 threads give other bits");
        fixture_close(&other);
        if (device_has_bf16() && device_has_fp32()) {
            if (fixture_open(&other, names[i], 64, 0, PRECISION_BF16, 2)) return;
            stage_gradients(&other.stage, &other.batch, 64, &other_loss, NULL, NULL, other.stream);
            check(fabs(loss - other_loss) <= 5e-3 * loss, "bf16: loss %g, %g", other_loss, loss);
            for (int t = 0; t < plain.stage.n_tensors; t++) {
                const Tensor *tensor = &plain.stage.tensors[t];
                check_close(other.stage.grads + tensor->offset, plain.stage.grads + tensor->offset, tensor->n, 5e-2,
                            tensor->name);
            }
            check(memcmp(other.stage.grads, plain.stage.grads, sizeof(float) * (size_t)n) != 0, "bf16 was not used");
            fixture_close(&other);
        }
        fixture_close(&plain);
    }
}

// One run of gradients of a fixture; the caller frees the copy.
static float *variant_gradients(const char *name, int micro_batch, int recompute, Precision precision, int masked_row,
                                double *loss, int64_t *n) {
    Fixture f;
    if (fixture_open(&f, name, micro_batch, recompute, precision, 2)) exit(1);
    for (int t = 0; masked_row >= 0 && t < f.batch.T; t++) {
        f.batch.n_valid -= f.batch.targets[masked_row * f.batch.T + t] >= 0;
        f.batch.targets[masked_row * f.batch.T + t] = -1;
    }
    stage_gradients(&f.stage, &f.batch, micro_batch, loss, NULL, NULL, f.stream);
    *n = f.stage.arena_floats;
    float *copy = (float *)malloc(sizeof(float) * (size_t)*n);
    memcpy(copy, seen(f.stage.grads, *n, f.stream), sizeof(float) * (size_t)*n);
    fixture_close(&f);
    return copy;
}

// Three sequences in micro-batches of 2 (a short last one), with recompute, in both precisions; and a micro-batch all
// of whose targets are masked among others.
static void test_micro_batches(void) {
    double loss, other_loss;
    int64_t n;
    for (int p = !device_has_fp32(); p <= device_has_bf16(); p++) {
        double tol = p == PRECISION_FP32 ? 2e-6 : 1e-6;
        float *whole = variant_gradients("tied", 3, 0, (Precision)p, -1, &loss, &n);
        float *pieces = variant_gradients("tied", 2, 0, (Precision)p, -1, &other_loss, &n);
        float *again = variant_gradients("tied", 2, 1, (Precision)p, -1, &other_loss, &n);
        check_close(pieces, whole, n, p == PRECISION_FP32 ? tol : 2e-2, "micro-batches 2 + 1");
        check(memcmp(pieces, again, sizeof(float) * (size_t)n) == 0, "--recompute with accumulation, precision %d", p);
        free(whole);
        free(pieces);
        free(again);
        whole = variant_gradients("tied", 3, 0, (Precision)p, 1, &loss, &n);
        pieces = variant_gradients("tied", 1, 0, (Precision)p, 1, &other_loss, &n);
        check(fabs(loss - other_loss) <= 1e-3 * loss, "a masked micro-batch: loss %g, %g", other_loss, loss);
        check_close(pieces, whole, n, p == PRECISION_FP32 ? tol : 2e-2, "a masked micro-batch");
        free(whole);
        free(pieces);
    }
}

// A batch without a single target gives zero loss and zero gradient, never NaN; an ignored target does not matter.
static void test_model_masked(void) {
    Fixture f;
    double loss, sum = 0.0;
    if (fixture_open(&f, "untied", 64, 0, MODEL_PRECISION, 2)) return;
    for (int i = 0; i < f.batch.b * f.batch.T; i++) f.batch.targets[i] = -1;
    f.batch.n_valid = 0;
    stage_gradients(&f.stage, &f.batch, 1, &loss, NULL, NULL, f.stream);
    const float *grads = seen(f.stage.grads, f.stage.arena_floats, f.stream);
    for (int64_t i = 0; i < f.stage.arena_floats; i++) sum += fabs((double)grads[i]);
    check(loss == 0.0 && sum == 0.0, "all masked: loss %g, gradient sum %g", loss, sum);
    fixture_close(&f);
}

// The head's inputs of one sequence of T tokens, grown piece by piece in a cache, equal those of the whole forward.
static void check_cached_forward(Fixture *f, int T, const int *pieces, int n_pieces, double tol, const char *name) {
    int C = f->stage.config.channels, done = 0;
    float *whole = guarded(T * C), *grown = guarded(T * C);
    KvCache cache;
    if (!check(kv_cache_alloc(&cache, &f->stage.config, T) == 0, "no memory for a cache")) exit(1);
    model_round(&f->stage, f->stream);
    model_forward(&f->stage, f->batch.tokens, NULL, 1, T, NULL, NULL, NULL, f->stream);
    copy_activations(whole, f->stage.normed, T * C, f->stream);
    for (int p = 0; p < n_pieces; p++) {
        model_forward(&f->stage, f->batch.tokens + done, NULL, 1, pieces[p], &cache, NULL, NULL, f->stream);
        copy_activations(grown + done * C, f->stage.normed, pieces[p] * C, f->stream);
        done += pieces[p];
    }
    check(done == T && cache.used == T, "the pieces do not add up");
    check_close(grown, whole, (int64_t)T * C, tol, name);
    release(grown, T * C, "cached");
    release(whole, T * C, "whole");
    device_free(cache.rows);
}

static void test_kv_cache(void) {
    static const char *const names[] = {"tied", "untied"};
    static const int pieces[] = {1, 5, 1, 1, 12, 1, 8};
    for (int i = 0; i < 2; i++) {
        Fixture f;
        if (fixture_open(&f, names[i], 1, 0, MODEL_PRECISION, 2)) return;
        check_cached_forward(&f, 29, pieces, 7, model_tol(2e-6, 2e-2), "cached");
        fixture_close(&f);
    }
}

static void test_sampling(void) {
    float logits[5] = {0.0f, 3.0f, 1.0f, 2.9f, -4.0f};
    Candidate work[5];
    int count[5] = {0};
    check(sample_token(logits, 5, 0.0f, 1.0f, 0.99f, work) == 1, "temperature 0 is the likeliest");
    check(sample_token(logits, 5, 1.0f, 0.01f, 0.99f, work) == 1, "a tiny top-p is the likeliest");
    logits[2] = NAN;
    check_error(sample_token(logits, 5, 1.0f, 1.0f, 0.5f, work) == -1, "not finite", "a NaN logit");
    check_error(sample_token(logits, 5, 0.0f, 1.0f, 0.5f, work) == -1, "not finite", "a NaN logit");
    logits[2] = 1.0f;
    for (int i = 0; i < 10000; i++) count[sample_token(logits, 5, 1.0f, 1.0f, (float)i / 10000.0f, work)]++;
    double total = exp(-3.0) + 1.0 + exp(-2.0) + exp(-0.1) + exp(-7.0);
    check(abs(count[1] - (int)(10000.0 / total)) <= 2, "frequency %d", count[1]);
    check(abs(count[3] - (int)(10000.0 * exp(-0.1) / total)) <= 2, "frequency %d", count[3]);
    for (int i = 0; i < 1000; i++) {
        int id = sample_token(logits, 5, 1.0f, 0.9f, (float)i / 1000.0f, work);
        check(id == 1 || id == 3 || id == 2, "top-p 0.9 gave %d", id);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Files

static void write_file(const char *path, const void *data, size_t n) {
    FILE *file = fopen(path, "wb");
    if (file == NULL || fwrite(data, 1, n, file) != n || fclose(file) != 0) {
        perror(path);
        exit(1);
    }
}

static const char *scratch_path(const char *name) {
    static char path[4][2 * PATH_MAX];
    static int turn;
    turn = (turn + 1) % 4;
    snprintf(path[turn], sizeof path[turn], "%s/%s", test_folder, name);
    return path[turn];
}

// A safetensors file with this header text and n bytes of data; header_size -1: the text's length.
static const char *write_safetensors(const char *header, int64_t header_size, size_t n_data) {
    const char *path = scratch_path("case.safetensors");
    size_t length = strlen(header), total = 8 + length + n_data;
    unsigned char *bytes = (unsigned char *)calloc(total, 1);
    uint64_t size = header_size < 0 ? length : (uint64_t)header_size;
    for (int i = 0; i < 8; i++) bytes[i] = (unsigned char)(size >> (8 * i));
    memcpy(bytes + 8, header, length);
    write_file(path, bytes, total);
    free(bytes);
    return path;
}

// Every malformed file is refused in one line that names it; every unusual but valid one is taken.
static void test_safetensors(void) {
    static const struct {
        const char *header;
        int64_t header_size;
        size_t n_data;
        const char *message; // NULL: valid
    } cases[] = {
        {"{}", -1, 0, NULL},
        {"{\"__metadata__\":{}}   ", -1, 0, NULL},
        {"{\"x\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[0,4]}}", -1, 4, NULL},
        {"{\"x\":{\"dtype\":\"F32\",\"shape\":[0,5],\"data_offsets\":[0,0]}}", -1, 0, NULL},
        {"{\"b\":{\"dtype\":\"F16\",\"shape\":[2],\"data_offsets\":[4,8]},"
         "\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}",
         -1, 8, NULL},
        {"{\"x\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}", -1, 3, "cut short"},
        {"{\"x\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}", -1, 5, "belong to no tensor"},
        {"{}", 3, 0, "header of 3 bytes"},
        {"{}", 100000001, 0, "header of 100000001"},
        {"{}", INT64_MAX, 0, "header of 9223372036854775807"},
        {"[]", -1, 0, "not a JSON object"},
        {"\xEF\xBB\xBF{}", -1, 0, "not a JSON object"},
        {" {}", -1, 0, "not a JSON object"},
        {"{} {}", -1, 0, "end of file expected"},
        {"{\"x\":", -1, 0, "header:"},
        {"{\"x\":1}", -1, 0, "not an object"},
        {"{\"x\":{\"dtype\":\"f32\",\"shape\":[1],\"data_offsets\":[0,4]}}", -1, 4, "unknown dtype 'f32'"},
        {"{\"x\":{\"dtype\":\"Q4\",\"shape\":[1],\"data_offsets\":[0,4]}}", -1, 4, "unknown dtype 'Q4'"},
        {"{\"x\":{\"shape\":[1],\"data_offsets\":[0,4]}}", -1, 4, "unknown dtype '(none)'"},
        {"{\"x\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,4]}}", -1, 4, "x: the shape needs 8 bytes"},
        {"{\"x\":{\"dtype\":\"F32\",\"shape\":[-1],\"data_offsets\":[0,4]}}", -1, 4, "not a whole number"},
        {"{\"x\":{\"dtype\":\"F32\",\"shape\":[1.0],\"data_offsets\":[0,4]}}", -1, 4, "not a whole number"},
        {"{\"x\":{\"dtype\":\"F32\",\"shape\":[4611686018427387904,4],\"data_offsets\":[0,4]}}", -1, 4, "overflows"},
        {"{\"x\":{\"dtype\":\"F32\",\"shape\":[99999999999999999999],\"data_offsets\":[0,4]}}", -1, 4, "too big"},
        {"{\"x\":{\"dtype\":\"F32\",\"shape\":[1,1,1,1,1,1,1,1,1],\"data_offsets\":[0,4]}}", -1, 4, "at most 8"},
        {"{\"x\":{\"dtype\":\"F32\",\"shape\":1,\"data_offsets\":[0,4]}}", -1, 4, "at most 8"},
        {"{\"x\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,0]}}", -1, 4, "before begin"},
        {"{\"x\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0]}}", -1, 4, "not a pair"},
        {"{\"x\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0.5,4]}}", -1, 4, "not whole"},
        {"{\"x\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[-4,0]}}", -1, 4, "not whole"},
        {"{\"x\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,8]}}", -1, 8, "a hole"},
        {"{\"x\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]},"
         "\"y\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[2,6]}}",
         -1, 6, "inside"},
        {"{\"x\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]},"
         "\"\\u0078\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,8]}}",
         -1, 8, "duplicate"},
        {"{\"__metadata__\":{\"a\":1}}", -1, 0, "not a string"},
        {"{\"__metadata__\":[]}", -1, 0, "not an object"},
    };
    SafeTensors file;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const char *path = write_safetensors(cases[i].header, cases[i].header_size, cases[i].n_data);
        int result = safetensors_open(&file, path);
        if (cases[i].message == NULL) {
            check(result == 0, "valid case %zu: %s", i, error_message);
        } else if (check_error(result, cases[i].message, cases[i].header)) {
            check(strstr(error_message, "case.safetensors") != NULL, "'%s' does not name the file", error_message);
        }
        if (result == 0) safetensors_close(&file);
    }
    check_error(safetensors_open(&file, write_safetensors("{\"a\\n\\u001b[31mb\":1}", -1, 0)), "a??[31mb",
                "control characters in a name");
    char *deep = (char *)malloc(200001);
    memset(deep, '[', 200000);
    memcpy(deep, "{\"x\":", 5);
    deep[200000] = '\0';
    check_error(safetensors_open(&file, write_safetensors(deep, -1, 0)), "depth", "deep nesting");
    free(deep);
    write_file(scratch_path("short"), "abc", 3);
    check_error(safetensors_open(&file, scratch_path("short")), "not a safetensors file", "3 bytes");
    write_file(scratch_path("empty"), "", 0);
    check_error(safetensors_open(&file, scratch_path("empty")), "not a safetensors file", "an empty file");
    check_error(safetensors_open(&file, scratch_path("nothing-here")), "No such file", "a missing file");
    check_error(safetensors_open(&file, test_folder), "not a regular file", "a folder");
}

// Opens `path` as a model and compares every weight with the fixture's.
static void check_same_weights(const char *path, const Stage *expected, double tol, const char *what) {
    ModelFile file;
    Stage stage;
    Stream *stream = test_stream(PRECISION_FP32, 1);
    if (!check(model_file_open(&file, path) == 0, "%s: %s", what, error_message)) return;
    int result = stage_table(&stage, &file.config, 0, file.config.n_layers) || model_match(&stage, &file) ||
                 stage_plan(&stage, 1, 1, 0, 0) || stage_alloc(&stage, stream) || model_load(&stage, &file, 1);
    if (check(result == 0, "%s: %s", what, error_message)) {
        check(memcmp(&stage.config, &expected->config, sizeof(Config)) == 0, "%s: the config differs", what);
        const float *ours = seen(stage.params, stage.arena_floats, stream);
        const float *theirs = seen(expected->params, stage.arena_floats, stream);
        if (tol == 0.0)
            check(memcmp(ours, theirs, sizeof(float) * (size_t)stage.arena_floats) == 0, "%s: weights differ", what);
        else
            check_close(ours, theirs, stage.arena_floats, tol, what);
    }
    stage_free(&stage);
    stream_destroy(stream);
    model_file_close(&file);
}

// Writes config.json of a fixture into a folder, with one text replaced (NULL: as it is).
static void write_config(const char *folder, const char *fixture, const char *from, const char *to) {
    char path[PATH_MAX];
    FileMap map;
    snprintf(path, sizeof path, "data/fixtures/%s/config.json", fixture);
    if (file_map(&map, path)) exit(1);
    char *text = (char *)calloc(map.size + 4096, 1);
    memcpy(text, map.data, map.size);
    char *at = from != NULL ? strstr(text, from) : NULL;
    if (from != NULL && !check(at != NULL, "%s is not in %s", from, path)) exit(1);
    if (at != NULL) {
        size_t tail = strlen(at + strlen(from)) + 1;
        memmove(at + strlen(to), at + strlen(from), tail);
        memcpy(at, to, strlen(to));
    }
    file_make_folders(folder);
    snprintf(path, sizeof path, "%s/config.json", folder);
    write_file(path, text, strlen(text));
    file_unmap(&map);
    free(text);
}

// Writes the fixture's weights as two shards with an index; F16 tests widening.
static void write_shards(const char *folder, const Stage *stage, const char *second_name) {
    char path[PATH_MAX], index[65536] = "{\"metadata\":{},\"weight_map\":{";
    for (int s = 0; s < 2; s++) {
        SafeTensorsWriter writer;
        int first = s == 0 ? 0 : stage->n_tensors / 2, last = s == 0 ? stage->n_tensors / 2 : stage->n_tensors;
        const char *name = s == 0 ? "model-00001-of-00002.safetensors" : second_name;
        safetensors_writer_init(&writer, NULL);
        for (int i = first; i < last; i++) {
            size_t n = strlen(index);
            safetensors_declare(&writer, stage->tensors[i].name, DTYPE_F32, stage->tensors[i].shape,
                                stage->tensors[i].n_dims);
            snprintf(index + n, sizeof index - n, "%s\"%s\":\"%s\"", i > 0 ? "," : "", stage->tensors[i].name, name);
        }
        snprintf(path, sizeof path, "%s/%s", folder, s == 0 ? name : "model-00002-of-00002.safetensors");
        safetensors_begin(&writer, path);
        for (int i = first; i < last; i++)
            stage_append(stage, &writer, stage_values(stage, ARENA_PARAMS, &stage->tensors[i]), stage->tensors[i].n,
                         DTYPE_F32);
        file_writer_close(&writer.file);
    }
    strcat(index, "}}");
    snprintf(path, sizeof path, "%s/model.safetensors.index.json", folder);
    write_file(path, index, strlen(index));
}

static int open_and_match(const char *path) {
    ModelFile file;
    Stage stage;
    if (model_file_open(&file, path)) return -1;
    int result = stage_table(&stage, &file.config, 0, file.config.n_layers) || model_match(&stage, &file) ? -1 : 0;
    stage_free(&stage);
    model_file_close(&file);
    return result;
}

// A tied model whose file has a head all the same, all in F16, and an inv_freq of older checkpoints: taken, equal to
// F16.
static void check_odd_files(void) {
    Fixture f;
    char folder[PATH_MAX], path[PATH_MAX + 32];
    SafeTensorsWriter writer;
    int64_t four = 4;
    if (fixture_open(&f, "tied", 1, 0, PRECISION_FP32, 1)) return;
    snprintf(folder, sizeof folder, "%s", scratch_path("odd"));
    write_config(folder, "tied", NULL, NULL);
    safetensors_writer_init(&writer, NULL);
    for (int i = 0; i < f.stage.n_tensors; i++)
        safetensors_declare(&writer, f.stage.tensors[i].name, DTYPE_F16, f.stage.tensors[i].shape,
                            f.stage.tensors[i].n_dims);
    safetensors_declare(&writer, "lm_head.weight", DTYPE_F16, f.stage.tensors[0].shape, 2);
    safetensors_declare(&writer, "model.layers.0.self_attn.rotary_emb.inv_freq", DTYPE_F32, &four, 1);
    snprintf(path, sizeof path, "%s/model.safetensors", folder);
    safetensors_begin(&writer, path);
    for (int i = 0; i <= f.stage.n_tensors; i++) {
        const Tensor *tensor = &f.stage.tensors[i < f.stage.n_tensors ? i : 0];
        float *values = f.stage.params + tensor->offset;
        for (int64_t j = 0; j < tensor->n; j++) {
            _Float16 half = (_Float16)values[j];
            file_write(&writer.file, &half, 2);
            values[j] = (float)half;
        }
    }
    file_write(&writer.file, f.stage.params, 16);
    check(file_writer_close(&writer.file) == 0, "%s", error_message);
    check_same_weights(folder, &f.stage, 0.0, "F16, with a head beside the tied embedding");
    file_remove_folder(folder);
    fixture_close(&f);
}

// Native files, folders, shards, both precisions: what is written comes back; what does not fit is refused by name.
static void test_model_files(void) {
    static const char *const names[] = {"tied", "untied"};
    char folder[PATH_MAX];
    for (int i = 0; i < 2; i++) {
        Fixture f;
        if (fixture_open(&f, names[i], 1, 0, PRECISION_FP32, 1)) return;
        json_t *side = json_pack("{s:s}", "tokenizer.json", "{\"model\": \"\\u00e9\"}");
        check(model_save_native(&f.stage, ARENA_PARAMS, side, scratch_path("m.bin"), DTYPE_F32) == 0, "%s",
              error_message);
        check_same_weights(scratch_path("m.bin"), &f.stage, 0.0, "native fp32");
        check(model_save_native(&f.stage, ARENA_PARAMS, side, scratch_path("h.bin"), DTYPE_BF16) == 0, "%s",
              error_message);
        check_same_weights(scratch_path("h.bin"), &f.stage, 3e-3, "native bf16");
        check(model_save_folder(&f.stage, side, scratch_path("hf"), DTYPE_F32) == 0, "%s", error_message);
        check_same_weights(scratch_path("hf"), &f.stage, 0.0, "folder");
        json_decref(side);
        ModelFile file;
        if (check(model_file_open(&file, scratch_path("hf")) == 0, "%s", error_message)) {
            const char *text = json_string_value(json_object_get(file.side_files, "tokenizer.json"));
            check(text != NULL && strcmp(text, "{\"model\": \"\\u00e9\"}") == 0, "the tokenizer did not come along");
            model_file_close(&file);
        }
        snprintf(folder, sizeof folder, "%s", scratch_path("shards"));
        write_config(folder, names[i], NULL, NULL);
        write_shards(folder, &f.stage, "model-00002-of-00002.safetensors");
        check_same_weights(folder, &f.stage, 0.0, "shards");
        unlink(scratch_path("shards/model-00002-of-00002.safetensors"));
        check_error(open_and_match(folder), "shard model-00002-of-00002.safetensors is missing", "a missing shard");
        write_shards(folder, &f.stage, "../model-00002-of-00002.safetensors");
        check_error(open_and_match(folder), "not a plain file name", "a shard outside the folder");
        write_shards(folder, &f.stage, "model-00001-of-00002.safetensors");
        check_error(open_and_match(folder), "is not in shard", "an index that names the wrong shard");
        write_shards(folder, &f.stage, "model-00002-of-00002.safetensors");
        check(truncate(scratch_path("shards/model-00002-of-00002.safetensors"), 5000) == 0, "truncate");
        check_error(open_and_match(folder), "model-00002-of-00002.safetensors: ", "a truncated shard");
        write_shards(folder, &f.stage, "model-00002-of-00002.safetensors");
        rename(scratch_path("shards/model-00001-of-00002.safetensors"),
               scratch_path("shards/model-00002-of-00002.safetensors"));
        check(symlink("model-00002-of-00002.safetensors", scratch_path("shards/model-00001-of-00002.safetensors")) == 0,
              "symlink");
        check_error(open_and_match(folder), "is in another shard too", "the same tensors in two shards");
        file_remove_folder(folder);
        float keep = f.stage.params[5];
        f.stage.params[5] = NAN;
        json_t *none = json_object();
        model_save_native(&f.stage, ARENA_PARAMS, none, scratch_path("nan.bin"), DTYPE_F32);
        json_decref(none);
        f.stage.params[5] = keep;
        if (check(model_file_open(&file, scratch_path("nan.bin")) == 0, "%s", error_message)) {
            check_error(model_load(&f.stage, &file, 1), "model.embed_tokens.weight: element 5", "--check-weights");
            model_file_close(&file);
        }
        fixture_close(&f);
    }
    check_odd_files();
    // F16 weights are widened
    {
        SafeTensor tensor;
        float values[3] = {0};
        static const uint16_t halves[3] = {0x3C00, 0xC000, 0x3555};
        memset(&tensor, 0, sizeof tensor);
        tensor.name = "x", tensor.dtype = DTYPE_F16, tensor.data = (const uint8_t *)halves;
        check(safetensor_read(values, &tensor, 0, 3) == 0 && values[0] == 1.0f && values[1] == -2.0f &&
                  fabsf(values[2] - 0.33325f) < 1e-4f,
              "F16 gives %g %g %g", (double)values[0], (double)values[1], (double)values[2]);
        tensor.dtype = DTYPE_I64;
        check_error(safetensor_read(values, &tensor, 0, 1), "dtype I64", "integers as weights");
    }
    static const struct {
        const char *from, *to, *message;
    } bad[] = {
        {"\"hidden_size\": 42", "\"hidden_size\": 43", "has shape [101,42], the config asks for [101,43]"},
        {"\"num_hidden_layers\": 2", "\"num_hidden_layers\": 3",
         "tensor model.layers.2.input_layernorm.weight is missing"},
        {"\"num_hidden_layers\": 2", "\"num_hidden_layers\": 1", "is not part of a Llama of this config"},
        {"\"num_hidden_layers\": 2", "\"num_hidden_layers\": 0", "num_hidden_layers is 0"},
        {"\"num_hidden_layers\": 2", "\"num_hidden_layers\": 1e9", "not a whole number"},
        {"\"num_hidden_layers\": 2", "\"num_hidden_layers\": 2000000000", "num_hidden_layers is 2000000000"},
        {"\"hidden_size\": 42", "\"hidden_size\": 99999999999999999999", "too big"},
        {"\"num_key_value_heads\": 3", "\"num_key_value_heads\": 4", "not a multiple"},
        {"\"head_dim\": 10", "\"head_dim\": 7", "is odd"},
        {"\"model_type\": \"llama\"", "\"model_type\": \"gpt2\"", "model_type 'gpt2'"},
        {"\"hidden_act\": \"silu\"", "\"hidden_act\": \"gelu\"", "hidden_act 'gelu'"},
        {"\"attention_bias\": false", "\"attention_bias\": true", "attention_bias"},
        {"\"mlp_bias\": false", "\"mlp_bias\": true", "mlp_bias"},
        {"\"rope_type\": \"default\"", "\"rope_type\": \"yarn\"", "RoPE type 'yarn'"},
        {"\"rope_type\": \"default\"", "\"factor\": 4.0", "without a rope_type"},
        {"\"initializer_range\": 0.02", "\"initializer_range\": 0", "initializer_range 0"},
        {"\"initializer_range\": 0.02", "\"initializer_range\": -1", "initializer_range -1"},
        {"\"vocab_size\": 101", "\"vocab_size\": \"x\"", "vocab_size is not a whole number"},
        {"\"vocab_size\": 101", "\"vocab_size\": 2, \"vocab_size\": 101", "duplicate"},
        {"\"model_type\"", "\"model_type", "config.json: line"},
    };
    snprintf(folder, sizeof folder, "%s", scratch_path("bad"));
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        char target[PATH_MAX + 32], source[PATH_MAX];
        write_config(folder, "untied", bad[i].from, bad[i].to);
        snprintf(target, sizeof target, "%s/model.safetensors", folder);
        unlink(target);
        if (realpath("data/fixtures/untied/model.safetensors", source) == NULL || symlink(source, target) != 0) exit(1);
        check_error(open_and_match(folder), bad[i].message, bad[i].to);
    }
    file_remove_folder(folder);
    check_error(open_and_match(scratch_path("no-such")), "no such model", "a missing model");
    check_error(open_and_match(test_folder), "neither", "a folder without a model");
    check_error(open_and_match(write_safetensors("{}", -1, 0)), "no model config", "a safetensors file without config");
}

// config.json in both spellings of RoPE, presets with published parameter counts, specs.
static void test_config(void) {
    static const struct {
        const char *preset;
        int64_t params;
    } published[] = {{"llama-3.2-1b", 1235814400},  {"llama-3.2-3b", 3212749824}, {"llama-3-8b", 8030261248},
                     {"smollm2-135m", 134515008},   {"smollm2-360m", 361821120},  {"smollm2-1.7b", 1711376384},
                     {"tinyllama-1.1b", 1100048384}};
    Config config, again;
    for (size_t i = 0; i < sizeof published / sizeof *published; i++) {
        Stage stage;
        memset(&stage, 0, sizeof stage);
        if (!check(config_from_spec(&config, published[i].preset) == 0, "%s", error_message)) continue;
        check(config_n_params(&config) == published[i].params, "%s has %lld", published[i].preset,
              (long long)config_n_params(&config));
        check(stage_table(&stage, &config, 0, config.n_layers) == 0 && stage.n_params == published[i].params,
              "the table has %lld", (long long)stage.n_params);
        stage_free(&stage);
        json_t *json = config_to_json(&config, "float32");
        check(config_from_json(&again, json, "round trip") == 0, "%s", error_message);
        check(memcmp(&config, &again, sizeof config) == 0, "%s: the round trip differs", published[i].preset);
        json_decref(json);
    }
    static const char base[] = "\"model_type\":\"llama\",\"hidden_size\":64,\"num_attention_heads\":4,"
                               "\"num_hidden_layers\":2,\"intermediate_size\":96,\"vocab_size\":100";
    static const struct {
        const char *rope;
        float theta;
        int scaled;
    } spellings[] = {
        {"", 10000.0f, 0},
        {",\"rope_theta\":500000.0,\"rope_scaling\":null", 500000.0f, 0},
        {",\"rope_theta\":500000,\"rope_scaling\":{\"rope_type\":\"llama3\",\"factor\":32.0,\"low_freq_factor\":1.0,"
         "\"high_freq_factor\":4.0,\"original_max_position_embeddings\":8192}",
         500000.0f, 1},
        {",\"rope_scaling\":{\"type\":\"llama3\",\"factor\":8,\"low_freq_factor\":1,\"high_freq_factor\":4,"
         "\"original_max_position_embeddings\":8192}",
         10000.0f, 1},
        {",\"rope_parameters\":{\"rope_type\":\"default\",\"rope_theta\":130000.0}", 130000.0f, 0},
        {",\"rope_theta\":500000.0,\"rope_parameters\":{\"rope_type\":\"default\"}", 500000.0f, 0},
        {",\"rope_parameters\":{\"rope_type\":\"llama3\",\"rope_theta\":500000.0,\"factor\":32.0,\"low_freq_factor\":"
         "1.0,\"high_freq_factor\":4.0,\"original_max_position_embeddings\":8192}",
         500000.0f, 1},
    };
    for (size_t i = 0; i < sizeof spellings / sizeof *spellings; i++) {
        char text[1024];
        snprintf(text, sizeof text, "{%s%s}", base, spellings[i].rope);
        json_t *json = json_loads(text, 0, NULL);
        check(json != NULL && config_from_json(&config, json, "spelling") == 0, "%s: %s", text, error_message);
        check(config.rope.theta == spellings[i].theta && config.rope.scaled == spellings[i].scaled &&
                  config.kv_heads == 4 && config.head_dim == 16,
              "%s: theta %g scaled %d", text, (double)config.rope.theta, config.rope.scaled);
        json_decref(json);
    }
    check(config_from_spec(&config, "d=96,layers=3,heads=6,kv=2,ffn=200,vocab=300,ctx=77,theta=5e5,tied=1") == 0 &&
              config.channels == 96 && config.head_dim == 16 && config.kv_heads == 2 && config.tied == 1 &&
              config.context == 77 && config.rope.theta == 5e5f && config.bos_id == -1,
          "spec: %s", error_message);
    check_error(config_from_spec(&config, "d=96,leyers=3"), "unknown key 'leyers'", "a misspelt key");
    check_error(config_from_spec(&config, "d=1.5"), "whole number", "half a channel");
    check_error(config_from_spec(&config, "d="), "needs a number", "no number");
    check_error(config_from_spec(&config, "d=1e300"), "whole number", "too many channels");
    check_error(config_from_spec(&config, "d=nan"), "whole number", "NaN channels");
    check_error(config_from_spec(&config, "theta=inf"), "rope_theta inf", "an infinite theta");
    check_error(config_from_spec(&config, "heads=5,kv=2"), "not a multiple", "5 heads on 2");
    check_error(config_from_spec(&config, "llama-9"), "no such preset", "an unknown preset");
}

// The command line: defaults, both spellings, ranges, lists, nearest names, and the way through the log.
static void test_options(void) {
    Options opts, again;
    unsigned char given[CLI_OPTIONS] = {0};
    check(OPTION_COUNT <= CLI_OPTIONS, "the table is too long");
    check(cli_defaults(option_table, OPTION_COUNT, &opts) == 0, "a default is out of range: %s", error_message);
    check(opts.batch == 32 && opts.lr == 2e-5f && opts.mask_rate == 0.0f && opts.seq == 0, "defaults");
    static const char *const good[] = {"train",      "-m",         "a.bin", "-d",          "x.txt",         "y.txt",
                                       "--lr=1e-3",  "-n",         "50",    "--recompute", "--schedule-lr", "linear",
                                       "--generate", "-x is text", "-p",    "0",           "--warmup",      "-1"};
    check(cli_parse(option_table, OPTION_COUNT, &opts, given, sizeof good / sizeof *good, (char **)good) == 0, "%s",
          error_message);
    check(strcmp(opts.model, "a.bin") == 0 && opts.data.n == 2 && opts.lr == 1e-3f && opts.steps == 50 &&
              opts.recompute == 1 && opts.schedule_lr == LR_LINEAR && strcmp(opts.generate, "-x is text") == 0 &&
              opts.warmup == -1,
          "values");
    json_t *json = cli_to_json(option_table, OPTION_COUNT, &opts);
    unsigned char none[CLI_OPTIONS] = {0};
    cli_defaults(option_table, OPTION_COUNT, &again);
    check(cli_from_json(option_table, OPTION_COUNT, &again, none, json) == 0, "%s", error_message);
    json_t *json_again = cli_to_json(option_table, OPTION_COUNT, &again);
    check(json_equal(json, json_again), "settings change on the way through the log");
    json_decref(json);
    json_decref(json_again);
    static const struct {
        const char *words[3];
        const char *message;
    } bad[] = {
        {{"--steps", "0x10", NULL}, "a whole number"},
        {{"--step", "5", NULL}, "nearest is --steps"},
        {{"--recomptue", NULL, NULL}, "--recompute"},
        {{"-z", NULL, NULL}, "unknown option '-z'"},
        {{"--batch", "0", NULL}, "from 1 to"},
        {{"--batch", "3.5", NULL}, "a whole number"},
        {{"--lr", "nan", NULL}, "a number"},
        {{"--lr", "1e-3x", NULL}, "a number"},
        {{"--lr", NULL, NULL}, "needs a value"},
        {{"-b", "-4", NULL}, "from 1 to"},
        {{"-p", "1", NULL}, "from 0 to 0.999"},
        {{"-x", "-1", NULL}, "from 0 to"},
        {{"--modle=/a/long/path", NULL, NULL}, "--model"},
        {{"--precision", "fp8", NULL}, "one of auto|bf16|fp32"},
        {{"model.bin", NULL, NULL}, "belongs to no"},
        {{"--seq", "99999999999999999999", NULL}, "a whole number"},
        {{"-o", "--recompute", NULL}, "--out needs a value"},
        {{"--recompute=2", NULL, NULL}, "from 0 to 1"},
        {{"-d", NULL, NULL}, "needs a value"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        char *words[4] = {(char *)"train", (char *)bad[i].words[0], (char *)bad[i].words[1], NULL};
        check_error(cli_parse(option_table, OPTION_COUNT, &opts, given, bad[i].words[1] != NULL ? 3 : 2, words),
                    bad[i].message, bad[i].words[0]);
    }
}

static Tokenizer byte_tokenizer(void) {
    Tokenizer tokenizer;
    check(tokenizer_open(&tokenizer, NULL, BYTE_VOCAB) == 0, "%s", error_message);
    return tokenizer;
}

// What is read from a file in the training side of a fresh dataset, as text with <B> and <E> for the marks.
static int read_as_text(char *out, size_t size, const char *name, const char *content, size_t n, double val_share,
                        Dataset *data) {
    Tokenizer tokenizer = byte_tokenizer();
    size_t used = 0;
    memset(data, 0, sizeof *data);
    data->val_share = val_share;
    write_file(scratch_path(name), content, n);
    out[0] = '\0';
    if (dataset_read(data, &data->train, scratch_path(name), &tokenizer)) return -1;
    for (int s = 0; s < data->train.n_streams; s++) {
        for (int64_t i = 0; i < data->train.streams[s].n; i++) {
            uint32_t id = data->train.streams[s].tokens[i];
            if (id < 256)
                used += (size_t)snprintf(out + used, size - used, "%c", (int)id);
            else
                used += (size_t)snprintf(out + used, size - used, id == BYTE_BOS ? "<B>" : "<E>");
        }
    }
    return 0;
}

// Text in the shapes that broke other trainers.
static void test_text_data(void) {
    static const struct {
        const char *name, *content, *expected; // expected NULL: refused with message
        const char *message;
    } cases[] = {
        {"a.jsonl", "{\"text\":\"ab\"}\n{\"text\":\"c\"}\n", "<B>ab<E><B>c<E>", NULL},
        {"a.jsonl", "{\"text\":\"ab\"}\n\n  \n{\"text\":\"c\"}", "<B>ab<E><B>c<E>", NULL},
        {"a.jsonl", "\xEF\xBB\xBF{\"text\":\"ab\"}\r\n\r\n{\"text\":\"c\"}\r\n", "<B>ab<E><B>c<E>", NULL},
        {"a.jsonl", "{\"text\":\"\"}\n{\"text\":\"c\"}\n", "<B>c<E>", NULL},
        {"a.jsonl", "{\"text\":\"x\\ud83dy\"}", "<B>x\xEF\xBF\xBDy<E>", NULL},
        {"a.jsonl", "{\"text\":\"x\\ud83d\\udc4dy\"}", "<B>x\xF0\x9F\x91\x8Dy<E>", NULL},
        {"a.jsonl", "{\"text\":\"x\\udc4d\\ud83d\"}", "<B>x\xEF\xBF\xBD\xEF\xBF\xBD<E>", NULL},
        {"a.jsonl", "{\"text\":\"\\\\ud83d\"}", "<B>\\ud83d<E>", NULL},
        {"a.jsonl", "{\"text\":\"\xC0 z\"}", "<B>\xEF\xBF\xBD z<E>", NULL},
        {"a.jsonl", "{\"text\":\"\xED\xA0\x80\"}", "<B>\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD<E>", NULL},
        {"a.jsonl", "{\"id\": 3, \"text\":\"\\u00e9\"}", "<B>\xC3\xA9<E>", NULL},
        {"a.jsonl", "{\"text\":\"ab\"}\n{\"txt\":\"c\"}\n", NULL, "line 2: there is no \"text\""},
        {"a.jsonl", "{\"text\":\"ab\"}\n{\"text\":7}\n", NULL, "line 2: its \"text\" is no string"},
        {"a.jsonl", "{\"text\":\"ab\"}\n\n{\"text\":\n", NULL, "line 3:"},
        {"a.jsonl", "[1]\n", NULL, "line 1: there is no \"text\""},
        {"a.jsonl", "{\"text\":\"a\\", NULL, "line 1:"},
        {"a.txt", "\xEF\xBB\xBFone\r\ntwo\xC0", "<B>one\r\ntwo\xC0<E>", NULL},
        {"a.txt", "", "", NULL},
        {"a.csv", "x", NULL, "unknown kind of data"},
    };
    char text[4096];
    Dataset data;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int result =
            read_as_text(text, sizeof text, cases[i].name, cases[i].content, strlen(cases[i].content), 0.0, &data);
        if (cases[i].expected == NULL)
            check_error(result, cases[i].message, cases[i].content);
        else
            check(result == 0 && strcmp(text, cases[i].expected) == 0, "%s gives '%s' (%s)", cases[i].content, text,
                  result ? error_message : "");
        dataset_close(&data);
    }
    check(read_as_text(text, sizeof text, "nul.jsonl", "{\"text\":\"a\\u0000b\"}", 19, 0.0, &data) == 0 &&
              data.train.n_streams == 1 && data.train.streams[0].n == 5,
          "an escaped NUL");
    dataset_close(&data);
    // the held-out part: every tenth document, nothing lost, nothing twice
    char lines[4000] = "";
    for (int i = 0; i < 40; i++) sprintf(lines + strlen(lines), "{\"text\":\"%d\"}\n", i);
    read_as_text(text, sizeof text, "split.jsonl", lines, strlen(lines), 0.1, &data);
    check(data.val.n_streams == 1 && strstr(text, "<B>9<E>") == NULL && strstr(text, "<B>8<E>") != NULL &&
              data.val.streams[0].tokens[1] == '9' && data.n_documents == 40,
          "split of documents: %s", text);
    dataset_close(&data);
    read_as_text(text, sizeof text, "split.txt", lines, 1000, 0.1, &data);
    check(data.val.n_streams == 1 && data.train.streams[0].n + data.val.streams[0].n == 1002 &&
              data.val.streams[0].tokens == data.train.streams[0].tokens + data.train.streams[0].n,
          "split of a text");
    dataset_close(&data);
    Tokenizer other;
    check(tokenizer_open(&other, NULL, 128256) == 0, "%s", error_message);
    memset(&data, 0, sizeof data);
    check_error(dataset_read(&data, &data.train, scratch_path("split.txt"), &other), "vocabulary 128256",
                "text for a model with another tokenizer");
    check_error(dataset_read(&data, &data.train, scratch_path("none*.txt"), &other), "no such file",
                "an empty pattern");
    dataset_close(&data);
}

// n tokens of a shard, ids i % vocab with bit 31 on every fifth, into a file of `size` bytes (0: the right size).
static const char *write_tokens(int64_t n, uint32_t vocab, uint32_t magic, int64_t size) {
    const char *path = scratch_path("shard.bin");
    uint32_t header[256] = {magic, 1, (uint32_t)n, (uint32_t)((uint64_t)n >> 32), vocab};
    FILE *file = fopen(path, "wb");
    fwrite(header, 1, sizeof header, file);
    for (int64_t i = 0; i < n && i < 1000; i++) {
        uint32_t token = (uint32_t)(i % 250) | (i % 5 == 4 ? TOKEN_NO_LOSS : 0);
        fwrite(&token, 1, sizeof token, file);
    }
    fclose(file);
    if (truncate(path, size != 0 ? size : TOKENS_HEADER + 4 * n) != 0) exit(1);
    return path;
}

static void test_token_data(void) {
    Tokenizer tokenizer = byte_tokenizer();
    Dataset data;
    uint32_t tokens[8];
    int32_t targets[8], starts[8];
    memset(&data, 0, sizeof data);
    check(dataset_read(&data, &data.train, write_tokens(20, 258, TOKENS_MAGIC, 0), &tokenizer) == 0, "%s",
          error_message);
    dataset_finish(&data, 8);
    check(data.train.n_windows == 3 && data.train.n_tokens == 20, "%lld windows", (long long)data.train.n_windows);
    int valid = split_read(&data.train, 0, 8, tokens, targets, starts);
    check(tokens[4] == 4 && targets[3] == -1 && targets[4] == 5 && valid == 7, "bit 31: %d %d", targets[3], valid);
    valid = split_read(&data.train, 2, 8, tokens, targets, starts);
    check(valid == 2 && tokens[3] == 19 && targets[3] == -1 && targets[4] == -1 && targets[1] == 18, "short window %d",
          valid);
    dataset_close(&data);
    static const struct {
        int64_t n;
        uint32_t vocab, magic;
        int64_t size;
        const char *message;
    } bad[] = {{20, 258, TOKENS_MAGIC, 1024 + 79, "cut short"},
               {20, 258, TOKENS_MAGIC, 1024 + 84, "cut short"},
               {20, 258, 20240520, 0, "not a token file"},
               {20, 100, TOKENS_MAGIC, 0, "vocabulary of 100"},
               {20, 128256, TOKENS_MAGIC, 0, "vocabulary of 128256"},
               {20, 258, TOKENS_MAGIC, 100, "not a token file"},
               {-5, 258, TOKENS_MAGIC, 1044, "in the header"},
               {(int64_t)1 << 62, 258, TOKENS_MAGIC, 1044, "in the header"}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        memset(&data, 0, sizeof data);
        check_error(dataset_read(&data, &data.train, write_tokens(bad[i].n, bad[i].vocab, bad[i].magic, bad[i].size),
                                 &tokenizer),
                    bad[i].message, bad[i].message);
        dataset_close(&data);
    }
    Tokenizer small;
    check(tokenizer_open(&small, NULL, 17) == 0, "%s", error_message);
    memset(&data, 0, sizeof data);
    check_error(dataset_read(&data, &data.train, write_tokens(20, 0, TOKENS_MAGIC, 0), &small),
                "token 17 is 17, the vocabulary ends at 16", "ids beyond the vocabulary");
    dataset_close(&data);
    // beyond 2^31 bytes: a sparse shard of 2.2 GiB, its last window read through 64-bit offsets
    int64_t big = (int64_t)550 << 20;
    memset(&data, 0, sizeof data);
    check(dataset_read(&data, &data.train, write_tokens(big, 258, TOKENS_MAGIC, 0), &tokenizer) == 0, "%s",
          error_message);
    dataset_finish(&data, 8);
    check(data.train.n_windows == big / 8, "%lld windows", (long long)data.train.n_windows);
    valid = split_read(&data.train, data.train.n_windows - 1, 8, tokens, targets, starts);
    check(valid == 7 && tokens[0] == 0 && targets[7] == -1, "last window of a big shard: %d", valid);
    dataset_close(&data);
    unlink(scratch_path("shard.bin"));
}

// Every window once an epoch, another order each epoch, and the same order whatever the batch size.
static void test_data_order(void) {
    Split split;
    memset(&split, 0, sizeof split);
    split.n_windows = 37;
    int changed = 0, by_seed = 0;
    for (int epoch = 0; epoch < 3; epoch++) {
        char seen[37] = {0};
        for (int i = 0; i < 37; i++) {
            int64_t window = split_order(&split, (int64_t)epoch * 37 + i, 1);
            check(window >= 0 && window < 37 && !seen[window], "epoch %d sample %d", epoch, i);
            seen[window] = 1;
            changed += window != split_order(&split, i, 1);
            by_seed += window != split_order(&split, (int64_t)epoch * 37 + i, 2);
        }
    }
    check(changed > 60 && by_seed > 90, "the order does not change: %d %d", changed, by_seed);
}

static void test_tokenizer(void) {
    Tokenizer tokenizer = byte_tokenizer();
    uint32_t ids[600];
    char text[256], out[8];
    for (int i = 0; i < 256; i++) text[i] = (char)i;
    check(tokenizer_encode(&tokenizer, ids, text, 256) == 256, "length");
    for (int i = 0; i < 256; i++)
        check(ids[i] == (uint32_t)i && tokenizer_decode(&tokenizer, out, sizeof out, ids[i]) == 1 && out[0] == (char)i,
              "byte %d", i);
    check(tokenizer_decode(&tokenizer, out, sizeof out, BYTE_EOS) == 0, "a mark has bytes");
    json_t *files = tokenizer_byte_files();
    Tokenizer again;
    check(tokenizer_open(&again, files, BYTE_VOCAB) == 0 && again.kind == TOKENIZER_BYTE && again.bos == 256,
          "its own file is not known again");
    check(tokenizer_open(&again, files, 200) == 0 && again.kind == TOKENIZER_NONE, "a vocabulary too small for bytes");
    tokenizer_free(&again);
    json_object_set_new(files, "tokenizer.json", json_string("{\"model\":{}}"));
    check(tokenizer_open(&again, files, BYTE_VOCAB) == 0 && again.kind == TOKENIZER_NONE,
          "another tokenizer.json is taken for bytes");
    tokenizer_free(&again);
    json_decref(files);
}

// ---------------------------------------------------------------------------------------------------------------------
// The program: whole runs in a process of their own

// Runs this executable as `train` with the words of a command line ("@" stands for the scratch folder) and variables
// ("NAME=value", NULL: none). Standard output and error go to a file, of which up to size-1 bytes come back. Returns
// the exit status, 128 + signal when killed.
static char run_output[65536];

static pid_t start_child_to(const char *output, const char *variables, const char *command) {
    char text[8192], *words[64], *at = text;
    size_t used = 0;
    int n = 0;
    for (const char *c = command; *c != '\0' && used < sizeof text - PATH_MAX; c++) {
        if (*c == '@')
            used += (size_t)sprintf(text + used, "%s", test_folder);
        else
            text[used++] = *c;
    }
    text[used] = '\0';
    words[n++] = (char *)"train";
    words[n++] = (char *)"--program";
    while ((words[n] = strtok(at, " ")) != NULL && n < 62) at = NULL, n++;
    fflush(stdout);
    pid_t child = fork();
    if (child != 0) return child;
    int fd = open(scratch_path(output), O_WRONLY | O_CREAT | O_TRUNC, 0666);
    dup2(fd, 1);
    dup2(fd, 2);
    if (variables != NULL) putenv(strdup(variables));
    execv("/proc/self/exe", words);
    _exit(127);
}

static pid_t start_child(const char *variables, const char *command) {
    return start_child_to("output", variables, command);
}

static int run_child(const char *variables, const char *command) {
    int status;
    waitpid(start_child(variables, command), &status, 0);
    FILE *file = fopen(scratch_path("output"), "rb");
    size_t length = file != NULL ? fread(run_output, 1, sizeof run_output - 1, file) : 0;
    if (file != NULL) fclose(file);
    run_output[length] = '\0';
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

static void check_run(int expected, const char *variables, const char *command, const char *part) {
    int status = run_child(variables, command);
    check(status == expected, "'%s' ends with %d, not %d:\n%s", command, status, expected, run_output);
    if (part != NULL) check(strstr(run_output, part) != NULL, "'%s' does not say '%s':\n%s", command, part, run_output);
}

static int same_file(const char *a, const char *b) {
    FileMap x, y;
    char path_a[PATH_MAX], path_b[PATH_MAX];
    snprintf(path_a, sizeof path_a, "%s", scratch_path(a));
    snprintf(path_b, sizeof path_b, "%s", scratch_path(b));
    if (file_map(&x, path_a) || file_map(&y, path_b)) return 0;
    int same = x.size == y.size && memcmp(x.data, y.data, x.size) == 0;
    file_unmap(&x);
    file_unmap(&y);
    return same;
}

// The shard of a cell in a run's latest checkpoint; 0 if there is none.
static int open_shard(SafeTensors *file, const char *run, int replica, int stage) {
    char name[128];
    snprintf(name, sizeof name, "%s/latest/cell_%d_%d.bin", run, replica, stage);
    const char *path = scratch_path(name);
    return file_exists(path) && check(safetensors_open(file, path) == 0, "%s", error_message);
}

// What a shard says of its cell; without the times that a computer takes. The caller drops the reference.
static json_t *shard_json(const SafeTensors *file, int with_times) {
    json_t *json = json_loads(json_string_value(json_object_get(file->metadata, "cell")), 0, NULL);
    if (with_times) return json;
    json_object_del(json, "now");
    json_object_del(json, "uplink_free");
    json_object_del(json, "merge_at");
    json_object_del(json, "flow");
    return json;
}

// The same tensors in the same order, and their bytes.
static int same_tensors(const SafeTensors *a, const SafeTensors *b) {
    int same = a->n_tensors == b->n_tensors && a->n_tensors > 0;
    for (int i = 0; same && i < a->n_tensors; i++) {
        const SafeTensor *x = &a->tensors[i], *y = &b->tensors[i];
        same = strcmp(x->name, y->name) == 0 && x->dtype == y->dtype && x->n_dims == y->n_dims && x->end == y->end &&
               memcmp(x->shape, y->shape, sizeof *x->shape * (size_t)x->n_dims) == 0 &&
               memcmp(x->data, y->data, x->end - x->begin) == 0;
    }
    return same;
}

// 1 if both runs have a cell's shard with the same content, 0 if neither has one, -1 if they differ.
static int same_shard(const char *a, const char *b, int replica, int stage, int with_times) {
    SafeTensors x, y;
    int found = open_shard(&x, a, replica, stage), other = open_shard(&y, b, replica, stage);
    int same = found && other && same_tensors(&x, &y);
    if (found && other) {
        json_t *of_x = shard_json(&x, with_times), *of_y = shard_json(&y, with_times);
        same = same && json_is_object(of_x) && json_equal(of_x, of_y);
        json_decref(of_x);
        json_decref(of_y);
    }
    if (found) safetensors_close(&x);
    if (other) safetensors_close(&y);
    return same ? 1 : found || other ? -1 : 0;
}

// How many shards the latest checkpoints of two runs hold; -1 if they are not the same, with times or but for them.
static int same_shards(const char *a, const char *b, int with_times) {
    int n = 0;
    for (int r = 0, in_row = 1; in_row > 0; r++) {
        int same;
        for (in_row = 0; (same = same_shard(a, b, r, in_row, with_times)) > 0; in_row++) n++;
        if (same < 0) return -1;
    }
    return n;
}

// The latest checkpoints of two runs hold the same bytes in these files, and in all shards but for times.
static void check_same_latest(const char *whole, const char *parts, const char *const *files, int n, const char *what) {
    char a[128], b[128];
    for (int f = 0; f < n; f++) {
        snprintf(a, sizeof a, "%s/latest/%s", whole, files[f]);
        snprintf(b, sizeof b, "%s/latest/%s", parts, files[f]);
        check(same_file(a, b), "%s: resumed, %s differs", what, files[f]);
    }
    check(same_shards(whole, parts, 0) > 0, "%s: resumed, a cell's shard differs", what);
}

// The text of a small file in the scratch folder; the caller frees it.
static char *read_text(const char *name) {
    FileMap map;
    if (file_map(&map, scratch_path(name))) exit(1);
    char *text = strndup((const char *)map.data, map.size);
    file_unmap(&map);
    return text;
}

static const char *const model_files[] = {"model.bin"}, *const anchored_files[] = {"model.bin", "anchor.bin"};

static void check_same_run(const char *a, const char *b) {
    check_same_latest(a, b, model_files, 1, a);
}

#define SMALL                                                                                                          \
    "--init d=32,layers=2,heads=4,kv=2,ffn=48,vocab=258,ctx=64 -d @/corpus.jsonl -b 6 -t 16 -l 1e-2 --threads 2 "

static void write_corpus(void) {
    FILE *file = fopen(scratch_path("corpus.jsonl"), "w");
    for (int i = 0; i < 120; i++)
        fprintf(file, "{\"text\": \"number %d is %s and its square is %d\"}\n", i, i % 2 ? "odd" : "even", i * i);
    fclose(file);
}

// N steps equal N/2, stop, resume, N/2, byte for byte: plain, with accumulation, with recompute, under every schedule.
static void test_resume(void) {
    static const char *const variants[] = {"", "--micro-batch 2", "--micro-batch 4 --recompute --schedule-lr linear"};
    char command[1024];
    write_corpus();
    for (int i = 0; i < 3; i++) {
        snprintf(command, sizeof command, SMALL "-n 12 %s -o @/whole%d", variants[i], i);
        check_run(0, NULL, command, "done: 12 steps");
        snprintf(command, sizeof command, SMALL "-n 12 %s -o @/half%d --stop-after 5", variants[i], i);
        check_run(0, NULL, command, "--resume");
        snprintf(command, sizeof command, "-o @/half%d --resume", i);
        check_run(0, NULL, command, "done: 12 steps");
        char whole[32], half[32];
        snprintf(whole, sizeof whole, "whole%d", i);
        snprintf(half, sizeof half, "half%d", i);
        check_same_run(whole, half);
    }
    check(same_file("whole0/best.bin", "half0/best.bin"), "the best weights differ");
    check_run(0, NULL, SMALL "-n 12 -o @/half3 --stop-after 7", "--resume");
    check_run(0, NULL, "-o @/half3 --resume --threads 1", "--threads differs from the run's");
    check_same_run("whole0", "half3"); // another number of threads
    check_run(0, NULL, "-o @/half0 --resume", "is complete: 12 of 12");
    check_run(0, NULL, "-o @/half0 --resume -n 14", "--steps differs from the run's");
    check_run(1, NULL, "-o @/half0 --resume -n 20 -t 8", "--seq differs from the run's");
    check_run(1, NULL, "-o @/half0 --resume -n 20 -d @/whole0/log.jsonl", "there is no \"text\"");
    check_run(1, NULL, SMALL "-n 12 -o @/half0", "already holds a run");
    check_run(1, NULL, "--resume -o @/nowhere", "holds no run");
    FILE *file = fopen(scratch_path("corpus.jsonl"), "a");
    fprintf(file, "{\"text\": \"one more\"}\n");
    fclose(file);
    check_run(1, NULL, "-o @/half0 --resume -n 20", "the data differ");
    write_corpus();
    // a checkpoint whose numbers make no sense is refused
    char *state = read_text("half3/latest/run.json"), *at = strstr(state, "\"samples\": ");
    if (check(at != NULL, "run.json has no samples")) {
        at[strlen("\"samples\": ")] = '-';
        write_file(scratch_path("half3/latest/run.json"), state, strlen(state));
        check_run(1, NULL, "-o @/half3 --resume -n 20", "samples in the checkpoint's run.json is not a count");
        write_file(scratch_path("half3/latest/run.json"), state, 40);
        check_run(1, NULL, "-o @/half3 --resume -n 20", "run.json: line");
        *strchr(at, '-') = ' ';
        write_file(scratch_path("half3/latest/run.json"), state, strlen(state));
        write_file(scratch_path("half3/latest/cell_0_0.bin"), state, 40);
        check_run(1, NULL, "-o @/half3 --resume -n 20", "cell_0_0.bin: not a safetensors file, or cut short");
        write_file(scratch_path("half3/latest/optimizer.bin"), state, 40);
        check_run(1, NULL, "-o @/half3 --resume -n 20", "optimizer.bin is of an older version: finish the run");
    }
    free(state);
    // the log holds every step once, across the resume
    FileMap map;
    int steps[13] = {0}, starts = 0;
    if (check(file_map(&map, scratch_path("half1/log.jsonl")) == 0, "%s", error_message)) {
        const char *text = (const char *)map.data, *end = text + map.size;
        while (text < end) {
            const char *newline = (const char *)memchr(text, '\n', (size_t)(end - text));
            if (!check(newline != NULL, "the log's last line has no end")) break;
            json_t *json = json_loadb(text, (size_t)(newline - text), 0, NULL);
            json_t *step = json_object_get(json, "step");
            check(json != NULL, "a line of the log is no JSON");
            if (step != NULL) steps[json_integer_value(step)]++;
            starts += json_object_get(json, "options") != NULL;
            if (json_integer_value(step) > 0)
                check(json_is_real(json_object_get(json, "loss")) && json_is_real(json_object_get(json, "lr")) &&
                          json_is_real(json_object_get(json, "grad_norm")) &&
                          json_is_integer(json_object_get(json, "tokens")) &&
                          json_is_real(json_object_get(json, "tok_s")) &&
                          json_is_real(json_object_get(json, "elapsed")),
                      "a field is missing in %.*s", (int)(newline - text), text);
            json_decref(json);
            text = newline + 1;
        }
        file_unmap(&map);
    }
    check(starts == 2, "%d start lines", starts);
    for (int i = 0; i <= 12; i++) check(steps[i] == 1, "step %d is in the log %d times", i, steps[i]);
}

// The run ends at every sync in turn, as after kill -9 there; what is left resumes to the same bits.
static void test_crashes(void) {
    int points = 0;
    write_corpus();
    check_run(0, NULL, SMALL "-n 6 --save-every 2 --keep 1 --val-every 2 -o @/calm", "done: 6 steps");
    for (int at = 1; at < 200; at++) {
        char variable[64];
        snprintf(variable, sizeof variable, "TEST_DIE_AT=%d", at);
        int status = run_child(variable, SMALL "-n 6 --save-every 2 --keep 1 --val-every 2 -o @/shot");
        if (status == 0) break;
        points++;
        if (!check(status == 99, "died with %d at sync %d:\n%s", status, at, run_output)) break;
        if (file_exists(scratch_path("shot/log.jsonl"))) // before the first checkpoint too
            check_run(0, NULL, "-o @/shot --resume", NULL);
        else
            check_run(0, NULL, SMALL "-n 6 --save-every 2 --keep 1 --val-every 2 -o @/shot", "done: 6 steps");
        check_same_run("calm", "shot");
        check(system_remove("shot") == 0, "cannot clear up");
    }
    check(points > 15, "only %d syncs in a run with three checkpoints", points);
}

// A full disk: the failing save is named, the last whole step stays, training goes on; the last save decides the exit.
static void test_disk_full(void) {
    write_corpus();
    check_run(1, "TEST_FILE_LIMIT=200000", SMALL "-n 4 --save-every 2 -o @/full", "File too large");
    check(strstr(run_output, "training goes on") != NULL && strstr(run_output, "step 4/4") != NULL,
          "the run did not go on:\n%s", run_output);
    check(checkpoint_latest(scratch_path("full")) == -1 && !file_exists(scratch_path("full/step_00000002.tmp")),
          "a part was left behind");
    check_run(0, NULL, SMALL "-n 2 -o @/full2", "done");
    check_run(1, "TEST_FILE_LIMIT=200000", "-o @/full2 --resume -n 4 --save-every 3", "File too large");
    check(checkpoint_latest(scratch_path("full2")) == 2, "the whole step is gone");
    check_run(0, NULL, "-o @/full2 --resume -n 4", "done: 4 steps");
}

// A weight that is NaN: updates are skipped and counted, nothing is saved, and the run gives up.
static void test_nan(void) {
    Stage stage;
    Config config;
    Stream *stream = test_stream(PRECISION_FP32, 1);
    write_corpus();
    check(config_from_spec(&config, "d=32,layers=2,heads=4,kv=2,ffn=48,vocab=258,ctx=64") == 0 &&
              stage_table(&stage, &config, 0, config.n_layers) == 0 && stage_plan(&stage, 1, 1, 0, 0) == 0 &&
              stage_alloc(&stage, stream) == 0,
          "%s", error_message);
    stage_init(&stage, 1);
    json_t *side = tokenizer_byte_files();
    // only sequences with a '7' in them meet the NaN: those steps are skipped, the others count
    stage.p.embed[(size_t)'7' * 32] = NAN;
    check(model_save_native(&stage, ARENA_PARAMS, side, scratch_path("nan.bin"), DTYPE_F32) == 0, "%s", error_message);
    json_decref(side);
    stage_free(&stage);
    stream_destroy(stream);
    check_run(1, NULL, "-m @/nan.bin -d @/corpus.jsonl -b 1 -t 16 -n 60 -o @/nan --save-every 1", "not saved");
    check(strstr(run_output, "update skipped") != NULL, "no skipped step:\n%s", run_output);
    check(checkpoint_latest(scratch_path("nan")) == -1, "a checkpoint with a NaN was saved");
    check_run(1, NULL, "-m @/nan.bin -d @/corpus.jsonl -b 40 -t 16 -n 60 -o @/nan2 --save-every 30",
              "20 steps in a row");
    check(strstr(run_output, "nothing is saved yet") != NULL, "%s", run_output);
    check_run(1, NULL, "-m @/nan.bin --eval --val-data @/corpus.jsonl -t 16", "not finite");
    check_run(1, NULL, "-m @/nan.bin --generate 7", "not finite");
    check_run(1, NULL, "-m @/nan.bin --check-weights --eval --val-data @/corpus.jsonl", "element 1760 is nan");
}

// Starts `train` with words and returns its process once the text is in the run's log, or once it has ended.
static pid_t start_and_wait(const char *command, const char *run, const char *text) {
    char log[PATH_MAX + 64];
    snprintf(log, sizeof log, "%s/%s/log.jsonl", test_folder, run);
    pid_t child = start_child(NULL, command);
    for (int seen = 0; !seen;) {
        FileMap map;
        siginfo_t info;
        info.si_pid = 0;
        if (waitid(P_PID, (id_t)child, &info, WEXITED | WNOHANG | WNOWAIT) != 0 || info.si_pid == child) break;
        if (file_map(&map, log) == 0) {
            seen = map.size > 0 && memmem(map.data, map.size, text, strlen(text)) != NULL;
            file_unmap(&map);
        }
        sched_yield();
    }
    return child;
}

// Ctrl-C finishes the step, saves and says how to go on; a second one leaves at once. kill -9 in the middle of things
// loses no more than the steps since the last checkpoint, and the resumed run has the bits of one left alone.
static void test_interrupt(void) {
    int status = 0;
    char command[256];
    write_corpus();
    pid_t child = start_and_wait(
        "--init tiny -d @/corpus.jsonl -b 4 -t 16 -n 1000000 --val-every 100000000 --save-every 100000000 -o @/ctrl",
        "ctrl", "\"step\":3,");
    check_run(1, NULL, "-o @/ctrl -d @/corpus.jsonl --init tiny", "is in use by another process");
    check_run(1, NULL, "-o @/ctrl --resume", "is in use by another process");
    kill(child, SIGINT);
    waitpid(child, &status, 0);
    check(WIFEXITED(status) && WEXITSTATUS(status) == 0, "ended with status %d", status);
    int64_t step = checkpoint_latest(scratch_path("ctrl"));
    check(step >= 3, "the latest checkpoint is %lld", (long long)step);
    snprintf(command, sizeof command, "--resume -o @/ctrl -n %lld", (long long)step + 2);
    check_run(0, NULL, command, "done:");

    child = start_and_wait("--init tiny -d @/corpus.jsonl -b 40000 -t 16 -n 100 -o @/twice", "twice", "\"step\":0,");
    while (waitpid(child, &status, WNOHANG) == 0) kill(child, SIGINT);
    check(WIFEXITED(status) && WEXITSTATUS(status) == 130, "two Ctrl-C end with status %d", status);

    check_run(0, NULL, SMALL "-n 400 --save-every 3 --val-every 100 -o @/alone", "done");
    child = start_and_wait(SMALL "-n 400 --save-every 3 --val-every 100 -o @/killed", "killed", "\"step\":31,");
    kill(child, SIGKILL);
    waitpid(child, &status, 0);
    check(WIFSIGNALED(status), "it was over before it could be killed");
    check_run(0, NULL, "-o @/killed --resume", "done");
    check_same_run("alone", "killed");
}

// The number behind `key` in a line of what the last run has said.
static double said_number(const char *key) {
    const char *at = strstr(run_output, key);
    return check(at != NULL, "no '%s' in:\n%s", key, run_output) ? strtod(at + strlen(key), NULL) : (double)NAN;
}

// The other things the program does, and mistakes people make.
static void test_program(void) {
    write_corpus();
    check_run(0, NULL, SMALL "-n 30 -o @/run --val-every 10 --sample-every 15 --max-tokens 20", "sample at step 15");
    check_run(0, NULL, "-m @/run --eval -d @/corpus.jsonl -t 16", "bits a byte");
    check_run(0, NULL, "-m @/run --eval --val-data @/corpus.jsonl -t 16 --val-tokens 0", "validation loss");
    check_run(0, NULL, "-m @/run --generate number --max-tokens 20 --seed 4", "number");
    char *first = strdup(run_output);
    check_run(0, NULL, "-m @/run/latest/model.bin --generate number --max-tokens 20 --seed 4", first);
    free(first);
    check_run(0, NULL, "-m @/run --generate number --max-tokens 1000 --temperature 0", "number");
    check_run(1, NULL, "-m @/run --generate 0123456789012345678901234567890123456789012345678901234567890123456789",
              "nothing is left to generate");
    check_run(0, NULL, "-m @/run --export @/out.bin", "exported");
    check_run(0, NULL, "-m @/run --export @/out --export-dtype fp32", "exported");
    check_run(0, NULL, "-m @/out --eval --val-data @/corpus.jsonl -t 16 --val-tokens 0", "validation loss");
    check_run(0, NULL, "-m @/out -d @/corpus.jsonl --dry-run", "activations");
    check_run(1, NULL, "--init llama-3-8b -d data/fixtures/tokens.bin --dry-run -t 128", "8.03 G");
    check_run(0, NULL, "--help", "--mask-rate");
    check_run(1, NULL, "-d @/corpus.jsonl", "no model");
    check_run(1, NULL, "--init tiny -m @/run -d @/corpus.jsonl", "not both");
    check_run(1, NULL, "--init tiny -d @/corpus.jsonl -t 1000", "beyond the model's context of 256");
    check_run(1, NULL, "--init llama-3.2-1b -d @/corpus.jsonl", "vocabulary 128256");
    check_run(1, NULL, "--init tiny -d @/corpus.jsonl -o @/corpus.jsonl -n 1", "not a folder");
    check_run(1, NULL, "--init llama-3-8b -d data/fixtures/tokens.bin -b 1 -t 16 -n 1 -o @/big", "the machine has");
    check_run(1, NULL, "-m @/run --eval --generate x", "one at a time");
    check_run(1, NULL, "-m @/run --export @/x.bin --generate x", "one at a time");
    check_run(0, NULL, "-m @/run --generate= --max-tokens 5", NULL);
    check_run(0, NULL, "-m @/run --generate x --dry-run", "this device has");
    check_run(1, NULL, SMALL "-y 3", "the model has 2 layers");
    check_run(1, NULL, SMALL "--anchor 1", "at least two replicas");
    check_run(1, NULL, SMALL "-x 2 --anchor 1", "nothing is masked");
    check_run(1, NULL, SMALL "-p 0.5 -y 1", "there is one stage");
    check_run(1, NULL, SMALL "--alpha 0.5", "--alpha has no effect");
    check_run(1, NULL, SMALL "-x 2 --dp dense --mix 0.1", "--mix has no effect");
    check_run(1, NULL, SMALL "-p 0.5 -y 2 -x 1 --anchor-rank 3", "--anchor-rank has no effect");
    check_run(1, NULL, SMALL "--eval-masked", "goes with --eval");
    check_run(1, NULL, SMALL "-m @/corpus.jsonl --eval --eval-masked", "not both");
    check_run(1, NULL, SMALL "-p 0.5 -b 5000 --micro-batch 1", "4095 micro-batches");
    check_run(1, NULL, SMALL "-p 0.5 --anchor-delay soon", "a number of steps from 1 on, or auto");
    check_run(1, NULL, SMALL "-x 2 --local-steps 3 --fragments 4", "--fragments 4");
    check_run(1, NULL, SMALL "-x 2 --local-steps 3 --overlap 3", "--overlap 3");
    check_run(1, NULL, "--init smollm2-135m -d data/fixtures/tokens.bin --sample-every 5",
              "--sample-every: text needs");
    check_run(1, NULL, "--init d=64,ctx=1000000 -d @/corpus.jsonl --micro-batch 1000000 -b 1000000 -t 1000000",
              "at once");
    check_run(1, NULL, "-m @/corpus.jsonl --eval", "not a safetensors file");
    check_run(1, NULL, "--init tiny --generate x --resume", "training only");
    // fewer samples than a batch: the batch wraps into the next epochs
    write_file(scratch_path("few.txt"), "only a few words here", 21);
    check_run(0, NULL, "--init tiny -d @/few.txt -b 9 -t 16 -n 3 -o @/few", "done: 3 steps");
    check(strstr(run_output, "validation") == NULL, "validated without held-out data:\n%s", run_output);
    // runs without -o and -d, in a folder of their own
    file_make_folders(scratch_path("home/data/medical"));
    check_run(1, "TEST_FOLDER=home", "--init tiny -n 1 -t 16", "run data/medical/prepare.sh");
    check(link(scratch_path("corpus.jsonl"), scratch_path("home/data/medical/train.jsonl")) == 0 &&
              link(scratch_path("corpus.jsonl"), scratch_path("home/data/medical/val.jsonl")) == 0,
          "link");
    check_run(0, "TEST_FOLDER=home", "--init tiny -n 4 -t 16 -b 2 --stop-after 2", "no -d given");
    check(strstr(run_output, "runs/1") != NULL, "%s", run_output);
    check_run(0, "TEST_FOLDER=home", "--resume", "runs/1/latest");
    check_run(0, "TEST_FOLDER=home", "--init tiny -n 1 -t 16 -b 2", "runs/2/latest");
    write_file(scratch_path("nothing.jsonl"), "{\"text\": \"\"}\n\n", 14);
    check_run(1, NULL, "--init tiny -d @/nothing.jsonl -n 3 -o @/nothing", "no training tokens");
}

#ifndef DEVICE_CUDA // test_cuda.cu has these for a device's ops
// ---------------------------------------------------------------------------------------------------------------------
// Factorizations, the spectral filter, PowerSGD

// max |Q^T Q - I| of Q (m,r), in double; NaN if any is.
static double orthonormality_error(const float *Q, int m, int r) {
    double worst = 0.0;
    for (int a = 0; a < r; a++) {
        for (int b = 0; b < r; b++) {
            double sum = a == b ? -1.0 : 0.0;
            for (int i = 0; i < m; i++) sum += (double)Q[i * r + a] * (double)Q[i * r + b];
            if (!(fabs(sum) <= worst)) worst = fabs(sum);
        }
    }
    return worst;
}

// out (m,n) = U (m,r) diag(s) V (n,r)^T in double; s NULL: ones.
static void compose(float *out, const float *U, const float *s, const float *V, int m, int n, int r) {
    for (int i = 0; i < m; i++) {
        for (int j = 0; j < n; j++) {
            double sum = 0.0;
            for (int a = 0; a < r; a++)
                sum += (double)U[i * r + a] * (s != NULL ? (double)s[a] : 1.0) * (double)V[j * r + a];
            out[i * n + j] = (float)sum;
        }
    }
}

// ||A - U diag(s) V^T|| / ||A||, or without the division where A is zero
static double residual(const float *A, const float *U, const float *s, const float *V, int m, int n, int r) {
    float *back = (float *)malloc(sizeof(float) * (size_t)(m * n));
    double difference = 0.0, size = 0.0;
    compose(back, U, s, V, m, n, r);
    for (int i = 0; i < m * n; i++) {
        difference += ((double)A[i] - (double)back[i]) * ((double)A[i] - (double)back[i]);
        size += (double)A[i] * (double)A[i];
    }
    free(back);
    return sqrt(difference) / (size > 0.0 ? sqrt(size) : 1.0);
}

static float *random_orthonormal(int m, int r, uint32_t sub) {
    float *Q = random_values((int64_t)m * r, sub, 1.0f);
    Stream *stream = test_stream(PRECISION_FP32, 1);
    check(orthonormalize(Q, m, r, stream) == 0, "%s", error_message);
    stream_destroy(stream);
    return Q;
}

static int is_descending(const float *s, int r) {
    int ok = s[r - 1] >= 0.0f;
    for (int i = 1; i < r; i++) ok = ok && s[i - 1] >= s[i];
    return ok;
}

static void check_factors(const float *A, const float *U, const float *s, const float *V, int m, int n, int r,
                          double best, const char *what) {
    double left = orthonormality_error(U, m, r), right = orthonormality_error(V, n, r);
    double rest = residual(A, U, s, V, m, n, r);
    check(left <= 3e-6 && right <= 3e-6, "%s %d x %d: U^T U - I %.3g, V^T V - I %.3g", what, m, n, left, right);
    check(is_descending(s, r), "%s %d x %d: s does not descend", what, m, n);
    check(rest <= 1.001 * best + 2e-6, "%s %d x %d: residual %.3g, the best is %.3g", what, m, n, rest, best);
}

// The same factors again, on a thread of its own.
typedef struct {
    const float *A;
    float *U, *s, *V;
    int m, n, r, result;
} SvdJob;

static void *svd_job(void *argument) {
    SvdJob *job = (SvdJob *)argument;
    Stream *stream = test_stream(PRECISION_BF16, 1);
    job->result = svd_truncated(job->U, job->s, job->V, job->A, job->m, job->n, job->r, 0, 3, 4, stream);
    stream_destroy(stream);
    return NULL;
}

// The whole factorization: odd shapes, both orientations, ranks that are short, sizes far from 1, wrong values.
static void svd_full_cases(void) {
    Stream *stream = test_stream(PRECISION_FP32, 2);
    static const struct {
        int m, n, rank; // rank 0: full
        float scale;
    } cases[] = {{1, 1, 0, 1},      {1, 5, 0, 1},    {5, 1, 0, 1},       {40, 7, 0, 1},
                 {7, 40, 0, 1},     {17, 17, 0, 1},  {33, 20, 3, 1},     {20, 33, 1, 1},
                 {65, 63, 0, 1e-6}, {9, 6, 0, 0.0f}, {19, 23, 0, 1e-18}, {6, 9, 0, 1e15}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int m = cases[i].m, n = cases[i].n, k = m < n ? m : n, rank = cases[i].rank;
        float *A = random_values(m * n, 300, cases[i].scale);
        if (rank > 0) {
            float *left = random_values(m * rank, 301, 1.0f), *right = random_values(n * rank, 302, 1.0f);
            compose(A, left, NULL, right, m, n, rank);
            free(left);
            free(right);
        }
        float *U = guarded(m * k), *s = guarded(k), *V = guarded(n * k), *before = guarded(m * n);
        memcpy(before, A, sizeof(float) * (size_t)(m * n));
        check(svd_full(U, s, V, A, m, n, stream) == 0, "%s", error_message);
        check(memcmp(before, A, sizeof(float) * (size_t)(m * n)) == 0, "A was changed");
        check_factors(A, U, s, V, m, n, k, 0.0, "svd_full");
        if (rank > 0) check(s[rank - 1] > 1e-2f * s[0] && s[rank] <= 1e-6f * s[0], "rank %d is not found", rank);
        A[m * n - 1] = i % 2 ? NAN : -INFINITY;
        check_error(svd_full(U, s, V, A, m, n, stream), "infinite or NaN", "a matrix that is not finite");
        release(U, m * k, "U");
        release(s, k, "s");
        release(V, n * k, "V");
        release(before, m * n, "before");
        free(A);
    }
    stream_destroy(stream);
}

// Eigenvalues of symmetric matrices, definite and not, of short rank, far from 1; values above the diagonal that
// contradict those below are not looked at.
static void eigh_cases(void) {
    static const struct {
        int n, rank; // rank 0: a random symmetric matrix, of both signs
        float scale;
    } cases[] = {{1, 0, 1}, {2, 0, 1}, {17, 0, 1}, {65, 0, 1e-12f}, {40, 40, 1}, {33, 3, 1}, {9, 0, 0.0f}};
    Stream *stream = test_stream(PRECISION_FP32, 2);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int n = cases[i].n, rank = cases[i].rank;
        float *A = random_values(n * n, 308, cases[i].scale), *V = guarded(n * n), *w = guarded(n);
        if (rank > 0) {
            float *side = random_values(n * rank, 309, 1.0f);
            compose(A, side, NULL, side, n, n, rank);
            free(side);
        }
        float *symmetric = guarded(n * n), *before = guarded(n * n);
        for (int row = 0; row < n; row++)
            for (int col = 0; col < n; col++) symmetric[row * n + col] = A[row >= col ? row * n + col : col * n + row];
        memcpy(before, A, sizeof(float) * (size_t)(n * n));
        check(eigh(V, w, A, n, stream) == 0, "%s", error_message);
        check(memcmp(before, A, sizeof(float) * (size_t)(n * n)) == 0, "A was changed");
        for (int j = 1; j < n; j++) check(w[j - 1] >= w[j], "w does not descend");
        check(orthonormality_error(V, n, n) <= 3e-6, "V^T V - I %.3g", orthonormality_error(V, n, n));
        check(residual(symmetric, V, w, V, n, n, n) <= 2e-6, "residual %.3g", residual(symmetric, V, w, V, n, n, n));
        if (rank > 0 && rank < n) check(w[rank - 1] > 1e-2f * w[0] && fabsf(w[rank]) <= 1e-6f * w[0], "rank %d", rank);
        A[n * n - 1] = i % 2 ? NAN : INFINITY;
        check_error(eigh(V, w, A, n, stream), "infinite or NaN", "a matrix that is not finite");
        release(V, n * n, "V");
        release(w, n, "w");
        release(symmetric, n * n, "symmetric");
        release(before, n * n, "before");
        free(A);
    }
    stream_destroy(stream);
}

static void orthonormalize_cases(void) {
    Stream *stream = test_stream(PRECISION_FP32, 2);
    static const int shapes[][2] = {{1, 1}, {5, 1}, {17, 17}, {130, 33}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        int m = shapes[i][0], r = shapes[i][1], n = m * r;
        float *A = random_values(n, 303, 1e-5f), *Q = guarded(n), *projected = guarded(n), *inner = guarded(r * r);
        memcpy(Q, A, sizeof(float) * (size_t)n);
        check(orthonormalize(Q, m, r, stream) == 0, "%s", error_message);
        check(orthonormality_error(Q, m, r) <= 3e-6, "Q^T Q - I %.3g", orthonormality_error(Q, m, r));
        for (int a = 0; a < r; a++) { // inner (r,r) = A^T Q: lower triangular, as Q's first columns span A's first ones
            for (int b = 0; b < r; b++) {
                double sum = 0.0;
                for (int j = 0; j < m; j++) sum += (double)A[j * r + a] * (double)Q[j * r + b];
                check(b <= a || fabs(sum) <= 1e-6 * 1e-5 * m, "R is not triangular");
                inner[a * r + b] = (float)sum;
            }
        }
        compose(projected, Q, NULL, inner, m, r, r);
        check_close(projected, A, n, 2e-6, "Q R");
        for (int j = 0; j < n; j++) Q[j] = i % 2 ? 0.0f : A[j / r * r]; // zero, or one column r times
        check(orthonormalize(Q, m, r, stream) == 0, "%s", error_message);
        check(orthonormality_error(Q, m, r) <= 3e-6, "dependent: Q^T Q - I %.3g", orthonormality_error(Q, m, r));
        Q[n - 1] = NAN;
        check_error(orthonormalize(Q, m, r, stream), "infinite or NaN", "NaN");
        release(Q, n, "Q");
        release(projected, n, "projected");
        release(inner, r * r, "inner");
        free(A);
    }
    stream_destroy(stream);
}

// Truncated: against the spectrum a matrix was made with, through both ways; threads and repetitions give the same
// bits.
static void svd_truncated_cases(void) {
    static const struct {
        int m, n, r;
        double decay; // s_i = scale * decay^i
        float scale;
    } cases[] = {{60, 45, 10, 0.7, 1}, {45, 60, 10, 0.7, 1}, {60, 45, 18, 0.5, 1e-25f}, {300, 41, 20, 0.8, 1e25f},
                 {50, 50, 1, 0.5, 1},  {60, 45, 30, 0.8, 1}, {11, 9, 4, 0.8, 1},        {30, 26, 13, 0.0, 1}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int m = cases[i].m, n = cases[i].n, r = cases[i].r, k = m < n ? m : n;
        float *left = random_orthonormal(m, k, 304), *right = random_orthonormal(n, k, 305), truth[64];
        float *A = guarded(m * n), *U[2], *s[2], *V[2];
        double beyond = 0.0, total = 0.0;
        for (int j = 0; j < k; j++) {
            truth[j] = cases[i].scale * (float)pow(cases[i].decay, j);
            total += (double)truth[j] * (double)truth[j];
            if (j >= r) beyond += (double)truth[j] * (double)truth[j];
        }
        compose(A, left, truth, right, m, n, k);
        for (int j = 0; j < 2; j++) U[j] = guarded(m * r), s[j] = guarded(r), V[j] = guarded(n * r);
        Stream *stream = test_stream(PRECISION_BF16, 2);
        check(svd_truncated(U[0], s[0], V[0], A, m, n, r, 0, 3, 4, stream) == 0, "%s", error_message);
        check_factors(A, U[0], s[0], V[0], m, n, r, sqrt(beyond / total), "svd_truncated");
        check_close(s[0], truth, r, 1e-5, "s");
        SvdJob job = {A, U[1], s[1], V[1], m, n, r, -1};
        pthread_t thread;
        check(pthread_create(&thread, NULL, svd_job, &job) == 0, "no thread");
        for (int turn = 0; turn < 2; turn++) { // beside the other thread, and once more
            check(svd_truncated(U[0], s[0], V[0], A, m, n, r, 0, 3, 4, stream) == 0, "%s", error_message);
            if (turn == 0) pthread_join(thread, NULL);
            check(job.result == 0 && memcmp(U[0], U[1], sizeof(float) * (size_t)(m * r)) == 0 &&
                      memcmp(s[0], s[1], sizeof(float) * (size_t)r) == 0 &&
                      memcmp(V[0], V[1], sizeof(float) * (size_t)(n * r)) == 0,
                  "another thread's factors differ");
        }
        A[0] = NAN;
        check_error(svd_truncated(U[0], s[0], V[0], A, m, n, r, 0, 3, 4, stream), "infinite or NaN", "NaN");
        check(stream_check(stream) == 0, "the stream is lost");
        for (int j = 0; j < 2; j++) {
            release(U[j], m * r, "U");
            release(s[j], r, "s");
            release(V[j], n * r, "V");
        }
        release(A, m * n, "A");
        free(left);
        free(right);
        stream_destroy(stream);
    }
}

// A slowly drifting matrix with a flat spectrum, one iteration a visit: from the last V it follows, from noise it does
// not. Must fail for: the start taken from noise, V not written back.
static void svd_warm_case(void) {
    enum { M = 90, N = 70, R = 8, VISITS = 8 };
    float *left = random_orthonormal(M, N, 306), *right = random_orthonormal(N, N, 307), truth[N];
    float *A = guarded(M * N), *U = guarded(M * R), *s = guarded(R), *warm = guarded(N * R), *cold = guarded(N * R);
    Stream *stream = test_stream(PRECISION_FP32, 2);
    double excess[2] = {0.0, 0.0}; // of the last visit: residual beyond the best
    for (int j = 0; j < N; j++) truth[j] = 1.0f / (1.0f + 0.3f * (float)j);
    compose(A, left, truth, right, M, N, N);
    for (int visit = 0; visit < VISITS; visit++) {
        float *drift = random_values(M * N, 310 + (uint32_t)visit, 1e-4f), *all = guarded(M * N + N + N * N);
        for (int j = 0; j < M * N; j++) A[j] += drift[j];
        check(svd_full(all, all + M * N, all + M * N + N, A, M, N, stream) == 0, "%s", error_message);
        double beyond = 0.0, total = 0.0;
        for (int j = 0; j < N; j++) {
            double square = (double)all[M * N + j] * (double)all[M * N + j];
            total += square, beyond += j < R ? 0.0 : square;
        }
        for (int which = 0; which < 2; which++) {
            float *V = which == 0 ? warm : cold;
            check(svd_subspace(U, s, V, A, M, N, R, which == 0 && visit > 0, 1, 1, 2, stream) == 0, "%s",
                  error_message);
            check(orthonormality_error(U, M, R) <= 3e-6 && orthonormality_error(V, N, R) <= 3e-6, "not orthonormal");
            excess[which] = residual(A, U, s, V, M, N, R) - sqrt(beyond / total);
        }
        release(all, M * N + N + N * N, "all");
        free(drift);
    }
    check(excess[0] >= -1e-6 && excess[0] <= 0.1 * excess[1], "excess warm %.3g, cold %.3g", excess[0], excess[1]);
    release(A, M * N, "A");
    release(U, M * R, "U");
    release(s, R, "s");
    release(warm, N * R, "V");
    release(cold, N * R, "V");
    free(left);
    free(right);
    stream_destroy(stream);
}

static void test_svd(void) {
    svd_full_cases();
    eigh_cases();
    orthonormalize_cases();
    svd_truncated_cases();
    svd_warm_case();
}

// The filter in double: out = alpha*grad + (1-alpha) U diag(d) (U^T grad V) diag(d) V^T.
static void filter_reference(float *out, const float *grad, const float *U, const float *d, const float *V, int m,
                             int n, int r, double alpha) {
    double *middle = (double *)calloc((size_t)(r * r), sizeof(double));
    double *half = (double *)calloc((size_t)(r * n), sizeof(double)); // U^T grad, then the scaled middle times V^T
    for (int a = 0; a < r; a++)
        for (int j = 0; j < n; j++)
            for (int i = 0; i < m; i++) half[a * n + j] += (double)U[i * r + a] * (double)grad[i * n + j];
    for (int a = 0; a < r; a++) {
        for (int b = 0; b < r; b++) {
            for (int j = 0; j < n; j++) middle[a * r + b] += half[a * n + j] * (double)V[j * r + b];
            middle[a * r + b] *= (double)d[a] * (double)d[b];
        }
    }
    memset(half, 0, sizeof(double) * (size_t)(r * n));
    for (int a = 0; a < r; a++)
        for (int j = 0; j < n; j++)
            for (int b = 0; b < r; b++) half[a * n + j] += middle[a * r + b] * (double)V[j * r + b];
    for (int i = 0; i < m; i++) {
        for (int j = 0; j < n; j++) {
            double sum = 0.0;
            for (int a = 0; a < r; a++) sum += (double)U[i * r + a] * half[a * n + j];
            out[i * n + j] = (float)(alpha * (double)grad[i * n + j] + (1.0 - alpha) * sum);
        }
    }
    free(middle);
    free(half);
}

static void response_cases(void) {
    static const float s[] = {INFINITY, 1e30f, 1.0f, 1e-3f, 1e-30f, 1e-44f, 0.0f, -1.0f, NAN};
    enum { R = sizeof s / sizeof *s };
    static const float pair[] = {4.0f, 1.0f};
    float *d = guarded(R), relative[2] = {NAN, NAN};
    Stream *stream = test_stream(PRECISION_FP32, 1);
    spectral_response(d, s, R, 1e-3f, 0, stream);
    for (int i = 0; i < R; i++) {
        double expected = s[i] > 0.0f && isfinite(s[i]) ? (double)s[i] / ((double)s[i] + (double)1e-3f) : s[i] > 0.0f;
        check(d[i] >= 0.0f && d[i] < 1.0f, "the response to %g is %g", (double)s[i], (double)d[i]);
        check(fabs((double)d[i] - expected) <= 1.2e-7 * expected + 1e-45, "response %g, %g", (double)d[i], expected);
    }
    spectral_response(relative, pair, 2, 0.5f, 1, stream); // tau is half of s_0
    check(fabsf(relative[0] - 2.0f / 3.0f) < 1e-6f && fabsf(relative[1] - 1.0f / 3.0f) < 1e-6f, "relative: %g, %g",
          (double)relative[0], (double)relative[1]);
    spectral_response(relative, s + 6, 2, 0.5f, 1, stream);
    check(relative[0] == 0.0f && relative[1] == 0.0f, "of a zero matrix: %g, %g", (double)relative[0],
          (double)relative[1]);
    release(d, R, "d");
    stream_destroy(stream);
}

// Tall, wide, square, full rank and less, thread counts. Must fail for: U and V swapped, d once instead of twice, alpha
// on the wrong term.
static void test_spectral_filter(void) {
    static const struct {
        int m, n, r;
        float alpha;
    } cases[] = {{1, 1, 1, 0.3f},    {1, 5, 1, 0.3f},      {5, 1, 1, 0.9f},     {40, 17, 17, 0.3f},
                 {17, 40, 17, 0.3f}, {33, 33, 33, 0.01f},  {33, 33, 5, 0.3f},   {65, 20, 7, 0.0f},
                 {20, 65, 1, 0.0f},  {300, 130, 20, 0.5f}, {130, 300, 20, 0.5f}};
    response_cases();
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int m = cases[i].m, n = cases[i].n, r = cases[i].r, k = m < n ? m : n;
        float alpha = cases[i].alpha, *grad = random_values(m * n, 320, 1e-3f), *U = random_orthonormal(m, r, 321);
        float *V = random_orthonormal(n, r, 322), *s = random_values(r, 323, 1e-3f), *d = guarded(r);
        float *expected = guarded(m * n), *unset = guarded(r), *bits[2];
        Stream *streams[2] = {test_stream(PRECISION_BF16, 1), test_stream(PRECISION_FP32, 2)};
        spectral_response(d, s, r, 1e-3f, 0, streams[0]);
        for (int a = 0; a < r; a++) d[a] = 0.1f + 0.9f * d[a]; // half of s is negative
        filter_reference(expected, grad, U, d, V, m, n, r, (double)alpha);
        for (int t = 0; t < 2; t++) {
            bits[t] = guarded(m * n);
            memcpy(bits[t], grad, sizeof(float) * (size_t)(m * n));
            spectral_filter(bits[t], U, unset, V, m, n, r, 1.0f, streams[t]);
            check(memcmp(bits[t], grad, sizeof(float) * (size_t)(m * n)) == 0, "alpha 1 changes the gradient");
            spectral_filter(bits[t], U, d, V, m, n, r, alpha, streams[t]);
            check_close(bits[t], expected, m * n, 1e-6, "filtered");
            check(stream_check(streams[t]) == 0, "%s", error_message);
        }
        check(memcmp(bits[0], bits[1], sizeof(float) * (size_t)(m * n)) == 0, "thread counts differ");
        if (m == n && m > 1) {
            memcpy(bits[0], grad, sizeof(float) * (size_t)(m * n));
            spectral_filter(bits[0], V, d, U, m, n, r, alpha, streams[0]);
            check(relative_error(bits[0], expected, m * n) > 0.05, "U and V swapped pass");
        }
        if (r == 1 && alpha == 0.0f && k > 1) { // one direction in, one direction out
            float *all = guarded(m * k + k + n * k), *values = all + m * k;
            check(svd_full(all, values, values + k, bits[1], m, n, streams[1]) == 0, "%s", error_message);
            check(values[0] > 0.0f && values[1] <= 1e-6f * values[0], "rank 1: %g, %g", (double)values[0],
                  (double)values[1]);
            release(all, m * k + k + n * k, "all");
        }
        for (int t = 0; t < 2; t++) {
            release(bits[t], m * n, "grad");
            stream_destroy(streams[t]);
        }
        release(d, r, "d");
        release(unset, r, "unset");
        release(expected, m * n, "expected");
        free(grad);
        free(U);
        free(V);
        free(s);
    }
}

// Parameters after five AdamW steps on filtered gradients, against PyTorch in float64 (dev/reference/dump_spectral.py).
// Must fail for: the anchor's momentum without its (1 - beta), tau 1e-2, raw gradients, V's transpose.
static void test_spectral_reference(void) {
    static const char *const names[] = {"tall", "wide", "square"};
    enum { STEPS = 5 };
    SafeTensors dump;
    Stream *stream = test_stream(PRECISION_FP32, 2);
    AdamW adam = {0.9f, 0.999f, 1e-8f};
    if (!check(safetensors_open(&dump, "data/fixtures/spectral.safetensors") == 0, "%s", error_message)) return;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        int64_t count = 0;
        char key[64];
        snprintf(key, sizeof key, "%s.start", names[i]);
        const SafeTensor *start = safetensors_find(&dump, key);
        if (!check(start != NULL && start->n_dims == 2, "no %s", key)) continue;
        int m = (int)start->shape[0], n = (int)start->shape[1], k = m < n ? m : n;
        float *param = dump_values(&dump, "", key, &count);
        float *momentum = guarded(count), *adam_m = guarded(count), *adam_v = guarded(count);
        float *U = guarded(m * k), *s = guarded(k), *V = guarded(n * k), *d = guarded(k);
        for (int64_t j = 0; j < count; j++) momentum[j] = adam_m[j] = adam_v[j] = 0.0f;
        for (int step = 1; step <= STEPS; step++) {
            snprintf(key, sizeof key, "%s.fast.%d", names[i], step);
            float *grad = dump_values(&dump, "", key, &count);
            snprintf(key, sizeof key, "%s.anchor.%d", names[i], step);
            float *anchor = dump_values(&dump, "", key, &count);
            snprintf(key, sizeof key, "%s.after.%d", names[i], step);
            float *expected = dump_values(&dump, "", key, &count);
            for (int64_t j = 0; j < count; j++) momentum[j] = 0.9f * momentum[j] + 0.1f * anchor[j];
            check(svd_full(U, s, V, momentum, m, n, stream) == 0, "%s", error_message);
            spectral_response(d, s, k, 1e-3f, 0, stream);
            check(d[0] > 0.9f && d[k - 1] < 0.2f, "the filter does nothing here: %g .. %g", (double)d[0],
                  (double)d[k - 1]);
            spectral_filter(grad, U, d, V, m, n, k, 0.3f, stream);
            adamw_update(param, grad, adam_m, adam_v, count, adam, 1e-2f, 0.01f, 1.0f, step, stream);
            check_close(param, expected, count, 4e-6, key);
            free(grad);
            free(anchor);
            free(expected);
        }
        release(momentum, count, "momentum");
        release(adam_m, count, "m");
        release(adam_v, count, "v");
        release(U, m * k, "U");
        release(s, k, "s");
        release(V, n * k, "V");
        release(d, k, "d");
        free(param);
    }
    safetensors_close(&dump);
    stream_destroy(stream);
}

// A case of the dump of dev/reference/dump_rotate.py.
typedef struct {
    const char *name;
    int m, n;
    int64_t count;
    float *start, *param, *M, *v; // (m,n)
} RotateCase;

static void rotate_open(RotateCase *c, const SafeTensors *dump, const char *name) {
    char key[64];
    snprintf(key, sizeof key, "%s.start", name);
    c->name = name;
    c->start = dump_values(dump, "", key, &c->count), c->param = dump_values(dump, "", key, &c->count);
    c->m = (int)safetensors_find(dump, key)->shape[0], c->n = (int)safetensors_find(dump, key)->shape[1];
    c->M = guarded(c->count), c->v = guarded(c->count);
    for (int64_t i = 0; i < c->count; i++) c->M[i] = c->v[i] = 0.0f;
}

static void rotate_close(RotateCase *c) {
    release(c->M, c->count, "M");
    release(c->v, c->count, "v");
    free(c->start);
    free(c->param);
}

static float *rotate_grad(const RotateCase *c, const SafeTensors *dump, int step) {
    char key[64];
    int64_t n;
    snprintf(key, sizeof key, "%s.grad.%d", c->name, step);
    return dump_values(dump, "", key, &n);
}

// How far the parameters have come, against the dump's.
static void rotate_check(const RotateCase *c, const SafeTensors *dump, const char *method, int step, double tol) {
    char key[64];
    int64_t n;
    float *moved = (float *)malloc(sizeof(float) * (size_t)c->count);
    snprintf(key, sizeof key, "%s.%s.%d", c->name, method, step);
    float *expected = dump_values(dump, "", key, &n);
    for (int64_t i = 0; i < n; i++) moved[i] = c->param[i] - c->start[i], expected[i] -= c->start[i];
    check_close(moved, expected, n, tol, key);
    free(moved);
    free(expected);
}

// M, L, R = the dump's moments before the first step.
static void rotate_fill(RotateCase *c, const SafeTensors *dump, RotateBasis basis) {
    float *to[] = {c->M, basis.left_moment, basis.right_moment};
    for (int i = 0; i < 3; i++) {
        char key[64];
        int64_t n;
        snprintf(key, sizeof key, "%s.%c", c->name, "MLR"[i]);
        float *values = dump_values(dump, "", key, &n);
        if (to[i] != NULL) memcpy(to[i], values, sizeof(float) * (size_t)n);
        free(values);
    }
}

static void rotate_case(const SafeTensors *dump, const char *name, int source, int geometry, Stream *stream) {
    static const char *const methods[2][2] = {{"1st.uni", "1st.bi"}, {"2nd.uni", "2nd.bi"}};
    enum { STEPS = 7, EVERY = 3 };
    RotateCase c;
    Optimizer optimizer = {
        OPTIMIZER_ROTATE, (RotateSource)source, (RotateGeometry)geometry, REFRESH_UNIFORM, EVERY, 4096};
    AdamW adam = {0.9f, 0.95f, 1e-8f};
    rotate_open(&c, dump, name);
    RotateSides sides = rotate_sides(&optimizer, c.m, c.n);
    int64_t floats = rotate_state_floats(sides, optimizer.source, c.m, c.n);
    float *state = guarded(floats);
    rotate_fill(&c, dump, rotate_basis(state, sides, optimizer.source, c.m, c.n));
    for (int step = 1; step <= STEPS; step++) {
        float *grad = rotate_grad(&c, dump, step);
        int due = rotate_is_due(&optimizer, 0, 1, step, 0);
        RotateRefresh refresh = step == 1 ? ROTATE_COLD : due ? ROTATE_WARM : ROTATE_KEEP;
        for (int64_t i = 0; i < c.count; i++) grad[i] *= 4.0f; // what the scale takes back
        rotate_update(c.param, grad, c.M, c.v, state, c.m, c.n, &optimizer, refresh, adam, 1e-2f, 0.1f, 0.25f, step,
                      stream);
        check(stream_check(stream) == 0, "%s", error_message);
        rotate_check(&c, dump, methods[source][geometry], step, source == ROTATE_1ST ? 4e-5 : 3e-4);
        free(grad);
    }
    release(state, floats, "bases and their moments");
    rotate_close(&c);
}

// Rotated Adam step by step against NumPy in float64: tall, wide, square; bases from the momentum and from second
// moments, of the smaller side and of both; a cold refresh at step 1, warm ones at 3 and 6 that change the order of
// basis vectors. The same in float32 by NumPy is off by up to 1.3e-5 (1st) and 1.0e-4 (2nd: eigenvectors whose values
// are close). Must fail for: V not reordered, no sorting, a power iteration of the other side, M turned at the old
// basis, a basis learned before the gradient is in the moments, the bases' trailing columns left out.
static void test_rotate_reference(void) {
    static const char *const names[] = {"tall", "wide", "square"};
    SafeTensors dump;
    Stream *stream = test_stream(PRECISION_BF16, 2); // products stay fp32
    if (!check(safetensors_open(&dump, "data/fixtures/rotate.safetensors") == 0, "%s", error_message)) return;
    for (int i = 0; i < 3; i++)
        for (int way = 0; way < 4; way++) rotate_case(&dump, names[i], way / 2, way % 2, stream);
    safetensors_close(&dump);
    stream_destroy(stream);
}

// Sources and geometries, ways 0 to 3; way 4 with a limit that leaves sides out.
static Optimizer rotate_way(int way, int limit) {
    Optimizer optimizer = {
        OPTIMIZER_ROTATE,       (RotateSource)(way % 2), (RotateGeometry)(way / 2 % 2), REFRESH_UNIFORM, 10,
        way == 4 ? limit : 4096};
    return optimizer;
}

// With identities for bases the step is AdamW's to the bit, and so it is without a side to rotate; with other bases it
// is not. Must fail for: the step size or the decay rounded elsewhere than in AdamW, products in bf16.
static void test_rotate_identity(void) {
    enum { M = 19, N = 27, STATE = 2 * (M * M + N * N) };
    AdamW adam = {0.9f, 0.999f, 1e-8f};
    Stream *stream = test_stream(PRECISION_BF16, 2);
    for (int way = 0; way < 5; way++) {
        Optimizer optimizer = rotate_way(way, 18);
        float *param = random_values(M * N, 40, 1.0f), *other = random_values(M * N, 40, 1.0f);
        float *moments[4], *state = guarded(STATE);
        for (int k = 0; k < 4; k++) moments[k] = random_values(M * N, 41, k % 2 == 0 ? 0.1f : 0.0f);
        for (int i = 0; i < STATE; i++) state[i] = 0.0f;
        RotateBasis basis = rotate_basis(state, rotate_sides(&optimizer, M, N), optimizer.source, M, N);
        for (int i = 0; basis.left != NULL && i < M; i++) basis.left[i * M + i] = 1.0f;
        for (int i = 0; basis.right != NULL && i < N; i++) basis.right[i * N + i] = 1.0f;
        check((basis.left == NULL && basis.right == NULL) == (way == 4), "way %d: sides", way);
        for (int step = 1; step <= 4; step++) {
            float *grad = random_values(M * N, 41 + (uint32_t)step, 1.0f);
            rotate_update(param, grad, moments[0], moments[1], state, M, N, &optimizer, ROTATE_KEEP, adam, 1e-2f, 0.1f,
                          0.3f, step, stream);
            adamw_update(other, grad, moments[2], moments[3], M * N, adam, 1e-2f, 0.1f, 0.3f, step, stream);
            free(grad);
            check(memcmp(param, other, sizeof(float) * M * N) == 0, "way %d, step %d: not AdamW's bits", way, step);
            check(memcmp(moments[1], moments[3], sizeof(float) * M * N) == 0, "way %d, step %d: V", way, step);
        }
        if (basis.left != NULL) { // two basis vectors turned by an eighth of a circle
            float *grad = random_values(M * N, 46, 1.0f), half = sqrtf(0.5f);
            basis.left[0] = basis.left[1] = basis.left[M] = half, basis.left[M + 1] = -half;
            rotate_update(param, grad, moments[0], moments[1], state, M, N, &optimizer, ROTATE_KEEP, adam, 1e-2f, 0.1f,
                          0.3f, 5, stream);
            adamw_update(other, grad, moments[2], moments[3], M * N, adam, 1e-2f, 0.1f, 0.3f, 5, stream);
            check(memcmp(param, other, sizeof(float) * 2 * N) != 0, "way %d: the basis does nothing", way);
            free(grad);
        }
        release(state, STATE, "state");
        for (int k = 0; k < 4; k++) free(moments[k]);
        free(param);
        free(other);
    }
    stream_destroy(stream);
}

// Muon and Nesterov's NAdam against NumPy in float64. Must fail for: no Nesterov in Muon, its steps on the wrong side
// of a tall matrix, scale by the smaller side; mu_t for mu_{t+1}, Pi of the step before, decay after the step.
static void test_muon_nesterov(void) {
    static const char *const names[] = {"tall", "wide", "square"};
    SafeTensors dump;
    Stream *stream = test_stream(PRECISION_BF16, 2);
    AdamW adam = {0.99f, 0.95f, 1e-8f};
    if (!check(safetensors_open(&dump, "data/fixtures/rotate.safetensors") == 0, "%s", error_message)) return;
    for (int i = 0; i < 6; i++) {
        RotateCase c;
        NesterovProduct kept = {0, 0.0};
        rotate_open(&c, &dump, names[i % 3]);
        for (int step = 1; step <= 7; step++) {
            float *grad = rotate_grad(&c, &dump, step);
            for (int64_t j = 0; j < c.count; j++) grad[j] *= 4.0f;
            if (step == 5) kept.step = 0; // as after --resume
            if (i < 3)
                muon_update(c.param, grad, c.M, c.m, c.n, 1e-2f, 0.1f, 0.25f, stream);
            else
                nesterov_update(c.param, grad, c.M, c.v, c.count, nesterov_step(adam, 1e-2f, 0.1f, 0.25f, step, &kept),
                                stream);
            rotate_check(&c, &dump, i < 3 ? "muon" : "nesterov", step, i < 3 ? 2e-5 : 2e-6);
            free(grad);
        }
        if (i == 0) { // a zero gradient and momentum: decay alone
            for (int64_t j = 0; j < c.count; j++) c.M[j] = 0.0f, c.param[j] = 1.0f;
            muon_update(c.param, c.M, c.M, c.m, c.n, 1e-2f, 0.5f, 1.0f, stream);
            check(c.param[0] == 0.995f && c.param[c.count - 1] == 0.995f, "decay alone: %.9g", (double)c.param[0]);
        }
        rotate_close(&c);
    }
    safetensors_close(&dump);
    stream_destroy(stream);
}

// ---------------------------------------------------------------------------------------------------------------------
// What a delay does to optimizers

// The claim of [B] where nothing is random: under a delay of 7 updates AdamW ends at 6e-14 of the first loss if the
// Hessian's eigenvectors are the axes, and at 2e-2 if they are not; (2nd, bi) finds them and ends at 1e-7 either way;
// every rotation beats AdamW on the turned bowl. At one learning rate AdamW goes straight down the leading eigenvectors
// (travel 1.3), 30 times to and fro where they are turned, but 1.4 times without a delay; rotations go 6 to 17 times.
// From one update to the next that hardly shows: swings are slow. Must fail for: bases that stay at their first
// estimate, updates watched along other directions.
static void test_delayed_bowl(void) {
    static const char *const names[] = {"(1st, uni)", "(1st, bi)", "(2nd, uni)", "(2nd, bi)"};
    Stream *stream = test_stream(PRECISION_FP32, 1);
    Bowl aligned, turned;
    Optimizer optimizer;
    double best = 0.0;
    bowl_init(&aligned, 0), bowl_init(&turned, 1);
    memset(&optimizer, 0, sizeof optimizer);
    double adamw_aligned = bowl_best(&aligned, &optimizer, BOWL_DELAY, stream).loss,
           adamw_turned = bowl_best(&turned, &optimizer, BOWL_DELAY, stream).loss;
    check(adamw_aligned < 1e-10 && adamw_turned > 5e-3, "AdamW: aligned %g, turned %g", adamw_aligned, adamw_turned);
    BowlEnd straight = bowl_descend(&aligned, &optimizer, BOWL_LR, BOWL_DELAY, stream);
    BowlEnd swinging = bowl_descend(&turned, &optimizer, BOWL_LR, BOWL_DELAY, stream);
    BowlEnd prompt = bowl_descend(&turned, &optimizer, BOWL_LR, 0, stream);
    check(straight.travel < 1.6 && prompt.travel < 1.6 && swinging.travel > 20.0,
          "AdamW goes %g times the way if aligned, %g if turned, %g without a delay", straight.travel, swinging.travel,
          prompt.travel);
    check(swinging.flips < 0.05 && swinging.cosine > 0.95, "flips %g, cosine %g", swinging.flips, swinging.cosine);
    optimizer.kind = OPTIMIZER_ROTATE, optimizer.every = 10, optimizer.max_dim = 4096;
    for (int way = 0; way < 4; way++) {
        optimizer.source = (RotateSource)(way / 2), optimizer.geometry = (RotateGeometry)(way % 2);
        best = bowl_best(&turned, &optimizer, BOWL_DELAY, stream).loss;
        check(best < 0.5 * adamw_turned, "%s: turned %g, AdamW %g", names[way], best, adamw_turned);
        double travel = bowl_descend(&turned, &optimizer, BOWL_LR, BOWL_DELAY, stream).travel;
        check(travel < 0.6 * swinging.travel && travel > straight.travel, "%s goes %g times the way", names[way],
              travel);
    }
    double best_aligned = bowl_best(&aligned, &optimizer, BOWL_DELAY, stream).loss;
    check(best < 1e-5 && best_aligned < 1e-5, "(2nd, bi): aligned %g, turned %g", best_aligned, best);
    check(stream_check(stream) == 0, "%s", error_message);
    stream_destroy(stream);
}

// Matrices stepped together, some of which get new bases, have the bits of single ones. Must fail for: the bases or
// the refresh of the group's first one for all, a momentum blended twice.
static void test_rotate_group(void) {
    enum { M = 19, N = 27, COUNT = 3, STRIDE = M * N + 5, ALL = COUNT * STRIDE, STEPS = 5 };
    static const RotateRefresh refresh[STEPS][COUNT] = {{ROTATE_COLD, ROTATE_COLD, ROTATE_COLD},
                                                        {ROTATE_KEEP, ROTATE_WARM, ROTATE_KEEP},
                                                        {ROTATE_WARM, ROTATE_KEEP, ROTATE_KEEP},
                                                        {ROTATE_KEEP, ROTATE_KEEP, ROTATE_KEEP},
                                                        {ROTATE_KEEP, ROTATE_KEEP, ROTATE_WARM}};
    AdamW adam = {0.9f, 0.999f, 1e-8f};
    Stream *stream = test_stream(PRECISION_BF16, 2);
    for (int way = 0; way < 5; way++) {
        Optimizer optimizer = rotate_way(way, 18);
        int64_t each = rotate_state_floats(rotate_sides(&optimizer, M, N), optimizer.source, M, N);
        const int64_t sizes[4] = {ALL, ALL, ALL, COUNT * each};
        float *together[4], *alone[4]; // param, M, V, bases
        for (int k = 0; k < 4; k++) {
            together[k] = random_values(sizes[k] + 1, 60, k == 0 ? 1.0f : 0.0f);
            alone[k] = random_values(sizes[k] + 1, 60, k == 0 ? 1.0f : 0.0f);
        }
        for (int step = 1; step <= STEPS; step++) {
            float *grad = random_values(ALL, 60 + (uint32_t)step, 1.0f);
            rotate_update_group(together[0], grad, together[1], together[2], together[3], M, N, COUNT, STRIDE,
                                &optimizer, refresh[step - 1], adam, 1e-2f, 0.1f, 0.3f, step, stream);
            for (int i = 0, at = 0; i < COUNT; i++, at += STRIDE)
                rotate_update(alone[0] + at, grad + at, alone[1] + at, alone[2] + at, alone[3] + i * each, M, N,
                              &optimizer, refresh[step - 1][i], adam, 1e-2f, 0.1f, 0.3f, step, stream);
            check(stream_check(stream) == 0, "%s", error_message);
            for (int k = 0; k < 4; k++)
                check(memcmp(together[k], alone[k], sizeof(float) * (size_t)sizes[k]) == 0,
                      "way %d, step %d, array %d: other bits together", way, step, k);
            free(grad);
        }
        for (int k = 0; k < 4; k++) free(together[k]), free(alone[k]);
    }
    stream_destroy(stream);
}

// What lies above the diagonal of a second moment is not looked at, and below it is all of the moment. Sides of several
// blocks. Must fail for: no mirror before a power iteration, a block's columns that end at its first row.
static void test_rotate_halves(void) {
    enum { M = 37, N = 19, STATE = 2 * (M * M + N * N) };
    Optimizer optimizer = {OPTIMIZER_ROTATE, ROTATE_2ND, ROTATE_BI, REFRESH_UNIFORM, 2, 4096};
    AdamW adam = {0.9f, 0.95f, 1e-8f};
    Stream *stream = test_stream(PRECISION_FP32, 2);
    float *param[2], *m[2], *v[2], *state[2];
    double L[M][M] = {{0.0}};
    for (int k = 0; k < 2; k++) {
        param[k] = random_values(M * N, 70, 1.0f), state[k] = guarded(STATE);
        m[k] = random_values(M * N, 71, 0.0f), v[k] = random_values(M * N, 71, 0.0f);
        for (int i = 0; i < STATE; i++) state[k][i] = 0.0f;
    }
    RotateBasis basis = rotate_basis(state[1], rotate_sides(&optimizer, M, N), ROTATE_2ND, M, N);
    for (int step = 1; step <= 5; step++) {
        float *grad = random_values(M * N, 71 + (uint32_t)step, 1.0f);
        for (int i = 0; i < M; i++)
            for (int j = 0; j < M; j++) basis.left_moment[i * M + j] = j > i ? 1e3f : basis.left_moment[i * M + j];
        for (int i = 0; i < N; i++)
            for (int j = i + 1; j < N; j++) basis.right_moment[i * N + j] = -1e3f;
        for (int k = 0; k < 2; k++)
            rotate_update(param[k], grad, m[k], v[k], state[k], M, N, &optimizer,
                          step == 1  ? ROTATE_COLD
                          : step % 2 ? ROTATE_KEEP
                                     : ROTATE_WARM,
                          adam, 1e-2f, 0.1f, 0.5f, step, stream);
        check(stream_check(stream) == 0, "%s", error_message);
        check(memcmp(param[0], param[1], sizeof(float) * M * N) == 0, "step %d: above the diagonal", step);
        for (int i = 0; i < M; i++) {
            for (int j = 0; j <= i; j++) {
                double sum = 0.0;
                for (int k = 0; k < N; k++) sum += (double)grad[i * N + k] * (double)grad[j * N + k];
                L[i][j] = 0.95 * L[i][j] + 0.05 * 0.25 * sum;
                double ours = (double)basis.left_moment[i * M + j];
                check(fabs(ours - L[i][j]) <= 1e-6 * N, "step %d: L %d %d is %g, not %g", step, i, j, ours, L[i][j]);
            }
        }
        free(grad);
    }
    for (int k = 0; k < 2; k++) {
        release(state[k], STATE, "state");
        free(param[k]);
        free(m[k]);
        free(v[k]);
    }
    stream_destroy(stream);
}

// A square is mirrored from below its diagonal; a region of wider rows is blended, and nothing beside it.
static void test_rotate_squares(void) {
    enum { SIDE = 67, ROWS = 5, WIDTH = 40 };
    Stream *stream = test_stream(PRECISION_FP32, 2);
    float *a = random_values(SIDE * SIDE, 52, 1.0f), *b = random_values(SIDE * SIDE, 52, 1.0f);
    float *x = random_values(SIDE * SIDE, 53, 1.0f);
    rotate_mirror(a, SIDE, stream);
    for (int i = 0; i < SIDE; i++)
        for (int j = i + 1; j < SIDE; j++) b[i * SIDE + j] = b[j * SIDE + i];
    check(memcmp(a, b, sizeof(float) * SIDE * SIDE) == 0, "mirrored");
    rotate_blend(a + SIDE, x, SIDE, ROWS, WIDTH, 0.5f, -2.0f, 0.25f, stream);
    for (int i = 0; i < ROWS; i++)
        for (int j = 0; j < WIDTH; j++) b[(i + 1) * SIDE + j] = 0.5f * b[(i + 1) * SIDE + j] - 0.5f * x[i * SIDE + j];
    check_close(a, b, SIDE * SIDE, 1e-7, "blended");
    free(a);
    free(b);
    free(x);
    stream_destroy(stream);
}

// Sorting, gathering and column sums of a rotation, beside plain loops; two vectors' blend and drift.
static void test_rotate_ops(void) {
    static const float keys[] = {1.0f, NAN, 3.0f, 3.0f, -INFINITY, INFINITY, 0.0f, NAN};
    static const int expected[] = {5, 2, 3, 0, 6, 4, 1, 7};
    enum { ROWS = 5, COLS = 130 };
    int order[8], reverse[COLS];
    Stream *stream = test_stream(PRECISION_FP32, 2);
    float *a = random_values(ROWS * COLS, 50, 1.0f), *b = random_values(ROWS * COLS, 51, 1.0f);
    float *out = guarded(COLS), *sums = guarded(COLS), *to = guarded(ROWS * (COLS + 2)), *x = guarded(COLS);
    rotate_order(order, keys, 8, stream);
    check(memcmp(order, expected, sizeof order) == 0, "order: %d %d %d %d ..", order[0], order[1], order[2], order[3]);
    rotate_column_dots(out, a, b, ROWS, COLS, stream);
    for (int j = 0; j < COLS; j++) {
        double sum = 0.0;
        for (int i = 0; i < ROWS; i++) sum += (double)a[i * COLS + j] * (double)b[i * COLS + j];
        sums[j] = (float)sum, reverse[j] = COLS - 1 - j;
    }
    check(memcmp(out, sums, sizeof(float) * COLS) == 0, "column sums");
    rotate_gather(to, COLS + 2, a, COLS, reverse, ROWS, COLS, 1, stream);
    check(to[0] == a[COLS - 1] && to[4 * (COLS + 2) + COLS - 1] == a[4 * COLS], "columns reversed");
    rotate_gather(to, COLS + 2, a, COLS, order + 1, 2, COLS, 0, stream);
    check(memcmp(to, a + 2 * COLS, sizeof(float) * COLS) == 0 && to[COLS + 2] == a[3 * COLS], "rows 2 and 3");
    for (int j = 0; j < COLS; j++) x[j] = a[j], sums[j] = b[j];
    vector_blend(x, b, 0.5f, -2.0f, 0.25f, COLS, stream);
    vector_drift(sums, a, b, 0.75f, COLS, stream);
    for (int j = 0; j < COLS; j++) {
        out[j] = 0.75f * b[j] + 0.25f * (a[j] - b[j]);
        to[j] = 0.5f * a[j] - 0.5f * b[j];
    }
    check_close(x, to, COLS, 1e-6, "blend");
    check_close(sums, out, COLS, 1e-6, "drift");
    release(out, COLS, "out");
    release(sums, COLS, "sums");
    release(to, ROWS * (COLS + 2), "to");
    release(x, COLS, "x");
    free(a);
    free(b);
    stream_destroy(stream);
}

// Three workers' rounds of PowerSGD: what a mesh does, in one process.
typedef struct {
    int m, n, r;
    float *P, *Q, *error[3], *update; // (m,r), (n,r), (m,n) each, (m,n)
} PowerCase;

enum { WORKERS = 3 };

static void power_round(PowerCase *c, float *const delta[WORKERS], int feedback, Stream *stream) {
    int m = c->m, n = c->n, r = c->r;
    float *P = guarded(m * r), *own[WORKERS];
    for (int i = 0; i < m * r; i++) c->P[i] = 0.0f;
    for (int w = 0; w < WORKERS; w++) {
        for (int i = 0; feedback && i < m * n; i++) delta[w][i] += c->error[w][i];
        powersgd_left(P, delta[w], c->Q, m, n, r, stream);
        for (int i = 0; i < m * r; i++) c->P[i] += P[i] / WORKERS;
    }
    check(orthonormalize(c->P, m, r, stream) == 0, "%s", error_message);
    for (int j = 0; j < n * r; j++) c->Q[j] = 0.0f;
    for (int w = 0; w < WORKERS; w++) {
        own[w] = guarded(n * r);
        powersgd_right(own[w], delta[w], c->P, m, n, r, stream);
        for (int j = 0; j < n * r; j++) c->Q[j] += own[w][j] / WORKERS;
    }
    powersgd_expand(c->update, c->P, c->Q, m, n, r, stream);
    for (int w = 0; w < WORKERS; w++) {
        powersgd_error(c->error[w], delta[w], c->P, own[w], m, n, r, stream);
        powersgd_error(delta[w], delta[w], c->P, own[w], m, n, r, stream);
        check(memcmp(delta[w], c->error[w], sizeof(float) * (size_t)(m * n)) == 0, "in place differs");
        release(own[w], n * r, "Q of one worker");
    }
    release(P, m * r, "P of one worker");
    check(stream_check(stream) == 0, "%s", error_message);
}

// The workers' updates of a round: a common direction of full rank that stays, and noise. mean: their average.
static void power_deltas(float *delta[WORKERS], float *mean, const float *common, int count, uint32_t round) {
    for (int i = 0; i < count; i++) mean[i] = 0.0f;
    for (int w = 0; w < WORKERS; w++) {
        delta[w] = random_values(count, 340 + round * WORKERS + (uint32_t)w, 0.3f);
        for (int i = 0; i < count; i++) {
            delta[w][i] += common[i];
            mean[i] += delta[w][i] / WORKERS;
        }
    }
}

// Full rank sends the average itself; low rank sends it late: what is not yet sent stays bounded, so that its share of
// the sum falls like 1 / rounds. Must fail for: no feedback, Q of another worker in the error, Q drawn anew per worker.
static void test_powersgd(void) {
    enum { ROUNDS = 60, EARLY = 15 };
    static const int shapes[][3] = {{1, 1, 1}, {5, 1, 1}, {17, 9, 9}, {9, 17, 9}, {24, 16, 2}, {16, 24, 2}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        int m = shapes[i][0], n = shapes[i][1], r = shapes[i][2], count = m * n, full = r == (m < n ? m : n);
        PowerCase c = {m, n, r, guarded(m * r), guarded(n * r), {NULL, NULL, NULL}, guarded(count)};
        float *common = random_values(count, 330, 1.0f), *mean = guarded(count), *delta[WORKERS];
        float *sent = guarded(count), *due = guarded(count), *whole = guarded(count);
        double early = 0.0, share = 1.0;
        Stream *stream = test_stream(PRECISION_BF16, 2);
        check(powersgd_init(c.Q, n, r, 7, (uint32_t)i, stream) == 0, "%s", error_message);
        for (int w = 0; w < WORKERS; w++) c.error[w] = guarded(count);
        for (int j = 0; j < count; j++) sent[j] = due[j] = 0.0f;
        for (int round = 0; round < (full ? 3 : ROUNDS); round++) {
            power_deltas(delta, mean, common, count, (uint32_t)round);
            power_round(&c, delta, round > 0, stream);
            if (full) check_close(c.update, mean, count, 2e-6, "full rank");
            for (int j = 0; j < count; j++) {
                sent[j] += c.update[j];
                due[j] += mean[j];
                whole[j] = sent[j] + (c.error[0][j] + c.error[1][j] + c.error[2][j]) / WORKERS;
            }
            check_close(whole, due, count, 3e-6, "sent and kept");
            share = relative_error(sent, due, count);
            if (round == EARLY - 1) early = share;
            for (int w = 0; w < WORKERS; w++) free(delta[w]);
        }
        if (!full)
            check(share <= 0.35 * early && share >= 0.1 * early && early < 0.9, "share not sent: %.3g, then %.3g",
                  early, share);
        for (int w = 0; w < WORKERS; w++) release(c.error[w], count, "error");
        release(c.P, m * r, "P");
        release(c.Q, n * r, "Q");
        release(c.update, count, "update");
        release(mean, count, "mean");
        release(sent, count, "sent");
        release(due, count, "due");
        release(whole, count, "whole");
        free(common);
        stream_destroy(stream);
    }
}

#endif // factorizations of the CPU

// ---------------------------------------------------------------------------------------------------------------------
// The mesh

// 1F1B for every number of stages and micro-batches: each piece of work once, backwards in order, no more in flight
// than promised; and stages that wait for each other's messages all finish.
static void test_schedule(void) {
    enum { MAX_STAGES = 7, MAX_MICRO = 9 };
    static const char expected[] = "F0 F1 F2 B0 F3 B1 B2 B3 ";
    char text[64] = "";
    Work work[MAX_STAGES][2 * MAX_MICRO];
    for (int n = 1; n <= MAX_MICRO; n++) {
        for (int S = 1; S <= MAX_STAGES; S++) {
            int next[MAX_STAGES] = {0}, done[MAX_STAGES][2] = {{0}}, left = S * 2 * n, moved = 1;
            for (int s = 0; s < S; s++) {
                int in_flight = 0;
                schedule_1f1b(work[s], s, S, n);
                for (int i = 0; i < 2 * n; i++) {
                    int forward = work[s][i].kind == WORK_FORWARD;
                    check(work[s][i].micro_batch == done[s][!forward]++, "stage %d of %d: work %d out of order", s, S,
                          i);
                    in_flight += forward ? 1 : -1;
                    check(in_flight >= 0 && in_flight <= schedule_in_flight(s, S, n), "stage %d of %d: %d in flight", s,
                          S, in_flight);
                }
                check(done[s][0] == n && done[s][1] == n, "stage %d of %d: %d forwards, %d backwards of %d", s, S,
                      done[s][0], done[s][1], n);
            }
            memset(done, 0, sizeof done);
            while (left > 0 && moved) {
                moved = 0;
                for (int s = 0; s < S; s++) {
                    if (next[s] == 2 * n) continue;
                    Work w = work[s][next[s]];
                    int ready = w.kind == WORK_FORWARD ? s == 0 || done[s - 1][0] > w.micro_batch
                                                       : s == S - 1 || done[s + 1][1] > w.micro_batch;
                    if (ready) done[s][w.kind == WORK_BACKWARD]++, next[s]++, left--, moved = 1;
                }
            }
            check(left == 0, "%d stages, %d micro-batches: stuck with %d left", S, n, left);
        }
    }
    schedule_1f1b(work[0], 0, 3, 4);
    for (int i = 0; i < 8; i++)
        sprintf(text + strlen(text), "%c%d ", work[0][i].kind == WORK_FORWARD ? 'F' : 'B', work[0][i].micro_batch);
    check(strcmp(text, expected) == 0, "stage 0 of 3, 4 micro-batches: %s", text);
}

#define DEEP                                                                                                           \
    "--init d=24,layers=6,heads=4,kv=2,ffn=40,vocab=258,ctx=64 -d @/corpus.jsonl -b 5 --micro-batch 2 -t 16 -l 1e-2 "  \
    "--threads 2 --val-tokens 300 "

// The file of a run's latest weights: its model, or its adapters.
static const char *weights_file(const char *run) {
    char path[512];
    snprintf(path, sizeof path, "%s/latest/model.bin", run);
    return file_exists(scratch_path(path)) ? "model.bin" : "adapter_model.safetensors";
}

static void check_same_model(const char *a, const char *b) {
    char path_a[512], path_b[512];
    snprintf(path_a, sizeof path_a, "%s/latest/%s", a, weights_file(a));
    snprintf(path_b, sizeof path_b, "%s/latest/%s", b, weights_file(a));
    check(same_file(path_a, path_b), "%s and %s differ in their weights", a, b);
}

// The losses of a run's log in one string.
static char *logged_losses(const char *run) {
    char path[256];
    snprintf(path, sizeof path, "%s/log.jsonl", run);
    char *text = read_text(path), *losses = (char *)calloc(1, strlen(text) + 1), *at = text;
    while ((at = strstr(at, "\"loss\":")) != NULL) {
        size_t n = strcspn(at, ",}");
        strncat(losses, at, n);
        at += n;
    }
    free(text);
    return losses;
}

// Any number of stages gives the same losses and weights, bit for bit, with accumulation and a short last micro-batch;
// bf16 products too. What does travel is counted to the byte.
static void test_stages(void) {
    static const char *const precisions[] = {"fp32", "bf16"};
    char command[1024], name[64], first[64];
    write_corpus();
    for (int p = 0; p < (device_has_bf16() ? 2 : 1); p++) {
        static const int stages[] = {1, 2, 3, 4, 6};
        char *losses = NULL;
        for (int i = 0; i < 5; i++) {
            snprintf(name, sizeof name, "y%d%s", stages[i], precisions[p]);
            snprintf(command, sizeof command, DEEP "-n 4 -y %d --wire fp32 --clip 0 --precision %s -o @/%s%s",
                     stages[i], precisions[p], name, i == 3 ? " --recompute" : "");
            check_run(0, NULL, command, "done: 4 steps");
            char *these = logged_losses(name);
            if (i == 0) snprintf(first, sizeof first, "%s", name);
            check_same_model(first, name);
            if (losses != NULL)
                check(strcmp(losses, these) == 0, "%d stages: other losses:\n%s\n%s", stages[i], losses, these);
            check(strlen(these) > 40, "no losses in the log");
            if (losses == NULL)
                losses = these;
            else
                free(these);
        }
        free(losses);
    }
    // 3 boundaries x 80 tokens x K = 5 values of 2 bytes each way
    check_run(0, NULL, DEEP "-n 2 -y 4 -x 1 -p 0.8 -o @/counted", "done: 2 steps");
    char *log = read_text("counted/log.jsonl");
    check(strstr(log, "\"forward\":2400,\"backward\":2400,\"dp\":0,\"anchor\":0,\"per_token\":15.0,") != NULL,
          "the bytes are not 2400 each way:\n%s", log);
    free(log);
    check_run(1, NULL, DEEP "-n 2 -y 7", "the model has 6 layers");
    // a tied model is untied by a cut, and starts from the same function
    check_run(
        0, NULL,
        "--init d=24,layers=2,heads=2,kv=1,ffn=32,vocab=258,ctx=64,tied=1 --export @/tied.bin --export-dtype fp32",
        "exported");
    check_run(0, NULL, "-m @/tied.bin -d @/corpus.jsonl -b 3 -t 16 -n 1 -y 2 -l 0 --wire fp32 -o @/untied", "own head");
    check_run(0, NULL, "-m @/tied.bin -d @/corpus.jsonl -b 3 -t 16 -n 1 -y 1 -l 0 -o @/kept", "tied head");
    char *a = logged_losses("untied"), *b = logged_losses("kept");
    check(strcmp(a, b) == 0, "untied: %s, tied: %s", a, b);
    free(a);
    free(b);
}

// A trainer in this process, ready for train_step. words: a command line without quotes, "@" is the scratch folder.
typedef struct {
    Trainer trainer;
    Batch *batches;
    Probe probe;
    StepResult result;
} MeshRun;

static MeshRun *mesh_run_open(const char *words) {
    MeshRun *run = (MeshRun *)calloc(1, sizeof *run);
    Trainer *trainer = &run->trainer;
    char text[4096] = "", *argv[64];
    ModelFile file;
    int argc = 1;
    for (const char *c = words; *c != '\0'; c++) {
        size_t used = strlen(text);
        if (*c == '@')
            snprintf(text + used, sizeof text - used, "%s", test_folder);
        else
            text[used] = *c, text[used + 1] = '\0';
    }
    argv[0] = (char *)"train";
    for (char *word = strtok(text, " "); word != NULL; word = strtok(NULL, " ")) argv[argc++] = word;
    memset(&file, 0, sizeof file);
    fflush(stdout);
    int out = dup(STDOUT_FILENO), null = open("/dev/null", O_WRONLY); // what a start prints is of no interest
    dup2(null, STDOUT_FILENO);
    int result = cli_defaults(option_table, OPTION_COUNT, &trainer->opts) ||
                 cli_parse(option_table, OPTION_COUNT, &trainer->opts, trainer->given, argc, argv) ||
                 prepare(trainer, &file, ACTION_TRAIN) || load(trainer, &file);
    model_file_close(&file);
    fflush(stdout);
    dup2(out, STDOUT_FILENO);
    close(out);
    close(null);
    if (!check(result == 0, "%s: %s", words, error_message)) exit(1);
    run->batches = (Batch *)calloc((size_t)trainer->mesh.n_replicas, sizeof(Batch));
    for (int r = 0; r < trainer->mesh.n_replicas; r++) batch_alloc(&run->batches[r], trainer->opts.batch, trainer->T);
    return run;
}

static void mesh_run_step(MeshRun *run) {
    check(train_step(&run->trainer, run->batches, &run->probe, &run->result, NULL) == 0, "%s", error_message);
}

static void mesh_run_close(MeshRun *run) {
    for (int r = 0; r < run->trainer.mesh.n_replicas; r++) batch_free(&run->batches[r]);
    free(run->batches);
    device_free(run->probe.fast);
    device_free(run->probe.whole);
    anchor_stop(&run->trainer.anchor);
    device_free(run->trainer.leading.directions);
    mesh_free(&run->trainer.mesh);
    json_decref(run->trainer.side_files);
    dataset_close(&run->trainer.data);
    stream_destroy(run->trainer.stream);
    free(run);
}

// All weights of one arena of a replica, tensor after tensor; the caller frees them.
static float *replica_values(const MeshRun *run, int replica, Arena arena, int64_t *n) {
    const Stage *model = mesh_model(&run->trainer.mesh, replica);
    float *values = (float *)malloc(sizeof(float) * (size_t)run->trainer.n_params);
    *n = 0;
    for (const Stage *stage = model; stage != NULL; stage = stage->next) {
        for (int i = 0; i < stage->n_tensors; i++) {
            device_copy(values + *n, stage_arena(stage, arena) + stage->tensors[i].offset,
                        sizeof(float) * (size_t)stage->tensors[i].n, stage->stream);
            *n += stage->tensors[i].n;
        }
    }
    return values;
}

#define QUIET "-n 100 --precision fp32 --wire fp32 --clip 0 "
#define ASYNC "-n 12 --wire fp32 --micro-batch 5 --schedule async "

#ifndef DEVICE_CUDA // reads and writes the host's tensors
// The gradient of the masked model: the masks are part of the function. Against differences of the loss along the
// gradient and along random directions.
static void test_masked_gradient(void) {
    write_corpus();
    MeshRun *run = mesh_run_open(DEEP QUIET "-p 0.6 -x 1 -y 3 -l 0 --mask-scale sqrt");
    Trainer *trainer = &run->trainer;
    Mesh *mesh = &trainer->mesh;
    mesh_run_step(run);
    Pass pass = {run->batches, 7, 1, 0, NULL, 0}, other = {run->batches, 8, 1, 0, NULL, 0};
    double losses[2], valid = (double)run->batches[0].n_valid;
    if (check(mesh_run(mesh, 0, 1, &pass) == 0, "%s", error_message)) {
        int64_t n;
        float *grads = replica_values(run, 0, ARENA_GRADS, &n);
        for (int direction = 0; direction < 4; direction++) {
            double slope = 0.0, norm = 0.0, step = 1e-2;
            float *along = direction == 0
                               ? (float *)memcpy(malloc(sizeof(float) * (size_t)n), grads, sizeof(float) * (size_t)n)
                               : random_values(n, 60 + (uint64_t)direction, 1.0f);
            for (int64_t i = 0; i < n; i++) norm += (double)along[i] * along[i];
            for (int64_t i = 0; i < n; i++)
                along[i] = (float)(along[i] / sqrt(norm)), slope += (double)along[i] * grads[i];
            for (int side = 0; side < 2; side++) {
                int64_t at = 0;
                for (Stage *stage = mesh_model(mesh, 0); stage != NULL; stage = stage->next)
                    for (int t = 0; t < stage->n_tensors; at += stage->tensors[t++].n)
                        for (int64_t i = 0; i < stage->tensors[t].n; i++)
                            stage->params[stage->tensors[t].offset + i] +=
                                (float)(side ? -2.0 * step : step) * along[at + i];
                mesh_run(mesh, 0, 1, &pass);
                losses[side] = mesh_cell(mesh, 0, 2)->loss_sum / valid;
            }
            int64_t at = 0;
            for (Stage *stage = mesh_model(mesh, 0); stage != NULL; stage = stage->next)
                for (int t = 0; t < stage->n_tensors; at += stage->tensors[t++].n)
                    for (int64_t i = 0; i < stage->tensors[t].n; i++)
                        stage->params[stage->tensors[t].offset + i] += (float)step * along[at + i];
            double numeric = (losses[0] - losses[1]) / (2.0 * step), scale = direction == 0 ? fabs(slope) : 0.05;
            check(fabs(numeric - slope) <= 0.02 * scale, "direction %d: slope %g, differences give %g", direction,
                  slope, numeric);
            free(along);
        }
        mesh_run(mesh, 0, 1, &other);
        int64_t n_other;
        float *others = replica_values(run, 0, ARENA_GRADS, &n_other);
        check(memcmp(others, grads, sizeof(float) * (size_t)n) != 0, "another step has the same masks");
        free(others);
        free(grads);
    }
    mesh_run_close(run);
}

// Steps of an asynchronous pipeline written out: all weights there ever were are kept in a list, and forward,
// boundaries, backward and update are called one by one on another model's stages.
typedef struct {
    MeshRun *run;     // its stages, synchronous, whose own schedule is not used
    float *known[12]; // (versions) all stages' parameters one after the other
} AsyncReference;

static void reference_put(Stage *stage, const float *weights, Stream *stream) {
    memcpy(stage->params, weights, sizeof(float) * (size_t)stage->arena_floats);
    stage_round(stage, stream);
}

static int64_t stage_floats_before(const Mesh *mesh, int s) {
    int64_t floats = 0;
    for (int i = 0; i < s; i++) floats += mesh_cell(mesh, 0, i)->stage.arena_floats;
    return floats;
}

// Micro-batch t, from 1 on. delta: NULL, or of each stage what PipeMare subtracts, times the delay.
static void reference_step(AsyncReference *ref, int t, int stash, float **delta) {
    Trainer *trainer = &ref->run->trainer;
    Mesh *mesh = &trainer->mesh;
    Stream *stream = trainer->stream;
    const Options *opts = &trainer->opts;
    int P = mesh->n_stages, B = opts->batch, T = trainer->T, N = B * T;
    AdamW adam = {optimizer_beta1(OPTIMIZER_ADAMW), opts->beta2, opts->adam_eps};
    Batch *batch = ref->run->batches;
    float lr = lr_at((LrShape)opts->schedule_lr, opts->lr, opts->lr_final, t - 1, trainer->warmup, trainer->n_steps);
    next_batches(trainer, batch);
    for (int s = 0; s < P; s++) {
        Stage *stage = &mesh_cell(mesh, 0, s)->stage;
        int seen = t - 1 - (P - 1 - s) > 0 ? t - 1 - (P - 1 - s) : 0;
        reference_put(stage, ref->known[seen] + stage_floats_before(mesh, s), stream);
        stage_begin(stage, stream);
        stage_forward(stage, 0, batch->tokens, NULL, B, T, NULL, NULL, stream);
        if (stage->next != NULL)
            memcpy(stage_input(stage->next, 0), stage->last, sizeof(floatX) * (size_t)N * stage->config.channels);
        else
            head_loss(stage, batch->targets, N, 1, 1.0f / (float)batch->n_valid, 1, stream);
        stage_take_loss(stage, stream);
    }
    for (int s = P - 1; s >= 0; s--) {
        Stage *stage = &mesh_cell(mesh, 0, s)->stage, *before = s > 0 ? &mesh_cell(mesh, 0, s - 1)->stage : NULL;
        const float *newest = ref->known[t - 1] + stage_floats_before(mesh, s);
        if (!stash) reference_put(stage, newest, stream);
        for (int64_t i = 0; delta != NULL && i < stage->arena_floats; i++) {
            volatile float moved = (float)(P - 1 - s) * delta[s][i];
            stage->params[i] = newest[i] - moved;
        }
        stage_round(stage, stream);
        stage_backward(stage, 0, NULL, B, T, 1, NULL, stream);
        if (before != NULL) memcpy(before->d.dx, stage->d.dx, sizeof(floatX) * (size_t)N * stage->config.channels);
    }
    ref->known[t] = (float *)malloc(sizeof(float) * (size_t)stage_floats_before(mesh, P));
    for (int s = 0; s < P; s++) {
        Stage *stage = &mesh_cell(mesh, 0, s)->stage;
        reference_put(stage, ref->known[t - 1] + stage_floats_before(mesh, s), stream);
        stage_update(stage, adam, lr, opts->wd, stage_grad_norm(stage, stream), opts->clip, t, stream);
        memcpy(ref->known[t] + stage_floats_before(mesh, s), stage->params,
               sizeof(float) * (size_t)stage->arena_floats);
    }
}

// mode: stashing, without, and without but with PipeMare's correction by a delta that stays as it is.
static void async_case(int P, int mode, const char *precision) {
    static const char *const flags[] = {"", "--no-stash", "--no-stash"};
    char words[1024];
    float *deltas[6], **used = mode == 2 ? deltas : NULL;
    AsyncReference ref;
    memset(&ref, 0, sizeof ref);
    snprintf(words, sizeof words, DEEP ASYNC "-y %d --precision %s %s", P, precision, flags[mode]);
    MeshRun *run = mesh_run_open(words);
    snprintf(words, sizeof words, DEEP "-n 12 --micro-batch 5 -y %d --precision %s", P, precision);
    ref.run = mesh_run_open(words);
    const Mesh *mesh = &run->trainer.mesh;
    int64_t floats = stage_floats_before(mesh, P);
    ref.known[0] = (float *)malloc(sizeof(float) * (size_t)floats);
    for (int s = 0; s < P; s++) {
        Stage *stage = &mesh_cell(mesh, 0, s)->stage;
        memcpy(ref.known[0] + stage_floats_before(mesh, s), stage->params, sizeof(float) * (size_t)stage->arena_floats);
        deltas[s] = random_values(stage->arena_floats, 90 + (uint32_t)s, 1e-2f);
        if (mode == 2) stage->delta = deltas[s];
    }
    for (int t = 1; t <= 9; t++) {
        int differs = 0;
        mesh_run_step(run);
        reference_step(&ref, t, mode == 0, used);
        for (int s = 0; s < P; s++) {
            const Stage *stage = &mesh_cell(mesh, 0, s)->stage;
            differs |= memcmp(stage->params, ref.known[t] + stage_floats_before(mesh, s),
                              sizeof(float) * (size_t)stage->arena_floats) != 0;
        }
        if (!check(!differs, "%d stages, mode %d, %s: other weights after micro-batch %d", P, mode, precision, t))
            break;
    }
    Evaluation newest, expected; // of the newest weights, whatever the last micro-batch saw
    Trainer *one = &run->trainer, *other = &ref.run->trainer;
    memset(&expected, 0, sizeof expected);
    if (evaluate(mesh_model(mesh, 0), &one->data, &one->tokenizer, 100, NULL, NULL, &newest, one->stream) ||
        evaluate(mesh_model(&other->mesh, 0), &other->data, &other->tokenizer, 100, NULL, NULL, &expected,
                 other->stream))
        newest.loss = (double)NAN;
    check(newest.loss == expected.loss, "%d stages, mode %d: held-out loss %g, expected %g", P, mode, newest.loss,
          expected.loss);
    for (int i = 0; i < 12; i++) free(ref.known[i]);
    for (int s = 0; s < P; s++) mesh_cell(mesh, 0, s)->stage.delta = NULL, free(deltas[s]);
    mesh_run_close(run);
    mesh_run_close(ref.run);
}

// An asynchronous pipeline against steps written out from the list of all versions, bit for bit; bf16 products see the
// rounded copy of the version at work. Must fail for: a delay of P - s, the slot next to the right one, a backward with
// the other version, bf16 copies of the version before, an evaluation of older weights.
static void test_async_steps(void) {
    write_corpus();
    for (int mode = 0; mode < 3; mode++) {
        async_case(3, mode, "fp32");
        if (device_has_bf16()) async_case(4, mode, "bf16");
    }
    async_case(6, 0, "fp32");
    async_case(1, 1, "fp32");
}

// The anchor: what it delivers is the gradient of the parameters of the step it claims, bit for bit, computed while the
// fast circuit went on; a synchronous one, computed from newer parameters, fails.
static void test_anchor(void) {
    enum { DELAY = 3, STEPS = 14 };
    write_corpus();
    MeshRun *run = mesh_run_open(DEEP "-n 100 --precision fp32 -p 0.5 -x 2 -y 3 --anchor-delay 3 --anchor-threads 2");
    Trainer *trainer = &run->trainer;
    Anchor *anchor = &trainer->anchor;
    int64_t n, deliveries = 0;
    float *snapshot = NULL, *now;
    double loss;
    Stage whole;
    Stream *stream = test_stream(PRECISION_FP32, 2);
    stage_table(&whole, &trainer->config, 0, trainer->config.n_layers);
    stage_plan(&whole, trainer->B, trainer->T, 1, 0);
    stage_alloc(&whole, stream);
    for (int step = 0; step < STEPS; step++) {
        if (anchor->launched >= 0 && step == anchor->launched + DELAY) {
            anchor_state(anchor, 1);
            int64_t at = 0;
            for (int t = 0; t < whole.n_tensors; at += whole.tensors[t++].n)
                for (int64_t i = 0; i < whole.tensors[t].n; i++)
                    whole.params[whole.tensors[t].offset + i] = float_of_bf16(bf16_of_float(snapshot[at + i]));
            stage_gradients(&whole, &anchor->tokens, trainer->B, &loss, NULL, NULL, stream);
            for (int t = 0; t < whole.n_tensors; t++)
                check(anchor->stage.tensors[t].left_out || memcmp(whole.grads + whole.tensors[t].offset,
                                                                  anchor->stage.grads + anchor->stage.tensors[t].offset,
                                                                  sizeof(float) * (size_t)whole.tensors[t].n) == 0,
                      "step %d: the gradient of %s is not that of the snapshot", step, whole.tensors[t].name);
            check(loss == anchor->loss, "loss %g, of the snapshot %g", anchor->loss, loss);
            now = replica_values(run, 0, ARENA_PARAMS, &n);
            check(memcmp(now, snapshot, sizeof(float) * (size_t)n) != 0, "the fast circuit has not moved");
            free(now);
        }
        int64_t launched = anchor->launched;
        now = replica_values(run, 0, ARENA_PARAMS, &n);
        mesh_run_step(run);
        check(run->result.delivered == (step > 0 && step % DELAY == 0), "step %d: delivered %d", step,
              run->result.delivered);
        if (run->result.delivered)
            check(anchor->delivered == step - DELAY, "step %d: of step %lld", step, (long long)anchor->delivered);
        deliveries += run->result.delivered;
        if (anchor->launched != launched) {
            check(anchor->launched == step, "the snapshot claims step %lld, not %d", (long long)anchor->launched, step);
            free(snapshot);
            snapshot = now;
        } else {
            free(now);
        }
    }
    check(deliveries == (STEPS - 1) / DELAY && anchor->deliveries == deliveries, "%lld deliveries",
          (long long)deliveries);
    free(snapshot);
    stage_free(&whole);
    stream_destroy(stream);
    mesh_run_close(run);
}

// Sums over the rows of an anchor's passes, in double: of states, of gradients over their micro-batch's root mean
// square, and of embeddings.
typedef struct {
    double *xx[2], *sum[2], *xe, *ee, *sum_e; // xx and sum by direction
} BoundarySums;

static void boundary_sums(BoundarySums *s, int C) {
    size_t wide = (size_t)C, square = wide * wide;
    double *at = (double *)calloc(4 * square + 3 * wide, sizeof(double));
    s->xx[0] = at, s->xx[1] = at + square, s->xe = at + 2 * square, s->ee = at + 3 * square;
    s->sum[0] = at + 4 * square, s->sum[1] = s->sum[0] + wide, s->sum_e = s->sum[1] + wide;
}

static void boundary_product(double *to, const double *a, const double *b, int C) {
    for (int i = 0; i < C; i++)
        for (int j = 0; j < C; j++) to[i * C + j] += a[i] * b[j];
}

// Adds N rows of states x, gradients g and embeddings embed[token].
static void boundary_add(BoundarySums *s, const float *x, const float *g, const float *embed, const uint32_t *tokens,
                         int N, int C) {
    double row[3][64], size = 0.0;
    for (int i = 0; i < N * C; i++) size += (double)g[i] * (double)g[i] / (N * C);
    for (int t = 0; t < N; t++) {
        for (int c = 0; c < C; c++) {
            row[0][c] = (double)x[t * C + c], row[1][c] = (double)g[t * C + c] / sqrt(size);
            row[2][c] = (double)embed[(int)tokens[t] * C + c];
            s->sum[0][c] += row[0][c], s->sum[1][c] += row[1][c], s->sum_e[c] += row[2][c];
        }
        boundary_product(s->xx[0], row[0], row[0], C);
        boundary_product(s->xx[1], row[1], row[1], C);
        boundary_product(s->xe, row[0], row[2], C);
        boundary_product(s->ee, row[2], row[2], C);
    }
}

// A stage of layers first .. first+n-1 with the weights of a whole model.
static void part_of_model(Stage *part, const Stage *whole, int first, int n, int B, int T, Stream *stream) {
    check(stage_table(part, &whole->config, first, n) == 0, "%s", error_message);
    check(stage_plan(part, B, T, 1, 0) == 0 && stage_alloc(part, stream) == 0, "%s", error_message);
    for (int i = 0; i < part->n_tensors; i++)
        for (int j = 0; j < whole->n_tensors; j++)
            if (part->tensors[i].index == whole->tensors[j].index)
                memcpy(stage_values(part, ARENA_PARAMS, &part->tensors[i]).data,
                       stage_values(whole, ARENA_PARAMS, &whole->tensors[j]).data,
                       sizeof(float) * (size_t)part->tensors[i].n);
    stage_begin(part, stream);
}

// What the anchor's pass had to see of the boundary before `layer`: the model cut in two there, forward and backward.
static void boundary_seen(BoundarySums *s, const Anchor *anchor, int layer, const float *embed, int pass,
                          const KltMoments *states, Stream *stream) {
    Stage low, high;
    int L = anchor->stage.n_layers, C = anchor->stage.config.channels, T = anchor->T, row = 0;
    part_of_model(&low, &anchor->stage, 0, layer, anchor->micro_batch, T, stream);
    part_of_model(&high, &anchor->stage, layer, L - layer, anchor->micro_batch, T, stream);
    for (int i = 0; i < 4 * C * C + 3 * C; i++) s->xx[0][i] *= pass > 0 ? (double)LEARNER_DECAY : 0.0;
    for (int b = 0; b < anchor->batch; b += anchor->micro_batch) {
        int B = anchor->batch - b < anchor->micro_batch ? anchor->batch - b : anchor->micro_batch, N = B * T;
        const uint32_t *tokens = anchor->tokens.tokens + b * T;
        stage_forward(&low, 0, tokens, NULL, B, T, NULL, NULL, stream);
        memcpy(stage_input(&high, 0), low.last, sizeof(floatX) * (size_t)(N * C));
        stage_forward(&high, 0, tokens, NULL, B, T, NULL, NULL, stream);
        head_loss(&high, anchor->tokens.targets + b * T, N, 1, 1e-3f, b == 0, stream);
        stage_backward(&high, 0, NULL, B, T, b == 0, NULL, stream);
        boundary_add(s, low.last, high.d.dx, embed, tokens, N, C);
        check_close(states->sample + row * C, low.last, N * C, 1e-6, "rows of the sample");
        check(memcmp(states->tokens + row, tokens, sizeof *tokens * (size_t)N) == 0, "tokens of the sample");
        row += N;
    }
    check(states->n_sample == row, "%d rows in the sample, not %d", states->n_sample, row);
    stage_free(&low);
    stage_free(&high);
}

static void check_sums(const float *got, const double *sums, int n, const char *what, int layer, int pass) {
    float *expected = (float *)malloc(sizeof(float) * (size_t)n);
    char label[96];
    for (int i = 0; i < n; i++) expected[i] = (float)sums[i];
    snprintf(label, sizeof label, "layer %d, pass %d: %s", layer, pass, what);
    check_close(got, expected, n, 1e-5, label);
    free(expected);
}

// What the anchor's hook collects at each boundary over two passes of three micro-batches, the last a short one,
// against sums of states and gradients of the model cut in two there, and of the embedding the run began with. Must
// fail for: the layer before or after, rows of another micro-batch, today's embedding, no decay, raw gradients.
static void anchor_moments_case(const char *family) {
    char words[512];
    snprintf(words, sizeof words,
             "--init family=%s,d=20,layers=7,heads=2,kv=1,ffn=28,vocab=258,ctx=64 -d @/corpus.jsonl -b 5 "
             "--micro-batch 2 -t 13 -l 1e-2 --threads 2 -n 100 --precision fp32 --codec klt -p 0.7 -x 2 -y 4",
             family);
    MeshRun *run = mesh_run_open(words);
    Anchor *anchor = &run->trainer.anchor;
    const Learner *learner = &anchor->learner;
    BoundarySums sums[3];
    Stream *stream = test_stream(PRECISION_FP32, 2);
    int64_t n;
    int C = run->trainer.config.channels, rows = anchor->batch * anchor->T;
    float *embed = replica_values(run, 0, ARENA_PARAMS, &n); // the first tensor
    if (!check(learner->n_boundaries == 3, "%d boundaries", learner->n_boundaries)) exit(1);
    for (int b = 0; b < learner->n_boundaries; b++) boundary_sums(&sums[b], C);
    for (int pass = 0; pass < 2; pass++) {
        launch_anchor(&run->trainer);
        check(anchor_state(anchor, 1) == ANCHOR_READY, "the pass failed: %s", anchor->error);
        for (int b = 0; b < learner->n_boundaries; b++) {
            const KltMoments *m = &learner->moments[2 * b], *e = &learner->embedding;
            int layer = anchor->layer[b];
            boundary_seen(&sums[b], anchor, layer, embed, pass, m, stream);
            check_sums(m[0].xx, sums[b].xx[0], C * C, "states, squares", layer, pass);
            check_sums(m[0].sum, sums[b].sum[0], C, "states, sums", layer, pass);
            check_sums(m[0].xe, sums[b].xe, C * C, "states times embeddings", layer, pass);
            check_sums(m[1].xx, sums[b].xx[1], C * C, "gradients, squares", layer, pass);
            check_sums(m[1].sum, sums[b].sum[1], C, "gradients, sums", layer, pass);
            check_sums(e->xx, sums[b].ee, C * C, "embeddings, squares", layer, pass);
            check_sums(e->sum, sums[b].sum_e, C, "embeddings, sums", layer, pass);
            double weight = pass * (double)LEARNER_DECAY * rows + rows;
            check(m[0].weight == weight && m[1].weight == weight && e->weight == weight, "weights %g %g %g, not %g",
                  m[0].weight, m[1].weight, e->weight, weight);
        }
        check(anchor_deliver(anchor) == 0, "%s", error_message);
        for (Stage *stage = mesh_model(&run->trainer.mesh, 0); stage != NULL; stage = stage->next)
            for (int64_t i = 0; i < stage->arena_floats; i++) stage->params[i] *= 1.25f; // as if it had learned
    }
    for (int b = 0; b < learner->n_boundaries; b++) free(sums[b].xx[0]);
    free(embed);
    stream_destroy(stream);
    mesh_run_close(run);
}

// A layer has 9 tensors, 7 in OLMo, 12 in Qwen2: the anchor tells by them where a pass has come.
static void test_anchor_moments(void) {
    write_corpus();
    anchor_moments_case("llama");
    anchor_moments_case("olmo");
    anchor_moments_case("qwen2");
}
#endif

// With auto, the fast circuit goes on while the anchor is held back, and takes the factors once they are there.
static void test_anchor_auto(void) {
    write_corpus();
    MeshRun *run = mesh_run_open(DEEP "-n 100 -p 0.5 -x 2 -y 2 --anchor-delay auto");
    Anchor *anchor = &run->trainer.anchor;
    anchor->held = 1; // before the first launch, so the thread does not look at it yet
    for (int step = 0; step < 12; step++) {
        mesh_run_step(run);
        check(!run->result.delivered, "step %d: factors from a pass that is held back", step);
    }
    check(anchor->deliveries == 0 && run->trainer.progress.step == 12, "the fast circuit did not go on");
    pthread_mutex_lock(&anchor->mutex);
    anchor->held = 0;
    pthread_cond_broadcast(&anchor->changed);
    pthread_mutex_unlock(&anchor->mutex);
    check(anchor_state(anchor, 1) == ANCHOR_READY, "the pass failed: %s", anchor->error);
    mesh_run_step(run);
    check(run->result.delivered && anchor->delivered == 0, "the factors were not taken");
    mesh_run_close(run);
}

#ifndef DEVICE_CUDA // reads and writes the host's tensors
// Factors of rank r filter nearly as full ones do when the momentum's spectrum decays; --alpha 1 is plain AdamW.
static void test_anchor_rank(void) {
    write_corpus();
    check_run(0, NULL, DEEP "-n 5 -p 0.5 -x 2 -y 2 --anchor-delay 2 --alpha 1 -o @/alpha1", "done: 5 steps");
    check_run(0, NULL, DEEP "-n 5 -p 0.5 -x 1 -y 2 -o @/plain", "done: 5 steps");
    check_same_model("alpha1", "plain");
    check_run(0, NULL, DEEP "-n 5 -p 0.5 -x 2 -y 2 --anchor-delay 2 -o @/alpha3", "done: 5 steps");
    check(!same_file("alpha3/latest/model.bin", "plain/latest/model.bin"), "the filter does nothing");
    MeshRun *cut = mesh_run_open(DEEP QUIET "-p 0.5 -x 2 -y 2 --anchor-delay 2 --anchor-rank 6 --tau 1e-4");
    MeshRun *full = mesh_run_open(DEEP QUIET "-p 0.5 -x 2 -y 2 --anchor-delay 2 --anchor-rank 0 --tau 1e-4");
    for (int step = 0; step < 2; step++) mesh_run_step(cut), mesh_run_step(full);
    Anchor *a = &cut->trainer.anchor, *b = &full->trainer.anchor; // the first pass is done and not delivered yet
    check(anchor_state(a, 1) == ANCHOR_READY && anchor_state(b, 1) == ANCHOR_READY, "the first pass failed");
    const Factor *f = &a->sets[1 - a->front].of[7], *g = &b->sets[1 - b->front].of[7]; // gate_proj of layer 0
    check(f->r == 6 && g->r == 24, "ranks %d and %d", f->r, g->r);
    check_close(f->s, g->s, 6, 2e-2, "leading singular values");
    int64_t n;
    float *grad = random_values((int64_t)f->m * f->n, 71, 1.0f),
          *other = (float *)malloc(sizeof(float) * (size_t)f->m * (size_t)f->n);
    float *momentum = b->stage.m + b->stage.tensors[7].offset;
    n = (int64_t)f->m * f->n;
    memcpy(grad, momentum, sizeof(float) * (size_t)n); // a gradient like the anchor's passes
    memcpy(other, momentum, sizeof(float) * (size_t)n);
    spectral_filter(grad, f->u, f->d, f->v, f->m, f->n, f->r, 0.0f, cut->trainer.stream);
    spectral_filter(other, g->u, g->d, g->v, g->m, g->n, g->r, 0.0f, full->trainer.stream);
    // the full filter turns M into sum d^2 s u v^T, and the cut one ends the sum early
    double all = 0.0, rest = 0.0;
    for (int i = 0; i < g->r; i++) {
        double passed = (double)g->d[i] * g->d[i] * g->s[i];
        all += passed * passed, rest += i >= f->r ? passed * passed : 0.0;
    }
    double error = relative_error(grad, other, n), expected = sqrt(rest / all);
    check(fabs(error - expected) < 0.05 * expected, "rank 6 of 24 differs by %g, the spectrum says %g", error,
          expected);
    free(grad);
    free(other);
    mesh_run_close(cut);
    mesh_run_close(full);
}
#endif

// The step lines of a run's log without what a clock on the wall has to do with; the caller frees them.
static json_t *logged_steps(const char *run) {
    char path[PATH_MAX], *line = NULL;
    size_t room = 0;
    json_t *steps = json_array();
    snprintf(path, sizeof path, "%s/log.jsonl", scratch_path(run));
    FILE *log = fopen(path, "r");
    while (log != NULL && getline(&line, &room, log) > 0) {
        json_t *step = json_loads(line, 0, NULL);
        json_object_del(step, "tok_s");
        json_object_del(step, "elapsed");
        if (json_object_get(step, "anchor") != NULL) json_object_del(json_object_get(step, "anchor"), "seconds");
        if (json_object_get(step, "loss") != NULL) json_array_append(steps, step);
        json_decref(step);
    }
    if (log != NULL) fclose(log);
    free(line);
    return steps;
}

static void check_same_history(const char *a, const char *b, const char *what) {
    char path[512];
    json_t *x = logged_steps(a), *y = logged_steps(b);
    check(json_array_size(x) == 11 && json_equal(x, y), "%s: the logs of %s and %s differ", what, a, b);
    json_decref(x);
    json_decref(y);
    snprintf(path, sizeof path, "%s/latest/run.json", a);
    x = json_load_file(scratch_path(path), 0, NULL);
    snprintf(path, sizeof path, "%s/latest/run.json", b);
    y = json_load_file(scratch_path(path), 0, NULL);
    check(same_shards(a, b, 1) >= 2, "%s: other shards", what);
    check(json_equal(json_object_get(x, "averages_begun"), json_object_get(y, "averages_begun")), "%s: averages", what);
    json_t *anchor = json_object_get(x, "anchor"), *other = json_object_get(y, "anchor");
    if (json_is_object(anchor)) json_object_del(anchor, "seconds");
    if (json_is_object(other)) json_object_del(other, "seconds");
    check(json_equal(anchor, other), "%s: run.json has another anchor", what);
    json_decref(x);
    json_decref(y);
}

// A run of 11 steps at once, and the same one stopped after 5 and resumed: the same history, simulated time too.
static void check_resumed(const char *words, const char *whole, const char *parts) {
    char command[1024];
    snprintf(command, sizeof command, DEEP "-n 11 %s --device-tflops 1e-5 -o @/%s", words, whole);
    check_run(0, NULL, command, "done: 11 steps");
    snprintf(command, sizeof command, DEEP "-n 11 %s --device-tflops 1e-5 -o @/%s --stop-after 5", words, parts);
    check_run(0, NULL, command, "--resume");
    snprintf(command, sizeof command, "-o @/%s --resume", parts);
    check_run(0, NULL, command, "done: 11 steps");
    check_same_history(whole, parts, words);
}

// Resumed or not, same bits: masks, anchor in flight, outer steps in flight; and the same history, simulated time too.
static void test_mesh_resume(void) {
    static const char *const variants[] = {
        "-p 0.5 -x 2 -y 3 --anchor-delay 3 --link-mbps 1",
        "-p 0.5 -x 3 -y 2 --anchor-delay 3 --local-steps 4 --overlap 2 --link-mbps 1",
        "-x 2 -y 2 --dp dense --link-mbps 1", "-x 2 --dp none --link-mbps 1"};
    static const int n_cells[] = {3, 4, 4, 2};
    char whole[64], parts[64], path[256];
    write_corpus();
    for (int i = 0; i < 4; i++) {
        int anchored = i < 2;
        snprintf(whole, sizeof whole, "m%d", i);
        snprintf(parts, sizeof parts, "n%d", i);
        check_resumed(variants[i], whole, parts);
        check_same_latest(whole, parts, anchored_files, 1 + anchored, variants[i]);
        check(same_shards(whole, parts, 1) == n_cells[i], "%s: other shards", variants[i]);
        snprintf(path, sizeof path, "%s/latest/anchor.bin", whole);
        check(file_exists(scratch_path(path)) == anchored, "%s: anchor.bin", variants[i]);
    }
    check_run(1, NULL, "-o @/m0 --resume -n 20 -x 4", "the run had");
}

// The state of a cell of a run, as if it stood after `step` steps.
static CellState shard_state(const MeshRun *run, const Cell *cell, int64_t step) {
    CellState about = cell_state(&run->trainer, cell);
    about.step = step;
    return about;
}

static Cell *run_cell(const MeshRun *run, int replica, int stage) {
    return mesh_cell(&run->trainer.mesh, replica, stage);
}

// Writes all shards of a run into a folder of the scratch folder, with the parameters.
static void save_shards(const MeshRun *run, const char *folder) {
    char path[PATH_MAX];
    const Mesh *mesh = &run->trainer.mesh;
    check(file_make_folders(scratch_path(folder)) == 0, "%s", error_message);
    for (int i = 0; i < mesh->n_replicas * mesh->n_stages; i++) {
        const Cell *cell = &mesh->cells[i];
        CellState about = cell_state(&run->trainer, cell);
        shard_path(path, scratch_path(folder), cell->replica, cell->index);
        check(cell_save(cell, &about, path, 1) == 0, "%s", error_message);
    }
}

// The replica's model file, written from its stages and from its shards.
static void check_merge(const MeshRun *run, const char *folder, int replica) {
    const Trainer *trainer = &run->trainer;
    const Stage *model = mesh_model(&trainer->mesh, replica);
    Arena arena = model->meets ? ARENA_GLOBAL : ARENA_PARAMS;
    check(model_save_native(model, arena, trainer->side_files, scratch_path("saved.bin"), DTYPE_F32) == 0, "%s",
          error_message);
    check(model_merge(scratch_path(folder), &trainer->config, trainer->mesh.n_stages, replica, trainer->side_files,
                      scratch_path("merged.bin")) == 0,
          "%s", error_message);
    check(same_file("saved.bin", "merged.bin"), "%s: the merged model of replica %d differs", folder, replica);
    check(!file_exists(scratch_path("merged.bin.tmp")), "a part was left behind");
    unlink(scratch_path("saved.bin"));
    unlink(scratch_path("merged.bin"));
}

// A shard read by the cell of a run that has done nothing yet gives a shard of the same bytes.
static void check_moved(const MeshRun *fresh, const char *folder, int replica, int stage, int64_t step) {
    char path[PATH_MAX], again[128], name[128];
    Cell *cell = run_cell(fresh, replica, stage);
    CellState about = shard_state(fresh, cell, step);
    snprintf(name, sizeof name, "%s/cell_%d_%d.bin", folder, replica, stage);
    snprintf(again, sizeof again, "%s/again.bin", folder);
    snprintf(path, sizeof path, "%s", scratch_path(again));
    check(cell_save(cell, &about, path, 1) == 0 && !same_file(name, again), "%s is that of a fresh cell", name);
    check(cell_load(cell, &about, scratch_path(name), 1) == 0, "%s", error_message);
    check(cell->stage.has_basis == (cell->updates > 0) && cell->updates > 0, "%s: updates", name);
    check(cell_save(cell, &about, path, 1) == 0 && same_file(name, again), "%s: read and written it differs", name);
}

// A shard read by the same stage's cell of another replica: the same tensors.
static void check_joined(const MeshRun *fresh, const char *folder, int from, int to, int stage, int64_t step) {
    char path[2][PATH_MAX];
    SafeTensors a, b;
    Cell *cell = run_cell(fresh, to, stage);
    CellState about = shard_state(fresh, cell, step);
    shard_path(path[0], scratch_path(folder), from, stage);
    snprintf(path[1], sizeof path[1], "%s", scratch_path("joined.bin"));
    check(cell_load(cell, &about, path[0], 1) == 0 && cell_save(cell, &about, path[1], 1) == 0, "%s", error_message);
    if (!check(safetensors_open(&a, path[0]) == 0 && safetensors_open(&b, path[1]) == 0, "%s", error_message)) return;
    check(same_tensors(&a, &b), "stage %d of replica %d differs in replica %d", stage, from, to);
    safetensors_close(&a);
    safetensors_close(&b);
}

// Both sides of all boundaries remember the same in two runs.
static void check_same_ends(const MeshRun *a, const MeshRun *b) {
    CodecState of_a[CODEC_STATES], of_b[CODEC_STATES];
    for (int i = 0; i < mesh_n_ends(&a->trainer.mesh); i++) {
        int n = codec_end_states(&a->trainer.mesh.ends[i], of_a);
        check(codec_end_states(&b->trainer.mesh.ends[i], of_b) == n, "end %d: other states", i);
        for (int k = 0; k < n; k++)
            check(memcmp(of_a[k].data, of_b[k].data, (size_t)of_a[k].n_bytes) == 0, "end %d: another %s", i,
                  of_a[k].name);
    }
}

// A run whose cells have read another's shards goes on as that one does; both without an anchor.
static void check_goes_on(MeshRun *run, MeshRun *fresh, const char *folder) {
    char a[192], b[192], other[80];
    const Mesh *mesh = &run->trainer.mesh;
    fresh->trainer.progress = run->trainer.progress, fresh->trainer.outer = run->trainer.outer;
    for (int step = 0; step < 3; step++) mesh_run_step(run), mesh_run_step(fresh);
    snprintf(other, sizeof other, "%s_fresh", folder);
    save_shards(run, folder);
    save_shards(fresh, other);
    for (int i = 0; i < mesh->n_replicas * mesh->n_stages; i++) {
        snprintf(a, sizeof a, "%s/cell_%d_%d.bin", folder, mesh->cells[i].replica, mesh->cells[i].index);
        snprintf(b, sizeof b, "%s/cell_%d_%d.bin", other, mesh->cells[i].replica, mesh->cells[i].index);
        check(same_file(a, b), "three steps later %s differs", a);
    }
}

// Shards of all kinds of runs: saved twice, and read by a cell that knew nothing, they are the same bytes; another
// replica's cell takes them; the stages' weights merge into the model file; and the run goes on. Must fail for: an
// arena, versions, bases, warm starts, an end of the codec, counters or clocks left out; parameters merged for merged
// ones.
static void test_shards(void) {
    static const struct {
        const char *words, *holds[3]; // in the shard of the last replica's second stage
    } cases[] = {
        {"-p 0.5 -x 2 -y 3 --anchor 0 --local-steps 2 --fragments 2 --link-mbps 1 --device-tflops 1e-5 --optimizer "
         "rotate --rotate-every 2",
         {"pending.model.layers.3.mlp.up_proj.weight", "bases", "powersgd"}},
        {"-y 3 --codec aqsgd -x 1 --micro-batch 5 --schedule async --no-stash --optimizer pipemare --link-mbps 1 "
         "--device-tflops 1e-5",
         {"codec.before.seen", "older.1.model.layers.3.mlp.up_proj.weight", "delta.model.layers.3.mlp.up_proj.weight"}},
        {"--codec klt -p 0.8 -x 3 -y 2 --anchor-delay 3 --dp none",
         {"codec.before.backward", "m.lm_head.weight", "v.model.norm.weight"}}};
    char folder[64], again[64], name[2][128];
    write_corpus();
    for (int i = 0; i < 3; i++) {
        char words[1024];
        snprintf(words, sizeof words, DEEP "-n 100 %s", cases[i].words);
        MeshRun *run = mesh_run_open(words), *fresh = mesh_run_open(words);
        const Mesh *mesh = &run->trainer.mesh;
        int R = mesh->n_replicas, Y = mesh->n_stages;
        for (int step = 0; step < 5; step++) mesh_run_step(run);
        snprintf(folder, sizeof folder, "shards%d", i);
        snprintf(again, sizeof again, "shards%d_again", i);
        save_shards(run, folder);
        save_shards(run, again);
        for (int r = 0; r < R; r++) {
            for (int s = 0; s < Y; s++) {
                snprintf(name[0], sizeof name[0], "%s/cell_%d_%d.bin", folder, r, s);
                snprintf(name[1], sizeof name[1], "%s/cell_%d_%d.bin", again, r, s);
                check(same_file(name[0], name[1]), "%s: saved twice it differs", name[0]);
                check_moved(fresh, folder, r, s, 5);
            }
            check_merge(run, folder, r);
        }
        check_same_ends(run, fresh);
        if (!run->trainer.anchored) check_goes_on(run, fresh, again);
        for (int s = 0; s < Y; s++) check_joined(fresh, folder, R - 1, 0, s, 5);
        snprintf(name[0], sizeof name[0], "%s/cell_%d_1.bin", folder, R - 1);
        SafeTensors file;
        if (check(safetensors_open(&file, scratch_path(name[0])) == 0, "%s", error_message)) {
            for (int k = 0; k < 3; k++)
                check(safetensors_find(&file, cases[i].holds[k]) != NULL, "%s has no %s", name[0], cases[i].holds[k]);
            safetensors_close(&file);
        }
        mesh_run_close(run);
        mesh_run_close(fresh);
    }
}

// A copy of a shard in which the first `from` is `to`, of the same length; "" for `from`: cut to n bytes.
static const char *spoilt_shard(const unsigned char *good, size_t size, const char *from, const char *to, size_t n) {
    const char *path = scratch_path("spoilt.bin");
    unsigned char *bytes = (unsigned char *)malloc(size);
    memcpy(bytes, good, size);
    unsigned char *at = (unsigned char *)memmem(bytes, size, from, strlen(from));
    if (*from != '\0' && check(at != NULL && strlen(from) == strlen(to), "the shard has no %s", from))
        memcpy(at, to, strlen(to));
    write_file(path, bytes, *from == '\0' ? n : size);
    free(bytes);
    return path;
}

static void check_refused(Cell *cell, const CellState *about, const char *path, const char *reason) {
    char expected[3 * PATH_MAX];
    snprintf(expected, sizeof expected, "%s: ", path);
    error_message[0] = '\0';
    check(cell_load(cell, about, path, 1) == -1 && strncmp(error_message, expected, strlen(expected)) == 0 &&
              strstr(error_message, reason) != NULL && strchr(error_message, '\n') == NULL,
          "not refused for '%s': %s", reason, error_message);
}

#define SHARD_RUN(ffn, optimizer)                                                                                      \
    "--init d=16,layers=3,heads=2,kv=1,ffn=" ffn ",vocab=258,ctx=32 -d @/corpus.jsonl -b 3 -t 8 --threads 2 -n 100 "   \
    "-x 2 -y 3 --anchor 0 -p 0.5 --local-steps 2 --micro-batch 3 --schedule async --device-tflops 1e-5 "               \
    "--optimizer " optimizer

// Shards that are cut short, of another stage, step, version or shape, with a tensor missing, too many, of another
// dtype, or a description that makes no sense; and any byte of the header changed.
static void test_shards_hostile(void) {
    static const struct {
        const char *from, *to, *reason;
    } spoils[] = {{"\"m.model.layers.1.", "\"x.model.layers.1.", "tensor m.model.layers.1.input_layernorm.weight is m"},
                  {"\"dtype\":\"F32\"", "\"dtype\":\"I32\"", " is I32 [16], not F32 [16]"},
                  {"\"shape\":[16]", "\"shape\":[15]", "the shape needs 60 bytes"},
                  {"\"shape\":[24,16]", "\"shape\":[16,24]", " is F32 [16,24], not F32 [24,16]"},
                  {"{\\\"shard\\\":1", "{\\\"shard\\\":2", "is of version 2, this program reads version 1"},
                  {"{\\\"shard\\\":1", "{\\\"shart\\\":1", "does not say which cell of a run"},
                  {"\"cell\":\"{", "\"cell\":\"[", "does not say which cell of a run"},
                  {"{\"cell\"", "{\"bell\"", "does not say which cell of a run"},
                  {"\\\"stages\\\":3", "\\\"stages\\\":4", "is of stage 1 of 4, stage 1 of 3 is needed"},
                  {"\\\"step\\\":3", "\\\"stop\\\":3", "is of step -1, step 3 is needed"},
                  {"\\\"updates\\\":3", "\\\"updates\\\":4", "how many updates the cell has made"},
                  {"\\\"updates\\\":3", "\\\"updater\\\":3", "how many updates the cell has made"},
                  {"\\\"merge_at\\\"", "\\\"merge_to\\\"", "when the cell's averages are there"},
                  {"\\\"backwards\\\":", "\\\"backyards\\\":", "where the asynchronous pipeline stands"},
                  {"\\\"flights\\\":", "\\\"flighty\\\":", "where the asynchronous pipeline stands"}};
    char path[PATH_MAX];
    FileMap map;
    write_corpus();
    MeshRun *run = mesh_run_open(SHARD_RUN("24", "adamw")), *fresh = mesh_run_open(SHARD_RUN("24", "adamw"));
    MeshRun *wider = mesh_run_open(SHARD_RUN("32", "adamw")), *other = mesh_run_open(SHARD_RUN("24", "pipemare"));
    for (int step = 0; step < 3; step++) mesh_run_step(run), mesh_run_step(wider), mesh_run_step(other);
    save_shards(run, "hostile");
    save_shards(wider, "hostile_wider");
    save_shards(other, "hostile_other");
    Cell *cell = run_cell(fresh, 0, 1);
    CellState about = shard_state(fresh, cell, 3), later = shard_state(fresh, cell, 4);
    snprintf(path, sizeof path, "%s", scratch_path("hostile/cell_0_1.bin"));
    check_refused(cell, &about, scratch_path("hostile/cell_9_9.bin"), "open: No such file");
    check_refused(cell, &about, scratch_path("hostile/cell_0_0.bin"), "is of stage 0 of 3, stage 1 of 3 is needed");
    check_refused(cell, &later, path, "is of step 3, step 4 is needed");
    check_refused(cell, &about, scratch_path("hostile_wider/cell_0_1.bin"), " is F32 [32,16], not F32 [24,16]");
    check_refused(cell, &about, scratch_path("hostile_other/cell_0_1.bin"), "tensors, the cell has");
    CellState unmet = about;
    unmet.n_fragments++;
    check_refused(cell, &unmet, path, "when the cell's averages are there");
    if (!check(file_map(&map, path) == 0, "%s", error_message)) return;
    for (size_t i = 0; i < sizeof spoils / sizeof *spoils; i++)
        check_refused(cell, &about, spoilt_shard(map.data, map.size, spoils[i].from, spoils[i].to, 0),
                      spoils[i].reason);
    for (size_t n = 0; n < map.size; n += n < 64 ? 7 : 9973)
        check_refused(cell, &about, spoilt_shard(map.data, map.size, "", "", n), "");
    size_t header = 8 + (size_t)map.data[0] + 256 * (size_t)map.data[1];
    unsigned char *bytes = (unsigned char *)malloc(map.size);
    for (uint32_t i = 0; i < 500; i++) { // what is still a shard is read
        Philox draw = rand_block(7, RAND_INIT, 0, i);
        memcpy(bytes, map.data, map.size);
        bytes[draw.v[0] % header] = (unsigned char)draw.v[1];
        write_file(scratch_path("spoilt.bin"), bytes, map.size);
        if (cell_load(cell, &about, scratch_path("spoilt.bin"), 1) != 0)
            check(strstr(error_message, "spoilt.bin: ") != NULL, "%s", error_message);
    }
    check(cell_load(cell, &about, path, 1) == 0, "the good shard is refused: %s", error_message);
    free(bytes);
    file_unmap(&map);
    mesh_run_close(run);
    mesh_run_close(fresh);
    mesh_run_close(wider);
    mesh_run_close(other);
}

// Merges of shards that do not belong together, or are not there, leave no model file behind.
static void test_merge_refused(void) {
    char folder[PATH_MAX], out[PATH_MAX];
    write_corpus();
    MeshRun *run = mesh_run_open(DEEP "-n 100 -y 2"), *tied;
    const Trainer *trainer = &run->trainer;
    snprintf(folder, sizeof folder, "%s", scratch_path("merge"));
    snprintf(out, sizeof out, "%s", scratch_path("merge/model.bin"));
    mesh_run_step(run);
    save_shards(run, "merge");
    check_merge(run, "merge", 0);
    check(model_merge(folder, &trainer->config, 2, 1, trainer->side_files, out) == -1 &&
              strstr(error_message, "cell_1_0.bin: open") != NULL,
          "a missing shard: %s", error_message);
    check(model_merge(folder, &trainer->config, 1, 0, trainer->side_files, out) == -1 &&
              strstr(error_message, "is of stage 0 of 2, stage 0 of 1 is needed") != NULL,
          "one stage of two: %s", error_message);
    check(file_make_folders(scratch_path("merge_over")) == 0 &&
              model_merge(folder, &trainer->config, 2, 0, trainer->side_files, scratch_path("merge_over")) == -1 &&
              !file_exists(scratch_path("merge_over.tmp")),
          "a folder in the way: %s", error_message);
    Config wider = trainer->config;
    wider.ffn++;
    check(model_merge(folder, &wider, 2, 0, trainer->side_files, out) == -1 &&
              strstr(error_message, "is F32 [40,24], not F32 [41,24]") != NULL,
          "another config: %s", error_message);
    Cell *cell = run_cell(run, 0, 1);
    CellState about = cell_state(trainer, cell);
    check(cell_save(cell, &about, scratch_path("merge/cell_0_1.bin"), 0) == 0, "%s", error_message);
    check(model_merge(folder, &trainer->config, 2, 0, trainer->side_files, out) == -1 &&
              strstr(error_message, "tensor p.model.layers.") != NULL && strstr(error_message, "is missing") != NULL,
          "a shard without parameters: %s", error_message);
    about.step = 7;
    check(cell_save(cell, &about, scratch_path("merge/cell_0_1.bin"), 1) == 0, "%s", error_message);
    check(model_merge(folder, &trainer->config, 2, 0, trainer->side_files, out) == -1 &&
              strstr(error_message, "is of step 7, step 1 is needed") != NULL,
          "shards of two steps: %s", error_message);
    check(!file_exists(out) && !file_exists(scratch_path("merge/model.bin.tmp")), "a model file was left behind");
    mesh_run_close(run);
    tied = mesh_run_open("--init d=16,layers=2,heads=2,kv=1,ffn=24,vocab=258,ctx=32,tied=1 -d @/corpus.jsonl -b 2 -t 8 "
                         "-n 100 --threads 2");
    mesh_run_step(tied);
    save_shards(tied, "merge_tied");
    check_merge(tied, "merge_tied", 0);
    mesh_run_close(tied);
}

// The codec's bias, its factors, and what the anchor's codec remembers: resumed or not, same bits. And what cannot be
// is refused. Must fail for: D, a set of factors, the count of passes, their bytes or a controller forgotten.
static void test_bias_resume(void) {
    static const char *const variants[] = {
        "-p 0.5 -x 2 -y 3 --anchor-delay 3 --anchor-use bias --link-mbps 1",
        "--codec topk -p 0.7 -x 3 -y 2 --anchor-delay 4 --anchor-use both --local-steps 4 --recompute",
        "--codec klt -p 0.8 -x 2 -y 2 --anchor-delay 3 --anchor-use both"};
    char whole[64], parts[64];
    write_corpus();
    for (int i = 0; i < 3; i++) {
        snprintf(whole, sizeof whole, "a%d", i);
        snprintf(parts, sizeof parts, "b%d", i);
        check_resumed(variants[i], whole, parts);
        check_same_latest(whole, parts, anchored_files, 2, variants[i]);
    }
    check_run(1, NULL, "-o @/a0 --resume --anchor-use both -n 20", "--anchor-use differs");
    check_run(1, NULL, DEEP "-n 2 -x 2 -y 2 --anchor-use bias -o @/refused", "--anchor-use has no effect");
    check_run(1, NULL, DEEP "-n 2 -x 2 -y 2 --anchor 1 --anchor-use bias -o @/refused", "nothing is masked");
    check_run(1, NULL, DEEP "-n 2 --codec aqsgd -x 2 -y 2 --anchor-use bias -o @/refused", "aqsgd's caches");
}

// --dp dense: two replicas with half the batch each are one with the whole batch, up to the order of sums.
static void test_dense(void) {
    int64_t n, m;
    write_corpus();
    MeshRun *two = mesh_run_open(DEEP QUIET "-b 3 -x 2 --dp dense -l 0"),
            *one = mesh_run_open(DEEP QUIET "-b 6 -x 1 -l 0");
    mesh_run_step(two);
    mesh_run_step(one);
    float *a = replica_values(two, 0, ARENA_GRADS, &n), *b = replica_values(one, 0, ARENA_GRADS, &m);
    float *c = replica_values(two, 1, ARENA_GRADS, &n);
    check(n == m, "sizes");
    check_close(a, b, n, 2e-6, "gradient of two replicas");
    check(memcmp(a, c, sizeof(float) * (size_t)n) == 0, "the replicas have other gradients");
    check(fabs(two->result.loss - one->result.loss) < 1e-6, "losses %g and %g", two->result.loss, one->result.loss);
    // each replica sends its gradient or the sum once: 2 * (R-1) / R of the parameters a replica
    check(two->result.sent.bytes[TRAFFIC_DP] == 2 * 4 * two->trainer.n_params, "%lld bytes",
          (long long)two->result.sent.bytes[TRAFFIC_DP]);
    free(a);
    free(b);
    free(c);
    mesh_run_close(two);
    mesh_run_close(one);
}

// Averages whose replicas share no memory: place p is a mesh that hosts replica p alone, and a message goes from the
// links of one place to those of another when it is its turn. All fragments and gradients of all stages are in flight.
enum { PLACES = 3, PLACE_STAGES = 2, PLACE_FRAGMENTS = 3, PLACE_MEETINGS = PLACE_STAGES * (PLACE_FRAGMENTS + 1) };

typedef struct {
    MeshRun *whole, *runs[PLACES]; // the same training; whole: all replicas in one process
    Meeting meetings[PLACES][PLACE_MEETINGS];
    float *state[PLACES]; // of replica p, as remembered
    int n_places;
    uint64_t turn;
} Apart;

// The cell is another process's: nothing of its memory is there.
static void hide_cell(Cell *cell) {
    Stage *stage = &cell->stage;
    float **arenas[] = {&stage->params, &stage->grads, &stage->m,       &stage->v,        &stage->global,
                        &stage->outer,  &stage->error, &stage->pending, &cell->powersgd_q};
    for (size_t i = 0; i < sizeof arenas / sizeof *arenas; i++) {
        device_free(*arenas[i]);
        *arenas[i] = NULL;
    }
    cell->hosted = 0;
}

static void apart_open(Apart *apart, int n_places, const char *words) {
    memset(apart, 0, sizeof *apart);
    apart->n_places = n_places;
    for (int p = -1; p < n_places; p++) {
        MeshRun *run = mesh_run_open(words);
        Mesh *mesh = &run->trainer.mesh;
        for (int step = 0; step < 2; step++) mesh_run_step(run);
        *(p < 0 ? &apart->whole : &apart->runs[p]) = run;
        for (int i = 0; i < n_places * PLACE_STAGES && p >= 0; i++)
            if (mesh->cells[i].replica != p) hide_cell(&mesh->cells[i]);
        for (int i = 0; i < PLACE_MEETINGS && p >= 0; i++)
            check(meeting_create(mesh, &apart->meetings[p][i], i % PLACE_STAGES, &run->trainer.outer) == 0, "%s",
                  error_message);
    }
}

static void apart_close(Apart *apart) {
    for (int p = 0; p < apart->n_places; p++) {
        for (int i = 0; i < PLACE_MEETINGS; i++) meeting_destroy(&apart->meetings[p][i]);
        free(apart->state[p]);
        mesh_run_close(apart->runs[p]);
    }
    mesh_run_close(apart->whole);
}

static const Outer *apart_outer(const Apart *apart, int meeting) {
    return meeting / PLACE_STAGES < PLACE_FRAGMENTS ? &apart->whole->trainer.outer : NULL;
}

static void apart_begin(Apart *apart, int64_t turn) {
    for (int p = 0; p < apart->n_places; p++) {
        for (int i = 0; i < PLACE_MEETINGS; i++) {
            const Outer *outer = apart_outer(apart, i);
            int fragment = outer != NULL ? i / PLACE_STAGES : ALL_GRADIENTS;
            check(meeting_begin(&apart->runs[p]->trainer.mesh, &apart->meetings[p][i], outer, i % PLACE_STAGES,
                                fragment, turn + fragment) == 0,
                  "%s", error_message);
        }
    }
}

// The same averages in one process.
static void apart_average_whole(Apart *apart, int64_t turn) {
    Mesh *mesh = &apart->whole->trainer.mesh;
    for (int f = 0; f < PLACE_FRAGMENTS; f++)
        check(mesh_begin_merge(mesh, &apart->whole->trainer.outer, f, turn + f) == 0, "%s", error_message);
    check(mesh_sum_gradients(mesh) == 0, "%s", error_message);
}

// One message of meeting i from place p to place q, a mean before a part or the other way round.
static void carry(Apart *apart, int i, int p, int q, int mean_first) {
    Meeting *from = &apart->meetings[p][i], *to = &apart->meetings[q][i];
    Link *links[2][2] = {{meeting_up(from, p, q), meeting_up(to, p, q)},
                         {meeting_down(from, q, p), meeting_down(to, q, p)}};
    Link *const *link = link_waiting(links[mean_first][0]) > 0 ? links[mean_first] : links[!mean_first];
    Mesh *mesh = &apart->runs[p]->trainer.mesh;
    int64_t n_bytes;
    double arrival;
    if (p == q || link_waiting(link[0]) == 0) return;
    check(link_recv(link[0], mesh->message, mesh->message_bytes, &n_bytes, &arrival) == LINK_OK &&
              link_send(link[1], mesh->message, n_bytes, arrival) == 0,
          "%s", error_message);
}

// How many meetings are complete at all of the first n places.
static int apart_complete(const Apart *apart, int n) {
    int complete = 0;
    for (int i = 0; i < PLACE_MEETINGS; i++) {
        int all = 1;
        for (int p = 0; p < n; p++) all &= meeting_complete(&apart->meetings[p][i]);
        complete += all;
    }
    return complete;
}

// At most `turns` turns of the first n places: a meeting goes on, or a message is carried.
static void apart_drive(Apart *apart, int n, int turns) {
    for (int i = 0; i < turns && apart_complete(apart, n) < PLACE_MEETINGS; i++) {
        Philox draw = rand_block(21, RAND_TEST, 0, apart->turn++);
        int p = (int)(draw.v[0] % (uint32_t)n), meeting = (int)(draw.v[1] % PLACE_MEETINGS);
        if (draw.v[2] % 3 == 0)
            check(meeting_advance(&apart->runs[p]->trainer.mesh, &apart->meetings[p][meeting]) >= 0, "%s",
                  error_message);
        else
            carry(apart, meeting, p, (int)(draw.v[3] % (uint32_t)n), (int)(draw.v[2] >> 31));
    }
}

// Drives the first n places to the end and commits.
static void apart_finish(Apart *apart, int n) {
    apart_drive(apart, n, 1000000);
    check(apart_complete(apart, n) == PLACE_MEETINGS, "%d of %d averages are complete", apart_complete(apart, n),
          PLACE_MEETINGS);
    for (int p = 0; p < n; p++)
        for (int i = 0; i < PLACE_MEETINGS; i++)
            check(meeting_commit(&apart->runs[p]->trainer.mesh, &apart->meetings[p][i], apart_outer(apart, i)) == 0,
                  "%s", error_message);
}

static int64_t cell_powersgd_floats(const Trainer *trainer, const Cell *cell) {
    return cell->powersgd_q == NULL ? 0 : powersgd_offset(&cell->stage, cell->stage.n_tensors, trainer->outer.rank);
}

// All that a replica keeps: arenas and warm starts, n floats; the caller frees them.
static float *replica_state(const MeshRun *run, int replica, int64_t *n) {
    static const Arena arenas[] = {ARENA_PARAMS, ARENA_GRADS, ARENA_GLOBAL, ARENA_OUTER, ARENA_ERROR, ARENA_PENDING};
    const Mesh *mesh = &run->trainer.mesh;
    size_t n_arenas = sizeof arenas / sizeof *arenas, at = 0;
    size_t floats = n_arenas * (size_t)run->trainer.n_params;
    for (int s = 0; s < mesh->n_stages; s++)
        floats += (size_t)cell_powersgd_floats(&run->trainer, mesh_cell(mesh, replica, s));
    float *state = (float *)malloc(sizeof(float) * floats);
    for (size_t a = 0; a < n_arenas; a++) {
        int64_t n_values;
        float *values = replica_values(run, replica, arenas[a], &n_values);
        memcpy(state + at, values, sizeof(float) * (size_t)n_values);
        at += (size_t)n_values;
        free(values);
    }
    for (int s = 0; s < mesh->n_stages; s++) {
        const Cell *cell = mesh_cell(mesh, replica, s);
        size_t n_values = (size_t)cell_powersgd_floats(&run->trainer, cell);
        device_copy(state + at, cell->powersgd_q, sizeof(float) * n_values, run->trainer.stream);
        at += n_values;
    }
    check(at == floats, "%zu floats of %zu", at, floats);
    *n = (int64_t)floats;
    return state;
}

static void apart_remember(Apart *apart) {
    for (int p = 0; p < apart->n_places; p++) {
        int64_t n;
        free(apart->state[p]);
        apart->state[p] = replica_state(apart->runs[p], p, &n);
    }
}

static void check_remembered(const Apart *apart, int attempt) {
    for (int p = 0; p < apart->n_places; p++) {
        int64_t n;
        float *now = replica_state(apart->runs[p], p, &n);
        check(memcmp(now, apart->state[p], sizeof(float) * (size_t)n) == 0, "attempt %d changed replica %d", attempt,
              p);
        free(now);
    }
}

// The sum of the first n replicas' gradients by its formula: each part n times the gradient, as the wire rounds it, and
// so the mean. The caller frees it.
static float *summed_gradients(const MeshRun *run, int n) {
    int bf16 = run->trainer.mesh.codec.wire == WIRE_BF16;
    int64_t n_values = 0;
    float *parts[PLACES] = {NULL};
    for (int r = 0; r < n; r++) {
        parts[r] = replica_values(run, r, ARENA_GRADS, &n_values);
        for (int64_t i = 0; i < n_values; i++) {
            parts[r][i] *= (float)n;
            if (bf16) parts[r][i] = float_of_bf16(bf16_of_float(parts[r][i]));
        }
    }
    for (int64_t i = 0; i < n_values; i++) {
        float sum = 0.0f;
        for (int r = 0; r < n; r++) sum += parts[r][i];
        parts[0][i] = bf16 ? float_of_bf16(bf16_of_float(sum / (float)n)) : sum / (float)n;
    }
    for (int r = 1; r < n; r++) free(parts[r]);
    return parts[0];
}

static void check_gradients(const MeshRun *run, int replica, const float *expected) {
    int64_t n;
    float *grads = replica_values(run, replica, ARENA_GRADS, &n);
    check(memcmp(grads, expected, sizeof(float) * (size_t)n) == 0, "replica %d: another sum of gradients", replica);
    free(grads);
}

// The first n replicas have the bits of the same ones in one process, and have sent what they have.
static void check_apart(const Apart *apart, int n, const char *when) {
    for (int p = 0; p < n; p++) {
        int64_t n_values, n_expected;
        float *values = replica_state(apart->runs[p], p, &n_values);
        float *expected = replica_state(apart->whole, p, &n_expected);
        int64_t i = 0;
        while (i < n_values && memcmp(&values[i], &expected[i], sizeof(float)) == 0) i++;
        check(n_values == n_expected && i == n_values, "%s: replica %d, value %lld of %lld differs", when, p,
              (long long)i, (long long)n_values);
        free(values);
        free(expected);
    }
}

static void check_apart_bytes(const Apart *apart) {
    for (int p = 0; p < apart->n_places; p++) {
        for (int s = 0; s < PLACE_STAGES; s++) {
            int64_t sent = mesh_cell(&apart->runs[p]->trainer.mesh, p, s)->step.bytes[TRAFFIC_DP];
            int64_t expected = mesh_cell(&apart->whole->trainer.mesh, p, s)->step.bytes[TRAFFIC_DP];
            check(sent == expected && sent > 0, "replica %d, stage %d sends %lld bytes, in one process %lld", p, s,
                  (long long)sent, (long long)expected);
        }
    }
}

static void apart_merge(Apart *apart) {
    for (int f = 0; f < PLACE_FRAGMENTS; f++) {
        mesh_merge(&apart->whole->trainer.mesh, &apart->whole->trainer.outer, f, 0.5f);
        for (int p = 0; p < apart->n_places; p++)
            mesh_merge(&apart->runs[p]->trainer.mesh, &apart->whole->trainer.outer, f, 0.5f);
    }
}

#define APART DEEP "-n 100 -y 2 --local-steps 90 --fragments 3 --overlap 2 --powersgd-rank 3 "

// Three rounds of averages in random turns against the same in one process, bit for bit. Must fail for: a mean in
// another order, an owner's share that skips the wire's rounding, a warm start that is not kept, another owner here and
// there, parts and means on one link, memory of another process that is touched.
static void test_meeting_apart(void) {
    static const char *const words[] = {APART "-x 2 ", APART "-x 3 --wire fp32 "};
    write_corpus();
    for (int i = 0; i < 2; i++) {
        Apart apart;
        apart_open(&apart, 2 + i, words[i]);
        for (int round = 0; round < 3; round++) {
            float *sum = summed_gradients(apart.whole, apart.n_places);
            apart_begin(&apart, round);
            apart_average_whole(&apart, round);
            apart_finish(&apart, apart.n_places);
            check_gradients(apart.whole, 0, sum);
            free(sum);
            check_apart(&apart, apart.n_places, "committed");
            apart_merge(&apart);
            check_apart(&apart, apart.n_places, "merged");
        }
        check_apart_bytes(&apart);
        apart_close(&apart);
    }
}

// Averages that are given up anywhere and begun anew, at last without the third replica: the same as if it had never
// been there. Nothing changes before the commit. Must fail for: an error or warm start that changes on the way, means
// divided by all replicas, messages of the attempt before.
static void test_meeting_restart(void) {
    Apart apart;
    int taken = 0, unfinished = 0;
    write_corpus();
    apart_open(&apart, 3, APART "-x 3 ");
    apart.whole->trainer.mesh.living[2] = 0;
    float *sum = summed_gradients(apart.whole, 2);
    apart_begin(&apart, 2); // the third owns some of them
    apart_average_whole(&apart, 2);
    apart_remember(&apart);
    for (int attempt = 0; attempt < 12; attempt++) {
        apart_drive(&apart, 3, 120 * attempt);
        check_remembered(&apart, attempt);
        for (int i = 0; i < PLACE_MEETINGS && attempt == 11; i++) {
            const Meeting *meeting = &apart.meetings[0][i];
            taken += meeting->seats[0].taken > 0, unfinished += !meeting_complete(meeting);
        }
        for (int p = 0; p < 3; p++) {
            Mesh *mesh = &apart.runs[p]->trainer.mesh;
            mesh->living[2] = attempt < 11;
            for (int i = 0; i < PLACE_MEETINGS; i++)
                check(meeting_restart(mesh, &apart.meetings[p][i]) == 0, "%s", error_message);
        }
    }
    check(taken == PLACE_MEETINGS && unfinished == PLACE_MEETINGS, "of %d averages %d have begun and %d not ended",
          PLACE_MEETINGS, taken, unfinished);
    apart_finish(&apart, 2);
    check_apart(&apart, 2, "without the third");
    check_gradients(apart.runs[1], 1, sum);
    free(sum);
    apart_close(&apart);
}

// What is refused: a message of a wrong size from any peer, a commit before the end, to begin anew what is in place, a
// mesh of one process whose replicas do not come. And no link holds more than one message in one process.
static void test_meeting_refused(void) {
    write_corpus();
    MeshRun *run = mesh_run_open(APART "-x 3 ");
    Mesh *mesh = &run->trainer.mesh;
    const Outer *outer = &run->trainer.outer;
    Meeting *meeting = &mesh->meetings[1];
    const char four[4] = "abc";
    int moved, most = 0;
    check(meeting_begin(mesh, meeting, outer, 1, 0, 1) == 0, "%s", error_message);
    check_error(meeting_commit(mesh, meeting, outer), "is not complete", "commit");
    check(link_send(meeting_up(meeting, 0, 1), four, 4, 0.0) == 0, "%s", error_message);
    while ((moved = meeting_advance(mesh, meeting)) > 0) continue;
    check_error(moved, "average of stage 1: replica 0 sends 4 bytes of model.layers.", "a part of a wrong size");
    check(meeting_restart(mesh, meeting) == 0, "%s", error_message);
    check(link_send(meeting_down(meeting, 2, 1), four, 4, 0.0) == 0, "%s", error_message);
    check_error(meeting_advance(mesh, meeting), "replica 1 sends 4 bytes", "a mean of a wrong size");
    check(meeting_restart(mesh, meeting) == 0, "%s", error_message);
    check(link_send(meeting_down(meeting, 2, 1), mesh->message, mesh->message_bytes, 0.0) == 0, "%s", error_message);
    check_error(meeting_advance(mesh, meeting), "bytes", "a mean that is too long");
    check(meeting_restart(mesh, meeting) == 0, "%s", error_message);
    while ((moved = meeting_advance(mesh, meeting)) > 0)
        for (int i = 0; i < 9; i++)
            most = (int)larger(most, larger(link_waiting(&meeting->up[i]), link_waiting(&meeting->down[i])));
    check(moved == 0 && meeting_complete(meeting) && most == 1, "%d messages on a link", most);
    check(meeting_commit(mesh, meeting, outer) == 0, "%s", error_message);
    check(!meeting_complete(meeting) && meeting_advance(mesh, meeting) == 0, "a closed average goes on");
    check(meeting_begin(mesh, meeting, NULL, 1, ALL_GRADIENTS, 0) == 0 && meeting_advance(mesh, meeting) == 1, "%s",
          error_message);
    check_error(meeting_restart(mesh, meeting), "is not begun anew", "in place");
    mesh_cell(mesh, 2, 1)->hosted = 0;
    check_error(mesh_average(mesh, outer, 1, 0, 0), "an average is stuck: stage 1", "a replica that does not come");
    mesh_run_close(run);
}

#ifndef DEVICE_CUDA // reads and writes the host's tensors
// Outer steps: every step, full rank, rate 1, no momentum: the average of the replicas. Low rank: all replicas hold the
// same merged weights after every merge, every tensor is in one fragment, and traffic is what the ranks say.
static void test_diloco(void) {
    int64_t n;
    write_corpus();
    MeshRun *apart = mesh_run_open(DEEP QUIET "-x 3 -y 2 --dp none");
    MeshRun *met = mesh_run_open(
        DEEP QUIET "-x 3 -y 2 --local-steps 1 --outer-lr 1 --outer-momentum 0 --mix 0 --powersgd-rank 1000");
    mesh_run_step(apart);
    mesh_run_step(met);
    float *a = replica_values(apart, 0, ARENA_PARAMS, &n), *b = replica_values(apart, 1, ARENA_PARAMS, &n);
    float *c = replica_values(apart, 2, ARENA_PARAMS, &n), *merged = replica_values(met, 0, ARENA_PARAMS, &n);
    check(memcmp(a, b, sizeof(float) * (size_t)n) != 0, "replicas that never meet are equal");
    for (int64_t i = 0; i < n; i++) a[i] = (a[i] + b[i] + c[i]) / 3.0f;
    check_close(merged, a, n, 1e-6, "average");
    for (int r = 0; r < 3; r++) {
        float *global = replica_values(met, r, ARENA_GLOBAL, &n), *local = replica_values(met, r, ARENA_PARAMS, &n);
        check(memcmp(global, merged, sizeof(float) * (size_t)n) == 0 &&
                  memcmp(local, merged, sizeof(float) * (size_t)n) == 0,
              "replica %d holds others", r);
        free(global);
        free(local);
    }
    free(a);
    free(b);
    free(c);
    free(merged);
    mesh_run_close(apart);
    mesh_run_close(met);

    MeshRun *low = mesh_run_open(DEEP "-n 100 -x 3 -y 2 --local-steps 4 --fragments 3 --overlap 2 --powersgd-rank 2");
    Mesh *mesh = &low->trainer.mesh;
    int64_t last_bytes = 0, begun_at[3] = {0};
    int merges[3] = {0};
    for (int step = 1; step <= 13; step++) {
        mesh_run_step(low);
        for (int f = 0; f < 3; f++) {
            int64_t before = begun_at[f], now = low->trainer.outer.begun[f];
            merges[f] += before > 0 && now == 0;
            check(before == 0 || now == before || (now == 0 && step == before + 2), "fragment %d was merged at step %d",
                  f, step);
            begun_at[f] = now;
        }
        last_bytes += low->result.sent.bytes[TRAFFIC_DP];
        for (int s = 0; s < 2; s++)
            for (int r = 1; r < 3; r++) {
                const Stage *first = &mesh_cell(mesh, 0, s)->stage, *stage = &mesh_cell(mesh, r, s)->stage;
                check(memcmp(first->global, stage->global, sizeof(float) * (size_t)stage->arena_floats) == 0,
                      "step %d: replica %d merged something else", step, r);
            }
    }
    int64_t expected = 0;
    for (int f = 0; f < 3; f++) {
        int begun = 0, members = 0;
        for (int step = 1; step <= 13; step++) begun += outer_begins(&low->trainer.outer, f, step);
        check(begun >= 3 && merges[f] >= 2, "fragment %d began %d times, was merged %d times", f, begun, merges[f]);
        for (int s = 0; s < 2; s++) {
            const Stage *stage = &mesh_cell(mesh, 0, s)->stage;
            for (int t = 0; t < stage->n_tensors; t++) {
                const Tensor *tensor = &stage->tensors[t];
                check(tensor->fragment >= 0 && tensor->fragment < 3, "%s is in fragment %d", tensor->name,
                      tensor->fragment);
                if (tensor->fragment != f) continue;
                members++;
                int64_t values =
                    tensor->n_dims == 2 ? powersgd_rank(tensor, 2) * (tensor->shape[0] + tensor->shape[1]) : tensor->n;
                expected += begun * 2 * (3 - 1) * 2 * values; // to the owner and back, bf16
            }
        }
        check(members > 0, "fragment %d is empty", f);
    }
    check(last_bytes == expected, "%lld bytes, the ranks say %lld", (long long)last_bytes, (long long)expected);
    mesh_run_close(low);
    check_run(0, NULL, DEEP "-n 9 -x 3 -y 2 --local-steps 4 -o @/final", "in all");
}

static void check_same_arena(const char *a, const char *b) {
    SafeTensors x, y;
    char path_a[PATH_MAX], path_b[PATH_MAX];
    snprintf(path_a, sizeof path_a, "%s", scratch_path(a));
    snprintf(path_b, sizeof path_b, "%s", scratch_path(b));
    if (!check(safetensors_open(&x, path_a) == 0 && safetensors_open(&y, path_b) == 0, "%s", error_message)) return;
    for (int i = 0; i < x.n_tensors; i++) {
        const SafeTensor *other = safetensors_find(&y, x.tensors[i].name);
        check(other != NULL && memcmp(other->data, x.tensors[i].data, x.tensors[i].end - x.tensors[i].begin) == 0,
              "%s differs between %s and %s", x.tensors[i].name, a, b);
    }
    safetensors_close(&x);
    safetensors_close(&y);
}

// Outer steps against their formulas in double, for one tensor over three rounds: full rank, so the average is exact,
// with momentum, mixing and overlap; and the end of a run, and a run that is made longer.
static void test_outer_steps(void) {
    write_corpus();
    MeshRun *run =
        mesh_run_open(DEEP "-n 13 --precision fp32 --wire fp32 -x 2 -y 2 --local-steps 4 --fragments 1 --overlap 2 "
                           "--powersgd-rank 1000 --outer-lr 0.6 --outer-momentum 0.8 --mix 0.3");
    Mesh *mesh = &run->trainer.mesh;
    enum { T = 2, CHECKED = 5 }; // q_proj of layer 0
    const Stage *stages[2] = {&mesh_cell(mesh, 0, 0)->stage, &mesh_cell(mesh, 1, 0)->stage};
    int64_t at = stages[0]->tensors[T].offset, pick[CHECKED] = {0, 17, 100, 333, 575};
    double global[CHECKED], moment[CHECKED] = {0}, pending[CHECKED] = {0};
    for (int i = 0; i < CHECKED; i++) global[i] = (double)stages[0]->params[at + pick[i]];
    for (int step = 1; step <= 13; step++) {
        // what a step without a merge would leave is not visible, so a merge is checked by its relation to the global
        mesh_run_step(run);
        int last = step == 13;
        if ((step % 4 == 2 && step > 4) || last) {
            for (int i = 0; i < CHECKED && !last; i++) {
                moment[i] = 0.8 * moment[i] + pending[i];
                global[i] -= 0.6 * (pending[i] + 0.8 * moment[i]);
                check(fabs(global[i] - (double)stages[0]->global[at + pick[i]]) < 1e-6,
                      "step %d: global %g, by hand %g", step, (double)stages[0]->global[at + pick[i]], global[i]);
            }
        }
        if (step % 4 == 0)
            for (int i = 0; i < CHECKED; i++) {
                double local =
                    0.5 * ((double)stages[0]->params[at + pick[i]] + (double)stages[1]->params[at + pick[i]]);
                pending[i] = global[i] - local;
                check(fabs(pending[i] - (double)stages[1]->pending[at + pick[i]]) < 1e-6,
                      "step %d: pending %g, by hand %g", step, (double)stages[1]->pending[at + pick[i]], pending[i]);
            }
        for (int r = 0; r < 2 && last; r++)
            check(memcmp(stages[r]->params, stages[0]->global, sizeof(float) * (size_t)stages[0]->arena_floats) == 0,
                  "replica %d ends with other weights than the merged ones", r);
    }
    int64_t dense = 0;
    for (int s = 0; s < 2; s++) {
        const Stage *stage = &mesh_cell(mesh, 0, s)->stage;
        for (int t = 0; t < stage->n_tensors; t++) {
            const Tensor *tensor = &stage->tensors[t];
            dense +=
                2 * 4 *
                (tensor->n_dims == 2 ? powersgd_rank(tensor, 1000) * (tensor->shape[0] + tensor->shape[1]) : tensor->n);
        }
    }
    check(run->result.sent.bytes[TRAFFIC_DP] == dense, "the last average: %lld bytes, not %lld",
          (long long)run->result.sent.bytes[TRAFFIC_DP], (long long)dense);
    mesh_run_close(run);
    // what mix leaves is what it says: the replicas' distance shrinks to mix of it at a merge
    MeshRun *half = mesh_run_open(DEEP QUIET "-l 1e-12 -x 2 -y 1 --local-steps 2 --fragments 1 --overlap 0 --mix 0.25 "
                                             "--powersgd-rank 1000");
    Stage *a = &mesh_cell(&half->trainer.mesh, 0, 0)->stage, *b = &mesh_cell(&half->trainer.mesh, 1, 0)->stage;
    a->params[0] += 1.0f;
    mesh_run_step(half);
    mesh_run_step(half);
    check(fabs((double)a->params[0] - (double)b->params[0] - 0.25) < 1e-3, "distance %g after a merge with mix 0.25",
          (double)a->params[0] - (double)b->params[0]);
    mesh_run_close(half);
    // a finished run that goes on merges nothing twice: nothing moves the merged weights before the next average
    check_run(0, NULL, DEEP "-n 8 -x 2 --local-steps 4 --fragments 1 --overlap 2 -o @/longer", "done: 8 steps");
    check_run(0, NULL, "-o @/longer --resume -n 40 --stop-after 11", "stopped after step 11");
    check_same_arena("longer/step_00000008/model.bin", "longer/latest/model.bin");
    check_run(1, NULL, "-o @/longer --resume --dp dense", "--dp differs");
    check_run(1, NULL, "-o @/longer --resume --overlap 1", "--overlap differs");
}

// The anchor's momentum over two passes, and the update it leads to, against plain formulas.
static void test_anchor_update(void) {
    write_corpus();
    MeshRun *run =
        mesh_run_open(DEEP QUIET "-p 0.5 -x 2 -y 2 --anchor-delay 2 --anchor-beta 0.75 --anchor-rank 0 --anchor-debias "
                                 "--alpha 0.4 --tau 1e-2 --wd 0");
    Anchor *anchor = &run->trainer.anchor;
    const Tensor *whole = &anchor->stage.tensors[7]; // gate_proj of layer 0
    const Stage *stage = &mesh_cell(&run->trainer.mesh, 0, 0)->stage;
    const Tensor *tensor = &stage->tensors[7];
    int m = (int)whole->shape[0], n = (int)whole->shape[1];
    double *momentum = (double *)calloc((size_t)m * (size_t)n, sizeof(double));
    float *expected = (float *)malloc(sizeof(float) * (size_t)m * (size_t)n), *rebuilt = guarded((int64_t)m * n);
    check(strcmp(whole->name, tensor->name) == 0 && tensor->block, "%s and %s", whole->name, tensor->name);
    for (int pass = 1; pass <= 2; pass++) {
        for (int i = 0; i < 2; i++) mesh_run_step(run);
        anchor_state(anchor, 1);
        for (int i = 0; i < m * n; i++) {
            momentum[i] = 0.75 * momentum[i] + 0.25 * (double)anchor->stage.grads[whole->offset + i];
            expected[i] = (float)momentum[i];
        }
        check_close(anchor->stage.m + whole->offset, expected, (int64_t)m * n, 1e-6, "momentum");
        const Factor *f = &anchor->sets[1 - anchor->front].of[7];
        double debias = 1.0 / (1.0 - pow(0.75, pass));
        for (int i = 0; i < m * n; i++) {
            double sum = 0.0;
            for (int k = 0; k < f->r; k++) sum += (double)f->u[i / n * f->r + k] * f->s[k] * f->v[i % n * f->r + k];
            rebuilt[i] = (float)sum, expected[i] = (float)(momentum[i] * debias);
        }
        check_close(rebuilt, expected, (int64_t)m * n, 1e-5, "U S V^T of the debiased momentum");
    }
    // the step that applies them: G itself comes from an equal run without the filter's help, before its update
    Stage *mine = &mesh_cell(&run->trainer.mesh, 0, 0)->stage;
    meet_anchor(&run->trainer, &run->result);
    float *grad = random_values((int64_t)m * n, 81, 1.0f);
    memcpy(mine->grads + tensor->offset, grad, sizeof(float) * (size_t)(m * n));
    stage_filter(mine, anchor, 0.4f, run->trainer.stream);
    const Factor *f = &anchor->sets[anchor->front].of[7];
    double *middle = (double *)calloc((size_t)f->r * (size_t)f->r, sizeof(double));
    for (int a = 0; a < f->r; a++)
        for (int b = 0; b < f->r; b++)
            for (int i = 0; i < m * n; i++)
                middle[a * f->r + b] += (double)f->u[i / n * f->r + a] * grad[i] * f->v[i % n * f->r + b];
    for (int i = 0; i < m * n; i++) {
        double sum = 0.0;
        for (int a = 0; a < f->r; a++)
            for (int b = 0; b < f->r; b++)
                sum += (double)f->u[i / n * f->r + a] * f->s[a] / (f->s[a] + 1e-2) * middle[a * f->r + b] * f->s[b] /
                       (f->s[b] + 1e-2) * f->v[i % n * f->r + b];
        expected[i] = (float)(0.4 * grad[i] + 0.6 * sum);
    }
    check_close(mine->grads + tensor->offset, expected, (int64_t)m * n, 1e-5, "filtered gradient");
    free(middle);
    free(grad);
    free(momentum);
    free(expected);
    release(rebuilt, (int64_t)m * n, "rebuilt");
    mesh_run_close(run);
}

// A whole step of the program with the filter, from the raw gradient to the new weights, in double. Two runs are equal
// until the first factors come; there one lets the gradient pass (alpha 1), so that it can be read, the other filters.
// Must fail for: a filter after AdamW's moments, moments of the raw gradient, factors of the wrong matrix or stage.
static void test_filtered_step(void) {
#define FILTERED DEEP "-n 100 --precision fp32 --wire fp32 -p 0.5 -x 2 -y 2 --anchor-delay 3 --anchor-rank 6 -l 1e-2 "
    enum { STEPS = 3 }; // before the first filtered one
    const double b1 = 0.9, b2 = 0.999, alpha = 0.3, tau = 1e-3, wd = 0.01;
    write_corpus();
    MeshRun *raw = mesh_run_open(FILTERED "--alpha 1"), *run = mesh_run_open(FILTERED "--alpha 0.3");
    for (int step = 0; step < STEPS; step++) {
        mesh_run_step(raw);
        mesh_run_step(run);
    }
    for (int s = 0; s < 2; s++) {
        Cell *cell = mesh_cell(&run->trainer.mesh, 0, s), *other = mesh_cell(&raw->trainer.mesh, 0, s);
        size_t n_bytes = sizeof(float) * (size_t)cell->stage.arena_floats;
        check(memcmp(cell->stage.params, other->stage.params, n_bytes) == 0, "the runs differ before the filter");
    }
    Stage *stages[2] = {&mesh_cell(&run->trainer.mesh, 0, 0)->stage, &mesh_cell(&run->trainer.mesh, 0, 1)->stage};
    float *before[2][3];
    for (int s = 0; s < 2; s++) {
        const float *arenas[3] = {stages[s]->params, stages[s]->m, stages[s]->v};
        for (int a = 0; a < 3; a++) {
            before[s][a] = (float *)malloc(sizeof(float) * (size_t)stages[s]->arena_floats);
            memcpy(before[s][a], arenas[a], sizeof(float) * (size_t)stages[s]->arena_floats);
        }
    }
    mesh_run_step(raw);
    mesh_run_step(run);
    check(run->result.delivered && run->trainer.anchor.delivered == 0, "the factors of step 0 are not there");
    for (int s = 0; s < 2; s++) {
        const Stage *stage = stages[s], *unfiltered = &mesh_cell(&raw->trainer.mesh, 0, s)->stage;
        double norm = mesh_cell(&raw->trainer.mesh, 0, s)->grad_norm, lr = (double)run->result.lr;
        double clip = norm > 1.0 ? 1.0 / (norm + 1e-6) : 1.0;
        for (int t = 0; t < stage->n_tensors; t++) {
            const Tensor *tensor = &stage->tensors[t];
            const Factor *f = &run->trainer.anchor.sets[run->trainer.anchor.front].of[tensor->index];
            int n = tensor->n_dims == 2 ? (int)tensor->shape[1] : 1, r = tensor->block ? f->r : 0;
            const float *grad = unfiltered->grads + tensor->offset;
            double *middle = (double *)calloc((size_t)r * (size_t)r + 1, sizeof(double));
            float *moved = (float *)malloc(sizeof(float) * (size_t)tensor->n), *expected = guarded(tensor->n);
            for (int a = 0; a < r; a++)
                for (int b = 0; b < r; b++)
                    for (int64_t i = 0; i < tensor->n; i++)
                        middle[a * r + b] += (double)f->u[i / n * r + a] * grad[i] * f->v[i % n * r + b];
            for (int64_t i = 0; i < tensor->n; i++) {
                double passed = 0.0;
                for (int a = 0; a < r; a++)
                    for (int b = 0; b < r; b++)
                        passed += (double)f->u[i / n * r + a] * (f->s[a] / (f->s[a] + tau)) * middle[a * r + b] *
                                  (f->s[b] / (f->s[b] + tau)) * f->v[i % n * r + b];
                double g = clip * (r > 0 ? alpha * grad[i] + (1.0 - alpha) * passed : (double)grad[i]);
                int64_t at = tensor->offset + i;
                double m = b1 * before[s][1][at] + (1.0 - b1) * g, v = b2 * before[s][2][at] + (1.0 - b2) * g * g;
                double hat = sqrt(v / (1.0 - pow(b2, STEPS + 1))) + 1e-8;
                double step = -lr * m / (1.0 - pow(b1, STEPS + 1)) / hat;
                if (tensor->n_dims == 2) step -= lr * wd * (double)before[s][0][at];
                expected[i] = (float)step;
                moved[i] = (float)((double)stage->params[at] - (double)before[s][0][at]);
            }
            check_close(moved, expected, tensor->n, 2e-4, tensor->name); // weights of 1 in fp32 move by 1e-2
            release(expected, tensor->n, "expected");
            free(moved);
            free(middle);
        }
        for (int a = 0; a < 3; a++) free(before[s][a]);
    }
    mesh_run_close(raw);
    mesh_run_close(run);
}

// What the anchor calls the codec's bias, against a mesh whose second replica has the name of the anchor's messages and
// takes the anchor's data through the real boundaries: with all ranks and no momentum D is G - Gc, and the fast
// circuit's gradient plus it the whole one. klt's pass is the second, whose tables the first has brought. Must fail
// for: a sign or a direction exchanged, a boundary left out, another replica's masks, recomputing from states that were
// not sent, moments or tables of the compressed pass.
static void test_anchor_bias(void) {
    static const struct {
        const char *words;
        double tol;
    } cases[] = {{"--wire fp32 -p 0.5", 1e-4},
                 {"--wire fp32 --codec quant8", 1e-4},
                 {"--wire fp32 --codec topk -p 0.7 --recompute", 1e-4},
                 {"--wire fp32 --codec bottleneck -p 0.5", 1e-4},
                 {"--wire fp32 --codec klt -p 0.8", 1e-4},
                 {"-p 0.5", 1e-2}}; // what bf16 takes from factors
    write_corpus();
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        char words[512];
        snprintf(words, sizeof words, DEEP "-n 100 --precision fp32 -x 2 -y 3 %s --anchor-use bias --anchor-beta 0 %s",
                 "--anchor-delay 2 --anchor-rank 0", cases[c].words);
        MeshRun *run = mesh_run_open(words);
        snprintf(words, sizeof words, DEEP "-n 100 --precision fp32 -x 3 -y 3 %s %s", "--dp none --anchor-use none",
                 cases[c].words);
        MeshRun *twin = mesh_run_open(words);
        Anchor *anchor = &run->trainer.anchor;
        Mesh *mesh = &twin->trainer.mesh;
        Stream *stream = twin->trainer.stream;
        int rounds = anchor->wire == WIRE_BF16;
        double loss;
        Stage whole;
        check(meet_anchor(&run->trainer, &run->result) == 0 && meet_anchor(&twin->trainer, &twin->result) == 0, "%s",
              error_message);
        check(anchor_state(anchor, 1) == ANCHOR_READY && anchor_state(&twin->trainer.anchor, 1) == ANCHOR_READY,
              "%s: %s", cases[c].words, anchor->error);
        check(anchor->coded_passes == 1, "%lld compressed passes", (long long)anchor->coded_passes);
        stage_table(&whole, &twin->trainer.config, 0, twin->trainer.config.n_layers);
        stage_plan(&whole, twin->trainer.B, twin->trainer.T, 1, 0);
        stage_alloc(&whole, stream);
        int at = 0;
        for (Stage *stage = mesh_model(mesh, 1); stage != NULL; stage = stage->next) {
            for (int t = 0; t < stage->n_tensors; t++) {
                const Tensor *tensor = &stage->tensors[t];
                if (rounds) wire_round(WIRE_BF16, stage->params + tensor->offset, tensor->n, stream);
                memcpy(whole.params + whole.tensors[at++].offset, stage->params + tensor->offset,
                       sizeof(float) * (size_t)tensor->n);
            }
        }
        check(stage_gradients(&whole, &anchor->tokens, twin->trainer.B, &loss, NULL, NULL, stream) == 0, "%s",
              error_message);
        Batch batches[2] = {anchor->tokens, anchor->tokens};
        Pass pass = {batches, 0, 1, 0, NULL, 0};
        for (int s = 0; s < 3; s++) mesh_cell(mesh, 1, s)->grad_scale = 1.0f / (float)anchor->tokens.n_valid;
        check(mesh_run(mesh, 1, 2, &pass) == 0, "%s", error_message);
        check(take_delivery(&run->trainer, &run->result) == 0 && is_corrected(&run->trainer), "no delivery");
        at = 0;
        for (Stage *stage = mesh_model(mesh, 1); stage != NULL; stage = stage->next) {
            float *coded = (float *)malloc(sizeof(float) * (size_t)stage->arena_floats);
            memcpy(coded, stage->grads, sizeof(float) * (size_t)stage->arena_floats);
            stage_correct(stage, anchor, stream);
            for (int t = 0; t < stage->n_tensors; t++, at++) {
                const Tensor *tensor = &stage->tensors[t];
                float *added = stage->grads + tensor->offset, *before = coded + tensor->offset;
                const float *G = whole.grads + whole.tensors[at].offset;
                float *bias = guarded(tensor->n);
                char what[200];
                snprintf(what, sizeof what, "%s: %s", cases[c].words, tensor->name);
                for (int64_t i = 0; i < tensor->n; i++) bias[i] = G[i] - before[i];
                if (tensor->block) {
                    check(relative_error(before, G, tensor->n) > 1e-5, "%s: the codec changes nothing", what);
                    check_close(added, G, tensor->n, cases[c].tol, what);
                    check_close(anchor->stage.v + anchor->stage.tensors[at].offset, bias, tensor->n, 1e-3, what);
                    for (int64_t i = 0; i < tensor->n; i++) added[i] -= before[i];
                    check_close(added, bias, tensor->n, 10.0 * cases[c].tol, what);
                    const Factor *f = &anchor->bias[anchor->front].of[tensor->index];
                    for (int64_t i = 0; i < (int64_t)f->m * f->r && rounds; i++)
                        rounds = f->u[i] == float_of_bf16(bf16_of_float(f->u[i]));
                } else {
                    check(memcmp(added, before, sizeof(float) * (size_t)tensor->n) == 0, "%s is no matrix", what);
                }
                release(bias, tensor->n, what);
            }
            free(coded);
        }
        check(rounds == (anchor->wire == WIRE_BF16), "%s: factors that do not travel like this", cases[c].words);
        stage_free(&whole);
        mesh_run_close(run);
        mesh_run_close(twin);
    }
}

// The bias over two passes with a momentum: D is M, the mean of G, less the same mean of what the stage's gradients
// hold after a pass, (1-beta) Gc; the factors are those of D / (1 - beta^2), and a delivery has the bytes and the time
// the formulas say. Must fail for: a mean that is not debiased, boundaries whose compressed bytes are not counted.
static void test_anchor_bias_mean(void) {
    enum { T = 7 }; // gate_proj of layer 0
    write_corpus();
    MeshRun *run = mesh_run_open(DEEP QUIET "-p 0.5 -x 2 -y 3 --anchor-delay 2 --anchor-beta 0.75 --anchor-rank 0 "
                                            "--anchor-use both --device-tflops 1e-6");
    Anchor *anchor = &run->trainer.anchor;
    const Tensor *tensor = &anchor->stage.tensors[T];
    int m = (int)tensor->shape[0], n = (int)tensor->shape[1];
    double *mean = (double *)calloc((size_t)m * (size_t)n, sizeof(double));
    float *expected = guarded((int64_t)m * n), *rebuilt = guarded((int64_t)m * n);
    for (int pass = 1; pass <= 2; pass++) {
        for (int i = 0; i < 2; i++) mesh_run_step(run);
        anchor_state(anchor, 1);
        for (int i = 0; i < m * n; i++) {
            mean[i] = 0.75 * mean[i] + (double)anchor->stage.grads[tensor->offset + i];
            expected[i] = (float)((double)anchor->stage.m[tensor->offset + i] - mean[i]);
        }
        check_close(anchor->stage.v + tensor->offset, expected, (int64_t)m * n, 1e-5, "mean of the differences");
        const Factor *f = &anchor->bias[1 - anchor->front].of[T];
        for (int i = 0; i < m * n; i++) {
            double sum = 0.0;
            for (int k = 0; k < f->r; k++) sum += (double)f->u[i / n * f->r + k] * f->v[i % n * f->r + k];
            rebuilt[i] = (float)sum, expected[i] /= (float)(1.0 - pow(0.75, pass));
        }
        check_close(rebuilt, expected, (int64_t)m * n, 1e-4, "factors of the mean");
    }
    // matrices of (24, 24), (12, 24), (12, 24), (24, 24), (40, 24), (40, 24), (24, 40) at full rank, fp32, 6 layers
    int64_t sides = 6 * 4 * (2 * 48 * 24 + 2 * 36 * 12 + 3 * 64 * 24), whole = 2 * 4 * 80 * 24;
    memset(&run->result, 0, sizeof run->result);
    int64_t boundary = anchor->boundary_bytes[0];
    double at = anchor->launched_at = mesh_now(&run->trainer.mesh), flops = 6.0 * stage_flops(&anchor->stage, 80, 16);
    check(take_delivery(&run->trainer, &run->result) == 0, "%s", error_message);
    check(run->result.sent.bytes[TRAFFIC_ANCHOR] == 2 * sides + 6 * 4 * (5 * 24 + 2 * 12), "%lld bytes of factors",
          (long long)run->result.sent.bytes[TRAFFIC_ANCHOR]);
    check(anchor->boundary_bytes[0] - boundary == whole + whole / 2 &&
              anchor->boundary_bytes[1] == anchor->boundary_bytes[0],
          "%lld bytes of boundaries", (long long)(anchor->boundary_bytes[0] - boundary));
    check(fabs(mesh_now(&run->trainer.mesh) - at - flops / 3e6) < 1e-6 * at, "ready after %g s, by hand %g s",
          mesh_now(&run->trainer.mesh) - at, flops / 3e6);
    // a compressed gradient that is not finite begins the mean anew: nothing is added, nothing travels
    for (int pass = 0; pass < 2; pass++) {
        run->trainer.mesh.codec.scale = pass == 0 ? INFINITY : 1.0f;
        launch_anchor(&run->trainer);
        check(anchor_state(anchor, 1) == ANCHOR_READY && anchor->coded_passes == pass, "%lld passes in the mean: %s",
              (long long)anchor->coded_passes, anchor->error);
        const FactorSet *set = &anchor->bias[1 - anchor->front];
        double size = sum_of_squares(set->memory, set->n_floats, run->trainer.stream);
        check(pass == 0 ? size == 0.0 : size > 0.0 && isfinite(size), "pass %d: factors of size %g", pass, size);
        memset(&run->result, 0, sizeof run->result);
        check(take_delivery(&run->trainer, &run->result) == 0, "%s", error_message);
        check(run->result.sent.bytes[TRAFFIC_ANCHOR] == (1 + pass) * sides + 6 * 4 * (5 * 24 + 2 * 12),
              "pass %d: %lld bytes of factors", pass, (long long)run->result.sent.bytes[TRAFFIC_ANCHOR]);
    }
    free(mean);
    release(expected, (int64_t)m * n, "expected");
    release(rebuilt, (int64_t)m * n, "rebuilt");
    mesh_run_close(run);
}

// A whole step of the program: before the first delivery all runs are equal; with it the bias is in the gradients of
// the block matrices, in the norm told, and what the filter sees. Must fail for: a filter before the bias.
static void test_corrected_step(void) {
#define CORRECTED                                                                                                      \
    DEEP "-n 100 --precision fp32 -p 0.5 -x 2 -y 2 --anchor-delay 3 --anchor-rank 6 --probe 3 --alpha 0.4 "
    static const char *const words[3] = {CORRECTED "--anchor-use none", CORRECTED "--anchor-use bias",
                                         CORRECTED "--anchor-use both"};
    MeshRun *runs[3];
    double square = 0.0;
    write_corpus();
    for (int i = 0; i < 3; i++) {
        runs[i] = mesh_run_open(words[i]);
        for (int step = 0; step < 3; step++) mesh_run_step(runs[i]);
        check(runs[i]->result.probe[1] == runs[i]->result.probe[2] || isnan(runs[i]->result.probe[1]), "too early");
        for (int s = 0; s < 2; s++) {
            const Stage *stage = &mesh_cell(&runs[i]->trainer.mesh, 0, s)->stage,
                        *first = &mesh_cell(&runs[0]->trainer.mesh, 0, s)->stage;
            check(memcmp(stage->params, first->params, sizeof(float) * (size_t)stage->arena_floats) == 0,
                  "the runs differ before a delivery");
        }
    }
    for (int i = 0; i < 3; i++) {
        mesh_run_step(runs[i]);
        check(runs[i]->result.delivered, "no delivery");
    }
    const Anchor *anchor = &runs[1]->trainer.anchor, *both = &runs[2]->trainer.anchor;
    int64_t values = 6 * 6 * (2 * 48 + 2 * 36 + 3 * 64), snapshot = runs[0]->trainer.n_params;
    check(runs[1]->result.sent.bytes[TRAFFIC_ANCHOR] == 2 * (values + snapshot) &&
              runs[2]->result.sent.bytes[TRAFFIC_ANCHOR] == 2 * (2 * values + snapshot) + 4 * 6 * 7 * 6 &&
              anchor->factor_bytes == 2 * values,
          "%lld and %lld bytes from the anchor", (long long)runs[1]->result.sent.bytes[TRAFFIC_ANCHOR],
          (long long)runs[2]->result.sent.bytes[TRAFFIC_ANCHOR]);
    for (int s = 0; s < 2; s++) {
        const Stage *raw = &mesh_cell(&runs[0]->trainer.mesh, 0, s)->stage,
                    *stage = &mesh_cell(&runs[1]->trainer.mesh, 0, s)->stage,
                    *filtered = &mesh_cell(&runs[2]->trainer.mesh, 0, s)->stage;
        for (int t = 0; t < stage->n_tensors; t++) {
            const Tensor *tensor = &stage->tensors[t];
            const Factor *f = &anchor->bias[anchor->front].of[tensor->index];
            const Factor *g = &both->sets[both->front].of[tensor->index];
            const float *from = raw->grads + tensor->offset;
            float *expected = guarded(tensor->n);
            int n = tensor->n_dims == 2 ? (int)tensor->shape[1] : 1, r = tensor->block ? f->r : 0;
            for (int64_t i = 0; i < tensor->n; i++) {
                double sum = (double)from[i];
                for (int k = 0; k < r; k++) sum += (double)f->u[i / n * r + k] * f->v[i % n * r + k];
                expected[i] = (float)sum;
            }
            check(r == 0 || relative_error(from, expected, tensor->n) > 0.05, "%s has no bias", tensor->name);
            check_close(stage->grads + tensor->offset, expected, tensor->n, 1e-5, tensor->name);
            square += sum_of_squares(expected, tensor->n, runs[0]->trainer.stream);
            if (tensor->block)
                spectral_filter(expected, g->u, g->d, g->v, g->m, g->n, g->r, 0.4f, runs[0]->trainer.stream);
            check_close(filtered->grads + tensor->offset, expected, tensor->n, 1e-4, tensor->name);
            release(expected, tensor->n, tensor->name);
        }
    }
    check(fabs(runs[1]->result.grad_norm - sqrt(square)) < 1e-4 * sqrt(square), "the norm told is %g, not %g",
          runs[1]->result.grad_norm, sqrt(square));
    check(runs[0]->result.probe[1] == runs[1]->result.probe[1] && runs[0]->result.probe[2] == runs[0]->result.probe[1],
          "the probe of the gradient as it came has changed");
    check(runs[1]->result.probe[2] != runs[1]->result.probe[1] && runs[2]->result.probe[2] != runs[1]->result.probe[2],
          "the probe knows nothing of the bias");
    for (int i = 0; i < 3; i++) mesh_run_close(runs[i]);
}

// What bf16 takes from a replica's share of an average comes with its next one: (1 - mix) of it, as of all that is left
// out. Vectors exactly; of matrices the last one averaged, whose P still lies where it was taken: what is kept is
// delta - P Q^T with the Q that travels. Must fail for: the Q that does not.
static void test_wire_feedback(void) {
    enum { RANK = 5 };
    write_corpus();
    MeshRun *run =
        mesh_run_open(DEEP "-n 100 --precision fp32 --clip 0 -l 1e-2 -x 2 -y 1 --local-steps 2 --fragments 1 "
                           "--overlap 1 --mix 0.25 --powersgd-rank 5");
    mesh_run_step(run);
    mesh_run_step(run); // the average has begun, nothing is merged
    for (int r = 0; r < 2; r++) {
        const Stage *stage = &mesh_cell(&run->trainer.mesh, r, 0)->stage;
        int lost = 0;
        for (int t = 0; t < stage->n_tensors; t++) {
            const Tensor *tensor = &stage->tensors[t];
            for (int64_t i = tensor->offset; i < tensor->offset + tensor->n && tensor->n_dims == 1; i++) {
                float delta = stage->global[i] - stage->params[i], kept = stage->error[i];
                float expected = 0.75f * (delta - float_of_bf16(bf16_of_float(delta)));
                check(kept == expected, "%s: %g is kept, not %g", tensor->name, (double)kept, (double)expected);
                lost += kept != 0.0f;
            }
        }
        check(lost > 0, "no vector lost anything");
        const Tensor *tensor = &stage->tensors[stage->n_tensors - 1];
        const Meeting *meeting = &run->trainer.mesh.meetings[0];
        const float *P = meeting_mean(&run->trainer.mesh, meeting, r, &meeting->shares[stage->n_tensors - 1]);
        int m = (int)tensor->shape[0], n = (int)tensor->shape[1];
        double *delta = (double *)malloc(sizeof(double) * (size_t)tensor->n);
        float *expected = guarded(tensor->n), *kept = guarded(tensor->n);
        check(tensor->n_dims == 2 && powersgd_rank(tensor, RANK) == RANK, "%s", tensor->name);
        for (int64_t i = 0; i < tensor->n; i++)
            delta[i] = (double)(stage->global[tensor->offset + i] - stage->params[tensor->offset + i]);
        for (int j = 0; j < n; j++) {
            double exact[RANK], sent[RANK];
            for (int k = 0; k < RANK; k++) {
                exact[k] = 0.0;
                for (int i = 0; i < m; i++) exact[k] += delta[i * n + j] * (double)P[i * RANK + k];
                sent[k] = (double)float_of_bf16(bf16_of_float((float)exact[k]));
            }
            for (int i = 0; i < m; i++) {
                double with = 0.0, without = 0.0;
                for (int k = 0; k < RANK; k++)
                    with += (double)P[i * RANK + k] * sent[k], without += (double)P[i * RANK + k] * exact[k];
                kept[i * n + j] =
                    stage->error[tensor->offset + i * n + j] - 0.75f * (float)(delta[i * n + j] - without);
                expected[i * n + j] = (float)(0.75 * (without - with));
            }
        }
        check_close(kept, expected, tensor->n, 0.05, "what bf16 took from Q"); // a Q on the brink rounds the other way
        free(delta);
        release(expected, tensor->n, "expected");
        release(kept, tensor->n, "kept");
    }
    mesh_run_close(run);
}
#endif

// A study in its quick size, by its script: all of `runs` runs, none of them again, and a lost row once more.
static void check_study(const char *study, const char *only, int runs) {
    char program[PATH_MAX], command[4 * PATH_MAX], says[128], lose[PATH_MAX];
    if (!check(realpath("/proc/self/exe", program) != NULL, "no path of this program")) return;
    snprintf(lose, sizeof lose, "sed -i '$d' \"$RUNS/%s-quick.csv\";", study);
    const struct {
        const char *before;
        int runs;
    } cases[] = {{"", runs}, {"", 0}, {lose, 1}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        snprintf(command, sizeof command,
                 "unset STEPS BATCH; export RUNS='%s/study' TRAIN='%s --program' TAG=quick ONLY='%s'; %s "
                 "scripts/run_%s.sh --quick > '%s/output' 2>&1",
                 test_folder, program, only, cases[i].before, study, test_folder);
        int status = system(command);
        char *text = read_text("output");
        snprintf(says, sizeof says, "%s: %d runs now, %d in all, ", study, cases[i].runs, runs);
        check(status == 0 && strstr(text, says) != NULL, "status %d, not '%s':\n%s", status, says, text);
        free(text);
    }
}

// Must fail for: a row that is not found again, a table or plot that is missing.
static void test_codec_study(void) {
    check_study("codecs", ".*", 9);
}

static void test_async_study(void) {
    check_study("async", ".*", 21);
}

#ifdef WITH_ZMQ
// Real processes over loopback and their faults, by a script; `says` is what it must print.
static void check_mesh_script(const char *settings, const char *script, const char *says) {
    char program[PATH_MAX], command[4 * PATH_MAX];
    if (!check(realpath("/proc/self/exe", program) != NULL, "no path of this program")) return;
    snprintf(command, sizeof command,
             "export LAB=loopback TMPDIR='%s' TRAIN='%s --program' %s; scripts/%s > '%s/output' 2>&1", test_folder,
             program, settings, script, test_folder);
    int status = system(command);
    char *text = read_text("output");
    check(status == 0 && strstr(text, says) != NULL, "status %d, not '%s':\n%s", status, says, text);
    free(text);
}

// A cell dies and another takes its place, one stops for good, the coordinator dies and goes on. Must fail for: a loss
// that is not seen, averages that are not begun anew, a shard that is waited for, a joiner with other weights.
static void test_mesh_faults(void) {
    check_mesh_script("STEPS=150", "run_faults.sh kill stop restart", "4 of 4 passed");
}

// A moment of random troubles; the whole of it is `make soak`.
static void test_mesh_soak(void) {
    check_mesh_script("SOAK_SECONDS=20 SEED=4", "soak.sh", "soak: passed");
}
#endif

// An anchor beside the fast circuit takes nothing of its threads.
static void test_anchor_threads(void) {
    write_corpus();
    MeshRun *run = mesh_run_open(DEEP "-n 10 -p 0.5 -x 2 -y 2 --threads 3 --anchor-threads 1");
    mesh_run_step(run);
    check(omp_get_max_threads() == run->trainer.stream->threads, "products are planned for %d threads, not %d",
          omp_get_max_threads(), run->trainer.stream->threads);
    mesh_run_close(run);
}

// --probe at p = 0 compares a gradient with itself; with masks it is below 1.
static void test_probe(void) {
    write_corpus();
    MeshRun *whole = mesh_run_open(DEEP QUIET "-x 1 -y 3 --probe 1"),
            *masked = mesh_run_open(DEEP QUIET "-p 0.7 -x 1 -y 3 --probe 1");
    mesh_run_step(whole);
    mesh_run_step(masked);
    check(fabs(whole->result.probe[0] - 1.0) < 1e-9, "cosine with itself: %g", whole->result.probe[0]);
    check(masked->result.probe[0] > 0.05 && masked->result.probe[0] < 0.999, "masked: %g", masked->result.probe[0]);
    check(masked->result.probe[2] == masked->result.probe[1], "no filter, and yet %g", masked->result.probe[2]);
    MeshRun *dense = mesh_run_open(DEEP QUIET "-x 2 -y 3 --dp dense --probe 1");
    mesh_run_step(dense); // a replica's own gradient is compared, not the average of all
    check(fabs(dense->result.probe[2] - 1.0) < 1e-9, "of one replica: %g", dense->result.probe[2]);
    mesh_run_close(dense);
    mesh_run_close(whole);
    mesh_run_close(masked);
}

#ifndef DEVICE_CUDA // test_cuda.cu has these for a device's ops
// ---------------------------------------------------------------------------------------------------------------------
// The transform codec: entropy coder, tables, messages

// Codes n values of Laplace's kind with one table and reads them back. Returns the stream's bytes.
static int64_t rans_round_trip(const RansTable *table, const int *values, int n, int shift) {
    int64_t cap = 8 * (int64_t)n + 16;
    unsigned char *buffer = (unsigned char *)malloc((size_t)cap);
    RansWriter w;
    RansReader r;
    int equal = 1;
    rans_write_begin(&w, buffer, cap);
    for (int i = n - 1; i >= 0; i--) rans_write_symbol(&w, table, shift, values[i]);
    int64_t n_bytes = rans_write_end(&w);
    check(n_bytes >= 4, "%d values were not taken", n);
    if (n_bytes < 4) n_bytes = 0;
    unsigned char *stream = (unsigned char *)malloc((size_t)n_bytes); // exactly: a sanitizer sees what lies beyond
    memcpy(stream, w.at, (size_t)n_bytes);
    check(rans_read_begin(&r, stream, n_bytes) == 0, "a stream was refused");
    for (int i = 0; i < n; i++) equal = equal && rans_read_symbol(&r, table, shift) == values[i];
    check(equal, "%d values with shift %d came back changed", n, shift);
    check(rans_read_end(&r) == 0, "the stream was not read to its end");
    for (int64_t cut = 0; cut < n_bytes; cut += 1 + cut / 7) { // every truncation is noticed
        unsigned char *part = (unsigned char *)malloc((size_t)cut + 1);
        memcpy(part, stream, (size_t)cut);
        int refused = rans_read_begin(&r, part, cut) != 0;
        for (int i = 0; i < n && !refused; i++) rans_read_symbol(&r, table, shift);
        check(refused || rans_read_end(&r) != 0, "%lld of %lld bytes were accepted", (long long)cut,
              (long long)n_bytes);
        free(part);
    }
    free(stream);
    free(buffer);
    return n_bytes;
}

// Round trips at the edges, sizes against the entropy, bytes that no writer made.
// Must fail for: symbols in the wrong order, an escape of 16 bits cut to 15, frequencies off by one.
static void test_rans(void) {
    static const int edges[] = {0, 1, -1, 15, -15, 16, -16, 31, -32, 255, -256, 4095, RANS_MAX, -RANS_MAX};
    enum { N = 20000 };
    double weights[RANS_SYMBOLS] = {0}, counts[RANS_SYMBOLS] = {0}, bits = 0.0;
    uint16_t freq[RANS_SYMBOLS];
    RansTable table;
    int *values = (int *)malloc(sizeof(int) * N);
    rans_frequencies(freq, weights);
    check(rans_table(&table, freq) == 0, "even frequencies");
    for (int shift = 0; shift <= RANS_MAX_SHIFT; shift += 3)
        rans_round_trip(&table, edges, sizeof edges / sizeof *edges, shift);
    float *normal = random_values(N, 500, 2.0f);
    for (int i = 0; i < N; i++) values[i] = (int)floorf(normal[i] + 0.5f), counts[values[i] + RANS_RANGE] += 1.0;
    rans_frequencies(freq, counts);
    check(rans_table(&table, freq) == 0 && freq[RANS_ESCAPE] == 1, "measured frequencies");
    for (int s = 0; s < RANS_SYMBOLS; s++)
        if (counts[s] > 0.0) bits -= counts[s] * log2(counts[s] / N);
    double used = 8.0 * (double)rans_round_trip(&table, values, N, 0);
    check(used >= bits && used <= bits * 1.005 + 64, "%.0f bits for an entropy of %.0f", used, bits);
    rans_round_trip(&table, edges, sizeof edges / sizeof *edges, 0); // most of them have no symbol of their own
    freq[3]++;
    check(rans_table(&table, freq) != 0, "frequencies that do not add up were taken");
    freq[3]--, freq[RANS_RANGE]++, freq[RANS_ESCAPE] = 0;
    check(rans_table(&table, freq) != 0, "a table without an escape was taken");
    unsigned char small[6];
    RansWriter w;
    freq[RANS_RANGE]--, freq[RANS_ESCAPE] = 1;
    check(rans_table(&table, freq) == 0, "a table");
    rans_write_begin(&w, small, sizeof small);
    for (int i = 0; i < 100; i++) rans_write_symbol(&w, &table, 0, edges[i % 14]);
    check(rans_write_end(&w) == -1, "a stream that does not fit was taken");
    int accepted = 0;
    for (uint32_t fuzz = 0; fuzz < 2000; fuzz++) {
        unsigned char *bytes = (unsigned char *)malloc(40);
        for (uint32_t i = 0; i < 10; i++) {
            uint32_t word = rand_block(1, RAND_TEST, fuzz, i).v[0];
            memcpy(bytes + 4 * i, &word, 4);
        }
        RansReader r;
        int64_t n_bytes = fuzz % 41;
        unsigned char *exact = (unsigned char *)malloc((size_t)n_bytes + (n_bytes == 0));
        memcpy(exact, bytes, (size_t)n_bytes);
        if (rans_read_begin(&r, exact, n_bytes) == 0) {
            for (int i = 0; i < 100; i++) {
                int value = rans_read_symbol(&r, &table, (int)(fuzz % 5));
                check(abs(value) <= RANS_MAX + 1, "value %d", value);
            }
            accepted += rans_read_end(&r) == 0;
        }
        free(exact);
        free(bytes);
    }
    check(accepted == 0, "%d random streams were accepted", accepted);
    free(values);
    free(normal);
}

// Correlated rows: n tokens z diag(100 (k+1)^-1.5)^1/2 A with an orthonormal A (H, H), and what the bound says of them.
typedef struct {
    int H, n;
    double variance[1024];
    float *mix; // (H, H)
} Correlated;

static void correlated_init(Correlated *c, int H, int n, Stream *stream) {
    c->H = H, c->n = n;
    c->mix = random_values((int64_t)H * H, 510, 1.0f);
    for (int k = 0; k < H; k++) c->variance[k] = 100.0 * pow(k + 1, -1.5);
    check(orthonormalize(c->mix, H, H, stream) == 0, "%s", error_message);
}

static floatX *correlated_rows(const Correlated *c, uint32_t sub, Stream *stream) {
    float *z = random_values((int64_t)c->n * c->H, sub, 1.0f);
    floatX *x = (floatX *)malloc(sizeof(floatX) * (size_t)c->n * (size_t)c->H);
    for (int t = 0; t < c->n; t++)
        for (int k = 0; k < c->H; k++) z[t * c->H + k] *= (float)sqrt(c->variance[k]);
    matmul_product(x, c->H, z, c->H, 0, c->mix, c->H, 1, c->n, c->H, c->H, 0, 0, stream);
    free(z);
    return x;
}

// D(R) of a Gaussian with these variances, at `bits` a token, by reverse water-filling: sum of min(variance, level)
// with sum of max(0, log2(variance / level) / 2) = bits. active: components above the level.
static double distortion_bound(const Correlated *c, double bits, int *active) {
    double low = 1e-9, high = 100.0, sum = 0.0;
    for (int i = 0; i < 100; i++) {
        double level = sqrt(low * high), rate = 0.0;
        for (int k = 0; k < c->H; k++) rate += c->variance[k] > level ? 0.5 * log2(c->variance[k] / level) : 0.0;
        if (rate > bits)
            low = level;
        else
            high = level;
    }
    *active = 0;
    for (int k = 0; k < c->H; k++) sum += fmin(c->variance[k], low), *active += c->variance[k] > low;
    return sum;
}

static KltSettings klt_test_settings(int H, double keep, int stochastic, int fixed) {
    KltSettings settings = {3, stochastic, fixed, 0.45f, 0.35, 1e-3, 16.0 * keep * H, 5, 0.0};
    return settings;
}

// A table learned from rows of its own, and the end that uses it. embedding: NULL, or moments of embed's rows.
typedef struct {
    KltMoments moments;
    KltWork work;
    KltTable table;
    KltEnd end;
    unsigned char *blob;
    int64_t n_bytes;
} KltFixture;

static void klt_fixture(KltFixture *f, const Correlated *c, double keep, int stochastic, int fixed, Stream *stream) {
    floatX *x = correlated_rows(c, 511, stream);
    KltSettings settings = klt_test_settings(c->H, keep, stochastic, fixed);
    memset(f, 0, sizeof *f);
    check(klt_moments_alloc(&f->moments, c->H, 0, 1024) == 0, "%s", error_message);
    klt_moments_begin(&f->moments, 0.9f, stream);
    check(klt_moments_add(&f->moments, x, NULL, NULL, c->n, 2, stochastic, &f->work, stream) == 0, "%s", error_message);
    KltSources from = {&f->moments, NULL, NULL, NULL};
    KltReport report;
    f->blob = klt_learn(&from, &settings, &f->work, &f->n_bytes, &report, stream);
    check(f->blob != NULL, "%s", error_message);
    check(fabs(report.bits / settings.bits - 1.0) < 0.05, "%g bits for %g", report.bits, settings.bits);
    check(klt_table_load(&f->table, f->blob, f->n_bytes, c->H, stream) == 0, "%s", error_message);
    KltEnd end = {&f->table, &f->work, NULL, 2.0 * keep * c->H, {0.0, 0.0}};
    f->end = end;
    free(x);
}

static void klt_fixture_free(KltFixture *f) {
    klt_moments_free(&f->moments);
    klt_work_free(&f->work);
    klt_table_free(&f->table);
    free(f->blob);
}

static double klt_distance(const floatX *a, const floatX *b, int64_t n) {
    double sum = 0.0;
    for (int64_t i = 0; i < n; i++) sum += ((double)a[i] - (double)b[i]) * ((double)a[i] - (double)b[i]);
    return sum;
}

// Distortion against the bound, in nats of nothing: bits an active component above what the bound needs for the same
// distortion are at most `most`. Ten messages: the controller keeps their mean at the budget.
static double klt_efficiency(const Correlated *c, double keep, int stochastic, int fixed, double most, Stream *stream) {
    KltFixture f;
    klt_fixture(&f, c, keep, stochastic, fixed, stream);
    int64_t values = (int64_t)c->n * c->H, cap = klt_most(&f.end, c->n), total = 0;
    floatX *out = (floatX *)malloc(sizeof(floatX) * (size_t)values);
    unsigned char *message = (unsigned char *)malloc((size_t)cap);
    double distortion = 0.0;
    int active, rounds = 6;
    for (int i = 0; i < rounds; i++) {
        KltMessage which = {5, 0, 1, i, 2};
        floatX *x = correlated_rows(c, 520 + (uint32_t)i, stream);
        int64_t n_bytes = klt_encode(&f.end, &which, NULL, x, c->n, c->H, message, cap, stream);
        check(n_bytes > 0, "%s", error_message);
        check(klt_decode(&f.end, &which, NULL, message, n_bytes, out, c->n, c->H, stream) == 0, "%s", error_message);
        if (fixed) check(n_bytes == 8 + (f.table.token_bits * c->n + 7) / 8, "%lld bytes", (long long)n_bytes);
        distortion += klt_distance(out, x, values) / c->n / rounds;
        total += n_bytes;
        free(x);
    }
    double each = (double)total / rounds / c->n, budget = 2.0 * keep * c->H;
    check(fixed ? each <= budget : fabs(each / budget - 1.0) < 0.01, "%.2f bytes a token, budget %.2f", each, budget);
    double bound = distortion_bound(c, 8.0 * each, &active), low = 0.0, high = 8.0 * each;
    for (int i = 0; i < 50; i++) { // the rate at which the bound has this distortion
        double middle = 0.5 * (low + high);
        int unused;
        if (distortion_bound(c, middle, &unused) > distortion)
            low = middle;
        else
            high = middle;
    }
    double above = (8.0 * each - low) / active;
    check(distortion > bound, "distortion %.3f, the bound %.3f", distortion, bound);
    check(above <= most, "rate %.3f bit/component above the bound, %.3f allowed (keep %.3f)", above, most, keep);
    klt_fixture_free(&f);
    free(out);
    free(message);
    return distortion;
}

// Against the Gaussian bound D(R), and entropy coding against fixed bits.
static void test_klt_bound(void) {
    Stream *stream = test_stream(PRECISION_FP32, 2);
    Correlated c;
    correlated_init(&c, 192, 2048, stream);
    double at_20 = klt_efficiency(&c, 0.05, 0, 0, 0.24, stream), at_10 = klt_efficiency(&c, 0.10, 0, 0, 0.30, stream);
    double fixed = klt_efficiency(&c, 0.05, 0, 1, 0.32, stream);
    double gradients = klt_efficiency(&c, 0.05, 1, 0, 0.32, stream);
    check(at_10 < at_20 && at_20 < 0.93 * fixed && at_20 < gradients, "distortions %.3f %.3f %.3f %.3f", at_10, at_20,
          fixed, gradients);
    klt_efficiency(&c, 0.025, 0, 0, 0.24, stream);
    free(c.mix);
    stream_destroy(stream);
}

// Many draws of the same gradient: their mean goes to what the basis keeps of it, as 1 / sqrt(draws).
// Must fail for: draws that do not depend on the step, rounding to nearest, half a step of bias.
static void test_klt_unbiased(void) {
    Stream *stream = test_stream(PRECISION_FP32, 2);
    Correlated c;
    KltFixture f;
    correlated_init(&c, 48, 512, stream);
    for (int fixed = 0; fixed < 2; fixed++) {
        klt_fixture(&f, &c, 0.08, 1, fixed, stream);
        int n = 64, H = c.H, K = f.table.head.K, draws = 600;
        int64_t values = (int64_t)n * H, cap = klt_most(&f.end, n);
        floatX *x = correlated_rows(&c, 530, stream), *out = (floatX *)malloc(sizeof(floatX) * (size_t)values);
        float *kept = guarded(values), *y = guarded((int64_t)n * K);
        double *sum = (double *)calloc((size_t)values, sizeof(double)), noise = 0.0, off = 0.0;
        unsigned char *message = (unsigned char *)malloc((size_t)cap);
        if (fixed) // beyond the outermost levels nothing is unbiased
            for (int64_t i = 0; i < values; i++) x[i] *= 0.3f;
        matmul_product(y, K, x, H, 0, f.table.basis.full, K, 0, n, K, H, 0, 0, stream);
        matmul_product(kept, H, y, K, 0, f.table.basis.full, K, 1, n, H, K, 0, 0, stream);
        for (int i = 0; i < draws; i++) {
            KltMessage which = {5, 1, 2, i, 0};
            f.end.control[0] = f.end.control[1] = 0.0;
            int64_t n_bytes = klt_encode(&f.end, &which, NULL, x, n, H, message, cap, stream);
            check(klt_decode(&f.end, &which, NULL, message, n_bytes, out, n, H, stream) == 0, "%s", error_message);
            noise += klt_distance(out, kept, values) / draws;
            for (int64_t v = 0; v < values; v++) sum[v] += (double)out[v] / draws;
        }
        for (int64_t v = 0; v < values; v++) off += (sum[v] - (double)kept[v]) * (sum[v] - (double)kept[v]);
        check(off < 1.15 * noise / draws && off > 0.85 * noise / draws,
              "the mean of %d draws is off by %.3g, expected %.3g", draws, off, noise / draws);
        release(kept, values, "kept");
        release(y, (int64_t)n * K, "y");
        klt_fixture_free(&f);
        free(x);
        free(out);
        free(sum);
        free(message);
    }
    free(c.mix);
    stream_destroy(stream);
}

// Whatever bytes come: an error or values, never a read beyond them, and x untouched by what is refused.
static void klt_hostile(KltFixture *f, const KltMessage *which, const unsigned char *good, int64_t n_bytes, int n,
                        Stream *stream) {
    int H = f->table.head.H, values = n * H, refused = 0, tries = 0;
    floatX *out = (floatX *)malloc(sizeof(floatX) * (size_t)values);
    for (int i = 0; i < values; i++) out[i] = 77.0f;
    for (int64_t cut = 0; cut < n_bytes; cut += 1 + cut / 9, tries++) {
        unsigned char *part = (unsigned char *)malloc((size_t)cut + (cut == 0));
        memcpy(part, good, (size_t)cut);
        refused += klt_decode(&f->end, which, NULL, part, cut, out, n, H, stream) != 0;
        free(part);
    }
    check(refused == tries, "%d of %d truncated messages were refused", refused, tries);
    unsigned char *more = (unsigned char *)malloc((size_t)n_bytes + 1);
    memcpy(more, good, (size_t)n_bytes);
    more[n_bytes] = 0;
    check_error(klt_decode(&f->end, which, NULL, more, n_bytes + 1, out, n, H, stream), "klt: ", "a byte more");
    more[0] ^= 1;
    check_error(klt_decode(&f->end, which, NULL, more, n_bytes, out, n, H, stream), "of table", "another version");
    more[0] ^= 1, memset(more + 4, 0xFF, 4);
    check_error(klt_decode(&f->end, which, NULL, more, n_bytes, out, n, H, stream), "step", "a step of NaN");
    int untouched = 1;
    for (int i = 0; i < values; i++) untouched = untouched && out[i] == 77.0f;
    check(untouched, "a refused message was decoded");
    for (uint32_t fuzz = 0; fuzz < 300; fuzz++) {
        memcpy(more, good, (size_t)n_bytes);
        for (uint32_t i = 0; i <= fuzz % 4; i++) {
            Philox random = rand_block(2, RAND_TEST, fuzz, i);
            more[4 + random.v[0] % (n_bytes - 4)] = (unsigned char)random.v[1];
        }
        klt_decode(&f->end, which, NULL, more, n_bytes, out, n, H, stream); // any answer will do
    }
    free(more);
    free(out);
}

// Tables: written and read back, sizes to the byte, and what is not a table.
static void klt_hostile_tables(const KltFixture *f, Stream *stream) {
    int H = f->table.head.H, refused = 0, tries = 0;
    KltTable table;
    check(f->n_bytes == klt_table_bytes(&f->table.head), "the table has %lld bytes", (long long)f->n_bytes);
    for (int64_t cut = 0; cut < f->n_bytes; cut += 1 + cut / 5, tries++) {
        unsigned char *part = (unsigned char *)malloc((size_t)cut + (cut == 0));
        memcpy(part, f->blob, (size_t)cut);
        refused += klt_table_load(&table, part, cut, H, stream) != 0;
        free(part);
    }
    check(refused == tries, "%d of %d truncated tables were refused", refused, tries);
    check_error(klt_table_load(&table, f->blob, f->n_bytes, H + 1, stream), "values", "a table of another width");
    unsigned char *copy = (unsigned char *)malloc((size_t)f->n_bytes);
    for (uint32_t fuzz = 0; fuzz < 200; fuzz++) {
        memcpy(copy, f->blob, (size_t)f->n_bytes);
        Philox random = rand_block(3, RAND_TEST, fuzz, 0);
        copy[random.v[0] % (fuzz % 2 ? (uint64_t)f->n_bytes : 32)] = (unsigned char)random.v[1];
        if (klt_table_load(&table, copy, f->n_bytes, H, stream) == 0) klt_table_free(&table);
    }
    free(copy);
}

static void test_klt_messages(void) {
    Stream *stream = test_stream(PRECISION_FP32, 2);
    Correlated c;
    KltFixture f;
    correlated_init(&c, 40, 600, stream);
    for (int kind = 0; kind < 4; kind++) {
        klt_fixture(&f, &c, 0.1, kind & 1, kind >> 1, stream);
        int64_t cap = klt_most(&f.end, c.n);
        KltMessage which = {5, 1, 2, 7, 3};
        floatX *x = correlated_rows(&c, 540, stream), *out = (floatX *)malloc(sizeof(floatX) * (size_t)(c.n * c.H));
        unsigned char *message = (unsigned char *)malloc((size_t)cap);
        for (int n = 1; n <= 600; n += n == 1 ? 299 : 300) { // pieces of 256: one token, a short second piece, three
            int64_t n_bytes = klt_encode(&f.end, &which, NULL, x, n, c.H, message, klt_most(&f.end, n), stream);
            check(n_bytes > 0 && n_bytes <= klt_most(&f.end, n), "%s", error_message);
            check(klt_decode(&f.end, &which, NULL, message, n_bytes, out, n, c.H, stream) == 0, "%s", error_message);
            check(klt_distance(out, x, n * c.H) < 0.4 * 250.0 * n, "%d tokens arrive changed", n);
            if (n == 300) klt_hostile(&f, &which, message, n_bytes, n, stream);
        }
        check_error((int)klt_encode(&f.end, &which, NULL, x, 300, c.H, message, 100, stream), "the buffer",
                    "100 bytes");
        for (int i = 0; i < c.n * c.H; i++) x[i] *= 1e-6f; // gradients of any size
        int64_t n_bytes = klt_encode(&f.end, &which, NULL, x, 300, c.H, message, cap, stream);
        check(klt_decode(&f.end, &which, NULL, message, n_bytes, out, 300, c.H, stream) == 0, "%s", error_message);
        if (kind & 1)
            check(klt_distance(out, x, 300 * c.H) < 0.4 * 250.0 * 300 * 1e-12, "small gradients arrive changed");
        x[5] = NAN;
        n_bytes = klt_encode(&f.end, &which, NULL, x, 300, c.H, message, cap, stream);
        check(n_bytes == 8 && klt_decode(&f.end, &which, NULL, message, 8, out, 300, c.H, stream) == 0, "NaN");
        check(isnan(out[0]) && isnan(out[300 * c.H - 1]), "a state that is not finite arrives as if it were");
        if (kind & 1) {
            memset(x, 0, sizeof(floatX) * (size_t)(300 * c.H));
            n_bytes = klt_encode(&f.end, &which, NULL, x, 300, c.H, message, cap, stream);
            check(n_bytes == 8 && klt_decode(&f.end, &which, NULL, message, 8, out, 300, c.H, stream) == 0, "zeros");
            check(klt_distance(out, x, 300 * c.H) == 0.0, "zeros do not arrive");
        }
        klt_hostile_tables(&f, stream);
        klt_fixture_free(&f);
        free(x);
        free(out);
        free(message);
    }
    free(c.mix);
    stream_destroy(stream);
}

// Kinds of tokens: of each row its own, all different, in the order of their first rows; also where all are one, and
// where their slots collide. Must fail for: a slot taken for another token's, kinds counted from 1.
static void test_klt_kinds(void) {
    enum { N = 300 };
    uint32_t tokens[N], distinct[N];
    int32_t kinds[N], *seen = (int32_t *)malloc(sizeof *seen * klt_kinds_slots(N));
    static const uint32_t ranges[][2] = {{1, 1}, {7, 1}, {100000, 1}, {50, 1u << 16}, {N, 0x9E3779B9u}};
    check(klt_kinds_slots(N) >= 2 * N, "%zu slots", klt_kinds_slots(N));
    for (int i = 0; i < 5; i++) {
        int n = N - i * 31, first = 0, wrong = 0;
        for (int t = 0; t < n; t++)
            tokens[t] = rand_block(1, RAND_TEST, 560, (uint64_t)t).v[0] % ranges[i][0] * ranges[i][1];
        int n_kinds = klt_kinds(distinct, kinds, tokens, n, seen);
        for (int t = 0; t < n; t++) {
            wrong += kinds[t] < 0 || kinds[t] > first || distinct[kinds[t]] != tokens[t];
            first += kinds[t] == first;
        }
        for (int k = 0; k < n_kinds; k++)
            for (int j = 0; j < k; j++) wrong += distinct[j] == distinct[k];
        check(wrong == 0 && first == n_kinds, "range %d: %d wrong, %d kinds of %d", i, wrong, n_kinds, first);
    }
    free(seen);
}

// States that are a matrix times their token's embedding, and noise: the predictor finds the matrix, and what it leaves
// costs a fraction. Moments over two passes with decay. Must fail for: W transposed, means left out, tokens off by one.
static void test_klt_predictor(void) {
    enum { H = 32, V = 200, N = 1000 };
    Stream *stream = test_stream(PRECISION_FP32, 2);
    float *embed = random_values(V * H, 550, 0.02f), *W = random_values(H * H, 551, 20.0f);
    float *x = random_values((int64_t)N * H, 552, 0.3f), *e = (float *)malloc(sizeof(float) * N * H), distortion[2];
    float *out = (float *)malloc(sizeof(float) * N * H);
    uint32_t *tokens = (uint32_t *)malloc(sizeof(uint32_t) * N);
    unsigned char *message = (unsigned char *)malloc(1 << 20);
    for (int t = 0; t < N; t++) tokens[t] = rand_block(4, RAND_TEST, 0, (uint64_t)t).v[0] % V;
    for (int i = 0; i < V * H; i++) embed[i] += 0.05f;
    embedding_forward(e, tokens, embed, N, H, stream);
    matmul_product(x, H, e, H, 0, W, H, 1, N, H, H, 0, 1, stream);
    for (int i = 0; i < N * H; i++) x[i] += 3.0f;
    for (int predicted = 0; predicted < 2; predicted++) {
        KltSettings settings = klt_test_settings(H, 0.1, 0, 0);
        KltMoments moments, embedding;
        KltWork work = {{NULL, 0}, {NULL, 0}, NULL, 0};
        KltTable table;
        int64_t n_bytes;
        check(klt_moments_alloc(&moments, H, predicted, 512) == 0, "%s", error_message);
        check(klt_moments_alloc(&embedding, H, 0, 0) == 0, "%s", error_message);
        for (int pass = 0; pass < 2; pass++) {
            klt_moments_begin(&moments, 0.9f, stream);
            klt_moments_begin(&embedding, 0.9f, stream);
            klt_moments_add(&moments, x, e, tokens, N, 2, 0, &work, stream);
            klt_moments_add(&embedding, e, NULL, NULL, N, 1, 0, &work, stream);
        }
        check(fabs(moments.weight - 1.9 * N) < 1e-3, "weight %g", moments.weight);
        KltSources from = {&moments, predicted ? &embedding : NULL, NULL, embed};
        KltReport report;
        unsigned char *blob = klt_learn(&from, &settings, &work, &n_bytes, &report, stream);
        check(blob != NULL && klt_table_load(&table, blob, n_bytes, H, stream) == 0, "%s", error_message);
        KltEnd end = {&table, &work, embed, 0.2 * H, {0.0, 0.0}};
        KltMessage which = {5, 0, 0, 0, 0};
        int64_t sent = klt_encode(&end, &which, tokens, x, N, H, message, 1 << 20, stream);
        check(klt_decode(&end, &which, tokens, message, sent, out, N, H, stream) == 0, "%s", error_message);
        distortion[predicted] = (float)(klt_distance(out, x, N * H) / N);
        klt_table_free(&table);
        klt_moments_free(&moments);
        klt_moments_free(&embedding);
        klt_work_free(&work);
        free(blob);
    }
    check(distortion[1] < 0.5f * distortion[0] && distortion[1] < 0.09f * H, "distortion %g with, %g without predictor",
          (double)distortion[1], (double)distortion[0]);
    free(embed);
    free(W);
    free(x);
    free(e);
    free(out);
    free(tokens);
    free(message);
    stream_destroy(stream);
}

// Rows whose gradients have another covariance: what the loss feels of the errors, sum of (g . d)^2, is less with the
// metric and close to what the report says; the bytes are the same. Must fail for: M for its inverse, dual and basis
// exchanged, eigenvalues for their roots, the metric of the states themselves.
static void test_klt_metric(void) {
    Stream *stream = test_stream(PRECISION_FP32, 2);
    Correlated c, g;
    correlated_init(&c, 61, 700, stream);
    correlated_init(&g, 61, 700, stream);
    for (int i = 0; i < 61 * 61; i++) g.mix[i] = c.mix[i % 61 * 61 + i / 61]; // other directions
    floatX *x = correlated_rows(&c, 570, stream), *dx = correlated_rows(&g, 571, stream);
    int H = c.H, n = c.n;
    double felt[2];
    for (int i = 0; i < n * H; i++) x[i] += (floatX)(1 + i % H % 3); // a mean, which the table takes off
    unsigned char *message = (unsigned char *)malloc(1 << 20);
    floatX *out = (floatX *)malloc(sizeof(floatX) * (size_t)(n * H));
    float *dots = (float *)malloc(sizeof(float) * (size_t)n * (size_t)n);
    for (int weighed = 0; weighed < 2; weighed++) {
        KltSettings settings = klt_test_settings(H, 0.05, 0, 0);
        KltMoments moments[2];
        KltWork work = {{NULL, 0}, {NULL, 0}, NULL, 0};
        KltTable table;
        KltReport report;
        int64_t n_bytes;
        settings.metric = 1.0;
        for (int i = 0; i < 2; i++) {
            check(klt_moments_alloc(&moments[i], H, 0, 1024) == 0, "%s", error_message);
            klt_moments_begin(&moments[i], 0.9f, stream);
            klt_moments_add(&moments[i], i == 0 ? x : dx, NULL, NULL, n, 1, i, &work, stream);
        }
        KltSources from = {&moments[0], NULL, weighed ? &moments[1] : NULL, NULL};
        unsigned char *blob = klt_learn(&from, &settings, &work, &n_bytes, &report, stream);
        check(blob != NULL && klt_table_load(&table, blob, n_bytes, H, stream) == 0, "%s", error_message);
        check(((table.head.flags & KLT_DUAL) != 0) == weighed, "flags %d", table.head.flags);
        check(report.lost > report.bound && report.lost < 2.5 * report.bound, "lost %g, at least %g", report.lost,
              report.bound);
        KltEnd end = {&table, &work, NULL, settings.bits / 8.0, {0.0, 0.0}};
        KltMessage which = {5, 0, 0, 0, 0};
        int64_t sent = klt_encode(&end, &which, NULL, x, n, H, message, 1 << 20, stream);
        check(fabs((double)sent / (n * settings.bits / 8.0) - 1.0) < 0.1, "%lld bytes", (long long)sent);
        check(klt_decode(&end, &which, NULL, message, sent, out, n, H, stream) == 0, "%s", error_message);
        for (int i = 0; i < n * H; i++) out[i] -= x[i];
        matmul_product(dots, n, out, H, 0, dx, H, 1, n, n, H, 0, 0, stream);
        felt[weighed] = sum_of_squares(dots, (int64_t)n * n, stream);
        if (weighed) { // as a share of what states without their mean would cost
            for (int h = 0; h < H; h++) {
                double mean = 0.0;
                for (int t = 0; t < n; t++) mean += (double)x[t * H + h] / n;
                for (int t = 0; t < n; t++) out[t * H + h] = x[t * H + h] - (floatX)mean;
            }
            matmul_product(dots, n, out, H, 0, dx, H, 1, n, n, H, 0, 0, stream);
            double share = felt[1] / sum_of_squares(dots, (int64_t)n * n, stream);
            check(fabs(share / report.lost - 1.0) < 0.1, "%g of the variance is lost, the report says %g", share,
                  report.lost);
        }
        for (int i = 0; i < 2; i++) klt_moments_free(&moments[i]);
        klt_table_free(&table);
        klt_work_free(&work);
        free(blob);
    }
    check(felt[1] < 0.8 * felt[0], "the loss feels %g with, %g without the metric", felt[1], felt[0]);
    free(x);
    free(dx);
    free(out);
    free(dots);
    free(message);
    free(c.mix);
    free(g.mix);
    stream_destroy(stream);
}

// The sizes boundaries have: eigenvectors of 192 and 768 values put the covariance together again.
static void test_klt_eigenvectors(void) {
    static const int sizes[] = {192, 768};
    Stream *stream = test_stream(PRECISION_FP32, 2);
    for (size_t s = 0; s < 2; s++) {
        int H = sizes[s];
        int64_t values = (int64_t)H * H;
        Correlated c;
        correlated_init(&c, H, 1, stream);
        float *A = guarded(values), *V = guarded(values), *w = guarded(H), *scaled = random_values(values, 560, 1.0f);
        for (int i = 0; i < H; i++)
            for (int k = 0; k < H; k++) scaled[i * H + k] = c.mix[i * H + k] * (float)c.variance[k];
        matmul_product(A, H, scaled, H, 0, c.mix, H, 1, H, H, H, 0, 0, stream);
        check(eigh(V, w, A, H, stream) == 0, "%s", error_message);
        for (int k = 0; k < H; k++)
            check(fabs((double)w[k] - c.variance[k]) < 1e-5 * c.variance[0], "eigenvalue %d is %g", k, (double)w[k]);
        for (int i = 0; i < H; i++)
            for (int k = 0; k < H; k++) scaled[i * H + k] = V[i * H + k] * w[k];
        float *again = guarded(values);
        matmul_product(again, H, scaled, H, 0, V, H, 1, H, H, H, 0, 0, stream);
        check_close(again, A, values, 1e-5, "V diag(w) V^T");
        release(A, values, "A");
        release(V, values, "V");
        release(w, H, "w");
        release(again, values, "again");
        free(scaled);
        free(c.mix);
    }
    stream_destroy(stream);
}
#endif // the transform codec of the CPU

// ---------------------------------------------------------------------------------------------------------------------
// The mesh before it runs

// The smallest possible cost of the most expensive of Y stages for n layers, the last of which also has the head.
static int64_t cheapest_split(int n, int Y, int64_t layer, int64_t head) {
    int64_t best = INT64_MAX;
    if (Y == 1) return n * layer + head;
    for (int k = 1; k <= n - (Y - 1); k++) { // k layers on the first stage
        int64_t rest = cheapest_split(n - k, Y - 1, layer, head), worst = k * layer > rest ? k * layer : rest;
        if (worst < best) best = worst;
    }
    return best;
}

// The cost of a partition's most expensive stage; -1 if a layer is missing, doubled, or a stage is empty.
static int64_t partition_cost(const int *first, const Config *config, int Y, int T) {
    int64_t worst = 0;
    for (int s = 0; s < Y; s++) {
        int64_t cost = (first[s + 1] - first[s]) * partition_layer_cost(config, T);
        if (s == Y - 1) cost += partition_head_cost(config);
        if (cost > worst) worst = cost;
        if (first[s + 1] <= first[s]) return -1;
    }
    return first[0] == 0 && first[Y] == config->n_layers ? worst : -1;
}

// Every split of up to 11 layers against brute force, with no head to speak of, one of four layers, and one of twenty.
// Must fail for: a forgotten head, a stage left empty, 10 layers cut as 4 4 2.
static void test_partition(void) {
    static const int vocabularies[] = {258, 128256, 600000};
    static const struct {
        const char *preset;
        int layers, Y;
        int sizes[4];
    } known[] = {{"tiny", 10, 3, {3, 4, 3}},
                 {"smollm2-135m", 30, 4, {9, 9, 9, 3}}, // the head is 6 layers
                 {"llama-3.2-1b", 16, 4, {5, 5, 5, 1}},
                 {"tiny", 4, 4, {1, 1, 1, 1}},
                 {"tiny", 7, 1, {7}}};
    Config config;
    int first[PARTITION_MAX_STAGES + 2];
    for (int v = 0; v < 3; v++)
        for (int L = 1; L <= 11; L++)
            for (int Y = 1; Y <= L; Y++) {
                check(config_from_spec(&config, "llama-3.2-1b") == 0, "%s", error_message);
                config.vocab = vocabularies[v], config.n_layers = L;
                first[Y + 1] = 12345;
                check(partition_layers(first, &config, Y, 2048) == 0, "%s", error_message);
                int64_t best = cheapest_split(L, Y, partition_layer_cost(&config, 2048), partition_head_cost(&config));
                check(partition_cost(first, &config, Y, 2048) == best && first[Y + 1] == 12345,
                      "%d layers on %d stages, vocabulary %d: %lld, the best is %lld", L, Y, config.vocab,
                      (long long)partition_cost(first, &config, Y, 2048), (long long)best);
            }
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        check(config_from_spec(&config, known[i].preset) == 0, "%s", error_message);
        config.n_layers = known[i].layers;
        check(partition_layers(first, &config, known[i].Y, 2048) == 0, "%s", error_message);
        for (int s = 0; s < known[i].Y; s++)
            check(first[s + 1] - first[s] == known[i].sizes[s], "%s, %d layers: stage %d of %d has %d", known[i].preset,
                  known[i].layers, s, known[i].Y, first[s + 1] - first[s]);
    }
    // the largest shape a config may have does not overflow
    Config huge = config;
    huge.n_layers = 4096, huge.channels = 1 << 20, huge.heads = huge.kv_heads = 1 << 14, huge.head_dim = 1 << 12;
    huge.ffn = 1 << 22, huge.vocab = 1 << 24;
    check(partition_layers(first, &huge, 4096, PARTITION_MAX_T) == 0 && partition_cost(first, &huge, 4096, 1) > 0,
          "the largest model");
    check(partition_layers(first, &huge, 3, PARTITION_MAX_T) == 0 && first[1] == 1365 && first[2] == 2731,
          "the largest model on three stages: %d %d", first[1], first[2]);
    check_error(partition_layers(first, &config, 0, 16), "0 pipeline stages", "no stage");
    check_error(partition_layers(first, &config, -2, 16), "-2 pipeline stages", "a negative number of stages");
    check_error(partition_layers(first, &config, config.n_layers + 1, 16), "at least one", "more stages than layers");
    check_error(partition_layers(first, &config, 1, 0), "0 tokens", "no tokens");
    check_error(partition_layers(first, &config, 1, PARTITION_MAX_T + 1), "tokens a sequence", "too long a sequence");
}

// The published setting: llama-3.2-1b, X 8, Y 4, batch 32, T 2048, 200 Mbit/s; the latency is a guess.
static MeshPlan published_plan(void) {
    MeshPlan plan;
    memset(&plan, 0, sizeof plan);
    check(config_from_spec(&plan.config, "llama-3.2-1b") == 0, "%s", error_message);
    plan.replicas = 8, plan.stages = 4, plan.batch = 32, plan.T = 2048, plan.micro_batch = 1;
    plan.mask_rate = 0.95f, plan.anchor = 1, plan.anchor_rank = plan.config.channels / 8, plan.anchor_delay = 20;
    plan.dp = MESH_DP_DILOCO, plan.local_steps = 10, plan.wire_bytes = 2;
    plan.link_mbps = 200.0, plan.link_ms = 10.0, plan.device_tflops = 90.0;
    plan.factor_sets = 1;
    return plan;
}

static void check_within(double value, double expected, double share, const char *what) {
    check(fabs(value - expected) <= share * expected, "%s: %g, expected %g within %g%%", what, value, expected,
          100.0 * share);
}

// Refused, and the message says why.
static void check_plan_refused(const MeshPlan *plan, const char *why) {
    MeshEstimate estimate;
    check_error(mesh_estimate(&estimate, plan), why, why);
    check(estimate.cells == NULL, "%s: cells after a refusal", why);
}

// Bytes and rates against SPEC section 9, memory against the stage train_gpt.cu would allocate, each term against its
// formula, bad input. Must fail for: params tied when Y > 1, one direction of a boundary, fp32 taken for bf16, an
// anchor that costs nothing, a dense average that overlaps.
static void test_estimate(void) {
    static const struct {
        double bytes, tokens_per_s, ratio; // a token, of one replica, over Dense; 0: not published
    } published[MESH_VARIANTS] = {{22900, 1.1e3, 1}, {0, 0, 1.4},      {6900, 3.6e3, 3.3}, {0, 0, 0},
                                  {370, 48.9e3, 42}, {790, 27.8e3, 0}, {446, 46.5e3, 0}};
    MeshPlan plan = published_plan(), changed;
    MeshEstimate e, variants[MESH_VARIANTS];
    double dense = 0.0;
    for (int i = 0; i < MESH_VARIANTS; i++) {
        const char *name = mesh_variants[i].name;
        changed = mesh_variant_plan(&plan, &mesh_variants[i]);
        check(mesh_estimate(&variants[i], &changed) == 0, "%s", error_message);
        double rate = variants[i].even_tokens_per_s / variants[i].n_fast;
        if (i == 0) dense = rate;
        if (published[i].bytes > 0.0) check_within(variants[i].total_bytes, published[i].bytes, 0.15, name);
        if (published[i].ratio > 0.0) check_within(rate / dense, published[i].ratio, 0.15, name);
        if (published[i].tokens_per_s > 0.0) check_within(rate, published[i].tokens_per_s, 0.2, name);
    }
    static const int by_speed[] = {4, 6, 5, 2, 1, 0}; // M95, M95+AP, M90+AP, +DP, M95 under dense DP, Dense
    for (int i = 1; i < 6; i++) {
        const MeshEstimate *faster = &variants[by_speed[i - 1]], *slower = &variants[by_speed[i]];
        check(faster->tokens_per_s > slower->tokens_per_s && faster->even_tokens_per_s > slower->even_tokens_per_s,
              "%s is not faster than %s", mesh_variants[by_speed[i - 1]].name, mesh_variants[by_speed[i]].name);
    }
    double untied = 1235814400.0 + 128256.0 * 2048.0, tokens = 32.0 * 2048.0;
    check_within(variants[0].boundary_bytes, 6144.0, 1e-12, "boundary");
    check_within(variants[0].dp_bytes, 2.0 * 7.0 / 8.0 * 2.0 * untied / 4.0 / tokens, 1e-12, "dense average");
    check_within(variants[4].boundary_bytes, 6144.0 * 102.0 / 2048.0, 1e-12, "masked boundary");
    check(variants[0].dp_bytes >= 640.0 * variants[4].dp_bytes && variants[0].dp_bytes < 700.0 * variants[4].dp_bytes,
          "DiLoCo and PowerSGD save %gx", variants[0].dp_bytes / variants[4].dp_bytes);
    check_within(variants[6].anchor_bytes, 2.0 * 16 * (44032 + 7) * 256 / 4 / (20 * tokens), 1e-12, "anchor's factors");
    check(variants[6].n_fast == 7 && variants[4].n_fast == 8 && variants[4].anchor_bytes == 0.0,
          "the anchor's replica");
    check(variants[6].anchor_s > variants[6].step_s && variants[6].anchor_s < 20.0 * variants[6].step_s,
          "the anchor takes %g s of a step's %g s", variants[6].anchor_s, variants[6].step_s);
    double params = 0.0, layers = 0.0;
    for (int s = 0; s < 4; s++) {
        const CellEstimate *cell = &variants[6].cells[s];
        params += (double)cell->n_params, layers += cell->n_layers;
        check(cell->memory_bytes > 16.0 * (double)cell->n_params && cell->anchor_memory_bytes > 0.0, "stage %d: %g B",
              s, cell->memory_bytes);
        check(s == 0 || cell->act_bytes < variants[6].cells[0].act_bytes, "more in flight on stage %d than on 0", s);
    }
    check(params == untied && layers == 16.0, "%g parameters, %g layers", params, layers);

    // an anchor that cannot keep its delay holds the fast circuit up
    changed = plan, changed.anchor_delay = 1;
    check(mesh_estimate(&e, &changed) == 0, "%s", error_message);
    check_within(e.step_s, e.anchor_s, 1e-12, "a step that waits for the anchor");
    mesh_estimate_free(&e);
    // one fast replica has nobody to average with, and sends its parameters to the anchor
    changed = plan, changed.replicas = 2;
    check(mesh_estimate(&e, &changed) == 0, "%s", error_message);
    check(e.n_fast == 1 && e.dp_bytes == 0.0, "one fast replica averages %g bytes a token", e.dp_bytes);
    check_within(e.anchor_bytes, 2.0 * (16.0 * (44032 + 7) * 256 + untied) / 4 / (20 * tokens), 1e-12, "snapshot");
    mesh_estimate_free(&e);
    // p = 0: the anchor is off; four bytes a value are twice two
    changed = plan, changed.mask_rate = 0.0f, changed.wire_bytes = 4;
    check(mesh_estimate(&e, &changed) == 0, "%s", error_message);
    check(e.n_fast == 8 && e.anchor_bytes == 0.0 && e.anchor_s == 0.0, "an anchor without a mask");
    check_within(e.boundary_bytes, 2.0 * 6144.0, 1e-12, "fp32 boundary");
    mesh_estimate_free(&e);
    // a slow link: time is what the busiest cell sends, and the latency of six hops
    changed = plan, changed.mask_rate = 0.0f, changed.dp = MESH_DP_NONE, changed.link_mbps = 1.0;
    check(mesh_estimate(&e, &changed) == 0, "%s", error_message);
    check_within(e.step_s, 8192.0 * tokens * 8.0 / 1e6 + 6 * 0.010, 1e-12, "a slow link");
    mesh_estimate_free(&e);

    // tables: of both sides of a boundary, sent as often as factors, which may be left out; memory where they lie
    changed = plan, changed.table_bytes = 3e6, changed.factor_sets = 0;
    changed.table_memory = 1e9, changed.codec_memory = 1e10, changed.learn_memory = 1e11;
    check(mesh_estimate(&e, &changed) == 0, "%s", error_message);
    check_within(e.anchor_bytes, 3e6 * 6.0 / 4.0 / (20 * tokens), 1e-12, "tables without factors");
    for (int s = 0; s < 4; s++) {
        const CellEstimate *with = &e.cells[s], *without = &variants[6].cells[s];
        double beside = s == 0 || s == 3 ? 1.0 : 2.0;
        check_within(with->memory_bytes - without->memory_bytes, 1e10 + beside * 1e9, 1e-6, "a cell's tables");
        check_within(with->anchor_memory_bytes - without->anchor_memory_bytes + 1.0, (s > 0) * 1e11 + 1.0, 1e-6,
                     "what the anchor learns with");
    }
    mesh_estimate_free(&e);
    for (int i = 0; i < MESH_VARIANTS; i++) mesh_estimate_free(&variants[i]);

    // one cell, alone: the model as it is, tied, and the memory train_gpt.cu would take
    static const char *const models[] = {"smollm2-135m", "tinyllama-1.1b"};
    for (int i = 0; i < 2; i++)
        for (int recompute = 0; recompute < 2; recompute++) {
            Stage stage;
            changed = plan, changed.replicas = 1, changed.stages = 1, changed.anchor = 0, changed.recompute = recompute;
            check(config_from_spec(&changed.config, models[i]) == 0, "%s", error_message);
            changed.micro_batch = 2, changed.T = 512;
            changed.logits_floats = (int64_t)logits_chunk(&changed.config, 2 * 512) * changed.config.vocab;
            check(stage_table(&stage, &changed.config, 0, changed.config.n_layers) == 0 &&
                      stage_plan(&stage, 2, 512, 1, recompute) == 0,
                  "%s", error_message);
            check(mesh_estimate(&e, &changed) == 0, "%s", error_message);
            check_within(e.cells[0].act_bytes, (double)stage.acts_bytes, 0.005, "activations");
            check(e.cells[0].n_params == stage.n_params && e.total_bytes == 0.0, "%s: %lld parameters, %g bytes sent",
                  models[i], (long long)e.cells[0].n_params, e.total_bytes);
            int64_t vectors = (2 * changed.config.n_layers + 1) * (int64_t)changed.config.channels;
            int64_t look_up = changed.config.tied ? 0 : partition_head_cost(&changed.config);
            double attention = 512.0 * (double)stage.A * changed.config.n_layers;
            double flops = 6.0 * ((double)(stage.n_params - vectors - look_up) + attention);
            check_within(e.step_s, 32 * 512.0 * flops / 90e12, 1e-12, "a step alone");
            mesh_estimate_free(&e);
            stage_free(&stage);
        }

    // PowerSGD's rank: the last that still gives the ratio
    for (int r = 1; r < 300; r += 17) {
        double ratio = untied / powersgd_elements(&plan.config, 16, 2, 1, r);
        int at = powersgd_auto_rank(&plan.config, 1, ratio * (1.0 - 1e-9));
        int above = powersgd_auto_rank(&plan.config, 1, ratio * 1.001);
        check(at == r && above == (r > 1 ? r - 1 : 1), "rank %d became %d and %d", r, at, above);
    }
    check(powersgd_auto_rank(&plan.config, 1, 64.0) == 24, "rank %d", powersgd_auto_rank(&plan.config, 1, 64.0));
    check(powersgd_auto_rank(&plan.config, 0, 1e9) == 1, "at least 1");
    check(config_from_spec(&changed.config, "tiny") == 0 && powersgd_auto_rank(&changed.config, 0, 1e-3) == 64,
          "at most every column");

    // refusals
    static const struct {
        size_t offset;
        int value;
        const char *why;
    } wrong[] = {{offsetof(MeshPlan, replicas), 0, "replicas is 0"},
                 {offsetof(MeshPlan, replicas), 1, "at least 2"},
                 {offsetof(MeshPlan, stages), 0, "0 pipeline stages"},
                 {offsetof(MeshPlan, stages), 17, "17 pipeline stages"},
                 {offsetof(MeshPlan, batch), 2000000000, "batch is 2000000000"},
                 {offsetof(MeshPlan, T), 0, "0 tokens"},
                 {offsetof(MeshPlan, T), INT_MAX, "tokens a sequence"},
                 {offsetof(MeshPlan, micro_batch), 0, "micro-batch is 0"},
                 {offsetof(MeshPlan, micro_batch), 33, "it must be 1 to 32"},
                 {offsetof(MeshPlan, recompute), 2, "recompute is 2"},
                 {offsetof(MeshPlan, anchor), 2, "anchor is 2"},
                 {offsetof(MeshPlan, anchor_rank), -1, "anchor-rank is -1"},
                 {offsetof(MeshPlan, anchor_delay), 0, "anchor-delay is 0"},
                 {offsetof(MeshPlan, dp), 3, "dp is 3"},
                 {offsetof(MeshPlan, local_steps), 0, "local-steps is 0"},
                 {offsetof(MeshPlan, powersgd_rank), -1, "powersgd-rank is -1"},
                 {offsetof(MeshPlan, wire_bytes), 3, "3 bytes a value"},
                 {offsetof(MeshPlan, config.n_layers), 0, "num_hidden_layers is 0"}};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        changed = plan;
        memcpy((char *)&changed + wrong[i].offset, &wrong[i].value, sizeof(int));
        check_plan_refused(&changed, wrong[i].why);
    }
    changed = plan, changed.mask_rate = NAN;
    check_plan_refused(&changed, "mask-rate is");
    changed = plan, changed.mask_rate = 1.0f;
    check_plan_refused(&changed, "mask-rate is 1");
    changed = plan, changed.link_mbps = 0.0;
    check_plan_refused(&changed, "link rate in Mbit/s is 0");
    changed = plan, changed.link_ms = -1.0;
    check_plan_refused(&changed, "link latency in ms is -1");
    changed = plan, changed.device_tflops = INFINITY;
    check_plan_refused(&changed, "device TFLOP/s is inf");
    changed = plan, changed.logits_floats = -1;
    check_plan_refused(&changed, "logits is -1");

    // the print: every variant, and without those a single replica cannot have
    char text[8192];
    for (int alone = 0; alone < 2; alone++) {
        FILE *file = fopen(scratch_path("estimate.txt"), "w+e");
        if (!check(file != NULL, "no scratch file")) return;
        changed = plan;
        if (alone) changed.replicas = 1, changed.anchor = 0;
        check(mesh_estimate_print(file, &changed) == 0, "%s", error_message);
        rewind(file);
        text[fread(text, 1, sizeof text - 1, file)] = '\0';
        fclose(file);
        for (int i = 0; i < MESH_VARIANTS; i++) {
            char name[64];
            snprintf(name, sizeof name, "\n  %s ", mesh_variants[i].name);
            check((strstr(text, name) != NULL) == !(alone && mesh_variants[i].anchor), "%s in:\n%s", name, text);
        }
        check(strstr(text, "nan") == NULL && strstr(text, "inf ") == NULL, "%s", text);
        check(strstr(text, "\n  synchronous               32 ") != NULL &&
                  strstr(text, "\n  asynchronous               1 ") != NULL && strstr(text, "older weights") != NULL,
              "no schedules in:\n%s", text);
    }
}

#ifndef DEVICE_CUDA // test_cuda.cu has these for a device's ops
// ---------------------------------------------------------------------------------------------------------------------
// The wire: masks, codecs, links, clocks

// How far T sets of K of H dims are from uniform ones, in standard deviations: chi-square over dims, and over unordered
// pairs of dims. The mean and variance are exact but for counts not being normal: dims are drawn without replacement,
// so the covariance of the counts has the eigenvalues of the Johnson scheme J(H,2) instead of one.
static void mask_uniformity(double *dims_z, double *pairs_z, MaskKey key, int H, int K, int T) {
    double *dims = (double *)calloc((size_t)H, sizeof(double));
    uint32_t *pairs = (uint32_t *)calloc((size_t)H * H, sizeof(uint32_t)); // [larger dim][smaller dim]
    int *chosen = (int *)malloc(sizeof(int) * (size_t)K);
    for (int token = 0; token < T; token++) {
        MaskSet set = mask_set(key, token, H);
        for (int i = 0; i < K; i++) {
            chosen[i] = mask_index(&set, i);
            dims[chosen[i]] += 1.0;
            for (int j = 0; j < i; j++) {
                int low = chosen[i] < chosen[j] ? chosen[i] : chosen[j];
                pairs[(size_t)(chosen[i] + chosen[j] - low) * H + low]++;
            }
        }
    }
    double share = (double)K / H, dims_sum = 0.0, pairs_sum = 0.0;
    double two = share * (K - 1) / (H - 1), three = two * (K - 2) / (H - 2), four = three * (K - 3) / (H - 3);
    double same = two * (1 - two), touching = three - two * two, apart = four - two * two; // covariances of pairs
    double of_dims = same + (H - 4) * touching - (H - 3) * apart, of_rest = same - 2 * touching + apart;
    double n_dims = H - 1, n_rest = 0.5 * H * (H - 3);
    for (int i = 0; i < H; i++) {
        dims_sum += (dims[i] - T * share) * (dims[i] - T * share);
        for (int j = 0; j < i; j++) {
            double difference = pairs[(size_t)i * H + j] - T * two;
            pairs_sum += difference * difference;
        }
    }
    *dims_z = (dims_sum / (T * share * (1 - share) * H / n_dims) - n_dims) / sqrt(2 * n_dims);
    *pairs_z = K < 2 ? 0.0
                     : (pairs_sum / T - n_dims * of_dims - n_rest * of_rest) /
                           sqrt(2 * (n_dims * of_dims * of_dims + n_rest * of_rest * of_rest));
    free(dims);
    free(pairs);
    free(chosen);
}

// Sets are permutations, uniform, fixed for good, and change with every field of the key.
// Must fail for: MASK_ROUNDS 3 (at H 256), MASK_MIN_BITS 2, a field or its top bit left out of the counter.
static void test_mask(void) {
    MaskKey key = {77, 1, 2, 3, 4};
    Stream *stream = test_stream(PRECISION_FP32, 2), *single = test_stream(PRECISION_FP32, 1);
    for (int size = 1; size <= 76; size++) {
        static const int large[] = {192, 255, 256, 257, 768, 2048};
        static unsigned char seen[2048];
        int H = size <= 70 ? size : large[size - 71], inside = 1;
        MaskSet set = mask_set(key, size, H);
        memset(seen, 0, sizeof seen);
        for (int i = 0; i < H; i++) {
            int dim = mask_index(&set, i);
            inside = inside && dim >= 0 && dim < H && !seen[dim];
            if (inside) seen[dim] = 1;
        }
        check(inside, "H %d: not a permutation", H);
    }
    static const struct {
        int H, K, T;
    } uniform[] = {{5, 1, 400000},  {5, 2, 400000},  {5, 4, 400000},    {16, 2, 400000},   {256, 2, 1000000},
                   {192, 1, 50000}, {192, 2, 50000}, {192, 10, 100000}, {192, 182, 500},   {768, 2, 100000},
                   {768, 38, 8000}, {768, 730, 40},  {2048, 1, 50000},  {2048, 102, 1000}, {2048, 1946, 10}};
    for (size_t i = 0; i < sizeof uniform / sizeof *uniform; i++) {
        double dims, pairs;
        mask_uniformity(&dims, &pairs, key, uniform[i].H, uniform[i].K, uniform[i].T);
        check(fabs(dims) <= 4.5 && fabs(pairs) <= 4.5, "H %d, K %d: dims are %.1f deviations from uniform, pairs %.1f",
              uniform[i].H, uniform[i].K, dims, pairs);
    }
    for (size_t i = 0; i < sizeof mask_golden / sizeof *mask_golden; i++) {
        MaskSet set = mask_set(mask_golden[i].key, mask_golden[i].token, mask_golden[i].H);
        for (int j = 0; j < 12; j++)
            check(mask_index(&set, j) == mask_golden[i].first[j], "golden set %zu, index %d is %d", i, j,
                  mask_index(&set, j));
    }
    check(mask_kept(0.95f, 768) == 38 && mask_kept(0.9f, 2048) == 205 && mask_kept(0.95f, 192) == 10, "K of H");
    check(mask_kept(0.0f, 5) == 5 && mask_kept(0.999f, 5) == 1 && mask_kept(0.5f, 5) == 3, "K at the ends");

    // no two of these keys, and no two tokens of one, share a set; they have in common what chance gives: K*K/H dims
    enum { H = 2048, K = 102, TOKENS = 3 };
    static const MaskKey keys[] = {{77, 1, 2, 3, 4},
                                   {76, 1, 2, 3, 4},
                                   {77 + (1ull << 32), 1, 2, 3, 4},
                                   {77 + (1ull << 63), 1, 2, 3, 4},
                                   {77, 0, 2, 3, 4},
                                   {77, 2049, 2, 3, 4},
                                   {77, 1, 3, 3, 4},
                                   {77, 1, 2050, 3, 4},
                                   {77, 1, 2, 2, 4},
                                   {77, 1, 2, 3 + (1ll << 32), 4},
                                   {77, 1, 2, 3 + (1ll << 35), 4},
                                   {77, 1, 2, 3, 5},
                                   {77, 1, 2, 3, 20},
                                   {77, 1, 2, 3, 2052},
                                   {77, 2, 1, 3, 4},
                                   {77, 1, 2, 4, 3}};
    enum { KEYS = sizeof keys / sizeof *keys, SETS = KEYS * TOKENS };
    unsigned char *member = (unsigned char *)calloc((size_t)SETS * H, 1);
    static const int tokens[TOKENS] = {0, 1, 1 << 23};
    for (int s = 0; s < SETS; s++) {
        MaskSet set = mask_set(keys[s / TOKENS], tokens[s % TOKENS], H);
        for (int i = 0; i < K; i++) member[s * H + mask_index(&set, i)] = 1;
    }
    double common_total = 0.0;
    for (int a = 0; a < SETS; a++) {
        for (int b = 0; b < a; b++) {
            int common = 0;
            for (int i = 0; i < H; i++) common += member[a * H + i] & member[b * H + i];
            check(common < K / 4, "keys %d and %d share %d of %d dims", a / TOKENS, b / TOKENS, common, K);
            common_total += common;
        }
    }
    common_total /= 0.5 * SETS * (SETS - 1) * K * K / H;
    check(fabs(common_total - 1.0) < 0.1, "sets share %.3f of what chance gives", common_total);
    free(member);

    // the ops against a plain loop; K around the lanes that are made together
    static const struct {
        int n, H, K;
    } cases[] = {{1, 1, 1},   {3, 5, 2},     {2, 70, 63},  {3, 70, 64},
                 {2, 70, 65}, {17, 192, 10}, {5, 768, 38}, {4, 192, 192}};
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        int n = cases[c].n, dims = cases[c].H, kept = cases[c].K, n_x = n * dims, n_values = n * kept;
        float *x = random_values(n_x, 51, 1.0f), *v = random_values(n_values, 52, 1.0f), scale = 1.5f;
        float *values = guarded(n_values), *out = guarded(n_x), *again = guarded(n_x);
        uint32_t *index = (uint32_t *)malloc(sizeof(uint32_t) * (size_t)n_values);
        mask_indices(index, key, n, dims, kept, stream);
        mask_gather(values, x, key, n, dims, kept, stream);
        mask_scatter(out, v, key, n, dims, kept, scale, stream);
        double left = 0.0, right = 0.0;
        int equal = 1, nonzero = 0;
        for (int i = 0; i < n_values; i++) {
            int at = i / kept * dims + (int)index[i];
            equal = equal && (int)index[i] < dims && values[i] == x[at] && out[at] == scale * v[i];
            right += (double)scale * (double)v[i] * (double)values[i];
        }
        for (int i = 0; i < n_x; i++) left += (double)out[i] * (double)x[i], nonzero += out[i] != 0.0f;
        check(equal && nonzero == n_values, "n %d, H %d, K %d: not what a loop over the indices gives", n, dims, kept);
        check(fabs(left - right) <= 1e-6 * (fabs(right) + 1.0), "<scatter v, x> %g, scale <v, gather x> %g", left,
              right);
        mask_scatter(again, v, key, n, dims, kept, scale, single);
        check(memcmp(again, out, sizeof(float) * (size_t)n_x) == 0, "scatter depends on the threads");
        mask_gather(v, x, key, n, dims, kept, single);
        check(memcmp(v, values, sizeof(float) * (size_t)n_values) == 0, "gather depends on the threads");
        release(values, n_values, "gather");
        release(out, n_x, "scatter");
        release(again, n_x, "scatter");
        free(x);
        free(v);
        free(index);
    }
    check(!stream_check(stream), "the stream failed");
    uint32_t index = 7;
    key.replica = 4096;
    mask_indices(&index, key, 1, 8, 1, stream);
    check(stream_check(stream) && index == 7, "a replica beyond the key was accepted");
    stream_destroy(stream);
    stream_destroy(single);
}

// The masked function through the wire, f(x) = sum(dout * scale * mask * tanh(x)): its gradient comes back through the
// same codec, which masks the gradient message with the forward's positions and scale.
typedef struct {
    int n, H, K;
    const uint32_t *index;
    const float *dout;
    double scale;
} MaskedCase;

static double masked_objective(const double *input, const void *context) {
    const MaskedCase *k = (const MaskedCase *)context;
    double total = 0.0;
    for (int i = 0; i < k->n * k->K; i++) {
        int at = i / k->K * k->H + (int)k->index[i];
        total += k->scale * tanh(input[at]) * (double)k->dout[at];
    }
    return total;
}

static void test_mask_gradient(void) {
    enum { N = 6, H = 70 };
    for (int mode = MASK_SCALE_NONE; mode <= MASK_SCALE_INVERSE; mode++) {
        Stream *stream = test_stream(PRECISION_FP32, 2);
        Codec codec;
        CodecContext context = codec_context(1, 2, 3, 4, 1);
        codec_init(&codec, H, 0.8f, (MaskScale)mode, WIRE_FP32, 9);
        int K = mask_kept(0.8f, H);
        static const double scales[] = {1.0, 2.23606797749979, 5.0}; // H/K is 70/14
        check(K == 14 && fabs((double)codec.scale - scales[mode]) < 1e-6, "scale %g", (double)codec.scale);
        uint32_t index[N * H];
        float *x = random_values(N * H, 53, 1.0f), *dout = random_values(N * H, 54, 1.0f), *dx = guarded(N * H);
        float *expected = guarded(N * H), message[N * H];
        int64_t n_bytes = codec_encode(&codec, NULL, &context, dout, N, H, message, sizeof message, stream);
        check(codec_decode(&codec, NULL, &context, message, n_bytes, dx, N, H, stream) == 0, "%s", error_message);
        for (int i = 0; i < N * H; i++) dx[i] *= 1.0f - tanhf(x[i]) * tanhf(x[i]);
        MaskKey key = {9, 2, 1, 4, 3};
        mask_indices(index, key, N, H, K, stream);
        MaskedCase masked = {N, H, K, index, dout, scales[mode]};
        Objective objective = {masked_objective, &masked};
        numeric_gradient(expected, x, N * H, objective);
        check_close(dx, expected, N * H, 1e-6, "gradient through the mask");
        release(dx, N * H, "dx");
        release(expected, N * H, "expected");
        free(x);
        free(dout);
        stream_destroy(stream);
    }
}

// Codecs: sizes are exact, what arrives is what the mask says, wrong lengths are refused and touch nothing.
// Must fail for: indices of another boundary, scale twice or never, K off by one, bf16 by truncation.
static void codec_case(Wire wire, float rate, int masked, int n, int H) {
    Stream *stream = test_stream(PRECISION_FP32, 2), *single = test_stream(PRECISION_FP32, 1);
    Codec codec;
    CodecContext context = codec_context(3, 1, 2, 1ll << 33, masked);
    codec_init(&codec, H, rate, MASK_SCALE_SQRT, wire, 11);
    int K = masked ? mask_kept(rate, H) : H, n_x = n * H, size = wire == WIRE_FP32 ? 4 : 2;
    int64_t n_bytes = (int64_t)n * K * size;
    float *x = random_values(n_x, 55, 1.0f), *expected = (float *)calloc((size_t)n_x, sizeof(float));
    float *out = guarded(n_x), *again = guarded(n_x), worst = 0.0f;
    uint32_t *index = (uint32_t *)malloc(sizeof(uint32_t) * (size_t)(n * K));
    unsigned char *message = (unsigned char *)malloc((size_t)n_bytes); // exact, so that ASan sees one byte too far
    unsigned char *shifted = (unsigned char *)malloc((size_t)n_bytes + 1), *longer = shifted + 1;
    MaskKey key = {11, 1, 3, 1ll << 33, 2};
    mask_indices(index, key, n, H, K, stream);
    for (int i = 0; i < n * K; i++) {
        int at = K == H ? i : i / K * H + (int)index[i];
        float sent = wire == WIRE_FP32 ? x[at] : float_of_bf16(bf16_of_float(x[at]));
        float error = fabsf(sent - x[at]) / fabsf(x[at]);
        if (!(error <= worst)) worst = error;
        expected[at] = K == H ? sent : codec.scale * sent;
    }
    check(wire == WIRE_FP32 ? worst == 0.0f : worst <= 0x1p-8f, "rounding: %g", (double)worst);
    check(codec_bytes(&codec, &context, n, H) == n_bytes, "size %lld, %lld expected",
          (long long)codec_bytes(&codec, &context, n, H), (long long)n_bytes);
    memset(message, 0xA5, (size_t)n_bytes);
    check_error(codec_encode(&codec, NULL, &context, x, n, H, message, n_bytes - 1, stream) < 0, "the buffer",
                "a small buffer");
    int untouched = 1;
    for (int64_t i = 0; i < n_bytes; i++) untouched = untouched && message[i] == 0xA5;
    check(untouched, "a refused message was written");
    check(codec_encode(&codec, NULL, &context, x, n, H, message, n_bytes, stream) == n_bytes, "bytes used");
    check(codec_encode(&codec, NULL, &context, x, n, H, longer, n_bytes, single) == n_bytes &&
              memcmp(longer, message, (size_t)n_bytes) == 0,
          "the message depends on threads or the address");
    for (int64_t wrong = 0; wrong <= n_bytes + 1; wrong += wrong + 3 < n_bytes ? wrong + 3 : 1) {
        if (wrong == n_bytes) continue;
        unsigned char *bytes = (unsigned char *)calloc((size_t)wrong + 1, 1);
        check_error(codec_decode(&codec, NULL, &context, bytes, wrong, out, n, H, stream), "a message of",
                    "a wrong length");
        free(bytes);
    }
    untouched = 1;
    for (int i = 0; i < n_x; i++) untouched = untouched && isnan(out[i]);
    check(untouched, "a refused message was decoded");
    check(codec_decode(&codec, NULL, &context, message, n_bytes, out, n, H, stream) == 0, "%s", error_message);
    check(memcmp(out, expected, sizeof(float) * (size_t)n_x) == 0, "wire %d, rate %g, masked %d, n %d, H %d: x differs",
          (int)wire, (double)rate, masked, n, H);
    check(codec_decode(&codec, NULL, &context, longer, n_bytes, again, n, H, single) == 0, "%s", error_message);
    check(memcmp(again, out, sizeof(float) * (size_t)n_x) == 0, "x depends on threads or the address");
    release(out, n_x, "decode");
    release(again, n_x, "decode");
    free(x);
    free(expected);
    free(index);
    free(message);
    free(shifted);
    stream_destroy(stream);
    stream_destroy(single);
}

static void test_codec(void) {
    static const float rates[] = {0.0f, 0.1f, 0.5f, 0.95f, 0.999f};
    static const struct { int n, H; } sizes[] = {{1, 1}, {3, 5}, {17, 64}, {5, 129}, {2, 768}};
    for (size_t r = 0; r < sizeof rates / sizeof *rates; r++)
        for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++)
            for (int kind = 0; kind < 4; kind++)
                codec_case(kind & 1 ? WIRE_FP32 : WIRE_BF16, rates[r], kind >> 1, sizes[s].n, sizes[s].H);
    Stream *stream = test_stream(PRECISION_FP32, 2);
    Codec codec;
    float x[8] = {0}, message[8];
    codec_init(&codec, 8, 0.5f, MASK_SCALE_NONE, WIRE_FP32, 1);
    const CodecContext beyond[] = {codec_context(4096, 0, 0, 0, 1), codec_context(0, 4096, 0, 0, 1),
                                   codec_context(0, 0, 4096, 0, 1), codec_context(0, 0, 0, 1ll << 36, 1),
                                   codec_context(0, 0, 0, -1, 1)};
    for (size_t i = 0; i < sizeof beyond / sizeof *beyond; i++) {
        check_error(codec_encode(&codec, NULL, &beyond[i], x, 1, 8, message, sizeof message, stream) < 0,
                    "mask: ", "encode");
        check_error(codec_decode(&codec, NULL, &beyond[i], message, 16, x, 1, 8, stream), "mask: ", "decode");
    }
    CodecContext whole = codec_context(4096, 0, 5000, 0, 0); // nothing is masked, so nothing names a mask
    check(codec_encode(&codec, NULL, &whole, x, 1, 8, message, sizeof message, stream) ==
              codec_bytes(&codec, &whole, 1, 8),
          "a dense message asks for a mask's key");
    stream_destroy(stream);
}

// ---------------------------------------------------------------------------------------------------------------------
// The other codecs

// A boundary of one replica: its two ends, and messages of n rows of H values in sequences of T.
typedef struct {
    Codec codec;
    CodecEnd before, behind;
    CodecContext context;
    int n, H;
    int64_t samples[8];
    Stream *stream;
} Wired;

static void wired_open(Wired *w, CodecKind kind, float rate, Wire wire, int n, int H, int T) {
    CodecShape shape = {H, n, T, 3, 10};
    memset(w, 0, sizeof *w);
    w->n = n, w->H = H, w->stream = test_stream(PRECISION_FP32, 2);
    codec_init(&w->codec, H, rate, MASK_SCALE_NONE, wire, 21);
    w->codec.kind = kind;
    check(codec_check(&w->codec, H) == 0, "%s", error_message);
    check(codec_end_init(&w->before, &w->codec, shape) == 0 && codec_end_init(&w->behind, &w->codec, shape) == 0, "%s",
          error_message);
    w->context = codec_context(1, 0, 2, 5, 1);
    w->context.training = 1, w->context.T = T, w->context.samples = w->samples;
    for (int s = 0; s < n / T; s++) w->samples[s] = 9 - s;
}

static void wired_close(Wired *w) {
    codec_end_free(&w->before);
    codec_end_free(&w->behind);
    stream_destroy(w->stream);
}

// Sends x (n, H) over the boundary; what arrives, which the caller releases, and the bytes. Exact memory for ASan.
static float *wired_send(Wired *w, CodecDirection direction, const float *x, int64_t *n_bytes) {
    int forward = direction == CODEC_FORWARD;
    int64_t cap = codec_cap(&w->codec, w->n, w->H);
    unsigned char *message = (unsigned char *)malloc((size_t)cap + 1), *exact;
    float *out = guarded(w->n * w->H);
    w->context.direction = direction;
    *n_bytes = codec_encode(&w->codec, forward ? &w->before : &w->behind, &w->context, x, w->n, w->H, message + 1, cap,
                            w->stream);
    if (!check(*n_bytes >= 0, "%s: encode: %s", codec_name(w->codec.kind), error_message)) exit(1);
    exact = (unsigned char *)malloc((size_t)*n_bytes);
    memcpy(exact, message + 1, (size_t)*n_bytes);
    check(codec_decode(&w->codec, forward ? &w->behind : &w->before, &w->context, exact, *n_bytes, out, w->n, w->H,
                       w->stream) == 0,
          "%s: decode: %s", codec_name(w->codec.kind), error_message);
    free(exact);
    free(message);
    return out;
}

// Values whose size differs from group to group, with outliers.
static float *uneven_values(int64_t n, int H, uint32_t sub) {
    float *x = random_values(n, sub, 1.0f);
    for (int64_t i = 0; i < n; i++) x[i] *= (float)(1 << (i % H / 64 % 5)) * (i % 97 == 5 ? 20.0f : 1.0f);
    return x;
}

// Quantized rows: no value is off by more than half a level of its group's largest, and the mean error is that of a
// uniform one. Must fail for: a scale of the wrong group, floor for nearest, codes of the neighbour, one level too few.
static void quant_case(CodecKind kind, CodecDirection direction, int bits, int n, int H) {
    Wired w;
    int64_t n_bytes, groups = (H + 63) / 64;
    wired_open(&w, kind, 0.0f, WIRE_BF16, n, H, n);
    float *x = uneven_values((int64_t)n * H, H, 61), *out = wired_send(&w, direction, x, &n_bytes);
    double levels = bits >= 4 ? (1 << bits) - 2 : 1 << bits, worst = 0.0, squares = 0.0; // steps from -max to max
    check(n_bytes == n * (2 * groups + (H * bits + 7) / 8), "%s: %lld bytes", codec_name(kind), (long long)n_bytes);
    for (int token = 0; token < n; token++) {
        for (int g = 0; g < groups; g++) {
            int first = token * H + 64 * g, size = H - 64 * g < 64 ? H - 64 * g : 64;
            double largest = 0.0;
            for (int i = first; i < first + size; i++) largest = fmax(largest, fabs((double)x[i]));
            for (int i = first; i < first + size; i++) {
                double error = fabs((double)out[i] - (double)x[i]) * levels / largest; // in half steps
                if (!(error <= worst)) worst = error;
                squares += error * error / ((double)n * H);
            }
        }
    }
    check(worst <= 1.0 + levels * 0x1p-8, "%s: off by %g half levels", codec_name(kind), worst);
    check(sqrt(squares) < 0.72, "%s, H %d: errors of %g half levels", codec_name(kind), H,
          sqrt(squares)); // uniform: .58
    free(x);
    release(out, n * H, "out");
    wired_close(&w);
}

// What is not finite is so on arrival, and only its group; zeros stay zeros.
static void quant_odd_values(CodecKind kind) {
    enum { H = 192 };
    Wired w;
    int64_t n_bytes;
    float x[H];
    for (int odd = 0; odd < 3; odd++) {
        for (int i = 0; i < H; i++) x[i] = i < 64 ? 0.0f : 1.0f;
        x[70] = odd == 0 ? NAN : odd == 1 ? INFINITY : 1e-42f;
        wired_open(&w, kind, 0.0f, WIRE_BF16, 1, H, 1);
        for (int direction = 0; direction < 2; direction++) {
            w.context.training = 0; // aqsgd: plain
            float *out = wired_send(&w, (CodecDirection)direction, x, &n_bytes);
            check(isfinite(out[70]) == (odd == 2), "%s: %g became %g", codec_name(kind), (double)x[70],
                  (double)out[70]);
            for (int i = 0; i < 64; i++) check(out[i] == 0.0f, "%s: 0 became %g", codec_name(kind), (double)out[i]);
            check(fabsf(out[191] - 1.0f) <= 0.3f, "%s: 1 became %g", codec_name(kind), (double)out[191]);
            release(out, H, "out");
        }
        wired_close(&w);
    }
}

static double squared_error(const float *a, const float *b, int n) {
    double sum = 0.0;
    for (int i = 0; i < n; i++) sum += ((double)a[i] - (double)b[i]) * ((double)a[i] - (double)b[i]);
    return sum;
}

// tahquant: bits go where they are needed, and rotated groups bear an outlier better; both against the plain rows.
// Must fail for: bits by sqrt(scale), a rotation left out on one side, a scale of 1/64.
static void test_codec_tahquant(void) {
    enum { N = 5, H = 300 };
    Wired tah, plain;
    int64_t n_bytes, plain_bytes;
    static const uint16_t scales[] = {0x4000, 0x3F80, 0x3F80, 0x3F80}; // 2, 1, 1, 1 as bf16
    unsigned char bits[4];
    QuantRow row = {256, 2, 1, 0};
    quant_bits(bits, scales, row); // by hand
    check(bits[0] == 3 && bits[1] == 2 && bits[2] == 2 && bits[3] == 1, "bits %d %d %d %d", bits[0], bits[1], bits[2],
          bits[3]);
    wired_open(&tah, CODEC_TAHQUANT, 0.0f, WIRE_BF16, N, H, N);
    wired_open(&plain, CODEC_AQSGD, 0.0f, WIRE_BF16, N, H, N);
    float *x = random_values(N * H, 62, 1.0f), *zeros = (float *)calloc(N * H, sizeof(float));
    for (int i = 0; i < N * H; i++) x[i] *= i % H < 64 ? 8.0f : i % H < 128 ? 0.1f : 1.0f;
    release(wired_send(&plain, CODEC_FORWARD, zeros, &plain_bytes), N * H,
            "out"); // what follows are differences from 0
    float *out = wired_send(&tah, CODEC_FORWARD, x, &n_bytes),
          *other = wired_send(&plain, CODEC_FORWARD, x, &plain_bytes);
    check(n_bytes == plain_bytes && n_bytes == N * (2 * 5 + 75), "%lld and %lld bytes", (long long)n_bytes,
          (long long)plain_bytes);
    double error = squared_error(out, x, N * H), plain_error = squared_error(other, x, N * H);
    check(error < 0.4 * plain_error, "adaptive bits: %g, plain %g", error, plain_error);
    for (int token = 0; token < N; token++) { // by hand: 4 full groups, 8 bits
        float step = 0.0f;
        for (int i = 0; i < 64; i++) step = fmaxf(step, fabsf(out[token * H + i] - x[token * H + i]));
        check(step < 3.0f, "a group of size 8 has an error of %g", (double)step); // 16 levels of 20: at most 1.5
        int nonzero = 0;
        for (int i = 64; i < 128; i++) nonzero += out[token * H + i] != 0.0f;
        check(nonzero == 0, "a group of size 0.1 took bits");
    }
    release(out, N * H, "out");
    release(other, N * H, "out");
    for (int i = 0; i < N * H; i++) x[i] = i % 64 == 11 ? 1000.0f : x[i] / (i % H < 64 ? 8.0f : 1.0f);
    out = wired_send(&tah, CODEC_BACKWARD, x, &n_bytes), other = wired_send(&plain, CODEC_BACKWARD, x, &plain_bytes);
    check(n_bytes == plain_bytes && n_bytes == N * (2 * 5 + 300), "backward: %lld bytes", (long long)n_bytes);
    error = plain_error = 0.0;
    for (int token = 0; token < N; token++) {
        error += squared_error(out + token * H, x + token * H, 256);
        plain_error += squared_error(other + token * H, x + token * H, 256);
    }
    check(error < 0.2 * plain_error, "rotated: %g, plain %g", error, plain_error);
    free(x);
    free(zeros);
    release(out, N * H, "out");
    release(other, N * H, "out");
    wired_close(&tah);
    wired_close(&plain);
}

static void test_codec_quant(void) {
    static const struct { int n, H; } sizes[] = {{1, 1}, {3, 5}, {7, 64}, {4, 129}, {2, 776}};
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++)
        for (int direction = 0; direction < 2; direction++) {
            quant_case(CODEC_QUANT8, (CodecDirection)direction, 8, sizes[s].n, sizes[s].H);
            quant_case(CODEC_QUANT4, (CodecDirection)direction, 4, sizes[s].n, sizes[s].H);
        }
    quant_case(CODEC_AQSGD, CODEC_BACKWARD, 8, 4, 129);
    static const CodecKind kinds[] = {CODEC_QUANT8, CODEC_QUANT4, CODEC_AQSGD, CODEC_TAHQUANT};
    for (int k = 0; k < 4; k++) quant_odd_values(kinds[k]);
}

// topk: as many as the budget holds, the largest, the first of equal ones; the gradient comes back on the same places,
// for each of several micro-batches in flight. Must fail for: a set of another micro-batch, indices not counted, signs.
static void topk_case(float rate, Wire wire, int n, int H) {
    Wired w;
    int64_t n_bytes, size = wire == WIRE_FP32 ? 4 : 2,
                     budget = (int64_t)floor((1.0 - (double)rate) * (double)(size * H) + 1e-3);
    int bits = (int)fmax(1.0, ceil(log2(H))), K = 0, elements = n * H;
    while (K < H && (K + 1) * size + ((K + 1) * bits + 7) / 8 <= budget) K++;
    wired_open(&w, CODEC_TOPK, rate, wire, n, H, n);
    float *out[3], *x[3], *grad = random_values(elements, 65, 1.0f);
    for (int m = 0; m < 3; m++) {
        w.context.micro_batch = m + 6;
        x[m] = random_values(elements, 66 + (uint32_t)m, 1.0f);
        for (int i = 0; i < elements; i += 3) x[m][i] = 0.5f; // many are equal
        out[m] = wired_send(&w, CODEC_FORWARD, x[m], &n_bytes);
        check(n_bytes == n * (K * size + (K * bits + 7) / 8), "topk: %lld bytes for K %d", (long long)n_bytes, K);
    }
    for (int m = 0; m < 3; m++) {
        w.context.micro_batch = m + 6;
        float *back = wired_send(&w, CODEC_BACKWARD, grad, &n_bytes);
        check(n_bytes == n * K * size, "topk: %lld bytes back", (long long)n_bytes);
        for (int token = 0; token < n; token++) {
            int kept = 0, right = 1;
            for (int h = 0; h < H; h++) {
                int i = token * H + h, larger_ones = 0;
                for (int j = 0; j < H; j++) {
                    float a = fabsf(x[m][token * H + j]), b = fabsf(x[m][i]);
                    larger_ones += a > b || (a == b && j < h);
                }
                float sent = wire == WIRE_FP32 ? x[m][i] : float_of_bf16(bf16_of_float(x[m][i]));
                float gradient = wire == WIRE_FP32 ? grad[i] : float_of_bf16(bf16_of_float(grad[i]));
                right = right && out[m][i] == (larger_ones < K ? sent : 0.0f);
                right = right && back[i] == (larger_ones < K ? gradient : 0.0f);
                kept += back[i] != 0.0f;
            }
            check(right && kept == K, "topk: rate %g, H %d: %d of %d values, or others", (double)rate, H, kept, K);
        }
        release(back, elements, "back");
        release(out[m], elements, "out");
        free(x[m]);
    }
    free(grad);
    wired_close(&w);
}

static void test_codec_topk(void) {
    static const float rates[] = {0.1f, 0.5f, 0.8f, 0.9f, 0.95f};
    for (int r = 0; r < 5; r++)
        for (int wire = 0; wire < 2; wire++) {
            topk_case(rates[r], (Wire)wire, 3, 70);
            topk_case(rates[r], (Wire)wire, 2, 768);
        }
    Wired w;
    int64_t n_bytes;
    unsigned char bad[64];
    float x[64], out[64];
    for (int i = 0; i < 64; i++) x[i] = (float)i;
    wired_open(&w, CODEC_TOPK, 0.8f, WIRE_BF16, 1, 64, 1);
    int set = 2 * codec_topk_kept(&w.codec, 64);
    n_bytes = codec_encode(&w.codec, &w.before, &w.context, x, 1, 64, bad, sizeof bad, w.stream);
    memset(bad + set, 0, (size_t)(n_bytes - set)); // index 0 again and again
    out[0] = NAN;
    check_error(codec_decode(&w.codec, &w.behind, &w.context, bad, n_bytes, out, 1, 64, w.stream),
                "topk: token 0: index 1", "equal indices");
    check(isnan(out[0]), "a refused message was decoded");
    w.context.direction = CODEC_BACKWARD;
    check_error(codec_encode(&w.codec, &w.behind, &w.context, x, 1, 64, bad, sizeof bad, w.stream) < 0,
                "whose forward had 0", "a gradient without its forward");
    wired_close(&w);
}

// bottleneck: an orthogonal projection, against double; what it does is symmetric, so it is its own backward.
static void test_codec_bottleneck(void) {
    enum { N = 20, H = 70 };
    for (int wire = 0; wire < 2; wire++) {
        Wired w;
        int64_t n_bytes;
        int K = mask_kept(0.8f, H);
        wired_open(&w, CODEC_BOTTLENECK, 0.8f, (Wire)wire, N, H, N);
        float *x = random_values(N * H, 71, 1.0f), *y = random_values(N * H, 72, 1.0f), *expected = guarded(N * H);
        const float *P = w.before.basis;
        double worst = 0.0, xy = 0.0, yx = 0.0;
        for (int a = 0; a < K; a++)
            for (int b = 0; b < K; b++) {
                double dot = 0.0;
                for (int h = 0; h < H; h++) dot += (double)P[a * H + h] * (double)P[b * H + h];
                worst = fmax(worst, fabs(dot - (a == b)));
            }
        check(worst < 1e-6, "P P^T is off by %g", worst);
        check(memcmp(w.before.basis, w.behind.basis, sizeof(float) * (size_t)(K * H)) == 0, "the ends' bases differ");
        for (int i = 0; i < N * H; i++) {
            double sum = 0.0;
            for (int k = 0; k < K; k++) {
                double dot = 0.0;
                for (int h = 0; h < H; h++) dot += (double)P[k * H + h] * (double)x[i / H * H + h];
                sum += dot * (double)P[k * H + i % H];
            }
            expected[i] = (float)sum;
        }
        float *out = wired_send(&w, CODEC_FORWARD, x, &n_bytes), *back = wired_send(&w, CODEC_BACKWARD, y, &n_bytes);
        check(n_bytes == N * K * (wire ? 4 : 2), "bottleneck: %lld bytes", (long long)n_bytes);
        check_close(out, expected, N * H, wire ? 1e-5 : 4e-3, "projected");
        for (int i = 0; i < N * H; i++) xy += (double)out[i] * (double)y[i], yx += (double)back[i] * (double)x[i];
        check(fabs(xy - yx) < (wire ? 1e-4 : 0.5), "<Cx, y> %g, <x, Cy> %g", xy, yx);
        release(out, N * H, "out");
        release(back, N * H, "back");
        release(expected, N * H, "expected");
        free(x);
        free(y);
        wired_close(&w);
    }
}

// aqsgd: plain at the first visit; then both ends' caches are equal and follow the activation, which differences of 2
// bits bring to bf16's own precision. Must fail for: a cache of x instead of what was sent, windows mixed up.
static void test_codec_aqsgd(void) {
    enum { T = 4, S = 3, N = T * S, H = 100 };
    Wired w;
    int64_t n_bytes;
    wired_open(&w, CODEC_AQSGD, 0.0f, WIRE_BF16, N, H, T);
    float *x = random_values(N * H, 75, 1.0f), *moved = random_values(N * H, 76, 0.1f), *out = NULL;
    w.samples[0] = 4, w.samples[1] = 7, w.samples[2] = 4; // one twice
    out = wired_send(&w, CODEC_FORWARD, x, &n_bytes);
    check(n_bytes == 2 * T * H * 2 + T * (2 * 2 + 25), "first visits: %lld bytes", (long long)n_bytes);
    for (int i = 0; i < 2 * T * H; i++)
        if (out[i] != float_of_bf16(bf16_of_float(x[i]))) check(0, "a first visit is not plain at %d", i);
    release(out, N * H, "out");
    w.samples[2] = 2;
    release(wired_send(&w, CODEC_FORWARD, x, &n_bytes), N * H, "out");
    for (int i = 0; i < N * H; i++) x[i] += moved[i];
    for (int visit = 0; visit < 6; visit++) {
        w.context.step++;
        out = wired_send(&w, CODEC_FORWARD, x, &n_bytes);
        check(n_bytes == N * (2 * 2 + 25), "later visits: %lld bytes", (long long)n_bytes);
        double error = relative_error(out, x, N * H);
        check(error < (visit == 0 ? 0.1 : visit < 5 ? 0.05 : 3e-3), "visit %d: %g", visit, error);
        release(out, N * H, "out");
    }
    check(memcmp(w.before.cache, w.behind.cache, 2 * 10 * T * H) == 0, "the ends' caches differ");
    uint16_t *kept = (uint16_t *)malloc(2 * 10 * T * H);
    memcpy(kept, w.before.cache, 2 * 10 * T * H);
    w.context.training = 0, w.context.samples = NULL;
    release(wired_send(&w, CODEC_FORWARD, moved, &n_bytes), N * H, "out");
    check(n_bytes == 2 * N * H && memcmp(kept, w.before.cache, 2 * 10 * T * H) == 0, "an evaluation is remembered");
    w.context.training = 1, w.context.samples = w.samples;
    w.samples[1] = 10;
    unsigned char message[2 * N * H];
    w.context.direction = CODEC_FORWARD;
    check_error(codec_encode(&w.codec, &w.before, &w.context, x, N, H, message, sizeof message, w.stream) < 0,
                "aqsgd: window 10", "a window beyond the data");
    check_error(codec_decode(&w.codec, &w.behind, &w.context, message, 100, x, N, H, w.stream), "aqsgd: window 10",
                "a window beyond the data");
    free(kept);
    free(x);
    free(moved);
    wired_close(&w);
}

// What every codec promises, side by side. By direction: bytes of a row, by hand; how far off values arrive, relative,
// between low and high; whether the mean of many messages of the same values is the values themselves (or what klt's
// basis keeps of them). linear: forward C and backward B are adjoint, <C x, y> = <x, B y>, so that B is the gradient of
// C; the others hand gradients on as they are, off by no more than rounding.
typedef struct {
    CodecKind kind;
    float rate;
    Wire wire;
    int linear, unbiased[2];
    double bytes[2], low[2], high[2];
} CodecPromise;

enum { PROMISE_N = 48, PROMISE_T = 24, PROMISE_H = 64, PROMISE_VALUES = PROMISE_N * PROMISE_H };

static const CodecPromise promises[] = {
    {CODEC_MASK, 0.75f, WIRE_FP32, 1, {1, 1}, {64, 64}, {0.85, 0.85}, {0.88, 0.88}}, // sqrt(3/4) with scale 1
    {CODEC_NONE, 0.0f, WIRE_FP32, 1, {0, 0}, {256, 256}, {0.0, 0.0}, {0.0, 0.0}},
    {CODEC_NONE, 0.0f, WIRE_BF16, 0, {0, 0}, {128, 128}, {1e-3, 1e-3}, {2e-3, 2e-3}},
    {CODEC_QUANT8, 0.0f, WIRE_BF16, 0, {0, 0}, {66, 66}, {5e-3, 5e-3}, {8e-3, 8e-3}},
    {CODEC_QUANT4, 0.0f, WIRE_BF16, 0, {0, 0}, {34, 34}, {0.08, 0.08}, {0.12, 0.12}},
    {CODEC_TOPK, 0.75f, WIRE_FP32, 1, {0, 0}, {62, 52}, {0.5, 0.85}, {0.7, 0.95}}, // 13 values, 10 bytes of indices
    {CODEC_BOTTLENECK, 0.75f, WIRE_FP32, 1, {0, 0}, {64, 64}, {0.85, 0.85}, {0.88, 0.88}},
    {CODEC_AQSGD, 0.0f, WIRE_BF16, 0, {0, 0}, {18, 66}, {1e-4, 5e-3}, {2e-3, 8e-3}}, // a later visit
    {CODEC_TAHQUANT, 0.0f, WIRE_BF16, 0, {0, 0}, {18, 66}, {0.3, 5e-3}, {0.5, 8e-3}},
    {CODEC_KLT, 0.9f, WIRE_BF16, 0, {0, 1}, {12.8, 12.8}, {0.1, 0.2}, {0.4, 0.6}}};

// Mean and spread of each value over many messages, one a step: off by as many standard errors as chance allows. Of
// 3072 values none is beyond 5.5, and their root mean square is 1 within 15%.
static void promise_unbiased(Wired *w, CodecDirection direction, const float *x, const float *truth) {
    enum { DRAWS = 200 };
    double *sum = (double *)calloc(2 * PROMISE_VALUES, sizeof(double)), *squares = sum + PROMISE_VALUES;
    double worst = 0.0, all = 0.0;
    int64_t n_bytes;
    for (int i = 0; i < DRAWS; i++) {
        w->context.step++;
        float *out = wired_send(w, direction, x, &n_bytes);
        for (int v = 0; v < PROMISE_VALUES; v++)
            sum[v] += (double)out[v], squares[v] += (double)out[v] * (double)out[v];
        release(out, PROMISE_VALUES, "out");
    }
    for (int v = 0; v < PROMISE_VALUES; v++) {
        double mean = sum[v] / DRAWS, variance = (squares[v] / DRAWS - mean * mean) / (DRAWS - 1);
        double errors = fabs(mean - (double)truth[v]) / sqrt(variance);
        if (!(errors <= worst)) worst = errors;
        all += errors * errors / PROMISE_VALUES;
    }
    check(worst < 5.5 && sqrt(all) > 0.85 && sqrt(all) < 1.15,
          "%s, direction %d: the mean of %d messages is off by %.2f standard errors, at most %.2f",
          codec_name(w->codec.kind), (int)direction, DRAWS, sqrt(all), worst);
    free(sum);
}

// Ten messages of a direction: their bytes and error. A warm end: topk has its sets, aqsgd its caches.
static void promise_sent(Wired *w, const CodecPromise *p, CodecDirection direction, const float *x) {
    double bytes = 0.0, error = 0.0;
    int64_t n_bytes;
    int fixed = p->kind != CODEC_KLT;
    for (int i = 0; i < 10; i++) {
        w->context.step++;
        float *out = wired_send(w, direction, x, &n_bytes);
        bytes += (double)n_bytes, error += relative_error(out, x, PROMISE_VALUES) / 10;
        check(n_bytes <= codec_cap(&w->codec, PROMISE_N, PROMISE_H), "%s: %lld bytes", codec_name(p->kind),
              (long long)n_bytes);
        release(out, PROMISE_VALUES, "out");
    }
    bytes /= 10 * PROMISE_N;
    check(fixed ? bytes == p->bytes[direction] : fabs(bytes / p->bytes[direction] - 1.0) < 0.05,
          "%s, direction %d: %g bytes a row, %g promised", codec_name(p->kind), (int)direction, bytes,
          p->bytes[direction]);
    check(error >= p->low[direction] && error <= p->high[direction], "%s, direction %d: off by %g, not %g to %g",
          codec_name(p->kind), (int)direction, error, p->low[direction], p->high[direction]);
}

static void promise_adjoint(Wired *w, const float *x, const float *y) {
    double forward = 0.0, backward = 0.0;
    int64_t n_bytes;
    float *cx = wired_send(w, CODEC_FORWARD, x, &n_bytes), *by = wired_send(w, CODEC_BACKWARD, y, &n_bytes);
    for (int v = 0; v < PROMISE_VALUES; v++)
        forward += (double)cx[v] * (double)y[v], backward += (double)x[v] * (double)by[v];
    check(fabs(forward) > 1.0 && fabs(forward - backward) < 1e-4 * fabs(forward), "%s: <C x, y> %g, <x, B y> %g",
          codec_name(w->codec.kind), forward, backward);
    release(cx, PROMISE_VALUES, "forward");
    release(by, PROMISE_VALUES, "backward");
}

// What klt's table of a direction keeps of x.
static float *promise_kept(const KltTable *table, const float *x, Stream *stream) {
    int K = table->head.K;
    float *y = guarded(PROMISE_N * K), *kept = (float *)malloc(sizeof(float) * PROMISE_VALUES);
    matmul_product(y, K, x, PROMISE_H, 0, table->basis.full, K, 0, PROMISE_N, K, PROMISE_H, 0, 0, stream);
    matmul_product(kept, PROMISE_H, y, K, 0, table->basis.full, K, 1, PROMISE_N, PROMISE_H, K, 0, 0, stream);
    release(y, PROMISE_N * K, "y");
    return kept;
}

// klt: no message without a table, and a look at the model moves no controller.
static void promise_klt_ends(Wired *w, KltFixture *fixtures, const float *x) {
    unsigned char message[16];
    for (int d = 0; d < 2; d++) {
        w->context.direction = (CodecDirection)d;
        check_error(codec_encode(&w->codec, &w->before, &w->context, x, 1, PROMISE_H, message, 16, w->stream) < 0,
                    "no table yet", "encoding without a table");
        check_error(codec_decode(&w->codec, &w->before, &w->context, message, 16, (float *)x, 1, PROMISE_H, w->stream),
                    "no table yet", "decoding without a table");
        w->before.klt[d].table = w->behind.klt[d].table = &fixtures[d].table;
        w->before.klt[d].work = w->behind.klt[d].work = &fixtures[d].work;
    }
    for (int training = 0; training < 2; training++) {
        int64_t n_bytes;
        w->context.training = training;
        release(wired_send(w, CODEC_FORWARD, x, &n_bytes), PROMISE_VALUES, "out");
        check((w->before.klt[0].control[0] != 0.0) == training, "the controller at %g, training %d",
              w->before.klt[0].control[0], training);
    }
}

// Must fail for: a mask that is not of the step, a scale of 1 where it is H/K, rounding to nearest where it is said to
// be stochastic, a gradient through another set or the transpose, bytes of one direction for the other.
static void test_codec_promises(void) {
    Stream *stream = test_stream(PRECISION_FP32, 2);
    Correlated c;
    KltFixture fixtures[2];
    int seen_kinds = 0;
    correlated_init(&c, PROMISE_H, 1024, stream);
    for (int d = 0; d < 2; d++) klt_fixture(&fixtures[d], &c, 0.1, d, 0, stream);
    for (size_t i = 0; i < sizeof promises / sizeof *promises; i++) {
        const CodecPromise *p = &promises[i];
        Wired w;
        int64_t n_bytes;
        int is_klt = p->kind == CODEC_KLT;
        float *x = is_klt ? correlated_rows(&c, 560, stream) : random_values(PROMISE_VALUES, 561, 1.0f);
        float *y = is_klt ? correlated_rows(&c, 562, stream) : random_values(PROMISE_VALUES, 563, 1.0f);
        wired_open(&w, p->kind, p->rate, p->wire, PROMISE_N, PROMISE_H, PROMISE_T);
        if (is_klt) promise_klt_ends(&w, fixtures, x);
        release(wired_send(&w, CODEC_FORWARD, x, &n_bytes), PROMISE_VALUES, "out");
        promise_sent(&w, p, CODEC_FORWARD, x);
        promise_sent(&w, p, CODEC_BACKWARD, y);
        if (p->linear) promise_adjoint(&w, x, y);
        if (p->kind == CODEC_MASK) w.codec.scale = 4.0f; // --mask-scale inverse: H/K
        for (int d = 0; d < 2; d++) {
            float *kept = is_klt ? promise_kept(&fixtures[d].table, d ? y : x, stream) : NULL;
            if (p->unbiased[d]) promise_unbiased(&w, (CodecDirection)d, d ? y : x, is_klt ? kept : d ? y : x);
            free(kept);
        }
        seen_kinds |= 1 << p->kind;
        free(x);
        free(y);
        wired_close(&w);
    }
    check(seen_kinds == (1 << CODEC_KINDS) - 1, "a codec promises nothing: %#x", (unsigned)seen_kinds);
    for (int d = 0; d < 2; d++) klt_fixture_free(&fixtures[d]);
    free(c.mix);
    stream_destroy(stream);
}

// Hostile bytes: wrong lengths are refused and touch nothing; random bytes of the right length are taken or refused,
// and nothing is read or written beyond (exact memory, for ASan). The message depends on neither threads nor address.
static void hostile_case(CodecKind kind, CodecDirection direction, int n, int H) {
    Wired w, single;
    int64_t n_bytes;
    int T = n % 2 == 0 ? n / 2 : n, forward = direction == CODEC_FORWARD;
    wired_open(&w, kind, kind == CODEC_TOPK || kind == CODEC_BOTTLENECK ? 0.7f : 0.0f, WIRE_BF16, n, H, T);
    wired_open(&single, kind, w.codec.mask_rate, WIRE_BF16, n, H, T);
    stream_destroy(single.stream);
    single.stream = test_stream(PRECISION_FP32, 1);
    float *x = uneven_values((int64_t)n * H, H, 81), *out;
    for (int visit = 0; visit < 2; visit++) { // topk: a set to go back on; aqsgd: caches
        release(wired_send(&w, CODEC_FORWARD, x, &n_bytes), n * H, "out");
        release(wired_send(&single, CODEC_FORWARD, x, &n_bytes), n * H, "out");
    }
    int64_t cap = codec_cap(&w.codec, n, H);
    unsigned char *message = (unsigned char *)malloc((size_t)cap), *other = (unsigned char *)malloc((size_t)cap + 3);
    CodecEnd *from = forward ? &w.before : &w.behind, *to = forward ? &w.behind : &w.before;
    w.context.direction = single.context.direction = direction;
    memset(message, 0xA5, (size_t)cap);
    check_error(codec_encode(&w.codec, from, &w.context, x, n, H, message, n_bytes / 4, w.stream) < 0, "the buffer",
                "a small buffer");
    int untouched = 1;
    for (int64_t i = 0; i < cap; i++) untouched = untouched && message[i] == 0xA5;
    n_bytes = codec_encode(&w.codec, from, &w.context, x, n, H, message, cap, w.stream);
    int64_t again = codec_encode(&single.codec, forward ? &single.before : &single.behind, &single.context, x, n, H,
                                 other + 3, cap, single.stream);
    check(n_bytes > 0 && n_bytes <= cap && again == n_bytes && memcmp(message, other + 3, (size_t)n_bytes) == 0,
          "%s: the message depends on threads or the address", codec_name(kind));
    out = guarded(n * H);
    for (int64_t wrong = 0; wrong <= n_bytes + 1; wrong += wrong + 3 < n_bytes ? wrong + 3 : 1) {
        if (wrong == n_bytes) continue;
        unsigned char *bytes = (unsigned char *)calloc((size_t)wrong + 1, 1);
        check_error(codec_decode(&w.codec, to, &w.context, bytes, wrong, out, n, H, w.stream), "a message of",
                    codec_name(kind));
        free(bytes);
    }
    for (int i = 0; i < n * H; i++) untouched = untouched && isnan(out[i]);
    check(untouched, "%s: a refused message was written or decoded", codec_name(kind));
    int taken = 0;
    unsigned char *bytes = (unsigned char *)malloc((size_t)n_bytes);
    for (uint64_t round = 0; round < 40; round++) {
        memcpy(bytes, message, (size_t)n_bytes);
        for (int64_t i = 0; i < n_bytes; i++) {
            uint32_t word = rand_block(7, RAND_TEST, (uint32_t)kind, round << 32 | (uint64_t)i).v[0];
            if (round < 20 || word % 64 == 0) bytes[i] = (unsigned char)(word >> 8);
        }
        taken += codec_decode(&w.codec, to, &w.context, bytes, n_bytes, out, n, H, w.stream) == 0;
    }
    check(taken == 40 || (kind == CODEC_TOPK && forward), "%s: %d of 40 taken", codec_name(kind), taken);
    free(bytes);
    free(message);
    free(other);
    free(x);
    release(out, n * H, "out");
    wired_close(&w);
    wired_close(&single);
}

static void test_codec_hostile(void) {
    for (int kind = CODEC_NONE; kind < CODEC_KLT; kind++) // mask: test_codec; klt: test_klt_messages
        for (int direction = 0; direction < 2; direction++) {
            hostile_case((CodecKind)kind, (CodecDirection)direction, 1, 16);
            hostile_case((CodecKind)kind, (CodecDirection)direction, 6, 129);
            hostile_case((CodecKind)kind, (CodecDirection)direction, 3, 192);
        }
}

#endif // masks and codecs of the CPU

// Byte `at` of message m.
static unsigned char link_byte(int64_t m, int64_t at) {
    return (unsigned char)(m * 31 + at * 7 + (m * at >> 5));
}

// Links: order, sizes, copies, the ring's end, growth while messages are inside, and each way to be down.
// Must fail for: a pointer kept instead of a copy, headers counted as sent, a ring that is allocated anew when warm.
static void test_link(void) {
    enum { LARGEST = 300, DEPTH = 8, MESSAGES = 20000 };
    unsigned char data[LARGEST], received[LARGEST + 1];
    Link link;
    int64_t n_bytes = -1, sent = 0, taken = 0, bytes = 0, ring_bytes = 0;
    double arrival = -1.0;
    char *ring = NULL;
    memset(&link, 0, sizeof link);
    check(link_recv(&link, received, LARGEST, &n_bytes, &arrival) == LINK_AGAIN && n_bytes == -1,
          "a new link is empty");
    while (taken < MESSAGES) {
        Philox draw = rand_block(3, RAND_TEST, 60, (uint64_t)(sent + taken));
        // the first fill is the largest, and none after it may allocate; it starts in a ring that grows
        int64_t size = sent < DEPTH ? (int64_t)LARGEST : (int64_t)(draw.v[0] % (LARGEST + 1));
        if (sent < MESSAGES && link_waiting(&link) < DEPTH && (sent < DEPTH || draw.v[1] % 2 || sent == taken)) {
            for (int64_t i = 0; i < size; i++) data[i] = link_byte(sent, i);
            check(link_send(&link, data, size, 0.5 * (double)sent) == 0, "%s", error_message);
            memset(data, 0xEE, sizeof data);
            sent++, bytes += size;
            if (sent == DEPTH) ring = link.ring, ring_bytes = link.ring_bytes;
        } else {
            memset(received, 0xDD, sizeof received);
            int equal = link_recv(&link, received, LARGEST, &n_bytes, &arrival) == LINK_OK;
            equal = equal && n_bytes >= 0 && n_bytes <= LARGEST && arrival == 0.5 * (double)taken;
            for (int64_t i = 0; equal && i < n_bytes; i++) equal = received[i] == link_byte(taken, i);
            check(equal && received[n_bytes] == 0xDD, "message %lld differs", (long long)taken);
            if (taken < DEPTH) check(n_bytes == LARGEST, "size of message %lld", (long long)taken);
            taken++;
        }
        if (link_waiting(&link) != sent - taken || link.sent_bytes != bytes || link.sent_messages != sent) {
            check(0, "counters: %lld messages waiting, %lld sent", (long long)link.waiting,
                  (long long)link.sent_messages);
            break;
        }
    }
    check(link.ring == ring && link.ring_bytes == ring_bytes, "a warm link has allocated");
    check(link_recv(&link, received, LARGEST, &n_bytes, &arrival) == LINK_AGAIN, "empty again");

    check(link_send(&link, "first", 5, 1.0) == 0 && link_send(&link, NULL, 0, 2.0) == 0, "%s", error_message);
    check_error(link_recv(&link, received, 4, &n_bytes, &arrival) == LINK_DOWN ? -1 : 0, "5 bytes", "a small buffer");
    check(link_waiting(&link) == 2, "a message that does not fit is gone");
    link_close(&link);
    check_error(link_send(&link, "late", 4, 3.0), "closed", "a send on a closed link");
    check(link_recv(&link, received, 5, &n_bytes, &arrival) == LINK_OK && n_bytes == 5 &&
              memcmp(received, "first", 5) == 0 && arrival == 1.0,
          "what was sent before the close");
    check(link_recv(&link, received, 0, &n_bytes, &arrival) == LINK_OK && n_bytes == 0 && arrival == 2.0,
          "an empty message");
    check_error(link_recv(&link, received, 5, &n_bytes, &arrival) == LINK_DOWN ? -1 : 0, "closed", "a drained link");
    check(link.sent_bytes == bytes + 5 && link.sent_messages == sent + 2, "the refused send was counted");
    link_free(&link);
    check(link_recv(&link, received, 5, &n_bytes, &arrival) == LINK_AGAIN && link.sent_bytes == 0,
          "new after link_free");
}

// Clocks: one example by hand. 100 bytes/s and 0.5 s of latency; all numbers are exact in binary.
static void test_clock(void) {
    Clock a = {0.0, 0.0}, b = {0.0, 0.0}, c = {0.0, 0.0};
    LinkSpeed speed = {100.0, 0.5}, instant = {0.0, 0.25};
    clock_compute(&a, 1.0);
    double to_b = clock_send(&a, speed, 200); // leaves at 1..3
    check(to_b == 3.5 && a.now == 1.0 && a.uplink_free == 3.0, "first message: %g", to_b);
    clock_compute(&a, 1.0);                   // at once, under the transfer
    double to_c = clock_send(&a, speed, 100); // behind the first though it goes elsewhere: leaves at 3..4
    check(to_c == 4.5 && a.now == 2.0 && a.uplink_free == 4.0, "shared uplink: %g", to_c);
    clock_compute(&b, 3.0);
    clock_receive(&b, to_b); // waits half a second
    check(b.now == 3.5, "a receiver that is early: %g", b.now);
    clock_compute(&c, 6.0);
    clock_receive(&c, to_c); // it has been there for long
    check(c.now == 6.0 && c.uplink_free == 0.0, "a receiver that is late: %g", c.now);
    check(clock_send(&b, speed, 0) == 4.0, "no bytes take the latency");
    clock_receive(&a, clock_send(&b, speed, 250)); // leaves at 3.5..6
    check(a.now == 6.5 && b.now == 3.5 && b.uplink_free == 6.0, "the way back: %g", a.now);
    check(clock_send(&a, speed, 50) == 7.5 && a.uplink_free == 7.0, "an idle uplink starts now, not when it was free");
    check(clock_send(&c, instant, 1ll << 40) == 6.25 && c.uplink_free == 6.0, "an infinitely fast link");
    check(clock_send(&a, instant, 8) == 7.25, "the queue before a fast link");
}

// What -p alone means, and a plan for a mesh this machine could not hold.
static void test_mesh_defaults(void) {
    write_corpus();
    check_run(0, NULL, DEEP "-p 0.95 --dry-run",
              "mesh: 1 fast replica of 4 stages, codec mask: 1 of 24 values a boundary and token (bf16)");
    check(strstr(run_output, "anchor: filter, rank 3, delay 20, momentum 0.9, alpha 0.3, tau 0.001\n") != NULL, "%s",
          run_output);
    check_run(0, NULL, SMALL "-p 0.95 --dry-run", "mesh: 1 fast replica of 2 stages");
    check_run(0, NULL, SMALL "-p 0 --dry-run", "run:");
    check(strstr(run_output, "mesh:") == NULL, "-p 0 alone makes a mesh:\n%s", run_output);
    check_run(0, NULL, DEEP "-p 0.9 -x 4 --dry-run", "mesh: 3 fast replicas of 4 stages, codec mask: 2 of 24");
    check_run(0, NULL, DEEP "-p 0.9 -x 4 --anchor 0 --dry-run", "mesh: 4 fast replicas of 4 stages");
    check_run(0, NULL, "--init llama-3.2-1b -p 0.95 -x 8 -b 32 -t 2048 --micro-batch 1 --dry-run", "M95+AP");
    check(strstr(run_output, "7 fast replicas of 4 stages, codec mask: 102 of 2048 values") != NULL &&
              strstr(run_output, "anchor: filter, rank 256") != NULL && strstr(run_output, "     64.5x\n") != NULL,
          "%s", run_output);
    check_run(1, NULL, "--init llama-3.2-1b -d @/corpus.jsonl -p 0.95 -x 8", "tokenizer");
}

// Simulated time of one micro-batch through two stages, by hand: nothing overlaps.
static void test_mesh_clock(void) {
    write_corpus();
    MeshRun *run = mesh_run_open(DEEP QUIET "-b 2 -x 1 -y 2 -p 0.5 --link-mbps 8 --link-ms 100 --device-tflops 1e-6");
    Mesh *mesh = &run->trainer.mesh;
    mesh_run_step(run);
    double flops =
        stage_flops(&mesh_cell(mesh, 0, 0)->stage, 32, 16) + stage_flops(&mesh_cell(mesh, 0, 1)->stage, 32, 16);
    double message = 32 * 12 * 4 / 1e6 + 0.1, expected = 3.0 * flops / 1e6 + 2.0 * message;
    check(fabs(mesh_now(mesh) - expected) < 1e-7 * expected, "%.9f s, by hand %.9f s", mesh_now(mesh), expected);
    mesh_run_step(run);
    check(fabs(mesh_now(mesh) - 2.0 * expected) < 1e-7 * expected, "two steps: %.9f s", mesh_now(mesh));
    mesh_run_close(run);
    // the filter: 4 m n r + 4 r^2 min(m,n) of each matrix, at the end of the second step; rank 3 of (C 24, KV 12, F 40)
    run = mesh_run_open(DEEP QUIET "-b 2 -x 2 -y 2 -p 0.5 --anchor-delay 1 --device-tflops 1e-6");
    mesh_run_step(run);
    mesh_run_step(run);
    double once = 4.0 * 3 * 24 * (2 * 24 + 2 * 12 + 3 * 40) + 4.0 * 9 * (2 * 24 + 2 * 12 + 3 * 24);
    expected = 2.0 * 3.0 * flops / 1e6 + mesh_cell(&run->trainer.mesh, 0, 0)->stage.n_layers * once / 1e6;
    check(fabs(mesh_now(&run->trainer.mesh) - expected) < 1e-7 * expected, "filtered: %.9f s, by hand %.9f s",
          mesh_now(&run->trainer.mesh), expected);
    mesh_run_close(run);
    // PowerSGD: 8 m n r of each matrix, by each replica
    run = mesh_run_open(DEEP QUIET "-b 2 -x 2 -y 1 --local-steps 1 --powersgd-rank 2 --device-tflops 1e-6");
    const Stage *stage = &mesh_cell(&run->trainer.mesh, 0, 0)->stage;
    mesh_run_step(run);
    expected = 3.0 * stage_flops(stage, 32, 16) / 1e6;
    for (int i = 0; i < stage->n_tensors; i++)
        if (stage->tensors[i].n_dims == 2) expected += 8.0 * 2 * (double)stage->tensors[i].n / 1e6;
    check(fabs(mesh_now(&run->trainer.mesh) - expected) < 1e-7 * expected, "averaged: %.9f s, by hand %.9f s",
          mesh_now(&run->trainer.mesh), expected);
    mesh_run_close(run);
}

// Which codec a start recommends, and where. Must fail for: the first row of a codec taken for the nearest, a codec
// that does not fit, the line for a codec that nothing beats.
static void test_codec_table(void) {
    static const char line[] =
        "codec: at this budget klt keeps more of what is learned (README, \"What it achieves\"); "
        "--codec klt needs an anchor, -x 2 or more\n";
    static const struct {
        CodecKind kind;
        float p;
        CodecKind better;
    } cases[] = {
        {CODEC_MASK, 0.95f, CODEC_KLT},       {CODEC_MASK, 0.9f, CODEC_KLT},     {CODEC_MASK, 0.99f, CODEC_KLT},
        {CODEC_MASK, 0.7f, CODEC_QUANT4},     {CODEC_MASK, 0.5f, CODEC_QUANT4},  {CODEC_MASK, 0.4f, CODEC_MASK},
        {CODEC_MASK, 0.8f, CODEC_MASK},       {CODEC_MASK, 0.0f, CODEC_MASK},    {CODEC_TOPK, 0.95f, CODEC_KLT},
        {CODEC_TOPK, 0.85f, CODEC_TOPK},      {CODEC_KLT, 0.975f, CODEC_KLT},    {CODEC_KLT, 0.5f, CODEC_KLT},
        {CODEC_BOTTLENECK, 0.95f, CODEC_KLT}, {CODEC_QUANT4, 0.0f, CODEC_QUANT4}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        Codec codec;
        codec_init(&codec, 2048, cases[i].p, MASK_SCALE_NONE, WIRE_BF16, 1);
        codec.kind = cases[i].kind;
        CodecKind better = codec_better(&codec, 2048);
        check(better == cases[i].better, "%s at %g: %s, expected %s", codec_name(cases[i].kind), (double)cases[i].p,
              codec_name(better), codec_name(cases[i].better));
    }
    check(codec_kept(CODEC_KLT, 20.0) == codec_kept(CODEC_KLT, 39.0) &&
              codec_kept(CODEC_KLT, 40.0) < codec_kept(CODEC_KLT, 20.0),
          "the nearest rate");
    check(codec_kept(CODEC_KLT, 9.0) < 0.0f, "a rate below all rows");
    write_corpus();
    check_run(0, NULL, DEEP "-p 0.95 -n 1 -x 1 -o @/masked", line);
    check(strstr(strstr(run_output, line) + 1, line) == NULL, "said twice:\n%s", run_output);
    check_run(0, NULL, DEEP "--codec klt -p 0.95 --dry-run", "codec klt:");
    check(strstr(run_output, "codec: at") == NULL, "%s", run_output);
    check_run(0, NULL, DEEP "-p 0 -y 2 --dry-run", "mesh:");
    check(strstr(run_output, "codec: at") == NULL, "%s", run_output);
}

#ifdef DEVICE_CUDA
// The weights of two files are within tol of each other, tensor by tensor.
static void check_close_models(const char *a, const char *b, double tol) {
    SafeTensors x, y;
    char path_a[PATH_MAX], path_b[PATH_MAX];
    snprintf(path_a, sizeof path_a, "%s", scratch_path(a));
    snprintf(path_b, sizeof path_b, "%s", scratch_path(b));
    if (!check(safetensors_open(&x, path_a) == 0 && safetensors_open(&y, path_b) == 0, "%s", error_message)) return;
    for (int i = 0; i < x.n_tensors; i++) {
        int64_t n, m;
        float *ours = dump_values(&x, "", x.tensors[i].name, &n), *theirs = dump_values(&y, "", x.tensors[i].name, &m);
        if (check(n == m, "%s: %lld and %lld values", x.tensors[i].name, (long long)n, (long long)m))
            check_close(ours, theirs, n, tol, x.tensors[i].name);
        free(ours);
        free(theirs);
    }
    safetensors_close(&x);
    safetensors_close(&y);
}
#endif

// Whole runs with every codec: bytes as its formula says, a finite loss, and resumed the same bits. The data are seen
// more than once, so that aqsgd's caches are at work on both sides of the stop.
static void test_codec_runs(void) {
    static const struct {
        const char *words, *says, *bytes;
    } cases[] = {{"--codec none -x 2 -y 2", "codec none: 32 bytes forward, 32 backward", "16.0         16.0"},
                 {"--codec quant8", "codec quant8: 18 bytes forward, 18 backward", "9.0          9.0"},
                 {"--codec quant4", "codec quant4: 10 bytes forward, 10 backward", "5.0          5.0"},
                 {"--codec topk -p 0.7", "codec topk: 8 bytes forward, 6 backward", "4.0          3.0"},
                 {"--codec bottleneck -p 0.8", "codec bottleneck: 6 bytes forward, 6 backward", "3.0          3.0"},
                 {"--codec aqsgd", "codec aqsgd: 6 bytes forward, 18 backward", "9.0"},
                 {"--codec tahquant", "codec tahquant: 6 bytes forward, 18 backward", "3.0          9.0"}};
    char command[1024], a[64], b[64], text[64];
    write_corpus();
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        snprintf(
            command, sizeof command,
            "--init d=16,layers=2,heads=2,kv=1,ffn=24,vocab=258,ctx=32 -d @/corpus.jsonl -b 32 --micro-batch 3 -t 32 "
            "-n 8 --val-tokens 64 --val-every 100 -y 2 --threads 2 --probe 5 %s -o @/c%zu",
            cases[i].words, i);
        check_run(0, NULL, command, cases[i].says);
        snprintf(text, sizeof text, " %s", cases[i].bytes);
        check(strstr(run_output, "done: 8 steps") != NULL && strstr(run_output, text) != NULL, "%s:\n%s",
              cases[i].words, run_output);
        strcat(command, "b --stop-after 5");
        check_run(0, NULL, command, "stopped after step 5");
        snprintf(command, sizeof command, "-o @/c%zub --resume", i);
        check_run(0, NULL, command, "done: 8 steps");
        snprintf(a, sizeof a, "c%zu", i);
        snprintf(b, sizeof b, "c%zub", i);
        check_same_latest(a, b, model_files, 1, cases[i].words);
        snprintf(
            command, sizeof command,
            "-m @/c%zu/latest/model.bin --eval --eval-masked --val-data @/corpus.jsonl --val-tokens 64 -t 32 -y 2 %s",
            i, i == 0 ? "--codec quant8" : cases[i].words);
        check_run(0, NULL, command, "validation loss");
    }
    check_run(0, NULL, SMALL "--codec aqsgd -y 2 -x 1 --dry-run", "messages, codec (host)");
    check_run(1, NULL, SMALL "--codec topk -y 2 --dry-run", "--codec topk sends what -p leaves; give -p");
    check_run(1, NULL, SMALL "--codec topk -p 0.99 -y 2 --dry-run", "too few for one and its index");
    check_run(1, NULL, SMALL "--codec quant4 -p 0.9 -y 2 --dry-run", "leave out -p, or choose another codec");
    check_run(1, NULL, SMALL "--codec none -p 0.9 -y 2 --dry-run", "--codec none sends all there is");
    check_run(1, NULL, SMALL "--codec quant4 -y 1", "there is one stage");
    check_run(1, NULL, "-o @/c1 --resume --codec quant4", "--codec differs from the run's");
}

// The transform codec in a mesh: resumed or not, same bits, tables and controllers with them; the bytes are those of
// the budget; and what cannot be is refused. Must fail for: tables of the last pass taken at once, moments or a
// controller forgotten.
static void test_klt_mesh(void) {
    static const char *const variants[] = {
        "--codec klt -p 0.8 -x 2 -y 3 --anchor-delay 3",
        "--codec klt -p 0.9 -x 3 -y 2 --anchor-delay 4 --anchor-use none --local-steps 4",
        "--codec klt -p 0.8 -x 2 -y 2 --anchor-delay 3 --codec-coding fixed --klt-predict 0"};
    char whole[64], parts[64];
    write_corpus();
    for (int i = 0; i < 3; i++) {
        snprintf(whole, sizeof whole, "k%d", i);
        snprintf(parts, sizeof parts, "l%d", i);
        check_resumed(variants[i], whole, parts);
        check_same_latest(whole, parts, anchored_files, 2, variants[i]);
    }
    check_run(1, NULL, DEEP "-n 2 --codec klt -p 0.9 -x 1 -y 2 -o @/refused", "give -x 2");
    check_run(1, NULL, DEEP "-n 2 --codec klt -x 2 -y 2 -o @/refused", "give -p");
    check_run(1, NULL, DEEP "-n 2 --codec klt -p 0.9 -x 2 -y 2 --anchor 0 -o @/refused", "give -x 2");
}

// The entropy coder on a thread of its own: same bits and same simulated time as between passes, resumed in the middle
// too. Must fail for: a message sent before the one that came first, the controller moved late, the clock of the flush.
static void test_coder_runs(void) {
    static const char *const variants[] = {
        "--codec klt -p 0.8 -x 2 -y 3 --anchor-delay 3 --link-mbps 1",
        "--codec klt -p 0.9 -x 3 -y 2 --anchor-delay 4 --local-steps 4 --link-mbps 1",
        "--codec klt -p 0.8 -x 2 -y 3 --anchor-delay 3 --codec-coding fixed --probe 4",
        "--codec klt -p 0.8 -x 2 -y 3 --anchor-delay 3 --schedule async -b 2 --dp none --link-mbps 1"};
    char command[1024], whole[64], parts[64];
    write_corpus();
    for (int i = 0; i < 4; i++) {
        snprintf(whole, sizeof whole, "coder%d", i);
        snprintf(parts, sizeof parts, "coding%d", i);
        snprintf(command, sizeof command, DEEP "-n 11 %s --device-tflops 1e-5 --coder inline -o @/%s", variants[i],
                 whole);
        check_run(0, NULL, command, "done: 11 steps");
        snprintf(command, sizeof command, DEEP "-n 11 %s --device-tflops 1e-5 --coder thread -o @/%s --stop-after 5",
                 variants[i], parts);
        check_run(0, NULL, command, "--resume");
        snprintf(command, sizeof command, "-o @/%s --resume", parts);
        check_run(0, NULL, command, "done: 11 steps");
        check_same_history(whole, parts, variants[i]);
        check_same_latest(whole, parts, anchored_files, 2, variants[i]);
    }
}

// Jobs are done in the order they come, with a thread and without.
typedef struct {
    int number, *next, seen;
} CountedJob;

static void count_job(void *context) {
    CountedJob *job = (CountedJob *)context;
    job->seen = (*job->next)++;
}

static void test_coder(void) {
    for (int threaded = 0; threaded < 2; threaded++) {
        Coder coder;
        CoderJob jobs[20];
        CountedJob counted[20];
        int next = 0, in_order = 1;
        memset(&coder, 0, sizeof coder);
        if (threaded) check(coder_start(&coder) == 0, "%s", error_message);
        for (int i = 0; i < 20; i++) {
            CountedJob count = {i, &next, -1};
            CoderJob job = {count_job, &counted[i], 0, NULL};
            counted[i] = count, jobs[i] = job;
            coder_submit(&coder, &jobs[i]);
            if (i % 7 == 3) coder_wait(&coder, &jobs[i - 2]);
        }
        coder_wait(&coder, &jobs[19]);
        for (int i = 0; i < 20; i++) in_order = in_order && counted[i].seen == i && coder_is_done(&coder, &jobs[i]);
        check(in_order, "jobs out of order, %s", threaded ? "on a thread" : "at once");
        coder_stop(&coder);
    }
}

// How often each stage of four refreshes in 600 steps.
static void count_refreshes(int *counts, Refresh refresh, int every, int phase) {
    Optimizer optimizer = {OPTIMIZER_ROTATE, ROTATE_2ND, ROTATE_BI, refresh, every, 4096};
    for (int s = 0; s < 4; s++) {
        counts[s] = 0;
        for (int t = 1; t <= 600; t++) counts[s] += rotate_is_due(&optimizer, s, 4, t, phase);
    }
}

// Block matrices of a stage that are refreshed in step t.
static int refreshes_in(const Stage *stage, int64_t t, int n_blocks) {
    int n = 0;
    for (int phase = 0; phase < n_blocks; phase++) n += rotation_refresh(stage, t, phase) == ROTATE_WARM;
    return n;
}

// Refreshes are spread over the steps, whatever their rate; and what is stepped together does not depend on the cut
// into stages. Must fail for: all phases 0, phases counted by layers, a group that goes on into the next layer.
static void test_rotation_spread(void) {
    enum { LAYERS = 12, BLOCKS = 7 * LAYERS };
    Config config;
    Stage whole, part;
    check(config_from_spec(&config, "d=24,layers=12,heads=4,kv=4,ffn=40,vocab=58,ctx=64") == 0, "%s", error_message);
    check(stage_table(&whole, &config, 0, LAYERS) == 0 && stage_table(&part, &config, 5, 4) == 0, "%s", error_message);
    for (int way = 0; way < 3; way++) {
        Optimizer optimizer = {OPTIMIZER_ROTATE, ROTATE_2ND, ROTATE_BI, (Refresh)way, 10, 4096};
        whole.optimizer = optimizer, whole.n_stages = 4, whole.position = 1, whole.has_basis = 0;
        check(rotation_refresh(&whole, 7, 0) == ROTATE_COLD, "the first bases");
        whole.has_basis = 1;
        double share = way == REFRESH_UNIFORM ? 0.1 : way == REFRESH_STAGE_AWARE ? 4.0 / 6 * 2 / 10 : 4.0 / 6 / 10;
        for (int t = 2; t <= 60; t++)
            check(fabs(refreshes_in(&whole, t, BLOCKS) - share * BLOCKS) < 1.0, "way %d, step %d: %d of %d", way, t,
                  refreshes_in(&whole, t, BLOCKS), BLOCKS);
    }
    part.optimizer = whole.optimizer;
    int first = 1 + 9 * 5, together = 0; // the tensor of the whole model that is the part's first
    for (int i = 0; i < part.n_tensors; i++) {
        const Tensor *t = &part.tensors[i];
        int count = t->block ? rotation_group(&part, i) : 0;
        if (!t->block) continue;
        check(count == rotation_group(&whole, first + i), "%s: %d together, %d of the whole", t->name, count,
              rotation_group(&whole, first + i));
        check(count == 1 || count * t->n <= ROTATE_GROUP, "%s: %d together", t->name, count);
        for (int k = 0; k < count; k++) check(t[k].block && strncmp(t[k].name, t->name, 14) == 0, "%s", t[k].name);
        together = count > together ? count : together;
    }
    check((together > 1) == (ROTATE_GROUP > 0), "%d matrices at most together", together);
    free(whole.tensors);
    free(part.tensors);
}

// When bases are refreshed, which sides, and the learning rate under delay. Must fail for: t mod f = 1, a phase the
// wrong way, the delay's share of the sum without P, the last stage's delay 1; a quarter instead of a tenth of the
// steps; mu_t for mu_{t+1}.
static void test_optimizer_rules(void) {
    int uniform[4], aware[4], reversed[4], often[4], phased[4];
    Optimizer optimizer = {OPTIMIZER_ROTATE, ROTATE_2ND, ROTATE_BI, REFRESH_UNIFORM, 10, 100};
    for (int t = 1; t <= 40; t++) {
        check(rotate_is_due(&optimizer, 0, 1, t, 0) == (t % 10 == 0), "step %d", t);
        check(rotate_is_due(&optimizer, 1, 3, t, 3) == ((t + 3) % 10 == 0), "step %d of the third", t);
    }
    count_refreshes(uniform, REFRESH_UNIFORM, 10, 0);
    count_refreshes(aware, REFRESH_STAGE_AWARE, 10, 0);
    count_refreshes(phased, REFRESH_STAGE_AWARE, 10, 7);
    count_refreshes(reversed, REFRESH_REVERSED, 10, 0);
    count_refreshes(often, REFRESH_STAGE_AWARE, 1, 0); // 4 a step: 2, 4/3, 2/3, 0 at most once a step
    for (int s = 0; s < 4; s++) {
        check(uniform[s] == 60 && aware[s] == 40 * (3 - s) && reversed[s] == 40 * s && phased[s] == aware[s],
              "stage %d: %d uniform, %d stage-aware, %d reversed", s, uniform[s], aware[s], reversed[s]);
        check(often[s] == (s < 2 ? 600 : s == 2 ? 400 : 0), "stage %d, every step: %d", s, often[s]);
    }
    static const struct {
        int m, n;
        RotateGeometry geometry;
        int left, right;
    } sides[] = {{7, 9, ROTATE_UNI, 1, 0},    {9, 7, ROTATE_UNI, 0, 1},     {8, 8, ROTATE_UNI, 1, 0},
                 {7, 9, ROTATE_BI, 1, 1},     {101, 100, ROTATE_BI, 0, 1},  {100, 101, ROTATE_BI, 1, 0},
                 {101, 102, ROTATE_BI, 0, 0}, {101, 102, ROTATE_UNI, 0, 0}, {101, 5, ROTATE_UNI, 0, 1}};
    for (size_t i = 0; i < sizeof sides / sizeof *sides; i++) {
        optimizer.geometry = sides[i].geometry;
        RotateSides got = rotate_sides(&optimizer, sides[i].m, sides[i].n);
        check(got.left == sides[i].left && got.right == sides[i].right, "%d x %d: %d %d", sides[i].m, sides[i].n,
              got.left, got.right);
    }
    for (int k = 0; k < 30; k++) {
        double share = fmin((double)k / 20.0, 1.0), expected = 3e-4 / pow(5.0, 1.0 - share);
        for (int kind = 0; kind <= OPTIMIZER_MUON; kind++) {
            int anneals = kind == OPTIMIZER_PIPEDREAM_LR || kind == OPTIMIZER_PIPEMARE;
            double late = (double)optimizer_lr((OptimizerKind)kind, 3e-4f, 5, k, 200);
            check(fabs(late - (anneals ? expected : (double)3e-4f)) < 1e-6 * 3e-4, "kind %d, step %d: %g", kind, k,
                  late);
            check(optimizer_lr((OptimizerKind)kind, 3e-4f, 0, k, 200) == 3e-4f, "kind %d without delay", kind);
        }
    }
    check(fabs((double)pipemare_decay(4) - pow(0.135, 0.25)) < 1e-7 && pipemare_decay(0) == pipemare_decay(1) &&
              fabs((double)pipemare_decay(0) - 0.135) < 1e-7,
          "PipeMare's decay %g, %g", (double)pipemare_decay(4), (double)pipemare_decay(0));
    AdamW adam = {0.99f, 0.95f, 1e-8f};
    NesterovProduct kept = {0, 0.0};
    double b1 = (double)adam.beta1, product = 1.0, mu = 0.0, next = b1 * (1.0 - 0.5 * pow(0.96, 0.004));
    for (int t = 1; t <= 300; t++) {
        mu = next, product *= mu, next = b1 * (1.0 - 0.5 * pow(0.96, 0.004 * (t + 1)));
        NesterovStep at = nesterov_step(adam, 1e-2f, 0.1f, 1.0f, t, &kept);
        double of_grad = 0.01 * (1.0 - mu) / (1.0 - product), of_mean = 0.01 * next / (1.0 - product * next);
        check(fabs((double)at.grad_size - of_grad) < 3e-7 * of_grad &&
                  fabs((double)at.mean_size - of_mean) < 3e-7 * of_mean,
              "Nesterov's step %d: %g %g, not %g %g", t, (double)at.grad_size, (double)at.mean_size, of_grad, of_mean);
    }
    check(optimizer_beta1(OPTIMIZER_NESTEROV) == 0.99f && optimizer_beta1(OPTIMIZER_ADAMW) == 0.9f, "beta1");
}

// The estimate against a known matrix. Must fail for: means for medians, v normal instead of Cauchy.
static void test_alignment_estimate(void) {
    enum { N = 80 };
    float *H = random_values(N * N, 60, 1.0f), *rows = (float *)malloc(sizeof(float) * N * ALIGNMENT_DRAWS);
    double worst = 0.0, mean = 0.0;
    for (int seed = 1; seed <= 20; seed++) {
        double exact = 0.0;
        for (int i = 0; i < N; i++) {
            for (int d = 0; d < ALIGNMENT_DRAWS; d++) {
                double sum = 0.0;
                for (int j = 0; j < N; j++)
                    sum += (double)H[i * N + j] * (double)alignment_cauchy((uint64_t)seed, (uint32_t)d, (uint64_t)j);
                rows[i * ALIGNMENT_DRAWS + d] = (float)sum;
            }
            for (int j = 0; j < N; j++) exact += fabs((double)H[i * N + j]);
        }
        double error = alignment_sum(rows, N) / exact - 1.0;
        worst = fmax(worst, fabs(error)), mean += error / 20.0;
    }
    check(worst < 0.7 && fabs(mean) < 0.15, "off by %g at most, by %g on average", worst, mean);
    free(H);
    free(rows);
}

// Flips, cosine and travel of coordinates by hand: two that go 0 1 3 2 2 and 5 5 7 9 5.
static void test_oscillation(void) {
    static const double at[5][2] = {{0, 5}, {1, 5}, {3, 7}, {2, 9}, {2, 5}};
    Oscillation swing;
    memset(&swing, 0, sizeof swing);
    check(isnan(oscillation_flips(&swing)) && isnan(oscillation_cosine(&swing)) && isnan(oscillation_travel(&swing)),
          "something of nothing");
    for (int i = 0; i < 5; i++) oscillation_add(&swing, at[i], 2);
    // updates (1,0) (2,2) (-1,2) (0,-4): signs that change: -1 after 2, -4 after 2
    check_within(oscillation_flips(&swing), 2.0 / 6.0, 1e-12, "flips");
    check_within(oscillation_cosine(&swing), (sqrt(0.5) + 2.0 / sqrt(40.0) - 2.0 / sqrt(5.0)) / 3.0, 1e-12, "cosine");
    check_within(oscillation_travel(&swing), 12.0 / 2.0, 1e-12, "travel");
    double still[2] = {2.0, 5.0};
    oscillation_add(&swing, still, 2);
    check(swing.pairs == 3, "a cosine of no update");
}

#ifndef DEVICE_CUDA // reads and writes the host's tensors
typedef struct {
    MeshRun *run;
    int n;     // values of all block matrices
    double *H; // (n,n)
} Hessian;

// Gradients of the block matrices on the batch, one after the other.
static void hessian_gradients(const Hessian *h, double *to) {
    Pass pass = {h->run->batches, h->run->trainer.progress.step, 0, 0, NULL, 0};
    check(mesh_run(&h->run->trainer.mesh, 0, 1, &pass) == 0, "%s", error_message);
    for (const Stage *stage = mesh_model(&h->run->trainer.mesh, 0); stage != NULL; stage = stage->next)
        for (int i = 0; i < stage->n_tensors; i++)
            for (int64_t j = 0; stage->tensors[i].block && j < stage->tensors[i].n; j++)
                *to++ = (double)stage->grads[stage->tensors[i].offset + j];
}

// H by differences, one parameter at a time.
static void hessian_fill(Hessian *h) {
    double *minus = (double *)malloc(sizeof(double) * (size_t)h->n), *row = h->H;
    for (const Stage *stage = mesh_model(&h->run->trainer.mesh, 0); stage != NULL; stage = stage->next) {
        for (int i = 0; i < stage->n_tensors; i++) {
            float *param = stage->params + stage->tensors[i].offset;
            for (int64_t j = 0; stage->tensors[i].block && j < stage->tensors[i].n; j++, row += h->n) {
                float start = param[j];
                param[j] = start + 0.01f;
                hessian_gradients(h, row);
                param[j] = start - 0.01f;
                hessian_gradients(h, minus);
                param[j] = start;
                for (int k = 0; k < h->n; k++) row[k] = (row[k] - minus[k]) / 0.02;
            }
        }
    }
    free(minus);
}

// values (m,n), `stride` apart, = Q_L^T values Q_R
static void hessian_turn(double *values, int64_t stride, const RotateBasis *basis, int m, int n) {
    double *turned = (double *)calloc((size_t)(m * n), sizeof(double));
    for (int a = 0; a < m; a++)
        for (int b = 0; b < n; b++)
            for (int i = 0; i < m; i++)
                for (int j = 0; j < n; j++)
                    turned[a * n + b] +=
                        (double)basis->left[i * m + a] * values[(i * n + j) * stride] * (double)basis->right[j * n + b];
    for (int i = 0; i < m * n; i++) values[i * stride] = turned[i];
    free(turned);
}

// H = R^T H R, R the bases of all matrices.
static void hessian_rotate(Hessian *h) {
    int at = 0;
    for (const Stage *stage = mesh_model(&h->run->trainer.mesh, 0); stage != NULL; stage = stage->next) {
        for (int i = 0; i < stage->n_tensors; i++) {
            const Tensor *t = &stage->tensors[i];
            int m = (int)t->shape[0], n = (int)t->shape[1];
            if (!t->block) continue;
            RotateBasis basis = rotate_basis(stage->rotation + rotation_floats(stage, i),
                                             rotate_sides(&stage->optimizer, m, n), stage->optimizer.source, m, n);
            for (int k = 0; k < h->n; k++) hessian_turn(h->H + (int64_t)k * h->n + at, 1, &basis, m, n);
            for (int k = 0; k < h->n; k++) hessian_turn(h->H + (int64_t)at * h->n + k, h->n, &basis, m, n);
            at += m * n;
        }
    }
}

static double hessian_sum(const Hessian *h) {
    double sum = 0.0;
    for (int64_t i = 0; i < (int64_t)h->n * h->n; i++) sum += fabs(h->H[i]);
    return sum;
}

// One draw's rows are H v.
static void hessian_product(Hessian *h, int rotated) {
    Alignment a;
    double *expected = (double *)calloc((size_t)h->n, sizeof(double)), difference = 0.0, size = 0.0;
    const Stage *model = mesh_model(&h->run->trainer.mesh, 0);
    uint64_t seed = (uint64_t)h->run->trainer.opts.seed;
    int64_t at = 0, row = 0;
    check(alignment_begin(&a, model) == 0, "%s", error_message);
    check(a.n_blocks == h->n && a.n_rows == h->n, "%lld of %d rows", (long long)a.n_rows, h->n);
    check(alignment_product(&h->run->trainer, &a, 3, rotated, h->run->batches) == 0, "%s", error_message);
    for (int i = 0; i < h->n; i++)
        for (int j = 0; j < h->n; j++)
            expected[i] += h->H[(int64_t)i * h->n + j] * (double)alignment_cauchy(seed, 3, (uint64_t)j);
    for (const Stage *stage = model; stage != NULL; stage = stage->next) {
        for (int i = 0; i < stage->n_tensors; i++) {
            const Tensor *t = &stage->tensors[i];
            for (int64_t j = 0; t->block && j < t->n; j++, row++) {
                int64_t which =
                    (int64_t)rand_permute((uint64_t)j, (uint64_t)t->n, seed, RAND_ALIGNMENT, (uint64_t)t->index);
                double ours = (double)a.rows[row * ALIGNMENT_DRAWS + 3], exact = expected[at + which];
                difference += (ours - exact) * (ours - exact), size += exact * exact;
            }
            if (t->block) at += t->n;
        }
    }
    check(sqrt(difference / size) < 2e-3, "rotated %d: H v is off by %g", rotated, sqrt(difference / size));
    alignment_free(&a);
    free(expected);
}

// A model's block matrices of an arena's layout, as one vector; zero: whatever else there is must be zero.
static void hessian_blocks(const Hessian *h, const float *from, int zero, double *to) {
    for (const Stage *stage = mesh_model(&h->run->trainer.mesh, 0); stage != NULL; stage = stage->next) {
        for (int i = 0; i < stage->n_tensors; i++)
            for (int64_t j = 0; j < stage->tensors[i].n; j++) {
                float value = from[stage->tensors[i].offset + j];
                if (stage->tensors[i].block)
                    *to++ = (double)value;
                else
                    check(!zero || value == 0.0f, "%s is not left out", stage->tensors[i].name);
            }
        from += stage->arena_floats;
    }
}

// The leading directions are orthonormal, and H does nearly as much along them as along its largest eigenvectors.
static void hessian_leading(const Hessian *h) {
    int n = h->n;
    float *both = (float *)malloc(sizeof(float) * (size_t)(n * n)), *vectors = guarded(n * n), *values = guarded(n);
    double *v[LEADING], found = 0.0, largest[LEADING] = {0.0}, all = 0.0;
    const float *from = h->run->trainer.leading.directions;
    for (int k = 0; k < LEADING; k++, from += model_floats(mesh_model(&h->run->trainer.mesh, 0))) {
        v[k] = (double *)malloc(sizeof(double) * (size_t)n);
        hessian_blocks(h, from, 1, v[k]);
        for (int j = 0; j <= k; j++) {
            double dot = 0.0;
            for (int i = 0; i < n; i++) dot += v[k][i] * v[j][i];
            check(fabs(dot - (j == k)) < 1e-4, "directions %d and %d: %g", j, k, dot);
        }
        for (int i = 0; i < n; i++) {
            double product = 0.0;
            for (int j = 0; j < n; j++) product += h->H[(int64_t)i * n + j] * v[k][j];
            found += product * product;
        }
    }
    for (int i = 0; i < n; i++)
        for (int j = 0; j < n; j++)
            both[(int64_t)i * n + j] = (float)(0.5 * (h->H[(int64_t)i * n + j] + h->H[(int64_t)j * n + i]));
    check(eigh(vectors, values, both, n, h->run->trainer.stream) == 0, "%s", error_message);
    for (int i = 0; i < n; i++) {
        double square = (double)values[i] * (double)values[i];
        for (int k = 0; k < LEADING; k++) {
            double less = fmin(square, largest[k]);
            largest[k] = fmax(square, largest[k]), square = less;
        }
    }
    for (int k = 0; k < LEADING; k++) all += largest[k], free(v[k]);
    check(found > 0.95 * all && found < 1.01 * all, "squares of H along the directions: %g, the largest: %g", found,
          all);
    release(vectors, n * n, "eigenvectors");
    release(values, n, "eigenvalues");
    free(both);
}

// The measurement of a small run beside the whole Hessian by differences, in raw and rotated bases; nothing is changed
// by it. Must fail for: v or Hv not turned, turned the wrong way, one-sided differences of twice the distance.
static void test_alignment(void) {
    write_corpus();
    Hessian h = {mesh_run_open("--init d=4,layers=2,heads=1,kv=1,ffn=6,vocab=258,ctx=16 -d @/corpus.jsonl -b 4 -t 16 "
                               "-l 3e-2 --precision fp32 --wire fp32 --threads 1 -y 2 -x 1 --optimizer rotate -n 40"),
                 272, NULL};
    Stage *model = mesh_model(&h.run->trainer.mesh, 0);
    StepResult result;
    size_t n_bytes = sizeof(float) * (size_t)model->arena_floats;
    h.H = (double *)malloc(sizeof(double) * (size_t)(h.n * h.n));
    for (int step = 0; step < 12; step++) mesh_run_step(h.run);
    check(isnan(h.run->result.alignment[0]), "measured unasked");
    float *params = (float *)malloc(n_bytes), *grads = (float *)malloc(n_bytes);
    memcpy(params, model->params, n_bytes), memcpy(grads, model->grads, n_bytes);
    check(measure_alignment(&h.run->trainer, h.run->batches, &result) == 0, "%s", error_message);
    check(memcmp(params, model->params, n_bytes) == 0 && memcmp(grads, model->grads, n_bytes) == 0, "not put back");
    hessian_fill(&h);
    hessian_leading(&h);
    double raw = hessian_sum(&h);
    hessian_product(&h, 0);
    hessian_rotate(&h);
    double rotated = hessian_sum(&h);
    hessian_product(&h, 1);
    check(fabs(result.alignment[0] / raw - 1.0) < 0.5, "raw %g, by differences %g", result.alignment[0], raw);
    check(fabs(result.alignment[1] / rotated - 1.0) < 0.5, "rotated %g, by differences %g", result.alignment[1],
          rotated);
    free(params);
    free(grads);
    free(h.H);
    mesh_run_close(h.run);
}

// How updates swing is told of the weights that there are, of all stages of an asynchronous pipeline, along the
// directions of the measurement before. Must fail for: older versions measured, a step that is not watched, directions
// of now.
static void test_alignment_swing(void) {
    enum { EVERY = 5 };
    write_corpus();
    Hessian h = {mesh_run_open("--init d=8,layers=3,heads=2,kv=1,ffn=12,vocab=258,ctx=16 -d @/corpus.jsonl -b 4 -t 16 "
                               "-l 3e-2 --precision fp32 --wire fp32 --threads 1 -y 3 -x 1 --optimizer rotate -n 40 "
                               "--schedule async --measure-alignment 5"),
                 3 * (8 * 8 * 2 + 2 * 4 * 8 + 3 * 8 * 12), NULL};
    Trainer *trainer = &h.run->trainer;
    Leading *leading = &trainer->leading;
    const StepResult *result = &h.run->result;
    int64_t n = model_floats(mesh_model(&trainer->mesh, 0));
    double *weights = (double *)malloc(sizeof(double) * (size_t)h.n), *along = (double *)malloc(sizeof(double) * h.n);
    Oscillation ours;
    for (int step = 0; step < 2 * EVERY + 1; step++) {
        double coordinates[2][LEADING] = {{0.0}};
        float *params = (float *)malloc(sizeof(float) * (size_t)n), *at = params;
        for (Stage *stage = mesh_model(&trainer->mesh, 0); stage != NULL;
             at += stage->arena_floats, stage = stage->next)
            memcpy(at, stage->params, sizeof(float) * (size_t)stage->arena_floats);
        mesh_run_step(h.run);
        if (step % EVERY == 0) {
            check((result->swing.signs > 0) == (step > 0), "step %d: %lld signs", step, (long long)result->swing.signs);
            if (step > 0)
                check(ours.seen == EVERY + 1 && result->swing.seen == EVERY + 1 &&
                          fabs(oscillation_travel(&ours) - oscillation_travel(&result->swing)) < 1e-3 &&
                          fabs(oscillation_cosine(&ours) - oscillation_cosine(&result->swing)) < 1e-3,
                      "step %d: cosine %g, travel %g; ours %g, %g", step, oscillation_cosine(&result->swing),
                      oscillation_travel(&result->swing), oscillation_cosine(&ours), oscillation_travel(&ours));
            memset(&ours, 0, sizeof ours);
        }
        for (int side = step % EVERY == 0 ? 0 : 1; side < 2; side++) { // before the update, after it
            if (side == 1) {
                at = params;
                for (Stage *stage = mesh_model(&trainer->mesh, 0); stage != NULL;
                     at += stage->arena_floats, stage = stage->next)
                    memcpy(at, stage->params, sizeof(float) * (size_t)stage->arena_floats);
            }
            hessian_blocks(&h, params, 0, weights);
            for (int k = 0; k < LEADING; k++) {
                hessian_blocks(&h, leading->directions + k * n, 1, along);
                for (int i = 0; i < h.n; i++) coordinates[side][k] += weights[i] * along[i];
            }
            oscillation_add(&ours, coordinates[side], LEADING);
        }
        free(params);
    }
    StepResult now, flushed; // the same as of a pipeline that no stage of runs ahead
    memset(&now, 0, sizeof now), memset(&flushed, 0, sizeof flushed);
    check(measure_alignment(trainer, h.run->batches, &now) == 0, "%s", error_message);
    trainer->mesh.asynchronous = 0;
    check(measure_alignment(trainer, h.run->batches, &flushed) == 0, "%s", error_message);
    trainer->mesh.asynchronous = 1;
    check(now.alignment[0] > 0.0 && memcmp(now.alignment, flushed.alignment, sizeof now.alignment) == 0,
          "asynchronous %g, synchronous %g", now.alignment[0], flushed.alignment[0]);
    free(weights);
    free(along);
    mesh_run_close(h.run);
}
#endif

// Whole runs with every optimizer: other weights than AdamW's, and resumed the same bits, the state with them; bases
// of no side are AdamW; and what cannot be is refused. Must fail for: bases, delta or their flag forgotten by a
// checkpoint, a default of beta1 that a resumed run takes anew.
static void test_optimizer_runs(void) {
    enum { CASES = 9 };
    static const struct {
        const char *words, *says;
    } cases[CASES] = {
        {"--optimizer adamw", "AdamW moments"},
        {"--optimizer rotate --rotate-every 3 -y 3 --refresh stage-aware", "bases (2nd, bi) refreshed"},
        {"--optimizer rotate --rotate-every 2 -y 3 --refresh reversed --rotate-geometry uni", "(2nd, uni)"},
        {"--optimizer rotate --rotate-every 3 --rotate-source 1st -x 2 -y 2 --local-steps 4", "(1st, bi)"},
        {"--optimizer rotate --rotate-source 1st --rotate-geometry uni --rotate-max-dim 24", "up to 24"},
        {"--optimizer nesterov --beta1 0.95", "optimizer nesterov"},
        {"--optimizer pipemare -y 2", "optimizer pipemare"},
        {"--optimizer muon -y 2", "optimizer muon"},
        {"--optimizer pipedream-lr -y 2", "optimizer pipedream-lr"}};
    char command[1024], whole[64], parts[64], path[128];
    write_corpus();
    for (int i = 0; i < CASES; i++) {
        snprintf(whole, sizeof whole, "o%d", i);
        snprintf(parts, sizeof parts, "p%d", i);
        snprintf(command, sizeof command, DEEP "-n 8 %s -o @/%s", cases[i].words, whole);
        check_run(0, NULL, command, cases[i].says);
        check(strstr(run_output, "done: 8 steps") != NULL, "%s:\n%s", cases[i].words, run_output);
        snprintf(command, sizeof command, DEEP "-n 8 %s -o @/%s --stop-after 5", cases[i].words, parts);
        check_run(0, NULL, command, "--resume");
        snprintf(command, sizeof command, "-o @/%s --resume", parts);
        check_run(0, NULL, command, "done: 8 steps");
        check_same_latest(whole, parts, model_files, 1, cases[i].words);
        snprintf(path, sizeof path, "%s/latest/model.bin", whole);
        check(i == 0 || !same_file(path, "o0/latest/model.bin"), "%s: AdamW's weights", cases[i].words);
    }
    SafeTensors state;
    int64_t n = 0;
    if (check(safetensors_open(&state, scratch_path("o6/latest/cell_0_1.bin")) == 0, "%s", error_message)) {
        float *delta = dump_values(&state, "delta.", "model.layers.5.mlp.up_proj.weight", &n);
        check(n == 24 * 40 && delta[0] != 0.0f && delta[n - 1] != 0.0f, "PipeMare's delta");
        free(delta);
        safetensors_close(&state);
    }
    check_run(0, NULL, DEEP "-n 4 --optimizer rotate --precision fp32 --measure-alignment 2 -o @/aligned", "done: 4");
    char *log = read_text("aligned/log.jsonl");
    check(strstr(log, "\"hessian_sizes\":{\"raw\":") != NULL && strstr(log, "\"rotated\":null}") != NULL, "%s", log);
    free(log);
    check_run(0, NULL,
              DEEP "-n 6 -y 3 --schedule async --micro-batch 5 --wire fp32 --optimizer rotate --precision fp32 "
                   "--measure-alignment 3 -o @/swings",
              "done: 6");
    check_run(0, NULL,
              DEEP "-n 6 -y 3 --schedule async --micro-batch 5 --wire fp32 --optimizer rotate --precision fp32 "
                   "-o @/unwatched",
              "done: 6");
    check_same_run("swings", "unwatched");
    log = read_text("swings/log.jsonl");
    check(strstr(log, "\"oscillation\":{\"flips\":") != NULL, "%s", log);
    free(log);
    check_run(1, NULL, DEEP "-n 2 -y 2 --measure-alignment 1 --precision fp32 -o @/refused", "give --wire fp32");
    if (device_has_bf16())
        check_run(1, NULL, DEEP "-n 2 --measure-alignment 1 --precision bf16 -o @/refused", "give --precision fp32");
    check_run(0, NULL, DEEP "-n 8 --optimizer rotate --rotate-max-dim 5 -o @/unrotated", "done: 8 steps");
    check_same_run("unrotated", "o0");
    check_run(0, NULL, DEEP "-n 8 --optimizer adamw --beta1 0.99 -o @/slow", "done: 8 steps");
    check(!same_file("slow/latest/model.bin", "o0/latest/model.bin"), "beta1 does nothing");
    check_run(1, NULL, DEEP "-n 2 --rotate-every 5 -o @/refused", "--rotate-every has no effect: nothing is rotated");
    check_run(1, NULL, DEEP "-n 2 --optimizer muon --refresh uniform -o @/refused", "--refresh has no effect");
    check_run(1, NULL, DEEP "-n 2 --optimizer rotate --refresh reversed -o @/refused", "give -y 2");
    check_run(1, NULL, DEEP "-n 2 --optimizer adam -o @/refused", "adamw|rotate");
    check_run(1, NULL, DEEP "-n 2 --optimizer rotate --rotate-every 0 -o @/refused", "--rotate-every");
    check_run(1, NULL, "-o @/p1 --resume --optimizer adamw", "--optimizer differs from the run's");
    check_run(1, NULL, "-o @/p1 --resume --rotate-source 1st", "--rotate-source differs from the run's");
}

#ifndef DEVICE_CUDA // sees the host's allocations
// Bytes of tensors' memory as it was asked for.
static int64_t allocated(const void *memory) {
    return memory == NULL
               ? 0
               : (int64_t)(*(const size_t *)(const void *)((const char *)memory - DEVICE_ALIGN) - DEVICE_ALIGN);
}

// What an optimizer keeps and passes through is what the plan has counted. Must fail for: bases or delta not counted, a
// scratch of the first matrix instead of the largest.
static void test_optimizer_memory(void) {
    Config config;
    check(config_from_spec(&config, "d=24,layers=2,heads=4,kv=2,ffn=40,vocab=58,ctx=64") == 0, "%s", error_message);
    static const OptimizerKind kinds[] = {OPTIMIZER_ROTATE,   OPTIMIZER_ROTATE,   OPTIMIZER_ROTATE, OPTIMIZER_ROTATE,
                                          OPTIMIZER_PIPEMARE, OPTIMIZER_NESTEROV, OPTIMIZER_MUON,   OPTIMIZER_ADAMW};
    for (int way = 0; way < 8; way++) {
        Stage stage;
        AdamW adam = {0.9f, 0.999f, 1e-8f};
        Stream *stream = test_stream(PRECISION_FP32, 2);
        Optimizer optimizer = {kinds[way], (RotateSource)(way % 2), (RotateGeometry)(way / 2 % 2), REFRESH_UNIFORM,
                               2,          way == 3 ? 30 : 4096};
        int64_t largest = 0;
        check(stage_table(&stage, &config, 0, 2) == 0, "%s", error_message);
        stage.optimizer = optimizer;
        check(stage_plan(&stage, 2, 8, 1, 0) == 0 && stage_alloc(&stage, stream) == 0, "%s", error_message);
        for (int64_t i = 0; i < stage.arena_floats; i++) stage.grads[i] = 1e-3f * (float)(i % 37 - 18);
        for (int step = 1; step <= 3; step++) stage_update(&stage, adam, 1e-3f, 0.1f, 1.0, 1.0f, step, stream);
        check(stream_check(stream) == 0, "%s", error_message);
        for (int i = 0; i < stage.n_tensors; i++) largest = larger(largest, optimizer_scratch_floats(&stage, i));
        StageBytes plan = stage_bytes(&stage, PRECISION_FP32, 2);
        int64_t kept = allocated(stage.m) + allocated(stage.v) + allocated(stage.delta) + allocated(stage.rotation);
        check(plan.moments == kept, "way %d: %lld bytes planned, %lld kept", way, (long long)plan.moments,
              (long long)kept);
        check((int64_t)stream->scratch[SCRATCH_STEP].n_bytes == 4 * largest, "way %d: %zu bytes of scratch, not %lld",
              way, stream->scratch[SCRATCH_STEP].n_bytes, (long long)(4 * largest));
        stage.optimizer.kind = OPTIMIZER_ADAMW;
        StageBytes plain = stage_bytes(&stage, PRECISION_FP32, 2);
        check(plan.scratch == plain.scratch + 4 * largest, "way %d: scratch planned", way);
        stage_free(&stage);
        stream_destroy(stream);
    }
}

static int64_t allocated_moments(const KltMoments *moments) {
    return allocated(moments->xx) + allocated(moments->sample);
}

static void check_bytes(int64_t planned, int64_t taken, const char *what) {
    check(planned == taken, "%s: %lld bytes planned, %lld taken", what, (long long)planned, (long long)taken);
}

// Memory that the plan says klt takes, against what is allocated: exact for what is the plan's to say, at least as much
// where it is the anchor's how many components a table has, and within 5% in all.
static void klt_plan_against_run(const char *words) {
    MeshRun *run = mesh_run_open(words);
    Trainer *trainer = &run->trainer;
    Learner *learner = &trainer->anchor.learner;
    KltFit fit;
    int K[2] = {0, 0}, n_tables = 2 * learner->n_boundaries;
    mesh_run_step(run);
    anchor_state(&trainer->anchor, 1);
    KltShape shape = klt_shape(trainer);
    const KltPlace *place = &trainer->mesh.klt[0];
    int64_t tables = 0, moments = 0, blobs = 0, most_tables = 0, planned_moments = 0;
    for (int i = 0; i < n_tables; i++) {
        KltHeader estimated = klt_estimate_head(&shape, i % 2, place->tables[i].head.K);
        KltHeader most = klt_estimate_head(&shape, i % 2, shape.H);
        check_bytes(klt_memory_table(&estimated).device, allocated(place->tables[i].memory), "a table");
        check_bytes(klt_table_bytes(&estimated), place->tables[i].n_bytes, "a table's bytes");
        tables += allocated(place->tables[i].memory), most_tables += klt_memory_table(&most).device;
        moments += allocated_moments(&learner->moments[i]), blobs += place->tables[i].n_bytes;
        planned_moments += klt_memory_moments(shape.H, shape.V > 0 && i % 2 == CODEC_FORWARD, LEARNER_ROWS).device;
        if (place->tables[i].head.K > K[i % 2]) K[i % 2] = place->tables[i].head.K;
    }
    KltMemory work = klt_memory_work(&shape, K[0], K[1]),
              cells = klt_memory_cells(&shape, shape.H, learner->n_boundaries);
    check_bytes(work.device, (int64_t)(place->work.wide.n_bytes + place->work.device.n_bytes), "scratch of messages");
    if (place->own == NULL) check_bytes(work.host, (int64_t)place->work.host_bytes, "the host's part of messages");
    check_bytes(planned_moments, moments, "moments");
    check_bytes(4 * (int64_t)shape.V * shape.H, allocated(place->embed), "the frozen embedding");
    check_bytes(cells.device,
                most_tables + 4 * (int64_t)shape.V * shape.H + klt_memory_work(&shape, shape.H, shape.H).device,
                "the cells' part");
    check(tables <= most_tables, "tables take %lld bytes, planned %lld", (long long)tables, (long long)most_tables);
    check(klt_fit_alloc(&fit, shape.H) == 0, "%s", error_message);
    int64_t anchor = moments + allocated_moments(&learner->embedding) + allocated(learner->e) +
                     (int64_t)learner->work.device.n_bytes + allocated(fit.device);
    klt_fit_free(&fit);
    anchor += 4 * (3 * (int64_t)shape.H * shape.H + 7 * (int64_t)shape.H); // eigenvectors
    check_bytes(klt_memory_anchor(&shape, learner->n_boundaries).device, anchor, "the anchor's part");
    MeshBytes all = mesh_bytes(trainer);
    check_within((double)(all.codec + klt_memory_anchor(&shape, learner->n_boundaries).device),
                 (double)(anchor + tables + allocated(place->embed) + (int64_t)place->work.device.n_bytes), 0.05,
                 words);
    check(all.host > trainer->mesh.message_bytes + work.host + blobs, "the host's part: %lld", (long long)all.host);
    if (place->own != NULL) {
        int n_cells = trainer->mesh.n_replicas * trainer->mesh.n_stages;
        KltMemory overlap = klt_memory_overlap(&shape, n_cells, trainer->mesh.message_bytes);
        int64_t device = 0, host = 3 * n_cells * trainer->mesh.message_bytes;
        for (int i = 0; i < n_cells; i++) {
            const Cell *cell = &trainer->mesh.cells[i];
            device += (int64_t)place->own[i].device.n_bytes, host += (int64_t)place->own[i].host_bytes;
            for (int d = 0; d < 2; d++) host += (int64_t)cell->incoming[d].work.host_bytes;
        }
        check(device > 0 && device <= overlap.device, "messages that are coded: %lld bytes of %lld planned",
              (long long)device, (long long)overlap.device);
        check(host > overlap.host / 3 && host <= overlap.host, "the host's part of them: %lld bytes of %lld planned",
              (long long)host, (long long)overlap.host);
        all.codec -= overlap.device;
    }
    mesh_run_close(run);
}

// Must fail for: the frozen embedding, the cross moments or the scratch left out; caches of aqsgd that do not count.
static void test_codec_memory(void) {
    write_corpus();
    klt_plan_against_run(DEEP "-n 100 --codec klt -p 0.8 -x 2 -y 3 -b 70 --micro-batch 2");
    klt_plan_against_run(DEEP "-n 100 --codec klt -p 0.8 -x 2 -y 2 -b 70 --klt-predict 0 --codec-coding fixed");
    klt_plan_against_run(DEEP "-n 100 --codec klt -p 0.8 -x 2 -y 3 -b 70 --micro-batch 2 --coder thread");
    MeshRun *run = mesh_run_open(DEEP "-n 100 --codec aqsgd -x 1 -y 3");
    Trainer *trainer = &run->trainer;
    MeshBytes bytes = mesh_bytes(trainer);
    int64_t windows = trainer->data.train.n_windows, caches = 4 * windows * (2 * 16 * 24 + 1);
    check_bytes(bytes.host, trainer->mesh.message_bytes + caches, "messages and caches");
    check(mesh_fits(trainer) == 0, "%s", error_message);
    trainer->data.train.n_windows = device_memory() / (4 * 2 * 16 * 24); // caches that leave room for nothing else
    check_error(mesh_fits(trainer), "codec", "caches as large as the memory");
    trainer->data.train.n_windows = windows;
    mesh_run_close(run);
}

// One cell's gradient is not finite: it alone keeps its weights and moments, and its next update is the one that it
// would have made, by its own number. Must fail for: all cells that skip, bias corrections by the steps done.
static void async_skip_case(void) {
    enum { POISONED = 1, STEPS = 4 };
    MeshRun *run = mesh_run_open(DEEP ASYNC "-y 3 --precision fp32");
    Trainer *trainer = &run->trainer;
    Stage *stage = &mesh_cell(&trainer->mesh, 0, POISONED)->stage, *other = &mesh_cell(&trainer->mesh, 0, 0)->stage;
    size_t n_bytes = sizeof(float) * (size_t)stage->arena_floats;
    float *arenas[3] = {stage->params, stage->m, stage->v}, *kept[3], *expected[3];
    StepResult result;
    for (int step = 0; step < STEPS; step++) mesh_run_step(run);
    for (int k = 0; k < 3; k++) {
        kept[k] = (float *)malloc(n_bytes), expected[k] = (float *)malloc(n_bytes);
        memcpy(kept[k], arenas[k], n_bytes);
    }
    float first = other->params[0], grad = stage->grads[7];
    other->grads[0] = 1.0f; // of a token that the batch may lack
    memset(&result, 0, sizeof result);
    result.lr = 1e-2f;
    stage->grads[7] = NAN;
    measure_cells(trainer, &result);
    update_cells(trainer, &result);
    trainer->progress.step++;
    check(result.skipped == 1 && !isfinite(result.grad_norm), "%d cells skipped", result.skipped);
    for (int k = 0; k < 3; k++) check(memcmp(kept[k], arenas[k], n_bytes) == 0, "arena %d of the cell changed", k);
    check(other->params[0] != first && isfinite(other->params[0]), "the others skipped too");
    stage->grads[7] = grad;
    AdamW adam = {0.9f, trainer->opts.beta2, trainer->opts.adam_eps};
    stage_update(stage, adam, 1e-2f, trainer->opts.wd, stage_grad_norm(stage, trainer->stream), trainer->opts.clip,
                 STEPS + 1, trainer->stream);
    for (int k = 0; k < 3; k++) memcpy(expected[k], arenas[k], n_bytes), memcpy(arenas[k], kept[k], n_bytes);
    memset(&result, 0, sizeof result);
    result.lr = 1e-2f;
    measure_cells(trainer, &result);
    update_cells(trainer, &result);
    check(result.skipped == 0 && trainer->progress.adam_steps == STEPS + 1, "%lld whole steps",
          (long long)trainer->progress.adam_steps);
    for (int k = 0; k < 3; k++) {
        check(memcmp(expected[k], arenas[k], n_bytes) == 0, "arena %d: another update after the skipped one", k);
        free(kept[k]);
        free(expected[k]);
    }
    mesh_run_close(run);
}

// Saves DEEP's model, in layer 3 of which the backward overflows and nothing else does: up_proj gives zeros, and its
// own gradient is the product of a norm of 1e10 and what comes back through a down_proj of 1e36.
static void write_overflow(void) {
    Stage stage;
    Config config;
    Stream *stream = test_stream(PRECISION_FP32, 1);
    check(config_from_spec(&config, "d=24,layers=6,heads=4,kv=2,ffn=40,vocab=258,ctx=64") == 0 &&
              stage_table(&stage, &config, 0, config.n_layers) == 0 && stage_plan(&stage, 1, 1, 0, 0) == 0 &&
              stage_alloc(&stage, stream) == 0,
          "%s", error_message);
    stage_init(&stage, 1);
    LayerTensors *layer = &stage.p.layers[3];
    int C = config.channels, F = config.ffn;
    for (int i = 0; i < C; i++) layer->ffn_norm[i] = 1e10f;
    for (int i = 0; i < F * C; i++) {
        layer->gate_up[i] *= 1e-10f, layer->gate_up[F * C + i] = 0.0f;
        layer->down[i] *= 1e38f;
    }
    json_t *side = tokenizer_byte_files();
    check(model_save_native(&stage, ARENA_PARAMS, side, scratch_path("overflow.bin"), DTYPE_F32) == 0, "%s",
          error_message);
    json_decref(side);
    stage_free(&stage);
    stream_destroy(stream);
}

// 1 if a layer's q_proj is the same in two models.
static int same_layer(const char *a, const char *b, int layer) {
    const char *const paths[] = {a, b};
    float *values[2];
    int64_t n = 0;
    char name[64];
    snprintf(name, sizeof name, "model.layers.%d.self_attn.q_proj.weight", layer);
    for (int i = 0; i < 2; i++) {
        SafeTensors file;
        if (!check(safetensors_open(&file, scratch_path(paths[i])) == 0, "%s", error_message)) exit(1);
        values[i] = dump_values(&file, "", name, &n);
        safetensors_close(&file);
    }
    int same = memcmp(values[0], values[1], sizeof(float) * (size_t)n) == 0;
    free(values[0]);
    free(values[1]);
    return same;
}

#define OVERFLOW "-m @/overflow.bin -d @/corpus.jsonl -b 5 -t 16 -l 1e-2 --threads 2 --val-tokens 300 --wire fp32 -y 3 "

// Gradients that are not finite in one stage of an asynchronous pipeline: it alone stands still, in every replica that
// averages with it, resumed or not with the same bits; after 20 steps the run stops and says which. A synchronous one
// leaves out all updates. Must fail for: bases or update numbers that a resumed run takes from the whole steps.
static void test_async_skips(void) {
    write_corpus();
    async_skip_case();
    write_overflow();
    check_run(0, NULL, OVERFLOW "--schedule async --optimizer rotate -n 12 -o @/over", "in 1 of 3 cells");
    check_run(0, NULL, OVERFLOW "--schedule async --optimizer rotate -n 12 -o @/over_parts --stop-after 5", "--resume");
    check_run(0, NULL, "-o @/over_parts --resume --threads 1", "done: 12 steps");
    check_same_latest("over", "over_parts", model_files, 1, "a stage that skips");
    check(same_layer("overflow.bin", "over/latest/model.bin", 3) &&
              !same_layer("overflow.bin", "over/latest/model.bin", 0) &&
              !same_layer("overflow.bin", "over/latest/model.bin", 5),
          "another stage than the second stood still");
    json_t *steps = logged_steps("over"), *expected = json_pack("[i]", 1);
    check(json_array_size(steps) == 12, "%zu steps", json_array_size(steps));
    for (size_t i = 0; i < json_array_size(steps); i++)
        check(json_equal(json_object_get(json_array_get(steps, i), "skipped"), expected), "step %zu: skipped", i + 1);
    json_decref(steps);
    json_decref(expected);
    check_run(1, NULL, OVERFLOW "--schedule async -n 60 -o @/over_long",
              "train: replica 0 stage 1: 20 steps in a row gave no finite gradient; stopped, step 20 is whole");
    check_run(1, NULL, OVERFLOW "-n 60 -o @/over_sync", "train: 20 steps in a row gave no finite gradient; stopped");
    check(same_layer("overflow.bin", "over_sync/latest/model.bin", 1), "a synchronous step of a part");
    MeshRun *run = mesh_run_open(OVERFLOW "--schedule async -n 60 -x 2 --dp dense -o @/over_dense");
    int64_t n;
    for (int step = 0; step < 4; step++) mesh_run_step(run);
    check(run->result.skipped == 2, "%d cells skipped", run->result.skipped);
    float *a = replica_values(run, 0, ARENA_PARAMS, &n), *b = replica_values(run, 1, ARENA_PARAMS, &n);
    check(memcmp(a, b, sizeof(float) * (size_t)n) == 0, "replicas that average every gradient drift apart");
    free(a);
    free(b);
    mesh_run_close(run);
}

// The versions' memory is what the plan says, and the optimizer's as ever.
static void test_async_memory(void) {
    write_corpus();
    MeshRun *run = mesh_run_open(DEEP ASYNC "-x 2 -y 4 --dp none");
    const Trainer *trainer = &run->trainer;
    MeshBytes bytes = mesh_bytes(trainer);
    int64_t versions = 0, params = 0;
    for (int i = 0; i < 8; i++) {
        const Stage *stage = &trainer->mesh.cells[i].stage;
        StageBytes plan = stage_bytes(stage, trainer->precision, trainer->threads);
        check(stage->delay == 3 - i % 4, "stage %d has delay %d", i % 4, stage->delay);
        check_bytes(plan.versions, allocated(stage->versions), "a stage's versions");
        check_bytes(plan.versions, stage->delay * allocated(stage->params), "versions of its parameters");
        versions += allocated(stage->versions), params += allocated(stage->params);
    }
    check_bytes(bytes.cells.versions, versions, "all versions");
    check_bytes(bytes.cells.params, params, "all parameters");
    MeshPlan plan = estimate_plan(trainer);
    MeshEstimate estimate;
    double estimated = 0.0, others = 0.0;
    if (check(mesh_estimate(&estimate, &plan) == 0, "%s", error_message))
        for (int s = 0; s < 4; s++) estimated += 2.0 * estimate.cells[s].version_bytes;
    check_within(estimated, (double)versions, 0.02, "estimated versions"); // without alignment
    double acts = estimate.cells[0].act_bytes, memory = estimate.cells[0].memory_bytes;
    mesh_estimate_free(&estimate);
    plan.stash = 0;
    if (check(mesh_estimate(&estimate, &plan) == 0, "%s", error_message)) others = estimate.cells[0].version_bytes;
    check(others == 0.0 && estimate.cells[0].act_bytes == acts && estimate.cells[0].memory_bytes < memory,
          "versions without stashing: %g", others);
    mesh_estimate_free(&estimate);
    plan.asynchronous = 0;
    check(mesh_estimate(&estimate, &plan) == 0 && estimate.cells[0].act_bytes < acts, "activations of one flight");
    mesh_estimate_free(&estimate);
    plan.asynchronous = 1, plan.micro_batch = 1;
    check_plan_refused(&plan, "a step is one micro-batch");
    mesh_run_close(run);
}
#endif

// Which versions a stage sees, by hand for four stages; and the ring against the list of all weights there were: one
// weight, a linear gradient, w_t = w_{t-1} - lr*g(w_{max(0, t-1-delay)}). Must fail for: a delay of one more or less, a
// version that is overwritten too early.
static void test_versions(void) {
    static const int forward[8][4] = {{0, 0, 0, 0}, {0, 0, 0, 1}, {0, 0, 1, 2}, {0, 1, 2, 3},
                                      {1, 2, 3, 4}, {2, 3, 4, 5}, {3, 4, 5, 6}, {4, 5, 6, 7}};
    for (int done = 0; done < 8; done++) {
        for (int s = 0; s < 4; s++) {
            int delay = versions_delay(s, 4);
            int64_t seen = versions_forward(delay, done);
            check(seen == forward[done][s], "micro-batch %d, stage %d: version %lld", done + 1, s, (long long)seen);
            check(versions_backward(delay, done, 1) == seen && versions_backward(delay, done, 0) == done,
                  "micro-batch %d, stage %d: backward", done + 1, s);
            check(versions_held(delay, done) == (done < delay ? done : delay), "held");
            check(seen >= done - versions_held(delay, done), "version %lld is not held", (long long)seen);
        }
    }
    for (int delay = 0; delay < 6; delay++) {
        float older[6], known[41] = {1.5f}, weight = 1.5f;
        for (int i = 0; i < 6; i++) older[i] = NAN;
        for (int t = 1; t <= 40; t++) {
            int64_t done = t - 1;
            int slot = versions_slot(delay, done, versions_forward(delay, done));
            float gradient = 0.7f * (slot < 0 ? weight : older[slot]) - 0.2f;
            if (delay > 0) older[versions_next_slot(delay, done)] = weight;
            weight -= 0.125f * gradient;
            float seen = known[t - 1 - delay > 0 ? t - 1 - delay : 0], expected = 0.7f * seen - 0.2f;
            known[t] = known[t - 1] - 0.125f * expected;
            check(weight == known[t], "delay %d: %g after %d updates, expected %g", delay, (double)weight, t,
                  (double)known[t]);
            for (int age = 1; age <= versions_held(delay, t); age++)
                check(older[versions_slot(delay, t, t - age)] == known[t - age], "delay %d: version %d", delay,
                      t - age);
        }
    }
}

// Simulated seconds of one synchronous step of M micro-batches through P equal stages.
static double sync_seconds(int P, int M, double F, double B) {
    enum { MOST = 32 };
    Work work[MOST][2 * MOST];
    double now[MOST] = {0}, forward[MOST + 1][MOST] = {{0}}, backward[MOST + 1][MOST] = {{0}}, last = 0.0;
    int next[MOST] = {0}, done[MOST][2] = {{0}}, left = 2 * P * M;
    for (int s = 0; s < P; s++) schedule_1f1b(work[s], s, P, M);
    while (left > 0) {
        for (int s = 0; s < P; s++) {
            Work w = work[s][next[s] < 2 * M ? next[s] : 0];
            int is_forward = w.kind == WORK_FORWARD, m = w.micro_batch;
            if (next[s] == 2 * M) continue;
            if (is_forward ? s > 0 && done[s - 1][0] <= m : s < P - 1 && done[s + 1][1] <= m) continue;
            double input = is_forward ? (s > 0 ? forward[s - 1][m] : 0.0) : s < P - 1 ? backward[s + 1][m] : 0.0;
            now[s] = fmax(now[s], input) + (is_forward ? F : B);
            (is_forward ? forward : backward)[s][m] = now[s];
            done[s][!is_forward]++, next[s]++, left--;
            last = fmax(last, now[s]);
        }
    }
    return last;
}

// n micro-batches through P equal stages: when the last stage is through, or with drain all are. The seconds
// are exact in binary.
static double async_seconds(int P, int n, double F, double B, LinkSpeed speed, int64_t n_bytes, int drain) {
    Flow flows[32];
    Clock clocks[32];
    double last = 0.0;
    memset(clocks, 0, sizeof clocks);
    for (int s = 0; s < P; s++) check(flow_init(&flows[s], versions_delay(s, P), P) == 0, "%s", error_message);
    for (int t = 1; t <= n; t++) {
        int work = 1;
        for (int s = 0; s < P; s++) {
            Flight *now = flow_now(&flows[s]);
            now->seconds[FLOW_FORWARD] = F, now->seconds[FLOW_BACKWARD] = B - 0.25, now->seconds[FLOW_UPDATE] = 0.25;
            now->bytes[0] = s < P - 1 ? n_bytes : 0, now->bytes[1] = s > 0 ? n_bytes : 0;
            flow_record(&flows[s]);
        }
        while (work > 0) {
            work = 0;
            for (int s = 0; s < P; s++)
                work += flow_advance(&flows[s], &clocks[s], s > 0 ? &flows[s - 1] : NULL,
                                     s < P - 1 ? &flows[s + 1] : NULL, speed, drain && t == n);
        }
        for (int s = 0; s < P && !(drain && t == n); s++) {
            int expected = t > flows[s].delay ? t - flows[s].delay : 0;
            check(flows[s].forwards == t && flows[s].backwards == expected,
                  "%d stages, micro-batch %d: stage %d has %lld", P, t, s, (long long)flows[s].backwards);
        }
    }
    for (int s = 0; s < P; s++) {
        last = fmax(last, clocks[s].now);
        if (drain) check(flows[s].backwards == n, "%d stages: drained to %lld", P, (long long)flows[s].backwards);
        flow_free(&flows[s]);
    }
    return last;
}

// Simulated time of equal stages by formula, against a synchronous step's of as many micro-batches as there are stages;
// what messages and latency cost. Must fail for: a flush, one micro-batch in flight more or less, updates that hold
// back the message before them.
static void test_flow(void) {
    LinkSpeed instant = {0.0, 0.0}, slow = {64.0, 0.5};
    for (int P = 1; P <= 32; P *= 2) {
        int n = 4 * P + 3;
        double F = 1.0, B = 2.0, async = async_seconds(P, n, F, B, instant, 1000, 0);
        check(async == (P - 1) * F + n * (F + B), "%d stages, %d micro-batches: %g s", P, n, async);
        double sync = sync_seconds(P, P, F, B);
        check(sync == (2 * P - 1) * (F + B), "synchronous: %d stages, %g s", P, sync);
        double rate = (async_seconds(P, 2 * n, F, B, instant, 0, 0) - async) / n;
        check(rate == F + B && sync / P == rate * (2.0 - 1.0 / P), "%d stages: %g s a micro-batch, synchronous %g", P,
              rate, sync / P);
        double drained = async_seconds(P, n, F, B, instant, 0, 1);
        check(drained == async + (P - 1) * (B - 0.25), "%d stages: drained after %g s, not drained %g s", P, drained,
              async);
        // messages of a second and half a second of latency; all updates but one's fall into the wait for answers
        double far = (async_seconds(P, 12 * P, F, B, slow, 64, 0) - async_seconds(P, 8 * P, F, B, slow, 64, 0)) / 4.0;
        double round = P * (F + B - 0.25) + 0.25 + 2.0 * 1.5 * (P - 1);
        check(far == round, "%d stages: %g s for as many micro-batches, expected %g", P, far, round);
    }
}

// A run's micro-batches come in the time of the slowest stage's forward and backward, where synchronous steps of one
// micro-batch take all stages' time; estimates say the same, and bound what messages cost.
static void test_async_clock(void) {
    static const int stages[] = {2, 3, 6};
    char words[512];
    write_corpus();
    for (int i = 0; i < 3; i++) {
        int P = stages[i];
        double flops = 0.0, all = 0.0, at[4], far;
        snprintf(words, sizeof words, DEEP ASYNC QUIET "-b 2 --micro-batch 2 -y %d --device-tflops 2e-6", P);
        MeshRun *run = mesh_run_open(words);
        Mesh *mesh = &run->trainer.mesh;
        for (int s = 0; s < P; s++) {
            double stage = 3.0 * stage_flops(&mesh_cell(mesh, 0, s)->stage, 32, 16);
            flops = fmax(flops, stage), all += stage;
        }
        for (int step = 0; step < 2 * P; step++) mesh_run_step(run);
        double before = mesh_now(mesh);
        for (int step = 0; step < 4; step++) mesh_run_step(run);
        check_within((mesh_now(mesh) - before) / 4.0, flops / 2e6, 1e-7, words);
        MeshPlan plan = estimate_plan(&run->trainer);
        MeshEstimate estimate;
        plan.link_mbps = 1e9;
        if (check(mesh_estimate(&estimate, &plan) == 0, "%s", error_message))
            check_within(estimate.step_s, flops / 2e6, 0.02, "estimated step");
        mesh_estimate_free(&estimate);
        mesh_run_close(run);
        snprintf(words, sizeof words, DEEP QUIET "-b 2 --micro-batch 2 -y %d --device-tflops 2e-6", P);
        run = mesh_run_open(words);
        for (int step = 0; step < 2; step++) mesh_run_step(run), at[step] = mesh_now(&run->trainer.mesh);
        check_within(at[1] - at[0], all / 2e6, 1e-7, "a synchronous step of one micro-batch");
        mesh_run_close(run);
        // Messages of 32 tokens of 24 values of 4 bytes, and 1 s of latency: the first stage waits for the answers to P
        // micro-batches. The estimate takes the slowest stage for all.
        snprintf(words, sizeof words,
                 DEEP ASYNC QUIET "-b 2 --micro-batch 2 -y %d --device-tflops 2e-6 --link-ms 1000 --link-mbps 1", P);
        run = mesh_run_open(words);
        mesh = &run->trainer.mesh;
        for (int step = 0; step < 4; step++) {
            for (int k = 0; k < P; k++) mesh_run_step(run);
            at[step] = mesh_now(mesh);
        }
        far = (at[3] - at[1]) / (2.0 * P);
        check_within(far, (all / 2e6 + 2.0 * (P - 1) * (1.0 + 32 * 24 * 4 / 125e3)) / P, 1e-7, "far away stages");
        plan = estimate_plan(&run->trainer);
        if (check(mesh_estimate(&estimate, &plan) == 0, "%s", error_message))
            check(far <= estimate.step_s && far >= 0.75 * estimate.step_s, "%d stages: %g s, estimated %g", P, far,
                  estimate.step_s);
        mesh_estimate_free(&estimate);
        mesh_run_close(run);
    }
}

// Simulated seconds of a step once pipelines are full: the last of so many steps, or their mean where they overlap.
static double simulated_step(const char *words, int steps, int overlap, MeshPlan *plan) {
    MeshRun *run = mesh_run_open(words);
    double before = 0.0;
    for (int step = 0; step < 2 * steps; step++) {
        if (step == (overlap ? steps : 2 * steps - 1)) before = mesh_now(&run->trainer.mesh);
        mesh_run_step(run);
    }
    double took = mesh_now(&run->trainer.mesh) - before;
    *plan = estimate_plan(&run->trainer);
    mesh_run_close(run);
    return overlap ? took / steps : took;
}

// What the plan says of both schedules, against runs' simulated clocks: steps of 8 micro-batches, and of one; with
// messages that take half a second, and with none. Estimates take the slowest stage for all, at the pipeline's end.
// Must fail for: messages of a synchronous step hidden, a bubble of the slowest stage for all, a step of other tokens.
static void test_schedule_estimate(void) {
    static const char *const links[] = {"", "--link-mbps 1 --link-ms 500"};
    static const int stages[] = {2, 3, 6};
    char words[512];
    write_corpus();
    for (int i = 0; i < 6; i++) {
        int P = stages[i / 2], is_far = i % 2;
        for (int asynchronous = 0; asynchronous < 2; asynchronous++) {
            MeshPlan plan, other, changed;
            MeshEstimate estimate, same;
            snprintf(words, sizeof words, DEEP QUIET "-b %d --micro-batch 1 -y %d --device-tflops 2e-6 %s %s",
                     asynchronous ? 1 : 8, P, links[is_far], asynchronous ? "--schedule async" : "");
            double took = simulated_step(words, asynchronous ? 2 * P : 1, asynchronous, &plan);
            if (!is_far) plan.link_mbps = 1e9;
            changed = mesh_schedule_plan(&plan, asynchronous, 1);
            if (!check(mesh_estimate(&estimate, &changed) == 0, "%s", error_message)) return;
            check(took <= 1.02 * estimate.step_s && took >= (is_far ? 0.8 : 0.97) * estimate.step_s,
                  "%d stages, async %d, far %d: %g s, estimated %g", P, asynchronous, is_far, took, estimate.step_s);
            // the other schedule, and back from there
            other = mesh_schedule_plan(&plan, !asynchronous, 1);
            check(other.batch == (asynchronous ? P : 1) && other.asynchronous == !asynchronous, "a step of %d",
                  other.batch);
            other = mesh_schedule_plan(&other, asynchronous, 1), other.batch = changed.batch;
            check(mesh_estimate(&same, &other) == 0 && same.step_s == estimate.step_s, "there and back");
            mesh_estimate_free(&same);
            mesh_estimate_free(&estimate);
        }
    }
}

// The versions that a run logs, by hand for four stages and the first eight micro-batches.
static void check_logged_versions(const char *run, int stash) {
    static const int forward[8][4] = {{0, 0, 0, 0}, {0, 0, 0, 1}, {0, 0, 1, 2}, {0, 1, 2, 3},
                                      {1, 2, 3, 4}, {2, 3, 4, 5}, {3, 4, 5, 6}, {4, 5, 6, 7}};
    json_t *steps = logged_steps(run);
    check(json_array_size(steps) == 8, "%zu steps", json_array_size(steps));
    for (size_t t = 0; t < json_array_size(steps); t++) {
        json_t *list = json_object_get(json_array_get(steps, t), "versions"), *expected = json_array();
        for (int s = 0; s < 4; s++)
            json_array_append_new(expected, json_pack("[i, i]", forward[t][s], stash ? forward[t][s] : (int)t));
        check(json_equal(list, expected), "%s: versions of micro-batch %zu", run, t + 1);
        json_decref(expected);
    }
    json_decref(steps);
}

// Runs: one stage is the synchronous run bit for bit; versions and delays in the log; resumed or not the same bits,
// with a ring that is not full yet, with the anchor, outer steps and a codec that remembers; what is refused.
static void test_async_runs(void) {
    static const char *const variants[] = {"-y 6", "-y 3 --no-stash --link-mbps 1", "-y 4 -p 0.5 -x 2 --anchor-delay 3",
                                           "-y 2 -x 2 --local-steps 4", "-y 3 --codec aqsgd -x 1 --link-mbps 1"};
    char words[256], whole[32], parts[32];
    write_corpus();
    check_run(0, NULL, DEEP "-n 8 --micro-batch 5 -y 1 -o @/flat", "done: 8 steps");
    check_run(0, NULL, DEEP "-n 8 --micro-batch 0 -y 1 --schedule async -o @/single", "done: 8 steps");
    check_same_latest("flat", "single", model_files, 1, "one stage");
    char *a = logged_losses("flat"), *b = logged_losses("single");
    check(strlen(a) > 80 && strcmp(a, b) == 0, "one stage: other losses\n%s\n%s", a, b);
    free(a);
    free(b);
    check_run(0, NULL, DEEP ASYNC "-n 8 -y 4 -o @/stash", "stage 0: layers 0..0, embedding, ");
    check(strstr(run_output, " parameters, 3 updates behind\n") != NULL &&
              strstr(run_output, "older weights (fp32)") != NULL &&
              strstr(run_output, "backward with the forward's weights\n") != NULL,
          "%s", run_output);
    check_run(0, NULL, DEEP ASYNC "-n 8 -y 4 --no-stash -o @/newest", "backward with the newest weights");
    check_run(0, NULL, DEEP ASYNC "-n 8 -y 4 --threads 1 -o @/thread", "done: 8 steps");
    check_logged_versions("stash", 1);
    check_logged_versions("newest", 0);
    check_same_latest("stash", "thread", model_files, 1, "one thread");
    check(!same_file("stash/latest/model.bin", "newest/latest/model.bin"), "stashing changes nothing");
    char *log = read_text("stash/log.jsonl");
    check(strstr(log, "\"delays\":[3,2,1,0]") != NULL, "no delays in the log");
    free(log);
    for (int i = 0; i < 5; i++) {
        snprintf(words, sizeof words, ASYNC "-n 11 --wire bf16 %s", variants[i]);
        snprintf(whole, sizeof whole, "aw%d", i);
        snprintf(parts, sizeof parts, "ap%d", i);
        check_resumed(words, whole, parts);
        check_same_latest(whole, parts, model_files, 1, variants[i]);
    }
    check_run(1, NULL, "-o @/aw0 --resume -n 20 --schedule sync", "--schedule differs");
    check_run(1, NULL, DEEP "-n 4 -y 2 --no-stash -o @/no", "goes with --schedule async");
    check_run(1, NULL, DEEP "-n 4 -y 2 --schedule async -o @/no", "--micro-batch 2: with --schedule async");
    check_run(1, NULL, DEEP ASYNC "-y 2 --no-stash --recompute -o @/no", "recompute activations");
    check_run(1, NULL, DEEP ASYNC "-y 2 --no-stash --probe 2 -o @/no", "a second pass");
    check_run(0, NULL, DEEP ASYNC "-n 4 -y 3 --probe 2 -p 0.5 -x 2 --recompute -o @/probed", "done: 4 steps");
    check_run(0, NULL, DEEP ASYNC "-n 4 -y 3 -p 0.5 -x 2 -o @/unprobed", "done: 4 steps");
    check_same_latest("probed", "unprobed", model_files, 1, "a probe");
}

// Asynchronous pipelines with what else a run may have: compressed boundaries whose tables or masks go by the step, the
// anchor that is ahead of some stages and behind others, rotated steps. The same bits resumed or not and on any number
// of threads, and each part does something. Must fail for: bases, versions, tables or controllers forgotten by a
// checkpoint.
static void test_async_combined(void) {
    static const char *const variants[] = {
        "--codec klt -p 0.8 -x 2 -y 3 --anchor-delay 3",
        "--codec klt -p 0.8 -x 2 -y 3 --anchor-delay 3 --optimizer rotate",
        "-p 0.5 -x 2 -y 3 --anchor-delay 3 --optimizer rotate --rotate-every 3",
        "-p 0.5 -x 2 -y 3 --anchor-delay 3 --alpha 1 --optimizer rotate --rotate-every 3",
        "--codec klt -p 0.8 -x 3 -y 2 --anchor-delay 3 --local-steps 4 --anchor-use both --no-stash"};
    enum { VARIANTS = sizeof variants / sizeof *variants };
    char words[512], command[1024], whole[32], parts[32], path[2][64];
    write_corpus();
    for (int i = 0; i < VARIANTS; i++) {
        snprintf(words, sizeof words, ASYNC "-n 11 --wire bf16 --link-mbps 1 %s", variants[i]);
        snprintf(whole, sizeof whole, "cw%d", i);
        snprintf(parts, sizeof parts, "cp%d", i);
        check_resumed(words, whole, parts);
        check_same_latest(whole, parts, anchored_files, 2, variants[i]);
        snprintf(command, sizeof command, DEEP "%s --device-tflops 1e-5 --threads 1 -o @/ct%d", words, i);
        check_run(0, NULL, command, "done: 11 steps");
        snprintf(parts, sizeof parts, "ct%d", i);
        check_same_latest(whole, parts, anchored_files, 2, "one thread");
        for (int j = 0; j < i; j++) {
            snprintf(path[0], sizeof path[0], "cw%d/latest/model.bin", i);
            snprintf(path[1], sizeof path[1], "cw%d/latest/model.bin", j);
            check(!same_file(path[0], path[1]), "%s gives the weights of %s", variants[i], variants[j]);
        }
    }
}

// Bytes that --dry-run estimates of tables and factors, against those of a run: a delivery to one replica. Must fail
// for: a table that is counted once and not on both sides, factors that are not sent, the embedding at each delivery.
static void test_klt_estimate(void) {
    static const char *const words[] = {DEEP QUIET "--wire bf16 --codec klt -p 0.8 -x 2 -y 3 --anchor-delay 1 -b 40",
                                        DEEP QUIET "--wire bf16 --codec klt -p 0.9 -x 2 -y 2 --anchor-delay 1 "
                                                   "--anchor-use none --klt-predict 0 -b 40"};
    enum { DELIVERIES = 4 };
    write_corpus();
    for (int i = 0; i < 2; i++) {
        MeshRun *run = mesh_run_open(words[i]);
        Trainer *trainer = &run->trainer;
        MeshEstimate estimate;
        MeshPlan plan = estimate_plan(trainer);
        int Y = trainer->mesh.n_stages;
        for (int step = 0; step < DELIVERIES; step++) mesh_run_step(run); // each with a delivery, the first with two
        KltShape shape = klt_shape(trainer);
        int64_t once = 2 * (int64_t)shape.V * shape.H * (Y - 1);
        double counted = (double)(trainer->anchor.factor_bytes - once) / trainer->anchor.deliveries;
        check(mesh_estimate(&estimate, &plan) == 0, "%s", error_message);
        double snapshot = 2.0 * (double)trainer->n_params, tokens = (double)plan.batch * plan.T;
        check_within(estimate.anchor_bytes * Y * tokens - snapshot, counted, 0.1, "a delivery");
        check(plan.table_bytes * 2 * (Y - 1) > (i == 0 ? 0.3 : 0.9) * counted, "tables: %g of %g bytes",
              plan.table_bytes * 2 * (Y - 1), counted);
        mesh_estimate_free(&estimate);
        mesh_run_close(run);
    }
    check_run(0, NULL, DEEP "--codec klt -p 0.8 -x 2 --dry-run", "tables of klt, an estimate: ");
    check(strstr(run_output, "and once the first embedding, 6192 values") != NULL, "%s", run_output);
    check_run(0, NULL, DEEP "--codec klt -p 0.8 -x 2 --klt-predict 0 --dry-run", "tables of klt, an estimate: ");
    check(strstr(run_output, "embedding, 6192") == NULL, "%s", run_output);
}

#define TINY_MESH                                                                                                      \
    "--init d=16,layers=2,heads=2,kv=1,ffn=24,vocab=258,ctx=32 -d @/corpus.jsonl -b 2 --micro-batch 1 -t 8 -n 5 "      \
    "--val-tokens 16 --val-every 100 -p 0.5 -x 3 -y 2 --anchor-delay 2 --local-steps 2 --fragments 2 --probe 4 "

#ifdef DEVICE_CUDA
// Tables and controllers of klt on two GPUs: close to one GPU, reproducible, resumed or not the same bits, and as many
// bytes. Must fail for: tables or embedding on the first GPU only, a controller for each GPU.
static void check_klt_gpus(void) {
    check_run(0, NULL, TINY_MESH "-l 1e-4 --codec klt -o @/klt_one", "done: 5 steps");
    check_run(0, NULL, TINY_MESH "-l 1e-4 --codec klt --gpus 2 -o @/klt_two", "done: 5 steps");
    check_run(0, NULL, TINY_MESH "-l 1e-4 --codec klt --gpus 2 -o @/klt_half --stop-after 3", "stopped after step 3");
    check_run(0, NULL, "-o @/klt_half --resume", "done: 5 steps");
    check(same_file("klt_two/latest/model.bin", "klt_half/latest/model.bin"), "klt, two GPUs, resumed: other weights");
    check(same_file("klt_two/latest/anchor.bin", "klt_half/latest/anchor.bin"), "klt, two GPUs, resumed: other tables");
    check(same_shards("klt_two", "klt_half", 0) == 2 * 2, "klt, two GPUs: other controllers");
    check_close_models("klt_two/latest/model.bin", "klt_one/latest/model.bin", model_tol(2e-5, 1e-3));
}
#endif

// A mesh on a device: masks, anchor, outer steps; resumed or not, same bits.
static void test_device_mesh(void) {
    write_corpus();
    check_run(0, NULL, TINY_MESH "-o @/whole", "done: 5 steps");
    check_run(0, NULL, TINY_MESH "-o @/parts --stop-after 3", "stopped after step 3");
    check_run(0, NULL, "-o @/parts --resume", "done: 5 steps");
    check_same_latest("whole", "parts", anchored_files, 2, "a mesh");
#ifdef DEVICE_CUDA // several GPUs share the micro-batches: the same up to the order of sums, and reproducible
    if (nccl_devices() > 1) {
        check_run(0, NULL, TINY_MESH "-l 1e-4 -o @/one", "done: 5 steps");
        check_run(0, NULL, TINY_MESH "-l 1e-4 --gpus 2 -o @/two", "done: 5 steps");
        check_run(0, NULL, TINY_MESH "-l 1e-4 --gpus 2 -o @/again", "done: 5 steps");
        check(same_file("two/latest/model.bin", "again/latest/model.bin"), "two GPUs, another time other bits");
        check_close_models("two/latest/model.bin", "one/latest/model.bin", model_tol(2e-5, 1e-3));
        check_klt_gpus();
    }
    check_run(1, NULL, TINY_MESH "--gpus 3 -o @/three", "2 micro-batches");
#else
    check_run(1, NULL, TINY_MESH "--gpus 2 -o @/two", "computes on the CPU");
#endif
    check_run(1, NULL, TINY_MESH "--gpus some -o @/some", "a number from 1");
    check_run(0, NULL, TINY_MESH "--codec klt --anchor-use both -o @/klt", "done: 5 steps");
    check_run(0, NULL, TINY_MESH "--codec klt --anchor-use both -o @/klt_parts --stop-after 3", "stopped after step 3");
    check_run(0, NULL, "-o @/klt_parts --resume", "done: 5 steps");
    check(same_file("klt/latest/model.bin", "klt_parts/latest/model.bin"), "klt: resumed, other weights");
    check(same_file("klt/latest/anchor.bin", "klt_parts/latest/anchor.bin"), "klt: resumed, other tables");
    check_run(0, NULL, TINY_MESH "--micro-batch 2 --schedule async -o @/async", "done: 5 steps");
    check_run(0, NULL, TINY_MESH "--micro-batch 2 --schedule async -o @/async_parts --stop-after 3", "stopped after");
    check_run(0, NULL, "-o @/async_parts --resume", "done: 5 steps");
    check_same_latest("async", "async_parts", anchored_files, 2, "an asynchronous mesh");
    check_run(0, NULL, TINY_MESH "--micro-batch 2 --probe 0 --schedule async --no-stash -o @/loose", "done: 5 steps");
    check(!same_file("async/latest/model.bin", "loose/latest/model.bin"), "stashing changes nothing");
#if defined CUDA_EMULATOR && defined __SANITIZE_ADDRESS__
    return; // the rest is minutes of ops that test_cuda runs under sanitizers too
#endif
    static const char *const codecs[] = {"topk -p 0.6", "bottleneck", "aqsgd -p 0", "tahquant -p 0"};
    for (int i = 0; i < 4; i++) {
        char command[1024];
        snprintf(command, sizeof command, TINY_MESH "-n 2 -o @/codec%d --codec %s", i, codecs[i]);
        check_run(0, NULL, command, "done: 2 steps");
    }
    static const char *const optimizers[] = {"rotate --rotate-every 2", "nesterov", "pipemare", "muon"};
    for (int i = 0; i < 4; i++) {
        char command[1024], whole[64], parts[64];
        snprintf(whole, sizeof whole, "opt%d", i);
        snprintf(parts, sizeof parts, "opt%d_parts", i);
        snprintf(command, sizeof command, TINY_MESH "-n 3 -o @/%s --optimizer %s", whole, optimizers[i]);
        check_run(0, NULL, command, "done: 3 steps");
        snprintf(command, sizeof command, TINY_MESH "-n 3 -o @/%s --stop-after 2 --optimizer %s", parts, optimizers[i]);
        check_run(0, NULL, command, "stopped after step 2");
        snprintf(command, sizeof command, "-o @/%s --resume", parts);
        check_run(0, NULL, command, "done: 3 steps");
        check_same_latest(whole, parts, model_files, 1, optimizers[i]);
    }
    check_run(0, NULL, "-m @/whole/latest/model.bin --generate ab --max-tokens 3", "ab");
    check_run(0, NULL, "-m @/whole/latest/model.bin --eval --val-data @/corpus.jsonl --val-tokens 16 -t 8",
              "validation loss");
}

#ifndef DEVICE_CUDA
// Roles are given in order, the anchor behind the replicas that a run begins with; a lost member takes its replica out
// and leaves a gap, which the next one gets; gates open once all that run are there, of a stage or of all. Must fail
// for: a gate that the anchor holds up, a dead replica's cells that still count, roles that are given twice.
static void test_membership(void) {
    Membership m;
    memset(&m, 0, sizeof m);
    m.n_replicas = 2, m.n_stages = 2, m.anchored = 1, m.min_replicas = 1, m.needs_anchor = 1;
    static const int order[] = {0, 1, 4, 2, 3, -1};
    for (int i = 0; i < 6; i++) {
        int role = membership_vacancy(&m);
        check(role == order[i], "newcomer %d gets role %d, not %d", i, role, order[i]);
        Member *member = membership_add(&m, (uint32_t)(10 + i));
        member->role = role, member->state = role < 0 ? MEMBER_SPARE : MEMBER_LOADING;
        check(!membership_may_begin(&m), "a run begins with members that load");
    }
    for (int i = 0; i < 2; i++) membership_find(&m, (uint32_t)(10 + i))->state = MEMBER_READY;
    check(!membership_may_begin(&m), "a run begins without the anchor that it needs");
    membership_find(&m, 12)->state = MEMBER_READY;
    check(membership_may_begin(&m) && membership_lead(&m) < 0, "one replica and the anchor cannot begin");
    for (int i = 0; i < 5; i++) membership_find(&m, (uint32_t)(10 + i))->state = MEMBER_RUNNING;
    for (int i = 0; i < 5; i++) membership_find(&m, (uint32_t)(10 + i))->stands = 1;
    check(membership_lead(&m) == 0 && membership_standing(&m) == 0, "the first replica does not lead");
    membership_of_role(&m, 0)->gate = membership_of_role(&m, 2)->gate = 7;
    check(membership_all_at(&m, 7, 0) && !membership_all_at(&m, 7, 1) && !membership_all_at(&m, 7, -1),
          "a gate of one stage");
    membership_of_role(&m, 1)->gate = 9;
    check(!membership_all_at(&m, 7, -1), "a gate opens without one of its cells");
    membership_of_role(&m, 3)->gate = 7;
    check(membership_all_at(&m, 7, -1) && !membership_all_at(&m, 8, -1), "a gate that all cells have reached");
    check(membership_remove(&m, 10) == 0, "a lost cell does not take its replica out");
    check(membership_lead(&m) == 1 && membership_standing(&m) == 1, "nobody leads");
    check(membership_of_role(&m, 1)->state == MEMBER_READY && !membership_of_role(&m, 1)->stands,
          "its other cell runs");
    check(membership_all_at(&m, 7, -1) && !membership_all_at(&m, 9, -1), "a dead replica counts at a gate");
    check(membership_vacancy(&m) == 0 && membership_find(&m, 10) == NULL, "the gap is not seen");
    check(membership_remove(&m, 12) < 0 && membership_lead(&m) == 1, "a lost anchor takes a replica out");
    check(membership_remove(&m, 11) < 0, "a replica dies twice");
    check(membership_remove(&m, 99) < 0, "a stranger is removed");
    membership_free(&m);
}

// Parts come back as they went in; a message that ends too early is refused, wherever it is cut. Channels keep their
// numbers apart.
static void test_packer(void) {
    Packer packer = {NULL, 0, 0, 0};
    int64_t number = 0x123456789ABCDEF, back = 0;
    char text[300], text_back[300];
    memset(text, 'x', sizeof text);
    pack(&packer, &number, sizeof number);
    pack(&packer, text, 0);
    pack(&packer, text, sizeof text);
    memcpy(pack_room(&packer, 4), "tail", 4);
    check(!packer.failed && packer.n == 8 + 300 + 4, "%lld bytes", (long long)packer.n);
    for (int64_t n = 0; n <= packer.n; n++) {
        Unpacker unpacker = {packer.bytes, n, 0};
        int whole = unpack_to(&unpacker, &back, sizeof back) == 0 && unpack(&unpacker, 0) != NULL &&
                    unpack_to(&unpacker, text_back, sizeof text_back) == 0 && unpack(&unpacker, 4) != NULL;
        check(whole == (n == packer.n), "cut to %lld bytes", (long long)n);
    }
    check(back == number && memcmp(text, text_back, sizeof text) == 0, "other bytes come back");
    Unpacker unpacker = {packer.bytes, packer.n, 0};
    check(unpack(&unpacker, -1) == NULL && unpack(&unpacker, INT64_MAX) == NULL, "a length that is none");
    packer_free(&packer);
    for (int kind = 0; kind < CHANNEL_KINDS; kind++) {
        Channel channel = channel_parts(channel_number((ChannelKind)kind, 65535, 1, CHANNEL_TAGS - 1));
        check(channel.kind == (ChannelKind)kind && channel.from == 65535 && channel.to == 1 &&
                  channel.tag == CHANNEL_TAGS - 1,
              "kind %d", kind);
    }
}

#ifdef WITH_ZMQ
// ---------------------------------------------------------------------------------------------------------------------
// A mesh of several processes

enum { MESH_CHILDREN = 8 };

// Starts a coordinator and joiners: host words, and what each joiner adds. Waits until all have joined or the
// coordinator ends.
typedef struct {
    pid_t host, joiners[MESH_CHILDREN];
    int n;
    char run[64], output[64]; // of the coordinator
} Meshing;

// Waits until a file of the scratch folder exists, at most a minute. 1 if it does.
static int wait_for_file(const char *name) {
    const double until = seconds() + 60.0;
    while (!file_exists(scratch_path(name)) && seconds() < until) usleep(2000);
    return check(file_exists(scratch_path(name)), "%s does not come", name);
}

static void meshing_join(Meshing *m) {
    char output[96], variable[512], token[96];
    snprintf(output, sizeof output, "%s.joiner%d", m->run, m->n);
    snprintf(token, sizeof token, "%s/join", m->run);
    char *text = read_text(token);
    snprintf(variable, sizeof variable, "MESH_TOKEN=%s", text);
    free(text);
    m->joiners[m->n++] =
        start_child_to(output, variable, "--join env:MESH_TOKEN --threads 1 --listen tcp://127.0.0.1:*");
}

// words: of the run; run: its folder; joiners: how many beside the coordinator, which has a cell.
static void meshing_start(Meshing *m, const char *words, const char *run, int joiners) {
    char command[1024], token[80];
    memset(m, 0, sizeof *m);
    snprintf(m->run, sizeof m->run, "%s", run);
    snprintf(m->output, sizeof m->output, "%s.host", run);
    snprintf(token, sizeof token, "%s/join", run);
    unlink(scratch_path(token));
    snprintf(command, sizeof command, "%s --host tcp://127.0.0.1:* --threads 1 -o @/%s", words, run);
    m->host = start_child_to(m->output, NULL, command);
    if (!wait_for_file(token)) return;
    while (m->n < joiners) meshing_join(m);
}

// Waits for a child to end, at most two minutes.
static int wait_for_child(pid_t child) {
    const double until = seconds() + 120.0;
    int status = -1;
    while (waitpid(child, &status, WNOHANG) == 0) {
        if (seconds() > until) kill(child, SIGKILL);
        usleep(2000);
    }
    return status;
}

// Waits for all to end; each must end well. part: what the coordinator says.
static void meshing_end(Meshing *m, const char *part) {
    char *said;
    int status = wait_for_child(m->host);
    said = read_text(m->output);
    check(WIFEXITED(status) && WEXITSTATUS(status) == 0, "%s: the coordinator ends with %x:\n%s", m->run, status, said);
    check(strstr(said, part) != NULL, "%s: the coordinator does not say '%s':\n%s", m->run, part, said);
    free(said);
    for (int i = 0; i < m->n; i++) {
        char output[96];
        snprintf(output, sizeof output, "%s.joiner%d", m->run, i);
        status = wait_for_child(m->joiners[i]);
        said = read_text(output);
        check(WIFEXITED(status) && WEXITSTATUS(status) == 0, "%s: joiner %d ends with %x:\n%s", m->run, i, status,
              said);
        free(said);
    }
}

// All tensors of file a are in file b, with the same bytes.
static int holds_same(const char *a, const char *b) {
    SafeTensors x, y;
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s", scratch_path(a));
    if (safetensors_open(&x, path)) return 0;
    snprintf(path, sizeof path, "%s", scratch_path(b));
    int same = safetensors_open(&y, path) == 0;
    for (int i = 0; same && i < x.n_tensors; i++) {
        const SafeTensor *of_x = &x.tensors[i], *of_y = safetensors_find(&y, of_x->name);
        same = of_y != NULL && of_x->end - of_x->begin == of_y->end - of_y->begin &&
               memcmp(of_x->data, of_y->data, of_x->end - of_x->begin) == 0;
    }
    safetensors_close(&x);
    if (same) safetensors_close(&y);
    return same;
}

// The step lines of a run with what several processes and one have in common.
static json_t *common_steps(const char *run) {
    size_t i;
    json_t *line, *steps = logged_steps(run);
    json_array_foreach(steps, i, line) {
        static const char *const others[] = {"bytes", "sim_elapsed", "sim_tok_s", "anchor", "tables"};
        for (int k = 0; k < 5; k++) json_object_del(line, others[k]);
    }
    return steps;
}

// The same losses, norms, versions, weights, and state of all cells.
static void check_same_as_one(const char *one, const char *many, int anchored) {
    char a[128], b[128];
    json_t *x = common_steps(one), *y = common_steps(many);
    check(json_array_size(x) > 0 && json_equal(x, y), "%s: the logs of %s and %s differ", one, one, many);
    json_decref(x);
    json_decref(y);
    snprintf(a, sizeof a, "%s/latest/%s", one, weights_file(one));
    snprintf(b, sizeof b, "%s/latest/%s", many, weights_file(one));
    check(same_file(a, b), "%s: %s has another model", one, many);
    snprintf(a, sizeof a, "%s/latest/anchor.bin", one), snprintf(b, sizeof b, "%s/latest/anchor.bin", many);
    if (anchored) check(same_file(a, b), "%s: %s has another anchor", one, many);
    for (int r = 0, n = 1; n > 0; r++) {
        for (n = 0;; n++) {
            snprintf(a, sizeof a, "%s/latest/cell_%d_%d.bin", one, r, n);
            snprintf(b, sizeof b, "%s/latest/cell_%d_%d.bin", many, r, n);
            if (!file_exists(scratch_path(a))) break;
            check(holds_same(a, b), "%s: %s has another cell %d.%d", one, many, r, n);
        }
    }
}

// The same run in one process and in several, with this many joiners, gives the same bits.
static void check_processes_as_one(const char *words, const char *name, int joiners, const char *done, int anchored) {
    char command[1100], one[48], many[48];
    Meshing m;
    snprintf(one, sizeof one, "%s_one", name), snprintf(many, sizeof many, "%s_many", name);
    snprintf(command, sizeof command, "%s -o @/%s", words, one);
    check_run(0, NULL, command, done);
    meshing_start(&m, words, many, joiners);
    meshing_end(&m, done);
    check_same_as_one(one, many, anchored);
}

// The same run in one process and in several: the same bits. Must fail for: a snapshot rounded twice, factors used a
// step late, samples drawn in another order, a version of the weights too new, averages in another order.
static void test_processes(void) {
    static const struct {
        const char *words;
        int joiners;
    } cases[] = {
        {"-y 2", 1},
        {"-x 2 -y 2 --local-steps 4", 3},
        {"-x 3 -y 1 --local-steps 3 --overlap 0 --wire fp32", 2},
        {"-x 2 -y 2 --dp dense", 3},
        {"-x 2 -y 3 -p 0.6 --anchor-delay 2", 3},
        {"-x 3 -y 2 --codec klt -p 0.8 --anchor-delay 2 --local-steps 3 --anchor-use both", 4},
        {ASYNC "-y 3 --optimizer rotate", 2},
        {ASYNC "-y 3 --no-stash --optimizer pipemare", 2},
        {ASYNC "-x 3 -y 2 --codec klt -p 0.8 --anchor-delay 3 --local-steps 3", 4},
    };
    char words[1024], name[32];
    write_corpus();
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        snprintf(name, sizeof name, "cells%zu", i);
        snprintf(words, sizeof words, DEEP "%s -n 8 --precision fp32 --val-every 3 --save-every 5", cases[i].words);
        check_processes_as_one(words, name, cases[i].joiners, "done: 8 steps",
                               strstr(cases[i].words, "anchor") != NULL);
    }
}

// Stopped and resumed, in several processes or in one, in any order: the same bits.
static void test_processes_resume(void) {
    static const char *const cases[] = {"-x 3 -y 2 --codec klt -p 0.8 --anchor-delay 3 --local-steps 3",
                                        ASYNC "-x 2 -y 2 --local-steps 4"};
    static const int joiners[] = {4, 3};
    char words[1024], command[1100];
    Meshing m;
    write_corpus();
    for (size_t i = 0; i < 2; i++) {
        const char *const runs[] = {"whole_p", "parts_p", "half_p", "other_p"};
        for (int k = 0; k < 4; k++) system_remove(runs[k]);
        snprintf(words, sizeof words, DEEP "%s -n 11 --precision fp32 --val-every 4 --save-every 20", cases[i]);
        snprintf(command, sizeof command, "%s -o @/whole_p", words);
        check_run(0, NULL, command, "done: 11 steps");
        snprintf(command, sizeof command, "%s -o @/half_p --stop-after 5", words);
        check_run(0, NULL, command, "--resume");
        snprintf(command, sizeof command, "%s --stop-after 5", words);
        meshing_start(&m, command, "parts_p", joiners[i]);
        meshing_end(&m, "stopped after step");
        meshing_start(&m, "--resume", "parts_p", joiners[i]);
        meshing_end(&m, "done: 11 steps");
        check_same_as_one("whole_p", "parts_p", i == 0);
        meshing_start(&m, "--resume", "half_p", joiners[i]);
        meshing_end(&m, "done: 11 steps");
        check_same_as_one("whole_p", "half_p", i == 0);
        snprintf(command, sizeof command, "%s --stop-after 5", words);
        meshing_start(&m, command, "other_p", joiners[i]);
        meshing_end(&m, "stopped after step");
        check_run(0, NULL, "--resume -o @/other_p", "done: 11 steps");
        check_same_as_one("other_p", "whole_p", 0);
    }
}
#endif

#include "dev/net_tests.h"
#endif
#include "dev/gguf_tests.h"
#include "dev/family_tests.h"
#include "dev/status_tests.h"
#include "dev/data_tests.h"
#include "dev/eval_tests.h"
#include "dev/memory_tests.h"
#include "dev/lora_tests.h"
#include "dev/tokenizer_tests.h"
#include "dev/window_tests.h"
#include "dev/chat_tests.h"

static const struct {
    const char *name;
    void (*run)(void);
} tests[] = {
#ifndef DEVICE_CUDA
    {"checks_can_fail", test_checks_can_fail},
    {"exp", test_exp},
    {"bf16", test_bf16},
    {"embedding", test_embedding},
    {"rmsnorm", test_rmsnorm},
    {"rope", test_rope},
    {"matmul", test_matmul},
    {"attention", test_attention},
    {"attention_backward_blocks", test_attention_backward_blocks},
    {"attention_documents", test_attention_documents},
    {"window_attention", test_window_attention},
    {"window_of_one", test_window_of_one},
    {"window_bits", test_window_bits},
    {"window_config", test_window_config},
    {"window_runs", test_window_runs},
    {"window_export", test_window_export},
    {"swiglu", test_swiglu},
    {"cross_entropy", test_cross_entropy},
    {"adamw", test_adamw},
    {"threads", test_threads},
    {"learning_rate", test_learning_rate},
    {"svd", test_svd},
    {"spectral_filter", test_spectral_filter},
    {"spectral_reference", test_spectral_reference},
    {"rotate_reference", test_rotate_reference},
    {"rotate_identity", test_rotate_identity},
    {"rotate_ops", test_rotate_ops},
    {"rotate_group", test_rotate_group},
    {"rotate_squares", test_rotate_squares},
    {"rotate_halves", test_rotate_halves},
    {"muon_nesterov", test_muon_nesterov},
    {"delayed_bowl", test_delayed_bowl},
    {"powersgd", test_powersgd},
    {"masked_gradient", test_masked_gradient},
    {"anchor", test_anchor},
    {"anchor_moments", test_anchor_moments},
    {"anchor_rank", test_anchor_rank},
    {"diloco", test_diloco},
    {"mask", test_mask},
    {"mask_gradient", test_mask_gradient},
    {"codec", test_codec},
    {"rans", test_rans},
    {"klt_bound", test_klt_bound},
    {"klt_unbiased", test_klt_unbiased},
    {"klt_messages", test_klt_messages},
    {"klt_kinds", test_klt_kinds},
    {"klt_predictor", test_klt_predictor},
    {"klt_metric", test_klt_metric},
    {"klt_eigenvectors", test_klt_eigenvectors},
    {"codec_quant", test_codec_quant},
    {"codec_tahquant", test_codec_tahquant},
    {"codec_topk", test_codec_topk},
    {"codec_bottleneck", test_codec_bottleneck},
    {"codec_aqsgd", test_codec_aqsgd},
    {"codec_promises", test_codec_promises},
    {"codec_hostile", test_codec_hostile},
    {"outer_steps", test_outer_steps},
    {"anchor_update", test_anchor_update},
    {"filtered_step", test_filtered_step},
    {"anchor_bias", test_anchor_bias},
    {"anchor_bias_mean", test_anchor_bias_mean},
    {"corrected_step", test_corrected_step},
    {"wire_feedback", test_wire_feedback},
    {"codec_memory", test_codec_memory},
    {"async_steps", test_async_steps},
    {"async_skips", test_async_skips},
    {"async_memory", test_async_memory},
    {"optimizer_memory", test_optimizer_memory},
    {"alignment_measured", test_alignment},
    {"alignment_swing", test_alignment_swing},
    {"membership", test_membership},
    {"packer", test_packer},
    {"net_frame", test_net_frame},
    {"net_stream", test_net_stream},
    {"net_begin", test_net_begin},
    {"net_slow_link", test_net_slow_link},
    {"packed_cells", test_packed_cells},
#ifdef WITH_ZMQ
    {"processes", test_processes},
    {"processes_resume", test_processes_resume},
    {"net_token", test_net_token},
    {"net_messages", test_net_messages},
    {"net_refused", test_net_refused},
    {"net_hostile", test_net_hostile},
    {"net_overtake", test_net_overtake},
    {"net_reconnect", test_net_reconnect},
    {"net_one_way", test_net_one_way},
    {"net_relay", test_net_relay},
    {"net_unknown", test_net_unknown},
    {"net_files", test_net_files},
    {"net_inbox", test_net_inbox},
    {"net_close", test_net_close},
    {"packed_processes", test_packed_processes},
#endif
#endif
    {"device_mesh", test_device_mesh},
    {"rand", test_rand},
    {"model_against_pytorch", test_model_against_pytorch},
    {"model_variants", test_model_variants},
    {"micro_batches", test_micro_batches},
    {"model_masked", test_model_masked},
    {"kv_cache", test_kv_cache},
    {"eval_choices", test_eval_choices},
    {"eval_score", test_eval_score},
    {"eval_malformed", test_eval_malformed},
    {"eval_answers", test_eval_answers},
    {"eval_program", test_eval_program},
    {"eval_scripts", test_eval_scripts},
    {"prune_values", test_prune_values},
    {"prune_model", test_prune_model},
    {"sampling", test_sampling},
    {"safetensors", test_safetensors},
    {"model_files", test_model_files},
    {"halves", test_halves},
    {"gguf_quants", test_gguf_quants},
    {"gguf_logits", test_gguf_logits},
    {"gguf_files", test_gguf_files},
    {"gguf_program", test_gguf_program},
    {"gguf_refused", test_gguf_refused},
    {"gguf_config", test_gguf_config},
    {"gguf_families", test_gguf_families},
    {"gguf_tokenizer", test_gguf_tokenizer},
    {"llama2c", test_llama2c},
    {"llama2c_int8", test_llama2c_int8},
    {"config", test_config},
    {"options", test_options},
    {"tokenizer", test_tokenizer},
    {"tokenizer_expected", test_tokenizer_expected},
    {"tokenizer_bytes", test_tokenizer_bytes},
    {"tokenizer_marks", test_tokenizer_marks},
    {"tokenizer_config", test_tokenizer_config},
    {"tokenizer_pieces", test_tokenizer_pieces},
    {"tokenizer_patterns", test_tokenizer_patterns},
    {"tokenizer_merges", test_tokenizer_merges},
    {"tokenizer_long", test_tokenizer_long},
    {"tokenizer_refused", test_tokenizer_refused},
    {"tokenizer_beyond", test_tokenizer_beyond},
    {"tokenizer_converted", test_tokenizer_converted},
    {"tokenizer_llama3", test_tokenizer_llama3},
    {"tokenizer_threads", test_tokenizer_threads},
    {"tokenizer_files", test_tokenizer_files},
    {"tokenizer_documents", test_tokenizer_documents},
    {"text_data", test_text_data},
    {"token_data", test_token_data},
    {"data_order", test_data_order},
    {"chat_templates", test_chat_templates},
    {"chat_reference", test_chat_reference},
    {"chat_format", test_chat_format},
    {"chat_lines", test_chat_lines},
    {"packing", test_packing},
    {"too_long", test_too_long},
    {"data_sent", test_data_sent},
    {"token_files", test_token_files},
    {"packed_model", test_packed_model},
    {"packed_runs", test_packed_runs},
    {"show_data", test_show_data},
    {"resume", test_resume},
    {"crashes", test_crashes},
    {"disk_full", test_disk_full},
    {"nan", test_nan},
    {"interrupt", test_interrupt},
    {"program", test_program},
    {"schedule", test_schedule},
    {"stages", test_stages},
    {"anchor_auto", test_anchor_auto},
    {"mesh_resume", test_mesh_resume},
    {"shards", test_shards},
    {"shards_hostile", test_shards_hostile},
    {"shards_merge_refused", test_merge_refused},
    {"klt_mesh", test_klt_mesh},
    {"coder", test_coder},
    {"coder_runs", test_coder_runs},
    {"optimizer_rules", test_optimizer_rules},
    {"rotation_spread", test_rotation_spread},
    {"optimizer_runs", test_optimizer_runs},
    {"alignment_estimate", test_alignment_estimate},
    {"oscillation", test_oscillation},
    {"klt_estimate", test_klt_estimate},
    {"codec_table", test_codec_table},
    {"bias_resume", test_bias_resume},
    {"dense", test_dense},
    {"meeting_apart", test_meeting_apart},
    {"meeting_restart", test_meeting_restart},
    {"meeting_refused", test_meeting_refused},
    {"probe", test_probe},
    {"partition", test_partition},
    {"estimate", test_estimate},
    {"link", test_link},
    {"clock", test_clock},
    {"mesh_defaults", test_mesh_defaults},
    {"status_texts", test_status_texts},
    {"status_metrics", test_status_metrics},
    {"status_request", test_status_request},
    {"status_page", test_status_page},
    {"status_slow", test_status_slow},
    {"families_against_pytorch", test_families_against_pytorch},
    {"families_variants", test_families_variants},
#ifndef DEVICE_CUDA
    {"families_ops", test_families_ops},
    {"families_files", test_families_files},
    {"families_presets", test_families_presets},
    {"families_refused", test_families_refused},
    {"families_stages", test_families_stages},
    {"families_rotation", test_families_rotation},
    {"families_train", test_families_train},
#if defined(WITH_ZMQ)
    {"families_processes", test_families_processes},
#endif
#endif
    {"memory_levels", test_memory_levels},
#ifndef DEVICE_CUDA
    {"memory_random", test_memory_random},
    {"memory_int8", test_memory_int8},
    {"memory_bf16", test_memory_bf16},
    {"memory_training", test_memory_training},
    {"memory_resume", test_memory_resume},
    {"memory_stages", test_memory_stages},
#endif
    {"memory_meshes", test_memory_meshes},
    {"memory_refused", test_memory_refused},
#if defined(WITH_ZMQ) && !defined(DEVICE_CUDA)
    {"memory_processes", test_memory_processes},
#endif
#ifndef DEVICE_CUDA
    {"lora_products", test_lora_products},
    {"lora_filter", test_lora_filter},
#endif
    {"lora_against_peft", test_lora_against_peft},
    {"lora_passes", test_lora_passes},
    {"lora_begins_as_base", test_lora_begins_as_base},
    {"lora_merged", test_lora_merged},
    {"lora_config", test_lora_config},
    {"lora_training", test_lora_training},
    {"lora_meshes", test_lora_meshes},
    {"lora_refused", test_lora_refused},
#if defined(WITH_ZMQ) && !defined(DEVICE_CUDA)
    {"lora_processes", test_lora_processes},
#endif
#ifndef DEVICE_CUDA
    {"lora_plan", test_lora_plan},
    {"memory_plan", test_memory_plan},
    {"memory_picks", test_memory_picks},
    {"memory_headline", test_memory_headline},
#endif
    {"launch", test_launch},
#ifdef WITH_ZMQ
    {"launch_run", test_launch_run},
#endif
    {"mesh_clock", test_mesh_clock},
    {"codec_runs", test_codec_runs},
    {"codec_study", test_codec_study},
    {"async_study", test_async_study},
#ifdef WITH_ZMQ
    {"mesh_faults", test_mesh_faults},
    {"mesh_soak", test_mesh_soak},
#endif
    {"anchor_threads", test_anchor_threads},
    {"versions", test_versions},
    {"flow", test_flow},
    {"async_clock", test_async_clock},
    {"schedule_estimate", test_schedule_estimate},
    {"async_runs", test_async_runs},
    {"async_combined", test_async_combined},
};

// What a run of all tests leaves out: in a build whose activations are bf16 much is not exact, and the emulator is
// slow. Sanitizers see the code of whole meshes in the shorter ones of their tests; and of the emulated ones those
// whose kernels the ops' tests run under sanitizers too, as their host code is in the CPU's program, take minutes for
// nothing new.
static int is_left_out(const char *name) {
#if defined __SANITIZE_ADDRESS__ || defined __SANITIZE_THREAD__
#ifdef CUDA_EMULATOR
    static const char *const long_ones[] = {"families_variants", "eval_answers", "lora_meshes"};
#else
    static const char *const long_ones[] = {"mesh_faults", "mesh_soak", "processes_resume"};
#endif
    for (size_t i = 0; i < sizeof long_ones / sizeof *long_ones; i++)
        if (strcmp(long_ones[i], name) == 0) return 1;
#endif
#ifdef CUDA_EMULATOR
    int all = 0;
#else
    int all = device_has_fp32();
#endif
    static const char *const kept[] = {"model_against_pytorch",
                                       "micro_batches",
                                       "model_masked",
                                       "kv_cache",
                                       "packed_model",
                                       "device_mesh",
                                       "families_against_pytorch",
                                       "families_variants",
                                       "eval_choices",
                                       "eval_answers",
                                       "prune_model",
                                       "lora_against_peft",
                                       "lora_passes",
                                       "lora_meshes"};
    for (size_t i = 0; i < sizeof kept / sizeof *kept; i++) all |= strcmp(kept[i], name) == 0;
    return !all;
}

// Enters the folder `name` that lies beside the file at `path`.
static int chdir_beside(const char *path, const char *name) {
    char folder[PATH_MAX], target[PATH_MAX];
    path_parent(folder, path);
    return path_join(target, folder, name) || chdir(target) != 0;
}

// Whether test `i` is this process's: TEST_PART=k/n leaves it every n-th from k on.
static int is_in_part(size_t i) {
    const char *part = getenv("TEST_PART");
    unsigned k, n;
    if (part == NULL || sscanf(part, "%u/%u", &k, &n) != 2 || n == 0) return 1;
    return i % n == k;
}

// The executable is also the program under test: `test_gpt --program WORDS` is `train WORDS`, with faults on request.
static int program_under_test(int argc, char **argv) {
    const char *die_at = getenv("TEST_DIE_AT"), *limit = getenv("TEST_FILE_LIMIT"), *home = getenv("TEST_FOLDER");
    char path[PATH_MAX] = "";
    if (home != NULL && (readlink("/proc/self/fd/1", path, sizeof path - 1) < 0 || chdir_beside(path, home) != 0))
        return 2;
    if (die_at != NULL) file_die_at = atoi(die_at);
    if (limit != NULL) {
        struct rlimit size = {(rlim_t)atol(limit), (rlim_t)atol(limit)};
        signal(SIGXFSZ, SIG_IGN);
        setrlimit(RLIMIT_FSIZE, &size);
    }
    return program(argc - 1, argv + 1);
}

int main(int argc, char **argv) {
    if (argc > 1 && strcmp(argv[1], "--program") == 0) return program_under_test(argc, argv);
    snprintf(test_folder, sizeof test_folder, "/tmp/test_gpt.XXXXXX");
    if (mkdtemp(test_folder) == NULL) {
        perror(test_folder);
        return 1;
    }
    for (size_t i = 0; i < sizeof tests / sizeof *tests; i++) {
        if (argc > 1 ? strstr(tests[i].name, argv[1]) == NULL : is_left_out(tests[i].name)) continue;
        if (!is_in_part(i)) continue;
        int failed = checks_failed;
        double start = seconds();
        test_name = tests[i].name;
        tests[i].run();
        printf("%-4s %-40s %6.2f s\n", checks_failed == failed ? "ok" : "FAIL", test_name, seconds() - start);
        fflush(stdout);
    }
    if (system_remove("") != 0) printf("%s is left behind\n", test_folder);
    printf("%d passed, %d failed\n", checks_passed, checks_failed);
    return checks_failed != 0 || checks_passed == 0; // a name that fits no test is a failure too
}
