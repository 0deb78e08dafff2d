"""Values that cannot be saved: the error says where they are, and what to save instead."""

from __future__ import annotations

import re
from argparse import Namespace
from collections import deque
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from fabric.strategies.checkpoint.saving import save
from fabric.strategies.checkpoint.state import state_of
from fabric.strategies.checkpoint.storage import Folder
from fabric.strategies.collectives.single import SingleDeviceCollective


class Point(NamedTuple):
    x: int
    y: int


class Color(Enum):
    RED = 1


@dataclass
class Options:
    lr: float = 0.1


class Dotted(dict[str, Any]):
    """Attributes are keys, as users write it: `state_dict` is None."""

    __getattr__ = dict.get


@pytest.mark.parametrize(
    ("value", "instead"),
    [
        (datetime(2026, 1, 1), ".isoformat()"),
        (Color.RED, ".value"),
        (Options(), "dataclasses.asdict(...)"),
        (Point(1, 2), "._asdict()"),
        (Namespace(lr=0.1), "vars(...)"),
        (deque([1]), "list(...)"),
        (Dotted(lr=0.1), "dict(...)"),
        (torch.Generator(), ".get_state()"),
        (np.random.default_rng(1), ".bit_generator.state"),
        (np.array(["a"]), ".tolist()"),
        ({torch.tensor(1): 2}, ".item()"),
        ({Color.RED: 2}, ".value"),
        (Options, "Leave it out"),
        (np.mean, "an object that has `state_dict`"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_error_of_a_value_that_cannot_be_saved_names_its_place_and_what_to_save(
    tmp_path: Path, value: Any, instead: str
) -> None:
    collective = SingleDeviceCollective()
    collective.setup()
    with pytest.raises(TypeError, match=rf"at /deep/0\S*.*, which cannot be saved.*{re.escape(instead)}"):
        save(collective, Folder(tmp_path), state_of({"deep": [value]}))
