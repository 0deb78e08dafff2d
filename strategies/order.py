"""All ranks run the parts of a model in one order, where a part's weights travel as it runs. Another order raises.

Ranks pair what they send by when they send it. Parts alike that two of them run in another order, as experts chosen by
each rank for itself, would be computed with halves of each other's weights, and their gradients added, without a word.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import nn

from fabric.strategies.forward import Around
from fabric.strategies.runtime import Runtime


def in_one_order(
    runtime: Runtime,
    module: nn.Module,
    travels: Callable[[nn.Module], bool],
    around: Around | None,
) -> tuple[Around | None, Callable[[], None]]:
    """`around` with a comparison of the order in which ranks ran parts of the module, and what takes its hooks off.

    `travels`: whether a part's weights travel as it runs. Ranks: all run what comes of it. Where two differ it raises
    RuntimeError on all of them.
    """
    parts = {name: part for name, part in module.named_modules() if name and travels(part)}
    if runtime.world.size == 1 or len(parts) < 2:
        return around, lambda: None
    ran: list[str] = []
    hooks = [part.register_forward_pre_hook(partial(_note, ran, name)) for name, part in parts.items()]

    def compared(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        ran.clear()  # of what backward computed again
        output = function(*args, **kwargs) if around is None else around(function, args, kwargs)
        refuse_apart(runtime, ran, _APART.format(name=type(module).__name__))
        return output

    def undo() -> None:
        for hook in hooks:
            hook.remove()

    return compared, undo


@torch._disable_dynamo  # type: ignore[attr-defined]
def refuse_apart(runtime: Runtime, names: Sequence[str], sentence: str) -> None:
    """Raise RuntimeError on every rank where two brought other names, or in another order. Ranks: all call it.

    `sentence`: what that means, and what to write instead; where they first differ is said after it.
    """
    mark = torch.tensor([zlib.crc32("\n".join(names).encode())], device=runtime.device)
    if (runtime.collective.all_gather(mark) != mark).any():
        raise RuntimeError(f"{sentence} {_first_apart(runtime.collective.all_gather_object(list(names)))}")


def _first_apart(named: Sequence[Sequence[str]]) -> str:
    """Where lists of names, one of each rank, first differ. They do."""
    for place, several in enumerate(zip_longest(*named)):
        for rank, name in enumerate(several):
            if name != several[0]:
                return f"Number {place} is {_quoted(several[0])} on rank 0, and {_quoted(name)} on rank {rank}."
    raise AssertionError("no two lists differ")


def _quoted(name: str | None) -> str:
    return "none" if name is None else repr(name)


@torch._disable_dynamo  # type: ignore[attr-defined]
def _note(ran: list[str], name: str, module: nn.Module, args: Any) -> None:
    ran.append(name)


_APART = (
    "Ranks ran parts of `{name}` in different orders. Weights of a part travel as it runs, and ranks pair what they "
    "send by when they send it. Run the same parts in the same order on every rank, or pass "
    "`strategy='ddp_find_unused_parameters_true'`."
)
