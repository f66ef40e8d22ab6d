// Windows of T rows that hold several whole documents. A row is an input and its target one token later, so a document
// of n tokens takes n-1 rows and none of its tokens is a target of its neighbour.
//
// Documents go in their order, each into the first window that has room of PACKING_OPEN that are kept open; with none,
// the fullest of them is closed for a new one (bounded first fit). The result depends on the lengths and T alone.
#ifndef LLMC_PACKING_H
#define LLMC_PACKING_H

#include <stdint.h> // fixed-width integers
#include <stdlib.h> // malloc
#include <string.h> // memset

#include "error.h"

#define PACKING_OPEN 32

// Inputs at, at+1 .. at+rows-1 of a stream, whose targets lie one further.
typedef struct {
    int64_t at;
    int32_t rows;
} Segment;

typedef struct {
    Segment *segments;  // window by window
    int64_t *firsts;    // (n_windows + 1) the first segment of each; NULL: nothing is packed
    int64_t n_windows;  // at least one segment in each
    int64_t n_rows;     // of all segments
    int64_t n_segments; // in all windows
} Packing;

static inline void packing_free(Packing *packing) {
    free(packing->segments);
    free(packing->firsts);
    memset(packing, 0, sizeof *packing);
}

// Windows that still have room.
typedef struct {
    int64_t window[PACKING_OPEN];
    int left[PACKING_OPEN]; // rows
    int n;
} PackingBins;

// The window for so many rows, which is *n_windows if it is a new one.
static inline int64_t packing_place(PackingBins *bins, int rows, int T, int64_t *n_windows) {
    int at = 0, fullest = 0;
    while (at < bins->n && bins->left[at] < rows) at++;
    if (at == bins->n && bins->n < PACKING_OPEN) {
        bins->n++;
    } else if (at == bins->n) {
        for (int i = 1; i < bins->n; i++)
            if (bins->left[i] < bins->left[fullest]) fullest = i;
        for (int i = fullest; i + 1 < bins->n; i++) // the others keep their order
            bins->window[i] = bins->window[i + 1], bins->left[i] = bins->left[i + 1];
        at = bins->n - 1;
    } else {
        bins->left[at] -= rows;
        return bins->window[at];
    }
    bins->window[at] = (*n_windows)++, bins->left[at] = T - rows;
    return bins->window[at];
}

// Packs n pieces of 1 .. T rows. 0, or -1 when out of memory.
static inline int packing_make(Packing *packing, const Segment *pieces, int64_t n, int T) {
    PackingBins bins;
    int64_t n_windows = 0;
    memset(packing, 0, sizeof *packing);
    bins.n = 0;
    int64_t *home = (int64_t *)malloc(sizeof(int64_t) * (size_t)(n + 1));
    packing->segments = (Segment *)malloc(sizeof(Segment) * (size_t)(n + 1));
    if (home == NULL || packing->segments == NULL) {
        free(home);
        packing_free(packing);
        return error_set("out of memory for packing");
    }
    for (int64_t i = 0; i < n; i++) home[i] = packing_place(&bins, pieces[i].rows, T, &n_windows);
    packing->firsts = (int64_t *)calloc((size_t)n_windows + 2, sizeof(int64_t));
    if (packing->firsts == NULL) {
        free(home);
        packing_free(packing);
        return error_set("out of memory for packing");
    }
    // counted, summed up, placed: firsts[w + 1] moves from the first to the last segment of window w
    int64_t *next = packing->firsts + 1;
    for (int64_t i = 0; i < n; i++) next[home[i] + 1]++, packing->n_rows += pieces[i].rows;
    for (int64_t w = 0; w < n_windows; w++) next[w + 1] += next[w];
    for (int64_t i = 0; i < n; i++) packing->segments[next[home[i]]++] = pieces[i];
    packing->n_windows = n_windows, packing->n_segments = n;
    free(home);
    return 0;
}

#endif
