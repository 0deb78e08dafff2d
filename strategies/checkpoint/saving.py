"""Save: plan, write, commit. Every rank writes its part of the tensors; rank 0 then makes the checkpoint complete.

Nothing that was there before is touched until all new files are on disk: they have names of their own, and the manifest
is replaced last, in one moment. A save that does not come to its end leaves the former checkpoint, and files that the
next save to the same place removes.

Note [Ranks meet in the storage]
Each rank writes the table of its pieces beside them, and rank 0 reads those: a table grows with the model, and would be
sent to all ranks otherwise. What is sent is a word at the beginning and two decisions. A rank whose files rank 0 does
not find has another disk than rank 0, which is an error.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias, final

import torch
from torch import Tensor

from fabric.strategies.checkpoint.box import Box
from fabric.strategies.checkpoint.checksum import crc32
from fabric.strategies.checkpoint.errors import CheckpointError
from fabric.strategies.checkpoint.manifest import (
    ALIGNMENT_BYTES,
    CHUNK_BYTES,
    NAME,
    Entry,
    File,
    Manifest,
    Piece,
    Table,
    merged,
    refuse_gaps,
)
from fabric.strategies.checkpoint.placed import Placed, on_ranks
from fabric.strategies.checkpoint.storage import Storage
from fabric.strategies.checkpoint.values import Json, encode
from fabric.strategies.collectives.collective import Collective

Part = tuple[Box, Tensor]
Advance: TypeAlias = Callable[[int, int], None]
"""`(done_bytes, total_bytes)`: takes how far a rank is with its part."""


def save(
    collective: Collective,
    storage: Storage,
    state: Any,
    after_commit: Callable[[], object] | None = None,
    advance: Advance | None = None,
) -> None:
    """Make the checkpoint of `state`, a nest of plain values, tensors and `Placed`, in place of what is there.

    Values, and tensors that are not `Placed`, are those of rank 0, which calls `after_commit` once the checkpoint is
    complete. `advance` is told how far this rank is. Ranks: all call it; it returns on all once the checkpoint is
    complete and on disk.
    Raises: TypeError: rank 0's state has a value that no checkpoint keeps. CheckpointError: on every rank, if any rank
    could not write; what was there before is untouched.
    """
    token = collective.broadcast_object(secrets.token_hex(4))
    problem = attempt(lambda: write(storage, plan(state, collective.rank, token), advance))
    refuse_together(collective, storage, problem, token)
    problem = attempt(lambda: finish(storage, token, collective.size, after_commit)) if collective.rank == 0 else None
    refuse_together(collective, storage, problem, token)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What one rank writes."""

    rank: int
    token: str
    """Of this save: its files have names of their own."""
    values: Json
    """None on all ranks but 0."""
    tensors: Mapping[str, Placed]
    """By their pointers, each with the parts that this rank writes."""

    @property
    def file(self) -> str:
        """The name of the file for the bytes."""
        return f"{self.token}.{self.rank}.bin"


def plan(state: Any, rank: int, token: str) -> Plan:
    """Choose what this rank writes. No rank talks: all that hold the same parts come to the same choice.

    Raises: TypeError: the state has a value that no checkpoint keeps. ValueError: a tensor is sparse or quantized.
    """
    found: dict[str, Placed] = {}

    def keep(pointer: str, tensor: Any) -> Json:
        if pointer in found:
            raise ValueError(f"The state has two entries that are both {pointer}: keys that differ in type alone.")
        if isinstance(tensor, Tensor):
            tensor = on_ranks(tensor, (0,))
        for _, part in tensor.parts:
            _refuse_kind(part, pointer)
        found[pointer] = tensor
        return {"$tensor": list(tensor.shape)}

    values = encode(state, keep, lambda value: isinstance(value, (Tensor, Placed)))
    return Plan(rank=rank, token=token, values=values if rank == 0 else None, tensors=_dealt(found, rank))


def _dealt(tensors: Mapping[str, Placed], rank: int) -> dict[str, Placed]:
    """The parts that this rank writes, of those that several hold: dealt out by bytes, largest first."""
    groups: dict[tuple[int, ...], list[tuple[str, Box, Tensor]]] = {}
    for pointer, placed in tensors.items():
        for box, part in placed.parts:
            groups.setdefault(placed.holders, []).append((pointer, box, part))
    mine: dict[str, list[Part]] = {}
    for holders, parts in groups.items():
        for pointer, box, part in _share(parts, holders, rank):
            mine.setdefault(pointer, []).append((box, part))
    return {
        pointer: Placed(tensors[pointer].shape, tensors[pointer].dtype, tuple(parts), ())
        for pointer, parts in mine.items()
    }


def _share(
    parts: Sequence[tuple[str, Box, Tensor]], holders: Sequence[int], rank: int
) -> Iterator[tuple[str, Box, Tensor]]:
    if len(holders) == 1:
        yield from parts if rank in holders else ()
        return
    distinct = {memory_of(part): part.nbytes for _, _, part in parts}  # tied tensors are written once
    fair = -(-sum(distinct.values()) // len(holders))
    split = [(pointer, *each) for pointer, box, part in parts for each in _rows(box, part, fair)]
    loads, writers = dict.fromkeys(holders, 0), dict[Any, int]()
    for pointer, box, part in sorted(split, key=lambda each: -each[2].nbytes):
        writer = writers.get(memory_of(part))
        if writer is None:
            writer = writers[memory_of(part)] = min(holders, key=loads.__getitem__)
            loads[writer] += part.nbytes
        if writer == rank:
            yield pointer, box, part


def memory_of(part: Tensor) -> tuple[Any, ...]:
    """The same for tensors that are one in memory. Some devices do not say where a tensor is: there each is its own."""
    return part.data_ptr() or id(part), part.dtype, tuple(part.shape), part.stride()


def _rows(box: Box, part: Tensor, fair_bytes: int) -> Iterator[Part]:
    """A part, in pieces of whole rows where it has more than a rank's fair share of bytes."""
    if part.nbytes <= fair_bytes or part.ndim == 0:
        yield box, part
        return
    step = max(1, fair_bytes * part.shape[0] // part.nbytes)
    for start in range(0, part.shape[0], step):
        rows = part[start : start + step]
        yield Box((box.offsets[0] + start, *box.offsets[1:]), tuple(rows.shape)), rows


def write(storage: Storage, plan: Plan, advance: Advance | None = None) -> None:
    """Write the bytes, and then the table of where they are."""
    layout = _Layout(plan)
    if plan.tensors:
        blocks = layout.blocks()
        storage.write(plan.file, blocks if advance is None else _told(blocks, _num_bytes(plan), advance))
    files = {plan.file: layout.file()} if plan.tensors else {}
    table = Table(files=files, tensors=layout.entries)
    content = {"values": plan.values, **table.to_json()}
    told = json.dumps(content, allow_nan=False).encode()
    storage.write(f"{plan.token}.{plan.rank}.json", [told], is_flushed=False)  # the manifest takes it up


@final
@dataclass(slots=True)
class _Layout:
    """The bytes of one rank's file, and what is said of them."""

    plan: Plan
    entries: dict[str, Entry] = field(default_factory=dict)
    num_bytes: int = 0
    checksums: list[int] = field(default_factory=list)
    running: int = 0
    written: dict[Any, int] = field(default_factory=dict)
    """Where the bytes of a tensor are, by its place in memory: tied tensors are written once."""

    def blocks(self) -> Iterator[memoryview]:
        for pointer, placed in self.plan.tensors.items():
            pieces = []
            for box, part in placed.parts:
                if memory_of(part) not in self.written:
                    yield from self._counted(memoryview(bytes(-self.num_bytes % ALIGNMENT_BYTES)))
                    self.written[memory_of(part)] = self.num_bytes
                    yield from self._counted(bytes_of(part))
                pieces.append(Piece(file=self.plan.file, offset_bytes=self.written[memory_of(part)], box=box))
            name = str(placed.dtype).removeprefix("torch.")
            self.entries[pointer] = Entry(dtype=name, shape=placed.shape, pieces=tuple(pieces))

    def file(self) -> File:
        ended = (self.running,) if self.num_bytes % CHUNK_BYTES else ()
        return File(num_bytes=self.num_bytes, checksums=(*self.checksums, *ended))

    def _counted(self, content: memoryview) -> Iterator[memoryview]:
        start = 0
        while start < content.nbytes:
            block = content[start : start + CHUNK_BYTES - self.num_bytes % CHUNK_BYTES]
            self.running = crc32(block, self.running)
            self.num_bytes += block.nbytes
            if self.num_bytes % CHUNK_BYTES == 0:
                self.checksums.append(self.running)
                self.running = 0
            start += block.nbytes
            yield block


def _told(blocks: Iterator[memoryview], total_bytes: int, advance: Advance) -> Iterator[memoryview]:
    """The blocks, each told once the next is asked for."""
    done = 0
    for block in blocks:
        yield block
        done += block.nbytes
        advance(done, total_bytes)


def _num_bytes(plan: Plan) -> int:
    return sum(part.nbytes for placed in plan.tensors.values() for _, part in placed.parts)


def _refuse_kind(tensor: Tensor, pointer: str) -> None:
    """Raise ValueError for a tensor whose elements are not all there, one after the other."""
    if tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_meta:
        return
    kind = "quantized" if tensor.is_quantized else "without values" if tensor.is_meta else str(tensor.layout)
    raise ValueError(f"The tensor at {pointer} is {kind}, and a checkpoint keeps dense tensors. Save its parts.")


def bytes_of(tensor: Tensor) -> memoryview:
    """The elements, row-major, as bytes. Copies only what is on a device, or not contiguous."""
    flat = tensor.detach().resolve_conj().resolve_neg().to("cpu").contiguous().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    return flat.view(torch.uint8).numpy().data


def finish(storage: Storage, token: str, num_ranks: int, after_commit: Callable[[], object] | None) -> None:
    """Commit what all ranks have written, and call what is to follow. On rank 0 alone."""
    commit(storage, [f"{token}.{rank}.json" for rank in range(num_ranks)])
    if after_commit is not None:
        try:
            after_commit()
        except Exception as error:
            raise CommittedError(_sentence(error)) from error


def commit(storage: Storage, tables: Sequence[str]) -> None:
    """Make what all ranks have written the checkpoint, and remove what it replaces. On rank 0 alone."""
    contents = []
    for rank, name in enumerate(tables):
        try:
            contents.append(json.loads(storage.read(name)))
        except FileNotFoundError as error:
            raise ValueError(
                f"Rank 0 does not find what rank {rank} has written: {storage.path!r} is on a disk of its own there. "
                "Save to a folder that all ranks share."
            ) from error
    table = merged([Table.of_json(content) for content in contents])
    refuse_gaps(table)
    manifest = Manifest(values=contents[0]["values"], table=table, num_ranks=len(tables)).to_bytes()
    try:
        storage.commit(NAME, manifest)
    except Exception as error:
        found: list[bytes] = []
        attempt(lambda: found.append(storage.read(NAME)))
        if found == [manifest]:  # the name is there, and a power cut may undo it
            raise CommittedError(_sentence(error)) from error
        raise
    attempt(partial(remove_leftovers, storage, table.files))  # what stays, the next save removes


class CommittedError(Exception):
    """Something failed once the checkpoint was complete: its files stay."""


def remove_leftovers(storage: Storage, keep: Mapping[str, Any]) -> None:
    """Remove what the manifest does not name: of a former checkpoint, or of a save that did not come to its end."""
    for name in storage.names():
        if name.split(".")[-1] in ("bin", "json", "new") and name not in keep and name != NAME:
            storage.remove(name)


def attempt(action: Callable[[], object]) -> Exception | None:
    """Run it; gives what it raised."""
    try:
        action()
    except Exception as error:
        return error
    return None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """What one rank could not do, as the others are told of it."""

    rank: int
    sentence: str
    is_committed: bool

    @classmethod
    def of(cls, problem: Exception, rank: int) -> Failure:
        """What the rank raised."""
        is_committed = isinstance(problem, CommittedError)
        return cls(rank=rank, sentence=str(problem) if is_committed else _sentence(problem), is_committed=is_committed)

    def error(self, storage: Storage) -> CheckpointError:
        """To be raised on every rank."""
        return CheckpointError(
            (_COMMITTED if self.is_committed else _UNWRITTEN).format(
                rank=self.rank, path=storage.path, why=self.sentence
            ),
            rank=self.rank,
        )

    def clean_up(self, storage: Storage, token: str, rank: int) -> None:
        """Remove what this rank has written in vain."""
        if not self.is_committed:
            attempt(partial(storage.remove, f"{token}.{rank}.bin"))
            attempt(partial(storage.remove, f"{token}.{rank}.json"))


def refuse_together(collective: Collective, storage: Storage, problem: Exception | None, token: str) -> None:
    """Raise on every rank where any has a problem. One small all-reduce where none has. Ranks: all."""
    if collective.reduce_boolean_decision(problem is None):
        return
    mine = None if problem is None else Failure.of(problem, collective.rank)
    failures: list[Failure | None] = collective.all_gather_object(mine)
    failure = next(each for each in failures if each is not None)
    failure.clean_up(storage, token, collective.rank)
    if isinstance(problem, TypeError):
        raise problem
    raise failure.error(storage) from problem


def _sentence(problem: Exception) -> str:
    return f"{type(problem).__name__}: {problem}"


_UNWRITTEN = "Rank {rank} could not write the checkpoint {path!r}: {why}. What was there before is untouched."
_COMMITTED = "The checkpoint {path!r} is complete, but on rank {rank} what was to follow failed: {why}."
