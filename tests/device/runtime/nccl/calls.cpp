// What the calls do, in the thread of a stream.
#include <cstdio>
#include <cstring>

#include "../runtime.h"
#include "communicator.h"

namespace pretended {
namespace {

const char* const kNames[] = {"all_reduce",     "reduce",     "broadcast", "all_gather",
                              "reduce_scatter", "all_to_all", "send",      "recv"};

bool has_root(Kind kind) { return kind == Kind::kBroadcast || kind == Kind::kReduce; }

bool has_slices(Kind kind) { return kind == Kind::kReduceScatter || kind == Kind::kAllToAll; }

// Which must be the same on all ranks.
std::string title_of(const Call& call) {
    return std::string(kNames[static_cast<int>(call.kind)]) + " of " + std::to_string(call.count) +
           " elements of type " + std::to_string(call.type) +
           (has_root(call.kind) ? ", root " + std::to_string(call.peer)
                                : ", reduction " + std::to_string(call.reduction.operation));
}

// Where a rank is told only that this one has come, no bytes are sent.
bool sends_to(const Call& call, int rank) {
    if (call.kind == Kind::kBroadcast) return call.communicator->rank == call.peer;
    return call.kind != Kind::kReduce || rank == call.peer;
}

void post(const Call& call) {
    auto& mailbox = call.communicator->mailbox;
    const size_t size = call.count * width(call.type);
    const char* from = pretended_host(call.from);
    if (call.kind == Kind::kRecv) return;
    if (call.kind == Kind::kSend) return mailbox.post(Channel::kSendRecv, call.peer, "", from, size);
    const auto title = title_of(call);
    for (int rank = 0; rank < call.communicator->size; rank++) {
        const size_t offset = has_slices(call.kind) ? static_cast<size_t>(rank) * size : 0;
        mailbox.post(Channel::kCollective, rank, title, from + offset, sends_to(call, rank) ? size : 0);
    }
}

void hang(const Call& call, int peer, const std::string& own, const std::string& theirs) {
    fprintf(stderr, "pretended NCCL: rank %d calls %s, rank %d %s: they hang\n", call.communicator->rank, own.c_str(),
            peer, theirs.c_str());
    call.communicator->mailbox.wait_for_abort();
}

void receive(const Call& call) {
    const size_t size = call.count * width(call.type);
    Message message;
    if (!call.communicator->mailbox.take(Channel::kSendRecv, call.peer, &message)) return;
    if (message.bytes.size() != size) {
        return hang(call, call.peer, "recv of " + std::to_string(size) + " bytes",
                    "send of " + std::to_string(message.bytes.size()) + " bytes");
    }
    memcpy(pretended_host(call.to), message.bytes.data(), size);
}

void finish(const Call& call) {
    auto* communicator = call.communicator;
    const size_t size = call.count * width(call.type);
    const auto title = title_of(call);
    std::vector<std::vector<char>> contributions;
    for (int rank = 0; rank < communicator->size; rank++) {
        Message message;
        if (!communicator->mailbox.take(Channel::kCollective, rank, &message)) return;
        if (message.title != title) return hang(call, rank, title, message.title);
        contributions.push_back(std::move(message.bytes));
    }
    char* to = pretended_host(call.to);
    switch (call.kind) {
        case Kind::kReduce:
            if (communicator->rank != call.peer) break;
            [[fallthrough]];
        case Kind::kAllReduce:
        case Kind::kReduceScatter: reduce(contributions, to, call.count, call.type, call.reduction); break;
        case Kind::kBroadcast: memcpy(to, contributions[static_cast<size_t>(call.peer)].data(), size); break;
        default:
            for (size_t rank = 0; rank < contributions.size(); rank++) {
                memcpy(to + rank * size, contributions[rank].data(), size);
            }
    }
}

}  // namespace

void run(const std::vector<Call>& calls) {
    for (const auto& call : calls) post(call);
    for (const auto& call : calls) {
        if (call.kind == Kind::kRecv) receive(call);
        if (call.kind < Kind::kSend) finish(call);
    }
}

}  // namespace pretended
