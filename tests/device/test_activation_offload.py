"""Activations that wait for backward on the host: gradients equal bit for bit, and fewer bytes on the device."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils._python_dispatch import TorchDispatchMode
from worlds import run_world

from fabric import Fabric
from fabric.launchers.world import World
from fabric.strategies import FSDPStrategy, ManualContext, ManualStrategy, ModelParallelStrategy, Parallelized, Strategy
from fabric.strategies.strategy_registry import make_strategy

WIDTH, SAMPLES = 8, 32768
SAVED_BYTES = WIDTH * SAMPLES * 4
"""1 MiB: the least that is offloaded. Layers are narrow, so that few numbers are multiplied for so much memory."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(self.up(x).tanh())
        return out


class Net(nn.Module):
    def __init__(self, num_blocks: int = 3) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(num_blocks)))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.blocks(x)
        return out


def in_shards(model: Net, mesh: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks:
        fully_shard(block, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])


def averaged(module: nn.Module, context: ManualContext) -> Parallelized:
    return Parallelized(module=module.to(context.device), averaged=module)


OTHERS: dict[str, Strategy] = {
    "hsdp": FSDPStrategy(device_mesh=(2, 2)),
    "model_parallel": ModelParallelStrategy(parallelize_fn=in_shards, shard=2),
    "manual": ManualStrategy(parallelize=averaged),
}


Trained = tuple[list[Any], int]
"""The weights after steps with accumulation, and the bytes that a forward leaves on the device."""


def train(world: World, strategy: Strategy, compiles: bool) -> Trained:
    with Fabric(accelerator="cuda", strategy=strategy, devices=world.size) as fabric:
        fabric.launch()
        torch.manual_seed(0)
        net = Net()
        model, optimizer = fabric.setup(net, SGD(net.parameters(), lr=0.1))
        run = torch.compile(model, backend="eager") if compiles else model
        held = 0
        for _ in range(2):
            for micro in range(2):
                x = torch.randn(SAMPLES, WIDTH, device=fabric.device)
                with fabric.no_backward_sync(model, enabled=micro == 0):
                    before = torch.cuda.memory_allocated()
                    loss = run(x).square().mean()
                    held = torch.cuda.memory_allocated() - before
                    fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        state = fabric.state_dict(model, all_ranks=True)
        return [each.tolist() for each in state.values()], held


def train_each(world: World, runs: list[tuple[Strategy, bool]]) -> list[Trained]:
    """One after the other, each with a process group of its own."""
    return [train(world, strategy, compiles) for strategy, compiles in runs]


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("single_device", 1),
        ("ddp", 2),
        ("fsdp", 2),
        ("hsdp", 4),
        ("model_parallel", 2),
        ("manual", 2),
        ("ddp_sharded", 2),
        ("ddp_fully_sharded", 2),
        ("deepspeed_stage_1", 2),
        ("deepspeed_stage_2", 2),
        ("deepspeed_stage_3", 2),
    ],
)
def test_gradients_are_bit_equal_and_the_device_holds_less(name: str, size: int) -> None:
    strategy = OTHERS[name] if name in OTHERS else make_strategy(name)
    offloaded = replace(strategy, activation_offload={Block})
    (plain, held), (found, less) = run_world(size, train_each, [(strategy, False), (offloaded, False)])[0]
    assert found == plain
    # Of each block: its input, and that of `down`, which is twice as wide. The output of the last one stays.
    assert held - less >= 8 * SAVED_BYTES, (held, less)
    assert less <= 2 * SAVED_BYTES


@pytest.fixture(scope="module")
def combined() -> dict[str, Trained]:
    """DDP alone, with recomputation, and with both, the last two also compiled; of one world."""
    plain = make_strategy("ddp")
    recomputed = replace(plain, activation_checkpointing_policy="blocks")
    both = replace(recomputed, activation_offload="blocks")
    runs = {"plain": (plain, False)} | {
        f"{name}, {compiles}": (strategy, compiles)
        for compiles in (False, True)
        for name, strategy in (("recomputed", recomputed), ("both", both))
    }
    return dict(zip(runs, run_world(2, train_each, list(runs.values()))[0], strict=True))


@pytest.mark.parametrize("compiles", [False, True])
def test_it_combines_with_recomputation_and_with_the_compiler(compiles: bool, combined: dict[str, Trained]) -> None:
    plain, _ = combined["plain"]
    _, held = combined[f"recomputed, {compiles}"]
    found, less = combined[f"both, {compiles}"]
    assert found == plain
    assert held - less >= 2 * SAVED_BYTES, (held, less)  # the inputs of the blocks, but that of the last


def test_the_graph_may_be_read_twice() -> None:
    strategy = replace(make_strategy("single_device"), activation_offload="blocks")
    with Fabric(accelerator="cuda", strategy=strategy, devices=1) as fabric:
        torch.manual_seed(0)
        model = fabric.setup_module(Net())
        loss = model(torch.randn(SAMPLES, WIDTH, device="cuda")).square().mean()
        first = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        second = torch.autograd.grad(loss, list(model.parameters()))
        assert all(map(torch.equal, first, second))


def test_what_a_block_saved_comes_back_before_backward_reaches_the_block() -> None:
    """The order of copies to the device and of the blocks' backwards, seen by hooks."""
    events: list[str] = []
    strategy = replace(make_strategy("single_device"), activation_offload={Block})
    with Fabric(accelerator="cuda", strategy=strategy, devices=1) as fabric:
        torch.manual_seed(0)
        net = Net(num_blocks=6)
        model = fabric.setup_module(net)
        for number, block in enumerate(net.blocks):
            block.register_full_backward_pre_hook(lambda *_, number=number: events.append(f"backward of {number}"))
        copied = Copies(events)
        with copied:
            loss = model(torch.randn(SAMPLES, WIDTH, device="cuda")).square().mean()
            assert events == ["to the host"] * 18  # the input of each layer, and what `tanh` returned
            events.clear()
            fabric.backward(loss)
    kinds = [event.split(" of ")[0] for event in events]
    assert kinds.count("to the device") == 18  # once each
    of_blocks = "".join("B" if event == "backward" else "c" for event in kinds)
    # The last block finds none: its own three are copied, and those of the block before. From then on one block ahead.
    assert of_blocks == "Bcccccc" + "Bccc" * 4 + "B"


class Copies(TorchDispatchMode):
    """Notes the large copies between the host and the device."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self.events = events

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        tensors = [each for each in (*args, out) if isinstance(each, Tensor) and each.nbytes >= SAVED_BYTES]
        if function in (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default) and len(tensors) > 1:
            where = {each.device.type for each in tensors}
            if len(where) == 2:
                self.events.append(f"to the {'host' if out.device.type == 'cpu' else 'device'}")
        return out
