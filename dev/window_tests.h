// Sliding windows: attention against plain float64 loops, what configs say about them, and runs of models that have
// them. What transformers computes with windows is among the fixtures of family_tests.h.
#ifndef DEV_WINDOW_TESTS_H
#define DEV_WINDOW_TESTS_H

#ifndef DEVICE_CUDA // test_cuda.cu has the ops of a device

// One joint row (q, k, v) a position of a sequence, of which the last Tq ask. out (Tq, NH*HD), lse (NH, Tq); grad: as
// x.
typedef struct {
    double *out, *lse, *grad;
} WindowResult;

// One query and head of one sequence; p: room for Tk.
static void window_query(WindowResult r, const float *x, const float *dout, AttentionShape s, int head, int i,
                         double *p) {
    int QKV = s.q_stride, A = s.NH * s.HD, KV = s.NKV * s.HD, kv = head / (s.NH / s.NKV), at = s.Tk - s.Tq + i;
    const float *q = x + (size_t)at * QKV + (size_t)head * s.HD, *keys = x + A + (size_t)kv * s.HD;
    size_t out_at = (size_t)i * A + (size_t)head * s.HD, q_at = (size_t)(q - x), k_at = (size_t)(keys - x);
    double total = 0.0, dot = 0.0, scale = 1.0 / sqrt((double)s.HD);
    int first = s.starts != NULL ? s.starts[at] : 0;
    while (s.window > 0 && at - first >= s.window) first++;
    for (int j = first; j <= at; j++) {
        double score = 0.0;
        for (int d = 0; d < s.HD; d++) score += (double)q[d] * (double)keys[(size_t)j * QKV + d];
        total += p[j] = exp(score * scale);
    }
    r.lse[head * s.Tq + i] = log(total);
    for (int j = first; j <= at; j++) {
        p[j] /= total;
        for (int d = 0; d < s.HD; d++) {
            double value = (double)keys[(size_t)j * QKV + KV + d];
            r.out[out_at + d] += p[j] * value;
            dot += p[j] * value * (double)dout[out_at + d];
        }
    }
    for (int j = first; j <= at; j++) {
        size_t row = k_at + (size_t)j * QKV;
        double dp = 0.0;
        for (int d = 0; d < s.HD; d++) dp += (double)x[row + KV + d] * (double)dout[out_at + d];
        double ds = p[j] * (dp - dot) * scale;
        for (int d = 0; d < s.HD; d++) {
            r.grad[row + KV + d] += p[j] * (double)dout[out_at + d];
            r.grad[row + d] += ds * (double)q[d];
            r.grad[q_at + d] += ds * (double)x[row + d];
        }
    }
}

// a == b, and nothing in a that is not a number.
static void window_close(const float *a, const double *b, int64_t n, double tol, const AttentionShape *s,
                         const char *what) {
    float *expected = (float *)malloc(sizeof(float) * (size_t)n);
    for (int64_t i = 0; i < n; i++) expected[i] = (float)b[i];
    double error = relative_error(a, expected, n);
    check(error <= tol, "%s: relative error %.3g, at most %.3g allowed (T %d of %d, HD %d, window %d, %s)", what, error,
          tol, s->Tq, s->Tk, s->HD, s->window, s->starts != NULL ? "documents" : "one document");
    free(expected);
}

// documents: sequences are packed with these lengths, each entering the list at another place; NULL: they are not.
static void window_case(AttentionShape s, const int *documents, Precision precision) {
    double tol = precision == PRECISION_BF16 ? 1e-2 : 3e-6;
    int A = s.NH * s.HD, KV = s.NKV * s.HD, QKV = A + 2 * KV, queries_at = (s.Tk - s.Tq) * QKV;
    int64_t n = (int64_t)s.B * s.Tk * QKV, n_out = (int64_t)s.B * s.Tq * A, n_lse = (int64_t)s.B * s.NH * s.Tq;
    float *x = random_values(n, 81, 1.0f), *dout = random_values(n_out, 82, 1.0f), *out = guarded(n_out);
    float *lse = guarded(n_lse), *dx = guarded(n);
    double *exact = (double *)calloc((size_t)(n_out + n_lse + n), sizeof(double));
    double *p = (double *)malloc(sizeof(double) * (size_t)s.Tk);
    int32_t *starts = (int32_t *)malloc(sizeof(int32_t) * (size_t)s.B * (size_t)s.Tk);
    Stream *stream = test_stream(precision, 2);
    for (int b = 0; b < s.B && documents != NULL; b++)
        for (int start = 0, i = b; start < s.Tk; start += documents[i++ % 6])
            for (int t = start; t < s.Tk; t++) starts[(size_t)b * s.Tk + t] = start;
    s.q_stride = QKV, s.kv_stride = QKV;
    for (int task = 0; task < s.B * s.NH * s.Tq; task++) {
        int b = task / (s.NH * s.Tq);
        AttentionShape one = s;
        WindowResult r = {exact + (size_t)b * s.Tq * A, exact + n_out + (size_t)b * s.NH * s.Tq,
                          exact + n_out + n_lse + (size_t)b * s.Tk * QKV};
        one.starts = documents != NULL ? starts + (size_t)b * s.Tk : NULL;
        window_query(r, x + (size_t)b * s.Tk * QKV, dout + (size_t)b * s.Tq * A, one, task / s.Tq % s.NH, task % s.Tq,
                     p);
    }
    s.starts = documents != NULL ? starts : NULL;
    attention_forward(out, lse, x + queries_at, x + A, x + A + KV, s, stream);
    window_close(out, exact, n_out, tol, &s, "out");
    window_close(lse, exact + n_out, n_lse, tol, &s, "lse");
    if (s.Tq == s.Tk) {
        attention_backward(dx, dx + A, dx + A + KV, dout, out, lse, x, x + A, x + A + KV, s, stream);
        window_close(dx, exact + n_out + n_lse, n, tol, &s, "dqkv");
    }
    release(out, n_out, "out");
    release(lse, n_lse, "lse");
    release(dx, n, "dqkv");
    free(x);
    free(dout);
    free(exact);
    free(p);
    free(starts);
    stream_destroy(stream);
}

// Windows of one token, of a block and one less or more, longer than the sequence; T on both sides of a block's edge,
// queries fewer than keys; with documents shorter and longer than the window.
// Must fail for: the window left out of any of the two passes, one token more or less in it, documents forgotten beside
// it, dk of keys that no query of the last block sees left as it was.
static void test_window_attention(void) {
    static const int documents[] = {70, 1, 3, 64, 130, 9}, windows[] = {1, 2, 5, 63, 64, 65, 130, 500};
    static const AttentionShape shapes[] = {{1, 1, 1, 2, 1, 4, 0, 0, NULL, 0},
                                            {2, 17, 17, 4, 2, 6, 0, 0, NULL, 0},
                                            {1, 64, 64, 2, 2, 10, 0, 0, NULL, 0},
                                            {2, 65, 65, 2, 1, 8, 0, 0, NULL, 0},
                                            {1, 200, 200, 6, 2, 20, 0, 0, NULL, 0}};
    static const AttentionShape grown[] = {
        {1, 1, 70, 4, 2, 6, 0, 0, NULL, 0}, {1, 5, 131, 2, 1, 10, 0, 0, NULL, 0}, {1, 70, 140, 2, 2, 8, 0, 0, NULL, 0}};
    for (int precision = 0; precision < 2; precision++) {
        for (size_t w = 0; w < sizeof windows / sizeof *windows; w++) {
            for (int i = 0; i < 8; i++) {
                AttentionShape s = i < 5 ? shapes[i] : grown[i - 5];
                s.window = windows[w];
                if (s.Tk > 1 && !(s.Tq == s.Tk && s.window == 1)) window_case(s, NULL, (Precision)precision);
                if (s.Tk > 1 && s.window > 1) window_case(s, documents, (Precision)precision);
            }
        }
    }
}

// A token that sees itself alone takes its own value, and no gradient reaches q and k.
static void test_window_of_one(void) {
    enum { T = 70, NH = 2, HD = 6, A = NH * HD, QKV = 3 * A };
    for (int precision = 0; precision < 2; precision++) {
        AttentionShape s = {1, T, T, NH, NH, HD, QKV, QKV, NULL, 1};
        Stream *stream = test_stream((Precision)precision, 2);
        float *x = random_values(T * QKV, 83, 1.0f), *dout = random_values(T * A, 84, 1.0f), *out = guarded(T * A);
        float *lse = guarded(T * NH), *dx = guarded(T * QKV);
        double worst = 0.0;
        attention_forward(out, lse, x, x + A, x + 2 * A, s, stream);
        attention_backward(dx, dx + A, dx + 2 * A, dout, out, lse, x, x + A, x + 2 * A, s, stream);
        for (int t = 0; t < T; t++) {
            for (int i = 0; i < A; i++) {
                const float *got = dx + t * QKV + i;
                double errors[] = {fabs((double)(out[t * A + i] - x[t * QKV + 2 * A + i])), fabs((double)got[0]),
                                   fabs((double)got[A]), fabs((double)(got[2 * A] - dout[t * A + i]))};
                for (int e = 0; e < 4; e++)
                    if (!(errors[e] <= worst)) worst = errors[e];
            }
        }
        check(worst <= (precision == PRECISION_BF16 ? 3e-2 : 1e-5), "an error of %.3g", worst);
        release(out, T * A, "out");
        release(lse, T * NH, "lse");
        release(dx, T * QKV, "dqkv");
        free(x);
        free(dout);
        stream_destroy(stream);
    }
}

// The same bits for any number of threads, and for a window as long as the sequence in fp32 as without.
static void test_window_bits(void) {
    enum { B = 2, T = 150, NH = 4, NKV = 2, HD = 10, A = NH * HD, KV = NKV * HD, QKV = A + 2 * KV, N = B * T };
    enum { TOTAL = N * (QKV + A) };
    static const struct { int window, threads; } runs[] = {{20, 1}, {20, 2}, {20, 3}, {0, 2}, {T, 2}, {T + 1, 3}};
    float *qkv = random_values(N * QKV, 85, 1.0f), *dout = random_values(N * A, 86, 1.0f), *results[6];
    for (int precision = 0; precision < 2; precision++) {
        for (int i = 0; i < 6; i++) {
            AttentionShape s = {B, T, T, NH, NKV, HD, QKV, QKV, NULL, runs[i].window};
            Stream *stream = test_stream((Precision)precision, runs[i].threads);
            float *lse = guarded(N * NH), *dx = results[i] = (float *)calloc(TOTAL, sizeof(float)), *out = dx + N * QKV;
            attention_forward(out, lse, qkv, qkv + A, qkv + A + KV, s, stream);
            attention_backward(dx, dx + A, dx + A + KV, dout, out, lse, qkv, qkv + A, qkv + A + KV, s, stream);
            const float *same = results[i < 3 ? 0 : 3];
            check((precision == PRECISION_BF16 && i > 3) || memcmp(same, dx, sizeof(float) * TOTAL) == 0,
                  "run %d gives other bits", i);
            release(lse, N * NH, "lse");
            stream_destroy(stream);
        }
        check(memcmp(results[0], results[3], sizeof(float) * TOTAL) != 0, "the window changes nothing");
        for (int i = 0; i < 6; i++) free(results[i]);
    }
    free(qkv);
    free(dout);
}

// What a config says: the window of each layer, or why it is refused.
static void test_window_config(void) {
#define WINDOW_SHAPE                                                                                                   \
    "\"num_hidden_layers\": 4, \"hidden_size\": 24, \"num_attention_heads\": 4, \"num_key_value_heads\": 2, "          \
    "\"head_dim\": 6, \"intermediate_size\": 30, \"vocab_size\": 60, \"max_position_embeddings\": 9000, "              \
    "\"rope_theta\": 500.0, \"model_type\": "
    static const struct {
        const char *rest;
        int windows[4];
        const char *message;
    } cases[] = {
        {"\"mistral\", \"sliding_window\": 7", {7, 7, 7, 7}, NULL},
        {"\"mistral\", \"sliding_window\": null", {0, 0, 0, 0}, NULL},
        {"\"mistral\"", {4096, 4096, 4096, 4096}, NULL}, // the classes' own
        {"\"qwen2\", \"use_sliding_window\": true, \"sliding_window\": 7, \"max_window_layers\": 1",
         {0, 7, 7, 7},
         NULL},
        {"\"qwen2\", \"use_sliding_window\": true, \"sliding_window\": 7, \"max_window_layers\": 4",
         {0, 0, 0, 0},
         NULL},
        {"\"qwen2\", \"use_sliding_window\": true, \"sliding_window\": 7", {0, 0, 0, 0}, NULL}, // from layer 28 on
        {"\"qwen3\", \"use_sliding_window\": true, \"sliding_window\": null, \"max_window_layers\": 1",
         {0, 0, 0, 0},
         NULL},
        {"\"qwen3\", \"use_sliding_window\": true, \"max_window_layers\": 3", {0, 0, 0, 4096}, NULL},
        {"\"qwen3\", \"use_sliding_window\": false, \"sliding_window\": 7, \"max_window_layers\": 1",
         {0, 0, 0, 0},
         NULL},
        {"\"qwen3\", \"use_sliding_window\": true, \"sliding_window\": 7, \"max_window_layers\": 4, \"layer_types\": "
         "[\"sliding_attention\", \"full_attention\", \"sliding_attention\", \"full_attention\"]",
         {7, 0, 7, 0},
         NULL}, // the list goes before
        {"\"smollm3\", \"use_sliding_window\": true, \"sliding_window\": 7, \"no_rope_layers\": [0, 1, 1, 0]",
         {7, 0, 0, 7},
         NULL},
        {"\"smollm3\", \"use_sliding_window\": true, \"sliding_window\": 7", {0, 0, 0, 7}, NULL},
        {"\"smollm3\", \"use_sliding_window\": true", {0, 0, 0, 0}, NULL},
        {"\"smollm3\", \"sliding_window\": 7, \"no_rope_layers\": [0, 1, 1, 0]", {0, 0, 0, 0}, NULL},
        {"\"qwen2\", \"use_sliding_window\": true, \"sliding_window\": -1", {0}, "sliding_window is -1"},
        {"\"qwen2\", \"use_sliding_window\": true, \"sliding_window\": 2.5", {0}, "sliding_window is not a whole"},
        {"\"qwen2\", \"use_sliding_window\": true, \"max_window_layers\": []", {0}, "max_window_layers is not a whole"},
        {"\"qwen2\", \"use_sliding_window\": true, \"layer_types\": {}", {0}, "layer_types does not list 4 layers"},
        {"\"qwen2\", \"layer_types\": [3, 3, 3, 3]", {0}, "layer_types has '(no text)' for layer 0"},
        {"\"llama\", \"use_sliding_window\": true", {0}, "config key 'use_sliding_window' is true"},
    };
    Config config, again;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char text[1024];
        snprintf(text, sizeof text, "{" WINDOW_SHAPE "%s}", cases[i].rest);
        json_t *json = json_loads(text, 0, NULL);
        int result = config_from_json(&config, json, "window");
        json_decref(json);
        if (cases[i].message != NULL) {
            check_error(result, cases[i].message, cases[i].rest);
            continue;
        }
        if (!check(result == 0, "%s: %s", cases[i].rest, error_message)) continue;
        for (int l = 0; l < 4; l++)
            check(config_window(&config, l) == cases[i].windows[l], "%s: layer %d has %d", cases[i].rest, l,
                  config_window(&config, l));
        json = config_to_json(&config, "float32");
        check(config_from_json(&again, json, "again") == 0 && memcmp(&config, &again, sizeof again) == 0,
              "%s: the round trip differs: %s", cases[i].rest, error_message);
        json_decref(json);
    }
    check(config_from_spec(&config, "family=smollm3,layers=4,window=9") == 0 && config_window(&config, 3) == 9 &&
              config_window(&config, 2) == 0,
          "a spec of SmolLM3: %s", error_message);
    check_error(config_from_spec(&config, "layers=4,window=9"), "a Llama has no window", "a Llama with a window");
    check_error(config_from_spec(&config, "family=qwen3,window=-2"), "sliding_window is -2", "a window below zero");
}

#define WINDOW_RUN                                                                                                     \
    "--init family=%s,d=24,layers=4,heads=4,kv=2,head-dim=8,ffn=40,vocab=258,ctx=64%s -d @/corpus.jsonl -b 5 "         \
    "--micro-batch 2 -t 40 -l 1e-2 --warmup 0 --threads 2 --val-tokens 300 -n 3 --clip 0 --precision fp32 %s -o @/%s"

// Sequences five times as long as the window: any number of stages and recomputing give the same losses, which are not
// those without a window.
static void test_window_runs(void) {
    static const struct {
        const char *name, *window, *stages;
    } runs[] = {
        {"none", "", "-y 1"}, {"one", ",window=8", "-y 1"}, {"two", ",window=8", "-y 2 --wire fp32 --recompute"}};
    static const char *const types[] = {"mistral", "smollm3"};
    char command[1024], name[64], *losses[3];
    write_corpus();
    for (int type = 0; type < 2; type++) {
        for (int i = 0; i < 3; i++) {
            snprintf(name, sizeof name, "window_%s_%s", types[type], runs[i].name);
            snprintf(command, sizeof command, WINDOW_RUN, types[type], runs[i].window, runs[i].stages, name);
            check_run(0, NULL, command, "done: 3 steps");
            losses[i] = logged_losses(name);
        }
        check(strlen(losses[0]) > 30 && strcmp(losses[1], losses[2]) == 0, "%s: two stages: other losses:\n%s\n%s",
              types[type], losses[1], losses[2]);
        check(strcmp(losses[0], losses[1]) != 0, "%s: the window changes nothing", types[type]);
        for (int i = 0; i < 3; i++) free(losses[i]);
    }
}

// A Mistral goes to a GGUF and to a folder with its window, and comes back with it; the first says what its readers
// make of it. A Qwen's window has no place in a GGUF.
static void test_window_export(void) {
    Fixture f;
    SafeTensors gguf;
    char path[PATH_MAX];
    check_run(0, NULL, "-m data/fixtures/families/mistral_window --export @/window.gguf --export-dtype fp32",
              "llama.cpp does not look at the sliding window of 5");
    check_run(0, NULL, "-m @/window.gguf --export @/window_hf --export-dtype fp32", "exported");
    if (family_open(&f, "mistral_window", 1, 0, 1)) return;
    check_same_weights(scratch_path("window.gguf"), &f.stage, 0.0, "a Mistral's GGUF");
    check_same_weights(scratch_path("window_hf"), &f.stage, 0.0, "a Mistral's folder");
    fixture_close(&f);
    snprintf(path, sizeof path, "%s", scratch_path("window.gguf"));
    if (check(gguf_open(&gguf, path) == 0, "%s", error_message)) {
        check(json_integer_value(json_object_get(gguf.metadata, "llama.attention.sliding_window")) == 5,
              "the window is not in the metadata");
        safetensors_close(&gguf);
    }
    json_t *json = json_load_file(scratch_path("window_hf/config.json"), 0, NULL);
    check(json_integer_value(json_object_get(json, "sliding_window")) == 5 &&
              strcmp(json_string_value(json_object_get(json, "model_type")), "mistral") == 0,
          "the folder's config.json has another window");
    json_decref(json);
    check_run(1, NULL, "-m data/fixtures/families/qwen2_window --export @/window_q.gguf",
              "a GGUF cannot say which layers of a qwen2 have a sliding window");
    check(!file_exists(scratch_path("window_q.gguf")), "a file was left");
}
#endif

#endif
