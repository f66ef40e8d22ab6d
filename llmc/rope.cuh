// Rotary position embedding, CUDA (Su et al. 2021), half-split as in Hugging Face checkpoints: dimension i of a head is
// paired with i + HD/2. Frequencies from rope_config.h, tables in fp32.
//   out[i]        = x[i] * cos - x[i + HD/2] * sin
//   out[i + HD/2] = x[i + HD/2] * cos + x[i] * sin          in place; backward is the rotation by the opposite angle
#ifndef LLMC_ROPE_CUH
#define LLMC_ROPE_CUH

#include <stddef.h> // size_t
#include <stdint.h> // fixed-width integers

#include "device.cuh"    // floatX, Stream, LAUNCH, scratch_get, device_copy
#include "elements.cuh"  // values_load, values_store, aligned_16
#include "rope_config.h" // rope_inv_freq, for the caller

#define ROPE_BLOCK 256

// grid ceil(T*half/256), block 256: a thread a value of both tables. Writes 8*T*half bytes.
__global__ static void __launch_bounds__(ROPE_BLOCK)
    rope_tables_kernel(float *cos_table, float *sin_table, const float *inv_freq, int64_t n, int half) {
    int64_t i = (int64_t)blockIdx.x * ROPE_BLOCK + threadIdx.x;
    if (i >= n) return;
    float angle = (float)(i / half) * inv_freq[i % half]; // no fast sine: angles reach T radians
    cos_table[i] = cosf(angle);
    sin_table[i] = sinf(angle);
}

// grid ceil(N/256), block 256. Writes 4*N bytes.
__global__ static void __launch_bounds__(ROPE_BLOCK)
    rope_positions_kernel(int32_t *positions, int N, int T, int first) {
    int n = (int)blockIdx.x * ROPE_BLOCK + (int)threadIdx.x;
    if (n < N) positions[n] = first + n % T;
}

// grid ceil(N/256), block 256. Reads and writes 4*N bytes.
__global__ static void __launch_bounds__(ROPE_BLOCK)
    rope_document_positions_kernel(int32_t *positions, const int32_t *starts, int N, int T) {
    int n = (int)blockIdx.x * ROPE_BLOCK + (int)threadIdx.x;
    if (n < N) positions[n] = n % T - starts[n];
}

// Row blockIdx.x: a thread turns WIDTH pairs of a head. grid N, block: the packs of a row, up to 256 threads. WIDTH > 1
// needs HD/2, row_stride and the addresses to allow 16-byte accesses. No shared memory.
// Moves 4*N*heads*HD bytes in bf16; the tables' rows stay in the cache.
template <int WIDTH>
__global__ static void __launch_bounds__(ROPE_BLOCK)
    rope_rotate_kernel(floatX *x, const float *cos_table, const float *sin_table, const int32_t *positions, int heads,
                       int half, int row_stride, float sign) {
    const float *cos_row = cos_table + (size_t)positions[blockIdx.x] * half;
    const float *sin_row = sin_table + (size_t)positions[blockIdx.x] * half;
    int packs = half / WIDTH; // of half a head
    for (int i = (int)threadIdx.x; i < heads * packs; i += (int)blockDim.x) {
        int head = i / packs, at = i % packs * WIDTH;
        floatX *low = x + (size_t)blockIdx.x * row_stride + (size_t)head * 2 * half + at, *high = low + half;
        Values<WIDTH> a = values_load<WIDTH>(low), b = values_load<WIDTH>(high);
        Values<WIDTH> c = values_load<WIDTH>(cos_row + at), s = values_load<WIDTH>(sin_row + at);
        Values<WIDTH> new_low, new_high;
#pragma unroll
        for (int j = 0; j < WIDTH; j++) {
            new_low.v[j] = a.v[j] * c.v[j] - b.v[j] * (sign * s.v[j]);
            new_high.v[j] = b.v[j] * c.v[j] + a.v[j] * (sign * s.v[j]);
        }
        values_store(low, new_low);
        values_store(high, new_high);
    }
}

// cos, sin (T, HD/2) for positions 0..T-1. inv_freq (HD/2) on the host. The angle is rounded to fp32 as transformers
// does. Waits for the stream.
static inline void rope_tables(float *cos_table, float *sin_table, const float *inv_freq, int T, int HD,
                               Stream *stream) {
    int half = HD / 2;
    int64_t n = (int64_t)T * half;
    size_t n_bytes = sizeof(float) * (size_t)half;
    float *on_device = (float *)scratch_get(&stream->scratch[SCRATCH_OP], n_bytes);
    if (on_device == NULL) {
        stream->failed = 1;
        return;
    }
    device_copy(on_device, inv_freq, n_bytes, stream);
    LAUNCH(rope_tables_kernel, (unsigned)((n + ROPE_BLOCK - 1) / ROPE_BLOCK), ROPE_BLOCK, 0, stream, cos_table,
           sin_table, (const float *)on_device, n, half);
}

// positions (N) of a batch of sequences of T tokens that begin at `first`
static inline void rope_positions(int32_t *positions, int N, int T, int first, Stream *stream) {
    LAUNCH(rope_positions_kernel, (unsigned)((N + ROPE_BLOCK - 1) / ROPE_BLOCK), ROPE_BLOCK, 0, stream, positions, N, T,
           first);
}

// positions (N) of a batch of sequences of T tokens that count anew in each document; starts (N): the row of its
// sequence at which the document of each row begins
static inline void rope_document_positions(int32_t *positions, const int32_t *starts, int N, int T, Stream *stream) {
    LAUNCH(rope_document_positions_kernel, (unsigned)((N + ROPE_BLOCK - 1) / ROPE_BLOCK), ROPE_BLOCK, 0, stream,
           positions, starts, N, T);
}

static inline void rope_rotate(floatX *x, const float *cos_table, const float *sin_table, const int32_t *positions,
                               int N, int heads, int HD, int row_stride, float sign, Stream *stream) {
    int half = HD / 2, packed = half % FLOATX_WIDTH == 0 && row_stride % FLOATX_WIDTH == 0;
    packed = packed && aligned_16(x, cos_table, sin_table);
    int threads = heads * half / (packed ? FLOATX_WIDTH : 1);
    int block = threads < ROPE_BLOCK ? (threads + 31) / 32 * 32 : ROPE_BLOCK;
    if (packed)
        LAUNCH((rope_rotate_kernel<FLOATX_WIDTH>), (unsigned)N, block, 0, stream, x, cos_table, sin_table, positions,
               heads, half, row_stride, sign);
    else
        LAUNCH((rope_rotate_kernel<1>), (unsigned)N, block, 0, stream, x, cos_table, sin_table, positions, heads, half,
               row_stride, sign);
}

// x: N rows of row_stride values, the first heads*HD of each are rotated; positions (N) index the tables (T, HD/2).
static inline void rope_forward(floatX *x, const float *cos_table, const float *sin_table, const int32_t *positions,
                                int N, int heads, int HD, int row_stride, Stream *stream) {
    rope_rotate(x, cos_table, sin_table, positions, N, heads, HD, row_stride, 1.0f, stream);
}

// dx as x above: gradient with respect to the rotated values in, with respect to the plain ones out.
static inline void rope_backward(floatX *dx, const float *cos_table, const float *sin_table, const int32_t *positions,
                                 int N, int heads, int HD, int row_stride, Stream *stream) {
    rope_rotate(dx, cos_table, sin_table, positions, N, heads, HD, row_stride, -1.0f, stream);
}

#endif
