// Where a model comes from: a native .bin (safetensors with the config and the tokenizer in its metadata), a Hugging
// Face folder (config.json with model.safetensors or a sharded index), a run folder (its latest checkpoint), a GGUF
// file or a .bin of llama2.c. Kinds of files are told apart by how they begin; all become the same table of tensors.
// A folder of adapters stands for the model they belong to, and their tensors are in the table too.
//
//   ModelFile file;
//   if (model_file_open(&file, "llama1b.bin")) ...          // maps and checks; file.config is the shape
//   const SafeTensor *norm = model_file_expect(&file, "model.norm.weight", shape, 1);    // there, and of this shape
#ifndef LLMC_MODEL_FILE_H
#define LLMC_MODEL_FILE_H

#include <jansson.h> // config and index

#include "adapter.h"
#include "config.h"
#include "error.h"
#include "file.h"
#include "gguf.h"
#include "gguf_model.h"     // names and config of a GGUF
#include "gguf_tokenizer.h" // its tokenizer
#include "llama2c.h"
#include "safetensors.h"
#include "tokenizer.h" // other programs' tokenizers, BYTE_VOCAB

// Small text files of a Hugging Face folder that a native file carries along and an export writes back.
static const char *const model_side_files[] = {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
                                               "generation_config.json", "chat_template.jinja"};
enum { MODEL_SIDE_FILES = sizeof model_side_files / sizeof *model_side_files };

typedef struct {
    SafeTensors *shards;
    int n_shards;
    Config config;       // config.lora: of the adapters in it
    char path[PATH_MAX]; // of the model without adapters
    json_t *side_files;  // object: name -> text
} ModelFile;

static inline void model_file_close(ModelFile *file) {
    for (int i = 0; i < file->n_shards; i++) safetensors_close(&file->shards[i]);
    free(file->shards);
    json_decref(file->side_files);
    memset(file, 0, sizeof *file);
}

// Room for one more shard, which is not counted yet. NULL with an error message.
static inline SafeTensors *model_file_new_shard(ModelFile *file, const char *path) {
    SafeTensors *shards = (SafeTensors *)realloc(file->shards, sizeof *shards * (size_t)(file->n_shards + 1));
    if (shards == NULL) {
        error_set("%s: out of memory", path);
        return NULL;
    }
    file->shards = shards;
    return &shards[file->n_shards];
}

static inline int model_file_add_shard(ModelFile *file, const char *path) {
    SafeTensors *added = model_file_new_shard(file, path), *shards = file->shards;
    if (added == NULL || safetensors_open(added, path)) return -1;
    file->n_shards++;
    for (int s = 0; s + 1 < file->n_shards; s++)
        for (int i = 0; i < added->n_tensors; i++)
            if (safetensors_find(&shards[s], added->tensors[i].name) != NULL)
                return error_set("%s: %s is in another shard too", path, added->tensors[i].name);
    return 0;
}

// The tensor of that name, NULL if absent; *path (unless NULL) gets the file that holds it, the first if none does.
static inline const SafeTensor *model_file_find(const ModelFile *file, const char *name, const char **path) {
    for (int i = 0; i < file->n_shards; i++) {
        const SafeTensor *tensor = safetensors_find(&file->shards[i], name);
        if (path != NULL) *path = file->shards[tensor != NULL ? i : 0].path;
        if (tensor != NULL) return tensor;
    }
    return NULL;
}

// text = "[2,3]"
static inline void shape_text(char *text, size_t size, const int64_t *shape, int n_dims) {
    int used = snprintf(text, size, "[");
    for (int d = 0; d < n_dims && used < (int)size; d++)
        used += snprintf(text + used, size - (size_t)used, "%s%lld", d > 0 ? "," : "", (long long)shape[d]);
    if (used < (int)size) snprintf(text + used, size - (size_t)used, "]");
}

// A shard's name is a plain file name and the file is there.
static inline int model_file_check_shard(const char *folder, const char *index_path, const char *tensor,
                                         const char *shard) {
    char path[PATH_MAX];
    if (shard == NULL || strchr(shard, '/') != NULL || strstr(shard, "..") != NULL)
        return error_set("%s: %s: the shard name is not a plain file name", index_path, tensor);
    if (path_join(path, folder, shard) || !file_exists(path))
        return error_set("%s: shard %s is missing (tensor %s is in it)", index_path, shard, tensor);
    return 0;
}

// Opens the shards an index names: every one must exist beside it and hold what the index says.
static inline int model_file_open_index(ModelFile *file, const char *folder, const char *index_path) {
    char path[PATH_MAX];
    json_error_t error;
    FileMap map;
    const char *name;
    json_t *shard, *seen = json_object();
    int result = 0;
    if (file_map(&map, index_path)) return -1;
    json_t *index = json_loadb((const char *)map.data, map.size, JSON_REJECT_DUPLICATES, &error);
    file_unmap(&map);
    json_t *weights = json_object_get(index, "weight_map");
    if (!json_is_object(weights) || json_object_size(weights) == 0)
        result = error_set("%s: %s", index_path, index == NULL ? error.text : "no weight_map in it");
    json_object_foreach(weights, name, shard) { // all shards are looked for before one is opened
        if (result == 0) result = model_file_check_shard(folder, index_path, name, json_string_value(shard));
    }
    json_object_foreach(weights, name, shard) {
        const char *shard_name = json_string_value(shard);
        if (result != 0 || json_object_get(seen, shard_name) != NULL) continue;
        result = path_join(path, folder, shard_name) ? -1 : model_file_add_shard(file, path);
        json_object_set_new(seen, shard_name, json_integer(file->n_shards - 1));
    }
    json_object_foreach(weights, name, shard) {
        const char *shard_name = json_string_value(shard);
        int64_t at = json_integer_value(json_object_get(seen, shard_name));
        if (result == 0 && safetensors_find(&file->shards[at], name) == NULL)
            result = error_set("%s: %s is not in shard %s", index_path, name, shard_name);
    }
    json_decref(seen);
    json_decref(index);
    return result;
}

// Takes a file of a folder as text, if it is there.
static inline int model_file_add_side(ModelFile *file, const char *folder, const char *name) {
    char path[PATH_MAX];
    FileMap map;
    if (path_join(path, folder, name)) return -1;
    if (!file_exists(path)) return 0;
    if (file_map(&map, path)) return -1;
    json_t *text = json_stringn((const char *)map.data, map.size);
    file_unmap(&map);
    if (text == NULL) return error_set("%s: not UTF-8 text", path);
    json_object_set_new(file->side_files, name, text);
    return 0;
}

// Looks in the model's folder for a tokenizer of another program, unless there is one: tiktoken's tokenizer.model, or
// llama2.c's tokenizer.bin. It is kept as the tokenizer.json that it makes, so that exports have one.
static inline int model_file_find_tokenizer(ModelFile *file, const char *folder) {
    char path[PATH_MAX];
    FileMap map;
    int result = 0;
    for (int binary = 0; binary < 2 && result == 0; binary++) {
        if (json_object_get(file->side_files, "tokenizer.json") != NULL) return 0;
        if (path_join(path, folder, binary ? "tokenizer.bin" : "tokenizer.model")) return -1;
        if (!file_exists(path) || file_is_folder(path)) continue;
        if (file_map(&map, path)) return -1;
        if (!binary && is_tiktoken((const char *)map.data, map.size))
            result = convert_tiktoken(file->side_files, (const char *)map.data, map.size);
        if (binary && score_tokens(map.data, map.size) > 0)
            result = convert_llama2c(file->side_files, map.data, map.size);
        file_unmap(&map);
    }
    return result;
}

static inline int model_file_open_folder(ModelFile *file, const char *folder) {
    char path[PATH_MAX];
    if (path_join(path, folder, "config.json") || config_from_file(&file->config, path)) return -1;
    for (int i = 0; i < MODEL_SIDE_FILES; i++)
        if (model_file_add_side(file, folder, model_side_files[i])) return -1;
    if (model_file_find_tokenizer(file, folder)) return -1;
    if (path_join(path, folder, "model.safetensors")) return -1;
    if (file_exists(path)) return model_file_add_shard(file, path);
    if (path_join(path, folder, "model.safetensors.index.json")) return -1;
    if (file_exists(path)) return model_file_open_index(file, folder, path);
    return error_set("%s: neither model.safetensors nor model.safetensors.index.json is in it", folder);
}

// A file without a tokenizer has the one that lies beside it, unless its ids are bytes.
static inline int model_file_find_beside(ModelFile *file, const char *path) {
    char folder[PATH_MAX];
    path_parent(folder, path);
    if (json_object_get(file->side_files, "tokenizer.json") != NULL || file->config.vocab == BYTE_VOCAB) return 0;
    if (model_file_add_side(file, folder, "tokenizer.json") ||
        model_file_add_side(file, folder, "tokenizer_config.json"))
        return -1;
    return model_file_find_tokenizer(file, folder);
}

static inline int model_file_open_native(ModelFile *file, const char *path) {
    json_error_t error;
    if (model_file_add_shard(file, path)) return -1;
    const json_t *metadata = file->shards[0].metadata;
    const char *text = json_string_value(json_object_get(metadata, "config"));
    if (text == NULL)
        return error_set("%s: no model config in its metadata; a Hugging Face model is given by its folder", path);
    json_t *json = json_loads(text, JSON_REJECT_DUPLICATES, &error);
    if (json == NULL) return error_set("%s: config in the metadata: %s", path, error.text);
    int result = config_from_json(&file->config, json, path);
    json_decref(json);
    for (int i = 0; i < MODEL_SIDE_FILES && result == 0; i++) {
        json_t *side = json_object_get(metadata, model_side_files[i]);
        if (side != NULL) json_object_set(file->side_files, model_side_files[i], side);
    }
    return result == 0 ? model_file_find_beside(file, path) : -1;
}

// Takes over the reference to a config.json's JSON, NULL being an error already told.
static inline int model_file_config(ModelFile *file, json_t *json, const char *path) {
    int result = json != NULL ? config_from_json(&file->config, json, path) : -1;
    json_decref(json);
    return result;
}

static inline int model_file_open_gguf(ModelFile *file, const char *path) {
    SafeTensors *gguf = model_file_new_shard(file, path);
    if (gguf == NULL || gguf_open(gguf, path)) return -1;
    file->n_shards++;
    if (model_file_config(file, gguf_config(gguf), path)) return -1;
    if (gguf_tokenizer_files(file->side_files, gguf->metadata, path, file->config.vocab)) return -1;
    return gguf_adopt(gguf, file->config.head_dim);
}

static inline int model_file_open_llama2c(ModelFile *file, const char *path) {
    Llama2cHeader header;
    SafeTensors *shard = model_file_new_shard(file, path);
    if (shard == NULL || llama2c_open(shard, &header, path)) return -1;
    file->n_shards++;
    return model_file_config(file, llama2c_config(&header), path);
}

// A single file, by how it begins.
static inline int model_file_open_file(ModelFile *file, const char *path) {
    FileMap map;
    if (file_map(&map, path)) return -1;
    int is_gguf = map.size >= 4 && memcmp(map.data, "GGUF", 4) == 0;
    file_unmap(&map);
    if (is_gguf) return model_file_open_gguf(file, path);
    return llama2c_is(path) ? model_file_open_llama2c(file, path) : model_file_open_native(file, path);
}

// Adds a folder's adapters to an open model: their tensors, and config.lora.
static inline int model_file_add_adapter(ModelFile *file, const AdapterConfig *adapter, const char *folder) {
    char path[PATH_MAX];
    if (file->config.lora.rank > 0) return error_set("%s: the model has adapters already; export it first", folder);
    if (path_join(path, folder, ADAPTER_WEIGHTS) || model_file_add_shard(file, path)) return -1;
    file->config.lora = adapter->lora;
    file->config.lora.targets = adapter_targets(&file->shards[file->n_shards - 1]);
    return file->config.lora.targets != 0 ? 0
                                          : error_set("%s: no adapter of the first layer's matrices is in it", path);
}

// What is no folder of adapters.
static inline int model_file_open_plain(ModelFile *file, const char *path) {
    char inner[PATH_MAX];
    if (snprintf(file->path, sizeof file->path, "%s", path) >= (int)sizeof file->path)
        return error_set("%.200s: the path is too long", path);
    if (!file_exists(path))
        return error_set("%s: no such model; make one with --init, or give a .bin, a .gguf or a Hugging Face folder",
                         path);
    if (!file_is_folder(path)) return model_file_open_file(file, path);
    if (path_join(inner, path, "config.json") == 0 && file_exists(inner)) return model_file_open_folder(file, path);
    if (path_join(inner, path, "model.bin") == 0 && file_exists(inner)) return model_file_open_native(file, inner);
    if (path_join(inner, path, "latest/model.bin") == 0 && file_exists(inner))
        return model_file_open_native(file, inner);
    return error_set("%s: neither a Hugging Face model (config.json) nor a run (latest/model.bin)", path);
}

// Adapters of a folder, and the model that their config names.
static inline int model_file_open_adapted(ModelFile *file, const char *folder) {
    AdapterConfig adapter;
    if (adapter_read_config(&adapter, folder)) return -1;
    if (!file_exists(adapter.base))
        return error_set("%s: its model %s is not here; give it by -m, and the adapters by --lora %s", folder,
                         adapter.base[0] != '\0' ? adapter.base : "is not named and", folder);
    if (adapter_is_folder(adapter.base)) return error_set("%s: its model %s are adapters", folder, adapter.base);
    return model_file_open_plain(file, adapter.base) ? -1 : model_file_add_adapter(file, &adapter, folder);
}

// folder (PATH_MAX) = where a path's adapters lie: there, or in the latest checkpoint of a run. 0: it has none.
static inline int model_file_find_adapters(char *folder, const char *path) {
    if (path_join(folder, path, "latest")) return 0;
    if (adapter_is_folder(path)) return snprintf(folder, PATH_MAX, "%s", path) < PATH_MAX;
    return adapter_is_folder(folder);
}

// Opens a model by its path. 0, or -1 with one line naming file, tensor and reason; nothing is left open then.
static inline int model_file_open(ModelFile *file, const char *path) {
    char folder[PATH_MAX];
    memset(file, 0, sizeof *file);
    file->side_files = json_object();
    int result = model_file_find_adapters(folder, path) ? model_file_open_adapted(file, folder)
                                                        : model_file_open_plain(file, path);
    if (result) model_file_close(file);
    return result;
}

// Opens a model and adapters that lie elsewhere.
static inline int model_file_open_with(ModelFile *file, const char *path, const char *adapters) {
    AdapterConfig adapter;
    char folder[PATH_MAX];
    if (!model_file_find_adapters(folder, adapters))
        return error_set("%.300s: neither adapters (" ADAPTER_CONFIG ") nor a run that has some", adapters);
    if (adapter_read_config(&adapter, folder) || model_file_open(file, path)) return -1;
    if (model_file_add_adapter(file, &adapter, folder) == 0) return 0;
    model_file_close(file);
    return -1;
}

// Finds a tensor and compares its shape and dtype with what the model needs. NULL with an error message.
static inline const SafeTensor *model_file_expect(const ModelFile *file, const char *name, const int64_t *shape,
                                                  int n_dims) {
    const char *path = "";
    const SafeTensor *tensor = model_file_find(file, name, &path);
    char found[192], wanted[64];
    if (tensor == NULL) {
        error_set("%s: tensor %s is missing", path, name);
        return NULL;
    }
    shape_text(found, sizeof found, tensor->shape, tensor->n_dims);
    shape_text(wanted, sizeof wanted, shape, n_dims);
    if (strcmp(found, wanted) != 0) {
        error_set("%s: %s has shape %s, the config asks for %s", path, name, found, wanted);
        return NULL;
    }
    if (tensor->dtype > DTYPE_F16 && tensor->dtype < DTYPE_SAFETENSORS && tensor->scales == NULL) {
        error_set("%s: %s has dtype %s; only F32, BF16 and F16 are read", path, name, dtype_name(tensor->dtype));
        return NULL;
    }
    return tensor;
}

#endif
