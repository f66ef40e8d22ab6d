// Families of models: each against what transformers computes (dev/reference/dump_families.py), and against itself: its
// cache, recomputing, stages, files, a compressed mesh. Configs that would change the mathematics are refused by name.

static const char *const family_fixtures[] = {
    "llama",        "mistral", "mistral_window", "smollm3", "smollm3_interval", "smollm3_window", "qwen2",
    "qwen2_window", "qwen3",   "olmo",           "olmo2"};
enum { FAMILY_FIXTURES = sizeof family_fixtures / sizeof *family_fixtures };

static int family_open(Fixture *f, const char *name, int micro_batch, int recompute, int threads) {
    char path[64];
    snprintf(path, sizeof path, "families/%s", name);
    return fixture_open(f, path, micro_batch, recompute, MODEL_PRECISION, threads);
}

// The largest relative error over the tensors of the gradients; every one must be within tol.
static double family_check_grads(const Fixture *f, double tol) {
    const float *grads = seen(f->stage.grads, f->stage.arena_floats, f->stream);
    double worst = 0.0;
    int n_dumped = 0;
    for (int i = 0; i < f->stage.n_tensors; i++) {
        const Tensor *tensor = &f->stage.tensors[i];
        int64_t n;
        float *expected = dump_values(&f->dump, "grad.", tensor->name, &n);
        if (!check(n == tensor->n, "%s: %lld values", tensor->name, (long long)n)) exit(1);
        double error = relative_error(grads + tensor->offset, expected, n);
        check(error <= tol, "grad.%s: relative error %.3g", tensor->name, error);
        if (!(error <= worst)) worst = error;
        free(expected);
    }
    for (int i = 0; i < f->dump.n_tensors; i++) n_dumped += strncmp(f->dump.tensors[i].name, "grad.", 5) == 0;
    check(n_dumped == f->stage.n_tensors, "%d gradients in the dump, %d in the table", n_dumped, f->stage.n_tensors);
    return worst;
}

// Logits, loss and every gradient of a fixture beside the dump's, which `whose` has computed. of_grads: the tolerance.
static void family_check_fixture(Fixture *f, const char *name, const char *whose, double of_grads) {
    int64_t n;
    double loss;
    int V = f->stage.config.vocab, N = f->batch.b * f->batch.T;
    float *logits = dump_values(&f->dump, "", "logits", &n), *ours = guarded(n);
    floatX *product = (floatX *)device_alloc(sizeof(floatX) * (size_t)n);
    stage_round(&f->stage, f->stream);
    stage_forward(&f->stage, 0, f->batch.tokens, NULL, f->batch.b, f->batch.T, NULL, NULL, f->stream);
    matmul_forward(product, f->stage.normed, stage_weight(&f->stage, f->stage.p.head), N, f->stage.config.channels, V,
                   NULL, f->stream);
    copy_activations(ours, product, (int)n, f->stream);
    double of_logits = relative_error(ours, logits, n);
    check(of_logits <= model_tol(2e-6, 3e-2), "%s: logits: relative error %.3g", name, of_logits);
    release(ours, n, "logits");
    device_free(product);
    free(logits);
    float *expected = dump_values(&f->dump, "", "loss", &n);
    check(stage_gradients(&f->stage, &f->batch, 64, &loss, NULL, NULL, f->stream) == 0, "%s", error_message);
    double of_loss = fabs(loss - (double)expected[0]) / (double)expected[0];
    check(of_loss <= model_tol(1e-6, 5e-3), "%s: loss %.8f, %s %.8f", name, loss, whose, (double)expected[0]);
    free(expected);
    double worst = family_check_grads(f, of_grads);
    printf("  %-17s logits %.1e, loss %.1e, worst gradient %.1e from %s\n", name, of_logits, of_loss, worst, whose);
}

// Each family beside transformers.
static void test_families_against_pytorch(void) {
    for (int i = 0; i < FAMILY_FIXTURES; i++) {
        Fixture f;
        if (family_open(&f, family_fixtures[i], 64, 0, 2)) return;
        family_check_fixture(&f, family_fixtures[i], "transformers", model_tol(5e-6, 1e-1));
        fixture_close(&f);
    }
}

// A forward and backward of a fixture; the caller frees the copy of the gradients.
static float *fixture_grads(const char *name, int micro_batch, int recompute, int threads, double *loss, int64_t *n) {
    Fixture f;
    if (fixture_open(&f, name, micro_batch, recompute, MODEL_PRECISION, threads)) exit(1);
    for (int twice = 0; twice < 2; twice++) // the second time over old gradients, which must not be added to
        stage_gradients(&f.stage, &f.batch, micro_batch, loss, NULL, NULL, f.stream);
    *n = f.stage.arena_floats;
    float *copy = (float *)malloc(sizeof(float) * (size_t)*n);
    memcpy(copy, seen(f.stage.grads, *n, f.stream), sizeof(float) * (size_t)*n);
    fixture_close(&f);
    return copy;
}

// The logits' input of a sequence grown piece by piece in a cache is that of the whole forward.
static void family_check_cache(const char *name) {
    static const int pieces[] = {1, 4, 1, 1, 9, 1, 6};
    Fixture f;
    if (family_open(&f, name, 1, 0, 2)) return;
    check_cached_forward(&f, f.batch.T, pieces, 7, model_tol(2e-6, 3e-2), name);
    fixture_close(&f);
}

// Recomputing and other thread counts give the same bits, micro-batches the same gradients, the cache the same states.
static void test_families_variants(void) {
    for (int i = 0; i < FAMILY_FIXTURES; i++) {
        const char *name = family_fixtures[i];
        char path[64];
        int64_t n;
        double loss, other_loss;
        snprintf(path, sizeof path, "families/%s", name);
        float *grads = fixture_grads(path, 2, 0, 2, &loss, &n);
        float *again = fixture_grads(path, 2, 1, 3, &other_loss, &n);
        check(loss == other_loss && memcmp(grads, again, sizeof(float) * (size_t)n) == 0,
              "%s: --recompute with 3 threads changes the bits", name);
        float *pieces = fixture_grads(path, 1, 1, 2, &other_loss, &n);
        check(fabs(loss - other_loss) <= model_tol(1e-6, 1e-3) * loss, "%s: micro-batches of 1: loss %g, %g", name,
              other_loss, loss);
        check_close(pieces, grads, n, model_tol(2e-6, 3e-2), name);
        free(grads);
        free(again);
        free(pieces);
        family_check_cache(name);
    }
}

#ifndef DEVICE_CUDA // test_cuda.cu has these for a device's ops
// The families' ops against float64, their backwards against central differences of the float64 forward.
typedef struct {
    int N, parts, W, stride, of; // of: 0 the input is x (N, stride), 1 it is weight (W)
    const float *x, *weight, *dout;
    float eps;
} FamilyOp;

static double qk_norm_objective(const double *input, const void *context) {
    const FamilyOp *k = (const FamilyOp *)context;
    double total = 0.0;
    for (int i = 0; i < k->N * k->parts; i++) {
        int at = i / k->parts * k->stride + i % k->parts * k->W;
        double sum = 0.0;
        for (int c = 0; c < k->W; c++) {
            double x = k->of == 0 ? input[at + c] : (double)k->x[at + c];
            sum += x * x;
        }
        for (int c = 0; c < k->W; c++) {
            double x = k->of == 0 ? input[at + c] : (double)k->x[at + c];
            double w = k->of == 1 ? input[c] : (double)k->weight[c];
            total += x / sqrt(sum / k->W + (double)k->eps) * w * (double)k->dout[at + c];
        }
    }
    return total;
}

// Must fail for: eps left out, a part's rstd of another part, the weight of the next part, what lies behind the parts
// touched, dx added to, dweight overwritten.
static void qk_norm_case(int N, int parts, int W, int behind, float scale, int threads) {
    int stride = parts * W + behind, n = N * stride, kept_stride = parts * W + 3, n_kept = N * kept_stride;
    Stream *stream = test_stream(PRECISION_FP32, threads);
    float *plain = random_values(n, 71, scale), *weight = random_values(W, 72, 1.0f),
          *dout = random_values(n, 73, 1.0f);
    float *x = guarded(n), *d = guarded(n), *kept = guarded(n_kept), *rstd = guarded(N * parts), *dweight = guarded(W);
    float *expected = (float *)malloc(sizeof(float) * (size_t)n);
    FamilyOp op = {N, parts, W, stride, 0, plain, weight, dout, 1e-5f};
    Objective objective = {qk_norm_objective, &op};
    memcpy(x, plain, sizeof(float) * (size_t)n);
    memcpy(d, dout, sizeof(float) * (size_t)n);
    for (int c = 0; c < W; c++) dweight[c] = -2.0f;
    qk_norm_forward(x, kept, rstd, weight, N, parts, W, stride, kept_stride, 1e-5f, stream);
    qk_norm_backward(d, dweight, kept, weight, rstd, N, parts, W, stride, kept_stride, stream);
    for (int row = 0; row < N; row++) {
        for (int j = 0; j < stride; j++) {
            int at = row * stride + j;
            double sum = 0.0;
            if (j >= parts * W) {
                check(x[at] == plain[at] && d[at] == dout[at], "what lies behind the parts was written");
                expected[at] = plain[at];
                continue;
            }
            for (int c = 0; c < W; c++) sum += pow((double)plain[at - j % W + c], 2.0);
            expected[at] = (float)((double)plain[at] / sqrt(sum / W + 1e-5) * (double)weight[j % W]);
            check(kept[row * kept_stride + j] == plain[at], "what was is not kept");
        }
        for (int j = 0; j < 3; j++) check(isnan(kept[row * kept_stride + parts * W + j]), "wrote behind what is kept");
    }
    check_close(x, expected, n, 4e-7, "out");
    numeric_gradient(expected, plain, n, objective);
    for (int row = 0; row < N; row++)
        for (int j = parts * W; j < stride; j++) expected[row * stride + j] = dout[row * stride + j];
    check_close(d, expected, n, 2e-5, "dx");
    op.of = 1;
    numeric_gradient(expected, weight, W, objective);
    for (int c = 0; c < W; c++) dweight[c] += 2.0f;
    check_close(dweight, expected, W, 5e-6, "dweight");
    release(x, n, "x");
    release(d, n, "d");
    release(kept, n_kept, "kept");
    release(rstd, N * parts, "rstd");
    release(dweight, W, "dweight");
    free(plain);
    free(weight);
    free(dout);
    free(expected);
    stream_destroy(stream);
}

static double layernorm_objective(const double *input, const void *context) {
    const FamilyOp *k = (const FamilyOp *)context;
    double total = 0.0;
    for (int n = 0; n < k->N; n++) {
        const double *x = input + n * k->W;
        double mean = 0.0, variance = 0.0;
        for (int c = 0; c < k->W; c++) mean += x[c] / k->W;
        for (int c = 0; c < k->W; c++) variance += (x[c] - mean) * (x[c] - mean) / k->W;
        for (int c = 0; c < k->W; c++)
            total += (x[c] - mean) / sqrt(variance + (double)k->eps) * (double)k->dout[n * k->W + c];
    }
    return total;
}

// A mean far from zero, and tiny x where eps matters. Must fail for: RMSNorm, eps left out, variance over C - 1, dx
// overwritten, the mean of dout left out.
static void layernorm_case(int N, int C, float scale, float shift, int threads) {
    int n = N * C;
    Stream *stream = test_stream(PRECISION_FP32, threads);
    float *x = random_values(n, 74, scale), *dout = random_values(n, 75, 1.0f), *out = guarded(n), *rstd = guarded(N);
    float *dx = guarded(n), *expected = (float *)malloc(sizeof(float) * (size_t)n);
    FamilyOp op = {N, 1, C, C, 0, x, NULL, dout, 1e-5f};
    Objective objective = {layernorm_objective, &op};
    for (int i = 0; i < n; i++) x[i] += shift, dx[i] = 1.0f;
    layernorm_forward(out, rstd, x, N, C, 1e-5f, stream);
    layernorm_backward(dx, dout, out, rstd, N, C, stream);
    for (int row = 0; row < N; row++) {
        double mean = 0.0, variance = 0.0;
        for (int c = 0; c < C; c++) mean += (double)x[row * C + c] / C;
        for (int c = 0; c < C; c++) variance += pow((double)x[row * C + c] - mean, 2.0) / C;
        for (int c = 0; c < C; c++)
            expected[row * C + c] = (float)(((double)x[row * C + c] - mean) / sqrt(variance + 1e-5));
    }
    check_close(out, expected, n, 2e-6, "out");
    numeric_gradient(expected, x, n, objective);
    for (int i = 0; i < n; i++) dx[i] -= 1.0f;
    check_close(dx, expected, n, 3e-5, "dx");
    release(out, n, "out");
    release(rstd, N, "rstd");
    release(dx, n, "dx");
    free(x);
    free(dout);
    free(expected);
    stream_destroy(stream);
}

// Must fail for: a column left out, dbias overwritten, sums that depend on the threads.
static void bias_case(int N, int M) {
    int n = N * M;
    float *x = random_values(n, 76, 1.0f), *bias = random_values(M, 77, 1.0f), *out = guarded(n), *sums[2];
    for (int k = 0; k < 2; k++) {
        Stream *stream = test_stream(PRECISION_FP32, 1 + 2 * k);
        sums[k] = guarded(M);
        memcpy(out, x, sizeof(float) * (size_t)n);
        for (int m = 0; m < M; m++) sums[k][m] = 3.0f;
        bias_forward(out, bias, N, M, stream);
        bias_backward(sums[k], x, N, M, stream);
        residual_add(out, x, n, stream);
        stream_destroy(stream);
    }
    float *expected = (float *)malloc(sizeof(float) * (size_t)n);
    for (int i = 0; i < n; i++) expected[i] = 2.0f * x[i] + bias[i % M];
    check_close(out, expected, n, 2e-7, "x + bias + x");
    for (int m = 0; m < M; m++) {
        double sum = 3.0;
        for (int row = 0; row < N; row++) sum += (double)x[row * M + m];
        expected[m] = (float)sum;
    }
    check_close(sums[0], expected, M, 2e-6, "dbias");
    check(memcmp(sums[0], sums[1], sizeof(float) * (size_t)M) == 0, "dbias: other bits with 3 threads");
    release(out, n, "out");
    for (int k = 0; k < 2; k++) release(sums[k], M, "dbias");
    free(x);
    free(bias);
    free(expected);
}

// Sizes straddle vectors and the strips of the weight gradients.
static void test_families_ops(void) {
    qk_norm_case(1, 1, 8, 0, 1.0f, 1);
    qk_norm_case(3, 5, 6, 7, 1.0f, 2);
    qk_norm_case(4, 2, 65, 9, 0.003f, 3);
    qk_norm_case(2, 1, 130, 1, 1.0f, 2);
    qk_norm_case(70, 3, 4, 12, 1.0f, 2);
    layernorm_case(1, 5, 1.0f, 0.0f, 1);
    layernorm_case(3, 7, 1.0f, 2.0f, 2);
    layernorm_case(5, 63, 0.003f, 0.01f, 2);
    layernorm_case(2, 130, 1.0f, -3.0f, 3);
    bias_case(1, 1);
    bias_case(5, 63);
    bias_case(37, 65);
    bias_case(130, 130);
}

// Of the host: files, configs, and runs of the CPU's program.

// Native files and folders hold the same model: config and weights.
static void test_families_files(void) {
    for (int i = 0; i < FAMILY_FIXTURES; i++) {
        Fixture f;
        if (family_open(&f, family_fixtures[i], 1, 0, 1)) return;
        json_t *side = json_object();
        check(model_save_native(&f.stage, ARENA_PARAMS, side, scratch_path("family.bin"), DTYPE_F32) == 0, "%s",
              error_message);
        check_same_weights(scratch_path("family.bin"), &f.stage, 0.0, family_fixtures[i]);
        check(model_save_folder(&f.stage, side, scratch_path("family_hf"), DTYPE_F32) == 0, "%s", error_message);
        check_same_weights(scratch_path("family_hf"), &f.stage, 0.0, family_fixtures[i]);
        file_remove_folder(scratch_path("family_hf"));
        json_decref(side);
        fixture_close(&f);
    }
}

// Only matrices decay and are filtered; norms start as ones, biases as zeros; a tensor knows its layer and fragment.
static void family_check_table(Stage *stage) {
    stage_fragments(stage, 3);
    for (int i = 0; i < stage->n_tensors; i++) {
        const Tensor *t = &stage->tensors[i];
        int layer = -1, is_matrix = t->n_dims == 2, is_bias = strstr(t->name, ".bias") != NULL;
        int in_layer = sscanf(t->name, "model.layers.%d.", &layer) == 1;
        check(t->decay == is_matrix && t->block == (is_matrix && in_layer) && t->index == i, "%s", t->name);
        if (!is_matrix) check(t->init_std == 0.0f && t->fill == (is_bias ? 0.0f : 1.0f), "%s starts wrong", t->name);
        if (in_layer)
            check(tensor_layer(stage, t) == layer && t->fragment == layer % 3, "%s: layer %d, fragment %d", t->name,
                  tensor_layer(stage, t), t->fragment);
        else
            check(t->fragment == (i == 0 ? 0 : 2), "%s: fragment %d", t->name, t->fragment);
    }
}

// Presets have the published number of parameters, by formula and by table; the plan's memory is what is laid out; a
// config survives its way through JSON.
static void test_families_presets(void) {
    static const struct {
        const char *preset;
        int64_t params;
    } published[] = {{"mistral-7b", 7241732096}, {"smollm3-3b", 3075098624}, {"qwen2.5-0.5b", 494032768},
                     {"qwen3-0.6b", 596049920},  {"olmo-7b", 6888095744},    {"olmo-2-7b", 7298617344}};
    Config again;
    for (size_t i = 0; i < sizeof published / sizeof *published; i++) {
        for (int recompute = 0; recompute < 2; recompute++) {
            const char *name = published[i].preset;
            MeshPlan plan = published_plan();
            MeshEstimate e;
            Stage stage;
            memset(&stage, 0, sizeof stage);
            plan.replicas = 1, plan.stages = 1, plan.anchor = 0, plan.recompute = recompute;
            plan.micro_batch = 2, plan.T = 512;
            if (!check(config_from_spec(&plan.config, name) == 0, "%s", error_message)) continue;
            plan.logits_floats = (int64_t)logits_chunk(&plan.config, 2 * 512) * plan.config.vocab;
            check(config_n_params(&plan.config) == published[i].params, "%s has %lld", name,
                  (long long)config_n_params(&plan.config));
            check(stage_table(&stage, &plan.config, 0, plan.config.n_layers) == 0 &&
                      stage_plan(&stage, 2, 512, 1, recompute) == 0,
                  "%s", error_message);
            check(stage.n_params == published[i].params, "%s: the table has %lld", name, (long long)stage.n_params);
            family_check_table(&stage);
            if (check(mesh_estimate(&e, &plan) == 0, "%s", error_message)) {
                check(e.cells[0].n_params == stage.n_params, "%s: the plan has %lld", name,
                      (long long)e.cells[0].n_params);
                check_within(e.cells[0].act_bytes, (double)stage.acts_bytes, 0.005, name);
                mesh_estimate_free(&e);
            }
            stage_free(&stage);
            json_t *json = config_to_json(&plan.config, "float32");
            check(config_from_json(&again, json, "round trip") == 0, "%s", error_message);
            check(memcmp(&plan.config, &again, sizeof again) == 0, "%s: the round trip differs", name);
            json_decref(json);
        }
    }
    check(config_from_spec(&again, "smollm3-3b") == 0, "%s", error_message);
    for (int l = 0; l < again.n_layers; l++) check(config_has_rope(&again, l) == (l % 4 != 3), "SmolLM3's layer %d", l);
    check(config_from_spec(&again, "mistral-7b") == 0 && config_window(&again, 31) == 4096, "Mistral's window");
    check(config_from_spec(&again, "family=smollm3,layers=9,d=32,heads=4,vocab=300") == 0 &&
              !config_has_rope(&again, 7) && config_has_rope(&again, 8),
          "a spec of SmolLM3: %s", error_message);
    check_error(config_from_spec(&again, "family=gpt2,layers=2"), "no family 'gpt2' (llama, mistral",
                "a spec of GPT-2");
    check_error(config_from_spec(&again, "family=,layers=2"), "no family ''", "a spec of no family");
    check_error(config_from_spec(&again, "family=qwen,layers=2"), "no family 'qwen'", "half a family's name");
}

// A fixture's config.json with a text replaced: what the message must say, or NULL if it is fine.
static void test_families_refused(void) {
    static const struct {
        const char *fixture, *from, *to, *message;
    } cases[] = {
        {"llama", "\"use_cache\"", "\"logits_scaling\": 8.0, \"use_cache\"",
         "config key 'logits_scaling' is not known"},
        {"llama", "\"use_cache\"", "\"use_cash\"", "config key 'use_cash' is not known"},
        {"llama", "\"use_cache\"", "\"num_experts\": 8, \"use_cache\"", "config key 'num_experts' is not known"},
        {"llama", "\"pretraining_tp\": 1", "\"pretraining_tp\": 2", "config key 'pretraining_tp' is 2"},
        {"llama", "\"attention_dropout\": 0.0", "\"attention_dropout\": 0.1", "config key 'attention_dropout' is 0.1"},
        {"llama", "\"attention_bias\": false", "\"attention_bias\": true", "config key 'attention_bias' is true"},
        {"llama", "\"mlp_bias\": false", "\"mlp_bias\": true", "config key 'mlp_bias' is true"},
        {"llama", "\"use_cache\"", "\"sliding_window\": 8, \"use_cache\"", "config key 'sliding_window' is 8"},
        {"llama", "\"use_cache\"", "\"no_rope_layers\": [1,0,1], \"use_cache\"",
         "config key 'no_rope_layers' is not known"},
        {"llama", "\"use_cache\"", "\"quantization_config\": {\"bits\":4}, \"use_cache\"",
         "config key 'quantization_config' is {\"bits\":4}"},
        {"llama", "\"rope_type\": \"default\"", "\"rope_type\": \"default\", \"partial_rotary_factor\": 0.5",
         "RoPE's config key 'partial_rotary_factor'"},
        {"llama", "\"rope_type\": \"default\"", "\"rope_type\": \"default\", \"partial_rotary_factor\": 1.0", NULL},
        {"llama", "\"rope_type\": \"default\"", "\"rope_type\": \"default\", \"mscale\": 1.0", "'mscale' is not known"},
        {"llama", "\"rope_theta\": 300.0,", "", NULL}, // Llama 1 and 2
        {"llama", "\"tie_word_embeddings\": false", "\"tie_word_embeddings\": 3", "neither true nor false"},
        {"llama", "\"use_cache\": true",
         "\"use_cache\": false, \"_name_or_path\": \"x\", \"rope_interleaved\": false, \"torch_dtype\": \"float16\"",
         NULL},
        {"mistral", "\"sliding_window\": 32", "\"sliding_window\": 0", "sliding_window is 0"},
        {"mistral", "\"sliding_window\": 32", "\"sliding_window\": -5", "sliding_window is -5"},
        {"mistral", "\"sliding_window\": 32", "\"sliding_window\": null", NULL},
        {"mistral", "\"rope_theta\": 10000.0,", "", "rope_theta is missing"},
        {"mistral", "\"num_key_value_heads\": 2,", "", "num_key_value_heads is missing"},
        {"smollm3", "\"full_attention\"", "\"sliding_attention\"", "layer_types has sliding_attention for layer 0"},
        {"smollm3", "\"full_attention\"", "\"chunked_attention\"", "layer_types has 'chunked_attention' for layer 0"},
        {"smollm3", "\"full_attention\",", "", "layer_types does not list 5 layers"},
        {"mistral", "\"use_cache\"",
         "\"layer_types\": [\"sliding_attention\", \"full_attention\", \"sliding_attention\"], \"use_cache\"",
         "layer_types has full_attention for layer 1; a Mistral has its sliding_window in all layers"},
        {"mistral", "\"use_cache\"", "\"use_sliding_window\": true, \"use_cache\"",
         "config key 'use_sliding_window' is true"},
        {"llama", "\"use_cache\"", "\"layer_types\": [\"sliding_attention\"], \"use_cache\"",
         "config key 'layer_types' is [\"sliding_attention\"]"},
        {"qwen2_window", "\"sliding_window\": 7", "\"sliding_window\": 0", "sliding_window is 0"},
        {"qwen2_window", "\"use_sliding_window\": true", "\"use_sliding_window\": 2", "neither true nor false"},
        {"qwen2_window", "\"use_sliding_window\": true", "\"use_sliding_window\": false",
         "layer_types has sliding_attention for layer 1, but no sliding_window"},
        {"smollm3", "\"no_rope_layers\": [", "\"no_rope_layers\": [2,", "else than 0 or 1 for layer 0"},
        {"smollm3", "\"num_hidden_layers\": 5", "\"num_hidden_layers\": 6", "does not list 6 layers"},
        {"smollm3_interval", "\"no_rope_layer_interval\": 2", "\"no_rope_layer_interval\": 0",
         "no_rope_layer_interval is 0"},
        {"smollm3", "\"tie_word_embeddings\": true,", "", NULL}, // its default
        {"qwen2", "\"use_sliding_window\": false", "\"use_sliding_window\": false, \"use_mrope\": false", NULL},
        {"qwen2", "\"use_sliding_window\": false", "\"use_sliding_window\": false, \"use_mrope\": true",
         "config key 'use_mrope' is true"},
        {"qwen2", "\"sliding_window\": null", "\"sliding_window\": 8", NULL}, // not used
        {"qwen2", "\"tie_word_embeddings\": true,", "", "tensor lm_head.weight is missing"},
        {"qwen2", "\"model_type\": \"qwen2\"", "\"model_type\": \"llama\"",
         "bias is not part of a Llama of this config"},
        {"qwen3", "\"model_type\": \"qwen3\"", "\"model_type\": \"qwen2\"", "q_proj.bias is missing"},
        {"qwen3", "\"model_type\": \"qwen3\"", "\"model_type\": \"qwen3_moe\"",
         "model_type 'qwen3_moe' is not supported"},
        {"qwen3", "\"head_dim\": 6,", "", "head_dim is missing"},
        {"qwen3", "\"attention_bias\": false", "\"attention_bias\": true", "config key 'attention_bias' is true"},
        {"olmo", "\"clip_qkv\": null", "\"clip_qkv\": 8.0", "config key 'clip_qkv' is 8.0"},
        {"olmo", "\"use_cache\"", "\"rms_norm_eps\": 1e-6, \"use_cache\"", "config key 'rms_norm_eps' is not known"},
        {"olmo2", "\"model_type\": \"olmo2\"", "\"model_type\": \"olmo\"", "config key 'rms_norm_eps' is not known"},
        {"olmo2", "\"use_cache\"", "\"clip_qkv\": 8.0, \"use_cache\"", "config key 'clip_qkv' is 8.0"},
    };
    char folder[PATH_MAX], fixture[64], target[PATH_MAX + 32], source[PATH_MAX], path[128];
    snprintf(folder, sizeof folder, "%s", scratch_path("family_bad"));
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        snprintf(fixture, sizeof fixture, "families/%s", cases[i].fixture);
        write_config(folder, fixture, cases[i].from, cases[i].to);
        snprintf(target, sizeof target, "%s/model.safetensors", folder);
        snprintf(path, sizeof path, "data/fixtures/%s/model.safetensors", fixture);
        unlink(target);
        if (realpath(path, source) == NULL || symlink(source, target) != 0) exit(1);
        int result = open_and_match(folder);
        if (cases[i].message == NULL)
            check(result == 0, "%s with %s: %s", cases[i].fixture, cases[i].to, error_message);
        else
            check_error(result, cases[i].message, cases[i].to);
    }
    file_remove_folder(folder);
}

#define FAMILY_SMALL                                                                                                   \
    "d=24,layers=4,heads=4,kv=2,head-dim=8,ffn=40,vocab=258,ctx=64 -d @/corpus.jsonl -b 5 --micro-batch 2 -t 16 "      \
    "-l 1e-2 --warmup 0 --threads 2 --val-tokens 300 "

// Any number of stages, and recomputing there, gives the same weights and losses, bit for bit.
static void test_families_stages(void) {
    char command[1024], one[64], name[64];
    write_corpus();
    for (int family = 0; family < FAMILIES; family++) {
        snprintf(one, sizeof one, "family_one_%s", families[family].model_type);
        snprintf(command, sizeof command,
                 "--init family=%s," FAMILY_SMALL "-n 3 -y 1 --clip 0 --precision fp32 -o @/%s",
                 families[family].model_type, one);
        check_run(0, NULL, command, "done: 3 steps");
        for (int y = 2; y <= 4; y += 2) {
            snprintf(name, sizeof name, "family_y%d_%s", y, families[family].model_type);
            snprintf(command, sizeof command,
                     "--init family=%s," FAMILY_SMALL "-n 3 -y %d --wire fp32 --clip 0 --precision fp32 %s-o @/%s",
                     families[family].model_type, y, y == 4 ? "--recompute " : "", name);
            check_run(0, NULL, command, "done: 3 steps");
            check_same_model(one, name);
            char *a = logged_losses(one), *b = logged_losses(name);
            check(strlen(a) > 30 && strcmp(a, b) == 0, "%s: other losses:\n%s\n%s", name, a, b);
            free(a);
            free(b);
        }
    }
}

// Tensors that are rotated together are of one layer, also where no norm lies between layers and all matrices are
// equal.
static void test_families_rotation(void) {
    Config config;
    Stage stage;
    int grouped = 0;
    if (!check(config_from_spec(&config, "family=olmo,d=16,layers=5,heads=2,ffn=16") == 0 &&
                   stage_table(&stage, &config, 0, 5) == 0,
               "%s", error_message))
        return;
    for (int i = 0; i < stage.n_tensors; i++) {
        int count = rotation_group(&stage, i);
        if (!stage.tensors[i].block) continue;
        grouped += count > 1;
        check(tensor_layer(&stage, &stage.tensors[i + count - 1]) == tensor_layer(&stage, &stage.tensors[i]),
              "%s and %d more", stage.tensors[i].name, count - 1);
    }
    check(grouped >= 5, "nothing is rotated together");
    stage_free(&stage);
}

// The losses of a run's steps; how many.
static int family_losses(const char *run, double *losses, int most) {
    json_t *steps = logged_steps(run), *line;
    size_t i;
    int n = 0;
    json_array_foreach(steps, i, line) {
        if (n < most) losses[n++] = json_real_value(json_object_get(line, "loss"));
    }
    json_decref(steps);
    return n;
}

// A compressed mesh with an anchor trains each family: the loss falls. With outer averages, rotated bases and klt's
// tables, which all look at tensors by their place; and a run that is stopped goes on to the same bits.
static void test_families_train(void) {
    char command[1024], name[64], other[64];
    double losses[8];
    write_corpus();
    for (int family = 0; family < FAMILIES; family++) {
        const char *type = families[family].model_type;
        snprintf(name, sizeof name, "family_mask_%s", type);
        snprintf(command, sizeof command,
                 "--init family=%s," FAMILY_SMALL "-n 3 -x 2 -y 2 -p 0.5 --anchor-delay 1 -o @/%s", type, name);
        check_run(0, NULL, command, "done: 3 steps");
        int n = family_losses(name, losses, 8);
        check(n == 3 && losses[2] < losses[0] - 0.05, "%s: %d losses %g %g %g", type, n, losses[0], losses[1],
              losses[2]);
        snprintf(name, sizeof name, "family_whole_%s", type), snprintf(other, sizeof other, "family_half_%s", type);
        for (int half = 0; half < 2; half++) {
            snprintf(command, sizeof command,
                     "--init family=%s," FAMILY_SMALL "-n 8 -x 3 -y 2 --codec klt -p 0.8 --anchor-delay 2 "
                     "--local-steps 3 --optimizer rotate --rotate-every 2 --precision fp32 -o @/%s%s",
                     type, half ? other : name, half ? " --stop-after 4" : "");
            check_run(0, NULL, command, half ? "--resume" : "done: 8 steps");
        }
        snprintf(command, sizeof command, "-o @/%s --resume", other);
        check_run(0, NULL, command, "done: 8 steps");
        check_same_model(name, other);
    }
}

#if defined(WITH_ZMQ)
// Several processes compute what one does: the coordinator's config says all of the family, windows and layers too.
static void test_families_processes(void) {
    write_corpus();
    check_processes_as_one("--init family=qwen3," FAMILY_SMALL "-n 4 -x 2 -y 2 --local-steps 2", "family_cells0", 3,
                           "done: 4 steps", 0);
    check_processes_as_one("--init family=mistral,window=6," FAMILY_SMALL "-n 4 -x 2 -y 2 -p 0.6 --anchor-delay 2",
                           "family_cells1", 2, "done: 4 steps", 1);
}
#endif
#endif
