// The transform codec's entropy coder: the symbols of a message to bytes and back, on the host in both builds. It
// touches nothing but the memory it is given, so it may run on a thread of its own (coder.h) while the devices go on.
// What the bytes are is in klt_codec.h.
//
//   KltCoding coding = {table, key, n, threads, symbols, scales, message, most, room, room_bytes, 0, 0};
//   klt_coding_write(&coding);   if (coding.n_bytes < 0) ...   the message would be longer than `most`
//   klt_coding_read(&coding);    if (coding.failed) ...        the bytes are no message of this table
#ifndef LLMC_KLT_CODER_H
#define LLMC_KLT_CODER_H

#include <math.h>   // log2
#include <stdint.h> // fixed-width integers
#include <string.h> // memcpy

#include "klt_quantizer.h" // klt_draws_run
#include "klt_table.h"     // KltTable
#include "rans.h"          // RansWriter

// A token's scale: half octaves from the message's size, with the gain on the step as more of them.
static inline int klt_scale(double size, double unit) {
    double half_octaves = size > 0.0 ? 2.0 * log2(size / unit) : -KLT_SCALE_MAX;
    return half_octaves <= -KLT_SCALE_MAX  ? -KLT_SCALE_MAX
           : half_octaves >= KLT_SCALE_MAX ? KLT_SCALE_MAX
                                           : (int)lround(half_octaves);
}

// What components first .. first+count-1 of a token are coded with: the table, the bits that travel as they are, and
// the sign that the context of a draw gives the symbol.
typedef struct {
    int coder[KLT_RUN], shift[KLT_RUN], sign[KLT_RUN];
} KltRun;

static inline int klt_run(KltRun *run, const KltTable *table, uint64_t key, int token, int scale, int first) {
    int count = table->head.K - first < KLT_RUN ? table->head.K - first : KLT_RUN;
    const unsigned char *bits = table->bits + first;
    uint32_t draws[KLT_RUN];
#pragma omp simd
    for (int i = 0; i < count; i++)
        run->coder[i] = klt_class(bits[i], scale), run->shift[i] = klt_shift(run->coder[i]), run->sign[i] = 1;
    if (!(table->head.flags & KLT_STOCHASTIC)) return count;
    klt_draws_run(draws, key, token, first);
#pragma omp simd
    for (int i = 0; i < count; i++)
        run->coder[i] = run->coder[i] * KLT_CONTEXTS + klt_context(draws[i]), run->sign[i] = klt_sign(draws[i]);
    return count;
}

// symbols (K) of one token.
static inline void klt_write_token(RansWriter *writer, const KltTable *table, uint64_t key, int token, int scale,
                                   const int16_t *symbols) {
    RansWriter w = *writer; // in registers
    int K = table->head.K, any = 0;
    KltRun run;
    for (int k = 0; k < K; k++) any |= symbols[k];
    int sent = any != 0 ? scale : KLT_SILENT;
    for (int first = (K - 1) / KLT_RUN * KLT_RUN; first >= 0 && any != 0; first -= KLT_RUN)
        for (int i = klt_run(&run, table, key, token, scale, first) - 1; i >= 0; i--)
            rans_write_symbol(&w, &table->coder[run.coder[i]], run.shift[i], run.sign[i] * symbols[first + i]);
    rans_write_symbol(&w, &table->coder[klt_scales(table->head.flags)], 0, sent);
    *writer = w;
}

// The next token's scale; 0 and no symbols follow if it is silent.
static inline int klt_read_scale(RansReader *r, const KltTable *table, int16_t *scale) {
    *scale = (int16_t)rans_read_symbol(r, &table->coder[klt_scales(table->head.flags)], 0);
    return *scale != KLT_SILENT;
}

static inline int16_t klt_read_one(RansReader *r, const KltTable *table, const KltRun *run, int i) {
    return (int16_t)(run->sign[i] * rans_read_symbol(r, &table->coder[run->coder[i]], run->shift[i]));
}

// Symbols (K) of the next token, whose scale has been read.
static inline void klt_read_token(RansReader *reader, const KltTable *table, uint64_t key, int token, int scale,
                                  int16_t *symbols) {
    RansReader r = *reader; // in registers
    KltRun run;
    for (int first = 0; first < table->head.K; first += KLT_RUN) {
        int count = klt_run(&run, table, key, token, scale, first);
        for (int i = 0; i < count; i++) symbols[first + i] = klt_read_one(&r, table, &run, i);
    }
    *reader = r;
}

// The same of two streams at once: each waits for itself only, so that two take little longer than one.
static inline void klt_read_tokens(RansReader readers[2], const KltTable *table, uint64_t key, const int tokens[2],
                                   const int16_t *scales, int16_t *symbols) {
    RansReader a = readers[0], b = readers[1];
    size_t K = (size_t)table->head.K;
    int16_t *to_a = symbols + (size_t)tokens[0] * K, *to_b = symbols + (size_t)tokens[1] * K;
    KltRun run_a, run_b;
    for (int first = 0; first < table->head.K; first += KLT_RUN) {
        int count = klt_run(&run_a, table, key, tokens[0], scales[tokens[0]], first);
        klt_run(&run_b, table, key, tokens[1], scales[tokens[1]], first);
        for (int i = 0; i < count; i++) {
            to_a[first + i] = klt_read_one(&a, table, &run_a, i);
            to_b[first + i] = klt_read_one(&b, table, &run_b, i);
        }
    }
    readers[0] = a, readers[1] = b;
}

// Symbols (n, K) and scales (n) as pieces; `room` is a buffer of room_bytes to write them in. Bytes of the message, or
// -1: more than `most`.
static inline int64_t klt_write_pieces(const KltTable *table, uint64_t key, const int16_t *symbols,
                                       const int16_t *scales, int n, unsigned char *out, int64_t most,
                                       unsigned char *room, int64_t room_bytes, int threads) {
    int n_pieces = klt_pieces(n);
    int64_t each = room_bytes / n_pieces, at = KLT_MESSAGE_HEADER + 4 * (int64_t)n_pieces;
    int full = 0;
#pragma omp parallel for num_threads(threads) reduction(| : full)
    for (int p = 0; p < n_pieces; p++) {
        RansWriter w;
        int first = p * KLT_PIECE, last = first + KLT_PIECE < n ? first + KLT_PIECE : n;
        rans_write_begin(&w, room + p * each + 4, each - 4);
        for (int t = last - 1; t >= first && !w.full; t--)
            klt_write_token(&w, table, key, t, scales[t], symbols + (size_t)t * (size_t)table->head.K);
        int64_t n_bytes = rans_write_end(&w);
        uint32_t size = n_bytes < 0 ? 0 : (uint32_t)n_bytes;
        memcpy(room + p * each, &size, 4);
        full |= n_bytes < 0;
    }
    for (int p = 0; p < n_pieces && !full; p++) {
        uint32_t size;
        memcpy(&size, room + p * each, 4);
        if (at + size > most) return -1;
        memcpy(out + KLT_MESSAGE_HEADER + 4 * p, &size, 4);
        memcpy(out + at, room + (p + 1) * each - size, size);
        at += size;
    }
    return full ? -1 : at;
}

static inline int64_t klt_fixed_bytes(const KltTable *table, int n) {
    return KLT_MESSAGE_HEADER + (table->token_bits * n + 7) / 8;
}

static inline void klt_write_fixed(const KltTable *table, const int16_t *symbols, int n, unsigned char *out) {
    uint64_t pending = 0;
    int n_pending = 0;
    unsigned char *at = out + KLT_MESSAGE_HEADER;
    for (int t = 0; t < n; t++) {
        for (int k = 0; k < table->head.K; k++) {
            pending |= (uint64_t)symbols[(size_t)t * (size_t)table->head.K + (size_t)k] << n_pending;
            n_pending += table->bits[k];
            for (; n_pending >= 8; n_pending -= 8, pending >>= 8) *at++ = (unsigned char)pending;
        }
    }
    if (n_pending > 0) *at = (unsigned char)pending;
}

static inline void klt_read_fixed(const KltTable *table, int16_t *symbols, int n, const unsigned char *in) {
    uint64_t pending = 0;
    int n_pending = 0;
    const unsigned char *at = in + KLT_MESSAGE_HEADER;
    for (int t = 0; t < n; t++) {
        for (int k = 0; k < table->head.K; k++) {
            int bits = table->bits[k];
            for (; n_pending < bits; n_pending += 8) pending |= (uint64_t)*at++ << n_pending;
            symbols[(size_t)t * (size_t)table->head.K + (size_t)k] = (int16_t)(pending & ((1u << bits) - 1u));
            pending >>= bits, n_pending -= bits;
        }
    }
}

static inline void klt_put_header(unsigned char *out, uint32_t version, float step) {
    memcpy(out, &version, 4);
    memcpy(out + 4, &step, 4);
}

// Where piece p of a message lies; the sizes add up to the message's.
static inline int klt_open_piece(RansReader *r, const unsigned char *in, int n_pieces, int p) {
    int64_t from = KLT_MESSAGE_HEADER + 4 * (int64_t)n_pieces;
    uint32_t size = 0;
    for (int i = 0; i <= p; i++) from += size, memcpy(&size, in + KLT_MESSAGE_HEADER + 4 * i, 4);
    return rans_read_begin(r, in + from, size);
}

// Pieces p and, if there is one, p + 1. 0, or -1.
static inline int klt_read_two(const KltTable *table, uint64_t key, int16_t *symbols, int16_t *scales, int n,
                               const unsigned char *in, int p) {
    int n_pieces = klt_pieces(n), n_readers = p + 1 < n_pieces ? 2 : 1;
    RansReader readers[2];
    for (int i = 0; i < n_readers; i++)
        if (klt_open_piece(&readers[i], in, n_pieces, p + i)) return -1;
    for (int t = 0; t < KLT_PIECE; t++) {
        int tokens[2] = {p * KLT_PIECE + t, (p + 1) * KLT_PIECE + t}, follow[2] = {0, 0};
        for (int i = 0; i < n_readers; i++)
            follow[i] = tokens[i] < n && klt_read_scale(&readers[i], table, &scales[tokens[i]]);
        if (follow[0] && follow[1]) {
            klt_read_tokens(readers, table, key, tokens, scales, symbols);
            continue;
        }
        for (int i = 0; i < n_readers; i++)
            if (follow[i])
                klt_read_token(&readers[i], table, key, tokens[i], scales[tokens[i]],
                               symbols + (size_t)tokens[i] * (size_t)table->head.K);
    }
    int failed = 0;
    for (int i = 0; i < n_readers; i++) failed |= rans_read_end(&readers[i]);
    return failed;
}

// Symbols (n, K) and scales (n) of a message's pieces. 0, or -1: they are not what a sender writes.
static inline int klt_read_pieces(const KltTable *table, uint64_t key, int16_t *symbols, int16_t *scales, int n,
                                  const unsigned char *in, int64_t n_bytes, int threads) {
    int n_pieces = klt_pieces(n), failed = 0;
    int64_t sum = KLT_MESSAGE_HEADER + 4 * (int64_t)n_pieces;
    if (n_bytes < sum) return -1;
    for (int p = 0; p < n_pieces; p++) {
        uint32_t size;
        memcpy(&size, in + KLT_MESSAGE_HEADER + 4 * p, 4);
        sum += size;
    }
    if (sum != n_bytes) return -1;
#pragma omp parallel for num_threads(threads) reduction(| : failed)
    for (int p = 0; p < n_pieces; p += 2) failed |= klt_read_two(table, key, symbols, scales, n, in, p);
    return failed ? -1 : 0;
}

// A message between its symbols and its bytes.
typedef struct {
    const KltTable *table;
    uint64_t key;
    int n, threads;
    int16_t *symbols, *scales; // (n, K), (n)
    unsigned char *bytes;
    int64_t most;        // bytes there is room for
    unsigned char *room; // for pieces while they are written
    int64_t room_bytes;
    int64_t n_bytes; // of the message; -1: more than `most`
    int failed;
} KltCoding;

// Writes what lies behind the header.
static inline void klt_coding_write(void *context) {
    KltCoding *c = (KltCoding *)context;
    if (c->table->head.flags & KLT_FIXED) {
        klt_write_fixed(c->table, c->symbols, c->n, c->bytes);
        c->n_bytes = klt_fixed_bytes(c->table, c->n);
    } else {
        c->n_bytes = klt_write_pieces(c->table, c->key, c->symbols, c->scales, c->n, c->bytes, c->most, c->room,
                                      c->room_bytes, c->threads);
    }
}

// Reads what lies behind a header that has been looked at. Without anything there all values are 0.
static inline void klt_coding_read(void *context) {
    KltCoding *c = (KltCoding *)context;
    memset(c->symbols, 0, sizeof *c->symbols * (size_t)c->n * (size_t)c->table->head.K);
    memset(c->scales, 0, sizeof *c->scales * (size_t)c->n);
    c->failed = 0;
    if (c->n_bytes == KLT_MESSAGE_HEADER) return;
    if (!(c->table->head.flags & KLT_FIXED))
        c->failed = klt_read_pieces(c->table, c->key, c->symbols, c->scales, c->n, c->bytes, c->n_bytes, c->threads);
    else if (c->n_bytes == klt_fixed_bytes(c->table, c->n))
        klt_read_fixed(c->table, c->symbols, c->n, c->bytes);
    else
        c->failed = 1;
}

#endif
