"""A module made without values (on the meta device) gets them: from `reset_parameters`, or later from a checkpoint.

# Note [Who fills the tensors]
A part with a `reset_parameters` fills its own tensors, in the order of `model.apply`: children first. Then a model with
an `init_weights` fills what that fills. Neither order nor random numbers depend on how the model is cut: see
`whole_draws.py`. A part without either gets tensors full of a mark (NaN, for floating point), and the first forward
raises if the mark is still there: `fabric.load`, torch's own loading, and the user's own function may each have filled
them since, and none of them has to tell us. Strategies that make such a module on
the device let the functions of `torch.nn.init` write the mark, and look for it in the same way.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, final

import torch
from torch import Tensor, nn

from fabric.strategies.checkpoint.state import uncompiled
from fabric.strategies.collectives.collective import Collective
from fabric.strategies.module.forward import Around
from fabric.strategies.sharding.dtensor import local_part, user_class
from fabric.strategies.sharding.whole_draws import WholeDraws

_RESET = ("reset_parameters", "_reset_parameters")
"""The second is torch's own, of `nn.MultiheadAttention` and `nn.Transformer`."""


def leave_empty(tensor: Tensor) -> Tensor:
    """Fill a tensor with the mark instead of its first values, and note on it that this was done."""
    if tensor.is_floating_point() and not tensor.is_meta:
        with torch.no_grad():
            tensor.fill_(_mark(tensor.dtype))
        vars(tensor)[_EMPTY] = True
    return tensor


_EMPTY = "_fabric_left_empty"


def refuse_empty(module: nn.Module, around: Around | None) -> Around | None:
    """`around`, which raises RuntimeError while parameters or buffers that `leave_empty` marked have no values.

    No rank talks: where forward talks to none, rank 0 may evaluate alone. Free for a module that was not made empty.
    """
    inner = uncompiled(module)
    named = (*inner.named_parameters(), *inner.named_buffers())
    names = [name for name, tensor in named if vars(tensor).pop(_EMPTY, False)]
    if not names:
        return around

    def forward(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if names:
            now = {**dict(inner.named_parameters()), **dict(inner.named_buffers())}
            empty = [name for name in names if name in now and _is_blank(now[name])]
            if empty:
                raise RuntimeError(_NO_VALUES.format(model=type(inner).__name__, names=_have(empty), instead=_WRITE))
            names.clear()
        return function(*args, **kwargs) if around is None else around(function, args, kwargs)

    return forward


@final
class Unfilled:
    """The tensors of one model that nothing has filled yet."""

    def __init__(self, root: nn.Module) -> None:
        self._model = user_class(root).__name__
        self._names = {part: name for name, part in root.named_modules()}
        self._tensors: list[tuple[nn.Module, str]] = []
        uses = Counter(tensor for part in root.modules() for tensor in _own_tensors(part).values())
        self._tied = {tensor for tensor, number in uses.items() if number > 1}
        self._made: dict[Tensor, Tensor] = {}
        self.was_empty = False

    def fill(self, part: nn.Module, device: torch.device, collective: Collective) -> None:
        """Make one part's own tensors real, and let it fill them if it can. Ranks: all of `collective`."""
        empty = [name for name, tensor in _own_tensors(part).items() if tensor.is_meta]
        for name in empty:
            tensor = getattr(part, name)
            made = self._made.get(tensor)
            if made is None:
                made = _marked(tensor, device)
            if tensor in self._tied:  # the others are not kept: they are whole, and about to be cut
                self._made[tensor] = made
            setattr(part, name, made)
        if not empty:
            return
        self.was_empty = True
        with WholeDraws(device, collective):
            if not any(_call(part, method) for method in _RESET):
                self._tensors += [(part, name) for name in empty]

    def finish(self, root: nn.Module | None, device: torch.device, collective: Collective) -> None:
        """After all parts: let the model, if it is all there, fill what it fills by itself. Ranks: all of `collective`.

        Raises: ValueError: a buffer that no checkpoint holds is empty still.
        """
        self._made.clear()
        if self.was_empty and root is not None:
            with WholeDraws(device, collective):
                _call(root, "init_weights")
        for part, name in self._tensors:
            self._refuse_lost(part, name)

    def check(self, collective: Collective) -> None:
        """Raise RuntimeError where a tensor is still empty. Free once all are filled. Ranks: all call it together."""
        if not self._tensors:
            return
        mine = [self._name(part, name) for part, name in self._tensors if _is_marked(getattr(part, name))]
        empty = sorted({name for names in collective.all_gather_object(mine) for name in names})
        if empty:
            instead = self._other_ways(empty)
            raise RuntimeError(_NO_VALUES.format(model=self._model, names=_have(empty), instead=instead))
        self._tensors.clear()

    def _refuse_lost(self, part: nn.Module, name: str) -> None:
        if name in part._non_persistent_buffers_set and _is_marked(getattr(part, name)):
            raise ValueError(
                f"The buffer `{self._name(part, name)}` is in no checkpoint (`persistent=False`), and making the "
                f"model empty lost its values. Give `{user_class(part).__name__}` a `reset_parameters` that computes "
                "it, or make the model without `empty_init=True`."
            )

    def _other_ways(self, empty: list[str]) -> str:
        parts = [part for part, name in self._tensors if self._name(part, name) in empty]
        without = [part for part in parts if not callable(getattr(part, "reset_parameters", None))]
        classes = "`, `".join(sorted({user_class(part).__name__ for part in without or parts}))
        if without:
            return f"give `{classes}` a `reset_parameters`"
        return f"let `reset_parameters` of `{classes}` need no arguments, and fill them"

    def _name(self, part: nn.Module, name: str) -> str:
        return f"{self._names[part]}.{name}".lstrip(".")


_NO_VALUES = (
    "`{model}` was made empty, and {names} no values yet. Load a checkpoint (`fabric.load`) before the first forward, "
    "or {instead}."
)
_WRITE = "write first values into what no checkpoint holds, or make the module without `empty_init=True`"


def _have(names: list[str]) -> str:
    return f"{', '.join(names)} {'has' if len(names) == 1 else 'have'}"


def _own_tensors(part: nn.Module) -> dict[str, Tensor]:
    return {**dict(part.named_parameters(recurse=False)), **dict(part.named_buffers(recurse=False))}


def _marked(tensor: Tensor, device: torch.device) -> Tensor:
    marked = torch.full_like(tensor, _mark(tensor.dtype), device=device)
    if not isinstance(tensor, nn.Parameter):
        return marked
    parameter = nn.Parameter(marked, requires_grad=tensor.requires_grad)
    vars(parameter).update(vars(tensor))  # what the user noted on it
    return parameter


def _mark(dtype: torch.dtype) -> float | int:
    if dtype == torch.bool:
        return False
    return float("nan") if dtype.is_floating_point or dtype.is_complex else torch.iinfo(dtype).min


def _is_marked(tensor: Tensor) -> bool:
    """Whether what this rank holds of it still has the mark. Of booleans that cannot be told."""
    values = local_part(tensor.detach())
    if values.numel() == 0 or values.dtype == torch.bool:
        return False
    mark = _mark(values.dtype)
    return bool((values.isnan() if mark != mark else values == mark).all())


def _is_blank(tensor: Tensor) -> bool:
    """Whether what this rank holds has the mark wherever it is not zero: the padding row of an embedding is written
    when it is made. A tensor with values has others than these."""
    values = local_part(tensor.detach())
    marked = values.isnan()
    return bool(marked.any()) and bool((marked | (values == 0)).all())


def _call(part: nn.Module, method: str) -> bool:
    """Call a method that a part may have. Whether it has one that needs no arguments."""
    function = getattr(part, method, None)
    if not callable(function):
        return False
    needed = [p for p in inspect.signature(function).parameters.values() if p.default is p.empty]
    if any(p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in needed):
        return False
    function()
    return True


def in_order_of_apply(root: nn.Module) -> Iterator[nn.Module]:
    """The modules of a model, each once, children before what holds them: as `nn.Module.apply` visits them."""
    seen: set[nn.Module] = set()

    def visit(part: nn.Module) -> Iterator[nn.Module]:
        seen.add(part)
        for child in part.children():
            if child not in seen:
                yield from visit(child)
        yield part

    return visit(root)
