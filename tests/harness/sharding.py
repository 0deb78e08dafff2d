"""A model whose parameters are hard to shard, and loops that train it: plain, and on every rank of a fabric.

Here and not in a test's own module, so that ranks can import it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from fabric import Fabric, read_checkpoint

NUM_STEPS = 4
BATCH_SIZE = 8


class Block(nn.Module):
    """A residual block, to be wrapped. Its scale has one row, so that most ranks hold nothing of it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.hidden = nn.Linear(6, 10)
        self.out = nn.Linear(10, 6)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.out(self.hidden(self.norm(x)).tanh())

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)


class Net(nn.Module):
    """Tied weights, a frozen layer, two blocks, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.out = nn.Linear(6, 11, bias=False)
        self.out.weight = self.embed.weight
        self.register_buffer("offset", torch.full((11,), 0.5))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens).mean(dim=1)
        for block in self.blocks:
            hidden = block(hidden)
        return self.out(self.frozen(hidden)) + self.offset

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self(tokens), targets)

    def reset_parameters(self) -> None:
        self.offset.fill_(0.5)


@dataclass(frozen=True)
class Recipe:
    """How it is trained."""

    optimizer: str = "sgd"
    accumulate: int = 1
    clip: dict[str, float] = field(default_factory=dict)
    seed: int = 0


def make(recipe: Recipe) -> tuple[Net, Optimizer]:
    """The model, and an optimizer with two groups of its parameters, the frozen ones among them."""
    torch.manual_seed(recipe.seed)
    model = Net()
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    groups: list[dict[str, Any]] = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "lr": 0.02}]
    if recipe.optimizer == "sgd":
        return model, SGD(groups, lr=0.5, momentum=0.9)
    return model, AdamW(groups, lr=0.05, eps=1e-3)


def batches(recipe: Recipe, rank: int = 0, size: int = 1) -> list[tuple[Tensor, Tensor]]:
    """This rank's part of every batch."""
    generator = torch.Generator().manual_seed(recipe.seed + 1)
    tokens = torch.randint(11, (NUM_STEPS * recipe.accumulate, BATCH_SIZE, 5), generator=generator)
    targets = torch.randint(11, (NUM_STEPS * recipe.accumulate, BATCH_SIZE), generator=generator)
    return [(t.chunk(size)[rank], y.chunk(size)[rank]) for t, y in zip(tokens, targets, strict=True)]


@dataclass
class Run:
    """What must be equal."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]
    moments: dict[int, dict[str, Any]]


def train_plain(recipe: Recipe, model: Net | None = None, optimizer: Optimizer | None = None) -> Run:
    """One process of plain PyTorch."""
    if model is None or optimizer is None:
        model, optimizer = make(recipe)
    losses, norms = [], []
    for step, (tokens, targets) in enumerate(batches(recipe), start=1):
        loss = model.loss(tokens, targets)
        (loss / recipe.accumulate).backward()
        losses.append(loss.item())
        if step % recipe.accumulate == 0:
            if "max_norm" in recipe.clip:
                norms.append(nn.utils.clip_grad_norm_(model.parameters(), **recipe.clip).item())
            elif recipe.clip:
                nn.utils.clip_grad_value_(model.parameters(), recipe.clip["clip_val"])
            optimizer.step()
            optimizer.zero_grad()
    return Run(losses, norms, model.state_dict(), optimizer.state_dict()["state"])


def train(fabric: Fabric, recipe: Recipe, folder: str, load: str | None = None) -> Run | None:
    """Train on every rank; results are read from the checkpoint that it saves. None on ranks other than 0."""
    model, optimizer = fabric.setup(*make(recipe))
    if load is not None:
        fabric.load(load, {"model": model, "optimizer": optimizer})
    samples = fabric.to_device(batches(recipe, fabric.global_rank, fabric.world_size))
    return train_over(fabric, recipe, model, optimizer, samples, folder)


def train_over(
    fabric: Fabric,
    recipe: Recipe,
    model: nn.Module,
    optimizer: Optimizer,
    samples: Iterable[tuple[Tensor, Tensor]],
    folder: str,
) -> Run | None:
    """Train over these batches, and save a checkpoint. Returns its content, on rank 0."""
    losses, norms = [], []
    for step, (tokens, targets) in enumerate(samples, start=1):
        is_last = step % recipe.accumulate == 0
        with fabric.no_backward_sync(model, enabled=not is_last):
            loss = nn.functional.cross_entropy(model(tokens), targets)
            fabric.backward(loss / recipe.accumulate)
        losses.append(fabric.all_reduce(loss.detach()).item())
        if is_last:
            if recipe.clip:
                norm = fabric.clip_gradients(model, optimizer, **recipe.clip)
                norms += [] if norm is None else [norm.item()]
            optimizer.step()
            optimizer.zero_grad()
    path = f"{folder}/{recipe.optimizer}-{recipe.seed}"
    fabric.save(path, {"model": model, "optimizer": optimizer})
    if not fabric.is_global_zero:
        return None
    content = read_checkpoint(path)
    return Run(losses, norms, content["model"], content["optimizer"]["state"])


def train_all(fabric: Fabric, recipes: list[Recipe], folder: str, load: str | None = None) -> list[Run | None]:
    """Several recipes in one launch."""
    return [train(fabric, recipe, folder, load) for recipe in recipes]
