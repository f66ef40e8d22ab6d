// What one side of one boundary of one replica remembers between messages. Part of codec.h and codec.cuh.
//
//   CodecEnd end;
//   CodecShape shape = {H, n, T, slots, n_samples};
//   if (codec_end_init(&end, &codec, shape)) return -1;
//   ... codec_encode(&codec, &end, ...), codec_decode(&codec, &end, ...) ...
//   CodecState states[CODEC_STATES];  int n = codec_end_states(&end, states);    // what a checkpoint holds
//   codec_end_free(&end);
// All of it is host memory: a checkpoint reads and writes it as it lies, and any GPU of a cell may take its turn. The
// two sides of a boundary see the same messages, so they hold the same bytes.
#ifndef LLMC_CODEC_END_H
#define LLMC_CODEC_END_H

#include <stdint.h> // fixed-width integers
#include <string.h> // memset

#include "codec_format.h" // Codec

typedef struct {
    int H, n, T;       // values of a row, the most rows of a message, tokens of a sequence
    int slots;         // micro-batches whose backward may be awaited at once
    int64_t n_samples; // windows of the training data
} CodecShape;

typedef struct {
    CodecShape shape;
} CodecEnd;

// A piece of an end's memory that outlives a step.
typedef struct {
    const char *name;
    void *data;
    int64_t n_bytes;
} CodecState;

enum { CODEC_STATES = 8 };

static inline void codec_end_free(CodecEnd *end) {
    memset(end, 0, sizeof *end);
}

// 0, or -1: no memory, and nothing is held.
static inline int codec_end_init(CodecEnd *end, const Codec *codec, CodecShape shape) {
    (void)codec;
    memset(end, 0, sizeof *end);
    end->shape = shape;
    return 0;
}

// Fills in the pieces to be saved and read back in place; returns how many.
static inline int codec_end_states(const CodecEnd *end, CodecState states[CODEC_STATES]) {
    (void)end, (void)states;
    return 0;
}

#endif
