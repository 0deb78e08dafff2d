"""A logger of Python's `logging` that knows its rank: `Fabric.get_logger`."""

import logging
from collections.abc import Callable, MutableMapping
from typing import Any, final


@final
class RankLogger(logging.LoggerAdapter):  # type: ignore[type-arg]  # Python 3.10 has no argument there
    """Logs on rank zero, or on all ranks. Each record has the attribute `rank`.

    `rank`: returns the rank; read when something is logged.
    """

    def __init__(self, name: str | None, rank: Callable[[], int], *, all_ranks: bool) -> None:
        super().__init__(logging.getLogger(name), {})
        self._rank, self._all_ranks = rank, all_ranks

    def isEnabledFor(self, level: int) -> bool:  # noqa: N802
        """Whether this rank logs a message of this level."""
        return super().isEnabledFor(level) and (self._all_ranks or self._rank() == 0)

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Add the rank to the record."""
        return msg, {**kwargs, "extra": {**(kwargs.get("extra") or {}), "rank": self._rank()}}
