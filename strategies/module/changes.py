"""Changes of a model after `setup`: layers that are added, replaced, frozen or unfrozen.

Strategies list the parameters that they average once, because that takes longer than the rest of our step. So each
forward checks whether they are still the same: it compares the dicts of all modules with their contents at setup, in
loops that run in C. torch's `register_module_parameter_registration_hook` would be global instead, and would not
report `requires_grad_`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from operator import attrgetter, eq, is_
from typing import Any, final

import torch
from torch import Tensor, nn

from fabric.strategies.tensors.dtensor import as_sharded

_AT_END = (object(),)
_requires_grad = attrgetter("requires_grad")
_dtype = attrgetter("dtype")


@final
class Contents:
    """The modules and parameters that a model has when this is constructed. Holds references to them.

    `by_name`: compare parameters by name instead of identity, for backends that replace the objects.
    """

    def __init__(self, module: nn.Module, *, by_name: bool = False) -> None:
        self.modules = list(module.modules())
        self.parameters = list(module.parameters())
        children: list[dict[str, Any]] = [part._modules for part in self.modules]
        own: list[dict[str, Any]] = [part._parameters for part in self.modules]
        self._empty = [each for each in (*children, *own) if not each]
        self._by_value = list(filter(None, children if by_name else (*children, *own)))
        self._by_name = list(filter(None, own)) if by_name else []
        self._values_then = list(_flat(dict.values, self._by_value))
        self._names_then = list(_flat(dict.keys, self._by_name))
        self._buffers: list[dict[str, Any]] = [part._buffers for part in self.modules]

    def is_as_it_was(self) -> bool:
        """Whether the model still has the same modules and parameters."""
        return (
            not any(self._empty)
            and all(map(is_, _flat(dict.values, self._by_value), self._values_then))
            and (not self._by_name or all(map(eq, _flat(dict.keys, self._by_name), self._names_then)))
        )

    def flags(self) -> list[bool]:
        """`requires_grad` of each parameter now."""
        return list(map(_requires_grad, self.parameters))

    def placement(self) -> tuple[list[torch.dtype], list[torch.device]]:
        """The dtype of each parameter now, and the device of the first one: a device takes longer to read."""
        return list(map(_dtype, self.parameters)), [each.device for each in self.parameters[:1]]

    def trainable(self) -> list[nn.Parameter]:
        """The parameters that require gradients now."""
        return [parameter for parameter in self.parameters if parameter.requires_grad]

    def new_since(self, before: Contents | None) -> list[Tensor]:
        """Parameters, and buffers of modules, that are not in `before`; None: all.

        Without new buffers of modules in `before`: a forward may have assigned them, with values of this rank.
        """
        known = set() if before is None else {id(each) for each in (*before.parameters, *before.modules)}
        new = [part for part in self.modules if id(part) not in known]
        buffers = [buffer for part in new for buffer in part._buffers.values() if buffer is not None]
        return [*(each for each in self.parameters if id(each) not in known), *dict.fromkeys(buffers)]

    def buffers(self) -> list[Tensor]:
        """The buffers that the modules have now. Not to be cached: a forward may assign another tensor
        (https://github.com/pytorch/pytorch/issues/63916)."""
        if not any(self._buffers):
            return []
        return list(dict.fromkeys(each for each in _flat(dict.values, self._buffers) if isinstance(each, Tensor)))


@final
class Additions:
    """Parameters that were added to a model after this was constructed.

    `by_name`: see `Contents`; a parameter that replaces another under the same name is then not found.
    """

    def __init__(self, module: nn.Module, *, by_name: bool) -> None:
        self._module, self._by_name = module, by_name
        self._contents = Contents(module, by_name=by_name)
        self._known: set[Any] = set(self._keys())
        self._found: list[tuple[str, nn.Parameter]] = []

    def found(self) -> list[tuple[str, nn.Parameter]]:
        """The added parameters, with their names. Cheap if the model has not changed."""
        if not self._contents.is_as_it_was():
            self._contents = Contents(self._module, by_name=self._by_name)
            self._found = [named for key, named in self._keys().items() if key not in self._known]
        return self._found

    def refuse(self) -> None:
        """Raise RuntimeError if one of them requires gradients and is not a DTensor of the user's."""
        found = [name for name, each in self.found() if each.requires_grad and as_sharded(each) is None]
        if found and torch.is_grad_enabled():
            raise RuntimeError(ADDED.format(model=type(self._module).__name__, names=", ".join(map(repr, found[:5]))))

    def _keys(self) -> dict[Any, tuple[str, nn.Parameter]]:
        return {
            (part, name) if self._by_name else parameter: (f"{prefix}.{name}".lstrip("."), parameter)
            for prefix, part in self._module.named_modules()
            for name, parameter in part._parameters.items()
            if parameter is not None
        }


ADDED = (
    "Parameters were added to `{model}` after `fabric.setup`, and their gradients would not be averaged over the "
    "ranks: {names}. Add and replace layers before `setup`; the layers that it has then may be frozen and unfrozen at "
    "any time."
)


def _flat(of: Any, dicts: Iterable[dict[str, Any]]) -> Iterator[Any]:
    """The results of `of` for each dict, in order, and an end marker, so that lists of different lengths differ."""
    return chain(chain.from_iterable(map(of, dicts)), _AT_END)
