"""Imports what ranks of tests need once, in the fork server, of which ranks are forks. It computes nothing.

`torch.compile` looks through all of its backends when it is first called, a second of imports in each rank. DeepSpeed
and FairScale are imported by the ranks, since their strategies control how.
"""

from __future__ import annotations

import torch._dynamo.backends.registry
import torch.utils.data
import torch.utils.serialization.config

import fabric.strategies.ddp.strategy
import fabric.strategies.fsdp.strategy
import fabric.strategies.manual.strategy
import fabric.strategies.model_parallel.strategy
import fabric.testing

torch._dynamo.backends.registry.list_backends()

__all__ = ["fabric", "torch"]
