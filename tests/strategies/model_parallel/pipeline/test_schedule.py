"""A model in stages trains as one process does, by every schedule, and goes to plain checkpoints and back."""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from devices import ACCELERATOR
from pipelining import (
    TINY,
    Net,
    Plain,
    Recipe,
    Run,
    batches,
    cut_layers,
    fabric_with,
    loss_of,
    make,
    pipeline,
    shard_blocks,
    shard_only_blocks,
    tiny_loss_of,
    train_all,
    train_plain,
)
from torch import Tensor, nn

from fabric import Fabric, WorkerError
from fabric.strategies import DDPStrategy, ModelParallelStrategy

SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS")
FIRST = (("1F1B", 2), ("Interleaved1F1B", 2))
"""One of each kind: a stage, or two, on each rank. The others are left to `make check`."""


def close(actual: Any, expected: Any, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def same(run: Run | None, expected: Run) -> None:
    assert run is not None
    close((run.losses, run.norms), (expected.losses, expected.norms))
    close(run.weights, dict(expected.weights))
    close(run.evaluated, expected.evaluated)
    assert run.optimizer["param_groups"] == expected.optimizer["param_groups"]
    close(run.optimizer["state"], expected.optimizer["state"])


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As in the ranks; with more, small tensors wait for threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "size"),
    [
        pytest.param(*each, marks=[] if each in FIRST else [pytest.mark.thorough])
        for each in (*product(SCHEDULES, (2, 4)), ("1F1B", 1))
    ],
)
def test_losses_norms_weights_moments_and_outputs_equal_those_of_one_process(
    schedule: str, size: int, tmp_path: Path
) -> None:
    options = pipeline(schedule, size, 8)
    seed = random.randrange(2**31)
    recipes = [
        Recipe(seed, accumulate=2, clip={"max_norm": 0.1}),
        Recipe(seed, optimizer="adamw", clip={"clip_val": 0.01}, masked=True),
        Recipe(seed, accumulate=3, repeated=True),
        Recipe(seed + 1, clip={"max_norm": 0.05, "norm_type": float("inf")}, frozen=True),
    ]
    num_samples = 8 * recipes[0].sizes[0]
    print(f"seed {seed}, {num_samples} samples")
    runs = fabric_with(size, options).launch(train_all, recipes, num_samples, 1, str(tmp_path))
    assert runs is not None
    for recipe, run in zip(recipes, runs, strict=True):
        same(run, train_plain(recipe, num_samples, options.num_stages))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "others"),
    [
        ("1F1B", {"data": 2}),
        pytest.param("Interleaved1F1B", {"shard": 2, "parallelize_fn": shard_blocks}, marks=pytest.mark.thorough),
        pytest.param("GPipe", {"shard": 2, "parallelize_fn": shard_only_blocks}, marks=pytest.mark.thorough),
        pytest.param("LoopedBFS", {"tensor": 2, "parallelize_fn": cut_layers}, marks=pytest.mark.thorough),
    ],
    ids=["replicas", "shards", "shards-of-blocks", "tensors"],
)
def test_stages_in_replicas_in_shards_and_cut_along_tensors_train_as_one_process(
    schedule: str, others: dict[str, Any], tmp_path: Path
) -> None:
    options = pipeline(schedule, 2, 4)
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    recipes = [
        Recipe(seed, accumulate=2, clip={"max_norm": 0.1}),
        Recipe(seed + 1, optimizer="adamw", masked=True, clip={"clip_val": 0.01}),
        Recipe(seed + 1, accumulate=3, repeated=True),
    ]
    shares = 1 if "tensor" in others else 2
    strategy = ModelParallelStrategy(pipeline=options, **others)
    runs = fabric_with(4, strategy).launch(train_all, recipes, 8, shares, str(tmp_path))
    assert runs is not None
    for recipe, run in zip(recipes, runs, strict=True):
        same(run, train_plain(recipe, 8, options.num_stages))


PADDING = 0


def summed_loss_of(outputs: Tensor, target: Tensor) -> Tensor:
    """Over the tokens that are no padding. Micro-batches, and ranks, have different numbers of them."""
    return nn.functional.cross_entropy(outputs.flatten(0, 1), target.flatten(), ignore_index=PADDING, reduction="sum")


def padded_batches(recipe: Recipe, part: int = 0, shares: int = 1) -> list[tuple[Tensor, Tensor]]:
    """This rank's part of every batch; the last samples are shorter."""
    several = []
    for tokens, targets, _ in batches(recipe, 16):
        length = targets.shape[1]
        kept = torch.arange(length) < torch.linspace(length, 1, len(targets)).unsqueeze(1)
        several.append((tokens.chunk(shares)[part], targets.where(kept, PADDING).chunk(shares)[part]))
    return several


def train_on_sums(fabric: Fabric, recipe: Recipe, shares: int) -> Any:
    """Losses of training and of evaluation, and weights, where the loop divides by the number of tokens."""
    net = Net()
    model, optimizer = fabric.setup(net, make(recipe, net))
    found = []
    for tokens, targets in fabric.to_device(padded_batches(recipe, fabric.global_rank % shares, shares)):
        num_tokens = fabric.all_reduce((targets != PADDING).sum()).item()  # the mean over ranks
        with torch.no_grad():
            evaluated = model(tokens, targets)
        loss = model(tokens, targets)
        fabric.backward(loss / num_tokens)
        found += [fabric.all_reduce(each.detach()).item() * shares for each in (evaluated, loss)]
        optimizer.step()
        optimizer.zero_grad()
    return found, fabric.state_dict(model, all_ranks=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "degree", "size"),
    [
        ("GPipe", 2, 2),
        pytest.param("1F1B", 4, 4, marks=pytest.mark.thorough),
        pytest.param("Interleaved1F1B", 2, 2, marks=pytest.mark.thorough),
    ],
)
def test_losses_that_are_sums_equal_those_of_one_process(schedule: str, degree: int, size: int) -> None:
    recipe = Recipe(random.randrange(2**31))
    print(recipe)
    options = pipeline(schedule, degree, 8, loss_fn=summed_loss_of, loss_reduction="sum")
    shares = size // degree
    found = fabric_with(size, ModelParallelStrategy(pipeline=options, data=shares)).launch(
        train_on_sums, recipe, shares
    )
    plain = Plain(options.num_stages)
    optimizer = make(recipe, plain.net)
    plain.double()
    losses = []
    for tokens, targets in padded_batches(recipe):
        loss = summed_loss_of(plain(tokens), targets)
        (loss / (targets != PADDING).sum()).backward()
        losses += [loss.item()] * 2
        optimizer.step()
        optimizer.zero_grad()
    close(found, (losses, dict(plain.net.state_dict())))


def pass_on(fabric: Fabric, source: str, target: str) -> None:
    """Load and save again."""
    net = Net()
    state = dict(
        zip(("model", "optimizer"), fabric.setup(net, make(Recipe(seed=0, optimizer="adamw"), net)), strict=True)
    )
    fabric.load(source, state)
    fabric.save(target, state)


@pytest.mark.thorough
@pytest.mark.slow
def test_a_checkpoint_goes_between_stages_of_every_kind_replicas_and_plain_torch(tmp_path: Path) -> None:
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    recipe = Recipe(seed, optimizer="adamw")
    folders = [tmp_path / name for name in ("first", "second", "third")]
    for folder in folders:
        folder.mkdir()
    saved = [f"{folder}/adamw-{seed}" for folder in folders]
    given = str(tmp_path / "given")
    fabric_with(2, pipeline("LoopedBFS", 2, 4)).launch(train_all, [recipe], 8, 1, str(folders[0]))
    fabric_with(2, DDPStrategy()).launch(pass_on, saved[0], given)
    sharded = ModelParallelStrategy(pipeline=pipeline("Interleaved1F1B", 2), shard=2, parallelize_fn=shard_blocks)
    fabric_with(4, sharded).launch(train_all, [recipe], 8, 2, str(folders[1]), given)
    runs = fabric_with(4, pipeline("GPipe", 4)).launch(train_all, [recipe], 8, 1, str(folders[2]), saved[1])
    assert runs is not None
    assert [len(list(Path(path).glob("*.bin"))) for path in saved] == [2, 4, 4]  # each rank has written its part
    plain = None  # three times the same, each from where the one before ended; all have four stages
    for _ in folders:
        expected = train_plain(recipe, 8, 4, plain)
        plain = str(tmp_path / "plain")
        torch.save({"model": expected.weights, "optimizer": expected.optimizer}, plain)
    same(runs[0], expected)


def look_at_objects(fabric: Fabric, path: str) -> None:
    """What `setup` does to the user's objects. Ranks start from different weights: rank 0's are taken."""
    rank = fabric.global_rank
    net = Net()
    given = make(Recipe(seed=rank), net)
    names, norm = list(net.state_dict()), net.blocks["0"].norm
    model, optimizer = fabric.setup(net, given)
    assert (model, optimizer) == (net, given)
    first = Net()
    make(Recipe(seed=0), first)
    first.to(ACCELERATOR)
    mine = {name for name, _ in model.named_parameters()}
    assert mine == {name for name, _ in first.named_parameters() if _stage_of(name) == rank}
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, first.get_parameter(name))
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert {id(parameter) for parameter in held} == {id(parameter) for parameter in model.parameters()}
    assert [group["lr"] for group in optimizer.param_groups] == [0.02, 0.1]
    assert model.blocks["0"].norm is norm
    seen: list[int] = []
    block = model.blocks[str(rank * 4)]
    block.register_forward_hook(lambda *_: seen.append(block.training))
    tokens = torch.randint(11, (8, 4), generator=torch.Generator().manual_seed(3)).to(ACCELERATOR)
    model.eval()
    with torch.no_grad():
        outputs = model(tokens)
        assert seen == [False] * len(seen) != []
        assert model(tokens[:3]).shape == (3, 4, 11)  # which four micro-batches do not divide
        torch.testing.assert_close(model(tokens, tokens), loss_of(outputs, tokens))
    assert all(torch.equal(each, outputs) for each in fabric.all_gather(outputs))
    model.train()
    loss = model(tokens, target=tokens)
    assert loss.dtype == torch.float32
    assert seen[-1] is True
    fabric.backward(2 * loss + model(tokens[:4], tokens[:4]))  # two losses of other shapes in one backward
    expected = Plain(2)
    make(Recipe(seed=0), expected.net)
    expected.to(ACCELERATOR)
    (2 * expected(tokens, tokens) + expected(tokens[:4], tokens[:4])).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected.net.get_parameter(name).grad)
    loss = model(tokens, tokens)
    fabric.backward(loss, retain_graph=True)
    with pytest.raises(RuntimeError, match="A second backward through the loss of a pipeline"):
        fabric.backward(loss)
    fabric.save(path, {"model": model, "part": model.blocks})
    whole = fabric.load(path)
    assert list(whole["model"]) == names
    assert list(whole["part"]) == [name[7:] for name in names if name.startswith("blocks.")]
    fabric.close()
    assert "forward" not in vars(model)


def _stage_of(name: str) -> int:
    if name.startswith("blocks."):
        return int(name.split(".")[1]) // 4
    return int(name.startswith(("norm", "head")))


@pytest.mark.slow
def test_the_users_own_objects_go_on_with_what_is_on_their_rank(tmp_path: Path) -> None:
    fabric_with(2, pipeline(), "32-true").launch(look_at_objects, str(tmp_path / "saved"))


class Doubling(nn.Module):
    """Gives twice its outputs in evaluation; in two stages, each does."""

    def __init__(self) -> None:
        super().__init__()
        self.first: nn.Module | None = nn.Linear(3, 3)
        self.second: nn.Module | None = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        for part in (self.first, self.second):
            x = x if part is None else part(x)
        return x if self.training else 2 * x


def one_layer_each(model: Doubling, stage: int, num_stages: int) -> Doubling:
    if stage == 0:
        model.second = None
    else:
        model.first = None
    return model


def squares_of(outputs: Tensor, target: Tensor) -> Tensor:
    return (outputs - target).square().mean()


def change_the_mode(fabric: Fabric) -> None:
    torch.manual_seed(0)
    net = Doubling()
    assert net.first is not None
    assert net.second is not None
    x, y = torch.randn(2, 8, 3).to(ACCELERATOR)
    copies = copy.deepcopy([net.first, net.second])
    weights = [(part.weight.detach(), part.bias.detach()) for part in nn.ModuleList(copies).to(ACCELERATOR)]
    (first, of_first), (second, of_second) = weights
    model = fabric.setup(net)
    with torch.no_grad():
        trained = model(x)
        evaluated = model.eval()(x)
    hidden = x @ first.T + of_first
    torch.testing.assert_close(trained, hidden @ second.T + of_second)
    torch.testing.assert_close(evaluated, 2 * (2 * hidden @ second.T + of_second))
    torch.testing.assert_close(model.train()(x, target=y), squares_of(trained, y))


@pytest.mark.slow
def test_a_stage_follows_the_mode_of_the_model() -> None:
    options = pipeline(split=one_layer_each, loss_fn=squares_of)
    fabric_with(2, options, "32-true").launch(change_the_mode)


def train_in_half(fabric: Fabric) -> list[float]:
    """Losses and the norm of gradients, under a precision of its own; small gradients must not vanish."""
    net = Net()
    model, optimizer = fabric.setup(net, make(Recipe(seed=4), net))
    tokens = torch.randint(11, (8, 4), generator=torch.Generator().manual_seed(3)).to(ACCELERATOR)
    found = []
    for _ in range(2):
        loss = model(tokens, tokens)
        fabric.backward(loss)
        norm = fabric.clip_gradients(model, optimizer, max_norm=1.0)
        assert norm is not None
        found += [loss.item() / TINY, norm.item() / TINY]
        optimizer.step()
        optimizer.zero_grad()
    return found


@functools.cache
def in_precision(precision: str) -> list[float] | None:
    return fabric_with(2, pipeline(loss_fn=tiny_loss_of), precision).launch(train_in_half)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_mixed_precision_gives_the_numbers_of_full_precision_but_for_rounding(precision: str) -> None:
    full, found = in_precision("32-true"), in_precision(precision)
    assert found != full
    close(found, full, 5e-2)


def fill_what_was_empty(fabric: Fabric, path: str) -> None:
    """A model made on the meta device has on each rank what a checkpoint has, and no rank ever had the rest."""
    with fabric.init_module(empty_init=True):
        net = Net()
        assert all(parameter.is_meta for parameter in net.parameters())
    model = fabric.setup(net)
    tokens = torch.randint(11, (4, 4), generator=torch.Generator().manual_seed(3)).to(ACCELERATOR)
    fabric.load_raw(path, model)
    plain = Plain(2)
    plain.net.load_state_dict(torch.load(path))
    plain.to(ACCELERATOR)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), plain(tokens))


@pytest.mark.slow
def test_a_model_made_on_the_meta_device_is_filled_from_a_checkpoint(tmp_path: Path) -> None:
    net = Net()
    make(Recipe(seed=1), net)
    torch.save(net.state_dict(), tmp_path / "net")
    fabric_with(2, pipeline(), "32-true").launch(fill_what_was_empty, str(tmp_path / "net"))


def fail_in_a_stage(fabric: Fabric) -> None:
    """One stage raises while the other waits for its gradients."""
    net = Net()
    model = fabric.setup(net)
    if fabric.global_rank == 1:
        model.blocks["6"].forward = _boom
    tokens = torch.randint(11, (8, 4)).to(ACCELERATOR)
    model(tokens, tokens)


def _boom(*args: Any, **kwargs: Any) -> None:
    raise ZeroDivisionError("boom in the second stage")


@pytest.mark.slow
def test_a_rank_that_raises_in_its_stage_ends_the_job_with_its_own_error() -> None:
    with pytest.raises(WorkerError, match="rank 1 of 2 failed first") as caught:
        fabric_with(2, pipeline(), "32-true").launch(fail_in_a_stage)
    assert str(caught.value).strip().endswith("ZeroDivisionError: boom in the second stage")
