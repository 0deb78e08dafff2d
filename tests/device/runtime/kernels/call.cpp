// A call's arguments become tensors of the CPU over the same memory, the CPU's kernel runs, and what it returns
// becomes tensors of the device again. Before: the devices are compared as torch compares them, and the stream is
// drained.
#include "call.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <optional>
#include <string>
#include <vector>

#include "../runtime.h"
#include "host_views.h"
#include "waits.h"

namespace pretended {
namespace {

using c10::IValue;

// Calls `visit` with each tensor of an argument: a tensor, a list of tensors, a list with some.
template <class Visit>
void for_each_tensor(const IValue& value, const Visit& visit) {
    if (value.isTensor()) {
        if (value.toTensor().defined()) visit(value.toTensor());
    } else if (value.isList()) {
        for (const IValue& element : value.toListRef()) for_each_tensor(element, visit);
    }
}

// The same argument with each tensor replaced.
template <class Replace>
IValue replaced(const IValue& value, const Replace& replace) {
    if (value.isTensor()) return replace(value.toTensor());
    if (value.isTensorList()) {
        c10::List<at::Tensor> list;
        for (const IValue& element : value.toListRef()) list.push_back(replace(element.toTensor()));
        return list;
    }
    bool has_tensor = false;
    for_each_tensor(value, [&](const at::Tensor&) { has_tensor = true; });
    if (!has_tensor) return value;
    c10::List<std::optional<at::Tensor>> list;
    for (const IValue& element : value.toListRef()) {
        list.push_back(element.isTensor() ? std::optional(replace(element.toTensor())) : std::nullopt);
    }
    return list;
}

class Call {
 public:
    Call(const c10::OperatorHandle& op, torch::jit::Stack* stack)
        : op_(op), schema_(op.schema()), stack_(*stack), begin_(stack->size() - schema_.arguments().size()) {
        name_ = op.operator_name().name;
        if (!op.operator_name().overload_name.empty()) name_ += "." + op.operator_name().overload_name;
    }

    void run() {
        const c10::Device device = chosen_device();
        c10::DeviceGuard guard(device);
        if (const auto wait = why_host_waits(name_, stack_.data() + begin_); !wait.empty()) {
            pretended_tell("kernel", wait.c_str());
        }
        use_memory();
        for (size_t i = 0; i < schema_.arguments().size(); i++) to_host(i, device);
        {
            at::AutoDispatchBelowADInplaceOrView below;
            op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack_);
        }
        if (generator_) advance(*generator_);
        for (auto& argument : arguments_) take_over(argument);
        for (size_t i = stack_.size() - schema_.returns().size(); i < stack_.size(); i++) {
            stack_[i] = replaced(stack_[i], [&](const at::Tensor& tensor) { return returned(tensor, device); });
        }
    }

 private:
    struct Argument {
        at::Tensor tensor, view;
        const void* data;  // of the view before the call
    };

    // That of the tensors, which is one, or the one that an argument names. A tensor of the CPU may be among the
    // others if it is a number, or if it is an index, which is then copied.
    c10::Device chosen_device() {
        std::optional<c10::Device> device;
        std::string on_host;
        for (size_t i = 0; i < schema_.arguments().size(); i++) {
            const auto& name = schema_.arguments()[i].name();
            const auto& value = stack_[begin_ + i];
            for_each_tensor(value, [&](const at::Tensor& tensor) {
                if (tensor.is_cuda()) {
                    if (!device) device = tensor.device();
                    TORCH_CHECK(*device == tensor.device(),
                                "Expected all tensors to be on the same device, but found at least two devices, ",
                                *device, " and ", tensor.device(), "! (when checking argument for argument ", name,
                                " in ", name_, ")");
                } else if (tensor.is_cpu() && tensor.dim()) {
                    if (name == "indices")
                        pretended_tell("copy from pageable memory", "an index");
                    else
                        on_host = name;
                }
            });
            if (!device && value.isDevice() && value.toDevice().is_cuda()) device = value.toDevice();
        }
        const c10::impl::VirtualGuardImpl devices(c10::kCUDA);
        if (!device || !device->has_index()) device = devices.getDevice();
        TORCH_CHECK(on_host.empty(),
                    "Expected all tensors to be on the same device, but found at least two devices, ", *device,
                    " and cpu! (when checking argument for argument ", on_host, " in ", name_, ")");
        TORCH_CHECK(pretended_usable(), "CUDA error: initialization error");
        return *device;
    }

    void use_memory() {
        for (size_t i = 0; i < schema_.arguments().size(); i++) {
            const auto& argument = schema_.arguments()[i];
            const bool writes = argument.alias_info() && argument.alias_info()->isWrite();
            for_each_tensor(stack_[begin_ + i], [&](const at::Tensor& tensor) {
                if (tensor.is_cuda()) use(tensor, name_, argument.name(), writes);
            });
        }
    }

    void to_host(size_t i, c10::Device device) {
        auto& value = stack_[begin_ + i];
        const auto& type = schema_.arguments()[i].type()->annotation_str();
        if (value.isDevice() && value.toDevice().is_cuda()) {
            value = c10::Device(c10::kCPU);
        } else if (value.isGenerator() && value.toGenerator().device().is_cuda()) {
            value = host_generator(value.toGenerator());
        } else if (value.isNone() && type.find("Generator") != std::string::npos) {
            value = host_generator(at::globalContext().defaultGenerator(device));
        } else {
            value = replaced(value, [&](const at::Tensor& tensor) { return view_of(tensor); });
        }
    }

    // One view of each tensor, so that arguments that are one tensor stay one.
    at::Tensor view_of(const at::Tensor& tensor) {
        if (!on_device(tensor)) return tensor;
        for (auto& argument : arguments_) {
            if (argument.tensor.is_same(tensor)) return argument.view;
        }
        auto view = host_view(tensor);
        arguments_.push_back({tensor, view, view.storage().data()});
        return view;
    }

    // Draws what follows from the seed of the device's generator and from how often it has been drawn from.
    at::Generator host_generator(const at::Generator& generator) {
        generator_ = generator;
        return at::make_generator<at::CPUGeneratorImpl>(generator.current_seed() * 1000003 + generator.get_offset());
    }

    static void advance(at::Generator& generator) {
        std::lock_guard<std::mutex> lock(generator.mutex());
        generator.set_offset(generator.get_offset() + 4);  // CUDA's generators count in fours
    }

    // What the kernel has done to the view itself: new sizes, or new memory where there was too little.
    static void take_over(Argument& argument) {
        auto& [tensor, view, data] = argument;
        if (view.storage().data() != data || view.storage().nbytes() > tensor.storage().nbytes()) {
            tensor.resize_(view.sizes());
            if (tensor.numel()) host_view(tensor).copy_(view);
        } else if (view.sizes() != tensor.sizes() || view.strides() != tensor.strides()) {
            tensor.unsafeGetTensorImpl()->set_sizes_and_strides(view.sizes(), view.strides(), view.storage_offset());
        }
    }

    // An argument itself, a view of one, or something new.
    at::Tensor returned(const at::Tensor& tensor, c10::Device device) {
        if (!tensor.defined() || !tensor.is_cpu()) return tensor;
        for (auto& argument : arguments_) {
            if (argument.view.is_same(tensor)) return argument.tensor;
        }
        for (auto& argument : arguments_) {
            if (tensor.layout() == at::kStrided && tensor.storage().data() &&
                tensor.storage().data() == argument.view.storage().data()) {
                return device_view(argument.tensor, tensor);
            }
        }
        return to_device(tensor, device);
    }

    const c10::OperatorHandle& op_;
    const c10::FunctionSchema& schema_;
    torch::jit::Stack& stack_;
    const size_t begin_;
    std::string name_;
    std::vector<Argument> arguments_;
    std::optional<at::Generator> generator_;
};

}  // namespace

void call_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) { Call(op, stack).run(); }

}  // namespace pretended
