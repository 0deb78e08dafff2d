"""Parameter groups that have both DTensors and plain parameters: their optimizer steps one parameter at a time.

torch's foreach and fused kernels, its default on accelerators, take a list of one kind (torch 2.13: "got mixed
torch.Tensor and DTensor"). Stepped one by one, the numbers are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch.optim import Optimizer

from fabric.strategies.sharding.dtensor import as_sharded
from fabric.strategies.undo import undo_all


def step_mixed_groups(optimizers: Iterable[Optimizer]) -> Callable[[], None]:
    """Write `foreach=False` into such groups where the user left it None, now and after a load. Returns what removes
    the hooks of loads.

    Raises: ValueError: the user wrote `foreach=True` or `fused=True`.
    """
    chosen = [optimizer for optimizer in optimizers if _mixed_groups(optimizer)]
    for optimizer in chosen:
        _set(optimizer)
    return undo_all([optimizer.register_load_state_dict_post_hook(_set).remove for optimizer in chosen])


def _mixed_groups(optimizer: Optimizer) -> list[tuple[int, dict[str, Any]]]:
    return [
        (index, group) for index, group in enumerate(optimizer.param_groups) if "foreach" in group and _is_mixed(group)
    ]


def _set(optimizer: Optimizer) -> None:
    for index, group in _mixed_groups(optimizer):
        written = next((word for word in ("foreach", "fused") if group.get(word)), None)
        if written is not None:
            raise ValueError(
                f"`{type(optimizer).__name__}({written}=True)`: parameter group {index} has both sharded parameters "
                f"(DTensors) and plain ones, and the kernels of `{written}` take one kind. Leave `{written}` out, or "
                "pass two parameter groups, the sharded parameters in one of them."
            )
        group["foreach"] = False


def _is_mixed(group: dict[str, Any]) -> bool:
    return len({as_sharded(parameter) is None for parameter in group["params"]}) == 2
