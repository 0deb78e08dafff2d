"""What a logger must answer. One method is enough, and other people's loggers have it as they are.

Fabric calls it on rank zero alone, with numbers. Lightning's loggers, Comet's experiments and the module `mlflow` have
`log_metrics`; a run of Weights & Biases has `log`, and the module `wandb` once a run is open.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeAlias

MetricWriter: TypeAlias = Callable[[Mapping[str, float], int | None], None]


class Logger(Protocol):
    """A logger of your own needs this and nothing else."""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> object:
        """Write metrics by name; `step` counts what the user counts."""


def metric_writer(logger: object) -> MetricWriter:
    """How to give metrics to `logger`, by `log_metrics(metrics, step=...)` or else by `log(metrics, step=...)`.

    The method is looked up again at each write: `wandb.log` is another function once a run is open.
    The writer pickles if the logger does.
    Raises: TypeError: it has neither, or what it has takes other arguments.
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
    """Give the settings of a run to each logger that has `log_hyperparams(params)`; the others take metrics alone.

    Raises: TypeError: there are loggers, and none of them has it.
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
