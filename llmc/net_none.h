// The functions of net.h where the program is built without ZeroMQ: there is no network, and what would need one says
// so.
#ifndef LLMC_NET_NONE_H
#define LLMC_NET_NONE_H

#include "net_types.h"

#define NET_NONE "built without ZeroMQ: install libzmq3-dev (Debian), then make"

static inline int net_keys_make(NetKeys *keys) {
    memset(keys, 0, sizeof *keys);
    return error_set("%s", NET_NONE);
}

static inline int net_keys_save(const NetKeys *keys, const char *path) {
    (void)keys, (void)path;
    return error_set("%s", NET_NONE);
}

static inline int net_keys_load(NetKeys *keys, const char *path) {
    (void)path;
    return net_keys_make(keys);
}

static inline int net_token_print(char *out, size_t size, const NetKeys *keys, const char *endpoint) {
    (void)keys, (void)endpoint;
    if (size > 0) *out = '\0';
    return error_set("%s", NET_NONE);
}

static inline int net_token_parse(NetToken *token, const char *text) {
    (void)text;
    memset(token, 0, sizeof *token);
    return error_set("%s", NET_NONE);
}

static inline int net_write_private(const char *path, const char *text) {
    (void)path, (void)text;
    return error_set("%s", NET_NONE);
}

static inline Net *net_host(const char *endpoint, const NetKeys *keys, const NetLimits *limits) {
    (void)endpoint, (void)keys, (void)limits;
    error_set("%s", NET_NONE);
    return NULL;
}

static inline Net *net_join(const NetToken *token, const char *listen_endpoint, const NetLimits *limits) {
    (void)token, (void)listen_endpoint, (void)limits;
    error_set("%s", NET_NONE);
    return NULL;
}

static inline const char *net_endpoint(const Net *net) {
    (void)net;
    return "";
}

static inline const char *net_public_key(const Net *net) {
    (void)net;
    return "";
}

static inline void net_hello(Net *net) {
    (void)net;
}

static inline int net_admit(Net *net, uint32_t handle, uint32_t id) {
    (void)net, (void)handle, (void)id;
    return error_set("%s", NET_NONE);
}

static inline int net_refuse(Net *net, uint32_t handle, const char *reason) {
    (void)net, (void)handle, (void)reason;
    return error_set("%s", NET_NONE);
}

static inline void net_drop(Net *net, uint32_t id) {
    (void)net, (void)id;
}

static inline int net_peer(Net *net, uint32_t id, const char *endpoint, const char *public_key) {
    (void)net, (void)id, (void)endpoint, (void)public_key;
    return error_set("%s", NET_NONE);
}

static inline void net_generation(Net *net, uint32_t generation) {
    (void)net, (void)generation;
}

static inline int net_send(Net *net, uint32_t to, int control, uint64_t channel, const void *data, int64_t n_bytes) {
    (void)net, (void)to, (void)control, (void)channel, (void)data, (void)n_bytes;
    return error_set("%s", NET_NONE);
}

static inline int net_send_file(Net *net, uint32_t to, uint64_t channel, const char *path) {
    (void)net, (void)to, (void)channel, (void)path;
    return error_set("%s", NET_NONE);
}

static inline int net_expect_file(Net *net, uint32_t from, uint64_t channel, const char *path, int64_t max_bytes) {
    (void)net, (void)from, (void)channel, (void)path, (void)max_bytes;
    return error_set("%s", NET_NONE);
}

static inline int net_next(Net *net, NetEvent *event) {
    (void)net;
    memset(event, 0, sizeof *event);
    return error_set("%s", NET_NONE);
}

static inline int net_wait(Net *net, double wait_seconds) {
    (void)net, (void)wait_seconds;
    return error_set("%s", NET_NONE);
}

static inline void net_wake(Net *net) {
    (void)net;
}

static inline void net_progress(Net *net, uint64_t progress) {
    (void)net, (void)progress;
}

static inline int net_status(Net *net, uint32_t id, NetStatus *status) {
    (void)net, (void)id;
    memset(status, 0, sizeof *status);
    return error_set("%s", NET_NONE);
}

static inline void net_totals(Net *net, NetTotals *totals) {
    (void)net;
    memset(totals, 0, sizeof *totals);
}

static inline int64_t net_queued(Net *net, uint32_t to) {
    (void)net, (void)to;
    return 0;
}

static inline void net_close(Net *net) {
    (void)net;
}

#endif
