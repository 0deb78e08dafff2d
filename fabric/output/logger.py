"""The interface of a logger: one method, which the loggers of other libraries already have.

Fabric calls it on rank zero only, with numbers. Lightning's loggers, Comet's experiments and the module `mlflow` have
`log_metrics`; a Weights & Biases run has `log`, and so has the module `wandb` once a run is open.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor


class Logger(Protocol):
    """All that a custom logger needs."""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> object:
        """Write metrics by name; the user defines what `step` counts."""


def metric_writer(logger: object) -> Callable[..., Any]:
    """The logger's method `log_metrics(metrics, step=...)`, or else `log(metrics, step=...)`.

    Looked up at each call, because `wandb.log` changes when a run is opened.
    Raises: TypeError: the logger has neither.
    """
    for name in ("log_metrics", "log"):
        method: Callable[..., Any] | None = getattr(logger, name, None)
        if method is not None:
            return method
    raise TypeError(
        f"`loggers` holds {logger!r}, a `{type(logger).__name__}`. A logger has `log_metrics(metrics, step=None)` or "
        "`log(metrics, step=None)`, and it has neither. Write one of them: the metrics are a dict of numbers by name."
    )


def log_metrics(loggers: Iterable[object], metrics: Mapping[str, Any], step: int | None) -> None:
    """Log numbers, or tensors of one element, to every logger. Nothing is read without one."""
    numbers: dict[str, Any] = {}
    for logger in loggers:
        numbers = numbers or {name: number_of(name, each) for name, each in metrics.items()}
        metric_writer(logger)(dict(numbers), step=step)


def number_of(name: str, value: Any) -> Any:
    """A metric as a number. Raises: ValueError: it is a tensor of several elements."""
    if not isinstance(value, Tensor):
        return value
    if value.numel() != 1:
        raise ValueError(f"`fabric.log({name!r}, ...)`: a tensor of {tuple(value.shape)} is no number. Log its mean.")
    return value.item()


def report_open_run(modules: Mapping[str, Any]) -> None:
    """Warn, in the process that starts the ranks, of an open run of Weights & Biases. `modules`: `sys.modules`."""
    if getattr(modules.get("wandb"), "run", None) is not None:
        logging.getLogger("fabric").warning(
            "`wandb.init()` ran before `fabric.launch()`, in a process that is no rank, and ranks that run the script "
            "again open a run each. Open one, on rank zero, after it: `if fabric.is_global_zero: "
            "fabric.loggers.append(wandb.init(...))`."
        )


def make_run_directory(root: Path, name: str, version: int | str | None) -> Path:
    """Create the directory of a run. `version=None` takes the next free number; simultaneous runs get one each.

    Raises: FileExistsError: the version was given, and exists.
    """
    above = root / name
    while True:
        number = next_version(above) if version is None else version
        directory = above / (f"version_{number}" if isinstance(number, int) else number)
        try:
            directory.mkdir(parents=True)
        except FileExistsError as error:
            if version is not None:
                raise FileExistsError(
                    f"`version={version!r}` of a logger: `{directory}` exists, and may hold another run's metrics. "
                    "Leave `version` out for the next free number, or write one that is free."
                ) from error
        else:
            return directory


def next_version(above: Path) -> int:
    """The number after the greatest of the directories `version_N` in `above`; 0 where there is none."""
    numbers = [path.name.removeprefix("version_") for path in above.glob("version_*")]
    return max((int(number) for number in numbers if number.isdecimal()), default=-1) + 1
