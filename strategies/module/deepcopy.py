"""Copies and pickles of a prepared module are plain modules, or raise an error that says what to write.

A module keeps hooks in its `__dict__`, and `copy.deepcopy` follows them: into the strategy, its collective and the
process group, which cannot be copied. So hooks that strategies register on a user's module are `Hook`s. They do
nothing in a copy, and `torch.compile` skips them: compiled for each submodule, they would exceed its recompile limit.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn, final

from torch import nn

from fabric.strategies.torch_internals import disable_dynamo
from fabric.strategies.undo import replace_attributes


@final
class Hook:
    """A hook that a strategy registers: never compiled, and without effect in copies and pickles of the module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    @disable_dynamo
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return Hook, (_nothing,)


def _nothing(*args: Any, **kwargs: Any) -> None:
    """The function of a `Hook` in a copy."""


@contextmanager
def user_hooks_alone(module: nn.Module) -> Iterator[None]:
    """Context: the module and its submodules run the user's forward hooks, and none of a strategy or its backend."""
    removed = []
    for hooks in hooks_of(module):
        before = dict(hooks)
        for key, hook in before.items():
            if isinstance(hook, Hook) or getattr(hook, "__module__", "").startswith(_OF_BACKENDS):
                del hooks[key]
        removed.append((hooks, before))
    try:
        yield
    finally:
        for hooks, before in removed:
            added = {key: hook for key, hook in hooks.items() if key not in before}
            hooks.clear()
            hooks.update(before | added)


_OF_BACKENDS = ("fabric.", "torch.distributed.", "deepspeed.", "fairscale.")


def forget_copied_hooks(module: nn.Module) -> None:
    """Remove the hooks that do nothing from a copy."""
    for hooks in hooks_of(module):
        for key in [key for key, hook in hooks.items() if isinstance(hook, Hook) and hook.function is _nothing]:
            del hooks[key]


def hooks_of(module: nn.Module) -> Iterator[dict[int, Callable[..., Any]]]:
    """The dicts of forward hooks of a module and its submodules."""
    for part in module.modules():
        yield from (part._forward_pre_hooks, part._forward_hooks)


def refuse_copies(module: nn.Module, sentence: str) -> Callable[[], None]:
    """Make copies and pickles of a module raise RuntimeError with this sentence. Returns a function that undoes it."""
    refuse = partial(_refuse, type(module).__name__, sentence)
    return replace_attributes(module, __deepcopy__=refuse, __reduce_ex__=refuse)


def _refuse(name: str, sentence: str, _: Any) -> NoReturn:
    raise RuntimeError(f"`{name}`: {sentence}")


IN_SHARDS = (
    "A prepared module whose parameters are sharded cannot be copied or pickled: this rank has a shard of each. For a "
    "target network or an average of weights, copy the module before it is set up, and set up the copy, too: "
    "`target = fabric.setup_module(copy.deepcopy(model))`, or `fabric.setup_module(AveragedModel(model))`, before "
    "`model, optimizer = fabric.setup(model, optimizer)`. `target.load_state_dict(model.state_dict())` then copies "
    "shards; `fabric.save` writes whole tensors."
)
IN_STAGES = (
    "A prepared module in a pipeline cannot be copied or pickled: this rank has some of its layers. Copy the module "
    "before it is set up; `fabric.save` writes all of it."
)
