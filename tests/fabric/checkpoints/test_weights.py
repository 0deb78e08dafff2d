"""`fabric.weights`: the tensors of `fabric.state_dict`, a bucket at a time, under every strategy."""

import ctypes
import functools
import gc
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import bitsandbytes
import pipelining
import pytest
import torch
from devices import ACCELERATOR, only_on_cpu
from quantised import make_net, quantise, values_of
from sharding import Net
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim import SGD
from worlds import preload, run_each, run_world

from fabric import Fabric
from fabric.launchers.world import World
from fabric.strategies import FSDPStrategy, ManualContext, ManualStrategy, ModelParallelStrategy, Parallelized, Strategy


@pytest.fixture(autouse=True, scope="module")
def ranks_import_nothing() -> None:
    """Each rank would import bitsandbytes, for a second."""
    preload("bitsandbytes")


def cut(model: Any, mesh: Any) -> None:
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh["shard"])


def cut_by_hand(model: Any, context: ManualContext) -> Parallelized:
    for part in (*model.blocks, model.to(context.device)):
        fully_shard(part, mesh=context.mesh)
    return Parallelized(module=model)


STRATEGIES: dict[str, tuple[str | Strategy, int]] = {
    "single_device": ("single_device", 1),
    "ddp": ("ddp", 2),
    "fsdp": (FSDPStrategy(auto_wrap_policy="blocks"), 3),
    "hsdp": (FSDPStrategy(device_mesh=(2, 2)), 4),
    "model_parallel": (ModelParallelStrategy(parallelize_fn=cut, shard=2), 2),
    "manual": (ManualStrategy(parallelize=cut_by_hand), 2),
    "ddp_sharded": ("ddp_sharded", 2),
    "ddp_fully_sharded": ("ddp_fully_sharded", 2),
    "deepspeed_stage_1": ("deepspeed_stage_1", 2),
    "deepspeed_stage_2": ("deepspeed_stage_2", 3),
    "deepspeed_stage_3": ("deepspeed_stage_3", 3),
}


def trained(fabric: Fabric) -> nn.Module:
    torch.manual_seed(0)
    net = Net()
    model, optimizer = fabric.setup(net, SGD([p for p in net.parameters() if p.requires_grad], lr=0.1))
    tokens = fabric.to_device(torch.arange(6).view(2, 3) + fabric.global_rank)
    fabric.backward(model(tokens).square().mean())
    optimizer.step()
    if fabric.global_rank > 0:
        model.offset += 1  # a state has the buffers of rank 0
    return model


def read(world: World, strategy: str | Strategy) -> None:
    with Fabric(accelerator=ACCELERATOR, strategy=strategy, devices=world.size) as fabric:
        fabric.launch()
        model = trained(fabric)
        expected = fabric.state_dict(model, all_ranks=True)
        assert expected.pop("out.weight").equal(expected["embed.weight"])
        for bucket_bytes in (1, 500, 2**26):
            found = dict(fabric.weights(model, bucket_bytes=bucket_bytes))
            assert list(found) == list(expected)
            for name, tensor in found.items():
                assert type(tensor) is Tensor
                assert tensor.device.type == fabric.device.type
                assert torch.equal(tensor.cpu(), expected[name]), name
        half = dict(fabric.weights(model, torch.bfloat16, prefix="net."))
        assert list(half) == [f"net.{name}" for name in expected]
        assert all(torch.equal(half[f"net.{name}"].cpu(), each.bfloat16()) for name, each in expected.items())
        before = {name: each.clone() for name, each in found.items()}
        with torch.no_grad(), fabric.gathered(model, write=True):
            model.embed.weight.mul_(2)
        assert all(torch.equal(found[name], before[name]) for name in found), "the tensors are the model's"
        within = dict(fabric.weights(model.blocks[1]))
        assert list(within) == list(fabric.state_dict(model.blocks[1], all_ranks=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", STRATEGIES)
def test_names_and_values_are_those_of_state_dict_with_tied_weights_once(name: str) -> None:
    strategy, size = STRATEGIES[name]
    run_world(size, read, strategy)


def leave(world: World, strategy: str | Strategy) -> list[list[str]]:
    with Fabric(accelerator=ACCELERATOR, strategy=strategy, devices=world.size) as fabric:
        fabric.launch()
        model = trained(fabric)
        read = []
        for stops in ([2, 99, 99], [99, 1, 2], [1, 1, 1]):
            names = []
            for name, _ in fabric.weights(model, bucket_bytes=1):
                names.append(name)
                if len(names) == stops[fabric.global_rank]:
                    break
            read.append(names)
            fabric.barrier()
        with suppress(KeyError):
            for name, _ in fabric.weights(model, bucket_bytes=1):
                if fabric.is_global_zero:
                    raise KeyError(name)
        fabric.barrier()
        of_rank_zero = fabric.weights(model, bucket_bytes=1)
        read.append([name for name, _ in of_rank_zero] if fabric.is_global_zero else [])
        del of_rank_zero
        for _ in fabric.weights(model, bucket_bytes=1):
            pass
        fabric.barrier()
        return read


SEVERAL = ("fsdp", "ddp", "ddp_fully_sharded", "deepspeed_stage_3")


@functools.cache
def left_early() -> list[list[list[list[str]]]]:
    return run_each(3, leave, [(strategy,) for strategy in SEVERAL])


@pytest.mark.parametrize("strategy", SEVERAL)
def test_a_rank_that_leaves_its_loop_early_hangs_no_other_and_nothing_is_gathered_once_all_have_left(
    strategy: str,
) -> None:
    for rank, (first, second, third, fourth) in enumerate(left_early()[SEVERAL.index(strategy)]):
        every = len(Net().state_dict()) - 1  # a tied weight comes once
        assert [len(first), len(second), len(third)] == [[2, every, every][rank], [every, 1, 2][rank], 1]
        assert len(fourth) == (every if rank == 0 else 0), "a rank that reads nothing takes part as well"


def leave_in_stages(world: World) -> int:
    strategy = ModelParallelStrategy(pipeline=pipelining.pipeline())
    with Fabric(accelerator=ACCELERATOR, strategy=strategy, devices=world.size) as fabric:
        fabric.launch()
        model = pipelining.Net()
        model, _ = fabric.setup(model, SGD(model.parameters(), lr=0.1))
        read = 0
        for _ in fabric.weights(model, bucket_bytes=1):
            read += 1
            if fabric.is_global_zero:
                break
        fabric.barrier()
        return read


def test_a_stage_that_leaves_its_loop_early_sends_what_others_read() -> None:
    assert run_world(2, leave_in_stages) == [1, len(pipelining.Net().state_dict())]


def wait(world: World) -> float:
    with Fabric(accelerator=ACCELERATOR, strategy="fsdp", devices=world.size, timeout_seconds=30) as fabric:
        fabric.launch()
        model = trained(fabric)
        start = time.monotonic()
        for name, _ in fabric.weights(model, bucket_bytes=1):
            if fabric.is_global_zero and name == "embed.weight":
                time.sleep(5)
        return time.monotonic() - start


@pytest.mark.slow
def test_a_rank_zero_that_is_busy_for_five_seconds_delays_the_others() -> None:
    assert all(4.5 < seconds < 9 for seconds in run_world(2, wait))


def halves(model: Any, mesh: Any) -> None:
    style = {str(number): (RowwiseParallel if number % 2 else ColwiseParallel)() for number in range(len(model))}
    parallelize_module(model, mesh["tensor"], style)
    fully_shard(model, mesh=mesh["shard"])


def read_wide(world: World, strategy: str | Strategy, dtype: torch.dtype) -> None:
    """Tensors that are cut for several messages, in shards of rows, of columns and of ranges; `dtype`: of the last."""
    with Fabric(accelerator=ACCELERATOR, strategy=strategy, devices=world.size) as fabric:
        fabric.launch()
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(301, 404), nn.Linear(404, 302), nn.Linear(302, 300, dtype=dtype))
        model = fabric.setup_module(net)
        expected = fabric.state_dict(model, all_ranks=True)
        for bucket_bytes in (1, 10**6, 10**8):
            found = {name: each.cpu() for name, each in fabric.weights(model, bucket_bytes=bucket_bytes)}
            torch.testing.assert_close(found, expected, rtol=0, atol=0)
        half = {name: each.cpu() for name, each in fabric.weights(model, torch.bfloat16)}
        torch.testing.assert_close(half, {name: each.bfloat16() for name, each in expected.items()}, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("strategy", "size", "dtype"),
    [
        (ModelParallelStrategy(parallelize_fn=halves, shard=2, tensor=2), 4, torch.float64),
        ("fsdp", 3, torch.float64),
        ("ddp_fully_sharded", 2, torch.float32),
    ],
)
def test_a_tensor_that_is_cut_into_messages_is_whole(strategy: str | Strategy, size: int, dtype: torch.dtype) -> None:
    run_world(size, read_wide, strategy, dtype)


def peak(world: World, strategy: str) -> float:
    """How many buckets of 16 MB are in memory at most beside the model, which has 128 MB."""
    ctypes.CDLL(None).mallopt(-3, 2**20)  # M_MMAP_THRESHOLD: what is freed goes back, whatever was freed before
    with Fabric(accelerator="cpu", strategy=strategy, devices=world.size) as fabric:
        fabric.launch()
        model = fabric.setup_module(nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(32))))
        read_all(fabric, model[0])  # what is imported
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")
        before = resident("VmRSS")
        read_all(fabric, model)
        return (resident("VmHWM") - before) / 2**14


def read_all(fabric: Fabric, model: nn.Module) -> None:
    for _, _tensor in fabric.weights(model, bucket_bytes=2**24):
        pass


def resident(name: str) -> int:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:")]
    return int(line.split()[1])


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp", "ddp", "deepspeed_stage_3"])
def test_a_rank_has_less_than_two_buckets_beside_its_shard(strategy: str, record_property: Any) -> None:
    """Resident memory, of which gloo takes a part; `tests/device/test_weights.py` counts each byte on a device."""
    peaks = run_world(2, peak, strategy)
    record_property("buckets", peaks)
    assert max(peaks) < 2, peaks


def read_quantised(world: World, strategy: str) -> None:
    torch.serialization.add_safe_globals([type(make_net()[0].base.weight.detach())])
    with Fabric(accelerator=ACCELERATOR, strategy=strategy, devices=world.size) as fabric:
        fabric.launch()
        net = make_net()
        expected = values_of(net[0].base.weight).clone()
        model = fabric.setup_module(net)
        assert list(dict(fabric.weights(model))) == list(fabric.state_dict(model, all_ranks=True))
        plain = dict(fabric.weights(model, dequantize=True))
        assert "0.base.weight.codes" not in plain
        assert torch.equal(plain["0.base.weight"].cpu(), expected.cpu())
        adapted = Lora(8)
        weight = quantise(adapted.base_layer.weight.detach(), twice=False)
        adapted.base_layer.weight = nn.Parameter(weight, requires_grad=False)
        expected = values_of(weight) + adapted.lora_B["first"].weight @ adapted.lora_A["first"].weight
        merged = dict(fabric.weights(fabric.setup_module(nn.Sequential(adapted)), merge_adapters=True))
        assert list(merged) == ["0.weight", "0.bias"]
        assert torch.equal(merged["0.weight"].cpu(), expected)


def test_quantised_weights_are_dequantised_on_request_and_to_merge_adapters() -> None:
    run_each(2, read_quantised, [("ddp",), ("fsdp",)])


class InFourBits(nn.Module):
    """A frozen layer that bitsandbytes has quantised, and one that is trained."""

    def __init__(self, storage: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(32, 64)
        self.base = bitsandbytes.nn.Linear4bit(64, 32, compute_dtype=torch.float32, quant_storage=storage)
        self.base.requires_grad_(False)
        self.to("cpu")


def read_four_bits(world: World, strategy: str, storage: torch.dtype) -> None:
    with Fabric(accelerator="cpu", strategy=strategy, devices=world.size) as fabric:
        fabric.launch()
        net = InFourBits(storage)
        packed, state = net.base.weight.data.clone(), net.base.weight.quant_state
        expected = bitsandbytes.functional.dequantize_4bit(packed, state)
        model = fabric.setup_module(net)
        stored = dict(fabric.weights(model, torch.float64))
        assert list(stored) == list(fabric.state_dict(model, all_ranks=True))
        assert torch.equal(stored["base.weight"].view(torch.uint8), packed.view(torch.uint8)), "stored bits were cast"
        plain = dict(fabric.weights(model, torch.float64, bucket_bytes=1000, dequantize=True))
        assert list(plain) == ["first.weight", "first.bias", "base.weight", "base.bias"]
        assert torch.equal(plain["base.weight"], expected.double())
        with pytest.raises(ValueError, match=r"bitsandbytes has quantised `base.weight`, .* the adapter by itself"):
            fabric.weights(model, merge_adapters=True)


@only_on_cpu("what is quantised on a device is there already")
def test_weights_of_bitsandbytes_in_four_bits_are_dequantised_on_request() -> None:
    calls = [("ddp", torch.uint8), ("fsdp", torch.uint8), ("fsdp", torch.float32), ("deepspeed_stage_3", torch.uint8)]
    run_each(2, read_four_bits, calls)


@only_on_cpu("what is quantised on a device is there already")
def test_weights_of_bitsandbytes_in_eight_bits_are_refused() -> None:
    with Fabric(accelerator="cpu", devices=1) as fabric:
        net = nn.Sequential(bitsandbytes.nn.Linear8bitLt(8, 8, has_fp16_weights=False)).to("cpu")
        model = fabric.setup_module(net.requires_grad_(False))
        with pytest.raises(ValueError, match="`0` is a `Linear8bitLt` of bitsandbytes; only 4 bits"):
            fabric.weights(model, dequantize=True)


class Lora(nn.Module):
    """A layer with an adapter of low rank, with what peft's layers have."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.base_layer = nn.Linear(size, size)
        self.lora_A = nn.ModuleDict({"first": nn.Linear(size, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"first": nn.Linear(2, size, bias=False)})
        self.active_adapters, self.merged_adapters = ["first"], list[str]()

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora_B["first"](self.lora_A["first"](x))

    def merge(self, adapter_names: list[str]) -> None:
        for name in adapter_names:
            self.base_layer.weight.data += self.lora_B[name].weight @ self.lora_A[name].weight
            self.merged_adapters.append(name)


def read_merged(world: World, strategy: str) -> None:
    with Fabric(accelerator=ACCELERATOR, strategy=strategy, devices=world.size) as fabric:
        fabric.launch()
        torch.manual_seed(0)
        net = nn.Sequential(Lora(6), nn.Linear(6, 5))
        plain = {name: each.clone() for name, each in net.state_dict().items()}
        merged = plain["0.base_layer.weight"] + plain["0.lora_B.first.weight"] @ plain["0.lora_A.first.weight"]
        model = fabric.setup_module(net)
        for bucket_bytes in (1, 2**20):
            found = dict(fabric.weights(model, bucket_bytes=bucket_bytes, merge_adapters=True))
            assert list(found) == ["0.weight", "0.bias", "1.weight", "1.bias"]
            assert torch.equal(found["0.weight"].cpu(), merged)
            assert torch.equal(found["1.weight"].cpu(), plain["1.weight"])
        assert net[0].merged_adapters == []
        assert torch.equal(
            fabric.state_dict(model, all_ranks=True)["0.base_layer.weight"], plain["0.base_layer.weight"]
        )
        half = dict(fabric.weights(model, torch.bfloat16, merge_adapters=True))
        assert torch.equal(half["0.weight"].cpu(), merged.bfloat16())


def test_adapters_are_merged_into_the_weights_and_the_model_stays_as_it_is() -> None:
    run_each(2, read_merged, [(strategy,) for strategy in SEVERAL])


def test_a_model_without_adapters_has_none_to_merge() -> None:
    with Fabric(accelerator=ACCELERATOR, devices=1) as fabric:
        model = fabric.setup_module(nn.Linear(2, 2))
        with pytest.raises(ValueError, match=r"`Linear` has no layer with adapters, .* Leave `merge_adapters` out"):
            fabric.weights(model, merge_adapters=True)
