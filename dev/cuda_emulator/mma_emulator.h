// llmc/mma.cuh for the emulator: warp collectives with PTX's fragment layouts, and cp.async that is late.
#ifndef EMULATOR_MMA_H
#define EMULATOR_MMA_H

#include <cuda_bf16.h> // __nv_bfloat16

namespace emu {

struct Mma {
    float *d;
    const uint32_t *a, *b;
    const float *c;
};

typedef float Row __attribute__((vector_size(32)));

// A bf16 is the upper half of a float. No checker looks into this one: it is the inner loop of the tests.
__attribute__((no_sanitize("address", "undefined"))) inline void combine_mma(void *const *operands, unsigned lanes) {
    uint32_t A[16][16], B[16][8]; // bits of floats
    float a[16][16], C[16][8];
    Row b[16], c[16];
    if (lanes != 0xFFFFFFFFu) die("mma with lanes %08x: all 32 are needed", lanes);
    for (int lane = 0; lane < 32; lane++) {
        const Mma *from = (const Mma *)operands[lane];
        int g = lane / 4, t = lane % 4;
        for (int i = 0; i < 4; i++) {
            uint32_t *to = &A[g + 8 * (i & 1)][2 * t + 8 * (i >> 1)];
            to[0] = from->a[i] << 16, to[1] = from->a[i] & 0xFFFF0000u;
            C[g + 8 * (i >> 1)][2 * t + (i & 1)] = from->c[i];
        }
        for (int i = 0; i < 2; i++)
            B[2 * t + 8 * i][g] = from->b[i] << 16, B[2 * t + 8 * i + 1][g] = from->b[i] & 0xFFFF0000u;
    }
    __builtin_memcpy(a, A, sizeof a);
    __builtin_memcpy(b, B, sizeof b);
    __builtin_memcpy(c, C, sizeof c);
    for (int k = 0; k < 16; k++)
        for (int row = 0; row < 16; row++) c[row] += a[row][k] * b[k];
    __builtin_memcpy(C, c, sizeof c);
    for (int lane = 0; lane < 32; lane++) {
        Mma *to = (Mma *)operands[lane];
        for (int i = 0; i < 4; i++) to->d[i] = C[lane / 4 + 8 * (i >> 1)][2 * (lane % 4) + (i & 1)];
    }
}

struct MatrixLoad {
    uint32_t r[4];
    const unsigned char *row;
};

template <int COUNT, bool TRANSPOSED> void combine_ldmatrix(void *const *operands, unsigned lanes) {
    if (lanes != 0xFFFFFFFFu) die("ldmatrix with lanes %08x: all 32 are needed", lanes);
    for (int i = 0; i < COUNT; i++) {
        uint16_t matrix[8][8];
        for (int row = 0; row < 8; row++) memcpy(matrix[row], ((MatrixLoad *)operands[8 * i + row])->row, 16);
        for (int lane = 0; lane < 32; lane++) {
            int along = lane / 4, pair = lane % 4 * 2;
            uint16_t low = TRANSPOSED ? matrix[pair][along] : matrix[along][pair];
            uint16_t high = TRANSPOSED ? matrix[pair + 1][along] : matrix[along][pair + 1];
            ((MatrixLoad *)operands[lane])->r[i] = low | (uint32_t)high << 16;
        }
    }
}

// Shared memory at a multiple of 16: nothing else may be named as such.
inline void check_shared_16(const void *shared, const char *what) {
    if ((uintptr_t)shared % 16 != 0) die("%s: the shared address %p is no multiple of 16", what, shared);
    bool on_a_stack = (const char *)shared >= stacks_first && (const char *)shared < stacks_last;
    if (device_of(shared) >= 0 || on_a_stack) die("%s: %p is not shared memory", what, shared);
}

template <int COUNT, bool TRANSPOSED> void ldmatrix(uint32_t *r, const void *shared_row) {
    MatrixLoad operand = {{0, 0, 0, 0}, (const unsigned char *)shared_row};
    if (current->lane < 8 * COUNT) check_shared_16(shared_row, "ldmatrix");
    collective(0xFFFFFFFFu, combine_ldmatrix<COUNT, TRANSPOSED>, &operand, "ldmatrix");
    memcpy(r, operand.r, COUNT * sizeof *r);
}

} // namespace emu

inline void mma_bf16_16816(float d[4], const uint32_t a[4], const uint32_t b[2], const float c[4]) {
    emu::Mma operand = {d, a, b, c};
    emu::collective(0xFFFFFFFFu, emu::combine_mma, &operand, "mma");
}

inline void ldmatrix_x4(uint32_t r[4], const void *shared_row) {
    emu::ldmatrix<4, false>(r, shared_row);
}
inline void ldmatrix_x4_trans(uint32_t r[4], const void *shared_row) {
    emu::ldmatrix<4, true>(r, shared_row);
}
inline void ldmatrix_x2(uint32_t r[2], const void *shared_row) {
    emu::ldmatrix<2, false>(r, shared_row);
}
inline void ldmatrix_x2_trans(uint32_t r[2], const void *shared_row) {
    emu::ldmatrix<2, true>(r, shared_row);
}

// The target is garbage until the wait that covers the copy.
inline void cp_async_16(void *shared, const void *global) {
    emu::Thread *thread = emu::current;
    emu::check_shared_16(shared, "cp_async_16");
    if ((uintptr_t)global % 16 != 0) emu::die("cp_async_16: the global address %p is no multiple of 16", global);
    if (emu::device_of(global) < 0) emu::die("cp_async_16: %p is not global memory", global);
    emu::AsyncCopy copy = {shared, {0}, thread->copy_group};
    memcpy(copy.bytes, global, 16);
    memset(shared, 0xFF, 16);
    thread->copies.push_back(copy);
}

inline void cp_async_commit(void) {
    emu::current->copy_group++;
}

template <int N> void cp_async_wait(void) {
    emu::Thread *thread = emu::current;
    size_t n_done = 0;
    while (n_done < thread->copies.size() && thread->copies[n_done].group + N < thread->copy_group) {
        memcpy(thread->copies[n_done].to, thread->copies[n_done].bytes, 16);
        n_done++;
    }
    thread->copies.erase(thread->copies.begin(), thread->copies.begin() + (long)n_done);
}

#endif
