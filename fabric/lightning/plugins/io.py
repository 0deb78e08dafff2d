"""Plugins that write checkpoints, which are not supported."""

from __future__ import annotations

from typing import Any

from fabric.lightning.carry import refuse


class CheckpointIO:
    """Lightning Fabric's base class of checkpoint plugins. Passing a custom one to `Fabric` raises."""


class TorchCheckpointIO(CheckpointIO):
    """What `fabric.save` does in any case."""


class XLACheckpointIO(CheckpointIO):
    """What `fabric.save` does in any case."""


def refuse_checkpoint_io(plugin: Any) -> None:
    """Raise NotCarriedOverError for a custom plugin."""
    if type(plugin) not in (TorchCheckpointIO, XLACheckpointIO):
        raise refuse(
            f"Fabric(plugins={type(plugin).__name__}())",
            "Call it yourself on rank 0 with the state dicts: `plugin.save_checkpoint(...)`.",
        )
