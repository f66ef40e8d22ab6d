// How much memory the host has for this process.
#ifndef LLMC_HOST_MEMORY_H
#define LLMC_HOST_MEMORY_H

#include <stdint.h> // int64_t
#include <stdio.h>  // fscanf
#include <unistd.h> // sysconf

// Bytes this process may use: the machine's memory, or its control group's limit where that is lower.
static inline int64_t host_memory(void) {
    int64_t memory = (int64_t)sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGESIZE);
    long long limit;
    FILE *file = fopen("/sys/fs/cgroup/memory.max", "re");
    if (file == NULL) return memory;
    if (fscanf(file, "%lld", &limit) == 1 && limit > 0 && limit < memory) memory = limit;
    fclose(file);
    return memory;
}

#endif
