"""The warnings about how a loader loads, as a table."""

from __future__ import annotations

import pytest
from torch.utils.data import DataLoader

from fabric.strategies.data.hints import Loading, advice, loading_of

LOADING = Loading(
    num_workers=2,
    persistent_workers=False,
    start_method="fork",
    launcher="script",
    num_cores=8,
    accelerated=True,
)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({}, None),
        (
            {"num_workers": 0},
            "`DataLoader(num_workers=0)` loads each batch while the device waits, on a machine",
        ),
        ({"num_workers": 0, "accelerated": False}, None),
        ({"num_workers": 0, "num_cores": 2}, None),
        (
            {"start_method": "spawn", "launcher": "spawn"},
            "`DataLoader(num_workers=2)` starts its workers by spawn in a rank started by spawn: each",
        ),
        ({"start_method": "forkserver"}, "`DataLoader(num_workers=2)` starts its workers by forkserver in a rank"),
        ({"start_method": "spawn", "persistent_workers": True}, None),
        ({"start_method": "spawn", "accelerated": False}, None),
    ],
)
def test_a_hint_is_given_where_a_device_would_wait(changes: dict[str, object], sentence: str | None) -> None:
    from dataclasses import replace

    given = advice(replace(LOADING, **changes))  # type: ignore[arg-type]
    if sentence is None:
        assert given is None
    else:
        assert given is not None
        assert given.startswith(sentence)


def test_a_loader_is_checked_with_the_context_in_which_it_starts_its_workers() -> None:
    loader = DataLoader(range(4), num_workers=1, multiprocessing_context="spawn")  # type: ignore[arg-type]
    loading = loading_of(loader, launcher="fork", accelerated=False)
    assert (loading.num_workers, loading.start_method, loading.launcher) == (1, "spawn", "fork")
    assert loading.num_cores >= 1
