// Attention's kernels for what the tensor cores' do not take: fp32, and any head size up to 256. Tiles of TILE queries
// and TILE keys go through shared memory in fp32; 16 x 16 threads each own TILE/16 rows of both; no T x T matrix in
// memory. Same division of work as attention_mma.cuh: one kernel over query tiles for out, one for dq, one over key
// tiles for dk and dv; every sum has one owner and one order. attention.cuh has the formulas and launches these.
#ifndef LLMC_ATTENTION_PLAIN_CUH
#define LLMC_ATTENTION_PLAIN_CUH

#include <math.h> // INFINITY, expf, logf

#include "attention_device.cuh"
#include "attention_shape.h"
#include "device.cuh" // floatX, DYNAMIC_SHARED
#include "packed.cuh" // to_float, to_floatX

#define PLAIN_THREADS 256

// TILE by head size: the four tiles of the backward then take 87 KB at most, of the 99 KB a block has on sm_86, sm_89
// and sm_120; the sums of a thread are TILE/16 rows of 256/TILE columns, 16 registers a matrix. Registers of forward,
// dq, dk and dv on sm_90 (no spills): two blocks on an SM each.
//   HD up to   64: TILE 64, 80, 127, 128     128: TILE 32, 62, 74, 100     256: TILE 16, 77, 77, 88
static inline int plain_tile(int HD) {
    return HD <= 64 ? 64 : HD <= 128 ? 32 : 16;
}

// Columns of a tile, HD and zeros; floats between its rows: 16 bytes times an odd number, so that threads 16 bytes deep
// in consecutive rows read different banks.
HOST_DEVICE static inline int plain_width(int HD) {
    return (HD + 15) / 16 * 16;
}

HOST_DEVICE static inline int plain_stride(int HD) {
    return plain_width(HD) + 4;
}

// Bytes of shared memory for n tiles and the scores between two products.
static inline size_t plain_shared(int n, int HD) {
    int tile = plain_tile(HD);
    return sizeof(float) * (size_t)tile * (size_t)(n * plain_stride(HD) + tile + 4);
}

// tile (TILE, HD) = the first `valid` rows of from, the other rows and columns zeros
template <int TILE>
__device__ static inline void plain_load(float *tile, const floatX *from, int64_t stride, int valid, int HD) {
    int width = plain_width(HD);
    for (int i = threadIdx.x; i < TILE * width; i += PLAIN_THREADS) {
        int row = i / width, column = i % width;
        tile[row * plain_stride(HD) + column] =
            row < valid && column < HD ? to_float(from[row * stride + column]) : 0.0f;
    }
}

// score (TILE, TILE) = a (TILE, HD) b (TILE, HD)^T: the thread's rows y + 16*i and columns x + 16*j
template <int TILE>
__device__ static inline void plain_scores(float score[TILE / 16][TILE / 16], const float *a, const float *b, int HD) {
    constexpr int R = TILE / 16;
    int x = threadIdx.x % 16, y = threadIdx.x / 16, stride = plain_stride(HD);
    UNROLL for (int i = 0; i < R * R; i++) score[i / R][i % R] = 0.0f;
    for (int d = 0; d < HD; d += 4) {
        float4 right[R];
        UNROLL for (int j = 0; j < R; j++) right[j] = *(const float4 *)(b + (x + 16 * j) * stride + d);
        UNROLL for (int i = 0; i < R; i++) {
            float4 left = *(const float4 *)(a + (y + 16 * i) * stride + d);
            UNROLL for (int j = 0; j < R; j++) score[i][j] +=
                left.x * right[j].x + left.y * right[j].y + left.z * right[j].z + left.w * right[j].w;
        }
    }
}

// sum (TILE, HD) += weight (TILE, TILE) b (TILE, HD): the thread's rows y + 16*i and columns x + 16*c. The weights pass
// through `shared`; a row is written and read by the same half of a warp.
template <int TILE>
__device__ static inline void plain_add(float sum[TILE / 16][256 / TILE], const float weight[TILE / 16][TILE / 16],
                                        const float *b, float *shared, int HD) {
    constexpr int R = TILE / 16, C = 256 / TILE, LD = TILE + 4;
    int x = threadIdx.x % 16, y = threadIdx.x / 16, stride = plain_stride(HD), width = plain_width(HD);
    __syncwarp(); // the last product's weights have been read
    UNROLL for (int i = 0; i < R; i++) UNROLL for (int j = 0; j < R; j++) shared[(y + 16 * i) * LD + x + 16 * j] =
        weight[i][j];
    __syncwarp();
    for (int j = 0; j < TILE; j++) {
        float left[R];
        UNROLL for (int i = 0; i < R; i++) left[i] = shared[(y + 16 * i) * LD + j];
        UNROLL for (int c = 0; c < C; c++) {
            if (16 * c >= width) break;
            float right = b[j * stride + x + 16 * c];
            UNROLL for (int i = 0; i < R; i++) sum[i][c] += left[i] * right;
        }
    }
}

// to (the first `valid` rows, HD) = sum * factor[row of the thread]
template <int TILE>
__device__ static inline void plain_store(floatX *to, int64_t stride, const float sum[TILE / 16][256 / TILE],
                                          const float *factor, int valid, int HD) {
    int x = threadIdx.x % 16, y = threadIdx.x / 16;
    UNROLL for (int i = 0; i < TILE / 16; i++) {
        UNROLL for (int c = 0; c < 256 / TILE; c++) if (y + 16 * i < valid && x + 16 * c < HD)
            to[(y + 16 * i) * stride + x + 16 * c] = to_floatX(sum[i][c] * factor[i]);
    }
}

template <int TILE> __device__ static inline void plain_clear(float sum[TILE / 16][256 / TILE]) {
    UNROLL for (int i = 0; i < 16; i++) sum[i / (256 / TILE)][i % (256 / TILE)] = 0.0f;
}

// Over the 16 threads that share rows.
__device__ static inline float plain_sum(float value) {
    for (int bits = 8; bits > 0; bits /= 2) value += __shfl_xor_sync(0xFFFFFFFFu, value, bits);
    return value;
}

__device__ static inline float plain_max(float value) {
    for (int bits = 8; bits > 0; bits /= 2) value = fmaxf(value, __shfl_xor_sync(0xFFFFFFFFu, value, bits));
    return value;
}

// out (B, Tq, NH*HD) = softmax(q k^T / sqrt(HD)) v, lse (B, NH, Tq) its log sum exp.
// grid (NH, B, query tiles), the longest tiles first; block 256; shared plain_shared(3, HD). HD at most 4096/TILE.
// 2*HD*(keys seen) multiply-adds in fp32 a query and head; reads q once, k and v once a query tile, writes out and lse.
template <int TILE>
__global__ void __launch_bounds__(PLAIN_THREADS)
    attention_forward_plain(floatX *out, float *lse, const floatX *q, const floatX *k, const floatX *v,
                            AttentionShape s) {
    constexpr int R = TILE / 16, C = 256 / TILE;
    DYNAMIC_SHARED(float, queries);                      // (TILE, stride)
    float *keys = queries + TILE * plain_stride(s.HD);   // (TILE, stride)
    float *values = keys + TILE * plain_stride(s.HD);    // (TILE, stride)
    float *weights = values + TILE * plain_stride(s.HD); // (TILE, TILE + 4)
    int head = blockIdx.x, b = blockIdx.y, first = (int)(gridDim.z - 1 - blockIdx.z) * TILE, HD = s.HD;
    int x = threadIdx.x % 16, y = threadIdx.x / 16, rows = min(TILE, s.Tq - first), shift = s.Tk - s.Tq;
    const int32_t *starts = attention_starts(&s, b);
    int64_t row = (int64_t)b * s.Tq + first, kv_at = (int64_t)b * s.Tk * s.kv_stride + head / (s.NH / s.NKV) * HD;
    int first_key = attention_first(&s, starts, shift + first) / TILE * TILE, last_key = shift + first + rows - 1;
    float sum[R][C], top[R], total[R], scale = 1.0f / sqrtf((float)HD);
    int start[R];
    plain_clear<TILE>(sum);
    UNROLL for (int i = 0; i < R; i++) {
        top[i] = -1e30f, total[i] = 0.0f; // finite: a row that has seen nothing yet does not subtract infinities
        start[i] = attention_first(&s, starts, min(shift + first + y + 16 * i, s.Tk - 1));
    }
    plain_load<TILE>(queries, q + row * s.q_stride + head * HD, s.q_stride, rows, HD);
    for (int key = first_key; key <= last_key; key += TILE) {
        __syncthreads(); // all have left the last tile
        plain_load<TILE>(keys, k + kv_at + (int64_t)key * s.kv_stride, s.kv_stride, s.Tk - key, HD);
        plain_load<TILE>(values, v + kv_at + (int64_t)key * s.kv_stride, s.kv_stride, s.Tk - key, HD);
        __syncthreads();
        float score[R][R];
        plain_scores<TILE>(score, queries, keys, HD);
        UNROLL for (int i = 0; i < R; i++) {
            float high = top[i], added = 0.0f;
            UNROLL for (int j = 0; j < R; j++) {
                int at = key + x + 16 * j;
                bool seen = at >= start[i] && at <= shift + first + y + 16 * i;
                score[i][j] = seen ? score[i][j] * scale : -INFINITY;
                high = fmaxf(high, score[i][j]);
            }
            high = plain_max(high);
            float shrink = expf(top[i] - high);
            UNROLL for (int j = 0; j < R; j++) {
                score[i][j] = expf(score[i][j] - high);
                added += score[i][j];
            }
            top[i] = high;
            total[i] = total[i] * shrink + added;
            UNROLL for (int c = 0; c < C; c++) sum[i][c] *= shrink;
        }
        plain_add<TILE>(sum, score, values, weights, HD);
    }
    UNROLL for (int i = 0; i < R; i++) {
        float all = plain_sum(total[i]);
        int query = first + y + 16 * i;
        if (x == 0 && query < s.Tq) lse[((int64_t)b * s.NH + head) * s.Tq + query] = top[i] + logf(all);
        total[i] = 1.0f / all;
    }
    plain_store<TILE>(out + row * s.NH * HD + head * HD, (int64_t)s.NH * HD, sum, total, rows, HD);
}

// P and dS of a tile from its two products: the lane's rows and columns. seen(i, j): whether the query sees the key.
template <int TILE, class Seen>
__device__ static inline void plain_softmax(float prob[TILE / 16][TILE / 16], float dscore[TILE / 16][TILE / 16],
                                            const float2 *row_stats, const float2 *column_stats, float scale,
                                            Seen seen) {
    UNROLL for (int i = 0; i < TILE / 16; i++) {
        UNROLL for (int j = 0; j < TILE / 16; j++) {
            float2 stat = row_stats != NULL ? row_stats[i] : column_stats[j];
            float p = seen(i, j) ? expf(prob[i][j] * scale - stat.x) : 0.0f;
            prob[i][j] = p;
            dscore[i][j] = p * (dscore[i][j] - stat.y);
        }
    }
}

// dq (B, T, ...) = dS k / sqrt(HD); stats (B, NH, attention_rows(T)) = {lse, sum_d dout*out} for rows below T.
// Tq = Tk = T. grid (NH, B, query tiles), the longest tiles first; block 256; shared plain_shared(4, HD). HD at most
// 4096/TILE. 3*HD*(keys seen) multiply-adds in fp32 a query and head; reads q, dout and out once, k and v once a query
// tile, writes dq and 8 bytes a query and head.
template <int TILE>
__global__ void __launch_bounds__(PLAIN_THREADS)
    attention_dq_plain(floatX *dq, float2 *stats, const floatX *dout, const floatX *out, const float *lse,
                       const floatX *q, const floatX *k, const floatX *v, AttentionShape s) {
    constexpr int R = TILE / 16, C = 256 / TILE;
    DYNAMIC_SHARED(float, queries); // (TILE, stride) as all but weights
    float *grads = queries + TILE * plain_stride(s.HD);
    float *keys = grads + TILE * plain_stride(s.HD);
    float *values = keys + TILE * plain_stride(s.HD);
    float *weights = values + TILE * plain_stride(s.HD); // (TILE, TILE + 4)
    int head = blockIdx.x, b = blockIdx.y, first = (int)(gridDim.z - 1 - blockIdx.z) * TILE, HD = s.HD, T = s.Tk;
    int x = threadIdx.x % 16, y = threadIdx.x / 16, rows = min(TILE, T - first);
    const int32_t *starts = attention_starts(&s, b);
    int64_t row = (int64_t)b * T + first, kv_at = (int64_t)b * T * s.kv_stride + head / (s.NH / s.NKV) * HD;
    int64_t out_stride = (int64_t)s.NH * HD, out_at = row * out_stride + head * HD, stat = (int64_t)b * s.NH + head;
    float sum[R][C], factor[R], scale = 1.0f / sqrtf((float)HD);
    float2 own[R];
    int start[R];
    plain_clear<TILE>(sum);
    UNROLL for (int i = 0; i < R; i++) {
        int at = y + 16 * i;
        float delta = 0.0f;
        for (int d = x; d < HD && at < rows; d += 16)
            delta += to_float(dout[out_at + at * out_stride + d]) * to_float(out[out_at + at * out_stride + d]);
        own[i] = make_float2(at < rows ? lse[stat * T + first + at] : 0.0f, plain_sum(delta));
        if (x == 0 && at < rows) stats[stat * attention_rows(T) + first + at] = own[i];
        start[i] = attention_first(&s, starts, min(first + at, T - 1));
        factor[i] = scale;
    }
    plain_load<TILE>(queries, q + row * s.q_stride + head * HD, s.q_stride, rows, HD);
    plain_load<TILE>(grads, dout + out_at, out_stride, rows, HD);
    for (int key = attention_first(&s, starts, first) / TILE * TILE; key < first + rows; key += TILE) {
        __syncthreads(); // all have left the last tile
        plain_load<TILE>(keys, k + kv_at + (int64_t)key * s.kv_stride, s.kv_stride, T - key, HD);
        plain_load<TILE>(values, v + kv_at + (int64_t)key * s.kv_stride, s.kv_stride, T - key, HD);
        __syncthreads();
        float prob[R][R], dscore[R][R];
        plain_scores<TILE>(prob, queries, keys, HD);
        plain_scores<TILE>(dscore, grads, values, HD);
        plain_softmax<TILE>(prob, dscore, own, NULL, scale, [&](int i, int j) {
            int query = first + y + 16 * i, at = key + x + 16 * j;
            return at >= start[i] && at <= query;
        });
        plain_add<TILE>(sum, dscore, keys, weights, HD);
    }
    plain_store<TILE>(dq + row * s.q_stride + head * HD, s.q_stride, sum, factor, rows, HD);
}

// dv (B, T, ...) = P^T dout, dk = dS^T q / sqrt(HD), over the query heads of the group in their order. Tq = Tk = T.
// stats: as attention_dq_plain writes them.
// grid (NKV, B, key tiles), the longest tiles first; block 256; shared plain_shared(4, HD). HD at most 4096/TILE.
// 4*HD*(queries that see it) multiply-adds in fp32 a key and query head; reads k and v once, q and dout once a key
// tile, writes dk and dv once.
template <int TILE>
__global__ void __launch_bounds__(PLAIN_THREADS)
    attention_dkv_plain(floatX *dk, floatX *dv, const floatX *dout, const float2 *stats, const floatX *q,
                        const floatX *k, const floatX *v, AttentionShape s) {
    constexpr int R = TILE / 16, C = 256 / TILE;
    DYNAMIC_SHARED(float, keys); // (TILE, stride) as all but weights
    float *values = keys + TILE * plain_stride(s.HD);
    float *queries = values + TILE * plain_stride(s.HD);
    float *grads = queries + TILE * plain_stride(s.HD);
    float *weights = grads + TILE * plain_stride(s.HD); // (TILE, TILE + 4)
    int kv_head = blockIdx.x, b = blockIdx.y, first = (int)blockIdx.z * TILE, HD = s.HD, T = s.Tk;
    int x = threadIdx.x % 16, y = threadIdx.x / 16, rows = min(TILE, T - first), group = s.NH / s.NKV;
    const int32_t *starts = attention_starts(&s, b);
    int64_t kv_at = ((int64_t)b * T + first) * s.kv_stride + kv_head * HD, out_stride = (int64_t)s.NH * HD;
    float dkey[R][C], dvalue[R][C], factor[R], scale = 1.0f / sqrtf((float)HD);
    int end[R], last_end = attention_end(&s, starts, first + rows - 1);
    plain_clear<TILE>(dkey);
    plain_clear<TILE>(dvalue);
    UNROLL for (int i = 0; i < R; i++) end[i] = attention_end(&s, starts, first + y + 16 * i);
    plain_load<TILE>(keys, k + kv_at, s.kv_stride, rows, HD);
    plain_load<TILE>(values, v + kv_at, s.kv_stride, rows, HD);
    for (int head = kv_head * group; head < (kv_head + 1) * group; head++) {
        for (int query = first; query < last_end; query += TILE) {
            int64_t row = (int64_t)b * T + query, stat = ((int64_t)b * s.NH + head) * attention_rows(T) + query;
            __syncthreads(); // all have left the last tile
            plain_load<TILE>(queries, q + row * s.q_stride + head * HD, s.q_stride, T - query, HD);
            plain_load<TILE>(grads, dout + row * out_stride + head * HD, out_stride, T - query, HD);
            __syncthreads();
            float prob[R][R], dscore[R][R];
            float2 stat_of[R];
            UNROLL for (int j = 0; j < R; j++) stat_of[j] =
                query + x + 16 * j < T ? stats[stat + x + 16 * j] : make_float2(0.0f, 0.0f);
            plain_scores<TILE>(prob, keys, queries, HD);
            plain_scores<TILE>(dscore, values, grads, HD);
            plain_softmax<TILE>(prob, dscore, NULL, stat_of, scale, [&](int i, int j) {
                int at = query + x + 16 * j;
                return at >= first + y + 16 * i && at < end[i];
            });
            plain_add<TILE>(dvalue, prob, grads, weights, HD);
            plain_add<TILE>(dkey, dscore, queries, weights, HD);
        }
    }
    UNROLL for (int i = 0; i < R; i++) factor[i] = 1.0f;
    plain_store<TILE>(dv + kv_at, s.kv_stride, dvalue, factor, rows, HD);
    UNROLL for (int i = 0; i < R; i++) factor[i] = scale;
    plain_store<TILE>(dk + kv_at, s.kv_stride, dkey, factor, rows, HD);
}

#endif
