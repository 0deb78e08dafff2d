"""Construct a model on its device, in its dtype, and without initialising it twice."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fabric.strategies.precision.precision import Precision, default_dtype


@contextmanager
def new_tensors(device: torch.device, precision: Precision, *, empty: bool = False) -> Iterator[None]:
    """Within the context, tensors are created on `device` with the precision's parameter dtype.

    `empty`: parameters are not initialised, which saves time if weights are loaded next: see `deferred_init.py`.
    """
    with default_dtype(precision.param_dtype), device, NotedCalls(skip=True) if empty else nullcontext():
        yield


Call: TypeAlias = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
"""A function and its arguments, without the parameter."""

_OVERWRITE = ("constant_", "fill_", "kaiming_uniform_", "normal_", "uniform_", "zero_")
"""The functions of `torch.nn.init` that a mode sees, and the tensor methods that the other functions call."""
_CALL = "_fabric_initialised_by"


def initialised_by(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> nn.Parameter | None:
    """The floating-point parameter that a call initialises from numbers alone; None for any other call."""
    if getattr(function, "__name__", "") not in _OVERWRITE:
        return None
    parameter, *numbers = (*args, *kwargs.values())  # functions of `torch.nn.init` pass it by name, the first one
    is_float = isinstance(parameter, nn.Parameter) and parameter.is_floating_point()
    return None if not is_float or any(isinstance(each, Tensor) for each in numbers) else parameter


@final
class NotedCalls(TorchFunctionMode):
    """Within the context, parameters remember the call that initialises them.

    `skip`: the parameters get NaN in its place. A method that draws is called, for it may be one step of several
    (`trunc_normal_`), and nothing is noted then: the values are there, unless the parameter is on "meta".
    """

    def __init__(self, *, skip: bool = False) -> None:
        super().__init__()
        self._skip = skip

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        parameter = initialised_by(function, args, kwargs)
        if parameter is not None:
            vars(parameter)[_CALL] = function, args[1:], {name: kwargs[name] for name in kwargs if name != "tensor"}
            if self._skip and not parameter.is_meta:
                if not args or function.__name__ in ("fill_", "zero_"):
                    return nn.init.constant_(parameter, float("nan"))
                del vars(parameter)[_CALL]
        return function(*args, **kwargs)


def take_calls(tensors: Iterable[Tensor]) -> dict[Tensor, Call | None]:
    """Remove and return the call that was noted for each tensor."""
    return {tensor: vars(tensor).pop(_CALL, None) for tensor in dict.fromkeys(tensors)}


@torch.no_grad()
def repeat_call(tensor: Tensor, call: Call | None, made: Call | None) -> None:
    """Initialise the tensor by `call`, unless `made`, the call that has initialised it, is the same."""
    if call is not None and call != made:
        function, args, kwargs = call
        function(tensor, *args, **kwargs)
