"""The capabilities of strategies: what a training loop may do.

`Strategy.lacks` has those that a strategy does not support, each with the error message that its use raises. All others
are supported, and give the numbers of plain PyTorch in one process: `fabric.testing` tests both. Precisions and
accelerators are not capabilities: see `Strategy.refuse`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias

Capability: TypeAlias = Literal[
    "accumulate",
    "clip_norm",
    "clip_value",
    "closure",
    "several_models",
    "joint_backward",
    "joint_optimizer",
    "bare_parameters",
    "several_optimizers",
    "later_optimizers",
    "methods",
    "unused",
    "tied",
    "frozen",
    "scalars",
    "buffers",
    "copies",
    "ema",
    "compile",
    "compile_before",
    "evaluate",
    "empty_init",
    "uneven",
    "gather_gradients",
    "talk",
    "save",
    "load",
    "optimizer_state",
]

CAPABILITIES: Mapping[Capability, str] = {
    "accumulate": "several backwards before a step, all but the last within `no_backward_sync`",
    "clip_norm": "`clip_gradients(max_norm=...)`: the norm is that of the whole model's gradients",
    "clip_value": "`clip_gradients(clip_val=...)`",
    "closure": "`optimizer.step(closure)`",
    "several_models": "two models, each with an optimizer and a loss of its own, one after the other",
    "joint_backward": "one loss through two models",
    "joint_optimizer": "one optimizer of the parameters of two models",
    "bare_parameters": "an optimizer of parameters that are in no module, such as a temperature",
    "several_optimizers": "two optimizers of the parameters of one model",
    "later_optimizers": "`setup_module` first, and `setup_optimizers` with what is made from it",
    "methods": "losses from another method than forward, after `mark_forward_method`",
    "unused": "parameters that take no part in some steps",
    "tied": "one parameter used in two places",
    "frozen": "parameters that require no gradient",
    "scalars": "parameters without dimensions, such as `nn.Parameter(torch.tensor(1.0))`",
    "buffers": "buffers that forward changes, such as the statistics of BatchNorm",
    "copies": "`copy.deepcopy` of what `setup` returned: a plain module, which can be set up, and `AveragedModel`",
    "ema": "`fabric.ema(model)`: a moving average of the weights",
    "compile": "`torch.compile` of what `setup` returned",
    "compile_before": "`setup` of what `torch.compile` returned",
    "evaluate": "a model without optimizer, in evaluation",
    "empty_init": "`init_module(empty_init=True)`, the weights coming from a checkpoint",
    "uneven": "a last batch that is smaller, and of another size on each rank",
    "gather_gradients": "`all_gather(..., sync_grads=True)`",
    "talk": "every operation of the collective, `send`, `recv` and `split` included",
    "save": "`save` of the model, whole and plain",
    "load": "`load` of a model that any strategy saved",
    "optimizer_state": "the optimizer's state in `save` and `load`",
}
"""Each word with what it means, in the order in which tables show them."""
