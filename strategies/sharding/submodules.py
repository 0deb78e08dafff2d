"""Submodules of a model in shards that are called by themselves: an encoder, or the parts that a `generate` runs.

Each gathers the parameters of the unit that it is in, as that unit's forward would, and gradients are reduced as after
any forward. Within a forward of the model that costs two comparisons, not a hook, and a compiled graph has none of it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast, final

import torch
from torch import nn

from fabric.strategies.module.forward import Around, ForwardPath, leave_uncompiled
from fabric.strategies.sharding.gathered import Gathered, mark_gathering
from fabric.strategies.torch_internals import current_graph_task_id

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


def enter_alone(
    path: ForwardPath, units: Sequence[FSDPModule], gathered: Gathered, around: Around | None
) -> Callable[[], None]:
    """Let submodules of the units be called by themselves. Returns what undoes it.

    `around`: what is to be around a forward of theirs. Ranks: all call the same submodules, in the same order.
    """
    entries = []
    inner = set(cast("Sequence[nn.Module]", units))
    for unit in inner:
        if unit is not path.module:  # gathers by itself, and what it calls has nothing to gather
            entries.append((unit, vars(unit).get("forward")))
            object.__setattr__(unit, "forward", _Entry(path, unit, unit.forward, around))
        for part in dict.fromkeys(_own_parts(unit, inner)):
            entries.append((part, vars(part).get("forward")))
            object.__setattr__(part, "forward", _Entry(path, part, _gathering(unit, part, gathered), around))

    def undo() -> None:
        for part, given in reversed(entries):
            if given is None:
                vars(part).pop("forward", None)
            else:
                object.__setattr__(part, "forward", given)

    return undo


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
        if current_graph_task_id() != -1:  # backward computes it again
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
        return getattr, (self._part, "forward")  # of a copy: there it finds the method of the class


leave_uncompiled(_Entry.__call__)


def _gathering(unit: nn.Module, part: nn.Module, gathered: Gathered) -> Callable[..., Any]:
    """`part.forward`, gathering what `unit` has."""
    object.__setattr__(unit, _NAME, part.forward)
    mark_gathering(unit, _NAME, gathered)
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
