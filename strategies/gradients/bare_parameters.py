"""Parameters of an optimizer that are in no module: a temperature, an embedding table.

They are in no forward, so all strategies that allow them handle them alike: they are broadcast from rank 0, and each
synchronised backward averages their gradients, in one all-reduce per dtype. All that has accumulated in `.grad` is
averaged: see Note [Averages of averages] in `averaging.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fabric.strategies.gradients.sync import Finish, GradientSync
from fabric.strategies.module.buffers import broadcast_from_rank_zero
from fabric.strategies.runtime import Runtime
from fabric.strategies.tensors.dtensor import as_sharded
from fabric.strategies.tensors.parameters import parameters_of


@final
class BareParameters(GradientSync):
    """The parameters of one fabric that are in no module, and the averaging of their gradients."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._parameters: list[Tensor] = []

    def __bool__(self) -> bool:
        return bool(self._parameters) and self._runtime.world.size > 1

    def __contains__(self, parameter: Tensor) -> bool:
        return any(each is parameter for each in self._parameters)

    def add(self, parameters: Sequence[Tensor], *, move: bool) -> None:
        """Move to the device (`move`), broadcast from rank 0, and average gradients from now on. Ranks: all call it."""
        new = [parameter for parameter in parameters if parameter not in self]
        if move:
            for parameter in new:
                parameter.data = parameter.data.to(self._runtime.device)
        self._parameters += new
        if self._runtime.world.size > 1:
            broadcast_from_rank_zero(self._runtime.collective, new)

    def forward(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return function(*args, **kwargs)

    def watch(self) -> Finish | None:
        return self._average if self.synced else None

    def parameters_held(self) -> Iterable[Tensor]:
        return self._parameters

    def release(self) -> None:
        pass

    @torch.no_grad()
    def _average(self) -> None:
        """Average gradients; a rank without one counts as zero, and if none has one it stays None. Ranks: all."""
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for parameter in self._parameters:
            by_dtype.setdefault(parameter.dtype, []).append(parameter)
        for members in by_dtype.values():
            gradients = [torch.zeros_like(each) if each.grad is None else each.grad for each in members]
            present = torch.stack([each.new_full((), each.grad is not None) for each in members])
            flat = torch.cat([*(gradient.reshape(-1) for gradient in gradients), present])
            mean = self._runtime.collective.for_gradients().all_reduce(flat, "mean")
            *means, anywhere = mean.split_with_sizes([each.numel() for each in members] + [len(members)])
            for parameter, average, share in zip(members, means, anywhere, strict=True):
                if parameter.grad is not None:
                    parameter.grad.copy_(average.view_as(parameter))
                elif share != 0:  # waits for the device
                    parameter.grad = average.view_as(parameter).clone()


def outside(optimizers: Iterable[Optimizer], modules: Iterable[nn.Module]) -> list[tuple[Optimizer, Tensor]]:
    """The parameters of optimizers that are in none of `modules`, each with its optimizer."""
    known = {id(parameter) for module in modules for parameter in module.parameters()}
    return [(each, p) for each in optimizers for p in dict.fromkeys(parameters_of(each)) if id(p) not in known]


def refuse_another_model(
    module: nn.Module, optimizers: Sequence[Optimizer], others: Sequence[tuple[Optimizer, Tensor]]
) -> None:
    """Raise ValueError if no optimizer holds a parameter of the module, although it has some to train.

    `others`: the parameters of the optimizers that are in no module. A module without parameters to train may come with
    an optimizer of parameters elsewhere, such as prompts of a frozen model.
    """
    num_held = sum(len(dict.fromkeys(parameters_of(each))) for each in optimizers)
    if not others or len(others) < num_held or not any(each.requires_grad for each in module.parameters()):
        return
    raise ValueError(
        f"`fabric.setup(module, optimizer)`: the `{type(others[0][0]).__name__}` holds no parameter of the "
        f"`{type(module).__name__}`, and of no module that was set up before, so its steps would not train it. Create "
        "it from the parameters of the module that you set up: a copy (`copy.deepcopy`) or a module that is created "
        "again has parameters of its own. Set up an optimizer of other parameters alone by `setup_optimizers`."
    )


def refuse_shards(others: Iterable[tuple[Optimizer, Tensor]]) -> None:
    """Raise ValueError for a DTensor: it belongs to a model that was not set up."""
    for optimizer, parameter in others:
        if as_sharded(parameter) is not None:
            raise ValueError(
                f"The `{type(optimizer).__name__}` holds a sharded parameter, of shape {tuple(parameter.shape)}, "
                "that belongs to no module set up so far. Set up every module before the optimizers of its parameters."
            )


IN_MODULE = (
    "An optimizer of this strategy holds parameters of the module that it is set up with, and no others. Make them "
    "part of the module, `self.temperature = nn.Parameter(...)`, or pass `strategy='ddp'` or 'fsdp'."
)
