"""A small language model that is hard to split into stages, and loops that train it: plain, and in a pipeline.

Here and not in a test's own module, so that ranks can import it.
"""

from __future__ import annotations

import random
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from devices import ACCELERATOR
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from fabric import Fabric, read_checkpoint
from fabric.strategies import ModelParallelStrategy, Pipeline, Strategy

NUM_WORDS = 11
NUM_STEPS = 2
TINY = 2.0**-18


def loss_of(outputs: Tensor, target: Tensor) -> Tensor:
    """The mean over all tokens."""
    return nn.functional.cross_entropy(outputs.flatten(0, 1), target.flatten())


def tiny_loss_of(outputs: Tensor, target: Tensor) -> Tensor:
    """So small that most of its gradients are zero in float16."""
    return loss_of(outputs, target) * TINY


class Block(nn.Module):
    """Mixes tokens with earlier ones, then transforms each. Its gate is a parameter of one element."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.gate = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor, keep: Tensor | None = None) -> Tensor:
        mixed = self.norm(x).cumsum(dim=1) / 4
        out = x + self.gate * self.down(self.up(mixed).tanh())
        return out if keep is None else out * keep.unsqueeze(-1)

    def reset_parameters(self) -> None:
        nn.init.ones_(self.gate)


class Net(nn.Module):
    """Parameters and buffers of the root itself, blocks by name, a second input that every stage reads.

    The tensor that is sent between stages is not contiguous.
    """

    def __init__(self, depth: int = 8) -> None:
        super().__init__()
        self.embed: nn.Module | None = nn.Embedding(NUM_WORDS, 6)
        self.place: nn.Parameter | None = nn.Parameter(torch.randn(6))
        self.blocks = nn.ModuleDict({str(index): Block() for index in range(depth)})
        self.norm: nn.Module | None = nn.LayerNorm(6)
        self.head: nn.Module | None = nn.Linear(6, NUM_WORDS)
        self.register_buffer("offset", torch.full((NUM_WORDS,), 0.5))
        self.register_buffer("halves", torch.full((), 0.5), persistent=False)

    def forward(self, x: Tensor, target: Tensor | None = None, keep: Tensor | None = None) -> Tensor:
        x = x.transpose(1, 2) if self.embed is None else self.embed(x) + self.place
        for block in self.blocks.values():
            x = block(x, keep)
        x = x + self.halves
        x = x.transpose(1, 2) if self.head is None else self.head(self.norm(x)) + self.offset
        return x if target is None else loss_of(x, target)

    def reset_parameters(self) -> None:
        self.halves.fill_(0.5)
        if self.offset is not None:  # a rank without the last stage
            self.offset.fill_(0.5)
        if self.place is not None:
            nn.init.zeros_(self.place)


def cut_evenly(model: Net, stage: int, num_stages: int) -> Net:
    """As many blocks in each stage; the embedding comes with the first, the head with the last."""
    depth = len(model.blocks)
    for index in range(depth):
        if not stage * depth <= index * num_stages < (stage + 1) * depth:
            del model.blocks[str(index)]
    if stage > 0:
        model.embed = model.place = None
    if stage < num_stages - 1:
        model.norm = model.head = model.offset = None
    return model


class Plain(nn.Module):
    """The unsplit model: adds 1/2 once for each stage, as the stages of a pipeline do."""

    def __init__(self, num_stages: int) -> None:
        super().__init__()
        self.net = Net()
        self.num_stages = num_stages

    def forward(self, x: Tensor, target: Tensor | None = None, keep: Tensor | None = None) -> Tensor:
        net = self.net
        assert net.embed is not None
        assert net.norm is not None
        assert net.head is not None
        x = net.embed(x) + net.place
        per_stage = len(net.blocks) // self.num_stages
        for index, block in enumerate(net.blocks.values(), start=1):
            x = block(x, keep)
            if index % per_stage == 0:
                x = x + net.halves
        x = net.head(net.norm(x)) + net.offset
        return x if target is None else loss_of(x, target)


@dataclass(frozen=True)
class Recipe:
    """How it is trained."""

    seed: int
    optimizer: str = "sgd"
    accumulate: int = 1
    repeated: bool = False
    """Whether every backward of a window is synchronised, not only the last."""
    clip: dict[str, float] = field(default_factory=dict)
    masked: bool = False
    frozen: bool = False
    """Whether the embedding and all of the first blocks keep their weights."""

    @property
    def sizes(self) -> tuple[int, int]:
        """Samples of a micro-batch, and tokens of a sample."""
        chosen = random.Random(self.seed)
        return chosen.randint(1, 3), chosen.randint(2, 5)


@dataclass
class Run:
    """What must be equal."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]
    optimizer: dict[str, Any]
    evaluated: list[Any]


def make(recipe: Recipe, net: Net) -> Optimizer:
    """Fill the model, and make an optimizer with two groups of its parameters."""
    torch.manual_seed(recipe.seed)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, device="cpu") / 2)
    if recipe.frozen:
        for part in (net.embed, *list(net.blocks.values())[:4]):
            assert part is not None
            part.requires_grad_(False)
        assert net.place is not None
        net.place.requires_grad_(False)
    matrices = [parameter for parameter in net.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in net.parameters() if parameter.ndim == 1]
    # Backwards: indices are not in the order of names.
    groups: list[dict[str, Any]] = [{"params": vectors[::-1], "lr": 0.02}, {"params": matrices, "weight_decay": 0.1}]
    if recipe.optimizer == "sgd":
        return SGD(groups, lr=0.1, momentum=0.9)
    return AdamW(groups, lr=0.05, eps=1e-3)


Batch = tuple[Tensor, Tensor, Tensor | None]


def batches(recipe: Recipe, num_samples: int, rank: int = 0, size: int = 1) -> list[Batch]:
    """This rank's part of every batch."""
    generator = torch.Generator().manual_seed(recipe.seed + 1)
    shape = (NUM_STEPS * recipe.accumulate, num_samples, recipe.sizes[1])
    tokens, targets = torch.randint(NUM_WORDS, (2, *shape), generator=generator)
    keep = torch.rand(shape, generator=generator)
    return [
        (t.chunk(size)[rank], y.chunk(size)[rank], k.chunk(size)[rank] if recipe.masked else None)
        for t, y, k in zip(tokens, targets, keep, strict=True)
    ]


def train_plain(recipe: Recipe, num_samples: int, num_stages: int, load: str | None = None) -> Run:
    """One process of plain PyTorch, in float64."""
    model = Plain(num_stages)
    optimizer = make(recipe, model.net)
    model.double()
    if load is not None:
        content = read_checkpoint(load) if Path(load).is_dir() else torch.load(load, weights_only=True)
        model.net.load_state_dict(content["model"])
        optimizer.load_state_dict(content["optimizer"])
    losses, norms = [], []
    for step, (tokens, targets, keep) in enumerate(batches(recipe, num_samples), start=1):
        loss = model(tokens, targets, keep=None if keep is None else keep.double())
        (loss / recipe.accumulate).backward()
        losses.append(loss.item())
        if step % recipe.accumulate == 0:
            if "max_norm" in recipe.clip:
                norms.append(nn.utils.clip_grad_norm_(model.parameters(), **recipe.clip).item())
            elif recipe.clip:
                nn.utils.clip_grad_value_(model.parameters(), recipe.clip["clip_val"])
            optimizer.step()
            optimizer.zero_grad()
    tokens, targets, _ = batches(recipe, num_samples)[0]
    with torch.no_grad():
        evaluated = [model(tokens), model(tokens, targets).item(), model(tokens[:1])]
    return Run(losses, norms, model.net.state_dict(), optimizer.state_dict(), evaluated)


def train(
    fabric: Fabric, recipe: Recipe, num_samples: int, shares: int, folder: str, load: str | None = None
) -> Run | None:
    """Train on every rank; results are read from the checkpoint that it saves. None on ranks other than 0.

    `shares`: how many different parts of the data there are; ranks with the same part are neighbours, or are as far
    apart as there are parts.
    """
    net = Net()
    model, optimizer = fabric.setup(net, make(recipe, net))
    if load is not None:
        fabric.load(load, {"model": model, "optimizer": optimizer})
    part = fabric.global_rank % shares
    losses, norms = [], []
    samples = fabric.to_device(batches(recipe, num_samples, part, shares))
    for step, (tokens, targets, keep) in enumerate(samples, start=1):
        is_last = step % recipe.accumulate == 0
        with nullcontext() if is_last or recipe.repeated else fabric.no_backward_sync(model):
            loss = model(tokens, targets, **({} if keep is None else {"keep": keep}))
            fabric.backward(loss / recipe.accumulate)
        losses.append(fabric.all_reduce(loss.detach()).item())
        if is_last:
            if recipe.clip:
                norm = fabric.clip_gradients(model, optimizer, **recipe.clip)
                norms += [] if norm is None else [norm.item()]
            optimizer.step()
            optimizer.zero_grad()
    tokens, targets, _ = fabric.to_device(batches(recipe, num_samples)[0])
    model.eval()
    with torch.no_grad():
        evaluated = [model(tokens).cpu(), model(tokens, targets).item(), model(tokens[:1]).cpu()]
    model.train()
    path = f"{folder}/{recipe.optimizer}-{recipe.seed}"
    fabric.save(path, {"model": model, "optimizer": optimizer})
    if not fabric.is_global_zero:
        return None
    content = read_checkpoint(path)
    return Run(losses, norms, content["model"], content["optimizer"], evaluated)


def train_all(
    fabric: Fabric, recipes: list[Recipe], num_samples: int, shares: int, folder: str, load: str | None = None
) -> list[Run | None]:
    """Several recipes in one launch."""
    return [train(fabric, recipe, num_samples, shares, folder, load) for recipe in recipes]


def pipeline(schedule: str = "1F1B", degree: int = 2, num_microbatches: int = 4, **options: Any) -> Pipeline:
    """The options that fit the model above."""
    return Pipeline(
        degree=degree,
        schedule=schedule,
        num_microbatches=num_microbatches,
        split=options.pop("split", cut_evenly),
        loss_fn=options.pop("loss_fn", loss_of),
        **options,
    )


def fabric_with(size: int, strategy: Strategy | Pipeline, precision: Any = "64-true") -> Fabric:
    """A fabric; a `Pipeline` alone is a model-parallel strategy with nothing else."""
    chosen = ModelParallelStrategy(pipeline=strategy) if isinstance(strategy, Pipeline) else strategy
    return Fabric(accelerator=ACCELERATOR, devices=size, strategy=chosen, precision=precision, launcher="forkserver")


def shard_blocks(model: Net, mesh: Any) -> None:
    """Use FSDP2 in each stage."""
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks.values():
        fully_shard(block, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])


def shard_only_blocks(model: Net, mesh: Any) -> None:
    """Use FSDP2 for blocks only; the strategy averages the root's own parameters, and replicas of shards."""
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks.values():
        fully_shard(block, mesh=mesh["shard"])


def cut_layers(model: Net, mesh: Any) -> None:
    """Tensor parallel blocks."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    for block in model.blocks.values():
        parallelize_module(block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
