// Codec bottleneck, CPU: a fixed orthonormal projection to K = round((1-p)*H) values, and its transpose back.
//
//   message   n*K values of x P^T, bf16 or fp32          P (K, H), P P^T = I (codec_end.h)
//   arrives   x P^T P
// The projection is symmetric, so the gradient of the function passes through it in the same way.
#ifndef LLMC_CODEC_BOTTLENECK_H
#define LLMC_CODEC_BOTTLENECK_H

#include <stdint.h> // fixed-width integers

#include "codec_end.h"    // CodecEnd
#include "codec_format.h" // Codec, codec_fits, codec_is_whole
#include "codec_value.h"  // codec_put, codec_get
#include "device.h"       // floatX, Stream, scratch_get
#include "matmul.h"       // matmul_forward

static inline float *codec_bottleneck_scratch(int64_t n, Stream *stream) {
    return (float *)scratch_get(&stream->scratch[SCRATCH_OP], sizeof(float) * (size_t)(n > 0 ? n : 1));
}

static inline int64_t codec_bottleneck_encode(const Codec *codec, const CodecEnd *end, const CodecContext *context,
                                              const floatX *x, int n, int H, void *out, int64_t cap, Stream *stream) {
    int K = mask_kept(codec->mask_rate, H);
    int64_t n_bytes = codec_bytes(codec, context, n, H), n_values = (int64_t)n * K;
    Weight basis = {end->basis, NULL, 0};
    if (codec_fits(n_bytes, cap)) return -1;
    float *values = codec_bottleneck_scratch(n_values, stream);
    if (values == NULL) return -1;
    matmul_forward(values, x, basis, n, H, K, NULL, stream);
#pragma omp parallel for num_threads(stream->threads)
    for (int64_t i = 0; i < n_values; i++) codec_put((char *)out, i, values[i], codec->wire);
    return stream_check(stream) ? -1 : n_bytes;
}

static inline int codec_bottleneck_decode(const Codec *codec, const CodecEnd *end, const CodecContext *context,
                                          const void *in, int64_t n_bytes, floatX *x, int n, int H, Stream *stream) {
    int K = mask_kept(codec->mask_rate, H);
    int64_t n_values = (int64_t)n * K;
    Weight back = {end->basis_back, NULL, 0};
    if (codec_is_whole(n_bytes, codec_bytes(codec, context, n, H))) return -1;
    float *values = codec_bottleneck_scratch(n_values, stream);
    if (values == NULL) return -1;
#pragma omp parallel for num_threads(stream->threads)
    for (int64_t i = 0; i < n_values; i++) values[i] = codec_get((const char *)in, i, codec->wire);
    matmul_forward(x, values, back, n, K, H, NULL, stream);
    return stream_check(stream);
}

#endif
