"""`TensorBoardLogger` with the arguments of Lightning Fabric, over torch's `SummaryWriter`."""

from __future__ import annotations

import os
from typing import Any, final

from fabric.lightning.loggers.logger import FolderLogger, prefixed, rank_zero_experiment, settings
from fabric.lightning.utilities.rank_zero import rank_zero_only
from fabric.output.loggers.tensorboard import check_installed, write_hyperparams


@final
class TensorBoardLogger(FolderLogger):
    """Writes event files to `root_dir/name/version_N/sub_dir`, on rank zero only. Needs the extra `loggers`.

    Other arguments go to `torch.utils.tensorboard.SummaryWriter`.
    Raises: ModuleNotFoundError: tensorboard is not installed.
    """

    LOGGER_JOIN_CHAR = "-"

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
        check_installed()
        super().__init__(root_dir, name, version, "" if sub_dir is None else os.fspath(sub_dir))
        self._default_hp_metric = default_hp_metric
        self._prefix = prefix
        self._options = kwargs
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
        for name, value in prefixed(metrics, self._prefix, self.LOGGER_JOIN_CHAR).items():
            if isinstance(value, dict):
                self.experiment.add_scalars(name, value, step)
            else:
                self.experiment.add_scalar(name, value, step)

    @rank_zero_only
    def log_hyperparams(self, params: Any, metrics: Any = None, step: int | None = None, **kwargs: Any) -> None:
        """Write the tab "HPARAMS": hyperparameters, and the metrics that are compared over them."""
        compared = metrics if isinstance(metrics, dict) else {"hp_metric": -1 if metrics is None else metrics}
        compared = compared if metrics is not None or self._default_hp_metric else {}
        write_hyperparams(self.experiment, settings(params), compared)
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
