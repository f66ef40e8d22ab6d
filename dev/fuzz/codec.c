// codec_decode of every codec: whatever comes, an error and x as it was, or values; nothing beyond the message is read.
//
//   byte 0  kind                 4  1: trains; 2: windows were seen before; 4: masked; 8: made as long as expected;
//        1  direction               16: fp32 on the wire; 32: fixed bits (klt); 64: there was a forward (topk)
//        2  n - 1                5  the message
//        3  which H
#include "fuzz.h"

enum { HEAD = 5, SAMPLES = 4 };
enum { TRAINS = 1, SEEN = 2, MASKED = 4, FITTED = 8, FP32 = 16, FIXED = 32, FOLLOWS = 64 };

typedef struct {
    Codec codec;
    CodecEnd end;
    CodecContext context;
    int n, H;
} Case;

// The transform codec's tables, by direction and coding.
static const KltTable *fuzz_codec_table(int H, int direction, int fixed) {
    static KltTable tables[4];
    KltTable *table = &tables[2 * direction + fixed];
    if (table->blob != NULL) return table;
    int64_t n_bytes;
    unsigned char *blob = fuzz_table(H, direction == CODEC_BACKWARD, fixed, 3, &n_bytes);
    if (klt_table_load(table, blob, n_bytes, H, fuzz_stream())) abort();
    free(blob);
    return table;
}

static void case_open(Case *c, const uint8_t *head) {
    static const int widths[] = {1, 16, 40, 65, 129, 192};
    static const int64_t samples[FUZZ_ROWS] = {2, 0, 2, 3}; // one of them twice
    static KltWork work;
    int kind = head[0] % CODEC_KINDS, flags = head[4];
    memset(c, 0, sizeof *c);
    c->H = kind == CODEC_KLT ? 40 : widths[head[3] % 6], c->n = 1 + (kind == CODEC_KLT ? head[2] : head[2] % 24);
    codec_init(&c->codec, c->H, 0.7f, MASK_SCALE_SQRT, flags & FP32 ? WIRE_FP32 : WIRE_BF16, 1);
    c->codec.kind = (CodecKind)kind;
    if (kind == CODEC_TOPK && codec_topk_kept(&c->codec, c->H) == 0) c->H = 192; // codec_check refuses the others
    c->context = codec_context(1, 0, 2, 3, flags & MASKED ? 1 : 0);
    c->context.direction = (CodecDirection)(head[1] % 2), c->context.training = flags & TRAINS ? 1 : 0;
    c->context.T = c->n % 2 == 0 && c->n <= 8 ? c->n / 2 : c->n;
    c->context.samples = samples, c->context.tokens = fuzz_tokens();
    CodecShape shape = {c->H, c->n, c->context.T, 2, SAMPLES};
    if (codec_end_init(&c->end, &c->codec, shape)) abort();
    if (c->end.seen != NULL && flags & SEEN) memset(c->end.seen, 1, SAMPLES);
    for (int d = 0; d < 2 && kind == CODEC_KLT; d++) {
        c->end.klt[d].table = fuzz_codec_table(c->H, d, flags & FIXED ? 1 : 0);
        c->end.klt[d].work = &work, c->end.klt[d].embed = fuzz_embedding(c->H);
    }
}

// A message of the case from values of a seed; its bytes, at most cap, or -1.
static int64_t case_message(Case *c, uint64_t seed, unsigned char *out, int64_t cap) {
    size_t values = (size_t)c->n * (size_t)c->H;
    float *x = (float *)malloc(sizeof(float) * values);
    if (x == NULL) abort();
    fuzz_values(x, (int64_t)values, seed, seed % 3 == 0 ? 1e-4f : 1.0f);
    int64_t n_bytes = codec_encode(&c->codec, &c->end, &c->context, x, c->n, c->H, out, cap, fuzz_stream());
    free(x);
    return n_bytes;
}

// topk's gradients follow a forward: this end keeps the sets of one.
static void case_follow(Case *c) {
    CodecDirection direction = c->context.direction;
    int64_t cap = codec_cap(&c->codec, c->n, c->H);
    unsigned char *forward = (unsigned char *)malloc((size_t)cap);
    c->context.direction = CODEC_FORWARD;
    if (forward == NULL || case_message(c, 5, forward, cap) < 0) abort();
    c->context.direction = direction;
    free(forward);
}

// Bytes that decode expects, or -1: any number.
static int64_t case_bytes(const Case *c) {
    if (codec_is_dense(&c->codec, &c->context, c->H)) return codec_bytes(&c->codec, &c->context, c->n, c->H);
    if (c->codec.kind == CODEC_KLT) return -1;
    if (c->codec.kind == CODEC_AQSGD && c->context.direction == CODEC_FORWARD)
        return codec_end_bytes(&c->codec, &c->end, &c->context, c->n, c->H);
    return codec_bytes(&c->codec, &c->context, c->n, c->H);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    Case c;
    if (size < HEAD) return 0;
    case_open(&c, data);
    if (c.codec.kind == CODEC_TOPK && c.context.direction == CODEC_BACKWARD && data[4] & FOLLOWS) case_follow(&c);
    int64_t n_bytes = (int64_t)size - HEAD, expected = case_bytes(&c), values = (int64_t)c.n * c.H;
    unsigned char *message = fuzz_copy(data + HEAD, (size_t)n_bytes);
    if (data[4] & FITTED && expected >= 0) {
        message = (unsigned char *)realloc(message, (size_t)expected + 1);
        for (int64_t i = n_bytes; i < expected; i++) message[i] = (unsigned char)(i * 37);
        message = (unsigned char *)realloc(message, (size_t)(n_bytes = expected));
    }
    float *x = (float *)malloc(sizeof(float) * (size_t)values);
    if (x == NULL || message == NULL) abort();
    for (int64_t i = 0; i < values; i++) x[i] = 77.0f;
    int refused = codec_decode(&c.codec, &c.end, &c.context, message, n_bytes, x, c.n, c.H, fuzz_stream()) != 0;
    for (int64_t i = 0; i < values && refused; i++) assert(x[i] == 77.0f);
    assert(refused || expected < 0 || n_bytes == expected);
    codec_end_free(&c.end);
    free(message);
    free(x);
    return 0;
}

size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned seed) {
    Case c;
    uint32_t draw = rand_block(seed, RAND_TEST, 0, 0).v[0], head = rand_block(seed, RAND_TEST, 1, 0).v[0];
    if (size >= HEAD && draw % 8 != 0) return LLVMFuzzerMutate(data, size, max_size);
    if (max_size <= HEAD) return size;
    memcpy(data, &head, 4), data[4] = (uint8_t)(draw >> 8 | MASKED);
    case_open(&c, data);
    if (c.codec.kind == CODEC_TOPK && c.context.direction == CODEC_BACKWARD) data[4] |= FOLLOWS, case_follow(&c);
    int64_t n_bytes = case_message(&c, seed, data + HEAD, (int64_t)(max_size - HEAD));
    codec_end_free(&c.end);
    return HEAD + (size_t)(n_bytes > 0 ? n_bytes : 0);
}
