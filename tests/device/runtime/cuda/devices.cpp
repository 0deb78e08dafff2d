// Devices: how many, what they are called, which one is current. CUDA_VISIBLE_DEVICES is read as the driver reads it.
#include "devices.h"

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>
#include <vector>

#include "../identity.h"
#include "../runtime.h"
#include "memory.h"

namespace pretended {
namespace {

thread_local int t_device = 0;
thread_local cudaError_t t_last_error = cudaSuccess;

pid_t g_owner = 0;  // the process that has set the devices up
std::vector<int>& visible() {
    static auto* devices = new std::vector<int>();  // never destroyed: threads of streams outlive `main`
    return *devices;
}

// The machine's number of the device that a word of CUDA_VISIBLE_DEVICES names; -1 for none.
int named(const std::string& word) {
    if (word.rfind("GPU-", 0) == 0) {
        int found = -1;
        for (int device = 0; device < machine_devices(); device++) {
            if (uuid(device).rfind(word, 0) != 0) continue;
            if (found >= 0) return -1;  // the beginning of two identities names neither
            found = device;
        }
        return found;
    }
    char* end = nullptr;
    const long number = strtol(word.c_str(), &end, 10);
    return end != word.c_str() && number >= 0 && number < machine_devices() ? static_cast<int>(number) : -1;
}

// A word that names no device ends the list; a device that is named twice leaves none.
std::vector<int> read_visible() {
    std::vector<int> devices;
    const char* text = getenv("CUDA_VISIBLE_DEVICES");
    if (!text) {
        for (int device = 0; device < machine_devices(); device++) devices.push_back(device);
        return devices;
    }
    std::string rest = text;
    while (!rest.empty()) {
        const auto comma = rest.find(',');
        std::string word = rest.substr(0, comma);
        word.erase(0, word.find_first_not_of(' '));
        rest = comma == std::string::npos ? "" : rest.substr(comma + 1);
        const int device = named(word);
        if (device < 0) break;
        for (int other : devices) {
            if (other == device) return {};
        }
        devices.push_back(device);
    }
    return devices;
}

}  // namespace

bool usable() {
    static std::mutex mutex;
    std::lock_guard<std::mutex> lock(mutex);
    if (!g_owner) {
        visible() = read_visible();
        reserve_memory(static_cast<int>(visible().size()));
        g_owner = getpid();
    }
    return g_owner == getpid();
}

int num_devices() { return static_cast<int>(visible().size()); }

int current_device() { return t_device; }

cudaError_t failed(cudaError_t error) {
    if (error != cudaSuccess) t_last_error = error;
    return error;
}

}  // namespace pretended

using namespace pretended;

EXPORTED bool pretended_usable() { return usable(); }

EXPORTED int pretended_physical(int device) { return visible()[device]; }

EXPORTED cudaError_t cudaGetDeviceCount(int* count) {
    RETURN_UNLESS_USABLE;
    *count = num_devices();
    if (*count) return cudaSuccess;
    return failed(machine_devices() ? cudaErrorNoDevice : cudaErrorInsufficientDriver);
}

EXPORTED cudaError_t cudaGetDevice(int* device) {
    *device = t_device;
    return cudaSuccess;
}

EXPORTED cudaError_t cudaSetDevice(int device) {
    RETURN_UNLESS_USABLE;
    if (device < 0 || device >= num_devices()) return failed(cudaErrorInvalidDevice);
    t_device = device;
    return cudaSuccess;
}

EXPORTED cudaError_t cudaDriverGetVersion(int* version) {
    *version = machine_devices() ? CUDART_VERSION : 0;  // 0: there is no driver
    return cudaSuccess;
}

EXPORTED cudaError_t cudaRuntimeGetVersion(int* version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}

// The figures are those of an H100, except the memory.
EXPORTED cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
    RETURN_UNLESS_USABLE;
    if (device < 0 || device >= num_devices()) return failed(cudaErrorInvalidDevice);
    auto& of = *properties;
    of = {};
    strcpy(of.name, "Pretended GPU");
    uuid_bytes(visible()[device], reinterpret_cast<unsigned char*>(of.uuid.bytes));
    of.pciBusID = visible()[device] + 1;
    of.totalGlobalMem = total_memory(device);
    of.major = 9;
    of.multiProcessorCount = 132;
    of.warpSize = 32;
    of.maxThreadsPerBlock = 1024;
    of.maxThreadsPerMultiProcessor = 2048;
    of.maxThreadsDim[0] = of.maxThreadsDim[1] = 1024;
    of.maxThreadsDim[2] = 64;
    of.maxGridSize[0] = 2147483647;
    of.maxGridSize[1] = of.maxGridSize[2] = 65535;
    of.maxBlocksPerMultiProcessor = 32;
    of.sharedMemPerBlock = 48 << 10;
    of.sharedMemPerBlockOptin = 227 << 10;
    of.sharedMemPerMultiprocessor = 228 << 10;
    of.regsPerBlock = of.regsPerMultiprocessor = 64 << 10;
    of.l2CacheSize = 50 << 20;
    return cudaSuccess;
}

EXPORTED cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
    *value = attribute == cudaDevAttrComputeCapabilityMajor ? 9
             : attribute == cudaDevAttrMultiProcessorCount  ? 132
                                                            : 0;
    return cudaSuccess;
}

EXPORTED cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int device) {
    snprintf(text, size, "0000:%02x:00.0", visible()[device] + 1);
    return cudaSuccess;
}

EXPORTED cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
    *can = 1;
    return cudaSuccess;
}

EXPORTED cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }

EXPORTED cudaError_t cudaGetLastError() {
    const auto error = t_last_error;
    t_last_error = cudaSuccess;
    return error;
}

EXPORTED cudaError_t cudaPeekAtLastError() { return t_last_error; }

EXPORTED const char* cudaGetErrorString(cudaError_t error) {
    switch (error) {
        case cudaSuccess: return "no error";
        case cudaErrorInvalidValue: return "invalid argument";
        case cudaErrorMemoryAllocation: return "out of memory";
        case cudaErrorInitializationError: return "initialization error";
        case cudaErrorNoDevice: return "no CUDA-capable device is detected";
        case cudaErrorInvalidDevice: return "invalid device ordinal";
        case cudaErrorNoKernelImageForDevice: return "no kernel image is available for execution on the device";
        case cudaErrorNotReady: return "device not ready";
        case cudaErrorNotSupported: return "operation not supported";
        case cudaErrorHostMemoryNotRegistered: return "pointer does not correspond to a registered memory region";
        case cudaErrorUnknown: return "race: memory was used while it was copied; stderr says more";
        default: return "an error that the pretended runtime has no words for";
    }
}

EXPORTED const char* cudaGetErrorName(cudaError_t error) { return cudaGetErrorString(error); }

// torch asks the driver whether a process has a context on a device, before it would make one.
static int context_state(int, unsigned* flags, int* active) {
    *flags = 0;
    *active = g_owner == getpid();
    return 0;
}

static int no_driver() { return cudaErrorNotSupported; }

EXPORTED cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                                      cudaDriverEntryPointQueryResult* result) {
    const bool known = !strcmp(name, "cuDevicePrimaryCtxGetState");
    *function = known ? reinterpret_cast<void*>(context_state) : reinterpret_cast<void*>(no_driver);
    if (result) *result = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}
