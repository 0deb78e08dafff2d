"""Raises where a prepared model is called within a transform of torch.func, in which a strategy's hooks cannot run."""

from __future__ import annotations

from torch import nn

from fabric.strategies.tensors.dtensor import user_class
from fabric.strategies.torch_internals import transform_level


def refuse_transforms(module: nn.Module) -> None:
    """Raise RuntimeError within `torch.func.vmap`, `jacrev`, `grad` and the like. 0.1 us."""
    if transform_level() is not None:
        raise RuntimeError(
            f"`{user_class(module).__name__}` was called within a transform of `torch.func` (vmap, jacrev, grad), in "
            "which the hooks that this strategy needs around forward and backward cannot run. Call the transform "
            "within `forward` of the model, on a submodule: `vmap(jacrev(self.net))(x)`; or call a model that is not "
            "set up, and average its gradients: `fabric.average_gradients(model.parameters())`."
        )
