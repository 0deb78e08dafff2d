"""A run that is killed within an epoch resumes with identical losses: `python examples/resume.py`, or `resume.py cuda`.

Three runs, each a program of its own: one is never stopped; one kills itself with SIGKILL in the middle of an epoch;
the last resumes from its checkpoint. Samples are shuffled and augmented by workers, the model has dropout, and the
losses are equal bit for bit.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from fabric import Fabric, seed_everything

NUM_EPOCHS = 2
SAVED_AFTER, KILLED_AFTER = 11, 13
"""Steps; an epoch has 8."""


class Noisy(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Points on a circle, with random jitter and reflections, which are drawn in workers."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        angle = torch.tensor(index / 10)
        point = torch.stack([angle.cos(), angle.sin()]) + 0.1 * torch.randn(2)
        return point * random.choice([-1, 1]), point.prod().sign()


def main(accelerator: str, log: Path, checkpoint: Path, kill: bool) -> None:
    """Train; write each loss to `log`, and resume from `checkpoint` if it exists."""
    fabric = Fabric(accelerator=accelerator, devices=2, strategy="ddp")
    fabric.launch()
    seed_everything(1)
    model = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 1))
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    loader = fabric.setup_dataloaders(DataLoader(Noisy(), batch_size=4, shuffle=True, num_workers=2))

    state = {"model": model, "optimizer": optimizer, "loader": loader, "epoch": 0, "step": 0}
    if checkpoint.exists():
        fabric.load(checkpoint, state)
    step = state["step"]
    for epoch in range(state["epoch"], NUM_EPOCHS):
        for points, labels in loader:
            loss = nn.functional.soft_margin_loss(model(points).squeeze(1), labels)
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            mean = fabric.all_reduce(loss).item()
            if fabric.is_global_zero:
                with log.open("a") as file:
                    file.write(f"{step} {mean.hex()}\n")
            if kill and step == SAVED_AFTER:
                fabric.save(checkpoint, {**state, "epoch": epoch, "step": step})
            if kill and step == KILLED_AFTER:
                os.kill(os.getpid(), signal.SIGKILL)


def run(log: Path, checkpoint: Path, *, kill: bool = False) -> int:
    """Run this program again, with more words; returns its exit code."""
    more = ["--log", str(log), "--checkpoint", str(checkpoint), *(["--kill"] if kill else [])]
    command = [sys.executable, *sys.argv, *more]
    return subprocess.run(command, stderr=subprocess.DEVNULL if kill else None, check=False).returncode


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--log", type=Path, help="where one of the three runs writes its losses")
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--kill", action="store_true")
    args = parser.parse_args()
    if args.log is not None:
        main(**vars(args))
        sys.exit()
    with tempfile.TemporaryDirectory() as folder:
        whole, killed, resumed = (Path(folder) / name for name in ("whole", "killed", "resumed"))
        assert run(whole, Path(folder) / "none") == 0
        print(f"killed with exit code {run(killed, Path(folder) / 'checkpoint', kill=True)}")
        assert run(resumed, Path(folder) / "checkpoint") == 0
        first, second = killed.read_text().splitlines()[:SAVED_AFTER], resumed.read_text().splitlines()
        for line in second:
            print(f"step {line.split()[0]}: loss {float.fromhex(line.split()[1]):.4f}")
        assert first + second == whole.read_text().splitlines()
        print(f"The losses of all {len(first + second)} steps equal those of a run that was never stopped.")
