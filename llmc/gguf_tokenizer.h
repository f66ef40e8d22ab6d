// The tokenizer of a GGUF file as the files of a Hugging Face folder, and the other way round.
//
//   tokenizer.ggml.model       gpt2: byte-level BPE, or llama: BPE by scores with bytes for what is unknown
//   (SentencePiece) tokenizer.ggml.pre         for gpt2: how text is cut into pieces before merging, by the name
//   llama.cpp gives it tokenizer.ggml.tokens      spellings, by id; token_type: 1 normal, 2 unknown, 3 control, 4
//   user-defined, 5 unused, 6 byte tokenizer.ggml.merges      for gpt2: "left right", the most urgent first
//   tokenizer.ggml.scores      for llama: of two possible merges the one with the higher score of its result is made
//   tokenizer.ggml.bos_token_id, eos_token_id, unknown_token_id, add_bos_token, add_eos_token, add_space_prefix
//   tokenizer.chat_template
#ifndef LLMC_GGUF_TOKENIZER_H
#define LLMC_GGUF_TOKENIZER_H

#include <jansson.h> // tokenizer.json
#include <stdint.h>  // fixed-width integers
#include <stdlib.h>  // qsort

#include "error.h"
#include "gguf.h"
#include "json.h"      // json_size
#include "tokenizer.h" // the byte tokenizer's files

enum { GGUF_NORMAL = 1, GGUF_UNKNOWN, GGUF_CONTROL, GGUF_USER, GGUF_UNUSED, GGUF_BYTE, GGUF_MAX_TOKEN = 2048 };

// Split patterns: of GPT-2 (what ByteLevel does by itself), of Llama 3, and of Qwen 2, whose digits stand alone.
#define SPLIT_GPT2 "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+"
#define SPLIT_LLAMA3                                                                                                   \
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|"           \
    "\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
#define SPLIT_QWEN2                                                                                                    \
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|"                \
    "\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"

// How text is cut: by digits (each alone), then by up to four patterns one after the other; without a pattern as GPT-2
// does. whole: a piece that is a token is taken before any merge. Those above come first when one is written.
typedef struct {
    const char *name;
    int digits, whole, nfc, adds_bos; // adds_bos: where the file does not say
    const char *patterns[4];
} GgufPre;

static const GgufPre gguf_pres[] = {
    {"gpt-2", 0, 0, 0, 0, {NULL, NULL, NULL, NULL}},
    {"smollm", 1, 0, 0, 0, {NULL, NULL, NULL, NULL}},
    {"llama-bpe", 0, 1, 0, 1, {SPLIT_LLAMA3, NULL, NULL, NULL}},
    {"dbrx", 0, 0, 0, 0, {SPLIT_LLAMA3, NULL, NULL, NULL}},
    {"qwen2", 0, 0, 1, 0, {SPLIT_QWEN2, NULL, NULL, NULL}},
    {"default", 0, 0, 0, 0, {"[\\p{P}\\$\\+<=>\\^~\\|]+", SPLIT_GPT2, "\\p{N}+", "[0-9][0-9][0-9]"}},
    {"llama3", 0, 1, 0, 1, {SPLIT_LLAMA3, NULL, NULL, NULL}},
    {"smaug-bpe", 0, 0, 0, 0, {SPLIT_LLAMA3, NULL, NULL, NULL}},
    {"olmo", 0, 0, 0, 0, {NULL, NULL, NULL, NULL}},
};
enum { GGUF_PRES = sizeof gguf_pres / sizeof *gguf_pres };

// ---------------------------------------------------------------------------------------------------------------------
// Reading

typedef struct {
    const json_t *metadata, *tokens, *types, *scores;
    int n;
    int bos, eos, unknown, padding; // -1: none
    int adds_bos, adds_eos;
    int is_bytes; // the built-in tokenizer
    const char *path;
} GgufTokens;

static inline const char *gguf_token(const GgufTokens *t, int id) {
    return json_string_value(json_array_get(t->tokens, (size_t)id));
}

static inline int gguf_token_type(const GgufTokens *t, int id) {
    return t->types != NULL ? (int)json_integer_value(json_array_get(t->types, (size_t)id)) : GGUF_NORMAL;
}

// *out = a list of n values of one kind of JSON, NULL if it is absent.
static inline int gguf_list(const json_t **out, const GgufTokens *t, const char *key, json_type kind) {
    size_t index;
    json_t *value;
    const json_t *list = json_object_get(t->metadata, key);
    *out = list;
    if (list == NULL) return 0;
    if (!json_is_array(list)) return error_set("%s: %s is not a list", t->path, key);
    if (t->n >= 0 && json_array_size(list) != (size_t)t->n)
        return error_set("%s: %s has %zu entries for %d tokens", t->path, key, json_array_size(list), t->n);
    json_array_foreach((json_t *)list, index, value) {
        if (json_typeof(value) != kind) return error_set("%s: %s: entry %zu has another type", t->path, key, index);
    }
    return 0;
}

// An id that must be a token's; -1: the file has none.
static inline int gguf_token_id(int *out, const GgufTokens *t, const char *key) {
    const json_t *value = json_object_get(t->metadata, key);
    int64_t id = json_size(value);
    *out = -1;
    if (value == NULL) return 0;
    if (id < 0 || id >= t->n) return error_set("%s: %s is not the id of one of %d tokens", t->path, key, t->n);
    *out = (int)id;
    return 0;
}

static inline int gguf_flag(const json_t *metadata, const char *key, int fallback) {
    const json_t *value = json_object_get(metadata, key);
    return json_is_boolean(value) ? json_is_true(value) : fallback;
}

// The lists and ids, checked: all of the same length, at most vocab.
static inline int gguf_read_tokens(GgufTokens *t, const json_t *metadata, const char *path, int vocab, int adds_bos) {
    GgufTokens none = {metadata, NULL, NULL, NULL, -1, -1, -1, -1, -1, 0, 0, 0, path};
    *t = none;
    if (gguf_list(&t->tokens, t, "tokenizer.ggml.tokens", JSON_STRING)) return -1;
    size_t n = json_array_size(t->tokens);
    if (n < 1 || n > (size_t)vocab)
        return error_set("%s: tokenizer.ggml.tokens has %zu entries, the embedding %d rows", path, n, vocab);
    t->n = (int)n;
    for (int i = 0; i < t->n; i++)
        if (strlen(gguf_token(t, i)) != json_string_length(json_array_get(t->tokens, (size_t)i)) ||
            strlen(gguf_token(t, i)) > GGUF_MAX_TOKEN)
            return error_set("%s: tokenizer.ggml.tokens: token %d has a NUL in it or more than %d bytes", path, i,
                             GGUF_MAX_TOKEN);
    if (gguf_list(&t->types, t, "tokenizer.ggml.token_type", JSON_INTEGER) ||
        gguf_list(&t->scores, t, "tokenizer.ggml.scores", JSON_REAL) ||
        gguf_token_id(&t->bos, t, "tokenizer.ggml.bos_token_id") ||
        gguf_token_id(&t->eos, t, "tokenizer.ggml.eos_token_id") ||
        gguf_token_id(&t->unknown, t, "tokenizer.ggml.unknown_token_id") ||
        gguf_token_id(&t->padding, t, "tokenizer.ggml.padding_token_id"))
        return -1;
    t->adds_bos = t->bos >= 0 && gguf_flag(metadata, "tokenizer.ggml.add_bos_token", adds_bos);
    t->adds_eos = t->eos >= 0 && gguf_flag(metadata, "tokenizer.ggml.add_eos_token", 0);
    return 0;
}

// Spelling -> id. Special tokens behind all others are left to added_tokens; of two with one spelling the first counts.
static inline json_t *gguf_vocab(const GgufTokens *t) {
    json_t *vocab = json_object();
    int n = t->n;
    while (n > 0 && gguf_token_type(t, n - 1) >= GGUF_CONTROL && gguf_token_type(t, n - 1) <= GGUF_UNUSED) n--;
    for (int i = 0; i < n; i++)
        if (json_object_get(vocab, gguf_token(t, i)) == NULL)
            json_object_set_new(vocab, gguf_token(t, i), json_integer(i));
    return vocab;
}

// Tokens that are found in text as they are; control tokens are special, and unknown is where it is a spelling (llama).
static inline json_t *gguf_added(const GgufTokens *t, int with_unknown) {
    json_t *added = json_array();
    for (int i = 0; i < t->n; i++) {
        int type = gguf_token_type(t, i), special = type == GGUF_CONTROL || (with_unknown && type == GGUF_UNKNOWN);
        if (!special && type != GGUF_USER) continue;
        json_array_append_new(added, json_pack("{s:i, s:s, s:b, s:b, s:b, s:b, s:b}", "id", i, "content",
                                               gguf_token(t, i), "single_word", 0, "lstrip", 0, "rstrip", 0,
                                               "normalized", 0, "special", special));
    }
    return added;
}

static inline json_t *gguf_template_token(const char *token) {
    return json_pack("{s:{s:s, s:i}}", "SpecialToken", "id", token, "type_id", 0);
}

// A text's begin and end marks; null where there is neither.
static inline json_t *gguf_processor(const GgufTokens *t) {
    if (!t->adds_bos && !t->adds_eos) return json_null();
    json_t *single = json_array(), *pair = json_array(), *specials = json_object();
    for (int text = 0; text < 2; text++) {
        json_t *sequence = json_pack("{s:{s:s, s:i}}", "Sequence", "id", text == 0 ? "A" : "B", "type_id", text);
        if (t->adds_bos) json_array_append_new(pair, gguf_template_token(gguf_token(t, t->bos)));
        json_array_append_new(pair, sequence);
        if (t->adds_eos) json_array_append_new(pair, gguf_template_token(gguf_token(t, t->eos)));
        if (text == 0) json_array_extend(single, pair);
    }
    int ids[2] = {t->adds_bos ? t->bos : -1, t->adds_eos ? t->eos : -1};
    for (int i = 0; i < 2; i++) {
        const char *token = ids[i] >= 0 ? gguf_token(t, ids[i]) : NULL;
        if (token != NULL)
            json_object_set_new(specials, token,
                                json_pack("{s:s, s:[i], s:[s]}", "id", token, "ids", ids[i], "tokens", token));
    }
    return json_pack("{s:s, s:o, s:o, s:o}", "type", "TemplateProcessing", "single", single, "pair", pair,
                     "special_tokens", specials);
}

static inline json_t *gguf_byte_level(int use_regex) {
    return json_pack("{s:s, s:b, s:b, s:b}", "type", "ByteLevel", "add_prefix_space", 0, "trim_offsets", 1, "use_regex",
                     use_regex);
}

static inline json_t *gguf_pre_tokenizer(const GgufPre *pre) {
    json_t *steps = json_array();
    if (pre->digits) json_array_append_new(steps, json_pack("{s:s, s:b}", "type", "Digits", "individual_digits", 1));
    for (int i = 0; i < 4 && pre->patterns[i] != NULL; i++)
        json_array_append_new(steps, json_pack("{s:s, s:{s:s}, s:s, s:b}", "type", "Split", "pattern", "Regex",
                                               pre->patterns[i], "behavior", "Isolated", "invert", 0));
    json_array_append_new(steps, gguf_byte_level(pre->patterns[0] == NULL));
    if (json_array_size(steps) > 1) return json_pack("{s:s, s:o}", "type", "Sequence", "pretokenizers", steps);
    json_t *only = json_incref(json_array_get(steps, 0));
    json_decref(steps);
    return only;
}

// The parts as a tokenizer.json; takes over their references.
static inline json_t *gguf_assemble(json_t *added, json_t *normalizer, json_t *pre_tokenizer, json_t *processor,
                                    json_t *decoder, json_t *model) {
    return json_pack("{s:s, s:n, s:n, s:o, s:o, s:o, s:o, s:o, s:o}", "version", "1.0", "truncation", "padding",
                     "added_tokens", added, "normalizer", normalizer, "pre_tokenizer", pre_tokenizer, "post_processor",
                     processor, "decoder", decoder, "model", model);
}

// The model's part: takes over the references to vocab and merges. unknown: its spelling or NULL
static inline json_t *gguf_bpe(json_t *vocab, json_t *merges, const char *unknown, int bytes, int whole) {
    return json_pack("{s:s, s:n, s:s?, s:n, s:n, s:b, s:b, s:b, s:o, s:o}", "type", "BPE", "dropout", "unk_token",
                     unknown, "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk", bytes, "byte_fallback",
                     bytes, "ignore_merges", whole, "vocab", vocab, "merges", merges);
}

// 1 if these are the ids of the built-in byte tokenizer.
static inline int gguf_is_byte_tokenizer(const GgufTokens *t, const json_t *merges) {
    json_t *bytes = tokenizer_byte_json();
    const char *name;
    json_t *id;
    int same = t->n == BYTE_VOCAB && json_array_size(merges) == 0 && strcmp(gguf_token(t, BYTE_BOS), "<|bos|>") == 0 &&
               strcmp(gguf_token(t, BYTE_EOS), "<|eos|>") == 0;
    json_object_foreach(json_object_get(json_object_get(bytes, "model"), "vocab"), name, id) {
        same = same && strcmp(gguf_token(t, (int)json_integer_value(id)), name) == 0;
    }
    json_decref(bytes);
    return same;
}

// Byte-level BPE. *json = NULL if text is cut in a way that is not known here: the model then takes token files only.
static inline int gguf_read_gpt2(json_t **json, GgufTokens *t, const json_t *metadata, const char *path, int vocab) {
    const char *name = json_string_value(json_object_get(metadata, "tokenizer.ggml.pre"));
    const GgufPre *pre = NULL;
    const json_t *merges;
    for (int i = 0; i < GGUF_PRES; i++)
        if (strcmp(gguf_pres[i].name, name != NULL ? name : "default") == 0) pre = &gguf_pres[i];
    *json = NULL;
    if (gguf_read_tokens(t, metadata, path, vocab, pre != NULL && pre->adds_bos)) return -1;
    GgufTokens any_number = *t;
    any_number.n = -1;
    if (gguf_list(&merges, &any_number, "tokenizer.ggml.merges", JSON_STRING)) return -1;
    if (merges == NULL) return error_set("%s: tokenizer.ggml.merges is missing", path);
    t->is_bytes = gguf_is_byte_tokenizer(t, merges);
    if (pre == NULL || t->is_bytes) return 0;
    json_t *normalizer = pre->nfc ? json_pack("{s:s}", "type", "NFC") : json_null();
    *json = gguf_assemble(gguf_added(t, 0), normalizer, gguf_pre_tokenizer(pre), gguf_processor(t), gguf_byte_level(1),
                          gguf_bpe(gguf_vocab(t), json_incref((json_t *)merges), NULL, 0, pre->whole));
    return 0;
}

// A merge of tokens left and right into one of this score.
typedef struct {
    double score;
    int left, right, left_length, right_length; // ids, code points
    int order;
} GgufMerge;

// The higher score first; then the longer left part, the longer right one, and the order of the tokens.
static inline int gguf_by_score(const void *a, const void *b) {
    const GgufMerge *x = (const GgufMerge *)a, *y = (const GgufMerge *)b;
    if (x->score != y->score) return x->score > y->score ? -1 : 1;
    if (x->left_length != y->left_length) return x->left_length > y->left_length ? -1 : 1;
    if (x->right_length != y->right_length) return x->right_length > y->right_length ? -1 : 1;
    return x->order < y->order ? -1 : x->order > y->order;
}

// A code point begins at this byte.
static inline int gguf_begins(char byte) {
    return ((unsigned char)byte & 0xC0) != 0x80;
}

static inline int gguf_code_points(const char *text) {
    int n = 0;
    for (; *text != '\0'; text++) n += gguf_begins(*text);
    return n;
}

// The ways to make token `id` of two others, appended to merges if there is room, else only counted. Returns how many.
static inline int gguf_splits(const GgufTokens *t, const json_t *vocab, int id, GgufMerge *merges, int order) {
    const char *text = gguf_token(t, id);
    char left[GGUF_MAX_TOKEN + 1];
    int found = 0;
    for (size_t cut = 1; cut < strlen(text); cut++) {
        if (!gguf_begins(text[cut])) continue;
        memcpy(left, text, cut);
        left[cut] = '\0';
        const json_t *a = json_object_get(vocab, left), *b = json_object_get(vocab, text + cut);
        if (a == NULL || b == NULL) continue;
        GgufMerge merge = {json_real_value(json_array_get(t->scores, (size_t)id)),
                           (int)json_integer_value(a),
                           (int)json_integer_value(b),
                           gguf_code_points(left),
                           gguf_code_points(text + cut),
                           order + found};
        if (merges != NULL) merges[found] = merge;
        found++;
    }
    return found;
}

static inline int gguf_can_merge(const GgufTokens *t, int id) {
    return gguf_token_type(t, id) == GGUF_NORMAL || gguf_token_type(t, id) == GGUF_USER;
}

// The merges that scores amount to, ["left", "right"] each. NULL with an error message.
static inline json_t *gguf_merges(const GgufTokens *t, const json_t *vocab) {
    int n = 0, at = 0;
    for (int i = 0; i < t->n && n <= GGUF_MAX_ELEMENTS; i++)
        n += gguf_can_merge(t, i) ? gguf_splits(t, vocab, i, NULL, 0) : 0;
    if (n > GGUF_MAX_ELEMENTS) {
        error_set("%s: tokenizer.ggml.tokens can be merged in more than %d ways", t->path, GGUF_MAX_ELEMENTS);
        return NULL;
    }
    GgufMerge *merges = (GgufMerge *)malloc(sizeof *merges * ((size_t)n + 1));
    json_t *list = merges != NULL ? json_array() : NULL;
    if (list == NULL) {
        free(merges);
        error_set("%s: out of memory for %d merges", t->path, n);
        return NULL;
    }
    for (int i = 0; i < t->n; i++) at += gguf_can_merge(t, i) ? gguf_splits(t, vocab, i, merges + at, at) : 0;
    qsort(merges, (size_t)n, sizeof *merges, gguf_by_score);
    for (int i = 0; i < n; i++)
        json_array_append_new(list, json_pack("[s, s]", gguf_token(t, merges[i].left), gguf_token(t, merges[i].right)));
    free(merges);
    return list;
}

// U+2581, which stands for a space in SentencePiece's tokens.
#define GGUF_SPACE "\xe2\x96\x81"

static inline json_t *gguf_spm_normalizer(int prefix) {
    json_t *replace =
        json_pack("{s:s, s:{s:s}, s:s}", "type", "Replace", "pattern", "String", " ", "content", GGUF_SPACE);
    if (!prefix) return replace;
    return json_pack("{s:s, s:[{s:s, s:s}, o]}", "type", "Sequence", "normalizers", "type", "Prepend", "prepend",
                     GGUF_SPACE, replace);
}

static inline json_t *gguf_spm_decoder(int prefix) {
    json_t *steps = json_pack("[{s:s, s:{s:s}, s:s}, {s:s}, {s:s}]", "type", "Replace", "pattern", "String", GGUF_SPACE,
                              "content", " ", "type", "ByteFallback", "type", "Fuse");
    if (prefix)
        json_array_append_new(
            steps, json_pack("{s:s, s:s, s:i, s:i}", "type", "Strip", "content", " ", "start", 1, "stop", 0));
    return json_pack("{s:s, s:o}", "type", "Sequence", "decoders", steps);
}

// BPE by scores.
static inline int gguf_read_llama(json_t **json, GgufTokens *t, const json_t *metadata, const char *path, int vocab) {
    *json = NULL;
    if (gguf_read_tokens(t, metadata, path, vocab, 1)) return -1;
    if (t->scores == NULL) return error_set("%s: tokenizer.ggml.scores is missing", path);
    int prefix = gguf_flag(metadata, "tokenizer.ggml.add_space_prefix", 1);
    json_t *ids = gguf_vocab(t), *merges = gguf_merges(t, ids);
    const char *unknown = t->unknown >= 0 ? gguf_token(t, t->unknown) : NULL;
    if (merges == NULL) {
        json_decref(ids);
        return -1;
    }
    if (unknown != NULL && json_object_get(ids, unknown) == NULL) unknown = NULL;
    *json = gguf_assemble(gguf_added(t, 1), gguf_spm_normalizer(prefix), json_null(), gguf_processor(t),
                          gguf_spm_decoder(prefix), gguf_bpe(ids, merges, unknown, 1, 0));
    return 0;
}

// files[name] = json as text; takes over the reference.
static inline int gguf_add_file(json_t *files, const char *name, json_t *json) {
    char *text = json != NULL ? json_dumps(json, JSON_COMPACT) : NULL;
    int result = text != NULL ? json_object_set_new(files, name, json_string(text)) : -1;
    free(text);
    json_decref(json);
    return result == 0 ? 0 : error_set("out of memory for %s", name);
}

static inline json_t *gguf_tokenizer_config(const GgufTokens *t) {
    const struct {
        const char *name;
        int id;
    } tokens[] = {{"bos_token", t->bos}, {"eos_token", t->eos}, {"unk_token", t->unknown}, {"pad_token", t->padding}};
    json_t *config = json_pack("{s:s, s:b, s:b, s:b}", "tokenizer_class", "PreTrainedTokenizerFast", "add_bos_token",
                               t->adds_bos, "add_eos_token", t->adds_eos, "clean_up_tokenization_spaces", 0);
    for (int i = 0; i < 4; i++)
        if (tokens[i].id >= 0) json_object_set_new(config, tokens[i].name, json_string(gguf_token(t, tokens[i].id)));
    return config;
}

// files (object: name -> text) gets tokenizer.json, tokenizer_config.json and chat_template.jinja from a GGUF's
// metadata, as far as they are there and of a kind that is known. vocab: rows of the embedding. 0, or -1 with an error
// message.
static inline int gguf_tokenizer_files(json_t *files, const json_t *metadata, const char *path, int vocab) {
    const char *model = json_string_value(json_object_get(metadata, "tokenizer.ggml.model"));
    json_t *template_text = json_object_get(metadata, "tokenizer.chat_template"), *json = NULL;
    GgufTokens tokens;
    memset(&tokens, 0, sizeof tokens);
    if (json_is_string(template_text)) json_object_set(files, "chat_template.jinja", template_text);
    if (model != NULL && strcmp(model, "gpt2") == 0 && gguf_read_gpt2(&json, &tokens, metadata, path, vocab)) return -1;
    if (model != NULL && strcmp(model, "llama") == 0 && gguf_read_llama(&json, &tokens, metadata, path, vocab))
        return -1;
    if (tokens.is_bytes) {
        json_t *bytes = tokenizer_byte_files();
        int result = bytes != NULL ? json_object_update(files, bytes) : -1;
        json_decref(bytes);
        return result == 0 ? 0 : error_set("%s: out of memory for the tokenizer", path);
    }
    if (json == NULL) return 0;
    if (gguf_add_file(files, "tokenizer.json", json)) return -1;
    return gguf_add_file(files, "tokenizer_config.json", gguf_tokenizer_config(&tokens));
}

// ---------------------------------------------------------------------------------------------------------------------
// Writing

// The pattern of a Split step of a pre_tokenizer, NULL for other steps.
static inline const char *gguf_step_pattern(const json_t *step) {
    const char *type = json_string_value(json_object_get(step, "type"));
    if (type == NULL || strcmp(type, "Split") != 0) return NULL;
    return json_string_value(json_object_get(json_object_get(step, "pattern"), "Regex"));
}

static inline int gguf_step_is(const json_t *step, const char *type) {
    const char *name = json_string_value(json_object_get(step, "type"));
    return name != NULL && strcmp(name, type) == 0;
}

// 1 if a pre_tokenizer cuts as `pre` does: its steps are the same, whatever they are wrapped in.
static inline int gguf_cuts_as(const json_t *pre_tokenizer, const GgufPre *pre) {
    json_t *wanted = gguf_pre_tokenizer(pre);
    const json_t *ours = json_object_get(wanted, "pretokenizers"),
                 *theirs = json_object_get(pre_tokenizer, "pretokenizers");
    size_t n = ours != NULL ? json_array_size(ours) : 1;
    int same = (theirs != NULL ? json_array_size(theirs) : 1) == n;
    for (size_t i = 0; i < n && same; i++) {
        const json_t *a = ours != NULL ? json_array_get(ours, i) : wanted;
        const json_t *b = theirs != NULL ? json_array_get(theirs, i) : pre_tokenizer;
        const char *x = gguf_step_pattern(a), *y = gguf_step_pattern(b);
        same = gguf_step_is(b, json_string_value(json_object_get(a, "type"))) && (x == NULL) == (y == NULL) &&
               (x == NULL || strcmp(x, y) == 0);
        if (same && gguf_step_is(a, "ByteLevel"))
            same = !json_is_true(json_object_get(b, "add_prefix_space")) &&
                   json_is_false(json_object_get(b, "use_regex")) == json_is_false(json_object_get(a, "use_regex"));
        if (same && gguf_step_is(a, "Digits")) same = json_is_true(json_object_get(b, "individual_digits"));
    }
    json_decref(wanted);
    return same;
}

// The name of how a byte-level tokenizer.json cuts text, NULL if it has none here.
static inline const char *gguf_pre_name(const json_t *json) {
    const json_t *model = json_object_get(json, "model"), *pre_tokenizer = json_object_get(json, "pre_tokenizer");
    const json_t *normalizer = json_object_get(json, "normalizer");
    int whole = json_is_true(json_object_get(model, "ignore_merges"));
    int nfc = gguf_step_is(normalizer, "NFC"), plain = normalizer == NULL || json_is_null(normalizer);
    for (int i = 0; i < GGUF_PRES; i++)
        if (gguf_pres[i].whole == whole && (gguf_pres[i].nfc ? nfc : plain) &&
            gguf_cuts_as(pre_tokenizer, &gguf_pres[i]))
            return gguf_pres[i].name;
    return NULL;
}

// Puts a token at its id, "[PADn]" before it where there are gaps. -1 if the id is no row of the embedding.
static inline int gguf_put_token(json_t *tokens, json_t *types, const char *text, int64_t id, int type, int vocab) {
    char padding[32];
    if (id < 0 || id >= vocab) return -1;
    while ((int64_t)json_array_size(tokens) <= id) {
        snprintf(padding, sizeof padding, "[PAD%zu]", json_array_size(tokens));
        json_array_append_new(tokens, json_string(padding));
        json_array_append_new(types, json_integer(GGUF_UNUSED));
    }
    json_array_set_new(tokens, (size_t)id, json_string(text));
    return json_array_set_new(types, (size_t)id, json_integer(type));
}

// tokens and types, by id, up to vocab.
static inline int gguf_put_tokens(json_t *metadata, const json_t *json, int vocab, int spm) {
    const char *text, *unknown = json_string_value(json_object_get(json_object_get(json, "model"), "unk_token"));
    json_t *id, *entry, *tokens = json_array(), *types = json_array();
    size_t index;
    int result = 0;
    json_object_foreach(json_object_get(json_object_get(json, "model"), "vocab"), text, id) {
        int byte = spm && strlen(text) == 6 && strncmp(text, "<0x", 3) == 0 && text[5] == '>';
        if (result == 0)
            result = gguf_put_token(tokens, types, text, json_size(id), byte ? GGUF_BYTE : GGUF_NORMAL, vocab);
    }
    json_array_foreach(json_object_get(json, "added_tokens"), index, entry) {
        const char *content = json_string_value(json_object_get(entry, "content"));
        int is_unknown = spm && unknown != NULL && content != NULL && strcmp(content, unknown) == 0;
        int type = is_unknown                                        ? GGUF_UNKNOWN
                   : json_is_true(json_object_get(entry, "special")) ? GGUF_CONTROL
                                                                     : GGUF_USER;
        if (result == 0)
            result = content == NULL
                         ? -1
                         : gguf_put_token(tokens, types, content, json_size(json_object_get(entry, "id")), type, vocab);
        if (result == 0 && is_unknown)
            json_object_set(metadata, "tokenizer.ggml.unknown_token_id", json_object_get(entry, "id"));
    }
    if ((int)json_array_size(tokens) < vocab && result == 0) { // the last row is padding too
        char padding[32];
        snprintf(padding, sizeof padding, "[PAD%d]", vocab - 1);
        result = gguf_put_token(tokens, types, padding, vocab - 1, GGUF_UNUSED, vocab);
    }
    json_object_set_new(metadata, "tokenizer.ggml.tokens", tokens);
    json_object_set_new(metadata, "tokenizer.ggml.token_type", types);
    return result;
}

// The two parts of a merge, "left right" or ["left", "right"], as "left right"; NULL for anything else.
static inline json_t *gguf_merge_text(const json_t *merge) {
    if (json_is_string(merge)) return json_incref((json_t *)merge);
    const char *left = json_string_value(json_array_get(merge, 0)),
               *right = json_string_value(json_array_get(merge, 1));
    if (left == NULL || right == NULL) return NULL;
    return json_sprintf("%s %s", left, right);
}

static inline int gguf_put_merges(json_t *metadata, const json_t *model) {
    json_t *merges = json_array(), *merge;
    size_t index;
    int result = 0;
    json_array_foreach(json_object_get(model, "merges"), index, merge) {
        json_t *text = gguf_merge_text(merge);
        if (text == NULL || json_array_append_new(merges, text) != 0) result = -1;
    }
    json_object_set_new(metadata, "tokenizer.ggml.merges", merges);
    return result;
}

// Scores that make the same merges in the same order: minus the rank of the first one that makes the token, and less
// for tokens that none makes.
static inline int gguf_put_scores(json_t *metadata, const json_t *model) {
    json_t *ranks = json_object(), *scores = json_array(), *merge, *token;
    size_t index;
    int result = 0;
    json_array_foreach(json_object_get(model, "merges"), index, merge) {
        json_t *text = gguf_merge_text(merge);
        char *joined = text != NULL ? strdup(json_string_value(text)) : NULL,
             *space = joined != NULL ? strchr(joined, ' ') : NULL;
        if (space != NULL) memmove(space, space + 1, strlen(space));
        if (space == NULL)
            result = -1;
        else if (json_object_get(ranks, joined) == NULL)
            json_object_set_new(ranks, joined, json_real(-(double)index));
        free(joined);
        json_decref(text);
    }
    json_t *last = json_real(-(double)json_array_size(json_object_get(model, "merges")));
    json_array_foreach(json_object_get(metadata, "tokenizer.ggml.tokens"), index, token) {
        json_t *rank = json_object_get(ranks, json_string_value(token));
        json_array_append(scores, rank != NULL ? rank : last);
    }
    json_decref(last);
    json_decref(ranks);
    json_object_set_new(metadata, "tokenizer.ggml.scores", scores);
    return result;
}

// 1 if a post_processor, or one of several, begins (end = 0) or ends a text with a special token.
static inline int gguf_marks(const json_t *processor, int end) {
    size_t index;
    json_t *part;
    const json_t *single = json_object_get(processor, "single");
    size_t n = json_array_size(single);
    json_array_foreach(json_object_get(processor, "processors"), index, part) {
        if (gguf_marks(part, end)) return 1;
    }
    return n > 1 && json_object_get(json_array_get(single, end ? n - 1 : 0), "SpecialToken") != NULL;
}

// 1 if a normalizer or pre_tokenizer of a SentencePiece kind puts a space before the text, 0 if not, -1: it is another.
static inline int gguf_spm_prefix(const json_t *json) {
    const json_t *normalizer = json_object_get(json, "normalizer"), *pre = json_object_get(json, "pre_tokenizer");
    if (gguf_step_is(pre, "Metaspace")) {
        const char *scheme = json_string_value(json_object_get(pre, "prepend_scheme"));
        return scheme == NULL || strcmp(scheme, "never") != 0;
    }
    json_t *plain = gguf_spm_normalizer(0), *prefixed = gguf_spm_normalizer(1);
    int result = json_equal(normalizer, prefixed) ? 1 : json_equal(normalizer, plain) ? 0 : -1;
    json_decref(plain);
    json_decref(prefixed);
    return result;
}

// What the kind of a tokenizer is called; -1 if GGUF has no name for it.
static inline int gguf_put_kind(json_t *metadata, const json_t *json, int *spm) {
    const json_t *model = json_object_get(json, "model");
    const char *type = json_string_value(json_object_get(model, "type")), *pre = NULL;
    int prefix = -1;
    json_t *bytes = tokenizer_byte_json();
    *spm = json_is_true(json_object_get(model, "byte_fallback"));
    if (json_equal(json, bytes))
        pre = "gpt-2"; // without merges it does not matter how text is cut
    else if (type != NULL && strcmp(type, "BPE") == 0 && *spm)
        prefix = gguf_spm_prefix(json);
    else if (type != NULL && strcmp(type, "BPE") == 0)
        pre = gguf_pre_name(json);
    json_decref(bytes);
    if (pre == NULL && prefix < 0) return -1;
    json_object_set_new(metadata, "tokenizer.ggml.model", json_string(*spm ? "llama" : "gpt2"));
    json_object_set_new(metadata, "tokenizer.ggml.pre", json_string(*spm ? "default" : pre));
    json_object_set_new(metadata, "tokenizer.ggml.add_space_prefix", json_boolean(prefix == 1));
    return 0;
}

// The template of a chat, a file of its own or in tokenizer_config.json; NULL if there is none.
static inline json_t *gguf_chat_template(const json_t *files) {
    const char *text = json_string_value(json_object_get(files, "tokenizer_config.json"));
    json_t *file = json_object_get(files, "chat_template.jinja");
    if (file != NULL) return json_incref(file);
    json_t *config = text != NULL ? json_loads(text, 0, NULL) : NULL;
    json_t *found = json_object_get(config, "chat_template");
    found = json_is_string(found) ? json_incref(found) : NULL;
    json_decref(config);
    return found;
}

// The ids of special tokens that tokenizer_config.json names and the model's config does not.
static inline void gguf_put_specials(json_t *metadata, const json_t *files) {
    static const char *const names[2][2] = {{"unk_token", "tokenizer.ggml.unknown_token_id"},
                                            {"pad_token", "tokenizer.ggml.padding_token_id"}};
    const char *text = json_string_value(json_object_get(files, "tokenizer_config.json"));
    json_t *config = text != NULL ? json_loads(text, 0, NULL) : NULL, *token;
    size_t id;
    for (int i = 0; i < 2; i++) {
        json_t *wanted = json_object_get(config, names[i][0]); // a spelling, or an object with it
        const char *spelling = json_string_value(json_is_object(wanted) ? json_object_get(wanted, "content") : wanted);
        json_array_foreach(json_object_get(metadata, "tokenizer.ggml.tokens"), id, token) {
            if (spelling != NULL && strcmp(spelling, json_string_value(token)) == 0)
                json_object_set_new(metadata, names[i][1], json_integer((json_int_t)id));
        }
    }
    json_decref(config);
}

// Adds a model's tokenizer (its files: name -> text) to the metadata of a GGUF. 1, or 0 if it has none of a kind that
// GGUF names: then only its template and ids are there.
static inline int gguf_put_tokenizer(json_t *metadata, const json_t *files, int vocab, int bos, int eos) {
    const char *text = json_string_value(json_object_get(files, "tokenizer.json"));
    json_t *json = text != NULL ? json_loads(text, 0, NULL) : NULL, *template_text = gguf_chat_template(files);
    json_t *processor = json_object_get(json, "post_processor"), *kept = json_object();
    int spm = 0;
    if (bos >= 0) json_object_set_new(metadata, "tokenizer.ggml.bos_token_id", json_integer(bos));
    if (eos >= 0) json_object_set_new(metadata, "tokenizer.ggml.eos_token_id", json_integer(eos));
    if (template_text != NULL) json_object_set_new(metadata, "tokenizer.chat_template", template_text);
    int known = json != NULL && gguf_put_kind(kept, json, &spm) == 0 && gguf_put_tokens(kept, json, vocab, spm) == 0 &&
                (spm ? gguf_put_scores(kept, json_object_get(json, "model"))
                     : gguf_put_merges(kept, json_object_get(json, "model"))) == 0;
    if (known) {
        json_object_set_new(kept, "tokenizer.ggml.add_bos_token", json_boolean(gguf_marks(processor, 0)));
        json_object_set_new(kept, "tokenizer.ggml.add_eos_token", json_boolean(gguf_marks(processor, 1)));
        gguf_put_specials(kept, files);
        json_object_update(metadata, kept);
    }
    json_decref(kept);
    json_decref(json);
    return known;
}

#endif
