// The other codecs: the CPU's bytes and what arrives, message after message in both directions, so that what the ends
// remember is compared too; and the CPU's refusals.
// Must fail for: another order of the Hadamard's additions, ties by the highest index, caches not written back.
#include "../../llmc/codec_end.h"

namespace cpu {
#include "../../llmc/codec.h"
}
#include "../../llmc/codec.cuh"

enum { CODECS_SLOTS = 2, CODECS_SAMPLES = 5 };

typedef struct {
    Codec codec;
    CodecContext context;
    int n, H;
    CodecEnd ours[2], theirs[2]; // before and behind the boundary, on the device and the CPU
} CodecsCase;

// Sends one message; bit equal but where a matrix product is in it (tol > 0).
static void codecs_send(CodecsCase *k, CodecDirection direction, uint32_t sub, double tol) {
    int n = k->n, H = k->H, from = direction == CODEC_BACKWARD;
    int64_t n_x = (int64_t)n * H, cap = codec_cap(&k->codec, n, H);
    float *x = host_random_x(n_x, sub, 1.0f), *expected = host_nan(n_x);
    for (int64_t i = 0; i < n_x; i++)
        x[i] = to_float(to_floatX(i % 3 == 0 ? 0.5f : x[i] * (float)(1 << i % H / 64 % 4)));
    floatX *device_x = device_of_host_x(x, n_x), *out = device_nan<floatX>(n_x);
    unsigned char *theirs = (unsigned char *)calloc((size_t)cap, 1),
                  *ours = (unsigned char *)calloc((size_t)cap + 1, 1) + 1;
    k->context.direction = direction;
    int64_t n_bytes =
        cpu::codec_encode(&k->codec, &k->theirs[from], &k->context, x, n, H, theirs, cap, test_cpu_stream);
    int64_t sent = codec_encode(&k->codec, &k->ours[from], &k->context, device_x, n, H, ours, cap, test_stream);
    const char *name = codec_name(k->codec.kind);
    check(n_bytes > 0 && sent == n_bytes, "%s: %lld bytes, the CPU %lld: %s", name, (long long)sent, (long long)n_bytes,
          error_message);
    if (tol == 0.0) check_same(ours, theirs, (size_t)n_bytes, name);
    check(codec_encode(&k->codec, &k->ours[from], &k->context, device_x, n, H, ours, 1, test_stream) < 0,
          "a small buffer");
    check(codec_decode(&k->codec, &k->ours[!from], &k->context, ours, n_bytes - 1, out, n, H, test_stream) != 0,
          "a wrong length");
    check(cpu::codec_decode(&k->codec, &k->theirs[!from], &k->context, theirs, n_bytes, expected, n, H,
                            test_cpu_stream) == 0 &&
              codec_decode(&k->codec, &k->ours[!from], &k->context, ours, n_bytes, out, n, H, test_stream) == 0,
          "%s: decode: %s", name, error_message);
    for (int64_t i = 0; i < n_x; i++) expected[i] = to_float(to_floatX(expected[i]));
    float *arrived = host_of_device_x(out, n_x);
    if (tol == 0.0)
        check_same(arrived, expected, sizeof(float) * (size_t)n_x, name);
    else
        check_close(arrived, expected, n_x, tol, name);
    device_release(device_x, n_x, "encode");
    device_release(out, n_x, "decode");
    free(arrived);
    free(expected);
    free(x);
    free(theirs);
    free(ours - 1);
}

static void codecs_case(CodecKind kind, float rate, Wire wire, int n, int H, int T, double tol) {
    CodecsCase k;
    CodecShape shape = {H, n, T, CODECS_SLOTS, CODECS_SAMPLES};
    int64_t samples[8];
    memset(&k, 0, sizeof k);
    k.n = n, k.H = H;
    codec_init(&k.codec, H, rate, MASK_SCALE_NONE, wire, 11);
    k.codec.kind = kind;
    check(codec_check(&k.codec, H) == 0, "%s", error_message);
    for (int i = 0; i < 2; i++)
        check(codec_end_init(&k.ours[i], &k.codec, shape) == 0 && codec_end_init(&k.theirs[i], &k.codec, shape) == 0,
              "%s", error_message);
    k.context = codec_context(1, 0, 0, 0, 1);
    k.context.training = 1, k.context.T = T, k.context.samples = samples;
    for (int step = 0; step < 2; step++) {
        for (int m = 0; m < 2; m++) {
            for (int s = 0; s < n / T; s++) samples[s] = (2 * m + s * s) % CODECS_SAMPLES;
            k.context.micro_batch = m;
            codecs_send(&k, CODEC_FORWARD, (uint32_t)(300 + 2 * step + m), tol);
        }
        for (int m = 0; m < 2; m++) {
            k.context.micro_batch = m;
            codecs_send(&k, CODEC_BACKWARD, (uint32_t)(310 + m), tol);
        }
    }
    k.context.training = 0;
    codecs_send(&k, CODEC_FORWARD, 320, tol);
    for (int i = 0; i < 2; i++) {
        CodecState ours[CODEC_STATES], theirs[CODEC_STATES];
        int n_states = codec_end_states(&k.ours[i], ours);
        check(codec_end_states(&k.theirs[i], theirs) == n_states, "states");
        for (int s = 0; s < n_states; s++)
            check_same(ours[s].data, theirs[s].data, (size_t)ours[s].n_bytes, ours[s].name);
        codec_end_free(&k.ours[i]);
        codec_end_free(&k.theirs[i]);
    }
}

static void test_cuda_codecs(void) {
    static const struct { int n, H, T; } sizes[] = {{1, 1, 1}, {6, 20, 2}, {4, 136, 4}, {3, 321, 1}};
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
        int n = sizes[s].n, H = sizes[s].H, T = sizes[s].T;
        codecs_case(CODEC_QUANT8, 0.0f, WIRE_BF16, n, H, T, 0.0);
        codecs_case(CODEC_QUANT4, 0.0f, WIRE_BF16, n, H, T, 0.0);
        codecs_case(CODEC_AQSGD, 0.0f, WIRE_BF16, n, H, T, 0.0);
        codecs_case(CODEC_TAHQUANT, 0.0f, WIRE_BF16, n, H, T, 0.0);
        for (int wire = 0; wire < 2; wire++) {
            if (H > 1) codecs_case(CODEC_TOPK, 0.7f, (Wire)wire, n, H, T, 0.0);
            codecs_case(CODEC_BOTTLENECK, 0.7f, (Wire)wire, n, H, T, wire ? 2.0 * FLOATX_TOL : 6e-3);
        }
    }
    codecs_case(CODEC_TOPK, 0.1f, WIRE_BF16, 2, 700, 2, 0.0);
}
