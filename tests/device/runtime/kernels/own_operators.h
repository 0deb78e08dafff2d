// Operators for which the CPU's kernel is not what CUDA's does.
#pragma once

#include <torch/library.h>

#include <set>
#include <string>

namespace pretended {

// Their names.
std::set<std::string> implement_own(torch::Library& library);

}  // namespace pretended
