// A value of a message, CPU: little-endian bf16 (nearest even) or fp32, at any address.
#ifndef LLMC_CODEC_VALUE_H
#define LLMC_CODEC_VALUE_H

#include <stdint.h> // fixed-width integers
#include <string.h> // memcpy

#include "codec_format.h" // Wire
#include "dtype.h"        // bf16_of_float, float_of_bf16

// Value i of values on the wire.
static inline void codec_put(char *values, int64_t i, float value, Wire wire) {
    if (wire == WIRE_FP32) {
        memcpy(values + i * 4, &value, 4);
    } else {
        uint16_t half = bf16_of_float(value);
        memcpy(values + i * 2, &half, 2);
    }
}

static inline float codec_get(const char *values, int64_t i, Wire wire) {
    float value;
    uint16_t half;
    if (wire == WIRE_FP32) {
        memcpy(&value, values + i * 4, 4);
        return value;
    }
    memcpy(&half, values + i * 2, 2);
    return float_of_bf16(half);
}

#endif
