"""An exponential moving average of a model's weights, in shards where the weights are.

Each rank averages what it holds of each parameter, with one call of a `torch._foreach` operation and no message. To be
evaluated, saved or loaded, the average takes the place of the weights, so that whatever strategy distributes the model
does for the average what it does for the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from fabric.strategies.checkpoint.loading import in_memory
from fabric.strategies.checkpoint.placed import Placed
from fabric.strategies.checkpoint.state import PlacedState, uncompiled
from fabric.strategies.prepared import Prepared
from fabric.strategies.sharding.dtensor import local_part


@final
class MovingAverage(PlacedState):
    """What `fabric.ema(model, decay)` returns. It starts from the weights as they are then.

    Its state is `{"model": ..., "num_updates": ...}`, with the averages under the names of the model's own state dict,
    and the model's buffers as they are.
    """

    def __init__(self, prepared: Prepared, decay: float) -> None:
        self._prepared, self.decay = prepared, decay
        self.num_updates = 0
        """How often it was updated."""
        self._is_applied = False
        self._average_over = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
        for parameter in prepared.sync.parameters_held():
            if parameter.dtype in (torch.float16, torch.bfloat16):
                raise ValueError(_HALF.format(dtype=parameter.dtype))
        self._averages = self._copies()

    @torch.no_grad()
    def update(self) -> None:
        """Move the average towards the weights: `decay * average + (1 - decay) * weights`. Call it after each step.

        Ranks: each, of what it holds; nothing is sent.
        """
        self._refuse_applied("update")
        weights = self._weights()
        if weights:
            self._average_over(self._averages, weights, self.num_updates)
        self.num_updates += 1

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Within it the model has the averages for weights; afterwards it has its own again. For evaluation, and to
        save the model as it is then. Takes a copy of the weights, and sends nothing. Ranks: all.

        Raises: RuntimeError: the weights were changed within it, which would be lost.
        """
        self._refuse_applied("applied")
        own = self._copies()
        self._is_applied = True
        versions: list[int] = []
        try:
            self._write(self._averages)
            versions = [weight._version for weight in self._weights()]
            yield
        finally:
            changed = versions and versions != [weight._version for weight in self._weights()]
            self._write(own)
            self._is_applied = False
        if changed:
            raise RuntimeError(
                "Weights were changed within `average.applied()`, which puts back those from before. Step and load "
                "outside of it."
            )

    def state_dict(self) -> dict[str, Any]:
        """The whole averages, on rank 0. Ranks: all."""
        return self._read(self._prepared.state.read_module)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state, whole on every rank. Ranks: all."""
        self.load_placed(state_dict)

    def place_state(self) -> dict[str, Any]:
        return self._read(self._prepared.state.place_module)

    def load_placed(self, content: Any) -> None:
        self._refuse_applied("load_state_dict")
        own = self._copies()
        try:
            self._prepared.state.load_module(uncompiled(self._prepared.module), content["model"], strict=True)
            self._averages = self._copies()
        finally:
            self._write(own)
        self.num_updates = int(in_memory(content["num_updates"]))

    def _read(self, read: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        # What is read shares the memory of the weights, which come back.
        module = uncompiled(self._prepared.module)
        if self._is_applied:
            state = {name: _copied(value) for name, value in read(module).items()}
        else:
            with self.applied():
                state = {name: _copied(value) for name, value in read(module).items()}
        return {"model": state, "num_updates": self.num_updates}

    def _weights(self) -> list[Tensor]:
        return [local_part(parameter) for parameter in self._prepared.sync.parameters_held()]

    @torch.no_grad()
    def _copies(self) -> list[Tensor]:
        return [weight.detach().clone() for weight in self._weights()]

    @torch.no_grad()
    def _write(self, values: list[Tensor]) -> None:
        for weight, value in zip(self._weights(), values, strict=True):
            weight.copy_(value)

    def _refuse_applied(self, method: str) -> None:
        if self._is_applied:
            raise RuntimeError(f"`average.{method}()` within `average.applied()`. Leave the block before.")


def check_decay(decay: Any) -> float:
    """The decay. Raises: ValueError: it is no number from 0 to below 1."""
    if isinstance(decay, bool) or not isinstance(decay, (int, float)) or not 0 <= decay < 1:
        raise ValueError(f"`fabric.ema(model, decay={decay!r})`: a decay is a number from 0 to below 1, such as 0.999.")
    return float(decay)


def _copied(value: Any) -> Any:
    if isinstance(value, Placed):
        parts = tuple((box, part.clone()) for box, part in value.parts)
        return Placed(value.shape, value.dtype, parts, value.holders)
    return value.detach().clone() if isinstance(value, Tensor) else value


_HALF = (
    "`fabric.ema(model)` of parameters in {dtype}: a step of the average is smaller than what that can tell apart, and "
    "it would stand still. Keep the weights in float32, by `precision='bf16-mixed'` or '16-mixed'."
)
