"""Replicas of XLA on the CPU, as threads of this process: `run_replicas(body)`, and what torch_xla 2.9 lacks for them.

Test-only. As shipped, the first collective between replicas hangs on PJRT's CPU client, and XLA ends the process after
15 s. Note [Why replicas hang] says what `mend` changes. A job takes 10-20 ms once its graphs are compiled.

# Note [Why replicas hang]
1. The client tells the participants of a collective by their compiled module. Two threads that compile one graph at the
   same time make two modules, which never meet. So graphs are compiled and queued under one lock: the first thread
   compiles, the others find it done.
2. Freeing a tensor that a queued graph still reads blocks with Python's lock held, and the graph may be waiting for a
   thread that wants that lock. So a sync returns once its device is idle; it waits without Python's lock.
3. A sync on a thread whose device has no live tensor waits for the first device instead. So each device keeps one.
4. Reading a tensor (`item`, `cpu`, ...) compiles inside of C++. So it is synced before, under the lock.
5. Each waiting replica takes a thread of torch_xla's pool, which has one for each core: XLA_THREAD_POOL_SIZE.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from typing import Any, TypeVar

R = TypeVar("R")

READS = ("item", "cpu", "numpy", "tolist", "to", "__bool__", "__float__", "__int__", "__repr__")
"""Methods of a tensor that read its values on the host."""


CHOSEN = (
    "sgd", "adamw", "groups", "repeated_backward", "scalars", "accumulate_and_clip", "clip_value", "weights",
    "not_finite", "evaluate_between", "dropout", "tied", "frozen", "buffers", "written_weights", "unused",
    "later_optimizers", "joint_optimizer", "bare_parameters", "empty_init", "optimizer_state", "uneven", "collective",
)  # fmt: skip
"""The cases of `make test-xla` where replicas run all of them: one for each way in which graphs come to be. The rest
are left to `make check`."""
THE_REST = "the_rest"


def by_part() -> list[Any]:
    """Every case of the suite with its part, as parameters: "chosen", or the rest, whose ids say so."""
    import pytest

    from fabric.testing import cases

    return [
        pytest.param("chosen", case, id=str(case)) if case.name in CHOSEN else
        pytest.param(THE_REST, case, id=f"{case}-{THE_REST}")
        for case in cases()
    ]  # fmt: skip


MENDING = threading.Lock()


def mend() -> None:
    """Let replicas that are threads run collectives, in this process from now on. A second call does nothing; replicas
    may call it at the same time."""
    with MENDING:
        _mend()


@functools.cache
def _mend() -> None:
    import torch
    import torch_xla
    import torch_xla.core.xla_model as xm

    devices = int(os.environ.get("CPU_NUM_DEVICES", "1"))
    assert int(os.environ.get("XLA_THREAD_POOL_SIZE", "0")) >= 2 * devices, "set it before torch_xla is imported"
    native = torch_xla._XLAC
    mark, sync = native._xla_step_marker, native._xla_sync_multi
    compiling = threading.RLock()
    alive: dict[str, Any] = {}

    def one_by_one(queue: Callable[[], None]) -> None:
        device = native._xla_get_default_device()
        name = xm._xla_real_device(device)
        if name not in alive:
            alive[name] = torch.zeros(1).to(device)
        native._xla_wait_device_ops(devices=[name])
        with compiling:
            queue()
        native._xla_wait_device_ops(devices=[name])

    def step_marker(device: str, devices: list[str], wait: bool = False, reset_scope: bool = True) -> None:
        one_by_one(lambda: mark(device, devices, wait=False, reset_scope=reset_scope))

    def sync_multi(tensors: list[Any], devices: Any = (), wait: bool = True, sync_xla_data: bool = True) -> None:
        one_by_one(lambda: sync(tensors, list(devices), wait=False, sync_xla_data=sync_xla_data))

    def synced_first(name: str) -> None:
        read = getattr(torch.Tensor, name)

        @functools.wraps(read)
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            words = [str(word) for word in (*args, *kwargs.values())]
            if self.device.type == "xla" and (name != "to" or "cpu" in words):
                sync_multi([self.detach()])
            return read(self, *args, **kwargs)

        setattr(torch.Tensor, name, method)

    native._xla_step_marker, native._xla_sync_multi = step_marker, sync_multi
    for name in READS:
        synced_first(name)


def run_replicas(body: Callable[..., R], *args: Any) -> list[R]:
    """Call `body(world, *args)` on a thread for each of the CPU_NUM_DEVICES devices, and give what they returned, in
    rank order. Raises what the first replica raised."""
    from fabric.launchers.world import World
    from fabric.launchers.xla import run_on_devices

    mend()
    return [result for _, result in sorted(run_on_devices(World(), body, args).items())]


def launch_replicas(fabric: Any, function: Callable[..., R], *args: Any, **kwargs: Any) -> list[R]:
    """What `fabric.launch(function, ...)` runs on every rank, here: in this process, all results given back."""
    from fabric.fabric import _run

    return run_replicas(_run, fabric, function, args, kwargs)
