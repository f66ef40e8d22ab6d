// Other programs' tokenizers as a tokenizer.json, which tokenizer_json.h and transformers read:
//
//   Llama 3's tokenizer.model, tiktoken's form: a line a token, base64 of its bytes, a space, its rank, which is its
//   id. 256 marks follow, 128000 and on with its 128,000 tokens.
//
//   llama2.c's tokenizer.bin, SentencePiece's scores
//     byte  size   little-endian
//        0     4   length of the longest token
//     then for each id
//        0     4   score, fp32
//        4     4   n, 1 to 256
//        8     n   the token, a space for U+2581; <0x0A> is a byte. Ids 0, 1 and 2 are <unk>, <s> and </s>
//   Valid only if the last token ends with the file.
//
// Both join the pair whose joined token comes first by rank or score. A tokenizer.json lists pairs, so each token
// stands for all pairs that make it, as in the files that transformers converts.
#ifndef LLMC_TOKENIZER_CONVERT_H
#define LLMC_TOKENIZER_CONVERT_H

#include <jansson.h> // tokenizer.json
#include <stdint.h>  // fixed-width integers

#include "error.h"
#include "tokenizer_bpe.h"
#include "tokenizer_json.h" // gpt2_codes
#include "unicode.h"

enum { LLAMA3_MARKS = 256, CONVERT_TOKENS = 1 << 22, CONVERT_LONGEST = 256 /* bytes of a token */ };

// A pair that makes a token.
typedef struct {
    double order; // of the token, lower ones first
    uint32_t left, right;
} ConvertPair;

static inline int convert_order(const void *a, const void *b) {
    const ConvertPair *x = (const ConvertPair *)a, *y = (const ConvertPair *)b;
    if (x->order != y->order) return x->order < y->order ? -1 : 1;
    if (x->left != y->left) return x->left < y->left ? -1 : 1;
    return x->right != y->right ? (x->right < y->right ? -1 : 1) : 0;
}

// Tokens as they are read, and the JSON's parts that are made of them.
typedef struct {
    Bpe bpe;        // ids by their bytes
    double *order;  // (n_ids)
    json_t **names; // (n_ids) their spellings
    ConvertPair *pairs;
    size_t n_pairs, pair_room;
} Convert;

static inline void convert_free(Convert *c) {
    for (int id = 0; c->names != NULL && id < c->bpe.n_ids; id++) json_decref(c->names[id]);
    bpe_free(&c->bpe);
    free(c->order);
    free(c->names);
    free(c->pairs);
}

static inline int convert_alloc(Convert *c, int n_ids, size_t n_bytes) {
    memset(c, 0, sizeof *c);
    if (bpe_alloc(&c->bpe, n_ids, n_bytes, 0)) return -1;
    c->order = (double *)calloc((size_t)n_ids + 1, sizeof *c->order);
    c->names = (json_t **)calloc((size_t)n_ids + 1, sizeof *c->names);
    return c->order != NULL && c->names != NULL ? 0 : error_set("out of memory for the tokenizer");
}

static inline int convert_pair(Convert *c, uint32_t token, uint32_t left, uint32_t right) {
    if (c->n_pairs == c->pair_room) {
        size_t room = 2 * c->pair_room + 1024;
        ConvertPair *pairs = (ConvertPair *)realloc(c->pairs, sizeof *pairs * room);
        if (pairs == NULL) return error_set("out of memory for the tokenizer");
        c->pairs = pairs, c->pair_room = room;
    }
    ConvertPair pair = {c->order[token], left, right};
    c->pairs[c->n_pairs++] = pair;
    return 0;
}

// All ways to cut a token's bytes in two tokens; a cut within a character makes none where tokens are characters.
static inline int convert_cuts(Convert *c, uint32_t id) {
    const BpeToken *token = &c->bpe.tokens[id];
    if (token->bytes == NULL || bpe_find(&c->bpe, token->bytes, token->n_bytes) != id) return 0;
    for (uint32_t cut = 1; cut < token->n_bytes; cut++) {
        uint32_t left = bpe_find(&c->bpe, token->bytes, cut);
        uint32_t right = bpe_find(&c->bpe, token->bytes + cut, token->n_bytes - cut);
        if (left != BPE_NONE && right != BPE_NONE && convert_pair(c, id, left, right)) return -1;
    }
    return 0;
}

// The list of merges, a new reference; NULL: out of memory.
static inline json_t *convert_merges(Convert *c) {
    json_t *list = json_array();
    for (int id = 0; id < c->bpe.n_ids; id++)
        if (convert_cuts(c, (uint32_t)id)) return NULL;
    if (c->n_pairs > 1) qsort(c->pairs, c->n_pairs, sizeof *c->pairs, convert_order);
    for (size_t i = 0; i < c->n_pairs; i++)
        json_array_append_new(list, json_pack("[O,O]", c->names[c->pairs[i].left], c->names[c->pairs[i].right]));
    return list;
}

static inline json_t *convert_vocab(const Convert *c) {
    json_t *vocab = json_object();
    for (int id = 0; id < c->bpe.n_ids; id++) {
        const char *name = json_string_value(c->names[id]);
        if (name != NULL && json_object_get(vocab, name) == NULL) json_object_set_new(vocab, name, json_integer(id));
    }
    return vocab;
}

static inline json_t *convert_mark(int id, const char *content) {
    return json_pack("{s:i, s:s, s:b, s:b, s:b, s:b, s:b}", "id", id, "content", content, "single_word", 0, "lstrip", 0,
                     "rstrip", 0, "normalized", 0, "special", 1);
}

// A post-processor that begins a text with a mark.
static inline json_t *convert_template(int id, const char *mark) {
    return json_pack("{s:s, s:[{s:{s:s, s:i}}, {s:{s:s, s:i}}], s:[{s:{s:s, s:i}}, {s:{s:s, s:i}}, {s:{s:s, s:i}}], "
                     "s:{s:{s:s, s:[i], s:[s]}}}",
                     "type", "TemplateProcessing", "single", "SpecialToken", "id", mark, "type_id", 0, "Sequence", "id",
                     "A", "type_id", 0, "pair", "SpecialToken", "id", mark, "type_id", 0, "Sequence", "id", "A",
                     "type_id", 0, "Sequence", "id", "B", "type_id", 1, "special_tokens", mark, "id", mark, "ids", id,
                     "tokens", mark);
}

static inline json_t *convert_bpe(json_t *vocab, json_t *merges, const char *unknown, int ignore_merges) {
    return json_pack("{s:s, s:n, s:s?, s:n, s:n, s:b, s:b, s:b, s:o, s:o}", "type", "BPE", "dropout", "unk_token",
                     unknown, "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk", unknown != NULL,
                     "byte_fallback", unknown != NULL, "ignore_merges", ignore_merges, "vocab", vocab, "merges",
                     merges);
}

// tokenizer.json's text and a tokenizer_config.json into files; takes over the JSON. 0 or -1.
static inline int convert_store(json_t *files, json_t *json, const char *begin, const char *end) {
    char config[256];
    char *text = json != NULL ? json_dumps(json, JSON_COMPACT) : NULL;
    snprintf(config, sizeof config,
             "{\"tokenizer_class\": \"PreTrainedTokenizerFast\", \"bos_token\": \"%s\", \"eos_token\": \"%s\", "
             "\"clean_up_tokenization_spaces\": false}\n",
             begin, end);
    int failed = text == NULL || json_object_set_new(files, "tokenizer.json", json_string(text)) != 0 ||
                 json_object_set_new(files, "tokenizer_config.json", json_string(config)) != 0;
    free(text);
    json_decref(json);
    return failed ? error_set("out of memory for the tokenizer") : 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// tiktoken's ranks

// Bytes of a base64 word (n characters) into out (room for n); -1 if it is none.
static inline int base64_bytes(char *out, const char *word, size_t n) {
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    uint32_t bits = 0;
    int n_bits = 0, used = 0;
    while (n > 0 && word[n - 1] == '=') n--;
    for (size_t i = 0; i < n; i++) {
        const char *digit = word[i] != '\0' ? strchr(digits, word[i]) : NULL;
        if (digit == NULL) return -1;
        bits = (bits << 6 | (uint32_t)(digit - digits)) & 0xFFFF, n_bits += 6;
        if (n_bits >= 8) out[used++] = (char)(bits >> (n_bits -= 8) & 0xFF);
    }
    return used;
}

// Llama 3's name of mark i after the tokens, as Llama 3.1 has them.
static inline void llama3_mark(char *name, size_t size, int i) {
    static const char *const named[] = {"begin_of_text",
                                        "end_of_text",
                                        "reserved_special_token_0",
                                        "reserved_special_token_1",
                                        "finetune_right_pad_id",
                                        "reserved_special_token_2",
                                        "start_header_id",
                                        "end_header_id",
                                        "eom_id",
                                        "eot_id",
                                        "python_tag"};
    int n_named = (int)(sizeof named / sizeof *named);
    if (i < n_named)
        snprintf(name, size, "<|%s|>", named[i]);
    else
        snprintf(name, size, "<|reserved_special_token_%d|>", i - n_named + 3);
}

// Reads a line "base64 rank"; returns its length with its end, or -1 with an error message.
static inline int64_t convert_rank_line(Convert *c, const char *line, const char *end, int number, char *scratch) {
    const char *stop = (const char *)memchr(line, '\n', (size_t)(end - line));
    const char *space = (const char *)memchr(line, ' ', (size_t)((stop != NULL ? stop : end) - line));
    char spelling[4 * CONVERT_LONGEST], rank[16] = "", *after = rank;
    uint32_t codes[256];
    if (stop == NULL) stop = end;
    int n_bytes = space != NULL ? base64_bytes(scratch, line, (size_t)(space - line)) : -1;
    if (n_bytes > 0 && stop - space - 1 < (int64_t)sizeof rank) memcpy(rank, space + 1, (size_t)(stop - space - 1));
    long id = strtol(rank, &after, 10);
    if (after == rank || (*after != '\0' && *after != '\r') || id < 0 || id >= c->bpe.n_ids ||
        n_bytes > CONVERT_LONGEST || c->bpe.tokens[id].bytes != NULL)
        return error_set("tokenizer.model: line %d is not base64, a space and a rank of its own", number);
    gpt2_codes(codes);
    size_t used = 0;
    for (int i = 0; i < n_bytes; i++) used += (size_t)utf8_put(spelling + used, codes[(unsigned char)scratch[i]]);
    bpe_name(&c->bpe, (uint32_t)id, scratch, (size_t)n_bytes, 1);
    c->names[id] = json_stringn(spelling, used), c->order[id] = (double)id;
    return stop - line + (stop < end);
}

static inline json_t *convert_llama3_json(Convert *c) {
    char name[64];
    int n = c->bpe.n_ids;
    json_t *marks = json_array(), *merges = convert_merges(c);
    for (int i = 0; i < LLAMA3_MARKS; i++) {
        llama3_mark(name, sizeof name, i);
        json_array_append_new(marks, convert_mark(n + i, name));
    }
    json_t *split = json_pack("{s:s, s:{s:s}, s:s, s:b}", "type", "Split", "pattern", "Regex", SPLIT_LLAMA3, "behavior",
                              "Isolated", "invert", 0);
    json_t *level = json_pack("{s:s, s:b, s:b, s:b}", "type", "ByteLevel", "add_prefix_space", 0, "trim_offsets", 1,
                              "use_regex", 0);
    json_t *json =
        json_pack("{s:s, s:n, s:n, s:o, s:n, s:{s:s, s:[o, O]}, s:o, s:o, s:o}", "version", "1.0", "truncation",
                  "padding", "added_tokens", marks, "normalizer", "pre_tokenizer", "type", "Sequence", "pretokenizers",
                  split, level, "post_processor", convert_template(n, "<|begin_of_text|>"), "decoder", level, "model",
                  convert_bpe(convert_vocab(c), merges, NULL, 1));
    return json;
}

// 1 if a text is what tiktoken writes: its first line is base64 and 0.
static inline int is_tiktoken(const char *text, size_t n) {
    const char *stop = (const char *)memchr(text, '\n', n);
    return stop != NULL && stop - text >= 4 && memcmp(stop - 2, " 0", 2) == 0;
}

// Puts the tokenizer.json of a tiktoken file of Llama 3 (n bytes of text) into files, with a tokenizer_config.json. 0,
// or -1 naming the line that is wrong.
static inline int convert_tiktoken(json_t *files, const char *text, size_t n) {
    const char *end = text + n;
    int lines = 0, result = 0;
    Convert c;
    for (size_t i = 0; i < n; i++) lines += text[i] == '\n';
    lines += n > 0 && text[n - 1] != '\n';
    if (lines > CONVERT_TOKENS) return error_set("tokenizer.model: %d lines are too many", lines);
    char *scratch = (char *)malloc(n + 1);
    result = convert_alloc(&c, lines, n);
    if (scratch == NULL) result = error_set("out of memory for the tokenizer");
    for (int number = 1; text < end && result == 0; number++) {
        int64_t length = convert_rank_line(&c, text, end, number, scratch);
        if (length < 0) result = -1;
        text += length;
    }
    if (result == 0) result = convert_store(files, convert_llama3_json(&c), "<|begin_of_text|>", "<|end_of_text|>");
    free(scratch);
    convert_free(&c);
    return result;
}

// ---------------------------------------------------------------------------------------------------------------------
// llama2.c's scores

// A token's spelling in a tokenizer.json: U+2581 for spaces, marks without the line ends that llama2.c puts around.
static inline json_t *score_spelling(uint32_t id, const char *bytes, size_t n, char *scratch) {
    static const char *const marks[] = {"<unk>", "<s>", "</s>"};
    size_t used = 0;
    if (id < 3) return json_string(marks[id]);
    for (size_t i = 0; i < n; i++) {
        size_t length = bytes[i] == ' ' ? 3 : 1;
        memcpy(scratch + used, bytes[i] == ' ' ? SCORE_SPACE : bytes + i, length);
        used += length;
    }
    return memchr(scratch, 0, used) == NULL ? json_stringn(scratch, used) : NULL;
}

static inline int convert_score_token(Convert *c, uint32_t id, const unsigned char *at, uint32_t n, char *scratch) {
    float score;
    memcpy(&score, at, 4);
    c->names[id] = score_spelling(id, (const char *)at + 8, n, scratch);
    if (c->names[id] == NULL) return error_set("tokenizer.bin: token %u is not UTF-8 text", id);
    c->order[id] = score == score ? -(double)score : 0.0; // NaN would have no place
    bpe_name(&c->bpe, id, (const char *)at + 8, n, id >= 3);
    return 0;
}

// How many tokens a file has; -1 if it does not end with one.
static inline int score_tokens(const unsigned char *bytes, size_t n) {
    int tokens = 0;
    size_t at = 4;
    while (n >= 4 && at < n && tokens < CONVERT_TOKENS) {
        uint32_t length = 0;
        if (n - at >= 8) memcpy(&length, bytes + at + 4, 4);
        if (length == 0 || length > CONVERT_LONGEST || length > n - at - 8) return -1;
        at += 8 + (size_t)length;
        tokens++;
    }
    return at == n && tokens > 3 ? tokens : -1;
}

static inline json_t *convert_llama2_json(Convert *c) {
    json_t *marks = json_pack("[o, o, o]", convert_mark(0, "<unk>"), convert_mark(1, "<s>"), convert_mark(2, "</s>"));
    json_t *spaces =
        json_pack("{s:s, s:[{s:s, s:s}, {s:s, s:{s:s}, s:s}]}", "type", "Sequence", "normalizers", "type", "Prepend",
                  "prepend", SCORE_SPACE, "type", "Replace", "pattern", "String", " ", "content", SCORE_SPACE);
    json_t *decoder =
        json_pack("{s:s, s:[{s:s, s:{s:s}, s:s}, {s:s}, {s:s}, {s:s, s:s, s:i, s:i}]}", "type", "Sequence", "decoders",
                  "type", "Replace", "pattern", "String", SCORE_SPACE, "content", " ", "type", "ByteFallback", "type",
                  "Fuse", "type", "Strip", "content", " ", "start", 1, "stop", 0);
    json_t *merges = convert_merges(c);
    return json_pack("{s:s, s:n, s:n, s:o, s:o, s:n, s:o, s:o, s:o}", "version", "1.0", "truncation", "padding",
                     "added_tokens", marks, "normalizer", spaces, "pre_tokenizer", "post_processor",
                     convert_template(1, "<s>"), "decoder", decoder, "model",
                     convert_bpe(convert_vocab(c), merges, "<unk>", 0));
}

// Puts the tokenizer.json of a llama2.c file (n bytes) into files, with a tokenizer_config.json. 0, or -1 with an error
// message.
static inline int convert_llama2c(json_t *files, const unsigned char *bytes, size_t n) {
    int tokens = score_tokens(bytes, n), result;
    Convert c;
    if (tokens < 0) return error_set("tokenizer.bin: not llama2.c's, or cut short");
    char *scratch = (char *)malloc(3 * n);
    result = convert_alloc(&c, tokens, n);
    if (scratch == NULL) result = error_set("out of memory for the tokenizer");
    size_t at = 4;
    for (int id = 0; id < tokens && result == 0; id++) {
        uint32_t length;
        memcpy(&length, bytes + at + 4, 4);
        result = convert_score_token(&c, (uint32_t)id, bytes + at, length, scratch);
        at += 8 + (size_t)length;
    }
    if (result == 0) result = convert_store(files, convert_llama2_json(&c), "<s>", "</s>");
    free(scratch);
    convert_free(&c);
    return result;
}

#endif
