"""What strategies with several processes share: the arguments for processes and process groups."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from fabric.lightning.strategies.strategy import Strategy
from fabric.lightning.unsupported import FABRIC_ARGUMENTS, refuse_arguments

LAUNCHERS = {"popen": "auto", "spawn": "spawn", "fork": "fork", "forkserver": "forkserver"}


class ParallelStrategy(Strategy):
    """A strategy of several processes."""

    @property
    def num_processes(self) -> int:
        """The number of processes on this node."""
        return self._within._configuration.topology.num_processes


def processes(
    where: str,
    process_group_backend: str | None,
    timeout: timedelta | None,
    start_method: str = "popen",
    **given: Any,
) -> dict[str, Any]:
    """The core's options for processes. `said`: arguments that belong to `Fabric`; None if not passed.

    Raises: ValueError, TypeError: a value is not allowed. UnsupportedError: one of `given` has a value.
    """
    refuse_arguments(where, given, FABRIC_ARGUMENTS)
    if start_method not in LAUNCHERS:
        raise ValueError(f"`{where}(start_method={start_method!r})`: write one of {', '.join(map(repr, LAUNCHERS))}.")
    if timeout is not None and not isinstance(timeout, timedelta):
        raise TypeError(
            f"`{where}(timeout={timeout!r})` is a `{type(timeout).__name__}`. Write a `datetime.timedelta`, such as "
            "`timedelta(minutes=30)`."
        )
    options: dict[str, Any] = {"launcher": LAUNCHERS[start_method], "backend": process_group_backend}
    return options if timeout is None else {**options, "timeout_seconds": timeout.total_seconds()}


def unknown(where: str, options: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Raise TypeError for an unknown option."""
    for name in options:
        if name not in known:
            raise TypeError(
                f"`{where}({name}=...)`: there is no such option here. Write one of {', '.join(sorted(known))}, or "
                "leave it out."
            )
