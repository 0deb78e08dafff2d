"""Parallelism of the user's own: three worked examples against one process of plain PyTorch, and what is refused.

The examples: embedding tables cut by rows beside a data-parallel rest (`examples/recommender.py`); a part of a model
in DistributedDataParallel, one in FSDP2, and the rest in neither; gradients divided by the number of samples.
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from devices import ACCELERATOR
from sharding import Net, Recipe, batches, make, train_all, train_plain
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer

from fabric import Fabric, read_checkpoint
from fabric.strategies import DDPStrategy, ManualContext, ManualStrategy, Parallelized
from fabric.strategies.accelerators.torch_accelerator import TorchAccelerator
from fabric.strategies.capabilities import Target
from fabric.strategies.tensors.dtensor import whole

sys.path.append(str(Path(__file__).parents[3] / "examples"))
from recommender import Recommender, SplitEmbedding, split_tables

RECIPES = [
    Recipe(clip={"max_norm": 0.1}),
    Recipe(optimizer="adamw", accumulate=2, clip={"clip_val": 0.01}),
    Recipe(optimizer="adamw", seed=1, clip={"max_norm": 0.05, "norm_type": float("inf")}),
]


def manual(parallelize: Any, size: int, precision: Any = "32-true", **options: Any) -> Fabric:
    strategy = ManualStrategy(parallelize=parallelize, **options)
    return Fabric(accelerator=ACCELERATOR, devices=size, strategy=strategy, precision=precision, launcher="forkserver")


def close(actual: Any, expected: Any, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


# A part by DistributedDataParallel, a part by FSDP2, the rest averaged by us


def average_everything(net: nn.Module, context: ManualContext) -> Parallelized:
    return Parallelized(module=net, averaged=net)


def wrap_everything(net: nn.Module, context: ManualContext) -> nn.Module:
    return DistributedDataParallel(net)


def replicate_one_half_and_shard_the_other(net: Net, context: ManualContext) -> Parallelized:
    from torch.distributed.fsdp import fully_shard

    net.blocks[0] = DistributedDataParallel(net.blocks[0])
    fully_shard(net.blocks[1], mesh=context.mesh)
    return Parallelized(module=net, averaged=net)


def shard_the_other_half_along_one_axis(net: Net, context: ManualContext) -> Parallelized:
    from torch.distributed.fsdp import fully_shard

    net.blocks[0] = DistributedDataParallel(net.blocks[0])
    fully_shard(net.blocks[1], mesh=context.mesh["shard"])
    return Parallelized(module=net, averaged=net)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "parallelize", "mesh"),
    [
        pytest.param(1, replicate_one_half_and_shard_the_other, None, marks=pytest.mark.thorough),
        pytest.param(2, average_everything, None, marks=pytest.mark.thorough),
        pytest.param(2, wrap_everything, None, marks=pytest.mark.thorough),
        (2, replicate_one_half_and_shard_the_other, None),
        pytest.param(
            4, replicate_one_half_and_shard_the_other, {"replicate": 2, "shard": 2}, marks=pytest.mark.thorough
        ),
        (4, shard_the_other_half_along_one_axis, {"replicate": 2, "shard": 2}),
    ],
    ids=["one", "averaged", "wrapped", "two", "four", "four by hand"],
)
def test_losses_norms_weights_and_moments_equal_those_of_one_process(
    size: int, parallelize: Any, mesh: dict[str, int] | None, tmp_path: Path
) -> None:
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    recipes = [replace(recipe, seed=seed + index) for index, recipe in enumerate(RECIPES)]
    runs = manual(parallelize, size, mesh=mesh).launch(train_all, recipes, str(tmp_path))
    assert runs is not None
    for recipe, run in zip(recipes, runs, strict=True):
        assert run is not None
        expected = train_plain(recipe)
        close((run.losses, run.norms), (expected.losses, expected.norms))
        close(run.weights, dict(expected.weights))
        close(run.moments, expected.moments)


@pytest.mark.thorough
@pytest.mark.slow
def test_a_checkpoint_goes_to_replicas_and_plain_torch_and_to_other_ranks(tmp_path: Path) -> None:
    recipe = Recipe(optimizer="adamw")
    steps: list[tuple[Fabric, str]] = [
        (manual(replicate_one_half_and_shard_the_other, 2), "first"),
        (Fabric(accelerator=ACCELERATOR, devices=2, strategy=DDPStrategy(), launcher="forkserver"), "second"),
        (manual(shard_the_other_half_along_one_axis, 4, mesh={"replicate": 2, "shard": 2}), "third"),
        (manual(wrap_everything, 2), "fourth"),
    ]
    model, optimizer = make(recipe)
    saved = None
    for fabric, name in steps:
        (tmp_path / name).mkdir()
        runs = fabric.launch(train_all, [recipe], str(tmp_path / name), saved)
        saved = str(tmp_path / name / "adamw-0")
        expected = train_plain(recipe, model, optimizer)
        assert runs is not None
        assert runs[0] is not None
        close(
            (runs[0].losses, runs[0].weights, runs[0].moments),
            (expected.losses, dict(expected.weights), expected.moments),
        )
    content = read_checkpoint(saved or "")
    again, its_optimizer = make(recipe)
    again.load_state_dict(content["model"])
    its_optimizer.load_state_dict(content["optimizer"])


# Tables cut by rows


@dataclass(frozen=True)
class Task:
    """What is trained: sizes and numbers come from the seed."""

    seed: int
    optimizer: str = "sgd"
    accumulate: int = 1
    max_norm: float | None = None
    clip_val: float | None = None

    def parts(self) -> tuple[Recommender, Optimizer, list[tuple[Tensor, Tensor]]]:
        """The model, its optimizer, and global batches of pairs; half of them for a few rows."""
        torch.manual_seed(self.seed)
        num_words, dim = (int(torch.randint(low, 12, ())) for low in (3, 1))
        model = Recommender(num_words, dim).double()
        rows = [torch.randint(num if step % 2 else 2, (2, 8)) for step, num in enumerate([num_words] * 6)]
        optimizer: Optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
        if self.optimizer == "adamw":
            optimizer = AdamW(model.parameters(), lr=0.01, eps=1e-3)
        return model, optimizer, [(one[0], one[1]) for one in rows]


def tasks(seed: int) -> list[Task]:
    return [
        Task(seed, max_norm=0.02),
        Task(seed + 1, "adamw", accumulate=2, clip_val=0.001),
        Task(seed + 2, "adamw", accumulate=2, max_norm=0.02),
    ]


def split_doubles(model: Recommender, context: ManualContext) -> Parallelized:
    return split_tables(model.to(context.precision.param_dtype), context)


def split_within_replicas(model: Recommender, context: ManualContext) -> Parallelized:
    model.to(context.precision.param_dtype)
    for name in ("words", "proposals"):
        weight = context.shard(getattr(model, name).weight, axis="table")
        setattr(model, name, SplitEmbedding(weight, context.along("table")))
    return Parallelized(module=model, averaged=model)


def loss_of(model: nn.Module, words: Tensor, following: Tensor) -> Tensor:
    return (model(words, following) - words.double()).square().mean()


def train_recommender(fabric: Fabric, task: Task, path: str, load: str | None) -> list[float]:
    """The losses, and the norms where it clips by one."""
    model, optimizer, rows = task.parts()
    if fabric.global_rank > 0:  # the values of rank 0 are trained
        nn.init.zeros_(model.judge[0].weight)
        nn.init.zeros_(model.words.weight)
    model, optimizer = fabric.setup(model, optimizer)
    if load is not None:
        fabric.load(load, {"model": model, "optimizer": optimizer})
    found = []
    for step, (words, following) in enumerate(rows, start=1):
        mine = (part.chunk(fabric.world_size)[fabric.global_rank] for part in (words, following))
        is_last = step % task.accumulate == 0
        with fabric.no_backward_sync(model, enabled=not is_last):
            loss = loss_of(model, *mine)
            fabric.backward(loss / task.accumulate)
        found.append(fabric.all_reduce(loss.detach()).item())
        if is_last:
            if task.max_norm is not None or task.clip_val is not None:
                norm = fabric.clip_gradients(model, optimizer, clip_val=task.clip_val, max_norm=task.max_norm)
                found += [] if norm is None else [norm.item()]
            optimizer.step()
            optimizer.zero_grad()
    fabric.save(path, {"model": model, "optimizer": optimizer})
    return found


def train_plain_recommender(task: Task, model: Recommender, optimizer: Optimizer) -> list[float]:
    found = []
    for step, (words, following) in enumerate(task.parts()[2], start=1):
        loss = loss_of(model, words, following)
        (loss / task.accumulate).backward()
        found.append(loss.item())
        if step % task.accumulate == 0:
            if task.max_norm is not None:
                found.append(nn.utils.clip_grad_norm_(model.parameters(), task.max_norm).item())
            if task.clip_val is not None:
                nn.utils.clip_grad_value_(model.parameters(), task.clip_val)
            optimizer.step()
            optimizer.zero_grad()
    return found


def train_recommenders(fabric: Fabric, tasks: list[Task], folder: str, load: str | None) -> list[list[float]]:
    paths = [None if load is None else f"{load}/{index}" for index in range(len(tasks))]
    return [train_recommender(fabric, task, f"{folder}/{i}", paths[i]) for i, task in enumerate(tasks)]


@pytest.mark.slow
@pytest.mark.thorough
def test_split_tables_equal_whole_ones_and_go_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    plain = [task.parts() for task in tasks(seed)]
    load = None
    layouts: list[tuple[int, Any, dict[str, int] | None]] = [
        (2, split_doubles, None),
        (4, split_doubles, None),
        (4, split_within_replicas, {"replicate": 2, "table": 2}),
    ]
    for number, (size, parallelize, mesh) in enumerate(layouts):
        folder = tmp_path / str(number)
        folder.mkdir()
        fabric = manual(parallelize, size, "64-true", mesh=mesh)
        found = fabric.launch(train_recommenders, tasks(seed), str(folder), load)
        assert found is not None
        for index, (task, (model, optimizer, _)) in enumerate(zip(tasks(seed), plain, strict=True)):
            close(found[index], train_plain_recommender(task, model, optimizer), 1e-10)
            content = read_checkpoint(folder / str(index))
            close(content["model"], dict(model.state_dict()), 1e-10)
            close(content["optimizer"]["state"], optimizer.state_dict()["state"], 1e-10)
        load = str(folder)


# Gradients divided by the number of samples


def normalise_by_samples(model: nn.Module, context: ManualContext) -> Parallelized:
    """For losses that are sums: gradients become those of the mean over all samples of the window, on all ranks."""
    num_samples = torch.zeros((), device=context.device)

    def count(_: nn.Module, inputs: tuple[Tensor]) -> None:
        if torch.is_grad_enabled():
            num_samples.add_(len(inputs[0]))

    def finish_backward() -> None:
        total = context.collective.all_reduce(num_samples)
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.copy_(context.collective.all_reduce(parameter.grad) / total)
        num_samples.zero_()

    model.register_forward_pre_hook(count)
    return Parallelized(module=model, finish_backward=finish_backward)


def train_uneven(fabric: Fabric, recipe: Recipe) -> dict[str, Tensor]:
    """Rank r reads one sample more than rank r - 1, and rank 0 one in each window of two."""
    net, optimizer = make(recipe)
    net, optimizer = fabric.setup(net, optimizer)
    for step, (tokens, targets) in enumerate(batches(recipe), start=1):
        first = sum(range(1, fabric.global_rank + 1))
        mine = slice(first, first + fabric.global_rank + 1)
        with fabric.no_backward_sync(net, enabled=step % recipe.accumulate > 0):
            loss = nn.functional.cross_entropy(net(tokens[mine]), targets[mine], reduction="sum")
            fabric.backward(loss)
        if step % recipe.accumulate == 0:
            fabric.clip_gradients(net, optimizer, max_norm=0.5)
            optimizer.step()
            optimizer.zero_grad()
    fabric.close()
    return {name: tensor.detach() for name, tensor in net.state_dict().items()}


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_gradients_can_be_those_of_the_mean_over_all_samples(size: int) -> None:
    recipe = Recipe(seed=random.randrange(2**31), accumulate=2)
    print(recipe)
    weights = manual(normalise_by_samples, size).launch(train_uneven, recipe)
    net, optimizer = make(recipe)
    num_samples = sum(range(1, size + 1))
    for step, (tokens, targets) in enumerate(batches(recipe), start=1):
        (net.loss(tokens[:num_samples], targets[:num_samples]) / recipe.accumulate).backward()
        if step % recipe.accumulate == 0:
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    close(weights, dict(net.state_dict()))


# What goes on working, and what is refused


class Apart(nn.Module):
    """A part that is averaged, and one of which each rank has its own, as experts are."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.own = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.own(self.norm(x))


def average_a_part(model: Apart, context: ManualContext) -> Parallelized:
    return Parallelized(module=model, averaged=[model.norm])


def keep_apart(fabric: Fabric) -> None:
    """Ranks whose plain parameters differ can neither save nor clip them as one; what is averaged is fine."""
    torch.manual_seed(fabric.global_rank)
    model = Apart()
    model, optimizer = fabric.setup(model, SGD(model.parameters(), lr=0.1))
    of_norm = fabric.setup_optimizers(SGD(model.norm.parameters(), lr=0.1))
    fabric.backward(model(torch.randn(4, 2)).square().sum())
    for name, tensor in (*model.norm.named_buffers(), ("grad", model.norm.weight.grad)):
        assert tensor is not None
        gathered = fabric.all_gather(tensor)
        assert torch.equal(gathered[0], gathered[1]), name
    fabric.clip_gradients(model, [of_norm], max_norm=1.0)
    with pytest.raises(RuntimeError, match=r"The norm of all gradients differs between the ranks .*make it a DTensor"):
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
    with pytest.raises(RuntimeError, match=r"^`own.weight` differs between the ranks, and is no DTensor: a checkpoint"):
        fabric.save("never", {"model": model})
    assert list(fabric.state_dict(model.norm)) or not fabric.is_global_zero
    kept = SGD(model.own.parameters(), lr=0.1, momentum=0.9)
    kept = fabric.setup_optimizers(kept)
    model.own.zero_grad()
    model.own.bias.grad = torch.ones(2)
    kept.step()
    kept.state[model.own.bias]["momentum_buffer"].fill_(fabric.global_rank)
    with pytest.raises(RuntimeError, match=r"^`momentum_buffer` in the optimizer's state of its parameter 1 differs"):
        fabric.save("never", {"optimizer": kept})


@pytest.mark.slow
def test_tensors_that_differ_between_ranks_raise_when_saved_or_clipped() -> None:
    manual(average_a_part, 2).launch(keep_apart)


def overflow_in_the_part_of_one_rank(fabric: Fabric) -> None:
    """What overflows on one rank alone skips the step of all, halves the scale of all, and leaves momentum alone."""
    torch.manual_seed(fabric.global_rank)
    model = Apart()
    model, optimizer = fabric.setup(model, SGD(model.parameters(), lr=0.1, momentum=0.9))
    scaler = fabric._connected.runtime.loss_scaler
    assert scaler is not None
    scale = scaler.scale
    moved = []
    for step in range(3):
        before = copies(model, optimizer)
        fabric.backward(model(torch.randn(4, 2)).float().square().mean() / 100)
        assert scaler.scale == (scale / 2 if step == 2 else scale)
        if step == 1 and fabric.global_rank == 1:
            assert model.own.weight.grad is not None
            model.own.weight.grad.fill_(float("inf"))
        optimizer.step()
        optimizer.zero_grad()
        moved.append(any(not torch.equal(*pair) for pair in zip(copies(model, optimizer), before, strict=step > 0)))
    assert moved == [True, False, True]
    assert scaler.num_skipped == 1


def copies(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
    """Weights and momentum."""
    momentum = [state["momentum_buffer"] for state in optimizer.state.values()]
    return [tensor.detach().clone() for tensor in (*model.parameters(), *momentum)]


@pytest.mark.slow
def test_an_overflow_in_the_part_of_one_rank_skips_the_step_on_all() -> None:
    manual(average_a_part, 2, "16-mixed").launch(overflow_in_the_part_of_one_rank)


def as_it_is(model: nn.Module, context: ManualContext) -> nn.Module:
    return model


def shard_wrongly(model: nn.Module, context: ManualContext) -> nn.Module:
    """Every mistake in a verb, told at once; then a parameter whose ranks no axis runs through."""
    weight = model.weight
    for call, sentence in [
        (lambda: context.shard(weight), r"`shard\(axis=None\)`: the mesh has the axes 'a', 'b'\. Name one"),
        (lambda: context.shard(weight, axis="c"), r"`shard\(axis='c'\)`: the mesh has the axes 'a', 'b'\. Name one"),
        (lambda: context.along("a", "c"), r"`along\('a', 'c'\)`: the mesh has the axes 'a', 'b'"),
        (lambda: context.along(), r"`along\(\)`: the mesh has the axes 'a', 'b'"),
    ]:
        with pytest.raises(ValueError, match=sentence):
            call()
    assert context.along("a").size == context.along("b").size == 2
    assert context.along("a", "b") is context.collective
    return model


def make_mistakes(fabric: Fabric) -> None:
    model = fabric.setup(nn.Linear(2, 2))
    with (
        pytest.raises(
            RuntimeError, match=r"`no_backward_sync` of a `Linear` whose gradients are synchronised in a way that only"
        ),
        fabric.no_backward_sync(model),
    ):
        pass


@pytest.mark.slow
def test_mistakes_on_a_mesh_raise_at_once() -> None:
    manual(shard_wrongly, 4, mesh={"a": 2, "b": 2}).launch(make_mistakes)


def read_shares(fabric: Fabric) -> list[int]:
    loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(list(range(8)), batch_size=4))
    return fabric.all_gather(torch.cat(list(loader))).tolist()  # type: ignore[no-any-return]


def test_it_lacks_gathered_gradients_exactly_where_ranks_read_the_same_samples() -> None:
    def lacks(mesh: dict[str, int] | None, data_axes: tuple[str, ...] | None) -> set[str]:
        return set(ManualStrategy(parallelize=as_it_is, mesh=mesh, data_axes=data_axes).lacks) - {"bare_parameters"}

    mesh = {"replicate": 2, "tensor": 2}
    assert lacks(mesh, ("replicate",)) == lacks(mesh, ()) == {"gather_gradients"}
    assert not lacks(mesh, None) | lacks(None, None) | lacks({"replicate": 2, "tensor": 1}, ("replicate",))


@pytest.mark.slow
def test_loaders_are_split_only_along_the_data_axes() -> None:
    mesh = {"replicate": 2, "tensor": 2}
    along_one = manual(as_it_is, 4, mesh=mesh, data_axes=("replicate",)).launch(read_shares)
    assert along_one == [[0, 1, 2, 3], [0, 1, 2, 3], [4, 5, 6, 7], [4, 5, 6, 7]]
    along_all = manual(as_it_is, 4, mesh=mesh).launch(read_shares)
    assert sorted(number for row in along_all or [] for number in row) == list(range(8))


def alone(parallelize: Any, precision: str = "32-true") -> Fabric:
    return Fabric(
        accelerator=ACCELERATOR, devices=1, strategy=ManualStrategy(parallelize=parallelize), precision=precision
    )


def replace_all(model: nn.Module, context: ManualContext) -> nn.Module:
    return nn.Linear(2, 2)


def untie(net: Net, context: ManualContext) -> nn.Module:
    net.out.weight = context.shard(net.out.weight)
    return net


def average_without_modules(model: nn.Module, context: ManualContext) -> Parallelized:
    return Parallelized(module=model, averaged=list(model.parameters()))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("parallelize", "model", "precision", "error", "sentence"),
    [
        (
            lambda model, context: None,
            nn.Linear(2, 2),
            "32-true",
            TypeError,
            r"`parallelize\(.*\)` returned None\. Return",
        ),
        (
            lambda model, context: Parallelized(module=3),
            nn.Linear(2, 2),
            "32-true",
            TypeError,
            r"has a `int`, which is not a module\. Pass",
        ),  # type: ignore[arg-type]
        (
            average_without_modules,
            nn.Linear(2, 2),
            "32-true",
            TypeError,
            r"has a `Parameter`, which is not a module\. Pass",
        ),
        (
            replace_all,
            nn.Linear(2, 2),
            "32-true",
            ValueError,
            r"The `SGD` holds `weight`, which the `Linear` that `para",
        ),
        (
            untie,
            Net(),
            "32-true",
            ValueError,
            r"`embed.weight` and `out.weight` were one tied parameter, and are two now",
        ),
        (
            as_it_is,
            nn.Linear(2, 2),
            "64-true",
            ValueError,
            r"asks for torch.float64, but `weight` came back as torch.fl",
        ),
    ],
)
def test_what_the_function_returns_is_checked(
    parallelize: Any, model: nn.Module, precision: str, error: type[Exception], sentence: str
) -> None:
    with alone(parallelize, precision) as fabric, pytest.raises(error, match=sentence):
        fabric.setup(model, SGD(model.parameters(), lr=0.1))


def test_a_strategy_without_a_function_or_with_unknown_axes_raises_before_anything_starts() -> None:
    with pytest.raises(ValueError, match=r"`strategy='manual'` parallelises the model by a function of yours"):
        Fabric(accelerator=ACCELERATOR, devices=2, strategy="manual")
    with pytest.raises(
        ValueError, match=r"`ManualStrategy\(mesh=\{'a': 3\}\)` makes a mesh of a=3: 3 ranks, but there"
    ):
        manual(as_it_is, 2, mesh={"a": 3})
    with pytest.raises(
        ValueError, match=r"`ManualStrategy\(data_axes=\('b',\)\)` names 'b', but the mesh has the axes 'a'"
    ):
        ManualStrategy(parallelize=as_it_is, mesh={"a": 2}, data_axes=("b",))
    sentence = ManualStrategy(parallelize=as_it_is).refuse(Target(accelerator=TorchAccelerator("mps")))
    assert sentence is not None
    assert "Pass `accelerator='cpu'`" in sentence


def test_one_rank_gets_its_own_objects_back_and_mixed_precision_is_an_autocast_around_forward() -> None:
    net = nn.Linear(2, 2)
    with alone(as_it_is, "bf16-mixed") as fabric:
        assert fabric.setup(net) is net
        outputs = net(torch.ones(1, 2))
        assert outputs.dtype == torch.float32
        assert torch.equal(outputs, outputs.bfloat16().float())
    assert "forward" not in vars(net)


def thaw_a_frozen_shard(fabric: Fabric) -> None:
    torch.manual_seed(0)
    model = Recommender(5, 2).requires_grad_(False)
    plain = Recommender(5, 2)
    plain.load_state_dict(model.state_dict())
    model = fabric.setup(model)
    words, following = torch.randint(5, (2, 8), generator=torch.Generator().manual_seed(0))
    model.words.weight.requires_grad_(True)
    fabric.backward(loss_of(model, *(part.chunk(2)[fabric.global_rank] for part in (words, following))))
    loss_of(plain.requires_grad_(True), words, following).backward()
    close(whole(model.words.weight.grad), plain.words.weight.grad)
    assert model.proposals.weight.grad is None


def close_with_a_reducer(fabric: Fabric) -> None:
    model, _ = fabric.setup(*make(Recipe()))
    fabric.backward(model(batches(Recipe())[0][0]).sum())


@pytest.mark.slow
def test_shards_that_thaw_later_are_averaged() -> None:
    manual(split_tables, 2).launch(thaw_a_frozen_shard)


@pytest.mark.slow
@pytest.mark.thorough
def test_wrapped_models_close_each_time() -> None:
    """Ten ranks close: where the reducer outlives the process group, 1 in 10 hangs."""
    for _ in range(5):
        manual(wrap_everything, 2).launch(close_with_a_reducer)
