"""The appendix of measurements is written by commands: no table by hand, and a table for each part of `make bench`."""

import ast
import os
import re
import subprocess
import sys
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


def test_each_part_of_make_bench_has_been_measured() -> None:
    source = ast.parse((ROOT / "tests/benchmarks/__main__.py").read_text())
    (parts,) = [
        node.value for node in source.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "PARTS" and isinstance(node.value, ast.Dict)
    ]  # fmt: skip
    tables = dict(WRITTEN.findall((ROOT / "docs/measurements/bench.md").read_text()))
    names = [ast.literal_eval(key) for key in parts.keys if key]
    empty = [name for name in names if "| " not in tables.get(f"bench BENCH_ARGS={name}", "")]
    assert not empty, f"run `make bench BENCH_ARGS='{' '.join(empty)}'`"


def test_make_bench_replaces_the_tables_of_what_it_measures_alone(tmp_path: Path) -> None:
    page = tmp_path / "bench.md"
    begin, end = "<!-- measured: make bench BENCH_ARGS={} -->\n", "<!-- end -->\n"
    page.write_text(
        f"# A\n\nWords.\n\n{begin.format('numbers')}old\n{end}\n## B\n\n{begin.format('verify')}kept\n{end}"
    )
    environment = {**os.environ, "BENCH_PAGE": str(page), "BENCH_ROUNDS": "2", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "tests/benchmarks"), "numbers", "process"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    tables = dict(WRITTEN.findall(page.read_text()))
    assert tables["bench BENCH_ARGS=verify"] == "kept\n"
    assert "at most 2 rounds" in tables["bench BENCH_ARGS=numbers"]
    assert "| step of a tiny model, 1 process | ours |" in tables["bench BENCH_ARGS=process"]
    assert page.read_text().startswith("# A\n\nWords.\n\n<!-- measured: make bench BENCH_ARGS=numbers -->\n")
