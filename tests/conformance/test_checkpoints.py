"""What one strategy saved any other loads, with another number of ranks, and goes on as plain PyTorch does from it."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import safetensors.torch
import torch
from rows import in_both

from fabric import Fabric, consolidate, read_checkpoint
from fabric.strategies import ModelParallelStrategy, Strategy
from fabric.strategies.precision.precision import Precision
from fabric.strategies.registry import make_strategy
from fabric.testing.checks import draw, named
from fabric.testing.drawn import Trial
from fabric.testing.loops import Outcome, finished, steps
from fabric.testing.plain import Loop, plain

MAKE: dict[str, Callable[[], Strategy]] = {
    **{
        name: partial(make_strategy, name)
        for name in ("single_device", "ddp", "fsdp", "ddp_sharded", "ddp_fully_sharded")
    },
    **{name: partial(make_strategy, name) for name in ("deepspeed_stage_2", "deepspeed_stage_3")},
    "model_parallel": partial(ModelParallelStrategy, parallelize_fn=in_both, shard=2, tensor=2),
}
SAVED_BY = {"single_device": 1, "ddp": 2, "fsdp": 4, "ddp_sharded": 2, "ddp_fully_sharded": 4} | {
    "deepspeed_stage_2": 4,
    "deepspeed_stage_3": 2,
    "model_parallel": 4,
}
LOADED_BY = {"single_device": 1, "ddp": 4, "fsdp": 2, "ddp_sharded": 4, "ddp_fully_sharded": 2} | {
    "deepspeed_stage_2": 2,
    "deepspeed_stage_3": 4,
    "model_parallel": 4,
}
"""Strategies, and with how many ranks."""


def launch(name: str, size: int, function: Callable[..., None], *args: object) -> None:
    Fabric(accelerator="cpu", strategy=MAKE[name](), devices=size).launch(function, *args)


def save(fabric: Fabric, path: str, seed: int) -> None:
    trial = draw(fabric, seed)
    net = trial.net(tied=True, frozen=True)
    model, optimizer = fabric.setup(net, trial.optimizer(net, "adamw"))
    steps(fabric, trial, model, optimizer)
    fabric.save(path, {"model": model, "optimizer": optimizer})


def go_on(loop: Loop, trial: Trial, path: str) -> Outcome:
    net = trial.net("another", tied=True, frozen=True)
    model, optimizer = loop.setup(net, trial.optimizer(net, "adamw"))
    loop.load(path, {"model": model, "optimizer": optimizer})
    losses = steps(loop, trial, model, optimizer)
    return finished(loop, trial, {"model": model}, {"optimizer": optimizer}, losses)


def load(fabric: Fabric, paths: list[str], seed: int) -> None:
    trial = draw(fabric, seed)
    for path in paths:
        found = go_on(fabric, trial, path)
        if fabric.is_global_zero:
            body = partial(go_on, trial=trial.in_one_process(), path=path)
            expected = plain(body, Precision.parse("32-true"), fabric.device)
            torch.testing.assert_close(
                named(found), named(expected), rtol=1e-5, atol=1e-5, msg=lambda words, path=path: f"{path}: {words}"
            )


EVERY = len(SAVED_BY)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "num_checkpoints",
    [3, pytest.param(EVERY, marks=pytest.mark.thorough)],
    ids=["three of the others", "all"],
)
def test_a_checkpoint_of_any_strategy_resumes_under_others_and_with_other_numbers_of_ranks(
    num_checkpoints: int, tmp_path: Path
) -> None:
    """The format is one, so `make test` loads under each strategy what three others have saved, and each checkpoint
    under three strategies."""
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    for name, size in SAVED_BY.items():
        launch(name, size, save, str(tmp_path / name), seed)
        assert len(list((tmp_path / name).glob("*.bin"))) == size, f"under {name} not every rank has written a part"
        (exported,) = consolidate(tmp_path / name, tmp_path / f"{name}.safetensors")
        expected = read_checkpoint(tmp_path / name, ["model"])["model"]
        model = safetensors.torch.load_file(exported)
        tied = expected.keys() - model.keys()
        assert len(tied) == 1, f"under {name} {tied} are the names that were left out"
        torch.testing.assert_close(model, {key: expected[key] for key in model}, rtol=0, atol=0)
    savers = [str(tmp_path / name) for name in SAVED_BY]
    for place, (name, size) in enumerate(LOADED_BY.items(), start=1):
        others = [savers[(place + 3 * number) % EVERY] for number in range(num_checkpoints)]
        launch(name, size, load, others, seed)
