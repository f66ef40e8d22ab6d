// The entropy coder: any stream is read without a read beyond it, and what a writer makes is read back.
//
//   byte 0  shift           1 .. 32  weights of the symbols           33  a stream
#include "fuzz.h"

enum { HEAD = 1 + RANS_SYMBOLS, MOST = 4096 };

static void fuzz_read(const RansTable *table, int shift, const uint8_t *bytes, size_t size) {
    RansReader r;
    unsigned char *stream = fuzz_copy(bytes, size);
    if (rans_read_begin(&r, stream, (int64_t)size) == 0) {
        for (int i = 0; i < MOST && !r.failed; i++) {
            int value = rans_read_symbol(&r, table, shift);
            assert(value >= -RANS_MAX - 1 && value <= RANS_MAX);
            if (rans_read_end(&r) == 0) break;
        }
    }
    free(stream);
}

// The bytes taken as values.
static void fuzz_round_trip(const RansTable *table, int shift, const uint8_t *bytes, size_t size) {
    int n = (int)(size / 2 < MOST ? size / 2 : MOST);
    size_t cap = size % 7 == 0 ? size / 2 : 16 * size + 8; // too little at times
    unsigned char *buffer = (unsigned char *)malloc(cap);
    RansWriter w;
    RansReader r;
    int16_t value;
    if (buffer == NULL) abort();
    rans_write_begin(&w, buffer, (int64_t)cap);
    for (int i = n - 1; i >= 0; i--) {
        memcpy(&value, bytes + 2 * i, 2);
        rans_write_symbol(&w, table, shift, value < -RANS_MAX ? 0 : value);
    }
    int64_t n_bytes = rans_write_end(&w);
    assert(n_bytes <= (int64_t)cap && (n_bytes >= 0 || size % 7 == 0));
    if (n_bytes >= 0) {
        assert(rans_read_begin(&r, w.at, n_bytes) == 0);
        for (int i = 0; i < n; i++) {
            memcpy(&value, bytes + 2 * i, 2);
            assert(rans_read_symbol(&r, table, shift) == (value < -RANS_MAX ? 0 : value));
        }
        assert(rans_read_end(&r) == 0);
    }
    free(buffer);
}

static int fuzz_rans_table(RansTable *table, const uint8_t *data) {
    double weights[RANS_SYMBOLS];
    uint16_t freq[RANS_SYMBOLS];
    for (int i = 0; i < RANS_SYMBOLS; i++) weights[i] = exp2((double)data[1 + i] / 8.0) - 1.0;
    rans_frequencies(freq, weights);
    assert(rans_table(table, freq) == 0);
    return data[0] % (RANS_MAX_SHIFT + 1);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    RansTable table;
    if (size < HEAD) return 0;
    int shift = fuzz_rans_table(&table, data);
    fuzz_read(&table, shift, data + HEAD, size - HEAD);
    fuzz_round_trip(&table, shift, data + HEAD, size - HEAD);
    return 0;
}

// Every eighth input is a new stream that a writer has made.
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned seed) {
    RansTable table;
    RansWriter w;
    float values[128];
    if (max_size < HEAD + 1024 || (size >= HEAD && seed % 8 != 0)) return LLVMFuzzerMutate(data, size, max_size);
    for (uint32_t i = 0; i < HEAD; i++) data[i] = (uint8_t)rand_block(seed, RAND_TEST, 2, i).v[0];
    int shift = fuzz_rans_table(&table, data);
    fuzz_values(values, 128, seed, 8.0f * (float)(1 << shift));
    rans_write_begin(&w, data + HEAD, 1024);
    for (int i = 0; i < 128; i++)
        rans_write_symbol(&w, &table, shift, (int)fmaxf(fminf(values[i], (float)RANS_MAX), -(float)RANS_MAX));
    int64_t n_bytes = rans_write_end(&w);
    if (n_bytes > 0) memmove(data + HEAD, w.at, (size_t)n_bytes);
    return HEAD + (size_t)(n_bytes > 0 ? n_bytes : 0);
}
