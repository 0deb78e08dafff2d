"""The `worker_init_fn` of prepared loaders: workers end with their rank and not before, and are seeded as the rank is.

SLURM and systemd signal every process of a job. The rank handles the signals that stop a job: a worker that died of
such a signal would raise in the rank while the rank writes its last checkpoint. A worker ignores these signals; when
the rank exits, workers that are still running are killed.

Over a map-style dataset each batch has its own seed for the random numbers that a worker draws while it loads the
batch. The seed follows from the seed of the rank, the epoch and the batch. So random numbers differ between epochs,
batches, and ranks with different seeds, whichever worker loads a batch; and a run that is resumed within an epoch
repeats them, although its workers have not loaded the batches before. Costs about 20 us per batch.
"""

import multiprocessing
import os
import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from multiprocessing import active_children, resource_tracker
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from typing import Any, final
from weakref import WeakSet

from torch.utils.data import DataLoader, get_worker_info

from fabric.strategies.data.epochs import Epoch
from fabric.strategies.data.rng import mix, seed_process
from fabric.strategies.data.sources import PreparedStream, SeededDataset
from fabric.strategies.data.token_batches import TokenStream

MIN_CORES = 4
"""With fewer cores, workers would take time from the training process itself. A guess, not a measurement."""
STOP_SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGUSR1", "SIGUSR2") if name in dir(signal)]


@final
class WorkerStart:
    """The `worker_init_fn` of a loader's copy; calls the user's last."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.init = loader.worker_init_fn
        self.seed: int | None = None
        """Of the workers that are started next; None: torch's."""
        self.of_stream = 0
        """That of workers that read the same stream, on every rank."""
        self.start_method = start_method_of(loader) if loader.num_workers > 0 else None

    def announce(self, epoch: Epoch) -> None:
        """Seed the workers that are started next by this rank's seed, although ranks share the order of the epoch."""
        self.seed, self.of_stream = epoch.seed_of_batch(0), mix("stream", epoch.seed, epoch.number)

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
        while isinstance(info.dataset, (PreparedStream, SeededDataset)):
            object.__setattr__(info, "dataset", info.dataset.dataset)
        if self.seed is not None:
            is_whole = isinstance(info.dataset, TokenStream)  # see Note [Workers of a token stream]
            seed = self.of_stream + worker_id if is_whole else mix(self.seed, worker_id)
            object.__setattr__(info, "seed", seed)
            seed_process(seed)
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
    """A warning if an accelerator would wait for batches of the loader's workers, in a rank started by `launcher`, on a
    machine with `num_cores` cores; otherwise None."""
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
    """The workers that the process has started. Workers that still run when it exits are killed."""
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
