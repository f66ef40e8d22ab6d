// Which layers stand on which pipeline stage: contiguous runs, the most expensive stage as cheap as possible.
//
//   int first[4 + 1];
//   if (partition_layers(first, &config, 4, 2048)) ...   // stage s holds layers first[s] .. first[s + 1] - 1
//
// Cost is arithmetic, in multiply-adds a token: a layer's matrices and its causal attention; the head counts on the
// last stage, the embedding is a look-up and counts nothing. All layers cost the same, so the best split is
// found by trying each size of the last stage.
#ifndef LLMC_PARTITION_H
#define LLMC_PARTITION_H

#include <stdint.h> // int64_t

#include "config.h"
#include "error.h"

// With config_check's limits, of which the stages are one, the cost of all layers stays below 2^63.
enum { PARTITION_MAX_STAGES = 4096, PARTITION_MAX_T = 1 << 24 };

// Multiply-adds a token in one layer's forward pass; the training step costs 6 operations for each (dev/bench.cu).
// Attention: scores and values over T/2 positions on average, A = NH*HD each.
static inline int64_t partition_layer_cost(const Config *config, int T) {
    return config_layer_matrices(config) + T * config_q_dim(config);
}

static inline int64_t partition_head_cost(const Config *config) {
    return (int64_t)config->vocab * config->channels;
}

// first (Y + 1): stage s of Y gets the layers first[s] .. first[s + 1] - 1, at least one; T tokens of a sequence. Among
// equally good splits the last stage takes the most layers; what is left over in front goes to the later stages,
// because stage 0 also holds the embedding and the most micro-batches in flight. The config has passed config_check.
// -1: Y is not 1 to the number of layers, T not 1 to PARTITION_MAX_T.
static inline int partition_layers(int *first, const Config *config, int Y, int T) {
    int L = config->n_layers, last = 0, front_stages = Y - 1;
    int64_t best = INT64_MAX;
    if (Y < 1 || Y > L) return error_set("%d pipeline stages for %d layers: each stage needs at least one", Y, L);
    if (T < 1 || T > PARTITION_MAX_T)
        return error_set("%d tokens a sequence: 1 to %d are possible", T, PARTITION_MAX_T);
    int64_t layer = partition_layer_cost(config, T), head = partition_head_cost(config);
    for (int n = Y == 1 ? L : 1; n <= L - front_stages; n++) {
        int64_t front = Y == 1 ? 0 : (L - n + front_stages - 1) / front_stages * layer, back = n * layer + head;
        int64_t worst = front > back ? front : back;
        if (worst <= best) best = worst, last = n;
    }
    first[0] = 0;
    for (int s = 0; s < front_stages; s++) {
        int whole = (L - last) / front_stages, over = (L - last) % front_stages;
        first[s + 1] = first[s] + whole + (s >= front_stages - over);
    }
    first[Y] = L;
    return 0;
}

#endif
