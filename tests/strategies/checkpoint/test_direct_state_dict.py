"""A file that rank 0 writes by hand, `torch.save(model.state_dict())`, of a model of which it has shards."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from devices import ACCELERATOR
from torch import nn
from torch.optim import SGD

from fabric import Fabric
from fabric.strategies import ModelParallelStrategy, Strategy
from fabric.strategies.tensors.dtensor import as_sharded

LOAD = """
import sys
from torch import nn
from fabric import CheckpointError, Fabric

fabric = Fabric(accelerator="cpu", devices=1)
for load in (lambda: fabric.load_raw(sys.argv[1], nn.Linear(8, 4)), lambda: fabric.load(sys.argv[1], {"weight": 1})):
    try:
        load()
    except CheckpointError as error:
        print(error)
"""


class Collected(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def sharded(model: nn.Module, mesh: object) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    return fully_shard(model, mesh=mesh["shard"])  # type: ignore[index, no-any-return]


def write_by_hand(fabric: Fabric, path: str) -> tuple[list[str], list[str]]:
    collected = Collected()
    logging.getLogger("fabric").addHandler(collected)
    net = nn.Sequential(nn.Linear(8, 4))
    model, optimizer = fabric.setup(net, SGD(net.parameters(), lr=0.1))
    fabric.backward(model(torch.ones(2, 8)).sum())
    optimizer.step()
    fabric.save(f"{path}.saved", {"model": model})
    fabric.load(f"{path}.saved", {"model": model})
    whole = fabric.state_dict(model)
    for part, state in ((model, nn.Sequential(nn.Linear(8, 4)).state_dict()), (model[0], nn.Linear(8, 4).state_dict())):
        with pytest.raises(ValueError, match=r"the model is sharded, and '(0\.)?weight' is given as a whole tensor"):
            part.load_state_dict(state)
    if as_sharded(next(model.parameters())) is not None:  # DeepSpeed refuses each `load_state_dict`
        moments = {"state": {0: {"momentum_buffer": torch.ones(4, 8)}}, "param_groups": [{"params": [0, 1]}]}
        with pytest.raises(ValueError, match="'momentum_buffer' of parameter 0 is given as a whole tensor"):
            optimizer.load_state_dict(moments)
    before = list(collected.messages)
    if as_sharded(next(model.parameters())) is None:
        with pytest.raises(RuntimeError, match=r"'weight' has no values at ZeRO stage 3.*save_pretrained"):
            model[0].state_dict()
        return before, []
    if fabric.is_global_zero:
        for _ in range(2):
            torch.save(model[0].state_dict(), path)
        torch.save({name.removeprefix("0."): tensor for name, tensor in whole.items()}, f"{path}.right")
    model.load_state_dict(model.state_dict())
    return before, collected.messages


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    ["fsdp", "deepspeed_stage_3", ModelParallelStrategy(parallelize_fn=sharded, shard=2)],
    ids=["fsdp", "deepspeed_stage_3", "model_parallel"],
)
def test_a_file_written_by_hand_of_a_sharded_model_is_reported_once_and_names_the_mistake_when_it_is_loaded(
    tmp_path: Path, strategy: str | Strategy
) -> None:
    path = tmp_path / "weights.pt"
    launched = Fabric(accelerator=ACCELERATOR, strategy=strategy, devices=2, launcher="forkserver")
    found = launched.launch(write_by_hand, str(path))
    assert found is not None
    before, messages = found
    if strategy == "deepspeed_stage_3":
        return
    assert not [each for each in before if "state_dict()" in each]
    (message,) = [each for each in messages if "state_dict()" in each]
    assert message.startswith("`Linear.state_dict()`: the model is sharded, and 'weight' has only this rank's part")
    assert "call `state = fabric.state_dict(model)` on every rank; on rank 0" in message
    assert "`model.save_pretrained(path, state_dict=state)`" in message
    done = subprocess.run([sys.executable, "-c", LOAD, str(path)], capture_output=True, text=True, check=True)
    assert "written by hand from `model.state_dict()` of a sharded model" in done.stdout
    assert "call `state = fabric.state_dict(model)` on every rank" in done.stdout
    with Fabric(accelerator=ACCELERATOR, devices=1) as fabric:
        fabric.load_raw(f"{path}.right", nn.Linear(8, 4))


def test_the_state_dict_of_a_model_that_each_rank_has_whole_is_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    with Fabric(accelerator=ACCELERATOR, strategy="ddp", devices=1) as fabric:
        model = fabric.setup(nn.Linear(8, 4))
        assert model.state_dict()["weight"].shape == (4, 8)
        assert not model._state_dict_hooks
    assert "state_dict" not in caplog.text
