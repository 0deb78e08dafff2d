"""What saving and loading add to the memory of two ranks. Prints JSON, by strategy; see `test_memory.py`.

Counts anonymous memory: pages of mapped files are those of the page cache, which the kernel may drop.
"""

from __future__ import annotations

import gc
import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peaks import MB, resident
from torch import nn

from fabric import Fabric


def peak_above(action: Callable[[], object]) -> float:
    """How far this process' anonymous memory rose meanwhile, in MB."""
    gc.collect()
    before = most = resident("RssAnon")
    over = threading.Event()

    def watch() -> None:
        nonlocal most
        while not over.is_set():
            most = max(most, resident("RssAnon"))
            time.sleep(0.0005)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        kept = action()  # counts, too
        most = max(most, resident("RssAnon"))
        del kept
    finally:
        over.set()
        thread.join()
    return (most - before) / 1024


def measure(fabric: Fabric, folder: str) -> list[dict[str, float]]:
    """192 MB of state in 48 tensors, of which each rank has a half."""
    torch.set_num_threads(1)
    sys.setswitchinterval(1e-4)
    model, optimizer = made(fabric)
    for _ in range(2):
        fabric.backward(model(torch.rand(2, 1024)).sum())
        optimizer.step()
        optimizer.zero_grad()
    state = {"model": model, "optimizer": optimizer}
    fabric.save(f"{folder}/tiny", {"x": torch.ones(3)}, blocking=False)  # what is imported
    fabric.load(f"{folder}/tiny")
    peaks = {
        "saving": peak_above(lambda: fabric.save(f"{folder}/one", state)),
        "in the background": peak_above(lambda: fabric.save(f"{folder}/two", state, blocking=False).wait()),
        "once more": peak_above(lambda: fabric.save(f"{folder}/two", state, blocking=False).wait()),
        "loading": peak_above(lambda: fabric.load(f"{folder}/one", state)),
        "in memory": peak_above(lambda: fabric.state_dict(model, optimizer)),
    }
    fabric._connected.forget()
    model, optimizer = made(fabric)
    new = {"model": model, "optimizer": optimizer}
    peaks["loading before a step"] = peak_above(lambda: fabric.load(f"{folder}/one", new))
    gathered: list[dict[str, float]] = fabric.collective.all_gather_object(peaks)
    return gathered


def made(fabric: Fabric) -> Any:
    net = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(16)))
    assert sum(parameter.nbytes for parameter in net.parameters()) == 64 * MB
    return fabric.setup(net, torch.optim.AdamW(net.parameters()))


if __name__ == "__main__":
    found = {}
    for strategy in sys.argv[2:]:
        folder = Path(sys.argv[1]) / strategy
        found[strategy] = Fabric(accelerator="cpu", devices=2, strategy=strategy).launch(measure, str(folder))
    print(json.dumps(found))
