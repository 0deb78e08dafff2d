"""Precisions, cluster environments and checkpoint plugins, under the names of Lightning Fabric.

A precision is passed as `Fabric(precision=...)` or `Fabric(plugins=...)`, and is `fabric.strategy.precision`.
"""

from contextlib import AbstractContextManager
from typing import Any, final

import torch

from fabric.lightning.plugins.environments import ClusterEnvironment as ClusterEnvironment
from fabric.lightning.unsupported import unsupported
from fabric.strategies.precision.precision import Precision as CorePrecision
from fabric.strategies.precision.precision import autocast


class Precision:
    """A precision. `precision`: its name, such as "bf16-mixed"."""

    precision: str = "32-true"
    """The name for `Fabric(precision=...)`."""

    @property
    def core(self) -> CorePrecision:
        """The core's precision."""
        return CorePrecision.parse(self.precision)  # type: ignore[arg-type]

    def forward_context(self) -> AbstractContextManager[Any]:
        """The autocast of a mixed precision, on the current device."""
        device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
        return autocast(self.core, device)


@final
class DoublePrecision(Precision):
    """64-true."""

    precision = "64-true"


class HalfPrecision(Precision):
    """bf16-true or 16-true."""

    def __init__(self, precision: str = "16-true") -> None:
        self.precision = _one_of(precision, ("bf16-true", "16-true"), "HalfPrecision")


class MixedPrecision(Precision):
    """bf16-mixed or 16-mixed. `scaler` is not supported."""

    def __init__(self, precision: str, device: str | None = None, scaler: Any = None) -> None:
        if scaler is not None:
            raise unsupported(
                "MixedPrecision(scaler=...)",
                "Pass `dataclasses.replace(fabric.strategies.Precision.parse('16-mixed'), init_scale=2.0**10)` to "
                "`Fabric(precision=...)` for another initial scale.",
            )
        self.precision = _one_of(precision, ("bf16-mixed", "16-mixed"), "MixedPrecision")


class _NamedPrecision(Precision):
    """The precision of a name."""

    def __init__(self, precision: str) -> None:
        self.precision = CorePrecision.parse(precision).name  # type: ignore[arg-type]


class FSDPPrecision(_NamedPrecision):
    """The precision under FSDP: `precision` alone; `scaler` is not supported."""

    def __init__(self, precision: str, scaler: Any = None) -> None:
        if scaler is not None:
            raise unsupported("FSDPPrecision(scaler=...)", "Leave it out: '16-mixed' scales losses automatically.")
        super().__init__(precision)


class DeepSpeedPrecision(_NamedPrecision):
    """The precision under DeepSpeed."""


class XLAPrecision(_NamedPrecision):
    """The precision on XLA devices."""


class TransformerEnginePrecision(Precision):
    """Not supported."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise unsupported(
            "TransformerEnginePrecision(...)",
            "Write `precision='bf16-mixed'`, or put Transformer Engine's modules into the model yourself.",
        )


class BitsandbytesPrecision(Precision):
    """Not supported."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise unsupported(
            "BitsandbytesPrecision(...)",
            "Put `bitsandbytes.nn.Linear4bit` into the model before `fabric.setup`, or write `precision='bf16-true'`.",
        )


def precision_of(core: CorePrecision) -> Precision:
    """The core's precision as an instance of Lightning Fabric's class name."""
    if core.name == "64-true":
        return DoublePrecision()
    if core.name in ("bf16-mixed", "16-mixed"):
        return MixedPrecision(core.name)
    return HalfPrecision(core.name) if core.name in ("bf16-true", "16-true") else Precision()


def _one_of(word: str, words: tuple[str, ...], kind: str) -> str:
    if word not in words:
        raise ValueError(f"`{kind}({word!r})`: write one of {', '.join(map(repr, words))}.")
    return word


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
