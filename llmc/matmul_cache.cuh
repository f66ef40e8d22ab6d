// What a stream keeps of each matrix product's shape (matmul.cuh): cuBLASLt's descriptions and the algorithm chosen.
#ifndef LLMC_MATMUL_CACHE_CUH
#define LLMC_MATMUL_CACHE_CUH

#include <cublasLt.h> // the descriptions
#include <stdint.h>   // fixed-width integers
#include <string.h>   // memset

typedef struct {
    int64_t rows, cols, inner, lda, ldb, ldo;
    int64_t align_a, align_b, align_out;  // bytes all pointers of this entry are multiples of
    int trans_a, trans_b, bf16, out_bf16; // element types: of both operands, of the result
} MatmulShape;
static_assert(sizeof(MatmulShape) == 9 * sizeof(int64_t) + 4 * sizeof(int), "shapes are compared as bytes: no padding");

typedef struct {
    MatmulShape shape;
    cublasLtMatmulDesc_t product; // NULL: empty slot
    cublasLtMatrixLayout_t a, b, out;
    cublasLtMatmulAlgo_t algorithm;
    size_t workspace_bytes; // the algorithm's
} MatmulEntry;

#define MATMUL_SLOTS 1024

// Empties a slot.
static inline void matmul_entry_free(MatmulEntry *entry) {
    if (entry->product != NULL) cublasLtMatmulDescDestroy(entry->product);
    if (entry->a != NULL) cublasLtMatrixLayoutDestroy(entry->a);
    if (entry->b != NULL) cublasLtMatrixLayoutDestroy(entry->b);
    if (entry->out != NULL) cublasLtMatrixLayoutDestroy(entry->out);
    memset(entry, 0, sizeof *entry);
}

#endif
