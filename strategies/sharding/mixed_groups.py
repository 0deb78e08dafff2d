"""Parameter groups that have both DTensors and plain parameters: their optimizer steps one parameter at a time.

torch's foreach and fused kernels, its default on accelerators, take a list of one kind (torch 2.13: "got mixed
torch.Tensor and DTensor"). Stepped one by one, the numbers are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch.optim import Optimizer

from fabric.strategies.tensors.dtensor import as_sharded
from fabric.strategies.undo import undo_all


def step_mixed_groups(optimizers: Iterable[Optimizer]) -> Callable[[], None]:
    """Let such groups have `foreach=False` during each step, where the user left it None: a checkpoint has None.
    Returns what undoes it.

    Raises: ValueError: the user wrote `foreach=True` or `fused=True`.
    """
    undos = []
    for optimizer in optimizers:
        indices = [
            index for index, group in enumerate(optimizer.param_groups) if "foreach" in group and _is_mixed(group)
        ]
        for index in indices:
            _refuse_kernels(optimizer, index)
        if indices:
            undos.append(optimizer.register_step_pre_hook(partial(_write, indices, False)).remove)
            undos.append(optimizer.register_step_post_hook(partial(_write, indices, None)).remove)
    return undo_all(undos)


def _write(indices: Iterable[int], foreach: bool | None, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for index in indices:
        _refuse_kernels(optimizer, index)  # of a checkpoint, or written since
        optimizer.param_groups[index]["foreach"] = foreach


def _refuse_kernels(optimizer: Optimizer, index: int) -> None:
    written = next((word for word in ("foreach", "fused") if optimizer.param_groups[index].get(word)), None)
    if written is not None:
        raise ValueError(
            f"`{type(optimizer).__name__}({written}=True)`: parameter group {index} has both sharded parameters "
            f"(DTensors) and plain ones, and the kernels of `{written}` take one kind. Leave `{written}` out, or "
            "pass two parameter groups, the sharded parameters in one of them."
        )


def _is_mixed(group: dict[str, Any]) -> bool:
    return len({as_sharded(parameter) is None for parameter in group["params"]}) == 2
