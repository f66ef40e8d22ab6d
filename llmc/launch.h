// Which of several processes this one is, as a launcher says in the environment: torchrun and what sets the same
// variables, mpirun (Open MPI; MPICH and others by PMI), srun.
//
//   Launch launch;
//   if (launch_read(&launch, launch_getenv, NULL)) return -1;
//   launch.size > 1: this is process `rank` of `size`
//
// Rank 0 hosts the mesh and has a cell, the others join it. How they get its token: rank 0 writes it to RUN/join, in
// the run's folder (-o), which all see on a file system they share and only their user may read; the others wait for
// it. So no port has to be agreed on and no secret is in an environment or a command line; the keys are new for each
// run.
#ifndef LLMC_LAUNCH_H
#define LLMC_LAUNCH_H

#include <errno.h>  // errno
#include <stdlib.h> // getenv, strtol
#include <string.h> // strchr

#include "error.h"

enum { LAUNCH_HOST = 256, LAUNCH_MOST = 65535 };

typedef struct {
    const char *by;         // the launcher, "" if there is none
    int rank, size;         // 0 of 1: alone
    char host[LAUNCH_HOST]; // of rank 0 as the others reach it; "": not said
} Launch;

// The value of a variable, NULL if it is not set.
typedef const char *(*LaunchGet)(void *context, const char *name);

static inline const char *launch_getenv(void *context, const char *name) {
    (void)context;
    return getenv(name);
}

// The first that is set counts: a launcher may have been started by another. Of Slurm, the count of the step's tasks:
// a batch script that runs the program without srun has SLURM_PROCID and SLURM_NTASKS too, and is one process.
static const char *const launch_sources[][3] = {{"torchrun", "RANK", "WORLD_SIZE"},
                                                {"mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"},
                                                {"mpirun", "PMI_RANK", "PMI_SIZE"},
                                                {"srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"}};
enum { LAUNCH_SOURCES = 4 };

static inline int launch_number(int *number, const char *name, const char *text) {
    char *end;
    errno = 0;
    long value = strtol(text, &end, 10);
    if (text[0] < '0' || text[0] > '9' || *end != '\0' || errno != 0 || value > LAUNCH_MOST)
        return error_set("%s is '%.40s', not a number up to %d", name, text, LAUNCH_MOST);
    *number = (int)value;
    return 0;
}

// host = the first of a Slurm list of hosts: "n[07-12,20],gpu1" has n07. A list that is none has "".
static inline void launch_first_host(char host[LAUNCH_HOST], const char *list) {
    static const char allowed[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.-_";
    size_t n = 0;
    host[0] = '\0';
    for (const char *at = list; *at != '\0' && *at != ','; at++) {
        size_t length = 1;
        if (*at == '[') length = strcspn(++at, "-,]");
        if (n + length >= LAUNCH_HOST || strspn(at, allowed) < length) {
            host[0] = '\0';
            return;
        }
        memcpy(host + n, at, length);
        n += length, host[n] = '\0';
        if (at > list && at[-1] == '[') {
            at = strchr(at, ']');
            if (at == NULL) {
                host[0] = '\0';
                return;
            }
        }
    }
}

// Where rank 0 is: what a launcher says, else Slurm's first host.
static inline void launch_find_host(Launch *launch, LaunchGet get, void *context) {
    static const char *const names[] = {"MASTER_ADDR", "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST",
                                        "SLURM_LAUNCH_NODE_IPADDR"};
    for (int i = 0; i < 4 && launch->host[0] == '\0'; i++) {
        const char *value = get(context, names[i]);
        if (value != NULL) launch_first_host(launch->host, value);
    }
}

// Reads the environment. -1: a launcher's numbers make no sense.
static inline int launch_read(Launch *launch, LaunchGet get, void *context) {
    memset(launch, 0, sizeof *launch);
    launch->by = "", launch->size = 1;
    for (int i = 0; i < LAUNCH_SOURCES; i++) {
        const char *const *source = launch_sources[i];
        const char *rank = get(context, source[1]), *size = get(context, source[2]);
        if (rank == NULL || size == NULL) continue;
        if (launch_number(&launch->rank, source[1], rank) || launch_number(&launch->size, source[2], size)) return -1;
        if (launch->rank >= launch->size)
            return error_set("%s is %d, and %s is %d", source[1], launch->rank, source[2], launch->size);
        launch->by = source[0];
        if (launch->size > 1) launch_find_host(launch, get, context);
        return 0;
    }
    return 0;
}

#endif
