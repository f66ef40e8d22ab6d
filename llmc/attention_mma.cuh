// Attention's kernels for bf16 and head sizes 64, 96 and 128: tensor cores, no T x T matrix in memory
// (FlashAttention-2, Dao 2023; attention.cuh has the formulas and launches these).
//
// A block owns a tile of rows and streams the tiles of the other side past it, two at a time: one is worked on while
// cp.async brings the next. Its four warps each own 16*M of the rows: an operand fragment read from shared memory
// serves M products, and the sums over the stream stay in registers, so nothing is added across warps or blocks and
// every run gives the same bits. Scores leave the tensor cores in the very layout in which the next product takes them,
// so probabilities never see shared memory.
//   forward     rows are queries; streams keys and values
//   dq          rows are queries; streams keys and values, recomputes S
//   dk and dv   rows are keys; streams q and dout of all query heads of the group, head by head; recomputes S^T
// Recomputing S twice costs 7 products where 5 would do, and needs no atomics, no fp32 copies of dq, no waiting.
// Rows of shared tiles are 16 bytes longer than HD: the eight rows an ldmatrix reads then lie in different banks, and
// all addresses of a tile are one base plus constants, which a swizzle's are not.
#ifndef LLMC_ATTENTION_MMA_CUH
#define LLMC_ATTENTION_MMA_CUH

#include <math.h>   // INFINITY, logf
#include <stddef.h> // size_t

#include "attention_device.cuh"
#include "attention_shape.h"
#include "device.cuh" // floatX, DYNAMIC_SHARED
#include "mma.cuh"    // mma, ldmatrix, cp.async
#include "packed.cuh" // pack_load

#define ATTENTION_THREADS 128

// Tuned sizes. M: a warp owns 16*M rows. KEYS: of a streamed tile of the forward; STREAM: rows of one of the backward.
// What stopped them: 255 registers a thread, which leave two blocks on an SM; shared memory of 99 KB a block on sm_86,
// sm_89 and sm_120, of 163 KB for two on sm_80. Registers by ptxas of CUDA 13.0 for sm_90 (sm_80: within 10 of these):
//   HD   forward      dq           dk and dv     stopped by
//   64   241, 55 KB   234, 74 KB   255, 75 KB    registers: dk and dv spill 32 bytes, outside the inner loop
//   96   255, 80 KB   185, 53 KB   240, 54 KB    registers
//  128   255, 70 KB   228, 70 KB   255, 70 KB    shared memory: 104 KB with tiles of 64
template <int HD> struct AttentionTiles;
template <> struct AttentionTiles<64> {
    static constexpr int M_FORWARD = 2, KEYS = 64, M_DQ = 2, M_DKV = 2, STREAM = 64;
};
template <> struct AttentionTiles<96> {
    static constexpr int M_FORWARD = 2, KEYS = 64, M_DQ = 1, M_DKV = 1, STREAM = 32;
};
template <> struct AttentionTiles<128> {
    static constexpr int M_FORWARD = 2, KEYS = 32, M_DQ = 1, M_DKV = 1, STREAM = 32;
};

template <int HD> HOST_DEVICE constexpr int forward_rows(void) {
    return 64 * AttentionTiles<HD>::M_FORWARD;
}

template <int HD> HOST_DEVICE constexpr int dq_rows(void) {
    return 64 * AttentionTiles<HD>::M_DQ;
}

template <int HD> HOST_DEVICE constexpr int dkv_rows(void) {
    return 64 * AttentionTiles<HD>::M_DKV;
}

// Bytes of shared memory: the block's own tiles and the streamed ones, two of each.
template <int HD> HOST_DEVICE constexpr size_t forward_shared(void) {
    return sizeof(floatX) * (HD + 8) * (forward_rows<HD>() + 4 * AttentionTiles<HD>::KEYS);
}

template <int HD> HOST_DEVICE constexpr size_t dq_shared(void) {
    return sizeof(floatX) * (HD + 8) * (2 * dq_rows<HD>() + 4 * AttentionTiles<HD>::STREAM);
}

template <int HD> HOST_DEVICE constexpr size_t dkv_shared(void) {
    return sizeof(floatX) * (HD + 8) * (2 * dkv_rows<HD>() + 4 * AttentionTiles<HD>::STREAM) +
           sizeof(float2) * 2 * AttentionTiles<HD>::STREAM + sizeof(int) * dkv_rows<HD>();
}

// ---------------------------------------------------------------------------------------------------------------------
// Fragments. A lane's four sums of an m16n8 product are rows lane/4 (two) and lane/4 + 8 (two), columns 2*(lane%4) and
// the next one.

// 2^x, results below 2^-126 zero: one instruction, where exp2f takes four for the sake of those.
static __device__ inline float exp2_flush(float x) {
#ifdef CUDA_EMULATOR
    return exp2f(x);
#else
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
#endif
}

template <int N> static __device__ inline void clear(float *x) {
    UNROLL for (int i = 0; i < N; i++) x[i] = 0.0f;
}

// The lane's address for ldmatrix_x4 in a tile of row stride LD: 16 rows x 16 columns as an A operand (also,
// transposed, as the B operand of a product over the rows), and as the B operand of a product over the columns.
template <int LD> static __device__ inline int lane_as_a(void) {
    int lane = threadIdx.x % 32;
    return lane % 16 * LD + lane / 16 * 8;
}

template <int LD> static __device__ inline int lane_as_b(void) {
    int lane = threadIdx.x % 32;
    return (lane % 8 + lane / 16 * 8) * LD + lane / 8 % 2 * 8;
}

// a = the 16*M rows of a tile, all HD columns. tile: the lane's address as an A operand.
template <int M, int HD> static __device__ inline void load_rows(uint32_t a[M][HD / 16][4], const floatX *tile) {
    UNROLL for (int m = 0; m < M; m++) UNROLL for (int d = 0; d < HD / 16; d++)
        ldmatrix_x4(a[m][d], tile + m * 16 * (HD + 8) + d * 16);
}

// c (16*M, 16) = a (16*M, HD) b (16, HD)^T. b: the lane's address as a B operand.
template <int M, int HD>
static __device__ inline void product_scores(float c[M][2][4], const uint32_t a[M][HD / 16][4], const floatX *b) {
    clear<8 * M>(&c[0][0][0]);
    UNROLL for (int d = 0; d < HD / 16; d++) {
        uint32_t fragment[4];
        ldmatrix_x4(fragment, b + d * 16);
        UNROLL for (int m = 0; m < M; m++) {
            mma_bf16_16816(c[m][0], a[m][d], fragment, c[m][0]);
            mma_bf16_16816(c[m][1], a[m][d], fragment + 2, c[m][1]);
        }
    }
}

// sum (16*M, HD) += a (16*M, 16) b (16, HD). b: the lane's address as an A operand.
template <int M, int HD>
static __device__ inline void product_add(float sum[M][HD / 8][4], const uint32_t a[M][4], const floatX *b) {
    UNROLL for (int n = 0; n < HD / 8; n += 2) {
        uint32_t fragment[4];
        ldmatrix_x4_trans(fragment, b + n * 8);
        UNROLL for (int m = 0; m < M; m++) {
            mma_bf16_16816(sum[m][n], a[m], fragment, sum[m][n]);
            mma_bf16_16816(sum[m][n + 1], a[m], fragment + 2, sum[m][n + 1]);
        }
    }
}

// a = c (16*M, 16) as the A operand of the next product
template <int M> static __device__ inline void pack_rows(uint32_t a[M][4], const float c[M][2][4]) {
    UNROLL for (int m = 0; m < M; m++) UNROLL for (int i = 0; i < 4; i++) a[m][i] =
        mma_pack(c[m][i / 2][i % 2 * 2], c[m][i / 2][i % 2 * 2 + 1]);
}

// Sum over the four lanes that share rows.
static __device__ inline float quad_sum(float x) {
    x += __shfl_xor_sync(0xFFFFFFFFu, x, 1);
    return x + __shfl_xor_sync(0xFFFFFFFFu, x, 2);
}

static __device__ inline float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, 2));
}

// ---------------------------------------------------------------------------------------------------------------------
// Tiles

// Asks for the first `valid` of ROWS rows of HD elements, 16 bytes a thread; the others become zeros.
template <int ROWS, int HD>
static __device__ inline void load_tile(floatX *tile, const floatX *from, int64_t stride, int valid) {
    constexpr int PIECES = HD / 8;
    UNROLL for (int at = 0; at < ROWS * PIECES; at += ATTENTION_THREADS) {
        int i = at + (int)threadIdx.x, row = i / PIECES, column = i % PIECES * 8;
        floatX *to = tile + row * (HD + 8) + column;
        if (row < valid)
            cp_async_16(to, from + row * stride + column);
        else
            *(uint4 *)to = make_uint4(0, 0, 0, 0);
    }
}

// to (the first `valid` of 16*M rows, HD) = sum * factor[row of the lane], rounded once; through the warp's own rows of
// a tile so that 16 bytes leave at a time.
template <int M, int HD>
static __device__ inline void store_rows(floatX *to, int64_t stride, floatX *tile, const float sum[M][HD / 8][4],
                                         const float *factor, int valid) {
    int lane = threadIdx.x % 32;
    UNROLL for (int m = 0; m < M; m++) {
        UNROLL for (int half = 0; half < 2; half++) {
            floatX *row = tile + (m * 16 + half * 8 + lane / 4) * (HD + 8) + lane % 4 * 2;
            float f = factor[2 * m + half];
            UNROLL for (int n = 0; n < HD / 8; n++) * (uint32_t *)(row + n * 8) =
                mma_pack(sum[m][n][2 * half] * f, sum[m][n][2 * half + 1] * f);
        }
    }
    __syncwarp();
    UNROLL for (int at = 0; at < 16 * M * (HD / 8); at += 32) {
        int i = at + lane, row = i / (HD / 8), column = i % (HD / 8) * 8;
        if (row < valid) *(uint4 *)(to + row * stride + column) = *(const uint4 *)(tile + row * (HD + 8) + column);
    }
}

// Which keys the 16*M queries of a warp see. Query i of a lane, of 2*M, is its warp's lane/4 + 8*i.
struct Sight {
    const AttentionShape *shape;
    const int32_t *starts;   // of the sequence, or NULL
    int first, last;         // positions of the warp's first and last query
    int first_key, last_key; // the first ones that these see
};

// What a query past the sequence's end sees is what the last one does.
static __device__ inline int sight_start(const AttentionShape *s, const int32_t *starts, int position) {
    return attention_first(s, starts, min(position, s->Tk - 1));
}

template <int M> static __device__ inline Sight sight_of(const AttentionShape *s, const int32_t *starts, int first) {
    int last = first + 16 * M - 1;
    return {s, starts, first, last, sight_start(s, starts, first), sight_start(s, starts, last)};
}

// No query sees any of the n keys from `key` on.
static __device__ inline bool sight_none(const Sight &sight, int key, int n) {
    return key > sight.last || key + n <= sight.first_key;
}

// All queries see all of them.
static __device__ inline bool sight_all(const Sight &sight, int key, int n) {
    return key + n - 1 <= sight.first && key >= sight.last_key;
}

// low, high (2*M): the first and the last key that the lane's queries see
template <int M> static __device__ inline void sight_limits(int *low, int *high, const Sight &sight) {
    UNROLL for (int i = 0; i < 2 * M; i++) {
        high[i] = sight.first + (int)(threadIdx.x % 32) / 4 + 8 * i;
        low[i] = sight_start(sight.shape, sight.starts, high[i]);
    }
}

// ---------------------------------------------------------------------------------------------------------------------

// out (B, Tq, NH*HD) = softmax(q k^T / sqrt(HD)) v, lse (B, NH, Tq) its log sum exp.
// grid (NH, B, query tiles), the longest tiles first; block 128; shared forward_shared<HD>(). The strides are
// multiples of 8 and all pointers of 16 bytes.
// Products of 2*HD*(keys seen) multiply-adds a query and head; reads q once, k and v once a query tile (from L2 but for
// the first), writes out and lse once.
template <int HD>
__global__ void __launch_bounds__(ATTENTION_THREADS, 2)
    attention_forward_mma(floatX *out, float *lse, const floatX *q, const floatX *k, const floatX *v,
                          AttentionShape s) {
    constexpr int M = AttentionTiles<HD>::M_FORWARD, ROWS = forward_rows<HD>(), KEYS = AttentionTiles<HD>::KEYS,
                  LD = HD + 8;
    DYNAMIC_SHARED(floatX, queries);     // (ROWS, LD)
    floatX *tiles = queries + ROWS * LD; // (2, keys and values, KEYS, LD)
    int head = blockIdx.x, b = blockIdx.y, first = (int)(gridDim.z - 1 - blockIdx.z) * ROWS, shift = s.Tk - s.Tq;
    int lane = threadIdx.x % 32, warp_row = (int)threadIdx.x / 32 * 16 * M, rows = min(ROWS, s.Tq - first);
    const int32_t *starts = attention_starts(&s, b);
    int tile = attention_first(&s, starts, shift + first) / KEYS, last_tile = (shift + first + rows - 1) / KEYS;
    int64_t row = (int64_t)b * s.Tq + first, kv_at = (int64_t)b * s.Tk * s.kv_stride + head / (s.NH / s.NKV) * HD;
    auto load = [&](int next) {
        floatX *to = tiles + (next & 1) * 2 * KEYS * LD;
        int64_t at = kv_at + (int64_t)next * KEYS * s.kv_stride;
        load_tile<KEYS, HD>(to, k + at, s.kv_stride, s.Tk - next * KEYS);
        load_tile<KEYS, HD>(to + KEYS * LD, v + at, s.kv_stride, s.Tk - next * KEYS);
        cp_async_commit();
    };
    load_tile<ROWS, HD>(queries, q + row * s.q_stride + head * HD, s.q_stride, rows);
    load(tile);

    const Sight sight = sight_of<M>(&s, starts, shift + first + warp_row);
    float sum[M][HD / 8][4], top[2 * M], total[2 * M]; // of exp2(log2e * (score - top)); total: of the lane's columns
    clear<M * HD / 2>(&sum[0][0][0]);
    // Finite, so that a row that has seen nothing yet does not subtract infinities.
    UNROLL for (int i = 0; i < 2 * M; i++) top[i] = -1e30f, total[i] = 0.0f;
    float scale = rsqrtf((float)HD), scale_2 = scale * LOG2_E;
    const floatX *warp_queries = queries + warp_row * LD + lane_as_a<LD>();
    for (; tile <= last_tile; tile++) {
        cp_async_wait<0>();
        __syncthreads(); // the tile is here, and all have left the other one
        if (tile < last_tile) load(tile + 1);
        int key = tile * KEYS;
        if (warp_row >= rows || sight_none(sight, key, KEYS)) continue;
        const floatX *keys = tiles + (tile & 1) * 2 * KEYS * LD + lane_as_b<LD>();
        const floatX *values = tiles + ((tile & 1) * 2 + 1) * KEYS * LD + lane_as_a<LD>();
        float score[KEYS / 16][M][2][4];
        clear<KEYS / 2 * M>(&score[0][0][0][0]);
        UNROLL for (int d = 0; d < HD / 16; d++) {
            uint32_t a[M][4];
            UNROLL for (int m = 0; m < M; m++) ldmatrix_x4(a[m], warp_queries + m * 16 * LD + d * 16);
            UNROLL for (int n = 0; n < KEYS / 16; n++) {
                uint32_t fragment[4];
                ldmatrix_x4(fragment, keys + n * 16 * LD + d * 16);
                UNROLL for (int m = 0; m < M; m++) {
                    mma_bf16_16816(score[n][m][0], a[m], fragment, score[n][m][0]);
                    mma_bf16_16816(score[n][m][1], a[m], fragment + 2, score[n][m][1]);
                }
            }
        }
        if (!sight_all(sight, key, KEYS)) {
            int low[2 * M], high[2 * M];
            sight_limits<M>(low, high, sight);
            UNROLL for (int n = 0; n < KEYS / 8; n++) {
                UNROLL for (int i = 0; i < 4 * M; i++) {
                    int at = key + n * 8 + lane % 4 * 2 + i % 2;
                    if (at < low[i / 2] || at > high[i / 2]) score[n / 2][i / 4][n % 2][i % 4] = -INFINITY;
                }
            }
        }
        UNROLL for (int i = 0; i < 2 * M; i++) {
            float high = top[i], added = 0.0f;
            UNROLL for (int n = 0; n < KEYS / 8; n++) {
                const float *pair = &score[n / 2][i / 2][n % 2][i % 2 * 2];
                high = fmaxf(high, fmaxf(pair[0], pair[1]));
            }
            high = quad_max(high);
            float shrink = exp2_flush((top[i] - high) * scale_2), base = high * scale_2;
            UNROLL for (int n = 0; n < KEYS / 8; n++) {
                float *pair = &score[n / 2][i / 2][n % 2][i % 2 * 2];
                pair[0] = exp2_flush(pair[0] * scale_2 - base);
                pair[1] = exp2_flush(pair[1] * scale_2 - base);
                added += pair[0] + pair[1];
            }
            top[i] = high;
            total[i] = total[i] * shrink + added;
            UNROLL for (int n = 0; n < HD / 8; n++) {
                sum[i / 2][n][i % 2 * 2] *= shrink;
                sum[i / 2][n][i % 2 * 2 + 1] *= shrink;
            }
        }
        UNROLL for (int n = 0; n < KEYS / 16; n++) {
            uint32_t a[M][4];
            pack_rows<M>(a, score[n]);
            product_add<M, HD>(sum, a, values + n * 16 * LD);
        }
    }

    UNROLL for (int i = 0; i < 2 * M; i++) {
        float all = quad_sum(total[i]);
        int query = first + warp_row + lane / 4 + 8 * i;
        if (lane % 4 == 0 && query < s.Tq) lse[((int64_t)b * s.NH + head) * s.Tq + query] = top[i] * scale + logf(all);
        total[i] = 1.0f / all;
    }
    int64_t out_stride = (int64_t)s.NH * HD;
    store_rows<M, HD>(out + (row + warp_row) * out_stride + head * HD, out_stride, queries + warp_row * LD, sum, total,
                      rows - warp_row);
}

// dq (B, T, ...) = dS k / sqrt(HD); stats (B, NH, attention_rows(T)) = {lse * log2(e), sum_d dout*out}, rows past T
// zeros: their dout is zero too, they add nothing. Tq = Tk = T.
// grid (NH, B, query tiles), the longest tiles first; block 128; shared dq_shared<HD>(). The strides are
// multiples of 8 and all pointers of 16 bytes.
// Products of 3*HD*(keys seen) multiply-adds a query and head; reads q, dout and out once, k and v once a query tile,
// writes dq and 8 bytes a query and head.
template <int HD>
__global__ void __launch_bounds__(ATTENTION_THREADS, 2)
    attention_dq_mma(floatX *dq, float2 *stats, const floatX *dout, const floatX *out, const float *lse,
                     const floatX *q, const floatX *k, const floatX *v, AttentionShape s) {
    constexpr int M = AttentionTiles<HD>::M_DQ, ROWS = dq_rows<HD>(), KEYS = AttentionTiles<HD>::STREAM, LD = HD + 8;
    DYNAMIC_SHARED(floatX, queries);     // (ROWS, LD)
    floatX *grads = queries + ROWS * LD; // (ROWS, LD)
    floatX *tiles = grads + ROWS * LD;   // (2, keys and values, KEYS, LD)
    int head = blockIdx.x, b = blockIdx.y, first = (int)(gridDim.z - 1 - blockIdx.z) * ROWS, T = s.Tk;
    int lane = threadIdx.x % 32, warp_row = (int)threadIdx.x / 32 * 16 * M, rows = min(ROWS, T - first);
    const int32_t *starts = attention_starts(&s, b);
    int tile = attention_first(&s, starts, first) / KEYS, last_tile = (first + rows - 1) / KEYS;
    int64_t row = (int64_t)b * T + first, kv_at = (int64_t)b * T * s.kv_stride + head / (s.NH / s.NKV) * HD;
    int64_t out_stride = (int64_t)s.NH * HD, out_at = row * out_stride + head * HD;
    auto load = [&](int next) {
        floatX *to = tiles + (next & 1) * 2 * KEYS * LD;
        int64_t at = kv_at + (int64_t)next * KEYS * s.kv_stride;
        load_tile<KEYS, HD>(to, k + at, s.kv_stride, T - next * KEYS);
        load_tile<KEYS, HD>(to + KEYS * LD, v + at, s.kv_stride, T - next * KEYS);
        cp_async_commit();
    };
    load_tile<ROWS, HD>(queries, q + row * s.q_stride + head * HD, s.q_stride, rows);
    load_tile<ROWS, HD>(grads, dout + out_at, out_stride, rows);
    load(tile);

    // Meanwhile the four lanes of a query go over its dout and out.
    float log_sum[2 * M], delta[2 * M];
    UNROLL for (int i = 0; i < 2 * M; i++) {
        int at = warp_row + lane / 4 + 8 * i;
        bool valid = at < rows;
        int64_t stat = (int64_t)b * s.NH + head;
        log_sum[i] = valid ? lse[stat * T + first + at] * LOG2_E : 0.0f;
        delta[i] = 0.0f;
        for (int d = lane % 4 * 8; valid && d < HD; d += 32) {
            Pack<floatX> x = pack_load(dout + out_at + at * out_stride + d);
            Pack<floatX> y = pack_load(out + out_at + at * out_stride + d);
            UNROLL for (int j = 0; j < 8; j++) delta[i] += to_float(x[j]) * to_float(y[j]);
        }
        delta[i] = quad_sum(delta[i]);
        if (lane % 4 == 0) stats[stat * attention_rows(T) + first + at] = make_float2(log_sum[i], delta[i]);
    }

    const Sight sight = sight_of<M>(&s, starts, first + warp_row);
    float sum[M][HD / 8][4], factor[2 * M];
    clear<M * HD / 2>(&sum[0][0][0]);
    float scale = rsqrtf((float)HD), scale_2 = scale * LOG2_E;
    uint32_t query[M][HD / 16][4], grad[M][HD / 16][4];
    for (int step = tile; step <= last_tile; step++) {
        cp_async_wait<0>();
        __syncthreads(); // the tile is here, and all have left the other one
        if (step < last_tile) load(step + 1);
        if (step == tile) {
            load_rows<M, HD>(query, queries + warp_row * LD + lane_as_a<LD>());
            load_rows<M, HD>(grad, grads + warp_row * LD + lane_as_a<LD>());
        }
        const floatX *keys = tiles + (step & 1) * 2 * KEYS * LD, *values = keys + KEYS * LD;
        UNROLL_1 for (int n = 0; n < KEYS; n += 16) {
            int key = step * KEYS + n;
            if (warp_row >= rows || sight_none(sight, key, 16)) continue;
            float score[M][2][4], dscore[M][2][4];
            product_scores<M, HD>(score, query, keys + n * LD + lane_as_b<LD>());
            product_scores<M, HD>(dscore, grad, values + n * LD + lane_as_b<LD>());
            if (!sight_all(sight, key, 16)) {
                int low[2 * M], high[2 * M];
                sight_limits<M>(low, high, sight);
                UNROLL for (int j = 0; j < 8 * M; j++) {
                    int m = j / 8, half = j / 4 % 2, e = j % 4, i = 2 * m + e / 2;
                    int at = key + half * 8 + lane % 4 * 2 + e % 2;
                    if (at < low[i] || at > high[i]) score[m][half][e] = -INFINITY;
                }
            }
            UNROLL for (int j = 0; j < 8 * M; j++) {
                int m = j / 8, half = j / 4 % 2, e = j % 4, i = 2 * m + e / 2;
                float p = exp2_flush(score[m][half][e] * scale_2 - log_sum[i]);
                dscore[m][half][e] = p * (dscore[m][half][e] - delta[i]);
            }
            uint32_t a[M][4];
            pack_rows<M>(a, dscore);
            product_add<M, HD>(sum, a, keys + n * LD + lane_as_a<LD>());
        }
    }
    UNROLL for (int i = 0; i < 2 * M; i++) factor[i] = scale;
    store_rows<M, HD>(dq + (row + warp_row) * s.q_stride + head * HD, s.q_stride, queries + warp_row * LD, sum, factor,
                      rows - warp_row);
}

// dv (B, T, ...) = P^T dout, dk = dS^T q / sqrt(HD), over the query heads of the group in their order. Tq = Tk = T.
// stats: as attention_dq_mma writes them.
// grid (NKV, B, key tiles), the longest tiles first; block 128; shared dkv_shared<HD>(). The strides are
// multiples of 8 and all pointers of 16 bytes.
// Products of 4*HD*(queries that see it) multiply-adds a key and query head; reads k and v once, q, dout and stats once
// a key tile, writes dk and dv once.
template <int HD>
__global__ void __launch_bounds__(ATTENTION_THREADS, 2)
    attention_dkv_mma(floatX *dk, floatX *dv, const floatX *dout, const float2 *stats, const floatX *q, const floatX *k,
                      const floatX *v, AttentionShape s) {
    constexpr int M = AttentionTiles<HD>::M_DKV, ROWS = dkv_rows<HD>(), QUERIES = AttentionTiles<HD>::STREAM,
                  LD = HD + 8;
    DYNAMIC_SHARED(floatX, keys);                              // (ROWS, LD)
    floatX *values = keys + ROWS * LD;                         // (ROWS, LD)
    floatX *tiles = values + ROWS * LD;                        // (2, q and dout, QUERIES, LD)
    float2 *tile_stats = (float2 *)(tiles + 4 * QUERIES * LD); // (2, QUERIES)
    int *ends = (int *)(tile_stats + 2 * QUERIES);             // (ROWS) from where on no query sees a key
    int kv_head = blockIdx.x, b = blockIdx.y, first = (int)blockIdx.z * ROWS, T = s.Tk, group = s.NH / s.NKV;
    int lane = threadIdx.x % 32, warp_row = (int)threadIdx.x / 32 * 16 * M, rows = min(ROWS, T - first);
    int64_t kv_at = ((int64_t)b * T + first) * s.kv_stride + kv_head * HD, out_stride = (int64_t)s.NH * HD;

    // The queries that see a key are those from it on to the end of its document or window.
    const int32_t *starts = attention_starts(&s, b);
    for (int i = threadIdx.x; i < ROWS; i += ATTENTION_THREADS) ends[i] = attention_end(&s, starts, first + i);
    int first_tile = first / QUERIES, last_tile = (attention_end(&s, starts, first + rows - 1) - 1) / QUERIES;
    int first_head = kv_head * group, last_head = first_head + group - 1, buffer = 0;

    auto load = [&](int head, int tile, int to_buffer) {
        int query = tile * QUERIES;
        int64_t row = (int64_t)b * T + query, stat = ((int64_t)b * s.NH + head) * attention_rows(T) + query;
        floatX *to = tiles + to_buffer * 2 * QUERIES * LD;
        load_tile<QUERIES, HD>(to, q + row * s.q_stride + head * HD, s.q_stride, T - query);
        load_tile<QUERIES, HD>(to + QUERIES * LD, dout + row * out_stride + head * HD, out_stride, T - query);
        int pair = 2 * (int)threadIdx.x; // of statistics, 16 bytes
        if (pair < QUERIES) cp_async_16(tile_stats + to_buffer * QUERIES + pair, stats + stat + pair);
        cp_async_commit();
    };
    load_tile<ROWS, HD>(keys, k + kv_at, s.kv_stride, rows);
    load_tile<ROWS, HD>(values, v + kv_at, s.kv_stride, rows);
    load(first_head, first_tile, buffer);

    float dkey[M][HD / 8][4], dvalue[M][HD / 8][4], factor[2 * M];
    clear<M * HD / 2>(&dkey[0][0][0]);
    clear<M * HD / 2>(&dvalue[0][0][0]);
    float scale = rsqrtf((float)HD), scale_2 = scale * LOG2_E;
    uint32_t key[M][HD / 16][4], value[M][HD / 16][4];
    for (int head = first_head; head <= last_head; head++) {
        for (int tile = first_tile; tile <= last_tile; tile++, buffer ^= 1) {
            cp_async_wait<0>();
            __syncthreads();                // the tile is here, and all have left the other one
            bool wraps = tile == last_tile; // one call, not one for each case: it is long when inlined
            if (head + wraps <= last_head) load(head + wraps, wraps ? first_tile : tile + 1, buffer ^ 1);
            if (tile == first_tile && head == first_head) {
                load_rows<M, HD>(key, keys + warp_row * LD + lane_as_a<LD>());
                load_rows<M, HD>(value, values + warp_row * LD + lane_as_a<LD>());
            }
            const floatX *queries = tiles + buffer * 2 * QUERIES * LD, *grads = queries + QUERIES * LD;
            UNROLL_1 for (int n = 0; n < QUERIES; n += 16) {
                int query = tile * QUERIES + n, warp_key = first + warp_row;
                if (warp_row >= rows || query + 15 < warp_key || query >= ends[warp_row + 16 * M - 1]) continue;
                float prob[M][2][4], dscore[M][2][4];
                product_scores<M, HD>(prob, key, queries + n * LD + lane_as_b<LD>());
                product_scores<M, HD>(dscore, value, grads + n * LD + lane_as_b<LD>());
                if (query < warp_key + 16 * M - 1 || query + 15 >= ends[warp_row]) {
                    UNROLL for (int j = 0; j < 8 * M; j++) {
                        int m = j / 8, half = j / 4 % 2, e = j % 4, row = warp_row + m * 16 + e / 2 * 8 + lane / 4;
                        int at = query + half * 8 + lane % 4 * 2 + e % 2;
                        if (at < first + row || at >= ends[row]) prob[m][half][e] = -INFINITY;
                    }
                }
                UNROLL for (int half = 0; half < 2; half++) {
                    const float2 *pair = tile_stats + buffer * QUERIES + n + half * 8 + lane % 4 * 2;
                    float4 stat = *(const float4 *)pair; // log sum and delta of two queries
                    UNROLL for (int j = 0; j < 4 * M; j++) {
                        int m = j / 4, e = j % 4;
                        float p = exp2_flush(prob[m][half][e] * scale_2 - (e % 2 ? stat.z : stat.x));
                        prob[m][half][e] = p;
                        dscore[m][half][e] = p * (dscore[m][half][e] - (e % 2 ? stat.w : stat.y));
                    }
                }
                uint32_t a[M][4];
                pack_rows<M>(a, prob);
                product_add<M, HD>(dvalue, a, grads + n * LD + lane_as_a<LD>());
                pack_rows<M>(a, dscore);
                product_add<M, HD>(dkey, a, queries + n * LD + lane_as_a<LD>());
            }
        }
    }
    UNROLL for (int i = 0; i < 2 * M; i++) factor[i] = scale;
    store_rows<M, HD>(dk + kv_at + warp_row * (int64_t)s.kv_stride, s.kv_stride, keys + warp_row * LD, dkey, factor,
                      rows - warp_row);
    UNROLL for (int i = 0; i < 2 * M; i++) factor[i] = 1.0f;
    store_rows<M, HD>(dv + kv_at + warp_row * (int64_t)s.kv_stride, s.kv_stride, values + warp_row * LD, dvalue, factor,
                      rows - warp_row);
}

#endif
