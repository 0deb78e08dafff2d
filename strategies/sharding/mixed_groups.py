"""Parameter groups that have both DTensors and plain parameters: their optimizer steps one parameter at a time.

torch's foreach and fused kernels, its default on accelerators, take a list of one kind (torch 2.13: "got mixed
torch.Tensor and DTensor"). Stepped one by one, the numbers are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch.optim import Optimizer

from fabric.strategies.tensors.dtensor import as_sharded
from fabric.strategies.undo import undo_all


def step_mixed_groups(optimizers: Iterable[Optimizer]) -> Callable[[], None]:
    """Let such groups have `foreach=False` during each step, where the user left it None: a checkpoint has None.
    Returns what undoes it."""
    undos = []
    for optimizer in optimizers:
        if any(map(_is_mixed, optimizer.param_groups)):
            undos.append(optimizer.register_step_pre_hook(_step_one_by_one).remove)
            undos.append(optimizer.register_step_post_hook(_step_as_before).remove)
    return undo_all(undos)


def _step_one_by_one(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for group in filter(_is_mixed, optimizer.param_groups):
        if group.get("foreach", True) is None:
            group["foreach"] = False


def _step_as_before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for group in filter(_is_mixed, optimizer.param_groups):
        if group.get("foreach") is False:
            group["foreach"] = None


def _is_mixed(group: dict[str, Any]) -> bool:
    return len({as_sharded(parameter) is None for parameter in group["params"]}) == 2
