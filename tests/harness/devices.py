"""The accelerator that tests train on: `Fabric(accelerator=ACCELERATOR)`, the CPU unless `pytest --accelerator cuda`.

The option is an environment variable when test modules are imported, for a test's body is imported again by each rank.
A test that is about the CPU itself, about gloo or about what a machine has, writes "cpu".
"""

from __future__ import annotations

import os

import pytest
import torch

ACCELERATOR = os.environ.get("TESTS_ACCELERATOR", "cpu")


def use_device(index: int) -> None:
    """Make a rank's device the current one, before its test's module is imported: what it makes there by
    `.to(ACCELERATOR)` is on the rank's device."""
    if ACCELERATOR != "cpu":
        torch.accelerator.set_device_index(index)


def only_on_cpu(reason: str) -> pytest.MarkDecorator:
    """For a test of what is so on the CPU alone, in a file that runs on both."""
    return pytest.mark.skipif(ACCELERATOR != "cpu", reason=reason)


def only_on_accelerators(reason: str) -> pytest.MarkDecorator:
    """For a test of what the CPU cannot do, in a file that runs on both: `make test-device` runs it."""
    return pytest.mark.skipif(ACCELERATOR == "cpu", reason=reason)
