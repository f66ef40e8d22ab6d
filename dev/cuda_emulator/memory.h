// Device memory of the emulated devices. Each device has one reserved range of addresses; the part in use is forbidden
// (PROT_NONE) while host code runs and opened only while the emulator works for that device. Around every piece lie
// guard bytes: poisoned under ASan, else looked at after every kernel. Addresses are never used twice, so that a
// pointer to freed memory stays one.
#ifndef EMULATOR_MEMORY_H
#define EMULATOR_MEMORY_H

#include <map>        // map
#include <mutex>      // recursive_mutex
#include <signal.h>   // sigaction
#include <string.h>   // memset
#include <sys/mman.h> // mmap, mprotect, madvise

#include "fiber.h" // stacks_first

namespace emu {

constexpr int MAX_DEVICES = 8;
constexpr size_t ARENA_BYTES = (size_t)1 << 38, GUARD_BYTES = 256, PAGE_BYTES = 4096;
constexpr unsigned char GUARD_VALUE = 0xA5;

struct Arena {
    char *base = nullptr;
    size_t top = 0;                // bytes handed out so far, freed ones too
    size_t used = 0, limit = 0;    // bytes in live pieces, and how many there may be
    std::map<char *, size_t> live; // start -> bytes
};

// One lock for everything: host threads take turns.
inline std::recursive_mutex lock;
inline Arena arenas[MAX_DEVICES];
inline std::map<char *, size_t> pinned; // host memory that device code may touch: start -> bytes
inline unsigned opened = 0;             // a bit for each device whose memory is open

inline int devices_asked() {
    const char *text = getenv("EMU_DEVICES");
    int n = text != nullptr ? atoi(text) : 1;
    return n < 0 ? 0 : n > MAX_DEVICES ? MAX_DEVICES : n;
}
inline int n_devices = devices_asked();

// The piece that holds address, or the closest one below it.
inline std::map<char *, size_t>::const_iterator piece_below(const std::map<char *, size_t> &pieces,
                                                            const void *address) {
    auto after = pieces.upper_bound((char *)address);
    return after == pieces.begin() ? pieces.end() : std::prev(after);
}

// The device whose range holds address, or -1.
inline int device_of(const void *address) {
    for (int d = 0; d < MAX_DEVICES; d++)
        if (arenas[d].base != nullptr && (const char *)address >= arenas[d].base &&
            (const char *)address < arenas[d].base + ARENA_BYTES)
            return d;
    return -1;
}

inline bool is_pinned(const void *address) {
    auto piece = piece_below(pinned, address);
    return piece != pinned.end() && (const char *)address <= piece->first + piece->second;
}

inline struct sigaction old_segv;

// A forbidden address was touched: says whose fault it is, or leaves it to the handler before.
inline void on_fault(int signal, siginfo_t *info, void *context) {
    char *address = (char *)info->si_addr;
    int device = device_of(address);
    if (device >= 0) {
        auto piece = piece_below(arenas[device].live, address);
        size_t offset = piece != arenas[device].live.end() ? (size_t)(address - piece->first) : 0;
        size_t n_bytes = piece != arenas[device].live.end() ? piece->second : 0;
        if (running_kernel != nullptr)
            die("device code touches memory of device %d at %p, %s", device, (void *)address,
                opened >> device & 1 ? "beyond all that is allocated" : "which is not its own");
        die("host code touches device memory at %p (byte %zu of a piece of %zu): copy it with device_copy",
            (void *)address, offset, n_bytes);
    }
    if (address >= stacks_first && address < stacks_last) die("stack overflow in device code");
    if (!EMU_ASAN && running_kernel != nullptr)
        die("device code touches %p, which is no memory, or its address is no multiple of the access", (void *)address);
    if ((old_segv.sa_flags & SA_SIGINFO) != 0) {
        old_segv.sa_sigaction(signal, info, context);
    } else {
        sigaction(SIGSEGV, &old_segv, nullptr); // the fault comes again
    }
}

// Handlers run on their own stack: the fault may be that a stack is full.
inline void install_handler() {
    static bool installed;
    static thread_local bool has_stack;
    if (!has_stack) {
        has_stack = true;
        stack_t stack = {};
        if (sigaltstack(nullptr, &stack) == 0 && (stack.ss_flags & SS_DISABLE) != 0) {
            static thread_local char memory[64 << 10];
            stack.ss_sp = memory, stack.ss_size = sizeof memory, stack.ss_flags = 0;
            sigaltstack(&stack, nullptr);
        }
    }
    if (installed) return;
    installed = true;
    struct sigaction action = {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    sigaction(SIGSEGV, &action, &old_segv);
}

inline void protect(unsigned devices, int protection) {
    for (int d = 0; d < n_devices; d++)
        if (devices >> d & 1 && arenas[d].top > 0)
            if (mprotect(arenas[d].base, (arenas[d].top + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES, protection))
                die("mprotect of device memory failed");
}

// Opens the memory of these devices and closes that of the others.
inline void set_open(unsigned devices) {
    if (devices == opened) return;
    install_handler();
    protect(devices & ~opened, PROT_READ | PROT_WRITE);
    protect(opened & ~devices, PROT_NONE);
    opened = devices;
}

// While one of these lives, the memory of the given devices is open too.
struct Opening {
    unsigned before = opened;
    explicit Opening(unsigned devices) {
        set_open(before | devices);
    }
    ~Opening() {
        set_open(before);
    }
    Opening(const Opening &) = delete;
};
constexpr unsigned ALL_DEVICES = (1u << MAX_DEVICES) - 1;

inline size_t round_up(size_t n, size_t to) {
    return (n + to - 1) / to * to;
}

// Memory full of 0xFF, NaN as floats; NULL if the device is full.
inline void *arena_alloc(int device, size_t n_bytes) {
    Arena *arena = &arenas[device];
    if (arena->base == nullptr) {
        void *base = mmap(nullptr, ARENA_BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (base == MAP_FAILED) die("no addresses for device memory");
        const char *text = getenv("EMU_MEMORY_MB");
        arena->base = (char *)base;
        madvise(base, ARENA_BYTES, MADV_HUGEPAGE); // opening and closing goes by page; no matter if refused
        arena->limit = (text != nullptr ? strtoull(text, nullptr, 0) : 16384) << 20;
    }
    if (n_bytes > arena->limit - arena->used) return nullptr;
    size_t start = round_up(arena->top, GUARD_BYTES) + GUARD_BYTES, end = start + round_up(n_bytes, GUARD_BYTES);
    if (end + GUARD_BYTES > ARENA_BYTES) die("all addresses of device memory are used up");
    arena->top = end + GUARD_BYTES;
    Opening opening(1u << device);
    protect(1u << device, PROT_READ | PROT_WRITE); // the new part too, if it was open before
    char *piece = arena->base + start;
    memset(piece - GUARD_BYTES, GUARD_VALUE, GUARD_BYTES);
    memset(piece, 0xFF, n_bytes);
    memset(piece + n_bytes, GUARD_VALUE, end + GUARD_BYTES - start - n_bytes);
#if EMU_ASAN
    ASAN_POISON_MEMORY_REGION(piece - GUARD_BYTES, GUARD_BYTES);
    ASAN_POISON_MEMORY_REGION(piece + n_bytes, end + GUARD_BYTES - start - n_bytes);
#endif
    arena->live[piece] = n_bytes;
    arena->used += n_bytes;
    return piece;
}

// 0, or -1 if pointer is not the start of a live piece.
inline int arena_free(void *pointer) {
    int device = device_of(pointer);
    if (device < 0) return -1;
    Arena *arena = &arenas[device];
    auto piece = arena->live.find((char *)pointer);
    if (piece == arena->live.end()) return -1;
    char *first = (char *)round_up((size_t)pointer, PAGE_BYTES);
    char *last = (char *)(((size_t)pointer + piece->second) / PAGE_BYTES * PAGE_BYTES);
    if (last > first) madvise(first, (size_t)(last - first), MADV_DONTNEED);
#if EMU_ASAN
    ASAN_POISON_MEMORY_REGION(pointer, piece->second);
#endif
    arena->used -= piece->second;
    arena->live.erase(piece);
    return 0;
}

inline bool is_filled(const char *from, size_t n_bytes) {
    for (size_t i = 0; i < n_bytes; i++)
        if ((unsigned char)from[i] != GUARD_VALUE) return false;
    return true;
}

// Looks at all guards; ASan has looked at each access already.
inline void check_guards(int device, const char *kernel) {
#if EMU_ASAN
    (void)device, (void)kernel;
#else
    for (const auto &[start, n_bytes] : arenas[device].live) {
        size_t tail = round_up(n_bytes, GUARD_BYTES) + GUARD_BYTES - n_bytes;
        if (!is_filled(start - GUARD_BYTES, GUARD_BYTES) || !is_filled(start + n_bytes, tail))
            die("%s wrote outside device memory: the guard of the piece of %zu bytes at %p is damaged", kernel, n_bytes,
                (void *)start);
    }
#endif
}

} // namespace emu

#endif
