"""Frozen quantised weights with adapters: trained as in one process, broadcast, compared and saved by plain tensors."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from devices import ACCELERATOR
from quantised import Adapted, Int8, make_net, values_of
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import AdamW, Optimizer

from fabric import Fabric, WorkerError
from fabric.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FairScaleFSDPStrategy,
    FairScaleShardedStrategy,
    FSDPStrategy,
    ManualContext,
    ManualStrategy,
    ModelParallelStrategy,
    Parallelized,
    SingleDeviceStrategy,
    Strategy,
)
from fabric.strategies.collectives.collective import CollectiveError
from fabric.strategies.tensors.wrapper_subclass import move, plain_tensors


def cut_the_rest(model: nn.Module, mesh: DeviceMesh) -> None:
    from torch.distributed.fsdp import fully_shard

    fully_shard(
        model, mesh=mesh["shard"], ignored_params={each for each in model.parameters() if isinstance(each, Int8)}
    )


def cut_all(model: nn.Module, mesh: DeviceMesh) -> None:
    from torch.distributed.fsdp import fully_shard

    fully_shard(model, mesh=mesh["shard"])


def average(model: nn.Module, context: ManualContext) -> Parallelized:
    return Parallelized(module=model, averaged=model)


TRAIN: dict[str, tuple[int, Strategy]] = {
    "single_device": (1, SingleDeviceStrategy()),
    "ddp": (2, DDPStrategy()),
    "ddp, shard_optimizer": (2, DDPStrategy(shard_optimizer=True)),
    "fsdp": (2, FSDPStrategy()),
    "fsdp of units": (2, FSDPStrategy(auto_wrap_policy={Adapted})),
    "hsdp": (4, FSDPStrategy(device_mesh=(2, 2))),
    "model_parallel": (2, ModelParallelStrategy(parallelize_fn=cut_the_rest, shard=2)),
    "model_parallel, replicas": (2, ModelParallelStrategy(parallelize_fn=lambda model, mesh: None, data=2)),
    "manual": (2, ManualStrategy(parallelize=average)),
    "ddp_sharded": (2, FairScaleShardedStrategy()),
    "deepspeed_stage_1": (2, DeepSpeedStrategy(stage=1)),
    "deepspeed_stage_2": (2, DeepSpeedStrategy(stage=2)),
}
REFUSE = {
    "deepspeed_stage_3": (DeepSpeedStrategy(stage=3), "`strategy='deepspeed_stage_3'` flattens every parameter"),
    "ddp_fully_sharded": (FairScaleFSDPStrategy(), r"\('0.base.weight', '2.base.weight'\) are of `Int8`"),
    "model_parallel": (
        ModelParallelStrategy(parallelize_fn=cut_all, shard=2),
        "Leave them whole on each rank: `fully_shard",
    ),
}


def optimizer_of(net: nn.Module) -> AdamW:
    return AdamW([each for each in net.parameters() if each.requires_grad], lr=0.01)


def train(model: nn.Module, optimizer: Optimizer, backward: Callable[[Tensor], Any], rank: int, size: int) -> Tensor:
    losses = []
    for step in range(3):
        inputs, targets = torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(step))
        half = slice(rank * 8 // size, (rank + 1) * 8 // size)
        loss = (model(inputs[half]) - targets[half, :2]).square().mean()
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


def spoil(net: nn.Module) -> None:
    """Other values than those of rank 0, in every plain tensor."""
    with torch.no_grad():
        for part in net.modules():
            weight: Any = part.base.weight if isinstance(part, Adapted) else None
            while isinstance(weight, Int8):
                weight.codes.add_(1)
                weight = weight.scales
            if weight is not None:
                weight.mul_(2)


def plain_content(net: nn.Module) -> dict[str, Tensor]:
    return {
        name: values_of(value.detach()) if isinstance(value, Int8) else value
        for name, value in net.state_dict().items()
    }


def train_and_save(fabric: Fabric, path: Path, twice: bool) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """The losses, the state before that was loaded, and the entries of the file."""
    net = make_net(twice=twice)
    if fabric.global_rank:
        spoil(net)
    model, optimizer = fabric.setup(net, optimizer_of(net))
    own = model[0].base.weight
    assert isinstance(own, Int8)
    assert own.shape == (8, 8)
    losses = fabric.all_reduce(train(model, optimizer, fabric.backward, fabric.global_rank, fabric.world_size))
    fabric.save(path, {"model": model, "optimizer": optimizer})
    content = fabric.load(path)["model"]
    kept = own.codes.clone()
    own.codes.zero_()
    fabric.load(path, {"model": model, "optimizer": optimizer})
    assert torch.equal(model[0].base.weight.codes, kept)
    whole = fabric.state_dict(model, all_ranks=True)
    return losses, whole, content


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAIN)
@pytest.mark.parametrize("twice", [False, True], ids=["once", "twice"])
def test_adapters_of_quantised_weights_train_as_in_one_process_and_are_saved_with_them(
    name: str, twice: bool, tmp_path: Path
) -> None:
    size, strategy = TRAIN[name]
    net = make_net(twice=twice)
    expected = train(net, optimizer_of(net), lambda loss: loss.backward(), 0, 1)
    launcher = "forkserver" if size > 1 else "auto"
    fabric = Fabric(accelerator=ACCELERATOR, devices=size, strategy=strategy, launcher=launcher, sanitize="always")
    losses, whole, content = fabric.launch(train_and_save, tmp_path / "saved", twice)
    torch.testing.assert_close(losses.cpu(), expected)
    assert {"0.base.weight.codes", "0.base.weight.scales"} < content.keys() == whole.keys()
    assert ("2.base.weight.scales.codes" in content) == twice
    for key, value in content.items():
        assert type(value) is Tensor
        assert torch.equal(value, whole[key])
    with Fabric(accelerator="cpu", devices=1) as alone:
        other = make_net(twice=twice)
        spoil(other)
        other = alone.setup(other)
        alone.load(tmp_path / "saved", {"model": other})
        torch.testing.assert_close(plain_content(other), plain_content(net))


def set_up(fabric: Fabric) -> None:
    net = make_net()
    fabric.setup(net, optimizer_of(net))


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSE)
def test_strategies_that_cannot_leave_them_whole_say_so_in_setup(name: str) -> None:
    strategy, words = REFUSE[name]
    fabric = Fabric(accelerator=ACCELERATOR, devices=2, strategy=strategy, launcher="forkserver")
    with pytest.raises(WorkerError, match=words):
        fabric.launch(set_up)


def note_what_is_said(fabric: Fabric) -> list[str]:
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("fabric").addHandler(handler)
    set_up(fabric)
    return [each for each in heard if "whole" in each]


@pytest.mark.slow
def test_fsdp_says_once_what_it_leaves_whole() -> None:
    fabric = Fabric(accelerator=ACCELERATOR, devices=2, strategy="fsdp", launcher="forkserver")
    (said,) = fabric.launch(note_what_is_said)
    assert said.startswith("2 frozen parameters of `Sequential` ('0.base.weight', '2.base.weight') are of classes")


def differ(fabric: Fabric) -> None:
    """Another kind of tensor on rank 1; then codes that only rank 1 changes."""
    with pytest.raises(CollectiveError, match=r"2.base.weight: float32 \(8, 8\), frozen, of int8 \(8, 8\)"):
        fabric.setup(make_net(twice=fabric.global_rank == 1))
    net = make_net()
    model, optimizer = fabric.setup(net, optimizer_of(net))
    if fabric.global_rank:
        model[2].base.weight.codes.add_(1)
    train(model, optimizer, fabric.backward, fabric.global_rank, fabric.world_size)


@pytest.mark.slow
def test_ranks_that_differ_in_them_are_found() -> None:
    fabric = Fabric(accelerator=ACCELERATOR, devices=2, strategy="ddp", launcher="forkserver")
    with pytest.raises(
        WorkerError, match=r"SanitizerError: .*`2.base.weight.codes` on rank 1 differs from that on rank 0"
    ):
        fabric.launch(differ)


def average_weights(fabric: Fabric, path: Path) -> None:
    net = make_net(twice=True)
    model, optimizer = fabric.setup(net, optimizer_of(net))
    average = fabric.ema(model, decay=0.5)
    train(model, optimizer, lambda loss: (fabric.backward(loss), average.update()), fabric.global_rank, 2)
    fabric.save(path, {"average": average})
    with average.applied():
        expected = fabric.state_dict(model, all_ranks=True)
    another = fabric.ema(model, decay=0.5)
    fabric.load(path, {"average": another})
    with another.applied():
        torch.testing.assert_close(fabric.state_dict(model, all_ranks=True), expected)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_their_moving_average_is_that_of_the_adapters(strategy: str, tmp_path: Path) -> None:
    fabric = Fabric(accelerator=ACCELERATOR, devices=2, strategy=strategy, launcher="forkserver")
    fabric.launch(average_weights, tmp_path / "average")


def test_a_parameter_that_is_moved_remains_the_object_and_its_plain_tensors_move() -> None:
    weight = make_net(twice=True)[2].base.weight
    move(weight, torch.device("meta"))
    assert isinstance(weight, Int8)
    assert isinstance(weight, nn.Parameter)
    assert not weight.requires_grad
    assert {each.device.type for each in (weight, *plain_tensors(weight).values())} == {"meta"}
