"""Imports and initialises DeepSpeed, and undoes or prevents its side effects on the process.

By default it sets environment variables, logs to stdout, and compiles a C++ extension that training never uses
(100 s, and an error without a compiler). It also keeps references to destroyed process groups. Everything here is
called on a rank, never in the process that the user started.
"""

import gc
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from inspect import getclosurevars
from typing import Any

import torch.distributed as dist

from fabric.launchers.environments.defaults import variables
from fabric.launchers.private_names import Names, require
from fabric.launchers.world import World

NAMES: Names = {
    "deepspeed": {"ops": "`__compatible_ops__`: prevents compiling the extension for inference"},
    "deepspeed.utils.groups": {"_release_process_group_references": "drops the process groups of an earlier world"},
    "deepspeed.comm.comm": {"cdb": "the backend, whose deprecated functions of torch are replaced"},
    "deepspeed.runtime.compiler": {"compile": "prevents compiling Muon's functions at import"},
    "deepspeed.runtime.engine:DeepSpeedEngine": {
        "_backward_prologue": "starts a backward; `engine.backward` cannot be used if several models share a loss",
        "allreduce_gradients": "reduces once per window, at stage 1",
        "module_forward_pre_hook module_forward_post_hook": "removed when the model is released",
    },
    "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer": {
        "bit16_groups single_partition_of_fp32_groups": "the parameters of a shard",
        "parallel_partitioned_bit16_groups": "weights that the program changes are trained",
        "update_lp_params": "averages of weights are evaluated",
        "micro_step_id averaged_gradients all_grad_tensors overflow": "the window of accumulated gradients",
        "clear_backward_seen_flag finalize_gradient_accumulation_boundary needs_scaler loss_scale "
        "setup_buckets": "for each backward",
        "_release_ipg_buffers ipg_buckets params_already_reduced exit_backward": "reset after one that was cut short",
        "_grad_acc_hooks": "hooks that would keep a model alive for ever",
        "cpu_offload accumulated_grads_in_cpu reset_cpu_buffers": "offloaded gradients are discarded",
        "_hp_mapping": "which part of a parameter is in this rank's shard, and where",
        "_hp_optimizer_states_linked _lazy_init_hp_params_optimizer_state": "links states that were loaded",
    },
}
STAGE_3: Names = {
    "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3": {
        "fp16_groups fp32_partitioned_groups_flat": "which shard has which parameter",
        "grad_partitions_flat_buffer averaged_gradients offload_optimizer overflow": "gradients in shards",
        "_grad_acc_hooks": "hooks that would keep a model alive for ever",
        "clear_backward_seen_flag finalize_gradient_accumulation_boundary needs_scaler loss_scale": "for each backward",
        "_reassign_or_swap_out_partitioned_parameters checkpoint_event_prologue "
        "checkpoint_event_epilogue": "averages of weights are evaluated",
    },
    "deepspeed.runtime.zero.partition_parameters:Init": {
        "ds_tensor ds_shape partition_numel": "the shard of a parameter, and its unsharded shape",
        "_post_init_method": "parameters are compared over the ranks before they are sharded",
        "_partition_param": "parameters in shards have their shape until `setup`",
        "convert_to_zero_parameters": "copies of parameters in shards",
    },
    "deepspeed.runtime.zero.parameter_offload": {"FWD_MODULE_STACK": "keeps every model alive, also after `destroy`"},
    "deepspeed.runtime.zero.partitioned_param_coordinator:PartitionedParameterCoordinator": {
        "_PartitionedParameterCoordinator__params_to_release": "a cache that keeps every model alive"
    },
    "deepspeed.runtime.zero.partition_parameters": {"is_zero_param": "whether a parameter is sharded"},
}
"""Private names, and others that DeepSpeed does not document."""

RELEASES = "0.19"
"""The supported release: the strategy reads gradients and states where this release keeps them."""


def why_not(found: str | None) -> str | None:
    """None if the release `found` is supported; otherwise the reason."""
    if found is None:
        return (
            "`strategy='deepspeed'` needs the package deepspeed, which is not installed. "
            "Run `pip install 'torchfabric[deepspeed]'`."
        )
    if not found.startswith(f"{RELEASES}."):
        return (
            f"`strategy='deepspeed'` works with DeepSpeed {RELEASES}, and {found} is installed. "
            f"Run `pip install 'deepspeed=={RELEASES}.*'`."
        )
    return None


def look_up(names: Names) -> None:
    """Raise ImportError if DeepSpeed lacks one of the private names. Imports their modules."""
    require("deepspeed", f"{RELEASES}.8", names)


def join(world: World, device_type: str) -> None:
    """Let DeepSpeed use the default process group. Ranks: all call it, once per world."""
    with with_environment(world, device_type) as deepspeed:
        from deepspeed.utils import groups

        look_up(NAMES)
        groups._release_process_group_references()  # of an earlier world in this process
        operators = deepspeed.ops.__compatible_ops__
        built = operators.get("deepspeed_shm_comm")
        operators["deepspeed_shm_comm"] = False  # only used for inference; it would be compiled here
        try:
            deepspeed.init_distributed(dist_backend=dist.get_backend(), auto_mpi_discovery=False, verbose=False)
        finally:
            operators["deepspeed_shm_comm"] = built
        _import_muon()
        # The functions that DeepSpeed uses are deprecated in torch 2.13, and warn at every call.
        backend = deepspeed.comm.comm.cdb
        if hasattr(dist, "all_gather_single"):
            backend.all_gather_function = dist.all_gather_single
            backend.reduce_scatter_function = dist.reduce_scatter_single


def forget_models() -> None:
    """Empty the caches in which stage 3 keeps each model for ever (0.19), and collect models that nothing else keeps.
    Must not run within a forward."""
    from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator as Coordinator

    cached = vars(Coordinator)["_PartitionedParameterCoordinator__params_to_release"]
    getclosurevars(cached).nonlocals["func"].cache_clear()
    FWD_MODULE_STACK.clear()
    gc.collect()


def _import_muon() -> None:
    """Import DeepSpeed's Muon without compiling its functions.

    DeepSpeed imports Muon for every optimizer, and compiles these functions at import: that imports torch's compilers,
    two seconds on every rank (0.19).
    """
    from deepspeed.runtime import compiler

    compile = compiler.compile
    compiler.compile = lambda *options, **more: lambda function: function
    try:
        import_module("deepspeed.runtime.zero.muon.original_muon")
    finally:
        compiler.compile = compile


@contextmanager
def with_environment(world: World, device_type: str) -> Iterator[Any]:
    """Yield the module `deepspeed`, with the environment variables that it reads. Restores the environment."""
    before = dict(os.environ)
    rendezvous = world.rendezvous
    os.environ.update(
        DS_ACCELERATOR=device_type,
        RANK=str(world.rank),
        WORLD_SIZE=str(world.size),
        LOCAL_RANK=str(world.local_rank),
        MASTER_ADDR="127.0.0.1" if rendezvous is None else rendezvous.address,
        MASTER_PORT="0" if rendezvous is None else str(rendezvous.port),
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of names that DeepSpeed imports from torch
            import deepspeed
            from deepspeed.accelerator import get_accelerator

            _to_stderr()
            name = get_accelerator().device_name()
            if name != device_type:
                raise RuntimeError(
                    f"DeepSpeed supports one device type per process: this one has used {name!r}, and "
                    f"{device_type!r} was requested. Use a process for each."
                )
            yield deepspeed
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)


def local_rank(world: World) -> AbstractContextManager[None]:
    """Set LOCAL_RANK within the context: at stage 3 DeepSpeed reads it during training."""
    return variables(os.environ, {"LOCAL_RANK": str(world.local_rank)})


def _to_stderr() -> None:
    """Make DeepSpeed log only errors (it warns about 'untested' optimizers), and to stderr: stdout is the user's."""
    logger = logging.getLogger("DeepSpeed")
    logger.setLevel(max(logger.level, logging.ERROR))
    for handler in logger.handlers:
        if isinstance(handler, logging.StreamHandler) and handler.stream is sys.stdout:
            handler.setStream(sys.stderr)
