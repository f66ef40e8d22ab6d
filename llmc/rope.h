// Rotary position embedding, CPU (Su et al. 2021), half-split as in Hugging Face checkpoints: dimension i of a head is
// paired with i + HD/2. Frequencies from rope_config.h, tables in fp32.
//   out[i]        = x[i] * cos - x[i + HD/2] * sin
//   out[i + HD/2] = x[i + HD/2] * cos + x[i] * sin          in place; backward is the rotation by the opposite angle
#ifndef LLMC_ROPE_H
#define LLMC_ROPE_H

#include <math.h>   // cosf, sinf
#include <stddef.h> // size_t

#include "device.h"      // floatX, Stream
#include "rope_config.h" // rope_inv_freq, for the caller

// cos, sin (T, HD/2) for positions 0..T-1. inv_freq (HD/2). The angle is rounded to fp32 as transformers does.
static inline void rope_tables(float *cos_table, float *sin_table, const float *inv_freq, int T, int HD,
                               Stream *stream) {
    int half = HD / 2;
#pragma omp parallel for num_threads(stream->threads)
    for (int t = 0; t < T; t++) {
        for (int i = 0; i < half; i++) {
            float angle = (float)t * inv_freq[i];
            cos_table[(size_t)t * half + i] = cosf(angle);
            sin_table[(size_t)t * half + i] = sinf(angle);
        }
    }
}

// positions (N) of a batch of sequences of T tokens that begin at `first`
static inline void rope_positions(int32_t *positions, int N, int T, int first, Stream *stream) {
#pragma omp parallel for num_threads(stream->threads)
    for (int n = 0; n < N; n++) positions[n] = first + n % T;
}

// positions (N) of a batch of sequences of T tokens that count anew in each document; starts (N): the row of its
// sequence at which the document of each row begins
static inline void rope_document_positions(int32_t *positions, const int32_t *starts, int N, int T, Stream *stream) {
#pragma omp parallel for num_threads(stream->threads)
    for (int n = 0; n < N; n++) positions[n] = n % T - starts[n];
}

static inline void rope_rotate(floatX *x, const float *cos_table, const float *sin_table, const int32_t *positions,
                               int N, int heads, int HD, int row_stride, float sign, Stream *stream) {
    int half = HD / 2;
#pragma omp parallel for num_threads(stream->threads)
    for (int n = 0; n < N; n++) {
        const float *cos_row = cos_table + (size_t)positions[n] * half;
        const float *sin_row = sin_table + (size_t)positions[n] * half;
        for (int h = 0; h < heads; h++) {
            floatX *low = x + (size_t)n * row_stride + (size_t)h * HD, *high = low + half;
#pragma omp simd
            for (int i = 0; i < half; i++) {
                float a = low[i], b = high[i], c = cos_row[i], s = sign * sin_row[i];
                low[i] = a * c - b * s;
                high[i] = b * c + a * s;
            }
        }
    }
}

// x: N rows of row_stride floats, the first heads*HD of each are rotated; positions (N) index the tables (T, HD/2).
static inline void rope_forward(floatX *x, const float *cos_table, const float *sin_table, const int32_t *positions,
                                int N, int heads, int HD, int row_stride, Stream *stream) {
    rope_rotate(x, cos_table, sin_table, positions, N, heads, HD, row_stride, 1.0f, stream);
}

// dx as x above: gradient with respect to the rotated values in, with respect to the plain ones out.
static inline void rope_backward(floatX *dx, const float *cos_table, const float *sin_table, const int32_t *positions,
                                 int N, int heads, int HD, int row_stride, Stream *stream) {
    rope_rotate(dx, cos_table, sin_table, positions, N, heads, HD, row_stride, -1.0f, stream);
}

#endif
