// Where the heads of a batch lie, for both precisions of attention.
#ifndef LLMC_ATTENTION_SHAPE_H
#define LLMC_ATTENTION_SHAPE_H

// q, k, v are views into rows of their own strides, so the same code serves training (one joint qkv row) and generation
// (keys and values in a cache). Query i of Tq sees keys 0 .. Tk-Tq+i; query head h reads key/value head h / (NH/NKV).
typedef struct {
    int B, Tq, Tk, NH, NKV, HD;
    int q_stride, kv_stride; // floats between rows of q and out-like tensors of q, and of k and v
} AttentionShape;

#endif
