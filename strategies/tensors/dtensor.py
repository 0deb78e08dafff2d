"""Plain and sharded tensors (`DTensor`): gathered into full tensors, and full tensors sharded.

torch's DTensor is imported only when a tensor has a class of its own, so runs without shards do not pay for the import.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn

from fabric.strategies.tensors.chunk import Chunk

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


_FSDP = "torch.distributed.fsdp"


def as_sharded(tensor: Any) -> "DTensor | None":
    """The tensor if it is a DTensor; None if it is plain."""
    if not isinstance(tensor, Tensor) or type(tensor) is Tensor or type(tensor) is nn.Parameter:
        return None
    from torch.distributed.tensor import DTensor

    return tensor if isinstance(tensor, DTensor) else None


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of the tensor. Shares its memory.

    Other classes of tensors that are in parts have a method `local_part`.
    """
    own: Callable[[Tensor], Tensor] | None = getattr(type(tensor), "local_part", None)
    if own is not None:
        return own(tensor)
    sharded = as_sharded(tensor)
    return tensor if sharded is None else sharded.to_local()


def user_class(module: nn.Module) -> type[nn.Module]:
    """The user's class of a module: `fully_shard` replaces a module's class by a subclass with a new name."""
    return next(each for each in type(module).__mro__ if not each.__module__.startswith(_FSDP))


def whole(tensor: Tensor) -> Tensor:
    """The full tensor, on this rank. Ranks: all that hold a shard of it."""
    sharded = as_sharded(tensor)
    if sharded is None:
        return tensor
    # A shard that was offloaded to the CPU is sent over the devices' own network.
    return full_tensor(cast("DTensor", on_mesh(sharded.detach(), sharded.device_mesh)))


def on_mesh(tensor: Tensor, mesh: "DeviceMesh") -> Tensor:
    """The tensor on the mesh's kind of device, or itself if it is there: a thread has another current device."""
    return tensor if tensor.device.type == mesh.device_type else tensor.to(mesh.device_type)


def gathered_weight(parameter: Tensor) -> Tensor:
    """A whole copy of a parameter in shards, whose gradient is averaged over the ranks of its mesh; a plain one itself.

    Ranks: all that hold a shard of it, in backward, too.
    """
    sharded = as_sharded(parameter)
    if sharded is None:
        return parameter
    mesh = sharded.device_mesh
    copy = full_tensor(cast("DTensor", on_mesh(sharded, mesh)), sums_gradients=True)
    if copy.requires_grad:  # equal along an axis of tensor parallelism, where the mean of all is the gradient of each
        copy.register_hook(lambda gradient: gradient / mesh.size())  # type: ignore[no-untyped-call]
    return copy


def full_tensor(sharded: "DTensor", *, sums_gradients: bool = False) -> Tensor:
    """`full_tensor()`, one axis of the mesh at a time: for all at once torch logs a warning on every rank (2.13).

    `sums_gradients`: over the ranks of the mesh; otherwise each rank's shard gets its part of this rank's gradient.
    """
    from torch.distributed.tensor import Partial, Replicate

    placements = list(sharded.placements)
    # The last sharding is undone first: strided shards, for which `is_shard()` is False, and then the later axes.
    for axis in sorted(range(len(placements)), key=lambda axis: (placements[axis].is_shard(), -axis)):
        placements[axis] = Replicate()
        sharded = sharded.redistribute(placements=placements)
    gradients = [Partial() if sums_gradients else Replicate() for _ in placements]
    together: Tensor = sharded.to_local(grad_placements=gradients)
    return together


def own_part(copy: Tensor, sharded: "DTensor") -> Tensor:
    """The part of a gathered copy that this rank holds as its shard. Shares the copy's memory. `copy`: plain, or
    sharded over the mesh's other axes."""
    chunk, within = local_chunk(sharded), as_sharded(copy)
    offsets = (0,) * sharded.ndim if within is None else local_chunk(within).offsets
    places = zip(chunk.offsets, offsets, chunk.shape, strict=True)
    return local_part(copy.detach())[tuple(slice(at - first, at - first + size) for at, first, size in places)]


def shard_like(tensor: Tensor, like: Tensor) -> Tensor:
    """This rank's shard of a full tensor, with the layout of `like`. No communication: every rank has the full
    tensor."""
    sharded = as_sharded(like)
    if sharded is None:
        return tensor
    from torch.distributed.tensor import distribute_tensor

    made = distribute_tensor(tensor.detach(), sharded.device_mesh, sharded.placements, src_data_rank=None)
    return made.to(like.device).clone()  # a copy: a view would keep the whole alive


def local_chunk(sharded: "DTensor") -> Chunk:
    """The chunk of the tensor that this rank holds."""
    mesh, placements = sharded.device_mesh, sharded.placements
    here = mesh.get_coordinate()
    assert here is not None
    offsets, shape = [0] * sharded.ndim, list(sharded.shape)
    # `fully_shard` of a tensor that is sharded already makes a placement whose `is_shard` is False: it shards last.
    cuts = sorted(
        (axis for axis, each in enumerate(placements) if not each.is_replicate()),
        key=lambda axis: (not placements[axis].is_shard(), axis),
    )
    for axis in cuts:
        dim = placements[axis].dim  # type: ignore[attr-defined]
        size = -(-shape[dim] // mesh.size(axis))  # as `torch.chunk` splits
        start = min(here[axis] * size, shape[dim])
        offsets[dim] += start
        shape[dim] = min(size, shape[dim] - start)
    return Chunk(tuple(offsets), tuple(shape))
