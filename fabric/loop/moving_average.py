"""An exponential moving average of a model's weights, sharded as the weights are.

Each rank averages its shards, with one `torch._foreach` operation and without communication. To be evaluated, saved or
loaded, the average is written into the parameters, so that the strategy treats it as it treats the weights.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, final

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.optim.swa_utils import get_ema_multi_avg_fn

from fabric.strategies.checkpoint.state import ObjectStates, ShardedStateful
from fabric.strategies.checkpoint.tensors import TensorShards, gathered, in_memory
from fabric.strategies.collectives.collective import Collective
from fabric.strategies.prepared import Prepared
from fabric.strategies.tensors.dtensor import local_part
from fabric.strategies.tensors.parameters import uncompiled
from fabric.strategies.tensors.wrapper_subclass import is_wrapped


@final
class MovingAverage(ShardedStateful):
    """The result of `fabric.ema(model, decay)`. It starts from the current weights.

    Its state is `{"model": ..., "num_updates": ...}`, with the averages under the names of the model's own state dict,
    and the model's buffers as they are.
    """

    def __init__(self, prepared: Prepared, decay: float, collective: Collective) -> None:
        if not 0 <= decay < 1:
            raise ValueError(
                f"`fabric.ema(model, decay={decay!r})`: a decay is a number from 0 to below 1, such as 0.999."
            )
        self._prepared, self.decay, self._collective = prepared, decay, collective
        self.num_updates = 0
        """Number of updates so far."""
        self._is_applied = False
        self._average_over = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
        for weight in self._weights():
            if weight.dtype in (torch.float16, torch.bfloat16):
                raise ValueError(_HALF.format(dtype=weight.dtype))
        self._averages = self._copies()

    @torch.no_grad()
    def update(self) -> None:
        """Set the average to `decay * average + (1 - decay) * weights`. Call it after each step.

        Ranks: all call it; no communication.
        """
        self._refuse_applied("average.update()")
        weights = self._weights()
        if weights:
            self._average_over(self._averages, weights, self.num_updates)
        self.num_updates += 1

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Within the context the model has the averages as weights; afterwards its own again.

        For evaluation, and to save the averaged model. Copies the weights, without communication (under DeepSpeed the
        model's weights are all-gathered, as after a step). Ranks: all call it.
        Changes of the weights within the context are lost.

        Raises: RuntimeError: in a step of these weights within the context.
        """
        self._refuse_applied("average.applied()")
        own = self._copies()
        self._is_applied = True
        refusal = register_optimizer_step_pre_hook(self._refuse_step)
        try:
            self._write(self._averages)
            yield
        finally:
            refusal.remove()
            self._write(own)
            self._is_applied = False

    def state_dict(self) -> dict[str, Any]:
        """The unsharded averages, on rank 0. Ranks: all call it."""
        return dict(gathered(self._collective, self.sharded_state_dict()))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state that is unsharded on every rank. Ranks: all call it."""
        self.load_sharded(state_dict)

    def sharded_state_dict(self) -> dict[str, Any]:
        # The state shares the memory of the weights, which are restored.
        with nullcontext() if self._is_applied else self.applied():
            read = self._prepared.state.read_module(uncompiled(self._prepared.module))
            state = {name: _copied(value) for name, value in read.items()}
        return {"model": state, "num_updates": self.num_updates}

    def load_sharded(self, content: Any) -> None:
        self._refuse_applied("average.load_state_dict()")
        own = self._copies()
        try:
            states = ObjectStates(lambda _: self._prepared.state)
            states.load_into(self._prepared.module, content["model"], strict=True)
            self._averages = self._copies()
        finally:
            self._write(own)
        self.num_updates = int(in_memory(content["num_updates"]))

    def _weights(self) -> list[Tensor]:
        if self._prepared.trained is not None:
            return self._prepared.trained.shards()
        return [local_part(each) for each in self._prepared.sync.parameters_held() if not is_wrapped(each)]

    @torch.no_grad()
    def _copies(self) -> list[Tensor]:
        return [weight.detach().clone() for weight in self._weights()]

    @torch.no_grad()
    def _write(self, values: list[Tensor]) -> None:
        for weight, value in zip(self._weights(), values, strict=True):
            weight.copy_(value)
        if self._prepared.trained is not None:
            self._prepared.trained.written()

    def _refuse_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer in self._prepared.optimizers or self._prepared.holds(optimizer):
            self._refuse_applied(f"{type(optimizer).__name__}.step()")

    def _refuse_applied(self, call: str) -> None:
        if self._is_applied:
            raise RuntimeError(f"`{call}` within `average.applied()`. Leave that context first.")


def _copied(value: Any) -> Any:
    if isinstance(value, TensorShards):
        shards = tuple((chunk, part.clone()) for chunk, part in value.shards)
        return TensorShards(value.shape, value.dtype, shards, value.holders)
    return value.detach().clone() if isinstance(value, Tensor) else value


_HALF = (
    "`fabric.ema(model)` of parameters in {dtype}: updates of the average are smaller than its precision, so "
    "it would not change. Keep the weights in float32, by `precision='bf16-mixed'` or '16-mixed'."
)
