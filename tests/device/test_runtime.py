"""What the pretended CUDA runtime promises to the tests beside it, and to whoever runs a program on it.

Tests that use a device do so in a process of their own (`run_world`): the process of pytest stays one that may be
forked.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pretended_cuda
import pytest
import torch
import torch.distributed as dist
from processes import run
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from waits import counting
from worlds import run_world

from fabric.launchers.launcher import WorkerError
from fabric.launchers.rendezvous.join import join
from fabric.launchers.world import World

pytestmark = pytest.mark.slow


def alone(body: Callable[..., Any], *args: Any) -> Any:
    """What a function returns in a process of its own."""
    return run_world(1, body, *args)[0]


@contextmanager
def nccl(world: World, **options: Any) -> Iterator[None]:
    """A process group over NCCL, a device for each rank."""
    torch.cuda.set_device(world.rank)
    store = join(world, 60, print) if world.size > 1 else dist.HashStore()
    dist.init_process_group("nccl", store=store, rank=world.rank, world_size=world.size, **options)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Net(nn.Module):
    """Each kind of layer that a device has kernels of its own for."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2))
        self.embedding = nn.Embedding(10, 8)
        self.attention = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.lstm, self.gru = nn.LSTM(8, 8, batch_first=True), nn.GRU(8, 8, batch_first=True)
        self.norm, self.out = nn.RMSNorm(8), nn.Linear(8 + 36, 3)

    def forward(self, images: Tensor, words: Tensor) -> Tensor:
        sequence = self.attention(self.embedding(words))
        sequence = self.norm(self.gru(self.lstm(sequence)[0])[0]).mean(1)
        return self.out(torch.cat([sequence, self.conv(images).flatten(1)], 1))


def train(device: str, **options: Any) -> list[Tensor]:
    """The losses of three steps, and the parameters after them."""
    torch.manual_seed(0)
    net = Net()
    images, words, labels = torch.randn(4, 1, 8, 8), torch.randint(10, (4, 5)), torch.randint(3, (4,))
    net, images, words, labels = net.to(device), images.to(device), words.to(device), labels.to(device)
    optimizer = torch.optim.AdamW(
        net.parameters(), lr=0.01, eps=0.01, **options
    )  # of some, gradients are noise around 0
    losses = []
    for _ in range(3):
        loss = nn.functional.cross_entropy(net(images, words), labels)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach())
    return [tensor.cpu() for tensor in [*losses, *net.state_dict().values()]]


def on_both(world: World) -> list[list[Tensor]]:
    return [train("cpu"), train("cuda"), train("cuda:2", fused=True), train("cuda", foreach=False)]


def test_a_model_trains_as_on_the_cpu() -> None:
    expected, *others = alone(on_both)
    for values in others:
        torch.testing.assert_close(values, expected)


def compiled(world: World) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    layer, x = nn.Linear(4, 4).cuda(), torch.ones(2, 4, device="cuda")
    return torch.compile(layer)(x).cpu().detach(), layer(x).cpu().detach()


def test_a_compiled_layer_gives_what_the_layer_gives() -> None:
    torch.testing.assert_close(*alone(compiled))


def read_from_the_host(world: World) -> None:
    ctypes.string_at(torch.zeros(4, device="cuda").data_ptr(), 4)


def test_the_host_cannot_read_memory_of_the_device() -> None:
    with pytest.raises(WorkerError) as died:
        alone(read_from_the_host)
    assert died.value.signal == signal.SIGSEGV


def copied_to_the_host(world: World) -> list[list[float]]:
    there, here = torch.ones(2, device="cuda"), torch.zeros(2).pin_memory()
    side, event = torch.cuda.Stream(), torch.cuda.Event()
    here.copy_(there, non_blocking=True)
    seen = [here.tolist()]
    event.record()
    side.wait_event(event)
    seen.append(here.tolist())  # a stream has waited, and not the host
    side.synchronize()
    seen.append(here.tolist())
    here.copy_(there * 2, non_blocking=True)
    event.record()
    assert event.query()
    return [*seen, here.tolist()]


def test_a_copy_to_the_host_arrives_when_the_host_has_waited_for_it() -> None:
    before, still, after, queried = alone(copied_to_the_host)
    assert before == still != after
    assert (after, queried) == ([1, 1], [2, 2])


def raced_with_the_host(world: World) -> list[str]:
    batch = torch.zeros(4).pin_memory()
    there = batch.cuda(non_blocking=True)
    batch.fill_(1)
    with counting() as waits, pytest.raises(RuntimeError, match="race: memory was used while it was copied"):
        torch.cuda.synchronize()
    assert not there.any()
    torch.cuda.synchronize()  # reported once
    there = batch.cuda(non_blocking=True)
    torch.cuda.synchronize()
    batch.fill_(2)
    torch.cuda.synchronize()
    return [what for what, _ in waits.races]


def test_writing_to_pinned_memory_that_is_being_copied_is_a_race() -> None:
    assert alone(raced_with_the_host) == ["pinned memory was written while it was copied to the device: 16 bytes"]


def used_on_another_stream(world: World, to_host: bool, waits: bool) -> list[float]:
    side, here, there = torch.cuda.Stream(), torch.ones(4).pin_memory(), torch.zeros(4, device="cuda")
    with torch.cuda.stream(side):
        (here if to_host else there).copy_(there if to_host else here, non_blocking=True)
    if waits:
        torch.cuda.current_stream().wait_stream(side)
    return (there + 1 if not to_host else there.add_(1)).tolist()


@pytest.mark.parametrize("to_host", [False, True])
def test_using_memory_of_a_copy_on_another_stream_without_waiting_is_a_race(to_host: bool) -> None:
    assert alone(used_on_another_stream, to_host, True) == ([1] * 4 if to_host else [2] * 4)
    with pytest.raises(WorkerError, match=r"race: argument self of .* for which the current stream has not waited"):
        alone(used_on_another_stream, to_host, False)


def drawn(world: World) -> None:
    torch.manual_seed(7)
    on_host = torch.rand(3)
    torch.manual_seed(7)
    first, second, other = torch.rand(3, device="cuda"), torch.rand(3, device="cuda"), torch.rand(3, device="cuda:1")
    nn.functional.dropout(torch.ones(9, device="cuda"))
    assert torch.equal(torch.rand(3), on_host)  # the devices have generators of their own
    assert not torch.equal(first, second)
    assert torch.equal(first.cpu(), other.cpu())
    state = torch.cuda.get_rng_state(0)
    dropped = nn.functional.dropout(torch.ones(64, device="cuda"))
    torch.cuda.set_rng_state(state, 0)
    assert torch.equal(nn.functional.dropout(torch.ones(64, device="cuda")), dropped)
    assert set(dropped.tolist()) == {0, 2}
    own = torch.Generator("cuda").manual_seed(7)
    assert torch.equal(torch.rand(3, device="cuda", generator=own), first)


def test_each_device_has_a_generator() -> None:
    alone(drawn)


def mixed_devices(world: World) -> None:
    here, there, far = torch.ones(2), torch.ones(2, device="cuda"), torch.ones(2, device="cuda:1")
    for other in (here, far):
        with pytest.raises(RuntimeError, match=f"at least two devices, cuda:0 and {other.device}!"):
            there + other
    assert (there + torch.tensor(1)).tolist() == [2, 2]  # a number may come from the CPU
    assert there[torch.tensor([1])].tolist() == [1]  # and an index
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.ones(2, device="cuda:4")
    with pytest.raises(TypeError, match="can't convert cuda:0 device type tensor to numpy"):
        there.numpy()


def test_tensors_of_different_devices_do_not_mix() -> None:
    alone(mixed_devices)


def filled(world: World) -> None:
    pretended_cuda.limit_memory(1, 64 * 2**20)
    assert torch.cuda.mem_get_info(1)[1] == 64 * 2**20
    kept = torch.zeros(8 * 2**20, device="cuda:1")
    with pytest.raises(torch.OutOfMemoryError, match=r"GPU 1 has a total capacity of 64.00 MiB"):
        torch.zeros(16 * 2**20, device="cuda:1")
    torch.zeros(16 * 2**20, device="cuda:0")
    del kept
    torch.zeros(16 * 2**20, device="cuda:1")
    assert torch.cuda.max_memory_allocated(1) == 64 * 2**20


def test_a_device_has_as_much_memory_as_it_is_given() -> None:
    alone(filled)


def waited(world: World) -> None:
    there, layer = torch.ones(4, device="cuda"), nn.Linear(4, 4).cuda()
    optimizer = torch.optim.AdamW(layer.parameters())

    def step() -> None:
        layer(there).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    expected: list[tuple[Callable[[], object], list[str]]] = [
        (step, []),
        (lambda: torch.full((), 1.0, device="cuda"), []),
        (lambda: torch.ones(4).pin_memory().cuda(non_blocking=True), []),
        (lambda: torch.cuda.Event().query(), []),
        (lambda: there.sum().item(), ["cudaStreamSynchronize"]),
        (lambda: torch.tensor(1.0, device="cuda"), ["copy from pageable memory"]),
        (lambda: torch.ones(4).cuda(non_blocking=True), ["copy from pageable memory"]),
        (lambda: there.cpu(), ["copy to pageable memory"]),
        (lambda: torch.ones(4).pin_memory().cuda(), ["cudaStreamSynchronize"]),
        (lambda: there.nonzero(), ["aten::nonzero"]),
        (lambda: there[there > 0], ["aten::index.Tensor with a mask"]),
        (lambda: there.masked_fill(there > 0, 1.0), []),
        (lambda: there.masked_fill(there > 0, there[0]), ["aten::masked_fill_.Tensor"]),
        (lambda: torch.cuda.synchronize(), ["cudaDeviceSynchronize"]),
        (lambda: torch.cuda.current_stream().synchronize(), ["cudaStreamSynchronize"]),
    ]
    for function, kinds in expected:
        with counting() as all_waits, counting() as waits:
            function()
        assert [kind for kind, _ in waits.lines] == kinds
        assert all(line.split(":")[0].endswith("test_runtime.py") for _, line in waits.lines)
        assert all_waits.total == waits.total == len(kinds)
    with counting() as waits:
        pass
    there.sum().item()
    assert waits.total == 0  # after the block


def test_every_wait_is_counted_with_its_line() -> None:
    alone(waited)


def autocast(world: World) -> None:
    a, b = torch.ones(2, 2, device="cuda"), torch.ones(2, 2, device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert (a @ b).dtype == torch.bfloat16
        assert (a @ b).softmax(0).dtype == torch.float32
    scaler, parameter = torch.amp.GradScaler("cuda"), nn.Parameter(torch.ones(1, device="cuda"))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler.scale(parameter * float("inf")).backward()
    scaler.step(optimizer)
    scaler.update()
    assert (parameter.item(), scaler.get_scale()) == (1, 2.0**15)


def test_autocast_and_loss_scaling_are_those_of_cuda() -> None:
    alone(autocast)


VISIBLE = """
import os, sys, torch
os.environ["CUDA_VISIBLE_DEVICES"] = sys.argv[1]  # before the first call of the driver, which reads it
assert torch.cuda.device_count() == (torch.accelerator.device_count() if torch.cuda.is_available() else 0)
print(*(str(torch.cuda.get_device_properties(i).uuid)[:2] for i in range(torch.cuda.device_count())))
"""


@pytest.mark.parametrize(
    ("value", "uuids"),
    [
        ("2", ["30"]),
        ("3,1", ["40", "20"]),
        ("GPU-20,GPU-10", ["20", "10"]),
        ("0,7,1", ["10"]),
        ("1,1", []),
        ("", []),
        ("-1", []),
    ],
)
def test_cuda_visible_devices_means_what_it_means(value: str, uuids: list[str], tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(VISIBLE)
    done = run([tmp_path / "program.py", value])
    assert done.stdout.split() == uuids, done.stderr


def forked(world: World) -> int:
    torch.ones(2, device="cuda:1")
    child = os.fork()
    if child == 0:
        cuda = ctypes.CDLL("libcudart.so.13")
        os._exit(cuda.cudaSetDevice(1))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_process_that_has_used_a_device_forks_children_that_cannot() -> None:
    assert alone(forked) == 3  # cudaErrorInitializationError


DTYPES = (
    *(torch.uint8, torch.int8, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
)
REDUCTIONS: dict[Any, Callable[[Tensor], Tensor]] = {
    dist.ReduceOp.SUM: lambda stacked: stacked.sum(0, dtype=stacked.dtype),
    dist.ReduceOp.PRODUCT: lambda stacked: stacked.prod(0, dtype=stacked.dtype),
    dist.ReduceOp.MIN: lambda stacked: stacked.amin(0),
    dist.ReduceOp.MAX: lambda stacked: stacked.amax(0),
    dist.ReduceOp.AVG: lambda stacked: (stacked.sum(0, dtype=stacked.dtype) / len(stacked)).to(stacked.dtype),
}


def all_collectives(world: World) -> int:
    """Each collective with each dtype against the tensors of all ranks, which every rank can make."""
    rank, size, checked = world.rank, world.size, 0

    def check(result: Tensor, expected: Tensor) -> None:
        nonlocal checked
        torch.testing.assert_close(result.cpu(), expected)
        checked += 1

    with nccl(world):
        for dtype in DTYPES:
            of = [(torch.arange(1, 2 * size + 1) + 3 * rank).to(dtype) for rank in range(size)]
            mine, stacked = of[rank].cuda(), torch.stack(of)
            for op, reduced in REDUCTIONS.items():
                dist.all_reduce(everywhere := mine.clone(), op)
                check(everywhere, reduced(stacked))
                dist.reduce(at_root := mine.clone(), 1, op)
                check(at_root, reduced(stacked) if rank == 1 else of[rank])
                dist.reduce_scatter_tensor(part := mine.new_empty(2), mine, op)
                check(part, reduced(stacked).view(size, 2)[rank])
            dist.broadcast(sent := mine.clone(), 1)
            check(sent, of[1])
            dist.all_gather_into_tensor(gathered := mine.new_empty(size * 2 * size), mine)
            check(gathered, stacked.flatten())
            dist.all_to_all_single(exchanged := torch.empty_like(mine), mine)
            check(exchanged, torch.cat([tensor[2 * rank : 2 * rank + 2] for tensor in of]))
            received = torch.empty_like(mine)
            messages = [
                dist.P2POp(dist.isend, mine, (rank + 1) % size),
                dist.P2POp(dist.irecv, received, (rank - 1) % size),
            ]
            for work in dist.batch_isend_irecv(messages):
                work.wait()
            check(received, of[rank - 1])
        dist.all_reduce(flags := torch.tensor([rank == 0, False], device="cuda"))
        check(flags, torch.tensor([True, False]))
        dist.all_reduce(complex_ := torch.full((2,), 1 + 1j * rank, device="cuda"))
        check(complex_, torch.full((2,), size + 1j * sum(range(size))))
        dist.all_gather_into_tensor(complexes := complex_.new_empty(size), complex_[:1] * rank)
        check(complexes, torch.arange(size) * complex_[0].cpu())
        scaled = torch.ones(2, device="cuda")
        dist.all_reduce(scaled, dist._make_nccl_premul_sum(0.5))
        check(scaled, torch.full((2,), size / 2))
        dist.all_reduce(torch.empty(0, device="cuda"))
        objects: list[Any] = [None] * size
        dist.all_gather_object(objects, {"rank": rank})
        assert objects == [{"rank": other} for other in range(size)]
        dist.barrier()
    return checked


def test_every_collective_gives_what_arithmetic_gives() -> None:
    assert len(set(run_world(3, all_collectives))) == 1


def split(world: World) -> list[list[int]]:
    with nccl(world, device_id=torch.device("cuda", world.rank)):
        group = dist.split_group(split_ranks=[[0, 2], [1]])
        number = torch.tensor([world.rank], device="cuda")
        gathered = [torch.empty_like(number) for _ in range(dist.get_world_size(group))]
        dist.all_gather(gathered, number, group=group)
        return [tensor.tolist() for tensor in gathered]


def test_a_communicator_splits_in_rank_order() -> None:
    assert run_world(3, split) == [[[0], [2]], [[1]], [[0], [2]]]


def one_device_for_two(world: World) -> None:
    store = join(world, 60, print)
    dist.init_process_group("nccl", store=store, rank=world.rank, world_size=world.size)
    dist.all_reduce(torch.ones(1, device="cuda:3"))


def test_two_ranks_cannot_have_one_device() -> None:
    with pytest.raises(WorkerError, match=r"Duplicate GPU detected : rank 0 and rank 1 both on .* device 3"):
        run_world(2, one_device_for_two)


def left_alone(world: World) -> tuple[bool, bool, str]:
    """Rank 0 calls what rank 1 does not; then both call something else."""
    torch.cuda.set_device(world.rank)
    store = join(world, 60, print)
    dist.init_process_group("nccl", store=store, rank=world.rank, world_size=world.size)
    dist.barrier()
    torch.cuda.synchronize()
    number, event, saved = torch.ones(2, device="cuda"), torch.cuda.Event(), os.dup(2)
    written = Path(f"/proc/self/fd/{os.memfd_create('stderr')}")
    os.dup2(os.open(written, os.O_WRONLY), 2)
    if world.rank == 0:
        work = dist.all_reduce(number, async_op=True)
        assert work is not None
        work.wait()  # the stream waits, not the host
        event.record()
        alone = event.query()
        store.set("asked", "yes")
    else:
        store.wait(["asked"])
        alone = False
        dist.broadcast(number, 0)
        event.record()
    while "they hang" not in (said := written.read_text()):
        os.sched_yield()
    finished = event.query()
    backend = dist.group.WORLD._get_backend(torch.device("cuda"))  # type: ignore[union-attr]
    backend.abort()
    event.synchronize()
    os.dup2(saved, 2)
    return alone, finished, said


def test_a_collective_that_a_rank_does_not_call_waits_until_it_is_aborted() -> None:
    for alone_done, finished, said in run_world(2, left_alone):
        assert (alone_done, finished) == (False, False)
        assert "all_reduce of 2 elements of type 7, reduction 0" in said
        assert "broadcast of 2 elements of type 7, root 0" in said


def sharded_step(world: World, wrap: str) -> dict[str, Tensor]:
    """Each rank has its share of one batch."""
    with nccl(world):
        torch.manual_seed(0)
        net, x = nn.Sequential(nn.Linear(4, 8, bias=False), nn.SyncBatchNorm(8), nn.Linear(8, 4)), torch.randn(4, 4)
        net = net.cuda()
        model: nn.Module = DistributedDataParallel(net) if wrap == "ddp" else fully_shard(net)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for _ in range(2):
            model(x.chunk(world.size)[world.rank].cuda()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        state = {
            name: getattr(tensor, "full_tensor", lambda tensor=tensor: tensor)()
            for name, tensor in net.state_dict().items()
        }
        return {name: tensor.cpu() for name, tensor in state.items()}


@pytest.mark.parametrize("wrap", ["ddp", "fsdp"])
def test_steps_of_two_ranks_equal_those_of_one_process(wrap: str) -> None:
    expected = alone(sharded_step, "ddp")
    for state in run_world(2, sharded_step, wrap):
        torch.testing.assert_close(state, expected)


def test_torch_is_imported_without_a_word() -> None:
    done = run(["-c", "import torch; torch.ones(2, device='cuda') + 1; import pretended_cuda"], fresh=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def replicate(world: World) -> None:
    torch.manual_seed(0)
    net = nn.Linear(8, 4)
    inputs = torch.randn(6, 8)
    net(inputs).square().sum().backward()
    expected = net.weight.grad
    net.zero_grad()
    copies = nn.DataParallel(net.cuda(), device_ids=[0, 1])
    for _ in range(20):  # the weights that one call of NCCL sends to both devices arrive before they are used
        copies(inputs.cuda()).square().sum().backward()
        assert net.weight.grad is not None
        torch.testing.assert_close(net.weight.grad.cpu(), expected)
        net.zero_grad()


def test_one_process_trains_replicas_on_two_devices() -> None:
    alone(replicate)
