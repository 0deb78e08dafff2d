"""Lightning Fabric's `Logger`, `CSVLogger` and `TensorBoardLogger`, for `isinstance`, and to derive loggers from."""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar, final, runtime_checkable

from fabric.lightning.utilities.rank_zero import rank_zero_only
from fabric.output import csv_logger, tensorboard_logger
from fabric.output.logger import next_version

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


@runtime_checkable
class _Scalar(Protocol):
    """A tensor, or a scalar of NumPy."""

    def item(self) -> Any: ...


class FolderLogger(Logger):
    """A logger that writes each version to a folder of its own: `root_dir/name/version_N`."""

    LOGGER_JOIN_CHAR = "-"
    """The separator between the prefix and the name of a metric."""

    def __init__(
        self, root_dir: str | os.PathLike[str], name: str | None, version: int | str | None, prefix: str, sub_dir: str
    ) -> None:
        self._root, self._name, self._version = Path(root_dir), name or "", version
        self._prefix, self._sub_dir = prefix, sub_dir

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

    def _numbers(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """The metrics as numbers by name, with the prefix before each name."""
        before = f"{self._prefix}{self.LOGGER_JOIN_CHAR}" if self._prefix else ""
        return {
            f"{before}{name}": value.item() if isinstance(value, _Scalar) else value for name, value in metrics.items()
        }


def rank_zero_experiment(function: Callable[[Any], T]) -> "Callable[[Any], T | _Nothing]":
    """The property `experiment` on rank zero; on other ranks an object whose methods do nothing."""

    def experiment(self: Any) -> "T | _Nothing":
        return function(self) if rank_zero_only.rank == 0 else _Nothing()

    experiment.__doc__ = function.__doc__
    return experiment


class _Nothing:
    """An object whose methods and items do nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None

    def __getitem__(self, index: Any) -> "_Nothing":
        return self

    def __setitem__(self, index: Any, value: Any) -> None:
        pass


def settings(params: Any) -> dict[str, Any]:
    """The hyperparameters as a dict, from a mapping or a namespace."""
    return dict(params) if isinstance(params, Mapping) else dict(vars(params))


@final
class CSVLogger(FolderLogger):
    """Writes `root_dir/name/version_N/metrics.csv`, on rank zero only.

    `name=None`: versions are in `root_dir` itself. `version=None`: the next free number, chosen when it is first
    read. Every row is written at once, whatever `flush_logs_every_n_steps` is.
    Raises: ValueError: `flush_logs_every_n_steps` is below 1.
    """

    def __init__(
        self,
        root_dir: str | os.PathLike[str],
        name: str | None = "lightning_logs",
        version: int | str | None = None,
        prefix: str = "",
        flush_logs_every_n_steps: int = 100,
    ) -> None:
        if flush_logs_every_n_steps < 1:
            raise ValueError(f"`flush_logs_every_n_steps={flush_logs_every_n_steps}`: write a number from 1 on.")
        super().__init__(root_dir, name, version, prefix, "")
        self._rows: csv_logger.CSVRows | None = None

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        rows = self._open()
        named = self._numbers(metrics)
        named.pop("step", None)  # the column is what `step=` says
        rows.append(named, rows.num_rows if step is None else step)

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        csv_logger.write_hyperparams(self._open().file.parent, settings(params))

    def _open(self) -> csv_logger.CSVRows:
        if self._rows is None:
            file = Path(self.log_dir) / "metrics.csv"
            if file.exists():
                raise FileExistsError(
                    f"{str(file)!r} exists, and may hold the metrics of another run. Leave `version` out for the next "
                    "free number, or write one that is free."
                )
            file.parent.mkdir(parents=True, exist_ok=True)
            self._rows = csv_logger.CSVRows(file)
        return self._rows


@final
class TensorBoardLogger(FolderLogger):
    """Writes event files to `root_dir/name/version_N/sub_dir`, on rank zero only. Needs the extra `loggers`.

    Other arguments go to `torch.utils.tensorboard.SummaryWriter`.
    Raises: ModuleNotFoundError: tensorboard is not installed.
    """

    def __init__(
        self,
        root_dir: str | os.PathLike[str],
        name: str | None = "lightning_logs",
        version: int | str | None = None,
        default_hp_metric: bool = True,
        prefix: str = "",
        sub_dir: str | os.PathLike[str] | None = None,
        **kwargs: Any,
    ) -> None:
        tensorboard_logger.check_installed()
        super().__init__(root_dir, name, version, prefix, "" if sub_dir is None else os.fspath(sub_dir))
        self._default_hp_metric, self._options = default_hp_metric, kwargs
        self._writer: Any = None

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """The `SummaryWriter`."""
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(log_dir=self.log_dir, **self._options)
        return self._writer

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        for name, value in self._numbers(metrics).items():
            if isinstance(value, dict):
                self.experiment.add_scalars(name, value, step)
            else:
                self.experiment.add_scalar(name, value, step)

    @rank_zero_only
    def log_hyperparams(self, params: Any, metrics: Any = None, step: int | None = None, **kwargs: Any) -> None:
        """Write the tab "HPARAMS": hyperparameters, and the metrics that are compared over them."""
        compared = metrics if isinstance(metrics, dict) else {"hp_metric": -1 if metrics is None else metrics}
        compared = compared if metrics is not None or self._default_hp_metric else {}
        tensorboard_logger.write_hyperparams(self.experiment, settings(params), compared)
        if compared:
            self.log_metrics(compared, 0 if step is None else step)

    @rank_zero_only
    def log_graph(self, model: Any, input_array: Any = None) -> None:
        if input_array is not None:
            self.experiment.add_graph(model, input_array)

    @rank_zero_only
    def save(self) -> None:
        if self._writer is not None:
            self._writer.flush()

    @rank_zero_only
    def finalize(self, status: str) -> None:
        if self._writer is not None:
            self._writer.flush()
            self._writer.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_writer": None}
