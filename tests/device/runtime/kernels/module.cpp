// The extension of Python that replaces each operator of CUDA in torch's dispatcher, and passes reports on.
#include <ATen/ATen.h>
#include <torch/extension.h>
#include <torch/library.h>

#include <set>
#include <string>

#include "../runtime.h"
#include "call.h"
#include "own_operators.h"
#include "host_views.h"

namespace pretended {
namespace {

namespace py = pybind11;

// Torch's own for CUDA are right here: they look at no memory, or reach the runtime, or compose others.
const std::set<std::string> kKept = {
    "_cudnn_init_dropout_state",
    "_fused_sdp_choice",
    "_local_scalar_dense",
    "_pin_memory",
    "_reshape_alias",
    "as_strided",
    "empty.memory_format",
    "empty_strided",
    "is_pinned",
    "is_set_to",
    "record_stream",
    "resize_",
    "set_",
    "set_.source_Storage",
    "set_.source_Storage_storage_offset",
    "set_.source_Tensor",
    "unfold",
    "view",
    "view.dtype",
};

struct QuietWarnings : c10::WarningHandler {
    void process(const c10::Warning&) override {}
};

// For as long as the process runs.
void install() {
    QuietWarnings quiet;  // each operator would be said to be overridden
    c10::WarningUtils::WarningHandlerGuard guard(&quiet);
    auto* library = new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
    auto own = implement_own(*library);
    own.insert(kKept.begin(), kKept.end());
    std::set<std::string> names{"convolution", "convolution_backward"};
    for (const auto& name : c10::Dispatcher::singleton().getRegistrationsForDispatchKey(c10::DispatchKey::CUDA)) {
        if (name.name.rfind("aten::", 0) != 0) continue;
        names.insert(name.name.substr(6) + (name.overload_name.empty() ? "" : "." + name.overload_name));
    }
    for (const auto& name : names) {
        if (!own.count(name)) {
            library->impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&call_on_host>());
        }
    }
}

PyObject* g_listener = nullptr;

void tell(const char* kind, const char* detail) {
    const py::gil_scoped_acquire lock;
    if (g_listener) py::reinterpret_borrow<py::function>(g_listener)(kind, detail);
}

// One function, or none.
void listen(const py::object& listener) {
    Py_XDECREF(g_listener);
    g_listener = listener.is_none() ? nullptr : py::object(listener).release().ptr();
    pretended_listen(g_listener ? tell : nullptr);
}

}  // namespace
}  // namespace pretended

PYBIND11_MODULE(kernels, module) {
    module.def("install", &pretended::install);
    module.def("listen", &pretended::listen);
    module.def("limit_memory", &pretended_limit_memory);
}
