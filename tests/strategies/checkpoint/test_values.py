"""Values that cannot be saved: the error says where they are, and what to save instead."""

from __future__ import annotations

from argparse import Namespace
from collections import deque
from datetime import datetime
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from fabric.strategies.checkpoint.state import ObjectStates
from fabric.strategies.checkpoint.storage import Folder
from fabric.strategies.checkpoint.write_and_commit import save
from fabric.strategies.collectives.single import SingleDeviceCollective


class Point(NamedTuple):
    x: int
    y: int


class Color(Enum):
    RED = 1


class Dotted(dict[str, Any]):
    """Attributes are keys, as users write it: `state_dict` is None."""

    __getattr__ = dict.get


@pytest.mark.parametrize(
    "value",
    [
        datetime(2026, 1, 1),
        Color.RED,
        Point(1, 2),
        Namespace(lr=0.1),
        deque([1]),
        Dotted(lr=0.1),
        torch.Generator(),
        np.random.default_rng(1),
        np.array(["a"]),
        {torch.tensor(1): 2},
        {Color.RED: 2},
        Point,
        np.mean,
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_error_of_a_value_that_cannot_be_saved_names_its_place_and_what_to_save(tmp_path: Path, value: Any) -> None:
    collective = SingleDeviceCollective()
    collective.setup()
    with pytest.raises(TypeError, match=r"at /deep/0\S*.*, which cannot be saved.* Save its contents as numbers"):
        save(collective, Folder(tmp_path), ObjectStates().read({"deep": [value]}))
