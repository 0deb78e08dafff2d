"""The parts of Lightning Fabric's `utilities` that programs import."""

from __future__ import annotations

from fabric.lightning.utilities.apply_func import move_data_to_device
from fabric.lightning.utilities.data import AttributeDict, suggested_max_num_workers
from fabric.lightning.utilities.rank_zero import rank_zero_deprecation, rank_zero_info, rank_zero_only, rank_zero_warn
from fabric.lightning.utilities.seed import seed_everything
from fabric.lightning.utilities.throughput import Throughput, ThroughputMonitor, measure_flops

__all__ = [
    "AttributeDict",
    "Throughput",
    "ThroughputMonitor",
    "measure_flops",
    "move_data_to_device",
    "rank_zero_deprecation",
    "rank_zero_info",
    "rank_zero_only",
    "rank_zero_warn",
    "seed_everything",
    "suggested_max_num_workers",
]
