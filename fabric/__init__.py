"""A lightweight fabric for raw PyTorch loops: any device, any number of processes, any sharding scheme.

The names below are imported when they are first used, so that `fabric --help` need not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str
    from fabric.checkpoints.directory import CheckpointDirectory as CheckpointDirectory
    from fabric.checks.agreement import SanitizerError as SanitizerError
    from fabric.checks.check import Check as Check
    from fabric.checks.nonfinite import NonFiniteGradientsError as NonFiniteGradientsError
    from fabric.fabric import Fabric as Fabric
    from fabric.launchers import WorkerError as WorkerError
    from fabric.launchers import World as World
    from fabric.loop.seed import seed_everything as seed_everything
    from fabric.output.csv_logger import CSVLogger as CSVLogger
    from fabric.output.tensorboard_logger import TensorBoardLogger as TensorBoardLogger
    from fabric.strategies.checkpoint.consolidate import consolidate as consolidate
    from fabric.strategies.checkpoint.errors import CheckpointError as CheckpointError
    from fabric.strategies.checkpoint.read_and_verify import read_checkpoint as read_checkpoint
    from fabric.strategies.collectives.collective import CollectiveError as CollectiveError
    from fabric.strategies.data.token_batches import token_batches as token_batches

_HOME = {
    "CSVLogger": "fabric.output.csv_logger",
    "CheckpointDirectory": "fabric.checkpoints.directory",
    "CheckpointError": "fabric.strategies.checkpoint.errors",
    "CollectiveError": "fabric.strategies.collectives.collective",
    "Check": "fabric.checks.check",
    "Fabric": "fabric.fabric",
    "NonFiniteGradientsError": "fabric.checks.nonfinite",
    "SanitizerError": "fabric.checks.agreement",
    "TensorBoardLogger": "fabric.output.tensorboard_logger",
    "WorkerError": "fabric.launchers",
    "World": "fabric.launchers",
    "consolidate": "fabric.strategies.checkpoint.consolidate",
    "read_checkpoint": "fabric.strategies.checkpoint.read_and_verify",
    "seed_everything": "fabric.loop.seed",
    "token_batches": "fabric.strategies.data.token_batches",
}

__all__ = [*_HOME]


def version() -> str:
    """The installed version of torchfabric."""
    from importlib import metadata

    return metadata.version("torchfabric")


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return version()
    if name not in _HOME:
        raise AttributeError(f"module 'fabric' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *_HOME]
