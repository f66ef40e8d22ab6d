// Reads a Hugging Face tokenizer.json into what tokenizer_encode.h works with.
//
// Taken: model BPE, in two forms.
//   bytes   ByteLevel as or in the pre-tokenizer, after Split by a regular expression (Isolated, or Removed and
//   inverted)
//           or Digits; normalizer none or NFC: Llama 3, SmolLM, GPT-2, Qwen, OLMo
//   scores  SentencePiece's: byte_fallback, U+2581 for spaces by Prepend and Replace or by Metaspace: Llama 1 and 2,
//           TinyLlama, Mistral. Inside, U+2581 is a space, in spellings and in text
// Anything else that would change ids is not done by halves: the reason is kept and text is not taken.
#ifndef LLMC_TOKENIZER_JSON_H
#define LLMC_TOKENIZER_JSON_H

#include <jansson.h> // tokenizer.json
#include <stdint.h>  // fixed-width integers

#include "error.h"
#include "json.h" // json_size
#include "tokenizer_bpe.h"
#include "tokenizer_split.h"
#include "unicode.h"
#include "unicode_nfc.h"

#define SCORE_SPACE "\xE2\x96\x81" // U+2581

enum { GPT2_CODES = 324, TOKENIZER_REASON = 200 };

// When a space is put before a text, or a part of it between added tokens.
typedef enum {
    PREFIX_NEVER,
    PREFIX_ALWAYS,
    PREFIX_MISSING, // unless it begins with one
    PREFIX_FIRST    // the same, only where the text begins
} Prefix;

typedef enum {
    WORDS_WHOLE, // the text is one piece
    WORDS_RUNS,  // spaces and what follows them: right where no merge leads over such a cut
    WORDS_EACH   // one space and what follows it
} Words;

// A token beside the model's vocabulary, or a special one of it.
typedef struct {
    const char *text;
    uint32_t n_bytes, id;
    int is_special; // text with its spelling stays text
    int is_raw;     // looked for before the text is normalized
} AddedToken;

typedef struct {
    Bpe bpe;
    Splitter splitter; // bytes
    Nfc *nfc;          // NULL: no normal form
    Words words;       // scores
    Prefix prefix;
    AddedToken *added; // by first byte, longer ones first
    char *added_text;  // their spellings
    int n_added;
    int added_from[257]; // first of those with this first byte
    int has_plain[2];    // [is_raw]: added tokens that are not special
    int bos;             // what a text begins with by the file's own template; -1: nothing
    int has_replace;     // a normalizer makes U+2581 of spaces
    char reason[TOKENIZER_REASON];
} TokenizerModel;

static inline void tokenizer_model_free(TokenizerModel *m) {
    if (m == NULL) return;
    bpe_free(&m->bpe);
    splitter_free(&m->splitter);
    free(m->nfc);
    free(m->added);
    free(m->added_text);
    free(m);
}

// Keeps why this file is not taken; returns 1.
__attribute__((format(printf, 2, 3))) static inline int tokenizer_cannot(TokenizerModel *m, const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(m->reason, sizeof m->reason, format, args);
    va_end(args);
    return 1;
}

static inline const char *json_text(const json_t *object, const char *key) {
    const char *text = json_string_value(json_object_get(object, key));
    return text != NULL ? text : "";
}

static inline int json_flag(const json_t *object, const char *key) {
    return json_is_true(json_object_get(object, key));
}

// GPT-2's code point for a byte: printable ones stand for themselves, the others for 256 and on.
static inline void gpt2_codes(uint32_t codes[256]) {
    uint32_t next = 256;
    for (uint32_t byte = 0; byte < 256; byte++) {
        int printable = (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
        codes[byte] = printable ? byte : next++;
    }
}

// bytes (room for n) = what a spelling of n bytes in GPT-2's code points stands for; returns how many, -1 if it has
// others.
static inline int gpt2_bytes(char *bytes, const int16_t inverse[GPT2_CODES], const char *name, size_t n) {
    int used = 0, length;
    for (size_t i = 0; i < n; i += (size_t)length) {
        uint32_t code = utf8_get(name + i, &length);
        if (code >= GPT2_CODES || inverse[code] < 0) return -1;
        bytes[used++] = (char)inverse[code];
    }
    return used;
}

// ---------------------------------------------------------------------------------------------------------------------
// Normalizer and pre-tokenizer

static inline int read_normalizer(TokenizerModel *m, const json_t *json) {
    const char *type = json_text(json, "type");
    if (json == NULL || json_is_null(json)) return 0;
    if (strcmp(type, "Sequence") == 0) {
        const json_t *list = json_object_get(json, "normalizers");
        for (size_t i = 0; i < json_array_size(list); i++) {
            int result = read_normalizer(m, json_array_get(list, i));
            if (result) return result;
        }
        return 0;
    }
    if (strcmp(type, "NFC") == 0 && m->nfc == NULL && !m->has_replace) return (m->nfc = nfc_open()) != NULL ? 0 : -1;
    if (strcmp(type, "Prepend") == 0 && strcmp(json_text(json, "prepend"), SCORE_SPACE) == 0 &&
        m->prefix == PREFIX_NEVER && m->nfc == NULL) {
        m->prefix = PREFIX_ALWAYS;
        return 0;
    }
    if (strcmp(type, "Replace") == 0 && strcmp(json_text(json_object_get(json, "pattern"), "String"), " ") == 0 &&
        strcmp(json_text(json, "content"), SCORE_SPACE) == 0 && m->nfc == NULL) {
        m->has_replace = 1;
        return 0;
    }
    return tokenizer_cannot(m, "its normalizer %.60s, or how it is used, is not known", type);
}

static inline int read_metaspace(TokenizerModel *m, const json_t *json) {
    const char *scheme = json_text(json, "prepend_scheme");
    if (strcmp(json_text(json, "replacement"), SCORE_SPACE) != 0)
        return tokenizer_cannot(m, "its Metaspace puts other than U+2581 for spaces");
    if (m->has_replace || m->prefix != PREFIX_NEVER || m->nfc != NULL)
        return tokenizer_cannot(m, "it has both a normalizer and Metaspace");
    if (*scheme == '\0') scheme = json_flag(json, "add_prefix_space") ? "always" : "never";
    m->prefix = strcmp(scheme, "always") == 0  ? PREFIX_MISSING
                : strcmp(scheme, "first") == 0 ? PREFIX_FIRST
                                               : PREFIX_NEVER;
    m->words = json_is_false(json_object_get(json, "split")) ? WORDS_RUNS : WORDS_EACH;
    return 0;
}

// One pre-tokenizer; is_alone: there is no other. *level: there was a ByteLevel.
static inline int read_splitting(TokenizerModel *m, const json_t *json, int is_alone, int *level) {
    const char *type = json_text(json, "type"), *behavior = json_text(json, "behavior");
    if (*level) return tokenizer_cannot(m, "its pre-tokenizer goes on after ByteLevel");
    if (strcmp(type, "ByteLevel") == 0) {
        *level = 1;
        if (json_flag(json, "add_prefix_space")) m->prefix = PREFIX_MISSING;
        if (m->prefix != PREFIX_NEVER && !is_alone)
            return tokenizer_cannot(m, "its ByteLevel puts a space before parts of a text");
        if (json_is_false(json_object_get(json, "use_regex"))) return 0;
        return splitter_add(&m->splitter, SPLIT_GPT2, 0, m->reason, sizeof m->reason);
    }
    if (strcmp(type, "Digits") == 0)
        return splitter_add(&m->splitter, json_flag(json, "individual_digits") ? "\\p{N}" : "\\p{N}+", 0, m->reason,
                            sizeof m->reason);
    const char *pattern = json_string_value(json_object_get(json_object_get(json, "pattern"), "Regex"));
    int inverted = json_flag(json, "invert"), drops = strcmp(behavior, "Removed") == 0;
    if (strcmp(type, "Split") != 0 || pattern == NULL || drops != inverted ||
        (!drops && strcmp(behavior, "Isolated") != 0))
        return tokenizer_cannot(m, "its pre-tokenizer %.60s %.20s is not known", type, behavior);
    return splitter_add(&m->splitter, pattern, drops, m->reason, sizeof m->reason);
}

// Sets *level if the tokenizer is one of bytes.
static inline int read_pre_tokenizer(TokenizerModel *m, const json_t *json, int *level) {
    const char *type = json_text(json, "type");
    *level = 0;
    if (json == NULL || json_is_null(json)) return 0;
    if (strcmp(type, "Metaspace") == 0) return read_metaspace(m, json);
    if (strcmp(type, "Sequence") != 0) return read_splitting(m, json, 1, level);
    const json_t *list = json_object_get(json, "pretokenizers");
    size_t n = json_array_size(list);
    if (n == 1 && strcmp(json_text(json_array_get(list, 0), "type"), "Metaspace") == 0)
        return read_metaspace(m, json_array_get(list, 0));
    for (size_t i = 0; i < n; i++) {
        int result = read_splitting(m, json_array_get(list, i), n == 1, level);
        if (result) return result;
    }
    return 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// Vocabulary and merges

// Bytes of all spellings, which inside are never longer.
static inline size_t spelling_bytes(const json_t *vocab, const json_t *added) {
    json_t *names = (json_t *)vocab;
    size_t n = 0;
    for (void *at = json_object_iter(names); at != NULL; at = json_object_iter_next(names, at))
        n += strlen(json_object_iter_key(at));
    for (size_t i = 0; i < json_array_size(added); i++) n += strlen(json_text(json_array_get(added, i), "content"));
    return n;
}

static inline void name_bytes(TokenizerModel *m, uint32_t id, const char *name, const int16_t inverse[GPT2_CODES],
                              char *scratch) {
    size_t n = strlen(name);
    int n_bytes = gpt2_bytes(scratch, inverse, name, n);
    if (n_bytes == 1) m->bpe.byte_ids[(unsigned char)scratch[0]] = id;
    if (n_bytes >= 0)
        bpe_name(&m->bpe, id, scratch, (size_t)n_bytes, 1);
    else
        bpe_name(&m->bpe, id, name, n, 0);
}

// <0x0A> is a byte; U+2581 becomes a space, and what has a space already is never met.
static inline void name_score(TokenizerModel *m, uint32_t id, const char *name, char *scratch) {
    unsigned byte;
    size_t n = 0, length = strlen(name);
    int has_space = strchr(name, ' ') != NULL, end = 0;
    if (length == 6 && sscanf(name, "<0x%2X>%n", &byte, &end) == 1 && end == 6) {
        scratch[0] = (char)byte;
        m->bpe.byte_ids[byte] = id;
        bpe_name(&m->bpe, id, scratch, 1, 0);
        return;
    }
    for (size_t i = 0; i < length; n++) {
        int is_space = strncmp(name + i, SCORE_SPACE, 3) == 0;
        scratch[n] = is_space ? ' ' : name[i];
        i += is_space ? 3 : 1;
    }
    bpe_name(&m->bpe, id, scratch, n, !has_space);
    if (n > 1 && m->words == WORDS_RUNS)
        for (size_t i = 1; i < n; i++)
            if (scratch[i] == ' ' && scratch[i - 1] != ' ') m->words = WORDS_WHOLE;
}

static inline int read_vocab(TokenizerModel *m, const json_t *vocab, int level, char *scratch) {
    uint32_t codes[256];
    int16_t inverse[GPT2_CODES];
    const char *name;
    json_t *value;
    memset(inverse, 0xFF, sizeof inverse);
    gpt2_codes(codes);
    for (int byte = 0; byte < 256; byte++) inverse[codes[byte]] = (int16_t)byte;
    json_object_foreach((json_t *)vocab, name, value) {
        int64_t id = json_size(value);
        if (id < 0) return error_set("tokenizer.json: the vocabulary's '%.60s' has no id", name);
        if (id >= m->bpe.n_ids)
            return tokenizer_cannot(m, "it has an id %lld, and the model's vocabulary is %d", (long long)id,
                                    m->bpe.n_ids);
        if (m->bpe.tokens[id].bytes != NULL)
            return error_set("tokenizer.json: id %lld has two spellings, '%.60s' is one", (long long)id, name);
        if (level)
            name_bytes(m, (uint32_t)id, name, inverse, scratch);
        else
            name_score(m, (uint32_t)id, name, scratch);
    }
    return 0;
}

// Bytes without an id: SentencePiece's have all. Of the others some lack bytes that their text never had; what stands
// for them is the unknown token, or nothing.
static inline int read_unknown(TokenizerModel *m, const json_t *model, int level) {
    const json_t *name = json_object_get(model, "unk_token");
    const json_t *id =
        json_is_string(name) ? json_object_get(json_object_get(model, "vocab"), json_string_value(name)) : NULL;
    for (int byte = 0; byte < 256; byte++) {
        if (m->bpe.byte_ids[byte] != BPE_NONE) continue;
        if (!level) return tokenizer_cannot(m, "byte %d has no id of its own", byte);
        if (id != NULL && json_flag(model, "fuse_unk"))
            return tokenizer_cannot(m, "it has one id for several unknown bytes");
        if (id != NULL) m->bpe.byte_ids[byte] = (uint32_t)json_integer_value(id);
    }
    return 0;
}

// The parts of a merge, "left right" or ["left","right"], into left and right (each with room for the longest).
static inline int merge_parts(char *left, char *right, size_t room, const json_t *merge) {
    const char *a = json_string_value(json_array_get(merge, 0)), *b = json_string_value(json_array_get(merge, 1));
    size_t n;
    if (json_is_string(merge)) {
        a = json_string_value(merge);
        b = strchr(a, ' ');
        if (b == NULL || strchr(b + 1, ' ') != NULL) return -1;
        n = (size_t)(b++ - a);
    } else {
        if (json_array_size(merge) != 2 || a == NULL || b == NULL) return -1;
        n = strlen(a);
    }
    if (n + strlen(b) >= room) return -1;
    memcpy(left, a, n);
    left[n] = '\0';
    strcpy(right, b);
    return 0;
}

// names: two buffers of `room` bytes, in which the parts and the whole are spelled.
static inline int read_merges(TokenizerModel *m, const json_t *vocab, const json_t *merges, char *left, char *right,
                              size_t room) {
    for (size_t i = 0; i < json_array_size(merges); i++) {
        if (merge_parts(left, right, room, json_array_get(merges, i)))
            return error_set("tokenizer.json: merge %zu is not two spellings of the vocabulary", i);
        const json_t *a = json_object_get(vocab, left), *b = json_object_get(vocab, right);
        memcpy(left + strlen(left), right, strlen(right) + 1);
        const json_t *made = json_object_get(vocab, left);
        if (a == NULL || b == NULL || made == NULL)
            return error_set("tokenizer.json: merge %zu makes '%.60s' of two; one of the three is not in the "
                             "vocabulary",
                             i, left);
        bpe_add_merge(&m->bpe, (uint32_t)json_integer_value(a), (uint32_t)json_integer_value(b),
                      (uint32_t)json_integer_value(made), (uint32_t)i);
    }
    return 0;
}

static inline int is_blank(const json_t *value) {
    return value == NULL || json_is_null(value) || (json_is_string(value) && json_string_length(value) == 0) ||
           (json_is_number(value) && json_number_value(value) == 0.0);
}

static inline int check_model(TokenizerModel *m, const json_t *model, int level) {
    static const char *const unused[] = {"dropout", "continuing_subword_prefix", "end_of_word_suffix"};
    const json_t *type = json_object_get(model, "type");
    if (type != NULL && strcmp(json_text(model, "type"), "BPE") != 0)
        return tokenizer_cannot(m, "its model is %.60s, not BPE", json_text(model, "type"));
    if (type == NULL && json_object_get(model, "merges") == NULL)
        return tokenizer_cannot(m, "its model is of no known type");
    for (size_t i = 0; i < sizeof unused / sizeof *unused; i++)
        if (!is_blank(json_object_get(model, unused[i]))) return tokenizer_cannot(m, "its model has a %s", unused[i]);
    if (!json_is_object(json_object_get(model, "vocab")))
        return error_set("tokenizer.json: the model's vocab is no object");
    if (!json_is_array(json_object_get(model, "merges")))
        return error_set("tokenizer.json: the model's merges are no list");
    if (level) return 0;
    if (!json_flag(model, "byte_fallback") || json_flag(model, "ignore_merges"))
        return tokenizer_cannot(m, "its BPE is neither ByteLevel's nor one with byte_fallback and merges");
    if (!m->has_replace && m->words == WORDS_WHOLE) return tokenizer_cannot(m, "it does not make U+2581 of spaces");
    if (m->has_replace) m->words = WORDS_RUNS; // unless a spelling has a space within
    return 0;
}

static inline int read_model(TokenizerModel *m, const json_t *model, const json_t *added, int vocab_size, int level) {
    const json_t *vocab = json_object_get(model, "vocab"), *merges = json_object_get(model, "merges");
    int result = check_model(m, model, level);
    if (result) return result;
    size_t room = spelling_bytes(vocab, added) + 8;
    if (bpe_alloc(&m->bpe, vocab_size, room, json_array_size(merges))) return -1;
    char *scratch = (char *)malloc(2 * room);
    if (scratch == NULL) return error_set("out of memory for the tokenizer");
    m->bpe.by_character = !level;
    result = read_vocab(m, vocab, level, scratch);
    if (result == 0) result = read_unknown(m, model, level);
    if (result == 0) result = read_merges(m, vocab, merges, scratch, scratch + room, room);
    free(scratch);
    return result;
}

// ---------------------------------------------------------------------------------------------------------------------
// Added tokens and the template

static inline int added_order(const void *a, const void *b) {
    const AddedToken *x = (const AddedToken *)a, *y = (const AddedToken *)b;
    int difference = (int)(unsigned char)x->text[0] - (int)(unsigned char)y->text[0];
    if (difference != 0) return difference;
    return x->n_bytes != y->n_bytes ? (x->n_bytes < y->n_bytes ? 1 : -1) : strcmp(x->text, y->text);
}

static inline int read_added_token(TokenizerModel *m, const json_t *json, const char *text) {
    AddedToken token = {text, 0, 0, json_flag(json, "special"), !json_flag(json, "normalized")};
    int64_t id = json_size(json_object_get(json, "id"));
    token.n_bytes = (uint32_t)strlen(token.text);
    if (id < 0 || token.n_bytes == 0) return error_set("tokenizer.json: an added token has no id or no content");
    if (id >= m->bpe.n_ids && token.is_special) return 0; // one that the model does not have, and text never becomes
    if (id >= m->bpe.n_ids)
        return tokenizer_cannot(m, "it adds an id %lld, and the model's vocabulary is %d", (long long)id, m->bpe.n_ids);
    if (!token.is_special) {
        if (json_flag(json, "single_word") || json_flag(json, "lstrip") || json_flag(json, "rstrip"))
            return tokenizer_cannot(m, "its added token '%.40s' takes spaces or words around it", token.text);
        for (uint32_t i = 0; i < token.n_bytes && !token.is_raw; i++)
            if (m->has_replace || (m->nfc != NULL && (token.text[i] & 0x80)))
                return tokenizer_cannot(m, "its added token '%.40s' is normalized", token.text);
        m->has_plain[token.is_raw] = 1;
    }
    token.id = (uint32_t)id;
    if (m->bpe.tokens[id].bytes == NULL) bpe_name(&m->bpe, token.id, token.text, token.n_bytes, 0);
    if (token.is_special) m->bpe.tokens[id].is_special = 1;
    m->added[m->n_added++] = token;
    return 0;
}

static inline int read_added(TokenizerModel *m, const json_t *list) {
    size_t n = json_array_size(list), used = 0;
    m->added = (AddedToken *)malloc(sizeof *m->added * (n + 1));
    m->added_text = (char *)malloc(spelling_bytes(NULL, list) + n + 1);
    if (m->added == NULL || m->added_text == NULL) return error_set("out of memory for the tokenizer");
    for (size_t i = 0; i < n; i++) {
        const json_t *json = json_array_get(list, i);
        char *text = strcpy(m->added_text + used, json_text(json, "content"));
        int result = read_added_token(m, json, text);
        if (result) return result;
        used += strlen(text) + 1;
    }
    qsort(m->added, (size_t)m->n_added, sizeof *m->added, added_order);
    for (int byte = 0, i = 0; byte <= 256; byte++) {
        while (i < m->n_added && (unsigned char)m->added[i].text[0] < byte) i++;
        m->added_from[byte] = i;
    }
    return 0;
}

// The id of an added token by its spelling; -1: none.
static inline int added_find(const TokenizerModel *m, const char *spelling) {
    for (int i = m->added_from[(unsigned char)*spelling]; i < m->n_added && m->added[i].text[0] == *spelling; i++)
        if (strcmp(m->added[i].text, spelling) == 0) return (int)m->added[i].id;
    return -1;
}

// The special token that a post-processor's template puts before a single text; -1: none.
static inline int read_template(const TokenizerModel *m, const json_t *json) {
    const json_t *first = json_array_get(json_object_get(json, "single"), 0), *list;
    if (strcmp(json_text(json, "type"), "TemplateProcessing") == 0)
        return added_find(m, json_text(json_object_get(first, "SpecialToken"), "id"));
    list = json_object_get(json, "processors");
    for (size_t i = 0; i < json_array_size(list); i++) {
        const json_t *one = json_array_get(list, i);
        if (strcmp(json_text(one, "type"), "TemplateProcessing") == 0) return read_template(m, one);
    }
    return -1;
}

// ---------------------------------------------------------------------------------------------------------------------

static inline int read_tokenizer(TokenizerModel *m, const json_t *json, int vocab) {
    const json_t *model = json_object_get(json, "model"), *added = json_object_get(json, "added_tokens");
    int level = 0, result;
    BpeWork work = {0, NULL, NULL, NULL, 0};
    if (!json_is_object(model)) return error_set("tokenizer.json: no model in it");
    result = read_normalizer(m, json_object_get(json, "normalizer"));
    if (result == 0) result = read_pre_tokenizer(m, json_object_get(json, "pre_tokenizer"), &level);
    if (result == 0 && level && (m->has_replace || m->prefix == PREFIX_ALWAYS))
        result = tokenizer_cannot(m, "it has ByteLevel and a normalizer that changes spaces");
    if (result == 0 && !level && m->splitter.n_steps > 0)
        result = tokenizer_cannot(m, "it splits text and has no ByteLevel");
    if (result == 0) result = read_model(m, model, added, vocab, level);
    if (result == 0) result = read_added(m, added);
    if (result == 0) result = bpe_finish(&m->bpe, json_flag(model, "ignore_merges"), &work);
    if (result == 0) m->bos = read_template(m, json_object_get(json, "post_processor"));
    bpe_work_free(&work);
    return result;
}

// Reads a tokenizer.json for a model of so many ids. NULL: malformed or out of memory, with an error message.
// reason[0] != 0: this one is not taken, and why.
static inline TokenizerModel *tokenizer_model_read(const json_t *json, int vocab) {
    TokenizerModel *m = (TokenizerModel *)calloc(1, sizeof *m);
    if (m == NULL) {
        error_set("out of memory for the tokenizer");
        return NULL;
    }
    m->bos = -1;
    if (read_tokenizer(m, json, vocab) >= 0) return m;
    tokenizer_model_free(m);
    return NULL;
}

#endif
