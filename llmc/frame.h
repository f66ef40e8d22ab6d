// One frame on the wire between two nodes of a mesh: a header and at most 256 KiB of a message. No sockets in here.
//
//   frame_write(out, &frame, piece);                 out (FRAME_HEADER + frame.piece_bytes)
//   if (frame_parse(&frame, bytes, n)) return -1;    a peer's bytes: nothing of them is used before this says so
//
//   byte  size  little-endian
//      0     4  magic "MESH"
//      4     2  version, 1
//      6     1  kind      FrameKind
//      7     1  class     FrameClass of the stream that a DATA or an ACK belongs to, else 0
//      8     4  from      a node's id 0 .. 65535, or NET_NOBODY before it has one
//     12     4  to        the same
//     16     4  generation of the message, as its sender counts
//     20     4  flags     FRAME_*
//     24     8  epoch     of the stream: a number that grows when its sender starts to count anew
//     32     8  seq       DATA: number of the frame in the stream.  ADMIT, REFUSE: nonce of the HELLO that is answered
//     40     8  ack       ACK: number of the first frame that is still missing.  ADMIT: the id
//     48     8  channel   DATA: what the message is for, the callers' choice.  BEAT, PROBE: progress of the sender
//     56     8  message   DATA: number of the message in the stream
//     64     8  total     bytes of the whole message
//     72     8  offset    of the piece in the message: a multiple of 256 KiB
//     80     8  stamp     microseconds of the sender's clock when it wrote the frame
//     88     8  echo      the stamp of the other side that was heard last, 0: none
//     96     4  piece     bytes that follow the header: to the message's end, but at most 256 KiB
//    100     4  0
//    104        the piece
//
// Valid only if it ends with its piece, the piece lies in the message, and every field is in its range.
#ifndef LLMC_FRAME_H
#define LLMC_FRAME_H

#include <stdint.h> // fixed-width integers
#include <string.h> // memcpy, memset

#include "error.h" // error_set

#define NET_NOBODY 0xFFFFFFFFu // the id of a node that was not given one

enum {
    FRAME_HEADER = 104,
    FRAME_PIECE = 256 * 1024,
    FRAME_MAX = FRAME_HEADER + FRAME_PIECE,
    FRAME_VERSION = 1,
    FRAME_NODES = 65536 /* ids are below */,
    FRAME_TEXT = 512 /* bytes of a piece that is not part of a message */
};

typedef enum {
    FRAME_DATA = 1, // a piece of a message
    FRAME_ACK,      // how far a stream has come
    FRAME_BEAT,     // each second between the coordinator and a node
    FRAME_PROBE,    // the same between two joiners, on the ways they have
    FRAME_HELLO,    // a joiner asks for an id: piece = its public key, its port
    FRAME_ADMIT,    // it gets one
    FRAME_REFUSE,   // it gets none: piece = why
    FRAME_UNKNOWN,  // the coordinator does not know the sender
    FRAME_KIND_END
} FrameKind;

// Each has a stream of its own between two nodes. Control first, bulk second, files when there is room.
typedef enum { FRAME_CONTROL, FRAME_BULK, FRAME_FILES, FRAME_CLASSES } FrameClass;

enum {
    FRAME_GAP = 1,     // ACK: a later frame came than the one that is missing; echo is its stamp
    FRAME_RESTART = 2, // ACK: the receiver has not seen the beginning of this stream
    FRAME_FLAGS = 3
};

typedef struct {
    int kind, stream; // FrameKind, FrameClass
    uint32_t from, to, generation, flags;
    uint64_t epoch, seq, ack, channel, message;
    int64_t total, offset;
    uint64_t stamp, echo;
    int64_t piece_bytes;
} Frame;

static inline void frame_put(unsigned char *at, uint64_t value, int n_bytes) {
    for (int i = 0; i < n_bytes; i++) at[i] = (unsigned char)(value >> (8 * i));
}

static inline uint64_t frame_get(const unsigned char *at, int n_bytes) {
    uint64_t value = 0;
    for (int i = n_bytes - 1; i >= 0; i--) value = value << 8 | at[i];
    return value;
}

// The piece of a message of `total` bytes that begins at `offset`.
static inline int64_t frame_piece_bytes(int64_t total, int64_t offset) {
    const int64_t most = FRAME_PIECE;
    return total - offset < most ? total - offset : most;
}

// Writes the header alone (FRAME_HEADER bytes).
static inline void frame_write_header(unsigned char *out, const Frame *frame) {
    memset(out, 0, FRAME_HEADER);
    memcpy(out, "MESH", 4);
    frame_put(out + 4, FRAME_VERSION, 2);
    frame_put(out + 6, (uint64_t)frame->kind, 1);
    frame_put(out + 7, (uint64_t)frame->stream, 1);
    frame_put(out + 8, frame->from, 4);
    frame_put(out + 12, frame->to, 4);
    frame_put(out + 16, frame->generation, 4);
    frame_put(out + 20, frame->flags, 4);
    frame_put(out + 24, frame->epoch, 8);
    frame_put(out + 32, frame->seq, 8);
    frame_put(out + 40, frame->ack, 8);
    frame_put(out + 48, frame->channel, 8);
    frame_put(out + 56, frame->message, 8);
    frame_put(out + 64, (uint64_t)frame->total, 8);
    frame_put(out + 72, (uint64_t)frame->offset, 8);
    frame_put(out + 80, frame->stamp, 8);
    frame_put(out + 88, frame->echo, 8);
    frame_put(out + 96, (uint64_t)frame->piece_bytes, 4);
}

// Writes a frame of FRAME_HEADER + frame->piece_bytes bytes; its fields are the caller's, in range.
// piece: NULL if there is none.
static inline void frame_write(unsigned char *out, const Frame *frame, const void *piece) {
    frame_write_header(out, frame);
    if (piece != NULL) memcpy(out + FRAME_HEADER, piece, (size_t)frame->piece_bytes);
}

static inline int frame_is_node(uint32_t id) {
    return id < FRAME_NODES || id == NET_NOBODY;
}

// The piece is the whole rest of the n bytes, and lies where it belongs in a message of `total` bytes.
static inline int frame_check_piece(const Frame *frame, int64_t n) {
    if (frame->piece_bytes != n - FRAME_HEADER || frame->piece_bytes > FRAME_PIECE)
        return error_set("frame: a piece of %lld bytes in a frame of %lld", (long long)frame->piece_bytes,
                         (long long)n);
    if (frame->total < 0 || frame->offset < 0 || frame->offset > frame->total || frame->offset % FRAME_PIECE != 0 ||
        frame->piece_bytes != frame_piece_bytes(frame->total, frame->offset) ||
        (frame->piece_bytes == 0 && frame->total != 0))
        return error_set("frame: a piece of %lld bytes at %lld in a message of %lld", (long long)frame->piece_bytes,
                         (long long)frame->offset, (long long)frame->total);
    if (frame->kind != FRAME_DATA && frame->total > FRAME_TEXT)
        return error_set("frame: kind %d with %lld bytes", frame->kind, (long long)frame->total);
    return 0;
}

// Reads the header of the n bytes at `bytes`; the piece lies at bytes + FRAME_HEADER. Returns 0, or -1 for what is not
// a whole valid frame.
static inline int frame_parse(Frame *frame, const unsigned char *bytes, int64_t n) {
    memset(frame, 0, sizeof *frame);
    if (n < FRAME_HEADER || memcmp(bytes, "MESH", 4) != 0)
        return error_set("frame: %lld bytes that are none", (long long)n);
    if (frame_get(bytes + 4, 2) != FRAME_VERSION)
        return error_set("frame: version %d, this program speaks %d: use the same build everywhere",
                         (int)frame_get(bytes + 4, 2), FRAME_VERSION);
    frame->kind = (int)frame_get(bytes + 6, 1), frame->stream = (int)frame_get(bytes + 7, 1);
    frame->from = (uint32_t)frame_get(bytes + 8, 4), frame->to = (uint32_t)frame_get(bytes + 12, 4);
    frame->generation = (uint32_t)frame_get(bytes + 16, 4), frame->flags = (uint32_t)frame_get(bytes + 20, 4);
    frame->epoch = frame_get(bytes + 24, 8), frame->seq = frame_get(bytes + 32, 8);
    frame->ack = frame_get(bytes + 40, 8), frame->channel = frame_get(bytes + 48, 8);
    frame->message = frame_get(bytes + 56, 8);
    frame->total = (int64_t)frame_get(bytes + 64, 8), frame->offset = (int64_t)frame_get(bytes + 72, 8);
    frame->stamp = frame_get(bytes + 80, 8), frame->echo = frame_get(bytes + 88, 8);
    frame->piece_bytes = (int64_t)frame_get(bytes + 96, 4);
    if (frame->kind < FRAME_DATA || frame->kind >= FRAME_KIND_END || frame->stream >= FRAME_CLASSES)
        return error_set("frame: kind %d of class %d", frame->kind, frame->stream);
    if (!frame_is_node(frame->from) || !frame_is_node(frame->to))
        return error_set("frame: from %u to %u", frame->from, frame->to);
    if ((frame->flags & ~(uint32_t)FRAME_FLAGS) != 0 || frame_get(bytes + 100, 4) != 0)
        return error_set("frame: flags %x", frame->flags);
    return frame_check_piece(frame, n);
}

#endif
