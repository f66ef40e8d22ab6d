// What the emulator's stand-ins for libraries share: is memory the device's, is its device current, and work for a
// stream.
#ifndef EMULATOR_LIBRARY_H
#define EMULATOR_LIBRARY_H

#include <cuda_runtime.h> // cudaStream_t, emu::arenas, emu::enqueue

namespace emu {

// Do n_bytes from pointer on lie in one live piece of a device's memory?
inline bool is_device(const void *pointer, size_t n_bytes) {
    std::lock_guard<std::recursive_mutex> guard(lock);
    int device = device_of(pointer);
    if (device < 0) return false;
    auto piece = piece_below(arenas[device].live, pointer);
    return piece != arenas[device].live.end() && (const char *)pointer + n_bytes <= piece->first + piece->second;
}

// A handle serves the device that was current when it was made, which must be current whenever it is used or destroyed.
inline void check_current(int device, const char *call) {
    if (device != current_device)
        die("%s: the handle is of device %d, but device %d is current", call, device, current_device);
}

} // namespace emu

#endif
