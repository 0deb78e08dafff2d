"""Placeholders for weights that stage 3 has released, so that a change by hand between forwards is not lost silently.

DeepSpeed leaves an empty tensor in a released parameter: any operation in place succeeds on it, and changes nothing. A
placeholder has the shape of the parameter and one element of memory, which is NaN. Torch raises for an operation in
place on such a tensor, at the line of the program. What it allows (`fill_`, `zero_`, an index) changes the element, and
`parameter.data = other` the address: both are found at the next forward or step, the first on the CPU alone, because it
would wait for a device.

All parameters are released: DeepSpeed would keep small ones gathered by default, and a configuration may have it do so
(`stage3_param_persistence_threshold`). A change of such a one is lost.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, final

import torch
from torch import Tensor

from fabric.strategies.collectives.collective import HOST_DEVICES
from fabric.strategies.torch_internals import disable_dynamo


@final
class Released:
    """The parameters of one model under stage 3."""

    def __init__(self, parameters: Iterable[tuple[str, Any]]) -> None:
        self._names, self._parameters = map(list, zip(*parameters, strict=True))
        alike: dict[tuple[torch.dtype, torch.device], list[int]] = defaultdict(list)
        for number, parameter in enumerate(self._parameters):
            if parameter.is_floating_point():
                alike[parameter.dtype, parameter.device].append(number)
        self._elements: list[tuple[Tensor, list[int]]] = []
        self._placeholders: list[Tensor | None] = [None] * len(self._parameters)
        for (dtype, device), numbers in alike.items():
            elements = torch.full((len(numbers),), float("nan"), dtype=dtype, device=device)
            self._elements.append((elements, numbers))
            for element, number in zip(elements, numbers, strict=True):
                parameter = self._parameters[number]
                # Of two elements where the parameter has one, because operations in place on one are allowed.
                shape = parameter.ds_shape if parameter.ds_numel > 1 else (2,)
                self._placeholders[number] = element.expand(shape)
        self._addresses: list[int] = []
        self.put()

    @disable_dynamo
    def put(self) -> None:
        """Set placeholders in released parameters. To be called after whatever may have released some."""
        for parameter, placeholder in zip(self._parameters, self._placeholders, strict=True):
            if placeholder is not None and not parameter.numel():
                parameter.data = placeholder
        self._addresses = [parameter.data_ptr() for parameter in self._parameters]

    @disable_dynamo
    def refuse_other_data(self) -> None:
        """Raise RuntimeError if `parameter.data = other` was written since `put`. 0.1 us for each parameter."""
        now = [parameter.data_ptr() for parameter in self._parameters]
        if now == self._addresses:
            return
        for number, parameter in enumerate(self._parameters):
            if now[number] == self._addresses[number] or not parameter.numel():
                continue
            if parameter.ds_status.name == "NOT_AVAILABLE":  # otherwise gathered, by a pass that has raised
                placeholder = self._placeholders[number]
                parameter.data = parameter.data if placeholder is None else placeholder  # raise once
                raise RuntimeError(CHANGED_WEIGHT.format(name=self._names[number]))

    @disable_dynamo
    def refuse_changes(self) -> None:
        """Raise RuntimeError for any change that is found without waiting for the device."""
        self.refuse_other_data()
        for elements, numbers in self._elements:
            if elements.device.type not in HOST_DEVICES:
                continue
            if not (are_placeholders := elements.isnan()).all():
                elements.fill_(float("nan"))
                raise RuntimeError(
                    CHANGED_WEIGHT.format(name=self._names[numbers[int(are_placeholders.int().argmin())]])
                )


CHANGED_WEIGHT = (
    "`{name}` was changed after `fabric.setup`, by `load_state_dict`, in place or through `.data`, but at ZeRO stage 3 "
    "DeepSpeed trains a copy of the weights that it keeps in shards, so the step would undo the change. Change weights "
    "before `fabric.setup`, or load them by `fabric.load` or `fabric.load_raw`, which also write the copy; or use "
    "`strategy='deepspeed_stage_2'`."
)
