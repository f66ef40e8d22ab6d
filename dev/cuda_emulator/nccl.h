// NCCL of the emulator: several emulated devices of one process (EMU_DEVICES=n). A collective waits on every rank's
// stream for what is before it there, adds in the order of the ranks in fp32, and lets all streams go on. Calls of a
// process that drives several ranks must come in a group, complete and alike on all ranks: where the library would wait
// for ever or damage memory, this refuses, and ncclGetLastError says why.
//
// To add a collective: its kind, its entry function, and what it does in emu_nccl_run.
#ifndef EMULATOR_NCCL_H
#define EMULATOR_NCCL_H

#include <cuda_bf16.h>    // __nv_bfloat16
#include <cuda_runtime.h> // cudaStream_t, events
#include <deque>          // calls of a rank
#include <string.h>       // memcpy
#include <vector>         // ranks

#include "library.h" // is_device, enqueue

typedef enum {
    ncclSuccess = 0,
    ncclUnhandledCudaError = 1,
    ncclInvalidArgument = 4,
    ncclInvalidUsage = 5
} ncclResult_t;
typedef enum { ncclSum = 0, ncclAvg = 4 } ncclRedOp_t;
typedef enum { ncclFloat32 = 7, ncclBfloat16 = 9 } ncclDataType_t;

struct EmuNcclCall {
    enum { ALL_REDUCE, BROADCAST } kind;
    const void *send;
    void *receive;
    size_t count;
    ncclDataType_t type;
    int op_or_root;
    cudaStream_t stream;
};

struct EmuNcclClique;

typedef struct EmuNcclComm {
    EmuNcclClique *clique;
    int rank, device;
    cudaStream_t last; // stream of its last call
    cudaEvent_t arrived, done;
    std::deque<EmuNcclCall> calls; // of the open group
} * ncclComm_t;

struct EmuNcclClique {
    std::vector<ncclComm_t> ranks;
    int n_live;
};

static thread_local int emu_nccl_depth;
static thread_local std::vector<EmuNcclClique *> emu_nccl_waiting; // cliques with calls in the open group
static thread_local const char *emu_nccl_why = "";

static inline ncclResult_t emu_nccl_refuse(ncclResult_t result, const char *why) {
    emu_nccl_why = why;
    return result;
}

static inline const char *ncclGetErrorString(ncclResult_t result) {
    switch (result) {
    case ncclSuccess: return "no error";
    case ncclInvalidArgument: return "invalid argument";
    case ncclInvalidUsage: return "invalid usage";
    default: return "unhandled cuda error";
    }
}

static inline const char *ncclGetLastError(ncclComm_t) {
    return emu_nccl_why;
}

static inline ncclResult_t ncclCommInitAll(ncclComm_t *comms, int n, const int *devices) {
    int n_devices = 0, before = 0;
    if (cudaGetDeviceCount(&n_devices) != cudaSuccess || cudaGetDevice(&before) != cudaSuccess)
        return emu_nccl_refuse(ncclUnhandledCudaError, "no device");
    for (int i = 0; i < n; i++) {
        for (int j = 0; j < i; j++)
            if (devices[i] == devices[j]) return emu_nccl_refuse(ncclInvalidUsage, "a device is named twice");
        if (devices[i] < 0 || devices[i] >= n_devices)
            return emu_nccl_refuse(ncclInvalidArgument, "there is no such device");
    }
    EmuNcclClique *clique = new EmuNcclClique{{}, n};
    for (int i = 0; i < n; i++) {
        comms[i] = new EmuNcclComm{clique, i, devices[i], nullptr, nullptr, nullptr, {}};
        clique->ranks.push_back(comms[i]);
        if (cudaSetDevice(devices[i]) != cudaSuccess ||
            cudaEventCreateWithFlags(&comms[i]->arrived, cudaEventDisableTiming) != cudaSuccess ||
            cudaEventCreateWithFlags(&comms[i]->done, cudaEventDisableTiming) != cudaSuccess)
            return emu_nccl_refuse(ncclUnhandledCudaError, "no event");
    }
    cudaSetDevice(before);
    return ncclSuccess;
}

// The last rank to go takes the clique with it, and until then all may still look at their streams.
static inline ncclResult_t ncclCommDestroy(ncclComm_t comm) {
    EmuNcclClique *clique = comm->clique;
    if (--clique->n_live > 0) return ncclSuccess;
    for (ncclComm_t rank : clique->ranks) {
        if (rank->last != nullptr && !emu_is_stream(rank->last))
            emu::die("ncclCommDestroy: the stream of rank %d has gone before its communicator", rank->rank);
        cudaEventDestroy(rank->arrived);
        cudaEventDestroy(rank->done);
        delete rank;
    }
    delete clique;
    return ncclSuccess;
}

static inline float emu_nccl_load(const void *data, ncclDataType_t type, size_t i) {
    return type == ncclFloat32 ? ((const float *)data)[i] : __bfloat162float(((const __nv_bfloat16 *)data)[i]);
}

// The work itself, with the memory of all devices open.
static inline void emu_nccl_run(const std::vector<EmuNcclCall> &calls) {
    const EmuNcclCall &first = calls[0];
    size_t size = first.type == ncclFloat32 ? 4 : 2;
    emu::Opening opening(emu::ALL_DEVICES);
    if (first.kind == EmuNcclCall::BROADCAST) {
        const void *from = calls[(size_t)first.op_or_root].send;
        for (const EmuNcclCall &call : calls) memmove(call.receive, from, first.count * size);
        return;
    }
    std::vector<float> sums(first.count, 0.0f);
    for (const EmuNcclCall &call : calls)
        for (size_t i = 0; i < first.count; i++) sums[i] += emu_nccl_load(call.send, first.type, i);
    for (const EmuNcclCall &call : calls) {
        for (size_t i = 0; i < first.count; i++) {
            float value = first.op_or_root == ncclAvg ? sums[i] / (float)calls.size() : sums[i];
            if (first.type == ncclFloat32) ((float *)call.receive)[i] = value;
            if (first.type == ncclBfloat16) ((__nv_bfloat16 *)call.receive)[i] = __float2bfloat16(value);
        }
    }
}

// One collective of all ranks, whose calls are at the front of their queues, onto the streams.
static inline ncclResult_t emu_nccl_queue(EmuNcclClique *clique) {
    std::vector<EmuNcclCall> calls;
    for (ncclComm_t rank : clique->ranks) {
        if (rank->calls.empty()) return emu_nccl_refuse(ncclInvalidUsage, "a rank of the group does not take part");
        calls.push_back(rank->calls.front());
        rank->calls.pop_front();
    }
    for (const EmuNcclCall &call : calls)
        if (call.kind != calls[0].kind || call.count != calls[0].count || call.type != calls[0].type ||
            call.op_or_root != calls[0].op_or_root)
            return emu_nccl_refuse(ncclInvalidUsage, "the ranks call different collectives");
    int before = 0;
    bool ok = cudaGetDevice(&before) == cudaSuccess;
    for (size_t i = 0; i < calls.size(); i++) {
        ok = ok && cudaSetDevice(clique->ranks[i]->device) == cudaSuccess;
        ok = ok && cudaEventRecord(clique->ranks[i]->arrived, calls[i].stream) == cudaSuccess;
        ok = ok && cudaStreamWaitEvent(calls[0].stream, clique->ranks[i]->arrived, 0) == cudaSuccess;
    }
    emu::enqueue(calls[0].stream, [=] { emu_nccl_run(calls); });
    ok = ok && cudaSetDevice(clique->ranks[0]->device) == cudaSuccess;
    ok = ok && cudaEventRecord(clique->ranks[0]->done, calls[0].stream) == cudaSuccess;
    for (size_t i = 1; i < calls.size(); i++)
        ok = ok && cudaStreamWaitEvent(calls[i].stream, clique->ranks[0]->done, 0) == cudaSuccess;
    ok = ok && cudaSetDevice(before) == cudaSuccess;
    return ok ? ncclSuccess : emu_nccl_refuse(ncclUnhandledCudaError, "a stream is of another device than its rank");
}

static inline ncclResult_t ncclGroupStart() {
    emu_nccl_depth++;
    return ncclSuccess;
}

static inline ncclResult_t ncclGroupEnd() {
    ncclResult_t result = ncclSuccess;
    if (emu_nccl_depth == 0) return emu_nccl_refuse(ncclInvalidUsage, "no group is open");
    if (--emu_nccl_depth > 0) return ncclSuccess;
    for (EmuNcclClique *clique : emu_nccl_waiting) {
        size_t left = 1;
        while (result == ncclSuccess && left > 0) {
            left = 0;
            for (ncclComm_t rank : clique->ranks) left += rank->calls.size();
            if (left > 0) result = emu_nccl_queue(clique);
        }
        for (ncclComm_t rank : clique->ranks) rank->calls.clear();
    }
    emu_nccl_waiting.clear();
    return result;
}

static inline ncclResult_t emu_nccl_call(ncclComm_t comm, EmuNcclCall call) {
    size_t n_bytes = call.count * (call.type == ncclFloat32 ? 4 : 2);
    if (!emu::is_device(call.send, n_bytes) || !emu::is_device(call.receive, n_bytes) ||
        emu::device_of(call.send) != comm->device || emu::device_of(call.receive) != comm->device)
        return emu_nccl_refuse(ncclInvalidArgument, "a buffer is not, or not wholly, in its rank's device memory");
    bool known = false;
    for (EmuNcclClique *clique : emu_nccl_waiting) known = known || clique == comm->clique;
    if (!known) emu_nccl_waiting.push_back(comm->clique);
    comm->calls.push_back(call);
    comm->last = call.stream;
    ncclGroupStart(); // a call on its own is a group of one
    return ncclGroupEnd();
}

static inline ncclResult_t ncclAllReduce(const void *send, void *receive, size_t count, ncclDataType_t type,
                                         ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
    return emu_nccl_call(comm, EmuNcclCall{EmuNcclCall::ALL_REDUCE, send, receive, count, type, op, stream});
}

static inline ncclResult_t ncclBroadcast(const void *send, void *receive, size_t count, ncclDataType_t type, int root,
                                         ncclComm_t comm, cudaStream_t stream) {
    return emu_nccl_call(comm, EmuNcclCall{EmuNcclCall::BROADCAST, send, receive, count, type, root, stream});
}

#endif
