// Speed against this machine's own limits: `make bench`, or build/bench [124m] [1b] [parts] [mesh] [rotate]
// [net] [tokenizer] [256|1024] [fp32|bf16].
//
//   124m   d 768, 12 layers, 12 heads, ffn 2048, vocabulary 32000; T 256 and 1024, 4,096 tokens a step, both precisions
//   1b     the Llama-3.2-1B shape, random weights, B 1 T 128: one step, after one to warm up
//   parts  each op of a 124M layer alone
//   mesh   what the mesh adds to a fast step of 124M, T 256, 4,096 tokens: filter of rank 128 and full, each codec over
//          three boundaries both ways, encoded and decoded (at p 0.95 those that take a budget), each as a share of the
//          step timed in the same run; of klt also its parts. Beside the step: an anchor pass's SVDs, and what it adds
//          for klt's tables. klt's states and gradients are Gaussian, component k of variance 1/k, turned at random
//   rotate what `--optimizer rotate` adds to an AdamW step of 124M, refreshes every 10 steps: a layer's seven matrices
//          are stepped, and taken times 12; the step is reckoned from a micro-batch of 1,024 tokens and an update.
//          Three rounds, in each of them all that is compared; medians of the rounds' values and shares
//   net    only if named: one stream of 268 MB over loopback with CURVE, both ends in this process; a coordinator with
//   64
//          idle joiners, which another process has
//   tokenizer  only if named, with a tokenizer.json and a text file behind it: `make bench BENCH="tokenizer X.json
//   Y.txt"`;
//          MB of text a second of one processor's time, the whole at once and line by line, and its split alone
// Columns: tok/s and GFLOP/s are medians over the steps; % of peak is GFLOP/s over the 2048^3 matrix product of the
// same precision, the median of two products timed after each step; forward, backward and optimizer are shares
// of the step. bench.h has the FLOPs of a token.
#define BENCHMARK
#include "../train_gpt.cu"
#include "bench.h" // median, flops_per_token, fill_batch, rotate_product_flops
#include "../llmc/net.h"

#include <sys/resource.h> // getrusage
#include <sys/wait.h>     // waitpid

// GFLOP/s of one 2048^3 product, operands already in the precision's type.
static double matmul_peak(float *buffer, Stream *stream) {
    enum { SIZE = 2048 };
    int bf16 = stream->precision == PRECISION_BF16;
    float *out = buffer, *a = buffer + (size_t)SIZE * SIZE, *b = a + (size_t)SIZE * SIZE;
    double start = seconds();
    matmul_product(out, SIZE, a, SIZE, 0, b, SIZE, 1, SIZE, SIZE, SIZE, bf16, 0, stream);
    return 2e-9 * SIZE * SIZE * SIZE / (seconds() - start);
}

// Fills the weights cheaply: speed does not depend on them, as long as nothing overflows.
static void fill_weights(Stage *stage) {
#pragma omp parallel for
    for (int64_t i = 0; i < stage->arena_floats; i++)
        stage->params[i] = 0.02f * ((float)(((uint64_t)i * 2654435761u) >> 8 & 0xFFFF) / 65536.0f - 0.5f);
    for (int i = 0; i < stage->n_tensors; i++) {
        const Tensor *tensor = &stage->tensors[i];
        for (int64_t j = 0; tensor->n_dims == 1 && j < tensor->n; j++) stage->params[tensor->offset + j] = 1.0f;
    }
}

// Times n_steps whole steps of `batch` sequences, prints a line and gives the median.
static int bench_model(const char *name, const char *spec, int batch, int T, int micro_batch, Precision precision,
                       int n_steps, double *step_seconds) {
    enum { MAX_STEPS = 15 };
    Config config;
    Stage stage;
    Stream *stream = NULL;
    Batch data;
    StepTimes times = {0, 0, 0};
    double took[MAX_STEPS], peaks[2 * MAX_STEPS], loss, norm = 0.0;
    AdamW adam = {0.9f, 0.999f, 1e-8f};
    int n_peaks = 0;
    if (config_from_spec(&config, spec) || stage_table(&stage, &config, 0, config.n_layers) ||
        stream_create(&stream, precision, omp_get_num_procs()) || batch_alloc(&data, batch, T) ||
        stage_plan(&stage, micro_batch, T, 1, 0) || stage_alloc(&stage, stream))
        return -1;
    float *square = (float *)device_alloc(sizeof(float) * 3 * 2048 * 2048);
    if (square == NULL) return -1;
    fill_weights(&stage);
    fill_batch(&data, config.vocab);
    for (int i = 0; i < 3; i++) matmul_peak(square, stream); // warm
    for (int step = -1; step < n_steps; step++) {            // the first step makes the kernels and touches the memory
        if (step == 0) memset(&times, 0, sizeof times);
        double start = seconds();
        if (stage_gradients(&stage, &data, micro_batch, &loss, &times, NULL, stream)) return -1;
        double middle = seconds();
        norm = stage_grad_norm(&stage, stream);
        stage_update(&stage, adam, 1e-5f, 0.01f, norm, 1.0f, step + 2, stream);
        times.optimizer += seconds() - middle;
        if (step < 0) continue;
        took[step] = seconds() - start;
        for (int i = 0; i < 2; i++) peaks[n_peaks++] = matmul_peak(square, stream);
    }
    double total = times.forward + times.backward + times.optimizer, step_time = median(took, n_steps);
    double gflops = 1e-9 * flops_per_token(&stage, T) * batch * T / step_time, peak = median(peaks, n_peaks);
    printf("%-5s T %-5d %-5s %9.1f tok/s %8.1f GFLOP/s %6.1f%% of %6.1f   forward %4.1f%% backward %4.1f%% optimizer "
           "%4.1f%%   step %.3f s\n",
           name, T, precision == PRECISION_BF16 ? "bf16" : "fp32", batch * T / step_time, gflops, 100.0 * gflops / peak,
           peak, 100.0 * times.forward / total, 100.0 * times.backward / total, 100.0 * times.optimizer / total,
           step_time);
    fflush(stdout);
    *step_seconds = step_time;
    if (!isfinite(loss) || !isfinite(norm)) return error_set("%s: loss %g, gradient norm %g", name, loss, norm);
    device_free(square);
    stage_free(&stage);
    stream_destroy(stream);
    batch_free(&data);
    return 0;
}

// Seconds of a call, the median of n.
#define MEDIAN_SECONDS(out, n, call)                                                                                   \
    do {                                                                                                               \
        double times_[n];                                                                                              \
        for (int i_ = 0; i_ < (n); i_++) {                                                                             \
            double start_ = seconds();                                                                                 \
            call;                                                                                                      \
            times_[i_] = seconds() - start_;                                                                           \
        }                                                                                                              \
        *(out) = median(times_, n);                                                                                    \
    } while (0)

// One op alone: repeats it and prints the median time with the rate that bounds it.
#define BENCH_OP(label, gflop, gbyte, call)                                                                            \
    do {                                                                                                               \
        double t_;                                                                                                     \
        MEDIAN_SECONDS(&t_, 9, call);                                                                                  \
        printf("  %-38s %8.3f ms %8.1f GFLOP/s %7.1f GB/s\n", label, 1e3 * t_, (gflop) / t_, (gbyte) / t_);            \
        fflush(stdout);                                                                                                \
    } while (0)

// Scores of one head: keys that queries see.
static double attention_pairs(const AttentionShape *s) {
    double pairs = 0.0;
    for (int t = 0; t < s->Tk; t++) pairs += t - attention_first(s, s->starts, t) + 1;
    return pairs;
}

// Attention over the joint rows q, both ways; the rates are of what has to be multiplied.
static void bench_attention(const char *mask, AttentionShape s, float *dq, float *out, const float *dout,
                            const float *q, Stream *stream) {
    char forward[64], backward[64];
    int C = s.NH * s.HD;
    float *lse = (float *)malloc(sizeof(float) * (size_t)s.Tk * (size_t)s.NH);
    double gflop = 4e-9 * attention_pairs(&s) * s.NH * s.HD;
    if (lse == NULL) return;
    snprintf(forward, sizeof forward, "attention%s forward", mask);
    snprintf(backward, sizeof backward, "attention%s backward", mask);
    BENCH_OP(forward, gflop, 0.0, attention_forward(out, lse, q, q + C, q + 2 * C, s, stream));
    BENCH_OP(backward, 2 * gflop, 0.0,
             attention_backward(dq, dq + C, dq + 2 * C, dout, out, lse, q, q + C, q + 2 * C, s, stream));
    free(lse);
}

static int bench_parts(Precision precision) {
    enum { B = 1, T = 1024, N = B * T, C = 768, NH = 12, HD = 64, F = 2048, QKV = 3 * C, V = 32000, CHUNK = 1024 };
    enum { DOCUMENT = 128, WINDOW = 128 };
    Stream *stream = NULL;
    AttentionShape shape = {B, T, T, NH, NH, HD, QKV, QKV, NULL, 0};
    if (stream_create(&stream, precision, omp_get_num_procs())) return -1;
    int64_t floats = (int64_t)V * C * 2 + (int64_t)CHUNK * V + (int64_t)N * (4 * F + 4 * QKV);
    float *base = (float *)device_alloc(sizeof(float) * (size_t)floats);
    int32_t *targets = (int32_t *)calloc(CHUNK, sizeof *targets);
    float loss[CHUNK], rstd[N];
    int32_t starts[T];
    if (base == NULL || targets == NULL) return -1;
    float *weight = base, *dweight = base + (size_t)V * C, *logits = dweight + (size_t)V * C;
    Weight w = {weight, NULL, 0};
    float *x = logits + (size_t)CHUNK * V, *y = x + (size_t)N * 2 * F, *q = y + (size_t)N * 2 * F;
    float *dq = q + (size_t)N * QKV, *z = dq + (size_t)N * QKV;
    for (int64_t i = 0; i < floats; i++) base[i] = (float)((uint64_t)i * 2654435761u >> 8 & 0xFFFF) / 65536.0f - 0.5f;
    double matmul = 2e-9 * N, nc = 4e-9 * N * C, nf = 4e-9 * N * F;
    printf("ops of a 124M layer, %d rows, T %d, %s:\n", N, T, precision == PRECISION_BF16 ? "bf16" : "fp32");
    BENCH_OP("matmul qkv forward", matmul * C * QKV, 0.0, matmul_forward(q, x, w, N, C, QKV, NULL, stream));
    BENCH_OP("matmul qkv backward", 2 * matmul * C * QKV, 0.0,
             matmul_backward(z, dweight, dq, x, w, N, C, QKV, 1, stream));
    BENCH_OP("matmul gate_up forward", matmul * C * 2 * F, 0.0, matmul_forward(y, x, w, N, C, 2 * F, NULL, stream));
    BENCH_OP("matmul gate_up backward", 2 * matmul * C * 2 * F, 0.0,
             matmul_backward(z, dweight, y, x, w, N, C, 2 * F, 1, stream));
    BENCH_OP("matmul down forward", matmul * C * F, 0.0, matmul_forward(z, y, w, N, F, C, z, stream));
    BENCH_OP("matmul down backward", 2 * matmul * C * F, 0.0, matmul_backward(y, dweight, z, y, w, N, F, C, 1, stream));
    // As large as in a model: far larger scores have probabilities that are no normal numbers, which are slow.
    for (int64_t i = 0; i < (int64_t)N * QKV; i++) q[i] = base[i];
    bench_attention("", shape, dq, z, x, q, stream);
    for (int t = 0; t < T; t++) starts[t] = t / DOCUMENT * DOCUMENT;
    shape.starts = starts;
    bench_attention(", documents of 128", shape, dq, z, x, q, stream);
    shape.starts = NULL, shape.window = WINDOW;
    bench_attention(", window of 128", shape, dq, z, x, q, stream);
    BENCH_OP("rmsnorm forward", 0.0, 2 * nc, rmsnorm_forward(z, rstd, x, weight, N, C, 1e-5f, stream));
    BENCH_OP("rmsnorm backward", 0.0, 6 * nc, rmsnorm_backward(z, dweight, x, y, weight, rstd, N, C, stream));
    BENCH_OP("swiglu forward", 0.0, 3 * nf, swiglu_forward(x, y, N, F, stream));
    BENCH_OP("swiglu backward", 0.0, 5 * nf, swiglu_backward(y, x, y, N, F, stream));
    BENCH_OP("matmul head forward", matmul * C * V, 0.0, matmul_forward(logits, x, w, N, C, V, NULL, stream));
    BENCH_OP("cross entropy", 0.0, 3 * 4e-9 * N * V, cross_entropy(loss, logits, targets, N, V, 1e-3f, 1, stream));
    BENCH_OP("matmul head backward", 2 * matmul * C * V, 0.0,
             matmul_backward(z, dweight, logits, x, w, N, C, V, 1, stream));
    device_free(base);
    free(targets);
    stream_destroy(stream);
    return 0;
}

// Filters the matrices of one 124M layer; gradients and factors lie where the caller says.
static void filter_layer(float *grad, const float *factors, int rank, Stream *stream) {
    enum { C = 768, F = 2048 };
    static const int shapes[][2] = {{C, C}, {C, C}, {C, C}, {C, C}, {F, C}, {F, C}, {C, F}};
    for (int i = 0; i < 7; i++) {
        int m = shapes[i][0], n = shapes[i][1], small = m < n ? m : n, r = rank < small ? rank : small;
        const float *u = factors, *v = u + (size_t)m * r, *d = v + (size_t)n * r;
        spectral_filter(grad, u, d, v, m, n, r, 0.3f, stream);
        grad += (size_t)m * n;
    }
}

// What klt needs beside a codec: rows as the boundaries of a step might have them, and the tables learned from them.
typedef struct {
    int n, C, V;           // rows, values of a row, tokens there are
    float *embed;          // (V, C)
    uint32_t *tokens;      // (n)
    float *rows[2];        // (n, C) states and gradients
    KltMoments moments[2]; // of them
    KltMoments embedding;
    KltTable tables[2];
    KltWork work;
    double adding, learning; // seconds: moments of the n rows of both directions, both tables
} KltBench;

static void klt_bench_free(KltBench *bench) {
    for (int d = 0; d < 2; d++) {
        klt_moments_free(&bench->moments[d]);
        klt_table_free(&bench->tables[d]);
        device_free(bench->rows[d]);
    }
    klt_moments_free(&bench->embedding);
    klt_work_free(&bench->work);
    device_free(bench->embed);
    free(bench->tokens);
}

// rows (n, C): normals of variance 1/k for component k, turned by mix (C, C).
static void klt_bench_rows(float *rows, float *normals, const float *mix, int n, int C, uint32_t sub, Stream *stream) {
    rand_normal(normals, (int64_t)n * C, 1, RAND_TEST, sub);
    for (int i = 0; i < n * C; i++) normals[i] /= sqrtf((float)(i % C + 1));
    matmul_product(rows, C, normals, C, 0, mix, C, 1, n, C, C, 0, 0, stream);
}

static int klt_bench_data(KltBench *bench, Stream *stream) {
    size_t wide = (size_t)bench->n * (size_t)bench->C, square = (size_t)bench->C * (size_t)bench->C;
    float *mix = (float *)device_alloc(sizeof(float) * (square + wide));
    bench->embed = (float *)device_alloc(sizeof(float) * (size_t)bench->V * (size_t)bench->C);
    bench->tokens = (uint32_t *)malloc(sizeof(uint32_t) * (size_t)bench->n);
    if (mix == NULL || bench->embed == NULL || bench->tokens == NULL) return -1;
    rand_normal(mix, (int64_t)square, 1, RAND_TEST, 2);
    rand_normal(bench->embed, (int64_t)bench->V * bench->C, 1, RAND_TEST, 3);
    for (int t = 0; t < bench->n; t++)
        bench->tokens[t] = rand_block(1, RAND_TEST, 4, (uint64_t)t).v[0] % (uint32_t)bench->V;
    int failed = orthonormalize(mix, bench->C, bench->C, stream);
    for (int d = 0; d < 2; d++) {
        if ((bench->rows[d] = (float *)device_alloc(sizeof(float) * wide)) == NULL) return -1;
        klt_bench_rows(bench->rows[d], mix + square, mix, bench->n, bench->C, 5 + (uint32_t)d, stream);
    }
    device_free(mix);
    return failed;
}

// Moments of both directions, as anchor_see adds them.
static int klt_bench_add(KltBench *bench, Stream *stream) {
    KltMoments *m = bench->moments;
    float *e = (float *)device_alloc(sizeof(float) * (size_t)bench->n * (size_t)bench->C);
    if (e == NULL) return -1;
    embedding_forward(e, bench->tokens, bench->embed, bench->n, bench->C, stream);
    double start = seconds();
    int failed = klt_moments_add(&bench->embedding, e, NULL, NULL, bench->n, 1, 0, &bench->work, stream) ||
                 klt_moments_add(&m[0], bench->rows[0], e, bench->tokens, bench->n, 4, 0, &bench->work, stream) ||
                 klt_moments_add(&m[1], bench->rows[1], NULL, NULL, bench->n, 4, 1, &bench->work, stream);
    bench->adding = seconds() - start;
    device_free(e);
    return failed;
}

// The tables of p 0.95.
static int klt_bench_learn(KltBench *bench, double budget, Stream *stream) {
    double start = seconds();
    for (int d = 0; d < 2; d++) {
        KltSettings settings = {1, d, 0, 0.45f, d ? KLT_FLOOR_BACKWARD : KLT_FLOOR, 1e-3, 8.0 * budget, 1, 1.0};
        KltReport report;
        KltSources from = {&bench->moments[d], d ? NULL : &bench->embedding, d ? NULL : &bench->moments[1],
                           bench->embed};
        int64_t n_bytes = 0;
        unsigned char *blob = klt_learn(&from, &settings, &bench->work, &n_bytes, &report, stream);
        int failed = blob == NULL || klt_table_load(&bench->tables[d], blob, n_bytes, bench->C, stream);
        free(blob);
        if (failed) return -1;
    }
    bench->learning = seconds() - start;
    return 0;
}

static int klt_bench_init(KltBench *bench, int n, int C, int V, double budget, Stream *stream) {
    bench->n = n, bench->C = C, bench->V = V;
    if (klt_moments_alloc(&bench->moments[0], C, 1, 1024) || klt_moments_alloc(&bench->moments[1], C, 0, 1024) ||
        klt_moments_alloc(&bench->embedding, C, 0, 0) || klt_bench_data(bench, stream) ||
        klt_bench_add(bench, stream) || klt_bench_add(bench, stream)) // the first makes the kernels
        return -1;
    return klt_bench_learn(bench, budget, stream);
}

// Seconds to code n rows' symbols of both directions, and to read them: what is on the CPU whatever the device.
static int klt_bench_coder(KltBench *bench, double budget, int n, unsigned char *message, int64_t cap, double *writing,
                           double *reading, Stream *stream) {
    KltWork own = {{NULL, 0}, {NULL, 0}, NULL, 0};
    int failed = 0;
    *writing = *reading = 0.0;
    for (int d = 0; d < 2 && !failed; d++) {
        KltEnd end = {&bench->tables[d], &bench->work, bench->embed, budget, {0, 0}};
        KltMessage which = {1, 0, 1, 3, 0};
        KltSending sending;
        KltCoding arrived;
        double took;
        memset(&sending, 0, sizeof sending);
        memset(&arrived, 0, sizeof arrived);
        failed = klt_encode_begin(&end, &sending, &bench->work, &which, bench->tokens, bench->rows[d], n, bench->C,
                                  message, cap, stream);
        if (failed) break;
        MEDIAN_SECONDS(&took, 9, klt_coding_write(&sending.coding));
        *writing += took;
        failed = sending.coding.n_bytes < 0 ||
                 klt_decode_begin(&end, &arrived, &own, &which, message, sending.coding.n_bytes, n, stream->threads);
        if (failed) break;
        MEDIAN_SECONDS(&took, 9, klt_coding_read(&arrived));
        *reading += took;
        failed = arrived.failed;
    }
    klt_work_free(&own);
    return failed;
}

// Both ways of a step's micro-batches of N rows over a boundary, through one pair of ends: from[direction] as it
// arrives at x. tables: for klt, else NULL.
static int bench_codec(const Codec *codec, float *const from[2], float *x, int N, int C, int T, unsigned char *message,
                       int64_t cap, KltBench *tables, double *took, Stream *stream) {
    CodecEnd ends[2];
    CodecShape shape = {C, N, T, 1, N / T};
    CodecContext context = codec_context(1, 0, 0, 3, 1);
    int64_t *samples = (int64_t *)calloc((size_t)(N / T), sizeof *samples), n_bytes;
    int failed = samples == NULL || codec_end_init(&ends[0], codec, shape) || codec_end_init(&ends[1], codec, shape);
    if (failed) return error_set("out of memory");
    for (int s = 0; s < N / T; s++) samples[s] = s;
    context.training = 1, context.T = T, context.samples = samples;
    for (int i = 0; i < 4 && tables != NULL; i++) {
        KltEnd *end = &ends[i / 2].klt[i % 2];
        end->table = &tables->tables[i % 2], end->work = &tables->work, end->embed = tables->embed;
        context.tokens = tables->tokens;
    }
    for (int warm = 1; warm >= 0; warm--) // the first visit of aqsgd is not the one that counts
        MEDIAN_SECONDS(took, 9, {
            for (int back = 0; back < 2; back++) {
                context.direction = (CodecDirection)back;
                n_bytes = codec_encode(codec, &ends[back], &context, from[back], N, C, message, cap, stream);
                failed |=
                    n_bytes < 0 || codec_decode(codec, &ends[1 - back], &context, message, n_bytes, x, N, C, stream);
            }
        });
    for (int i = 0; i < 2; i++) codec_end_free(&ends[i]);
    free(samples);
    return failed;
}

// The step that `bench mesh` measures against: 4 stages, 4 micro-batches of 4 sequences of 256.
enum { MESH_C = 768, MESH_F = 2048, MESH_L = 12, MESH_N = 1024, MESH_T = 256, MESH_V = 32000 };
enum { MESH_BOUNDARIES = 3, MESH_MICRO = 4, MESH_RANK = 128 };

static void bench_share(const char *label, double took, double step) {
    printf("  %-34s %8.1f ms a step, %5.2f%% of it\n", label, 1e3 * took, 100.0 * took / step);
    fflush(stdout);
}

// klt's parts of `took` seconds a boundary and micro-batch, and what it adds to an anchor pass.
static int bench_klt_parts(KltBench *bench, double budget, unsigned char *message, int64_t cap, double took,
                           double step, Stream *stream) {
    double writing, reading, n = MESH_MICRO * MESH_BOUNDARIES;
    char label[64];
    if (klt_bench_coder(bench, budget, MESH_N, message, cap, &writing, &reading, stream)) return -1;
    snprintf(label, sizeof label, "    products, ops, %d+%d components", bench->tables[0].head.K,
             bench->tables[1].head.K);
    bench_share(label, n * (took - writing - reading), step);
    bench_share("    entropy coder, writing", n * writing, step);
    bench_share("    entropy coder, reading", n * reading, step);
    printf("  %-34s %8.1f ms an anchor pass of %d tokens, tables %.1f ms, beside the fast circuit\n", "klt's moments",
           1e3 * MESH_BOUNDARIES * bench->adding, bench->n, 1e3 * MESH_BOUNDARIES * bench->learning);
    return 0;
}

// Each codec over the boundaries of a step. values (N, C): what those that learn nothing are given; x (N, C).
static int bench_codecs(float *values, float *x, double step, Stream *stream) {
    int64_t cap = (int64_t)sizeof(float) * MESH_N * MESH_C;
    unsigned char *message = (unsigned char *)malloc((size_t)cap);
    double budget = 0.05 * 2 * MESH_C, took;
    KltBench klt;
    Codec codec;
    memset(&klt, 0, sizeof klt);
    int failed = message == NULL || klt_bench_init(&klt, MESH_MICRO * MESH_N, MESH_C, MESH_V, budget, stream);
    for (int kind = 0; kind < CODEC_KINDS && !failed; kind++) {
        char label[64];
        int is_klt = kind == CODEC_KLT;
        int takes_budget = kind == CODEC_MASK || kind == CODEC_TOPK || kind == CODEC_BOTTLENECK || is_klt;
        float *const same[2] = {values, values};
        codec_init(&codec, MESH_C, takes_budget ? 0.95f : 0.0f, MASK_SCALE_NONE, WIRE_BF16, 1);
        codec.kind = (CodecKind)kind;
        failed = bench_codec(&codec, is_klt ? klt.rows : same, x, MESH_N, MESH_C, MESH_T, message, cap,
                             is_klt ? &klt : NULL, &took, stream);
        snprintf(label, sizeof label, "codec %s, 3 boundaries", codec_name(codec.kind));
        bench_share(label, MESH_MICRO * MESH_BOUNDARIES * took, step);
        if (is_klt && !failed) failed = bench_klt_parts(&klt, budget, message, cap, took, step, stream);
    }
    klt_bench_free(&klt);
    free(message);
    return failed ? -1 : 0;
}

static int bench_mesh(Precision precision) {
    enum { C = MESH_C, F = MESH_F, RANK = MESH_RANK };
    double step, took;
    Stream *stream = NULL;
    if (bench_model("124M", "124m", 16, MESH_T, 4, precision, 3, &step)) return -1;
    if (stream_create(&stream, precision, omp_get_num_procs())) return -1;
    size_t grads = (size_t)4 * C * C + (size_t)3 * F * C, factors = (size_t)(C + F) * C + C;
    size_t floats = grads + factors + (size_t)3 * F * C;
    float *base = (float *)device_alloc(sizeof(float) * floats), *x = base + grads + factors;
    if (base == NULL) return error_set("out of memory");
    for (size_t i = 0; i < floats; i++)
        base[i] = 0.02f * ((float)((uint64_t)i * 2654435761u >> 8 & 0xFFFF) / 65536.0f - 0.5f);
    if (bench_codecs(base, x, step, stream)) return -1; // while base is as it was
    for (int full = 0; full < 2; full++) {
        MEDIAN_SECONDS(&took, 5, filter_layer(base, base + grads, full ? C : RANK, stream));
        bench_share(full ? "spectral filter, full rank" : "spectral filter, rank 128", MESH_L * took, step);
    }
    float *u = (float *)malloc(sizeof(float) * F * RANK), *v = (float *)malloc(sizeof(float) * F * RANK), s[RANK];
    if (u == NULL || v == NULL) return error_set("out of memory");
    double square, tall;
    int failed = svd_truncated(u, s, v, base, C, C, RANK, 0, 1, 0, stream);
    MEDIAN_SECONDS(&square, 5, failed |= svd_truncated(u, s, v, base, C, C, RANK, 1, 1, 0, stream));
    failed |= svd_truncated(u, s, v, base, F, C, RANK, 0, 1, 0, stream);
    MEDIAN_SECONDS(&tall, 5, failed |= svd_truncated(u, s, v, base, F, C, RANK, 1, 1, 0, stream));
    printf("  %-34s %8.1f ms an anchor pass, beside the fast circuit\n", "warm SVDs of rank 128",
           1e3 * MESH_L * (4.0 * square + 3.0 * tall));
    free(u);
    free(v);
    device_free(base);
    stream_destroy(stream);
    return failed;
}

// ---------------------------------------------------------------------------------------------------------------------
// Rotation

enum { ROTATE_ROUNDS = 3, ROTATE_EVERY = 10, ROTATE_LAYERS = 12, ROTATE_TOKENS = 1024, ROTATE_WAYS = 4 };

// A whole 124M model, and by rounds: seconds of a token's forward and backward, and of an AdamW update.
typedef struct {
    Stage stage;
    Stream *stream;
    Batch batch;
    double token[ROTATE_ROUNDS], update[ROTATE_ROUNDS];
} RotateModel;

// A layer that one way of rotating steps, and by rounds: seconds of a step on average over ROTATE_EVERY, of an AdamW
// step of the same values, of a step's products and of its passes over the values; GFLOP/s of the product of 2048^3.
typedef struct {
    Stage stage;
    Stream *stream;
    int64_t step;
    double first; // seconds of the first step, which finds the bases
    double rotated[ROTATE_ROUNDS], plain[ROTATE_ROUNDS], products[ROTATE_ROUNDS], passes[ROTATE_ROUNDS];
    double peak[ROTATE_ROUNDS];
} RotateLayer;

static const AdamW rotate_adam = {0.9f, 0.999f, 1e-8f};

static int rotate_model_open(RotateModel *model, Precision precision) {
    Config config;
    if (config_from_spec(&config, "124m") || stage_table(&model->stage, &config, 0, config.n_layers) ||
        stream_create(&model->stream, precision, omp_get_num_procs()) || batch_alloc(&model->batch, 1, ROTATE_TOKENS) ||
        stage_plan(&model->stage, 1, ROTATE_TOKENS, 1, 0) || stage_alloc(&model->stage, model->stream))
        return -1;
    fill_weights(&model->stage);
    fill_batch(&model->batch, config.vocab);
    return 0;
}

// round < 0: to warm up.
static int rotate_model_round(RotateModel *model, int round) {
    double loss, start = seconds();
    if (stage_gradients(&model->stage, &model->batch, 1, &loss, NULL, NULL, model->stream)) return -1;
    double middle = seconds(), norm = stage_grad_norm(&model->stage, model->stream);
    stage_update(&model->stage, rotate_adam, 1e-5f, 0.01f, norm, 1.0f, round + 2, model->stream);
    if (round < 0) return 0;
    model->token[round] = (middle - start) / ROTATE_TOKENS;
    model->update[round] = seconds() - middle;
    return 0;
}

static void rotate_layer_gradients(RotateLayer *layer) {
    uint64_t factor = 2654435761u + 2 * (uint64_t)layer->step;
#pragma omp parallel for
    for (int64_t i = 0; i < layer->stage.arena_floats; i++)
        layer->stage.grads[i] = 1e-3f * ((float)((uint64_t)i * factor >> 8 & 0xFFFF) / 65536.0f - 0.5f);
}

static int rotate_layer_open(RotateLayer *layer, int way) {
    Config config;
    Optimizer optimizer = {OPTIMIZER_ROTATE,
                           way / 2 ? ROTATE_1ST : ROTATE_2ND,
                           way % 2 ? ROTATE_UNI : ROTATE_BI,
                           REFRESH_UNIFORM,
                           ROTATE_EVERY,
                           4096};
    if (config_from_spec(&config, "d=768,layers=1,heads=12,kv=12,ffn=2048,vocab=58,ctx=8") ||
        stage_table(&layer->stage, &config, 0, 1) || stream_create(&layer->stream, PRECISION_FP32, omp_get_num_procs()))
        return -1;
    layer->stage.optimizer = optimizer, layer->stage.n_stages = 1;
    if (stage_plan(&layer->stage, 1, 8, 1, 0) || stage_alloc(&layer->stage, layer->stream)) return -1;
    fill_weights(&layer->stage);
    return 0;
}

// A step of the layer; seconds.
static double rotate_layer_step(RotateLayer *layer) {
    layer->step++;
    rotate_layer_gradients(layer);
    double start = seconds();
    stage_update(&layer->stage, rotate_adam, 1e-5f, 0.01f, 1.0, 1.0f, layer->step, layer->stream);
    return seconds() - start;
}

static double rotate_layer_flops(const Stage *stage) {
    double flops = 0.0;
    for (int i = 0; i < stage->n_tensors; i++) {
        const Tensor *t = &stage->tensors[i];
        int m = (int)t->shape[0], n = (int)t->shape[1], second = stage->optimizer.source == ROTATE_2ND;
        RotateSides sides = rotate_sides(&stage->optimizer, m, n);
        if (!t->block) continue;
        flops += rotate_product_flops(sides, second, m, n);
    }
    return flops;
}

// A step without a refresh by its parts, as rotate_update_group takes it: adds the seconds of a matrix.
static int rotate_parts(RotateLayer *layer, const Tensor *t, float *state, double *products, double *passes) {
    Stage *stage = &layer->stage;
    Stream *stream = layer->stream;
    RotateSource source = stage->optimizer.source;
    int m = (int)t->shape[0], n = (int)t->shape[1];
    RotateSides sides = rotate_sides(&stage->optimizer, m, n);
    RotateBasis basis = rotate_basis(state, sides, source, m, n);
    RotateGroup one = {m, n, 1, t->n, rotate_state_floats(sides, source, m, n)};
    RotateWork work;
    AdamWStep at = adamw_step(rotate_adam, 1e-5f, 0.01f, 1.0f, layer->step);
    const float *grad = stage->grads + t->offset;
    if (rotate_work(&work, sides, m, n, 1, stream)) return -1;
    float *update = sides.left && sides.right ? work.first : work.second;
    double times[5];
    times[0] = seconds();
    rotate_moments(&basis, grad, &one, at.b2, 1.0f, work.square, stream);
    rotate_turn(work.first, grad, t->n, work.second, &basis, &one, 0, stream);
    times[1] = seconds();
    rotate_direction(work.first, stage->m + t->offset, stage->v + t->offset, at, 0, t->n, stream);
    times[2] = seconds();
    rotate_turn(update, work.first, t->n, work.second, &basis, &one, 1, stream);
    times[3] = seconds();
    rotate_apply(stage->params + t->offset, update, at.keep, t->n, stream);
    times[4] = seconds();
    *products += times[1] - times[0] + times[3] - times[2];
    *passes += times[2] - times[1] + times[4] - times[3];
    return 0;
}

// square: three of 2048^2.
static int rotate_layer_round(RotateLayer *layer, int round, float *square) {
    Stage *stage = &layer->stage;
    double cycle = 0.0, products = 0.0, passes = 0.0, peaks[3];
    for (int i = 0; i < ROTATE_EVERY; i++) cycle += rotate_layer_step(layer); // each matrix is refreshed once
    layer->rotated[round] = cycle / ROTATE_EVERY;
    for (int i = 0; i < stage->n_tensors; i++)
        if (stage->tensors[i].block &&
            rotate_parts(layer, &stage->tensors[i], stage->rotation + rotation_floats(stage, i), &products, &passes))
            return -1;
    layer->products[round] = products, layer->passes[round] = passes;
    for (int i = 0; i < 3; i++) peaks[i] = matmul_peak(square, layer->stream);
    layer->peak[round] = median(peaks, 3);
    stage->optimizer.kind = OPTIMIZER_ADAMW;
    MEDIAN_SECONDS(&layer->plain[round], 5,
                   { stage_update(stage, rotate_adam, 1e-5f, 0.01f, 1.0, 1.0f, layer->step, layer->stream); });
    stage->optimizer.kind = OPTIMIZER_ROTATE;
    return stream_check(layer->stream);
}

// What a rotation adds to an AdamW step of so many tokens, in percent.
static double rotate_share(const RotateLayer *layer, const RotateModel *model, double tokens) {
    double shares[ROTATE_ROUNDS];
    for (int r = 0; r < ROTATE_ROUNDS; r++)
        shares[r] = 100.0 * ROTATE_LAYERS * (layer->rotated[r] - layer->plain[r]) /
                    (tokens * model->token[r] + model->update[r]);
    return median(shares, ROTATE_ROUNDS);
}

static void rotate_print(RotateLayer *layer, int way, const RotateModel *models) {
    static const char *const names[ROTATE_WAYS] = {"(2nd, bi)", "(2nd, uni)", "(1st, bi)", "(1st, uni)"};
    double products = median(layer->products, ROTATE_ROUNDS), passes = median(layer->passes, ROTATE_ROUNDS);
    double gflops[ROTATE_ROUNDS], of_peak[ROTATE_ROUNDS], extra[ROTATE_ROUNDS], L = ROTATE_LAYERS;
    double shares[2][2];
    for (int p = 0; p < 2; p++) // before the rounds are sorted
        for (int t = 0; t < 2; t++)
            shares[p][t] = models[p].stream != NULL ? rotate_share(layer, &models[p], t ? 4096.0 : 65536.0) : NAN;
    for (int r = 0; r < ROTATE_ROUNDS; r++) {
        gflops[r] = 1e-9 * rotate_layer_flops(&layer->stage) / layer->products[r];
        of_peak[r] = 100.0 * gflops[r] / layer->peak[r], extra[r] = layer->rotated[r] - layer->plain[r];
    }
    double added = median(extra, ROTATE_ROUNDS);
    printf("  %-10s %7.3f s: products %7.3f, passes %6.3f, refreshes %7.3f   %6.1f GFLOP/s %5.1f%% of peak   65,536 "
           "tokens "
           "fp32 %5.1f%% bf16 %5.1f%%   4,096 tokens fp32 %5.1f%% bf16 %5.1f%%   first %.1f s\n",
           names[way], L * added, L * products, L * passes,
           L * (median(layer->rotated, ROTATE_ROUNDS) - products - passes), median(gflops, ROTATE_ROUNDS),
           median(of_peak, ROTATE_ROUNDS), shares[0][0], shares[1][0], shares[0][1], shares[1][1], L * layer->first);
    fflush(stdout);
}

static int bench_rotate(void) {
    static RotateModel models[2];
    static RotateLayer layers[ROTATE_WAYS];
    float *square = (float *)device_alloc(sizeof(float) * 3 * 2048 * 2048);
    int n_models = device_has_bf16() ? 2 : 1;
    if (square == NULL) return -1;
    for (int p = 0; p < n_models; p++)
        if (rotate_model_open(&models[p], (Precision)p) || rotate_model_round(&models[p], -1)) return -1;
    for (int way = 0; way < ROTATE_WAYS; way++) {
        if (rotate_layer_open(&layers[way], way)) return -1;
        layers[way].first = rotate_layer_step(&layers[way]);
        for (int i = 0; i < ROTATE_EVERY; i++) rotate_layer_step(&layers[way]); // makes the kernels of refreshes
    }
    for (int r = 0; r < ROTATE_ROUNDS; r++) {
        for (int way = 0; way < ROTATE_WAYS; way++) {
            for (int p = 0; p < n_models && way == 0; p++)
                if (rotate_model_round(&models[p], r)) return -1;
            if (rotate_layer_round(&layers[way], r, square)) return -1;
        }
    }
    printf("rotation of 124M, a layer times %d, refreshes every %d steps, %d threads; what it adds to an AdamW step:\n",
           ROTATE_LAYERS, ROTATE_EVERY, layers[0].stream->threads);
    for (int way = 0; way < ROTATE_WAYS; way++) rotate_print(&layers[way], way, models);
    for (int p = 0; p < n_models; p++)
        printf("  %s: a token's forward and backward %.3f ms, an AdamW update %.3f s\n", p ? "bf16" : "fp32",
               1e3 * median(models[p].token, ROTATE_ROUNDS), median(models[p].update, ROTATE_ROUNDS));
    for (int p = 0; p < n_models; p++) stage_free(&models[p].stage), stream_destroy(models[p].stream);
    for (int p = 0; p < n_models; p++) batch_free(&models[p].batch);
    for (int way = 0; way < ROTATE_WAYS; way++) stage_free(&layers[way].stage), stream_destroy(layers[way].stream);
    device_free(square);
    return 0;
}

// Seconds of all processors that this process has used.
static double bench_cpu(void) {
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return (double)(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
           1e-6 * (double)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec);
}

// Memory of this process that is there, bytes.
static int64_t bench_resident(void) {
    long long size = 0, resident = 0;
    FILE *file = fopen("/proc/self/statm", "re");
    if (file == NULL) return 0;
    if (fscanf(file, "%lld %lld", &size, &resident) != 2) resident = 0;
    fclose(file);
    return resident * sysconf(_SC_PAGESIZE);
}

// Waits for an event of a kind and gives its sender; others are thrown away. NET_NOBODY: none came.
static uint32_t bench_net_event(Net *net, int kind) {
    NetEvent event;
    for (double until = seconds() + 60.0; seconds() < until;) {
        if (net_wait(net, 1.0) < 0) break;
        if (net_next(net, &event) != 1) continue;
        free(event.data);
        if (event.kind == kind) return event.from;
    }
    error_set("the network: an event has not come");
    return NET_NOBODY;
}

static int bench_net_stream(void) {
    enum { SIZE = 8 << 20, MESSAGES = 32 };
    char text[NET_TOKEN];
    NetKeys keys;
    NetToken token;
    NetStatus status;
    Net *joiner = NULL, *host = net_keys_make(&keys) ? NULL : net_host("tcp://127.0.0.1:*", &keys, NULL);
    unsigned char *bytes = (unsigned char *)calloc(1, SIZE);
    if (host == NULL || bytes == NULL || net_token_print(text, sizeof text, &keys, net_endpoint(host)) ||
        net_token_parse(&token, text) || (joiner = net_join(&token, NULL, NULL)) == NULL ||
        net_admit(host, bench_net_event(host, NET_HELLO), 1) || bench_net_event(joiner, NET_ADMITTED) != 1)
        return -1;
    double start = seconds(), cpu = bench_cpu();
    for (int i = 0; i < MESSAGES; i++)
        if (net_send(joiner, 0, 0, (uint64_t)i, bytes, SIZE)) return -1;
    for (int i = 0; i < MESSAGES; i++)
        if (bench_net_event(host, NET_MESSAGE) != 1) return -1;
    double took = seconds() - start, gigabytes = 1e-9 * SIZE * MESSAGES;
    cpu = bench_cpu() - cpu;
    if (net_status(joiner, 0, &status)) return -1;
    printf("network: %.0f MB over loopback in %.2f s: %.0f MB/s, %.2f s of processors a GB for both ends, %.1f MB sent "
           "again\n",
           1e3 * gigabytes, took, 1e3 * gigabytes / took, cpu / gigabytes, 1e-6 * (double)status.resent);
    net_close(joiner);
    net_close(host);
    free(bytes);
    return 0;
}

enum { BENCH_JOINERS = 64 };

// The joiners' process: they join, and are there until the pipe is closed.
static void bench_net_joiners(int from) {
    char text[NET_TOKEN];
    NetToken token;
    if (read(from, text, sizeof text) != (ssize_t)sizeof text || net_token_parse(&token, text)) _exit(1);
    for (int i = 0; i < BENCH_JOINERS; i++)
        if (net_join(&token, NULL, NULL) == NULL) _exit(1);
    _exit(read(from, text, 1) == 0 ? 0 : 1);
}

// How long the coordinator's processor works for idle joiners, and what memory they take there.
static int bench_net_idle(void) {
    int ends[2];
    char text[NET_TOKEN] = "";
    NetKeys keys;
    if (pipe(ends) != 0) return error_set("pipe: %s", strerror(errno));
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        close(ends[1]);
        bench_net_joiners(ends[0]);
    }
    close(ends[0]);
    int64_t resident = bench_resident();
    Net *host = net_keys_make(&keys) ? NULL : net_host("tcp://127.0.0.1:*", &keys, NULL);
    if (child < 0 || host == NULL || net_token_print(text, sizeof text, &keys, net_endpoint(host)) ||
        write(ends[1], text, sizeof text) != (ssize_t)sizeof text)
        return -1;
    for (uint32_t id = 1; id <= BENCH_JOINERS; id++)
        if (net_admit(host, bench_net_event(host, NET_HELLO), id)) return -1;
    double rest = seconds() + 8.0, start = 0.0, cpu = 0.0; // until rates are those of rest, and 10 s then
    while (start == 0.0 || seconds() < start + 10.0) {
        net_wait(host, 1.0);
        if (start == 0.0 && seconds() > rest) start = seconds(), cpu = bench_cpu();
    }
    cpu = (bench_cpu() - cpu) / (seconds() - start);
    NetStatus status;
    int64_t up = 0, down = 0;
    for (uint32_t id = 1; id <= BENCH_JOINERS; id++) {
        if (net_status(host, id, &status)) return -1;
        if (status.silence > 3.0) return error_set("the network: joiner %u is silent", id);
        up += (int64_t)status.up_rate, down += (int64_t)status.down_rate;
    }
    printf(
        "network: %d idle joiners: the coordinator uses %.2f %% of a processor, %.1f MB, %lld bytes/s up, %lld down\n",
        BENCH_JOINERS, 1e2 * cpu, 1e-6 * (double)(bench_resident() - resident), (long long)up, (long long)down);
    net_close(host);
    close(ends[1]);
    waitpid(child, NULL, 0);
    return 0;
}

// Seconds of processors for a text, the whole at once or each line alone. *n_ids: how many ids; -1: an error.
static double bench_encode(const Tokenizer *tokenizer, uint32_t *ids, const FileMap *text, int by_lines,
                           int64_t *n_ids) {
    const char *at = (const char *)text->data, *end = at + text->size;
    double start = bench_cpu();
    for (*n_ids = 0; at < end;) {
        const char *line = by_lines ? (const char *)memchr(at, '\n', (size_t)(end - at)) : NULL;
        const char *stop = line != NULL ? line + 1 : end;
        int64_t n = tokenizer_encode(tokenizer, ids, at, stop - at);
        if (n < 0) {
            *n_ids = -1;
            break;
        }
        *n_ids += n;
        at = stop;
    }
    return bench_cpu() - start;
}

static double bench_split(const Tokenizer *tokenizer, const FileMap *text) {
    const Splitter *splitter = &tokenizer->model->splitter;
    pcre2_match_data *match = pcre2_match_data_create(1, NULL);
    double start = bench_cpu();
    int64_t from, to = 0, n = (int64_t)text->size;
    while (match != NULL &&
           splitter_find(splitter, splitter->n_steps - 1, (const char *)text->data, n, to, match, &from, &to) > 0) {
    }
    pcre2_match_data_free(match);
    return bench_cpu() - start;
}

// paths: a tokenizer.json and a text.
static int bench_tokenizer(char **paths) {
    enum { RUNS = 7 };
    Tokenizer tokenizer;
    FileMap json, text;
    double times[RUNS];
    int64_t n_ids = 0;
    if (file_map(&json, paths[0]) || file_map(&text, paths[1])) return -1;
    json_t *files = json_object();
    json_object_set_new(files, "tokenizer.json", json_stringn((const char *)json.data, json.size));
    double start = bench_cpu();
    if (tokenizer_open(&tokenizer, files, 1 << 20) || tokenizer_takes_text(&tokenizer, paths[0])) return -1;
    printf("tokenizer: %s opens in %.0f ms\n", paths[0], 1e3 * (bench_cpu() - start));
    uint32_t *ids = (uint32_t *)malloc(sizeof *ids * (size_t)tokenizer_room(&tokenizer, (int64_t)text.size));
    if (ids == NULL) return error_set("out of memory for the benchmark");
    for (int by_lines = 0; by_lines < 2; by_lines++) {
        bench_encode(&tokenizer, ids, &text, by_lines, &n_ids); // the memory is there then
        for (int i = 0; i < RUNS; i++) times[i] = bench_encode(&tokenizer, ids, &text, by_lines, &n_ids);
        if (n_ids < 0) return -1;
        printf("tokenizer: %.1f MB %s, %lld ids: %.1f MB/s\n", 1e-6 * (double)text.size,
               by_lines ? "line by line" : "at once", (long long)n_ids, 1e-6 * (double)text.size / median(times, RUNS));
    }
    int n_steps = tokenizer.model->splitter.n_steps;
    for (int i = 0; i < RUNS && n_steps > 0; i++) times[i] = bench_split(&tokenizer, &text);
    if (n_steps > 0)
        printf("tokenizer: its last split alone: %.1f MB/s\n", 1e-6 * (double)text.size / median(times, RUNS));
    free(ids);
    tokenizer_free(&tokenizer);
    json_decref(files);
    file_unmap(&json);
    file_unmap(&text);
    return 0;
}

static int bench_named(int argc, char **argv, const char *name) {
    for (int i = 1; i < argc; i++)
        if (strcmp(argv[i], name) == 0) return 1;
    return 0;
}

// Of two alternatives both are wanted unless exactly one is named.
static int bench_either(int argc, char **argv, const char *name, const char *other) {
    return bench_named(argc, argv, name) || !bench_named(argc, argv, other);
}

int main(int argc, char **argv) {
    int result = 0;
    if (argc == 4 && strcmp(argv[1], "tokenizer") == 0) {
        result = bench_tokenizer(argv + 2);
        if (result != 0) printf("bench: %s\n", error_message);
        return result != 0;
    }
    int parts = bench_named(argc, argv, "parts"), small = bench_named(argc, argv, "124m");
    int large = bench_named(argc, argv, "1b"), mesh = bench_named(argc, argv, "mesh");
    int rotate = bench_named(argc, argv, "rotate"), net = bench_named(argc, argv, "net");
    int all = !parts && !small && !large && !mesh && !rotate && !net;
    double step = 0.0;
    for (int p = 0; p < 2 && result == 0; p++) {
        Precision precision = (Precision)p;
        if (precision == PRECISION_BF16 && !device_has_bf16()) continue;
        if (!bench_either(argc, argv, p ? "bf16" : "fp32", p ? "fp32" : "bf16")) continue;
        if (parts) result = bench_parts(precision);
        if (result == 0 && (all || small) && bench_either(argc, argv, "256", "1024"))
            result = bench_model("124M", "124m", 16, 256, 4, precision, 3, &step);
        if (result == 0 && (all || small) && bench_either(argc, argv, "1024", "256"))
            result = bench_model("124M", "124m", 4, 1024, 1, precision, 3, &step);
        if (result == 0 && (all || mesh)) result = bench_mesh(precision);
        if (result == 0 && (all || large)) result = bench_model("1B", "llama-3.2-1b", 1, 128, 1, precision, 1, &step);
    }
    if (result == 0 && (all || rotate)) result = bench_rotate();
    if (result == 0 && net) result = bench_net_stream() || bench_net_idle() ? -1 : 0;
    if (result != 0) printf("bench: %s\n", error_message);
    return result != 0;
}
