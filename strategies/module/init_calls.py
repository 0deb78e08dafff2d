"""The call that initialises a parameter: of a function of `torch.nn.init`, or of a method that overwrites a tensor.

Modules may initialise parameters of modules that they contain once more: the last layer to zeros, peft its `lora_B`. A
model that is constructed empty notes the last call for each, for `reset_parameters` of the submodules does not make it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

Call: TypeAlias = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
"""A function, and its arguments but the parameter."""

_OVERWRITE = ("constant_", "fill_", "kaiming_uniform_", "normal_", "uniform_", "zero_")
"""What functions of `torch.nn.init` let a mode see, and the methods that others call."""
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
    """The call that was noted for each, which is forgotten."""
    return {tensor: vars(tensor).pop(_CALL, None) for tensor in dict.fromkeys(tensors)}


@torch.no_grad()
def repeat_call(tensor: Tensor, call: Call | None, made: Call | None) -> None:
    """Initialise the tensor by `call`, unless `made`, the call that has initialised it, is the same."""
    if call is not None and call != made:
        function, args, kwargs = call
        function(tensor, *args, **kwargs)
