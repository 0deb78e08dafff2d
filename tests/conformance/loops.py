"""The one loop of the suite, twice: plain PyTorch in one process, and the same with a fabric.

Both read the same global batches, make the same model, and give the same thing back: the loss of each step and the
weights at the end. Numbers are drawn from `Task.seed`, which a failing test prints.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.data import DataLoader, TensorDataset

from fabric import Fabric
from fabric.strategies.precision.precision import Precision

GLOBAL_BATCH_SIZE = 8
NUM_STEPS = 10
SCALE = 2.0**8
OPTIMIZERS = ("sgd", "adamw")


@dataclass(frozen=True)
class Task:
    """What is trained: the seed of model and data, and how."""

    seed: int
    optimizer: str
    accumulate: int = 1
    """Micro-batches per step; gradients are synchronised in the last one."""
    max_norm: float | None = None
    """The norm that gradients are clipped to."""


@dataclass(frozen=True)
class Outcome:
    """What must be equal."""

    losses: list[float]
    weights: dict[str, Tensor]


class Net(nn.Module):
    """A small network with an embedding whose weight is tied to the output, and a normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.norm = nn.LayerNorm(6)
        self.hidden = nn.Linear(6, 6)
        self.out = nn.Linear(6, 11, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.norm(self.hidden(self.embed(tokens)).tanh()).mean(dim=1))


def parts(task: Task, batch_size: int) -> tuple[Net, Optimizer, DataLoader[Any]]:
    """Model, optimizer and loader, the same wherever they are made."""
    torch.manual_seed(task.seed)
    model = Net()
    tokens, targets = torch.randint(11, (40, 5)), torch.randint(11, (40,))
    order = torch.Generator().manual_seed(task.seed + 1)
    loader = DataLoader(TensorDataset(tokens, targets), batch_size=batch_size, shuffle=True, generator=order)
    optimizer: Optimizer
    if task.optimizer == "sgd":
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    else:
        # eps above the noise: Adam divides by gradients, and turns a difference of 1e-8 in a tiny one into a full step
        optimizer = AdamW(model.parameters(), lr=0.01, eps=1e-3)
    return model, optimizer, loader


def plain(task: Task, precision: Precision, num_shards: int = 1) -> Outcome:
    """One process of plain PyTorch; where the precision scales losses, by a constant that nothing overflows at.

    `num_shards`: cut each batch, and average the gradients of the pieces by hand. In half precision that is another
    run than the whole batch, for gradients are rounded one by one; it is what data parallel promises there.
    """
    model, optimizer, loader = parts(task, GLOBAL_BATCH_SIZE)
    if not precision.is_mixed:
        model.to(precision.param_dtype)
    copies = [model, *(copy.deepcopy(model) for _ in range(num_shards - 1))]
    losses = []
    for step, (tokens, targets) in enumerate(_endless(loader), start=1):
        pieces = zip(copies, tokens.chunk(num_shards), targets.chunk(num_shards), strict=True)
        shares = [_backward(each, precision, task, *piece) for each, *piece in pieces]
        if step % task.accumulate == 0:
            for mine, *others in zip(*(each.parameters() for each in copies), strict=True):
                gradients = torch.stack([parameter.grad for parameter in (mine, *others)])
                mine.grad = gradients.mean(dim=0) / _scale(precision)
            if task.max_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), task.max_norm)
            optimizer.step()
            for each in copies:
                each.zero_grad()
                each.load_state_dict(model.state_dict())
        losses.append(sum(shares) / num_shards)
        if step == NUM_STEPS:
            return Outcome(losses, _weights(model))
    raise AssertionError("an endless loader ended")


def _backward(model: Net, precision: Precision, task: Task, tokens: Tensor, targets: Tensor) -> float:
    with torch.autocast("cpu", dtype=precision.compute_dtype) if precision.is_mixed else nullcontext():
        outputs = model(tokens)
    loss = nn.functional.cross_entropy(outputs.to(precision.param_dtype), targets)
    (loss / task.accumulate * _scale(precision)).backward()
    return loss.item()


def _scale(precision: Precision) -> float:
    return SCALE if precision.scales_loss else 1.0


def with_fabric(fabric: Fabric, task: Task) -> Outcome:
    """The same loop on every rank of a fabric."""
    model, optimizer, loader = parts(task, GLOBAL_BATCH_SIZE // fabric.world_size)
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(loader)
    dtype = model.embed.weight.dtype  # between forward and backward it may be gathered in half precision
    losses = []
    for step, (tokens, targets) in enumerate(_endless(loader), start=1):
        is_last = step % task.accumulate == 0
        with fabric.no_backward_sync(model, enabled=not is_last):
            outputs = model(tokens)
            loss = nn.functional.cross_entropy(outputs.to(dtype), targets)
            fabric.backward(loss / task.accumulate)
        if is_last:
            if task.max_norm is not None:
                fabric.clip_gradients(model, optimizer, max_norm=task.max_norm)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(fabric.all_reduce(loss.detach()).item())
        if step == NUM_STEPS:
            held_whole = {name: tensor for name, tensor in _weights(model).items() if type(tensor) is Tensor}
            for name, of_ranks in fabric.all_gather(held_whole).items():
                assert torch.equal(of_ranks, of_ranks[:1].expand_as(of_ranks)), f"{name} differs between ranks"
            return Outcome(losses, saved_weights(fabric, model))
    raise AssertionError("an endless loader ended")


def saved_weights(fabric: Fabric, model: nn.Module) -> dict[str, Tensor]:
    """What a checkpoint has, whichever way the model lies over the ranks."""
    with TemporaryDirectory() as folder:
        path = Path(fabric.broadcast(folder)) / "weights"
        fabric.save(path, {"model": model})
        weights: dict[str, Tensor] = fabric.load(path)["model"]
        fabric.barrier()  # rank 0's folder stays until all have read
    return weights


def make_fabric(strategy: str, size: int, precision: str) -> Fabric:
    """A fabric on the CPU. Float16 starts at a loss scale that nothing overflows at: a skipped step is another run."""
    value = replace(Precision.parse(precision), init_scale=SCALE)  # type: ignore[arg-type]
    return Fabric(accelerator="cpu", strategy=strategy, devices=size, plugins=value)


def all_tasks(fabric: Fabric, tasks: list[Task]) -> list[Outcome]:
    """Several tasks in one launch: each with a model, an optimizer and a loader of its own."""
    return [with_fabric(fabric, task) for task in tasks]


def _endless(loader: Any) -> Any:
    while True:
        yield from loader


def _weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def run_rows(given: str, written: str) -> None:
    """In a fresh process, for launchers that fork: read rows and tasks, and write the outcomes."""
    rows, tasks = torch.load(given, weights_only=False)
    torch.save([make_fabric(*row).launch(all_tasks, tasks) for row in rows], written)
