"""Reinforcement learning of a small model of transformers, as people write it: the trainer generates, and its weights
go to a rollout engine. Tokens, losses and weights are those of one process of plain PyTorch."""

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.optim import SGD
from transformers import LlamaConfig, LlamaForCausalLM
from worlds import preload, run_world

from fabric import Fabric
from fabric.launchers.world import World

CONFIG = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": True,
}  # fmt: skip
LENGTH = 3
"""Tokens of a prompt."""
STRATEGIES = ["ddp", "fsdp", "ddp_fully_sharded", "deepspeed_stage_3"]


@pytest.fixture(autouse=True, scope="module")
def ranks_import_nothing() -> None:
    """Each rank would import transformers and peft, for 8 s."""
    preload("transformers.models.llama.modeling_llama", "transformers.generation", "peft")


def make() -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**CONFIG))


def generate(model: Any, rank: int) -> Tensor:
    """The answers to a group of prompts, longer on later ranks."""
    prompts = torch.tensor([[1, 5 + rank, 9], [1, 3, 7 + rank], [1, 11, 4]])
    num_new = 4 + 5 * rank
    tokens: Tensor = model.generate(prompts, do_sample=False, max_new_tokens=num_new, min_new_tokens=num_new)
    return tokens


def policy_loss(model: Any, tokens: Tensor) -> tuple[Tensor, int]:
    """The sum over the tokens of the answers, and how many there are. The reward is for even ones."""
    answers = tokens[:, LENGTH:]
    rewards = (answers % 2 == 0).float().mean(dim=1)
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    logits = model(input_ids=tokens[:, :-1]).logits[:, LENGTH - 1 :]
    losses = cross_entropy(logits.flatten(0, 1), answers.flatten(), reduction="none").view(answers.shape)
    return (losses * advantages[:, None]).sum(), answers.numel()


def rollouts(world: World, strategy: str) -> None:
    alone, engine = make(), make()
    optimizer_alone = SGD(alone.parameters(), lr=0.5)
    with Fabric(accelerator="cpu", strategy=strategy, devices=world.size) as fabric:
        fabric.launch()
        net = make()
        model, optimizer = fabric.setup(net, SGD(net.parameters(), lr=0.5))
        for _ in range(3):
            with fabric.gathered(model, for_forward=True):
                tokens = generate(model, fabric.global_rank)
            expected = [generate(alone, rank) for rank in range(world.size)]
            assert tokens.tolist() == expected[fabric.global_rank].tolist()

            loss, num_tokens = policy_loss(model, tokens)
            fabric.backward(loss, weight=num_tokens)
            optimizer.step()
            optimizer.zero_grad()

            losses, counts = zip(*(policy_loss(alone, each) for each in expected), strict=True)
            torch.testing.assert_close(loss.detach(), losses[fabric.global_rank].detach(), rtol=1e-4, atol=1e-4)
            (sum(losses) / sum(counts)).backward()
            optimizer_alone.step()
            optimizer_alone.zero_grad()

            for name, tensor in fabric.weights(model, bucket_bytes=10_000):  # other ranks have nothing to do
                if fabric.is_global_zero:
                    engine.get_parameter(name).data.copy_(tensor)
            if fabric.is_global_zero:
                torch.testing.assert_close(engine.state_dict(), alone.state_dict(), rtol=1e-4, atol=1e-5)
                assert generate(engine, 1).tolist() == generate(alone, 1).tolist()
        assert not torch.equal(alone.get_parameter("model.norm.weight"), torch.ones(32)), "nothing was trained"


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_policy_that_generates_learns_as_in_one_process_and_its_engine_has_its_weights(strategy: str) -> None:
    run_world(2, rollouts, strategy)


def adapted(**options: Any) -> Any:
    torch.manual_seed(0)
    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False, **options)
    return get_peft_model(LlamaForCausalLM(LlamaConfig(**{**CONFIG, "tie_word_embeddings": False})), config)


def merged(world: World, strategy: str) -> None:
    with Fabric(accelerator="cpu", strategy=strategy, devices=world.size) as fabric:
        fabric.launch()
        for options in ({}, {"use_dora": True, "modules_to_save": ["lm_head"]}):
            net = adapted(**options)
            expected = copy.deepcopy(net).merge_and_unload().state_dict()
            model = fabric.setup_module(net)
            before = fabric.state_dict(model, all_ranks=True)
            for bucket_bytes in (1, 2**26):
                found = dict(fabric.weights(model, bucket_bytes=bucket_bytes, merge_adapters=True))
                assert list(found) == list(expected)
                torch.testing.assert_close(found, expected, rtol=0, atol=0)
            torch.testing.assert_close(fabric.state_dict(model, all_ranks=True), before, rtol=0, atol=0)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_adapters_of_lora_and_of_dora_are_merged_as_peft_merges_them(strategy: str) -> None:
    run_world(2, merged, strategy)
