"""A small model of transformers generates in a prepared model's own context, with the tokens of one process."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from worlds import run_world

from fabric import Fabric
from fabric.launchers.world import World

CONFIG = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def make() -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**CONFIG)).eval()


def generate(model: Any, rank: int) -> list[list[int]]:
    prompt = torch.tensor([[1, 5 + rank, 9]])
    tokens: list[list[int]] = model.generate(prompt, do_sample=False, max_new_tokens=4 + 5 * rank).tolist()
    return tokens


def rollouts(world: World, strategy: str) -> None:
    alone = make()
    with Fabric(accelerator="cpu", strategy=strategy, devices=world.size) as fabric:
        fabric.launch()
        model = fabric.setup_module(make())
        for _ in range(2):
            with fabric.gathered(model, for_forward=True):
                assert generate(model, fabric.global_rank) == generate(alone, fabric.global_rank)
        found = dict(fabric.weights(model))
        assert all(torch.equal(found[name], each) for name, each in alone.state_dict().items() if name in found)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "ddp_fully_sharded", "deepspeed_stage_3"])
def test_tokens_are_those_of_one_process_with_other_lengths_on_each_rank(strategy: str) -> None:
    run_world(2, rollouts, strategy)
