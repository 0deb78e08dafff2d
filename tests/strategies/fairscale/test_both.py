"""Both strategies of FairScale give the numbers of one process of plain PyTorch, in loops that people write.

Each scenario is one function, run twice: with `Plain` in this process on the whole batch, and with a fabric on every
rank on its share. One launch runs them all.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from devices import ACCELERATOR
from torch import Tensor, nn
from torch.optim import SGD, AdamW, NAdam, Optimizer
from torch.optim.lr_scheduler import StepLR

from fabric import Fabric, read_checkpoint
from fabric.strategies.fairscale.fsdp import FairScaleFSDPStrategy
from fabric.strategies.fairscale.sharded_ddp import FairScaleShardedStrategy
from fabric.strategies.precision.precision import Precision
from fabric.strategies.strategy import Strategy
from fabric.strategies.tensors.gradient_placeholder import GradientPlaceholder

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


class Block(nn.Sequential):
    """A part within a part."""

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__(nn.Linear(num_in, num_out), nn.Tanh())


class Net(nn.Module):
    """Tied weights, one frozen parameter, one that is a single number, sizes that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(Block(5, 7), nn.Linear(7, 7), Block(7, 7))
        self.last = nn.Linear(7, 3, bias=False)
        self.again = nn.Module()
        self.again.weight = self.last.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.first(x)
        return {"hidden": hidden, "logits": self.last(hidden) * self.scale + self.frozen}


def share(tools: Any, step: int) -> tuple[Tensor, Tensor]:
    """This rank's rows of a global batch of eight."""
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(8, 5, generator=generator), torch.randn(8, 3, generator=generator)
    rows = slice(tools.global_rank, None, tools.world_size)
    return x[rows], y[rows]


def loss_of(tools: Any, model: nn.Module, step: int) -> Tensor:
    x, y = share(tools, step)
    outputs = model(x)
    return nn.functional.mse_loss(outputs["logits"], y) + 0.1 * outputs["hidden"].square().mean()


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
    generator, critic = make(1), nn.Sequential(Block(3, 5), nn.Linear(5, 1))
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


STRATEGIES = {
    "sharded": FairScaleShardedStrategy(launcher="forkserver"),
    "fully-sharded": FairScaleFSDPStrategy(launcher="forkserver"),
    "fully-sharded-parts": FairScaleFSDPStrategy(launcher="forkserver", wrap=nn.Sequential),
    "fully-sharded-kept-parts": FairScaleFSDPStrategy(
        launcher="forkserver", wrap={Block}, reshard_after_forward=False, bucket_bytes=4 * 2**20
    ),
}
KEPT = ((2, "sharded"), (2, "fully-sharded-parts"))
"""What `make test` runs."""


def run_all(fabric: Fabric) -> dict[str, Any]:
    return {scenario.__name__: scenario(fabric) for scenario in SCENARIOS}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "name"),
    [
        pytest.param(size, name, marks=[] if (size, name) in KEPT else [pytest.mark.thorough])
        for size in (1, 2, 4)
        for name in STRATEGIES
    ],
)
def test_every_loop_gives_the_numbers_of_one_process(size: int, name: str) -> None:
    results = Fabric(accelerator=ACCELERATOR, strategy=STRATEGIES[name], devices=size).launch(run_all)
    assert results is not None
    for scenario in SCENARIOS:
        torch.testing.assert_close(
            results[scenario.__name__],
            scenario(Plain()),
            rtol=1e-5,
            atol=1e-5,
            msg=lambda message, scenario=scenario: f"{scenario.__name__}: {message}",
        )


# Saving and loading


def train(tools: Any, model: nn.Module, optimizer: Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        tools.backward(loss_of(tools, model, step))
        optimizer.step()


def save_and_go_on(fabric: Fabric, path: str) -> tuple[Weights, Any]:
    model = make()
    model, optimizer = fabric.setup(model, adamw(model))
    train(fabric, model, optimizer, range(3))
    fabric.save(path, {"model": model, "optimizer": optimizer})
    _, state = fabric.state_dict(model, optimizer)
    train(fabric, model, optimizer, range(3, 6))
    return weights(model), state


def load_and_go_on(fabric: Fabric, path: str) -> Weights:
    model = make(seed=8)
    optimizer = adamw(model)
    train(fabric, *fabric.setup(model, optimizer), range(2))  # state of its own, to be replaced
    fabric.load(path, {"model": model, "optimizer": optimizer})
    train(fabric, model, optimizer, range(3, 6))
    return weights(model)


def set_up_with_state(fabric: Fabric) -> Weights:
    """An optimizer that has stepped before it is set up keeps its state."""
    model = make()
    optimizer = adamw(model)
    train(Plain(), model, optimizer, range(3))
    train(fabric, *fabric.setup(model, optimizer), range(3, 6))
    return weights(model)


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy", [STRATEGIES["sharded"], STRATEGIES["fully-sharded-parts"]], ids=["sharded", "fully"]
)
def test_what_is_saved_loads_into_plain_pytorch_and_into_ddp_and_back(strategy: Strategy, tmp_path: Path) -> None:
    def run(strategy: str | Strategy, size: int, *what: Any) -> Any:
        return Fabric(accelerator=ACCELERATOR, strategy=strategy, devices=size, launcher="forkserver").launch(*what)

    ours, of_ddp = str(tmp_path / "ours"), str(tmp_path / "of_ddp")
    after_six, state = run(strategy, 2, save_and_go_on, ours)
    content = read_checkpoint(ours)
    model = make(seed=8)
    optimizer = adamw(model)
    model.load_state_dict(content["model"])
    optimizer.load_state_dict(content["optimizer"])
    torch.testing.assert_close(state, content["optimizer"])  # given out before three more steps: a copy
    train(Plain(), model, optimizer, range(3, 6))
    close = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(weights(model), after_six, **close)
    torch.testing.assert_close(run("ddp", 2, load_and_go_on, ours), after_six, **close)
    torch.testing.assert_close(run(strategy, 4, load_and_go_on, ours), after_six, **close)
    run("ddp", 2, save_and_go_on, of_ddp)
    torch.testing.assert_close(run(strategy, 2, load_and_go_on, of_ddp), after_six, **close)
    torch.testing.assert_close(run(strategy, 2, set_up_with_state), after_six, **close)


# Against ddp


class Normed(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(Block(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))


def normalise(fabric: Fabric) -> tuple[Weights, bool]:
    torch.manual_seed(fabric.global_rank)  # each rank starts from weights of its own
    model = Normed()
    model, optimizer = fabric.setup(model, SGD(model.parameters(), lr=0.1, momentum=0.9))
    for step in range(4):
        x, y = share(fabric, step)
        optimizer.zero_grad()
        fabric.backward(nn.functional.mse_loss(model(x), y))
        optimizer.step()
    own = weights(model)
    means = fabric.all_gather(own["0.1.running_mean"])
    return own, bool(means.eq(means[0]).all())


def overflow_on_one_rank(fabric: Fabric) -> tuple[Weights, int]:
    model = make()
    model, optimizer = fabric.setup(model, SGD(model.parameters(), lr=0.1))
    for step in range(4):
        loss = loss_of(fabric, model, step)
        if step == 2 and fabric.global_rank == 1:
            loss = loss * float("inf")
        optimizer.zero_grad()
        fabric.backward(loss)
        norm = fabric.clip_gradients(model, optimizer, max_norm=0.5)
        assert bool(norm.isfinite()) == (step != 2)
        optimizer.step()
    scaler = fabric._connected.runtime.loss_scaler
    assert scaler is not None
    return weights(model), scaler.num_skipped


def overflow_and_normalise(fabric: Fabric) -> Any:
    return overflow_on_one_rank(fabric), normalise(fabric)


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy", [STRATEGIES["sharded"], STRATEGIES["fully-sharded-parts"]], ids=["sharded", "fully"]
)
def test_buffers_follow_rank_zero_and_an_overflow_on_one_rank_skips_the_step_on_all(strategy: Strategy) -> None:
    half = replace(Precision.parse("16-mixed"), init_scale=2.0**8)

    def run(strategy: str | Strategy) -> Any:
        fabric = Fabric(accelerator=ACCELERATOR, strategy=strategy, devices=2, launcher="forkserver", plugins=half)
        return fabric.launch(overflow_and_normalise)

    (own, num_skipped), (normed, alike) = run(strategy)
    (of_ddp, _), (normed_by_ddp, _) = run("ddp")
    assert num_skipped == 1
    assert alike
    torch.testing.assert_close(own, of_ddp, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(normed, normed_by_ddp, rtol=1e-3, atol=1e-3)


# What cannot be done


def sentence(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """The error that a call raises, with its type."""
    try:
        function(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def mistakes(fabric: Fabric) -> dict[str, str]:
    reported = {}
    model = make()
    model, optimizer = fabric.setup(model, adamw(model))
    with fabric.no_backward_sync(model):
        fabric.backward(loss_of(fabric, model, 0))
    reported["step"] = sentence(optimizer.step)
    reported["clip"] = sentence(fabric.clip_gradients, model, optimizer, clip_val=1.0)
    optimizer.zero_grad()
    reported["unused"] = sentence(fabric.backward, model(share(fabric, 0)[0])["hidden"].sum())
    optimizer.zero_grad()
    fabric.backward(loss_of(fabric, model, 0))
    reported["norm"] = sentence(fabric.clip_gradients, model, optimizer, max_norm=1.0, norm_type=0)
    for parameter in model.parameters():
        if parameter.grad is not None and not isinstance(parameter.grad, GradientPlaceholder):
            parameter.grad.fill_(float("nan"))
    reported["nan"] = sentence(fabric.clip_gradients, model, optimizer, max_norm=1.0)
    reported["nan allowed"] = sentence(fabric.clip_gradients, model, optimizer, max_norm=1.0, error_if_nonfinite=False)
    other = make()
    reported["lbfgs"] = sentence(fabric.setup, other, torch.optim.LBFGS(other.parameters()))
    return reported


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sharded", "fully-sharded"])
def test_unsupported_uses_raise_on_every_rank(name: str) -> None:
    reported = Fabric(accelerator=ACCELERATOR, strategy=STRATEGIES[name], devices=2).launch(mistakes)
    assert reported is not None
    assert "RuntimeError: `AdamW` holds gradients that were not averaged over the ranks" in reported["step"]
    assert reported["clip"] == reported["step"]
    assert "RuntimeError: 2 parameters of `Net` ('scale', 'last.weight') got no gradient" in reported["unused"]
    assert "ValueError: `norm_type=0.0` over shards" in reported["norm"]
    assert "RuntimeError: The gradients' total norm of order 2.0 is nan, so they cannot be clipped" in reported["nan"]
    assert reported["nan allowed"] == "no error"
    assert "cannot run `LBFGS`: each rank has a part of the gradients" in reported["lbfgs"]


# What is left as it was


def tidiness(fabric: Fabric) -> dict[str, Any]:
    import logging
    import sys

    model = make()
    optimizer = adamw(model)
    before = set(vars(model)), {name for name, value in vars(optimizer).items() if value}
    handlers = list(logging.root.handlers)
    prepared, same = fabric.setup(model, optimizer)
    train(fabric, model, optimizer, range(1))
    found = {
        "same objects": prepared is model and same is optimizer,
        "names": [name for name, _ in model.named_parameters()],
        "handlers": logging.root.handlers == handlers,
        "copies": [name for name in sys.modules if "on_cpu" in name],
    }
    fabric.close()
    after = set(vars(model)), {name for name, value in vars(optimizer).items() if value}
    found["left"] = (after[0] ^ before[0], (after[1] ^ before[1]) - {"state"})
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sharded", "fully-sharded-parts"])
def test_the_users_objects_are_the_same_and_nothing_of_ours_stays_on_them(name: str) -> None:
    found = Fabric(accelerator=ACCELERATOR, strategy=STRATEGIES[name], devices=2).launch(tidiness)
    assert found is not None
    assert found["same objects"]
    assert found["names"] == [name for name, _ in make().named_parameters()]
    assert found["handlers"]
    assert not found["copies"]
    assert found["left"] == (set(), set())
