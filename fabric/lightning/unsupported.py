"""Errors for features of Lightning Fabric that this package does not support."""

from collections.abc import Mapping
from typing import Any


class UnsupportedError(NotImplementedError):
    """A feature of Lightning Fabric that is not supported here. The message says what to write instead."""


def unsupported(written: str, instead: str) -> UnsupportedError:
    """The error for what was `written`."""
    return UnsupportedError(f"`{written}` of Lightning Fabric is not supported. {instead}")


def refuse_arguments(where: str, passed: Mapping[str, Any], instead: Mapping[str, str]) -> None:
    """Raise UnsupportedError for the first argument in `instead` that was passed a value."""
    for name, sentence in instead.items():
        if passed.get(name) is not None:
            raise unsupported(f"{where}({name}={passed[name]!r})", sentence)


FABRIC_ARGUMENTS = {
    "accelerator": "Pass it to `Fabric(accelerator=...)`.",
    "parallel_devices": "Pass the indices of the devices to `Fabric(devices=...)`.",
    "cluster_environment": "Leave it out: the environment is detected; or pass it to `Fabric(plugins=...)`.",
    "checkpoint_io": "Leave it out: `fabric.save` writes one file, atomically.",
    "precision": "Pass it to `Fabric(precision=...)`.",
}
"""Arguments of that library's strategies that belong to `Fabric` here, each with what to write instead."""
