// NVIDIA's management library, of which torch asks how many devices there are, and what they are called: a process
// that asks it stays one that may be forked.
#include <cstdio>
#include <cstdint>

#include "../identity.h"

#define EXPORTED extern "C" __attribute__((visibility("default")))

EXPORTED int nvmlInit() { return 0; }

EXPORTED int nvmlInit_v2() { return 0; }

EXPORTED int nvmlShutdown() { return 0; }

EXPORTED int nvmlDeviceGetCount_v2(int* count) {
    *count = pretended::machine_devices();
    return 0;
}

EXPORTED int nvmlDeviceGetHandleByIndex_v2(unsigned device, void** handle) {
    *handle = reinterpret_cast<void*>(static_cast<uintptr_t>(device) + 1);
    return 0;
}

// Bus numbers begin at 1.
EXPORTED int nvmlDeviceGetHandleByPciBusId_v2(const char* bus, void** handle) {
    unsigned domain = 0, number = 0;
    if (sscanf(bus, "%x:%x", &domain, &number) != 2) return 2;  // invalid argument
    return nvmlDeviceGetHandleByIndex_v2(number - 1, handle);
}

EXPORTED int nvmlDeviceGetComputeRunningProcesses(void*, unsigned* count, void*) {
    *count = 0;
    return 0;
}

EXPORTED int nvmlDeviceGetUUID(void* handle, char* text, unsigned size) {
    const auto device = reinterpret_cast<uintptr_t>(handle) - 1;
    snprintf(text, size, "%s", pretended::uuid(static_cast<int>(device)).c_str());
    return 0;
}
