// UTF-8: lengths, code points and back.
#ifndef LLMC_UNICODE_H
#define LLMC_UNICODE_H

#include <stddef.h> // size_t
#include <stdint.h> // fixed-width integers

// Length of the valid UTF-8 sequence at s (n bytes left, at least one), 0 if it is none.
static inline int utf8_length(const unsigned char *s, size_t n) {
    if (s[0] < 0x80) return 1;
    int length = s[0] >= 0xC2 && s[0] <= 0xDF ? 2 : (s[0] & 0xF0) == 0xE0 ? 3 : s[0] >= 0xF0 && s[0] <= 0xF4 ? 4 : 0;
    if (length == 0 || (size_t)length > n) return 0;
    for (int i = 1; i < length; i++)
        if ((s[i] & 0xC0) != 0x80) return 0;
    if (s[0] == 0xE0 && s[1] < 0xA0) return 0; // overlong
    if (s[0] == 0xED && s[1] > 0x9F) return 0; // surrogates
    if (s[0] == 0xF0 && s[1] < 0x90) return 0; // overlong
    if (s[0] == 0xF4 && s[1] > 0x8F) return 0; // beyond U+10FFFF
    return length;
}

// The code point at s, a valid sequence; *length gets its bytes.
static inline uint32_t utf8_get(const char *s, int *length) {
    const unsigned char *c = (const unsigned char *)s;
    *length = c[0] < 0x80 ? 1 : c[0] < 0xE0 ? 2 : c[0] < 0xF0 ? 3 : 4;
    if (*length == 1) return c[0];
    uint32_t code = c[0] & (0x7Fu >> *length);
    for (int i = 1; i < *length; i++) code = code << 6 | (c[i] & 0x3Fu);
    return code;
}

// UTF-8 of a code point into out (room for 4); returns its length.
static inline int utf8_put(char *out, uint32_t code) {
    int length = code < 0x80 ? 1 : code < 0x800 ? 2 : code < 0x10000 ? 3 : 4;
    if (length == 1) {
        out[0] = (char)code;
        return 1;
    }
    for (int i = length - 1; i > 0; i--, code >>= 6) out[i] = (char)(0x80 | (code & 0x3F));
    out[0] = (char)(0xF00 >> length | code);
    return length;
}

// How many of the first bytes of text (n) are valid UTF-8.
static inline int64_t utf8_valid(const char *text, int64_t n) {
    int64_t i = 0;
    while (i < n) {
        int length = (unsigned char)text[i] < 0x80 ? 1 : utf8_length((const unsigned char *)text + i, (size_t)(n - i));
        if (length == 0) break;
        i += length;
    }
    return i;
}

#endif
