// Text to token ids and back, with the tokenizer that a model has in its files.
//
//   Tokenizer tokenizer;
//   if (tokenizer_open(&tokenizer, side_files, vocab)) ...      // malformed; one that is only unknown takes no text
//   uint32_t *ids = (uint32_t *)malloc(sizeof *ids * (size_t)tokenizer_room(&tokenizer, n));
//   int64_t n_ids = tokenizer_encode(&tokenizer, ids, text, n); // no marks; their spelling in text stays text
//   int n_bytes = tokenizer_decode(&tokenizer, out, cap, id);
//
// Kinds: bytes (built in: id = byte, 256 begins a document, 257 ends one), byte-level BPE and SentencePiece's BPE by
// score, as tokenizer_json.h reads them. Bytes that are no UTF-8 become the ids of these bytes, so that what is decoded
// is what was encoded, but: SentencePiece's has one space before it, Qwen's is in Unicode's normal form C, and bytes
// that a vocabulary lacks (SmolLM2's some control characters) are gone.
#ifndef LLMC_TOKENIZER_H
#define LLMC_TOKENIZER_H

#include <jansson.h> // tokenizer.json
#include <stdint.h>  // fixed-width integers
#include <string.h>  // strcmp

#include "error.h"
#include "tokenizer_convert.h" // other files as tokenizer.json
#include "tokenizer_encode.h"  // BPE

typedef enum {
    TOKENIZER_NONE, // none, or not one this program speaks: token files only
    TOKENIZER_BYTE,
    TOKENIZER_BPE,  // byte-level
    TOKENIZER_SCORE // SentencePiece's, with byte fallback
} TokenizerKind;

typedef struct {
    TokenizerKind kind;
    int vocab;
    int bos, eos; // -1: none. What ends a document, not a turn of a conversation
    int adds_bos;
    char reason[TOKENIZER_REASON]; // why text is not taken
    TokenizerModel *model;         // BPE and SCORE
} Tokenizer;

enum { BYTE_BOS = 256, BYTE_EOS = 257, BYTE_VOCAB = 258 };

// The byte tokenizer as a Hugging Face tokenizer.json: byte-level BPE without merges, bytes named by GPT-2's printable
// map. A new reference.
static inline json_t *tokenizer_byte_json(void) {
    json_t *vocab = json_object(), *bos = convert_mark(BYTE_BOS, "<|bos|>"), *eos = convert_mark(BYTE_EOS, "<|eos|>");
    uint32_t codes[256];
    gpt2_codes(codes);
    for (int byte = 0; byte < 256; byte++) {
        char name[5] = {0};
        utf8_put(name, codes[byte]);
        json_object_set_new(vocab, name, json_integer(byte));
    }
    json_t *level = json_pack("{s:s, s:b, s:b, s:b}", "type", "ByteLevel", "add_prefix_space", 0, "trim_offsets", 0,
                              "use_regex", 0);
    json_t *model = json_pack("{s:s, s:n, s:n, s:n, s:n, s:b, s:b, s:o, s:[]}", "type", "BPE", "dropout", "unk_token",
                              "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk", 0, "byte_fallback", 0,
                              "vocab", vocab, "merges");
    json_t *processor = convert_template(BYTE_BOS, "<|bos|>");
    json_t *json = json_pack("{s:s, s:n, s:n, s:[o, o], s:n, s:O, s:o, s:O, s:o}", "version", "1.0", "truncation",
                             "padding", "added_tokens", bos, eos, "normalizer", "pre_tokenizer", level,
                             "post_processor", processor, "decoder", level, "model", model);
    json_decref(level);
    return json;
}

// The files a model with the byte tokenizer carries, {"tokenizer.json": text, ...}; a new reference, NULL when out of
// memory.
static inline json_t *tokenizer_byte_files(void) {
    json_t *files = json_object();
    if (files != NULL && convert_store(files, tokenizer_byte_json(), "<|bos|>", "<|eos|>") == 0) return files;
    json_decref(files);
    return NULL;
}

static inline void tokenizer_free(Tokenizer *tokenizer) {
    tokenizer_model_free(tokenizer->model);
    tokenizer->model = NULL, tokenizer->kind = TOKENIZER_NONE;
}

// Id of an added token by its spelling, "<|eot_id|>"; -1: there is none.
static inline int tokenizer_special(const Tokenizer *tokenizer, const char *spelling) {
    if (tokenizer->kind == TOKENIZER_BYTE)
        return strcmp(spelling, "<|bos|>") == 0 ? BYTE_BOS : strcmp(spelling, "<|eos|>") == 0 ? BYTE_EOS : -1;
    return tokenizer->model != NULL ? added_find(tokenizer->model, spelling) : -1;
}

// The id that a tokenizer_config.json names by "bos_token" or "eos_token", a string or an object with one; -1: none.
static inline int tokenizer_named(const Tokenizer *tokenizer, const json_t *config, const char *key) {
    const json_t *value = json_object_get(config, key);
    const char *spelling = json_string_value(json_is_object(value) ? json_object_get(value, "content") : value);
    return spelling != NULL ? tokenizer_special(tokenizer, spelling) : -1;
}

// A text begins with what the file's template puts there, else with bos_token if add_bos_token says so. A document ends
// with <|end_of_text|> or <|endoftext|>, since the eos_token of a chat model ends a turn; else with eos_token. Where
// both are -1 the model's config may know them.
static inline int tokenizer_read_marks(Tokenizer *tokenizer, const char *config_text) {
    static const char *const ends[] = {"<|end_of_text|>", "<|endoftext|>"};
    json_error_t error;
    json_t *config = config_text != NULL ? json_loads(config_text, 0, &error) : NULL;
    if (config_text != NULL && config == NULL)
        return error_set("tokenizer_config.json: line %d: %s", error.line, error.text);
    const json_t *adds = json_object_get(config, "add_bos_token");
    tokenizer->bos =
        tokenizer->model->bos >= 0 ? tokenizer->model->bos : tokenizer_named(tokenizer, config, "bos_token");
    tokenizer->adds_bos = json_is_boolean(adds) ? json_is_true(adds) : tokenizer->model->bos >= 0;
    for (int i = 0; i < 2 && tokenizer->eos < 0; i++) tokenizer->eos = tokenizer_special(tokenizer, ends[i]);
    if (tokenizer->eos < 0) tokenizer->eos = tokenizer_named(tokenizer, config, "eos_token");
    json_decref(config);
    return 0;
}

// Takes a parsed tokenizer.json.
static inline int tokenizer_take(Tokenizer *tokenizer, const json_t *json, const char *config) {
    json_t *bytes = tokenizer_byte_json();
    int is_byte = json_equal(json, bytes);
    json_decref(bytes);
    if (is_byte && tokenizer->vocab >= BYTE_VOCAB) {
        tokenizer->kind = TOKENIZER_BYTE, tokenizer->bos = BYTE_BOS, tokenizer->eos = BYTE_EOS, tokenizer->adds_bos = 1;
        return 0;
    }
    tokenizer->model = tokenizer_model_read(json, tokenizer->vocab);
    if (tokenizer->model == NULL || tokenizer_read_marks(tokenizer, config)) return -1;
    snprintf(tokenizer->reason, sizeof tokenizer->reason, "%s", tokenizer->model->reason);
    if (tokenizer->reason[0] == '\0')
        tokenizer->kind = tokenizer->model->bpe.by_character ? TOKENIZER_SCORE : TOKENIZER_BPE;
    return 0;
}

// tokenizer.json of the side files, or one made of a tiktoken file; a new reference. NULL: neither, or an error.
static inline json_t *tokenizer_load(const json_t *side_files, int *failed) {
    json_t *made = json_object();
    const char *model = json_string_value(json_object_get(side_files, "tokenizer.model"));
    const json_t *text = json_object_get(side_files, "tokenizer.json");
    json_error_t error;
    *failed = 0;
    if (text == NULL && model != NULL && is_tiktoken(model, strlen(model))) {
        *failed = convert_tiktoken(made, model, strlen(model)) != 0;
        text = json_object_get(made, "tokenizer.json");
    }
    json_t *json = text != NULL ? json_loadb(json_string_value(text), json_string_length(text), 0, &error) : NULL;
    if (text != NULL && json == NULL) *failed = error_set("tokenizer.json: line %d: %s", error.line, error.text) != 0;
    json_decref(made);
    return json;
}

// The tokenizer of a model with so many ids. side_files: object, name -> text: tokenizer.json with
// tokenizer_config.json, or tokenizer.model if that is tiktoken's; NULL: none. Without any, 258 ids are bytes. A
// tokenizer that is none of the known kinds gives TOKENIZER_NONE with the reason. 0, or -1 naming what is wrong in a
// file; nothing is to be freed then.
static inline int tokenizer_open(Tokenizer *tokenizer, const json_t *side_files, int vocab) {
    int failed;
    memset(tokenizer, 0, sizeof *tokenizer);
    tokenizer->vocab = vocab, tokenizer->bos = tokenizer->eos = -1;
    snprintf(tokenizer->reason, sizeof tokenizer->reason, "none came with it that can be read");
    json_t *json = tokenizer_load(side_files, &failed);
    if (json == NULL && !failed && vocab == BYTE_VOCAB) json = tokenizer_byte_json();
    const char *config = json_string_value(json_object_get(side_files, "tokenizer_config.json"));
    if (json != NULL) failed = tokenizer_take(tokenizer, json, config) != 0;
    json_decref(json);
    if (failed) tokenizer_free(tokenizer);
    return failed ? -1 : 0;
}

// 0, or -1 with the reason why text cannot be used with this model.
static inline int tokenizer_takes_text(const Tokenizer *tokenizer, const char *what) {
    if (tokenizer->kind != TOKENIZER_NONE) return 0;
    return error_set("%s: text needs the tokenizer of this model (vocabulary %d): %s; give token .bin files", what,
                     tokenizer->vocab, tokenizer->reason);
}

// 1 if the model's own convention begins a text with bos.
static inline int tokenizer_adds_bos(const Tokenizer *tokenizer) {
    return tokenizer->bos >= 0 && tokenizer->adds_bos;
}

// The most ids that n bytes of text become.
static inline int64_t tokenizer_room(const Tokenizer *tokenizer, int64_t n) {
    return tokenizer->model != NULL ? tokenizer_model_room(tokenizer->model, n) : n;
}

// Ids of n bytes of text, any, into out (room for tokenizer_room), without begin and end marks; added tokens that are
// not special are found, special ones are not. Returns how many, or -1: out of memory, or a text that a split pattern
// cannot be matched with. Threads may share a tokenizer.
static inline int64_t tokenizer_encode(const Tokenizer *tokenizer, uint32_t *out, const char *text, int64_t n) {
    if (tokenizer->kind == TOKENIZER_NONE) return 0;
    if (tokenizer->kind != TOKENIZER_BYTE) return tokenizer_model_encode(tokenizer->model, out, text, n);
    for (int64_t i = 0; i < n; i++) out[i] = (unsigned char)text[i];
    return n;
}

// Bytes of one id into out (cap); marks have none. Returns how many there are: if more than cap, none is written.
static inline int tokenizer_decode(const Tokenizer *tokenizer, char *out, int cap, uint32_t id) {
    char byte = (char)(unsigned char)id;
    const char *bytes = &byte;
    int n = tokenizer->kind == TOKENIZER_BYTE && id < 256;
    if (tokenizer->kind > TOKENIZER_BYTE && id < (uint32_t)tokenizer->vocab) {
        const BpeToken *token = &tokenizer->model->bpe.tokens[id];
        bytes = token->bytes, n = token->is_special ? 0 : (int)token->n_bytes;
    }
    if (n > 0 && n <= cap) memcpy(out, bytes, (size_t)n);
    return n;
}

#endif
