"""Names of parameters in messages."""

from __future__ import annotations

from collections.abc import Sequence


def name_some(names: Sequence[str]) -> str:
    """The first three names, with "..." if there are more."""
    return ", ".join(map(repr, names[:3])) + (", ..." if len(names) > 3 else "")
