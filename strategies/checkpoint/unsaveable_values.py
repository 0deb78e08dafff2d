"""What a user writes instead of a value that cannot be saved. Imports no library: values are told by their types."""

from __future__ import annotations

import dataclasses
import functools
from argparse import Namespace
from collections import UserDict, UserList, deque
from collections.abc import Iterator, Mapping, Sequence, Set
from datetime import date, time, timedelta
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any
from uuid import UUID

import torch


def instead_of(value: Any) -> str:
    """A sentence about how to save the contents of this value."""
    written = _contents_of(value)
    if written is not None:
        return f"Save `{written}` of it instead."
    if isinstance(value, _MADE_BY_PROGRAMS):
        return "Leave it out, or save its name: a program that loads makes it again."
    return (
        "Save an object that has `state_dict` and `load_state_dict`, or its contents as numbers, strings, tensors, "
        "lists and dictionaries."
    )


def _contents_of(value: Any) -> str | None:
    package = type(value).__module__.partition(".")[0]
    if isinstance(value, tuple) and hasattr(type(value), "_asdict"):
        return "._asdict()"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return "dataclasses.asdict(...)"
    if package == "numpy" and not isinstance(value, str):
        return _NUMPY.get(type(value).__name__, ".tolist()" if hasattr(value, "tolist") else None)
    if package == "omegaconf":
        return "OmegaConf.to_container(...)"
    return next((written for kinds, written in _CONTENTS if isinstance(value, kinds)), None)


_NUMPY = {"Generator": ".bit_generator.state", "RandomState": ".get_state()", "datetime64": "str(...)"}
_CONTENTS: tuple[tuple[Any, str], ...] = (
    (Enum, ".value"),
    ((date, time), ".isoformat()"),
    (timedelta, ".total_seconds()"),
    (torch.Generator, ".get_state()"),
    (torch.Tensor, ".item()"),  # as the key of a dictionary
    (str, "str(...)"),
    (int, "int(...)"),
    (float, "float(...)"),
    ((bytearray, memoryview), "bytes(...)"),
    ((Decimal, Fraction, UUID, torch.layout, torch.memory_format), "str(...)"),
    ((Namespace, SimpleNamespace), "vars(...)"),
    ((Mapping, UserDict), "dict(...)"),
    (tuple, "tuple(...)"),
    ((deque, range, UserList, Sequence, Iterator), "list(...)"),
    (Set, "set(...)"),
)
_MADE_BY_PROGRAMS = (FunctionType, BuiltinFunctionType, MethodType, ModuleType, functools.partial, type)
