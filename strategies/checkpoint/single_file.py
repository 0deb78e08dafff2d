"""A checkpoint as one file of `torch.save`: rank 0 writes it, every rank can read it.

The file appears only when it is complete: it is written under another name, flushed to disk, and renamed. An error on
one rank is raised on all. Reading runs no code from the file.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from fabric.strategies.checkpoint.errors import CheckpointError, sentence_of
from fabric.strategies.checkpoint.loading import refuse_unread
from fabric.strategies.checkpoint.safetensors import weight_map
from fabric.strategies.checkpoint.saving import attempt
from fabric.strategies.checkpoint.storage import local_path, replacing, storage_of
from fabric.strategies.collectives.collective import Collective
from fabric.strategies.tensors.nests import tensors_in

INDEX_SUFFIX = ".bin.index.json"
"""The suffix of an index that older releases of `transformers` write next to shards of `torch.save`."""


def save(collective: Collective, path: str | os.PathLike[str], state: Any) -> None:
    """Write `state` to `path`, replacing an existing file once the new one is complete.

    Ranks: all call it; the state of rank 0 is written. It returns on all once the file is complete.
    Raises: CheckpointError: on every rank, if rank 0 could not write it.
    """

    def write() -> None:
        with replacing(local_path(path)) as file:
            torch.save(state, file)

    error = attempt(write) if collective.rank == 0 else None
    sentence = collective.broadcast_object(None if error is None else sentence_of(error))
    if sentence is not None:
        message = (
            f"Rank 0 could not write the checkpoint {str(path)!r}: {sentence}. What was there before is untouched."
        )
        raise CheckpointError(message, rank=0) from error


def load(collective: Collective, path: str | os.PathLike[str]) -> Any:
    """Read a file of `torch.save`, or all that an index names, as CPU tensors and plain containers.

    Ranks: all call it, and all read the file. Raises: CheckpointError: on every rank, if any rank could not read it.
    """
    content: list[Any] = []

    def read() -> None:
        content.append(_read(local_path(path)))
        _refuse_shards(content[0])

    refuse_unread(collective, storage_of(path), attempt(read))
    return content[0]


def _read(path: Path) -> Any:
    if not path.name.endswith(INDEX_SUFFIX):
        return _unpickled(path)
    content: dict[str, Any] = {}
    chosen = weight_map(path)
    for name in dict.fromkeys(chosen.values()):
        shard = _unpickled(path.parent / name)
        lost = [key for key, file in chosen.items() if file == name and key not in shard]
        if lost:
            raise ValueError(
                f"`{path.name}` names tensors that are missing in `{name}`: {', '.join(map(repr, lost[:5]))}."
            )
        content |= {key: shard[key] for key, file in chosen.items() if file == name}
    return content


def _unpickled(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as problem:
        # Neither chained nor quoted: torch's message tells how to run the file's code.
        raise ValueError(_REFUSED.format(name=path.name, kind=type(problem).__name__)) from None


def _refuse_shards(content: Any) -> None:
    """Raise ValueError for a file with the shards of one rank: every rank would load them as its own."""
    for tensor in tensors_in(content):
        if type(tensor).__name__ == "DTensor":
            raise ValueError(_SHARDS.format(shape=tuple(tensor.shape)))


_SHARDS = (
    "The file has a DTensor of shape {shape}: it contains only the shard of the rank that wrote it. Where the file was "
    "made, call `fabric.save(path, {{'model': model}})` on all ranks, then `fabric.consolidate`."
)
_REFUSED = (
    "`{name}` is damaged, `torch.save` did not write it, or reading it would run code from the file, which is refused "
    "({kind}). Pass the folder of `fabric.save`, a file named `*.safetensors`, or a file of `torch.save` with tensors, "
    "numbers, strings, lists and dictionaries alone, such as `module.state_dict()`."
)
