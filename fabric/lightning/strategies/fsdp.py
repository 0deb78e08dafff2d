"""`FSDPStrategy`: the arguments of torch's FSDP1, implemented by FSDP2."""

from datetime import timedelta
from typing import Any

from fabric import strategies as core_strategies
from fabric.lightning.strategies.strategy import ParallelStrategy, process_options, refuse_unknown
from fabric.lightning.unsupported import unsupported


class FSDPStrategy(ParallelStrategy):
    """Every rank holds a shard of parameters, gradients and optimizer state.

    `sharding_strategy`: FULL_SHARD, SHARD_GRAD_OP, HYBRID_SHARD and _HYBRID_SHARD_ZERO2 (a replica on each node, or
    `device_mesh=(replicas, shards)`), as strings or torch's enum. `state_dict_type`: "full", or "sharded", by which
    `fabric.save` writes a folder with the shards of each rank.
    Raises: UnsupportedError: an option or a value without a counterpart in FSDP2.
    """

    def __init__(
        self,
        accelerator: Any = None,
        parallel_devices: Any = None,
        cluster_environment: Any = None,
        precision: Any = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = None,
        cpu_offload: Any = None,
        mixed_precision: Any = None,
        auto_wrap_policy: Any = None,
        activation_checkpointing: Any = None,
        activation_checkpointing_policy: Any = None,
        sharding_strategy: Any = "FULL_SHARD",
        state_dict_type: str | None = None,
        device_mesh: Any = None,
        **kwargs: Any,
    ) -> None:
        options = process_options("FSDPStrategy", locals())
        if mixed_precision is not None:
            raise unsupported(
                "FSDPStrategy(mixed_precision=...)", "Write `Fabric(precision='bf16-mixed')`, or 'bf16-true'."
            )
        if activation_checkpointing is not None and activation_checkpointing_policy is not None:
            raise ValueError(
                "`activation_checkpointing` and `activation_checkpointing_policy` set the same option. Leave the first "
                "out."
            )
        if state_dict_type not in (None, "full", "sharded"):
            raise ValueError(f"`FSDPStrategy(state_dict_type={state_dict_type!r})`: write 'full', or 'sharded'.")
        self.saves_shards = state_dict_type == "sharded"
        _check_options(kwargs)
        self._core = core_strategies.FSDPStrategy(
            **options,
            **_sharding(sharding_strategy, device_mesh),
            auto_wrap_policy=auto_wrap_policy,
            activation_checkpointing_policy=(
                activation_checkpointing_policy if activation_checkpointing is None else activation_checkpointing
            ),
            cpu_offload=_offload(cpu_offload),
        )


_SHARDING: dict[str, dict[str, Any]] = {
    "FULL_SHARD": {},
    "SHARD_GRAD_OP": {"reshard_after_forward": False},
    "HYBRID_SHARD": {"device_mesh": "nodes"},
    "_HYBRID_SHARD_ZERO2": {"device_mesh": "nodes", "reshard_after_forward": False},
}
_FIXED: dict[str, tuple[Any, str]] = {
    "limit_all_gathers": (
        True,
        "FSDP2 needs no limit: it frees gathered parameters before it gathers the next. Leave it out.",
    ),
    "use_orig_params": (True, "FSDP2 keeps the user's parameters. Leave it out."),
    "sync_module_states": (True, "Weights are always broadcast from rank 0. Leave it out."),
    "forward_prefetch": (False, "Leave it out: FSDP2 gathers the next parameters while the current ones are used."),
}
"""Options with only one supported value, each with the error for others."""


def _sharding(word: Any, mesh: Any) -> dict[str, Any]:
    name = word.upper() if isinstance(word, str) else word.name
    if name == "NO_SHARD":
        raise unsupported("FSDPStrategy(sharding_strategy='NO_SHARD')", "Write `strategy='ddp'`, which is the same.")
    if name not in _SHARDING:
        raise ValueError(f"`FSDPStrategy(sharding_strategy={word!r})`: write one of {', '.join(map(repr, _SHARDING))}.")
    options = dict(_SHARDING[name])
    if mesh is None:
        return options
    if not isinstance(mesh, tuple):
        raise unsupported(
            "FSDPStrategy(device_mesh=DeviceMesh(...))",
            "Write the sizes, `device_mesh=(replicas, shards)`: the mesh is created after launch.",
        )
    if "device_mesh" not in options:
        raise ValueError(
            f"`FSDPStrategy(sharding_strategy={word!r}, device_mesh={mesh})`: only a hybrid strategy has replicas and "
            "shards. Write `sharding_strategy='HYBRID_SHARD'`, or leave `device_mesh` out."
        )
    return {**options, "device_mesh": mesh}


def _check_options(options: dict[str, Any]) -> None:
    refuse_unknown("FSDPStrategy", options, {*_FIXED, "backward_prefetch"})
    for name, value in options.items():
        if name == "backward_prefetch":
            if value is not None and value.name != "BACKWARD_PRE":
                raise unsupported(
                    f"FSDPStrategy(backward_prefetch={value})", "Leave it out: FSDP2 gathers before the backward."
                )
        elif bool(value) is not _FIXED[name][0]:
            raise unsupported(f"FSDPStrategy({name}={value!r})", _FIXED[name][1])


def _offload(value: Any) -> bool:
    return bool(value) if value is None or isinstance(value, bool) else bool(value.offload_params)
