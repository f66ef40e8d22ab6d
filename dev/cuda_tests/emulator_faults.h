// Planted faults, one for each detector of the emulator; see emulator.h.
#include <pthread.h>      // pthread_create
#include <sys/resource.h> // setrlimit
#include <sys/wait.h>     // waitpid

// ---------------------------------------------------------------------------------------------------------------------
// Faults that abort

// Passes if a child process that runs fault() dies and says `expected` on stderr.
static void check_fault(void (*fault)(void), const char *expected) {
    int ends[2], status = 0;
    char said[1 << 16];
    size_t n = 0;
    ssize_t got;
    fflush(stdout);
    if (pipe(ends) != 0) exit(1);
    pid_t child = fork();
    if (child == 0) {
        struct rlimit none = {0, 0};
        setrlimit(RLIMIT_CORE, &none);
        dup2(ends[1], STDERR_FILENO);
        fault();
        _exit(stream_check(test_stream) ? (dprintf(STDERR_FILENO, "%s\n", error_message), 3) : 0);
    }
    close(ends[1]);
    while (n < sizeof said - 1 && (got = read(ends[0], said + n, sizeof said - 1 - n)) > 0) n += (size_t)got;
    said[n] = '\0';
    close(ends[0]);
    waitpid(child, &status, 0);
    check(status != 0 && strstr(said, expected) != NULL, "no fault '%s' was found (status %d): %.600s", expected,
          status, said);
}

// Runs a kernel that takes one array of 100 floats in shapes that show its fault.
#define FAULTY(kernel, n_threads, shared_bytes)                                                                        \
    do {                                                                                                               \
        float *x = (float *)device_alloc(100 * sizeof *x);                                                             \
        LAUNCH(kernel, 2, n_threads, shared_bytes, test_stream, x);                                                    \
        (void)cudaDeviceSynchronize();                                                                                 \
    } while (0)

__global__ static void write_past_kernel(float *x) {
    x[threadIdx.x] = 1.0f; // 128 threads, 100 values
}

static void fault_write_past(void) {
    FAULTY(write_past_kernel, 128, 0);
}

__global__ static void write_before_kernel(float *x) {
    x[(int)threadIdx.x - 1] = 1.0f;
}

static void fault_write_before(void) {
    FAULTY(write_before_kernel, 32, 0);
}

__global__ static void far_kernel(float *x) {
    x[(size_t)threadIdx.x << 28] = 1.0f;
}

static void fault_far(void) {
    FAULTY(far_kernel, 32, 0);
}

__global__ static void null_kernel(float *x) {
    float *nothing = nullptr;
    asm volatile("" : "+r"(nothing)); // or g++ would warn
    nothing[threadIdx.x] = x[0];
}

static void fault_null(void) {
    FAULTY(null_kernel, 32, 0);
}

__global__ static void dynamic_kernel(float *x) {
    DYNAMIC_SHARED(float, shared);
    shared[threadIdx.x] = 1.0f; // 64 threads, 63 values
    x[threadIdx.x] = 1.0f;
}

static void fault_dynamic_shared(void) {
    FAULTY(dynamic_kernel, 64, 63 * sizeof(float));
}

__global__ static void exit_kernel(float *x) {
    if (threadIdx.x == 33) return;
    __syncthreads();
    x[threadIdx.x] = 1.0f;
}

static void fault_exit(void) {
    FAULTY(exit_kernel, 64, 0);
}

__global__ static void elsewhere_kernel(float *x) {
    if (threadIdx.x < 32)
        __syncthreads();
    else
        __syncthreads();
    x[threadIdx.x] = 1.0f;
}

static void fault_elsewhere(void) {
    FAULTY(elsewhere_kernel, 64, 0);
}

__global__ static void mask_kernel(float *x) {
    unsigned mask = threadIdx.x < 16 ? 0xFFFFFFFFu : 0xFFFF0000u;
    x[threadIdx.x] = __shfl_xor_sync(mask, x[threadIdx.x], 1);
}

static void fault_mask(void) {
    FAULTY(mask_kernel, 32, 0);
}

__global__ static void leave_kernel(float *x) {
    if (threadIdx.x == 7) return;
    x[threadIdx.x] = __shfl_xor_sync(WARP_ALL, x[threadIdx.x], 16);
}

static void fault_leave(void) {
    FAULTY(leave_kernel, 32, 0);
}

__global__ static void kind_kernel(float *x) {
    if (threadIdx.x < 16)
        x[threadIdx.x] = __shfl_xor_sync(WARP_ALL, x[threadIdx.x], 1);
    else
        x[threadIdx.x] = (float)__ballot_sync(WARP_ALL, 1);
}

static void fault_kind(void) {
    FAULTY(kind_kernel, 32, 0);
}

__global__ static void lane_kernel(float *x) {
    if (threadIdx.x < 16) x[threadIdx.x] = __shfl_sync(0x0000FFFFu, x[threadIdx.x], 20);
}

static void fault_lane(void) {
    FAULTY(lane_kernel, 32, 0);
}

__global__ static void not_own_kernel(float *x) {
    x[threadIdx.x] = __shfl_sync(0x0000FFFFu, x[threadIdx.x], 1);
}

static void fault_not_own(void) {
    FAULTY(not_own_kernel, 32, 0);
}

__global__ static void deadlock_kernel(float *x) {
    if (threadIdx.x < 16)
        __syncwarp();
    else
        __syncthreads();
    x[threadIdx.x] = 1.0f;
}

static void fault_deadlock(void) {
    FAULTY(deadlock_kernel, 32, 0);
}

__global__ static void recurse_kernel(float *x);

static float recurse(float *x, int depth) {
    volatile float many[64];
    many[depth % 64] = x[0] + (float)depth;
    return depth == 1 << 20 ? many[0] : recurse(x, depth + 1) + many[depth % 64];
}

__global__ static void recurse_kernel(float *x) {
    x[threadIdx.x] = recurse(x, (int)threadIdx.x);
}

static void fault_stack(void) {
    FAULTY(recurse_kernel, 32, 0);
}

__global__ static void misaligned_kernel(float *x) {
    pack_store(x + 1, pack_load(x));
}

static void fault_misaligned(void) {
    FAULTY(misaligned_kernel, 1, 0);
}

static void fault_host_reads(void) {
    volatile float *x = (float *)device_alloc(100 * sizeof *x);
    exit(x[3] == 0.0f);
}

static void fault_host_writes(void) {
    float *x = (float *)device_alloc(100 * sizeof *x);
    memset(x + 3, 0, 4);
}

static void fault_host_pointer(void) {
    float *x = (float *)calloc(100, sizeof *x);
    LAUNCH(add_kernel, 1, 32, 0, test_stream, x, 1.0f, 100);
}

typedef struct {
    int n;
    float *x;
} Pair;

__global__ static void pair_kernel(Pair pair) {
    pair.x[threadIdx.x] = 1.0f;
}

static void fault_host_pointer_inside(void) {
    Pair pair = {100, (float *)calloc(100, sizeof(float))};
    LAUNCH(pair_kernel, 1, 32, 0, test_stream, pair);
}

static void fault_copy_past(void) {
    float values[101] = {0};
    device_copy(device_alloc(100 * sizeof(float)), values, sizeof values, test_stream);
}

static void fault_other_device(void) {
    emu::n_devices = 2;
    cudaSetDevice(1);
    float *x = (float *)device_alloc(100 * sizeof *x);
    cudaSetDevice(0);
    LAUNCH(add_kernel, 1, 32, 0, test_stream, x, 1.0f, 100);
    (void)cudaDeviceSynchronize();
}

static void fault_stream_of_other_device(void) {
    emu::n_devices = 2;
    float *x = (float *)device_alloc(100 * sizeof *x);
    cudaSetDevice(1);
    LAUNCH(add_kernel, 1, 32, 0, test_stream, x, 1.0f, 100);
}

static void fault_handle_of_other_device(void) {
    emu::n_devices = 2;
    cudaSetDevice(1);
    cublasLtDestroy(test_stream->blas);
}

static void fault_solver_of_other_device(void) {
    int work_size;
    cusolverDnHandle_t solver;
    emu::n_devices = 2;
    cusolverDnCreate(&solver);
    cudaSetDevice(1);
    cusolverDnSgesvd_bufferSize(solver, 4, 4, &work_size);
}

__global__ static void ldmatrix_kernel(float *x) {
    DYNAMIC_SHARED(float, shared);
    uint32_t r[4];
    ldmatrix_x4(r, shared + threadIdx.x);
    x[threadIdx.x] = (float)r[0];
}

static void fault_ldmatrix(void) {
    FAULTY(ldmatrix_kernel, 32, 1024);
}

__global__ static void not_shared_kernel(float *x) {
    float mine[4];
    cp_async_16(mine, x);
}

static void fault_not_shared(void) {
    FAULTY(not_shared_kernel, 1, 0);
}

#if EMU_ASAN
static void fault_use_after_free(void) {
    float *x = (float *)device_alloc(100 * sizeof *x);
    device_free(x);
    LAUNCH(add_kernel, 1, 32, 0, test_stream, x, 1.0f, 100);
    (void)cudaDeviceSynchronize();
}

__global__ static void static_kernel(float *x, int n) {
    __shared__ float shared[32];
    float *to = shared;
    asm volatile("" : "+r"(to)); // or UBSan would be first
    for (int i = (int)threadIdx.x; i < n; i += 32) to[i] = 1.0f;
    x[threadIdx.x] = to[threadIdx.x];
}

static void fault_static_shared(void) {
    float *x = (float *)device_alloc(100 * sizeof *x);
    LAUNCH(static_kernel, 1, 32, 0, test_stream, x, 33);
    (void)cudaDeviceSynchronize();
}

__global__ static void read_past_kernel(float *x) {
    x[threadIdx.x] = x[threadIdx.x + 70];
}

static void fault_read_past(void) {
    FAULTY(read_past_kernel, 32, 0);
}
#endif

// ---------------------------------------------------------------------------------------------------------------------
// Faults that give wrong results in some orders

// How many of 30 seeds make run(faulty) wrong.
static int n_wrong(int (*run)(int), int faulty) {
    uint64_t keep = emu::chance_state;
    int wrong = 0;
    for (uint64_t seed = 0; seed < 30; seed++) {
        emu::chance_state = seed << 32;
        wrong += !run(faulty);
    }
    emu::chance_state = keep;
    return wrong;
}

static void check_order(int (*run)(int), const char *what) {
    int wrong = n_wrong(run, 1), wrong_whole = n_wrong(run, 0);
    check(wrong > 0, "%s: not found by 30 seeds", what);
    check(wrong_whole == 0, "%s: without the fault, %d of 30 seeds are wrong", what, wrong_whole);
}

// Runs LAUNCH(kernel, ...) on x (64 floats, i at i) and passes if x[i] = expected(i) then.
#define RUN_64(launch, expression)                                                                                     \
    do {                                                                                                               \
        float values[64];                                                                                              \
        float *x = (float *)device_alloc(sizeof values);                                                               \
        for (int i = 0; i < 64; i++) values[i] = (float)i;                                                             \
        device_copy(x, values, sizeof values, test_stream);                                                            \
        launch;                                                                                                        \
        device_copy(values, x, sizeof values, test_stream);                                                            \
        device_free(x);                                                                                                \
        int right = 1;                                                                                                 \
        for (int i = 0; i < 64; i++) right = right && values[i] == (float)(expression);                                \
        return right;                                                                                                  \
    } while (0)

// Reverses x. The first barrier missing: reads come before writes.
__global__ static void reverse_kernel(float *x, int faulty) {
    __shared__ float shared[64];
    int i = (int)threadIdx.x;
    shared[i] = x[i];
    if (!faulty) __syncthreads();
    x[i] = shared[63 - i];
}

static int run_barrier(int faulty) {
    RUN_64(LAUNCH(reverse_kernel, 1, 64, 0, test_stream, x, faulty), 63 - i);
}

// Rotates x by 32, twice. The barrier between the turns missing: a warp's second write overtakes another's first read.
__global__ static void rotate_kernel(float *x, int faulty) {
    __shared__ float shared[64];
    int i = (int)threadIdx.x;
    float value = x[i];
    for (int turn = 0; turn < 2; turn++) {
        shared[i] = value;
        __syncthreads();
        value = shared[(i + 32) % 64] + 1.0f;
        if (!faulty) __syncthreads();
    }
    x[i] = value;
}

static int run_second_barrier(int faulty) {
    RUN_64(LAUNCH(rotate_kernel, 1, 64, 0, test_stream, x, faulty), i + 2);
}

__global__ static void neighbour_kernel(float *x, int faulty) {
    __shared__ float shared[64];
    int i = (int)threadIdx.x;
    shared[i] = x[i];
    if (!faulty) __syncwarp();
    x[i] = shared[i ^ 1];
}

static int run_syncwarp(int faulty) {
    RUN_64(LAUNCH(neighbour_kernel, 1, 64, 0, test_stream, x, faulty), i ^ 1);
}

// Blocks know nothing of each other: block 1 reads what block 0 writes.
__global__ static void blocks_kernel(float *x, int faulty) {
    if (faulty && blockIdx.x == 1) x[threadIdx.x] = x[threadIdx.x + 32] - 32.0f + 5.0f;
    if (blockIdx.x == 0) x[threadIdx.x + 32] += 5.0f;
    if (!faulty && blockIdx.x == 1) x[threadIdx.x] += 5.0f;
}

static int run_blocks(int faulty) {
    RUN_64(LAUNCH(blocks_kernel, 2, 32, 0, test_stream, x, faulty), i + 5);
}

__global__ static void async_kernel(float *x, int faulty) {
    __shared__ __align__(16) float shared[64];
    int i = (int)threadIdx.x;
    if (i < 16) cp_async_16(shared + 4 * i, x + 4 * i);
    cp_async_commit();
    if (!faulty) cp_async_wait<0>();
    __syncthreads();
    x[i] = shared[63 - i];
}

static int run_async(int faulty) {
    RUN_64(LAUNCH(async_kernel, 1, 64, 0, test_stream, x, faulty), 63 - i);
}

// Shared memory of the block before: x[i] = i + 1 only if what is not written is 0.
__global__ static void fresh_kernel(float *x, int faulty) {
    __shared__ float shared[64];
    DYNAMIC_SHARED(float, dynamic);
    int i = (int)threadIdx.x;
    if (!faulty) shared[i] = dynamic[i] = 0.0f;
    if (blockIdx.x == 0) x[i] += 1.0f + shared[i] + dynamic[i];
    shared[i] = dynamic[i] = 0.0f;
}

static int run_fresh_shared(int faulty) {
    RUN_64(LAUNCH(fresh_kernel, 3, 64, 64 * sizeof(float), test_stream, x, faulty), i + 1);
}

static int run_fresh_memory(int faulty) {
    float *fresh = NULL;
    (void)cudaMalloc(&fresh, 4);
    if (!faulty) device_zero(fresh, 4, test_stream);
    LAUNCH(add_kernel, 1, 32, 0, test_stream, fresh, 1.0f, 1);
    float value = NAN;
    device_copy(&value, fresh, 4, test_stream);
    device_free(fresh);
    return value == 1.0f;
}

// One stream adds 1, another then doubles; the event between them missing.
__global__ static void double_kernel(float *x, int n) {
    int i = (int)threadIdx.x;
    if (i < n) x[i] *= 2.0f;
}

static int run_streams(int faulty) {
    Stream *other = NULL;
    cudaEvent_t event;
    need(stream_create(&other, PRECISION_BF16, 1), "stream");
    need_cuda(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "event");
    float *x = (float *)device_alloc(4), value = NAN;
    LAUNCH(add_kernel, 1, 32, 0, test_stream, x, 1.0f, 1);
    need_cuda(cudaEventRecord(event, test_stream->cuda), "record");
    if (!faulty) need_cuda(cudaStreamWaitEvent(other->cuda, event, 0), "wait");
    LAUNCH(double_kernel, 1, 32, 0, other, x, 1);
    need_cuda(cudaStreamSynchronize(other->cuda), "synchronize");
    device_copy(&value, x, 4, test_stream);
    stream_destroy(other);
    need_cuda(cudaEventDestroy(event), "destroy");
    device_free(x);
    return value == 2.0f;
}

// The legacy default stream waits for blocking streams only.
static int run_default_stream(int faulty) {
    cudaStream_t blocking;
    need_cuda(cudaStreamCreateWithFlags(&blocking, faulty ? cudaStreamNonBlocking : cudaStreamDefault), "stream");
    float *x = (float *)device_alloc(4), one = 1.0f, value = NAN;
    float *pinned = NULL;
    need_cuda(cudaMallocHost(&pinned, 4), "pinned");
    *pinned = one;
    need_cuda(cudaMemcpyAsync(x, pinned, 4, cudaMemcpyHostToDevice, blocking), "copy");
    need_cuda(cudaMemcpy(&value, x, 4, cudaMemcpyDeviceToHost), "copy"); // on the default stream
    need_cuda(cudaStreamDestroy(blocking), "destroy");
    need_cuda(cudaFreeHost(pinned), "free");
    device_free(x);
    return value == 1.0f;
}

// Pinned host memory belongs to the copy until the stream has come to it; pageable memory does not.
static int run_pinned(int faulty) {
    Stream *other = NULL;
    float *pinned = NULL, *x = (float *)device_alloc(4), value = NAN, pageable = 1.0f;
    need(stream_create(&other, PRECISION_BF16, 1), "stream");
    need_cuda(cudaMallocHost(&pinned, 4), "pinned");
    *pinned = 1.0f;
    need_cuda(cudaMemcpyAsync(x, faulty ? pinned : &pageable, 4, cudaMemcpyHostToDevice, other->cuda), "copy");
    *pinned = pageable = 2.0f;
    device_copy(&value, x, 4, other);
    stream_destroy(other);
    need_cuda(cudaFreeHost(pinned), "free");
    device_free(x);
    return value == 1.0f;
}

// A result in pinned memory is there after the wait only.
static int run_unwaited(int faulty) {
    float *pinned = NULL, *x = (float *)device_alloc(4);
    need_cuda(cudaMallocHost(&pinned, 4), "pinned");
    *pinned = NAN;
    LAUNCH(add_kernel, 1, 32, 0, test_stream, x, 1.0f, 1);
    need_cuda(cudaMemcpyAsync(pinned, x, 4, cudaMemcpyDeviceToHost, test_stream->cuda), "copy");
    if (!faulty) need_cuda(cudaStreamSynchronize(test_stream->cuda), "synchronize");
    float value = *pinned;
    need_cuda(cudaFreeHost(pinned), "free");
    device_free(x);
    return value == 1.0f;
}

// ---------------------------------------------------------------------------------------------------------------------

// Two devices: each has its memory and streams, copies go between them, events too.
static void test_two_devices(void) {
    Stream *streams[2] = {NULL, NULL};
    float *x[2], value = NAN;
    cudaEvent_t event;
    int n_devices = emu::n_devices;
    emu::n_devices = 2;
    for (int d = 0; d < 2; d++) {
        need_cuda(cudaSetDevice(d), "device");
        need(stream_create(&streams[d], PRECISION_BF16, 1), "stream");
        x[d] = (float *)device_alloc(sizeof(float));
        LAUNCH(add_kernel, 1, 32, 0, streams[d], x[d], 1.0f + (float)d, 1);
    }
    need_cuda(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "event"); // of device 1
    need_cuda(cudaEventRecord(event, streams[1]->cuda), "record");
    need_cuda(cudaSetDevice(0), "device");
    need_cuda(cudaStreamWaitEvent(streams[0]->cuda, event, 0), "wait");
    need_cuda(cudaMemcpyPeerAsync(x[0], 0, x[1], 1, sizeof(float), streams[0]->cuda), "copy");
    LAUNCH(add_kernel, 1, 32, 0, streams[0], x[0], 5.0f, 1);
    device_copy(&value, x[0], sizeof value, streams[0]);
    check(value == 7.0f && streams[1]->device == 1, "two devices: %g", (double)value);
    check(stream_check(streams[0]) == 0 && stream_check(streams[1]) == 0, "two devices: %s", error_message);
    for (int d = 0; d < 2; d++) {
        need_cuda(cudaSetDevice(d), "device");
        device_free(x[d]);
        stream_destroy(streams[d]);
    }
    need_cuda(cudaEventDestroy(event), "destroy");
    need_cuda(cudaSetDevice(0), "device");
    emu::n_devices = n_devices;
}

// Host threads take turns in the emulator, each with a stream of its own.
static void *add_often(void *result) {
    Stream *stream = NULL;
    float *x;
    need(stream_create(&stream, PRECISION_BF16, 1), "stream");
    x = (float *)device_alloc(sizeof(float));
    for (int i = 0; i < 50; i++) {
        LAUNCH(add_kernel, 1, 64, 0, stream, x, 1.0f, 1);
        if (i % 10 == 9) device_copy(result, x, sizeof(float), stream);
    }
    device_free(x);
    stream_destroy(stream);
    return NULL;
}

static void test_host_threads(void) {
    pthread_t threads[3];
    float results[3] = {NAN, NAN, NAN};
    for (int i = 0; i < 3; i++)
        if (pthread_create(&threads[i], NULL, add_often, &results[i]) != 0) exit(1);
    for (int i = 0; i < 3; i++) {
        pthread_join(threads[i], NULL);
        check(results[i] == 50.0f, "host thread %d: %g", i, (double)results[i]);
    }
}

static void test_faults(void) {
    const char *past = EMU_ASAN ? "AddressSanitizer" : "wrote outside device memory";
    check_fault(fault_write_past, past);
    check_fault(fault_write_before, past);
    check_fault(fault_far, "device code touches memory of device 0");
    check_fault(fault_null, EMU_ASAN ? "AddressSanitizer" : "which is no memory");
    check_fault(fault_dynamic_shared, EMU_ASAN ? "AddressSanitizer" : "bytes of dynamic shared memory");
    check_fault(fault_exit, "divergent barrier");
    check_fault(fault_elsewhere, "divergent barrier");
    check_fault(fault_mask, "mismatched collectives in a warp");
    check_fault(fault_leave, "mismatched collectives in a warp");
    check_fault(fault_kind, "mismatched collectives in a warp");
    check_fault(fault_lane, "reads lane 20, which takes no part");
    check_fault(fault_not_own, "is without its own lane");
    check_fault(fault_deadlock, "deadlock");
    check_fault(fault_stack, "stack overflow in device code");
    check_fault(fault_misaligned, "which is no multiple of 16");
    check_fault(fault_ldmatrix, "is no multiple of 16");
    check_fault(fault_not_shared, "cp_async_16");
    check_fault(fault_host_reads, "host code touches device memory");
    check_fault(fault_host_writes, "host code touches device memory");
    check_fault(fault_host_pointer, "which is host memory");
    check_fault(fault_host_pointer_inside, "which is host memory");
    check_fault(fault_copy_past, "leaves its piece of device memory");
    check_fault(fault_other_device, "which is not its own");
    check_fault(fault_stream_of_other_device, "invalid resource handle");
    check_fault(fault_handle_of_other_device, "cublasLtDestroy: the handle is of device 0, but device 1 is current");
    check_fault(fault_solver_of_other_device, "cusolverDnSgesvd: the handle is of device 0, but device 1 is current");
#if EMU_ASAN
    check_fault(fault_use_after_free, "AddressSanitizer");
    check_fault(fault_static_shared, "AddressSanitizer");
    check_fault(fault_read_past, "AddressSanitizer");
#endif
    check_order(run_barrier, "a missing barrier");
    check_order(run_second_barrier, "a missing barrier between two turns");
    check_order(run_syncwarp, "a missing __syncwarp");
    check_order(run_blocks, "blocks that rely on their order");
    check_order(run_async, "a missing wait for cp.async");
    check_order(run_fresh_shared, "shared memory taken for zero");
    check_order(run_fresh_memory, "fresh device memory taken for zero");
    check_order(run_streams, "a missing event");
    check_order(run_default_stream, "a default stream taken for an order");
    check_order(run_pinned, "pinned memory reused too early");
    check_order(run_unwaited, "a result read too early");
    test_two_devices();
    test_host_threads();
    check(emu_launched("pack_kernel") && !emu_launched("no_such_kernel"), "the list of launched kernels");
}
