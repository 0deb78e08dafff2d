"""Optimizers that are in no table step `DTensor`s: the numbers that they read in a step are those of full tensors.

`item()` of a norm, a sum or a maximum of a DTensor is that of this rank's shard (torch 2.13): `if norm > 1:` and
`lr * float(norm)` are something else on each rank, and nothing raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, final

import torch
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from fabric.strategies.gradients.elementwise import updates_each
from fabric.strategies.sharding.owners import has_shards, with_closure
from fabric.strategies.tensors.dtensor import as_sharded, whole
from fabric.strategies.undo import undo_all

DECISIONS = (torch.ops.aten.any.default, torch.ops.aten.all.default, torch.ops.aten._local_scalar_dense.default)
"""Operations whose results are numbers of the program, or soon will be."""


def step_with_whole_numbers(optimizers: Iterable[Optimizer]) -> Callable[[], None]:
    """Within each step of those that are in no table, read numbers of full tensors. Returns what undoes it.

    Ranks: from then on all that hold shards call `step`, and read the same numbers in the same order.
    """
    readers = [(each, _WholeNumbers()) for each in optimizers if updates_each(each) is None and has_shards(each)]
    before = [each.register_step_pre_hook(numbers.before_step).remove for each, numbers in readers]
    after = [each.register_step_post_hook(numbers.after_step).remove for each, numbers in readers]
    return undo_all(before + after)


@final
class _WholeNumbers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context: numbers that are read from a sharded tensor are those of the full tensor. Closures run outside of it."""

    is_entered = False

    def before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.enter(True)
        return with_closure(args, kwargs, self._outside)

    def after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.enter(False)
        for entries in optimizer.state.values():
            if isinstance(entries, dict):
                entries.update({name: _added_up(value) for name, value in entries.items()})

    def enter(self, is_entered: bool) -> None:
        """Enter the context, or leave it; nothing where that is so already: a step may have raised."""
        if is_entered != self.is_entered:
            self.is_entered = is_entered
            self.__enter__() if is_entered else self.__exit__(None, None, None)

    def _outside(self, closure: Callable[[], Any]) -> Any:
        self.enter(False)
        loss = closure()
        self.enter(True)
        return loss

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        sharded = as_sharded(args[0]) if func in DECISIONS else None
        return func(*args, **(kwargs or {})) if sharded is None else func(whole(sharded), *args[1:], **(kwargs or {}))


def _added_up(value: Any) -> Any:
    """A sum or norm of which each rank has that of its shard (`Partial`), so that it is saved and loaded as a number of
    the whole tensor; other values unchanged."""
    sharded = as_sharded(value)
    if sharded is None or not any(each.is_partial() for each in sharded.placements):
        return value
    from torch.distributed.tensor import Replicate

    return sharded.redistribute(placements=[Replicate() if each.is_partial() else each for each in sharded.placements])
