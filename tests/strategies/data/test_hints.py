"""The warnings about how a loader loads, as a table."""

from __future__ import annotations

from typing import Any

import pytest
from torch.utils.data import DataLoader

from fabric.strategies.data.workers import advice


@pytest.mark.parametrize(
    ("options", "num_cores", "sentence"),
    [
        ({"num_workers": 2, "multiprocessing_context": "fork"}, 8, None),
        ({"num_workers": 0}, 8, "`DataLoader(num_workers=0)` loads each batch while the device waits, on a machine"),
        ({"num_workers": 0}, 2, None),
        (
            {"num_workers": 2, "multiprocessing_context": "spawn"},
            8,
            "`DataLoader(num_workers=2)` starts its workers by spawn in a rank started by script: each",
        ),
        ({"num_workers": 2, "multiprocessing_context": "spawn", "persistent_workers": True}, 8, None),
    ],
)
def test_a_hint_is_given_where_a_device_would_wait(
    options: dict[str, Any], num_cores: int, sentence: str | None
) -> None:
    given = advice(DataLoader(range(4), **options), "script", num_cores)  # type: ignore[arg-type]
    if sentence is None:
        assert given is None
    else:
        assert given is not None
        assert given.startswith(sentence)
