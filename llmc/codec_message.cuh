// What codecs share on the device: scratch memory beside the host's bytes, and values in another type.
#ifndef LLMC_CODEC_MESSAGE_CUH
#define LLMC_CODEC_MESSAGE_CUH

#include <stdint.h> // fixed-width integers

#include "device.cuh"   // Stream, scratch_get, LAUNCH
#include "elements.cuh" // elements_do, values_load, values_store

// Scratch for n_bytes of a message or more; NULL with the stream failed. One byte at least, so that an empty message is
// no failure.
static inline void *codec_scratch(int64_t n_bytes, Stream *stream) {
    void *scratch = scratch_get(&stream->scratch[SCRATCH_OP], n_bytes > 0 ? (size_t)n_bytes : 1);
    if (scratch == NULL) stream->failed = 1;
    return scratch;
}

// What a piece of scratch takes, so that the next one is aligned.
static inline int64_t codec_piece(int64_t n_bytes) {
    return (n_bytes + DEVICE_ALIGN - 1) / DEVICE_ALIGN * DEVICE_ALIGN;
}

template <typename To, typename From> struct CodecConvertOp {
    To *to;
    const From *from;
    template <int WIDTH> __device__ void at(int64_t i) const {
        values_store(to + i, values_load<WIDTH>(from + i));
    }
};

// to[i] = from[i] in another type. A thread for 8 values (elements.cuh), blocks of 256; any n and addresses, no shared
// memory. Moves 6n bytes.
template <typename To, typename From>
__global__ static void __launch_bounds__(ELEMENTS_BLOCK)
    codec_convert_kernel(CodecConvertOp<To, From> op, Elements range) {
    elements_do<8>(op, range);
}

template <typename To, typename From>
static inline void codec_convert(To *to, const From *from, int64_t n, Stream *stream) {
    CodecConvertOp<To, From> op = {to, from};
    Elements range = elements_of(n, 8, aligned_16(to, from));
    LAUNCH((codec_convert_kernel<To, From>), range.blocks, ELEMENTS_BLOCK, 0, stream, op, range);
}

#endif
