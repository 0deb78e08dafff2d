"""What a DeepSpeed engine does not support, raised when a model is set up, before anything is changed."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.optim import Adagrad, Optimizer

from fabric.strategies.checkpoint.state import uncompiled
from fabric.strategies.gradients.elementwise import is_independent, refuse_dependent, refuse_without_hooks
from fabric.strategies.gradients.optimizer_modes import has_modes
from fabric.strategies.module.sparse_layers import refuse_sparse_layers
from fabric.strategies.runtime import Runtime

NOT_ELEMENTWISE = ("Adafactor", "LBFGS", "Lamb", "Muon", "OneBitLamb", "SparseAdam", "ZeroOneAdam")
"""Optimizers that need whole tensors or their shapes, whereas ZeRO passes slices of one flat tensor."""


def refuse_setup(runtime: Runtime, module: nn.Module, optimizers: Sequence[Optimizer], *, stage: int) -> None:
    """Raise ValueError if an engine would not do what was requested."""
    name = type(module).__name__
    if stage == 3 and uncompiled(module) is not module:
        raise ValueError(COMPILED)
    dtypes = {parameter.dtype: each for each, parameter in module.named_parameters() if parameter.requires_grad}
    if len(dtypes) > 1 or any(dtype.is_complex for dtype in dtypes):
        found = ", ".join(f"{dtype} ({each!r})" for dtype, each in dtypes.items())
        raise ValueError(
            f"`{name}` has trained parameters of {found}, and ZeRO copies all of them into flat tensors of one real "
            "dtype. Convert them before `fabric.setup`, or pass `strategy='ddp'`."
        )
    refuse_sparse_layers("deepspeed", module)
    if len(optimizers) > 1:
        raise ValueError(f"`setup` was given {len(optimizers)} optimizers for `{name}`, and {ONE_OPTIMIZER}")
    for optimizer in optimizers:
        own = {id(parameter) for parameter in module.parameters()}
        foreign = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in own]
        if foreign:
            raise ValueError(
                f"The `{type(optimizer).__name__}` holds {len(foreign)} parameters (the first of shape "
                f"{tuple(foreign[0].shape)}) that `{name}` does not have. Make it from `model.parameters()` of the "
                "model that is passed to `setup`, after anything that replaces them."
            )
        if isinstance(optimizer, Adagrad):
            raise ValueError(_REPLACED)
        if any(kind.__name__ in NOT_ELEMENTWISE for kind in type(optimizer).__mro__):
            raise ValueError(_DEPENDENT.format(optimizer=type(optimizer).__name__))
        if has_modes(optimizer):
            raise ValueError(_MODES.format(optimizer=type(optimizer).__name__))
        if type(optimizer).__module__.split(".")[0] == "deepspeed":
            continue
        refuse_without_hooks([optimizer])
        refuse_dependent([optimizer], _DEPENDENT, flat=True)
        if is_independent(optimizer, flat=True) is None:
            runtime.report(_FLAT.format(name=type(optimizer).__name__))


COMPILED = (
    "`setup(torch.compile(model))` at ZeRO stage 3: DeepSpeed's hooks gather the weights around each submodule, and a "
    "model that was compiled before does not run them. Compile what `setup` returns, or use stage 2."
)
LATER = (
    "`setup_optimizers` under `strategy='deepspeed'`: DeepSpeed sets up a model and its optimizer together. Call "
    "`fabric.setup(model, optimizer)`."
)
ONE_OPTIMIZER = (
    "a DeepSpeed engine has one. Make one optimizer with several parameter groups, or set up each part of the model "
    "with its own."
)
_MODES = (
    "`{optimizer}` writes other weights into the parameters in `eval()` and `train()`, and ZeRO passes an optimizer "
    "slices that it copies to the model in `step` alone: an evaluation would use the weights of the last step. Pass "
    "`strategy='ddp'`, `DDPStrategy(shard_optimizer=True)` or `strategy='fsdp'`."
)
_REPLACED = (
    "`Adagrad` in `setup`: DeepSpeed replaces it by another object, which `optimizer.step()` and learning-rate "
    "schedulers would not reach. Use Adam, AdamW, RMSprop or SGD."
)
_DEPENDENT = (
    "`{optimizer}` in `setup` uses whole tensors, but ZeRO passes an optimizer slices of one flat tensor, so the "
    "results would differ. Use one that updates each element independently (SGD, Adam, "
    "AdamW, RMSprop), or `strategy='ddp'` or 'fsdp'."
)
_FLAT = (
    "ZeRO passes `{name}` slices of one flat tensor. That is right for an optimizer that updates each element "
    "independently, and silently wrong for one that uses whole tensors or their shapes. Whether it does could not be "
    "tried on small tensors: its step needs a closure, draws random numbers, or raises there."
)
