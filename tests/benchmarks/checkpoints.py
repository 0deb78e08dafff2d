"""Saving and loading a model with AdamW's state on two ranks, against what people use today. Files are flushed.

Every variant saves the same bytes to the same disk. The variants take turns, and a ratio is of one round.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import rivals
import torch
import torch.distributed.checkpoint as dcp
from timing import Row, in_order, rows
from torch import nn

from fabric import Fabric

MODEL_BYTES = int(os.environ.get("BENCH_MODEL_BYTES", 2**30))
"""Of the weights; AdamW has twice as many."""
NUM_ROUNDS = 3
LOOP_SECONDS = 0.1


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
        _background(fabric, state, f"{folder}/{strategy}-background", turn, blocked, speed)
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


def _keep(times: list[float], turn: int, microseconds: float) -> None:
    if turn > 0:  # the first one is no measurement
        times.append(microseconds)


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
    alone = _mean_step(step, lambda: False, LOOP_SECONDS)
    fabric.barrier()
    start = time.perf_counter()
    pending = fabric.save(path, state, blocking=False)
    waited = time.perf_counter() - start
    meanwhile = _mean_step(step, lambda: pending.is_done, 60.0)
    pending.wait()
    _keep(blocked["ours"], turn, waited * 1e6)
    _keep(speed["no save"], turn, alone)
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
