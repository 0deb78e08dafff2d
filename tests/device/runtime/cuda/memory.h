// Memory of devices, which the host has no access to, and pinned memory of the host.
#pragma once

#include <cstddef>

namespace pretended {

void reserve_memory(int num_devices);
size_t total_memory(int device);

int device_of(const void* address);
char* host(const void* address);
bool pinned(const void* address);

}  // namespace pretended
