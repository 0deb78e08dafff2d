"""What ranks compare when a loader is set up: the same data, one seed, one state of each random generator.

If ranks had different loaders, samples would silently be read twice or never; so digests of the loaders' descriptions
are compared. Cost: a broadcast from rank 0 and an all-reduce of one number at set-up; descriptions of all ranks are
gathered only for the error. Nothing is sent later.

The only sample that is loaded is the first one of a stream that ranks would split. A description contains what can be
read without loading samples: indices of subsets, rows of tensors and lists, rows of Arrow tables, fields of torch's
samplers; for a custom dataset, its length and rows of the data in its attributes. `__getitem__` of a custom dataset is
not called, because it could open files that workers must not inherit. A custom sampler is copied, and the copy is drawn
from.

`NUM_ROWS` evenly spaced rows are read, and of each row at most `NUM_ROWS` entries on each of four levels, `NUM_ROWS`
numbers of a tensor and 256 characters of a string.
"""

import copy
import math
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, islice
from pathlib import PurePath
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Sampler, StackDataset, Subset, TensorDataset

from fabric.strategies.data import huggingface
from fabric.strategies.data.context import Ranks
from fabric.strategies.data.rng import digest, mix, preserved_rngs, seed_process
from fabric.strategies.tensors.digest import digest_of_all
from fabric.strategies.tensors.generator_interface import Rng
from fabric.strategies.tensors.nests import is_tensor, leaves_in, opened

NUM_COMPARED = 256
"""How many items of a custom sampler are compared."""
NUM_ROWS = 16
NUM_SHOWN = 8
TINY = 1e-4
"""Smaller absolute values count as 0: rounding errors differ between processors."""


def agree_on_loader(described: Mapping[str, Any], own: Sequence[Rng], ranks: Ranks) -> bool:
    """Check that all ranks have the same description; return whether the states of their generators are equal.
    The keys are the names that an error shows.

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
        + "\nBuild the same loader on every rank, over the whole dataset: sort what is listed, seed alike what is "
        "drawn, and pass the same `seed` to `shuffle` of a stream. If each rank reads data of its own, or a part "
        "that was split before, pass `use_distributed_sampler=False`."
    )


def describe_dataset(dataset: object, depth: int = 4) -> str:
    """The type of a dataset, and some of its rows if they can be read without calling user code. A custom dataset has
    rows of the lists, arrays, tensors and datasets among its attributes."""
    name, inner = type(dataset).__qualname__, partial(describe_dataset, depth=depth - 1)
    if depth == 0:
        return name
    if isinstance(dataset, Subset):
        return f"{name}(indices {_rows(dataset.indices)} of {inner(dataset.dataset)})"
    if isinstance(dataset, (ConcatDataset, StackDataset)):
        parts = dataset.datasets.values() if isinstance(dataset.datasets, dict) else dataset.datasets
        return f"{name}({', '.join(map(inner, parts))})"
    if isinstance(dataset, TensorDataset):
        return f"{name}({', '.join(map(_rows, dataset.tensors))})"
    if huggingface.is_map_style(dataset):
        return f"{name}({_rows(dataset, huggingface.rows)})"
    if huggingface.is_iterable(dataset):
        return f"{name}({mix([describe_value(part) for part in huggingface.sources(dataset)]):016x})"
    if _is_sequence(dataset) or _is_frame(dataset):
        return f"{name}({_rows(dataset, _rows_of_frame if _is_frame(dataset) else None)})"
    # A stream may have other attributes on each rank because it splits itself.
    attributes = {} if isinstance(dataset, IterableDataset) else getattr(dataset, "__dict__", {})
    held = [f"{key}: {inner(value)}" for key, value in sorted(attributes.items()) if _is_data(value)]
    return f"{name}({', '.join(held)})" if held else name


def describe_order(items: Iterable[Any], dataset: object, seed: int) -> str | None:
    """A description of the order of a sampler; None if it cannot be copied (a Python generator).

    For samplers of torch and torchdata: their fields, without random states, which set-up broadcasts. For any other
    sampler: the first items that a copy yields. The states of the global random generators are restored.
    """
    if isinstance(items, (list, tuple, range)):
        return _shown(items, mix(list(items)))
    if is_torchs(items):
        return f"{mix(*_fields(items)):016x}"
    try:
        duplicate = copy.deepcopy(items, {id(dataset): dataset})
    except (TypeError, NotImplementedError):
        return None
    with preserved_rngs():
        seed_process(mix(seed, "compared"))
        first = list(islice(duplicate, NUM_COMPARED))
    return _shown(first, mix(first))


def describe_value(value: Any, depth: int = 4) -> str:
    """A description of a value. A float is described by its sign and power of two, so that rounding errors do not
    matter; an object other than a number, string, tensor or container by its type."""
    if isinstance(value, (bool, int, range, bytes, type(None))):
        return repr(value[:256] if isinstance(value, bytes) else value)
    if isinstance(value, (str, PurePath)):
        return repr(str(value).rpartition("/")[2][:256])  # nodes may keep the same files in different folders
    if isinstance(value, float):
        return f"{math.copysign(1, value):.0f}e{math.frexp(value)[1]}" if TINY < abs(value) < math.inf else "0e0"
    if type(value).__module__ == "numpy" and not _is_array(value):
        return describe_value(value.item(), depth - 1) if depth else type(value).__qualname__
    if isinstance(value, Tensor) or _is_array(value):
        try:
            chosen = value[tuple(slice(None, None, 1 + size // NUM_SHOWN) for size in value.shape)].reshape(-1)
            numbers = chosen[:: 1 + len(chosen) // NUM_ROWS].tolist()
        except (NotImplementedError, RuntimeError):  # on `meta`, sparse, nested, or of a dtype that is no number
            return str(value.dtype)
        return f"{value.dtype}{tuple(value.shape)}{describe_value(numbers, depth - 1)}"
    if depth and isinstance(value, dict):
        return str({str(key): describe_value(entry, depth - 1) for key, entry in islice(value.items(), NUM_ROWS)})
    if depth and isinstance(value, (list, tuple)):
        return f"{len(value)}{[describe_value(entry, depth - 1) for entry in value[:NUM_ROWS]]}"
    return describe_dataset(value) if huggingface.is_map_style(value) else type(value).__qualname__


def describe_first_sample(parts: Iterable[object], dataset: IterableDataset[Any], seed: int) -> str:
    """A digest of the first sample of a stream; "" if reading it could use up what the stream reads.

    `parts`: the objects through which the stream is read. The sample is read from a copy, with equal generators on all
    ranks; the generators' states are restored.
    """
    holders = [getattr(part, "__dict__", {}).values() for part in parts]
    if any(isinstance(value, Iterator) for value in (dataset, *chain.from_iterable(holders))):
        return ""
    with preserved_rngs():
        seed_process(mix(seed, "compared"))
        first = next(iter(copy.copy(dataset)), None)
    leaves = leaves_in(first, lambda leaf: is_tensor(leaf) or opened(leaf) is None)
    return f"{mix([_digest_of_leaf(leaf) for leaf in leaves]):016x}"


def _digest_of_leaf(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return f"{leaf.dtype}{tuple(leaf.shape)}{digest_of_all([leaf])}"
    try:
        return digest(leaf).hex()
    except (TypeError, AttributeError, pickle.PicklingError):
        return type(leaf).__qualname__


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


def _rows_of_frame(frame: Any, places: list[int]) -> list[Any]:
    return list(frame.iloc[places].to_numpy().tolist())


def _is_data(value: object) -> bool:
    return _is_sequence(value) or _is_frame(value) or isinstance(value, Dataset) or huggingface.is_map_style(value)


def _is_sequence(value: Any) -> bool:
    if type(value) is Tensor:
        return value.ndim > 0 and value.layout is torch.strided and not value.is_nested
    return type(value) in (list, tuple, range) or (_is_array(value) and value.ndim > 0)


def _is_array(value: object) -> bool:
    return type(value).__module__ == "numpy" and type(value).__name__ in ("ndarray", "memmap")


def _is_frame(value: object) -> bool:
    """Whether this is a table or a column of pandas."""
    return type(value).__module__.partition(".")[0] == "pandas" and type(value).__name__ in ("DataFrame", "Series")
