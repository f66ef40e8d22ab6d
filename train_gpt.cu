// meshtune: fine-tunes Llama models. One program, read from top to bottom:
//
//   Options        the command line, one table
//   Model          the table of tensors, a stage's memory, initial weights, loading and saving
//   Forward and backward        one layer after the other, by hand
//   Optimizer      clipping and AdamW over the table
//   Evaluation and generation   held-out loss, sampling with a key/value cache
//   Plan           what a run will need, before it starts
//   Run            the output folder: log, checkpoints, resume
//   Training       the loop
//   main
//
// Shapes, the same letters everywhere: B sequences, T tokens of one, N = B*T rows, C channels, NH query heads, NKV
// key/value heads, HD head size, A = NH*HD, QKV = (NH + 2*NKV)*HD, F ffn size, V vocabulary, L layers.
// The file is C11 and C++17. Errors: functions return -1 with a line in error_message; main prints it and exits 1.

#include <math.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <time.h>
#include <unistd.h>

#include "llmc/adamw.h"
#include "llmc/attention.h"
#include "llmc/checkpoint.h"
#include "llmc/cli.h"
#include "llmc/config.h"
#include "llmc/cross_entropy.h"
#include "llmc/dataset.h"
#include "llmc/device.h"
#include "llmc/embedding.h"
#include "llmc/error.h"
#include "llmc/file.h"
#include "llmc/matmul.h"
#include "llmc/model_file.h"
#include "llmc/rand.h"
#include "llmc/rmsnorm.h"
#include "llmc/rope.h"
#include "llmc/safetensors.h"
#include "llmc/swiglu.h"
#include "llmc/tokenizer.h"

#define MESHTUNE_VERSION "0.1.0"

// ---------------------------------------------------------------------------------------------------------------------
// Options. One table parses, checks, prints help, is written into each run's log and read back by --resume.

typedef struct {
    char model[CLI_TEXT], init[CLI_TEXT], out[CLI_TEXT], generate[CLI_TEXT], export_to[CLI_TEXT];
    TextList data, val_data;
    float val_fraction, lr, lr_final, wd, beta1, beta2, adam_eps, clip, temperature, top_p, mask_rate;
    int batch, micro_batch, seq, schedule_lr, precision, recompute, threads, keep, export_dtype, max_tokens;
    int replicas, stages, eval, dry_run, resume, check_weights, val_every, sample_every, save_every, help;
    int64_t steps, warmup, stop_after, seed, val_tokens;
} Options;

static const char lr_shapes[] = "cosine|linear|constant"; // LrShape in words

#define FIELD(name) OPTION_FIELD(Options, name)
// clang-format off
static const Option option_table[] = {
// flag  name            type           field              default   min    max     choices   help
{ "-m", "model",         OPTION_TEXT,   FIELD(model),        "",     0,     0,      NULL, "model: a .bin, a Hugging Face folder, or a run's folder" },
{ "",   "init",          OPTION_TEXT,   FIELD(init),         "",     0,     0,      NULL, "random model instead: a preset, a config.json, or d=256,layers=8,..." },
{ "-d", "data",          OPTION_LIST,   FIELD(data),         "",     0,     0,      NULL, "training data: .txt, .jsonl, token .bin; several, patterns" },
{ "",   "val-data",      OPTION_LIST,   FIELD(val_data),     "",     0,     0,      NULL, "held-out data; without it a part of -d is held out" },
{ "",   "val-fraction",  OPTION_FLOAT,  FIELD(val_fraction), "0.05", 0,     0.5,    NULL, "share of -d held out" },
{ "-o", "out",           OPTION_TEXT,   FIELD(out),          "",     0,     0,      NULL, "folder of the run; default: the next free runs/N" },
{ "-b", "batch",         OPTION_INT,    FIELD(batch),        "32",   1,     1e6,    NULL, "sequences a step" },
{ "",   "micro-batch",   OPTION_INT,    FIELD(micro_batch),  "0",    0,     1e6,    NULL, "sequences computed at once; 0 = about 1024 tokens" },
{ "-t", "seq",           OPTION_INT,    FIELD(seq),          "0",    0,     1e6,    NULL, "tokens of a sequence; 0 = min(2048, the model's context)" },
{ "-n", "steps",         OPTION_INT64,  FIELD(steps),        "0",    0,     1e9,    NULL, "optimizer steps; 0 = max(200, 3 epochs)" },
{ "-l", "lr",            OPTION_FLOAT,  FIELD(lr),           "2e-5", 0,     10,     NULL, "peak learning rate" },
{ "",   "warmup",        OPTION_INT64,  FIELD(warmup),       "-1",   -1,    1e9,    NULL, "steps of linear warm-up; -1 = 3% of the steps" },
{ "",   "schedule-lr",   OPTION_CHOICE, FIELD(schedule_lr),  "cosine", 0,   0,      lr_shapes, "after the warm-up" },
{ "",   "lr-final",      OPTION_FLOAT,  FIELD(lr_final),     "0.1",  0,     1,      NULL, "last learning rate as a share of the peak" },
{ "",   "wd",            OPTION_FLOAT,  FIELD(wd),           "0.01", 0,     10,     NULL, "weight decay, not on norms" },
{ "",   "beta1",         OPTION_FLOAT,  FIELD(beta1),        "0.9",  0,     0.9999, NULL, "AdamW" },
{ "",   "beta2",         OPTION_FLOAT,  FIELD(beta2),        "0.999", 0,    0.99999, NULL, "AdamW" },
{ "",   "adam-eps",      OPTION_FLOAT,  FIELD(adam_eps),     "1e-8", 0,     1,      NULL, "AdamW" },
{ "",   "clip",          OPTION_FLOAT,  FIELD(clip),         "1",    0,     1e9,    NULL, "gradient norm limit; 0 = none" },
{ "",   "val-every",     OPTION_INT,    FIELD(val_every),    "0",    0,     1e9,    NULL, "steps between validations; 0 = a tenth of the run" },
{ "",   "val-tokens",    OPTION_INT64,  FIELD(val_tokens),   "65536", 0,    1e15,   NULL, "held-out tokens looked at; 0 = all" },
{ "",   "sample-every",  OPTION_INT,    FIELD(sample_every), "0",    0,     1e9,    NULL, "steps between printed samples; 0 = none" },
{ "",   "save-every",    OPTION_INT,    FIELD(save_every),   "0",    0,     1e9,    NULL, "steps between checkpoints; 0 = a fifth of the run" },
{ "",   "keep",          OPTION_INT,    FIELD(keep),         "2",    0,     1e6,    NULL, "checkpoints kept; 0 = all" },
{ "",   "resume",        OPTION_FLAG,   FIELD(resume),       "0",    0,     1,      NULL, "go on with the run in -o, or the newest under runs/" },
{ "",   "stop-after",    OPTION_INT64,  FIELD(stop_after),   "0",    0,     1e9,    NULL, "save and stop after this step; 0 = at the end" },
{ "",   "seed",          OPTION_INT64,  FIELD(seed),         "1",    0,     9e15,   NULL, "of weights, data order and sampling" },
{ "",   "threads",       OPTION_INT,    FIELD(threads),      "0",    0,     1024,   NULL, "0 = one a core" },
{ "",   "precision",     OPTION_CHOICE, FIELD(precision),    "auto", 0,     0,      "auto|bf16|fp32", "inputs of matrix products; auto = bf16 where the CPU has it" },
{ "",   "recompute",     OPTION_FLAG,   FIELD(recompute),    "0",    0,     1,      NULL, "recompute activations in backward: less memory, same bits" },
{ "-p", "mask-rate",     OPTION_FLOAT,  FIELD(mask_rate),    "0",    0,     0.999,  NULL, "share of boundary values not sent; there is no mesh yet: 0" },
{ "-x", "replicas",      OPTION_INT,    FIELD(replicas),     "1",    1,     1e6,    NULL, "data-parallel replicas; there is no mesh yet: 1" },
{ "-y", "stages",        OPTION_INT,    FIELD(stages),       "1",    1,     1e6,    NULL, "pipeline stages; there is no mesh yet: 1" },
{ "",   "eval",          OPTION_FLAG,   FIELD(eval),         "0",    0,     1,      NULL, "print held-out loss and bits per byte, then exit" },
{ "",   "generate",      OPTION_TEXT,   FIELD(generate),     "",     0,     0,      NULL, "continue this text, then exit" },
{ "",   "max-tokens",    OPTION_INT,    FIELD(max_tokens),   "200",  1,     1e6,    NULL, "length of what is generated" },
{ "",   "temperature",   OPTION_FLOAT,  FIELD(temperature),  "0.8",  0,     100,    NULL, "of sampling; 0 = the likeliest token" },
{ "",   "top-p",         OPTION_FLOAT,  FIELD(top_p),        "0.95", 0.01,  1,      NULL, "sample from the likeliest tokens of this total probability" },
{ "",   "export",        OPTION_TEXT,   FIELD(export_to),    "",     0,     0,      NULL, "write the model: NAME.bin, or a folder for transformers; then exit" },
{ "",   "export-dtype",  OPTION_CHOICE, FIELD(export_dtype), "bf16", 0,     0,      "bf16|fp32", "of exported weights" },
{ "",   "check-weights", OPTION_FLAG,   FIELD(check_weights), "0",   0,     1,      NULL, "look for NaN and infinity in a loaded model" },
{ "",   "dry-run",       OPTION_FLAG,   FIELD(dry_run),      "0",    0,     1,      NULL, "print parameters, memory, tokens and steps, then exit" },
{ "-h", "help",          OPTION_FLAG,   FIELD(help),         "0",    0,     1,      NULL, "print this" },
};
// clang-format on
enum { OPTION_COUNT = sizeof option_table / sizeof *option_table };

enum { PRECISION_OPTION_AUTO, PRECISION_OPTION_BF16, PRECISION_OPTION_FP32 };

// ---------------------------------------------------------------------------------------------------------------------
// Model

// One tensor of the stage. Offsets count floats from the start of an arena; parameters, gradients and both moments are
// arenas of the same layout.
typedef struct {
    char name[80]; // the Hugging Face name
    int64_t shape[2];
    int n_dims;
    int64_t offset, n;
    int decay;       // weight decay applies
    int accumulated; // its gradient is always added to, so it is zeroed at the start of a step
    float init_std;  // 0: all ones
} Tensor;

// Pointers into one arena (parameters or gradients). q, k, v lie one after the other and are multiplied as one matrix,
// gate and up too.
typedef struct {
    float *attn_norm; // (C)
    float *qkv;       // (QKV, C)
    float *o;         // (C, A)
    float *ffn_norm;  // (C)
    float *gate_up;   // (2F, C)
    float *down;      // (C, F)
} LayerTensors;

typedef struct {
    float *embed; // (V, C)
    LayerTensors *layers;
    float *norm; // (C)
    float *head; // (V, C), the embedding itself when tied
} ModelTensors;

// What the forward pass leaves for the backward one, per layer. With --recompute only x is kept for each layer and the
// rest is one set that all layers use in turn.
typedef struct {
    floatX *x;       // (N, C)   input of the layer
    floatX *norm1;   // (N, C)
    floatX *qkv;     // (N, QKV) RoPE applied to q and k
    floatX *att;     // (N, A)
    floatX *mid;     // (N, C)   after the attention's residual
    floatX *norm2;   // (N, C)
    floatX *gate_up; // (N, 2F)
    floatX *hidden;  // (N, F)
    float *lse;      // (B, NH, T)
    float *rstd1;    // (N)
    float *rstd2;    // (N)
} LayerActs;

// Gradients on their way down, used by one layer after the other.
typedef struct {
    floatX *dx;      // (N, C)  of the residual stream
    floatX *dnorm;   // (N, C)
    floatX *dhidden; // (N, max(F, A))
    floatX *dwide;   // (N, max(2F, QKV))
} Grads;

// A run of layers with all it owns.
typedef struct {
    Config config;
    int64_t A, QKV;
    // the table and its arenas
    Tensor *tensors;
    int n_tensors;
    int64_t arena_floats, n_params;
    float *params, *grads, *m, *v; // grads, m, v are NULL unless training
    uint16_t *rounded;             // bf16 copy of params for the products, or NULL
    ModelTensors p, g;
    // activations for at most max_B sequences of max_T tokens
    int max_B, max_T, recompute, training;
    floatX *acts_arena;
    int64_t acts_floats;
    LayerActs *acts; // (L)
    floatX *last;    // (N, C) output of the last layer
    floatX *normed;  // (N, C)
    float *rstd;     // (N)
    floatX *logits;  // (chunk, V)
    int logits_rows;
    Grads d;
    float *losses;      // (N)
    uint32_t *tokens;   // (N) inputs of the micro-batch
    int32_t *targets;   // (N) -1 = not counted
    int32_t *positions; // (N)
    float *rope_cos, *rope_sin;
    float *staging;     // (STAGING) the host's side of copies to and from the arenas
    json_t *side_files; // tokenizer and others that travel with the model
} Stage;

// Floats moved at once between files and tensor memory; a multiple of 4.
#ifdef TESTING
#define STAGING ((int64_t)1000) // small tensors take several pieces too
#else
#define STAGING ((int64_t)1 << 20)
#endif

static int64_t round_up(int64_t n, int64_t unit) {
    return (n + unit - 1) / unit * unit;
}

// Appends a tensor to the table. joined: it follows the one before without a gap.
static void table_add(Stage *stage, const char *name, int layer, int64_t rows, int64_t cols, float init_std,
                      int joined) {
    Tensor *tensor = &stage->tensors[stage->n_tensors++];
    memset(tensor, 0, sizeof *tensor);
    if (layer >= 0)
        snprintf(tensor->name, sizeof tensor->name, "model.layers.%d.%s.weight", layer, name);
    else
        snprintf(tensor->name, sizeof tensor->name, "%s.weight", name);
    tensor->shape[0] = rows, tensor->shape[1] = cols;
    tensor->n_dims = cols > 0 ? 2 : 1;
    tensor->n = rows * (cols > 0 ? cols : 1);
    tensor->offset = joined ? stage->arena_floats : round_up(stage->arena_floats, DEVICE_ALIGN / 4);
    tensor->decay = cols > 0, tensor->accumulated = cols == 0, tensor->init_std = init_std;
    stage->arena_floats = tensor->offset + tensor->n;
    stage->n_params += tensor->n;
}

enum { TENSORS_PER_LAYER = 9 };

// Fills the table of a model: embedding, layers, norm, head. No memory but the table's own.
static int stage_table(Stage *stage, const Config *config) {
    int C = config->channels, L = config->n_layers, kv = (int)config_kv_dim(config);
    float std = config->init_std, residual_std = std / sqrtf(2.0f * (float)L);
    memset(stage, 0, sizeof *stage);
    stage->config = *config;
    stage->A = config_q_dim(config), stage->QKV = stage->A + 2 * kv;
    stage->tensors = (Tensor *)calloc((size_t)(TENSORS_PER_LAYER * L + 3), sizeof(Tensor));
    if (stage->tensors == NULL) return error_set("out of memory for the table of tensors");
    table_add(stage, "model.embed_tokens", -1, config->vocab, C, std, 0);
    stage->tensors[0].accumulated = !config->tied; // tied: the head's product writes it first
    for (int l = 0; l < L; l++) {
        table_add(stage, "input_layernorm", l, C, 0, 0, 0);
        table_add(stage, "self_attn.q_proj", l, stage->A, C, std, 0);
        table_add(stage, "self_attn.k_proj", l, kv, C, std, 1);
        table_add(stage, "self_attn.v_proj", l, kv, C, std, 1);
        table_add(stage, "self_attn.o_proj", l, C, stage->A, residual_std, 0);
        table_add(stage, "post_attention_layernorm", l, C, 0, 0, 0);
        table_add(stage, "mlp.gate_proj", l, config->ffn, C, std, 0);
        table_add(stage, "mlp.up_proj", l, config->ffn, C, std, 1);
        table_add(stage, "mlp.down_proj", l, C, config->ffn, residual_std, 0);
    }
    table_add(stage, "model.norm", -1, C, 0, 0, 0);
    if (!config->tied) table_add(stage, "lm_head", -1, config->vocab, C, std, 0);
    return 0;
}

// Points a ModelTensors into an arena of the table's layout.
static int model_view(ModelTensors *view, const Stage *stage, float *arena) {
    int L = stage->config.n_layers;
    const Tensor *tensor = stage->tensors;
    view->layers = (LayerTensors *)calloc((size_t)L, sizeof(LayerTensors));
    if (view->layers == NULL) return error_set("out of memory for %d layers", L);
    view->embed = arena + tensor++->offset;
    for (int l = 0; l < L; l++) {
        LayerTensors *layer = &view->layers[l];
        layer->attn_norm = arena + tensor[0].offset;
        layer->qkv = arena + tensor[1].offset;
        layer->o = arena + tensor[4].offset;
        layer->ffn_norm = arena + tensor[5].offset;
        layer->gate_up = arena + tensor[6].offset;
        layer->down = arena + tensor[8].offset;
        tensor += TENSORS_PER_LAYER;
    }
    view->norm = arena + tensor[0].offset;
    view->head = stage->config.tied ? view->embed : arena + tensor[1].offset;
    return 0;
}

static void stage_free(Stage *stage) {
    device_free(stage->params);
    device_free(stage->rounded);
    device_free(stage->grads);
    device_free(stage->m);
    device_free(stage->v);
    device_free(stage->acts_arena);
    free(stage->p.layers);
    free(stage->g.layers);
    free(stage->acts);
    free(stage->staging);
    free(stage->tensors);
    json_decref(stage->side_files);
    memset(stage, 0, sizeof *stage);
}

#ifdef TESTING
#define LOGITS_MAX 4000 // small shapes have several chunks too
#else
#define LOGITS_MAX ((int64_t)32 << 20) // 128 MB
#endif

// Rows of logits that exist at once.
static int logits_chunk(const Config *config, int64_t N) {
    int64_t rows = LOGITS_MAX / config->vocab;
    if (rows < 1) rows = 1;
    return (int)(rows < N ? rows : N);
}

// Hands out pieces of an arena, or only counts when base is NULL.
typedef struct {
    float *base;
    int64_t used;
} Carver;

static float *carve(Carver *carver, int64_t n) {
    float *piece = carver->base != NULL ? carver->base + carver->used : NULL;
    int64_t taken = round_up(n, DEVICE_ALIGN / 4) + DEVICE_GAP / 4;
    if (piece != NULL) device_forbid(piece + n, (size_t)(taken - n) * sizeof(float));
    carver->used += taken;
    return piece;
}

static void carve_layer(Carver *carver, LayerActs *acts, const Stage *stage, int64_t N) {
    const Config *config = &stage->config;
    int64_t C = config->channels, F = config->ffn;
    acts->norm1 = carve(carver, N * C);
    acts->qkv = carve(carver, N * stage->QKV);
    acts->att = carve(carver, N * stage->A);
    acts->mid = carve(carver, N * C);
    acts->norm2 = carve(carver, N * C);
    acts->gate_up = carve(carver, N * 2 * F);
    acts->hidden = carve(carver, N * F);
    acts->lse = carve(carver, N * config->heads);
    acts->rstd1 = carve(carver, N);
    acts->rstd2 = carve(carver, N);
}

// Lays out (base != NULL) or counts the activations; returns floats. One set of a layer's inner activations is enough
// for inference and for --recompute.
static int64_t stage_carve(Stage *stage, float *base) {
    const Config *config = &stage->config;
    int64_t N = (int64_t)stage->max_B * stage->max_T, C = config->channels, F = config->ffn;
    int shared = stage->recompute || !stage->training;
    Carver carver = {base, 0};
    for (int l = 0; l < config->n_layers; l++) {
        LayerActs *acts = &stage->acts[l];
        if (l == 0 || !shared)
            carve_layer(&carver, acts, stage, N);
        else
            *acts = stage->acts[0];
        acts->x = l < 2 || stage->training ? carve(&carver, N * C) : stage->acts[l - 2].x; // inference: two take turns
    }
    stage->last = carve(&carver, N * C);
    stage->normed = carve(&carver, N * C);
    stage->rstd = carve(&carver, N);
    stage->logits_rows = logits_chunk(config, N);
    stage->logits = carve(&carver, (int64_t)stage->logits_rows * config->vocab);
    stage->losses = carve(&carver, N);
    stage->rope_cos = carve(&carver, (int64_t)stage->max_T * config->head_dim / 2);
    stage->rope_sin = carve(&carver, (int64_t)stage->max_T * config->head_dim / 2);
    stage->tokens = (uint32_t *)(void *)carve(&carver, N);
    stage->targets = (int32_t *)(void *)carve(&carver, N);
    stage->positions = (int32_t *)(void *)carve(&carver, N);
    if (stage->training) {
        stage->d.dx = carve(&carver, N * C);
        stage->d.dnorm = carve(&carver, N * C);
        stage->d.dhidden = carve(&carver, N * (F > stage->A ? F : stage->A));
        stage->d.dwide = carve(&carver, N * (2 * F > stage->QKV ? 2 * F : stage->QKV));
    }
    return carver.used;
}

static int64_t larger(int64_t a, int64_t b) {
    return a > b ? a : b;
}

// What a stage takes, in bytes.
typedef struct {
    int64_t params, rounded, grads, moments, acts, scratch;
} StageBytes;

// Bytes this process may use: the machine's memory, or its control group's limit where that is lower.
static int64_t memory_limit(void) {
    int64_t memory = (int64_t)sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGESIZE);
    long long limit;
    FILE *file = fopen("/sys/fs/cgroup/memory.max", "re");
    if (file == NULL) return memory;
    if (fscanf(file, "%lld", &limit) == 1 && limit > 0 && limit < memory) memory = limit;
    fclose(file);
    return memory;
}

static int64_t stage_bytes_sum(const StageBytes *bytes) {
    return bytes->params + bytes->rounded + bytes->grads + bytes->moments + bytes->acts + bytes->scratch;
}

// rounded: where a quarter of the memory stays free. scratch: what the ops keep between calls, attention's blocks and
// bf16 copies of operands.
static StageBytes stage_bytes(const Stage *stage, Precision precision, int threads) {
    const Config *config = &stage->config;
    int64_t C = config->channels, F = config->ffn, N = (int64_t)stage->max_B * stage->max_T, V = config->vocab;
    int64_t floats = stage->arena_floats, T = stage->max_T;
    AttentionShape shape = {stage->max_B, (int)T, (int)T, config->heads, config->kv_heads, config->head_dim, 0, 0};
    int64_t attention = (int64_t)attention_bytes(shape, precision, threads);
    int64_t weight = larger(larger(2 * F * C, stage->QKV * C), V * C < MATMUL_SLICE ? V * C : MATMUL_SLICE);
    int64_t wide = larger(larger(2 * F, stage->QKV) * N, (int64_t)stage->logits_rows * V);
    int64_t operands = 2 * (weight + N * larger(larger(C, F), stage->A) + (stage->training ? wide : 0));
    StageBytes bytes = {floats * 4, 0, 0, 0, stage->acts_floats * 4, attention};
    if (stage->training) bytes.grads = floats * 4, bytes.moments = floats * 8;
    if (precision == PRECISION_BF16) bytes.scratch += operands;
    if (precision == PRECISION_BF16 && stage->training &&
        stage_bytes_sum(&bytes) + floats * 2 <= memory_limit() / 4 * 3)
        bytes.rounded = floats * 2;
    return bytes;
}

// 0, or -1 if the machine cannot hold the stage.
static int stage_fits(const Stage *stage, Precision precision, int threads) {
    StageBytes bytes = stage_bytes(stage, precision, threads);
    int64_t needed = stage_bytes_sum(&bytes), memory = memory_limit();
    if (needed <= memory) return 0;
    return error_set("%.1f GB are needed (parameters and optimizer %.1f, activations %.1f), the machine has %.1f%s",
                     1e-9 * (double)needed, 1e-9 * (double)(bytes.params + bytes.grads + bytes.moments),
                     1e-9 * (double)(bytes.acts + bytes.scratch), 1e-9 * (double)memory,
                     stage->training ? "; try --recompute, a smaller --micro-batch or --seq" : "");
}

// Sets what the stage will be used for and counts its memory; nothing large is allocated yet.
static int stage_plan(Stage *stage, int B, int T, int training, int recompute) {
    stage->max_B = B, stage->max_T = T, stage->training = training, stage->recompute = recompute;
    free(stage->acts);
    stage->acts = (LayerActs *)calloc((size_t)stage->config.n_layers, sizeof(LayerActs));
    if (stage->acts == NULL) return error_set("out of memory for %d layers", stage->config.n_layers);
    stage->acts_floats = stage_carve(stage, NULL);
    return 0;
}

// Allocates what stage_plan counted.
static int stage_alloc(Stage *stage, Stream *stream) {
    float inv_freq[2048];
    if (stage_fits(stage, stream->precision, stream->threads)) return -1;
    size_t bytes = sizeof(float) * (size_t)stage->arena_floats;
    StageBytes plan = stage_bytes(stage, stream->precision, stream->threads);
    stage->params = (float *)device_alloc(bytes);
    if (plan.rounded > 0 && (stage->rounded = (uint16_t *)device_alloc((size_t)plan.rounded)) == NULL) return -1;
    if (stage->params == NULL || model_view(&stage->p, stage, stage->params)) return -1;
    if (stage->training) {
        stage->grads = (float *)device_alloc(bytes);
        stage->m = (float *)device_alloc(bytes);
        stage->v = (float *)device_alloc(bytes);
        if (stage->grads == NULL || stage->m == NULL || stage->v == NULL) return -1;
        if (model_view(&stage->g, stage, stage->grads)) return -1;
    }
    stage->acts_arena = (floatX *)device_alloc(sizeof(float) * (size_t)stage->acts_floats);
    if (stage->acts_arena == NULL) return -1;
    stage_carve(stage, stage->acts_arena);
    stage->staging = (float *)malloc(sizeof(float) * STAGING);
    if (stage->staging == NULL) return error_set("out of memory for the staging buffer");
    rope_inv_freq(inv_freq, stage->config.head_dim, &stage->config.rope);
    rope_tables(stage->rope_cos, stage->rope_sin, inv_freq, stage->max_T, stage->config.head_dim, stream);
    return 0;
}

// A weight of this stage as the products take it.
static Weight stage_weight(const Stage *stage, const float *weight) {
    Weight view = {weight, stage->rounded != NULL ? stage->rounded + (weight - stage->params) : NULL};
    return view;
}

// Brings the bf16 copies up to date, where they are kept: before the products of a step or an evaluation.
static void stage_round(Stage *stage, Stream *stream) {
    for (int i = 0; stage->rounded != NULL && i < stage->n_tensors; i++) {
        const Tensor *t = &stage->tensors[i];
        if (t->n_dims == 2)
            bf16_round(stage->rounded + t->offset, stage->params + t->offset, t->shape[0], t->shape[1], t->shape[1],
                       stream);
    }
}

// Random weights: normal with each tensor's deviation (the two products that write the residual stream are smaller by
// sqrt(2L), Radford et al. 2019), norms one. A value depends on seed, tensor and element alone.
static void stage_init(Stage *stage, uint64_t seed) {
    for (int i = 0; i < stage->n_tensors; i++) {
        const Tensor *tensor = &stage->tensors[i];
        for (int64_t at = 0; at < tensor->n; at += STAGING) {
            int64_t n = tensor->n - at < STAGING ? tensor->n - at : STAGING;
#pragma omp parallel for
            for (int64_t j = 0; j < n; j += 4) {
                float normal[4];
                rand_normal4(normal, seed, RAND_INIT, (uint32_t)i, (uint64_t)(at + j) / 4);
                for (int64_t k = j; k < j + 4 && k < n; k++)
                    stage->staging[k] = tensor->init_std > 0.0f ? tensor->init_std * normal[k - j] : 1.0f;
            }
            device_copy(stage->params + tensor->offset + at, stage->staging, sizeof(float) * (size_t)n);
        }
    }
}

// Every tensor of the table is in the file with the right shape, and nothing else that would change the result.
static int stage_match(const Stage *stage, const ModelFile *file) {
    for (int i = 0; i < stage->n_tensors; i++) {
        const Tensor *tensor = &stage->tensors[i];
        if (model_file_expect(file, tensor->name, tensor->shape, tensor->n_dims) == NULL) return -1;
    }
    for (int s = 0; s < file->n_shards; s++) {
        for (int i = 0; i < file->shards[s].n_tensors; i++) {
            const char *name = file->shards[s].tensors[i].name; // not in the table, but harmless:
            int known =
                ends_with(name, "rotary_emb.inv_freq") || (stage->config.tied && strcmp(name, "lm_head.weight") == 0);
            for (int t = 0; t < stage->n_tensors && !known; t++) known = strcmp(stage->tensors[t].name, name) == 0;
            if (!known)
                return error_set("%s: tensor %s is not part of a Llama of this config", file->shards[s].path, name);
        }
    }
    return 0;
}

// Copies a file's tensor into an arena at the table's place; check: refuses values that are not finite.
static int stage_read_tensor(Stage *stage, float *arena, const Tensor *tensor, const SafeTensor *from, int check) {
    for (int64_t at = 0; at < tensor->n; at += STAGING) {
        int64_t n = tensor->n - at < STAGING ? tensor->n - at : STAGING;
        if (safetensor_read(stage->staging, from, at, n)) return -1;
        for (int64_t j = 0; check && j < n; j++)
            if (!isfinite(stage->staging[j]))
                return error_set("%s: element %lld is %g", from->name, (long long)(at + j), (double)stage->staging[j]);
        device_copy(arena + tensor->offset + at, stage->staging, sizeof(float) * (size_t)n);
    }
    return 0;
}

// Copies the weights of a matched file into the parameters.
static int stage_load(Stage *stage, const ModelFile *file, int check) {
    for (int i = 0; i < stage->n_tensors; i++) {
        const Tensor *tensor = &stage->tensors[i];
        const char *path = "";
        char reason[ERROR_MAX];
        const SafeTensor *from = model_file_find(file, tensor->name, &path);
        if (stage_read_tensor(stage, stage->params, tensor, from, check) == 0) continue;
        memcpy(reason, error_message, sizeof reason);
        return error_set("%.400s: %.500s", path, reason);
    }
    stage->side_files = json_incref(file->side_files);
    return 0;
}

// Writes tensors named prefix + their name from an arena of the table's layout into one safetensors file. arenas and
// prefixes have n entries.
static int stage_write_arenas(const Stage *stage, const char *path, json_t *metadata, Dtype dtype, int n,
                              float *const *arenas, const char *const *prefixes) {
    SafeTensorsWriter writer;
    char name[128];
    if (safetensors_writer_init(&writer, metadata)) return -1;
    for (int a = 0; a < n; a++) {
        for (int i = 0; i < stage->n_tensors; i++) {
            snprintf(name, sizeof name, "%s%s", prefixes[a], stage->tensors[i].name);
            if (safetensors_declare(&writer, name, dtype, stage->tensors[i].shape, stage->tensors[i].n_dims)) return -1;
        }
    }
    if (safetensors_begin(&writer, path)) return -1;
    for (int a = 0; a < n; a++) {
        for (int i = 0; i < stage->n_tensors; i++) {
            const Tensor *tensor = &stage->tensors[i];
            for (int64_t at = 0; at < tensor->n; at += STAGING) {
                int64_t count = tensor->n - at < STAGING ? tensor->n - at : STAGING;
                device_copy(stage->staging, arenas[a] + tensor->offset + at, sizeof(float) * (size_t)count);
                safetensors_append(&writer, stage->staging, count, dtype);
            }
        }
    }
    return file_writer_close(&writer.file);
}

// Writes the weights as one safetensors file, aside and then renamed: `path` holds the old file or the whole new one.
// Takes over the reference to metadata.
static int stage_write_weights(const Stage *stage, const char *path, json_t *metadata, Dtype dtype) {
    char aside[PATH_MAX];
    const char *prefix = "";
    if (snprintf(aside, sizeof aside, "%s.tmp", path) >= (int)sizeof aside) {
        json_decref(metadata);
        return error_set("%.200s: the path is too long", path);
    }
    if (stage_write_arenas(stage, aside, metadata, dtype, 1, &stage->params, &prefix) || file_replace(aside, path)) {
        unlink(aside);
        return -1;
    }
    return 0;
}

// Writes the native file: weights, config and side files in one.
static int stage_save_native(const Stage *stage, const char *path, Dtype dtype) {
    json_t *metadata = json_copy(stage->side_files);
    json_t *config = config_to_json(&stage->config, dtype == DTYPE_F32 ? "float32" : "bfloat16");
    char *text = config != NULL ? json_dumps(config, JSON_COMPACT | JSON_FLOAT_DIGITS) : NULL;
    json_decref(config);
    if (metadata == NULL || text == NULL) return error_set("%s: out of memory", path);
    json_object_set_new(metadata, "format", json_string("pt"));
    json_object_set_new(metadata, "config", json_string(text));
    free(text);
    return stage_write_weights(stage, path, metadata, dtype);
}

// Writes a folder that transformers loads: config.json, model.safetensors and the side files.
static int stage_save_folder(const Stage *stage, const char *folder, Dtype dtype) {
    char path[PATH_MAX];
    const char *name;
    json_t *config = config_to_json(&stage->config, dtype == DTYPE_F32 ? "float32" : "bfloat16"), *side;
    char *text = config != NULL ? json_dumps(config, JSON_INDENT(2) | JSON_FLOAT_DIGITS) : NULL;
    json_decref(config);
    if (text == NULL) return error_set("%s: out of memory", folder);
    int result = file_make_folders(folder);
    if (result == 0) result = path_join(path, folder, "model.safetensors");
    if (result == 0) result = stage_write_weights(stage, path, json_pack("{s:s}", "format", "pt"), dtype);
    if (result == 0) result = path_join(path, folder, "config.json");
    if (result == 0) result = file_write_text(path, text);
    free(text);
    json_object_foreach(stage->side_files, name, side) {
        if (result == 0) result = path_join(path, folder, name);
        if (result == 0) result = file_write_text(path, json_string_value(side));
    }
    return result;
}

// ---------------------------------------------------------------------------------------------------------------------
// Forward and backward

// Keys and values of what has been seen, for generation: (T_max, 2*NKV*HD) a layer, k then v in a row.
typedef struct {
    floatX *rows; // (L, T_max, 2*NKV*HD)
    int T_max, used;
} KvCache;

// One layer: acts->x (N, C) -> out (N, C). With a cache the batch is one sequence whose first position is cache->used;
// it then attends to the cache and adds itself to it.
static void layer_forward(const Stage *stage, LayerActs *acts, const LayerTensors *w, floatX *out, int layer, int B,
                          int T, KvCache *cache, Stream *stream) {
    const Config *config = &stage->config;
    int N = B * T, C = config->channels, A = (int)stage->A, QKV = (int)stage->QKV, F = config->ffn;
    int NH = config->heads, NKV = config->kv_heads, HD = config->head_dim, KV = NKV * HD;
    rmsnorm_forward(acts->norm1, acts->rstd1, acts->x, w->attn_norm, N, C, config->norm_eps, stream);
    matmul_forward(acts->qkv, acts->norm1, stage_weight(stage, w->qkv), N, C, QKV, 0, stream);
    rope_forward(acts->qkv, stage->rope_cos, stage->rope_sin, stage->positions, N, NH + NKV, HD, QKV, stream);
    AttentionShape shape = {B, T, T, NH, NKV, HD, QKV, QKV};
    const floatX *k = acts->qkv + A, *v = k + KV;
    if (cache != NULL) {
        floatX *rows = cache->rows + (size_t)layer * cache->T_max * 2 * KV;
        for (int t = 0; t < T; t++)
            device_copy(rows + (size_t)(cache->used + t) * 2 * KV, k + (size_t)t * QKV, sizeof(floatX) * 2 * KV);
        shape.Tk = cache->used + T, shape.kv_stride = 2 * KV;
        k = rows, v = rows + KV;
    }
    attention_forward(acts->att, acts->lse, acts->qkv, k, v, shape, stream);
    device_copy(acts->mid, acts->x, sizeof(floatX) * (size_t)N * C);
    matmul_forward(acts->mid, acts->att, stage_weight(stage, w->o), N, A, C, 1, stream);
    rmsnorm_forward(acts->norm2, acts->rstd2, acts->mid, w->ffn_norm, N, C, config->norm_eps, stream);
    matmul_forward(acts->gate_up, acts->norm2, stage_weight(stage, w->gate_up), N, C, 2 * F, 0, stream);
    swiglu_forward(acts->hidden, acts->gate_up, N, F, stream);
    if (out == NULL) return; // recomputing: the output is known
    device_copy(out, acts->mid, sizeof(floatX) * (size_t)N * C);
    matmul_forward(out, acts->hidden, stage_weight(stage, w->down), N, F, C, 1, stream);
}

// d->dx: gradient of the layer's output in, of its input out. g: weight gradients, matrices overwritten on the first
// micro-batch of a step and added to afterwards.
static void layer_backward(const Stage *stage, const LayerActs *acts, const LayerTensors *w, const LayerTensors *g,
                           const Grads *d, int B, int T, int first, Stream *stream) {
    const Config *config = &stage->config;
    int N = B * T, C = config->channels, A = (int)stage->A, QKV = (int)stage->QKV, F = config->ffn;
    int NH = config->heads, NKV = config->kv_heads, HD = config->head_dim, KV = NKV * HD;
    AttentionShape shape = {B, T, T, NH, NKV, HD, QKV, QKV};
    const floatX *q = acts->qkv;
    matmul_backward(d->dhidden, g->down, d->dx, acts->hidden, stage_weight(stage, w->down), N, F, C, !first, stream);
    swiglu_backward(d->dwide, d->dhidden, acts->gate_up, N, F, stream);
    matmul_backward(d->dnorm, g->gate_up, d->dwide, acts->norm2, stage_weight(stage, w->gate_up), N, C, 2 * F, !first,
                    stream);
    rmsnorm_backward(d->dx, g->ffn_norm, d->dnorm, acts->mid, w->ffn_norm, acts->rstd2, N, C, stream);
    matmul_backward(d->dhidden, g->o, d->dx, acts->att, stage_weight(stage, w->o), N, A, C, !first, stream);
    attention_backward(d->dwide, d->dwide + A, d->dwide + A + KV, d->dhidden, acts->att, acts->lse, q, q + A,
                       q + A + KV, shape, stream);
    rope_backward(d->dwide, stage->rope_cos, stage->rope_sin, stage->positions, N, NH + NKV, HD, QKV, stream);
    matmul_backward(d->dnorm, g->qkv, d->dwide, acts->norm1, stage_weight(stage, w->qkv), N, C, QKV, !first, stream);
    rmsnorm_backward(d->dx, g->attn_norm, d->dnorm, acts->x, w->attn_norm, acts->rstd1, N, C, stream);
}

// tokens (B, T) -> stage->normed (B*T, C), the final norm's output.
static void stage_forward(Stage *stage, const uint32_t *tokens, int B, int T, KvCache *cache, Stream *stream) {
    const Config *config = &stage->config;
    int N = B * T, C = config->channels, L = config->n_layers;
    device_copy(stage->tokens, tokens, sizeof *tokens * (size_t)N);
    rope_positions(stage->positions, N, T, cache != NULL ? cache->used : 0, stream);
    embedding_forward(stage->acts[0].x, stage->tokens, stage->p.embed, N, C, stream);
    for (int l = 0; l < L; l++)
        layer_forward(stage, &stage->acts[l], &stage->p.layers[l], l + 1 < L ? stage->acts[l + 1].x : stage->last, l, B,
                      T, cache, stream);
    rmsnorm_forward(stage->normed, stage->rstd, stage->last, stage->p.norm, N, C, config->norm_eps, stream);
    if (cache != NULL) cache->used += T;
}

// Head and loss over chunks of rows, targets (N): returns the sum of the targets' losses in nats. In training, d.dnorm
// becomes the gradient of the normed output and the head's gradient is written, both times `scale` (1 / targets of the
// step).
static double head_loss(Stage *stage, const int32_t *targets, int N, int backward, float scale, int first,
                        Stream *stream) {
    int C = stage->config.channels, V = stage->config.vocab;
    device_copy(stage->targets, targets, sizeof *targets * (size_t)N);
    for (int n = 0; n < N; n += stage->logits_rows) {
        int rows = N - n < stage->logits_rows ? N - n : stage->logits_rows;
        floatX *normed = stage->normed + (size_t)n * C;
        matmul_forward(stage->logits, normed, stage_weight(stage, stage->p.head), rows, C, V, 0, stream);
        cross_entropy(stage->losses + n, stage->logits, stage->targets + n, rows, V, scale, backward, stream);
        if (!backward) continue;
        matmul_backward(stage->d.dnorm + (size_t)n * C, stage->g.head, stage->logits, normed,
                        stage_weight(stage, stage->p.head), rows, C, V, !first || n > 0, stream);
    }
    double sum = 0.0;
    for (int n = 0; n < N; n += (int)STAGING) { // rows in order: the sum has one value
        int rows = N - n < (int)STAGING ? N - n : (int)STAGING;
        device_copy(stage->staging, stage->losses + n, sizeof(float) * (size_t)rows);
        for (int i = 0; i < rows; i++) sum += (double)stage->staging[i];
    }
    return sum;
}

// Gradients of one micro-batch after stage_forward and head_loss.
static void stage_backward(Stage *stage, int B, int T, int first, Stream *stream) {
    const Config *config = &stage->config;
    int N = B * T, C = config->channels;
    device_zero(stage->d.dx, sizeof(floatX) * (size_t)N * C);
    rmsnorm_backward(stage->d.dx, stage->g.norm, stage->d.dnorm, stage->last, stage->p.norm, stage->rstd, N, C, stream);
    for (int l = config->n_layers - 1; l >= 0; l--) {
        if (stage->recompute && l + 1 < config->n_layers) // the last layer's are still there
            layer_forward(stage, &stage->acts[l], &stage->p.layers[l], NULL, l, B, T, NULL, stream);
        layer_backward(stage, &stage->acts[l], &stage->p.layers[l], &stage->g.layers[l], &stage->d, B, T, first,
                       stream);
    }
    embedding_backward(stage->g.embed, stage->d.dx, stage->tokens, N, C, stream);
}

// The sequences of one optimizer step.
typedef struct {
    uint32_t *tokens; // (b, T)
    int32_t *targets; // (b, T), -1 = not counted
    int b, T;
    int64_t n_valid;
} Batch;

static int batch_alloc(Batch *batch, int b, int T) {
    batch->b = b, batch->T = T, batch->n_valid = 0;
    batch->tokens = (uint32_t *)malloc(sizeof(uint32_t) * (size_t)b * (size_t)T);
    batch->targets = (int32_t *)malloc(sizeof(int32_t) * (size_t)b * (size_t)T);
    return batch->tokens != NULL && batch->targets != NULL ? 0 : error_set("out of memory for a batch");
}

static void batch_free(Batch *batch) {
    free(batch->tokens);
    free(batch->targets);
    batch->tokens = NULL, batch->targets = NULL;
}

// Seconds spent in the parts of a step, for `make bench`; NULL elsewhere.
typedef struct {
    double forward, backward, optimizer;
} StepTimes;

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

// Gradients of a whole step into stage->grads, micro-batch by micro-batch; *loss = mean over the step's targets in
// nats.
static int stage_gradients(Stage *stage, const Batch *batch, int micro_batch, double *loss, StepTimes *times,
                           Stream *stream) {
    float scale = batch->n_valid > 0 ? 1.0f / (float)batch->n_valid : 0.0f;
    double sum = 0.0;
    stage_round(stage, stream);
    for (int i = 0; i < stage->n_tensors; i++)
        if (stage->tensors[i].accumulated)
            device_zero(stage->grads + stage->tensors[i].offset, sizeof(float) * (size_t)stage->tensors[i].n);
    for (int b = 0; b < batch->b; b += micro_batch) {
        int B = batch->b - b < micro_batch ? batch->b - b : micro_batch, N = B * batch->T;
        size_t at = (size_t)b * (size_t)batch->T;
        double start = seconds();
        stage_forward(stage, batch->tokens + at, B, batch->T, NULL, stream);
        double middle = seconds();
        sum += head_loss(stage, batch->targets + at, N, 1, scale, b == 0, stream);
        double headed = seconds();
        stage_backward(stage, B, batch->T, b == 0, stream);
        if (times != NULL) { // of the head's three products one is forward
            times->forward += middle - start + (headed - middle) / 3.0;
            times->backward += seconds() - headed + (headed - middle) * 2.0 / 3.0;
        }
    }
    *loss = batch->n_valid > 0 ? sum / (double)batch->n_valid : 0.0;
    return stream_check(stream);
}

// ---------------------------------------------------------------------------------------------------------------------
// Optimizer

// Norm of all gradients of the stage.
static double stage_grad_norm(const Stage *stage, Stream *stream) {
    double sum = 0.0;
    for (int i = 0; i < stage->n_tensors; i++)
        sum += sum_of_squares(stage->grads + stage->tensors[i].offset, stage->tensors[i].n, stream);
    return sqrt(sum);
}

// One AdamW step (from 1) with gradients scaled to the clip norm (0: never).
static void stage_update(Stage *stage, AdamW adam, float lr, float wd, double grad_norm, float clip, int64_t step,
                         Stream *stream) {
    float scale = clip > 0.0f && grad_norm > (double)clip ? (float)((double)clip / (grad_norm + 1e-6)) : 1.0f;
    for (int i = 0; i < stage->n_tensors; i++) {
        const Tensor *t = &stage->tensors[i];
        adamw_update(stage->params + t->offset, stage->grads + t->offset, stage->m + t->offset, stage->v + t->offset,
                     t->n, adam, lr, t->decay ? wd : 0.0f, scale, step, stream);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Evaluation and generation

typedef struct {
    double loss; // mean nats a target
    int64_t n_targets, n_bytes;
    double bits_per_byte; // NaN where the tokenizer does not say bytes
} Evaluation;

// Held-out loss over the first windows of the split, at most max_tokens of them (0: all).
static int evaluate(Stage *stage, const Dataset *data, const Tokenizer *tokenizer, int64_t max_tokens, Evaluation *out,
                    Stream *stream) {
    const Split *split = &data->val;
    int T = data->T, B = stage->max_B;
    int64_t n_windows = split->n_windows, limit = (max_tokens + T - 1) / T;
    double sum = 0.0;
    Batch batch;
    memset(out, 0, sizeof *out);
    if (T > stage->max_T) return error_set("sequences of %d tokens in a stage made for %d", T, stage->max_T);
    if (max_tokens > 0 && limit < n_windows) n_windows = limit;
    if (batch_alloc(&batch, B, T)) {
        batch_free(&batch);
        return -1;
    }
    stage_round(stage, stream);
    for (int64_t w = 0; w < n_windows; w += B) {
        int b = n_windows - w < B ? (int)(n_windows - w) : B;
        for (int i = 0; i < b; i++) {
            size_t at = (size_t)i * (size_t)T;
            out->n_targets += split_read(split, w + i, T, batch.tokens + at, batch.targets + at);
        }
        stage_forward(stage, batch.tokens, b, T, NULL, stream);
        sum += head_loss(stage, batch.targets, b * T, 0, 0.0f, 0, stream);
        for (int n = 0; n < b * T; n++) {
            char bytes[8];
            if (batch.targets[n] >= 0) out->n_bytes += tokenizer_decode(tokenizer, bytes, (uint32_t)batch.targets[n]);
        }
    }
    batch_free(&batch);
    out->loss = out->n_targets > 0 ? sum / (double)out->n_targets : (double)NAN;
    out->bits_per_byte = out->n_bytes > 0 ? sum / log(2.0) / (double)out->n_bytes : (double)NAN;
    return stream_check(stream);
}

typedef struct {
    float probability;
    int id;
} Candidate;

static int candidate_order(const void *a, const void *b) {
    const Candidate *x = (const Candidate *)a, *y = (const Candidate *)b;
    if (x->probability != y->probability) return x->probability > y->probability ? -1 : 1;
    return x->id - y->id;
}

// Draws the next token from logits (V): temperature 0 is the likeliest, top_p keeps the smallest set of likeliest
// tokens that reaches that probability (Holtzman et al. 2020). u in [0, 1). -1 if a logit is not finite.
static int sample_token(const float *logits, int V, float temperature, float top_p, float u, Candidate *work) {
    float max = logits[0];
    double total = 0.0, kept = 0.0;
    int best = 0, n = 0;
    for (int v = 1; v < V; v++)
        if (logits[v] > max) max = logits[v], best = v;
    for (int v = 0; v < V; v++) {
        work[v].probability = expf((logits[v] - max) / (temperature > 0.0f ? temperature : 1.0f)), work[v].id = v;
        total += (double)work[v].probability;
    }
    if (!isfinite(total)) return error_set("the model gives logits that are not finite; see --check-weights");
    if (temperature <= 0.0f) return best;
    qsort(work, (size_t)V, sizeof *work, candidate_order);
    while (n < V && kept < (double)top_p * total) kept += (double)work[n++].probability;
    double point = (double)u * kept;
    for (int i = 0; i < n; i++) {
        point -= (double)work[i].probability;
        if (point < 0.0) return work[i].id;
    }
    return work[n - 1].id;
}

// Continues the prompt and writes the text to `out` as it comes. The stage must hold one sequence of the prompt's
// length; the result is a function of the weights, the prompt and the seed.
static int generate(Stage *stage, const Tokenizer *tokenizer, const char *prompt, const Options *opts, FILE *out,
                    Stream *stream) {
    int V = stage->config.vocab, n = 0, result = 0;
    int64_t length = (int64_t)strlen(prompt);
    int T_max = stage->max_T < stage->config.context ? stage->max_T : stage->config.context;
    if (tokenizer_takes_text(tokenizer, "--generate")) return -1;
    uint32_t *tokens = (uint32_t *)malloc(sizeof(uint32_t) * (size_t)(length + 1));
    Candidate *work = (Candidate *)malloc(sizeof(Candidate) * (size_t)V);
    float *logits = (float *)malloc(sizeof(float) * (size_t)V);
    KvCache cache = {NULL, T_max, 0};
    cache.rows = (floatX *)device_alloc(sizeof(floatX) * (size_t)stage->config.n_layers * (size_t)T_max * 2 *
                                        (size_t)config_kv_dim(&stage->config));
    if (tokens == NULL || work == NULL || logits == NULL || cache.rows == NULL) {
        result = error_set("out of memory for generation");
    } else {
        if (tokenizer->bos >= 0) tokens[n++] = (uint32_t)tokenizer->bos;
        n += (int)tokenizer_encode(tokenizer, tokens + n, prompt, length);
        if (n >= T_max)
            result = error_set("--generate: the prompt has %d tokens, the context is %d; nothing is left to generate",
                               n, T_max);
    }
    stage_round(stage, stream);
    for (int i = 0; result == 0 && i < opts->max_tokens && cache.used + n <= T_max; i++) {
        char text[8] = "";
        stage_forward(stage, tokens, 1, n, &cache, stream);
        matmul_forward(stage->logits, stage->normed + (size_t)(n - 1) * stage->config.channels,
                       stage_weight(stage, stage->p.head), 1, stage->config.channels, V, 0, stream);
        if ((result = stream_check(stream)) != 0) break;
        float u = rand_uniform((uint64_t)opts->seed, RAND_SAMPLE, (uint64_t)i);
        device_copy(logits, stage->logits, sizeof(float) * (size_t)V);
        int id = sample_token(logits, V, opts->temperature, opts->top_p, u, work);
        if (id < 0) result = -1;
        if (id < 0 || id == tokenizer->eos) break;
        int n_bytes = tokenizer_decode(tokenizer, text, (uint32_t)id);
        fwrite(text, 1, (size_t)n_bytes, out);
        fflush(out);
        tokens[0] = (uint32_t)id, n = 1;
    }
    device_free(cache.rows);
    free(logits);
    free(work);
    free(tokens);
    return result;
}

// ---------------------------------------------------------------------------------------------------------------------
// Run: the output folder

static volatile sig_atomic_t interrupts; // Ctrl-C: the first finishes the step and saves, the second leaves at once

static void on_interrupt(int signal_number) {
    (void)signal_number;
    if (++interrupts > 1) _exit(130);
}

// Where a training stands; saved with every checkpoint.
typedef struct {
    int64_t step;       // steps done
    int64_t adam_steps; // of them, those that updated the weights
    int64_t samples;    // sequences taken from the data
    int64_t tokens;     // tokens trained on
    double elapsed;     // seconds, over all sessions of the run
    double best_val;    // lowest validation loss, infinity before the first
} Progress;

typedef struct {
    char path[PATH_MAX];
    FILE *log;
    int lock;           // descriptor that holds the folder
    int log_failed;     // a line could not be written; said once
    int terminal;       // stdout is one: a live line instead of a line a step
    int live;           // the live line is on the screen
    int64_t saved_step; // newest checkpoint of this process, -1: none
} Run;

// Everything a training or an evaluation works with.
typedef struct {
    Options opts;
    unsigned char given[CLI_OPTIONS];
    Stage stage;
    Dataset data;
    Tokenizer tokenizer;
    Stream *stream;
    Run run;
    Progress progress;
    // decided from the options, the model and the data
    char model_path[PATH_MAX]; // what is loaded: -m, or the checkpoint a run goes on from; "" for --init
    int B, T, threads;
    Precision precision;
    int64_t n_steps, warmup, val_every, save_every;
} Trainer;

static void run_clear_line(Run *run) {
    if (run->live) printf("\r\033[K");
    run->live = 0;
}

// 1 if the option was on the command line.
static int is_given(const Trainer *trainer, const char *name) {
    for (int i = 0; i < OPTION_COUNT; i++)
        if (strcmp(option_table[i].name, name) == 0) return trainer->given[i];
    return 0;
}

// Highest N of the folders runs/N, 0 if there is none.
static int run_highest(void) {
    DIR *folder = opendir("runs");
    struct dirent *entry;
    int highest = 0, number, used;
    if (folder == NULL) return 0;
    while ((entry = readdir(folder)) != NULL)
        if (sscanf(entry->d_name, "%d%n", &number, &used) == 1 && entry->d_name[used] == '\0' && number > highest)
            highest = number;
    closedir(folder);
    return highest;
}

// Names the folder: -o, else for a new run the next runs/N, else the last of them.
static int run_find(Run *run, const Options *opts) {
    int number = run_highest();
    if (opts->out[0] != '\0') {
        strcpy(run->path, opts->out); // an option is shorter than a path
        return 0;
    }
    if (opts->resume && number == 0) return error_set("--resume: there is no run under runs/; name its folder with -o");
    snprintf(run->path, sizeof run->path, "runs/%d", opts->resume ? number : number + 1);
    return 0;
}

// Takes the folder for this process until it ends; two that write one run would ruin it.
static int run_lock(Run *run) {
    char path[PATH_MAX];
    if (path_join(path, run->path, "lock")) return -1;
    run->lock = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (run->lock < 0) return error_set("%s: open: %s", path, strerror(errno));
    if (flock(run->lock, LOCK_EX | LOCK_NB) == 0) return 0;
    return error_set("%s is in use by another process; wait for it, or give another -o", run->path);
}

// Makes the folder of a new run and takes it. A number that another start has taken meanwhile is passed over.
static int run_create(Run *run, const Options *opts) {
    char parent[PATH_MAX], path[PATH_MAX];
    path_parent(parent, run->path);
    if (file_make_folders(parent)) return -1;
    while (mkdir(run->path, 0777) != 0) {
        if (errno != EEXIST) return error_set("%s: mkdir: %s", run->path, strerror(errno));
        if (opts->out[0] != '\0' && !file_is_folder(run->path))
            return error_set("%s: exists and is not a folder", run->path);
        if (opts->out[0] != '\0') break;
        snprintf(run->path, sizeof run->path, "runs/%d", run_highest() + 1);
    }
    if (file_sync_folder(parent) || run_lock(run) || path_join(path, run->path, "log.jsonl")) return -1;
    if (!file_exists(path) && checkpoint_latest(run->path) < 0) return 0;
    return error_set("%s already holds a run; go on with it by --resume, or give another -o", run->path);
}

// Adds a line to log.jsonl. A log that cannot be written is said once and does not stop a training.
static void run_append(Run *run, json_t *line) {
    char *text = line != NULL ? json_dumps(line, JSON_COMPACT | JSON_FLOAT_DIGITS) : NULL;
    json_decref(line);
    int failed = text == NULL || fprintf(run->log, "%s\n", text) < 0 || fflush(run->log) != 0;
    free(text);
    if (!failed || run->log_failed) return;
    run_clear_line(run);
    printf("train: write %s/log.jsonl: %s; the run goes on, its log has a gap\n", run->path, strerror(errno));
    run->log_failed = 1;
}

// Opens log.jsonl; a resumed run drops what was logged after the step it goes on from.
static int run_open_log(Run *run, int64_t resume_step) {
    char path[PATH_MAX], aside[PATH_MAX], *line = NULL;
    size_t room = 0;
    ssize_t n;
    FileWriter kept;
    if (path_join(path, run->path, "log.jsonl") || path_join(aside, run->path, "log.jsonl.tmp")) return -1;
    FILE *old = resume_step >= 0 ? fopen(path, "re") : NULL;
    if (old != NULL) {
        if (file_writer_open(&kept, aside)) {
            fclose(old);
            return -1;
        }
        while ((n = getline(&line, &room, old)) > 0) {
            json_t *json = json_loads(line, 0, NULL);
            const json_t *step = json_object_get(json, "step");
            int keep = json != NULL && (step == NULL || (resume_step > 0 && json_integer_value(step) <= resume_step));
            json_decref(json);
            if (keep) file_write(&kept, line, (size_t)n);
        }
        free(line);
        fclose(old);
        if (file_writer_close(&kept) || file_replace(aside, path)) {
            unlink(aside);
            return -1;
        }
    }
    run->log = fopen(path, "ae");
    return run->log != NULL ? 0 : error_set("%s: open: %s", path, strerror(errno));
}

// The start line: every setting, the versions and the machine.
static void run_log_start(Trainer *trainer, const char *kind) {
    const dnnl_version_t *dnnl = dnnl_version();
    char library[64];
    snprintf(library, sizeof library, "%d.%d.%d", dnnl->major, dnnl->minor, dnnl->patch);
    json_t *line =
        json_pack("{s:s, s:s, s:s, s:s, s:i, s:s, s:I, s:I, s:I, s:I, s:i, s:o, s:o}", "type", kind, "meshtune",
                  MESHTUNE_VERSION, "onednn", library, "compiler", __VERSION__, "threads", trainer->threads,
                  "precision", trainer->precision == PRECISION_BF16 ? "bf16" : "fp32", "parameters",
                  (json_int_t)trainer->stage.n_params, "train_windows", (json_int_t)trainer->data.train.n_windows,
                  "steps", (json_int_t)trainer->n_steps, "warmup", (json_int_t)trainer->warmup, "seq", trainer->T,
                  "options", cli_to_json(option_table, OPTION_COUNT, &trainer->opts), "config",
                  config_to_json(&trainer->stage.config, "float32"));
    run_append(&trainer->run, line);
}

// The training data's hash as run.json holds it.
static json_t *data_hash(const Trainer *trainer) {
    char text[32];
    snprintf(text, sizeof text, "%016llx", (unsigned long long)split_hash(&trainer->data.train));
    return json_string(text);
}

// What run.json of a checkpoint says.
static json_t *progress_to_json(const Trainer *trainer) {
    const Progress *p = &trainer->progress;
    return json_pack("{s:s, s:I, s:I, s:I, s:I, s:f, s:o, s:o, s:o}", "meshtune", MESHTUNE_VERSION, "step",
                     (json_int_t)p->step, "adam_steps", (json_int_t)p->adam_steps, "samples", (json_int_t)p->samples,
                     "tokens", (json_int_t)p->tokens, "elapsed", p->elapsed, "best_val",
                     isfinite(p->best_val) ? json_real(p->best_val) : json_null(), "data_hash", data_hash(trainer),
                     "options", cli_to_json(option_table, OPTION_COUNT, &trainer->opts));
}

static int stage_is_finite(const Stage *stage, Stream *stream) {
    double sum = 0.0;
    for (int i = 0; i < stage->n_tensors; i++)
        sum += sum_of_squares(stage->params + stage->tensors[i].offset, stage->tensors[i].n, stream);
    return isfinite(sum);
}

// Saves step_N: model.bin (fp32, usable with -m), optimizer.bin (both moments), run.json. A weight that is not a number
// is never saved. On failure what was whole before is still whole.
static int run_save(Trainer *trainer) {
    char folder[PATH_MAX], path[PATH_MAX];
    const Stage *stage = &trainer->stage;
    Run *run = &trainer->run;
    int64_t step = trainer->progress.step;
    float *const moments[2] = {stage->m, stage->v};
    const char *const prefixes[2] = {"m.", "v."};
    if (run->saved_step == step) return 0;
    if (!stage_is_finite(stage, trainer->stream))
        return error_set("step %lld: a weight is not finite; not saved", (long long)step);
    json_t *json = progress_to_json(trainer);
    char *text = json != NULL ? json_dumps(json, JSON_INDENT(1)) : NULL;
    json_decref(json);
    if (text == NULL) return error_set("out of memory for run.json");
    int result = checkpoint_begin(folder, run->path, step);
    if (result == 0) result = path_join(path, folder, "model.bin");
    if (result == 0) result = stage_save_native(stage, path, DTYPE_F32);
    if (result == 0) result = path_join(path, folder, "optimizer.bin");
    if (result == 0) result = stage_write_arenas(stage, path, NULL, DTYPE_F32, 2, moments, prefixes);
    if (result == 0) result = path_join(path, folder, "run.json");
    if (result == 0) result = file_write_text(path, text);
    free(text);
    if (result == 0) result = checkpoint_commit(run->path, step);
    if (result == 0) {
        run->saved_step = step;
        checkpoint_sweep(run->path, trainer->opts.keep);
    }
    if (result != 0 && checkpoint_path(path, run->path, step, ".tmp") == 0 && file_exists(path)) {
        char reason[ERROR_MAX]; // keep the first message: clearing up may fail for the same reason
        memcpy(reason, error_message, sizeof reason);
        file_remove_folder(path);
        memcpy(error_message, reason, sizeof reason);
    }
    return result;
}

// Keeps the weights with the lowest validation loss as best.bin.
static int run_save_best(Trainer *trainer) {
    char path[PATH_MAX];
    if (path_join(path, trainer->run.path, "best.bin")) return -1;
    if (!stage_is_finite(&trainer->stage, trainer->stream))
        return error_set("a weight is not finite; %s not saved", path);
    return stage_save_native(&trainer->stage, path, DTYPE_F32);
}

// Reads the state to go on from: run.json of the latest checkpoint or, if the run ended before its first, the start
// line of its log.
static int resume_read(Trainer *trainer, json_t **state) {
    char folder[PATH_MAX], path[PATH_MAX], *line = NULL;
    json_error_t error;
    Run *run = &trainer->run;
    size_t room = 0;
    if (path_join(path, run->path, "log.jsonl")) return -1;
    if (checkpoint_latest(run->path) < 0 && !file_exists(path))
        return error_set("--resume: %s holds no run", run->path);
    if (!trainer->opts.dry_run && run_lock(run)) return -1; // before reading, so that nobody writes meanwhile
    int64_t step = checkpoint_latest(run->path);
    if (step >= 0) {
        if (checkpoint_path(folder, run->path, step, "") || path_join(path, folder, "run.json")) return -1;
        if (path_join(trainer->model_path, folder, "model.bin")) return -1;
        *state = json_load_file(path, 0, &error);
        if (*state == NULL) return error_set("%s: line %d: %s", path, error.line, error.text);
        if (json_size(json_object_get(*state, "step")) == step) return 0;
        return error_set("%s: is not of step %lld, whose folder it lies in", path, (long long)step);
    }
    FILE *log = fopen(path, "re");
    if (log != NULL && getline(&line, &room, log) > 0) *state = json_loads(line, 0, NULL);
    if (log != NULL) fclose(log);
    free(line);
    if (json_is_object(json_object_get(*state, "options"))) return 0;
    return error_set("--resume: %s holds no checkpoint, and its log has no start line", run->path);
}

// Takes the settings of the run that are not given on this command line.
static int resume_settings(Trainer *trainer, json_t **state) {
    if (resume_read(trainer, state)) return -1;
    const json_t *saved = json_object_get(*state, "options");
    if (cli_from_json(option_table, OPTION_COUNT, &trainer->opts, trainer->given, saved)) return -1;
    trainer->opts.resume = 1;
    if (!is_given(trainer, "stop-after")) trainer->opts.stop_after = 0; // of a session, not of the run
    json_t *now = cli_to_json(option_table, OPTION_COUNT, &trainer->opts);
    int result = 0;
    for (int i = 0; i < OPTION_COUNT && result == 0; i++) {
        const char *name = option_table[i].name;
        if (!trainer->given[i] || json_equal(json_object_get(saved, name), json_object_get(now, name))) continue;
        if (strcmp(name, "model") == 0 || strcmp(name, "init") == 0 || strcmp(name, "seq") == 0)
            result = error_set("--resume: --%s differs from the run's; leave it out, or start a new run", name);
        else if (strcmp(name, "resume") != 0 && strcmp(name, "stop-after") != 0 && strcmp(name, "out") != 0 &&
                 strcmp(name, "dry-run") != 0)
            printf("resume: --%s differs from the run's; the run goes on with the new value\n", name);
    }
    json_decref(now);
    return result;
}

// Position and moments from the checkpoint whose weights are loaded.
static int resume_state(Trainer *trainer, const json_t *state) {
    char folder[PATH_MAX], path[PATH_MAX], name[128];
    Progress *p = &trainer->progress;
    Stage *stage = &trainer->stage;
    SafeTensors file;
    int result = 0;
    const struct {
        const char *name;
        int64_t *field;
    } counters[] = {
        {"step", &p->step}, {"adam_steps", &p->adam_steps}, {"samples", &p->samples}, {"tokens", &p->tokens}};
    for (int i = 0; i < 4; i++) {
        *counters[i].field = json_size(json_object_get(state, counters[i].name));
        if (*counters[i].field < 0)
            return error_set("--resume: %s in the checkpoint's run.json is not a count", counters[i].name);
    }
    p->elapsed = json_real_value(json_object_get(state, "elapsed"));
    const json_t *best = json_object_get(state, "best_val"), *saved_hash = json_object_get(state, "data_hash");
    p->best_val = json_is_real(best) ? json_real_value(best) : (double)INFINITY;
    json_t *hash = data_hash(trainer);
    int same_data = json_equal(saved_hash, hash);
    json_decref(hash);
    if (!same_data)
        return error_set("--resume: the data differ from the run's; to train on other data start a new run with -m %s",
                         trainer->run.path);
    if (checkpoint_path(folder, trainer->run.path, p->step, "") || path_join(path, folder, "optimizer.bin")) return -1;
    if (safetensors_open(&file, path)) return -1;
    for (int a = 0; a < 2 && result == 0; a++) {
        float *arena = a == 0 ? stage->m : stage->v;
        for (int i = 0; i < stage->n_tensors && result == 0; i++) {
            snprintf(name, sizeof name, "%s%s", a == 0 ? "m." : "v.", stage->tensors[i].name);
            const SafeTensor *tensor = safetensors_find(&file, name);
            if (tensor == NULL || tensor->dtype != DTYPE_F32 || safetensor_count(tensor) != stage->tensors[i].n)
                result = error_set("%s: tensor %s is missing or of another shape", path, name);
            else
                result = stage_read_tensor(stage, arena, &stage->tensors[i], tensor, 0);
        }
    }
    safetensors_close(&file);
    trainer->run.saved_step = p->step;
    return result;
}

// ---------------------------------------------------------------------------------------------------------------------
// Plan: what a run needs and does, printed before it starts and by --dry-run

static void print_count(const char *label, double value, const char *unit) {
    const char *scale = value >= 1e9 ? " G" : value >= 1e6 ? " M" : value >= 1e3 ? " k" : " ";
    double divisor = value >= 1e9 ? 1e9 : value >= 1e6 ? 1e6 : value >= 1e3 ? 1e3 : 1.0;
    printf("  %-28s %10.2f%s%s\n", label, value / divisor, scale, unit);
}

static void print_plan(const Trainer *trainer) {
    const Stage *stage = &trainer->stage;
    const Config *c = &stage->config;
    const Options *opts = &trainer->opts;
    StageBytes bytes = stage_bytes(stage, trainer->precision, trainer->threads);
    int64_t epoch = trainer->data.train.n_windows;
    char schedule[32];
    printf("model: %d layers, d %d, heads %d/%d of %d, ffn %d, vocabulary %d, context %d, %s head\n", c->n_layers,
           c->channels, c->heads, c->kv_heads, c->head_dim, c->ffn, c->vocab, c->context, c->tied ? "tied" : "own");
    print_count("parameters", (double)stage->n_params, "");
    printf("memory:\n");
    print_count("parameters (fp32)", (double)bytes.params, "B");
    if (bytes.rounded > 0) print_count("parameters (bf16 copy)", (double)bytes.rounded, "B");
    if (stage->training) {
        print_count("gradients (fp32)", (double)bytes.grads, "B");
        print_count("AdamW moments (2 x fp32)", (double)bytes.moments, "B");
    }
    print_count(stage->recompute ? "activations (recompute)" : "activations", (double)bytes.acts, "B");
    print_count("scratch of the ops", (double)bytes.scratch, "B");
    print_count("in all", (double)stage_bytes_sum(&bytes), "B");
    print_count("this machine has", (double)memory_limit(), "B");
    if (!stage->training) return;
    cli_choice_name(schedule, sizeof schedule, lr_shapes, opts->schedule_lr);
    printf("run: %lld steps of %d x %d tokens in micro-batches of %d, %.2f epochs of %lld windows\n",
           (long long)trainer->n_steps, opts->batch, trainer->T, trainer->B,
           epoch > 0 ? (double)trainer->n_steps * opts->batch / (double)epoch : 0.0, (long long)epoch);
    printf("     lr %g (%s), warm-up %lld, weight decay %g, clip %g, seed %lld, %s, %d threads\n", (double)opts->lr,
           schedule, (long long)trainer->warmup, (double)opts->wd, (double)opts->clip, (long long)opts->seed,
           trainer->precision == PRECISION_BF16 ? "bf16 products" : "fp32 products", trainer->threads);
}

// ---------------------------------------------------------------------------------------------------------------------
// Training

// Fills the batch with the next sequences of the data's order.
static void next_batch(Trainer *trainer, Batch *batch) {
    const Split *train = &trainer->data.train;
    batch->n_valid = 0;
    for (int b = 0; b < batch->b; b++) {
        size_t at = (size_t)b * (size_t)batch->T;
        int64_t window = split_order(train, trainer->progress.samples + b, (uint64_t)trainer->opts.seed);
        batch->n_valid += split_read(train, window, batch->T, batch->tokens + at, batch->targets + at);
    }
    trainer->progress.samples += batch->b;
    trainer->progress.tokens += (int64_t)batch->b * batch->T;
}

// What one step did.
typedef struct {
    double loss, grad_norm;
    float lr;
    int skipped; // loss or gradient was not finite: weights untouched
} StepResult;

static int train_step(Trainer *trainer, Batch *batch, StepResult *result, StepTimes *times) {
    const Options *opts = &trainer->opts;
    Progress *p = &trainer->progress;
    AdamW adam = {opts->beta1, opts->beta2, opts->adam_eps};
    next_batch(trainer, batch);
    result->lr =
        lr_at((LrShape)opts->schedule_lr, opts->lr, opts->lr_final, p->step, trainer->warmup, trainer->n_steps);
    if (stage_gradients(&trainer->stage, batch, trainer->B, &result->loss, times, trainer->stream)) return -1;
    double start = seconds();
    result->grad_norm = stage_grad_norm(&trainer->stage, trainer->stream);
    result->skipped = !isfinite(result->loss) || !isfinite(result->grad_norm);
    if (!result->skipped)
        stage_update(&trainer->stage, adam, result->lr, opts->wd, result->grad_norm, opts->clip, ++p->adam_steps,
                     trainer->stream);
    if (times != NULL) times->optimizer += seconds() - start;
    p->step++;
    return 0;
}

// Prints a step: a live line on a terminal, a plain line elsewhere.
static void print_step(Trainer *trainer, const StepResult *result, double tok_s, double step_seconds) {
    Run *run = &trainer->run;
    long long step = (long long)trainer->progress.step, left = (long long)trainer->n_steps - step;
    int eta = (int)fmin((double)left * step_seconds, 3.6e8);
    char line[256];
    snprintf(line, sizeof line, "step %lld/%lld  loss %.4f  lr %.2e  norm %.3f  %.0f tok/s  ETA %d:%02d:%02d", step,
             (long long)trainer->n_steps, result->loss, (double)result->lr, result->grad_norm, tok_s, eta / 3600,
             eta / 60 % 60, eta % 60);
    if (run->terminal) {
        printf("\r\033[K%s", line);
        run->live = 1;
    } else {
        printf("%s\n", line);
    }
    fflush(stdout);
}

// Validation loss, printed; keeps the best weights. *loss is NaN when there is no held-out data.
static int validate(Trainer *trainer, double *loss) {
    Evaluation eval;
    *loss = (double)NAN;
    if (trainer->data.val.n_windows == 0) return 0;
    if (evaluate(&trainer->stage, &trainer->data, &trainer->tokenizer, trainer->opts.val_tokens, &eval,
                 trainer->stream))
        return -1;
    *loss = eval.loss;
    run_clear_line(&trainer->run);
    printf("step %lld  validation loss %.4f", (long long)trainer->progress.step, eval.loss);
    if (isfinite(eval.bits_per_byte)) printf("  %.4f bits a byte", eval.bits_per_byte);
    printf("\n");
    fflush(stdout);
    if (!(eval.loss < trainer->progress.best_val)) return 0;
    if (trainer->progress.step > 0 && run_save_best(trainer))
        printf("train: %s; the run goes on\n", error_message);
    else
        trainer->progress.best_val = eval.loss;
    return 0;
}

static int print_sample(Trainer *trainer) {
    static const char prompt[] = "";
    run_clear_line(&trainer->run);
    printf("--- sample at step %lld\n", (long long)trainer->progress.step);
    int result = generate(&trainer->stage, &trainer->tokenizer, prompt, &trainer->opts, stdout, trainer->stream);
    printf("\n---\n");
    return result;
}

static int is_due(int64_t step, int64_t every) {
    return every > 0 && step % every == 0;
}

enum { MAX_SKIPPED = 20 }; // steps in a row without a finite gradient before the run gives up

// What is safe on the disk, in words.
static const char *saved_text(const Run *run, char *text, size_t size) {
    if (run->saved_step >= 0)
        snprintf(text, size, "step %lld is whole", (long long)run->saved_step);
    else
        snprintf(text, size, "nothing is saved yet");
    return text;
}

// Ends a run whose gradients stay infinite. The skipped updates left the weights as they were, so they are saved.
static int give_up(Trainer *trainer) {
    char text[64], reason[ERROR_MAX] = "";
    if (run_save(trainer)) snprintf(reason, sizeof reason, " (%.700s)", error_message);
    return error_set("%d steps in a row gave no finite gradient; stopped, %s%.800s", MAX_SKIPPED,
                     saved_text(&trainer->run, text, sizeof text), reason);
}

static int train_loop(Trainer *trainer, Batch *batch) {
    const Options *opts = &trainer->opts;
    Progress *p = &trainer->progress;
    Run *run = &trainer->run;
    int64_t stop = opts->stop_after > 0 && opts->stop_after < trainer->n_steps ? opts->stop_after : trainer->n_steps;
    int skipped_in_a_row = 0;
    double val_loss, step_seconds = 0.0;
    char text[64], reason[ERROR_MAX];
    if (p->step == 0) {
        if (validate(trainer, &val_loss)) return -1;
        if (isfinite(val_loss)) run_append(run, json_pack("{s:i, s:f}", "step", 0, "val_loss", val_loss));
    }
    while (p->step < stop && !interrupts) {
        StepResult result;
        double start = seconds();
        if (train_step(trainer, batch, &result, NULL)) return -1;
        double took = seconds() - start;
        step_seconds = step_seconds == 0.0 ? took : 0.9 * step_seconds + 0.1 * took;
        p->elapsed += took;
        double tok_s = (double)batch->b * batch->T / took;
        print_step(trainer, &result, tok_s, step_seconds);
        skipped_in_a_row = result.skipped ? skipped_in_a_row + 1 : 0;
        if (result.skipped) {
            run_clear_line(run);
            printf("step %lld: loss or gradient is not finite; update skipped (%lld in all)\n", (long long)p->step,
                   (long long)(p->step - p->adam_steps));
        }
        json_t *line = json_pack("{s:I, s:o, s:f, s:o, s:I, s:f, s:f}", "step", (json_int_t)p->step, "loss",
                                 isfinite(result.loss) ? json_real(result.loss) : json_null(), "lr", (double)result.lr,
                                 "grad_norm", isfinite(result.grad_norm) ? json_real(result.grad_norm) : json_null(),
                                 "tokens", (json_int_t)p->tokens, "tok_s", tok_s, "elapsed", p->elapsed);
        if (result.skipped) json_object_set_new(line, "skipped", json_true());
        if (is_due(p->step, trainer->val_every) || p->step == trainer->n_steps) {
            if (validate(trainer, &val_loss)) return -1;
            if (isfinite(val_loss)) json_object_set_new(line, "val_loss", json_real(val_loss));
        }
        run_append(run, line);
        if (skipped_in_a_row == MAX_SKIPPED) return give_up(trainer);
        if (is_due(p->step, opts->sample_every) && print_sample(trainer)) return -1;
        if (is_due(p->step, trainer->save_every) && p->step < stop && run_save(trainer)) {
            run_clear_line(run);
            printf("train: %s; %s; training goes on\n", error_message, saved_text(run, text, sizeof text));
        }
    }
    run_clear_line(run);
    if (run_save(trainer)) {
        memcpy(reason, error_message, sizeof reason);
        return error_set("%.700s; %s", reason, saved_text(run, text, sizeof text));
    }
    if (p->step < trainer->n_steps)
        printf("stopped after step %lld of %lld, saved; go on with: ./train -o %s --resume\n", (long long)p->step,
               (long long)trainer->n_steps, run->path);
    else
        printf("done: %lld steps in %.0f s; the model is %s/latest/model.bin\n", (long long)p->step, p->elapsed,
               run->path);
    return 0;
}

// The whole of a training once model and data are loaded.
static int train(Trainer *trainer, const json_t *resume) {
    Run *run = &trainer->run;
    Batch batch;
    int resumed = json_object_get(resume, "step") != NULL;
    run->terminal = isatty(STDOUT_FILENO), run->saved_step = -1;
    trainer->progress.best_val = (double)INFINITY;
    if (resume == NULL && run_create(run, &trainer->opts)) return -1;
    if (resumed && resume_state(trainer, resume)) return -1;
    if (trainer->progress.step >= trainer->n_steps) {
        printf("%s is complete: %lld of %lld steps; a larger -n goes on\n", run->path,
               (long long)trainer->progress.step, (long long)trainer->n_steps);
        return 0;
    }
    checkpoint_sweep(run->path, 0);
    if (run_open_log(run, resume != NULL ? trainer->progress.step : -1)) return -1;
    run_log_start(trainer, resumed ? "resume" : "start");
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_handler = on_interrupt, action.sa_flags = SA_RESTART;
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
    printf("run: %s\n", run->path);
    int result = batch_alloc(&batch, trainer->opts.batch, trainer->T);
    if (result == 0) result = train_loop(trainer, &batch);
    batch_free(&batch);
    if (run->log != NULL) fclose(run->log);
    return result;
}

// ---------------------------------------------------------------------------------------------------------------------
// main

static const char medical_train[] = "data/medical/train.jsonl", medical_val[] = "data/medical/val.jsonl";

// Opens the model and its tokenizer into the stage's table, or makes the table for --init.
static int open_model(Trainer *trainer, ModelFile *file) {
    const Options *opts = &trainer->opts;
    memset(file, 0, sizeof *file);
    if (trainer->model_path[0] == '\0') {
        Config config;
        if (opts->model[0] != '\0' && opts->init[0] != '\0') return error_set("give -m or --init, not both");
        if (opts->model[0] == '\0' && opts->init[0] == '\0')
            return error_set("no model: give -m FILE, or --init for a random one (--help lists everything)");
        if (opts->init[0] != '\0') {
            if (config_from_spec(&config, opts->init) || stage_table(&trainer->stage, &config)) return -1;
            trainer->stage.side_files = config.vocab == BYTE_VOCAB ? tokenizer_byte_files() : json_object();
            tokenizer_open(&trainer->tokenizer, NULL, config.vocab);
            return trainer->stage.side_files != NULL ? 0 : error_set("out of memory for the tokenizer");
        }
        snprintf(trainer->model_path, sizeof trainer->model_path, "%s", opts->model);
    }
    if (model_file_open(file, trainer->model_path)) return -1;
    if (stage_table(&trainer->stage, &file->config) || stage_match(&trainer->stage, file)) return -1;
    tokenizer_open(&trainer->tokenizer, json_string_value(json_object_get(file->side_files, "tokenizer.json")),
                   file->config.vocab);
    return 0;
}

static int open_data(Trainer *trainer) {
    Options *opts = &trainer->opts;
    Dataset *data = &trainer->data;
    data->val_share = opts->val_data.n > 0 ? 0.0 : (double)opts->val_fraction;
    if (opts->data.n == 0 && !(opts->eval && opts->val_data.n > 0)) {
        if (!file_exists(medical_train))
            return error_set("no -d given, and the medical text is not prepared: run data/medical/prepare.sh");
        printf("data: no -d given, the prepared medical text is used (%s)\n", medical_train);
        strcpy(opts->data.item[opts->data.n++], medical_train);
        if (opts->val_data.n == 0) strcpy(opts->val_data.item[opts->val_data.n++], medical_val);
        data->val_share = 0.0;
    }
    for (int i = 0; i < opts->data.n; i++)
        if (dataset_read(data, &data->train, opts->data.item[i], &trainer->tokenizer)) return -1;
    for (int i = 0; i < opts->val_data.n; i++)
        if (dataset_read(data, &data->val, opts->val_data.item[i], &trainer->tokenizer)) return -1;
    dataset_finish(data, trainer->T);
    printf("data: %lld tokens for training, %lld held out", (long long)data->train.n_tokens,
           (long long)data->val.n_tokens);
    if (data->n_documents > 0) printf(", from %lld documents", (long long)data->n_documents);
    if (data->n_empty > 0) printf(", %lld empty ones left out", (long long)data->n_empty);
    if (data->n_repaired > 0) printf(", %lld with broken UTF-8 repaired", (long long)data->n_repaired);
    printf("\n");
    return 0;
}

enum { MAX_ROWS = 1 << 22 }; // tokens computed at once; counts of rows are ints

// Settings that were left to the program.
static int decide(Trainer *trainer) {
    const Options *opts = &trainer->opts;
    const Config *config = &trainer->stage.config;
    if (opts->mask_rate != 0.0f || opts->replicas != 1 || opts->stages != 1)
        return error_set("there is no mesh yet: -p 0, -x 1 and -y 1 are the only values");
    if (opts->sample_every > 0 && tokenizer_takes_text(&trainer->tokenizer, "--sample-every")) return -1;
    trainer->T = opts->seq > 0 ? opts->seq : config->context < 2048 ? config->context : 2048;
    if (trainer->T > config->context)
        return error_set("--seq %d is beyond the model's context of %d", trainer->T, config->context);
    trainer->B = opts->micro_batch > 0 ? opts->micro_batch : 1024 / trainer->T > 1 ? 1024 / trainer->T : 1;
    if (trainer->B > opts->batch) trainer->B = opts->batch;
    if ((int64_t)trainer->B * trainer->T > MAX_ROWS)
        return error_set("--micro-batch %d of --seq %d: at most %d tokens at once", trainer->B, trainer->T, MAX_ROWS);
    trainer->threads = opts->threads > 0 ? opts->threads : omp_get_num_procs();
    if (opts->precision == PRECISION_OPTION_BF16 && !device_has_bf16())
        return error_set("--precision bf16: this CPU does not multiply bf16; use fp32");
    trainer->precision =
        opts->precision == PRECISION_OPTION_FP32 || !device_has_bf16() ? PRECISION_FP32 : PRECISION_BF16;
    return 0;
}

// The length of the run, once the data are known.
static int decide_steps(Trainer *trainer) {
    const Options *opts = &trainer->opts;
    int64_t windows = trainer->data.train.n_windows;
    if (windows == 0) return error_set("the data hold no training tokens");
    int64_t epochs3 = (3 * windows + opts->batch - 1) / opts->batch;
    trainer->n_steps = opts->steps > 0 ? opts->steps : epochs3 > 200 ? epochs3 : 200;
    trainer->warmup = opts->warmup >= 0 ? opts->warmup : (trainer->n_steps * 3 + 99) / 100;
    trainer->val_every = opts->val_every > 0 ? opts->val_every : (trainer->n_steps + 9) / 10;
    trainer->save_every = opts->save_every > 0 ? opts->save_every : (trainer->n_steps + 4) / 5;
    return 0;
}

static int export_model(Trainer *trainer) {
    const Options *opts = &trainer->opts;
    Dtype dtype = opts->export_dtype == 0 ? DTYPE_BF16 : DTYPE_F32;
    int native = ends_with(opts->export_to, ".bin");
    if (native ? stage_save_native(&trainer->stage, opts->export_to, dtype)
               : stage_save_folder(&trainer->stage, opts->export_to, dtype))
        return -1;
    printf("exported %lld parameters as %s to %s\n", (long long)trainer->stage.n_params, dtype_name(dtype),
           opts->export_to);
    return 0;
}

static int print_evaluation(Trainer *trainer) {
    Evaluation eval;
    if (trainer->data.val.n_windows == 0) return error_set("--eval: there is no held-out data");
    if (evaluate(&trainer->stage, &trainer->data, &trainer->tokenizer, trainer->opts.val_tokens, &eval,
                 trainer->stream))
        return -1;
    if (!isfinite(eval.loss)) return error_set("--eval: the loss is not finite; see --check-weights");
    printf("validation loss %.6f over %lld targets", eval.loss, (long long)eval.n_targets);
    if (isfinite(eval.bits_per_byte))
        printf(", %.6f bits a byte over %lld bytes", eval.bits_per_byte, (long long)eval.n_bytes);
    printf("\n");
    return 0;
}

typedef enum { ACTION_TRAIN, ACTION_EVAL, ACTION_GENERATE, ACTION_EXPORT } Action;

// What the command line asks for; -1 if that is several things.
static int choose_action(const Trainer *trainer, Action *action) {
    static const char *const names[] = {"", "eval", "generate", "export"};
    *action = ACTION_TRAIN;
    for (int i = 1; i < 4; i++) {
        if (!is_given(trainer, names[i]) || (i == ACTION_EVAL && !trainer->opts.eval)) continue;
        if (*action != ACTION_TRAIN) return error_set("--%s and --%s: one at a time", names[*action], names[i]);
        *action = (Action)i;
    }
    if (trainer->opts.resume && *action != ACTION_TRAIN) return error_set("--resume goes with training only");
    return 0;
}

// Sequences and tokens the stage is made for.
static void decide_size(const Trainer *trainer, Action action, int *B, int *T) {
    int64_t wanted = (int64_t)strlen(trainer->opts.generate) + 1 + trainer->opts.max_tokens;
    int context = trainer->stage.config.context;
    *B = action == ACTION_TRAIN || action == ACTION_EVAL ? trainer->B : 1;
    *T = action == ACTION_EXPORT     ? 1
         : action != ACTION_GENERATE ? trainer->T
         : wanted < context          ? (int)wanted
                                     : context;
}

static int print_generation(Trainer *trainer) {
    const Options *opts = &trainer->opts;
    printf("%s", opts->generate);
    int result = generate(&trainer->stage, &trainer->tokenizer, opts->generate, opts, stdout, trainer->stream);
    printf("\n");
    return result;
}

// Opens model and data, decides what is left open, and counts the memory; no large allocation yet.
static int prepare(Trainer *trainer, ModelFile *file, Action action) {
    int B, T;
    if (open_model(trainer, file) || decide(trainer)) return -1;
    if ((action == ACTION_TRAIN || action == ACTION_EVAL) && open_data(trainer)) return -1;
    if (action == ACTION_TRAIN && decide_steps(trainer)) return -1;
    decide_size(trainer, action, &B, &T);
    if (stage_plan(&trainer->stage, B, T, action == ACTION_TRAIN, trainer->opts.recompute)) return -1;
    if (action == ACTION_TRAIN || trainer->opts.dry_run) print_plan(trainer);
    return 0;
}

// Memory and weights.
static int load(Trainer *trainer, ModelFile *file) {
    if (stream_create(&trainer->stream, trainer->precision, trainer->threads)) return -1;
    if (stage_alloc(&trainer->stage, trainer->stream)) return -1;
    if (file->n_shards > 0) return stage_load(&trainer->stage, file, trainer->opts.check_weights);
    stage_init(&trainer->stage, (uint64_t)trainer->opts.seed);
    return 0;
}

// Does what the command line asks for.
static int run_program(Trainer *trainer) {
    Action action;
    ModelFile file;
    json_t *resume = NULL;
    memset(&file, 0, sizeof file);
    if (choose_action(trainer, &action)) return -1;
    int result = action == ACTION_TRAIN ? run_find(&trainer->run, &trainer->opts) : 0;
    if (result == 0 && trainer->opts.resume) result = resume_settings(trainer, &resume);
    if (result == 0) result = prepare(trainer, &file, action);
    if (result == 0 && trainer->opts.dry_run) {
        result = stage_fits(&trainer->stage, trainer->precision, trainer->threads);
    } else if (result == 0) {
        result = load(trainer, &file);
        model_file_close(&file);
        if (result == 0) {
            switch (action) {
            case ACTION_TRAIN: result = train(trainer, resume); break;
            case ACTION_EVAL: result = print_evaluation(trainer); break;
            case ACTION_GENERATE: result = print_generation(trainer); break;
            case ACTION_EXPORT: result = export_model(trainer); break;
            }
        }
    }
    model_file_close(&file);
    json_decref(resume);
    return result;
}

// The program but for leaving it: 0, or 1 after one line about what is wrong.
static int program(int argc, char **argv) {
    static Trainer trainer;
    int result;
    result = cli_defaults(option_table, OPTION_COUNT, &trainer.opts);
    if (result == 0) result = cli_parse(option_table, OPTION_COUNT, &trainer.opts, trainer.given, argc, argv);
    if (result == 0 && trainer.opts.help) {
        printf("meshtune %s: fine-tunes a Llama\n  ./train -m model.bin -d text.jsonl\n\n", MESHTUNE_VERSION);
        cli_help(option_table, OPTION_COUNT, stdout);
        return 0;
    }
    if (result == 0) result = run_program(&trainer);
    if (result != 0) {
        run_clear_line(&trainer.run);
        fflush(stdout);
        fprintf(stderr, "train: %s\n", error_message);
        result = 1;
    }
    stage_free(&trainer.stage);
    dataset_close(&trainer.data);
    stream_destroy(trainer.stream);
    return result;
}

#if !defined(TESTING) && !defined(BENCHMARK)
int main(int argc, char **argv) {
    // A thread that waits for the others should spin a moment and then sleep. libgomp's default spins for milliseconds:
    // beside one other busy program training ran 10 times slower. It reads its settings before main, hence the new
    // start.
    char self[PATH_MAX] = "";
    if (getenv("OMP_WAIT_POLICY") == NULL && getenv("GOMP_SPINCOUNT") == NULL &&
        readlink("/proc/self/exe", self, sizeof self - 1) > 0) {
        setenv("GOMP_SPINCOUNT", "20000", 1);
        execv(self, argv); // if it fails, the default will do
    }
    return program(argc, argv);
}
#endif
