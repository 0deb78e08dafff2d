"""A pretraining loop with token budgets, as people write it: killed in an epoch, resumed on other numbers of ranks."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import template
import torch

PROGRAM = """
import json, os, signal, sys
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import IterableDataset
from fabric import Fabric, seed_everything, token_batches

KIND, DEVICES, KILLED_AFTER = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])

def texts():
    draw = torch.Generator().manual_seed(0)
    for number in range(100):
        tokens = torch.randint(16, (int(torch.randint(2, 60, (), generator=draw)),), generator=draw)
        yield {"input_ids": tokens[:-1], "labels": tokens[1:], "number": number}

class Stream(IterableDataset):
    def __iter__(self):
        return texts()

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.place, self.head = nn.Embedding(16, 12), nn.Embedding(64, 12), nn.Linear(12, 16)

    def forward(self, tokens, positions):
        return self.head((self.embed(tokens) + self.place(positions)).tanh())

def main(fabric):
    seed_everything(1)
    model = Model()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    data = Stream() if KIND == "stream" else list(texts())
    loader = token_batches(data, 128, pack=True, **({} if KIND == "stream" else {"shuffle": True}))
    loader = fabric.setup_dataloaders(loader)
    state = {"model": model, "optimizer": optimizer, "loader": loader, "epoch": 0}
    if os.path.exists("last"):
        fabric.load("last", state)
    for epoch in range(state["epoch"], 2):
        state["epoch"] = epoch
        for batch in loader:
            logits = model(batch["input_ids"], batch["position_ids"])
            loss = cross_entropy(logits, batch["labels"], reduction="sum")
            fabric.backward(loss, weight=len(batch["labels"]))
            optimizer.step()
            optimizer.zero_grad()
            num_tokens = torch.tensor(float(len(batch["labels"])))
            total = fabric.all_reduce(torch.stack([loss.detach(), num_tokens]), reduce_op="sum")
            numbers = sum(fabric.collective.all_gather_object(batch["number"].tolist()), [])
            if fabric.is_global_zero:
                with open("log", "a") as log:
                    log.write(json.dumps([epoch, float(total[0] / total[1]), numbers]) + chr(10))
            fabric.save("last", state)
            if fabric.num_steps == KILLED_AFTER:
                os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    Fabric(accelerator="cpu", devices=DEVICES, strategy="fsdp" if DEVICES > 1 else "auto").launch(main)
"""


def run(folder: Path, kind: str, devices: int, killed_after: int) -> int:
    folder.mkdir(exist_ok=True)
    (folder / "program.py").write_text(PROGRAM)
    words = [sys.executable, "program.py", kind, str(devices), str(killed_after)]
    return template.run(words, cwd=folder, timeout=100, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode


def lines(folder: Path) -> list[list[object]]:
    return [json.loads(line) for line in (folder / "log").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["map", pytest.param("stream", marks=pytest.mark.thorough)])
def test_a_run_that_is_killed_resumes_on_as_many_ranks_exactly_and_on_others_with_each_sample_once(
    kind: str, tmp_path: Path
) -> None:
    whole, same, other = (tmp_path / name for name in ("whole", "same", "other"))
    assert run(whole, kind, 2, -1) == 0
    assert run(same, kind, 2, 5) != 0
    shutil.copytree(same, other)
    assert run(same, kind, 2, -1) == 0
    assert lines(same) == lines(whole)
    assert run(other, kind, 3, -1) == 0
    read = lines(other)
    for epoch in range(2):
        numbers = [number for at, _, step in read if at == epoch for number in step]  # type: ignore[attr-defined]
        assert sorted(numbers) == list(range(100)), epoch
    assert read[-1][1] < 2.9  # type: ignore[operator]
    assert torch.tensor([loss for _, loss, _ in read]).isfinite().all()
