// Entropy coding by rANS (Duda 2013) with static tables, on the host in both builds: integers only, the same bytes on
// every machine.
//
//   RansTable table;  rans_frequencies(freq, weights);  if (rans_table(&table, freq)) return -1;
//   RansWriter w;     rans_write_begin(&w, buffer, cap);  ... rans_write_symbol(&w, &table, 0, value) ...  LAST FIRST
//   int64_t n = rans_write_end(&w);                       bytes, at w.at; -1: they are more than cap
//   RansReader r;     if (rans_read_begin(&r, bytes, n)) ...  value = rans_read_symbol(&r, &table, 0) ...  first first
//   if (rans_read_end(&r)) ...                            the bytes are not what a writer made
//
// A table gives each of the values -15 .. 15 a frequency out of 4096, and one to the escape, under which all others
// travel: value v as its zigzag number z (0, -1, 1, -2 ... = 0, 1, 2, 3 ...), 5 bits for its length and the bits below
// its highest. A value of frequency 0 escapes too. With shift > 0 the low `shift` bits travel as they are and the
// table is for v >> shift: for distributions much wider than 31.
//
// The state x in [2^23, 2^31) takes a symbol of frequency f that starts at s as
//   x' = (x / f) << 12 | s + x % f,   after bytes have been put out until x < f << 19
// A stream is the last state, 4 bytes little-endian, and the bytes. A reader must end at x = 2^23 with no byte left,
// which few other bytes do; it reads no byte beyond those it was given and gives zeros from there on.
#ifndef LLMC_RANS_H
#define LLMC_RANS_H

#include <math.h>   // log2
#include <stdint.h> // fixed-width integers
#include <string.h> // memset

#define RANS_BITS      12
#define RANS_TOTAL     (1 << RANS_BITS)
#define RANS_RANGE     15 // values -15 .. 15 have symbols of their own
#define RANS_SYMBOLS   32
#define RANS_ESCAPE    31
#define RANS_LOW       (1u << 23)
#define RANS_MAX_SHIFT 12
#define RANS_MAX       32767 // largest size of a value

// A symbol's share of the 4096; x / freq = x * inverse >> (31 + inverse_bits) for x < 2^31.
typedef struct {
    uint32_t inverse;
    uint16_t freq, start, inverse_bits;
} RansShare;

typedef struct {
    RansShare share[RANS_SYMBOLS];
    uint8_t slot[RANS_TOTAL]; // the symbol a remainder belongs to
} RansTable;

typedef struct {
    uint32_t state;
    unsigned char *at, *floor; // bytes are written downwards from the buffer's end
    unsigned char *end;
    int full;
} RansWriter;

typedef struct {
    uint32_t state;
    const unsigned char *at, *end;
    int failed;
} RansReader;

// freq = weights as shares of 4096; the escape gets one at least, others may get none. All weights 0: even shares.
static inline void rans_frequencies(uint16_t freq[RANS_SYMBOLS], const double weights[RANS_SYMBOLS]) {
    double total = 0.0;
    int sum = 0, largest = 0;
    for (int i = 0; i < RANS_SYMBOLS; i++) total += weights[i];
    for (int i = 0; i < RANS_SYMBOLS; i++) {
        double share = total > 0.0 ? weights[i] / total : 1.0 / RANS_SYMBOLS;
        freq[i] = (uint16_t)lround(share * RANS_TOTAL);
        if (i == RANS_ESCAPE && freq[i] == 0) freq[i] = 1;
        if (freq[i] > freq[largest]) largest = i;
        sum += freq[i];
    }
    freq[largest] = (uint16_t)(freq[largest] + RANS_TOTAL - sum); // it has 128 at least, the sum is off by 17 at most
}

// 2^(31+b) / f rounded up, b with 2^b >= f: off by less than f / 2^(31+b) <= 2^-31 relative to 1/f, so that the floor
// of x < 2^31 times it is exact (Granlund and Montgomery 1994).
static inline void rans_inverse(RansShare *share) {
    uint64_t f = share->freq;
    int bits = f > 1 ? 64 - __builtin_clzll(f - 1) : 0;
    share->inverse_bits = (uint16_t)bits;
    share->inverse = f > 0 ? (uint32_t)((((uint64_t)1 << (31 + bits)) + f - 1) / f) : 0;
}

// 0, or -1: frequencies that do not add up to 4096, or none for the escape.
static inline int rans_table(RansTable *table, const uint16_t freq[RANS_SYMBOLS]) {
    int start = 0;
    for (int i = 0; i < RANS_SYMBOLS; i++) {
        if (freq[i] > RANS_TOTAL - start) return -1;
        table->share[i].freq = freq[i], table->share[i].start = (uint16_t)start;
        memset(table->slot + start, i, freq[i]);
        rans_inverse(&table->share[i]);
        start += freq[i];
    }
    return start == RANS_TOTAL && freq[RANS_ESCAPE] > 0 ? 0 : -1;
}

static inline uint32_t rans_zigzag(int value) {
    return value < 0 ? 2u * (uint32_t)(-(int64_t)value) - 1u : 2u * (uint32_t)value;
}

// Bits of z: 0 for 0.
static inline int rans_length(uint32_t z) {
    return z == 0 ? 0 : 32 - __builtin_clz(z);
}

static inline int rans_symbol(const RansTable *table, int value) {
    int symbol = value + RANS_RANGE;
    return symbol < 0 || symbol >= RANS_ESCAPE || table->share[symbol].freq == 0 ? RANS_ESCAPE : symbol;
}

// Bits a value costs beyond its symbol's.
static inline int rans_extra(int symbol, int value, int shift) {
    int length = rans_length(rans_zigzag(value >> shift));
    return shift + (symbol == RANS_ESCAPE ? 5 + (length > 0 ? length - 1 : 0) : 0);
}

static inline void rans_write_begin(RansWriter *w, void *buffer, int64_t cap) {
    w->state = RANS_LOW, w->full = 0;
    w->floor = (unsigned char *)buffer, w->end = w->at = w->floor + cap;
}

// Puts bytes out until the state is below `limit`: two at most.
static inline void rans_flush(RansWriter *w, uint32_t limit) {
    if (w->at - w->floor >= 2) { // no branch on how many: what is beyond them is written over
        int n = (w->state >= limit) + (w->state >= (uint64_t)limit << 8);
        w->at[-1] = (unsigned char)w->state, w->at[-2] = (unsigned char)(w->state >> 8);
        w->at -= n, w->state >>= 8 * n;
        return;
    }
    for (; w->state >= limit && !w->full; w->state >>= 8) {
        w->full = w->at == w->floor;
        if (!w->full) *--w->at = (unsigned char)w->state;
    }
}

static inline void rans_put_bits(RansWriter *w, uint32_t value, int bits) {
    if (bits == 0) return;
    rans_flush(w, (RANS_LOW >> bits) << 8);
    w->state = (w->state << bits) + value;
}

static inline void rans_put_symbol(RansWriter *w, const RansTable *table, int symbol) {
    RansShare share = table->share[symbol];
    rans_flush(w, ((RANS_LOW >> RANS_BITS) << 8) * share.freq);
    uint32_t x = w->state, q = (uint32_t)((uint64_t)x * share.inverse >> (31 + share.inverse_bits));
    w->state = (q << RANS_BITS) + x - q * share.freq + share.start;
}

// Takes a value in [-32767, 32767] that is to be read before all those written so far.
static inline void rans_write_symbol(RansWriter *w, const RansTable *table, int shift, int value) {
    // cppcheck-suppress shiftNegativeLHS ; arithmetic with every compiler that builds this
    int high = value >> shift, symbol = rans_symbol(table, high);
    rans_put_bits(w, (uint32_t)value & ((1u << shift) - 1u), shift);
    if (symbol == RANS_ESCAPE) {
        uint32_t z = rans_zigzag(high);
        int length = rans_length(z);
        if (length > 1) rans_put_bits(w, z & ((1u << (length - 1)) - 1u), length - 1);
        rans_put_bits(w, (uint32_t)length, 5);
    }
    rans_put_symbol(w, table, symbol);
}

// The stream lies at w->at afterwards. Its bytes, or -1.
static inline int64_t rans_write_end(RansWriter *w) {
    if (w->full || w->at - w->floor < 4) return -1;
    for (int i = 3; i >= 0; i--) *--w->at = (unsigned char)(w->state >> (8 * i));
    return w->end - w->at;
}

// 0, or -1: too short, or a state no writer ends with.
static inline int rans_read_begin(RansReader *r, const void *bytes, int64_t n_bytes) {
    const unsigned char *from = (const unsigned char *)bytes;
    memset(r, 0, sizeof *r);
    if (n_bytes < 4) return -1;
    for (int i = 0; i < 4; i++) r->state |= (uint32_t)from[i] << (8 * i);
    r->at = from + 4, r->end = from + n_bytes;
    return r->state >= RANS_LOW && r->state < RANS_LOW << 8 ? 0 : -1;
}

static inline void rans_refill(RansReader *r) {
    if (r->end - r->at >= 2) { // no branch on how many
        int n = (r->state < RANS_LOW) + (r->state < RANS_LOW >> 8);
        uint32_t two = (uint32_t)r->at[0] << 8 | r->at[1];
        r->state = r->state << 8 * n | two >> (16 - 8 * n), r->at += n;
        return;
    }
    while (r->state < RANS_LOW) {
        if (r->at == r->end) {
            r->failed = 1, r->state = RANS_LOW;
            return;
        }
        r->state = r->state << 8 | *r->at++;
    }
}

static inline uint32_t rans_get_bits(RansReader *r, int bits) {
    uint32_t value = r->state & ((1u << bits) - 1u);
    if (bits == 0) return 0;
    r->state >>= bits;
    rans_refill(r);
    return value;
}

// The value of an escape; a length no writer gives fails.
static inline int rans_read_escape(RansReader *r) {
    int length = (int)rans_get_bits(r, 5);
    if (length > 16) {
        r->failed = 1;
        return 0;
    }
    uint32_t z = length == 0 ? 0 : 1u << (length - 1) | rans_get_bits(r, length - 1);
    return z % 2 == 1 ? -(int)((z + 1) / 2) : (int)(z / 2);
}

// The next value, in [-32768, 32767]; 0 once the reader has failed.
static inline int rans_read_symbol(RansReader *r, const RansTable *table, int shift) {
    uint32_t rest = r->state & (RANS_TOTAL - 1);
    int symbol = table->slot[rest];
    RansShare share = table->share[symbol];
    if (r->failed) return 0;
    r->state = share.freq * (r->state >> RANS_BITS) + rest - share.start;
    rans_refill(r);
    int high = symbol == RANS_ESCAPE ? rans_read_escape(r) : symbol - RANS_RANGE;
    int value = (int)((uint32_t)high << shift | rans_get_bits(r, shift));
    if (value < -RANS_MAX - 1 || value > RANS_MAX) r->failed = 1;
    return r->failed ? 0 : value;
}

// 0, or -1: the stream was not read to its end, or was none.
static inline int rans_read_end(const RansReader *r) {
    return r->failed || r->at != r->end || r->state != RANS_LOW ? -1 : 0;
}

#endif
