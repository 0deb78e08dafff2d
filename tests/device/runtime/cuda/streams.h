// Streams, and what the host knows of their progress.
//
// Note [Who knows what]
// Kernels run at once, in the thread that launches them. What a stream does later are the messages of NCCL, the
// events and waits between them, and callbacks: tasks, which a thread of the stream runs in order. A kernel or a copy
// first waits until its stream has none. A copy between the host and a device is done for the host only when the host
// has waited for it: for its stream, or for an event that was recorded after it, or for a stream or an event that had
// waited for one of these. So a stream and an event each carry a `Clock`: for each stream, the number of its last
// copy that happened before.
#pragma once

#include <cuda_runtime_api.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>

namespace pretended {

class Stream;
using Clock = std::map<const Stream*, uint64_t>;

// Something that is done once, and that others wait for.
class Completion {
 public:
    void complete();
    void wait();
    bool is_complete();
    std::chrono::steady_clock::time_point at();  // of the completion

 private:
    std::mutex mutex_;
    std::condition_variable changed_;
    bool complete_ = false;
    std::chrono::steady_clock::time_point at_;
};

// Never destroyed: its thread, and what was recorded on it, may outlive it.
class Stream {
 public:
    explicit Stream(int device) : device(device) {}

    void enqueue(std::function<void()> task);
    bool is_idle();
    void drain();

    const int device;
    Clock clock;  // guarded by `clock_mutex()`

 private:
    void run_tasks();

    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<std::function<void()>> tasks_;
    bool running_ = false, has_thread_ = false;
};

// The stream behind CUDA's handle; the current device's default stream behind none.
Stream* stream_of(cudaStream_t handle);

std::mutex& clock_mutex();

// The number of something that a stream does now. The caller holds `clock_mutex()`.
uint64_t tick(Stream* stream);

}  // namespace pretended
