"""Saves and loads DeepSpeed's loss scale in the checkpoint format of all strategies."""

from __future__ import annotations

from typing import Any, final


@final
class LossScale:
    """`scaler`: a `DynamicLossScaler` of DeepSpeed, which grows by the steps since its last overflow."""

    def __init__(self, scaler: Any) -> None:
        self._scaler = scaler

    def state_dict(self) -> dict[str, Any]:
        """The scale, and the steps since its last overflow."""
        scaler = self._scaler
        good_steps = scaler.cur_iter - scaler.last_overflow_iter - 1
        return {"scale": float(scaler.cur_scale), "good_steps": good_steps, "hysteresis": scaler.cur_hysteresis}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a `state_dict` that any strategy saved."""
        scaler = self._scaler
        scaler.cur_scale = state_dict["scale"]
        scaler.last_overflow_iter, scaler.cur_iter = -1, state_dict["good_steps"]
        scaler.cur_hysteresis = state_dict.get("hysteresis", scaler.cur_hysteresis)
