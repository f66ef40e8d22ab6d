// Tests of tokenizers. data/fixtures/tokenizers has small ones of every kind and what tokenizers, tiktoken and
// SentencePiece make of difficult texts (dev/reference/dump_tokenizers.py).
#ifndef DEV_TOKENIZER_TESTS_H
#define DEV_TOKENIZER_TESTS_H

#define TOKENIZER_FIXTURES "data/fixtures/tokenizers/"

enum { FIXTURE_VOCAB = 1100 };

// A file of the fixtures as text, a new reference.
static json_t *tokenizer_fixture(const char *name) {
    FileMap map;
    char path[PATH_MAX];
    if (path_join(path, TOKENIZER_FIXTURES, name) || !check(file_map(&map, path) == 0, "%s", error_message)) exit(1);
    json_t *text = json_stringn_nocheck((const char *)map.data, map.size);
    file_unmap(&map);
    return text;
}

// Side files with a fixture under another name.
static json_t *tokenizer_side(const char *fixture, const char *name) {
    json_t *files = json_object();
    json_object_set_new(files, name, tokenizer_fixture(fixture));
    return files;
}

static json_t *llama2c_side(void) {
    json_t *files = json_object(), *file = tokenizer_fixture("llama2c.bin");
    check(convert_llama2c(files, (const unsigned char *)json_string_value(file), json_string_length(file)) == 0, "%s",
          error_message);
    json_decref(file);
    return files;
}

static json_t *tokenizer_expected(void) {
    json_t *text = tokenizer_fixture("expected.json");
    json_t *json = json_loadb(json_string_value(text), json_string_length(text), JSON_ALLOW_NUL, NULL);
    json_decref(text);
    if (!check(json != NULL, "expected.json does not parse")) exit(1);
    return json;
}

typedef struct {
    const char *name, *file, *as; // file: of the fixtures; as: name of the side file
    TokenizerKind kind;
    const char *begin, *end; // marks; NULL: none
    int begins;
    char prefix; // 'a': always a space, 'm': if there is none, 'f': only first, 'n': none, but the text is normalized
} TokenizerCase;

static const TokenizerCase tokenizer_cases[] = {
    {"llama3", "llama3.json", "tokenizer.json", TOKENIZER_BPE, "<|begin_of_text|>", "<|end_of_text|>", 1, 0},
    {"ranks", "ranks.model", "tokenizer.model", TOKENIZER_BPE, "<|begin_of_text|>", "<|end_of_text|>", 1, 0},
    {"smollm2", "smollm2.json", "tokenizer.json", TOKENIZER_BPE, NULL, "<|endoftext|>", 0, 0},
    {"gpt2", "gpt2.json", "tokenizer.json", TOKENIZER_BPE, NULL, "<|endoftext|>", 0, 0},
    {"gpt2_prefix", "gpt2_prefix.json", "tokenizer.json", TOKENIZER_BPE, NULL, NULL, 0, 'm'},
    {"qwen", "qwen.json", "tokenizer.json", TOKENIZER_BPE, NULL, "<|endoftext|>", 0, 'n'},
    {"olmo", "olmo.json", "tokenizer.json", TOKENIZER_BPE, NULL, "<|endoftext|>", 0, 'n'},
    {"llama2", "llama2.json", "tokenizer.json", TOKENIZER_SCORE, "<s>", NULL, 1, 'a'},
    {"mistral", "mistral.json", "tokenizer.json", TOKENIZER_SCORE, NULL, NULL, 0, 'f'},
    {"metaspace", "metaspace.json", "tokenizer.json", TOKENIZER_SCORE, NULL, NULL, 0, 'm'},
    {"llama2c", NULL, NULL, TOKENIZER_SCORE, "<s>", "</s>", 1, 'a'},
};
enum { TOKENIZER_CASES = sizeof tokenizer_cases / sizeof *tokenizer_cases };

static Tokenizer open_case(const TokenizerCase *one) {
    Tokenizer tokenizer;
    json_t *files = one->file != NULL ? tokenizer_side(one->file, one->as) : llama2c_side();
    check(tokenizer_open(&tokenizer, files, FIXTURE_VOCAB) == 0, "%s: %s", one->name, error_message);
    check(tokenizer.kind == one->kind, "%s: kind %d, %s", one->name, tokenizer.kind, tokenizer.reason);
    json_decref(files);
    return tokenizer;
}

// Ids of a text, to be freed, with a guard word behind the room that is asked for.
static uint32_t *encode_guarded(const Tokenizer *tokenizer, const char *text, int64_t n, int64_t *n_ids) {
    int64_t room = tokenizer_room(tokenizer, n);
    uint32_t *ids = (uint32_t *)malloc(sizeof(uint32_t) * (size_t)(room + 1));
    char *copy = (char *)malloc((size_t)n + 1); // no byte behind it, for the sanitizers
    if (ids == NULL || copy == NULL) exit(1);
    char *exact = (char *)realloc(copy, (size_t)(n > 0 ? n : 1));
    memcpy(exact, text, (size_t)n);
    ids[room] = 0xABCDEF01;
    *n_ids = tokenizer_encode(tokenizer, ids, exact, n);
    check(*n_ids >= 0 && *n_ids <= room && ids[room] == 0xABCDEF01, "%lld ids, room for %lld: %s", (long long)*n_ids,
          (long long)room, *n_ids < 0 ? error_message : "");
    free(exact);
    return ids;
}

static int same_ids(const uint32_t *ids, int64_t n, const json_t *expected) {
    if (n != (int64_t)json_array_size(expected)) return 0;
    for (int64_t i = 0; i < n; i++)
        if ((json_int_t)ids[i] != json_integer_value(json_array_get(expected, (size_t)i))) return 0;
    return 1;
}

// What ids decode to, to be freed.
static char *decode_all(const Tokenizer *tokenizer, const uint32_t *ids, int64_t n, int64_t *n_bytes) {
    int64_t total = 0, used = 0;
    for (int64_t i = 0; i < n; i++) total += tokenizer_decode(tokenizer, NULL, 0, ids[i]);
    char *out = (char *)malloc((size_t)total + 1);
    if (out == NULL) exit(1);
    for (int64_t i = 0; i < n; i++) used += tokenizer_decode(tokenizer, out + used, (int)(total - used), ids[i]);
    check(used == total, "decoded sizes differ");
    *n_bytes = total;
    return out;
}

// Adds what comes back of a part of a text between added tokens: with the kind's prefix, U+2581 as a space, without
// bytes that have no id.
static void decoded_part(const TokenizerCase *one, const Tokenizer *tokenizer, const char *text, int64_t n,
                         int is_first, char *out, int64_t *length) {
    static const char mark[] = "\xE2\x96\x81";
    int score = one->kind == TOKENIZER_SCORE, begins = n > 0 && (*text == ' ' || (score && !memcmp(text, mark, 3)));
    int prefixed = one->prefix == 'a' || (one->prefix == 'm' && !begins) || (one->prefix == 'f' && is_first && !begins);
    if (n > 0 && prefixed) out[(*length)++] = ' ';
    for (int64_t i = 0; i < n;) {
        int is_mark = score && n - i >= 3 && memcmp(text + i, mark, 3) == 0;
        if (tokenizer->model->bpe.byte_ids[(unsigned char)text[i]] != BPE_NONE)
            out[(*length)++] = is_mark ? ' ' : text[i];
        i += is_mark ? 3 : 1;
    }
}

// The text that is to come back, to be freed.
static char *decoded_text(const TokenizerCase *one, const Tokenizer *tokenizer, const char *text, int64_t n,
                          int64_t *length) {
    static const char added[] = "<tool_call>";
    char *out = NULL;
    *length = 0;
    if (one->prefix == 'n') {
        *length = nfc_normalize(tokenizer->model->nfc, &out, text, n);
        return out;
    }
    out = (char *)malloc(2 * (size_t)n + 2);
    if (out == NULL) exit(1);
    int has_added = tokenizer_special(tokenizer, added) >= 0;
    for (int64_t at = 0; at < n;) {
        const char *found =
            has_added ? (const char *)memmem(text + at, (size_t)(n - at), added, sizeof added - 1) : NULL;
        int64_t stop = found != NULL ? found - text : n;
        decoded_part(one, tokenizer, text + at, stop - at, at == 0, out, length);
        if (found != NULL) memcpy(out + *length, added, sizeof added - 1);
        if (found != NULL) *length += (int64_t)sizeof added - 1, stop += (int64_t)sizeof added - 1;
        at = stop;
    }
    return out;
}

static void check_decoded(const TokenizerCase *one, const Tokenizer *tokenizer, const uint32_t *ids, int64_t n_ids,
                          const char *text, int64_t n) {
    int64_t got_bytes, bytes;
    char *got = decode_all(tokenizer, ids, n_ids, &got_bytes),
         *expected = decoded_text(one, tokenizer, text, n, &bytes);
    check(got_bytes == bytes && memcmp(got, expected, (size_t)bytes) == 0, "%s: '%.*s' comes back as '%.*s'", one->name,
          (int)n, text, (int)got_bytes, got);
    free(got);
    free(expected);
}

// Every kind on every text, id by id, and back.
static void test_tokenizer_expected(void) {
    json_t *expected = tokenizer_expected(), *texts = json_object_get(expected, "texts");
    check(json_array_size(texts) > 200, "%zu texts", json_array_size(texts));
    for (int k = 0; k < TOKENIZER_CASES; k++) {
        Tokenizer tokenizer = open_case(&tokenizer_cases[k]);
        const json_t *lists = json_object_get(expected, tokenizer_cases[k].name);
        int64_t total = 0;
        for (size_t i = 0; i < json_array_size(texts) && tokenizer.kind != TOKENIZER_NONE; i++) {
            const json_t *text = json_array_get(texts, i);
            int64_t n_ids, n = (int64_t)json_string_length(text);
            uint32_t *ids = encode_guarded(&tokenizer, json_string_value(text), n, &n_ids);
            if (!check(same_ids(ids, n_ids, json_array_get(lists, i)), "%s: text %zu '%s'", tokenizer_cases[k].name, i,
                       json_string_value(text)))
                for (int64_t j = 0; j < n_ids; j++) printf(" %u", ids[j]);
            check_decoded(&tokenizer_cases[k], &tokenizer, ids, n_ids, json_string_value(text), n);
            total += n_ids;
            free(ids);
        }
        check(total > 2000, "%s: %lld ids in all", tokenizer_cases[k].name, (long long)total);
        tokenizer_free(&tokenizer);
    }
    json_decref(expected);
}

// Any bytes come back, also where they are no UTF-8 (whose stretches have no form C).
static void test_tokenizer_bytes(void) {
    for (int k = 0; k < TOKENIZER_CASES; k++) {
        const TokenizerCase *one = &tokenizer_cases[k];
        Tokenizer tokenizer = open_case(one);
        for (uint32_t trial = 0; trial < 300 && one->prefix != 'n' && tokenizer.kind != TOKENIZER_NONE; trial++) {
            char text[96] = "~";
            int64_t n = 1 + rand_block(3, RAND_TEST, 0, trial).v[0] % (sizeof text - 1), n_ids;
            for (int64_t i = 1; i < n; i++) {
                Philox draw = rand_block(3, RAND_TEST, 1 + trial, (uint64_t)i);
                text[i] = (char)(draw.v[0] % 3 == 0 ? draw.v[1] : 32 + draw.v[1] % 96);
            }
            uint32_t *ids = encode_guarded(&tokenizer, text, n, &n_ids);
            if (one->prefix == 0) check_decoded(one, &tokenizer, ids, n_ids, text, n);
            free(ids);
        }
        if (strcmp(one->name, "gpt2") == 0) {
            int64_t n_ids;
            uint32_t *ids = encode_guarded(&tokenizer, "\xC0\xE2\x96", 3, &n_ids);
            check(n_ids == 3 && ids[0] == tokenizer.model->bpe.byte_ids[0xC0] &&
                      ids[2] == tokenizer.model->bpe.byte_ids[0x96],
                  "%s: bytes that are no UTF-8", one->name);
            free(ids);
        }
        tokenizer_free(&tokenizer);
    }
}

static void test_tokenizer_marks(void) {
    for (int k = 0; k < TOKENIZER_CASES; k++) {
        const TokenizerCase *one = &tokenizer_cases[k];
        Tokenizer tokenizer = open_case(one);
        char out[8];
        int begin = one->begin != NULL ? tokenizer_special(&tokenizer, one->begin) : -1;
        int end = one->end != NULL ? tokenizer_special(&tokenizer, one->end) : -1;
        check((one->begin == NULL) == (begin < 0) && (one->end == NULL) == (end < 0), "%s: marks %d %d", one->name,
              begin, end);
        // the fixture of llama2 has no tokenizer_config.json, and llama2c's is made with the rest
        int expected_end = strcmp(one->name, "llama2c") == 0 ? -1 : end;
        check(tokenizer.bos == begin && tokenizer_adds_bos(&tokenizer) == one->begins &&
                  (tokenizer.eos == end || tokenizer.eos == expected_end),
              "%s: bos %d eos %d", one->name, tokenizer.bos, tokenizer.eos);
        check(end < 0 || tokenizer_decode(&tokenizer, out, sizeof out, (uint32_t)end) == 0, "%s: a mark has bytes",
              one->name);
        check(tokenizer_special(&tokenizer, "<|nothing|>") == -1 && tokenizer_special(&tokenizer, "") == -1,
              "%s: a mark that is not there", one->name);
        check(tokenizer_decode(&tokenizer, out, sizeof out, FIXTURE_VOCAB) == 0 &&
                  tokenizer_decode(&tokenizer, out, sizeof out, 0xFFFFFFFF) == 0,
              "%s: an id beyond", one->name);
        tokenizer_free(&tokenizer);
    }
}

// tokenizer_config.json's marks: by string or object, turns apart from documents.
static void test_tokenizer_config(void) {
    static const struct {
        const char *file, *config, *bos, *eos;
        int adds;
    } cases[] = {
        {"llama2.json", "{\"bos_token\":\"<s>\",\"eos_token\":{\"content\":\"</s>\"}}", "<s>", "</s>", 1},
        {"llama2.json", "{\"eos_token\":\"</s>\",\"add_bos_token\":false}", "<s>", "</s>", 0},
        {"mistral.json", "{\"bos_token\":\"<s>\",\"eos_token\":\"</s>\",\"add_bos_token\":true}", "<s>", "</s>", 1},
        {"qwen.json", "{\"bos_token\":null,\"eos_token\":\"<|im_end|>\"}", NULL, "<|endoftext|>", 0},
        {"llama3.json", "{\"eos_token\":\"<|eot_id|>\"}", "<|begin_of_text|>", "<|end_of_text|>", 1},
        {"gpt2.json", "{\"bos_token\":\"<|endoftext|>\"}", "<|endoftext|>", "<|endoftext|>", 0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        Tokenizer tokenizer;
        json_t *files = tokenizer_side(cases[i].file, "tokenizer.json");
        json_object_set_new(files, "tokenizer_config.json", json_string(cases[i].config));
        check(tokenizer_open(&tokenizer, files, FIXTURE_VOCAB) == 0, "%s", error_message);
        int bos = cases[i].bos != NULL ? tokenizer_special(&tokenizer, cases[i].bos) : -1;
        check(tokenizer.bos == bos && tokenizer.eos == tokenizer_special(&tokenizer, cases[i].eos) &&
                  tokenizer.eos >= 0 && tokenizer_adds_bos(&tokenizer) == cases[i].adds,
              "%s with %s: bos %d eos %d adds %d", cases[i].file, cases[i].config, tokenizer.bos, tokenizer.eos,
              tokenizer_adds_bos(&tokenizer));
        tokenizer_free(&tokenizer);
        json_object_set_new(files, "tokenizer_config.json", json_string("{"));
        check_error(tokenizer_open(&tokenizer, files, FIXTURE_VOCAB), "tokenizer_config.json: line 1", "half a config");
        json_decref(files);
    }
}

// The pieces that Llama 3's pattern cuts, with | between them; GPT-2's for comparison.
static void test_tokenizer_pieces(void) {
    static const struct {
        const char *pattern, *text, *pieces;
    } cases[] = {
        {SPLIT_LLAMA3, "Hello world!", "Hello| world|!"},
        {SPLIT_LLAMA3, "I'll DON'T you'RE", "I|'ll| DON|'T| you|'RE"},
        {SPLIT_GPT2, "I'll DON'T you'RE", "I|'ll| DON|'|T| you|'|RE"},
        {SPLIT_LLAMA3, "12345678 9", "123|456|78| |9"},
        {SPLIT_GPT2, "12345678 9", "12345678| 9"},
        {SPLIT_LLAMA3, " Vi\xE1\xBB\x87t", " Vi\xE1\xBB\x87t"},
        {SPLIT_LLAMA3, "\r\n\r\n a", "\r\n\r\n| a"},
        {SPLIT_LLAMA3, "trailing   ", "trailing|   "},
        {SPLIT_LLAMA3, "<+eot_id+>", "<+|eot|_id|+>"},
        {SPLIT_LLAMA3, "\xF0\x9F\x91\x8D\xF0\x9F\x8F\xBD", "\xF0\x9F\x91\x8D\xF0\x9F\x8F\xBD"},
        {SPLIT_LLAMA3, "it'\xC5\xBF", "it|'\xC5\xBF"}, // U+017F folds to s
        {SPLIT_GPT2, "it'\xC5\xBF", "it|'|\xC5\xBF"},
        {SPLIT_LLAMA3, "a \xC2\xA0 b", "a| \xC2\xA0| b"},    // no-break space is space
        {SPLIT_LLAMA3, "a \xE1\xA0\x8E", "a| \xE1\xA0\x8E"}, // U+180E is none
        {SPLIT_LLAMA3, "a  \xC2\x85\nb", "a|  \xC2\x85\n|b"},
        {SPLIT_LLAMA3, "   x  y", "  | x| | y"},
        {"[^\\s\\d]+",
         "a1 \xD9\xA3"
         "b",
         "a|b"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        Splitter splitter;
        char reason[TOKENIZER_REASON] = "", got[256] = "";
        int64_t n = (int64_t)strlen(cases[i].text), from = 0, to = 0;
        memset(&splitter, 0, sizeof splitter);
        check(splitter_add(&splitter, cases[i].pattern, 0, reason, sizeof reason) == 0, "%s", reason);
        pcre2_match_data *match = pcre2_match_data_create(1, NULL);
        while (splitter_find(&splitter, 0, cases[i].text, n, to, match, &from, &to) > 0)
            snprintf(got + strlen(got), sizeof got - strlen(got), "%s%.*s", *got != '\0' ? "|" : "", (int)(to - from),
                     cases[i].text + from);
        check(strcmp(got, cases[i].pieces) == 0, "'%s' is cut as '%s'", cases[i].text, got);
        pcre2_match_data_free(match);
        splitter_free(&splitter);
    }
}

// Patterns that could mean something else in another dialect, or are wrong.
static void test_tokenizer_patterns(void) {
    static const char *const bad[] = {"\\w+",  "\\h",      "^a",    "a$",      ".",     "[[:alpha:]]", "[a&&b]", "[a",
                                      "(?i)a", "(?P<n>a)", "a{,3}", "a{1,3}+", "a{2}?", "\\p{Han}",    "\\X",    "\\",
                                      "[\\S]", "(a",       "a)",    "\\b",     "\\1",   "[\\w]",       "(?>a)",  "+"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        Splitter splitter;
        char reason[TOKENIZER_REASON] = "";
        memset(&splitter, 0, sizeof splitter);
        check(splitter_add(&splitter, bad[i], 0, reason, sizeof reason) == 1 && reason[0] != '\0', "'%s' is taken",
              bad[i]);
        splitter_free(&splitter);
    }
}

// The plainest form: the lowest rank, the leftmost of several, until there is none.
static int64_t merge_plainly(const Bpe *bpe, uint32_t *ids, int64_t n) {
    for (;;) {
        int64_t best = -1;
        for (int64_t i = 0; i + 1 < n; i++) {
            uint32_t rank = bpe_merge_of(bpe, ids[i], ids[i + 1])->rank;
            if (rank != BPE_NONE && (best < 0 || rank < bpe_merge_of(bpe, ids[best], ids[best + 1])->rank)) best = i;
        }
        if (best < 0) return n;
        ids[best] = bpe_merge_of(bpe, ids[best], ids[best + 1])->made;
        n--;
        for (int64_t i = best + 1; i < n; i++) ids[i] = ids[i + 1];
    }
}

// A few symbols that all merge in many ways: looked at one by one, by the heap and plainly. Then long pieces.
static void test_tokenizer_merges(void) {
    enum { LONG = 400, IDS = 4000 };
    Bpe bpe;
    BpeWork work = {0, NULL, NULL, NULL, 0};
    uint32_t plain[LONG], quick[LONG], heap[LONG], rank = 0;
    check(bpe_alloc(&bpe, IDS, 1, 3000) == 0, "%s", error_message);
    for (uint32_t i = 0; i < 3000; i++) {
        Philox draw = rand_block(5, RAND_TEST, 0, i);
        uint32_t limit = 4 + i / 16; // of ids, so that most pairs of what is made early merge
        uint32_t left = draw.v[0] % limit, right = draw.v[1] % limit;
        if (bpe_merge_of(&bpe, left, right)->rank == BPE_NONE) bpe_add_merge(&bpe, left, right, 4 + i, rank++);
    }
    int joined = 0;
    for (uint32_t trial = 0; trial < 400; trial++) {
        int64_t n = trial % 2 ? LONG - trial % 7 : 2 + trial % (BPE_SHORT - 1);
        for (int64_t i = 0; i < n; i++)
            plain[i] = quick[i] = heap[i] = rand_block(5, RAND_TEST, 1 + trial, (uint64_t)i).v[0] % 4;
        int64_t n_plain = merge_plainly(&bpe, plain, n), n_heap = bpe_merge_long(&bpe, &work, heap, n);
        check(n_heap == n_plain && memcmp(heap, plain, sizeof *plain * (size_t)n_plain) == 0,
              "%lld symbols: %lld by the heap, %lld plainly", (long long)n, (long long)n_heap, (long long)n_plain);
        if (n <= BPE_SHORT) {
            int64_t n_quick = bpe_merge_short(&bpe, quick, n);
            check(n_quick == n_plain && memcmp(quick, plain, sizeof *plain * (size_t)n_plain) == 0,
                  "%lld symbols: %lld one by one, %lld plainly", (long long)n, (long long)n_quick, (long long)n_plain);
        }
        joined += n_plain < n / 2;
    }
    check(joined > 300, "little is joined: %d", joined);
    bpe_work_free(&work);
    bpe_free(&bpe);
}

// Very many letters, spaces or marks without a break: in seconds where a quadratic way takes hours.
static void test_tokenizer_long(void) {
    enum { N = 100000 };
    static const char *const units[] = {"a", " ", "\n", "ab", "\xCC\xA3\xCC\x87", "1", "a ", "\xE2\x96\x81", "-="};
    char *text = (char *)malloc(N);
    if (text == NULL) exit(1);
    for (int k = 0; k < TOKENIZER_CASES; k++) {
        Tokenizer tokenizer = open_case(&tokenizer_cases[k]);
        double start = seconds();
        for (size_t u = 0; u < sizeof units / sizeof *units; u++) {
            int64_t n = N - N % (int64_t)strlen(units[u]), n_ids;
            for (int64_t i = 0; i < n; i++) text[i] = units[u][i % (int64_t)strlen(units[u])];
            uint32_t *ids = encode_guarded(&tokenizer, text, n, &n_ids);
            check_decoded(&tokenizer_cases[k], &tokenizer, ids, n_ids, text, n);
            free(ids);
        }
        check(seconds() - start < 120.0, "%s: long texts took %.1f s", tokenizer_cases[k].name, seconds() - start);
        tokenizer_free(&tokenizer);
    }
    free(text);
}

// ---------------------------------------------------------------------------------------------------------------------
// Files

// A tokenizer.json with one thing changed: a JSON Patch's path, and what is there then (NULL: it is removed).
static json_t *tokenizer_changed(const char *fixture, const char *path, const char *value) {
    json_t *text = tokenizer_fixture(fixture), *files = json_object();
    json_t *json = json_loadb(json_string_value(text), json_string_length(text), 0, NULL), *at = json;
    char step[64];
    const char *from = path;
    for (const char *slash; (slash = strchr(from, '/')) != NULL; from = slash + 1) {
        snprintf(step, sizeof step, "%.*s", (int)(slash - from), from);
        at = json_is_array(at) ? json_array_get(at, (size_t)atoi(step)) : json_object_get(at, step);
    }
    json_t *changed = value != NULL ? json_loads(value, JSON_DECODE_ANY, NULL) : NULL;
    if (json_is_array(at))
        json_array_set_new(at, (size_t)atoi(from), changed);
    else if (changed == NULL)
        json_object_del(at, from);
    else
        json_object_set_new(at, from, changed);
    char *dumped = json_dumps(json, JSON_COMPACT);
    json_object_set_new(files, "tokenizer.json", json_string(dumped));
    free(dumped);
    json_decref(json);
    json_decref(text);
    return files;
}

// What is not done exactly takes no text and says why; what is malformed is an error that names it.
static void test_tokenizer_refused(void) {
    static const struct {
        const char *fixture, *path, *value, *reason;
        int malformed;
    } cases[] = {
        {"gpt2.json", "model/type", "\"Unigram\"", "Unigram, not BPE", 0},
        {"gpt2.json", "model/type", "\"WordPiece\"", "WordPiece, not BPE", 0},
        {"gpt2.json", "model", "{}", "no known type", 0},
        {"gpt2.json", "model/dropout", "0.1", "dropout", 0},
        {"gpt2.json", "model/end_of_word_suffix", "\"</w>\"", "end_of_word_suffix", 0},
        {"gpt2.json", "normalizer", "{\"type\":\"Lowercase\"}", "normalizer Lowercase", 0},
        {"qwen.json", "normalizer", "{\"type\":\"Sequence\",\"normalizers\":[{\"type\":\"NFKC\"}]}", "normalizer NFKC",
         0},
        {"gpt2.json", "normalizer", "{\"type\":\"Prepend\",\"prepend\":\"\xE2\x96\x81\"}", "changes spaces", 0},
        {"gpt2.json", "pre_tokenizer", "{\"type\":\"Whitespace\"}", "pre-tokenizer Whitespace", 0},
        {"gpt2.json", "pre_tokenizer", "null", "neither ByteLevel's", 0},
        {"gpt2.json",
         "model/vocab/\xC4\xA0"
         "a",
         "1100", "an id 1100, and the model's vocabulary is 1100", 0},
        {"llama3.json", "pre_tokenizer/pretokenizers/0/behavior", "\"MergedWithNext\"", "Split MergedWithNext", 0},
        {"llama3.json", "pre_tokenizer/pretokenizers/0/pattern/Regex", "\"\\\\w+\"", "its split pattern has '\\w+'", 0},
        {"llama3.json", "pre_tokenizer/pretokenizers/1/add_prefix_space", "true", "before parts of a text", 0},
        {"qwen.json", "added_tokens/4/lstrip", "true", "takes spaces or words", 0},
        {"qwen.json", "added_tokens/4/id", "1100", "adds an id 1100", 0},
        {"llama2.json", "model/byte_fallback", "false", "byte_fallback", 0},
        {"llama2.json", "model/vocab/<0x41>", NULL, "byte 65", 0},
        {"llama2.json", "normalizer/normalizers/1/content", "\"_\"", "normalizer Replace", 0},
        {"llama2.json", "pre_tokenizer", "{\"type\":\"Digits\"}", "has no ByteLevel", 0},
        {"mistral.json", "pre_tokenizer/replacement", "\"_\"", "U+2581", 0},
        {"gpt2.json", "model", NULL, "no model", 1},
        {"gpt2.json", "model/vocab", "[]", "vocab is no object", 1},
        {"gpt2.json", "model/merges", "{}", "merges are no list", 1},
        {"gpt2.json", "model/vocab/a", "-1", "'a' has no id", 1},
        {"gpt2.json", "model/vocab/a", "\"x\"", "'a' has no id", 1},
        {"gpt2.json", "model/vocab/a", "5", "two spellings", 1},
        {"gpt2.json", "model/vocab/a", NULL, "not in the vocabulary", 1},
        {"gpt2.json", "model/merges/3", "\"ab\"", "merge 3 is not two", 1},
        {"gpt2.json", "model/merges/3", "\"a b c\"", "merge 3 is not two", 1},
        {"gpt2.json", "model/merges/3", "[\"a\"]", "merge 3 is not two", 1},
        {"gpt2.json", "model/merges/3", "7", "merge 3 is not two", 1},
        {"gpt2.json", "added_tokens/0/id", "-1", "an added token", 1},
        {"gpt2.json", "added_tokens/0/content", "3", "an added token", 1},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        Tokenizer tokenizer;
        json_t *files = tokenizer_changed(cases[i].fixture, cases[i].path, cases[i].value);
        int result = tokenizer_open(&tokenizer, files, FIXTURE_VOCAB);
        if (cases[i].malformed) {
            check_error(result, cases[i].reason, cases[i].path);
        } else if (check(result == 0 && tokenizer.kind == TOKENIZER_NONE, "%s %s: kind %d, %s", cases[i].path,
                         cases[i].value, tokenizer.kind, result ? error_message : "")) {
            check_error(tokenizer_takes_text(&tokenizer, "x.txt"), cases[i].reason, cases[i].path);
            tokenizer_free(&tokenizer);
        }
        json_decref(files);
    }
    Tokenizer tokenizer;
    json_t *files = json_pack("{s:s}", "tokenizer.json", "{\"model\": {");
    check_error(tokenizer_open(&tokenizer, files, FIXTURE_VOCAB), "tokenizer.json: line 1", "half a file");
    json_decref(files);
    check(tokenizer_open(&tokenizer, NULL, 128256) == 0 && tokenizer.kind == TOKENIZER_NONE, "none at all");
    check_error(tokenizer_takes_text(&tokenizer, "x.txt"), "vocabulary 128256", "none at all");
}

// A special token beyond the model's vocabulary is left out; text never becomes it.
static void test_tokenizer_beyond(void) {
    Tokenizer tokenizer;
    json_t *files = tokenizer_changed("gpt2.json", "added_tokens/0/id", "1100");
    check(tokenizer_open(&tokenizer, files, FIXTURE_VOCAB) == 0 && tokenizer.kind == TOKENIZER_BPE &&
              tokenizer_special(&tokenizer, "<|endoftext|>") == -1,
          "kind %d, %s", tokenizer.kind, tokenizer.reason);
    tokenizer_free(&tokenizer);
    json_decref(files);
}

// Lines of a tiktoken file and bytes of a tokenizer.bin that are wrong.
static void test_tokenizer_converted(void) {
    static const char *const bad[] = {"YQ== 0\nYg==1\n",   "YQ== 0\n!!== 1\n", "YQ== 0\nYg== 2\n",  "YQ== 0\nYg== 0\n",
                                      "YQ== 0\nYg== -1\n", "YQ== 0\n\n",       "YQ== 0\nYg== 1x\n", "YQ== 0\n 1\n"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        json_t *files = json_object();
        check_error(convert_tiktoken(files, bad[i], strlen(bad[i])), "tokenizer.model: line 2", bad[i]);
        json_decref(files);
    }
    check(is_tiktoken("YQ== 0\n", 7) && !is_tiktoken("\x0a\x0e\n", 3) && !is_tiktoken("", 0), "what is tiktoken's");
    json_t *file = tokenizer_fixture("llama2c.bin"), *files = json_object();
    size_t n = json_string_length(file);
    unsigned char *bytes = (unsigned char *)malloc(n);
    if (bytes == NULL) exit(1);
    memcpy(bytes, json_string_value(file), n);
    for (size_t cut = 0; cut < n; cut += cut < 64 ? 1 : 977) {
        if (score_tokens(bytes, cut) > 0) continue; // cut between two tokens
        check_error(convert_llama2c(files, bytes, cut), "cut short", "a part of a tokenizer.bin");
    }
    check(score_tokens(bytes, n) == 700 && json_object_size(files) == 0, "%d tokens", score_tokens(bytes, n));
    memset(bytes + 8, 0xFF, 4);
    check_error(convert_llama2c(files, bytes, n), "cut short", "a length beyond the file");
    free(bytes);
    json_decref(file);
    json_decref(files);
}

// The real Llama 3, where its tokenizer.model is at hand: LLAMA3_TOKENIZER=path build/test_gpt tokenizer_llama3. The
// file is Meta's and is not kept here.
static void test_tokenizer_llama3(void) {
    static const struct {
        const char *text;
        int n;
        uint32_t ids[7];
    } cases[] = {
        {"Hello world!", 3, {9906, 1917, 0}},
        {"I'll DON'T you'RE", 6, {40, 3358, 45373, 17773, 499, 95253}},
        {"12345678 9", 5, {4513, 10961, 2495, 220, 24}},
        {" Vi\xE1\xBB\x87t", 1, {101798}},
        {"\r\n\r\n a", 2, {881, 264}},
        {"trailing   ", 3, {376, 14612, 262}},
        {"\xF0\x9F\x91\x8D\xF0\x9F\x8F\xBD", 6, {9468, 239, 235, 9468, 237, 121}},
        {"<|eot_id|>", 7, {27, 91, 68, 354, 851, 91, 29}},
        {"\xEF\xBF\xBD", 1, {5809}}, // what a lone surrogate is replaced by
    };
    const char *path = getenv("LLAMA3_TOKENIZER");
    FileMap map;
    Tokenizer tokenizer;
    if (path == NULL || !check(file_map(&map, path) == 0, "%s", error_message)) return;
    json_t *files = json_object();
    json_object_set_new(files, "tokenizer.model", json_stringn((const char *)map.data, map.size));
    check(tokenizer_open(&tokenizer, files, 128256) == 0 && tokenizer.kind == TOKENIZER_BPE, "%s", error_message);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int64_t n_ids;
        uint32_t *ids = encode_guarded(&tokenizer, cases[i].text, (int64_t)strlen(cases[i].text), &n_ids);
        check(n_ids == cases[i].n && memcmp(ids, cases[i].ids, sizeof *ids * (size_t)n_ids) == 0, "'%s': %lld ids, %u",
              cases[i].text, (long long)n_ids, ids[0]);
        free(ids);
    }
    check(tokenizer.bos == 128000 && tokenizer.eos == 128001 && tokenizer_adds_bos(&tokenizer) &&
              tokenizer_special(&tokenizer, "<|start_header_id|>") == 128006 &&
              tokenizer_special(&tokenizer, "<|end_header_id|>") == 128007 &&
              tokenizer_special(&tokenizer, "<|eot_id|>") == 128009,
          "bos %d eos %d", tokenizer.bos, tokenizer.eos);
    tokenizer_free(&tokenizer);
    json_decref(files);
    file_unmap(&map);
}

typedef struct {
    const Tokenizer *tokenizer;
    const char *text;
    uint32_t *ids;
    int64_t n, n_ids;
} TokenizerThread;

static void *tokenizer_thread(void *context) {
    TokenizerThread *thread = (TokenizerThread *)context;
    for (int i = 0; i < 20; i++)
        thread->n_ids = tokenizer_encode(thread->tokenizer, thread->ids, thread->text, thread->n);
    return NULL;
}

// Four threads with one tokenizer.
static void test_tokenizer_threads(void) {
    enum { THREADS = 4 };
    Tokenizer tokenizer = open_case(&tokenizer_cases[0]);
    json_t *file = tokenizer_fixture("expected.json");
    TokenizerThread threads[THREADS];
    pthread_t started[THREADS];
    for (int i = 0; i < THREADS; i++) {
        int64_t n = (int64_t)json_string_length(file);
        TokenizerThread thread = {&tokenizer, json_string_value(file), NULL, n, 0};
        thread.ids = (uint32_t *)malloc(sizeof(uint32_t) * (size_t)tokenizer_room(&tokenizer, n));
        threads[i] = thread;
        if (thread.ids == NULL || pthread_create(&started[i], NULL, tokenizer_thread, &threads[i]) != 0) exit(1);
    }
    for (int i = 0; i < THREADS; i++) pthread_join(started[i], NULL);
    for (int i = 1; i < THREADS; i++)
        check(threads[i].n_ids > 1000 && threads[i].n_ids == threads[0].n_ids &&
                  memcmp(threads[i].ids, threads[0].ids, sizeof(uint32_t) * (size_t)threads[0].n_ids) == 0,
              "thread %d has %lld ids", i, (long long)threads[i].n_ids);
    for (int i = 0; i < THREADS; i++) free(threads[i].ids);
    json_decref(file);
    tokenizer_free(&tokenizer);
}

static void save_native(const Stage *stage, const json_t *side, const char *path) {
    check(model_save_native(stage, ARENA_PARAMS, side, path, DTYPE_F32) == 0, "%s", error_message);
}

// The tokenizer of a model at `from` gives the ids that it gives when it is opened alone; an export of it goes to `to`.
static void check_found_tokenizer(const TokenizerCase *one, const Stage *stage, const char *from, const char *to) {
    static const char text[] = "The patient's  blood 120/80\n";
    Tokenizer direct = open_case(one), found;
    ModelFile file;
    int64_t n_direct, n_ids;
    if (!check(model_file_open(&file, from) == 0, "%s", error_message)) return;
    check(tokenizer_open(&found, file.side_files, 1100) == 0 && found.kind == one->kind, "%s: kind %d, %s", from,
          found.kind, found.reason);
    uint32_t *expected = encode_guarded(&direct, text, sizeof text - 1, &n_direct);
    uint32_t *ids = encode_guarded(&found, text, sizeof text - 1, &n_ids);
    check(n_ids == n_direct && n_ids > 5 && memcmp(ids, expected, sizeof *ids * (size_t)n_ids) == 0, "%s: %lld ids",
          from, (long long)n_ids);
    check(found.bos == direct.bos && found.bos >= 0 && found.eos == direct.eos && tokenizer_adds_bos(&found),
          "%s: bos %d eos %d", from, found.bos, found.eos);
    if (ends_with(to, ".bin"))
        save_native(stage, file.side_files, to);
    else if (*to != '\0')
        check(model_save_folder(stage, file.side_files, to, DTYPE_F32) == 0, "%s", error_message);
    free(expected);
    free(ids);
    tokenizer_free(&direct);
    tokenizer_free(&found);
    model_file_close(&file);
}

// A model's folder with another program's tokenizer: it is found there, kept in a native file, and exported from that.
// Beside a native file that has none it is found too.
static void check_found_everywhere(const TokenizerCase *one, const char *fixture, const char *name) {
    char folder[PATH_MAX], path[PATH_MAX], native[PATH_MAX], exported[PATH_MAX];
    Stage stage;
    Config config;
    Stream *stream = test_stream(PRECISION_FP32, 1);
    json_t *none = json_object(), *data = tokenizer_fixture(fixture);
    check(config_from_spec(&config, "d=16,layers=1,heads=2,kv=1,ffn=16,vocab=1100,ctx=32") == 0 &&
              stage_table(&stage, &config, 0, 1) == 0 && stage_plan(&stage, 1, 1, 0, 0) == 0 &&
              stage_alloc(&stage, stream) == 0,
          "%s", error_message);
    stage_init(&stage, 1);
    snprintf(folder, sizeof folder, "%s", scratch_path(one->name));
    snprintf(native, sizeof native, "%s", scratch_path("tokenizer_native.bin"));
    snprintf(exported, sizeof exported, "%s", scratch_path("tokenizer_export"));
    check(model_save_folder(&stage, none, folder, DTYPE_F32) == 0, "%s", error_message);
    if (path_join(path, folder, name)) exit(1);
    write_file(path, json_string_value(data), json_string_length(data));
    check_found_tokenizer(one, &stage, folder, native);
    check_found_tokenizer(one, &stage, native, exported);
    check_found_tokenizer(one, &stage, exported, "");
    if (path_join(path, folder, "weights.bin")) exit(1);
    save_native(&stage, none, path);
    check_found_tokenizer(one, &stage, path, "");
    json_decref(none);
    json_decref(data);
    stage_free(&stage);
    stream_destroy(stream);
}

static void test_tokenizer_files(void) {
    check_found_everywhere(&tokenizer_cases[1], "ranks.model", "tokenizer.model");
    check_found_everywhere(&tokenizer_cases[TOKENIZER_CASES - 1], "llama2c.bin", "tokenizer.bin");
}

// Documents begin as the model's texts do, with BOS once or not at all, and end with the document's mark.
static void test_tokenizer_documents(void) {
    static const int cases[] = {0, 3, 7}; // llama3, gpt2, llama2
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const TokenizerCase *one = &tokenizer_cases[cases[i]];
        Tokenizer tokenizer = open_case(one);
        TokenStream stream;
        int64_t n_ids;
        stream_init(&stream);
        ChatTokens marks = chat_tokens(&tokenizer);
        uint32_t *ids = encode_guarded(&tokenizer, "some text", 9, &n_ids);
        check(stream_put_document(&stream, &marks, &tokenizer, "some text", 9) == 0 &&
                  stream_put_document(&stream, &marks, &tokenizer, "some text", 9) == 0,
              "%s", error_message);
        int64_t before = one->begins, after = tokenizer.eos >= 0, each = before + n_ids + after;
        check(stream.n == 2 * each && memcmp(stream.tokens + before, ids, sizeof *ids * (size_t)n_ids) == 0 &&
                  memcmp(stream.tokens + each + before, ids, sizeof *ids * (size_t)n_ids) == 0,
              "%s: two documents of %lld tokens have %lld", one->name, (long long)each, (long long)stream.n);
        check(!before || stream.tokens[each] == (uint32_t)tokenizer.bos, "%s: BOS", one->name);
        check(!after || stream.tokens[each - 1] == (uint32_t)tokenizer.eos, "%s: EOS", one->name);
        free(ids);
        stream_free(&stream);
        tokenizer_free(&tokenizer);
    }
}

#endif
