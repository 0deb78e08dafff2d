"""Run a test's body on every rank of a real world: `run_world(2, body)`; several in the same ranks: `run_each`,
`launch_each`.

Write `from worlds import run_world` (pytest puts `tests/harness/` on the path). The body is a function at the top level
of the test module, called as `body(world, *args)`; what it returns, and its arguments, are pickled. Ranks come
from a fork server that has imported torch and fabric (`preloaded.py`): the first world of a session takes these
imports, later ones 25-50 ms. A world of two ranks costs 0.1 s of processor time, and with the first step of a strategy
0.2 s to 0.4 s; one more strategy in the same ranks costs 0.04 s to 0.1 s.
"""

from __future__ import annotations

import functools
import importlib.util
import pickle
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from devices import ACCELERATOR, use_device

from fabric import Fabric
from fabric.launchers.launcher import Topology
from fabric.launchers.start_methods import PRELOAD, forkserver
from fabric.launchers.world import World

R = TypeVar("R")


def run_world(size: int, body: Callable[..., R], *args: Any) -> list[R]:
    """Call `body(world, *args)` on `size` processes, and return their results, in rank order.

    Raises: WorkerError: a rank raised, died, or left without a result.
    """
    return _launch(size, sys.modules[body.__module__], body, args)


def run_each(size: int, body: Callable[..., R], calls: Sequence[tuple[Any, ...]]) -> list[list[R]]:
    """As `run_world`, for each of several tuples of arguments, one after the other in the same ranks: for each of them
    the results of all ranks."""
    of_ranks = _launch(size, sys.modules[body.__module__], _each, (body, list(calls)))
    return [list(of_call) for of_call in zip(*of_ranks, strict=True)]


def launch_each(size: int, function: Callable[..., R], calls: Sequence[tuple[Any, ...]], **options: Any) -> list[R]:
    """What rank 0 gets from `function(fabric, *args)` for each `(strategy, *args)`, one after the other in the same
    ranks, each with a fabric of its own. One rank is this process. `options` are those of `Fabric`."""
    given = [(function, strategy, args, options) for strategy, *args in calls]
    if size == 1:
        return _each(World(), _with_a_fabric, given)
    return _launch(size, sys.modules[function.__module__], _each, (_with_a_fabric, given))[0]


def _launch(size: int, module: Any, body: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    launcher = forkserver(Topology(num_processes=size), (*PRELOAD, "preloaded"))
    return launcher.launch_all(_rank, module.__name__, module.__file__, pickle.dumps((body, args)))


def _each(world: World, body: Callable[..., R], calls: list[tuple[Any, ...]]) -> list[R]:
    found = []
    for arguments in calls:
        try:
            found.append(body(world, *arguments))
        except Exception as error:
            error.add_note(f"with {arguments}")
            raise
    return found


def _with_a_fabric(world: World, function: Callable[..., R], strategy: Any, args: list[Any], options: Any) -> R:
    with Fabric(**{"accelerator": ACCELERATOR, "devices": world.size, "strategy": strategy, **options}) as fabric:
        fabric.launch()
        return function(fabric, *args)


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
