"""What `consolidate` writes of a checkpoint is read by transformers and by peft themselves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers_training as training
from peft import PeftModel, get_peft_model_state_dict
from transformers import LlamaForCausalLM
from transformers_training import BLOCKS

from fabric import Fabric, consolidate
from fabric.strategies import FSDPStrategy


# peft 0.21 asks models for a name that transformers 5.24 has renamed.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_transformers_and_peft_load_what_was_exported_from_shards(tmp_path: Path) -> None:
    ranks = Fabric(accelerator="cpu", strategy=FSDPStrategy(auto_wrap_policy=BLOCKS), devices=2, launcher="forkserver")
    trained = ranks.launch(training.train_apart, ("llama", "llama_lora"), str(tmp_path))
    weights = {name: each.weights for name, each in trained.items()}

    whole = tmp_path / "whole"
    files = consolidate(tmp_path / "llama" / "weights", whole, max_shard_bytes=8_000)
    assert "model.safetensors.index.json" in {each.name for each in files}
    assert len(files) > 2
    model = training.make_model("llama")
    model.config.save_pretrained(whole)
    torch.testing.assert_close(LlamaForCausalLM.from_pretrained(whole).state_dict(), weights["llama"], rtol=0, atol=0)

    adapted = training.make_model("llama_lora")
    folder = tmp_path / "adapter"
    files = consolidate(tmp_path / "llama_lora" / "weights", folder, adapter="default")
    assert [each.name for each in files] == ["adapter_model.safetensors", "adapter_config.json"]
    adapted.save_pretrained(tmp_path / "by peft")
    written, expected = (json.loads((at / "adapter_config.json").read_text()) for at in (folder, tmp_path / "by peft"))
    others = {"target_modules": None, "auto_mapping": None}  # a set, in any order; what only `AutoPeftModel` reads
    assert written | others == expected | others
    assert set(written["target_modules"]) == set(expected["target_modules"])
    adapted.load_state_dict(weights["llama_lora"])
    again = PeftModel.from_pretrained(training.make_model("llama"), folder)
    state = get_peft_model_state_dict(adapted)
    assert len(state) == 8
    torch.testing.assert_close(get_peft_model_state_dict(again), state, rtol=0, atol=0)
