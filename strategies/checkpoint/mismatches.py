"""Compare a checkpoint with the objects that it is loaded into: all mismatches at once, before anything is changed."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, final

from torch import nn
from torch.optim import Optimizer

from fabric.strategies.checkpoint.state import FindAccess, LoaderAccess, converts, is_stateful
from fabric.strategies.tensors.parameters import uncompiled

_MAX_ROWS = 50


@final
@dataclass(frozen=True, slots=True)
class Mismatch:
    """One row of the table."""

    entry: str
    here: str
    """What the object that is loaded into has."""
    there: str
    """What the checkpoint has."""
    is_left_out: bool
    """Whether `strict=False` skips the entry; otherwise the load fails even then."""


def mismatches(target: Any, content: Any, access: FindAccess, loaders: LoaderAccess, at: str = "") -> list[Mismatch]:
    """All mismatches, in the order of the objects. Ranks: each on its own."""
    if isinstance(target, nn.Module):
        return list(_of_module(uncompiled(target), content, access, at))
    if isinstance(target, Optimizer):
        return list(_of_optimizer(target, content, access, at))
    if is_stateful(target) or loaders.is_loader(target):
        return []
    if isinstance(target, dict) and isinstance(content, dict):
        found = []
        for key, each in target.items():
            inner = f"{at}/{key}" if at else str(key)
            if key in content:
                found += mismatches(each, content[key], access, loaders, inner)
            elif not loaders.is_stateless(each):
                found.append(Mismatch(inner, f"`{type(each).__name__}`", "missing", True))
        return found
    if isinstance(target, (list, tuple)) and isinstance(content, (list, tuple)) and len(target) == len(content):
        pairs = enumerate(zip(target, content, strict=True))
        return [row for n, (each, part) in pairs for row in mismatches(each, part, access, loaders, f"{at}/{n}")]
    return []


def table(rows: list[Mismatch]) -> str:
    """The rows as text, in aligned columns."""
    shown = [("", "to load into", "in the checkpoint"), *((row.entry, row.here, row.there) for row in rows[:_MAX_ROWS])]
    widths = [max(len(row[column]) for row in shown) for column in range(2)]
    lines = [f"  {entry:<{widths[0]}}  {here:<{widths[1]}}  {there}" for entry, here, there in shown]
    if len(rows) > _MAX_ROWS:
        lines.append(f"  and {len(rows) - _MAX_ROWS} more")
    return "\n".join(lines)


def _of_module(module: nn.Module, content: Any, access: FindAccess, at: str) -> Iterator[Mismatch]:
    if not isinstance(content, dict):
        yield Mismatch(at, f"`{type(module).__name__}`", f"`{type(content).__name__}`", False)
        return
    if converts(module):  # it may convert other names and shapes; torch checks the result
        return
    shapes = access(module).shapes(module)
    for name, shape in shapes.items():
        if name not in content:
            if not name.endswith("num_batches_tracked"):  # torch adds it to states of older releases
                yield Mismatch(f"{at}: {name}", _said(shape), "missing", True)
        elif _shape(content[name]) not in (shape, None):
            yield Mismatch(f"{at}: {name}", _said(shape), _said(_shape(content[name])), False)
    for name in content:
        if name not in shapes:
            yield Mismatch(f"{at}: {name}", "missing", _said(_shape(content[name])), True)


def _of_optimizer(optimizer: Optimizer, content: Any, access: FindAccess, at: str) -> Iterator[Mismatch]:
    kind = f"`{type(optimizer).__name__}`"
    if not isinstance(content, dict) or "param_groups" not in content:
        yield Mismatch(at, kind, f"not the state of an optimizer, but a `{type(content).__name__}`", False)
        return
    here = access(optimizer).group_sizes(optimizer)
    there = [len(group["params"]) for group in content["param_groups"]]
    if here != there:
        yield Mismatch(at, f"{kind}, groups of {here} parameters", f"groups of {there}", False)
        return
    # Torch adds flags with every release, so that a checkpoint may lack them. Numbers identify the algorithm.
    numbers = [name for name, value in optimizer.defaults.items() if type(value) in (int, float, tuple)]
    lacking = [name for name in numbers if any(name not in group for group in content["param_groups"])]
    if lacking:
        found = ", ".join(name for name in content["param_groups"][0] if name != "params")
        yield Mismatch(at, f"{kind}, which needs {', '.join(lacking)}", f"an optimizer with {found}", False)


def _shape(value: Any) -> tuple[int, ...] | None:
    shape = getattr(value, "shape", None)
    return None if shape is None else tuple(shape)


def _said(shape: tuple[int, ...] | None) -> str:
    return "not a tensor" if shape is None else str(shape)
