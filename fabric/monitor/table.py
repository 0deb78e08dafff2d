"""The live table of `fabric.monitor`: drawn once per window, beside progress bars; lines where there is no terminal."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

from fabric.monitor.window import PHASES

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_MOST_ROWS = 8


@final
class Table:
    """Shows the latest window. `console`: by default rich's own, on standard output."""

    def __init__(self, console: "Console | None" = None) -> None:
        from rich import get_console
        from rich.live import Live

        self._console = console or get_console()
        is_live = self._console.file.isatty() and self._console.is_terminal and not self._console.is_dumb_terminal
        self._live = Live(console=self._console, auto_refresh=False) if is_live else None

    def show(self, step: int, metrics: Mapping[str, float], ranks: Sequence[Mapping[str, float]], slow: str) -> None:
        """Replace what is shown."""
        heads = _heads(step, metrics)
        if self._live is None:
            shares = ", ".join(f"{phase} {share}" for phase, share in zip(PHASES, _shares(metrics), strict=True))
            print(f"{', '.join(heads)}; {shares}.{slow and f' {slow}'}", file=self._console.file, flush=True)
            return
        if not self._live.is_started:
            self._live.start()
        self._live.update(_drawn(heads, metrics, ranks, slow), refresh=True)

    def close(self) -> None:
        """Leave the table as it is, and restore the terminal. A second call does nothing."""
        if self._live is not None:
            self._live.stop()


def _drawn(
    heads: Sequence[str], metrics: Mapping[str, float], ranks: Sequence[Mapping[str, float]], slow: str
) -> "RenderableType":
    from rich.console import Group
    from rich.table import Table as Grid
    from rich.text import Text

    grid = Grid(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
    for name in ("rank", "step", *PHASES, "memory"):
        grid.add_column(name, justify="right", no_wrap=True, overflow="ellipsis")
    rows: list[tuple[str, Mapping[str, float]]] = [("all", metrics)]
    if len(ranks) > 1:  # those that wait least first, if there are too many
        chosen = sorted(ranks, key=lambda each: each["waiting_seconds"])[:_MOST_ROWS]
        rows += [(str(each["rank"]), each) for each in sorted(chosen, key=lambda each: each["rank"])]
    for name, each in rows:
        memory = each.get("device_memory_peak_bytes", each.get("host_memory_bytes"))
        last = "" if memory is None else f"{in_words(memory)}B"
        grid.add_row(name, seconds_in_words(each["step_seconds"]), *_shares(each), last)
    more = f"{len(ranks) - _MOST_ROWS} more ranks wait longer" if len(ranks) > _MOST_ROWS else ""
    below = [Text(words, style=style) for words, style in ((more, "dim"), (slow, "bold")) if words]
    return Group(Text("  ".join(heads)), grid, *below)


def _heads(step: int, metrics: Mapping[str, float]) -> list[str]:
    """`step 1,240`, `12.3 steps/s`, ..."""
    heads = [f"step {step:,}"]
    for name, unit in (("steps", " steps"), ("samples", " samples"), ("tokens", " tokens"), ("flops", "FLOP")):
        if f"{name}_per_second" in metrics:
            heads.append(f"{in_words(metrics[f'{name}_per_second'])}{unit}/s")
    heads += [f"MFU {metrics['mfu']:.1%}"] if "mfu" in metrics else []
    for name, word in (("loss", "loss"), ("gradient_norm", "norm"), ("learning_rate", "lr")):
        heads += [f"{word} {metrics[name]:.4g}"] if name in metrics else []
    return heads


def _shares(each: Mapping[str, float]) -> list[str]:
    whole = each["step_seconds"]
    return [f"{each[f'{phase}_seconds'] / whole:.0%}" if whole else "" for phase in PHASES]


def seconds_in_words(seconds: float) -> str:
    """`81.2 ms`, `3.1 s`."""
    return f"{1e3 * seconds:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"


def in_words(number: Any) -> str:
    """A number with its unit's prefix: 1.25 M, 3.2 G; anything else as it is."""
    if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
        return "" if number is None else str(number)
    if isinstance(number, int) and abs(number) < 1e6:
        return f"{number:,}"
    for factor, prefix in ((1e15, " P"), (1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")):
        if abs(number) >= factor:
            return f"{number / factor:.4g}{prefix}"
    return f"{number:.4g}"
