"""What each rank holds of a model: the one value that a strategy returns, and that loaders and checks read.

`Strategy.connect` puts what holds for every model of the strategy into `Runtime.layout`. `Strategy.setup` puts what
holds for one model into `Prepared.layout`: the same, unless the user's function decided.
"""

from dataclasses import dataclass
from typing import Literal, final


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What each rank holds of a model. The defaults are those of replicas whose gradients are averaged."""

    weights: Literal["replicas", "shards", "any"] = "replicas"
    """Every rank has all weights of the model ("replicas"), or some, as its `StateAccess` tells ("shards"). "any": the
    user's function decides, and each rank may have a model of its own."""
    gradients: Literal["replicas", "shards"] = "replicas"
    """Whether every rank has the averaged gradients of all weights before a step, or of some."""
    optimizer_states: Literal["replicas", "shards"] = "replicas"
    """Whether every rank has the optimizer's states of all weights, or of some, as its `StateAccess` tells."""
    forward_communicates: bool = False
    """Whether each forward waits for one on ranks that read other data, in evaluation too."""
    averages_before_hooks: bool = False
    """Whether the gradient that a post-accumulate hook of a parameter finds is averaged already."""


REPLICAS = Layout()
SHARDS = Layout(weights="shards", gradients="shards", optimizer_states="shards")
"""Every rank has a part of weights, gradients and optimizer states."""
