"""A checkpoint as one file: rank zero writes it, every rank can read it.

The file is complete or it is not there: it is written beside its place, forced to disk, and renamed. Whatever fails,
on whichever rank, fails on all of them. Reading runs no code from the file.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fabric.strategies.checkpoint.errors import CheckpointError
from fabric.strategies.checkpoint.safetensors import weight_map
from fabric.strategies.collectives.collective import Collective

INDEX_SUFFIX = ".bin.index.json"
"""Of an index as older releases of `transformers` write it beside files of `torch.save`."""


def save(collective: Collective, path: str | os.PathLike[str], state: Any) -> None:
    """Write `state` to `path`, replacing what was there only once the new file is whole.

    Ranks: all call it, each with the state it has; rank 0's is written. It returns on all once the file is in place.
    Raises: CheckpointError: on every rank, if rank 0 could not write it.
    """
    error = _attempt(lambda: _write(Path(path), state)) if collective.rank == 0 else None
    sentence = collective.broadcast_object(None if error is None else f"{type(error).__name__}: {error}")
    if sentence is not None:
        message = (
            f"Rank 0 could not write the checkpoint {str(path)!r}: {sentence}. What was there before is untouched."
        )
        raise CheckpointError(message, rank=0) from error


def load(collective: Collective, path: str | os.PathLike[str]) -> Any:
    """Read a file of `torch.save`, or all that an index names, as CPU tensors and plain containers.

    Ranks: all call it, and all read the file. Raises: CheckpointError: on every rank, if any rank could not read it.
    """
    content: Any = None

    def read() -> None:
        nonlocal content
        try:
            content = _read(Path(path))
        except Exception as problem:
            if "weights_only" not in str(problem):
                raise
            # Without the original, which says how to run the file's code.
            raise ValueError(_NEEDS_CODE.format(what=_global_in(str(problem)))) from None
        _refuse_shards(content)

    error = _attempt(read)
    sentences = collective.all_gather_object(None if error is None else f"{type(error).__name__}: {error}")
    for rank, sentence in enumerate(sentences):
        if sentence is not None:
            raise CheckpointError(
                f"Rank {rank} could not read the checkpoint {str(path)!r}: {sentence}", rank=rank
            ) from error
    return content


def _read(path: Path) -> Any:
    if not path.name.endswith(INDEX_SUFFIX):
        return torch.load(path, map_location="cpu", weights_only=True)
    content: dict[str, Any] = {}
    chosen = weight_map(path)
    for name in dict.fromkeys(chosen.values()):
        shard = torch.load(path.parent / name, map_location="cpu", weights_only=True)
        lost = [key for key, file in chosen.items() if file == name and key not in shard]
        if lost:
            raise ValueError(f"`{path.name}` names tensors that are not in `{name}`: {', '.join(map(repr, lost[:5]))}.")
        content |= {key: shard[key] for key, file in chosen.items() if file == name}
    return content


def _refuse_shards(content: Any, at: str = "") -> None:
    """Raise ValueError for a file with one rank's shards: every rank would take them for its own."""
    if isinstance(content, dict):
        for key, entry in content.items():
            _refuse_shards(entry, f"{at}/{key}")
    elif isinstance(content, (list, tuple)):
        for index, entry in enumerate(content):
            _refuse_shards(entry, f"{at}/{index}")
    elif isinstance(content, torch.Tensor) and type(content).__name__ == "DTensor":
        raise ValueError(_SHARDS.format(at=at or "/", shape=tuple(content.shape)))


def _global_in(message: str) -> str:
    """What the file asks for, as torch names it."""
    found = re.search(r"GLOBAL (\S+)", message)
    return f"`{found[1]}`" if found else "objects that are no tensors"


_SHARDS = (
    "The file has a DTensor at {at}, of shape {shape}: of a sharded tensor it has the part of the rank that wrote it. "
    "Where it was made, let all ranks call `fabric.save(path, {{'model': model}})`, then `fabric.consolidate`."
)
_NEEDS_CODE = (
    "The file has {what} in it, and reading that would run code from the file, which is not done here. It is damaged, "
    "planted, or holds more than tensors, numbers, strings, lists and dictionaries. Where it was made, save "
    "`module.state_dict()` alone, or as safetensors."
)


def _attempt(action: Callable[[], None]) -> Exception | None:
    try:
        action()
    except Exception as error:
        return error
    return None


def _write(path: Path, state: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        with beside.open("xb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    _force_to_disk(path.parent)


def _force_to_disk(folder: Path) -> None:
    # A rename survives a power cut only once its folder is on disk.
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
