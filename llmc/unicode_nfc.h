// Unicode's normal form C (UAX #15): canonically equal texts get the same code points, joined where there is one.
//
//   Nfc *nfc = nfc_open();
//   if (!nfc_is_normal(nfc, text, n)) n = nfc_normalize(nfc, &normal, text, n);     // a new text, to be freed
//
// Most text is in form C already. Where not, only stretches from a plain code point to the next are worked on.
#ifndef LLMC_UNICODE_NFC_H
#define LLMC_UNICODE_NFC_H

#include <stdint.h> // fixed-width integers
#include <stdlib.h> // malloc
#include <string.h> // memcpy

#include "error.h"
#include "unicode.h"
#include "unicode_table.h"

enum { NFC_CODES = 0x110000, NFC_FIRST = 0x300, NFC_SHORT = 16 };
enum { HANGUL = 0xAC00, HANGUL_L = 0x1100, HANGUL_V = 0x1161, HANGUL_T = 0x11A7 };
enum { HANGUL_VS = 21, HANGUL_TS = 28, HANGUL_LS = 19, HANGULS = HANGUL_LS * HANGUL_VS * HANGUL_TS };

typedef struct {
    uint8_t classes[NFC_CODES]; // canonical combining class
    uint8_t uneasy[NFC_CODES];  // 1: form C may change it or what is before it
    uint16_t whole[NFC_CODES];  // 1 + place in unicode_joined of a code point that is joined from two
} Nfc;

// The tables by code point, to be freed; NULL: out of memory.
static inline Nfc *nfc_open(void) {
    Nfc *nfc = (Nfc *)calloc(1, sizeof *nfc);
    if (nfc == NULL) {
        error_set("out of memory for Unicode's tables");
        return NULL;
    }
    for (size_t i = 0; i < UNICODE_CLASSES; i++)
        for (uint32_t code = unicode_classes[i][0]; code <= unicode_classes[i][1]; code++)
            nfc->classes[code] = (uint8_t)unicode_classes[i][2], nfc->uneasy[code] = 1;
    for (size_t i = 0; i < UNICODE_JOINED; i++) {
        nfc->whole[unicode_joined[i][0]] = (uint16_t)(i + 1);
        nfc->uneasy[unicode_joined[i][2]] = 1;
    }
    for (size_t i = 0; i < UNICODE_SPLIT; i++) nfc->uneasy[unicode_split[i][0]] = 1;
    for (int i = 0; i < HANGUL_VS; i++) nfc->uneasy[HANGUL_V + i] = 1;
    for (int i = 1; i < HANGUL_TS; i++) nfc->uneasy[HANGUL_T + i] = 1;
    return nfc;
}

// Codes and their classes, grown as needed.
typedef struct {
    uint32_t *codes;
    int64_t n, room;
} NfcCodes;

static inline int nfc_codes_add(NfcCodes *to, uint32_t code) {
    if (to->n == to->room) {
        int64_t room = 2 * to->room + 64;
        uint32_t *codes = (uint32_t *)realloc(to->codes, sizeof *codes * (size_t)room);
        if (codes == NULL) return error_set("out of memory for normalized text");
        to->codes = codes, to->room = room;
    }
    to->codes[to->n++] = code;
    return 0;
}

// The two parts of a code point, parts[1] 0 for a single one; 0 if it has none.
static inline int nfc_parts(const Nfc *nfc, uint32_t code, uint32_t parts[2]) {
    size_t low = 0, high = UNICODE_SPLIT;
    if (code >= HANGUL && code < HANGUL + HANGULS) {
        uint32_t index = code - HANGUL, tail = index % HANGUL_TS;
        parts[0] = tail ? code - tail : HANGUL_L + index / (HANGUL_VS * HANGUL_TS);
        parts[1] = tail ? HANGUL_T + tail : HANGUL_V + index / HANGUL_TS % HANGUL_VS;
        return 1;
    }
    if (nfc->whole[code]) {
        memcpy(parts, &unicode_joined[nfc->whole[code] - 1][1], 2 * sizeof *parts);
        return 1;
    }
    if (!nfc->uneasy[code]) return 0;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (unicode_split[middle][0] < code)
            low = middle + 1;
        else
            high = middle;
    }
    if (low == UNICODE_SPLIT || unicode_split[low][0] != code) return 0;
    memcpy(parts, &unicode_split[low][1], 2 * sizeof *parts);
    return 1;
}

// Adds what a code point consists of in the end; parts nest a few levels.
static inline int nfc_take_apart(const Nfc *nfc, NfcCodes *to, uint32_t code) {
    uint32_t parts[2];
    if (!nfc_parts(nfc, code, parts)) return nfc_codes_add(to, code);
    if (nfc_take_apart(nfc, to, parts[0])) return -1;
    return parts[1] != 0 ? nfc_take_apart(nfc, to, parts[1]) : 0;
}

// Marks of a run (n) by their class; those of one class keep their order. Long runs are hostile: a pass a class.
static inline int nfc_sort(const Nfc *nfc, uint32_t *codes, int64_t n) {
    if (n > NFC_SHORT) {
        uint32_t *copy = (uint32_t *)malloc(sizeof *copy * (size_t)n);
        if (copy == NULL) return error_set("out of memory for normalized text");
        memcpy(copy, codes, sizeof *copy * (size_t)n);
        for (int which = 1, at = 0; which < 256; which++)
            for (int64_t i = 0; i < n; i++)
                if (nfc->classes[copy[i]] == which) codes[at++] = copy[i];
        free(copy);
        return 0;
    }
    for (int64_t i = 1; i < n; i++) {
        uint32_t code = codes[i];
        int64_t j = i;
        for (; j > 0 && nfc->classes[codes[j - 1]] > nfc->classes[code]; j--) codes[j] = codes[j - 1];
        codes[j] = code;
    }
    return 0;
}

static inline int nfc_order(const Nfc *nfc, NfcCodes *text) {
    for (int64_t i = 0; i < text->n;) {
        int64_t end = i;
        while (end < text->n && nfc->classes[text->codes[end]] != 0) end++;
        if (end > i + 1 && nfc_sort(nfc, text->codes + i, end - i)) return -1;
        i = end > i ? end : i + 1;
    }
    return 0;
}

// The code point that two join to, 0 if to none.
static inline uint32_t nfc_join(uint32_t first, uint32_t second) {
    size_t low = 0, high = UNICODE_JOINED;
    if (first >= HANGUL_L && first < HANGUL_L + HANGUL_LS && second >= HANGUL_V && second < HANGUL_V + HANGUL_VS)
        return HANGUL + ((first - HANGUL_L) * HANGUL_VS + (second - HANGUL_V)) * HANGUL_TS;
    if (first >= HANGUL && first < HANGUL + HANGULS && (first - HANGUL) % HANGUL_TS == 0 && second > HANGUL_T &&
        second < HANGUL_T + HANGUL_TS)
        return first + (second - HANGUL_T);
    while (low < high) {
        size_t middle = (low + high) / 2;
        const uint32_t *row = unicode_joined[middle];
        if (row[1] < first || (row[1] == first && row[2] < second))
            low = middle + 1;
        else
            high = middle;
    }
    if (low == UNICODE_JOINED || unicode_joined[low][1] != first || unicode_joined[low][2] != second) return 0;
    return unicode_joined[low][0];
}

// Joins each code point to the last starter unless one of no lower class, or a starter, stands between.
static inline void nfc_compose(const Nfc *nfc, NfcCodes *text) {
    int64_t kept = 0, starter = -1;
    for (int64_t i = 0; i < text->n; i++) {
        uint32_t code = text->codes[i], joined = 0;
        int which = nfc->classes[code], between = kept > 0 ? nfc->classes[text->codes[kept - 1]] : 0;
        int blocked = starter < kept - 1 && (between == 0 || between >= which);
        if (starter >= 0 && !blocked) joined = nfc_join(text->codes[starter], code);
        if (joined != 0) {
            text->codes[starter] = joined;
            continue;
        }
        text->codes[kept] = code;
        if (which == 0) starter = kept;
        kept++;
    }
    text->n = kept;
}

// Where the first code point that is not plain begins, n if all are.
static inline int64_t nfc_uneasy_at(const Nfc *nfc, const char *text, int64_t n) {
    for (int64_t i = 0; i < n;) {
        if ((unsigned char)text[i] < 0xCC) { // below U+0300, or inside such a code point
            i++;
            continue;
        }
        int length;
        if (nfc->uneasy[utf8_get(text + i, &length)]) return i;
        i += length;
    }
    return n;
}

// 1 if form C certainly leaves a text (n bytes of valid UTF-8) as it is.
static inline int nfc_is_normal(const Nfc *nfc, const char *text, int64_t n) {
    return nfc_uneasy_at(nfc, text, n) == n;
}

// The end of a stretch that begins with an uneasy code point: the next plain one.
static inline int64_t nfc_stretch(const Nfc *nfc, const char *text, int64_t at, int64_t n) {
    for (int length; at < n; at += length)
        if (!nfc->uneasy[utf8_get(text + at, &length)]) break;
    return at;
}

// The form C of text (n bytes of valid UTF-8) into *normal, to be freed. Returns its length, at most 3 * n (UAX #15's
// largest growth), or -1: out of memory.
static inline int64_t nfc_normalize(const Nfc *nfc, char **normal, const char *text, int64_t n) {
    char *out = (char *)malloc(3 * (size_t)n + 1);
    NfcCodes codes = {NULL, 0, 0};
    int64_t used = 0, at = 0;
    int failed = out == NULL ? error_set("out of memory for normalized text") : 0;
    while (at < n && !failed) {
        int64_t from = at + nfc_uneasy_at(nfc, text + at, n - at), begin = from, length;
        if (from < n)
            for (begin = from > at ? from - 1 : from; begin > at && (text[begin] & 0xC0) == 0x80;) begin--;
        memcpy(out + used, text + at, (size_t)(begin - at));
        used += begin - at;
        at = nfc_stretch(nfc, text, from, n);
        codes.n = 0;
        for (int bytes; begin < at && !failed; begin += bytes)
            failed = nfc_take_apart(nfc, &codes, utf8_get(text + begin, &bytes));
        if (failed || nfc_order(nfc, &codes)) break;
        nfc_compose(nfc, &codes);
        for (length = 0; length < codes.n; length++) used += utf8_put(out + used, codes.codes[length]);
    }
    free(codes.codes);
    if (failed || at < n) {
        free(out);
        return -1;
    }
    *normal = out;
    return used;
}

#endif
