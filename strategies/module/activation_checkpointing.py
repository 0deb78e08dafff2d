"""Activation checkpointing: a submodule's activations are not saved, but recomputed in backward.

Trades a second forward of the submodule for the memory between its input and output (Chen et al., arXiv:1604.06174).
The submodule object and all names stay the same. So do the numbers: the recomputation has the random state, the
autocast state and the buffers of the first forward, and changes no buffer again. The submodule's hooks are called
once; side effects of its forward on other Python objects happen twice.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fabric.strategies.module.forward import outside_of_graphs
from fabric.strategies.module.wrap_policy import Policy, matching
from fabric.strategies.undo import replace_attributes, undo_all


def recompute(module: nn.Module, policy: Policy | None) -> Callable[[], None]:
    """Recompute the activations of the submodules that `policy` selects. Returns a function that undoes it.

    Raises: ValueError: it selects none. TypeError: it is not a policy.
    """
    parts = chosen_blocks(module, policy, "activation_checkpointing_policy")
    return undo_all(replace_attributes(part, forward=Recomputed(part, part.forward)) for part in parts)


def chosen_blocks(module: nn.Module, policy: Policy | None, option: str) -> list[nn.Module]:
    """The submodules that the policy of this option selects. Raises ValueError: it selects none."""
    parts = matching(module, policy, option)
    if policy is not None and not parts:
        raise ValueError(
            f"`{option}='blocks'`: `{type(module).__name__}` has no blocks, several modules of one class in a "
            "`ModuleList` or `Sequential` that hold its parameters. Name classes of its submodules."
        )
    return parts


@final
class Recomputed:
    """A submodule's forward, recomputed in backward."""

    def __init__(self, part: nn.Module, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self._part, self._function = part, function
        self._has_buffers = any(True for _ in part.buffers())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._function(*args, **kwargs)
        if not torch.compiler.is_compiling():
            return self._run(self._function, args, kwargs)
        if self._has_buffers:  # Note [Buffers change once]
            return outside_of_graphs(self._run, self._function, args, kwargs)
        return checkpoint(self._function, *args, use_reentrant=False, **kwargs)

    def _run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        contexts = functools.partial(_contexts, self._part)
        return checkpoint(function, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    def of(self, part: nn.Module) -> "Recomputed":
        """The same for `part`, a copy of the submodule."""
        function = getattr(self._function, "__func__", None)
        return self if part is self._part or function is None else Recomputed(part, function.__get__(part))

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._part, "forward")  # unpickled in a copy, whose class has the plain method


def _contexts(part: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    changed: dict[tuple[nn.Module, str], Tensor] = {}
    return _computing(part, changed), _ComputingAgain(part, changed)


# Note [Buffers change once]
# The recomputation writes into copies of the buffers. They have the values from before the first forward, which are
# saved for buffers that it changed. A change is recognised by the buffer's version counter, which torch's BatchNorm
# does not increase (2.13); but in training the output of BatchNorm does not depend on its running statistics. A
# compiled graph with a checkpoint in it cannot exchange buffers, so the graph breaks before a submodule with buffers.


@contextmanager
def _computing(part: nn.Module, changed: dict[tuple[nn.Module, str], Tensor]) -> Iterator[None]:
    """Context of the first forward. Adds the former values of the buffers that it changes to `changed`."""
    before = [(*named, named[2]._version, named[2].detach().clone()) for named in _buffers_in(part)]
    yield
    for owner, name, buffer, version, copy in before:
        if owner._buffers.get(name) is not buffer or buffer._version != version:
            changed[owner, name] = copy


@final
class _ComputingAgain(AbstractContextManager[None]):
    """Context of the recomputation: entered once for each backward through the same graph."""

    def __init__(self, part: nn.Module, changed: dict[tuple[nn.Module, str], Tensor]) -> None:
        self._part, self._changed = part, changed

    def __enter__(self) -> None:
        self._now = list(_buffers_in(self._part))
        for owner, name, buffer in self._now:
            owner._buffers[name] = self._changed.get((owner, name), buffer).detach().clone()

    def __exit__(self, *exception: object) -> None:
        for owner, name, buffer in self._now:
            owner._buffers[name] = buffer
        del self._now


def _buffers_in(part: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    for owner in part.modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                yield owner, name, buffer
