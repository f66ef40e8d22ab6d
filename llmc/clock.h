// The simulated time of the cells of a mesh in one process. Nothing sleeps: a cell's clock advances by what it computes
// and by what it waits for. All times are seconds since the start of the run.
//
//   clock_compute(&cell[0], seconds);
//   double arrival = clock_send(&cell[0], speed, n_bytes);   // goes on at once; the bytes leave through its one uplink
//   link_send(link, data, n_bytes, arrival);
//   ...
//   clock_receive(&cell[1], arrival);                        // waits if the message is still under way
//
//   start = max(now, uplink_free),  uplink_free = start + n_bytes / bytes_per_second,  arrival = uplink_free + latency
#ifndef LLMC_CLOCK_H
#define LLMC_CLOCK_H

#include <stdint.h> // int64_t

typedef struct {
    double bytes_per_second; // 0: infinitely fast
    double latency;          // seconds
} LinkSpeed;

typedef struct {
    double now;         // seconds
    double uplink_free; // when the last byte sent so far has left
} Clock;

// The cell computes for `seconds`.
static inline void clock_compute(Clock *clock, double seconds) {
    clock->now += seconds;
}

// Queues n_bytes that are ready at some time on the sender's uplink, behind all it has sent before, wherever to.
// Returns the time at which the last byte arrives.
static inline double clock_send_at(Clock *sender, double ready, LinkSpeed speed, int64_t n_bytes) {
    double start = ready > sender->uplink_free ? ready : sender->uplink_free;
    double busy = speed.bytes_per_second > 0.0 ? (double)n_bytes / speed.bytes_per_second : 0.0;
    sender->uplink_free = start + busy;
    return sender->uplink_free + speed.latency;
}

// The same of bytes that are ready now. The sender does not wait.
static inline double clock_send(Clock *sender, LinkSpeed speed, int64_t n_bytes) {
    return clock_send_at(sender, sender->now, speed, n_bytes);
}

// The cell needs the message that arrives at `arrival`: it waits for it, or goes on if it is there.
static inline void clock_receive(Clock *receiver, double arrival) {
    if (arrival > receiver->now) receiver->now = arrival;
}

#endif
