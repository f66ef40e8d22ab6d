// Elementary functions that the compiler can vectorise without -ffast-math: straight arithmetic, no branches, no
// table, NaN in gives NaN out. Call them inside `#pragma omp simd` loops.
#ifndef LLMC_VMATH_H
#define LLMC_VMATH_H

#include <stdint.h> // fixed-width integers
#include <string.h> // memcpy

// e^x, relative error below 3e-7 for x in [-87, 88]; smaller x give e^-87 (1.6e-38), larger ones e^88.
// x = n ln2 + r with |r| <= ln2/2, then the Taylor polynomial of degree 7 by Horner, scaled by 2^n.
static inline float exp_simd(float x) {
    x = x < -87.0f ? -87.0f : x;
    x = x > 88.0f ? 88.0f : x;
    const float shift = 12582912.0f; // 1.5 * 2^23: adding it rounds to an integer
    float n = (x * 1.44269504088896341f + shift) - shift;
    float r = x - n * 0.693359375f; // ln2 in two parts
    r = r + n * 2.12194440e-4f;
    float p = 1.0f / 5040.0f;
    p = p * r + 1.0f / 720.0f;
    p = p * r + 1.0f / 120.0f;
    p = p * r + 1.0f / 24.0f;
    p = p * r + 1.0f / 6.0f;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    int32_t bits = (int32_t)((uint32_t)((int32_t)n + 127) << 23);
    float scale;
    memcpy(&scale, &bits, sizeof scale);
    return p * scale;
}

// 1 / (1 + e^-x)
static inline float sigmoid_simd(float x) {
    return 1.0f / (1.0f + exp_simd(-x));
}

#endif
