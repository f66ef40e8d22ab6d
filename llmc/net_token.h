// The keys of a run, and the join token that is made of them. Keys are never printed but into the token and the key
// file.
//
//   tcp://HOST:PORT?key=<64 hex digits: the coordinator's public key><64 hex digits: the secret half of the run's key
//   pair>
//
// Who has the token knows whom it talks to, and may join. It can be given as such, as @FILE, or as env:NAME.
//
//   NetKeys keys;  if (net_keys_make(&keys) || net_keys_save(&keys, "run/keys")) return -1;
//   net_token_print(text, sizeof text, &keys, "tcp://192.0.2.7:29500");
//   NetToken token;  if (net_token_parse(&token, text)) return -1;
//
// The key file has mode 0600 and these three lines; the public halves follow from the secret ones:
//   meshtune keys 1
//   server <64 hex digits>
//   run <64 hex digits>
#ifndef LLMC_NET_TOKEN_H
#define LLMC_NET_TOKEN_H

#include <errno.h>    // errno
#include <fcntl.h>    // open
#include <stdlib.h>   // getenv, strtol
#include <sys/stat.h> // fchmod
#include <unistd.h>   // read, write, close
#include <zmq.h>      // zmq_curve_keypair, zmq_z85_encode

#include "file.h"      // file_sync, file_replace
#include "net_types.h" // NetKeys, NetToken

enum { NET_KEY_BYTES = 32, NET_KEY_HEX = 64, NET_KEY_FILE = 256 };

static inline int net_hex_digit(char c) {
    if (c >= '0' && c <= '9') return c - '0';
    if (c >= 'a' && c <= 'f') return c - 'a' + 10;
    if (c >= 'A' && c <= 'F') return c - 'A' + 10;
    return -1;
}

// out (65) = the 32 bytes of a Z85 key in hexadecimal digits.
static inline void net_key_to_hex(char *out, const char *z85) {
    uint8_t bytes[NET_KEY_BYTES] = {0};
    zmq_z85_decode(bytes, z85);
    for (int i = 0; i < NET_KEY_BYTES; i++) snprintf(out + 2 * i, 3, "%02x", bytes[i]);
}

// The key of 64 hexadecimal digits, whatever follows them. -1 if there are fewer.
static inline int net_key_from_hex(char z85[NET_KEY], const char *hex) {
    uint8_t bytes[NET_KEY_BYTES];
    for (int i = 0; i < NET_KEY_BYTES; i++) {
        int high = net_hex_digit(hex[2 * i]), low = high < 0 ? -1 : net_hex_digit(hex[2 * i + 1]);
        if (low < 0) return error_set("a key has 64 hexadecimal digits");
        bytes[i] = (uint8_t)(16 * high + low);
    }
    zmq_z85_encode(z85, bytes, NET_KEY_BYTES);
    return 0;
}

// Two new key pairs.
static inline int net_keys_make(NetKeys *keys) {
    memset(keys, 0, sizeof *keys);
    if (zmq_curve_keypair(keys->server_public, keys->server_secret) != 0 ||
        zmq_curve_keypair(keys->run_public, keys->run_secret) != 0)
        return error_set("no keys: %s (this ZeroMQ may be built without CURVE)", zmq_strerror(errno));
    return 0;
}

static inline int net_write_aside(const char *path, const char *text) {
    size_t n = strlen(text);
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (fd < 0) return error_set("%s: open for writing: %s", path, strerror(errno));
    int result = 0;
    if (fchmod(fd, 0600) != 0) // before the first byte: the file may have been there
        result = error_set("%s: chmod: %s", path, strerror(errno));
    else if (write(fd, text, n) != (ssize_t)n)
        result = error_set("%s: write: %s", path, strerror(errno));
    else
        result = file_sync(fd, path);
    close(fd);
    return result;
}

// Writes a file that only the owner reads; at any moment it holds the old text or the new one.
static inline int net_write_private(const char *path, const char *text) {
    char aside[PATH_MAX];
    if (snprintf(aside, sizeof aside, "%s.tmp", path) >= (int)sizeof aside)
        return error_set("%.200s: the path is too long", path);
    if (net_write_aside(aside, text) == 0 && file_replace(aside, path) == 0) return 0;
    unlink(aside);
    return -1;
}

// Writes the secret halves, readable for the owner only; the file holds the old keys or the new ones.
static inline int net_keys_save(const NetKeys *keys, const char *path) {
    char text[NET_KEY_FILE], server[NET_KEY_HEX + 1], run[NET_KEY_HEX + 1];
    net_key_to_hex(server, keys->server_secret);
    net_key_to_hex(run, keys->run_secret);
    snprintf(text, sizeof text, "meshtune keys 1\nserver %s\nrun %s\n", server, run);
    return net_write_private(path, text);
}

// text (cap) = the small file at path, with its end.
static inline int net_read_small(char *text, size_t cap, const char *path) {
    FileMap map;
    if (file_map(&map, path)) return -1;
    int fits = map.size < cap;
    if (fits) memcpy(text, map.data, map.size), text[map.size] = '\0';
    file_unmap(&map);
    return fits ? 0 : error_set("%s: more than the %zu bytes that are expected there", path, cap - 1);
}

// Reads what net_keys_save wrote.
static inline int net_keys_load(NetKeys *keys, const char *path) {
    static const char head[] = "meshtune keys 1\nserver ", between[] = "\nrun ";
    char text[NET_KEY_FILE];
    size_t server = sizeof head - 1, run = server + NET_KEY_HEX + sizeof between - 1;
    memset(keys, 0, sizeof *keys);
    if (net_read_small(text, sizeof text, path)) return -1;
    if (strlen(text) != run + NET_KEY_HEX + 1 || strncmp(text, head, server) != 0 || text[strlen(text) - 1] != '\n' ||
        strncmp(text + server + NET_KEY_HEX, between, sizeof between - 1) != 0 ||
        net_key_from_hex(keys->server_secret, text + server) || net_key_from_hex(keys->run_secret, text + run))
        return error_set("%s: not a key file; remove it for new keys", path);
    if (zmq_curve_public(keys->server_public, keys->server_secret) != 0 ||
        zmq_curve_public(keys->run_public, keys->run_secret) != 0)
        return error_set("%s: the keys are not usable: %s", path, zmq_strerror(errno));
    return 0;
}

// Splits tcp://HOST:PORT: *n_host characters of host at *host, and the port, 0 for *. HOST: letters, digits, '.', '-',
// '_', or '*'.
static inline int net_endpoint_parse(const char *endpoint, size_t n, const char **host, size_t *n_host, int *port) {
    const size_t scheme = strlen("tcp://");
    size_t colon = n;
    if (n >= NET_ENDPOINT || n < scheme || strncmp(endpoint, "tcp://", scheme) != 0)
        return error_set("'%.*s' does not begin with tcp://", (int)(n < 64 ? n : 64), endpoint);
    while (colon > scheme && endpoint[colon - 1] != ':') colon--;
    *host = endpoint + scheme, *n_host = colon > scheme ? colon - 1 - scheme : 0, *port = 0;
    for (size_t i = 0; i < *n_host; i++)
        if (strchr("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.-_*", (*host)[i]) == NULL)
            return error_set("'%.*s': the host has a character of no host's name", (int)n, endpoint);
    int any = n - colon == 1 && endpoint[colon] == '*', valid = *n_host > 0 && (any || (n > colon && n - colon <= 5));
    for (size_t i = colon; i < n && valid && !any; i++) {
        valid = endpoint[i] >= '0' && endpoint[i] <= '9';
        *port = 10 * *port + (endpoint[i] - '0');
    }
    if (!valid || (!any && (*port < 1 || *port > 65535)))
        return error_set("'%.*s' is not tcp://HOST:PORT", (int)n, endpoint);
    return 0;
}

// out (size, NET_TOKEN is enough) = the token for those who reach the coordinator at tcp://HOST:PORT.
static inline int net_token_print(char *out, size_t size, const NetKeys *keys, const char *endpoint) {
    const char *host;
    size_t n_host;
    int port;
    char server[NET_KEY_HEX + 1], run[NET_KEY_HEX + 1];
    if (net_endpoint_parse(endpoint, strlen(endpoint), &host, &n_host, &port)) return -1;
    if (port == 0 || memchr(host, '*', n_host) != NULL)
        return error_set("'%s' cannot be dialled: a token needs a host and a port", endpoint);
    net_key_to_hex(server, keys->server_public);
    net_key_to_hex(run, keys->run_secret);
    int n = snprintf(out, size, "%s?key=%s%s", endpoint, server, run);
    return n < 0 || (size_t)n >= size ? error_set("'%.64s': the token does not fit", endpoint) : 0;
}

static inline int net_token_parse_text(NetToken *token, const char *text) {
    const char *question = strchr(text, '?'), *host;
    size_t n_host;
    int port;
    memset(token, 0, sizeof *token);
    if (question == NULL || strncmp(question, "?key=", 5) != 0 || strlen(question) != 5 + 2 * NET_KEY_HEX)
        return error_set("the token is not tcp://HOST:PORT?key= and 128 hexadecimal digits");
    size_t n = (size_t)(question - text);
    if (net_endpoint_parse(text, n, &host, &n_host, &port)) return -1;
    if (port == 0 || memchr(host, '*', n_host) != NULL)
        return error_set("'%.*s' cannot be dialled: a token has a host and a port", (int)n, text);
    memcpy(token->endpoint, text, n);
    if (net_key_from_hex(token->server_public, question + 5) ||
        net_key_from_hex(token->run_secret, question + 5 + NET_KEY_HEX))
        return error_set("the token's key has 128 hexadecimal digits");
    if (zmq_curve_public(token->run_public, token->run_secret) != 0)
        return error_set("the token's key is not usable: %s", zmq_strerror(errno));
    return 0;
}

// Reads the token itself, @FILE with it (and at most an end of line), or env:NAME. No message shows its key.
static inline int net_token_parse(NetToken *token, const char *text) {
    char line[NET_TOKEN + 2];
    memset(token, 0, sizeof *token);
    if (strncmp(text, "env:", 4) == 0) {
        text = getenv(text + 4) != NULL ? getenv(text + 4) : "";
        if (*text == '\0') return error_set("the token's environment variable is not set");
    } else if (text[0] == '@') {
        if (net_read_small(line, sizeof line, text + 1)) return -1;
        line[strcspn(line, "\r\n")] = '\0';
        text = line;
    }
    return net_token_parse_text(token, text);
}

#endif
