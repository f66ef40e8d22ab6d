// The Codec, CUDA: turns a boundary tensor x (n, H) on the device into the bytes of a message on the host and back
// (codec_format.h). Calls as in codec.h; each waits for the stream, since a link wants the bytes.
//
// A message is made in scratch memory by one kernel (mask.cuh: index, gather and rounding at once) and moved by one
// copy. Where nothing is masked and values travel as they lie, the copy is all.
#ifndef LLMC_CODEC_CUH
#define LLMC_CODEC_CUH

#include <cuda_bf16.h> // __nv_bfloat16
#include <stdint.h>    // fixed-width integers
#include <type_traits> // is_same

#include "codec_aqsgd.cuh"      // codec_aqsgd_encode
#include "codec_bottleneck.cuh" // codec_bottleneck_encode
#include "codec_end.h"          // CodecEnd
#include "codec_format.h"       // Codec, CodecContext, codec_bytes
#include "codec_message.cuh"    // codec_scratch
#include "codec_quant.cuh"      // codec_quant_encode
#include "codec_topk.cuh"       // codec_topk_encode
#include "device.cuh"           // floatX, Stream, LAUNCH, scratch_get, device_copy
#include "elements.cuh"         // elements_do, values_load, values_store
#include "klt.cuh"              // klt_encode, klt_decode
#include "mask.cuh"             // mask_gather, mask_scatter

// out = x (n) on the device, as values of type Wired. Returns 0 or -1.
template <typename Wired, typename T>
static inline int codec_send_dense(void *out, const T *x, int64_t n, Stream *stream) {
    const void *from = x;
    if constexpr (!std::is_same<Wired, T>::value) {
        Wired *wired = (Wired *)codec_scratch(n * (int64_t)sizeof(Wired), stream);
        if (wired == NULL) return -1;
        codec_convert(wired, x, n, stream);
        from = wired;
    }
    device_copy(out, from, (size_t)n * sizeof(Wired), stream);
    return stream_check(stream);
}

template <typename Wired, typename T>
static inline int codec_take_dense(T *x, const void *in, int64_t n, Stream *stream) {
    if constexpr (std::is_same<Wired, T>::value) {
        device_copy(x, in, (size_t)n * sizeof(T), stream);
    } else {
        Wired *wired = (Wired *)codec_scratch(n * (int64_t)sizeof(Wired), stream);
        if (wired == NULL) return -1;
        device_copy(wired, in, (size_t)n * sizeof(Wired), stream);
        codec_convert(x, (const Wired *)wired, n, stream);
    }
    return stream_check(stream);
}

template <typename Wired>
static inline int codec_send_masked(void *out, const floatX *x, MaskKey key, int n, int H, int K, Stream *stream) {
    int64_t n_bytes = (int64_t)n * K * (int64_t)sizeof(Wired);
    Wired *wired = (Wired *)codec_scratch(n_bytes, stream);
    if (wired == NULL) return -1;
    mask_gather(wired, x, key, n, H, K, stream);
    device_copy(out, wired, (size_t)n_bytes, stream);
    return stream_check(stream);
}

template <typename Wired>
static inline int codec_take_masked(floatX *x, const void *in, MaskKey key, int n, int H, int K, float scale,
                                    Stream *stream) {
    int64_t n_bytes = (int64_t)n * K * (int64_t)sizeof(Wired);
    Wired *wired = (Wired *)codec_scratch(n_bytes, stream);
    if (wired == NULL) return -1;
    device_copy(wired, in, (size_t)n_bytes, stream);
    mask_scatter(x, (const Wired *)wired, key, n, H, K, scale, stream);
    return stream_check(stream);
}

template <typename T>
static inline int64_t codec_encode_dense(const Codec *codec, const T *x, int64_t n, void *out, int64_t cap,
                                         Stream *stream) {
    int64_t n_bytes = n * codec_size(codec);
    if (codec_fits(n_bytes, cap)) return -1;
    int result = codec->wire == WIRE_FP32 ? codec_send_dense<float>(out, x, n, stream)
                                          : codec_send_dense<__nv_bfloat16>(out, x, n, stream);
    return result ? -1 : n_bytes;
}

template <typename T>
static inline int codec_decode_dense(const Codec *codec, const void *in, int64_t n_bytes, T *x, int64_t n,
                                     Stream *stream) {
    if (codec_is_whole(n_bytes, n * codec_size(codec))) return -1;
    return codec->wire == WIRE_FP32 ? codec_take_dense<float>(x, in, n, stream)
                                    : codec_take_dense<__nv_bfloat16>(x, in, n, stream);
}

// Writes x (n) as a dense message into out. Returns its bytes, or -1: they are more than cap, or the stream has failed.
static inline int64_t codec_encode_fp32(const Codec *codec, const float *x, int64_t n, void *out, int64_t cap,
                                        Stream *stream) {
    return codec_encode_dense(codec, x, n, out, cap, stream);
}

// x (n) = the dense message `in`. Returns 0, or -1: n_bytes is not the size of such a message, and x is untouched; or
// the stream has failed.
static inline int codec_decode_fp32(const Codec *codec, const void *in, int64_t n_bytes, float *x, int64_t n,
                                    Stream *stream) {
    return codec_decode_dense(codec, in, n_bytes, x, n, stream);
}

static inline int64_t codec_mask_encode(const Codec *codec, const CodecContext *context, const floatX *x, int n, int H,
                                        void *out, int64_t cap, Stream *stream) {
    int K = codec_values(codec, context, H);
    int64_t n_bytes = codec_bytes(codec, context, n, H);
    MaskKey key = codec_key(codec, context);
    if (mask_check(key, n, H) || codec_fits(n_bytes, cap)) return -1;
    int result = codec->wire == WIRE_FP32 ? codec_send_masked<float>(out, x, key, n, H, K, stream)
                                          : codec_send_masked<__nv_bfloat16>(out, x, key, n, H, K, stream);
    return result ? -1 : n_bytes;
}

static inline int codec_mask_decode(const Codec *codec, const CodecContext *context, const void *in, int64_t n_bytes,
                                    floatX *x, int n, int H, Stream *stream) {
    int K = codec_values(codec, context, H);
    MaskKey key = codec_key(codec, context);
    if (mask_check(key, n, H) || codec_is_whole(n_bytes, codec_bytes(codec, context, n, H))) return -1;
    return codec->wire == WIRE_FP32 ? codec_take_masked<float>(x, in, key, n, H, K, codec->scale, stream)
                                    : codec_take_masked<__nv_bfloat16>(x, in, key, n, H, K, codec->scale, stream);
}

#include "codec_dispatch.h" // codec_encode, codec_decode

#endif
