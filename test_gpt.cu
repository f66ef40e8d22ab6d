// Checks the program against PyTorch dumps, float64, finite differences and itself. Prints "N passed, N failed" and
// exits non-zero on a failure. `make test` builds and runs it; `./test_gpt NAME` runs the tests whose name contains
// NAME.
//
// How to add a test: write static void test_<what>(void), call check...(), add a line to the table at the end.
#define TESTING
#include "train_gpt.cu"

#include <sys/wait.h>

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

static Stream *test_stream(Precision precision, int threads) {
    Stream *stream = NULL;
    if (stream_create(&stream, precision, threads)) {
        printf("%s\n", error_message);
        exit(1);
    }
    return stream;
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
    int result = model_file_open(&file, path) || stage_table(&f->stage, &file.config) ||
                 stage_match(&f->stage, &file) || stage_plan(&f->stage, micro_batch, T, 1, recompute) ||
                 stage_alloc(&f->stage) || stage_load(&f->stage, &file, 1);
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
    for (int i = 0; i < f->stage.n_tensors; i++) {
        const Tensor *tensor = &f->stage.tensors[i];
        int64_t n;
        float *expected = dump_values(&f->dump, prefix, tensor->name, &n);
        if (check(n == tensor->n, "%s%s: %lld values", prefix, tensor->name, (long long)n))
            check_close(arena + tensor->offset, expected, n, tol, tensor->name);
        free(expected);
    }
}

// Logits, loss, every gradient and the parameters after ten AdamW steps.
static void test_model_against_pytorch(void) {
    static const char *const names[] = {"tied", "untied"};
    for (int i = 0; i < 2; i++) {
        Fixture f;
        int64_t n;
        double loss;
        if (fixture_open(&f, names[i], 64, 0, PRECISION_FP32, 2)) return;
        int V = f.stage.config.vocab, N = f.batch.b * f.batch.T;
        float *logits = dump_values(&f.dump, "", "logits", &n);
        stage_forward(&f.stage, f.batch.tokens, f.batch.b, f.batch.T, NULL, f.stream);
        float *ours = guarded(n);
        matmul_forward(ours, f.stage.normed, f.stage.p.head, N, f.stage.config.channels, V, 0, f.stream);
        check_close(ours, logits, n, 2e-6, "logits");
        release(ours, n, "logits");
        free(logits);
        float *expected = dump_values(&f.dump, "", "loss", &n);
        check(stage_gradients(&f.stage, &f.batch, 64, &loss, NULL, f.stream) == 0, "%s", error_message);
        check(fabs(loss - (double)expected[0]) <= 1e-6 * (double)expected[0], "loss %.8f, PyTorch %.8f", loss,
              (double)expected[0]);
        free(expected);
        check_arena(&f, f.stage.grads, "grad.", 5e-6);
        expected = dump_values(&f.dump, "", "losses", &n);
        for (int64_t step = 0; step < n; step++) {
            AdamW adam = {0.9f, 0.95f, 1e-8f};
            stage_gradients(&f.stage, &f.batch, 64, &loss, NULL, f.stream);
            check(fabs(loss - (double)expected[step]) <= 1e-4 * (double)expected[step], "loss of step %lld: %.8f, %.8f",
                  (long long)step, loss, (double)expected[step]);
            stage_update(&f.stage, adam, 3e-3f, 0.1f, stage_grad_norm(&f.stage, f.stream), 1.0f, step + 1, f.stream);
        }
        free(expected);
        check_arena(&f, f.stage.params, "after.", 1e-4);
        fixture_close(&f);
    }
}

// ---------------------------------------------------------------------------------------------------------------------

static const struct {
    const char *name;
    void (*run)(void);
} tests[] = {
    {"model_against_pytorch", test_model_against_pytorch},
};

int main(int argc, char **argv) {
    for (size_t i = 0; i < sizeof tests / sizeof *tests; i++) {
        if (argc > 1 && strstr(tests[i].name, argv[1]) == NULL) continue;
        int failed = checks_failed;
        double start = seconds();
        test_name = tests[i].name;
        tests[i].run();
        printf("%-4s %-40s %6.2f s\n", checks_failed == failed ? "ok" : "FAIL", test_name, seconds() - start);
    }
    printf("%d passed, %d failed\n", checks_passed, checks_failed);
    return checks_failed != 0;
}
