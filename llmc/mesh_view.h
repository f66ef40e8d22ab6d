// A run over several machines as others see it: one snapshot, three texts. The coordinator fills a MeshView once a
// second; nothing here knows the network or the run.
//
//   view_table(stdout, &view, 20, 100);   a table of cells for a terminal: at most 20 lines of 100 columns
//   view_html(file, &view);               one page that needs no other file and loads itself anew
//   view_metrics(file, &view);            Prometheus' text format 0.0.4
//
// What peers have a hand in (addresses) is escaped: it can steer neither a terminal nor a browser nor a label.
#ifndef LLMC_MESH_VIEW_H
#define LLMC_MESH_VIEW_H

#include <math.h>   // isfinite, NAN
#include <stdint.h> // fixed-width integers
#include <stdio.h>  // fprintf
#include <string.h> // strcmp

enum { VIEW_WORD = 64, VIEW_ADDRESS = 256 };

typedef struct {
    uint32_t node;
    char role[VIEW_WORD], state[VIEW_WORD], route[VIEW_WORD], address[VIEW_ADDRESS];
    int64_t step;                                 // -1: none
    int64_t up_bytes, down_bytes, relayed_bytes;  // relayed is a part of the others
    double tokens_per_second, up_rate, down_rate; // bytes/s
    double progress_age;                          // seconds; NaN in any of these: not known
} CellView;

typedef struct {
    const char *version, *phase;
    int64_t step, n_steps, tokens;
    double loss, tokens_per_second, elapsed;     // NaN: not known
    int n_roles;                                 // cells and the anchor, of the whole mesh
    int64_t up_bytes, down_bytes, relayed_bytes; // of the coordinator
    const CellView *cells;
    int n_cells;
} MeshView;

static const char *const view_states[] = {"spare", "loading", "ready", "placed", "running"};
enum { VIEW_STATES = 5 };

// Text for a terminal: what is no printable ASCII becomes '?'.
static inline const char *view_plain(char *out, size_t size, const char *text) {
    size_t n = 0;
    for (; *text != '\0' && n + 1 < size; text++) out[n++] = *text >= ' ' && *text < 0x7F ? *text : '?';
    out[n] = '\0';
    return out;
}

// out (size >= 8) = a number in few characters, "-" if it is not known.
static inline const char *view_number(char *out, size_t size, double value, int decimals) {
    if (isfinite(value))
        snprintf(out, size, "%.*f", decimals, value);
    else
        snprintf(out, size, "-");
    return out;
}

// An age as 9s, 5m, 3h.
static inline const char *view_age(char *out, size_t size, double seconds) {
    if (!isfinite(seconds) || seconds < 0.0)
        snprintf(out, size, "-");
    else if (seconds < 100.0)
        snprintf(out, size, "%.0fs", seconds);
    else if (seconds < 6000.0)
        snprintf(out, size, "%.0fm", seconds / 60.0);
    else
        snprintf(out, size, "%.0fh", seconds / 3600.0);
    return out;
}

// A row of the table; what does not fit into the columns is left out.
static inline void view_row(FILE *out, const CellView *cell, int columns) {
    char line[512], step[24] = "-", tokens[32], up[32], down[32], age[32], peer[VIEW_ADDRESS];
    if (cell->step >= 0) snprintf(step, sizeof step, "%lld", (long long)cell->step);
    snprintf(line, sizeof line, "%-17.17s %4u %-7s %7s %7s %7s %7s %5s %-11.11s %s", cell->role, cell->node,
             cell->state, step, view_number(tokens, sizeof tokens, cell->tokens_per_second, 0),
             view_number(up, sizeof up, 1e-6 * cell->up_rate, 2),
             view_number(down, sizeof down, 1e-6 * cell->down_rate, 2), view_age(age, sizeof age, cell->progress_age),
             cell->route, view_plain(peer, sizeof peer, cell->address));
    fprintf(out, "\n\033[K%.*s", columns - 1, line);
}

// Writes the table below the line on which the cursor is, and puts the cursor back to that line's first column. rows,
// columns: what the terminal has room for below that line; of more cells the first ones are shown, and how many there
// are besides. Returns the lines written.
static inline int view_table(FILE *out, const MeshView *view, int rows, int columns) {
    int n = view->n_cells, shown = n <= rows - 1 ? n : rows - 2, lines;
    if (columns < 20 || shown < 1) return 0;
    if (columns > 200) columns = 200;
    fprintf(out, "\n\033[K%.*s", columns - 1,
            "role              node state      step   tok/s up MB/s  down MB/s  age way         peer");
    for (int i = 0; i < shown; i++) view_row(out, &view->cells[i], columns);
    if (shown < n) fprintf(out, "\n\033[K%.*s", columns - 1, "");
    if (shown < n) fprintf(out, "and %d more", n - shown);
    lines = 1 + shown + (shown < n);
    fprintf(out, "\033[J\033[%dA\r", lines);
    return lines;
}

// Text inside an element or an attribute in double quotes.
static inline void view_html_text(FILE *out, const char *text) {
    for (; *text != '\0'; text++) {
        switch (*text) {
        case '&': fputs("&amp;", out); break;
        case '<': fputs("&lt;", out); break;
        case '>': fputs("&gt;", out); break;
        case '"': fputs("&quot;", out); break;
        case '\'': fputs("&#39;", out); break;
        default: fputc(*text >= ' ' && *text < 0x7F ? *text : '?', out);
        }
    }
}

static inline void view_html_cell(FILE *out, const CellView *cell) {
    char text[32];
    fprintf(out, "<tr><td>");
    view_html_text(out, cell->role);
    fprintf(out, "<td class=n>%u<td>%s<td class=n>", cell->node, cell->state);
    if (cell->step >= 0) fprintf(out, "%lld", (long long)cell->step);
    fprintf(out, "<td class=n>%s", view_number(text, sizeof text, cell->tokens_per_second, 0));
    fprintf(out, "<td class=n>%s", view_number(text, sizeof text, 1e-6 * cell->up_rate, 2));
    fprintf(out, "<td class=n>%s", view_number(text, sizeof text, 1e-6 * cell->down_rate, 2));
    fprintf(out, "<td class=n>%.1f<td class=n>%.1f<td class=n>%.1f", 1e-6 * (double)cell->up_bytes,
            1e-6 * (double)cell->down_bytes, 1e-6 * (double)cell->relayed_bytes);
    fprintf(out, "<td class=n>%s<td>%s<td>", view_age(text, sizeof text, cell->progress_age), cell->route);
    view_html_text(out, cell->address);
    fprintf(out, "</tr>\n");
}

static inline void view_html(FILE *out, const MeshView *view) {
    char text[32];
    fprintf(out, "<!doctype html>\n<html lang=en><meta charset=utf-8><meta http-equiv=refresh content=2>\n"
                 "<title>meshtune</title><style>body{font:14px monospace;margin:2em}table{border-collapse:collapse}"
                 "td,th{padding:2px 8px;border-bottom:1px solid #ccc;text-align:left}.n{text-align:right}</style>\n");
    fprintf(out, "<h1>step %lld of %lld</h1>\n<p>%s, loss %s", (long long)view->step, (long long)view->n_steps,
            view->phase, view_number(text, sizeof text, view->loss, 4));
    fprintf(out, ", %s tokens/s, %lld tokens", view_number(text, sizeof text, view->tokens_per_second, 0),
            (long long)view->tokens);
    fprintf(out, ", %d of %d roles taken, ", view->n_cells < view->n_roles ? view->n_cells : view->n_roles,
            view->n_roles);
    fprintf(out, "%.1f MB relayed by the coordinator</p>\n", 1e-6 * (double)view->relayed_bytes);
    fprintf(out, "<table><tr><th>role<th>node<th>state<th>step<th>tokens/s<th>up MB/s<th>down MB/s<th>up MB<th>down MB"
                 "<th>relayed MB<th>progress<th>way<th>peer</tr>\n");
    for (int i = 0; i < view->n_cells; i++) view_html_cell(out, &view->cells[i]);
    fprintf(out, "</table></html>\n");
}

// Metrics
// -------------------------------------------------------------------------------------------------------------

static inline void view_label(FILE *out, const char *text) {
    for (; *text != '\0'; text++) {
        if (*text == '\\' || *text == '"') fputc('\\', out);
        fputc(*text >= ' ' && *text < 0x7F ? *text : '?', out);
    }
}

static inline void view_metric(FILE *out, const char *name, const char *type, const char *help) {
    fprintf(out, "# HELP meshtune_%s %s\n# TYPE meshtune_%s %s\n", name, help, name, type);
}

static inline void view_value(FILE *out, double value) {
    if (isfinite(value))
        fprintf(out, " %.17g\n", value);
    else
        fprintf(out, " NaN\n");
}

static inline void view_single(FILE *out, const char *name, const char *type, const char *help, double value) {
    view_metric(out, name, type, help);
    fprintf(out, "meshtune_%s", name);
    view_value(out, value);
}

static inline void view_cell_labels(FILE *out, const char *name, const CellView *cell) {
    fprintf(out, "meshtune_%s{node=\"%u\",role=\"", name, cell->node);
    view_label(out, cell->role);
    fprintf(out, "\"");
}

// A metric of every cell.
typedef struct {
    const char *name, *type, *help;
    double (*value)(const CellView *cell);
} CellMetric;

static inline double cell_metric_step(const CellView *cell) {
    return cell->step >= 0 ? (double)cell->step : (double)NAN;
}
static inline double cell_metric_tokens(const CellView *cell) {
    return cell->tokens_per_second;
}
static inline double cell_metric_up(const CellView *cell) {
    return (double)cell->up_bytes;
}
static inline double cell_metric_down(const CellView *cell) {
    return (double)cell->down_bytes;
}
static inline double cell_metric_relayed(const CellView *cell) {
    return (double)cell->relayed_bytes;
}
static inline double cell_metric_up_rate(const CellView *cell) {
    return cell->up_rate;
}
static inline double cell_metric_down_rate(const CellView *cell) {
    return cell->down_rate;
}
static inline double cell_metric_age(const CellView *cell) {
    return cell->progress_age;
}

static const CellMetric cell_metrics[] = {
    {"cell_step", "gauge", "Steps the node has done; of the anchor, its last snapshot.", cell_metric_step},
    {"cell_tokens_per_second", "gauge", "Tokens of the node's replica a second.", cell_metric_tokens},
    {"cell_up_bytes_total", "counter", "Bytes the node has sent, with headers and what was sent again.",
     cell_metric_up},
    {"cell_down_bytes_total", "counter", "Bytes the node has received, with headers.", cell_metric_down},
    {"cell_relayed_bytes_total", "counter", "Of both, bytes that went through the coordinator.", cell_metric_relayed},
    {"cell_up_bytes_per_second", "gauge", "Rate of sending, mean of some seconds.", cell_metric_up_rate},
    {"cell_down_bytes_per_second", "gauge", "Rate of receiving, mean of some seconds.", cell_metric_down_rate},
    {"cell_progress_age_seconds", "gauge", "Since the node was last seen to get on.", cell_metric_age},
};
enum { CELL_METRICS = 8 };

static inline void view_cell_metrics(FILE *out, const MeshView *view) {
    for (int m = 0; m < CELL_METRICS; m++) {
        view_metric(out, cell_metrics[m].name, cell_metrics[m].type, cell_metrics[m].help);
        for (int i = 0; i < view->n_cells; i++) {
            view_cell_labels(out, cell_metrics[m].name, &view->cells[i]);
            fprintf(out, "}");
            view_value(out, cell_metrics[m].value(&view->cells[i]));
        }
    }
}

static inline void view_metrics(FILE *out, const MeshView *view) {
    view_metric(out, "info", "gauge", "The program; always 1.");
    fprintf(out, "meshtune_info{version=\"%s\"} 1\n", view->version);
    view_single(out, "step", "gauge", "Steps done.", (double)view->step);
    view_single(out, "steps", "gauge", "Steps of the whole run.", (double)view->n_steps);
    view_single(out, "loss", "gauge", "Mean loss a token of the last step.", view->loss);
    view_single(out, "tokens_total", "counter", "Tokens trained on.", (double)view->tokens);
    view_single(out, "tokens_per_second", "gauge", "Tokens a second of the last step.", view->tokens_per_second);
    view_single(out, "elapsed_seconds_total", "counter", "Time spent in steps.", view->elapsed);
    view_single(out, "roles", "gauge", "Cells and the anchor of the whole mesh.", view->n_roles);
    view_single(out, "nodes", "gauge", "Nodes that are here, spares too.", view->n_cells);
    view_single(out, "coordinator_up_bytes_total", "counter", "Bytes the coordinator has sent.",
                (double)view->up_bytes);
    view_single(out, "coordinator_down_bytes_total", "counter", "Bytes the coordinator has received.",
                (double)view->down_bytes);
    view_single(out, "coordinator_relayed_bytes_total", "counter", "Of both, bytes of others that it forwarded.",
                (double)view->relayed_bytes);
    view_cell_metrics(out, view);
    view_metric(out, "cell_info", "gauge", "Where the node is and how others reach it; always 1.");
    for (int i = 0; i < view->n_cells; i++) {
        view_cell_labels(out, "cell_info", &view->cells[i]);
        fprintf(out, ",peer=\"");
        view_label(out, view->cells[i].address);
        fprintf(out, "\",way=\"%s\"} 1\n", view->cells[i].route);
    }
    view_metric(out, "cell_state", "gauge", "1 for the state that the node is in.");
    for (int i = 0; i < view->n_cells; i++) {
        for (int s = 0; s < VIEW_STATES; s++) {
            view_cell_labels(out, "cell_state", &view->cells[i]);
            fprintf(out, ",state=\"%s\"} %d\n", view_states[s], strcmp(view_states[s], view->cells[i].state) == 0);
        }
    }
}

#endif
