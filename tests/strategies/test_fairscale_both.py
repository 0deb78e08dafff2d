"""Both strategies of FairScale give the numbers of one process of plain PyTorch, in loops that people write.

Each scenario is one function, run twice: with `Plain` in this process on the whole batch, and with a fabric on every
rank on its share. One launch runs them all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, NAdam, Optimizer
from torch.optim.lr_scheduler import StepLR

from fabric import Fabric
from fabric.strategies.fairscale_ddp import FairScaleShardedStrategy
from fabric.strategies.fairscale_fsdp import FairScaleFSDPStrategy
from fabric.strategies.strategy import Strategy

STRATEGIES = {
    "sharded": FairScaleShardedStrategy(launcher="forkserver"),
    "fully-sharded": FairScaleFSDPStrategy(launcher="forkserver"),
    "fully-sharded-parts": FairScaleFSDPStrategy(launcher="forkserver", wrap={nn.Sequential, nn.Linear}),
    "fully-sharded-kept-parts": FairScaleFSDPStrategy(
        launcher="forkserver", wrap=nn.Linear, reshard_after_forward=False, bucket_bytes=4 * 2**20
    ),
}
Weights = dict[str, Tensor]


class Plain:
    """What a fabric offers a loop, in one process."""

    world_size, global_rank = 1, 0

    def setup(self, *objects: Any) -> Any:
        return objects

    def backward(self, loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def no_backward_sync(self, model: nn.Module) -> Any:
        return nullcontext()

    def clip_gradients(self, model: nn.Module, optimizer: Optimizer, **how: Any) -> Any:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if "clip_val" in how:
            return nn.utils.clip_grad_value_(parameters, how["clip_val"])
        return nn.utils.clip_grad_norm_(parameters, how["max_norm"], norm_type=how.get("norm_type", 2.0))

    def all_reduce(self, value: Any) -> Any:
        return value


class Net(nn.Module):
    """Tied weights, one frozen parameter, one that is a single number, sizes that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 7))
        self.last = nn.Linear(7, 3, bias=False)
        self.again = nn.Module()
        self.again.weight = self.last.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": self.last(self.first(x)) * self.scale + self.frozen}


def share(tools: Any, step: int) -> tuple[Tensor, Tensor]:
    """This rank's rows of a global batch of eight."""
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(8, 5, generator=generator), torch.randn(8, 3, generator=generator)
    rows = slice(tools.global_rank, None, tools.world_size)
    return x[rows], y[rows]


def loss_of(tools: Any, model: nn.Module, step: int) -> Tensor:
    x, y = share(tools, step)
    return nn.functional.mse_loss(model(x)["logits"], y)


def make(seed: int = 3) -> Net:
    torch.manual_seed(seed)
    return Net()


def adamw(model: Net) -> AdamW:
    groups = [
        {"params": list(model.first.parameters()), "lr": 0.05, "weight_decay": 0.1},
        {"params": [model.last.weight, model.scale, model.frozen]},
    ]
    return AdamW(groups, lr=0.02, eps=1e-3)


def weights(*models: nn.Module) -> Weights:
    return {f"{i}.{k}": v.detach().clone() for i, model in enumerate(models) for k, v in model.state_dict().items()}


def groups_schedules_and_closures(tools: Any) -> Any:
    model = make()
    optimizer = adamw(model)
    schedule = StepLR(optimizer, 2, gamma=0.5)  # made before setup
    given = optimizer
    model, optimizer = tools.setup(model, optimizer)
    assert optimizer is given
    losses = []
    for step in range(6):

        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            loss = loss_of(tools, model, step)
            tools.backward(loss)
            return loss

        losses.append(tools.all_reduce(optimizer.step(closure).detach()))
        schedule.step()
    return weights(model), losses, [group["lr"] for group in optimizer.param_groups]


def clipping(tools: Any) -> Any:
    model = make()
    model, optimizer = tools.setup(model, NAdam(model.parameters(), lr=0.05, eps=1e-3))
    norms = []
    for step in range(6):
        optimizer.zero_grad()
        tools.backward(loss_of(tools, model, step))
        if step < 4:
            norm_type = (2.0, float("inf"), 1.0, 3.0)[step]
            norms.append(tools.clip_gradients(model, optimizer, max_norm=0.1, norm_type=norm_type))
        elif step == 4:
            tools.clip_gradients(model, optimizer, clip_val=0.01)
        optimizer.step()
    return weights(model), norms


def accumulation_in_every_way(tools: Any) -> Any:
    model = make()
    model, optimizer = tools.setup(model, SGD(model.parameters(), lr=0.05, momentum=0.9))
    for window, synced in enumerate(["0001", "1111", "1101", "1001", "0101"]):
        for micro, sync in enumerate(synced):
            with nullcontext() if sync == "1" else tools.no_backward_sync(model):
                tools.backward(loss_of(tools, model, 10 * window + micro))
        optimizer.step()
        optimizer.zero_grad(set_to_none=window % 2 == 0)
    return weights(model)


def forwards_and_backwards_in_every_order(tools: Any) -> Any:
    model = make()
    model, optimizer = tools.setup(model, SGD(model.parameters(), lr=0.05, momentum=0.9))
    for step in range(4):
        first, second = loss_of(tools, model, step), loss_of(tools, model, 20 + step)
        if step % 2:
            tools.backward(first + second)
        else:
            tools.backward(first)
            tools.backward(second)
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            loss_of(tools, model, 5)
        model.train()
    return weights(model)


def two_models_and_two_optimizers(tools: Any) -> Any:
    generator, critic = make(1), nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 1))
    generator, first = tools.setup(generator, adamw(generator))
    critic, second = tools.setup(critic, SGD(critic.parameters(), lr=0.1))
    for step in range(4):
        x, y = share(tools, step)
        made = generator(x)["logits"]
        second.zero_grad()
        tools.backward(critic(made.detach()).mean() - critic(y).mean())
        second.step()
        first.zero_grad()
        tools.backward(-critic(made).mean())
        first.step()
    return weights(generator, critic)


def freezing_and_thawing(tools: Any) -> Any:
    model = make()
    model, optimizer = tools.setup(model, AdamW(model.parameters(), lr=0.05, eps=1e-3))
    for step in range(9):
        model.first.requires_grad_(step not in (3, 4, 5))
        optimizer.zero_grad()
        tools.backward(loss_of(tools, model, step))
        optimizer.step()
    return weights(model)


def weights_changed_by_hand(tools: Any) -> Any:
    model = make()
    model, optimizer = tools.setup(model, SGD(model.parameters(), lr=0.05))
    for step in range(4):
        with torch.no_grad():
            loss_of(tools, model, step)
            for parameter in model.parameters():
                parameter.mul_(0.9)
        optimizer.zero_grad()
        tools.backward(loss_of(tools, model, step))
        optimizer.step()
    return weights(model)


SCENARIOS: tuple[Callable[[Any], Any], ...] = (
    groups_schedules_and_closures,
    clipping,
    accumulation_in_every_way,
    forwards_and_backwards_in_every_order,
    two_models_and_two_optimizers,
    freezing_and_thawing,
    weights_changed_by_hand,
)


def run_all(fabric: Fabric) -> dict[str, Any]:
    results = {}
    for scenario in SCENARIOS:
        results[scenario.__name__] = scenario(fabric)
        fabric._models.clear()  # the next scenario's backward is of its own models alone
    return results


@pytest.fixture(params=STRATEGIES)
def strategy(request: pytest.FixtureRequest) -> Iterator[Strategy]:
    yield STRATEGIES[request.param]


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_loop_gives_the_numbers_of_one_process(strategy: Strategy, size: int) -> None:
    results = Fabric(accelerator="cpu", strategy=strategy, devices=size).launch(run_all)
    assert results is not None
    for scenario in SCENARIOS:
        torch.testing.assert_close(
            results[scenario.__name__],
            scenario(Plain()),
            rtol=1e-5,
            atol=1e-5,
            msg=lambda message, name=scenario.__name__: f"{name}: {message}",
        )
