"""Save in the background: the loop waits for a copy of its tensors, a thread of each rank writes the copies.

Note [What the threads say to each other]
They start no collective: the loop's go on meanwhile, and collectives are matched by issue order. The threads meet in
the store of the job, each by a connection of its own: each counts itself in once it has written, rank 0 commits and
publishes the outcome, and every rank ends with that one. So `wait` needs no other rank, and each may call it at any
time. A rank that dies never counts itself in: the job's launcher ends the others, and where nothing does, they raise
after the timeout of the collectives.

Memory: the bytes that this rank writes, once more, kept from save to save; in pinned memory where they come from CUDA.
One save at a time: the next one waits for the one before.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore

from fabric.strategies.checkpoint.errors import CheckpointError
from fabric.strategies.checkpoint.manifest import ALIGNMENT_BYTES
from fabric.strategies.checkpoint.placed import Placed
from fabric.strategies.checkpoint.saving import Failure, Plan, attempt, finish, memory_of, plan, refuse_together, write
from fabric.strategies.checkpoint.storage import Storage
from fabric.strategies.collectives.collective import Collective

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

NICENESS = 10
"""Of the threads, on Linux: they leave the processor to a loop that wants all of it."""


@final
class PendingSave:
    """A save that may still be under way. `save`: what is left of it, which gives the error that `wait` raises."""

    def __init__(self, path: str, save: Callable[[], Exception | None] | None = None) -> None:
        self.path = path
        self.is_told = save is None
        """Whether somebody knows how it ended."""
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(save,), daemon=True, name="fabric-save")
        if save is not None:
            self._thread.start()

    def wait(self) -> None:
        """Return once the checkpoint is complete and on disk. Any rank may call it, alone.

        Raises: CheckpointError: it could not be written; the same on every rank.
        """
        if self._thread.ident is not None:
            self._thread.join()
        self.is_told = True
        if self._error is not None:
            raise self._error

    @property
    def is_done(self) -> bool:
        """Whether `wait` returns, or raises, at once."""
        return not self._thread.is_alive()

    def _run(self, save: Callable[[], Exception | None]) -> None:
        if sys.platform == "linux":
            attempt(lambda: os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS))
        self._error = save()


@final
class BackgroundSaves:
    """The saves of one fabric that are written in the background, one at a time."""

    def __init__(self, collective: Collective) -> None:
        self._collective = collective
        self._staging = Staging()
        self._pending: PendingSave | None = None

    def start(self, storage: Storage, state: Any, after_commit: Callable[[], object] | None = None) -> PendingSave:
        """Go on as soon as `state` is copied; as `saving.save` otherwise. Ranks: all call it, after `finish`.

        Raises: TypeError, CheckpointError: as `saving.save`, for what is found before anything is written.
        """
        collective = self._collective
        token = collective.broadcast_object(secrets.token_hex(4))
        store = collective.store()
        staged: list[Plan] = []

        def stage() -> None:
            if store is None and collective.size > 1:
                raise ValueError(f"`blocking=False` needs a store, and a `{type(collective).__name__}` has none")
            staged.append(self._staging.copy(plan(state, collective.rank, token)))

        refuse_together(collective, storage, attempt(stage), token)
        meeting = None if store is None else Meeting(store, token, collective.rank, collective.size)
        self._pending = PendingSave(
            storage.path, lambda: _save(storage, staged.pop(), meeting, collective.size, after_commit)
        )
        return self._pending

    def finish(self) -> None:
        """Return once nothing is under way. Raises: CheckpointError: the last save failed, and no call has said so."""
        pending, self._pending = self._pending, None
        if pending is not None and not pending.is_told:
            pending.wait()
        elif pending is not None:
            attempt(pending.wait)


@final
class Staging:
    """Memory of this rank's own for what it writes, kept from save to save."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def copy(self, plan: Plan) -> Plan:
        """The same, of copies. They hold until the next call."""
        parts = {memory_of(part): part for placed in plan.tensors.values() for _, part in placed.parts}
        sizes = {key: -(-part.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for key, part in parts.items()}
        self._reserve(sum(sizes.values()), pinned=any(part.is_cuda for part in parts.values()))
        copies, start = dict[Any, Tensor](), 0
        for key, part in parts.items():
            copies[key] = self._memory[start : start + part.nbytes].view(part.dtype).view(part.shape)
            copies[key].copy_(part, non_blocking=self._memory.is_pinned() if part.is_cuda else False)
            start += sizes[key]
        for device in {part.device for part in parts.values() if part.is_cuda}:
            torch.cuda.synchronize(device)
        tensors = {pointer: _of_copies(placed, copies) for pointer, placed in plan.tensors.items()}
        return replace(plan, tensors=tensors)

    def _reserve(self, num_bytes: int, *, pinned: bool) -> None:
        if self._memory.nbytes < num_bytes or (pinned and not self._memory.is_pinned()):
            self._memory = torch.empty(0, dtype=torch.uint8)  # the old one goes before the new one comes
            self._memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned)


def _of_copies(placed: Placed, copies: dict[Any, Tensor]) -> Placed:
    parts = tuple((box, copies[memory_of(part)]) for box, part in placed.parts)
    return replace(placed, parts=parts)


@final
class Meeting:
    """The ranks of one save, in the store. Note [What the threads say to each other]."""

    def __init__(self, store: Store, token: str, rank: int, size: int) -> None:
        self._store: Any = PrefixStore(f"save/{token}", store.clone())  # type: ignore[attr-defined]  # it blocks
        self._rank, self._size = rank, size

    def agree(self, problem: Exception | None, finish: Callable[[], None]) -> Failure | None:
        """The outcome, the same on every rank. Rank 0 calls `finish` once all have come without a problem."""
        if problem is not None and self._store.add("num_failed", 1) == 1:
            self._say("failure", Failure.of(problem, self._rank))
        if self._store.add("num_written", 1) == self._size:
            self._store.set("all_written", "")
        if self._rank == 0:
            self._store.wait(["all_written"])
            failure = self._heard("failure") if self._store.check(["failure"]) else None
            if failure is None:
                problem = attempt(finish)
                failure = None if problem is None else Failure.of(problem, 0)
            self._say("outcome", failure)
        self._store.wait(["outcome"])
        outcome = self._heard("outcome")
        if self._store.add("num_heard", 1) == self._size:
            for key in ("num_failed", "failure", "num_written", "all_written", "outcome", "num_heard"):
                self._store.delete_key(key)
        return outcome

    def _say(self, key: str, failure: Failure | None) -> None:
        self._store.set(key, json.dumps(None if failure is None else asdict(failure)))

    def _heard(self, key: str) -> Failure | None:
        found = json.loads(self._store.get(key))
        return None if found is None else Failure(**found)


def _save(
    storage: Storage, plan: Plan, meeting: Meeting | None, size: int, after_commit: Callable[[], object] | None
) -> Exception | None:
    """Write, agree, commit; gives the error that every rank raises."""
    problem = attempt(lambda: write(storage, plan))

    def commit() -> None:
        finish(storage, plan.token, size, after_commit)

    try:
        if meeting is not None:
            failure = meeting.agree(problem, commit)
        else:
            problem = problem or attempt(commit)
            failure = None if problem is None else Failure.of(problem, 0)
    except Exception as error:  # of the store: a rank has gone. It may have committed, so what was written stays
        return CheckpointError(_ALONE.format(rank=plan.rank, path=storage.path, why=error), rank=plan.rank)
    if failure is None:
        return None
    failure.clean_up(storage, plan.token, plan.rank)
    raised = failure.error(storage)
    raised.__cause__ = problem
    return raised


_ALONE = "Rank {rank} could not learn whether the checkpoint {path!r} is complete: a rank has ended, or was late. {why}"
