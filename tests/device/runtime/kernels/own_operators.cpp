#include "own_operators.h"

#include <ATen/ATen.h>
#include <ATen/ops/copy_native.h>

#include <tuple>

#include "../runtime.h"
#include "host_views.h"

namespace pretended {
namespace {

using at::Tensor;

// Between a device and the host it is torch's own, whose copies and waits reach the runtime. Between devices, or on
// one, that would be a kernel.
Tensor& copy(Tensor& self, const Tensor& source, bool non_blocking) {
    const at::AutoDispatchBelowADInplaceOrView below;
    if (!on_device(self) || !on_device(source)) return at::native::copy_(self, source, non_blocking);
    use(source, "copy_", "src", /*writes=*/false);
    use(self, "copy_", "self", /*writes=*/true);
    if (!self.is_same(source)) host_view(self).copy_(host_view(source).expand(self.sizes()));
    return self;
}

std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, std::optional<bool> train) {
    if (train.has_value() && !*train) return {input.clone(), at::ones_like(input, input.options().dtype(at::kBool))};
    auto mask = at::empty_like(input, input.options().dtype(at::kBool)).bernoulli_(1 - p);
    return {input * mask * (p < 1 ? 1 / (1 - p) : 0), mask};
}

}  // namespace

std::set<std::string> implement_own(torch::Library& library) {
    library.impl("copy_", &copy);
    library.impl("native_dropout", &native_dropout);
    return {"copy_", "native_dropout"};
}

}  // namespace pretended
