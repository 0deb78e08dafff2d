"""Whether a checkpoint fits the objects that it is loaded into: all differences at once, before any is changed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, final

from torch import nn
from torch.optim import Optimizer

from fabric.strategies.checkpoint.in_place import converts
from fabric.strategies.checkpoint.state import FindAccess, LoaderAccess, Stateful, uncompiled

_MAX_ROWS = 50


@final
@dataclass(frozen=True, slots=True)
class Misfit:
    """One line of the table."""

    entry: str
    here: str
    """What the object that is loaded into has there."""
    there: str
    """What the checkpoint has."""
    is_left_out: bool
    """Whether `strict=False` loads the rest; otherwise nothing can be loaded."""


def misfits(target: Any, content: Any, access: FindAccess, loaders: LoaderAccess, at: str = "") -> list[Misfit]:
    """All that does not fit, in the order of the objects. No rank talks."""
    if isinstance(target, nn.Module):
        return list(_of_module(uncompiled(target), content, access, at))
    if isinstance(target, Optimizer):
        return list(_of_optimizer(target, content, access, at))
    if isinstance(target, Stateful) or loaders.is_loader(target):
        return []
    if isinstance(target, dict) and isinstance(content, dict):
        found = []
        for key, each in target.items():
            inner = f"{at}/{key}" if at else str(key)
            if key in content:
                found += misfits(each, content[key], access, loaders, inner)
            elif not (loaders.is_loader(each) and not isinstance(each, Stateful)):
                found.append(Misfit(inner, f"`{type(each).__name__}`", "missing", True))
        return found
    if isinstance(target, (list, tuple)) and isinstance(content, (list, tuple)) and len(target) == len(content):
        pairs = enumerate(zip(target, content, strict=True))
        return [row for n, (each, part) in pairs for row in misfits(each, part, access, loaders, f"{at}/{n}")]
    return []


def table(rows: list[Misfit]) -> str:
    """The rows in columns, below each other."""
    shown = [("", "to load into", "in the checkpoint"), *((row.entry, row.here, row.there) for row in rows[:_MAX_ROWS])]
    widths = [max(len(row[column]) for row in shown) for column in range(2)]
    lines = [f"  {entry:<{widths[0]}}  {here:<{widths[1]}}  {there}" for entry, here, there in shown]
    if len(rows) > _MAX_ROWS:
        lines.append(f"  and {len(rows) - _MAX_ROWS} more")
    return "\n".join(lines)


def _of_module(module: nn.Module, content: Any, access: FindAccess, at: str) -> Iterator[Misfit]:
    if not isinstance(content, dict):
        yield Misfit(at, f"`{type(module).__name__}`", f"`{type(content).__name__}`", False)
        return
    if converts(module):  # it may take other names and shapes; torch compares what comes of them
        return
    shapes = access(module).shapes(module)
    for name, shape in shapes.items():
        if name not in content:
            if not name.endswith("num_batches_tracked"):  # which torch adds to states from before it had that
                yield Misfit(f"{at}: {name}", _said(shape), "missing", True)
        elif _shape(content[name]) not in (shape, None):
            yield Misfit(f"{at}: {name}", _said(shape), _said(_shape(content[name])), False)
    for name in content:
        if name not in shapes:
            yield Misfit(f"{at}: {name}", "not there", _said(_shape(content[name])), True)


def _of_optimizer(optimizer: Optimizer, content: Any, access: FindAccess, at: str) -> Iterator[Misfit]:
    kind = f"`{type(optimizer).__name__}`"
    if not isinstance(content, dict) or "param_groups" not in content:
        yield Misfit(at, kind, f"no state of an optimizer, a `{type(content).__name__}`", False)
        return
    here = access(optimizer).group_sizes(optimizer)
    there = [len(group["params"]) for group in content["param_groups"]]
    if here != there:
        yield Misfit(at, f"{kind}, groups of {here} parameters", f"groups of {there}", False)


def _shape(value: Any) -> tuple[int, ...] | None:
    shape = getattr(value, "shape", None)
    return None if shape is None else tuple(shape)


def _said(shape: tuple[int, ...] | None) -> str:
    return "no tensor" if shape is None else str(shape)
