// Which devices this process has, and whether it may use them.
#pragma once
#define CUDARTAPI
#include <cuda_runtime_api.h>

#define EXPORTED extern "C" __attribute__((visibility("default")))

namespace pretended {

// Sets the devices up in the process that first asks; false in one forked from it afterwards, as with a real driver.
bool usable();

int num_devices();
int current_device();

// Keeps an error for `cudaGetLastError`, and returns it.
cudaError_t failed(cudaError_t error);

}  // namespace pretended

#define RETURN_UNLESS_USABLE \
    if (!pretended::usable()) return pretended::failed(cudaErrorInitializationError)
