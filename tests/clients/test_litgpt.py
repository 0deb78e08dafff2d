"""litgpt's own scripts over `fabric.lightning`: the losses they log are those that they log over Lightning Fabric.

Lightning Fabric has no FSDP on the processor, so sharded runs are compared with its ddp, which computes the same. What
`torch.compile` would add is minutes of compilation, so it is off in both.
"""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import litgpt_run
import pytest

THROUGHPUT = ("batches", "samples", "lengths")
"""What litgpt logs from `ThroughputMonitor`, without the times."""
ONE_RANK = ("pretrain", "full", "lora", "lora_legacy", "adapter", "adapter_v2")
RUNS = {
    "lightning": (*(f"{script}:script:1" for script in ONE_RANK), "pretrain:ddp:2", "full:ddp:2"),
    "fabric": (
        *(f"{script}:script:1" for script in ONE_RANK),
        *(f"{script}:{strategy}:2" for script in ("pretrain", "full", "lora") for strategy in ("ddp", "script")),
    ),
}
ALIKE = {"TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}
"""torchrun gives each rank one thread as well; more would wait for each other, with a model as small as this."""
Losses = list[tuple[str, float]]
RUN = Path(litgpt_run.__file__)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What every run starts from; the first one makes it."""
    return tmp_path_factory.mktemp("checkpoint") / "tiny"


@pytest.fixture(scope="module")
def losses(checkpoint: Path) -> Callable[[str, str], Losses]:
    """Do all runs of a library once, and give what the logger of one wrote: the name of each loss, and the loss."""
    printed: dict[str, str] = {}

    def run(library: str, words: str) -> Losses:
        folder = checkpoint.parent / library
        if library not in printed:
            ended = call(checkpoint, library, folder, *RUNS[library])
            assert ended.returncode == 0, ended.stdout[-4000:]
            printed[library] = ended.stdout
        assert f"ended {words}: 0\n" in printed[library], printed[library][-4000:]
        return read(folder / words.replace(":", "-") / "logs" / "csv" / "version_0" / "metrics.csv")

    return run


def call(checkpoint: Path, *words: str | Path, by: tuple[str | Path, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Run the program to its end. `by`: the command that runs it."""
    environ = {**os.environ, **ALIKE, "LITGPT_RUN": " ".join(map(str, (checkpoint, *words)))}
    # lora_legacy takes the folder of the checkpoint from the command line, relative to where it runs.
    streams = {"stdout": subprocess.PIPE, "stderr": None if by else subprocess.STDOUT}
    command = [sys.executable, *by, RUN, "tiny"]
    return subprocess.run(command, env=environ, cwd=checkpoint.parent, **streams, text=True, timeout=550)


def read(file: Path) -> Losses:
    with file.open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    logged = ("loss", "val_loss", *THROUGHPUT)
    found = [(name, float(row[name])) for name in logged for row in rows if row.get(name)]
    assert len(found) > 6, rows
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("script", ONE_RANK)
def test_one_rank_logs_the_losses_of_lightning_fabric_to_the_last_digit(
    script: str, losses: Callable[[str, str], Losses]
) -> None:
    assert losses("fabric", f"{script}:script:1") == losses("lightning", f"{script}:script:1")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("strategy", ["ddp", "script"], ids=["ddp", "fsdp"])
@pytest.mark.parametrize("script", ["pretrain", "full"])
def test_two_ranks_log_the_losses_of_lightning_fabric(
    script: str, strategy: str, losses: Callable[[str, str], Losses]
) -> None:
    ours, theirs = losses("fabric", f"{script}:{strategy}:2"), losses("lightning", f"{script}:ddp:2")
    assert [name for name, _ in ours] == [name for name, _ in theirs]
    for (_, our_loss), (_, their_loss) in zip(ours, theirs, strict=True):
        assert our_loss == pytest.approx(their_loss, abs=2e-6)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_adapters_that_the_script_leaves_without_values_under_ddp_are_initialised(
    losses: Callable[[str, str], Losses],
) -> None:
    # litgpt makes the model empty where there are several ranks, and fills adapters under FSDP alone, by draws of its
    # own: with Lightning Fabric the losses under ddp are NaN.
    under_ddp, under_fsdp = losses("fabric", "lora:ddp:2"), losses("fabric", "lora:script:2")
    assert [name for name, _ in under_ddp] == [name for name, _ in under_fsdp]
    for (_, one), (_, other) in zip(under_ddp, under_fsdp, strict=True):
        assert one == pytest.approx(other, abs=0.05)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("strategy", ["ddp", "script"], ids=["ddp", "fsdp"])  # none other runs it
def test_pretraining_is_verified_to_have_the_numbers_of_one_process(
    strategy: str, checkpoint: Path, tmp_path: Path
) -> None:
    by = ("-m", "fabric", "verify", "--steps", "4", "--tolerance", "1e-5", "--json")  # without a second reference
    ended = call(checkpoint, "fabric", tmp_path, f"pretrain_at_one_rate:{strategy}:2", by=by)
    assert ended.returncode == 0, ended.stdout[-4000:]
    verdict = json.loads(ended.stdout)["verdict"]
    assert verdict.startswith("The numbers of one process: ")
    assert "in 4 steps" in verdict
