// A communicator, its calls, and the order in which they run.
#pragma once

#include <future>
#include <mutex>
#include <string>
#include <vector>

#include "arithmetic.h"
#include "mailbox.h"
#include "nccl.h"

// Never freed: torch may ask an aborted one for its error, and streams may hold calls of it.
struct ncclComm {
    ncclComm(const std::string& name, int rank, int size, int device)
        : name(name), rank(rank), size(size), device(device), mailbox(name, rank, size) {}

    const std::string name;
    const int rank, size, device;
    pretended::Mailbox mailbox;

    std::mutex mutex;
    int num_splits = 0;
    bool closed = false;
    std::shared_future<void> last_calls;  // when the calls are done that were made last
};

namespace pretended {

enum class Kind { kAllReduce, kReduce, kBroadcast, kAllGather, kReduceScatter, kAllToAll, kSend, kRecv };

struct Call {
    Kind kind;
    ncclComm* communicator;
    const void* from;
    void* to;
    size_t count;
    ncclDataType_t type;
    Reduction reduction;
    int peer;  // or the root
    cudaStream_t stream;
};

// Runs calls that belong together: all that they send is on its way before one waits for what it receives.
void run(const std::vector<Call>& calls);

}  // namespace pretended
