"""Checks that all ranks compute gradients of the same parameters in a backward, as `fully_shard` requires.

torch packs the gradients that a rank has of one unit side by side, and sums those of all ranks by position. If ranks
used different parameters of a unit, for example experts that each rank chooses for its own samples, gradients of
different parameters would be added without an error.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeAlias, final

from torch import Tensor, nn

from fabric.strategies.runtime import Runtime
from fabric.strategies.sharding.dtensor import local_part, user_class
from fabric.strategies.sharding.execution_order import start_comparing
from fabric.strategies.sharding.gathered import Gathered

_Mark: TypeAlias = tuple[Tensor, int] | None
"""A gradient, and its version counter."""


@final
class SameGradients:
    """Compares which gradients each backward of one model reduced.

    Cost: a message of 8 bytes for each backward that reduces gradients, which all ranks wait for.
    """

    def __init__(self, runtime: Runtime, module: nn.Module, gathered: Gathered) -> None:
        self._runtime = runtime
        self._sentence = _APART.format(name=user_class(module).__name__)
        names: dict[Tensor, str] = {parameter: name for name, parameter in module.named_parameters()}
        self._params = [(names[each.sharded_param], each) for each in gathered.params()]
        self._is_needed = runtime.world.size > 1 and bool(self._params)

    def watch(self) -> Callable[[], None] | None:
        """See `GradientSync.watch`."""
        if not self._is_needed:
            return None
        return partial(self._compare, [_mark(each.sharded_param.grad) for _, each in self._params])

    def _compare(self, before: list[_Mark]) -> None:
        params = zip(self._params, before, strict=True)
        reduced = [name for (name, each), mark in params if not _is_as_before(each.sharded_param.grad, mark)]
        if reduced:  # then other ranks reduced some, too
            start_comparing(self._runtime, reduced, self._sentence)()


def _mark(gradient: Tensor | None) -> _Mark:
    return None if gradient is None else (gradient, local_part(gradient)._version)


def _is_as_before(gradient: Tensor | None, mark: _Mark) -> bool:
    if gradient is None or mark is None:
        return gradient is None and mark is None
    return gradient is mark[0] and local_part(gradient)._version == mark[1]


_APART = (
    "Ranks computed gradients of different parameters of `{name}`, and `fully_shard` adds up gradients by their place "
    "among those that a rank has. The weights are unchanged; `optimizer.zero_grad()` discards the gradients. Use the "
    "same parameters on every rank, or pass `strategy='ddp_find_unused_parameters_true'`."
)
