// The spectral filter's response to one singular value, the same on the CPU and on the GPU.
#ifndef LLMC_RESPONSE_H
#define LLMC_RESPONSE_H

#include "portable.h" // HOST_DEVICE

// s / (s + scale) in [0, 1), 0 for s <= 0 and for NaN
static inline HOST_DEVICE float response_of(float s, float scale) {
    float response = s > 0.0f ? s / (s + scale) : 0.0f;
    return response < 1.0f ? response : 1.0f - 0x1p-24f; // rounding reaches 1 at s = 2^24 scale; inf/inf
}

#endif
