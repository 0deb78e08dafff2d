"""Files of safetensors, by the library of that name, which is imported when it is first needed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from fabric.strategies.checkpoint.storage import replacing

SUFFIX = ".safetensors"


def load(path: Path) -> dict[str, Tensor]:
    """The tensors of a file, mapped: their bytes are read when they are copied."""
    found: dict[str, Tensor] = _library().load_file(path)
    return found


def save(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a file, and replace an existing one once it is complete. Raises: ValueError: it cannot store a dtype."""
    library = _library()
    with replacing(path) as file:
        try:
            library.save_file(dict(tensors), file.name, {"format": "pt", **metadata})
        except KeyError as error:
            raise ValueError(f"safetensors does not support the dtype {error}. Leave it out by `filter`.") from error


def _library() -> Any:
    try:
        import safetensors.torch
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"A file `*{SUFFIX}` needs safetensors, which is not installed. Run `pip install "
            "'torchfabric[safetensors]'`."
        ) from error
    return safetensors.torch
