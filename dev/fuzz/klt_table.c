// klt_table_load of any bytes; where they are a table, messages read and written with it.
//
//   byte 0  n - 1           1  the table's bytes (2), then the table, then a message of n tokens
// Frequencies have to add up, which hardly any mutation leaves so: the mutator moves some from one symbol to another.
#include "fuzz.h"

enum { HEAD = 3, H = 12 };

static KltEnd fuzz_end(const KltTable *table) {
    static KltWork work;
    KltEnd end = {table, &work, fuzz_embedding(H), 4.0 * H, {0.0, 0.0}};
    return end;
}

static const KltMessage which = {5, 1, 2, 7, 3};

// What a sender makes of values with this table, however odd, arrives.
static void fuzz_there_and_back(const KltTable *table, int n) {
    static float values[FUZZ_ROWS * H];
    float x[FUZZ_ROWS * H];
    KltEnd end = fuzz_end(table);
    int fixed = (table->head.flags & KLT_FIXED) != 0;
    int64_t cap = fixed ? klt_fixed_bytes(table, n) : klt_most(&end, n);
    unsigned char *message = (unsigned char *)malloc((size_t)cap);
    if (message == NULL) abort();
    if (values[0] == 0.0f) fuzz_values(values, FUZZ_ROWS * H, 9, 1.0f);
    int64_t n_bytes = klt_encode(&end, &which, fuzz_tokens(), values, n, H, message, cap, fuzz_stream());
    assert(n_bytes <= cap);
    if (n_bytes >= 0) assert(klt_decode(&end, &which, fuzz_tokens(), message, n_bytes, x, n, H, fuzz_stream()) == 0);
    free(message);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    float x[FUZZ_ROWS * H];
    KltTable table;
    if (size < HEAD) return 0;
    int n = 1 + data[0];
    size_t at = HEAD, n_bytes = (size_t)data[1] | (size_t)data[2] << 8;
    if (n_bytes > size - at) n_bytes = size - at;
    unsigned char *blob = fuzz_copy(data + at, n_bytes);
    unsigned char *message = fuzz_copy(data + at + n_bytes, size - at - n_bytes);
    if (klt_table_load(&table, blob, (int64_t)n_bytes, H, fuzz_stream()) == 0) {
        KltEnd end = fuzz_end(&table);
        klt_decode(&end, &which, fuzz_tokens(), message, (int64_t)(size - at - n_bytes), x, n, H, fuzz_stream());
        fuzz_there_and_back(&table, n);
        klt_table_free(&table);
    }
    free(blob);
    free(message);
    return 0;
}

// A table, and a message of n tokens it has coded.
static size_t fuzz_make(uint8_t *data, size_t max_size, unsigned seed) {
    float x[FUZZ_ROWS * H];
    static unsigned char *blobs[4];
    static int64_t bytes[4];
    int kind = (int)(seed % 4), n = 1 + (int)(seed / 4 % 256);
    KltTable table;
    if (blobs[kind] == NULL) blobs[kind] = fuzz_table(H, kind & 1, kind >> 1, 3, &bytes[kind]);
    size_t n_bytes = (size_t)bytes[kind];
    if (max_size < HEAD + n_bytes || klt_table_load(&table, blobs[kind], bytes[kind], H, fuzz_stream())) return 0;
    KltEnd end = fuzz_end(&table);
    int64_t left = (int64_t)(max_size - HEAD - n_bytes);
    data[0] = (uint8_t)(n - 1), data[1] = (uint8_t)n_bytes, data[2] = (uint8_t)(n_bytes >> 8);
    memcpy(data + HEAD, blobs[kind], n_bytes);
    fuzz_values(x, (int64_t)n * H, seed, 1.0f);
    int64_t sent = klt_encode(&end, &which, fuzz_tokens(), x, n, H, data + HEAD + n_bytes, left, fuzz_stream());
    klt_table_free(&table);
    return HEAD + n_bytes + (size_t)(sent > 0 ? sent : 0);
}

// Moves a share of one symbol's frequency to another, in one of the tables.
static void fuzz_frequencies(uint8_t *blob, int64_t n_bytes, Philox draw) {
    KltHeader head;
    uint16_t from, to;
    if (klt_table_head(&head, blob, n_bytes, H) || head.flags & KLT_FIXED) return;
    int n_tables = klt_scales(head.flags) + 1;
    uint8_t *at = blob + n_bytes - 2 * KLT_CLASSES - 64 * (int64_t)(1 + draw.v[0] % (uint32_t)n_tables);
    uint8_t *a = at + 2 * (draw.v[1] % RANS_SYMBOLS), *b = at + 2 * (draw.v[2] % RANS_SYMBOLS);
    memcpy(&from, a, 2), memcpy(&to, b, 2);
    if (a == b) return;
    uint16_t moved = (uint16_t)(draw.v[3] % 2 ? from : draw.v[3] / 2 % (from + 1u));
    from = (uint16_t)(from - moved), to = (uint16_t)(to + moved);
    memcpy(a, &from, 2), memcpy(b, &to, 2);
}

size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned seed) {
    Philox draw = rand_block(seed, RAND_TEST, 0, 0);
    size_t n_bytes = size < HEAD ? 0 : (size_t)data[1] | (size_t)data[2] << 8;
    if (size < HEAD || n_bytes > size - HEAD || draw.v[0] % 8 == 0) {
        size_t made = fuzz_make(data, max_size, draw.v[1]);
        return made > 0 ? made : size;
    }
    if (draw.v[0] % 8 < 3) { // the message alone
        size_t at = HEAD + n_bytes;
        return at + LLVMFuzzerMutate(data + at, size - at, max_size - at);
    }
    if (draw.v[0] % 8 < 5) { // the table, which keeps its size
        fuzz_frequencies(data + HEAD, (int64_t)n_bytes, rand_block(seed, RAND_TEST, 1, 0));
        return size;
    }
    if (draw.v[0] % 8 < 7 && n_bytes > 0) {
        size_t at = draw.v[1] % (draw.v[2] % 2 && n_bytes > 32 ? 32 : n_bytes); // its head as often as all of it
        data[HEAD + at] = (uint8_t)draw.v[3];
        return size;
    }
    return LLVMFuzzerMutate(data, size, max_size);
}
