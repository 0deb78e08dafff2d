"""The results as a text table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fabric.testing.checks import Finding

_MARKS = {"equal": "=", "raised": "raises", "failed": "FAILED"}


def table(found: Mapping[str, Sequence[Finding]]) -> list[str]:
    """The lines of a table: a row for each strategy, a column for each case that was not equal everywhere, and the
    messages below. `=`: equal to one process of plain PyTorch."""
    different = dict.fromkeys(
        finding.case for findings in found.values() for finding in findings if finding.result != "equal"
    )
    header = ["", "equal", *different]
    rows = [header]
    for name, findings in found.items():
        by_case = {finding.case: _MARKS[finding.result] for finding in findings}
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
