"""Saving and loading a model with AdamW's state on two ranks, against what people use today.

The variants take turns, and a ratio is of one round. They save the same bytes to the same disk, except
torch_checkpointing (TC), of which each rank writes all that it has, replicas too. Lightning Fabric (LF) and Accelerate
(AC) do not flush. Each checkpoint is deleted once it was loaded: the files of all variants would not fit into the page
cache of a machine with 24 GiB, and loading is measured with a warm one. The rows "floor" are what the machine needs for
the bytes alone: each rank writes and flushes its share from memory, or copies from memory as many bytes as it loads.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import rivals
import torch
import torch.distributed.checkpoint as dcp
from timing import Row, in_order, limited, rows
from torch import nn
from torch.distributed.tensor import DTensor

from fabric import Fabric

MODEL_BYTES = int(os.environ.get("BENCH_MODEL_BYTES", 2**30))
"""Of the weights; AdamW has twice as many."""
NUM_ROUNDS = limited(3)
LOOP_SECONDS = 1.0
FLOOR = "floor"


def checkpoints() -> list[Row]:
    """Saving, loading, what the loop waits for, and its speed meanwhile, on two ranks: under ddp, and under fsdp."""
    folder = tempfile.mkdtemp(prefix="bench-checkpoints-", dir=os.environ.get("BENCH_FOLDER"))
    try:
        found = []
        for strategy in ("ddp", "fsdp"):
            ranks = Fabric(accelerator="cpu", strategy=strategy, devices=2, launcher="forkserver")
            found += ranks.launch(_race, folder, strategy) or []
        return found
    finally:
        shutil.rmtree(folder)


def _race(fabric: Fabric, folder: str, strategy: str) -> list[Row]:
    warnings.filterwarnings("ignore")
    rivals.quiet()
    torch.set_num_threads(1)
    size = 2048
    model = nn.Sequential(*(nn.Linear(size, size, bias=False) for _ in range(max(1, MODEL_BYTES // (4 * size**2)))))
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters()))
    fabric.backward(model(torch.rand(2, size)).sum())
    optimizer.step()
    optimizer.zero_grad()
    state = {"model": model, "optimizer": optimizer}
    savers = _savers(fabric, state, strategy)
    times: dict[str, list[float]] = {name: [] for name in savers}
    loading: dict[str, list[float]] = {name: [] for name in savers}
    blocked: dict[str, list[float]] = {"whole save": [], "ours": []}
    speed: dict[str, list[float]] = {"no save": [], "ours": []}
    for turn in range(NUM_ROUNDS + 1):
        for name, (save, load) in in_order(savers, turn):
            path = f"{folder}/{strategy}-{name.replace(' ', '-').replace('.', '')}"
            _keep(times[name], turn, _timed(fabric, lambda save=save, path=path: save(path)))  # type: ignore[misc]
            _keep(loading[name], turn, _timed(fabric, lambda load=load, path=path: load(path)))  # type: ignore[misc]
            _delete(fabric, folder)
        _background(fabric, state, f"{folder}/{strategy}-background", turn, blocked, speed)
        _delete(fabric, folder)
    if not fabric.is_global_zero:
        return []
    ours = "no slower than DCP" if strategy == "fsdp" else "0.77 x"
    what = f"{MODEL_BYTES / 2**30:.2g} GiB and AdamW, {strategy}, 2 ranks"
    return [
        *rows(f"saving {what}", times, ours),
        *rows(f"loading {what}", loading, "0.5 x DCP" if strategy == "fsdp" else "0.25 x"),
        *rows(f"what the loop waits for, {strategy}", blocked, "0.1 x"),
        *rows(f"a step of the loop while saving, {strategy}", speed, "1.05 x"),
    ]


def _keep(values: list[float], turn: int, value: float) -> None:
    if turn > 0:  # the first one is no measurement
        values.append(value)


def _delete(fabric: Fabric, folder: str) -> None:
    """Delete what was saved. Ranks: all."""
    fabric.barrier()
    if fabric.is_global_zero:
        for path in Path(folder).iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    fabric.barrier()


def _background(
    fabric: Fabric,
    state: dict[str, Any],
    path: str,
    turn: int,
    blocked: dict[str, list[float]],
    speed: dict[str, list[float]],
) -> None:
    x = torch.rand(384, 384)

    def step() -> None:
        x @ x

    _keep(blocked["whole save"], turn, _timed(fabric, lambda: fabric.save(path, state)))
    fabric.barrier()
    before = _mean_step(step, lambda: False, LOOP_SECONDS)
    fabric.barrier()
    start = time.perf_counter()
    pending = fabric.save(path, state, blocking=False)
    waited = time.perf_counter() - start
    meanwhile = _mean_step(step, lambda: pending.is_done, 60.0)
    pending.wait()
    fabric.barrier()
    after = _mean_step(step, lambda: False, LOOP_SECONDS)
    _keep(blocked["ours"], turn, waited * 1e6)
    _keep(speed["no save"], turn, (before + after) / 2)
    _keep(speed["ours"], turn, meanwhile)


def _mean_step(step: Callable[[], object], is_over: Callable[[], bool], seconds: float) -> float:
    start, number = time.perf_counter(), 0
    while number == 0 or (not is_over() and time.perf_counter() - start < seconds):
        step()
        number += 1
    return (time.perf_counter() - start) / number * 1e6


def _timed(fabric: Fabric, action: Callable[[], object]) -> float:
    fabric.barrier()
    start = time.perf_counter()
    action()
    fabric.barrier()
    return (time.perf_counter() - start) * 1e6


Pair = tuple[Callable[[str], object], Callable[[str], object]]


def _savers(fabric: Fabric, state: dict[str, Any], strategy: str) -> dict[str, Pair]:
    """How each saves to a path, and loads from it into the same objects."""
    model, optimizer = state["model"], state["optimizer"]
    found: dict[str, Pair] = {}
    if strategy == "ddp":
        found["torch.save"] = (
            lambda path: _torch_save(fabric, path, model, optimizer),
            lambda path: _torch_load(path, model, optimizer),
        )
    found["raw DCP"] = (
        lambda path: dcp.save(_tensors(model, optimizer), checkpoint_id=path),
        lambda path: dcp.load(_tensors(model, optimizer), checkpoint_id=path),
    )
    found["ours"] = (lambda path: fabric.save(path, state), lambda path: fabric.load(path, dict(state)))
    found[FLOOR] = (
        lambda path: _write_share(fabric, path, model, optimizer, strategy),
        lambda path: _copy_from_memory(_local_tensors(model, optimizer)),
    )
    if "TC" in rivals.installed():
        manager = rivals.checkpoint_manager()
        found["TC"] = (
            lambda path: _manager_save(fabric, manager, path, _tensors(model, optimizer)),
            lambda path: manager.load(path, {"state": _tensors(model, optimizer)}),
        )
    if strategy == "ddp" and "AC" in rivals.installed():
        accelerator = rivals.accelerated(model, optimizer)
        found["AC"] = (lambda path: accelerator.save_state(path), lambda path: accelerator.load_state(path))
    if strategy == "ddp" and "LF" in rivals.installed():
        lightning = rivals.lightning("ddp", 2)
        found["LF"] = (
            lambda path: lightning.save(path, {"model": model, "optimizer": optimizer}),
            lambda path: lightning.load(path, {"model": model, "optimizer": optimizer}),
        )
    return found


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """As DCP takes them: shards of DTensors, and tensors of which every rank has all."""
    states = {
        f"optimizer.{index}.{name}": each
        for index, own in optimizer.state_dict()["state"].items()
        for name, each in own.items()
    }
    return {**{f"model.{name}": each for name, each in model.state_dict().items()}, **states}


def _torch_save(fabric: Fabric, path: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if fabric.is_global_zero:
        with open(f"{path}.new", "wb") as file:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
            file.flush()
            os.fsync(file.fileno())
        Path(f"{path}.new").replace(path)


def _torch_load(path: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    content = torch.load(path, weights_only=True)
    model.load_state_dict(content["model"])
    optimizer.load_state_dict(content["optimizer"])


def _local_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """What this rank has of each tensor."""
    tensors = [each.detach() for each in _tensors(model, optimizer).values()]
    return [each.to_local() if isinstance(each, DTensor) else each for each in tensors]


def _write_share(fabric: Fabric, path: str, model: nn.Module, optimizer: torch.optim.Optimizer, strategy: str) -> None:
    """Write and flush what this rank has, or of replicas every second tensor."""
    tensors = _local_tensors(model, optimizer)
    with open(f"{path}.{fabric.global_rank}", "wb", buffering=0) as file:
        for tensor in tensors[fabric.global_rank :: fabric.world_size] if strategy == "ddp" else tensors:
            file.write(tensor.reshape(-1).numpy().data)
        os.fsync(file.fileno())


def _copy_from_memory(tensors: list[torch.Tensor]) -> None:
    """Copy as many bytes into these tensors, from more memory than the caches hold."""
    source, taken = _source(), 0
    for tensor in tensors:
        if taken + tensor.numel() > source.numel():
            taken = 0
        tensor.copy_(source[taken : taken + tensor.numel()].view(tensor.shape))
        taken += tensor.numel()


@cache
def _source() -> torch.Tensor:
    return torch.ones(2**26)


def _manager_save(fabric: Fabric, manager: Any, path: str, tensors: dict[str, Any]) -> None:
    if fabric.is_global_zero:  # it replaces no checkpoint
        shutil.rmtree(path, ignore_errors=True)
    fabric.barrier()
    manager.save(path, {"state": tensors})
    for written in Path(path).rglob(f"*_{fabric.global_rank}.pt"):  # it does not flush
        with open(written, "rb") as file:
            os.fsync(file.fileno())
