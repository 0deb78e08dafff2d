"""The plots of a report, as SVG within the page: matplotlib draws, and the page's style sheet has the colours.

Runs stand side by side on one scale. A colour is drawn as a placeholder, which becomes a variable of CSS, so that one
page is light or dark; text stays text. Lines are simplified to what can be seen, so the page of a long run is small.
"""

import io
import math
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from fabric.report.run import Run

PHASES = ("data", "forward", "backward", "optimizer", "waiting", "saving", "other")
"""In the order of a step."""
MOST_RANKS = 32
INK, GRID = "#0e0e01", "#0e0e02"
COLORS = tuple(f"#0f0f{number:02x}" for number in range(8))
_OPTIONS = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "legend.fontsize": 8,
    "lines.linewidth": 1.2,
}


def plots(runs: Sequence[Run]) -> Iterator[tuple[str, str]]:
    """The title and the SVG of each plot for which some run has numbers.

    Raises: ModuleNotFoundError: matplotlib is not installed.
    """
    lines = [
        ("Loss and learning rate", "loss", [("loss", 1.0)], ("learning rate", [("learning_rate", 1.0)])),
        ("Norm of the gradient", "norm", [("gradient_norm", 1.0)], None),
        ("Samples a second", "samples/s", [("samples_per_second", 1.0)], ("MFU, %", [("mfu", 100.0)])),
        ("Tokens a second", "tokens/s", [("tokens_per_second", 1.0)], None),
        ("Seconds a step", "s", [("step_seconds", 1.0)], None),
        ("Memory, greatest of all ranks", "GiB", [(name, 2.0**-30) for name in MEMORY], None),
    ]
    for title, unit, left, right in lines:
        if any(_curve(run, name, 1.0)[0] for run in runs for name, _ in left):
            yield title, _draw(title, runs, partial(_lines, unit=unit, left=left, right=right))
    if any(run.of("window") for run in runs):
        yield "Where the time of a step goes", _draw("phases", runs, _phases)
        yield "Ranks: where the time of each goes", _draw("ranks", runs, _ranks, height=2 + 0.2 * _num_ranks(runs))
    for name in dict.fromkeys(name for run in runs for name in run.logged):
        yield name, _draw(name, runs, partial(_one_metric, name=name))


MEMORY = ("device_memory_bytes", "device_memory_peak_bytes", "host_memory_bytes", "host_memory_peak_bytes")


def _draw(title: str, runs: Sequence[Run], draw: Callable[[Any, Run], None], height: float = 2.8) -> str:
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "`fabric report` needs matplotlib, which is not installed. Run `pip install 'torchfabric[report]'`."
        ) from error
    with matplotlib.rc_context({**_OPTIONS, "svg.hashsalt": title}):
        figure = Figure(figsize=(9, height), layout="constrained")
        figure.patch.set_alpha(0)
        for axes, run in zip(figure.subplots(1, len(runs), sharey=True, squeeze=False)[0], runs, strict=True):
            axes.patch.set_alpha(0)
            draw(axes, run)
            if len(runs) > 1:
                axes.set_title(run.name, fontsize=9)
        drawn = [axes.get_legend_handles_labels() for axes in figure.axes]
        legend = {label: handle for handles, labels in drawn for handle, label in zip(handles, labels, strict=True)}
        if len(legend) > 1:
            figure.legend(legend.values(), legend, loc="outside upper left", ncols=len(legend))
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    svg = text.getvalue()[text.getvalue().index("<svg") :]
    svg = re.sub(r"#0f0f0(\d)", r"var(--c\1)", svg.replace(INK, "var(--ink)").replace(GRID, "var(--grid)"))
    return re.sub(
        r'<svg [^>]*?viewBox="([^"]*)"[^>]*>', rf'<svg role="img" aria-label="{title}" viewBox="\1">', svg, count=1
    )


def _lines(axes: Any, run: Run, unit: str, left: Sequence[tuple[str, float]], right: Any) -> None:
    """Curves over steps, interrupted where the run was started again, and marks of what has happened."""
    for number, (name, factor) in enumerate(left):
        steps, values = _curve(run, name, factor)
        if steps:
            label = name.removesuffix("_bytes").replace("_", " ")
            axes.plot(steps, values, color=COLORS[number], label=label)
    axes.set(xlabel="step", ylabel=unit)
    if right is not None and _curve(run, right[1][0][0], 1.0)[0]:
        other = axes.twinx()
        other.plot(*_curve(run, *right[1][0]), color=COLORS[1], linestyle="--", label=right[0])
        other.set_ylabel(right[0])
        other.grid(visible=False)
    for number, kind in enumerate(("save", "skipped"), 2):
        steps = [line["step"] for line in run.of(kind) if "step" in line]
        if steps:
            transform = axes.get_xaxis_transform()
            axes.plot(
                steps, [0] * len(steps), "|", color=COLORS[number], transform=transform, label=kind, clip_on=False
            )
    for step in restarts(run):
        axes.axvline(step, color=COLORS[7], linestyle=":", label="restart" if step == restarts(run)[0] else None)


def _one_metric(axes: Any, run: Run, name: str) -> None:
    points = run.logged.get(name, [])
    axes.plot([step for step, _ in points], [value for _, value in points], color=COLORS[0])
    axes.set(xlabel="step", ylabel=name)


def _phases(axes: Any, run: Run) -> None:
    curves = [_curve(run, f"{phase}_seconds", 1000.0) for phase in PHASES]
    if curves[0][0]:
        axes.stackplot(curves[0][0], *(values for _, values in curves), colors=COLORS, labels=PHASES, linewidth=0)
    axes.set(xlabel="step", ylabel="ms a step")


def _ranks(axes: Any, run: Run) -> None:
    """The mean over all windows. Where there are many ranks: those that wait least, for which the others wait."""
    rows = sorted(sorted(_means(run).items(), key=lambda row: row[1][PHASES.index("waiting")])[:MOST_RANKS])
    starts = [0.0] * len(rows)
    for number, phase in enumerate(PHASES):
        values = [means[number] for _, means in rows]
        axes.barh([f"rank {rank}" for rank, _ in rows], values, left=starts, color=COLORS[number], label=phase)
        starts = [start + value for start, value in zip(starts, values, strict=True)]
    axes.set_ylim(_num_ranks([run]) - 0.4, -0.6)
    axes.tick_params(labelleft=True)
    axes.set(xlabel="ms a step")


def _means(run: Run) -> dict[int, list[float]]:
    """Of each rank, the milliseconds of a step in each phase, mean over all steps."""
    sums: dict[int, list[float]] = {}
    windows = run.of("window")
    total = sum(window["num_steps"] for window in windows)
    for window in windows:
        for row in window["ranks"]:
            means = sums.setdefault(row["rank"], [0.0] * len(PHASES))
            for number, phase in enumerate(PHASES):
                means[number] += 1000 * row.get(f"{phase}_seconds", 0.0) * window["num_steps"] / total
    return sums


def _num_ranks(runs: Sequence[Run]) -> int:
    return min(MOST_RANKS, max(len(_means(run)) for run in runs))


def _curve(run: Run, name: str, factor: float) -> tuple[list[float], list[float]]:
    """Steps and values of a metric of the monitor, with a gap at each new start; empty if there is none."""
    steps, values = list[float](), list[float]()
    for line in run.of("start", "window"):
        if line["kind"] == "start" and steps:
            steps.append(steps[-1])
            values.append(math.nan)
        elif name in line.get("metrics", {}):
            steps.append(line["step"])
            values.append(factor * line["metrics"][name])
    return steps, values


def restarts(run: Run) -> list[float]:
    """The last step before each new start."""
    before, found = None, list[float]()
    for line in run.of("start", "window"):
        if line["kind"] == "window":
            before = line["step"]
        elif before is not None:
            found.append(before)
    return found
