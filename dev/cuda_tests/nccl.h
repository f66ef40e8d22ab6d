// Sums over the devices of this machine (the emulator's: EMU_DEVICES): what a backward in buckets does. Must fail for:
// a sum that does not wait for its gradients, an optimizer that does not wait for the sum, a device left out.
#if defined(CUDA_EMULATOR) && !defined(WITH_NCCL)
#define WITH_NCCL
#endif
#include "../../llmc/nccl.cuh"

#ifdef WITH_NCCL
enum { NCCL_TEST_DEVICES = 4, NCCL_TEST_FLOATS = 1003, NCCL_TEST_BUCKET = 402 };

typedef struct {
    Stream *stream;
    float *fresh, *grads, *used; // what a backward finds, the arena, what the optimizer reads
} NcclWorker;

static NcclWorker nccl_worker(int device) {
    NcclWorker worker = {NULL, NULL, NULL, NULL};
    need_cuda(cudaSetDevice(device), "device");
    need(stream_create(&worker.stream, PRECISION_FP32, 1), "stream");
    float *values = host_random(NCCL_TEST_FLOATS, 350 + (uint32_t)device, 1.0f);
    worker.fresh = device_of_host(values, NCCL_TEST_FLOATS);
    worker.grads = device_nan<float>(NCCL_TEST_FLOATS);
    worker.used = device_nan<float>(NCCL_TEST_FLOATS);
    free(values);
    return worker;
}

// Backward in two buckets, last first, each summed beside what follows; then the optimizer reads all.
static void nccl_step(Nccl *nccl, NcclWorker *workers, Stream *const *streams) {
    static const int first[2] = {NCCL_TEST_BUCKET, 0},
                     count[2] = {NCCL_TEST_FLOATS - NCCL_TEST_BUCKET, NCCL_TEST_BUCKET};
    for (int bucket = 0; bucket < 2; bucket++) {
        float *values[NCCL_TEST_DEVICES];
        for (int i = 0; i < nccl->n_devices; i++) {
            values[i] = workers[i].grads + first[bucket];
            for (int wait = 0; wait < 16; wait++) // a long backward, so that a hasty sum comes before its end
                device_zero(values[i], sizeof(float) * (size_t)count[bucket], streams[i]);
            device_copy(values[i], workers[i].fresh + first[bucket], sizeof(float) * (size_t)count[bucket], streams[i]);
        }
        check(nccl_sum(nccl, values, count[bucket], streams) == 0, "%s", error_message);
    }
    check(nccl_wait(nccl, streams) == 0, "%s", error_message);
    for (int i = 0; i < nccl->n_devices; i++) {
        device_copy(workers[i].used, workers[i].grads, sizeof(float) * NCCL_TEST_FLOATS, streams[i]);
        device_zero(workers[i].grads, sizeof(float) * NCCL_TEST_FLOATS, streams[i]);
    }
}

static void nccl_sums(int n) {
    Nccl *nccl = NULL;
    NcclWorker workers[NCCL_TEST_DEVICES];
    Stream *streams[NCCL_TEST_DEVICES];
    float *params[NCCL_TEST_DEVICES] = {NULL}, *expected = host_nan(NCCL_TEST_FLOATS), *first = NULL;
    if (!check(nccl_create(&nccl, n) == 0, "%s", error_message)) return;
    for (int i = 0; i < NCCL_TEST_FLOATS; i++) expected[i] = 0.0f;
    for (int i = 0; i < n; i++) {
        workers[i] = nccl_worker(i), streams[i] = workers[i].stream;
        float *values = host_of_device(workers[i].fresh, NCCL_TEST_FLOATS);
        for (int j = 0; j < NCCL_TEST_FLOATS; j++) expected[j] += values[j];
        free(values);
    }
    for (int step = 0; step < 6; step++) { // the emulator draws another order each time
        nccl_step(nccl, workers, streams);
        for (int i = 0; i < n; i++) {
            need_cuda(cudaSetDevice(i), "device");
            float *sum = host_of_device(workers[i].used, NCCL_TEST_FLOATS);
            check_close(sum, expected, NCCL_TEST_FLOATS, 1e-6, "sum");
            if (first == NULL)
                first = sum;
            else
                check_same(sum, first, sizeof(float) * NCCL_TEST_FLOATS, "sum on another device or in another step");
            if (sum != first) free(sum);
        }
    }
    free(first);
    for (int i = 0; i < n; i++) params[i] = workers[i].fresh;
    check(nccl_share(nccl, params, NCCL_TEST_FLOATS, streams) == 0 && nccl_wait(nccl, streams) == 0, "%s",
          error_message);
    first = host_random(NCCL_TEST_FLOATS, 350, 1.0f);
    for (int i = 0; i < n; i++) {
        need_cuda(cudaSetDevice(i), "device");
        need_cuda(cudaStreamSynchronize(streams[i]->cuda), "the copies");
        float *values = host_of_device(workers[i].fresh, NCCL_TEST_FLOATS);
        check_same(values, first, sizeof(float) * NCCL_TEST_FLOATS, "shared");
        free(values);
        device_release(workers[i].fresh, NCCL_TEST_FLOATS, "fresh");
        device_release(workers[i].grads, NCCL_TEST_FLOATS, "grads");
        device_release(workers[i].used, NCCL_TEST_FLOATS, "used");
    }
    workers[n - 1].stream->failed = 1;
    check(nccl_sum(nccl, params, NCCL_TEST_FLOATS, streams) != 0, "a failed stream's gradients were summed");
    nccl_destroy(nccl);
    for (int i = 0; i < n; i++) {
        need_cuda(cudaSetDevice(i), "device");
        stream_destroy(streams[i]);
    }
    need_cuda(cudaSetDevice(0), "device");
    free(first);
    free(expected);
}

#ifdef CUDA_EMULATOR
static void fault_stream_before_communicator(void) {
    static const int devices[1] = {0};
    ncclComm_t comm;
    cudaStream_t stream;
    float *x = device_nan<float>(8);
    ncclCommInitAll(&comm, 1, devices);
    cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    ncclAllReduce(x, x, 8, ncclFloat32, ncclSum, comm, stream);
    cudaStreamDestroy(stream);
    ncclCommDestroy(comm);
}

// Where the library would wait for ever or damage memory, the emulator's says so.
static void nccl_planted(void) {
    int devices[2] = {0, 1};
    ncclComm_t comms[2];
    float *near = device_nan<float>(8), host[8];
    need_cuda(cudaSetDevice(1), "device");
    float *far = device_nan<float>(8);
    need_cuda(cudaSetDevice(0), "device");
    check(ncclCommInitAll(comms, 2, devices) == ncclSuccess, "%s", ncclGetLastError(NULL));
    check(ncclAllReduce(near, near, 8, ncclFloat32, ncclSum, comms[0], NULL) == ncclInvalidUsage, "one rank alone");
    ncclGroupStart();
    ncclAllReduce(near, near, 8, ncclFloat32, ncclSum, comms[0], NULL);
    ncclAllReduce(far, far, 7, ncclFloat32, ncclSum, comms[1], NULL);
    check(ncclGroupEnd() == ncclInvalidUsage, "sums of different lengths");
    check(ncclAllReduce(host, host, 8, ncclFloat32, ncclSum, comms[0], NULL) == ncclInvalidArgument, "host memory");
    check(ncclAllReduce(far, far, 8, ncclFloat32, ncclSum, comms[0], NULL) == ncclInvalidArgument, "another device's");
    ncclCommDestroy(comms[0]);
    ncclCommDestroy(comms[1]);
    check_fault(fault_stream_before_communicator, "the stream of rank 0 has gone before its communicator");
    device_release(near, 8, "near");
    need_cuda(cudaSetDevice(1), "device");
    device_release(far, 8, "far");
    need_cuda(cudaSetDevice(0), "device");
}
#endif

static void test_cuda_nccl(void) {
    int present = 0;
    Nccl *nccl = NULL;
    need_cuda(cudaGetDeviceCount(&present), "devices");
    check(nccl_create(&nccl, present + 1) != 0, "more devices than there are were accepted");
    check_message("GPUs asked for", "nccl_create");
    for (int n = 1; n <= present && n <= NCCL_TEST_DEVICES; n++) nccl_sums(n);
#ifdef CUDA_EMULATOR
    if (check(present > 1, "the emulator needs EMU_DEVICES=3 here")) nccl_planted();
#endif
}
#else
// Built without NCCL: one device is all there is.
static void test_cuda_nccl(void) {
    Nccl *nccl = NULL;
    check(nccl_create(&nccl, 2) != 0, "two devices without NCCL");
    check_message("without NCCL", "nccl_create");
    check(nccl_create(&nccl, 1) == 0 && nccl_sum(nccl, NULL, 1, NULL) == 0 && nccl_share(nccl, NULL, 1, NULL) == 0 &&
              nccl_wait(nccl, NULL) == 0,
          "%s", error_message);
    nccl_destroy(nccl);
}
#endif
