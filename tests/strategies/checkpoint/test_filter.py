"""What a filter leaves out is not read: no rank sends it, and no rank copies it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from devices import ACCELERATOR
from torch import Tensor, nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.optim import SGD

from fabric import Fabric, read_checkpoint
from fabric.strategies.checkpoint.state import state_of


def save_heads(fabric: Fabric, folder: str) -> dict[str, list[object]]:
    net = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(6)))
    model, _ = fabric.setup(net, SGD(net.parameters(), lr=0.1))
    shown: set[tuple[int, ...]] = set()

    def is_last(name: str, tensor: Tensor) -> bool:
        shown.add(tuple(tensor.shape))
        return name == "5.weight"

    fabric.save(f"{folder}/one", {"model": model}, filter={"model": is_last})
    counts = []
    for keep in (None, {"model": is_last}):
        with CommDebugMode() as messages:  # the whole model on rank 0, as `fabric.lightning` saves it
            content = state_of({"model": model}, keep, fabric._objects.state_access)
        counts.append(messages.get_total_counts())
    assert set(content["model"]) <= {"5.weight"}
    return {"counts": list(counts), "shown": list(shown)}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp", "deepspeed_stage_3", "ddp_fully_sharded", "ddp"])
def test_only_what_a_filter_selects_is_gathered_and_it_is_shown_whole_tensors(strategy: str, tmp_path: Path) -> None:
    fabric = Fabric(accelerator=ACCELERATOR, strategy=strategy, devices=2, launcher="forkserver")
    found = fabric.launch(save_heads, str(tmp_path))
    assert found is not None
    assert set(read_checkpoint(tmp_path / "one")["model"]) == {"5.weight"}
    assert found["shown"] == [(4, 4)]
    of_all, of_one = found["counts"]
    assert (of_one, of_all) == ((0, 0) if strategy == "ddp" else (1, 6)), found


def test_a_filter_is_shown_the_values_of_tensors_that_are_not_sharded() -> None:
    model = nn.Linear(3, 2)
    found = state_of({"model": model}, {"model": lambda name, tensor: torch.equal(tensor, model.bias)})
    assert set(found["model"]) == {"bias"}
    assert not model._state_dict_hooks
