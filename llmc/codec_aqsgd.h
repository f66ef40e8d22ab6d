// Codec aqsgd, CPU (Wang et al., "Fine-tuning language models over slow networks using activation compression with
// guarantees", 2022): forward, what has changed since a sample's last visit in 2 bits; backward, 8 bits.
//
//   forward    sequence after sequence of the micro-batch (T, H):
//                first visit    T*H bf16: x                                    cache = what is sent
//                later          quantized rows of 2 bits: d = x - cache        cache += what is sent of d, as bf16
//              arrives: the cache, which both ends keep in bf16 for every window of the training data
//   backward   quantized rows of 8 bits (quant_group.h)
// A message of a pass that is not training is bf16 and leaves the caches alone.
#ifndef LLMC_CODEC_AQSGD_H
#define LLMC_CODEC_AQSGD_H

#include <stdint.h> // fixed-width integers
#include <string.h> // memcpy

#include "codec_end.h"    // CodecEnd, codec_end_bytes, codec_end_visit
#include "codec_format.h" // Codec, codec_fits, codec_is_whole
#include "codec_quant.h"  // quant_encode, quant_decode
#include "codec_value.h"  // codec_put, codec_get
#include "device.h"       // floatX, Stream, scratch_get

// x (n) to or from bf16 at any address.
static inline void aqsgd_put(void *out, const float *x, int64_t n, Stream *stream) {
#pragma omp parallel for num_threads(stream->threads)
    for (int64_t i = 0; i < n; i++) codec_put((char *)out, i, x[i], WIRE_BF16);
}

static inline void aqsgd_get(float *x, const void *in, int64_t n, Stream *stream) {
#pragma omp parallel for num_threads(stream->threads)
    for (int64_t i = 0; i < n; i++) x[i] = codec_get((const char *)in, i, WIRE_BF16);
}

// cache (n) += the message `in` of its differences. d (n): scratch.
static inline void aqsgd_add(uint16_t *cache, float *d, const void *in, int T, QuantRow row, Stream *stream) {
    int64_t n = (int64_t)T * row.H;
    quant_decode(d, in, T, row, stream);
#pragma omp parallel for num_threads(stream->threads)
    for (int64_t i = 0; i < n; i++) cache[i] = bf16_of_float(float_of_bf16(cache[i]) + d[i]);
}

static inline void aqsgd_subtract(float *d, const float *x, const uint16_t *cache, int64_t n, Stream *stream) {
#pragma omp parallel for num_threads(stream->threads)
    for (int64_t i = 0; i < n; i++) d[i] = x[i] - float_of_bf16(cache[i]);
}

static inline int64_t aqsgd_encode(const Codec *codec, CodecEnd *end, const CodecContext *context, const floatX *x,
                                   int n, int H, void *out, int64_t cap, Stream *stream) {
    int64_t n_bytes = codec_end_bytes(codec, end, context, n, H), at = 0, piece = (int64_t)context->T * H;
    QuantRow row = codec_quant_row(codec, CODEC_FORWARD, H);
    if (n_bytes < 0 || codec_fits(n_bytes, cap)) return -1;
    if (!context->training) {
        aqsgd_put(out, x, (int64_t)n * H, stream);
        return n_bytes;
    }
    float *d = (float *)scratch_get(&stream->scratch[SCRATCH_OP], sizeof(float) * (size_t)piece);
    if (d == NULL) return -1;
    for (int s = 0; s < n / context->T; s++) {
        CodecVisit visit = codec_end_visit(codec, end, context, s, H);
        char *to = (char *)out + at;
        if (visit.is_first) {
            aqsgd_put(to, x + s * piece, piece, stream);
            memcpy(visit.cache, to, 2 * (size_t)piece);
        } else {
            aqsgd_subtract(d, x + s * piece, visit.cache, piece, stream);
            quant_encode(to, d, context->T, row, stream);
            aqsgd_add(visit.cache, d, to, context->T, row, stream);
        }
        at += visit.n_bytes;
    }
    return n_bytes;
}

static inline int aqsgd_decode(const Codec *codec, CodecEnd *end, const CodecContext *context, const void *in,
                               int64_t n_bytes, floatX *x, int n, int H, Stream *stream) {
    int64_t expected = codec_end_bytes(codec, end, context, n, H), at = 0, piece = (int64_t)context->T * H;
    QuantRow row = codec_quant_row(codec, CODEC_FORWARD, H);
    if (expected < 0 || codec_is_whole(n_bytes, expected)) return -1;
    if (!context->training) {
        aqsgd_get(x, in, (int64_t)n * H, stream);
        return 0;
    }
    for (int s = 0; s < n / context->T; s++) {
        CodecVisit visit = codec_end_visit(codec, end, context, s, H);
        const char *from = (const char *)in + at;
        if (visit.is_first)
            memcpy(visit.cache, from, 2 * (size_t)piece);
        else
            aqsgd_add(visit.cache, x + s * piece, from, context->T, row, stream);
        aqsgd_get(x + s * piece, visit.cache, piece, stream);
        at += visit.n_bytes;
    }
    return 0;
}

static inline int64_t codec_aqsgd_encode(const Codec *codec, CodecEnd *end, const CodecContext *context,
                                         const floatX *x, int n, int H, void *out, int64_t cap, Stream *stream) {
    return context->direction == CODEC_FORWARD ? aqsgd_encode(codec, end, context, x, n, H, out, cap, stream)
                                               : codec_quant_encode(codec, context, x, n, H, out, cap, stream);
}

static inline int codec_aqsgd_decode(const Codec *codec, CodecEnd *end, const CodecContext *context, const void *in,
                                     int64_t n_bytes, floatX *x, int n, int H, Stream *stream) {
    return context->direction == CODEC_FORWARD ? aqsgd_decode(codec, end, context, in, n_bytes, x, n, H, stream)
                                               : codec_quant_decode(codec, context, in, n_bytes, x, n, H, stream);
}

#endif
