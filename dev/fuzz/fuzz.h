// What the fuzzers share (`make fuzz`): libFuzzer's entries, a stream of one thread, and a table of the transform
// codec.
//
// A fuzzer takes bytes as they might come over the wire and must survive all of them. Mutations start from valid
// messages: its own mutator makes new ones from the seed that libFuzzer gives, so nothing is kept in files.
#ifndef FUZZ_H
#define FUZZ_H

#include <assert.h> // assert
#include <stdint.h> // fixed-width integers
#include <stdlib.h> // malloc

#include "../../llmc/codec.h" // Codec, klt_learn, Stream

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned seed);
size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t max_size);

enum { FUZZ_TOKENS = 48 /* in the vocabulary */, FUZZ_ROWS = 300 /* two pieces */ };

static inline Stream *fuzz_stream(void) {
    static Stream *stream;
    if (stream == NULL && stream_create(&stream, PRECISION_FP32, 1)) abort();
    return stream;
}

// values (n): normals times scale, the same for a seed.
static inline void fuzz_values(float *values, int64_t n, uint64_t seed, float scale) {
    rand_normal(values, n, seed, RAND_TEST, 1);
    for (int64_t i = 0; i < n; i++) values[i] *= scale;
}

// A copy that ends where the bytes end, so that a read beyond them is seen.
static inline unsigned char *fuzz_copy(const void *bytes, size_t size) {
    unsigned char *copy = (unsigned char *)malloc(size + (size == 0));
    if (copy == NULL) abort();
    if (size > 0) memcpy(copy, bytes, size);
    return copy;
}

// The embedding (48, H) and the tokens (300) that tables with a predictor predict from. One H a fuzzer.
static inline const float *fuzz_embedding(int H) {
    static float values[FUZZ_TOKENS * 256];
    static int known;
    if (known != H) fuzz_values(values, (int64_t)FUZZ_TOKENS * H, 7, 1.0f);
    known = H;
    return values;
}

static inline const uint32_t *fuzz_tokens(void) {
    static uint32_t tokens[FUZZ_ROWS];
    static int known;
    for (uint32_t t = 0; t < FUZZ_ROWS && !known; t++) tokens[t] = t * t % FUZZ_TOKENS;
    known = 1;
    return tokens;
}

// A table as the anchor would ship it; to be freed. Rows whose spread falls from value to value.
static inline unsigned char *fuzz_table(int H, int stochastic, int fixed, uint64_t seed, int64_t *n_bytes) {
    size_t values = (size_t)FUZZ_ROWS * (size_t)H;
    float *x = (float *)malloc(sizeof(float) * values), *e = (float *)malloc(sizeof(float) * values);
    const float *embed = fuzz_embedding(H);
    KltSettings settings = {1, stochastic, fixed, 0.45f, 0.35, 1e-3, 3.0 * H, 5, 1.0};
    KltReport report;
    KltMoments moments, embedding;
    KltWork work = {{NULL, 0}, {NULL, 0}, NULL, 0};
    Stream *stream = fuzz_stream();
    if (x == NULL || e == NULL || klt_moments_alloc(&moments, H, !stochastic, FUZZ_ROWS) ||
        klt_moments_alloc(&embedding, H, 0, 0))
        abort();
    fuzz_values(x, (int64_t)values, seed, 2.0f);
    for (size_t i = 0; i < values; i++) x[i] /= (float)(1 + i % (size_t)H);
    embedding_forward(e, fuzz_tokens(), embed, FUZZ_ROWS, H, stream);
    if (klt_moments_add(&embedding, e, NULL, NULL, FUZZ_ROWS, 1, 0, &work, stream) ||
        klt_moments_add(&moments, x, e, fuzz_tokens(), FUZZ_ROWS, 1, stochastic, &work, stream))
        abort();
    KltSources from = {&moments, stochastic ? NULL : &embedding, stochastic ? NULL : &moments, embed};
    unsigned char *blob = klt_learn(&from, &settings, &work, n_bytes, &report, stream);
    if (blob == NULL) abort();
    klt_moments_free(&moments);
    klt_moments_free(&embedding);
    klt_work_free(&work);
    free(x);
    free(e);
    return blob;
}

#endif
