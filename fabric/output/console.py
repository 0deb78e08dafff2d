"""Print from one rank, above a progress bar where one is shown.

While a bar is live, rich replaces `sys.stdout` and moves each line above the bar, so a plain `print` is enough.
Renderables (tables, trees) go to rich's console, which also shows the bar.
"""

from __future__ import annotations

import sys
from typing import Any


def print_rank_zero(*values: object, is_rank_zero: bool, **options: Any) -> None:
    """`print(*values, **options)` if `is_rank_zero`, otherwise nothing. Text is printed without markup.

    Tables and other renderables of rich are drawn, unless `file` is given.
    """
    if not is_rank_zero:
        return
    if "rich" in sys.modules and "file" not in options and _any_renderable(values):
        _draw(*values, **options)
    else:
        print(*values, **options)


def _any_renderable(values: tuple[object, ...]) -> bool:
    from rich.console import ConsoleRenderable, RichCast

    return any(isinstance(value, ConsoleRenderable | RichCast) and not isinstance(value, type) for value in values)


def _draw(*values: object, sep: str = " ", end: str = "\n", flush: bool = False) -> None:
    from rich import get_console

    get_console().print(*values, sep=sep, end=end, markup=False, highlight=False, emoji=False)
    if flush:
        sys.stdout.flush()
