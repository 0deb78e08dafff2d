"""Plugins that write checkpoints: there are none here."""

from __future__ import annotations

from typing import Any

from fabric.lightning.carry import refuse


class CheckpointIO:
    """How checkpoints are written, in Lightning Fabric. A class of your own raises where it is passed to `Fabric`."""


class TorchCheckpointIO(CheckpointIO):
    """What `fabric.save` does in any case."""


class XLACheckpointIO(CheckpointIO):
    """What `fabric.save` does in any case."""


def refuse_checkpoint_io(plugin: Any) -> None:
    """Raise NotCarriedOverError for a plugin that writes in a way of its own."""
    if type(plugin) not in (TorchCheckpointIO, XLACheckpointIO):
        raise refuse(
            f"Fabric(plugins={type(plugin).__name__}())",
            "Call it yourself on rank 0 with the state dicts: `plugin.save_checkpoint(...)`.",
        )
