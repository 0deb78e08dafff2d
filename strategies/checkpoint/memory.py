"""The memory of a tensor as bytes. Not by `Tensor.numpy()`: torch installs without NumPy."""

from __future__ import annotations

import ctypes
from typing import Any

from torch import Tensor


def buffer_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU, as bytes that can be written to. It keeps the tensor alive."""
    num_bytes = tensor.numel() * tensor.element_size()
    if not num_bytes:
        return memoryview(bytearray())
    content: Any = (ctypes.c_ubyte * num_bytes).from_address(tensor.data_ptr())
    content.tensor = tensor
    return memoryview(content).cast("B")
