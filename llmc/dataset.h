// Training text as windows of T tokens, in an order fixed by the seed and the global sample number alone.
// Files: .txt (one document), .jsonl (a document a line: {"text": ...}), .bin (token shards):
//
//   byte  size   little-endian
//      0     4   magic 0x4E55544D ("MTUN")
//      4     4   version 1
//      8     8   n, tokens (low word, high word)
//     16     4   V, the vocabulary they were made with; 0 = not stated
//   1024   4*n   bits 0-30: id < V; bit 31: no loss on this token
// Valid only if the file is exactly 1024 + 4*n bytes.
//
// A document becomes BOS bytes EOS. A stream is cut into windows that share no target: window w has inputs
// w*T .. w*T+T-1 and targets one later; the last may be short and is padded with targets that do not count.
// Held-out part without --val-data: of a .jsonl every document whose number falls to it, of a .txt or .bin its tail.
#ifndef LLMC_DATASET_H
#define LLMC_DATASET_H

#include <glob.h>    // glob
#include <jansson.h> // .jsonl
#include <stdint.h>  // fixed-width integers

#include "error.h"
#include "file.h"        // FileMap
#include "jsonl.h"       // json_repair
#include "rand.h"        // rand_permute
#include "safetensors.h" // SafeTensorsWriter
#include "tokenizer.h"

#define TOKENS_MAGIC  0x4E55544D
#define TOKENS_HEADER 1024
#define TOKEN_NO_LOSS 0x80000000u

// Tokens one after the other: in memory, or in a mapped shard.
typedef struct {
    const uint32_t *tokens;
    int64_t n;
    uint32_t *owned; // NULL when mapped
    int64_t capacity;
    FileMap map;
    int64_t first_window; // windows of the streams before this one
} TokenStream;

// One side of the data, training or held-out.
typedef struct {
    TokenStream *streams;
    int n_streams;
    int64_t n_windows, n_tokens;
} Split;

typedef struct {
    Split train, val;
    int T;
    double val_share;                         // of each file read for training, held out
    int64_t n_documents, n_empty, n_repaired; // of text files: read; without text; with bytes that were not UTF-8
} Dataset;

static inline void split_free(Split *split) {
    for (int i = 0; i < split->n_streams; i++) {
        free(split->streams[i].owned);
        file_unmap(&split->streams[i].map);
    }
    free(split->streams);
    memset(split, 0, sizeof *split);
}

static inline void dataset_close(Dataset *data) {
    split_free(&data->train);
    split_free(&data->val);
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
    memset(stream, 0, sizeof *stream);
    stream->map.data = (const uint8_t *)"";
    return stream;
}

// Appends BOS text EOS to a stream in memory.
static inline int stream_add_document(TokenStream *stream, const Tokenizer *tokenizer, const char *text, int64_t n) {
    if (stream->n + n + 2 > stream->capacity) {
        int64_t capacity = (stream->n + n + 2) * 2;
        uint32_t *tokens = (uint32_t *)realloc(stream->owned, sizeof(uint32_t) * (size_t)capacity);
        if (tokens == NULL) return error_set("out of memory for the data");
        stream->owned = tokens, stream->tokens = tokens, stream->capacity = capacity;
    }
    if (tokenizer->bos >= 0) stream->owned[stream->n++] = (uint32_t)tokenizer->bos;
    stream->n += tokenizer_encode(tokenizer, stream->owned + stream->n, text, n);
    if (tokenizer->eos >= 0) stream->owned[stream->n++] = (uint32_t)tokenizer->eos;
    return 0;
}

// Splits off the last `share` of a stream's tokens for validation, both as views of the same memory. The training
// stream keeps ownership.
static inline int dataset_split_tail(Dataset *data, double share) {
    int index = data->train.n_streams - 1;
    if (index < 0) return 0;
    TokenStream *train = &data->train.streams[index];
    int64_t tail = (int64_t)((double)train->n * share);
    if (share <= 0.0 || tail < 2) return 0;
    TokenStream *val = split_add(&data->val);
    if (val == NULL) return -1;
    train = &data->train.streams[index];
    val->tokens = train->tokens + (train->n - tail), val->n = tail;
    train->n -= tail;
    return 0;
}

// Adds every line of a .jsonl; document number d of the file goes to val when the split says so.
static inline int dataset_read_jsonl(Dataset *data, Split *side, const char *path, const FileMap *map,
                                     const Tokenizer *tokenizer) {
    const char *text = (const char *)map->data, *end = text + map->size;
    int64_t line_number = 0, n_taken = 0;
    int64_t period = side == &data->train && data->val_share > 0.0 ? (int64_t)(1.0 / data->val_share + 0.5) : 0;
    TokenStream train, val, *place;
    char *repaired_line = NULL;
    size_t room = 0;
    int result = 0;
    memset(&train, 0, sizeof train);
    memset(&val, 0, sizeof val);
    if (map->size >= 3 && memcmp(text, "\xEF\xBB\xBF", 3) == 0) text += 3;
    while (text < end && result == 0) {
        const char *newline = (const char *)memchr(text, '\n', (size_t)(end - text));
        const char *stop = newline != NULL ? newline : end, *next = newline != NULL ? newline + 1 : end;
        int repaired = 0;
        json_error_t error;
        line_number++;
        while (stop > text && (stop[-1] == '\r' || stop[-1] == ' ' || stop[-1] == '\t')) stop--;
        if (stop == text) { // a blank line
            text = next;
            continue;
        }
        size_t n = (size_t)(stop - text);
        if (n > room) {
            free(repaired_line);
            room = n * 2;
            repaired_line = (char *)malloc(room * 3);
            if (repaired_line == NULL) {
                result = error_set("%s: out of memory for a line of %zu bytes", path, n);
                break;
            }
        }
        size_t length = json_repair(repaired_line, text, n, &repaired);
        json_t *json = json_loadb(repaired_line, length, JSON_ALLOW_NUL, &error);
        const json_t *field = json_object_get(json, "text");
        data->n_repaired += repaired;
        text = next;
        if (json == NULL) {
            result = error_set("%s: line %lld: %s", path, (long long)line_number, error.text);
        } else if (!json_is_string(field)) {
            result = error_set("%s: line %lld: no \"text\" string in it", path, (long long)line_number);
        } else if (json_string_length(field) == 0) {
            data->n_empty++;
        } else {
            place = period > 0 && n_taken % period == period - 1 ? &val : &train;
            result =
                stream_add_document(place, tokenizer, json_string_value(field), (int64_t)json_string_length(field));
            n_taken++, data->n_documents++;
        }
        json_decref(json);
    }
    free(repaired_line);
    for (int is_val = 0; is_val < 2; is_val++) {
        TokenStream *from = is_val ? &val : &train;
        if (result == 0 && from->n > 0 && (place = split_add(is_val ? &data->val : side)) != NULL) {
            from->map = place->map;
            *place = *from;
        } else {
            if (result == 0 && from->n > 0) result = -1;
            free(from->owned);
        }
    }
    return result;
}

static inline int dataset_read_text(Dataset *data, Split *side, const FileMap *map, const Tokenizer *tokenizer) {
    const char *text = (const char *)map->data;
    int64_t n = (int64_t)map->size;
    TokenStream *stream;
    if (n >= 3 && memcmp(text, "\xEF\xBB\xBF", 3) == 0) text += 3, n -= 3;
    if (n == 0) {
        data->n_empty++;
        return 0;
    }
    data->n_documents++;
    stream = split_add(side);
    return stream != NULL ? stream_add_document(stream, tokenizer, text, n) : -1;
}

// Adds a token shard, taking over the map.
static inline int dataset_read_tokens(Split *side, const char *path, FileMap *map, int vocab) {
    uint32_t header[5] = {0};
    TokenStream *stream;
    if (map->size < TOKENS_HEADER)
        return error_set("%s: not a token file: %zu bytes, the header alone is %d", path, map->size, TOKENS_HEADER);
    memcpy(header, map->data, sizeof header);
    int64_t n = (int64_t)((uint64_t)header[3] << 32 | header[2]);
    if (header[0] != TOKENS_MAGIC || header[1] != 1)
        return error_set("%s: not a token file (magic %08x, version %u)", path, header[0], header[1]);
    if (n < 0 || (uint64_t)n > (map->size - TOKENS_HEADER) / 4 || map->size != TOKENS_HEADER + 4 * (uint64_t)n)
        return error_set("%s: %lld tokens in the header need %llu bytes, the file has %zu; is it cut short?", path,
                         (long long)n, TOKENS_HEADER + 4ull * (unsigned long long)n, map->size);
    if (header[4] != 0 && header[4] != (uint32_t)vocab)
        return error_set("%s: made for a vocabulary of %u, this model's is %d; tokenize with this model's tokenizer",
                         path, header[4], vocab);
    const uint32_t *tokens = (const uint32_t *)(const void *)(map->data + TOKENS_HEADER);
    for (int64_t i = 0; i < n; i++) {
        uint32_t id = tokens[i] & ~TOKEN_NO_LOSS;
        if (id >= (uint32_t)vocab)
            return error_set("%s: token %lld is %u, the vocabulary ends at %d; tokenize with this model's tokenizer",
                             path, (long long)i, id, vocab - 1);
    }
    stream = split_add(side);
    if (stream == NULL) return -1;
    stream->tokens = tokens, stream->n = n, stream->map = *map;
    map->size = 0; // now the stream's
    return 0;
}

static inline int dataset_read_file(Dataset *data, Split *side, const char *path, const Tokenizer *tokenizer) {
    FileMap map;
    int result, streams = side->n_streams;
    if (file_map(&map, path)) return -1;
    if (ends_with(path, ".bin")) {
        result = dataset_read_tokens(side, path, &map, tokenizer->vocab);
    } else if (!ends_with(path, ".txt") && !ends_with(path, ".jsonl")) {
        result = error_set("%s: unknown kind of data; .txt, .jsonl and token .bin files are read", path);
    } else if (tokenizer_takes_text(tokenizer, path)) {
        result = -1;
    } else if (ends_with(path, ".txt")) {
        result = dataset_read_text(data, side, &map, tokenizer);
    } else {
        result = dataset_read_jsonl(data, side, path, &map, tokenizer);
    }
    file_unmap(&map);
    if (result == 0 && side == &data->train && !ends_with(path, ".jsonl") && side->n_streams > streams)
        result = dataset_split_tail(data, data->val_share);
    return result;
}

// Reads a file, or every match of a pattern in sorted order, into one side: &data->train (data->val_share of it goes to
// the other) or &data->val. 0, or -1 naming file, line and reason.
static inline int dataset_read(Dataset *data, Split *side, const char *pattern, const Tokenizer *tokenizer) {
    glob_t found;
    int result = 0;
    if (file_exists(pattern)) return dataset_read_file(data, side, pattern, tokenizer);
    if (glob(pattern, 0, NULL, &found) != 0) return error_set("%s: no such file", pattern);
    for (size_t i = 0; i < found.gl_pathc && result == 0; i++)
        result = dataset_read_file(data, side, found.gl_pathv[i], tokenizer);
    globfree(&found);
    return result;
}

// Numbers the windows of a split.
static inline void split_count(Split *split, int T) {
    split->n_windows = split->n_tokens = 0;
    for (int i = 0; i < split->n_streams; i++) {
        split->streams[i].first_window = split->n_windows;
        split->n_windows += split->streams[i].n > 1 ? (split->streams[i].n - 1 + T - 1) / T : 0;
        split->n_tokens += split->streams[i].n;
    }
}

// Stream and first token of a window.
static inline const TokenStream *split_window(const Split *split, int64_t window, int T, int64_t *start) {
    int low = 0, high = split->n_streams - 1; // the last stream whose first_window <= window
    while (low < high) {
        int middle = (low + high + 1) / 2;
        if (split->streams[middle].first_window <= window)
            low = middle;
        else
            high = middle - 1;
    }
    *start = (window - split->streams[low].first_window) * T;
    return &split->streams[low];
}

// tokens (T), targets (T) of one window; targets that do not count are -1. Returns how many count.
static inline int split_read(const Split *split, int64_t window, int T, uint32_t *tokens, int32_t *targets) {
    int64_t start;
    const TokenStream *stream = split_window(split, window, T, &start);
    int n_valid = 0;
    for (int t = 0; t < T; t++) {
        int64_t at = start + t;
        int inside = at + 1 < stream->n;
        uint32_t target = inside ? stream->tokens[at + 1] : TOKEN_NO_LOSS;
        tokens[t] = at < stream->n ? stream->tokens[at] & ~TOKEN_NO_LOSS : 0;
        targets[t] = target & TOKEN_NO_LOSS ? -1 : (int32_t)target;
        n_valid += targets[t] >= 0;
    }
    return n_valid;
}

// The window of a global sample number: every epoch is a permutation of all windows, keyed by the seed.
static inline int64_t split_order(const Split *split, int64_t sample, uint64_t seed) {
    int64_t epoch = sample / split->n_windows;
    return (int64_t)rand_permute((uint64_t)(sample % split->n_windows), (uint64_t)split->n_windows, seed, RAND_SHUFFLE,
                                 (uint32_t)epoch);
}

// A number that changes when the training data do: sizes and both ends of every stream. For --resume.
static inline uint64_t split_hash(const Split *split) {
    uint64_t hash = 1469598103934665603ull;
    for (int i = 0; i < split->n_streams; i++) {
        const TokenStream *stream = &split->streams[i];
        hash = (hash ^ (uint64_t)stream->n) * 1099511628211ull;
        for (int64_t j = 0; j < stream->n; j++) {
            if (j == 65536 && stream->n > 131072) j = stream->n - 65536;
            hash = (hash ^ stream->tokens[j]) * 1099511628211ull;
        }
    }
    return hash;
}

// Numbers the windows once everything is read.
static inline void dataset_finish(Dataset *data, int T) {
    data->T = T;
    split_count(&data->train, T);
    split_count(&data->val, T);
}

// Declares (begun = 0) or writes the streams of a side.
static inline int split_put(SafeTensorsWriter *writer, int begun, const Split *split, const char *side) {
    char name[64];
    for (int i = 0; i < split->n_streams; i++) {
        const TokenStream *stream = &split->streams[i];
        int64_t n_bytes = 4 * stream->n;
        snprintf(name, sizeof name, "%s.%d", side, i);
        if (!begun && safetensors_declare(writer, name, DTYPE_U8, &n_bytes, 1)) return -1;
        if (begun) file_write(&writer->file, stream->tokens, (size_t)n_bytes);
    }
    return 0;
}

// Writes both sides as one file, for another process that is to have the same data: a safetensors container with the
// tokens of stream i of a side as the bytes `train.i` or `val.i`.
static inline int dataset_save(const Dataset *data, const char *path) {
    SafeTensorsWriter writer;
    if (safetensors_writer_init(&writer, NULL)) return -1;
    for (int begun = 0; begun < 2; begun++) {
        if (split_put(&writer, begun, &data->train, "train") || split_put(&writer, begun, &data->val, "val")) return -1;
        if (!begun && safetensors_begin(&writer, path)) return -1;
    }
    return file_writer_close(&writer.file);
}

// Reads a side of such a file, in order.
static inline int split_load(Split *split, const SafeTensors *file, const char *side, int vocab) {
    char name[64];
    for (int i = 0;; i++) {
        snprintf(name, sizeof name, "%s.%d", side, i);
        const SafeTensor *tensor = safetensors_find(file, name);
        if (tensor == NULL) return 0;
        int64_t n_bytes = safetensor_count(tensor);
        if (tensor->dtype != DTYPE_U8 || n_bytes % 4 != 0) return error_set("%s: %s is no tokens", file->path, name);
        TokenStream *stream = split_add(split);
        if (stream == NULL) return -1;
        stream->owned = (uint32_t *)malloc((size_t)n_bytes + 4);
        if (stream->owned == NULL) return error_set("out of memory for the data");
        memcpy(stream->owned, tensor->data, (size_t)n_bytes);
        stream->tokens = stream->owned, stream->n = stream->capacity = n_bytes / 4;
        for (int64_t t = 0; t < stream->n; t++)
            if ((stream->owned[t] & ~TOKEN_NO_LOSS) >= (uint32_t)vocab)
                return error_set("%s: a token is beyond the vocabulary of %d", file->path, vocab);
    }
}

// Reads what dataset_save wrote, for a model of this vocabulary; dataset_finish is due then.
static inline int dataset_load(Dataset *data, const char *path, int vocab) {
    SafeTensors file;
    if (safetensors_open(&file, path)) return -1;
    int result =
        split_load(&data->train, &file, "train", vocab) || split_load(&data->val, &file, "val", vocab) ? -1 : 0;
    safetensors_close(&file);
    return result;
}

#endif
