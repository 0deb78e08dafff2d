"""Save: plan, write, commit, at once or in the background. Every rank writes its part of the tensors; rank 0 then
completes the checkpoint.

Existing files are untouched until all new files are on disk: those have unique names, and the manifest is replaced
last, atomically. An interrupted save leaves the previous checkpoint, and files that the next save to the same path
removes.

Note [The manifest is put together through the storage]
Each rank writes its part of the manifest next to its data, and rank 0 reads the parts: they grow with the model, and
would otherwise be sent to all ranks. The ranks communicate only a token and two decisions. If rank 0 does not find the
files of a rank, that rank wrote to another disk, which is an error.

A save in the background: the loop waits until its tensors are copied, and a thread on each rank writes the copies.

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
import re
import secrets
import sys
import threading
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, final

import torch
import xxhash
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore

from fabric.strategies.accelerators.torch_accelerator import has_streams
from fabric.strategies.checkpoint.errors import (
    CheckpointError,
    CommittedError,
    attempt,
    failure,
    raised_together,
    sentence_of,
)
from fabric.strategies.checkpoint.manifest import ALIGNMENT_BYTES, NAME, Entry, Manifest, Piece, merged
from fabric.strategies.checkpoint.storage import Storage, buffer_of
from fabric.strategies.checkpoint.tensors import TensorShards, memory_of, replicated
from fabric.strategies.checkpoint.values import Json, encode
from fabric.strategies.collectives.collective import Collective
from fabric.strategies.tensors.chunk import Chunk

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store


def save(
    collective: Collective,
    storage: Storage,
    state: Any,
    after_commit: Callable[[], object] | None = None,
    staged: "Callable[[Plan], Plan]" = lambda plan: plan,
) -> None:
    """Save `state`, a nest of plain values, tensors and `TensorShards`, replacing the checkpoint at the path.

    Plain values and tensors are those of rank 0, which calls `after_commit` once the checkpoint is complete. `staged`:
    returns the plan with tensors that the host can read; by default the host waits for each that is on a device.
    Ranks: all call it; it returns on all once the checkpoint is complete and on disk.
    Raises: TypeError: rank 0's state has a value that cannot be saved. CheckpointError: on every rank, if any rank
    could not write; the previous checkpoint is untouched.
    """
    token = collective.broadcast_object(secrets.token_hex(4))
    with removed_if_unwritten(collective, storage, token):
        write(storage, staged(plan(state, collective.rank, token)))
    with removed_if_unwritten(collective, storage, token):
        if collective.rank == 0:
            commit(storage, token, collective.size, after_commit)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What one rank writes."""

    rank: int
    token: str
    """Unique to this save: part of its file names."""
    values: Json
    """None on all ranks but 0."""
    tensors: Mapping[str, TensorShards]
    """By JSON pointer, each with the shards that this rank writes."""

    @property
    def file(self) -> str:
        """The name of the file for the tensors' bytes."""
        return f"{self.token}.{self.rank}.bin"


def plan(state: Any, rank: int, token: str) -> Plan:
    """Choose what this rank writes. Each rank on its own: those that hold the same shards come to the same choice.

    Raises: TypeError: the state has a value that cannot be saved. ValueError: a tensor is sparse or quantized.
    """
    found: dict[str, TensorShards] = {}

    def keep(pointer: str, tensor: Any) -> Json:
        if pointer in found:
            raise ValueError(f"The state has two entries at {pointer}: their keys differ only in type. Rename one")
        if isinstance(tensor, Tensor):
            _refuse_kind(tensor, pointer)
            tensor = replicated(tensor, (0,))
        for _, part in tensor.shards:
            _refuse_kind(part, pointer)
        found[pointer] = tensor
        return {"$tensor": list(tensor.shape)}

    values = encode(state, keep, lambda value: isinstance(value, (Tensor, TensorShards)))
    return Plan(rank=rank, token=token, values=values if rank == 0 else None, tensors=_assigned(found, rank))


def _assigned(tensors: Mapping[str, TensorShards], rank: int) -> dict[str, TensorShards]:
    """The shards that this rank writes. Replicated ones are assigned to their holders by bytes, largest first."""
    # Tensors without elements may have no shards on any rank. Rank 0 writes their entries.
    mine: dict[str, list[tuple[Chunk, Tensor]]] = {
        name: [] for name, each in tensors.items() if rank == 0 and 0 in each.shape
    }
    shards = [(name, each.holders, shard) for name, each in tensors.items() for shard in each.shards]
    loads: dict[tuple[int, ...], dict[int, int]] = {}
    writers: dict[Any, int] = {}
    for name, holders, (chunk, part) in sorted(shards, key=lambda each: -each[2][1].nbytes):
        load, memory = loads.setdefault(holders, dict.fromkeys(holders, 0)), (holders, memory_of(part))
        if memory not in writers:  # tied tensors are written once
            writers[memory] = min(holders, key=load.__getitem__)
            load[writers[memory]] += part.nbytes
        if writers[memory] == rank:
            mine.setdefault(name, []).append((chunk, part))
    return {
        name: TensorShards(each.shape, each.dtype, tuple(mine[name]), ())
        for name, each in tensors.items()
        if name in mine
    }


def write(storage: Storage, plan: Plan) -> None:
    """Write the tensors' bytes, then where they are, as this rank's part of the manifest."""
    tensors: dict[str, Entry] = {}
    if plan.tensors:
        storage.write(plan.file, _blocks(plan, tensors))
    storage.write(f"{plan.token}.{plan.rank}.json", [Manifest(values=plan.values, tensors=tensors).to_bytes()])


def _blocks(plan: Plan, tensors: dict[str, Entry]) -> Iterator[memoryview]:
    """The bytes of the file. Fills `tensors` with their descriptions. Tied tensors are written once."""
    written: dict[Any, tuple[int, str]] = {}
    offset_bytes = 0
    for pointer, sharded in plan.tensors.items():
        pieces = []
        for chunk, part in sharded.shards:
            memory = memory_of(part)
            if memory not in written:
                content = bytes_of(part)
                written[memory] = offset_bytes, xxhash.xxh3_64_hexdigest(content)
                yield content
                yield memoryview(bytes(-content.nbytes % ALIGNMENT_BYTES))
                offset_bytes += -(-content.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
            start, checksum = written[memory]
            pieces.append(Piece(file=plan.file, offset_bytes=start, chunk=chunk, checksum=checksum))
        name = str(sharded.dtype).removeprefix("torch.")
        tensors[pointer] = Entry(dtype=name, shape=sharded.shape, pieces=tuple(pieces))


def _refuse_kind(tensor: Tensor, pointer: str) -> None:
    """Raise ValueError for a tensor that is not dense, or has no values."""
    wraps_others = type(tensor) not in (Tensor, nn.Parameter) and tensor.numel() and not tensor.data_ptr()
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested or tensor.is_meta or wraps_others:
        raise ValueError(
            f"The tensor at {pointer} is a `{type(tensor).__name__}` with the layout {tensor.layout}, on the device "
            f"{tensor.device}, but a checkpoint contains only dense tensors with values. Save those that it is made of"
        )


def bytes_of(tensor: Tensor) -> memoryview:
    """The elements, row-major, as bytes. Copies only if the tensor is on a device, or not contiguous."""
    flat = tensor.detach().resolve_conj().resolve_neg().to("cpu").contiguous().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    return buffer_of(flat)


def commit(storage: Storage, token: str, num_ranks: int, after_commit: Callable[[], object] | None = None) -> None:
    """Write the manifest for what all ranks have written, remove the files that it replaces, and call `after_commit`.
    On rank 0 only."""
    found = []
    for rank in range(num_ranks):
        try:
            found.append(Manifest.of_bytes(storage.read(f"{token}.{rank}.json")))
        except FileNotFoundError as error:
            raise ValueError(
                f"Rank 0 does not find the files of rank {rank} in {storage.path!r}: rank {rank} saved to another path "
                "(a time or a rank in its name?), this path is on another disk there, or another job saved to it at "
                "that time. Give all ranks of a job the same path, in a folder that they share"
            ) from error
    tensors = merged(found)
    storage.commit(NAME, Manifest(values=found[0].values, tensors=tensors).to_bytes())
    files = {piece.file for entry in tensors.values() for piece in entry.pieces}
    attempt(partial(remove_leftovers, storage, files))  # the next save removes the rest
    if after_commit is not None:
        try:
            after_commit()
        except Exception as error:
            raise CommittedError(
                f"The checkpoint {storage.path!r} is complete, but a step after that failed on rank 0: "
                f"{sentence_of(error)}.",
                rank=0,
            ) from error


def remove_leftovers(storage: Storage, keep: Container[str]) -> None:
    """Remove what earlier saves wrote here and the manifest does not name: of a previous checkpoint, or incomplete.

    The folder may have other files of the user: only names that saves give are removed.
    """
    for name in storage.names():
        if is_written_by_save(name) and name not in keep:
            storage.remove(name)


def is_written_by_save(name: str) -> bool:
    """Whether a file has a name that only saves give."""
    return _WRITTEN.fullmatch(name) is not None


_WRITTEN = re.compile(rf"[0-9a-f]{{8}}\.\d+\.(bin|json)(\.new)?|{re.escape(NAME)}\.new")
"""The names of the files of a save, see `Plan.file`, `write` and `replacing`."""


@contextmanager
def removed_if_unwritten(collective: Collective, storage: Storage, token: str) -> Iterator[None]:
    """Context for a part of a save: if any rank raises in it, every rank removes its files, and raises. Ranks: all."""
    try:
        with raised_together(collective, "write", storage.path):
            yield
    except CheckpointError as error:
        remove_unwritten(storage, token, collective.rank, error)
        if isinstance(error.__cause__, TypeError):
            raise error.__cause__ from None
        raise


def remove_unwritten(storage: Storage, token: str, rank: int, error: CheckpointError) -> None:
    """Remove the files that this rank has written in a save that failed by `error`, unless the checkpoint is
    complete."""
    if not isinstance(error, CommittedError):
        for kind in ("bin", "json"):
            attempt(partial(storage.remove, f"{token}.{rank}.{kind}"))


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
        """Return as soon as `state` is copied; otherwise as `save`. Ranks: all call it, after `finish`.

        Raises: TypeError, CheckpointError: as `save`, for errors that occur before anything is written.
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
