// Matrix products, CPU: oneDNN 2.6 or 3.x. Weights are (M, K), M outputs of K inputs, as Hugging Face stores them.
//   out = x weight^T                 matmul_forward
//   dx = dout weight                 matmul_backward, overwritten
//   dweight = dout^T x               matmul_backward, overwritten or added to
// With PRECISION_BF16 both inputs are rounded to bf16 (nearest even) and the sums are fp32; products of fewer than
// MATMUL_BF16_MIN_ROWS rows stay fp32, since there rounding the weight costs more than multiplying by it.
// A weight whose bf16 copy is kept is not rounded again. The kernels oneDNN generates are kept by shape in the stream.
#ifndef LLMC_MATMUL_H
#define LLMC_MATMUL_H

#include <dnnl.h>   // the products
#include <stddef.h> // size_t
#include <stdio.h>  // snprintf

#include "device.h" // floatX, Stream
#include "dtype.h"  // bf16_of_float
#include "store.h"  // stored_read, stored_write

#define MATMUL_BF16_MIN_ROWS 16
// A weight beyond this many elements is multiplied in slices of its outputs, which bounds the bf16 scratch.
#ifdef TESTING
#define MATMUL_SLICE 700 // small shapes meet the slices too
#else
#define MATMUL_SLICE ((int64_t)4 << 20)
#endif

// to (rows, cols) packed bf16 = from (rows, cols) fp32 with row stride ld. Nearest even; NaN stays NaN.
static inline void bf16_round(uint16_t *to, const float *from, int64_t rows, int64_t cols, int64_t ld, Stream *stream) {
#pragma omp parallel for num_threads(stream->threads)
    for (int64_t r = 0; r < rows; r++) {
        const float *row = from + r * ld;
        uint16_t *out = to + r * cols;
#pragma omp simd
        for (int64_t c = 0; c < cols; c++) out[c] = bf16_of_float(row[c]);
    }
}

static inline dnnl_status_t matmul_describe(dnnl_memory_t *memory, const dnnl_engine_t engine, int64_t rows,
                                            int64_t cols, int64_t ld, int transposed, int bf16) {
    dnnl_dims_t dims = {rows, cols}, strides = {transposed ? 1 : ld, transposed ? ld : 1};
    dnnl_data_type_t type = bf16 ? dnnl_bf16 : dnnl_f32;
    dnnl_status_t status;
#if DNNL_VERSION_MAJOR >= 3
    dnnl_memory_desc_t desc;
    status = dnnl_memory_desc_create_with_strides(&desc, 2, dims, type, strides);
    if (status != dnnl_success) return status;
    status = dnnl_memory_create(memory, desc, engine, DNNL_MEMORY_NONE);
    dnnl_memory_desc_destroy(desc);
#else
    dnnl_memory_desc_t desc;
    status = dnnl_memory_desc_init_by_strides(&desc, 2, dims, type, strides);
    if (status != dnnl_success) return status;
    status = dnnl_memory_create(memory, &desc, engine, DNNL_MEMORY_NONE);
#endif
    return status;
}

static inline dnnl_status_t matmul_primitive(MatmulEntry *entry, Stream *stream) {
    dnnl_primitive_attr_t attr = NULL;
    dnnl_post_ops_t post_ops = NULL;
    dnnl_primitive_desc_t desc = NULL;
    dnnl_status_t status = dnnl_primitive_attr_create(&attr);
    if (status == dnnl_success) status = dnnl_post_ops_create(&post_ops);
#if DNNL_VERSION_MAJOR >= 3
    const_dnnl_memory_desc_t a, b, out;
    if (status == dnnl_success && entry->shape.accumulate)
        status = dnnl_post_ops_append_sum(post_ops, 1.0f, 0, dnnl_data_type_undef);
    if (status == dnnl_success) status = dnnl_primitive_attr_set_post_ops(attr, post_ops);
    if (status == dnnl_success) status = dnnl_memory_get_memory_desc(entry->a, &a);
    if (status == dnnl_success) status = dnnl_memory_get_memory_desc(entry->b, &b);
    if (status == dnnl_success) status = dnnl_memory_get_memory_desc(entry->out, &out);
    if (status == dnnl_success)
        status = dnnl_matmul_primitive_desc_create(&desc, stream->engine, a, b, NULL, out, attr);
#else
    const dnnl_memory_desc_t *a, *b, *out;
    dnnl_matmul_desc_t matmul;
    if (status == dnnl_success && entry->shape.accumulate) status = dnnl_post_ops_append_sum(post_ops, 1.0f);
    if (status == dnnl_success) status = dnnl_primitive_attr_set_post_ops(attr, post_ops);
    if (status == dnnl_success) status = dnnl_memory_get_memory_desc(entry->a, &a);
    if (status == dnnl_success) status = dnnl_memory_get_memory_desc(entry->b, &b);
    if (status == dnnl_success) status = dnnl_memory_get_memory_desc(entry->out, &out);
    if (status == dnnl_success) status = dnnl_matmul_desc_init(&matmul, a, b, NULL, out);
    if (status == dnnl_success) status = dnnl_primitive_desc_create(&desc, &matmul, attr, stream->engine, NULL);
#endif
    if (status == dnnl_success) status = dnnl_primitive_create(&entry->primitive, desc);
    if (desc != NULL) dnnl_primitive_desc_destroy(desc);
    if (post_ops != NULL) dnnl_post_ops_destroy(post_ops);
    if (attr != NULL) dnnl_primitive_attr_destroy(attr);
    return status;
}

// The prepared kernel for a shape, made at first use; NULL if oneDNN refuses. Where a shape's eight places are taken,
// the last one is given up.
static inline MatmulEntry *matmul_entry(const MatmulShape *shape, Stream *stream) {
    uint64_t hash = 1469598103934665603ull; // FNV-1a over the fields
    const unsigned char *bytes = (const unsigned char *)shape;
    for (size_t i = 0; i < sizeof *shape; i++) hash = (hash ^ bytes[i]) * 1099511628211ull;
    MatmulEntry *entry = NULL;
    for (int probe = 0; probe < 8; probe++) {
        entry = &stream->matmul[(hash + (uint64_t)probe) % MATMUL_SLOTS];
        if (entry->primitive == NULL) break;
        if (memcmp(&entry->shape, shape, sizeof *shape) == 0) return entry;
    }
    if (entry->primitive != NULL) matmul_entry_free(entry);
    entry->shape = *shape;
    dnnl_status_t status =
        matmul_describe(&entry->a, stream->engine, shape->rows, shape->inner, shape->lda, shape->trans_a, shape->bf16);
    if (status == dnnl_success)
        status = matmul_describe(&entry->b, stream->engine, shape->inner, shape->cols, shape->ldb, shape->trans_b,
                                 shape->bf16);
    if (status == dnnl_success)
        status = matmul_describe(&entry->out, stream->engine, shape->rows, shape->cols, shape->ldo, 0, 0);
    if (status == dnnl_success) status = matmul_primitive(entry, stream);
    if (status == dnnl_success) return entry;
    error_set("matrix product %lld x %lld x %lld: oneDNN status %d", (long long)shape->rows, (long long)shape->cols,
              (long long)shape->inner, (int)status);
    return NULL;
}

// out (rows, cols) [+]= op(a) (rows, inner) * op(b) (inner, cols). trans_a: a is stored (inner, rows). Row strides lda,
// ldb, ldo in elements. a and b are both fp32, or both bf16 with bf16 = 1.
static inline void matmul_product(float *out, int64_t ldo, const void *a, int64_t lda, int trans_a, const void *b,
                                  int64_t ldb, int trans_b, int64_t rows, int64_t cols, int64_t inner, int bf16,
                                  int accumulate, Stream *stream) {
    MatmulShape shape;
    memset(&shape, 0, sizeof shape); // padding too: shapes are compared as bytes
    shape.rows = rows, shape.cols = cols, shape.inner = inner;
    shape.lda = lda, shape.ldb = ldb, shape.ldo = ldo;
    shape.trans_a = trans_a, shape.trans_b = trans_b, shape.bf16 = bf16, shape.accumulate = accumulate;
    if (stream->failed) return;
    MatmulEntry *entry = matmul_entry(&shape, stream);
    if (entry == NULL) {
        stream->failed = 1;
        return;
    }
    dnnl_exec_arg_t args[3] = {{DNNL_ARG_SRC, entry->a}, {DNNL_ARG_WEIGHTS, entry->b}, {DNNL_ARG_DST, entry->out}};
    dnnl_status_t status = dnnl_memory_set_data_handle(entry->a, (void *)a);
    if (status == dnnl_success) status = dnnl_memory_set_data_handle(entry->b, (void *)b);
    if (status == dnnl_success) status = dnnl_memory_set_data_handle(entry->out, out);
    if (status == dnnl_success) status = dnnl_primitive_execute(entry->primitive, stream->dnnl, 3, args);
    if (status == dnnl_success) status = dnnl_stream_wait(stream->dnnl);
    if (status != dnnl_success) stream->failed = 1, error_set("matrix product: oneDNN status %d", (int)status);
}

// out = op(a) op(b), all fp32, for `count` products whose matrices lie stride_out, stride_a, stride_b floats
// apart; other arguments as above. One after another: oneDNN's batched product of four matrices (768,768) took as long
// as four single ones, with the same bits.
static inline void matmul_batch(float *out, int64_t ldo, int64_t stride_out, const float *a, int64_t lda,
                                int64_t stride_a, int trans_a, const float *b, int64_t ldb, int64_t stride_b,
                                int trans_b, int64_t rows, int64_t cols, int64_t inner, int count, Stream *stream) {
    for (int i = 0; i < count; i++)
        matmul_product(out + i * stride_out, ldo, a + i * stride_a, lda, trans_a, b + i * stride_b, ldb, trans_b, rows,
                       cols, inner, 0, 0, stream);
}

// 1 if a product over this many rows rounds its operands to bf16.
static inline int matmul_is_bf16(int64_t rows, const Stream *stream) {
    return stream->precision == PRECISION_BF16 && rows >= MATMUL_BF16_MIN_ROWS;
}

typedef struct {
    const void *data;
    int64_t ld;
} Operand;

// The operand a product reads: the fp32 matrix itself, or its bf16 copy in a scratch slot.
static inline Operand matmul_operand(const float *from, int64_t rows, int64_t cols, int64_t ld, int bf16, int slot,
                                     Stream *stream) {
    Operand operand = {from, ld};
    if (!bf16) return operand;
    uint16_t *copy = (uint16_t *)scratch_get(&stream->scratch[slot], sizeof(uint16_t) * (size_t)(rows * cols));
    if (copy == NULL) {
        stream->failed = 1;
        return operand;
    }
    bf16_round(copy, from, rows, cols, ld, stream);
    operand.data = copy, operand.ld = cols;
    return operand;
}

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

// Rows m.. of a weight (M, K) as a product reads them.
static inline Operand matmul_weight(Weight weight, int64_t m, int64_t rows, int64_t K, int bf16, Stream *stream) {
    if (bf16 && weight.rounded != NULL) {
        Operand kept = {weight.rounded + m * K, K};
        return kept;
    }
    if (weight.full == NULL) {
        Operand widened = {matmul_widened(weight.rounded + m * K, rows * K, SCRATCH_B, stream), K};
        return widened;
    }
    return matmul_operand(weight.full + m * K, rows, K, K, bf16, SCRATCH_B, stream);
}

static inline int64_t matmul_slice(int64_t M, int64_t K) {
    return M * K <= MATMUL_SLICE ? M : MATMUL_SLICE / K > 0 ? MATMUL_SLICE / K : 1;
}

// Floats of a gradient that is kept as bf16 and computed at once, of a weight of so many values.
static inline int64_t matmul_grad_floats(int64_t weight) {
    return weight < MATMUL_SLICE ? weight : MATMUL_SLICE;
}

// Bytes of bf16 copies that a stream keeps for products of at most so many values each.
static inline int64_t matmul_bytes(int64_t weight, int64_t inputs, int64_t grads, Precision precision) {
    return precision == PRECISION_BF16 ? 2 * ((weight < MATMUL_SLICE ? weight : MATMUL_SLICE) + inputs + grads) : 0;
}

// out (N, M) = x (N, K) weight^T, plus residual (N, M) unless that is NULL; residual may be out.
static inline void matmul_forward(floatX *out, const floatX *x, Weight weight, int N, int K, int M,
                                  const floatX *residual, Stream *stream) {
    int bf16 = matmul_is_bf16(N, stream);
    if (residual != NULL && residual != out) device_copy(out, residual, sizeof(floatX) * (size_t)N * (size_t)M, stream);
    Operand a = matmul_operand(x, N, K, K, bf16, SCRATCH_A, stream);
    int64_t slice = matmul_slice(M, K);
    for (int64_t m = 0; m < M; m += slice) {
        int64_t width = M - m < slice ? M - m : slice;
        Operand b = matmul_weight(weight, m, width, K, bf16, stream);
        matmul_product(out + m, M, a.data, a.ld, 0, b.data, b.ld, 1, N, width, K, bf16, residual != NULL, stream);
    }
}

// dweight (rows, K) bf16 = or += grad^T input: the sum in fp32, rounded to the nearest.
static inline void matmul_half_grad(uint16_t *dweight, Operand grad, Operand input, int64_t rows, int N, int K,
                                    int bf16, int accumulate, Stream *stream) {
    Stored kept = {dweight, NULL, STORE_BF16, 1};
    float *sum = matmul_widened(dweight, rows * K, SCRATCH_WIDE, stream);
    if (sum == NULL) return;
    matmul_product(sum, K, grad.data, grad.ld, 1, input.data, input.ld, 0, rows, K, N, bf16, accumulate, stream);
    stored_write(kept, 0, sum, rows * K, rounding_nearest(), stream);
}

// dx (N, K) = dout (N, M) weight; dweight (M, K) = or += dout^T x, in bf16 where weight.half_grad says so; NULL: not
// wanted. x (N, K), weight (M, K).
static inline void matmul_backward(floatX *dx, float *dweight, const floatX *dout, const floatX *x, Weight weight,
                                   int N, int K, int M, int accumulate_dweight, Stream *stream) {
    int bf16 = matmul_is_bf16(N, stream);
    Operand input = {NULL, 0};
    if (dweight != NULL) input = matmul_operand(x, N, K, K, bf16, SCRATCH_A, stream);
    int64_t slice = matmul_slice(M, K);
    for (int64_t m = 0; m < M; m += slice) {
        int64_t width = M - m < slice ? M - m : slice;
        Operand grad = matmul_operand(dout + m, N, width, M, bf16, SCRATCH_C, stream);
        Operand w = matmul_weight(weight, m, width, K, bf16, stream);
        matmul_product(dx, K, grad.data, grad.ld, 0, w.data, w.ld, 0, N, K, width, bf16, m > 0, stream);
        if (dweight == NULL) continue;
        if (weight.half_grad)
            matmul_half_grad((uint16_t *)(void *)dweight + m * K, grad, input, width, N, K, bf16, accumulate_dweight,
                             stream);
        else
            matmul_product(dweight + m * K, K, grad.data, grad.ld, 1, input.data, input.ld, 0, width, K, N, bf16,
                           accumulate_dweight, stream);
    }
}

#endif
