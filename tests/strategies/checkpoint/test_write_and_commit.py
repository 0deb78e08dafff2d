"""Checkpoints as folders: what is in them, and what a crash, a full disk, a flipped bit and a planted pickle do."""

from __future__ import annotations

import json
import math
import os
import random
import resource
import signal
import subprocess
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import template
import torch
import xxhash
from devices import ACCELERATOR
from torch import Tensor, nn
from torch.masked import masked_tensor

from fabric import CheckpointError, Fabric, read_checkpoint
from fabric.strategies.checkpoint.manifest import NAME
from fabric.strategies.checkpoint.read_and_verify import Checkpoint
from fabric.strategies.checkpoint.state import ObjectStates
from fabric.strategies.checkpoint.storage import Folder, storage_of
from fabric.strategies.checkpoint.tensors import TensorShards, no_shards, replicated
from fabric.strategies.checkpoint.write_and_commit import commit, plan, save, write
from fabric.strategies.collectives.single import SingleDeviceCollective
from fabric.strategies.tensors.chunk import Chunk, chunks_of_range, whole


def alone() -> SingleDeviceCollective:
    collective = SingleDeviceCollective()
    collective.setup()
    return collective


def save_here(path: Path, state: Any) -> None:
    save(alone(), Folder(path), state)


VALUES = {
    "none": None,
    "numbers": [True, 3, -0.5, 2**70, complex(1, -2), float("inf")],
    "words": {"a/b~c": "x", "$dollar": b"\x00\xff", 3: (1, [2]), (1, "k"): {4}},
    "torch": [torch.float16, torch.device("cuda", 1), torch.Size([2, 3])],
    "counter": Counter({30: 1}),
    "ordered": OrderedDict(b=1, a=2),
    "numpy": [np.float32(0.1), np.arange(6, dtype=np.uint16).reshape(2, 3), np.zeros((0, 3))],
    "path": Path("runs/1"),
    "tensors": [
        torch.arange(5)[::2],
        torch.tensor(1 + 2j),
        torch.ones(0, 3),
        torch.tensor([1.5], dtype=torch.bfloat16),
    ],
}


def test_values_and_tensors_are_loaded_as_they_were_saved(tmp_path: Path) -> None:
    save_here(tmp_path / "saved", VALUES)
    found = read_checkpoint(tmp_path / "saved")
    tensors, arrays = found.pop("tensors"), found.pop("numpy")
    for one, other in zip(tensors, VALUES["tensors"], strict=True):  # type: ignore[call-overload]
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert torch.equal(one, other)
    assert type(arrays[0]) is np.float32
    assert arrays[0] == np.float32(0.1)
    assert arrays[1].dtype == np.uint16
    assert arrays[1].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert (arrays[2].dtype, arrays[2].shape) == (np.float64, (0, 3))
    expected = {name: value for name, value in VALUES.items() if name not in ("tensors", "numpy")}
    assert found == expected
    assert [type(value) for value in found.values()] == [type(value) for value in expected.values()]
    assert math.isnan(_again(tmp_path, {"x": float("nan")})["x"])


def test_containers_of_plain_values_keep_their_classes_next_to_objects() -> None:
    nest = {"counts": Counter(a=1), "ordered": OrderedDict(b=1), "shape": torch.Size([2]), "module": nn.Linear(1, 1)}
    found = ObjectStates().read({"user": nest})["user"]
    assert [type(each) for each in found.values()] == [Counter, OrderedDict, torch.Size, OrderedDict]
    assert type(nest["module"]) is nn.Linear


@pytest.mark.filterwarnings("ignore:The PyTorch API of")
@pytest.mark.parametrize(
    ("kind", "make"),
    [
        ("a `Tensor`", lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])),
        ("a `Tensor` with the layout torch.sparse_coo", lambda: torch.ones(3).to_sparse()),
        ("a `MaskedTensor`", lambda: masked_tensor(torch.ones(2), torch.tensor([True, False]))),
        ("a `Tensor` with the layout torch.strided, on the device meta", lambda: torch.ones(2, device="meta")),
    ],
)
def test_tensors_that_are_not_dense_raise_with_their_place(
    tmp_path: Path, kind: str, make: Callable[[], Tensor]
) -> None:
    tensor = make()
    with pytest.raises(CheckpointError, match=f"The tensor at /x/y is {kind}"):
        save_here(tmp_path / "saved", {"x": {"y": tensor}})


def _again(folder: Path, state: dict[str, Any]) -> Any:
    save_here(folder / "again", state)
    return read_checkpoint(folder / "again")


def test_a_value_that_needs_code_to_be_loaded_raises_with_its_position(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"a `functools.partial` at /deep/0/it, which cannot be saved"):
        save_here(tmp_path / "saved", {"deep": [{"it": __import__("functools").partial(print)}]})
    assert not (tmp_path / "saved" / NAME).exists()


def test_a_sparse_tensor_raises_with_its_position(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"The tensor at /x is .* torch.sparse_coo"):
        save_here(tmp_path / "saved", {"x": torch.eye(2).to_sparse()})


@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 4), (2, 3, 5), (4, 1, 2, 3)], ids=str)
def test_chunks_of_a_range_are_its_elements_in_order(shape: tuple[int, ...]) -> None:
    numbers = torch.arange(math.prod(shape)).reshape(shape)
    for start in range(numbers.numel() + 1):
        for stop in range(start, numbers.numel() + 1):
            chunks = list(chunks_of_range(shape, start, stop))
            found = [numbers[chunk.slices_in(whole(shape))].reshape(-1) for chunk in chunks]
            assert torch.cat([*found, numbers.new_empty(0)]).tolist() == list(range(start, stop))
            assert len(chunks) <= max(1, 2 * len(shape) - 1)


def cut(tensor: Tensor, generator: random.Random) -> list[tuple[Chunk, Tensor]]:
    """The tensor in chunks of random sizes along random dims."""
    pieces = [(whole(tensor.shape), tensor)]
    for _ in range(generator.randrange(4)):
        chunk, part = pieces.pop(generator.randrange(len(pieces)))
        dim = generator.randrange(part.ndim)
        at = generator.randrange(part.shape[dim] + 1)
        for start, stop in ((0, at), (at, part.shape[dim])):
            offsets = list(chunk.offsets)
            offsets[dim] += start
            half = part.narrow(dim, start, stop - start)
            pieces.append((Chunk(tuple(offsets), tuple(half.shape)), half))
    return pieces


def test_a_tensor_saved_in_any_chunks_by_any_ranks_is_read_whole_and_in_part(tmp_path: Path) -> None:
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    generator = random.Random(seed)
    for trial in range(20):
        tensor = torch.rand(*(generator.randrange(1, 6) for _ in range(generator.randrange(1, 4))))
        size, parts = generator.randrange(1, 4), cut(tensor, generator)
        storage = Folder(tmp_path / str(trial))
        for rank in range(size):
            own = tuple((chunk, part) for chunk, part in parts[rank::size] if part.numel())
            state = {"x": TensorShards(tuple(tensor.shape), tensor.dtype, own, (rank,))}
            write(storage, plan(state, rank, "t"))
        commit(storage, "t", size)
        assert torch.equal(read_checkpoint(storage.path)["x"], tensor)


def test_replicated_and_tied_tensors_are_written_once_and_balanced_over_ranks_by_bytes(tmp_path: Path) -> None:
    tensors = [torch.rand(100, 30), torch.rand(1000), torch.rand(3), torch.rand(50, 60), torch.rand(2500)]
    state = {f"{number}": replicated(tensor, range(3)) for number, tensor in enumerate([*tensors, tensors[0]])}
    storage = Folder(tmp_path / "saved")
    for rank in range(3):
        write(storage, plan(state, rank, "t"))
    sizes = [(tmp_path / "saved" / f"t.{rank}.bin").stat().st_size for rank in range(3)]
    total = sum(tensor.nbytes for tensor in tensors)
    assert total <= sum(sizes) < total + 1000  # alignment
    assert max(sizes) < 0.45 * total
    commit(storage, "t", 3)
    found = read_checkpoint(tmp_path / "saved")
    assert all(torch.equal(found[str(number)], tensor) for number, tensor in enumerate([*tensors, tensors[0]]))


def test_a_flipped_bit_raises_with_the_name_of_the_tensor_before_anything_is_loaded(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(2048, 2048))
    fabric = Fabric(accelerator=ACCELERATOR, devices=1)
    path = tmp_path / "saved"
    fabric.save(path, {"model": model})
    (file,) = path.glob("*.bin")
    content = bytearray(file.read_bytes())
    content[2**20 + 1000] ^= 4
    file.write_bytes(content)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        model[0].weight.zero_()
    with pytest.raises(CheckpointError, match=r"checksum mismatch\), in /model/1.weight"):
        fabric.load(path, {"model": model})
    assert not model[0].weight.any()
    assert torch.equal(model[1].weight, before["1.weight"])
    manifest = (path / NAME).read_text()
    (path / NAME).write_text(manifest.replace('"shape":[8]', '"shape":[9]'))
    with pytest.raises(CheckpointError, match="is damaged: its checksum is not"):
        fabric.load(path, {"model": model})
    fabric.close()


def test_a_rank_verifies_the_file_that_it_has_saved(tmp_path: Path) -> None:
    storage, num_ranks, num_elements = Folder(tmp_path / "saved"), 11, 1024
    for rank in range(num_ranks):
        shard = Chunk((rank * num_elements,), (num_elements,)), torch.full((num_elements,), float(rank))
        tensor = TensorShards((num_ranks * num_elements,), torch.float32, (shard,), (rank,))
        write(storage, plan({"weight": tensor}, rank, "t"))
    commit(storage, "t", num_ranks)
    for damaged in range(num_ranks):
        file = tmp_path / "saved" / f"t.{damaged}.bin"
        content = file.read_bytes()
        file.write_bytes(content[:-1] + b"\xff")
        found = set()
        for rank in range(num_ranks):
            try:
                Checkpoint.open(storage).verify(share=rank, num_shares=num_ranks)
            except ValueError:
                found.add(rank)
        file.write_bytes(content)
        assert found == {damaged}


def test_the_manifest_says_where_each_tensor_is_with_the_xxh3_of_its_bytes(tmp_path: Path) -> None:
    tensors = {"small": torch.arange(7), "large": torch.arange(2**20, dtype=torch.float32)}
    save_here(tmp_path / "saved", tensors)
    manifest = json.loads((tmp_path / "saved" / NAME).read_text())
    assert manifest["version"] == 3
    for name, tensor in tensors.items():
        (file, offset, *chunk, checksum), *others = manifest["content"]["tensors"][f"/{name}"]["pieces"]
        assert (chunk, others) == ([[0], list(tensor.shape)], [])
        content = (tmp_path / "saved" / file).read_bytes()[offset : offset + tensor.nbytes]
        assert content == tensor.numpy().tobytes()
        assert checksum == xxhash.xxh3_64_hexdigest(content)


def test_a_tensor_without_elements_is_saved_although_no_rank_has_a_shard_of_it(tmp_path: Path) -> None:
    save_here(tmp_path / "saved", {"x": no_shards((0, 3), torch.bfloat16), "y": torch.ones(2)})
    found = read_checkpoint(tmp_path / "saved")["x"]
    assert (found.shape, found.dtype) == ((0, 3), torch.bfloat16)


def test_a_truncated_file_raises(tmp_path: Path) -> None:
    save_here(tmp_path / "saved", {"x": torch.ones(1000)})
    (file,) = (tmp_path / "saved").glob("*.bin")
    os.truncate(file, 2000)
    with pytest.raises(CheckpointError, match=r"checksum mismatch\), in /x"):
        read_checkpoint(tmp_path / "saved")


def test_errors_for_a_missing_and_an_incomplete_checkpoint_differ(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="There is no such folder"):
        read_checkpoint(tmp_path / "none")
    write(Folder(tmp_path / "torn"), plan({"x": torch.ones(3)}, 0, "0badcafe"))
    with pytest.raises(CheckpointError, match="the save was not completed"):
        read_checkpoint(tmp_path / "torn")


def test_a_malicious_pickle_is_never_run(tmp_path: Path) -> None:
    path, marker = tmp_path / "saved", tmp_path / "ran"
    save_here(path, {"x": torch.ones(3)})
    outer = json.loads((path / NAME).read_text())
    outer["content"]["values"]["evil"] = {"$pickle": "gASV", "$reduce": ["os.mkdir", str(marker)]}
    (path / NAME).write_text(json.dumps(outer))
    with pytest.raises(CheckpointError, match="is damaged"):
        read_checkpoint(path)
    assert not marker.exists()


def test_a_checkpoint_is_saved_to_an_fsspec_address(tmp_path: Path) -> None:
    address = f"memory://{tmp_path.name}/saved"
    model = nn.Linear(3, 2)
    fabric = Fabric(accelerator=ACCELERATOR, devices=1)
    for step in range(2):
        fabric.save(address, {"model": model, "step": step})
    other = {"model": nn.Linear(3, 2), "step": -1}
    fabric.load(address, other)
    fabric.close()
    assert other["step"] == 1
    torch.testing.assert_close(other["model"].state_dict(), model.state_dict())  # type: ignore[attr-defined]
    assert len(storage_of(address).names()) == 2  # of the first save nothing is left


def save_twice(fabric: Fabric, folder: str) -> tuple[str, bool, int]:
    path = Path(folder) / "saved"
    fabric.save(path, {"value": torch.ones(10)})
    if fabric.global_rank == 1:  # a disk that is full after 100 KB
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    model = fabric.setup(nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 300)))
    try:
        fabric.save(path, {"model": model})
    except CheckpointError as error:
        fabric.barrier()
        intact = bool(fabric.load(path)["value"].eq(torch.ones(10)).all())
        return str(error), intact, len(os.listdir(path))
    raise AssertionError("a save onto a full disk returned")


@pytest.mark.slow
def test_a_full_disk_on_one_rank_raises_on_all_and_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    found = Fabric(accelerator=ACCELERATOR, strategy="ddp", devices=2).launch(save_twice, str(tmp_path))
    assert found is not None
    sentence, intact, num_files = found
    assert "Rank 1 could not write the checkpoint" in sentence
    assert "File too large" in sentence
    assert intact
    assert num_files == 2


def save_to_own_path(fabric: Fabric, folder: str) -> str:
    with pytest.raises(CheckpointError) as raised:
        fabric.save(Path(folder) / f"of-rank-{fabric.global_rank}", {"step": 1})
    fabric.barrier()
    left = [file for _, _, files in os.walk(folder) for file in files]
    return str(fabric.broadcast(f"{raised.value} Files left: {left}", src=1))


@pytest.mark.slow
def test_ranks_that_save_to_different_paths_raise_with_the_likely_cause(tmp_path: Path) -> None:
    found = Fabric(accelerator=ACCELERATOR, strategy="ddp", devices=2).launch(save_to_own_path, str(tmp_path))
    assert found is not None
    assert f"Rank 0 does not find the files of rank 1 in '{tmp_path}/of-rank-0'" in found
    assert "(a time or a rank in its name?)" in found
    assert "Files left: []" in found


VICTIM = """
import sys, torch
from torch import nn
from fabric import Fabric
torch.set_num_threads(1)

def save(fabric):
    model = fabric.setup(nn.Linear(700, 700))
    for step in range(10**6):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(step)
        fabric.save(sys.argv[1], {"model": model, "step": step})
        fabric.print(step, flush=True)

Fabric(accelerator="cpu", strategy="ddp", devices=2, launcher="fork").launch(save)
"""


@pytest.mark.slow
@pytest.mark.thorough  # `test_kills.py` has the moments; here are real jobs
@pytest.mark.timeout(400)
def test_killing_all_ranks_during_a_save_leaves_a_complete_checkpoint(tmp_path: Path) -> None:
    seed, torn = random.randrange(2**31), 0
    print(f"seed {seed}")
    generator = random.Random(seed)
    program = tmp_path / "victim.py"
    program.write_text(VICTIM.replace("\nFabric(", "\nif __name__ == '__main__':\n    Fabric("))
    path = tmp_path / "saved"
    for _ in range(3):
        victim = template.Popen([sys.executable, program, path], stdout=subprocess.PIPE, start_new_session=True)
        assert victim.stdout is not None
        for _ in range(generator.randrange(2, 12)):
            victim.stdout.readline()
        victim.kill()  # no rank outlives it
        victim.wait()
        victim.stdout.read()  # until the last rank has closed it
        victim.stdout.close()
        torn += len(os.listdir(path)) > 3
        content = read_checkpoint(path)
        for tensor in content["model"].values():
            assert tensor.eq(content["step"]).all()
    print(f"{torn} of 3 were in the middle of a save")
    save_here(path, {"step": 0})
    assert len(os.listdir(path)) == 1  # no tensors, and nothing that a dead job left
