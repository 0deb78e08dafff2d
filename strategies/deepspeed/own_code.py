"""Each submodule of a model at stage 3 has a forward that torch's compiler tells from all others.

The compiler keeps what it compiled by code, and gives up on a function of which it has eight versions
(`recompile_limit`). DeepSpeed's hooks gather weights around each submodule and end the graph there, so each submodule's
forward is compiled by itself, for its own shapes. All `nn.Linear` share one code: with three shapes of weights, two
batch sizes and an evaluation the ninth would run uncompiled.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType, MethodType

from torch import nn


def own_code(module: nn.Module) -> Callable[[], None]:
    """Give each submodule a `forward` of the same code at a place of its own. Returns what undoes it.

    A `forward` that a submodule has as an attribute, or that is no Python function, is left.
    """
    given: list[tuple[nn.Module, MethodType]] = []
    for part in module.modules():
        function = type(part).forward
        if part is not module and "forward" not in vars(part) and isinstance(function, FunctionType):
            method = MethodType(_duplicate(function), part)
            object.__setattr__(part, "forward", method)
            given.append((part, method))

    def undo() -> None:
        for part, method in given:
            if vars(part).get("forward") is method:
                object.__delattr__(part, "forward")

    return undo


def _duplicate(function: FunctionType) -> FunctionType:
    code = function.__code__.replace()
    duplicate = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    duplicate.__kwdefaults__ = function.__kwdefaults__
    duplicate.__module__, duplicate.__qualname__, duplicate.__doc__ = (
        function.__module__,
        function.__qualname__,
        function.__doc__,
    )
    duplicate.__dict__.update(function.__dict__)
    return duplicate
