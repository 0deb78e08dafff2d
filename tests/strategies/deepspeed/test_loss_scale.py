"""DeepSpeed's loss scale goes on from a checkpoint: over DeepSpeed's own class, which needs no float16."""

from __future__ import annotations

import random
from typing import Any

import pytest
from devices import ACCELERATOR

from fabric import Fabric
from fabric.strategies.deepspeed.state import LossScale


def save_and_load(fabric: Fabric, seed: int) -> int:
    """How often a scale was saved and loaded, and was then that of one that was not."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    def make() -> Any:
        return DynamicLossScaler(
            init_scale=2.0**8, scale_window=3, min_scale=1, delayed_shift=2,
            consecutive_hysteresis=False, raise_error_at_min_scale=False,
        )  # fmt: skip

    chance, whole, stopped, times = random.Random(seed), make(), make(), 0
    for _ in range(100):
        overflow = chance.random() < 0.2
        whole.update_scale(overflow)
        stopped.update_scale(overflow)
        if chance.random() < 0.3:
            state = LossScale(stopped).state_dict()
            stopped, times = make(), times + 1
            LossScale(stopped).load_state_dict(state)
        assert stopped.cur_scale == whole.cur_scale
    return times


@pytest.mark.slow
def test_a_scale_that_is_saved_and_loaded_goes_on_as_one_that_was_not() -> None:
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    assert Fabric(accelerator=ACCELERATOR, strategy="deepspeed_stage_2", devices=2).launch(save_and_load, seed)
