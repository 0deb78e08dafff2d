"""A model that generates with its weights whole, as in one process, however many forwards each rank runs."""

from typing import Any

import pipelining
import pytest
import torch
from devices import ACCELERATOR
from sharding import Net
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim import SGD
from worlds import run_world

from fabric import Fabric
from fabric.launchers.world import World
from fabric.strategies import FSDPStrategy, ModelParallelStrategy, Strategy


def cut(model: Any, mesh: Any) -> None:
    for block in model.blocks:
        parallelize_module(block, mesh["tensor"], {"hidden": ColwiseParallel(), "out": RowwiseParallel()})
    fully_shard(model, mesh=mesh["shard"], ignored_params={block.scale for block in model.blocks})


STRATEGIES: dict[str, tuple[str | Strategy, int]] = {
    "single_device": ("single_device", 1),
    "ddp": ("ddp", 2),
    "fsdp": (FSDPStrategy(auto_wrap_policy="blocks"), 3),
    "not resharded": (FSDPStrategy(auto_wrap_policy="blocks", reshard_after_forward=None), 2),
    "recomputed": (FSDPStrategy(activation_checkpointing_policy="blocks"), 2),
    "model_parallel": (ModelParallelStrategy(parallelize_fn=cut, shard=2, tensor=2), 4),
    "ddp_fully_sharded": ("ddp_fully_sharded", 2),
    "deepspeed_stage_1": ("deepspeed_stage_1", 2),
    "deepspeed_stage_3": ("deepspeed_stage_3", 2),
}


def generate(model: Any, tokens: Tensor, num_new: int) -> Tensor:
    for _ in range(num_new):
        tokens = torch.cat([tokens, model(tokens).argmax(dim=-1, keepdim=True)], dim=-1)
    return tokens


def make() -> Net:
    torch.manual_seed(0)
    net = Net()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(3)
    return net


def step(model: Any, optimizer: Any, backward: Any) -> None:
    backward(model(torch.arange(6, device=ACCELERATOR).view(2, 3)).square().mean())
    optimizer.step()
    optimizer.zero_grad()


def rollouts(world: World, strategy: str | Strategy, precision: Any) -> None:
    alone = make().to(ACCELERATOR)
    optimizer = SGD([each for each in alone.parameters() if each.requires_grad], lr=0.1)
    with Fabric(accelerator=ACCELERATOR, strategy=strategy, devices=world.size, precision=precision) as fabric:
        fabric.launch()
        net = make()
        model, prepared = fabric.setup(net, SGD([each for each in net.parameters() if each.requires_grad], lr=0.1))
        calls: list[Any] = []
        net.blocks[0].register_forward_hook(lambda part, args, output: calls.append(output.shape))
        prompt = torch.tensor([[1, 2 + fabric.global_rank]], device=ACCELERATOR)
        for number in range(2):
            num_new = 1 + 3 * fabric.global_rank
            with fabric.gathered(model, for_forward=True):
                found = generate(model, prompt, num_new)
                assert not model(found).requires_grad
                with torch.inference_mode():
                    assert model(found).isfinite().all()
            assert len(calls) == num_new + 2, "the user's hooks run"
            calls.clear()
            if fabric.precision.name == "32-true":
                with torch.no_grad():
                    assert torch.equal(found, generate(alone, prompt, num_new)), number
            step(model, prepared, fabric.backward)
            step(alone, optimizer, Tensor.backward)
            calls.clear()
        state = fabric.state_dict(model, all_ranks=True)
        if fabric.precision.name == "32-true":
            expected = {name: each.cpu() for name, each in alone.state_dict().items()}
            torch.testing.assert_close(state, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", STRATEGIES)
def test_tokens_are_those_of_one_process_with_other_lengths_on_each_rank(name: str) -> None:
    strategy, size = STRATEGIES[name]
    run_world(size, rollouts, strategy, "32-true")


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_forwards_have_the_precision_of_the_model(strategy: str) -> None:
    run_world(2, rollouts, strategy, "bf16-mixed")


def refuse(world: World) -> tuple[str, str]:
    with Fabric(accelerator=ACCELERATOR, strategy="fsdp", devices=world.size) as fabric:
        fabric.launch()
        model = fabric.setup_module(nn.Linear(2, 2))
        for_both = fabric.gathered(model, write=True, for_forward=True)
        with pytest.raises(ValueError, match="for_forward") as both, for_both:
            pass
        with pytest.raises(RuntimeError) as written, fabric.gathered(model, for_forward=True):
            model.weight.zero_()
        return str(both.value), str(written.value)


def test_weights_are_not_written_there() -> None:
    for both, written in run_world(2, refuse):
        assert both.endswith("Write in one context, and call the model in another.")
        assert "was changed within `fabric.gathered`" in written


def generate_in_stages(world: World) -> str:
    strategy = ModelParallelStrategy(pipeline=pipelining.pipeline())
    with Fabric(accelerator=ACCELERATOR, strategy=strategy, devices=world.size) as fabric:
        fabric.launch()
        model = pipelining.Net()
        model, _ = fabric.setup(model, SGD(model.parameters(), lr=0.1))
        expected = fabric.state_dict(model, all_ranks=True)
        found = dict(fabric.weights(model, bucket_bytes=100))
        assert {name: each.tolist() for name, each in found.items()} == {
            name: each.tolist() for name, each in expected.items()
        }
        gathered = fabric.gathered(model, for_forward=True)
        with pytest.raises(ValueError, match="some of the layers") as raised, gathered:
            pass
        return str(raised.value)


def test_weights_of_a_model_in_stages_are_sent_to_another_that_generates() -> None:
    for sentence in run_world(2, generate_in_stages):
        assert "this rank has some of the layers of `Net`" in sentence
        assert "Send `fabric.weights(model)` to a model that is not split" in sentence
