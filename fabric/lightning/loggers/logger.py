"""The role of a logger, as Lightning Fabric has it: a base class, for `isinstance` and for loggers of one's own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from fabric.lightning.utilities.rank_zero import rank_zero_only

T = TypeVar("T")


class Logger(ABC):
    """Takes metrics and settings. Every class with a method `log_metrics` counts as one, loggers of Lightning too."""

    @classmethod
    def __subclasshook__(cls, kind: type) -> Any:
        if cls is Logger:
            return any("log_metrics" in vars(each) for each in kind.__mro__)
        return NotImplemented

    @property
    @abstractmethod
    def name(self) -> str | None:
        """The name of the experiment."""

    @property
    @abstractmethod
    def version(self) -> int | str | None:
        """The version of the experiment."""

    @property
    def root_dir(self) -> str | None:
        """Where all versions are; None where nothing is on disk."""
        return None

    @property
    def log_dir(self) -> str | None:
        """Where this version is; None where nothing is on disk."""
        return None

    @property
    def group_separator(self) -> str:
        """What separates the words of a metric's name."""
        return "/"

    @abstractmethod
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Write metrics."""

    @abstractmethod
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Write the settings of a run."""

    def log_graph(self, model: Any, input_array: Any = None) -> None:  # noqa: B027
        """Nothing, unless a logger has something to draw a graph with."""

    def save(self) -> None:  # noqa: B027
        """Write what is not written yet."""

    def finalize(self, status: str) -> None:
        """The run is over."""
        self.save()


def rank_zero_experiment(function: Callable[[Any], T]) -> Callable[[Any], T | _Nothing]:
    """The property `experiment` on rank zero; elsewhere an object whose every method does nothing."""

    def experiment(self: Any) -> T | _Nothing:
        return function(self) if rank_zero_only.rank == 0 else _Nothing()

    experiment.__doc__ = function.__doc__
    return experiment


class _Nothing:
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None

    def __getitem__(self, index: Any) -> _Nothing:
        return self

    def __setitem__(self, index: Any, value: Any) -> None:
        pass


def prefixed(metrics: Mapping[str, Any], prefix: str, separator: str) -> dict[str, Any]:
    """The metrics, numbers by name, `prefix` before each name."""
    return {
        f"{prefix}{separator}{name}" if prefix else name: value.item() if "item" in dir(value) else value
        for name, value in metrics.items()
    }


def settings(params: Any) -> dict[str, Any]:
    """The settings of a run as a dict, from a mapping or a namespace."""
    return dict(params) if isinstance(params, Mapping) else dict(vars(params))
