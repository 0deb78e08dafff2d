"""All ranks run the parts of a model in one order, where a part's weights travel as it runs. Another order raises.

Ranks pair what they send by when they send it. Parts alike that two of them run in another order, as experts chosen by
each rank for itself, would be computed with halves of each other's weights, and their gradients added, without a word.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any, final

import torch
from torch import nn

from fabric.strategies.module.copies import Hook
from fabric.strategies.module.forward import Around
from fabric.strategies.runtime import Runtime
from fabric.strategies.sharding.dtensor import user_class
from fabric.strategies.torch_internals import disable_dynamo


@final
class ExecutionOrder:
    """The order in which one model ran its `parts`, those whose weights travel, compared with that of other ranks.

    Each forward sends a checksum of its order. In training it travels while `fabric.backward` runs and is compared
    after it, before any step; in evaluation, or without gradients, it is compared before the forward returns.
    """

    def __init__(self, runtime: Runtime, module: nn.Module, parts: Iterable[Any]) -> None:
        self._runtime, self._module = runtime, module
        self._sentence = _APART.format(name=user_class(module).__name__)
        self._ran: list[str] = []
        self._compare: Callable[[], None] | None = None
        chosen = set(parts)
        named = {name: part for name, part in module.named_modules() if name and part in chosen}
        self._is_needed = runtime.world.size > 1 and len(named) > 1
        self._hooks = []
        if self._is_needed:
            notes = {part: Hook(partial(self._note, name)) for name, part in named.items()}
            self._hooks = [part.register_forward_pre_hook(note) for part, note in notes.items()]
            # Before anybody's hooks, for those of a backend may send something already.
            self._hooks.append(module.register_forward_pre_hook(Hook(self._enter), prepend=True))

    def around(self, inner: Around) -> Around:
        """`inner`, and the comparison around it. Ranks: all run what comes of it; where two differ, all raise
        RuntimeError: in it, in the check that `watch` gives, or in the next forward."""
        if not self._is_needed:
            return inner

        def compared(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            self._begin()
            output = inner(function, args, kwargs)
            self._start()
            if not (self._module.training and torch.is_grad_enabled()):
                self._finish()
            return output

        return compared

    def watch(self) -> Callable[[], None] | None:
        """See `GradientSync.watch`."""
        return None if self._compare is None else self._finish

    def release(self) -> None:
        """Take the hooks off the parts."""
        for hook in self._hooks:
            hook.remove()

    @disable_dynamo
    def _begin(self) -> None:
        self._finish()
        self._ran.clear()  # of what backward computed again

    @disable_dynamo
    def _note(self, name: str, part: nn.Module, args: Any) -> None:
        self._ran.append(name)

    @disable_dynamo
    def _start(self) -> None:
        self._compare = start_comparing(self._runtime, list(self._ran), self._sentence)

    @disable_dynamo
    def _enter(self, module: nn.Module, args: Any) -> None:
        self._finish()

    @disable_dynamo
    def _finish(self) -> None:
        compare, self._compare = self._compare, None
        if compare is not None:
            compare()


def start_comparing(runtime: Runtime, names: Sequence[str], sentence: str) -> Callable[[], None]:
    """Compare names over the ranks. What is given out raises RuntimeError where another rank brought other names, or
    in another order, and on every rank. Ranks: all call this, and then that.

    `sentence`: what that means, and what to write instead; where they first differ is said after it.
    """
    checksum = zlib.crc32("\n".join(names).encode())
    gathered = runtime.collective.start_all_gather(torch.tensor([checksum]))  # on the CPU: no device waits for it

    def compare() -> None:
        if (gathered() != checksum).any():
            raise RuntimeError(f"{sentence} {_first_apart(runtime.collective.all_gather_object(list(names)))}")

    return compare


def _first_apart(named: Sequence[Sequence[str]]) -> str:
    """Where lists of names, one of each rank, first differ. They do."""
    for place, several in enumerate(zip_longest(*named)):
        for rank, name in enumerate(several):
            if name != several[0]:
                return f"Number {place} is {_quoted(several[0])} on rank 0, and {_quoted(name)} on rank {rank}."
    raise AssertionError("no two lists differ")


def _quoted(name: str | None) -> str:
    return "none" if name is None else repr(name)


_APART = (
    "Ranks ran parts of `{name}` in different orders. Weights of a part travel as it runs, and ranks pair what they "
    "send by when they send it. Run the same parts in the same order on every rank, or pass "
    "`strategy='ddp_find_unused_parameters_true'`."
)
