"""`fabric report`: one page, without a network and without a server, of one run, or of two side by side."""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean

from fabric.monitor.table import in_words
from fabric.report.plots import plots
from fabric.report.run import Line, Run

MOST_STEPS = 40
"""How many steps of one kind are named in the table of what has happened."""


def page(runs: Sequence[Run]) -> str:
    """The HTML. Raises: ValueError: matplotlib is not installed."""
    drawn = list(plots(runs))
    from jinja2 import Environment, FileSystemLoader

    templates = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True)
    templates.filters.update(words=in_words, date=_date)
    return templates.get_template("page.html").render(
        title=" and ".join(run.name for run in runs),
        runs=runs,
        differences=list(_differences(*runs)) if len(runs) == 2 else None,
        plots=drawn,
        events=[sorted(_events(run)) for run in runs],
        slow=list(map(_slow, runs)),
    )


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _differences(one: Run, other: Run) -> Iterator[tuple[str, Line | None, Line | None]]:
    """Settings with other values, or in one run only."""
    here, there = ({setting["name"]: setting for setting in run.settings} for run in (one, other))
    for name in dict.fromkeys((*here, *there)):
        pair = here.get(name), there.get(name)
        if None in pair or pair[0]["value"] != pair[1]["value"]:  # type: ignore[index]
            yield name, *pair


def _events(run: Run) -> Iterator[tuple[float, str, str]]:
    """Time, kind and words of what has happened; steps of one kind that may be many are one row, at the first."""
    before = run.restarts
    for number, line in enumerate(run.of("start")):
        size, after = line["num_ranks"], f" after step {before[number - 1]}" if 0 < number <= len(before) else ""
        yield line["time"], "restart" if number else "start", f"{size} rank{'s' * (size != 1)}{after}"
    for line in run.of("load", "end"):
        yield line["time"], line["kind"], f"step {line['step']}"
    for kind in ("save", "skipped", "sanitizer"):
        if lines := run.of(kind):
            named = ", ".join(str(line["step"]) for line in lines[:MOST_STEPS])
            more = f" and {len(lines) - MOST_STEPS} more" if len(lines) > MOST_STEPS else ""
            seconds = sum(line.get("seconds", 0.0) for line in lines)
            yield lines[0]["time"], kind, f"steps {named}{more}" + (f", {seconds:.3g} s in all" if seconds else "")
    for at, message in run.failures:
        yield at, "failure", message.partition("\n\n")[0].splitlines()[-1]  # after those of other ranks


def _slow(run: Run) -> list[Line]:
    """The ranks for which others waited, by phase: in how many windows, and by how much; most windows first."""
    found: dict[tuple[int, str], list[Line]] = {}
    for window in run.of("window"):
        if slow := window.get("slow"):
            found.setdefault((slow["rank"], slow["phase"]), []).append(slow)
    rows = sorted(found.values(), key=len, reverse=True)
    return [{**each[0], "windows": len(each), "seconds": fmean(slow["seconds"] for slow in each)} for each in rows]
