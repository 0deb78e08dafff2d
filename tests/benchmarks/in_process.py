"""What a step, a batch and a collective cost over raw PyTorch: variants take turns in the same process or ranks."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import rivals
import torch
import torch.distributed as dist
from timing import Action, Row, race
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from fabric import Fabric

INPUTS, TARGETS = torch.randn(8, 32), torch.randn(8, 1)


def one_process() -> list[Row]:
    """A tiny model's step and an empty loader's batch, in one process."""
    rivals.quiet()
    torch.set_num_threads(1)
    ours = Fabric(accelerator="cpu", devices=1)
    ours.launch()
    steps: dict[str, Action] = {"raw": _raw_step(_parts()), "ours": _step(ours)}
    loaders: dict[str, Action] = {"raw": _epoch(_loader()), "ours": _epoch(ours.setup_dataloaders(_loader()))}
    if "LF" in rivals.installed():
        lightning = rivals.lightning()
        steps["LF"] = _step(lightning)
        loaders["LF"] = _epoch(lightning.setup_dataloaders(_loader()))
    if "AC" in rivals.installed():
        accelerator = rivals.accelerator()
        steps["AC"] = _accelerate_step(accelerator)
        loaders["AC"] = _epoch(accelerator.prepare(_loader()))
    rows = race("step of a tiny model, 1 process", steps, repeat=200, rounds=25, target="+5 us")
    batches = race("epoch of 200 batches, 1 process", loaders, repeat=1, rounds=25)
    ours.close()
    return rows + batches


def one_rank(ours: Fabric) -> list[Row]:
    """The same step under DDP, alone."""
    return _ddp_steps(ours, {}, "step of a tiny model, 1 DDP rank", "+10 us", repeat=200)


def two_ranks(ours: Fabric) -> list[Row]:
    """The same step under DDP, and the collectives. Runs on every rank; every rank measures, rank 0 reports."""
    others: dict[str, Any] = {}
    if "LF" in rivals.installed():
        others["LF"] = rivals.lightning("ddp", 2)
    if "AC" in rivals.installed():
        others["AC"] = rivals.accelerator()
    rows = _ddp_steps(ours, others, "step of a tiny model, 2 DDP ranks", "as LF, AC", repeat=100)
    return rows + _streams(ours) + _collectives(ours, others)


def _ddp_steps(ours: Fabric, others: dict[str, Any], measurement: str, target: str, repeat: int) -> list[Row]:
    rivals.quiet()
    torch.set_num_threads(1)
    raw_model, raw_optimizer = _parts()
    parallel = nn.parallel.DistributedDataParallel(raw_model)
    steps: dict[str, Action] = {"raw": _raw_step((parallel, raw_optimizer)), "ours": _step(ours)}
    if "LF" in others:
        steps["LF"] = _step(others["LF"])
    if "AC" in others:
        steps["AC"] = _accelerate_step(others["AC"])
    return race(measurement, steps, repeat=repeat, rounds=25, target=target)


class Samples(IterableDataset[torch.Tensor]):
    """A stream of 20 batches of 32."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.ones(20 * 32, 256))


def _streams(ours: Fabric) -> list[Row]:
    """Steps of a few milliseconds over a stream, whose ranks agree before each batch, and without that."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(256, 256) for _ in range(10)))
    model, optimizer = ours.setup(net, torch.optim.SGD(net.parameters(), lr=1e-3))

    def epoch(loader: DataLoader[Any]) -> None:
        for inputs in loader:
            optimizer.zero_grad()
            ours.backward(model(inputs).square().mean())
            optimizer.step()

    loaders: dict[str, Action] = {
        "alone": partial(epoch, ours.setup_dataloaders(DataLoader(Samples(), 32), use_distributed_sampler=False)),
        "ours": partial(
            epoch, ours.setup_dataloaders(DataLoader(Samples(), 32), use_distributed_sampler=False, uneven="stop")
        ),
    }
    return race("20 steps over a stream, 2 DDP ranks", loaders, repeat=1, rounds=41, target="1.02 x")


def _collectives(ours: Fabric, others: dict[str, Any]) -> list[Row]:
    scalar, large = torch.ones(()), torch.randn(10 * 2**20 // 4)
    nest = {f"metric {index}": torch.randn(256) for index in range(100)}
    lightning, accelerator = others.get("LF"), others.get("AC")

    def raw_scalar() -> None:
        mine = scalar.clone()
        dist.all_reduce(mine)
        mine /= 2

    def raw_reduce() -> None:
        for tensor in nest.values():
            mine = tensor.clone()
            dist.all_reduce(mine)
            mine /= 2

    def raw_gather() -> None:
        for tensor in nest.values():
            dist.all_gather([torch.empty_like(tensor), torch.empty_like(tensor)], tensor)

    contests: list[tuple[str, dict[str, Action | None], int, str]] = [
        (
            "all_reduce of a scalar",
            {
                "raw": raw_scalar,
                "ours": lambda: ours.all_reduce(scalar),
                "LF": lightning and (lambda: lightning.all_reduce(scalar.clone())),
                "AC": accelerator and (lambda: accelerator.reduce(scalar.clone(), "mean")),
            },
            50,
            "1.3 x",
        ),
        (
            "all_gather of 100 x 1 KB",
            {
                "raw": raw_gather,
                "ours": lambda: ours.all_gather(nest),
                "LF": lightning and (lambda: lightning.all_gather(nest)),
                "AC": accelerator and (lambda: accelerator.gather(nest)),
            },
            2,
            "LF, AC / 20",
        ),
        (
            "all_reduce of 100 x 1 KB",
            {
                "raw": raw_reduce,
                "ours": lambda: ours.all_reduce(nest),
                "LF": lightning and (lambda: lightning.all_reduce(nest)),
                "AC": accelerator and (lambda: accelerator.reduce(nest, "mean")),
            },
            2,
            "LF, AC / 20",
        ),
        (
            "broadcast of 10 MB",
            {
                "raw": lambda: dist.broadcast(large, 0),
                "ours": lambda: ours.broadcast(large),
                "LF": lightning and (lambda: lightning.broadcast(large)),
            },
            3,
            "1.1 x",
        ),
    ]
    lines = []
    for name, variants, repeat, target in contests:
        present = {variant: action for variant, action in variants.items() if action is not None}
        lines += race(f"{name}, 2 ranks", present, repeat=repeat, rounds=15, target=target)
    for name, pair, repeat in _checked(ours):
        lines += race(f"{name}, 2 ranks", pair, repeat=repeat, rounds=101, target="raw again" if repeat < 50 else "")
    return lines


def _checked(ours: Fabric) -> list[tuple[str, dict[str, Action], int]]:
    """One tensor, of which ranks compare shape and dtype before it is sent, against torch without the comparison.

    "raw again" shows the noise: it is the same as the first.
    """
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # torch 2.13, and before
    contests: list[tuple[str, dict[str, Action], int]] = []
    for name, num_elements, repeat in (("4 B", 1, 50), ("1 MB", 2**18, 4), ("4 MB", 2**20, 2), ("16 MB", 2**22, 1)):
        tensor = torch.randn(num_elements)

        def raw_reduce(tensor: torch.Tensor = tensor) -> None:
            mine = tensor.clone()
            dist.all_reduce(mine)
            mine /= ours.world_size

        def raw_gather(tensor: torch.Tensor = tensor) -> None:
            gather(torch.empty(ours.world_size * tensor.numel()), tensor)

        reduced = {"raw": raw_reduce, "ours": partial(ours.all_reduce, tensor), "raw again": raw_reduce}
        gathered = {"raw": raw_gather, "ours": partial(ours.all_gather, tensor), "raw again": raw_gather}
        contests += [(f"all_reduce of {name}", reduced, repeat), (f"all_gather of {name}", gathered, repeat)]
    return contests


def _parts() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
    return model, torch.optim.SGD(model.parameters(), lr=1e-3)


def _loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(200, 32), torch.randn(200, 1)), batch_size=1)


def _epoch(loader: Any) -> Action:
    def epoch() -> None:
        for _ in loader:
            pass

    return epoch


def _raw_step(parts: tuple[nn.Module, torch.optim.Optimizer]) -> Action:
    model, optimizer = parts

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(INPUTS), TARGETS).backward()
        optimizer.step()

    return step


def _step(fabric: Any) -> Action:
    """The loop of a fabric, ours or Lightning's: the words are the same."""
    model, optimizer = fabric.setup(*_parts())

    def step() -> None:
        optimizer.zero_grad()
        fabric.backward(nn.functional.mse_loss(model(INPUTS), TARGETS))
        optimizer.step()

    return step


def _accelerate_step(accelerator: Any) -> Action:
    model, optimizer = accelerator.prepare(*_parts())

    def step() -> None:
        optimizer.zero_grad()
        accelerator.backward(nn.functional.mse_loss(model(INPUTS), TARGETS))
        optimizer.step()

    return step
