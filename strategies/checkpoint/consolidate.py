"""Export a module of a checkpoint as safetensors, whichever strategy saved it. One process, without a `Fabric`.

Tensors are assembled from the pieces of all ranks for one file at a time; those that one rank saved are mapped.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from torch import Tensor

from fabric.strategies.checkpoint.other_formats import INDEX_SUFFIX, SUFFIX, save_safetensors
from fabric.strategies.checkpoint.read_and_verify import Checkpoint, reading
from fabric.strategies.checkpoint.state import RUN
from fabric.strategies.checkpoint.storage import Folder, local_path
from fabric.strategies.checkpoint.tensors import Stored, in_memory, shown

Choose: TypeAlias = Callable[[str, Tensor], bool]


def consolidate(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    name: str | None = None,
    filter: Choose | None = None,
    max_shard_bytes: int = 5 * 10**9,
) -> list[Path]:
    """Write a module of the checkpoint `path` as safetensors, under the user's parameter names; returns the files.

    `out`: a file, if it ends in `.safetensors`; otherwise a folder, with the files that `transformers` writes:
    `model.safetensors`, or several shards and an index if that would have more than `max_shard_bytes`.
    `name`: the entry of the saved state (`"model"`, `"models/critic"`); may be omitted if only one module was saved.
    `filter`: `(key, tensor) -> bool` selects tensors; the tensor is on the device "meta". It also receives entries that
    are no tensors (`_extra_state`), which only it can leave out.
    Tied tensors are written once, under the first of their names; the header lists the other names.
    Memory: tensors that several ranks saved in parts, of one file at a time. All bytes are verified first.
    Raises: CheckpointError: there is no complete checkpoint, or it is damaged. ValueError: nothing is left to write, no
    module or several, a value that is no tensor, or `out` has files of another export.
    """
    with reading(path) as storage:
        checkpoint = Checkpoint.open(storage)
        content = checkpoint.content()
        found = _modules(content)
    chosen = _chosen(found, name, storage.path)
    with reading(path):
        checkpoint.verify([chosen.split("/")[0]])
    entries = dict(found[chosen])
    if filter is not None:
        entries = {key: each for key, each in entries.items() if filter(key, shown(each))}
    tensors = _tensors(entries, chosen)
    if not tensors:
        raise ValueError(
            f"No tensor of the entry {chosen!r} in {storage.path!r} is selected, so nothing was written. Pass a "
            "`filter` that selects some, or another `name`."
        )
    kept, tied = _untied(tensors)
    return _write(local_path(out), kept, tied, max_shard_bytes)


def _modules(content: Any, at: tuple[str, ...] = ()) -> dict[str, Mapping[str, Any]]:
    """The entries that are states of modules, with their tensors by name."""
    if not isinstance(content, dict) or "param_groups" in content or at == (RUN,):
        return {}
    if any(isinstance(each, Stored) for each in content.values()) and at:
        return {"/".join(at): content}
    found: dict[str, Mapping[str, Any]] = {}
    for key, each in content.items():
        found |= _modules(each, (*at, str(key)))
    return found


def _chosen(found: Mapping[str, Any], name: str | None, path: str) -> str:
    if name is None and len(found) == 1:
        return next(iter(found))
    if name is not None and name in found:
        return name
    there = ", ".join(map(repr, found)) or "none"
    asked = "`name` is not given" if name is None else f"`name={name!r}`"
    raise ValueError(f"{asked}, but the modules in {path!r} are: {there}. Pass the `name` of one of them.")


def _tensors(state: Mapping[str, Any], name: str) -> dict[str, Stored]:
    others = [key for key, value in state.items() if not isinstance(value, Stored)]
    if others:
        raise ValueError(
            f"The entry {name!r} has values that are not tensors, which safetensors cannot store: "
            f"{', '.join(map(repr, others))}. Pass a `filter` that leaves them out."
        )
    return dict(state)


def _untied(tensors: Mapping[str, Stored]) -> tuple[dict[str, Stored], dict[str, str]]:
    """Each tensor once, and the other names of tied tensors, each with the name that is kept."""
    first: dict[Any, str] = {}
    tied = {key: kept for key, each in tensors.items() if (kept := first.setdefault(each.location, key)) != key}
    return {key: each for key, each in tensors.items() if key not in tied}, tied


def _write(out: Path, tensors: Mapping[str, Stored], tied: Mapping[str, str], max_shard_bytes: int) -> list[Path]:
    if out.suffix == SUFFIX:
        save_safetensors(out, in_memory(tensors, mapped=True), tied)
        return [out]
    shards = list(_shards(tensors, max_shard_bytes))
    numbered = [f"model-{number:05}-of-{len(shards):05}{SUFFIX}" for number in range(1, len(shards) + 1)]
    names = numbered if len(shards) > 1 else ["model" + SUFFIX]
    index = "model" + SUFFIX + INDEX_SUFFIX
    folder = Folder(out)
    others = [each for each in folder.names() if each.startswith("model") and SUFFIX in each]
    if set(others) - {*names, index} or (index in others and len(shards) == 1):
        raise ValueError(
            f"{folder.path!r} contains files of another export, which readers would mix with this one: "
            f"{', '.join(map(repr, sorted(others)))}. Remove them, or write to another folder."
        )
    for name, shard in zip(names, shards, strict=True):
        save_safetensors(
            out / name, in_memory(shard, mapped=True), {key: kept for key, kept in tied.items() if kept in shard}
        )
    if len(shards) > 1:
        places = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
        num_bytes = sum(shown(each).nbytes for each in tensors.values())
        content = {"metadata": {"total_size": num_bytes}, "weight_map": places}
        folder.commit(index, json.dumps(content, indent=2).encode() + b"\n")
        names.append(index)
    return [out / name for name in names]


def _shards(tensors: Mapping[str, Stored], max_bytes: int) -> Iterator[dict[str, Stored]]:
    """The tensors in order, grouped into shards of at most `max_bytes`, with at least one tensor each."""
    shard: dict[str, Stored] = {}
    size = 0
    for key, stored in tensors.items():
        if shard and size + shown(stored).nbytes > max_bytes:
            yield shard
            shard, size = {}, 0
        shard[key] = stored
        size += shown(stored).nbytes
    yield shard
