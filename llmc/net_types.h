// What callers of net.h see: keys, limits, events, status. The same with ZeroMQ and without.
#ifndef LLMC_NET_TYPES_H
#define LLMC_NET_TYPES_H

#include <limits.h> // PATH_MAX
#include <stdint.h> // fixed-width integers

#include "frame.h" // NET_NOBODY

enum {
    NET_KEY = 41 /* a key in Z85 with its end, as ZeroMQ writes it */,
    NET_ENDPOINT = 288 /* tcp://HOST:PORT with its end */,
    NET_TEXT = 256,
    NET_TOKEN = NET_ENDPOINT + 160
};

typedef struct Net Net;

// The coordinator's keys, and the run's: who has the secret half of the latter may join.
typedef struct {
    char server_public[NET_KEY], server_secret[NET_KEY], run_public[NET_KEY], run_secret[NET_KEY];
} NetKeys;

// What a joiner is given.
typedef struct {
    char endpoint[NET_ENDPOINT];
    char server_public[NET_KEY], run_public[NET_KEY], run_secret[NET_KEY];
} NetToken;

// What is taken from others, at most. A field of 0 takes the default.
typedef struct {
    int64_t control_bytes; // a control message, 1 MiB
    int64_t bulk_bytes;    // a bulk message, 256 MiB
    int64_t inbox_bytes;   // of messages that nobody has taken by net_next; then bulk waits at its senders: 1 GiB
    double beat;           // seconds between beats, 1: how soon silence is noticed. Waiting times are multiples of it
} NetLimits;

typedef enum {
    NET_MESSAGE = 1, // data (n_bytes), channel, generation, control; the caller frees data
    NET_FILE,        // the file of net_expect_file is whole; text = its path
    NET_FILE_SENT,   // the file of net_send_file has arrived; text = its path
    NET_FILE_FAILED, // it cannot be read or written: text says why. The transfer is over
    NET_HELLO,    // coordinator: somebody asks to join; from = handle for net_admit or net_refuse, text = the address
                  // as seen, port = where it listens (0: cannot be dialled), public_key = of its connections to peers
    NET_ADMITTED, // joiner: from = the id that it has now
    NET_REFUSED,  // joiner: the coordinator does not want it; text = why
    NET_UNKNOWN,  // joiner: the coordinator does not know it (any more). Nodes, streams and what was queued are
                  // forgotten; net_hello() asks anew
    NET_INTRUDER  // a connection or a frame was turned away; text = where from and why. One a second, the others
                  // counted
} NetEventKind;

typedef struct {
    int kind;                 // NetEventKind
    uint32_t from;            // the node, NET_NOBODY if it is none
    uint32_t generation;      // of the sender when it called net_send
    uint64_t channel;         // as the sender said
    int control;              // came with the control messages
    unsigned char *data;      // from malloc, NULL if n_bytes is 0
    int64_t n_bytes;          // also of a file
    int port;                 // NET_HELLO
    char public_key[NET_KEY]; // NET_HELLO, Z85
    char text[NET_TEXT];
} NetEvent;

typedef enum { NET_ROUTE_NONE, NET_ROUTE_DIRECT, NET_ROUTE_RELAY } NetRoute;

// Times in seconds. Bytes since the node is known.
typedef struct {
    double silence;                   // since anything was heard of it
    double deafness;                  // since we sent the last beat that it is known to have heard
    uint64_t progress;                // what it said last by net_progress
    double progress_age;              // since that has changed
    double moved_age;                 // since a message went on in either direction
    double round_trip;                // smoothed, of bulk frames if there were any, else of control's
    double up_rate, down_rate;        // bytes/s on the wire, mean of some seconds
    int64_t payload_up, payload_down; // bytes of messages, each once
    int64_t wire_up, wire_down;       // frames with headers, also those that were sent again
    int64_t relayed_up, relayed_down; // part of wire_*: through the coordinator. There: what it forwarded
    int64_t resent;                   // part of wire_up: frames sent again
    int64_t dropped;                  // coordinator: bytes for this node that found its pipe full
    int64_t unacknowledged, queued;   // bytes on their way; bytes given to net_send and not yet acknowledged
    int route;                        // NetRoute
    char address[NET_TEXT];
} NetStatus;

// What has gone to all nodes and come from them since the start. Bytes of messages, each once; of frames with their
// headers, also of those that were sent again or passed on; frames. Below it each frame has 42 bytes of CURVE and
// ZeroMQ (35 if it is shorter than 216), and what TCP and IP take.
typedef struct {
    int64_t payload_up, payload_down, wire_up, wire_down, frames_up, frames_down;
    int64_t relayed; // part of wire_*: through the coordinator; there what it forwarded, as it came and as it went
    double up_rate, down_rate; // bytes/s
    int n_direct, n_relayed;   // nodes that are reached on a way of their own, and through the coordinator
} NetTotals;

#endif
