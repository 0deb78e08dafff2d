"""Placeholders for weights that stage 3 has released, so that a change by hand between forwards is not lost silently.

DeepSpeed leaves an empty tensor in a released parameter: any operation in place succeeds on it, and changes nothing. A
placeholder has the shape of the parameter and one element of memory, which is NaN. Torch raises for an operation in
place on such a tensor, at the line of the program. What it allows (`fill_`, `zero_`, an index) changes the element, and
`parameter.data = other` the address: both are found at the next forward or step.

Parameters that DeepSpeed keeps gathered, since they are small, are compared before a step with a copy of them that was
made after the last one; those that were gathered since, with this rank's shard.
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
        self._copied: list[int] = []
        self._copies: dict[torch.dtype, Tensor] = {}
        self._now: dict[torch.dtype, Tensor] = {}  # kept, because new memory costs more than the copy
        self.put()

    @disable_dynamo
    def remember(self) -> None:
        """Set placeholders, and record the weights that are gathered now as those that DeepSpeed trains."""
        self.put()
        self._copied = self._gathered()
        self._flatten(self._copied, self._copies)

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
        """Raise RuntimeError for any change that is found. Waits for the device.

        In weights that were gathered since the last step, only the ranks whose shards differ raise.
        """
        self.refuse_other_data()
        for elements, numbers in self._elements:
            changed = ~elements.isnan()
            if changed.any():
                elements.fill_(float("nan"))
                raise RuntimeError(
                    CHANGED_WEIGHT.format(name=self._parameters[numbers[int(changed.int().argmax())]][0])
                )
        gathered = self._gathered()
        if gathered == self._copied:
            self._flatten(gathered, self._now)
            for dtype, copy in self._copies.items():
                if not _are_equal(copy, self._now[dtype]):
                    raise RuntimeError(CHANGED_WEIGHT.format(name=self._changed_since_copied(copy)))
        elif gathered:
            self._refuse_different([self._parameters[number] for number in gathered])

    def _changed_since_copied(self, copy: Tensor) -> str:
        """The name of the first parameter that differs from its part of a copy."""
        start = 0
        for name, parameter in (self._parameters[number] for number in self._copied):
            if parameter.dtype == copy.dtype:
                end = start + parameter.numel()
                if not _are_equal(copy[start:end], parameter.detach().reshape(-1)):
                    return name
                start = end
        return "?"

    def _gathered(self) -> list[int]:
        return [
            number
            for number, (_, parameter) in enumerate(self._parameters)
            if parameter.numel() and not self._is_released(number)
        ]

    @torch.no_grad()
    def _flatten(self, numbers: Sequence[int], into: dict[torch.dtype, Tensor]) -> None:
        """Copy the parameters of each dtype into one tensor, which is reused if it has the right size."""
        alike: dict[torch.dtype, list[Tensor]] = defaultdict(list)
        for number in numbers:
            parameter = self._parameters[number][1]
            alike[parameter.dtype].append(parameter.reshape(-1))
        for dtype in into.keys() - alike.keys():
            del into[dtype]
        for dtype, tensors in alike.items():
            if dtype in into and into[dtype].numel() == sum(tensor.numel() for tensor in tensors):
                torch.cat(tensors, out=into[dtype])
            else:
                into[dtype] = torch.cat(tensors)

    @torch.no_grad()
    def _refuse_different(self, gathered: Sequence[tuple[str, Any]]) -> None:
        """Raise RuntimeError if a parameter differs from its shard in a bit."""
        for name, parameter in gathered:
            if (parameter.shape, parameter.dtype) != (parameter.ds_shape, parameter.ds_tensor.dtype):
                raise RuntimeError(CHANGED_WEIGHT.format(name=name))
        pairs = [self._own_and_shard(parameter) for _, parameter in gathered]
        for dtype in {own.dtype for own, _ in pairs}:  # all at once: of a small one each operation would cost more
            alike = [pair for pair in pairs if pair[0].dtype == dtype]
            if not _are_equal(torch.cat([own for own, _ in alike]), torch.cat([shard for _, shard in alike])):
                differ = next(i for i, (own, shard) in enumerate(pairs) if not _are_equal(own, shard))
                raise RuntimeError(CHANGED_WEIGHT.format(name=gathered[differ][0]))

    def _is_released(self, number: int) -> bool:
        placeholder = self._placeholders.get(number)
        return placeholder is not None and self._parameters[number][1].data_ptr() == placeholder.data_ptr()

    def _own_and_shard(self, parameter: Any) -> tuple[Tensor, Tensor]:
        """The weights of this rank's shard as the program sees them, and the shard."""
        shard = parameter.ds_tensor.view(-1)
        start = self._rank * shard.numel()
        own = parameter.reshape(-1)[start : start + shard.numel()]
        return own, shard[: own.numel()].to(own.device)  # the last shards are padded


def _are_equal(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same bits. NaN equals NaN."""
    integer = _INTEGERS[one.element_size()]
    return torch.equal(one.view(integer), other.view(integer))


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


CHANGED_WEIGHT = (
    "`{name}` was changed after `fabric.setup`, by `load_state_dict`, in place or through `.data`, but at ZeRO stage 3 "
    "DeepSpeed trains a copy of the weights that it keeps in shards, so the step would undo the change. Change weights "
    "before `fabric.setup`, or load them by `fabric.load` or `fabric.load_raw`, which also write the copy; or use "
    "`strategy='deepspeed_stage_2'`."
)
