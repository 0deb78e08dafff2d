"""Programs over real data libraries, on two ranks: each sample on one rank, and a run that is resumed in mid-epoch."""

from __future__ import annotations

import io
import logging
import tarfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
import sklearn  # noqa: F401  # datasets imports it late, and it sets a variable of the environment
import torch
import torchdata.nodes
import webdataset
from datasets.distributed import split_dataset_by_node
from devices import ACCELERATOR
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, RandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler
from worlds import preload

from fabric import CheckpointError, Fabric, read_checkpoint

SIZE = 36
TORCHDATA_BEHIND = "ignore:'set_vital' is deprecated"  # torchdata 0.11 with torch 2.13


@pytest.fixture(autouse=True, scope="module")
def ranks_import_the_libraries() -> None:
    """They import this module, and what it imports: 2 s in each rank."""
    preload("sklearn", "datasets", "webdataset")


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(SIZE))


def numbers(files: list[range]) -> Iterator[dict[str, int]]:
    for file in files:
        yield from ({"x": number} for number in file)


def stream(num_shards: int) -> Any:
    files = [range(start, start + SIZE // num_shards) for start in range(0, SIZE, SIZE // num_shards)]
    return datasets.IterableDataset.from_generator(numbers, gen_kwargs={"files": files})


def nodes(sampler: Any) -> Any:
    node = torchdata.nodes.Mapper(torchdata.nodes.SamplerWrapper(sampler), int)
    return torchdata.nodes.Loader(torchdata.nodes.Batcher(node, 3))


STATEFUL: dict[str, Callable[[Fabric], Any]] = {
    "map": lambda f: StatefulDataLoader(range(SIZE), 3, shuffle=True),  # type: ignore[arg-type]
    "map, workers": lambda f: StatefulDataLoader(range(SIZE), 3, shuffle=True, num_workers=1),  # type: ignore[arg-type]
    "batch sampler": lambda f: StatefulDataLoader(
        range(SIZE),  # type: ignore[arg-type]
        batch_sampler=BatchSampler(RandomSampler(range(SIZE), generator=torch.Generator().manual_seed(4)), 3, False),
    ),
    "stream": lambda f: StatefulDataLoader(Stream(), 3),
    "two shards": lambda f: StatefulDataLoader(stream(2), 3),
    "three shards": lambda f: StatefulDataLoader(stream(3), 3),
    "three shards, workers": lambda f: StatefulDataLoader(stream(3), 3, num_workers=2),
    "split": lambda f: StatefulDataLoader(split_dataset_by_node(stream(3), f.global_rank, f.world_size), 3),
    "distributed sampler": lambda f: StatefulDataLoader(
        range(SIZE),  # type: ignore[arg-type]
        3,
        sampler=StatefulDistributedSampler(range(SIZE), f.world_size, f.global_rank),  # type: ignore[arg-type]
    ),
    "nodes": lambda f: nodes(range(SIZE)),
    "split nodes": lambda f: nodes(DistributedSampler(range(SIZE), f.world_size, f.global_rank)),  # type: ignore[arg-type]
}


def read(batches: Any) -> list[list[int]]:
    return [torch.as_tensor(batch["x"] if isinstance(batch, dict) else batch).tolist() for batch in batches]


def resume(fabric: Fabric, folder: str) -> list[str]:
    warnings.filterwarnings("ignore", "'set_vital' is deprecated")
    wrong = []
    for name, make in STATEFUL.items():
        torch.manual_seed(1)
        loader = fabric.setup_dataloaders(make(fabric))
        loader.set_epoch(1)
        whole = read(loader)
        torch.manual_seed(1)
        loader = fabric.setup_dataloaders(make(fabric))
        loader.set_epoch(1)
        batches = iter(loader)
        head = read(next(batches) for _ in range(2))
        fabric.save(f"{folder}/{name}", {"loaders": [loader], "step": 2})
        torch.manual_seed(2)
        resumed = fabric.setup_dataloaders(make(fabric))
        state = {"loaders": [resumed], "step": 0}
        fabric.load(f"{folder}/{name}", state)
        shares = fabric.collective.all_gather_object((whole, head + read(resumed)))
        if sorted(number for share, _ in shares for batch in share for number in batch) != list(range(SIZE)):
            wrong.append(f"{name}: not every sample once: {shares}")
        if any(share != again for share, again in shares) or state["loaders"] != [resumed] or state["step"] != 2:
            wrong.append(f"{name}: went on elsewhere: {shares}")
    return wrong


@pytest.mark.slow
@pytest.mark.filterwarnings(TORCHDATA_BEHIND)
@pytest.mark.parametrize("devices", [1, 2])
def test_a_run_that_is_resumed_in_mid_epoch_reads_the_rest_of_it(devices: int, tmp_path: Path) -> None:
    strategy = "ddp" if devices > 1 else "single_device"
    fabric = Fabric(accelerator=ACCELERATOR, devices=devices, strategy=strategy, launcher="forkserver")
    assert fabric.launch(resume, str(tmp_path)) == []


def of_another_world(fabric: Fabric, path: str, *, saved: bool) -> str:
    warnings.filterwarnings("ignore", "'set_vital' is deprecated")
    loader = fabric.setup_dataloaders(StatefulDataLoader(stream(2), 3))
    try:
        fabric.load(path, {"loader": loader}) if saved else fabric.save(path, {"loader": loader})
        loader.load_state_dict(loader.state_dict() | {"part": [1 - fabric.global_rank, 2]})
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_a_position_in_another_part_of_the_data_raises(tmp_path: Path) -> None:
    def launch(devices: int, *, saved: bool) -> Any:
        fabric = Fabric(accelerator=ACCELERATOR, devices=devices, strategy="ddp", launcher="forkserver")
        return fabric.launch(of_another_world, str(tmp_path / "file"), saved=saved)

    assert "reads part 1 of 2 was given to rank 0 of 2, which reads another part" in launch(2, saved=False)
    sentence = "`state['loader']` has the positions of 2 ranks in the checkpoint, and here 1 ranks read one order"
    assert sentence in launch(1, saved=True)


# webdataset


def write_shards(folder: Path, num_shards: int) -> list[str]:
    """`SIZE` numbers in tar files."""
    paths = []
    for shard in range(num_shards):
        paths.append(str(folder / f"{shard}.tar"))
        with tarfile.open(paths[-1], "w") as file:
            for number in range(shard, SIZE, num_shards):
                info = tarfile.TarInfo(f"{number:04}.x")
                info.size = len(content := str(number).encode())
                file.addfile(info, io.BytesIO(content))
    return paths


def over_shards(fabric: Fabric, paths: list[str]) -> dict[str, Any]:
    def pipeline(**options: Any) -> Any:
        return webdataset.WebDataset(paths, shardshuffle=False, **options).map(lambda sample: int(sample["x"]))

    split = pipeline(nodesplitter=webdataset.split_by_node)
    seen: dict[str, Any] = {
        "split": read(fabric.setup_dataloaders(DataLoader(split, 3))),
        "split, workers": read(fabric.setup_dataloaders(DataLoader(split, 3, num_workers=1))),
        "WebLoader": read(fabric.setup_dataloaders(webdataset.WebLoader(split, batch_size=3))),
    }
    try:
        fabric.setup_dataloaders(DataLoader(pipeline(nodesplitter=None).shuffle(8), 3))
    except ValueError as error:
        seen["unsplit"] = str(error)
    return fabric.collective.all_gather_object(seen)


@pytest.mark.slow
def test_shards_of_webdataset_are_split_once(tmp_path: Path) -> None:
    fabric = Fabric(accelerator=ACCELERATOR, devices=2, strategy="ddp", launcher="forkserver")
    seen = fabric.launch(over_shards, write_shards(tmp_path, 4))
    assert seen is not None
    for name in ("split", "split, workers", "WebLoader"):
        shares = [rank[name] for rank in seen]  # type: ignore[index]
        assert sorted(number for share in shares for batch in share for number in batch) == list(range(SIZE)), name
        assert [len(share) for share in shares] == [6, 6], name
    assert "Pass `nodesplitter=webdataset.split_by_node`." in seen[0]["unsplit"]  # type: ignore[index]


# Loaders without a state


@pytest.fixture
def fabric() -> Any:
    with Fabric(accelerator=ACCELERATOR, devices=1) as fabric:
        yield fabric


def test_a_loader_without_a_state_is_left_out_of_checkpoints_and_reported_once(
    fabric: Fabric, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Linear(2, 2)
    loader: Any = DataLoader(range(8), 2)  # type: ignore[arg-type]
    state: dict[str, Any] = {
        "model": model,
        "loader": loader,
        "nested": {"model": model, "loaders": [loader]},
        "step": 3,
    }
    with caplog.at_level(logging.WARNING, "fabric"):
        for name in ("first", "second"):
            fabric.save(tmp_path / name, state)
    written = read_checkpoint(tmp_path / "second")
    assert set(written) == {"model", "nested", "step", "fabric"}
    assert written["nested"]["loaders"] == [None]
    messages = [record.getMessage() for record in caplog.records]
    assert messages == [
        f"`state[{name!r}]` is a `DataLoader`, which has no state: checkpoints leave it out, and a resumed "
        "run starts its epoch from the beginning. Save what `fabric.setup_dataloaders` returned to resume in "
        "mid-epoch, or leave it out of the state."
        for name in ("loader", "loaders")
    ]
    other = nn.Linear(2, 2)
    target: dict[str, Any] = {"loader": loader, "nested": {"model": other, "loaders": [loader]}, "step": 0}
    rest = fabric.load(tmp_path / "first", target)
    assert set(rest) == {"model"}
    assert target["loader"] is target["nested"]["loaders"][0] is loader
    assert target["nested"]["model"] is other
    assert target["step"] == 3
    torch.testing.assert_close(other.state_dict(), model.state_dict())


@pytest.mark.filterwarnings(TORCHDATA_BEHIND)
def test_loading_a_loader_whose_state_was_not_saved_raises(fabric: Fabric, tmp_path: Path) -> None:
    loader = fabric.setup_dataloaders(StatefulDataLoader(range(8), 2))  # type: ignore[arg-type]
    fabric.save(tmp_path / "file", {"step": 1})
    with pytest.raises(CheckpointError, match=r"loader +`\w+` +missing"):
        fabric.load(tmp_path / "file", {"loader": loader})
    assert fabric.load(tmp_path / "file", {"loader": loader}, strict=False) == {"step": 1}


def test_other_numbers_of_objects_in_a_list_are_an_error(fabric: Fabric, tmp_path: Path) -> None:
    fabric.save(tmp_path / "file", {"models": [nn.Linear(1, 1)]})
    with pytest.raises(ValueError, match=r"`state\['models'\]` is a `list` of 2 entries.*has 1 entries"):
        fabric.load(tmp_path / "file", {"models": [nn.Linear(1, 1), nn.Linear(1, 1)]})
