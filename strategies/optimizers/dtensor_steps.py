"""What the steps of optimizers need whose parameters are DTensors, or DTensors and plain parameters.

torch's foreach and fused kernels take a list of one kind (torch 2.13: "got mixed torch.Tensor and DTensor"). So groups
that have both kinds step one parameter at a time; the numbers are the same.

In a step of an optimizer that is in no table, partial sums and norms are all-reduced at once. torch 2.13 adds up the
sums of shards as late as it can, and does not for `item()`, `float` and `if`, which read the sum over this rank's
shard: `lr * float(norm)` would be another number on each rank, and nothing would raise.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeAlias, final

from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from fabric.strategies.optimizers.elementwise import updates_each
from fabric.strategies.optimizers.owners import has_shards, with_closure
from fabric.strategies.step_hooks import hook_steps
from fabric.strategies.tensors.dtensor import as_sharded
from fabric.strategies.tensors.nests import map_only_tensors
from fabric.strategies.undo import undo_all

_Options: TypeAlias = list[tuple[dict[str, Any], dict[str, Any]]]


def step_mixed_groups(optimizers: Iterable[Optimizer]) -> Callable[[], None]:
    """Let such groups have `foreach=False` and `fused=False` during each step; between steps, and in a checkpoint, they
    have what the user wrote. Returns a function that undoes it."""
    undos = []
    for optimizer in optimizers:
        if any(map(_is_mixed, optimizer.param_groups)):
            written: _Options = []
            undos.append(hook_steps(optimizer, partial(_step_one_by_one, written), partial(_restore, written)))
    return undo_all(undos)


def _step_one_by_one(written: _Options, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    _restore(written)  # the options that a step left behind when it raised
    for group in filter(_is_mixed, optimizer.param_groups):
        written.append((group, {name: group[name] for name in ("foreach", "fused") if name in group}))
        group.update(dict.fromkeys(written[-1][1], False))


def _restore(written: _Options, *args: Any) -> None:
    for group, options in written:
        group.update(options)
    written.clear()


def _is_mixed(group: dict[str, Any]) -> bool:
    return len({as_sharded(parameter) is None for parameter in group["params"]}) == 2


def sum_over_shards_in_steps(optimizers: Iterable[Optimizer]) -> Callable[[], None]:
    """All-reduce partial sums at once in steps of optimizers that are in no table. Returns a function that undoes it.

    Ranks: from then on all that hold shards call `step`, with the same operations in the same order.
    """
    unknown = [each for each in optimizers if has_shards(each) and updates_each(each) is None]
    readers = [(each, _SumsOverShards()) for each in unknown]  # type: ignore[no-untyped-call]
    return undo_all(hook_steps(each, numbers.before_step, numbers.after_step) for each, numbers in readers)


@final
class _SumsOverShards(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context: partial sums of DTensors are all-reduced at once. Closures run outside of it."""

    is_entered = False

    def before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.enter(True)
        return with_closure(args, kwargs, self._outside)

    def after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.enter(False)

    def enter(self, is_entered: bool) -> None:
        """Enter or leave the context, unless that is done already: a step may have raised."""
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
