"""A training loop in which one rank is late, in a phase of one's choice."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader, Dataset

from fabric import Fabric

BATCH, WIDTH = 4, 32


@dataclass
class Delay:
    """Which rank sleeps, where, and how long."""

    where: str = ""
    seconds: float = 0.04
    rank: int = 0
    step: int = 0
    late: Callable[[int], int] = field(default=lambda step: 1)
    """The late rank of a step."""

    def at(self, where: str) -> None:
        if where == self.where and self.late(self.step) == self.rank:
            time.sleep(self.seconds)


class Rows(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, num_rows: int, delay: Delay) -> None:
        self.num_rows, self.delay, self.read = num_rows, delay, 0

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self.read % BATCH == 0:
            self.delay.at("data")
        self.read += 1
        return torch.full((WIDTH,), index / self.num_rows), torch.zeros(1)


class Layer(nn.Module):
    def __init__(self, delay: Delay) -> None:
        super().__init__()
        self.linear, self.delay = nn.Linear(WIDTH, WIDTH), delay

    def forward(self, x: Tensor) -> Tensor:
        self.delay.at("forward")
        out: Tensor = self.linear(x)
        if out.requires_grad:
            out.register_hook(lambda gradient: self.delay.at("backward"))
        return out


@dataclass
class Slow:
    """An object whose state takes long to read."""

    delay: Delay

    def state_dict(self) -> dict[str, Any]:
        self.delay.at("saving")
        return {"one": 1}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        pass


def train(fabric: Fabric, delay: Delay, folder: Path, num_steps: int = 14, **options: Any) -> dict[str, float]:
    """Train, and return the latest metrics."""
    if fabric.world_size > 1:  # in one process this is the process of the tests
        torch.set_num_threads(1)
    delay.rank = fabric.global_rank
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), Layer(delay), nn.ReLU(), nn.Linear(WIDTH, 1))
    optimizer = SGD(net.parameters(), lr=1e-3)
    optimizer.register_step_pre_hook(lambda *_: delay.at("optimizer"))
    model, optimizer = fabric.setup(net, optimizer)
    rows = Rows(num_steps * BATCH * fabric.world_size, delay)
    loader = fabric.setup_dataloaders(DataLoader(rows, batch_size=BATCH))
    monitor = fabric.monitor(folder, **options)
    for delay.step, (x, y) in enumerate(loader, start=1):
        optimizer.zero_grad()
        fabric.backward((model(x) - y).square().mean())
        optimizer.step()
        monitor.add(tokens=x.numel())
        if delay.where == "saving" and delay.step % 4 == 0:
            fabric.save(folder / "saved", {"model": model, "slow": Slow(delay)})
    fabric.close()
    return dict(monitor.latest)


def moving(every: int, num_ranks: int, step: int) -> int:
    """Another rank each `every` steps."""
    return step // every % num_ranks


def mover(every: int, num_ranks: int) -> Callable[[int], int]:
    """See `moving`."""
    return partial(moving, every, num_ranks)
