"""What the suite saw is shown at the end of the session: each strategy, and what it was seen to do.

A plugin that `tests/conftest.py` names: where workers of pytest-xdist run the tests, the process that prints the table
reads no other conftest.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from fabric.testing import Finding

SEEN = pytest.StashKey[dict[str, "list[Finding]"]]()
NOT_RUN = pytest.StashKey[dict[str, str]]()
MARKS = {"equal": "=", "raised": "raises", "failed": "FAILED"}


@pytest.fixture
def show(request: pytest.FixtureRequest) -> Callable[[str, list[Finding]], None]:
    """Keep what was seen of a row for the table at the end."""
    return request.config.stash.setdefault(SEEN, {}).__setitem__


@pytest.fixture
def show_not_run(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Keep why a strategy was not run."""
    return request.config.stash.setdefault(NOT_RUN, {}).__setitem__


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker tells the process that prints."""
    stash = session.config.stash
    if hasattr(session.config, "workeroutput") and (SEEN in stash or NOT_RUN in stash):
        kept = stash.get(SEEN, {}), stash.get(NOT_RUN, {})
        session.config.workeroutput["conformance"] = pickle.dumps(kept)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """What this worker saw goes beside what the others saw."""
    if kept := getattr(node, "workeroutput", {}).get("conformance"):
        seen, not_run = pickle.loads(kept)
        node.config.stash.setdefault(SEEN, {}).update(seen)
        node.config.stash.setdefault(NOT_RUN, {}).update(not_run)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """The table: strategy, ranks and precision against cases."""
    if seen := config.stash.get(SEEN, {}):
        terminalreporter.section("strategies against one process of plain PyTorch")
        terminalreporter.write_line("\n".join(table(dict(sorted(seen.items())))))
    for name, sentence in config.stash.get(NOT_RUN, {}).items():
        terminalreporter.write_line(f"{name} not run: {sentence}")


def table(found: Mapping[str, Sequence[Finding]]) -> list[str]:
    """The lines of a table: a row for each strategy, a column for each case that was not equal everywhere, and the
    messages below. `=`: equal to one process of plain PyTorch."""
    different = dict.fromkeys(
        finding.case for findings in found.values() for finding in findings if finding.result != "equal"
    )
    header = ["", "equal", *different]
    rows = [header]
    for name, findings in found.items():
        by_case = {finding.case: MARKS[finding.result] for finding in findings}
        num_equal = sum(finding.result == "equal" for finding in findings)
        rows.append([name, f"{num_equal} of {len(findings)}", *(by_case.get(case, "") for case in different)])
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    sentences = dict.fromkeys(
        f"{finding.case}: {finding.message}"
        for findings in found.values()
        for finding in findings
        if finding.result == "raised"
    )
    return [*lines, *sentences]
