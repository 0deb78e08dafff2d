"""The interface of a random generator, of Python, NumPy, torch or a device."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Rng:
    """A random generator: functions that read its state, write it, and seed it."""

    read: Callable[[], Any]
    """Returns the state, as types that a checkpoint holds: tensors, numbers, strings, tuples and dictionaries."""
    write: Callable[[Any], object]
    seed: Callable[[int], object]
