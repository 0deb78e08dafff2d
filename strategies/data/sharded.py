"""Loaders that share their data out themselves: recognised, checked, and not cut again."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader, DistributedSampler, IterDataPipe

from fabric.strategies.data.share import Share


def is_sharded(loader: DataLoader[Any], share: Share) -> bool:
    """Whether the loader reads through a `DistributedSampler`, which pads: some samples are then read twice.

    Raises: ValueError: it reads another part of the data than this rank's.
    """
    batch_sampler = loader.batch_sampler
    for sampler in (loader.sampler, batch_sampler, getattr(batch_sampler, "sampler", None)):
        if isinstance(sampler, DistributedSampler):
            if (sampler.num_replicas, sampler.rank) != (share.count, share.index):
                raise ValueError(
                    f"The loader's `{type(sampler).__name__}(num_replicas={sampler.num_replicas}, "
                    f"rank={sampler.rank})` reads another part than this rank, which is {share.index} of "
                    f"{share.count}. Leave the sampler out: `setup_dataloaders` shares the data out."
                )
            return True
    return False


def refuse_pipe(dataset: object) -> None:
    """Raise ValueError for a data pipe, which torch's loader shares out by itself."""
    if isinstance(dataset, IterDataPipe):
        raise ValueError(
            f"`{type(dataset).__name__}` is a data pipe, which shards itself in torch's `DataLoader` where it has a "
            "`sharding_filter`. Pass `use_distributed_sampler=False`, or make it an `IterableDataset`."
        )
