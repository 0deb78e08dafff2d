"""What `consolidate` writes of a checkpoint is read by transformers itself."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers_training as training
from transformers import LlamaForCausalLM
from transformers_training import BLOCKS

from fabric import Fabric, consolidate
from fabric.strategies import FSDPStrategy


def test_transformers_loads_what_was_exported_from_shards(tmp_path: Path) -> None:
    ranks = Fabric(accelerator="cpu", strategy=FSDPStrategy(auto_wrap_policy=BLOCKS), devices=2, launcher="forkserver")
    trained = ranks.launch(training.train_apart, ("llama",), str(tmp_path))
    weights = {name: each.weights for name, each in trained.items()}

    whole = tmp_path / "whole"
    files = consolidate(tmp_path / "llama" / "weights", whole, max_shard_bytes=8_000)
    assert "model.safetensors.index.json" in {each.name for each in files}
    assert len(files) > 2
    model = training.make_model("llama")
    model.config.save_pretrained(whole)
    torch.testing.assert_close(LlamaForCausalLM.from_pretrained(whole).state_dict(), weights["llama"], rtol=0, atol=0)
