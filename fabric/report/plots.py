"""The plots of a report, as SVG within the page: matplotlib draws, and the page's style sheet has the colours.

Runs stand side by side on one scale. A colour is drawn as a placeholder, which becomes a variable of CSS, so that one
page is light or dark; text stays text. Lines are simplified to what can be seen, so the page of a long run is small.
"""

import io
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from html import escape
from statistics import fmean
from typing import Any

from fabric.monitor.window import PHASES
from fabric.report.run import Run

MOST_RANKS = 32
INK, GRID = "#0e0e01", "#0e0e02"
COLORS = tuple(f"#0f0f{number:02x}" for number in range(8))
_OPTIONS = {
    "svg.fonttype": "none",
    "font.size": 9,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
}
_MEMORY = [f"monitor/{where}_memory{which}_bytes" for where in ("device", "host") for which in ("", "_peak")]
_OF_THE_MONITOR: tuple[tuple[str, str, Sequence[str], str | None], ...] = (
    ("Loss and learning rate", "loss", ("monitor/loss",), "monitor/learning_rate"),
    ("Norm of the gradient", "norm", ("monitor/gradient_norm",), None),
    ("Samples a second", "samples/s", ("monitor/samples_per_second",), None),
    ("Tokens a second", "tokens/s", ("monitor/tokens_per_second",), None),
    ("Model FLOPs utilization", "MFU, %", ("monitor/mfu",), None),
    ("Seconds a step", "s", ("monitor/step_seconds",), None),
    ("Memory, greatest of all ranks", "GiB", _MEMORY, None),
)
"""Title, unit, metrics, and a metric on a scale of its own."""


def plots(runs: Sequence[Run]) -> Iterator[tuple[str, str]]:
    """The title and the SVG of each plot for which some run has numbers.

    Raises: ValueError: matplotlib is not installed.
    """
    logged = dict.fromkeys(name for run in runs for name in run.series if not name.startswith("monitor/"))
    for title, unit, left, right in (*_OF_THE_MONITOR, *((name, name, (name,), None) for name in logged)):
        if any(name in run.series for run in runs for name in left):
            yield title, _draw(title, runs, partial(_lines, unit=unit, left=left, right=right))
    if any(run.of("window") for run in runs):
        yield "Where the time of a step goes", _draw("phases", runs, _phases)
        height = 2 + 0.2 * min(MOST_RANKS, max(len(_means(run)) for run in runs))
        yield "Ranks: where the time of each goes", _draw("ranks", runs, _ranks, height)


def _draw(title: str, runs: Sequence[Run], draw: Callable[[Any, Run], None], height: float = 2.8) -> str:
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ValueError(
            "`fabric report` needs matplotlib, which is not installed. Run `pip install 'torchfabric[report]'`."
        ) from error
    with matplotlib.rc_context({**_OPTIONS, "svg.hashsalt": title}):
        figure = Figure(figsize=(9, height), layout="constrained")
        for axes, run in zip(figure.subplots(1, len(runs), sharey=True, squeeze=False)[0], runs, strict=True):
            draw(axes, run)
            if len(runs) > 1:
                axes.set_title(run.name, fontsize=9)
        drawn = [axes.get_legend_handles_labels() for axes in figure.axes]
        legend = {label: handle for handles, labels in drawn for handle, label in zip(handles, labels, strict=True)}
        if len(legend) > 1:
            figure.legend(legend.values(), legend, loc="outside upper left", ncols=len(legend))
        text = io.StringIO()
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(text, format="svg", metadata=nothing, transparent=True)
    svg = re.sub(r"#0f0f0(\d)", r"var(--c\1)", text.getvalue().replace(INK, "var(--ink)").replace(GRID, "var(--grid)"))
    return f'<svg role="img" aria-label="{escape(title)}"{svg[svg.index("<svg") + len("<svg") :]}'


def _lines(axes: Any, run: Run, unit: str, left: Sequence[str], right: str | None) -> None:
    """Curves over steps, interrupted where the run was started again, and marks of what has happened."""
    for number, name in enumerate(left):
        _curve(axes, run, name, color=COLORS[number])
    axes.set(xlabel="step", ylabel=unit)
    if right is not None and right in run.series:
        other = axes.twinx()
        other.set_ylabel(_curve(other, run, right, color=COLORS[1], linestyle="--"))
        other.grid(visible=False)
    bottom = {"linestyle": "", "marker": "|", "transform": axes.get_xaxis_transform(), "clip_on": False}
    for number, kind in enumerate(("save", "skipped"), 2):
        if steps := [line["step"] for line in run.of(kind)]:
            axes.plot(steps, [0] * len(steps), color=COLORS[number], label=kind, **bottom)
    for step in run.restarts:
        axes.axvline(step, color=COLORS[7], linestyle=":", label="restart")


def _curve(axes: Any, run: Run, name: str, **style: Any) -> str:
    """Draw one metric, if there is one, and return its name in words."""
    words = name.removeprefix("monitor/").replace("mfu", "MFU, %").removesuffix("_bytes").replace("_", " ")
    factor = 2.0**-30 if name.endswith("_bytes") else 100.0 if name == "monitor/mfu" else 1.0
    if points := run.series.get(name):
        style["marker"] = "." if len(points) < 30 else ""
        axes.plot([step for step, _ in points], [factor * value for _, value in points], label=words, **style)
    return words


def _phases(axes: Any, run: Run) -> None:
    curves = [run.series.get(f"monitor/{phase}_seconds", []) for phase in PHASES]
    heights = ([1000 * value for _, value in points] for points in curves)
    if curves[0]:
        axes.stackplot([step for step, _ in curves[0]], *heights, colors=COLORS, labels=PHASES, linewidth=0)
    axes.set(xlabel="step", ylabel="ms a step")


def _ranks(axes: Any, run: Run) -> None:
    """Where there are many ranks: those that wait least, for which the others wait."""
    means = _means(run)
    ranks = sorted(sorted(range(len(means)), key=lambda rank: means[rank]["waiting"])[:MOST_RANKS])
    starts = [0.0] * len(ranks)
    for number, phase in enumerate(PHASES):
        values = [means[rank][phase] for rank in ranks]
        axes.barh([f"rank {rank}" for rank in ranks], values, left=starts, color=COLORS[number], label=phase)
        starts = list(map(sum, zip(starts, values, strict=True)))
    axes.set_ylim(len(ranks) - 0.4, -0.6)
    axes.tick_params(labelleft=True)
    axes.set(xlabel="ms a step, mean over windows")


def _means(run: Run) -> list[dict[str, float]]:
    """Of each rank, the milliseconds of a step in each phase: the mean over all windows."""
    return [
        {phase: 1000 * fmean(row.get(f"{phase}_seconds", 0.0) for row in rows) for phase in PHASES}
        for rows in zip(*(window["ranks"] for window in run.of("window")), strict=False)
    ]
