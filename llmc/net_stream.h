// A reliable stream of messages from one node to another, without sockets: what may get lost, come twice or out of
// order goes in, whole messages in order come out. The ways below lose frames only when a connection breaks, a route
// changes or the relay's pipe is full, so a receiver keeps nothing that is out of order and the sender goes back to the
// first that is missing (go-back-N).
//
//   sends     sender_submit(&s, message)
//             sender_next(&s, &frame, &message)  ->  put on a wire  ->  sender_sent(&s, now)
//             done = sender_ack(&s, &frame, now, epoch)     at sender_deadline(&s): sender_timeout(&s, now)
//   receives  receiver_is_next(&r, &frame): receiver_take(&r, &frame, piece, limit, fd)
//             r.ack_due: receiver_ack(&r, &frame)
//
//   seq:  ... base ......... cursor ......... end ...
//   acknowledged | on their way | to be sent again | not cut from messages yet
//
// How many frames may be on their way follows the link, as in TCP: one more for each that arrives until the first loss,
// later one a window; half of it at a loss; and none more once they queue, for a relay drops what does not fit. A frame
// is taken for lost when the receiver says that a later one came (a gap), or when nothing was acknowledged for a round
// trip with its scatter, twice as long after each try without success. Each acknowledgement returns the stamp of the
// frame that caused it: a round trip is known also of frames that were sent twice, and a gap counts once.
//
// A stream whose receiver was forgotten and made anew is begun again (FRAME_RESTART): the epoch grows, messages that
// were not acknowledged whole are sent from their beginning. A receiver that has missed the first frames of a new
// stream asks for the same, and may have them by the time it is heard: as long as no frame was acknowledged, or one was
// that was sent later than what caused the question, the stream goes on.
//
// Times are seconds of one clock, > 0.
#ifndef LLMC_NET_STREAM_H
#define LLMC_NET_STREAM_H

#include <errno.h>  // errno
#include <stdlib.h> // malloc, free
#include <unistd.h> // pread, pwrite, close

#include "error.h" // error_set
#include "frame.h" // Frame

enum { STREAM_WINDOW = 64 /* frames on their way at most */ };
#define STREAM_FIRST     8.0 // frames on their way at first, and the fewest after a loss
#define STREAM_LEAST     2.0
#define STREAM_RTO_LEAST 0.3 // seconds
#define STREAM_RTO_FIRST 2.0 // before a round trip is known
#define STREAM_RTO_MOST  4.0 // or twice what a slow link needs
#define STREAM_QUEUE     0.1 // seconds beyond two of the shortest round trips: then no more frames are sent at a time

// A message to be sent: bytes in memory, or an open file.
typedef struct NetMessage {
    struct NetMessage *next;
    uint64_t channel, number;
    uint32_t generation;
    unsigned char *data; // NULL: a file, or no bytes
    int fd;              // -1: in memory
    char *path;          // of a file
    int64_t n_bytes;
} NetMessage;

static inline void net_message_free(NetMessage *message) {
    if (message->fd >= 0) close(message->fd);
    free(message->data);
    free(message->path);
    free(message);
}

typedef struct {
    NetMessage *message;
    int64_t offset;
} SenderFrame;

typedef struct {
    int stream; // FrameClass
    int window; // frames, <= STREAM_WINDOW
    uint64_t epoch, base, cursor, end, next_message;
    NetMessage *first, *last; // not acknowledged whole, in order
    NetMessage *cut;          // of these, the one whose pieces are numbered next; NULL: all are
    int64_t cut_offset;
    SenderFrame frames[STREAM_WINDOW]; // seq % STREAM_WINDOW
    double allowed, threshold;         // frames on their way: now, and above which it grows slowly
    double round_trip, scatter;        // seconds, 0: not known
    double shortest;                   // round trip of this way
    double timer;                      // the last progress, or the first frame sent after it
    int tries;                         // timeouts since progress
    double heard;                      // the last acknowledgement, also without progress
    double acknowledged;               // when the last frame was sent that has brought progress
    double went_back;                  // when it was sent from base again
    uint64_t left;                     // cursor before a timeout that may have been a mistake, 0: none
    double left_allowed;               // and how many frames were allowed
    int64_t unacknowledged;            // bytes of pieces in [base, end)
    int64_t resent;                    // bytes of pieces
} NetSender;

// epoch: greater than all that the receiver may have seen of an earlier stream of this sender, > 0.
static inline void sender_init(NetSender *s, int stream, int window, uint64_t epoch) {
    memset(s, 0, sizeof *s);
    s->stream = stream, s->window = window, s->epoch = epoch;
    s->allowed = STREAM_FIRST, s->threshold = STREAM_WINDOW;
}

static inline void sender_free(NetSender *s) {
    while (s->first != NULL) {
        NetMessage *next = s->first->next;
        net_message_free(s->first);
        s->first = next;
    }
    s->last = s->cut = NULL;
}

// The stream owns the message until it is acknowledged.
static inline void sender_submit(NetSender *s, NetMessage *message) {
    message->next = NULL;
    if (s->first == NULL)
        s->first = message;
    else
        s->last->next = message;
    s->last = message;
    if (s->cut == NULL) s->cut = message, s->cut_offset = 0;
}

// Whether a frame may be sent now: 1, its header in *frame (the caller adds from, to, stamp) and where its piece lies,
// or 0. Changes nothing: sender_sent does, once it is on its way.
static inline int sender_next(const NetSender *s, Frame *frame, const NetMessage **message) {
    if ((double)(s->cursor - s->base) >= s->allowed || s->cursor - s->base >= (uint64_t)s->window) return 0;
    SenderFrame next = {s->cut, s->cut_offset};
    if (s->cursor < s->end) next = s->frames[s->cursor % STREAM_WINDOW];
    if (next.message == NULL) return 0;
    memset(frame, 0, sizeof *frame);
    frame->kind = FRAME_DATA, frame->stream = s->stream, frame->generation = next.message->generation;
    frame->epoch = s->epoch, frame->seq = s->cursor, frame->channel = next.message->channel;
    frame->message = s->cursor < s->end || next.offset > 0 ? next.message->number : s->next_message;
    frame->total = next.message->n_bytes, frame->offset = next.offset;
    frame->piece_bytes = frame_piece_bytes(frame->total, frame->offset);
    *message = next.message;
    return 1;
}

// The piece of a frame of sender_next. Returns 0, or -1: the file cannot be read.
static inline int net_message_read(const NetMessage *message, const Frame *frame, unsigned char *piece) {
    if (frame->piece_bytes == 0) return 0;
    if (message->fd < 0) {
        memcpy(piece, message->data + frame->offset, (size_t)frame->piece_bytes);
        return 0;
    }
    ssize_t n = pread(message->fd, piece, (size_t)frame->piece_bytes, (off_t)frame->offset);
    if (n < 0) return error_set("%s: read: %s", message->path, strerror(errno));
    return n == (ssize_t)frame->piece_bytes ? 0 : error_set("%s: has become shorter", message->path);
}

// Numbers the piece at the cut.
static inline void sender_cut(NetSender *s) {
    NetMessage *message = s->cut;
    int64_t piece = frame_piece_bytes(message->n_bytes, s->cut_offset);
    SenderFrame cut = {message, s->cut_offset};
    if (s->cut_offset == 0) message->number = s->next_message++;
    s->frames[s->end % STREAM_WINDOW] = cut;
    s->end++;
    s->unacknowledged += piece;
    s->cut_offset += piece;
    if (s->cut_offset >= message->n_bytes) s->cut = message->next, s->cut_offset = 0;
}

// The frame of sender_next is on its way.
static inline void sender_sent(NetSender *s, double now) {
    if (s->cursor == s->base) s->timer = now;
    if (s->cursor == s->end) {
        sender_cut(s);
    } else {
        SenderFrame again = s->frames[s->cursor % STREAM_WINDOW];
        s->resent += frame_piece_bytes(again.message->n_bytes, again.offset);
    }
    s->cursor++;
}

// All that is not acknowledged is sent again.
static inline void sender_go_back(NetSender *s, double now) {
    s->cursor = s->base;
    s->went_back = now;
    s->left = 0;
}

// The same over another route.
static inline void sender_reroute(NetSender *s, double now) {
    sender_go_back(s, now);
    s->round_trip = s->scatter = s->shortest = 0.0, s->tries = 0;
}

// Begins the stream anew under a greater epoch, with the first message that is not acknowledged whole.
static inline void sender_restart(NetSender *s, uint64_t epoch) {
    s->epoch = epoch;
    s->base = s->cursor = s->end = s->next_message = 0;
    s->cut = s->first, s->cut_offset = 0, s->unacknowledged = 0;
    s->allowed = STREAM_FIRST, s->threshold = STREAM_WINDOW, s->tries = 0, s->left = 0, s->acknowledged = 0.0;
}

static inline double sender_rto(const NetSender *s) {
    double rto = s->round_trip > 0.0 ? s->round_trip + 4.0 * s->scatter : STREAM_RTO_FIRST;
    double most = 2.0 * rto > STREAM_RTO_MOST ? 2.0 * rto : STREAM_RTO_MOST;
    if (rto < STREAM_RTO_LEAST) rto = STREAM_RTO_LEAST;
    for (int i = 0; i < s->tries && rto < most; i++) rto *= 2.0;
    return rto < most ? rto : most;
}

// When frames on their way count as lost; 0: none are on their way.
static inline double sender_deadline(const NetSender *s) {
    return s->cursor > s->base ? s->timer + sender_rto(s) : 0.0;
}

static inline double sender_half(const NetSender *s) {
    return s->allowed / 2.0 > STREAM_LEAST ? s->allowed / 2.0 : STREAM_LEAST;
}

// The deadline is over: back to base, with few frames at first.
static inline void sender_timeout(NetSender *s, double now) {
    uint64_t left = s->left > 0 ? s->left : s->cursor;
    double left_allowed = s->left > 0 ? s->left_allowed : s->allowed;
    s->threshold = sender_half(s);
    s->allowed = STREAM_LEAST;
    s->tries++;
    sender_go_back(s, now);
    s->left = left, s->left_allowed = left_allowed;
}

static inline void sender_measure(NetSender *s, double sample) {
    if (s->shortest == 0.0 || sample < s->shortest) s->shortest = sample;
    if (s->round_trip == 0.0) {
        s->round_trip = sample, s->scatter = sample / 2.0;
        return;
    }
    double off = sample > s->round_trip ? sample - s->round_trip : s->round_trip - sample;
    s->scatter += (off - s->scatter) / 4.0;
    s->round_trip += (sample - s->round_trip) / 8.0;
}

// Frames up to ack have arrived. grow: more may be on their way.
static inline void sender_advance(NetSender *s, uint64_t ack, int grow, NetMessage **done) {
    while (s->base < ack) {
        SenderFrame frame = s->frames[s->base % STREAM_WINDOW];
        int64_t piece = frame_piece_bytes(frame.message->n_bytes, frame.offset);
        s->unacknowledged -= piece;
        if (grow) s->allowed += s->allowed < s->threshold ? 1.0 : 1.0 / s->allowed;
        s->base++;
        if (frame.offset + piece < frame.message->n_bytes) continue;
        s->first = frame.message->next; // the last piece of the first message
        if (s->first == NULL) s->last = NULL;
        frame.message->next = NULL;
        *done = frame.message;
        done = &frame.message->next;
    }
    if (s->allowed > s->window) s->allowed = s->window;
    if (s->cursor < s->base) s->cursor = s->base;
}

// What was acknowledged after a timeout was sent before it: nothing was lost, the link is slow. What is on its way is
// not sent again.
static inline void sender_recall(NetSender *s, double echo) {
    if (s->left > s->cursor && echo < s->went_back) s->cursor = s->left, s->allowed = s->left_allowed;
    s->left = 0;
}

// Takes an ACK. Returns the messages that have arrived whole, to be freed by the caller, in order; or NULL.
static inline NetMessage *sender_ack(NetSender *s, const Frame *ack, double now, uint64_t next_epoch) {
    NetMessage *done = NULL;
    if (ack->epoch != s->epoch || ack->ack > s->end) return NULL; // of another life of the stream, or nonsense
    s->heard = now;
    double echo = (double)ack->echo * 1e-6;
    if ((ack->flags & FRAME_RESTART) && s->base > 0) {
        if (echo > s->acknowledged) sender_restart(s, next_epoch);
        return NULL;
    }
    if (echo > 0.0 && echo <= now) sender_measure(s, now - echo);
    if (ack->ack > s->base) {
        sender_recall(s, echo);
        sender_advance(s, ack->ack, now - echo < 2.0 * s->shortest + STREAM_QUEUE, &done);
        s->timer = now, s->tries = 0;
        if (echo > s->acknowledged) s->acknowledged = echo;
    } else if ((ack->flags & (FRAME_GAP | FRAME_RESTART)) && ack->ack == s->base && s->cursor > s->base &&
               echo > s->went_back) {
        s->threshold = s->allowed = sender_half(s);
        sender_go_back(s, now);
    }
    return done;
}

// The message at the stream's head cannot be sent after all (its file): takes it out, to be freed by the caller.
static inline NetMessage *sender_give_up(NetSender *s, const NetMessage *message, uint64_t next_epoch) {
    NetMessage *found = NULL, **at = &s->first;
    while (*at != NULL && *at != message) at = &(*at)->next;
    found = *at;
    if (found == NULL) return NULL;
    *at = found->next;
    s->last = NULL;
    for (NetMessage *m = s->first; m != NULL; m = m->next) s->last = m;
    sender_restart(s, next_epoch);
    return found;
}

// ---------------------------------------------------------------------------------------------------------------------
// The other end

enum { RECEIVER_MEMORY = -1, RECEIVER_NOWHERE = -2 /* the message is taken and thrown away */ };

typedef struct {
    uint64_t epoch, expected, next_message; // epoch 0: nothing was heard yet
    int assembling;                         // a message has begun and is not whole
    Frame head;                             // its first frame
    unsigned char *data;                    // its bytes; NULL: none, to a file, or nobody wants them
    int fd;                                 // its file, -1: none
    int failed;  // errno: its file could not be written, or it has none; the rest is taken and thrown away
    int64_t got; // bytes
    int ack_due;
    uint32_t ack_flags;
    uint64_t ack_epoch, ack_echo;
} NetReceiver;

static inline void receiver_init(NetReceiver *r) {
    memset(r, 0, sizeof *r);
    r->fd = -1;
}

// Throws away what has come of an unfinished message.
static inline void receiver_abandon(NetReceiver *r) {
    free(r->data);
    if (r->fd >= 0) close(r->fd);
    r->data = NULL, r->fd = -1, r->assembling = 0, r->failed = 0;
}

static inline void receiver_owe(NetReceiver *r, const Frame *frame, uint32_t flags) {
    r->ack_due = 1, r->ack_flags = flags, r->ack_epoch = frame->epoch, r->ack_echo = frame->stamp;
}

// Whether a DATA frame is the one that is missing: 1. For all others it is noted what to answer, if anything.
static inline int receiver_is_next(NetReceiver *r, const Frame *frame) {
    if (frame->epoch < r->epoch || frame->epoch == 0) return 0; // an earlier life of the stream
    if (frame->epoch > r->epoch) {
        if (r->epoch == 0 && frame->seq != 0) {
            receiver_owe(r, frame, FRAME_RESTART);
            return 0;
        }
        receiver_abandon(r);
        r->epoch = frame->epoch, r->expected = r->next_message = 0;
    }
    if (frame->seq != r->expected) receiver_owe(r, frame, frame->seq > r->expected ? FRAME_GAP : 0);
    return frame->seq == r->expected;
}

// The next frame is not taken now: there is no room, or no file for it. The sender sees that we live, and tries again.
static inline void receiver_postpone(NetReceiver *r, const Frame *frame) {
    receiver_owe(r, frame, 0);
}

// What was postponed can come.
static inline void receiver_resume(NetReceiver *r) {
    if (r->epoch == 0) return;
    r->ack_due = 1, r->ack_flags = FRAME_GAP, r->ack_epoch = r->epoch;
}

static inline int receiver_begin(NetReceiver *r, const Frame *frame, int64_t limit, int fd) {
    if (frame->offset != 0 || frame->message != r->next_message)
        return error_set("a message begins at byte %lld", (long long)frame->offset);
    if (fd == RECEIVER_MEMORY && frame->total > limit)
        return error_set("a message of %lld bytes, at most %lld are taken", (long long)frame->total, (long long)limit);
    if (fd == RECEIVER_MEMORY && frame->total > 0) {
        r->data = (unsigned char *)malloc((size_t)frame->total);
        if (r->data == NULL) return error_set("no memory for a message of %lld bytes", (long long)frame->total);
    }
    r->head = *frame, r->fd = fd, r->got = 0, r->failed = fd == RECEIVER_NOWHERE ? ECANCELED : 0, r->assembling = 1;
    return 0;
}

static inline int receiver_fits(const NetReceiver *r, const Frame *frame) {
    return frame->offset == r->got && frame->message == r->head.message && frame->total == r->head.total &&
           frame->channel == r->head.channel && frame->generation == r->head.generation;
}

static inline void receiver_store(NetReceiver *r, const Frame *frame, const unsigned char *piece) {
    size_t n = (size_t)frame->piece_bytes;
    if (n == 0 || r->failed) return;
    if (r->fd < 0)
        memcpy(r->data + r->got, piece, n);
    else if (pwrite(r->fd, piece, n, (off_t)r->got) != (ssize_t)n)
        r->failed = errno != 0 ? errno : EIO;
}

// Takes the next frame (receiver_is_next). limit: bytes of a message in memory. fd: the file for a message that begins
// here (then the receiver's), or RECEIVER_*. Returns 1 when the message is whole, 0 when it is not yet, -1 if the peer
// breaks the rules (the frame is then not taken).
static inline int receiver_take(NetReceiver *r, const Frame *frame, const unsigned char *piece, int64_t limit, int fd) {
    if (!r->assembling && receiver_begin(r, frame, limit, fd)) return -1;
    if (!receiver_fits(r, frame))
        return error_set("a piece at %lld, not at %lld", (long long)frame->offset, (long long)r->got);
    receiver_store(r, frame, piece);
    r->got += frame->piece_bytes;
    r->expected++;
    receiver_owe(r, frame, 0);
    if (r->got < r->head.total) return 0;
    r->assembling = 0, r->next_message++;
    return 1;
}

// Writes the acknowledgement that is due; the caller adds from, to and stamp, and clears ack_due once it is on its way.
static inline void receiver_ack(const NetReceiver *r, Frame *frame, int stream) {
    memset(frame, 0, sizeof *frame);
    frame->kind = FRAME_ACK, frame->stream = stream, frame->flags = r->ack_flags;
    frame->epoch = r->ack_epoch, frame->echo = r->ack_echo;
    frame->ack = r->ack_flags & FRAME_RESTART ? 0 : r->expected;
}

#endif
