// A tensor of a device as the CPU's kernels see it, and back.
#pragma once

#include <ATen/ATen.h>

#include <string>

namespace pretended {

bool on_device(const at::Tensor& tensor);

// The same memory, sizes and strides, as a tensor of the CPU. Valid while the tensor's storage is.
at::Tensor host_view(const at::Tensor& tensor);

// A view of the storage of a device's tensor, where `view` is a view of that tensor's host view.
at::Tensor device_view(const at::Tensor& tensor, const at::Tensor& view);

// A new tensor on a device, with the values of one of the CPU.
at::Tensor to_device(const at::Tensor& tensor, c10::Device device);

// Wait until the current stream of the tensor's device has done its tasks. Raises where a copy on another stream uses
// the memory, too.
void use(const at::Tensor& tensor, const std::string& op, const std::string& argument, bool writes);

}  // namespace pretended
