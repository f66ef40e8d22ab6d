// Cuts text into the pieces that are encoded alone, by the regular expressions of a tokenizer.json: each in turn cuts
// what the one before it has left. PCRE2, compiled to machine code where it can, does the matching.
//
//   Splitter s = {0};
//   if (splitter_add(&s, SPLIT_GPT2, 0, reason, sizeof reason)) ...      // 1: a pattern that may mean something else
//   here pcre2_match(s.steps[0].code, ...)
//
// Those files are written for Oniguruma (Ruby's dialect) or Rust's regex; only what means the same there and here is
// taken: characters, classes without nesting, general categories, groups, alternatives, look-around, repetition.
// \s is written out as Unicode's White_Space, since PCRE2's has U+180E too. Categories are those of PCRE2's Unicode
// (14 in 10.42): code points assigned later may be cut otherwise.
#ifndef LLMC_TOKENIZER_SPLIT_H
#define LLMC_TOKENIZER_SPLIT_H

#ifndef PCRE2_CODE_UNIT_WIDTH
#define PCRE2_CODE_UNIT_WIDTH 8
#endif
#include <pcre2.h>  // pcre2_match
#include <stdint.h> // fixed-width integers
#include <stdio.h>  // snprintf
#include <string.h> // strchr

#include "error.h"
#include "unicode.h"

enum { SPLIT_STEPS = 8, SPLIT_PATTERN = 4096 };
enum { SPLIT_TRIES = 100000000 }; // within one match: long runs of spaces take many, hostile patterns any number

#define SPLIT_SPACE "\\t-\\r \\x{85}\\x{A0}\\x{1680}\\x{2000}-\\x{200A}\\x{2028}\\x{2029}\\x{202F}\\x{205F}\\x{3000}"
// What ByteLevel's use_regex stands for, and Llama 3's tiktoken pattern.
#define SPLIT_GPT2 "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+"
#define SPLIT_LLAMA3                                                                                                   \
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|"           \
    "\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"

typedef struct {
    pcre2_code *code;
    int drops_gaps; // what lies between matches is no piece, but gone
} SplitStep;

typedef struct {
    SplitStep steps[SPLIT_STEPS];
    int n_steps;
    pcre2_match_context *limits;
} Splitter;

static inline void splitter_free(Splitter *s) {
    for (int i = 0; i < s->n_steps; i++) pcre2_code_free(s->steps[i].code);
    pcre2_match_context_free(s->limits);
    memset(s, 0, sizeof *s);
}

// A pattern as it is rewritten.
typedef struct {
    char text[SPLIT_PATTERN];
    size_t used;
} SplitPattern;

static inline void pattern_put(SplitPattern *to, const char *text, size_t n) {
    if (to->used + n >= sizeof to->text) return; // the caller sees it full
    memcpy(to->text + to->used, text, n);
    to->used += n;
}

// Bytes of a category \p{L} or \p{Lu} after its backslash, 0 if it is another property.
static inline size_t pattern_category(const char *at) {
    if ((at[0] != 'p' && at[0] != 'P') || at[1] != '{' || at[2] == '\0' || strchr("LMNPSZC", at[2]) == NULL) return 0;
    if (at[3] == '}') return 4;
    return at[3] >= 'a' && at[3] <= 'z' && at[4] == '}' ? 5 : 0;
}

// Rewrites the escape at `at` (the backslash); returns its bytes, 0 if it is not taken.
static inline size_t pattern_escape(SplitPattern *to, const char *at, int in_class) {
    size_t category = pattern_category(at + 1);
    char c = at[1];
    if (category > 0) {
        pattern_put(to, at, 1 + category);
        return 1 + category;
    }
    if (c == 's' || (c == 'S' && !in_class)) {
        const char *open = c == 'S' ? "[^" : "[";
        if (!in_class) pattern_put(to, open, strlen(open));
        pattern_put(to, SPLIT_SPACE, strlen(SPLIT_SPACE));
        if (!in_class) pattern_put(to, "]", 1);
        return 2;
    }
    if (c == 'd') {
        pattern_put(to, "\\p{Nd}", 6);
        return 2;
    }
    if (c == '\0' || (strchr("rntf", c) == NULL && (strchr("!\"#$%&'()*+,-./:;<=>?@[]^_`{|}~\\", c) == NULL))) return 0;
    pattern_put(to, at, 2);
    return 2;
}

// Rewrites a class from its bracket on; returns its bytes, 0 if it is not taken.
static inline size_t pattern_class(SplitPattern *to, const char *at) {
    size_t i = at[1] == '^' ? 2 : 1, first = i;
    pattern_put(to, at, i);
    while (at[i] != ']' || i == first) {
        if (at[i] == '\0' || at[i] == '[' || at[i] == ']' || (at[i] == '&' && at[i + 1] == '&')) return 0;
        size_t n = at[i] == '\\' ? pattern_escape(to, at + i, 1) : 1;
        if (n == 0) return 0;
        if (at[i] != '\\') pattern_put(to, at + i, 1);
        i += n;
    }
    pattern_put(to, "]", 1);
    return i + 1;
}

// Rewrites one element of a pattern; returns its bytes, 0 if it is not taken.
static inline size_t pattern_element(SplitPattern *to, const char *at) {
    static const char *const groups[] = {"(?i:", "(?:", "(?!", "(?=", "(?<!", "(?<="};
    if (*at == '\\') return pattern_escape(to, at, 0);
    if (*at == '[') return pattern_class(to, at);
    size_t n = strchr("^$.", *at) != NULL ? 0 : 1;
    if (*at == '(' && at[1] == '?') {
        n = 0;
        for (size_t i = 0; i < sizeof groups / sizeof *groups && n == 0; i++)
            if (strncmp(at, groups[i], strlen(groups[i])) == 0) n = strlen(groups[i]);
    }
    if (*at == '{') { // {2}, {1,} or {1,3}, and not possessive or lazy, which the dialects take for different things
        size_t digits = strspn(at + 1, "0123456789"), end = 1 + digits;
        if (at[end] == ',') end += 1 + strspn(at + end + 1, "0123456789");
        n = digits > 0 && at[end] == '}' && at[end + 1] != '+' && at[end + 1] != '?' ? end + 1 : 0;
    }
    pattern_put(to, at, n);
    return n;
}

// Adds a pattern as the next step. 0; 1 with the reason if it is not one that certainly means the same here; -1 with an
// error message: out of memory.
static inline int splitter_add(Splitter *s, const char *pattern, int drops_gaps, char *reason, size_t size) {
    SplitPattern to = {"", 0};
    int error;
    PCRE2_SIZE where;
    for (size_t i = 0, n; pattern[i] != '\0'; i += n) {
        n = pattern_element(&to, pattern + i);
        if (n == 0 || to.used + 64 > sizeof to.text) {
            snprintf(reason, size, "its split pattern has '%.12s', which may mean something else here", pattern + i);
            return 1;
        }
    }
    if (s->n_steps == SPLIT_STEPS) {
        snprintf(reason, size, "it splits text in more than %d steps", SPLIT_STEPS);
        return 1;
    }
    if (s->limits == NULL) s->limits = pcre2_match_context_create(NULL);
    if (s->limits == NULL) return error_set("out of memory for the tokenizer");
    pcre2_set_match_limit(s->limits, SPLIT_TRIES);
    pcre2_code *code = pcre2_compile((PCRE2_SPTR)to.text, to.used, PCRE2_UTF | PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C,
                                     &error, &where, NULL);
    if (code == NULL) {
        snprintf(reason, size, "its split pattern does not compile (PCRE2's error %d at byte %zu)", error,
                 (size_t)where);
        return 1;
    }
    pcre2_jit_compile(code, PCRE2_JIT_COMPLETE); // without it matching is slower
    s->steps[s->n_steps].code = code, s->steps[s->n_steps].drops_gaps = drops_gaps;
    s->n_steps++;
    return 0;
}

// Finds the first match of a step in text (n) from `at` on that is not of nothing: its ends into *from, *to. 1; 0:
// none; -1: an error.
static inline int splitter_find(const Splitter *s, int step, const char *text, int64_t n, int64_t at,
                                pcre2_match_data *match, int64_t *from, int64_t *to) {
    const PCRE2_SIZE *ends = pcre2_get_ovector_pointer(match);
    for (int length; at < n; at = (int64_t)ends[0] + length) {
        int found = pcre2_match(s->steps[step].code, (PCRE2_SPTR)text, (PCRE2_SIZE)n, (PCRE2_SIZE)at,
                                PCRE2_NO_UTF_CHECK, match, s->limits);
        if (found == PCRE2_ERROR_NOMATCH) return 0;
        if (found < 0) return error_set("a split pattern fails on a text: PCRE2's error %d", found);
        if (ends[1] > ends[0]) {
            *from = (int64_t)ends[0], *to = (int64_t)ends[1];
            return 1;
        }
        if ((int64_t)ends[0] >= n) return 0;
        utf8_get(text + ends[0], &length);
    }
    return 0;
}

#endif
