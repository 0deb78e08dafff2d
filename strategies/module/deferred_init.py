"""Initialise a module that was constructed on the meta device: by `reset_parameters`, or later from a checkpoint.

# Note [Who fills the tensors]
A submodule with a `reset_parameters` fills its own tensors, in the order of `model.apply`: children first. Then
`init_weights` of the model is called, if it has one. Neither order nor random numbers depend on how the model is
sharded: see `whole_draws.py`. A submodule without either gets tensors full of a marker value (NaN for floating point),
and the first forward raises if it is still there. So any function may fill them until then (`fabric.load`, torch's
`load_state_dict`, the user's own) without reporting it. Strategies that construct the module on the device replace the
functions of `torch.nn.init` by ones that write the marker, and check it in the same way.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, final
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from fabric.strategies.checkpoint.state import uncompiled
from fabric.strategies.collectives.collective import Collective
from fabric.strategies.module.forward import Around
from fabric.strategies.sharding.whole_draws import WholeDraws
from fabric.strategies.tensors.dtensor import local_part, user_class

_RESET = ("reset_parameters", "_reset_parameters")
"""The second is the name in torch's `nn.MultiheadAttention` and `nn.Transformer`."""


def leave_empty(tensor: Tensor) -> Tensor:
    """Fill a floating-point tensor with the marker instead of initial values, and flag it."""
    if tensor.is_floating_point() and not tensor.is_meta:
        with torch.no_grad():
            tensor.fill_(_mark(tensor.dtype))
        vars(tensor)[_EMPTY] = True
    return tensor


_EMPTY = "_fabric_left_empty"


def refuse_empty(module: nn.Module, around: Around | None) -> Around | None:
    """`around`, which raises RuntimeError while parameters or buffers that `leave_empty` marked have no values.

    Uses no collective, so that rank 0 may evaluate alone. No cost for a module that was not constructed empty.
    """
    inner = uncompiled(module)
    named = (*inner.named_parameters(), *inner.named_buffers())
    names = [name for name, tensor in named if vars(tensor).pop(_EMPTY, False)]
    if not names:
        return around

    def forward(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if names:
            now = {**dict(inner.named_parameters()), **dict(inner.named_buffers())}
            empty = [name for name in names if name in now and _is_empty(now[name])]
            if empty:
                raise RuntimeError(_NO_VALUES.format(model=type(inner).__name__, names=_have(empty)))
            names.clear()
        return function(*args, **kwargs) if around is None else around(function, args, kwargs)

    return forward


@final
class Unfilled:
    """The tensors of one model that have no initial values yet."""

    def __init__(self, root: nn.Module) -> None:
        self._model = user_class(root).__name__
        self._names = {part: name for name, part in root.named_modules()}
        self._tensors: list[tuple[nn.Module, str]] = []
        # Tied tensors are made once. Weak, because unsharded tensors are to be freed when they are sharded.
        self._made: WeakValueDictionary[Tensor, Tensor] = WeakValueDictionary()
        self.was_empty = False

    def fill(self, part: nn.Module, device: torch.device, collective: Collective) -> None:
        """Allocate the own tensors of one submodule, and call its `reset_parameters`. Ranks: all of `collective`."""
        empty = [name for name, tensor in _own_tensors(part).items() if tensor.is_meta]
        for name in empty:
            tensor = getattr(part, name)
            made = self._made.get(tensor)
            if made is None:
                made = self._made[tensor] = _marked(tensor, device)
            setattr(part, name, made)
        if not empty:
            return
        self.was_empty = True
        with WholeDraws(device, collective):
            if not any(_call(part, method) for method in _RESET):
                self._tensors += [(part, name) for name in empty]

    def finish(self, root: nn.Module | None, device: torch.device, collective: Collective) -> None:
        """Call it after all submodules: calls `init_weights` of `root`, if it is given. Ranks: all of `collective`."""
        if self.was_empty and root is not None:
            with WholeDraws(device, collective):
                _call(root, "init_weights")

    def check(self, collective: Collective) -> None:
        """Raise RuntimeError if a tensor is still empty. No cost once all are filled. Ranks: all call it."""
        if not self._tensors:
            return
        mine = [
            f"{self._names[part]}.{name}".lstrip(".") for part, name in self._tensors if _is_empty(getattr(part, name))
        ]
        empty = sorted({name for names in collective.all_gather_object(mine) for name in names})
        if empty:
            raise RuntimeError(_NO_VALUES.format(model=self._model, names=_have(empty)))
        self._tensors.clear()


_NO_VALUES = (
    "`{model}` was made empty, and {names} no values yet. Load a checkpoint (`fabric.load`) before the first forward, "
    "or give the module that has them a `reset_parameters` without arguments, or construct the model without "
    "`empty_init=True`."
)


def _have(names: list[str]) -> str:
    return f"{', '.join(names)} {'has' if len(names) == 1 else 'have'}"


def _own_tensors(part: nn.Module) -> dict[str, Tensor]:
    return {**dict(part.named_parameters(recurse=False)), **dict(part.named_buffers(recurse=False))}


def _marked(tensor: Tensor, device: torch.device) -> Tensor:
    marked = torch.full_like(tensor, _mark(tensor.dtype), device=device)
    if not isinstance(tensor, nn.Parameter):
        return marked
    parameter = nn.Parameter(marked, requires_grad=tensor.requires_grad)
    vars(parameter).update(vars(tensor))  # attributes that the user has set on it
    return parameter


def _mark(dtype: torch.dtype) -> float | int:
    if dtype == torch.bool:
        return False
    return float("nan") if dtype.is_floating_point or dtype.is_complex else torch.iinfo(dtype).min


def _is_empty(tensor: Tensor) -> bool:
    """Whether this rank's part has only the marker, and zeros, which the padding row of an embedding has. False for
    booleans, which have no spare value."""
    values = local_part(tensor.detach())
    if values.dtype == torch.bool:
        return False
    mark = _mark(values.dtype)
    marked = values.isnan() if mark != mark else values == mark
    return bool(marked.any()) and bool((marked | (values == 0)).all())


def _call(part: nn.Module, method: str) -> bool:
    """Call a method of a submodule. Returns False if it has none that needs no arguments."""
    function = getattr(part, method, None)
    if not callable(function):
        return False
    needed = [p for p in inspect.signature(function).parameters.values() if p.default is p.empty]
    if any(p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in needed):
        return False
    function()
    return True


def in_order_of_apply(root: nn.Module) -> list[nn.Module]:
    """The modules of a model, each once, children before parents: the order of `nn.Module.apply`."""
    found: list[nn.Module] = []
    root.apply(found.append)
    return list(dict.fromkeys(found))
