"""Containers, and how many workers a loader may have."""

from __future__ import annotations

from typing import Any

from fabric.launchers.process.os_process import num_cores


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
    cores = num_cores()
    return max(1, cores // local_world_size)
