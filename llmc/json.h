// What jansson leaves out: checked sizes in, short floats out.
#ifndef LLMC_JSON_H
#define LLMC_JSON_H

#include <jansson.h> // json_t
#include <stdint.h>  // int64_t
#include <stdio.h>   // snprintf
#include <stdlib.h>  // strtof

// A non-negative JSON integer, or -1 for anything else.
static inline int64_t json_size(const json_t *value) {
    if (!json_is_integer(value)) return -1;
    json_int_t number = json_integer_value(value);
    return number < 0 ? -1 : (int64_t)number;
}

// A JSON number with the fewest digits that give this float again: 1e-05, not 9.99999975e-06. Dump it with
// JSON_FLOAT_DIGITS.
static inline json_t *json_from_float(float value) {
    char text[32];
    for (int digits = 6; digits <= 9; digits++) {
        snprintf(text, sizeof text, "%.*g", digits, (double)value);
        if (strtof(text, NULL) == value) break;
    }
    return json_real(strtod(text, NULL));
}

#define JSON_FLOAT_DIGITS JSON_REAL_PRECISION(9)

#endif
