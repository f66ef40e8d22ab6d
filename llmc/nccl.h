// Several devices as one worker, CPU: there is one, and nothing to sum. nccl.cuh has the meaning of each call.
#ifndef LLMC_NCCL_H
#define LLMC_NCCL_H

#include <stdint.h> // fixed-width integers
#include <stdlib.h> // calloc

#include "device.h" // Stream
#include "error.h"  // error_set

typedef struct {
    int n_devices; // 1
} Nccl;

// How many devices there are to choose from.
static inline int nccl_devices(void) {
    return 1;
}

static inline int nccl_create(Nccl **out, int n_devices) {
    if (n_devices != 1)
        return error_set("%d GPUs asked for, but this program computes on the CPU: make train DEVICE=cuda NCCL=1",
                         n_devices);
    *out = (Nccl *)calloc(1, sizeof **out);
    if (*out == NULL) return error_set("out of memory");
    (*out)->n_devices = 1;
    return 0;
}

static inline void nccl_destroy(Nccl *nccl) {
    free(nccl);
}

static inline int nccl_sum(Nccl *nccl, float *const *values, int64_t n, Stream *const *streams) {
    (void)nccl, (void)values, (void)n, (void)streams;
    return 0;
}

static inline int nccl_share(Nccl *nccl, float *const *values, int64_t n, Stream *const *streams) {
    (void)nccl, (void)values, (void)n, (void)streams;
    return 0;
}

static inline int nccl_wait(Nccl *nccl, Stream *const *streams) {
    (void)nccl, (void)streams;
    return 0;
}

#endif
