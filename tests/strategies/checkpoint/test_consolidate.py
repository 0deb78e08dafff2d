"""Exports as safetensors: what the library of that name reads, from a checkpoint whose tensors lie in pieces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from devices import ACCELERATOR
from torch import Tensor, nn

from fabric import CheckpointError, Fabric, consolidate
from fabric.cli import main
from fabric.strategies.checkpoint.storage import Folder
from fabric.strategies.checkpoint.tensors import TensorShards, replicated
from fabric.strategies.checkpoint.write_and_commit import commit, plan, write
from fabric.strategies.tensors.chunk import Chunk


class Tied(nn.Module):
    """One of each: tied, in bfloat16, a buffer of booleans, a number, nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 7)
        self.layer = nn.Linear(7, 5, dtype=torch.bfloat16)
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("flags", torch.tensor([True, False, True]))
        self.register_buffer("number", torch.tensor(3.0))
        self.register_buffer("nothing", torch.ones(0, 3))


def save_in_halves(path: Path, state: dict[str, dict[str, Tensor]]) -> None:
    """As two ranks do that each hold one half of the rows of each tensor that has any, and both the others."""
    storage = Folder(path)
    for rank in range(2):
        mine = {name: {key: _half(tensor, rank) for key, tensor in each.items()} for name, each in state.items()}
        write(storage, plan({**mine, "step": 3}, rank, "t"))
    commit(storage, "t", 2)


def _half(tensor: Tensor, rank: int) -> TensorShards:
    if tensor.ndim == 0 or tensor.numel() == 0:
        return replicated(tensor, (0, 1))
    rows = tensor.chunk(2)[rank]
    start = rank * tensor.chunk(2)[0].shape[0]
    chunk = Chunk((start, *(0 for _ in tensor.shape[1:])), tuple(rows.shape))
    return TensorShards(tuple(tensor.shape), tensor.dtype, ((chunk, rows),), (rank,))


def test_the_safetensors_library_loads_an_exported_file_with_tied_weights(tmp_path: Path) -> None:
    model, other = Tied(), Tied()
    save_in_halves(tmp_path / "saved", {"model": model.state_dict()})
    (written,) = consolidate(tmp_path / "saved", tmp_path / "model.safetensors")
    assert set(safetensors.torch.load_file(written)) == set(model.state_dict()) - {"head.weight"}
    assert safetensors.torch.load_model(other, written) == (set(), [])
    torch.testing.assert_close(dict(other.state_dict()), dict(model.state_dict()), rtol=0, atol=0)


def test_exported_shards_contain_each_tensor_once_and_can_be_loaded(tmp_path: Path) -> None:
    model, other = Tied(), Tied()
    save_in_halves(tmp_path / "saved", {"model": model.state_dict()})
    *shards, index = consolidate(tmp_path / "saved", tmp_path / "out", max_shard_bytes=330)
    assert [shard.name for shard in shards] == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    described = json.loads(index.read_text())
    found: dict[str, Tensor] = {}
    for shard in shards:
        content = safetensors.torch.load_file(shard)
        assert sum(tensor.nbytes for tensor in content.values()) <= 330
        assert {described["weight_map"][key] for key in content} == {shard.name}
        found |= content
    assert described["metadata"] == {"total_size": sum(tensor.nbytes for tensor in found.values())}
    assert set(found) == set(described["weight_map"]) == set(model.state_dict()) - {"head.weight"}
    fabric = Fabric(accelerator=ACCELERATOR, devices=1)
    for path in (tmp_path / "out", index):
        fabric.load_raw(path, other)
        torch.testing.assert_close(dict(other.state_dict()), dict(model.state_dict()), rtol=0, atol=0)
        with torch.no_grad():
            other.layer.weight.zero_()
    fabric.close()
    with pytest.raises(ValueError, match=r"contains files of another export.*'model-00001-of-00002.safetensors'"):
        consolidate(tmp_path / "saved", tmp_path / "out")


def test_fabric_consolidate_selects_a_module_and_keys_and_lists_the_modules_in_its_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fabric = Fabric(accelerator=ACCELERATOR, devices=1)
    models = {"models": {"one": nn.Linear(2, 3), "two": nn.Linear(3, 4)}}
    optimizer = torch.optim.AdamW(models["models"]["one"].parameters())
    fabric.save(tmp_path / "saved", {**models, "optimizer": optimizer, "step": 1})
    fabric.close()
    saved, out = str(tmp_path / "saved"), str(tmp_path / "out.safetensors")
    assert main(["consolidate", saved, out]) == 2
    assert "the modules in" in (reported := capsys.readouterr().err)
    assert "'models/one', 'models/two'. Pass the `name` of one of them" in reported
    assert main(["consolidate", saved, out, "--name", "models/two", "--keys", "^bias$"]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    found = safetensors.torch.load_file(out)
    torch.testing.assert_close(found, {"bias": models["models"]["two"].bias.detach()})
    for words, sentence in (
        (["--keys", "("], "is not a regular expression"),
        (["--keys", "none"], "nothing was written"),
        (["--max-shard-size", "5 cats"], "is not a size"),
    ):
        assert main(["consolidate", saved, out, "--name", "models/one", *words]) == 2
        assert sentence in capsys.readouterr().err
    assert main(["consolidate", str(tmp_path / "none"), out]) == 1
    assert "There is no such folder" in capsys.readouterr().err


def test_values_that_safetensors_cannot_store_raise_with_their_names(tmp_path: Path) -> None:
    class Extra(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"words": "x"}

    fabric = Fabric(accelerator=ACCELERATOR, devices=1)
    fabric.save(tmp_path / "saved", {"model": Extra(2, 2)})
    fabric.save(tmp_path / "complex", {"model": {"x": torch.ones(2, dtype=torch.complex128)}})
    fabric.close()
    with pytest.raises(ValueError, match=r"has values that are not tensors.*'_extra_state'"):
        consolidate(tmp_path / "saved", tmp_path / "x.safetensors")
    (chosen,) = consolidate(tmp_path / "saved", tmp_path / "y.safetensors", filter=lambda key, _: "extra" not in key)
    assert set(safetensors.torch.load_file(chosen)) == {"weight", "bias"}
    with pytest.raises(ValueError, match=r"does not support the dtype torch\.complex128"):
        consolidate(tmp_path / "complex", tmp_path / "x.safetensors")
    assert not (tmp_path / "x.safetensors").exists()


def test_a_damaged_checkpoint_is_not_exported(tmp_path: Path) -> None:
    save_in_halves(tmp_path / "saved", {"model": {"weight": torch.ones(100)}})
    file = next((tmp_path / "saved").glob("*.bin"))
    file.write_bytes(b"\x01" + file.read_bytes()[1:])
    with pytest.raises(CheckpointError, match=r"checksum mismatch\), in /model/weight"):
        consolidate(tmp_path / "saved", tmp_path / "x.safetensors")
