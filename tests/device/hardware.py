"""`make test-gpu`: what only a real device shows, in under five minutes.

It prints the row to add to `docs/explanation/hardware.md`.

Runs the tests marked `gpu` (with two devices also `test_checkpoints.py`), counts how often the host waits for the
device in a step, by torch's own warnings, and times a step against plain PyTorch. `--pretended` leaves out what a
pretended device cannot show: how long a step takes, where the device is what takes it.
"""

from __future__ import annotations

import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from fabric import Fabric

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests" / "benchmarks"))
from timing import race  # noqa: E402

MARKED = (
    "tests/conformance/test_accelerator.py",
    "tests/fabric/configure/test_machine.py",
    "tests/fabric/loop/test_seed.py",
    "tests/strategies/collectives/test_process_group.py",
    "tests/strategies/data/test_transfer.py",
)
"""The files with tests marked `gpu`: others may import what is not installed here."""
STEPS = 20
"""Between two waits of the benchmark."""

HOST, DEVICE = (64, 4, 8), (2048, 8, 1024)
"""Width, layers and batch of a step that takes the host's time, and of one that takes the device's."""

Step = Callable[[], object]


def tests(words: list[str]) -> str:
    """Run tests; returns pytest's last line, without the time."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    last = done.stdout.strip().splitlines()[-1]
    if done.returncode:
        print(done.stdout)
    return re.sub(r" in [\d.]+s.*", "", last)


def parts(width: int, num_layers: int) -> tuple[nn.Module, AdamW]:
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(num_layers)))
    return model, AdamW(model.parameters(), lr=1e-4)


def plain(device: torch.device, width: int, num_layers: int, x_bf: Tensor) -> Step:
    model, _ = parts(width, num_layers)
    model.to(device)
    optimizer = AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = model(x_bf).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    return step


def ours(fabric: Fabric, width: int, num_layers: int, x_bf: Tensor, feature: str = "step") -> Step:
    """A step that also does what the feature says."""
    net, its_optimizer = parts(width, num_layers)
    prepared: tuple[nn.Module, Any] = fabric.setup(net, its_optimizer)
    model, optimizer = prepared

    def step() -> None:
        loss = model(x_bf).square().mean()
        fabric.backward(loss, model=model, weight=8 if feature == "weight=8" else None)
        if feature.startswith("clip"):
            fabric.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=not feature.endswith("False"))
        if feature == "log":
            fabric.log("loss", loss.detach())
        optimizer.step()
        optimizer.zero_grad()

    return step


def waits(step: Step) -> float:
    """How often the host waits for the device in a step, as torch warns of it."""
    for _ in range(3):
        step()
    torch.accelerator.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(10):
            step()
    torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(each.message) for each in caught) / 10


def in_a_row(step: Step) -> Step:
    """Some steps, and one wait for all of them."""

    def steps() -> None:
        for _ in range(STEPS):
            step()
        torch.accelerator.synchronize()

    return steps


def times(fabric: Fabric, *sizes: tuple[int, int, int]) -> list[str]:
    """What a step takes, and the ratio to plain PyTorch."""
    found = []
    for width, num_layers, batch in sizes:
        x_bf = torch.randn(batch, width, device=fabric.device)
        steps = {
            "plain": in_a_row(plain(fabric.device, width, num_layers, x_bf)),
            "ours": in_a_row(ours(fabric, width, num_layers, x_bf)),
        }
        _, row = race(f"{num_layers} layers of {width}", steps, repeat=1, rounds=15)
        found.append(f"{row.measurement}: {row.median / STEPS:.0f} us, {row.ratio:.3f} +- {row.spread:.3f} of plain")
    return found


def main() -> None:
    device = torch.accelerator.current_accelerator()
    if device is None:
        raise SystemExit("`make test-gpu` is for a machine with a GPU, and torch finds none here.")
    size = torch.accelerator.device_count()
    passed = [f"gpu: {tests(['-m', 'gpu', '--accelerator', device.type, *MARKED])}"]
    if size > 1:
        passed.append(f"checkpoints: {tests(['--accelerator', device.type, 'tests/device/test_checkpoints.py'])}")
    fabric = Fabric(accelerator=device.type, devices=1, precision="bf16-mixed")
    fabric.launch()
    x_bf = torch.randn(8, 64, device=fabric.device)
    features = ("step", "clip", "clip, error_if_nonfinite=False", "weight=8", "log")
    counts = [f"{feature}: {waits(ours(fabric, 64, 4, x_bf, feature)):g}" for feature in features]
    taken = times(fabric, HOST, *(() if "--pretended" in sys.argv else (DEVICE,)))
    fabric.close()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    where = f"{size} x {torch.cuda.get_device_name()}; torch {torch.__version__}, CUDA {torch.version.cuda}"
    today = datetime.now(timezone.utc).date()
    cells = (f"{today}, {commit.stdout.strip()}", where, "; ".join(passed), "; ".join(counts), "; ".join(taken))
    print("\nAdd this row to the table of docs/explanation/hardware.md:\n\n| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
