"""Mistakes that make ranks differ, or all alike, seen without a message between ranks: by counts in the job's store.

A synchronised backward ends on a rank only after all ranks have begun theirs. So what each rank has counted in the
store before its backward can be read after it: no rank waits for another, and a count that not all ranks share shows.
On an accelerator, `backward` returns before that; there the device is synchronised before a load is compared.
Cost: nothing per step. Two requests to the store per rank for each `load_state_dict` of a model that is trained, and
one (rank 0: two) for the first steps of a job.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fabric.launchers.watch.stack import frames_of, users_line
from fabric.strategies.runtime import Runtime

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_GRACE = timedelta(seconds=10)
"""For a rank whose backward ends before all others have begun theirs: of parts of a model that no tensor joins."""
_NUM_LOSSES = 3  # a head that starts from zeros gives one loss for all data, but not after a step


@final
class ReplicaGuard:
    """What this rank has counted. `store`: that of all ranks."""

    def __init__(self, runtime: Runtime, store: Store) -> None:
        self._runtime, self._store = runtime, store
        self._num_models = 0
        self._loads: list[tuple[str, str]] = []
        self._losses: list[str] | None = [] if runtime.share.count == runtime.world.size else None
        self._key: str | None = None

    def expect_same_data(self) -> None:
        """Say that ranks read the same data on purpose."""
        self._losses = self._key = None

    def count_loads(self, module: nn.Module) -> Callable[[], None]:
        """Count each `load_state_dict` of the module from here on. Returns what undoes it. Ranks: all."""
        self._num_models += 1
        model, number = self._num_models, 0

        def note(*_: Any) -> None:
            nonlocal number
            number += 1
            key = f"loads/{model}/{number}"
            if self._store.add(key, 1) == self._runtime.world.size:
                self._store.set(f"{key}/all", "")
            self._loads.append((key, _users_line()))

        handle: RemovableHandle = module.register_load_state_dict_post_hook(_Note(note))  # type: ignore[no-untyped-call]
        return handle.remove

    def after_backward(self, loss: Tensor) -> None:
        """Called after each synchronised backward.

        Raises: RuntimeError: this rank has loaded weights, and others have not.
        """
        if self._loads:
            self._compare_loads()
        if self._losses is not None:
            self._compare_losses(loss)

    def _compare_loads(self) -> None:
        loads, self._loads = self._loads, []
        if self._runtime.device.type != "cpu":
            torch.accelerator.synchronize(self._runtime.device)
        for key, line in loads:
            try:
                self._store.wait([f"{key}/all"], _GRACE)
            except dist.DistStoreError:
                number = self._store.add(key, 0)
                text = _LOADED_ALONE.format(number=number, size=self._runtime.world.size, line=line)
                raise RuntimeError(text) from None

    def _compare_losses(self, loss: Tensor) -> None:
        if self._key is not None:  # all ranks have counted theirs
            if self._runtime.world.is_global_zero and self._store.add(self._key, 0) == self._runtime.world.size:
                self._runtime.report(_SAME_DATA.format(size=self._runtime.world.size, line=_users_line()))
            self._losses = self._key = None
            return
        assert self._losses is not None
        if loss.numel() != 1 or self._runtime.device.type == "xla":  # there, reading a number ends a graph
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
class _Note:
    """The hook on the user's module; a copy of the module has one that does nothing."""

    def __init__(self, note: Callable[..., None]) -> None:
        self._note = note

    def __call__(self, *args: Any) -> None:
        self._note(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return _nothing, ()


def _nothing() -> Callable[..., None]:
    return _pass


def _pass(*_: Any) -> None:
    pass


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
