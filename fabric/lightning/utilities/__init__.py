"""The parts of Lightning Fabric's `utilities` that programs import."""

from typing import Any

import torch
from torch import nn

from fabric.launchers.process.os_process import num_cores
from fabric.lightning.utilities.rank_zero import rank_zero_deprecation as rank_zero_deprecation
from fabric.lightning.utilities.rank_zero import rank_zero_info as rank_zero_info
from fabric.lightning.utilities.rank_zero import rank_zero_only as rank_zero_only
from fabric.lightning.utilities.rank_zero import rank_zero_warn as rank_zero_warn
from fabric.lightning.utilities.seed import seed_everything as seed_everything
from fabric.lightning.utilities.throughput import Throughput as Throughput
from fabric.lightning.utilities.throughput import ThroughputMonitor as ThroughputMonitor
from fabric.lightning.utilities.throughput import measure_flops as measure_flops
from fabric.strategies.data.transfer import move


def move_data_to_device(batch: Any, device: torch.device | str | int) -> Any:
    """The same nest, its tensors on the device. A module is moved in place."""
    place = torch.device(device)
    return batch.to(place) if isinstance(batch, nn.Module) else move(batch, place)


class AttributeDict(dict[str, Any]):
    """A dict whose entries can be read and written as attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"There is no entry {name!r}; there are {', '.join(map(repr, self))}.") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def __delattr__(self, name: str) -> None:
        getattr(self, name)  # raises AttributeError
        del self[name]


def suggested_max_num_workers(local_world_size: int) -> int:
    """This process's share of the cores it may run on, at least 1, when `local_world_size` processes share them.

    Raises: ValueError: there is no such number of processes.
    """
    if local_world_size < 1:
        raise ValueError(f"`suggested_max_num_workers({local_world_size})`: write a number of processes from 1 on.")
    return max(1, num_cores() // local_world_size)
