"""Layers that are frozen, unfrozen, added or replaced after `setup`: the numbers of one process, or an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from devices import ACCELERATOR
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

from fabric import Fabric
from fabric.strategies import (
    DDPStrategy,
    FSDPStrategy,
    ManualContext,
    ManualStrategy,
    ModelParallelStrategy,
    Parallelized,
    Strategy,
)
from fabric.strategies.module.parameter_changes import ParameterSnapshot

Steps = Callable[[int], None]
Change = Callable[[Any, Optimizer, Steps], None]


class Net(nn.Module):
    """A body, and a head that is exchanged."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 4))
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.body(x.to(self.head.weight.dtype)).tanh())
        return output


def unfreeze(net: Any, optimizer: Optimizer, steps: Steps) -> None:
    net.requires_grad_(True)


def freeze(net: Any, optimizer: Optimizer, steps: Steps) -> None:
    net.body.requires_grad_(False)


def freeze_for_a_while(net: Any, optimizer: Optimizer, steps: Steps) -> None:
    for part in (net.body, net):
        part.requires_grad_(False)
        steps(1)
        part.requires_grad_(True)
        steps(1)


def unfreeze_what_the_optimizer_holds(net: Any, optimizer: Optimizer, steps: Steps) -> None:
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.requires_grad_(True)


def replace_the_head(net: Any, optimizer: Optimizer, steps: Steps) -> None:
    net.head = nn.Linear(4, 5)
    optimizer.add_param_group({"params": net.head.parameters(), "lr": 0.05})


def append_a_layer(net: Any, optimizer: Optimizer, steps: Steps) -> None:
    net.body.append(nn.Linear(4, 4))
    optimizer.add_param_group({"params": net.body[-1].parameters()})


def replace_a_parameter(net: Any, optimizer: Optimizer, steps: Steps) -> None:
    net.head.weight = nn.Parameter(torch.randn(3, 4))
    optimizer.param_groups[0]["params"][:] = list(net.parameters())


def convert(net: Any, optimizer: Optimizer, steps: Steps) -> None:
    net.double()
    optimizer.state.clear()


FLAGS: dict[str, tuple[Change, str]] = {
    "unfreeze a part": (unfreeze, "body"),
    "unfreeze all": (unfreeze, "all"),
    "by the optimizer": (unfreeze_what_the_optimizer_holds, "body"),
    "freeze": (freeze, "nothing"),
    "freeze for a while": (freeze_for_a_while, "nothing"),
}
LAYERS: dict[str, tuple[Change, str]] = {
    "replace the head": (replace_the_head, "nothing"),
    "append a layer": (append_a_layer, "body"),
    "replace a parameter": (replace_a_parameter, "nothing"),
    "convert": (convert, "nothing"),
}


def train(fabric: Fabric, change: Change, frozen: str, micro_batches: int) -> list[Tensor]:
    """Two steps, an evaluation, the change, two steps. The values of all parameters at the end."""
    torch.manual_seed(0)
    net: Any = Net().eval()  # statistics of each rank's share are no concern here
    {"body": net.body, "all": net, "nothing": nn.Module()}[frozen].requires_grad_(False)
    net, optimizer = fabric.setup(net, SGD(net.parameters(), lr=0.1, momentum=0.9))
    data = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))
    batches = iter(data.chunk(16))

    def steps(number: int) -> None:
        for _ in range(number):
            for last in range(micro_batches - 1, -1, -1):
                batch = next(batches)
                mine = batch if fabric.world_size == 1 else batch.chunk(fabric.world_size)[fabric.global_rank]
                with fabric.no_backward_sync(net, enabled=last > 0):
                    loss = net(mine).square().mean()
                    if loss.requires_grad:
                        fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()

    steps(2)
    with torch.no_grad():
        net(data)
    torch.manual_seed(10 + fabric.global_rank)  # new layers are others on each rank, until setup's way is followed
    change(net, optimizer, steps)
    steps(2)
    if hasattr(net, "reshard"):
        net.reshard()
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in net.parameters()]
    return [tensor.detach().clone() for tensor in whole]


def train_all(fabric: Fabric, changes: dict[str, tuple[Change, str]]) -> dict[str, list[Tensor]]:
    found = {}
    for name, (change, frozen) in changes.items():
        found[name] = train(fabric, change, frozen, 1)
        for tensor in found[name]:
            of_ranks = fabric.all_gather(tensor)
            assert torch.equal(of_ranks[0], of_ranks[-1]), f"{name}: ranks differ"
    return found


def in_shards(model: nn.Module, mesh: Any) -> None:
    for part in (model.body, model):
        fully_shard(part, mesh=mesh["shard"])


def averaged(module: nn.Module, context: ManualContext) -> Parallelized:
    return Parallelized(module=module, averaged=module)


def replicated(module: Any, context: ManualContext) -> nn.Module:
    module.body = DistributedDataParallel(module.body)
    return module  # type: ignore[no-any-return]


def launch(strategy: str | Strategy, *args: Any) -> Any:
    size = 1 if strategy == "single_device" else 2
    launcher = "auto" if size == 1 else "forkserver"
    with Fabric(accelerator=ACCELERATOR, devices=size, strategy=strategy, launcher=launcher) as fabric:
        return fabric.launch(*args)


WHOLE = {
    "ddp": DDPStrategy(),
    "static graph": DDPStrategy(static_graph=True),
    "unused": DDPStrategy(find_unused_parameters=True),
    "views of buckets": DDPStrategy(gradient_as_bucket_view=True, bucket_bytes=64),
    "sharded optimizer": DDPStrategy(shard_optimizer=True),
}
SHARDED = {
    "fsdp": FSDPStrategy(),
    "fsdp, parts": FSDPStrategy(auto_wrap_policy={nn.Linear}),
    "hsdp": FSDPStrategy(device_mesh=(2, 1)),
    "model_parallel": ModelParallelStrategy(parallelize_fn=in_shards, shard=2),
    "manual": ManualStrategy(parallelize=averaged),
}
"""Strategies that list the parameters once; `manual` does, though it shards none here."""


@pytest.mark.slow
@pytest.mark.parametrize("name", WHOLE)
def test_what_is_changed_after_setup_trains_as_in_one_process(name: str) -> None:
    changes = FLAGS | LAYERS
    if name == "sharded optimizer":
        del changes["replace a parameter"]
    torch.testing.assert_close(launch(WHOLE[name], train_all, changes), launch("single_device", train_all, changes))


@pytest.mark.slow
@pytest.mark.parametrize("name", SHARDED)
def test_shards_that_are_frozen_and_unfrozen_after_setup_train_as_in_one_process(name: str) -> None:
    torch.testing.assert_close(launch(SHARDED[name], train_all, FLAGS), launch("single_device", train_all, FLAGS))


def accumulate(fabric: Fabric) -> list[Tensor]:
    return train(fabric, unfreeze, "body", 2) + train(fabric, replace_the_head, "nothing", 2)


@pytest.mark.slow
def test_a_change_within_no_backward_sync_is_averaged_at_the_end_of_the_window() -> None:
    torch.testing.assert_close(launch("ddp", accumulate), launch("single_device", accumulate))


def refused(fabric: Fabric, sentences: dict[str, str]) -> None:
    for name, sentence in sentences.items():
        change, frozen = (FLAGS | LAYERS)[name]
        with pytest.raises(RuntimeError, match=sentence):
            train(fabric, change, frozen, 1)


IN_NO_SHARD = (
    r"Parameters were added to `\w*Net` after `fabric.setup`, and their gradients would not be averaged over the "
    r"ranks: '{name}.weight', '{name}.bias'. Add and replace layers before `setup`"
)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fsdp", "model_parallel", "manual"])
def test_layers_added_to_a_sharded_model_raise_at_the_next_forward(name: str) -> None:
    sentences = {"replace the head": "head", "append a layer": r"body\.4"}
    launch(SHARDED[name], refused, {change: IN_NO_SHARD.format(name=each) for change, each in sentences.items()})


@pytest.mark.slow
def test_a_parameter_that_is_replaced_where_one_rank_has_its_state_is_refused_at_the_next_step() -> None:
    sentence = "Parameters of `SGD` were taken out of its groups, or replaced, after `fabric.setup`"
    launch(WHOLE["sharded optimizer"], refused, {"replace a parameter": sentence})


@pytest.mark.slow
def test_a_data_parallel_part_of_the_users_own_that_is_unfrozen_raises() -> None:
    launch(ManualStrategy(parallelize=replicated), partly_unfrozen)


def partly_unfrozen(fabric: Fabric) -> None:
    net, x = Net().eval(), torch.ones(2, 4)
    net.body[0].requires_grad_(False)
    model = fabric.setup_module(net)
    model(x)
    net.body.module[0].requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"of `Sequential` \('0.weight', '0.bias'\) were added or unfrozen after"):
        model(x)


def differently(fabric: Fabric) -> None:
    net, x = fabric.setup_module(Net().eval()), torch.ones(2, 4)
    fabric.backward(net(x).sum())
    (net.body if fabric.global_rank else net.head).requires_grad_(False)
    net(x)


@pytest.mark.slow
def test_ranks_that_change_differently_are_shown_side_by_side() -> None:
    with pytest.raises(Exception, match=r"(?s)rank 0: .*forward of `Net`, which trains.*body.0.w.*rank 1: .*head.w"):
        launch("ddp", differently)


class Counting(nn.Module):
    """Layers, and a buffer that each forward assigns."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(1, 1))
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen + x.detach().sum()
        return self.layers(x).sum()  # type: ignore[no-any-return]


def count(fabric: Fabric) -> list[float]:
    net = fabric.setup_module(Counting())
    for _ in range(2):
        fabric.backward(net(torch.full((1, 1), fabric.global_rank + 1.0)))
        net.layers.append(nn.Linear(1, 1))
    values: list[float] = fabric.all_gather(net.seen)[:, 0].tolist()
    return values


@pytest.mark.slow
def test_buffers_that_are_each_ranks_own_stay_so_where_a_layer_is_added() -> None:
    assert launch(DDPStrategy(broadcast_buffers=False), count) == [2.0, 4.0]


def test_contents_detect_every_change_and_nothing_else() -> None:
    net = Net()
    contents = ParameterSnapshot(net)
    net.eval().requires_grad_(False)
    net.load_state_dict(Net().state_dict())
    assert contents.is_as_it_was()
    for change in (
        lambda: setattr(net, "head", nn.Linear(4, 3)),
        lambda: net.body.append(nn.ReLU()),
        lambda: net.body[2].add_module("within", nn.ReLU()),  # of a module that had none
        lambda: net.body[2].register_parameter("gain", nn.Parameter(torch.ones(1))),
        lambda: net.head.register_parameter("bias", None),
        lambda: delattr(net, "head"),
    ):
        contents = ParameterSnapshot(net)
        change()
        assert not contents.is_as_it_was()
