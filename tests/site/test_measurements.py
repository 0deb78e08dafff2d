"""The appendix of measurements is written by commands: no table by hand, and a table for each part of `make bench`."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs/measurements").glob("*.md"))
WRITTEN = re.compile(r"<!-- measured: make (.+?) -->\n(.*?)<!-- end -->", re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_each_table_and_figure_of_the_appendix_is_written_by_a_command(page: Path) -> None:
    by_hand = WRITTEN.sub("", page.read_text())
    assert not [line for line in by_hand.splitlines() if line.startswith("|")]
    assert not re.findall(r"\d (?:us|ms|s|MB|MiB|GiB)\b", by_hand.replace("5 ms, 100 us", "")), (
        "the goal alone is no result"
    )
    commands = {command.split()[0] for command, _ in WRITTEN.findall(page.read_text())}
    assert commands <= set(re.findall(r"(?m)^([\w-]+):", (ROOT / "Makefile").read_text()))
