// Text to token ids and back. The byte tokenizer is built in: id = byte, 256 begins a document, 257 ends one. Others
// join as a kind: add it to TokenizerKind, tokenizer_open, tokenizer_encode and tokenizer_decode.
#ifndef LLMC_TOKENIZER_H
#define LLMC_TOKENIZER_H

#include <jansson.h> // tokenizer.json
#include <stdint.h>  // fixed-width integers
#include <string.h>  // strcmp

#include "error.h"

typedef enum {
    TOKENIZER_NONE, // the model's tokenizer is not one this program speaks: token files only
    TOKENIZER_BYTE
} TokenizerKind;

typedef struct {
    TokenizerKind kind;
    int vocab;
    int bos, eos;
} Tokenizer;

enum { BYTE_BOS = 256, BYTE_EOS = 257, BYTE_VOCAB = 258 };

// UTF-8 of a code point below 0x800; returns its length.
static inline int utf8_put(char *out, unsigned code) {
    if (code < 0x80) {
        out[0] = (char)code;
        return 1;
    }
    out[0] = (char)(0xC0 | code >> 6);
    out[1] = (char)(0x80 | (code & 63));
    return 2;
}

// The byte tokenizer as a Hugging Face tokenizer.json: byte-level BPE without merges, bytes named by GPT-2's printable
// map. A new reference.
static inline json_t *tokenizer_byte_json(void) {
    json_t *vocab = json_object();
    unsigned next = 256;
    for (unsigned byte = 0; byte < 256; byte++) {
        int printable = (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
        char name[4] = {0};
        utf8_put(name, printable ? byte : next++);
        json_object_set_new(vocab, name, json_integer(byte));
    }
    json_t *bos = json_pack("{s:i, s:s, s:b, s:b, s:b, s:b, s:b}", "id", BYTE_BOS, "content", "<|bos|>", "single_word",
                            0, "lstrip", 0, "rstrip", 0, "normalized", 0, "special", 1);
    json_t *eos = json_pack("{s:i, s:s, s:b, s:b, s:b, s:b, s:b}", "id", BYTE_EOS, "content", "<|eos|>", "single_word",
                            0, "lstrip", 0, "rstrip", 0, "normalized", 0, "special", 1);
    json_t *level = json_pack("{s:s, s:b, s:b, s:b}", "type", "ByteLevel", "add_prefix_space", 0, "trim_offsets", 0,
                              "use_regex", 0);
    json_t *model = json_pack("{s:s, s:n, s:n, s:n, s:n, s:b, s:b, s:o, s:[]}", "type", "BPE", "dropout", "unk_token",
                              "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk", 0, "byte_fallback", 0,
                              "vocab", vocab, "merges");
    json_t *processor =
        json_pack("{s:s, s:[{s:{s:s, s:i}}, {s:{s:s, s:i}}], s:[{s:{s:s, s:i}}, {s:{s:s, s:i}}, {s:{s:s, s:i}}], "
                  "s:{s:{s:s, s:[i], s:[s]}}}",
                  "type", "TemplateProcessing", "single", "SpecialToken", "id", "<|bos|>", "type_id", 0, "Sequence",
                  "id", "A", "type_id", 0, "pair", "SpecialToken", "id", "<|bos|>", "type_id", 0, "Sequence", "id", "A",
                  "type_id", 0, "Sequence", "id", "B", "type_id", 1, "special_tokens", "<|bos|>", "id", "<|bos|>",
                  "ids", BYTE_BOS, "tokens", "<|bos|>");
    json_t *json = json_pack("{s:s, s:n, s:n, s:[o, o], s:n, s:O, s:o, s:O, s:o}", "version", "1.0", "truncation",
                             "padding", "added_tokens", bos, eos, "normalizer", "pre_tokenizer", level,
                             "post_processor", processor, "decoder", level, "model", model);
    json_decref(level);
    return json;
}

// The files a model with the byte tokenizer carries, {"tokenizer.json": text, ...}; a new reference, NULL when out of
// memory.
static inline json_t *tokenizer_byte_files(void) {
    json_t *tokenizer = tokenizer_byte_json(), *files = json_object();
    char *text = tokenizer != NULL ? json_dumps(tokenizer, JSON_COMPACT) : NULL;
    static const char config[] =
        "{\"tokenizer_class\": \"PreTrainedTokenizerFast\", \"bos_token\": \"<|bos|>\", \"eos_token\": \"<|eos|>\", "
        "\"clean_up_tokenization_spaces\": false}\n";
    int failed = text == NULL || json_object_set_new(files, "tokenizer.json", json_string(text)) != 0 ||
                 json_object_set_new(files, "tokenizer_config.json", json_string(config)) != 0;
    free(text);
    json_decref(tokenizer);
    if (!failed) return files;
    json_decref(files);
    return NULL;
}

// The tokenizer of a model: tokenizer_json is the text of its tokenizer.json, or NULL if none came with it.
static inline void tokenizer_open(Tokenizer *tokenizer, const char *tokenizer_json, int vocab) {
    json_t *given = tokenizer_json != NULL ? json_loads(tokenizer_json, 0, NULL) : NULL;
    json_t *bytes = tokenizer_byte_json();
    int is_byte = tokenizer_json != NULL ? given != NULL && json_equal(given, bytes) : vocab == BYTE_VOCAB;
    tokenizer->kind = is_byte && vocab >= BYTE_VOCAB ? TOKENIZER_BYTE : TOKENIZER_NONE;
    tokenizer->vocab = vocab;
    tokenizer->bos = tokenizer->kind == TOKENIZER_BYTE ? BYTE_BOS : -1;
    tokenizer->eos = tokenizer->kind == TOKENIZER_BYTE ? BYTE_EOS : -1;
    json_decref(given);
    json_decref(bytes);
}

// 0, or -1 with the reason why text cannot be used with this model.
static inline int tokenizer_takes_text(const Tokenizer *tokenizer, const char *what) {
    if (tokenizer->kind != TOKENIZER_NONE) return 0;
    return error_set("%s: text needs the model's tokenizer, and this model's (vocabulary %d) is not built in; give "
                     "token .bin files",
                     what, tokenizer->vocab);
}

// Room that tokenizer_encode needs for n bytes of text.
static inline int64_t tokenizer_room(const Tokenizer *tokenizer, int64_t n) {
    (void)tokenizer;
    return n;
}

// The id of a special token by its spelling; -1: there is none.
static inline int tokenizer_special(const Tokenizer *tokenizer, const char *spelling) {
    if (tokenizer->kind != TOKENIZER_BYTE) return -1;
    return strcmp(spelling, "<|bos|>") == 0 ? BYTE_BOS : strcmp(spelling, "<|eos|>") == 0 ? BYTE_EOS : -1;
}

// Whether a text begins with bos by the model's own convention.
static inline int tokenizer_adds_bos(const Tokenizer *tokenizer) {
    return tokenizer->bos >= 0;
}

// Ids of n bytes of text into out (room for n), without begin and end marks. Returns how many.
static inline int64_t tokenizer_encode(const Tokenizer *tokenizer, uint32_t *out, const char *text, int64_t n) {
    if (tokenizer->kind != TOKENIZER_BYTE) return 0;
    for (int64_t i = 0; i < n; i++) out[i] = (unsigned char)text[i];
    return n;
}

// Bytes of one id into out (room for 8); returns how many. Special ids have none.
static inline int tokenizer_decode(const Tokenizer *tokenizer, char *out, uint32_t id) {
    if (tokenizer->kind != TOKENIZER_BYTE || id > 255) return 0;
    out[0] = (char)(unsigned char)id;
    return 1;
}

#endif
