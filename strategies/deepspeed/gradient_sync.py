"""Forward and backward of one model under ZeRO: its engine reduces gradients, and ranks run submodules in one order.

`unsynced` changes nothing: at stage 1 gradients are reduced once per step in any case, at stages 2 and 3 in every
backward, because no rank stores whole gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, final

from torch import Tensor, nn

from fabric.strategies.deepspeed.engine import Engine, gathered_parts
from fabric.strategies.deepspeed.released import Released
from fabric.strategies.gradients.scaling import Factor
from fabric.strategies.gradients.sync import Finish, GradientSync
from fabric.strategies.module.copies import Hook
from fabric.strategies.runtime import Runtime
from fabric.strategies.sharding.execution_order import ExecutionOrder


@final
class DeepSpeedGradientSync(GradientSync):
    """One model with an optimizer."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._ordered = engine.order.around(engine.forward)

    def forward(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._ordered(function, args, kwargs)

    def watch(self) -> Finish | None:
        return self.engine.watch()

    def parameters_held(self) -> Iterable[Tensor]:
        return self.engine.trained

    def scale(self, factor: Factor) -> None:
        self.engine.multiply(factor)

    def release(self) -> None:
        self.engine.release()


@final
class UntrainedGradientSync(GradientSync):
    """One model in shards without an optimizer: parameters are all-gathered, gradients are not reduced."""

    def __init__(self, runtime: Runtime, module: nn.Module) -> None:
        self.order = ExecutionOrder(runtime, module, gathered_parts(module))
        self._ordered = self.order.around(lambda function, args, kwargs: function(*args, **kwargs))
        self.released = Released(module.named_parameters())
        self._hooks = [
            module.register_forward_pre_hook(Hook(self._enter), prepend=True),
            module.register_forward_hook(Hook(self._leave)),  # after DeepSpeed's, which releases weights
        ]

    def _enter(self, module: nn.Module, args: Any) -> None:
        self.released.refuse_changes()

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self.released.put()

    def forward(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._ordered(function, args, kwargs)

    def watch(self) -> Finish | None:
        return None  # a loss of another model that runs through this one needs no synchronisation here

    def parameters_held(self) -> Iterable[Tensor]:
        return ()

    def release(self) -> None:
        self.order.release()
        for hook in self._hooks:
            hook.remove()
