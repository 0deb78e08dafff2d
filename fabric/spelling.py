"""Each word a person can say, checked alone: in `Fabric(...)` and on the command line by the same functions.

Every function takes the value, and `said`, the words as the person wrote them, for the error. Without torch, so that
`fabric run` refuses a wrong word before anything starts.
"""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

from fabric.launchers.registry import OURS

Devices: TypeAlias = Literal["auto", "all"] | int | tuple[int, ...]
"""All that fit, all there are, a number of them, or their indices."""
LAUNCHERS = ("auto", *OURS, "external")
"""What `Fabric(launcher=...)` takes."""
DEFAULT_SAY_AFTER_SECONDS = 30.0
"""After how long in one collective the job says who waits for whom."""
DEFAULT_MAX_RESTARTS = 3
"""Of `launcher='elastic'` where nobody says a number; torch's `LaunchConfig` has the same. Unmeasured."""
PRECISIONS = ("64-true", "32-true", "16-true", "bf16-true", "16-mixed", "bf16-mixed", "64", "32", "16", "bf16")
"""The words of `Precision.parse`, which needs torch; a test holds the two equal."""

_DEVICES_FORMS = "'auto', -1 for all, a number such as 2, or indices such as '0,1' or [0, 1]"


def read_devices(value: object, said: str) -> Devices:
    """Read `devices`: 'auto', -1, 2, '2', '0,1', '0,', [0, 1]."""
    if isinstance(value, str):
        return _devices_of_text(value, said)
    if isinstance(value, list | tuple):
        return _indices(value, said)
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"`{said}` is a `{type(value).__name__}`. Write {_DEVICES_FORMS}.")
    if value == -1:
        return "all"
    if value < 1:
        raise ValueError(f"`{said}` asks for {value} devices. Write {_DEVICES_FORMS}.")
    return value


def read_count(value: object, said: str) -> int:
    """Read a number of things, at least one."""
    return _whole(value, said, low=1)


def read_rank(value: object, said: str) -> int:
    """Read a place among things, from zero."""
    return _whole(value, said, low=0)


def read_seconds(value: object, said: str) -> float:
    """Read a time in seconds, more than none."""
    try:
        seconds = float(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else None
    except ValueError:
        seconds = None
    if seconds is None:
        raise TypeError(f"`{said}` is no number. Write a number of seconds, such as 30.")
    if not 0 < seconds < math.inf:
        raise ValueError(f"`{said}` is out of range. Write a number of seconds above 0.")
    return seconds


def read_port(value: object, said: str) -> int:
    """Read a TCP port, from 1 to 65535."""
    return _whole(value, said, low=1, high=65535)


def read_word(value: object, said: str) -> str:
    """Read a name, which whoever knows the names looks up later."""
    if not isinstance(value, str):
        raise TypeError(f"`{said}` is a `{type(value).__name__}`. Write a name.")
    if not value.strip():
        raise ValueError(f"`{said}` is empty. Leave it out, or write a name.")
    return value


def read_launcher(value: object, said: str) -> str:
    """Read a launcher's word."""
    for word in LAUNCHERS:
        if value == word:
            return word
    raise ValueError(_none_of(said, LAUNCHERS))


def read_precision_word(value: object, said: str) -> str:
    """Read a precision's name, long or short."""
    for word in PRECISIONS:
        if value == word:
            return word
    raise ValueError(_none_of(said, PRECISIONS))


def _devices_of_text(text: str, said: str) -> Devices:
    if text == "auto":
        return "auto"
    try:
        if "," in text:
            return _indices([int(part) for part in text.removesuffix(",").split(",")], said)
        return read_devices(int(text), said)
    except ValueError as error:
        if said in str(error):
            raise
        raise ValueError(f"`{said}` is neither a number nor a list of them. Write {_DEVICES_FORMS}.") from None


def _indices(values: list[object] | tuple[object, ...] | list[int], said: str) -> tuple[int, ...]:
    if not values:
        raise ValueError(f"`{said}` is empty. Write {_DEVICES_FORMS}.")
    indices = []
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"`{said}` holds {value!r}, which is no index of a device. Write {_DEVICES_FORMS}.")
        if value < 0:
            raise ValueError(f"`{said}` holds {value}; indices of devices count from 0. Write {_DEVICES_FORMS}.")
        indices.append(value)
    if twice := sorted({index for index in indices if indices.count(index) > 1}):
        raise ValueError(f"`{said}` names device {', '.join(map(str, twice))} more than once. Name each device once.")
    return tuple(indices)


def _whole(value: object, said: str, *, low: int, high: int | None = None) -> int:
    range_of_it = f"a whole number from {low}" + (f" to {high}" if high is not None else "")
    if isinstance(value, str) and value.isascii() and value.isdigit():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise TypeError(f"`{said}` is a `{type(value).__name__}`. Write {range_of_it}.")
    if isinstance(value, str) or value < low or (high is not None and value > high):
        raise ValueError(f"`{said}` is out of range. Write {range_of_it}.")
    return value


def _none_of(said: str, words: tuple[str, ...]) -> str:
    return f"`{said}` is none of the words there are. Write one of {', '.join(map(repr, words))}."
