"""The safetensors format: the length of a JSON header in 8 bytes, the header, and the tensors' bytes.

Not by the library of that name, which takes all tensors of a file at once: here a file is written tensor by tensor, and
mapped and read in part by each rank. Source: https://github.com/huggingface/safetensors
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from fabric.strategies.checkpoint.manifest import Entry, Piece
from fabric.strategies.checkpoint.saving import bytes_of
from fabric.strategies.checkpoint.storage import Folder, buffer_of, replacing
from fabric.strategies.checkpoint.stored import Stored
from fabric.strategies.tensors.chunk import whole

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000
"""The limit of the library: it reads no file with a longer header."""

_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def read(path: Path) -> dict[str, Stored]:
    """The tensors of a file, or of all files that an index names. Only headers are read now.

    Includes the names of tied tensors that were omitted and are listed in the header.
    Raises: ValueError: a file is damaged, or is not safetensors.
    """
    if not path.name.endswith(INDEX_SUFFIX):
        tensors, metadata = _read_file(path)
        return _with_tied(tensors, metadata)
    chosen = weight_map(path)
    files = {name: _read_file(path.parent / name) for name in dict.fromkeys(chosen.values())}
    lost = [key for key, name in chosen.items() if key not in files[name][0]]
    if lost:
        raise ValueError(
            f"`{path.name}` names tensors that are missing in their files: {', '.join(map(repr, lost[:5]))}."
        )
    notes = {key: value for _, metadata in files.values() for key, value in metadata.items()}
    return _with_tied({key: files[name][0][key] for key, name in chosen.items()}, notes)


def write(path: Path, tensors: Mapping[str, Stored], metadata: Mapping[str, str]) -> None:
    """Write these tensors to a file, and replace an existing one once it is complete. Holds one tensor in memory.

    Raises: ValueError: the format does not have a tensor's dtype.
    """
    with replacing(path) as file:
        file.writelines(_blocks(tensors, metadata))


def num_bytes_of(stored: Stored) -> int:
    """Size of the whole tensor."""
    return math.prod(stored.shape) * stored.dtype.itemsize


def _blocks(tensors: Mapping[str, Stored], metadata: Mapping[str, str]) -> Iterator[bytes | memoryview]:
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    ordered = sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)  # so that each tensor is aligned
    start = 0
    for name in ordered:
        stored = tensors[name]
        if stored.dtype not in _NAMES:
            raise ValueError(
                f"`{name}` has the dtype {stored.dtype}, which safetensors does not support. Leave it out by `filter`."
            )
        stop = start + num_bytes_of(stored)
        header[name] = {"dtype": _NAMES[stored.dtype], "shape": list(stored.shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in ordered:
        yield bytes_of(tensors[name].whole())


def _read_file(path: Path) -> tuple[dict[str, Stored], dict[str, str]]:
    """The tensors, and the metadata in the header."""
    content = Folder(path.parent).open(path.name, path.stat().st_size)
    length = int.from_bytes(buffer_of(content[:8]), "little")
    if content.numel() < 8 or length > min(content.numel() - 8, MAX_HEADER_BYTES):
        raise ValueError(f"`{path.name}` is damaged, or is not a safetensors file: a header of {length} bytes.")
    try:
        header = json.loads(buffer_of(content[8 : 8 + length]).tobytes())
        metadata = dict(header.pop("__metadata__", None) or {})
        entries = {name: _entry(path.name, 8 + length, each) for name, each in header.items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"`{path.name}` is damaged, or is not a safetensors file: {error!r}.") from error
    tensors = {name: Stored(name, entry, lambda _: content) for name, entry in entries.items()}
    for name, stored in tensors.items():
        start, stop = header[name]["data_offsets"]
        if not 0 <= start <= stop <= content.numel() - 8 - length or stop - start != num_bytes_of(stored):
            raise ValueError(
                f"`{path.name}` is damaged: {name!r} is {stored.dtype} of shape {stored.shape}, but its bytes are "
                f"[{start}, {stop}) of {content.numel() - 8 - length}."
            )
    return tensors, metadata


def _entry(file: str, base_bytes: int, described: Mapping[str, Any]) -> Entry:
    if described["dtype"] not in _DTYPES:
        raise ValueError(f"unknown dtype {described['dtype']!r}")
    shape = tuple(map(int, described["shape"]))
    piece = Piece(file=file, offset_bytes=base_bytes + int(described["data_offsets"][0]), chunk=whole(shape))
    return Entry(dtype=str(_DTYPES[described["dtype"]]).removeprefix("torch."), shape=shape, pieces=(piece,))


def weight_map(index: Path) -> dict[str, str]:
    """The file name of each tensor. All files are in the folder of the index."""
    try:
        chosen = dict(json.loads(index.read_bytes())["weight_map"])
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"`{index.name}` is damaged, or is not an index of shards: {error!r}.") from error
    outside = [name for name in chosen.values() if not isinstance(name, str) or Path(name).name != name]
    if outside:
        raise ValueError(f"`{index.name}` names a file outside its folder: {outside[0]!r}.")
    return chosen


def _with_tied(tensors: dict[str, Stored], metadata: Mapping[str, str]) -> dict[str, Stored]:
    """Add tied tensors under their other names: the library lists each name that it omitted with the one it kept."""
    return {**{name: tensors[kept] for name, kept in metadata.items() if kept in tensors}, **tensors}
