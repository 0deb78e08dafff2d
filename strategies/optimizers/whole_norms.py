"""Optimizers that are in no table step `DTensor`s: sums and norms in a step are those of full tensors at once.

torch 2.13 adds up those of shards as late as it can, and not at all for `item()`, `float` and `if`, which read that of
this rank's shard: `lr * float(norm)` is something else on each rank, and nothing raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, final

from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from fabric.strategies.optimizers.elementwise import updates_each
from fabric.strategies.optimizers.owners import has_shards, with_closure
from fabric.strategies.tensors.dtensor import as_sharded
from fabric.strategies.tensors.nests import map_only_tensors
from fabric.strategies.undo import undo_all


def step_with_whole_numbers(optimizers: Iterable[Optimizer]) -> Callable[[], None]:
    """Within each step of those that are in no table, add up numbers of shards. Returns what undoes it.

    Ranks: from then on all that hold shards call `step`, with the same operations in the same order.
    """
    unknown = [each for each in optimizers if has_shards(each) and updates_each(each) is None]
    readers = [(each, _WholeNumbers()) for each in unknown]  # type: ignore[no-untyped-call]
    before = [each.register_step_pre_hook(numbers.before_step).remove for each, numbers in readers]
    after = [each.register_step_post_hook(numbers.after_step).remove for each, numbers in readers]
    return undo_all(before + after)


@final
class _WholeNumbers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context: no result of an operation is a sum of which each rank has a part. Closures run outside of it."""

    is_entered = False

    def before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.enter(True)
        return with_closure(args, kwargs, self._outside)

    def after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.enter(False)

    def enter(self, is_entered: bool) -> None:
        """Enter the context, or leave it; nothing where that is so already: a step may have raised."""
        if is_entered != self.is_entered:
            self.is_entered = is_entered
            self.__enter__() if is_entered else self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def _outside(self, closure: Callable[[], Any]) -> Any:
        self.enter(False)
        loss = closure()
        self.enter(True)
        return loss

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return map_only_tensors(_added_up, func(*args, **(kwargs or {})))


def _added_up(result: Tensor) -> Tensor:
    sharded = as_sharded(result)
    if sharded is None or not any(each.is_partial() for each in sharded.placements):
        return result
    from torch.distributed.tensor import Replicate

    return sharded.redistribute(placements=[Replicate() if each.is_partial() else each for each in sharded.placements])
