// What device code calls: vector types, barriers, warp collectives, atomics, arithmetic.
#ifndef EMULATOR_DEVICE_FUNCTIONS_H
#define EMULATOR_DEVICE_FUNCTIONS_H

#include <algorithm> // min, max
#include <math.h>    // expf
#include <stdint.h>  // fixed-width integers
#include <string.h>  // memcpy

#include "block.h" // collective, barrier

// ---------------------------------------------------------------------------------------------------------------------
// Vector types, aligned as on the device; device code reads any type through them

#define EMU_VECTORS(type, name)                                                                                        \
    struct alignas(2 * sizeof(type)) [[gnu::may_alias]] name##2 {                                                      \
        type x, y;                                                                                                     \
    };                                                                                                                 \
    struct [[gnu::may_alias]] name##3 {                                                                                \
        type x, y, z;                                                                                                  \
    };                                                                                                                 \
    struct alignas(4 * sizeof(type) < 16 ? 4 * sizeof(type) : 16) [[gnu::may_alias]] name##4 {                         \
        type x, y, z, w;                                                                                               \
    };                                                                                                                 \
    inline name##2 make_##name##2(type x, type y) {                                                                    \
        return name##2 {x, y};                                                                                         \
    }                                                                                                                  \
    inline name##3 make_##name##3(type x, type y, type z) {                                                            \
        return name##3 {x, y, z};                                                                                      \
    }                                                                                                                  \
    inline name##4 make_##name##4(type x, type y, type z, type w) {                                                    \
        return name##4 {x, y, z, w};                                                                                   \
    }

EMU_VECTORS(float, float)
EMU_VECTORS(int, int)
#undef EMU_VECTORS

struct alignas(8) [[gnu::may_alias]] uint2 {
    unsigned x, y;
};
struct alignas(16) [[gnu::may_alias]] uint4 {
    unsigned x, y, z, w;
};
struct alignas(16) [[gnu::may_alias]] double2 {
    double x, y;
};
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) {
    return uint4{x, y, z, w};
}

// ---------------------------------------------------------------------------------------------------------------------
// Barriers. The default arguments are the caller's place.

inline void __syncthreads(const char *file = __builtin_FILE(), int line = __builtin_LINE()) {
    emu::barrier(0, emu::Site{file, line});
}

inline int __syncthreads_count(int predicate, const char *file = __builtin_FILE(), int line = __builtin_LINE()) {
    emu::barrier(predicate, emu::Site{file, line});
    return emu::block.last_count;
}

inline int __syncthreads_and(int predicate, const char *file = __builtin_FILE(), int line = __builtin_LINE()) {
    emu::barrier(predicate, emu::Site{file, line});
    return emu::block.last_all;
}

inline int __syncthreads_or(int predicate, const char *file = __builtin_FILE(), int line = __builtin_LINE()) {
    emu::barrier(predicate, emu::Site{file, line});
    return emu::block.last_any;
}

inline void __threadfence() {
}
inline void __threadfence_block() {
}
inline void __threadfence_system() {
}

// ---------------------------------------------------------------------------------------------------------------------
// Warp collectives

namespace emu {

inline void combine_nothing(void *const *, unsigned) {
}

struct Vote {
    unsigned value, result, lanes;
};

inline void combine_ballot(void *const *operands, unsigned lanes) {
    unsigned ballot = 0;
    for (unsigned lane = 0; lane < 32; lane++)
        if (lanes >> lane & 1) ballot |= (((Vote *)operands[lane])->value != 0 ? 1u : 0u) << lane;
    for (unsigned lane = 0; lane < 32; lane++)
        if (lanes >> lane & 1) ((Vote *)operands[lane])->result = ballot, ((Vote *)operands[lane])->lanes = lanes;
}

inline Vote vote(unsigned mask, unsigned value, const char *what) {
    Vote operand = {value, 0, 0};
    collective(mask, combine_ballot, &operand, what);
    return operand;
}

template <class T> struct Shuffle {
    T value, result;
    unsigned source;
};

template <class T> void combine_shuffle(void *const *operands, unsigned lanes) {
    for (unsigned rest = lanes; rest != 0; rest &= rest - 1) {
        unsigned lane = (unsigned)__builtin_ctz(rest);
        Shuffle<T> *to = (Shuffle<T> *)operands[lane];
        if ((lanes >> to->source & 1) == 0)
            die("shuffle: lane %u reads lane %u, which takes no part (lanes %08x do)", lane, to->source, lanes);
        to->result = ((const Shuffle<T> *)operands[to->source])->value;
    }
}

template <class T> T shuffle(unsigned mask, T value, unsigned source, const char *what) {
    Shuffle<T> operand = {value, value, source};
    collective(mask, combine_shuffle<T>, &operand, what);
    return operand.result;
}

template <class T> struct Reduce { T value, result; };

template <class T, T (*operation)(T, T)> void combine_reduce(void *const *operands, unsigned lanes) {
    T total = ((Reduce<T> *)operands[__builtin_ctz(lanes)])->value;
    for (unsigned rest = lanes & (lanes - 1); rest != 0; rest &= rest - 1)
        total = operation(total, ((Reduce<T> *)operands[__builtin_ctz(rest)])->value);
    for (unsigned rest = lanes; rest != 0; rest &= rest - 1)
        ((Reduce<T> *)operands[__builtin_ctz(rest)])->result = total;
}

template <class T, T (*operation)(T, T)> T reduce(unsigned mask, T value, const char *what) {
    Reduce<T> operand = {value, value};
    collective(mask, combine_reduce<T, operation>, &operand, what);
    return operand.result;
}

} // namespace emu

inline void __syncwarp(unsigned mask = 0xFFFFFFFFu) {
    emu::collective(mask, emu::combine_nothing, nullptr, "__syncwarp");
}

inline unsigned __ballot_sync(unsigned mask, int predicate) {
    return emu::vote(mask, predicate != 0, "__ballot_sync").result;
}

inline int __any_sync(unsigned mask, int predicate) {
    return emu::vote(mask, predicate != 0, "__any_sync").result != 0;
}

inline int __all_sync(unsigned mask, int predicate) {
    emu::Vote vote = emu::vote(mask, predicate != 0, "__all_sync");
    return vote.result == vote.lanes;
}

template <class T> T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
    unsigned lane = emu::current->lane, first = lane & ~(unsigned)(width - 1);
    return emu::shuffle(mask, value, first | ((unsigned)source & (unsigned)(width - 1)), "__shfl_sync");
}

template <class T> T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32) {
    unsigned lane = emu::current->lane, source = lane ^ (unsigned)bits, last = lane | (unsigned)(width - 1);
    return emu::shuffle(mask, value, source <= last ? source : lane, "__shfl_xor_sync");
}

template <class T> T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
    unsigned lane = emu::current->lane, inside = lane & (unsigned)(width - 1);
    return emu::shuffle(mask, value, inside >= delta ? lane - delta : lane, "__shfl_up_sync");
}

template <class T> T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
    unsigned lane = emu::current->lane, inside = lane & (unsigned)(width - 1);
    return emu::shuffle(mask, value, inside + delta < (unsigned)width ? lane + delta : lane, "__shfl_down_sync");
}

namespace emu {
template <class T> T add(T a, T b) {
    return (T)(a + b);
}
template <class T> T least(T a, T b) {
    return a < b ? a : b;
}
template <class T> T greatest(T a, T b) {
    return a > b ? a : b;
}
template <class T> T bit_or(T a, T b) {
    return a | b;
}
template <class T> T bit_and(T a, T b) {
    return a & b;
}
template <class T> T bit_xor(T a, T b) {
    return a ^ b;
}
} // namespace emu

#define EMU_REDUCE(name, type, operation)                                                                              \
    inline type name(unsigned mask, type value) {                                                                      \
        return emu::reduce<type, emu::operation<type>>(mask, value, #name);                                            \
    }
EMU_REDUCE(__reduce_add_sync, unsigned, add)
EMU_REDUCE(__reduce_min_sync, unsigned, least)
EMU_REDUCE(__reduce_max_sync, unsigned, greatest)
EMU_REDUCE(__reduce_or_sync, unsigned, bit_or)
EMU_REDUCE(__reduce_and_sync, unsigned, bit_and)
EMU_REDUCE(__reduce_xor_sync, unsigned, bit_xor)
EMU_REDUCE(__reduce_add_sync, int, add)
EMU_REDUCE(__reduce_min_sync, int, least)
EMU_REDUCE(__reduce_max_sync, int, greatest)
#undef EMU_REDUCE

// ---------------------------------------------------------------------------------------------------------------------
// Atomics: one thread runs at a time, so plain code will do

template <class T> T emu_exchange(T *address, T value) {
    T old = *address;
    *address = value;
    return old;
}

#define EMU_ATOMICS(type)                                                                                              \
    inline type atomicAdd(type *address, type value) {                                                                 \
        return emu_exchange(address, (type)(*address + value));                                                        \
    }                                                                                                                  \
    inline type atomicExch(type *address, type value) {                                                                \
        return emu_exchange(address, value);                                                                           \
    }
#define EMU_INTEGER_ATOMICS(type)                                                                                      \
    EMU_ATOMICS(type)                                                                                                  \
    inline type atomicMax(type *address, type value) {                                                                 \
        return emu_exchange(address, *address > value ? *address : value);                                             \
    }                                                                                                                  \
    inline type atomicMin(type *address, type value) {                                                                 \
        return emu_exchange(address, *address < value ? *address : value);                                             \
    }                                                                                                                  \
    inline type atomicCAS(type *address, type expected, type value) {                                                  \
        return emu_exchange(address, *address == expected ? value : *address);                                         \
    }

EMU_ATOMICS(float)
EMU_ATOMICS(double)
EMU_INTEGER_ATOMICS(int)
EMU_INTEGER_ATOMICS(unsigned)
EMU_INTEGER_ATOMICS(unsigned long long)
#undef EMU_ATOMICS
#undef EMU_INTEGER_ATOMICS

// ---------------------------------------------------------------------------------------------------------------------
// Loads and stores with a cache hint

template <class T> T __ldg(const T *address) {
    return *address;
}
template <class T> T __ldcs(const T *address) {
    return *address;
}
template <class T> T __ldcg(const T *address) {
    return *address;
}
template <class T> void __stcs(T *address, T value) {
    *address = value;
}
template <class T> void __stcg(T *address, T value) {
    *address = value;
}

// ---------------------------------------------------------------------------------------------------------------------
// Arithmetic. The fast forms are computed exactly; tests allow for the device's few more ulp.

inline float __expf(float x) {
    return expf(x);
}
inline float __logf(float x) {
    return logf(x);
}
inline float __log2f(float x) {
    return log2f(x);
}
inline float __sinf(float x) {
    return sinf(x);
}
inline float __cosf(float x) {
    return cosf(x);
}
inline float __fdividef(float a, float b) {
    return a / b;
}
inline float rsqrtf(float x) {
    return 1.0f / sqrtf(x);
}
inline double rsqrt(double x) {
    return 1.0 / sqrt(x);
}
inline float __saturatef(float x) {
    return x > 0.0f ? x < 1.0f ? x : 1.0f : 0.0f; // NaN gives 0, as on the device
}

// Named roundings are never fused with a neighbour: g++ must not see through them.
#define EMU_ROUNDED(name, type, expression)                                                                            \
    inline type name(type a, type b) {                                                                                 \
        type result = expression;                                                                                      \
        asm volatile("" : "+m"(result));                                                                               \
        return result;                                                                                                 \
    }
EMU_ROUNDED(__fadd_rn, float, a + b)
EMU_ROUNDED(__fsub_rn, float, a - b)
EMU_ROUNDED(__fmul_rn, float, a *b)
EMU_ROUNDED(__fdiv_rn, float, a / b)
EMU_ROUNDED(__dadd_rn, double, a + b)
EMU_ROUNDED(__dsub_rn, double, a - b)
EMU_ROUNDED(__dmul_rn, double, a *b)
EMU_ROUNDED(__ddiv_rn, double, a / b)
#undef EMU_ROUNDED

inline float __fmaf_rn(float a, float b, float c) {
    return fmaf(a, b, c);
}
inline float __fsqrt_rn(float x) {
    return sqrtf(x);
}
inline float __frcp_rn(float x) {
    return 1.0f / x;
}

template <class To, class From> To emu_bits(From from) {
    static_assert(sizeof(To) == sizeof(From), "same bits, another type");
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}

inline int __float_as_int(float x) {
    return emu_bits<int>(x);
}
inline unsigned __float_as_uint(float x) {
    return emu_bits<unsigned>(x);
}
inline float __int_as_float(int x) {
    return emu_bits<float>(x);
}
inline float __uint_as_float(unsigned x) {
    return emu_bits<float>(x);
}

inline int __popc(unsigned x) {
    return __builtin_popcount(x);
}
inline int __clz(int x) {
    return x != 0 ? __builtin_clz((unsigned)x) : 32;
}
inline int __ffs(int x) {
    return __builtin_ffs(x);
}
inline unsigned __brev(unsigned x) {
    unsigned result = 0;
    for (int bit = 0; bit < 32; bit++) result = result << 1 | (x >> bit & 1);
    return result;
}
inline unsigned __umulhi(unsigned a, unsigned b) {
    return (unsigned)((uint64_t)a * b >> 32);
}
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
    uint64_t bytes = (uint64_t)high << 32 | low;
    unsigned result = 0;
    for (int i = 0; i < 4; i++) {
        unsigned byte = (unsigned)(bytes >> (selector >> (4 * i) & 7) * 8) & 0xFF;
        if (selector >> (4 * i) & 8) byte = byte & 0x80 ? 0xFF : 0;
        result |= byte << (8 * i);
    }
    return result;
}

// CUDA has these in the global namespace.
using std::max;
using std::min;
inline float max(float a, float b) {
    return fmaxf(a, b);
}
inline float min(float a, float b) {
    return fminf(a, b);
}

inline double max(double a, double b) {
    return fmax(a, b);
}
inline double min(double a, double b) {
    return fmin(a, b);
}

#endif
