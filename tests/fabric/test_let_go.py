"""What the program lets go of is freed: folds and sweeps on one `Fabric` have the memory of one model."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from devices import ACCELERATOR
from torch import nn
from torch.utils.data import DataLoader

from fabric import Fabric
from fabric.strategies import ManualStrategy, ModelParallelStrategy
from fabric.strategies.manual.strategy import Parallelized

Refs = dict[str, weakref.ref[Any]]


def replicate(module: nn.Module, context: Any) -> Parallelized:
    return Parallelized(module=module, averaged=module)


def as_it_is(module: nn.Module, mesh: Any) -> nn.Module:
    return module


def made(fabric: Fabric) -> tuple[nn.Module, Any]:
    """A model, and an optimizer of it, that were set up."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    return fabric.setup(model, torch.optim.AdamW(model.parameters(), foreach=False))  # type: ignore[no-any-return]


def fold(fabric: Fabric, num_steps: int = 4) -> tuple[nn.Module, Refs]:
    """Train a model with all that a loop uses. Returns it, and weak references to what was set up."""
    model, optimizer = made(fabric)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    loader = fabric.setup_dataloaders(DataLoader(torch.randn(4 * num_steps, 8), batch_size=2))
    for x in loader:
        fabric.backward(model(x).square().mean())
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    weight = next(model.parameters())
    objects = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader, "weight": weight}
    return model, {name: weakref.ref(each) for name, each in objects.items()}


def alive(refs: Refs) -> list[str]:
    for _ in range(2):  # an engine holds its parameters from C++, until it is collected
        gc.collect()
    return [name for name, each in refs.items() if each() is not None]


def two_folds(fabric: Fabric, sets_up_again: bool) -> tuple[list[str], list[str], int]:
    """What is alive of a fold after it, and of an optimizer whose model is kept."""
    refs = fold(fabric)[1]
    if sets_up_again:
        made(fabric)
    dropped = alive(refs)
    model, refs = fold(fabric)
    kept = alive(refs)
    del model
    return dropped, kept, fabric.num_steps


STRATEGIES = {
    "single_device": 1,
    "ddp": 2,
    "fsdp": 2,
    "model_parallel": 2,
    "manual": 2,
    "ddp_sharded": 2,
    "ddp_fully_sharded": 2,
    "deepspeed_stage_1": 2,
    "deepspeed_stage_2": 2,
    "deepspeed_stage_3": 2,
}
SLOW = ("ddp_sharded", "ddp_fully_sharded", "deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3")


@pytest.mark.parametrize(
    ("strategy", "size"),
    [pytest.param(*each, marks=[pytest.mark.slow] * (each[0] in SLOW)) for each in STRATEGIES.items()],
)
def test_models_optimizers_schedulers_and_loaders_are_freed_once_the_program_has_dropped_them(
    strategy: Any, size: int
) -> None:
    chosen: Any = {
        "manual": ManualStrategy(parallelize=replicate),
        "model_parallel": ModelParallelStrategy(parallelize_fn=as_it_is, data=size),
    }.get(strategy, strategy)
    ranks = Fabric(accelerator=ACCELERATOR, devices=size, strategy=chosen, launcher="forkserver", sanitize=False)
    dropped, kept, num_steps = ranks.launch(two_folds, strategy == "deepspeed_stage_3")
    assert dropped == []
    engine = ["optimizer"] if strategy == "ddp_sharded" or strategy.startswith("deepspeed") else []
    assert kept == ["model", *engine, "weight"]
    assert num_steps == 8 // size


def folds(fabric: Fabric) -> list[list[str]]:
    """What is alive of each fold once the next one was trained; ranks collect at different times."""
    gc.disable()
    left, before = [], None
    for _ in range(3):
        refs = fold(fabric, num_steps=3)[1]
        if fabric.global_rank == 0:
            gc.collect()
        left.append([] if before is None else alive(before))
        before = refs
    return left


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_the_sanitizer_compares_folds_of_which_one_rank_has_freed_more_than_another(strategy: str) -> None:
    ranks = Fabric(accelerator=ACCELERATOR, devices=2, strategy=strategy, launcher="forkserver", sanitize="always")
    assert ranks.launch(folds) == [[], [], []]


def apart(fabric: Fabric) -> None:
    """One rank keeps a model that the other drops, and weights of another model differ between ranks."""
    model, _ = fold(fabric)
    if fabric.global_rank == 1:
        del model
        gc.collect()
    other, optimizer = made(fabric)
    for number in range(2):
        fabric.backward(other(torch.ones(2, 8)).sum())
        optimizer.step()
        if number == 0 and fabric.global_rank == 1:
            next(other.parameters()).data.add_(1)


def test_the_sanitizer_finds_weights_that_differ_where_one_rank_alone_has_freed_a_model() -> None:
    ranks = Fabric(accelerator=ACCELERATOR, devices=2, strategy="ddp", launcher="forkserver", sanitize="always")
    with pytest.raises(Exception, match=r"`0\.weight` on rank 1 differs from that on rank 0"):
        ranks.launch(apart)


def drop_engines(fabric: Fabric) -> int:
    """A loss that names no model: the first engine is gone, although the collector has not run."""
    fold(fabric)
    gc.disable()
    model, optimizer = made(fabric)
    fabric.backward(model(torch.ones(2, 8)).sum(), weight=2)
    optimizer.step()
    return fabric.num_steps


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("deepspeed_stage_1", marks=pytest.mark.slow)])
def test_a_weight_needs_no_name_of_the_model_once_the_others_are_dropped(strategy: str) -> None:
    ranks = Fabric(accelerator=ACCELERATOR, devices=2, strategy=strategy, launcher="forkserver")
    assert ranks.launch(drop_engines) == 4
