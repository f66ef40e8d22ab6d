// Adapters as PEFT keeps them: a folder with adapter_model.safetensors, whose tensors are named after the module they
// stand beside, and adapter_config.json, which says rank, alpha and targets.
//
//   AdapterConfig config;
//   if (adapter_read_config(&config, "runs/1/latest")) ...         // config.lora, config.base
//   if (adapter_write_config(&lora, "llama1b.bin", folder)) ...
#ifndef LLMC_ADAPTER_H
#define LLMC_ADAPTER_H

#include <jansson.h> // adapter_config.json
#include <limits.h>  // PATH_MAX
#include <math.h>    // sqrt
#include <stdio.h>   // snprintf
#include <string.h>  // strcmp

#include "error.h"
#include "file.h"
#include "lora_config.h"
#include "safetensors.h"

#define ADAPTER_WEIGHTS  "adapter_model.safetensors"
#define ADAPTER_CONFIG   "adapter_config.json"
#define ADAPTER_RANK_MAX 65536

typedef struct {
    Lora lora;           // targets: none yet, the weights tell
    char base[PATH_MAX]; // the model it belongs to, as the file calls it; "": not said
} AdapterConfig;

// name = PEFT's name of the A or B of a module in a layer.
static inline void adapter_name(char *name, size_t size, int layer, int module, int is_b) {
    snprintf(name, size, "base_model.model.model.layers.%d.%s.lora_%c.weight", layer, lora_modules[module],
             is_b ? 'B' : 'A');
}

// 1 if a tensor's name is that of one of the adapters in the first n_layers layers.
static inline int adapter_belongs(const char *name, const Lora *lora, int n_layers) {
    char own[128];
    if (strncmp(name, "base_model.", 11) != 0) return 0;
    for (int i = 0; i < 2 * LORA_MODULES * n_layers; i++) {
        int module = i / 2 % LORA_MODULES;
        adapter_name(own, sizeof own, i / (2 * LORA_MODULES), module, i % 2);
        if (lora_has(lora, module) && strcmp(name, own) == 0) return 1;
    }
    return 0;
}

// 1 if a folder holds adapters.
static inline int adapter_is_folder(const char *folder) {
    char path[PATH_MAX];
    return path_join(path, folder, ADAPTER_CONFIG) == 0 && file_exists(path);
}

// The modules that have an adapter in the first layer; every layer must have the same, which the table checks.
static inline unsigned adapter_targets(const SafeTensors *file) {
    unsigned targets = 0;
    char name[128];
    for (int m = 0; m < LORA_MODULES; m++) {
        adapter_name(name, sizeof name, 0, m, 0);
        if (safetensors_find(file, name) != NULL) targets |= 1u << m;
    }
    return targets;
}

// 1 if a value of adapter_config.json changes nothing: absent, off or empty.
static inline int adapter_is_off(const json_t *value) {
    return !json_is_true(value) && json_number_value(value) == 0.0 && json_string_length(value) == 0 &&
           json_array_size(value) == 0 && json_object_size(value) == 0;
}

// -1 if a key asks for what is not plain LoRA: one that is not known here must be off.
static inline int adapter_check_keys(const json_t *json, const char *path) {
    static const char *const harmless[] = {"auto_mapping",
                                           "base_model_name_or_path",
                                           "bias",
                                           "ensure_weight_tying",
                                           "inference_mode",
                                           "lora_alpha",
                                           "lora_dropout",
                                           "megatron_core",
                                           "peft_type",
                                           "peft_version",
                                           "qalora_group_size",
                                           "r",
                                           "revision",
                                           "runtime_config",
                                           "target_modules",
                                           "task_type",
                                           "use_rslora"};
    const char *key;
    const json_t *value;
    const char *bias = json_string_value(json_object_get(json, "bias"));
    if (bias != NULL && strcmp(bias, "none") != 0)
        return error_set("%s: bias is '%.40s'; only adapters without trained biases are read", path, bias);
    // how they began matters only where loading changes the weights beside them
    const json_t *init = json_object_get(json, "init_lora_weights");
    const char *kind = json_string_value(init);
    if (kind != NULL && strcmp(kind, "gaussian") != 0 && strcmp(kind, "orthogonal") != 0 && strcmp(kind, "eva") != 0)
        return error_set("%s: init_lora_weights is '%.40s', which changes the model's own weights", path, kind);
    json_object_foreach((json_t *)json, key, value) {
        int known = adapter_is_off(value) || value == init;
        for (size_t i = 0; i < sizeof harmless / sizeof *harmless && !known; i++) known = strcmp(key, harmless[i]) == 0;
        if (!known) return error_set("%s: %.60s is not supported", path, key);
    }
    return 0;
}

// What a JSON says of rank and alpha; rank-stabilised adapters count alpha / sqrt(rank).
static inline int adapter_from_json(AdapterConfig *config, const json_t *json, const char *path) {
    const char *type = json_string_value(json_object_get(json, "peft_type"));
    const char *base = json_string_value(json_object_get(json, "base_model_name_or_path"));
    const json_t *rank = json_object_get(json, "r"), *alpha = json_object_get(json, "lora_alpha");
    if (type == NULL || strcmp(type, "LORA") != 0)
        return error_set("%s: peft_type is %.40s; only LORA is read", path, type != NULL ? type : "missing");
    if (!json_is_integer(rank) || json_integer_value(rank) < 1 || json_integer_value(rank) > ADAPTER_RANK_MAX)
        return error_set("%s: r is not a rank from 1 to %d", path, ADAPTER_RANK_MAX);
    if (!json_is_number(alpha)) return error_set("%s: lora_alpha is not a number", path);
    if (adapter_check_keys(json, path)) return -1;
    int root = json_is_true(json_object_get(json, "use_rslora"));
    config->lora.rank = (int)json_integer_value(rank);
    double all = json_number_value(alpha) * (root ? sqrt((double)config->lora.rank) : 1.0);
    if (!(all >= 1e-6 && all <= 1e6)) return error_set("%s: lora_alpha is not from 1e-6 to 1e6", path);
    config->lora.alpha = (float)all;
    if (base != NULL && snprintf(config->base, sizeof config->base, "%s", base) >= (int)sizeof config->base)
        return error_set("%s: base_model_name_or_path is too long", path);
    return 0;
}

// Reads a folder's adapter_config.json.
static inline int adapter_read_config(AdapterConfig *config, const char *folder) {
    char path[PATH_MAX];
    FileMap map;
    json_error_t error;
    memset(config, 0, sizeof *config);
    if (path_join(path, folder, ADAPTER_CONFIG) || file_map(&map, path)) return -1;
    json_t *json = json_loadb((const char *)map.data, map.size, JSON_REJECT_DUPLICATES, &error);
    file_unmap(&map);
    int result = json_is_object(json) ? adapter_from_json(config, json, path)
                 : json == NULL       ? error_set("%s: line %d: %s", path, error.line, error.text)
                                      : error_set("%s: not an object", path);
    json_decref(json);
    return result;
}

// Writes a folder's adapter_config.json, so that PEFT reads it. base: the model the adapters belong to.
static inline int adapter_write_config(const Lora *lora, const char *base, const char *folder) {
    char path[PATH_MAX];
    json_t *modules = json_array();
    for (int m = 0; m < LORA_MODULES; m++)
        if (lora_has(lora, m)) json_array_append_new(modules, json_string(strchr(lora_modules[m], '.') + 1));
    json_t *json =
        json_pack("{s:s, s:s, s:s, s:i, s:f, s:f, s:s, s:b, s:b, s:o}", "peft_type", "LORA", "task_type", "CAUSAL_LM",
                  "base_model_name_or_path", base, "r", lora->rank, "lora_alpha", (double)lora->alpha, "lora_dropout",
                  0.0, "bias", "none", "fan_in_fan_out", 0, "inference_mode", 1, "target_modules", modules);
    char *text = json != NULL ? json_dumps(json, JSON_INDENT(2)) : NULL;
    json_decref(json);
    if (text == NULL) return error_set("%s: no memory for " ADAPTER_CONFIG ", or the model's path is no UTF-8", folder);
    int result = path_join(path, folder, ADAPTER_CONFIG);
    if (result == 0) result = file_write_text(path, text);
    free(text);
    return result;
}

#endif
