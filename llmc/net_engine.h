// The network's thread. One pass: commands of callers, who may connect, frames that came (control first), what is due
// by the clock, acknowledgements, frames that may go (control of all nodes first), then what callers see. Nothing in a
// pass waits; between passes it sleeps in zmq_poll until something comes or is due.
//
// Two joiners have up to two ways to each other. The smaller id dials, if it was told an endpoint; both then send
// probes each beat and choose on their own, streams sort out what comes over which way:
//
//   NONE   --probes go and come back-->  DIRECT         3 beats without, or nobody can dial --> RELAY
//   DIRECT --5 beats without a probe or its echo, or 10 without an acknowledgement, while the coordinator is heard-->
//   RELAY RELAY  --probes go and come back, and the last change is 5 beats (30 after 10 without acknowledgement) ago-->
//   DIRECT
#ifndef LLMC_NET_ENGINE_H
#define LLMC_NET_ENGINE_H

#include <fcntl.h>  // open
#include <stddef.h> // offsetof

#include "net_socket.h"

enum { NET_BURST = 64 /* frames of a socket, or sent, in one pass */ };
#define NET_DIRECT_WAIT   3.0 // beats
#define NET_DIRECT_SILENT 5.0
#define NET_DIRECT_STUCK  10.0
#define NET_DIRECT_BARRED 30.0
#define NET_REDIAL        10.0 // beats without a sign of life after which a connection is dialled anew
#define NET_RATE_SECONDS  5.0  // of the mean in up_rate and down_rate

static inline double net_beats(const Net *net, double n) {
    return n * net->limits.beat;
}

// ---------------------------------------------------------------------------------------------------------------------
// Sending

// The node whose lanes carry frames to `node`: itself, the coordinator, or NULL while no way is known.
static inline NetNode *net_carrier(Net *net, NetNode *node, int route) {
    if (route == NET_ROUTE_DIRECT) return node;
    return route == NET_ROUTE_RELAY ? net_node(net, 0) : NULL;
}

static inline void net_count_way(Net *net, NetNode *node, int route, int64_t n_bytes) {
    node->status.wire_up += n_bytes;
    if (route == NET_ROUTE_RELAY) node->status.relayed_up += n_bytes, net->totals.relayed += n_bytes;
}

// Sends a frame without a message's piece. 0, or -1: not now.
static inline int net_put_small(Net *net, NetNode *node, int route, int lane, Frame *frame, const void *piece) {
    zmq_msg_t message;
    NetNode *carrier = net_carrier(net, node, route);
    int64_t n = FRAME_HEADER + frame->piece_bytes;
    if (carrier == NULL || lane_is_blocked(&carrier->lanes[lane], net->now)) return -1;
    if (zmq_msg_init_size(&message, (size_t)n) != 0) return -1;
    frame->from = net->self, frame->stamp = net_stamp();
    frame_write((unsigned char *)zmq_msg_data(&message), frame, piece);
    if (net_put(net, carrier, lane, &message)) return -1;
    net_count_way(net, node, route, n);
    return 0;
}

static inline void net_beat_way(Net *net, NetNode *node, int way) {
    Frame frame;
    int by_beat = net->is_host || node->id == 0;
    memset(&frame, 0, sizeof frame);
    frame.kind = by_beat ? FRAME_BEAT : FRAME_PROBE, frame.to = node->id;
    frame.channel = net->progress, frame.echo = node->ways[way].stamp;
    net_put_small(net, node, way == WAY_DIRECT ? NET_ROUTE_DIRECT : NET_ROUTE_RELAY, by_beat ? LANE_BEAT : LANE_CONTROL,
                  &frame, NULL);
}

static inline void net_send_acks(Net *net, NetNode *node) {
    for (int c = 0; c < FRAME_CLASSES; c++) {
        Frame frame;
        if (!node->in[c].ack_due) continue;
        receiver_ack(&node->in[c], &frame, c);
        frame.to = node->id;
        if (net_put_small(net, node, node->route, LANE_CONTROL, &frame, NULL) == 0) node->in[c].ack_due = 0;
    }
}

static inline void net_sent_file_failed(Net *net, NetNode *node, int stream, const NetMessage *message) {
    net_tell_text(net, NET_FILE_FAILED, node->id, "%s", error_message);
    NetMessage *given_up = sender_give_up(&node->out[stream], message, net_epoch(net));
    if (given_up == NULL) return;
    node->done += given_up->n_bytes;
    net_message_free(given_up);
}

// Sends the next frame of a stream, if there is one and it may go. Returns whether it did.
static inline int net_pump(Net *net, NetNode *node, int stream) {
    NetSender *out = &node->out[stream];
    int lane = stream == FRAME_CONTROL ? LANE_CONTROL : LANE_BULK;
    NetNode *carrier = net_carrier(net, node, node->route);
    const NetMessage *from;
    Frame frame;
    zmq_msg_t message;
    if (carrier == NULL || lane_is_blocked(&carrier->lanes[lane], net->now) || !sender_next(out, &frame, &from))
        return 0;
    if (zmq_msg_init_size(&message, (size_t)(FRAME_HEADER + frame.piece_bytes)) != 0) return 0;
    unsigned char *bytes = (unsigned char *)zmq_msg_data(&message);
    frame.from = net->self, frame.to = node->id, frame.stamp = net_stamp();
    frame_write_header(bytes, &frame);
    if (net_message_read(from, &frame, bytes + FRAME_HEADER)) {
        zmq_msg_close(&message);
        net_sent_file_failed(net, node, stream, from);
        return 0;
    }
    if (net_put(net, carrier, lane, &message)) return 0;
    if (out->cursor == out->end) {
        node->status.payload_up += frame.piece_bytes;
        net->totals.payload_up += frame.piece_bytes;
    }
    net_count_way(net, node, node->route, FRAME_HEADER + frame.piece_bytes);
    sender_sent(out, net->now);
    return 1;
}

// Control of all nodes, then bulk and files, a frame a node in turn.
static inline int net_pump_all(Net *net) {
    int sent = 0, moved = 1;
    for (int i = 0; i < net->n_nodes; i++) {
        net_send_acks(net, net->nodes[i]);
        while (sent < NET_BURST && net_pump(net, net->nodes[i], FRAME_CONTROL)) sent++;
    }
    while (moved && sent < NET_BURST) {
        moved = 0;
        for (int i = 0; i < net->n_nodes; i++) {
            NetNode *node = net->nodes[(net->turn + i) % net->n_nodes];
            if (net_pump(net, node, FRAME_BULK) || net_pump(net, node, FRAME_FILES)) moved = 1, sent++;
        }
        net->turn++;
    }
    return sent;
}

// ---------------------------------------------------------------------------------------------------------------------
// Receiving

static inline void net_acknowledged(Net *net, NetNode *node, const Frame *frame) {
    NetSender *out = &node->out[frame->stream];
    uint64_t base = out->base;
    NetMessage *done = sender_ack(out, frame, net->now, net->epoch + 1);
    if (net->epoch < out->epoch) net->epoch = out->epoch;
    if (out->base != base) node->moved_at = net->now;
    while (done != NULL) {
        NetMessage *next = done->next;
        node->done += done->n_bytes;
        if (done->fd >= 0) net_tell_text(net, NET_FILE_SENT, node->id, "%s", done->path);
        net_message_free(done);
        done = next;
    }
}

// Nobody takes what has come. Control has twice the room.
static inline int net_inbox_is_full(Net *net, int stream) {
    int64_t room = stream == FRAME_CONTROL ? 2 * net->limits.inbox_bytes : net->limits.inbox_bytes;
    pthread_mutex_lock(&net->lock);
    int full = net->inbox_bytes > room;
    net->inbox_was_full |= full;
    pthread_mutex_unlock(&net->lock);
    return full;
}

// Opens the file that a message of class FILES is for: its descriptor in *fd, or RECEIVER_NOWHERE, which was told.
// Returns -1 if nobody expects it yet.
static inline int net_open_expected(Net *net, NetNode *node, const Frame *frame, int *fd) {
    if (node->receiving != NULL) { // it had begun, and its sender begins again
        node->receiving->next = node->expected;
        node->expected = node->receiving;
    }
    NetExpected *expected = node->receiving = node_take_expected(node, frame->channel);
    if (expected == NULL) return -1;
    *fd = RECEIVER_NOWHERE;
    if (frame->total > expected->max_bytes) {
        net_tell_text(net, NET_FILE_FAILED, node->id, "%.160s: %lld bytes are offered, at most %lld are taken",
                      expected->path, (long long)frame->total, (long long)expected->max_bytes);
        return 0;
    }
    int file = open(expected->path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (file >= 0)
        *fd = file;
    else
        net_tell_text(net, NET_FILE_FAILED, node->id, "%.160s: open for writing: %s", expected->path, strerror(errno));
    return 0;
}

// A file is whole, or was thrown away.
static inline void net_file_arrived(Net *net, NetNode *node) {
    NetReceiver *in = &node->in[FRAME_FILES];
    NetEvent event;
    memset(&event, 0, sizeof event);
    event.kind = NET_FILE, event.from = node->id;
    event.generation = in->head.generation, event.channel = in->head.channel, event.n_bytes = in->head.total;
    snprintf(event.text, sizeof event.text, "%.255s", node->receiving->path);
    if (in->fd >= 0 && close(in->fd) != 0 && in->failed == 0) in->failed = errno;
    if (in->failed == 0)
        net_tell(net, &event);
    else if (in->fd >= 0)
        net_tell_text(net, NET_FILE_FAILED, node->id, "%.160s: write: %s", node->receiving->path, strerror(in->failed));
    in->fd = RECEIVER_MEMORY;
    free(node->receiving);
    node->receiving = NULL;
}

static inline void net_message_arrived(Net *net, NetNode *node, int stream) {
    NetReceiver *in = &node->in[stream];
    NetEvent event;
    memset(&event, 0, sizeof event);
    event.kind = NET_MESSAGE, event.from = node->id, event.control = stream == FRAME_CONTROL;
    event.generation = in->head.generation, event.channel = in->head.channel;
    event.data = in->data, event.n_bytes = in->head.total;
    in->data = NULL;
    net_tell(net, &event);
}

static inline void net_data(Net *net, NetNode *node, const Frame *frame, const unsigned char *piece) {
    NetReceiver *in = &node->in[frame->stream];
    int fd = RECEIVER_MEMORY;
    if (!receiver_is_next(in, frame)) return;
    if ((frame->stream != FRAME_FILES && net_inbox_is_full(net, frame->stream)) ||
        (frame->stream == FRAME_FILES && !in->assembling && net_open_expected(net, node, frame, &fd))) {
        receiver_postpone(in, frame);
        return;
    }
    int64_t limit = frame->stream == FRAME_CONTROL ? net->limits.control_bytes : net->limits.bulk_bytes;
    int taken = receiver_take(in, frame, piece, limit, fd);
    if (taken < 0) {
        net_tell_intruder(net, node->id, node->status.address, error_message);
        return;
    }
    node->status.payload_down += frame->piece_bytes, net->totals.payload_down += frame->piece_bytes;
    node->moved_at = net->now;
    if (taken == 1 && frame->stream == FRAME_FILES) net_file_arrived(net, node);
    if (taken == 1 && frame->stream != FRAME_FILES) net_message_arrived(net, node, frame->stream);
}

// A beat, or a probe between joiners.
static inline void net_pulse(Net *net, NetNode *node, int way, const Frame *frame) {
    NetPulse *pulse = &node->ways[way];
    double echoed = (double)frame->echo * 1e-6;
    if (frame->stamp > pulse->stamp) pulse->stamp = frame->stamp;
    if (echoed > pulse->echoed && echoed <= net_now()) pulse->echoed = echoed;
    if (frame->channel == node->status.progress) return;
    node->status.progress = frame->channel;
    node->progress_at = net->now;
}

// A checked frame of a node, by one of the ways between us.
static inline void net_deliver(Net *net, NetNode *node, int way, const Frame *frame, const unsigned char *piece) {
    int64_t n = FRAME_HEADER + frame->piece_bytes;
    node->status.wire_down += n;
    if (way == WAY_RELAY) node->status.relayed_down += n, net->totals.relayed += n;
    node->ways[way].heard = net->now;
    if (frame->kind == FRAME_DATA) net_data(net, node, frame, piece);
    if (frame->kind == FRAME_ACK) net_acknowledged(net, node, frame);
    if (frame->kind == FRAME_BEAT || frame->kind == FRAME_PROBE) net_pulse(net, node, way, frame);
}

static inline const char *net_address(zmq_msg_t *message) {
    const char *address = zmq_msg_gets(message, "Peer-Address");
    return address != NULL ? address : "an unknown address";
}

// ---------------------------------------------------------------------------------------------------------------------
// The coordinator's side

static inline void net_answer(Net *net, const unsigned char *base, int lane, Frame *frame, const void *piece) {
    zmq_msg_t message;
    if (zmq_msg_init_size(&message, (size_t)(FRAME_HEADER + frame->piece_bytes)) != 0) return;
    frame->from = net->self, frame->stamp = net_stamp();
    frame_write((unsigned char *)zmq_msg_data(&message), frame, piece);
    net_put_routed(net, base, lane, &message); // lost, it is asked for again
}

static inline void net_answer_admitted(Net *net, const NetNode *node) {
    Frame frame;
    memset(&frame, 0, sizeof frame);
    frame.kind = FRAME_ADMIT, frame.to = NET_NOBODY, frame.seq = node->nonce, frame.ack = node->id;
    net_answer(net, node->base, LANE_CONTROL, &frame, NULL);
}

static inline void net_answer_refused(Net *net, const NetGuest *guest) {
    Frame frame;
    memset(&frame, 0, sizeof frame);
    frame.kind = FRAME_REFUSE, frame.to = NET_NOBODY, frame.seq = guest->nonce;
    frame.total = frame.piece_bytes = (int64_t)strlen(guest->address);
    net_answer(net, guest->base, LANE_CONTROL, &frame, guest->address);
}

// A place for who asks: the one it has, a new one, or the oldest's.
static inline NetGuest *net_guest_place(Net *net, const unsigned char *base) {
    NetGuest *oldest = &net->guests[0];
    for (int i = 0; i < net->n_guests; i++) {
        if (memcmp(net->guests[i].base, base, NET_BASE) == 0) return &net->guests[i];
        if (net->guests[i].asked < oldest->asked) oldest = &net->guests[i];
    }
    NetGuest *place = net->n_guests < NET_MOST_GUESTS ? &net->guests[net->n_guests++] : oldest;
    memset(place, 0, sizeof *place);
    return place;
}

static inline NetGuest *net_guest(Net *net, uint32_t handle) {
    for (int i = 0; i < net->n_guests; i++)
        if (net->guests[i].handle == handle) return &net->guests[i];
    return NULL;
}

// Somebody asks for an id, each second until there is an answer. Callers are told once.
static inline void net_asked(Net *net, const unsigned char *base, const Frame *frame, const unsigned char *piece,
                             zmq_msg_t *message) {
    NetNode *node = net_node_by_base(net, base);
    NetEvent event;
    if (frame->piece_bytes != NET_KEY - 1 + 2) {
        net_tell_intruder(net, NET_NOBODY, net_address(message), "a request to join that is none");
        return;
    }
    if (node != NULL && node->nonce == frame->seq) {
        net_answer_admitted(net, node);
        return;
    }
    NetGuest *guest = net_guest_place(net, base);
    if (memcmp(guest->base, base, NET_BASE) == 0 && guest->nonce == frame->seq) {
        if (guest->refused) net_answer_refused(net, guest);
        return;
    }
    memset(guest, 0, sizeof *guest);
    memcpy(guest->base, base, NET_BASE);
    guest->nonce = frame->seq, guest->handle = net->next_handle++, guest->asked = net->now;
    memcpy(guest->key, piece, NET_KEY - 1);
    for (int i = 0; i < NET_KEY - 1; i++)
        if (guest->key[i] <= 0x20 || guest->key[i] >= 0x7F) guest->key[i] = '?'; // no key: nobody can be it
    snprintf(guest->address, sizeof guest->address, "%s", net_address(message));
    memset(&event, 0, sizeof event);
    event.kind = NET_HELLO, event.from = guest->handle, event.port = (int)frame_get(piece + NET_KEY - 1, 2);
    snprintf(event.public_key, sizeof event.public_key, "%s", guest->key);
    snprintf(event.text, sizeof event.text, "%s", guest->address);
    net_tell(net, &event);
}

// Passes a frame between two joiners on, unchanged, if the other's pipe takes it now.
static inline void net_forward(Net *net, NetNode *from, const Frame *frame, zmq_msg_t *message) {
    NetNode *to = net_node(net, frame->to);
    int64_t n = FRAME_HEADER + frame->piece_bytes;
    int lane = frame->kind == FRAME_DATA && frame->stream != FRAME_CONTROL ? LANE_BULK : LANE_CONTROL;
    from->ways[WAY_DIRECT].heard = net->now;
    from->status.wire_down += n, from->status.relayed_down += n, net->totals.relayed += n;
    if (to == NULL || !to->has_base || frame->kind > FRAME_PROBE || frame->kind == FRAME_BEAT) return;
    zmq_msg_t copy;
    zmq_msg_init(&copy);
    zmq_msg_move(&copy, message);
    if (net_put_routed(net, to->base, lane, &copy) == 0)
        to->status.wire_up += n, to->status.relayed_up += n, net->totals.relayed += n;
    else
        to->status.dropped += n;
}

// A message that came in over the coordinator's ROUTER. Its connection has the run's key; which node it is, its routing
// id says, which only that node and we know.
static inline void net_from_joiner(Net *net, const unsigned char *id, zmq_msg_t *message) {
    const unsigned char *bytes = (const unsigned char *)zmq_msg_data(message), *base = id + 1;
    Frame frame;
    NetNode *node = net_node_by_base(net, base);
    if (frame_parse(&frame, bytes, (int64_t)zmq_msg_size(message))) {
        net_tell_intruder(net, node != NULL ? node->id : NET_NOBODY, net_address(message), error_message);
        return;
    }
    if (frame.kind == FRAME_HELLO && id[0] == (unsigned char)net_lane_letters[LANE_CONTROL]) {
        net_asked(net, base, &frame, bytes + FRAME_HEADER, message);
    } else if (node == NULL) {
        if (frame.kind != FRAME_BEAT) return; // of a node that we do not know any more
        Frame unknown;
        memset(&unknown, 0, sizeof unknown);
        unknown.kind = FRAME_UNKNOWN, unknown.to = NET_NOBODY, unknown.echo = frame.stamp;
        net_answer(net, base, LANE_BEAT, &unknown, NULL);
    } else if (frame.from != node->id) {
        net_tell_intruder(net, node->id, net_address(message), "a frame in another node's name");
    } else if (frame.to == 0) {
        net_deliver(net, node, WAY_DIRECT, &frame, bytes + FRAME_HEADER);
    } else {
        net_forward(net, node, &frame, message);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// A joiner's side

static inline void net_remove_node(Net *net, NetNode *node, int linger) {
    for (int lane = 0; lane < NET_LANES; lane++) net_hang_up(node, lane, linger);
    node_free_streams(node);
    for (int i = 0; i < net->n_nodes; i++)
        if (net->nodes[i] == node) net->nodes[i] = net->nodes[--net->n_nodes];
    free(node);
}

// Streams to the coordinator begin anew.
static inline void net_renew(Net *net, NetNode *node) {
    node_free_streams(node);
    node->expected = node->receiving = NULL;
    for (int c = 0; c < FRAME_CLASSES; c++) {
        sender_init(&node->out[c], c, node->out[c].window, net_epoch(net));
        receiver_init(&node->in[c]);
    }
    node->ways[WAY_DIRECT].stamp = 0, node->ways[WAY_DIRECT].echoed = 0.0; // its clock may be another one
    memset(&node->status, 0, offsetof(NetStatus, route));
    node->created = node->moved_at = node->progress_at = node->ticked_at = net->now;
    node->ticked_up = node->ticked_down = node->done = 0;
}

// The coordinator gave us an id.
static inline void net_admitted(Net *net, uint32_t id) {
    NetNode *coordinator = net_node(net, 0);
    NetEvent event;
    net->self = id, net->next_hello = 0.0, net->admitted_at = net_now(), net->next_beat = net->now;
    net_renew(net, coordinator);
    memset(&event, 0, sizeof event);
    event.kind = NET_ADMITTED, event.from = id;
    pthread_mutex_lock(&net->lock);
    NetLine *line = net_line_add(net, 0);
    if (line != NULL) coordinator->life = line->life;
    net_event_push(net, &event);
    pthread_mutex_unlock(&net->lock);
}

// The coordinator does not know us: all that was between us and other nodes is over.
static inline void net_unknown(Net *net) {
    NetEvent event;
    for (int i = net->n_nodes - 1; i >= 0; i--)
        if (net->nodes[i]->id != 0) net_remove_node(net, net->nodes[i], 0);
    net->self = NET_NOBODY;
    net_renew(net, net_node(net, 0));
    memset(&event, 0, sizeof event);
    event.kind = NET_UNKNOWN, event.from = 0;
    pthread_mutex_lock(&net->lock);
    net->n_lines = 0;
    net_event_push(net, &event);
    pthread_mutex_unlock(&net->lock);
}

// ADMIT, REFUSE and UNKNOWN of the coordinator; answers to an earlier question are not looked at.
static inline void net_answered(Net *net, const Frame *frame, const unsigned char *piece) {
    int asking = net->next_hello > 0.0 && frame->seq == net->nonce;
    if (frame->kind == FRAME_ADMIT && asking && frame->ack > 0 && frame->ack < FRAME_NODES) {
        net_admitted(net, (uint32_t)frame->ack);
    } else if (frame->kind == FRAME_REFUSE && asking) {
        net->next_hello = 0.0;
        net_tell_text(net, NET_REFUSED, 0, "%.*s", (int)frame->piece_bytes, (const char *)piece);
    } else if (frame->kind == FRAME_UNKNOWN && net->self != NET_NOBODY &&
               (double)frame->echo * 1e-6 > net->admitted_at) {
        net_unknown(net);
    }
}

static inline int net_parse_or_tell(Net *net, NetNode *node, Frame *frame, zmq_msg_t *message) {
    if (frame_parse(frame, (const unsigned char *)zmq_msg_data(message), (int64_t)zmq_msg_size(message)) == 0) return 0;
    net_tell_intruder(net, node->id, node->status.address, error_message);
    return -1;
}

// A message that came from the coordinator: its own, or another joiner's that it passed on.
static inline void net_from_coordinator(Net *net, NetNode *coordinator, zmq_msg_t *message) {
    const unsigned char *piece = (const unsigned char *)zmq_msg_data(message) + FRAME_HEADER;
    Frame frame;
    if (net_parse_or_tell(net, coordinator, &frame, message)) return;
    if (frame.kind >= FRAME_ADMIT) {
        coordinator->ways[WAY_DIRECT].heard = net->now;
        if (frame.from == 0) net_answered(net, &frame, piece);
    } else if (frame.to == net->self && net->self != NET_NOBODY && frame.kind != FRAME_HELLO) {
        NetNode *node = net_node(net, frame.from);
        if (node != NULL) net_deliver(net, node, node->id == 0 ? WAY_DIRECT : WAY_RELAY, &frame, piece);
    }
}

// A message over a direct way. What is not to us in its sender's name is a mistake, or from before an id changed.
static inline void net_from_peer(Net *net, NetNode *node, zmq_msg_t *message) {
    const unsigned char *piece = (const unsigned char *)zmq_msg_data(message) + FRAME_HEADER;
    Frame frame;
    if (net_parse_or_tell(net, node, &frame, message)) return;
    if (frame.from != node->id || frame.to != net->self || frame.kind > FRAME_PROBE || frame.kind == FRAME_BEAT) return;
    net_deliver(net, node, WAY_DIRECT, &frame, piece);
}

// The same over our ROUTER: the connection's key says who it is.
static inline void net_from_dialler(Net *net, const unsigned char *id, zmq_msg_t *message) {
    const char *key = zmq_msg_gets(message, "User-Id");
    NetNode *node = key == NULL ? NULL : net_node_by_key(net, key);
    if (node == NULL || node->lanes[LANE_CONTROL].socket != NULL) return; // dropped since, or we dial it
    memcpy(node->base, id + 1, NET_BASE);
    node->has_base = 1;
    snprintf(node->status.address, sizeof node->status.address, "%s", net_address(message));
    net_from_peer(net, node, message);
}

// ---------------------------------------------------------------------------------------------------------------------
// Sockets that have something

// The next message of a socket without waiting: its one part, or for a ROUTER the second, after the routing id (NET_ID
// bytes) in id. 1, 0: there is none, -1: it had another form and was thrown away.
static inline int net_receive(void *socket, unsigned char *id, zmq_msg_t *message) {
    int n_parts = id != NULL ? 2 : 1, part = 0, valid = 1, more = 1;
    for (; more; part++) {
        zmq_msg_init(message);
        if (zmq_msg_recv(message, socket, ZMQ_DONTWAIT) < 0) {
            zmq_msg_close(message);
            return part == 0 ? 0 : -1;
        }
        more = zmq_msg_more(message);
        if (part == 0 && id != NULL) {
            valid = zmq_msg_size(message) == NET_ID;
            if (valid) memcpy(id, zmq_msg_data(message), NET_ID);
        }
        if (more || part + 1 != n_parts) zmq_msg_close(message);
    }
    if (valid && part == n_parts) return 1;
    if (part == n_parts) zmq_msg_close(message);
    return -1;
}

static inline void net_count_down(Net *net, zmq_msg_t *message) {
    net->totals.wire_down += (int64_t)zmq_msg_size(message), net->totals.frames_down++;
}

static inline int net_read_router(Net *net) {
    unsigned char id[NET_ID];
    zmq_msg_t message;
    int n = 0, got = 1;
    for (; n < NET_BURST && got != 0; n += got != 0) {
        got = net_receive(net->router, id, &message);
        if (got < 0) net_tell_intruder(net, NET_NOBODY, "a connection", "a message of another form");
        if (got != 1) continue;
        net_count_down(net, &message);
        if (net->is_host)
            net_from_joiner(net, id, &message);
        else
            net_from_dialler(net, id, &message);
        zmq_msg_close(&message);
    }
    return n;
}

static inline int net_read_lane(Net *net, uint32_t node_id, int lane) {
    zmq_msg_t message;
    int n = 0, got = 1;
    for (; n < NET_BURST && got != 0; n += got != 0) {
        NetNode *node = net_node(net, node_id); // a frame may have removed it
        if (node == NULL || node->lanes[lane].socket == NULL) break;
        got = net_receive(node->lanes[lane].socket, NULL, &message);
        if (got != 1) continue;
        net_count_down(net, &message);
        if (node->id == 0)
            net_from_coordinator(net, node, &message);
        else
            net_from_peer(net, node, &message);
        zmq_msg_close(&message);
    }
    return n;
}

// Lane by lane over all nodes: control first.
static inline int net_read_all(Net *net) {
    int n = 0;
    for (int lane = 0; lane < NET_LANES; lane++)
        for (int i = 0; i < net->n_nodes; i++)
            if (net->nodes[i]->lanes[lane].socket != NULL) n += net_read_lane(net, net->nodes[i]->id, lane);
    if (net->router != NULL) n += net_read_router(net);
    return n;
}

// ---------------------------------------------------------------------------------------------------------------------
// Routes and clocks

static inline int net_fresh(const Net *net, double at, double beats) {
    return at > 0.0 && net->now - at < net_beats(net, beats);
}

static inline void net_take_route(Net *net, NetNode *node, int route, double barred) {
    if (node->route == NET_ROUTE_DIRECT && route == NET_ROUTE_RELAY) {
        node->direct_barred = net->now + net_beats(net, barred);
        for (int c = 0; c < FRAME_CLASSES; c++) sender_reroute(&node->out[c], net->now);
    }
    node->route = route;
}

// Bytes are on their way, and the other side has said nothing about them for long.
static inline int net_is_stuck(const Net *net, const NetNode *node) {
    for (int c = 0; c <= FRAME_BULK; c++) {
        const NetSender *out = &node->out[c];
        double since = out->heard > out->timer ? out->heard : out->timer;
        double slow = 4.0 * out->round_trip, limit = net_beats(net, NET_DIRECT_STUCK);
        if (out->tries > 0 && net->now - since > (slow > limit ? slow : limit)) return 1;
    }
    return 0;
}

static inline void net_choose_route(Net *net, NetNode *node) {
    const NetPulse *direct = &node->ways[WAY_DIRECT];
    const NetNode *coordinator = net_node(net, 0);
    int works = net_fresh(net, direct->heard, NET_DIRECT_SILENT) && net_fresh(net, direct->echoed, NET_DIRECT_SILENT);
    int relay = net_fresh(net, coordinator->ways[WAY_DIRECT].heard, NET_DIRECT_SILENT);
    int possible = node->lanes[LANE_CONTROL].socket != NULL || (net->router != NULL && node->id < net->self);
    int waiting = possible && net->now - node->created < net_beats(net, NET_DIRECT_WAIT);
    if (node->route == NET_ROUTE_DIRECT) {
        if (!works && relay)
            net_take_route(net, node, NET_ROUTE_RELAY, NET_DIRECT_SILENT);
        else if (relay && net_is_stuck(net, node))
            net_take_route(net, node, NET_ROUTE_RELAY, NET_DIRECT_BARRED);
    } else if (works && net->now >= node->direct_barred) {
        net_take_route(net, node, NET_ROUTE_DIRECT, 0.0);
    } else if (!waiting) {
        net_take_route(net, node, NET_ROUTE_RELAY, 0.0);
    }
}

// A connection that we have dialled and that shows no life is dialled anew: ZeroMQ gives up some of them for good, as
// after a refusal. Returns -1 if there are no sockets any more.
static inline int net_redial(Net *net, NetNode *node) {
    double since = node->ways[WAY_DIRECT].heard, dialled = node->lanes[LANE_CONTROL].dialled;
    NetLane *bulk = &node->lanes[LANE_BULK];
    double limit = net_beats(net, node->id == 0 ? NET_REDIAL : NET_DIRECT_SILENT);
    if (node->lanes[LANE_CONTROL].socket == NULL) return 0;
    if (dialled > since) since = dialled;
    if (net->now - since > limit) return net_dial(net, node);
    if (node->route == NET_ROUTE_DIRECT && net->now - bulk->dialled > net_beats(net, NET_REDIAL) &&
        net_is_stuck(net, node)) {
        net_hang_up(node, LANE_BULK, 0);
        return net_dial_lane(net, node, LANE_BULK);
    }
    return 0;
}

static inline double net_mean_rate(double mean, int64_t n_bytes, double elapsed) {
    double weight = elapsed / (elapsed + NET_RATE_SECONDS);
    return mean + weight * ((double)n_bytes / elapsed - mean);
}

static inline void net_measure_rates(Net *net, NetNode *node) {
    NetStatus *status = &node->status;
    double elapsed = net->now - node->ticked_at;
    if (elapsed < 0.1 * net->limits.beat) return;
    status->up_rate = net_mean_rate(status->up_rate, status->wire_up - node->ticked_up, elapsed);
    status->down_rate = net_mean_rate(status->down_rate, status->wire_down - node->ticked_down, elapsed);
    node->ticked_up = status->wire_up, node->ticked_down = status->wire_down, node->ticked_at = net->now;
}

// Each beat.
static inline int net_beat_all(Net *net) {
    for (int i = 0; i < net->n_nodes; i++) {
        NetNode *node = net->nodes[i];
        int is_peer = !net->is_host && node->id != 0;
        net_measure_rates(net, node);
        if (net->self != NET_NOBODY) net_beat_way(net, node, WAY_DIRECT);
        if (net->self != NET_NOBODY && is_peer && node->route == NET_ROUTE_RELAY) net_beat_way(net, node, WAY_RELAY);
        if (net_redial(net, node)) return -1;
    }
    return 0;
}

// Asks the coordinator for an id. 0, or -1: not now.
static inline int net_ask(Net *net) {
    unsigned char piece[NET_KEY - 1 + 2];
    Frame frame;
    memset(&frame, 0, sizeof frame);
    memcpy(piece, net->public_key, NET_KEY - 1);
    frame_put(piece + NET_KEY - 1, (uint64_t)net->listen_port, 2);
    frame.kind = FRAME_HELLO, frame.seq = net->nonce, frame.total = frame.piece_bytes = (int64_t)sizeof piece;
    return net_put_small(net, net_node(net, 0), NET_ROUTE_DIRECT, LANE_CONTROL, &frame, piece);
}

// What is due by the clock. 0, or -1: the network has failed.
static inline int net_clocks(Net *net) {
    if (net->next_hello > 0.0 && net->now >= net->next_hello)
        net->next_hello = net->now + (net_ask(net) == 0 ? 1.0 : 0.05); // the latter: not connected yet
    net_tell_hidden(net);
    if (net->now >= net->next_beat) {
        net->next_beat = net->now + net->limits.beat;
        if (net_beat_all(net)) return -1;
    }
    for (int i = 0; i < net->n_nodes; i++) {
        NetNode *node = net->nodes[i];
        for (int c = 0; c < FRAME_CLASSES; c++) {
            double deadline = sender_deadline(&node->out[c]);
            if (deadline > 0.0 && net->now >= deadline) sender_timeout(&node->out[c], net->now);
        }
        if (!net->is_host && node->id != 0) net_choose_route(net, node);
    }
    return 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// Commands

static inline void net_command_admit(Net *net, const NetCommand *command) {
    NetGuest *guest = net_guest(net, command->handle);
    NetNode *before = guest == NULL ? NULL : net_node_by_base(net, guest->base);
    NetNode *node = net_node_add(net, command->id, command->life);
    if (node == NULL) return;
    node->route = NET_ROUTE_DIRECT;
    if (guest == NULL) return;                // it has been forgotten: a silent node
    if (before != NULL) before->has_base = 0; // it has asked anew
    memcpy(node->base, guest->base, NET_BASE);
    node->has_base = 1, node->nonce = guest->nonce;
    snprintf(node->key, sizeof node->key, "%s", guest->key);
    snprintf(node->status.address, sizeof node->status.address, "%s", guest->address);
    *guest = net->guests[--net->n_guests];
    net_answer_admitted(net, node);
}

static inline void net_command_refuse(Net *net, const NetCommand *command) {
    NetGuest *guest = net_guest(net, command->handle);
    if (guest == NULL) return;
    guest->refused = 1;
    snprintf(guest->address, sizeof guest->address, "%s", command->text);
    net_answer_refused(net, guest);
}

// Names a peer, or tells anew how it is reached.
static inline int net_command_peer(Net *net, const NetCommand *command) {
    NetNode *node = net_node(net, command->id);
    if (node == NULL) node = net_node_add(net, command->id, command->life);
    if (node == NULL) return error_set("network: no memory for another node");
    node->life = command->life;
    int same = strcmp(node->key, command->key) == 0 && strcmp(node->endpoint, command->endpoint) == 0;
    snprintf(node->key, sizeof node->key, "%s", command->key);
    snprintf(node->endpoint, sizeof node->endpoint, "%s", command->endpoint);
    if (same || node->endpoint[0] == '\0' || net->self > node->id) return 0;
    snprintf(node->status.address, sizeof node->status.address, "%.255s", node->endpoint);
    return net_dial(net, node);
}

static inline void net_command_send(NetNode *node, NetCommand *command) {
    sender_submit(&node->out[command->stream], command->message);
    command->message = NULL;
}

static inline void net_command_expect(NetNode *node, NetCommand *command) {
    command->expected->next = NULL;
    NetExpected **at = &node->expected;
    while (*at != NULL) at = &(*at)->next;
    *at = command->expected;
    command->expected = NULL;
    receiver_resume(&node->in[FRAME_FILES]);
}

// 0, or -1: the network has failed. known: the command's node is still what it was when the command was given.
static inline int net_command(Net *net, NetCommand *command, int known) {
    NetNode *node = net_node(net, command->id);
    int current = known && node != NULL && node->life == command->life;
    if (command->kind == COMMAND_HELLO) {
        net->nonce = net_epoch(net), net->next_hello = net->now;
    } else if (command->kind == COMMAND_REFUSE) {
        net_command_refuse(net, command);
    } else if (command->kind == COMMAND_DROP) {
        if (node != NULL && node->life == command->life) net_remove_node(net, node, 0);
    } else if (command->kind == COMMAND_ADMIT) {
        if (known) net_command_admit(net, command);
    } else if (command->kind == COMMAND_PEER) {
        if (known) return net_command_peer(net, command);
    } else if (command->kind == COMMAND_SEND) {
        if (current) net_command_send(node, command);
    } else if (current) {
        net_command_expect(node, command);
    }
    return 0;
}

static inline int net_take_commands(Net *net, int *stopping) {
    int result = 0, was_full;
    pthread_mutex_lock(&net->lock);
    NetCommand *list = net->first_command;
    net->first_command = net->last_command = NULL;
    *stopping = net->stopping;
    net->progress = net->progress_shared;
    was_full = net->inbox_was_full && net->inbox_bytes <= net->limits.inbox_bytes / 2;
    if (was_full) net->inbox_was_full = 0;
    pthread_mutex_unlock(&net->lock);
    for (int i = 0; i < net->n_nodes && was_full; i++) {
        receiver_resume(&net->nodes[i]->in[FRAME_CONTROL]);
        receiver_resume(&net->nodes[i]->in[FRAME_BULK]);
    }
    while (list != NULL) {
        NetCommand *next = list->next;
        pthread_mutex_lock(&net->lock);
        const NetLine *line = net_line(net, list->id);
        int known = line != NULL && line->life == list->life;
        pthread_mutex_unlock(&net->lock);
        if (result == 0) result = net_command(net, list, known);
        command_free(list);
        list = next;
    }
    return result;
}

// ---------------------------------------------------------------------------------------------------------------------
// What callers see, and the loop

static inline void net_publish_node(Net *net, NetNode *node, NetLine *line) {
    NetStatus *status = &node->status;
    const NetSender *bulk = &node->out[FRAME_BULK], *control = &node->out[FRAME_CONTROL];
    status->silence = net->now - node_heard(node);
    status->deafness = net->now - node_echoed(node);
    status->progress_age = net->now - node->progress_at;
    status->moved_age = net->now - node->moved_at;
    status->round_trip = bulk->round_trip > 0.0 ? bulk->round_trip : control->round_trip;
    status->unacknowledged = status->resent = 0;
    for (int c = 0; c < FRAME_CLASSES; c++) {
        status->unacknowledged += node->out[c].unacknowledged;
        status->resent += node->out[c].resent;
    }
    status->route = node->route;
    line->status = *status;
    line->done = node->done;
}

static inline void net_publish(Net *net) {
    NetTotals totals = net->totals;
    for (int i = 0; i < net->n_nodes; i++) {
        const NetNode *node = net->nodes[i];
        totals.up_rate += node->status.up_rate, totals.down_rate += node->status.down_rate;
        if (node->id != 0) totals.n_direct += node->route == NET_ROUTE_DIRECT;
        if (node->id != 0) totals.n_relayed += node->route == NET_ROUTE_RELAY;
    }
    pthread_mutex_lock(&net->lock);
    net->totals_shared = totals;
    for (int i = 0; i < net->n_nodes; i++) {
        NetLine *line = net_line(net, net->nodes[i]->id);
        if (line != NULL && line->life == net->nodes[i]->life) net_publish_node(net, net->nodes[i], line);
    }
    pthread_mutex_unlock(&net->lock);
}

static inline double net_earlier(double a, double b) {
    return b > 0.0 && b < a ? b : a;
}

// When something is due: the next beat at the latest.
static inline double net_next_due(const Net *net) {
    double due = net_earlier(net->next_beat, net->next_hello);
    for (int i = 0; i < net->n_nodes; i++) {
        const NetNode *node = net->nodes[i];
        for (int c = 0; c < FRAME_CLASSES; c++) due = net_earlier(due, sender_deadline(&node->out[c]));
        for (int lane = 0; lane < NET_LANES; lane++)
            if (node->lanes[lane].socket == NULL && node->lanes[lane].blocked && node->lanes[lane].retry_at > net->now)
                due = net_earlier(due, node->lanes[lane].retry_at);
    }
    return due;
}

// Sleeps until a socket has something, a blocked one takes something, a caller wakes it, or `due`.
static inline int net_poll(Net *net, double due) {
    static const zmq_pollitem_t nothing = {NULL, 0, ZMQ_POLLIN, 0};
    zmq_pollitem_t items[8 + NET_LANES * NET_MOST_NODES];
    NetLane *lanes[8 + NET_LANES * NET_MOST_NODES];
    void *const fixed[] = {net->router, net->zap, net->router_monitor, net->dealer_monitor};
    int n = 1;
    uint64_t count;
    items[0] = nothing, items[0].fd = net->wake_fd;
    for (int i = 0; i < 4; i++)
        if (fixed[i] != NULL) items[n] = nothing, lanes[n] = NULL, items[n++].socket = fixed[i];
    int first_lane = n;
    for (int i = 0; i < net->n_nodes; i++) {
        for (int lane = 0; lane < NET_LANES; lane++) {
            NetLane *l = &net->nodes[i]->lanes[lane];
            if (l->socket == NULL) continue;
            items[n] = nothing, items[n].socket = l->socket, lanes[n] = l;
            if (l->blocked) items[n].events |= ZMQ_POLLOUT;
            n++;
        }
    }
    double left = due - net_now();
    if (zmq_poll(items, n, left > 0.0 ? (long)(left * 1e3) + 1 : 0) < 0 && zmq_errno() != EINTR)
        return net_zmq_error("zmq_poll");
    for (int i = first_lane; i < n; i++)
        if (items[i].revents & ZMQ_POLLOUT) lanes[i]->blocked = 0;
    if ((items[0].revents & ZMQ_POLLIN) && read(net->wake_fd, &count, sizeof count) < 0) return 0; // another took it
    return 0;
}

// One pass. Returns 1 to go on, 0 to stop, -1: failed.
static inline int net_pass(Net *net) {
    int stopping;
    net->now = net_now();
    if (net_take_commands(net, &stopping)) return -1;
    if (stopping) return 0;
    for (int i = 0; i < NET_BURST && net->zap != NULL && net_zap(net); i++) {
    }
    for (int i = 0; i < NET_BURST && net_monitor(net, net->router_monitor); i++) {
    }
    for (int i = 0; i < NET_BURST && net_monitor(net, net->dealer_monitor); i++) {
    }
    int busy = net_read_all(net);
    if (net_clocks(net)) return -1;
    busy += net_pump_all(net);
    net_publish(net);
    return net_poll(net, busy > 0 ? net->now : net_next_due(net)) == 0 ? 1 : -1;
}

static inline void *net_thread(void *argument) {
    Net *net = (Net *)argument;
    int going = 1;
    while (going == 1) going = net_pass(net);
    pthread_mutex_lock(&net->lock);
    if (going < 0) snprintf(net->failure, sizeof net->failure, "%s", error_message);
    pthread_cond_broadcast(&net->changed);
    pthread_mutex_unlock(&net->lock);
    return NULL;
}

#endif
