"""The gradient synchronisation over XLA's replicas keeps the contract that every other one keeps."""

from __future__ import annotations

import os
from typing import Any

import pytest
import test_gradient_sync as contract
import torch
from cpu_replicas import launch_replicas

from fabric import Fabric
from fabric.strategies.xla.replicas import XLAStrategy

SIZE = int(os.environ["CPU_NUM_DEVICES"])
pytestmark = [pytest.mark.slow, pytest.mark.skipif(SIZE != 2, reason="the contract has batches for two ranks")]


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    fabric = Fabric(accelerator="xla", strategy=XLAStrategy(cpu_replicas=True), devices=SIZE)
    return launch_replicas(fabric, contract.use)


def test_replicas_have_a_gradient_sync_of_their_own(found: list[dict[str, Any]]) -> None:
    assert [each["class"].__name__ for each in found] == ["XLAGradientSync"] * SIZE


def test_forward_returns_the_output_of_the_model(found: list[dict[str, Any]]) -> None:
    assert [each["output"] for each in found] == [(dict, True)] * SIZE


def test_unsynchronised_gradients_are_averaged_by_the_next_synchronised_backward(found: list[dict[str, Any]]) -> None:
    torch.testing.assert_close(found[0]["weights"], contract.plain(SIZE), rtol=1e-5, atol=1e-6)


def test_after_release_nothing_of_ours_is_on_the_module_or_the_optimizer(found: list[dict[str, Any]]) -> None:
    assert not [each["ours"] for each in found if each["ours"]]
