"""Metrics as TensorBoard's event files: `tensorboard --logdir root`. Needs the extra `loggers`.

Each call is flushed, so what was logged is on disk when the process is killed.
"""

from __future__ import annotations

import importlib.util
import os
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

from fabric.output.loggers.directory import make_run_directory


@final
class TensorBoardLogger:
    """Writes scalars below `root/name/version_N`. `version=None` takes the next free number.

    The first metric creates the files, in the process that logs it; deleting the logger closes them. A pickled or
    forked copy in another process starts a run of its own.
    Raises: ModuleNotFoundError: tensorboard is not installed.
    """

    def __init__(self, root: str | os.PathLike[str], name: str = "", version: int | str | None = None) -> None:
        check_installed()
        self.root, self.name, self.version = Path(root), name, version
        self._writer: Any = None
        self._process_id = -1

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Write each metric at `step`; without one, TensorBoard shows it at 0.

        Raises: FileExistsError: `version` was given, and exists.
        """
        writer = self._open()
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Write the hyperparameters, which TensorBoard shows as the text `hyperparameters`."""
        rows = "".join(f"| {name} | {value} |\n" for name, value in params.items())
        writer = self._open()
        writer.add_text("hyperparameters", f"| name | value |\n| --- | --- |\n{rows}")
        writer.flush()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.root, self.name, self.version)

    def _open(self) -> Any:
        if self._process_id != os.getpid():
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(make_run_directory(self.root, self.name, self.version)))
            self._process_id = os.getpid()
            weakref.finalize(self, _close, self._writer, self._process_id)
        return self._writer


def check_installed() -> None:
    """Raise ModuleNotFoundError where tensorboard is not installed."""
    if importlib.util.find_spec("tensorboard") is None:
        raise ModuleNotFoundError(
            "`TensorBoardLogger` needs tensorboard, which is not installed. Run `pip install "
            "'torchfabric[loggers]'`, or write a file of rows with `CSVLogger`."
        )


def _close(writer: Any, process_id: int) -> None:
    if process_id == os.getpid():  # a fork copies the writer but not its thread, for which closing would wait for ever
        writer.close()
