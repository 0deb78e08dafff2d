// Kernels of CUDA are known by name, and never run: whoever launches one is told which one it would have been.
#include <cstdio>
#include <mutex>
#include <string>
#include <unordered_map>

#include "devices.h"

using namespace pretended;

namespace {

struct Kernels {
    std::mutex mutex;
    std::unordered_map<const void*, std::string> names;
};

Kernels& kernels() {
    static auto* all = new Kernels();
    return *all;
}

cudaError_t refused(const void* kernel) {
    std::lock_guard<std::mutex> lock(kernels().mutex);
    const auto found = kernels().names.find(kernel);
    const auto name = found == kernels().names.end() ? "without a name" : found->second.substr(0, 300);
    fprintf(stderr, "pretended CUDA: no device runs the kernel %s\n", name.c_str());
    return failed(cudaErrorNoKernelImageForDevice);
}

}  // namespace

// What compiled CUDA code calls when it is loaded

EXPORTED void** __cudaRegisterFatBinary(void*) {
    static void* handle;
    return &handle;
}

EXPORTED void __cudaRegisterFatBinaryEnd(void**) {}

EXPORTED void __cudaUnregisterFatBinary(void**) {}

EXPORTED char __cudaInitModule(void**) { return 1; }

EXPORTED void __cudaRegisterFunction(void**, const char* kernel, char*, const char* name, int, uint3*, uint3*, dim3*,
                                     dim3*, int*) {
    std::lock_guard<std::mutex> lock(kernels().mutex);
    kernels().names[kernel] = name;
}

EXPORTED void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}

// What it calls to launch a kernel

EXPORTED unsigned __cudaPushCallConfiguration(dim3, dim3, size_t, void*) { return 0; }

EXPORTED cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared_bytes, void* stream) {
    *grid = *block = dim3{1, 1, 1};
    *shared_bytes = 0;
    *static_cast<void**>(stream) = nullptr;
    return cudaSuccess;
}

EXPORTED cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
    *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function));
    return cudaSuccess;
}

EXPORTED cudaError_t cudaLaunchKernel(const void* kernel, dim3, dim3, void**, size_t, cudaStream_t) {
    return refused(kernel);
}

EXPORTED cudaError_t __cudaLaunchKernel(const void* kernel, dim3, dim3, void**, size_t, cudaStream_t) {
    return refused(kernel);
}

EXPORTED cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void* kernel, void**) {
    return refused(kernel);
}

EXPORTED cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
    *attributes = {};
    attributes->maxThreadsPerBlock = 1024;
    return cudaSuccess;
}

EXPORTED cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }

EXPORTED cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, size_t,
                                                                            unsigned) {
    *blocks = 1;
    return cudaSuccess;
}
