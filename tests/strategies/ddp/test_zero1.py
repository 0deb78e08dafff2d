"""With its optimizer state dealt out, data parallel gives the numbers of one process of plain PyTorch.

Each scenario is one function, run twice: with `Plain` in this process on the whole batch, and with a fabric on every
rank on its share. One launch runs them all.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from devices import ACCELERATOR
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from fabric import Fabric, read_checkpoint
from fabric.strategies import DDPStrategy, Strategy
from fabric.strategies.precision.precision import Precision
from fabric.strategies.tensors.dtensor import whole

ZERO = DDPStrategy(shard_optimizer=True)


def ranks(size: int = 2, strategy: Strategy | str = ZERO, **options: Any) -> Fabric:
    options.setdefault("precision", "64-true")
    return Fabric(accelerator=ACCELERATOR, strategy=strategy, devices=size, launcher="forkserver", **options)


class Plain:
    """What a fabric offers a loop, in one process."""

    world_size, global_rank = 1, 0

    def setup(self, model: nn.Module, *optimizers: Optimizer) -> Any:
        return (model.double(), *optimizers)

    def setup_module(self, model: nn.Module) -> nn.Module:
        return model.double()

    def setup_optimizers(self, *optimizers: Optimizer) -> Any:
        return optimizers[0]

    def backward(self, loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def no_backward_sync(self, model: nn.Module, enabled: bool = True) -> Any:
        return nullcontext()

    def clip_gradients(self, model: nn.Module, optimizer: Optimizer, **how: Any) -> Any:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if "clip_val" in how:
            return nn.utils.clip_grad_value_(parameters, how["clip_val"])
        return nn.utils.clip_grad_norm_(parameters, how["max_norm"])

    def all_reduce(self, value: Any) -> Any:
        return value


class Net(nn.Module):
    """Tied weights, a frozen parameter, a single row, sizes that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 7))
        self.last = nn.Linear(7, 3, bias=False)
        self.again = nn.Module()
        self.again.weight = self.last.weight
        self.scale = nn.Parameter(torch.tensor([1.5]))
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x)) * self.scale + self.frozen


def share(tools: Any, step: int) -> tuple[Tensor, Tensor]:
    """This rank's rows of a global batch of eight."""
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(8, 5, generator=generator).double(), torch.randn(8, 3, generator=generator).double()
    rows = slice(tools.global_rank, None, tools.world_size)
    return x[rows], y[rows]


def loss_of(tools: Any, model: nn.Module, step: int) -> Tensor:
    x, y = share(tools, step)
    return nn.functional.mse_loss(model(x), y)


def make(seed: int = 3) -> Net:
    torch.manual_seed(seed)
    return Net()


def adamw(model: Net) -> AdamW:
    groups = [
        {"params": list(model.first.parameters()), "lr": 0.05, "weight_decay": 0.1},
        {"params": [model.last.weight, model.scale, model.frozen]},
    ]
    return AdamW(groups, lr=0.02)


def weights(*models: nn.Module) -> dict[str, Tensor]:
    """All of them, whole. Ranks: all."""
    named = [(f"{i}.{name}", one) for i, model in enumerate(models) for name, one in model.state_dict().items()]
    return {name: whole(tensor).detach().clone() for name, tensor in named}


def train(tools: Any, model: nn.Module, optimizer: Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        tools.backward(loss_of(tools, model, step))
        optimizer.step()


def groups_schedules_and_closures(tools: Any) -> Any:
    model = make()
    optimizer = adamw(model)
    schedule = StepLR(optimizer, 2, gamma=0.5)  # made before setup
    model, same = tools.setup(model, optimizer)
    assert same is optimizer
    plateau = ReduceLROnPlateau(optimizer, factor=0.7, patience=0)
    losses = []
    for step in range(6):

        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            loss = loss_of(tools, model, step)
            tools.backward(loss)
            return loss

        named = {"closure": closure} if step % 3 == 0 else {}
        losses.append(tools.all_reduce(optimizer.step(*([] if named else [closure]), **named).detach()))
        schedule.step()
        plateau.step(losses[-1])
    return weights(model), losses, [group["lr"] for group in optimizer.param_groups]


class LooksTwice(Optimizer):
    """Calls its closure twice in a step, and steps with what has gathered."""

    updates_each = "element"

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor]) -> Tensor:
        with torch.enable_grad():
            closure()
            loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-group["lr"])
        return loss


def closures_that_run_twice(tools: Any) -> Any:
    model = make()
    model, optimizer = tools.setup(model, LooksTwice(model.parameters()))
    for step in range(3):

        def closure(step: int = step) -> Tensor:
            loss = loss_of(tools, model, step)
            tools.backward(loss)
            return loss

        optimizer.step(closure)
        optimizer.zero_grad()
    return weights(model)


def accumulation_and_clipping(tools: Any) -> Any:
    model = make()
    model, optimizer = tools.setup(model, SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True))
    norms = []
    for window in range(5):
        for micro in range(3):
            with tools.no_backward_sync(model, enabled=micro < 2):
                tools.backward(loss_of(tools, model, 10 * window + micro) / 3)
        if window % 2:
            tools.clip_gradients(model, optimizer, clip_val=0.01)
        else:
            norms.append(tools.clip_gradients(model, optimizer, max_norm=0.1))
        optimizer.step()
        optimizer.zero_grad(set_to_none=window % 2 == 0)
    return weights(model), norms


def gradients_go_on_after_a_step(tools: Any) -> Any:
    """Without `zero_grad`: what was out of the optimizer's sight in a step is there again after it."""
    model = make()
    model, optimizer = tools.setup(model, SGD(model.parameters(), lr=0.01))
    for step in range(3):
        tools.backward(loss_of(tools, model, step))
        optimizer.step()
    return weights(model), [p.grad.clone() for p in model.parameters() if p.grad is not None]


def two_models_and_optimizers(tools: Any) -> Any:
    torch.manual_seed(5)
    maker, critic = make(1), nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
    maker = tools.setup_module(maker)
    critic, of_critic = tools.setup(critic, SGD(critic.parameters(), lr=0.1))
    of_maker = tools.setup_optimizers(adamw(maker))
    for step in range(4):
        x, y = share(tools, step)
        made = maker(x)
        of_critic.zero_grad()
        tools.backward(critic(made.detach()).mean() - critic(y).mean())
        of_critic.step()
        of_maker.zero_grad()
        tools.backward(-critic(made).mean())
        of_maker.step()
    return weights(maker, critic)


def two_optimizers_of_one_model(tools: Any) -> Any:
    """One of them over parameters of the other, too."""
    model = make()
    model, first, second = tools.setup(model, AdamW(model.parameters(), lr=0.03), SGD(model.first.parameters(), lr=0.1))
    for step in range(4):
        first.zero_grad()
        tools.backward(loss_of(tools, model, step))
        (second if step % 2 else first).step()
    return weights(model)


def freezing_thawing_and_adding(tools: Any) -> Any:
    model = make()
    model, optimizer = tools.setup(model, AdamW(model.first.parameters(), lr=0.05))
    for step in range(9):
        if step == 2:
            optimizer.add_param_group({"params": [model.last.weight, model.scale], "lr": 0.01})
        model.scale.requires_grad_(step != 4)  # frozen with a gradient from before: plain torch steps it
        if step != 4:
            optimizer.zero_grad()
            tools.backward(loss_of(tools, model, step))
        optimizer.step()
    return weights(model)


def state_from_before(tools: Any) -> Any:
    """An optimizer that has stepped before it is set up keeps its state."""
    model = make().double()
    optimizer = adamw(model)
    train(Plain(), model, optimizer, range(3))
    train(tools, *tools.setup(model, optimizer), range(3, 6))
    return weights(model)


SCENARIOS: tuple[Callable[[Any], Any], ...] = (
    groups_schedules_and_closures,
    closures_that_run_twice,
    accumulation_and_clipping,
    gradients_go_on_after_a_step,
    two_models_and_optimizers,
    two_optimizers_of_one_model,
    freezing_thawing_and_adding,
    state_from_before,
)


def run_all(fabric: Fabric) -> dict[str, Any]:
    return {scenario.__name__: scenario(fabric) for scenario in SCENARIOS}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "strategy"),
    [
        (1, ZERO),
        (2, ZERO),
        (4, ZERO),
        (2, DDPStrategy(shard_optimizer=True, gradient_as_bucket_view=True, find_unused_parameters=True)),
    ],
    ids=["one", "two", "four", "views"],
)
def test_every_loop_gives_the_numbers_of_one_process(size: int, strategy: Strategy) -> None:
    results = ranks(size, strategy).launch(run_all)
    assert results is not None
    for scenario in SCENARIOS:
        torch.testing.assert_close(
            results[scenario.__name__],
            scenario(Plain()),
            rtol=1e-10,
            atol=1e-10,
            msg=lambda message, scenario=scenario: f"{scenario.__name__}: {message}",
        )


# Saving and loading


def save_and_go_on(fabric: Fabric, path: str) -> dict[str, Tensor]:
    model = make()
    model, optimizer = fabric.setup(model, adamw(model))
    train(fabric, model, optimizer, range(3))
    fabric.save(path, {"model": model, "optimizer": optimizer})
    train(fabric, model, optimizer, range(3, 6))
    return weights(model)


def load_and_go_on(fabric: Fabric, path: str) -> dict[str, Tensor]:
    model = make(seed=8)
    optimizer = adamw(model)
    train(fabric, *fabric.setup(model, optimizer), range(2))  # state of its own, to be replaced
    fabric.load(path, {"model": model, "optimizer": optimizer})
    train(fabric, model, optimizer, range(3, 6))
    return weights(model)


def halves_apart(fabric: Fabric, path: str) -> dict[str, Tensor]:
    """The optimizer is set up on its own, and loads a plain state by hand."""
    model = fabric.setup_module(make(seed=8))
    optimizer = fabric.setup_optimizers(adamw(model))
    content = torch.load(path)
    model.load_state_dict(content["model"])
    optimizer.load_state_dict(content["optimizer"])
    fabric.save(f"{path}.again", {"model": model, "optimizer": optimizer})
    train(fabric, model, optimizer, range(3, 6))
    held = fabric.all_gather(torch.tensor(len(optimizer.state)))
    assert held.sum() == len(content["optimizer"]["state"]), held  # each entry on one rank alone
    return weights(model)


@pytest.mark.thorough
@pytest.mark.slow
def test_a_checkpoint_is_that_of_one_process_and_loads_under_any_strategy_and_world_size(tmp_path: Path) -> None:
    path, of_plain, of_fsdp = str(tmp_path / "zero"), str(tmp_path / "plain"), str(tmp_path / "fsdp")
    after_six = ranks().launch(save_and_go_on, path)
    model = make().double()
    optimizer = adamw(model)
    train(Plain(), model, optimizer, range(3))
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, of_plain)
    close = {"rtol": 1e-10, "atol": 1e-10}
    names = ["model", "optimizer"]
    torch.testing.assert_close(read_checkpoint(path, names), torch.load(of_plain), **close)
    train(Plain(), model, optimizer, range(3, 6))
    torch.testing.assert_close(after_six, weights(model), **close)
    ranks(2, "fsdp").launch(save_and_go_on, of_fsdp)
    for size, strategy, source in ((4, ZERO, path), (2, "fsdp", path), (2, "ddp", path), (2, ZERO, of_fsdp)):
        torch.testing.assert_close(ranks(size, strategy).launch(load_and_go_on, source), after_six, **close)
    torch.testing.assert_close(ranks().launch(halves_apart, of_plain), after_six, **close)
    torch.testing.assert_close(read_checkpoint(f"{of_plain}.again", names), torch.load(of_plain), **close)


# Half precision


def overflow(fabric: Fabric) -> tuple[dict[str, Tensor], int, Any]:
    model = nn.Linear(5, 3)
    nn.init.constant_(model.weight, 0.25)
    nn.init.zeros_(model.bias)
    model, optimizer = fabric.setup(model, AdamW(model.parameters(), lr=0.1))
    for step in range(4):
        x, y = (part.float() for part in share(fabric, step))
        loss = nn.functional.mse_loss(model(x).float(), y)
        if step == 2 and fabric.global_rank == 1:
            loss = loss * float("inf")
        optimizer.zero_grad()
        fabric.backward(loss)
        optimizer.step()
    scaler = fabric._connected.runtime.loss_scaler
    assert scaler is not None
    counts = {int(entries["step"]) for entries in optimizer.state.values()}
    return weights(model), scaler.num_skipped, counts


@pytest.mark.slow
def test_a_step_that_overflows_is_skipped_by_every_owner() -> None:
    half = replace(Precision.parse("16-mixed"), init_scale=2.0**8)
    zero = ranks(precision="32-true", plugins=half).launch(overflow)
    ddp = ranks(strategy="ddp", precision="32-true", plugins=half).launch(overflow)
    assert zero is not None
    assert zero[1:] == (1, {3})
    assert ddp is not None
    torch.testing.assert_close(zero[0], ddp[0], rtol=0, atol=0)


# What each rank has, and what it says


def sentence(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    try:
        function(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def possessions(fabric: Fabric) -> dict[str, Any]:
    found: dict[str, Any] = {}
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 8)).double()
    optimizer = AdamW(model.parameters(), foreach=False)  # of what torch's fused step writes, autograd does not hear
    sizes = [parameter.numel() for parameter in model.parameters()]
    model(torch.ones(2, 4).double()).sum().backward()
    optimizer.step()  # every rank has the whole state
    optimizer.zero_grad()
    hooks = {name: len(value) for name, value in vars(optimizer).items() if "hook" in name}
    model, optimizer = fabric.setup(model, optimizer)
    fabric.backward(model(torch.ones(2, 4).double()).sum())
    optimizer.step()
    owned = fabric.all_gather(torch.tensor([parameter in optimizer.state for parameter in model.parameters()]))
    found["owners of each"] = owned.sum(0).tolist()
    found["numbers on each rank"] = (owned * torch.tensor(sizes)).sum(1).tolist()
    found["state_dict"] = sentence(optimizer.state_dict)
    found["copy"] = type(copy.deepcopy(optimizer)), type(pickle.loads(pickle.dumps(optimizer)))
    other = nn.Linear(2, 2)
    found["lbfgs"] = sentence(fabric.setup, other, LBFGS(other.parameters()))
    found["lbfgs left it"] = "mark_forward_method" in dir(other)
    # Autograd hears of the step on every rank: a backward through a forward from before it raises everywhere.
    before = [parameter._version for parameter in model.parameters()]
    optimizer.step()
    versioned = [parameter._version > was for parameter, was in zip(model.parameters(), before, strict=True)]
    found["versions"] = fabric.all_gather(torch.tensor(versioned)).tolist()
    fabric.close()
    found["hooks left"] = hooks == {name: len(value) for name, value in vars(optimizer).items() if "hook" in name}
    return found


@pytest.mark.slow
def test_each_parameter_has_one_owner_and_the_ranks_own_about_as_much() -> None:
    found = ranks().launch(possessions)
    assert found is not None
    assert found["owners of each"] == [1] * 6
    assert found["numbers on each rank"] == [40, 40]
    assert "this rank has only the state of the parameters that it steps. `fabric.save(path," in found["state_dict"]
    assert found["copy"] == (AdamW, AdamW)
    assert "ValueError: `shard_optimizer=True` cannot run `LBFGS`" in found["lbfgs"]
    assert not found["lbfgs left it"]
    assert found["versions"] == [[True] * 6] * 2
    assert found["hooks left"]
