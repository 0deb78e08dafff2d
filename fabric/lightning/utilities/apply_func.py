"""Nests of tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fabric.strategies.data.transfer import move


def move_data_to_device(batch: Any, device: torch.device | str | int) -> Any:
    """The same nest, its tensors on the device. A module is moved in place."""
    place = torch.device(device)
    return batch.to(place) if isinstance(batch, nn.Module) else move(batch, place)
