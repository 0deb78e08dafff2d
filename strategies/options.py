"""The options that strategies share, checked in the same way for all of them, before anything starts.

The check depends on an option's annotation and name: `timeout_seconds` is a time, `bucket_bytes` a size.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any, TypeVar

from torch import nn

from fabric.launchers.launcher_registry import PER_DEVICE
from fabric.strategies.module.wrap_policy import check_policy
from fabric.strategies.strategy import Strategy

S = TypeVar("S", bound=Strategy)

_LAUNCHERS = ("auto", *PER_DEVICE)


def own_launchers(word: str) -> tuple[str, ...]:
    """The launchers of a strategy with one process per device, whose option `launcher` is `word`."""
    return PER_DEVICE if word == "auto" else (word,)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


_KINDS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "bool": (lambda value: isinstance(value, bool), "True or False"),
    "int": (_is_whole, "a whole number"),
    "float": (lambda value: isinstance(value, float) or _is_whole(value), "a number"),
    "str": (lambda value: isinstance(value, str), "a word"),
}
"""Annotations that can be checked, as written; each also with `| None`."""


def check_options(strategy: Strategy) -> None:
    """Raise TypeError or ValueError for an option of the wrong type, or out of range."""
    for field in fields(strategy):
        value = getattr(strategy, field.name)
        written = f"`{type(strategy).__name__}({field.name}={value!r})`"
        kind, *none = (field.type.__name__ if isinstance(field.type, type) else str(field.type)).split(" | ")
        if field.name.endswith("_policy"):
            check_policy(value, field.name)
        if value is None or kind not in _KINDS or none not in ([], ["None"]):
            continue
        fits, words = _KINDS[kind]
        if not fits(value):
            raise TypeError(f"{written} is a `{type(value).__name__}`. Write {words}{', or None' if none else ''}.")
        if field.name.endswith("_seconds") and not 0 < value < math.inf:
            raise ValueError(f"{written}: write a number of seconds above 0.")
        if field.name.endswith("_bytes") and value < 1:
            raise ValueError(f"{written}: write a number of bytes from 1 on.")
        if field.name == "launcher" and value not in _LAUNCHERS:
            raise ValueError(
                f"{written} is not a launcher of a strategy. Write one of {', '.join(map(repr, _LAUNCHERS))}."
            )


def with_timeout(strategy: S, seconds: float) -> S | None:
    """The strategy with this timeout; None if it has no such option, or sets another timeout."""
    default = getattr(type(strategy), "timeout_seconds", None)
    if default is None or vars(strategy)["timeout_seconds"] not in (default, seconds):
        return None
    options: dict[str, Any] = {"timeout_seconds": seconds}
    return replace(strategy, **options)


def check_function(strategy: Strategy, option: str, call: str) -> None:
    """Raise TypeError for an option that must be a function or None. `call`: how it will be called.

    Called by the strategy's constructor.
    """
    value = getattr(strategy, option)
    if value is None or (callable(value) and not isinstance(value, nn.Module)):
        return
    raise TypeError(
        f"`{type(strategy).__name__}({option}={value!r})` is a `{type(value).__name__}`, not a function. Pass one, "
        f"`{call}`."
    )
