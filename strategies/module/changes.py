"""What changes in a model after `setup`: layers that are added, replaced, frozen or unfrozen.

Strategies look up once what they average, for that takes longer than the rest of our step. So each forward asks whether
it is still what it was, by comparing the dicts of all modules with their contents from then, in loops that run in C.
Registering a hook with torch instead (`register_module_parameter_registration_hook`) would be global, and would say
nothing of `requires_grad_`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from operator import attrgetter, eq, is_
from typing import Any, final

import torch
from torch import Tensor, nn

from fabric.strategies.sharding.dtensor import as_sharded

_AT_END = (object(),)
_requires_grad = attrgetter("requires_grad")


@final
class Contents:
    """The modules and the parameters of a model at one moment. Holds on to them.

    `by_name`: parameters are told apart by their names alone, where a backend exchanges the objects.
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
        """Whether the model has the same modules and parameters still."""
        return (
            not any(self._empty)
            and all(map(is_, _flat(dict.values, self._by_value), self._values_then))
            and (not self._by_name or all(map(eq, _flat(dict.keys, self._by_name), self._names_then)))
        )

    def flags(self) -> list[bool]:
        """Which of the parameters require gradients now."""
        return list(map(_requires_grad, self.parameters))

    def trainable(self) -> list[nn.Parameter]:
        """Those that require gradients now."""
        return [parameter for parameter in self.parameters if parameter.requires_grad]

    def new_since(self, before: Contents | None) -> list[Tensor]:
        """Parameters, and buffers of modules, that were not in the model at an earlier moment; None: all.

        Not the buffers of modules that were: a forward may have assigned others, which hold what this rank has seen.
        """
        known = set() if before is None else {id(each) for each in (*before.parameters, *before.modules)}
        new = [part for part in self.modules if id(part) not in known]
        buffers = [buffer for part in new for buffer in part._buffers.values() if buffer is not None]
        return [*(each for each in self.parameters if id(each) not in known), *dict.fromkeys(buffers)]

    def buffers(self) -> list[Tensor]:
        """The buffers that the modules have now. To be asked for each time: a forward may assign another tensor
        (https://github.com/pytorch/pytorch/issues/63916)."""
        if not any(self._buffers):
            return []
        return list(dict.fromkeys(each for each in _flat(dict.values, self._buffers) if isinstance(each, Tensor)))


@final
class Additions:
    """What a model got after `setup`, for strategies that cannot take it in, or take it in one by one.

    `by_name`: see `Contents`. A parameter that replaces another under its name is then not found.
    """

    def __init__(self, module: nn.Module, *, by_name: bool) -> None:
        self._module, self._by_name = module, by_name
        self._contents = Contents(module, by_name=by_name)
        self._known: set[Any] = set(self._keys())
        self._found: list[tuple[str, nn.Parameter]] = []

    def found(self) -> list[tuple[str, nn.Parameter]]:
        """The parameters that were not there when this was made, by their names. Cheap where there are none."""
        if not self._contents.is_as_it_was():
            self._contents = Contents(self._module, by_name=self._by_name)
            self._found = [named for key, named in self._keys().items() if key not in self._known]
        return self._found

    def refuse(self) -> None:
        """Raise RuntimeError where one of them is to be trained, and is no shard of the user's own."""
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


@final
class GatheredFlags:
    """`requires_grad` of parameters in shards, which `fully_shard` exchanges for whole ones while they are used.

    The root's stay whole from a forward to the backward, or after an evaluation to the next training step. Who freezes
    or unfreezes the model's parameters meanwhile reaches those, and torch 2.13 goes by the shards.
    """

    def __init__(self, module: nn.Module) -> None:
        """Before the first forward: all are in shards."""
        parts = [part for part in module.modules() if part._parameters]
        self._own: list[dict[str, Any]] = [part._parameters for part in parts]
        self._shards = self._now()
        self._flags = self._of(self._shards)

    def update(self) -> None:
        """Let shards and whole parameters have the flag that was set last on either."""
        now = self._now()
        whole, shards = self._of(now), self._of(self._shards)
        if (whole == self._flags and shards == self._flags) or len(now) != len(self._shards):
            return
        for index, before in enumerate(self._flags):
            flag = whole[index] if whole[index] != before else shards[index]
            if flag != before:
                now[index].requires_grad_(flag)
                self._shards[index].requires_grad_(flag)
                self._flags[index] = flag

    def _now(self) -> list[nn.Parameter]:
        return [each for each in chain.from_iterable(map(dict.values, self._own)) if each is not None]

    def _of(self, parameters: list[nn.Parameter]) -> list[bool]:
        return list(map(_requires_grad, parameters))


ADDED = (
    "Parameters came to `{model}` after `fabric.setup`, and their gradients would not be averaged over the ranks: "
    "{names}. Add and replace layers before `setup`; what is there then may be frozen and unfrozen at any time."
)


def _flat(of: Any, dicts: Iterable[dict[str, Any]]) -> Iterator[Any]:
    """What `of` gives of each dict, in order, and an end: a shorter list than another is not like it."""
    return chain(chain.from_iterable(map(of, dicts)), _AT_END)
