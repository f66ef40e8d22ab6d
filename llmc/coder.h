// A thread of its own for work of the host that need not wait for the devices: the entropy coder of boundary messages.
// Jobs are done one after the other, in the order they come.
//
//   Coder coder;  memset(&coder, 0, sizeof coder);     without coder_start jobs are done at once, by who brings them
//   if (coder_start(&coder)) return -1;
//   CoderJob job = {klt_coding_write, &coding, 0, NULL};
//   coder_submit(&coder, &job);      job and coding stay where they are until
//   coder_wait(&coder, &job);        or coder_is_done(&coder, &job)
//   coder_stop(&coder);              what has come is done first
#ifndef LLMC_CODER_H
#define LLMC_CODER_H

#include <pthread.h> // the thread
#include <string.h>  // memset, strerror

#include "error.h" // error_set

typedef struct CoderJob {
    void (*run)(void *context);
    void *context;
    int done;
    struct CoderJob *next;
} CoderJob;

typedef struct {
    pthread_t thread;
    pthread_mutex_t lock; // of what follows, and of the jobs' done
    pthread_cond_t changed;
    CoderJob *first, *last; // yet to be done
    int started, stopping;
} Coder;

static inline void *coder_thread(void *argument) {
    Coder *coder = (Coder *)argument;
    pthread_mutex_lock(&coder->lock);
    for (;;) {
        while (coder->first == NULL && !coder->stopping) pthread_cond_wait(&coder->changed, &coder->lock);
        CoderJob *job = coder->first;
        if (job == NULL) break;
        pthread_mutex_unlock(&coder->lock);
        job->run(job->context);
        pthread_mutex_lock(&coder->lock);
        coder->first = job->next;
        job->done = 1;
        pthread_cond_broadcast(&coder->changed);
    }
    pthread_mutex_unlock(&coder->lock);
    return NULL;
}

// Returns 0, or -1: no thread.
static inline int coder_start(Coder *coder) {
    memset(coder, 0, sizeof *coder);
    pthread_mutex_init(&coder->lock, NULL);
    pthread_cond_init(&coder->changed, NULL);
    int status = pthread_create(&coder->thread, NULL, coder_thread, coder);
    if (status != 0) return error_set("no thread for the entropy coder: %s", strerror(status));
    coder->started = 1;
    return 0;
}

static inline void coder_stop(Coder *coder) {
    if (!coder->started) return;
    pthread_mutex_lock(&coder->lock);
    coder->stopping = 1;
    pthread_cond_broadcast(&coder->changed);
    pthread_mutex_unlock(&coder->lock);
    pthread_join(coder->thread, NULL);
    pthread_cond_destroy(&coder->changed);
    pthread_mutex_destroy(&coder->lock);
    memset(coder, 0, sizeof *coder);
}

// The job is the coder's until it is done.
static inline void coder_submit(Coder *coder, CoderJob *job) {
    job->done = 0, job->next = NULL;
    if (!coder->started) {
        job->run(job->context);
        job->done = 1;
        return;
    }
    pthread_mutex_lock(&coder->lock);
    if (coder->first == NULL)
        coder->first = job;
    else
        coder->last->next = job;
    coder->last = job;
    pthread_cond_broadcast(&coder->changed);
    pthread_mutex_unlock(&coder->lock);
}

static inline void coder_wait(Coder *coder, CoderJob *job) {
    if (!coder->started) return;
    pthread_mutex_lock(&coder->lock);
    while (!job->done) pthread_cond_wait(&coder->changed, &coder->lock);
    pthread_mutex_unlock(&coder->lock);
}

static inline int coder_is_done(Coder *coder, CoderJob *job) {
    if (!coder->started) return 1;
    pthread_mutex_lock(&coder->lock);
    int done = job->done;
    pthread_mutex_unlock(&coder->lock);
    return done;
}

#endif
