"""Errors for what this package does not carry over from Lightning Fabric."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class NotCarriedOverError(NotImplementedError):
    """A feature of Lightning Fabric without a counterpart here. The message says what to write instead."""


def refuse(written: str, instead: str) -> NotCarriedOverError:
    """The error for what was `written`."""
    return NotCarriedOverError(f"`{written}` is not carried over from Lightning Fabric. {instead}")


def refuse_said(where: str, said: Mapping[str, Any], instead: Mapping[str, str]) -> None:
    """Raise NotCarriedOverError for the first argument of `instead` that was given a value."""
    for name, sentence in instead.items():
        if said.get(name) is not None:
            raise refuse(f"{where}({name}={said[name]!r})", sentence)


ELSEWHERE = {
    "accelerator": "Pass it to `Fabric(accelerator=...)`.",
    "parallel_devices": "Pass the indices of the devices to `Fabric(devices=...)`.",
    "cluster_environment": "Leave it out: the environment is recognised; or pass it to `Fabric(plugins=...)`.",
    "checkpoint_io": "Leave it out: `fabric.save` writes one file, whole or not at all.",
    "precision": "Pass it to `Fabric(precision=...)`.",
}
"""Arguments of that library's strategies that its `Fabric` fills in, and what to write here instead."""
