"""A precision: the dtypes of parameters, of compute and of reductions, whether losses are scaled, and how it casts.

Every strategy reads the same four values in its own way: plain PyTorch as a cast and an autocast, FSDP as a policy,
DeepSpeed as configuration keys. No strategy subclasses it.

In forward, inputs are cast for a `-true` precision; under a `-mixed` one autocast is on, and outputs are cast to
float32. Under a `-true` precision tensors created in forward have its dtype too, as in plain PyTorch under
`torch.set_default_dtype`; also in backward, where activation checkpointing runs forward again. Complex numbers stay
complex, and outputs are not cast.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal, TypeAlias, final, get_args

import torch
from torch import Tensor, nn

from fabric.strategies.tensors.nests import map_only_tensors

PrecisionWord: TypeAlias = Literal["64-true", "32-true", "16-true", "bf16-true", "16-mixed", "bf16-mixed"]
PrecisionInput: TypeAlias = PrecisionWord | Literal["64", "32", "16", "bf16"] | Literal[64, 32, 16]

_SHORT: dict[str, PrecisionWord] = {"64": "64-true", "32": "32-true", "16": "16-mixed", "bf16": "bf16-mixed"}


@dataclass(frozen=True, slots=True)
class Precision:
    """The dtypes of a run. Create one by name with `Precision.parse`."""

    name: str
    """As `Fabric(precision=...)` shows it."""
    param_dtype: torch.dtype
    """Of parameters and buffers, and of the optimizer state made from them."""
    compute_dtype: torch.dtype
    """Of matrix products and convolutions. If it differs from `param_dtype`, autocast chooses per operation."""
    reduce_dtype: torch.dtype
    """Of gradients while they are reduced over ranks."""
    output_dtype: torch.dtype | None = None
    """The dtype to which forward's outputs in `compute_dtype` are cast; None: they are not cast. Under a `-mixed`
    precision float32, so that the loss is computed as under autocast around forward and loss."""
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
    def parse(cls, word: "PrecisionInput | Precision") -> "Precision":
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


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[Any]:
    """The autocast context of a mixed precision; for others a null context."""
    if not precision.is_mixed:
        return nullcontext()
    return torch.autocast(device.type, dtype=precision.compute_dtype)


def casts(precision: Precision) -> bool:
    """Whether the precision changes the dtype of modules and inputs. `32-true` changes neither."""
    return not precision.is_mixed and precision.param_dtype != torch.float32


def cast_module(precision: Precision, module: nn.Module) -> None:
    """Cast floating-point parameters and buffers to the precision's dtype, in place; complex ones to its complex
    dtype."""
    if casts(precision):  # `module.to(dtype)` would drop imaginary parts
        module._apply(partial(cast, precision))  # type: ignore[no-untyped-call]


def cast_inputs(precision: Precision, inputs: Any) -> Any:
    """Cast floating-point and complex tensors in nested containers to the precision's dtypes; all else is kept.

    A container in which nothing is cast is returned itself.
    """
    return map_only_tensors(partial(cast, precision), inputs, keep=True)


def cast(precision: Precision, tensor: Tensor) -> Tensor:
    """Cast the tensor to the precision's dtype for its kind; integers and booleans are kept.

    Complex numbers are complex64 under half precision: torch (2.13) has no products of complex32 on the CPU, and no
    complex bfloat16.
    """
    if tensor.is_complex():
        return tensor.to(torch.complex128 if precision.param_dtype == torch.float64 else torch.complex64)
    return tensor.to(precision.param_dtype) if tensor.is_floating_point() else tensor


def cast_output(precision: Precision, tensor: Tensor) -> Tensor:
    """Cast a tensor that forward returns to `precision.output_dtype`, if it is in `precision.compute_dtype`."""
    return tensor.to(precision.output_dtype) if tensor.dtype is precision.compute_dtype else tensor


@final
class DefaultDtype:
    """Context: new floating-point tensors have one dtype. Reentrant.

    torch's default dtype is global to the process: threads that enter share the dtypes to be restored.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._before: list[torch.dtype] = []

    def __enter__(self) -> None:
        self._before.append(torch.get_default_dtype())
        torch.set_default_dtype(self._dtype)

    def __exit__(self, *exception: object) -> None:
        torch.set_default_dtype(self._before.pop())


def dtype_of_new_tensors(precision: Precision) -> AbstractContextManager[None]:
    """The context for forward and backward; a null context for a precision that does not cast modules."""
    return default_dtype(precision.param_dtype) if casts(precision) else nullcontext()


@cache
def default_dtype(dtype: torch.dtype) -> DefaultDtype:
    """The context for this dtype, one instance in the process: ranks may be threads, and two instances would restore
    each other's default."""
    return DefaultDtype(dtype)
