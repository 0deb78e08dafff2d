"""Environment variables that are set for a while: libraries read them when they start."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, contextmanager, nullcontext


@contextmanager
def variables(environ: MutableMapping[str, str], values: Mapping[str, str]) -> Iterator[None]:
    """Context manager: the variables have these values inside, and their former ones after it."""
    before = {name: environ[name] for name in values if name in environ}
    environ.update(values)
    try:
        yield
    finally:
        for name in values:
            environ.pop(name, None)
        environ.update(before)


def default(environ: MutableMapping[str, str], name: str, value: str) -> AbstractContextManager[None]:
    """Context manager: the variable has this value inside, unless it has one already."""
    return nullcontext() if name in environ else variables(environ, {name: value})
