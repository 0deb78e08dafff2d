"""What a program has set before it launches, for ranks that start anew: torch's settings, and random generators.

A fork has all of it, and a rank that runs the script again sets it itself.
"""

import contextlib
import linecache
import sys
import warnings
from collections.abc import Mapping
from pkgutil import resolve_name
from typing import Any

from fabric.launchers.process.program import NUM_THREADS

ATTENTION = ("flash", "mem_efficient", "math", "cudnn")
FUNCTIONS = {
    "linecache:cache.update": f"{__name__}:cells",
    "random:setstate": "random:getstate",
    "numpy.random:set_state": "numpy.random:get_state",
    "torch:set_num_threads": "torch:get_num_threads",
    "torch:set_default_dtype": "torch:get_default_dtype",
    "torch:set_default_device": "torch:get_default_device",
    "torch:set_grad_enabled": "torch:is_grad_enabled",
    "torch:set_deterministic_debug_mode": "torch:get_deterministic_debug_mode",
    "torch:set_float32_matmul_precision": "torch:get_float32_matmul_precision",
    "torch.autograd:set_detect_anomaly": "torch:is_anomaly_enabled",
    **{f"torch.backends.cuda:enable_{kind}_sdp": f"torch.backends.cuda:{kind}_sdp_enabled" for kind in ATTENTION},
    "torch:manual_seed": "torch:initial_seed",  # of all devices
    "torch:set_rng_state": "torch:get_rng_state",
    "torch.cuda:set_rng_state_all": "torch.cuda:get_rng_state_all",
    "torch.xpu:set_rng_state_all": "torch.xpu:get_rng_state_all",
}
"""Functions that set something, each with the function that reads it."""
FLAGS = (
    "torch.utils:deterministic.fill_uninitialized_memory",
    "torch.backends:mkldnn.enabled",
    *(f"torch.backends:cudnn.{flag}" for flag in ("enabled", "benchmark", "deterministic", "allow_tf32")),
    *(f"torch.backends:cuda.matmul.allow_{kind}_reduced_precision_reduction" for kind in ("fp16", "bf16")),
    *(f"torch.backends:{place}.fp32_precision" for place in ("cuda.matmul", "cudnn.conv", "cudnn.rnn")),
    *(f"torch.backends:mkldnn.{operation}.fp32_precision" for operation in ("matmul", "conv", "rnn")),
)
"""Attributes. They are set last, because the functions above change some of them."""
OF_DEVICES = ("torch.cuda", "torch.xpu")
"""Modules whose generators are initialised when they are read."""


def cells() -> dict[str, Any]:
    """The source lines of a notebook's cells, for tracebacks. A cell has no file, so no time of change."""
    return {name: entry for name, entry in linecache.cache.items() if entry[1:2] == (None,)}


def has_own_num_threads() -> bool:
    """Whether the program has passed another number to `torch.set_num_threads` since it imported fabric."""
    return "torch" in sys.modules and NUM_THREADS not in (0, sys.modules["torch"].get_num_threads())


def read_settings() -> dict[str, Any]:
    """The settings of this process, by the function or the attribute that sets each."""
    found: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch 2.9 warns where both of its names of one precision are read
        for name in (*FUNCTIONS, *FLAGS):
            module = sys.modules.get(name.partition(":")[0])
            if module is not None and (module.__name__ not in OF_DEVICES or module.is_initialized()):
                with contextlib.suppress(RuntimeError):  # torch names no matmul precision that flags have set
                    found[name] = resolve_name(name) if name in FLAGS else resolve_name(FUNCTIONS[name])()
    if not has_own_num_threads():
        found.pop("torch:set_num_threads", None)
    device = found.pop("torch:set_default_device", None)
    if device is not None and device.type != "cpu":  # set to the CPU, too, it costs time in each call of torch
        found["torch:set_default_device"] = device.type  # each rank has its own device of this kind
    return found


def restore(settings: Mapping[str, Any]) -> None:
    """Set in this process what was read in another one."""
    for name, value in settings.items():
        if name in FLAGS:
            owner, _, attribute = name.rpartition(".")
            setattr(resolve_name(owner), attribute, value)
        else:
            resolve_name(name)(value)
