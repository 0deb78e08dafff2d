"""Files of other libraries: `torch.save` and safetensors, single or in shards. Reading runs no code from them."""

from __future__ import annotations

import os
from copy import copy
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import nn

from fabric.strategies.checkpoint import safetensors
from fabric.strategies.checkpoint.errors import CheckpointError, sentence_of
from fabric.strategies.checkpoint.loading import refuse_unread
from fabric.strategies.checkpoint.manifest import NAME
from fabric.strategies.checkpoint.safetensors import INDEX_SUFFIX, SUFFIX, weight_map
from fabric.strategies.checkpoint.saving import attempt
from fabric.strategies.checkpoint.storage import local_path, replacing, storage_of
from fabric.strategies.collectives.collective import Collective
from fabric.strategies.tensors.nests import tensors_in

TORCH_INDEX_SUFFIX = ".bin.index.json"
"""The suffix of an index that older releases of `transformers` write next to shards of `torch.save`."""
Kind: TypeAlias = Literal["torch", "safetensors"] | None


def kind_of(path: str | os.PathLike[str]) -> Kind:
    """The format of a file, or of the files in a folder; None: a checkpoint of `fabric.save`, or nothing."""
    place = local_path(path)
    if place.is_file():
        return "safetensors" if place.name.endswith((SUFFIX, INDEX_SUFFIX)) else "torch"
    return "safetensors" if place.is_dir() and not (place / NAME).exists() and _in_folder(place) else None


def load(collective: Collective, path: str | os.PathLike[str], kind: Kind) -> Any:
    """The contents: CPU tensors, or a `Stored` for each. Ranks: all call it, with the `kind` that rank 0 found.

    Raises: CheckpointError: on every rank, if any could not read it.
    """
    place, content = local_path(path), list[Any]()

    def read() -> None:
        if kind == "torch":
            content.append(_read_torch(place))
            _refuse_shards(content[0])
        else:
            content.append(safetensors.read(_one_of(place) if place.is_dir() else place))

    refuse_unread(collective, storage_of(path), attempt(read))
    return content[0]


def save(collective: Collective, path: str | os.PathLike[str], state: Any) -> None:
    """Write `state` by `torch.save`, replacing an existing file once the new one is complete.

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


def with_tied(module: nn.Module, content: Any) -> Any:
    """The state of a module with all names of tied parameters, of which other libraries write only one."""
    if not isinstance(content, dict):
        return content
    first: dict[nn.Parameter, str] = {}
    named = list(module.named_parameters(remove_duplicate=False))
    for name, parameter in named:
        if name in content:
            first.setdefault(parameter, name)
    whole = copy(content)  # keeps its class and attributes: torch stores `_metadata` on the state of a module
    for name, parameter in named:
        if parameter in first and name not in content:
            whole[name] = content[first[parameter]]
    return whole


def _in_folder(folder: Path) -> list[str]:
    """The indices of shards in the folder, or else the files."""
    names = sorted(each.name for each in folder.iterdir())
    return [name for name in names if name.endswith(INDEX_SUFFIX)] or [name for name in names if name.endswith(SUFFIX)]


def _one_of(folder: Path) -> Path:
    names = _in_folder(folder)
    if len(names) > 1:
        raise ValueError(f"The folder contains {', '.join(map(repr, names))}. Pass the path of one of them.")
    return folder / names[0]


def _read_torch(path: Path) -> Any:
    if not path.name.endswith(TORCH_INDEX_SUFFIX):
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
