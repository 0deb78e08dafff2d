"""Performance warnings about a loader's workers. Only for accelerators, which would have to wait for it."""

from __future__ import annotations

from dataclasses import dataclass

from torch.utils.data import DataLoader

from fabric.launchers.process.os_process import num_cores
from fabric.strategies.data.workers import start_method_of

MIN_CORES = 4
"""With fewer cores, workers would take time from the training process itself. A guess, not a measurement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """How a loader loads its batches."""

    num_workers: int
    persistent_workers: bool
    start_method: str
    """Start method of the workers: fork, forkserver, spawn."""
    launcher: str
    """Name of the launcher that started this rank."""
    num_cores: int
    accelerated: bool
    """Whether the batches go to a device other than the CPU."""


def advice(loading: Loading) -> str | None:
    """A warning with what was written, what it costs and what to write instead; None if there is none."""
    if not loading.accelerated or loading.num_cores < MIN_CORES:
        return None
    if loading.num_workers == 0:
        return (
            f"`DataLoader(num_workers=0)` loads each batch while the device waits, on a machine with "
            f"{loading.num_cores} cores. Pass `num_workers=2` or more (the ranks of a machine share its cores)."
        )
    if loading.start_method != "fork" and not loading.persistent_workers:
        return (
            f"`DataLoader(num_workers={loading.num_workers})` starts its workers by {loading.start_method} in a rank "
            f"started by {loading.launcher}: each imports torch anew, every epoch. Pass `persistent_workers=True`."
        )
    return None


def loading_of(loader: DataLoader[object], *, launcher: str, accelerated: bool) -> Loading:
    """How `loader` loads its batches on this machine."""
    return Loading(
        num_workers=loader.num_workers,
        persistent_workers=loader.persistent_workers,
        start_method=start_method_of(loader),
        launcher=launcher,
        num_cores=num_cores(),
        accelerated=accelerated,
    )
