"""Parameter groups that have both DTensors and plain parameters: their optimizer steps one parameter at a time.

torch's foreach and fused kernels take a list of one kind (torch 2.13: "got mixed torch.Tensor and DTensor"). Stepped
one by one, the numbers are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeAlias

from torch.optim import Optimizer

from fabric.strategies.tensors.dtensor import as_sharded
from fabric.strategies.undo import undo_all

_Options: TypeAlias = "list[tuple[dict[str, Any], dict[str, Any]]]"


def step_mixed_groups(optimizers: Iterable[Optimizer]) -> Callable[[], None]:
    """Let such groups have `foreach=False` and `fused=False` during each step; between steps, and in a checkpoint, they
    have what the user wrote. Returns what undoes it."""
    undos = []
    for optimizer in optimizers:
        if any(map(_is_mixed, optimizer.param_groups)):
            written: _Options = []
            undos.append(optimizer.register_step_pre_hook(partial(_step_one_by_one, written)).remove)
            undos.append(optimizer.register_step_post_hook(partial(_restore, written)).remove)
    return undo_all(undos)


def _step_one_by_one(written: _Options, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    _restore(written)  # what a step left that raised
    for group in filter(_is_mixed, optimizer.param_groups):
        written.append((group, {name: group[name] for name in ("foreach", "fused") if name in group}))
        group.update(dict.fromkeys(written[-1][1], False))


def _restore(written: _Options, *args: Any) -> None:
    for group, options in written:
        group.update(options)
    written.clear()


def _is_mixed(group: dict[str, Any]) -> bool:
    return len({as_sharded(parameter) is None for parameter in group["params"]}) == 2
