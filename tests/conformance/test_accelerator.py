"""On one accelerator of any kind, the numbers are those of plain PyTorch on that device."""

from __future__ import annotations

import pytest
import torch
from rows import FEW, GATHERED_IN_HALF, HALF, MOST

from fabric.testing import cases, survey


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("precision", ["32-true", *HALF])
@pytest.mark.parametrize("strategy", ["single_device", "ddp", "fsdp"])
def test_numbers_on_one_device_are_those_of_plain_pytorch(strategy: str, precision: str) -> None:
    device = torch.accelerator.current_accelerator()
    assert device is not None
    names = MOST if precision == "32-true" else FEW
    chosen = [case for case in cases() if case.name in names]
    words = {"precision": precision, "tolerance": GATHERED_IN_HALF.get((strategy, precision))}
    findings = survey(strategy, chosen, devices=1, accelerator=device.type, **words)
    assert not [finding for finding in findings if finding.result == "failed"]
