"""At ZeRO stage 3 all weights are released between forwards, and a change of them by hand raises."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from devices import ACCELERATOR
from torch import Tensor, nn
from torch.optim import SGD

from fabric import Fabric

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


def change_all(fabric: Fabric, moments: Sequence[str]) -> dict[tuple[str, str], str]:
    return {(moment, name): change_at(fabric, moment, change) for moment in moments for name, change in CHANGES.items()}


@pytest.mark.slow
@pytest.mark.parametrize("moments", [("setup",), pytest.param(MOMENTS, marks=pytest.mark.thorough)])
def test_weights_changed_by_hand_raise(moments: Sequence[str]) -> None:
    found = Fabric(accelerator=ACCELERATOR, devices=2, strategy="deepspeed_stage_3").launch(change_all, moments)
    assert found is not None
    for case, sentence in found.items():
        assert any(words in sentence for words in (TORCHS, *OURS)), (case, sentence)
    assert all(TORCHS in found[moment, "clamp_ of one element"] for moment in moments)


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
    found = Fabric(accelerator=ACCELERATOR, devices=2, strategy="deepspeed_stage_3").launch(pass_and_fail)
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
