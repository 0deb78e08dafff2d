"""Steps whose gradients are not finite are skipped or stopped on all ranks together."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import torch
from devices import ACCELERATOR
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader
from worlds import run_world

from fabric import Fabric, NonFiniteGradientsError
from fabric.launchers.world import World

SAMPLES = torch.randn(24, 4, generator=torch.Generator().manual_seed(3)).to(ACCELERATOR)
BAD = 13


class Net(nn.Module):
    """Its loss is as random as its dropout, and infinite for one sample."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.5), nn.Linear(16, 1))

    def forward(self, indices: Tensor) -> Tensor:
        return self.body(SAMPLES[indices]).flatten() * torch.where(indices == BAD, math.inf, 1.0)  # type: ignore[no-any-return]


def trained(fabric: Fabric, window: int, word: Any) -> dict[str, Any]:
    """One epoch; what each rank saw of the step that was not finite."""
    torch.manual_seed(5)
    fabric.guard_gradients(word)
    net = Net()
    model, optimizer = fabric.setup(net, SGD(net.parameters(), 0.1, momentum=0.9))
    seen: dict[str, Any] = {"skipped": []}
    losses: list[Tensor] = []
    for batches in fabric.accumulate(fabric.setup_dataloaders(DataLoader(range(24), 2)), window):  # type: ignore[arg-type]
        losses = []
        for indices in batches:
            loss = (model(indices) + torch.rand(())).sum()
            fabric.backward(loss, weight=len(indices))
            losses.append(loss.detach().cpu())
        try:
            optimizer.step()
        except NonFiniteGradientsError as error:
            return seen | {"error": str(error), "losses": losses}
        seen["skipped"].append(optimizer.step_was_skipped)
        if optimizer.step_was_skipped:
            seen["losses"] = losses
        optimizer.zero_grad()
    return seen | {"weights": [parameter.isfinite().all().item() for parameter in model.parameters()]}


def connected(world: World, strategy: str = "ddp", precision: str = "32-true") -> Fabric:
    fabric = Fabric(accelerator=ACCELERATOR, strategy=strategy, devices=world.size, precision=precision)
    fabric._connect(world)
    return fabric


def train(world: World, window: int, word: str) -> dict[str, Any]:
    with connected(world) as fabric:
        return trained(fabric, window, word)


@pytest.mark.slow
@pytest.mark.parametrize("window", [1, 3])
def test_ranks_skip_the_same_step_and_keep_finite_weights(window: int) -> None:
    seen = run_world(2, train, window, "skip")
    assert seen[0]["skipped"] == seen[1]["skipped"]
    assert seen[0]["skipped"].count(True) == 1
    assert all(all(each["weights"]) for each in seen)
    assert not torch.stack([*seen[0]["losses"], *seen[1]["losses"]]).isfinite().all()


@pytest.mark.slow
def test_every_rank_raises_before_the_step_and_names_the_rank_with_the_loss() -> None:
    seen = run_world(2, train, 1, "raise")
    step = BAD // 4 + 1
    for each in seen:
        assert len(each["skipped"]) == step - 1
        assert (
            f"the gradients of step {step} (`SGD`) are not finite. The loss was not finite on ranks 0." in each["error"]
        )


def alone(word: Any = "skip", precision: str = "32-true") -> tuple[Fabric, nn.Linear, SGD]:
    fabric = Fabric(accelerator=ACCELERATOR, devices=1, precision=precision)
    fabric.guard_gradients(word)
    net = nn.Linear(4, 1)
    model, optimizer = fabric.setup(net, SGD(net.parameters(), 0.1, momentum=0.9))
    return fabric, model, optimizer


def test_a_skipped_step_changes_neither_weights_nor_momentum_and_its_gradients_are_gone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fabric, model, optimizer = alone()
    fabric.backward(model(SAMPLES[:2]).sum())
    optimizer.step()
    before = model.weight.detach().clone(), optimizer.state_dict()["state"][0]["momentum_buffer"].clone()
    fabric.backward(model(SAMPLES[:2]).sum() * math.nan)
    norm = fabric.clip_gradients(model, optimizer, max_norm=1.0)
    assert norm is not None
    assert norm.isnan()
    with caplog.at_level(logging.WARNING, "fabric"):
        optimizer.step()
    assert optimizer.step_was_skipped
    assert torch.equal(model.weight, before[0])
    assert torch.equal(optimizer.state_dict()["state"][0]["momentum_buffer"], before[1])
    assert model.weight.grad is None
    assert (
        "Skipped a step: the gradients of step 2 (`SGD`) are not finite. The loss was not finite on ranks 0."
        in caplog.text
    )
    fabric.backward(model(SAMPLES[:2]).sum())
    optimizer.step()
    assert not optimizer.step_was_skipped
    assert not torch.equal(model.weight, before[0])


def test_an_overflow_that_the_loss_scale_made_is_left_to_the_scaler() -> None:
    fabric, model, optimizer = alone("raise", "16-mixed")
    scaler = fabric._connected.runtime.loss_scaler
    assert scaler is not None
    for _ in range(16):
        scale = scaler.scale
        fabric.backward(model(SAMPLES[:2]).sum() * math.nan)
        optimizer.step()
        optimizer.zero_grad()
        assert optimizer.step_was_skipped
        scaler.state_dict()
        assert scaler.scale == scale / 2
    assert scaler.scale == 1
    fabric.backward(model(SAMPLES[:2]).sum() * math.nan)
    with pytest.raises(NonFiniteGradientsError, match=r"step 17 .* The loss was not finite on ranks 0"):
        optimizer.step()
    fabric.close()


def test_a_closure_and_another_word_raise() -> None:
    fabric, _, optimizer = alone()
    with pytest.raises(RuntimeError, match=r"`SGD\.step\(closure\)` with `fabric\.guard_gradients`"):
        optimizer.step(lambda: 0.0)
    with pytest.raises(
        ValueError, match=r"`guard_gradients\(on_nonfinite='stop'\)`: write one of 'raise', 'skip', or None"
    ):
        fabric.guard_gradients("stop")  # type: ignore[arg-type]


def test_the_guard_holds_for_optimizers_set_up_before_it_and_ends_on_request_and_at_close() -> None:
    fabric = Fabric(accelerator=ACCELERATOR, devices=1)
    net = nn.Linear(4, 1)
    model, optimizer = fabric.setup(net, SGD(net.parameters(), 0.1))
    for word in ("raise", None, "skip"):
        fabric.guard_gradients(word)  # type: ignore[arg-type]
        fabric.backward(model(SAMPLES[:2]).sum() * math.nan)
        if word == "raise":
            with pytest.raises(NonFiniteGradientsError):
                optimizer.step()
            optimizer.zero_grad()
        else:
            optimizer.step()
            assert optimizer.step_was_skipped == (word == "skip")  # type: ignore[attr-defined]
    assert not model.weight.isfinite().any()
    fabric.close()
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


def diverge(fabric: Fabric, bad: int, num_steps: int) -> None:
    """The last rank has one loss that is not finite."""
    net = nn.Linear(4, 1)
    model, optimizer = fabric.setup(net, SGD(net.parameters(), 0.1))
    for step in range(1, num_steps + 1):
        is_bad = step == bad and fabric.global_rank == fabric.world_size - 1
        inputs = SAMPLES[step % 8 + fabric.global_rank].to(fabric.device)
        fabric.backward(model(inputs).sum() * (math.nan if is_bad else 1.0))
        optimizer.step()
        optimizer.zero_grad()
    fabric.close()  # while the model exists


END = "At the end of the run the weights of `Linear` are not finite."


@pytest.mark.slow
def test_weights_that_are_not_finite_are_said_at_the_end(capfd: pytest.CaptureFixture[str]) -> None:
    Fabric(accelerator=ACCELERATOR, devices=2, launcher="forkserver").launch(diverge, 5, 6)
    heard = capfd.readouterr().err
    assert heard.count(END) == 1
    assert '`fabric.guard_gradients("raise")`' in heard


@pytest.mark.parametrize("sanitize", ["start", False])
def test_one_process_hears_of_weights_that_are_not_finite_at_the_end_unless_it_does_not_want_to(
    sanitize: Any, caplog: pytest.LogCaptureFixture
) -> None:
    fabric = Fabric(accelerator=ACCELERATOR, devices=1, sanitize=sanitize)
    fabric.launch()
    with caplog.at_level(logging.WARNING, "fabric"):
        diverge(fabric, 2, 3)
    assert (END in caplog.text) == (sanitize == "start")


def test_a_step_that_the_loss_scaler_or_the_guard_skips_is_no_news(caplog: pytest.LogCaptureFixture) -> None:
    for precision, word in (("16-mixed", None), ("32-true", "skip")):
        fabric = Fabric(accelerator=ACCELERATOR, devices=1, precision=precision)
        fabric.launch()
        fabric.guard_gradients(word)  # type: ignore[arg-type]
        with caplog.at_level(logging.WARNING, "fabric"):
            diverge(fabric, 2, 3)
    assert "Skipped a step" in caplog.text
    assert END not in caplog.text
