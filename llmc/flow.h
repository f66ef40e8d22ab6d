// The simulated time of an asynchronous pipeline, one Flow a stage beside the stage's Clock. The process computes one
// micro-batch after the other through all stages; a pipeline of machines would not: the stage `delay` before the last
// runs delay + 1 forwards ahead and then alternates, so that at most delay + 1 micro-batches wait for their backward
// (1F1B without a flush, Narayanan et al. 2019):
//
//   stage 0 of 3:  F0 F1 F2 B0 F3 B1 F4 B2 F5 ...
//   stage 2 of 3:  F0 B0 F1 B1 F2 B2 F3 B3 ...
//
// So a step is only booked: what each part took and how many bytes it sent. flow_record ends it, and flow_advance does
// all work whose input is there by then, in this order. After micro-batch t the last stage is through with it, stage s
// with the one `delay` before it. What is left is done at the end of a run, without further forwards.
//
//   flow_now(&flow)->seconds[FLOW_FORWARD] = 0.5;  ...               // each stage, each micro-batch
//   flow_record(&flow);
//   do work = flow_advance(&flow[0], ...) + flow_advance(&flow[1], ...); while (work > 0);
//
// For equal stages, F and B seconds and links without delay, the last stage is through with micro-batch t (from 1 on)
// after (P - 1)*F + t*(F + B): there are no bubbles. A message of m seconds and l of latency opens one: a stage waits
// for the way there and back of delay + 1 micro-batches, so a micro-batch takes F + B + 2*(m + l)*(P - 1)/P.
#ifndef LLMC_FLOW_H
#define LLMC_FLOW_H

#include <stdint.h> // int64_t
#include <stdlib.h> // calloc, free
#include <string.h> // memset

#include "clock.h" // Clock
#include "error.h" // error_set

typedef enum { FLOW_FORWARD, FLOW_BACKWARD, FLOW_UPDATE, FLOW_PARTS } FlowPart;

// A micro-batch on a stage.
typedef struct {
    double seconds[FLOW_PARTS];
    int64_t bytes[2];  // sent after the forward to the next stage, after the backward to the one before
    double arrival[2]; // of what the forward and the backward need
} Flight;

typedef struct {
    int delay, n;                          // n: flights kept
    int64_t recorded, forwards, backwards; // micro-batches booked; simulated
    Flight *flights;                       // (n) micro-batch m at m % n
} Flow;

// Returns 0, or -1: no memory.
static inline int flow_init(Flow *flow, int delay, int n_stages) {
    memset(flow, 0, sizeof *flow);
    flow->delay = delay, flow->n = n_stages + 1;
    flow->flights = (Flight *)calloc((size_t)flow->n, sizeof(Flight));
    return flow->flights != NULL ? 0 : error_set("out of memory for simulated time");
}

static inline void flow_free(Flow *flow) {
    free(flow->flights);
    memset(flow, 0, sizeof *flow);
}

static inline Flight *flow_at(const Flow *flow, int64_t micro) {
    return &flow->flights[micro % flow->n];
}

// The micro-batch that is being booked.
static inline Flight *flow_now(const Flow *flow) {
    return flow_at(flow, flow->recorded);
}

// The pipeline has run empty after `done` micro-batches.
static inline void flow_stand(Flow *flow, int64_t done) {
    flow->recorded = flow->forwards = flow->backwards = done;
    if (flow->flights != NULL) memset(flow_now(flow), 0, sizeof(Flight));
}

// Ends the micro-batch that is being booked; the next is empty.
static inline void flow_record(Flow *flow) {
    flow->recorded++;
    memset(flow_now(flow), 0, sizeof(Flight));
}

// Does the next forward or backward, and sends what comes of it to the neighbour `to`, NULL: there is none.
static inline void flow_work(Flow *flow, Clock *clock, FlowPart part, int has_input, Flow *to, LinkSpeed speed) {
    int64_t micro = part == FLOW_FORWARD ? flow->forwards++ : flow->backwards++;
    Flight *flight = flow_at(flow, micro);
    if (has_input) clock_receive(clock, flight->arrival[part]);
    clock_compute(clock, flight->seconds[part]);
    if (to != NULL) flow_at(to, micro)->arrival[part] = clock_send(clock, speed, flight->bytes[part]);
    if (part == FLOW_BACKWARD) clock_compute(clock, flight->seconds[FLOW_UPDATE]);
}

// Does all of a stage's work that has its input. drain: no forward follows those that are booked. before, behind: the
// neighbours, NULL at the ends. Returns how much was done.
static inline int flow_advance(Flow *flow, Clock *clock, Flow *before, Flow *behind, LinkSpeed speed, int drain) {
    for (int work = 0;; work++) {
        int ahead = flow->forwards - flow->backwards <= flow->delay;
        if (ahead && !(drain && flow->forwards == flow->recorded)) {
            if (flow->forwards == flow->recorded || (before != NULL && before->forwards <= flow->forwards)) return work;
            flow_work(flow, clock, FLOW_FORWARD, before != NULL, behind, speed);
        } else {
            if (flow->backwards == flow->forwards) return work; // drained
            if (behind != NULL && behind->backwards <= flow->backwards) return work;
            flow_work(flow, clock, FLOW_BACKWARD, behind != NULL, before, speed);
        }
    }
}

#endif
