// Operators that exist for CUDA alone, so that the CPU has no kernel for them, in terms of others.
#pragma once

#include <torch/library.h>

#include <set>
#include <string>

namespace pretended {

// Their names.
std::set<std::string> implement_cuda_only(torch::Library& library);

}  // namespace pretended
