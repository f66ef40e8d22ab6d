// What a mesh will cost before it runs, by formula only: memory, bytes on the wire and time of each cell.
//
//   MeshPlan plan = {config, 8, 4, 32, 2048, ...};
//   MeshEstimate estimate;
//   if (mesh_estimate(&estimate, &plan)) ...
//   mesh_estimate_free(&estimate);
//   if (mesh_estimate_print(stdout, &plan)) ...   // the plan's cells, and the variants of SPEC section 9 beside it
//
// A step is `batch` sequences of T tokens of each fast replica. A synchronous one has 1F1B's bubble; an asynchronous
// one is a single micro-batch and has none, and with stashing a stage keeps its parameters once more for each stage
// behind it. In both each boundary's message and latency, there and back, holds the stages up, which have only so many
// micro-batches in flight (flow.h). Bytes a token are what one cell sends (and as much is what it receives), over the
// tokens of its own replica; a figure without a stage is the mean over a replica's Y cells.
//   boundary   wire*K forward and wire*K backward across each of the Y - 1 boundaries, K of C values survive the mask:
//              2*wire*K*(Y - 1)/Y in the mean, 2*wire*K on a stage that has neighbours on both sides
//   averaging  2*(n - 1)/n * wire * elements / tokens between averages, n fast replicas; a ring, and an owner that
//              collects and sends back, cost the same in the mean. Dense: every parameter every step. DiLoCo: every
//              local_steps steps, P and Q of each matrix and the vectors as they are
//   anchor     U, s, V of each block weight, once in anchor_delay steps, unless it is there for tables alone; each cell
//              passes them to the next replica. With klt as often the tables of the boundaries beside it, by an
//              estimate of their bytes. What is sent once, the embedding that predicts states, is not counted With one
//              fast replica its parameters go the other way as often, as the anchor's snapshot
//
// Against the published figures (llama-3.2-1b, X 8, Y 4, batch 32, T 2048, bf16 on the wire, 200 Mbit/s, 10 ms,
// 90 TFLOP/s; `estimate` in the tests). Tokens/s are one fast replica's: the published row is, 25 MB/s / 22.9 kB
// = 1.1k.
//
//                         Dense     +DP     M95   M90+AP   M95+AP
//   bytes/token, paper    22.9k    6.9k     370      790      446
//                here     26.2k    6.2k     337      714      405
//   tokens/s, paper        1.1k    3.6k   48.9k    27.8k    46.5k
//             here, even   0.9k    3.0k   40.5k    26.5k    40.5k
//             here, busy  0.65k    3.0k   22.1k    17.0k    22.1k
//
// Tokens/s of the two rows that the link bounds: the published ones are 25 MB/s over the row's bytes/token, a mean over
// the cells. Ours take the busiest uplink: of Dense the larger average (20.0 for 16.0 kB), and a boundary on both sides
// of the middle stages, 8.2 kB where the mean is 6.1; of +DP that boundary alone, 25 MB/s / 8.2 kB = 3.0k.
//
// The boundary is 6.87 kB there and 6.14 kB by the formula; what the rest is spent on is not published. The dense
// average is 16.0 kB there, which fits the tied parameter count between 7 replicas: 2*(6/7)*2*1236M/4/65536 = 16.2 kB.
// Ours is 20.0 kB because the head is a tensor of its own when Y > 1 (1498M parameters), and because without an anchor
// all 8 replicas are fast. The anchor's factors at the default rank C/8 are 69 bytes in bf16 (paper: 76). M95 and
// M95+AP are bounded by compute: 48.9k are 96 TFLOP/s a cell without a bubble; here, even, it is 90 less a bubble of
// 9%. Busy, their stages wait for 17 ms of message and 10 ms of latency beside the 50 ms that a micro-batch takes, half
// of the time; the published system evidently keeps more in flight.
#ifndef LLMC_ESTIMATE_H
#define LLMC_ESTIMATE_H

#include <math.h>   // fmax
#include <stdint.h> // int64_t
#include <stdio.h>  // fprintf
#include <stdlib.h> // calloc
#include <string.h> // memset

#include "config.h"
#include "error.h"
#include "mask_set.h" // mask_kept
#include "partition.h"
#include "schedule.h" // schedule_in_flight
#include "versions.h" // versions_delay

typedef enum { MESH_DP_NONE, MESH_DP_DILOCO, MESH_DP_DENSE } MeshDp;

typedef struct {
    Config config;
    int replicas, stages;                      // X, Y
    int batch, T;                              // sequences a step of each fast replica, their tokens
    int micro_batch;                           // sequences computed at once
    int recompute;                             // 1: inner activations are computed again in backward
    int64_t logits_floats;                     // logits that exist at once on the last stage
    float mask_rate;                           // p; 0: nothing is masked, and the anchor is off
    int anchor;                                // 1: the last replica is the anchor circuit
    int anchor_rank;                           // of its factors; 0: full
    int anchor_delay;                          // Delta, fast steps from snapshot to delivery
    int factor_sets;                           // of gradients, of the codec's bias
    double table_bytes;                        // of a boundary's tables, both directions; 0: none
    double table_memory, codec_memory;         // of a boundary's tables in use; of a cell that has some, beside them
    double learn_memory;                       // of the anchor's cell behind a boundary
    int keeps_delta;                           // 1: the optimizer keeps a third value beside the moments
    double rotation_bytes;                     // of a layer's bases and their moments, in memory
    double param_size, grad_size, moment_size; // bytes of a value in memory; 0: 4
    double frozen_size;                        // with adapters of a frozen one; 0: 4
    MeshDp dp;                                 // between fast replicas; off with one
    int local_steps;                           // of DiLoCo between averages
    int powersgd_rank;                         // 0: the largest that gives MESH_POWERSGD_RATIO
    int wire_bytes;                            // of a value on the wire: 2 or 4
    double link_mbps, link_ms, device_tflops;  // of a cell
    int asynchronous, stash;                   // a step is one micro-batch; older parameters are kept for backwards
} MeshPlan;

#define MESH_POWERSGD_RATIO 64.0

// One cell of a fast replica, and memory of the anchor circuit's cell of the same stage.
typedef struct {
    int n_layers;
    int64_t n_params;
    double flops;                                                                       // a token, forward and backward
    double param_bytes, grad_bytes, moment_bytes, outer_bytes, factor_bytes, act_bytes; // fp32 in memory
    double version_bytes;                                                               // stashed parameters
    double codec_bytes;                                                                 // tables and what they need
    double memory_bytes, anchor_memory_bytes;      // sums; the latter 0 without anchor
    double boundary_bytes, dp_bytes, anchor_bytes; // sent a token
} CellEstimate;

typedef struct {
    int n_fast;                                                 // fast replicas
    CellEstimate *cells;                                        // (Y)
    double boundary_bytes, dp_bytes, anchor_bytes, total_bytes; // a token, mean over the cells of a fast replica
    double step_s;                                              // the busiest cell sets the pace
    double even_step_s;                                         // if parameters and layers were spread evenly
    double anchor_s;                                            // from snapshot to delivery; 0 without anchor
    double tokens_per_s, even_tokens_per_s;                     // of all fast replicas
} MeshEstimate;

// Elements of the two factors of an (m, n) matrix at a rank (0: full, which it never exceeds); a rank also has `extra`
// singular values.
static inline double factor_elements(int64_t m, int64_t n, int64_t rank, int extra) {
    int64_t full = m < n ? m : n;
    return (double)(rank > 0 && rank < full ? rank : full) * (double)(m + n + extra);
}

// The same for a layer's adapters.
static inline double adapter_factor_elements(const Config *config, int64_t rank, int extra) {
    const Lora *lora = &config->lora;
    double elements = 0.0;
    for (int module = 0; module < LORA_MODULES; module++) {
        int M, K;
        lora_module_shape(module, config->channels, config_q_dim(config), config_kv_dim(config), config->ffn, &M, &K);
        if (lora_has(lora, module))
            elements += factor_elements(lora->rank, K, rank, extra) + factor_elements(M, lora->rank, rank, extra);
    }
    return elements;
}

// The same for what is trained of a layer: its seven matrices, or their adapters.
static inline double layer_factor_elements(const Config *config, int64_t rank, int extra) {
    if (config->lora.rank > 0) return adapter_factor_elements(config, rank, extra);
    int64_t C = config->channels, A = config_q_dim(config), KV = config_kv_dim(config), F = config->ffn;
    return 2.0 * factor_elements(A, C, rank, extra) + 2.0 * factor_elements(KV, C, rank, extra) +
           3.0 * factor_elements(F, C, rank, extra);
}

// Elements PowerSGD sends for n_layers layers, n_tables matrices (V, C) and n_norms further norms.
static inline double powersgd_elements(const Config *config, int n_layers, int n_tables, int n_norms, int rank) {
    if (config->lora.rank > 0) return n_layers * layer_factor_elements(config, rank, 0);
    return n_layers * layer_factor_elements(config, rank, 0) +
           n_tables * factor_elements(config->vocab, config->channels, rank, 0) +
           n_layers * (double)config_layer_vectors(config) + n_norms * (double)config_norm(config);
}

// The largest rank, at least 1, at which the model's parameters are `ratio` times what PowerSGD sends for them in one
// round: min(r, m, n)*(m + n) for a matrix, vectors whole. untied: the head is a matrix of its own although the config
// ties it (Y > 1). Adapters are few and of low rank themselves: half of theirs (docs/lora.md).
static inline int powersgd_auto_rank(const Config *config, int untied, double ratio) {
    int n_tables = untied || !config->tied ? 2 : 1, rank = 1;
    double elements = (double)config_n_params(config);
    if (config->lora.rank > 0) return (config->lora.rank + 1) / 2;
    if (untied && config->tied) elements += (double)config->vocab * config->channels;
    while (rank < config->channels &&
           elements >= ratio * powersgd_elements(config, config->n_layers, n_tables, 1, rank + 1))
        rank++;
    return rank;
}

static inline int plan_has_anchor(const MeshPlan *plan) {
    return plan->anchor && plan->mask_rate > 0.0f;
}

static inline double plan_tokens(const MeshPlan *plan) {
    return (double)plan->batch * plan->T;
}

static inline int plan_micro_batches(const MeshPlan *plan) {
    return (plan->batch + plan->micro_batch - 1) / plan->micro_batch;
}

// Users' numbers are refused here with the name of what is wrong.
static inline int plan_check(const MeshPlan *plan) {
    const struct {
        const char *name;
        int64_t value, min, max;
    } sizes[] = {{"replicas", plan->replicas, 1, 1000000},
                 {"batch", plan->batch, 1, 1000000},
                 {"micro-batch", plan->micro_batch, 1, plan->batch},
                 {"recompute", plan->recompute, 0, 1},
                 {"logits", plan->logits_floats, 0, INT64_MAX},
                 {"anchor", plan->anchor, 0, 1},
                 {"anchor-rank", plan->anchor_rank, 0, 1 << 24},
                 {"anchor-delay", plan->anchor_delay, 1, 1000000},
                 {"dp", plan->dp, MESH_DP_NONE, MESH_DP_DENSE},
                 {"local-steps", plan->local_steps, 1, 1000000},
                 {"powersgd-rank", plan->powersgd_rank, 0, 1 << 24},
                 {"sets of factors", plan->factor_sets, 0, 2},
                 {"asynchronous", plan->asynchronous, 0, 1},
                 {"stash", plan->stash, 0, 1},
                 {"delta", plan->keeps_delta, 0, 1}};
    const struct {
        const char *name;
        double value, min, max;
    } rates[] = {
        {"mask-rate", (double)plan->mask_rate, 0.0, 0.999999},  {"link rate in Mbit/s", plan->link_mbps, 1e-6, 1e9},
        {"link latency in ms", plan->link_ms, 0.0, 1e9},        {"device TFLOP/s", plan->device_tflops, 1e-6, 1e9},
        {"tables' bytes", plan->table_bytes, 0.0, 1e15},        {"tables' memory", plan->table_memory, 0.0, 1e15},
        {"codec's memory", plan->codec_memory, 0.0, 1e15},      {"learner's memory", plan->learn_memory, 0.0, 1e15},
        {"rotation's memory", plan->rotation_bytes, 0.0, 1e15}, {"a parameter's bytes", plan->param_size, 0.0, 4.0},
        {"a gradient's bytes", plan->grad_size, 0.0, 4.0},      {"a moment's bytes", plan->moment_size, 0.0, 4.0},
        {"a frozen value's bytes", plan->frozen_size, 0.0, 4.0}};
    if (config_check(&plan->config, "mesh")) return -1;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        if (sizes[i].value < sizes[i].min || sizes[i].value > sizes[i].max)
            return error_set("mesh: %s is %lld, it must be %lld to %lld", sizes[i].name, (long long)sizes[i].value,
                             (long long)sizes[i].min, (long long)sizes[i].max);
    for (size_t i = 0; i < sizeof rates / sizeof *rates; i++)
        if (!(rates[i].value >= rates[i].min && rates[i].value <= rates[i].max)) // a NaN is refused too
            return error_set("mesh: %s is %g, it must be %g to %g", rates[i].name, rates[i].value, rates[i].min,
                             rates[i].max);
    if (plan->asynchronous && plan->micro_batch != plan->batch)
        return error_set("mesh: asynchronous, a step is one micro-batch, and micro-batch %d is not batch %d",
                         plan->micro_batch, plan->batch);
    if (plan->wire_bytes != 2 && plan->wire_bytes != 4)
        return error_set("mesh: %d bytes a value on the wire, it must be 2 or 4", plan->wire_bytes);
    if (plan_has_anchor(plan) && plan->replicas < 2)
        return error_set("mesh: the anchor is a replica of its own, with it there must be at least 2");
    return 0;
}

static inline double value_size(double size) {
    return size > 0.0 ? size : 4.0;
}

// Activations of a stage in bytes, by the layout of train_gpt.cu's stage_carve without its alignment: what each
// micro-batch in flight keeps, and the buffers that all of them use in turn.
static inline double cell_act_bytes(const MeshPlan *plan, int n_layers, int is_last, int in_flight) {
    const Config *config = &plan->config;
    double C = config->channels, F = config->ffn, A = (double)config_q_dim(config);
    double QKV = A + 2.0 * (double)config_kv_dim(config), N = (double)plan->micro_batch * plan->T;
    double inner = N * (3.0 * C + QKV + A + 3.0 * F + config->heads + 2.0); // norms, qkv, att, mid, gate_up, hidden
    if (config_traits(config)->qk_norm != QK_NORM_NONE)
        inner += N * (A + (double)config_kv_dim(config) + (double)config_qk_rows(config));
    for (int m = 0; m < LORA_MODULES; m++) inner += lora_has(&config->lora, m) ? N * config->lora.rank : 0.0;
    double kept = n_layers * N * C + (plan->recompute ? 0.0 : n_layers * inner) + 3.0 * N; // layers' inputs, tokens
    double gradients = N * (2.0 * C + fmax(F, A) + fmax(2.0 * F, QKV));
    double turns = gradients + (plan->recompute ? inner : 0.0) + (double)plan->T * config->head_dim; // RoPE tables
    double head = is_last ? N * (2.0 * C + 2.0) + (double)plan->logits_floats : 0.0;
    return 4.0 * (in_flight * kept + turns + head);
}

// Stage s of the plan, with n_layers layers. Memory is as in train_gpt.cu, without the bf16 copy it makes where there
// is room; DiLoCo keeps the global parameters, the outer momentum and PowerSGD's error feedback and Q. 1F1B lets stage
// s have Y - s micro-batches in flight; without a flush they are of as many steps.
static inline void cell_estimate(CellEstimate *cell, const MeshPlan *plan, int s, int n_layers, int n_fast, int rank) {
    const Config *config = &plan->config;
    int Y = plan->stages, is_last = s == Y - 1, n_micro = plan_micro_batches(plan);
    int has_head = is_last && (Y > 1 || !config->tied), n_tables = (s == 0) + has_head; // matrices (V, C)
    int adapted = config->lora.rank > 0;
    double tokens = plan_tokens(plan), wire = plan->wire_bytes, ring = 2.0 * (n_fast - 1) / n_fast;
    double factors = n_layers * layer_factor_elements(config, plan->anchor_rank, 1);
    int n_beside = (s > 0) + (s < Y - 1); // boundaries
    memset(cell, 0, sizeof *cell);
    cell->n_layers = n_layers;
    cell->n_params = n_layers * (config_layer_matrices(config) + config_layer_vectors(config)) +
                     n_tables * partition_head_cost(config) + (is_last ? config_norm(config) : 0);
    cell->flops =
        6.0 * (double)(n_layers * partition_layer_cost(config, plan->T) + (is_last ? partition_head_cost(config) : 0));

    double frozen = 0.0;
    if (adapted) { // frozen matrices have no gradient of their own
        double adapters = (double)n_layers * (double)config_layer_adapters(config);
        double weights = (double)n_layers * (double)config_layer_matrices(config);
        weights += is_last ? (double)partition_head_cost(config) : 0.0;
        cell->flops += 6.0 * adapters - 2.0 * weights;
        frozen = value_size(plan->frozen_size) * (double)cell->n_params;
        cell->n_params = (int64_t)adapters;
    }
    double arena = 4.0 * (double)cell->n_params;
    double vectors = adapted ? 0.0 : (double)(n_layers * config_layer_vectors(config) + is_last * config_norm(config));
    double matrices = (double)cell->n_params - vectors;
    double params = value_size(adapted ? 4.0 : plan->param_size) * (double)cell->n_params,
           grads = value_size(plan->grad_size);
    cell->param_bytes = params + frozen, cell->grad_bytes = grads * (double)cell->n_params;
    cell->moment_bytes = 2.0 * value_size(plan->moment_size) * (double)cell->n_params + plan->keeps_delta * arena;
    cell->moment_bytes += n_layers * plan->rotation_bytes;
    cell->version_bytes = plan->asynchronous && plan->stash ? versions_delay(s, Y) * params : 0.0;
    int in_flight = plan->asynchronous ? versions_delay(s, Y) + 1 : schedule_in_flight(s, Y, n_micro);
    cell->act_bytes = cell_act_bytes(plan, n_layers, is_last, in_flight);
    double anchor_acts = cell_act_bytes(plan, n_layers, is_last, schedule_in_flight(s, Y, n_micro)); // it has a flush
    cell->boundary_bytes = wire * mask_kept(plan->mask_rate, plan->config.channels) * n_beside;
    if (n_fast > 1 && plan->dp == MESH_DP_DENSE) cell->dp_bytes = ring * wire * (double)cell->n_params / tokens;
    if (n_fast > 1 && plan->dp == MESH_DP_DILOCO) {
        double sent = powersgd_elements(config, n_layers, n_tables, is_last, rank);
        cell->outer_bytes = 2.0 * arena + 4.0 * (matrices + sent); // sent: P and Q live in memory too
        cell->dp_bytes = ring * wire * sent / (plan->local_steps * tokens);
    }
    if (plan_has_anchor(plan)) {
        double snapshot = n_fast == 1 ? (double)cell->n_params : 0.0; // else it follows the averages for free
        double blocks = adapted ? (double)cell->n_params : (double)(n_layers * config_layer_matrices(config));
        double momentum = (value_size(plan->moment_size) < 4.0 ? 2.0 : 4.0) * blocks;
        cell->factor_bytes = 4.0 * factors;
        double sent = wire * (plan->factor_sets * factors + snapshot);
        sent += plan->table_bytes * n_beside;
        cell->anchor_bytes = sent / (plan->anchor_delay * tokens);
        cell->anchor_memory_bytes = params + frozen + grads * blocks + momentum + cell->factor_bytes + anchor_acts;
        cell->anchor_memory_bytes += s > 0 ? plan->learn_memory : 0.0;
        cell->codec_bytes = n_beside * plan->table_memory + (n_beside > 0 ? plan->codec_memory : 0.0);
    }
    cell->memory_bytes = cell->param_bytes + cell->grad_bytes + cell->moment_bytes + cell->version_bytes +
                         cell->outer_bytes + cell->factor_bytes + cell->codec_bytes + cell->act_bytes;
}

// What decides how long a pass takes, a token: the busiest cell's arithmetic, a replica's, the busiest uplink's bytes,
// and the values of a row that cross a boundary.
typedef struct {
    double flops, all_flops, bytes, values;
    int hidden; // 1: messages are under way while stages compute, whatever their schedule
} PassLoad;

// Seconds that a boundary's message of one micro-batch takes.
static inline double plan_hop_s(const MeshPlan *plan, const PassLoad *load) {
    double rows = (double)plan->micro_batch * plan->T;
    return rows * plan->wire_bytes * load->values * 8.0 / (plan->link_mbps * 1e6) + 1e-3 * plan->link_ms;
}

// How long a stage waits for answers in the time of a micro-batch: 1F1B lets it have as many micro-batches in flight as
// it takes stages to the end, so that messages of both ways are hidden by the share 1/Y only.
static inline double plan_wait_s(const MeshPlan *plan, const PassLoad *load) {
    return 2.0 * plan_hop_s(plan, load) * (plan->stages - 1.0) / plan->stages;
}

// Seconds of a step. Where messages can be hidden, computing and sending overlap and the longer one sets the pace. The
// bubble is 1F1B's: all micro-batches pass the slowest stage, and one of them the others too. While the pipeline fills
// and drains each hop is waited for; of hidden ones, and of those that keep the uplinks busy, only the latency.
static inline double plan_pass_s(const MeshPlan *plan, const PassLoad *load) {
    double tokens = plan_tokens(plan), first = (double)plan->micro_batch * plan->T, hops = 2.0 * (plan->stages - 1);
    double flops = tokens * load->flops + first * (load->all_flops - load->flops),
           latency = hops * 1e-3 * plan->link_ms;
    double waits = hops * plan_hop_s(plan, load) + (plan_micro_batches(plan) - 1) * plan_wait_s(plan, load);
    double compute = flops / (plan->device_tflops * 1e12) + (load->hidden ? latency : waits);
    return fmax(compute, tokens * load->bytes * 8.0 / (plan->link_mbps * 1e6) + latency);
}

// The same of an asynchronous pipeline, which has no bubble.
static inline double plan_async_s(const MeshPlan *plan, const PassLoad *load) {
    double compute = plan_tokens(plan) * load->flops / (plan->device_tflops * 1e12);
    return fmax(compute + plan_wait_s(plan, load), plan_tokens(plan) * load->bytes * 8.0 / (plan->link_mbps * 1e6));
}

// The same with what waits for the whole pass: a dense average has its first byte to send when the last micro-batch is
// through, so it is added. late: what an anchor that is not ready makes the fast circuit wait for.
static inline double plan_step_s(const MeshPlan *plan, const PassLoad *load, double dense, double late) {
    double added = dense > 0.0 ? plan_tokens(plan) * dense * 8.0 / (plan->link_mbps * 1e6) + 2e-3 * plan->link_ms : 0.0;
    double pass = (plan->asynchronous ? plan_async_s : plan_pass_s)(plan, load);
    return fmax(pass + added, late);
}

// Fills the estimate of a plan; mesh_estimate_free when done. Its step times:
//   step_s       each cell's own layers, parameters and neighbours: what this mesh takes
//   even_step_s  arithmetic, averaging and anchor traffic as if spread evenly over the stages, the boundary as it is; a
//                synchronous step's messages are hidden. This is how the published rates read: masking gives 1.4x under
//                a dense average, compressed averaging 3.4x, both 46x (paper: 1.4, 3.3, 42). In our mesh the untied
//                embedding makes stage 0's dense average half as long again, and messages hold stages up (step_s: 1.2,
//                4.7, 34).
// The anchor's pass is one unmasked step of its circuit, of the same batch, and then the factors; the SVD's arithmetic
// is not counted.
// -1: a size or rate out of range, more stages than layers, no memory for the cells.
static inline int mesh_estimate(MeshEstimate *estimate, const MeshPlan *plan) {
    int first[PARTITION_MAX_STAGES + 1], Y = plan->stages, rank = plan->powersgd_rank;
    double flops_max = 0.0, flops_sum = 0.0, boundary_max = 0.0, overlapped_max = 0.0, dense_max = 0.0;
    double delivery_max = 0.0;
    memset(estimate, 0, sizeof *estimate);
    if (plan_check(plan) || partition_layers(first, &plan->config, Y, plan->T)) return -1;
    estimate->n_fast = plan->replicas - plan_has_anchor(plan);
    estimate->cells = (CellEstimate *)calloc((size_t)Y, sizeof(CellEstimate));
    if (estimate->cells == NULL) return error_set("out of memory for %d stages", Y);
    if (rank == 0) rank = powersgd_auto_rank(&plan->config, Y > 1, MESH_POWERSGD_RATIO);
    for (int s = 0; s < Y; s++) {
        CellEstimate *cell = &estimate->cells[s];
        cell_estimate(cell, plan, s, first[s + 1] - first[s], estimate->n_fast, rank);
        double dense = plan->dp == MESH_DP_DENSE ? cell->dp_bytes : 0.0;
        double overlapped = cell->boundary_bytes + cell->anchor_bytes + cell->dp_bytes - dense;
        flops_sum += cell->flops, flops_max = fmax(flops_max, cell->flops);
        boundary_max = fmax(boundary_max, cell->boundary_bytes);
        overlapped_max = fmax(overlapped_max, overlapped), dense_max = fmax(dense_max, dense);
        delivery_max = fmax(delivery_max, cell->anchor_bytes);
        estimate->boundary_bytes += cell->boundary_bytes / Y;
        estimate->dp_bytes += cell->dp_bytes / Y;
        estimate->anchor_bytes += cell->anchor_bytes / Y;
    }
    estimate->total_bytes = estimate->boundary_bytes + estimate->dp_bytes + estimate->anchor_bytes;
    double tokens = plan_tokens(plan), late = 0.0;
    if (plan_has_anchor(plan)) {
        double C = plan->config.channels, kept = mask_kept(plan->mask_rate, plan->config.channels);
        PassLoad whole = {flops_max, flops_sum, boundary_max / kept * C, C, 0};
        double delivery = plan->anchor_delay * tokens * delivery_max * 8.0 / (plan->link_mbps * 1e6);
        estimate->anchor_s = plan_pass_s(plan, &whole) + delivery + plan->link_ms * 1e-3;
        late = estimate->anchor_s / plan->anchor_delay;
    }
    int is_dense = plan->dp == MESH_DP_DENSE;
    double even_bytes = boundary_max + estimate->anchor_bytes + (is_dense ? 0.0 : estimate->dp_bytes);
    double values = mask_kept(plan->mask_rate, plan->config.channels);
    PassLoad busy = {flops_max, flops_sum, overlapped_max, values, 0};
    PassLoad even = {flops_sum / Y, flops_sum, even_bytes, values, 1};
    estimate->step_s = plan_step_s(plan, &busy, dense_max, late);
    estimate->even_step_s = plan_step_s(plan, &even, is_dense ? estimate->dp_bytes : 0.0, late);
    estimate->tokens_per_s = estimate->n_fast * tokens / estimate->step_s;
    estimate->even_tokens_per_s = estimate->n_fast * tokens / estimate->even_step_s;
    return 0;
}

static inline void mesh_estimate_free(MeshEstimate *estimate) {
    free(estimate->cells);
    memset(estimate, 0, sizeof *estimate);
}

// The published comparisons. To add one: a line here, it is printed and checked with the others.
typedef struct {
    const char *name;
    float mask_rate;
    int anchor;
    MeshDp dp;
} MeshVariant;

static const MeshVariant mesh_variants[] = {
    {"Dense", 0.0f, 0, MESH_DP_DENSE},    {"M95, dense DP", 0.95f, 0, MESH_DP_DENSE},
    {"+DP", 0.0f, 0, MESH_DP_DILOCO},     {"M90", 0.90f, 0, MESH_DP_DILOCO},
    {"M95", 0.95f, 0, MESH_DP_DILOCO},    {"M90+AP", 0.90f, 1, MESH_DP_DILOCO},
    {"M95+AP", 0.95f, 1, MESH_DP_DILOCO},
};
enum { MESH_VARIANTS = sizeof mesh_variants / sizeof *mesh_variants };

// The plan with a variant's mask, anchor and averaging in place of its own; the variants have no tables.
static inline MeshPlan mesh_variant_plan(const MeshPlan *plan, const MeshVariant *variant) {
    MeshPlan changed = *plan;
    changed.mask_rate = variant->mask_rate, changed.anchor = variant->anchor, changed.dp = variant->dp;
    changed.factor_sets = 1, changed.table_bytes = 0.0;
    changed.table_memory = changed.codec_memory = changed.learn_memory = 0.0;
    return changed;
}

static inline void mesh_estimate_row(FILE *out, const char *name, const MeshPlan *plan, const MeshEstimate *e) {
    fprintf(out, "  %-14s %4d %9.0f %9.1f %7.1f %9.0f %9.2f %9.0f %9.0f ", name, e->n_fast, e->boundary_bytes,
            e->dp_bytes, e->anchor_bytes, e->total_bytes, e->step_s, e->tokens_per_s, e->even_tokens_per_s);
    if (e->anchor_s > 0.0)
        fprintf(out, "%6.1f of %d\n", e->anchor_s / e->step_s, plan->anchor_delay);
    else
        fprintf(out, "%6s\n", "-");
}

// The plan under the other schedule, or its own: an asynchronous pipeline updates after each micro-batch, so its step
// is one; a synchronous one needs some to fill its stages, and where the plan is asynchronous its step has one for each
// stage. As many tokens pass between averages and between the anchor's deliveries.
static inline MeshPlan mesh_schedule_plan(const MeshPlan *plan, int asynchronous, int stash) {
    MeshPlan changed = *plan;
    changed.asynchronous = asynchronous, changed.stash = asynchronous && stash;
    if (asynchronous == plan->asynchronous) return changed;
    int more = asynchronous ? plan_micro_batches(plan) : 1, fewer = asynchronous ? 1 : plan->stages;
    changed.batch = asynchronous ? plan->micro_batch : plan->micro_batch * fewer;
    changed.local_steps = plan->local_steps * more / fewer > 1 ? plan->local_steps * more / fewer : 1;
    changed.anchor_delay = plan->anchor_delay * more / fewer > 1 ? plan->anchor_delay * more / fewer : 1;
    return changed;
}

// A row of each schedule: tokens/s of all fast replicas, and memory of the cell that takes the most, in GB, of it the
// stashed parameters.
static inline int mesh_schedules_print(FILE *out, const MeshPlan *plan) {
    static const char *const names[] = {"synchronous", "asynchronous", "  --no-stash"};
    fprintf(out, "  %-14s %13s %9s %9s %12s %14s\n", "schedule", "micro-batches", "step, s", "tokens/s", "GB, largest",
            "older weights");
    for (int i = 0; i < 3; i++) {
        MeshPlan changed = mesh_schedule_plan(plan, i > 0, i == 1);
        MeshEstimate e;
        if (mesh_estimate(&e, &changed)) return -1;
        const CellEstimate *largest = e.cells;
        for (int s = 1; s < changed.stages; s++)
            if (e.cells[s].memory_bytes > largest->memory_bytes) largest = &e.cells[s];
        fprintf(out, "  %-14s %13d %9.2g %9.0f %12.3g %14.3g\n", names[i], plan_micro_batches(&changed), e.step_s,
                e.tokens_per_s, 1e-9 * largest->memory_bytes, 1e-9 * largest->version_bytes);
        mesh_estimate_free(&e);
    }
    return 0;
}

// Prints the plan's cells, the plan beside the variants on the same machines, and beside the other schedule. The
// columns:
//   weights   parameters, older versions of them, gradients, moments, DiLoCo's outer state, the anchor's factors and
//   klt's tables, in GB acts      activations of the micro-batches in flight, in GB anchor's  all that the anchor
//   circuit's cell of this stage needs, in GB tokens/s  of all fast replicas; `if even` with the load spread evenly
//   over the stages, as the published rates read anchor    how many fast steps its pass and delivery take, of the
//   anchor_delay it has
// Variants that the mesh is too small for are left out. -1 as mesh_estimate.
static inline int mesh_estimate_print(FILE *out, const MeshPlan *plan) {
    MeshEstimate estimate;
    int layer = 0;
    if (mesh_estimate(&estimate, plan)) return -1;
    fprintf(out, "mesh: %d x %d cells, %d fast replica%s%s%s; %g Mbit/s, %g ms, %g TFLOP/s a cell\n", plan->replicas,
            plan->stages, estimate.n_fast, estimate.n_fast > 1 ? "s" : "",
            plan_has_anchor(plan) ? " and the anchor" : "", plan->asynchronous ? ", asynchronous" : "", plan->link_mbps,
            plan->link_ms, plan->device_tflops);
    fprintf(out, "  %5s %9s %11s %8s %8s %9s %8s   %s\n", "stage", "layers", "parameters", "weights", "acts",
            "GB in all", "anchor's", "bytes sent a token");
    for (int s = 0; s < plan->stages; s++) {
        const CellEstimate *cell = &estimate.cells[s];
        char layers[32];
        snprintf(layers, sizeof layers, "%d-%d", layer, layer + cell->n_layers - 1);
        fprintf(out, "  %5d %9s %10.2fM %8.2f %8.2f %9.2f %8.2f   %.0f\n", s, layers, 1e-6 * (double)cell->n_params,
                1e-9 * (cell->memory_bytes - cell->act_bytes), 1e-9 * cell->act_bytes, 1e-9 * cell->memory_bytes,
                1e-9 * cell->anchor_memory_bytes, cell->boundary_bytes + cell->dp_bytes + cell->anchor_bytes);
        layer += cell->n_layers;
    }
    fprintf(out, "  %-14s %4s %9s %9s %7s %9s %9s %9s %9s %s\n", "bytes a token", "fast", "boundary", "averaging",
            "anchor", "in all", "step, s", "tokens/s", "if even", "anchor, steps");
    mesh_estimate_row(out, "this mesh", plan, &estimate);
    mesh_estimate_free(&estimate);
    for (int i = 0; i < MESH_VARIANTS; i++) {
        MeshPlan changed = mesh_variant_plan(plan, &mesh_variants[i]);
        if (plan_has_anchor(&changed) && plan->replicas < 2) continue;
        if (mesh_estimate(&estimate, &changed)) return -1;
        mesh_estimate_row(out, mesh_variants[i].name, &changed, &estimate);
        mesh_estimate_free(&estimate);
    }
    return plan->stages > 1 ? mesh_schedules_print(out, plan) : 0;
}

#endif
