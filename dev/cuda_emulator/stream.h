// Streams and events. Work is only queued at the call; it is done when the host waits for something, one piece at a
// time from a stream drawn at random among those whose next piece may run: after what is before it in its stream,
// after the events it waits for, and, as the legacy default stream has it, before and after all work of the device's
// blocking streams. So work that lacks an order comes in another one from seed to seed.
#ifndef EMULATOR_STREAM_H
#define EMULATOR_STREAM_H

#include <deque>      // deque
#include <functional> // function
#include <time.h>     // clock_gettime
#include <vector>     // vector

#include "memory.h" // Opening

// Event number n is done when all before its n-th record is.
struct EmuEvent {
    int device;
    bool timing;
    unsigned long long recorded = 0, done = 0;
    double at_ms = 0.0;
};

namespace emu {

struct Work {
    std::function<void()> run;
    unsigned long long number; // in order of the calls
    EmuEvent *event = nullptr; // waits until event->done reaches `version`
    unsigned long long version = 0;
};

} // namespace emu

struct EmuStream {
    int device;
    bool blocking, legacy;
    std::deque<emu::Work> queue;
};

typedef EmuStream *cudaStream_t;
typedef EmuEvent *cudaEvent_t;

namespace emu {

inline thread_local int current_device = 0;
inline std::vector<EmuStream *> streams; // all live ones
inline EmuStream *legacy_streams[MAX_DEVICES];
inline unsigned long long n_works = 0;

inline double now_ms() {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return 1e3 * (double)now.tv_sec + 1e-6 * (double)now.tv_nsec;
}

// The stream meant by a handle: 0 is the current device's legacy default stream.
inline EmuStream *stream_of(cudaStream_t stream) {
    if (stream != nullptr) return stream;
    EmuStream *&legacy = legacy_streams[current_device];
    if (legacy == nullptr) {
        legacy = new EmuStream{current_device, true, true, {}};
        streams.push_back(legacy);
    }
    return legacy;
}

inline bool can_run(const EmuStream *stream) {
    if (stream->queue.empty()) return false;
    const Work &work = stream->queue.front();
    if (work.event != nullptr && work.event->done < work.version) return false;
    if (!stream->blocking) return true;
    for (const EmuStream *other : streams)
        if (other != stream && other->device == stream->device && other->blocking && other->legacy != stream->legacy &&
            !other->queue.empty() && other->queue.front().number < work.number)
            return false;
    return true;
}

// Does one piece of queued work; false if there is none. Leaves the memory open that it has used.
inline bool run_one() {
    std::vector<EmuStream *> candidates;
    bool left = false;
    for (EmuStream *stream : streams) {
        left = left || !stream->queue.empty();
        if (can_run(stream)) candidates.push_back(stream);
    }
    if (candidates.empty()) {
        if (left) die("streams wait for each other for ever");
        return false;
    }
    EmuStream *stream = candidates[chance_below((unsigned)candidates.size())];
    Work work = std::move(stream->queue.front());
    stream->queue.pop_front();
    if (work.run) {
        set_open(1u << stream->device);
        work.run();
    }
    return true;
}

// Works until done() holds.
template <class Done> void run_until(Done done) {
    Opening opening(0); // closes when all is done
    while (!done())
        if (!run_one()) die("waits for work that nobody has queued");
}

inline void drain_stream(EmuStream *stream) {
    run_until([=] { return stream->queue.empty(); });
}

inline void drain_device(int device) {
    for (EmuStream *stream : std::vector<EmuStream *>(streams))
        if (device < 0 || stream->device == device) drain_stream(stream);
}

// Queues work on a stream; the memory of the stream's device is open while it runs. Stand-ins for libraries use it.
inline void enqueue(cudaStream_t stream, std::function<void()> run) {
    std::lock_guard<std::recursive_mutex> guard(lock);
    Work work;
    work.run = std::move(run);
    work.number = n_works++;
    stream_of(stream)->queue.push_back(std::move(work));
}

} // namespace emu

#endif
