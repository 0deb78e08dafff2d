#include "waits.h"

#include <ATen/ATen.h>

#include <set>

namespace pretended {

static bool has_mask(const c10::IValue& indices) {
    for (const c10::IValue& index : indices.toListRef()) {
        if (!index.isTensor() || !index.toTensor().defined()) continue;
        const auto type = index.toTensor().scalar_type();
        if (type == at::kBool || type == at::kByte) return true;
    }
    return false;
}

std::string why_host_waits(const std::string& name, const c10::IValue* arguments) {
    static const std::set<std::string> always = {
        "aten::_unique",     "aten::_unique2",           "aten::bincount",          "aten::equal",
        "aten::histc",       "aten::masked_select",      "aten::masked_select.out", "aten::nonzero",
        "aten::nonzero.out", "aten::unique_consecutive", "aten::unique_dim",        "aten::unique_dim_consecutive",
    };
    if (always.count(name)) return name;
    if (name == "aten::repeat_interleave.Tensor" && arguments[1].isNone()) return name;
    if ((name == "aten::index.Tensor" || name == "aten::index.Tensor_out") && has_mask(arguments[1])) {
        return name + " with a mask";
    }
    if (name == "aten::_index_put_impl_" && has_mask(arguments[1])) {
        const bool is_fill = arguments[2].toTensor().numel() == 1 && !arguments[3].toBool();
        return is_fill ? "" : name + " with a mask";
    }
    if (name == "aten::masked_fill_.Tensor" && arguments[2].toTensor().is_cuda()) return name;
    return "";
}

}  // namespace pretended
