// One block of CUDA threads: who runs next, barriers, warp collectives.
//
//   unstarted --> running --> done
//                 |  ^
//                 |  +-- ready <--+-- (its collective or barrier is complete)
//                 +------> waiting at a warp collective, or at the block's barrier
//
// One thread runs at a time, until it waits. Then the next lane of its warp runs, in an order rotated at random; when
// the whole warp waits, another warp, in an order shuffled at every barrier. So what is not ordered by a barrier
// happens in another order from launch to launch, and code that lacks a barrier gives wrong results.
#ifndef EMULATOR_BLOCK_H
#define EMULATOR_BLOCK_H

#include <string.h> // memcpy
#include <vector>   // vector

#include "fiber.h" // Fiber

namespace emu {

constexpr unsigned MAX_THREADS = 1024, MAX_WARPS = MAX_THREADS / 32, MAX_COPY_GROUPS = 8;

// Where in the source a barrier stands.
struct Site {
    const char *file;
    int line;
};

// Combines the operands of the lanes in `lanes`; operands[lane] points into the lane's stack and takes its result.
typedef void (*Combine)(void *const *operands, unsigned lanes);

// A cp.async in flight: done at the wait, so that code that does not wait reads garbage.
struct AsyncCopy {
    void *to;
    unsigned char bytes[16];
    unsigned group;
};

struct Warp;
struct Thread {
    uint3 index;
    unsigned lane;
    Warp *warp;
    Fiber *fiber; // NULL: unstarted or done
    // while it waits at a collective
    unsigned mask;
    Combine combine;
    const char *what;
    // while it waits at a barrier
    Site site;
    std::vector<AsyncCopy> copies;
    unsigned copy_group;
};

struct Warp {
    unsigned lanes; // those that exist; the five below share them out with the running one
    unsigned unstarted, ready, collective, barrier, done;
    unsigned rotate;
    void *operands[32];
    Thread *threads; // of lane 0
};

struct Block {
    unsigned n_threads, n_warps, n_done;
    unsigned n_at_barrier;
    Site site;                            // of the barrier that some wait at
    int count, all, any;                  // predicates of those who have arrived
    int last_count, last_all, last_any;   // of the last complete barrier
    unsigned order[MAX_WARPS], next_warp; // the next warps to run
    Warp warps[MAX_WARPS];
    Thread threads[MAX_THREADS];
    void (*body)(const void *); // the kernel, and its arguments
    const void *arguments;
};

inline Block block;
inline Thread *current = nullptr;

EMU_UNCHECKED inline void shuffle_warps() {
    for (unsigned i = 0; i < block.n_warps; i++) {
        unsigned j = chance_below(i + 1);
        block.order[i] = block.order[j], block.order[j] = i;
    }
    block.next_warp = 0;
}

// Takes a lane that can run out of the warp's sets; NULL if all wait.
EMU_UNCHECKED inline Thread *pick_lane(Warp *warp) {
    unsigned candidates = warp->ready | warp->unstarted;
    if (candidates == 0) return nullptr;
    unsigned turned = candidates >> warp->rotate | candidates << ((32 - warp->rotate) & 31);
    unsigned lane = ((unsigned)__builtin_ctz(turned) + warp->rotate) & 31;
    warp->ready &= ~(1u << lane);
    warp->unstarted &= ~(1u << lane);
    return &warp->threads[lane];
}

EMU_UNCHECKED inline Thread *pick_warp() {
    for (unsigned i = 0; i < block.n_warps; i++) {
        Warp *warp = &block.warps[block.order[block.next_warp]];
        block.next_warp = block.next_warp + 1 < block.n_warps ? block.next_warp + 1 : 0;
        warp->rotate = (unsigned)chance() & 31;
        Thread *thread = pick_lane(warp);
        if (thread != nullptr) return thread;
    }
    return nullptr;
}

[[noreturn]] inline void die_deadlock() {
    for (unsigned i = 0; i < block.n_threads; i++) {
        Thread *thread = &block.threads[i];
        if (thread->warp->collective >> thread->lane & 1)
            for (unsigned j = 0; j < block.n_threads; j++) {
                Thread *other = &block.threads[j];
                if (other->warp->barrier >> other->lane & 1)
                    die("deadlock: thread %u waits at %s with mask %08x, thread %u at the barrier %s:%d", i,
                        thread->what, thread->mask, j, other->site.file, other->site.line);
            }
    }
    for (unsigned i = 0; i < block.n_threads; i++) {
        Thread *thread = &block.threads[i];
        if (thread->warp->collective >> thread->lane & 1)
            die("deadlock: thread %u waits at %s with mask %08x, lanes %08x of its warp wait there, %08x are done", i,
                thread->what, thread->mask, thread->warp->collective, thread->warp->done);
    }
    die("deadlock: no thread can run, %u of %u are done", block.n_done, block.n_threads);
}

inline void fiber_main();

// Leaves the current thread, which waits or is done, for the next. A thread that has not started takes over the
// fiber of one that is done: `parked` says so, and the caller then runs it.
EMU_UNCHECKED inline void leave(Thread *next, bool parked) {
    Fiber *from = current_fiber, *to = &host_fiber;
    if (next != nullptr) {
        current = next;
        threadIdx = next->index;
        if (next->fiber == nullptr) {
            next->fiber = parked ? from : fiber_take(fiber_main);
            if (parked) return;
        }
        to = next->fiber;
    }
    if (parked) fiber_park(from);
    fiber_switch(to);
}

// The current thread waits: others run until it is picked again.
EMU_UNCHECKED inline void wait_turn() {
    Thread *next = pick_lane(current->warp);
    if (next == nullptr) next = pick_warp();
    if (next == nullptr) die_deadlock();
    if (next != current) leave(next, false);
}

// Completes the collective of mask if all its lanes have come, the running one last.
EMU_UNCHECKED inline bool collective_complete(Warp *warp, unsigned mask) {
    unsigned lanes = mask & warp->lanes; // those of a short last warp do not exist
    if ((warp->collective & lanes) != lanes) return false;
    for (unsigned rest = lanes; rest != 0; rest &= rest - 1) {
        const Thread *thread = &warp->threads[__builtin_ctz(rest)];
        if (thread->mask != mask || thread->combine != current->combine)
            die("mismatched collectives in a warp: lane %u is at %s with mask %08x, lane %u at %s with mask %08x",
                thread->lane, thread->what, thread->mask, current->lane, current->what, current->mask);
    }
    current->combine(warp->operands, lanes);
    warp->collective &= ~lanes;
    warp->ready |= lanes & ~(1u << current->lane);
    return true;
}

// All lanes of mask call this with the same combine; on return, *operand holds what combine left there.
EMU_UNCHECKED inline void collective(unsigned mask, Combine combine, void *operand, const char *what) {
    Thread *thread = current;
    Warp *warp = thread->warp;
    unsigned self = 1u << thread->lane;
    if ((mask & self) == 0) die("%s: mask %08x is without its own lane %u", what, mask, thread->lane);
    if ((mask & warp->done) != 0)
        die("mismatched collectives in a warp: lane %u is at %s with mask %08x, of which %08x have left the kernel",
            thread->lane, what, mask, mask & warp->done);
    thread->mask = mask, thread->combine = combine, thread->what = what;
    warp->operands[thread->lane] = operand;
    warp->collective |= self;
    if (!collective_complete(warp, mask)) {
        wait_turn();
    } else if ((chance() & 15) == 0) { // now and then another warp goes first
        warp->ready |= self;
        Thread *next = pick_warp();
        if (next != current) leave(next, false);
    }
}

// The block's barrier; every thread of the block must come, at one place in the source.
EMU_UNCHECKED inline void barrier(int predicate, Site site) {
    Thread *thread = current;
    if (block.n_done > 0)
        die("divergent barrier at %s:%d: %u of %u threads have left the kernel", site.file, site.line, block.n_done,
            block.n_threads);
    if (block.n_at_barrier == 0) block.site = site, block.count = 0, block.all = 1, block.any = 0;
    if (block.site.line != site.line || (block.site.file != site.file && strcmp(block.site.file, site.file) != 0))
        die("divergent barrier: some threads wait at %s:%d, this one comes to %s:%d", block.site.file, block.site.line,
            site.file, site.line);
    thread->site = site;
    block.count += predicate != 0;
    block.all &= predicate != 0;
    block.any |= predicate != 0;
    thread->warp->barrier |= 1u << thread->lane;
    if (++block.n_at_barrier == block.n_threads) {
        block.n_at_barrier = 0;
        block.last_count = block.count, block.last_all = block.all, block.last_any = block.any;
        for (unsigned w = 0; w < block.n_warps; w++)
            block.warps[w].ready = block.warps[w].barrier, block.warps[w].barrier = 0;
        shuffle_warps();
        Thread *next = pick_warp();
        if (next != thread) leave(next, false);
        return;
    }
    wait_turn();
}

// The current thread has returned from the kernel. Returns on this fiber when there is another thread to start.
EMU_UNCHECKED inline void thread_done() {
    Warp *warp = current->warp;
    if (block.n_at_barrier > 0)
        die("divergent barrier: %u threads wait at %s:%d, this one leaves the kernel", block.n_at_barrier,
            block.site.file, block.site.line);
    block.n_done++;
    warp->done |= 1u << current->lane;
    current->fiber = nullptr; // as the next block wants to find it
    if (current->copy_group > 0) current->copies.clear(), current->copy_group = 0;
    for (unsigned rest = warp->collective; rest != 0; rest &= rest - 1) {
        const Thread *thread = &warp->threads[__builtin_ctz(rest)];
        if (thread->mask >> current->lane & 1)
            die("mismatched collectives in a warp: lane %u waits at %s with mask %08x, lane %u leaves the kernel",
                thread->lane, thread->what, thread->mask, current->lane);
    }
    Thread *next = pick_lane(warp);
    if (next == nullptr) next = pick_warp();
    if (next == nullptr && block.n_done < block.n_threads) die_deadlock();
    leave(next, true);
}

EMU_UNCHECKED inline void fiber_main() {
    fiber_arrived();
    for (;;) {
        block.body(block.arguments);
        thread_done();
    }
}

// The threads of a block of this shape; blocks of one launch share them.
inline void block_shape(dim3 shape) {
    block.n_threads = shape.x * shape.y * shape.z;
    block.n_warps = (block.n_threads + 31) / 32;
    for (unsigned i = 0; i < block.n_threads; i++) {
        Thread *thread = &block.threads[i];
        thread->index = uint3{i % shape.x, i / shape.x % shape.y, i / shape.x / shape.y};
        thread->lane = i % 32;
        thread->warp = &block.warps[i / 32];
    }
}

// Runs one block to its end.
inline void block_run(void (*body)(const void *), const void *arguments) {
    block.body = body, block.arguments = arguments;
    block.n_done = block.n_at_barrier = 0;
    for (unsigned w = 0; w < block.n_warps; w++) {
        Warp *warp = &block.warps[w];
        unsigned lanes = block.n_threads - 32 * w;
        warp->lanes = lanes < 32 ? (1u << lanes) - 1 : ~0u;
        warp->unstarted = warp->lanes;
        warp->ready = warp->collective = warp->barrier = warp->done = 0;
        warp->threads = &block.threads[32 * w];
    }
    shuffle_warps();
    current = nullptr;
    leave(pick_warp(), false);
}

} // namespace emu

#endif
