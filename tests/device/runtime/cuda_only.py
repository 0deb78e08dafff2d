"""Operators that exist for CUDA alone, so that the CPU has no kernel for them, in terms of others.

What layers compose where there is no cuDNN: `SyncBatchNorm`, the cells of `LSTM` and `GRU`, and the backward of
`RMSNorm`. Dims: n batch, c channel, w world size, h hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor

LIBRARY = torch.library.Library("aten", "IMPL")


def implement() -> None:
    """Register all, for as long as the process runs."""
    for name, function in OPERATORS.items():
        LIBRARY.impl(name, function, "CUDA")


def _sum_but_channels(tensor: Tensor) -> Tensor:
    return tensor.sum([dim for dim in range(tensor.dim()) if dim != 1])


def _along_channels(tensor_c: Tensor, like: Tensor) -> Tensor:
    return tensor_c.view([1, -1] + [1] * (like.dim() - 2))


def batch_norm_stats(input: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    values = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
    count = values.numel() / values.shape[1]
    mean_c = _sum_but_channels(values) / count
    variance_c = _sum_but_channels((values - _along_channels(mean_c, values)) ** 2) / count
    return mean_c, (variance_c + eps).rsqrt()


def batch_norm_gather_stats_with_counts(
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    mean_wc, variance_wc, counts_w1 = mean, invstd**-2 - eps, counts.view(-1, 1).to(mean.dtype)
    total = counts_w1.sum()
    mean_c = (mean_wc * counts_w1).sum(0) / total
    variance_c = ((variance_wc + (mean_wc - mean_c) ** 2) * counts_w1).sum(0) / total
    if running_mean is not None:
        running_mean.lerp_(mean_c.to(running_mean.dtype), momentum)
    if running_var is not None:
        running_var.lerp_((variance_c * total / (total - 1)).to(running_var.dtype), momentum)
    return mean_c, (variance_c + eps).rsqrt()


def batch_norm_elemt(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, invstd: Tensor, eps: float
) -> Tensor:
    scale_c = invstd if weight is None else invstd * weight
    values = (input - _along_channels(mean, input)) * _along_channels(scale_c, input)
    return (values if bias is None else values + _along_channels(bias, input)).to(input.dtype)


def batch_norm_backward_reduce(
    grad_out: Tensor,
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    input_g: bool,
    weight_g: bool,
    bias_g: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grad = grad_out.to(mean.dtype)
    sum_grad_c = _sum_but_channels(grad)
    sum_grad_x_c = _sum_but_channels(grad * (input - _along_channels(mean, input)))
    dtype = mean.dtype if weight is None else weight.dtype
    return sum_grad_c, sum_grad_x_c, (sum_grad_x_c * invstd).to(dtype), sum_grad_c.to(dtype)


def batch_norm_backward_elemt(
    grad_out: Tensor,
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    sum_dy: Tensor,
    sum_dy_xmu: Tensor,
    count: Tensor,
) -> Tensor:
    total = count.sum()
    centered = input - _along_channels(mean, input)
    slope_c = sum_dy_xmu / total * invstd**2
    grad = grad_out - _along_channels(sum_dy / total, input) - centered * _along_channels(slope_c, input)
    return (grad * _along_channels(invstd if weight is None else invstd * weight, input)).to(input.dtype)


def fused_rms_norm_backward(
    grad_out: Tensor,
    input: Tensor,
    normalized_shape: list[int],
    rstd: Tensor,
    weight: Tensor | None,
    output_mask: list[bool],
) -> tuple[Tensor | None, Tensor | None]:
    dims = list(range(input.dim() - len(normalized_shape), input.dim()))
    grad, normal = grad_out.to(rstd.dtype), input.to(rstd.dtype) * rstd
    scaled = grad if weight is None else grad * weight
    grad_input = rstd * (scaled - normal * (scaled * normal).mean(dims, keepdim=True))
    grad_weight = None
    if weight is not None and output_mask[1]:
        grad_weight = (grad * normal).sum(list(range(dims[0]))).to(weight.dtype) if dims[0] else grad * normal
    return grad_input.to(input.dtype) if output_mask[0] else None, grad_weight


def fused_lstm_cell(
    input_gates: Tensor, hidden_gates: Tensor, cx: Tensor, input_bias: Tensor | None, hidden_bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    gates = _with_bias(input_gates, input_bias) + _with_bias(hidden_gates, hidden_bias)
    i_nh, f_nh, g_nh, o_nh = gates.chunk(4, 1)
    i_nh, f_nh, g_nh, o_nh = i_nh.sigmoid(), f_nh.sigmoid(), g_nh.tanh(), o_nh.sigmoid()
    cy = f_nh * cx + i_nh * g_nh
    return o_nh * cy.tanh(), cy, torch.cat([i_nh, f_nh, g_nh, o_nh], 1)


def fused_lstm_cell_backward(
    grad_hy: Tensor | None, grad_cy: Tensor | None, cx: Tensor, cy: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    i_nh, f_nh, g_nh, o_nh = workspace.chunk(4, 1)
    grad_h = torch.zeros_like(cy) if grad_hy is None else grad_hy
    grad_c = grad_h * o_nh * (1 - cy.tanh() ** 2)
    if grad_cy is not None:
        grad_c = grad_c + grad_cy
    gates = torch.cat(
        [
            grad_c * g_nh * i_nh * (1 - i_nh),
            grad_c * cx * f_nh * (1 - f_nh),
            grad_c * i_nh * (1 - g_nh**2),
            grad_h * cy.tanh() * o_nh * (1 - o_nh),
        ],
        1,
    )
    return gates, grad_c * f_nh, gates.sum(0) if has_bias else None


def fused_gru_cell(
    input_gates: Tensor, hidden_gates: Tensor, hx: Tensor, input_bias: Tensor | None, hidden_bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    input_r, input_z, input_n = _with_bias(input_gates, input_bias).chunk(3, 1)
    hidden_r, hidden_z, hidden_n = _with_bias(hidden_gates, hidden_bias).chunk(3, 1)
    r_nh, z_nh = (input_r + hidden_r).sigmoid(), (input_z + hidden_z).sigmoid()
    n_nh = (input_n + r_nh * hidden_n).tanh()
    return n_nh + z_nh * (hx - n_nh), torch.cat([r_nh, z_nh, n_nh, hx, hidden_n], 1)


def fused_gru_cell_backward(
    grad_hy: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    r_nh, z_nh, n_nh, hx, hidden_n = workspace.chunk(5, 1)
    grad_n = grad_hy * (1 - z_nh) * (1 - n_nh**2)
    grad_z = grad_hy * (hx - n_nh) * z_nh * (1 - z_nh)
    grad_r = grad_n * hidden_n * r_nh * (1 - r_nh)
    of_input = torch.cat([grad_r, grad_z, grad_n], 1)
    of_hidden = torch.cat([grad_r, grad_z, grad_n * r_nh], 1)
    biases = (of_input.sum(0), of_hidden.sum(0)) if has_bias else (None, None)
    return of_input, of_hidden, grad_hy * z_nh, *biases


def _with_bias(gates: Tensor, bias: Tensor | None) -> Tensor:
    return gates if bias is None else gates + bias


OPERATORS = {
    "batch_norm_stats": batch_norm_stats,
    "batch_norm_gather_stats_with_counts": batch_norm_gather_stats_with_counts,
    "batch_norm_elemt": batch_norm_elemt,
    "batch_norm_backward_reduce": batch_norm_backward_reduce,
    "batch_norm_backward_elemt": batch_norm_backward_elemt,
    "_fused_rms_norm_backward": fused_rms_norm_backward,
    "_thnn_fused_lstm_cell": fused_lstm_cell,
    "_thnn_fused_lstm_cell_backward_impl": fused_lstm_cell_backward,
    "_thnn_fused_gru_cell": fused_gru_cell,
    "_thnn_fused_gru_cell_backward": fused_gru_cell_backward,
}
