"""`DeepSpeedStrategy`: arguments that make up DeepSpeed's config, whose keys the core checks."""

from datetime import timedelta
from typing import Any

from fabric import strategies as core_strategies
from fabric.lightning.strategies.strategy import ParallelStrategy, process_options
from fabric.lightning.unsupported import refuse_arguments, unsupported
from fabric.strategies.deepspeed.config import read_config

_ZERO = (
    "allgather_bucket_size",
    "allgather_partitions",
    "contiguous_gradients",
    "overlap_comm",
    "reduce_bucket_size",
    "reduce_scatter",
    "sub_group_size",
)
_FP16 = ("hysteresis", "initial_scale_power", "loss_scale", "loss_scale_window", "min_loss_scale")
_INSTEAD = {
    "remote_device": "Leave it out, and construct the model within `fabric.init_module(empty_init=True)`.",
    "load_full_weights": "Leave it out: checkpoints contain unsharded weights.",
    "logging_batch_size_per_gpu": "Leave it out: it only affects DeepSpeed's logs.",
    "logging_level": "Call `logging.getLogger('DeepSpeed').setLevel(level)`.",
    "exclude_frozen_parameters": "Pass `filter` to `fabric.save`.",
    **dict.fromkeys(
        ("nvme_path", "block_size", "queue_depth", "single_submit", "overlap_events", "thread_count"),
        "Leave it out: states can only be offloaded to main memory.",
    ),
    **dict.fromkeys(
        (
            "partition_activations",
            "cpu_checkpointing",
            "contiguous_memory_optimization",
            "synchronize_checkpoint_boundary",
        ),
        "Recompute activations with `torch.utils.checkpoint` in the model.",
    ),
}


class DeepSpeedStrategy(ParallelStrategy):
    """ZeRO by DeepSpeed.

    Further options that go into DeepSpeed's config: `allgather_bucket_size`,
    `allgather_partitions`, `contiguous_gradients`, `overlap_comm`, `reduce_bucket_size`, `reduce_scatter`,
    `sub_group_size`; and those of loss scaling under "16-true": `loss_scale` (0: dynamic), `initial_scale_power`,
    `loss_scale_window`, `hysteresis`, `min_loss_scale`. Omitted options have DeepSpeed's defaults.
    Raises: UnsupportedError: an argument without a counterpart. ValueError: an option here and in `config`.
    """

    def __init__(
        self,
        accelerator: Any = None,
        zero_optimization: bool = True,
        stage: int | None = None,
        *,
        offload_optimizer: bool = False,
        offload_parameters: bool = False,
        offload_params_device: str = "cpu",
        offload_optimizer_device: str = "cpu",
        pin_memory: bool = False,
        zero_allow_untested_optimizer: bool = True,
        config: Any = None,
        parallel_devices: Any = None,
        cluster_environment: Any = None,
        precision: Any = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = None,
        **kwargs: Any,
    ) -> None:
        options = process_options("DeepSpeedStrategy", locals())
        refuse_arguments("DeepSpeedStrategy", kwargs, _INSTEAD)
        if not zero_optimization or stage == 0:
            raise unsupported(
                "DeepSpeedStrategy(zero_optimization=False)", "Write `strategy='ddp'`, which is the same."
            )
        if not zero_allow_untested_optimizer:
            raise unsupported(
                "DeepSpeedStrategy(zero_allow_untested_optimizer=False)",
                "Leave it out: every optimizer that updates each element independently is allowed.",
            )
        for name, device in (("params", offload_params_device), ("optimizer", offload_optimizer_device)):
            if device != "cpu":
                raise unsupported(f"DeepSpeedStrategy(offload_{name}_device={device!r})", "Write 'cpu', main memory.")
        if pin_memory:
            raise unsupported(
                "DeepSpeedStrategy(pin_memory=True)",
                "Write it into DeepSpeed's dictionary: `config={'zero_optimization': {'offload_optimizer': {'device': "
                "'cpu', 'pin_memory': True}}}`.",
            )
        self._core = core_strategies.DeepSpeedStrategy(
            **options,
            stage=stage,
            offload_optimizer=offload_optimizer,
            offload_parameters=offload_parameters,
            config=_merged(read_config(config), kwargs),
        )

    @property
    def config(self) -> Any:
        """DeepSpeed's config, with the options that were passed."""
        return getattr(self._core, "config", {})


def _merged(config: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    sections: dict[str, dict[str, Any]] = {"zero_optimization": {}, "fp16": {}}
    for name, value in given.items():
        if name in _ZERO:
            sections["zero_optimization"][name] = value
        elif name in _FP16:
            sections["fp16"][name] = value
        else:
            raise TypeError(
                f"`DeepSpeedStrategy({name}=...)`: there is no such option here. Write it into DeepSpeed's dictionary, "
                "`config={...}`."
            )
    for section, values in sections.items():
        twice = sorted(set(values) & set(config.get(section, {})))
        if twice:
            raise ValueError(
                f"`DeepSpeedStrategy({twice[0]}={values[twice[0]]!r})`, but `config[{section!r}][{twice[0]!r}]` is "
                f"{config[section][twice[0]]!r}. Leave one of them out."
            )
    filled = {section: {**config.get(section, {}), **values} for section, values in sections.items() if values}
    return {**config, **filled}
