// A small HTTP server for looking at a run: GET / is a page, GET /metrics Prometheus' text, anything else 404. A thread
// of its own answers with copies of what was published last and touches nothing else.
//
//   StatusPage *page = status_page_open("127.0.0.1", 8080);   port 0: any, see page->port
//   status_page_publish(page, html, metrics);                 from malloc, taken over; swapped under a mutex
//   status_page_close(page);
//
// Everybody who reaches the port can read, nobody can do anything: the request's line is all that is looked at. Bounded
// against slow and hostile clients: 16 at once, the others wait in the kernel's queue; a request of 8 KiB; 5 seconds
// from being accepted to being closed; one request a connection.
#ifndef LLMC_STATUS_PAGE_H
#define LLMC_STATUS_PAGE_H

#include <errno.h>       // errno
#include <netdb.h>       // getaddrinfo
#include <netinet/in.h>  // sockaddr_in
#include <poll.h>        // poll
#include <pthread.h>     // the server's thread
#include <stdlib.h>      // calloc
#include <string.h>      // memcmp
#include <sys/eventfd.h> // eventfd
#include <sys/socket.h>  // sockets
#include <time.h>        // clock_gettime
#include <unistd.h>      // close

#include "error.h"

enum { STATUS_CLIENTS = 16, STATUS_QUEUE = 64 /* of the kernel */, STATUS_REQUEST = 8192, STATUS_DRAIN = 1 << 16 };
#ifdef TESTING
#define STATUS_SECONDS 0.5
#else
#define STATUS_SECONDS 5.0 // for a client, in all
#endif

// What the bytes that have come so far ask for.
typedef enum {
    REQUEST_PARTIAL, // more must come
    REQUEST_PAGE,
    REQUEST_METRICS,
    REQUEST_OTHER, // is not found here
    REQUEST_BAD    // is no HTTP, or longer than a request may be
} StatusRequest;

// 1 if the n bytes hold the empty line that ends a request's head.
static inline int request_is_whole(const char *bytes, size_t n) {
    for (size_t i = 1; i < n; i++)
        if (bytes[i] == '\n' && (bytes[i - 1] == '\n' || (i > 1 && bytes[i - 1] == '\r' && bytes[i - 2] == '\n')))
            return 1;
    return 0;
}

static inline int request_is(const char *path, size_t n, const char *name) {
    return n == strlen(name) && memcmp(path, name, n) == 0;
}

// Reads a request's head, of which n bytes are here: "METHOD PATH HTTP/1.x", lines that are not looked at, an empty
// one. What follows a '?' in the path is left out.
static inline StatusRequest status_request(const char *bytes, size_t n) {
    static const char get[] = "GET ", version[] = " HTTP/1.";
    const size_t n_get = sizeof get - 1, n_version = sizeof version; // and a digit
    if (!request_is_whole(bytes, n)) return n >= STATUS_REQUEST ? REQUEST_BAD : REQUEST_PARTIAL;
    size_t line = (size_t)((const char *)memchr(bytes, '\n', n) - bytes);
    if (line > 0 && bytes[line - 1] == '\r') line--;
    if (line < n_version || memcmp(bytes + line - n_version, version, sizeof version - 1) != 0) return REQUEST_BAD;
    size_t end = line - n_version;
    for (size_t i = 0; i < end; i++)
        if (bytes[i] < ' ' || bytes[i] == 0x7F) return REQUEST_BAD;
    if (end < n_get || memcmp(bytes, get, n_get) != 0) return REQUEST_OTHER;
    const char *path = bytes + n_get, *query = (const char *)memchr(path, '?', end - n_get);
    size_t n_path = query != NULL ? (size_t)(query - path) : end - n_get;
    if (request_is(path, n_path, "/")) return REQUEST_PAGE;
    return request_is(path, n_path, "/metrics") ? REQUEST_METRICS : REQUEST_OTHER;
}

// A client, from being accepted to being closed:
//
//   READING --its request is whole--> WRITING --all is sent--> DRAINING --it has closed--> closed
//      all three end with the client's time; DRAINING: closing at once could take the answer from it
typedef enum { CLIENT_NONE, CLIENT_READING, CLIENT_WRITING, CLIENT_DRAINING } ClientPhase;

typedef struct {
    int fd;
    ClientPhase phase;
    double until; // its time is over
    char request[STATUS_REQUEST];
    size_t n_request, n_drained;
    char *answer;
    size_t n_answer, n_sent;
} StatusClient;

typedef struct {
    int listener, wake, port, started, stopping;
    double rests; // no client is accepted before, after accepting has failed
    pthread_t thread;
    pthread_mutex_t lock;
    char *page, *metrics; // under the lock, with `stopping`
    StatusClient clients[STATUS_CLIENTS];
} StatusPage;

static inline double status_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static inline void client_close(StatusClient *client) {
    if (client->phase == CLIENT_NONE) return;
    close(client->fd);
    free(client->answer);
    client->answer = NULL, client->phase = CLIENT_NONE;
}

// The answer to a request, from malloc; NULL: no memory.
static inline char *status_answer(StatusPage *page, StatusRequest request, size_t *n_bytes) {
    const char *status = request == REQUEST_BAD ? "400 Bad Request" : "404 Not Found", *type = "text/plain";
    const char *body = request == REQUEST_BAD ? "not an HTTP request of this size\n" : "there are / and /metrics\n";
    char head[512], *answer;
    pthread_mutex_lock(&page->lock);
    if (request == REQUEST_PAGE) status = "200 OK", type = "text/html", body = page->page;
    if (request == REQUEST_METRICS) status = "200 OK", type = "text/plain; version=0.0.4", body = page->metrics;
    if (body == NULL) body = "";
    size_t n_body = strlen(body);
    int n_head = snprintf(head, sizeof head,
                          "HTTP/1.1 %s\r\nContent-Type: %s%s\r\nContent-Length: %zu\r\nCache-Control: no-store\r\n"
                          "X-Content-Type-Options: nosniff\r\n"
                          "Content-Security-Policy: default-src 'none'; style-src 'unsafe-inline'\r\n"
                          "Connection: close\r\n\r\n",
                          status, type, "; charset=utf-8", n_body);
    answer = (char *)malloc((size_t)n_head + n_body);
    if (answer != NULL) {
        memcpy(answer, head, (size_t)n_head);
        memcpy(answer + n_head, body, n_body);
        *n_bytes = (size_t)n_head + n_body;
    }
    pthread_mutex_unlock(&page->lock);
    return answer;
}

// 1 if a call on a socket may be tried again.
static inline int status_later(void) {
    return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR;
}

static inline void client_read(StatusPage *page, StatusClient *client) {
    ssize_t n = recv(client->fd, client->request + client->n_request, STATUS_REQUEST - client->n_request, 0);
    if (n < 0 && status_later()) return;
    if (n <= 0) {
        client_close(client);
        return;
    }
    client->n_request += (size_t)n;
    StatusRequest request = status_request(client->request, client->n_request);
    if (request == REQUEST_PARTIAL) return;
    client->answer = status_answer(page, request, &client->n_answer);
    client->phase = CLIENT_WRITING;
    if (client->answer == NULL) client_close(client);
}

static inline void client_write(StatusClient *client) {
    ssize_t n = send(client->fd, client->answer + client->n_sent, client->n_answer - client->n_sent, MSG_NOSIGNAL);
    if (n < 0 && !status_later()) {
        client_close(client);
        return;
    }
    client->n_sent += n > 0 ? (size_t)n : 0;
    if (client->n_sent < client->n_answer) return;
    shutdown(client->fd, SHUT_WR);
    client->phase = CLIENT_DRAINING;
}

static inline void client_drain(StatusClient *client) {
    ssize_t n = recv(client->fd, client->request, sizeof client->request, 0);
    if (n < 0 && status_later()) return;
    client->n_drained += n > 0 ? (size_t)n : 0;
    if (n <= 0 || client->n_drained > STATUS_DRAIN) client_close(client);
}

static inline void client_go_on(StatusPage *page, StatusClient *client) {
    if (client->phase == CLIENT_READING) client_read(page, client);
    if (client->phase == CLIENT_WRITING)
        client_write(client);
    else if (client->phase == CLIENT_DRAINING)
        client_drain(client);
}

static inline StatusClient *status_free_client(StatusPage *page) {
    for (int i = 0; i < STATUS_CLIENTS; i++)
        if (page->clients[i].phase == CLIENT_NONE) return &page->clients[i];
    return NULL;
}

static inline void status_accept(StatusPage *page, StatusClient *client) {
    int fd = accept4(page->listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0) {
        if (!status_later() && errno != ECONNABORTED) page->rests = status_now() + 1.0; // no descriptors are left
        return;
    }
    memset(client, 0, sizeof *client);
    client->fd = fd, client->phase = CLIENT_READING, client->until = status_now() + STATUS_SECONDS;
}

// One pass: waits until a socket is ready or a client's time is over.
static inline void status_pass(StatusPage *page) {
    struct pollfd fds[2 + STATUS_CLIENTS];
    double now = status_now(), due = now + 60.0;
    StatusClient *room = page->rests > now ? NULL : status_free_client(page);
    if (page->rests > now) due = page->rests;
    fds[0].fd = page->wake, fds[0].events = POLLIN;
    fds[1].fd = room != NULL ? page->listener : -1, fds[1].events = POLLIN;
    for (int i = 0; i < STATUS_CLIENTS; i++) {
        const StatusClient *client = &page->clients[i];
        fds[2 + i].fd = client->phase == CLIENT_NONE ? -1 : client->fd;
        fds[2 + i].events = client->phase == CLIENT_WRITING ? POLLOUT : POLLIN;
        if (client->phase != CLIENT_NONE && client->until < due) due = client->until;
    }
    if (poll(fds, 2 + STATUS_CLIENTS, due > now ? (int)(1e3 * (due - now)) + 1 : 0) < 0) return;
    now = status_now();
    for (int i = 0; i < STATUS_CLIENTS; i++) {
        StatusClient *client = &page->clients[i];
        if (fds[2 + i].fd >= 0 && fds[2 + i].revents != 0) client_go_on(page, client);
        if (client->phase != CLIENT_NONE && client->until <= now) client_close(client);
    }
    if (fds[1].fd >= 0 && fds[1].revents != 0) status_accept(page, room);
}

static inline void *status_thread(void *context) {
    StatusPage *page = (StatusPage *)context;
    int stopping = 0;
    while (!stopping) {
        status_pass(page);
        pthread_mutex_lock(&page->lock);
        stopping = page->stopping;
        pthread_mutex_unlock(&page->lock);
    }
    return NULL;
}

// Ends the server at once. NULL is fine.
static inline void status_page_close(StatusPage *page) {
    uint64_t one = 1;
    if (page == NULL) return;
    pthread_mutex_lock(&page->lock);
    page->stopping = 1;
    pthread_mutex_unlock(&page->lock);
    if (page->started && write(page->wake, &one, sizeof one) == (ssize_t)sizeof one) pthread_join(page->thread, NULL);
    for (int i = 0; i < STATUS_CLIENTS; i++) client_close(&page->clients[i]);
    if (page->listener >= 0) close(page->listener);
    if (page->wake >= 0) close(page->wake);
    pthread_mutex_destroy(&page->lock);
    free(page->page);
    free(page->metrics);
    free(page);
}

// Binds the listener to the first of an address's meanings that works.
static inline int status_listen(StatusPage *page, const char *address, int port) {
    struct addrinfo hints, *list = NULL;
    struct sockaddr_storage bound;
    socklen_t n_bound = sizeof bound;
    char service[16];
    int on = 1, failure = 0;
    memset(&hints, 0, sizeof hints);
    hints.ai_socktype = SOCK_STREAM, hints.ai_flags = AI_PASSIVE;
    snprintf(service, sizeof service, "%d", port);
    int status = getaddrinfo(address, service, &hints, &list);
    if (status != 0) return error_set("--status-address %.200s: %s", address, gai_strerror(status));
    for (const struct addrinfo *at = list; at != NULL && page->listener < 0; at = at->ai_next) {
        int fd = socket(at->ai_family, at->ai_socktype | SOCK_NONBLOCK | SOCK_CLOEXEC, at->ai_protocol);
        if (fd >= 0) setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
        if (fd >= 0 && bind(fd, at->ai_addr, at->ai_addrlen) == 0 && listen(fd, STATUS_QUEUE) == 0) {
            page->listener = fd;
        } else {
            failure = errno;
            if (fd >= 0) close(fd);
        }
    }
    freeaddrinfo(list);
    if (page->listener < 0)
        return error_set("--status-port %d on %.200s: %s; give another port, or 0 for none", port, address,
                         strerror(failure));
    if (getsockname(page->listener, (struct sockaddr *)(void *)&bound, &n_bound) != 0)
        return error_set("--status-port: getsockname: %s", strerror(errno));
    page->port = ntohs(bound.ss_family == AF_INET6 ? ((struct sockaddr_in6 *)(void *)&bound)->sin6_port
                                                   : ((struct sockaddr_in *)(void *)&bound)->sin_port);
    return 0;
}

// Serves at an address of this machine (a name or a number), with empty texts until the first are published. port 0:
// any that is free. Returns NULL with a message: the port is taken, no such address, ...
static inline StatusPage *status_page_open(const char *address, int port) {
    StatusPage *page = (StatusPage *)calloc(1, sizeof *page);
    if (page == NULL) {
        error_set("out of memory for the status page");
        return NULL;
    }
    pthread_mutex_init(&page->lock, NULL);
    page->listener = -1, page->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    int status = page->wake < 0 ? error_set("the status page: eventfd: %s", strerror(errno))
                                : status_listen(page, address, port);
    if (status == 0) {
        status = pthread_create(&page->thread, NULL, status_thread, page);
        page->started = status == 0;
        if (status != 0) error_set("no thread for the status page: %s", strerror(status));
    }
    if (status == 0) return page;
    status_page_close(page);
    return NULL;
}

// What clients get from here on. Takes over both texts.
static inline void status_page_publish(StatusPage *page, char *html, char *metrics) {
    pthread_mutex_lock(&page->lock);
    char *old_page = page->page, *old_metrics = page->metrics;
    page->page = html, page->metrics = metrics;
    pthread_mutex_unlock(&page->lock);
    free(old_page);
    free(old_metrics);
}

#endif
