"""The parameter groups of an optimizer under ZeRO: the program's parameters, and shards while DeepSpeed uses them.

DeepSpeed replaces the parameters in the groups by flat shards, whose gradients are None between steps. A loop over the
groups would find nothing to clip, and what it writes to a shard would be overwritten by the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import is_
from typing import final

from torch import Tensor
from torch.optim import Optimizer


@final
class Groups:
    """The groups of one optimizer. `parameters`: those that each group had before DeepSpeed replaced them."""

    def __init__(self, optimizer: Optimizer, parameters: Sequence[Sequence[Tensor]]) -> None:
        self._optimizer = optimizer
        self._parameters = [list(group) for group in parameters]
        self._shards = self._replace(self._parameters)

    @contextmanager
    def shards(self) -> Iterator[None]:
        """Context: the groups have DeepSpeed's shards. Raises: RuntimeError: the program has changed the groups."""
        self._refuse_changes()
        self._replace(self._shards)
        try:
            yield
        finally:
            self._shards = self._replace(self._parameters)

    def release(self) -> None:
        """Give the groups DeepSpeed's shards for good, without groups that were added."""
        del self._optimizer.param_groups[len(self._parameters) :]
        self._replace(self._shards)

    def _replace(self, lists: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
        """Exchange what the groups hold; returns what they held."""
        groups = self._optimizer.param_groups
        before = [group["params"] for group in groups]
        for group, some in zip(groups, lists, strict=True):
            group["params"] = list(some)
        return before

    def _refuse_changes(self) -> None:
        groups = self._optimizer.param_groups
        name = type(self._optimizer).__name__
        if len(groups) != len(self._parameters):
            raise RuntimeError(LATE_GROUP.format(optimizer=name))
        for number, (group, some) in enumerate(zip(groups, self._parameters, strict=True)):
            if len(group["params"]) != len(some) or not all(map(is_, group["params"], some)):
                raise RuntimeError(_CHANGED.format(optimizer=name, number=number))


LATE_GROUP = (
    "A parameter group was added to `{optimizer}` after `fabric.setup`: DeepSpeed steps the shards that it made then, "
    "so this group would not be trained. Add it before `fabric.setup`, with `lr=0` until it is to be trained; or set "
    "up the model again in a new `Fabric`, or pass `strategy='ddp'`."
)
_CHANGED = (
    "`param_groups[{number}]['params']` of `{optimizer}` was changed after `fabric.setup`: DeepSpeed steps the shards "
    "that it made of all parameters then. To stop training some of them, give them a group of their own before "
    "`fabric.setup`, and set its `lr` and `weight_decay` to 0; or pass `strategy='ddp'`."
)
IN_SHARDS = (
    "`{optimizer}.{method}` at ZeRO stage 3: its state is of flat shards, which belong to no parameter group. Call "
    "`fabric.state_dict(model, optimizer)`, `fabric.save` and `fabric.load`."
)
