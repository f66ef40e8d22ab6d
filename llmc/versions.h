// Which weights a stage of an asynchronous pipeline works with, and the ring that keeps them (PipeDream: Narayanan et
// al. 2019). A version is counted in updates: version 0 are the weights at the start, micro-batch t = 1, 2, ... makes
// version t of version t - 1. A stage that is `delay` stages before the last has run ahead by that many micro-batches:
//
//   forward of micro-batch t     version max(0, t - 1 - delay)
//   backward with stashing       the same
//   backward without             version t - 1, the newest
//
// `done` is t - 1, the updates so far. The newest weights are where the optimizer writes; the up to `delay` versions
// before them lie in a ring of `delay` slots. Before an update they go where the oldest version lies, which is the one
// that the forward has just used:
//
//   float weight = w0, older[DELAY];
//   for (int64_t done = 0;; done++) {
//       int slot = versions_slot(DELAY, done, versions_forward(DELAY, done));
//       float gradient = g(slot < 0 ? weight : older[slot]);
//       if (DELAY > 0) older[versions_next_slot(DELAY, done)] = weight;
//       weight -= lr * gradient;
//   }
#ifndef LLMC_VERSIONS_H
#define LLMC_VERSIONS_H

#include <stdint.h> // int64_t

// By how many updates the forward weights of a stage are behind.
static inline int versions_delay(int stage, int n_stages) {
    return n_stages - 1 - stage;
}

// The version that the forward after `done` updates sees.
static inline int64_t versions_forward(int delay, int64_t done) {
    return done > delay ? done - delay : 0;
}

// The version that the backward of the same micro-batch sees.
static inline int64_t versions_backward(int delay, int64_t done, int stash) {
    return stash ? versions_forward(delay, done) : done;
}

// How many versions before the newest one there are.
static inline int versions_held(int delay, int64_t done) {
    return done < delay ? (int)done : delay;
}

// The slot of a version from done - versions_held() to done; -1 for the newest.
static inline int versions_slot(int delay, int64_t done, int64_t version) {
    return version == done ? -1 : (int)(version % delay);
}

// The slot that takes the newest version before it is updated; delay > 0.
static inline int versions_next_slot(int delay, int64_t done) {
    return (int)(done % delay);
}

#endif
