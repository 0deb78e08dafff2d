"""The options that strategies share, checked the same way for all of them, before anything starts.

An option says what it is by its annotation, and by its name: `timeout_seconds` is a time, `bucket_bytes` a size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any, TypeVar

from torch import nn

from fabric.launchers.registry import PER_DEVICE
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
"""Annotations that can be checked, as they are written; each also in its form with None."""


def check_options(strategy: Strategy) -> None:
    """Raise TypeError or ValueError for an option that is of another kind than it says, or out of range."""
    for field in fields(strategy):
        value = getattr(strategy, field.name)
        written = f"`{type(strategy).__name__}({field.name}={value!r})`"
        kind, *none = str(field.type).split(" | ")
        if kind == "Policy":
            check_policy(value, field.name)
        if value is None or kind not in _KINDS or none not in ([], ["None"]):
            continue
        fits, words = _KINDS[kind]
        if not fits(value):
            raise TypeError(f"{written} is a `{type(value).__name__}`. Write {words}{', or None' if none else ''}.")
        if field.name.endswith("_seconds") and not 0 < value < math.inf:
            raise ValueError(f"{written} is no time to wait. Write a number of seconds above 0.")
        if field.name.endswith("_bytes") and value < 1:
            raise ValueError(f"{written} is no size. Write a number of bytes from 1 on.")
        if field.name == "launcher" and value not in _LAUNCHERS:
            raise ValueError(f"{written} is no launcher of a strategy's own. Write one of {_listed(_LAUNCHERS)}.")
        if field.name == "backend":
            _check_backend(written, value)


def carry_over(strategy: Strategy, to: type[S], *, word: str, accelerator: str) -> S:
    """Make `to`, which does on this accelerator what `strategy` does elsewhere, with the options of the same names.

    Raises: ValueError: another option was set, which `to` has not.
    """
    known = {field.name for field in fields(to)}
    written = {field.name: getattr(strategy, field.name) for field in fields(strategy)}
    default = {field.name: field.default for field in fields(strategy)}
    lost = [f"`{name}={value!r}`" for name, value in written.items() if name not in known and value != default[name]]
    if lost:
        raise ValueError(
            f"`strategy={word}` on `accelerator={accelerator!r}` is `{to.__name__}`, which has nothing for "
            f"{', '.join(lost)}. Leave it out, or write `strategy={to.__name__}(...)`, with options of its own."
        )
    return to(**{name: value for name, value in written.items() if name in known})


def with_timeout(strategy: S, seconds: float) -> S | None:
    """The strategy whose collectives wait for so long; None where it has no such option, or has said another time."""
    own = next((field for field in fields(strategy) if field.name == "timeout_seconds"), None)
    if own is None or getattr(strategy, own.name) not in (own.default, seconds):
        return None
    options: dict[str, Any] = {own.name: seconds}
    return replace(strategy, **options)


def check_function(strategy: Strategy, option: str, call: str) -> None:
    """Raise TypeError where an option that is a function, or None, cannot be called. `call`: how it will be.

    Called by the strategy's constructor.
    """
    value = getattr(strategy, option)
    if value is None or (callable(value) and not isinstance(value, nn.Module)):
        return
    raise TypeError(
        f"`{type(strategy).__name__}({option}={value!r})` is no function, but a `{type(value).__name__}`. Pass one, "
        f"`{call}`."
    )


def _check_backend(written: str, value: str) -> None:
    """Raise ValueError for a backend that torch.distributed has not; `value` is one name, or `device:name,...`."""
    from torch.distributed import Backend

    known = [name for name in Backend.backend_list if name != Backend.UNDEFINED]
    for name in (part.split(":")[-1] for part in value.split(",")):
        if name.lower() not in known:
            raise ValueError(
                f"{written}: torch.distributed has no backend {name!r}. Leave `backend` out, or write one of "
                f"{_listed(known)}."
            )


def _listed(words: Any) -> str:
    return ", ".join(map(repr, words))
