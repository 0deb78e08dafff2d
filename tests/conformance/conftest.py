"""What the suite saw is shown at the end of the session: each strategy, and what it was seen to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from worlds import preload

from fabric.testing import Finding, table

SEEN = pytest.StashKey[dict[str, list[Finding]]]()
NOT_RUN = pytest.StashKey[dict[str, str]]()


@pytest.fixture(autouse=True, scope="session")
def ranks_import_nothing() -> None:
    preload()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As in the ranks: with more, products in half precision are summed in another order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def show(request: pytest.FixtureRequest) -> Callable[[str, list[Finding]], None]:
    """Keep what was seen of a row for the table at the end."""
    return request.config.stash.setdefault(SEEN, {}).__setitem__


@pytest.fixture
def show_not_run(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Keep why a strategy was not run."""
    return request.config.stash.setdefault(NOT_RUN, {}).__setitem__


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """The table: strategy, ranks and precision against cases."""
    if SEEN in config.stash:
        terminalreporter.section("strategies against one process of plain PyTorch")
        terminalreporter.write_line("\n".join(table(config.stash[SEEN])))
    for name, sentence in config.stash.get(NOT_RUN, {}).items():
        terminalreporter.write_line(f"{name} not run: {sentence}")
