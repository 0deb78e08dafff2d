"""Load: read the manifest once, then copy what this rank needs of each tensor from memory-mapped files.

All bytes are verified before any object is changed; each rank verifies a share of them.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, reduce
from typing import Any, final

import torch
import xxhash
from torch import Tensor

from fabric.strategies.checkpoint.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    failure,
    raised_together,
    read_by_rank_zero,
)
from fabric.strategies.checkpoint.manifest import NAME, Manifest, Piece
from fabric.strategies.checkpoint.storage import Storage, buffer_of, local_path, storage_of
from fabric.strategies.checkpoint.tensors import Stored, in_memory
from fabric.strategies.checkpoint.values import DTYPES, decode, keys_of
from fabric.strategies.checkpoint.write_and_commit import is_written_by_save
from fabric.strategies.collectives.collective import Collective


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A complete checkpoint, open for reading."""

    manifest: Manifest
    open_file: Callable[[str], Tensor]
    """Opens each file once."""

    @classmethod
    def open(cls, storage: Storage, content: bytes | None = None) -> "Checkpoint":
        """The checkpoint in this folder; `content`: the bytes of its manifest, if they were read already.

        Raises: CheckpointError: there is no manifest. ValueError: the manifest is damaged.
        """
        manifest = Manifest.of_bytes(_manifest_of(storage) if content is None else content)
        return cls(manifest=manifest, open_file=cache(storage.open))

    def content(self) -> Any:
        """The state that was saved, with a `Stored` for each tensor."""
        tensors = self.manifest.tensors.items()
        stored = {pointer: Stored(pointer, entry, self.open_file) for pointer, entry in tensors}
        found = decode(self.manifest.values, stored.pop)
        for pointer, tensor in stored.items():  # those that rank 0 did not have
            *outer, name = keys_of(pointer)
            reduce(lambda entries, key: entries.setdefault(key, {}), outer, found)[name] = tensor
        return found

    def verify(self, names: Iterable[str] | None = None, *, share: int = 0, num_shares: int = 1) -> None:
        """Compare bytes with their checksums: of all tensors, or of those within the outermost entries `names`.

        `share`, of `num_shares`: the part of the bytes to verify, in the order of the files. A rank that reads the
        shards it has saved verifies about the same bytes, so that its machine transfers them once.
        Raises: ValueError: names the damaged tensor.
        """
        found: dict[tuple[int, str, int], tuple[str, Piece, int]] = {}
        for pointer, entry in self.manifest.tensors.items():
            for piece in entry.pieces if names is None or keys_of(pointer)[0] in names else ():
                num_bytes = piece.chunk.numel * DTYPES[entry.dtype].itemsize
                if num_bytes:  # tied tensors once; longer file names are those of later ranks
                    found[len(piece.file), piece.file, piece.offset_bytes] = pointer, piece, num_bytes
        total_bytes, start = sum(num_bytes for *_, num_bytes in found.values()), 0
        own: list[tuple[str, Piece, int]] = []
        for _, each in sorted(found.items()):
            if start * num_shares // total_bytes == share:
                own.append(each)
            start += each[2]
        opened = {name: self.open_file(name) for name in {piece.file for _, piece, _ in own}}

        def is_damaged(each: tuple[str, Piece, int]) -> bool:
            _, piece, num_bytes = each
            content = opened[piece.file][piece.offset_bytes : piece.offset_bytes + num_bytes]
            return xxhash.xxh3_64_hexdigest(buffer_of(content)) != piece.checksum

        # The launcher divides the cores among the ranks.
        with ThreadPoolExecutor(torch.get_num_threads()) as threads:
            for (pointer, *_), damaged in zip(own, threads.map(is_damaged, own), strict=True):
                if damaged:
                    raise ValueError(
                        "the bytes on disk are not those that were written (checksum mismatch), in "
                        f"{pointer}. Load another checkpoint."
                    )


def read_checkpoint(path: str | os.PathLike[str], names: Iterable[str] | None = None) -> Any:
    """The state that `fabric.save` wrote, as whole CPU tensors and plain containers. One process, without a `Fabric`.

    `names`: the outermost entries to read; None: all. Runs no code from the files.
    Raises: CheckpointError: there is no complete checkpoint, or its bytes are damaged.
    """
    with reading(path) as storage:
        checkpoint = Checkpoint.open(storage)
        checkpoint.verify(names)
        found = checkpoint.content()
        return in_memory({name: found[name] for name in (found if names is None else names)})


@contextmanager
def reading(path: str | os.PathLike[str]) -> Iterator[Storage]:
    """Convert any error within the context to a CheckpointError that describes what is at `path`. One process."""
    storage = storage_of(path)
    try:
        yield storage
    except Exception as error:
        raise failure(error, "read", storage.path, 0) from error


def load(collective: Collective, storage: Storage) -> Any:
    """The state that was saved, with a `Stored` for each tensor, after verifying its bytes.

    Ranks: all call it. Raises: CheckpointError: on every rank, if a rank could not read it, or found it damaged.
    """
    # Read once, so that all ranks load the same checkpoint even if another is saved.
    content = read_by_rank_zero(collective, storage.path, lambda: _manifest_of(storage))
    with raised_together(collective, "read", storage.path):
        checkpoint = Checkpoint.open(storage, content)
        checkpoint.verify(share=collective.rank, num_shares=collective.size)
    return checkpoint.content()


def _manifest_of(storage: Storage) -> bytes:
    """The bytes of the manifest. Raises: CheckpointError: there is none; says what there is."""
    try:
        return storage.read(NAME)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise _no_manifest(storage) from error


def _no_manifest(storage: Storage) -> CheckpointError:
    if local_path(storage.path).is_file():
        return CheckpointError(
            "It is a file, and a checkpoint is a folder. `fabric.load_raw(path, module)` reads the file of one module."
        )
    names, folders = storage.names(), sorted(storage.folders())
    if ".metadata" in names:
        return CheckpointError(
            "It is a checkpoint of `torch.distributed.checkpoint`, whose metadata is a pickle. If you trust its "
            f"source, `python -m torch.distributed.checkpoint.format_utils dcp_to_torch {storage.path} FILE` writes a "
            "file that `fabric.load_raw(FILE, module)` reads."
        )
    if any(is_written_by_save(name) for name in names):
        return CheckpointError(f"The folder has no `{NAME}`: the save was not completed. Load another checkpoint.")
    if names or folders:
        found = ", ".join(map(repr, (sorted(names) or folders)[-10:]))
        return CheckpointError(
            f"The folder has no `{NAME}`, but {found}. Load a folder that `fabric.save` wrote, the newest of a "
            "`CheckpointDirectory(path)`, or the file of one module by `fabric.load_raw(path, module)`."
        )
    return CheckpointNotFoundError("There is no such folder, or it is empty. Pass the folder that `fabric.save` wrote.")
