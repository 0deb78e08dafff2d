"""Mistakes that make ranks differ, or all alike, seen without a message between ranks: by counts in the job's store.

A synchronised backward ends on a rank only after all ranks have begun theirs. So what each rank has counted in the
store before its backward can be read after it: no rank waits for another, and a count that not all ranks share shows.
On an accelerator, `backward` returns before that; there the device is synchronised before a load is compared. Where
ranks meet once in a step, but not in its backward, the count is complete one step later: so a load is judged then.
A load counts if weights differ after it: a rank may load others to evaluate them, and load its own again.
Cost: nothing per step. For each `load_state_dict` of a model that is trained, its weights are read twice; then two
requests to the store per rank. One (rank 0: two) for the first steps of a job.
"""

from __future__ import annotations

import hashlib
import inspect
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fabric.launchers.watch.stack import frames_of, users_line
from fabric.strategies.checkpoint.load_hooks import observe_loads
from fabric.strategies.collectives.flight_recorder import FlightRecorder
from fabric.strategies.digest import digest_of_all
from fabric.strategies.runtime import Runtime

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_GRACE = timedelta(seconds=10)
"""For a program whose ranks do not meet in each step."""
_NUM_LOSSES = 3  # a head that starts from zeros gives one loss for all data, but not after a step


@final
class ReplicaGuard:
    """What this rank has counted. `store`: that of all ranks."""

    def __init__(self, runtime: Runtime, store: Store) -> None:
        self._runtime, self._store = runtime, store
        self._num_models = 0
        self._loaded: dict[int, _Load] = {}
        self._is_collective = False
        self._num_loads: dict[int, int] = {}
        self._counted: list[_Load] = []
        self._losses: list[str] | None = [] if runtime.share.count == runtime.world.size else None
        self._key: str | None = None

    def expect_same_data(self) -> None:
        """Say that ranks read the same data on purpose."""
        self._losses = self._key = None

    def count_loads(self, module: nn.Module) -> Callable[[], None]:
        """Note each `load_state_dict` of the module from here on. Returns what undoes it. Ranks: all."""
        self._num_models += 1
        model = self._num_models

        def before() -> None:
            if not self._is_collective and model not in self._loaded:
                self._loaded[model] = _Load(module, _users_line())

        def after() -> None:
            if not self._is_collective:
                self._loaded[model].after = digest_of_all(module.parameters())

        return observe_loads(module, before, after)

    @contextmanager
    def collective_load(self) -> Iterator[None]:
        """Context: all ranks load together, so these loads are not counted. What was loaded before is overwritten."""
        self._is_collective = True
        try:
            yield
        finally:
            self._is_collective = False
            self._loaded.clear()

    def before_backward(self) -> None:
        """Called before each synchronised backward: count this rank's loads since the last one."""
        if not self._loaded:
            return
        loaded, self._loaded = self._loaded, {}
        for model, load in loaded.items():
            if load.changed_nothing():
                continue
            number = self._num_loads[model] = self._num_loads.get(model, 0) + 1
            load.key, load.until_ns = f"loads/{model}/{number}", time.time_ns()
            if self._store.add(load.key, 1) == self._runtime.world.size:
                self._store.set(f"{load.key}/all", "")
            else:
                self._counted.append(load)

    def after_backward(self, loss: Tensor) -> None:
        """Called after each synchronised backward.

        Raises: RuntimeError: this rank has loaded weights, and others have not.
        """
        if self._counted:
            self._compare_loads()
        if self._losses is not None:
            self._compare_losses(loss)

    def _compare_loads(self) -> None:
        if self._runtime.device.type != "cpu":
            torch.accelerator.synchronize(self._runtime.device)
        counted, self._counted = self._counted, []
        for load in counted:
            if self._store.check([f"{load.key}/all"]):
                continue
            if not load.is_late:
                load.is_late = True
                self._counted.append(load)
                continue
            if load.was_broadcast():
                continue
            try:
                self._store.wait([f"{load.key}/all"], _GRACE)
            except dist.DistStoreError:
                number = self._store.add(load.key, 0)
                text = _LOADED_ALONE.format(number=number, size=self._runtime.world.size, line=load.line)
                raise RuntimeError(text) from None

    def _compare_losses(self, loss: Tensor) -> None:
        if self._key is not None:  # all ranks have counted theirs
            if self._runtime.world.is_global_zero and self._store.add(self._key, 0) == self._runtime.world.size:
                self._runtime.report(_SAME_DATA.format(size=self._runtime.world.size, line=_users_line()))
            self._losses = self._key = None
            return
        assert self._losses is not None
        if loss.numel() != 1:
            self._losses = None
            return
        self._losses.append(float(loss.detach()).hex())
        if len(self._losses) == _NUM_LOSSES:
            digest = hashlib.blake2b(" ".join(self._losses).encode(), digest_size=8).hexdigest()
            if len(set(self._losses)) > 1:  # a constant says nothing about the data
                self._key = f"losses/{digest}"
                self._store.add(self._key, 1)
            else:
                self._losses = None


@final
class _Load:
    """The loads of one model between two backwards. Created before the first of them."""

    def __init__(self, module: nn.Module, line: str) -> None:
        self.module, self.line = module, line
        self.before = self.after = digest_of_all(module.parameters())
        self.key = ""
        self.is_late = False
        """Whether a backward has ended since that was begun with the load, and not all ranks had loaded then."""
        self.since_ns = self.until_ns = time.time_ns()

    def changed_nothing(self) -> bool:
        """Whether the model has the weights from before, be it by a load or by hand."""
        return self.before in (self.after, digest_of_all(self.module.parameters()))

    def was_broadcast(self) -> bool:
        """Whether this rank has sent the weights to others by hand, between the load and the backward."""
        sent = FlightRecorder().num_elements("broadcast", self.since_ns, self.until_ns)
        return sent >= sum(parameter.numel() for parameter in self.module.parameters())


def _users_line() -> str:
    return users_line(frames_of(inspect.currentframe()))


_LOADED_ALONE = (
    "`load_state_dict` was called on {number} of {size} ranks, at {line} on this one: replicas would train from "
    "different weights. Call it on all ranks, load before `fabric.setup`, which takes the weights of rank 0, or write "
    "`fabric.load(path, state)` or `fabric.load_raw(path, model)` on all ranks."
)
_SAME_DATA = (
    "In their first steps all {size} ranks had the same loss, to the last bit, at {line}: they read the same samples. "
    "Pass the loader to `fabric.setup_dataloaders`, and iterate what it returns. Where the same data is meant for all "
    "ranks, `fabric.setup_dataloaders(loader, use_distributed_sampler=False)` says so."
)
