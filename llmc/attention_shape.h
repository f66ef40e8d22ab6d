// Where the heads of a batch lie and who sees whom, for every attention.
#ifndef LLMC_ATTENTION_SHAPE_H
#define LLMC_ATTENTION_SHAPE_H

#include <stddef.h> // NULL
#include <stdint.h> // int32_t

// q, k, v are views into rows of their own strides, so the same code serves training (one joint qkv row) and generation
// (keys and values in a cache). Query i of Tq stands at position Tk-Tq+i of its sequence and sees the keys from the
// start of its document to itself; query head h reads key/value head h / (NH/NKV).
typedef struct {
    int B, Tq, Tk, NH, NKV, HD;
    int q_stride, kv_stride; // elements between rows of q and out-like tensors of q, and of k and v
    // (B, Tk) the position where the document of each position begins, never falling and at most the position itself;
    // in device memory. NULL: each sequence is one document.
    const int32_t *starts;
} AttentionShape;

// The starts of sequence b from a position on; NULL without documents.
static inline const int32_t *attention_starts(const AttentionShape *s, int b, int position) {
    return s->starts != NULL ? s->starts + (int64_t)b * s->Tk + position : NULL;
}

// How many of the `seen` keys from key `first` on are of documents before that of query `row`.
static inline int attention_unseen(const int32_t *starts, int row, int first, int seen) {
    int unseen = starts != NULL ? starts[row] - first : 0;
    return unseen < 0 ? 0 : unseen > seen ? seen : unseen;
}

#endif
