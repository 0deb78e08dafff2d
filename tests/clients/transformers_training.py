"""Models of transformers with random weights, each trained for a few steps: over a fabric, or in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.data import DataLoader
from torchao.prototype._nf4tensor_api import NF4WeightOnlyConfig
from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig, PerGroup, quantize_
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    SwitchTransformersConfig,
    SwitchTransformersForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.mixtral.modeling_mixtral import MixtralDecoderLayer
from transformers.models.switch_transformers.modeling_switch_transformers import SwitchTransformersBlock
from transformers.models.t5.modeling_t5 import T5Block
from transformers.models.vit.modeling_vit import ViTLayer

from fabric import Fabric
from fabric.strategies import ManualContext, Parallelized
from fabric.strategies.tensors.wrapper_subclass import frozen_wrapped, plain_state

VOCABULARY = 50
LENGTH = 6
BATCH = 4
"""Samples of one step, over all ranks."""
STEPS = 4
BLOCKS = (GPT2Block, LlamaDecoderLayer, MixtralDecoderLayer, SwitchTransformersBlock, T5Block, ViTLayer)
DECODER = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 16}
T5 = {"vocab_size": VOCABULARY, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
START = {"dropout_rate": 0.0, "decoder_start_token_id": 0}
SPARSE = {"num_experts": 8, "encoder_sparse_step": 1, "decoder_sparse_step": 1, "router_jitter_noise": 0.0}


def gpt2() -> nn.Module:
    """The output is tied to the embedding, and blocks are computed again in backward."""
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=16, n_embd=16, n_layer=2, n_head=2, use_cache=False, **no_dropout
    )
    model = GPT2LMHeadModel(config)
    model.activation_checkpointing_enable()
    return model


def llama() -> nn.Module:
    """All its weights are trained."""
    return LlamaForCausalLM(LlamaConfig(**DECODER, **HEADS))


def llama_lora() -> nn.Module:
    """Only the adapters are trained."""
    adapters = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.0, init_lora_weights=False)
    return get_peft_model(llama(), adapters)


def llama_int8_lora() -> nn.Module:
    """Its frozen weights have 8 bits, and a scale for each row."""
    return adapted(Int8WeightOnlyConfig())


def llama_int4_lora() -> nn.Module:
    """Its frozen weights have 4 bits, and a scale for 16 numbers."""
    return adapted(IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(16)))


def llama_nf4_lora() -> nn.Module:
    """Its frozen weights are NF4, as those of QLoRA; that needs larger ones."""
    return adapted(NF4WeightOnlyConfig(), hidden_size=128)


def adapted(config: Any, **size: int) -> nn.Module:
    """A llama quantised by torchao, with adapters of peft."""
    model = LlamaForCausalLM(LlamaConfig(**{**DECODER, **size}, **HEADS))
    quantize_(model, config, filter_fn=lambda part, name: name.endswith(("q_proj", "v_proj")))
    return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False))


def vit() -> nn.Module:
    """Images and classes."""
    size = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return ViTForImageClassification(ViTConfig(image_size=8, patch_size=4, num_labels=5, **size, **no_dropout))


def t5() -> nn.Module:
    """An encoder and a decoder with one embedding, tied to the output."""
    return T5ForConditionalGeneration(T5Config(**T5, **START))


def mixtral() -> nn.Module:
    """Experts in one parameter."""
    return MixtralForCausalLM(MixtralConfig(**DECODER, **HEADS, num_local_experts=4, num_experts_per_tok=2))


def switch() -> nn.Module:
    """Experts in a module each, of which many get no token: the same ones on every rank, for samples are the same."""
    layers = {"num_sparse_encoder_layers": 2, "num_sparse_decoder_layers": 2, "num_decoder_layers": 2}
    config = SwitchTransformersConfig(**T5, **START, **SPARSE, **layers)
    return SwitchTransformersForConditionalGeneration(config)


def switch_apart() -> nn.Module:
    """The same model; other experts on each rank, for samples are others."""
    return switch()


MODELS: dict[str, Callable[[], nn.Module]] = {
    model.__name__: model
    for model in (
        *(gpt2, llama, llama_lora, llama_int8_lora, llama_int4_lora, llama_nf4_lora),
        *(vit, t5, mixtral, switch, switch_apart),
    )
}
QUANTISED = ("llama_int8_lora", "llama_int4_lora", "llama_nf4_lora")
BY_ADAMW = ("gpt2", "llama_lora", *QUANTISED)
"""Models that AdamW trains; the others, SGD with momentum."""


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What became of a model: the mean loss of each step, its weights, and those that required gradients."""

    losses: list[float]
    weights: dict[str, Tensor]
    trained: list[str] = field(default_factory=list)


def make_model(name: str) -> nn.Module:
    """The same weights in every process."""
    torch.manual_seed(1)
    return MODELS[name]().train()


def make_optimizer(name: str, model: nn.Module) -> Optimizer:
    """An `eps` near the gradients: with a small one, AdamW makes steps of 1 from differences of 1e-9."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if name in BY_ADAMW:
        return AdamW(parameters, lr=0.05, eps=1e-3)
    return SGD(parameters, lr=0.1, momentum=0.9)


def make_loader(name: str, batch_size: int) -> DataLoader[Any]:
    """`STEPS` batches of all ranks, in a fixed order."""
    generator = torch.Generator().manual_seed(2)
    count = BATCH * STEPS
    if name == "vit":
        images, classes = torch.randn(count, 3, 8, 8, generator=generator), torch.arange(count) % 5
        samples = [{"pixel_values": image, "labels": label} for image, label in zip(images, classes, strict=True)]
    else:
        tokens = torch.randint(VOCABULARY, (2, count, LENGTH), generator=generator)
        if name == "switch":
            tokens = tokens[:, ::BATCH].repeat_interleave(BATCH, dim=1)
        labels = tokens[1] if name in ("t5", "switch", "switch_apart") else tokens[0]
        samples = [{"input_ids": row, "labels": label} for row, label in zip(tokens[0], labels, strict=True)]
    return DataLoader(samples, batch_size=batch_size, shuffle=False)  # type: ignore[arg-type]


def train_plainly(name: str) -> Trained:
    """In one process of plain PyTorch."""
    model = make_model(name)
    optimizer, losses = make_optimizer(name, model), []
    for batch in make_loader(name, BATCH):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Trained(losses=losses, weights=plain_state(model), trained=trained_names(model))


def train(fabric: Fabric, name: str, folder: str, backend: str | None = None) -> Trained:
    """Over a fabric; `folder`: where all ranks save; `backend`: of torch's compiler."""
    module = make_model(name)
    model, optimizer = fabric.setup(module, make_optimizer(name, module))
    called = model if backend is None else torch.compile(model, backend=backend)
    losses = []
    for batch in fabric.setup_dataloaders(make_loader(name, BATCH // fabric.world_size)):
        loss = called(**batch).loss
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(fabric.all_reduce(loss.detach()).item())
    return Trained(losses=losses, weights=saved(fabric, folder, model), trained=trained_names(model))


def train_each(fabric: Fabric, names: Sequence[str], folder: str) -> dict[str, Trained | str]:
    """Some models, one after the other; what was raised where the strategy raised."""
    ended: dict[str, Trained | str] = {}
    for name in names:
        try:
            ended[name] = train(fabric, name, folder)
        except Exception as error:
            ended[name] = str(error)
    return ended


def train_apart(fabric: Fabric, names: Sequence[str], folder: str) -> dict[str, Trained]:
    """Some models, each saved in a folder of its own."""
    return {name: train(fabric, name, f"{folder}/{name}") for name in names}


def generate(fabric: Fabric) -> Tensor:
    """Tokens that follow others, by a method that calls forward for each: before and after it is marked."""
    model = fabric.setup_module(make_model("llama").eval())
    before = continue_prompts(model)
    model.mark_forward_method("generate")
    return torch.stack([before, continue_prompts(model)])


def continue_prompts(model: Any) -> Tensor:
    """Greedily, with and without a cache of keys and values."""
    prompts = torch.arange(6).reshape(2, 3)
    words = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(prompts)}
    with torch.no_grad():
        return torch.stack([model.generate(prompts, use_cache=cache, **words) for cache in (True, False)])


def saved(fabric: Fabric, folder: str, model: nn.Module) -> dict[str, Tensor]:
    """The weights as `save` writes them: whole and plain, whatever the strategy."""
    path = f"{folder}/weights"
    fabric.save(path, {"model": model})
    weights: dict[str, Tensor] = fabric.load(path)["model"]
    fabric.barrier()
    return weights


def trained_names(model: nn.Module) -> list[str]:
    """The parameters that require gradients."""
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def in_shards(model: nn.Module, mesh: Any) -> None:
    """Blocks in shards, and the rest with the root."""
    from torch.distributed.fsdp import fully_shard

    quantised = set(frozen_wrapped(model).values())
    for module in model.modules():
        if isinstance(module, BLOCKS):
            fully_shard(module, mesh=mesh["shard"], ignored_params=quantised)
    fully_shard(model, mesh=mesh["shard"], ignored_params=quantised)


def averaged(module: nn.Module, context: ManualContext) -> Parallelized:
    """Data parallel, by the strategy's own averaging."""
    return Parallelized(module=module, averaged=module)
