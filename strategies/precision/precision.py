"""A precision: the dtypes of parameters, of compute and of reductions, and whether losses are scaled.

Every strategy reads the same four values in its own way: plain PyTorch as a cast and an autocast, FSDP as a policy,
DeepSpeed as configuration keys. No strategy subclasses it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import torch

PrecisionWord: TypeAlias = Literal["64-true", "32-true", "16-true", "bf16-true", "16-mixed", "bf16-mixed"]
PrecisionInput: TypeAlias = PrecisionWord | Literal["64", "32", "16", "bf16"] | Literal[64, 32, 16]

_SHORT: dict[str, PrecisionWord] = {"64": "64-true", "32": "32-true", "16": "16-mixed", "bf16": "bf16-mixed"}


@dataclass(frozen=True, slots=True)
class Precision:
    """The dtypes of a run. Create one by name with `Precision.parse`."""

    name: str
    param_dtype: torch.dtype
    """Of parameters and buffers, and of the optimizer state made from them."""
    compute_dtype: torch.dtype
    """Of matrix products and convolutions. If it differs from `param_dtype`, autocast chooses per operation."""
    reduce_dtype: torch.dtype
    """Of gradients while they are reduced over ranks."""
    output_dtype: torch.dtype | None = None
    """To which tensors in `compute_dtype` are cast that forward returns; None: they stay. Under a `-mixed` precision
    float32, so that a loss of them is computed as under autocast around forward and loss."""
    scales_loss: bool = False
    """Whether losses are multiplied before backward, so that small float16 gradients do not vanish (Micikevicius et
    al., ICLR 2018), and gradients divided before the step."""
    init_scale: float = 2.0**16
    """The first scale; it adapts. A power of two, so that scaling is exact."""

    @property
    def is_mixed(self) -> bool:
        """Whether forward runs under autocast."""
        return self.param_dtype != self.compute_dtype

    @classmethod
    def parse(cls, word: PrecisionInput | Precision) -> Precision:
        """Parse a precision's name, long or short; a `Precision` is returned itself.

        Raises: ValueError: the name is unknown.
        """
        if isinstance(word, Precision):
            return word
        full = _SHORT.get(str(word), str(word))
        if full not in _BY_NAME:
            raise ValueError(
                f"`precision={word!r}` names no precision. Write one of "
                f"{', '.join(map(repr, get_args(PrecisionWord)))}, "
                f"or a short form: {', '.join(f'{short!r} for {long!r}' for short, long in _SHORT.items())}."
            )
        return _BY_NAME[full]


_BY_NAME: dict[str, Precision] = {
    precision.name: precision
    for precision in (
        Precision("64-true", torch.float64, torch.float64, torch.float64),
        Precision("32-true", torch.float32, torch.float32, torch.float32),
        Precision("16-true", torch.float16, torch.float16, torch.float16),
        Precision("bf16-true", torch.bfloat16, torch.bfloat16, torch.bfloat16),
        Precision("16-mixed", torch.float32, torch.float16, torch.float32, torch.float32, scales_loss=True),
        Precision("bf16-mixed", torch.float32, torch.bfloat16, torch.float32, torch.float32),
    )
}
