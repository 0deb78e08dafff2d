"""Files of other libraries: `torch.save` and safetensors, single or in shards. Reading runs no code from them."""

from __future__ import annotations

import os
from copy import copy
from pathlib import Path
from typing import Any, Literal, TypeAlias

from torch import nn

from fabric.strategies.checkpoint import safetensors, single_file
from fabric.strategies.checkpoint.loading import refuse_unread
from fabric.strategies.checkpoint.manifest import NAME
from fabric.strategies.checkpoint.safetensors import INDEX_SUFFIX, SUFFIX
from fabric.strategies.checkpoint.saving import attempt
from fabric.strategies.checkpoint.storage import local_path, storage_of
from fabric.strategies.collectives.collective import Collective

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
    if kind == "torch":
        return single_file.load(collective, path)
    content: dict[str, Any] = {}
    place = local_path(path)
    problem = attempt(lambda: content.update(safetensors.read(_one_of(place) if place.is_dir() else place)))
    refuse_unread(collective, storage_of(path), problem)
    return content


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
