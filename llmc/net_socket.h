// The network's sockets: all are CURVE, bounded in every queue, and closed without waiting. A coordinator has one
// ROUTER; a joiner has three DEALERs to it (control, bulk, beats), two to each peer that it dials, and a ROUTER of its
// own for peers that dial it. Who may connect to a ROUTER is answered in net_zap (ZeroMQ's RFC 27).
#ifndef LLMC_NET_SOCKET_H
#define LLMC_NET_SOCKET_H

#include <arpa/inet.h>  // inet_ntop
#include <netinet/in.h> // sockaddr_in
#include <sys/random.h> // getrandom
#include <sys/socket.h> // getpeername
#include <zmq.h>

#include "net_node.h"

enum {
    NET_PIPE = 16 /* frames that a connection keeps before it is blocked: 4 MiB of bulk */,
    NET_PIPE_CONTROL = 256,
    NET_LINGER = 200 /* ms for what is in a pipe at the end */
};

static inline int net_zmq_error(const char *what) {
    return error_set("network: %s: %s", what, zmq_strerror(zmq_errno()));
}

static inline int net_option(void *socket, int option, int value) {
    return zmq_setsockopt(socket, option, &value, sizeof value) == 0 ? 0 : net_zmq_error("zmq_setsockopt");
}

static inline int net_option_text(void *socket, int option, const char *value) {
    return zmq_setsockopt(socket, option, value, strlen(value)) == 0 ? 0 : net_zmq_error("zmq_setsockopt");
}

// What all sockets have. A connection that takes nothing, or whose other end does not answer the kernel, ends after
// seconds. ZeroMQ's own heartbeats stay off: in 4.3.4 one that is due while a broken connection's last frames wait to
// be taken ends the process (Assertion failed: !_io_error), as after a stop of some seconds. Our beats do the same.
static inline int net_socket_options(void *socket, int pipe) {
    int64_t largest = FRAME_MAX + 256; // CURVE adds some bytes
    if (zmq_setsockopt(socket, ZMQ_MAXMSGSIZE, &largest, sizeof largest) != 0) return net_zmq_error("zmq_setsockopt");
    return net_option(socket, ZMQ_LINGER, NET_LINGER) || net_option(socket, ZMQ_SNDHWM, pipe) ||
           net_option(socket, ZMQ_RCVHWM, pipe) || net_option(socket, ZMQ_HANDSHAKE_IVL, 10000) ||
           net_option(socket, ZMQ_TCP_MAXRT, 10000) || net_option(socket, ZMQ_TCP_KEEPALIVE, 1) ||
           net_option(socket, ZMQ_TCP_KEEPALIVE_IDLE, 6) || net_option(socket, ZMQ_TCP_KEEPALIVE_INTVL, 2) ||
           net_option(socket, ZMQ_TCP_KEEPALIVE_CNT, 3);
}

// Binds our ROUTER; net->endpoint and net->listen_port are what was taken. domain: who may connect, net_is_admitted.
static inline int net_bind(Net *net, const char *endpoint, const char *secret_key, const char *domain) {
    size_t size = sizeof net->endpoint;
    const char *host;
    size_t n_host;
    if (net_endpoint_parse(endpoint, strlen(endpoint), &host, &n_host, &net->listen_port)) return -1;
    net->router = zmq_socket(net->context, ZMQ_ROUTER);
    if (net->router == NULL) return net_zmq_error("zmq_socket");
    // HANDOVER: a node that dials anew before its broken connection is noticed here takes its place. MANDATORY: a full
    // or missing connection is told, not skipped.
    if (net_socket_options(net->router, NET_PIPE) || net_option(net->router, ZMQ_ROUTER_MANDATORY, 1) ||
        net_option(net->router, ZMQ_ROUTER_HANDOVER, 1) || net_option(net->router, ZMQ_CURVE_SERVER, 1) ||
        net_option_text(net->router, ZMQ_CURVE_SECRETKEY, secret_key) ||
        net_option_text(net->router, ZMQ_ZAP_DOMAIN, domain))
        return -1;
    if (zmq_socket_monitor(net->router, "inproc://router",
                           ZMQ_EVENT_ACCEPTED | ZMQ_EVENT_HANDSHAKE_FAILED_NO_DETAIL |
                               ZMQ_EVENT_HANDSHAKE_FAILED_PROTOCOL) != 0)
        return net_zmq_error("zmq_socket_monitor");
    net->router_monitor = zmq_socket(net->context, ZMQ_PAIR);
    if (net->router_monitor == NULL || zmq_connect(net->router_monitor, "inproc://router") != 0)
        return net_zmq_error("zmq_connect");
    if (zmq_bind(net->router, endpoint) != 0) return error_set("%s: bind: %s", endpoint, zmq_strerror(zmq_errno()));
    if (zmq_getsockopt(net->router, ZMQ_LAST_ENDPOINT, net->endpoint, &size) != 0)
        return net_zmq_error("zmq_getsockopt");
    return net_endpoint_parse(net->endpoint, strlen(net->endpoint), &host, &n_host, &net->listen_port);
}

// What a DEALER tells about failed handshakes goes to dealer_monitor.
static inline int net_watch_dealer(Net *net, void *socket) {
    char name[48];
    snprintf(name, sizeof name, "inproc://dealer%d", net->monitors++);
    if (net->dealer_monitor != NULL) zmq_close(net->dealer_monitor);
    net->dealer_monitor = zmq_socket(net->context, ZMQ_PAIR);
    if (net->dealer_monitor == NULL ||
        zmq_socket_monitor(socket, name,
                           ZMQ_EVENT_HANDSHAKE_FAILED_NO_DETAIL | ZMQ_EVENT_HANDSHAKE_FAILED_PROTOCOL |
                               ZMQ_EVENT_HANDSHAKE_FAILED_AUTH) != 0 ||
        zmq_connect(net->dealer_monitor, name) != 0)
        return net_zmq_error("zmq_socket_monitor");
    return 0;
}

// Dials one lane of a node: the coordinator with the run's keys, a peer with our own.
static inline int net_dial_lane(Net *net, NetNode *node, int lane) {
    unsigned char id[NET_ID];
    const NetToken *token = &net->token;
    int is_coordinator = node->id == 0;
    void *socket = zmq_socket(net->context, ZMQ_DEALER);
    if (socket == NULL) return net_zmq_error("zmq_socket");
    node->lanes[lane].socket = socket, node->lanes[lane].blocked = 0, node->lanes[lane].dialled = net->now;
    id[0] = (unsigned char)net_lane_letters[lane];
    memcpy(id + 1, node->base, NET_BASE);
    // IMMEDIATE: nothing is queued for a connection that is not there, and what was queued when it broke is gone; the
    // streams send it again, in order.
    if (net_socket_options(socket, lane == LANE_CONTROL ? NET_PIPE_CONTROL : (int)NET_PIPE) ||
        net_option(socket, ZMQ_IMMEDIATE, 1) || net_option(socket, ZMQ_CONNECT_TIMEOUT, 5000) ||
        net_option(socket, ZMQ_RECONNECT_IVL, 100) || net_option(socket, ZMQ_RECONNECT_IVL_MAX, 2000) ||
        net_option_text(socket, ZMQ_CURVE_SERVERKEY, is_coordinator ? token->server_public : node->key) ||
        net_option_text(socket, ZMQ_CURVE_PUBLICKEY, is_coordinator ? token->run_public : net->public_key) ||
        net_option_text(socket, ZMQ_CURVE_SECRETKEY, is_coordinator ? token->run_secret : net->secret_key))
        return -1;
    if (zmq_setsockopt(socket, ZMQ_ROUTING_ID, id, sizeof id) != 0) return net_zmq_error("zmq_setsockopt");
    if (is_coordinator && lane == LANE_CONTROL && net_watch_dealer(net, socket)) return -1;
    return zmq_connect(socket, node->endpoint) == 0
               ? 0
               : error_set("%s: connect: %s", node->endpoint, zmq_strerror(zmq_errno()));
}

// linger: ms for what is in the pipe.
static inline void net_hang_up(NetNode *node, int lane, int linger) {
    if (node->lanes[lane].socket == NULL) return;
    net_option(node->lanes[lane].socket, ZMQ_LINGER, linger);
    zmq_close(node->lanes[lane].socket);
    node->lanes[lane].socket = NULL;
}

// Dials all lanes (anew), with routing ids that nobody but the other side knows. The coordinator knows us by them.
static inline int net_dial(Net *net, NetNode *node) {
    int keep = node->id == 0 && node->lanes[LANE_CONTROL].socket != NULL;
    if (!keep && getrandom(node->base, sizeof node->base, 0) != (ssize_t)sizeof node->base)
        return error_set("network: getrandom: %s", strerror(errno));
    for (int lane = 0; lane < NET_LANES; lane++) {
        net_hang_up(node, lane, 0);
        if (node->id != 0 && lane == LANE_BEAT) continue;
        if (net_dial_lane(net, node, lane)) return -1;
    }
    return 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// Who may connect

// The next part of a message into text (cap, with an end), its bytes into *size. Returns whether more parts follow, or
// -1: there is none, or it is too long.
static inline int net_part(void *socket, char *text, size_t cap, size_t *size) {
    int more = 0;
    size_t more_size = sizeof more;
    int n = zmq_recv(socket, text, cap - 1, ZMQ_DONTWAIT);
    if (n < 0 || zmq_getsockopt(socket, ZMQ_RCVMORE, &more, &more_size) != 0) return -1;
    *size = (size_t)n < cap ? (size_t)n : cap; // cap: it was cut
    text[(size_t)n < cap ? (size_t)n : cap - 1] = '\0';
    return more;
}

static inline int net_is_admitted(Net *net, const char *domain, const char *key) {
    if (strcmp(domain, "run") == 0) return strcmp(key, net->run_public) == 0;
    return net_node_by_key(net, key) != NULL;
}

// Answers one request: version, request id, domain, address, routing id, mechanism, key. Returns 0 if there was none.
static inline int net_zap(Net *net) {
    enum { ZAP_PARTS = 7, ZAP_CAP = 260 };
    char parts[ZAP_PARTS][ZAP_CAP], rest[ZAP_CAP], key[NET_KEY] = "";
    size_t sizes[ZAP_PARTS] = {0}, rest_size;
    int n_parts = 0, more = 1;
    memset(parts, 0, sizeof parts);
    for (; more == 1; n_parts++) {
        more = n_parts < ZAP_PARTS ? net_part(net->zap, parts[n_parts], ZAP_CAP, &sizes[n_parts])
                                   : net_part(net->zap, rest, sizeof rest, &rest_size);
        if (more < 0) return 0;
    }
    if (n_parts == ZAP_PARTS && sizes[6] == 32) zmq_z85_encode(key, (const uint8_t *)parts[6], 32);
    int admitted = strcmp(parts[5], "CURVE") == 0 && key[0] != '\0' && net_is_admitted(net, parts[2], key);
    if (!admitted)
        net_tell_intruder(net, NET_NOBODY, parts[3],
                          strcmp(parts[2], "run") == 0 ? "its key is not this run's" : "its key is no peer's");
    const char *answer[] = {"1.0", parts[1], admitted ? "200" : "400", admitted ? "OK" : "not admitted", key, ""};
    for (int i = 0; i < 6; i++)
        zmq_send(net->zap, answer[i], i == 1 ? sizes[1] : strlen(answer[i]), ZMQ_DONTWAIT | (i < 5 ? ZMQ_SNDMORE : 0));
    return 1;
}

// A stranger's address is known when it is accepted, and its failure comes without one: they are told together.
static inline void net_accepted(Net *net, int fd) {
    struct sockaddr_in address;
    socklen_t size = sizeof address;
    memset(&address, 0, sizeof address);
    if (getpeername(fd, (struct sockaddr *)&address, &size) != 0 || address.sin_family != AF_INET) return;
    inet_ntop(AF_INET, &address.sin_addr, net->accepted_from, sizeof net->accepted_from);
}

// Takes one event of a monitor. Returns 0 if there was none.
static inline int net_monitor(Net *net, void *monitor) {
    char event[16], endpoint[NET_ENDPOINT];
    size_t n_event, n_endpoint;
    if (monitor == NULL) return 0;
    int more = net_part(monitor, event, sizeof event, &n_event);
    if (more != 1 || net_part(monitor, endpoint, sizeof endpoint, &n_endpoint) != 0 || n_event != 6) return 0;
    uint16_t what;
    uint32_t value;
    memcpy(&what, event, 2);
    memcpy(&value, event + 2, 4);
    if (what == ZMQ_EVENT_ACCEPTED)
        net_accepted(net, (int)value);
    else if (monitor == net->router_monitor)
        net_tell_intruder(net, NET_NOBODY, net->accepted_from[0] != '\0' ? net->accepted_from : "an unknown address",
                          "a connection that does not speak CURVE with our key");
    else
        net_tell_intruder(net, 0, net->token.endpoint, "the coordinator does not take this token");
    return 1;
}

// ---------------------------------------------------------------------------------------------------------------------
// Frames on their way

static inline int lane_is_blocked(const NetLane *lane, double now) {
    return lane->blocked && (lane->socket != NULL || now < lane->retry_at);
}

static inline void lane_block(NetLane *lane, double now, int error) {
    lane->blocked = 1;
    lane->wait = error == EHOSTUNREACH ? 0.1 : lane->wait > 0.0 ? 1.5 * lane->wait : 0.002;
    if (lane->wait > 0.1) lane->wait = 0.1;
    lane->retry_at = now + lane->wait;
}

static inline void net_count_up(Net *net, int64_t n_bytes) {
    net->totals.wire_up += n_bytes, net->totals.frames_up++;
}

// Sends a message (taken over in any case) to the connection `lane` of who has the base. 0, or -1: not now.
static inline int net_put_routed(Net *net, const unsigned char *base, int lane, zmq_msg_t *message) {
    unsigned char id[NET_ID];
    id[0] = (unsigned char)net_lane_letters[lane];
    memcpy(id + 1, base, NET_BASE);
    int64_t n_bytes = (int64_t)zmq_msg_size(message);
    int failed = zmq_send(net->router, id, sizeof id, ZMQ_SNDMORE | ZMQ_DONTWAIT) < 0 ||
                 zmq_msg_send(message, net->router, ZMQ_DONTWAIT) < 0;
    int error = zmq_errno();
    if (failed)
        zmq_msg_close(message);
    else
        net_count_up(net, n_bytes);
    errno = error;
    return failed ? -1 : 0;
}

// The same for a node that is connected with us, whoever has dialled.
static inline int net_put(Net *net, NetNode *node, int lane, zmq_msg_t *message) {
    NetLane *l = &node->lanes[lane];
    int result = -1;
    int64_t n_bytes = (int64_t)zmq_msg_size(message);
    if (l->socket != NULL) {
        result = zmq_msg_send(message, l->socket, ZMQ_DONTWAIT) < 0 ? -1 : 0;
        if (result != 0)
            zmq_msg_close(message);
        else
            net_count_up(net, n_bytes);
    } else if (node->has_base && net->router != NULL) {
        result = net_put_routed(net, node->base, lane, message);
    } else {
        zmq_msg_close(message);
        errno = EHOSTUNREACH;
    }
    if (result == 0)
        l->blocked = 0, l->wait = 0.0;
    else
        lane_block(l, net->now, errno);
    return result;
}

#endif
