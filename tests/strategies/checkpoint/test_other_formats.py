"""Files of others: what is read from them, and that nothing in them is run."""

from __future__ import annotations

import json
import os
import pickle
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from devices import ACCELERATOR
from torch import nn

from fabric import CheckpointError, Fabric


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight


@pytest.mark.parametrize(
    "make", [torch.save, lambda obj, path: path.write_bytes(pickle.dumps(obj))], ids=["zip", "raw"]
)
def test_a_malicious_pickle_is_not_run_and_the_error_does_not_tell_how_to_run_it(tmp_path: Path, make: Any) -> None:
    make({"weight": Evil(tmp_path / "ran")}, tmp_path / "file.pt")
    fabric = Fabric(accelerator=ACCELERATOR, devices=1)
    with pytest.raises(CheckpointError, match="would run code from the file") as caught:
        fabric.load_raw(tmp_path / "file.pt", nn.Linear(2, 2))
    fabric.close()
    assert "weights_only" not in "".join(traceback.format_exception(caught.value))
    assert not (tmp_path / "ran").exists()


def test_the_name_of_a_tied_parameter_may_be_missing_in_a_file(tmp_path: Path) -> None:
    """As `transformers` saves."""
    weight = torch.rand(5, 3)
    safetensors.torch.save_file({"embedding.weight": weight}, tmp_path / "model.safetensors")
    torch.save({"embedding.weight": weight}, tmp_path / "model.pt")
    fabric = Fabric(accelerator=ACCELERATOR, devices=1)
    for path in (tmp_path, tmp_path / "model.pt"):
        model = Tied()
        fabric.load_raw(path, model)
        assert torch.equal(model.head.weight, weight)
    fabric.close()


def test_unaligned_tensors_in_a_file_are_read(tmp_path: Path) -> None:
    content = b"\x01" + torch.tensor([1.5, 2.5]).numpy().tobytes()
    header = {
        "flag": {"dtype": "BOOL", "shape": [1], "data_offsets": [0, 1]},
        "x": {"dtype": "F32", "shape": [2], "data_offsets": [1, 9]},
    }
    text = json.dumps(header).encode()
    (tmp_path / "a.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + content)
    fabric = Fabric(accelerator=ACCELERATOR, devices=1)
    found = fabric.load(tmp_path / "a.safetensors")
    fabric.close()
    assert found["x"].tolist() == [1.5, 2.5]
    assert found["flag"].tolist() == [True]


@pytest.mark.parametrize(
    ("header", "sentence"),
    [
        (b"no json", "invalid JSON in header"),
        (b'{"x": {"dtype": "F32", "shape": [4], "data_offsets": [0, 8]}}', "invalid shape, data type, or offset"),
        (b'{"x": {"dtype": "F32", "shape": [9], "data_offsets": [0, 36]}}', "file not fully covered"),
        (b'{"x": {"dtype": "Q4", "shape": [2], "data_offsets": [0, 8]}}', "unknown variant `Q4`"),
    ],
)
def test_a_header_that_does_not_match_its_file_raises(tmp_path: Path, header: bytes, sentence: str) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    fabric = Fabric(accelerator=ACCELERATOR, devices=1)
    with pytest.raises(CheckpointError, match=sentence):
        fabric.load(path)
    path.write_bytes((2**60).to_bytes(8, "little"))
    with pytest.raises(CheckpointError, match="header too large"):
        fabric.load(path)
    fabric.close()


def test_a_safetensors_file_raises_with_what_to_install_where_the_library_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    safetensors.torch.save_file({"x": torch.ones(2)}, tmp_path / "a.safetensors")
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    fabric = Fabric(accelerator=ACCELERATOR, devices=1)
    with pytest.raises(CheckpointError, match=r"Run `pip install 'torchfabric\[safetensors\]'`"):
        fabric.load(tmp_path / "a.safetensors")
    fabric.close()


def test_an_index_cannot_name_files_outside_its_folder(tmp_path: Path) -> None:
    safetensors.torch.save_file({"x": torch.ones(2)}, tmp_path / "secret.safetensors")
    (tmp_path / "run").mkdir()
    index = tmp_path / "run" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "../secret.safetensors"}}))
    fabric = Fabric(accelerator=ACCELERATOR, devices=1)
    with pytest.raises(CheckpointError, match=r"No such file or directory: .*run/secret\.safetensors"):
        fabric.load(index)
    fabric.close()


def test_loading_a_folder_of_torch_distributed_checkpoint_raises_with_the_command_to_convert_it(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Evil(tmp_path / "ran")))
    fabric = Fabric(accelerator=ACCELERATOR, devices=1)
    with pytest.raises(CheckpointError, match=r"format_utils dcp_to_torch \S+ FILE`"):
        fabric.load_raw(tmp_path, nn.Linear(2, 2))
    fabric.close()
    assert not (tmp_path / "ran").exists()


def test_an_index_of_torch_save_shards_is_read_and_raises_if_tensors_are_missing(tmp_path: Path) -> None:
    old, new = nn.Linear(2, 3), nn.Linear(2, 3)
    chosen = {"weight": "pytorch_model-00001-of-00002.bin", "bias": "pytorch_model-00002-of-00002.bin"}
    for name, file in chosen.items():
        torch.save({name: old.state_dict()[name]}, tmp_path / file)
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": chosen}))
    fabric = Fabric(accelerator=ACCELERATOR, devices=1)
    fabric.load_raw(index, new)
    torch.testing.assert_close(new.state_dict(), old.state_dict(), rtol=0, atol=0)
    index.write_text(json.dumps({"weight_map": chosen | {"weight": chosen["bias"]}}))
    with pytest.raises(CheckpointError, match="names tensors that its files do not have: 'weight'"):
        fabric.load_raw(index, new)
    fabric.close()


def test_the_error_of_a_file_with_other_names_shows_them_and_says_what_to_write(tmp_path: Path) -> None:
    source, path = nn.Linear(2, 3), tmp_path / "file"
    torch.save({f"module.{name}": tensor for name, tensor in source.state_dict().items()}, path)
    target = nn.Linear(2, 3)
    fabric = Fabric(accelerator=ACCELERATOR, devices=1)
    with pytest.raises(CheckpointError, match=r"Linear: module\.weight .*(\n.*)*name\.removeprefix\('module\.'\)"):
        fabric.load_raw(path, target)
    target.load_state_dict({name.removeprefix("module."): tensor for name, tensor in fabric.load(path).items()})
    fabric.close()
    assert torch.equal(target.weight, source.weight)


def test_the_error_of_a_folder_without_a_checkpoint_says_what_is_in_it(tmp_path: Path) -> None:
    fabric = Fabric(accelerator=ACCELERATOR, devices=1)

    def words(folder: Path) -> str:
        with pytest.raises(CheckpointError) as raised:
            fabric.load_raw(folder, nn.Linear(2, 3))
        return str(raised.value)

    assert "There is no such folder, or it is empty." in words(tmp_path)
    (tmp_path / "run" / "000001").mkdir(parents=True)
    assert "but '000001'. Load a folder that `fabric.save` wrote, the newest of a `CheckpointDir" in words(
        tmp_path / "run"
    )
    torch.save({}, tmp_path / "pytorch_model.bin")
    assert "but 'pytorch_model.bin'. Load" in words(tmp_path)
    assert "There is no such folder" in words(tmp_path / "model.pt")
    fabric.close()
