// Adapters: their products against float64, models with them against PEFT (dev/reference/dump_lora.py), and against
// themselves: begun as the base, merged, cut into stages, in meshes, resumed, in several processes.

#ifndef DEVICE_CUDA // test_cuda.cu has these for a device
typedef struct {
    int N, K, M, rank, n;
    int at[3], width[3];
} LoraCase;

// to (rows, cols) [+]= scale * op(a) op(b) in float64; strides are given, trans_a: a is (inner, rows).
static void product_reference(float *to, int ldo, const float *a, int lda, int trans_a, const float *b, int ldb,
                              int trans_b, int rows, int cols, int inner, double scale, int add) {
    for (int i = 0; i < rows; i++) {
        for (int j = 0; j < cols; j++) {
            double sum = 0.0;
            for (int k = 0; k < inner; k++)
                sum += (double)(trans_a ? a[k * lda + i] : a[i * lda + k]) *
                       (double)(trans_b ? b[j * ldb + k] : b[k * ldb + j]);
            to[i * ldo + j] = (float)(scale * sum) + (add ? to[i * ldo + j] : 0.0f);
        }
    }
}

static void lora_case(const LoraCase *c, Precision precision, int accumulate) {
    int N = c->N, K = c->K, M = c->M, R = c->rank, all = c->n * R;
    double tol = precision == PRECISION_FP32 ? 2e-6 : 1.2e-2; // bf16 rounds what lies between the products too
    Stream *stream = test_stream(precision, 2);
    float *x = random_values((int64_t)N * K, 900, 1.0f), *dy = random_values((int64_t)N * M, 901, 1.0f);
    float *a = random_values((int64_t)all * K, 902, 1.0f), *y = random_values((int64_t)N * M, 903, 1.0f);
    float *dx = random_values((int64_t)N * K, 904, 1.0f), *b[3], *db[3], *of_b[3];
    float *mid = guarded((int64_t)N * all), *dmid = guarded((int64_t)N * all), *da = guarded((int64_t)all * K);
    float *of_y = random_values((int64_t)N * M, 903, 1.0f), *of_dx = random_values((int64_t)N * K, 904, 1.0f);
    float *of_mid = guarded((int64_t)N * all), *of_dmid = guarded((int64_t)N * all), *of_a = guarded((int64_t)all * K);
    LoraGroup group;
    memset(&group, 0, sizeof group);
    group.n = c->n, group.rank = R, group.scale = 0.75f, group.a = a, group.da = da;
    for (int64_t i = 0; i < (int64_t)all * K; i++) da[i] = of_a[i] = 0.5f; // what is overwritten, or added to
    product_reference(of_mid, all, x, K, 0, a, K, 1, N, all, K, 0.75, 0);
    for (int i = 0; i < c->n; i++) {
        int width = c->width[i];
        b[i] = random_values((int64_t)width * R, 905 + (uint64_t)i, 1.0f);
        db[i] = guarded((int64_t)width * R), of_b[i] = guarded((int64_t)width * R);
        for (int j = 0; j < width * R; j++) db[i][j] = of_b[i][j] = 0.25f;
        group.at[i] = c->at[i], group.width[i] = width, group.b[i] = b[i], group.db[i] = db[i];
        product_reference(of_y + c->at[i], M, of_mid + i * R, all, 0, b[i], R, 1, N, width, R, 1.0, 1);
        product_reference(of_dmid + i * R, all, dy + c->at[i], M, 0, b[i], R, 0, N, R, width, 0.75, 0);
        product_reference(of_b[i], R, dy + c->at[i], M, 1, of_mid + i * R, all, 0, width, R, N, 1.0, accumulate);
    }
    product_reference(of_a, K, of_dmid, all, 1, x, K, 0, all, K, N, 1.0, accumulate);
    product_reference(of_dx, K, of_dmid, all, 0, a, K, 0, N, K, all, 1.0, 1);
    lora_reduce(mid, x, &group, N, K, stream);
    lora_expand(y, mid, &group, N, M, stream);
    lora_backward(dx, dmid, dy, mid, x, &group, N, K, M, accumulate, stream);
    check(stream_check(stream) == 0, "%s", error_message);
    check_close(mid, of_mid, (int64_t)N * all, tol, "mid");
    check_close(y, of_y, (int64_t)N * M, tol, "y");
    check_close(dx, of_dx, (int64_t)N * K, tol, "dx");
    check_close(da, of_a, (int64_t)all * K, tol, "dA");
    for (int i = 0; i < c->n; i++) {
        check_close(db[i], of_b[i], (int64_t)c->width[i] * R, tol, "dB");
        release(db[i], (int64_t)c->width[i] * R, "dB");
        release(of_b[i], (int64_t)c->width[i] * R, "dB, expected");
        free(b[i]);
    }
    release(mid, (int64_t)N * all, "mid");
    release(dmid, (int64_t)N * all, "dmid");
    release(da, (int64_t)all * K, "dA");
    release(of_mid, (int64_t)N * all, "mid, expected");
    release(of_dmid, (int64_t)N * all, "dmid, expected");
    release(of_a, (int64_t)all * K, "dA, expected");
    float *plain[] = {x, dy, a, y, dx, of_y, of_dx};
    for (int i = 0; i < 7; i++) free(plain[i]);
    stream_destroy(stream);
}

// All products of a group at odd sizes: one module, two of three, three beside each other. Must fail for: the scale
// left out of one direction, a module's columns shifted, a gradient added to on the first micro-batch, dx overwritten.
static void test_lora_products(void) {
    static const LoraCase cases[] = {{1, 3, 5, 1, 1, {0}, {5}},
                                     {5, 7, 11, 2, 1, {0}, {11}},
                                     {19, 24, 47, 3, 3, {0, 31, 39}, {31, 8, 8}},
                                     {33, 17, 40, 5, 2, {0, 30}, {20, 10}},
                                     {64, 65, 33, 8, 2, {0, 16}, {16, 17}}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (int p = 0; p <= device_has_bf16(); p++)
            for (int accumulate = 0; accumulate < 2; accumulate++) lora_case(&cases[i], (Precision)p, accumulate);
}
#endif

static const char *const lora_fixtures[] = {"lora/llama", "lora/olmo2", "lora/qwen2"};
enum { LORA_FIXTURES = sizeof lora_fixtures / sizeof *lora_fixtures };

// The bytes of all that a stage has frozen; the caller frees them.
static unsigned char *lora_frozen(const Stage *stage, Stream *stream) {
    unsigned char *copy = (unsigned char *)malloc((size_t)stage->frozen_bytes);
    memcpy(copy, seen_bytes(stage->frozen_memory, (size_t)stage->frozen_bytes, stream), (size_t)stage->frozen_bytes);
    return copy;
}

// Logits, loss and every adapter's gradient, of families with and without biases, norms before and behind; the frozen
// weights keep their bits through a step. Must fail for: adapters of the wrong module, an input taken before its norm,
// alpha / rank for alpha / sqrt(rank), a step that moves a frozen weight.
static void test_lora_against_peft(void) {
    AdamW adam = {0.9f, 0.999f, 1e-8f};
    for (int i = 0; i < LORA_FIXTURES; i++) {
        Fixture f;
        if (fixture_open(&f, lora_fixtures[i], 64, 0, MODEL_PRECISION, 2)) return;
        unsigned char *frozen = lora_frozen(&f.stage, f.stream);
        family_check_fixture(&f, lora_fixtures[i], "PEFT", model_tol(5e-6, 2.5e-1));
        stage_update(&f.stage, adam, 0.1f, 0.1f, stage_grad_norm(&f.stage, f.stream), 1.0f, 1, f.stream);
        unsigned char *after = lora_frozen(&f.stage, f.stream);
        check(memcmp(frozen, after, (size_t)f.stage.frozen_bytes) == 0, "%s: a frozen weight moves", lora_fixtures[i]);
        free(frozen);
        free(after);
        fixture_close(&f);
    }
}

// Recomputing and threads change no bit; micro-batches no more than the order of sums. Must fail for: what adapters' A
// give not computed again for the last product of a layer.
static void test_lora_passes(void) {
    for (int i = 0; i < LORA_FIXTURES; i++) {
        int64_t n;
        double loss;
        float *plain = fixture_grads(lora_fixtures[i], 64, 0, 2, &loss, &n),
              *again = fixture_grads(lora_fixtures[i], 64, 1, 2, &loss, &n);
        float *single = fixture_grads(lora_fixtures[i], 64, 0, 1, &loss, &n),
              *parts = fixture_grads(lora_fixtures[i], 1, 1, 2, &loss, &n);
        check(memcmp(plain, again, sizeof(float) * (size_t)n) == 0, "%s: recomputing differs", lora_fixtures[i]);
        check(memcmp(plain, single, sizeof(float) * (size_t)n) == 0, "%s: threads differ", lora_fixtures[i]);
        check_close(parts, plain, n, model_tol(1e-6, 2e-2), "gradients of two micro-batches");
        free(plain);
        free(again);
        free(single);
        free(parts);
    }
}

#define LORA_SHAPE "d=24,layers=6,heads=4,kv=2,ffn=40,vocab=258,ctx=64"
#define LORA       "-m @/lora_base.bin -d @/corpus.jsonl -b 5 --micro-batch 2 -t 16 -l 1e-2 --threads 2 --val-tokens 300 "

// A model in a file, and the corpus; what the runs below begin with.
static void lora_write_base(void) {
    write_corpus();
    if (file_exists(scratch_path("lora_base.bin"))) return;
    check_run(0, NULL, "--init " LORA_SHAPE " --export @/lora_base.bin --export-dtype fp32", "exported");
}

// New adapters add nothing: the first loss is the base's, bit for bit. Must fail for: a B that is not zero.
static void test_lora_begins_as_base(void) {
    lora_write_base();
    check_run(0, NULL, LORA "-n 1 -l 1e-9 -o @/lora_zero --val-tokens 0 --lora-rank 3", "done: 1 steps");
    check(strstr(run_output, "step 0  validation loss") != NULL, "no loss at step 0");
    double first = said_number("step 0  validation loss ");
    check_run(0, NULL, LORA "-n 1 -l 1e-9 -o @/lora_full --val-tokens 0", "done: 1 steps");
    check(first == said_number("step 0  validation loss "), "adapters begin at %g, the base does not", first);
    char *a = logged_losses("lora_zero"), *b = logged_losses("lora_full");
    if (device_has_fp32()) check(strncmp(a, b, strcspn(a, "\"")) == 0, "losses %s, of the base %s", a, b);
    free(a);
    free(b);
}

// What is merged computes what adapters beside the weights do, as run, folder, best one, --lora and export; a GGUF too.
// Must fail for: B A transposed, alpha / rank left out, the adapters of another layer.
static void test_lora_merged(void) {
    static const char *const forms[] = {
        "-m @/lora_run",        "-m @/lora_run/latest",  "-m @/lora_base.bin --lora @/lora_run",
        "-m @/lora_merged.bin", "-m @/lora_merged.gguf", "-m @/lora_merged"};
    static const char *const exports[] = {"@/lora_merged.bin", "@/lora_merged.gguf", "@/lora_merged"};
    char command[512];
    lora_write_base();
    check_run(0, NULL, LORA "-n 12 -l 3e-2 -o @/lora_run --lora-rank 4 --lora-alpha 12 --lora-targets q,v,o,up,down",
              "done: 12 steps");
    double trained = said_number("step 12  validation loss "), first = said_number("step 0  validation loss ");
    check(trained < first - 0.03, "the loss falls from %g to %g only", first, trained);
    for (int i = 0; i < 3; i++) {
        snprintf(command, sizeof command, "-m @/lora_run --export %s --export-dtype fp32", exports[i]);
        check_run(0, NULL, command, "exported");
    }
    for (size_t i = 0; i < sizeof forms / sizeof *forms; i++) {
        snprintf(command, sizeof command, "%s --eval --val-tokens 300 -d @/corpus.jsonl -t 16 --threads 2", forms[i]);
        check_run(0, NULL, command, "validation loss");
        double merged = said_number("validation loss ");
        check(fabs(merged - trained) <= model_tol(2e-4, 3e-2), "%s: loss %g, in training %g", forms[i], merged,
              trained);
    }
    check_run(0, NULL, "-m @/lora_run/best --generate number --max-tokens 5 --temperature 0", "number");
    check_run(0, NULL, LORA "-n 3 -o @/lora_more --lora @/lora_run", "rank 4, alpha 12, of q,v,o,up,down");
    check(said_number("step 0  validation loss ") == trained, "adapters that are given begin elsewhere");
    check_run(1, NULL, "-o @/lora_more --resume --lora-alpha 7", "--lora-alpha differs from the run's");
    check_run(1, NULL, LORA "-n 3 -o @/lora_no --lora @/lora_run --lora-alpha 7", "the adapters given have alpha 12");
    check_run(1, NULL, LORA "-n 3 -o @/lora_no --lora @/lora_run --lora-targets q",
              "the adapters given are of q,v,o,up");
    check_run(0, NULL, "-m @/lora_run -d @/corpus.jsonl -b 2 -t 16 -n 2 -o @/lora_next", "done: 2 steps");
    rename(scratch_path("lora_run"), scratch_path("lora_gone")); // the checkpoint has what it was given
    check_run(0, NULL, LORA "-o @/lora_more --lora @/lora_run --resume -n 4", "done: 4 steps");
    check_run(0, NULL, "-o @/lora_more --resume -n 5", "done: 5 steps");
    check_run(0, NULL, "-o @/lora_next --resume -n 3", "done: 3 steps");
}

// What PEFT writes is read, what it would compute otherwise is refused by name. Must fail for: a key passed over.
static void test_lora_config(void) {
    static const struct {
        const char *keys, *says;
    } cases[] = {
        {"\"r\": 4, \"lora_alpha\": 8", NULL},
        {"\"r\": 4, \"lora_alpha\": 8, \"use_dora\": false, \"rank_pattern\": {}, \"news\": null", NULL},
        {"\"r\": 4, \"lora_alpha\": 8, \"use_dora\": true", "use_dora is not supported"},
        {"\"r\": 4, \"lora_alpha\": 8, \"rank_pattern\": {\"q_proj\": 2}", "rank_pattern is not supported"},
        {"\"r\": 4, \"lora_alpha\": 8, \"modules_to_save\": [\"lm_head\"]", "modules_to_save is not supported"},
        {"\"r\": 4, \"lora_alpha\": 8, \"fan_in_fan_out\": true", "fan_in_fan_out is not supported"},
        {"\"r\": 4, \"lora_alpha\": 8, \"bias\": \"all\"", "bias is 'all'"},
        {"\"r\": 0, \"lora_alpha\": 8", "r is not a rank"},
        {"\"r\": 4.5, \"lora_alpha\": 8", "r is not a rank"},
        {"\"r\": 4, \"lora_alpha\": -1", "lora_alpha is not from 1e-6 to 1e6"},
        {"\"r\": 4, \"lora_alpha\": 8, \"init_lora_weights\": \"pissa\"", "changes the model's own weights"},
        {"\"r\": 4, \"lora_alpha\": 8, \"init_lora_weights\": \"gaussian\"", NULL},
        {"\"r\": 4, \"lora_alpha\": 8, \"alora_invocation_tokens\": [1, 2]", "alora_invocation_tokens is not"},
        {"\"r\": 4, \"lora_alpha\": 8, \"news\": 7", "news is not supported"}};
    char text[512];
    AdapterConfig config;
    file_make_folders(scratch_path("lora_config"));
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        snprintf(text, sizeof text, "{\"peft_type\": \"LORA\", %s}", cases[i].keys);
        file_write_text(scratch_path("lora_config/adapter_config.json"), text);
        int result = adapter_read_config(&config, scratch_path("lora_config"));
        if (cases[i].says != NULL)
            check_error(result, cases[i].says, cases[i].keys);
        else
            check(result == 0 && config.lora.rank == 4 && config.lora.alpha == 8.0f, "%s: %s", cases[i].keys,
                  error_message);
    }
    file_write_text(scratch_path("lora_config/adapter_config.json"), "{\"peft_type\": \"LOHA\", \"r\": 4}");
    check_error(adapter_read_config(&config, scratch_path("lora_config")), "only LORA is read", "LOHA");
    file_write_text(scratch_path("lora_config/adapter_config.json"), "{\"peft_type\": ");
    check_error(adapter_read_config(&config, scratch_path("lora_config")), "line 1", "broken JSON");
    Lora lora = {3, 7.5f, 0}; // and what we write is read
    char targets[64];
    check(lora_parse_targets(&lora, "down,q_proj,up") == 0 &&
              adapter_write_config(&lora, "some/base", scratch_path("lora_config")) == 0 &&
              adapter_read_config(&config, scratch_path("lora_config")) == 0,
          "%s", error_message);
    lora_targets_text(&lora, targets, sizeof targets);
    check(strcmp(targets, "q,up,down") == 0, "targets are %s", targets);
    check(config.lora.rank == 3 && config.lora.alpha == 7.5f && strcmp(config.base, "some/base") == 0,
          "rank %d, alpha %g, base %s", config.lora.rank, (double)config.lora.alpha, config.base);
}

#ifdef DEVICE_CUDA // the emulator is slow
#define LORA_FEW(n) (size_t)1
#else
#define LORA_FEW(n) (n)
#endif

// One run as a whole and as two halves.
static void check_lora_resumes(const char *options, int i, const char *kind) {
    char command[1024], whole[40], half[40];
    snprintf(whole, sizeof whole, "lora_%s_whole%d", kind, i), snprintf(half, sizeof half, "lora_%s_half%d", kind, i);
    snprintf(command, sizeof command, LORA "%s -n 6 --save-every 4 -o @/%s", options, whole);
    check_run(0, NULL, command, "done: 6 steps");
    snprintf(command, sizeof command, LORA "%s -n 6 --save-every 4 --stop-after 3 -o @/%s", options, half);
    check_run(0, NULL, command, "--resume");
    snprintf(command, sizeof command, "-o @/%s --resume", half);
    check_run(0, NULL, command, "done: 6 steps");
    check_same_model(whole, half);
    char *a = logged_losses(whole), *b = logged_losses(half);
    check(strcmp(a, b) == 0, "%s: losses %s, resumed %s", options, a, b);
    free(a);
    free(b);
    snprintf(command, sizeof command, "-m @/%s --eval -d @/corpus.jsonl -t 16", half);
    check_run(0, NULL, command, "validation loss");
}

// Cut into stages, recomputed, in other types and by other optimizers: the same bits in any number of stages, and after
// a stop. Must fail for: an adapter's first weights that depend on the stage, a moment left out of the shard.
static void test_lora_training(void) {
    static const char *const options[] = {
        "--lora-rank 2 --optimizer-dtype int8", "--lora-rank 3 --recompute --param-dtype bf16",
        "--lora-rank 4 --lora-targets gate,down --optimizer rotate --rotate-every 3", "--lora-rank 4 --optimizer muon"};
    static const char *const layouts[] = {"-y 1", "-y 3 --recompute", "-y 6 --threads 1"};
    char command[1024], name[40];
    lora_write_base();
    for (size_t i = 0; i < LORA_FEW(sizeof options / sizeof *options); i++)
        check_lora_resumes(options[i], (int)i, "training");
    for (int k = 0; k < 3; k++) {
        snprintf(name, sizeof name, "lora_y%d", k);
        snprintf(command, sizeof command, LORA "-n 4 --wire fp32 --clip 0 --lora-rank 3 %s -o @/%s", layouts[k], name);
        check_run(0, NULL, command, "done: 4 steps");
        if (k > 0) check_same_model("lora_y0", name);
    }
}

// All that a mesh does, with adapters: outer steps over them alone, every gradient averaged, the anchor with filter,
// bias and tables, older weights.
static void test_lora_meshes(void) {
    static const char *const cases[] = {"--lora-rank 4 -x 3 -y 2 --codec klt -p 0.8 --anchor-delay 2 --anchor-use both",
                                        "--lora-rank 3 -x 3 -y 2 --local-steps 3",
                                        "--lora-rank 3 -x 2 -y 2 --dp dense",
                                        "--lora-rank 4 --lora-targets q,v -x 2 -y 3 -p 0.6 --anchor-delay 2",
                                        "--lora-rank 3 --schedule async --micro-batch 5 -y 3",
                                        "--lora-rank 3 --schedule async --micro-batch 5 -y 3 --no-stash "
                                        "--optimizer pipemare"};
    lora_write_base();
    for (size_t i = 0; i < LORA_FEW(sizeof cases / sizeof *cases); i++) check_lora_resumes(cases[i], (int)i, "mesh");
#ifdef DEVICE_CUDA // each GPU has its own copy of what is frozen
    if (nccl_devices() < 2) return;
    check_run(0, NULL, LORA "-n 3 -l 1e-4 --lora-rank 3 -x 2 -o @/lora_gpu1", "done: 3 steps");
    check_run(0, NULL, LORA "-n 3 -l 1e-4 --lora-rank 3 -x 2 --gpus 2 -o @/lora_gpu2", "done: 3 steps");
    check_close_models("lora_gpu2/latest/" ADAPTER_WEIGHTS, "lora_gpu1/latest/" ADAPTER_WEIGHTS, model_tol(2e-4, 1e-2));
#endif
}

#ifndef DEVICE_CUDA // the float64 filter is the CPU tests'
// The filter acts on the gradients of A and of B, each with the factors of its own momentum: what a step is left with
// is the float64 filter of what the pass gave. Must fail for: factors of another tensor, adapters that are not
// filtered.
static void test_lora_filter(void) {
    lora_write_base();
    MeshRun *run = mesh_run_open(LORA "--lora-rank 3 -x 2 -y 2 -p 0.5 --anchor-delay 1 -n 100 -o @/lora_filter");
    for (int step = 0; step < 3; step++) mesh_run_step(run);
    Anchor *anchor = &run->trainer.anchor;
    Stage *stage = &mesh_cell(&run->trainer.mesh, 0, 1)->stage;
    check(anchor->deliveries > 0, "no factors were delivered");
    int64_t n_all = stage->arena_floats;
    float *before = (float *)malloc(sizeof(float) * (size_t)n_all);
    memcpy(before, seen(stage->grads, n_all, run->trainer.stream), sizeof(float) * (size_t)n_all);
    stage_filter(stage, anchor, 0.3f, run->trainer.stream);
    stream_wait(run->trainer.stream);
    for (int i = 0; i < stage->n_tensors; i++) {
        const Tensor *t = &stage->tensors[i];
        const Factor *f = &anchor->sets[anchor->front].of[t->index];
        int m = (int)t->shape[0], n = (int)t->shape[1];
        if (!check(f->m == m && f->n == n && f->r == (m < n ? m : n), "%s: factors of %d x %d, rank %d", t->name, f->m,
                   f->n, f->r))
            continue;
        float *expected = guarded(t->n), *after = guarded(t->n), *parts[3];
        const float *const from[3] = {f->u, f->d, f->v};
        const int64_t sizes[3] = {(int64_t)m * f->r, f->r, (int64_t)n * f->r};
        for (int k = 0; k < 3; k++) {
            parts[k] = (float *)malloc(sizeof(float) * (size_t)sizes[k]);
            memcpy(parts[k], seen(from[k], sizes[k], run->trainer.stream), sizeof(float) * (size_t)sizes[k]);
        }
        filter_reference(expected, before + t->offset, parts[0], parts[1], parts[2], m, n, f->r, (double)0.3f);
        memcpy(after, seen(stage->grads + t->offset, t->n, run->trainer.stream), sizeof(float) * (size_t)t->n);
        check_close(after, expected, t->n, 1e-5, t->name);
        for (int k = 0; k < 3; k++) free(parts[k]);
        release(expected, t->n, "expected");
        release(after, t->n, "after");
    }
    free(before);
    mesh_run_close(run);
}
#endif

// Mistakes, each in one line that says what to do.
static void test_lora_refused(void) {
    lora_write_base();
    check_run(0, NULL, LORA "-n 1 -o @/lora_small --lora-rank 2", "done: 1 steps");
    check_run(0, NULL, "--init d=16,layers=6,heads=4,kv=2,ffn=40,vocab=258,ctx=64 --export @/lora_other.bin",
              "exported");
    check_run(0, NULL, "--init d=24,layers=4,heads=4,kv=2,ffn=40,vocab=258,ctx=64 --export @/lora_short.bin",
              "exported");
    check_run(1, NULL, LORA "-n 1 --lora-rank 13 -o @/lora_no",
              "--lora-rank 13 is beyond self_attn.k_proj, a matrix of 12 x 24");
    check_run(1, NULL, LORA "-n 1 --lora-rank 2 --lora-targets q,w -o @/lora_no", "'w' is none of q, k, v");
    check_run(1, NULL, LORA "-n 1 --lora-alpha 3 -o @/lora_no", "--lora-alpha has no effect");
    check_run(1, NULL, LORA "-n 1 --lora-rank 2 --grad-dtype bf16 -o @/lora_no", "leave it out");
    check_run(1, NULL, "--init " LORA_SHAPE " -d @/corpus.jsonl -t 16 -n 1 --lora-rank 2", "give -m");
    check_run(1, NULL, "-m @/lora_base.bin --lora-rank 2 --eval -d @/corpus.jsonl -t 16", "goes with training");
    check_run(1, NULL, LORA "-n 1 --lora-rank 3 --lora @/lora_small -o @/lora_no", "the adapters given have rank 2");
    check_run(1, NULL, "-m @/lora_other.bin --lora @/lora_small --export @/lora_no.bin", "has shape [2,24]");
    check_run(1, NULL, "-m @/lora_short.bin --lora @/lora_small -d @/corpus.jsonl -t 16 -n 1 -o @/lora_no",
              "is not part of");
    check_run(1, NULL, "-m @/lora_short.bin --lora @/lora_small --export @/lora_no.bin", "is not part of");
    check_run(1, NULL, "-m @/lora_small --lora @/lora_small --export @/lora_no.bin", "has adapters already");
    check_run(1, NULL, "-m @/lora_base.bin --lora @/nowhere --export @/lora_no.bin", "nowhere");
    unlink(scratch_path("lora_small/latest/adapter_model.safetensors"));
    check_run(1, NULL, "-m @/lora_small --export @/lora_no.bin", "adapter_model.safetensors");
}

#if defined(WITH_ZMQ) && !defined(DEVICE_CUDA)
// One process and several give the same bits; joiners and the anchor get the frozen weights as files. Must fail for: a
// joiner with other frozen weights, adapters begun by another seed.
static void test_lora_processes(void) {
    static const char *const words[] = {LORA
                                        "--lora-rank 3 -x 2 -y 2 --local-steps 4 -n 8 --val-every 3 --save-every 5",
                                        LORA "--lora-rank 3 -x 2 -y 3 -p 0.6 --anchor-delay 2 -n 8 --save-every 5",
                                        LORA "--lora @/lora_given -x 2 -y 2 -p 0.8 --codec klt --anchor-delay 2 -n 6"};
    lora_write_base();
    check_run(0, NULL, LORA "-n 3 -o @/lora_given --lora-rank 2", "done: 3 steps");
    check_processes_as_one(words[0], "lora_cells0", 3, "done: 8 steps", 0);
    check_processes_as_one(words[1], "lora_cells1", 3, "done: 8 steps", 1);
    check_processes_as_one(words[2], "lora_cells2", 2, "done: 6 steps", 1);
}
#endif

#ifndef DEVICE_CUDA // counts the host's memory
// The plan of runs with adapters is right within 5%, and replicas and the anchor of a process share the frozen weights.
static void test_lora_plan(void) {
    static const char *const cases[] = {"", "--recompute --optimizer-dtype int8", "-y 2 -x 2 --local-steps 2",
                                        "-y 2 -x 2 -p 0.6 --anchor-delay 1", "-y 2 --schedule async"};
    char words[1024];
    int64_t taken[2];
    write_corpus();
    check_run(0, NULL, PLANNED_INIT " --export @/lora_planned.bin", "exported");
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        snprintf(words, sizeof words, "-m @/lora_planned.bin --lora-rank 8 " PLANNED "%s", cases[i]);
        check_planned(words);
    }
    for (int x = 1; x <= 2; x++) {
        snprintf(words, sizeof words, "-m @/lora_planned.bin --lora-rank 8 -x %d " PLANNED, x);
        MeshRun *run = mesh_run_open(words);
        taken[x - 1] = mesh_bytes(&run->trainer).cells.frozen;
        mesh_run_close(run);
    }
    check(taken[0] > 0 && taken[0] == taken[1], "frozen: %lld bytes, with two replicas %lld", (long long)taken[0],
          (long long)taken[1]);
}
#endif
