"""Parsing of each argument of `Fabric(...)` and each option of `fabric run`, by the same functions.

Every function takes the value, and `written`: the source text, for the error. Imports no torch, so that `fabric run`
refuses a wrong value before anything starts.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from fabric.launchers.registry import OURS

Devices: TypeAlias = Literal["auto", "all"] | int | tuple[int, ...]
"""'auto', -1 for all, a number of devices, or their indices."""
Read: TypeAlias = Callable[[Any, str], Any]
"""A parsing function."""
LAUNCHERS = ("auto", *OURS, "external")
"""The values of `Fabric(launcher=...)`."""
DEFAULT_REPORT_AFTER_SECONDS = 30.0
"""The default of `Fabric(report_after_seconds=...)`."""
DEFAULT_MAX_RESTARTS = 3
"""The default of `launcher='elastic'`, as in torch's `LaunchConfig`. Not measured."""
PRECISIONS = ("64-true", "32-true", "16-true", "bf16-true", "16-mixed", "bf16-mixed", "64", "32", "16", "bf16")
"""The names that `Precision.parse` knows; a test compares the two. Copied, because `Precision` imports torch."""

_DEVICES_FORMS = "'auto', -1 for all, a number such as 2, or indices such as '0,1' or [0, 1]"


def read_devices(value: object, written: str) -> Devices:
    """Read `devices`: 'auto', -1, 2, '2', '0,1', '0,', [0, 1]."""
    if isinstance(value, str):
        return _devices_of_text(value, written)
    if isinstance(value, list | tuple):
        return _indices(value, written)
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"`{written}` is a `{type(value).__name__}`. Write {_DEVICES_FORMS}.")
    if value == -1:
        return "all"
    if value < 1:
        raise ValueError(f"`{written}` asks for {value} devices. Write {_DEVICES_FORMS}.")
    return value


def read_count(value: object, written: str) -> int:
    """Parse a number, at least 1."""
    return _whole(value, written, low=1)


def read_rank(value: object, written: str) -> int:
    """Parse a rank, from 0."""
    return _whole(value, written, low=0)


def read_seconds(value: object, written: str) -> float:
    """Parse a time in seconds, above 0."""
    try:
        seconds = float(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else None
    except ValueError:
        seconds = None
    if seconds is None:
        raise TypeError(f"`{written}` is no number. Write a number of seconds, such as 30.")
    if not 0 < seconds < math.inf:
        raise ValueError(f"`{written}` is out of range. Write a number of seconds above 0.")
    return seconds


def read_sanitize(value: object, written: str) -> Literal["start", "always", False] | int:
    """Parse which steps the ranks compare: 'start', 'always', False, or a number from 1."""
    if value in ("start", "always"):
        return value
    if value is False or value == "False":
        return False
    if (isinstance(value, str) and value.isdigit()) or (isinstance(value, int) and not isinstance(value, bool)):
        return read_count(value, written)
    raise ValueError(f"`{written}` is not known. Write 'start', 'always', a number of steps, or False.")


def read_port(value: object, written: str) -> int:
    """Parse a TCP port, from 1 to 65535."""
    return _whole(value, written, low=1, high=65535)


def read_word(value: object, written: str) -> str:
    """Parse a name, which is looked up later."""
    if not isinstance(value, str):
        raise TypeError(f"`{written}` is a `{type(value).__name__}`. Write a name.")
    if not value.strip():
        raise ValueError(f"`{written}` is empty. Leave it out, or write a name.")
    return value


def _one_of(words: Sequence[str]) -> Read:
    """Parses one of these words."""

    def read(value: object, written: str) -> str:
        for word in words:
            if value == word:
                return word
        raise ValueError(
            f"`{written}` is not known. Write {'one of ' * (len(words) > 1)}{', '.join(map(repr, words))}."
        )

    return read


def read_folder(value: object, written: str) -> str:
    """Parse the path of a folder, which may not exist yet; absolute."""
    if not isinstance(value, str | os.PathLike) or not isinstance(path := os.fspath(value), str):
        raise TypeError(f"`{written}` is a `{type(value).__name__}`. Write the path of a folder.")
    if not path.strip():
        raise ValueError(f"`{written}` is empty. Leave it out, or write the path of a folder.")
    if os.path.exists(path) and not os.path.isdir(path):
        raise ValueError(f"`{written}` is a file. Write the path of a folder; it is created if it is missing.")
    return os.path.abspath(path)


def read_flag(value: object, written: str) -> bool:
    """Parse True or False; on the command line, an option without a value."""
    if value not in (True, False, "True"):
        raise TypeError(f"`{written}` is a `{type(value).__name__}`. Write True or False.")
    return bool(value)


OPTIONS: Mapping[str, Read] = {
    "accelerator": read_word,
    "strategy": read_word,
    "devices": read_devices,
    "num_nodes": read_count,
    "node_rank": read_rank,
    "main_address": read_word,
    "main_port": read_port,
    "precision": _one_of(PRECISIONS),
    "launcher": _one_of(LAUNCHERS),
    "max_restarts": read_rank,
    "timeout_seconds": read_seconds,
    "report_after_seconds": read_seconds,
    "stop_grace_seconds": read_seconds,
    "sanitize": read_sanitize,
    "log_dir": read_folder,
    "prefix_output": read_flag,
}
"""The options of `fabric run`, by the names of the arguments that they set."""


def _devices_of_text(text: str, written: str) -> Devices:
    if text == "auto":
        return "auto"
    try:
        if "," in text:
            return _indices([int(part) for part in text.removesuffix(",").split(",")], written)
        return read_devices(int(text), written)
    except ValueError as error:
        if written in str(error):
            raise
        raise ValueError(f"`{written}` is neither a number nor a list of them. Write {_DEVICES_FORMS}.") from None


def _indices(values: list[object] | tuple[object, ...] | list[int], written: str) -> tuple[int, ...]:
    if not values:
        raise ValueError(f"`{written}` is empty. Write {_DEVICES_FORMS}.")
    indices = []
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"`{written}` holds {value!r}, which is no index of a device. Write {_DEVICES_FORMS}.")
        if value < 0:
            raise ValueError(f"`{written}` holds {value}; indices of devices count from 0. Write {_DEVICES_FORMS}.")
        indices.append(value)
    if twice := sorted({index for index in indices if indices.count(index) > 1}):
        raise ValueError(
            f"`{written}` names device {', '.join(map(str, twice))} more than once. Name each device once."
        )
    return tuple(indices)


def _whole(value: object, written: str, *, low: int, high: int | None = None) -> int:
    range_of_it = f"a whole number from {low}" + (f" to {high}" if high is not None else "")
    if isinstance(value, str) and value.isascii() and value.isdigit():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise TypeError(f"`{written}` is a `{type(value).__name__}`. Write {range_of_it}.")
    if isinstance(value, str) or value < low or (high is not None and value > high):
        raise ValueError(f"`{written}` is out of range. Write {range_of_it}.")
    return value
