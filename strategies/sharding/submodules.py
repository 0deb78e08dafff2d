"""Submodules of a sharded model that are called directly: an encoder, or the submodules that a `generate` runs.

Each gathers the parameters of its unit, as that unit's forward would, and gradients are reduced as after any forward.
Within a forward of the model this costs two comparisons, not a hook; compiled graphs do not contain it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast, final

import torch
from torch import nn

from fabric.strategies.module.forward import Around, ForwardPath, leave_uncompiled
from fabric.strategies.sharding.fully_sharded import mark_gathering
from fabric.strategies.torch_internals import current_graph_task_id
from fabric.strategies.undo import replace_attributes, undo_all

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


def enter_alone(path: ForwardPath, units: Sequence[FSDPModule], around: Around | None) -> Callable[[], None]:
    """Make submodules of the units callable by themselves. Returns a function that undoes it.

    `around`: wraps their forward. Ranks: all call the same submodules, in the same order.
    """
    undo = []
    inner = set(cast("Sequence[nn.Module]", units))
    for unit in inner:
        if unit is not path.module:  # gathers by itself
            undo.append(replace_attributes(unit, forward=_Entry(path, unit, unit.forward, around)))
        for part in dict.fromkeys(_own_parts(unit, inner)):
            entry = _Entry(path, part, _gathering(unit, part), around)
            undo.append(replace_attributes(part, forward=entry))
    return undo_all(reversed(undo))


@final
class _Entry:
    """`forward` of a submodule."""

    def __init__(
        self, path: ForwardPath, part: nn.Module, gathering: Callable[..., Any], around: Around | None
    ) -> None:
        functools.update_wrapper(self, part.forward)
        self._path, self._part, self._gathering, self._around = path, part, gathering, around
        self._forward = part.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._path.running or torch.compiler.is_compiling():
            return self._forward(*args, **kwargs)
        if current_graph_task_id() != -1:  # activation checkpointing recomputes it in backward
            return self._forward(*args, **kwargs)
        return self._alone(args, kwargs)

    def _alone(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._path.running = True
        try:
            if self._around is None:
                return self._gathering(*args, **kwargs)
            return self._around(self._gathering, args, kwargs)
        finally:
            self._path.running = False

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._part, "forward")  # a copy gets the method of its class


leave_uncompiled(_Entry.__call__)


def _gathering(unit: nn.Module, part: nn.Module) -> Callable[..., Any]:
    """`part.forward`, after gathering the parameters of `unit`."""
    object.__setattr__(unit, _NAME, part.forward)
    mark_gathering(unit, _NAME)
    gathering: Callable[..., Any] = vars(unit).pop(_NAME)
    return gathering


_NAME = "_forward_of_submodule"


def _own_parts(unit: nn.Module, units: set[nn.Module]) -> Iterator[nn.Module]:
    """The submodules of a unit, at any depth, with parameters that are gathered with it."""
    for child in unit.children():
        if child not in units:
            if not isinstance(child, (nn.ModuleList, nn.ModuleDict)) and _has_own(child, units):
                yield child
            yield from _own_parts(child, units)


def _has_own(part: nn.Module, units: set[nn.Module]) -> bool:
    own = any(True for _ in part.parameters(recurse=False))
    return own or any(_has_own(child, units) for child in part.children() if child not in units)
