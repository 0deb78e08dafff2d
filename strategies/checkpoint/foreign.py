"""Files that others have written: `torch.save`, safetensors, single and in shards. Reading runs no code from them.

Ranks: all call `kind_of` and `load`, which agree on what rank 0 sees.
"""

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
from fabric.strategies.checkpoint.storage import storage_of
from fabric.strategies.collectives.collective import Collective

Kind: TypeAlias = Literal["torch", "safetensors"] | None


def kind_of(path: str | os.PathLike[str]) -> Kind:
    """Whose file, or folder of files, this is; None: a checkpoint of ours, or nothing."""
    place = Path(path)
    if place.is_file():
        return "safetensors" if place.name.endswith((SUFFIX, INDEX_SUFFIX)) else "torch"
    return "safetensors" if place.is_dir() and not (place / NAME).exists() and _in_folder(place) else None


def load(collective: Collective, path: str | os.PathLike[str], kind: Kind) -> Any:
    """What is in it: tensors on the CPU, or a `Stored` for each. Ranks: all.

    Raises: CheckpointError: on every rank, if any could not read it.
    """
    if kind == "torch":
        return single_file.load(collective, path)
    content: dict[str, Any] = {}
    place = Path(path)
    problem = attempt(lambda: content.update(safetensors.read(_one_of(place) if place.is_dir() else place)))
    refuse_unread(collective, storage_of(path), problem)
    return content


def with_tied(module: nn.Module, content: Any) -> Any:
    """The state of a module, with each name of a parameter whose other name is there: files of others have one."""
    if not isinstance(content, dict):
        return content
    first: dict[nn.Parameter, str] = {}
    named = list(module.named_parameters(remove_duplicate=False))
    for name, parameter in named:
        if name in content:
            first.setdefault(parameter, name)
    whole = copy(content)  # of its own class, and with its attributes: torch notes versions on a module's state
    for name, parameter in named:
        if parameter in first and name not in content:
            whole[name] = content[first[parameter]]
    return whole


def _in_folder(folder: Path) -> list[str]:
    """Indices of shards, or else files."""
    names = sorted(each.name for each in folder.iterdir())
    return [name for name in names if name.endswith(INDEX_SUFFIX)] or [name for name in names if name.endswith(SUFFIX)]


def _one_of(folder: Path) -> Path:
    names = _in_folder(folder)
    if len(names) > 1:
        raise ValueError(f"The folder has {', '.join(map(repr, names))}. Pass the path of one of them.")
    return folder / names[0]
