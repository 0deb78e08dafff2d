"""Placeholders for weights that stage 3 has released, so that a change by hand between forwards is not lost silently.

DeepSpeed leaves an empty tensor in a released parameter: any operation in place succeeds on it, and changes nothing. A
placeholder has the shape of the parameter and one element of memory, which is NaN. Torch raises for an operation in
place on such a tensor, at the line of the program. What it allows (`fill_`, `zero_`, an index) changes the element, and
`parameter.data = other` the address: both are found at the next forward or step.

Parameters that DeepSpeed keeps gathered, since they are small, are compared with this rank's shard before a step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, final

import torch
from torch import Tensor

from fabric.strategies.torch_internals import disable_dynamo


@final
class Released:
    """The parameters of one model under stage 3. `rank`: of this process, whose shards are compared."""

    def __init__(self, parameters: Iterable[tuple[str, Any]], rank: int) -> None:
        self._parameters = list(parameters)
        self._rank = rank
        alike: dict[tuple[torch.dtype, torch.device], list[int]] = defaultdict(list)
        for number, (_, parameter) in enumerate(self._parameters):
            if parameter.is_floating_point():
                alike[parameter.dtype, parameter.device].append(number)
        self._elements: list[tuple[Tensor, list[int]]] = []
        self._placeholders: dict[int, Tensor] = {}
        for (dtype, device), numbers in alike.items():
            elements = torch.full((len(numbers),), float("nan"), dtype=dtype, device=device)
            self._elements.append((elements, numbers))
            for element, number in zip(elements, numbers, strict=True):
                parameter = self._parameters[number][1]
                # Of two elements where the parameter has one, because operations in place on one are allowed.
                shape = parameter.ds_shape if parameter.ds_numel > 1 else (2,)
                self._placeholders[number] = element.expand(shape)
        self._addresses: list[int] = []
        self.put()

    @disable_dynamo
    def put(self) -> None:
        """Set placeholders in released parameters. To be called after whatever may have released some."""
        for number, placeholder in self._placeholders.items():
            parameter = self._parameters[number][1]
            if not parameter.numel():
                parameter.data = placeholder
        self._addresses = [parameter.data_ptr() for _, parameter in self._parameters]

    @disable_dynamo
    def refuse_other_data(self) -> None:
        """Raise RuntimeError if `parameter.data = other` was written since `put`. 0.2 us for each parameter."""
        gathered = []
        for number, (name, parameter) in enumerate(self._parameters):
            if parameter.data_ptr() == self._addresses[number] or not parameter.numel():
                continue
            if parameter.ds_status.name == "NOT_AVAILABLE":
                parameter.data = self._placeholders.get(number, parameter.data)  # raise once, if the program goes on
                raise RuntimeError(CHANGED_WEIGHT.format(name=name))
            gathered.append((name, parameter))  # by a forward or backward that has raised
        if gathered:
            self._refuse_different(gathered)

    @disable_dynamo
    def refuse_changes(self) -> None:
        """Raise RuntimeError for any change that is found, in gathered weights on the ranks whose shards it concerns.

        Waits for the device.
        """
        self.refuse_other_data()
        for elements, numbers in self._elements:
            changed = ~elements.isnan()
            if changed.any():
                elements.fill_(float("nan"))
                raise RuntimeError(
                    CHANGED_WEIGHT.format(name=self._parameters[numbers[int(changed.int().argmax())]][0])
                )
        gathered = [
            named for number, named in enumerate(self._parameters) if named[1].numel() and not self._is_released(number)
        ]
        if gathered:
            self._refuse_different(gathered)

    def _refuse_different(self, gathered: Sequence[tuple[str, Any]]) -> None:
        """Raise RuntimeError if a parameter differs from its shard."""
        differ = torch.stack([self._differs_from_shard(parameter) for _, parameter in gathered])
        if differ.any():
            raise RuntimeError(CHANGED_WEIGHT.format(name=gathered[int(differ.int().argmax())][0]))

    def _is_released(self, number: int) -> bool:
        placeholder = self._placeholders.get(number)
        return placeholder is not None and self._parameters[number][1].data_ptr() == placeholder.data_ptr()

    def _differs_from_shard(self, parameter: Any) -> Tensor:
        """Whether the weights of this rank's shard differ in a bit, as a tensor `()`."""
        shard = parameter.ds_tensor.detach().flatten()
        if (parameter.shape, parameter.dtype) != (parameter.ds_shape, shard.dtype):
            return torch.ones((), dtype=torch.bool, device=parameter.device)
        start = self._rank * shard.numel()
        own = parameter.detach().flatten()[start : start + shard.numel()]
        shard = shard[: own.numel()].to(own.device)  # the last shards are padded
        differ: Tensor = (own.view(torch.uint8) != shard.view(torch.uint8)).any()
        return differ


CHANGED_WEIGHT = (
    "`{name}` was changed after `fabric.setup`, by `load_state_dict`, in place or through `.data`, but at ZeRO stage 3 "
    "DeepSpeed trains a copy of the weights that it keeps in shards, so the step would undo the change. Change weights "
    "before `fabric.setup`, or load them by `fabric.load` or `fabric.load_raw`, which also write the copy; or use "
    "`strategy='deepspeed_stage_2'`."
)
