"""Activation checkpointing: a submodule's activations are not kept, but computed again in backward.

Trades a second forward of the submodule for the memory between its input and output (Chen et al., arXiv:1604.06174).
The submodule stays the user's own object, and no name changes. Numbers stay the same: what is computed again finds the
random numbers, the autocast, the default dtype and the buffers of the first time, and changes no buffer once more. It
calls the submodule's hooks once, but what its forward does to objects of the user's, it does twice.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fabric.strategies.module.forward import outside_of_graphs
from fabric.strategies.module.wrap_policy import Policy, matching
from fabric.strategies.undo import undo_all


def recompute(module: nn.Module, policy: Policy | None) -> Callable[[], None]:
    """Let the submodules that the policy means compute their activations again. Returns what undoes it.

    Raises: ValueError: it means none. TypeError: it is no policy.
    """
    return undo_all(_replace_forward(part) for part in matching(module, policy, "activation_checkpointing_policy"))


def rebind_copies(module: nn.Module) -> None:
    """Let submodules that share attributes with those they were copied from, as DataParallel's do, compute with their
    own parameters."""
    for part in module.modules():
        forward = vars(part).get("forward")
        if isinstance(forward, _Recomputed):
            object.__setattr__(part, "forward", forward.of(part))


def _replace_forward(part: nn.Module) -> Callable[[], None]:
    given = vars(part).get("forward")
    object.__setattr__(part, "forward", _Recomputed(part, part.forward))

    def undo() -> None:
        if given is None:
            object.__delattr__(part, "forward")
        else:
            object.__setattr__(part, "forward", given)

    return undo


@final
class _Recomputed:
    """A submodule's forward, computed again in backward."""

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

    def of(self, part: nn.Module) -> _Recomputed:
        """The same for a copy of the submodule."""
        function = getattr(self._function, "__func__", None)
        return self if part is self._part or function is None else _Recomputed(part, function.__get__(part))

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._part, "forward")  # of a copy: there it finds the method of the class


def _contexts(part: nn.Module) -> tuple[_Computing, _ComputingAgain]:
    first = _Computing(part)
    return first, _ComputingAgain(first)


# Note [Buffers change once]
# What forward writes into a buffer in backward is written into a copy. The copy has the values of the first time, and
# those are kept for buffers that changed then. Whether one did is told by its version, which torch's BatchNorm leaves
# alone (2.13); but what BatchNorm computes while it trains does not depend on its statistics. A
# graph of the compiler's with a checkpoint in it cannot write into other tensors, and so it ends before such a part.


@final
class _Computing:
    """Within it, forward runs the first time. Keeps the buffers that it changes as they were before."""

    def __init__(self, part: nn.Module) -> None:
        self.part = part
        self.dtype = torch.get_default_dtype()
        self.changed: dict[tuple[nn.Module, str], Tensor] = {}

    def __enter__(self) -> None:
        self._before = [
            (owner, name, buffer, buffer._version, buffer.detach().clone())
            for owner, name, buffer in _buffers_in(self.part)
        ]

    def __exit__(self, *exception: object) -> None:
        self.changed = {
            (owner, name): copy
            for owner, name, buffer, version, copy in self._before
            if owner._buffers.get(name) is not buffer or buffer._version != version
        }
        del self._before


@final
class _ComputingAgain:
    """Within it, forward runs in backward: once for each backward through the same graph."""

    def __init__(self, first: _Computing) -> None:
        self._first = first

    def __enter__(self) -> None:
        self._dtype = torch.get_default_dtype()
        torch.set_default_dtype(self._first.dtype)
        self._now = list(_buffers_in(self._first.part))
        for owner, name, buffer in self._now:
            owner._buffers[name] = self._first.changed.get((owner, name), buffer).detach().clone()

    def __exit__(self, *exception: object) -> None:
        for owner, name, buffer in self._now:
            owner._buffers[name] = buffer
        torch.set_default_dtype(self._dtype)
        del self._now


def _buffers_in(part: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    for owner in part.modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                yield owner, name, buffer
