"""The manifest of a checkpoint: its contents, where each piece of each tensor is stored, and checksums.

A checkpoint is complete if and only if its folder has a manifest. Files that the manifest does not name belong to a
save that was not completed. It is JSON, so that any program can read it, and contains a checksum of itself. The part of
each rank is written in the same format, next to its data.
"""

import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any, final

import torch
import xxhash

from fabric.strategies.tensors.chunk import Chunk, Shape, whole

NAME = "manifest.json"
FORMAT = f"torchfabric checkpoint, {sys.byteorder}-endian"
VERSION = 3
ALIGNMENT_BYTES = 64
"""Every piece starts at a multiple of this, so that its mapped bytes can be viewed as any dtype."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A chunk of a tensor, stored row-major in a file."""

    file: str
    offset_bytes: int
    chunk: Chunk
    checksum: str
    """The XXH3 (64 bits, hexadecimal) of its bytes."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A tensor and its pieces."""

    dtype: str
    shape: Shape
    pieces: tuple[Piece, ...]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Everything in a checkpoint except the bytes of tensors, or what one rank adds to that."""

    values: Any
    """The state as `values.encode` wrote it, with a placeholder for each tensor. None in the parts of ranks but 0."""
    tensors: Mapping[str, Entry]
    """By JSON pointer."""

    def to_bytes(self) -> bytes:
        """The contents of the file."""
        content = {
            "made_by": {"torchfabric": version("torchfabric"), "torch": str(torch.__version__)},
            "values": self.values,
            "tensors": {
                pointer: {
                    "dtype": entry.dtype,
                    "shape": entry.shape,
                    "pieces": [
                        [p.file, p.offset_bytes, p.chunk.offsets, p.chunk.shape, p.checksum] for p in entry.pieces
                    ],
                }
                for pointer, entry in self.tensors.items()
            },
        }
        checksum = xxhash.xxh3_64_hexdigest(_text(content))
        return _text({"format": FORMAT, "version": VERSION, "xxh3_64": checksum, "content": content}) + b"\n"

    @classmethod
    def of_bytes(cls, content: bytes) -> "Manifest":
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
        tensors = {
            pointer: Entry(
                dtype=each["dtype"],
                shape=tuple(each["shape"]),
                pieces=tuple(
                    Piece(file=file, offset_bytes=start, chunk=Chunk(tuple(offsets), tuple(shape)), checksum=checksum)
                    for file, start, offsets, shape, checksum in each["pieces"]
                ),
            )
            for pointer, each in inner["tensors"].items()
        }
        return cls(values=inner["values"], tensors=tensors)


def merged(parts: Iterable[Manifest]) -> dict[str, Entry]:
    """The tensors of all ranks. Raises: ValueError: a tensor is not covered, because ranks saved different names."""
    found: dict[str, Entry] = {}
    for part in parts:
        for pointer, entry in part.tensors.items():
            known = found[pointer].pieces if pointer in found else ()
            pieces = {piece.chunk: piece for piece in (*known, *entry.pieces)}  # ranks may have written replicas
            found[pointer] = replace(entry, pieces=tuple(pieces.values()))
    for pointer, entry in found.items():
        num_elements = sum(piece.chunk.numel for piece in entry.pieces)
        if num_elements != whole(entry.shape).numel:
            raise ValueError(
                f"The ranks hold {num_elements} of the {whole(entry.shape).numel} elements of the tensor at {pointer}. "
                "Save it under the same name on every rank."
            )
    return found


def _text(content: Any) -> bytes:
    return json.dumps(content, separators=(",", ":"), allow_nan=False).encode()
