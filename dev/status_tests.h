// Tests of what others see of a run over several machines (its texts, the server of --status-port), and of launchers'
// environments.
#ifndef DEV_STATUS_TESTS_H
#define DEV_STATUS_TESTS_H

#include "../llmc/launch.h"
#include "../llmc/mesh_view.h"
#include "../llmc/status_page.h"

// ---------------------------------------------------------------------------------------------------------------------
// Texts

// A view's text by one of the functions, the caller's to free. rows 0: HTML, -1: metrics, else a table.
static char *view_text(const MeshView *view, int rows, int columns, int *lines) {
    char *text = NULL;
    size_t size;
    FILE *out = open_memstream(&text, &size);
    if (rows == 0) view_html(out, view);
    if (rows < 0) view_metrics(out, view);
    if (rows > 0) *lines = view_table(out, view, rows, columns);
    fclose(out);
    return text;
}

// Lines of a table, and the longest of them without escape sequences.
static int table_lines(const char *text, int *longest) {
    int n = 0, length = 0;
    *longest = 0;
    for (; *text != '\0'; text++) {
        if (*text == '\n') n++, length = 0;
        if (*text == 033)
            text += strcspn(text, "KJA");
        else if (*text >= ' ')
            length++;
        if (length > *longest) *longest = length;
    }
    return n;
}

static int count_text(const char *text, const char *part) {
    int n = 0;
    for (; (text = strstr(text, part)) != NULL; text += strlen(part)) n++;
    return n;
}

// A run of 64 cells, the second of which has an address that is no address.
static void view_sample(MeshView *view, CellView *cells) {
    memset(view, 0, sizeof *view);
    memset(cells, 0, 64 * sizeof *cells);
    view->version = "1.2.3", view->phase = "training", view->step = 7, view->n_steps = 9, view->tokens = 12345678901;
    view->loss = 2.5, view->tokens_per_second = 1000.0, view->elapsed = (double)NAN, view->n_roles = 64;
    view->relayed_bytes = 5000000, view->cells = cells, view->n_cells = 64;
    for (int i = 0; i < 64; i++) {
        CellView *cell = &cells[i];
        cell->node = (uint32_t)i + 1, cell->step = i == 5 ? -1 : 6, cell->up_bytes = 1000 + i, cell->relayed_bytes = i;
        cell->up_rate = 2.5e6, cell->progress_age = i == 3 ? (double)NAN : i == 4 ? 7200.0 : 0.25;
        cell->down_rate = 5e5;
        snprintf(cell->role, sizeof cell->role, "replica %d stage %d", i / 8, i % 8);
        snprintf(cell->state, sizeof cell->state, "%s", i == 5 ? "loading" : "running");
        snprintf(cell->route, sizeof cell->route, "relay 1/63");
        snprintf(cell->address, sizeof cell->address, "10.0.0.%d", i);
    }
    snprintf(cells[1].address, sizeof cells[1].address, "<b>&'\"\\x\n\033[2J\xc3\xa4");
}

// Rows are capped and cut, unknown numbers are dashes, and no address steers what shows it.
static void test_status_texts(void) {
    static CellView cells[64];
    MeshView view;
    int lines = 0, longest;
    view_sample(&view, cells);
    char *text = view_text(&view, 100, 300, &lines);
    check(lines == 65 && table_lines(text, &longest) == 65, "a table of 64 cells has %d lines", lines);
    check(strstr(text, "replica 7 stage 7   64 running       6") != NULL, "the last cell is not shown:\n%s", text);
    check(strstr(text, "   2.50    0.50    0s relay 1/63  10.0.0.0") != NULL, "rates:\n%s", text);
    check(strstr(text, "    - relay 1/63  10.0.0.3") != NULL && strstr(text, "    2h relay 1/63  10.0.0.4") != NULL,
          "ages:\n%s", text);
    check(strstr(text, "loading       -") != NULL, "no step is none:\n%s", text);
    check(strstr(text, "<b>&'\"\\x??[2J??") != NULL, "an address steers the terminal");
    check(strstr(text, "\033[65A\r") != NULL, "the cursor does not come back");
    free(text);
    for (int columns = 20; columns <= 120; columns += 20) {
        for (int rows = 3; rows <= 66; rows += 7) {
            text = view_text(&view, rows, columns, &lines);
            int n = table_lines(text, &longest);
            check(lines <= rows && n == lines && longest < columns, "%d lines of %d where %d of %d fit", n, longest,
                  rows, columns);
            check(rows > 64 || count_text(text, " more") == 1, "%d rows do not say that there are more", rows);
            free(text);
        }
    }
    text = view_text(&view, 10, 100, &lines);
    check(strstr(text, "and 56 more") != NULL && count_text(text, "replica ") == 8, "10 rows:\n%s", text);
    free(text);
    text = view_text(&view, 2, 100, &lines);
    check(lines == 0 && text[0] == '\0', "a table without room");
    free(text);
    text = view_text(&view, 0, 0, NULL);
    check(strstr(text, "<h1>step 7 of 9</h1>") != NULL && count_text(text, "<tr><td>") == 64, "the page:\n%s", text);
    check(strstr(text, "&lt;b&gt;&amp;&#39;&quot;\\x??[2J??") != NULL && strstr(text, "<b>") == NULL,
          "an address is markup");
    check(strstr(text, "http-equiv=refresh") != NULL && strstr(text, "http:") == NULL && strstr(text, "src=") == NULL,
          "the page does not refresh, or needs others");
    free(text);
}

// Every metric has one HELP and one TYPE before all of its values, by Prometheus' conventions.
static void test_status_metrics(void) {
    static CellView cells[64];
    MeshView view;
    char name[128] = "", *at, *text;
    view_sample(&view, cells);
    text = view_text(&view, -1, 0, NULL);
    check(strstr(text, "\nmeshtune_step 7\n") != NULL && strstr(text, "\nmeshtune_loss 2.5\n") != NULL &&
              strstr(text, "\nmeshtune_tokens_total 12345678901\n") != NULL &&
              strstr(text, "\nmeshtune_tokens_per_second 1000\n") != NULL &&
              strstr(text, "\nmeshtune_elapsed_seconds_total NaN\n") != NULL,
          "the run's metrics:\n%.3000s", text);
    check(strstr(text, "\nmeshtune_cell_up_bytes_total{node=\"3\",role=\"replica 0 stage 2\"} 1002\n") != NULL &&
              strstr(text, "\nmeshtune_cell_relayed_bytes_total{node=\"3\",role=\"replica 0 stage 2\"} 2\n") != NULL &&
              strstr(text, "\nmeshtune_cell_progress_age_seconds{node=\"5\",role=\"replica 0 stage 4\"} 7200\n") !=
                  NULL,
          "cells' metrics");
    check(strstr(text, "node=\"6\",role=\"replica 0 stage 5\",state=\"loading\"} 1\n") != NULL &&
              strstr(text, "node=\"6\",role=\"replica 0 stage 5\",state=\"running\"} 0\n") != NULL &&
              count_text(text, "state=\"loading\"} 1\n") == 1,
          "states");
    check(strstr(text, "peer=\"<b>&'\\\"\\\\x??[2J??\",way=") != NULL, "an address ends its label");
    int n_values = 0;
    for (char *line = strtok_r(text, "\n", &at); line != NULL; line = strtok_r(NULL, "\n", &at)) {
        char word[128] = "";
        if (sscanf(line, "# HELP %127s", word) == 1) {
            check(strcmp(word, name) != 0, "%s twice", word);
            snprintf(name, sizeof name, "%s", word);
        } else if (sscanf(line, "# TYPE %127s", word) == 1) {
            int counts = strstr(line, " counter") != NULL, total = strcmp(word + strlen(word) - 6, "_total") == 0;
            check(strcmp(word, name) == 0 && counts == total, "'%s' after %s", line, name);
        } else {
            size_t n = strcspn(line, "{ ");
            check(n == strlen(name) && strncmp(line, name, n) == 0, "'%s' among %s", line, name);
            n_values++;
        }
    }
    check(n_values == 12 + 64 * (8 + 1 + 5), "%d values", n_values);
    free(text);
}

// ---------------------------------------------------------------------------------------------------------------------
// Requests

static void test_status_request(void) {
    static const struct {
        const char *text;
        StatusRequest request;
    } cases[] = {{"GET / HTTP/1.1\r\nHost: a\r\n\r\n", REQUEST_PAGE},
                 {"GET / HTTP/1.0\n\n", REQUEST_PAGE},
                 {"GET /?a=b HTTP/1.1\r\n\r\n", REQUEST_PAGE},
                 {"GET /metrics HTTP/1.1\r\n\r\nmore", REQUEST_METRICS},
                 {"GET /metrics?x HTTP/1.1\r\n\r\n", REQUEST_METRICS},
                 {"GET /metrics/ HTTP/1.1\r\n\r\n", REQUEST_OTHER},
                 {"GET /metric HTTP/1.1\r\n\r\n", REQUEST_OTHER},
                 {"GET // HTTP/1.1\r\n\r\n", REQUEST_OTHER},
                 {"GET /../etc/passwd HTTP/1.1\r\n\r\n", REQUEST_OTHER},
                 {"GET  HTTP/1.1\r\n\r\n", REQUEST_OTHER},
                 {"POST / HTTP/1.1\r\n\r\n", REQUEST_OTHER},
                 {"get / HTTP/1.1\r\n\r\n", REQUEST_OTHER},
                 {"GET / HTTP/2\r\n\r\n", REQUEST_BAD},
                 {"GET /\r\n\r\n", REQUEST_BAD},
                 {"GET /\001 HTTP/1.1\r\n\r\n", REQUEST_BAD},
                 {"\r\n\r\n", REQUEST_BAD},
                 {"\n\n", REQUEST_BAD},
                 {" HTTP/1.\n\n", REQUEST_BAD},
                 {" HTTP/1.1\n\n", REQUEST_OTHER},
                 {"GET / HTTP/1.1\r\n\r", REQUEST_PARTIAL},
                 {"GET / HTTP/1.1\r\nA: b\r\n", REQUEST_PARTIAL},
                 {"", REQUEST_PARTIAL}};
    static char large[STATUS_REQUEST];
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        size_t n = strlen(cases[i].text);
        char *exact = (char *)malloc(n + 1); // without its end: nothing behind it is read
        memcpy(exact, cases[i].text, n);
        exact[n] = '/';
        StatusRequest request = status_request(exact, n);
        check(request == cases[i].request, "'%s' is read as %d", cases[i].text, request);
        free(exact);
    }
    memset(large, 'a', sizeof large);
    check(status_request(large, sizeof large - 1) == REQUEST_PARTIAL, "more may come");
    check(status_request(large, sizeof large) == REQUEST_BAD, "a request of any length");
    memcpy(large, "GET / HTTP/1.1\r\n", 16);
    memcpy(large + sizeof large - 4, "\r\n\r\n", 4);
    check(status_request(large, sizeof large) == REQUEST_PAGE, "the longest request");
}

// ---------------------------------------------------------------------------------------------------------------------
// The server

static int status_connect(int port) {
    struct sockaddr_in address;
    memset(&address, 0, sizeof address);
    address.sin_family = AF_INET, address.sin_port = htons((uint16_t)port);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    if (fd >= 0 && connect(fd, (const struct sockaddr *)(const void *)&address, sizeof address) == 0) return fd;
    if (fd >= 0) close(fd);
    return -1;
}

// Reads until the other side closes, at most `limit` seconds: bytes read, -1 if it has not closed by then, or has cut
// the connection.
static int64_t status_read(int fd, char *out, size_t size, double limit) {
    const double until = seconds() + limit;
    char rest[65536];
    size_t n = 0;
    int64_t total = 0;
    for (;;) {
        struct pollfd ready = {fd, POLLIN, 0};
        double left = until - seconds();
        if (left <= 0.0 || poll(&ready, 1, (int)(1e3 * left) + 1) < 1) return -1;
        ssize_t got = n + 1 < size ? recv(fd, out + n, size - 1 - n, 0) : recv(fd, rest, sizeof rest, 0);
        if (got < 0) return -1;
        if (got == 0) break;
        if (n + 1 < size) n += (size_t)got;
        total += got;
    }
    if (size > 0) out[n] = '\0';
    return total;
}

// What a request gets; "" if there is no answer within 10 s.
static const char *status_get(int port, const char *request) {
    static char answer[65536];
    int fd = status_connect(port);
    answer[0] = '\0';
    if (fd < 0) return answer;
    if (send(fd, request, strlen(request), MSG_NOSIGNAL) < 0 || status_read(fd, answer, sizeof answer, 10.0) < 0)
        answer[0] = '\0';
    close(fd);
    return answer;
}

static int status_says(int port, const char *request, const char *status, const char *part) {
    const char *answer = status_get(port, request);
    return check(strncmp(answer, status, strlen(status)) == 0 && strstr(answer, part) != NULL,
                 "'%.60s' is answered by '%.300s'", request, answer);
}

static void publish_texts(StatusPage *page, const char *html, const char *metrics) {
    status_page_publish(page, strdup(html), strdup(metrics));
}

static void test_status_page(void) {
    static char large[3 * STATUS_REQUEST];
    StatusPage *page = status_page_open("127.0.0.1", 0);
    if (!check(page != NULL && page->port > 0, "%s", error_message)) return;
    status_says(page->port, "GET / HTTP/1.1\r\n\r\n", "HTTP/1.1 200 OK\r\n", "Content-Length: 0\r\n");
    publish_texts(page, "<p>one", "a 1\n");
    publish_texts(page, "<p>two", "a 2\n");
    status_says(page->port, "GET / HTTP/1.1\r\nHost: x\r\n\r\n", "HTTP/1.1 200 OK\r\n", "\r\n\r\n<p>two");
    check(strstr(status_get(page->port, "GET / HTTP/1.1\r\n\r\n"), "Content-Type: text/html; charset=utf-8\r\n") !=
              NULL,
          "the page's type");
    status_says(page->port, "GET /metrics HTTP/1.1\r\n\r\n", "HTTP/1.1 200 OK\r\n", "\r\n\r\na 2\n");
    status_says(page->port, "GET /metrics HTTP/1.1\r\n\r\n", "HTTP/1.1 200 OK\r\n", "text/plain; version=0.0.4;");
    status_says(page->port, "GET /log HTTP/1.1\r\n\r\n", "HTTP/1.1 404 ", "/metrics");
    status_says(page->port, "DELETE / HTTP/1.1\r\n\r\n", "HTTP/1.1 404 ", "Connection: close");
    status_says(page->port, "\x16\x03\x01 TLS\r\n\r\n", "HTTP/1.1 400 ", "");
    memset(large, 'a', sizeof large - 1);
    memcpy(large, "GET /", 5);
    status_says(page->port, large, "HTTP/1.1 400 ", "of this size");
    check(status_page_open("127.0.0.1", page->port) == NULL, "a port twice");
    check_error(-1, "Address already in use", "a port that is taken");
    check(status_page_open("nowhere.invalid", 0) == NULL, "an address that is none");
    check_error(-1, "--status-address nowhere.invalid", "an address that is none");
    int port = page->port;
    double start = seconds();
    int idle = status_connect(port);
    status_page_close(page);
    check(seconds() - start < 1.0, "closing took %.1f s", seconds() - start);
    close(idle);
    check(status_connect(port) < 0, "it listens after it was closed");
}

// Clients that send a byte now and then, send nothing, or do not read: all are closed in time, others are served
// meanwhile, and publishing never waits.
static void test_status_slow(void) {
    enum { IDLE = 3 * STATUS_CLIENTS, LARGE = 32 << 20 };
    int idle[IDLE], open = 0;
    char *large = (char *)malloc(LARGE + 1), byte;
    StatusPage *page = status_page_open("127.0.0.1", 0);
    if (!check(page != NULL && large != NULL, "%s", error_message)) return;
    publish_texts(page, "page", "");
    int slow = status_connect(page->port);
    double start = seconds(), closed = 0.0;
    while (closed == 0.0 && seconds() < start + 5.0) { // a byte at each turn
        if (send(slow, "G", 1, MSG_NOSIGNAL) < 0 || recv(slow, &byte, 1, MSG_DONTWAIT) == 0) closed = seconds() - start;
        status_says(page->port, "GET / HTTP/1.1\r\n\r\n", "HTTP/1.1 200 ", "page");
        usleep(20000);
    }
    check(closed >= 0.5 * STATUS_SECONDS && closed < 5.0, "a slow client is closed after %.2f s", closed);
    close(slow);
    for (int i = 0; i < IDLE; i++) open += (idle[i] = status_connect(page->port)) >= 0;
    check(open == IDLE, "%d of %d connections", open, IDLE);
    start = seconds();
    publish_texts(page, "page", "");
    check(seconds() - start < 0.2, "publishing waits for clients");
    status_says(page->port, "GET / HTTP/1.1\r\n\r\n", "HTTP/1.1 200 ", "page");
    for (int i = 0; i < IDLE; i++) close(idle[i]);
    memset(large, 'x', LARGE);
    large[LARGE] = '\0';
    status_page_publish(page, large, strdup(""));
    int deaf = status_connect(page->port);
    check(send(deaf, "GET / HTTP/1.1\r\n\r\n", 18, MSG_NOSIGNAL) == 18, "a request");
    start = seconds();
    while (seconds() < start + STATUS_SECONDS + 0.5) sched_yield(); // its time
    int64_t got = status_read(deaf, NULL, 0, 10.0);
    check(got >= 0 && got < LARGE, "a client that did not read got %lld bytes", (long long)got);
    close(deaf);
    int reader = status_connect(page->port);
    check(send(reader, "GET / HTTP/1.1\r\n\r\n", 18, MSG_NOSIGNAL) == 18, "a request");
    got = status_read(reader, NULL, 0, 10.0);
    check(got > LARGE, "a client that reads got %lld bytes", (long long)got);
    close(reader);
    status_page_close(page);
}

// ---------------------------------------------------------------------------------------------------------------------
// Launchers

// An environment as "NAME=value" lines.
static const char *launch_from_text(void *context, const char *name) {
    static char values[8][512];
    static int turn;
    const char *at = (const char *)context;
    size_t n = strlen(name);
    while (at != NULL && (strncmp(at, name, n) != 0 || at[n] != '=')) {
        at = strchr(at, '\n');
        if (at != NULL) at++;
    }
    if (at == NULL) return NULL;
    turn = (turn + 1) % 8;
    snprintf(values[turn], sizeof values[turn], "%.*s", (int)strcspn(at + n + 1, "\n"), at + n + 1);
    return values[turn];
}

static void test_launch(void) {
    static const struct {
        const char *environment, *by;
        int rank, size; // size 0: an error that says `by`
        const char *host;
    } cases[] = {
        {"", "", 0, 1, ""},
        {"RANK=2\nWORLD_SIZE=4\nMASTER_ADDR=10.0.0.7\nMASTER_PORT=29500", "torchrun", 2, 4, "10.0.0.7"},
        {"RANK=0\nWORLD_SIZE=1\nMASTER_ADDR=x", "torchrun", 0, 1, ""},
        {"RANK=0", "", 0, 1, ""},
        {"WORLD_SIZE=3", "", 0, 1, ""},
        {"OMPI_COMM_WORLD_RANK=1\nOMPI_COMM_WORLD_SIZE=2", "mpirun", 1, 2, ""},
        {"OMPI_COMM_WORLD_RANK=1\nOMPI_COMM_WORLD_SIZE=2\nSLURM_PROCID=0\nSLURM_STEP_NUM_TASKS=4\n"
         "SLURM_JOB_NODELIST=a[3-4]",
         "mpirun", 1, 2, "a3"},
        {"PMI_RANK=3\nPMI_SIZE=4", "mpirun", 3, 4, ""},
        {"SLURM_PROCID=5\nSLURM_NTASKS=6\nSLURM_STEP_NUM_TASKS=6\nSLURM_JOB_NODELIST=node[007-012,20],gpu1", "srun", 5,
         6, "node007"},
        {"SLURM_PROCID=0\nSLURM_STEP_NUM_TASKS=2\nSLURM_STEP_NODELIST=b2,b3\nSLURM_JOB_NODELIST=b[1-3]", "srun", 0, 2,
         "b2"},
        {"SLURM_PROCID=0\nSLURM_STEP_NUM_TASKS=2\nSLURM_JOB_NODELIST=rack[1-2]n[04,6]-ib", "srun", 0, 2, "rack1n04-ib"},
        {"SLURM_PROCID=0\nSLURM_STEP_NUM_TASKS=2\nSLURM_JOB_NODELIST=a b\nSLURM_LAUNCH_NODE_IPADDR=10.1.1.1", "srun", 0,
         2, "10.1.1.1"},
        {"SLURM_PROCID=0\nSLURM_STEP_NUM_TASKS=2\nSLURM_JOB_NODELIST=a[1-2", "srun", 0, 2, ""},
        {"SLURM_PROCID=0\nSLURM_STEP_NUM_TASKS=2\nSLURM_JOB_NODELIST=a[", "srun", 0, 2, ""},
        {"SLURM_PROCID=0\nSLURM_NTASKS=6\nSLURM_JOB_NODELIST=a1", "", 0, 1, ""}, // a batch script
        {"RANK=4\nWORLD_SIZE=4", "RANK is 4, and WORLD_SIZE is 4", 0, 0, NULL},
        {"RANK=-1\nWORLD_SIZE=4", "RANK is '-1'", 0, 0, NULL},
        {"RANK=0\nWORLD_SIZE=4x", "WORLD_SIZE is '4x'", 0, 0, NULL},
        {"RANK=\nWORLD_SIZE=2", "RANK is ''", 0, 0, NULL},
        {"RANK=0\nWORLD_SIZE=0", "RANK is 0", 0, 0, NULL},
        {"RANK=0\nWORLD_SIZE=99999999999999999999", "not a number up to", 0, 0, NULL},
        {"RANK=0\nWORLD_SIZE=65536", "not a number up to", 0, 0, NULL},
    };
    Launch launch;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int status = launch_read(&launch, launch_from_text, (void *)cases[i].environment);
        if (cases[i].size == 0)
            check_error(status, cases[i].by, cases[i].environment);
        else
            check(status == 0 && strcmp(launch.by, cases[i].by) == 0 && launch.rank == cases[i].rank &&
                      launch.size == cases[i].size && strcmp(launch.host, cases[i].host) == 0,
                  "'%s' is read as %d of %d by '%s' at '%s'", cases[i].environment, launch.rank, launch.size, launch.by,
                  launch.host);
    }
    char host[LAUNCH_HOST], list[2 * LAUNCH_HOST];
    memset(list, 'a', sizeof list), list[sizeof list - 1] = '\0';
    launch_first_host(host, list);
    check(host[0] == '\0', "a host of any length");
}

#ifdef WITH_ZMQ
#define LAUNCHED                                                                                                       \
    "--init d=32,layers=3,heads=4,kv=2,ffn=48,vocab=258,ctx=64 -d @/corpus.jsonl -b 6 -t 16 -l 1e-2 --threads 1 "      \
    "-y 3 -n 9 --val-every 4 --save-every 5 "

// A process of a launcher that says: this is rank `rank` of `size`.
static pid_t start_rank(int rank, int size, const char *command) {
    char text[16];
    snprintf(text, sizeof text, "%d", rank);
    setenv("RANK", text, 1);
    snprintf(text, sizeof text, "%d", size);
    setenv("WORLD_SIZE", text, 1);
    pid_t child = start_child("MASTER_ADDR=127.0.0.1", command);
    unsetenv("RANK");
    unsetenv("WORLD_SIZE");
    return child;
}

// The exit status of a child, which is killed if it has not ended by then: 128.
static int end_by(pid_t child, double until) {
    int status = 0, ended = 0;
    while ((ended = waitpid(child, &status, WNOHANG)) == 0 && seconds() < until) usleep(10000);
    if (ended == 0) {
        kill(child, SIGKILL);
        waitpid(child, &status, 0);
    }
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128;
}

static int run_rank(int rank, int size, const char *command) {
    int status = end_by(start_rank(rank, size, command), seconds() + 30.0);
    FILE *file = fopen(scratch_path("output"), "rb");
    size_t length = file != NULL ? fread(run_output, 1, sizeof run_output - 1, file) : 0;
    if (file != NULL) fclose(file);
    run_output[length] = '\0';
    return status;
}

// A port that nobody has; fd: a socket that listens on it.
static int listen_anywhere(int *fd) {
    struct sockaddr_in address;
    socklen_t n = sizeof address;
    memset(&address, 0, sizeof address);
    address.sin_family = AF_INET, address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    *fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (*fd < 0 || bind(*fd, (const struct sockaddr *)(const void *)&address, sizeof address) != 0 ||
        listen(*fd, 8) != 0 || getsockname(*fd, (struct sockaddr *)(void *)&address, &n) != 0)
        return -1;
    return ntohs(address.sin_port);
}

// Leaves the token of a coordinator that is no more, which "listens" on a port of ours.
static void leave_token(const char *run, int port) {
    NetKeys keys;
    char endpoint[64], token[NET_TOKEN], name[128];
    snprintf(endpoint, sizeof endpoint, "tcp://127.0.0.1:%d", port);
    snprintf(name, sizeof name, "%s/join", run);
    mkdir(scratch_path(run), 0777);
    check(net_keys_make(&keys) == 0 && net_token_print(token, sizeof token, &keys, endpoint) == 0 &&
              net_write_private(scratch_path(name), token) == 0,
          "%s", error_message);
}

// Three processes as torchrun starts them train with the bits of one; the joiners follow from an old token to the new
// one. The page shows the run.
static void test_launch_run(void) {
    char command[512];
    int stale, other, ok = 1, seen = 0;
    write_corpus();
    check_run(0, NULL, LAUNCHED "-o @/launched_alone", "done");
    int port = listen_anywhere(&stale), page = listen_anywhere(&other);
    check(port > 0 && page > 0, "no ports");
    close(other);
    leave_token("launched", port);
    snprintf(command, sizeof command, LAUNCHED "-o @/launched --status-port %d", page);
    pid_t ranks[3];
    for (int r = 1; r < 3; r++) {
        ranks[r] = start_rank(r, 3, command);
        struct pollfd ready = {stale, POLLIN, 0};
        if (check(poll(&ready, 1, 15000) == 1, "rank %d does not dial by the token that is there", r))
            close(accept(stale, NULL, NULL));
    }
    close(stale);
    ranks[0] = start_rank(0, 3, command);
    for (const double until = seconds() + 30.0; !seen && seconds() < until; sched_yield())
        seen = strstr(status_get(page, "GET /metrics HTTP/1.1\r\n\r\n"), "\nmeshtune_roles 3\n") != NULL;
    check(seen, "the run is not on its page");
    for (int r = 0; r < 3; r++) ok = end_by(ranks[r], seconds() + 30.0) == 0 && ok;
    check(ok, "a rank has failed");
    check(same_file("launched/latest/model.bin", "launched_alone/latest/model.bin"), "three processes, other bits");
    snprintf(command, sizeof command, LAUNCHED "-o @/launched_many");
    check(run_rank(0, 4, command) == 1 && strstr(run_output, "torchrun started 4 processes; 1 replicas of 3 stages "
                                                             "need 3") != NULL,
          "4 processes for 3 cells: %s", run_output);
    check(run_rank(0, 3, LAUNCHED) == 1 && strstr(run_output, "give -o FOLDER") != NULL, "no folder: %s", run_output);
    check(run_rank(3, 3, LAUNCHED) == 1 && strstr(run_output, "RANK is 3") != NULL, "rank 3 of 3: %s", run_output);
    snprintf(command, sizeof command, LAUNCHED "-o @/launched_dry --dry-run");
    check(run_rank(1, 3, command) == 0, "--dry-run is not for all: %s", run_output);
    Launch launch = {"srun", 1, 2, ""};
    check_error(wait_for_token(&launch, "@/nonexistent/join", 0.2), "srun started 2 processes", "no token");
}
#endif

#endif
