"""Pipelines of webdataset: how they split their shards over ranks, and how they shuffle.

Recognised by the module of their stages: `webdataset` need not be installed. Tested with webdataset 1.0.
"""

from __future__ import annotations

import functools
import importlib
import secrets
from typing import Any


def split(stage: Any) -> tuple[int, int] | None:
    """The number of ranks and the rank by which a stage splits shards; None if the stage is not `split_by_node`."""
    splitter = stage.func if isinstance(stage, functools.partial) else stage
    names = getattr(splitter, "__module__", None), getattr(splitter, "__name__", None)
    if names != ("webdataset.shardlists", "split_by_node"):
        return None
    group = stage.keywords.get("group") if isinstance(stage, functools.partial) else None
    rank, world_size, *_ = importlib.import_module("webdataset.utils").pytorch_worker_info(group=group)
    return world_size, rank


def shuffle_states(dataset: object) -> list[str]:
    """The seed of each stage that shuffles. Without one webdataset seeds by the clock: then a random string."""
    stages = getattr(dataset, "pipeline", None)
    return [_seed(stage) for stage in stages if _shuffles(stage)] if isinstance(stages, list) else []


def _shuffles(stage: Any) -> bool:
    if type(stage).__module__ != "webdataset.filters":
        return False
    if type(stage).__name__ == "detshuffle":
        return True
    size = (*getattr(stage, "args", ()), 1000)[0]  # `shardshuffle=False` makes a shuffle with a buffer of size 0
    return getattr(getattr(stage, "f", None), "__name__", None) == "_shuffle" and bool(size)


def _seed(stage: Any) -> str:
    seed = stage.seed if type(stage).__name__ == "detshuffle" else stage.kw.get("seed")
    return secrets.token_hex(8) if seed is None else repr(seed)
