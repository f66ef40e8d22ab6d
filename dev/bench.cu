// Speed against this machine's own limits: `make bench`, or build/bench [124m] [1b] [parts] [mesh] [256|1024]
// [fp32|bf16].
//
//   124m   d 768, 12 layers, 12 heads, ffn 2048, vocabulary 32000; T 256 and 1024, 4,096 tokens a step, both precisions
//   1b     the Llama-3.2-1B shape, random weights, B 1 T 128: one step, after one to warm up
//   parts  each op of a 124M layer alone
//   mesh   what the mesh adds to a fast step of 124M, T 256, 4,096 tokens: filter of rank 128 and full, each codec but
//          klt over three boundaries both ways (at p 0.95 those that take a budget), one anchor pass's SVDs; each as a
//          share of the step timed in the same run
// Columns: tok/s and GFLOP/s are medians over the steps; % of peak is GFLOP/s over the 2048^3 matrix product of the
// same precision, the median of two products timed after each step; forward, backward and optimizer are shares
// of the step. bench.h has the FLOPs of a token.
#define BENCHMARK
#include "../train_gpt.cu"
#include "bench.h" // median, flops_per_token, fill_batch

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
        printf("  %-28s %8.3f ms %8.1f GFLOP/s %7.1f GB/s\n", label, 1e3 * t_, (gflop) / t_, (gbyte) / t_);            \
        fflush(stdout);                                                                                                \
    } while (0)

static int bench_parts(Precision precision) {
    enum { B = 1, T = 1024, N = B * T, C = 768, NH = 12, HD = 64, F = 2048, QKV = 3 * C, V = 32000, CHUNK = 1024 };
    Stream *stream = NULL;
    AttentionShape shape = {B, T, T, NH, NH, HD, QKV, QKV, NULL};
    if (stream_create(&stream, precision, omp_get_num_procs())) return -1;
    int64_t floats = (int64_t)V * C * 2 + (int64_t)CHUNK * V + (int64_t)N * (4 * F + 4 * QKV);
    float *base = (float *)device_alloc(sizeof(float) * (size_t)floats);
    int32_t *targets = (int32_t *)calloc(CHUNK, sizeof *targets);
    float loss[CHUNK], rstd[N], *lse = (float *)malloc(sizeof(float) * N * NH);
    if (base == NULL || targets == NULL || lse == NULL) return -1;
    float *weight = base, *dweight = base + (size_t)V * C, *logits = dweight + (size_t)V * C;
    Weight w = {weight, NULL};
    float *x = logits + (size_t)CHUNK * V, *y = x + (size_t)N * 2 * F, *q = y + (size_t)N * 2 * F;
    float *dq = q + (size_t)N * QKV, *z = dq + (size_t)N * QKV;
    for (int64_t i = 0; i < floats; i++) base[i] = (float)((uint64_t)i * 2654435761u >> 8 & 0xFFFF) / 65536.0f - 0.5f;
    double matmul = 2e-9 * N, attention = 4e-9 * T * T * NH * HD / 2, nc = 4e-9 * N * C, nf = 4e-9 * N * F;
    printf("ops of a 124M layer, %d rows, T %d, %s:\n", N, T, precision == PRECISION_BF16 ? "bf16" : "fp32");
    BENCH_OP("matmul qkv forward", matmul * C * QKV, 0.0, matmul_forward(q, x, w, N, C, QKV, NULL, stream));
    BENCH_OP("matmul qkv backward", 2 * matmul * C * QKV, 0.0,
             matmul_backward(z, dweight, dq, x, w, N, C, QKV, 1, stream));
    BENCH_OP("matmul gate_up forward", matmul * C * 2 * F, 0.0, matmul_forward(y, x, w, N, C, 2 * F, NULL, stream));
    BENCH_OP("matmul gate_up backward", 2 * matmul * C * 2 * F, 0.0,
             matmul_backward(z, dweight, y, x, w, N, C, 2 * F, 1, stream));
    BENCH_OP("matmul down forward", matmul * C * F, 0.0, matmul_forward(z, y, w, N, F, C, z, stream));
    BENCH_OP("matmul down backward", 2 * matmul * C * F, 0.0, matmul_backward(y, dweight, z, y, w, N, F, C, 1, stream));
    BENCH_OP("attention forward", attention, 0.0, attention_forward(z, lse, q, q + C, q + 2 * C, shape, stream));
    BENCH_OP("attention backward", 2 * attention, 0.0,
             attention_backward(dq, dq + C, dq + 2 * C, x, z, lse, q, q + C, q + 2 * C, shape, stream));
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
    free(lse);
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

// Both ways of a step's micro-batches of N rows over a boundary, through one pair of ends: x there and back.
static int bench_codec(const Codec *codec, float *x, int N, int C, int T, unsigned char *message, int64_t cap,
                       double *took, Stream *stream) {
    CodecEnd ends[2];
    CodecShape shape = {C, N, T, 1, N / T};
    CodecContext context = codec_context(1, 0, 0, 3, 1);
    int64_t *samples = (int64_t *)calloc((size_t)(N / T), sizeof *samples), n_bytes;
    int failed = samples == NULL || codec_end_init(&ends[0], codec, shape) || codec_end_init(&ends[1], codec, shape);
    if (failed) return error_set("out of memory");
    for (int s = 0; s < N / T; s++) samples[s] = s;
    context.training = 1, context.T = T, context.samples = samples;
    for (int warm = 1; warm >= 0; warm--) // the first visit of aqsgd is not the one that counts
        MEDIAN_SECONDS(took, 5, {
            for (int back = 0; back < 2; back++) {
                context.direction = (CodecDirection)back;
                n_bytes = codec_encode(codec, &ends[back], &context, x, N, C, message, cap, stream);
                failed |=
                    n_bytes < 0 || codec_decode(codec, &ends[1 - back], &context, message, n_bytes, x, N, C, stream);
            }
        });
    for (int i = 0; i < 2; i++) codec_end_free(&ends[i]);
    free(samples);
    return failed;
}

static int bench_mesh(Precision precision) {
    enum { C = 768, F = 2048, L = 12, N = 1024, STAGES = 4, MICRO = 4, RANK = 128 };
    double step, took;
    Stream *stream = NULL;
    Codec codec;
    if (bench_model("124M", "124m", 16, 256, 4, precision, 3, &step)) return -1;
    if (stream_create(&stream, precision, omp_get_num_procs())) return -1;
    size_t grads = (size_t)4 * C * C + (size_t)3 * F * C, factors = (size_t)(C + F) * C + C;
    size_t floats = grads + factors + (size_t)3 * F * C;
    float *base = (float *)device_alloc(sizeof(float) * floats), *x = base + grads + factors;
    unsigned char *message = (unsigned char *)malloc(sizeof(float) * N * C);
    if (base == NULL || message == NULL) return error_set("out of memory");
    for (size_t i = 0; i < floats; i++)
        base[i] = 0.02f * ((float)((uint64_t)i * 2654435761u >> 8 & 0xFFFF) / 65536.0f - 0.5f);
    for (int full = 0; full < 2; full++) {
        MEDIAN_SECONDS(&took, 5, filter_layer(base, base + grads, full ? C : RANK, stream));
        printf("  %-34s %8.1f ms a step, %5.2f%% of it\n",
               full ? "spectral filter, full rank" : "spectral filter, rank 128", 1e3 * L * took,
               100.0 * L * took / step);
    }
    for (int kind = 0; kind < CODEC_KINDS; kind++) {
        char label[64];
        if (kind == CODEC_KLT) continue; // its tables come from an anchor's passes
        int takes_budget = kind == CODEC_MASK || kind == CODEC_TOPK || kind == CODEC_BOTTLENECK;
        codec_init(&codec, C, takes_budget ? 0.95f : 0.0f, MASK_SCALE_NONE, WIRE_BF16, 1);
        codec.kind = (CodecKind)kind;
        for (size_t i = 0; i < (size_t)N * C; i++) x[i] = base[i];
        if (bench_codec(&codec, x, N, C, 256, message, (int64_t)sizeof(float) * N * C, &took, stream)) return -1;
        took *= MICRO * (STAGES - 1);
        snprintf(label, sizeof label, "codec %s, 3 boundaries", codec_name(codec.kind));
        printf("  %-34s %8.1f ms a step, %5.2f%% of it\n", label, 1e3 * took, 100.0 * took / step);
    }
    float *u = (float *)malloc(sizeof(float) * F * RANK), *v = (float *)malloc(sizeof(float) * F * RANK), s[RANK];
    if (u == NULL || v == NULL) return error_set("out of memory");
    double square, tall;
    int failed = svd_truncated(u, s, v, base, C, C, RANK, 0, 1, 0, stream);
    MEDIAN_SECONDS(&square, 5, failed |= svd_truncated(u, s, v, base, C, C, RANK, 1, 1, 0, stream));
    failed |= svd_truncated(u, s, v, base, F, C, RANK, 0, 1, 0, stream);
    MEDIAN_SECONDS(&tall, 5, failed |= svd_truncated(u, s, v, base, F, C, RANK, 1, 1, 0, stream));
    printf("  %-34s %8.1f ms an anchor pass, beside the fast circuit\n", "warm SVDs of rank 128",
           1e3 * L * (4.0 * square + 3.0 * tall));
    free(u);
    free(v);
    free(message);
    device_free(base);
    stream_destroy(stream);
    return failed;
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
    int parts = bench_named(argc, argv, "parts"), small = bench_named(argc, argv, "124m");
    int large = bench_named(argc, argv, "1b"), mesh = bench_named(argc, argv, "mesh");
    int all = !parts && !small && !large && !mesh;
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
    if (result != 0) printf("bench: %s\n", error_message);
    return result != 0;
}
