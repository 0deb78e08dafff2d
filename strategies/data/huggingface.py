"""Hugging Face datasets, recognised by the module of their class: `datasets` need not be installed.

The private names of `datasets` that are used here and in `presplit.py` are checked at the first `IterableDataset`.
"""

import importlib
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

from fabric.launchers.private_names import Names, require

NAMES: Names = {
    "datasets.iterable_dataset:IterableDataset": {
        "_distributed": "how `split_dataset_by_node` has split a stream",
        "_ex_iterable": "what a stream reads, and how it shuffles",
    }
}


def is_map_style(dataset: object) -> bool:
    """Whether this is a `datasets.Dataset`."""
    return _is(dataset, "datasets.arrow_dataset", "Dataset")


def is_iterable(dataset: object) -> bool:
    """Whether this is a `datasets.IterableDataset`."""
    found = _is(dataset, "datasets.iterable_dataset", "IterableDataset")
    if found:
        _look_up()
    return found


def rows(dataset: Any, places: list[int]) -> list[Any]:
    """Rows of a map-style dataset as they are stored: nothing is decoded, no transform runs."""
    stored = dataset.with_format("arrow")[places]
    return list(stored.to_pylist())


def split(dataset: Any, num_shards: int, index: int) -> tuple[Any, Callable[[], None]]:
    """One of `num_shards` parts of a stream, and a function that sets the part's epoch to the stream's.

    By `split_dataset_by_node`: each epoch shuffles all shards, and each reader takes every `num_shards`-th.
    """
    distributed = importlib.import_module("datasets.distributed")
    part = distributed.split_dataset_by_node(dataset, rank=index, world_size=num_shards)
    return part, lambda: part.set_epoch(dataset.epoch)


def sources(dataset: Any) -> list[Any]:
    """What a stream reads (the arguments of its generator, such as files and tables, below all transforms), and the
    states of the generators that shuffle it: without a seed these differ between processes."""
    found = [value for _, value in _walk(dataset._ex_iterable) if value is not None]
    return [
        repr(each.bit_generator.state) if type(each).__module__.startswith("numpy.random") else each for each in found
    ]


def loses_samples(dataset: object) -> bool:
    """Whether a stream that is resumed by its own `state_dict` leaves out what its shuffle buffer held."""
    if not is_iterable(dataset):
        return False
    return any(kind == "BufferShuffledExamplesIterable" for kind, _ in _walk(dataset._ex_iterable))  # type: ignore[attr-defined]


@cache
def _look_up() -> None:
    require("datasets", "5.2", NAMES)


def _walk(iterable: Any) -> Iterator[tuple[str, Any]]:
    """The type of each stage of a stream, and what it reads or draws from: `kwargs`, `generator`."""
    kind = type(iterable).__qualname__
    yield kind, None
    for name, value in sorted(vars(iterable).items()):
        for entry in value if isinstance(value, list) else [value]:
            if type(entry).__module__ == "datasets.iterable_dataset":
                yield from _walk(entry)
            elif name in ("kwargs", "generator"):
                yield kind, entry


def _is(dataset: object, module: str, name: str) -> bool:
    return any(base.__module__ == module and base.__name__ == name for base in type(dataset).__mro__)
