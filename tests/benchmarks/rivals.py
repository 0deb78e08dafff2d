"""The libraries people use today, where they are installed, behind the calls that the benchmarks need."""

from __future__ import annotations

import importlib.util
import logging
import os
import warnings
from typing import Any

RIVALS = {"lightning_fabric": "LF", "accelerate": "AC", "torch_checkpointing": "TC"}


def installed() -> list[str]:
    """The short names of those that can be imported here."""
    return [short for package, short in RIVALS.items() if importlib.util.find_spec(package) is not None]


def quiet() -> None:
    """Their warnings and log lines are not part of the measurement."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)


def lightning(strategy: str = "auto", devices: int = 1) -> Any:
    """A Lightning Fabric within ranks that exist already, or alone."""
    from lightning_fabric import Fabric
    from lightning_fabric.plugins.environments import TorchElasticEnvironment

    if devices == 1:
        fabric = Fabric(accelerator="cpu", devices=1, strategy=strategy)
    else:
        os.environ.update(TORCHELASTIC_RUN_ID="bench", GROUP_RANK="0")
        fabric = Fabric(accelerator="cpu", devices=devices, strategy=strategy, plugins=[TorchElasticEnvironment()])
    fabric.launch()
    return fabric


def accelerator() -> Any:
    """An Accelerator within ranks that exist already, or alone."""
    from accelerate import Accelerator

    return Accelerator(cpu=True)


def accelerated(model: Any, optimizer: Any) -> Any:
    """An Accelerator that saves and loads a model and an optimizer, which it does not wrap."""
    found = accelerator()
    found.prepare_model(model, evaluation_mode=True)
    found.prepare_optimizer(optimizer)
    return found


def checkpoint_manager() -> Any:
    """A manager of torch_checkpointing that saves synchronously: each rank writes a file of what it has.

    Without O_DIRECT, which is its default: with it, unaligned writes fail with EINVAL on ext4 (0.1.1).
    """
    from torch_checkpointing import CheckpointManager
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    config = CheckpointManager.Config.with_sync_save()
    config.storage_config = LocalFileSystemStorageConfig(use_direct_io=False)
    return config.build()
