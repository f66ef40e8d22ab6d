// GGUF and llama2.c files: any bytes are read without a read beyond them, down to every tensor's values, the config and
// the tokenizer.
#include "fuzz.h"

#include "../../llmc/model_file.h"

enum { PIECE = 1000 };

// All values of small tensors; of large ones the ends.
static void fuzz_read(const SafeTensors *file) {
    float values[PIECE];
    for (int i = 0; i < file->n_tensors; i++) {
        const SafeTensor *tensor = &file->tensors[i];
        int64_t n = safetensor_count(tensor);
        for (int64_t at = 0; at < n; at += PIECE) {
            if (n > 1 << 18 && at == 20 * PIECE) at = n - PIECE - 7;
            assert(safetensor_read(values, tensor, at, n - at < PIECE ? n - at : PIECE) == 0);
        }
    }
}

static void fuzz_gguf(SafeTensors *file) {
    Config config;
    json_t *files = json_object();
    if (gguf_parse(file) == 0) {
        fuzz_read(file);
        json_t *json = gguf_config(file);
        int vocab = json != NULL ? (int)json_integer_value(json_object_get(json, "vocab_size")) : 300;
        gguf_tokenizer_files(files, file->metadata, "fuzz", vocab);
        gguf_put_tokenizer(file->metadata, files, 300, 0, 1);
        if (json != NULL && config_from_json(&config, json, "fuzz") == 0 && gguf_adopt(file, config.head_dim) == 0)
            fuzz_read(file);
        json_decref(json);
    }
    json_decref(files);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    SafeTensors file;
    Llama2cHeader header;
    unsigned char *bytes = fuzz_copy(data, size);
    memset(&file, 0, sizeof file);
    strcpy(file.path, "fuzz");
    file.map.data = bytes, file.map.size = size;
    if (size >= 4 && memcmp(bytes, "GGUF", 4) == 0)
        fuzz_gguf(&file);
    else if (llama2c_read_header(&header, bytes, size) && llama2c_table(&file, &header) == 0)
        fuzz_read(&file);
    free(file.tensors);
    json_decref(file.header);
    free(bytes);
    return 0;
}

// A Llama of one layer in the types that a seed says.
static json_t *fuzz_metadata(unsigned seed) {
    json_t *metadata =
        json_pack("{s:s, s:i, s:i, s:i, s:i, s:[i], s:i, s:f}", "general.architecture", "llama", "llama.block_count", 1,
                  "llama.embedding_length", 64, "llama.feed_forward_length", 32, "llama.attention.head_count", 4,
                  "llama.attention.head_count_kv", 2, "llama.context_length", 64, "llama.rope.freq_base", 1e4);
    json_t *words = json_pack("{s:[s,s,s,s,s], s:[i,i,i,i,i], s:i, s:s}", "tokenizer.ggml.tokens", "a", "b", "ab",
                              "aba", "<s>", "tokenizer.ggml.token_type", 1, 1, 1, 1, 3, "tokenizer.ggml.bos_token_id",
                              4, "tokenizer.ggml.model", seed % 2 ? "llama" : "gpt2");
    json_object_set_new(words, "tokenizer.ggml.pre", json_string(gguf_pres[seed % GGUF_PRES].name));
    if (seed % 2)
        json_object_set_new(words, "tokenizer.ggml.scores", json_pack("[f,f,f,f,f]", 0.0, 0.0, -1.0, -2.0, 0.0));
    else
        json_object_set_new(words, "tokenizer.ggml.merges", json_pack("[s,s]", "a b", "ab a"));
    json_object_update(metadata, words);
    json_decref(words);
    return metadata;
}

static size_t fuzz_sample(uint8_t *data, size_t max_size, unsigned seed) {
    static const struct {
        const char *name;
        int64_t shape[2];
    } tensors[] = {{"token_embd.weight", {5, 64}},       {"blk.0.attn_q.weight", {64, 64}},
                   {"blk.0.attn_k.weight", {32, 64}},    {"blk.0.attn_k.bias", {32, 1}},
                   {"blk.0.ffn_down.weight", {64, 256}}, {"rope_freqs.weight", {8, 1}}};
    char *text = NULL;
    size_t size = 0;
    uint64_t offset = 0;
    FileWriter file;
    json_t *metadata = fuzz_metadata(seed);
    memset(&file, 0, sizeof file);
    file.file = open_memstream(&text, &size);
    if (file.file == NULL || metadata == NULL) abort();
    gguf_put_head(&file, metadata, 6);
    for (int i = 0; i < 6; i++)
        gguf_put_entry(&file, tensors[i].name, DTYPE_BF16, tensors[i].shape, tensors[i].shape[1] > 1 ? 2 : 1, &offset);
    gguf_put_padding(&file);
    for (uint64_t i = 0; i < offset; i += 4) gguf_put_number(&file, rand_block(seed, RAND_TEST, 2, i).v[0], 4);
    fclose(file.file);
    size = size < max_size ? size : max_size;
    memcpy(data, text, size);
    // another type of the same row: the number follows the name and the dims
    uint8_t *at = (uint8_t *)memmem(data, size, "attn_q.weight", 13);
    if (at != NULL && at + 34 < data + size) at[13 + 20] = (uint8_t)gguf_types[seed / 2 % GGUF_TYPES].number;
    at = (uint8_t *)memmem(data, size, "ffn_down.weight", 15);
    if (at != NULL && at + 36 < data + size) at[15 + 20] = (uint8_t)gguf_types[seed / 3 % GGUF_TYPES].number;
    free(text);
    json_decref(metadata);
    return size;
}

// A llama2.c file that is as long as its sizes ask for, or one byte longer.
static size_t fuzz_llama2c(uint8_t *data, size_t max_size, unsigned seed) {
    int version = (int)(seed / 6 % 3), tied = seed % 3 != 0;
    int32_t words[7] = {8, 9, 1, 2, 1, tied || version > 0 ? 11 : -11, 6}, magic[2] = {0x616b3432, version};
    size_t size = version == 0 ? 28 + 4 * 544 : 256 + 4 * 520; // a table of RoPE more
    if (version == 2) size = 256 + 4 * 24 + 496 + 4 * 62;      // in groups of 8
    size += (tied ? 0 : version == 2 ? 88 + 44 : 4 * 88) + (seed % 5 == 0);
    if (size > max_size) return 0;
    memset(data, 0, size);
    memcpy(data + (version > 0 ? 8 : 0), words, sizeof words);
    if (version > 0) memcpy(data, magic, sizeof magic), data[36] = (uint8_t)tied;
    if (version == 2) data[37] = 8;
    return size;
}

// Every eighth input is a new file that is valid but for the types of two tensors or its length.
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned seed) {
    if (max_size < 8192 || (size >= 28 && seed % 8 != 0)) return LLVMFuzzerMutate(data, size, max_size);
    return seed % 64 == 0 ? fuzz_llama2c(data, max_size, seed / 64) : fuzz_sample(data, max_size, seed / 8);
}
