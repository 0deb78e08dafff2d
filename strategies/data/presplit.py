"""Loaders whose data is split over ranks already: recognised, checked, and not split again.

A loader is recognised by attributes of a sampler, an iterable dataset or a node of a pipeline that hold a rank and a
number of ranks (`ATTRIBUTES`). A map-style dataset that was split before (`datasets.Dataset.shard`, `Subset`) has no
such attributes; there ranks find that their data differs: see `comparison.py`.
"""

import functools
import importlib
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from fabric.strategies.data.partition import Share

ATTRIBUTES = (
    ("num_replicas", "rank"),  # torch, torchdata, transformers, timm and torchvision: samplers
    ("world_size", "rank"),  # torchdata's nodes, datasets' DistributedConfig
    ("world_size", "global_rank"),  # litdata
    ("num_ranks", "rank"),  # mosaicml-streaming
    ("_world_size", "_rank"),  # detectron2
    ("num_processes", "process_index"),  # accelerate
    ("num_processes", "process_rank"),
    ("data_parallel_size", "data_parallel_rank"),  # Megatron
)
"""Attributes with the number of ranks that data is split over, and the rank that an object reads for."""
HOLDERS = ("_distributed", "distributed_env", "_parallel_rank_world")
"""Attributes of iterable datasets that hold an object with a rank and a world size: of datasets, litdata and
mosaicml-streaming."""
INNER = ("sampler", "batch_sampler", "dataset", "datasets", "root", "source", "iterable", "pipeline")
"""Attributes in which a loader, a wrapper or a node of a pipeline holds what it reads."""

WEBDATASETS = ("webdataset.shardlists", "split_by_node")
"""Module and name of the function that is a stage of every pipeline that is split."""


def split_of(loader: object, share: Share) -> str | None:
    """What splits the loader's data already, as the user would write it with its arguments; None if nothing does.

    Raises: ValueError: the data is split for another rank, or for another number of ranks, than `share`; or the data is
    a pipeline of webdataset that is not split.
    """
    parts = list(parts_of(loader))
    for part in parts:
        words, count, index = ("", 1, 0) if isinstance(part, DataLoader) else _split(part)
        if count > 1:
            if (count, index) != (share.count, share.index):
                raise ValueError(
                    f"The loader's `{words}` reads another part than this rank, which is {share.index} of "
                    f"{share.count}. Leave it out: `setup_dataloaders` splits the data. Or pass "
                    "`use_distributed_sampler=False`, and each rank reads its own loader as it is."
                )
            return words
    if share.count > 1 and any(type(part).__module__.startswith("webdataset.") for part in parts):
        raise ValueError(
            "The pipeline of webdataset is not split over the ranks, and may shuffle differently on each. Pass "
            "`nodesplitter=webdataset.split_by_node`."
        )
    return None


def parts_of(loader: object) -> Iterator[object]:
    """The objects through which the loader reads, outermost first, each once. Without map-style datasets: there the
    sampler splits, and the dataset may have a rank for other reasons."""
    found, waiting = {id(loader)}, [("", loader)]
    while waiting:
        place, part = waiting.pop(0)
        if place not in ("dataset", "datasets") or isinstance(part, IterableDataset):
            yield part
        for name in INNER:
            inner = getattr(part, name, None)
            for each in inner if name in ("datasets", "pipeline") and isinstance(inner, (list, tuple)) else [inner]:
                if each is not None and id(each) not in found:
                    found.add(id(each))
                    waiting.append((name, each))


def _split(part: Any) -> tuple[str, int, int]:
    """What splits the data of an object, in how many parts, and which of them it reads."""
    function = part.func if isinstance(part, functools.partial) else part
    if (getattr(function, "__module__", ""), getattr(function, "__name__", "")) == WEBDATASETS:
        group = part.keywords.get("group") if isinstance(part, functools.partial) else None
        index, count, *_ = importlib.import_module("webdataset.utils").pytorch_worker_info(group=group)
        return f"split_by_node(world_size={count}, rank={index})", count, index
    for holder in (part, *(getattr(part, name, None) for name in HOLDERS)):
        for count_name, index_name in ATTRIBUTES:
            count, index = getattr(holder, count_name, None), getattr(holder, index_name, None)
            if type(count) is int and type(index) is int:
                return f"{type(part).__name__}({count_name}={count}, {index_name}={index})", count, index
    return "", 1, 0
