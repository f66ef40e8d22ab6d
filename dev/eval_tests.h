// Tests of what measures a model: choices, answers to prompts, pruning, and the scripts beside them. For test_gpt.cu.

// A small byte-level model with weights of some size, as a list of one or two stages.
typedef struct {
    Stage stages[2];
    Tokenizer tokenizer;
    Stream *stream;
} EvalModel;

static int eval_model_open(EvalModel *m, int n_stages, int B, int T) {
    Config config;
    memset(m, 0, sizeof *m);
    m->stream = test_stream(MODEL_PRECISION, 2);
    int result = config_from_spec(&config, "d=32,layers=3,heads=4,kv=2,ffn=48,vocab=258,ctx=200");
    config.init_std = 0.25f;
    for (int i = 0; i < n_stages && result == 0; i++) {
        Stage *stage = &m->stages[i];
        result = stage_table(stage, &config, i, i + 1 < n_stages ? 1 : 3 - i) || stage_plan(stage, B, T, 0, 0) ||
                 stage_alloc(stage, m->stream);
        if (result != 0) break;
        stage_init(stage, 7);
        if (i > 0) m->stages[i - 1].next = stage;
    }
    tokenizer_open(&m->tokenizer, NULL, 258);
    return check(result == 0, "%s", error_message) ? 0 : -1;
}

static void eval_model_close(EvalModel *m) {
    for (int i = 0; i < 2; i++) stage_free(&m->stages[i]);
    stream_destroy(m->stream);
}

// Log-likelihood of the last `scored` of n tokens by the whole forward of this row alone and a log-softmax in double.
static double likelihood(EvalModel *m, const uint32_t *tokens, int n, int scored) {
    const Stage *last = model_forward(m->stages, tokens, NULL, 1, n - 1, NULL, NULL, NULL, m->stream);
    int C = last->config.channels, V = last->config.vocab;
    float *normed = (float *)malloc(sizeof(float) * (size_t)(n * C));
    float *head = (float *)malloc(sizeof(float) * (size_t)(V * C));
    double sum = 0.0;
    copy_activations(normed, last->normed, (n - 1) * C, m->stream);
    memcpy(head, seen(last->p.head, (int64_t)V * C, m->stream), sizeof(float) * (size_t)(V * C));
    for (int t = n - 1 - scored; t < n - 1; t++) {
        double total = 0.0, target = 0.0;
        for (int v = 0; v < V; v++) {
            double logit = 0.0;
            for (int c = 0; c < C; c++) logit += (double)normed[t * C + c] * (double)head[v * C + c];
            total += exp(logit);
            if ((uint32_t)v == tokens[t + 1]) target = logit;
        }
        sum += target - log(total);
    }
    free(normed);
    free(head);
    return sum;
}

// Rows of a question as this test makes them, without the program's reader: BOS and bytes, at most T + 1.
static int choice_tokens(uint32_t *tokens, const char *context, const char *choice, int T) {
    char text[512];
    int n = snprintf(text, sizeof text, "%s%s", context, choice), kept = n < T ? n : T;
    tokens[0] = BYTE_BOS;
    for (int i = 0; i < kept; i++) tokens[1 + i] = (unsigned char)text[n - kept + i];
    return kept + 1;
}

static void check_choices(const Quiz *quiz, EvalModel *m, int T, double tol) {
    FileMap map;
    JsonLines lines;
    json_t *json = NULL, *choice;
    int64_t c = 0, cut = 0;
    size_t i;
    check(file_map(&map, "data/fixtures/choices.jsonl") == 0, "%s", error_message);
    jsonl_begin(&lines, "choices", (const char *)map.data, map.size);
    while (jsonl_next(&lines, &json) > 0) {
        const char *context = json_string_value(json_object_get(json, "context"));
        json_array_foreach(json_object_get(json, "choices"), i, choice) {
            uint32_t tokens[256];
            const char *text = json_string_value(choice);
            const Choice *ours = &quiz->choices[c++];
            int n = choice_tokens(tokens, context, text, T), scored = (int)strlen(text);
            double expected = likelihood(m, tokens, n, scored);
            cut += (int)strlen(context) + scored > T;
            check(ours->n == n && memcmp(quiz->tokens + ours->first, tokens, sizeof *tokens * (size_t)n) == 0,
                  "'%s' behind '%s': other tokens", text, context);
            check(ours->scored == scored && ours->n_bytes == scored - (int)strspn(text, " \n"),
                  "'%s': %d tokens, %d bytes", text, ours->scored, ours->n_bytes);
            check(fabs(ours->logprob - expected) <= tol * fabs(expected), "'%s' behind '%s': %.8f, not %.8f", text,
                  context, ours->logprob, expected);
        }
        json_decref(json);
    }
    check(c == quiz->n_choices && c == 19 && cut == quiz->n_cut, "%lld choices, %lld cut", (long long)quiz->n_choices,
          (long long)quiz->n_cut);
    jsonl_end(&lines);
    file_unmap(&map);
}

// Choices against the whole forward and a log-softmax in double: one row at a time and many, one stage and two,
// contexts whole and cut. Must fail for: scores of the token before or after, padding that counts, a context cut at its
// right, rows of one batch that change places.
static void test_eval_choices(void) {
    static const struct { int n_stages, B, T; } cases[] = {{1, 1, 170}, {1, 8, 170}, {2, 3, 170}, {1, 2, 60}};
    double sums[4] = {0};
    for (int i = 0; i < 4; i++) {
        EvalModel m;
        Quiz quiz;
        if (eval_model_open(&m, cases[i].n_stages, cases[i].B, cases[i].T)) return;
        if (check(quiz_read(&quiz, "data/fixtures/choices.jsonl", &m.tokenizer, cases[i].T) == 0, "%s",
                  error_message)) {
            check(quiz.n_questions == 6 && quiz.questions[2].answer == 0 && quiz.questions[2].line == 4,
                  "the questions");
            check(quiz_answer(&quiz, m.stages, m.stream) == 0, "%s", error_message);
            check_choices(&quiz, &m, cases[i].T, model_tol(3e-6, 2e-2));
            check((quiz.n_cut > 0) == (cases[i].T == 60), "%lld cut", (long long)quiz.n_cut);
            for (int64_t c = 0; c < quiz.n_choices; c++) sums[i] += quiz.choices[c].logprob;
            quiz_free(&quiz);
        }
        eval_model_close(&m);
    }
    check(fabs(sums[1] - sums[0]) <= model_tol(1e-6, 1e-2) * fabs(sums[0]), "batched %.8f, single %.8f", sums[1],
          sums[0]);
}

// Picks and accuracies of likelihoods that are given: the three norms disagree.
static void test_eval_score(void) {
    Choice choices[] = {{0, 9, 2, 10, -4.0}, {0, 9, 8, 2, -3.0}, {0, 9, 4, 4, -3.5},  // tokens, bytes, sum
                        {0, 9, 1, 1, -1.0},  {0, 9, 1, 1, -1.0}, {0, 9, 1, 1, -2.0}}; // equal: the first
    Question questions[] = {{0, 3, 0, 1}, {3, 3, 0, 2}};
    Quiz quiz;
    memset(&quiz, 0, sizeof quiz);
    quiz.questions = questions, quiz.choices = choices, quiz.n_questions = 2, quiz.n_choices = 6;
    check(question_pick(&quiz, &questions[0], NORM_SUM) == 1, "by sum");
    check(question_pick(&quiz, &questions[0], NORM_BYTES) == 0, "by bytes");
    check(question_pick(&quiz, &questions[0], NORM_TOKENS) == 1, "by tokens");
    for (int norm = 0; norm < NORMS; norm++)
        check(question_pick(&quiz, &questions[1], (Norm)norm) == 0, "equal values: the first");
    QuizScore score = quiz_score(&quiz);
    check(score.accuracy[NORM_SUM] == 0.5 && score.accuracy[NORM_BYTES] == 1.0, "accuracies %g, %g",
          score.accuracy[NORM_SUM], score.accuracy[NORM_BYTES]);
    check(fabs(score.error[NORM_SUM] - 0.5) < 1e-12 && score.error[NORM_BYTES] == 0.0, "standard errors %g, %g",
          score.error[NORM_SUM], score.error[NORM_BYTES]);
}

static void test_eval_malformed(void) {
    static const struct {
        const char *line, *message;
    } cases[] = {
        {"{", "line 2"},
        {"[1, 2]", "no \"context\""},
        {"{\"choices\": [\"a\", \"b\"], \"answer\": 0}", "no \"context\""},
        {"{\"context\": 3, \"choices\": [\"a\", \"b\"], \"answer\": 0}", "no \"context\""},
        {"{\"context\": \"q\", \"answer\": 0}", "no \"choices\""},
        {"{\"context\": \"q\", \"choices\": [\"a\"], \"answer\": 0}", "at least two"},
        {"{\"context\": \"q\", \"choices\": [\"a\", 5], \"answer\": 0}", "not a string"},
        {"{\"context\": \"q\", \"choices\": [\"a\", \"  \"], \"answer\": 0}", "is empty"},
        {"{\"context\": \"q\", \"choices\": [\"a\", \"b\"]}", "no \"answer\""},
        {"{\"context\": \"q\", \"choices\": [\"a\", \"b\"], \"answer\": \"a\"}", "no \"answer\""},
        {"{\"context\": \"q\", \"choices\": [\"a\", \"b\"], \"answer\": 2}", "from 0"},
        {"{\"context\": \"q\", \"choices\": [\"a\", \"b\"], \"answer\": -1}", "from 0"},
        {"{\"context\": \"q\", \"choices\": [\"a\", \"this is far too long\"], \"answer\": 0}",
         "20 tokens, and 12 fit"},
    };
    Tokenizer tokenizer, none;
    Quiz quiz;
    char text[512];
    tokenizer_open(&tokenizer, NULL, 258);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int n = snprintf(text, sizeof text, "{\"context\": \"q\", \"choices\": [\"a\", \"b\"], \"answer\": 1}\r\n%s\n",
                         cases[i].line);
        write_file(scratch_path("bad_choices.jsonl"), text, (size_t)n);
        check_error(quiz_read(&quiz, scratch_path("bad_choices.jsonl"), &tokenizer, 12), cases[i].message,
                    cases[i].line);
        check(strstr(error_message, "line 2") != NULL, "'%s' does not name the line", error_message);
    }
    write_file(scratch_path("bad_choices.jsonl"), "\n\n", 2);
    check_error(quiz_read(&quiz, scratch_path("bad_choices.jsonl"), &tokenizer, 12), "no questions", "an empty file");
    check_error(quiz_read(&quiz, scratch_path("nowhere.jsonl"), &tokenizer, 12), "No such file", "no file");
    tokenizer_open(&none, NULL, 1000);
    check_error(quiz_read(&quiz, "data/fixtures/choices.jsonl", &none, 12), "tokenizer", "a model without text");
    tokenizer.bos = tokenizer.eos = -1;
    check_error(quiz_read(&quiz, "data/fixtures/choices.jsonl", &tokenizer, 200), "begins a text", "an empty context");
}

// What generate() gives for a prompt; the caller frees it.
static char *generated(EvalModel *m, const char *prompt, const Options *opts) {
    char *text = NULL;
    size_t size = 0;
    FILE *out = open_memstream(&text, &size);
    check(generate(m->stages, &m->tokenizer, prompt, opts, out, m->stream) == 0, "%s", error_message);
    fclose(out);
    char *copy = strdup(text);
    free(text);
    return copy;
}

// Answers the fixture's prompts `slots` at a time into the scratch folder; the file's lines, a new reference.
static json_t *answered(EvalModel *m, const Options *opts, int slots) {
    Answering a;
    FileMap map;
    JsonLines lines;
    json_t *all = json_array(), *json = NULL;
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s", scratch_path("eval_answers.jsonl"));
    memset(&a, 0, sizeof a);
    a.tokenizer = &m->tokenizer, a.opts = opts, a.temperature = opts->temperature;
    check(answers_read(&a, "data/fixtures/prompts.jsonl") == 0 && answers_alloc(&a, m->stages, slots) == 0 &&
              file_writer_open(&a.writer, path) == 0 && answers_make(&a, m->stages, m->stream) == 0 &&
              file_writer_close(&a.writer) == 0,
          "%s", error_message);
    answers_free(&a);
    check(file_map(&map, path) == 0, "%s", error_message);
    jsonl_begin(&lines, path, (const char *)map.data, map.size);
    while (jsonl_next(&lines, &json) > 0) json_array_append_new(all, json);
    jsonl_end(&lines);
    file_unmap(&map);
    return all;
}

static const char *field(const json_t *line, const char *name) {
    return json_string_value(json_object_get(line, name));
}

// Each answer is what generate() says to its prompt, in any number of slots, in the file's order and with the line's
// fields; with stop texts it is cut before the first of them. Must fail for: caches that change places without their
// answers, positions of another sequence, a stop text left in.
static void test_eval_answers(void) {
    static const int slots[] = {1, 3, 2, 7, 20};
#ifdef CUDA_EMULATOR // slow
    enum { RUNS = 2, LENGTH = 12 };
#else
    enum { RUNS = 5, LENGTH = 24 };
#endif
    EvalModel m;
    Options opts;
    char *expected[7];
    if (eval_model_open(&m, 1, 1, 90)) return;
    cli_defaults(option_table, OPTION_COUNT, &opts);
    opts.temperature = 0.0f, opts.max_tokens = LENGTH;
    for (int i = 0; i < RUNS; i++) {
        json_t *lines = answered(&m, &opts, slots[i]);
        if (!check(json_array_size(lines) == 7, "%zu answers", json_array_size(lines))) return;
        for (size_t k = 0; k < 7; k++) {
            const json_t *line = json_array_get(lines, k);
            if (i == 0) {
                char *text = generated(&m, field(line, "prompt"), &opts);
                json_t *clean = text_to_json(text, (int64_t)strlen(text));
                expected[k] = strdup(json_string_value(clean));
                json_decref(clean);
                free(text);
            }
            check(strcmp(field(line, "output"), expected[k]) == 0, "%d slots, prompt %zu: '%s', not '%s'", slots[i], k,
                  field(line, "output"), expected[k]);
            check(json_integer_value(json_object_get(line, "id")) == (json_int_t)k + 1,
                  "the order, or a field is lost");
        }
        check(strcmp(field(json_array_get(lines, 0), "answer"), "wet") == 0, "a field is lost");
        json_decref(lines);
    }
    check(strlen(expected[0]) > 4 && strcmp(expected[0], expected[2]) != 0, "the model says too little to tell");
    char *whole = generated(&m, "Water is", &opts);
    opts.stop.n = 2; // one that does not come, and one of two tokens
    snprintf(opts.stop.item[0], CLI_TEXT, "never to be seen");
    snprintf(opts.stop.item[1], CLI_TEXT, "%.2s", whole + 5);
    json_t *before = text_to_json(whole, strstr(whole, opts.stop.item[1]) - whole), *lines = answered(&m, &opts, 3);
    check(json_equal(json_object_get(json_array_get(lines, 0), "output"), before), "stopped at '%s', not before '%s'",
          field(json_array_get(lines, 0), "output"), json_string_value(before));
    json_decref(before);
    json_decref(lines);
    free(whole);
    opts.stop.n = 0, opts.temperature = 0.9f, opts.seed = 5;
    lines = answered(&m, &opts, 4);
    char *first = generated(&m, "Water is", &opts);
    json_t *clean = text_to_json(first, (int64_t)strlen(first));
    check(strcmp(field(json_array_get(lines, 0), "output"), json_string_value(clean)) == 0, "sampling differs");
    json_decref(clean);
    json_decref(lines);
    free(first);
    for (int k = 0; k < 7; k++) free(expected[k]);
    eval_model_close(&m);
}

static int magnitude_order(const void *a, const void *b) {
    float x = fabsf(*(const float *)a), y = fabsf(*(const float *)b);
    return x < y ? -1 : x > y;
}

// What is pruned against a sort, with ties, zeros of both signs, tiny and infinite values.
static void test_prune_values(void) {
    static const double shares[] = {0.0, 1e-6, 0.3, 0.5, 0.7, 0.999, 1.0};
    enum { N = 997, PIECE = 100 };
    PruneSearch *search = (PruneSearch *)malloc(sizeof *search);
    for (int kind = 0; kind < 3; kind++) {
        for (size_t s = 0; s < sizeof shares / sizeof *shares; s++) {
            float *values = random_values(N, 50 + (uint32_t)kind, kind == 1 ? 1e-38f : 1.0f), sorted[N], pruned[N];
            for (int i = 0; i < N && kind == 2; i++) values[i] = (float)((i * 7) % 5 - 2); // many equal, some zero
            if (kind == 0) values[3] = INFINITY, values[4] = -0.0f;
            memcpy(sorted, values, sizeof sorted);
            memcpy(pruned, values, sizeof pruned);
            qsort(sorted, N, sizeof *sorted, magnitude_order);
            int64_t k = prune_share(N, shares[s]), ties = 0, gone = 0;
            check(k == (int64_t)floor(N * shares[s] + 0.5), "share %g: %lld", shares[s], (long long)k);
            if (k > 0) {
                prune_begin(search, k);
                while (search->pass < 2) {
                    for (int at = 0; at < N; at += PIECE)
                        prune_look(search, pruned + at, N - at < PIECE ? N - at : PIECE);
                    prune_pass_end(search);
                }
                for (int at = 0; at < N; at += PIECE) prune_apply(search, pruned + at, N - at < PIECE ? N - at : PIECE);
            }
            float threshold = k > 0 ? fabsf(sorted[k - 1]) : -1.0f;
            for (int64_t i = 0; i < k; i++) ties += fabsf(sorted[i]) == threshold;
            for (int i = 0; i < N; i++) {
                float size = fabsf(values[i]);
                int goes = size < threshold || (size == threshold && ties-- > 0);
                gone += goes;
                check(pruned[i] == (goes ? 0.0f : values[i]), "kind %d, share %g: value %d of %g became %g", kind,
                      shares[s], i, (double)values[i], (double)pruned[i]);
            }
            check(gone == k, "%lld gone, not %lld", (long long)gone, (long long)k);
            free(values);
        }
    }
    free(search);
    check(prune_share(1000000007, (double)0.7f) == 700000005, "a share as a float: %lld",
          (long long)prune_share(1000000007, (double)0.7f));
}

// Each matrix of the layers has exactly its share of zeros, the rest as it was; embedding, norms and head are
// untouched.
static void test_prune_model(void) {
    EvalModel m;
    int64_t pruned, of, matrices = 0, expected = 0;
    if (eval_model_open(&m, 2, 1, 16)) return;
    for (int s = 0; s < 2; s++) {
        Stage *stage = &m.stages[s];
        float *before = (float *)malloc(sizeof(float) * (size_t)stage->arena_floats);
        memcpy(before, seen(stage->params, stage->arena_floats, m.stream), sizeof(float) * (size_t)stage->arena_floats);
        Stage *next = stage->next;
        stage->next = NULL;
        check(model_prune(stage, 0.3, &pruned, &of) == 0, "%s", error_message);
        stage->next = next;
        const float *after = seen(stage->params, stage->arena_floats, m.stream);
        for (int i = 0; i < stage->n_tensors; i++) {
            const Tensor *t = &stage->tensors[i];
            int64_t zeros = 0, changed = 0;
            for (int64_t j = t->offset; j < t->offset + t->n; j++)
                zeros += after[j] == 0.0f, changed += after[j] != 0.0f && after[j] != before[j];
            int64_t k = t->block ? (int64_t)floor(0.3 * (double)t->n + 0.5) : 0;
            check(zeros == k && changed == 0, "%s: %lld zeros, not %lld; %lld changed", t->name, (long long)zeros,
                  (long long)k, (long long)changed);
            matrices += t->block, expected += k;
        }
        free(before);
    }
    check(matrices == 21, "%lld matrices", (long long)matrices);
    check(m.stages[1].n_layers == 2 && pruned < expected && pruned > expected / 2 && of > pruned,
          "the counts that are told");
    eval_model_close(&m);
}

// How many values of a file's layer matrices are zero, and how many there are.
static int64_t zeros_in(const char *path, int64_t *of) {
    ModelFile file;
    int64_t zeros = 0;
    *of = 0;
    if (!check(model_file_open(&file, path) == 0, "%s", error_message)) return 0;
    for (int i = 0; i < file.shards[0].n_tensors; i++) {
        const SafeTensor *tensor = &file.shards[0].tensors[i];
        int64_t n = safetensor_count(tensor);
        if (strstr(tensor->name, "_proj.weight") == NULL) continue;
        float *values = (float *)malloc(sizeof(float) * (size_t)n);
        safetensor_read(values, tensor, 0, n);
        for (int64_t j = 0; j < n; j++) zeros += values[j] == 0.0f;
        *of += n;
        free(values);
    }
    model_file_close(&file);
    return zeros;
}

// The program's side: files of results, what is printed, and mistakes.
static void test_eval_program(void) {
    static const char model[] = "--init d=32,layers=2,heads=4,kv=2,ffn=48,vocab=258,ctx=128 ";
    char command[512];
    int64_t of, zeros;
#define RUN(status, words, message)                                                                                    \
    snprintf(command, sizeof command, "%s%s", model, words), check_run(status, NULL, command, message)
    RUN(0, "--eval-choices data/fixtures/choices.jsonl -o @/scores.jsonl", "choices: 6 questions, accuracy ");
    FileMap map;
    JsonLines lines;
    json_t *json = NULL;
    int n = 0;
    check(file_map(&map, scratch_path("scores.jsonl")) == 0, "%s", error_message);
    jsonl_begin(&lines, "scores", (const char *)map.data, map.size);
    while (jsonl_next(&lines, &json) > 0) {
        const json_t *logprobs = json_object_get(json, "logprobs");
        check(json_array_size(logprobs) >= 2 && json_real_value(json_array_get(logprobs, 0)) < 0.0, "line %d", n);
        check(json_integer_value(json_object_get(json, "line")) == n + 1 + (n >= 2), "line %d", n);
        json_decref(json);
        n++;
    }
    check(n == 6, "%d results", n);
    jsonl_end(&lines);
    file_unmap(&map);
    RUN(0, "--eval-choices data/fixtures/choices.jsonl -t 56", "3 of 19 contexts cut at their left to 56 tokens");
    write_file(scratch_path("own.jsonl"), "{\"prompt\": \"a\"}\n{\"prompt\": \"b\"}\n", 32);
    RUN(0, "--eval-generate @/own.jsonl --max-tokens 5", "own.answers.jsonl");
    check(file_exists(scratch_path("own.answers.jsonl")), "no answers");
    RUN(0, "--eval-generate data/fixtures/prompts.jsonl --max-tokens 3 -t 32 -o @/cut.jsonl", "1 prompts cut");
    RUN(0, "--prune 0.5 --export @/half.bin", "pruned: ");
    zeros = zeros_in(scratch_path("half.bin"), &of);
    check(of > 0 && zeros == of / 2, "%lld of %lld are zero", (long long)zeros, (long long)of);
    RUN(0, "--prune 0.3 --eval-choices data/fixtures/choices.jsonl", "pruned: ");
    RUN(1, "--prune 0.3 -d data/fixtures/tokens.bin", "--prune goes with");
    RUN(1, "--prune 1.5 --export @/x.bin", "from 0 to 1");
    RUN(1, "--stop x --generate a", "--stop goes with");
    RUN(1, "--eval-choices data/fixtures/choices.jsonl --eval-generate data/fixtures/prompts.jsonl", "one at a time");
    RUN(1, "--eval-choices data/fixtures/choices.jsonl -o @/no/such/folder", "open for writing");
    RUN(1, "--eval-choices data/fixtures/prompts.jsonl", "line 1: no \"context\"");
    RUN(1, "--eval-generate data/fixtures/choices.jsonl -o @/x.jsonl", "line 1: no \"prompt\"");
    RUN(0, "--eval-generate data/fixtures/prompts.jsonl --micro-batch 3 -t 32 --dry-run", "caches of generation");
    double three = said_number("caches of generation");
    RUN(0, "--eval-generate data/fixtures/prompts.jsonl --micro-batch 9 -t 32 --dry-run", "caches of generation");
    check(fabs(said_number("caches of generation") - 3.0 * three) < 0.05,
          "the plan's caches of 9 prompts are not thrice those of 3");
    RUN(1, "--eval-generate data/fixtures/prompts.jsonl -t 1 -o @/x.jsonl", "no room");
#undef RUN
}

// The scripts prove themselves, where Python is.
static void test_eval_scripts(void) {
    static const char *const commands[] = {"python3 scripts/score.py --self-test",
                                           "python3 scripts/convert_eval.py --self-test"};
    if (system("command -v python3 > /dev/null") != 0) {
        printf("     (no python3 here: the scripts are not tested)\n");
        check(1, "skipped");
        return;
    }
    for (int i = 0; i < 2; i++) check(system(commands[i]) == 0, "%s fails", commands[i]);
}
