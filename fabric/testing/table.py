"""The results as a text table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fabric.testing.checks import Finding

_MARKS = {"equal": "=", "raised": "raises", "failed": "FAILED"}


def table(seen: Mapping[str, Sequence[Finding]]) -> list[str]:
    """The lines of a table: a row for each strategy, a column for each case that was not equal everywhere, and the
    messages below. `=`: equal to one process of plain PyTorch."""
    different = dict.fromkeys(
        finding.case for findings in seen.values() for finding in findings if finding.seen != "equal"
    )
    header = ["", "equal", *different]
    rows = [header]
    for name, findings in seen.items():
        by_case = {finding.case: _MARKS[finding.seen] for finding in findings}
        num_equal = sum(finding.seen == "equal" for finding in findings)
        rows.append([name, f"{num_equal} of {len(findings)}", *(by_case.get(case, "") for case in different)])
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    sentences = dict.fromkeys(
        f"{finding.case}: {finding.words}"
        for findings in seen.values()
        for finding in findings
        if finding.seen == "raised"
    )
    return [*lines, *sentences]
