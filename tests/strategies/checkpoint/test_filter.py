"""What a filter leaves out is not saved: no rank sends it, and no rank copies it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from devices import ACCELERATOR
from torch import Tensor, nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.optim import SGD

from fabric import Fabric, read_checkpoint
from fabric.strategies.checkpoint.state import ObjectStates


def save_heads(fabric: Fabric, folder: str) -> list[object]:
    net = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(6)))
    model, _ = fabric.setup(net, SGD(net.parameters(), lr=0.1))
    shown: set[tuple[int, ...]] = set()

    def is_last(name: str, tensor: Tensor) -> bool:
        shown.add(tuple(tensor.shape))
        return name == "5.weight"

    fabric.save(f"{folder}/one", {"model": model}, filter={"model": is_last})
    with CommDebugMode() as messages:
        states = ObjectStates(fabric._connected.objects.state_access)
        states.read({"model": model}, {"model": is_last})
    return [shown, messages.get_total_counts()]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp", "deepspeed_stage_3", "ddp_fully_sharded", "ddp"])
def test_a_filter_is_shown_whole_shapes_and_nothing_is_gathered(strategy: str, tmp_path: Path) -> None:
    fabric = Fabric(accelerator=ACCELERATOR, strategy=strategy, devices=2, launcher="forkserver")
    assert fabric.launch(save_heads, str(tmp_path)) == [{(4, 4)}, 0]
    assert set(read_checkpoint(tmp_path / "one")["model"]) == {"5.weight"}


def test_a_filter_is_shown_the_values_of_tensors_that_are_not_sharded() -> None:
    model = nn.Linear(3, 2)
    found = ObjectStates().read({"model": model}, {"model": lambda name, tensor: torch.equal(tensor, model.bias)})
    assert set(found["model"]) == {"bias"}
