"""Defaults for environment variables that libraries read only once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, MutableMapping


@contextlib.contextmanager
def default(environ: MutableMapping[str, str], name: str, value: str) -> Iterator[None]:
    """Context manager: the variable has this value inside, unless it has one already."""
    if name in environ:
        yield
        return
    environ[name] = value
    try:
        yield
    finally:
        environ.pop(name, None)
