"""Checks that all ranks run the submodules whose parameters are gathered in the same order; another order raises.

Collectives are matched by issue order. If two ranks ran equally shaped submodules in different orders, for example
experts that each rank chooses by itself, each would compute with shards of the other's weights, and gradients would be
added to the wrong weights, without an error.
"""

import zlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any, final

import torch
from torch import nn

from fabric.strategies.module.deepcopy import Hook
from fabric.strategies.module.forward import Around
from fabric.strategies.runtime import Runtime
from fabric.strategies.tensors.dtensor import user_class
from fabric.strategies.torch_internals import disable_dynamo


@final
class ExecutionOrder:
    """The order in which one model ran its `parts`, the submodules that are gathered, compared with other ranks.

    Each forward sends a checksum of its order. In training it is sent while `fabric.backward` runs and compared after
    it, before any step; in evaluation, or without gradients, it is compared before the forward returns.
    """

    def __init__(self, runtime: Runtime, module: nn.Module, parts: Iterable[Any]) -> None:
        self._runtime, self._module = runtime, module
        self._sentence = _DIFFERENT.format(name=user_class(module).__name__)
        self._ran: list[str] = []
        self._compare: Callable[[], None] | None = None
        chosen = set(parts)
        named = {name: part for name, part in module.named_modules() if name and part in chosen}
        self._is_needed = runtime.world.size > 1 and len(named) > 1
        self._hooks = []
        if self._is_needed:
            notes = {part: Hook(partial(self._note, name)) for name, part in named.items()}
            self._hooks = [part.register_forward_pre_hook(note) for part, note in notes.items()]
            # Before all other hooks, because a backend's hooks may communicate.
            self._hooks.append(module.register_forward_pre_hook(Hook(self._finish), prepend=True))

    def around(self, inner: Around) -> Around:
        """`inner` with the comparison around it. Ranks: all run the result; if orders differ, all raise RuntimeError:
        in it, in the function that `watch` returns, or in the next forward."""
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
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    @disable_dynamo
    def _begin(self) -> None:
        self._finish()
        self._ran.clear()  # of submodules that backward recomputed

    @disable_dynamo
    def _note(self, name: str, part: nn.Module, args: Any) -> None:
        self._ran.append(name)

    @disable_dynamo
    def _start(self) -> None:
        trains = torch.is_grad_enabled()  # not `module.training`: some train in evaluation mode
        self._compare = start_comparing(self._runtime, list(self._ran), self._sentence, trains=trains)

    @disable_dynamo
    def _finish(self, *_: Any) -> None:
        compare, self._compare = self._compare, None
        if compare is not None:
            compare()


def start_comparing(runtime: Runtime, names: Sequence[str], sentence: str, trains: bool = True) -> Callable[[], None]:
    """Start to compare names over the ranks. The returned function raises RuntimeError on every rank if names, or their
    order, differ. Ranks: all call this, and then that function.

    `sentence`: what a difference means, and what to write instead; the first difference is appended. `trains`: whether
    a backward follows. If it does on some ranks only, the others raise at once, before they make the next collective.
    """
    checksum = zlib.crc32("\n".join(names).encode())
    # On the CPU: does not wait for the device.
    gathered = runtime.collective.start_all_gather(torch.tensor([checksum, trains]))

    def compare() -> None:
        checksums, training = gathered().unbind(-1)
        if (training != trains).any():
            raise RuntimeError(_UNEVEN.format(trains=int(training.argmax()), evaluates=int(training.argmin())))
        if (checksums != checksum).any():
            raise RuntimeError(f"{sentence} {_first_difference(runtime.collective.all_gather_object(list(names)))}")

    return compare


def _first_difference(named: Sequence[Sequence[str]]) -> str:
    """The first difference between the ranks' lists of names. At least two lists differ."""
    for place, several in enumerate(zip_longest(*named)):
        for rank, name in enumerate(several):
            if name != several[0]:
                return f"Number {place} is {_quoted(several[0])} on rank 0, and {_quoted(name)} on rank {rank}."
    raise AssertionError("no two lists differ")


def _quoted(name: str | None) -> str:
    return "none" if name is None else repr(name)


_UNEVEN = (
    "Rank {trains} runs a forward with gradients while rank {evaluates} runs one without. Ranks ran different "
    "numbers of forwards, as where texts are generated to different lengths. A forward all-gathers parameters, so all "
    "ranks run equally many: go on while `fabric.all_reduce(unfinished, reduce_op='max')`."
)
_DIFFERENT = (
    "Ranks ran submodules of `{name}` in different orders. A submodule's parameters are all-gathered when it runs, and "
    "collectives are matched by issue order. Run the same submodules in the same order on every rank, or pass "
    "`strategy='ddp_find_unused_parameters_true'`, or, for fsdp, `FSDPStrategy(auto_wrap_policy=None)`, which gathers "
    "the whole model at once."
)
