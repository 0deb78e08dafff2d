"""Attention over sequences in parts gives the numbers, and the gradients, of attention over whole ones."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from devices import ACCELERATOR
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from worlds import run_world

from fabric import Fabric
from fabric.launchers.world import World
from fabric.strategies import ModelParallelStrategy
from fabric.strategies.accelerators.accelerator import CPUAccelerator
from fabric.strategies.model_parallel.context_parallel import context_attention, context_slice
from fabric.strategies.precision.precision import Precision


def leave_whole(model: nn.Module, mesh: Any) -> None:
    """Nothing."""


def connect(world: World) -> Any:
    """The runtime of a mesh whose axis "context" has all ranks."""
    strategy = ModelParallelStrategy(parallelize_fn=leave_whole, context="auto")
    return strategy.connect(world, CPUAccelerator(), [0] * world.size, Precision.parse("32-true"))


def attend_in_parts(world: World, seed: int) -> None:
    runtime = connect(world)
    mesh = runtime.mesh["context"]
    torch.manual_seed(seed)
    length = 4 * random.Random(seed).randint(1, 6)
    for num_groups, is_causal, scale in ((4, True, None), (4, False, 0.3), (2, True, 0.7)):
        shapes = [(2, heads, length, 8) for heads in (4, num_groups, num_groups)]
        wholes = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
        weights = torch.randn(shapes[0], dtype=torch.float64)
        options: dict[str, Any] = {"is_causal": is_causal, "scale": scale, "enable_gqa": num_groups != 4}
        expected = scaled_dot_product_attention(*wholes, **options)
        (expected * weights).sum().backward()
        parts = [context_slice(each.detach(), mesh, dim=2).requires_grad_() for each in wholes]
        found = context_attention(*parts, mesh, **options)
        (found * context_slice(weights, mesh, dim=2)).sum().backward()
        torch.testing.assert_close(found, context_slice(expected, mesh, dim=2), rtol=1e-10, atol=1e-10)
        for part, each in zip(parts, wholes, strict=True):
            assert each.grad is not None
            torch.testing.assert_close(part.grad, context_slice(each.grad, mesh, dim=2), rtol=1e-10, atol=1e-10)
    if world.size > 1:
        refuse(mesh, world.size)
    runtime.collective.teardown()


def refuse(mesh: Any, size: int) -> None:
    from torch.distributed.tensor import distribute_tensor

    with pytest.raises(ValueError, match=rf"`context_slice` of {size + 1} positions \(dim 1 of a tensor of shape"):
        context_slice(torch.ones(2, size + 1), mesh)
    ones = torch.ones(1, 1, 2, 2)
    with pytest.raises(RuntimeError, match="DTensor"):
        context_attention(ones, distribute_tensor(ones, mesh), ones, mesh)
    with pytest.raises(RuntimeError, match="mesh_dim"):
        context_slice(torch.ones(2, 64), mesh._get_root_mesh())


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 4])
def test_attention_in_parts_and_its_gradients_equal_those_of_whole_sequences(size: int) -> None:
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    run_world(size, attend_in_parts, seed)


class Reader(nn.Module):
    """A causal transformer of one block. `mesh`: where sequences come in parts."""

    def __init__(self) -> None:
        super().__init__()
        self.mesh: Any = None
        self.embed = nn.Embedding(7, 8)
        self.places = nn.Embedding(12, 8)
        self.mix = nn.Linear(8, 24)
        self.out = nn.Linear(8, 7)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(12, device=tokens.device)
        if self.mesh is not None:
            tokens, places = context_slice(tokens, self.mesh), context_slice(places, self.mesh, dim=0)
        x = self.embed(tokens) + self.places(places)
        query, key, value = (each.unflatten(2, (2, 4)).transpose(1, 2) for each in self.mix(x).chunk(3, dim=2))
        if self.mesh is None:
            attended = scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            attended = context_attention(query, key, value, self.mesh, is_causal=True)
        return self.out(x + attended.transpose(1, 2).flatten(2))


@dataclass(frozen=True)
class Cut:
    """A function with options: the mesh is noted on the model, heads and shards are cut."""

    tensor: bool = False
    shard: bool = False

    def __call__(self, model: Reader, mesh: Any) -> None:
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor import Replicate
        from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

        model.mesh = mesh["context"]
        if self.tensor:
            parallelize_module(model, mesh["tensor"], {"mix": ColwiseParallel(output_layouts=Replicate())})
        if self.shard:
            fully_shard(model, mesh=mesh["shard", "context"]._flatten("shard_context"))


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(7, (3, 8, 12), generator=generator)
    return tokens, tokens.roll(1, dims=2)


def step(model: nn.Module, optimizer: Any, outputs: Tensor, targets: Tensor, backward: Any) -> float:
    loss = cross_entropy(outputs.flatten(0, 1), targets.flatten())
    backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def read_in_parts(fabric: Fabric) -> tuple[list[float], Any]:
    torch.manual_seed(0)
    model = Reader()
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9))
    mesh = fabric._connected.runtime.mesh
    assert mesh is not None
    num_shares = mesh["data"].size() * mesh["shard"].size()
    share = mesh["data"].get_local_rank() * mesh["shard"].size() + mesh["shard"].get_local_rank()
    losses = []
    for tokens, targets in zip(*fabric.to_device(data()), strict=True):
        mine, expected = tokens.chunk(num_shares)[share], targets.chunk(num_shares)[share]
        loss = step(model, optimizer, model(mine), context_slice(expected, mesh["context"]), fabric.backward)
        losses.append(fabric.all_reduce(torch.tensor(loss)).item())
    return losses, fabric.state_dict(model, all_ranks=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "strategy"),
    [
        (2, ModelParallelStrategy(parallelize_fn=Cut(), context=2)),
        (4, ModelParallelStrategy(parallelize_fn=Cut(tensor=True), context=2, tensor=2)),
        (4, ModelParallelStrategy(parallelize_fn=Cut(shard=True), context=2, shard=2)),
        (4, ModelParallelStrategy(parallelize_fn=Cut(), context=2, data=2)),
    ],
    ids=["alone", "tensor", "shard", "data"],
)
def test_training_on_sequences_in_parts_equals_training_on_whole_ones(
    size: int, strategy: ModelParallelStrategy
) -> None:
    fabric = Fabric(accelerator=ACCELERATOR, devices=size, strategy=strategy, launcher="forkserver")
    found = fabric.launch(read_in_parts)
    assert found is not None
    torch.manual_seed(0)
    model = Reader()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    losses = [
        step(model, optimizer, model(tokens), targets, lambda loss: loss.backward())
        for tokens, targets in zip(*data(), strict=True)
    ]
    torch.testing.assert_close(found, (losses, dict(model.state_dict())), rtol=1e-5, atol=1e-5)
