"""A placeholder in `parameter.grad` for a gradient that is kept in shards, elsewhere.

`zero_grad` of a model, a submodule or an optimizer marks the placeholder as zeroed, or removes it, as
`parameter.grad = None` does; so the strategy knows that the gradient was discarded. Computing with a placeholder
raises, where None would be skipped silently.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn

from fabric.strategies.tensors.nests import tensors_in


@final
class GradientPlaceholder(Tensor):
    """A gradient without values. Records when it is zeroed; any other operation raises RuntimeError."""

    is_zeroed: bool
    why: str

    @staticmethod
    def __new__(cls, parameter: Tensor, why: str) -> "GradientPlaceholder":
        """A placeholder with the shape, dtype and device of the parameter. `why`: the end of the error's sentence."""
        made: GradientPlaceholder = Tensor._make_wrapper_subclass(
            cls, parameter.size(), dtype=parameter.dtype, device=parameter.device
        )
        made.is_zeroed, made.why = False, why
        return made

    __torch_function__: ClassVar[Any] = nn.Parameter.__torch_function__

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Record that gradients were zeroed."""
        if operator is torch.ops.aten.zero_.default:
            args[0].is_zeroed = True
            return args[0]
        if operator is torch.ops.aten._foreach_zero_.default:
            for gradient in args[0]:
                gradient.zero_()
            return None
        why = next((each.why for each in tensors_in((args, kwargs)) if isinstance(each, GradientPlaceholder)), "")
        raise RuntimeError(f"`{operator}` of a gradient {why}")

    def local_part(self) -> Tensor:
        """Empty: this rank's part is elsewhere. See `dtensor.local_part`."""
        return torch.empty(0, dtype=self.dtype, device=self.device)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"<gradient of shape {tuple(self.shape)}, in shards>"
