"""The pretended CUDA runtime in this Python's programs: its libraries and kernels are there when torch is imported.

    pretended_cuda.limit_memory(1, 64 * 2**20)   # device 1 has 64 MiB
    pretended_cuda.listen(function)              # function(kind, detail), whenever the host waits for a device

A program sets nothing. `PRETENDED_DEVICES=2` gives the machine two devices instead of four, and
`PRETENDED_BYTES=1000000000` each of them so much memory instead of 4 GiB; `CUDA_VISIBLE_DEVICES` means what it means.
`PRETENDED_DEVICES=0` is a machine without a driver: torch finds no device, and its own kernels and compiler are as
they are.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

HERE = Path(__file__).parent
HAS_DRIVER = os.environ.get("PRETENDED_DEVICES") != "0"
OF_DRIVER = ("libcuda.so.1", "libnvidia-ml.so.1")
_kernels: Any = None


def limit_memory(device: int, num_bytes: int) -> None:
    """Let a device of this process have no more than so many bytes."""
    _kernels.limit_memory(device, num_bytes)


def listen(listener: Callable[[str, str], object] | None) -> None:
    """Call a function whenever the host waits for a device, in the thread that waits; None: no function."""
    _kernels.listen(listener)


class Finder(MetaPathFinder):
    """Finds torch, until it is imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        sys.meta_path.insert(0, self)  # a program may ask where torch is before it imports it
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            sys.meta_path.remove(self)
            load_libraries()
            execute(module)
            if HAS_DRIVER:
                install_kernels(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def load_libraries() -> None:
    """Before torch asks for them by name: it gets those that are loaded, whatever else the machine has."""
    others = sorted((HERE / "lib").iterdir(), key=lambda path: not path.name.startswith("libcudart"))
    for path in others:
        if path.name in OF_DRIVER and not HAS_DRIVER:
            continue
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


def install_kernels(torch: Any) -> None:
    """Let every operator of CUDA run on the CPU, on one thread, and compile without Triton."""
    global _kernels
    spec = importlib.util.spec_from_file_location("pretended_cuda.kernels", HERE / "kernels.so")
    assert spec is not None
    assert spec.loader is not None
    _kernels = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(_kernels)
    _kernels.install()
    importlib.import_module("pretended_cuda.cuda_only").implement()
    atexit.register(_kernels.listen, None)
    # Layers compose other operators where these are not to be had.
    torch.backends.cudnn.enabled = False
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch._TorchCompileInductorWrapper.__call__ = compile_eagerly
    torch._TorchCompileInductorWrapper.get_compiler_config = lambda _: {}


def compile_eagerly(_: Any, model: Any, inputs: Any) -> Any:
    """In place of inductor, which writes kernels for Triton: traced and differentiated as by it, then run as it is."""
    return importlib.import_module("torch._dynamo.backends.debugging").aot_eager(model, inputs)


if "torch" not in sys.modules:
    sys.meta_path.insert(0, Finder())
