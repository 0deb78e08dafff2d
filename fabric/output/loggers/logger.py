"""The interface of a logger: one method, which the loggers of other libraries already have.

Fabric calls it on rank zero only, with numbers. Lightning's loggers, Comet's experiments and the module `mlflow` have
`log_metrics`; a Weights & Biases run has `log`, and so has the module `wandb` once a run is open.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeAlias

MetricWriter: TypeAlias = Callable[[Mapping[str, float], int | None], None]


class Logger(Protocol):
    """All that a custom logger needs."""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> object:
        """Write metrics by name; the user defines what `step` counts."""


def metric_writer(logger: object) -> MetricWriter:
    """A function that calls `logger.log_metrics(metrics, step=...)`, or else `logger.log(metrics, step=...)`.

    It looks the method up at each call, because `wandb.log` changes when a run is opened. It can be pickled if the
    logger can.
    Raises: TypeError: the logger has neither method, or they take other arguments.
    """
    for name in ("log_metrics", "log"):
        if _takes_metrics(getattr(logger, name, None)):
            return partial(_write, logger, name)
    found = [name for name in ("log_metrics", "log") if getattr(logger, name, None) is not None]
    has = f"has `{'` and `'.join(found)}`, which take other arguments" if found else "has neither"
    raise TypeError(
        f"`loggers` holds {logger!r}, a `{type(logger).__name__}`. A logger has `log_metrics(metrics, step=None)` or "
        f"`log(metrics, step=None)`, and it {has}. Write one of the two: the metrics are a dict of numbers by name."
    )


def record_hyperparams(loggers: Sequence[object], params: Mapping[str, Any]) -> None:
    """Pass the hyperparameters to each logger that has `log_hyperparams(params)`.

    Raises: TypeError: there are loggers, and none of them has this method.
    """
    methods = [method for logger in loggers if callable(method := getattr(logger, "log_hyperparams", None))]
    if loggers and not methods:
        kinds = ", ".join(f"`{type(logger).__name__}`" for logger in loggers)
        raise TypeError(
            f"`fabric.log_hyperparams(...)`: of the loggers {kinds}, none has `log_hyperparams(params)`. Add one that "
            "has it, such as `fabric.CSVLogger`, or write the method."
        )
    for method in methods:
        method(dict(params))


def _takes_metrics(method: Any) -> bool:
    if not callable(method):
        return False
    try:
        inspect.signature(method, follow_wrapped=False).bind({}, step=0)
    except TypeError:
        return False
    return True


def _write(logger: Any, method: str, metrics: Mapping[str, float], step: int | None) -> None:
    getattr(logger, method)(dict(metrics), step=step)
