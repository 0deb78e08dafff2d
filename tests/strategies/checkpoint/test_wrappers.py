"""States that are tensors of other classes: torchao's quantised ones, saved by one strategy and resumed by another."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torchao.optim
from torch import Tensor, nn
from torch.optim import Optimizer
from torchao.optim.subclass_4bit import OptimState4bit
from torchao.optim.subclass_8bit import OptimState8bit

from fabric import CheckpointError, Fabric, read_checkpoint
from fabric.strategies import DDPStrategy, Strategy

OPTIMIZERS = {"8 bit": torchao.optim.AdamW8bit, "4 bit": torchao.optim.AdamW4bit}
KINDS = {"8 bit": OptimState8bit, "4 bit": OptimState4bit}


def inner_of(state: Any) -> Any:
    """The plain tensors of a state, by name."""
    if not hasattr(type(state), "__tensor_flatten__"):
        return state
    return {name: getattr(state, name) for name in state.__tensor_flatten__()[0]}


def made(fabric: Fabric, kind: str, seed: int) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(64, 256, bias=False), nn.Linear(256, 64))
    optimizer = OPTIMIZERS[kind](net.parameters(), lr=1e-2)
    optimizer.updates_each = "parameter"  # which `shard_optimizer` asks
    return fabric.setup(net, optimizer)


def train(fabric: Fabric, model: nn.Module, optimizer: Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        loss = model(torch.linspace(-1, 1 + step, 64).expand(4, 64)).square().mean()
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def run(fabric: Fabric, path: str, kind: str) -> tuple[list[float], Any]:
    torch.compiler.set_stance("force_eager")
    model, optimizer = made(fabric, kind, 1)
    train(fabric, model, optimizer, range(2))
    fabric.save(path, {"model": model, "optimizer": optimizer}, blocking=False).wait()
    state = fabric.state_dict(model, optimizer)[1]
    return train(fabric, model, optimizer, range(2, 5)), state


def resume(fabric: Fabric, path: str, kind: str) -> list[float]:
    torch.compiler.set_stance("force_eager")
    model, optimizer = made(fabric, kind, 2)
    fabric.load(path, {"model": model, "optimizer": optimizer})
    return train(fabric, model, optimizer, range(2, 5))


def launched(strategy: str | Strategy) -> Fabric:
    size = 1 if strategy == "single_device" else 2
    return Fabric(accelerator="cpu", strategy=strategy, devices=size, launcher="forkserver", sanitize="always")


SHARDED_OPTIMIZER = DDPStrategy(shard_optimizer=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "saving", "loading"),
    [
        ("8 bit", "fsdp", "ddp"),
        ("8 bit", "ddp", "fsdp"),
        ("8 bit", SHARDED_OPTIMIZER, "single_device"),
        ("4 bit", "single_device", SHARDED_OPTIMIZER),
        ("4 bit", "fsdp", "fsdp"),
    ],
    ids=str,
)
def test_quantised_states_resume_under_other_strategies_with_the_same_losses(
    tmp_path: Path, kind: str, saving: str | Strategy, loading: str | Strategy
) -> None:
    path = str(tmp_path / "saved")
    found = launched(saving).launch(run, path, kind)
    assert found is not None
    losses, state = found
    saved = read_checkpoint(path)["optimizer"]["state"]
    for index in (0, 1):
        moment = saved[index]["exp_avg"]
        assert type(moment) is KINDS[kind]
        torch.testing.assert_close(inner_of(moment), inner_of(state["state"][index]["exp_avg"]), rtol=0, atol=0)
    assert launched(loading).launch(resume, path, kind) == pytest.approx(losses, rel=1e-6)


def test_a_state_of_a_class_that_is_not_imported_is_not_made(tmp_path: Path) -> None:
    with Fabric(accelerator="cpu", devices=1) as fabric:
        fabric.save(tmp_path / "saved", {"x": OptimState8bit.zeros((2, 256)), "y": torch.ones(2)})
    program = f"from fabric import read_checkpoint\nread_checkpoint({str(tmp_path / 'saved')!r})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "OptimState8bit` is made by code of that class, which runs only if torch trusts it. Import" in done.stderr
    assert torch.equal(read_checkpoint(tmp_path / "saved")["x"].dequantize(), torch.zeros(2, 256))


class Scaled(Tensor):
    """Codes and a scale; torch does not trust it."""

    codes: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor) -> Scaled:
        made: Scaled = Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)  # type: ignore[attr-defined]
        made.codes = codes
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], context: None, size: Any, stride: Any) -> Scaled:
        return cls(inner["codes"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(func)


def test_a_tensor_of_a_class_that_torch_does_not_trust_raises_when_it_is_saved(tmp_path: Path) -> None:
    state = {"x": Scaled(torch.ones(3, dtype=torch.uint8))}
    with Fabric(accelerator="cpu", devices=1) as fabric:
        with pytest.raises(CheckpointError, match=r"Scaled` is made by code .*add_safe_globals"):
            fabric.save(tmp_path / "saved", state)
        with torch.serialization.safe_globals([Scaled]):
            fabric.save(tmp_path / "saved", state)
            assert read_checkpoint(tmp_path / "saved")["x"].codes.tolist() == [1, 1, 1]
