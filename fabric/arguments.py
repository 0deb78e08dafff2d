"""What the methods of `Fabric` are given: errors at the call that got a wrong argument, before anything has happened.

Only what Python or torch would take for something else, or name by a line of ours, is looked at.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

from torch import nn
from torch.optim import Optimizer

from fabric.strategies.checkpoint.run_state import NAME
from fabric.strategies.data.share import Use
from fabric.strategies.data.uneven import Uneven


def check_function(function: object) -> None:
    """Raise TypeError where `launch` was given something that cannot run."""
    if function is not None and not callable(function):
        raise TypeError(
            f"`fabric.launch({function!r})` was given a `{type(function).__name__}`. Pass a function `(fabric, ...)`, "
            "or nothing: then the script goes on in every rank."
        )


def check_module(module: object) -> None:
    """Raise TypeError where something else stands in the place of the module."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"A `{type(module).__name__}` was given to be set up as a module. {_SETUP}")


def check_optimizers(*optimizers: object) -> None:
    """Raise TypeError where something else stands in the place of an optimizer."""
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"A `{type(optimizer).__name__}` was given to be set up as an optimizer. {_SETUP}")


def check_use(use: object) -> None:
    """Raise ValueError for a word that no loader is for."""
    if use is not None and use not in get_args(Use):
        words = ", ".join(map(repr, get_args(Use)))
        raise ValueError(f"`setup_dataloaders(use={use!r})`: write one of {words}, or leave it out to train.")


def check_uneven(uneven: object, use: object) -> None:
    """Raise ValueError for a word that says nothing of ranks that end first, or where they may end when they like."""
    words = ", ".join(map(repr, get_args(Uneven)))
    if uneven is not None and uneven not in get_args(Uneven):
        raise ValueError(f"`setup_dataloaders(uneven={uneven!r})`: write one of {words}, or leave it out.")
    if uneven is not None and use not in (None, "train"):
        raise ValueError(
            f"`setup_dataloaders(uneven={uneven!r}, use={use!r})`: ranks may have different numbers of batches there, "
            "and agree on none. Leave `uneven` out, or train."
        )


def check_limits(clip_val: float | None, max_norm: float | None) -> None:
    """Raise ValueError where it is not said how to clip, or to what."""
    written = f"`clip_gradients(clip_val={clip_val}, max_norm={max_norm})`"
    if clip_val is not None and max_norm is None:
        limit = clip_val
    elif clip_val is None and max_norm is not None:
        limit = max_norm
    else:
        raise ValueError(f"{written}: exactly one of the two says how to clip.")
    if not limit >= 0:  # nor is NaN
        raise ValueError(f"{written}: below 0 it would turn gradients round. Write a number from 0 on.")


def check_named(method: str, state: object) -> None:
    """Raise TypeError where what is saved or loaded has no names, ValueError where one is ours."""
    if not isinstance(state, Mapping):
        raise TypeError(
            f"`fabric.{method}(path, ...)` was given a `{type(state).__name__}`. Give it a name: "
            "`{'model': model}`. `load_raw` reads a file that holds the bare state of one object."
        )
    if NAME in state:
        raise ValueError(
            f"`fabric.{method}(path, {{{NAME!r}: ...}})`: checkpoints have the generators and the loss scale of the "
            "run under this name. Write another one."
        )


_SETUP = "Write `fabric.setup(module, optimizer, ..., scheduler=scheduler)`, once for each module."
