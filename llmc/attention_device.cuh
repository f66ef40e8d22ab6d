// What both kinds of attention kernels share: attention_mma.cuh and attention_plain.cuh.
#ifndef LLMC_ATTENTION_DEVICE_CUH
#define LLMC_ATTENTION_DEVICE_CUH

#include <stdint.h> // int32_t

#include "attention_shape.h"
#include "device.cuh" // __device__

// Before a loop over registers: only an unrolled one leaves them there. The emulator keeps its arrays in memory.
#ifdef CUDA_EMULATOR
#define UNROLL
#define UNROLL_1
#else
#define UNROLL   _Pragma("unroll")
#define UNROLL_1 _Pragma("unroll 1")
#endif

#define LOG2_E 1.44269504088896341f

// Rows of statistics the backward keeps for T queries of a head: whole tiles of every kernel.
HOST_DEVICE static inline int attention_rows(int T) {
    return (T + 127) / 128 * 128;
}

// The position from which on no query sees key `at`: the end of its document or of the window that begins with it.
__device__ static inline int attention_end(const AttentionShape *s, const int32_t *starts, int at) {
    int T = s->window > 0 && s->Tk - at > s->window ? at + s->window : s->Tk;
    int low = at + 1 < T ? at + 1 : T, high = T; // starts never fall: the first one beyond `at` lies in low .. high
    if (starts == NULL) return T;
    while (low < high) {
        int middle = (low + high) / 2;
        if (starts[middle] > at)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

#endif
