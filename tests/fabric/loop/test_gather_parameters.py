"""Weights that are read outside of forward, as by a penalty: the numbers of one process, under every strategy."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.utils.prune import l1_unstructured
from torch.optim import SGD, AdamW
from worlds import launch_each

from fabric import Fabric
from fabric.strategies import FSDPStrategy, ManualContext, ManualStrategy, ModelParallelStrategy, Parallelized, Strategy


class Net(nn.Module):
    """Two blocks, a tied weight, and a parameter that no forward uses."""

    def __init__(self, has_spare: bool) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))
        self.down = nn.Linear(8, 4, bias=False)
        self.back = nn.Linear(8, 4, bias=False)
        self.back.weight = self.down.weight
        if has_spare:
            self.spare = nn.Linear(3, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        for block in self.blocks:
            x = block(x)
        return self.down(x) + self.back(x)


def shard(model: Any, mesh: Any) -> None:
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh["shard"])


def shard_by_hand(model: Any, context: ManualContext) -> Parallelized:
    model.to(context.device)
    for parameter in model.parameters():
        torch.distributed.broadcast(parameter.data, 0)
    for part in (*model.blocks, model):
        fully_shard(part, mesh=context.mesh)
    return Parallelized(module=model)


STRATEGIES: dict[str, tuple[str | Strategy, int]] = {
    "ddp": ("ddp", 2),
    "fsdp": (FSDPStrategy(auto_wrap_policy={nn.Sequential}), 2),
    "hsdp": (FSDPStrategy(auto_wrap_policy={nn.Sequential}, device_mesh=(2, 2)), 4),
    "not resharded": (FSDPStrategy(auto_wrap_policy={nn.Sequential}, reshard_after_forward=None), 2),
    "model_parallel": (ModelParallelStrategy(parallelize_fn=shard, shard=2), 2),
    "manual": (ManualStrategy(parallelize=shard_by_hand), 2),
    "ddp_sharded": ("ddp_sharded", 2),
    "ddp_fully_sharded": ("ddp_fully_sharded", 2),
    "deepspeed_stage_2": ("deepspeed_stage_2", 2),
    "deepspeed_stage_3": ("deepspeed_stage_3", 2),
}
IN_SHARDS = [name for name in STRATEGIES if name not in ("ddp", "ddp_sharded", "deepspeed_stage_2", "not resharded")]
WITH_SPARE = ("fsdp", "hsdp", "not resharded", "model_parallel", "manual")
"""Others refuse a parameter that no forward uses, or have another strategy for it."""


def squares(model: nn.Module) -> Tensor:
    return torch.stack([parameter.square().sum() for parameter in model.parameters()]).sum()


def off_one(model: nn.Module) -> Tensor:
    return torch.stack([(parameter - torch.ones_like(parameter)).norm() for parameter in model.parameters()]).sum()


def off_orthogonal(model: nn.Module) -> Tensor:
    matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    return torch.stack([(each.T @ each - torch.eye(each.shape[1])).square().sum() for each in matrices]).sum()


def train(
    model: Any,
    optimizer: Any,
    batch: Callable[[int], Tensor],
    scale: float,
    backward: Any,
    gathered: Any,
    unsynced: Any,
) -> None:
    """A penalty after the forward, before it, of a submodule, and in a window of two micro-batches."""
    for step in range(4):
        optimizer.zero_grad()
        if step == 1:
            with gathered(model):
                penalty = squares(model)
            loss = model(batch(step)).square().mean() + 0.1 * penalty
        else:
            if step == 2:
                with unsynced(model):
                    backward(model(batch(10)).square().mean())
            loss = model(batch(step)).square().mean()
            read = model.blocks[1] if step == 3 else model
            with gathered(read):
                loss = loss + 0.1 * scale * (off_orthogonal(read) if step == 3 else off_one(read))
        backward(loss)
        optimizer.step()


def batch_of(rank: int, size: int) -> Callable[[int], Tensor]:
    return lambda step: torch.randn(8, 4, generator=torch.Generator().manual_seed(step)).chunk(size)[rank]


def error_of_training(fabric: Fabric, name: str) -> float:
    """The largest difference from one process; the penalty's factor differs between the ranks."""
    torch.manual_seed(0)
    model, plain = Net(name in WITH_SPARE), Net(name in WITH_SPARE)
    plain.load_state_dict(model.state_dict())
    size = fabric.world_size
    theirs = AdamW(plain.parameters(), lr=0.05)
    train(plain, theirs, batch_of(0, 1), (size + 1) / 2, Tensor.backward, nullcontext, nullcontext)
    model, optimizer = fabric.setup(model, AdamW(model.parameters(), lr=0.05))
    mine = batch_of(fabric.global_rank, size)
    train(model, optimizer, mine, fabric.global_rank + 1, fabric.backward, fabric.gathered, fabric.no_backward_sync)
    with torch.no_grad(), fabric.gathered(model):
        pairs = zip(model.named_parameters(), plain.named_parameters(), strict=True)
        return max(float((ours - other).abs().max()) for (_, ours), (_, other) in pairs)


SIZES = [2, pytest.param(4, marks=pytest.mark.thorough)]
"""Strategies of so many ranks."""


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
def test_penalties_of_weights_train_as_in_one_process(size: int) -> None:
    for name, error in launched(size)["error_of_training"].items():
        assert error < 1e-5, name


def write(model: Any, optimizer: Any, batch: Callable[[int], Tensor], backward: Any, gathered: Any) -> None:
    """A mask after each step, slow weights (Lookahead) after each second one, and the best weights at the end."""
    with gathered(model):
        slow = [each.detach().clone() for each in model.parameters()]
    for step in range(4):
        backward(model(batch(step)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad(), gathered(model.down, write=True):
            model.down.weight[:, ::2] *= 0.5
        if step % 2:
            with torch.no_grad(), gathered(model, write=True):
                for each, other in zip(model.parameters(), slow, strict=True):
                    each.data.copy_(other.lerp_(each, 0.5))
        if step == 1:
            with gathered(model):
                best = copy.deepcopy(model.state_dict())
    with gathered(model, write=True):
        model.load_state_dict(best)
    backward(model(batch(5)).square().mean())
    optimizer.step()


def error_of_writing(fabric: Fabric, _: str) -> tuple[float, str]:
    """The largest difference from one process, and what is raised where rank 0 writes alone."""
    torch.manual_seed(0)
    model, plain = Net(False), Net(False)
    plain.load_state_dict(model.state_dict())
    size = fabric.world_size
    write(plain, AdamW(plain.parameters(), lr=0.05), batch_of(0, 1), Tensor.backward, lambda *_, **__: nullcontext())
    model, optimizer = fabric.setup(model, AdamW(model.parameters(), lr=0.05))
    write(model, optimizer, batch_of(fabric.global_rank, size), fabric.backward, fabric.gathered)
    whole = fabric.state_dict(model, all_ranks=True)
    error = max(float((whole[name] - each).abs().max()) for name, each in plain.state_dict().items())
    if size > 1:
        with pytest.raises(RuntimeError) as caught, torch.no_grad(), fabric.gathered(model, write=True):
            model.down.weight.mul_(2 if fabric.global_rank == 0 else 1)
        with torch.no_grad():  # as on the other ranks, where each has the whole
            model.down.weight.mul_(0)
        return error, str(caught.value)
    return error, ""


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, *SIZES])
def test_whole_weights_are_written_as_in_one_process(size: int) -> None:
    for name, (error, told) in launched(size)["error_of_writing"].items():
        assert error < 1e-5, name
        assert size == 1 or "ended with values of `down.weight` of `" in told, name


def prune_within(fabric: Fabric, _: str) -> str:
    model = fabric.setup(nn.Sequential(nn.Linear(4, 4)))
    with pytest.raises(RuntimeError) as caught, fabric.gathered(model, write=True):
        l1_unstructured(model[0], "weight", amount=0.5)
    return str(caught.value)


@pytest.mark.slow
def test_a_parameter_that_is_replaced_where_weights_are_whole_is_named() -> None:
    told = launched(2)["prune_within"]["fsdp"]
    assert "`weight` of `FSDPSequential` was removed or replaced within" in told
    assert "Prune before `fabric.setup`" in told


def messages_in_shards(fabric: Fabric, _: str) -> list[str]:
    """What is raised for a weight that is changed within the context, and for a penalty without it."""
    messages = []
    model = Net(False)
    model, _ = fabric.setup(model, AdamW(model.parameters(), lr=0.05))
    with pytest.raises(RuntimeError) as caught, torch.no_grad(), fabric.gathered(model):
        model.down.weight.clamp_(-1, 1)
    messages.append(str(caught.value))
    loss = model(batch_of(0, 1)(0)).square().mean() + 0.1 * sum(each.square().sum() for each in model.parameters())
    with pytest.raises(RuntimeError) as caught:
        fabric.backward(loss)
    messages.append(str(caught.value))
    return messages


@pytest.mark.slow
def test_what_reads_or_changes_shards_is_told_so() -> None:
    for name, (changed, read) in launched(2)["messages_in_shards"].items():
        assert changed.startswith("A parameter of `"), name
        assert "was changed within `fabric.gathered`, where it is a copy" in changed, name
        assert read.startswith("Backward failed: RuntimeError: "), name
        assert read.endswith("Read them in a `with fabric.gathered(model):`, where they are whole."), name


def trained_weight_changed(fabric: Fabric, _: str) -> str:
    return after_a_change(fabric, False)


def frozen_weight_changed(fabric: Fabric, _: str) -> str:
    return after_a_change(fabric, True)


def after_a_change(fabric: Fabric, is_frozen: bool) -> str:
    """What the next forward raises after slow weights, or a weight that is not trained, were written by hand."""
    net = Net(False)
    net.down.requires_grad_(not is_frozen)
    model, optimizer = fabric.setup(net, AdamW(each for each in net.parameters() if each.requires_grad))
    changed = [each for each in model.parameters() if each.requires_grad != is_frozen]
    slow = [each.detach().clone() for each in changed]
    for step in range(2):
        if step == 1:
            with torch.no_grad():
                changed[0].copy_(slow[0])
        with pytest.raises(RuntimeError) if step == 1 else nullcontext() as caught:
            optimizer.zero_grad()
            fabric.backward(model(torch.ones(2, 4)).sum())
            optimizer.step()
    return str(caught.value) if caught else ""


@pytest.mark.slow
def test_a_weight_that_is_changed_at_stage_3_outside_of_the_context_raises_in_the_next_step() -> None:
    for function, name in ((trained_weight_changed, "up"), (frozen_weight_changed, "down")):
        told = launched(2)[function.__name__]["deepspeed_stage_3"]
        assert told.startswith(f"`{name}.weight` was changed in place, but at ZeRO stage 3")
        assert "within `with fabric.gathered(model, write=True):`" in told


SPELLINGS: dict[str, Callable[[Tensor, Tensor], object]] = {
    "data": lambda weight, slow: weight.data.copy_(slow.add_(weight.data - slow, alpha=0.5)),
    "in place": lambda weight, slow: weight.detach().copy_(slow.lerp_(weight.detach(), 0.5)),
    "assigned": lambda weight, slow: setattr(weight, "data", slow.lerp_(weight.data, 0.5).clone()),
}
WAYS = [*(f"{spelling}, after the step" for spelling in SPELLINGS), "data, before the step"]


def look_ahead(fabric: Any, spelling: str, when: str) -> tuple[float, str]:
    """Slow weights (Lookahead) by hand, in every second step: the loss of the last step, and what was raised."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    weights = list(model.parameters())
    if fabric is not None:
        model, optimizer = fabric.setup(model, SGD(weights, lr=0.1, momentum=0.9))
        weights = list(model.parameters())
    else:
        optimizer = SGD(weights, lr=0.1, momentum=0.9)
    slow = [each.detach().clone() for each in weights]
    loss = torch.zeros(())
    try:
        for step in range(5):
            loss = model(torch.ones(2, 4) + step).square().mean()
            optimizer.zero_grad()
            loss.backward() if fabric is None else fabric.backward(loss)
            if when == "after the step":
                optimizer.step()
            for weight, held in zip(weights, slow, strict=True) if step % 2 else ():
                SPELLINGS[spelling](weight, held)
            if when == "before the step":
                optimizer.step()
    except RuntimeError as error:
        return 0.0, str(error)
    return loss.item(), ""


def look_ahead_in_each_way(fabric: Fabric, _: str) -> dict[str, tuple[float, str]]:
    return {way: look_ahead(fabric, *way.split(", ")) for way in WAYS}


@pytest.mark.slow
def test_slow_weights_by_hand_train_as_in_one_process_or_raise_what_to_write() -> None:
    alone = {way: look_ahead(None, *way.split(", "))[0] for way in WAYS}
    found = launched(2)["look_ahead_in_each_way"]
    for strategy, way in itertools.product(found, WAYS):
        loss, told = found[strategy][way]
        if strategy == "deepspeed_stage_3":
            how = {
                "data": "A parameter of `Sequential` was changed in place",
                "in place": "`0.weight` was changed in place",
                "assigned": "`0.weight` was assigned through `.data`",
            }[way.split(",")[0]]
            assert told.startswith(f"{how}, but at ZeRO stage 3 a weight has no values between"), (strategy, way)
            assert "within `with fabric.gathered(model, write=True):`" in told
        elif strategy == "fsdp" and way.startswith("assigned"):
            assert not told, way  # see "Found by nothing" in docs/explanation/sanitizer.md
        else:
            assert not told, (strategy, way)
            assert loss == pytest.approx(alone[way], abs=1e-6), way


def follow(fabric: Fabric, _: str) -> str:
    """What the next forward of a target network raises, whose weights follow those of another one."""
    model = nn.Linear(4, 4)
    target = fabric.setup(copy.deepcopy(model).requires_grad_(False))
    model, _ = fabric.setup(model, SGD(model.parameters(), lr=0.1))
    with torch.no_grad():
        target(torch.ones(2, 4))
        for held, weight in zip(target.parameters(), model.parameters(), strict=True):
            held.data.mul_(0.9).add_(weight.data, alpha=0.1)
        with pytest.raises(RuntimeError) as caught:
            target(torch.ones(2, 4))
    return str(caught.value)


@pytest.mark.slow
def test_a_target_network_that_is_written_by_hand_at_stage_3_raises_in_its_next_forward() -> None:
    told = launched(2)["follow"]["deepspeed_stage_3"]
    assert told.startswith("A parameter of `Linear` was changed in place, but at ZeRO")


FUNCTIONS: dict[Callable[[Fabric, str], Any], Sequence[str]] = {
    error_of_training: list(STRATEGIES),
    error_of_writing: ["single_device", *STRATEGIES],
    prune_within: ["fsdp"],
    messages_in_shards: [name for name in IN_SHARDS if name != "hsdp"],
    trained_weight_changed: ["deepspeed_stage_3"],
    frozen_weight_changed: ["deepspeed_stage_3"],
    look_ahead_in_each_way: ["deepspeed_stage_3", "fsdp", "ddp_fully_sharded"],
    follow: ["deepspeed_stage_3"],
}
"""What the tests look at, and under which strategies."""


def call(fabric: Fabric, function: Callable[[Fabric, str], Any], name: str) -> Any:
    return function(fabric, name)


@functools.cache
def launched(size: int) -> dict[str, dict[str, Any]]:
    """What the functions return, by function and strategy, of those of so many ranks. Each has a fabric of its own, in
    the same ranks."""
    calls = []
    for function, names in FUNCTIONS.items():
        of_size = [name for name in names if STRATEGIES.get(name, (name, 1))[1] == size]
        calls += [(STRATEGIES.get(name, (name, 1))[0], function, name) for name in of_size]
    found: dict[str, dict[str, Any]] = {}
    for (_, function, name), each in zip(calls, launch_each(size, call, calls), strict=True):
        found.setdefault(function.__name__, {})[name] = each
    return found
