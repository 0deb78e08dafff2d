"""At ZeRO stage 3 a change of weights by hand raises, whether they are released between forwards or kept gathered."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from devices import ACCELERATOR
from torch import Tensor, nn
from torch.optim import SGD

from fabric import Fabric
from fabric.strategies.deepspeed.strategy import DeepSpeedStrategy

TORCHS = "more than one element of the written-to tensor refers to a single memory location"
OURS = "`scale` was changed after `fabric.setup`", "`weight` was changed after `fabric.setup`"


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4, 4), 0.5))
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight * self.scale).square().sum()


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "clamp_": lambda model: model.weight.data.clamp_(-0.1, 0.1),
    "clamp_ of one element": lambda model: model.scale.data.clamp_(max=0.5),
    "in place": lambda model: model.weight.detach().mul_(2),
    "foreach": lambda model: torch._foreach_mul_([each.data for each in model.parameters()], 0.5),
    "nn.init": lambda model: nn.init.normal_(model.weight),
    "nn.init.eye_": lambda model: nn.init.eye_(model.weight),
    "fill_": lambda model: model.weight.data.fill_(1.0),
    "one index": lambda model: model.weight.data.__setitem__((0, 0), 5.0),
    "assigned": lambda model: setattr(model.scale, "data", torch.zeros(1)),
    "assigned a product": lambda model: setattr(model.weight, "data", model.weight.data * 0.5),
    "assigned another shape": lambda model: setattr(model.weight, "data", torch.zeros(2, 2)),
}
IN_ONE_SHARD = ("clamp_ of one element", "one index", "assigned")
"""In gathered weights only the rank with this shard would raise."""
MOMENTS = ("setup", "forward", "backward", "step")


def change_at(fabric: Fabric, moment: str, change: Callable[[nn.Module], object]) -> str:
    """What two steps raise if the weights are changed in the first of them."""
    net = Scaled()
    model, optimizer = fabric.setup(net, SGD(net.parameters(), lr=0.1))

    def change_after(now: str) -> None:
        if now == moment:
            with torch.no_grad():
                change(model)

    try:
        change_after("setup")
        for step in range(2):
            loss = model(torch.ones(2, 4))
            change_after("forward" if step == 0 else "")
            fabric.backward(loss, model=model)
            change_after("backward" if step == 0 else "")
            optimizer.step()
            optimizer.zero_grad()
            change_after("step" if step == 0 else "")
    except RuntimeError as error:
        return str(error)
    return "nothing"


def change_all(fabric: Fabric, moments: Sequence[str], left_out: Sequence[str]) -> dict[tuple[str, str], str]:
    return {
        (moment, name): change_at(fabric, moment, change)
        for moment in moments
        for name, change in CHANGES.items()
        if name not in left_out
    }


def refuse_changes(moments: Sequence[str], threshold: int, left_out: Sequence[str] = ()) -> None:
    config = {"zero_optimization": {"stage3_param_persistence_threshold": threshold}}
    strategy = DeepSpeedStrategy(stage=3, config=config)
    found = Fabric(accelerator=ACCELERATOR, devices=2, strategy=strategy).launch(change_all, moments, left_out)
    assert found is not None
    for case, sentence in found.items():
        assert any(words in sentence for words in (TORCHS, *OURS)), (case, sentence)
    if threshold == 0:
        assert all(TORCHS in found[moment, "clamp_ of one element"] for moment in moments)


@pytest.mark.slow
def test_weights_that_are_released_raise_when_they_are_changed_by_hand() -> None:
    refuse_changes(("setup",), 0)


@pytest.mark.slow
def test_weights_that_are_kept_gathered_raise_when_they_are_changed_by_hand() -> None:
    refuse_changes(("step",), 100000, IN_ONE_SHARD)


@pytest.mark.slow
def test_the_comparison_of_gathered_weights_is_an_option() -> None:
    strategy = DeepSpeedStrategy(stage=3, compare_weights=False)
    found = Fabric(accelerator=ACCELERATOR, devices=2, strategy=strategy).launch(change_all, ("step",), IN_ONE_SHARD)
    assert found is not None
    assert found["step", "in place"] == "nothing"
    assert any(words in found["step", "assigned a product"] for words in OURS)


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize(("threshold", "left_out"), [(0, ()), (100000, IN_ONE_SHARD)], ids=["released", "gathered"])
def test_weights_changed_by_hand_raise_at_any_moment(threshold: int, left_out: Sequence[str]) -> None:
    refuse_changes(MOMENTS, threshold, left_out)


def pass_and_fail(fabric: Fabric) -> list[float]:
    """A forward, and a backward, that raise leave weights gathered; the next steps are right."""
    net = Scaled()
    model, optimizer = fabric.setup(net, SGD(net.parameters(), lr=0.01))
    losses = []
    for step in range(4):
        try:
            loss = model(torch.ones(2, 4) if step != 1 else torch.ones(2, 3))
        except RuntimeError:
            continue
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
def test_a_forward_that_raises_leaves_the_weights_as_they_were() -> None:
    strategy = DeepSpeedStrategy(stage=3, config={"zero_optimization": {"stage3_param_persistence_threshold": 0}})
    found = Fabric(accelerator=ACCELERATOR, devices=2, strategy=strategy).launch(pass_and_fail)
    net = Scaled()
    optimizer = SGD(net.parameters(), lr=0.01)
    for loss in found or []:
        expected = net(torch.ones(2, 4))
        assert loss == pytest.approx(expected.item(), rel=1e-5)
        expected.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert found is not None
    assert len(found) == 3
