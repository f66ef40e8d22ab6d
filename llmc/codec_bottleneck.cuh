// Codec bottleneck, CUDA: a fixed orthonormal projection to K = round((1-p)*H) values, and its transpose back.
//
//   message   n*K values of x P^T, bf16 or fp32          P (K, H), P P^T = I (codec_end.h)
//   arrives   x P^T P
// The projection is symmetric, so the gradient of the function passes through it in the same way. The products are the
// matrix library's; the end's projection is copied to the device for each message, so that any GPU may take its turn.
#ifndef LLMC_CODEC_BOTTLENECK_CUH
#define LLMC_CODEC_BOTTLENECK_CUH

#include <cuda_bf16.h> // __nv_bfloat16
#include <stdint.h>    // fixed-width integers

#include "codec_end.h"       // CodecEnd
#include "codec_format.h"    // Codec, codec_fits, codec_is_whole
#include "codec_message.cuh" // codec_scratch, codec_piece, codec_convert
#include "device.cuh"        // floatX, Stream, device_copy
#include "matmul.cuh"        // matmul_forward

// A message on the device, its values as products take them, and the projection.
typedef struct {
    char *wired;
    floatX *values;
    float *basis;
} BottleneckMessage;

// 0, or -1: no memory.
static inline int bottleneck_message(BottleneckMessage *message, const float *basis, int64_t n_bytes, int64_t n_values,
                                     int64_t n_basis, Stream *stream) {
    int64_t wired = codec_piece(n_bytes), values = codec_piece(n_values * (int64_t)sizeof(floatX));
    char *scratch = (char *)codec_scratch(wired + values + n_basis * (int64_t)sizeof(float), stream);
    if (scratch == NULL) return -1;
    message->wired = scratch, message->values = (floatX *)(scratch + wired);
    message->basis = (float *)(scratch + wired + values);
    device_copy(message->basis, basis, sizeof(float) * (size_t)n_basis, stream);
    return 0;
}

static inline int64_t codec_bottleneck_encode(const Codec *codec, const CodecEnd *end, const CodecContext *context,
                                              const floatX *x, int n, int H, void *out, int64_t cap, Stream *stream) {
    BottleneckMessage m;
    int K = mask_kept(codec->mask_rate, H);
    int64_t n_bytes = codec_bytes(codec, context, n, H), n_values = (int64_t)n * K;
    if (codec_fits(n_bytes, cap) || bottleneck_message(&m, end->basis, n_bytes, n_values, (int64_t)K * H, stream))
        return -1;
    Weight basis = {m.basis, NULL, 0};
    matmul_forward(m.values, x, basis, n, H, K, NULL, stream);
    if (codec->wire == WIRE_FP32)
        codec_convert((float *)m.wired, m.values, n_values, stream);
    else
        codec_convert((__nv_bfloat16 *)m.wired, m.values, n_values, stream);
    device_copy(out, m.wired, (size_t)n_bytes, stream);
    return stream_check(stream) ? -1 : n_bytes;
}

static inline int codec_bottleneck_decode(const Codec *codec, const CodecEnd *end, const CodecContext *context,
                                          const void *in, int64_t n_bytes, floatX *x, int n, int H, Stream *stream) {
    BottleneckMessage m;
    int K = mask_kept(codec->mask_rate, H);
    int64_t n_values = (int64_t)n * K;
    if (codec_is_whole(n_bytes, codec_bytes(codec, context, n, H)) ||
        bottleneck_message(&m, end->basis_back, n_bytes, n_values, (int64_t)K * H, stream))
        return -1;
    Weight back = {m.basis, NULL, 0};
    device_copy(m.wired, in, (size_t)n_bytes, stream);
    if (codec->wire == WIRE_FP32)
        codec_convert(m.values, (const float *)m.wired, n_values, stream);
    else
        codec_convert(m.values, (const __nv_bfloat16 *)m.wired, n_values, stream);
    matmul_forward(x, m.values, back, n, K, H, NULL, stream);
    return stream_check(stream);
}

#endif
