// Tables of the transform codec: what the anchor has learned of one boundary in one direction, as sender and receiver
// use it. Part of klt.h and klt.cuh; the codec is described in klt_codec.h.
//
//   byte  size      little-endian
//      0     4      "KLT1"
//      4     4      version, counts the tables of a boundary and direction
//      8     4      H, values of a token
//     12     4      K, components kept, 1 <= K <= H
//     16     4      flags: 1 stochastic rounding, 2 predictor, 4 fixed bits, 8 offset, 16 dual basis
//     20     4      step, fp32: the quantizer's, for a message of the usual size
//     24     4      rms, fp32: the usual size of a message (klt_codec.h)
//     28     4      theta, fp32: what is added before rounding down, in (0, 1/2]
//     32     2*H*K  basis (H, K) bf16, a component a column
//           2*H*K  dual basis (H, K) bf16, with flag 16; without, the basis is orthonormal and its own dual
//           4*H     offset (H) fp32, with flag 8
//           2*H*H   predictor (H, H) bf16, with flag 2
//   entropy-coded:
//           K       class of each component, a byte
//           64*N    frequencies (N, 32), 16 bits each: 48 classes of components, with stochastic rounding in 4 contexts
//                   each, and one of tokens' scales: N 49 or 193
//           96      centroids (48, 2) signed bytes: what |symbol| 1, and a larger one, moves by, in 1/256 steps
//   fixed bits:
//           K       bits of each component, a byte, 1 .. 8
//           4*K     sigma (K) fp32
// Valid only with exactly these bytes, all fp32 finite, step, rms, sigmas > 0, and frequencies that add up (rans.h).
#ifndef LLMC_KLT_TABLE_H
#define LLMC_KLT_TABLE_H

#include <math.h>   // isfinite
#include <stdint.h> // fixed-width integers
#include <stdlib.h> // malloc
#include <string.h> // memcpy

#include "error.h"    // error_set
#include "portable.h" // HOST_DEVICE
#include "rans.h"     // RansTable

enum { KLT_STOCHASTIC = 1, KLT_PREDICTED = 2, KLT_FIXED = 4, KLT_OFFSET = 8, KLT_DUAL = 16, KLT_FLAGS = 31 };
enum { KLT_CLASSES = 48, KLT_CONTEXTS = 4, KLT_MAX_TABLES = KLT_CLASSES * KLT_CONTEXTS + 1 };
enum { KLT_MAX_BITS = 8, KLT_HEADER = 32 };

// Classes are half octaves of sigma / step: class 16 is 1. From class 20 on low bits travel as they are.
enum { KLT_CLASS_OF_ONE = 16, KLT_CLASS_WIDE = 20 };

typedef struct {
    uint32_t version;
    int H, K, flags;
    float step, rms, theta;
} KltHeader;

// A matrix of a table as products read it: fp32, or its bf16, which are the same values.
typedef struct {
    float *full;
    uint16_t *rounded;
} KltMatrix;

// A table in use. In the backend's memory: matrices, offset, weight, grid, half, classes, centroids.
typedef struct {
    KltHeader head;
    unsigned char *blob; // as shipped; NULL: no table
    int64_t n_bytes;
    int64_t token_bits;  // of fixed bits
    unsigned char *bits; // (K) class or bits of a component, in the blob
    RansTable *coder;    // (49)
    float *memory;       // of the arrays below
    KltMatrix basis;     // (H, K) what values are projected on
    KltMatrix dual;      // (H, K) what they are made of again; the basis itself without flag 16
    KltMatrix predictor; // (H, H), of embeddings
    float *offset;       // (H)
    float *weight;       // (K) 1 / sigma^2
    float *grid, *half;  // (K) of fixed bits: step of a component, (levels - 1) / 2
    float *centroids;    // (48, 2)
    float *first_class;  // (K) class of a component at a token of scale 0
} KltTable;

// One side of one boundary, in one direction. Only the sender's control moves.
typedef struct {
    const KltTable *table; // NULL: none has come yet
    void *work;            // a KltWork (klt_codec.h) that its messages pass through
    const float *embed;    // (V, H) frozen, in the backend's memory; for tables with a predictor
    double budget;         // bytes of a token
    double control[2];     // of the step: log gain, excess
} KltEnd;

// Messages (klt_codec.h): tokens of a piece, bytes before the pieces, and the scales of tokens.
enum { KLT_PIECE = 256, KLT_MESSAGE_HEADER = 8, KLT_SILENT = -RANS_RANGE, KLT_SCALE_MAX = 14 };

static inline int klt_pieces(int n) {
    return (n + KLT_PIECE - 1) / KLT_PIECE;
}

// The most bytes a message of n tokens may have: twice the budget, and what every message needs.
static inline int64_t klt_most_bytes(double budget, int n) {
    return KLT_MESSAGE_HEADER + 64 + 8 * (int64_t)klt_pieces(n) + (int64_t)(2.0 * budget * n);
}

static inline int klt_shift(int class_number) {
    int shift = (class_number - KLT_CLASS_WIDE + 1) / 2;
    shift = shift > 0 ? shift : 0;
    return shift < RANS_MAX_SHIFT ? shift : RANS_MAX_SHIFT;
}

static inline HOST_DEVICE int klt_class(int first, int scale) {
    int number = first + scale;
    return number < 0 ? 0 : number >= KLT_CLASSES ? KLT_CLASSES - 1 : number;
}

// Contexts of a class, and the number of the table of tokens' scales, which is the last.
static inline int klt_contexts(int flags) {
    return flags & KLT_STOCHASTIC ? KLT_CONTEXTS : 1;
}

static inline int klt_scales(int flags) {
    return KLT_CLASSES * klt_contexts(flags);
}

// Exact bytes of a table.
static inline int64_t klt_table_bytes(const KltHeader *head) {
    int64_t H = head->H, K = head->K, n = KLT_HEADER + 2 * H * K;
    if (head->flags & KLT_DUAL) n += 2 * H * K;
    if (head->flags & KLT_OFFSET) n += 4 * H;
    if (head->flags & KLT_PREDICTED) n += 2 * H * H;
    return n + K +
           (head->flags & KLT_FIXED ? 4 * K : 2 * (klt_scales(head->flags) + 1) * RANS_SYMBOLS + 2 * KLT_CLASSES);
}

// Bytes of a table on its way to both sides of its boundary: the sender needs no dual, the receiver only that.
static inline int64_t klt_table_sent(const KltHeader *head) {
    return 2 * klt_table_bytes(head) - (head->flags & KLT_DUAL ? 4 * (int64_t)head->H * head->K : 0);
}

// Reads the head of a table of n_bytes. 0, or -1 with a message; nothing beyond n_bytes is read.
static inline int klt_table_head(KltHeader *head, const void *blob, int64_t n_bytes, int H) {
    const char *at = (const char *)blob;
    uint32_t word[4];
    if (n_bytes < KLT_HEADER || memcmp(at, "KLT1", 4) != 0) return error_set("klt: not a table");
    memcpy(word, at + 4, sizeof word);
    memcpy(&head->step, at + 20, 12);
    if (word[1] != (uint32_t)H || word[2] < 1 || word[2] > (uint32_t)H || word[3] > KLT_FLAGS)
        return error_set("klt: a table of %u values and %u components where %d values are expected", word[1], word[2],
                         H);
    head->version = word[0], head->H = H, head->K = (int)word[2], head->flags = (int)word[3];
    if (!(head->step > 0.0f && isfinite(head->step) && head->rms > 0.0f && isfinite(head->rms) && head->theta > 0.0f &&
          head->theta <= 0.5f))
        return error_set("klt: a table whose step or scale is not a positive number");
    if (n_bytes != klt_table_bytes(head))
        return error_set("klt: a table of %lld bytes where %lld are expected", (long long)n_bytes,
                         (long long)klt_table_bytes(head));
    return 0;
}

static inline void klt_table_put_head(unsigned char *blob, const KltHeader *head) {
    uint32_t word[4] = {head->version, (uint32_t)head->H, (uint32_t)head->K, (uint32_t)head->flags};
    memcpy(blob, "KLT1", 4);
    memcpy(blob + 4, word, sizeof word);
    memcpy(blob + 20, &head->step, 12);
}

// Levels of b bits reach from -klt_reach to klt_reach sigmas: where the mean squared error of a Gaussian is least (Max
// 1960), or wide enough that stochastic rounding has hardly anything to cut off.
static inline float klt_reach(int bits, int stochastic) {
    static const float nearest[] = {0.0f, 0.798f, 1.494f, 2.051f, 2.514f, 2.916f, 3.28f, 3.61f, 3.92f};
    return stochastic ? (bits == 1 ? 2.5f : bits == 2 ? 3.0f : 4.0f) : nearest[bits];
}

// Mean squared error of b bits for a Gaussian of variance 1.
static inline double klt_error(int bits, int stochastic) {
    static const double nearest[] = {1.0, .3634, .1188, .03744, .01154, .00349, .00104, 3.035e-4, 8.69e-5};
    double reach = (double)klt_reach(bits, stochastic), gap = 2.0 * reach / ((1 << bits) - 1);
    if (!stochastic || bits == 0) return nearest[bits];
    return gap * gap / 12.0;
}

#endif
