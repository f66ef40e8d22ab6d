// Tests of GGUF and llama2.c files: dequantization, what is read and written, and everything that is refused. Fixtures
// and what they must give come from dev/reference/dump_gguf.py.
#ifndef DEV_GGUF_TESTS_H
#define DEV_GGUF_TESTS_H

#define GGUF_FIXTURES "data/fixtures/gguf/"

// ---------------------------------------------------------------------------------------------------------------------
// Values

// Every half that is a number comes back from fp32; values between two halves go to the nearer one, to the even one
// from the middle.
static void test_halves(void) {
    int wrong = 0;
    for (uint32_t half = 0; half < 0x7C00; half++) {
        float value = float_of_half((uint16_t)half), next = float_of_half((uint16_t)(half + 1));
        uint32_t even = (half & 1u) != 0 ? half + 1 : half;
        if (half + 1 == 0x7C00) next = 65536.0f;
        float middle = (float)(((double)value + (double)next) / 2.0);
        wrong += half_of_float(value) != half || half_of_float(-value) != (half | 0x8000u);
        wrong += half_of_float(middle) != even || half_of_float(nextafterf(middle, 0.0f)) != half;
        wrong += half_of_float(nextafterf(middle, 1e6f)) != half + 1;
    }
    check(wrong == 0, "%d halves are rounded wrongly", wrong);
    check(half_of_float(1e6f) == 0x7C00 && half_of_float(-INFINITY) == 0xFC00, "what is too large is not infinite");
    check(isnan(float_of_half(half_of_float(NAN))) && half_of_float(1e-20f) == 0, "NaN or the tiny");
}

// Each type against the gguf package, value by value, and any range against the whole.
static void test_gguf_quants(void) {
    SafeTensors dump;
    char name[32];
    if (!check(safetensors_open(&dump, GGUF_FIXTURES "quants.dump") == 0, "%s", error_message)) return;
    for (int d = DTYPE_SAFETENSORS; d < DTYPE_COUNT; d++) {
        int64_t n;
        Dtype dtype = (Dtype)d;
        snprintf(name, sizeof name, "%s.", dtype_name(dtype));
        float *expected = dump_values(&dump, name, "values", &n), *whole = guarded(n), *part = guarded(n),
              largest = 0.0f;
        snprintf(name, sizeof name, "%s.blocks", dtype_name(dtype));
        const SafeTensor *blocks = safetensors_find(&dump, name);
        if (!check(blocks != NULL, "%s is not in the dump", name)) exit(1);
        check(n == (int64_t)(blocks->end - blocks->begin) / (int64_t)dtype_size(dtype) * dtype_block(dtype),
              "%s: %lld values", name, (long long)n);
        quant_read(whole, dtype, blocks->data, 0, n);
        int wrong = 0;
        for (int64_t i = 0; i < n; i++) largest = fmaxf(largest, fabsf(expected[i]));
        for (int64_t i = 0; i < n; i++) wrong += !(fabsf(whole[i] - expected[i]) <= 2e-7f * largest);
        check(wrong == 0 && largest > 0.1f, "%s: %d of %lld values differ", name, wrong, (long long)n);
        wrong = 0;
        for (int64_t first = 0; first < n; first += 7) {
            int64_t count = 1 + first * 37 % 301 < n - first ? 1 + first * 37 % 301 : n - first;
            quant_read(part, dtype, blocks->data, first, count);
            wrong += memcmp(part, whole + first, sizeof(float) * (size_t)count) != 0;
        }
        check(wrong == 0, "%s: %d ranges differ from the whole", name, wrong);
        release(whole, n, name);
        release(part, n, name);
        free(expected);
    }
    safetensors_close(&dump);
}

// ---------------------------------------------------------------------------------------------------------------------
// Models

static void load_stage(Stage *stage, const char *path, int B, int T, Stream *stream) {
    ModelFile file;
    int result = model_file_open(&file, path) || stage_table(stage, &file.config, 0, file.config.n_layers) ||
                 model_match(stage, &file) || stage_plan(stage, B, T, 0, 0) || stage_alloc(stage, stream) ||
                 model_load(stage, &file, 1);
    if (!check(result == 0, "%s: %s", path, error_message)) exit(1);
    model_file_close(&file);
}

// The logits of a whole batch against those of transformers.
static void check_logits(Stage *stage, const Batch *batch, const float *expected, Stream *stream) {
    int N = batch->b * batch->T, V = stage->config.vocab;
    int64_t n = (int64_t)N * V;
    float *ours = guarded(n);
    floatX *product = (floatX *)device_alloc(sizeof(floatX) * (size_t)n);
    stage_round(stage, stream);
    stage_forward(stage, 0, batch->tokens, NULL, batch->b, batch->T, NULL, NULL, stream);
    matmul_forward(product, stage->normed, stage_weight(stage, stage->p.head), N, stage->config.channels, V, NULL,
                   stream);
    copy_activations(ours, product, (int)n, stream);
    check_close(ours, expected, n, model_tol(2e-6, 2e-2), "logits");
    device_free(product);
    release(ours, n, "logits");
}

// The logits of a GGUF of many types of blocks are those of transformers with the values of these blocks.
static void test_gguf_logits(void) {
    SafeTensors dump;
    Stage stage;
    int64_t n;
    Stream *stream = test_stream(PRECISION_FP32, 2);
    if (!check(safetensors_open(&dump, GGUF_FIXTURES "mixed.dump") == 0, "%s", error_message)) return;
    const SafeTensor *tokens = safetensors_find(&dump, "tokens");
    int B = (int)tokens->shape[0], T = (int)tokens->shape[1];
    load_stage(&stage, GGUF_FIXTURES "mixed.gguf", B, T, stream);
    RopeConfig rope = {500.0f, 1, 4.0f, 1.0f, 4.0f, 24};
    check(memcmp(&stage.config.rope, &rope, sizeof rope) == 0, "the scaling is not what rope_freqs was made of");
    float *expected = dump_values(&dump, "", "logits", &n);
    Batch batch;
    memset(&batch, 0, sizeof batch);
    batch_alloc(&batch, B, T);
    memcpy(batch.tokens, tokens->data, sizeof(int32_t) * (size_t)(B * T));
    check_logits(&stage, &batch, expected, stream);
    free(expected);
    batch_free(&batch);
    stage_free(&stage);
    stream_destroy(stream);
    safetensors_close(&dump);
}

// Parts of a tensor whose rows are read in another order are parts of the whole.
static void check_ranges(const char *path, const char *name) {
    ModelFile file;
    if (!check(model_file_open(&file, path) == 0, "%s", error_message)) return;
    const SafeTensor *tensor = model_file_find(&file, name, NULL);
    int64_t n = safetensor_count(tensor), wrong = 0;
    float *whole = guarded(n), *part = guarded(n);
    check(tensor->interleaved > 0 && safetensor_read(whole, tensor, 0, n) == 0, "%s is not interleaved", name);
    for (int64_t first = 0; first < n; first += 13) {
        int64_t count = 1 + first * 31 % 299 < n - first ? 1 + first * 31 % 299 : n - first;
        safetensor_read(part, tensor, first, count);
        wrong += memcmp(part, whole + first, sizeof(float) * (size_t)count) != 0;
    }
    check(wrong == 0, "%s: %lld ranges differ from the whole", name, (long long)wrong);
    release(whole, n, name);
    release(part, n, name);
    model_file_close(&file);
}

// What a coordinator writes for its nodes of a GGUF is what the GGUF is read as.
static void check_written(const char *path) {
    ModelFile file;
    Stage stage;
    SafeTensors written;
    char out[PATH_MAX];
    snprintf(out, sizeof out, "%s", scratch_path("part.bin"));
    memset(&stage, 0, sizeof stage);
    int result = model_file_open(&file, path) || stage_table(&stage, &file.config, 0, file.config.n_layers) ||
                 write_weights(&file, stage.tensors, stage.n_tensors, out) || safetensors_open(&written, out);
    if (!check(result == 0, "%s", error_message)) return;
    for (int i = 0; i < stage.n_tensors; i++) {
        const SafeTensor *a = model_file_find(&file, stage.tensors[i].name, NULL),
                         *b = safetensors_find(&written, stage.tensors[i].name);
        float *values = guarded(stage.tensors[i].n);
        check(safetensor_read(values, a, 0, stage.tensors[i].n) == 0 && b != NULL && b->dtype == DTYPE_F32 &&
                  memcmp(values, b->data, sizeof(float) * (size_t)stage.tensors[i].n) == 0,
              "%s differs", stage.tensors[i].name);
        release(values, stage.tensors[i].n, stage.tensors[i].name);
    }
    safetensors_close(&written);
    stage_free(&stage);
    model_file_close(&file);
}

// What an export as this type keeps of the weights: matrices rounded, norms as they are.
static void round_weights(Stage *stage, Dtype dtype) {
    for (int i = 0; i < stage->n_tensors; i++) {
        const Tensor *tensor = &stage->tensors[i];
        float *values = stage->params + tensor->offset;
        for (int64_t j = 0; j < tensor->n && tensor->n_dims > 1; j++)
            values[j] =
                dtype == DTYPE_F16 ? float_of_half(half_of_float(values[j])) : float_of_bf16(bf16_of_float(values[j]));
    }
}

// A GGUF written by other hands gives the weights of the Hugging Face folder it was made from, bit by bit; what is
// exported comes back, in each type; a scaled RoPE and a tied head too.
static void test_gguf_files(void) {
    static const char *const names[] = {"untied", "tied"};
    static const Dtype dtypes[] = {DTYPE_F32, DTYPE_BF16, DTYPE_F16};
    for (int i = 0; i < 2; i++) {
        Fixture f;
        if (fixture_open(&f, names[i], 1, 0, PRECISION_FP32, 1)) return;
        if (i == 0) check_same_weights(GGUF_FIXTURES "untied.gguf", &f.stage, 0.0, "gguf's own");
        json_t *side = json_object();
        int named;
        for (int d = 0; d < 3; d++) {
            const char *path = scratch_path("out.gguf");
            check(model_save_gguf(&f.stage, side, path, dtypes[d], &named) == 0 && !named, "%s", error_message);
            if (d > 0) round_weights(&f.stage, dtypes[d]);
            check_same_weights(path, &f.stage, 0.0, dtype_name(dtypes[d]));
            stage_free(&f.stage);
            fixture_close(&f);
            if (fixture_open(&f, names[i], 1, 0, PRECISION_FP32, 1)) return;
        }
        check(!file_exists(scratch_path("out.gguf.tmp")), "a temporary file is left");
        check_error(model_save_gguf(&f.stage, side, scratch_path("no/such/folder.gguf"), DTYPE_F32, &named),
                    "No such file", "an export to nowhere");
        json_decref(side);
        fixture_close(&f);
    }
    check_ranges(GGUF_FIXTURES "untied.gguf", "model.layers.0.self_attn.k_proj.weight");
    check_ranges(GGUF_FIXTURES "mixed.gguf", "model.layers.1.self_attn.q_proj.weight");
    check_written(GGUF_FIXTURES "mixed.gguf");
}

// The program: a GGUF is evaluated as the folder it came from, exported and trained on.
static void test_gguf_program(void) {
    char corpus[4096] = "";
    for (int i = 0; i < 40; i++) strcat(corpus, "{\"text\": \"A short text that says little, and says it again.\"}\n");
    write_file(scratch_path("gguf.jsonl"), corpus, strlen(corpus));
    check_run(0, NULL, "--init tiny --seed 3 --export @/g.bin --export-dtype fp32", "exported");
    check_run(0, NULL, "-m @/g.bin --export @/g.gguf --export-dtype fp32", "exported");
    check_run(0, NULL, "-m @/g.gguf --export @/g2.bin --export-dtype fp32", "exported");
    check(same_file("g.bin", "g2.bin"), "to GGUF and back the model, its config or its tokenizer changes");
    check_run(0, NULL, "-m @/g.gguf --eval --val-data @/gguf.jsonl -t 32", "validation loss");
    check_run(0, NULL, "-m @/g.gguf -d @/gguf.jsonl -n 2 -b 2 -t 32 -o @/gguf_run", "done: 2 steps");
    check_run(0, NULL, "-m @/g.gguf --export @/g16 --export-dtype f16", "as F16");
}

// ---------------------------------------------------------------------------------------------------------------------
// Refusals

// A small valid file whose parts the cases change: metadata of each type and two tensors.
static size_t gguf_sample(const char *path, unsigned char *bytes, size_t cap) {
    FileWriter file;
    FileMap map;
    uint64_t offset = 0;
    static const int64_t shape[2] = {3, 4};
    float values[12] = {0};
    json_t *metadata =
        json_pack("{s:s, s:i, s:b, s:f, s:[i,i,i], s:[s,s], s:i}", "a.text", "word", "a.number", 7, "a.truth", 1,
                  "a.real", 0.5, "a.list", 1, 2, 3, "a.words", "x", "y", "general.alignment", 32);
    file_writer_open(&file, path);
    gguf_put_head(&file, metadata, 2);
    gguf_put_entry(&file, "first.weight", DTYPE_F32, shape, 2, &offset);
    gguf_put_entry(&file, "other.weight", DTYPE_F32, shape, 1, &offset);
    gguf_put_padding(&file);
    floats_write(&file, values, 12, DTYPE_F32);
    gguf_put_padding(&file);
    floats_write(&file, values, 3, DTYPE_F32);
    check(file_writer_close(&file) == 0, "%s", error_message);
    json_decref(metadata);
    check(file_map(&map, path) == 0 && map.size <= cap, "the sample is too large");
    size_t size = map.size;
    memcpy(bytes, map.data, size);
    file_unmap(&map);
    return size;
}

// Every malformed file is refused in one line that names file and field; so is every beginning of a good one.
static void test_gguf_refused(void) {
    // behind `after` (NULL: the file's begin) + skip bytes stand `size` bytes of `value`
    static const struct {
        const char *after;
        int skip, size;
        uint64_t value;
        const char *message;
    } cases[] = {
        {NULL, 3, 1, 'G', "not a GGUF file"},
        {NULL, 4, 4, 1, "GGUF version 1"},
        {NULL, 4, 4, 0x03000000, "little-endian"},
        {NULL, 8, 8, 1ull << 40, "more than a model has"},
        {NULL, 8, 8, 60000, "the table of tensors"},
        {NULL, 8, 8, 3, "name of 0 bytes"},
        {NULL, 16, 8, 1ull << 60, "more than a model has"},
        {NULL, 24, 8, 1ull << 60, "a metadata key: "},
        {NULL, 24, 8, UINT64_MAX, "a metadata key: "},
        {NULL, 24, 8, 0, "name of 0 bytes"},
        {NULL, 24, 8, 130, "name of 130 bytes"},
        {NULL, 32, 1, 0, "name of 6 bytes"},
        {NULL, 32, 1, 0xFF, "not UTF-8"},
        {"a.text", 0, 4, 13, "a.text: unknown type 13"},
        {"a.text", 4, 8, 1 << 20, "a.text: 1048576 bytes"},
        {"a.text", 12, 1, 0x80, "a.text: the text is not UTF-8"},
        {"a.number", 0, 4, 10, "a metadata key: "}, // a u64 that takes in the next key's length
        {"a.truth", 4, 1, 2, "a.truth: a truth value is 2"},
        {"a.list", 4, 4, 99, "a.list: unknown type 99"},
        {"a.list", 8, 8, 1ull << 50, "a.list: "},
        {"a.list", 4, 4, 9, "a.list: "},
        {"general.alignment", 4, 4, 0, "general.alignment is not a power of two"},
        {"general.alignment", 4, 4, 48, "general.alignment is not a power of two"},
        {"general.alignment", 4, 4, 1u << 30, "general.alignment is not a power of two"},
        {"general.alignment", 0, 4, GGUF_F32, "general.alignment is not a power of two"},
        {"a.tru", 0, 2, 'x', ""}, // as it is: another name, and a NUL in it
        {"first.weight", 0, 4, 5, "first.weight has 5 dims"},
        {"first.weight", 4, 8, 1ull << 63, "first.weight: the shape overflows"},
        {"first.weight", 4, 8, 1ull << 62, "first.weight: the shape overflows"},
        {"first.weight", 4, 8, 1ull << 60, "first.weight ends at 13835058055282163712"},
        {"first.weight", 4, 8, 6, "other.weight begins at 64, inside the tensor before"},
        {"first.weight", 20, 4, 16, "first.weight has type IQ2_XXS, which is not read"},
        {"first.weight", 20, 4, 4, "first.weight has unknown type 4"},
        {"first.weight", 20, 4, 8, "first.weight: rows of 4 values are not whole blocks of Q8_0"},
        {"first.weight", 24, 8, 4, "first.weight: offset 4 is not a multiple of the alignment 32"},
        {"other.weight", 16, 8, 32, "other.weight begins at 32, inside the tensor before, which ends at 48"},
        {"first.weight", 24, 8, 1ull << 40, "first.weight ends at 1099511627824"},
        {"first.weight", 24, 8, UINT64_MAX - 31, "first.weight: the shape overflows"},
        {"other.weight", 16, 8, 96, "other.weight ends at 108 of the data, which end at 76"},
        {"other.weight", 12, 4, 30, NULL}, // BF16 where F32 were: shorter, and fine
        {"a.list", 0, 0, 0, NULL},
    };
    unsigned char good[2048], bytes[2048];
    char path[PATH_MAX];
    SafeTensors file;
    snprintf(path, sizeof path, "%s", scratch_path("case.gguf"));
    size_t size = gguf_sample(path, good, sizeof good);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        memcpy(bytes, good, size);
        size_t length = cases[i].after != NULL ? strlen(cases[i].after) : 0;
        unsigned char *at =
            cases[i].after != NULL ? (unsigned char *)memmem(bytes, size, cases[i].after, length) : bytes;
        for (int j = 0; j < cases[i].size; j++)
            at[length + (size_t)cases[i].skip + (size_t)j] = (unsigned char)(cases[i].value >> (8 * j));
        write_file(path, bytes, size);
        int result = gguf_open(&file, path);
        if (cases[i].message == NULL) {
            check(result == 0, "case %zu: %s", i, error_message);
        } else {
            check_error(result, cases[i].message, cases[i].after != NULL ? cases[i].after : "the header");
            check(strstr(error_message, "case.gguf") != NULL, "'%s' does not name the file", error_message);
        }
        if (result == 0) safetensors_close(&file);
    }
    memcpy(bytes, good, size);
    memcpy(memmem(bytes, size, "other.weight", 12), "first.weight", 12);
    write_file(path, bytes, size);
    check_error(gguf_open(&file, path), "tensor first.weight is in it twice", "a name twice");
    memcpy(bytes, good, size);
    memcpy(memmem(bytes, size, "a.list", 6), "a.text", 6);
    write_file(path, bytes, size);
    check_error(gguf_open(&file, path), "a.text is in it twice", "a key twice");
    for (size_t n = 0; n < size; n++) {
        write_file(path, good, n);
        check_error(gguf_open(&file, path), "case.gguf: ", "a file cut short");
    }
}

// A GGUF of the fixture's weights, with metadata changed: key = JSON text, NULL: gone.
static const char *gguf_with(const Fixture *f, const char *key, const char *json) {
    static char path[PATH_MAX];
    FileWriter file;
    json_t *config = config_to_json(&f->stage.config, "float32");
    json_t *metadata = gguf_metadata(config, &f->stage.config.rope, 0, DTYPE_F32);
    if (json == NULL)
        json_object_del(metadata, key);
    else
        json_object_set_new(metadata, key, json_loads(json, JSON_DECODE_ANY, NULL));
    snprintf(path, sizeof path, "%s", scratch_path("changed.gguf"));
    file_writer_open(&file, path);
    gguf_put_head(&file, metadata, f->stage.n_tensors + f->stage.config.rope.scaled);
    gguf_put_model(&file, 0, &f->stage, 0, DTYPE_F32);
    gguf_put_model(&file, 1, &f->stage, 0, DTYPE_F32);
    check(file_writer_close(&file) == 0, "%s", error_message);
    json_decref(config);
    json_decref(metadata);
    return path;
}

// What a file says and the program does not compute is refused by its name; what changes nothing is not.
static void test_gguf_config(void) {
    static const struct {
        const char *key, *json, *message;
    } cases[] = {
        {"general.architecture", "\"gemma\"", "general.architecture is 'gemma'"},
        {"general.architecture", NULL, "general.architecture is '(none)'"},
        {"general.architecture", "3", "general.architecture is '(none)'"},
        {"llama.block_count", NULL, "num_hidden_layers is missing"},
        {"llama.block_count", "3", "tensor model.layers.2.input_layernorm.weight is missing"},
        {"llama.block_count", "\"two\"", "num_hidden_layers is not a whole number"},
        {"llama.embedding_length", "43", "has shape [101,42], the config asks for [101,43]"},
        {"llama.attention.head_count", "0", "num_attention_heads is 0"},
        {"llama.attention.head_count_kv", "[3, 6]", "llama.attention.head_count_kv differs from layer to layer"},
        {"llama.attention.head_count_kv", "[3, 3]", NULL},
        {"llama.attention.key_length", "11", "llama.attention.value_length is 10; only 11"},
        {"llama.attention.value_length", "8", "llama.attention.value_length is 8; only 10"},
        {"llama.rope.dimension_count", "4", "llama.rope.dimension_count is 4; only 10"},
        {"llama.attention.scale", "0.5", "llama.attention.scale is not known"},
        {"llama.expert_count", "8", "llama.expert_count is 8"},
        {"llama.expert_count", "0", NULL},
        {"llama.attention.sliding_window", "16", NULL}, // a Mistral
        {"llama.attention.sliding_window", "16.5", "sliding_window is not a whole number"},
        {"llama.attention.sliding_window", "4096", NULL},
        {"llama.rope.scaling.type", "\"yarn\"", "RoPE type 'yarn'"},
        {"llama.rope.scaling.type", "\"none\"", NULL},
        {"llama.context_length", "1e9", "max_position_embeddings is not a whole number"},
        {"llama.rope.freq_base", "0.5", "rope_theta 0.5"},
        {"tokenizer.ggml.bos_token_id", "101", "special token id is beyond the vocabulary"},
        {"llama.attention.layer_norm_epsilon", "0.5", "llama.attention.layer_norm_epsilon is 0.5"},
        {"general.name", "\"no matter\"", NULL},
    };
    Fixture f, scaled;
    if (fixture_open(&f, "untied", 1, 0, PRECISION_FP32, 1) || fixture_open(&scaled, "tied", 1, 0, PRECISION_FP32, 1))
        return;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int result = open_and_match(gguf_with(&f, cases[i].key, cases[i].json));
        if (cases[i].message == NULL)
            check(result == 0, "%s: %s", cases[i].key, error_message);
        else
            check_error(result, cases[i].message, cases[i].key);
    }
    check_error(open_and_match(gguf_with(&scaled, "llama.rope.scaling.original_context_length", "32")),
                "rope_freqs.weight: factor", "other factors");
    check_error(open_and_match(gguf_with(&scaled, "llama.rope.scaling.original_context_length", NULL)),
                "rope_freqs.weight: factor", "factors of no known scaling");
    f.stage.tensors[1].n_dims = 0; // a name that stands for one which is there already
    snprintf(f.stage.tensors[1].name, sizeof f.stage.tensors[1].name, "model.embed_tokens.weight");
    check_error(open_and_match(gguf_with(&f, "general.name", "1")), "tensor token_embd.weight is in it twice",
                "two of a name");
    fixture_close(&f);
    fixture_close(&scaled);
}

// Names and configs of the other families, as far as the words of a config.json go.
static void test_gguf_families(void) {
    static const struct {
        const char *gguf, *hf;
        int post_norm;
    } names[] = {
        {"token_embd.weight", "model.embed_tokens.weight", 0},
        {"output.weight", "lm_head.weight", 0},
        {"output_norm.weight", "model.norm.weight", 0},
        {"blk.0.attn_q.bias", "model.layers.0.self_attn.q_proj.bias", 0},
        {"blk.12.attn_k_norm.weight", "model.layers.12.self_attn.k_norm.weight", 0},
        {"blk.3.ffn_norm.weight", "model.layers.3.post_attention_layernorm.weight", 0},
        {"blk.3.post_attention_norm.weight", "model.layers.3.post_attention_layernorm.weight", 1},
        {"blk.3.post_ffw_norm.weight", "model.layers.3.post_feedforward_layernorm.weight", 1},
    };
    static const char *const strange[] = {
        "blk.-1.output.weight", "blk.1.output.weight", "attn_q.weight", "output", "", "blk.1.attn_q.scale", ".weight",
        "blk..attn_q.weight"};
    char out[256];
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        check(gguf_rename(out, sizeof out, names[i].gguf, 1, names[i].post_norm) == 0 && strcmp(out, names[i].hf) == 0,
              "%s", out);
        check(gguf_rename(out, sizeof out, names[i].hf, 0, names[i].post_norm) == 0 && strcmp(out, names[i].gguf) == 0,
              "%s", out);
    }
    for (size_t i = 0; i < sizeof strange / sizeof *strange; i++)
        check(gguf_rename(out, sizeof out, strange[i], 1, 1) != 0 && strcmp(out, strange[i]) == 0, "'%s' became '%s'",
              strange[i], out);
    SafeTensors file;
    memset(&file, 0, sizeof file);
    file.metadata = json_pack(
        "{s:s, s:i, s:i, s:i, s:i, s:i, s:i, s:f}", "general.architecture", "smollm3", "smollm3.block_count", 36,
        "smollm3.embedding_length", 2048, "smollm3.feed_forward_length", 11008, "smollm3.attention.head_count", 16,
        "smollm3.attention.head_count_kv", 4, "smollm3.context_length", 65536, "smollm3.rope.freq_base", 5e6);
    json_t *config = gguf_config(&file);
    json_t *expected =
        json_pack("{s:s, s:i, s:i, s:i, s:i, s:i, s:i, s:f, s:i, s:b, s:i}", "model_type", "smollm3",
                  "num_hidden_layers", 36, "hidden_size", 2048, "intermediate_size", 11008, "num_attention_heads", 16,
                  "num_key_value_heads", 4, "max_position_embeddings", 65536, "rope_theta", 5e6, "head_dim", 128,
                  "tie_word_embeddings", 1, "no_rope_layer_interval", 4);
    check(gguf_export_family(config, "x") >= 0, "%s", error_message);
    json_object_set_new(config, "no_rope_layers", json_pack("[i, i, i, i, i]", 1, 1, 1, 0, 1));
    check(gguf_export_family(config, "x") >= 0, "%s", error_message);
    json_object_set_new(config, "no_rope_layers", json_pack("[i, i]", 1, 0));
    check_error(gguf_export_family(config, "x"), "have no RoPE but every fourth", "other layers without RoPE");
    json_object_del(config, "no_rope_layers");
    json_object_set_new(file.metadata, "smollm3.attention.sliding_window", json_integer(65535));
    check(gguf_config(&file) == NULL && strstr(error_message, "smollm3.attention.sliding_window is not supported"),
          "a window of unknown layers: %s", error_message);
    json_object_set_new(config, "use_sliding_window", json_true());
    check_error(gguf_export_family(config, "x"), "which layers of a smollm3 have a sliding window",
                "a window of some layers");
    json_object_del(config, "use_sliding_window");
    char *text = json_dumps(config, 0);
    check(json_equal(config, expected), "the config is %s", text);
    free(text);
    json_decref(config);
    json_decref(expected);
    json_decref(file.metadata);
}

// ---------------------------------------------------------------------------------------------------------------------
// Tokenizers

static json_t *parsed(const json_t *files, const char *name) {
    const char *text = json_string_value(json_object_get(files, name));
    return text != NULL ? json_loads(text, 0, NULL) : NULL;
}

// Scores become the merges that transformers makes of them, and go back to scores that mean the same.
static void check_scores(void) {
    SafeTensors gguf;
    if (!check(gguf_open(&gguf, GGUF_FIXTURES "untied.gguf") == 0, "%s", error_message)) return;
    json_t *files = json_object(), *expected = json_load_file(GGUF_FIXTURES "untied.json", 0, NULL);
    check(gguf_tokenizer_files(files, gguf.metadata, "x.gguf", 101) == 0, "%s", error_message);
    json_t *json = parsed(files, "tokenizer.json"), *model = json_object_get(json, "model");
    check(json_array_size(expected) > 60 && json_equal(json_object_get(model, "merges"), expected),
          "the merges differ");
    check(json_is_true(json_object_get(model, "byte_fallback")) &&
              json_object_size(json_object_get(model, "vocab")) == 101,
          "not BPE with bytes over 101 tokens");
    check(json_integer_value(json_object_get(json_object_get(model, "vocab"), "<0xC3>")) == 4, "the ids differ");
    check(json_array_size(json_object_get(json, "added_tokens")) == 3, "added tokens");
    check(strcmp(json_string_value(json_object_get(files, "chat_template.jinja")), "{{ messages }}") == 0,
          "the template");
    json_t *metadata = json_object(), *again = json_object();
    check(gguf_put_tokenizer(metadata, files, 101, 1, 2) == 1, "a tokenizer of scores has no name");
    check(gguf_tokenizer_files(again, metadata, "x.gguf", 101) == 0 && json_equal(files, again),
          "scores do not come back");
    json_decref(metadata);
    json_decref(again);
    json_decref(json);
    json_decref(files);
    json_decref(expected);
    safetensors_close(&gguf);
}

// Metadata of a byte-level tokenizer of six tokens, special ones in front (or behind), and one row that is unused.
static json_t *gguf_bpe_sample(const char *pre, int behind) {
    json_t *plain = json_pack("[s, s, s]", "a", "b", "ab"), *special = json_pack("[s, s]", "<|x|>", "<|y|>");
    json_t *plain_types = json_pack("[i, i, i]", 1, 1, 1), *special_types = json_pack("[i, i]", 3, 4);
    json_t *tokens = json_array(), *types = json_array();
    json_array_extend(tokens, behind ? plain : special);
    json_array_extend(tokens, behind ? special : plain);
    json_array_extend(types, behind ? plain_types : special_types);
    json_array_extend(types, behind ? special_types : plain_types);
    json_array_append_new(tokens, json_string("[PAD5]"));
    json_array_append_new(types, json_integer(5));
    json_decref(plain), json_decref(special), json_decref(plain_types), json_decref(special_types);
    return json_pack("{s:s, s:s, s:o, s:o, s:[s], s:i, s:i, s:b}", "tokenizer.ggml.model", "gpt2", "tokenizer.ggml.pre",
                     pre, "tokenizer.ggml.tokens", tokens, "tokenizer.ggml.token_type", types, "tokenizer.ggml.merges",
                     "a b", "tokenizer.ggml.bos_token_id", behind ? 3 : 0, "tokenizer.ggml.eos_token_id",
                     behind ? 4 : 1, "tokenizer.ggml.add_bos_token", behind);
}

// Each known way to cut text becomes the steps of a tokenizer.json and is found again under its name.
static void check_pres(void) {
    static const struct {
        const char *pre, *part, *name;
    } cases[] = {
        {"gpt-2", "\"pre_tokenizer\":{\"type\":\"ByteLevel\"", "gpt-2"},
        {"olmo", "\"pre_tokenizer\":{\"type\":\"ByteLevel\"", "gpt-2"},
        {"smollm", "[{\"type\":\"Digits\",\"individual_digits\":true},{\"type\":\"ByteLevel\"", "smollm"},
        {"llama-bpe", "\"ignore_merges\":true", "llama-bpe"},
        {"llama3", "\\\\p{N}{1,3}", "llama-bpe"},
        {"smaug-bpe", "\\\\p{N}{1,3}", "dbrx"},
        {"qwen2", "\"normalizer\":{\"type\":\"NFC\"}", "qwen2"},
        {"default", "[0-9][0-9][0-9]", "default"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        for (int behind = 0; behind < 2; behind++) {
            json_t *metadata = gguf_bpe_sample(cases[i].pre, behind), *files = json_object(), *again = json_object(),
                   *out = json_object();
            check(gguf_tokenizer_files(files, metadata, "x.gguf", 6) == 0, "%s", error_message);
            const char *text = json_string_value(json_object_get(files, "tokenizer.json"));
            if (!check(text != NULL && strstr(text, cases[i].part) != NULL, "%s: %s", cases[i].pre, text)) return;
            json_t *json = parsed(files, "tokenizer.json"),
                   *vocab = json_object_get(json_object_get(json, "model"), "vocab");
            check(json_object_size(vocab) == (behind ? 3 : 5), "%s: %zu tokens", text, json_object_size(vocab));
            check(json_is_null(json_object_get(json, "post_processor")) == !behind, "%s: begin marks", text);
            check(gguf_put_tokenizer(out, files, 6, behind ? 3 : 0, behind ? 4 : 1) == 1, "%s has no name", text);
            const char *name = json_string_value(json_object_get(out, "tokenizer.ggml.pre"));
            check(name != NULL && strcmp(name, cases[i].name) == 0, "%s became %s", cases[i].pre, name);
            check(json_equal(json_object_get(out, "tokenizer.ggml.token_type"),
                             json_object_get(metadata, "tokenizer.ggml.token_type")) &&
                      json_equal(json_object_get(out, "tokenizer.ggml.tokens"),
                                 json_object_get(metadata, "tokenizer.ggml.tokens")),
                  "%s: the tokens differ", cases[i].pre);
            check(gguf_tokenizer_files(again, out, "x.gguf", 6) == 0 && json_equal(files, again),
                  "%s does not come back", text);
            json_decref(json), json_decref(metadata), json_decref(files), json_decref(again), json_decref(out);
        }
    }
}

// What is malformed is refused; what is only unknown leaves the model without a tokenizer.
static void test_gguf_tokenizer(void) {
    static const struct {
        const char *key, *json, *message;
    } cases[] = {
        {"tokenizer.ggml.tokens", NULL, "tokenizer.ggml.tokens has 0 entries"},
        {"tokenizer.ggml.tokens", "[1, 2]", "tokenizer.ggml.tokens: entry 0 has another type"},
        {"tokenizer.ggml.tokens", "\"a\"", "tokenizer.ggml.tokens is not a list"},
        {"tokenizer.ggml.tokens", "[\"a\", \"b\"]", "tokenizer.ggml.token_type has 6 entries for 2 tokens"},
        {"tokenizer.ggml.tokens", "[\"a\",\"b\",\"c\",\"d\",\"e\",\"f\",\"g\"]", "7 entries, the embedding 6 rows"},
        {"tokenizer.ggml.token_type", "[1,1,1,1,1,\"1\"]", "tokenizer.ggml.token_type: entry 5"},
        {"tokenizer.ggml.merges", NULL, "tokenizer.ggml.merges is missing"},
        {"tokenizer.ggml.merges", "[7]", "tokenizer.ggml.merges: entry 0"},
        {"tokenizer.ggml.bos_token_id", "6", "tokenizer.ggml.bos_token_id is not the id of one of 6"},
        {"tokenizer.ggml.eos_token_id", "-1", "tokenizer.ggml.eos_token_id is not the id"},
        {"tokenizer.ggml.model", "\"llama\"", "tokenizer.ggml.scores is missing"},
        {"tokenizer.ggml.model", "\"bert\"", NULL},
        {"tokenizer.ggml.model", "4", NULL},
        {"tokenizer.ggml.pre", "\"something-new\"", NULL},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        json_t *metadata = gguf_bpe_sample("gpt-2", 0), *files = json_object();
        if (cases[i].json == NULL)
            json_object_del(metadata, cases[i].key);
        else
            json_object_set_new(metadata, cases[i].key, json_loads(cases[i].json, JSON_DECODE_ANY, NULL));
        int result = gguf_tokenizer_files(files, metadata, "x.gguf", 6);
        if (cases[i].message != NULL)
            check_error(result, cases[i].message, cases[i].key);
        else
            check(result == 0 && json_object_get(files, "tokenizer.json") == NULL, "%s: a tokenizer", cases[i].json);
        json_decref(metadata), json_decref(files);
    }
    check_pres();
    json_t *specials = gguf_bpe_sample("gpt-2", 0), *side = json_object(), *back = json_object();
    json_object_set_new(specials, "tokenizer.ggml.unknown_token_id", json_integer(1));
    json_object_set_new(specials, "tokenizer.ggml.padding_token_id", json_integer(5));
    check(gguf_tokenizer_files(side, specials, "x.gguf", 6) == 0 && gguf_put_tokenizer(back, side, 6, 0, 1) == 1, "%s",
          error_message);
    check(json_integer_value(json_object_get(back, "tokenizer.ggml.unknown_token_id")) == 1 &&
              json_integer_value(json_object_get(back, "tokenizer.ggml.padding_token_id")) == 5,
          "special tokens are lost");
    json_decref(specials), json_decref(side), json_decref(back);
    check_scores();
    json_t *unknown = json_pack("{s:s}", "tokenizer.json", "{\"model\": {\"type\": \"Unigram\"}}"),
           *out = json_object();
    check(gguf_put_tokenizer(out, unknown, 6, 0, 1) == 0 && json_object_size(out) == 2, "a tokenizer without a name");
    json_decref(unknown), json_decref(out);
}

// ---------------------------------------------------------------------------------------------------------------------
// llama2.c

static void put_words(FileWriter *file, const int32_t *words, int n) {
    for (int i = 0; i < n; i++) gguf_put_number(file, (uint32_t)words[i], 4);
}

// A tensor of a layer by the last part of its name; Q and K with rows 2i and 2i+1 from i and i + HD/2.
static void put_llama2c(FileWriter *file, const Stage *stage, const char *part, int layer) {
    char name[128];
    int HD = stage->config.head_dim;
    snprintf(name, sizeof name, layer < 0 ? "%s.weight" : "model.layers.%2$d.%1$s.weight", part, layer);
    for (int i = 0; i < stage->n_tensors; i++) {
        const Tensor *tensor = &stage->tensors[i];
        const float *values = stage->params + tensor->offset;
        if (strcmp(tensor->name, name) != 0) continue;
        int64_t columns = tensor->n_dims > 1 ? tensor->shape[1] : 1;
        int rotated = strstr(name, "q_proj") != NULL || strstr(name, "k_proj") != NULL;
        for (int64_t head = 0; rotated && head < tensor->shape[0] / HD; head++)
            for (int k = 0; k < HD / 2; k++)
                for (int side = 0; side < 2; side++)
                    floats_write(file, values + (head * HD + side * (HD / 2) + k) * columns, columns, DTYPE_F32);
        if (!rotated) floats_write(file, values, tensor->n, DTYPE_F32);
        return;
    }
    check(0, "%s is not in the table", name);
}

static void put_layers(FileWriter *file, const Stage *stage, const char *part) {
    for (int l = 0; l < stage->n_layers; l++) put_llama2c(file, stage, part, l);
}

// Writes a model as llama2.c's exporter does.
static void write_llama2c(const Stage *stage, const char *path, int version, int extra) {
    static const char *const attention[] = {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj",
                                            "self_attn.o_proj"};
    static const char *const mlp[] = {"mlp.gate_proj", "mlp.down_proj", "mlp.up_proj"};
    const Config *c = &stage->config;
    FileWriter file;
    float table[64] = {0};
    int32_t sizes[7] = {c->channels, c->ffn, c->n_layers, c->heads, c->kv_heads, c->vocab, c->context};
    int32_t magic[2] = {0x616b3432, version};
    file_writer_open(&file, path);
    if (version == 0 && !c->tied) sizes[5] = -sizes[5];
    if (version > 0) put_words(&file, magic, 2);
    put_words(&file, sizes, 7);
    if (version > 0) gguf_put_number(&file, (uint64_t)c->tied, 1);
    for (int i = 37; version > 0 && i < 256; i++) gguf_put_number(&file, 0, 1);
    if (version == 0) put_llama2c(&file, stage, "model.embed_tokens", -1);
    put_layers(&file, stage, "input_layernorm");
    if (version > 0) {
        put_layers(&file, stage, "post_attention_layernorm");
        put_llama2c(&file, stage, "model.norm", -1);
        put_llama2c(&file, stage, "model.embed_tokens", -1);
    }
    for (int i = 0; i < 4; i++) put_layers(&file, stage, attention[i]);
    if (version == 0) put_layers(&file, stage, "post_attention_layernorm");
    for (int i = 0; i < 3; i++) put_layers(&file, stage, mlp[i]);
    if (version == 0) put_llama2c(&file, stage, "model.norm", -1);
    for (int t = 0; t < c->context && version == 0; t++) floats_write(&file, table, c->head_dim, DTYPE_F32);
    if (!c->tied) put_llama2c(&file, stage, "lm_head", -1);
    for (int i = 0; i < extra; i++) gguf_put_number(&file, 0, 1);
    check(file_writer_close(&file) == 0, "%s", error_message);
}

// Both versions, tied and not, come back bit by bit; what is not exactly as long as its sizes say is refused, and no
// native file is taken for one.
static void test_llama2c(void) {
    static const char *const specs[] = {
        "d=24,layers=2,heads=4,kv=2,ffn=33,vocab=60,ctx=20,theta=10000,eps=1e-5",
        "d=24,layers=3,heads=2,kv=1,ffn=40,vocab=61,ctx=24,tied=1,theta=10000,eps=1e-5"};
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s", scratch_path("l2c.bin"));
    for (int i = 0; i < 2; i++) {
        Stage stage;
        Config config;
        Stream *stream = test_stream(PRECISION_FP32, 1);
        memset(&stage, 0, sizeof stage);
        int result = config_from_spec(&config, specs[i]);
        config.bos_id = 1, config.eos_id = 2;
        if (result == 0)
            result = stage_table(&stage, &config, 0, config.n_layers) || stage_plan(&stage, 1, 1, 0, 0) ||
                     stage_alloc(&stage, stream);
        if (!check(result == 0, "%s", error_message)) return;
        stage_init(&stage, 5);
        for (int version = 0; version < 2; version++) {
            FileMap map;
            write_llama2c(&stage, path, version, 0);
            check_same_weights(path, &stage, 0.0, specs[i]);
            check(file_map(&map, path) == 0, "%s", error_message);
            size_t size = map.size;
            file_unmap(&map);
            check(truncate(path, (off_t)size - 1) == 0, "truncate");
            check_error(open_and_match(path), "is it cut short?", "a llama2.c file without its last byte");
            check(truncate(path, 250) == 0, "truncate");
            check_error(open_and_match(path), "cut short", "the beginning of a llama2.c file");
            write_llama2c(&stage, path, version, 4);
            check_error(open_and_match(path), "a llama2.c file of these sizes has",
                        "a llama2.c file with more behind it");
        }
        write_llama2c(&stage, path, 2, 0);
        check_error(open_and_match(path), "groups of 0 values", "int8 without groups");
        write_llama2c(&stage, path, 3, 0);
        check_error(open_and_match(path), "llama2.c file of version 3", "a version of tomorrow");
        json_t *none = json_object();
        check(model_save_native(&stage, ARENA_PARAMS, none, path, DTYPE_F32) == 0 && !llama2c_is(path),
              "a native file is taken for llama2.c's");
        json_decref(none);
        stage_free(&stage);
        stream_destroy(stream);
    }
}

// Files of int8 that a script wrote and quantized itself (dev/reference/dump_llama2c.py): the values bit by bit, the
// logits of transformers; damage is refused.
// Must fail for: the scales of the next group, of each row's own groups, or of the embedding for all; Q and K as they
// lie.
static void test_llama2c_int8(void) {
    static const struct {
        int at; // of the header; -1: of the embedding's first scale, -2: a byte is missing, -3: there is one more
        unsigned char bytes[4];
        const char *message;
    } cases[] = {
        {37, {0, 0, 0, 0}, "groups of 0 values"},
        {37, {0, 0, 0, 0x80}, "groups of -2147483648 values"},
        {37, {7, 0, 0, 0}, "is not in groups of 7"},
        {37, {48, 0, 0, 0}, "q_proj.weight: scale"},
        {37, {8, 0, 0, 0}, "embed_tokens.weight: scale"},
        {-1, {0, 0, 0xC0, 0x7F}, "embed_tokens.weight: scale 0 is nan"},
        {-1, {0, 0, 0x80, 0xBF}, "scale 0 is -1;"},
        {-2, {0}, "is it cut short?"},
        {-3, {0}, "a llama2.c file of these sizes has"},
    };
    static const char *const names[] = {"llama2c/q8.bin", "llama2c/q8_tied.bin"};
    for (int i = 0; i < 2; i++) {
        Fixture f;
        int64_t n;
        char path[PATH_MAX];
        if (fixture_open(&f, names[i], 2, 0, PRECISION_FP32, 2)) return;
        const float *params = seen(f.stage.params, f.stage.arena_floats, f.stream);
        for (int t = 0; t < f.stage.n_tensors; t++) {
            const Tensor *tensor = &f.stage.tensors[t];
            float *wanted = dump_values(&f.dump, "weight.", tensor->name, &n);
            check(n == tensor->n && memcmp(params + tensor->offset, wanted, sizeof(float) * (size_t)n) == 0,
                  "%s: %s differs", names[i], tensor->name);
            free(wanted);
        }
        float *logits = dump_values(&f.dump, "", "logits", &n);
        check_logits(&f.stage, &f.batch, logits, f.stream);
        free(logits);
        fixture_close(&f);
        snprintf(path, sizeof path, "data/fixtures/%s", names[i]);
        check_ranges(path, "model.layers.1.self_attn.k_proj.weight");
        check_written(path);
    }
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        FileMap map;
        char path[PATH_MAX];
        snprintf(path, sizeof path, "%s", scratch_path("q8_bad.bin"));
        if (!check(file_map(&map, "data/fixtures/llama2c/q8.bin") == 0, "%s", error_message)) return;
        unsigned char *bytes = (unsigned char *)calloc(map.size + 1, 1);
        memcpy(bytes, map.data, map.size);
        int scale = 256 + 5 * 48 * 4 + 64 * 48; // behind the norms and the embedding's values
        if (cases[i].at >= -1) memcpy(bytes + (cases[i].at == -1 ? scale : cases[i].at), cases[i].bytes, 4);
        write_file(path, bytes, map.size + (cases[i].at == -3) - (cases[i].at == -2));
        check_error(open_and_match(path), cases[i].message, "a damaged file of int8");
        free(bytes);
        file_unmap(&map);
    }
}

#endif
