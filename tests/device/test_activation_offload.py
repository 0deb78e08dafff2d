"""Activations that wait for backward on the host: gradients equal bit for bit, and fewer bytes on the device."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from worlds import run_world

from fabric import Fabric
from fabric.launchers.world import World
from fabric.strategies import Strategy
from fabric.strategies.strategy_registry import make_strategy

WIDTH, SAMPLES = 64, 4096
SAVED_BYTES = WIDTH * SAMPLES * 4
"""1 MiB: the least that is offloaded."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(self.up(x).tanh())
        return out


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(6)))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.blocks(x)
        return out


def train(world: World, strategy: Strategy, compiles: bool) -> tuple[list[Any], int]:
    """The weights after steps with accumulation, and the bytes that a forward leaves on the device."""
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


@pytest.mark.parametrize(
    ("name", "size"),
    [("single_device", 1), ("ddp", 2), ("fsdp", 2), ("ddp_fully_sharded", 2)],
)
def test_gradients_are_bit_equal_and_the_device_holds_less(name: str, size: int) -> None:
    strategy = make_strategy(name)
    ((plain, held), *_) = run_world(size, train, strategy, False)
    ((found, less), *_) = run_world(size, train, replace(strategy, activation_offload={Block}), False)
    assert found == plain
    # Of each block: its input, and that of `down`, which is twice as wide. The output of the last one stays.
    assert held - less >= 17 * SAVED_BYTES, (held, less)
    assert less <= 2 * SAVED_BYTES


@pytest.mark.parametrize("compiles", [False, True])
def test_it_combines_with_recomputation_and_with_the_compiler(compiles: bool) -> None:
    strategy = make_strategy("ddp")
    plain, _ = run_world(2, train, strategy, False)[0]
    recomputed = replace(strategy, activation_checkpointing_policy="blocks")
    _, held = run_world(2, train, recomputed, compiles)[0]
    found, less = run_world(2, train, replace(recomputed, activation_offload="blocks"), compiles)[0]
    assert found == plain
    assert held - less >= 5 * SAVED_BYTES, (held, less)  # the inputs of the blocks


def test_the_graph_may_be_read_twice() -> None:
    strategy = replace(make_strategy("single_device"), activation_offload="blocks")
    with Fabric(accelerator="cuda", strategy=strategy, devices=1) as fabric:
        torch.manual_seed(0)
        model = fabric.setup_module(Net())
        loss = model(torch.randn(SAMPLES, WIDTH, device="cuda")).square().mean()
        first = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        second = torch.autograd.grad(loss, list(model.parameters()))
        assert all(map(torch.equal, first, second))
