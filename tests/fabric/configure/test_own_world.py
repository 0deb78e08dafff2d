"""`Fabric(devices=1)` inside a rank: a world of its own, whoever started the ranks; and outside of one, a mistake."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import run
from torch import nn
from torch.utils.data import DataLoader
from worlds import run_world

from fabric import Fabric
from fabric.launchers.world import World
from fabric.strategies import SingleDeviceStrategy

LEARNER_AND_PLAYER = """
import json, sys
import torch
from fabric import Fabric

def train(fabric):
    rank = fabric.global_rank
    player = Fabric(devices=1)
    player.launch()
    if rank == 0:
        torch.save(torch.zeros(()), sys.argv[2] + "/written.pt")
        player.save(sys.argv[2] + "/player.ckpt", {"rank": rank})  # the other ranks do not call it
        assert player.load(sys.argv[2] + "/player.ckpt")["rank"] == 0
    seen = [player.world_size, player.global_rank, player.all_gather(torch.tensor(rank)).tolist()]
    player.close()
    gathered = fabric.all_gather(torch.tensor(rank)).tolist()
    if fabric.is_global_zero:
        print(json.dumps([type(player.strategy).__name__, seen, gathered]), flush=True)

if __name__ == "__main__":
    launcher, _, *as_function = sys.argv[1:]
    fabric = Fabric(accelerator="cpu", devices=2, launcher=launcher)
    if as_function:
        fabric.launch(train)
    else:
        fabric.launch()
        train(fabric)
        fabric.close()
"""
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node=2")
OWN = ["SingleDeviceStrategy", [1, 0, [0]], [0, 1]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "words"),
    [
        ((), ("fork",)),
        ((), ("script",)),
        ((), ("elastic",)),
        ((), ("forkserver", "as a function")),
        ((), ("spawn", "as a function")),
        (TORCHRUN, ("external",)),
        (("-m", "fabric", "run", "--devices", "2", "--strategy", "ddp"), ("auto",)),
    ],
    ids=str,
)
def test_a_fabric_on_one_device_next_to_the_learner_has_its_own_world(
    before: tuple[str, ...], words: tuple[str, ...], tmp_path: Path
) -> None:
    script = tmp_path / "learner.py"
    script.write_text(LEARNER_AND_PLAYER)
    launcher, *as_function = words
    done = run([*before, script, launcher, tmp_path, *as_function])
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == OWN


@pytest.mark.slow
@pytest.mark.thorough
def test_one_device_under_torchrun_without_a_launched_fabric_raises_with_what_to_write(
    tmp_path: Path,
) -> None:
    (tmp_path / "alone.py").write_text("from fabric import Fabric\nFabric(accelerator='cpu', devices=1)\n")
    done = run([*TORCHRUN, tmp_path / "alone.py"])
    assert done.returncode != 0
    assert "ask for 1 process on this node, but torchelastic started 2 processes (2 on this node; read: " in done.stderr
    assert (
        "For a separate world of one process, create `Fabric(devices=1, strategy='single_device')` after the "
        "`launch()` of the fabric that has all ranks." in done.stderr
    )


def live_beside(world: World) -> Any:
    """Several worlds of one process inside a rank, each used by one rank alone."""
    environ, group = dict(os.environ), None
    with Fabric(strategy="ddp", launcher="external") as fabric:
        fabric.launch()
        group = dist.group.WORLD
        drawn = torch.get_rng_state()
        players = [Fabric(devices=1), Fabric(devices=1, strategy="single_device"), Fabric(devices=1, strategy=ALONE)]
        assert torch.equal(torch.get_rng_state(), drawn)
        assert {key: value for key, value in os.environ.items() if environ.get(key) != value} == {}
        if world.rank == 1:
            first, second, third = players
            assert first.launch() is None
            assert second.launch(count_ranks, 5) == (1, 0, 5)
            model, optimizer = first.setup(net := nn.Linear(2, 1), torch.optim.SGD(net.parameters(), 0.1))
            first.backward(model(torch.ones(1, 2)).sum())
            optimizer.step()
            assert len(list(third.setup_dataloaders(DataLoader(range(7))))) == 7  # type: ignore[arg-type]
            assert first.broadcast({"x": 1}) == {"x": 1}
            first.barrier()
            assert first.is_global_zero
            assert not first.should_stop
        for player in players:
            player.close()
        assert dist.group.WORLD is group
        # What could be the world itself still is that.
        assert Fabric(strategy="ddp").world_size == Fabric(devices=2).world_size == 2
        with pytest.raises(ValueError, match=r"`strategy='ddp'` ask for 1 process on this node") as info:
            Fabric(devices=1, strategy="ddp")
        return fabric.all_gather(torch.tensor(world.rank)).tolist(), str(info.value)


ALONE = SingleDeviceStrategy()


def count_ranks(fabric: Fabric, number: int) -> tuple[int, int, int]:
    return fabric.world_size, fabric.global_rank, number


def test_worlds_of_one_process_leave_the_process_group_seeds_and_environment_alone() -> None:
    for gathered, refusal in run_world(2, live_beside):
        assert gathered == [0, 1]
        assert "create `Fabric(devices=1, strategy='single_device')` after" in refusal
