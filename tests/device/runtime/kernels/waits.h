// Which of CUDA's kernels keep the host waiting, mostly because the size of what they return is not known before.
#pragma once

#include <ATen/core/ivalue.h>

#include <string>

namespace pretended {

// The operator that waits in a call with these arguments; empty: none.
std::string why_host_waits(const std::string& name, const c10::IValue* arguments);

}  // namespace pretended
