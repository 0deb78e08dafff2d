"""What is offloaded, and where it is refused; on a device: `tests/device/test_activation_offload.py`."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from fabric import Fabric
from fabric.strategies.module.activation_offload import offload
from fabric.strategies.strategy_registry import make_strategy


@pytest.mark.parametrize("name", ["ddp", "fsdp", "deepspeed"])
def test_the_cpu_has_its_activations_on_the_host_already(name: str) -> None:
    strategy = replace(make_strategy(name), activation_offload="blocks")
    with pytest.raises(ValueError, match=r"`activation_offload` with `accelerator='cpu'`: .* Leave it out here"):
        Fabric(accelerator="cpu", devices=2, strategy=strategy)


def test_a_model_without_blocks_is_refused_and_the_forward_is_restored() -> None:
    with pytest.raises(ValueError, match="`activation_offload='blocks'`: `Linear` has no blocks"):
        offload(nn.Linear(2, 2), "blocks")
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    undo = offload(model, {nn.Linear})
    x = torch.ones(1, 2)
    model(x).sum().backward()
    assert "forward" in vars(model[0])
    undo()
    assert "forward" not in vars(model[0])
