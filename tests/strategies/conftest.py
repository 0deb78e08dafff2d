"""Ranks of the tests of strategies are forks of a process that has imported what they import."""

from __future__ import annotations

import pytest
from worlds import preload


@pytest.fixture(autouse=True)
def ranks_import_nothing(request: pytest.FixtureRequest) -> None:
    """Before the first test that may start ranks: those take over a second, or did without this."""
    if "slow" in request.keywords:
        preload()
