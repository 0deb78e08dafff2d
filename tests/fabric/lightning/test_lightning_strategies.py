"""Arguments of Lightning Fabric's strategies: what each becomes, and what each that has no counterpart says."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

import pytest
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

from fabric.lightning import Fabric
from fabric.lightning.plugins import BitsandbytesPrecision, CheckpointIO, TransformerEnginePrecision
from fabric.lightning.plugins.environments import LightningEnvironment, SLURMEnvironment
from fabric.lightning.strategies import (
    DataParallelStrategy,
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    Strategy,
    XLAFSDPStrategy,
    XLAStrategy,
    strategy_of,
)
from fabric.lightning.unsupported import UnsupportedError
from fabric.strategies import ModelParallelStrategy as CoreModelParallel
from fabric.strategies import available_strategies
from fabric.strategies.strategy_registry import make_strategy


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        (
            DDPStrategy(
                process_group_backend="gloo",
                timeout=timedelta(minutes=2),
                start_method="spawn",
                bucket_cap_mb=0.5,
                find_unused_parameters=True,
            ),
            {
                "backend": "gloo",
                "timeout_seconds": 120.0,
                "launcher": "spawn",
                "bucket_bytes": 2**19,
                "find_unused_parameters": True,
            },
        ),
        (DDPStrategy(), {"launcher": "auto", "backend": None, "timeout_seconds": 1800.0}),
        (
            FSDPStrategy(
                auto_wrap_policy={nn.Linear},
                activation_checkpointing_policy={nn.Linear},
                state_dict_type="full",
                limit_all_gathers=True,
                cpu_offload=False,
                use_orig_params=True,
                backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
            ),
            {
                "auto_wrap_policy": {nn.Linear},
                "activation_checkpointing_policy": {nn.Linear},
                "reshard_after_forward": True,
                "cpu_offload": False,
            },
        ),
        (FSDPStrategy(sharding_strategy="SHARD_GRAD_OP"), {"reshard_after_forward": False, "device_mesh": None}),
        (FSDPStrategy(sharding_strategy=ShardingStrategy.HYBRID_SHARD), {"device_mesh": "nodes"}),
        (FSDPStrategy(sharding_strategy="HYBRID_SHARD", device_mesh=(2, 4)), {"device_mesh": (2, 4)}),
        (FSDPStrategy(auto_wrap_policy=size_based_auto_wrap_policy), {"auto_wrap_policy": size_based_auto_wrap_policy}),
        (
            FSDPStrategy(activation_checkpointing=[nn.Linear]),
            {"activation_checkpointing_policy": [nn.Linear]},
        ),
        (ModelParallelStrategy(print, 2, 3), {"shard": 2, "tensor": 3, "data": 1}),
        (ModelParallelStrategy(print), {"shard": 5, "tensor": "auto"}),
        (ModelParallelStrategy(print, tensor_parallel_size=2), {"shard": "auto", "tensor": 2}),
        (
            DeepSpeedStrategy(stage=3, loss_scale=128.0, reduce_bucket_size=1000, config={"steps_per_print": 5}),
            {
                "stage": 3,
                "config": {
                    "steps_per_print": 5,
                    "zero_optimization": {"reduce_bucket_size": 1000},
                    "fp16": {"loss_scale": 128.0},
                },
            },
        ),
    ],
)
def test_arguments_become_the_options_of_the_core(strategy: Strategy, options: dict[str, Any]) -> None:
    core = strategy.core(num_nodes=5)
    assert {name: getattr(core, name) for name in options} == options


REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (DDPStrategy, {"precision": 16}, r"`DDPStrategy\(precision=16\)` .* Pass it to `Fabric\(precision=\.\.\.\)`"),
    (DDPStrategy, {"parallel_devices": [0]}, "Pass the indices of the devices"),
    (DDPStrategy, {"checkpoint_io": 1}, "one file, atomically"),
    (DataParallelStrategy, {"accelerator": "cuda"}, r"Pass it to `Fabric\(accelerator=\.\.\.\)`"),
    (SingleDeviceStrategy, {"device": "cuda:1"}, r"`Fabric\(accelerator='cuda', devices=\[1\]\)`"),
    (FSDPStrategy, {"sharding_strategy": "NO_SHARD"}, "Write `strategy='ddp'`"),
    (FSDPStrategy, {"limit_all_gathers": False}, "FSDP2 needs no limit"),
    (FSDPStrategy, {"sync_module_states": False}, "Weights are always broadcast from rank 0"),
    (FSDPStrategy, {"backward_prefetch": BackwardPrefetch.BACKWARD_POST}, "gathers before the backward"),
    (FSDPStrategy, {"mixed_precision": MixedPrecision()}, r"`Fabric\(precision='bf16-mixed'\)`"),
    (FSDPStrategy, {"device_mesh": object(), "sharding_strategy": "HYBRID_SHARD"}, r"\(replicas, shards\)"),
    (DeepSpeedStrategy, {"remote_device": "cpu"}, r"construct the model within `fabric\.init_module"),
    (DeepSpeedStrategy, {"zero_optimization": False}, "Write `strategy='ddp'`"),
    (DeepSpeedStrategy, {"offload_params_device": "nvme"}, "Write 'cpu', main memory"),
    (DeepSpeedStrategy, {"pin_memory": True}, "Write it into DeepSpeed's dictionary"),
    (XLAStrategy, {"sync_module_states": False}, "weights are always broadcast from rank 0"),
    (XLAFSDPStrategy, {"auto_wrap_policy": {nn.Linear}}, "the compiler places the shards"),
    (BitsandbytesPrecision, {"mode": "nf4"}, r"`bitsandbytes\.nn\.Linear4bit`"),
    (TransformerEnginePrecision, {}, "Write `precision='bf16-mixed'`"),
    (LightningEnvironment, {}, "Leave it out: without an external launcher"),
]


@pytest.mark.parametrize(("kind", "arguments", "words"), REFUSED)
def test_unsupported_arguments_raise_with_what_to_write(kind: Any, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedError, match=words) as caught:
        kind(**arguments)
    assert "of Lightning Fabric is not supported." in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "arguments", "error", "words"),
    [
        (DDPStrategy, {"start_method": "mpi"}, ValueError, "write one of 'popen', 'spawn', 'fork', 'forkserver'"),
        (DDPStrategy, {"timeout": 30}, TypeError, r"is a `int`\. Write a `datetime\.timedelta`"),
        (DDPStrategy, {"bucket_cap": 30}, TypeError, r"`DDPStrategy\(bucket_cap=\.\.\.\)`: there is no such option"),
        (FSDPStrategy, {"sharding_strategy": "SOME"}, ValueError, "write one of 'FULL_SHARD'"),
        (FSDPStrategy, {"device_mesh": (1, 2)}, ValueError, r"Write `sharding_strategy='HYBRID_SHARD'`"),
        (FSDPStrategy, {"state_dict_type": "half"}, ValueError, "write 'full', or 'sharded'"),
        (DeepSpeedStrategy, {"buckets": 1}, TypeError, r"there is no such option here\. Write it into DeepSpeed's"),
        (
            DeepSpeedStrategy,
            {"loss_scale": 1.0, "config": {"fp16": {"loss_scale": 2.0}}},
            ValueError,
            r"`DeepSpeedStrategy\(loss_scale=1\.0\)`, but `config\['fp16'\]\['loss_scale'\]` is 2\.0\. Leave one",
        ),
    ],
)
def test_a_wrong_value_raises_in_the_constructor(
    kind: Any, arguments: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        kind(**arguments)


def test_every_name_of_a_strategy_has_a_class_for_isinstance() -> None:
    kinds = {word: type(strategy_of(make_strategy(word))) for word in available_strategies()}
    assert (kinds["ddp"], kinds["hsdp"], kinds["deepspeed_stage_3"]) == (DDPStrategy, FSDPStrategy, DeepSpeedStrategy)
    assert kinds["manual"] is Strategy


def test_the_strategy_of_a_fabric_may_be_passed_to_another() -> None:
    for strategy in ("ddp_find_unused_parameters_false", ModelParallelStrategy(print, 1, 1), FSDPStrategy()):
        first = Fabric("cpu", strategy, 1)
        second = Fabric("cpu", first.strategy, 1)
        assert second.core.strategy == first.core.strategy
        assert type(second.strategy) is type(first.strategy)
    held = strategy_of(CoreModelParallel(parallelize_fn=print, data="auto"))
    with Fabric("cpu", held, 1) as fabric:
        mesh = fabric.strategy.device_mesh
        assert mesh is not None
        assert mesh.mesh_dim_names == ("pipeline", "data", "shard", "context", "tensor")


def test_checkpoint_plugins_raise_and_environment_plugins_detect_their_environment() -> None:
    class Mine(CheckpointIO):
        """Writes in a way of its own."""

    with pytest.raises(UnsupportedError, match=r"`plugin\.save_checkpoint\(\.\.\.\)`"):
        Fabric("cpu", plugins=[Mine()])
    with pytest.raises(ValueError, match=re.escape("`plugins` holds the cluster environment 'slurm'")):
        Fabric("cpu", plugins=SLURMEnvironment())
