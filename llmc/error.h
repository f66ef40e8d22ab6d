// One error message per thread. A function that can fail returns 0 or -1 and leaves a line here;
// its caller adds nothing, returns -1 in turn, and main prints the line after "train: ".
//
//   if (file == NULL) return error_set("%s: open: %s", path, strerror(errno));
#ifndef LLMC_ERROR_H
#define LLMC_ERROR_H

#include <stdarg.h> // va_list
#include <stdio.h>  // vsnprintf

#define ERROR_MAX 1024

static __thread char error_message[ERROR_MAX];

// Stores the printf-style message for this thread and returns -1, so that it can be returned directly.
__attribute__((format(printf, 1, 2))) static inline int error_set(const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(error_message, sizeof error_message, format, args);
    va_end(args);
    for (unsigned char *c = (unsigned char *)error_message; *c != '\0'; c++)
        if (*c < 0x20 || *c == 0x7F) *c = '?'; // names from files must not steer a terminal or break the line
    return -1;
}

#endif
