// What a GGUF file says about a model, in the words of Hugging Face, and the other way round: names of tensors, and the
// config.json that its metadata amount to. What the file says and config_from_json does not support is refused there,
// by the name of what differs.
//
// llama.cpp rotates pairs (2i, 2i+1) in some architectures and (i, i + HD/2) in others. Files of the first kind have
// the rows of Q and K in that order; they are read half-split (SafeTensor.interleaved), and written interleaved.
#ifndef LLMC_GGUF_MODEL_H
#define LLMC_GGUF_MODEL_H

#include <jansson.h> // metadata, config
#include <math.h>    // fabs

#include "config.h"
#include "error.h"
#include "gguf.h"
#include "rope_config.h" // rope_inv_freq
#include "safetensors.h"

// Architectures whose config can be said in Hugging Face's words. The first of an architecture is the one that is read.
static const struct {
    const char *arch, *model_type;
    int interleaved;
} gguf_families[] = {{"llama", "llama", 1}, {"llama", "mistral", 1}, {"qwen2", "qwen2", 0},    {"qwen3", "qwen3", 0},
                     {"olmo", "olmo", 1},   {"olmo2", "olmo2", 0},   {"smollm3", "smollm3", 1}};
enum { GGUF_FAMILIES = sizeof gguf_families / sizeof *gguf_families };

// The family of an architecture or of a model_type (the other NULL); -1: none.
static inline int gguf_family(const char *arch, const char *model_type) {
    for (int i = 0; i < GGUF_FAMILIES; i++) {
        if (arch != NULL && strcmp(gguf_families[i].arch, arch) == 0) return i;
        if (model_type != NULL && strcmp(gguf_families[i].model_type, model_type) == 0) return i;
    }
    return -1;
}

// Names without .weight or .bias; of a layer, what follows blk.N. and model.layers.N. The two norms after a part are
// those of models that have none before it.
static const struct {
    const char *gguf, *hf;
    int layer, post_norm; // post_norm: only with them
} gguf_names[] = {
    {"token_embd", "model.embed_tokens", 0, 0},
    {"output_norm", "model.norm", 0, 0},
    {"output", "lm_head", 0, 0},
    {"attn_norm", "input_layernorm", 1, 0},
    {"attn_q", "self_attn.q_proj", 1, 0},
    {"attn_k", "self_attn.k_proj", 1, 0},
    {"attn_v", "self_attn.v_proj", 1, 0},
    {"attn_output", "self_attn.o_proj", 1, 0},
    {"attn_q_norm", "self_attn.q_norm", 1, 0},
    {"attn_k_norm", "self_attn.k_norm", 1, 0},
    {"post_attention_norm", "post_attention_layernorm", 1, 1},
    {"post_ffw_norm", "post_feedforward_layernorm", 1, 1},
    {"ffn_norm", "post_attention_layernorm", 1, 0},
    {"ffn_gate", "mlp.gate_proj", 1, 0},
    {"ffn_up", "mlp.up_proj", 1, 0},
    {"ffn_down", "mlp.down_proj", 1, 0},
};
enum { GGUF_NAMES = sizeof gguf_names / sizeof *gguf_names };

// *stem (length) = a name without its layer and its .weight or .bias, *layer its layer or -1; returns the suffix, NULL
// if it has none. prefix: "blk." or "model.layers."
static inline const char *gguf_split(const char *name, const char *prefix, const char **stem, int *length, int *layer) {
    int used = 0;
    const char *suffix = ends_with(name, ".weight") ? ".weight" : ends_with(name, ".bias") ? ".bias" : NULL;
    *stem = name, *layer = -1;
    if (suffix == NULL) return NULL;
    const char *number = name + (strncmp(name, prefix, strlen(prefix)) == 0 ? strlen(prefix) : 0);
    if (number != name && *number >= '0' && *number <= '9' && sscanf(number, "%5d.%n", layer, &used) == 1 && used > 0)
        *stem = number + used;
    *length = (int)(strlen(*stem) - strlen(suffix));
    return *length > 0 ? suffix : NULL;
}

// out (size) = the Hugging Face name of a GGUF tensor, or the GGUF name of a Hugging Face one. 0, or -1 if there is
// none: out is the name as it was.
static inline int gguf_rename(char *out, size_t size, const char *name, int to_hf, int post_norm) {
    const char *stem, *from = to_hf ? "blk." : "model.layers.", *to = to_hf ? "model.layers." : "blk.";
    int length, layer;
    const char *suffix = gguf_split(name, from, &stem, &length, &layer);
    snprintf(out, size, "%s", name);
    for (int i = 0; i < GGUF_NAMES && suffix != NULL; i++) {
        const char *have = to_hf ? gguf_names[i].gguf : gguf_names[i].hf,
                   *want = to_hf ? gguf_names[i].hf : gguf_names[i].gguf;
        if (gguf_names[i].layer != (layer >= 0) || (gguf_names[i].post_norm && !post_norm)) continue;
        if ((int)strlen(have) != length || strncmp(have, stem, (size_t)length) != 0) continue;
        if (layer >= 0)
            snprintf(out, size, "%s%d.%s%s", to, layer, want, suffix);
        else
            snprintf(out, size, "%s%s", want, suffix);
        return 0;
    }
    return -1;
}

// 1 for the Hugging Face names of what RoPE rotates.
static inline int gguf_is_rotated(const char *name) {
    return strstr(name, ".self_attn.q_proj.") != NULL || strstr(name, ".self_attn.k_proj.") != NULL;
}

// ---------------------------------------------------------------------------------------------------------------------
// Reading

// The architecture's metadatum "key", NULL if it is not there.
static inline const json_t *gguf_get(const json_t *metadata, const char *arch, const char *key) {
    char full[GGUF_MAX_NAME + 1];
    snprintf(full, sizeof full, "%s.%s", arch, key);
    return json_object_get(metadata, full);
}

// Metadata of an architecture and what they are called in a config.json; "" for what is looked at otherwise or changes
// nothing.
static const struct {
    const char *gguf, *hf;
} gguf_keys[] = {
    {"block_count", "num_hidden_layers"},
    {"embedding_length", "hidden_size"},
    {"feed_forward_length", "intermediate_size"},
    {"attention.head_count", "num_attention_heads"},
    {"attention.head_count_kv", "num_key_value_heads"},
    {"attention.key_length", "head_dim"},
    {"attention.layer_norm_rms_epsilon", "rms_norm_eps"},
    {"attention.clamp_kqv", "clip_qkv"},
    {"context_length", "max_position_embeddings"},
    {"rope.freq_base", "rope_theta"},
    {"attention.value_length", ""},
    {"attention.layer_norm_epsilon", ""},
    {"attention.sliding_window", ""},
    {"expert_count", ""},
    {"expert_used_count", ""},
    {"rope.dimension_count", ""},
    {"rope.scaling.type", ""},
    {"rope.scaling.factor", ""},
    {"rope.scaling.finetuned", ""},
    {"rope.scaling.original_context_length", ""},
    {"rope.scaling.low_freq_factor", ""},
    {"rope.scaling.high_freq_factor", ""},
    {"tensor_data_layout", ""},
    {"vocab_size", ""},
};
enum { GGUF_KEYS = sizeof gguf_keys / sizeof *gguf_keys };

// A value for the config: as it is, or the one that all elements of a list (one a layer) have. NULL: they differ.
static inline const json_t *gguf_same(const json_t *value) {
    size_t index;
    json_t *element;
    if (!json_is_array(value)) return value;
    json_array_foreach((json_t *)value, index, element) {
        if (!json_equal(element, json_array_get(value, 0))) return NULL;
    }
    return json_array_get(value, 0);
}

// Every metadatum of the architecture is known here, and those with a name in config.json go there.
static inline int gguf_config_keys(json_t *config, const json_t *metadata, const char *arch, const char *where) {
    const char *key;
    json_t *value;
    size_t prefix = strlen(arch);
    json_object_foreach((json_t *)metadata, key, value) {
        int k = 0;
        if (strncmp(key, arch, prefix) != 0 || key[prefix] != '.') continue;
        while (k < GGUF_KEYS && strcmp(gguf_keys[k].gguf, key + prefix + 1) != 0) k++;
        if (k == GGUF_KEYS) return error_set("%s: %s is not known and may change what is computed", where, key);
        if (gguf_keys[k].hf[0] == '\0') continue;
        const json_t *same = gguf_same(value);
        if (same == NULL) return error_set("%s: %s differs from layer to layer, which is not supported", where, key);
        json_object_set(config, gguf_keys[k].hf, (json_t *)same);
    }
    return 0;
}

// 0 if a number is absent or this.
static inline int gguf_must_be(const json_t *metadata, const char *arch, const char *key, double wanted,
                               const char *where) {
    const json_t *value = gguf_get(metadata, arch, key);
    if (value == NULL || (json_is_number(value) && json_number_value(value) == wanted)) return 0;
    return error_set("%s: %s.%s is %g; only %g is supported", where, arch, key, json_number_value(value), wanted);
}

// What would change the mathematics and has no place in the config.
static inline int gguf_check_keys(const json_t *config, const json_t *metadata, const char *arch, const char *where) {
    const json_t *window = gguf_get(metadata, arch, "attention.sliding_window");
    double context = json_number_value(json_object_get(config, "max_position_embeddings"));
    double head_dim = json_number_value(json_object_get(config, "head_dim"));
    if (gguf_must_be(metadata, arch, "expert_count", 0, where) ||
        gguf_must_be(metadata, arch, "attention.layer_norm_epsilon", (double)1e-5f, where))
        return -1;
    if (strcmp(arch, "llama") != 0 && json_number_value(window) > 0 && json_number_value(window) < context)
        return error_set("%s: %s.attention.sliding_window is not supported: which layers have it is not said", where,
                         arch);
    if (gguf_must_be(metadata, arch, "attention.value_length", head_dim, where)) return -1;
    return gguf_must_be(metadata, arch, "rope.dimension_count", head_dim, where);
}

// factors (HD/2) by which llama3 scaling divides frequencies.
static inline void gguf_rope_factors(float *factors, const RopeConfig *rope, int HD) {
    float plain[2048], scaled[2048];
    RopeConfig unscaled = *rope;
    unscaled.scaled = 0;
    rope_inv_freq(plain, HD, &unscaled);
    rope_inv_freq(scaled, HD, rope);
    for (int i = 0; i < HD / 2; i++) factors[i] = plain[i] / scaled[i];
}

// rope_freqs.weight holds the factors of llama3 scaling, not what they were made of: that is the file's own word, or
// what all Llama 3 have, and it must give these factors. *rope is a scaling then, or none where all factors are 1.
static inline int gguf_read_rope(RopeConfig *rope, const SafeTensor *tensor, const json_t *metadata, const char *arch,
                                 int HD, const char *where) {
    float factors[2048], made[2048];
    const json_t *original = gguf_get(metadata, arch, "rope.scaling.original_context_length");
    const json_t *low = gguf_get(metadata, arch, "rope.scaling.low_freq_factor");
    const json_t *high = gguf_get(metadata, arch, "rope.scaling.high_freq_factor");
    if (tensor->n_dims != 1 || HD < 2 || HD / 2 > 2048 || tensor->shape[0] != HD / 2)
        return error_set("%s: rope_freqs.weight is not one factor for each of %d frequencies", where, HD / 2);
    if (safetensor_read(factors, tensor, 0, HD / 2)) return -1;
    rope->scaled = 1, rope->factor = 1.0f;
    for (int i = 0; i < HD / 2; i++) rope->factor = factors[i] > rope->factor ? factors[i] : rope->factor;
    rope->low_freq_factor = low != NULL ? (float)json_number_value(low) : 1.0f;
    rope->high_freq_factor = high != NULL ? (float)json_number_value(high) : 4.0f;
    rope->original_context = json_size(original) > 0 && json_size(original) < INT_MAX ? (int)json_size(original) : 8192;
    gguf_rope_factors(made, rope, HD);
    for (int i = 0; i < HD / 2; i++)
        if (!(fabsf(made[i] - factors[i]) <= 1e-3f * made[i]))
            return error_set("%s: rope_freqs.weight: factor %d is %g; llama3 scaling by %g from %d tokens has %g",
                             where, i, (double)factors[i], (double)rope->factor, rope->original_context,
                             (double)made[i]);
    return 0;
}

// rope_scaling of the config: from the factors, or as the metadata name it, which config_from_json may refuse.
static inline int gguf_config_rope(json_t *config, const SafeTensors *file, const char *arch) {
    RopeConfig rope;
    const SafeTensor *factors = safetensors_find(file, "rope_freqs.weight");
    const char *type = json_string_value(gguf_get(file->metadata, arch, "rope.scaling.type"));
    double HD = json_number_value(json_object_get(config, "head_dim"));
    double theta = json_number_value(json_object_get(config, "rope_theta"));
    if (type != NULL && strcmp(type, "none") != 0) {
        const json_t *factor = gguf_get(file->metadata, arch, "rope.scaling.factor");
        json_t *scaling = json_pack("{s:s, s:O?}", "rope_type", type, "factor", factor);
        return json_object_set_new(config, "rope_scaling", scaling);
    }
    if (factors == NULL) return 0;
    memset(&rope, 0, sizeof rope);
    rope.theta = theta > 0.0 && theta < 1e12 ? (float)theta : 10000.0f;
    if (gguf_read_rope(&rope, factors, file->metadata, arch, HD > 0.0 && HD <= 4096.0 ? (int)HD : 0, file->path))
        return -1;
    if (rope.factor == 1.0f) return 0;
    json_t *scaling =
        json_pack("{s:s, s:o, s:o, s:o, s:i}", "rope_type", "llama3", "factor", json_from_float(rope.factor),
                  "low_freq_factor", json_from_float(rope.low_freq_factor), "high_freq_factor",
                  json_from_float(rope.high_freq_factor), "original_max_position_embeddings", rope.original_context);
    return json_object_set_new(config, "rope_scaling", scaling);
}

// A llama with a window shorter than its context is a Mistral.
static inline void gguf_config_window(json_t *config, const json_t *metadata, const char *arch) {
    const json_t *window = gguf_get(metadata, arch, "attention.sliding_window");
    double context = json_number_value(json_object_get(config, "max_position_embeddings"));
    if (strcmp(arch, "llama") != 0 || !(json_number_value(window) > 0 && json_number_value(window) < context)) return;
    json_object_set_new(config, "model_type", json_string("mistral"));
    json_object_set(config, "sliding_window", (json_t *)window);
}

// The head size is written only where it is not hidden_size / num_attention_heads, or as that of RoPE.
static inline void gguf_config_head_dim(json_t *config, const json_t *metadata, const char *arch) {
    json_int_t C = json_integer_value(json_object_get(config, "hidden_size"));
    json_int_t heads = json_integer_value(json_object_get(config, "num_attention_heads"));
    const json_t *rotated = gguf_get(metadata, arch, "rope.dimension_count");
    if (json_object_get(config, "head_dim") != NULL) return;
    if (rotated != NULL)
        json_object_set(config, "head_dim", (json_t *)rotated);
    else if (heads > 0 && C % heads == 0)
        json_object_set_new(config, "head_dim", json_integer(C / heads));
}

// What is said by tensors, by the tokenizer's metadata, or by the architecture alone.
static inline void gguf_config_rest(json_t *config, const SafeTensors *file, const char *arch) {
    const SafeTensor *embed = safetensors_find(file, "token_embd.weight");
    const json_t *bos = json_object_get(file->metadata, "tokenizer.ggml.bos_token_id");
    const json_t *eos = json_object_get(file->metadata, "tokenizer.ggml.eos_token_id");
    int llama = strcmp(arch, "llama") == 0;
    if (embed != NULL && embed->n_dims == 2) json_object_set_new(config, "vocab_size", json_integer(embed->shape[0]));
    if (bos != NULL) json_object_set(config, "bos_token_id", (json_t *)bos);
    if (eos != NULL) json_object_set(config, "eos_token_id", (json_t *)eos);
    json_object_set_new(config, "tie_word_embeddings", json_boolean(safetensors_find(file, "output.weight") == NULL));
    if (llama && safetensors_find(file, "blk.0.attn_q.bias") != NULL)
        json_object_set_new(config, "attention_bias", json_true());
    if (strcmp(arch, "smollm3") == 0) json_object_set_new(config, "no_rope_layer_interval", json_integer(4));
}

// The config.json that an opened file amounts to, its tensors still with GGUF's names. A new reference; NULL with an
// error message.
static inline json_t *gguf_config(const SafeTensors *file) {
    const char *arch = json_string_value(json_object_get(file->metadata, "general.architecture"));
    int family = arch != NULL ? gguf_family(arch, NULL) : -1;
    if (family < 0) {
        error_set("%s: general.architecture is '%.40s'; llama, qwen2, qwen3, olmo, olmo2 and smollm3 are read",
                  file->path, arch != NULL ? arch : "(none)");
        return NULL;
    }
    json_t *config = json_pack("{s:s}", "model_type", gguf_families[family].model_type);
    int result = config != NULL ? gguf_config_keys(config, file->metadata, arch, file->path) : -1;
    if (result == 0) gguf_config_head_dim(config, file->metadata, arch);
    if (result == 0) result = gguf_check_keys(config, file->metadata, arch, file->path);
    if (result == 0) gguf_config_window(config, file->metadata, arch);
    if (result == 0) gguf_config_rest(config, file, arch);
    if (result == 0) result = gguf_config_rope(config, file, arch);
    if (result == 0) return config;
    json_decref(config);
    return NULL;
}

// Gives the tensors Hugging Face's names and marks what is interleaved (head_dim rows a head); rope_freqs.weight is in
// the config and goes. A name that has no other stays.
static inline int gguf_adopt(SafeTensors *file, int head_dim) {
    char name[2 * GGUF_MAX_NAME];
    const char *arch = json_string_value(json_object_get(file->metadata, "general.architecture"));
    int interleaved = gguf_families[gguf_family(arch, NULL)].interleaved, kept = 0;
    json_t *names = json_object();
    for (int i = 0; i < file->n_tensors; i++) {
        SafeTensor *tensor = &file->tensors[i];
        if (strcmp(tensor->name, "rope_freqs.weight") == 0) continue;
        gguf_rename(name, sizeof name, tensor->name, 1, strcmp(arch, "olmo2") == 0);
        if (json_object_get(names, name) != NULL || json_object_set_new(names, name, json_null()) != 0) {
            json_decref(names);
            return error_set("%s: %s stands for %s, which is in it already", file->path, tensor->name, name);
        }
        tensor->name = json_object_iter_key(json_object_iter_at(names, name));
        if (interleaved && gguf_is_rotated(name) && tensor->n_dims > 0 && tensor->shape[0] % head_dim == 0)
            tensor->interleaved = head_dim;
        file->tensors[kept++] = *tensor;
    }
    file->n_tensors = kept;
    json_object_set(names, "__metadata__", file->metadata);
    json_decref(file->header);
    file->header = names;
    return 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// Writing

// The half-split row that lies at `row` of an interleaved Q or K with heads of HD rows.
static inline int64_t gguf_source_row(int64_t row, int HD) {
    int64_t i = row % HD;
    return row - i + i % 2 * (HD / 2) + i / 2;
}

// 1 if a SmolLM3 leaves RoPE out in every fourth layer, as GGUF takes it for granted.
static inline int gguf_skips_fourth(const json_t *config) {
    size_t layer;
    json_t *rotates;
    const json_t *interval = json_object_get(config, "no_rope_layer_interval");
    const json_t *layers = json_object_get(config, "no_rope_layers"); // 1: with RoPE; it goes before the interval
    if (!json_is_array(layers)) return interval == NULL || json_integer_value(interval) == 4;
    json_array_foreach((json_t *)layers, layer, rotates) {
        if (json_integer_value(rotates) != (layer % 4 != 3)) return 0;
    }
    return 1;
}

// The family under which a config is written; -1 with an error message if GGUF has none.
static inline int gguf_export_family(const json_t *config, const char *path) {
    const char *type = json_string_value(json_object_get(config, "model_type"));
    int family = type != NULL ? gguf_family(NULL, type) : -1;
    if (family >= 0 && strcmp(type, "smollm3") == 0 && !gguf_skips_fourth(config))
        return error_set("%s: a GGUF cannot say which layers of a SmolLM3 have no RoPE but every fourth", path);
    if (family >= 0 && json_is_true(json_object_get(config, "use_sliding_window")))
        return error_set("%s: a GGUF cannot say which layers of a %s have a sliding window", path, type);
    if (family < 0)
        error_set("%s: a model of type '%.40s' has no GGUF architecture here", path, type != NULL ? type : "");
    return family;
}

// The metadata of a model of this config (its config.json); dtype is that of its matrices. A new reference.
static inline json_t *gguf_metadata(const json_t *config, const RopeConfig *rope, int family, Dtype dtype) {
    char key[GGUF_MAX_NAME + 1];
    const char *arch = gguf_families[family].arch;
    json_int_t window = json_integer_value(json_object_get(config, "sliding_window"));
    int file_type = dtype == DTYPE_F32 ? 0 : dtype == DTYPE_F16 ? 1 : 32;
    json_t *metadata = json_pack("{s:s, s:i, s:i}", "general.architecture", arch, "general.file_type", file_type,
                                 "general.alignment", GGUF_ALIGNMENT);
    for (int k = 0; k < GGUF_KEYS && metadata != NULL; k++) {
        json_t *value = json_object_get(config, gguf_keys[k].hf);
        snprintf(key, sizeof key, "%s.%s", arch, gguf_keys[k].gguf);
        if (value != NULL && !json_is_null(value)) json_object_set(metadata, key, value);
    }
    const struct {
        const char *gguf;
        json_t *value;
    } rest[] = {{"attention.value_length", json_incref(json_object_get(config, "head_dim"))},
                {"rope.dimension_count", json_incref(json_object_get(config, "head_dim"))},
                {"vocab_size", json_incref(json_object_get(config, "vocab_size"))},
                {"attention.sliding_window", window > 0 ? json_integer(window) : NULL},
                {"rope.freq_base", json_from_float(rope->theta)},
                {"attention.layer_norm_epsilon", strcmp(arch, "olmo") == 0 ? json_from_float(1e-5f) : NULL},
                {"rope.scaling.original_context_length", rope->scaled ? json_integer(rope->original_context) : NULL},
                {"rope.scaling.low_freq_factor", rope->scaled ? json_from_float(rope->low_freq_factor) : NULL},
                {"rope.scaling.high_freq_factor", rope->scaled ? json_from_float(rope->high_freq_factor) : NULL}};
    for (size_t i = 0; i < sizeof rest / sizeof *rest; i++) {
        snprintf(key, sizeof key, "%s.%s", arch, rest[i].gguf);
        if (rest[i].value != NULL) json_object_set_new(metadata, key, rest[i].value);
    }
    return metadata;
}

#endif
