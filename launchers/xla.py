"""Replicas of XLA: a process for each chip of a TPU, and on PJRT's CPU client a thread for each device of one process.

PJRT decides which of the two; a replica's place is what PJRT says it is. Processes come from the fork server, so that
ours supervise them: the first failure ends the others, and nothing outlives the launch. This file and
`xla_internals.py` alone know torch_xla here, and import it in the ranks: importing it patches torch.
"""

import pickle
import sys
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import replace
from typing import Any, NoReturn, TypeVar, final

from fabric.launchers.environments.xla import PJRT
from fabric.launchers.launcher import Launcher, Topology
from fabric.launchers.process import pickling
from fabric.launchers.start_methods import forkserver
from fabric.launchers.world import Rendezvous, World

R = TypeVar("R")


@final
class XLA(Launcher):
    """A replica for each device: `topology.num_processes` of them on this node."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology

    def launch(self, worker: Callable[..., R], *args: Any) -> R:
        return self.launch_all(worker, *args)[0]

    def launch_all(self, worker: Callable[..., R], *args: Any) -> list[R]:
        """As `launch`, but the results of all replicas of this node come home, in rank order.

        Where replicas are threads, a failure is reported as that of their process, rank 0.
        """
        _refuse_touched()
        in_threads = PJRT.of().client == "CPU"
        processes = replace(self.topology, num_processes=1) if in_threads else self.topology
        of_processes = forkserver(processes).launch_all(run_on_devices, worker, args)
        return [result for _, result in sorted(item for results in of_processes for item in results.items())]

    def enter(self) -> NoReturn:
        raise ValueError(
            "`launcher='xla'` starts its replicas at a function, and `launch()` got none. Write `fabric.launch(main)`, "
            "or call `launch()` in processes that `torch_xla.launch` started on a TPU."
        )


def run_on_devices(process: World, worker: Callable[..., R], args: tuple[Any, ...]) -> dict[int, R]:
    """Call `worker(world, *args)` on a thread for each device of this process; the results, by rank.

    Each replica gets copies of its own, as a process would. Raises what the first replica raised, at once: the others
    may be waiting for that one, in XLA, where nothing reaches them.
    """
    from fabric.launchers import xla_internals

    xla_internals.initialize_multiprocess(process.local_rank, process.local_size)
    import torch_xla
    import torch_xla.runtime as xr
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    devices = torch_xla.devices()
    size, store = xr.global_device_count(), None
    rendezvous = process.rendezvous
    if rendezvous is None and size > 1:
        # A store for the replicas of this one process.
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        rendezvous = Rendezvous(address="127.0.0.1", port=store.port, hosted=True)
    call = pickling.dumps((worker, args))
    running: list[Future[tuple[int, R]]] = []
    for index, device in enumerate(devices):
        world = World(
            rank=xla_internals.native._xla_get_device_ordinal(str(device)),
            size=size,
            local_rank=process.local_rank * len(devices) + index,
            local_size=process.local_size * len(devices),
            node_rank=process.node_rank,
            num_nodes=process.num_nodes,
            rendezvous=rendezvous,
            launcher="xla",
        )
        running.append(_in_thread(_run, str(device), world, call))
    done, _ = wait(running, return_when=FIRST_EXCEPTION)
    for future in running:
        if future in done:
            future.result()  # raises where it failed
    del store
    return dict(future.result() for future in running)


def _run(device: str, world: World, call: bytes) -> tuple[int, Any]:
    from fabric.launchers import xla_internals

    xla_internals.native._xla_set_default_device(device)
    worker, args = pickle.loads(call)
    return world.rank, worker(world, *args)


def _in_thread(function: Callable[..., R], *args: Any) -> Future[R]:
    """Run it on a thread of its own, which does not keep the process from ending."""
    future: Future[R] = Future()

    def run() -> None:
        try:
            future.set_result(function(*args))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="fabric-replica", daemon=True).start()
    return future


def _refuse_touched() -> None:
    """Raise RuntimeError where this process holds the devices that its replicas would need."""
    if "torch_xla" not in sys.modules:
        return
    from fabric.launchers.xla_internals import runtime_is_initialized

    if runtime_is_initialized():
        raise RuntimeError(
            "This process has used an XLA device already, and holds them all: the replicas could not open them. Launch "
            "before the first `torch_xla.device()`, `torch_xla.sync()` or tensor on 'xla', in a fresh process."
        )
