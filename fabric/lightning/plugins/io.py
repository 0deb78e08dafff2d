"""Plugins that write checkpoints, which are not supported."""

from __future__ import annotations

from typing import Any

from fabric.lightning.unsupported import unsupported


class CheckpointIO:
    """Lightning Fabric's base class of checkpoint plugins. Passing a custom one to `Fabric` raises."""


class TorchCheckpointIO(CheckpointIO):
    """Accepted, and ignored: `fabric.save` always writes with torch."""


class XLACheckpointIO(CheckpointIO):
    """Accepted, and ignored: `fabric.save` always writes with torch."""


def refuse_checkpoint_io(plugin: Any) -> None:
    """Raise UnsupportedError for a custom plugin."""
    if type(plugin) not in (TorchCheckpointIO, XLACheckpointIO):
        raise unsupported(
            f"Fabric(plugins={type(plugin).__name__}())",
            "Call it yourself on rank 0 with the state dicts: `plugin.save_checkpoint(...)`.",
        )
