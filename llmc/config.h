// The model's shape: read from a Hugging Face config.json, a preset's name or a short spec, written back as
// config.json.
//
//   Config config;
//   if (config_from_spec(&config, "llama-3.2-1b")) ...                                    // a preset
//   if (config_from_spec(&config, "d=256,layers=8,heads=8,kv=2,ffn=768,vocab=258")) ...   // a short spec
#ifndef LLMC_CONFIG_H
#define LLMC_CONFIG_H

#include <jansson.h> // JSON
#include <math.h>    // fabs
#include <stdint.h>  // fixed-width integers

#include "error.h"
#include "family.h"
#include "file.h" // FileMap
#include "json.h" // json_from_float
#include "lora_config.h"
#include "rope_config.h"

enum { CONFIG_MAX_LAYERS = 4096 };

typedef struct {
    int n_layers;
    int channels; // C, hidden_size
    int heads, kv_heads, head_dim;
    int ffn;
    int vocab;
    int context;
    float norm_eps;
    int tied; // the head is the embedding
    RopeConfig rope;
    int bos_id, eos_id; // -1: none given
    float init_std;
    Family family;
    int window;                                // sliding_window of the layers that have it; 0: none has
    uint32_t no_rope[CONFIG_MAX_LAYERS / 32];  // bit of each layer without RoPE
    uint32_t windowed[CONFIG_MAX_LAYERS / 32]; // bit of each layer with the window
    Lora lora;                                 // rank > 0: adapters are trained and all else is frozen
} Config;

static inline const FamilyTraits *config_traits(const Config *config) {
    return &families[config->family];
}

static inline int64_t config_q_dim(const Config *config) {
    return (int64_t)config->heads * config->head_dim;
}

static inline int64_t config_kv_dim(const Config *config) {
    return (int64_t)config->kv_heads * config->head_dim;
}

static inline int config_has_rope(const Config *config, int layer) {
    return (config->no_rope[layer / 32] >> layer % 32 & 1) == 0;
}

// How many tokens a token of this layer sees at most, itself the last of them; 0: all before it.
static inline int config_window(const Config *config, int layer) {
    return (config->windowed[layer / 32] >> layer % 32 & 1) != 0 ? config->window : 0;
}

// Elements of a layer's seven matrices.
static inline int64_t config_layer_matrices(const Config *config) {
    int64_t C = config->channels;
    return 2 * C * config_q_dim(config) + 2 * C * config_kv_dim(config) + 3 * C * config->ffn;
}

// Values of a layer's adapters.
static inline int64_t config_layer_adapters(const Config *config) {
    return lora_layer_values(&config->lora, config->channels, config_q_dim(config), config_kv_dim(config), config->ffn);
}

// Values of q's norm, and of k's.
static inline int64_t config_q_norm(const Config *config) {
    QkNorm kind = config_traits(config)->qk_norm;
    return kind == QK_NORM_NONE ? 0 : kind == QK_NORM_HEAD ? config->head_dim : config_q_dim(config);
}

static inline int64_t config_k_norm(const Config *config) {
    QkNorm kind = config_traits(config)->qk_norm;
    return kind == QK_NORM_NONE ? 0 : kind == QK_NORM_HEAD ? config->head_dim : config_kv_dim(config);
}

// What is normalised on its own of a row of q and k: their heads, or q and k.
static inline int config_qk_rows(const Config *config) {
    QkNorm kind = config_traits(config)->qk_norm;
    return kind == QK_NORM_NONE ? 0 : kind == QK_NORM_HEAD ? config->heads + config->kv_heads : 2;
}

// Values of a norm of C channels: its weight.
static inline int64_t config_norm(const Config *config) {
    return config_traits(config)->plain_norm ? 0 : config->channels;
}

// Elements of a layer's vectors: norms and biases.
static inline int64_t config_layer_vectors(const Config *config) {
    int64_t bias = config_traits(config)->qkv_bias ? config_q_dim(config) + 2 * config_kv_dim(config) : 0;
    return 2 * config_norm(config) + config_q_norm(config) + config_k_norm(config) + bias;
}

// Parameters, the tied head counted once.
static inline int64_t config_n_params(const Config *config) {
    return config->n_layers * (config_layer_matrices(config) + config_layer_vectors(config)) + config_norm(config) +
           (config->tied ? 1 : 2) * (int64_t)config->channels * config->vocab;
}

// Refuses shapes the program cannot compute; `where` is the file or spec named in the message.
static inline int config_check(const Config *config, const char *where) {
    const struct {
        const char *name;
        int value, max;
    } sizes[] = {{"num_hidden_layers", config->n_layers, CONFIG_MAX_LAYERS},
                 {"hidden_size", config->channels, 1 << 20},
                 {"num_attention_heads", config->heads, 1 << 14},
                 {"num_key_value_heads", config->kv_heads, 1 << 14},
                 {"head_dim", config->head_dim, 1 << 12},
                 {"intermediate_size", config->ffn, 1 << 22},
                 {"vocab_size", config->vocab, 1 << 24},
                 {"max_position_embeddings", config->context, 1 << 24}};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        if (sizes[i].value < 1 || sizes[i].value > sizes[i].max)
            return error_set("%s: %s is %d, it must be 1 to %d", where, sizes[i].name, sizes[i].value, sizes[i].max);
    if (config->heads % config->kv_heads != 0)
        return error_set("%s: num_attention_heads %d is not a multiple of num_key_value_heads %d", where, config->heads,
                         config->kv_heads);
    if (config->head_dim % 2 != 0)
        return error_set("%s: head_dim %d is odd, RoPE pairs dimensions", where, config->head_dim);
    if (!(config->norm_eps > 0.0f && config->norm_eps < 1.0f))
        return error_set("%s: rms_norm_eps %g", where, (double)config->norm_eps);
    if (!(config->rope.theta > 1.0f && config->rope.theta < 1e12f))
        return error_set("%s: rope_theta %g", where, (double)config->rope.theta);
    if (!(config->init_std > 0.0f && config->init_std <= 10.0f))
        return error_set("%s: initializer_range %g", where, (double)config->init_std);
    if (config->rope.scaled &&
        !(config->rope.factor >= 1.0f && config->rope.factor < 1e6f && config->rope.high_freq_factor < 1e6f &&
          config->rope.low_freq_factor > 0.0f && config->rope.high_freq_factor > config->rope.low_freq_factor &&
          config->rope.original_context > 0))
        return error_set("%s: llama3 RoPE scaling with impossible factors", where);
    if (config->window < 0) return error_set("%s: sliding_window is %d", where, config->window);
    if (config->bos_id >= config->vocab || config->eos_id >= config->vocab)
        return error_set("%s: a special token id is beyond the vocabulary of %d", where, config->vocab);
    return 0;
}

// *out = an integer field. Absent or null: fallback, unless that is INT_MIN, which makes the field required.
static inline int config_int(int *out, const json_t *json, const char *key, int fallback, const char *where) {
    const json_t *value = json_object_get(json, key);
    if (value == NULL || json_is_null(value)) {
        if (fallback == INT_MIN) return error_set("%s: %s is missing", where, key);
        *out = fallback;
        return 0;
    }
    if (!json_is_integer(value) || json_integer_value(value) < INT_MIN || json_integer_value(value) > INT_MAX)
        return error_set("%s: %s is not a whole number", where, key);
    *out = (int)json_integer_value(value);
    return 0;
}

static inline int config_float(float *out, const json_t *json, const char *key, float fallback, const char *where) {
    const json_t *value = json_object_get(json, key);
    *out = fallback;
    if (value == NULL || json_is_null(value)) return 0;
    if (!json_is_number(value)) return error_set("%s: %s is not a number", where, key);
    *out = (float)json_number_value(value);
    return 0;
}

// A special token's id; configs give a number or a list, of which the first is taken.
static inline int config_token(int *out, const json_t *json, const char *key, const char *where) {
    const json_t *value = json_object_get(json, key);
    json_t *single;
    if (!json_is_array(value)) return config_int(out, json, key, -1, where);
    single = json_pack("{s:O}", key, json_array_get(value, 0));
    int result =
        single == NULL ? error_set("%s: %s is an empty list", where, key) : config_int(out, single, key, -1, where);
    json_decref(single);
    return result;
}

// *out = a truth value. Absent or null: fallback.
static inline int config_flag(int *out, const json_t *json, const char *key, int fallback, const char *where) {
    const json_t *value = json_object_get(json, key);
    *out = json_is_boolean(value) ? json_is_true(value) : fallback;
    if (value == NULL || json_is_null(value) || json_is_boolean(value)) return 0;
    return error_set("%s: %s is neither true nor false", where, key);
}

// Keys of rope_parameters or rope_scaling; what else there is would change the mathematics.
static inline int config_rope_keys(const json_t *fields, const char *where) {
    static const char *const known[] = {"rope_theta",
                                        "rope_type",
                                        "type",
                                        "factor",
                                        "low_freq_factor",
                                        "high_freq_factor",
                                        "original_max_position_embeddings"};
    const char *key;
    json_t *value;
    json_object_foreach((json_t *)fields, key, value) {
        size_t i = 0, n = sizeof known / sizeof *known;
        while (i < n && strcmp(known[i], key) != 0) i++;
        int whole = strcmp(key, "partial_rotary_factor") == 0 && key_is_harmless(KEY_ONE, value);
        if (i == n && !whole)
            return error_set("%s: RoPE's config key '%.60s' is not known and may change the mathematics", where, key);
    }
    return 0;
}

// Both spellings: rope_parameters {rope_theta, rope_type, ...} and rope_theta with rope_scaling. Llama 1 and 2 leave
// theta out.
static inline int config_rope(RopeConfig *rope, Family family, const json_t *json, const char *where) {
    const json_t *fields = json_object_get(json, "rope_parameters");
    const json_t *holder = json_is_object(fields) ? fields : json;
    memset(rope, 0, sizeof *rope);
    if (config_float(&rope->theta, json, "rope_theta", family == FAMILY_LLAMA ? 10000.0f : 0.0f, where)) return -1;
    if (config_float(&rope->theta, holder, "rope_theta", rope->theta, where)) return -1;
    if (rope->theta == 0.0f) return error_set("%s: rope_theta is missing", where);
    if (!json_is_object(fields)) fields = json_object_get(json, "rope_scaling");
    if (!json_is_object(fields)) return 0;
    if (config_rope_keys(fields, where)) return -1;
    const char *type = json_string_value(json_object_get(fields, "rope_type"));
    if (type == NULL) type = json_string_value(json_object_get(fields, "type"));
    if (type == NULL && json_object_get(fields, "factor") != NULL)
        return error_set("%s: RoPE scaling without a rope_type", where);
    if (type == NULL || strcmp(type, "default") == 0) return 0;
    if (strcmp(type, "llama3") != 0) return error_set("%s: RoPE type '%.40s' is not supported", where, type);
    rope->scaled = 1;
    if (config_float(&rope->factor, fields, "factor", 0.0f, where) ||
        config_float(&rope->low_freq_factor, fields, "low_freq_factor", 0.0f, where) ||
        config_float(&rope->high_freq_factor, fields, "high_freq_factor", 0.0f, where))
        return -1;
    return config_int(&rope->original_context, fields, "original_max_position_embeddings", INT_MIN, where);
}

// Sets the layers without RoPE: every `interval`-th.
static inline void config_skip_rope(Config *config, int interval) {
    memset(config->no_rope, 0, sizeof config->no_rope);
    for (int l = interval - 1; l < config->n_layers && l < CONFIG_MAX_LAYERS; l += interval)
        config->no_rope[l / 32] |= 1u << l % 32;
}

enum { SMOLLM3_INTERVAL = 4 };

// The layers without RoPE as SmolLM3's config lists them: no_rope_layers has a 1 for each layer with RoPE, 0 without.
static inline int config_no_rope(Config *config, const json_t *json, const char *where) {
    const json_t *layers = json_object_get(json, "no_rope_layers");
    int interval = 0;
    if (config_int(&interval, json, "no_rope_layer_interval", SMOLLM3_INTERVAL, where)) return -1;
    if (interval < 1) return error_set("%s: no_rope_layer_interval is %d", where, interval);
    config_skip_rope(config, interval);
    if (layers == NULL || json_is_null(layers)) return 0;
    if (!json_is_array(layers) || json_array_size(layers) < (size_t)config->n_layers)
        return error_set("%s: no_rope_layers does not list %d layers", where, config->n_layers);
    memset(config->no_rope, 0, sizeof config->no_rope);
    for (int l = 0; l < config->n_layers; l++) {
        const json_t *value = json_array_get(layers, (size_t)l);
        if (!json_is_integer(value) || (json_integer_value(value) & ~(json_int_t)1) != 0)
            return error_set("%s: no_rope_layers has something else than 0 or 1 for layer %d", where, l);
        if (json_integer_value(value) == 0) config->no_rope[l / 32] |= 1u << l % 32;
    }
    return 0;
}

// Gives the window to the layers that have it where a config lists none: all of a Mistral, those without RoPE of a
// SmolLM3, those from `first` on of a Qwen.
static inline void config_place_window(Config *config, int first) {
    memset(config->windowed, 0, sizeof config->windowed);
    for (int l = config->family == FAMILY_MISTRAL ? 0 : first; l < config->n_layers && config->window > 0; l++)
        if (config->family != FAMILY_SMOLLM3 || !config_has_rope(config, l)) config->windowed[l / 32] |= 1u << l % 32;
}

// Gives the window to the layers that layer_types lists.
static inline int config_layer_types(Config *config, const json_t *types, const char *where) {
    if (!json_is_array(types) || json_array_size(types) != (size_t)config->n_layers)
        return error_set("%s: layer_types does not list %d layers", where, config->n_layers);
    memset(config->windowed, 0, sizeof config->windowed);
    for (int l = 0; l < config->n_layers; l++) {
        const char *type = json_string_value(json_array_get(types, (size_t)l));
        int slides = type != NULL && strcmp(type, "sliding_attention") == 0;
        if (!slides && (type == NULL || strcmp(type, "full_attention") != 0))
            return error_set("%s: layer_types has '%.40s' for layer %d, which is not supported, only full_attention "
                             "and sliding_attention",
                             where, type != NULL ? type : "(no text)", l);
        if (slides && config->window == 0)
            return error_set("%s: layer_types has sliding_attention for layer %d, but no sliding_window is in use",
                             where, l);
        if (config->family == FAMILY_MISTRAL && slides != (config->window > 0))
            return error_set("%s: layer_types has %s for layer %d; a Mistral has its sliding_window in all layers or "
                             "in none",
                             where, type, l);
        if (slides) config->windowed[l / 32] |= 1u << l % 32;
    }
    return 0;
}

// The window and its layers, as transformers reads them; what a config leaves out is what its classes have.
static inline int config_windows(Config *config, const json_t *json, const char *where) {
    const json_t *size = json_object_get(json, "sliding_window"), *types = json_object_get(json, "layer_types");
    int used = 1, first = 0, family = config->family,
        fallback = family == FAMILY_SMOLLM3 || json_is_null(size) ? 0 : 4096;
    if (family != FAMILY_MISTRAL && config_flag(&used, json, "use_sliding_window", 0, where)) return -1;
    if (used && config_int(&config->window, json, "sliding_window", fallback, where)) return -1;
    if (used && config->window < 1 && size != NULL && !json_is_null(size))
        return error_set("%s: sliding_window is %d", where, config->window);
    if ((family == FAMILY_QWEN2 || family == FAMILY_QWEN3) && config_int(&first, json, "max_window_layers", 28, where))
        return -1;
    config_place_window(config, first > 0 ? first : 0);
    if (types != NULL && !json_is_null(types) && config_layer_types(config, types, where)) return -1;
    int windows = 0;
    for (int l = 0; l < config->n_layers; l++) windows += config_window(config, l) > 0;
    if (windows == 0) config->window = 0;
    return 0;
}

// What only some families' configs have.
static inline int config_specials(Config *config, const json_t *json, const char *where) {
    if (config->family == FAMILY_SMOLLM3 && config_no_rope(config, json, where)) return -1;
    return config_traits(config)->windows ? config_windows(config, json, where) : 0;
}

// Reads a parsed config.json of one of the families; what would change the mathematics is refused by name. Where
// transformers' own default is a certain model's size, a config that leaves it out is refused.
static inline int config_from_json(Config *config, const json_t *json, const char *where) {
    const char *act = json_string_value(json_object_get(json, "hidden_act"));
    Family family;
    if (!json_is_object(json)) return error_set("%s: not a JSON object", where);
    if (family_of_json(&family, json, where) || family_check_keys(family, json, where)) return -1;
    if (act != NULL && strcmp(act, "silu") != 0)
        return error_set("%s: hidden_act '%.40s' is not supported, only 'silu'", where, act);
    memset(config, 0, sizeof *config);
    config->family = family;
    int sized =
        family == FAMILY_MISTRAL || family == FAMILY_SMOLLM3 || family == FAMILY_QWEN2 || family == FAMILY_QWEN3;
    if (config_int(&config->n_layers, json, "num_hidden_layers", INT_MIN, where) ||
        config_int(&config->channels, json, "hidden_size", INT_MIN, where) ||
        config_int(&config->heads, json, "num_attention_heads", INT_MIN, where))
        return -1;
    int head_dim = config->heads > 0 && config->channels % config->heads == 0 ? config->channels / config->heads : 0;
    if (config_int(&config->kv_heads, json, "num_key_value_heads", sized ? INT_MIN : config->heads, where) ||
        config_int(&config->head_dim, json, "head_dim", family == FAMILY_QWEN3 ? INT_MIN : head_dim, where) ||
        config_int(&config->ffn, json, "intermediate_size", INT_MIN, where) ||
        config_int(&config->vocab, json, "vocab_size", INT_MIN, where) ||
        config_int(&config->context, json, "max_position_embeddings", sized ? INT_MIN : 2048, where) ||
        config_float(&config->norm_eps, json, "rms_norm_eps", families[family].norm_eps, where) ||
        config_float(&config->init_std, json, "initializer_range", 0.02f, where) ||
        config_flag(&config->tied, json, "tie_word_embeddings", families[family].tied, where) ||
        config_token(&config->bos_id, json, "bos_token_id", where) ||
        config_token(&config->eos_id, json, "eos_token_id", where) || config_rope(&config->rope, family, json, where) ||
        config_check(config, where))
        return -1;
    return config_specials(config, json, where);
}

// A list of 1 for each layer with RoPE and 0 for each without.
static inline json_t *config_rope_layers(const Config *config) {
    json_t *layers = json_array();
    for (int l = 0; l < config->n_layers; l++) json_array_append_new(layers, json_integer(config_has_rope(config, l)));
    return layers;
}

// Adds the window, and in families where each layer may have it or not, which do.
static inline void config_window_json(json_t *json, const Config *config) {
    int first = 0;
    if (config->family == FAMILY_MISTRAL)
        json_object_set_new(json, "sliding_window", config->window > 0 ? json_integer(config->window) : json_null());
    if (config->family == FAMILY_MISTRAL || config->window == 0) return;
    json_t *types = json_array();
    for (int l = 0; l < config->n_layers; l++)
        json_array_append_new(types,
                              json_string(config_window(config, l) > 0 ? "sliding_attention" : "full_attention"));
    json_object_set_new(json, "use_sliding_window", json_true());
    json_object_set_new(json, "sliding_window", json_integer(config->window));
    json_object_set_new(json, "layer_types", types);
    if (config->family == FAMILY_SMOLLM3) return;
    while (first < config->n_layers && config_window(config, first) == 0) first++;
    json_object_set_new(json, "max_window_layers", json_integer(first)); // older classes know no layer_types
}

// Adds what only the family's configs have, and takes out what they do not have.
static inline void config_family_json(json_t *json, const Config *config) {
    if (config->family != FAMILY_LLAMA)
        json_object_set_new(json, "pad_token_id", json_null());                   // else theirs is a size's
    if (config_traits(config)->qkv_bias) json_object_del(json, "attention_bias"); // theirs is not of o
    if (config->family == FAMILY_OLMO) json_object_del(json, "rms_norm_eps");     // it is fixed
    config_window_json(json, config);
    if (config->family == FAMILY_SMOLLM3) json_object_set_new(json, "no_rope_layers", config_rope_layers(config));
}

// The config.json that transformers reads; a new reference, NULL when out of memory.
static inline json_t *config_to_json(const Config *config, const char *dtype) {
    const FamilyTraits *family = config_traits(config);
    json_t *rope = NULL, *token = NULL;
    if (config->rope.scaled)
        rope = json_pack("{s:s, s:o, s:o, s:o, s:i}", "rope_type", "llama3", "factor",
                         json_from_float(config->rope.factor), "low_freq_factor",
                         json_from_float(config->rope.low_freq_factor), "high_freq_factor",
                         json_from_float(config->rope.high_freq_factor), "original_max_position_embeddings",
                         config->rope.original_context);
    json_t *json = json_pack(
        "{s:[s], s:s, s:s, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:o, s:o, s:o, s:b, s:b, s:b, s:s, s:o?}",
        "architectures", family->architecture, "model_type", family->model_type, "hidden_act", "silu",
        "num_hidden_layers", config->n_layers, "hidden_size", config->channels, "num_attention_heads", config->heads,
        "num_key_value_heads", config->kv_heads, "head_dim", config->head_dim, "intermediate_size", config->ffn,
        "vocab_size", config->vocab, "max_position_embeddings", config->context, "rms_norm_eps",
        json_from_float(config->norm_eps), "initializer_range", json_from_float(config->init_std), "rope_theta",
        json_from_float(config->rope.theta), "tie_word_embeddings", config->tied, "attention_bias", 0, "mlp_bias", 0,
        "torch_dtype", dtype, "rope_scaling", rope);
    if (json == NULL) return NULL;
    token = config->bos_id >= 0 ? json_integer(config->bos_id) : json_null();
    json_object_set_new(json, "bos_token_id", token);
    token = config->eos_id >= 0 ? json_integer(config->eos_id) : json_null();
    json_object_set_new(json, "eos_token_id", token);
    config_family_json(json, config);
    return json;
}

// Reads a config.json file.
static inline int config_from_file(Config *config, const char *path) {
    FileMap map;
    json_error_t error;
    if (file_map(&map, path)) return -1;
    json_t *json = json_loadb((const char *)map.data, map.size, JSON_REJECT_DUPLICATES, &error);
    file_unmap(&map);
    if (json == NULL) return error_set("%s: line %d: %s", path, error.line, error.text);
    int result = config_from_json(config, json, path);
    json_decref(json);
    return result;
}

// Public shapes, by the names people know. tiny is for tests and first steps.
static const struct {
    const char *name;
    Config config;
} config_presets[] = {
    // clang-format off
    // layers, d, heads, kv, head-dim, ffn, vocab, ctx, eps, tied, RoPE, begin, end, std, family, window, layers without RoPE, layers with the window, adapters
    {"tiny", {2, 64, 4, 2, 16, 176, 258, 256, 1e-5f, 0, {10000.0f, 0, 0, 0, 0, 0}, 256, 257, 0.02f, FAMILY_LLAMA, 0, {0}, {0}, {0, 0, 0}}},
    {"124m", {12, 768, 12, 12, 64, 2048, 32000, 1024, 1e-5f, 0, {10000.0f, 0, 0, 0, 0, 0}, 1, 2, 0.02f, FAMILY_LLAMA, 0, {0}, {0}, {0, 0, 0}}},
    {"tinyllama-1.1b", {22, 2048, 32, 4, 64, 5632, 32000, 2048, 1e-5f, 0, {10000.0f, 0, 0, 0, 0, 0}, 1, 2, 0.02f, FAMILY_LLAMA, 0, {0}, {0}, {0, 0, 0}}},
    {"llama-3.2-1b", {16, 2048, 32, 8, 64, 8192, 128256, 131072, 1e-5f, 1, {500000.0f, 1, 32, 1, 4, 8192}, 128000, 128001, 0.02f, FAMILY_LLAMA, 0, {0}, {0}, {0, 0, 0}}},
    {"llama-3.2-3b", {28, 3072, 24, 8, 128, 8192, 128256, 131072, 1e-5f, 1, {500000.0f, 1, 32, 1, 4, 8192}, 128000, 128001, 0.02f, FAMILY_LLAMA, 0, {0}, {0}, {0, 0, 0}}},
    {"llama-3-8b", {32, 4096, 32, 8, 128, 14336, 128256, 8192, 1e-5f, 0, {500000.0f, 0, 0, 0, 0, 0}, 128000, 128001, 0.02f, FAMILY_LLAMA, 0, {0}, {0}, {0, 0, 0}}},
    {"smollm2-135m", {30, 576, 9, 3, 64, 1536, 49152, 8192, 1e-5f, 1, {100000.0f, 0, 0, 0, 0, 0}, 0, 0, 0.041666f, FAMILY_LLAMA, 0, {0}, {0}, {0, 0, 0}}},
    {"smollm2-360m", {32, 960, 15, 5, 64, 2560, 49152, 8192, 1e-5f, 1, {100000.0f, 0, 0, 0, 0, 0}, 0, 0, 0.02f, FAMILY_LLAMA, 0, {0}, {0}, {0, 0, 0}}},
    {"smollm2-1.7b", {24, 2048, 32, 32, 64, 8192, 49152, 8192, 1e-5f, 1, {130000.0f, 0, 0, 0, 0, 0}, 0, 0, 0.02f, FAMILY_LLAMA, 0, {0}, {0}, {0, 0, 0}}},
    {"mistral-7b", {32, 4096, 32, 8, 128, 14336, 32000, 32768, 1e-5f, 0, {10000.0f, 0, 0, 0, 0, 0}, 1, 2, 0.02f, FAMILY_MISTRAL, 4096, {0}, {0xFFFFFFFF}, {0, 0, 0}}},
    {"smollm3-3b", {36, 2048, 16, 4, 128, 11008, 128256, 65536, 1e-6f, 1, {5000000.0f, 0, 0, 0, 0, 0}, 128000, 128001, 0.02f, FAMILY_SMOLLM3, 0, {0x88888888, 0x8}, {0}, {0, 0, 0}}},
    {"qwen2.5-0.5b", {24, 896, 14, 2, 64, 4864, 151936, 32768, 1e-6f, 1, {1000000.0f, 0, 0, 0, 0, 0}, 151643, 151643, 0.02f, FAMILY_QWEN2, 0, {0}, {0}, {0, 0, 0}}},
    {"qwen3-0.6b", {28, 1024, 16, 8, 128, 3072, 151936, 40960, 1e-6f, 1, {1000000.0f, 0, 0, 0, 0, 0}, 151643, 151645, 0.02f, FAMILY_QWEN3, 0, {0}, {0}, {0, 0, 0}}},
    {"olmo-7b", {32, 4096, 32, 32, 128, 11008, 50304, 2048, 1e-5f, 0, {10000.0f, 0, 0, 0, 0, 0}, -1, 50279, 0.02f, FAMILY_OLMO, 0, {0}, {0}, {0, 0, 0}}},
    {"olmo-2-7b", {32, 4096, 32, 32, 128, 11008, 100352, 4096, 1e-6f, 0, {500000.0f, 0, 0, 0, 0, 0}, 100257, 100257, 0.02f, FAMILY_OLMO2, 0, {0}, {0}, {0, 0, 0}}},
    // clang-format on
};
enum { CONFIG_PRESETS = sizeof config_presets / sizeof *config_presets };

#define CONFIG_KEYS "family layers d heads kv head-dim ffn vocab ctx window theta eps tied"

// family=NAME of a spec: *end is what follows it.
static inline int config_family_pair(Config *config, const char *name, char **end, const char *spec) {
    char names[128];
    size_t n = strcspn(name, ",");
    config->family = family_find(name, n);
    *end = (char *)name + n;
    if (config->family != FAMILIES) return 0;
    family_names(names, sizeof names);
    return error_set("--init %.100s: no family '%.*s' (%s)", spec, (int)(n < 40 ? n : 40), name, names);
}

// key=value,... over the tiny preset: CONFIG_KEYS.
static inline int config_from_pairs(Config *config, const char *spec) {
    int head_dim_given = 0, kv_given = 0;
    const char *at = spec;
    *config = config_presets[0].config;
    while (*at != '\0') {
        char key[16], *end;
        int consumed = 0;
        if (sscanf(at, "%15[a-z-]=%n", key, &consumed) != 1 || consumed == 0)
            return error_set("--init %.100s: '%.30s' is not key=value", spec, at);
        int is_family = strcmp(key, "family") == 0;
        if (is_family && config_family_pair(config, at + consumed, &end, spec)) return -1;
        double value = is_family ? 0.0 : strtod(at + consumed, &end);
        if (end == at + consumed || (*end != ',' && *end != '\0'))
            return error_set("--init %.100s: %s needs a number", spec, key);
        const struct {
            const char *name;
            int *field;
        } fields[] = {{"layers", &config->n_layers}, {"d", &config->channels},  {"heads", &config->heads},
                      {"kv", &config->kv_heads},     {"ffn", &config->ffn},     {"head-dim", &config->head_dim},
                      {"vocab", &config->vocab},     {"ctx", &config->context}, {"tied", &config->tied},
                      {"window", &config->window}};
        int known = is_family;
        for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) {
            if (strcmp(key, fields[i].name) != 0) continue;
            if (!(fabs(value) < 1e9) || value != (double)(int)value)
                return error_set("--init %.100s: %s needs a whole number", spec, key);
            *fields[i].field = (int)value;
            known = 1;
        }
        if (strcmp(key, "theta") == 0) config->rope.theta = (float)value, known = 1;
        if (strcmp(key, "eps") == 0) config->norm_eps = (float)value, known = 1;
        if (!known) return error_set("--init %.100s: unknown key '%s' (" CONFIG_KEYS ")", spec, key);
        head_dim_given |= strcmp(key, "head-dim") == 0;
        kv_given |= strcmp(key, "kv") == 0;
        at = *end == ',' ? end + 1 : end;
    }
    if (!kv_given) config->kv_heads = config->heads;
    if (!head_dim_given && config->heads > 0) config->head_dim = config->channels / config->heads;
    if (config->family == FAMILY_SMOLLM3) config_skip_rope(config, SMOLLM3_INTERVAL);
    if (config->vocab != 258) config->bos_id = config->eos_id = -1;
    if (config->window != 0 && !config_traits(config)->windows)
        return error_set("--init %.100s: a %s has no window", spec, config_traits(config)->name);
    if (config_check(config, spec)) return -1;
    config_place_window(config, 0);
    return 0;
}

// A preset's name, a config.json file or a short spec.
static inline int config_from_spec(Config *config, const char *spec) {
    for (int i = 0; i < CONFIG_PRESETS; i++) {
        if (strcmp(config_presets[i].name, spec) != 0) continue;
        *config = config_presets[i].config;
        return 0;
    }
    if (strchr(spec, '=') != NULL && !file_exists(spec)) return config_from_pairs(config, spec);
    if (file_exists(spec)) return config_from_file(config, spec);
    char names[512] = "";
    for (int i = 0; i < CONFIG_PRESETS; i++) {
        size_t n = strlen(names);
        snprintf(names + n, sizeof names - n, " %s", config_presets[i].name);
    }
    return error_set("--init %.100s: no such preset (%s ), file, or key=value spec", spec, names);
}

#endif
