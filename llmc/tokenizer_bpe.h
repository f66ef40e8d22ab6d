// Byte-pair encoding of a piece of text: its symbols are joined pair by pair, always the pair whose rank is lowest, the
// leftmost of several, until none is in the table of merges.
//
//   Bpe bpe;
//   if (bpe_alloc(&bpe, n_ids, pool_bytes, n_merges)) ...
//   bpe_name(&bpe, id, bytes, n, 1);  bpe_add_merge(&bpe, left, right, made, rank);  bpe_finish(&bpe, 0, &work);
//   int64_t n_ids = bpe_encode(&bpe, &work, ids, text, n);
//
// Symbols are bytes (GPT-2's byte-level BPE) or characters with bytes for those without an id (SentencePiece). A pair
// of short pieces is found by looking at all; long ones have a list and a heap, n log n. Both give the same.
#ifndef LLMC_TOKENIZER_BPE_H
#define LLMC_TOKENIZER_BPE_H

#include <stdint.h> // fixed-width integers
#include <stdlib.h> // malloc
#include <string.h> // memcmp

#include "error.h"
#include "unicode.h"

#define BPE_NONE 0xFFFFFFFFu

enum { BPE_SHORT = 48 }; // symbols of a piece that all pairs of are looked at

typedef struct {
    const char *bytes; // what it decodes to; NULL: no such id
    uint32_t n_bytes;
    unsigned char is_special; // a mark: decodes to nothing
    unsigned char is_whole;   // a piece with just these bytes is this id
} BpeToken;

typedef struct {
    uint32_t left, right, rank, made; // rank BPE_NONE: an empty place
} BpeMerge;

typedef struct {
    int n_ids, by_character;
    BpeToken *tokens; // (n_ids)
    char *pool;       // their bytes
    size_t pool_used, pool_bytes;
    uint32_t *places; // (place_mask + 1) ids by the hash of their bytes, BPE_NONE: empty
    uint32_t place_mask, merge_mask;
    BpeMerge *merges;       // (merge_mask + 1) by the hash of their pair
    uint32_t byte_ids[256]; // BPE_NONE: a byte has none, and is left out
} Bpe;

// Scratch of one thread, grown as needed; zeros at first.
typedef struct {
    int64_t room;
    int32_t *before, *after; // (room) the neighbours of a symbol
    uint64_t *heap;          // (3 * room) rank << 32 | position
    int64_t n_heap;
} BpeWork;

static inline void bpe_work_free(BpeWork *work) {
    free(work->before);
    free(work->after);
    free(work->heap);
    memset(work, 0, sizeof *work);
}

static inline void bpe_free(Bpe *bpe) {
    free(bpe->tokens);
    free(bpe->pool);
    free(bpe->places);
    free(bpe->merges);
    memset(bpe, 0, sizeof *bpe);
}

// The power of two that leaves half of the places empty.
static inline uint32_t bpe_places(int64_t n) {
    uint32_t places = 16;
    while (places < 2 * (uint64_t)n && places < 1u << 30) places *= 2;
    return places;
}

// Room for ids below n_ids whose spellings have pool_bytes in all, and for merges. 0, or -1: out of memory, or more of
// either than a tokenizer has.
static inline int bpe_alloc(Bpe *bpe, int n_ids, size_t pool_bytes, size_t n_merges) {
    memset(bpe, 0, sizeof *bpe);
    if (n_ids > 1 << 24 || n_merges > 1 << 24 || pool_bytes > (size_t)1 << 31)
        return error_set("the tokenizer has %d ids, %zu merges and %zu bytes of spellings, more than is read", n_ids,
                         n_merges, pool_bytes);
    uint32_t places = bpe_places(n_ids), merges = bpe_places((int64_t)n_merges);
    bpe->n_ids = n_ids, bpe->pool_bytes = pool_bytes;
    bpe->place_mask = places - 1, bpe->merge_mask = merges - 1;
    bpe->tokens = (BpeToken *)calloc((size_t)n_ids + 1, sizeof *bpe->tokens);
    bpe->pool = (char *)malloc(pool_bytes + 1);
    bpe->places = (uint32_t *)malloc(sizeof *bpe->places * places);
    bpe->merges = (BpeMerge *)malloc(sizeof *bpe->merges * merges);
    if (bpe->tokens == NULL || bpe->pool == NULL || bpe->places == NULL || bpe->merges == NULL) {
        bpe_free(bpe);
        return error_set("out of memory for the tokenizer");
    }
    memset(bpe->places, 0xFF, sizeof *bpe->places * places);
    memset(bpe->merges, 0xFF, sizeof *bpe->merges * merges);
    memset(bpe->byte_ids, 0xFF, sizeof bpe->byte_ids);
    return 0;
}

static inline uint64_t bpe_mix(uint64_t x) {
    x = (x ^ x >> 32) * 0x9E3779B97F4A7C15ull;
    return x ^ x >> 29;
}

static inline uint64_t bpe_hash(const char *bytes, size_t n) {
    uint64_t hash = n, word;
    for (; n >= 8; bytes += 8, n -= 8) {
        memcpy(&word, bytes, 8);
        hash = bpe_mix(hash ^ word);
    }
    word = 0;
    memcpy(&word, bytes, n);
    return bpe_mix(hash ^ word);
}

// The id with these bytes, BPE_NONE if there is none.
static inline uint32_t bpe_find(const Bpe *bpe, const char *bytes, size_t n) {
    for (uint32_t at = (uint32_t)bpe_hash(bytes, n) & bpe->place_mask;; at = (at + 1) & bpe->place_mask) {
        uint32_t id = bpe->places[at];
        if (id == BPE_NONE) return BPE_NONE;
        if (bpe->tokens[id].n_bytes == n && memcmp(bpe->tokens[id].bytes, bytes, n) == 0) return id;
    }
}

// Names an id by its bytes (n); found: bpe_find finds it by them, unless another has them already. The pool must have
// room, and the id be new.
static inline void bpe_name(Bpe *bpe, uint32_t id, const char *bytes, size_t n, int found) {
    BpeToken *token = &bpe->tokens[id];
    memcpy(bpe->pool + bpe->pool_used, bytes, n);
    token->bytes = bpe->pool + bpe->pool_used, token->n_bytes = (uint32_t)n;
    bpe->pool_used += n;
    if (!found || bpe_find(bpe, bytes, n) != BPE_NONE) return;
    uint32_t at = (uint32_t)bpe_hash(bytes, n) & bpe->place_mask;
    while (bpe->places[at] != BPE_NONE) at = (at + 1) & bpe->place_mask;
    bpe->places[at] = id;
}

// The merge of a pair; its rank is BPE_NONE if they do not merge.
static inline BpeMerge *bpe_merge_of(const Bpe *bpe, uint32_t left, uint32_t right) {
    uint32_t at = (uint32_t)bpe_mix((uint64_t)left << 32 | right) & bpe->merge_mask;
    BpeMerge *merge = &bpe->merges[at];
    while (merge->rank != BPE_NONE && (merge->left != left || merge->right != right)) {
        at = (at + 1) & bpe->merge_mask;
        merge = &bpe->merges[at];
    }
    return merge;
}

// Of a pair that comes twice the last rank holds.
static inline void bpe_add_merge(Bpe *bpe, uint32_t left, uint32_t right, uint32_t made, uint32_t rank) {
    BpeMerge *merge = bpe_merge_of(bpe, left, right);
    merge->left = left, merge->right = right, merge->made = made, merge->rank = rank;
}

// Joins the symbols ids (n, at most BPE_SHORT); returns how many are left.
static inline int64_t bpe_merge_short(const Bpe *bpe, uint32_t *ids, int64_t n) {
    uint32_t rank[BPE_SHORT], made[BPE_SHORT];
    for (int64_t i = 0; i + 1 < n; i++) {
        const BpeMerge *merge = bpe_merge_of(bpe, ids[i], ids[i + 1]);
        rank[i] = merge->rank, made[i] = merge->made;
    }
    while (n > 1) {
        int64_t best = 0;
        for (int64_t i = 1; i + 1 < n; i++)
            if (rank[i] < rank[best]) best = i;
        if (rank[best] == BPE_NONE) break;
        ids[best] = made[best];
        n--;
        for (int64_t i = best + 1; i < n; i++) ids[i] = ids[i + 1], rank[i - 1] = rank[i], made[i - 1] = made[i];
        for (int64_t i = best > 0 ? best - 1 : 0; i <= best && i + 1 < n; i++) {
            const BpeMerge *merge = bpe_merge_of(bpe, ids[i], ids[i + 1]);
            rank[i] = merge->rank, made[i] = merge->made;
        }
    }
    return n;
}

static inline void bpe_heap_push(BpeWork *work, uint64_t value) {
    int64_t at = work->n_heap++;
    for (; at > 0 && work->heap[(at - 1) / 2] > value; at = (at - 1) / 2) work->heap[at] = work->heap[(at - 1) / 2];
    work->heap[at] = value;
}

static inline uint64_t bpe_heap_pop(BpeWork *work) {
    uint64_t *heap = work->heap, top = heap[0], last = heap[--work->n_heap];
    int64_t at = 0;
    for (;;) {
        int64_t child = 2 * at + 1;
        if (child + 1 < work->n_heap && heap[child + 1] < heap[child]) child++;
        if (child >= work->n_heap || heap[child] >= last) break;
        heap[at] = heap[child];
        at = child;
    }
    heap[at] = last;
    return top;
}

static inline void bpe_heap_pair(const Bpe *bpe, BpeWork *work, const uint32_t *ids, int32_t at) {
    if (at < 0 || work->after[at] < 0) return;
    uint32_t rank = bpe_merge_of(bpe, ids[at], ids[work->after[at]])->rank;
    if (rank != BPE_NONE) bpe_heap_push(work, (uint64_t)rank << 32 | (uint32_t)at);
}

static inline int bpe_work_grow(BpeWork *work, int64_t n) {
    if (n <= work->room) return 0;
    bpe_work_free(work);
    work->before = (int32_t *)malloc(sizeof(int32_t) * (size_t)n);
    work->after = (int32_t *)malloc(sizeof(int32_t) * (size_t)n);
    work->heap = (uint64_t *)malloc(sizeof(uint64_t) * 3 * (size_t)n);
    if (work->before == NULL || work->after == NULL || work->heap == NULL) {
        bpe_work_free(work);
        return error_set("out of memory for a text of %lld symbols", (long long)n);
    }
    work->room = n;
    return 0;
}

// The same for any n below 2^31; -1 if out of memory. What is in the heap holds if its pair still has that rank: ranks
// name pairs.
static inline int64_t bpe_merge_long(const Bpe *bpe, BpeWork *work, uint32_t *ids, int64_t n) {
    if (n > INT32_MAX) return error_set("a text of %lld symbols without a break is too long", (long long)n);
    if (bpe_work_grow(work, n)) return -1;
    int32_t last = (int32_t)n - 1, kept = 0;
    work->n_heap = 0;
    for (int32_t i = 0; i <= last; i++) work->before[i] = i - 1, work->after[i] = i < last ? i + 1 : -1;
    for (int32_t i = 0; i < last; i++) bpe_heap_pair(bpe, work, ids, i);
    while (work->n_heap > 0) {
        uint64_t top = bpe_heap_pop(work);
        int32_t at = (int32_t)(uint32_t)top, next = work->after[at];
        if (ids[at] == BPE_NONE || next < 0) continue;
        const BpeMerge *merge = bpe_merge_of(bpe, ids[at], ids[next]);
        if (merge->rank != (uint32_t)(top >> 32)) continue;
        ids[at] = merge->made, ids[next] = BPE_NONE;
        work->after[at] = work->after[next];
        if (work->after[at] >= 0) work->before[work->after[at]] = at;
        bpe_heap_pair(bpe, work, ids, at);
        bpe_heap_pair(bpe, work, ids, work->before[at]);
    }
    for (int32_t i = 0; i <= last; i++)
        if (ids[i] != BPE_NONE) ids[kept++] = ids[i];
    return kept;
}

// ids (n) of a text before anything is joined, none for bytes that have none; returns how many.
static inline int64_t bpe_symbols(const Bpe *bpe, uint32_t *ids, const char *text, int64_t n) {
    int64_t n_ids = 0;
    for (int64_t i = 0; i < n;) {
        int length = 1;
        if (bpe->by_character) utf8_get(text + i, &length);
        uint32_t id = bpe->by_character ? bpe_find(bpe, text + i, (size_t)length) : BPE_NONE;
        if (id != BPE_NONE) ids[n_ids++] = id;
        for (int b = 0; b < length && id == BPE_NONE; b++) {
            ids[n_ids] = bpe->byte_ids[(unsigned char)text[i + b]];
            n_ids += ids[n_ids] != BPE_NONE;
        }
        i += length;
    }
    return n_ids;
}

static inline int64_t bpe_encode_parts(const Bpe *bpe, BpeWork *work, uint32_t *ids, const char *text, int64_t n) {
    n = bpe_symbols(bpe, ids, text, n);
    return n <= BPE_SHORT ? bpe_merge_short(bpe, ids, n) : bpe_merge_long(bpe, work, ids, n);
}

// ids (n) of a piece, n > 0 bytes of valid UTF-8 if symbols are characters. Returns how many, -1 if out of memory.
static inline int64_t bpe_encode(const Bpe *bpe, BpeWork *work, uint32_t *ids, const char *text, int64_t n) {
    uint32_t id = bpe_find(bpe, text, (size_t)n);
    if (id != BPE_NONE && bpe->tokens[id].is_whole) {
        ids[0] = id;
        return 1;
    }
    return bpe_encode_parts(bpe, work, ids, text, n);
}

// Finds out which ids a piece of their spelling becomes: all that are found if whole pieces are looked up before any
// merge (ignore_merges), else those that the merges lead to. -1: out of memory.
static inline int bpe_finish(Bpe *bpe, int ignore_merges, BpeWork *work) {
    uint32_t longest = 0;
    for (int id = 0; id < bpe->n_ids; id++)
        if (bpe->tokens[id].n_bytes > longest) longest = bpe->tokens[id].n_bytes;
    uint32_t *ids = (uint32_t *)malloc(sizeof(uint32_t) * ((size_t)longest + 1));
    if (ids == NULL) return error_set("out of memory for the tokenizer");
    int64_t n = 0;
    for (uint32_t at = 0; at <= bpe->place_mask && n >= 0; at++) {
        if (bpe->places[at] == BPE_NONE) continue;
        BpeToken *token = &bpe->tokens[bpe->places[at]];
        n = ignore_merges ? 1 : bpe_encode_parts(bpe, work, ids, token->bytes, token->n_bytes);
        token->is_whole = (unsigned char)(n == 1 && (ignore_merges || ids[0] == bpe->places[at]));
    }
    free(ids);
    return n < 0 ? -1 : 0;
}

#endif
