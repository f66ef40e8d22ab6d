// PowerSGD (Vogels, Karimireddy and Jaggi 2019) of a matrix delta (m,n) at rank r <= min(m,n), CUDA: what one replica
// computes between two averages over the replicas. P (m,r), Q (n,r) are what travels. All pointers are device memory.
//   powersgd_left(P, delta, Q)             P = delta Q           then: average P over the replicas, orthonormalize(P)
//   powersgd_right(Q_own, delta, P)        Q_own = delta^T P     then: Q = average of Q_own over the replicas
//   powersgd_expand(update, P, Q)          update = P Q^T        what all replicas apply
//   powersgd_error(error, delta, P, Q_own) error = delta - P Q_own^T     added to the next delta; one product
// Products are fp32 in every build.
#ifndef LLMC_POWERSGD_CUH
#define LLMC_POWERSGD_CUH

#include <stdint.h> // fixed-width integers
#include <stdlib.h> // malloc

#include "device.cuh" // Stream, device_copy
#include "linalg.cuh" // orthonormalize, for the caller
#include "matmul.cuh" // matmul_product, matmul_scaled
#include "rand.h"     // rand_normal

// Q (n,r) = standard normals, the same on every replica; `sub` is the tensor. Drawn by the CPU: its bits are then those
// of the replicas that have no GPU. Returns 0, or -1: no memory, or the stream has failed.
static inline int powersgd_init(float *Q, int n, int r, uint64_t seed, uint32_t sub, Stream *stream) {
    int64_t count = (int64_t)n * r;
    float *drawn = (float *)malloc(sizeof(float) * (size_t)count);
    if (drawn == NULL) return error_set("out of memory for PowerSGD's start");
    rand_normal(drawn, count, seed, RAND_POWERSGD, sub);
    device_copy(Q, drawn, sizeof(float) * (size_t)count, stream);
    free(drawn);
    return stream_check(stream);
}

// P (m,r) = delta (m,n) Q (n,r)
static inline void powersgd_left(float *P, const float *delta, const float *Q, int m, int n, int r, Stream *stream) {
    matmul_product(P, r, delta, n, 0, Q, r, 0, m, r, n, 0, 0, stream);
}

// Q (n,r) = delta (m,n)^T P (m,r), P orthonormal
static inline void powersgd_right(float *Q, const float *delta, const float *P, int m, int n, int r, Stream *stream) {
    matmul_product(Q, r, delta, n, 1, P, r, 0, n, r, m, 0, 0, stream);
}

// out (m,n) = P (m,r) Q (n,r)^T
static inline void powersgd_expand(float *out, const float *P, const float *Q, int m, int n, int r, Stream *stream) {
    matmul_product(out, n, P, r, 0, Q, r, 1, m, n, r, 0, 0, stream);
}

// error (m,n) = delta (m,n) - P (m,r) Q_own (n,r)^T; error may be delta.
static inline void powersgd_error(float *error, const float *delta, const float *P, const float *Q_own, int m, int n,
                                  int r, Stream *stream) {
    if (error != delta) device_copy(error, delta, sizeof(float) * (size_t)m * (size_t)n, stream);
    matmul_scaled(error, n, P, r, 0, Q_own, r, 1, m, n, r, -1.0f, 1.0f, stream);
}

#endif
