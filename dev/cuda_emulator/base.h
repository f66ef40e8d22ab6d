// The emulator's ground: fatal messages, seeded chance, and what is running now. See cuda_runtime.h for what it is.
#ifndef EMULATOR_BASE_H
#define EMULATOR_BASE_H

#include <stdarg.h> // va_list
#include <stdint.h> // fixed-width integers
#include <stdio.h>  // vfprintf
#include <stdlib.h> // abort, getenv

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#define EMU_ASAN 1
#else
#define EMU_ASAN 0
#endif

// The scheduler's inner functions are not looked at by the sanitizers: they would cost more than the tests.
#define EMU_UNCHECKED __attribute__((no_sanitize("address", "undefined")))

struct uint3 {
    unsigned x, y, z;
};

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {
    }
};

// What device code sees. Set at each switch of threads; there is one running thread at a time.
inline uint3 threadIdx, blockIdx;
inline dim3 blockDim, gridDim;
static constexpr int warpSize = 32;

namespace emu {

inline const char *running_kernel = nullptr; // its name while a kernel runs

inline uint64_t first_seed() {
    const char *text = getenv("EMU_SEED");
    return text != nullptr ? strtoull(text, nullptr, 0) : 1;
}

inline uint64_t chance_state = first_seed() * 0x9E3779B97F4A7C15ull;

// splitmix64
EMU_UNCHECKED inline uint64_t chance() {
    uint64_t z = chance_state += 0x9E3779B97F4A7C15ull;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ z >> 27) * 0x94D049BB133111EBull;
    return z ^ z >> 31;
}

// Uniform enough in [0, n), 1 <= n < 2^32.
EMU_UNCHECKED inline uint32_t chance_below(uint32_t n) {
    return (uint32_t)((chance() >> 32) * n >> 32);
}

// One line on stderr, then abort: a fault of the program under test.
[[noreturn]] __attribute__((format(printf, 1, 2))) inline void die(const char *format, ...) {
    va_list args;
    fflush(stdout);
    fprintf(stderr, "emulator: ");
    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
    if (running_kernel != nullptr)
        fprintf(stderr, " [kernel %s, block (%u,%u,%u), thread (%u,%u,%u)]", running_kernel, blockIdx.x, blockIdx.y,
                blockIdx.z, threadIdx.x, threadIdx.y, threadIdx.z);
    fprintf(stderr, " [EMU_SEED=%llu]\n", (unsigned long long)first_seed());
    abort();
}

} // namespace emu

#endif
