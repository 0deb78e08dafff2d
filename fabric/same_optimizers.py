"""Ranks whose optimizers differ: in a learning rate, in the number of steps that they have taken, or in their weights.

A scheduler that is stepped with the loss of one rank (`ReduceLROnPlateau`), or on one rank alone, a step that one rank
leaves out, and random numbers that each rank adds to its replica, let ranks train apart, and raise nothing. So now and
then each rank counts in the job's store what its optimizers have, and later reads how many ranks have the same: no rank
waits for another. Nothing is judged before all ranks have counted.

Cost: five requests to the store for each comparison, before the synchronised backwards 1, 2, 4, ..., 256, and then one
in 256. Tensors among the hyperparameters are left out: to read them would wait for the device.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from datetime import timedelta
from itertools import zip_longest
from typing import TYPE_CHECKING, final

import torch.distributed as dist
from torch.optim import Optimizer

from fabric.step_counter import StepCounter
from fabric.strategies.gradients.clipping import parameters_of
from fabric.strategies.runtime import Runtime
from fabric.weight_sample import WeightSample

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_MAX_BETWEEN = 256
_GRACE = timedelta(seconds=10)
"""For the values of other ranks, once it is known that they differ."""


@final
class SameOptimizers:
    """Compares the optimizers of one fabric over the ranks. `store`: that of all ranks."""

    def __init__(self, runtime: Runtime, store: Store, steps: Mapping[Optimizer, StepCounter]) -> None:
        self._rank, self._size, self._store, self._steps = runtime.world.rank, runtime.world.size, store, steps
        self._num_backwards = 0
        self._counted: dict[int, tuple[str, list[str], WeightSample | None]] = {}
        """By the number of a backward: the key, the values and weights of this rank, until they are judged."""
        self.is_whole = True
        """Whether each rank holds all weights, so that they can be compared."""

    def before_backward(self) -> None:
        """Called before each synchronised backward. Raises: RuntimeError: on every rank, if optimizers differ."""
        self._num_backwards = number = self._num_backwards + 1
        if self._counted:
            self._judge()
        if number % _MAX_BETWEEN and number & (number - 1):  # neither a multiple nor a power of two
            return
        values = [text for optimizer, steps in self._steps.items() for text in _values(optimizer, steps)]
        key = f"optimizers/{number}/{hashlib.blake2b(repr(values).encode(), digest_size=8).hexdigest()}"
        sample = None
        if self.is_whole:
            sample = WeightSample([each for optimizer in self._steps for each in parameters_of(optimizer)], number)
            if self._rank == 0:
                self._store.set(f"weights/{number}", sample.to_text())
        self._store.add(key, 1)
        self._store.add(f"optimizers/{number}", 1)
        self._counted[number] = key, values, sample

    def _judge(self) -> None:
        for number, (key, values, sample) in list(self._counted.items()):
            if self._store.add(f"optimizers/{number}", 0) < self._size:  # a backend whose ranks meet in the step alone
                continue
            del self._counted[number]
            if self._store.add(key, 0) != self._size:
                raise RuntimeError(_DIFFERENT.format(number=number, first=self._first_difference(number, values)))
            if sample is not None and self._rank > 0:
                difference = sample.difference(self._store.get(f"weights/{number}").decode())
                if difference is not None:
                    raise RuntimeError(_APART.format(rank=self._rank, number=number, difference=difference))

    def _first_difference(self, number: int, values: list[str]) -> str:
        """What differs, with the values of all ranks: each of them finds the difference, and comes here."""
        keys = [f"optimizers/{number}/rank/{rank}" for rank in range(self._size)]
        self._store.set(keys[self._rank], "\n".join(values))
        try:
            self._store.wait(keys, _GRACE)
        except dist.DistStoreError:
            return f"rank {self._rank} has {', '.join(values)}"
        of_ranks = [self._store.get(key).decode().splitlines() for key in keys]
        for several in zip_longest(*of_ranks, fillvalue="nothing"):
            if len(set(several)) > 1:
                other = next(rank for rank, text in enumerate(several) if text != several[0])
                return f"rank 0 has {several[0]}, and rank {other} {several[other]}"
        raise AssertionError("nothing differs")


def _values(optimizer: Optimizer, steps: StepCounter) -> list[str]:
    """The steps and hyperparameters of one optimizer, as text: rounded, because libraries of mathematics differ."""
    name = type(optimizer).__name__
    found = [f"{steps.num_steps} steps of `{name}`"]
    for number, group in enumerate(optimizer.param_groups):
        of = f"of parameter group {number} of `{name}`"
        found += [f"{key}={text} {of}" for key in optimizer.defaults if (text := _text(group.get(key))) is not None]
    return found


def _text(value: object) -> str | None:
    if isinstance(value, float):
        return f"{value:.6g}"
    if value is None or isinstance(value, (bool, int, str)):
        return repr(value)
    if isinstance(value, (tuple, list)):
        texts = [_text(each) for each in value]
        return None if None in texts else f"({', '.join(map(str, texts))})"
    return None


_DIFFERENT = (
    "The optimizers of the ranks differ, since before the synchronised backward number {number}: {first}. So they "
    "train apart. Step each optimizer and each scheduler on all ranks or on none, and decide by values that are the "
    "same on all: `scheduler.step(fabric.all_reduce(loss))`. If each rank steps a part of the parameters, as with "
    "`deepspeed_stage_1` or `ddp_sharded`, an optimizer that estimates a value from all of them (Prodigy) needs "
    "`strategy='ddp'` or 'fsdp'. An optimizer that differs over ranks on purpose is not passed to `setup`."
)
_APART = (
    "The weights of rank {rank} are not those of rank 0, since before the synchronised backward number {number}: "
    "{difference}. Replicas that differ are trained with gradients of each other. Change weights and gradients on all "
    "ranks alike: random numbers differ between ranks after `fabric.setup`, so draw on rank 0 and send them, "
    "`fabric.broadcast(noise)`. `Fabric(check_replicas=1)` raises at the first step after which weights differ."
)
