"""What holds for every test of the suite."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def ranks_import_nothing() -> None:
    from worlds import preload  # imports `devices`, which knows the accelerator only once pytest is configured

    preload()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As in the ranks: with more, products in half precision are summed in another order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
