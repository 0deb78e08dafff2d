"""Runs that save a checkpoint and go on, and runs that load it: with the same losses under every strategy.

`save` and `load` are called on every rank; a test launches them with the strategies that it compares.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer

from fabric import Fabric, read_checkpoint
from fabric.testing.checks import draw
from fabric.testing.drawn import Trial
from fabric.testing.plain import Loop
from fabric.testing.run import mean

NUM_STEPS = 2
"""Before the checkpoint, and again after it: the last loss is that of weights which loaded states have stepped."""
STEP_SIZE = 8
"""Samples of a step over all ranks: as many with 1, 2 and 4 ranks, so that all runs have the same losses."""


def trial_of(fabric: Fabric, seed: int) -> Trial:
    trial = draw(fabric, seed)
    return replace(trial, step_size=STEP_SIZE, batch_size=STEP_SIZE // trial.num_shares)


def made(loop: Loop, trial: Trial, name: str) -> tuple[nn.Module, Optimizer]:
    net = trial.net(name, tied=True, frozen=True)
    return loop.setup(net, trial.optimizer(net, "adamw"))


def losses_of(loop: Loop, trial: Trial, model: nn.Module, optimizer: Optimizer, batches: Iterator[Any]) -> list[float]:
    """The losses of the next steps."""
    losses = []
    for tokens, targets, _ in islice(batches, NUM_STEPS):
        loss = cross_entropy(model(tokens).to(trial.dtype), targets)
        loop.backward(loss, model=model)
        losses.append(mean(loop, loss))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def save(fabric: Fabric, path: str, seed: int) -> None:
    """A run that saves a checkpoint, and goes on."""
    trial = trial_of(fabric, seed)
    model, optimizer = made(fabric, trial, "net")
    batches = iter(fabric.setup_dataloaders(trial.loader(2 * NUM_STEPS)))
    losses_of(fabric, trial, model, optimizer, batches)
    fabric.save(path, {"model": model, "optimizer": optimizer})
    losses = losses_of(fabric, trial, model, optimizer, batches)
    if fabric.is_global_zero:
        Path(f"{path}.json").write_text(json.dumps(losses))


def go_on(loop: Loop, trial: Trial, path: str) -> list[float]:
    """A run that goes on from a checkpoint, in the middle of an epoch."""
    model, optimizer = made(loop, trial, "another")
    loader = loop.setup_dataloaders(trial.loader(2 * NUM_STEPS))
    loop.load(path, {"model": model, "optimizer": optimizer})
    loaded = loop.state_dict(model, optimizer)
    if loop.is_global_zero:
        saved = read_checkpoint(path)
        for found, expected in zip(loaded, (saved["model"], saved["optimizer"]), strict=True):
            refuse_difference(found, expected, path)
    batches = iter(loader)
    if isinstance(loop, Fabric):
        assert loop._connected.objects.optimizers[optimizer].num_steps == NUM_STEPS
    else:  # plain PyTorch has no position
        for _ in islice(batches, NUM_STEPS):
            pass
    return losses_of(loop, trial, model, optimizer, batches)


def refuse_difference(found: Any, expected: Any, at: str) -> None:
    """Raise AssertionError unless two states are the same, bit for bit."""
    assert type(found) is type(expected), (at, type(found), type(expected))
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), (at, list(found), list(expected))
        assert getattr(found, "_metadata", None) == getattr(expected, "_metadata", None), at
        for key in expected:
            refuse_difference(found[key], expected[key], f"{at}/{key}")
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), at
        for number, (mine, other) in enumerate(zip(found, expected, strict=True)):
            refuse_difference(mine, other, f"{at}/{number}")
    elif isinstance(expected, Tensor):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), at
        assert torch.equal(found, expected), at
    else:
        assert found == expected, (at, found, expected)


def load(fabric: Fabric, paths: list[str], seed: int) -> None:
    trial, wrong = trial_of(fabric, seed), []
    for path in paths:
        losses = go_on(fabric, trial, path)
        if fabric.is_global_zero:
            expected = json.loads(Path(f"{path}.json").read_text())
            if not torch.allclose(torch.tensor(losses), torch.tensor(expected), rtol=1e-5, atol=1e-5):
                wrong.append(f"{path}: {losses}, and {expected} of the run that went on")
    assert not wrong, "\n".join(wrong)
