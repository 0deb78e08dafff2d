// NCCL's functions.
#include <unistd.h>

#include <cstdlib>
#include <cstdio>
#include <cstring>
#include <future>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <utility>

#include "../runtime.h"
#include "communicator.h"

#define EXPORTED extern "C" __attribute__((visibility("default")))

using namespace pretended;

namespace {

thread_local std::string t_error;
thread_local int t_group_depth = 0;
thread_local std::vector<Call> t_group;

ncclResult_t failed(ncclResult_t result, const std::string& words) {
    t_error = words;
    return result;
}

// Reductions that a user has made: the factors by which they scale
struct Factors {
    std::mutex mutex;
    int next = 100;
    std::map<int, double> factors;
};

Factors& factors() {
    static auto* all = new Factors();
    return *all;
}

Reduction reduction_of(ncclRedOp_t operation) {
    std::lock_guard<std::mutex> lock(factors().mutex);
    const auto found = factors().factors.find(operation);
    if (found == factors().factors.end()) return {operation, {}};
    return {ncclSum, found->second};
}

double number_at(const void* address, ncclDataType_t type) {
    const char* at = pretended_host(address);
    switch (type) {
        case ncclFloat16: return *reinterpret_cast<const c10::Half*>(at);
        case ncclBfloat16: return *reinterpret_cast<const c10::BFloat16*>(at);
        case ncclFloat32: return *reinterpret_cast<const float*>(at);
        default: return *reinterpret_cast<const double*>(at);
    }
}

// Calls run on the streams that they were given, and those on one communicator in the order in which they were made,
// whatever their streams.
struct Batch {
    std::vector<Call> calls;
    std::vector<std::shared_future<void>> before;
    std::promise<void> done;
};

void run_batch(void* argument) {
    std::unique_ptr<Batch> batch(static_cast<Batch*>(argument));
    for (auto& calls : batch->before) calls.wait();
    run(batch->calls);
    batch->done.set_value();
}

void launch(std::vector<Call> calls) {
    // No stream is the default one of the communicator's device: several devices of one process may have calls here.
    std::map<std::pair<int, cudaStream_t>, Batch*> batches;
    for (auto& call : calls) {
        auto& batch = batches[{call.communicator->device, call.stream}];
        if (!batch) batch = new Batch();
        batch->calls.push_back(call);
    }
    int current = 0;
    cudaGetDevice(&current);
    for (auto [place, batch] : batches) {
        std::set<ncclComm*> communicators;
        for (auto& call : batch->calls) communicators.insert(call.communicator);
        const auto done = batch->done.get_future().share();
        for (auto* communicator : communicators) {
            std::lock_guard<std::mutex> lock(communicator->mutex);
            if (communicator->last_calls.valid()) batch->before.push_back(communicator->last_calls);
            communicator->last_calls = done;
        }
        cudaSetDevice(place.first);
        pretended_enqueue(place.second, run_batch, batch);
    }
    cudaSetDevice(current);
}

bool reduces(Kind kind) { return kind == Kind::kAllReduce || kind == Kind::kReduce || kind == Kind::kReduceScatter; }

ncclResult_t submit(Kind kind, ncclComm_t communicator, const void* from, void* to, size_t count, ncclDataType_t type,
                    ncclRedOp_t operation, int peer, cudaStream_t stream) {
    const bool is_message = kind == Kind::kSend || kind == Kind::kRecv;
    if (peer < 0 || peer >= communicator->size) {
        return failed(ncclInvalidArgument, "rank " + std::to_string(peer) + " is not in the communicator");
    }
    if (reduces(kind) && (type == ncclFloat8e4m3 || type == ncclFloat8e5m2)) {
        return failed(ncclInvalidArgument, "8-bit floating-point numbers are not reduced");
    }
    if (!count && !is_message) return ncclSuccess;
    const size_t all = static_cast<size_t>(communicator->size), bytes = count * width(type);
    const size_t read = kind == Kind::kReduceScatter || kind == Kind::kAllToAll ? bytes * all : bytes;
    const size_t written = kind == Kind::kAllGather || kind == Kind::kAllToAll ? bytes * all : bytes;
    for (const void* address : {from, static_cast<const void*>(to)}) {
        if (!address || !count) continue;
        const int device = pretended_device_of(address);
        if (device == communicator->device) continue;
        const std::string where = device < 0 ? "memory of the host" : "memory of device " + std::to_string(device);
        return failed(ncclInvalidArgument,
                      where + "; the communicator has device " + std::to_string(communicator->device));
    }
    if ((from && !pretended_use(stream, from, read, false)) || (to && !pretended_use(stream, to, written, true))) {
        return failed(ncclUnhandledCudaError, "race: a copy uses the memory; stderr says more");
    }
    t_group.push_back({kind, communicator, from, to, count, type, reduction_of(operation), peer, stream});
    if (!t_group_depth) launch(std::exchange(t_group, {}));
    return ncclSuccess;
}

// Who shares a device, and who has a machine of its own: NCCL_HOSTID, or the name of this one.
std::string machine() {
    char name[256] = "";
    gethostname(name, sizeof name - 1);
    const char* said = getenv("NCCL_HOSTID");
    return said ? said : name;
}

// Every rank tells every other one its device; all return when all have come.
ncclResult_t meet(ncclComm_t* communicator, const std::string& name, int rank, int size) {
    int device = 0;
    if (cudaGetDevice(&device) || !pretended_usable()) return failed(ncclUnhandledCudaError, "initialization error");
    auto* made = new ncclComm(name, rank, size, device);
    const auto own = machine() + " device " + std::to_string(pretended_physical(device));
    for (int peer = 0; peer < size; peer++) made->mailbox.post(Channel::kMeeting, peer, own, nullptr, 0);
    std::map<std::string, int> seen;
    for (int peer = 0; peer < size; peer++) {
        Message message;
        if (!made->mailbox.take(Channel::kMeeting, peer, &message)) return ncclInternalError;
        const auto [other, is_new] = seen.insert({message.title, peer});
        if (!is_new) {
            return failed(ncclInvalidUsage, "Duplicate GPU detected : rank " + std::to_string(other->second) +
                                                " and rank " + std::to_string(peer) + " both on " + message.title);
        }
    }
    *communicator = made;
    return ncclSuccess;
}

void close(ncclComm_t communicator) {
    {
        std::lock_guard<std::mutex> lock(communicator->mutex);
        if (std::exchange(communicator->closed, true)) return;
    }
    communicator->mailbox.close();
}

}  // namespace

EXPORTED ncclResult_t ncclGetVersion(int* version) {
    *version = kNcclVersion;
    return ncclSuccess;
}

EXPORTED const char* ncclGetErrorString(ncclResult_t result) {
    switch (result) {
        case ncclSuccess: return "no error";
        case ncclUnhandledCudaError: return "unhandled cuda error";
        case ncclInvalidArgument: return "invalid argument";
        case ncclInvalidUsage: return "invalid usage";
        case ncclInternalError: return "internal error";
        default: return "an error that the pretended NCCL has no words for";
    }
}

EXPORTED const char* ncclGetLastError(ncclComm_t) { return t_error.c_str(); }

// Communicators

EXPORTED ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
    std::random_device draw;
    *id = {};
    snprintf(id->internal, sizeof id->internal, "pretended-nccl-%08x%08x", draw(), draw());
    return ncclSuccess;
}

EXPORTED ncclResult_t ncclCommInitRank(ncclComm_t* communicator, int size, ncclUniqueId id, int rank) {
    return meet(communicator, id.internal, rank, size);
}

EXPORTED ncclResult_t ncclCommInitRankConfig(ncclComm_t* communicator, int size, ncclUniqueId id, int rank,
                                             ncclConfig_t*) {
    return meet(communicator, id.internal, rank, size);
}

EXPORTED ncclResult_t ncclCommInitRankScalable(ncclComm_t* communicator, int size, int rank, int, ncclUniqueId* ids,
                                               ncclConfig_t*) {
    return meet(communicator, ids[0].internal, rank, size);
}

// All ranks are in this process: a thread for each device meets the others.
EXPORTED ncclResult_t ncclCommInitAll(ncclComm_t* communicators, int size, const int* devices) {
    ncclUniqueId id;
    ncclGetUniqueId(&id);
    std::vector<std::future<ncclResult_t>> meetings;
    for (int rank = 0; rank < size; rank++) {
        meetings.push_back(std::async(std::launch::async, [=] {
            if (cudaSetDevice(devices ? devices[rank] : rank)) return ncclInvalidArgument;
            return meet(&communicators[rank], id.internal, rank, size);
        }));
    }
    ncclResult_t result = ncclSuccess;
    for (auto& meeting : meetings) {
        if (const auto one = meeting.get()) result = one;
    }
    return result;
}

// All ranks of a communicator call it. Those of one color make a new one, in the order of their keys.
EXPORTED ncclResult_t ncclCommSplit(ncclComm_t communicator, int color, int key, ncclComm_t* made, ncclConfig_t*) {
    const int number = communicator->num_splits++;
    const int own[] = {color, key};
    for (int peer = 0; peer < communicator->size; peer++) {
        communicator->mailbox.post(Channel::kMeeting, peer, "split", reinterpret_cast<const char*>(own), sizeof own);
    }
    std::set<std::pair<int, int>> members;  // key, rank
    for (int peer = 0; peer < communicator->size; peer++) {
        Message message;
        int theirs[2];
        if (!communicator->mailbox.take(Channel::kMeeting, peer, &message)) return ncclInternalError;
        memcpy(theirs, message.bytes.data(), sizeof theirs);
        if (theirs[0] == color) members.insert({theirs[1], peer});
    }
    *made = nullptr;
    if (color == kNcclSplitNoColor) return ncclSuccess;
    const auto me = members.find({key, communicator->rank});
    const auto name = communicator->name + "." + std::to_string(number) + "." + std::to_string(color);
    return meet(made, name, static_cast<int>(std::distance(members.begin(), me)), static_cast<int>(members.size()));
}

EXPORTED ncclResult_t ncclCommFinalize(ncclComm_t) { return ncclSuccess; }

EXPORTED ncclResult_t ncclCommDestroy(ncclComm_t communicator) {
    std::shared_future<void> last;
    {
        std::lock_guard<std::mutex> lock(communicator->mutex);
        last = communicator->last_calls;
    }
    if (last.valid()) last.wait();
    close(communicator);
    return ncclSuccess;
}

EXPORTED ncclResult_t ncclCommAbort(ncclComm_t communicator) {
    communicator->mailbox.abort();
    close(communicator);
    return ncclSuccess;
}

EXPORTED ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t* error) {
    *error = ncclSuccess;
    return ncclSuccess;
}

EXPORTED ncclResult_t ncclCommCount(ncclComm_t communicator, int* count) {
    *count = communicator->size;
    return ncclSuccess;
}

EXPORTED ncclResult_t ncclCommUserRank(ncclComm_t communicator, int* rank) {
    *rank = communicator->rank;
    return ncclSuccess;
}

EXPORTED ncclResult_t ncclCommRegister(ncclComm_t, void*, size_t, void** handle) {
    *handle = nullptr;
    return ncclSuccess;
}

EXPORTED ncclResult_t ncclCommDeregister(ncclComm_t, void*) { return ncclSuccess; }

// Calls

EXPORTED ncclResult_t ncclGroupStart() {
    t_group_depth++;
    return ncclSuccess;
}

EXPORTED ncclResult_t ncclGroupEnd() {
    if (!t_group_depth) return failed(ncclInvalidUsage, "ncclGroupEnd without ncclGroupStart");
    if (!--t_group_depth) launch(std::exchange(t_group, {}));
    return ncclSuccess;
}

EXPORTED ncclResult_t ncclAllReduce(const void* from, void* to, size_t count, ncclDataType_t type,
                                    ncclRedOp_t operation, ncclComm_t communicator, cudaStream_t stream) {
    return submit(Kind::kAllReduce, communicator, from, to, count, type, operation, 0, stream);
}

EXPORTED ncclResult_t ncclReduce(const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t operation,
                                 int root, ncclComm_t communicator, cudaStream_t stream) {
    void* receives = communicator->rank == root ? to : nullptr;
    return submit(Kind::kReduce, communicator, from, receives, count, type, operation, root, stream);
}

EXPORTED ncclResult_t ncclBroadcast(const void* from, void* to, size_t count, ncclDataType_t type, int root,
                                    ncclComm_t communicator, cudaStream_t stream) {
    return submit(Kind::kBroadcast, communicator, from, to, count, type, ncclSum, root, stream);
}

EXPORTED ncclResult_t ncclBcast(void* buffer, size_t count, ncclDataType_t type, int root, ncclComm_t communicator,
                                cudaStream_t stream) {
    return submit(Kind::kBroadcast, communicator, buffer, buffer, count, type, ncclSum, root, stream);
}

EXPORTED ncclResult_t ncclAllGather(const void* from, void* to, size_t count, ncclDataType_t type,
                                    ncclComm_t communicator, cudaStream_t stream) {
    return submit(Kind::kAllGather, communicator, from, to, count, type, ncclSum, 0, stream);
}

EXPORTED ncclResult_t ncclReduceScatter(const void* from, void* to, size_t count, ncclDataType_t type,
                                        ncclRedOp_t operation, ncclComm_t communicator, cudaStream_t stream) {
    return submit(Kind::kReduceScatter, communicator, from, to, count, type, operation, 0, stream);
}

EXPORTED ncclResult_t ncclAlltoAll(const void* from, void* to, size_t count, ncclDataType_t type,
                                   ncclComm_t communicator, cudaStream_t stream) {
    return submit(Kind::kAllToAll, communicator, from, to, count, type, ncclSum, 0, stream);
}

EXPORTED ncclResult_t ncclSend(const void* from, size_t count, ncclDataType_t type, int peer, ncclComm_t communicator,
                               cudaStream_t stream) {
    return submit(Kind::kSend, communicator, from, nullptr, count, type, ncclSum, peer, stream);
}

EXPORTED ncclResult_t ncclRecv(void* to, size_t count, ncclDataType_t type, int peer, ncclComm_t communicator,
                               cudaStream_t stream) {
    return submit(Kind::kRecv, communicator, nullptr, to, count, type, ncclSum, peer, stream);
}

EXPORTED ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* operation, void* scalar, ncclDataType_t type,
                                               ncclScalarResidence_t, ncclComm_t) {
    std::lock_guard<std::mutex> lock(factors().mutex);
    const int number = factors().next++;
    factors().factors[number] = number_at(scalar, type);
    *operation = static_cast<ncclRedOp_t>(number);
    return ncclSuccess;
}

EXPORTED ncclResult_t ncclRedOpDestroy(ncclRedOp_t operation, ncclComm_t) {
    std::lock_guard<std::mutex> lock(factors().mutex);
    factors().factors.erase(operation);
    return ncclSuccess;
}
