"""Activations that are computed again in backward change no number, under every strategy."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from devices import ACCELERATOR
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fabric import Fabric
from fabric.configure.resolve import accelerator_against_the_strategy
from fabric.strategies import (
    FairScaleFSDPStrategy,
    FSDPStrategy,
    ManualContext,
    ManualStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    SingleDeviceXLAStrategy,
    Strategy,
)
from fabric.strategies.accelerators.xla import XLAAccelerator
from fabric.strategies.module.activation_checkpointing import recompute
from fabric.strategies.module.activation_offload import offload, rebind_copies
from fabric.strategies.strategy_registry import make_strategy

WIDTH = 8


class Block(nn.Module):
    """Dropout, statistics, and a buffer that forward reads and replaces."""

    mean: Tensor

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.again = again
        self.num_calls = 0
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.norm = nn.BatchNorm1d(4 * WIDTH)
        self.drop = nn.Dropout(0.2)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor, *, gain: float) -> Tensor:
        self.num_calls += 1
        y = self.down(self.drop(self.norm(self.up(x)).relu())) * gain
        out = x + y + self.mean
        self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(dim=0)
        return out


class Mark(nn.Identity):
    """In each model, so that the policy means a submodule of the model that computes nothing again, too."""


class Net(nn.Module):
    def __init__(self, again: bool, checkpoints: Callable[..., Tensor] | None = None) -> None:
        super().__init__()
        self.mark = Mark()
        self.embed = nn.Linear(3, WIDTH)
        self.blocks = nn.ModuleList(Block(again) for _ in range(3))
        self.out = nn.Linear(WIDTH, 2)
        self.checkpoints = checkpoints

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(self.mark(x))
        for block in self.blocks:
            x = block(x, gain=0.5) if self.checkpoints is None else self.checkpoints(block, x)
        return self.out(x)


def computes_again(part: nn.Module) -> bool:
    return isinstance(part, Mark) or (isinstance(part, Block) and part.again)


def train(fabric: Fabric, net: Net) -> tuple[list[Tensor], int, int]:
    """Losses and buffers, how many numbers autograd saved, and how often blocks ran."""
    with torch.no_grad():
        for number, parameter in enumerate(net.parameters()):
            parameter.copy_(torch.linspace(-0.5, 0.5, parameter.numel()).roll(number).view_as(parameter))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    model, optimizer = fabric.setup(net, optimizer)
    torch.manual_seed(7 + fabric.global_rank)
    results: list[Tensor] = []
    saved = 0

    def count(tensor: Tensor) -> Tensor:
        nonlocal saved
        saved += tensor.numel()
        return tensor

    for _ in range(3):
        x = torch.randn(6, 3)
        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            loss = model(x).square().mean()
        fabric.backward(loss, model=model)
        optimizer.step()
        optimizer.zero_grad()
        results.append(loss.detach())
    results += [buffer.clone() for buffer in model.buffers()]
    return results, saved, sum(block.num_calls for block in net.blocks)


def compare(fabric: Fabric) -> None:
    expected, saved_all, num_calls = train(fabric, Net(False))
    found, saved, num_calls_again = train(fabric, Net(True))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert saved < saved_all / 4
    assert (num_calls, num_calls_again) == (9, 18)


def in_shards(model: nn.Module, mesh: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])


def as_it_is(module: nn.Module, context: ManualContext) -> nn.Module:
    return module.to(context.device)


STRATEGIES: dict[str, Strategy | str] = {
    "ddp": "ddp",
    "fsdp, gathered block by block": FSDPStrategy(auto_wrap_policy=Block, reshard_after_forward=True),
    "model_parallel": ModelParallelStrategy(parallelize_fn=in_shards, shard=2),
    "manual": ManualStrategy(parallelize=as_it_is),
    "ddp_sharded": "ddp_sharded",
    "ddp_fully_sharded": "ddp_fully_sharded",
    "ddp_fully_sharded, gathered block by block": FairScaleFSDPStrategy(wrap=Block),
    "deepspeed_stage_1": "deepspeed_stage_1",
    "deepspeed_stage_2": "deepspeed_stage_2",
    "deepspeed_stage_3": "deepspeed_stage_3",
}
NAMES = [
    pytest.param(
        name, marks=[] if name in ("fsdp, gathered block by block", "deepspeed_stage_2") else [pytest.mark.thorough]
    )
    for name in STRATEGIES
]


def fabric_with(strategy: Strategy | str, devices: int = 2, precision: Any = "32-true") -> Fabric:
    made = make_strategy(strategy) if isinstance(strategy, str) else strategy
    return Fabric(
        accelerator=ACCELERATOR,
        devices=devices,
        strategy=replace(made, activation_checkpointing_policy=computes_again),
        precision=precision,
    )


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["single_device", "dp"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_on_one_device_activations_are_recomputed_bit_for_bit(strategy: str, precision: str) -> None:
    fabric_with(strategy, 1, precision).launch(compare)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_activations_are_recomputed_bit_for_bit(name: str) -> None:
    fabric_with(STRATEGIES[name]).launch(compare)


def without_reentering(block: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(block, x, gain=0.5, use_reentrant=False)  # type: ignore[no-any-return]


def reentering(block: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(lambda x: block(x, gain=0.5), x, use_reentrant=True)  # type: ignore[no-any-return]


def compare_own(fabric: Fabric) -> None:
    """A model that calls torch's checkpoint itself: buffers are written twice, as in plain PyTorch, and losses equal
    those of the model without, for what is read from buffers changes none here."""
    for checkpoints in (without_reentering, reentering):
        nets = [Net(False), Net(False, checkpoints)]
        for net in nets:
            for block in net.blocks:
                block.register_buffer("mean", None)
                block.forward = _plain.__get__(block)
        (expected, *_), (found, *_) = (train(fabric, net) for net in nets)
        torch.testing.assert_close(found[:3], expected[:3], rtol=1e-6, atol=1e-6)


def _plain(block: Block, x: Tensor, *, gain: float) -> Tensor:
    return x + block.down(block.drop(block.norm(block.up(x)).relu())) * gain  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_models_that_checkpoint_by_themselves_train_as_those_that_do_not(name: str) -> None:
    strategy = STRATEGIES[name]
    made = make_strategy(strategy) if isinstance(strategy, str) else strategy
    Fabric(accelerator=ACCELERATOR, devices=2, strategy=made).launch(compare_own)


def test_a_copy_of_a_prepared_model_is_plain_and_computes_with_its_own_parameters() -> None:
    fabric = fabric_with("single_device", 1)
    net = Net(True)
    model = fabric.setup(net)
    other = copy.deepcopy(model)
    assert other.blocks[0].forward == Block.forward.__get__(other.blocks[0])
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert other(torch.ones(2, 3)).abs().sum() == 0
    fabric.close()
    assert "forward" not in vars(net.blocks[0])


@pytest.mark.parametrize("kinds", [(recompute,), (offload,), (recompute, offload)])
def test_a_replica_of_data_parallel_computes_with_its_own_parameters(kinds: Any) -> None:
    block = Block(True)
    undo = [kind(block, Block) for kind in kinds]
    replica = block._replicate_for_data_parallel()  # what DataParallel makes for each further device
    replica._modules["down"] = nn.Linear(WIDTH * 4, WIDTH)
    nn.init.zeros_(replica.down.weight)
    nn.init.zeros_(replica.down.bias)
    rebind_copies(replica)
    torch.testing.assert_close(replica(torch.ones(3, WIDTH), gain=1.0), torch.ones(3, WIDTH))
    for each in reversed(undo):
        each()
    assert "forward" not in vars(block)


def test_xla_refuses_activation_checkpointing_of_torch_with_what_to_call() -> None:
    strategy = SingleDeviceXLAStrategy(activation_checkpointing_policy=Block)
    message = accelerator_against_the_strategy(XLAAccelerator(), strategy, "'single_xla'")
    assert message is not None
    assert (
        "`activation_checkpointing_policy` with `accelerator='xla'`: torch's activation checkpointing does" in message
    )
    assert "call `torch_xla.utils.checkpoint.checkpoint` in the model's own forward." in message


def test_an_invalid_policy_is_an_error_and_leaves_the_model_unchanged() -> None:
    fabric = Fabric(
        accelerator=ACCELERATOR, devices=1, strategy=SingleDeviceStrategy(activation_checkpointing_policy=nn.Conv2d)
    )
    with pytest.raises(ValueError, match="`activation_checkpointing_policy=Conv2d` matches no submodule of the `Net`"):
        fabric.setup(Net(True))
    with pytest.raises(
        TypeError, match=r"`activation_checkpointing_policy='Block'` selects no submodules\. Pass classes"
    ):
        Fabric(accelerator=ACCELERATOR, strategy=SingleDeviceStrategy(activation_checkpointing_policy="Block"))  # type: ignore[arg-type]


def test_two_backwards_through_one_graph_find_the_buffers_of_its_forward() -> None:
    fabric = fabric_with("single_device", 1)
    gradients = []
    for again in (False, True):
        torch.manual_seed(0)
        model = fabric.setup(Net(again))
        loss = model(torch.ones(4, 3)).square().mean()
        model(torch.ones(4, 3))  # buffers go on
        fabric.backward(loss, retain_graph=True)
        fabric.backward(loss)
        gradients.append([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=0)


def in_wrappers(model: nn.Module, mesh: Any) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.fsdp import fully_shard

    for number, block in enumerate(model.blocks):  # type: ignore[arg-type]
        model.blocks[number] = fully_shard(checkpoint_wrapper(block), mesh=mesh["shard"])  # type: ignore[index,operator]
    fully_shard(model, mesh=mesh["shard"])


def train_in_wrappers(fabric: Fabric) -> tuple[list[Tensor], list[str], int]:
    net = Net(False)
    for block in net.blocks:
        block.register_buffer("mean", None)
        block.forward = _plain.__get__(block)
    names = list(net.state_dict())
    losses, saved, _ = train(fabric, net)
    content = fabric.state_dict(net)
    assert list(content) == (names if fabric.is_global_zero else [])
    fabric._connected.objects.state_access(net).write_module(net, fabric.broadcast(content), strict=True)
    return losses[:3], names, saved


@pytest.mark.slow
def test_parallelize_fn_may_call_checkpoint_wrapper_and_parameter_names_are_unchanged() -> None:
    found = [
        Fabric(
            accelerator=ACCELERATOR, devices=2, strategy=ModelParallelStrategy(parallelize_fn=function, shard=2)
        ).launch(train_in_wrappers)
        for function in (in_shards, in_wrappers)
    ]
    (expected, names, saved_all), (losses, names_again, saved) = found
    torch.testing.assert_close(losses, expected, rtol=0, atol=0)
    assert names == names_again
    assert saved < saved_all / 4
