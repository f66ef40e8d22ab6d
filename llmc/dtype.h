// Element types of files and their conversion to and from float.
#ifndef LLMC_DTYPE_H
#define LLMC_DTYPE_H

#include <stddef.h> // size_t
#include <stdint.h> // fixed-width integers
#include <string.h> // memcpy

#include "portable.h" // HOST_DEVICE

typedef enum {
    DTYPE_F32,
    DTYPE_BF16,
    DTYPE_F16,
    DTYPE_F64,
    DTYPE_I64,
    DTYPE_U64,
    DTYPE_I32,
    DTYPE_U32,
    DTYPE_I16,
    DTYPE_U16,
    DTYPE_I8,
    DTYPE_U8,
    DTYPE_BOOL,
    DTYPE_F8_E4M3,
    DTYPE_F8_E5M2,
    DTYPE_SAFETENSORS, // those above are what a safetensors file may hold, those below blocks of a GGUF
    DTYPE_Q4_0 = DTYPE_SAFETENSORS,
    DTYPE_Q4_1,
    DTYPE_Q5_0,
    DTYPE_Q5_1,
    DTYPE_Q8_0,
    DTYPE_Q2_K,
    DTYPE_Q3_K,
    DTYPE_Q4_K,
    DTYPE_Q5_K,
    DTYPE_Q6_K,
    DTYPE_COUNT
} Dtype;

// The name that safetensors headers and GGUF tools use.
static inline const char *dtype_name(Dtype dtype) {
    static const char *const names[DTYPE_COUNT] = {
        "F32",     "BF16",    "F16",  "F64",  "I64",  "U64",  "I32",  "U32",  "I16",  "U16",  "I8",   "U8",  "BOOL",
        "F8_E4M3", "F8_E5M2", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"};
    return names[dtype];
}

// Values of a block: 1 for plain types, whose elements stand alone.
static inline int dtype_block(Dtype dtype) {
    return dtype < DTYPE_SAFETENSORS ? 1 : dtype < DTYPE_Q2_K ? 32 : 256;
}

// Bytes of a block, of an element for plain types.
static inline size_t dtype_size(Dtype dtype) {
    static const size_t sizes[DTYPE_COUNT] = {4, 2, 2,  8,  8,  8,  4,  4,  2,   2,   1,   1,  1,
                                              1, 1, 18, 20, 22, 24, 34, 84, 110, 144, 176, 210};
    return sizes[dtype];
}

static inline HOST_DEVICE float float_of_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline HOST_DEVICE float float_of_bf16(uint16_t half) {
    return float_of_bits((uint32_t)half << 16);
}

// IEEE half to float: subnormals scaled exactly, infinities and NaN kept.
static inline HOST_DEVICE float float_of_half(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000u) << 16, exponent = half >> 10 & 31u, mantissa = half & 1023u;
    if (exponent == 31) return float_of_bits(sign | 0x7F800000u | mantissa << 13);
    if (exponent == 0) {
        float value = (float)mantissa * 0x1p-24f;
        return sign != 0 ? -value : value;
    }
    return float_of_bits(sign | (exponent + 112) << 23 | mantissa << 13);
}

// Rounds to nearest even; NaN stays NaN. Without branches, so that loops over it vectorise.
static inline HOST_DEVICE uint16_t bf16_of_float(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    uint32_t rounded = (bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16, quiet = bits >> 16 | 0x40u;
    return (uint16_t)((bits & 0x7FFFFFFFu) > 0x7F800000u ? quiet : rounded);
}

// Rounds to nearest even: what is too large becomes infinite, what is too small a subnormal or zero; NaN stays NaN.
static inline HOST_DEVICE uint16_t half_of_float(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    uint32_t sign = bits >> 16 & 0x8000u, size = bits & 0x7FFFFFFFu;
    if (size > 0x7F800000u) return (uint16_t)(sign | 0x7E00u);
    if (size >= 0x477FF000u) return (uint16_t)(sign | 0x7C00u); // 65520 is the first that rounds up to 2^16
    if (size < 0x38800000u) {                                   // below 2^-14: a multiple of 2^-24
        float scaled = float_of_bits(size) * 0x1p24f;
        uint32_t whole = (uint32_t)scaled;
        float rest = scaled - (float)whole;
        return (uint16_t)(sign | (whole + (rest > 0.5f || (rest == 0.5f && (whole & 1u) != 0))));
    }
    uint32_t rounded = size + 0xFFFu + (size >> 13 & 1u);
    return (uint16_t)(sign | ((rounded >> 13) - (112u << 10)));
}

#endif
