"""Two ranks save, and are killed at a moment drawn beforehand; as often as asked. Prints a line of JSON for each time.

The ranks are forks of this process, which has torch and never talks to them: a new pair for each save. Started by
`test_kills.py`: `killed_ranks.py FOLDER NUM_KILLS SEED PORT`; rank 0 of each pair serves their store at that port.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, final

import torch

from fabric import read_checkpoint
from fabric.launchers.world import Rendezvous, World
from fabric.strategies.checkpoint.manifest import NAME
from fabric.strategies.checkpoint.storage import Buffer, Folder, Storage
from fabric.strategies.checkpoint.tensors import replicated
from fabric.strategies.checkpoint.write_and_commit import BackgroundSaves, save
from fabric.strategies.collectives.process_group import TorchCollective

NUM_ELEMENTS = 300_000
FULL_BYTES = 4 * NUM_ELEMENTS
"""What each of two ranks writes: a tensor of NUM_ELEMENTS floats."""


def kill_all() -> None:
    """Every rank, at once."""
    os.killpg(0, signal.SIGKILL)


@final
class Fatal:
    """A folder in which all ranks are killed once so many bytes of a tensor file are written, or around the commit."""

    def __init__(self, folder: Path, moment: str, num_bytes: int) -> None:
        self._folder, self._moment, self._num_bytes = Folder(folder), moment, num_bytes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._folder, name)

    def write(self, name: str, blocks: Iterable[Buffer], **options: Any) -> None:
        blocks = self._until(blocks) if name.endswith(".bin") else blocks
        self._folder.write(name, blocks, **options)

    def commit(self, name: str, content: bytes) -> None:
        if self._moment == "commit":
            self._folder.write(f"{name}.new", [content])
            kill_all()
        self._folder.commit(name, content)
        if self._moment == "after":
            kill_all()

    def _until(self, blocks: Iterable[Buffer]) -> Iterator[Buffer]:
        left = self._num_bytes
        for block in blocks:
            if self._moment == "bytes" and len(block) > left:
                yield block[:left]
                kill_all()
            left -= len(block)
            yield block


def save_as(rank: int, step: int, port: int, storage: Storage, *, blocking: bool) -> None:
    """One save of the pair."""
    at = Rendezvous(address="127.0.0.1", port=port, hosted=False)
    world = World(rank=rank, local_rank=rank, size=2, local_size=2, rendezvous=at)
    collective = TorchCollective(world, "gloo", device=torch.device("cpu"))
    collective.setup()
    tensors = [replicated(torch.full((NUM_ELEMENTS,), float(step)), (0, 1)) for _ in range(2)]
    state = {"tensors": tensors, "step": step}
    if blocking:
        save(collective, storage, state)
        return
    saves = BackgroundSaves(collective)
    saves.start(storage, state)
    saves.finish()


def pair(body: Callable[[int], None]) -> list[int]:
    """Run two ranks in a process group of their own. By which signals they ended."""
    pids: list[int] = []
    for rank in range(2):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.read(gate[0], 1)
                body(rank)
                code = 0
            finally:
                os._exit(code)
        pids.append(pid)
        os.setpgid(pid, pids[0])
    os.write(gate[1], b"..")
    statuses = [os.waitpid(pid, 0)[1] for pid in pids]
    return [os.WTERMSIG(status) if os.WIFSIGNALED(status) else -os.WEXITSTATUS(status) for status in statuses]


gate = os.pipe()
"""Neither rank begins before both are in their process group."""


def main(folder: Path, num_kills: int, seed: int, port: int) -> None:
    """Each trial goes on from what the one before has left."""
    torch.set_num_threads(1)
    generator, path = random.Random(seed), folder / "saved"
    assert pair(lambda rank: save_as(rank, 0, port, Folder(path), blocking=True)) == [0, 0]
    before = 0
    for step in range(1, num_kills + 1):
        moment = {3: "commit", 6: "after"}.get(step % 10, "bytes")
        blocking, killer = generator.random() < 0.5, generator.randrange(2)
        num_bytes = generator.randrange(FULL_BYTES)
        known = set(os.listdir(path))

        def body(rank: int, step: int = step, moment: str = moment) -> None:
            own = moment if moment != "bytes" or rank == killer else "never"  # noqa: B023
            storage = Fatal(path, own, num_bytes)  # noqa: B023
            save_as(rank, step, port, storage, blocking=blocking)  # noqa: B023

        signals = pair(body)
        new = {name: (path / name).stat().st_size for name in set(os.listdir(path)) - known}
        content: dict[str, Any] = read_checkpoint(path)
        trial = {
            "step": step,
            "before": before,
            "moment": moment,
            "signals": signals,
            "found": content["step"],
            "whole": all(bool(each.eq(content["step"]).all()) for each in content["tensors"]),
            "num_bytes": num_bytes,
            "full_bytes": FULL_BYTES,
            "written": next((size for name, size in new.items() if f".{killer}.bin" in name), None),
        }
        before = content["step"]
        if step == num_kills:
            pair(lambda rank: save_as(rank, -1, port, Folder(path), blocking=False))
            trial["left_at_the_end"] = len(os.listdir(path))
            assert NAME in os.listdir(path)
        print(json.dumps(trial), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
