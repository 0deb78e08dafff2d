"""Parameters that only some ranks use in a backward, such as experts that each rank chooses for its own samples.

torch packs the gradients that a rank has of one unit side by side, and sums those of all ranks by position. So ranks
that used different parameters of a unit would add gradients of different parameters, and gloo aborts if the sizes
differ. From torch 2.13 on, a rank can send zeros for those that it did not use. A parameter that no rank used then gets
None again, as in plain PyTorch: an optimizer would change it even if its gradient is zero. With an older torch, ranks
that used different parameters raise.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import partial
from typing import TypeAlias, final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fabric.strategies.runtime import Runtime
from fabric.strategies.sharding.dtensor import local_part, user_class
from fabric.strategies.sharding.execution_order import start_comparing
from fabric.strategies.sharding.gathered import Gathered, unreduced

_Mark: TypeAlias = tuple[Tensor, int] | None
"""A gradient, and its version counter."""


@final
class SameGradients:
    """Compares which gradients each backward of one model computed.

    Cost: a message of 8 bytes for each backward that reduces gradients, which all ranks wait for, and a hook for each
    parameter. Where ranks differ, they also exchange names.
    """

    def __init__(self, runtime: Runtime, module: nn.Module, gathered: Gathered) -> None:
        self._runtime = runtime
        self._sentence = _APART.format(name=user_class(module).__name__)
        names: dict[Tensor, str] = {parameter: name for name, parameter in module.named_parameters()}
        self._params = [(names[each.sharded_param], each) for each in gathered.params()]
        self._is_needed = runtime.world.size > 1 and bool(self._params)
        self._sends_zeros = self._is_needed and gathered.send_zeros_for_unused()
        self._hooked: dict[str, RemovableHandle] = {}
        self._used: set[str] = set()

    def watch(self) -> Callable[[], None] | None:
        """See `GradientSync.watch`."""
        if not self._is_needed:
            return None
        if self._sends_zeros:
            self._note_uses()
        return partial(self._compare, [_mark(each.sharded_param.grad) for _, each in self._params])

    def release(self) -> None:
        """Remove the hooks."""
        for hook in self._hooked.values():
            hook.remove()

    def _note_uses(self) -> None:
        """Note which gradients are accumulated already, and from now on which are computed."""
        self._used = {name for name, each in self._params if unreduced(each)}
        for name, each in self._params:
            copy = vars(each).get("_unsharded_param")  # absent before the first forward
            if name not in self._hooked and copy is not None and copy.requires_grad:
                self._hooked[name] = copy.register_post_accumulate_grad_hook(partial(self._note, name))

    def _note(self, name: str, parameter: Tensor) -> None:
        self._used.add(name)

    def _compare(self, before: list[_Mark]) -> None:
        params = zip(self._params, before, strict=True)
        reduced = {
            name: (each, mark) for (name, each), mark in params if not _is_as_before(each.sharded_param.grad, mark)
        }
        if not reduced:  # then other ranks reduced none
            return
        if not self._sends_zeros:
            start_comparing(self._runtime, list(reduced), self._sentence)()
            return
        used = self._used_by_any([name for name in reduced if name in self._used])
        for name, (each, mark) in reduced.items():
            if name not in used and mark is None:
                each.sharded_param.grad = None

    def _used_by_any(self, names: list[str]) -> set[str]:
        """The names of all ranks. Ranks: all."""
        collective = self._runtime.collective
        checksum = zlib.crc32("\n".join(names).encode())
        if (collective.all_gather(torch.tensor([checksum])) == checksum).all():
            return set(names)
        return set().union(*collective.all_gather_object(names))


def _mark(gradient: Tensor | None) -> _Mark:
    return None if gradient is None else (gradient, local_part(gradient)._version)


def _is_as_before(gradient: Tensor | None, mark: _Mark) -> bool:
    if gradient is None or mark is None:
        return gradient is None and mark is None
    return gradient is mark[0] and local_part(gradient)._version == mark[1]


_APART = (
    "Ranks computed gradients of different parameters of `{name}`, and `fully_shard` adds up gradients by their place "
    "among those that a rank has. The weights are unchanged; `optimizer.zero_grad()` discards the gradients. Use the "
    "same parameters on every rank, or pass `strategy='ddp_find_unused_parameters_true'`."
)
