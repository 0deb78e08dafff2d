"""Containers."""

from __future__ import annotations

from typing import Any


class AttributeDict(dict[str, Any]):
    """A dict whose entries can be read and written as attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"There is no entry {name!r}; there are {', '.join(map(repr, self))}.") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def __delattr__(self, name: str) -> None:
        if name not in self:
            raise AttributeError(f"There is no entry {name!r}; there are {', '.join(map(repr, self))}.")
        del self[name]
