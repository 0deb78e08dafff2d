"""Imports what ranks of tests need once, in the fork server, of which ranks are forked. It computes nothing.

`torch.compile` looks through all of its backends when it is first called, a second of imports in each rank. DeepSpeed
and FairScale, where they are installed, are imported as their strategies import them, which saves 0.7 s in each rank.
What fabric imports when it is first used, for a checkpoint, a loader or a report, takes up to 35 ms.
"""

from __future__ import annotations

import gc
from importlib.util import find_spec

import kernels
import pytest  # which the modules of tests import
import torch._dynamo.backends.registry
import torch.utils.data
import torch.utils.serialization.config
from devices import ACCELERATOR

import fabric.checkpoints.checkpoints
import fabric.launchers.choose
import fabric.launchers.watch.watcher
import fabric.loop.gather_for_metrics
import fabric.strategies.data.loaders
import fabric.strategies.ddp.strategy
import fabric.strategies.fsdp.strategy
import fabric.strategies.manual.strategy
import fabric.strategies.model_parallel.strategy
import fabric.testing
from fabric.launchers.world import World

gc.set_threshold(10_000)  # ranks live for a second: every 700 objects, a twentieth of it is spent in collecting
torch._dynamo.backends.registry.list_backends()
kernels.use_chosen()

if find_spec("deepspeed"):
    import fabric.strategies.deepspeed.strategy
    from fabric.strategies.deepspeed import library as deepspeed

    with deepspeed.with_environment(World(), ACCELERATOR):
        deepspeed.look_up(deepspeed.NAMES)
        deepspeed.look_up(deepspeed.STAGE_3)
    if ACCELERATOR != "cpu":
        import torch._inductor.lowering  # which DeepSpeed's engine imports there: 0.7 s in each rank
if find_spec("fairscale"):
    import fabric.strategies.fairscale.fsdp
    import fabric.strategies.fairscale.sharded_ddp
    from fabric.strategies.fairscale import library as fairscale

    with fairscale.root_logger_untouched():
        fairscale.look_up(fairscale.FULLY_SHARDED)
        fairscale.look_up(fairscale.SHARDED)

__all__ = ["fabric", "pytest", "torch"]
