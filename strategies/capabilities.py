"""What a strategy can run: the capabilities of training loops, and the `Target` on which `Strategy.refuse` is asked.

`Strategy.lacks` has the capabilities that a strategy does not support, each with the error message that its use raises.
All others are supported, and give the numbers of plain PyTorch in one process: `fabric.testing` tests both. Precisions
and accelerators are not capabilities: they are part of the `Target`.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import TypeAlias, final

from fabric.strategies.accelerators.accelerator import Accelerator
from fabric.strategies.precision.precision import Precision

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


_PRECISION = Precision.parse("32-true")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Devices, precision and packages, determined before. Tests create one from numbers."""

    accelerator: Accelerator
    num_devices: int = 1
    """Devices per node that the strategy is to use."""
    num_nodes: int = 1
    precision: Precision = _PRECISION
    num_available: int = 1
    """Devices of the accelerator that this process sees."""
    platform: str = ""
    """See `Accelerator.platform`."""
    packages: Mapping[str, str] = field(default_factory=dict)
    """The result of `Strategy.look_for_packages`."""

    @property
    def size(self) -> int:
        """The number of devices on all nodes."""
        return self.num_devices * self.num_nodes


def releases(*packages: str) -> dict[str, str]:
    """The versions of these packages that are installed; others are left out. Imports none of them."""
    found = {}
    for package in packages:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found
