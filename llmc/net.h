// The network of a mesh: messages between a coordinator (node 0) and joiners (ids that it assigns), over ZeroMQ with
// CURVE. A thread of its own owns all sockets; what is called here never waits for a peer. Beside net_wait, every
// function is short, and any thread may call it. One file of the program includes this; without ZeroMQ it is
// net_none.h.
//
//   Net *net = net_host("tcp://0.0.0.0:29500", &keys, NULL);     or net_join(&token, "tcp://0.0.0.0:*", NULL)
//   while (net_wait(net, 0.1) >= 0) {                            other work between
//       NetEvent event;
//       while (net_next(net, &event) == 1) { ...  NET_HELLO: net_admit(net, event.from, id);  free(event.data); }
//   }
//   net_send(net, id, 0, channel, tensor, n_bytes);              copied; while net_queued(net, id) is small
//   net_close(net);                                              at once, what is queued is gone
//
// What is promised: messages of one class (control, bulk, files) from one node to another arrive once, whole and in
// order, whatever happens to connections in between, until net_drop or NET_UNKNOWN ends it.
#ifndef LLMC_NET_H
#define LLMC_NET_H

#include "net_types.h"

#ifndef WITH_ZMQ
#include "net_none.h"
#else
#include "net_token.h"
#include "net_engine.h"

// Closes everything at once: what is queued is not sent, what was not taken is freed. NULL is fine.
static inline void net_close(Net *net) {
    if (net == NULL) return;
    pthread_mutex_lock(&net->lock);
    net->stopping = 1;
    pthread_mutex_unlock(&net->lock);
    net_wake_thread(net);
    if (net->started) pthread_join(net->thread, NULL);
    while (net->n_nodes > 0) net_remove_node(net, net->nodes[0]);
    void *const sockets[] = {net->router, net->zap, net->router_monitor, net->dealer_monitor};
    for (int i = 0; i < 4; i++)
        if (sockets[i] != NULL) zmq_close(sockets[i]);
    if (net->context != NULL) zmq_ctx_term(net->context);
    for (NetCommand *next, *command = net->first_command; command != NULL; command = next) {
        next = command->next;
        command_free(command);
    }
    for (NetEventItem *next, *item = net->first_event; item != NULL; item = next) {
        next = item->next;
        free(item->event.data);
        free(item);
    }
    pthread_cond_destroy(&net->changed);
    pthread_mutex_destroy(&net->lock);
    if (net->wake_fd >= 0) close(net->wake_fd);
    free(net->lines);
    free(net);
}

static inline void net_set_limits(Net *net, const NetLimits *limits) {
    if (limits != NULL) net->limits = *limits;
    if (net->limits.control_bytes == 0) net->limits.control_bytes = 1 << 20;
    if (net->limits.bulk_bytes == 0) net->limits.bulk_bytes = 256 << 20;
    if (net->limits.inbox_bytes == 0) net->limits.inbox_bytes = 1 << 30;
    if (net->limits.beat == 0.0) net->limits.beat = 1.0;
}

static inline Net *net_new(const NetLimits *limits) {
    pthread_condattr_t attributes;
    Net *net = (Net *)calloc(1, sizeof *net);
    if (net == NULL) {
        error_set("no memory for the network");
        return NULL;
    }
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_mutex_init(&net->lock, NULL);
    pthread_cond_init(&net->changed, &attributes);
    pthread_condattr_destroy(&attributes);
    net_set_limits(net, limits);
    net->now = net->next_beat = net_now(), net->next_handle = FRAME_NODES;
    net->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    net->context = zmq_ctx_new();
    if (net->wake_fd >= 0 && net->context != NULL) return net;
    error_set("network: no resources: %s", strerror(errno));
    net_close(net);
    return NULL;
}

static inline int net_start(Net *net) {
    int status = pthread_create(&net->thread, NULL, net_thread, net);
    if (status != 0) return error_set("no thread for the network: %s", strerror(status));
    net->started = 1;
    return 0;
}

// Who may connect is asked at this address; before anything is bound.
static inline int net_bind_zap(Net *net) {
    net->zap = zmq_socket(net->context, ZMQ_REP);
    if (net->zap == NULL || net_option(net->zap, ZMQ_LINGER, 0) || zmq_bind(net->zap, "inproc://zeromq.zap.01") != 0)
        return net_zmq_error("zmq_bind");
    return 0;
}

// The coordinator, node 0. endpoint: tcp://ADDRESS:PORT, ADDRESS 0.0.0.0 for all of this machine, PORT * for any.
// limits: NULL for the defaults. Returns NULL with a message: the port is taken, ...
static inline Net *net_host(const char *endpoint, const NetKeys *keys, const NetLimits *limits) {
    Net *net = net_new(limits);
    if (net == NULL) return NULL;
    net->is_host = 1, net->self = 0;
    snprintf(net->run_public, sizeof net->run_public, "%s", keys->run_public);
    if (net_bind_zap(net) || net_bind(net, endpoint, keys->server_secret, "run") || net_start(net)) {
        net_close(net);
        return NULL;
    }
    return net;
}

// A joiner; it asks the coordinator for an id at once, and until NET_ADMITTED or NET_REFUSED. listen: where peers can
// dial it, as in net_host, or NULL: nowhere. Returns NULL with a message; that the coordinator is not there is no
// error.
static inline Net *net_join(const NetToken *token, const char *listen, const NetLimits *limits) {
    Net *net = net_new(limits);
    NetNode *coordinator = net == NULL ? NULL : net_node_add(net, 0, 0);
    if (coordinator == NULL) {
        if (net != NULL) error_set("no memory for the network");
        net_close(net);
        return NULL;
    }
    net->token = *token, net->self = NET_NOBODY, net->nonce = net_epoch(net), net->next_hello = net->now;
    coordinator->route = NET_ROUTE_DIRECT;
    snprintf(coordinator->endpoint, sizeof coordinator->endpoint, "%s", token->endpoint);
    snprintf(coordinator->status.address, sizeof coordinator->status.address, "%.200s", token->endpoint);
    if (zmq_curve_keypair(net->public_key, net->secret_key) != 0 || net_bind_zap(net) ||
        (listen != NULL && net_bind(net, listen, net->secret_key, "peers")) || net_dial(net, coordinator) ||
        net_start(net)) {
        net_close(net);
        return NULL;
    }
    return net;
}

// Where we listen, with the port that was taken; "" for a joiner that does not.
static inline const char *net_endpoint(const Net *net) {
    return net->endpoint;
}

// A joiner's key for its peers (Z85), as its NET_HELLO says; "" for the coordinator.
static inline const char *net_public_key(const Net *net) {
    return net->public_key;
}

// Gives the thread a command for a line that there is (life 0: for none).
static inline void net_command_give(Net *net, NetCommand *command) {
    pthread_mutex_lock(&net->lock);
    net_command_push(net, command);
    pthread_mutex_unlock(&net->lock);
    net_wake_thread(net);
}

// A joiner asks for an id anew, after NET_UNKNOWN or NET_REFUSED.
static inline void net_hello(Net *net) {
    NetCommand *command = command_new(COMMAND_HELLO, 0);
    if (command != NULL) net_command_give(net, command);
}

// Gives who asked (NET_HELLO) an id, 1 .. 65535, that no node has. It is a node from here on.
static inline int net_admit(Net *net, uint32_t handle, uint32_t id) {
    if (id == 0 || id >= FRAME_NODES) return error_set("network: %u is no node's id", id);
    NetCommand *command = command_new(COMMAND_ADMIT, id);
    if (command == NULL) return -1;
    command->handle = handle;
    pthread_mutex_lock(&net->lock);
    NetLine *line = net_line(net, id) != NULL ? NULL : net_line_add(net, id);
    if (line != NULL) command->life = line->life, net_command_push(net, command);
    pthread_mutex_unlock(&net->lock);
    net_wake_thread(net);
    if (line != NULL) return 0;
    command_free(command);
    return error_set("network: node %u is there already, or there are too many", id);
}

// Gives who asked no id, and tells it why.
static inline int net_refuse(Net *net, uint32_t handle, const char *reason) {
    NetCommand *command = command_new(COMMAND_REFUSE, 0);
    if (command == NULL) return -1;
    command->handle = handle;
    snprintf(command->text, sizeof command->text, "%s", reason);
    net_command_give(net, command);
    return 0;
}

// Forgets a node: what comes from it is not looked at (the coordinator tells it NET_UNKNOWN), what was queued for it is
// gone. Its events that were not taken yet stay.
static inline void net_drop(Net *net, uint32_t id) {
    NetCommand *command = command_new(COMMAND_DROP, id);
    if (command == NULL) return;
    pthread_mutex_lock(&net->lock);
    NetLine *line = net_line(net, id);
    int known = line != NULL && (id != 0 || net->is_host);
    if (known) {
        command->life = line->life;
        net_line_remove(net, id);
        net_command_push(net, command);
    }
    pthread_mutex_unlock(&net->lock);
    net_wake_thread(net);
    if (!known) command_free(command);
}

// Names another joiner: its id, where it can be dialled (tcp://HOST:PORT, NULL: nowhere), and its key (Z85). Both sides
// are to be told; the smaller id dials. Told again, it only takes note of what has changed.
static inline int net_peer(Net *net, uint32_t id, const char *endpoint, const char *public_key) {
    const char *host;
    size_t n_host;
    int port;
    if (id == 0 || id >= FRAME_NODES || net->is_host) return error_set("network: node %u is no peer", id);
    if (strlen(public_key) != NET_KEY - 1) return error_set("network: node %u has no key of 40 characters", id);
    if (endpoint != NULL && net_endpoint_parse(endpoint, strlen(endpoint), &host, &n_host, &port)) return -1;
    NetCommand *command = command_new(COMMAND_PEER, id);
    if (command == NULL) return -1;
    snprintf(command->endpoint, sizeof command->endpoint, "%s", endpoint != NULL ? endpoint : "");
    snprintf(command->key, sizeof command->key, "%s", public_key);
    pthread_mutex_lock(&net->lock);
    NetLine *line = net_line(net, id);
    if (line == NULL) line = net_line_add(net, id);
    if (line != NULL) command->life = line->life, net_command_push(net, command);
    pthread_mutex_unlock(&net->lock);
    net_wake_thread(net);
    if (line != NULL) return 0;
    command_free(command);
    return error_set("network: there are too many nodes");
}

// The number that every message sent from here on carries.
static inline void net_generation(Net *net, uint32_t generation) {
    pthread_mutex_lock(&net->lock);
    net->generation = generation;
    pthread_mutex_unlock(&net->lock);
}

// Queues a message for a node; takes it over in any case. n_bytes: what it adds to net_queued.
static inline int net_submit(Net *net, uint32_t to, int stream, uint64_t channel, NetMessage *message) {
    NetCommand *command = command_new(COMMAND_SEND, to);
    if (command == NULL) {
        net_message_free(message);
        return -1;
    }
    command->stream = stream, command->message = message, message->channel = channel;
    pthread_mutex_lock(&net->lock);
    NetLine *line = net_line(net, to);
    if (line != NULL) {
        message->generation = net->generation, command->life = line->life;
        line->given += message->n_bytes;
        net_command_push(net, command);
    }
    pthread_mutex_unlock(&net->lock);
    if (line != NULL) {
        net_wake_thread(net);
        return 0;
    }
    command_free(command);
    return error_set("network: node %u is not known (any more)", to);
}

static inline NetMessage *net_message_new(int64_t n_bytes) {
    NetMessage *message = (NetMessage *)calloc(1, sizeof *message);
    if (message == NULL) return NULL;
    message->fd = -1, message->n_bytes = n_bytes;
    return message;
}

// Sends n_bytes of data to a node, as a control message (small; it never waits for others) or a bulk message. The bytes
// are copied, and nothing is waited for. Returns 0, or -1: no memory, or no such node.
static inline int net_send(Net *net, uint32_t to, int control, uint64_t channel, const void *data, int64_t n_bytes) {
    NetMessage *message = n_bytes < 0 ? NULL : net_message_new(n_bytes);
    if (message != NULL && n_bytes > 0) message->data = (unsigned char *)malloc((size_t)n_bytes);
    if (message == NULL || (n_bytes > 0 && message->data == NULL)) {
        free(message);
        return error_set("network: no memory for a message of %lld bytes", (long long)n_bytes);
    }
    if (n_bytes > 0) memcpy(message->data, data, (size_t)n_bytes);
    return net_submit(net, to, control ? FRAME_CONTROL : FRAME_BULK, channel, message);
}

// Sends the file at path, which must stay as it is until NET_FILE_SENT; it is read as it goes. The receiver names its
// place by net_expect_file with the same channel, before or after.
static inline int net_send_file(Net *net, uint32_t to, uint64_t channel, const char *path) {
    struct stat info;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) return error_set("%s: open: %s", path, strerror(errno));
    if (fstat(fd, &info) != 0 || !S_ISREG(info.st_mode)) {
        close(fd);
        return error_set("%s: not a regular file", path);
    }
    NetMessage *message = net_message_new((int64_t)info.st_size);
    if (message == NULL || (message->path = strdup(path)) == NULL) {
        free(message);
        close(fd);
        return error_set("network: no memory");
    }
    message->fd = fd;
    return net_submit(net, to, FRAME_FILES, channel, message);
}

// The next file that the node sends on the channel goes to path, if it has at most max_bytes. What is there is
// overwritten; until NET_FILE it is a part of the new one, and it is not synced.
static inline int net_expect_file(Net *net, uint32_t from, uint64_t channel, const char *path, int64_t max_bytes) {
    NetCommand *command = command_new(COMMAND_EXPECT, from);
    NetExpected *expected = command == NULL ? NULL : (NetExpected *)calloc(1, sizeof *expected);
    if (expected == NULL) {
        free(command);
        return error_set("network: no memory");
    }
    command->expected = expected, expected->channel = channel, expected->max_bytes = max_bytes;
    int fits = snprintf(expected->path, sizeof expected->path, "%s", path) < (int)sizeof expected->path;
    pthread_mutex_lock(&net->lock);
    NetLine *line = fits ? net_line(net, from) : NULL;
    if (line != NULL) command->life = line->life, net_command_push(net, command);
    pthread_mutex_unlock(&net->lock);
    net_wake_thread(net);
    if (line != NULL) return 0;
    command_free(command);
    return fits ? error_set("network: node %u is not known (any more)", from)
                : error_set("%.200s: the path is too long", path);
}

// 1: *event is the next event, its data is the caller's to free; 0: there is none now; -1: the network has failed, and
// nothing will come any more.
static inline int net_next(Net *net, NetEvent *event) {
    char failure[ERROR_MAX];
    memset(event, 0, sizeof *event);
    pthread_mutex_lock(&net->lock);
    NetEventItem *item = net->first_event;
    memcpy(failure, net->failure, sizeof failure);
    if (item != NULL) {
        net->first_event = item->next;
        net->inbox_bytes -= event_bytes(&item->event);
    }
    int room = net->inbox_was_full && net->inbox_bytes <= net->limits.inbox_bytes / 2;
    pthread_mutex_unlock(&net->lock);
    if (room) net_wake_thread(net); // bulk that waits at its senders may come
    if (item == NULL) return failure[0] == '\0' ? 0 : error_set("%s", failure);
    *event = item->event;
    free(item);
    return 1;
}

// Waits until there is an event (1), the time is over or net_wake was called (0). -1: the network has failed.
static inline int net_wait(Net *net, double wait_seconds) {
    struct timespec until;
    double end = net_now() - 1.0 + (wait_seconds > 0.0 ? wait_seconds : 0.0); // of CLOCK_MONOTONIC
    int late = 0, result;
    until.tv_sec = (time_t)end, until.tv_nsec = (long)((end - (double)until.tv_sec) * 1e9);
    pthread_mutex_lock(&net->lock);
    while (net->first_event == NULL && !net->woken && net->failure[0] == '\0' && !late)
        late = pthread_cond_timedwait(&net->changed, &net->lock, &until) != 0;
    net->woken = 0;
    result = net->first_event != NULL ? 1 : net->failure[0] != '\0' ? error_set("%s", net->failure) : 0;
    pthread_mutex_unlock(&net->lock);
    return result;
}

// Ends a net_wait, the one that is under way or the next.
static inline void net_wake(Net *net) {
    pthread_mutex_lock(&net->lock);
    net->woken = 1;
    pthread_cond_broadcast(&net->changed);
    pthread_mutex_unlock(&net->lock);
}

// What beats tell others of us from here on: a number that changes whenever the caller gets on.
static inline void net_progress(Net *net, uint64_t progress) {
    pthread_mutex_lock(&net->lock);
    net->progress_shared = progress;
    pthread_mutex_unlock(&net->lock);
}

// How it stands with a node. -1: there is no such node.
static inline int net_status(Net *net, uint32_t id, NetStatus *status) {
    memset(status, 0, sizeof *status);
    pthread_mutex_lock(&net->lock);
    const NetLine *line = net_line(net, id);
    if (line != NULL) *status = line->status, status->queued = line->given - line->done;
    pthread_mutex_unlock(&net->lock);
    return line != NULL ? 0 : error_set("network: node %u is not known (any more)", id);
}

// What all connections have carried together.
static inline void net_total(Net *net, NetTotal *total) {
    pthread_mutex_lock(&net->lock);
    *total = net->total;
    pthread_mutex_unlock(&net->lock);
}

// Bytes given to net_send and net_send_file for a node that have not arrived; 0 if it is not known.
static inline int64_t net_queued(Net *net, uint32_t to) {
    pthread_mutex_lock(&net->lock);
    const NetLine *line = net_line(net, to);
    int64_t queued = line != NULL ? line->given - line->done : 0;
    pthread_mutex_unlock(&net->lock);
    return queued;
}

#endif

#endif
