"""What one strategy saved any other loads, with another number of ranks, and goes on as the run that was saved."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import safetensors.torch
import torch
from devices import ACCELERATOR
from resumed_runs import go_on, load, save, trial_of
from rows import averaged, in_both
from torch import nn
from worlds import launch_each

from fabric import Fabric, consolidate, read_checkpoint
from fabric.strategies import ManualContext, ManualStrategy, ModelParallelStrategy, Parallelized, Strategy
from fabric.strategies.precision.precision import Precision
from fabric.strategies.strategy_registry import make_strategy
from fabric.testing.plain import plain


def some_sharded(model: nn.Module, context: ManualContext) -> Parallelized:
    """Blocks in shards, the rest in replicas."""
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=context.mesh)
    return Parallelized(module=model, averaged=model)


def over_a_mesh(size: int) -> Strategy:
    tensor = min(size, 2)
    return ModelParallelStrategy(parallelize_fn=in_both, shard=size // tensor, tensor=tensor)


REGISTERED = ("single_device", "ddp", "fsdp", "hsdp", "ddp_sharded", "ddp_fully_sharded") + tuple(
    f"deepspeed_stage_{stage}" for stage in (1, 2, 3)
)
MAKE: dict[str, Callable[[int], Strategy]] = {
    **{name: lambda size, name=name: make_strategy(name) for name in REGISTERED},  # type: ignore[misc]
    "model_parallel": over_a_mesh,
    "manual": lambda size: ManualStrategy(parallelize=averaged),
    "manual_sharded": lambda size: ManualStrategy(parallelize=some_sharded),
}
SIZES = dict.fromkeys(MAKE, (1, 2, 4)) | {"single_device": (1,), "hsdp": (2, 4)}
"""With how many ranks each strategy saves and loads."""
ALL = [(name, size) for name, sizes in SIZES.items() for size in sizes]

CHAIN = {"single_device": 1, "ddp_sharded": 2, "hsdp": 4, "ddp_fully_sharded": 2} | {
    "deepspeed_stage_1": 1,
    "deepspeed_stage_2": 2,
    "model_parallel": 4,
    "deepspeed_stage_3": 2,
    "ddp": 1,
    "fsdp": 2,
    "manual_sharded": 4,
}
"""Strategies, and with how many ranks, of the test that is not thorough: each loads what the one before it saved, and
the first what the last did. Two neighbours never have the same number."""
BEFORE = dict(zip(CHAIN, [*CHAIN][-1:] + [*CHAIN][:-1], strict=True))


def launch(name: str, size: int, function: Callable[..., None], *args: object) -> None:
    Fabric(accelerator=ACCELERATOR, strategy=MAKE[name](size), devices=size).launch(function, *args)


def check_parts(folder: Path, name: str, size: int) -> None:
    """Each rank has written a part. The last of four may have none: of 5, 6 or 9 rows, as drawn weights have."""
    num_parts = len(list(folder.glob("*.bin")))
    assert num_parts in (size, size - (size == 4)), f"under {name} {num_parts} of {size} ranks have written a part"


@pytest.fixture(scope="module")
def seed() -> int:
    return random.randrange(2**31)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_checkpoint_of_any_strategy_resumes_under_another_and_with_another_number_of_ranks(
    tmp_path: Path, seed: int
) -> None:
    """Each strategy saves, and loads the checkpoint of one other. All of them: see below. Those of as many ranks run in
    the same ones: they save, and load what is there; the others load once all have saved."""
    print(f"seed {seed}")
    saved, left = set[str](), set(CHAIN)
    for size in (1, 2, 4, 2, 1):
        names = [name for name, of_name in CHAIN.items() if of_name == size]
        saving = [name for name in names if name not in saved]
        saved.update(saving)
        loading = [name for name in names if name in left and BEFORE[name] in saved]
        left.difference_update(loading)
        calls = [(MAKE[name](size), save, str(tmp_path / name), seed) for name in saving]
        calls += [(MAKE[name](size), load, [str(tmp_path / BEFORE[name])], seed) for name in loading]
        launch_each(size, call, calls)
        for name in saving:
            check_parts(tmp_path / name, name, size)
            (exported,) = consolidate(tmp_path / name, tmp_path / f"{name}.safetensors")
            expected = read_checkpoint(tmp_path / name, ["model"])["model"]
            model = safetensors.torch.load_file(exported)
            tied = expected.keys() - model.keys()
            assert len(tied) == 1, f"under {name} {tied} are the names that were left out"
            torch.testing.assert_close(model, {key: expected[key] for key in model}, rtol=0, atol=0)
    assert saved == set(CHAIN)
    assert not left


def call(fabric: Fabric, function: Callable[..., None], *args: object) -> None:
    function(fabric, *args)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, seed: int) -> list[str]:
    """A checkpoint of each strategy with each number of ranks, and the losses of the run that went on."""
    folder, paths = tmp_path_factory.mktemp("matrix"), []
    for name, size in ALL:
        paths.append(str(folder / f"{name}-{size}"))
        launch(name, size, save, paths[-1], seed)
        check_parts(Path(paths[-1]), name, size)
    return paths


@pytest.mark.slow
@pytest.mark.thorough  # the test above has each strategy once
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("name", "size"), ALL)
def test_every_checkpoint_goes_on_under_this_strategy_with_this_number_of_ranks(
    saved: list[str], seed: int, name: str, size: int
) -> None:
    print(f"seed {seed}")
    launch(name, size, load, saved, seed)


@pytest.mark.slow
def test_the_losses_of_the_runs_are_those_of_plain_pytorch(tmp_path: Path, seed: int) -> None:
    """What all others are compared with."""
    launch("single_device", 1, save, str(tmp_path / "saved"), seed)
    launch("single_device", 1, load_as_plain, str(tmp_path / "saved"), seed)


def load_as_plain(fabric: Fabric, path: str, seed: int) -> None:
    body = partial(go_on, trial=trial_of(fabric, seed).in_one_process(), path=path)
    losses = plain(body, Precision.parse("32-true"), fabric.device)
    torch.testing.assert_close(losses, json.loads(Path(f"{path}.json").read_text()), rtol=1e-5, atol=1e-5)
