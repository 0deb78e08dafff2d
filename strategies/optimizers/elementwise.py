"""Which optimizers compute an element's update from that element alone, and which from more: a table.

Backends pass an optimizer slices of flattened parameters on each rank, or some of the parameters. An optimizer that
computes an update from norms, rows or matrices of a parameter, or from all of them (LARS, LAMB, Shampoo, Prodigy),
would then compute another update, and nothing would raise. So an optimizer that is not in the table is refused, unless
it has an attribute `updates_each`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

from torch.optim import Optimizer

Unit: TypeAlias = Literal["element", "parameter", "model"]

KNOWN: Mapping[Unit, Mapping[str, str]] = {
    "element": {
        "torch": "ASGD Adadelta Adagrad Adam AdamW Adamax NAdam RAdam RMSprop Rprop SGD SparseAdam",
        "apex": "FusedAdagrad FusedAdam FusedSGD",
        "deepspeed": "DeepSpeedCPUAdagrad DeepSpeedCPUAdam DeepSpeedCPULion FusedAdam FusedLion",
        "lion_pytorch": "Lion",
        "pytorch_optimizer": "ADOPT AdaBelief AdEMAMix Lion QHAdam SGDW Tiger",
        "schedulefree": "AdamWScheduleFree AdamWScheduleFreeReference RAdamScheduleFree SGDScheduleFree",
    },
    "parameter": {
        "torch": "Adafactor Muon",
        "deepspeed": "FusedLamb",
        "pytorch_optimizer": "LARS Lamb Muon SOAP Shampoo StableAdamW",
        "torchao": "Adam4bit Adam8bit AdamFp8 AdamW4bit AdamW8bit AdamWFp8",
        "transformers": "Adafactor",
    },
    "model": {"torch": "LBFGS", "prodigyopt": "Prodigy", "pytorch_optimizer": "DAdaptAdam DAdaptSGD Prodigy"},
}
"""What an update is computed from: the classes of each package."""


def has_modes(optimizer: Optimizer) -> bool:
    """Whether the optimizer has the methods `train` and `eval`, which write other weights into the parameters outside
    of a step: schedule-free ones evaluate an average of what they train (Defazio et al., 2024, arXiv:2405.15682)."""
    return all(callable(getattr(type(optimizer), name, None)) for name in ("train", "eval"))


MODES = (
    "`{optimizer}` writes other weights into the parameters in `eval()` and `train()`, and here a rank has the state "
    "of some parameters only. Pass `strategy='ddp'` without `shard_optimizer`, or `strategy='fsdp'`."
)


def refuse_dependent(optimizers: Sequence[Optimizer], sentence: str, *, flat: bool) -> None:
    """Raise ValueError if an update of one of these may depend on elements that are on another rank.

    `flat`: ranks step slices of flattened parameters; otherwise each rank steps some of the parameters. `sentence`: the
    error for an optimizer whose update does, with a place for its name, `{optimizer}`.
    """
    for optimizer in optimizers:
        unit, name = updates_each(optimizer), type(optimizer).__name__
        if not flat and has_modes(optimizer):
            raise ValueError(MODES.format(optimizer=name))
        if unit is None:
            raise ValueError(_UNKNOWN.format(optimizer=name, unit="element" if flat else "parameter"))
        if unit == "model" or (flat and unit == "parameter"):
            raise ValueError(sentence.format(optimizer=name))


_UNKNOWN = (
    "`{optimizer}` is not known to compute the update of each {unit} from the gradient of that {unit} alone, and here "
    "a rank has a part of the gradients. If it does, write `optimizer.updates_each = '{unit}'` before `fabric.setup`; "
    "otherwise pass `strategy='ddp'` or 'fsdp', without `shard_optimizer`."
)


def updates_each(optimizer: Optimizer) -> Unit | None:
    """What an update is computed from: an element, a parameter, or all of them; None: not known.

    `optimizer.updates_each`, of the object or its class, overrides the table.
    Raises: ValueError: some parameters have options of their own, which bitsandbytes finds by object and place.
    """
    said: Unit | None = getattr(optimizer, "updates_each", None)
    if said in KNOWN:
        return said
    package, name = type(optimizer).__module__.partition(".")[0], type(optimizer).__name__
    unit = next((unit for unit, classes in KNOWN.items() if name in classes.get(package, "").split()), None)
    if package == "bitsandbytes":  # states of 8 bits are quantised in blocks of elements, `max_unorm` limits a norm
        arguments, manager = getattr(optimizer, "args", None), getattr(optimizer, "mng", None)
        if manager and (manager.pid2config or manager.module_weight_config_triple):
            raise ValueError(_OVERRIDES.format(optimizer=name))
        return "element" if arguments and arguments.optim_bits == 32 and not arguments.max_unorm else "parameter"
    if getattr(optimizer, "pre_norm", False):
        return "model"
    return "parameter" if unit == "element" and any(map(_reads_whole, optimizer.param_groups)) else unit


_OVERRIDES = (
    "`{optimizer}` finds options of single parameters (`GlobalOptimManager`, `bnb.nn.StableEmbedding`) by their object "
    "and place in a group, which are others here. Pass `strategy='ddp'`, without `shard_optimizer`."
)


def takes_plain_tensors(optimizer: Optimizer) -> bool:
    """Whether the optimizer calls kernels, or operations, that raise for a `DTensor`."""
    package, name = type(optimizer).__module__.partition(".")[0], type(optimizer).__name__
    lacks_rules = f"{package}.{name}" in ("pytorch_optimizer.ADOPT", "pytorch_optimizer.SGDW", "torch.Rprop")
    return lacks_rules or package in ("apex", "bitsandbytes", "deepspeed")


def _reads_whole(group: Mapping[str, Any]) -> bool:
    """Whether an option of `pytorch_optimizer` or of `lion_pytorch.cautious_lion` has an optimizer that updates each
    element alone read the norm or the mean of a whole gradient."""
    is_cautious = group.get("cautious_factor", 1.0) < 1.0
    return is_cautious or any(group.get(option) for option in ("adanorm", "cautious", "stable_adamw", "use_gc"))
