"""A schedule-free optimizer, which evaluates other weights than it trains, and wrappers of an optimizer."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from devices import ACCELERATOR
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import SGD, Optimizer

from fabric import CheckpointError, Fabric
from fabric.strategies import DDPStrategy, Strategy

ZERO = DDPStrategy(shard_optimizer=True)


class ScheduleFree(Optimizer):
    """SGD of Defazio et al., 2024: gradients at `y`, evaluation at `x`, the mean of the steps `z`."""

    updates_each = "element"

    def __init__(self, parameters: Any, lr: float = 0.1, beta: float = 0.5) -> None:
        super().__init__(parameters, {"lr": lr, "beta": beta, "trains": True, "number": 0})

    def _swap(self, trains: bool) -> None:
        for group in self.param_groups:
            if group["trains"] is trains:
                continue
            for parameter in group["params"]:
                state = self.state[parameter]
                if "z" in state:
                    weight = 1 - group["beta"] if trains else 1 - 1 / group["beta"]
                    parameter.data.lerp_(state["z"], weight)
            group["trains"] = trains

    def train(self) -> None:
        self._swap(True)

    def eval(self) -> None:
        self._swap(False)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As optimizers do that keep state in another dtype than the parameter's: torch would convert it."""
        super().load_state_dict(state_dict)
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            for parameter, index in zip(group["params"], saved["params"], strict=True):
                for name, value in state_dict["state"].get(index, {}).items():
                    self.state[parameter][name] = self.state[parameter][name].to(value.dtype)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["number"] += 1
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                z = state.setdefault("z", parameter.clone())
                parameter.lerp_(z, 1 - 1 / group["beta"])  # y to x
                z.sub_(parameter.grad, alpha=group["lr"])
                parameter.lerp_(z, 1 / group["number"]).lerp_(z, 1 - group["beta"])


class Lookahead(Optimizer):
    """As published: it does not call `Optimizer.__init__`, and has some of the attributes that torch asks for."""

    def __init__(self, base: Optimizer) -> None:
        self._optimizer_step_pre_hooks: dict[int, Any] = {}  # type: ignore[assignment]
        self._optimizer_step_post_hooks: dict[int, Any] = {}  # type: ignore[assignment]
        self.base, self.defaults, self.param_groups = base, base.defaults, base.param_groups
        self.state = defaultdict(dict)

    def state_dict(self) -> dict[str, Any]:
        return {"base": self.base.state_dict()}

    def step(self, closure: Any = None) -> Any:
        return self.base.step(closure)


def make(fabric: Fabric) -> tuple[nn.Module, ScheduleFree]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    prepared: tuple[nn.Module, ScheduleFree] = fabric.setup(model, ScheduleFree(model.parameters()))
    return prepared


def evaluate(fabric: Fabric, path: str) -> list[float]:
    """Losses in training and in evaluation between steps, and the weights at the end. In the middle, all is loaded into
    other objects, in evaluation."""
    model, optimizer = make(fabric)
    inputs, targets = torch.arange(16.0).view(4, 4).sin(), torch.arange(12.0).view(4, 3).cos()
    own = slice(fabric.global_rank, None, fabric.world_size)

    def loss() -> Tensor:
        return mse_loss(model(inputs[own]), targets[own])

    found = []
    for step in range(4):
        if step == 2:
            fabric.save(path, {"model": model, "optimizer": optimizer})
            model, optimizer = make(fabric)
            optimizer.eval()
            fabric.load(path, {"model": model, "optimizer": optimizer})
        optimizer.train()
        optimizer.zero_grad()
        trained = loss()
        fabric.backward(trained)
        optimizer.step()
        optimizer.eval()
        with torch.no_grad():
            found += [trained.detach(), loss()]
    of_ranks = [fabric.all_reduce(each).item() for each in found]
    return [*of_ranks, *(each.norm().item() for each in fabric.state_dict(model, all_ranks=True).values())]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "ddp_fully_sharded", "fsdp"], ids=str)
def test_every_rank_evaluates_and_resumes_the_same_weights(strategy: str, tmp_path: Path) -> None:
    expected = Fabric(accelerator=ACCELERATOR, devices=1).launch(evaluate, str(tmp_path / "one"))
    fabric = Fabric(accelerator=ACCELERATOR, devices=2, strategy=strategy, launcher="forkserver")
    assert fabric.launch(evaluate, str(tmp_path / "two")) == pytest.approx(expected, rel=1e-5)


class Nested(SGD):
    """Has a state dict of its own form, as optimizers around another one do."""

    def state_dict(self) -> dict[str, Any]:
        return {"within": super().state_dict()}


def save_nested(fabric: Fabric, path: str) -> None:
    """Two steps, a save, and a load, which is refused."""
    model = nn.Linear(2, 2)
    model, optimizer = fabric.setup(model, Nested(model.parameters(), lr=0.1, momentum=0.9))
    for _ in range(2):
        optimizer.zero_grad()
        fabric.backward(model(torch.ones(1, 2, device=fabric.device)).sum())
        optimizer.step()
    fabric.save(path, {"optimizer": optimizer})
    with pytest.raises(CheckpointError, match="not the state of an optimizer, but a `dict`"):
        fabric.load(path, {"optimizer": optimizer})


@pytest.mark.slow
def test_an_optimizer_with_a_state_dict_of_its_own_form_trains_and_is_saved_under_ddp(tmp_path: Path) -> None:
    fabric = Fabric(accelerator=ACCELERATOR, devices=2, strategy="ddp", launcher="forkserver")
    fabric.launch(save_nested, str(tmp_path / "state"))


def set_up(fabric: Fabric, name: str, part: str) -> None:
    model = nn.Linear(2, 2)
    optimizer = ScheduleFree(model.parameters()) if name == "ScheduleFree" else Lookahead(SGD(model.parameters()))
    with pytest.raises(ValueError, match=re.escape(part)):
        fabric.setup(model, optimizer)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "name", "part"),
    [
        ("deepspeed_stage_2", "ScheduleFree", "`ScheduleFree` writes other weights into the parameters in `eval()`"),
        ("ddp_sharded", "ScheduleFree", "in `eval()` and `train()`, and here a rank has the state of some parameters"),
        (ZERO, "ScheduleFree", "Pass `strategy='ddp'` without `shard_optimizer`, or `strategy='fsdp'`."),
        ("deepspeed_stage_2", "Lookahead", "`Lookahead` is not known to compute the update"),
        ("ddp_sharded", "Lookahead", "`Lookahead` is not known to compute the update"),
        ("ddp_fully_sharded", "Lookahead", "`Lookahead` is not known to compute the update"),
        (ZERO, "Lookahead", "`Lookahead` is not known to compute the update"),
    ],
    ids=str,
)
def test_an_optimizer_whose_state_cannot_be_divided_is_refused_in_setup(
    strategy: Strategy | str, name: str, part: str
) -> None:
    Fabric(accelerator=ACCELERATOR, devices=2, strategy=strategy, launcher="forkserver").launch(set_up, name, part)
