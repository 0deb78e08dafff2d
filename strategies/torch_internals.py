"""Private names of torch, one list per feature, checked where the feature is used.

`single_device` and `ddp` need none of them. `tests/test_private_names.py` checks that each name that a source file uses
is listed here, or there among those that torch's documentation or subclasses everywhere rely on, and that the installed
torch has it.
"""

from collections.abc import Callable
from functools import cache, partial
from pkgutil import resolve_name
from typing import Any, TypeVar

import torch

from fabric.launchers.private_names import TESTED_TORCH, Names, require

Function = TypeVar("Function", bound=Callable[..., Any])

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

require_fully_shard = cache(partial(require, "torch", TESTED_TORCH, FULLY_SHARD))
require_compiler = cache(partial(require, "torch", TESTED_TORCH, COMPILED))
"""Raise ImportError if this torch lacks a name of the list. They import the modules that own the names."""

_FUNCTIONS = {
    "current_graph_task_id": "torch._C:_current_graph_task_id",  # of this thread; -1 outside of a backward
    "after_backward": "torch.autograd:Variable._execution_engine.queue_callback",  # within one: runs when it has ended
}


def __getattr__(name: str) -> Any:
    if name not in _FUNCTIONS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    require("torch", TESTED_TORCH, BOUND)
    return resolve_name(_FUNCTIONS[name])


def disable_dynamo(function: Function, *, recursive: bool = True) -> Function:
    """`torch.compiler.disable`, without importing the compiler."""
    disabled: Function = getattr(torch, "_disable_dynamo", torch.compiler.disable)(function, recursive=recursive)
    return disabled
