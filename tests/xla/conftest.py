"""Tests over torch_xla, in the environment of `make test-xla`; anywhere else they are not collected.

PJRT is told of its devices before torch_xla is imported, for good: CPU_NUM_DEVICES says how many replicas there are.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest

if find_spec("torch_xla") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    os.environ.setdefault("PJRT_DEVICE", "CPU")
    os.environ.setdefault("CPU_NUM_DEVICES", "2")
    os.environ.setdefault("XLA_THREAD_POOL_SIZE", "16")
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # replicas are threads already
    # Compiles in a seventh of the time. The numbers are the same, but for rounding.
    os.environ.setdefault("XLA_FLAGS", "--xla_cpu_use_fusion_emitters=false --xla_backend_optimization_level=0")
    # What torch_xla would set by itself at a first launch: then no test changes the environment.
    os.environ.setdefault("PJRT_LOCAL_PROCESS_RANK", "0")
    os.environ.setdefault("PJRT_LOCAL_PROCESS_COUNT", "1")
    import torch_xla  # noqa: F401


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `tpu` run where `PJRT_DEVICE=TPU`."""
    if os.environ.get("PJRT_DEVICE") != "TPU":
        for item in items:
            if item.get_closest_marker("tpu"):  # its keywords hold the name of its case, too
                item.add_marker(pytest.mark.skip(reason="needs a TPU, and PJRT_DEVICE is not TPU"))
