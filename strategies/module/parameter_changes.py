"""Changes of a model after `setup`: layers that are added, replaced, frozen or unfrozen.

Strategies list the parameters that they train once, because that takes longer than the rest of our step. So each
forward compares the dicts of all modules with their contents at setup, in loops that run in C: 0.1 ms for 1000
parameters. torch's `register_module_parameter_registration_hook` would be global instead.
"""

from itertools import chain
from operator import is_
from typing import Any, final

import torch
from torch import Tensor, nn

from fabric.strategies.tensors.dtensor import as_sharded
from fabric.strategies.tensors.parameters import name_some

_flat = chain.from_iterable


@final
class ParameterSnapshot:
    """The modules and parameters that a model has when this is constructed. Holds references to them.

    `by_name`: compare parameters by name instead of identity, for backends that replace the objects.
    """

    def __init__(self, module: nn.Module, *, by_name: bool = False) -> None:
        self.modules = list(module.modules())
        self.parameters = list(module.parameters())
        self.buffers: list[dict[str, Tensor | None]] = [part._buffers for part in self.modules]
        children: list[dict[str, Any]] = [part._modules for part in self.modules]
        own: list[dict[str, Any]] = [part._parameters for part in self.modules]
        self._by_value, self._by_name = (children, own) if by_name else (children + own, [])
        self._values = list(_flat(map(dict.values, self._by_value)))
        self._names = list(_flat(self._by_name))

    def is_as_it_was(self) -> bool:
        """Whether the model still has the same modules and parameters."""
        values = list(_flat(map(dict.values, self._by_value)))
        return (
            len(values) == len(self._values)
            and all(map(is_, values, self._values))
            and list(_flat(self._by_name)) == self._names
        )

    def trainable(self) -> list[nn.Parameter]:
        """The parameters that require gradients now."""
        return [parameter for parameter in self.parameters if parameter.requires_grad]

    def new_since(self, before: "ParameterSnapshot | None") -> list[Tensor]:
        """The parameters, and the buffers of modules, that are not in `before`; None: all.

        New buffers of modules that are in `before` are left out: a forward may have assigned them on this rank alone.
        """
        known = set() if before is None else {id(each) for each in (*before.parameters, *before.modules)}
        new = [part for part in self.modules if id(part) not in known]
        buffers = [buffer for part in new for buffer in part._buffers.values() if buffer is not None]
        return [*(each for each in self.parameters if id(each) not in known), *dict.fromkeys(buffers)]


@final
class AddedParameters:
    """Parameters that a model did not have when this was constructed, for backends that list parameters once.

    `by_name`: see `ParameterSnapshot`; a parameter that replaces another under the same name is then not found.
    `unfrozen`: parameters that were frozen count, too, once they require gradients. `frozen`: added parameters that
    require no gradients count, too.
    """

    def __init__(
        self, module: nn.Module, *, by_name: bool = False, unfrozen: bool = False, frozen: bool = False
    ) -> None:
        self._module, self._by_name, self._frozen = module, by_name, frozen
        self._contents = ParameterSnapshot(module, by_name=by_name)
        there = self._keys()
        self._there: set[Any] = set(there)
        self._unfrozen = [named for named in there.values() if unfrozen and not named[1].requires_grad]
        self._found: list[tuple[str, nn.Parameter]] = []

    def found(self) -> list[tuple[str, nn.Parameter]]:
        """The added parameters, with their names. Cheap if the model has not changed."""
        if not self._contents.is_as_it_was():
            self._contents = ParameterSnapshot(self._module, by_name=self._by_name)
            self._found = [named for key, named in self._keys().items() if key not in self._there]
        return self._found

    def refuse(self, instead: str | None = None) -> None:
        """Raise RuntimeError if an added parameter requires gradients and is not a DTensor of the user's, in a forward
        that computes gradients. `instead`: the advice of the error; by default, to add it before `setup`."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():  # the compiler cannot trace the comparison
            return
        found = self.found()
        if not found and not self._unfrozen:  # in nearly every step
            return
        added = [named for named in found if named[1].requires_grad or self._frozen]
        unfrozen = [named for named in self._unfrozen if named[1].requires_grad]
        names = [name for name, each in (*added, *unfrozen) if as_sharded(each) is None]
        if not names:
            return
        model = type(self._module).__name__
        if instead is None:
            raise RuntimeError(ADDED.format(model=model, names=name_some(names)))
        raise RuntimeError(
            f"{len(names)} parameters of `{model}` ({name_some(names)}) were added or unfrozen after `fabric.setup`. "
            f"{instead}"
        )

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
