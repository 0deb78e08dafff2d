"""What a program has set before it launches, for ranks that start anew: torch's settings, and random generators.

A fork has all of it, and a rank that runs the script again sets it itself.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from importlib import import_module
from operator import attrgetter
from typing import Any

from fabric.launchers.process.program import NUM_THREADS

FUNCTIONS = {
    "set_num_threads": "get_num_threads",
    "set_default_dtype": "get_default_dtype",
    "set_default_device": "get_default_device",
    "set_grad_enabled": "is_grad_enabled",
    "set_deterministic_debug_mode": "get_deterministic_debug_mode",
    "set_float32_matmul_precision": "get_float32_matmul_precision",
    "manual_seed": "initial_seed",  # of the generators of all devices
    **{
        f"backends.cuda.enable_{kind}_sdp": f"backends.cuda.{kind}_sdp_enabled"
        for kind in ("flash", "mem_efficient", "math", "cudnn")
    },
}
"""Functions of torch that set something, each with the one that reads it."""
FLAGS = (
    *(f"backends.cudnn.{flag}" for flag in ("enabled", "benchmark", "deterministic", "allow_tf32")),
    *(f"backends.cuda.matmul.allow_{kind}_reduced_precision_reduction" for kind in ("fp16", "bf16")),
    *(f"backends.{place}.fp32_precision" for place in ("cuda.matmul", "cudnn.conv", "cudnn.rnn")),
    *(f"backends.mkldnn.{operation}.fp32_precision" for operation in ("matmul", "conv", "rnn")),
)
"""Attributes of torch. They are set last, because functions set some of them."""
GENERATORS = {
    "random": ("getstate", "setstate"),
    "numpy.random": ("get_state", "set_state"),
    "torch": ("get_rng_state", "set_rng_state"),
    "torch.cuda": ("get_rng_state_all", "set_rng_state_all"),
    "torch.xpu": ("get_rng_state_all", "set_rng_state_all"),
}
"""Random generators by module: how their state is read, and restored."""
OF_DEVICES = ("torch.cuda", "torch.xpu")
"""Those that reading would initialise."""


def has_own_num_threads() -> bool:
    """Whether the program has passed another number to `torch.set_num_threads` since it imported fabric."""
    return "torch" in sys.modules and NUM_THREADS not in (0, sys.modules["torch"].get_num_threads())


def read_settings() -> dict[str, Any]:
    """What is set in this process, by the function or the attribute of torch that sets it."""
    found: dict[str, Any] = {}
    for name in (*FUNCTIONS, *FLAGS) if "torch" in sys.modules else ():
        with contextlib.suppress(RuntimeError):  # torch names no matmul precision that flags have set
            found[name] = _setting(name)
    if not has_own_num_threads():
        found.pop("set_num_threads", None)
    return found


def read_generators() -> dict[str, Any]:
    """The states of this process's random generators, by module."""
    return {
        name: getattr(sys.modules[name], read)()
        for name, (read, _) in GENERATORS.items()
        if name in sys.modules and (name not in OF_DEVICES or sys.modules[name].is_initialized())
    }


def restore(settings: Mapping[str, Any], generators: Mapping[str, Any]) -> None:
    """Set in this process what was read in another one."""
    for name, value in settings.items():
        if value == _setting(name):  # set to the CPU, too, a default device costs time in each call of torch
            continue
        owner, _, attribute = name.rpartition(".")
        if name in FLAGS:
            setattr(attrgetter(owner)(sys.modules["torch"]), attribute, value)
        else:
            attrgetter(name)(sys.modules["torch"])(value)
    for name, state in generators.items():
        getattr(import_module(name), GENERATORS[name][1])(state)


def _setting(name: str) -> Any:
    value = attrgetter(FUNCTIONS.get(name, name))(import_module("torch"))
    value = value() if name in FUNCTIONS else value
    return value.type if name == "set_default_device" else value  # each rank has its own device of this kind
