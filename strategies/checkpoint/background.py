"""Save in the background: the loop waits until its tensors are copied, and a thread on each rank writes the copies.

Note [How the threads agree]
They call no collective, because the loop calls collectives at the same time, and those are matched by issue order. The
threads communicate through the store of the job, each over a connection of its own: each increments a counter once it
has written, rank 0 commits and publishes the outcome, and all ranks return that. So `wait` does not depend on other
ranks, and each rank may call it at any time. If a rank dies, the counter stays incomplete: the launcher ends the other
ranks, and without a launcher that does, they raise after the timeout of the collectives.

Memory: a buffer of the size of what this rank writes, reused by every save; pinned if tensors are on an accelerator,
from which a blocking save copies in the same way.
One save at a time: the next one waits for the previous one.
"""

import os
import pickle
import secrets
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore

from fabric.strategies.accelerators.torch_accelerator import has_streams
from fabric.strategies.checkpoint.errors import CheckpointError, attempt, failure
from fabric.strategies.checkpoint.manifest import ALIGNMENT_BYTES
from fabric.strategies.checkpoint.storage import Storage
from fabric.strategies.checkpoint.tensors import memory_of
from fabric.strategies.checkpoint.write_and_commit import (
    Plan,
    commit,
    plan,
    remove_unwritten,
    removed_if_unwritten,
    write,
)
from fabric.strategies.collectives.collective import Collective

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

NICENESS = 14
"""Niceness of the threads, on Linux. Where the loop keeps every core busy, they get 4 % of a core: their weight is 45,
that of the loop 1024 (`sched_prio_to_weight` in Linux). 10: 10 %. 19: 1.5 %, and a save takes ten times as long."""
_SECONDS_BETWEEN_SIGNALS = 1.0


@final
class PendingSave:
    """A save that may still be running. `save`: the rest of it, for a thread; returns the error that `wait` raises."""

    def __init__(self, path: str, save: Callable[[], Exception | None] | None = None) -> None:
        self.path = path
        self.is_reported = save is None
        """Whether the caller knows the outcome."""
        self._error: Exception | None = None
        # Not `Thread.join`: once Ctrl-C interrupts it, Python takes the thread for ended (3.11, bpo-45274).
        self._ended = threading.Event()
        if save is None:
            self._ended.set()
        else:
            threading.Thread(target=self._run, args=(save,), daemon=True, name="fabric-save").start()

    def wait(self) -> None:
        """Return once the checkpoint is complete and on disk. Any rank may call it, without the others.

        Raises: CheckpointError: it could not be written; the same on every rank.
        """
        while not self._ended.wait(_SECONDS_BETWEEN_SIGNALS):
            pass  # a signal that arrives right before Python blocks is handled only once it wakes up
        self.is_reported = True
        if self._error is not None:
            raise self._error

    @property
    def is_done(self) -> bool:
        """Whether `wait` would return or raise immediately."""
        return self._ended.is_set()

    def _run(self, save: Callable[[], Exception | None]) -> None:
        if sys.platform == "linux":
            attempt(lambda: os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS))
        try:
            self._error = save()
        finally:
            self._ended.set()


@final
class BackgroundSaves:
    """The saves of one fabric that are written in the background, one at a time; each within `around()`."""

    def __init__(
        self, collective: Collective, around: Callable[[], AbstractContextManager[object]] = nullcontext
    ) -> None:
        self._collective, self._around = collective, around
        self._memory = torch.empty(0, dtype=torch.uint8)
        """For copies of what this rank writes, reused by every save."""
        self._pending: PendingSave | None = None

    def start(self, storage: Storage, state: Any, after_commit: Callable[[], object] | None = None) -> PendingSave:
        """Return as soon as `state` is copied; otherwise as `saving.save`. Ranks: all call it, after `finish`.

        Raises: TypeError, CheckpointError: as `saving.save`, for errors that occur before anything is written.
        """
        collective = self._collective
        token = collective.broadcast_object(secrets.token_hex(4))
        store = collective.store()
        with removed_if_unwritten(collective, storage, token):
            staged = [self._copied(plan(state, collective.rank, token))]
        around = ExitStack()
        around.enter_context(self._around())

        def save() -> Exception | None:
            with around:
                return _save(storage, staged.pop(), store, collective.size, after_commit)

        self._pending = PendingSave(storage.path, save)
        return self._pending

    def off_device(self, plan: Plan) -> Plan:
        """The plan with its tensors on the host. It waits for a device once, and not for each tensor."""
        shards = (part for sharded in plan.tensors.values() for _, part in sharded.shards)
        return self._copied(plan) if any(has_streams(part.device) for part in shards) else plan

    def _copied(self, plan: Plan) -> Plan:
        """The plan with copies of its tensors, which are valid until the next call."""
        parts = {memory_of(part): part for sharded in plan.tensors.values() for _, part in sharded.shards}
        sizes = {key: -(-part.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for key, part in parts.items()}
        devices = {part.device for part in parts.values() if has_streams(part.device)}
        num_bytes, is_pinned = sum(sizes.values()), bool(devices)
        if self._memory.nbytes < num_bytes or (is_pinned and not self._memory.is_pinned()):
            self._memory = torch.empty(0, dtype=torch.uint8)  # frees the old buffer first
            self._memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_pinned)
        copies, start = dict[Any, Tensor](), 0
        for key, part in parts.items():
            copies[key] = self._memory[start : start + part.nbytes].view(part.dtype).view(part.shape)
            copies[key].copy_(part, non_blocking=part.device in devices)
            start += sizes[key]
        for device in devices:
            torch.accelerator.current_stream(device).synchronize()
        tensors = {
            pointer: replace(sharded, shards=tuple((chunk, copies[memory_of(part)]) for chunk, part in sharded.shards))
            for pointer, sharded in plan.tensors.items()
        }
        return replace(plan, tensors=tensors)

    def finish(self) -> None:
        """Wait for the save that is running, if any. Raises: CheckpointError: it failed, and no `wait` has raised."""
        pending = self._pending
        if pending is None:
            return
        was_reported = pending.is_reported
        _, problem = attempt(pending.wait)  # Ctrl-C passes: the next call, at the end of the program, waits again
        self._pending = None
        if problem is not None and not was_reported:
            raise problem

    def close(self) -> None:
        """As `finish`, but raise Ctrl-C once the save is complete: other ranks wait for it. A second one ends it."""
        try:
            self.finish()
        except (KeyboardInterrupt, SystemExit):
            self.finish()
            raise


def _save(
    storage: Storage, plan: Plan, store: "Store | None", size: int, after_commit: Callable[[], object] | None
) -> CheckpointError | None:
    """Write, agree, commit on rank 0. Returns the error that every rank raises, or None.

    See Note [How the threads agree].
    """
    _, problem = attempt(lambda: write(storage, plan))

    def outcome() -> bytes:
        return pickle.dumps(None if problem is None else failure(problem, "write", storage.path, plan.rank))

    error: CheckpointError | None
    try:
        # A connection of its own, which calls block.
        own: Any = torch.distributed.HashStore() if store is None else store.clone()  # type: ignore[attr-defined]
        own = PrefixStore(f"save/{plan.token}", own)
        if problem is not None and own.add("num_failed", 1) == 1:
            own.set("failure", outcome())
        if own.add("num_written", 1) == size:
            own.set("all_written", "")
        if plan.rank == 0:
            own.wait(["all_written"])
            if not (has_failed := own.check(["failure"])):
                _, problem = attempt(lambda: commit(storage, plan.token, size, after_commit))
            own.set("outcome", own.get("failure") if has_failed else outcome())
        error = pickle.loads(own.get("outcome"))
    except Exception as lost:  # of the store: a rank ended. Rank 0 may have committed, so the files are kept
        return CheckpointError(_UNKNOWN.format(rank=plan.rank, path=storage.path, why=lost), rank=plan.rank)
    if error is not None:
        remove_unwritten(storage, plan.token, plan.rank, error)
        error.__cause__ = problem
    return error


_UNKNOWN = (
    "Rank {rank} does not know whether the checkpoint {path!r} is complete: another rank ended, or did not answer "
    "within the timeout. {why}"
)
