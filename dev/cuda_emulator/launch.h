// Kernel launches: what CUDA refuses is refused, the arguments are looked at, the rest is queued.
#ifndef EMULATOR_LAUNCH_H
#define EMULATOR_LAUNCH_H

#include <set>     // set
#include <string>  // string
#include <tuple>   // tuple, apply
#include <utility> // forward

#include "block.h"   // block_run
#include "errors.h"  // cudaError_t
#include "stream.h"  // enqueue
#include "symbols.h" // KernelInfo

namespace emu {

constexpr size_t SHARED_BYTES = 48 << 10, SHARED_OPTIN_BYTES = 227 << 10; // per block: as it is, and on request

inline std::set<std::string> launched_names;

// "(f<64, 1>)" -> "f"
inline std::string base_name(const char *text) {
    while (*text == '(' || *text == ' ') text++;
    size_t n = 0;
    while (isalnum((unsigned char)text[n]) || text[n] == '_') n++;
    return std::string(text, n);
}

// Dynamic shared memory: 16 bytes aligned and no more, guarded on both sides.
struct DynamicShared {
    alignas(128) char bytes[GUARD_BYTES + 16 + SHARED_OPTIN_BYTES + GUARD_BYTES];
};
inline DynamicShared dynamic_shared;

inline char *dynamic_shared_start() {
    return dynamic_shared.bytes + GUARD_BYTES + 16;
}

// Before a block: all shared memory is NaN, whatever the block before it left there.
inline void shared_prepare(const KernelInfo *info, size_t dynamic_bytes) {
    for (const SharedVariable &variable : info->shared) memset(variable.start, 0xFF, variable.n_bytes);
    memset(dynamic_shared_start(), 0xFF, dynamic_bytes);
}

inline void shared_guard(size_t dynamic_bytes) {
    char *first = dynamic_shared.bytes, *start = dynamic_shared_start(), *end = start + dynamic_bytes;
#if EMU_ASAN
    ASAN_UNPOISON_MEMORY_REGION(&dynamic_shared, sizeof dynamic_shared);
    ASAN_POISON_MEMORY_REGION(first, (size_t)(start - first));
    ASAN_POISON_MEMORY_REGION(end, (size_t)(first + sizeof dynamic_shared - end));
#else
    memset(first, GUARD_VALUE, (size_t)(start - first));
    memset(end, GUARD_VALUE, GUARD_BYTES);
#endif
}

inline void shared_check(size_t dynamic_bytes) {
#if EMU_ASAN
    (void)dynamic_bytes;
#else
    const char *start = dynamic_shared_start();
    if (!is_filled(dynamic_shared.bytes, GUARD_BYTES + 16) || !is_filled(start + dynamic_bytes, GUARD_BYTES))
        die("%s wrote outside its %zu bytes of dynamic shared memory", running_kernel, dynamic_bytes);
#endif
}

inline void run_grid(const char *name, const KernelInfo *info, dim3 grid, dim3 shape, size_t dynamic_bytes, int device,
                     void (*body)(const void *), const void *arguments) {
    install_handler();
    running_kernel = name;
    gridDim = grid, blockDim = shape;
    block_shape(shape);
    shared_guard(dynamic_bytes);
    // All blocks in a random order: from a random one on, by steps that have no divisor in common with their number.
    uint64_t n = (uint64_t)grid.x * grid.y * grid.z, at = chance() % n, step = chance() % n, a, b;
    do {
        step = step % n + 1;
        for (a = step, b = n; b != 0;) a = a % b, std::swap(a, b);
    } while (a != 1);
    for (uint64_t i = 0; i < n; i++, at = (at + step) % n) {
        blockIdx = uint3{(unsigned)(at % grid.x), (unsigned)(at / grid.x % grid.y), (unsigned)(at / grid.x / grid.y)};
        shared_prepare(info, dynamic_bytes);
        block_run(body, arguments);
        shared_check(dynamic_bytes);
    }
    running_kernel = nullptr;
    check_guards(device, name);
}

// What CUDA would say to this launch.
inline cudaError_t launch_check(const KernelInfo *info, dim3 grid, dim3 shape, size_t dynamic_bytes,
                                const EmuStream *stream) {
    if (stream->device != current_device) return cudaErrorInvalidResourceHandle;
    uint64_t threads = (uint64_t)shape.x * shape.y * shape.z;
    if (threads == 0 || threads > MAX_THREADS || shape.z > 64) return cudaErrorInvalidConfiguration;
    if (grid.x == 0 || grid.y == 0 || grid.z == 0) return cudaErrorInvalidConfiguration;
    if (grid.x > 0x7FFFFFFFu || grid.y > 65535 || grid.z > 65535) return cudaErrorInvalidConfiguration;
    size_t total = dynamic_bytes + info->shared_bytes;
    if (info->shared_bytes > SHARED_BYTES || total > SHARED_OPTIN_BYTES) return cudaErrorInvalidValue;
    if (total > SHARED_BYTES && dynamic_bytes > info->dynamic_limit) return cudaErrorInvalidValue;
    return cudaSuccess;
}

// A kernel's pointer must lead to the device's memory; one into the host's would fault on a GPU.
inline void check_pointer(const char *name, const void *pointer) {
    if (pointer == nullptr || device_of(pointer) >= 0 || is_pinned(pointer)) return;
    die("kernel %s is given %p, which is host memory or nothing", name, pointer);
}

// Words of a struct that look like pointers to the host's memory are taken for such. Programs, heaps (ASan's too) and
// stacks lie above 2^46; below, two small ints side by side meet ASan's shadow.
inline void check_words(const char *name, const void *value, size_t n_bytes) {
    for (size_t i = 0; i + 8 <= n_bytes; i += 8) {
        uint64_t word;
        memcpy(&word, (const char *)value + i, 8);
        if (word < (uint64_t)1 << 46 || word >= (uint64_t)1 << 47) continue;
        char *page = (char *)(word / PAGE_BYTES * PAGE_BYTES);
        if (device_of((void *)word) < 0 && !is_pinned((void *)word) && msync(page, PAGE_BYTES, MS_ASYNC) == 0)
            die("kernel %s is given a struct with %p at byte %zu, which is host memory", name, (void *)word, i);
    }
}

template <class T> void check_argument(const char *name, const T &value) {
    static_assert(std::is_trivially_copyable<T>::value, "kernel arguments are copied as bytes");
    if constexpr (std::is_pointer<T>::value) {
        check_pointer(name, (const void *)value);
    } else if constexpr (std::is_class<T>::value) {
        T copy = value;
        __builtin_clear_padding(&copy); // what lies there may be part of an old pointer
        check_words(name, &copy, sizeof copy);
    }
}

// Kernel<<<grid, shape, dynamic_bytes, stream>>>(values...)
template <class... P, class... A>
cudaError_t launch(const char *text, void (*kernel)(P...), dim3 grid, dim3 shape, size_t dynamic_bytes,
                   cudaStream_t stream, A &&...values) {
    static_assert(sizeof...(P) == sizeof...(A), "a kernel takes all its arguments");
    static_assert((std::is_same<P, std::decay_t<P>>::value && ...), "kernel arguments are passed by value");
    std::lock_guard<std::recursive_mutex> guard(lock);
    EmuStream *queue = stream_of(stream);
    KernelInfo *info = kernel_info((void *)kernel);
    cudaError_t error = launch_check(info, grid, shape, dynamic_bytes, queue);
    if (error != cudaSuccess) return set_error(error);
    const char *name = launched_names.insert(base_name(text)).first->c_str();
    struct Call {
        void (*kernel)(P...);
        std::tuple<P...> arguments;
    } call = {kernel, std::tuple<P...>(std::forward<A>(values)...)};
    std::apply([=](const P &...values_) { (check_argument(name, values_), ...); }, call.arguments);
    int device = queue->device;
    enqueue(stream, [=] {
        run_grid(
            name, info, grid, shape, dynamic_bytes, device,
            [](const void *arguments) {
                const Call *to_do = (const Call *)arguments;
                std::apply(to_do->kernel, to_do->arguments);
            },
            &call);
    });
    return cudaSuccess;
}

} // namespace emu

// 1 if a kernel of this name has been launched in this process.
inline int emu_launched(const char *name) {
    return emu::launched_names.count(name) != 0;
}

#endif
