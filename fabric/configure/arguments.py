"""Checks of the arguments of `Fabric`'s methods, which raise at the user's call, before anything has happened.

Only arguments that Python or torch would misinterpret, or report from one of our lines, are checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from torch import Tensor, nn
from torch.optim import Optimizer

from fabric.checks.nonfinite import OnNonfinite
from fabric.strategies.checkpoint.run_state import NAME
from fabric.strategies.checkpoint.state import is_stateful
from fabric.strategies.collectives.collective import Collective
from fabric.strategies.data.share import Uneven, Use


def check_function(function: object) -> None:
    """Raise TypeError if `launch` was given something that cannot be called."""
    if function is not None and not callable(function):
        raise TypeError(
            f"`fabric.launch({function!r})` was given a `{type(function).__name__}`. Pass a function `(fabric, ...)`, "
            "or nothing: then the script continues on every rank."
        )


def check_module(module: object) -> None:
    """Raise TypeError if the first argument of `setup` is no module."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"{_what(module)} was passed as the module. {_SETUP}")


def check_optimizers(*optimizers: object) -> None:
    """Raise TypeError if an argument is no optimizer, or one whose `__init__` did not run."""
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"{_what(optimizer)} was passed as an optimizer. {_SETUP}")
        if "_optimizer_step_pre_hooks" not in vars(optimizer):
            raise TypeError(_UNINITIALISED.format(name=type(optimizer).__name__))


def check_loss(loss: object) -> None:
    """Raise TypeError if `backward` was given something else than a tensor."""
    if not isinstance(loss, Tensor):
        raise TypeError(
            f"`fabric.backward(loss)` was given a `{type(loss).__name__}`. Pass the loss as a tensor that was computed "
            "from the model's output: a number, as `.item()` returns, has no gradient, and of a dictionary or an "
            "output object pass the entry (`output.loss`)."
        )


def check_group(method: str, group: object) -> None:
    """Raise TypeError if the group of a collective is none, such as the reduction in its place."""
    if group is not None and not isinstance(group, Collective):
        raise TypeError(
            f"`fabric.{method}` was given {group!r} as the group. Pass `fabric.collective.split(ranks)`, or leave it "
            "out for all ranks; a reduction is passed by name: `fabric.all_reduce(data, reduce_op='sum')`."
        )


def check_metrics(metrics: Mapping[str, Any]) -> None:
    """Raise ValueError if a tensor has several elements."""
    for name, value in metrics.items():
        if isinstance(value, Tensor) and value.numel() != 1:
            raise ValueError(
                f"`fabric.log({name!r}, ...)`: a tensor of shape {tuple(value.shape)} is not one number. Log its mean, "
                "or each element under a name of its own."
            )


def check_use(use: object) -> None:
    """Raise ValueError for an unknown `use`."""
    if use is not None and use not in get_args(Use):
        words = ", ".join(map(repr, get_args(Use)))
        raise ValueError(f"`setup_dataloaders(use={use!r})`: write one of {words}, or leave it out to train.")


def check_uneven(uneven: object, use: object) -> None:
    """Raise ValueError for an unknown `uneven`, or for a `use` under which ranks may end independently."""
    words = ", ".join(map(repr, get_args(Uneven)))
    if uneven is not None and uneven not in get_args(Uneven):
        raise ValueError(f"`setup_dataloaders(uneven={uneven!r})`: write one of {words}, or leave it out.")
    if uneven not in (None, "repeat") and use not in (None, "train"):
        raise ValueError(
            f"`setup_dataloaders(uneven={uneven!r}, use={use!r})`: every rank evaluates all of its batches. Leave "
            "`uneven` out, or write `uneven='repeat'`, with which all ranks run equally many forwards."
        )


def check_dispatch(dispatch: bool, uneven: object, distribute: bool, use: object) -> None:
    """Raise ValueError if `dispatch` comes with what makes each rank read for itself."""
    repeats = uneven == "repeat" and use not in (None, "train")
    if dispatch and ((uneven is not None and not repeats) or not distribute):
        other = f"uneven={uneven!r}" if uneven is not None else "use_distributed_sampler=False"
        raise ValueError(
            f"`setup_dataloaders(dispatch=True, {other})`: rank 0 reads for all ranks, so none has a loader of its "
            "own. Pass one of the two."
        )


def check_on_nonfinite(word: object) -> None:
    """Raise ValueError if `word` is no action of `guard_gradients`."""
    if word is not None and word not in get_args(OnNonfinite):
        raise ValueError(
            f"`guard_gradients({word!r})`: write 'raise' to stop at gradients that are not finite, 'skip' to leave the "
            "step out, or None to check nothing."
        )


def check_limits(clip_val: float | None, max_norm: float | None) -> None:
    """Raise ValueError unless exactly one limit is given, and it is not negative."""
    written = f"`clip_gradients(clip_val={clip_val}, max_norm={max_norm})`"
    if clip_val is not None and max_norm is None:
        limit = clip_val
    elif clip_val is None and max_norm is not None:
        limit = max_norm
    else:
        raise ValueError(f"{written}: pass exactly one of the two.")
    if not limit >= 0:  # also refuses NaN
        raise ValueError(f"{written}: a negative limit would flip the sign of gradients. Write a number from 0 on.")


def check_named(method: str, state: object) -> None:
    """Raise TypeError if `state` is no mapping with names, ValueError if it uses a reserved name."""
    if not isinstance(state, Mapping):
        raise TypeError(
            f"`fabric.{method}(path, ...)` was given a `{type(state).__name__}`. Give it a name: "
            "`{'model': model}`. `load_raw` reads a file that holds the bare state of one object."
        )
    if NAME in state:
        raise ValueError(
            f"`fabric.{method}(path, {{{NAME!r}: ...}})`: this name is reserved for the run's random generators and "
            "loss scale. Write another one."
        )


def check_filter(choose: object) -> None:
    """Raise TypeError if the `filter` of a save is not a mapping of functions."""
    if choose is not None and not (isinstance(choose, Mapping) and all(map(callable, choose.values()))):
        raise TypeError(
            f"`filter` of `fabric.save` was given a `{type(choose).__name__}`. Write "
            "`filter={'model': lambda name, value: ...}`, with a function for each entry of the state to select from."
        )


def check_has_state(obj: object) -> None:
    """Raise TypeError if the object of `load_raw` has no state."""
    if not is_stateful(obj):
        raise TypeError(
            f"`fabric.load_raw(path, ...)` was given a `{type(obj).__name__}`. Pass one object that has "
            "`load_state_dict`, or write `fabric.load(path, {'model': model})` for entries by name."
        )


def _what(value: object) -> str:
    return (
        f"The class `{value.__name__}`, not an instance," if isinstance(value, type) else f"A `{type(value).__name__}`"
    )


_UNINITIALISED = (
    "The `{name}` has no hooks: its `__init__` does not call that of `torch.optim.Optimizer`, as in a wrapper of "
    "another optimizer (Lookahead). Set up the optimizer within it, and wrap what `fabric.setup` returned; or call "
    "`super().__init__(parameters, defaults)`."
)
_SETUP = "Write `fabric.setup(module, optimizer, ..., scheduler=scheduler)`, once for each module."
