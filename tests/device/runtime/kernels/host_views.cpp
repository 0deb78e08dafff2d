#include "host_views.h"

#include <algorithm>
#include <cstring>

#include <c10/core/impl/VirtualGuardImpl.h>

#include "../runtime.h"

namespace pretended {

bool on_device(const at::Tensor& tensor) { return tensor.defined() && tensor.is_cuda(); }

static void copy_bits(const at::Tensor& from, const at::Tensor& to) {
    to._set_conj(from.is_conj());
    to._set_neg(from.is_neg());
}

at::Tensor host_view(const at::Tensor& tensor) {
    const auto& storage = tensor.storage();
    const auto bytes = storage.nbytes();
    void* address = bytes ? pretended_host(storage.data()) : nullptr;
    c10::Storage host(c10::Storage::use_byte_size_t(), bytes, c10::DataPtr(address, c10::Device(c10::kCPU)),
                      c10::GetAllocator(c10::kCPU), /*resizable=*/true);
    auto view = at::detail::make_tensor<c10::TensorImpl>(std::move(host), c10::DispatchKeySet(c10::DispatchKey::CPU),
                                                         tensor.dtype());
    view.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
    copy_bits(tensor, view);
    return view;
}

at::Tensor device_view(const at::Tensor& tensor, const at::Tensor& view) {
    auto result = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(tensor.storage()),
                                                           tensor.key_set(), view.dtype());
    result.unsafeGetTensorImpl()->set_sizes_and_strides(view.sizes(), view.strides(), view.storage_offset());
    copy_bits(view, result);
    return result;
}

at::Tensor to_device(const at::Tensor& tensor, c10::Device device) {
    TORCH_CHECK_NOT_IMPLEMENTED(tensor.layout() == at::kStrided, "the pretended device holds no tensors of layout ",
                                tensor.layout());
    auto result = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(device));
    const auto has = tensor.storage().nbytes() - static_cast<size_t>(tensor.storage_offset()) * tensor.itemsize();
    if (tensor.numel()) {
        memcpy(pretended_host(result.storage().data()), tensor.const_data_ptr(),
               std::min(has, result.storage().nbytes()));
    }
    copy_bits(tensor, result);
    return result;
}

// Bytes from the first element to the last.
static size_t extent(const at::Tensor& tensor) {
    int64_t last = 0;
    for (int64_t dim = 0; dim < tensor.dim(); dim++) last += (tensor.size(dim) - 1) * tensor.stride(dim);
    return static_cast<size_t>(last + 1) * tensor.itemsize();
}

void use(const at::Tensor& tensor, const std::string& op, const std::string& argument, bool writes) {
    const c10::impl::VirtualGuardImpl devices(c10::kCUDA);
    auto* stream = static_cast<CUstream_st*>(devices.getStreamNativeHandle(devices.getStream(tensor.device())));
    pretended_drain(stream);
    if (!tensor.numel()) return;
    TORCH_CHECK(pretended_use(stream, tensor.const_data_ptr(), extent(tensor), writes), "race: argument ", argument,
                " of ", op,
                " is memory that a copy on another stream uses, for which the current stream has not waited");
}

}  // namespace pretended
