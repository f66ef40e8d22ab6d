// Families of models: what tells them apart, and which keys of a config.json each of them knows.
//
//   Family family;
//   if (family_of_json(&family, json, where)) ...      // by model_type
//   if (family_check_keys(family, json, where)) ...    // nothing in it that would change the mathematics unseen
//   families[family].qk_norm ...
//
// All are a Llama with these differences. Sources: the model's reports, and the classes of transformers named in
// `architecture`.
//   mistral   a token sees those of a sliding window
//   smollm3   some layers have no RoPE; some may have a sliding window
//   qwen2     q, k and v have biases; some layers may have a sliding window
//   qwen3     each head of q and of k is normalised before RoPE; some layers may have a sliding window
//   olmo      LayerNorm without parameters, eps 1e-5
//   olmo2     q and k are normalised whole before RoPE; what attention and MLP give is normalised, not what they take
#ifndef LLMC_FAMILY_H
#define LLMC_FAMILY_H

#include <jansson.h> // JSON
#include <stdio.h>   // snprintf
#include <stdlib.h>  // free
#include <string.h>  // strcmp

#include "error.h"

typedef enum {
    FAMILY_LLAMA,
    FAMILY_MISTRAL,
    FAMILY_SMOLLM3,
    FAMILY_QWEN2,
    FAMILY_QWEN3,
    FAMILY_OLMO,
    FAMILY_OLMO2,
    FAMILIES
} Family;

typedef enum { QK_NORM_NONE, QK_NORM_HEAD /* each head's HD values */, QK_NORM_ALL /* all heads' together */ } QkNorm;

typedef struct {
    const char *name, *model_type, *architecture;
    int qkv_bias;
    QkNorm qk_norm;
    int plain_norm; // LayerNorm without parameters, not RMSNorm
    int post_norm;  // norms of what attention and MLP give, not of what they take
    int windows;    // layers may have a sliding window
    // what holds where a config does not say
    int tied;
    float norm_eps;
} FamilyTraits;

static const FamilyTraits families[FAMILIES] = {
    {"Llama", "llama", "LlamaForCausalLM", 0, QK_NORM_NONE, 0, 0, 0, 0, 1e-6f},
    {"Mistral", "mistral", "MistralForCausalLM", 0, QK_NORM_NONE, 0, 0, 1, 0, 1e-6f},
    {"SmolLM3", "smollm3", "SmolLM3ForCausalLM", 0, QK_NORM_NONE, 0, 0, 1, 1, 1e-6f},
    {"Qwen2", "qwen2", "Qwen2ForCausalLM", 1, QK_NORM_NONE, 0, 0, 1, 0, 1e-6f},
    {"Qwen3", "qwen3", "Qwen3ForCausalLM", 0, QK_NORM_HEAD, 0, 0, 1, 0, 1e-6f},
    {"OLMo", "olmo", "OlmoForCausalLM", 0, QK_NORM_NONE, 1, 0, 0, 0, 1e-5f},
    {"OLMo 2", "olmo2", "Olmo2ForCausalLM", 0, QK_NORM_ALL, 0, 1, 0, 0, 1e-5f},
};

// The family of a model_type of n characters; FAMILIES if there is none.
static inline Family family_find(const char *model_type, size_t n) {
    int family = 0;
    while (family < FAMILIES &&
           (strlen(families[family].model_type) != n || strncmp(families[family].model_type, model_type, n) != 0))
        family++;
    return (Family)family;
}

// text = the model_types there are: "llama, mistral, ..."
static inline void family_names(char *text, size_t size) {
    size_t used = 0;
    text[0] = '\0';
    for (int i = 0; i < FAMILIES && used < size; i++)
        used += (size_t)snprintf(text + used, size - used, "%s%s", i > 0 ? ", " : "", families[i].model_type);
}

// -1: a model_type of no family, or none.
static inline int family_of_json(Family *family, const json_t *json, const char *where) {
    const char *type = json_string_value(json_object_get(json, "model_type"));
    char names[128];
    *family = type != NULL ? family_find(type, strlen(type)) : FAMILIES;
    if (*family != FAMILIES) return 0;
    family_names(names, sizeof names);
    return error_set("%s: model_type '%.40s' is not supported, only %s", where, type != NULL ? type : "(none)", names);
}

typedef enum {
    KEY_ANY,  // read in config.h, or without effect on what is computed
    KEY_OFF,  // harmless when null, false, 0 or empty
    KEY_NULL, // harmless when null
    KEY_ONE,  // harmless when null or 1
    KEY_FULL  // harmless when null or a list of "full_attention"
} KeyRule;

static const char *const key_rule_texts[] = {"anything", "null, false or 0", "null", "null or 1",
                                             "\"full_attention\" everywhere"};

typedef struct {
    const char *key;
    unsigned families; // bit of each family that it is for
    KeyRule rule;
} FamilyKey;

enum {
    EVERY_FAMILY = (1 << FAMILIES) - 1,
    WINDOW_FAMILIES = 1 << FAMILY_MISTRAL | 1 << FAMILY_SMOLLM3 | 1 << FAMILY_QWEN2 | 1 << FAMILY_QWEN3,
    NO_WINDOW_FAMILIES = EVERY_FAMILY & ~WINDOW_FAMILIES
};

// Keys and the values at which they are harmless. To add one: find out what every class named above does with it.
// clang-format off
static const FamilyKey family_keys[] = {
    // the shape, read in config.h
    {"model_type", EVERY_FAMILY, KEY_ANY}, {"hidden_act", EVERY_FAMILY, KEY_ANY},
    {"num_hidden_layers", EVERY_FAMILY, KEY_ANY}, {"hidden_size", EVERY_FAMILY, KEY_ANY},
    {"num_attention_heads", EVERY_FAMILY, KEY_ANY}, {"num_key_value_heads", EVERY_FAMILY, KEY_ANY},
    {"head_dim", EVERY_FAMILY, KEY_ANY}, {"intermediate_size", EVERY_FAMILY, KEY_ANY},
    {"vocab_size", EVERY_FAMILY, KEY_ANY}, {"max_position_embeddings", EVERY_FAMILY, KEY_ANY},
    {"rms_norm_eps", EVERY_FAMILY & ~(1 << FAMILY_OLMO), KEY_ANY}, {"initializer_range", EVERY_FAMILY, KEY_ANY},
    {"tie_word_embeddings", EVERY_FAMILY, KEY_ANY}, {"rope_theta", EVERY_FAMILY, KEY_ANY},
    {"rope_scaling", EVERY_FAMILY, KEY_ANY}, {"rope_parameters", EVERY_FAMILY, KEY_ANY},
    {"bos_token_id", EVERY_FAMILY, KEY_ANY}, {"eos_token_id", EVERY_FAMILY, KEY_ANY},
    {"no_rope_layers", 1 << FAMILY_SMOLLM3, KEY_ANY}, {"no_rope_layer_interval", 1 << FAMILY_SMOLLM3, KEY_ANY},
    // windows, which a Mistral has without use_sliding_window
    {"sliding_window", WINDOW_FAMILIES, KEY_ANY}, {"sliding_window", NO_WINDOW_FAMILIES, KEY_NULL},
    {"use_sliding_window", WINDOW_FAMILIES & ~(1 << FAMILY_MISTRAL), KEY_ANY},
    {"use_sliding_window", NO_WINDOW_FAMILIES | 1 << FAMILY_MISTRAL, KEY_OFF},
    {"max_window_layers", EVERY_FAMILY, KEY_ANY},
    {"layer_types", WINDOW_FAMILIES, KEY_ANY}, {"layer_types", NO_WINDOW_FAMILIES, KEY_FULL},
    // variants of the layer
    {"attention_bias", EVERY_FAMILY, KEY_OFF}, {"mlp_bias", EVERY_FAMILY, KEY_OFF},
    {"clip_qkv", EVERY_FAMILY, KEY_NULL}, {"partial_rotary_factor", EVERY_FAMILY, KEY_ONE},
    {"rope_interleaved", EVERY_FAMILY, KEY_OFF}, {"use_mrope", EVERY_FAMILY, KEY_OFF}, {"qk_layernorm", EVERY_FAMILY, KEY_OFF},
    {"use_qk_norm", EVERY_FAMILY, KEY_OFF}, {"quantization_config", EVERY_FAMILY, KEY_NULL},
    {"auto_map", EVERY_FAMILY, KEY_NULL}, {"pretraining_tp", EVERY_FAMILY, KEY_ONE},
    {"is_encoder_decoder", EVERY_FAMILY, KEY_OFF}, {"add_cross_attention", EVERY_FAMILY, KEY_OFF},
    {"cross_attention_hidden_size", EVERY_FAMILY, KEY_NULL}, {"tie_encoder_decoder", EVERY_FAMILY, KEY_OFF},
    {"pruned_heads", EVERY_FAMILY, KEY_OFF}, {"chunk_size_feed_forward", EVERY_FAMILY, KEY_OFF},
    // dropout
    {"attention_dropout", EVERY_FAMILY, KEY_OFF}, {"hidden_dropout", EVERY_FAMILY, KEY_OFF},
    {"resid_pdrop", EVERY_FAMILY, KEY_OFF}, {"embd_pdrop", EVERY_FAMILY, KEY_OFF},
    // where it comes from, how it is stored and run
    {"architectures", EVERY_FAMILY, KEY_ANY}, {"torch_dtype", EVERY_FAMILY, KEY_ANY},
    {"dtype", EVERY_FAMILY, KEY_ANY}, {"transformers_version", EVERY_FAMILY, KEY_ANY},
    {"transformers.js_config", EVERY_FAMILY, KEY_ANY}, {"_name_or_path", EVERY_FAMILY, KEY_ANY},
    {"_commit_hash", EVERY_FAMILY, KEY_ANY}, {"_attn_implementation", EVERY_FAMILY, KEY_ANY},
    {"_attn_implementation_autoset", EVERY_FAMILY, KEY_ANY}, {"attn_implementation", EVERY_FAMILY, KEY_ANY},
    {"_flash_attn_2_enabled", EVERY_FAMILY, KEY_ANY}, {"unsloth_version", EVERY_FAMILY, KEY_ANY},
    {"unsloth_fixed", EVERY_FAMILY, KEY_ANY}, {"is_llama_config", EVERY_FAMILY, KEY_ANY},
    {"use_cache", EVERY_FAMILY, KEY_ANY}, {"use_bfloat16", EVERY_FAMILY, KEY_ANY},
    {"torchscript", EVERY_FAMILY, KEY_ANY}, {"return_dict", EVERY_FAMILY, KEY_ANY},
    {"output_attentions", EVERY_FAMILY, KEY_ANY}, {"output_hidden_states", EVERY_FAMILY, KEY_ANY},
    {"is_decoder", EVERY_FAMILY, KEY_ANY}, {"problem_type", EVERY_FAMILY, KEY_ANY},
    {"id2label", EVERY_FAMILY, KEY_ANY}, {"label2id", EVERY_FAMILY, KEY_ANY}, {"num_labels", EVERY_FAMILY, KEY_ANY},
    {"task_specific_params", EVERY_FAMILY, KEY_ANY}, {"finetuning_task", EVERY_FAMILY, KEY_ANY},
    {"tokenizer_class", EVERY_FAMILY, KEY_ANY}, {"prefix", EVERY_FAMILY, KEY_ANY},
    {"max_sequence_length", EVERY_FAMILY, KEY_ANY},
    // other tokens, and how to sample
    {"pad_token_id", EVERY_FAMILY, KEY_ANY}, {"sep_token_id", EVERY_FAMILY, KEY_ANY},
    {"unk_token_id", EVERY_FAMILY, KEY_ANY}, {"decoder_start_token_id", EVERY_FAMILY, KEY_ANY},
    {"do_sample", EVERY_FAMILY, KEY_ANY}, {"temperature", EVERY_FAMILY, KEY_ANY}, {"top_k", EVERY_FAMILY, KEY_ANY},
    {"top_p", EVERY_FAMILY, KEY_ANY}, {"typical_p", EVERY_FAMILY, KEY_ANY}, {"num_beams", EVERY_FAMILY, KEY_ANY},
    {"max_length", EVERY_FAMILY, KEY_ANY}, {"min_length", EVERY_FAMILY, KEY_ANY},
    {"repetition_penalty", EVERY_FAMILY, KEY_ANY}, {"length_penalty", EVERY_FAMILY, KEY_ANY},
};
// clang-format on
enum { FAMILY_KEYS = sizeof family_keys / sizeof *family_keys };

static inline int key_is_off(const json_t *value) {
    if (json_is_number(value)) return json_number_value(value) == 0.0;
    return json_is_null(value) || json_is_false(value) || (json_is_object(value) && json_object_size(value) == 0) ||
           (json_is_array(value) && json_array_size(value) == 0);
}

static inline int key_is_full(const json_t *value) {
    if (!json_is_array(value)) return json_is_null(value);
    for (size_t i = 0; i < json_array_size(value); i++) {
        const char *type = json_string_value(json_array_get(value, i));
        if (type == NULL || strcmp(type, "full_attention") != 0) return 0;
    }
    return 1;
}

static inline int key_is_harmless(KeyRule rule, const json_t *value) {
    switch (rule) {
    case KEY_ANY: return 1;
    case KEY_OFF: return key_is_off(value);
    case KEY_NULL: return json_is_null(value);
    case KEY_ONE: return json_is_null(value) || (json_is_number(value) && json_number_value(value) == 1.0);
    case KEY_FULL: return key_is_full(value);
    }
    return 0;
}

// Refuses a key of no entry, or a value at which its entry is not harmless, by name.
static inline int family_check_key(Family family, const char *key, const json_t *value, const char *where) {
    const FamilyKey *found = NULL;
    for (int i = 0; i < FAMILY_KEYS && found == NULL; i++)
        if (strcmp(family_keys[i].key, key) == 0 && (family_keys[i].families >> family & 1) != 0)
            found = &family_keys[i];
    if (found == NULL)
        return error_set("%s: config key '%.60s' is not known for model_type '%s' and may change the mathematics; take "
                         "it out if it does not",
                         where, key, families[family].model_type);
    if (key_is_harmless(found->rule, value)) return 0;
    char *text = json_dumps(value, JSON_ENCODE_ANY | JSON_COMPACT | JSON_ENSURE_ASCII | JSON_REAL_PRECISION(6));
    error_set("%s: config key '%s' is %.80s, which is not supported, only %s", where, key, text != NULL ? text : "?",
              key_rule_texts[found->rule]);
    free(text);
    return -1;
}

static inline int family_check_keys(Family family, const json_t *json, const char *where) {
    const char *key;
    json_t *value;
    json_object_foreach((json_t *)json, key, value) {
        if (family_check_key(family, key, value, where)) return -1;
    }
    return 0;
}

#endif
