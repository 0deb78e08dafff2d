"""Checks DeepSpeed's configuration and completes it from the strategy's options.

DeepSpeed itself accepts a misspelled top-level key and uses the default instead, and some defaults change results
(without `gradient_clipping`, gradients are clipped to 1.0). So a key that is not in the tables below raises, and so
does a key for something that the fabric sets. DeepSpeed is not imported here.
"""

import json
import os
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from fabric.strategies.precision.precision import Precision

KEYS = (
    "communication_data_type",
    "fp16",
    "steps_per_print",
    "train_micro_batch_size_per_gpu",
    "wall_clock_breakdown",
    "zero_optimization",
)
"""Top-level keys that are passed to DeepSpeed."""

ZERO_KEYS = (
    "allgather_bucket_size",
    "allgather_partitions",
    "contiguous_gradients",
    "offload_optimizer",
    "offload_param",
    "overlap_comm",
    "reduce_bucket_size",
    "reduce_scatter",
    "round_robin_gradients",
    "stage",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
    "stage3_param_persistence_threshold",
    "stage3_prefetch_bucket_size",
    "sub_group_size",
)
"""Keys of `zero_optimization` that are passed to DeepSpeed."""

OFFLOAD_KEYS = ("buffer_count", "buffer_size", "device", "max_in_cpu", "pin_memory", "ratio")

FABRIC_KEYS: Mapping[str, str] = {
    "amp": "Pass `Fabric(precision=...)`",
    "bf16": "Pass `Fabric(precision='bf16-true')`",
    "gradient_accumulation_steps": "Accumulate with `fabric.no_backward_sync`",
    "gradient_clipping": "Call `fabric.clip_gradients(model, optimizer, max_norm=...)` before `optimizer.step()`",
    "managed_gradient_accumulation": "Accumulate with `fabric.no_backward_sync`",
    "optimizer": "Pass an optimizer to `fabric.setup(model, optimizer)`",
    "scheduler": "Make a scheduler from the optimizer that `setup` returns, and step it in the loop",
    "torch_autocast": "Pass `Fabric(precision='bf16-mixed')`",
    "train_batch_size": "The batch size of the loader sets it",
    "zero_allow_untested_optimizer": "Any optimizer that updates each element independently is allowed",
    "zero_force_ds_cpu_optimizer": "The optimizer passed to `setup` is used, offloaded or not",
}
"""Keys that the fabric sets itself, each with what to use instead."""

PRECISIONS = ("32-true", "bf16-true", "bf16-mixed", "16-true")


def read_config(config: Mapping[str, Any] | str | os.PathLike[str] | None) -> dict[str, Any]:
    """Return a checked copy of the given dictionary, or of the dictionary in the given JSON file.

    Raises: ValueError: a key is unknown, or the fabric sets it.
    """
    if config is None:
        return {}
    if isinstance(config, (str, os.PathLike)):
        where = f"the file {os.fspath(config)!r}"
        try:
            config = json.loads(Path(config).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"`DeepSpeedStrategy(config=...)`: {where} is not a file of JSON: {error}.") from error
    else:
        where = "`DeepSpeedStrategy(config=...)`"
    if not isinstance(config, Mapping):
        raise TypeError(f"{where} is a `{type(config).__name__}`, but DeepSpeed's configuration is a dictionary.")
    _check_keys(config, KEYS, where)
    zero = _section(config, "zero_optimization", where)
    _check_keys(zero, ZERO_KEYS, f"`zero_optimization` in {where}")
    for name in ("offload_optimizer", "offload_param"):
        section = _section(zero, name, where)
        _check_keys(section, OFFLOAD_KEYS, f"`{name}` in {where}")
        if section.get("device", "none") not in ("none", "cpu"):
            raise ValueError(
                f"`{name}` in {where} has `device={section['device']!r}`, but parameters, gradients and optimizer "
                "states can only be offloaded to main memory. Write 'cpu', or leave it out."
            )
    _check_keys(_section(config, "fp16", where), _FP16_KEYS, f"`fp16` in {where}")
    return json.loads(json.dumps(config))  # type: ignore[no-any-return]  # a copy, of JSON's types


def choose_stage(stage: int | None, config: Mapping[str, Any]) -> int:
    """The ZeRO stage, from either the option or the dictionary; both raise. 2 if neither sets it."""
    configured = config.get("zero_optimization", {}).get("stage")
    if stage is not None and configured is not None:
        raise ValueError(
            f"`stage={stage}` and `config={{'zero_optimization': {{'stage': {configured}}}}}` both set the ZeRO stage. "
            "Leave one out."
        )
    chosen = 2 if stage is None and configured is None else configured if stage is None else stage
    if chosen not in (1, 2, 3):
        raise ValueError(
            f"ZeRO has the stages 1, 2 and 3, not {chosen!r}. "
            "Stage 0, the whole model on every rank, is `strategy='ddp'`."
        )
    return int(chosen)


def choose_offload(name: str, wanted: bool, option: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """The section `name` of `zero_optimization`, from either the option or the dictionary; both raise."""
    section = config.get("zero_optimization", {}).get(name)
    if wanted and section is not None:
        raise ValueError(f"`{option}=True` and `{name}` in the configuration set the same option. Leave one out.")
    if wanted:
        section = {"device": "cpu", "pin_memory": False}
    return {} if section is None else {name: section}


def engine_config(
    config: Mapping[str, Any], *, stage: int, offload: Mapping[str, Any], precision: Precision
) -> dict[str, Any]:
    """The configuration for `deepspeed.initialize`: the checked dictionary, and the keys that the fabric sets."""
    return {
        "train_micro_batch_size_per_gpu": 1,  # DeepSpeed uses it only to report samples
        "gradient_accumulation_steps": 1,
        "zero_allow_untested_optimizer": True,
        **{key: value for key, value in config.items() if key != "fp16"},
        "gradient_clipping": 0.0,  # DeepSpeed's default is 1.0
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {
            "reduce_bucket_size": 2**23,  # DeepSpeed's default is 5e8 elements of whole gradients, kept twice
            **({"stage3_param_persistence_threshold": 0} if stage == 3 else {}),  # shards small parameters, too
            **config.get("zero_optimization", {}),
            **offload,
            "stage": stage,
            "memory_efficient_linear": False,  # True replaces torch.nn.functional.linear for the whole process
        },
        **({"bf16": {"enabled": True}} if precision.name == "bf16-true" else {}),
        **({"fp16": {**config.get("fp16", {}), "enabled": True}} if precision.name == "16-true" else {}),
    }


_FP16_KEYS = (
    "consecutive_hysteresis",
    "hysteresis",
    "initial_scale_power",
    "loss_scale",
    "loss_scale_window",
    "min_loss_scale",
)


def _section(config: Mapping[str, Any], name: str, where: str) -> Mapping[str, Any]:
    section = config.get(name, {})
    if not isinstance(section, Mapping):
        raise TypeError(f"`{name}` in {where} is `{section!r}`. Write a dictionary.")
    return section


def _check_keys(section: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    known = tuple(known)
    for key in section:
        if key in FABRIC_KEYS:
            raise ValueError(f"`{key}` in {where} is set by the fabric. {FABRIC_KEYS[key]}.")
        if key not in known:
            near = "".join(f"Did you mean {match!r}? " for match in get_close_matches(str(key), known, n=1))
            raise ValueError(
                f"`{key}` in {where} is not a key that the fabric passes to DeepSpeed. {near}"
                f"Write one of {', '.join(map(repr, known))}."
            )
