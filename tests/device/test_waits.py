"""How often the host waits for the device, for each strategy and feature, exactly: one more wait fails, with its line.

One launch for each strategy runs all features, each once before it is counted. What waits does so for a reason, which
`TABLE` has beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from rows import averaged, in_both, in_shards
from torch import Tensor, nn
from torch.optim import AdamW
from torch.utils.data import DataLoader, TensorDataset
from waits import counting
from worlds import run_world

from fabric import Fabric
from fabric.launchers.world import World
from fabric.strategies import ManualStrategy, ModelParallelStrategy, Pipeline, Strategy

Lines: TypeAlias = list[tuple[str, str]]
"""The waits of one run of a feature: a kind and a line for each."""

NUM_WARM = 20
"""Steps before anything is counted: DistributedDataParallel times its first ten, and then one in a hundred."""


class Net(nn.Module):
    """Has the names of layers that `rows.py` cuts."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.hidden(x).relu())


class Logger:
    """Takes what it gets."""

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        """Drop it."""


def loader(fabric: Fabric, *, num: int = 400, **options: Any) -> Any:
    return fabric.setup_dataloaders(
        DataLoader(TensorDataset(torch.linspace(-1, 1, num * 8).view(num, 8)), batch_size=2, **options)
    )


def forever(batches: Any) -> Iterator[Tensor]:
    while True:
        for (batch,) in batches:
            yield batch


def features(fabric: Fabric, folder: str) -> dict[str, Callable[[], object]]:
    """One run of each feature."""
    net = fabric.to_device(Net())  # under `manual` nothing else moves it
    model, optimizer = fabric.setup(net, AdamW(net.parameters(), lr=1e-3))
    pinned = forever(loader(fabric, pin_memory=True))
    unpinned, workers = forever(loader(fabric)), forever(loader(fabric, num_workers=1, pin_memory=True))
    bar = iter(fabric.progress(pinned, "training"))
    ema = fabric.ema(model)
    free = fabric.to_device(nn.Linear(4, 4))

    def backward(batch: Tensor, **options: Any) -> Tensor:
        loss = model(batch).square().mean()
        fabric.backward(loss, **options)
        return loss.detach()

    def step(batches: Iterator[Tensor] = pinned, clip: dict[str, Any] | None = None, **options: Any) -> Tensor:
        loss = backward(next(batches), **options)
        if clip is not None:
            fabric.clip_gradients(model, optimizer, **clip)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def accumulate() -> None:
        with fabric.no_backward_sync(model):
            backward(next(pinned), weight=2)
        step(weight=2)

    def log(*loggers: Logger) -> None:
        fabric.loggers[:] = loggers
        fabric.log("loss", step())

    def guarded(**options: Any) -> None:
        fabric.guard_gradients("skip")
        step(**options)
        fabric.guard_gradients(None)

    def average() -> None:
        free(next(pinned)[:, :4]).sum().backward()
        fabric.average_gradients(free.parameters())
        free.zero_grad()

    def update() -> None:
        step()
        ema.update()

    def evaluate() -> None:
        batches = loader(fabric, num=8, pin_memory=True)
        with torch.no_grad():
            fabric.gather_for_metrics([model(batch).argmax(dim=1) for (batch,) in batches], batches)

    def save(blocking: bool) -> None:
        fabric.save(f"{folder}/saved", {"model": model, "optimizer": optimizer}, blocking=blocking).wait()

    return {
        "step": step,
        "clip_gradients(max_norm)": partial(step, clip={"max_norm": 1.0}),
        "clip_gradients(max_norm, error_if_nonfinite=False)": partial(
            step, clip={"max_norm": 1.0, "error_if_nonfinite": False}
        ),
        "clip_gradients(clip_val)": partial(step, clip={"clip_val": 1.0}),
        "backward(weight=2)": partial(step, weight=2),
        "accumulation with weights": accumulate,
        "log without a logger": log,
        "log": partial(log, Logger()),
        "guard_gradients": guarded,
        "guard_gradients, clip_gradients(max_norm)": partial(guarded, clip={"max_norm": 1.0}),
        "a loader that does not pin memory": partial(step, unpinned),
        "a loader with workers": partial(step, workers),
        "progress": partial(step, bar),
        "all_reduce": lambda: fabric.all_reduce({"loss": step(), "one": 1.0}),
        "all_gather": lambda: fabric.all_gather(step()),
        "broadcast of an object, and barrier": lambda: (fabric.broadcast({"a": 1}), fabric.barrier()),
        "average_gradients": average,
        "ema": update,
        "gather_for_metrics": evaluate,
        "save": partial(save, True),
        "save(blocking=False)": partial(save, False),
    }


def measure(fabric: Fabric, folder: str) -> dict[str, Lines]:
    """The waits of each feature on this rank."""
    runs, found = features(fabric, folder), {}
    for _ in range(NUM_WARM):
        runs["step"]()
    for name, run in runs.items():
        run()
        with counting() as waits:
            run()
        found[name] = waits.lines
    return found


def measure_alone(world: World, devices: int, strategy: str, precision: Any, folder: str) -> dict[str, Lines]:
    with Fabric(accelerator="cuda", devices=devices, strategy=strategy, precision=precision, sanitize=False) as fabric:
        return measure(fabric, folder)


BACKENDS = ("ddp_sharded", "ddp_fully_sharded", "deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3")
"""Those whose backends wait for the device by themselves: only the waits in our own lines are counted there."""
STRATEGIES: dict[str, tuple[int, str | Callable[[], Strategy]]] = {
    "single_device": (1, "single_device"),
    "dp": (2, "dp"),
    "ddp": (2, "ddp"),
    "fsdp": (2, "fsdp"),
    "hsdp": (4, "hsdp"),
    "model_parallel, shard": (2, partial(ModelParallelStrategy, parallelize_fn=in_shards, shard=2)),
    "model_parallel, tensor": (4, partial(ModelParallelStrategy, parallelize_fn=in_both, shard=2, tensor=2)),
    "manual": (2, partial(ManualStrategy, parallelize=averaged)),
    **{name: (2, name) for name in BACKENDS},
}
TABLE: dict[str, tuple[int, int, str]] = {
    "step": (0, 1, "whether gradients overflowed: whether the step is made"),
    "clip_gradients(max_norm)": (1, 1, "whether the norm is finite: an error before weights change"),
    "clip_gradients(max_norm, error_if_nonfinite=False)": (0, 1, "as a step"),
    "clip_gradients(clip_val)": (0, 1, "as a step"),
    "backward(weight=2)": (0, 1, "as a step"),
    "accumulation with weights": (0, 1, "as a step"),
    "log without a logger": (0, 1, "as a step"),
    "log": (1, 2, "the number is written down"),
    "guard_gradients": (1, 1, "whether gradients are finite: whether the step is made"),
    "guard_gradients, clip_gradients(max_norm)": (1, 1, "the same, read from the norm"),
    "a loader that does not pin memory": (0, 1, "as a step"),
    "a loader with workers": (0, 1, "as a step"),
    "progress": (0, 1, "as a step"),
    "all_reduce": (0, 1, "as a step"),
    "all_gather": (0, 1, "as a step"),
    "broadcast of an object, and barrier": (0, 0, ""),
    "average_gradients": (0, 0, ""),
    "ema": (0, 1, "as a step"),
    "gather_for_metrics": (0, 0, ""),
    "save": (1, 1, "all copies have arrived"),
    "save(blocking=False)": (1, 1, "the same"),
}
"""How often the host waits in one run of a feature, in precision 32-true and in 16-mixed, whose loss scaler reads a
number in each step; and for what."""
MORE = {"manual": {"save": 2, "save(blocking=False)": 2}}
"""Waits in addition: `manual` reads digests of the model's and of the optimizer's tensors that all ranks hold, and
compares them."""


def measured(name: str, precision: Any, folder: Path) -> dict[str, Lines]:
    size, strategy = STRATEGIES[name]
    if name in ("single_device", "dp"):  # which run in the process that launches
        return run_world(1, measure_alone, size, name, precision, str(folder))[0]
    made = strategy if isinstance(strategy, str) else strategy()
    fabric = Fabric(
        accelerator="cuda",
        devices=size,
        strategy=made,
        precision=precision,
        launcher="forkserver",
        sanitize=False,  # whose steps are below
    )
    return fabric.launch(measure, str(folder))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "precision"),
    [*((name, "32-true") for name in STRATEGIES), *((name, "16-mixed") for name in ("single_device", "ddp", "fsdp"))],
)
def test_the_host_waits_for_the_device_as_often_as_the_table_says(name: str, precision: str, tmp_path: Path) -> None:
    column = ("32-true", "16-mixed").index(precision)
    expected = {feature: row[column] + MORE.get(name, {}).get(feature, 0) for feature, row in TABLE.items()}
    found = measured(name, precision, tmp_path)
    if name in BACKENDS:
        ours = ("fabric/", "strategies/", "launchers/", "tests/")
        found = {feature: [each for each in lines if each[1].startswith(ours)] for feature, lines in found.items()}
    assert found.keys() == expected.keys()
    assert not {feature: lines for feature, lines in found.items() if len(lines) != expected[feature]}


def waits_of_a_pipeline(fabric: Fabric) -> list[dict[str, Lines]]:
    """The waits of each rank in a step with 1F1B, and in one with clipping."""
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    model, optimizer = fabric.setup(net, AdamW(net.parameters(), lr=1e-3))
    inputs, targets = torch.ones(8, 8, device=fabric.device), torch.zeros(8, 4, device=fabric.device)

    def step(**clip: Any) -> None:
        fabric.backward(model(inputs, targets))
        if clip:
            fabric.clip_gradients(model, optimizer, **clip)
        optimizer.step()
        optimizer.zero_grad()

    found: dict[str, Lines] = {}
    for name, clip in (("step", {}), ("clip_gradients(max_norm)", {"max_norm": 1.0})):
        step(**clip)
        with counting() as waits:
            step(**clip)
        found[name] = waits.lines
    return fabric.collective.all_gather_object(found)


def in_two(model: nn.Sequential, stage: int, num_stages: int) -> nn.Module:
    return model[:2] if stage == 0 else model[2:]


@pytest.mark.slow
def test_a_pipeline_waits_as_the_table_says() -> None:
    pipeline = Pipeline(degree=2, schedule="1F1B", num_microbatches=4, split=in_two, loss_fn=nn.functional.mse_loss)
    strategy = ModelParallelStrategy(pipeline=pipeline)
    fabric = Fabric(accelerator="cuda", devices=2, strategy=strategy, launcher="forkserver", sanitize=False)
    for found in fabric.launch(waits_of_a_pipeline):
        assert not {feature: lines for feature, lines in found.items() if len(lines) != TABLE[feature][0]}


def waits_of_steps(fabric: Fabric) -> list[int]:
    """How often this rank waits for the device in each step."""
    net = Net()
    model, optimizer = fabric.setup(net, AdamW(net.parameters(), lr=1e-3))
    batch, found = torch.ones(2, 8, device=fabric.device) + fabric.global_rank, []
    for _ in range(20):
        with counting() as waits:
            fabric.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        found.append(waits.total)
    return found


@pytest.mark.slow
def test_the_sanitizer_waits_in_the_steps_that_it_watches_and_in_no_other() -> None:
    with_it, without = (
        Fabric(accelerator="cuda", devices=2, strategy="fsdp", launcher="forkserver", sanitize=sanitize)
        for sanitize in ("start", False)
    )
    pairs = zip(with_it.launch(waits_of_steps), without.launch(waits_of_steps), strict=True)
    waiting = [number for number, (one, other) in enumerate(pairs, start=1) if one != other]
    assert waiting == [1, 2, 3, 4, 5, 8, 9, 16, 17], "until the backward after a watched step"


def waits_with_a_monitor(fabric: Fabric, is_on: bool) -> tuple[list[int], dict[str, float]]:
    """How often this rank waits for the device in each step, and what the monitor has measured."""
    net = Net()
    model, optimizer = fabric.setup(net, AdamW(net.parameters(), lr=1e-3))
    monitor = fabric.monitor(window_steps=5, show=False) if is_on else None
    batch, found = torch.ones(2, 8, device=fabric.device) + fabric.global_rank, []
    for _ in range(20):
        with counting() as waits:
            fabric.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        found.append(waits.total)
    return found, {} if monitor is None else dict(monitor.latest)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_the_monitor_waits_for_no_device(strategy: str) -> None:
    (with_it, metrics), (without, _) = (
        Fabric(accelerator="cuda", devices=2, strategy=strategy, launcher="forkserver", sanitize=False).launch(
            waits_with_a_monitor, is_on
        )
        for is_on in (True, False)
    )
    assert with_it == without
    assert metrics["loss"] > 0
    assert metrics["backward_seconds"] > 0
    assert metrics["device_memory_peak_bytes"] > 0
    assert "mfu" not in metrics, "the peak of a pretended device is not known"
