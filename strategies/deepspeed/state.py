"""The unsharded state of a model under ZeRO: gather it from shards, and load it into them.

A checkpoint is written from the shards. Unsharded state is gathered one parameter at a time, and only rank 0 keeps it.
Weights are read from the optimizer, in float32 whatever dtype the model computes in: a resumed run has equal weights.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from copy import deepcopy
from functools import cache
from typing import Any, cast, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fabric.launchers.world import World
from fabric.strategies.checkpoint.state import StateAccess, map_state
from fabric.strategies.checkpoint.tensors import (
    Stored,
    TensorShards,
    flat_shard,
    in_memory,
    is_extra_state,
    mapped_module,
    no_shards,
)
from fabric.strategies.deepspeed.released import ReleasedParameters, is_sharded, shape_of
from fabric.strategies.tensors.wrapper_subclass import plain_state


@final
class ZeroState(StateAccess):
    """The state of one engine's module and optimizer. `zero`: DeepSpeed's optimizer; None if nothing is trained.

    `groups`: the parameters of the user's optimizer, by group. `averaged`: the context in which gradients are averaged.
    """

    def __init__(
        self,
        world: World,
        stage: int,
        zero: Any,
        groups: Sequence[Sequence[Tensor]],
        averaged: Callable[[], AbstractContextManager[object]],
        released: ReleasedParameters,
    ) -> None:
        self.world, self.stage, self.zero, self.groups, self._averaged = world, stage, zero, groups, averaged
        self._released, self.empties_parameters = released, stage == 3
        trained = () if zero is None else zero.fp16_groups if stage == 3 else zero.bit16_groups
        self.trained = {id(parameter) for group in trained for parameter in group}

    # Modules

    def read_module(self, module: nn.Module) -> dict[str, Any]:
        """All names of a tied tensor share one entry.

        Raises: RuntimeError: a hook computed an entry from a sharded parameter, which is empty here.
        """
        read = cache(self._shards)
        self._released.empty()
        state = plain_state(module, keep_vars=True)
        self._released.fill()
        own = {id(each) for each in (*module.parameters(), *module.buffers())}
        is_in_shards = any(map(is_sharded, module.parameters()))
        for name, value in state.items():
            if isinstance(value, Tensor):
                if is_in_shards and not value.numel() and id(value) not in own:
                    raise RuntimeError(_COMPUTED.format(name=name, model=type(module).__name__))
                state[name] = read(value)
        return state

    def shapes(self, module: nn.Module) -> dict[str, tuple[int, ...] | None]:
        return {
            name: shape_of(value) if isinstance(value, Tensor) else None
            for name, value in plain_state(module, keep_vars=True).items()
        }

    def group_sizes(self, optimizer: Optimizer) -> list[int]:
        return [len(group) for group in self.groups]

    def load_module(self, module: nn.Module, content: Any, *, strict: bool) -> None:
        self.write_module(module, content, strict=strict)

    def write_module(self, module: nn.Module, content: dict[str, Any], *, strict: bool) -> None:
        """Values of `content` may be `Stored`; they are read one at a time."""
        if self.stage != 3:
            module.load_state_dict(mapped_module(content), strict=strict)
        own = module.state_dict(keep_vars=True)
        if strict:
            _check_names(type(module).__name__, own, content)
        for name in own:
            if name not in content:
                continue
            if is_extra_state(name):
                if self.stage == 3:
                    module.get_submodule(name.rpartition(".")[0]).set_extra_state(in_memory(content[name]))
            elif isinstance(own[name], Tensor):
                self._write_tensor(name, own[name], in_memory(content[name], mapped=True))

    def gather(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        if self.stage != 3:
            return list(parameters)
        with self._released.gathered(parameters):
            copies = [parameter.clone() for parameter in parameters]
        for parameter, copy in zip(parameters, copies, strict=True):
            if copy.grad_fn is not None:
                _gather_for_gradient(parameter, copy.grad_fn.next_functions[0][0])
        return copies

    def gradients(self, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
        from deepspeed.utils import safe_get_full_grad

        with self._averaged() as shards:
            for name, parameter in module.named_parameters() if shards else ():
                if id(parameter) in self.trained:
                    with _reached(parameter):
                        gradient = safe_get_full_grad(parameter)
                    if gradient is not None:
                        yield name, gradient / float(self.zero.loss_scale)

    def scatter(self, parameters: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        for parameter, value in zip(parameters, values, strict=True):
            is_trained = id(parameter) in self.trained
            changed = as_changed(self._whole(parameter), value.detach()) if is_trained else value
            self._write_tensor("", parameter, changed)

    def kept(self, parameter: Tensor, gathered: Tensor) -> tuple[Tensor, Tensor] | None:
        if not is_sharded(parameter) or parameter.shape != shape_of(parameter):
            return None
        shard = cast(Any, parameter).ds_tensor.flatten()
        start = self.world.rank * shard.numel()
        own = parameter.detach().flatten()[start : start + shard.numel()]
        return own, shard[: own.numel()].to(own.device)

    def _whole(self, tensor: Tensor) -> Tensor:
        from deepspeed.utils import safe_get_full_fp32_param

        if id(tensor) in self.trained:
            with _reached(tensor):
                whole = safe_get_full_fp32_param(tensor).view(shape_of(tensor))
            return whole if self.stage == 3 else as_changed(whole, tensor.detach())
        with self._released.gathered([tensor]):
            return tensor.detach().clone()

    def _write_tensor(self, name: str, tensor: Tensor, value: Tensor) -> None:
        shape = shape_of(tensor)
        if tuple(value.shape) != shape:
            raise RuntimeError(
                f"`{name}` has the shape {shape}, but {tuple(value.shape)} in the checkpoint. Load into a model of the "
                "same shapes."
            )
        if self.stage == 3:
            with self._released.gathered([tensor], modifier_rank=0):
                tensor.data.copy_(value)  # does not count as a change by the program, see `Engine`
        if id(tensor) in self.trained:
            self._write_shard(tensor, value, None)

    # Optimizers

    def read_optimizer(self, optimizer: Optimizer) -> dict[str, Any]:
        self._link()
        state: dict[int, dict[str, Any]] = {}
        groups = []
        number = 0
        for group, parameters in zip(optimizer.param_groups, self.groups, strict=True):
            groups.append({name: value for name, value in group.items() if name != "params"})
            groups[-1]["params"] = list(range(number, number + len(parameters)))
            for parameter in parameters:
                entries = self._entries(parameter) if id(parameter) in self.trained else {}
                if entries:
                    state[number] = entries
                number += 1
        return {"state": state, "param_groups": groups}

    def load_optimizer(self, optimizer: Optimizer, content: Any) -> None:
        def small_in_memory(index: Any, key: str, value: Any) -> Any:
            return value if isinstance(value, Stored) and value.shape != () else in_memory(value)

        state = map_state(content, small_in_memory)["state"]
        self.write_optimizer(optimizer, {**in_memory({**content, "state": {}}), "state": state})

    def write_optimizer(self, optimizer: Optimizer, content: dict[str, Any]) -> None:
        """Tensors in `content` may be `Stored`; they are read one at a time."""
        saved = content["param_groups"]
        sizes, saved_sizes = [len(group) for group in self.groups], [len(group["params"]) for group in saved]
        if sizes != saved_sizes:
            raise ValueError(
                f"The optimizer has parameter groups of {sizes} parameters, but the saved one of {saved_sizes}. "
                "Make the same parameter groups as in the saved run."
            )
        for group, other in zip(optimizer.param_groups, saved, strict=True):
            group.update({name: value for name, value in other.items() if name != "params"})
        number_of = dict(zip(map(id, self._all()), (n for group in saved for n in group["params"]), strict=True))
        for flat, parameters in self._flats():
            entries = {id(p): content["state"].get(number_of[id(p)], {}) for p in parameters}
            self.zero.optimizer.state.pop(flat, None)  # freed before the new state is allocated
            self.zero.optimizer.state[flat] = _flat_entries(flat, parameters, list(entries.values()))
        self._link()
        for parameter in self._all():
            if id(parameter) in self.trained:
                for key, value in content["state"].get(number_of[id(parameter)], {}).items():
                    if _is_elementwise(key, value, parameter):
                        self._write_shard(parameter, in_memory(value, mapped=True), key)

    def _link(self) -> None:
        """Map each parameter to its part of the flat states. DeepSpeed does so once, before all groups have states."""
        if self.stage != 3:
            self.zero._hp_optimizer_states_linked = False
            self.zero._lazy_init_hp_params_optimizer_state()

    def _all(self) -> Iterator[Tensor]:
        return (parameter for group in self.groups for parameter in group)

    def _flats(self) -> Iterable[tuple[Tensor, Sequence[Tensor]]]:
        """Each flat partition that the optimizer steps, with the parameters that have a part in it."""
        if self.stage == 3:
            return list(zip(self.zero.fp32_partitioned_groups_flat, self.zero.fp16_groups, strict=True))
        return list(zip(self.zero.single_partition_of_fp32_groups, self.zero.bit16_groups, strict=True))

    def _entries(self, parameter: Tensor) -> dict[str, Any]:
        flat = next(flat for flat, parameters in self._flats() if any(p is parameter for p in parameters))
        entries: dict[str, Any] = {}
        for key, value in self.zero.optimizer.state.get(flat, {}).items():
            if isinstance(value, Tensor) and key != "step" and value.shape == flat.shape:
                entries[key] = self._trained_shards(parameter, key)
            else:
                entries[key] = value.detach().cpu().clone() if isinstance(value, Tensor) else value
        return entries

    # One tensor

    def _shards(self, tensor: Tensor) -> TensorShards | Tensor:
        """The shards of a tensor of the module, or the tensor itself if it is not sharded."""
        if id(tensor) in self.trained:
            return self._trained_shards(tensor, None)
        if not is_sharded(tensor):
            return tensor.detach()
        own = cast(Any, tensor).ds_tensor.flatten()
        return flat_shard(shape_of(tensor), self.world.rank * own.numel(), own, self.world.rank)

    def _trained_shards(self, parameter: Tensor, key: str | None) -> TensorShards:
        """This rank's shard of the trained weights, or of the optimizer's `key`."""
        from deepspeed.utils import safe_get_local_fp32_param, safe_get_local_optimizer_state

        shape, rank = shape_of(parameter), self.world.rank
        if self.stage == 3:
            with _reached(parameter):
                read = safe_get_local_optimizer_state
                own = (safe_get_local_fp32_param(parameter) if key is None else read(parameter, key)).flatten()
            return flat_shard(shape, rank * own.numel(), own, rank)
        mapping = cast(Any, parameter)._hp_mapping
        if mapping is None:  # this rank has no shard of the parameter
            return no_shards(shape, torch.float32)
        start, own = mapping.lp_fragment_address.start, mapping.get_hp_fragment(key).flatten()
        if key is None:
            own = as_changed(own, parameter.detach().flatten()[start : start + own.numel()])
        return flat_shard(shape, start, own, rank)

    def _write_shard(self, parameter: Tensor, value: Tensor, key: str | None) -> None:
        """Copy this rank's shard of `value` into the weights, or into the optimizer's `key`."""
        from deepspeed.utils import (
            safe_set_full_fp32_param,
            safe_set_full_optimizer_state,
            safe_set_local_fp32_param,
            safe_set_local_optimizer_state,
        )

        value = value.to(torch.float32)
        if self.stage == 3:
            piece = _slice(value, parameter.ds_tensor.numel(), self.world.rank)  # type: ignore[attr-defined]
            with _reached(parameter):
                if key is None:
                    safe_set_local_fp32_param(parameter, piece)
                else:
                    safe_set_local_optimizer_state(parameter, piece, key)
        elif key is None:
            safe_set_full_fp32_param(parameter, value)
        else:
            safe_set_full_optimizer_state(parameter, value, key)


_COMPUTED = (
    "{name!r} in the state of `{model}` was computed from a parameter, by a hook or by `_save_to_state_dict`, but at "
    "ZeRO stage 3 parameters are in shards then. Leave the parameter as it is there, and convert it when it is loaded; "
    "or use `strategy='deepspeed_stage_2'`."
)


def _gather_for_gradient(parameter: Tensor, accumulation: Any) -> None:
    """Gather a parameter while autograd accumulates its gradient, even if its submodule does not run in that backward:
    torch reads the gradient's shape from the parameter."""
    from deepspeed.runtime.zero import GatheredParameters

    stack = ExitStack()

    def gather(_: Any) -> None:
        if parameter.shape != shape_of(parameter):
            stack.enter_context(GatheredParameters([parameter]))

    accumulation.register_prehook(gather)
    accumulation.register_hook(lambda *_: stack.close())


@contextmanager
def _reached(parameter: Tensor) -> Iterator[None]:
    """Context: a trained parameter requires gradients, even if it is frozen for a while, as a critic's are in the steps
    of the generator. At stage 3 DeepSpeed's functions silently skip a frozen parameter (0.19)."""
    is_trained = parameter.requires_grad
    parameter.requires_grad_(True)
    try:
        yield
    finally:
        parameter.requires_grad_(is_trained)


def _slice(value: Tensor, size: int, rank: int) -> Tensor:
    """Shard `rank` of a tensor with shards of `size` elements, the last ones padded with zeros."""
    part = value.flatten()[rank * size : (rank + 1) * size]
    return nn.functional.pad(part, (0, size - part.numel()))


def _is_elementwise(key: str, value: Any, parameter: Tensor) -> bool:
    return isinstance(value, (Tensor, Stored)) and key != "step" and tuple(value.shape) == shape_of(parameter)


def as_changed(trained: Tensor, weight: Tensor) -> Tensor:
    """The trained weight, with the program's changes of the weight that the model computes with: `(*S)`, `(*S)` ->
    `(*S)`. A difference by rounding alone is no change. Does not wait for the device."""
    seen = weight.to(trained.device)
    if seen.dtype == trained.dtype:
        return seen
    return torch.where(trained.to(seen.dtype) == seen, trained, seen.to(trained.dtype))


def _flat_entries(flat: Tensor, parameters: Sequence[Tensor], entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The entries of a flat partition, from the entries of its parameters. Tensors are zero."""
    first: dict[str, Any] = {}
    for parameter, own in zip(parameters, entries, strict=True):
        shared: dict[str, Any] = {
            key: None if _is_elementwise(key, value, parameter) else deepcopy(in_memory(value))
            for key, value in own.items()
        }
        if parameter is parameters[0]:
            first = shared
        steps, others = float(first.get("step", 0)), float(shared.get("step", 0))
        if shared.keys() != first.keys() or steps != others:
            raise ValueError(
                f"The checkpoint's optimizer has taken {steps} steps for one parameter and {others} for another, but "
                "DeepSpeed has one step count per group. Load it under `strategy='ddp'` or `'fsdp'`."
            )
    return {key: torch.zeros_like(flat) if value is None else value for key, value in first.items()}


def _check_names(model: str, own: Iterable[str], content: Iterable[str]) -> None:
    missing, unexpected = sorted(set(own) - set(content)), sorted(set(content) - set(own))
    if missing or unexpected:
        raise RuntimeError(
            f"The checkpoint does not match `{model}`: missing are {missing or 'none'}, unexpected are "
            f"{unexpected or 'none'}. Pass `strict=False` to load the others."
        )


@final
class LossScale:
    """DeepSpeed's loss scale in the checkpoint format of all strategies.

    `scaler`: a `DynamicLossScaler` of DeepSpeed, whose scale grows with the steps since the last overflow.
    """

    def __init__(self, scaler: Any) -> None:
        self._scaler = scaler

    def state_dict(self) -> dict[str, Any]:
        """The scale, and the steps since its last overflow."""
        scaler = self._scaler
        good_steps = scaler.cur_iter - scaler.last_overflow_iter - 1
        return {"scale": float(scaler.cur_scale), "good_steps": good_steps, "hysteresis": scaler.cur_hysteresis}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a `state_dict` that any strategy saved."""
        scaler = self._scaler
        scaler.cur_scale = state_dict["scale"]
        scaler.last_overflow_iter, scaler.cur_iter = -1, state_dict["good_steps"]
        scaler.cur_hysteresis = state_dict.get("hysteresis", scaler.cur_hysteresis)
