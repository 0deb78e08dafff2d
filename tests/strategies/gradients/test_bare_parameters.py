"""Parameters outside of any module, where the case "bare_parameters" of `fabric.testing` says nothing."""

from __future__ import annotations

import pytest
import torch
from devices import ACCELERATOR
from torch import Tensor, nn
from torch.optim import SGD

from fabric import Fabric
from fabric.strategies import DDPStrategy, Strategy


def close(one: Tensor, other: float) -> None:
    torch.testing.assert_close(one.detach().cpu(), torch.tensor(other))


def temperatures(fabric: Fabric) -> None:
    mine = float(fabric.global_rank + 1)  # 1 and 2: their mean is 1.5
    net = nn.Linear(1, 1)
    model, optimizer = fabric.setup(net, SGD(net.parameters(), lr=0.1))

    # Handed over later, from rank 0's value; a backward that no rank's loss goes through leaves it without gradient.
    temperature = nn.Parameter(torch.tensor(mine))
    later = fabric.setup_optimizers(SGD([temperature], lr=1.0))
    close(temperature, 1.0)
    fabric.backward(model(torch.ones(1, 1)).sum())
    assert temperature.grad is None
    # Where only one rank has a gradient, the other counts as zero; what gathered before is averaged once.
    with fabric.no_backward_sync(model):
        fabric.backward(model(torch.ones(1, 1)).sum() + mine * temperature)
    close(temperature.grad, mine)
    fabric.backward(model(torch.ones(1, 1)).sum() + (4.0 * temperature if mine == 1 else 0.0))
    close(temperature.grad, 1.5 + 2.0)
    later.step()
    close(temperature, -2.5)
    later.zero_grad()
    net.extra = nn.Linear(1, 1)
    optimizer.add_param_group({"params": net.extra.parameters()})
    optimizer.step()
    # A module whose parameters came before it.
    critic = nn.Linear(2, 2)
    fabric.setup_optimizers(SGD(critic.parameters(), lr=0.1))
    with pytest.raises(ValueError, match=r"An optimizer that was set up before holds 2 parameters of the `Linear`"):
        fabric.setup(critic)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [DDPStrategy(), DDPStrategy(shard_optimizer=True)], ids=["ddp", "ZeRO-1"])
def test_the_gradients_of_a_temperature_are_averaged_with_those_that_accumulated(strategy: Strategy) -> None:
    Fabric(accelerator=ACCELERATOR, devices=2, strategy=strategy, launcher="forkserver").launch(temperatures)


def saved(fabric: Fabric, path: str) -> float:
    """The momentum that a checkpoint has of an optimizer of bare parameters alone."""
    model = fabric.setup(nn.Linear(1, 1))
    temperature = nn.Parameter(torch.zeros(3))
    optimizer = fabric.setup_optimizers(SGD([temperature], lr=1.0, momentum=0.9))
    fabric.backward(model(torch.ones(1, 1)).sum() + temperature.sum() * (fabric.global_rank + 1))
    optimizer.step()
    fabric.save(path, {"optimizer": optimizer})
    momentum: Tensor = fabric.load(path)["optimizer"]["state"][0]["momentum_buffer"]
    return momentum[0].item()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", DDPStrategy(shard_optimizer=True), "fsdp"], ids=["ddp", "ZeRO-1", "fsdp"])
def test_the_state_of_its_optimizer_is_saved(strategy: str | Strategy, tmp_path: object) -> None:
    fabric = Fabric(accelerator=ACCELERATOR, devices=2, strategy=strategy, launcher="forkserver")
    assert fabric.launch(saved, f"{tmp_path}/state") == 1.5


def scaled(fabric: Fabric) -> list[Tensor]:
    """Under a precision that scales losses: clipped, then stepped."""
    torch.manual_seed(0)
    net, temperature = nn.Linear(2, 1), nn.Parameter(torch.tensor(0.5))
    model, optimizer, other = fabric.setup(net, SGD(net.parameters(), lr=0.1), SGD([temperature], lr=0.1))
    data = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    mine = data if fabric.world_size == 1 else data[fabric.global_rank : fabric.global_rank + 1]
    for _ in range(3):
        fabric.backward((model(mine).float() * temperature).mean())
        fabric.clip_gradients(model, other, max_norm=0.5)
        for each in (optimizer, other):
            each.step()
            each.zero_grad()
    return [temperature.detach(), net.weight.detach()]


@pytest.mark.slow
def test_losses_that_are_scaled_give_the_temperature_of_one_process() -> None:
    together = Fabric(accelerator=ACCELERATOR, devices=2, strategy="ddp", precision="16-mixed", launcher="forkserver")
    alone = Fabric(accelerator=ACCELERATOR, devices=1, strategy="single_device", precision="16-mixed")
    torch.testing.assert_close(together.launch(scaled), alone.launch(scaled), rtol=1e-3, atol=1e-3)
