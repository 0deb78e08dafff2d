"""The manifest of a checkpoint: its contents, where each piece of each tensor is stored, and checksums.

A checkpoint is complete if and only if its folder has a manifest. Files that the manifest does not name belong to a
save that was not completed. It is JSON, so that any program can read it, and contains a checksum of itself.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any, final

import torch
import xxhash

from fabric.strategies.tensors.chunk import Chunk, Shape

NAME = "manifest.json"
FORMAT = "torchfabric checkpoint"
VERSION = 2
BLOCK_BYTES = 4 * 2**20
"""Each checksum covers a block of this many bytes of a file, so that a reader verifies only the parts it needs."""
ALIGNMENT_BYTES = 64
"""Every piece starts at a multiple of this, so that its mapped bytes can be viewed as any dtype."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """A file with the bytes that one rank wrote."""

    num_bytes: int
    checksums: tuple[str, ...]
    """The XXH3 (64 bits, hexadecimal) of each block."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A chunk of a tensor, stored row-major in a file."""

    file: str
    offset_bytes: int
    chunk: Chunk


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A tensor and its pieces."""

    dtype: str
    shape: Shape
    pieces: tuple[Piece, ...]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Files, and the tensors in them by JSON pointer: those of one rank, or of all ranks."""

    files: Mapping[str, File]
    tensors: Mapping[str, Entry]

    def to_json(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "files": {name: asdict(file) for name, file in self.files.items()},
            "tensors": {
                pointer: {
                    "dtype": entry.dtype,
                    "shape": entry.shape,
                    "pieces": [[p.file, p.offset_bytes, p.chunk.offsets, p.chunk.shape] for p in entry.pieces],
                }
                for pointer, entry in self.tensors.items()
            },
        }

    @classmethod
    def of_json(cls, content: Mapping[str, Any]) -> Table:
        """From the result of `to_json`."""
        return cls(
            files={
                name: File(num_bytes=each["num_bytes"], checksums=tuple(each["checksums"]))
                for name, each in content["files"].items()
            },
            tensors={
                pointer: Entry(
                    dtype=each["dtype"],
                    shape=tuple(each["shape"]),
                    pieces=tuple(
                        Piece(file=file, offset_bytes=offset, chunk=Chunk(tuple(offsets), tuple(shape)))
                        for file, offset, offsets, shape in each["pieces"]
                    ),
                )
                for pointer, each in content["tensors"].items()
            },
        )


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Everything in a checkpoint except the bytes of tensors."""

    values: Any
    """The state as `values.encode` wrote it, with a placeholder for each tensor."""
    table: Table
    num_ranks: int
    """The number of ranks that wrote it."""

    def to_bytes(self) -> bytes:
        """The contents of the file."""
        content = {
            "made_by": {"torchfabric": version("torchfabric"), "torch": str(torch.__version__)},
            "byteorder": sys.byteorder,
            "num_ranks": self.num_ranks,
            "values": self.values,
            **self.table.to_json(),
        }
        text = _text(content)
        return (
            _text({"format": FORMAT, "version": VERSION, "xxh3_64": xxhash.xxh3_64_hexdigest(text), "content": content})
            + b"\n"
        )

    @classmethod
    def of_bytes(cls, content: bytes) -> Manifest:
        """From the contents of the file.

        Raises: ValueError: it is not a manifest, is damaged, or is of another version or byte order.
        """
        try:
            outer = json.loads(content)
            kind, number, found, inner = (outer[name] for name in ("format", "version", "xxh3_64", "content"))
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"`{NAME}` is damaged, or is not the manifest of a checkpoint: {error!r}.") from error
        if kind != FORMAT or number != VERSION:
            raise ValueError(
                f"`{NAME}` has the format {kind!r}, version {number!r}, but this release of torchfabric reads "
                f"{FORMAT!r}, version {VERSION}. Use the release that wrote it."
            )
        if xxhash.xxh3_64_hexdigest(_text(inner)) != found:
            raise ValueError(f"`{NAME}` is damaged: its checksum is not {found}.")
        if inner["byteorder"] != sys.byteorder:
            raise ValueError(
                f"The checkpoint was written on a {inner['byteorder']}-endian machine, and this one is "
                f"{sys.byteorder}-endian. Read it on one like the former."
            )
        return cls(values=inner["values"], table=Table.of_json(inner), num_ranks=inner["num_ranks"])


def merged(tables: list[Table]) -> Table:
    """The tables of all ranks as one."""
    files: dict[str, File] = {}
    tensors: dict[str, Entry] = {}
    for table in tables:
        files.update(table.files)
        for pointer, entry in table.tensors.items():
            known = tensors.get(pointer)
            if known is not None:
                if (known.dtype, known.shape) != (entry.dtype, entry.shape):
                    raise ValueError(
                        f"Ranks have different tensors at {pointer}: {known.dtype} of shape {known.shape}, and "
                        f"{entry.dtype} of shape {entry.shape}. Save the same state on every rank."
                    )
                chunks = {piece.chunk for piece in known.pieces}  # several ranks may have written replicas
                new = tuple(piece for piece in entry.pieces if piece.chunk not in chunks)
                entry = Entry(dtype=entry.dtype, shape=entry.shape, pieces=known.pieces + new)
            tensors[pointer] = entry
    return Table(files=files, tensors=tensors)


def refuse_gaps(table: Table) -> None:
    """Raise ValueError if the pieces of a tensor do not cover it, because ranks saved different names."""
    for pointer, entry in table.tensors.items():
        numel = torch.Size(entry.shape).numel()
        found = sum(piece.chunk.numel for piece in entry.pieces)
        if found != numel:
            raise ValueError(
                f"The ranks hold {found} of the {numel} elements of the tensor at {pointer}. Save it under the same "
                "name on every rank."
            )


def _text(content: Any) -> bytes:
    return json.dumps(content, separators=(",", ":"), allow_nan=False).encode()
