"""Lightning Fabric's base class of loggers, for `isinstance` and for custom loggers."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from fabric.lightning.utilities.rank_zero import rank_zero_only
from fabric.output.loggers.logger import next_version

T = TypeVar("T")


class Logger(ABC):
    """Writes metrics and hyperparameters. Any class with `log_metrics` is a subclass, also Lightning's loggers."""

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
        """The folder of all versions; None if nothing is on disk."""
        return None

    @property
    def log_dir(self) -> str | None:
        """The folder of this version; None if nothing is on disk."""
        return None

    @property
    def group_separator(self) -> str:
        """The separator in the names of metrics."""
        return "/"

    @abstractmethod
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Write metrics."""

    @abstractmethod
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Write the hyperparameters of a run."""

    def log_graph(self, model: Any, input_array: Any = None) -> None:  # noqa: B027
        """Does nothing, unless a logger supports graphs."""

    def save(self) -> None:  # noqa: B027
        """Write buffered metrics."""

    def finalize(self, status: str) -> None:
        """Called at the end of a run."""
        self.save()


class FolderLogger(Logger):
    """A logger that writes each version to a folder of its own: `root_dir/name/version_N`."""

    def __init__(
        self, root_dir: str | os.PathLike[str], name: str | None, version: int | str | None, sub_dir: str = ""
    ) -> None:
        self._root, self._name, self._version, self._sub_dir = Path(root_dir), name or "", version, sub_dir

    @property
    def name(self) -> str:
        """The name of the experiment."""
        return self._name

    @property
    def version(self) -> int | str:
        """The version; the next free number, if none was given."""
        if self._version is None:
            self._version = next_version(self._root / self._name)
        return self._version

    @property
    def root_dir(self) -> str:
        """The folder of all experiments."""
        return str(self._root)

    @property
    def log_dir(self) -> str:
        """The folder of this version."""
        version = self.version if isinstance(self.version, str) else f"version_{self.version}"
        return str(self._root / self._name / version / self._sub_dir)


def rank_zero_experiment(function: Callable[[Any], T]) -> Callable[[Any], T | _Nothing]:
    """The property `experiment` on rank zero; on other ranks an object whose methods do nothing."""

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
    """The metrics as numbers by name, with `prefix` before each name."""
    return {
        f"{prefix}{separator}{name}" if prefix else name: value.item() if "item" in dir(value) else value
        for name, value in metrics.items()
    }


def settings(params: Any) -> dict[str, Any]:
    """The hyperparameters as a dict, from a mapping or a namespace."""
    return dict(params) if isinstance(params, Mapping) else dict(vars(params))
