"""Precisions, cluster environments and checkpoints, under the names of Lightning Fabric."""

from __future__ import annotations

from fabric.lightning.plugins.environments import ClusterEnvironment
from fabric.lightning.plugins.io import CheckpointIO, TorchCheckpointIO, XLACheckpointIO
from fabric.lightning.plugins.precision import (
    BitsandbytesPrecision,
    DeepSpeedPrecision,
    DoublePrecision,
    FSDPPrecision,
    HalfPrecision,
    MixedPrecision,
    Precision,
    TransformerEnginePrecision,
    XLAPrecision,
)

__all__ = [
    "BitsandbytesPrecision",
    "CheckpointIO",
    "ClusterEnvironment",
    "DeepSpeedPrecision",
    "DoublePrecision",
    "FSDPPrecision",
    "HalfPrecision",
    "MixedPrecision",
    "Precision",
    "TorchCheckpointIO",
    "TransformerEnginePrecision",
    "XLACheckpointIO",
    "XLAPrecision",
]
