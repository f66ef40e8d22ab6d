// The codec: the CPU's bytes, whatever the address they go to; what arrives is what the mask says; wrong lengths are
// refused and touch nothing.
// Must fail for: indices of another boundary, scale twice or never, K off by one, bf16 by truncation, scaled dense
// values.
#include "../../llmc/codec_end.h"
#include "../../llmc/klt_coder.h"
#include <stddef.h> // size_t

namespace cpu {
#include "../../llmc/codec.h"
}
#include "../../llmc/codec.cuh"

static void codec_refusals(const Codec *codec, const CodecContext *context, int64_t n_bytes, int n, int H) {
    floatX *untouched = device_nan<floatX>(n * H);
    unsigned char *bytes = (unsigned char *)calloc((size_t)n_bytes + 2, 1);
    memset(bytes, 0xA5, (size_t)n_bytes);
    check(codec_encode(codec, NULL, context, untouched, n, H, bytes, n_bytes - 1, test_stream) < 0, "a small buffer");
    check_message("the buffer", "a small buffer");
    int equal = 1;
    for (int64_t i = 0; i < n_bytes; i++) equal = equal && bytes[i] == 0xA5;
    check(equal, "a refused message was written");
    static const int64_t off[] = {-1, 1};
    for (int i = 0; i < 3; i++) {
        int64_t wrong = i < 2 ? n_bytes + off[i] : 0;
        check(codec_decode(codec, NULL, context, bytes, wrong, untouched, n, H, test_stream) != 0, "a wrong length");
        check_message("a message of", "a wrong length");
    }
    unsigned char *ours = (unsigned char *)host_of_device(untouched, n * H);
    for (size_t i = 0; i < sizeof(floatX) * (size_t)(n * H); i++) equal = equal && ours[i] == 0xFF;
    check(equal, "a refused message was decoded");
    device_release(untouched, n * H, "x");
    free(ours);
    free(bytes);
}

static void codec_case(Wire wire, float rate, int masked, int n, int H) {
    Codec codec;
    CodecContext context = codec_context(3, 1, 2, 1ll << 33, masked);
    codec_init(&codec, H, rate, MASK_SCALE_SQRT, wire, 11);
    int64_t n_bytes = codec_bytes(&codec, &context, n, H), n_x = (int64_t)n * H;
    float *x = host_random_x(n_x, 55, 1.0f), *expected = host_nan(n_x);
    unsigned char *theirs = (unsigned char *)malloc((size_t)n_bytes);
    unsigned char *message = (unsigned char *)malloc((size_t)n_bytes + 1), *ours = message + 1; // an odd address
    floatX *device_x = device_of_host_x(x, n_x), *out = device_nan<floatX>(n_x);
    check(cpu::codec_encode(&codec, NULL, &context, x, n, H, theirs, n_bytes, test_cpu_stream) == n_bytes, "bytes");
    check(codec_encode(&codec, NULL, &context, device_x, n, H, ours, n_bytes, test_stream) == n_bytes, "bytes used");
    check_same(ours, theirs, (size_t)n_bytes, "the message");
    check(cpu::codec_decode(&codec, NULL, &context, theirs, n_bytes, expected, n, H, test_cpu_stream) == 0, "decode");
    check(codec_decode(&codec, NULL, &context, ours, n_bytes, out, n, H, test_stream) == 0, "decode: %s",
          error_message);
    for (int64_t i = 0; i < n_x; i++) expected[i] = to_float(to_floatX(expected[i]));
    float *arrived = host_of_device_x(out, n_x);
    check_same(arrived, expected, sizeof(float) * (size_t)n_x, "what arrives");
    codec_refusals(&codec, &context, n_bytes, n, H);
    device_release(device_x, n_x, "encode");
    device_release(out, n_x, "decode");
    free(arrived);
    free(x);
    free(expected);
    free(theirs);
    free(message);
}

static void codec_fp32_case(Wire wire, int n, int offset) {
    Codec codec;
    codec_init(&codec, 8, 0.9f, MASK_SCALE_SQRT, wire, 11);
    int64_t n_bytes = n * codec_size(&codec);
    int all = n + offset;
    float *x = host_random(all, 56, 1.0f), *expected = host_nan(n);
    unsigned char *theirs = (unsigned char *)malloc((size_t)n_bytes), *ours = (unsigned char *)malloc((size_t)n_bytes);
    float *device_x = device_of_host(x, all), *out = device_nan<float>(all);
    cpu::codec_encode_fp32(&codec, x + offset, n, theirs, n_bytes, test_cpu_stream);
    cpu::codec_decode_fp32(&codec, theirs, n_bytes, expected, n, test_cpu_stream);
    check(codec_encode_fp32(&codec, device_x + offset, n, ours, n_bytes - 1, test_stream) < 0, "a small buffer");
    check(codec_encode_fp32(&codec, device_x + offset, n, ours, n_bytes, test_stream) == n_bytes, "bytes used");
    check_same(ours, theirs, (size_t)n_bytes, "the message");
    check(codec_decode_fp32(&codec, ours, n_bytes - 1, out + offset, n, test_stream) != 0, "a wrong length");
    check(codec_decode_fp32(&codec, ours, n_bytes, out + offset, n, test_stream) == 0, "%s", error_message);
    float *arrived = host_of_device(out, all);
    check_same(arrived + offset, expected, sizeof(float) * (size_t)n, "what arrives");
    device_release(device_x, all, "encode");
    device_release(out, all, "decode");
    free(arrived);
    free(x);
    free(expected);
    free(theirs);
    free(ours);
}

static void test_cuda_codec(void) {
    static const float rates[] = {0.0f, 0.5f, 0.95f};
    static const struct { int n, H; } sizes[] = {{1, 1}, {3, 5}, {17, 64}, {5, 129}, {2, 768}};
    for (size_t r = 0; r < sizeof rates / sizeof *rates; r++)
        for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++)
            for (int kind = 0; kind < 4; kind++)
                codec_case(kind & 1 ? WIRE_FP32 : WIRE_BF16, rates[r], kind >> 1, sizes[s].n, sizes[s].H);
    static const int lengths[] = {1, 7, 8, 9, 2048, 4101};
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++)
        for (int kind = 0; kind < 4; kind++) codec_fp32_case(kind & 1 ? WIRE_FP32 : WIRE_BF16, lengths[i], kind >> 1);
    Codec codec;
    float message[8] = {0};
    floatX *x = device_nan<floatX>(8);
    codec_init(&codec, 8, 0.5f, MASK_SCALE_NONE, WIRE_FP32, 1);
    const CodecContext beyond[] = {codec_context(4096, 0, 0, 0, 1), codec_context(0, 0, 4096, 0, 1),
                                   codec_context(0, 0, 0, -1, 1)};
    for (size_t i = 0; i < sizeof beyond / sizeof *beyond; i++) {
        check(codec_encode(&codec, NULL, &beyond[i], x, 1, 8, message, sizeof message, test_stream) < 0, "encode");
        check_message("mask: ", "encode");
        check(codec_decode(&codec, NULL, &beyond[i], message, 16, x, 1, 8, test_stream) != 0, "decode");
        check_message("mask: ", "decode");
    }
    device_release(x, 8, "x");
}
