"""Whole parameters of a model in shards, to be read outside of its forward: `Fabric.gathered`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from fabric.strategies.checkpoint.state import StateAccess


@contextmanager
def gathered(module: nn.Module, access: StateAccess) -> Iterator[None]:
    """See `Fabric.gathered`. Ranks: all, with the same module."""
    places = [
        (part._parameters, name, parameter)
        for part in module.modules()
        for name, parameter in part._parameters.items()
        if isinstance(parameter, nn.Parameter)  # not a copy of an outer context
    ]
    parameters = list(dict.fromkeys(parameter for _, _, parameter in places))
    copies = dict(zip(parameters, access.gather(parameters), strict=True))
    versions = {copy: copy._version for parameter, copy in copies.items() if copy is not parameter}
    for own, name, parameter in places:
        own[name] = copies[parameter]  # type: ignore[assignment]
    try:
        yield
    finally:
        for own, name, parameter in places:
            own[name] = parameter
    if any(copy._version != version for copy, version in versions.items()):
        raise RuntimeError(_WRITTEN.format(model=type(module).__name__))


_WRITTEN = (
    "A parameter of `{model}` was changed within `fabric.gathered`, where it is a copy of the weight in shards: the "
    "change is lost. Load other weights by `fabric.load_raw`, or change each element of a shard outside of it "
    "(`parameter.mul_(0.5)`; not at ZeRO stage 3)."
)
