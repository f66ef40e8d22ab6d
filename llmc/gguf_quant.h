// Blocks of quantized values as GGUF files hold them, back to fp32. d and m are halves, one pair a block; in the K
// types (256 values) pieces of 16 or 32 values have scales of their own, in 4, 6 or 8 bits.
//
//   type  values  bytes, little-endian                                           value
//   Q4_0      32  d 2, q 16                                                      d * (q - 8)
//   Q4_1      32  d 2, m 2, q 16                                                 d * q + m
//   Q5_0      32  d 2, high bits 4, q 16                                         d * (q - 16)
//   Q5_1      32  d 2, m 2, high bits 4, q 16                                    d * q + m
//   Q8_0      32  d 2, q 32 signed                                               d * q
//   Q2_K     256  scale and minimum 16 (4 bits each), q 64, d 2, m 2             d * scale * q - m * minimum
//   Q3_K     256  high bits 32, q 64, scales 12 (6 bits, 32 more), d 2           d * scale * (q - 4)
//   Q4_K     256  d 2, m 2, scales and minima 12 (6 bits each), q 128            d * scale * q - m * minimum
//   Q5_K     256  d 2, m 2, scales and minima 12, high bits 32, q 128            the same
//   Q6_K     256  low 4 bits 128, high 2 bits 64, scales 16 signed, d 2          d * scale * (q - 32)
//
// In blocks of 32 a byte of q holds value i in its low half, value i + 16 in its high one. In the K types 32 bytes hold
// 32 values in their lowest bits, the next 32 in the bits above, and so on (Q6_K's low bits: 64 bytes).
#ifndef LLMC_GGUF_QUANT_H
#define LLMC_GGUF_QUANT_H

#include <stdint.h> // fixed-width integers
#include <string.h> // memcpy

#include "dtype.h" // Dtype, float_of_half

enum { QUANT_BLOCK = 256 /* the largest */ };

static inline float quant_half(const uint8_t *bytes) {
    return float_of_half((uint16_t)(bytes[0] | bytes[1] << 8));
}

// Four or five bits a value: low (16), and high (4) for the fifth, NULL: none. out (32) = d * (q - zero) + m
static inline void quant_32(float *out, const uint8_t *low, const uint8_t *high, float d, int zero, float m) {
    for (int i = 0; i < 32; i++) {
        int q = low[i % 16] >> (i / 16 * 4) & 15;
        if (high != NULL) q |= (high[i / 8] >> i % 8 & 1) << 4;
        float scaled = d * (float)(q - zero);
        out[i] = zero != 0 ? scaled : scaled + m;
    }
}

// The pair j (0..7) of a scale and a minimum, 6 bits each, from 12 bytes: 0..3 have bytes of their own, whose upper two
// bits are those of 4..7.
static inline void quant_pair(const uint8_t *packed, int j, float *scale, float *minimum) {
    int low = j < 4, k = j % 4;
    *scale = (float)(low ? packed[k] & 63 : (packed[8 + k] & 15) | (packed[k] >> 6) << 4);
    *minimum = (float)(low ? packed[4 + k] & 63 : packed[8 + k] >> 4 | (packed[4 + k] >> 6) << 4);
}

static inline void quant_q2_k(float *out, const uint8_t *block) {
    float d = quant_half(block + 80), m = quant_half(block + 82);
    for (int i = 0; i < 256; i++) {
        int pair = block[i / 16], q = block[16 + i / 128 * 32 + i % 32] >> (i / 32 % 4 * 2) & 3;
        out[i] = d * (float)(pair & 15) * (float)q - m * (float)(pair >> 4);
    }
}

// Scale j (0..15): low 4 bits in byte j % 8, high 2 bits in byte 8 + j % 4.
static inline void quant_q3_k(float *out, const uint8_t *block) {
    const uint8_t *high = block, *low = block + 32, *packed = block + 96;
    float d = quant_half(block + 108);
    for (int i = 0; i < 256; i++) {
        int j = i / 16;
        int scale = (packed[j % 8] >> (j / 8 * 4) & 15) | (packed[8 + j % 4] >> (j / 4 * 2) & 3) << 4;
        int q = (low[i / 128 * 32 + i % 32] >> (i / 32 % 4 * 2) & 3) | (high[i % 32] >> (i / 32) & 1) << 2;
        out[i] = d * (float)(scale - 32) * (float)(q - 4);
    }
}

// high (32): the fifth bits, NULL for Q4_K
static inline void quant_q45_k(float *out, const uint8_t *block, const uint8_t *high, const uint8_t *low) {
    float d = quant_half(block), m = quant_half(block + 2), scale, minimum;
    for (int j = 0; j < 8; j++) {
        quant_pair(block + 4, j, &scale, &minimum);
        scale *= d, minimum *= m;
        for (int i = 0; i < 32; i++) {
            int q = low[j / 2 * 32 + i] >> (j % 2 * 4) & 15;
            if (high != NULL) q |= (high[i] >> j & 1) << 4;
            out[32 * j + i] = scale * (float)q - minimum;
        }
    }
}

static inline void quant_q6_k(float *out, const uint8_t *block) {
    const uint8_t *low = block, *high = block + 128, *scales = block + 192;
    float d = quant_half(block + 208);
    for (int i = 0; i < 256; i++) {
        int q = (low[i / 128 * 64 + i % 64] >> (i / 64 % 2 * 4) & 15) |
                (high[i / 128 * 32 + i % 32] >> (i / 32 % 4 * 2) & 3) << 4;
        out[i] = d * (float)(int8_t)scales[i / 16] * (float)(q - 32);
    }
}

// out (dtype_block values) = one block of a quantized type.
static inline void quant_block(float *out, Dtype dtype, const uint8_t *block) {
    float d = quant_half(block);
    switch (dtype) {
    case DTYPE_Q4_0: quant_32(out, block + 2, NULL, d, 8, 0.0f); return;
    case DTYPE_Q4_1: quant_32(out, block + 4, NULL, d, 0, quant_half(block + 2)); return;
    case DTYPE_Q5_0: quant_32(out, block + 6, block + 2, d, 16, 0.0f); return;
    case DTYPE_Q5_1: quant_32(out, block + 8, block + 4, d, 0, quant_half(block + 2)); return;
    case DTYPE_Q8_0:
        for (int i = 0; i < 32; i++) out[i] = d * (float)(int8_t)block[2 + i];
        return;
    case DTYPE_Q2_K: quant_q2_k(out, block); return;
    case DTYPE_Q3_K: quant_q3_k(out, block); return;
    case DTYPE_Q4_K: quant_q45_k(out, block, NULL, block + 16); return;
    case DTYPE_Q5_K: quant_q45_k(out, block, block + 16, block + 48); return;
    case DTYPE_Q6_K: quant_q6_k(out, block); return;
    default: return;
    }
}

// out (n) = values first, first + 1, ... of a row of blocks of a quantized type; both ends may lie within a block.
static inline void quant_read(float *out, Dtype dtype, const uint8_t *blocks, int64_t first, int64_t n) {
    float values[QUANT_BLOCK];
    int64_t size = dtype_block(dtype);
    while (n > 0) {
        const uint8_t *block = blocks + (size_t)(first / size) * dtype_size(dtype);
        int64_t skip = first % size, count = n < size - skip ? n : size - skip;
        if (count == size) {
            quant_block(out, dtype, block);
        } else {
            quant_block(values, dtype, block);
            memcpy(out, values + skip, sizeof(float) * (size_t)count);
        }
        out += count, first += count, n -= count;
    }
}

#endif
