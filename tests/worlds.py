"""Run a test's body on every rank of a real world: `run_world(2, body)`.

Write `from worlds import run_world` (pytest puts `tests/` on the path). The body is a function at the top level of
the test's module, called as `body(world, *args)`; what it returns, and its arguments, travel by pickle. Ranks come
from a forkserver with torch preloaded: the first world of a session takes the import of torch, later ones 25-50 ms.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import pickle
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

from fabric.launchers.world import Rendezvous, World

R = TypeVar("R")


def run_world(size: int, body: Callable[..., R], *args: Any) -> list[R]:
    """Call `body(world, *args)` on `size` processes, and give what they returned, in rank order."""
    from torch.distributed import TCPStore

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo"])
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    module = sys.modules[body.__module__]
    payload = pickle.dumps((body, args))
    ranks, pipes = [], []
    for rank in range(size):
        world = World(
            rank=rank, size=size, local_rank=rank, local_size=size, launcher="forkserver",
            rendezvous=Rendezvous(address="127.0.0.1", port=store.port, hosted=True) if size > 1 else None,
        )
        reader, writer = multiprocessing.Pipe(duplex=False)
        process = context.Process(target=_rank, args=(module.__name__, module.__file__, payload, world, writer))
        process.start()
        writer.close()
        ranks.append(process)
        pipes.append(reader)
    results: list[Any] = [None] * size
    try:
        waiting = dict(zip(pipes, range(size), strict=True))
        while waiting:
            for pipe in wait(list(waiting)):
                rank = waiting.pop(pipe)
                try:
                    good, value = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    ranks[rank].join(5)
                    raise RuntimeError(f"rank {rank} left without a result: exit code {ranks[rank].exitcode}") from None
                if not good:
                    raise RuntimeError(f"rank {rank} failed:\n{value}")
                results[rank] = value
        for process in ranks:
            process.join(10)
    finally:
        for process, pipe in zip(ranks, pipes, strict=True):
            process.kill()
            process.join()
            process.close()
            pipe.close()
    return results


def _rank(name: str, path: str, payload: bytes, world: World, writer: Connection) -> None:
    import torch

    torch.set_num_threads(max(1, 2 // world.size))
    try:
        _import_test_module(name, path)
        body, args = pickle.loads(payload)
        message = (True, body(world, *args))
    except BaseException:
        message = (False, traceback.format_exc())
    writer.send_bytes(pickle.dumps(message))


def _import_test_module(name: str, path: str) -> None:
    """Make the test's module importable under the name that pytest gave it, whatever the import mode."""
    if name in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
