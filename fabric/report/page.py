"""`fabric report`: one page, without a network and without a server, of one run, or of two side by side."""

import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fabric.report.plots import plots, restarts
from fabric.report.run import Line, Run

MOST_STEPS = 40
"""How many steps of one kind are named in the table of what has happened."""


def page(runs: Sequence[Run]) -> str:
    """The HTML. Raises: ModuleNotFoundError: matplotlib or jinja2 is not installed."""
    drawn = list(plots(runs))
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters.update(words=in_words, date=_date)
    return templates.get_template("page.html").render(
        title=" and ".join(run.name for run in runs),
        runs=runs,
        facts=[dict(_facts(run)) for run in runs],
        differences=list(_differences(*runs)) if len(runs) == 2 else None,
        plots=drawn,
        events=[sorted(_events(run)) for run in runs],
        slow=[list(_slow(run)) for run in runs],
    )


def in_words(number: Any) -> str:
    """A number with its unit's prefix: 1.25 M, 3.2 G; anything else as it is."""
    if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
        return "" if number is None else str(number)
    if isinstance(number, int) and abs(number) < 1e6:
        return f"{number:,}"
    for factor, prefix in ((1e12, " T"), (1e9, " G"), (1e6, " M")):
        if abs(number) >= factor:
            return f"{number / factor:.4g}{prefix}"
    return f"{number:.4g}"


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _facts(run: Run) -> Iterator[tuple[str, Any]]:
    """The few numbers that are read first."""
    starts, windows, ends = run.of("start"), run.of("window"), run.of("end")
    if starts:
        last = starts[-1]
        yield "started", _date(starts[0]["time"])
        yield "ranks", f"{last['num_ranks']} on {last['num_nodes']} node{'s' * (last['num_nodes'] > 1)}"
        yield "strategy", f"{last['strategy']}, {last['precision']}"
        yield "device", f"{last.get('device_name', last['device'])}, torch {last['torch']}"
        is_over = bool(ends) and ends[-1]["time"] >= last["time"]
        yield "end", _date(ends[-1]["time"]) if is_over else "none: killed, failed, or still running"
    if windows:
        metrics, steps = windows[-1]["metrics"], sum(window["num_steps"] for window in windows)
        seconds = sum(window["metrics"]["step_seconds"] * window["num_steps"] for window in windows)
        yield "last step", windows[-1]["step"]
        yield "seconds a step", seconds / steps
        for name in ("loss", "samples_per_second", "tokens_per_second", "flops_per_second", "mfu"):
            if name in metrics:
                yield f"last {name.replace('_', ' ')}", metrics[name]
    for peak in run.of("peak")[-1:]:
        yield "peak", f"{in_words(peak['peak_flops_per_second'])}FLOP/s ({peak['peak_source']})"
        yield "FLOPs a step and rank", peak["flops_per_step"]


def _differences(one: Run, other: Run) -> Iterator[tuple[str, Line | None, Line | None]]:
    """Settings with other values, or in one run only."""
    here, there = ({setting["name"]: setting for setting in run.settings} for run in (one, other))
    for name in dict.fromkeys((*here, *there)):
        pair = here.get(name), there.get(name)
        if None in pair or pair[0]["value"] != pair[1]["value"]:  # type: ignore[index]
            yield name, *pair


def _events(run: Run) -> Iterator[tuple[float, str, str]]:
    """Time, kind and words of what has happened; steps of one kind that may be many are one row, at the first."""
    before = restarts(run)
    for number, line in enumerate(run.of("start")):
        after = f" after step {before[number - 1]}" if 0 < number <= len(before) else ""
        yield line["time"], "start" if number == 0 else "restart", f"{line['num_ranks']} ranks{after}"
    for line in run.of("load", "end"):
        yield line["time"], line["kind"], f"step {line['step']}"
    for kind in ("save", "skipped", "sanitizer"):
        if lines := run.of(kind):
            named = ", ".join(str(line["step"]) for line in lines[:MOST_STEPS])
            more = f" and {len(lines) - MOST_STEPS} more" if len(lines) > MOST_STEPS else ""
            seconds = sum(line.get("seconds", 0.0) for line in lines)
            yield lines[0]["time"], kind, f"steps {named}{more}" + (f", {seconds:.3g} s in all" if seconds else "")
    for window in run.of("window"):
        if not math.isfinite(window["metrics"].get("loss", 0.0)):
            yield window["time"], "loss", f"{window['metrics']['loss']} in the window up to step {window['step']}"
            break
    for at, message in run.failures:
        yield at, "failure", message.splitlines()[0]


def _slow(run: Run) -> Iterator[Line]:
    """The ranks for which others waited: by phase, in how many windows, and by how much."""
    named = [window["slow"] for window in run.of("window") if window.get("slow")]
    for (rank, phase), count in Counter((slow["rank"], slow["phase"]) for slow in named).most_common(20):
        times = [slow["seconds"] for slow in named if (slow["rank"], slow["phase"]) == (rank, phase)]
        passing = sum(slow["is_passing"] for slow in named if (slow["rank"], slow["phase"]) == (rank, phase))
        yield {"rank": rank, "phase": phase, "windows": count, "seconds": sum(times) / count, "passing": passing}
