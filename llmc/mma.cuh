// Tensor-core products of a warp, the loads that feed them, and copies past the registers, sm_80 and later: PTX for
// nvcc, the same layouts in C++ for the emulator. All 32 lanes call each of the first two groups together.
//
// mma_bf16_16816: d (16,8) = a (16,16) b (16,8) + c (16,8), bf16 in, fp32 sums. Lane l has group g = l/4, t = l%4:
//   a[0] = A[g][2t,2t+1]    a[1] = A[g+8][2t,2t+1]    a[2] = A[g][2t+8,2t+9]    a[3] = A[g+8][2t+8,2t+9]
//   b[0] = B[2t,2t+1][g]    b[1] = B[2t+8,2t+9][g]    the lower index in the lower half of the word
//   c[0] = C[g][2t]         c[1] = C[g][2t+1]         c[2] = C[g+8][2t]         c[3] = C[g+8][2t+1]        d as c
//
// ldmatrix: 8x8 matrices of 16-bit values out of shared memory. Lane 8i+r names row r of matrix i, 16 bytes at a
// multiple of 16; r[i] of lane l = M_i[l/4][2(l%4), +1], transposed: M_i[2(l%4), +1][l/4].
#ifndef LLMC_MMA_CUH
#define LLMC_MMA_CUH

#include <cuda_bf16.h>    // __nv_bfloat16
#include <cuda_runtime.h> // __device__
#include <stdint.h>       // uint32_t

#ifdef CUDA_EMULATOR
#include "mma_emulator.h" // the same names, in dev/cuda_emulator
#else

__device__ static inline void mma_bf16_16816(float d[4], const uint32_t a[4], const uint32_t b[2], const float c[4]) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
                 : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c[0]), "f"(c[1]), "f"(c[2]),
                   "f"(c[3]));
}

__device__ static inline uint32_t mma_shared_address(const void *shared) {
    return (uint32_t)__cvta_generic_to_shared(shared);
}

__device__ static inline void ldmatrix_x4(uint32_t r[4], const void *shared_row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(mma_shared_address(shared_row))
                 : "memory");
}

__device__ static inline void ldmatrix_x4_trans(uint32_t r[4], const void *shared_row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(mma_shared_address(shared_row))
                 : "memory");
}

// Lanes 0-15 name the rows.
__device__ static inline void ldmatrix_x2(uint32_t r[2], const void *shared_row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(mma_shared_address(shared_row))
                 : "memory");
}

__device__ static inline void ldmatrix_x2_trans(uint32_t r[2], const void *shared_row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(mma_shared_address(shared_row))
                 : "memory");
}

// Starts a copy of 16 bytes, both addresses multiples of 16; it passes the first-level cache and the registers by.
__device__ static inline void cp_async_16(void *shared, const void *global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(mma_shared_address(shared)), "l"(global) : "memory");
}

// Closes a group: the thread's copies since the last one.
__device__ static inline void cp_async_commit(void) {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most N of this thread's groups are under way. Other threads' copies need a barrier after it.
template <int N> __device__ static inline void cp_async_wait(void) {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

#endif

// Two floats as a word of bf16, `low` in the lower half: what mma takes.
__device__ static inline uint32_t mma_pack(float low, float high) {
    __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    uint32_t word;
    memcpy(&word, &pair, sizeof word);
    return word;
}

#endif
