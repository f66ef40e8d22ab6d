// Reads the .bin files of llama2.c: weights in a fixed order behind a few sizes, little-endian; fp32, in version 2 int8
// with a scale for each group of values.
//
//   version 0, 28 bytes:  i32 dim, hidden_dim, n_layers, n_heads, n_kv_heads, vocab_size (negative: the head is not the
//                         embedding), seq_len
//     embedding; of all layers: norms, wq, wk, wv, wo; norms, w1, w2, w3; last norm; two tables of RoPE
//     (seq_len * head size / 2 each, not used); the head if it is another matrix
//   version 1, 256 bytes: u32 0x616b3432, i32 1, the same seven sizes, u8 1 if the head is the embedding
//     of all layers: norms, norms; last norm; embedding; of all layers: wq, wk, wv, wo, w1, w2, w3; the head if another
//   version 2, 256 bytes: as version 1 with i32 2, and at byte 37 an i32, the values of a group
//     as version 1; a matrix, of each layer, is its int8 values and behind them its fp32 scales: value = q * scale
// Valid only if the file is exactly as long as its sizes say. RoPE has base 10000 and pairs neighbouring rows; norms
// have eps 1e-5. The tokenizer is a file of its own, as a rule tokenizer.bin beside the model; it is not read here.
//
// A safetensors file begins with a header length below 2^27 in 8 bytes: here the upper four are hidden_dim or a
// version, never 0, so no file is both.
#ifndef LLMC_LLAMA2C_H
#define LLMC_LLAMA2C_H

#include <jansson.h> // names, config
#include <math.h>    // INFINITY
#include <stdint.h>  // fixed-width integers

#include "error.h"
#include "file.h"
#include "safetensors.h" // SafeTensors, the table that is filled

#define LLAMA2C_MAGIC 0x616b3432u

typedef struct {
    int version;
    int64_t dim, hidden, layers, heads, kv_heads, vocab, context;
    int tied;
    int group;     // values that have a scale, of version 2; else 0
    uint64_t data; // where the weights begin
} Llama2cHeader;

// Hugging Face's names of what the files hold, "%d" for the layer.
#define LLAMA2C_LAYER "model.layers.%d."
static const struct {
    const char *name;
    char rows, columns; // d dim, h hidden, k keys' width, v vocabulary, 1 for a vector's columns, r a table of RoPE
    int version_0, version_1; // place in the file, -1: not in it; version 2 is as 1
} llama2c_tensors[] = {
    {"model.embed_tokens.weight", 'v', 'd', 0, 3},
    {LLAMA2C_LAYER "input_layernorm.weight", 'd', '1', 1, 0},
    {LLAMA2C_LAYER "self_attn.q_proj.weight", 'd', 'd', 2, 4},
    {LLAMA2C_LAYER "self_attn.k_proj.weight", 'k', 'd', 3, 5},
    {LLAMA2C_LAYER "self_attn.v_proj.weight", 'k', 'd', 4, 6},
    {LLAMA2C_LAYER "self_attn.o_proj.weight", 'd', 'd', 5, 7},
    {LLAMA2C_LAYER "post_attention_layernorm.weight", 'd', '1', 6, 1},
    {LLAMA2C_LAYER "mlp.gate_proj.weight", 'h', 'd', 7, 8},
    {LLAMA2C_LAYER "mlp.down_proj.weight", 'd', 'h', 8, 9},
    {LLAMA2C_LAYER "mlp.up_proj.weight", 'h', 'd', 9, 10},
    {"model.norm.weight", 'd', '1', 10, 2},
    {NULL, 'r', '1', 11, -1},
    {"lm_head.weight", 'v', 'd', 12, 11},
};
enum { LLAMA2C_TENSORS = sizeof llama2c_tensors / sizeof *llama2c_tensors };

// 1 if these bytes can only be a llama2.c header: sizes a model may have, which no other kind of file begins with.
static inline int llama2c_read_header(Llama2cHeader *header, const uint8_t *data, size_t size) {
    uint32_t words[10] = {0};
    int32_t sizes[7];
    if (size < 28) return 0;
    for (size_t i = 0; i < 10 && 4 * i + 4 <= size; i++)
        words[i] = (uint32_t)data[4 * i] | (uint32_t)data[4 * i + 1] << 8 | (uint32_t)data[4 * i + 2] << 16 |
                   (uint32_t)data[4 * i + 3] << 24;
    int has_magic = words[0] == LLAMA2C_MAGIC;
    if (has_magic && size < 256) return 0;
    header->version = has_magic ? (int)words[1] : 0;
    for (int i = 0; i < 7; i++) sizes[i] = (int32_t)words[i + (has_magic ? 2 : 0)];
    header->tied = has_magic ? data[36] != 0 : sizes[5] > 0;
    if (!has_magic && sizes[5] < 0 && sizes[5] > INT32_MIN) sizes[5] = -sizes[5];
    header->dim = sizes[0], header->hidden = sizes[1], header->layers = sizes[2], header->heads = sizes[3];
    header->kv_heads = sizes[4], header->vocab = sizes[5], header->context = sizes[6];
    header->data = has_magic ? 256 : 28;
    header->group = 0;
    if (header->version == 2) memcpy(&header->group, data + 37, 4);
    const int64_t most[7] = {1 << 20, 1 << 22, 4096, 1 << 14, 1 << 14, 1 << 24, 1 << 24};
    for (int i = 0; i < 7; i++)
        if (sizes[i] < 1 || sizes[i] > most[i]) return 0;
    return header->dim % header->heads == 0 && header->heads % header->kv_heads == 0 &&
           header->dim / header->heads % 2 == 0;
}

static inline int64_t llama2c_size(const Llama2cHeader *header, char letter) {
    int64_t head_dim = header->dim / header->heads;
    switch (letter) {
    case 'd': return header->dim;
    case 'h': return header->hidden;
    case 'k': return header->kv_heads * head_dim;
    case 'v': return header->vocab;
    case 'r': return header->context * head_dim; // both tables
    default: return 1;
    }
}

// The scales of a tensor: no weight has one below zero or one that is not finite. The first exporter of version 2,
// whose files nothing reads, wrote all scales behind all matrices: they fail here.
static inline int llama2c_check_scales(const SafeTensors *file, const SafeTensor *tensor) {
    int64_t n = tensor->shape[0] * tensor->shape[1] / tensor->group;
    float scale;
    for (int64_t i = 0; i < n; i++) {
        memcpy(&scale, tensor->scales + 4 * i, 4);
        if (!(scale >= 0.0f && scale < INFINITY))
            return error_set("%s: %s: scale %lld is %g; in version 2 the scales of a matrix lie behind it, as runq.c "
                             "reads them",
                             file->path, tensor->name, (long long)i, (double)scale);
    }
    return 0;
}

// Bytes of a matrix or vector of so many values.
static inline uint64_t llama2c_bytes(const Llama2cHeader *header, int is_matrix, uint64_t n) {
    return is_matrix && header->group > 0 ? n + 4 * (n / (uint64_t)header->group) : 4 * n;
}

// Adds tensor t of a layer at *at in the file's data, or only moves *at where it has no name.
static inline int llama2c_add(SafeTensors *file, const Llama2cHeader *header, int t, int layer, uint64_t *at) {
    char name[96];
    int64_t rows = llama2c_size(header, llama2c_tensors[t].rows);
    int64_t columns = llama2c_size(header, llama2c_tensors[t].columns);
    uint64_t begin = *at, n = (uint64_t)rows * (uint64_t)columns; // sizes are below 2^24 each: no overflow
    int is_matrix = llama2c_tensors[t].columns != '1';
    if (is_matrix && header->group > 0 && n % (uint64_t)header->group != 0)
        return error_set("%s: a matrix of %llu values is not in groups of %d", file->path, (unsigned long long)n,
                         header->group);
    *at += llama2c_bytes(header, is_matrix, n);
    if (*at > file->map.size)
        return error_set("%s: the sizes of this llama2.c file ask for more than its %zu bytes; is it cut short?",
                         file->path, file->map.size);
    if (llama2c_tensors[t].name == NULL) return 0;
    snprintf(name, sizeof name, llama2c_tensors[t].name, layer);
    if (json_object_set_new(file->header, name, json_null()) != 0) return error_set("%s: out of memory", file->path);
    SafeTensor *tensor = &file->tensors[file->n_tensors++];
    tensor->name = json_object_iter_key(json_object_iter_at(file->header, name));
    tensor->dtype = DTYPE_F32, tensor->n_dims = is_matrix ? 2 : 1;
    tensor->shape[0] = rows, tensor->shape[1] = columns;
    tensor->begin = begin, tensor->end = *at, tensor->data = file->map.data + begin;
    if (strstr(name, ".q_proj.") != NULL || strstr(name, ".k_proj.") != NULL)
        tensor->interleaved = (int)(header->dim / header->heads);
    if (!is_matrix || header->group == 0) return 0;
    tensor->dtype = DTYPE_I8, tensor->end = begin + n;
    tensor->scales = tensor->data + n, tensor->group = header->group;
    return llama2c_check_scales(file, tensor);
}

// The table of an opened file, in the order of its data.
static inline int llama2c_table(SafeTensors *file, const Llama2cHeader *header) {
    uint64_t at = header->data;
    if (header->version < 0 || header->version > 2)
        return error_set("%s: a llama2.c file of version %d; versions 0, 1 and 2 are read", file->path,
                         header->version);
    if (header->version == 2 && (header->group < 1 || header->group > 1 << 20))
        return error_set("%s: groups of %d values; a llama2.c file of version 2 has 1 to 1048576", file->path,
                         header->group);
    file->header = json_object();
    file->tensors = (SafeTensor *)calloc((size_t)(LLAMA2C_TENSORS * header->layers), sizeof *file->tensors);
    if (file->tensors == NULL || file->header == NULL) return error_set("%s: out of memory", file->path);
    for (int place = 0; place < LLAMA2C_TENSORS; place++) {
        for (int t = 0; t < LLAMA2C_TENSORS; t++) {
            int here = header->version == 0 ? llama2c_tensors[t].version_0 : llama2c_tensors[t].version_1;
            int is_head = t == LLAMA2C_TENSORS - 1;
            if (here != place || (is_head && header->tied)) continue;
            int is_layer = llama2c_tensors[t].name != NULL && strstr(llama2c_tensors[t].name, "%d") != NULL;
            for (int layer = 0; layer < (is_layer ? (int)header->layers : 1); layer++)
                if (llama2c_add(file, header, t, layer, &at)) return -1;
        }
    }
    if (at == file->map.size) return 0;
    return error_set("%s: a llama2.c file of these sizes has %llu bytes, this one %zu", file->path,
                     (unsigned long long)at, file->map.size);
}

// Maps and checks a file, with Hugging Face's names; *header are its sizes. 0, or -1 with one line; nothing is left
// open then. safetensors_close closes it.
static inline int llama2c_open(SafeTensors *file, Llama2cHeader *header, const char *path) {
    memset(header, 0, sizeof *header);
    if (safetensors_map(file, path)) return -1;
    int result = 0;
    if (!llama2c_read_header(header, file->map.data, file->map.size))
        result = error_set("%s: not a llama2.c file", path);
    if (result == 0) result = llama2c_table(file, header);
    if (result) safetensors_close(file);
    return result;
}

// Its config.json. A new reference, NULL when out of memory.
static inline json_t *llama2c_config(const Llama2cHeader *header) {
    return json_pack("{s:s, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:f, s:f, s:b, s:i, s:i}", "model_type", "llama",
                     "hidden_size", (int)header->dim, "intermediate_size", (int)header->hidden, "num_hidden_layers",
                     (int)header->layers, "num_attention_heads", (int)header->heads, "num_key_value_heads",
                     (int)header->kv_heads, "vocab_size", (int)header->vocab, "max_position_embeddings",
                     (int)header->context, "rms_norm_eps", 1e-5, "rope_theta", 10000.0, "tie_word_embeddings",
                     header->tied, "bos_token_id", 1, "eos_token_id", 2);
}

// 1 if the file at this path begins as llama2.c's do.
static inline int llama2c_is(const char *path) {
    FileMap map;
    Llama2cHeader header;
    if (file_map(&map, path)) return 0;
    int is = llama2c_read_header(&header, map.data, map.size);
    file_unmap(&map);
    return is;
}

#endif
