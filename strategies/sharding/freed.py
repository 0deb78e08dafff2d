"""An error of torch for gathered parameters that were freed before a graph used them again, in words.

Parameters are freed after the first backward through a forward, or after `torch.autograd.grad` with respect to its
inputs, and gathered again where a gradient reaches the outputs. A gradient of inputs with `create_graph=True` uses them
in the next backward before that.
"""

from __future__ import annotations

from torch import nn

from fabric.strategies.tensors.dtensor import user_class


def explain_freed(error: RuntimeError, module: nn.Module) -> str | None:
    """What to write instead, if this is such an error."""
    is_freed = all(part in str(error) for part in ("setStorage", "out of bounds for storage of size 0"))
    return _FREED.format(name=user_class(module).__name__) if is_freed else None


_FREED = (
    "Backward needs gathered parameters of `{name}` that were freed after a first use of its graph, such as "
    "`torch.autograd.grad(output, inputs, create_graph=True)`. Compute this gradient within `forward` of the model; or "
    "from a forward of its own, with the rest of the loss from a later forward; or pass `strategy='ddp'`."
)
