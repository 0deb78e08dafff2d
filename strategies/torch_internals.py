"""All private names of torch that are used, checked when this module is imported, or at first use for FSDP.

Functions are bound here. Attributes are used where they are needed; `tests/test_private_names.py` checks that each of
them is listed here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar, cast

import torch

from fabric.launchers.private_names import Names, require

Function = TypeVar("Function", bound=Callable[..., Any])

TESTED = "2.9 to 2.13"

ALWAYS: Names = {
    "torch": {
        "_C": "holds the functions below",
        "_disable_dynamo": "`torch.compiler.disable` imports the compiler, 1 s; DistributedDataParallel uses this",
        "_foreach_mul_": "one kernel for many gradients, as optimizers of torch use",
    },
    "torch._C": {
        "_functorch": "`maybe_current_level`: whether a transform of torch.func is running",
        "_current_graph_task_id": "whether a backward is running; no public function says so",
        "_disabled_torch_function_impl": "a subclass of Tensor without `__torch_function__`, as torch writes its own",
        "DisableTorchFunctionSubclass": "what a `__torch_function__` runs is not sent to it again; documented",
    },
    "torch._C._functorch": {"maybe_current_level": "whether a transform of torch.func is running"},
    "torch.distributed.distributed_c10d": {"_world": "all groups: see Note [Groups while forked processes run]"},
    "torch._C._distributed_c10d": {"_dump_fr_trace|_dump_nccl_trace": "reads the flight recorder in this process"},
    "torch._C._dynamo.eval_frame": {
        "_FrameAction _FrameExecStrategy set_code_exec_strategy get_eval_frame_callback set_eval_frame": (
            "`torch.compiler.disable` is for one function or for all that it calls: see "
            "Note [The compiler sees the user's functions alone]"
        ),
    },
    "torch:Tensor": {
        "_version": "whether a tensor was written to; PyTorch's documentation names it, and offers nothing else",
        "_backward_hooks _post_accumulate_grad_hooks": "whether a parameter that is replaced by a shard has hooks",
        "_is_view": "whether a gradient shares memory with another",
        "_make_wrapper_subclass _make_subclass": "how torch's own subclasses of Tensor are made",
    },
    "torch.autograd:Variable": {"_execution_engine": "`queue_callback`: what runs when a backward ends; no hook does"},
    "torch.nn:Module": {
        "_load_state_dict_pre_hooks _load_from_state_dict": "whether a part of a module converts what it loads",
        "_buffers _parameters _modules": "read per forward, where `named_buffers` is slower and leaves out shared ones",
        "_metadata": "the versions of modules, which `state_dict` attaches to its result",
        "_non_persistent_buffers_set": "which buffers are in no state dict",
        "_forward_pre_hooks _forward_hooks": "a copied module must not run the hooks of the original",
        "_call_impl": "calls `forward`, and knows of which module: see `strategies/module/forward.py`",
        "_apply": "casts parameters in place; `Module.to` takes no function",
    },
    "torch.nn.modules.batchnorm": {"_BatchNorm": "the class that all kinds of BatchNorm have in common"},
    "torch.nn.parallel:DistributedDataParallel": {
        "reducer logger": "dropped before the process group: see Note [The reducer ends before the process group]"
    },
    "torch.optim:Optimizer": {
        "_optimizer_state_dict_post_hooks": "a wrapper of another optimizer has none",
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
    "torch._dynamo.external_utils": {"wrap_inline": "lets the compiler compile a function of torch's by itself"},
    "torch._dynamo.eval_frame:OptimizedModule": {"_orig_mod": "the module within what `torch.compile` returns"},
}

require("torch", TESTED, ALWAYS)

current_graph_task_id: Callable[[], int] = torch._C._current_graph_task_id
"""The id of the backward that runs on this thread; -1 outside of one."""
transform_level: Callable[[], int | None] = torch._C._functorch.maybe_current_level
"""How many transforms of torch.func this code runs in; None outside of them."""
disabled_torch_function_impl: Any = torch._C._disabled_torch_function_impl
without_torch_function: Any = torch._C.DisableTorchFunctionSubclass
"""Within this context `__torch_function__` of subclasses is not called."""


def disable_dynamo(function: Function, *, recursive: bool = True) -> Function:
    """`torch.compiler.disable`, without importing the compiler."""
    return cast(Function, torch._disable_dynamo(function, recursive))  # type: ignore[attr-defined]


def after_backward(callback: Callable[[], None]) -> None:
    """Call this within a backward: runs `callback` when the backward has ended."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


@cache
def require_fully_shard() -> None:
    """Raise ImportError if this torch lacks a private name of `fully_shard`. Imports it."""
    require("torch", TESTED, FULLY_SHARD)


@cache
def require_compiler() -> None:
    """Raise ImportError if this torch lacks a private name of its compiler. Imports it."""
    require("torch", TESTED, COMPILED)
