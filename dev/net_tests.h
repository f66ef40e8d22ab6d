// Tests of the network, over loopback with ports from the system. A TCP proxy of the tests stands where a link is to
// fail: it forwards slowly, late, one way only, not at all, or cuts its connections; CURVE does not mind.
//
// A test's nodes form a World. Its messages check themselves: the channel is number << 32 | size, the bytes follow from
// sender, receiver and channel, and numbers of one sender and class grow by one.
#ifndef DEV_NET_TESTS_H
#define DEV_NET_TESTS_H

#include "../llmc/net.h"
#include "../llmc/net_stream.h"

#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

// ---------------------------------------------------------------------------------------------------------------------
// Frames and streams, without sockets

static Frame frame_sample(void) {
    Frame frame;
    memset(&frame, 0, sizeof frame);
    frame.kind = FRAME_DATA, frame.stream = FRAME_BULK, frame.from = 3, frame.to = 65535, frame.generation = 77;
    frame.epoch = 1ull << 60, frame.seq = 5, frame.channel = 0x8000000000000001ull, frame.message = 6;
    frame.total = FRAME_PIECE + 4, frame.offset = FRAME_PIECE, frame.stamp = 1, frame.echo = 2, frame.piece_bytes = 4;
    return frame;
}

static void check_frame_refused(int at, uint64_t value, int n_bytes, const char *part) {
    unsigned char bytes[FRAME_HEADER + 4];
    Frame frame = frame_sample();
    char what[64];
    snprintf(what, sizeof what, "a frame with %llx at byte %d", (unsigned long long)value, at);
    frame_write(bytes, &frame, "abcd");
    frame_put(bytes + at, value, n_bytes);
    check_error(frame_parse(&frame, bytes, sizeof bytes), part, what);
}

// Every field comes back; a wrong one is refused, and so is every shorter frame.
static void test_net_frame(void) {
    unsigned char bytes[FRAME_HEADER + 5];
    Frame frame = frame_sample(), read;
    frame_write(bytes, &frame, "abcd");
    check(frame_parse(&read, bytes, FRAME_HEADER + 4) == 0 && memcmp(&read, &frame, sizeof frame) == 0,
          "a frame reads as another");
    check(memcmp(bytes + FRAME_HEADER, "abcd", 4) == 0, "the piece is another");
    check(memcmp(bytes, "MESH\1\0\1\1\3\0\0\0\xff\xff\0\0M\0\0\0", 20) == 0, "the header begins otherwise than drawn");
    for (int n = 0; n <= FRAME_HEADER + 5; n++)
        if (n != FRAME_HEADER + 4) check(frame_parse(&read, bytes, n) != 0, "%d bytes of a frame are accepted", n);
    check_frame_refused(0, 'm', 1, "none");
    check_frame_refused(4, 2, 2, "version 2");
    check_frame_refused(6, 0, 1, "kind 0");
    check_frame_refused(6, FRAME_KIND_END, 1, "kind");
    check_frame_refused(7, FRAME_CLASSES, 1, "class");
    check_frame_refused(8, 65536, 4, "from 65536");
    check_frame_refused(12, 0xFFFFFFFE, 4, "to");
    check_frame_refused(20, FRAME_FLAGS + 1, 4, "flags");
    check_frame_refused(64, FRAME_PIECE + 3, 8, "a piece of 4");
    check_frame_refused(64, FRAME_PIECE + 5, 8, "a piece of 4");
    check_frame_refused(64, 1ull << 63, 8, "a piece");
    check_frame_refused(72, 0, 8, "a piece");
    check_frame_refused(72, 2 * FRAME_PIECE, 8, "a piece");
    check_frame_refused(72, 1ull << 63 | FRAME_PIECE, 8, "a piece");
    check_frame_refused(72, FRAME_PIECE - 1, 8, "a piece");
    check_frame_refused(96, 3, 4, "a piece");
    check_frame_refused(96, 0xFFFFFFFF, 4, "a piece");
    check_frame_refused(100, 1, 4, "flags");
    check_frame_refused(6, FRAME_BEAT, 1, "with 262148 bytes");
    frame.total = 10, frame.offset = 6; // its last 4 bytes, but no piece begins there
    frame_write(bytes, &frame, "abcd");
    check_error(frame_parse(&read, bytes, FRAME_HEADER + 4), "at 6", "a piece between two");
}

enum { WIRE_FRAMES = 512, STREAM_MESSAGES = 60 };

// A wire that loses, repeats and reorders.
typedef struct {
    unsigned char *frames[WIRE_FRAMES];
    int64_t n_bytes[WIRE_FRAMES];
    int n;
    uint64_t draws;
} LossyWire;

static uint32_t lossy_draw(LossyWire *wire) {
    return rand_block(11, RAND_TEST, 40, wire->draws++).v[0];
}

static void lossy_put(LossyWire *wire, const Frame *frame, const unsigned char *piece) {
    int copies = lossy_draw(wire) % 8 == 0 ? 0 : lossy_draw(wire) % 16 == 0 ? 2 : 1;
    for (int i = 0; i < copies && wire->n < WIRE_FRAMES; i++) {
        int64_t n = FRAME_HEADER + frame->piece_bytes;
        wire->frames[wire->n] = (unsigned char *)malloc((size_t)n);
        frame_write(wire->frames[wire->n], frame, piece);
        wire->n_bytes[wire->n++] = n;
    }
}

// One of the first four frames, to be freed, or NULL.
static unsigned char *lossy_get(LossyWire *wire, int64_t *n_bytes) {
    if (wire->n == 0) return NULL;
    int i = (int)(lossy_draw(wire) % 4) % wire->n;
    unsigned char *frame = wire->frames[i];
    *n_bytes = wire->n_bytes[i];
    wire->n--;
    memmove(wire->frames + i, wire->frames + i + 1, sizeof *wire->frames * (size_t)(wire->n - i));
    memmove(wire->n_bytes + i, wire->n_bytes + i + 1, sizeof *wire->n_bytes * (size_t)(wire->n - i));
    return frame;
}

static int64_t stream_test_bytes(int k) {
    static const int64_t sizes[] = {0, 1, FRAME_PIECE - 1, FRAME_PIECE, FRAME_PIECE + 1, 3 * FRAME_PIECE};
    return sizes[k % 6];
}

static void stream_test_submit(NetSender *s, int k) {
    NetMessage *message = (NetMessage *)calloc(1, sizeof *message);
    message->fd = -1, message->n_bytes = stream_test_bytes(k), message->channel = (uint64_t)k;
    message->data = (unsigned char *)malloc((size_t)message->n_bytes + 1);
    memset(message->data, k + 1, (size_t)message->n_bytes);
    sender_submit(s, message);
}

typedef struct {
    NetSender s;
    NetReceiver r;
    LossyWire up, down;
    int next; // message
    double now;
    uint64_t epoch;
} StreamTest;

static void stream_test_arrived(StreamTest *t) {
    int64_t n = t->r.head.total;
    int right = t->r.head.channel == (uint64_t)t->next && n == stream_test_bytes(t->next);
    for (int64_t i = 0; i < n && right; i++) right = t->r.data[i] == (unsigned char)(t->next + 1);
    check(right, "message %d is not the next, or has other bytes", t->next);
    free(t->r.data);
    t->r.data = NULL;
    t->next++;
}

static void stream_test_turn(StreamTest *t) {
    Frame frame;
    const NetMessage *from;
    int64_t n;
    unsigned char *bytes, *piece = (unsigned char *)malloc(FRAME_PIECE);
    t->now += 0.01;
    if (sender_deadline(&t->s) > 0.0 && t->now >= sender_deadline(&t->s)) sender_timeout(&t->s, t->now);
    for (int i = 0; i < 4 && sender_next(&t->s, &frame, &from); i++) {
        frame.stamp = (uint64_t)(t->now * 1e6) + 1;
        net_message_read(from, &frame, piece);
        lossy_put(&t->up, &frame, piece);
        sender_sent(&t->s, t->now);
    }
    for (int i = 0; i < 4 && (bytes = lossy_get(&t->up, &n)) != NULL; i++) {
        check(frame_parse(&frame, bytes, n) == 0, "%s", error_message);
        if (receiver_is_next(&t->r, &frame) &&
            receiver_take(&t->r, &frame, bytes + FRAME_HEADER, 1 << 20, RECEIVER_MEMORY) == 1)
            stream_test_arrived(t);
        free(bytes);
        if (t->r.ack_due) receiver_ack(&t->r, &frame, 0), lossy_put(&t->down, &frame, NULL), t->r.ack_due = 0;
    }
    while ((bytes = lossy_get(&t->down, &n)) != NULL) {
        frame_parse(&frame, bytes, n);
        for (NetMessage *next, *done = sender_ack(&t->s, &frame, t->now + 0.005, t->epoch + 1); done != NULL;
             done = next) {
            next = done->next;
            net_message_free(done);
        }
        if (t->s.epoch > t->epoch) t->epoch = t->s.epoch;
        free(bytes);
    }
    free(piece);
}

// Over a wire that loses every eighth frame, repeats and reorders: each message once, whole, in order. Then the
// receiver is forgotten in the middle: what was not acknowledged comes again from its beginning.
static void test_net_stream(void) {
    StreamTest t;
    memset(&t, 0, sizeof t);
    t.now = 1.0, t.epoch = 5;
    sender_init(&t.s, FRAME_BULK, STREAM_WINDOW, t.epoch);
    receiver_init(&t.r);
    for (int k = 0; k < STREAM_MESSAGES / 2; k++) stream_test_submit(&t.s, k);
    for (int i = 0; i < 100000 && t.s.first != NULL; i++) stream_test_turn(&t);
    check(t.next == STREAM_MESSAGES / 2 && t.s.unacknowledged == 0, "%d messages of %d came", t.next,
          STREAM_MESSAGES / 2);
    check(t.s.resent > 0, "nothing was sent again");
    for (int k = STREAM_MESSAGES / 2; k < STREAM_MESSAGES; k++) stream_test_submit(&t.s, k);
    while (t.next < 3 * STREAM_MESSAGES / 4) stream_test_turn(&t);
    receiver_abandon(&t.r);
    receiver_init(&t.r);
    t.next = (int)t.s.first->channel; // what was acknowledged is not sent again, what came without is
    for (int i = 0; i < 100000 && t.s.first != NULL; i++) stream_test_turn(&t);
    check(t.next == STREAM_MESSAGES && t.s.unacknowledged == 0, "%d messages of %d came after the receiver was new",
          t.next, STREAM_MESSAGES);
    check(t.epoch > 5, "the stream was not begun anew");
    receiver_abandon(&t.r);
    sender_free(&t.s);
    for (int64_t n; t.up.n > 0;) free(lossy_get(&t.up, &n));
}

// Sends what may be sent at `now`; the frames are in sent. Returns how many.
static int stream_test_send(NetSender *s, double now, Frame *sent) {
    const NetMessage *from;
    int n = 0;
    for (; n < STREAM_WINDOW && sender_next(s, sent + n, &from); n++) {
        sent[n].stamp = (uint64_t)(now * 1e6);
        sender_sent(s, now);
    }
    return n;
}

// Receives a frame of messages without bytes. Returns the number of the message that it was, or -1; *ack is the answer.
static int stream_test_receive(NetReceiver *r, const Frame *frame, Frame *ack) {
    int whole =
        receiver_is_next(r, frame) && receiver_take(r, frame, (const unsigned char *)"", 0, RECEIVER_MEMORY) == 1;
    receiver_ack(r, ack, 0);
    return whole ? (int)frame->channel : -1;
}

// The first frame of a stream is lost, so the receiver asks for a new beginning; before it is heard both frames are
// sent again and come. Nothing comes twice, whether the sender hears of the question first (late = 0), or of progress.
static void stream_test_begin(int late) {
    NetSender s;
    NetReceiver r;
    Frame sent[STREAM_WINDOW], question, answers[2];
    sender_init(&s, FRAME_CONTROL, STREAM_WINDOW, 5);
    receiver_init(&r);
    stream_test_submit(&s, 0), stream_test_submit(&s, 6); // both without bytes
    check(stream_test_send(&s, 1.0, sent) == 2, "two frames are not sent");
    check(stream_test_receive(&r, &sent[1], &question) == -1 && (question.flags & FRAME_RESTART), "no question");
    sender_timeout(&s, 3.0);
    check(stream_test_send(&s, 3.0, sent) == 2, "they are not sent again");
    for (int i = 0; i < 2; i++) check(stream_test_receive(&r, &sent[i], &answers[i]) == 6 * i, "message %d is lost", i);
    if (late) net_message_free(sender_ack(&s, &answers[0], 3.1, 9));
    check(sender_ack(&s, &question, 3.2, 9) == NULL, "the question acknowledges");
    for (int i = stream_test_send(&s, 3.3, sent); i > 0; i--)
        check(stream_test_receive(&r, &sent[i - 1], &question) == -1, "message %d comes twice", i - 1);
    for (NetMessage *next, *done = sender_ack(&s, &answers[1], 3.4, 9); done != NULL; done = next) {
        next = done->next;
        net_message_free(done);
    }
    check(s.first == NULL && s.epoch == 5, "the stream was begun anew");
    sender_free(&s);
}

static void test_net_begin(void) {
    stream_test_begin(0);
    stream_test_begin(1);
}

// A sender whose eight frames were sent at 1 s and timed out at 3 s, two sent again; frame 0 is acknowledged at 4 s.
static void slow_link_case(NetSender *s, uint64_t echo) {
    const NetMessage *from;
    Frame frame;
    NetMessage *message = (NetMessage *)calloc(1, sizeof *message);
    message->fd = -1, message->n_bytes = 20 * FRAME_PIECE;
    sender_init(s, FRAME_BULK, STREAM_WINDOW, 9);
    sender_submit(s, message);
    while (sender_next(s, &frame, &from)) sender_sent(s, 1.0);
    check(s->cursor == 8 && sender_deadline(s) == 1.0 + STREAM_RTO_FIRST, "%llu frames are on their way",
          (unsigned long long)s->cursor);
    sender_timeout(s, 3.0);
    while (sender_next(s, &frame, &from)) sender_sent(s, 3.0);
    check(s->cursor == 2 && s->resent == 2 * FRAME_PIECE, "after a timeout %llu frames are sent",
          (unsigned long long)s->cursor);
    memset(&frame, 0, sizeof frame);
    frame.kind = FRAME_ACK, frame.epoch = 9, frame.ack = 1, frame.echo = echo;
    check(sender_ack(s, &frame, 4.0, 10) == NULL && s->base == 1, "the acknowledgement is not taken");
}

// A timeout that was a mistake, for the link is slow, is taken back; one that was not is none. Frames that queue are no
// reason to send more.
static void test_net_slow_link(void) {
    NetSender s;
    Frame frame;
    slow_link_case(&s, 1000000);
    check(s.cursor == 8 && s.allowed >= 8.0 && s.resent == 2 * FRAME_PIECE, "all is sent again over a slow link");
    sender_free(&s);
    slow_link_case(&s, 3000001);
    check(s.cursor == 2 && s.allowed <= 3.0, "a lost frame is taken for a late one");
    double allowed = s.allowed;
    memset(&frame, 0, sizeof frame);
    frame.kind = FRAME_ACK, frame.epoch = 9, frame.ack = 2, frame.echo = 3000001;
    sender_ack(&s, &frame, 9.0, 10);
    check(s.base == 2 && s.allowed == allowed, "more frames, although they queue");
    sender_free(&s);
}

#ifdef WITH_ZMQ
// ---------------------------------------------------------------------------------------------------------------------
// The proxy

enum { PROXY_PAIRS = 32, PROXY_CHUNK = 16384, PROXY_CHUNKS = 24 /* of one direction of one connection */ };

typedef struct {
    double due;
    int n, sent;
    char bytes[PROXY_CHUNK];
} ProxyChunk;

typedef struct {
    int fds[2]; // 0: who has dialled, 1: whom it wants
    ProxyChunk *chunks[2][PROXY_CHUNKS];
    int n[2]; // chunks read from fds[i] and not wholly written to fds[1 - i]
} ProxyPair;

typedef struct {
    int listener, port, target, wake[2];
    pthread_t thread;
    pthread_mutex_t lock;
    // under the lock
    int hold[2], stopping; // hold[0]: nothing goes from who has dialled
    int cut;               // 1: all connections end, 2: for who has dialled, and the other is not told
    double rate, delay;    // bytes/s of a direction (0: any), seconds
    int64_t passed[2];
    // the thread's
    ProxyPair pairs[PROXY_PAIRS];
    int orphans[4 * PROXY_PAIRS], n_orphans; // the other's connections after such a cut
    double free_at[2];
} Proxy;

static void proxy_close_pair(ProxyPair *pair) {
    for (int d = 0; d < 2; d++) {
        if (pair->fds[d] >= 0) close(pair->fds[d]);
        pair->fds[d] = -1;
        for (int i = 0; i < pair->n[d]; i++) free(pair->chunks[d][i]);
        pair->n[d] = 0;
    }
}

static void proxy_cut(Proxy *proxy, int how) {
    for (int i = 0; i < PROXY_PAIRS; i++) {
        ProxyPair *pair = &proxy->pairs[i];
        if (how == 2 && pair->fds[1] >= 0 && proxy->n_orphans < 4 * PROXY_PAIRS) {
            proxy->orphans[proxy->n_orphans++] = pair->fds[1];
            pair->fds[1] = -1;
        }
        proxy_close_pair(pair);
    }
}

static int loopback_socket(int port, int connects) {
    struct sockaddr_in address;
    int one = 1, fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | (connects ? 0 : SOCK_NONBLOCK), 0);
    memset(&address, 0, sizeof address);
    address.sin_family = AF_INET, address.sin_port = htons((uint16_t)port);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (!connects) setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (connects ? connect(fd, (struct sockaddr *)&address, sizeof address) != 0
                 : bind(fd, (struct sockaddr *)&address, sizeof address) != 0 || listen(fd, 64) != 0) {
        close(fd);
        return -1;
    }
    return fd;
}

static void proxy_accept(Proxy *proxy) {
    int from = accept4(proxy->listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (from < 0) return;
    for (int i = 0; i < PROXY_PAIRS; i++) {
        if (proxy->pairs[i].fds[0] >= 0) continue;
        int to = loopback_socket(proxy->target, 1);
        if (to < 0) break;
        fcntl(to, F_SETFL, O_NONBLOCK);
        proxy->pairs[i].fds[0] = from, proxy->pairs[i].fds[1] = to;
        return;
    }
    close(from);
}

// Reads one chunk; it leaves when the link is free, and its latency later.
static void proxy_read(Proxy *proxy, ProxyPair *pair, int d, double rate, double delay) {
    ProxyChunk *chunk = (ProxyChunk *)malloc(sizeof *chunk);
    int n = (int)recv(pair->fds[d], chunk->bytes, sizeof chunk->bytes, 0);
    if (n <= 0) {
        free(chunk);
        if (n == 0 || errno != EAGAIN) proxy_close_pair(pair);
        return;
    }
    if (proxy->free_at[d] < seconds()) proxy->free_at[d] = seconds();
    if (rate > 0.0) proxy->free_at[d] += n / rate;
    chunk->n = n, chunk->sent = 0, chunk->due = proxy->free_at[d] + delay;
    pair->chunks[d][pair->n[d]++] = chunk;
}

static int64_t proxy_write(ProxyPair *pair, int d) {
    ProxyChunk *chunk = pair->chunks[d][0];
    int n = (int)send(pair->fds[1 - d], chunk->bytes + chunk->sent, (size_t)(chunk->n - chunk->sent), MSG_NOSIGNAL);
    if (n < 0) {
        if (errno != EAGAIN) proxy_close_pair(pair);
        return 0;
    }
    chunk->sent += n;
    if (chunk->sent < chunk->n) return n;
    free(chunk);
    memmove(pair->chunks[d], pair->chunks[d] + 1, sizeof(ProxyChunk *) * (size_t)--pair->n[d]);
    return n;
}

// What a connection waits for; how long until its next chunk is due goes into *wait.
static void proxy_wants(const ProxyPair *pair, const int *hold, struct pollfd *fds, double *wait) {
    for (int d = 0; d < 2; d++) fds[d].fd = pair->fds[d], fds[d].events = fds[d].revents = 0;
    for (int d = 0; d < 2 && pair->fds[0] >= 0; d++) {
        if (hold[d]) continue;
        if (pair->n[d] < PROXY_CHUNKS) fds[d].events |= POLLIN;
        double left = pair->n[d] > 0 ? pair->chunks[d][0]->due - seconds() : 1.0;
        if (left <= 0.0)
            fds[1 - d].events |= POLLOUT;
        else if (left < *wait)
            *wait = left;
    }
    for (int d = 0; d < 2; d++)
        if (fds[d].events == 0) fds[d].fd = -1; // or its end would be told again and again
}

static void *proxy_thread(void *argument) {
    Proxy *proxy = (Proxy *)argument;
    struct pollfd fds[2 + 2 * PROXY_PAIRS];
    for (;;) {
        pthread_mutex_lock(&proxy->lock);
        int hold[2] = {proxy->hold[0], proxy->hold[1]}, cut = proxy->cut, stopping = proxy->stopping;
        double rate = proxy->rate, delay = proxy->delay, wait = 1.0;
        proxy->cut = 0;
        pthread_mutex_unlock(&proxy->lock);
        if (stopping) return NULL;
        if (cut) proxy_cut(proxy, cut);
        for (int i = 0; i < PROXY_PAIRS; i++) proxy_wants(&proxy->pairs[i], hold, fds + 2 + 2 * i, &wait);
        fds[0].fd = proxy->wake[0], fds[1].fd = proxy->listener;
        fds[0].events = fds[1].events = POLLIN;
        poll(fds, 2 + 2 * PROXY_PAIRS, (int)(wait * 1e3) + 1);
        char byte;
        if ((fds[0].revents & POLLIN) && read(proxy->wake[0], &byte, 1) < 0) return NULL;
        for (int i = 0; i < PROXY_PAIRS; i++) {
            for (int d = 0; d < 2; d++) {
                int64_t n = 0;
                ProxyPair *pair = &proxy->pairs[i];
                const struct pollfd *ends = fds + 2 + 2 * i;
                if (pair->fds[0] >= 0 && (ends[1 - d].revents & POLLOUT) && pair->n[d] > 0 && !hold[d])
                    n = proxy_write(pair, d);
                if (pair->fds[0] >= 0 && (ends[d].revents & (POLLIN | POLLHUP | POLLERR)) && pair->n[d] < PROXY_CHUNKS)
                    proxy_read(proxy, pair, d, rate, delay);
                pthread_mutex_lock(&proxy->lock);
                proxy->passed[d] += n;
                pthread_mutex_unlock(&proxy->lock);
            }
        }
        if (fds[1].revents & POLLIN) proxy_accept(proxy);
    }
}

// Forwards to the port on loopback that endpoint ends with.
static Proxy *proxy_start(const char *endpoint) {
    struct sockaddr_in address;
    socklen_t size = sizeof address;
    Proxy *proxy = (Proxy *)calloc(1, sizeof *proxy);
    for (int i = 0; i < PROXY_PAIRS; i++) proxy->pairs[i].fds[0] = proxy->pairs[i].fds[1] = -1;
    proxy->listener = loopback_socket(0, 0), proxy->target = atoi(strrchr(endpoint, ':') + 1);
    getsockname(proxy->listener, (struct sockaddr *)&address, &size);
    proxy->port = ntohs(address.sin_port);
    pthread_mutex_init(&proxy->lock, NULL);
    if (!check(proxy->listener >= 0 && pipe(proxy->wake) == 0, "no proxy")) exit(1);
    pthread_create(&proxy->thread, NULL, proxy_thread, proxy);
    return proxy;
}

static void proxy_change(Proxy *proxy, int *field, int value) {
    pthread_mutex_lock(&proxy->lock);
    *field = value;
    pthread_mutex_unlock(&proxy->lock);
    if (write(proxy->wake[1], "", 1) != 1) check(0, "the proxy cannot be woken");
}

static void proxy_hold(Proxy *proxy, int up, int down) {
    proxy_change(proxy, &proxy->hold[0], up);
    proxy_change(proxy, &proxy->hold[1], down);
}

static void proxy_speed(Proxy *proxy, double rate, double delay) {
    pthread_mutex_lock(&proxy->lock);
    proxy->rate = rate, proxy->delay = delay;
    pthread_mutex_unlock(&proxy->lock);
}

static int64_t proxy_passed(Proxy *proxy, int d) {
    pthread_mutex_lock(&proxy->lock);
    int64_t passed = proxy->passed[d];
    pthread_mutex_unlock(&proxy->lock);
    return passed;
}

static void proxy_stop(Proxy *proxy) {
    proxy_change(proxy, &proxy->stopping, 1);
    pthread_join(proxy->thread, NULL);
    proxy_cut(proxy, 1);
    for (int i = 0; i < proxy->n_orphans; i++) close(proxy->orphans[i]);
    close(proxy->listener), close(proxy->wake[0]), close(proxy->wake[1]);
    pthread_mutex_destroy(&proxy->lock);
    free(proxy);
}

// ---------------------------------------------------------------------------------------------------------------------
// Nodes that know each other

enum { WORLD_NODES = 3, WORLD_EVENTS = 16 };

typedef struct {
    Net *net;
    NetEvent seen[WORLD_EVENTS]; // the last of each kind, without data
    int n_seen[WORLD_EVENTS];
    uint32_t next[WORLD_NODES][2]; // number of the message that is expected, by sender and class
    int64_t bytes, bytes_before;   // of messages, and of those before the last control message
} Spot;

typedef struct {
    NetKeys keys;
    NetLimits limits;
    Spot spots[WORLD_NODES]; // by id
    int n;
} World;

// The event loop of all nodes until the condition holds; a bound for what hangs, not for what is slow.
#define WORLD_UNTIL(world, condition)                                                                                  \
    do {                                                                                                               \
        double until_ = seconds() + 60.0;                                                                              \
        while (!(condition) && seconds() < until_) world_turn(world);                                                  \
        check(condition, "never came true: %s", #condition);                                                           \
    } while (0)

// bytes (n) of message `channel` between two nodes
static void world_fill(unsigned char *bytes, int64_t n, uint32_t from, uint32_t to, uint64_t channel) {
    uint32_t start = rand_block(channel, RAND_TEST, 41, (uint64_t)from << 32 | to).v[0];
    for (int64_t i = 0; i < n; i++) bytes[i] = (unsigned char)((start + (uint32_t)i * 2654435761u) >> 19);
}

static void world_message(World *world, uint32_t to, const NetEvent *event) {
    Spot *spot = &world->spots[to];
    int64_t n = (int64_t)(event->channel & 0xFFFFFFFFu);
    uint32_t *next = &spot->next[event->from % WORLD_NODES][event->control != 0];
    if (!check(event->n_bytes == n && event->channel >> 32 == *next,
               "%u got message %llu of %lld bytes from %u, not %u", to, (unsigned long long)(event->channel >> 32),
               (long long)event->n_bytes, event->from, *next))
        return;
    unsigned char *expected = (unsigned char *)malloc((size_t)n + 1);
    world_fill(expected, n, event->from, to, event->channel);
    check(n == 0 || memcmp(expected, event->data, (size_t)n) == 0, "%u got other bytes from %u", to, event->from);
    check(event->generation == event->from + 7, "the generation is %u", event->generation);
    free(expected);
    (*next)++;
    if (event->control) spot->bytes_before = spot->bytes;
    spot->bytes += n;
}

static void world_turn(World *world) {
    NetEvent event;
    if (world->spots[0].net != NULL) net_wait(world->spots[0].net, 0.005);
    for (uint32_t id = 0; id < (uint32_t)world->n; id++) {
        Spot *spot = &world->spots[id];
        while (spot->net != NULL && net_next(spot->net, &event) == 1) {
            if (event.kind == NET_MESSAGE) world_message(world, id, &event);
            free(event.data);
            event.data = NULL;
            spot->seen[event.kind] = event, spot->n_seen[event.kind]++;
        }
    }
}

static int world_saw(const World *world, int id, int kind) {
    return world->spots[id].n_seen[kind];
}

static void world_send(World *world, uint32_t from, uint32_t to, int control, int number, int64_t n) {
    unsigned char *bytes = (unsigned char *)malloc((size_t)n + 1);
    uint64_t channel = (uint64_t)number << 32 | (uint64_t)n;
    world_fill(bytes, n, from, to, channel);
    check(net_send(world->spots[from].net, to, control, channel, bytes, n) == 0, "%s", error_message);
    free(bytes);
}

// Node 0. beat: 0.2 where the test waits for what takes some beats, 1 where no delay of the machine may look like
// one.
static void world_host(World *world, double beat, int64_t inbox_bytes) {
    memset(world, 0, sizeof *world);
    world->limits.beat = beat, world->limits.inbox_bytes = inbox_bytes;
    check(net_keys_make(&world->keys) == 0, "%s", error_message);
    world->spots[0].net = net_host("tcp://127.0.0.1:*", &world->keys, &world->limits), world->n = 1;
    if (!check(world->spots[0].net != NULL, "%s", error_message)) exit(1);
    net_generation(world->spots[0].net, 7);
}

static NetToken world_token(const World *world, int port) {
    char endpoint[64], text[NET_TOKEN];
    NetToken token;
    snprintf(endpoint, sizeof endpoint, "tcp://127.0.0.1:%d", port);
    if (port == 0) snprintf(endpoint, sizeof endpoint, "%.60s", net_endpoint(world->spots[0].net));
    check(net_token_print(text, sizeof text, &world->keys, endpoint) == 0 && net_token_parse(&token, text) == 0, "%s",
          error_message);
    return token;
}

// Answers the hello that is there, or comes: the one at `spots[id]` becomes node id.
static void world_admit(World *world, uint32_t id) {
    WORLD_UNTIL(world, world_saw(world, 0, NET_HELLO) > 0);
    world->spots[0].n_seen[NET_HELLO] = 0;
    check(net_admit(world->spots[0].net, world->spots[0].seen[NET_HELLO].from, id) == 0, "%s", error_message);
    WORLD_UNTIL(world, world_saw(world, (int)id, NET_ADMITTED) > 0);
    world->spots[id].n_seen[NET_ADMITTED] = 0;
    check(world->spots[id].seen[NET_ADMITTED].from == id, "was admitted as %u",
          world->spots[id].seen[NET_ADMITTED].from);
}

// The next node, dialling the coordinator over `proxy` if that is not NULL.
static void world_join(World *world, Proxy *proxy, const char *listen) {
    NetToken token = world_token(world, proxy != NULL ? proxy->port : 0);
    uint32_t id = (uint32_t)world->n++;
    world->spots[id].net = net_join(&token, listen, &world->limits);
    if (!check(world->spots[id].net != NULL, "%s", error_message)) exit(1);
    net_generation(world->spots[id].net, id + 7);
    world_admit(world, id);
}

static void world_peer(World *world, uint32_t a, uint32_t b, const char *endpoint_of_b) {
    Net *one = world->spots[a].net, *other = world->spots[b].net;
    check(net_peer(one, b, endpoint_of_b, net_public_key(other)) == 0, "%s", error_message);
    check(net_peer(other, a, NULL, net_public_key(one)) == 0, "%s", error_message);
}

static void world_end(World *world) {
    for (int id = 0; id < world->n; id++) net_close(world->spots[id].net);
}

static NetStatus world_status(World *world, int id, uint32_t of) {
    NetStatus status;
    check(net_status(world->spots[id].net, of, &status) == 0, "%s", error_message);
    return status;
}

static int world_got(const World *world, int to, int from, int control) {
    return (int)world->spots[to].next[from][control];
}

// ---------------------------------------------------------------------------------------------------------------------

static void test_net_token(void) {
    NetKeys keys, loaded;
    NetToken token;
    char text[NET_TOKEN], wrong[NET_TOKEN + 8], path[PATH_MAX], at[PATH_MAX + 1];
    struct stat info;
    check(net_keys_make(&keys) == 0, "%s", error_message);
    check(net_token_print(text, sizeof text, &keys, "tcp://node-1.example.org:29500") == 0, "%s", error_message);
    check(strlen(text) == 30 + 5 + 128, "the token has %zu characters", strlen(text));
    check(net_token_parse(&token, text) == 0 && strcmp(token.endpoint, "tcp://node-1.example.org:29500") == 0 &&
              strcmp(token.server_public, keys.server_public) == 0 && strcmp(token.run_secret, keys.run_secret) == 0 &&
              strcmp(token.run_public, keys.run_public) == 0,
          "the token reads otherwise");
    check(strstr(text, keys.server_secret) == NULL, "the token has the coordinator's secret");
    check_error(net_token_print(wrong, 64, &keys, "tcp://a:1"), "does not fit", "a small buffer");
    check_error(net_token_print(wrong, sizeof wrong, &keys, "tcp://0.0.0.0:*"), "cannot be dialled", "a port of any");
    static const char *const prefixes[][2] = {
        {"http://a:1", "tcp://"},          {"tcp://a:0", "HOST:PORT"}, {"tcp://a:65536", "HOST:PORT"},
        {"tcp://a:1x", "HOST:PORT"},       {"tcp://:1", "HOST:PORT"},  {"tcp://a b:1", "character"},
        {"tcp://a", "HOST:PORT"},          {"tcp://a:", "HOST:PORT"},  {"", "tcp://"},
        {"tcp://*:1", "cannot be dialled"}};
    for (int i = 0; i < 10; i++) {
        snprintf(wrong, sizeof wrong, "%s%s", prefixes[i][0], strchr(text, '?'));
        check_error(net_token_parse(&token, wrong), prefixes[i][1], prefixes[i][0]);
    }
    snprintf(wrong, sizeof wrong, "%s0", text);
    check_error(net_token_parse(&token, wrong), "128", "a digit too many");
    wrong[strlen(text) - 1] = '\0';
    check_error(net_token_parse(&token, wrong), "128", "a digit too few");
    snprintf(wrong, sizeof wrong, "%s", text);
    wrong[strlen(wrong) - 1] = 'g';
    check_error(net_token_parse(&token, wrong), "hexadecimal", "a letter that is no digit");
    check(strstr(error_message, strchr(text, '=') + 60) == NULL, "the message shows the key");

    check(path_join(path, test_folder, "net_token_keys") == 0 && net_keys_save(&keys, path) == 0, "%s", error_message);
    check(stat(path, &info) == 0 && (info.st_mode & 0777) == 0600, "the key file has mode %o", info.st_mode & 0777);
    check(net_keys_load(&loaded, path) == 0 && memcmp(&loaded, &keys, sizeof keys) == 0, "other keys come back");
    check(truncate(path, info.st_size - 2) == 0, "truncate");
    check_error(net_keys_load(&loaded, path), "not a key file", "a cut key file");
    snprintf(wrong, sizeof wrong, "%s\n", text);
    check(file_write_text(path, wrong) == 0, "%s", error_message);
    snprintf(at, sizeof at, "@%s", path);
    check(net_token_parse(&token, at) == 0, "%s", error_message);
    setenv("TEST_NET_TOKEN", text, 1);
    check(net_token_parse(&token, "env:TEST_NET_TOKEN") == 0, "%s", error_message);
    check_error(net_token_parse(&token, "env:TEST_NET_NONE"), "not set", "no variable");
    check_error(net_token_parse(&token, "@/nonexistent"), "open", "no file");
}

static int64_t net_test_size(int k) {
    static const int64_t sizes[] = {0, 1, FRAME_PIECE - 1, FRAME_PIECE, FRAME_PIECE + 1, 10000000};
    return sizes[k];
}

// Coordinator and two joiners, one of which can be dialled: all sizes, both classes, all six ways.
static void test_net_messages(void) {
    World world;
    world_host(&world, 1.0, 0);
    world_join(&world, NULL, NULL);
    world_join(&world, NULL, "tcp://127.0.0.1:*");
    check(world.spots[0].seen[NET_HELLO].port > 0 && strcmp(world.spots[0].seen[NET_HELLO].text, "127.0.0.1") == 0 &&
              strcmp(world.spots[0].seen[NET_HELLO].public_key, net_public_key(world.spots[2].net)) == 0,
          "the hello says other things: %s", world.spots[0].seen[NET_HELLO].text);
    world_peer(&world, 1, 2, net_endpoint(world.spots[2].net));
    net_progress(world.spots[1].net, 12345);
    WORLD_UNTIL(&world, world_status(&world, 1, 2).route == NET_ROUTE_DIRECT);
    WORLD_UNTIL(&world, world_status(&world, 2, 1).route == NET_ROUTE_DIRECT);
    for (uint32_t from = 0; from < 3; from++) {
        for (uint32_t to = 0; to < 3; to++) {
            if (from == to) continue;
            for (int k = 0; k < 6; k++) world_send(&world, from, to, 0, k, net_test_size(k));
            for (int k = 0; k < 5; k++) world_send(&world, from, to, 1, k, net_test_size(k));
        }
    }
    for (int from = 0; from < 3; from++) {
        for (int to = 0; to < 3; to++) {
            if (from == to) continue;
            WORLD_UNTIL(&world, world_got(&world, to, from, 0) == 6 && world_got(&world, to, from, 1) == 5);
            WORLD_UNTIL(&world, net_queued(world.spots[from].net, (uint32_t)to) == 0);
        }
    }
    WORLD_UNTIL(&world, world_status(&world, 0, 1).progress == 12345 && world_status(&world, 2, 1).progress == 12345);
    NetStatus status = world_status(&world, 1, 2);
    check(status.route == NET_ROUTE_DIRECT && status.relayed_up == 0 && status.relayed_down == 0, "not direct");
    check(status.payload_up == 10000000 + 2 * (3 * FRAME_PIECE + 1), "payload %lld", (long long)status.payload_up);
    check(status.wire_up > status.payload_up && status.payload_down == status.payload_up && status.up_rate > 0.0 &&
              status.unacknowledged == 0 && status.queued == 0,
          "the counts do not fit");
    check_error(net_send(world.spots[0].net, 9, 0, 0, "", 0), "not known", "a message to nobody");
    world_end(&world);
}

// A connection that does not know CURVE, or not our keys, over a socket of our own.
static void *net_test_stranger(void *context, const char *endpoint, const NetToken *token) {
    void *socket = zmq_socket(context, ZMQ_DEALER);
    net_option(socket, ZMQ_LINGER, 0);
    if (token != NULL) {
        net_option_text(socket, ZMQ_CURVE_SERVERKEY, token->server_public);
        net_option_text(socket, ZMQ_CURVE_PUBLICKEY, token->run_public);
        net_option_text(socket, ZMQ_CURVE_SECRETKEY, token->run_secret);
    }
    check(zmq_connect(socket, endpoint) == 0, "no connection");
    return socket;
}

// A line that says `part` comes, and where from.
static void check_intruder(World *world, int id, const char *part, const char *what) {
    const NetEvent *seen = &world->spots[id].seen[NET_INTRUDER];
    world->spots[id].n_seen[NET_INTRUDER] = 0;
    double until = seconds() + 30.0;
    while (seconds() < until && (world_saw(world, id, NET_INTRUDER) == 0 || strstr(seen->text, part) == NULL))
        world_turn(world);
    check(world_saw(world, id, NET_INTRUDER) > 0 && strstr(seen->text, part) != NULL, "%s: the line is '%s'", what,
          seen->text);
    check(strncmp(seen->text, "127.0.0.1: ", 11) == 0 || strncmp(seen->text, "a connection: ", 14) == 0,
          "%s: no address in '%s'", what, seen->text);
}

// Each hostile act is refused for its reason; a good joiner is served beside.
static void test_net_refused(void) {
    World world;
    NetKeys other;
    void *context = zmq_ctx_new(), *stranger;
    world_host(&world, 0.2, 0);
    world_join(&world, NULL, NULL);
    world_join(&world, NULL, "tcp://127.0.0.1:*");
    const char *endpoint = net_endpoint(world.spots[0].net);
    NetToken good = world_token(&world, 0), wrong = good;
    check(net_keys_make(&other) == 0, "%s", error_message);

    snprintf(wrong.run_public, sizeof wrong.run_public, "%s", other.run_public);
    snprintf(wrong.run_secret, sizeof wrong.run_secret, "%s", other.run_secret);
    stranger = net_test_stranger(context, endpoint, &wrong);
    check_intruder(&world, 0, "not this run's", "a wrong capability");
    zmq_close(stranger);
    wrong = good;
    snprintf(wrong.server_public, sizeof wrong.server_public, "%s", other.server_public);
    stranger = net_test_stranger(context, endpoint, &wrong);
    check_intruder(&world, 0, "CURVE", "a wrong key of the coordinator");
    zmq_close(stranger);
    stranger = net_test_stranger(context, endpoint, NULL);
    check_intruder(&world, 0, "CURVE", "no CURVE");
    zmq_close(stranger);
    stranger = net_test_stranger(context, endpoint, &good); // it may connect; what it says is none of ours
    zmq_send(stranger, "nonsense", 8, 0);
    check_intruder(&world, 0, "another form", "a routing id of another length");
    zmq_close(stranger);

    wrong = good; // a peer's ROUTER: dialled by a key that net_peer has not named
    snprintf(wrong.server_public, sizeof wrong.server_public, "%s", net_public_key(world.spots[2].net));
    stranger = net_test_stranger(context, net_endpoint(world.spots[2].net), &wrong);
    check_intruder(&world, 2, "no peer's", "an unknown peer");
    zmq_close(stranger);
    zmq_ctx_term(context);

    world_send(&world, 1, 0, 1, 0, 10);
    world_send(&world, 0, 1, 0, 0, 1000000);
    WORLD_UNTIL(&world, world_got(&world, 0, 1, 1) == 1 && world_got(&world, 1, 0, 0) == 1);
    world_end(&world);
}

// A frame in another node's name, one that is too long for the receiver, a message beyond the limit: none comes out.
static void test_net_hostile(void) {
    World world;
    unsigned char bytes[FRAME_HEADER + 42], answer[FRAME_HEADER + 1];
    void *context = zmq_ctx_new(), *stranger;
    Frame frame;
    world_host(&world, 0.2, 0);
    world_join(&world, NULL, NULL);
    NetToken token = world_token(&world, 0);
    stranger = zmq_socket(context, ZMQ_DEALER);
    net_option(stranger, ZMQ_LINGER, 0);
    zmq_setsockopt(stranger, ZMQ_ROUTING_ID, "Cabcdefghijklmnop", NET_ID);
    net_option_text(stranger, ZMQ_CURVE_SERVERKEY, token.server_public);
    net_option_text(stranger, ZMQ_CURVE_PUBLICKEY, token.run_public);
    net_option_text(stranger, ZMQ_CURVE_SECRETKEY, token.run_secret);
    check(zmq_connect(stranger, token.endpoint) == 0, "no connection");

    memset(&frame, 0, sizeof frame);
    memset(bytes, 'k', sizeof bytes);
    frame.kind = FRAME_HELLO, frame.from = NET_NOBODY, frame.seq = 1, frame.total = frame.piece_bytes = 42;
    frame_write_header(bytes, &frame);
    zmq_send(stranger, bytes, sizeof bytes, 0);
    WORLD_UNTIL(&world, world_saw(&world, 0, NET_HELLO) > 0);
    check(net_admit(world.spots[0].net, world.spots[0].seen[NET_HELLO].from, 2) == 0, "%s", error_message);
    net_option(stranger, ZMQ_RCVTIMEO, 30000);
    check(zmq_recv(stranger, answer, sizeof answer, 0) == FRAME_HEADER && answer[6] == FRAME_ADMIT, "not admitted");

    frame.kind = FRAME_DATA, frame.stream = FRAME_CONTROL, frame.from = 1, frame.epoch = 1ull << 62, frame.seq = 0;
    frame_write_header(bytes, &frame);
    zmq_send(stranger, bytes, sizeof bytes, 0);
    check_intruder(&world, 0, "another node's name", "a frame of node 1 from node 2");
    check(world.spots[0].seen[NET_INTRUDER].from == 2, "the wrong one is accused");
    zmq_send(stranger, bytes, 50, 0);
    check_intruder(&world, 0, "frame", "a short frame");
    zmq_send(stranger, bytes, sizeof bytes, ZMQ_SNDMORE);
    zmq_send(stranger, bytes, sizeof bytes, 0);
    check_intruder(&world, 0, "another form", "a message of two parts");
    unsigned char *large = (unsigned char *)calloc(1, FRAME_MAX);
    frame.from = 2, frame.total = 1ll << 50, frame.piece_bytes = FRAME_PIECE;
    frame_write_header(large, &frame);
    zmq_send(stranger, large, FRAME_MAX, 0);
    check_intruder(&world, 0, "at most", "a message beyond the limit");
    free(large);
    frame.to = 1, frame.kind = FRAME_ADMIT, frame.total = frame.piece_bytes = 0; // not for us to pass on
    frame_write_header(bytes, &frame);
    zmq_send(stranger, bytes, FRAME_HEADER, 0);
    world_send(&world, 1, 0, 1, 0, 10);
    WORLD_UNTIL(&world, world_got(&world, 0, 1, 1) == 1);
    check(world_saw(&world, 0, NET_MESSAGE) == 1 && world_saw(&world, 1, NET_ADMITTED) == 0, "the stranger was heard");
    check(world_status(&world, 0, 1).relayed_up == 0, "something was passed on");
    zmq_close(stranger);
    zmq_ctx_term(context);
    world_end(&world);
}

// 60 MB wait for a slow link; a control message that is sent after them is there after what a link has under way.
static void test_net_overtake(void) {
    World world;
    world_host(&world, 0.2, 0);
    Proxy *proxy = proxy_start(net_endpoint(world.spots[0].net));
    proxy_speed(proxy, 2e6, 0.01);
    world_join(&world, proxy, NULL);
    for (int k = 0; k < 600; k++) world_send(&world, 1, 0, 0, k, 100000);
    WORLD_UNTIL(&world, proxy_passed(proxy, 0) > 2000000);
    int64_t passed = proxy_passed(proxy, 0);
    world_send(&world, 1, 0, 1, 0, 100);
    WORLD_UNTIL(&world, world_got(&world, 0, 1, 1) == 1);
    passed = world.spots[0].bytes_before - passed;
    check(passed < 1500000, "%lld bytes came before control", (long long)passed);
    NetStatus status = world_status(&world, 1, 0);
    check(status.silence < 5.0 && status.deafness < 5.0, "beats waited: %g s, %g s", status.silence, status.deafness);
    proxy_speed(proxy, 0.0, 0.0);
    WORLD_UNTIL(&world, world_got(&world, 0, 1, 0) == 600);
    status = world_status(&world, 1, 0);
    check(status.resent < 5000000, "%lld bytes were sent again over a slow link", (long long)status.resent);
    world_end(&world);
    proxy_stop(proxy);
}

// The link is cut again and again in the middle of messages in each direction, at least eight times and until one was
// lost, every other time only for the joiner: the coordinator still has its old connection when it dials anew.
static void test_net_reconnect(void) {
    World world;
    double start = seconds();
    world_host(&world, 0.2, 0);
    Proxy *proxy = proxy_start(net_endpoint(world.spots[0].net));
    world_join(&world, proxy, NULL);
    proxy_speed(proxy, 30e6, 0.0);
    int cut = 0;
    for (; cut < 8 || (cut < 40 && world_status(&world, 1, 0).resent == 0); cut++) {
        int64_t passed = proxy_passed(proxy, 0);
        for (int k = 3 * cut; k < 3 * cut + 3; k++)
            for (int from = 0; from < 2; from++) world_send(&world, (uint32_t)from, (uint32_t)!from, 0, k, 2000000);
        for (int from = 0; from < 2; from++) world_send(&world, (uint32_t)from, (uint32_t)!from, 1, cut, cut);
        WORLD_UNTIL(&world, proxy_passed(proxy, 0) > passed + 4000000);
        proxy_change(proxy, &proxy->cut, 1 + cut % 2);
    }
    proxy_speed(proxy, 0.0, 0.0);
    WORLD_UNTIL(&world, world_got(&world, 0, 1, 0) == 3 * cut && world_got(&world, 1, 0, 0) == 3 * cut);
    WORLD_UNTIL(&world, world_got(&world, 0, 1, 1) == cut && world_got(&world, 1, 0, 1) == cut);
    WORLD_UNTIL(&world, net_queued(world.spots[0].net, 1) == 0 && net_queued(world.spots[1].net, 0) == 0);
    check(world_status(&world, 1, 0).resent > 0, "nothing was lost: the test does not test");
    check(seconds() - start < 40.0, "it took %.0f s: who dials anew waits for its old connection", seconds() - start);
    world_end(&world);
    proxy_stop(proxy);
}

// 1 if node a hears node b and knows that it is not heard, both at once: however slow the machine is, that comes.
static int hears_unheard(World *world, int a, int b) {
    NetStatus status = world_status(world, a, (uint32_t)b);
    return status.deafness > 3.0 && status.silence < 2.0;
}

// A link that carries one direction only: who hears nothing sees silence, who is not heard sees deafness.
static void test_net_one_way(void) {
    World world;
    world_host(&world, 0.2, 0);
    Proxy *proxy = proxy_start(net_endpoint(world.spots[0].net));
    world_join(&world, proxy, NULL);
    WORLD_UNTIL(&world, world_status(&world, 0, 1).deafness < 1.0 && world_status(&world, 1, 0).deafness < 1.0);
    for (int down = 0; down < 2; down++) {
        proxy_hold(proxy, !down, down);
        int deaf = down ? 1 : 0, dumb = 1 - deaf; // ids
        WORLD_UNTIL(&world, world_status(&world, deaf, (uint32_t)dumb).silence > 3.0);
        WORLD_UNTIL(&world, hears_unheard(&world, dumb, deaf));
        proxy_hold(proxy, 0, 0);
        WORLD_UNTIL(&world, world_status(&world, 0, 1).deafness < 1.0 && world_status(&world, 1, 0).deafness < 1.0 &&
                                world_status(&world, 0, 1).silence < 1.0 && world_status(&world, 1, 0).silence < 1.0);
    }
    world_end(&world);
    proxy_stop(proxy);
}

// Peers without a way of their own use the relay; with one, until it is blackholed; and again when it comes back.
static void test_net_relay(void) {
    World world;
    world_host(&world, 0.4, 0);
    world_join(&world, NULL, NULL);
    world_join(&world, NULL, "tcp://127.0.0.1:*");
    Proxy *proxy = proxy_start(net_endpoint(world.spots[2].net));
    char endpoint[64];
    world_peer(&world, 1, 2, NULL);
    world_send(&world, 1, 2, 0, 0, 3000000);
    world_send(&world, 2, 1, 1, 0, 100);
    WORLD_UNTIL(&world, world_got(&world, 2, 1, 0) == 1 && world_got(&world, 1, 2, 1) == 1);
    NetStatus status = world_status(&world, 1, 2);
    check(status.route == NET_ROUTE_RELAY && status.relayed_up >= 3000000, "not relayed: %lld",
          (long long)status.relayed_up);
    check(world_status(&world, 0, 1).relayed_down >= 3000000 && world_status(&world, 0, 2).relayed_up >= 3000000,
          "the coordinator has not counted");

    snprintf(endpoint, sizeof endpoint, "tcp://127.0.0.1:%d", proxy->port);
    check(net_peer(world.spots[1].net, 2, endpoint, net_public_key(world.spots[2].net)) == 0, "%s", error_message);
    WORLD_UNTIL(&world, world_status(&world, 1, 2).route == NET_ROUTE_DIRECT);
    WORLD_UNTIL(&world, world_status(&world, 2, 1).route == NET_ROUTE_DIRECT);
    proxy_speed(proxy, 1e6, 0.0); // seconds for what follows
    int64_t passed = proxy_passed(proxy, 0), relayed = world_status(&world, 1, 2).relayed_up;
    for (int k = 1; k < 11; k++) world_send(&world, 1, 2, 0, k, 1000000), world_send(&world, 2, 1, 0, k - 1, 1000000);
    WORLD_UNTIL(&world, proxy_passed(proxy, 0) > passed + 1500000);
    check(world_status(&world, 1, 2).relayed_up < relayed + 10000, "relayed beside a direct way");
    proxy_hold(proxy, 1, 1);
    WORLD_UNTIL(&world, world_got(&world, 2, 1, 0) == 11 && world_got(&world, 1, 2, 0) == 10);
    check(world_status(&world, 1, 2).route == NET_ROUTE_RELAY &&
              world_status(&world, 1, 2).relayed_up > relayed + 1000000,
          "it all came, but not by the relay");
    proxy_hold(proxy, 0, 0);
    WORLD_UNTIL(&world, world_status(&world, 1, 2).route == NET_ROUTE_DIRECT);
    world_send(&world, 1, 2, 1, 0, 5);
    WORLD_UNTIL(&world, world_got(&world, 2, 1, 1) == 1);
    world_end(&world);
    proxy_stop(proxy);
}

// A node that is gone is silent; one that was dropped is told, may ask again and goes on under another id; a refused
// one hears why.
static void test_net_unknown(void) {
    World world;
    world_host(&world, 0.2, 0);
    world_join(&world, NULL, NULL);
    world_join(&world, NULL, NULL);
    net_close(world.spots[2].net);
    world.spots[2].net = NULL;
    WORLD_UNTIL(&world, world_status(&world, 0, 2).silence > 2.0);
    check(world_status(&world, 0, 1).silence < 1.0, "the living one is silent");
    world_send(&world, 0, 2, 0, 0, 1000);
    check(net_queued(world.spots[0].net, 2) == 1000, "bytes for a dead node are not queued");
    net_drop(world.spots[0].net, 2);
    check(net_queued(world.spots[0].net, 2) == 0, "bytes for a dropped node are queued");

    world_send(&world, 1, 0, 0, 0, 700000);
    WORLD_UNTIL(&world, world_got(&world, 0, 1, 0) == 1);
    net_drop(world.spots[0].net, 1);
    WORLD_UNTIL(&world, world_saw(&world, 1, NET_UNKNOWN) > 0);
    check_error(net_send(world.spots[1].net, 0, 0, 0, "", 0), "not known", "a message without an id");
    net_hello(world.spots[1].net);
    WORLD_UNTIL(&world, world_saw(&world, 0, NET_HELLO) > 0);
    check(net_refuse(world.spots[0].net, world.spots[0].seen[NET_HELLO].from, "no place\n") == 0, "%s", error_message);
    world.spots[0].n_seen[NET_HELLO] = 0;
    WORLD_UNTIL(&world, world_saw(&world, 1, NET_REFUSED) > 0);
    check(strcmp(world.spots[1].seen[NET_REFUSED].text, "no place?") == 0, "it hears '%s'",
          world.spots[1].seen[NET_REFUSED].text);
    world.spots[2] = world.spots[1]; // the same process gets another id
    world.spots[1].net = NULL;
    net_generation(world.spots[2].net, 9);
    net_hello(world.spots[2].net);
    world_admit(&world, 2);
    world.spots[0].next[2][0] = 0, world.spots[2].next[0][0] = 0;
    world_send(&world, 2, 0, 0, 0, 700000);
    world_send(&world, 0, 2, 0, 0, 700000);
    WORLD_UNTIL(&world, world_got(&world, 0, 2, 0) == 1 && world_got(&world, 2, 0, 0) == 1);
    check(world_saw(&world, 2, NET_UNKNOWN) == 1, "it was told more than once");

    char endpoint[NET_ENDPOINT]; // the coordinator dies and comes back at the same address, knowing nobody
    snprintf(endpoint, sizeof endpoint, "%s", net_endpoint(world.spots[0].net));
    net_close(world.spots[0].net);
    world.spots[0].net = NULL;
    while (world.spots[0].net == NULL) world.spots[0].net = net_host(endpoint, &world.keys, &world.limits);
    net_generation(world.spots[0].net, 7);
    WORLD_UNTIL(&world, world_saw(&world, 2, NET_UNKNOWN) == 2);
    net_hello(world.spots[2].net);
    world_admit(&world, 2);
    world.spots[0].next[2][0] = 0, world.spots[2].next[0][0] = 0;
    world_send(&world, 2, 0, 0, 0, 700000);
    WORLD_UNTIL(&world, world_got(&world, 0, 2, 0) == 1);
    world_end(&world);
}

// Files in both orders of send and expect, empty, too large, to a place that is none; messages go on beside.
static void test_net_files(void) {
    World world;
    char from[PATH_MAX], to[PATH_MAX], empty[PATH_MAX];
    int64_t n = 5 * FRAME_PIECE + 77;
    unsigned char *bytes = (unsigned char *)malloc((size_t)n);
    FileMap map;
    FileWriter writer;
    world_fill(bytes, n, 1, 2, 3);
    world_host(&world, 0.2, 0);
    world_join(&world, NULL, NULL);
    check(path_join(from, test_folder, "net_file") == 0 && path_join(to, test_folder, "net_file_copy") == 0 &&
              path_join(empty, test_folder, "net_file_empty") == 0,
          "%s", error_message);
    check(file_writer_open(&writer, from) == 0, "%s", error_message);
    file_write(&writer, bytes, (size_t)n);
    check(file_writer_close(&writer) == 0 && file_write_text(empty, "") == 0, "%s", error_message);

    check(net_send_file(world.spots[1].net, 0, 40, from) == 0, "%s", error_message);
    world_send(&world, 1, 0, 0, 0, 3000000);
    WORLD_UNTIL(&world, world_got(&world, 0, 1, 0) == 1); // the file waits, not what comes after it
    check(world_saw(&world, 0, NET_FILE) == 0 && world_saw(&world, 1, NET_FILE_SENT) == 0, "a file nobody expects");
    check(net_expect_file(world.spots[0].net, 1, 40, to, n) == 0, "%s", error_message);
    WORLD_UNTIL(&world, world_saw(&world, 0, NET_FILE) == 1 && world_saw(&world, 1, NET_FILE_SENT) == 1);
    check(world.spots[0].seen[NET_FILE].channel == 40 && world.spots[0].seen[NET_FILE].n_bytes == n &&
              strcmp(world.spots[0].seen[NET_FILE].text, to) == 0,
          "the event tells of '%s'", world.spots[0].seen[NET_FILE].text);
    check(file_map(&map, to) == 0 && map.size == (size_t)n && memcmp(map.data, bytes, (size_t)n) == 0, "other bytes");
    file_unmap(&map);

    check(net_expect_file(world.spots[1].net, 0, 41, to, n) == 0, "%s", error_message);
    check(net_send_file(world.spots[0].net, 1, 41, empty) == 0, "%s", error_message);
    WORLD_UNTIL(&world, world_saw(&world, 1, NET_FILE) == 1);
    check(file_map(&map, to) == 0 && map.size == 0, "an empty file has %zu bytes", map.size);
    check(net_expect_file(world.spots[1].net, 0, 42, to, n - 1) == 0, "%s", error_message);
    check(net_send_file(world.spots[0].net, 1, 42, from) == 0, "%s", error_message);
    WORLD_UNTIL(&world, world_saw(&world, 1, NET_FILE_FAILED) == 1);
    check(strstr(world.spots[1].seen[NET_FILE_FAILED].text, "at most") != NULL, "too large: %s",
          world.spots[1].seen[NET_FILE_FAILED].text);
    check(net_expect_file(world.spots[1].net, 0, 43, test_folder, n) == 0, "%s", error_message);
    check(net_send_file(world.spots[0].net, 1, 43, from) == 0, "%s", error_message);
    WORLD_UNTIL(&world, world_saw(&world, 1, NET_FILE_FAILED) == 2);
    check(net_expect_file(world.spots[1].net, 0, 44, to, n) == 0, "%s", error_message);
    check(net_send_file(world.spots[0].net, 1, 44, from) == 0, "%s", error_message);
    WORLD_UNTIL(&world, world_saw(&world, 1, NET_FILE) == 2); // the stream has gone on
    check_error(net_send_file(world.spots[0].net, 1, 45, "/nonexistent"), "open", "no file");
    check_error(net_send_file(world.spots[0].net, 1, 45, test_folder), "regular", "a folder");
    world_end(&world);
    free(bytes);
}

// Nobody takes what comes: the inbox stays bounded, and all arrives once somebody does.
static void test_net_inbox(void) {
    World world;
    world_host(&world, 0.2, 4000000);
    world_join(&world, NULL, NULL);
    for (int k = 0; k < 20; k++) world_send(&world, 1, 0, 0, k, 1000000);
    Net *host = world.spots[0].net;
    int64_t most = 0;
    for (double start = seconds(); seconds() < start + 1.0;) { // long enough for all of them
        pthread_mutex_lock(&host->lock);
        if (host->inbox_bytes > most) most = host->inbox_bytes;
        pthread_mutex_unlock(&host->lock);
        net_wait(world.spots[1].net, 0.01);
    }
    check(most > 3000000 && most < 6000000, "%lld bytes in the inbox", (long long)most);
    check(world_status(&world, 1, 0).silence < 1.0, "beats wait for the inbox");
    WORLD_UNTIL(&world, world_got(&world, 0, 1, 0) == 20);
    world_end(&world);
}

// A peer that is stopped (its link takes nothing) keeps nobody: callers go on, closing ends at once.
static void test_net_close(void) {
    World world;
    world_host(&world, 0.2, 0);
    Proxy *proxy = proxy_start(net_endpoint(world.spots[0].net));
    world_join(&world, proxy, NULL);
    world_join(&world, NULL, NULL);
    proxy_hold(proxy, 1, 1);
    for (int k = 0; k < 3; k++) world_send(&world, 0, 1, 0, k, 10000000), world_send(&world, 1, 0, 0, k, 10000000);
    world_send(&world, 0, 2, 0, 0, 10000000);
    WORLD_UNTIL(&world, world_got(&world, 2, 0, 0) == 1);
    WORLD_UNTIL(&world, world_status(&world, 0, 1).silence > 1.0);
    for (int id = 0; id < 3; id++) {
        double start = seconds();
        net_close(world.spots[id].net);
        check(seconds() - start < 2.0, "closing node %d took %.1f s", id, seconds() - start);
    }
    proxy_stop(proxy);
    Net *alone = NULL; // a port that is taken, an endpoint that is none
    NetKeys keys;
    check(net_keys_make(&keys) == 0, "%s", error_message);
    alone = net_host("tcp://127.0.0.1:*", &keys, NULL);
    check(net_host(net_endpoint(alone), &keys, NULL) == NULL && strstr(error_message, "bind") != NULL,
          "a taken port: %s", error_message);
    check(net_host("udp://127.0.0.1:*", &keys, NULL) == NULL && strstr(error_message, "tcp://") != NULL, "%s",
          error_message);
    net_wake(alone);
    check(net_wait(alone, 60.0) == 0, "a wake is an event");
    net_close(alone);
}
#endif

#endif
