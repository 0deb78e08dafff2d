"""What ranks of tests import, imported once: by the fork server, which computes nothing, and of which ranks are forks.

`torch.compile` looks through all of its backends when it is first called, a second of imports in each rank. Libraries
whose strategies import them in a way of their own are left to the ranks: DeepSpeed, FairScale.
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
