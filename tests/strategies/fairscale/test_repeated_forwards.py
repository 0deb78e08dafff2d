"""Under `ddp_fully_sharded`, one hook a parameter: however often a forward runs, the numbers are those of one process.

FairScale registers a hook at every forward and removes none; those of the forward before are removed by us.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from devices import ACCELERATOR
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

from fabric import Fabric
from fabric.strategies.fairscale.fsdp import FairScaleFSDPStrategy

SIZE, NUM_STEPS, NUM_FORWARDS = 2, 6, 3


class Block(nn.Module):
    """What is wrapped. `inside`: backward recomputes its hidden numbers."""

    def __init__(self, recomputed: str) -> None:
        super().__init__()
        self.linear, self.recomputed = nn.Linear(6, 6), recomputed

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = (
            checkpoint(self.compute, x, use_reentrant=False) if self.recomputed == "inside" else self.compute(x)
        )
        return out

    def compute(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh()


class Net(nn.Module):
    """Layers with a weight in common, and a block that is called twice. `around`: backward recomputes the second."""

    def __init__(self, recomputed: str) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.last.weight = self.first.weight
        self.block = Block(recomputed)
        self.recomputed = recomputed

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.block(self.first(x))
        if (
            self.recomputed == "around" and torch.is_grad_enabled()
        ):  # FairScale refuses the other kind around a wrapped module
            hidden = checkpoint(self.block, hidden, use_reentrant=True)
        else:
            hidden = self.block(hidden)
        out: Tensor = self.last(hidden)
        return out


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).float().square().mean()
    return loss


def train(fabric: Fabric, recomputed: str) -> tuple[dict[str, Tensor], int]:
    """Each step: a backward without synchronisation, one more, one of several forwards and an evaluation.
    Returns the weights, and the most hooks that one parameter's gradient node has."""
    torch.manual_seed(0)
    net = Net(recomputed)
    model, optimizer = fabric.setup(net, SGD(net.parameters(), lr=0.1, momentum=0.9))
    samples = torch.randn(NUM_STEPS, 3, NUM_FORWARDS, 4, 6)
    mine = samples.chunk(fabric.world_size, dim=3)[fabric.global_rank]
    for held, alone, together in mine.unbind():
        optimizer.zero_grad()
        with fabric.no_backward_sync(model):
            fabric.backward(loss_of(model, held[0]))
        fabric.backward(loss_of(model, alone[0]))
        losses = [loss_of(model, x) for x in together]
        with torch.no_grad():  # between a forward and its backward
            loss_of(model, held[0])
        fabric.backward(torch.stack(losses).sum())
        optimizer.step()
    wrappers = [each for each in gc.get_objects() if type(each).__name__ == "Sharded"]
    handles = [handle for each in wrappers for _, handle, _ in each._nodes]
    num_hooks = max((len(each.hooks_dict_ref()) for each in handles), default=0)
    return {name: value.clone() for name, value in model.state_dict().items()}, num_hooks


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recomputed", "precision", "tolerance"),
    [("no", "32-true", 1e-5), ("inside", "32-true", 1e-5), ("around", "32-true", 1e-5), ("no", "bf16-mixed", 2e-2)],
)
def test_repeated_forwards_add_up_to_the_numbers_of_one_process_and_leave_one_hook(
    recomputed: str, precision: Any, tolerance: float
) -> None:
    alone = Fabric(accelerator=ACCELERATOR, strategy="single_device", precision=precision).launch(train, recomputed)
    strategy = FairScaleFSDPStrategy(launcher="forkserver", wrap=Block)
    fabric = Fabric(accelerator=ACCELERATOR, strategy=strategy, devices=SIZE, precision=precision)
    weights, num_hooks = fabric.launch(train, recomputed)
    torch.testing.assert_close(weights, alone[0], rtol=tolerance, atol=tolerance)
    assert num_hooks == 1
