// Codec topk, CUDA: of each token the K values of the largest size and where they were; backward, the gradients at the
// same places (topk_row.h).
//
//   forward    K*n values, then n sets          h~ = h on the set, 0 elsewhere
//   backward   K*n values                       dL/dh = dL/dh~ on the set, 0 elsewhere: h~'s gradient
// Values are in the order of their set, bf16 or fp32. K is the most that the budget holds, sets included. Each end
// remembers the sets of the micro-batches whose backward is to come. Sets are the CPU's; the host checks those that
// arrive.
//
// Kernels: grid n/4 + 1, block (32, 4): a warp a token, a lane every 32nd of its values; no shared memory.
#ifndef LLMC_CODEC_TOPK_CUH
#define LLMC_CODEC_TOPK_CUH

#include <cuda_bf16.h> // __nv_bfloat16
#include <stdint.h>    // fixed-width integers

#include "codec_end.h"       // CodecEnd, codec_end_keep, codec_end_kept
#include "codec_format.h"    // Codec, codec_topk_kept
#include "codec_message.cuh" // codec_scratch, codec_piece
#include "device.cuh"        // floatX, Stream, LAUNCH
#include "elements.cuh"      // value_put
#include "quant_group.h"     // quant_size, QUANT_OCTET
#include "topk_row.h"        // topk_put, topk_index
#include "warp.cuh"          // WARP_ALL

#define TOPK_TOKENS 4 // of a block

// How many of the warp's H values have at least this size.
__device__ static inline int topk_count(const floatX *x, int H, uint32_t size) {
    int count = 0;
    for (int h = (int)threadIdx.x; h < H; h += 32) count += quant_size(to_float(x[h])) >= size;
    for (int bit = 16; bit > 0; bit /= 2) count += __shfl_xor_sync(WARP_ALL, count, bit);
    return count;
}

// The largest size that at least K of the values have, bit by bit: bf16 has 15 of them.
__device__ static inline uint32_t topk_threshold(const floatX *x, int H, int K) {
    uint32_t threshold = 0;
    for (int bit = 30; bit >= (sizeof(floatX) == 2 ? 16 : 0); bit--)
        if (topk_count(x, H, threshold | 1u << bit) >= K) threshold |= 1u << bit;
    return threshold;
}

// sets (n, set_bytes) of x (n, H); index (n, K): scratch. Reads a row 16 to 32 times, but for the first from the
// caches.
__global__ static void __launch_bounds__(32 * TOPK_TOKENS)
    topk_choose_kernel(unsigned char *sets, uint16_t *index, const floatX *x, int n, int H, int K, int bits,
                       int set_bytes) {
    int token = (int)(blockIdx.x * TOPK_TOKENS + threadIdx.y), lane = (int)threadIdx.x, chosen = 0;
    if (token >= n) return;
    x += (size_t)token * H, index += (size_t)token * K, sets += (int64_t)token * set_bytes;
    uint32_t threshold = topk_threshold(x, H, K), before = (1u << lane) - 1;
    int equal = K - topk_count(x, H, threshold + 1);
    for (int start = 0; start < H; start += 32) {
        uint32_t size = start + lane < H ? quant_size(to_float(x[start + lane])) : 0;
        uint32_t ties = __ballot_sync(WARP_ALL, start + lane < H && size == threshold);
        int tied = (ties >> lane & 1) != 0 && __popc(ties & before) < equal;
        int is_chosen = start + lane < H && (size > threshold || tied);
        uint32_t all = __ballot_sync(WARP_ALL, is_chosen);
        if (is_chosen) index[chosen + __popc(all & before)] = (uint16_t)(start + lane);
        chosen += __popc(all);
        equal -= __popc(ties) < equal ? __popc(ties) : equal;
    }
    __syncwarp(); // the indices of all lanes are there
    for (int i = lane * QUANT_OCTET; i < K; i += 32 * QUANT_OCTET)
        topk_put(sets + i / QUANT_OCTET * bits, index + i, K - i < QUANT_OCTET ? K - i : QUANT_OCTET, bits);
}

// values (n, K) = x (n, H) at the sets
template <typename T>
__global__ static void __launch_bounds__(32 * TOPK_TOKENS)
    topk_gather_kernel(T *values, const floatX *x, const unsigned char *sets, int n, int H, int K, int bits,
                       int set_bytes) {
    int token = (int)(blockIdx.x * TOPK_TOKENS + threadIdx.y);
    if (token >= n) return;
    const unsigned char *set = sets + (int64_t)token * set_bytes;
    for (int i = (int)threadIdx.x; i < K; i += 32)
        value_put(values + (size_t)token * K + i, to_float(x[(size_t)token * H + topk_index(set, i, bits)]));
}

// x (n, H) = values (n, K) at the sets, 0 elsewhere
template <typename T>
__global__ static void __launch_bounds__(32 * TOPK_TOKENS)
    topk_scatter_kernel(floatX *x, const T *values, const unsigned char *sets, int n, int H, int K, int bits,
                        int set_bytes) {
    int token = (int)(blockIdx.x * TOPK_TOKENS + threadIdx.y);
    if (token >= n) return;
    const unsigned char *set = sets + (int64_t)token * set_bytes;
    floatX *to = x + (size_t)token * H;
    for (int h = (int)threadIdx.x; h < H; h += 32) value_put(to + h, 0.0f);
    __syncwarp(); // the zeros of all lanes come first
    for (int i = (int)threadIdx.x; i < K; i += 32)
        value_put(to + topk_index(set, i, bits), to_float(values[(size_t)token * K + i]));
}

// A message on the device: values, sets behind them, and room for indices while they are chosen.
typedef struct {
    int K, bits, set_bytes;
    int64_t value_bytes, all_sets;
    char *values;
    unsigned char *sets;
    uint16_t *index;
} TopkMessage;

// 0, or -1: no memory.
static inline int topk_message(TopkMessage *message, const Codec *codec, int n, int H, Stream *stream) {
    int K = codec_topk_kept(codec, H);
    message->K = K, message->bits = topk_index_bits(H), message->set_bytes = topk_set_bytes(K, H);
    message->value_bytes = (int64_t)n * K * codec_size(codec), message->all_sets = (int64_t)n * message->set_bytes;
    int64_t values = codec_piece(message->value_bytes), sets = codec_piece(message->all_sets);
    char *scratch = (char *)codec_scratch(values + sets + (int64_t)n * K * 2, stream);
    message->values = scratch, message->sets = (unsigned char *)scratch + values;
    message->index = (uint16_t *)(scratch + values + sets);
    return scratch == NULL ? -1 : 0;
}

template <typename Wired>
static inline void topk_gather(const TopkMessage *m, const floatX *x, int n, int H, Stream *stream) {
    LAUNCH((topk_gather_kernel<Wired>), (unsigned)(n / TOPK_TOKENS + 1), dim3(32, TOPK_TOKENS), 0, stream,
           (Wired *)m->values, x, m->sets, n, H, m->K, m->bits, m->set_bytes);
}

template <typename Wired>
static inline void topk_scatter(floatX *x, const TopkMessage *m, int n, int H, Stream *stream) {
    LAUNCH((topk_scatter_kernel<Wired>), (unsigned)(n / TOPK_TOKENS + 1), dim3(32, TOPK_TOKENS), 0, stream, x,
           (const Wired *)m->values, m->sets, n, H, m->K, m->bits, m->set_bytes);
}

static inline int64_t codec_topk_encode(const Codec *codec, CodecEnd *end, const CodecContext *context, const floatX *x,
                                        int n, int H, void *out, int64_t cap, Stream *stream) {
    TopkMessage m;
    int64_t n_bytes = codec_bytes(codec, context, n, H);
    int forward = context->direction == CODEC_FORWARD;
    const unsigned char *kept = forward ? NULL : codec_end_kept(end, context, n);
    if ((!forward && kept == NULL) || codec_fits(n_bytes, cap) || topk_message(&m, codec, n, H, stream)) return -1;
    if (forward)
        LAUNCH(topk_choose_kernel, (unsigned)(n / TOPK_TOKENS + 1), dim3(32, TOPK_TOKENS), 0, stream, m.sets, m.index,
               x, n, H, m.K, m.bits, m.set_bytes);
    else
        device_copy(m.sets, kept, (size_t)m.all_sets, stream);
    if (codec->wire == WIRE_FP32)
        topk_gather<float>(&m, x, n, H, stream);
    else
        topk_gather<__nv_bfloat16>(&m, x, n, H, stream);
    unsigned char *sets = (unsigned char *)out + m.value_bytes;
    device_copy(out, m.values, (size_t)m.value_bytes, stream);
    if (forward) device_copy(sets, m.sets, (size_t)m.all_sets, stream);
    if (stream_check(stream) || (forward && codec_end_keep(end, context, sets, n))) return -1;
    return n_bytes;
}

static inline int codec_topk_decode(const Codec *codec, CodecEnd *end, const CodecContext *context, const void *in,
                                    int64_t n_bytes, floatX *x, int n, int H, Stream *stream) {
    TopkMessage m;
    int forward = context->direction == CODEC_FORWARD;
    if (codec_is_whole(n_bytes, codec_bytes(codec, context, n, H)) || topk_message(&m, codec, n, H, stream)) return -1;
    const unsigned char *sets = forward ? (const unsigned char *)in + m.value_bytes : codec_end_kept(end, context, n);
    if (sets == NULL) return -1;
    if (forward && (topk_check(sets, n, m.K, H) || codec_end_keep(end, context, sets, n))) return -1;
    device_copy(m.values, in, (size_t)m.value_bytes, stream);
    device_copy(m.sets, sets, (size_t)m.all_sets, stream);
    if (codec->wire == WIRE_FP32)
        topk_scatter<float>(x, &m, n, H, stream);
    else
        topk_scatter<__nv_bfloat16>(x, &m, n, H, stream);
    return stream_check(stream);
}

#endif
