// One call of an operator of CUDA, carried out by the CPU's kernel.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

namespace pretended {

void call_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace pretended
