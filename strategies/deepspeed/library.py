"""DeepSpeed, imported and initialised without a trace: what it does to the process on the way is undone or kept off.

Left to itself it writes environment variables, logs to stdout, and compiles a C++ extension that training never uses
(100 s, and an error without a compiler). It also keeps the process groups of a world that is gone. Everything here is
called in a rank, never in the process that the user started.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from importlib import import_module
from typing import Any

import torch.distributed as dist

from fabric.launchers.world import World

RELEASES = "0.19"
"""What the strategy was written against: it reads gradients and states where this release keeps them."""


def why_not(found: str | None) -> str | None:
    """None where the release `found` is one that is known; otherwise a sentence."""
    if found is None:
        return (
            "`strategy='deepspeed'` needs the package deepspeed, which is not installed. "
            "Run `pip install 'torchfabric[deepspeed]'`."
        )
    if not found.startswith(f"{RELEASES}."):
        return (
            f"`strategy='deepspeed'` works with DeepSpeed {RELEASES}, and {found} is installed. "
            f"Run `pip install 'deepspeed=={RELEASES}.*'`."
        )
    return None


def join(world: World, device_type: str) -> None:
    """Let DeepSpeed use the process group that the ranks have met in. Ranks: all call it, once per world."""
    with undisturbed(world, device_type) as deepspeed:
        from deepspeed.utils import groups

        groups._release_process_group_references()  # of an earlier world in this process
        operators = deepspeed.ops.__compatible_ops__
        built = operators.get("deepspeed_shm_comm")
        operators["deepspeed_shm_comm"] = False  # for inference alone; it would be compiled here
        try:
            deepspeed.init_distributed(dist_backend=dist.get_backend(), auto_mpi_discovery=False, verbose=False)
        finally:
            operators["deepspeed_shm_comm"] = built
        _import_muon()
        # The names that DeepSpeed takes are deprecated in torch 2.13, and warn at every call.
        backend = deepspeed.comm.comm.cdb
        if hasattr(dist, "all_gather_single"):
            backend.all_gather_function = dist.all_gather_single
            backend.reduce_scatter_function = dist.reduce_scatter_single


def _import_muon() -> None:
    """Let the functions of DeepSpeed's own Muon be compiled where they are first called.

    It compiles them where it defines them, and looks at Muon whatever the optimizer is: that imports torch's compilers,
    two seconds in every rank (0.19).
    """
    from deepspeed.runtime import compiler

    compile = compiler.compile

    def compile_when_called(*options: Any, **more: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
            compiled = cache(lambda: compile(*options, **more)(function))
            return wraps(function)(lambda *args, **kwargs: compiled()(*args, **kwargs))

        return decorate

    compiler.compile = compile_when_called
    try:
        import_module("deepspeed.runtime.zero.muon.original_muon")
    finally:
        compiler.compile = compile


@contextmanager
def undisturbed(world: World, device_type: str) -> Iterator[Any]:
    """Gives the module `deepspeed`. It finds the environment it looks for; afterwards the environment is as before."""
    before = dict(os.environ)
    meeting = world.rendezvous
    os.environ.update(
        DS_ACCELERATOR=device_type,
        RANK=str(world.rank),
        WORLD_SIZE=str(world.size),
        LOCAL_RANK=str(world.local_rank),
        MASTER_ADDR="127.0.0.1" if meeting is None else meeting.address,
        MASTER_PORT="0" if meeting is None else str(meeting.port),
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of what it imports of torch
            import deepspeed
            from deepspeed.accelerator import get_accelerator

            _to_stderr()
            name = get_accelerator().device_name()
            if name != device_type:
                raise RuntimeError(
                    f"DeepSpeed runs on one kind of device per process: it has used {name!r} here, and "
                    f"{device_type!r} is asked for now. Start a process of its own for each."
                )
            yield deepspeed
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)


@contextmanager
def local_rank(world: World) -> Iterator[None]:
    """Within it, the environment has LOCAL_RANK: at stage 3 DeepSpeed looks there in the middle of training."""
    before = os.environ.get("LOCAL_RANK")
    os.environ["LOCAL_RANK"] = str(world.local_rank)
    try:
        yield
    finally:
        del os.environ["LOCAL_RANK"]
        if before is not None:
            os.environ["LOCAL_RANK"] = before


def _to_stderr() -> None:
    """Stdout is the user's. What is an error still shows; that any optimizer is 'untested' does not."""
    logger = logging.getLogger("DeepSpeed")
    logger.setLevel(max(logger.level, logging.ERROR))
    for handler in logger.handlers:
        if isinstance(handler, logging.StreamHandler) and handler.stream is sys.stdout:
            handler.setStream(sys.stderr)
