// The command line from one table: it parses, checks ranges, prints help, goes into a run's log and comes back from it.
//
//   static const Option table[] = {
//   // flag  name     type        field                     default  min   max   help
//       {"-b", "batch", OPTION_INT, OPTION_FIELD(Opts, batch), "32",   1,    1e6,  "sequences a step"}, ...
//   cli_defaults(table, n, &opts); cli_parse(table, n, &opts, given, argc, argv);
//
// Words are exact: no abbreviations, an unknown one is refused with the nearest name. `--name value` and `--name=value`
// are the same; a list takes every word up to the next option.
#ifndef LLMC_CLI_H
#define LLMC_CLI_H

#include <errno.h>   // errno
#include <jansson.h> // settings as JSON
#include <math.h>    // isfinite
#include <stddef.h>  // offsetof
#include <stdint.h>  // fixed-width integers
#include <stdio.h>   // printf
#include <stdlib.h>  // strtod, strtoll
#include <string.h>  // strcmp

#include "error.h"
#include "json.h" // json_from_float

#define CLI_TEXT    512 // bytes of a text option
#define CLI_ITEMS   256 // items of a list option
#define CLI_OPTIONS 128 // options of a table
#define CLI_COLUMN  39  // where help texts begin

typedef enum {
    OPTION_FLAG,
    OPTION_INT,
    OPTION_INT64,
    OPTION_FLOAT,
    OPTION_TEXT,
    OPTION_LIST,
    OPTION_CHOICE
} OptionType;

typedef struct {
    int n;
    char item[CLI_ITEMS][CLI_TEXT];
} TextList;

#define OPTION_FIELD(type, field) offsetof(type, field)

typedef struct {
    const char *flag; // short form or ""
    const char *name; // long form without dashes
    OptionType type;
    size_t offset;        // into the options struct: int, int64_t, float, char[CLI_TEXT], TextList; a choice is an int
    const char *fallback; // the default, as it would be typed
    double min, max;
    const char *choices; // OPTION_CHOICE: "a|b|c", the value is the position
    const char *help;
} Option;

// Where a name stands in "a|b|c", or -1.
static inline int cli_choice(const char *choices, const char *name) {
    int index = 0;
    size_t length = strlen(name);
    for (const char *at = choices; at != NULL; index++) {
        const char *bar = strchr(at, '|');
        size_t n = bar != NULL ? (size_t)(bar - at) : strlen(at);
        if (n == length && strncmp(at, name, n) == 0) return index;
        at = bar != NULL ? bar + 1 : NULL;
    }
    return -1;
}

// out = the name at a position of "a|b|c"
static inline void cli_choice_name(char *out, size_t size, const char *choices, int index) {
    const char *at = choices;
    for (int i = 0; i < index && at != NULL; i++) at = strchr(at, '|') != NULL ? strchr(at, '|') + 1 : NULL;
    snprintf(out, size, "%.*s", at != NULL ? (int)strcspn(at, "|") : 0, at != NULL ? at : "");
}

static inline int cli_number_error(const Option *option, const char *text) {
    return error_set("--%s %.100s: %s from %g to %g is expected", option->name, text,
                     option->type == OPTION_FLOAT ? "a number" : "a whole number", option->min, option->max);
}

// Stores one value given as text. Lists append.
static inline int cli_set(const Option *option, void *opts, const char *text) {
    char *field = (char *)opts + option->offset, *end;
    errno = 0;
    switch (option->type) {
    case OPTION_FLAG:
    case OPTION_INT:
    case OPTION_INT64: {
        long long value = strtoll(text, &end, 10);
        if (end == text || *end != '\0' || errno != 0 || (double)value < option->min || (double)value > option->max)
            return cli_number_error(option, text);
        if (option->type == OPTION_INT64)
            *(int64_t *)(void *)field = value;
        else
            *(int *)(void *)field = (int)value;
        return 0;
    }
    case OPTION_FLOAT: {
        double value = strtod(text, &end);
        if (end == text || *end != '\0' || !isfinite(value) || value < option->min || value > option->max)
            return cli_number_error(option, text);
        *(float *)(void *)field = (float)value;
        return 0;
    }
    case OPTION_CHOICE: {
        int index = cli_choice(option->choices, text);
        if (index < 0) return error_set("--%s %.100s: one of %s is expected", option->name, text, option->choices);
        *(int *)(void *)field = index;
        return 0;
    }
    case OPTION_TEXT:
        if (strlen(text) >= CLI_TEXT) return error_set("--%s: the text is over %d bytes", option->name, CLI_TEXT - 1);
        memcpy(field, text, strlen(text) + 1);
        return 0;
    case OPTION_LIST: {
        TextList *list = (TextList *)(void *)field;
        if (list->n == CLI_ITEMS) return error_set("--%s: over %d items", option->name, CLI_ITEMS);
        if (strlen(text) >= CLI_TEXT) return error_set("--%s: an item is over %d bytes", option->name, CLI_TEXT - 1);
        memcpy(list->item[list->n++], text, strlen(text) + 1);
        return 0;
    }
    }
    return error_set("--%s: unknown option type", option->name);
}

// Sets every option to its default. The table's defaults are ours: a bad one is a bug, and the tests look at each.
static inline int cli_defaults(const Option *table, int n, void *opts) {
    for (int i = 0; i < n; i++) {
        if (table[i].type == OPTION_LIST) {
            ((TextList *)(void *)((char *)opts + table[i].offset))->n = 0;
        } else if (cli_set(&table[i], opts, table[i].fallback)) {
            return -1;
        }
    }
    return 0;
}

// Levenshtein distance of two short words.
static inline int cli_distance(const char *a, const char *b) {
    int row[64], n = (int)strlen(b);
    if (n >= 64) return 64;
    for (int j = 0; j <= n; j++) row[j] = j;
    for (int i = 1; a[i - 1] != '\0'; i++) {
        int diagonal = row[0];
        row[0] = i;
        for (int j = 1; j <= n; j++) {
            int best = diagonal + (a[i - 1] != b[j - 1]);
            if (row[j] + 1 < best) best = row[j] + 1;
            if (row[j - 1] + 1 < best) best = row[j - 1] + 1;
            diagonal = row[j];
            row[j] = best;
        }
    }
    return row[n];
}

static inline int cli_unknown(const Option *table, int n, const char *word) {
    char name[64];
    const char *nearest = table[0].name;
    int best = 64;
    snprintf(name, sizeof name, "%.*s", (int)strcspn(word + strspn(word, "-"), "="), word + strspn(word, "-"));
    for (int i = 0; i < n; i++) {
        int distance = cli_distance(name, table[i].name);
        if (distance < best) best = distance, nearest = table[i].name;
    }
    return error_set("unknown option '%.60s'; the nearest is --%s (all of them: --help)", word, nearest);
}

// 1 if a word is written as one of the table's options.
static inline int cli_is_option(const Option *table, int n, const char *word) {
    for (int i = 0; i < n; i++)
        if ((table[i].flag[0] != '\0' && strcmp(word, table[i].flag) == 0) ||
            (strncmp(word, "--", 2) == 0 && strcmp(word + 2, table[i].name) == 0))
            return 1;
    return 0;
}

// 1 if the word after an option is its value: for texts anything that is not an option of the table, for the others
// what does not begin as one. A text that looks like an option is given as --name=text.
static inline int cli_is_value(const Option *table, int n, const Option *option, const char *word) {
    if (option->type == OPTION_TEXT) return !cli_is_option(table, n, word);
    return word[0] != '-' || word[1] == '.' || (word[1] >= '0' && word[1] <= '9');
}

// Reads the words into opts and notes in given[i] which options were there. 0 or -1.
static inline int cli_parse(const Option *table, int n, void *opts, unsigned char *given, int argc, char **argv) {
    for (int w = 1; w < argc; w++) {
        char name[64] = "";
        const char *word = argv[w], *value = NULL;
        int index = -1;
        if (word[0] != '-')
            return error_set("'%.100s' belongs to no option; a model is given with -m, data with -d", word);
        if (strncmp(word, "--", 2) == 0) {
            size_t length = strcspn(word + 2, "=");
            if (word[2 + length] == '=') value = word + 3 + length;
            snprintf(name, sizeof name, "%.*s", length < sizeof name ? (int)length : 63, word + 2);
        }
        for (int i = 0; i < n; i++)
            if (strcmp(table[i].name, name) == 0 || (table[i].flag[0] != '\0' && strcmp(table[i].flag, word) == 0))
                index = i;
        if (index < 0) return cli_unknown(table, n, word);
        const Option *option = &table[index];
        if (option->type == OPTION_FLAG) {
            if (value == NULL && w + 1 < argc && (strcmp(argv[w + 1], "0") == 0 || strcmp(argv[w + 1], "1") == 0))
                value = argv[++w];
            if (cli_set(option, opts, value != NULL ? value : "1")) return -1;
        } else if (option->type == OPTION_LIST) {
            TextList *list = (TextList *)(void *)((char *)opts + option->offset);
            if (!given[index]) list->n = 0;
            if (value != NULL && cli_set(option, opts, value)) return -1;
            int n_values = value != NULL;
            for (; w + 1 < argc && argv[w + 1][0] != '-'; n_values++)
                if (cli_set(option, opts, argv[++w])) return -1;
            if (n_values == 0) return error_set("--%s needs a value", option->name);
        } else {
            if (value == NULL && w + 1 < argc && cli_is_value(table, n, option, argv[w + 1])) value = argv[++w];
            if (value == NULL) return error_set("--%s needs a value", option->name);
            if (cli_set(option, opts, value)) return -1;
        }
        given[index] = 1;
    }
    return 0;
}

// The help text, a line or two an option.
static inline void cli_help(const Option *table, int n, FILE *out) {
    for (int i = 0; i < n; i++) {
        static const char *const kinds[] = {"", " N", " N", " X", " TEXT", " TEXT...", ""};
        char left[96];
        snprintf(left, sizeof left, "%s%s--%s%s%s", table[i].flag, table[i].flag[0] != '\0' ? " " : "   ",
                 table[i].name, kinds[table[i].type], table[i].type == OPTION_CHOICE ? " " : "");
        if (table[i].type == OPTION_CHOICE) strncat(left, table[i].choices, sizeof left - strlen(left) - 1);
        fprintf(out, "  %-*s %s%s", CLI_COLUMN, left, table[i].help, table[i].type == OPTION_FLAG ? "\n" : "");
        if (table[i].type == OPTION_FLAG) continue;
        fprintf(out, table[i].fallback[0] != '\0' ? " [%s]\n" : "\n", table[i].fallback);
    }
}

// Every setting as a JSON object; a new reference.
static inline json_t *cli_to_json(const Option *table, int n, const void *opts) {
    json_t *json = json_object();
    for (int i = 0; i < n; i++) {
        const char *field = (const char *)opts + table[i].offset;
        const TextList *list = (const TextList *)(const void *)field;
        json_t *value = NULL;
        char name[64];
        switch (table[i].type) {
        case OPTION_FLAG:
        case OPTION_INT: value = json_integer(*(const int *)(const void *)field); break;
        case OPTION_INT64: value = json_integer(*(const int64_t *)(const void *)field); break;
        case OPTION_FLOAT: value = json_from_float(*(const float *)(const void *)field); break;
        case OPTION_TEXT: value = json_string(field); break;
        case OPTION_CHOICE:
            cli_choice_name(name, sizeof name, table[i].choices, *(const int *)(const void *)field);
            value = json_string(name);
            break;
        case OPTION_LIST:
            value = json_array();
            for (int j = 0; j < list->n; j++) json_array_append_new(value, json_string(list->item[j]));
            break;
        }
        if (value == NULL) value = json_null(); // a path that is not UTF-8 cannot be told in JSON
        json_object_set_new(json, table[i].name, value);
    }
    return json;
}

// Takes every setting found in a JSON object, except those marked in given.
static inline int cli_from_json(const Option *table, int n, void *opts, const unsigned char *given,
                                const json_t *json) {
    for (int i = 0; i < n; i++) {
        const json_t *value = json_object_get(json, table[i].name), *item;
        char text[64];
        size_t j;
        if (value == NULL || json_is_null(value) || given[i]) continue;
        if (json_is_array(value) && table[i].type == OPTION_LIST) {
            ((TextList *)(void *)((char *)opts + table[i].offset))->n = 0;
            json_array_foreach(value, j, item) {
                if (!json_is_string(item) || cli_set(&table[i], opts, json_string_value(item)))
                    return error_set("saved setting %s is not a list of texts", table[i].name);
            }
            continue;
        }
        if (json_is_integer(value)) snprintf(text, sizeof text, "%lld", (long long)json_integer_value(value));
        if (json_is_real(value)) snprintf(text, sizeof text, "%.17g", json_real_value(value));
        if (!json_is_number(value) && !json_is_string(value))
            return error_set("saved setting %s has the wrong type", table[i].name);
        if (cli_set(&table[i], opts, json_is_string(value) ? json_string_value(value) : text)) return -1;
    }
    return 0;
}

#endif
