"""Functions that run on rank zero only.

The rank is read when a function is called: before `launch` it is that of the environment, as in that library.
"""

import functools
import logging
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

from fabric.launchers.environments import detect_world

F = TypeVar("F", bound=Callable[..., Any])

_log = logging.getLogger("fabric.lightning")
_log.setLevel(logging.INFO)  # as that library's


class _RankZeroOnly:
    """The decorator, and the attribute `rank`."""

    @property
    def rank(self) -> int:
        """The rank of this process, or of its parent's, from the environment; 0 outside of a launched job."""
        world = detect_world(os.environ, inherited=True)
        return 0 if world is None else world.rank

    def __call__(self, function: F, default: Any = None) -> F:
        @functools.wraps(function)
        def on_rank_zero(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs) if self.rank == 0 else default

        return on_rank_zero  # type: ignore[return-value]


rank_zero_only = _RankZeroOnly()
"""A function that does nothing and returns `default` on ranks other than zero."""


class LightningDeprecationWarning(DeprecationWarning):
    """The category of `rank_zero_deprecation`."""


@rank_zero_only
def rank_zero_debug(message: object, **kwargs: Any) -> None:
    """Log at the level DEBUG."""
    _log.debug(message, **kwargs)


@rank_zero_only
def rank_zero_info(message: object, **kwargs: Any) -> None:
    """Log by the standard logger `fabric.lightning`, whose level is INFO; without a handler, print to stderr."""
    if _log.hasHandlers():
        _log.info(message, **kwargs)
    elif _log.isEnabledFor(logging.INFO):  # Python itself prints warnings alone
        print(message, file=sys.stderr)


@rank_zero_only
def rank_zero_warn(message: Any, stacklevel: int = 4, category: type[Warning] = UserWarning) -> None:
    """Warn, once for each line of code."""
    warnings.warn(message, stacklevel=stacklevel, category=category)


@rank_zero_only
def rank_zero_deprecation(message: Any, stacklevel: int = 5) -> None:
    """Warn of a deprecation."""
    warnings.warn(message, stacklevel=stacklevel, category=LightningDeprecationWarning)
