"""All private names of torch that are used, one list per feature, checked where the feature is used.

`single_device` and `ddp` need none of the lists that are checked. `tests/test_private_names.py` checks that each name
that a source file uses is listed here, and that the installed torch has it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pkgutil import resolve_name
from typing import Any, TypeVar

import torch

from fabric.launchers.private_names import Names, require

Function = TypeVar("Function", bound=Callable[..., Any])

TESTED = "2.9 to 2.13"

STABLE: Names = {
    "torch": {
        "_C": "holds functions of other lists",
        "_disable_dynamo": "`torch.compiler.disable` imports the compiler, 1 s; used instead where this is gone",
        "_foreach_mul_": "one kernel for many gradients, as optimizers of torch use",
    },
    "torch._C": {
        "DisableTorchFunctionSubclass": "what a `__torch_function__` runs is not sent to it again",
        "_disabled_torch_function_impl": "a subclass of Tensor without `__torch_function__`, as torch writes its own",
    },
    "torch.distributed.distributed_c10d": {"_world": "all groups: see Note [Groups while forked processes run]"},
    "torch._C._distributed_c10d": {"_dump_fr_trace|_dump_nccl_trace": "reads the flight recorder in this process"},
    "torch:Tensor": {
        "_version": "whether a tensor was written to; PyTorch's documentation names it, and offers nothing else",
        "_backward_hooks _post_accumulate_grad_hooks": "whether a parameter that is replaced by a shard has hooks",
        "_is_view": "whether a gradient shares memory with another",
        "_make_wrapper_subclass _make_subclass": "how torch's own subclasses of Tensor are made",
    },
    "torch.nn:Module": {
        "_load_state_dict_pre_hooks _load_from_state_dict": "whether a part of a module converts what it loads",
        "_buffers _parameters _modules": "read per forward, where `named_buffers` is slower and leaves out shared ones",
        "_metadata": "the versions of modules, which `state_dict` attaches to its result",
        "_non_persistent_buffers_set": "which buffers are in no state dict",
        "_forward_pre_hooks _forward_hooks": "a copied module must not run the hooks of the original",
        "_apply": "casts parameters in place; `Module.to` takes no function",
    },
    "torch.nn.modules.batchnorm": {"_BatchNorm": "the class that all kinds of BatchNorm have in common"},
    "torch.optim:Optimizer": {
        "_optimizer_step_post_hooks": "whether an optimizer has our hook",
        "_optimizer_step_pre_hooks": "a check of gradients runs before hooks that hide some; no hook can be put first",
        "profile_hook_step": "runs the hooks of an optimizer around a `step` of ours",
    },
    "torch.utils._pytree": {"tree_flatten tree_unflatten": "containers that somebody registered with torch"},
    "torch.utils._python_dispatch": {"TorchDispatchMode": "sees each operation within a block; documented, not public"},
    "torch.utils.data:DataLoader": {
        "_iterator _IterableDataset_len_called": "a copy of a loader takes over no iterator and no workers"
    },
}
"""Not checked: torch's documentation, its pickles of modules, or subclasses everywhere rely on them."""

BOUND: Names = {
    "torch._C": {
        "_current_graph_task_id": "whether a backward is running; no public function says so",
    },
    "torch.autograd:Variable": {"_execution_engine": "`queue_callback`: what runs when a backward ends; no hook does"},
}
"""Checked where a file imports one of the functions below."""

FULLY_SHARD: Names = {
    "torch.distributed.fsdp:FSDPModule": {"_get_fsdp_state": "leads to the names below"},
    "torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState": {
        "_fsdp_param_group|_fsdp_param_groups": "the parameters of one unit: one group before torch 2.12, then several",
    },
    "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup": {
        "fsdp_params": "see Note [Gradients not reduced yet]",
    },
    "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam": {
        "_unsharded_param sharded_param unsharded_accumulated_grad": "see Note [Gradients not reduced yet]",
    },
    "torch.distributed.fsdp.wrap:ModuleWrapPolicy": {"_module_classes": "the classes that it wraps"},
}

COMPILED: Names = {
    "torch._C._dynamo.eval_frame": {
        "_FrameAction _FrameExecStrategy set_code_exec_strategy get_eval_frame_callback set_eval_frame": (
            "`torch.compiler.disable` is for one function or for all that it calls: see "
            "Note [Only the user's functions are compiled]"
        ),
    },
    "torch._dynamo.external_utils": {"wrap_inline": "lets the compiler compile a function of torch's by itself"},
    "torch._dynamo.eval_frame:OptimizedModule": {"_orig_mod": "the module within what `torch.compile` returns"},
}

require_fully_shard = cache(partial(require, "torch", TESTED, FULLY_SHARD))
require_compiler = cache(partial(require, "torch", TESTED, COMPILED))
"""Raise ImportError if this torch lacks a name of the list. They import the modules that own the names."""

_FUNCTIONS = {
    "current_graph_task_id": "torch._C:_current_graph_task_id",  # of this thread; -1 outside of a backward
    "disabled_torch_function_impl": "torch._C:_disabled_torch_function_impl",
    "after_backward": "torch.autograd:Variable._execution_engine.queue_callback",  # within one: runs when it has ended
    "without_torch_function": "torch._C:DisableTorchFunctionSubclass",  # a context for what subclasses run
}


def __getattr__(name: str) -> Any:
    if name not in _FUNCTIONS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    require("torch", TESTED, BOUND)
    return resolve_name(_FUNCTIONS[name])


def disable_dynamo(function: Function, *, recursive: bool = True) -> Function:
    """`torch.compiler.disable`, without importing the compiler."""
    disabled: Function = getattr(torch, "_disable_dynamo", torch.compiler.disable)(function, recursive=recursive)
    return disabled
