// What the pretended CUDA runtime offers to the pretended NCCL and to the kernels, beside CUDA's own functions.
#pragma once

struct CUstream_st;

extern "C" {
// Whether this process may use the devices: not if it was forked by one that had used them.
bool pretended_usable();

// The device that an address belongs to; -1 for memory of the host.
int pretended_device_of(const void* address);

// Where the host finds what is at an address of a device; an address of the host is returned as it is.
char* pretended_host(const void* address);

// The number that a device has on the machine, whatever CUDA_VISIBLE_DEVICES says.
int pretended_physical(int device);

// Run a task in the thread of a stream, after all that the stream has been given.
void pretended_enqueue(CUstream_st* stream, void (*task)(void*), void* argument);

// Say that a stream uses memory of a device now. False, and a report: a copy on another stream, for which this one
// has not waited, uses it as well, and one of the two writes.
bool pretended_use(CUstream_st* stream, const void* address, unsigned long bytes, bool writes);

// Block the caller until a stream has done all of its tasks. Not a wait in the sense of `pretended_tell`.
void pretended_drain(CUstream_st* stream);

// Report that the host waits for the device, or did what it must not: a kind, and a detail. May take Python's lock,
// so the caller holds no lock.
void pretended_tell(const char* kind, const char* detail);
void pretended_listen(void (*listener)(const char* kind, const char* detail));

// Let a device have no more than this many bytes.
void pretended_limit_memory(int device, unsigned long bytes);
}
