// What the network's thread knows of each node, and what it shares with the threads that call net.h: a list of commands
// to it, a list of events from it, and a line a node with what net_status and net_queued tell. Only the fields under
// `lock` are shared; all others are the thread's.
#ifndef LLMC_NET_NODE_H
#define LLMC_NET_NODE_H

#include <pthread.h>     // the thread
#include <stdlib.h>      // malloc, calloc, free
#include <sys/eventfd.h> // wakes the thread
#include <time.h>        // clock_gettime
#include <unistd.h>      // write

#include "net_stream.h" // NetSender, NetReceiver
#include "net_types.h"

enum {
    NET_MOST_NODES = 1024,
    NET_MOST_GUESTS = 256 /* who asked to join and has no answer, or a refusal */,
    NET_BASE = 16,
    NET_ID = NET_BASE + 1 /* a connection's routing id: its lane, and random bytes that its owner drew */
};

enum { LANE_CONTROL, LANE_BULK, LANE_BEAT, NET_LANES };
static const char net_lane_letters[] = "CBH";

// One connection. We dialled it (socket), or the other did and our ROUTER has it (socket NULL, found by NetNode.base).
typedef struct {
    void *socket;
    int blocked;     // it takes nothing: until zmq_poll says so (socket), or retry_at
    double retry_at; // of a ROUTER's connection
    double wait;     // seconds, grows while it stays blocked
    double dialled;
} NetLane;

// What is heard by one way: beats and probes carry the sender's clock, and return the last that was heard.
typedef struct {
    double heard;   // any frame, 0: never
    uint64_t stamp; // of its last beat, for the echo
    double echoed;  // when we sent the last beat that it has heard, 0: none
} NetPulse;

typedef enum { WAY_DIRECT, WAY_RELAY, NET_WAYS } NetWay;

typedef struct NetExpected {
    struct NetExpected *next;
    uint64_t channel;
    int64_t max_bytes;
    char path[PATH_MAX];
} NetExpected;

typedef struct {
    uint32_t id, life; // life: of the line that it belongs to
    char key[NET_KEY], endpoint[NET_ENDPOINT];
    unsigned char base[NET_BASE]; // of the connections between us, drawn by who dialled
    int has_base;                 // they are our ROUTER's
    uint64_t nonce;               // coordinator: of the HELLO that it was admitted for
    NetLane lanes[NET_LANES];
    NetPulse ways[NET_WAYS];
    double created;
    int route;            // NetRoute
    double direct_barred; // until then the relay is used
    NetSender out[FRAME_CLASSES];
    NetReceiver in[FRAME_CLASSES];
    NetExpected *expected, *receiving; // receiving: what the file in in[FRAME_FILES] is for, NULL: none
    double progress_at, moved_at, ticked_at;
    int64_t ticked_up, ticked_down; // wire_* then
    int64_t done;                   // payload bytes that left the queue
    NetStatus status;
} NetNode;

typedef struct {
    unsigned char base[NET_BASE];
    uint64_t nonce;
    uint32_t handle;
    int refused;
    double asked;
    char key[NET_KEY], address[NET_TEXT]; // address: also the reason, once refused
} NetGuest;

typedef enum {
    COMMAND_HELLO,
    COMMAND_ADMIT,
    COMMAND_REFUSE,
    COMMAND_DROP,
    COMMAND_PEER,
    COMMAND_SEND,
    COMMAND_EXPECT
} NetCommandKind;

typedef struct NetCommand {
    struct NetCommand *next;
    int kind, stream;
    uint32_t id, life, handle;
    NetMessage *message;
    NetExpected *expected;
    char endpoint[NET_ENDPOINT], key[NET_KEY], text[NET_TEXT];
} NetCommand;

typedef struct NetEventItem {
    struct NetEventItem *next;
    NetEvent event;
} NetEventItem;

// A node as callers see it. A line may be there before the thread has its node, and never outlives net_drop.
typedef struct {
    uint32_t id, life;
    int64_t given; // bytes, by net_send
    int64_t done;  // of these, bytes that left the queue
    NetStatus status;
} NetLine;

struct Net {
    // fixed at the start
    int is_host;
    NetLimits limits;
    NetToken token;                                                        // joiner
    char server_secret[NET_KEY], public_key[NET_KEY], secret_key[NET_KEY]; // the latter two: joiner, for its peers
    char run_public[NET_KEY];                                              // coordinator: who has it may connect
    char endpoint[NET_ENDPOINT];
    int listen_port; // 0: none
    void *context, *router, *zap, *router_monitor, *dealer_monitor;
    int wake_fd, started;
    pthread_t thread;

    // shared
    pthread_mutex_t lock;
    pthread_cond_t changed;
    NetCommand *first_command, *last_command;
    NetEventItem *first_event, *last_event;
    NetLine *lines;
    int n_lines, room_for_lines;
    uint32_t lives, generation;
    uint64_t progress_shared;
    int64_t inbox_bytes;
    int inbox_was_full, stopping, woken;
    NetTotal total;
    char failure[ERROR_MAX]; // of the thread, "": none

    // the thread's
    NetNode *nodes[NET_MOST_NODES];
    int n_nodes;
    NetGuest guests[NET_MOST_GUESTS];
    int n_guests;
    uint32_t next_handle, self;
    uint64_t epoch, progress, nonce;
    double now, next_beat, next_hello, admitted_at; // next_hello 0: none
    int monitors;
    char accepted_from[64];
    double intruder_next; // when another may be told
    uint32_t intruder;
    int intruders_hidden;
    char intruder_text[NET_TEXT];
    int turn;      // whose bulk goes first
    NetTotal gone; // of nodes that are no more
};

// Seconds of a clock that only goes forward; never 0.
static inline double net_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return 1.0 + (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static inline uint64_t net_stamp(void) {
    return (uint64_t)(net_now() * 1e6);
}

// A number greater than all before, also of an earlier process on this machine.
static inline uint64_t net_epoch(Net *net) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    uint64_t epoch = (uint64_t)now.tv_sec * 1000000u + (uint64_t)now.tv_nsec / 1000u;
    net->epoch = epoch > net->epoch ? epoch : net->epoch + 1;
    return net->epoch;
}

// ---------------------------------------------------------------------------------------------------------------------
// Shared: lines, commands, events

static inline NetLine *net_line(Net *net, uint32_t id) {
    for (int i = 0; i < net->n_lines; i++)
        if (net->lines[i].id == id) return &net->lines[i];
    return NULL;
}

// A new line for the node, in place of the one it has. NULL: no memory, or too many nodes.
static inline NetLine *net_line_add(Net *net, uint32_t id) {
    NetLine *line = net_line(net, id);
    if (line == NULL && net->n_lines == net->room_for_lines) {
        int room = net->room_for_lines == 0 ? 16 : 2 * net->room_for_lines;
        NetLine *lines = room > NET_MOST_NODES ? NULL : (NetLine *)realloc(net->lines, sizeof *lines * (size_t)room);
        if (lines == NULL) return NULL;
        net->lines = lines, net->room_for_lines = room;
    }
    if (line == NULL) line = &net->lines[net->n_lines++];
    memset(line, 0, sizeof *line);
    line->id = id, line->life = ++net->lives;
    return line;
}

static inline void net_line_remove(Net *net, uint32_t id) {
    NetLine *line = net_line(net, id);
    if (line != NULL) *line = net->lines[--net->n_lines];
}

static inline void net_wake_thread(Net *net) {
    uint64_t one = 1;
    if (write(net->wake_fd, &one, sizeof one) < 0) return; // it is full: the thread will wake
}

static inline NetCommand *command_new(int kind, uint32_t id) {
    NetCommand *command = (NetCommand *)calloc(1, sizeof *command);
    if (command == NULL) {
        error_set("no memory for the network's commands");
        return NULL;
    }
    command->kind = kind, command->id = id;
    return command;
}

static inline void command_free(NetCommand *command) {
    if (command->message != NULL) net_message_free(command->message);
    free(command->expected);
    free(command);
}

// Under the lock.
static inline void net_command_push(Net *net, NetCommand *command) {
    command->next = NULL;
    if (net->first_command == NULL)
        net->first_command = command;
    else
        net->last_command->next = command;
    net->last_command = command;
}

// What an event takes in memory.
static inline int64_t event_bytes(const NetEvent *event) {
    return (event->data != NULL ? event->n_bytes : 0) + (int64_t)sizeof(NetEventItem);
}

// Under the lock. The event is copied; its data is the list's until net_next.
static inline void net_event_push(Net *net, const NetEvent *event) {
    NetEventItem *item = (NetEventItem *)calloc(1, sizeof *item);
    if (item == NULL) { // nothing can be told any more: net_next says so
        snprintf(net->failure, sizeof net->failure, "no memory for the network's events");
        free(event->data);
        return;
    }
    item->event = *event;
    if (net->first_event == NULL)
        net->first_event = item;
    else
        net->last_event->next = item;
    net->last_event = item;
    net->inbox_bytes += event_bytes(event);
    pthread_cond_broadcast(&net->changed);
}

static inline void net_tell(Net *net, const NetEvent *event) {
    pthread_mutex_lock(&net->lock);
    net_event_push(net, event);
    pthread_mutex_unlock(&net->lock);
}

__attribute__((format(printf, 4, 5))) static inline void net_tell_text(Net *net, int kind, uint32_t from,
                                                                       const char *format, ...) {
    NetEvent event;
    va_list args;
    memset(&event, 0, sizeof event);
    event.kind = kind, event.from = from;
    va_start(args, format);
    vsnprintf(event.text, sizeof event.text, format, args);
    va_end(args);
    for (unsigned char *c = (unsigned char *)event.text; *c != '\0'; c++)
        if (*c < 0x20 || *c >= 0x7F) *c = '?'; // some of it is a stranger's
    net_tell(net, &event);
}

// Tells of who was turned away since the last was told, if it is time.
static inline void net_tell_hidden(Net *net) {
    char others[48] = "";
    if (net->intruders_hidden == 0 || net->now < net->intruder_next) return;
    if (net->intruders_hidden > 1) snprintf(others, sizeof others, " (and %d more)", net->intruders_hidden - 1);
    net->intruder_next = net->now + 1.0, net->intruders_hidden = 0;
    net_tell_text(net, NET_INTRUDER, net->intruder, "%s%s", net->intruder_text, others);
}

// Somebody or something was turned away. Told at once if the last was a second ago, else then, and only the latest.
static inline void net_tell_intruder(Net *net, uint32_t from, const char *address, const char *reason) {
    net->intruder = from;
    net->intruders_hidden++;
    snprintf(net->intruder_text, sizeof net->intruder_text, "%.63s: %.140s", address, reason);
    net_tell_hidden(net);
}

// ---------------------------------------------------------------------------------------------------------------------
// Nodes

static inline NetNode *net_node(Net *net, uint32_t id) {
    for (int i = 0; i < net->n_nodes; i++)
        if (net->nodes[i]->id == id) return net->nodes[i];
    return NULL;
}

static inline NetNode *net_node_by_base(Net *net, const unsigned char *base) {
    for (int i = 0; i < net->n_nodes; i++)
        if (net->nodes[i]->has_base && memcmp(net->nodes[i]->base, base, NET_BASE) == 0) return net->nodes[i];
    return NULL;
}

static inline NetNode *net_node_by_key(Net *net, const char *key) {
    for (int i = 0; i < net->n_nodes; i++)
        if (net->nodes[i]->key[0] != '\0' && strcmp(net->nodes[i]->key, key) == 0) return net->nodes[i];
    return NULL;
}

// Its streams begin. Files have a small window, so that what goes over the same connection need not wait long.
static inline NetNode *net_node_add(Net *net, uint32_t id, uint32_t life) {
    NetNode *node = net->n_nodes == NET_MOST_NODES ? NULL : (NetNode *)calloc(1, sizeof *node);
    if (node == NULL) return NULL;
    node->id = id, node->life = life, node->created = node->moved_at = node->progress_at = node->ticked_at = net->now;
    for (int c = 0; c < FRAME_CLASSES; c++) {
        sender_init(&node->out[c], c, c == FRAME_FILES ? STREAM_WINDOW / 4 : STREAM_WINDOW, net_epoch(net));
        receiver_init(&node->in[c]);
    }
    net->nodes[net->n_nodes++] = node;
    return node;
}

static inline void node_free_streams(NetNode *node) {
    for (int c = 0; c < FRAME_CLASSES; c++) sender_free(&node->out[c]), receiver_abandon(&node->in[c]);
    free(node->receiving);
    while (node->expected != NULL) {
        NetExpected *next = node->expected->next;
        free(node->expected);
        node->expected = next;
    }
}

// The file that was announced for a channel; taken out of the list, to be freed. NULL: none.
static inline NetExpected *node_take_expected(NetNode *node, uint64_t channel) {
    NetExpected **at = &node->expected;
    while (*at != NULL && (*at)->channel != channel) at = &(*at)->next;
    NetExpected *found = *at;
    if (found != NULL) *at = found->next;
    return found;
}

static inline double node_heard(const NetNode *node) {
    double direct = node->ways[WAY_DIRECT].heard, relay = node->ways[WAY_RELAY].heard;
    double heard = direct > relay ? direct : relay;
    return heard > node->created ? heard : node->created;
}

static inline double node_echoed(const NetNode *node) {
    double direct = node->ways[WAY_DIRECT].echoed, relay = node->ways[WAY_RELAY].echoed;
    double echoed = direct > relay ? direct : relay;
    return echoed > node->created ? echoed : node->created;
}

#endif
