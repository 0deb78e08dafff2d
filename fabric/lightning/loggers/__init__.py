"""Loggers, with the arguments of Lightning Fabric."""

from __future__ import annotations

from fabric.lightning.loggers.csv_logs import CSVLogger
from fabric.lightning.loggers.logger import Logger
from fabric.lightning.loggers.tensorboard import TensorBoardLogger

__all__ = ["CSVLogger", "Logger", "TensorBoardLogger"]
