// A growing message of parts, and a reader of one that does not trust its bytes.
//
//   Packer packer = {NULL, 0, 0, 0};
//   pack(&packer, &step, sizeof step);  float *room = (float *)pack_room(&packer, 4 * n);  ...
//   if (packer.failed) ...                         once, at the end
//   Unpacker unpacker = {bytes, n_bytes, 0};
//   const void *step = unpack(&unpacker, sizeof(int64_t));  if (step == NULL) return -1;
#ifndef LLMC_PACKER_H
#define LLMC_PACKER_H

#include <stdint.h> // fixed-width integers
#include <stdlib.h> // realloc, free
#include <string.h> // memcpy

#include "error.h"

typedef struct {
    unsigned char *bytes;
    int64_t n, room;
    int failed; // no memory; nothing is added any more
} Packer;

// Room for n_bytes more at the end; NULL: no memory. Valid until the next part.
static inline void *pack_room(Packer *packer, int64_t n_bytes) {
    if (packer->failed) return NULL;
    if (packer->n + n_bytes > packer->room) {
        int64_t room = packer->n + n_bytes > 2 * packer->room ? packer->n + n_bytes : 2 * packer->room;
        unsigned char *bytes = (unsigned char *)realloc(packer->bytes, (size_t)room);
        if (bytes == NULL) {
            packer->failed = 1;
            error_set("out of memory for a message of %lld bytes", (long long)room);
            return NULL;
        }
        packer->bytes = bytes, packer->room = room;
    }
    packer->n += n_bytes;
    return packer->bytes + packer->n - n_bytes;
}

static inline void pack(Packer *packer, const void *from, int64_t n_bytes) {
    void *to = pack_room(packer, n_bytes);
    if (to != NULL && n_bytes > 0) memcpy(to, from, (size_t)n_bytes);
}

static inline void packer_free(Packer *packer) {
    free(packer->bytes);
    memset(packer, 0, sizeof *packer);
}

typedef struct {
    const unsigned char *bytes;
    int64_t n, at;
} Unpacker;

// The next n_bytes, at no particular alignment; NULL with a message: there are not as many.
static inline const void *unpack(Unpacker *unpacker, int64_t n_bytes) {
    if (n_bytes < 0 || n_bytes > unpacker->n - unpacker->at) {
        error_set("a message of %lld bytes ends before its part of %lld", (long long)unpacker->n, (long long)n_bytes);
        return NULL;
    }
    unpacker->at += n_bytes;
    return unpacker->bytes + unpacker->at - n_bytes;
}

// Copies the next n_bytes to `to`. 0 or -1.
static inline int unpack_to(Unpacker *unpacker, void *to, int64_t n_bytes) {
    const void *from = unpack(unpacker, n_bytes);
    if (from == NULL) return -1;
    if (n_bytes > 0) memcpy(to, from, (size_t)n_bytes);
    return 0;
}

#endif
