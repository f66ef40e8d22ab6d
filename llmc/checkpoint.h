// Run checkpoints: one folder a step inside the run's folder, whole or not there.
//
//   1 write step_N.tmp/   2 fsync its files and itself   3 rename to step_N   4 fsync the run's folder
//   5 replace the link `latest` in the same way          6 remove steps beyond --keep
// Killed in 1-2: the .tmp is swept at the next start. In 3-5: `latest` names a whole step, the old or the new one.
// What `latest` names is never removed.
#ifndef LLMC_CHECKPOINT_H
#define LLMC_CHECKPOINT_H

#include <stdint.h> // fixed-width integers

#include "error.h"
#include "file.h"

// path (PATH_MAX) = run/step_00000012 plus suffix
static inline int checkpoint_path(char *path, const char *run, int64_t step, const char *suffix) {
    char name[64];
    snprintf(name, sizeof name, "step_%08lld%s", (long long)step, suffix);
    return path_join(path, run, name);
}

// Makes the folder step_N.tmp to write into; its path goes to `path`.
static inline int checkpoint_begin(char *path, const char *run, int64_t step) {
    if (checkpoint_path(path, run, step, ".tmp")) return -1;
    if (file_exists(path) && file_remove_folder(path)) return -1;
    return file_make_folders(path);
}

// Points the link run/latest at step_N.
static inline int checkpoint_mark(const char *run, int64_t step) {
    char link[PATH_MAX], aside[PATH_MAX], target[64];
    snprintf(target, sizeof target, "step_%08lld", (long long)step);
    if (path_join(link, run, "latest") || path_join(aside, run, "latest.tmp")) return -1;
    unlink(aside);
    if (symlink(target, aside) != 0) return error_set("symlink %s: %s", aside, strerror(errno));
    return file_replace(aside, link);
}

// Makes step_N.tmp the whole checkpoint step_N and marks it latest.
static inline int checkpoint_commit(const char *run, int64_t step) {
    char aside[PATH_MAX], path[PATH_MAX];
    if (checkpoint_path(aside, run, step, ".tmp") || checkpoint_path(path, run, step, "")) return -1;
    if (file_exists(path) && file_remove_folder(path)) return -1; // a step that was redone after a resume
    if (file_sync_folder(aside) || file_replace(aside, path)) return -1;
    return checkpoint_mark(run, step);
}

// The step `latest` names, -1 if there is none.
static inline int64_t checkpoint_latest(const char *run) {
    char link[PATH_MAX], target[64];
    long long step;
    if (path_join(link, run, "latest")) return -1;
    ssize_t n = readlink(link, target, sizeof target - 1);
    if (n <= 0) return -1;
    target[n] = '\0';
    return sscanf(target, "step_%lld", &step) == 1 ? step : -1;
}

// Removes unfinished folders, and whole steps until `keep` are left (keep 0: all stay). The latest always stays.
static inline void checkpoint_sweep(const char *run, int keep) {
    int64_t latest = checkpoint_latest(run);
    for (;;) {
        char oldest_path[PATH_MAX] = "", path[PATH_MAX];
        long long step, oldest = -1;
        int n_steps = 0, used;
        DIR *folder = opendir(run);
        struct dirent *entry;
        if (folder == NULL) return;
        while ((entry = readdir(folder)) != NULL) {
            if (sscanf(entry->d_name, "step_%lld%n", &step, &used) != 1) continue;
            if (path_join(path, run, entry->d_name)) continue;
            if (strcmp(entry->d_name + used, ".tmp") == 0) file_remove_folder(path);
            if (entry->d_name[used] != '\0') continue;
            n_steps++;
            if (step != latest && (oldest < 0 || step < oldest)) oldest = step, strcpy(oldest_path, path);
        }
        closedir(folder);
        if (keep == 0 || n_steps <= keep || oldest < 0 || file_remove_folder(oldest_path)) return;
    }
}

#endif
