"""Files of other libraries: `torch.save` and safetensors, single or in shards. Reading runs no code from them."""

import json
import os
from collections.abc import Mapping
from copy import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fabric.strategies.checkpoint.direct_state_dict import HOW_TO_SAVE
from fabric.strategies.checkpoint.errors import raised_together
from fabric.strategies.checkpoint.manifest import NAME
from fabric.strategies.checkpoint.storage import local_path, replacing
from fabric.strategies.collectives.collective import Collective
from fabric.strategies.tensors.dtensor import as_sharded
from fabric.strategies.tensors.nests import tensors_in

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".index.json"
"""The suffix of an index, which `transformers` writes next to shards: `model.safetensors.index.json`, or `*.bin`."""


def is_foreign(path: str | os.PathLike[str]) -> bool:
    """Whether this is a file, or a folder with safetensors; otherwise a checkpoint of `fabric.save`, or nothing."""
    place = local_path(path)
    return place.is_file() or (place.is_dir() and not (place / NAME).exists() and bool(_in_folder(place)))


def load(collective: Collective, path: str | os.PathLike[str]) -> Any:
    """The contents, as CPU tensors. Ranks: all call it.

    Raises: CheckpointError: on every rank, if any could not read it.
    """
    with raised_together(collective, "read", os.fspath(path)):
        content = _read(local_path(path))
        if any(as_sharded(tensor) is not None for tensor in tensors_in(content)):
            raise ValueError(_SHARDS)  # the shards of one rank, which every rank would load as its own
    return content


def save(collective: Collective, path: str | os.PathLike[str], state: Any) -> None:
    """Write `state` by `torch.save`, replacing an existing file once the new one is complete.

    Ranks: all call it; the state of rank 0 is written. It returns on all once the file is complete.
    Raises: CheckpointError: on every rank, if rank 0 could not write it.
    """
    with raised_together(collective, "write", os.fspath(path)):
        if collective.rank == 0:
            with replacing(local_path(path)) as file:
                torch.save(state, file)


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


def _in_folder(folder: Path) -> list[Path]:
    """The indices of shards in the folder, or else the files."""
    files = sorted(folder.iterdir())
    return [each for each in files if each.name.endswith(SUFFIX + INDEX_SUFFIX)] or [
        each for each in files if each.suffix == SUFFIX
    ]


def _read(path: Path) -> Any:
    """A file, the files of an index, or the only one of these in a folder."""
    if path.is_dir():
        found = _in_folder(path)
        if len(found) > 1:
            names = ", ".join(repr(each.name) for each in found)
            raise ValueError(f"The folder contains {names}. Pass the path of one of them.")
        return _read(found[0])
    if not path.name.endswith(INDEX_SUFFIX):
        return load_safetensors(path) if path.suffix == SUFFIX else _unpickled(path)
    chosen = dict(json.loads(path.read_bytes())["weight_map"])
    files = {name: _read(path.parent / Path(name).name) for name in set(chosen.values())}
    lost = [key for key, name in chosen.items() if key not in files[name]]
    if lost:
        raise ValueError(f"`{path.name}` names tensors that its files do not have: {', '.join(map(repr, lost[:5]))}.")
    return {key: files[name][key] for key, name in chosen.items()}


def _unpickled(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as problem:
        if _has_shards(path):
            raise ValueError(_SHARDS) from None
        # Neither chained nor quoted: torch's message tells how to run the file's code.
        raise ValueError(_REFUSED.format(name=path.name, kind=type(problem).__name__)) from None


def _has_shards(path: Path) -> bool:
    """Whether a file that torch does not read has a DTensor, which it reads where that is imported (2 s)."""
    try:
        found = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except Exception:  # no file of `torch.save`
        return False
    return any(name.endswith(".DTensor") for name in found)


def load_safetensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a file, mapped: their bytes are read when they are copied."""
    found: dict[str, Tensor] = _library().load_file(path)
    return found


def save_safetensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a file, and replace an existing one once it is complete. Raises: ValueError: it cannot store a dtype."""
    library = _library()
    with replacing(path) as file:
        try:
            library.save_file(dict(tensors), file.name, {"format": "pt", **metadata})
        except KeyError as error:
            raise ValueError(f"safetensors does not support the dtype {error}. Leave it out by `filter`.") from error


def _library() -> Any:
    try:
        import safetensors.torch
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"A file `*{SUFFIX}` needs safetensors, which is not installed. Run `pip install "
            "'torchfabric[safetensors]'`."
        ) from error
    return safetensors.torch


_SHARDS = (
    "The file has DTensors: it was written by hand from `model.state_dict()` of a sharded model, and has only the "
    f"shards of the rank that wrote it. Where it was made, {HOW_TO_SAVE}"
)
_REFUSED = (
    "`{name}` is damaged, `torch.save` did not write it, or reading it would run code from the file, which is refused "
    "({kind}). Pass the folder of `fabric.save`, a file named `*.safetensors`, or a file of `torch.save` with tensors, "
    "numbers, strings, lists and dictionaries alone, such as `module.state_dict()`."
)
