"""`CSVLogger` with the arguments of Lightning Fabric. Each row is written at once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, final

from fabric.lightning.loggers.logger import FolderLogger, prefixed, settings
from fabric.lightning.utilities.rank_zero import rank_zero_only
from fabric.output.loggers.csv_file import CSVRows, write_hyperparams


@final
class CSVLogger(FolderLogger):
    """Writes `root_dir/name/version_N/metrics.csv`, on rank zero only.

    `name=None`: versions are in `root_dir` itself. `version=None`: the next free number, chosen when it is first
    read. Every row is written at once, whatever `flush_logs_every_n_steps` is.
    Raises: ValueError: `flush_logs_every_n_steps` is below 1.
    """

    LOGGER_JOIN_CHAR = "-"

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
        super().__init__(root_dir, name, version)
        self._prefix = prefix
        self._rows: CSVRows | None = None

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        rows = self._open()
        named = prefixed(metrics, self._prefix, self.LOGGER_JOIN_CHAR)
        named.pop("step", None)  # the column is what `step=` says
        rows.append(named, rows.num_rows if step is None else step)

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        write_hyperparams(self._open().file.parent, settings(params))

    def _open(self) -> CSVRows:
        if self._rows is None:
            file = Path(self.log_dir) / "metrics.csv"
            if file.exists():
                raise FileExistsError(
                    f"{str(file)!r} exists, and may hold the metrics of another run. Leave `version` out for the next "
                    "free number, or write one that is free."
                )
            file.parent.mkdir(parents=True, exist_ok=True)
            self._rows = CSVRows(file)
        return self._rows
