// Adapters of low rank beside frozen matrices (LoRA: Hu et al. 2021): a matrix W (M, K) acts as W + scale * B A, with
// A (rank, K) and B (M, rank) trained and scale = alpha / rank. Which matrices have them, and how many values they are.
//
//   Lora lora = {16, 32.0f, 0};
//   if (lora_parse_targets(&lora, "q,v")) ...                      // or "all"
//   int64_t values = lora_layer_values(&lora, C, A, KV, F);        // of a layer's adapters
#ifndef LLMC_LORA_CONFIG_H
#define LLMC_LORA_CONFIG_H

#include <stdint.h> // int64_t
#include <stdio.h>  // snprintf
#include <string.h> // strncmp

#include "error.h"

// The matrices of a layer, in the order of its table.
enum { LORA_MODULES = 7 };
static const char *const lora_modules[LORA_MODULES] = {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj",
                                                       "self_attn.o_proj", "mlp.gate_proj",    "mlp.up_proj",
                                                       "mlp.down_proj"};

// Modules that take the same input are one product: q, k, v; o; gate, up; down.
enum { LORA_GROUPS = 4 };
static const int lora_group_first[LORA_GROUPS + 1] = {0, 3, 4, 6, 7};

typedef struct {
    int rank; // 0: no adapters, all weights are trained
    float alpha;
    unsigned targets; // bit of each module that has an adapter
} Lora;

// A group's adapters and their gradients, in the memory of the products.
typedef struct {
    int n, rank;
    int at[3], width[3]; // columns of each module's outputs
    float scale;
    const float *a, *b[3]; // (n*R, K), (width, R)
    float *da, *db[3];     // NULL in a forward
} LoraGroup;

static inline int lora_has(const Lora *lora, int module) {
    return lora->rank > 0 && (lora->targets >> module & 1u) != 0;
}

// What B A is multiplied by.
static inline float lora_scale(const Lora *lora) {
    return lora->alpha / (float)lora->rank;
}

// How many modules of a group have an adapter.
static inline int lora_group_size(const Lora *lora, int group) {
    int n = 0;
    for (int m = lora_group_first[group]; m < lora_group_first[group + 1]; m++) n += lora_has(lora, m);
    return n;
}

// How many adapters a layer has.
static inline int lora_layer_adapters(const Lora *lora) {
    int n = 0;
    for (int m = 0; m < LORA_MODULES; m++) n += lora_has(lora, m);
    return n;
}

// Outputs (*M) and inputs (*K) of a module's matrix, of a model of C channels with A values of queries, KV of keys, and
// an MLP of F.
static inline void lora_module_shape(int module, int C, int64_t A, int64_t KV, int F, int *M, int *K) {
    const int outputs[LORA_MODULES] = {(int)A, (int)KV, (int)KV, C, F, F, C};
    *M = outputs[module];
    *K = module == 3 ? (int)A : module == 6 ? F : C;
}

// Values of a layer's adapters.
static inline int64_t lora_layer_values(const Lora *lora, int C, int64_t A, int64_t KV, int F) {
    int64_t n = 0;
    for (int module = 0; module < LORA_MODULES; module++) {
        int M, K;
        lora_module_shape(module, C, A, KV, F, &M, &K);
        if (lora_has(lora, module)) n += (int64_t)lora->rank * ((int64_t)M + K);
    }
    return n;
}

// A module by its own name ("q_proj"), or without its ending ("q"); -1: none.
static inline int lora_module(const char *name, size_t length) {
    for (int m = 0; m < LORA_MODULES; m++) {
        const char *own = strchr(lora_modules[m], '.') + 1;
        size_t n = strlen(own), stem = n - strlen("_proj");
        if ((length == n || length == stem) && strncmp(name, own, length) == 0) return m;
    }
    return -1;
}

// Targets from a list like "q,k,v,o,gate,up,down" or "all"; -1 with an error message.
static inline int lora_parse_targets(Lora *lora, const char *text) {
    lora->targets = 0;
    for (const char *at = text;; at++) {
        size_t length = strcspn(at, ",");
        int module = lora_module(at, length), all = length == 3 && strncmp(at, "all", length) == 0;
        if (module < 0 && !all)
            return error_set("--lora-targets: '%.*s' is none of q, k, v, o, gate, up, down and all", (int)length, at);
        lora->targets |= all ? (1u << LORA_MODULES) - 1 : 1u << module;
        at += length;
        if (*at == '\0') return 0;
    }
}

// The same list as text.
static inline void lora_targets_text(const Lora *lora, char *text, size_t size) {
    int used = 0;
    if (size > 0) text[0] = '\0';
    for (int m = 0; m < LORA_MODULES; m++) {
        const char *own = strchr(lora_modules[m], '.') + 1;
        if (lora_has(lora, m) && used < (int)size)
            used += snprintf(text + used, size - (size_t)used, "%s%.*s", used > 0 ? "," : "",
                             (int)(strlen(own) - strlen("_proj")), own);
    }
}

#endif
