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

from fabric.strategies.collectives.packing import INTEGERS
from fabric.strategies.torch_internals import disable_dynamo


@final
class Released:
    """The parameters of one model under stage 3. `rank`: of this process, whose shards are compared. `compare`: whether
    gathered weights are compared, or only what is found without reading them."""

    def __init__(self, parameters: Iterable[tuple[str, Any]], rank: int, *, compare: bool) -> None:
        self._compares = compare
        self._names, self._parameters = map(list, zip(*parameters, strict=True))
        self._rank = rank
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
        self._released = [0 if each is None else each.data_ptr() for each in self._placeholders]
        """The address of each parameter while it is released."""
        self._were_placed = False
        self._addresses: list[int] = []
        self._copied: list[int] = []
        self._copies: dict[tuple[torch.dtype, torch.device], _Copy] = {}
        self.put()

    @disable_dynamo
    def remember(self) -> None:
        """Set placeholders, and record the weights that are gathered now as those that DeepSpeed trains."""
        self.put()
        if self._compares and self._copied != self._addresses:
            self._copied = self._addresses
            alike: dict[tuple[torch.dtype, torch.device], list[int]] = {}
            for number in self._gathered():
                parameter = self._parameters[number]
                alike.setdefault((parameter.dtype, parameter.device), []).append(number)
            before = self._copies
            self._copies = {kind: before.get(kind) or _Copy() for kind in alike}
            for kind, numbers in alike.items():
                self._copies[kind].of(self._parameters, numbers)
        for copy in self._copies.values():
            copy.take()

    @disable_dynamo
    def put(self) -> None:
        """Set placeholders in released parameters. To be called after whatever may have released some."""
        for parameter, placeholder in zip(self._parameters, self._placeholders, strict=True):
            if placeholder is not None and not parameter.numel():
                parameter.data, self._were_placed = placeholder, True
        self._addresses = self._addresses_now()

    @disable_dynamo
    def refuse_other_data(self) -> None:
        """Raise RuntimeError if `parameter.data = other` was written since `put`. 0.1 us for each parameter."""
        now = self._addresses_now()
        if now == self._addresses:
            return
        gathered = []
        for number, parameter in enumerate(self._parameters):
            if now[number] == self._addresses[number] or not parameter.numel():
                continue
            if parameter.ds_status.name == "NOT_AVAILABLE":
                placeholder = self._placeholders[number]
                parameter.data = parameter.data if placeholder is None else placeholder  # raise once
                raise RuntimeError(CHANGED_WEIGHT.format(name=self._names[number]))
            gathered.append(number)  # by a forward or backward that has raised
        self._refuse_different(gathered)

    @disable_dynamo
    def refuse_changes(self) -> None:
        """Raise RuntimeError for any change that is found. Waits for the device.

        In weights that were gathered since the last step, only the ranks whose shards differ raise.
        """
        self.refuse_other_data()
        gathered = self._gathered()
        if self._were_placed:
            self._were_placed = len(gathered) < len(self._parameters)
            for elements, numbers in self._elements:
                if not (are_placeholders := elements.isnan()).all():
                    elements.fill_(float("nan"))
                    raise RuntimeError(
                        CHANGED_WEIGHT.format(name=self._names[numbers[int(are_placeholders.int().argmin())]])
                    )
        if not self._compares:
            return
        if self._addresses != self._copied:
            self._refuse_different(gathered)
            return
        for copy in self._copies.values():
            if (number := copy.changed()) is not None:
                raise RuntimeError(CHANGED_WEIGHT.format(name=self._names[number]))

    def _addresses_now(self) -> list[int]:
        return [parameter.data_ptr() for parameter in self._parameters]

    def _gathered(self) -> list[int]:
        return [
            number
            for number, (address, released) in enumerate(zip(self._addresses, self._released, strict=True))
            if address != released
        ]

    @torch.no_grad()
    def _refuse_different(self, gathered: Sequence[int]) -> None:
        """Raise RuntimeError if a parameter differs from its shard in a bit."""
        for number in gathered:
            parameter = self._parameters[number]
            if (parameter.shape, parameter.dtype) != (parameter.ds_shape, parameter.ds_tensor.dtype):
                raise RuntimeError(CHANGED_WEIGHT.format(name=self._names[number]))
        pairs = [self._own_and_shard(self._parameters[number]) for number in gathered]
        for dtype in {own.dtype for own, _ in pairs}:  # all at once: of a small one each operation would cost more
            alike = [pair for pair in pairs if pair[0].dtype == dtype]
            if not _are_equal(torch.cat([own for own, _ in alike]), torch.cat([shard for _, shard in alike])):
                differ = next(i for i, (own, shard) in enumerate(pairs) if not _are_equal(own, shard))
                raise RuntimeError(CHANGED_WEIGHT.format(name=self._names[gathered[differ]]))

    def _own_and_shard(self, parameter: Any) -> tuple[Tensor, Tensor]:
        """The weights of this rank's shard as the program sees them, and the shard."""
        shard = parameter.ds_tensor.view(-1)
        start = self._rank * shard.numel()
        own = parameter.reshape(-1)[start : start + shard.numel()]
        return own, shard[: own.numel()].to(own.device)  # the last shards are padded


@final
class _Copy:
    """A copy of gathered parameters of one dtype, in a tensor that is reused: new memory costs more than the copy."""

    def __init__(self) -> None:
        self._copy = self._now = torch.empty(0)

    def of(self, parameters: Sequence[Tensor], numbers: Sequence[int]) -> None:
        """Read these parameters from now on, where they are in memory now. What DeepSpeed gathers is contiguous."""
        self._numbers = numbers
        self._parts = [parameters[number].data.view(-1) for number in numbers]
        size = sum(part.numel() for part in self._parts)
        if self._copy.numel() != size or self._copy.dtype != self._parts[0].dtype:
            self._copy, self._now = self._parts[0].new_empty(size), self._parts[0].new_empty(size)

    def take(self) -> None:
        torch.cat(self._parts, out=self._copy)

    def changed(self) -> int | None:
        """The number of the first parameter that differs from its part of the copy in a bit."""
        torch.cat(self._parts, out=self._now)
        if _are_equal(self._now, self._copy):
            return None
        sizes = [part.numel() for part in self._parts]
        pairs = zip(torch.split(self._now, sizes), torch.split(self._copy, sizes), strict=True)
        differ = (number for number, pair in zip(self._numbers, pairs, strict=True) if not _are_equal(*pair))
        return next(differ)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(INTEGERS[tensor.element_size()])


def _are_equal(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same bits. NaN equals NaN."""
    return torch.equal(_bits(one), _bits(other))


CHANGED_WEIGHT = (
    "`{name}` was changed after `fabric.setup`, by `load_state_dict`, in place or through `.data`, but at ZeRO stage 3 "
    "DeepSpeed trains a copy of the weights that it keeps in shards, so the step would undo the change. Change weights "
    "before `fabric.setup`, or load them by `fabric.load` or `fabric.load_raw`, which also write the copy; or use "
    "`strategy='deepspeed_stage_2'`."
)
