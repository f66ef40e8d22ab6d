// PowerSGD (Vogels, Karimireddy and Jaggi 2019) of a matrix delta (m,n) at rank r <= min(m,n), CPU: what one replica
// computes between two averages over the replicas. P (m,r), Q (n,r) are what travels.
//   powersgd_left(P, delta, Q)             P = delta Q           then: average P over the replicas, orthonormalize(P)
//   powersgd_right(Q_own, delta, P)        Q_own = delta^T P     then: Q = average of Q_own over the replicas
//   powersgd_expand(update, P, Q)          update = P Q^T        what all replicas apply
//   powersgd_error(error, delta, P, Q_own) error = delta - P Q_own^T     added to the next delta
// Q starts from powersgd_init and is kept from round to round: the iteration goes on where it was. The replicas' mean
// of update + error is their mean delta: nothing is lost, only late, but for the rounding of a bf16 wire. Products are
// fp32 whatever the stream's precision.
#ifndef LLMC_POWERSGD_H
#define LLMC_POWERSGD_H

#include <stdint.h> // fixed-width integers

#include "device.h" // Stream, scratch_get
#include "linalg.h" // orthonormalize, for the caller
#include "matmul.h" // matmul_product
#include "rand.h"   // rand_normal

// Q (n,r) = standard normals, the same on every replica; `sub` is the tensor. Returns 0, or -1: the stream has failed.
static inline int powersgd_init(float *Q, int n, int r, uint64_t seed, uint32_t sub, Stream *stream) {
    if (stream_check(stream)) return -1;
    rand_normal(Q, (int64_t)n * r, seed, RAND_POWERSGD, sub);
    return 0;
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

// error (m,n) = delta (m,n) - P (m,r) Q_own (n,r)^T; error may be delta. Fails the stream without memory.
static inline void powersgd_error(float *error, const float *delta, const float *P, const float *Q_own, int m, int n,
                                  int r, Stream *stream) {
    int64_t count = (int64_t)m * r;
    float *minus = (float *)scratch_get(&stream->scratch[SCRATCH_OP], sizeof(float) * (size_t)count); // (m,r)
    if (minus == NULL) {
        stream->failed = 1;
        return;
    }
    for (int64_t i = 0; i < count; i++) minus[i] = -P[i];
    if (error != delta) device_copy(error, delta, sizeof(float) * (size_t)m * (size_t)n, stream);
    matmul_product(error, n, minus, r, 0, Q_own, r, 1, m, n, r, 0, 1, stream);
}

#endif
