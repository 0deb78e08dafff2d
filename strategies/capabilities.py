"""The capabilities of strategies: what a training loop may do.

`Strategy.lacks` has those that a strategy does not support, each with the error message that its use raises. All others
are supported, and give the numbers of plain PyTorch in one process: `fabric.testing` tests both. Precisions and
accelerators are not capabilities: see `Strategy.refuse`.
"""

from collections.abc import Mapping
from typing import TypeAlias

Capability: TypeAlias = str
"""A name of the table below."""
CAPABILITIES: Mapping[Capability, str] = {
    "accumulate": "several backwards before a step, all but the last within `no_backward_sync`",
    "clip_norm": "`clip_gradients(max_norm=...)`: by the norm of all gradients of the model",
    "clip_value": "`clip_gradients(clip_val=...)`",
    "closure": "`optimizer.step(closure)`",
    "several_models": "two models, each with its own optimizer and loss, one after the other",
    "joint_backward": "one loss through two models",
    "joint_optimizer": "one optimizer for the parameters of two models",
    "bare_parameters": "an optimizer for parameters that are in no module, such as a temperature",
    "several_optimizers": "two optimizers for the parameters of one model",
    "later_optimizers": "`setup_module`, then `setup_optimizers` of optimizers constructed from its result",
    "methods": "losses computed by another method than forward, after `mark_forward_method`",
    "unused": "parameters that some steps do not use",
    "tied": "one parameter used in two places",
    "frozen": "parameters that do not require gradients",
    "scalars": "0-dim parameters, such as `nn.Parameter(torch.tensor(1.0))`",
    "buffers": "buffers that forward changes, such as BatchNorm statistics",
    "copies": "`copy.deepcopy` of what `setup` returned: a plain module, which can be set up, and `AveragedModel`",
    "ema": "`fabric.ema(model)`: a moving average of the weights",
    "compile": "`torch.compile` of what `setup` returned",
    "compile_before": "`setup` of what `torch.compile` returned",
    "evaluate": "evaluation of a model without an optimizer",
    "empty_init": "`init_module(empty_init=True)`, with weights from a checkpoint",
    "uneven": "a smaller last batch, whose size differs between ranks",
    "gather_gradients": "`all_gather(..., sync_grads=True)`",
    "collective": "every operation of the collective, `send`, `recv` and `split` included",
    "save": "`save` of the model, as plain state",
    "load": "`load` of a model that any strategy saved",
    "optimizer_state": "the optimizer's state in `save` and `load`",
}
"""Each capability with its meaning, in the order of tables."""
