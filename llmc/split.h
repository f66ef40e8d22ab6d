// One side of the data: streams as windows of T tokens, in an order fixed by the seed and the global sample number
// alone.
//
// A stream that is not packed is cut into windows that share no target: window w has inputs w*T .. w*T+T-1 and targets
// one later; the last may be short and is padded with targets that do not count. One that is packed has windows of
// whole documents (packing.h).
#ifndef LLMC_SPLIT_H
#define LLMC_SPLIT_H

#include <stdint.h> // fixed-width integers
#include <stdlib.h> // realloc
#include <string.h> // memset

#include "error.h"
#include "packing.h" // packing_make
#include "rand.h"    // rand_permute
#include "token_stream.h"

#define PACK_NAMES     "auto|mask|nomask|plain"         // PackMode in words
#define TOO_LONG_NAMES "auto|truncate|split|drop|error" // TooLong in words

// auto: mask for conversations and instructions, plain for text. nomask: packed whole, but attention sees all of a
// window. plain: one document after the other, cut where windows end.
typedef enum { PACK_AUTO, PACK_MASK, PACK_NOMASK, PACK_PLAIN } PackMode;

// What happens to what is packed and has more than T+1 tokens. auto: truncate, but text is split.
typedef enum { TOO_LONG_AUTO, TOO_LONG_TRUNCATE, TOO_LONG_SPLIT, TOO_LONG_DROP, TOO_LONG_ERROR } TooLong;

// One side of the data, training or held-out.
typedef struct {
    TokenStream *streams;
    int n_streams;
    int64_t n_windows, n_tokens;
    int64_t n_targets; // that count, in all windows
    int masked;        // some windows hold several documents that do not see each other
} Split;

// What became of documents when they were packed.
typedef struct {
    int64_t windows, rows; // of windows of whole documents, and how many of their rows are used
    int64_t truncated, split, dropped, untrained;
} PackCounts;

// How windows are made.
typedef struct {
    int T;
    PackMode pack;
    TooLong too_long;
} PackRules;

static inline void split_free(Split *split) {
    for (int i = 0; i < split->n_streams; i++) stream_free(&split->streams[i]);
    free(split->streams);
    memset(split, 0, sizeof *split);
}

// A new empty stream at the end of a split; NULL when out of memory.
static inline TokenStream *split_add(Split *split) {
    size_t size = sizeof *split->streams * (size_t)(split->n_streams + 1);
    TokenStream *streams = (TokenStream *)realloc(split->streams, size);
    if (streams == NULL) {
        error_set("out of memory for the data");
        return NULL;
    }
    split->streams = streams;
    TokenStream *stream = &streams[split->n_streams++];
    stream_init(stream);
    return stream;
}

static inline int stream_is_packed(const TokenStream *stream, const PackRules *rules) {
    return rules->pack == PACK_AUTO ? stream->is_samples : rules->pack != PACK_PLAIN;
}

// pieces (room for all) = a document as what a window can take: 1 .. T rows each, something in each that is trained.
// Returns how many, or -1: it is too long, and that is an error.
static inline int64_t document_pieces(Segment *pieces, const TokenStream *stream, int64_t d, const PackRules *rules,
                                      PackCounts *counts) {
    TooLong policy = rules->too_long;
    int64_t at = stream->documents[d], rows = stream_document_end(stream, d) - at - 1, n = 0;
    if (policy == TOO_LONG_AUTO) policy = stream->is_samples ? TOO_LONG_TRUNCATE : TOO_LONG_SPLIT;
    if (rows > rules->T && policy == TOO_LONG_ERROR)
        return error_set("document %lld of its file has %lld tokens, a window takes %d (--too-long error); give a "
                         "larger --seq, or --too-long truncate",
                         (long long)d + 1, (long long)rows + 1, rules->T + 1);
    if (rows > rules->T && policy == TOO_LONG_DROP) {
        counts->dropped++;
        return 0;
    }
    if (rows > rules->T && policy == TOO_LONG_TRUNCATE) rows = rules->T, counts->truncated++;
    if (rows > rules->T) counts->split++;
    for (int64_t end = at + rows; at < end; at += rules->T) {
        Segment piece = {at, (int32_t)(end - at < rules->T ? end - at : rules->T)};
        if (stream_trained(stream, at + 1, at + 1 + piece.rows) > 0) pieces[n++] = piece;
    }
    counts->untrained += n == 0;
    return n;
}

// Packs the documents of a stream.
static inline int stream_pack(TokenStream *stream, const PackRules *rules, PackCounts *counts) {
    int64_t n = 0, most = stream->n / rules->T + stream->n_documents + 1;
    if (stream->n_documents == 0 && stream->n > 0)
        return error_set("a token file of version 1 does not tell where documents begin, so that they cannot be "
                         "packed; make it anew with --tokenize, or give --pack plain");
    Segment *pieces = (Segment *)malloc(sizeof(Segment) * (size_t)most);
    if (pieces == NULL) return error_set("out of memory for packing");
    for (int64_t d = 0; d < stream->n_documents; d++) {
        int64_t added = document_pieces(pieces + n, stream, d, rules, counts);
        if (added < 0) {
            free(pieces);
            return -1;
        }
        n += added;
    }
    packing_free(&stream->packing);
    int result = packing_make(&stream->packing, pieces, n, rules->T);
    free(pieces);
    counts->windows += stream->packing.n_windows, counts->rows += stream->packing.n_rows;
    return result;
}

// Makes the windows of a split once everything is read, and adds to the counts. 0, or -1: out of memory, or something
// is too long and that is an error.
static inline int split_layout(Split *split, const PackRules *rules, PackCounts *counts) {
    int T = rules->T;
    split->n_windows = split->n_tokens = split->n_targets = 0;
    split->masked = 0;
    for (int i = 0; i < split->n_streams; i++) {
        TokenStream *stream = &split->streams[i];
        const Packing *packing = &stream->packing;
        stream->first_window = split->n_windows, split->n_tokens += stream->n;
        if (!stream_is_packed(stream, rules)) {
            split->n_windows += stream->n > 1 ? (stream->n - 1 + T - 1) / T : 0;
            split->n_targets += stream_trained(stream, 1, stream->n);
            continue;
        }
        if (stream_pack(stream, rules, counts)) return -1;
        split->n_windows += packing->n_windows;
        for (int64_t s = 0; s < packing->n_segments; s++) {
            const Segment *segment = &packing->segments[s];
            split->n_targets += stream_trained(stream, segment->at + 1, segment->at + 1 + segment->rows);
        }
        split->masked |= rules->pack != PACK_NOMASK && packing->n_segments > 0;
    }
    return 0;
}

// The stream of a window.
static inline const TokenStream *split_stream(const Split *split, int64_t window) {
    int low = 0, high = split->n_streams - 1; // the last stream whose first_window <= window
    while (low < high) {
        int middle = (low + high + 1) / 2;
        if (split->streams[middle].first_window <= window)
            low = middle;
        else
            high = middle - 1;
    }
    return &split->streams[low];
}

// tokens, targets, starts (T) of a window that is cut out of a stream, from token `at` on.
static inline void stream_read_cut(const TokenStream *stream, int64_t at, int T, uint32_t *tokens, int32_t *targets,
                                   int32_t *starts) {
    for (int t = 0; t < T; t++, at++) {
        uint32_t target = at + 1 < stream->n ? stream->tokens[at + 1] : TOKEN_NO_LOSS;
        tokens[t] = at < stream->n ? stream->tokens[at] & ~TOKEN_NO_LOSS : 0;
        targets[t] = target & TOKEN_NO_LOSS ? -1 : (int32_t)target;
        starts[t] = 0;
    }
}

// The same of a window of n whole documents. What is left is a document of its own, without targets.
static inline void stream_read_packed(const TokenStream *stream, const Segment *segments, int64_t n, int T,
                                      uint32_t *tokens, int32_t *targets, int32_t *starts) {
    int t = 0;
    for (int64_t s = 0; s < n; s++) {
        const uint32_t *from = stream->tokens + segments[s].at;
        for (int i = 0, start = t; i < segments[s].rows; i++, t++) {
            tokens[t] = from[i] & ~TOKEN_NO_LOSS;
            targets[t] = from[i + 1] & TOKEN_NO_LOSS ? -1 : (int32_t)from[i + 1];
            starts[t] = start;
        }
    }
    for (int start = t; t < T; t++) tokens[t] = 0, targets[t] = -1, starts[t] = start;
}

// tokens (T), targets (T) of one window; targets that do not count are -1. starts (T): the row at which the document
// of each row begins, which is all that the row sees if the split is masked. Returns how many targets count.
static inline int split_read(const Split *split, int64_t window, int T, uint32_t *tokens, int32_t *targets,
                             int32_t *starts) {
    const TokenStream *stream = split_stream(split, window);
    const int64_t *firsts = stream->packing.firsts;
    int64_t w = window - stream->first_window;
    int n_valid = 0;
    if (firsts == NULL)
        stream_read_cut(stream, w * T, T, tokens, targets, starts);
    else
        stream_read_packed(stream, stream->packing.segments + firsts[w], firsts[w + 1] - firsts[w], T, tokens, targets,
                           starts);
    for (int t = 0; t < T; t++) n_valid += targets[t] >= 0;
    return n_valid;
}

// Where the inputs of a window lie in its stream: how many segments, *segments. own: room for the one of a window that
// is cut.
static inline int64_t split_segments(const Split *split, int64_t window, int T, const TokenStream **stream,
                                     const Segment **segments, Segment *own) {
    *stream = split_stream(split, window);
    const Packing *packing = &(*stream)->packing;
    int64_t w = window - (*stream)->first_window, left = (*stream)->n - 1 - w * T;
    if (packing->firsts != NULL) {
        *segments = packing->segments + packing->firsts[w];
        return packing->firsts[w + 1] - packing->firsts[w];
    }
    own->at = w * T, own->rows = (int32_t)(left < T ? left : T);
    *segments = own;
    return 1;
}

// The window of a global sample number: every epoch is a permutation of all windows, keyed by the seed.
static inline int64_t split_order(const Split *split, int64_t sample, uint64_t seed) {
    int64_t epoch = sample / split->n_windows;
    return (int64_t)rand_permute((uint64_t)(sample % split->n_windows), (uint64_t)split->n_windows, seed, RAND_SHUFFLE,
                                 (uint32_t)epoch);
}

static inline uint64_t hash_add(uint64_t hash, uint64_t value) {
    return (hash ^ value) * 1099511628211ull;
}

// A number that changes when the training data do: sizes and both ends of every stream, and all that is packed. For
// --resume.
static inline uint64_t split_hash(const Split *split) {
    uint64_t hash = 1469598103934665603ull;
    for (int i = 0; i < split->n_streams; i++) {
        const TokenStream *stream = &split->streams[i];
        const Packing *packing = &stream->packing;
        hash = hash_add(hash, (uint64_t)stream->n);
        for (int64_t j = 0; j < stream->n; j++) {
            if (j == 65536 && stream->n > 131072) j = stream->n - 65536;
            hash = hash_add(hash, stream->tokens[j]);
        }
        if (packing->firsts == NULL) continue;
        hash = hash_add(hash, (uint64_t)split->masked);
        for (int64_t s = 0; s < packing->n_segments; s++)
            hash = hash_add(hash_add(hash, (uint64_t)packing->segments[s].at), (uint64_t)packing->segments[s].rows);
        for (int64_t w = 0; w <= packing->n_windows; w++) hash = hash_add(hash, (uint64_t)packing->firsts[w]);
        hash = hash_add(hash, (uint64_t)stream_trained(stream, 0, stream->n));
    }
    return hash;
}

#endif
