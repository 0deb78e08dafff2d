"""A model over a mesh trains as in one process, goes to plain checkpoints and back, and what cannot be right raises."""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from devices import ACCELERATOR
from sharding import BATCH_SIZE, Block, Net, Recipe, Run, batches, make, train_all, train_over, train_plain
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from worlds import run_world

from fabric import Fabric, SanitizerError
from fabric.launchers.world import World
from fabric.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy, Strategy, along
from fabric.strategies.accelerators.accelerator import CPUAccelerator
from fabric.strategies.accelerators.torch_accelerator import TorchAccelerator
from fabric.strategies.capabilities import Target
from fabric.strategies.precision.precision import Precision
from fabric.strategies.tensors.dtensor import local_part, whole


def cut_layers(model: Net, mesh: Any) -> None:
    """Tensor parallel blocks, and shards over "shard"."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    for block in model.blocks:
        if mesh["tensor"].size() > 1:
            parallelize_module(block, mesh["tensor"], {"hidden": ColwiseParallel(), "out": RowwiseParallel()})
        if mesh["shard"].size() > 1:
            fully_shard(block, mesh=mesh["shard"])
    if mesh["shard"].size() > 1:
        fully_shard(model, mesh=mesh["shard"])


def cut_tied(model: Net, mesh: Any) -> Net:
    """The tied weight in rows over "tensor", which 11 rows do not fill; replicas of shards average among themselves."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "out": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh["tensor"], plan)
    model.out.weight = model.embed.weight
    for block in model.blocks:
        fully_shard(block, mesh=mesh["data", "shard"])
    return model


def cut_flattened(model: Net, mesh: Any) -> None:
    """One block in shards over two axes as if they were one, the other over one of them, the rest whole."""
    from torch.distributed.fsdp import fully_shard

    fully_shard(model.blocks[0], mesh=mesh["data", "shard"]._flatten("both"))
    fully_shard(model.blocks[1], mesh=mesh["shard"])


def leave_whole(model: nn.Module, mesh: Any) -> None:
    """Nothing: replicas."""


def fabric_with(strategy: Strategy | str, size: int, precision: Any = "32-true") -> Fabric:
    return Fabric(accelerator=ACCELERATOR, devices=size, strategy=strategy, precision=precision, launcher="forkserver")


def close(actual: Any, expected: Any, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def train(fabric: Fabric, recipe: Recipe, folder: str, load: str | None = None) -> Run | None:
    """As `sharding.train`, with the loaders of the strategy: ranks along some axes read the same."""
    model, optimizer = fabric.setup(*make(recipe))
    if load is not None:
        fabric.load(load, {"model": model, "optimizer": optimizer})
    samples = TensorDataset(*(torch.cat(column) for column in zip(*batches(recipe), strict=True)))
    mesh = fabric._connected.runtime.mesh
    assert mesh is not None
    num_shares = mesh["data"].size() * mesh["shard"].size()
    loader = fabric.setup_dataloaders(DataLoader(samples, batch_size=BATCH_SIZE // num_shares))
    return train_over(fabric, recipe, model, optimizer, loader, folder)


def train_several(fabric: Fabric, recipes: list[Recipe], folder: str, load: str | None = None) -> list[Run | None]:
    return [train(fabric, recipe, folder, load) for recipe in recipes]


def recipes_of_a_new_seed() -> list[Recipe]:
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    return [
        Recipe(clip={"max_norm": 0.1}, seed=seed),
        Recipe(optimizer="adamw", accumulate=2, clip={"clip_val": 0.01}, seed=seed),
        Recipe(optimizer="adamw", clip={"max_norm": 0.05, "norm_type": float("inf")}, seed=seed + 1),
    ]


MESHES = {
    "tensor": (2, ModelParallelStrategy(parallelize_fn=cut_layers, tensor=2)),
    "data": (2, ModelParallelStrategy(parallelize_fn=leave_whole, data="auto")),
    "data-tensor": (4, ModelParallelStrategy(parallelize_fn=cut_layers, data=2, tensor=2)),
    "shard-tensor": (4, ModelParallelStrategy(parallelize_fn=cut_layers, shard="auto", tensor=2)),
    "data-shard": (4, ModelParallelStrategy(parallelize_fn=cut_layers, data=2, shard=2)),
    "flattened": (4, ModelParallelStrategy(parallelize_fn=cut_flattened, data=2, shard=2)),
    "context-shard": (4, ModelParallelStrategy(parallelize_fn=cut_layers, context=2, shard=2)),
    "tied": (8, ModelParallelStrategy(parallelize_fn=cut_tied, data=2, shard=2, tensor=2)),
}


THOROUGH = ("shard-tensor", "data", "data-tensor", "data-shard", "flattened", "context-shard", "tied")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.thorough] if name in THOROUGH else []) for name in MESHES]
)
def test_losses_norms_weights_and_moments_equal_those_of_one_process(name: str, tmp_path: Path) -> None:
    size, strategy = MESHES[name]
    recipes = recipes_of_a_new_seed()
    runs = fabric_with(strategy, size).launch(train_several, recipes, str(tmp_path))
    assert runs is not None
    for recipe, run in zip(recipes, runs, strict=True):
        assert run is not None
        expected = train_plain(recipe)
        close((run.losses, run.norms), (expected.losses, expected.norms))
        close(run.weights, dict(expected.weights))
        close(run.moments, expected.moments)


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("other", [DDPStrategy(), FSDPStrategy(auto_wrap_policy=Block)], ids=["ddp", "fsdp"])
def test_a_checkpoint_goes_from_other_strategies_to_a_mesh_and_back(other: Strategy, tmp_path: Path) -> None:
    recipe = Recipe(optimizer="adamw")
    for folder in ("second", "third"):
        (tmp_path / folder).mkdir()
    first, second = tmp_path / "adamw-0", tmp_path / "second" / "adamw-0"
    fabric_with(other, 2).launch(train_all, [recipe], str(tmp_path))
    size, strategy = MESHES["shard-tensor"]
    fabric_with(strategy, size).launch(train_several, [recipe], str(tmp_path / "second"), str(first))
    runs = fabric_with(other, 2).launch(train_all, [recipe], str(tmp_path / "third"), str(second))
    assert runs is not None
    assert runs[0] is not None
    model, optimizer = make(recipe)
    for _ in range(3):
        expected = train_plain(recipe, model, optimizer)
    close((runs[0].losses, runs[0].weights), (expected.losses, dict(expected.weights)))
    close(runs[0].moments, expected.moments)


class Sequences(nn.Module):
    """Norms whose input is cut along the sequence: each rank has a part of their gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.LayerNorm(6)
        self.up = nn.Linear(6, 12)
        self.down = nn.Linear(12, 6)
        self.last = nn.LayerNorm(6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.last(self.down(self.up(self.first(x)).tanh())))


def cut_sequences(model: Sequences, mesh: Any, shards: bool = False) -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )
    from torch.distributed.tensor.placement_types import Replicate

    plan = {
        "first": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
        "last": SequenceParallel(),
        "head": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate(), use_local_output=True),
    }
    parallelize_module(model, mesh["tensor"], plan)
    parallelize_module(
        model, mesh["tensor"], PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1))
    )
    if shards:
        fully_shard(model, mesh=mesh["shard"])


def forget_the_norm(model: Sequences, mesh: Any) -> None:
    """As `cut_sequences`, but the last norm stays plain, and works on this rank's part of the sequence."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        parallelize_module,
    )

    plan = {
        "up": ColwiseParallel(),
        "down": RowwiseParallel(output_layouts=Shard(1)),
        "head": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate(), use_local_output=True),
    }
    parallelize_module(model, mesh["tensor"], plan)


def train_sequences(model: nn.Module, optimizer: Any, backward: Callable[[Tensor], None], clip: Any, part: Any) -> Any:
    torch.manual_seed(1)
    norms = []
    for x in torch.randn(3, 4, 8, 6):
        backward(model(part(x)).square().mean())
        norms.append(clip(optimizer))
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(norms)


def train_sequences_on_every_rank(fabric: Fabric) -> tuple[Tensor, Any]:
    torch.manual_seed(0)
    model = Sequences()
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    mesh = fabric._connected.runtime.mesh
    assert mesh is not None
    shards = mesh["shard"]

    def clip(optimizer: Any) -> Tensor | None:
        return fabric.clip_gradients(model, optimizer, max_norm=0.1)

    norms = train_sequences(
        model, optimizer, fabric.backward, clip, lambda x: x.chunk(shards.size())[shards.get_local_rank()]
    )
    return norms, whole_state(fabric, model)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "strategy"),
    [
        (2, ModelParallelStrategy(parallelize_fn=cut_sequences, tensor=2)),
        (4, ModelParallelStrategy(parallelize_fn=partial(cut_sequences, shards=True), shard=2, tensor=2)),
    ],
    ids=["tensor", "shard-tensor"],
)
def test_gradients_of_norms_over_parts_of_the_sequence_are_added_up(size: int, strategy: Strategy) -> None:
    found = fabric_with(strategy, size).launch(train_sequences_on_every_rank)
    torch.manual_seed(0)
    model = Sequences()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    norms = train_sequences(
        model,
        optimizer,
        lambda loss: loss.backward(),
        lambda optimizer: nn.utils.clip_grad_norm_(model.parameters(), 0.1),
        lambda x: x,
    )
    close(found, (norms, dict(model.state_dict())))


def whole_state(fabric: Fabric, module: nn.Module) -> Any:
    """What rank 0 would save, on every rank."""
    return fabric.state_dict(module, all_ranks=True)


def cut_over_data(model: Net, mesh: Any) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    parallelize_module(model.blocks[0], mesh["data"], {"hidden": ColwiseParallel()})


def shard_over_everything(model: Net, mesh: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    fully_shard(model)


def untie(model: Net, mesh: Any) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    parallelize_module(model, mesh["tensor"], {"out": ColwiseParallel()})


def rename(model: Net, mesh: Any) -> None:
    model.further = nn.Linear(2, 2)


def give_another(model: Net, mesh: Any) -> Any:
    return nn.Sequential(model)


def setup_alone(fabric: Fabric) -> None:
    fabric.setup(*make(Recipe()))


def setup_and_step(fabric: Fabric) -> None:
    torch.manual_seed(0)
    net = Sequences()
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    for _ in range(2):
        fabric.backward(model(torch.randn(4, 8, 6)).square().mean())
        optimizer.step()


def run_empty(fabric: Fabric) -> None:
    with fabric.init_module(empty_init=True):
        net = Net()
    net.blocks[0].hidden.reset_parameters = None  # of a class that has none
    assert all(parameter.is_meta for parameter in net.parameters())
    model = fabric.setup_module(net)
    model(batches(Recipe())[0][0])


def shard_layers(model: nn.Module, mesh: Any) -> None:
    """Each by itself, and not the model."""
    from torch.distributed.fsdp import fully_shard

    for part in model.children():
        fully_shard(part, mesh=mesh["shard"])


def train_empty(fabric: Fabric) -> tuple[list[float], list[float]]:
    """The losses of a model that was made on the meta device, and those of one process from the same weights."""
    with fabric.init_module(empty_init=True):
        net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    net, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=0.1))
    plain = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    plain.load_state_dict(fabric.state_dict(net, all_ranks=True))
    alone = torch.optim.AdamW(plain.parameters(), lr=0.1)
    losses: tuple[list[float], list[float]] = ([], [])
    for _ in range(3):
        for kept, model, stepped, backward in zip(
            losses, (net, plain), (optimizer, alone), (fabric.backward, Tensor.backward), strict=True
        ):
            loss = model(torch.ones(2, 4)).square().mean()
            backward(loss)
            stepped.step()
            stepped.zero_grad()
            kept.append(loss.item())
    return losses


@pytest.mark.slow
def test_a_model_on_the_meta_device_that_the_function_shards_trains_as_in_one_process() -> None:
    strategy = ModelParallelStrategy(parallelize_fn=shard_layers, shard=2)
    losses, expected = fabric_with(strategy, 2).launch(train_empty)
    assert losses == pytest.approx(expected, rel=1e-5)


REFUSED = {
    "unused": (
        ModelParallelStrategy(parallelize_fn=leave_whole, tensor=2),
        (
            setup_alone,
            ValueError,
            r"`tensor=2` was written, but `parallelize_fn` sharded no parameter over `mesh\['tensor'",
        ),
    ),
    "unused shard": (
        ModelParallelStrategy(parallelize_fn=leave_whole, shard=2),
        (setup_alone, ValueError, r"sharded no parameter over `mesh\['shard'\]`. Call `fully_shard\(module, mesh="),
    ),
    "over data": (
        ModelParallelStrategy(parallelize_fn=cut_over_data, data=2),
        (
            setup_alone,
            ValueError,
            r"`blocks.0.hidden.weight` is sharded over the axis 'data', whose ranks have different data",
        ),
    ),
    "over everything": (
        ModelParallelStrategy(parallelize_fn=shard_over_everything, tensor=2, shard=2),
        (setup_alone, ValueError, r"`embed.weight` is sharded over the axes 'shard' and 'tensor' as one"),
    ),
    "untied": (
        ModelParallelStrategy(parallelize_fn=untie, tensor=2),
        (setup_alone, ValueError, r"`embed.weight` and `out.weight` were one tied parameter, and are two now"),
    ),
    "renamed": (
        ModelParallelStrategy(parallelize_fn=rename, data=2),
        (setup_alone, ValueError, r"added, removed or renamed parameters: further.bias, further.weight"),
    ),
    "another": (
        ModelParallelStrategy(parallelize_fn=give_another, data=2),
        (setup_alone, TypeError, r"was given a `Net` and returned another object, a `Sequential`"),
    ),
    "partial gradient": (
        ModelParallelStrategy(parallelize_fn=forget_the_norm, tensor=2),
        (setup_and_step, SanitizerError, r"last.weight"),
    ),
    "empty": (
        ModelParallelStrategy(parallelize_fn=cut_layers, tensor=2),
        (
            run_empty,
            RuntimeError,
            r"`Net` was made empty, and blocks.0.hidden.bias, .* have no values yet. Load a check",
        ),
    ),
}


def refuse_each(world: World, names: list[str]) -> dict[str, tuple[bool, str]]:
    """Whether each setup raised the error that it is to raise, and the words, of one setup after the other."""
    found = {}
    for name in names:
        strategy, (body, expected, _) = REFUSED[name]
        with Fabric(accelerator=ACCELERATOR, devices=world.size, strategy=strategy) as fabric:
            fabric.launch()
            try:
                body(fabric)
                found[name] = False, "nothing was raised"
            except Exception as error:
                found[name] = isinstance(error, expected), repr(error)
    return found


@functools.cache
def refused_by_ranks(size: int) -> list[dict[str, tuple[bool, str]]]:
    return run_world(size, refuse_each, [name for name in REFUSED if size_of(name) == size])


def size_of(name: str) -> int:
    return 4 if name == "over everything" else 2


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_a_setup_that_would_change_the_numbers_raises_on_every_rank(name: str) -> None:
    _, (_, _, words) = REFUSED[name]
    for found in refused_by_ranks(size_of(name)):
        is_expected, told = found[name]
        assert is_expected, told
        assert re.search(words, told), told


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"data": 0}, r"`ModelParallelStrategy\(data=0\)`: a degree is a number of ranks from 1 on, or 'auto'"),
        ({"tensor": 2.0}, r"`ModelParallelStrategy\(tensor=2.0\)`: a degree is a number"),
    ],
    ids=str,
)
def test_degrees_that_are_not_numbers_of_ranks_raise_in_the_constructor(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ModelParallelStrategy(parallelize_fn=leave_whole, **options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"data": 3},
            r"makes a mesh of pipeline=1 x data=3 x shard=1 x context=1 x tensor=1: 3 ranks, but there are 4",
        ),
        ({"data": "auto", "tensor": 3}, r"data='auto', .*tensor=3` makes a mesh of .*: 3 ranks, but there are 4"),
        ({"data": "auto", "tensor": 8}, r"8 ranks, but there are 4"),
        (
            {"parallelize_fn": None, "data": 4},
            r"has no function that parallelises the model. Write `strategy=Mod",
        ),
    ],
    ids=str,
)
def test_a_mesh_whose_size_is_not_the_world_size_raises_before_launch(options: dict[str, Any], words: str) -> None:
    strategy = ModelParallelStrategy(**{"parallelize_fn": leave_whole, **options})
    with pytest.raises(ValueError, match=words):
        Fabric(accelerator=ACCELERATOR, devices=4, strategy=strategy)


def test_the_strategy_without_a_function_raises_with_what_to_write() -> None:
    with pytest.raises(
        ValueError, match=r"`strategy='model_parallel'` has no function .*ModelParallelStrategy\(parall"
    ):
        Fabric(accelerator=ACCELERATOR, devices=2, strategy="model_parallel")


def test_the_strategy_needs_ranks_that_can_talk() -> None:
    strategy = ModelParallelStrategy(parallelize_fn=leave_whole)
    assert strategy.refuse(Target(accelerator=CPUAccelerator())) is None
    assert "no torch.distributed backend" in str(strategy.refuse(Target(accelerator=TorchAccelerator("mps"))))


class Normalised(nn.Module):
    """With statistics, and a method beside forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.blocks = nn.ModuleList([Block6(), Block6()])
        self.unused = nn.Linear(4, 4)

    def forward(self, x: Tensor, unused: bool = False) -> Tensor:
        x = self.norm(x)
        for block in self.blocks:
            x = block(x)
        return self.unused(x) if unused else x

    def loss(self, x: Tensor) -> Tensor:
        return self(x).square().mean()


class Block6(nn.Module):
    """A block of two layers, to be cut by columns and rows."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 6)
        self.down = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).tanh())


def cut_blocks(model: Normalised, mesh: Any) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    for block in model.blocks:
        parallelize_module(block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})


def contrast(mine: Tensor, everyone: Tensor, index: int) -> Tensor:
    """Each sample against those of all ranks."""
    own = torch.arange(len(mine)) + index * len(mine)
    return nn.functional.cross_entropy(mine @ everyone.T, own)


def gather_gradients(fabric: Fabric, strategy: ModelParallelStrategy) -> dict[str, Tensor]:
    """Over the ranks of different data; over all of them it is refused where some have the same."""
    model = fabric.setup_module(made_with(0).eval())
    mesh = fabric._connected.runtime.mesh
    assert mesh is not None
    group = along(fabric.collective, mesh, ["data", "shard", "context"])
    mine = model(torch.randn(8, 4, generator=torch.Generator().manual_seed(1)).chunk(group.size)[group.rank])
    if "gather_gradients" in strategy.lacks:
        with pytest.raises(
            ValueError, match=r"over all ranks of a mesh, where some ranks read the same samples: .*along\("
        ):
            fabric.all_gather(mine, sync_grads=True)
    everyone = fabric.all_gather(mine, group=group, sync_grads=True).flatten(0, 1)
    fabric.backward(contrast(mine, everyone, group.rank))
    return whole_gradients(model)


def cut_and_shard_blocks(model: Normalised, mesh: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    cut_blocks(model, mesh)
    fully_shard(model, mesh=mesh["shard"])


GATHERED = {
    "data-tensor": ModelParallelStrategy(parallelize_fn=cut_blocks, data=2, tensor=2),
    "shard-tensor": ModelParallelStrategy(parallelize_fn=cut_and_shard_blocks, shard=2, tensor=2),
    "data-context": ModelParallelStrategy(parallelize_fn=leave_whole, data=2, context=2),
    "data": ModelParallelStrategy(parallelize_fn=leave_whole, data=4),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", GATHERED)
def test_gradients_come_back_through_a_gathering_over_ranks_of_different_data(name: str) -> None:
    found = fabric_with(GATHERED[name], 4).launch(gather_gradients, GATHERED[name])
    model = made_with(0).eval()
    everyone = model(torch.randn(8, 4, generator=torch.Generator().manual_seed(1)))
    num_shares = 2 if "tensor" in name else 4
    losses = [contrast(mine, everyone, index) for index, mine in enumerate(everyone.chunk(num_shares))]
    torch.stack(losses).mean().backward()
    close(found, {name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    lacks = GATHERED[name].lacks.keys() - {"copies", "bare_parameters"}
    assert lacks == (set() if name == "data" else {"gather_gradients"})


def equal_on_all_ranks(fabric: Fabric, tensors: dict[str, Tensor]) -> bool:
    return all(
        torch.equal(of_ranks, of_ranks[:1].expand_as(of_ranks)) for of_ranks in fabric.all_gather(tensors).values()
    )


def whole_gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def made_with(seed: int) -> Normalised:
    torch.manual_seed(seed)
    return Normalised()


def prepare_many_ways(fabric: Fabric) -> None:
    """Data 2 x tensor 2. Ranks start from other weights: rank 0's are taken."""
    net = made_with(fabric.global_rank)
    plain = made_with(0)
    names = [name for name, _ in net.named_parameters()]
    model = fabric.setup_module(net)
    assert model is net
    assert type(model) is Normalised
    assert [name for name, _ in model.named_parameters()] == names
    torch.manual_seed(5)
    xs = torch.randn(5, 8, 4)
    mesh = fabric._connected.runtime.mesh
    assert mesh is not None
    assert mesh.mesh_dim_names == ("pipeline", "data", "shard", "context", "tensor")
    mine = xs.chunk(2, dim=1)[mesh["data"].get_local_rank()]
    model.norm.eval()
    plain.norm.eval()

    # A marked method; backwards with and without a message, in any order; a part that only one data rank uses.
    model.mark_forward_method("loss")
    fabric.backward(model.loss(mine[0]))
    with fabric.no_backward_sync(model):
        fabric.backward(model.loss(mine[1]))
        with fabric.no_backward_sync(model), fabric.no_backward_sync(model, enabled=False):
            pass
        fabric.backward(model.loss(mine[2]))
    assert not equal_on_all_ranks(fabric, {"norm": model.norm.weight.grad})
    fabric.backward(model(mine[3], unused=bool(mesh["data"].get_local_rank())).square().mean())
    for x in xs[:3]:
        plain.loss(x).backward()
    ((plain(xs[3][:4]).square().mean() + plain(xs[3][4:], unused=True).square().mean()) / 2).backward()
    expected = {name: p.grad for name, p in plain.named_parameters()}
    close(whole_gradients(model), expected)

    # An optimizer of a model that is set up.
    optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.1))
    close(fabric.clip_gradients(model, optimizer, max_norm=0.1), nn.utils.clip_grad_norm_(plain.parameters(), 0.1))
    optimizer.step()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    close(whole_state(fabric, model), plain.state_dict())
    close(whole_state(fabric, model.blocks[0]), plain.blocks[0].state_dict())

    # Statistics of different data become those of the first rank.
    model.norm.train()
    fabric.backward(model(mine[4]).sum())
    assert equal_on_all_ranks(fabric, dict(model.norm.named_buffers()))

    # Nothing of ours is left on the model: a backward that is not averaged raises nothing.
    fabric.close()
    assert not {"forward", "mark_forward_method"} & set(vars(model))
    model.norm.weight.sum().backward()


@pytest.mark.slow
def test_the_users_objects_go_on_over_a_mesh() -> None:
    strategy = ModelParallelStrategy(parallelize_fn=cut_blocks, data=2, tensor=2)
    fabric_with(strategy, 4).launch(prepare_many_ways)


def keep_shards_back(fabric: Fabric) -> None:
    """No shard gets a gradient but zeros before the backward that is to exchange them, and each gets one in that."""
    model, _ = fabric.setup(*make(Recipe()))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    tokens, targets = batches(Recipe())[0]
    with fabric.no_backward_sync(model):
        fabric.backward(nn.functional.cross_entropy(model(tokens), targets))
        assert not any(local_part(p.grad).any() for p in trained if p.grad is not None)  # zeros meanwhile
    fabric.backward(nn.functional.cross_entropy(model(tokens), targets))
    assert all(parameter.grad is not None for parameter in trained)


@pytest.mark.slow
def test_shards_exchange_nothing_within_no_backward_sync() -> None:
    fabric_with(ModelParallelStrategy(parallelize_fn=cut_layers, shard=2), 2).launch(keep_shards_back)


class AddsParts(Block6):
    """What two ranks along "tensor" compute, in one process: two products, each rounded, and then their sum."""

    def forward(self, x: Tensor) -> Tensor:
        linear = nn.functional.linear
        ups = zip(self.up.weight.chunk(2), self.up.bias.chunk(2), strict=True)
        hidden = [linear(x, weight, bias).tanh() for weight, bias in ups]
        downs = zip(hidden, self.down.weight.chunk(2, dim=1), strict=True)
        first, second = (linear(part, weight, self.down.bias / 2) for part, weight in downs)
        return x + (first + second)


def stack(block: type[Block6]) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(block(), block(), nn.Linear(4, 3))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def cut_stack(model: nn.Sequential, mesh: Any) -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    for block in list(model)[:2]:
        parallelize_module(block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if mesh["shard"].size() > 1:
        fully_shard(model, mesh=mesh["shard"])


def inputs_of_stack() -> Tensor:
    return torch.randn(3, 8, 4, generator=torch.Generator().manual_seed(1))


def train_stack(fabric: Fabric) -> tuple[list[float], Any]:
    model, optimizer = fabric.setup(*stack(Block6))
    mesh = fabric._connected.runtime.mesh
    assert mesh is not None
    losses = []
    for x in inputs_of_stack():
        loss = model(x.chunk(mesh["shard"].size())[mesh["shard"].get_local_rank()]).float().square().mean()
        fabric.backward(loss)
        losses.append(fabric.all_reduce(loss.detach()).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, whole_state(fabric, model)


def train_plain_stack(block: type[Block6], precision: Precision, num_shares: int) -> tuple[list[float], Any]:
    """One process; each share of the data goes through the model alone, as rounding depends on it."""
    model, optimizer = stack(block)
    losses = []
    for x in inputs_of_stack():
        shares = []
        for part in x.chunk(num_shares):
            with torch.autocast("cpu", dtype=precision.compute_dtype):
                output = model(part)
            shares.append(output.float().square().mean())
        loss = torch.stack(shares).mean()
        (loss * precision.init_scale).backward()
        losses.append(loss.item())
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad /= precision.init_scale
        optimizer.step()
        optimizer.zero_grad()
    return losses, dict(model.state_dict())


@pytest.mark.slow
@pytest.mark.parametrize(("shard", "word"), [(1, "bf16-mixed"), (2, "bf16-mixed"), (2, "16-mixed")])
def test_in_mixed_precision_numbers_are_those_of_products_that_are_rounded_in_parts_and_added(
    shard: int, word: str
) -> None:
    precision = replace(Precision.parse(word), init_scale=2.0**8)
    strategy = ModelParallelStrategy(parallelize_fn=cut_stack, shard=shard, tensor=2)
    fabric = Fabric(
        accelerator=ACCELERATOR, devices=2 * shard, strategy=strategy, plugins=precision, launcher="forkserver"
    )
    found = fabric.launch(train_stack)
    close(found, train_plain_stack(AddsParts, precision, shard), 1e-6)
    with pytest.raises(AssertionError):  # and a sum that is rounded once is another
        close(found, train_plain_stack(Block6, precision, shard), 1e-5)


def overflow_on_one_rank(fabric: Fabric) -> None:
    recipe = Recipe(optimizer="adamw")
    model, optimizer = fabric.setup(*make(recipe))
    before = whole_state(fabric, model)
    tokens, targets = batches(recipe)[0]
    fabric.backward(nn.functional.cross_entropy(model(tokens).float(), targets))
    if fabric.global_rank == 1:
        local_part(model.blocks[0].hidden.weight.grad).fill_(float("inf"))
    optimizer.step()
    close(whole_state(fabric, model), before)
    assert not optimizer.state_dict()["state"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Skipped")
def test_an_overflow_in_one_ranks_part_skips_the_step_on_all() -> None:
    fabric_with(MESHES["tensor"][1], 2, "16-mixed").launch(overflow_on_one_rank)
