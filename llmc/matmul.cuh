// Matrix products, CUDA: cuBLASLt. Weights are (M, K), M outputs of K inputs, as Hugging Face stores them.
//   out = x weight^T                 matmul_forward     overwritten or added to (the residual stream)
//   dx = dout weight                 matmul_backward    overwritten
//   dweight = dout^T x               matmul_backward    overwritten or added to, fp32
// Both operands are bf16 and the sums fp32, rounded once on the way out; in the FLOATX_FP32 build all is fp32, without
// TF32. A weight whose bf16 copy is not kept is rounded at each product.
//
// Fused: the addition of the residual stream in bf16, read from one place and written to another (8 bytes a value moved
// where a copy and an addition, or an addition within the norm behind it, move 10 to 12), that of gradients to what is
// there in fp32, and the two
// factors of matmul_scaled. There is nothing else to fuse into a product: no bias, and SwiGLU wants two columns.
//
// cuBLASLt's first choice for a shape is kept in the stream with its descriptions: no search and no allocation in a
// step. Split sums go through the workspace in fp32, never through the output's type, in a fixed order: the same
// card, library and shape give the same bits.
#ifndef LLMC_MATMUL_CUH
#define LLMC_MATMUL_CUH

#include <cublasLt.h> // the products
#include <stdint.h>   // fixed-width integers
#include <stdlib.h>   // calloc
#include <string.h>   // memcmp

#include "device.cuh" // floatX, Stream, LAUNCH
#include "dtype.h"    // bf16_of_float
#include "packed.cuh" // Pack
#include "store.cuh"  // stored_read, stored_write

#ifdef CUDA_EMULATOR
#define MATMUL_WORKSPACE ((size_t)64 << 10) // every page that is allocated costs time there
#else
#define MATMUL_WORKSPACE ((size_t)32 << 20) // what cuBLAS takes for itself on Hopper; older cards need less
#endif
#define MATMUL_PROBES 8
#ifdef TESTING
#define MATMUL_ENTRIES 16 // a test has more shapes than that
#else
#define MATMUL_ENTRIES 1024
#endif
#ifdef FLOATX_FP32
#define MATMUL_BF16 0 // operands, and the result where it is floatX
#else
#define MATMUL_BF16 1
#endif

// to (rows, cols) packed bf16 = from (rows, cols) fp32 with row stride ld. Nearest even; NaN stays NaN.
// One thread to 8 values. packed: ld is cols and both pointers are 16-byte aligned. Moves 6 bytes a value.
__global__ static void bf16_round_kernel(uint16_t *to, const float *from, int64_t rows, int64_t cols, int64_t ld,
                                         int packed) {
    int64_t n = rows * cols, start = 8 * ((int64_t)blockIdx.x * blockDim.x + threadIdx.x);
    if (packed && start + 8 <= n) {
        Pack<float> low = pack_load(from + start), high = pack_load(from + start + 4);
        Pack<uint16_t> rounded;
        for (int i = 0; i < 4; i++) rounded[i] = bf16_of_float(low[i]), rounded[i + 4] = bf16_of_float(high[i]);
        pack_store(to + start, rounded);
        return;
    }
    for (int64_t i = start; i < start + 8 && i < n; i++) to[i] = bf16_of_float(from[i / cols * ld + i % cols]);
}

static inline void bf16_round(uint16_t *to, const float *from, int64_t rows, int64_t cols, int64_t ld, Stream *stream) {
    int packed = ld == cols && ((uintptr_t)to | (uintptr_t)from) % 16 == 0;
    unsigned int blocks = (unsigned int)((rows * cols + 8 * 256 - 1) / (8 * 256));
    LAUNCH(bf16_round_kernel, blocks, 256, 0, stream, to, from, rows, cols, ld, packed);
}

typedef struct {
    int64_t rows, cols, inner, lda, ldb, ldo;
    int64_t align_a, align_b, align_out;           // bytes all pointers of this entry are multiples of
    int trans_a, trans_b, bf16, out_bf16;          // element types: of both operands, of the result
    int64_t count, stride_a, stride_b, stride_out; // 0: one product; else a batch, its matrices so many elements apart
} MatmulShape;
static_assert(sizeof(MatmulShape) == 13 * sizeof(int64_t) + 4 * sizeof(int),
              "shapes are compared as bytes: no padding");

typedef struct {
    MatmulShape shape;
    cublasLtMatmulDesc_t product; // NULL: empty slot
    cublasLtMatrixLayout_t a, b, out;
    cublasLtMatmulAlgo_t algorithm;
    size_t workspace_bytes; // the algorithm's
} MatmulEntry;

// What a stream keeps of its products.
typedef struct {
    void *workspace; // MATMUL_WORKSPACE bytes of the device
    MatmulEntry entries[MATMUL_ENTRIES];
} MatmulKept;

// Empties a slot.
static inline void matmul_entry_free(MatmulEntry *entry) {
    if (entry->product != NULL) cublasLtMatmulDescDestroy(entry->product);
    if (entry->a != NULL) cublasLtMatrixLayoutDestroy(entry->a);
    if (entry->b != NULL) cublasLtMatrixLayoutDestroy(entry->b);
    if (entry->out != NULL) cublasLtMatrixLayoutDestroy(entry->out);
    memset(entry, 0, sizeof *entry);
}

static inline void matmul_kept_free(void *data) {
    MatmulKept *kept = (MatmulKept *)data;
    for (int i = 0; i < MATMUL_ENTRIES; i++) matmul_entry_free(&kept->entries[i]);
    device_free(kept->workspace);
    free(kept);
}

// Made at the stream's first product; NULL with a message without memory.
static inline MatmulKept *matmul_kept(Stream *stream) {
    Kept *kept = &stream->kept[KEPT_MATMUL];
    if (kept->data != NULL) return (MatmulKept *)kept->data;
    MatmulKept *fresh = (MatmulKept *)calloc(1, sizeof *fresh);
    if (fresh == NULL) {
        error_set("out of memory for matrix products");
        return NULL;
    }
    fresh->workspace = device_alloc(MATMUL_WORKSPACE);
    if (fresh->workspace == NULL) {
        free(fresh);
        return NULL;
    }
    kept->data = fresh, kept->destroy = matmul_kept_free;
    return fresh;
}

// 0, or -1 after a call of cuBLASLt that failed: the message says which.
static inline int matmul_status(cublasStatus_t status, const char *call, int line) {
    if (status == CUBLAS_STATUS_SUCCESS) return 0;
    return error_set("matmul.cuh:%d: %s: %s (%d); does the installed cuBLAS match the toolkit this was built with?",
                     line, call, cublasLtGetStatusString(status), (int)status);
}
#define MATMUL_TRY(call)                                                                                               \
    do {                                                                                                               \
        if (matmul_status(call, #call, __LINE__)) return -1;                                                           \
    } while (0)

// The largest power of two up to 256 that divides an address and a distance in bytes.
static inline int64_t matmul_alignment(const void *pointer, int64_t stride) {
    int64_t bytes = 256;
    while (((uintptr_t)pointer | (uintptr_t)stride) % (uintptr_t)bytes != 0) bytes /= 2;
    return bytes;
}

// A row-major matrix (rows, cols) is, in columns, its transpose (cols, rows) with the same stride.
static inline int matmul_layout(cublasLtMatrixLayout_t *layout, int bf16, int64_t rows, int64_t cols, int64_t ld,
                                int64_t count, int64_t stride) {
    int32_t batch = (int32_t)count;
    MATMUL_TRY(cublasLtMatrixLayoutCreate(layout, bf16 ? CUDA_R_16BF : CUDA_R_32F, (uint64_t)cols, (uint64_t)rows, ld));
    if (count == 0) return 0;
    MATMUL_TRY(cublasLtMatrixLayoutSetAttribute(*layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &batch, sizeof batch));
    MATMUL_TRY(
        cublasLtMatrixLayoutSetAttribute(*layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &stride, sizeof stride));
    return 0;
}

static inline int matmul_preference(cublasLtMatmulPreference_t preference, const MatmulShape *shape) {
    size_t workspace_bytes = MATMUL_WORKSPACE;
    uint32_t reduction = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    const struct {
        cublasLtMatmulPreferenceAttributes_t attribute;
        uint32_t bytes;
    } aligned[4] = {
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, (uint32_t)shape->align_b}, // the operands change places
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, (uint32_t)shape->align_a},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, (uint32_t)shape->align_out},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, (uint32_t)shape->align_out}};
    MATMUL_TRY(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                                    &workspace_bytes, sizeof workspace_bytes));
    MATMUL_TRY(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &reduction,
                                                    sizeof reduction));
    for (int i = 0; i < 4; i++)
        MATMUL_TRY(cublasLtMatmulPreferenceSetAttribute(preference, aligned[i].attribute, &aligned[i].bytes,
                                                        sizeof aligned[i].bytes));
    return 0;
}

// The descriptions: out^T = op(b)^T op(a)^T in columns, so b comes first and nothing is transposed beyond what is
// asked.
static inline int matmul_describe(MatmulEntry *entry) {
    const MatmulShape *shape = &entry->shape;
    cublasOperation_t first = shape->trans_b ? CUBLAS_OP_T : CUBLAS_OP_N;
    cublasOperation_t second = shape->trans_a ? CUBLAS_OP_T : CUBLAS_OP_N;
    MATMUL_TRY(cublasLtMatmulDescCreate(&entry->product, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    MATMUL_TRY(cublasLtMatmulDescSetAttribute(entry->product, CUBLASLT_MATMUL_DESC_TRANSA, &first, sizeof first));
    MATMUL_TRY(cublasLtMatmulDescSetAttribute(entry->product, CUBLASLT_MATMUL_DESC_TRANSB, &second, sizeof second));
    int64_t a_rows = shape->trans_a ? shape->inner : shape->rows, a_cols = shape->trans_a ? shape->rows : shape->inner;
    int64_t b_rows = shape->trans_b ? shape->cols : shape->inner, b_cols = shape->trans_b ? shape->inner : shape->cols;
    int64_t count = shape->count;
    if (matmul_layout(&entry->a, shape->bf16, a_rows, a_cols, shape->lda, count, shape->stride_a)) return -1;
    if (matmul_layout(&entry->b, shape->bf16, b_rows, b_cols, shape->ldb, count, shape->stride_b)) return -1;
    return matmul_layout(&entry->out, shape->out_bf16, shape->rows, shape->cols, shape->ldo, count, shape->stride_out);
}

static inline int matmul_choose(MatmulEntry *entry, cublasLtMatmulPreference_t preference, Stream *stream) {
    cublasLtMatmulHeuristicResult_t best;
    int found = 0;
    if (matmul_preference(preference, &entry->shape)) return -1;
    MATMUL_TRY(cublasLtMatmulAlgoGetHeuristic(stream->blas, entry->product, entry->b, entry->a, entry->out, entry->out,
                                              preference, 1, &best, &found));
    if (found < 1)
        return error_set("matrix product %lld x %lld x %lld: cuBLASLt has no algorithm for it on this card",
                         (long long)entry->shape.rows, (long long)entry->shape.cols, (long long)entry->shape.inner);
    entry->algorithm = best.algo;
    entry->workspace_bytes = best.workspaceSize;
    return 0;
}

static inline int matmul_plan(MatmulEntry *entry, Stream *stream) {
    cublasLtMatmulPreference_t preference;
    if (matmul_describe(entry)) return -1;
    MATMUL_TRY(cublasLtMatmulPreferenceCreate(&preference));
    int result = matmul_choose(entry, preference, stream);
    cublasLtMatmulPreferenceDestroy(preference);
    return result;
}

// The prepared product for a shape, made at first use; NULL with a message if cuBLASLt refuses. Where a shape's eight
// places are taken, the last one is given up.
static inline MatmulEntry *matmul_entry(const MatmulShape *shape, MatmulKept *kept, Stream *stream) {
    uint64_t hash = 1469598103934665603ull; // FNV-1a over the fields
    const unsigned char *bytes = (const unsigned char *)shape;
    for (size_t i = 0; i < sizeof *shape; i++) hash = (hash ^ bytes[i]) * 1099511628211ull;
    MatmulEntry *entry = NULL;
    for (int probe = 0; probe < MATMUL_PROBES; probe++) {
        entry = &kept->entries[(hash + (uint64_t)probe) % MATMUL_ENTRIES];
        if (entry->product == NULL) break;
        if (memcmp(&entry->shape, shape, sizeof *shape) == 0) return entry;
    }
    matmul_entry_free(entry);
    entry->shape = *shape;
    if (matmul_plan(entry, stream) == 0) return entry;
    matmul_entry_free(entry);
    return NULL;
}

static inline int matmul_try(void *out, const void *add, const void *a, const void *b, const MatmulShape *shape,
                             float alpha, float beta, Stream *stream) {
    MatmulKept *kept = matmul_kept(stream);
    MatmulEntry *entry = kept != NULL ? matmul_entry(shape, kept, stream) : NULL;
    if (entry == NULL) return -1;
    MATMUL_TRY(cublasLtMatmul(stream->blas, entry->product, &alpha, b, entry->b, a, entry->a, &beta, add, entry->out,
                              out, entry->out, &entry->algorithm, kept->workspace, entry->workspace_bytes,
                              stream->cuda));
    return 0;
}

// out = alpha op(a) op(b) + beta add; add, which lies as out does and may be out, is not read where beta is 0. The
// shape lacks only the alignments.
static inline void matmul_run_add(void *out, const void *add, const void *a, const void *b, MatmulShape shape,
                                  float alpha, float beta, Stream *stream) {
    if (stream->failed) return;
    int64_t bytes = shape.bf16 ? 2 : 4, out_bytes = shape.out_bf16 ? 2 : 4;
    shape.align_a = matmul_alignment(a, bytes * shape.stride_a);
    shape.align_b = matmul_alignment(b, bytes * shape.stride_b);
    shape.align_out = matmul_alignment((const void *)((uintptr_t)out | (uintptr_t)add), out_bytes * shape.stride_out);
    if (matmul_try(out, add, a, b, &shape, alpha, beta, stream)) stream->failed = 1;
}

// out = alpha op(a) op(b) + beta out
static inline void matmul_run(void *out, const void *a, const void *b, MatmulShape shape, float alpha, float beta,
                              Stream *stream) {
    matmul_run_add(out, out, a, b, shape, alpha, beta, stream);
}

// out (rows, cols) fp32 [+]= op(a) (rows, inner) * op(b) (inner, cols). trans_a: a is stored (inner, rows). Row strides
// lda, ldb, ldo in elements. a and b are both fp32, or both bf16 with bf16 = 1.
static inline void matmul_product(float *out, int64_t ldo, const void *a, int64_t lda, int trans_a, const void *b,
                                  int64_t ldb, int trans_b, int64_t rows, int64_t cols, int64_t inner, int bf16,
                                  int accumulate, Stream *stream) {
    MatmulShape shape = {rows, cols, inner, lda, ldb, ldo, 0, 0, 0, trans_a, trans_b, bf16, 0, 0, 0, 0, 0};
    matmul_run(out, a, b, shape, 1.0f, accumulate ? 1.0f : 0.0f, stream);
}

// out (rows, cols) = alpha op(a) op(b) + beta out, all fp32. Arguments as above.
static inline void matmul_scaled(float *out, int64_t ldo, const float *a, int64_t lda, int trans_a, const float *b,
                                 int64_t ldb, int trans_b, int64_t rows, int64_t cols, int64_t inner, float alpha,
                                 float beta, Stream *stream) {
    MatmulShape shape = {rows, cols, inner, lda, ldb, ldo, 0, 0, 0, trans_a, trans_b, 0, 0, 0, 0, 0, 0};
    matmul_run(out, a, b, shape, alpha, beta, stream);
}

// out = op(a) op(b), all fp32, for `count` products whose matrices lie stride_out, stride_a, stride_b floats
// apart; other arguments as above. One call: small products together fill the card.
static inline void matmul_batch(float *out, int64_t ldo, int64_t stride_out, const float *a, int64_t lda,
                                int64_t stride_a, int trans_a, const float *b, int64_t ldb, int64_t stride_b,
                                int trans_b, int64_t rows, int64_t cols, int64_t inner, int count, Stream *stream) {
    MatmulShape shape = {rows, cols, inner, lda, ldb, ldo, 0, 0, 0, trans_a, trans_b, 0, 0, 0, 0, 0, 0};
    if (count > 1)
        shape.count = count, shape.stride_a = stride_a, shape.stride_b = stride_b, shape.stride_out = stride_out;
    matmul_run(out, a, b, shape, 1.0f, 0.0f, stream);
}

// A gradient that is kept as bf16 is computed in slices of at most so many values.
#ifdef TESTING
#define MATMUL_SLICE 700
#else
#define MATMUL_SLICE ((int64_t)16 << 20)
#endif

typedef struct {
    const float *full;       // NULL: the weight is kept as bf16 only
    const uint16_t *rounded; // its bf16 copy, or NULL: rounded at each product
    int half_grad;           // 1: its gradient is kept as bf16
} Weight;

// Floats of n values that are kept as bf16, in scratch; NULL without memory.
static inline float *matmul_widened(const uint16_t *from, int64_t n, int slot, Stream *stream) {
    float *copy = (float *)scratch_get(&stream->scratch[slot], sizeof(float) * (size_t)n);
    Stored kept = {(void *)from, NULL, STORE_BF16, 1};
    if (copy == NULL)
        stream->failed = 1;
    else
        stored_read(copy, kept, 0, n, stream);
    return copy;
}

// A weight (M, K) as the products of this build read it; NULL without memory for its copy.
static inline const void *matmul_weight(Weight weight, int K, int M, Stream *stream) {
    if (!MATMUL_BF16 && weight.full == NULL) return matmul_widened(weight.rounded, (int64_t)M * K, SCRATCH_B, stream);
    if (!MATMUL_BF16) return weight.full;
    if (weight.rounded != NULL) return weight.rounded;
    uint16_t *copy = (uint16_t *)scratch_get(&stream->scratch[SCRATCH_B], sizeof(uint16_t) * (size_t)K * (size_t)M);
    if (copy == NULL)
        stream->failed = 1;
    else
        bf16_round(copy, weight.full, M, K, K, stream);
    return copy;
}

// Floats of a gradient that is kept as bf16 and computed at once, of a weight of so many values.
static inline int64_t matmul_grad_floats(int64_t weight) {
    return weight < MATMUL_SLICE ? weight : MATMUL_SLICE;
}

// Bytes of the device that a stream keeps for products whose largest weight has so many values: activations and their
// gradients are read as they are.
static inline int64_t matmul_bytes(int64_t weight, int64_t inputs, int64_t grads, Precision precision) {
    (void)inputs, (void)grads, (void)precision;
    return (int64_t)MATMUL_WORKSPACE + (MATMUL_BF16 ? 2 * weight : 0);
}

// out (N, M) = x (N, K) weight^T, plus residual (N, M) unless that is NULL; residual may be out.
static inline void matmul_forward(floatX *out, const floatX *x, Weight weight, int N, int K, int M,
                                  const floatX *residual, Stream *stream) {
    MatmulShape shape = {N, M, K, K, K, M, 0, 0, 0, 0, 1, MATMUL_BF16, MATMUL_BF16, 0, 0, 0, 0};
    const floatX *add = residual != NULL ? residual : out;
    matmul_run_add(out, add, x, matmul_weight(weight, K, M, stream), shape, 1.0f, residual != NULL ? 1.0f : 0.0f,
                   stream);
}

// dweight (M, K) bf16 = or += dout^T x: the sum in fp32, rounded to the nearest.
static inline void matmul_half_grad(uint16_t *dweight, const floatX *dout, const floatX *x, int N, int K, int M,
                                    int accumulate, Stream *stream) {
    int64_t slice = MATMUL_SLICE / K > 0 ? MATMUL_SLICE / K : 1;
    for (int64_t m = 0; m < M; m += slice) {
        int64_t rows = M - m < slice ? M - m : slice;
        MatmulShape shape = {rows, K, N, M, K, K, 0, 0, 0, 1, 0, MATMUL_BF16, 0, 0, 0, 0, 0};
        Stored kept = {dweight + m * K, NULL, STORE_BF16, 1};
        float *sum = matmul_widened(dweight + m * K, rows * K, SCRATCH_WIDE, stream);
        if (sum == NULL) return;
        matmul_run(sum, dout + m, x, shape, 1.0f, accumulate ? 1.0f : 0.0f, stream);
        stored_write(kept, 0, sum, rows * K, rounding_nearest(), stream);
    }
}

// dx (N, K) = dout (N, M) weight; dweight (M, K) = or += dout^T x, in bf16 where weight.half_grad says so; NULL: not
// wanted. x (N, K), weight (M, K).
static inline void matmul_backward(floatX *dx, float *dweight, const floatX *dout, const floatX *x, Weight weight,
                                   int N, int K, int M, int accumulate_dweight, Stream *stream) {
    MatmulShape input = {N, K, M, M, K, K, 0, 0, 0, 0, 0, MATMUL_BF16, MATMUL_BF16, 0, 0, 0, 0};
    MatmulShape weights = {M, K, N, M, K, K, 0, 0, 0, 1, 0, MATMUL_BF16, 0, 0, 0, 0, 0};
    matmul_run(dx, dout, matmul_weight(weight, K, M, stream), input, 1.0f, 0.0f, stream);
    if (dweight == NULL) return;
    if (weight.half_grad)
        matmul_half_grad((uint16_t *)dweight, dout, x, N, K, M, accumulate_dweight, stream);
    else
        matmul_run(dweight, dout, x, weights, 1.0f, accumulate_dweight ? 1.0f : 0.0f, stream);
}

#endif
