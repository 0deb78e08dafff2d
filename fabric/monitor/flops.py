"""The floating-point operations of a step, and the peak rate of a device.

Model FLOPs are counted: operations that activation checkpointing runs again are left out, as in the definition of MFU
(Chowdhery et al., PaLM, 2022, appendix B). The peaks are those of dense matrices, where data sheets print the double.
"""

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, final

import torch
from torch import nn
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from fabric.strategies.tensors.dtensor import local_part
from fabric.strategies.tensors.nests import is_tensor


@final
class ModelFlops:
    """Counts the operations of this process from `start` to `stop`, but for evaluation: without gradients, by models in
    eval mode. Not those that `torch.compile` fuses into kernels
    of its own."""

    def __init__(self, modules: Sequence[nn.Module] = ()) -> None:
        self._modules, self.is_in_backward = modules, False
        aten, known = torch.ops.aten, dict(flop_registry)
        for end in ("", "_backward"):  # torch's table lacks attention on the CPU, which takes the same arguments
            known.setdefault(
                getattr(aten, f"_scaled_dot_product_flash_attention_for_cpu{end}"),
                flop_registry[getattr(aten, f"_scaled_dot_product_efficient_attention{end}")],
            )
        guarded = {operator: self._once(formula, str(operator)) for operator, formula in known.items()}
        self._counter = FlopCounterMode(display=False)
        self._counter.flop_registry.update(guarded)

    def start(self) -> None:
        """Count from here on."""
        self._counter.__enter__()  # type: ignore[no-untyped-call]

    def stop(self) -> int:
        """Count no longer; returns the number of operations."""
        self._counter.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        return int(self._counter.get_total_flops())

    def _once(self, formula: Callable[..., Any], name: str) -> Callable[..., int]:
        """The formula without evaluation and recomputation. In backward that alone runs with gradients enabled; and of
        the five products that torch counts for the backward of fused attention, one computes the scores again."""
        share = 0.8 if "attention" in name and "backward" in name else 1

        def count(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
            is_trained = not self._modules or any(module.training for module in self._modules)
            # A function of the user's own runs its forward without gradients, too.
            if self.is_in_backward == torch.is_grad_enabled() and (self.is_in_backward or not is_trained):
                return 0
            args, out_val = tree_map(lambda each: local_part(each) if is_tensor(each) else each, (args, out_val))
            return int(formula(*args, out_val=out_val, **kwargs) * share + 0.5)

        return count


_DENSE_TERAFLOPS: dict[str, tuple[float, float, float, str]] = {
    # name: float16 and bfloat16, TF32, float32, source
    "NVIDIA B200": (2250, 1100, 75, "NVIDIA Blackwell datasheet, HGX B200"),
    "NVIDIA H200": (989.4, 494.7, 66.9, "NVIDIA H200 datasheet, SXM"),
    "NVIDIA H100 80GB HBM3": (989.4, 494.7, 66.9, "NVIDIA H100 datasheet, SXM"),
    "NVIDIA H100 PCIe": (756, 378, 51.2, "NVIDIA H100 datasheet, PCIe"),
    **dict.fromkeys(
        ("NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-80GB", "NVIDIA A100-PCIE-40GB", "NVIDIA A100 80GB PCIe"),
        (312, 156, 19.5, "NVIDIA A100 datasheet"),
    ),
    "NVIDIA L40S": (362.05, 183, 91.6, "NVIDIA L40S datasheet"),
    "NVIDIA L4": (121, 60, 30.3, "NVIDIA L4 datasheet"),
    "NVIDIA A10": (125, 62.5, 31.2, "NVIDIA A10 datasheet"),
    "NVIDIA GeForce RTX 4090": (165.2, 82.6, 82.6, "NVIDIA Ada GPU architecture, appendix A, float32 accumulation"),
}
"""By the whole name that torch gives a device: variants, and slices of a device, have other peaks. Data sheets print
twice the first two, for sparse matrices."""


def known_peak(name: str, dtype: torch.dtype) -> tuple[float, str] | None:
    """The dense peak of a device per second, and its source; None if the table lacks the device or the dtype."""
    if name not in _DENSE_TERAFLOPS or dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return None
    half, tf32, single, source = _DENSE_TERAFLOPS[name]
    of_float32 = single if torch.get_float32_matmul_precision() == "highest" else tf32
    return 1e12 * (of_float32 if dtype is torch.float32 else half), source


def measured_peak(dtype: torch.dtype, size: int = 512) -> float:
    """The rate of the CPU in a product of two square matrices: the best of five."""
    matrix, best = torch.ones(size, size, dtype=dtype), float("inf")
    for _ in range(5):
        began = perf_counter()
        torch.mm(matrix, matrix)
        best = min(best, perf_counter() - began)
    return 2 * size**3 / best


def device_name(device: torch.device) -> str:
    """The name of a device, as torch has it."""
    return str(getattr(torch.get_device_module(device), "get_device_name", lambda _: device.type)(device))
