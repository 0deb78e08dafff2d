"""Checkpoints in an object store: a server that talks as S3 does, in this process, through fsspec and s3fs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import fsspec
import pytest
import torch
from devices import ACCELERATOR
from fakes import ThreadCollective, run_threads
from torch import nn

from fabric import CheckpointDirectory, CheckpointError, Fabric, read_checkpoint
from fabric.strategies.checkpoint import read_and_verify, write_and_commit
from fabric.strategies.checkpoint.manifest import NAME
from fabric.strategies.checkpoint.storage import storage_of
from fabric.strategies.checkpoint.tensors import replicated

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    """Of the module: the threads of fsspec last as long as the process."""
    from moto.server import ThreadedMotoServer  # three seconds, for those who run this

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    with pytest.MonkeyPatch.context() as environment:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            environment.setenv(name, "test")
        environment.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{server.get_host_and_port()[1]}")
        environment.setenv("AWS_DEFAULT_REGION", "us-east-1")
        system = fsspec.filesystem("s3")
        system.mkdir("bucket")
        yield "s3://bucket"
        system.clear_instance_cache()
    server.stop()


def damage(address: str, flipped: int) -> None:
    system = fsspec.filesystem("s3")
    content = bytearray(system.cat_file(address))
    content[flipped] ^= 1
    system.pipe_file(address, bytes(content))


def save_from_a_rank(collective: ThreadCollective, address: str) -> None:
    tensors = {name: replicated(torch.arange(6.0).view(3, 2) + number, (0, 1)) for number, name in enumerate("xy")}
    state = tensors | {"rank": collective.rank}
    for _ in range(2):
        write_and_commit.save(collective, storage_of(address), state)
    found = read_and_verify.load(collective, storage_of(address))
    assert torch.equal(found["x"].whole(), torch.arange(6.0).view(3, 2))
    part = torch.zeros(4) if collective.rank == 0 else torch.zeros(4).to_sparse()
    with pytest.raises(CheckpointError, match="Rank 1 could not write the checkpoint") as raised:
        write_and_commit.save(collective, storage_of(address), {"x": replicated(part, (0, 1))})
    assert raised.value.rank == 1


def test_ranks_save_to_a_bucket_together_and_a_failure_of_one_leaves_the_last_checkpoint(bucket: str) -> None:
    address = f"{bucket}/run/ranks"
    run_threads(2, save_from_a_rank, address)
    assert read_checkpoint(address)["rank"] == 0
    assert sorted(each.split(".")[-1] for each in storage_of(address).names()) == ["bin", "bin", "json"]


@pytest.mark.thorough  # the same as in a folder
def test_a_directory_in_a_bucket_resumes_from_the_newest_complete_checkpoint(bucket: str) -> None:
    model, fabric = nn.Linear(3, 2), Fabric(accelerator=ACCELERATOR, devices=1)
    checkpoints = CheckpointDirectory(f"{bucket}/directory", keep_last=2)
    assert checkpoints.latest() is None
    for step in range(4):
        checkpoints.save(fabric, {"model": model, "step": step}, step=step, blocking=step % 2 == 0)
    fabric.wait_for_save()
    assert len(checkpoints.all()) == 2
    torn = storage_of(f"{bucket}/directory/000005-step-4")  # of a job that died before the manifest
    torn.write("0123abcd.0.bin", [b"half"])
    state: dict[str, Any] = {"model": nn.Linear(3, 2), "step": -1}
    CheckpointDirectory(f"{bucket}/directory", keep_last=2).load(fabric, state)
    assert state["step"] == 3
    torch.testing.assert_close(state["model"].state_dict(), model.state_dict())
    checkpoints.save(fabric, {"model": model, "step": 9}, step=9)
    assert not torn.names()
    fabric.close()


@pytest.mark.thorough  # the same as in a folder
def test_a_flipped_bit_in_a_bucket_raises_with_the_name_of_the_tensor(bucket: str) -> None:
    fabric = Fabric(accelerator=ACCELERATOR, devices=1)
    address = f"{bucket}/run/one"
    fabric.save(address, {"model": nn.Linear(3, 2)})
    name = next(each for each in storage_of(address).names() if each != NAME)
    damage(f"{address}/{name}", 3)
    with pytest.raises(CheckpointError, match=r"mismatch\), in /model/weight"):
        fabric.load(address)
    damage(f"{address}/{NAME}", -20)  # within what was saved
    with pytest.raises(CheckpointError, match="damaged"):
        fabric.load(address)
    fabric.close()
