"""States in few bits, of torchao (tensors of other classes) and bitsandbytes, resumed under other strategies."""

from __future__ import annotations

import enum
import subprocess
import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torchao.optim
from torch import Tensor, nn
from torch.optim import Optimizer
from torchao.optim.subclass_4bit import OptimState4bit
from torchao.optim.subclass_8bit import OptimState8bit

from fabric import CheckpointError, Fabric, read_checkpoint
from fabric.strategies import DDPStrategy, Strategy

OPTIMIZERS = {
    "8 bit": "torchao.optim.AdamW8bit",
    "4 bit": "torchao.optim.AdamW4bit",
    "other": "bitsandbytes.optim.AdamW8bit",
}
KINDS = {"8 bit": OptimState8bit, "4 bit": OptimState4bit}


def inner_of(state: Any) -> Any:
    """The plain tensors of a state, by name."""
    if not hasattr(type(state), "__tensor_flatten__"):
        return state
    return {name: getattr(state, name) for name in state.__tensor_flatten__()[0]}


def made(fabric: Fabric, kind: str, seed: int) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(64, 256, bias=False), nn.Linear(256, 65))  # 65 rows: no even shards
    package, _, name = OPTIMIZERS[kind].rpartition(".")
    return fabric.setup(net, getattr(import_module(package), name)(net.parameters(), lr=1e-2))


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
        ("other", "fsdp", "ddp"),
        ("other", "ddp", SHARDED_OPTIMIZER),
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
    for index in (0, 1) if kind in KINDS else ():
        moment = saved[index]["exp_avg"]
        assert type(moment) is KINDS[kind]
        torch.testing.assert_close(inner_of(moment), inner_of(state["state"][index]["exp_avg"]), rtol=0, atol=0)
    assert launched(loading).launch(resume, path, kind) == pytest.approx(losses, rel=1e-6)


def test_a_state_of_a_class_that_is_not_imported_is_not_made(tmp_path: Path) -> None:
    with Fabric(accelerator="cpu", devices=1) as fabric:
        fabric.save(tmp_path / "saved", {"x": OptimState8bit.zeros((2, 256)), "y": torch.ones(2)})
    path = str(tmp_path / "saved")
    program = f"from fabric import read_checkpoint as read\nread({path!r}, ['y'])\nprint('other')\nread({path!r})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout == "other\n"  # entries are read without it
    assert "OptimState8bit` is made by code of that class, which runs only if torch trusts it. Import" in done.stderr
    assert torch.equal(read_checkpoint(tmp_path / "saved")["x"].dequantize(), torch.zeros(2, 256))


class Derived(torchao.optim.AdamW8bit):
    """The table does not know it: under fsdp it steps shards."""


def save_shards(fabric: Fabric, path: str) -> None:
    torch.compiler.set_stance("force_eager")
    net = nn.Linear(256, 64, bias=False)
    model, optimizer = fabric.setup(net, Derived(net.parameters()))
    fabric.backward(model(torch.ones(1, 256)).sum())
    optimizer.step()
    words = "states of the class `OptimState8bit`, which knows no shards.* Write `optimizer.updates_each = 'parameter'`"
    with pytest.raises(ValueError, match=words):
        fabric.save(path, {"optimizer": optimizer})
    with pytest.raises(ValueError, match=words):
        fabric.state_dict(model, optimizer)


@pytest.mark.slow
def test_states_of_other_classes_in_shards_are_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "saved")
    Fabric(accelerator="cpu", strategy="fsdp", devices=2, launcher="forkserver", sanitize=False).launch(
        save_shards, path
    )


class Rounding(enum.Enum):
    DOWN = "down"


@dataclass(frozen=True)
class Blocks:
    size: int
    dtype: torch.dtype


class Place(NamedTuple):
    rounding: Rounding
    blocks: Blocks


class Scaled(Tensor):
    """Codes, perhaps of such a tensor again, and how they were made; torch does not trust it."""

    codes: Tensor
    made_how: Any

    @staticmethod
    def __new__(cls, codes: Tensor, made_how: Any = None) -> Scaled:
        made: Scaled = Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)  # type: ignore[attr-defined]
        made.codes, made.made_how = codes, made_how
        return made

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes"], self.made_how

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> Scaled:
        return cls(inner["codes"], context)

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


def test_enums_dataclasses_and_named_tuples_that_torch_trusts_are_saved_with_such_a_tensor_and_alone(
    tmp_path: Path,
) -> None:
    how = Place(Rounding.DOWN, Blocks(4, torch.int8))
    codes = torch.arange(3, dtype=torch.uint8)
    state = {"x": Scaled(Scaled(codes, how), {"how": [how]}), "alone": how}
    with Fabric(accelerator="cpu", devices=1) as fabric:
        with (
            torch.serialization.safe_globals([Scaled]),
            pytest.raises(TypeError, match=r"test_wrappers.Place` at /x/.*is saved if torch trusts its class"),
        ):
            fabric.save(tmp_path / "saved", state)
        with torch.serialization.safe_globals([Scaled, Rounding, Blocks, Place]):
            fabric.save(tmp_path / "saved", state)
            found = read_checkpoint(tmp_path / "saved")
    assert found["alone"] == how
    assert found["x"].made_how == {"how": [how]}
    assert found["x"].codes.made_how == how
    assert torch.equal(found["x"].codes.codes, codes)
