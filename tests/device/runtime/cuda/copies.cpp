// Copies. One between pinned memory and a device goes on until the host has waited for it:
// - to the host: the bytes are taken at once, and arrive at the end; until then a pattern is there.
// - to the device: the bytes are taken at once, and compared at the end with what is there then. Where they differ,
// the
//   host has written to memory that was being read, and a GPU would have computed with either.
// A copy of pageable memory keeps the host waiting, whatever was asked for. See Note [Who knows what].
// What a kernel or a message uses on another stream, which has not waited for the copy, must not be what the copy
// writes, nor may it write what the copy reads.
#include "copies.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <list>
#include <string>
#include <vector>

#include "../runtime.h"
#include "devices.h"
#include "memory.h"

namespace pretended {
namespace {

constexpr unsigned char kPattern = 0xEE;

struct Copy {
    const Stream* stream;
    uint64_t number;
    bool to_host;
    char* address;       // on the host
    const char* device;  // on the device
    std::vector<char> bytes;
};

// Guarded by `clock_mutex()`.
std::list<Copy>& unfinished() {
    static auto* copies = new std::list<Copy>();
    return *copies;
}

thread_local const Stream* t_has_waited = nullptr;

void report_race(const std::string& what, size_t bytes) {
    const std::string detail = what + ": " + std::to_string(bytes) + " bytes";
    fprintf(stderr, "race: %s\n", detail.c_str());
    pretended_tell("race", detail.c_str());
}

template <class Condition>
bool finish(const Condition& is_done) {
    std::list<Copy> done;
    {
        std::lock_guard<std::mutex> lock(clock_mutex());
        auto& copies = unfinished();
        for (auto copy = copies.begin(); copy != copies.end();) {
            const auto next = std::next(copy);
            if (is_done(*copy)) done.splice(done.end(), copies, copy);
            copy = next;
        }
        for (auto& copy : done) {
            if (copy.to_host) memcpy(copy.address, copy.bytes.data(), copy.bytes.size());
        }
    }
    bool right = true;
    for (auto& copy : done) {
        if (copy.to_host || !memcmp(copy.address, copy.bytes.data(), copy.bytes.size())) continue;
        right = false;
        report_race("pinned memory was written while it was copied to the device", copy.bytes.size());
    }
    return right;
}

cudaError_t copy(void* to, const void* from, size_t bytes, cudaStream_t handle) {
    RETURN_UNLESS_USABLE;
    if (!bytes) return cudaSuccess;
    auto* stream = stream_of(handle);
    const bool to_device = device_of(to) >= 0, from_device = device_of(from) >= 0;
    t_has_waited = nullptr;
    stream->drain();
    if (!pretended_use(handle, from, bytes, false) || !pretended_use(handle, to, bytes, true)) {
        return failed(cudaErrorUnknown);
    }
    if (to_device == from_device) {
        memmove(host(to), host(from), bytes);
        return cudaSuccess;
    }
    char* here = static_cast<char*>(to_device ? const_cast<void*>(from) : to);
    if (pinned(here)) {
        const char *there = static_cast<const char*>(to_device ? to : from), *source = host(from);
        std::lock_guard<std::mutex> lock(clock_mutex());
        unfinished().push_back({stream, tick(stream), !to_device, here, there, {source, source + bytes}});
        if (to_device) memcpy(host(to), from, bytes);
        if (from_device) memset(to, kPattern, bytes);  // before another thread, which waits, can finish the copy
        return cudaSuccess;
    }
    pretended_tell(to_device ? "copy from pageable memory" : "copy to pageable memory",
                   std::to_string(bytes).c_str());
    memcpy(host(to), host(from), bytes);
    t_has_waited = stream;
    return cudaSuccess;
}

cudaError_t fill(void* address, int value, size_t bytes, cudaStream_t stream) {
    RETURN_UNLESS_USABLE;
    stream_of(stream)->drain();
    memset(host(address), value, bytes);
    return cudaSuccess;
}

}  // namespace

bool finish_copies(const Clock& clock) {
    return finish([&clock](const Copy& copy) {
        const auto known = clock.find(copy.stream);
        return known != clock.end() && copy.number <= known->second;
    });
}

void finish_copies(const char* address, size_t bytes) {
    finish([=](const Copy& copy) { return copy.address >= address && copy.address < address + bytes; });
}

bool copy_has_waited(const Stream* stream) {
    const bool has = t_has_waited == stream;
    t_has_waited = nullptr;
    return has;
}

}  // namespace pretended

using namespace pretended;

EXPORTED bool pretended_use(cudaStream_t handle, const void* address, unsigned long bytes, bool writes) {
    const auto* stream = stream_of(handle);
    const auto* begin = static_cast<const char*>(address);
    {
        std::lock_guard<std::mutex> lock(clock_mutex());
        const auto is_race = [&](const Copy& copy) {
            if (copy.stream == stream || (copy.to_host && !writes)) return false;
            if (begin >= copy.device + copy.bytes.size() || begin + bytes <= copy.device) return false;
            const auto known = stream->clock.find(copy.stream);
            return known == stream->clock.end() || known->second < copy.number;
        };
        const auto& copies = unfinished();
        if (std::none_of(copies.begin(), copies.end(), is_race)) return true;
    }
    report_race("a stream uses device memory of a copy on another stream, for which it has not waited", bytes);
    return false;
}

EXPORTED cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
    return copy(to, from, bytes, stream);
}

EXPORTED cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes, cudaStream_t stream) {
    return copy(to, from, bytes, stream);
}

EXPORTED cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
    if (const auto error = copy(to, from, bytes, nullptr)) return error;
    return cudaStreamSynchronize(nullptr);
}

EXPORTED cudaError_t cudaMemset(void* address, int value, size_t bytes) {
    return fill(address, value, bytes, nullptr);
}

EXPORTED cudaError_t cudaMemsetAsync(void* address, int value, size_t bytes, cudaStream_t stream) {
    return fill(address, value, bytes, stream);
}
