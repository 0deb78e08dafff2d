"""Programs around models in shards: what they do between forward and backward, and outside of forward, counts."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from devices import ACCELERATOR
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from fabric import Fabric
from fabric.strategies import FSDPStrategy, ModelParallelStrategy, Strategy
from fabric.strategies.tensors.dtensor import whole


class Block(nn.Module):
    """With an initialisation that goes into its submodules."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(5, 8)
        self.narrow = nn.Linear(8, 5)
        self.scale = nn.Parameter(torch.empty(1, 5))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.scale)
        nn.init.orthogonal_(self.wide.weight)
        nn.init.trunc_normal_(self.narrow.weight)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(self.wide(x).tanh()) * self.scale


class Encoder(nn.Module):
    """Submodules within a submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 5)
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.first(x))


class Net(nn.Module):
    """Submodules in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.encoder(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Gain(nn.Module):
    """Tensors that nothing of its own fills; one is in no checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.empty(3))
        self.register_buffer("table", torch.empty(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain + self.table


class Rooted(Net):
    """A model with one method that initialises all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = Gain()
        self.init_weights()

    def init_weights(self) -> None:
        for part in self.modules():
            if isinstance(part, nn.Linear):
                nn.init.xavier_uniform_(part.weight)
                nn.init.zeros_(part.bias)
        with torch.no_grad():
            self.gain.gain.copy_(torch.randn(3))
            self.gain.table.copy_(torch.arange(3.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.gain(super().forward(x))


def in_shards(model: nn.Module, mesh: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    fully_shard(model, mesh=mesh["shard"])


STRATEGIES = {
    "whole": FSDPStrategy(),
    "linear": FSDPStrategy(auto_wrap_policy=nn.Linear),
    "blocks": FSDPStrategy(auto_wrap_policy=Block, activation_checkpointing_policy=Block),
    "model_parallel": ModelParallelStrategy(parallelize_fn=in_shards, shard=2),
}
Backward = Callable[[Tensor], None]
Steps = Callable[[nn.Module, Optimizer, Backward, Tensor], None]


def update_a_target(model: Any, optimizer: Optimizer, backward: Backward, x: Tensor, target: Any) -> None:
    """Two steps towards a network that follows, in evaluation between them."""
    for _ in range(2):
        with torch.no_grad():
            aim = target(x)
        backward((model(x) - aim + 1).square().mean())
        optimizer.step()
        model.zero_grad()
        with torch.no_grad():
            for old, new in zip(target.parameters(), model.parameters(), strict=True):
                old.data.lerp_(new.data, 0.5)


def clear_parts(model: Any, optimizer: Optimizer, backward: Backward, x: Tensor) -> None:
    """The encoder's gradients of the first loss are given up, after the second forward."""
    backward(3 * model(x).square().mean())
    loss = model(x).square().mean()
    model.encoder.zero_grad()
    backward(loss)
    optimizer.step()
    optimizer.zero_grad()


def forget_no_grad(model: Any, optimizer: Optimizer, backward: Backward, x: Tensor) -> None:
    """A forward between backward and step, whose loss is printed; and then the next step."""
    for _ in range(2):
        backward(model(x).square().mean())
        model(x)
        optimizer.step()
        optimizer.zero_grad()


def state_of(module: nn.Module) -> dict[str, Tensor]:
    named = {**module.state_dict(), **dict(module.named_buffers())}
    return {name: whole(tensor).detach().clone() for name, tensor in named.items()}


def close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


def run_programs(fabric: Fabric) -> None:
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    mine = x.chunk(fabric.world_size)[fabric.global_rank]
    for seed, steps in enumerate((clear_parts, forget_no_grad)):
        torch.manual_seed(seed)  # once a model is set up, ranks draw apart
        plain = Net()
        model = copy.deepcopy(plain)
        steps(plain, SGD(plain.parameters(), lr=0.1), Tensor.backward, x)
        model, optimizer = fabric.setup(model, SGD(model.parameters(), lr=0.1))
        steps(model, optimizer, fabric.backward, mine)
        close(state_of(model), state_of(plain))
    torch.manual_seed(3)
    plain, aim = Net(), Net()
    model, target = copy.deepcopy(plain), copy.deepcopy(aim)
    update_a_target(plain, SGD(plain.parameters(), lr=0.1), Tensor.backward, x, aim)
    model, optimizer = fabric.setup(model, SGD(model.parameters(), lr=0.1))
    target = fabric.setup(target)
    update_a_target(model, optimizer, fabric.backward, mine, target)
    close(state_of(target), state_of(aim))


def initialise(fabric: Fabric) -> None:
    for kind in (Net, Rooted):
        torch.manual_seed(3)
        plain = kind()
        torch.manual_seed(3 + fabric.global_rank)  # the weights are those of rank 0
        with fabric.init_module(empty_init=True):
            model: Any = kind()
        model = fabric.setup(model)
        close(state_of(model), state_of(plain))
        close(model(torch.ones(2, 4)), plain(torch.ones(2, 4)))


def launch(strategy: Strategy | str, body: Callable[[Fabric], Any]) -> Any:
    return Fabric(accelerator=ACCELERATOR, devices=2, strategy=strategy, launcher="forkserver").launch(body)


@pytest.mark.slow
@pytest.mark.parametrize("name", STRATEGIES)
def test_programs_that_act_outside_of_forward_train_like_one_process(name: str) -> None:
    launch(STRATEGIES[name], run_programs)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["whole", "linear", "blocks", "model_parallel"])
def test_initialised_weights_depend_on_the_seed_and_not_on_the_sharding(name: str) -> None:
    launch(STRATEGIES[name], initialise)


def shard_by_hand(fabric: Fabric) -> None:
    from torch.distributed.fsdp import fully_shard

    model = Net()
    fully_shard(model.blocks[1])
    with pytest.raises(
        ValueError,
        match=r"`blocks.1.scale` is in shards before `fabric.setup`.* Leave `fully_shard` out, and write "
        r"`FSDPStrategy\(auto_wrap_policy=\{Block\}\)`",
    ):
        fabric.setup(model)


@pytest.mark.slow
def test_a_submodule_sharded_before_setup_raises_with_what_to_write() -> None:
    launch("fsdp", shard_by_hand)
