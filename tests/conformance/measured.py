"""`make numbers`: run the suite over each strategy, and write the table in `docs/measurements/numbers.md`.

The rows of `rows.py` that run all cases on two ranks (one, where a strategy has one process). It takes some minutes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from rows import Row, rows

from fabric.testing import Finding, cases, survey

PAGE = Path(__file__).parents[2] / "docs/measurements/numbers.md"
BEGIN, END = "<!-- measured: make numbers -->\n", "<!-- end -->\n"


def measured_rows() -> list[Row]:
    """Those of the table: every technique once."""
    most = len(cases()) - 2  # some leave out one that is dear
    return [row for row in rows() if len(row.cases) >= most]


def table(seen: Mapping[str, Sequence[Finding]]) -> str:
    """A row for each case, a column for each strategy: `=` equal, `raises`, `-` not run."""
    marks = {name: {each.case: each.result for each in findings} for name, findings in seen.items()}
    words = {"equal": "=", "raised": "raises", "failed": "FAILED"}
    lines = [" | ".join(["case", "one process does", *(f"`{name}`" for name in seen)])]
    lines.append("|".join(["---"] * (len(seen) + 2)))
    for case in cases():
        found = [words.get(marks[name].get(case.name, ""), "-") for name in seen]
        lines.append(" | ".join([f"`{case.name}`", case.claim, *found]))
    return "".join(f"| {line} |\n" for line in lines)


def declared(row: Row) -> list[Finding]:
    """What the strategy declares about each case that the row runs."""
    lacks = row.make().lacks if row.size > 1 else {}
    return [
        Finding(case=case.name, result="raised" if any(need in lacks for need in case.needs) else "equal")
        for case in row.chosen()
    ]


def in_page() -> str:
    """The table that the page has."""
    return PAGE.read_text().split(BEGIN)[1].split(END)[0]


def main() -> None:
    """Measure, and write the page. Exits with the failures, if there are any, and writes nothing."""
    torch.set_num_threads(1)
    seen = {}
    for row in measured_rows():
        findings = survey(row.make(), row.chosen(), devices=row.size, precision=row.precision, tolerance=row.tolerance)
        failures = [f"{row}, {each.case}: {each.message}" for each in findings if each.result == "failed"]
        if failures:
            raise SystemExit("\n".join(failures))
        print(row, "done", flush=True)
        seen[row.name] = findings
    before, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(before + BEGIN + table(seen) + END + rest.split(END)[1])


if __name__ == "__main__":
    main()
