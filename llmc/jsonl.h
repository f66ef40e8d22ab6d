// Lines of a .jsonl as JSON, in the shapes that files have: with a byte order mark, CRLF, blank lines, no last newline,
// bytes that are no UTF-8 and halves of surrogate pairs.
//
//   JsonLines lines; jsonl_begin(&lines, path, text, n);
//   while ((got = jsonl_next(&lines, &json)) > 0) { ...; json_decref(json); }
//   jsonl_end(&lines);
#ifndef LLMC_JSONL_H
#define LLMC_JSONL_H

#include <jansson.h> // json_t
#include <stdint.h>  // fixed-width integers
#include <stdlib.h>  // malloc
#include <string.h>  // memchr

#include "error.h"

// Length of the valid UTF-8 sequence at s (n bytes left), 0 if it is none.
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

static inline int hex4(const char *s, size_t n) {
    int value = 0;
    if (n < 4) return -1;
    for (int i = 0; i < 4; i++) {
        const char *digits = "0123456789abcdef", *found = strchr(digits, s[i] | ((s[i] >= 'A' && s[i] <= 'F') << 5));
        if (s[i] == '\0' || found == NULL) return -1;
        value = value * 16 + (int)(found - digits);
    }
    return value;
}

// to (room for 3*n) = a JSON line with bytes that are no UTF-8, and \u escapes that are half a surrogate pair, replaced
// by U+FFFD. Returns the new length, *repaired is set if anything was replaced.
static inline size_t json_repair(char *to, const char *from, size_t n, int *repaired) {
    size_t out = 0;
    for (size_t i = 0; i < n;) {
        int length = utf8_length((const unsigned char *)from + i, n - i);
        if (length == 0) {
            memcpy(to + out, "\xEF\xBF\xBD", 3);
            out += 3, i++, *repaired = 1;
        } else if (from[i] != '\\' || i + 1 >= n) {
            memcpy(to + out, from + i, (size_t)length);
            out += (size_t)length, i += (size_t)length;
        } else {
            int code = from[i + 1] == 'u' ? hex4(from + i + 2, n - i - 2) : -1;
            int lone = code >= 0xD800 && code <= 0xDFFF;
            size_t take = code >= 0 ? 6 : 2;
            if (lone && code <= 0xDBFF && i + 12 <= n && from[i + 6] == '\\' && from[i + 7] == 'u') {
                int low = hex4(from + i + 8, n - i - 8);
                if (low >= 0xDC00 && low <= 0xDFFF) lone = 0, take = 12;
            }
            if (lone) *repaired = 1;
            memcpy(to + out, lone ? "\\ufffd" : from + i, take);
            out += take, i += take;
        }
    }
    return out;
}

typedef struct {
    const char *path, *at, *end;
    int64_t line; // of the last that was read, from 1
    int repaired; // it had something that was no UTF-8
    char *room;   // a line once it is repaired
    size_t capacity;
} JsonLines;

// n bytes of text, the contents of the file at path; both must outlive the lines.
static inline void jsonl_begin(JsonLines *lines, const char *path, const char *text, size_t n) {
    memset(lines, 0, sizeof *lines);
    lines->path = path, lines->at = text, lines->end = text + n;
    if (n >= 3 && memcmp(text, "\xEF\xBB\xBF", 3) == 0) lines->at += 3;
}

static inline void jsonl_end(JsonLines *lines) {
    free(lines->room);
    lines->room = NULL;
}

// The next line that is not blank as a new reference. 1; 0: there is none; -1: it is no JSON, or out of memory.
static inline int jsonl_next(JsonLines *lines, json_t **json) {
    const char *stop = lines->at, *text = lines->at;
    json_error_t error;
    while (stop == text) {
        text = lines->at;
        if (text >= lines->end) return 0;
        const char *newline = (const char *)memchr(text, '\n', (size_t)(lines->end - text));
        stop = newline != NULL ? newline : lines->end, lines->at = newline != NULL ? newline + 1 : lines->end;
        while (stop > text && (stop[-1] == '\r' || stop[-1] == ' ' || stop[-1] == '\t')) stop--;
        lines->line++;
    }
    size_t n = (size_t)(stop - text);
    if (n > lines->capacity) {
        free(lines->room);
        lines->capacity = n * 2;
        lines->room = (char *)malloc(lines->capacity * 3);
        if (lines->room == NULL) {
            lines->capacity = 0;
            return error_set("%s: out of memory for a line of %zu bytes", lines->path, n);
        }
    }
    lines->repaired = 0;
    size_t length = json_repair(lines->room, text, n, &lines->repaired);
    *json = json_loadb(lines->room, length, JSON_ALLOW_NUL, &error);
    if (*json != NULL) return 1;
    return error_set("%s: line %lld: %s", lines->path, (long long)lines->line, error.text);
}

#endif
