// Where tensors live and who computes: memory and the stream every op takes. This is the CPU's side; ops of a CUDA
// build take a stream of the same name. Only ops look inside tensor memory, everything else moves it through here.
//
//   Stream *stream;  stream_create(&stream, PRECISION_BF16, threads);
//   float *x = (float *)device_alloc(n * sizeof *x);
//   ... ops(x, stream) ...
//   if (stream_check(stream)) return -1;      // an op has failed on this stream: the message says which
#ifndef LLMC_DEVICE_H
#define LLMC_DEVICE_H

#include <dnnl.h>     // the matrix library's engine and stream
#include <omp.h>      // omp_set_num_threads
#include <stdint.h>   // fixed-width integers
#include <stdio.h>    // snprintf
#include <stdlib.h>   // free
#include <string.h>   // memset
#include <sys/mman.h> // mmap, madvise

#include "error.h"
#include "host_memory.h" // host_memory, host_memory_left

typedef float floatX; // storage type of activations on this backend

typedef enum { PRECISION_FP32 = 0, PRECISION_BF16 = 1 } Precision; // inputs of matrix products; sums are fp32

#define DEVICE_ALIGN      64
#define DEVICE_KEEPS_BF16 0 // 1: products outside training want the weights' bf16 copies too
#define DEVICE_IS_HOST    1 // 1: tensors live in the host's memory
// Sizes that suit the device: tokens of a micro-batch, logits that exist at once.
#define DEVICE_MICRO_TOKENS 1024
#define DEVICE_LOGITS       ((int64_t)32 << 20)

// Under ASan the gaps between the pieces of an arena are forbidden ground.
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#define device_forbid(pointer, n_bytes) ASAN_POISON_MEMORY_REGION(pointer, n_bytes)
#define DEVICE_GAP                      64
#else
#define device_forbid(pointer, n_bytes) ((void)(pointer), (void)(n_bytes))
#define DEVICE_GAP                      0
#endif

#ifdef TESTING
static int64_t device_taken; // bytes handed out and not given back: tests hold plans against it
#define device_count(n_bytes) __atomic_fetch_add(&device_taken, (int64_t)(n_bytes), __ATOMIC_SEQ_CST)
#else
#define device_count(n_bytes) ((void)0)
#endif

// Zeroed memory of n_bytes, aligned to a cache line; NULL with an error message when there is none.
// Large pieces come straight from the kernel with huge pages: fewer TLB misses, and untouched pages cost nothing.
static inline void *device_alloc(size_t n_bytes) {
    size_t total = n_bytes + DEVICE_ALIGN; // the size is kept in front for device_free
    if (total < n_bytes) {
        error_set("out of memory: %zu bytes asked for", n_bytes);
        return NULL;
    }
    char *base = (char *)mmap(NULL, total, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED) {
        error_set("out of memory: %.1f MB asked for; try a smaller --micro-batch or --recompute", 1e-6 * n_bytes);
        return NULL;
    }
    if (total >= ((size_t)4 << 20)) madvise(base, total, MADV_HUGEPAGE); // advice only: no matter if refused
    *(size_t *)base = total;
    device_count(total);
    return base + DEVICE_ALIGN;
}

static inline void device_free(void *pointer) {
    if (pointer == NULL) return;
    char *base = (char *)pointer - DEVICE_ALIGN;
#if defined(__SANITIZE_ADDRESS__)
    ASAN_UNPOISON_MEMORY_REGION(base, *(size_t *)base); // the addresses will serve others
#endif
    device_count(-(int64_t) * (size_t *)base);
    munmap(base, *(size_t *)base);
}

// A buffer that only grows: kept between calls, so that a step allocates nothing once it is warm.
typedef struct {
    void *data;
    size_t n_bytes;
} Scratch;

// At least n_bytes of scratch, contents undefined; NULL with an error message.
static inline void *scratch_get(Scratch *scratch, size_t n_bytes) {
    if (n_bytes > scratch->n_bytes) {
        device_free(scratch->data);
        scratch->data = device_alloc(n_bytes);
        scratch->n_bytes = scratch->data != NULL ? n_bytes : 0;
    }
    return scratch->data;
}

// One matrix product's shape; the prepared kernel for it is kept (matmul.h).
typedef struct {
    int64_t rows, cols, inner, lda, ldb, ldo;
    int trans_a, trans_b, bf16, accumulate;
} MatmulShape;

typedef struct {
    MatmulShape shape;
    dnnl_primitive_t primitive; // NULL: empty slot
    dnnl_memory_t a, b, out;    // descriptions; data pointers are set at each call
} MatmulEntry;

#define MATMUL_SLOTS 1024

// Bf16 operands; an op's own temporaries; what an optimizer's step passes through; floats of what is kept
// as something else; activations of cells that compute in turn.
enum { SCRATCH_A, SCRATCH_B, SCRATCH_C, SCRATCH_OP, SCRATCH_STEP, SCRATCH_WIDE, SCRATCH_TURN, SCRATCH_COUNT };

// A queue of work and what its ops keep between calls. One thread at a time uses a stream.
typedef struct Stream {
    Precision precision;
    int threads;
    dnnl_engine_t engine;
    dnnl_stream_t dnnl;
    Scratch scratch[SCRATCH_COUNT];
    int failed; // an op failed; error_message says which
    MatmulEntry matmul[MATMUL_SLOTS];
    struct Stream **workers; // (threads) streams of one thread each, for ops whose threads multiply on their own
} Stream;

// Memory of the host from which and to which copies are quick and need not be waited for. Not zeroed.
static inline void *device_host_alloc(size_t n_bytes) {
    return malloc(n_bytes);
}

static inline void device_host_free(void *pointer) {
    free(pointer);
}

static inline void device_zero(void *pointer, size_t n_bytes, Stream *stream) {
    (void)stream;
    memset(pointer, 0, n_bytes);
}

// Either side may be the host's memory, on every backend; the call then returns when the copy is done.
static inline void device_copy(void *to, const void *from, size_t n_bytes, Stream *stream) {
    (void)stream;
    memcpy(to, from, n_bytes);
}

// to = from, memory of device_host_alloc that stays as it is until the stream has been waited for; does not wait.
static inline void device_upload(void *to, const void *from, size_t n_bytes, Stream *stream) {
    device_copy(to, from, n_bytes, stream);
}

// The calling thread goes on with this stream's device.
static inline void stream_use(Stream *stream) {
    (void)stream;
}

// Returns when everything queued on the stream is done: before another stream may use what it has made.
static inline void stream_wait(Stream *stream) {
    (void)stream;
}

// Bytes of memory for tensors: the host's.
static inline int64_t device_memory(void) {
    return host_memory();
}

// How much of it is free.
static inline int64_t device_memory_left(void) {
    return host_memory_left();
}

// The library of matrix products, in words.
static inline void device_library(char *text, size_t size) {
    const dnnl_version_t *dnnl = dnnl_version();
    snprintf(text, size, "oneDNN %d.%d.%d", dnnl->major, dnnl->minor, dnnl->patch);
}

// 1 if the CPU multiplies bf16 natively.
static inline int device_has_bf16(void) {
#if defined(__x86_64__)
    return __builtin_cpu_supports("avx512bf16") != 0;
#else
    return 0;
#endif
}

// 1 if products may have fp32 inputs: a question for builds whose activations are bf16.
static inline int device_has_fp32(void) {
    return 1;
}

// Empties a slot; destroying NULL is allowed.
static inline void matmul_entry_free(MatmulEntry *entry) {
    dnnl_primitive_destroy(entry->primitive);
    dnnl_memory_destroy(entry->a);
    dnnl_memory_destroy(entry->b);
    dnnl_memory_destroy(entry->out);
    memset(entry, 0, sizeof *entry);
}

static inline void stream_destroy(Stream *stream) {
    if (stream == NULL) return;
    for (int i = 0; stream->workers != NULL && i < stream->threads; i++) stream_destroy(stream->workers[i]);
    free(stream->workers);
    for (int i = 0; i < MATMUL_SLOTS; i++)
        if (stream->matmul[i].primitive != NULL) matmul_entry_free(&stream->matmul[i]);
    for (int i = 0; i < SCRATCH_COUNT; i++) device_free(stream->scratch[i].data);
    if (stream->dnnl != NULL) dnnl_stream_destroy(stream->dnnl);
    if (stream->engine != NULL) dnnl_engine_destroy(stream->engine);
    free(stream);
}

// Makes a stream that computes with `threads` threads, or as many as OMP_THREAD_LIMIT grants: oneDNN 2.6 leaves out the
// share of threads it has planned for and does not get. Returns 0 or -1 (no memory, no matrix library engine).
static inline int stream_create(Stream **out, Precision precision, int threads) {
    Stream *stream = (Stream *)calloc(1, sizeof *stream);
    if (stream == NULL) return error_set("out of memory for a stream");
    stream->precision = precision;
    stream->threads = threads < omp_get_thread_limit() ? threads : omp_get_thread_limit();
    omp_set_dynamic(0);
    omp_set_num_threads(stream->threads);
    if (dnnl_engine_create(&stream->engine, dnnl_cpu, 0) != dnnl_success ||
        dnnl_stream_create(&stream->dnnl, stream->engine, dnnl_stream_default_flags) != dnnl_success) {
        stream_destroy(stream);
        return error_set("the matrix library (oneDNN) does not start on this CPU");
    }
    *out = stream;
    return 0;
}

// The same on a device of its number; the CPU is number 0.
static inline int stream_create_on(Stream **out, int device, Precision precision, int threads) {
    return device == 0 ? stream_create(out, precision, threads) : error_set("device %d: there is only the CPU", device);
}

// Makes the workers at first use. Returns 0 or -1.
static inline int stream_workers(Stream *stream) {
    if (stream->workers != NULL) return 0;
    stream->workers = (Stream **)calloc((size_t)stream->threads, sizeof(Stream *));
    if (stream->workers == NULL) return error_set("out of memory for %d streams", stream->threads);
    int result = 0;
    for (int i = 0; i < stream->threads && result == 0; i++)
        result = stream_create(&stream->workers[i], stream->precision, 1);
    omp_set_num_threads(stream->threads);
    for (int i = 0; i < stream->threads && result != 0; i++) stream_destroy(stream->workers[i]);
    if (result != 0) free(stream->workers), stream->workers = NULL;
    return result;
}

// The calling thread's worker, inside a parallel region of the stream's threads. Products planned from here on in the
// region expect one thread.
static inline Stream *stream_worker(Stream *stream) {
    omp_set_num_threads(1); // of this thread's inner regions, until the region ends
    return stream->workers[omp_get_thread_num()];
}

// After the region: a worker's failure is the stream's. Its message stayed with its thread.
static inline void stream_gather(Stream *stream, const char *op) {
    for (int i = 0; i < stream->threads; i++)
        if (stream->workers[i]->failed) stream->failed = 1, error_set("%s: a matrix product failed", op);
}

// 0, or -1 if an op on this stream has failed since the stream was made.
static inline int stream_check(const Stream *stream) {
    return stream->failed ? -1 : 0;
}

#endif
