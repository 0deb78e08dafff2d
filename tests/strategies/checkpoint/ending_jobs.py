"""A job of two ranks that ends, in one of several ways, while a checkpoint is saved in the background.

Started by `test_background.py`: `ending_jobs.py FOLDER HOW`. The first checkpoint has step 1, the one in progress 2.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fabric import Fabric
from fabric.strategies.checkpoint import write_and_commit

write = write_and_commit.write


def write_slowly(*args: Any, **options: Any) -> None:
    """As `write`, one second later."""
    time.sleep(1)
    write(*args, **options)


def main(folder: str, how: str) -> None:
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    model = fabric.setup(nn.Linear(3, 3))
    fabric.save(folder, {"model": model, "step": 1}, blocking=False).wait()
    write_and_commit.write = write_slowly
    fabric.save(folder, {"model": model, "step": 2}, blocking=False)
    if how == "exit":
        sys.exit(0)
    if how == "raise" or (how == "raise on one" and fabric.global_rank == 1):
        raise ZeroDivisionError("of the loop")
    if how.startswith("interrupt") and fabric.global_rank == 0:
        Path(f"{folder}.pid").write_text(str(os.getpid()))
    try:
        while how != "return":
            fabric.all_gather(torch.ones(3))
            time.sleep(0.01)
    except KeyboardInterrupt:
        if how == "interrupt, then kill one" and fabric.global_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        raise


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
