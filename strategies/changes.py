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

from torch import Tensor, nn

_END = object()
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
        self._children, self._own = list(filter(None, children)), list(filter(None, own))
        self._of_own: Any = dict.keys if by_name else dict.values
        self._same: Any = eq if by_name else is_
        self._children_then = list(_flat(dict.values, self._children))
        self._own_then = list(_flat(self._of_own, self._own))

    def is_as_it_was(self) -> bool:
        """Whether the model has the same modules and parameters still."""
        return (
            not any(self._empty)
            and all(map(is_, _flat(dict.values, self._children), self._children_then))
            and all(map(self._same, _flat(self._of_own, self._own), self._own_then))
        )

    def flags(self) -> list[bool]:
        """Which of the parameters require gradients now."""
        return list(map(_requires_grad, self.parameters))

    def trainable(self) -> list[nn.Parameter]:
        """Those that require gradients now."""
        return [parameter for parameter in self.parameters if parameter.requires_grad]

    def tensors(self) -> Iterator[Tensor]:
        """Parameters, and the buffers that the modules have now."""
        yield from self.parameters
        for part in self.modules:
            yield from (buffer for buffer in part._buffers.values() if buffer is not None)


def _flat(of: Any, dicts: Iterable[dict[str, Any]]) -> Iterator[Any]:
    """What `of` gives of each dict, in order, and an end: a shorter list than another is not like it."""
    return chain(chain.from_iterable(map(of, dicts)), (_END,))
