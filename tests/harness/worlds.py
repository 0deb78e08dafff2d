"""Run a test's body on every rank of a real world: `run_world(2, body)`.

Write `from worlds import run_world` (pytest puts `tests/harness/` on the path). The body is a function at the top level
of the test module, called as `body(world, *args)`; what it returns, and its arguments, are pickled. Ranks come
from a fork server that has imported torch and fabric (`preloaded.py`): the first world of a session takes these
imports, later ones 25-50 ms.
"""

from __future__ import annotations

import functools
import importlib.util
import pickle
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from devices import use_device

from fabric.launchers.launcher import Topology
from fabric.launchers.start_methods import PRELOAD, forkserver
from fabric.launchers.world import World

R = TypeVar("R")


def run_world(size: int, body: Callable[..., R], *args: Any) -> list[R]:
    """Call `body(world, *args)` on `size` processes, and return their results, in rank order.

    Raises: WorkerError: a rank raised, died, or left without a result.
    """
    module = sys.modules[body.__module__]
    launcher = forkserver(Topology(num_processes=size), (*PRELOAD, "preloaded"))
    return launcher.launch_all(_rank, module.__name__, module.__file__, pickle.dumps((body, args)))


@functools.cache
def preload(*modules: str) -> None:
    """Make the fork server import what ranks need, and `modules`, for tests that call `fabric.launch(function)`."""
    launcher = forkserver(Topology(num_processes=1), (*PRELOAD, "preloaded", *modules))
    launcher.launch_all(_nothing)


def _nothing(world: World) -> None:
    pass


def _rank(world: World, name: str, path: str, call: bytes) -> Any:
    use_device(world.local_rank)
    _import_test_module(name, path)
    body, args = pickle.loads(call)
    return body(world, *args)


def _import_test_module(name: str, path: str) -> None:
    """Make the test's module importable under the name that pytest gave it, whatever the import mode."""
    if name in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
