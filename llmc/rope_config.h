// How a model's RoPE frequencies are made: read from its config, used by rope.h.
#ifndef LLMC_ROPE_CONFIG_H
#define LLMC_ROPE_CONFIG_H

typedef struct {
    float theta;
    int scaled; // 0: plain, 1: llama3
    float factor, low_freq_factor, high_freq_factor;
    int original_context;
} RopeConfig;

#endif
