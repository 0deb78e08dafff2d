"""What `setup` returns: `_FabricModule` around a prepared module, and the user's own optimizers.

The wrapper is for code with `model.module` or `isinstance(model, _FabricModule)`. It adds a call, and no prefix:
parameters, buffers and submodules have the names of the user's module.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fabric.strategies.data.device_loader import DeviceLoader as _FabricDataLoader
from fabric.strategies.precision.precision import Precision, casts
from fabric.strategies.tensors.nests import map_only_tensors
from fabric.strategies.tensors.parameters import uncompiled

if TYPE_CHECKING:
    from torch.nn.modules.module import _IncompatibleKeys


__all__ = ["_FabricDataLoader", "_FabricModule", "_FabricOptimizer", "is_wrapped"]


class _FabricModule(nn.Module):
    """A prepared module. Attributes are those of the user's module, read and written."""

    _forward_module: nn.Module
    _is_converted: bool
    """Whether the dtypes of inputs and outputs are converted."""

    def __init__(self, forward_module: nn.Module, precision: Precision | None = None) -> None:
        """`precision`: that of the fabric; None converts nothing."""
        super().__init__()
        self._modules["_forward_module"] = forward_module  # for `modules()`; below, for a fast look-up
        del self.__dict__["training"]  # `training` is that of the module
        is_mixed = precision is not None and precision.is_mixed
        is_converted = is_mixed or (precision is not None and casts(precision))
        self.__dict__.update(
            _forward_module=forward_module, _is_converted=is_converted, _is_mixed=is_mixed, _marked=set()
        )

    @property
    def module(self) -> nn.Module:
        """The user's module."""
        return uncompiled(self._forward_module)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(self._forward_module, *args, **kwargs)

    def mark_forward_method(self, method: str | Callable[..., Any]) -> None:
        """Have another method of the module run as `forward` does."""
        self._forward_module.mark_forward_method(method)  # type: ignore[operator]
        if self._is_converted:
            self._marked.add(method if isinstance(method, str) else method.__name__)

    def _call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a method of the module. Floating outputs are converted to the default dtype, and under mixed precision
        inputs of float64 are, too; under "32-true" nothing is converted."""
        if not self._is_converted:
            return method(*args, **kwargs)
        if self._is_mixed:
            args, kwargs = map_only_tensors(_from_double, (args, kwargs), keep=True)
        return map_only_tensors(_to_default, method(*args, **kwargs), keep=True)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> "_IncompatibleKeys":
        keys: _IncompatibleKeys = self.module.load_state_dict(state_dict, strict=strict, assign=assign)
        return keys

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        return self.module.named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        return self.module.named_buffers(prefix, recurse, remove_duplicate)

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        yield from self.module.named_modules(*args, **kwargs)

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        return self.module.named_children()

    def get_submodule(self, target: str) -> nn.Module:
        return self.module.get_submodule(target)

    def train(self, mode: bool = True) -> "_FabricModule":
        self._forward_module.train(mode)
        return self

    def apply(self, fn: Callable[[nn.Module], None]) -> "_FabricModule":
        self.module.apply(fn)
        return self

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> "_FabricModule":
        self.module._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def __getattr__(self, name: str) -> Any:
        inner = self.__dict__.get("_forward_module")
        if inner is None:
            raise AttributeError(name)
        if name in self._marked:
            return partial(self._call, getattr(inner, name))
        try:
            return getattr(inner, name)
        except AttributeError:
            if name not in ("device", "dtype"):
                raise
            floating = (each for each in inner.parameters() if each.is_floating_point())
            return getattr(next(floating, torch.empty(0)), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if "_forward_module" not in self.__dict__ or name in _OWN_ATTRIBUTES:
            super().__setattr__(name, value)
        else:
            setattr(self.module, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.module, name)

    def __repr__(self) -> str:
        return f"_FabricModule({self._forward_module!r})"


_OWN_ATTRIBUTES = frozenset(vars(nn.Module())) - {"training"}
"""The attributes that `nn.Module.__init__` sets: hooks, and the dicts of parameters, buffers and modules."""


class _PreparedOptimizers(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, Optimizer) and "_set_up" in vars(instance)


class _FabricOptimizer(metaclass=_PreparedOptimizers):
    """For `isinstance`: true for an optimizer that was set up. `setup` returns the user's own."""


def _from_double(tensor: Tensor) -> Tensor:
    return tensor.to(torch.get_default_dtype()) if tensor.dtype == torch.float64 else tensor


def _to_default(tensor: Tensor) -> Tensor:
    return tensor.to(torch.get_default_dtype()) if tensor.is_floating_point() else tensor


def is_wrapped(obj: object) -> bool:
    """Whether a fabric of this package prepared the module, optimizer or loader."""
    inner = uncompiled(obj) if isinstance(obj, nn.Module) else obj
    return isinstance(inner, (_FabricModule, _FabricOptimizer, _FabricDataLoader))


def prepared(module: nn.Module | None) -> nn.Module | None:
    """The module that the core has set up, from a wrapped or compiled one."""
    inner = None if module is None else uncompiled(module)
    return inner._forward_module if isinstance(inner, _FabricModule) else module


def unwrap(value: Any) -> Any:
    """The same containers, with wrappers replaced by their modules, and without loaders that have no position."""
    if isinstance(value, nn.Module):
        return prepared(value)
    if isinstance(value, dict):
        return {key: unwrap(each) for key, each in value.items() if not _has_no_position(each)}
    if type(value) in (list, tuple):
        return type(value)(unwrap(each) for each in value if not _has_no_position(each))
    return value


def _has_no_position(value: Any) -> bool:
    from torch.utils.data import DataLoader

    if isinstance(value, _FabricDataLoader):
        return not callable(getattr(value._loader, "state_dict", None))
    return isinstance(value, DataLoader) and not callable(getattr(value, "state_dict", None))
