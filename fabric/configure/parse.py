"""Parsing of each argument of `Fabric(...)` and each option of `fabric run`, by the same functions.

Each function takes the value and its source text, `written`, for the error. Imports no torch, so that `fabric run`
refuses a wrong value before anything starts.
"""

import math
import os
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, TypeAlias

from fabric.launchers.launcher_registry import OURS

Devices: TypeAlias = Literal["auto", "all"] | int | tuple[int, ...]
"""'auto', -1 for all, a number of devices, or their indices."""
Read: TypeAlias = Callable[[Any, str], Any]
"""A parsing function."""
DEFAULT_REPORT_AFTER_SECONDS = 30.0
"""The default of `Fabric(report_after_seconds=...)`."""
DEFAULT_MAX_RESTARTS = 3
"""The default of `launcher='elastic'`, as in torch's `LaunchConfig`. Not measured."""


def read_devices(value: Any, written: str) -> Devices:
    """Read `devices`: 'auto', -1, 2, '2', '0,1', '0,', [0, 1]."""
    devices = _numbers(value) if isinstance(value, str) and value != "auto" else value
    if devices == "auto":
        return "auto"
    if devices == -1:
        return "all"
    if type(devices) is int and devices > 0:
        return devices
    if isinstance(devices, list | tuple) and devices:
        are_indices = all(type(index) is int and index >= 0 for index in devices)
        if are_indices and len(set(devices)) == len(devices):
            return tuple(devices)
    raise ValueError(
        f"`{written}` names no devices. Write 'auto', -1 for all, a number such as 2, or different indices, such as "
        "'0,1' or [0, 1]."
    )


def _numbers(text: str) -> int | list[int] | None:
    """The numbers of '2' or '0,1'; None if it holds something else."""
    try:
        return [int(part) for part in text.removesuffix(",").split(",")] if "," in text else int(text)
    except ValueError:
        return None


def read_seconds(value: Any, written: str) -> float:
    """Parse a duration in seconds, above 0."""
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ValueError(f"`{written}` is not a duration. Write a number of seconds above 0.")
    return seconds


def read_sanitize(value: object, written: str) -> Literal["start", "always", False] | int:
    """Parse which steps the ranks compare: 'start', 'always', False, or a number from 1."""
    if value in ("start", "always"):
        return value
    if value is False or value == "False":
        return False
    if isinstance(value, int | str) and str(value).isdecimal():
        steps: int = _from_1(value, written)
        return steps
    raise ValueError(f"`{written}` is not known. Write 'start', 'always', a number of steps, or False.")


def read_word(value: object, written: str) -> str:
    """Parse a name, which is looked up later."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"`{written}` is not a name. Write one, or leave it out.")
    return value


def one_of(*words: object) -> Read:
    """Parses one of these values."""

    def read(value: object, written: str) -> object:
        if value not in words:
            raise ValueError(f"`{written}` is not known. Write one of {', '.join(map(repr, words))}.")
        return value

    return read


def _whole_from(low: int) -> Read:
    """Parses a whole number."""

    def read(value: object, written: str) -> int:
        number = int(value) if isinstance(value, str) and value.isdecimal() else value
        if type(number) is not int or number < low:
            raise ValueError(f"`{written}` is out of range. Write a whole number from {low}.")
        return number

    return read


_from_0, _from_1 = _whole_from(0), _whole_from(1)


class Option(NamedTuple):
    """An option of `fabric run`."""

    read: Read
    metavar: str | None
    """None: a flag."""
    help: str


OPTIONS: Mapping[str, Option] = {
    "accelerator": Option(read_word, "NAME", "auto, cpu, cuda, mps, ..."),
    "strategy": Option(read_word, "NAME", "auto, ddp, ...; `fabric doctor` lists them"),
    "devices": Option(read_devices, "DEVICES", "auto, a number, -1 for all, or indices such as 0,1"),
    "num_nodes": Option(_from_1, "N", "number of machines"),
    "node_rank": Option(_from_0, "N", "rank of this machine, from 0"),
    "main_address": Option(read_word, "HOST", "name or address of node 0"),
    "main_port": Option(_from_1, "PORT", "a free TCP port on node 0"),
    "precision": Option(read_word, "NAME", "32-true, bf16-mixed, ..."),
    "launcher": Option(one_of("auto", *OURS, "external"), "NAME", f"auto, {', '.join(OURS)}, external"),
    "max_restarts": Option(_from_0, "N", "after a failure, restart all ranks, at most N times"),
    "timeout_seconds": Option(read_seconds, "S", "how long a collective waits for the other ranks before it raises"),
    "report_after_seconds": Option(read_seconds, "S", "after how long in one collective to print what each rank does"),
    "sanitize": Option(
        read_sanitize, "STEPS", "the steps in which ranks compare what they share: start, always, a number, False"
    ),
    "log_dir": Option(lambda value, _: os.path.abspath(value), "DIR", "copy each rank's output to a file there"),
    "stop_grace_seconds": Option(
        read_seconds, "S", "how long a rank may go on after SIGTERM; 30 s by default, and as long as a save takes"
    ),
    "prefix_output": Option(one_of(True, False), None, "show the rank before each line that it prints"),
}
"""The options of `fabric run`, by the names of the arguments that they set."""


def flag(name: str) -> str:
    """The option of an argument, as it is typed."""
    return f"--{name.replace('_', '-')}"
