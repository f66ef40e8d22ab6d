// The Link between two cells: an ordered byte channel. It copies bytes, never pointers: cells that share a process see
// of each other what they would see over a network. Counts what is sent. For one thread.
//
// Where the receiver is in another process, the sender's end has a carrier, which takes its messages there; the
// receiver's end is a link too, into which its process puts what has come.
//
//   Link link;  memset(&link, 0, sizeof link);     // zeroed memory is an open, empty link
//   link_send(&link, data, n_bytes, arrival);
//   if (link_recv(&link, buf, cap, &n_bytes, &arrival) == LINK_OK) ...
//   link_free(&link);
//
//          link_close              last message received
//   OPEN -------------> CLOSING --------------------------> DOWN
//   send, recv          recv: OK while messages are inside  recv: LINK_DOWN
//   recv empty: AGAIN   send: -1                            send: -1
//
// The messages lie in one ring of bytes, each behind a LinkHeader; either may wrap around the ring's end. A full ring
// is replaced by one of at least twice the size, and stays: once warm, nothing is allocated.
#ifndef LLMC_LINK_H
#define LLMC_LINK_H

#include <stdint.h> // fixed-width integers
#include <stdlib.h> // malloc, free
#include <string.h> // memcpy, memset

#include "error.h" // error_set

typedef enum { LINK_OK, LINK_AGAIN, LINK_DOWN } LinkStatus;

typedef struct {
    int64_t n_bytes;
    double arrival; // seconds of simulated time (clock.h)
} LinkHeader;

// Takes messages out of the process. send: copies n_bytes of data, 0 or -1.
typedef struct {
    int (*send)(void *context, uint64_t channel, const void *data, int64_t n_bytes);
    void *context;
} LinkCarrier;

typedef struct {
    char *ring;
    int64_t ring_bytes;
    int64_t first, used_bytes;         // the oldest byte's place; bytes inside, headers too
    int64_t waiting;                   // messages inside
    int64_t sent_bytes, sent_messages; // since the start; headers are no part of what a network would carry
    int closed;
    const LinkCarrier *carrier; // NULL: both ends are in this process
    uint64_t channel;           // by which the carrier knows the link (channel.h)
} Link;

// Copies n_bytes out of the ring from `offset` bytes behind its oldest one.
static inline void link_peek(const Link *link, int64_t offset, void *to, int64_t n_bytes) {
    int64_t at = (link->first + offset) % link->ring_bytes, straight = link->ring_bytes - at;
    if (straight > n_bytes) straight = n_bytes;
    memcpy(to, link->ring + at, (size_t)straight);
    memcpy((char *)to + straight, link->ring, (size_t)(n_bytes - straight));
}

// Appends n_bytes, for which there is room.
static inline void link_append(Link *link, const void *from, int64_t n_bytes) {
    int64_t at = (link->first + link->used_bytes) % link->ring_bytes, straight = link->ring_bytes - at;
    if (straight > n_bytes) straight = n_bytes;
    memcpy(link->ring + at, from, (size_t)straight);
    memcpy(link->ring, (const char *)from + straight, (size_t)(n_bytes - straight));
    link->used_bytes += n_bytes;
}

// Makes the ring at least n_bytes long. Returns 0 or -1.
static inline int link_grow(Link *link, int64_t n_bytes) {
    if (n_bytes < 2 * link->ring_bytes) n_bytes = 2 * link->ring_bytes;
    char *ring = (char *)malloc((size_t)n_bytes);
    if (ring == NULL) return error_set("link: out of memory: %lld bytes of messages", (long long)n_bytes);
    if (link->used_bytes > 0) link_peek(link, 0, ring, link->used_bytes);
    free(link->ring);
    link->ring = ring;
    link->ring_bytes = n_bytes;
    link->first = 0;
    return 0;
}

// Sends a copy of n_bytes >= 0 of data, which arrive at `arrival`. Returns 0, or -1: closed, or no memory (nothing is
// sent then).
static inline int link_send(Link *link, const void *data, int64_t n_bytes, double arrival) {
    LinkHeader header = {n_bytes, arrival};
    int64_t needed = link->used_bytes + (int64_t)sizeof header + n_bytes;
    if (link->closed) return error_set("link: send: the link is closed");
    if (link->carrier != NULL) {
        if (link->carrier->send(link->carrier->context, link->channel, data, n_bytes)) return -1;
        link->sent_bytes += n_bytes;
        link->sent_messages++;
        return 0;
    }
    if (needed > link->ring_bytes && link_grow(link, needed)) return -1;
    link_append(link, &header, (int64_t)sizeof header);
    if (n_bytes > 0) link_append(link, data, n_bytes);
    link->waiting++;
    link->sent_bytes += n_bytes;
    link->sent_messages++;
    return 0;
}

// Copies the oldest message into buf (cap bytes), its size into *n_bytes, the time it arrives into *arrival, and takes
// it off the link. LINK_AGAIN: there is none yet. LINK_DOWN, error_message says which: closed and empty, so none will
// come; or the message is larger than cap, in which case it stays.
static inline LinkStatus link_recv(Link *link, void *buf, int64_t cap, int64_t *n_bytes, double *arrival) {
    LinkHeader header;
    if (link->waiting == 0) {
        if (!link->closed) return LINK_AGAIN;
        error_set("link: receive: the other end has closed the link");
        return LINK_DOWN;
    }
    link_peek(link, 0, &header, (int64_t)sizeof header);
    if (header.n_bytes > cap) {
        error_set("link: receive: the message has %lld bytes, the buffer %lld", (long long)header.n_bytes,
                  (long long)cap);
        return LINK_DOWN;
    }
    if (header.n_bytes > 0) link_peek(link, (int64_t)sizeof header, buf, header.n_bytes);
    *n_bytes = header.n_bytes;
    *arrival = header.arrival;
    int64_t taken = (int64_t)sizeof header + header.n_bytes;
    link->first = (link->first + taken) % link->ring_bytes;
    link->used_bytes -= taken;
    link->waiting--;
    return LINK_OK;
}

// Messages inside.
static inline int64_t link_waiting(const Link *link) {
    return link->waiting;
}

// Throws away what is inside.
static inline void link_empty(Link *link) {
    link->first = link->used_bytes = link->waiting = 0;
}

// No more sends; what is inside can still be received.
static inline void link_close(Link *link) {
    link->closed = 1;
}

// Gives the memory back, messages included; the link is open and new again, its counters 0.
static inline void link_free(Link *link) {
    free(link->ring);
    memset(link, 0, sizeof *link);
}

#endif
