// bfloat16 of the emulator: 8 bits of exponent, 8 of mantissa with the hidden one. Rounded to nearest even.
#ifndef EMULATOR_CUDA_BF16_H
#define EMULATOR_CUDA_BF16_H

#include <cuda_runtime.h> // emu_bits

struct __nv_bfloat16_raw {
    unsigned short x;
};

struct alignas(2) __nv_bfloat16 {
    unsigned short bits;
    __nv_bfloat16() = default;
    __nv_bfloat16(float value) {
        uint32_t from = emu_bits<uint32_t>(value);
        bits = (from & 0x7FFFFFFFu) > 0x7F800000u ? (unsigned short)0x7FFF // the device's only NaN
                                                  : (unsigned short)((from + 0x7FFFu + (from >> 16 & 1u)) >> 16);
    }
    __nv_bfloat16(__nv_bfloat16_raw raw) : bits(raw.x) {
    }
    operator float() const {
        return emu_bits<float>((uint32_t)bits << 16);
    }
    operator __nv_bfloat16_raw() const {
        return __nv_bfloat16_raw{bits};
    }
};
typedef __nv_bfloat16 nv_bfloat16;

struct alignas(4) __nv_bfloat162 {
    __nv_bfloat16 x, y;
    __nv_bfloat162() = default;
    __nv_bfloat162(__nv_bfloat16 x_, __nv_bfloat16 y_) : x(x_), y(y_) {
    }
};
typedef __nv_bfloat162 nv_bfloat162;

inline __nv_bfloat16 __float2bfloat16(float value) {
    return __nv_bfloat16(value);
}
inline __nv_bfloat16 __float2bfloat16_rn(float value) {
    return __nv_bfloat16(value);
}
inline float __bfloat162float(__nv_bfloat16 value) {
    return (float)value;
}
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 value) {
    return value.bits;
}
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits) {
    return __nv_bfloat16(__nv_bfloat16_raw{bits});
}
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
    return __nv_bfloat162(__nv_bfloat16(x), __nv_bfloat16(y));
}
inline __nv_bfloat162 __float22bfloat162_rn(float2 value) {
    return __floats2bfloat162_rn(value.x, value.y);
}
inline float2 __bfloat1622float2(__nv_bfloat162 value) {
    return make_float2((float)value.x, (float)value.y);
}
inline __nv_bfloat162 __halves2bfloat162(__nv_bfloat16 x, __nv_bfloat16 y) {
    return __nv_bfloat162(x, y);
}
inline float __low2float(__nv_bfloat162 value) {
    return (float)value.x;
}
inline float __high2float(__nv_bfloat162 value) {
    return (float)value.y;
}

#define EMU_BF16(operation, name)                                                                                      \
    inline __nv_bfloat16 operator operation(__nv_bfloat16 a, __nv_bfloat16 b) {                                        \
        return __nv_bfloat16((float)a operation(float) b);                                                             \
    }                                                                                                                  \
    inline __nv_bfloat16 name(__nv_bfloat16 a, __nv_bfloat16 b) {                                                      \
        return a operation b;                                                                                          \
    }                                                                                                                  \
    inline __nv_bfloat162 name##2(__nv_bfloat162 a, __nv_bfloat162 b) {                                                \
        return __nv_bfloat162(a.x operation b.x, a.y operation b.y);                                                   \
    }
EMU_BF16(+, __hadd)
EMU_BF16(-, __hsub)
EMU_BF16(*, __hmul)
EMU_BF16(/, __hdiv)
#undef EMU_BF16

#endif
