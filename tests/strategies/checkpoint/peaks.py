"""What saving and loading add to the most memory that one process ever had. Prints JSON; see `test_memory.py`."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from fabric import Fabric

MB = 2**20


def peak_above(action: Callable[[], object]) -> float:
    """How far the resident memory rose meanwhile, in MB."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    action()
    return (resident("VmHWM") - before) / 1024


def resident(name: str) -> int:
    """A line of /proc/self/status, in KiB."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:")]
    return int(line.split()[1])


def main(folder: str) -> None:
    """128 MB of state in 32 tensors."""
    torch.set_num_threads(1)
    fabric = Fabric(accelerator="cpu", devices=1)
    model = nn.ParameterList(nn.Parameter(torch.rand(MB)) for _ in range(32))
    state = {"model": model}
    fabric.save(f"{folder}/tiny", {"x": torch.ones(3)}, blocking=False)  # what is imported
    fabric.load(f"{folder}/tiny")
    peaks = {
        "state": sum(parameter.nbytes for parameter in model) / MB,
        "saving": peak_above(lambda: fabric.save(f"{folder}/one", state)),
        "in the background": peak_above(lambda: fabric.save(f"{folder}/two", state, blocking=False).wait()),
        "once more": peak_above(lambda: fabric.save(f"{folder}/two", state, blocking=False).wait()),
        "loading": peak_above(lambda: fabric.load(f"{folder}/one", state)),
    }
    print(json.dumps(peaks))


if __name__ == "__main__":
    main(sys.argv[1])
