// Streams and events. See Note [Who knows what].
#include "streams.h"

#include <thread>
#include <vector>

#include "../runtime.h"
#include "copies.h"
#include "devices.h"

namespace pretended {
namespace {

struct Event {
    std::shared_ptr<Completion> completion;  // none: never recorded
    Clock clock;                             // guarded by `clock_mutex()`
};

struct Streams {
    std::mutex mutex;
    std::vector<Stream*> all;
    std::map<int, Stream*> by_default;
};

Streams& streams() {
    static auto* found = new Streams();
    return *found;
}

Stream* made(int device) {
    auto* stream = new Stream(device);
    streams().all.push_back(stream);
    return stream;
}

Event* event_of(cudaEvent_t handle) { return reinterpret_cast<Event*>(handle); }

Clock clock_of(const Clock& clock) {
    std::lock_guard<std::mutex> lock(clock_mutex());
    return clock;
}

cudaError_t arrived(const Clock& clock) { return finish_copies(clock) ? cudaSuccess : failed(cudaErrorUnknown); }

}  // namespace

void Completion::complete() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        complete_ = true;
        at_ = std::chrono::steady_clock::now();
    }
    changed_.notify_all();
}

void Completion::wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return complete_; });
}

bool Completion::is_complete() {
    std::lock_guard<std::mutex> lock(mutex_);
    return complete_;
}

std::chrono::steady_clock::time_point Completion::at() {
    std::lock_guard<std::mutex> lock(mutex_);
    return at_;
}

void Stream::enqueue(std::function<void()> task) {
    std::lock_guard<std::mutex> lock(mutex_);
    tasks_.push_back(std::move(task));
    if (!has_thread_) std::thread([this] { run_tasks(); }).detach();
    has_thread_ = true;
    changed_.notify_all();
}

void Stream::run_tasks() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
        changed_.wait(lock, [this] { return !tasks_.empty(); });
        auto task = std::move(tasks_.front());
        tasks_.pop_front();
        running_ = true;
        lock.unlock();
        task();
        task = nullptr;
        lock.lock();
        running_ = false;
        changed_.notify_all();
    }
}

bool Stream::is_idle() {
    std::lock_guard<std::mutex> lock(mutex_);
    return tasks_.empty() && !running_;
}

void Stream::drain() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return tasks_.empty() && !running_; });
}

Stream* stream_of(cudaStream_t handle) {
    if (handle && handle != cudaStreamLegacy && handle != cudaStreamPerThread) {
        return reinterpret_cast<Stream*>(handle);
    }
    std::lock_guard<std::mutex> lock(streams().mutex);
    auto& found = streams().by_default[current_device()];
    if (!found) found = made(current_device());
    return found;
}

std::mutex& clock_mutex() {
    static auto* mutex = new std::mutex();
    return *mutex;
}

uint64_t tick(Stream* stream) {
    static uint64_t last = 0;
    return stream->clock[stream] = ++last;
}

}  // namespace pretended

using namespace pretended;

EXPORTED void pretended_drain(cudaStream_t stream) {
    copy_has_waited(nullptr);
    stream_of(stream)->drain();
}

EXPORTED void pretended_enqueue(cudaStream_t stream, void (*task)(void*), void* argument) {
    stream_of(stream)->enqueue([task, argument] { task(argument); });
}

// Streams

EXPORTED cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
    RETURN_UNLESS_USABLE;
    std::lock_guard<std::mutex> lock(streams().mutex);
    *stream = reinterpret_cast<cudaStream_t>(made(current_device()));
    return cudaSuccess;
}

EXPORTED cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
    return cudaStreamCreateWithPriority(stream, flags, 0);
}

EXPORTED cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }

EXPORTED cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }

EXPORTED cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) {
    *priority = 0;
    return cudaSuccess;
}

EXPORTED cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}

EXPORTED cudaError_t cudaStreamQuery(cudaStream_t handle) {
    RETURN_UNLESS_USABLE;
    auto* stream = stream_of(handle);
    return stream->is_idle() ? arrived(clock_of(stream->clock)) : cudaErrorNotReady;
}

EXPORTED cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
    RETURN_UNLESS_USABLE;
    auto* stream = stream_of(handle);
    if (!copy_has_waited(stream)) pretended_tell("cudaStreamSynchronize", "");
    stream->drain();
    return arrived(clock_of(stream->clock));
}

EXPORTED cudaError_t cudaDeviceSynchronize() {
    RETURN_UNLESS_USABLE;
    pretended_tell("cudaDeviceSynchronize", "");
    std::vector<Stream*> all;
    {
        std::lock_guard<std::mutex> lock(streams().mutex);
        all = streams().all;
    }
    auto result = cudaSuccess;
    for (auto* stream : all) {
        if (stream->device != current_device()) continue;
        stream->drain();
        if (const auto error = arrived(clock_of(stream->clock))) result = error;
    }
    return result;
}

EXPORTED cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t waited_for, unsigned) {
    RETURN_UNLESS_USABLE;
    auto* stream = stream_of(handle);
    auto* event = event_of(waited_for);
    if (!event->completion) return cudaSuccess;
    {
        std::lock_guard<std::mutex> lock(clock_mutex());
        for (const auto& [other, number] : event->clock) {
            auto& known = stream->clock[other];
            known = std::max(known, number);
        }
    }
    auto completion = event->completion;
    if (!completion->is_complete()) stream->enqueue([completion] { completion->wait(); });
    return cudaSuccess;
}

EXPORTED cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void* data, unsigned) {
    RETURN_UNLESS_USABLE;
    stream_of(stream)->enqueue([=] { function(stream, cudaSuccess, data); });
    return cudaSuccess;
}

EXPORTED cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
    RETURN_UNLESS_USABLE;
    stream_of(stream)->enqueue([=] { function(data); });
    return cudaSuccess;
}

// Nothing captures: there are no CUDA graphs.

EXPORTED cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

EXPORTED cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long* id,
                                              cudaGraph_t*, const cudaGraphNode_t**, const cudaGraphEdgeData**,
                                              size_t*) {
    *status = cudaStreamCaptureStatusNone;
    if (id) *id = 0;
    return cudaSuccess;
}

EXPORTED cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }

// Events

EXPORTED cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
    RETURN_UNLESS_USABLE;
    *event = reinterpret_cast<cudaEvent_t>(new Event());
    return cudaSuccess;
}

EXPORTED cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }

EXPORTED cudaError_t cudaEventDestroy(cudaEvent_t event) {
    delete event_of(event);
    return cudaSuccess;
}

EXPORTED cudaError_t cudaEventRecordWithFlags(cudaEvent_t recorded, cudaStream_t handle, unsigned) {
    RETURN_UNLESS_USABLE;
    auto* stream = stream_of(handle);
    auto* event = event_of(recorded);
    {
        std::lock_guard<std::mutex> lock(clock_mutex());
        tick(stream);
        event->clock = stream->clock;
    }
    auto completion = event->completion = std::make_shared<Completion>();
    if (stream->is_idle()) {
        completion->complete();
    } else {
        stream->enqueue([completion] { completion->complete(); });
    }
    return cudaSuccess;
}

EXPORTED cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    return cudaEventRecordWithFlags(event, stream, 0);
}

EXPORTED cudaError_t cudaEventQuery(cudaEvent_t queried) {
    RETURN_UNLESS_USABLE;
    auto* event = event_of(queried);
    if (!event->completion) return cudaSuccess;
    return event->completion->is_complete() ? arrived(clock_of(event->clock)) : cudaErrorNotReady;
}

EXPORTED cudaError_t cudaEventSynchronize(cudaEvent_t waited_for) {
    RETURN_UNLESS_USABLE;
    auto* event = event_of(waited_for);
    pretended_tell("cudaEventSynchronize", "");
    if (!event->completion) return cudaSuccess;
    event->completion->wait();
    return arrived(clock_of(event->clock));
}

EXPORTED cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
    auto from = event_of(start)->completion, to = event_of(end)->completion;
    if (!from || !to) return failed(cudaErrorInvalidResourceHandle);
    if (!from->is_complete() || !to->is_complete()) return cudaErrorNotReady;
    *milliseconds = std::chrono::duration<float, std::milli>(to->at() - from->at()).count();
    return cudaSuccess;
}
