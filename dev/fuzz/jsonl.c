// Data files of any bytes: a .jsonl, a token file, or what a coordinator sends, read with every option. What is read
// can be packed, every window of it is in order, and what another process gets of it is the same.
#include "fuzz.h"

#include "../../llmc/dataset.h"
#include "../../llmc/show.h"

enum { FUZZ_WINDOW = 24 };

static const char *fuzz_write(const char *name, const uint8_t *data, size_t size) {
    static char path[128];
    snprintf(path, sizeof path, "/tmp/fuzz_jsonl_%d%s", (int)getpid(), name);
    FILE *file = fopen(path, "wb");
    if (file == NULL || fwrite(data, 1, size, file) != size || fclose(file) != 0) abort();
    return path;
}

// Rows of a side's windows hold.
static void fuzz_windows(const Split *split, const Tokenizer *tokenizer) {
    uint32_t tokens[FUZZ_WINDOW];
    int32_t targets[FUZZ_WINDOW], starts[FUZZ_WINDOW];
    int64_t n_targets = 0;
    static FILE *nowhere;
    if (nowhere == NULL) nowhere = fopen("/dev/null", "w");
    for (int64_t w = 0; w < split->n_windows; w++) {
        const TokenStream *stream;
        const Segment *segments;
        Segment own;
        n_targets += split_read(split, w, FUZZ_WINDOW, tokens, targets, starts);
        for (int t = 0; t < FUZZ_WINDOW; t++) {
            assert(tokens[t] < (uint32_t)tokenizer->vocab && targets[t] < tokenizer->vocab);
            assert(starts[t] >= 0 && starts[t] <= t && (t == 0 || starts[t] >= starts[t - 1]));
        }
        int64_t n = split_segments(split, w, FUZZ_WINDOW, &stream, &segments, &own);
        for (int64_t s = 0; s < n; s++)
            show_tokens(nowhere, tokenizer, stream->tokens + segments[s].at, segments[s].rows + 1, (int)(w % 2));
    }
    assert(n_targets == split->n_targets);
}

// The same data through another process.
static void fuzz_send(const Dataset *data, const Tokenizer *tokenizer) {
    char path[128];
    Dataset got = *data;
    memset(&got.train, 0, sizeof got.train);
    memset(&got.val, 0, sizeof got.val);
    snprintf(path, sizeof path, "%s", fuzz_write("_sent.bin", NULL, 0));
    if (dataset_save(data, path) || dataset_load(&got, path, tokenizer->vocab) || dataset_finish(&got, FUZZ_WINDOW))
        abort();
    assert(split_hash(&data->train) == split_hash(&got.train) && split_hash(&data->val) == split_hash(&got.val));
    dataset_close(&got);
    unlink(path);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
    static const char *const kinds[] = {".jsonl", ".jsonl", ".txt", ".bin"};
    static Tokenizer tokenizer; // the same for all, and slow to open
    Dataset data;
    if (size < 2) return 0;
    uint32_t options = bytes[0] | (uint32_t)bytes[1] << 8;
    if (tokenizer.vocab == 0) tokenizer_open(&tokenizer, NULL, BYTE_VOCAB);
    memset(&data, 0, sizeof data);
    data.pack = (PackMode)(options & 3), data.too_long = (TooLong)((options >> 2 & 7) % 5);
    data.train_on = (TrainOn)((options >> 5 & 3) % 3), data.chat_template = options >> 7 & 1 ? CHAT_PLAIN : CHAT_AUTO;
    data.val_share = options >> 8 & 1 ? 0.25 : 0.0, data.T = FUZZ_WINDOW;
    const char *path = fuzz_write(kinds[options >> 9 & 3], bytes + 2, size - 2);
    int result = dataset_read(&data, &data.train, path, &tokenizer);
    unlink(path);
    if (result == 0 && dataset_finish(&data, FUZZ_WINDOW) == 0) {
        fuzz_windows(&data.train, &tokenizer);
        fuzz_windows(&data.val, &tokenizer);
        if (options >> 11 & 1) fuzz_send(&data, &tokenizer);
    }
    dataset_close(&data);
    // and as what a coordinator sends
    memset(&data, 0, sizeof data);
    path = fuzz_write("_got.bin", bytes + 2, size - 2);
    if (options >> 12 & 1 && dataset_load(&data, path, tokenizer.vocab) == 0 && dataset_finish(&data, FUZZ_WINDOW) == 0)
        fuzz_windows(&data.train, &tokenizer);
    dataset_close(&data);
    unlink(path);
    // a template whose tokens the byte tokenizer does not have
    ChatTokens id = {256, 257, 200, 201, 202, 203, 204};
    ChatFormat format;
    TokenStream stream;
    JsonLines lines;
    json_t *line;
    stream_init(&stream);
    if (chat_format(&format, options >> 7 & 1 ? CHAT_LLAMA3 : CHAT_CHATML, data.train_on, id, &tokenizer)) abort();
    unsigned char *copy = fuzz_copy(bytes + 2, size - 2);
    jsonl_begin(&lines, "lines", (const char *)copy, size - 2);
    while (jsonl_next(&lines, &line) > 0) {
        SampleKind kind = sample_kind(line);
        if (sample_fault(line, kind) == NULL && !sample_is_empty(line, kind) &&
            sample_put(&stream, &format, line, kind) != 0)
            abort();
        json_decref(line);
    }
    jsonl_end(&lines);
    free(copy);
    stream_free(&stream);
    return 0;
}

// Every second input is lines, or a token file, that are read, or nearly.
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned seed) {
    static const char *const lines[] = {
        "{\"text\":\"hello\"}\n",
        "{\"prompt\":\"one\",\"completion\":\"two and three\"}\r\n",
        "{\"messages\":[{\"role\":\"user\",\"content\":\"  hi \"},{\"role\":\"assistant\",\"content\":\"ho\"}]}\n",
        "\n",
        "{\"text\":\"\\ud83d long enough to be split in several windows of a few tokens\"}\n",
        "{\"messages\":[]}\n",
        "{\"prompt\":\"a prompt as long as the context and more of it\",\"completion\":\"x\"}\n",
        "\xEF\xBB\xBF{\"text\":\"\xC0\"}\n"};
    if (max_size < 2048 || (size > 0 && seed % 2 == 0)) return LLVMFuzzerMutate(data, size, max_size);
    Philox draw = rand_block(seed, RAND_TEST, 5, 0);
    size_t n = 2;
    data[0] = (uint8_t)draw.v[0], data[1] = (uint8_t)(draw.v[0] >> 8);
    if ((data[1] >> 1 & 3) == 3) { // a token file
        uint32_t header[TOKENS_HEADER / 4] = {TOKENS_MAGIC, 2, 40, 0, BYTE_VOCAB, 3, 0, draw.v[1] & 1}, id;
        int64_t documents[3] = {0, 2 + draw.v[1] % 8, 12 + draw.v[2] % 20};
        memcpy(data + n, header, sizeof header), n += sizeof header;
        for (uint32_t i = 0; i < 40; i++, n += 4)
            id = i | (draw.v[3] >> i % 31 & 1 ? TOKEN_NO_LOSS : 0), memcpy(data + n, &id, 4);
        memcpy(data + n, documents, sizeof documents), n += sizeof documents;
    }
    for (int i = 0; i < 6 && (data[1] >> 1 & 3) != 3; i++) {
        const char *text = lines[draw.v[1] >> 3 * i & 7];
        memcpy(data + n, text, strlen(text)), n += strlen(text);
    }
    return draw.v[2] % 3 == 0 ? LLVMFuzzerMutate(data, n, max_size) : n;
}
