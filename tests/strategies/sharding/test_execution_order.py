"""Ranks that run submodules in different orders raise, where a submodule's parameters are gathered when it runs."""

from __future__ import annotations

import re

import pytest
import torch
from devices import ACCELERATOR
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.optim import SGD

from fabric import Fabric
from fabric.launchers import WorkerError
from fabric.strategies import (
    DeepSpeedStrategy,
    FairScaleFSDPStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    Strategy,
)


class Experts(nn.Module):
    """Two layers alike, of which the second counts twice."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, names: tuple[str, ...]) -> Tensor:
        parts = {name: getattr(self, name)(x).square().mean() for name in names}
        return parts["one"] + 2 * parts["two"]

    def again(self, x: Tensor, names: tuple[str, ...]) -> Tensor:
        """Two calls of the model, of which the second is alike on all ranks."""
        return self(x, names) + self(x, FORTH)


def in_shards(model: Experts, mesh: DeviceMesh) -> None:
    for part in (model.one, model.two, model):
        fully_shard(part, mesh=mesh["shard"])


STRATEGIES = {
    "fsdp": FSDPStrategy(auto_wrap_policy=nn.Linear),
    "ddp_fully_sharded": FairScaleFSDPStrategy(wrap=nn.Linear),
    "model_parallel": ModelParallelStrategy(parallelize_fn=in_shards, shard=2),
    "deepspeed_stage_3": DeepSpeedStrategy(
        stage=3, config={"zero_optimization": {"stage3_param_persistence_threshold": 0}}
    ),
}
MOMENTS = ("in backward", "in the next forward", "in evaluation", "without gradients")
FORTH, BACK = ("one", "two"), ("two", "one")


def orders(fabric: Fabric, moment: str, compiled: bool) -> tuple[list[float], str]:
    """Losses where all ranks run one order and then another, and the error where they differ."""
    torch.manual_seed(0)
    net = Experts()
    model, optimizer = fabric.setup(net, SGD(net.parameters(), lr=0.1))
    if compiled:
        model = torch.compile(model)
    losses, message = [], ""
    x = torch.ones(4, 8)
    for names in (FORTH, BACK):
        loss = model(x, names)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert hooks_of_ours(net) == 3
    model.train(moment != "in evaluation")
    call = model
    if moment == "in a method":
        model.mark_forward_method("again")
        call = model.again
    try:
        with torch.set_grad_enabled(moment != "without gradients"):
            loss = call(x, BACK if fabric.global_rank else FORTH)
        if moment in ("in backward", "in a method"):
            fabric.backward(loss)
        elif moment == "in the next forward":
            model(x, FORTH)
    except RuntimeError as error:
        message = str(error)
    fabric.close()
    assert hooks_of_ours(net) == 0
    return losses, message


def hooks_of_ours(module: nn.Module) -> int:
    found = [hook for part in module.modules() for hook in part._forward_pre_hooks.values()]
    hooks = [getattr(hook, "function", hook) for hook in found]
    return sum(
        getattr(getattr(hook, "func", hook), "__module__", "") == "fabric.strategies.sharding.execution_order"
        for hook in hooks
    )


def plain() -> list[float]:
    torch.manual_seed(0)
    net, losses = Experts(), []
    optimizer = SGD(net.parameters(), lr=0.1)
    for names in (FORTH, BACK):
        loss = net(torch.ones(4, 8), names)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "moment", "compiled"),
    [
        *((name, moment, False) for name in STRATEGIES for moment in MOMENTS),
        ("fsdp", "in a method", False),
        ("fsdp", "in backward", True),
    ],
)
def test_ranks_that_run_submodules_in_different_orders_raise(name: str, moment: str, compiled: bool) -> None:
    strategy: Strategy = STRATEGIES[name]
    fabric = Fabric(accelerator=ACCELERATOR, devices=2, strategy=strategy, launcher="forkserver")
    losses, message = fabric.launch(orders, moment, compiled) or ([], "")
    assert losses == pytest.approx(plain(), rel=1e-5)
    assert "Experts` in different orders. A submodule's parameters are all-gathered when it runs" in message
    assert message.endswith("Number 0 is 'one' on rank 0, and 'two' on rank 1.")


def generate_apart(fabric: Fabric, meets: bool) -> None:
    """A step, and then more forwards on rank 1 than on rank 0; `meets`: before a call of both."""
    net = Experts()
    model, optimizer = fabric.setup(net, SGD(net.parameters(), lr=0.1))
    fabric.backward(model(torch.ones(2, 8, device=fabric.device), FORTH))
    optimizer.step()
    with torch.no_grad():
        for _ in range(3 + 2 * fabric.global_rank):
            model(torch.ones(1, 8, device=fabric.device), FORTH)
    if meets:
        fabric.barrier()


@pytest.mark.slow
@pytest.mark.parametrize("name", STRATEGIES)
def test_ranks_that_run_different_numbers_of_forwards_are_reported_with_both(name: str) -> None:
    fabric = Fabric(accelerator=ACCELERATOR, devices=2, strategy=STRATEGIES[name], sanitize="always")
    with pytest.raises(WorkerError) as caught:
        fabric.launch(generate_apart, True)
    message = str(caught.value)
    assert re.search(r"rank 0: barrier, at .* in generate_apart, after 1 step and 4 forwards", message)
    assert re.search(r"rank 1: forward of a module, .*, after 1 step and 5 forwards", message)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fsdp", "deepspeed_stage_3"])
def test_a_rank_that_leaves_before_the_forwards_of_another_is_reported_with_its_own(name: str) -> None:
    fabric = Fabric(accelerator=ACCELERATOR, devices=2, strategy=STRATEGIES[name], sanitize=False)
    with pytest.raises(WorkerError) as caught:
        fabric.launch(generate_apart, False)
    message = str(caught.value)
    assert re.search(r"rank 1 of 2, .*, after 1 step and 5 forwards: ", message)
    assert "rank 0 of 2 failed first: its function returned after 1 step and 4 forwards while other ranks" in message


def generate_and_train(fabric: Fabric, more: int) -> None:
    """Steps, and generations between them that are longer on the rank `more`."""
    net = Experts()
    model, optimizer = fabric.setup(net, SGD(net.parameters(), lr=0.1))
    for length in (1, 2, 3):
        fabric.backward(model(torch.ones(2, 8, device=fabric.device), FORTH))
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for _ in range(length + (fabric.global_rank == more) * (length == 2)):
                model(torch.ones(1, 8, device=fabric.device), FORTH)


@pytest.mark.slow
@pytest.mark.parametrize("more", [0, 1])
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_step_that_meets_an_evaluation_of_another_rank_says_which_ran_more(name: str, more: int) -> None:
    fabric = Fabric(
        accelerator=ACCELERATOR, devices=2, strategy=STRATEGIES[name], launcher="forkserver", sanitize=False
    )
    with pytest.raises(
        WorkerError, match=f"Rank {1 - more} runs a forward with gradients while rank {more} runs one w"
    ):
        fabric.launch(generate_and_train, more)
