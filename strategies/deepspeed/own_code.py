"""Gives each submodule a code object of its own at stage 3, so that `torch.compile` caches it separately.

The compiler caches by code object, and stops compiling a function that has been compiled eight times
(`recompile_limit`). DeepSpeed's hooks gather weights around each submodule and end the graph there, so each submodule's
forward is compiled by itself, for its own shapes. All `nn.Linear` share one code object: with three shapes of weights,
two batch sizes and an evaluation, the ninth variant would run uncompiled.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType, MethodType

from torch import nn


def own_code(module: nn.Module) -> Callable[[], None]:
    """Give each submodule a `forward` with its own copy of the code object. Returns a function that undoes it.

    A `forward` that is an attribute of the instance, or not a Python function, is unchanged.
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
