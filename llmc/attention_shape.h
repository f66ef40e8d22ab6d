// Where the heads of a batch lie and who sees whom, for every attention.
#ifndef LLMC_ATTENTION_SHAPE_H
#define LLMC_ATTENTION_SHAPE_H

#include <stddef.h> // NULL
#include <stdint.h> // int32_t

#include "portable.h" // HOST_DEVICE

// q, k, v are views into rows of their own strides, so the same code serves training (one joint qkv row) and generation
// (keys and values in a cache). Query i of Tq stands at position Tk-Tq+i of its sequence and sees the keys from the
// start of its document, or of a window that ends with it, to itself; query head h reads key/value head h / (NH/NKV).
typedef struct {
    int B, Tq, Tk, NH, NKV, HD;
    int q_stride, kv_stride; // elements between rows of q and out-like tensors of q, and of k and v
    // (B, Tk) the position where the document of each position begins, never falling and at most the position itself;
    // in device memory. NULL: each sequence is one document.
    const int32_t *starts;
    int window; // a query sees itself and at most window-1 keys before it; 0: all of its document
} AttentionShape;

// The starts of sequence b; NULL without documents.
HOST_DEVICE static inline const int32_t *attention_starts(const AttentionShape *s, int b) {
    return s->starts != NULL ? s->starts + (int64_t)b * s->Tk : NULL;
}

// 1 if a query sees all keys before it.
static inline int attention_sees_all(const AttentionShape *s) {
    return s->starts == NULL && s->window == 0;
}

// The first key that the query at a position sees; it never falls from one to the next. starts: of its sequence, or
// NULL.
HOST_DEVICE static inline int attention_first(const AttentionShape *s, const int32_t *starts, int position) {
    int first = starts != NULL ? starts[position] : 0, oldest = s->window > 0 ? position - s->window + 1 : 0;
    return first > oldest ? first : oldest;
}

// How many of the `seen` keys from key `first` on lie before those that the query at a position sees.
static inline int attention_unseen(const AttentionShape *s, const int32_t *starts, int position, int first, int seen) {
    int unseen = attention_first(s, starts, position) - first;
    return unseen < 0 ? 0 : unseen > seen ? seen : unseen;
}

#endif
