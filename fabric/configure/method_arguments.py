"""Checks of the arguments of `Fabric`'s methods, which raise at the user's call, before anything has happened.

Only arguments that Python or torch would misinterpret are checked.
"""

from collections.abc import Sequence
from typing import Any, TypedDict, get_args

from torch import nn
from torch.optim import Optimizer

from fabric.strategies.collectives.collective import Collective
from fabric.strategies.data.partition import Uneven, Use


class LoaderOptions(TypedDict, total=False):
    """The options of `setup_dataloaders`."""

    use_distributed_sampler: bool
    move_to_device: bool
    use: Use | None
    uneven: Uneven | None


def check_module(module: object) -> None:
    """Raise TypeError if the first argument of `setup` is not a module."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"{_what(module)} was passed as the module. {_SETUP}")


def check_optimizers(optimizers: Sequence[object]) -> None:
    """Raise TypeError if one of `optimizers` is not an optimizer."""
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"{_what(optimizer)} was passed as an optimizer. {_SETUP}")


def check_word(method: str, argument: str, word: object, words: Any) -> None:
    """Raise ValueError if `word` is neither None nor in the `Literal` `words`."""
    if word is not None and word not in get_args(words):
        known = ", ".join(map(repr, get_args(words)))
        raise ValueError(f"`{method}({argument}={word!r})`: write one of {known}, or None.")


def check_loader_options(use: object, uneven: object) -> None:
    """Raise ValueError for unknown options of `setup_dataloaders`, or ones that contradict each other."""
    check_word("setup_dataloaders", "use", use, Use)
    check_word("setup_dataloaders", "uneven", uneven, Uneven)
    if uneven not in (None, "repeat") and use not in (None, "train"):
        raise ValueError(
            f"`setup_dataloaders(uneven={uneven!r}, use={use!r})`: every rank evaluates all of its batches. Leave "
            "`uneven` out, or write `uneven='repeat'`, with which all ranks run equally many forwards."
        )


def check_window(num_batches: object) -> None:
    """Raise ValueError for a window of `accumulate` without micro-batches."""
    if not isinstance(num_batches, int) or num_batches < 1:
        raise ValueError(f"`accumulate(loader, {num_batches})`: a window has a number of micro-batches, 1 or more.")


def check_group(group: object) -> None:
    """Raise TypeError if the `group` of a collective is neither a collective nor None."""
    if group is not None and not isinstance(group, Collective):
        raise TypeError(
            f"`group={group!r}`: a group is what `fabric.collective.split(ranks)` returns, and None stands for all "
            "ranks. It is the second argument: name the others, as in `fabric.all_reduce(x, reduce_op='sum')`."
        )


def check_limits(clip_val: float | None, max_norm: float | None) -> None:
    """Raise ValueError unless exactly one limit is given, and it is not negative."""
    written = f"`clip_gradients(clip_val={clip_val}, max_norm={max_norm})`"
    limits = [each for each in (clip_val, max_norm) if each is not None]
    if len(limits) != 1:
        raise ValueError(f"{written}: pass exactly one of the two.")
    if not limits[0] >= 0:  # also refuses NaN
        raise ValueError(f"{written}: a negative limit would flip the sign of gradients. Write a number from 0 on.")


def _what(value: object) -> str:
    return (
        f"The class `{value.__name__}`, not an instance," if isinstance(value, type) else f"A `{type(value).__name__}`"
    )


_SETUP = "Write `fabric.setup(module, optimizer, ..., scheduler=scheduler)`, once for each module."


def refuse_writing(write: bool) -> None:
    """Raise ValueError if weights would be written where forwards run."""
    if write:
        raise ValueError(
            "`fabric.gathered(model, write=True, for_forward=True)`: forwards run with copies of the weights. Write in "
            "one context, and call the model in another."
        )
