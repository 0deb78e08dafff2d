"""What ranks compare when a loader is set up: the same data, one seed, one state of each random generator.

If ranks had different loaders, samples would be read twice or never, silently; so digests of their descriptions are
compared. Cost: a broadcast from rank 0 and an all-reduce of one number at set-up; descriptions of all ranks are
gathered only for the error. Nothing is sent later.

No sample is loaded. A description has what can be read without that: indices of subsets, rows of tensors and lists,
rows of Arrow tables, fields of torch's samplers. A custom dataset is described by its type and length alone, because
`__getitem__` could open files that workers must not inherit. A custom sampler is copied, and the copy is drawn from.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import PurePath
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Sampler, StackDataset, Subset, TensorDataset

from fabric.strategies.data import huggingface
from fabric.strategies.data.rng import Rng, Streams, digest, mix
from fabric.strategies.data.take import length_of
from fabric.strategies.data.uneven import Votes

NUM_COMPARED = 256
"""How many items of a custom sampler are compared."""
NUM_ROWS = 16
NUM_SHOWN = 8
TINY = 1e-4
"""Smaller absolute values count as 0: rounding errors differ between processors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """The collectives that the set-up of a loader uses. Every rank calls each of them."""

    size: int
    broadcast: Callable[[Any], Any]
    """Returns the object of rank 0 on every rank."""
    gather: Callable[[Any], list[Any]]
    """Returns the objects of all ranks, in rank order, on every rank."""
    same: Callable[[str], bool]
    """Whether all ranks passed the same string: one all-reduce of one number."""
    votes: Callable[[], Votes] | None = None
    """Makes the `Votes` by which a loader agrees on its number of batches. None: not supported."""


def agree_on_seed(own: list[Rng], number: int, ranks: Ranks) -> tuple[int, list[Any]]:
    """The seed of rank 0, and the states of its generators `own`. No generator is drawn from or written.

    Ranks: all call it.

    The seed depends on the state of torch's global generator, hence on `seed_everything`, and on `number`: see
    `LoopProgress`.
    """
    mine = mix("loader", number, digest(torch.default_generator.get_state())), [rng.read() for rng in own]
    agreed: tuple[int, list[Any]] = mine if ranks.size == 1 else ranks.broadcast(mine)
    return agreed


def agree_on_loader(described: Mapping[str, Any], own: list[Rng], ranks: Ranks) -> bool:
    """Check that all ranks have the same description; return whether the states of their generators are equal, too.

    Ranks: all call it. Raises: ValueError: on every rank, if descriptions differ.
    """
    words = repr(dict(described))
    if ranks.same(f"{words}\n{[digest(rng.read()) for rng in own]}"):
        return True
    if ranks.same(words):
        return False
    votes = ranks.gather(dict(described))
    names = [name for name in votes[0] if any(vote.get(name) != votes[0][name] for vote in votes)]
    lines = [
        f"  rank {rank}: " + ", ".join(f"{name} {vote.get(name)}" for name in names) for rank, vote in enumerate(votes)
    ]
    raise ValueError(
        "The ranks were given different loaders, so some samples would be read twice and others never:\n"
        + "\n".join(lines)
        + "\nBuild the same loader on every rank, over the whole dataset, and pass the same `seed` to `shuffle` of a "
        "stream. If each rank reads data of its own, or a part that was split before, pass "
        "`use_distributed_sampler=False`."
    )


def describe(items: Iterable[Any], dataset: object, seed: int) -> dict[str, Any]:
    """What must be equal on all ranks of a map-style loader. The keys are the names that an error shows."""
    return {
        "dataset": describe_dataset(dataset),
        "sampler": type(items).__qualname__,
        "length": length_of(items),
        "first indices": describe_order(items, dataset, seed),
    }


def describe_dataset(dataset: object) -> str:
    """The type of a dataset, and some of its rows if they can be read without calling user code."""
    name = type(dataset).__qualname__
    if isinstance(dataset, Subset):
        return f"{name}(indices {_rows(dataset.indices)} of {describe_dataset(dataset.dataset)})"
    if isinstance(dataset, (ConcatDataset, StackDataset)):
        parts = dataset.datasets.values() if isinstance(dataset.datasets, dict) else dataset.datasets
        return f"{name}({', '.join(map(describe_dataset, parts))})"
    if isinstance(dataset, TensorDataset):
        return f"{name}({', '.join(map(_rows, dataset.tensors))})"
    if huggingface.is_map_style(dataset):
        return f"{name}({_rows(dataset, huggingface.rows)})"
    if huggingface.is_iterable(dataset):
        return f"{name}({mix([describe_value(part) for part in huggingface.sources(dataset)]):016x})"
    return f"{name}({_rows(dataset)})" if _is_sequence(dataset) else name


def describe_order(items: Iterable[Any], dataset: object, seed: int) -> str | None:
    """A description of the order of a sampler; None if it cannot be copied (a Python generator).

    For samplers of torch and torchdata: their fields, without random states, which `agree_on_seed` broadcasts. For
    any other: the first items that a copy yields. The states of the global random generators are restored.
    """
    if isinstance(items, (list, tuple, range)):
        return _shown(items, mix(list(items)))
    if is_torchs(items):
        return f"{mix(*_fields(items)):016x}"
    try:
        duplicate = copy.deepcopy(items, {id(dataset): dataset})
    except (TypeError, NotImplementedError):
        return None
    with Streams(mix(seed, "compared"), []).drawing():
        first = list(islice(duplicate, NUM_COMPARED))
    return _shown(first, mix(first))


def describe_value(value: Any, depth: int = 4) -> str:
    """A description of a value. Floats by sign and power of two, so that rounding errors do not matter; objects other
    than numbers, strings, tensors and containers by their type."""
    if isinstance(value, (bool, int, range, bytes, type(None))):
        return repr(value[:256] if isinstance(value, bytes) else value)
    if isinstance(value, (str, PurePath)):
        return repr(str(value).rpartition("/")[2][:256])  # nodes may keep the same files in different folders
    if isinstance(value, float):
        return f"{math.copysign(1, value):.0f}e{math.frexp(value)[1]}" if TINY < abs(value) < math.inf else "0e0"
    if type(value).__module__ == "numpy" and not _is_array(value):
        return describe_value(value.item(), depth - 1) if depth else type(value).__qualname__
    if isinstance(value, Tensor) and (value.is_meta or value.layout is not torch.strided):
        return f"{value.dtype}{tuple(value.shape)}"
    if isinstance(value, Tensor) or _is_array(value):
        return f"{value.dtype}{tuple(value.shape)}{describe_value(value.reshape(-1)[:NUM_SHOWN].tolist(), depth - 1)}"
    if depth and isinstance(value, Mapping):
        return str({str(key): describe_value(entry, depth - 1) for key, entry in islice(value.items(), NUM_ROWS)})
    if depth and isinstance(value, (list, tuple)):
        return f"{len(value)}{[describe_value(entry, depth - 1) for entry in value[:NUM_ROWS]]}"
    return describe_dataset(value) if huggingface.is_map_style(value) else type(value).__qualname__


def _fields(sampler: object) -> list[tuple[str, Any]]:
    """The fields of a sampler of torch, without its dataset and generator."""
    return [
        (name, value.tolist() if isinstance(value, Tensor) else _fields(value) if is_torchs(value) else _plain(value))
        for name, value in sorted(vars(sampler).items())
        if name not in ("data_source", "generator")
    ]


def is_torchs(value: object) -> bool:
    """Whether this is a sampler of torch or torchdata, and so is every sampler that it wraps."""
    if type(value).__module__ not in ("torch.utils.data.sampler", "torchdata.stateful_dataloader.sampler"):
        return False
    return all(is_torchs(part) for name, part in vars(value).items() if name == "sampler" or isinstance(part, Sampler))


def _plain(value: Any) -> Any:
    return describe_value(value) if not isinstance(value, (list, tuple, range, int, float)) else value


def _rows(rows: Any, read: Callable[[Any, list[int]], list[Any]] | None = None) -> str:
    """The number of rows, the first row, and a digest of `NUM_ROWS` evenly spaced rows."""
    places = sorted({place * (len(rows) - 1) // (NUM_ROWS - 1) for place in range(NUM_ROWS)}) if len(rows) else []
    chosen = [describe_value(row) for row in (read(rows, places) if read else [rows[place] for place in places])]
    return f"{len(rows)} rows, the first {''.join(chosen[:1])[:80]} ({mix(chosen):016x})"


def _shown(items: Sequence[Any], fingerprint: int) -> str:
    shown = ", ".join(str(item)[:80] for item in items[:NUM_SHOWN])
    return f"[{shown}{', ...' if len(items) > NUM_SHOWN else ''}] ({fingerprint:016x})"


def _is_sequence(value: object) -> bool:
    return type(value) in (list, tuple, range) or (isinstance(value, Tensor) and value.ndim > 0) or _is_array(value)


def _is_array(value: object) -> bool:
    return type(value).__module__ == "numpy" and type(value).__name__ in ("ndarray", "memmap")
