"""Load: the manifest once, then of each tensor what this rank needs, straight from where the file is mapped.

Every byte is verified before any object is changed, each rank a share of them.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Hashable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from fabric.strategies.checkpoint.box import Box, Shape, whole
from fabric.strategies.checkpoint.checksum import crc32
from fabric.strategies.checkpoint.errors import CheckpointError
from fabric.strategies.checkpoint.manifest import CHUNK_BYTES, NAME, Entry, Manifest, Piece, Table
from fabric.strategies.checkpoint.saving import Advance, attempt
from fabric.strategies.checkpoint.storage import Storage, storage_of
from fabric.strategies.checkpoint.values import DTYPES, decode, keys_of
from fabric.strategies.collectives.collective import Collective


@final
class Stored:
    """A tensor in a checkpoint. Nothing is read before it is asked for."""

    def __init__(self, pointer: str, entry: Entry, bytes_of_file: Callable[[str], Tensor]) -> None:
        self.pointer = pointer
        self.shape: Shape = entry.shape
        self.dtype = DTYPES[entry.dtype]
        self._pieces = entry.pieces
        self._bytes_of_file = bytes_of_file

    @property
    def like(self) -> Tensor:
        """The tensor without its values, on the device "meta"."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")

    @property
    def place(self) -> Hashable:
        """Where its bytes are: the same for tied tensors, which were saved once."""
        pieces = frozenset(each for each in self._pieces if each.box.numel)
        return (self.shape, self.dtype, pieces) if pieces else self.pointer

    def whole(self) -> Tensor:
        """All of it, in memory of its own or mapped: to be copied from."""
        return self.part(whole(self.shape))

    def part(self, box: Box) -> Tensor:
        """The elements of a box: mapped where one piece has them all, otherwise put together. To be copied from."""
        covering = next((piece for piece in self._pieces if piece.box.intersection(box) == box), None)
        if covering is not None:
            return self._elements(covering)[box.slices_in(covering.box)]
        made = torch.empty(box.shape, dtype=self.dtype)
        self.copy_to(made, box)
        return made

    def copy_to(self, target: Tensor, box: Box) -> None:
        """Fill `target` with the elements of a box, straight from where the file is mapped."""
        with torch.no_grad():
            for piece in self._pieces:
                shared = piece.box.intersection(box)
                if shared is not None:
                    target[shared.slices_in(box)].copy_(self._elements(piece)[shared.slices_in(piece.box)])

    def _elements(self, piece: Piece) -> Tensor:
        num_bytes = piece.box.numel * self.dtype.itemsize
        content = self._bytes_of_file(piece.file)[piece.offset_bytes : piece.offset_bytes + num_bytes]
        if piece.offset_bytes % self.dtype.itemsize:  # in a file of others: what is not aligned cannot be used in place
            content = content.clone()
        return content.view(self.dtype).view(piece.box.shape)


def in_memory(content: Any, *, mapped: bool = False) -> Any:
    """A nest with each `Stored` read, whole: into memory of its own, or (`mapped`) to be copied from and forgotten.

    A single number is in memory of its own in any case: optimizers keep the step that they load.
    """
    if isinstance(content, Stored):
        return content.whole() if mapped and math.prod(content.shape) > 1 else content.whole().clone()
    if isinstance(content, dict):
        read = copy(content)  # of its own class, and with its attributes: torch notes versions on a module's state
        for key, entry in content.items():
            read[key] = in_memory(entry, mapped=mapped)
        return read
    if type(content) in (list, tuple):
        return type(content)(in_memory(entry, mapped=mapped) for entry in content)
    return content


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A complete checkpoint, open for reading."""

    storage: Storage
    manifest: Manifest
    bytes_of_file: Callable[[str], Tensor]
    """Each file is mapped, or read, once."""

    @classmethod
    def open(cls, storage: Storage, content: bytes | None = None) -> Checkpoint:
        """The checkpoint of this folder; `content`: its manifest, if it was read already.

        Raises: FileNotFoundError: there is none. ValueError: its manifest cannot be read.
        """
        manifest = Manifest.of_bytes(storage.read(NAME) if content is None else content)
        files = manifest.table.files
        bytes_of_file = cache(lambda name: storage.tensor(name, files[name].num_bytes))
        return cls(storage=storage, manifest=manifest, bytes_of_file=bytes_of_file)

    def content(self) -> Any:
        """What was saved, with a `Stored` for each tensor."""
        stored = {
            pointer: Stored(pointer, entry, self.bytes_of_file)
            for pointer, entry in self.manifest.table.tensors.items()
        }
        found = decode(self.manifest.values, stored.pop)
        for pointer, tensor in stored.items():  # those that rank 0 did not have
            _insert(found, keys_of(pointer), tensor)
        return found

    def verify(
        self,
        names: Iterable[str] | None = None,
        *,
        share: int = 0,
        num_shares: int = 1,
        advance: Advance | None = None,
    ) -> None:
        """Compare the bytes of every tensor with their checksums, or of those within the outermost entries `names`.

        `share`, of `num_shares`: which part of the work. Raises: ValueError: names the first tensor that is damaged.
        """
        chunks = sorted(_chunks_of(self.manifest.table, None if names is None else set(names)))[share::num_shares]
        files = self.manifest.table.files
        tensors = {name: self.bytes_of_file(name) for name in {name for name, _ in chunks}}

        def is_damaged(chunk: tuple[str, int]) -> bool:
            name, number = chunk
            content = tensors[name][number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES]
            return crc32(content.numpy().data) != files[name].checksums[number]

        with ThreadPoolExecutor(torch.get_num_threads()) as threads:  # the launcher divides the cores among the ranks
            for done, (chunk, damaged) in enumerate(zip(chunks, threads.map(is_damaged, chunks), strict=True), 1):
                if advance is not None:
                    advance(done * CHUNK_BYTES, len(chunks) * CHUNK_BYTES)
                if damaged:
                    raise ValueError(_DAMAGED.format(tensors=", ".join(_tensors_in(self.manifest.table, *chunk))))


def read_checkpoint(path: str | os.PathLike[str], names: Iterable[str] | None = None) -> Any:
    """What `fabric.save` wrote, as whole tensors on the CPU and plain containers: in one process, without a `Fabric`.

    `names`: the outermost entries wanted; None: all. Runs no code from the files.
    Raises: CheckpointError: there is no complete checkpoint, or its bytes are damaged.
    """
    with reading(path) as storage:
        checkpoint = Checkpoint.open(storage)
        checkpoint.verify(names)
        found = checkpoint.content()
        return in_memory({name: found[name] for name in (found if names is None else names)})


@contextlib.contextmanager
def reading(path: str | os.PathLike[str]) -> Iterator[Storage]:
    """Within it, whatever goes wrong in one process is a CheckpointError that says what is at `path`."""
    storage = storage_of(path)
    try:
        yield storage
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointError(_UNREAD.format(rank=0, path=storage.path, why=_what_is_there(storage)), rank=0) from error
    except Exception as error:
        raise CheckpointError(_UNREAD.format(rank=0, path=storage.path, why=_sentence(error)), rank=0) from error


def load(
    collective: Collective,
    storage: Storage,
    names: Iterable[str] | None = None,
    advance: Advance | None = None,
) -> Any:
    """What `save` has made, with a `Stored` for each tensor, once the bytes within `names` (None: all) are verified.

    Ranks: all call it. Raises: CheckpointError: on every rank, if a rank could not read it, or found it damaged.
    """
    content = _manifest_of(collective, storage)
    opened: list[Checkpoint] = []

    def open_and_verify() -> None:
        opened.append(Checkpoint.open(storage, content))
        opened[0].verify(names, share=collective.rank, num_shares=collective.size, advance=advance)

    refuse_unread(collective, storage, attempt(open_and_verify))
    return opened[0].content()


def refuse_unread(collective: Collective, storage: Storage, problem: Exception | None) -> None:
    """Raise on every rank where any has a problem. One small all-reduce where none has. Ranks: all."""
    if collective.reduce_boolean_decision(problem is None):
        return
    sentences = collective.all_gather_object(None if problem is None else _sentence(problem))
    rank, sentence = next((rank, each) for rank, each in enumerate(sentences) if each is not None)
    raise CheckpointError(_UNREAD.format(rank=rank, path=storage.path, why=sentence), rank=rank) from problem


def _sentence(problem: Exception) -> str:
    return f"{type(problem).__name__}: {problem}"


def _manifest_of(collective: Collective, storage: Storage) -> bytes:
    """Read once, so that all ranks read the same checkpoint whatever is saved meanwhile."""
    read: list[bytes] = []
    problem = attempt(lambda: read.append(storage.read(NAME))) if collective.rank == 0 else None
    if isinstance(problem, (FileNotFoundError, NotADirectoryError)):
        problem = FileNotFoundError(_what_is_there(storage))
    refuse_unread(collective, storage, problem)
    content: bytes = collective.broadcast_object(read[0] if read else None)
    return content


def _what_is_there(storage: Storage) -> str:
    if Path(storage.path).is_file():
        return (
            "It is a file, and a checkpoint is a folder. `fabric.load_raw(path, module)` reads a file of `torch.save` "
            "or safetensors."
        )
    names = storage.names()
    if ".metadata" in names:
        return (
            "The folder is a checkpoint of `torch.distributed.checkpoint`, which describes itself by a pickle. If you "
            "trust where it comes from, `python -m torch.distributed.checkpoint.format_utils dcp_to_torch "
            f"{storage.path} FILE` makes a file that `fabric.load_raw(FILE, module)` reads."
        )
    if names:
        return f"The folder has no `{NAME}`: the save did not come to its end. Load another checkpoint."
    return "There is no such folder."


def _chunks_of(table: Table, names: set[str] | None) -> set[tuple[str, int]]:
    found = set()
    for pointer, entry in table.tensors.items():
        if names is None or keys_of(pointer)[0] in names:
            for piece in entry.pieces:
                num_bytes = piece.box.numel * DTYPES[entry.dtype].itemsize
                last = (piece.offset_bytes + max(num_bytes, 1) - 1) // CHUNK_BYTES
                if num_bytes:
                    found |= {(piece.file, number) for number in range(piece.offset_bytes // CHUNK_BYTES, last + 1)}
    return found


def _tensors_in(table: Table, file: str, number: int) -> list[str]:
    """The tensors that have bytes in a chunk."""
    return [
        pointer
        for pointer, entry in table.tensors.items()
        if any((file, number) in _chunks_of(_only(pointer, entry, piece), None) for piece in entry.pieces)
    ]


def _only(pointer: str, entry: Entry, piece: Piece) -> Table:
    return Table(files={}, tensors={pointer: Entry(dtype=entry.dtype, shape=entry.shape, pieces=(piece,))})


def _insert(found: Any, keys: list[str], tensor: Stored) -> None:
    for key in keys[:-1]:
        found = found.setdefault(key, {})
    found[keys[-1]] = tensor


_UNREAD = "Rank {rank} could not read the checkpoint {path!r}: {why}"
_DAMAGED = (
    "the bytes on disk are not those that were written (their checksum differs), in or beside {tensors}. Load another "
    "checkpoint."
)
