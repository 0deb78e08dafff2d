"""A checkpoint as one file of `torch.save`: rank 0 writes it, every rank can read it.

The file appears only when it is complete: it is written under another name, flushed to disk, and renamed. An error on
one rank is raised on all. Reading runs no code from the file.
"""

from __future__ import annotations

import os
import re
import secrets
from pathlib import Path
from typing import Any

import torch

from fabric.strategies.checkpoint.errors import CheckpointError, sentence_of
from fabric.strategies.checkpoint.loading import refuse_unread
from fabric.strategies.checkpoint.safetensors import weight_map
from fabric.strategies.checkpoint.saving import attempt
from fabric.strategies.checkpoint.storage import flush_folder, local_path, storage_of
from fabric.strategies.collectives.collective import Collective

INDEX_SUFFIX = ".bin.index.json"
"""The suffix of an index that older releases of `transformers` write next to shards of `torch.save`."""


def save(collective: Collective, path: str | os.PathLike[str], state: Any) -> None:
    """Write `state` to `path`, replacing an existing file once the new one is complete.

    Ranks: all call it; the state of rank 0 is written. It returns on all once the file is complete.
    Raises: CheckpointError: on every rank, if rank 0 could not write it.
    """
    error = attempt(lambda: _write(local_path(path), state)) if collective.rank == 0 else None
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
    content: Any = None

    def read() -> None:
        nonlocal content
        content = _read(local_path(path))
        _refuse_shards(content)

    error = attempt(read)
    refuse_unread(collective, storage_of(path), error)
    return content


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
    with path.open("rb") as file:
        start = file.read(4)
    if start and not start.startswith(_STARTS):  # torch would say that it runs code, of an HDF5 file as well
        raise ValueError(_NO_FILE.format(name=path.name, why=f"it begins with {start!r}"))
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as problem:
        if "weights_only" not in str(problem):
            raise ValueError(_NO_FILE.format(name=path.name, why=sentence_of(problem))) from problem
        if "TorchScript" in str(problem):
            raise ValueError(_SCRIPT.format(name=path.name)) from None
        # Not chained: the original tells how to run the file's code.
        raise ValueError(_NEEDS_CODE.format(what=_global_in(str(problem)))) from None


def _refuse_shards(content: Any, at: str = "") -> None:
    """Raise ValueError for a file with the shards of one rank: every rank would load them as its own."""
    if isinstance(content, dict):
        for key, entry in content.items():
            _refuse_shards(entry, f"{at}/{key}")
    elif isinstance(content, (list, tuple)):
        for index, entry in enumerate(content):
            _refuse_shards(entry, f"{at}/{index}")
    elif isinstance(content, torch.Tensor) and type(content).__name__ == "DTensor":
        raise ValueError(_SHARDS.format(at=at or "/", shape=tuple(content.shape)))


def _global_in(message: str) -> str:
    """The object that the file refers to, by torch's error message."""
    found = re.search(r"GLOBAL (\S+)", message)
    return f"`{found[1]}`" if found else "objects that are not tensors"


_STARTS = (b"PK\x03\x04", b"\x80")
"""Of a zip archive, and of the pickles that `torch.save` wrote before 1.6."""
_SHARDS = (
    "The file has a DTensor at {at}, of shape {shape}: it contains only the shard of the rank that wrote it. Where the "
    "file was made, call `fabric.save(path, {{'model': model}})` on all ranks, then `fabric.consolidate`."
)
_NO_FILE = (
    "`{name}` is damaged, or `torch.save` did not write it ({why}). Pass the folder of `fabric.save`, a file of "
    "`torch.save`, or a file named `*.safetensors`."
)
_SCRIPT = (
    "`{name}` is a TorchScript archive, which is a program and is not run. Where it was made, write "
    "`torch.save(torch.jit.load(path).state_dict(), new_path)`, and load the new file."
)
_NEEDS_CODE = (
    "The file contains {what}, and reading that would run code from the file, which is refused. The file is damaged, "
    "malicious, or contains more than tensors, numbers, strings, lists and dictionaries. Where it was made, save only "
    "`module.state_dict()`, or save it as safetensors."
)


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
    flush_folder(path.parent)
