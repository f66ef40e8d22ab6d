// Training and held-out data: files read into streams of tokens, and these into windows (split.h).
// Files: .txt (one document), .jsonl (a document or a conversation a line: chat.h), .bin (token files: token_file.h).
//
//   Dataset data = {0}; data.val_share = 0.05;
//   if (dataset_read(&data, &data.train, "notes.jsonl", &tokenizer) || dataset_finish(&data, T)) ...
//   split_read(&data.train, split_order(&data.train, sample, seed), T, tokens, targets, starts);
//
// Text is cut into windows. Conversations and instructions are packed whole, and attention stays in each of them; text
// too with PACK_MASK. What is packed and has more than T+1 tokens loses its end, or is split, where it is text.
// Held-out part without --val-data: of a .jsonl every document whose number falls to it, of a .txt or .bin its tail.
#ifndef LLMC_DATASET_H
#define LLMC_DATASET_H

#include <glob.h>    // glob
#include <jansson.h> // .jsonl
#include <stdint.h>  // fixed-width integers

#include "chat.h" // ChatFormat, sample_put
#include "error.h"
#include "file.h"        // FileMap
#include "jsonl.h"       // JsonLines
#include "safetensors.h" // SafeTensorsWriter
#include "split.h"       // Split, split_layout
#include "token_file.h"  // token_file_read
#include "token_stream.h"
#include "tokenizer.h"

typedef struct {
    Split train, val;
    int T;
    double val_share; // of each file read for training, held out
    PackMode pack;
    TooLong too_long;
    TrainOn train_on;
    ChatTemplate chat_template;
    // read: texts, conversations and instructions; lines without text; lines with bytes that were not UTF-8
    int64_t n_documents, n_samples, n_empty, n_repaired;
    PackCounts packed;
} Dataset;

static inline void dataset_close(Dataset *data) {
    split_free(&data->train);
    split_free(&data->val);
}

// Reading -------------------------------------------------------------------------------------------------------------

// Splits off the last `share` of a stream's tokens for validation, both as views of the same memory; of several
// documents whole ones. The training stream keeps ownership.
static inline int dataset_split_tail(Dataset *data, int index, double share) {
    TokenStream *train = &data->train.streams[index];
    int64_t tail = (int64_t)((double)train->n * share), first = 1;
    if (share <= 0.0 || tail < 2 || (train->is_samples && train->n_documents == 1)) return 0;
    TokenStream *val = split_add(&data->val);
    if (val == NULL) return -1;
    train = &data->train.streams[index];
    while (first + 1 < train->n_documents && train->documents[first] < train->n - tail) first++;
    if (train->n_documents > 1) tail = train->n - train->documents[first];
    if (train->n_documents == 1 && stream_begin_document(val)) return -1;
    for (int64_t d = first; d < train->n_documents; d++) {
        if (stream_begin_document(val)) return -1;
        val->documents[d - first] = train->documents[d] - train->documents[first];
    }
    if (train->n_documents > 1) train->n_documents = first;
    val->is_samples = train->is_samples;
    val->tokens = train->tokens + (train->n - tail), val->n = tail;
    train->n -= tail;
    return 0;
}

// -1 if the newest document of a stream is too long and that is an error.
static inline int document_fits(const Dataset *data, const TokenStream *stream, const char *path, int64_t line) {
    int64_t n = stream->n - stream->documents[stream->n_documents - 1];
    if (data->too_long != TOO_LONG_ERROR || data->T == 0 || n <= (int64_t)data->T + 1) return 0;
    return error_set("%s: line %lld: %lld tokens, a window takes %lld (--too-long error); give a larger --seq, or "
                     "--too-long truncate",
                     path, (long long)line, (long long)n, (long long)data->T + 1);
}

// What is read from one .jsonl: text and samples of both sides.
typedef struct {
    TokenStream of[2][2]; // [is_val][is_samples]
    int64_t n_taken;      // lines with something in them
    int64_t period;       // one of so many is held out; 0: none
} LinesRead;

static inline int dataset_read_line(Dataset *data, LinesRead *read, const ChatFormat *format, const JsonLines *lines,
                                    const json_t *json) {
    SampleKind kind = sample_kind(json);
    const char *fault = sample_fault(json, kind);
    int is_samples = kind != SAMPLE_TEXT;
    if (fault != NULL) return error_set("%s: line %lld: %s", lines->path, (long long)lines->line, fault);
    data->n_repaired += lines->repaired;
    int is_val = read->period > 0 && read->n_taken % read->period == read->period - 1;
    TokenStream *stream = &read->of[is_val][is_samples];
    int64_t before = stream->n;
    int is_empty = sample_is_empty(json, kind);
    if (!is_empty && sample_put(stream, format, json, kind)) return -1;
    if (!is_empty && stream->n == before) is_empty = 1, stream->n_documents--; // nothing but what a tokenizer drops
    if (is_empty) {
        data->n_empty++;
        return 0;
    }
    read->n_taken++;
    if (is_samples)
        data->n_samples++;
    else
        data->n_documents++;
    return document_fits(data, stream, lines->path, lines->line);
}

// Adds every line of a .jsonl; line number d of those with something in them goes to val when the split says so.
static inline int dataset_read_jsonl(Dataset *data, Split *side, const char *path, const FileMap *map,
                                     const Tokenizer *tokenizer) {
    LinesRead read;
    JsonLines lines;
    ChatFormat format;
    json_t *json = NULL;
    int result;
    if (chat_format(&format, data->chat_template, data->train_on, chat_tokens(tokenizer), tokenizer)) return -1;
    memset(&read, 0, sizeof read);
    for (int i = 0; i < 4; i++) stream_init(&read.of[i / 2][i % 2]), read.of[i / 2][i % 2].is_samples = i % 2;
    if (side == &data->train && data->val_share > 0.0) read.period = (int64_t)(1.0 / data->val_share + 0.5);
    jsonl_begin(&lines, path, (const char *)map->data, map->size);
    while ((result = jsonl_next(&lines, &json)) > 0) {
        result = dataset_read_line(data, &read, &format, &lines, json);
        json_decref(json);
        if (result != 0) break;
    }
    jsonl_end(&lines);
    for (int i = 0; i < 4; i++) {
        TokenStream *from = &read.of[i / 2][i % 2], *to = NULL;
        if (result == 0 && from->n > 0 && (to = split_add(i / 2 ? &data->val : side)) == NULL) result = -1;
        if (to != NULL)
            *to = *from;
        else
            stream_free(from);
    }
    return result;
}

static inline int dataset_read_text(Dataset *data, Split *side, const FileMap *map, const Tokenizer *tokenizer) {
    const char *text = (const char *)map->data;
    int64_t n = (int64_t)map->size;
    ChatTokens id = chat_tokens(tokenizer);
    if (n >= 3 && memcmp(text, "\xEF\xBB\xBF", 3) == 0) text += 3, n -= 3;
    if (n == 0) {
        data->n_empty++;
        return 0;
    }
    data->n_documents++;
    TokenStream *stream = split_add(side);
    return stream != NULL ? stream_put_document(stream, &id, tokenizer, text, n) : -1;
}

static inline int dataset_read_file(Dataset *data, Split *side, const char *path, const Tokenizer *tokenizer) {
    FileMap map;
    TokenStream *stream;
    int result, streams = side->n_streams;
    if (file_map(&map, path)) return -1;
    if (ends_with(path, ".bin")) {
        stream = split_add(side);
        result = stream != NULL ? token_file_read(stream, path, &map, tokenizer->vocab) : -1;
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
        result = dataset_split_tail(data, streams, data->val_share);
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

// Makes the windows once everything is read. 0, or -1: out of memory, or something is too long and that is an error.
static inline int dataset_finish(Dataset *data, int T) {
    data->T = T;
    PackRules rules = {T, data->pack, data->too_long};
    memset(&data->packed, 0, sizeof data->packed);
    if (split_layout(&data->train, &rules, &data->packed)) return -1;
    return split_layout(&data->val, &rules, &data->packed);
}

// The data in another process ------------------------------------------------------------------------------------

// Declares (begun = 0) or writes the streams of a side.
static inline int split_put(SafeTensorsWriter *writer, int begun, const Split *split, const char *side) {
    char name[64];
    for (int i = 0; i < split->n_streams; i++) {
        const TokenStream *stream = &split->streams[i];
        int64_t n_bytes = 4 * stream->n, kind = stream->is_samples, n_index = 8 * (1 + stream->n_documents);
        snprintf(name, sizeof name, "%s.%d", side, i);
        if (!begun && safetensors_declare(writer, name, DTYPE_U8, &n_bytes, 1)) return -1;
        if (begun) file_write(&writer->file, stream->tokens, (size_t)n_bytes);
        if (stream->packing.firsts == NULL || stream->n_documents == 0) continue;
        snprintf(name, sizeof name, "%s.%d.documents", side, i);
        if (!begun && safetensors_declare(writer, name, DTYPE_U8, &n_index, 1)) return -1;
        if (begun) file_write(&writer->file, &kind, sizeof kind);
        if (begun) file_write(&writer->file, stream->documents, 8 * (size_t)stream->n_documents);
    }
    return 0;
}

// Writes both sides as one file, for another process that is to have the same data: a safetensors container with the
// tokens of stream i of a side as the bytes `train.i` or `val.i`. Of one that is packed `train.i.documents` is 1 for
// conversations and instructions, or 0, and the first tokens of its documents, 8 bytes each.
static inline int dataset_save(const Dataset *data, const char *path) {
    SafeTensorsWriter writer;
    if (safetensors_writer_init(&writer, NULL)) return -1;
    for (int begun = 0; begun < 2; begun++) {
        if (split_put(&writer, begun, &data->train, "train") || split_put(&writer, begun, &data->val, "val")) return -1;
        if (!begun && safetensors_begin(&writer, path)) return -1;
    }
    return file_writer_close(&writer.file);
}

// Reads where the documents of a stream begin, if the file tells.
static inline int stream_load_documents(TokenStream *stream, const SafeTensors *file, const char *name) {
    char full[80];
    snprintf(full, sizeof full, "%s.documents", name);
    const SafeTensor *tensor = safetensors_find(file, full);
    if (tensor == NULL) return 0;
    int64_t n_bytes = safetensor_count(tensor), kind = 0;
    if (tensor->dtype != DTYPE_U8 || n_bytes % 8 != 0 || n_bytes < 16)
        return error_set("%s: %s is no list of documents", file->path, full);
    stream->documents = (int64_t *)malloc((size_t)n_bytes);
    if (stream->documents == NULL) return error_set("out of memory for the data");
    memcpy(&kind, tensor->data, sizeof kind);
    memcpy(stream->documents, (const char *)tensor->data + 8, (size_t)n_bytes - 8);
    stream->n_documents = n_bytes / 8 - 1, stream->documents_capacity = n_bytes / 8, stream->is_samples = kind == 1;
    return documents_check(stream->documents, stream->n_documents, stream->n, file->path);
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
        if (stream_load_documents(stream, file, name)) return -1;
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
