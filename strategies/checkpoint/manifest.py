"""The manifest of a checkpoint: what is in it, where each piece of each tensor lies, and the checksums.

A checkpoint is complete exactly if its folder has a manifest. Files that it does not name belong to a save that did not
come to its end. JSON, so that anything can read it; its own checksum tells a damaged one.
"""

from __future__ import annotations

import json
import sys
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, final

import torch

from fabric.strategies.checkpoint.box import Box, Shape

NAME = "manifest.json"
FORMAT = "torchfabric checkpoint"
VERSION = 1
CHUNK_BYTES = 4 * 2**20
"""Each checksum is that of so many bytes of a file: whoever needs a part of a file verifies that part."""
ALIGNMENT_BYTES = 64
"""Every piece begins at a multiple, so that its bytes can be used as numbers where they are mapped."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """The bytes that one rank has written."""

    num_bytes: int
    checksums: tuple[int, ...]
    """The CRC-32 of each `CHUNK_BYTES`."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Some elements of a tensor, row-major, in a file."""

    file: str
    offset_bytes: int
    box: Box


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A tensor."""

    dtype: str
    shape: Shape
    pieces: tuple[Piece, ...]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Files, and the tensors in them by their JSON pointers: those of one rank, or all."""

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
                    "pieces": [[p.file, p.offset_bytes, p.box.offsets, p.box.shape] for p in entry.pieces],
                }
                for pointer, entry in self.tensors.items()
            },
        }

    @classmethod
    def of_json(cls, content: Mapping[str, Any]) -> Table:
        """What `to_json` gave."""
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
                        Piece(file=file, offset_bytes=offset, box=Box(tuple(offsets), tuple(shape)))
                        for file, offset, offsets, shape in each["pieces"]
                    ),
                )
                for pointer, each in content["tensors"].items()
            },
        )


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """All of a checkpoint but the tensors' bytes."""

    values: Any
    """The state as `values.encode` wrote it, each tensor replaced by a mark."""
    table: Table
    num_ranks: int
    """How many have written it."""

    def to_bytes(self) -> bytes:
        """The file."""
        content = {
            "made_by": {"torchfabric": _installed(), "torch": str(torch.__version__)},
            "byteorder": sys.byteorder,
            "num_ranks": self.num_ranks,
            "values": self.values,
            **self.table.to_json(),
        }
        text = _text(content)
        return _text({"format": FORMAT, "version": VERSION, "crc32": zlib.crc32(text), "content": content}) + b"\n"

    @classmethod
    def of_bytes(cls, content: bytes) -> Manifest:
        """What `to_bytes` gave.

        Raises: ValueError: it is none, is damaged, or is of a release or a machine that this one cannot read.
        """
        try:
            outer = json.loads(content)
            kind, number, found, inner = (outer[name] for name in ("format", "version", "crc32", "content"))
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"`{NAME}` is damaged, or no manifest of a checkpoint: {error!r}.") from error
        if kind != FORMAT or number != VERSION:
            raise ValueError(
                f"`{NAME}` says {kind!r}, version {number!r}, and this release of torchfabric reads {FORMAT!r}, "
                f"version {VERSION}."
            )
        if zlib.crc32(_text(inner)) != found:
            raise ValueError(f"`{NAME}` is damaged: its checksum is not {found}.")
        if inner["byteorder"] != sys.byteorder:
            raise ValueError(f"It was written on a {inner['byteorder']}-endian machine, and this is {sys.byteorder}.")
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
                        f"{entry.dtype} of shape {entry.shape}."
                    )
                boxes = {piece.box for piece in known.pieces}  # ranks that knew nothing of each other wrote copies
                new = tuple(piece for piece in entry.pieces if piece.box not in boxes)
                entry = Entry(dtype=entry.dtype, shape=entry.shape, pieces=known.pieces + new)
            tensors[pointer] = entry
    return Table(files=files, tensors=tensors)


def refuse_gaps(table: Table) -> None:
    """Raise ValueError where the pieces of a tensor are not all of it: a rank had other names than the rest."""
    for pointer, entry in table.tensors.items():
        numel = torch.Size(entry.shape).numel()
        found = sum(piece.box.numel for piece in entry.pieces)
        if found != numel:
            raise ValueError(f"The ranks hold {found} of the {numel} elements of the tensor at {pointer}.")


def _text(content: Any) -> bytes:
    return json.dumps(content, separators=(",", ":"), allow_nan=False).encode()


def _installed() -> str:
    try:
        return version("torchfabric")
    except PackageNotFoundError:
        return "unknown"
