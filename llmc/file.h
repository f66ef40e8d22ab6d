// Files that are whole or not there: write the new beside the old, sync, rename. Every function returns 0 or -1 with a
// message that names the path, the call that failed and its reason.
#ifndef LLMC_FILE_H
#define LLMC_FILE_H

#include <dirent.h>   // opendir
#include <errno.h>    // errno
#include <fcntl.h>    // open
#include <limits.h>   // PATH_MAX
#include <stdint.h>   // fixed-width integers
#include <stdio.h>    // rename, snprintf
#include <stdlib.h>   // malloc, free
#include <string.h>   // strerror
#include <sys/mman.h> // mmap
#include <sys/stat.h> // stat, mkdir
#include <unistd.h>   // fsync, unlink

#include "error.h"

// Counts the syncs of this process; a test sets file_die_at to kill it at each in turn.
#ifdef TESTING
static int file_syncs, file_die_at;
#endif

static inline int file_exists(const char *path) {
    struct stat info;
    return stat(path, &info) == 0;
}

static inline int file_is_folder(const char *path) {
    struct stat info;
    return stat(path, &info) == 0 && S_ISDIR(info.st_mode);
}

// 1 if text ends with suffix
static inline int ends_with(const char *text, const char *suffix) {
    size_t n = strlen(text), m = strlen(suffix);
    return n >= m && strcmp(text + n - m, suffix) == 0;
}

// out (PATH_MAX) = folder/name. -1 if it does not fit.
static inline int path_join(char *out, const char *folder, const char *name) {
    int n = snprintf(out, PATH_MAX, "%s/%s", folder, name);
    return n < 0 || n >= PATH_MAX ? error_set("%.200s/%.200s: the path is too long", folder, name) : 0;
}

// A whole file in memory, read-only; empty files map to "" of size 0.
typedef struct {
    const uint8_t *data;
    size_t size;
} FileMap;

static inline int file_map(FileMap *map, const char *path) {
    struct stat info;
    map->data = (const uint8_t *)"", map->size = 0;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); // a FIFO must not block
    if (fd < 0) return error_set("%s: open: %s", path, strerror(errno));
    if (fstat(fd, &info) != 0 || !S_ISREG(info.st_mode)) {
        close(fd);
        return error_set("%s: not a regular file", path);
    }
    if (info.st_size > 0) {
        void *data = mmap(NULL, (size_t)info.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
        if (data == MAP_FAILED) {
            close(fd);
            return error_set("%s: mmap: %s", path, strerror(errno));
        }
        map->data = (const uint8_t *)data, map->size = (size_t)info.st_size;
    }
    close(fd);
    return 0;
}

static inline void file_unmap(FileMap *map) {
    if (map->size > 0) munmap((void *)map->data, map->size);
    map->data = (const uint8_t *)"", map->size = 0;
}

// Creates a folder and its parents.
static inline int file_make_folders(const char *path) {
    char part[PATH_MAX];
    size_t n = strlen(path);
    if (n == 0 || n >= sizeof part) return error_set("%.200s: not a usable folder name", path);
    for (size_t i = 1; i <= n; i++) {
        if (path[i] != '/' && path[i] != '\0') continue;
        memcpy(part, path, i);
        part[i] = '\0';
        if (mkdir(part, 0777) != 0 && errno != EEXIST) return error_set("%s: mkdir: %s", part, strerror(errno));
    }
    return file_is_folder(path) ? 0 : error_set("%s: exists and is not a folder", path);
}

// Flushes what an open descriptor wrote to the disk.
static inline int file_sync(int fd, const char *path) {
#ifdef TESTING
    if (++file_syncs == file_die_at) _exit(99);
#endif
    return fsync(fd) == 0 ? 0 : error_set("fsync %s: %s", path, strerror(errno));
}

// Flushes a folder's entries: makes renames inside it last.
static inline int file_sync_folder(const char *path) {
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) return error_set("%s: open: %s", path, strerror(errno));
    int result = file_sync(fd, path);
    close(fd);
    return result;
}

// The folder a path lies in, "." for a bare name.
static inline void path_parent(char *out, const char *path) {
    snprintf(out, PATH_MAX, "%s", path);
    char *slash = strrchr(out, '/');
    if (slash == NULL) {
        snprintf(out, PATH_MAX, ".");
    } else if (slash == out) {
        slash[1] = '\0';
    } else {
        *slash = '\0';
    }
}

// Renames from over to and syncs the folder that holds them.
static inline int file_replace(const char *from, const char *to) {
    char parent[PATH_MAX];
    if (rename(from, to) != 0) return error_set("rename %s to %s: %s", from, to, strerror(errno));
    path_parent(parent, to);
    return file_sync_folder(parent);
}

// A buffered writer that keeps the first error: write freely, look at the result of file_writer_close.
typedef struct {
    FILE *file;
    char path[PATH_MAX];
    int error; // errno of the first failure
} FileWriter;

static inline int file_writer_open(FileWriter *writer, const char *path) {
    writer->error = 0;
    if (snprintf(writer->path, sizeof writer->path, "%s", path) >= (int)sizeof writer->path)
        return error_set("%.200s: the path is too long", path);
    writer->file = fopen(path, "wbe");
    return writer->file != NULL ? 0 : error_set("%s: open for writing: %s", path, strerror(errno));
}

static inline void file_write(FileWriter *writer, const void *data, size_t size) {
    if (writer->error == 0 && fwrite(data, 1, size, writer->file) != size) writer->error = errno != 0 ? errno : EIO;
}

// Flushes, syncs and closes. Returns -1 if anything since open failed; the file is then not to be used.
static inline int file_writer_close(FileWriter *writer) {
    int result = 0;
    if (writer->error == 0 && fflush(writer->file) != 0) writer->error = errno;
    if (writer->error == 0) result = file_sync(fileno(writer->file), writer->path);
    if (fclose(writer->file) != 0 && writer->error == 0) writer->error = errno;
    if (writer->error != 0) return error_set("write %s: %s", writer->path, strerror(writer->error));
    return result;
}

// Writes a small file so that `path` holds the old text or the new one, never a part.
static inline int file_write_text(const char *path, const char *text) {
    char aside[PATH_MAX];
    FileWriter writer;
    if (snprintf(aside, sizeof aside, "%s.tmp", path) >= (int)sizeof aside)
        return error_set("%.200s: the path is too long", path);
    if (file_writer_open(&writer, aside)) return -1;
    file_write(&writer, text, strlen(text));
    if (file_writer_close(&writer) || file_replace(aside, path)) {
        unlink(aside);
        return -1;
    }
    return 0;
}

// Removes a folder and the plain files in it (run checkpoints hold nothing else).
static inline int file_remove_folder(const char *path) {
    char entry_path[PATH_MAX];
    struct dirent *entry;
    DIR *folder = opendir(path);
    if (folder == NULL) return error_set("%s: opendir: %s", path, strerror(errno));
    while ((entry = readdir(folder)) != NULL) {
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0) continue;
        if (path_join(entry_path, path, entry->d_name) == 0) unlink(entry_path);
    }
    closedir(folder);
    return rmdir(path) == 0 ? 0 : error_set("rmdir %s: %s", path, strerror(errno));
}

#endif
