// Codec aqsgd, CUDA (Wang et al., "Fine-tuning language models over slow networks using activation compression with
// guarantees", 2022): forward, what has changed since a sample's last visit in 2 bits; backward, 8 bits.
//
//   forward    sequence after sequence of the micro-batch (T, H):
//                first visit    T*H bf16: x                                    cache = what is sent
//                later          quantized rows of 2 bits: d = x - cache        cache += what is sent of d, as bf16
//              arrives: the cache, which both ends keep in bf16 for every window of the training data
//   backward   quantized rows of 8 bits (quant_group.h)
// A message of a pass that is not training is bf16 and leaves the caches alone. Caches are the host's: a sequence's
// piece comes to the device for its visit.
#ifndef LLMC_CODEC_AQSGD_CUH
#define LLMC_CODEC_AQSGD_CUH

#include <cuda_bf16.h> // __nv_bfloat16
#include <stdint.h>    // fixed-width integers
#include <string.h>    // memcpy

#include "codec_end.h"       // CodecEnd, codec_end_bytes, codec_end_visit
#include "codec_format.h"    // Codec, codec_fits, codec_is_whole
#include "codec_message.cuh" // codec_scratch, codec_piece, codec_convert
#include "codec_quant.cuh"   // quant_encode, quant_decode
#include "device.cuh"        // floatX, Stream, LAUNCH
#include "elements.cuh"      // elements_do

struct AqsgdSubtractOp {
    float *d;
    const floatX *x;
    const __nv_bfloat16 *cache;
    template <int WIDTH> __device__ void at(int64_t i) const {
        Values<WIDTH> values = values_load<WIDTH>(x + i), old = values_load<WIDTH>(cache + i);
        for (int j = 0; j < WIDTH; j++) values.v[j] -= old.v[j];
        values_store(d + i, values);
    }
};

struct AqsgdAddOp {
    __nv_bfloat16 *cache;
    const float *d;
    template <int WIDTH> __device__ void at(int64_t i) const {
        Values<WIDTH> values = values_load<WIDTH>(cache + i), more = values_load<WIDTH>(d + i);
        for (int j = 0; j < WIDTH; j++) values.v[j] += more.v[j];
        values_store(cache + i, values);
    }
};

// d = x - cache. A thread for 8 values (elements.cuh), blocks of 256. Moves 8 bytes a value in bf16.
__global__ static void __launch_bounds__(ELEMENTS_BLOCK) aqsgd_subtract_kernel(AqsgdSubtractOp op, Elements range) {
    elements_do<8>(op, range);
}

// cache += d, rounded to nearest even. The same launch. Moves 8 bytes a value.
__global__ static void __launch_bounds__(ELEMENTS_BLOCK) aqsgd_add_kernel(AqsgdAddOp op, Elements range) {
    elements_do<8>(op, range);
}

// A sequence on the device: its message, its cache and its differences.
typedef struct {
    int64_t n;
    char *message;
    __nv_bfloat16 *cache;
    float *d;
} AqsgdPiece;

// 0, or -1: no memory.
static inline int aqsgd_piece(AqsgdPiece *piece, int64_t n, Stream *stream) {
    int64_t halves = codec_piece(3 * n); // a row of one value has 2 bytes of scale and one of code
    char *scratch = (char *)codec_scratch(2 * halves + 4 * n, stream);
    piece->n = n, piece->message = scratch, piece->cache = (__nv_bfloat16 *)(scratch + halves);
    piece->d = (float *)(scratch + 2 * halves);
    return scratch == NULL ? -1 : 0;
}

static inline void aqsgd_add(const AqsgdPiece *piece, Stream *stream) {
    AqsgdAddOp op = {piece->cache, piece->d};
    Elements range = elements_of(piece->n, 8, 1);
    LAUNCH(aqsgd_add_kernel, range.blocks, ELEMENTS_BLOCK, 0, stream, op, range);
}

static inline void aqsgd_subtract(const AqsgdPiece *piece, const floatX *x, Stream *stream) {
    AqsgdSubtractOp op = {piece->d, x, piece->cache};
    Elements range = elements_of(piece->n, 8, aligned_16(x));
    LAUNCH(aqsgd_subtract_kernel, range.blocks, ELEMENTS_BLOCK, 0, stream, op, range);
}

// out = n values of x as bf16, through the piece's message.
static inline void aqsgd_put(void *out, const floatX *x, const AqsgdPiece *piece, Stream *stream) {
    codec_convert((__nv_bfloat16 *)piece->message, x, piece->n, stream);
    device_copy(out, piece->message, 2 * (size_t)piece->n, stream);
}

static inline void aqsgd_get(floatX *x, const void *in, const AqsgdPiece *piece, Stream *stream) {
    device_copy(piece->message, in, 2 * (size_t)piece->n, stream);
    codec_convert(x, (const __nv_bfloat16 *)piece->message, piece->n, stream);
}

// Sends one later visit, whose cache follows.
static inline void aqsgd_send(void *out, CodecVisit visit, const floatX *x, const AqsgdPiece *piece, int T,
                              QuantRow row, Stream *stream) {
    device_copy(piece->cache, visit.cache, 2 * (size_t)piece->n, stream);
    aqsgd_subtract(piece, x, stream);
    quant_encode(piece->message, piece->d, T, row, stream);
    device_copy(out, piece->message, (size_t)visit.n_bytes, stream);
    quant_decode(piece->d, piece->message, T, row, stream);
    aqsgd_add(piece, stream);
    device_copy(visit.cache, piece->cache, 2 * (size_t)piece->n, stream);
}

static inline void aqsgd_take(floatX *x, CodecVisit visit, const void *in, const AqsgdPiece *piece, int T, QuantRow row,
                              Stream *stream) {
    device_copy(piece->cache, visit.cache, 2 * (size_t)piece->n, stream);
    device_copy(piece->message, in, (size_t)visit.n_bytes, stream);
    quant_decode(piece->d, piece->message, T, row, stream);
    aqsgd_add(piece, stream);
    device_copy(visit.cache, piece->cache, 2 * (size_t)piece->n, stream);
    codec_convert(x, piece->cache, piece->n, stream);
}

static inline int64_t aqsgd_encode(const Codec *codec, CodecEnd *end, const CodecContext *context, const floatX *x,
                                   int n, int H, void *out, int64_t cap, Stream *stream) {
    AqsgdPiece piece;
    int T = context->training ? context->T : n;
    int64_t n_bytes = codec_end_bytes(codec, end, context, n, H), at = 0;
    QuantRow row = codec_quant_row(codec, CODEC_FORWARD, H);
    if (n_bytes < 0 || codec_fits(n_bytes, cap) || aqsgd_piece(&piece, (int64_t)T * H, stream)) return -1;
    if (!context->training) aqsgd_put(out, x, &piece, stream);
    for (int s = 0; s < n / T && context->training; s++) {
        CodecVisit visit = codec_end_visit(codec, end, context, s, H);
        char *to = (char *)out + at;
        if (visit.is_first) {
            aqsgd_put(to, x + s * piece.n, &piece, stream);
            memcpy(visit.cache, to, 2 * (size_t)piece.n);
        } else {
            aqsgd_send(to, visit, x + s * piece.n, &piece, T, row, stream);
        }
        at += visit.n_bytes;
    }
    return stream_check(stream) ? -1 : n_bytes;
}

static inline int aqsgd_decode(const Codec *codec, CodecEnd *end, const CodecContext *context, const void *in,
                               int64_t n_bytes, floatX *x, int n, int H, Stream *stream) {
    AqsgdPiece piece;
    int T = context->training ? context->T : n;
    int64_t expected = codec_end_bytes(codec, end, context, n, H), at = 0;
    QuantRow row = codec_quant_row(codec, CODEC_FORWARD, H);
    if (expected < 0 || codec_is_whole(n_bytes, expected) || aqsgd_piece(&piece, (int64_t)T * H, stream)) return -1;
    if (!context->training) aqsgd_get(x, in, &piece, stream);
    for (int s = 0; s < n / T && context->training; s++) {
        CodecVisit visit = codec_end_visit(codec, end, context, s, H);
        const char *from = (const char *)in + at;
        if (visit.is_first) {
            memcpy(visit.cache, from, 2 * (size_t)piece.n);
            aqsgd_get(x + s * piece.n, from, &piece, stream);
        } else {
            aqsgd_take(x + s * piece.n, visit, from, &piece, T, row, stream);
        }
        at += visit.n_bytes;
    }
    return stream_check(stream);
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
