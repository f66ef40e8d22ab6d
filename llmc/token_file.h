// Token files: what a tokenizer has made of text, so that it need not be done again.
//
//   byte  size   little-endian
//      0     4   magic 0x4E55544D ("MTUN")
//      4     4   version 1 or 2
//      8     8   n, tokens (low word, high word)
//     16     4   V, the vocabulary they were made with; 0 = not stated
//     20     8   D, documents (low word, high word); version 2
//     28     4   1 = conversations and instructions, 0 = text; version 2
//   1024   4*n   bits 0-30: id < V; bit 31: no loss on this token
//    ...   0-4   zeros up to a multiple of 8; version 2
//    ...   8*D   the first token of each document, rising from 0, the last below n; version 2
// Valid only if the file has exactly these bytes. A version 1 does not tell where documents begin.
#ifndef LLMC_TOKEN_FILE_H
#define LLMC_TOKEN_FILE_H

#include <stdint.h> // fixed-width integers
#include <string.h> // memcpy

#include "error.h"
#include "file.h" // FileMap, FileWriter
#include "token_stream.h"

#define TOKENS_MAGIC    0x4E55544D
#define TOKENS_HEADER   1024
#define TOKEN_FILE_MOST ((int64_t)1 << 29) // tokens of a file: 2 GiB

// Bytes of n tokens, and the zeros behind them in version 2.
static inline uint64_t token_file_bytes(uint64_t n, int version) {
    return version == 1 ? 4 * n : (4 * n + 7) / 8 * 8;
}

// 0 if they rise from 0 and stay below n tokens.
static inline int documents_check(const int64_t *documents, int64_t n_documents, int64_t n, const char *path) {
    for (int64_t d = 0; d < n_documents; d++)
        if (d == 0 ? documents[d] != 0 : documents[d] <= documents[d - 1] || documents[d] >= n)
            return error_set("%s: document %lld begins at token %lld of %lld, which is not behind the one before", path,
                             (long long)d, (long long)documents[d], (long long)n);
    return n_documents > 0 && n == 0 ? error_set("%s: documents without tokens", path) : 0;
}

// stream = the token file in a map, which becomes the stream's. vocab: of the model that is to read it.
static inline int token_file_read(TokenStream *stream, const char *path, FileMap *map, int vocab) {
    uint32_t header[8] = {0};
    if (map->size < TOKENS_HEADER)
        return error_set("%s: not a token file: %zu bytes, the header alone is %d", path, map->size, TOKENS_HEADER);
    memcpy(header, map->data, sizeof header);
    uint32_t version = header[1];
    if (header[0] != TOKENS_MAGIC || (version != 1 && version != 2))
        return error_set("%s: not a token file (magic %08x, version %u)", path, header[0], version);
    uint64_t n = (uint64_t)header[3] << 32 | header[2], n_documents = 0, most = (map->size - TOKENS_HEADER) / 4;
    if (version == 2) n_documents = (uint64_t)header[6] << 32 | header[5];
    uint64_t tokens_end = n <= most ? TOKENS_HEADER + token_file_bytes(n, (int)version) : 0;
    if (n > most || n_documents > most || map->size != tokens_end + 8 * n_documents)
        return error_set("%s: %lld tokens and %lld documents in the header need another size than the file's %zu "
                         "bytes; is it cut short?",
                         path, (long long)n, (long long)n_documents, map->size);
    if (header[4] != 0 && header[4] != (uint32_t)vocab)
        return error_set("%s: made for a vocabulary of %u, this model's is %d; tokenize with this model's tokenizer",
                         path, header[4], vocab);
    const uint32_t *tokens = (const uint32_t *)(const void *)(map->data + TOKENS_HEADER);
    for (uint64_t i = 0; i < n; i++) {
        uint32_t id = tokens[i] & ~TOKEN_NO_LOSS;
        if (id >= (uint32_t)vocab)
            return error_set("%s: token %lld is %u, the vocabulary ends at %d; tokenize with this model's tokenizer",
                             path, (long long)i, id, vocab - 1);
    }
    const int64_t *documents = (const int64_t *)(const void *)(map->data + tokens_end);
    if (documents_check(documents, (int64_t)n_documents, (int64_t)n, path)) return -1;
    if (n_documents > 0) {
        stream->documents = (int64_t *)malloc(8 * n_documents);
        if (stream->documents == NULL) return error_set("out of memory for the data");
        memcpy(stream->documents, documents, 8 * n_documents);
    }
    stream->n_documents = stream->documents_capacity = (int64_t)n_documents;
    stream->is_samples = header[7] == 1, stream->tokens = tokens, stream->n = (int64_t)n, stream->map = *map;
    map->size = 0; // now the stream's
    return 0;
}

// Writes documents first .. last-1 of a stream. The file is whole or not there.
static inline int token_file_write(const TokenStream *stream, int64_t first, int64_t last, int vocab,
                                   const char *path) {
    char aside[PATH_MAX];
    FileWriter writer;
    int64_t begin = stream->documents[first], n_documents = last - first, zero = 0;
    int64_t n = stream_document_end(stream, last - 1) - begin;
    uint32_t header[TOKENS_HEADER / 4] = {TOKENS_MAGIC,
                                          2,
                                          (uint32_t)n,
                                          (uint32_t)((uint64_t)n >> 32),
                                          (uint32_t)vocab,
                                          (uint32_t)n_documents,
                                          (uint32_t)((uint64_t)n_documents >> 32),
                                          (uint32_t)stream->is_samples};
    if (snprintf(aside, sizeof aside, "%s.tmp", path) >= (int)sizeof aside)
        return error_set("%.200s: the path is too long", path);
    if (file_writer_open(&writer, aside)) return -1;
    file_write(&writer, header, sizeof header);
    file_write(&writer, stream->tokens + begin, 4 * (size_t)n);
    file_write(&writer, &zero, (size_t)(token_file_bytes((uint64_t)n, 2) - 4 * (uint64_t)n));
    for (int64_t d = first; d < last; d++) {
        int64_t at = stream->documents[d] - begin;
        file_write(&writer, &at, sizeof at);
    }
    if (file_writer_close(&writer) == 0 && file_replace(aside, path) == 0) return 0;
    unlink(aside);
    return -1;
}

// Where a file that begins with document `first` ends: before it has more than max_tokens, but with one document.
static inline int64_t token_file_end(const TokenStream *stream, int64_t first, int64_t max_tokens) {
    int64_t last = first + 1;
    while (last < stream->n_documents && stream_document_end(stream, last) - stream->documents[first] <= max_tokens)
        last++;
    return last;
}

// Writes streams with documents as NAME_00000.bin and so on, of max_tokens each; *n_files is how many. -1 also if
// there is such a file already.
static inline int token_files_write(const TokenStream *streams, int n_streams, int vocab, const char *name,
                                    int64_t max_tokens, int *n_files) {
    char path[PATH_MAX];
    *n_files = 0;
    for (int i = 0; i < n_streams; i++) {
        if (streams[i].n_documents == 0 && streams[i].n > 0)
            return error_set("--tokenize: a token file of version 1 does not tell where documents begin; give text");
        for (int64_t first = 0, last; first < streams[i].n_documents; first = last) {
            last = token_file_end(&streams[i], first, max_tokens);
            if (*n_files > 99999) return error_set("--tokenize %.200s: more than 100000 files", name);
            if (snprintf(path, sizeof path, "%s_%05d.bin", name, (*n_files)++) >= (int)sizeof path)
                return error_set("%.200s: the path is too long", name);
            if (file_exists(path))
                return error_set("--tokenize: %s is there already; remove it, or give another name", path);
            if (token_file_write(&streams[i], first, last, vocab, path)) return -1;
        }
    }
    return 0;
}

#endif
