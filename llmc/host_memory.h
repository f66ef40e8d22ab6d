// How much memory the host has for this process.
#ifndef LLMC_HOST_MEMORY_H
#define LLMC_HOST_MEMORY_H

#include <stdint.h> // int64_t
#include <stdio.h>  // fscanf
#include <unistd.h> // sysconf

// A number that a file of the kernel begins with; `otherwise` if there is no file, or it says "max".
static inline int64_t host_number(const char *path, int64_t otherwise) {
    long long number;
    FILE *file = fopen(path, "re");
    if (file == NULL) return otherwise;
    int64_t result = fscanf(file, "%lld", &number) == 1 && number >= 0 ? (int64_t)number : otherwise;
    fclose(file);
    return result;
}

// The control group's limit, of version 2 or 1; INT64_MAX without one. *used: what is taken of it.
static inline int64_t host_limit(int64_t *used) {
    int64_t limit = host_number("/sys/fs/cgroup/memory.max", 0);
    *used = host_number("/sys/fs/cgroup/memory.current", 0);
    if (limit > 0) return limit;
    limit = host_number("/sys/fs/cgroup/memory/memory.limit_in_bytes", 0);
    *used = host_number("/sys/fs/cgroup/memory/memory.usage_in_bytes", 0);
    return limit > 0 ? limit : INT64_MAX;
}

// Bytes this process may use: the machine's memory, or its control group's limit where that is lower.
static inline int64_t host_memory(void) {
    int64_t memory = (int64_t)sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGESIZE), used, limit = host_limit(&used);
    return limit < memory ? limit : memory;
}

// How much of it others have not taken: what the kernel could give without swapping.
static inline int64_t host_memory_left(void) {
    int64_t left = host_memory(), used, limit = host_limit(&used);
    long long kilobytes;
    char line[128];
    FILE *file = fopen("/proc/meminfo", "re");
    while (file != NULL && fgets(line, sizeof line, file) != NULL)
        if (sscanf(line, "MemAvailable: %lld kB", &kilobytes) == 1 && kilobytes * 1024 < left) left = kilobytes * 1024;
    if (file != NULL) fclose(file);
    return limit - used < left && used < limit ? limit - used : left;
}

#endif
