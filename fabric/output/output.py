"""What a program prints, shows and logs: on rank zero only, whichever rank calls.

`Fabric` extends it with everything that knows of a launch.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, TypeVar, final

from fabric.loop.seed import seed_everything
from fabric.output.callbacks import call
from fabric.output.logger import log_metrics, metric_writer
from fabric.output.progress import progress

T = TypeVar("T")


@final
class RankLogger(logging.LoggerAdapter):  # type: ignore[type-arg]  # Python 3.10 has no argument there
    """A logger of Python's `logging` that logs on rank zero, or on all ranks. Each record has the attribute `rank`.

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


class Output(ABC):
    """The callbacks and loggers of a fabric, and what rank zero prints."""

    def __init__(self, callbacks: Sequence[Any], loggers: Sequence[Any]) -> None:
        self._callbacks, self._loggers = callbacks, list(loggers)
        for one in self._loggers:
            metric_writer(one)  # raises if it has no method that takes metrics

    @property
    @abstractmethod
    def is_global_zero(self) -> bool:
        """Whether this is rank 0."""

    @property
    @abstractmethod
    def global_rank(self) -> int:
        """This process's rank over all nodes, from 0."""

    @property
    @abstractmethod
    def world_size(self) -> int:
        """The number of ranks on all nodes."""

    @property
    def logger(self) -> Any:
        """The first logger, or None."""
        return self._loggers[0] if self._loggers else None

    @property
    def loggers(self) -> list[Any]:
        """The loggers, in the order given. A logger may be appended at any time, also after `launch`."""
        return self._loggers

    def print(self, *values: object, sep: str = " ", end: str = "\n", **options: Any) -> None:
        """`print` on rank zero only, in one write, above the progress bar if one is shown."""
        if self.is_global_zero:  # rich moves the lines of `sys.stdout` above its bar
            print(sep.join(map(str, values)) + end, end="", **options)

    def get_logger(self, name: str | None = None, all_ranks: bool = False) -> RankLogger:
        """A logger of Python's `logging` that logs on rank zero only, or on all ranks.

            log = fabric.get_logger(__name__)
            log.info("epoch %d", epoch)

        A record has the attribute `rank`: `logging.Formatter("%(rank)d %(message)s", defaults={"rank": "-"})` shows it,
        and "-" in the records of other loggers. Levels and handlers are those of `logging.getLogger(name)`.
        """
        return RankLogger(name, lambda: self.global_rank, all_ranks=all_ranks)

    def progress(self, iterable: Iterable[T], description: str = "", *, total: int | None = None) -> Iterator[T]:
        """Iterate with a progress bar on rank zero: samples per second over all ranks, and the time left. `total`: the
        number of items, if `len(iterable)` is not known."""
        is_zero = self.is_global_zero
        return progress(iterable, description, total=total, num_ranks=self.world_size, enabled=is_zero)

    def log(self, name: str, value: Any, step: int | None = None) -> None:
        """Log one metric to every logger, on rank zero."""
        self.log_dict({name: value}, step)

    def log_dict(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log metrics (numbers, or tensors of one element) to every logger, on rank zero.

        A tensor on a device is waited for, if there are loggers. Raises: ValueError: a tensor of several elements.
        """
        if self.is_global_zero:
            log_metrics(self._loggers, metrics, step)

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Log the hyperparameters to every logger that has `log_hyperparams`, on rank zero."""
        if self.is_global_zero:
            call(self._loggers, "log_hyperparams", dict(params))

    def call(self, hook: str, *args: Any, **kwargs: Any) -> None:
        """Run the method `hook` of every callback that has it, in the order given."""
        call(self._callbacks, hook, *args, **kwargs)

    @staticmethod
    def seed_everything(seed: int, workers: bool = True) -> int:
        """Seed Python, NumPy and torch on every device; every rank gets the same seed."""
        return seed_everything(seed, workers=workers)
