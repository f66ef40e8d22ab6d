// The numbers of the channels between the processes of a mesh: what a message is, from which role to which. A role is a
// cell's number, replica * stages + stage; behind the last cell there is the anchor's.
//
//   bits 63-56  kind
//   bits 55-40  role it comes from
//   bits 39-24  role it goes to
//   bits 23-0   tag, what a kind makes of it
#ifndef LLMC_CHANNEL_H
#define LLMC_CHANNEL_H

#include <stdint.h> // fixed-width integers

typedef enum {
    CHANNEL_CONTROL,  // JSON, to and from the coordinator
    CHANNEL_FORWARD,  // a boundary's states
    CHANNEL_BACKWARD, // and their gradients
    CHANNEL_SHARE,    // a replica's share of an average, to its owner
    CHANNEL_MEAN,     // the average, back
    CHANNEL_CHECK,    // a boundary's states in a validation
    CHANNEL_SNAPSHOT, // weights for the anchor
    CHANNEL_FACTORS,  // what the anchor has learned
    CHANNEL_STATE,    // a cell's shard
    CHANNEL_DATA,     // the data sets
    CHANNEL_KINDS
} ChannelKind;

enum { CHANNEL_ROLES = 1 << 16, CHANNEL_TAGS = 1 << 24 };

typedef struct {
    ChannelKind kind;
    int from, to, tag;
} Channel;

static inline uint64_t channel_number(ChannelKind kind, int from, int to, int tag) {
    return (uint64_t)kind << 56 | (uint64_t)(from & 0xFFFF) << 40 | (uint64_t)(to & 0xFFFF) << 24 |
           (uint64_t)(tag & 0xFFFFFF);
}

// The parts of a number that came from outside; kind may be any byte.
static inline Channel channel_parts(uint64_t number) {
    Channel channel = {(ChannelKind)(number >> 56), (int)(number >> 40 & 0xFFFF), (int)(number >> 24 & 0xFFFF),
                       (int)(number & 0xFFFFFF)};
    return channel;
}

#endif
