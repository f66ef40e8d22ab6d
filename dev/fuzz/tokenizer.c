// Tokenizers: any bytes as a tokenizer.json, a tiktoken file or llama2.c's are read or refused; what is read encodes
// any bytes within its room and decodes them; and any text comes back from the tokenizers of the fixtures.
//
//   byte 0  what the rest is: 0 a tokenizer.json, 1 tokenizer.model, 2 tokenizer.bin, 3 and on a text
#include "fuzz.h"

#include "../../llmc/file.h"
#include "../../llmc/tokenizer.h"

enum { VOCAB = 1100, FIXTURES = 9 };

static const char *const fixtures[FIXTURES] = {"llama3.json",      "smollm2.json", "gpt2.json",
                                               "gpt2_prefix.json", "qwen.json",    "olmo.json",
                                               "llama2.json",      "mistral.json", "ranks.model"};

static FileMap fuzz_fixture(const char *name) {
    FileMap map;
    char path[PATH_MAX];
    if (path_join(path, "data/fixtures/tokenizers", name) || file_map(&map, path)) abort();
    return map;
}

// Encodes any bytes and decodes the ids; exact: they come back.
static void fuzz_text(const Tokenizer *tokenizer, const uint8_t *data, size_t size, int exact) {
    char *text = (char *)fuzz_copy(data, size), out[64];
    int64_t room = tokenizer_room(tokenizer, (int64_t)size);
    uint32_t *ids = (uint32_t *)malloc(sizeof(uint32_t) * (size_t)(room + 1));
    if (ids == NULL) abort();
    int64_t n = tokenizer_encode(tokenizer, ids, text, (int64_t)size), used = 0;
    assert(n <= room && (n >= 0 || error_message[0] != '\0'));
    for (int64_t i = 0; i < n; i++) {
        assert(ids[i] < (uint32_t)tokenizer->vocab);
        int n_bytes = tokenizer_decode(tokenizer, out, sizeof out, ids[i]);
        if (exact && n_bytes <= (int)sizeof out) {
            assert(used + n_bytes <= (int64_t)size && memcmp(out, text + used, (size_t)n_bytes) == 0);
        }
        used += n_bytes;
    }
    assert(!exact || used == (int64_t)size);
    free(ids);
    free(text);
}

static void fuzz_files(const json_t *files) {
    static const char text[] = "It's 12345  \xC3\xA9\xE2\x96\x81\n\n <|im_end|>\xC0 e\xCC\x81\xCC\xA3";
    Tokenizer tokenizer;
    if (tokenizer_open(&tokenizer, files, VOCAB)) {
        assert(error_message[0] != '\0');
        return;
    }
    assert((tokenizer.kind == TOKENIZER_NONE) == (tokenizer.reason[0] != '\0' && tokenizer.kind != TOKENIZER_BYTE));
    fuzz_text(&tokenizer, (const uint8_t *)text, sizeof text, 0);
    tokenizer_free(&tokenizer);
}

// Bytes as a side file; what is no UTF-8 never becomes one.
static void fuzz_side(const char *name, const uint8_t *data, size_t size) {
    json_t *files = json_object(), *text = json_stringn((const char *)data, size);
    if (text != NULL) {
        json_object_set_new(files, name, text);
        fuzz_files(files);
    }
    json_decref(files);
}

static void fuzz_scores(const uint8_t *data, size_t size) {
    json_t *files = json_object();
    unsigned char *copy = fuzz_copy(data, size);
    if (convert_llama2c(files, copy, size) == 0) fuzz_files(files);
    free(copy);
    json_decref(files);
}

static const Tokenizer *fuzz_tokenizer(int which) {
    static Tokenizer known[FIXTURES];
    Tokenizer *tokenizer = &known[which];
    if (tokenizer->kind == TOKENIZER_NONE) {
        FileMap map = fuzz_fixture(fixtures[which]);
        json_t *files = json_object();
        json_object_set_new(files, which == FIXTURES - 1 ? "tokenizer.model" : "tokenizer.json",
                            json_stringn((const char *)map.data, map.size));
        if (tokenizer_open(tokenizer, files, VOCAB) || tokenizer->kind == TOKENIZER_NONE) abort();
        json_decref(files);
        file_unmap(&map);
    }
    return tokenizer;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size == 0) return 0;
    if (data[0] == 0) fuzz_side("tokenizer.json", data + 1, size - 1);
    if (data[0] == 1) fuzz_side("tokenizer.model", data + 1, size - 1);
    if (data[0] == 2) fuzz_scores(data + 1, size - 1);
    if (data[0] > 2) {
        int which = data[0] % FIXTURES; // llama3, gpt2 and ranks change nothing and have all bytes
        fuzz_text(fuzz_tokenizer(which), data + 1, size - 1, which == 0 || which == 2 || which == FIXTURES - 1);
    }
    return 0;
}

// Every eighth input is a whole file of the fixtures, or its first part.
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned seed) {
    Philox draw = rand_block(seed, RAND_TEST, 5, 0);
    uint32_t which = draw.v[0] % (FIXTURES + 1);
    if (size > 0 && seed % 8 != 0) return LLVMFuzzerMutate(data, size, max_size);
    FileMap map = fuzz_fixture(which < FIXTURES ? fixtures[which] : "llama2c.bin");
    size_t n = map.size < max_size - 1 ? map.size : max_size - 1;
    if (draw.v[1] % 4 == 0) n = draw.v[2] % (n + 1);
    data[0] = (uint8_t)(which == FIXTURES ? 2 : which == FIXTURES - 1);
    memcpy(data + 1, map.data, n);
    file_unmap(&map);
    return n + 1;
}
