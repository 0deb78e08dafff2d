// Memory of a device is a file without a name that is mapped twice: once with no access, at the addresses that torch
// is given, so that a host that reads or writes there ends with a segmentation fault; and once for the kernels. New
// memory is filled with a pattern. Freed memory goes back to the machine.
#include "memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#include "../runtime.h"
#include "copies.h"
#include "devices.h"

namespace pretended {
namespace {

constexpr int kMostDevices = 16;
constexpr size_t kAlignment = 512;
constexpr unsigned char kNewMemory = 0xCD;

struct Memory {
    int file = -1;
    char* device = nullptr;                        // as torch knows it
    char* host = nullptr;                          // as the kernels know it
    size_t limit = 0, allocated = 0;               // bytes
    std::map<size_t, size_t> free_blocks, blocks;  // offset -> bytes
};

struct Pinned {
    std::mutex mutex;
    std::map<const char*, size_t> blocks;  // address -> bytes
};

Memory g_memory[kMostDevices];
int g_num_devices = 0;
std::mutex& memory_mutex() {
    static auto* mutex = new std::mutex();
    return *mutex;
}
Pinned& all_pinned() {
    static auto* all = new Pinned();
    return *all;
}

// Of addresses, for each device: PRETENDED_BYTES, or 4 GiB. Physical memory is taken as it is written.
size_t reserved_bytes() {
    const char* text = getenv("PRETENDED_BYTES");
    static const size_t bytes = text ? strtoull(text, nullptr, 10) : size_t{4} << 30;
    return bytes;
}

void pin(const void* address, size_t bytes) {
    std::lock_guard<std::mutex> lock(all_pinned().mutex);
    all_pinned().blocks[static_cast<const char*>(address)] = bytes;
}

void unpin(const void* address) {
    size_t bytes = 0;
    {
        std::lock_guard<std::mutex> lock(all_pinned().mutex);
        auto found = all_pinned().blocks.find(static_cast<const char*>(address));
        if (found == all_pinned().blocks.end()) return;
        bytes = found->second;
        all_pinned().blocks.erase(found);
    }
    finish_copies(static_cast<const char*>(address), bytes);
}

}  // namespace

void reserve_memory(int num_devices) {
    g_num_devices = std::min(num_devices, kMostDevices);
    for (int device = 0; device < g_num_devices; device++) {
        auto& memory = g_memory[device];
        const size_t bytes = reserved_bytes();
        memory.file = memfd_create("pretended-device", MFD_CLOEXEC);
        if (memory.file < 0 || ftruncate(memory.file, static_cast<off_t>(bytes))) abort();
        const int shared = MAP_SHARED | MAP_NORESERVE;
        memory.host = static_cast<char*>(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, shared, memory.file, 0));
        memory.device = static_cast<char*>(mmap(nullptr, bytes, PROT_NONE, shared, memory.file, 0));
        if (memory.host == MAP_FAILED || memory.device == MAP_FAILED) abort();
        madvise(memory.host, bytes, MADV_DONTFORK);
        madvise(memory.device, bytes, MADV_DONTFORK);
        memory.limit = bytes;
        memory.free_blocks[0] = bytes;
    }
}

size_t total_memory(int device) { return g_memory[device].limit; }

int device_of(const void* address) {
    for (int device = 0; device < g_num_devices; device++) {
        const auto& memory = g_memory[device];
        if (address >= memory.device && address < memory.device + reserved_bytes()) return device;
    }
    return -1;
}

char* host(const void* address) {
    auto* at = static_cast<char*>(const_cast<void*>(address));
    const int device = device_of(address);
    return device < 0 ? at : g_memory[device].host + (at - g_memory[device].device);
}

bool pinned(const void* address) {
    std::lock_guard<std::mutex> lock(all_pinned().mutex);
    const auto* at = static_cast<const char*>(address);
    auto after = all_pinned().blocks.upper_bound(at);
    if (after == all_pinned().blocks.begin()) return false;
    --after;
    return at < after->first + after->second;
}

}  // namespace pretended

using namespace pretended;

EXPORTED int pretended_device_of(const void* address) { return device_of(address); }

EXPORTED char* pretended_host(const void* address) { return host(address); }

EXPORTED void pretended_limit_memory(int device, unsigned long bytes) {
    if (!usable() || device >= g_num_devices) return;
    std::lock_guard<std::mutex> lock(memory_mutex());
    g_memory[device].limit = std::min<size_t>(bytes, reserved_bytes());
}

EXPORTED cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
    RETURN_UNLESS_USABLE;
    std::lock_guard<std::mutex> lock(memory_mutex());
    const auto& memory = g_memory[current_device()];
    *total = memory.limit;
    *free = memory.limit - std::min(memory.limit, memory.allocated);
    return cudaSuccess;
}

EXPORTED cudaError_t cudaMalloc(void** address, size_t bytes) {
    RETURN_UNLESS_USABLE;
    std::lock_guard<std::mutex> lock(memory_mutex());
    auto& memory = g_memory[current_device()];
    const size_t wanted = (bytes + kAlignment - 1) / kAlignment * kAlignment;
    if (memory.allocated + wanted > memory.limit) return failed(cudaErrorMemoryAllocation);
    for (auto block = memory.free_blocks.begin(); block != memory.free_blocks.end(); ++block) {
        const auto [offset, size] = *block;
        if (size < wanted) continue;
        memory.free_blocks.erase(block);
        if (size > wanted) memory.free_blocks[offset + wanted] = size - wanted;
        memory.blocks[offset] = wanted;
        memory.allocated += wanted;
        memset(memory.host + offset, kNewMemory, std::min<size_t>(wanted, 1 << 20));  // all of it would be slow
        *address = memory.device + offset;
        return cudaSuccess;
    }
    return failed(cudaErrorMemoryAllocation);
}

EXPORTED cudaError_t cudaFree(void* address) {
    if (!address) return cudaSuccess;
    RETURN_UNLESS_USABLE;
    const int device = device_of(address);
    if (device < 0) return failed(cudaErrorInvalidValue);
    std::lock_guard<std::mutex> lock(memory_mutex());
    auto& memory = g_memory[device];
    auto block = memory.blocks.find(static_cast<char*>(address) - memory.device);
    if (block == memory.blocks.end()) return failed(cudaErrorInvalidValue);
    auto [offset, size] = *block;
    memory.blocks.erase(block);
    memory.allocated -= size;
    fallocate(memory.file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
              static_cast<off_t>(size));
    auto next = memory.free_blocks.lower_bound(offset);
    if (next != memory.free_blocks.end() && next->first == offset + size) {
        size += next->second;
        next = memory.free_blocks.erase(next);
    }
    if (next != memory.free_blocks.begin()) {
        auto before = std::prev(next);
        if (before->first + before->second == offset) {
            before->second += size;
            return cudaSuccess;
        }
    }
    memory.free_blocks[offset] = size;
    return cudaSuccess;
}

EXPORTED cudaError_t cudaHostAlloc(void** address, size_t bytes, unsigned) {
    RETURN_UNLESS_USABLE;
    constexpr size_t page = 4096;
    *address = aligned_alloc(page, (bytes + page - 1) / page * page);
    memset(*address, kNewMemory, bytes);
    pin(*address, bytes);
    return cudaSuccess;
}

EXPORTED cudaError_t cudaFreeHost(void* address) {
    unpin(address);
    free(address);
    return cudaSuccess;
}

EXPORTED cudaError_t cudaHostRegister(void* address, size_t bytes, unsigned) {
    RETURN_UNLESS_USABLE;
    pin(address, bytes);
    return cudaSuccess;
}

EXPORTED cudaError_t cudaHostUnregister(void* address) {
    if (!pinned(address)) return failed(cudaErrorHostMemoryNotRegistered);
    unpin(address);
    return cudaSuccess;
}

EXPORTED cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* address) {
    auto& of = *attributes;
    of = {};
    auto* at = const_cast<void*>(address);
    const int device = device_of(address);
    if (device >= 0) {
        of.type = cudaMemoryTypeDevice;
        of.device = device;
        of.devicePointer = at;
    } else if (pinned(address)) {
        of.type = cudaMemoryTypeHost;
        of.device = current_device();
        of.hostPointer = of.devicePointer = at;
    } else {
        of.type = cudaMemoryTypeUnregistered;
        of.device = -1;
        of.hostPointer = at;
    }
    return cudaSuccess;
}
