"""A seed per batch for the random numbers that a worker draws while it loads the batch.

So augmentation differs between ranks, epochs and batches, whichever worker loads them, and a run that is resumed
within an epoch repeats it, although its workers loaded none of the batches before. Costs about 20 us per batch.
"""

from __future__ import annotations

from typing import Any, final

from torch.utils.data import Dataset

from fabric.strategies.data.rng import process_rngs


@final
class SeededBatch(list[Any]):
    """The indices of a batch, with a seed."""

    seed = 0


@final
class SeededIndex:
    """An index, or a batch that is not a list, with a seed."""

    def __init__(self, value: Any, seed: int) -> None:
        self.value, self.seed = value, seed


def with_seed(batch: Any, seed: int) -> SeededBatch | SeededIndex:
    """The same indices with a seed. A list stays a list, for subclasses of `DataLoader` that use its items."""
    if type(batch) is not list:
        return SeededIndex(batch, seed)
    seeded = SeededBatch(batch)
    seeded.seed = seed
    return seeded


@final
class SeededDataset(Dataset[Any]):
    """The user's map-style dataset; seeds the worker's generators before it loads. Delegates other attributes."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitem__(self, index: Any) -> Any:
        return self.dataset[_seeded(index)]

    def __getitems__(self, indices: Any) -> Any:
        indices = _seeded(indices)
        load = getattr(self.dataset, "__getitems__", None)
        return load(indices) if load else [self.dataset[index] for index in indices]

    def __len__(self) -> int:
        return len(self.dataset)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "dataset":
            object.__setattr__(self, name, value)
        else:  # a `worker_init_fn` that writes to `get_worker_info().dataset`
            setattr(self.dataset, name, value)

    def __getattr__(self, name: str) -> Any:
        if name == "dataset" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.dataset, name)


def _seeded(indices: Any) -> Any:
    """The plain indices; seeds the generators of the process if they carry a seed."""
    if not isinstance(indices, (SeededBatch, SeededIndex)):
        return indices
    for rng in process_rngs():
        rng.seed(indices.seed)
    return list(indices) if isinstance(indices, SeededBatch) else indices.value
