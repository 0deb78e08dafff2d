"""Save: plan, write, commit. Every rank writes its part of the tensors; rank 0 then completes the checkpoint.

Existing files are untouched until all new files are on disk: those have unique names, and the manifest is replaced
last, atomically. An interrupted save leaves the previous checkpoint, and files that the next save to the same path
removes.

Note [The manifest is put together through the storage]
Each rank writes its part of the manifest next to its data, and rank 0 reads the parts: they grow with the model, and
would otherwise be sent to all ranks. The ranks communicate only a token and two decisions. If rank 0 does not find the
files of a rank, that rank wrote to another disk, which is an error.
"""

import re
import secrets
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
import xxhash
from torch import Tensor, nn

from fabric.strategies.checkpoint.errors import CheckpointError, CommittedError, attempt, raised_together, sentence_of
from fabric.strategies.checkpoint.manifest import ALIGNMENT_BYTES, NAME, Entry, Manifest, Piece, merged
from fabric.strategies.checkpoint.storage import Storage, buffer_of
from fabric.strategies.checkpoint.tensors import TensorShards, memory_of, replicated
from fabric.strategies.checkpoint.values import Json, encode
from fabric.strategies.collectives.collective import Collective
from fabric.strategies.tensors.chunk import Chunk


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
