// Token embedding, CUDA.
//   out[n,:] = weight[tokens[n],:]            out overwritten
//   dweight[tokens[n],:] += dout[n,:]         dweight added to, in the order of n: the CPU's bits
// The backward takes no atomics and no sort: each position has a block, the block of a token's first position finds the
// later ones by comparing all tokens, and adds their rows in order; blocks of later positions leave as soon as they see
// an earlier one. That is up to N^2 comparisons of tokens that lie in the cache, 67 million for N 8192: microseconds
// where a step takes a hundred milliseconds. It would matter from N of about 10^5 on.
#ifndef LLMC_EMBEDDING_CUH
#define LLMC_EMBEDDING_CUH

#include <stddef.h> // size_t
#include <stdint.h> // fixed-width integers

#include "device.cuh"   // floatX, Stream, LAUNCH
#include "elements.cuh" // values_load, values_store, aligned_16

#define EMBEDDING_BLOCK 256

// grid N, block 256: a block a row. No shared memory. Moves 6*N*C bytes in bf16 where no token comes twice.
template <int WIDTH, typename T>
__global__ static void __launch_bounds__(EMBEDDING_BLOCK)
    embedding_forward_kernel(floatX *out, const uint32_t *tokens, const T *weight, int C) {
    const T *row = weight + (size_t)tokens[blockIdx.x] * C;
    floatX *to = out + (size_t)blockIdx.x * C;
    for (int c = (int)threadIdx.x * WIDTH; c < C; c += EMBEDDING_BLOCK * WIDTH)
        values_store(to + c, values_load<WIDTH>(row + c));
}

#define EMBEDDING_TILE  1024 // tokens that a block compares between two barriers
#define EMBEDDING_WORDS (EMBEDDING_TILE / 32)
#define EMBEDDING_AHEAD 4 // rows that are loaded before the first of them is added

// found: the bits of tokens[first + i] == token, i < 1024. Returns the words that are not 0. All threads call it; it
// has one barrier, so the next call must use another array.
__device__ inline uint32_t embedding_find(uint32_t *found, const uint32_t *tokens, uint32_t token, int first, int N) {
    int lane = (int)threadIdx.x % 32;
    for (int i = (int)threadIdx.x; i < EMBEDDING_TILE; i += EMBEDDING_BLOCK) {
        uint32_t same = __ballot_sync(0xFFFFFFFFu, first + i < N && tokens[first + i] == token);
        if (lane == 0) found[i / 32] = same;
    }
    __syncthreads();
    return __ballot_sync(0xFFFFFFFFu, found[lane] != 0);
}

// rows = the positions whose bit is set, ascending. Returns how many. All threads call it; ends with a barrier.
__device__ inline int embedding_list(int *rows, const uint32_t *found, int first) {
    int before = 0; // set bits of the words so far
    for (int word = 0; word < EMBEDDING_WORDS; word++) {
        uint32_t bits = found[word], bit = threadIdx.x % 32, below = bits & ((1u << bit) - 1);
        if ((int)threadIdx.x / 32 == word % (EMBEDDING_BLOCK / 32) && bits >> bit & 1)
            rows[before + __popc(below)] = first + word * 32 + (int)bit;
        before += __popc(bits);
    }
    __syncthreads();
    return before;
}

// to[:] += dout[rows[0],:], then dout[rows[1],:], ...
template <int WIDTH>
__device__ inline void embedding_add(float *to, const floatX *dout, const int *rows, int n_rows, int C) {
    for (int c = (int)threadIdx.x * WIDTH; c < C; c += EMBEDDING_BLOCK * WIDTH) {
        Values<WIDTH> sum = values_load<WIDTH>(to + c);
        for (int i = 0; i < n_rows; i += EMBEDDING_AHEAD) {
            Values<WIDTH> add[EMBEDDING_AHEAD];
#pragma unroll
            for (int k = 0; k < EMBEDDING_AHEAD; k++)
                add[k] = values_load<WIDTH>(dout + (size_t)rows[i + k < n_rows ? i + k : i] * C + c);
#pragma unroll
            for (int k = 0; k < EMBEDDING_AHEAD; k++)
                for (int j = 0; j < WIDTH; j++)
                    if (i + k < n_rows) sum.v[j] += add[k].v[j];
        }
        values_store(to + c, sum);
    }
}

// grid N, block 256; 4.3 KiB of shared memory. Moves 2*N*C bytes in bf16 and 8*C for each token that occurs.
template <int WIDTH>
__global__ static void __launch_bounds__(EMBEDDING_BLOCK)
    embedding_backward_kernel(float *dweight, const floatX *dout, const uint32_t *tokens, int N, int C) {
    __shared__ uint32_t found[2][EMBEDDING_WORDS];
    __shared__ int rows[EMBEDDING_TILE];
    int own = (int)blockIdx.x;
    uint32_t token = tokens[own];
    for (int first = 0, turn = 0; first < N; first += EMBEDDING_TILE, turn ^= 1) {
        if (embedding_find(found[turn], tokens, token, first, N) == 0) continue;
        int n_rows = embedding_list(rows, found[turn], first);
        if (rows[0] < own) return; // an earlier position's block adds this row; all threads see the same
        embedding_add<WIDTH>(dweight + (size_t)token * C, dout, rows, n_rows, C);
        own = 0; // this block owns the token: whatever comes in later tiles is its own too
    }
}

// out (N, C), tokens (N) each < V (checked by the data loader), weight (V, C)
static inline void embedding_forward(floatX *out, const uint32_t *tokens, const float *weight, int N, int C,
                                     Stream *stream) {
    if (C % FLOATX_WIDTH == 0 && aligned_16(out, weight))
        LAUNCH((embedding_forward_kernel<FLOATX_WIDTH, float>), (unsigned)N, EMBEDDING_BLOCK, 0, stream, out, tokens,
               weight, C);
    else
        LAUNCH((embedding_forward_kernel<1, float>), (unsigned)N, EMBEDDING_BLOCK, 0, stream, out, tokens, weight, C);
}

// The same of a weight that is kept as bf16.
static inline void embedding_forward_bf16(floatX *out, const uint32_t *tokens, const uint16_t *weight, int N, int C,
                                          Stream *stream) {
    const __nv_bfloat16 *halves = (const __nv_bfloat16 *)weight;
    if (C % 8 == 0 && aligned_16(out, weight))
        LAUNCH((embedding_forward_kernel<8, __nv_bfloat16>), (unsigned)N, EMBEDDING_BLOCK, 0, stream, out, tokens,
               halves, C);
    else
        LAUNCH((embedding_forward_kernel<1, __nv_bfloat16>), (unsigned)N, EMBEDDING_BLOCK, 0, stream, out, tokens,
               halves, C);
}

// dweight (V, C) +=, dout (N, C)
static inline void embedding_backward(float *dweight, const floatX *dout, const uint32_t *tokens, int N, int C,
                                      Stream *stream) {
    if (C % FLOATX_WIDTH == 0 && aligned_16(dweight, dout))
        LAUNCH((embedding_backward_kernel<FLOATX_WIDTH>), (unsigned)N, EMBEDDING_BLOCK, 0, stream, dweight, dout,
               tokens, N, C);
    else
        LAUNCH((embedding_backward_kernel<1>), (unsigned)N, EMBEDDING_BLOCK, 0, stream, dweight, dout, tokens, N, C);
}

#endif
