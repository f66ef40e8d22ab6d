// The order of a pipeline stage's work in one step, made once (1F1B with a flush: Narayanan et al. 2019, as in
// PipeDream-Flush). A stage first runs ahead, as many forwards as there are stages behind it, then alternates one
// forward and one backward, then drains. At most schedule_in_flight micro-batches wait for their backward at once, and
// the backwards of a stage come in the order of the micro-batches, whatever the number of stages.
//
//   stage 0 of 3, 4 micro-batches:  F0 F1 F2 B0 F3 B1 B2 B3
//   stage 2 of 3:                   F0 B0 F1 B1 F2 B2 F3 B3
#ifndef LLMC_SCHEDULE_H
#define LLMC_SCHEDULE_H

typedef enum { WORK_FORWARD, WORK_BACKWARD } WorkKind;

typedef struct {
    WorkKind kind;
    int micro_batch;
} Work;

// Most micro-batches whose activations stage `stage` of n_stages keeps at once.
static inline int schedule_in_flight(int stage, int n_stages, int n_micro) {
    return n_stages - stage < n_micro ? n_stages - stage : n_micro;
}

// Fills work (2*n_micro) for a stage.
static inline void schedule_1f1b(Work *work, int stage, int n_stages, int n_micro) {
    int ahead = schedule_in_flight(stage, n_stages, n_micro) - 1, forwards = 0, backwards = 0;
    for (int i = 0; i < 2 * n_micro; i++) {
        int forward = forwards < n_micro && forwards - backwards <= ahead;
        work[i].kind = forward ? WORK_FORWARD : WORK_BACKWARD;
        work[i].micro_batch = forward ? forwards++ : backwards++;
    }
}

#endif
