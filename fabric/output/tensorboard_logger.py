"""Metrics as TensorBoard's event files: `tensorboard --logdir root`. Needs the extra `loggers`.

Each call is flushed, so what was logged is on disk when the process is killed.
"""

import importlib.util
import os
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, final

from fabric.output.logger import make_run_directory


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
        """Write the hyperparameters to the tab "HPARAMS". In nested dictionaries their names are joined by "/"."""
        writer = self._open()
        write_hyperparams(writer, params, {})
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


def write_hyperparams(writer: Any, params: Mapping[str, Any], metrics: Mapping[str, Any]) -> None:
    """Write the tab "HPARAMS" of a run: hyperparameters, and the metrics that are compared over them; all, if none."""
    from torch.utils.tensorboard.summary import hparams

    plain = {name: value if isinstance(value, (bool, int, float)) else str(value) for name, value in _flat(params)}
    experiment, *session = hparams(plain, metrics)  # type: ignore[no-untyped-call]
    for summary in (experiment, *session) if metrics else session:
        writer.file_writer.add_summary(summary)


def _flat(params: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in params.items():
        yield from _flat(value, f"{before}{name}/") if isinstance(value, Mapping) else [(f"{before}{name}", value)]


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
