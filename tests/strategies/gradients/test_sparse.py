"""Gradients of `nn.Embedding(sparse=True)`: weights equal those of one process, or an error comes before a step."""

from __future__ import annotations

import pytest
import torch
from devices import ACCELERATOR
from torch import Tensor, nn
from torch.optim import SGD, Optimizer, SparseAdam

from fabric import Fabric, WorkerError
from fabric.strategies import DDPStrategy, ManualContext, ManualStrategy, ModelParallelStrategy, Parallelized, Strategy


class Sparse(nn.Module):
    """Tokens to three classes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 4, sparse=True)
        self.out = nn.Linear(4, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.embed(tokens).mean(dim=1))


def make() -> tuple[Sparse, list[Optimizer]]:
    torch.manual_seed(0)
    model = Sparse()
    return model, [SparseAdam(list(model.embed.parameters()), lr=0.1), SGD(model.out.parameters(), lr=0.5)]


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(12, (3, 8, 3), generator=generator)
    return list(zip(tokens, torch.randint(3, (3, 8), generator=generator), strict=True))


def train(fabric: Fabric) -> dict[str, Tensor]:
    """Two backwards for each step, the first of them kept back."""
    net, made = make()
    model, *optimizers = fabric.setup(net, *made)
    for tokens, targets in batches():
        mine, wanted = (part.chunk(fabric.world_size)[fabric.global_rank].chunk(2) for part in (tokens, targets))
        for last in (False, True):
            with fabric.no_backward_sync(model, enabled=not last):
                fabric.backward(nn.functional.cross_entropy(model(mine[last]), wanted[last]) / 2)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


def fabric_with(strategy: Strategy | str) -> Fabric:
    return Fabric(accelerator=ACCELERATOR, devices=2, strategy=strategy, launcher="forkserver")


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    [DDPStrategy(), DDPStrategy(find_unused_parameters=True), DDPStrategy(shard_optimizer=True)],
    ids=["as it is", "unused", "owners"],
)
def test_ddp_averages_sparse_gradients(strategy: Strategy) -> None:
    found = fabric_with(strategy).launch(train)
    model, optimizers = make()
    for tokens, targets in batches():
        nn.functional.cross_entropy(model(tokens), targets).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(found, dict(model.state_dict()), rtol=1e-5, atol=1e-5)


def average_all(module: nn.Module, context: ManualContext) -> Parallelized:
    return Parallelized(module=module, averaged=module)


def leave_whole(module: nn.Module, mesh: object) -> None:
    """Nothing: replicas."""


def refuse(fabric: Fabric) -> None:
    """Also where one rank has no gradient at all: it is told by the others. No gradient has changed."""
    model = fabric.setup_module(make()[0])
    tokens, targets = batches()[fabric.global_rank]
    for some_rank_has_none in (False, True):
        with fabric.no_backward_sync(model):
            fabric.backward(nn.functional.cross_entropy(model(tokens), targets))
        if some_rank_has_none and fabric.global_rank == 1:
            model.embed.weight.grad = None
        before = [None if p.grad is None else p.grad.to_dense().clone() for p in model.parameters()]
        loss = sum(parameter.sum() for name, parameter in model.named_parameters() if name != "embed.weight")
        with pytest.raises(
            RuntimeError, match=r"A gradient of shape \(12, 4\) is sparse.* Make the layer with `sparse=F"
        ):
            fabric.backward(loss * 0)
        after = [None if p.grad is None else p.grad.to_dense() for p in model.parameters()]
        torch.testing.assert_close(after, before)
        model.zero_grad()


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    [ManualStrategy(parallelize=average_all), ModelParallelStrategy(parallelize_fn=leave_whole, data=2)],
    ids=["manual", "model_parallel"],
)
def test_strategies_that_average_dense_gradients_refuse_sparse_ones_on_every_rank(strategy: Strategy) -> None:
    fabric_with(strategy).launch(refuse)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fsdp", "ddp_sharded", "ddp_fully_sharded", "deepspeed_stage_2"])
def test_strategies_that_shard_gradients_refuse_sparse_ones_in_setup(name: str) -> None:
    with pytest.raises(WorkerError, match=r"ValueError: `embed` of `Sparse` has `sparse=True`, and `strategy="):
        fabric_with(name).launch(set_up)


def set_up(fabric: Fabric) -> None:
    """With one optimizer, for engines that take one."""
    net, _ = make()
    fabric.setup(net, SGD(net.parameters(), lr=0.5))
