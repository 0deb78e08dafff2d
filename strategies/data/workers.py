"""The `worker_init_fn` of prepared loaders: workers end with their rank and not before, and have seeds of their own.

SLURM and systemd signal every process of a job. The signals that stop a job are handled by the rank: a worker that
died of one would raise in the rank while it writes its last checkpoint. A worker ignores them; when the rank exits,
workers that are still running are killed.

If ranks are seeded alike, torch seeds worker `i` of every rank alike, and augmentations would repeat on every rank.
Over a map-style dataset each batch has a seed of its own, too, for what a worker draws while it loads the batch. So
augmentation differs between ranks, epochs and batches, whichever worker loads them, and a run that is resumed within an
epoch repeats it, although its workers loaded none of the batches before. Costs about 20 us per batch.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from multiprocessing import active_children, resource_tracker
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from typing import Any, final
from weakref import WeakSet

from torch.utils.data import DataLoader, Dataset, get_worker_info

from fabric.strategies.data.iterable import ReseededStream, SharedStream
from fabric.strategies.data.rng import mix, process_rngs

MIN_CORES = 4
"""With fewer cores, workers would take time from the training process itself. A guess, not a measurement."""
STOP_SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGUSR1", "SIGUSR2") if name in dir(signal)]


@final
class WorkerStart:
    """The `worker_init_fn` of a loader's copy; calls the user's last."""

    def __init__(self, share_index: int, loader: DataLoader[Any]) -> None:
        self.share_index, self.init = share_index, loader.worker_init_fn
        self.start_method = start_method_of(loader) if loader.num_workers > 0 else None

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Context in which workers are started: they, and a fork server for them, start with stop signals blocked."""
        if self.start_method is None or not hasattr(signal, "pthread_sigmask"):
            yield
            return
        before = set(active_children())
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            if self.start_method != "fork":
                resource_tracker.ensure_running()  # here, because it unblocks SIGTERM
                signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            _workers_of(os.getpid()).update(set(active_children()) - before)

    def __call__(self, worker_id: int) -> None:
        _ignore_stop_signals()
        info = get_worker_info()
        assert info is not None
        # WorkerInfo guards its attributes, and users read both in their own `worker_init_fn`.
        while isinstance(info.dataset, (ReseededStream, SharedStream, SeededDataset)):
            object.__setattr__(info, "dataset", info.dataset.dataset)
        if self.share_index:
            seed = mix(info.seed, self.share_index)
            object.__setattr__(info, "seed", seed)
            for rng in process_rngs():
                rng.seed(seed)
        if self.init is not None:
            self.init(worker_id)


def start_method_of(loader: DataLoader[Any]) -> str:
    """The start method of the loader's workers: "fork", "forkserver" or "spawn"."""
    context = loader.multiprocessing_context
    if context is not None:
        return str(context.get_start_method())
    # Without `allow_none`, the call would fix the default start method of the process.
    return multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]


def advice(loader: DataLoader[Any], launcher: str, num_cores: int) -> str | None:
    """A warning about workers for whose batches an accelerator would wait, in a rank started by `launcher`, on a
    machine with so many cores; None if there is none."""
    if num_cores < MIN_CORES:
        return None
    if loader.num_workers == 0:
        return (
            f"`DataLoader(num_workers=0)` loads each batch while the device waits, on a machine with {num_cores} "
            "cores. Pass `num_workers=2` or more (the ranks of a machine share its cores)."
        )
    start_method = start_method_of(loader)
    if start_method == "fork" or loader.persistent_workers:
        return None
    return (
        f"`DataLoader(num_workers={loader.num_workers})` starts its workers by {start_method} in a rank started by "
        f"{launcher}: each imports torch anew, every epoch. Pass `persistent_workers=True`."
    )


@cache
def _workers_of(rank_pid: int) -> WeakSet[BaseProcess]:
    """The workers that the process has started; when it exits, those that still run are killed."""
    workers: WeakSet[BaseProcess] = WeakSet()
    Finalize(None, _kill, (workers,), exitpriority=0)  # before `multiprocessing` terminates its children and waits
    return workers


def _kill(workers: Iterable[BaseProcess]) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises for a worker that is killed
    for worker in workers:
        worker.kill()


def _ignore_stop_signals() -> None:
    for number in STOP_SIGNALS:
        if number == signal.SIGTERM:  # by a function, so that programs which a dataset runs can be terminated
            signal.signal(number, lambda number, frame: None)
            signal.siginterrupt(number, False)
        elif signal.getsignal(number) is not None:  # None: `faulthandler` prints the stack on it
            signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


@final
@dataclass(frozen=True, slots=True)
class Seeded:
    """An index or the indices of a batch, with a seed."""

    value: Any
    seed: int


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
    if not isinstance(indices, Seeded):
        return indices
    for rng in process_rngs():
        rng.seed(indices.seed)
    return indices.value
