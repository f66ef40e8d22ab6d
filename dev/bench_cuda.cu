// Speed of the CUDA program against the card's own limits: `make bench DEVICE=cuda`, or
// build/bench_cuda [kernels] [train] [K=part of a kernel's name] [B=sequences of a micro-batch]
//
//   kernels  each op alone, at the shapes of the Llama-3.2-1B model: N 8192 rows = 4 sequences of 2048 tokens, C 2048,
//            QKV 3072, F 8192, V 128256; heads of 64 (32 over 8), and of 128 (16 over 8). K=matmul: those alone.
//            rotate is the step of a layer's matrices in their bases at d 768, ffn 2048, those of a shape together
//   train    whole steps of that model with random weights, T 2048, one micro-batch a step: the largest that fits of
//            16, 8, 4, 2, 1 sequences, or B=n
// Neither word: both. First the ceilings: the quicker of two ways to copy 1 GB, and products of square matrices by
// cuBLASLt, the best of three layouts.
//
// Columns of the kernels
//   us            of a call: the median of 9 stretches of calls that follow each other on the stream (3 stretches where
//   a
//                 call takes over 20 ms), between two events that are queued behind a call that is not counted. Calls
//                 take turns with several sets of buffers, four times the L2 cache together where one set is smaller,
//                 so that operands come from memory. Calls that wait for the host say (waits): their time has that in
//                 it
//   GB/s          bytes over time: those that the op must move, each operand once in its own type. Extra reading
//                 (statistics, partial sums, what a second pass finds in the cache) does not count as work done
//   % of copy     GB/s over the copy's, which counts bytes read plus bytes written
//   TFLOP/s       multiplications and additions over time. Causal attention by half: 4*N*T*NH*HD/2 forward, and 2.5
//                 times that backward: its five products, of which recomputing the scores is one
//   % of product  TFLOP/s over the ceiling of the same operands: bf16, or fp32 without TF32
// Columns of the training
//   tok/s, ms     median of 5 steps by the host's clock, from an idle stream to an idle stream
//   MFU           FLOPs a second (bench.h: recomputed scores do not count) over the card's dense bf16 peak as its maker
//                 gives it; n/a for a card that peaks[] below does not know, and for fp32
//   speed of light   share of the step that would be left if every product (by the same FLOPs) ran at the measured
//                 product's ceiling and every byte that the other ops must move at the copy's, one after the other
//   forward, head, backward, optimizer   shares of the stream's time, by events: layers, final norm and the bf16 copies
//                 of the weights; head and loss, forward and backward; layers; gradient norm and AdamW
#define BENCHMARK
#include "../train_gpt.cu"
#include "bench.h" // median, flops_per_token, fill_batch, rotate_product_flops

#ifdef BENCH_TINY // runs through the emulator in seconds: proves the code, no speed
#define BENCH_SPEC  "layers=2,d=128,heads=2,kv=1,ffn=256,vocab=500,tied=1"
#define BENCH_POOL  ((size_t)96 << 20)
#define BENCH_TIMES 2
enum { BENCH_B = 1, BENCH_T = 48, BENCH_RANK = 16, BENCH_SQUARE = 128, BENCH_HEAD = 40 };
enum { BENCH_ROTATED_C = 48, BENCH_ROTATED_F = 80 };
#else
#define BENCH_SPEC  "llama-3.2-1b"
#define BENCH_POOL  ((size_t)6 << 30)
#define BENCH_TIMES 9
enum { BENCH_B = 4, BENCH_T = 2048, BENCH_RANK = 256, BENCH_SQUARE = 8192, BENCH_HEAD = 2048 };
enum { BENCH_ROTATED_C = 768, BENCH_ROTATED_F = 2048 };
#endif

typedef struct {
    Stream *stream;
    const char *filter; // of kernels' names
    char *pool;         // all rows' buffers, of random values
    size_t pool_bytes, l2_bytes;
    cudaEvent_t from, to;
    double copy;       // GB/s
    double product[2]; // TFLOP/s of fp32 and bf16
} Bench;

// Dense bf16 peaks with fp32 sums, TFLOP/s, by the names that drivers give.
static const struct {
    const char *name;
    int is_prefix; // further variants have the same peak
    double tflops;
} peaks[] = {
    // clang-format off
    {"NVIDIA H200", 0, 989},
    {"NVIDIA H100 80GB HBM3", 0, 989},
    {"NVIDIA H100 PCIe", 0, 756},
    {"NVIDIA A100", 1, 312},
    {"NVIDIA L40S", 0, 362},
    {"NVIDIA GeForce RTX 4090", 0, 165},
    {"NVIDIA B200", 0, 2250},
    // clang-format on
};

// 0 where the card is not known.
static double peak_of(const char *card) {
    for (size_t i = 0; i < sizeof peaks / sizeof *peaks; i++) {
        size_t n = strlen(peaks[i].name);
        if (strncmp(card, peaks[i].name, n) == 0 && (peaks[i].is_prefix || card[n] == '\0')) return peaks[i].tflops;
    }
    return 0.0;
}

// ---------------------------------------------------------------------------------------------------------------------
// Buffers

// Two random bf16 values to a word, in [low, low + 1): sound as bf16 and, by the upper one, as fp32.
// grid ceil(n/256), block 256: a thread a word.
__global__ static void __launch_bounds__(256) bench_fill_kernel(uint32_t *words, int64_t n, float low) {
    int64_t i = (int64_t)blockIdx.x * 256 + threadIdx.x;
    if (i >= n) return;
    uint64_t z = (uint64_t)(i + 1) * 0x9E3779B97F4A7C15ull;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ z >> 27) * 0x94D049BB133111EBull;
    float first = (float)(z & 0xFFFFFF) / 16777216.0f + low, second = (float)(z >> 40) / 16777216.0f + low;
    words[i] = (uint32_t)bf16_of_float(first) << 16 | bf16_of_float(second);
}

static void bench_fill(void *to, size_t n_bytes, float low, Stream *stream) {
    int64_t n = (int64_t)(n_bytes / sizeof(uint32_t));
    LAUNCH(bench_fill_kernel, (unsigned)((n + 255) / 256), 256, 0, stream, (uint32_t *)to, n, low);
}

// Hands out the buffers of one call, from `at` on.
struct Pieces {
    char *at, *end;
    Stream *stream;
    template <typename T> T *take(int64_t n) {
        char *piece = at;
        size_t n_bytes = (sizeof(T) * (size_t)n + DEVICE_ALIGN - 1) / DEVICE_ALIGN * DEVICE_ALIGN;
        if (n_bytes > (size_t)(end - at)) {
            if (!stream->failed) error_set("the benchmark's %.1f GB are too little for this op", 1e-9 * BENCH_POOL);
            stream->failed = 1; // nothing is launched any more
            return (T *)piece;
        }
        at += n_bytes;
        return (T *)piece;
    }
    Weight weight(int64_t n) {
        Weight weight = {NULL, NULL, 0};
        if (MATMUL_BF16)
            weight.rounded = take<uint16_t>(n);
        else
            weight.full = take<float>(n);
        return weight;
    }
};

// ---------------------------------------------------------------------------------------------------------------------
// Timing

// Calls op with the buffers of set `set` of n_sets; returns the bytes it has taken.
template <class Op> static size_t bench_call(Bench *bench, const Op &op, size_t set_bytes, int set) {
    char *start = bench->pool + set_bytes * (size_t)set;
    Pieces pieces = {start, bench->pool + bench->pool_bytes, bench->stream};
    op(pieces);
    return (size_t)(pieces.at - start);
}

// Seconds a call of n_calls that follow each other.
template <class Op> static double bench_stretch(Bench *bench, const Op &op, size_t set_bytes, int n_sets, int n_calls) {
    float ms = 0.0f;
    Stream *stream = bench->stream;
    bench_call(bench, op, set_bytes, n_sets - 1); // keeps the device busy while the rest is queued
    stream_cuda(stream, cudaEventRecord(bench->from, stream->cuda));
    for (int i = 0; i < n_calls; i++) bench_call(bench, op, set_bytes, i % n_sets);
    stream_cuda(stream, cudaEventRecord(bench->to, stream->cuda));
    stream_cuda(stream, cudaEventSynchronize(bench->to));
    stream_cuda(stream, cudaEventElapsedTime(&ms, bench->from, bench->to));
    return 1e-3 * (double)ms / n_calls;
}

// Seconds of op(Pieces &), as the top of this file says.
template <class Op> static double bench_time(Bench *bench, const Op &op) {
    double took[BENCH_TIMES];
    bench_fill(bench->pool, bench->pool_bytes, -0.5f, bench->stream);
    size_t set_bytes = bench_call(bench, op, 0, 0); // makes plans and scratch too
    size_t wanted = set_bytes > 0 ? (4 * bench->l2_bytes + set_bytes - 1) / set_bytes : 1;
    size_t possible = set_bytes > 0 ? bench->pool_bytes / set_bytes : 1;
    int n_sets = (int)(wanted < possible ? wanted : possible);
    if (n_sets < 1 || bench->stream->failed) n_sets = 1;
    double once = bench_stretch(bench, op, set_bytes, n_sets, 1);
    int times = once > 0.02 && BENCH_TIMES > 3 ? 3 : BENCH_TIMES;
    int n_calls = once > 0.0 ? (int)(1e-3 / once) : 1;
    n_calls = n_calls < 1 ? 1 : n_calls > 50 ? 50 : n_calls;
    for (int i = 0; i < times; i++) took[i] = bench_stretch(bench, op, set_bytes, n_sets, n_calls);
    return median(took, times);
}

// ---------------------------------------------------------------------------------------------------------------------
// Ceilings

#define COPY_PACKS 4 // of a thread, all loaded before the first is stored

// to (n) = from (n), 16 bytes a value. grid ceil(n/1024), block 256.
__global__ static void __launch_bounds__(256) bench_copy_kernel(uint4 *to, const uint4 *from, int64_t n) {
    int64_t first = (int64_t)blockIdx.x * 256 * COPY_PACKS + threadIdx.x;
    uint4 packs[COPY_PACKS];
#pragma unroll
    for (int k = 0; k < COPY_PACKS; k++)
        if (first + k * 256 < n) packs[k] = from[first + k * 256];
#pragma unroll
    for (int k = 0; k < COPY_PACKS; k++)
        if (first + k * 256 < n) to[first + k * 256] = packs[k];
}

static void measure_copy(Bench *bench) {
    int64_t n_bytes = (int64_t)(bench->pool_bytes / 3) / 16 * 16;
    if (n_bytes > (int64_t)1 << 30) n_bytes = (int64_t)1 << 30;
    Stream *stream = bench->stream;
    double kernel = bench_time(bench, [=](Pieces &p) {
        uint4 *to = p.take<uint4>(n_bytes / 16), *from = p.take<uint4>(n_bytes / 16);
        unsigned blocks = (unsigned)((n_bytes / 16 + 256 * COPY_PACKS - 1) / (256 * COPY_PACKS));
        LAUNCH(bench_copy_kernel, blocks, 256, 0, stream, to, (const uint4 *)from, n_bytes / 16);
    });
    double library = bench_time(bench, [=](Pieces &p) {
        char *to = p.take<char>(n_bytes), *from = p.take<char>(n_bytes);
        stream_cuda(stream, cudaMemcpyAsync(to, from, (size_t)n_bytes, cudaMemcpyDeviceToDevice, stream->cuda));
    });
    bench->copy = 2e-9 * (double)n_bytes / fmin(kernel, library);
    printf("copy of %.2f GB: %.0f GB/s by a kernel, %.0f by cudaMemcpyAsync\n", 1e-9 * (double)n_bytes,
           2e-9 * (double)n_bytes / kernel, 2e-9 * (double)n_bytes / library);
}

// The best of three layouts of a square product, as the forward, the input's and the weight's gradient have them.
static void measure_product(Bench *bench, int bf16, int size) {
    double best = 0.0, square = (double)size * size;
    Stream *stream = bench->stream;
    for (int layout = 0; layout < 3; layout++) {
        MatmulShape shape = {size,        size,        size, size, size, size, 0, 0, 0,
                             layout == 2, layout == 0, bf16, bf16, 0,    0,    0, 0};
        double took = bench_time(bench, [=](Pieces &p) {
            int64_t n_bytes = (int64_t)size * size * (bf16 ? 2 : 4);
            char *out = p.take<char>(n_bytes), *a = p.take<char>(n_bytes), *b = p.take<char>(n_bytes);
            matmul_run(out, a, b, shape, 1.0f, 0.0f, stream);
        });
        best = fmax(best, 2e-12 * square * size / took);
    }
    bench->product[bf16] = best;
    printf("product of %d x %d matrices, %s: %.0f TFLOP/s\n", size, size, bf16 ? "bf16" : "fp32", best);
}

static int measure_ceilings(Bench *bench) {
    measure_copy(bench);
    measure_product(bench, 1, BENCH_SQUARE);
    measure_product(bench, 0, BENCH_SQUARE / 2);
    fflush(stdout);
    return stream_check(bench->stream);
}

// ---------------------------------------------------------------------------------------------------------------------
// Kernels

typedef struct {
    char name[40], shape[40];
    double bytes, flops; // of a call; 0: the column stays empty
    int bf16;            // which ceiling the FLOPs have
} Row;

__attribute__((format(printf, 5, 6))) static Row row_of(const char *name, double bytes, double flops, int bf16,
                                                        const char *shape, ...) {
    Row row;
    va_list args;
    snprintf(row.name, sizeof row.name, "%s", name);
    va_start(args, shape);
    vsnprintf(row.shape, sizeof row.shape, shape, args);
    va_end(args);
    row.bytes = bytes, row.flops = flops, row.bf16 = bf16;
    return row;
}

static void print_share(double value, double ceiling) {
    if (value > 0.0)
        printf(" %7.*f | %5.1f%% |", value < 100.0 ? 1 : 0, value, 100.0 * value / ceiling);
    else
        printf(" %7s | %6s |", "", "");
}

// Times op and prints the row, if the filter lets its name through.
template <class Op> static void bench_row(Bench *bench, const Row &row, const Op &op) {
    if (strstr(row.name, bench->filter) == NULL || bench->stream->failed) return;
    double took = bench_time(bench, op);
    if (bench->stream->failed) return;
    printf("| %-28s %-22s | %9.1f |", row.name, row.shape, 1e6 * took);
    print_share(1e-9 * row.bytes / took, bench->copy);
    print_share(1e-12 * row.flops / took, bench->product[row.bf16]);
    printf("\n");
    fflush(stdout);
}

// Positions (N), tokens (N), targets (N) in memory of their own: they are no random numbers.
typedef struct {
    int32_t *positions, *targets;
    uint32_t *tokens;
    double n_distinct; // tokens that occur
} Indices;

static int indices_alloc(Indices *indices, int B, int T, int V, Stream *stream) {
    Batch batch;
    size_t n_bytes = sizeof(int32_t) * (size_t)B * (size_t)T;
    char *seen = (char *)calloc((size_t)V, 1);
    indices->positions = (int32_t *)device_alloc(n_bytes), indices->targets = (int32_t *)device_alloc(n_bytes);
    indices->tokens = (uint32_t *)device_alloc(n_bytes), indices->n_distinct = 0.0;
    if (indices->positions == NULL || indices->targets == NULL || indices->tokens == NULL || seen == NULL ||
        batch_alloc(&batch, B, T))
        return -1;
    fill_batch(&batch, V);
    for (int n = 0; n < B * T; n++) indices->n_distinct += !seen[batch.tokens[n]], seen[batch.tokens[n]] = 1;
    device_copy(indices->tokens, batch.tokens, n_bytes, stream);
    device_copy(indices->targets, batch.targets, n_bytes, stream);
    rope_positions(indices->positions, B * T, T, 0, stream);
    batch_free(&batch);
    free(seen);
    return stream_check(stream);
}

static void indices_free(Indices *indices) {
    device_free(indices->positions);
    device_free(indices->targets);
    device_free(indices->tokens);
}

static void bench_rows_of_activations(Bench *bench, const Config *c, const Indices *indices, int B, int T) {
    int N = B * T, C = c->channels, F = c->ffn, HD = c->head_dim, heads = c->heads + c->kv_heads;
    int QKV = heads * HD + c->kv_heads * HD, V = c->vocab, half = HD / 2;
    double x = (double)sizeof(floatX), nc = (double)N * C, nf = (double)N * F;
    Stream *stream = bench->stream;
    bench_row(bench, row_of("device_copy", 2 * x * nc, 0, 0, "%d x %d", N, C), [=](Pieces &p) {
        floatX *to = p.take<floatX>((int64_t)N * C), *from = p.take<floatX>((int64_t)N * C);
        device_copy(to, from, sizeof(floatX) * (size_t)N * (size_t)C, stream);
    });
    bench_row(bench, row_of("embedding forward", (4 + x) * nc, 0, 0, "%d x %d of %d", N, C, V), [=](Pieces &p) {
        floatX *out = p.take<floatX>((int64_t)N * C);
        embedding_forward(out, indices->tokens, p.take<float>((int64_t)V * C), N, C, stream);
    });
    bench_row(bench, row_of("embedding backward", x * nc + 8 * C * indices->n_distinct, 0, 0, "%d x %d of %d", N, C, V),
              [=](Pieces &p) {
                  floatX *dout = p.take<floatX>((int64_t)N * C);
                  embedding_backward(p.take<float>((int64_t)V * C), dout, indices->tokens, N, C, stream);
              });
    bench_row(bench, row_of("rmsnorm forward", 2 * x * nc, 0, 0, "%d x %d", N, C), [=](Pieces &p) {
        floatX *out = p.take<floatX>((int64_t)N * C), *in = p.take<floatX>((int64_t)N * C);
        float *rstd = p.take<float>(N), *weight = p.take<float>(C);
        rmsnorm_forward(out, rstd, in, weight, N, C, 1e-5f, stream);
    });
    bench_row(bench, row_of("rmsnorm backward", 4 * x * nc, 0, 0, "%d x %d", N, C), [=](Pieces &p) {
        floatX *dx = p.take<floatX>((int64_t)N * C), *dout = p.take<floatX>((int64_t)N * C);
        floatX *in = p.take<floatX>((int64_t)N * C);
        float *rstd = p.take<float>(N), *weight = p.take<float>(C), *dweight = p.take<float>(C);
        rmsnorm_backward(dx, dweight, dout, in, weight, rstd, N, C, stream);
    });
    bench_row(bench, row_of("rope", 2 * x * N * heads * HD, 0, 0, "%d x %d of %d", N, heads * HD, QKV), [=](Pieces &p) {
        floatX *qkv = p.take<floatX>((int64_t)N * QKV);
        float *cos_table = p.take<float>((int64_t)T * half), *sin_table = p.take<float>((int64_t)T * half);
        rope_forward(qkv, cos_table, sin_table, indices->positions, N, heads, HD, QKV, stream);
    });
    bench_row(bench, row_of("swiglu forward", 3 * x * nf, 0, 0, "%d x %d", N, F), [=](Pieces &p) {
        floatX *out = p.take<floatX>((int64_t)N * F), *in = p.take<floatX>((int64_t)N * 2 * F);
        swiglu_forward(out, in, N, F, stream);
    });
    bench_row(bench, row_of("swiglu backward", 5 * x * nf, 0, 0, "%d x %d", N, F), [=](Pieces &p) {
        floatX *din = p.take<floatX>((int64_t)N * 2 * F), *dout = p.take<floatX>((int64_t)N * F);
        floatX *in = p.take<floatX>((int64_t)N * 2 * F);
        swiglu_backward(din, dout, in, N, F, stream);
    });
    int chunks[2] = {logits_chunk(c, N), BENCH_HEAD};
    for (int i = 0; i < (chunks[0] == chunks[1] ? 1 : 2); i++) {
        int rows = chunks[i] < N ? chunks[i] : N;
        for (int backward = 0; backward < 2; backward++) {
            const char *name = backward ? "cross_entropy, gradient too" : "cross_entropy";
            double bytes = (1 + backward) * x * rows * V;
            bench_row(bench, row_of(name, bytes, 0, 0, "%d x %d", rows, V), [=](Pieces &p) {
                floatX *logits = p.take<floatX>((int64_t)rows * V);
                cross_entropy(p.take<float>(rows), logits, indices->targets, rows, V, 1e-4f, backward, stream);
            });
        }
    }
}

// Ops over parameters: n values, those of the embedding where memory allows.
static void bench_rows_of_vectors(Bench *bench, const Config *c) {
    int64_t n = (int64_t)c->vocab * c->channels, most = (int64_t)(bench->pool_bytes / 24) / 1024 * 1024;
    if (n > most) n = most;
    double bytes = (double)n;
    AdamW adam = {0.9f, 0.999f, 1e-8f};
    Stream *stream = bench->stream;
    auto row = [=](const char *name, int a_value) { return row_of(name, a_value * bytes, 0, 0, "%lld", (long long)n); };
    bench_row(bench, row("adamw", 28), [=](Pieces &p) {
        float *param = p.take<float>(n), *grad = p.take<float>(n), *m = p.take<float>(n), *v = p.take<float>(n);
        adamw_update(param, grad, m, v, n, adam, 1e-5f, 0.1f, 1.0f, 10, stream);
    });
    bench_row(bench, row("sum_of_squares (waits)", 4),
              [=](Pieces &p) { (void)sum_of_squares(p.take<float>(n), n, stream); });
    bench_row(bench, row("vector_dot (waits)", 8), [=](Pieces &p) {
        float *a = p.take<float>(n), *b = p.take<float>(n);
        (void)vector_dot(a, b, n, stream);
    });
    bench_row(bench, row("bf16_round", 6), [=](Pieces &p) {
        float *from = p.take<float>(n);
        bf16_round(p.take<uint16_t>(n), from, n / 1024, 1024, 1024, stream);
    });
    bench_row(bench, row("vector_scale", 8), [=](Pieces &p) { vector_scale(p.take<float>(n), n, 0.99f, stream); });
    bench_row(bench, row("vector_round_bf16", 8), [=](Pieces &p) { vector_round_bf16(p.take<float>(n), n, stream); });
    bench_row(bench, row("vector_subtract", 12), [=](Pieces &p) {
        float *x = p.take<float>(n);
        vector_subtract(x, p.take<float>(n), n, stream);
    });
    bench_row(bench, row("vector_momentum", 12), [=](Pieces &p) {
        float *m = p.take<float>(n);
        vector_momentum(m, p.take<float>(n), 0.9f, n, stream);
    });
    bench_row(bench, row("vector_mean of 4", 20), [=](Pieces &p) {
        float *to = p.take<float>(n), *values[4];
        for (int i = 0; i < 4; i++) values[i] = p.take<float>(n);
        vector_mean(to, values, 4, n, stream);
    });
    bench_row(bench, row("outer_delta", 16), [=](Pieces &p) {
        float *error = p.take<float>(n), *global = p.take<float>(n);
        outer_delta(error, global, p.take<float>(n), n, stream);
    });
    bench_row(bench, row("outer_step", 28), [=](Pieces &p) {
        float *global = p.take<float>(n), *moment = p.take<float>(n), *local = p.take<float>(n);
        outer_step(global, moment, local, p.take<float>(n), 0.7f, 0.9f, 0.5f, n, stream);
    });
    bench_row(bench, row("codec_convert, fp32 to bf16", 6), [=](Pieces &p) {
        float *from = p.take<float>(n);
        codec_convert(p.take<__nv_bfloat16>(n), (const float *)from, n, stream);
    });
}

// The boundary's codecs. The mask: of 20 values one is kept. Memory is read 32 bytes at a time, so what a gather must
// read is the share of such pieces in which at least one value is wanted.
static int bench_rows_of_codec(Bench *bench, const Config *c, int N) {
    int H = c->channels;
    Codec codec;
    CodecContext context = codec_context(1, 0, 0, 3, 1);
    codec_init(&codec, H, 0.95f, MASK_SCALE_NONE, WIRE_BF16, 1);
    int K = codec_values(&codec, &context, H);
    MaskKey key = codec_key(&codec, &context);
    double x = (double)sizeof(floatX), touched = 1.0 - pow(1.0 - (double)K / H, 32.0 / x);
    int64_t n_bytes = (int64_t)N * H * 4;
    unsigned char *message = (unsigned char *)calloc((size_t)n_bytes, 1);
    Stream *stream = bench->stream;
    if (message == NULL) return error_set("out of memory for a message");
    double gather = touched * x * N * H + 2.0 * N * K, scatter = x * N * H + 2.0 * N * K;
    bench_row(bench, row_of("mask_gather", gather, 0, 0, "%d of %d x %d", K, N, H), [=](Pieces &p) {
        floatX *from = p.take<floatX>((int64_t)N * H);
        mask_gather(p.take<__nv_bfloat16>((int64_t)N * K), from, key, N, H, K, stream);
    });
    bench_row(bench, row_of("mask_scatter", scatter, 0, 0, "%d of %d x %d", K, N, H), [=](Pieces &p) {
        floatX *to = p.take<floatX>((int64_t)N * H);
        mask_scatter(to, (const __nv_bfloat16 *)p.take<__nv_bfloat16>((int64_t)N * K), key, N, H, K, 1.0f, stream);
    });
    for (int masked = 1; masked >= 0; masked--) {
        const char *name = masked ? "codec_encode, p 0.95 (waits)" : "codec_encode, dense (waits)";
        CodecContext how = context;
        how.masked = masked;
        bench_row(bench, row_of(name, 0, 0, 0, "%d x %d", N, H), [=](Pieces &p) {
            if (codec_encode(&codec, NULL, &how, p.take<floatX>((int64_t)N * H), N, H, message, n_bytes, stream) < 0)
                stream->failed = 1;
        });
    }
    free(message);
    QuantRow rows[] = {{H, 8, 0, 0}, {H, 2, 1, 0}, {H, 8, 0, 1}};
    static const char *const names[] = {"8 bits", "adaptive 2 bits", "rotated 8 bits"};
    for (int i = 0; i < 3; i++) {
        QuantRow row = rows[i];
        int64_t quantized = N * quant_row_bytes(H, row.bits);
        char label[40];
        snprintf(label, sizeof label, "quant_encode, %s", names[i]);
        bench_row(bench, row_of(label, x * N * H + (double)quantized, 0, 0, "%d x %d", N, H), [=](Pieces &p) {
            uint16_t *out = p.take<uint16_t>(quantized / 2 + 1);
            quant_encode(out, (const floatX *)p.take<floatX>((int64_t)N * H), N, row, stream);
        });
        snprintf(label, sizeof label, "quant_decode, %s", names[i]);
        bench_row(bench, row_of(label, x * N * H + (double)quantized, 0, 0, "%d x %d", N, H), [=](Pieces &p) {
            floatX *to = p.take<floatX>((int64_t)N * H);
            quant_decode(to, p.take<uint16_t>(quantized / 2 + 1), N, row, stream);
        });
    }
    int kept = topk_kept(codec_budget(&codec, H), 2, H), bits = topk_index_bits(H), set_bytes = topk_set_bytes(kept, H);
    double chosen = x * N * H + (double)N * (set_bytes + 2 * kept);
    bench_row(bench, row_of("topk_choose", chosen, 0, 0, "%d of %d x %d", kept, N, H), [=](Pieces &p) {
        unsigned char *sets = p.take<unsigned char>((int64_t)N * set_bytes);
        uint16_t *index = p.take<uint16_t>((int64_t)N * kept);
        LAUNCH(topk_choose_kernel, (unsigned)(N / TOPK_TOKENS + 1), dim3(32, TOPK_TOKENS), 0, stream, sets, index,
               p.take<floatX>((int64_t)N * H), N, H, kept, bits, set_bytes);
    });
    return 0;
}

// The three products of a weight (M, K) over N rows.
static void bench_product(Bench *bench, const char *name, int N, int K, int M, int accumulate) {
    double flops = 2.0 * N * K * M;
    char label[40];
    Stream *stream = bench->stream;
    snprintf(label, sizeof label, "matmul %s forward", name);
    bench_row(bench, row_of(label, 0, flops, MATMUL_BF16, "%d x %d x %d", N, M, K), [=](Pieces &p) {
        floatX *out = p.take<floatX>((int64_t)N * M), *x = p.take<floatX>((int64_t)N * K);
        matmul_forward(out, x, p.weight((int64_t)K * M), N, K, M, accumulate ? out : NULL, stream);
    });
    MatmulShape input = {N, K, M,           M,           K, K, 0, 0, 0,
                         0, 0, MATMUL_BF16, MATMUL_BF16, 0, 0, 0, 0}; // as in matmul_backward
    snprintf(label, sizeof label, "matmul %s dx", name);
    bench_row(bench, row_of(label, 0, flops, MATMUL_BF16, "%d x %d x %d", N, K, M), [=](Pieces &p) {
        floatX *dx = p.take<floatX>((int64_t)N * K), *dout = p.take<floatX>((int64_t)N * M);
        matmul_run(dx, dout, matmul_weight(p.weight((int64_t)K * M), K, M, stream), input, 1.0f, 0.0f, stream);
    });
    snprintf(label, sizeof label, "matmul %s dweight +=", name);
    bench_row(bench, row_of(label, 0, flops, MATMUL_BF16, "%d x %d x %d", M, K, N), [=](Pieces &p) {
        float *dweight = p.take<float>((int64_t)K * M);
        floatX *dout = p.take<floatX>((int64_t)N * M), *x = p.take<floatX>((int64_t)N * K);
        matmul_product(dweight, K, dout, M, 1, x, K, 0, M, K, N, MATMUL_BF16, 1, stream);
    });
}

static void bench_rows_of_products(Bench *bench, const Config *c, int N) {
    int C = c->channels, A = (int)config_q_dim(c), QKV = A + 2 * (int)config_kv_dim(c), F = c->ffn;
    bench_product(bench, "qkv", N, C, QKV, 0);
    bench_product(bench, "o", N, A, C, 1);
    bench_product(bench, "gate_up", N, C, 2 * F, 0);
    bench_product(bench, "down", N, F, C, 1);
    int chunk = logits_chunk(c, N), rows = BENCH_HEAD < N ? BENCH_HEAD : N;
    bench_product(bench, "head chunk", chunk, C, c->vocab, 0);
    if (rows != chunk) bench_product(bench, "head", rows, C, c->vocab, 0);
}

static void bench_attention(Bench *bench, int B, int T, int NH, int NKV, int HD) {
    int A = NH * HD, KV = NKV * HD, QKV = A + 2 * KV, N = B * T;
    double forward = 4.0 * N * T * A / 2.0;
    AttentionShape shape = {B, T, T, NH, NKV, HD, QKV, QKV, NULL, 0};
    Stream *stream = bench->stream;
    bench_row(bench, row_of("attention forward", 0, forward, MATMUL_BF16, "%dx%d, %d/%d of %d", B, T, NH, NKV, HD),
              [=](Pieces &p) {
                  floatX *out = p.take<floatX>((int64_t)N * A), *qkv = p.take<floatX>((int64_t)N * QKV);
                  attention_forward(out, p.take<float>((int64_t)N * NH), qkv, qkv + A, qkv + A + KV, shape, stream);
              });
    bench_row(bench,
              row_of("attention backward", 0, 2.5 * forward, MATMUL_BF16, "%dx%d, %d/%d of %d", B, T, NH, NKV, HD),
              [=](Pieces &p) {
                  floatX *out = p.take<floatX>((int64_t)N * A), *qkv = p.take<floatX>((int64_t)N * QKV);
                  floatX *dout = p.take<floatX>((int64_t)N * A), *dqkv = p.take<floatX>((int64_t)N * QKV);
                  attention_backward(dqkv, dqkv + A, dqkv + A + KV, dout, out, p.take<float>((int64_t)N * NH), qkv,
                                     qkv + A, qkv + A + KV, shape, stream);
              });
}

// What the anchor and the outer steps do with one matrix (m, n); fp32.
static void bench_rows_of_matrices(Bench *bench, int m, int n) {
    int side = m < n ? m : n, rank = BENCH_RANK, thin = side / 64 > 0 ? side / 64 : 1;
    double mn = (double)m * n;
    Stream *stream = bench->stream;
    for (int full = 0; full < 2; full++) {
        int r = full ? side : rank;
        const char *name = full ? "spectral_filter, full" : "spectral_filter";
        double flops = 4.0 * r * mn + 4.0 * r * r * side;
        bench_row(bench, row_of(name, 0, flops, 0, "%d x %d rank %d", m, n, r), [=](Pieces &p) {
            float *grad = p.take<float>((int64_t)m * n), *u = p.take<float>((int64_t)m * r), *d = p.take<float>(r);
            spectral_filter(grad, u, d, p.take<float>((int64_t)n * r), m, n, r, 0.3f, stream);
        });
    }
    auto row = [=](const char *name) { return row_of(name, 0, 2.0 * mn * thin, 0, "%d x %d rank %d", m, n, thin); };
    bench_row(bench, row("powersgd_left"), [=](Pieces &p) {
        float *delta = p.take<float>((int64_t)m * n), *q = p.take<float>((int64_t)n * thin);
        powersgd_left(p.take<float>((int64_t)m * thin), delta, q, m, n, thin, stream);
    });
    bench_row(bench, row("powersgd_right"), [=](Pieces &p) {
        float *delta = p.take<float>((int64_t)m * n), *left = p.take<float>((int64_t)m * thin);
        powersgd_right(p.take<float>((int64_t)n * thin), delta, left, m, n, thin, stream);
    });
    bench_row(bench, row("powersgd_expand"), [=](Pieces &p) {
        float *left = p.take<float>((int64_t)m * thin), *right = p.take<float>((int64_t)n * thin);
        powersgd_expand(p.take<float>((int64_t)m * n), left, right, m, n, thin, stream);
    });
    bench_row(bench, row("powersgd_error"), [=](Pieces &p) {
        float *error = p.take<float>((int64_t)m * n), *left = p.take<float>((int64_t)m * thin);
        powersgd_error(error, error, left, p.take<float>((int64_t)n * thin), m, n, thin, stream);
    });
    bench_row(bench, row_of("orthonormalize (waits)", 0, 0, 0, "%d x %d", m, thin), [=](Pieces &p) {
        if (orthonormalize(p.take<float>((int64_t)m * thin), m, thin, stream)) stream->failed = 1;
    });
    for (int warm = 1; warm >= 0; warm--) {
        double flops = 4.0 * mn * (rank + SVD_OVERSAMPLE) * (warm ? SVD_WARM_ITERATIONS : SVD_COLD_ITERATIONS);
        const char *name = warm ? "svd_truncated, warm (waits)" : "svd_truncated, cold (waits)";
        bench_row(bench, row_of(name, 0, flops, 0, "%d x %d rank %d", m, n, rank), [=](Pieces &p) {
            float *u = p.take<float>((int64_t)m * rank), *s = p.take<float>(rank);
            float *v = p.take<float>((int64_t)n * rank), *a = p.take<float>((int64_t)m * n);
            if (svd_truncated(u, s, v, a, m, n, rank, warm, 1, 0, stream)) stream->failed = 1;
        });
    }
}

// The step of `count` matrices together, both sides rotated by second moments, without a refresh and with one.
static void bench_rotation(Bench *bench, int m, int n, int count) {
    Stream *stream = bench->stream;
    Optimizer optimizer = {OPTIMIZER_ROTATE, ROTATE_2ND, ROTATE_BI, REFRESH_UNIFORM, 10, 4096};
    RotateSides sides = rotate_sides(&optimizer, m, n);
    int64_t values = (int64_t)count * m * n, bases = count * rotate_state_floats(sides, ROTATE_2ND, m, n);
    double flops = count * rotate_product_flops(sides, 1, m, n);
    for (int due = 0; due < 2; due++) {
        const char *name = due ? "rotate, one refreshed (waits)" : "rotate";
        bench_row(bench, row_of(name, 0, flops, 0, "%d of %d x %d", count, m, n), [=](Pieces &p) {
            RotateRefresh refresh[4] = {due ? ROTATE_WARM : ROTATE_KEEP, ROTATE_KEEP, ROTATE_KEEP, ROTATE_KEEP};
            AdamW adam = {0.9f, 0.999f, 1e-8f};
            float *param = p.take<float>(values), *grad = p.take<float>(values), *mean = p.take<float>(values);
            float *v = p.take<float>(values), *state = p.take<float>(bases);
            rotate_update_group(param, grad, mean, v, state, m, n, count, (int64_t)m * n, &optimizer, refresh, adam,
                                1e-5f, 0.01f, 1.0f, 2, stream);
        });
    }
}

static int bench_kernels(Bench *bench) {
    Config config;
    Indices indices;
    int B = BENCH_B, T = BENCH_T, HD;
    if (config_from_spec(&config, BENCH_SPEC) || indices_alloc(&indices, B, T, config.vocab, bench->stream)) return -1;
    HD = config.head_dim;
    printf("\n| %-51s |        us |    GB/s | %% copy | TFLOP/s | %% prod |\n", "kernel, shape");
    printf("|---|--:|--:|--:|--:|--:|\n");
    bench_rows_of_activations(bench, &config, &indices, B, T);
    bench_rows_of_vectors(bench, &config);
    if (bench_rows_of_codec(bench, &config, B * T)) return -1;
    bench_rows_of_products(bench, &config, B * T);
    bench_attention(bench, B, T, config.heads, config.kv_heads, HD);
    int wide_heads = (int)config_q_dim(&config) / 128;
    bench_attention(bench, B, T, wide_heads, wide_heads < config.kv_heads ? wide_heads : config.kv_heads, 128);
    bench_rows_of_matrices(bench, config.ffn, config.channels);
    bench_rotation(bench, BENCH_ROTATED_C, BENCH_ROTATED_C, 4);
    bench_rotation(bench, BENCH_ROTATED_F, BENCH_ROTATED_C, 2);
    bench_rotation(bench, BENCH_ROTATED_C, BENCH_ROTATED_F, 1);
    indices_free(&indices);
    return stream_check(bench->stream);
}

// ---------------------------------------------------------------------------------------------------------------------
// Training

enum { TRAIN_STEPS = 5, TRAIN_MARKS = 5 };

// Random weights, norms one: speed does not depend on more, as long as nothing overflows.
static void fill_weights(Stage *stage, Stream *stream) {
    bench_fill(stage->params, sizeof(float) * (size_t)stage->arena_floats, -0.5f, stream);
    vector_scale(stage->params, stage->arena_floats, 0.06f, stream);
    for (int i = 0; i < stage->n_tensors; i++) {
        const Tensor *tensor = &stage->tensors[i];
        float *values = stage->params + tensor->offset;
        if (tensor->n_dims == 2) continue;
        for (int64_t at = 0; at < tensor->n; at++) stage->staging[at] = 1.0f;
        device_copy(values, stage->staging, sizeof(float) * (size_t)tensor->n, stream);
    }
}

// One step, with an event before and after each part. Returns 0 or -1.
static int marked_step(Stage *stage, const Batch *batch, int64_t step, cudaEvent_t *marks, double *loss) {
    Stream *stream = stage->stream;
    AdamW adam = {0.9f, 0.999f, 1e-8f};
    int B = batch->b, T = batch->T;
    CUDA_CHECK(cudaEventRecord(marks[0], stream->cuda));
    stage_begin(stage, stream);
    stage_forward(stage, 0, batch->tokens, NULL, B, T, NULL, NULL, stream);
    CUDA_CHECK(cudaEventRecord(marks[1], stream->cuda));
    head_loss(stage, batch->targets, B * T, 1, 1.0f / (float)batch->n_valid, 1, stream);
    CUDA_CHECK(cudaEventRecord(marks[2], stream->cuda));
    stage_backward(stage, 0, NULL, B, T, 1, NULL, stream);
    CUDA_CHECK(cudaEventRecord(marks[3], stream->cuda));
    stage_update(stage, adam, 1e-5f, 0.01f, stage_grad_norm(stage, stream), 1.0f, step, stream);
    CUDA_CHECK(cudaEventRecord(marks[4], stream->cuda));
    CUDA_CHECK(cudaEventSynchronize(marks[4]));
    *loss = stage_take_loss(stage, stream);
    return stream_check(stream);
}

// Bytes that the ops of a step must move beside its products: the same counts as in the table of kernels. The residual
// stream's copies are not among them: a product could write elsewhere than it adds from.
static double step_bytes(const Stage *stage, double N) {
    const Config *c = &stage->config;
    double x = (double)sizeof(floatX), C = c->channels, F = c->ffn, V = c->vocab;
    double rotated = (double)(c->heads + c->kv_heads) * c->head_dim;
    double layer = 2 * (2 + 4) * x * C + 2 * 2 * x * rotated + (3 + 5) * x * F; // norms, rope, swiglu
    double ends = (4 + x) * C + (x + 8) * C + (2 + 4) * x * C + 2 * x * V;      // embedding, final norm, cross-entropy
    double parameter = 28 + 4 + (stage->rounded != NULL ? 6 : 0);               // adamw, gradient norm, bf16 copy
    return N * (c->n_layers * layer + ends) + parameter * (double)stage->n_params;
}

static void print_training(const Bench *bench, const Stage *stage, const Batch *batch, double step, double *parts) {
    cudaDeviceProp card;
    size_t free_bytes = 0, bytes = 0;
    char mfu[32] = "n/a";
    int N = batch->b * batch->T;
    double flops = flops_per_token(stage, batch->T) * N, total = 0.0, peak = 0.0;
    double light = flops / (1e12 * bench->product[MATMUL_BF16]) + step_bytes(stage, N) / (1e9 * bench->copy);
    if (MATMUL_BF16 && cudaGetDeviceProperties(&card, bench->stream->device) == cudaSuccess) peak = peak_of(card.name);
    if (peak > 0.0) snprintf(mfu, sizeof mfu, "%.1f%%", 1e-10 * flops / step / peak);
    (void)cudaMemGetInfo(&free_bytes, &bytes);
    for (int i = 0; i < TRAIN_MARKS - 1; i++) total += parts[i];
    printf("\n| training, shape                    |   tok/s |     ms |   MFU | speed of light | forward |  head | "
           "backward | optimizer | GB used |\n|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|\n");
    printf("| %s, %s, B %d, T %d | %7.0f | %6.1f | %5s | %13.1f%% | %6.1f%% | %4.1f%% | %7.1f%% | %8.1f%% | %7.1f |\n",
           BENCH_SPEC, MATMUL_BF16 ? "bf16" : "fp32", batch->b, batch->T, N / step, 1e3 * step, mfu,
           100.0 * light / step, 100.0 * parts[0] / total, 100.0 * parts[1] / total, 100.0 * parts[2] / total,
           100.0 * parts[3] / total, 1e-9 * (double)(bytes - free_bytes));
}

static int bench_steps(Bench *bench, Stage *stage, const Batch *batch) {
    double took[TRAIN_STEPS], each[TRAIN_MARKS][TRAIN_STEPS], parts[TRAIN_MARKS], loss = 0.0;
    cudaEvent_t marks[TRAIN_MARKS];
    for (int i = 0; i < TRAIN_MARKS; i++) CUDA_CHECK(cudaEventCreate(&marks[i]));
    for (int step = -2; step < TRAIN_STEPS; step++) { // two to make plans and reach the card's clocks
        double start = seconds();
        if (marked_step(stage, batch, step + 3, marks, &loss)) return -1;
        if (step < 0) continue;
        took[step] = seconds() - start;
        for (int i = 0; i < TRAIN_MARKS - 1; i++) {
            float ms;
            CUDA_CHECK(cudaEventElapsedTime(&ms, marks[i], marks[i + 1]));
            each[i][step] = 1e-3 * (double)ms;
        }
    }
    for (int i = 0; i < TRAIN_MARKS - 1; i++) parts[i] = median(each[i], TRAIN_STEPS);
    for (int i = 0; i < TRAIN_MARKS; i++) CUDA_CHECK(cudaEventDestroy(marks[i]));
    if (!isfinite(loss)) return error_set("the loss is %g", loss);
    print_training(bench, stage, batch, median(took, TRAIN_STEPS), parts);
    return 0;
}

// Plans the stage for the most sequences that fit, 1 GB left; 0 if not even one does.
static int fitting_batch(Stage *stage, int T, const Stream *stream) {
    size_t free_bytes, bytes;
    CUDA_CHECK(cudaMemGetInfo(&free_bytes, &bytes));
    for (int B = 16; B >= 1; B /= 2) {
        if (stage_plan(stage, B, T, 1, 0)) return -1;
        StageBytes plan = stage_bytes(stage, stream->precision, stream->threads);
        if (stage_bytes_sum(&plan) + ((int64_t)1 << 30) <= (int64_t)free_bytes) return B;
    }
    return 0;
}

static int bench_train(Bench *bench, int B) {
    Config config;
    Stage stage;
    Batch batch;
    if (config_from_spec(&config, BENCH_SPEC) || stage_table(&stage, &config, 0, config.n_layers)) return -1;
    if (B == 0) B = fitting_batch(&stage, BENCH_T, bench->stream);
    if (B < 1) return B < 0 ? -1 : error_set("no sequence of %d tokens fits into this card's memory", BENCH_T);
    if (stage_plan(&stage, B, BENCH_T, 1, 0) || stage_alloc(&stage, bench->stream) || batch_alloc(&batch, B, BENCH_T))
        return -1;
    fill_weights(&stage, bench->stream);
    fill_batch(&batch, config.vocab);
    int result = bench_steps(bench, &stage, &batch);
    batch_free(&batch);
    stage_free(&stage);
    return result;
}

// ---------------------------------------------------------------------------------------------------------------------

static int bench_open(Bench *bench) {
    cudaDeviceProp card;
    size_t free_bytes, bytes;
    int runtime, l2_bytes, device;
    if (stream_create(&bench->stream, MATMUL_BF16 ? PRECISION_BF16 : PRECISION_FP32, omp_get_num_procs())) return -1;
    device = bench->stream->device;
    CUDA_CHECK(cudaGetDeviceProperties(&card, device));
    CUDA_CHECK(cudaDeviceGetAttribute(&l2_bytes, cudaDevAttrL2CacheSize, device));
    CUDA_CHECK(cudaRuntimeGetVersion(&runtime));
    CUDA_CHECK(cudaMemGetInfo(&free_bytes, &bytes));
    CUDA_CHECK(cudaEventCreate(&bench->from));
    CUDA_CHECK(cudaEventCreate(&bench->to));
    bench->l2_bytes = (size_t)l2_bytes;
    bench->pool_bytes = BENCH_POOL < free_bytes / 2 ? BENCH_POOL : free_bytes / 2 / DEVICE_ALIGN * DEVICE_ALIGN;
    printf("%s, %d multiprocessors, %.1f GB, L2 %.0f MB, CUDA %d.%d, %s activations\n", card.name,
           card.multiProcessorCount, 1e-9 * (double)bytes, 1e-6 * l2_bytes, runtime / 1000, runtime / 10 % 100,
           MATMUL_BF16 ? "bf16" : "fp32");
    return (bench->pool = (char *)device_alloc(bench->pool_bytes)) != NULL ? 0 : -1;
}

static int bench_run(Bench *bench, int kernels, int train, int B) {
    if (bench_open(bench) || measure_ceilings(bench)) return -1;
    if (kernels && bench_kernels(bench)) return -1;
    device_free(bench->pool); // the training shall have all memory
    bench->pool = NULL;
    return train ? bench_train(bench, B) : 0;
}

int main(int argc, char **argv) {
    Bench bench = {};
    int kernels = 0, train = 0, B = 0;
    bench.filter = "";
    for (int i = 1; i < argc; i++) {
        if (strncmp(argv[i], "K=", 2) == 0)
            bench.filter = argv[i] + 2, kernels = 1;
        else if (strncmp(argv[i], "B=", 2) == 0 && atoi(argv[i] + 2) > 0)
            B = atoi(argv[i] + 2), train = 1;
        else if (strcmp(argv[i], "kernels") == 0)
            kernels = 1;
        else if (strcmp(argv[i], "train") == 0)
            train = 1;
        else {
            printf("bench_cuda: %s: kernels, train, K=part of a kernel's name or B=sequences\n", argv[i]);
            return 1;
        }
    }
    int all = !kernels && !train, result = bench_run(&bench, kernels || all, train || all, B);
    if (result != 0) printf("bench_cuda: %s\n", error_message);
    if (bench.from != NULL) (void)cudaEventDestroy(bench.from);
    if (bench.to != NULL) (void)cudaEventDestroy(bench.to);
    stream_destroy(bench.stream);
    return result != 0;
}
