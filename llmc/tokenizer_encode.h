// Text to ids with a TokenizerModel: bytes that are no UTF-8 become their own ids, added tokens that are not special
// are looked for, what lies between them is normalized, cut into pieces, and each piece is encoded. Ids of short pieces
// are remembered within a call: most of a text is words that come again.
#ifndef LLMC_TOKENIZER_ENCODE_H
#define LLMC_TOKENIZER_ENCODE_H

#include <stdint.h> // fixed-width integers

#include "tokenizer_json.h" // TokenizerModel

enum { PIECE_BYTES = 15, PIECE_IDS = 4, PIECES_MIN = 6, PIECES_MAX = 15 /* powers of two */ };

// A piece that was encoded: its bytes, zeros, its length in the last byte; its ids, BPE_NONE behind them.
typedef struct {
    uint64_t key[2];
    uint32_t ids[PIECE_IDS];
} Piece;

// What a call needs.
typedef struct {
    const TokenizerModel *m;
    uint32_t *out;
    int64_t n; // ids so far
    BpeWork work;
    pcre2_match_data *match;
    Piece *pieces; // (1 << piece_bits)
    int piece_bits;
    const char *end; // of the text that pieces lie in
} Encoder;

static inline void encoder_free(Encoder *e) {
    bpe_work_free(&e->work);
    pcre2_match_data_free(e->match);
    free(e->pieces);
}

// n: bytes of text that are to come.
static inline int encoder_init(Encoder *e, const TokenizerModel *m, uint32_t *out, int64_t n) {
    memset(e, 0, sizeof *e);
    e->m = m, e->out = out, e->piece_bits = PIECES_MIN;
    while (e->piece_bits < PIECES_MAX && (int64_t)16 << e->piece_bits < n) e->piece_bits++;
    e->pieces = (Piece *)calloc((size_t)1 << e->piece_bits, sizeof *e->pieces);
    e->match = pcre2_match_data_create(1, NULL);
    if (e->pieces != NULL && e->match != NULL) return 0;
    encoder_free(e);
    return error_set("out of memory for a text of %lld bytes", (long long)n);
}

// key = the bytes of a short piece. Reads 16 bytes of the text where there are as many.
static inline void piece_key(uint64_t key[2], const char *text, int64_t n, const char *end) {
    uint64_t low = 0, high = 0;
    if (end - text >= 16) {
        memcpy(&low, text, 8);
        memcpy(&high, text + 8, 8);
        if (n < 8) {
            low &= ((uint64_t)1 << 8 * n) - 1;
            high = 0;
        } else {
            high &= ((uint64_t)1 << 8 * (n - 8)) - 1;
        }
    } else {
        memcpy(&low, text, (size_t)(n < 8 ? n : 8));
        if (n > 8) memcpy(&high, text + 8, (size_t)(n - 8));
    }
    key[0] = low, key[1] = high | (uint64_t)n << 56;
}

// Encodes one piece, n > 0 bytes.
static inline int encoder_piece(Encoder *e, const char *text, int64_t n) {
    uint64_t key[2] = {0, 0};
    Piece *piece = NULL;
    uint32_t *out = e->out + e->n;
    if (n <= PIECE_BYTES) {
        piece_key(key, text, n, e->end);
        piece = &e->pieces[bpe_mix(key[0] ^ bpe_mix(key[1])) >> (64 - e->piece_bits)];
        if (piece->key[0] == key[0] && piece->key[1] == key[1]) {
            for (int i = 0; i < PIECE_IDS && piece->ids[i] != BPE_NONE; i++) e->out[e->n++] = piece->ids[i];
            return 0;
        }
    }
    int64_t n_ids = bpe_encode(&e->m->bpe, &e->work, out, text, n);
    if (n_ids < 0) return -1;
    e->n += n_ids;
    if (piece == NULL || n_ids > PIECE_IDS) return 0;
    memcpy(piece->key, key, sizeof key);
    for (int i = 0; i < PIECE_IDS; i++) piece->ids[i] = i < n_ids ? out[i] : BPE_NONE;
    return 0;
}

// Cuts text by the steps from this one on, and encodes what comes out.
static inline int encoder_split(Encoder *e, int step, const char *text, int64_t n) {
    if (n == 0) return 0;
    if (step == e->m->splitter.n_steps) return encoder_piece(e, text, n);
    int drops = e->m->splitter.steps[step].drops_gaps;
    for (int64_t done = 0; done < n;) {
        int64_t from = n, to = n;
        if (splitter_find(&e->m->splitter, step, text, n, done, e->match, &from, &to) < 0) return -1;
        if (!drops && encoder_split(e, step + 1, text + done, from - done)) return -1;
        if (encoder_split(e, step + 1, text + from, to - from)) return -1;
        done = to;
    }
    return 0;
}

// Encodes text whose spaces stand for U+2581, in the pieces that m->words says.
static inline int encoder_words(Encoder *e, const char *text, int64_t n) {
    for (int64_t from = 0, at = 0; from < n; from = at) {
        if (e->m->words == WORDS_EACH && text[at] == ' ') at++;
        while (e->m->words == WORDS_RUNS && at < n && text[at] == ' ') at++;
        const char *space = at < n ? (const char *)memchr(text + at, ' ', (size_t)(n - at)) : NULL;
        at = e->m->words == WORDS_WHOLE || space == NULL ? n : space - text;
        if (encoder_piece(e, text + from, at - from)) return -1;
    }
    return 0;
}

static inline int encoder_pieces(Encoder *e, const char *text, int64_t n) {
    e->end = text + n;
    return e->m->bpe.by_character ? encoder_words(e, text, n) : encoder_split(e, 0, text, n);
}

// Puts the space before a text (n > 0), and spaces for U+2581, where that is the model's way; is_first: the text begins
// here.
static inline int encoder_prefix(Encoder *e, const char *text, int64_t n, int is_first) {
    const TokenizerModel *m = e->m;
    int by_character = m->bpe.by_character;
    int begins = text[0] == ' ' || (by_character && n >= 3 && memcmp(text, SCORE_SPACE, 3) == 0);
    int prefixed = m->prefix == PREFIX_ALWAYS || (m->prefix == PREFIX_MISSING && !begins) ||
                   (m->prefix == PREFIX_FIRST && is_first && !begins);
    const char *mark = by_character ? (const char *)memmem(text, (size_t)n, SCORE_SPACE, 3) : NULL;
    if (!prefixed && mark == NULL) return encoder_pieces(e, text, n);
    char *copy = (char *)malloc((size_t)n + 1);
    if (copy == NULL) return error_set("out of memory for a text of %lld bytes", (long long)n);
    int64_t used = 0;
    if (prefixed) copy[used++] = ' ';
    for (int64_t at = 0; at < n;) {
        const char *next = mark != NULL ? (const char *)memmem(text + at, (size_t)(n - at), SCORE_SPACE, 3) : NULL;
        int64_t stop = next != NULL ? next - text : n;
        memcpy(copy + used, text + at, (size_t)(stop - at));
        used += stop - at;
        if (next != NULL) copy[used++] = ' ';
        at = next != NULL ? stop + 3 : n;
    }
    int result = encoder_pieces(e, copy, used);
    free(copy);
    return result;
}

static inline int encoder_added(Encoder *e, const char *text, int64_t n, int is_raw, int is_first);

// What lies between added tokens: those that are looked for in raw text first, then, once it is normalized, the others.
static inline int encoder_part(Encoder *e, const char *text, int64_t n, int was_raw, int is_first) {
    char *normal = NULL;
    if (n == 0) return 0;
    if (!was_raw) return encoder_prefix(e, text, n, is_first);
    if (e->m->nfc == NULL || nfc_is_normal(e->m->nfc, text, n)) return encoder_added(e, text, n, 0, is_first);
    n = nfc_normalize(e->m->nfc, &normal, text, n);
    int result = n < 0 ? -1 : encoder_added(e, normal, n, 0, is_first);
    free(normal);
    return result;
}

// The longest added token of this kind that text (n) begins with; NULL: none.
static inline const AddedToken *added_at(const TokenizerModel *m, const char *text, int64_t n, int is_raw) {
    int byte = (unsigned char)text[0];
    for (int i = m->added_from[byte]; i < m->added_from[byte + 1]; i++) {
        const AddedToken *token = &m->added[i];
        if (token->is_raw == is_raw && token->n_bytes <= n && memcmp(token->text, text, token->n_bytes) == 0)
            return token;
    }
    return NULL;
}

// Special ones among the added tokens are passed over: their spelling is text.
static inline int encoder_added(Encoder *e, const char *text, int64_t n, int is_raw, int is_first) {
    int64_t from = 0;
    for (int64_t at = 0; e->m->has_plain[is_raw] && at < n;) {
        const AddedToken *token = added_at(e->m, text + at, n - at, is_raw);
        if (token != NULL && !token->is_special) {
            if (encoder_part(e, text + from, at - from, is_raw, is_first && from == 0)) return -1;
            e->out[e->n++] = token->id;
            from = at + token->n_bytes;
        }
        at += token != NULL ? (int64_t)token->n_bytes : 1;
    }
    return encoder_part(e, text + from, n - from, is_raw, is_first && from == 0);
}

// Ids of text (n bytes, any) into out, which has room for tokenizer_model_room(m, n). Returns how many, or -1 with an
// error message.
static inline int64_t tokenizer_model_encode(const TokenizerModel *m, uint32_t *out, const char *text, int64_t n) {
    Encoder e;
    int failed = 0;
    if (encoder_init(&e, m, out, n)) return -1;
    for (int64_t at = 0; at < n && !failed;) {
        int64_t valid = utf8_valid(text + at, n - at);
        if (valid > 0) failed = encoder_added(&e, text + at, valid, 1, at == 0);
        at += valid;
        if (at >= n || valid > 0) continue;
        e.out[e.n] = m->bpe.byte_ids[(unsigned char)text[at++]];
        e.n += e.out[e.n] != BPE_NONE;
    }
    encoder_free(&e);
    return failed ? -1 : e.n;
}

// No piece has more ids than bytes; form C makes at most three bytes of one; each part has its own prefix.
static inline int64_t tokenizer_model_room(const TokenizerModel *m, int64_t n) {
    return (m->nfc != NULL ? 3 : 1) * n + (m->prefix != PREFIX_NEVER ? n : 0) + 1;
}

#endif
