// Tokens one after the other, in memory or in a mapped file, and where documents begin among them.
//
//   stream_begin_document(&stream), stream_put(&stream, bos, 0), stream_put_text(&stream, &tokenizer, text, n, 1) ...
//
// Every function returns 0, or -1 when out of memory.
#ifndef LLMC_TOKEN_STREAM_H
#define LLMC_TOKEN_STREAM_H

#include <stdint.h> // fixed-width integers
#include <stdlib.h> // realloc
#include <string.h> // memset

#include "error.h"
#include "file.h"    // FileMap
#include "packing.h" // Packing
#include "tokenizer.h"

#define TOKEN_NO_LOSS 0x80000000u

typedef struct {
    const uint32_t *tokens; // (n) bits 0-30: id; bit 31: no loss on this token
    int64_t n;
    uint32_t *owned; // NULL when mapped
    int64_t capacity;
    FileMap map;
    int64_t *documents; // (n_documents) the first token of each, rising from 0; NULL: it is not known where they begin
    int64_t n_documents, documents_capacity;
    int is_samples;       // conversations and instructions, not text
    Packing packing;      // windows of whole documents; none: windows are cut wherever T tokens end
    int64_t first_window; // windows of the streams before this one
} TokenStream;

static inline void stream_free(TokenStream *stream) {
    free(stream->owned);
    free(stream->documents);
    packing_free(&stream->packing);
    file_unmap(&stream->map);
}

static inline void stream_init(TokenStream *stream) {
    memset(stream, 0, sizeof *stream);
    stream->map.data = (const uint8_t *)"";
}

// Makes room for n more tokens.
static inline int stream_reserve(TokenStream *stream, int64_t n) {
    if (stream->n + n <= stream->capacity) return 0;
    int64_t capacity = (stream->n + n) * 2;
    uint32_t *tokens = (uint32_t *)realloc(stream->owned, sizeof(uint32_t) * (size_t)capacity);
    if (tokens == NULL) return error_set("out of memory for the data");
    stream->owned = tokens, stream->tokens = tokens, stream->capacity = capacity;
    return 0;
}

// The next token is the first of a document.
static inline int stream_begin_document(TokenStream *stream) {
    if (stream->n_documents == stream->documents_capacity) {
        int64_t capacity = stream->documents_capacity * 2 + 64;
        int64_t *documents = (int64_t *)realloc(stream->documents, sizeof(int64_t) * (size_t)capacity);
        if (documents == NULL) return error_set("out of memory for the data");
        stream->documents = documents, stream->documents_capacity = capacity;
    }
    stream->documents[stream->n_documents++] = stream->n;
    return 0;
}

// Where document d ends.
static inline int64_t stream_document_end(const TokenStream *stream, int64_t d) {
    return d + 1 < stream->n_documents ? stream->documents[d + 1] : stream->n;
}

// Appends a token; none if id is below 0, which is how a tokenizer says that it has no such token.
static inline int stream_put(TokenStream *stream, int id, int trained) {
    if (id < 0) return 0;
    if (stream_reserve(stream, 1)) return -1;
    stream->owned[stream->n++] = (uint32_t)id | (trained ? 0 : TOKEN_NO_LOSS);
    return 0;
}

// Appends the tokens of n bytes of text.
static inline int stream_put_text(TokenStream *stream, const Tokenizer *tokenizer, const char *text, int64_t n,
                                  int trained) {
    if (stream_reserve(stream, tokenizer_room(tokenizer, n))) return -1;
    uint32_t *to = stream->owned + stream->n;
    int64_t added = tokenizer_encode(tokenizer, to, text, n);
    if (added < 0) return -1;
    for (int64_t i = 0; i < added && !trained; i++) to[i] |= TOKEN_NO_LOSS;
    stream->n += added;
    return 0;
}

// Targets of tokens first .. last-1 that count.
static inline int64_t stream_trained(const TokenStream *stream, int64_t first, int64_t last) {
    int64_t trained = 0;
    for (int64_t i = first; i < last; i++) trained += !(stream->tokens[i] & TOKEN_NO_LOSS);
    return trained;
}

#endif
