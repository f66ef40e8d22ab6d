// Which K of a token's H values top-k sends: those of the largest |x|, of equal ones the first. Part of codec_topk.h
// and its twin.
//
//   set   ceil(K*b/8) bytes, b = max(1, ceil(log2 H)): K indices of b bits in ascending order, lowest bits first,
//   filled
//         up with zeros
// Valid only if every index is below H and larger than the one before.
#ifndef LLMC_TOPK_ROW_H
#define LLMC_TOPK_ROW_H

#include <stdint.h> // fixed-width integers

#include "error.h"    // error_set
#include "portable.h" // HOST_DEVICE

static inline int topk_index_bits(int H) {
    int bits = 1;
    while (H > 1 << bits) bits++;
    return bits;
}

// Bytes of a set.
static inline int topk_set_bytes(int K, int H) {
    return (K * topk_index_bits(H) + 7) / 8;
}

// The largest K whose values of `size` bytes and set fit into a budget of bytes; 0 if not even one does.
static inline int topk_kept(int64_t budget, int64_t size, int H) {
    int64_t K = 8 * budget / (8 * size + topk_index_bits(H));
    return K < H ? (int)K : H;
}

// Writes count <= 8 indices from a byte's start on.
static inline HOST_DEVICE void topk_put(unsigned char *to, const uint16_t *index, int count, int bits) {
    uint32_t word = 0;
    int have = 0;
    for (int j = 0; j < count; j++) {
        word |= (uint32_t)index[j] << have;
        for (have += bits; have >= 8; have -= 8, word >>= 8) *to++ = (unsigned char)word;
    }
    if (have > 0) *to = (unsigned char)word;
}

// Index i of a set; reads only the bytes it lies in.
static inline HOST_DEVICE int topk_index(const unsigned char *set, int i, int bits) {
    int first = i * bits, last = first + bits - 1;
    uint32_t word = 0;
    for (int b = first / 8; b <= last / 8; b++) word |= (uint32_t)set[b] << (8 * (b - first / 8));
    return (int)(word >> (first % 8) & ((1u << bits) - 1));
}

// 0, or -1: one of n sets is not valid.
static inline int topk_check(const unsigned char *sets, int n, int K, int H) {
    int bits = topk_index_bits(H), set_bytes = topk_set_bytes(K, H);
    for (int token = 0; token < n; token++) {
        const unsigned char *set = sets + (int64_t)token * set_bytes;
        for (int i = 0, last = -1; i < K; i++) {
            int index = topk_index(set, i, bits);
            if (index <= last || index >= H)
                return error_set("topk: token %d: index %d of the message is %d, after %d of %d", token, i, index, last,
                                 H);
            last = index;
        }
    }
    return 0;
}

#endif
