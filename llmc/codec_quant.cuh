// Codecs quant8 and quant4, CUDA: groups of 64 values with an absmax scale, each value rounded to the nearest level,
// both directions (quant_group.h has the formulas and the bytes). Other codecs take the two ops here for rows of their
// own.
//   quant_encode   out = the message of x (n, H), overwritten
//   quant_decode   x (n, H) = what arrives, overwritten
// Codes and scales are the CPU's bit for bit.
//
// Kernels: grid n/4 + 1, block (32, 4): a warp a token, a lane every 32nd octet of its values, so that 8 lanes share a
// group; shared memory for the bits of a row's groups, a byte and 2 bytes for each group of 4 tokens. An octet's codes
// are whole bytes of its lane. Encoding reads x twice, the second time mostly from the caches.
#ifndef LLMC_CODEC_QUANT_CUH
#define LLMC_CODEC_QUANT_CUH

#include <stdint.h> // fixed-width integers

#include "codec_format.h"    // Codec, codec_fits, codec_is_whole, codec_quant_row
#include "codec_message.cuh" // codec_scratch
#include "device.cuh"        // floatX, Stream, LAUNCH, DYNAMIC_SHARED
#include "elements.cuh"      // values_load, values_store, value_put
#include "quant_group.h"     // QuantRow, quant_level
#include "warp.cuh"          // WARP_ALL

#define QUANT_TOKENS 4 // of a block

// How a row's groups are coded, in shared memory: bits of each, and of all before it.
typedef struct {
    uint16_t *before;    // (groups)
    unsigned char *bits; // (groups)
} QuantBits;

__device__ static inline QuantBits quant_shared(uint16_t *shared, int G) {
    QuantBits own = {shared + threadIdx.y * G, (unsigned char *)(shared + QUANT_TOKENS * G) + threadIdx.y * G};
    return own;
}

static inline size_t quant_shared_bytes(int H) {
    return (size_t)QUANT_TOKENS * (size_t)quant_groups(H) * 3;
}

__device__ static inline uint32_t quant_warp_max(uint32_t value, int lanes) {
    for (int bit = 1; bit < lanes; bit *= 2) {
        uint32_t other = __shfl_xor_sync(WARP_ALL, value, bit);
        value = other > value ? other : value;
    }
    return value;
}

// Fills in the bits of the warp's row, whose scales all lanes can read.
__device__ static inline void quant_bits(QuantBits own, const uint16_t *scales, QuantRow row) {
    int G = quant_groups(row.H), full = row.H / QUANT_GROUP, lane = (int)threadIdx.x;
    for (int g = lane; g < G; g += 32) own.bits[g] = (unsigned char)(row.adaptive && g < full ? 0 : row.bits);
    __syncwarp();
    for (int left = row.adaptive ? row.bits * full : 0; left > 0; left--) {
        uint32_t best = 0;
        for (int g = lane; g < full; g += 32) {
            uint32_t rank = quant_rank(scales[g], own.bits[g], g);
            best = rank > best ? rank : best;
        }
        best = quant_warp_max(best, 32);
        if (lane == 0) own.bits[quant_rank_group(best)]++;
        __syncwarp();
    }
    for (int g = 0, sum = 0; g < G && lane == 0; g++) own.before[g] = (uint16_t)sum, sum += own.bits[g];
    __syncwarp();
}

// The lane's octet y (8) of a group, rotated with the 7 other lanes of it: the CPU's additions in the CPU's order.
template <typename T> __device__ static inline void quant_rotate(T *y) {
    for (int half = 1; half < QUANT_OCTET; half *= 2)
        for (int i = 0; i < QUANT_OCTET; i++)
            if ((i & half) == 0) {
                T a = y[i], b = y[i + half];
                y[i] = a + b, y[i + half] = a - b;
            }
    for (int lanes = 1; lanes < QUANT_GROUP / QUANT_OCTET; lanes *= 2)
        for (int i = 0; i < QUANT_OCTET; i++) {
            T other = __shfl_xor_sync(WARP_ALL, y[i], lanes);
            y[i] = (threadIdx.x & (unsigned)lanes) != 0 ? other - y[i] : y[i] + other;
        }
}

// y (8) = the values from h on that are sent of a row: 0 beyond its end, rotated if the group is. All lanes together.
template <typename T>
__device__ static inline void quant_take(float y[QUANT_OCTET], const T *x, int h, QuantRow row, int packed) {
    for (int j = 0; j < QUANT_OCTET; j++) y[j] = 0.0f;
    if (packed && h < row.H) {
        Values<QUANT_OCTET> values = values_load<QUANT_OCTET>(x + h);
        for (int j = 0; j < QUANT_OCTET; j++) y[j] = values.v[j];
    } else {
        for (int j = 0; j < QUANT_OCTET && h + j < row.H; j++) y[j] = to_float(x[h + j]);
    }
    if (!row.rotated) return;
    float rotated[QUANT_OCTET];
    for (int j = 0; j < QUANT_OCTET; j++) rotated[j] = y[j];
    quant_rotate(rotated);
    for (int j = 0; j < QUANT_OCTET && (h | (QUANT_GROUP - 1)) < row.H; j++) y[j] = rotated[j] * 0.125f;
}

// scales (n, G), codes (n, quant_code_bytes). packed: 16-byte reads of x. Moves 2*n*H bytes in bf16 (and as many out of
// the caches), and the message.
template <typename T>
__global__ static void __launch_bounds__(32 * QUANT_TOKENS)
    quant_encode_kernel(uint16_t *scales, unsigned char *codes, const T *x, int n, QuantRow row, int packed) {
    DYNAMIC_SHARED(uint16_t, shared);
    int token = (int)(blockIdx.x * QUANT_TOKENS + threadIdx.y), lane = (int)threadIdx.x, G = quant_groups(row.H);
    if (token >= n) return;
    QuantBits own = quant_shared(shared, G);
    const T *from = x + (size_t)token * row.H;
    unsigned char *to = codes + token * quant_code_bytes(row.H, row.bits);
    scales += (size_t)token * G;
    float y[QUANT_OCTET];
    for (int start = 0; start < row.H; start += 32 * QUANT_OCTET) {
        int h = start + lane * QUANT_OCTET;
        uint32_t largest = 0;
        quant_take(y, from, h, row, packed);
        for (int j = 0; j < QUANT_OCTET; j++) largest = quant_size(y[j]) > largest ? quant_size(y[j]) : largest;
        largest = quant_warp_max(largest, QUANT_GROUP / QUANT_OCTET);
        if (h % QUANT_GROUP == 0 && h < row.H) scales[h / QUANT_GROUP] = bf16_of_float(float_of_bits(largest));
    }
    __syncwarp(); // the scales of all lanes are there
    quant_bits(own, scales, row);
    for (int start = 0; start < row.H; start += 32 * QUANT_OCTET) {
        int h = start + lane * QUANT_OCTET, g = h / QUANT_GROUP, level[QUANT_OCTET];
        quant_take(y, from, h, row, packed);
        if (h >= row.H) continue;
        int bits = own.bits[g], count = row.H - h < QUANT_OCTET ? row.H - h : QUANT_OCTET;
        float scale = quant_scale(scales[g]);
        for (int j = 0; j < count; j++) level[j] = quant_level(y[j], scale, bits);
        quant_put(to + QUANT_OCTET * own.before[g] + h % QUANT_GROUP / QUANT_OCTET * bits, level, count, bits);
    }
}

// Moves the message and 2*n*H bytes in bf16. packed: 16-byte writes of x.
template <typename T>
__global__ static void __launch_bounds__(32 * QUANT_TOKENS)
    quant_decode_kernel(T *x, const uint16_t *scales, const unsigned char *codes, int n, QuantRow row, int packed) {
    DYNAMIC_SHARED(uint16_t, shared);
    int token = (int)(blockIdx.x * QUANT_TOKENS + threadIdx.y), lane = (int)threadIdx.x, G = quant_groups(row.H);
    if (token >= n) return;
    QuantBits own = quant_shared(shared, G);
    const unsigned char *from = codes + token * quant_code_bytes(row.H, row.bits);
    scales += (size_t)token * G;
    T *to = x + (size_t)token * row.H;
    quant_bits(own, scales, row);
    for (int start = 0; start < row.H; start += 32 * QUANT_OCTET) {
        int h = start + lane * QUANT_OCTET, g = h < row.H ? h / QUANT_GROUP : 0, level[QUANT_OCTET] = {0};
        int bits = own.bits[g], left = row.H - h, count = left < 0 ? 0 : left < QUANT_OCTET ? left : QUANT_OCTET;
        float step = quant_step(quant_scale(scales[g]), bits);
        quant_get(level, from + QUANT_OCTET * own.before[g] + h % QUANT_GROUP / QUANT_OCTET * bits, count, bits);
        if (row.rotated) {
            int rotated[QUANT_OCTET], full = (h | (QUANT_GROUP - 1)) < row.H;
            for (int j = 0; j < QUANT_OCTET; j++) rotated[j] = level[j];
            quant_rotate(rotated);
            for (int j = 0; j < QUANT_OCTET && full; j++) level[j] = rotated[j];
            step *= full ? 0.125f : 1.0f;
        }
        Values<QUANT_OCTET> values;
        for (int j = 0; j < QUANT_OCTET; j++) values.v[j] = (float)level[j] * step;
        if (packed && count > 0) values_store(to + h, values);
        for (int j = 0; j < count && !packed; j++) value_put(to + h + j, values.v[j]);
    }
}

// The message's bytes in device memory: n * quant_row_bytes from a multiple of 2 on.
template <typename T> static inline void quant_encode(void *out, const T *x, int n, QuantRow row, Stream *stream) {
    uint16_t *scales = (uint16_t *)out;
    int packed = row.H % QUANT_OCTET == 0 && aligned_16(x);
    LAUNCH((quant_encode_kernel<T>), (unsigned)(n / QUANT_TOKENS + 1), dim3(32, QUANT_TOKENS),
           quant_shared_bytes(row.H), stream, scales, (unsigned char *)(scales + (size_t)n * quant_groups(row.H)), x, n,
           row, packed);
}

template <typename T> static inline void quant_decode(T *x, const void *in, int n, QuantRow row, Stream *stream) {
    const uint16_t *scales = (const uint16_t *)in;
    int packed = row.H % QUANT_OCTET == 0 && aligned_16(x);
    LAUNCH((quant_decode_kernel<T>), (unsigned)(n / QUANT_TOKENS + 1), dim3(32, QUANT_TOKENS),
           quant_shared_bytes(row.H), stream, x, scales,
           (const unsigned char *)(scales + (size_t)n * quant_groups(row.H)), n, row, packed);
}

// codec_encode and codec_decode of messages that are quantized rows.
static inline int64_t codec_quant_encode(const Codec *codec, const CodecContext *context, const floatX *x, int n, int H,
                                         void *out, int64_t cap, Stream *stream) {
    int64_t n_bytes = n * codec_row_bytes(codec, context->direction, H);
    if (codec_fits(n_bytes, cap)) return -1;
    void *message = codec_scratch(n_bytes, stream);
    if (message == NULL) return -1;
    quant_encode(message, x, n, codec_quant_row(codec, context->direction, H), stream);
    device_copy(out, message, (size_t)n_bytes, stream);
    return stream_check(stream) ? -1 : n_bytes;
}

static inline int codec_quant_decode(const Codec *codec, const CodecContext *context, const void *in, int64_t n_bytes,
                                     floatX *x, int n, int H, Stream *stream) {
    if (codec_is_whole(n_bytes, n * codec_row_bytes(codec, context->direction, H))) return -1;
    void *message = codec_scratch(n_bytes, stream);
    if (message == NULL) return -1;
    device_copy(message, in, (size_t)n_bytes, stream);
    quant_decode(x, message, n, codec_quant_row(codec, context->direction, H), stream);
    return stream_check(stream);
}

#endif
