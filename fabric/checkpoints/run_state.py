"""The state of a run that `Fabric.save` adds to a checkpoint, and when `Fabric.load` restores it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fabric.checkpoints.loader_positions import LoaderPositions
from fabric.loop.seed import device_rngs
from fabric.loop.setup import SetUp
from fabric.strategies.checkpoint.run_state import RunState
from fabric.strategies.checkpoint.state import is_stateful
from fabric.strategies.checkpoint.values import pointer
from fabric.strategies.data.device_loader import DeviceLoader
from fabric.strategies.data.rng import Rng, process_rngs
from fabric.strategies.runtime import Runtime


def run_state_of(runtime: Runtime, set_up: SetUp, state: Any, reported: set[str]) -> RunState:
    """The state that is added to a checkpoint of `state`; schedulers and loaders that `state` names are saved there
    only, and of optimizers the number of steps of those that it names."""
    objects = dict(_named(state))
    named = {id(each) for each in objects.values()}
    loaders = [loader for each in set_up.loaders if (loader := each()) is not None and id(loader) not in named]
    return RunState(
        generators=partial(generators_of, runtime),
        restore_generators=partial(restore_generators, runtime),
        scalers=set_up.scalers(),
        schedulers=[each for each in set_up.schedulers if id(each) not in named],
        steps={
            name: set_up.steps[each]
            for name, each in objects.items()
            if isinstance(each, Optimizer) and each in set_up.steps
        },
        loaders=LoaderPositions(loaders, runtime.collective, runtime.report, reported),
        rank=runtime.collective.rank,
        gather=runtime.collective.all_gather_object,
        share=(runtime.share.index, runtime.share.count),
        report=runtime.report,
    )


def is_run(state: Any) -> bool:
    """Whether `state` resumes a run: it has an optimizer or a prepared loader."""
    return any(isinstance(each, (Optimizer, DeviceLoader)) for _, each in _named(state))


def has_objects(state: Any) -> bool:
    """Whether `state` has more than plain values."""
    return any(isinstance(each, nn.Module) or is_stateful(each) for _, each in _named(state))


def _named(state: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    """All objects of `state`, also those in nested dictionaries and lists, each with its JSON pointer."""
    if isinstance(state, (dict, list, tuple)):
        for key, entry in state.items() if isinstance(state, dict) else enumerate(state):
            yield from _named(entry, pointer(at, key))
    else:
        yield at, state


def generators_of(runtime: Runtime) -> dict[str, Any]:
    """The states of this rank's random generators, by name."""
    return {name: rng.read() for name, rng in _rngs(runtime).items()}


def restore_generators(runtime: Runtime, states: dict[str, Any]) -> None:
    """Restore what `generators_of` returned; generators that it did not have stay as they are."""
    for name, rng in _rngs(runtime).items():
        if name in states:
            state = states[name]
            rng.write(state.cpu() if isinstance(state, torch.Tensor) else state)


def _rngs(runtime: Runtime) -> dict[str, Rng]:
    named = dict(zip(("torch", "python", "numpy"), process_rngs(), strict=False))
    return named | {f"{runtime.device.type} {number}": rng for number, rng in enumerate(device_rngs(runtime.devices))}
