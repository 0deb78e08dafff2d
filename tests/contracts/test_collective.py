"""The contract of the role: what every collective does, the fake included, at 1, 2 and 4 ranks.

Each body runs on every rank and asserts there, all bodies of a world one after another over the same collective: so
each also shows that a refusal leaves the collective usable. What ranks pass is drawn at random, from a seed that a
failure prints; every rank draws what the others pass as well, and so knows what it must get.
"""

from __future__ import annotations

import os
import random
import threading
import traceback
from collections.abc import Callable, Sequence

import pytest
import torch
from fakes import run_threads
from torch import Tensor, nn
from worlds import run_world

from fabric.launchers.world import World
from fabric.strategies.collectives.collective import Collective, CollectiveError, ReduceOp
from fabric.strategies.collectives.process_group import TorchCollective
from fabric.strategies.collectives.single import SingleDeviceCollective

Body = Callable[[Collective, random.Random], None]

REALS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
OTHERS = (torch.bool, torch.complex64, torch.complex128, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn)
NUM_DRAWS = 12


def draw_shape(rng: random.Random) -> tuple[int, ...]:
    return tuple(rng.choice((0, 1, 2, 3, 5)) for _ in range(rng.randrange(4)))


def draw_tensors(rng: random.Random, num_ranks: int, shape: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
    """What each rank passes: small whole numbers, in memory of any order."""
    generator = torch.Generator().manual_seed(rng.getrandbits(32))
    layout = rng.choice(("contiguous", "transposed", "strided"))
    tensors = []
    for _ in range(num_ranks):
        wide = torch.randint(0, 4, (*shape, 2), generator=generator).to(dtype)
        tensor = wide[..., 0].contiguous() if layout != "strided" else wide[..., 0]
        if layout == "transposed" and len(shape) > 1:
            tensor = tensor.transpose(0, 1).contiguous().transpose(0, 1)
        tensors.append(tensor)
    return tensors


def assert_equal(got: Tensor, expected: Tensor) -> None:
    """Same dtype, shape and bits, of any dtype."""
    assert got.dtype is expected.dtype
    assert got.shape == expected.shape
    assert got.is_contiguous()
    assert got.tolist() == expected.tolist()


def reduced(stacked: Tensor, op: ReduceOp) -> Tensor:
    """The reduction over the first dimension, by other means than the code's."""
    result = stacked[0].clone()
    for tensor in stacked[1:]:
        result = {
            "sum": lambda a, b: a + b,
            "mean": lambda a, b: a + b,
            "product": lambda a, b: a * b,
            "min": lambda a, b: torch.minimum(a, b),
            "max": lambda a, b: torch.maximum(a, b),
        }[op](result, tensor)
    return result / len(stacked) if op == "mean" else result


def ranks_are_counted_from_zero(collective: Collective, rng: random.Random) -> None:
    ranks = collective.all_gather(torch.tensor(collective.rank)).tolist()
    assert ranks == list(range(collective.size))


def all_gather_stacks_the_tensors_of_all_ranks_in_rank_order(collective: Collective, rng: random.Random) -> None:
    for _ in range(NUM_DRAWS):
        tensors = draw_tensors(rng, collective.size, draw_shape(rng), rng.choice(REALS + INTEGERS + OTHERS))
        assert_equal(collective.all_gather(tensors[collective.rank]), torch.stack(tensors))


def large_tensors_are_gathered_and_reduced_as_small_ones(collective: Collective, rng: random.Random) -> None:
    for dtype in (torch.float32, torch.float64, torch.float16, torch.int64):
        stacked = torch.arange(collective.size * 300_000).remainder(101).reshape(collective.size, 300, 1000).to(dtype)
        own = stacked[collective.rank]
        assert torch.equal(collective.all_gather(own.T), stacked.mT)
        for op in ("sum", "max", *(["mean"] if dtype.is_floating_point else [])):
            got = collective.all_reduce(own.T, op)
            assert torch.equal(got, reduced(stacked.mT, op)), (dtype, op)
            assert got.data_ptr() != own.data_ptr()
        assert torch.equal(own, stacked[collective.rank])


def a_started_all_gather_gives_its_result_when_it_is_asked_for(collective: Collective, rng: random.Random) -> None:
    tensors = [draw_tensors(rng, collective.size, (3,), rng.choice(REALS + INTEGERS)) for _ in range(2)]
    finishes = [collective.start_all_gather(each[collective.rank]) for each in tensors]
    total = collective.all_reduce(torch.tensor(1.0))
    for finish, each in reversed(list(zip(finishes, tensors, strict=True))):
        assert_equal(finish(), torch.stack(each))
    assert total.item() == collective.size


def all_gather_gives_the_value_of_a_lazily_conjugated_tensor(collective: Collective, rng: random.Random) -> None:
    gathered = collective.all_gather(torch.tensor([1 + 2j]).conj())
    assert gathered.tolist() == [[1 - 2j]] * collective.size


def all_reduce_reduces_element_by_element(collective: Collective, rng: random.Random) -> None:
    for op in ("sum", "mean", "min", "max", "product"):
        for _ in range(NUM_DRAWS // 2):
            dtype = rng.choice(REALS if op == "mean" else REALS + INTEGERS)
            tensors = draw_tensors(rng, collective.size, draw_shape(rng), dtype)
            assert_equal(collective.all_reduce(tensors[collective.rank], op), reduced(torch.stack(tensors), op))


def all_reduce_of_complex_numbers_adds_them(collective: Collective, rng: random.Random) -> None:
    assert collective.all_reduce(torch.tensor(1 + 2j), "sum").item() == (1 + 2j) * collective.size
    assert collective.all_reduce(torch.tensor(1 + 2j).conj(), "mean").item() == 1 - 2j


def all_reduce_of_booleans_is_and_for_min_and_or_for_max(collective: Collective, rng: random.Random) -> None:
    mine = torch.tensor([True, False, collective.rank == 0])
    assert_equal(collective.all_reduce(mine, "min"), torch.tensor([True, False, collective.size == 1]))
    assert_equal(collective.all_reduce(mine, "product"), torch.tensor([True, False, collective.size == 1]))
    assert_equal(collective.all_reduce(mine, "max"), torch.tensor([True, False, True]))


def the_mean_of_integers_and_booleans_is_exact_and_in_floating_point(
    collective: Collective, rng: random.Random
) -> None:
    whole = collective.all_reduce(torch.tensor([collective.rank, 2**40]), "mean")
    assert_equal(whole, torch.tensor([(collective.size - 1) / 2, float(2**40)]))
    small = collective.all_reduce(torch.tensor([200], dtype=torch.uint8), "mean")
    assert_equal(small, torch.tensor([200.0]))
    share = collective.all_reduce(torch.tensor(collective.rank == 0), "mean")
    assert_equal(share, torch.tensor(1 / collective.size))


def the_mean_of_halves_does_not_overflow_on_the_way(collective: Collective, rng: random.Random) -> None:
    assert_equal(collective.all_reduce(torch.tensor(60000.0).half(), "mean"), torch.tensor(60000.0).half())


def broadcast_gives_every_rank_the_tensor_of_the_source(collective: Collective, rng: random.Random) -> None:
    for src in range(collective.size):
        for _ in range(NUM_DRAWS // 2):
            tensors = draw_tensors(rng, collective.size, draw_shape(rng), rng.choice(REALS + INTEGERS + OTHERS))
            got = collective.broadcast(tensors[collective.rank], src)
            assert_equal(got.contiguous(), tensors[src])
            if collective.rank == src:
                assert got.data_ptr() == tensors[src].data_ptr()


def fill_overwrites_each_tensor_with_that_of_rank_zero(collective: Collective, rng: random.Random) -> None:
    dtypes = [rng.choice(REALS + INTEGERS + OTHERS) for _ in range(NUM_DRAWS)]
    tensors = [draw_tensors(rng, collective.size, draw_shape(rng), dtype) for dtype in dtypes]
    mine = [of_ranks[collective.rank] for of_ranks in tensors]
    expected = [of_ranks[0].tolist() for of_ranks in tensors]
    collective.fill(mine)
    assert [tensor.tolist() for tensor in mine] == expected


def fill_is_past_autograd(collective: Collective, rng: random.Random) -> None:
    weight = torch.tensor([2.0], requires_grad=True)
    loss = (weight * weight).sum()
    collective.fill([weight])
    loss.backward()
    assert weight.grad is not None


def reduce_scatter_gives_each_rank_its_slice_of_the_reduction(collective: Collective, rng: random.Random) -> None:
    for op in ("sum", "mean", "min", "max", "product"):
        for _ in range(NUM_DRAWS // 2):
            shape = (collective.size, *draw_shape(rng))
            dtype = rng.choice(REALS if op == "mean" else REALS + INTEGERS)
            tensors = draw_tensors(rng, collective.size, shape, dtype)
            got = collective.reduce_scatter(tensors[collective.rank], op)
            assert_equal(got, reduced(torch.stack(tensors), op)[collective.rank])


def all_to_all_sends_slice_r_to_rank_r(collective: Collective, rng: random.Random) -> None:
    for _ in range(NUM_DRAWS):
        shape = (collective.size, *draw_shape(rng))
        tensors = draw_tensors(rng, collective.size, shape, rng.choice(REALS + INTEGERS + OTHERS))
        got = collective.all_to_all(tensors[collective.rank])
        assert_equal(got, torch.stack([tensor[collective.rank] for tensor in tensors]))


def send_and_recv_carry_a_tensor_to_the_next_rank(collective: Collective, rng: random.Random) -> None:
    for _ in range(NUM_DRAWS // 2):
        tensors = draw_tensors(rng, collective.size, draw_shape(rng), rng.choice(REALS + INTEGERS + OTHERS))
        if collective.rank + 1 < collective.size:
            collective.send(tensors[collective.rank], collective.rank + 1)
        if collective.rank > 0:
            like = torch.empty_like(tensors[collective.rank])
            assert_equal(collective.recv(like, collective.rank - 1), tensors[collective.rank - 1])


def what_was_passed_stays_as_it_was(collective: Collective, rng: random.Random) -> None:
    mine = torch.full((collective.size, 2), float(collective.rank))
    results = [
        collective.all_reduce(mine),
        collective.all_reduce(mine, "mean"),
        collective.all_gather(mine),
        collective.reduce_scatter(mine),
        collective.all_to_all(mine),
    ]
    for result in results:
        result.fill_(-1)
    assert mine.tolist() == [[collective.rank] * 2] * collective.size


def no_gradient_passes_a_collective(collective: Collective, rng: random.Random) -> None:
    mine = torch.ones(collective.size, requires_grad=True)
    assert not collective.broadcast(mine).requires_grad
    assert not collective.all_reduce(mine).requires_grad
    assert not collective.all_gather(mine).requires_grad
    assert not collective.reduce_scatter(mine).requires_grad
    assert not collective.all_to_all(mine).requires_grad


def no_rank_leaves_a_barrier_before_all_have_come(collective: Collective, rng: random.Random) -> None:
    store = collective.store()
    assert (store is None) == (collective.size == 1)
    for attempt in range(10):
        if store is not None:
            store.set(f"{attempt}/{collective.rank}", "here")
            assert store.check([f"{attempt}/{collective.rank}"])  # `set` is not acknowledged: it may still travel
        collective.barrier()
        if store is not None:
            assert store.check([f"{attempt}/{rank}" for rank in range(collective.size)])


def broadcast_object_gives_every_rank_the_object_of_the_source(collective: Collective, rng: random.Random) -> None:
    for src in range(collective.size):
        for length in (1, 495, 496, 497, 5000):
            mine = {"from": collective.rank, "long": "x" * length}
            got = collective.broadcast_object(mine if collective.rank == src else None, src)
            assert got == {"from": src, "long": "x" * length}
            assert (got is mine) == (collective.rank == src)


def broadcast_object_carries_tensors_of_any_dtype_and_size(collective: Collective, rng: random.Random) -> None:
    tensors = [draw_tensors(rng, 1, draw_shape(rng), dtype)[0] for dtype in REALS + INTEGERS + OTHERS]
    large = torch.arange(300_000).reshape(300, 1000).T
    same = torch.ones(2)
    sent = {"many": tensors, "deep": [(large, "word")], "parameter": nn.Parameter(torch.ones(3)), "same": [same, same]}
    src = collective.size - 1
    got = collective.broadcast_object(sent if collective.rank == src else None, src)
    for received, tensor in zip(got["many"], tensors, strict=True):
        assert_equal(received.contiguous(), tensor.contiguous())
    assert torch.equal(got["deep"][0][0], large)
    assert got["deep"][0][1] == "word"
    assert isinstance(got["parameter"], nn.Parameter)
    assert got["parameter"].requires_grad
    assert got["same"][0] is got["same"][1]


def broadcast_object_of_a_bare_tensor_needs_none_elsewhere(collective: Collective, rng: random.Random) -> None:
    src = collective.size - 1
    for others in (torch.zeros(3), torch.zeros(7), None):
        got = collective.broadcast_object(torch.ones(3) if collective.rank == src else others, src)
        assert got.tolist() == [1, 1, 1]


def broadcast_object_takes_tensors_that_no_collective_moves(collective: Collective, rng: random.Random) -> None:
    sparse = torch.eye(2).to_sparse()
    assert torch.equal(collective.broadcast_object(sparse).to_dense(), torch.eye(2))
    nest = collective.broadcast_object([sparse, torch.empty(3, device="meta")])
    assert torch.equal(nest[0].to_dense(), torch.eye(2))
    assert nest[1].shape == (3,)


def all_gather_object_gives_copies_in_rank_order(collective: Collective, rng: random.Random) -> None:
    mine = {"rank": collective.rank, "long": "x" * (1000 * collective.rank), "tensor": torch.tensor(collective.rank)}
    got = collective.all_gather_object(mine)
    assert got == [
        {"rank": rank, "long": "x" * (1000 * rank), "tensor": torch.tensor(rank)} for rank in range(collective.size)
    ]
    assert got[collective.rank] is not mine


def an_object_that_cannot_be_pickled_is_an_error_on_every_rank(collective: Collective, rng: random.Random) -> None:
    src = collective.size - 1
    mine = threading.Lock() if collective.rank == src else 1
    words = rf"Rank {src} sent nothing: `broadcast from rank {src}`: a lock cannot be pickled: TypeError"
    with pytest.raises(CollectiveError, match=words):
        collective.broadcast_object(mine, src)
    with pytest.raises(
        CollectiveError, match=rf"Rank {src} sent nothing: `all_gather of objects`: a lock cannot"
    ) as info:
        collective.all_gather_object(mine)
    assert info.value.rank == collective.rank


def parts_talk_among_themselves_and_are_made_once(collective: Collective, rng: random.Random) -> None:
    everyone, last = list(range(collective.size)), collective.size - 1
    evens = everyone[::2]
    part = collective.split(evens)
    assert (part is not None) == (collective.rank in evens)
    if part is not None:
        assert (part.rank, part.size) == (evens.index(collective.rank), len(evens))
        assert part.all_gather(torch.tensor(collective.rank)).tolist() == evens
        assert part.all_gather_object(collective.rank) == evens
        part.teardown()
    assert collective.split(evens) is part
    alone = collective.split([last])
    if alone is not None:
        assert alone.size == 1
        assert alone.all_reduce(torch.tensor(2.0)).item() == 2.0
    whole = collective.split(everyone)
    assert whole is not None
    assert whole.all_gather(torch.tensor(collective.rank)).tolist() == everyone


def a_part_is_not_split_again(collective: Collective, rng: random.Random) -> None:
    part = collective.split([0])
    if part is not None and part is not collective:
        with pytest.raises(
            ValueError, match=r"`split\(\[0\]\)` of a collective that came from `split` .* Split the original"
        ):
            part.split([0])


def decisions_are_true_where_all_or_any_said_so(collective: Collective, rng: random.Random) -> None:
    for voters in (0, 1, collective.size):
        mine = collective.rank < voters
        assert collective.reduce_boolean_decision(mine) is (voters == collective.size)
        assert collective.reduce_boolean_decision(mine, require_all=False) is (voters > 0)


def an_unknown_reduction_is_refused(collective: Collective, rng: random.Random) -> None:
    words = r"`'avg'` is not a reduction\. Write one of 'sum', 'mean', 'min', 'max', 'product'"
    with pytest.raises(ValueError, match=words):
        collective.all_reduce(torch.ones(1), "avg")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=words):
        collective.reduce_scatter(torch.ones(collective.size), "avg")  # type: ignore[arg-type]


def a_reduction_that_the_dtype_does_not_have_is_refused(collective: Collective, rng: random.Random) -> None:
    with pytest.raises(
        ValueError, match=r"The sum of bool tensors over ranks is not defined\. The dtype could not hold"
    ):
        collective.all_reduce(torch.tensor(True))
    with pytest.raises(ValueError, match=r"The min of complex64 tensors .* Reduce `torch\.view_as_real\(tensor\)`"):
        collective.all_reduce(torch.tensor(1j), "min")
    with pytest.raises(ValueError, match=r"The max of float8_e4m3fn tensors .* Convert it to float32 or int64 first"):
        collective.all_reduce(torch.ones(1).to(torch.float8_e4m3fn), "max")
    with pytest.raises(ValueError, match=r"The mean of uint64 tensors .* Convert it to float32 first"):
        collective.all_reduce(torch.ones(1).to(torch.uint64), "mean")


def a_tensor_without_one_slice_per_rank_is_refused(collective: Collective, rng: random.Random) -> None:
    size = collective.size
    words = rf"of a tensor of shape \({size + 1}, 2\) over {size} ranks: .* Pass a tensor of shape \({size}, \.\.\.\)"
    with pytest.raises(ValueError, match="`reduce_scatter` " + words):
        collective.reduce_scatter(torch.ones(size + 1, 2))
    with pytest.raises(ValueError, match="`all_to_all` " + words):
        collective.all_to_all(torch.ones(size + 1, 2))
    with pytest.raises(ValueError, match=r"`all_to_all` of a tensor of shape \(\)"):
        collective.all_to_all(torch.tensor(1))


def a_source_that_is_no_rank_is_refused(collective: Collective, rng: random.Random) -> None:
    size = collective.size
    words = rf"in a collective of {size}: ranks count from 0 to {size - 1}"
    with pytest.raises(ValueError, match=rf"`broadcast\(src={size}\)` {words}"):
        collective.broadcast(torch.ones(1), size)
    with pytest.raises(ValueError, match=rf"`broadcast\(src=-1\)` {words}"):
        collective.broadcast_object(1, -1)


def a_peer_that_is_no_other_rank_is_refused(collective: Collective, rng: random.Random) -> None:
    size, rank = collective.size, collective.rank
    words = rf"in a collective of {size}: ranks count from 0 to {size - 1}"
    with pytest.raises(ValueError, match=rf"`send\(dst={size}\)` {words}"):
        collective.send(torch.ones(1), size)
    with pytest.raises(ValueError, match=rf"`recv\(src={rank}\)` on rank {rank} itself\. Name another rank"):
        collective.recv(torch.ones(1), rank)


def a_part_with_unknown_repeated_or_unsorted_ranks_is_refused(collective: Collective, rng: random.Random) -> None:
    for ranks in ([], [0, 0], [collective.size], [-1], [1, 0]):
        with pytest.raises(ValueError, match=r"`split\(\[.*\]\)` of a collective of .*each once, in ascending order"):
            collective.split(ranks)


def a_tensor_that_is_not_dense_is_refused(collective: Collective, rng: random.Random) -> None:
    sparse = torch.eye(2).to_sparse()
    with pytest.raises(TypeError, match=r"`Tensor` of layout torch\.sparse_coo .* is no plain dense tensor"):
        collective.all_gather(sparse)
    with pytest.raises(TypeError, match=r"`\.values\(\)` and `\.indices\(\)` of a sparse tensor"):
        collective.all_reduce(sparse)


BODIES: tuple[Body, ...] = (
    ranks_are_counted_from_zero,
    all_gather_stacks_the_tensors_of_all_ranks_in_rank_order,
    a_started_all_gather_gives_its_result_when_it_is_asked_for,
    all_gather_gives_the_value_of_a_lazily_conjugated_tensor,
    all_reduce_reduces_element_by_element,
    large_tensors_are_gathered_and_reduced_as_small_ones,
    all_reduce_of_complex_numbers_adds_them,
    all_reduce_of_booleans_is_and_for_min_and_or_for_max,
    the_mean_of_integers_and_booleans_is_exact_and_in_floating_point,
    the_mean_of_halves_does_not_overflow_on_the_way,
    broadcast_gives_every_rank_the_tensor_of_the_source,
    fill_overwrites_each_tensor_with_that_of_rank_zero,
    fill_is_past_autograd,
    reduce_scatter_gives_each_rank_its_slice_of_the_reduction,
    all_to_all_sends_slice_r_to_rank_r,
    what_was_passed_stays_as_it_was,
    no_gradient_passes_a_collective,
    no_rank_leaves_a_barrier_before_all_have_come,
    broadcast_object_gives_every_rank_the_object_of_the_source,
    broadcast_object_carries_tensors_of_any_dtype_and_size,
    broadcast_object_of_a_bare_tensor_needs_none_elsewhere,
    broadcast_object_takes_tensors_that_no_collective_moves,
    all_gather_object_gives_copies_in_rank_order,
    an_object_that_cannot_be_pickled_is_an_error_on_every_rank,
    decisions_are_true_where_all_or_any_said_so,
    an_unknown_reduction_is_refused,
    a_reduction_that_the_dtype_does_not_have_is_refused,
    a_tensor_without_one_slice_per_rank_is_refused,
    a_source_that_is_no_rank_is_refused,
    a_part_with_unknown_repeated_or_unsorted_ranks_is_refused,
    a_tensor_that_is_not_dense_is_refused,
)
POINT_TO_POINT: tuple[Body, ...] = (
    send_and_recv_carry_a_tensor_to_the_next_rank,
    a_peer_that_is_no_other_rank_is_refused,
)
"""What Horovod and XLA do not have."""
SUBGROUPS: tuple[Body, ...] = (parts_talk_among_themselves_and_are_made_once, a_part_is_not_split_again)
"""What XLA does not have."""
EVERY_BODY = (*BODIES, *POINT_TO_POINT, *SUBGROUPS)

WORLDS = ("single-1", "torch-1", "torch-2", "torch-4", "threads-1", "threads-2", "threads-4")


def check_a_forked_process_is_no_rank(collective: Collective) -> None:
    """Of collectives that are connected to other processes."""
    calls: tuple[Callable[[], object], ...] = (
        collective.barrier,
        lambda: collective.all_reduce(torch.ones(2)),
        lambda: collective.add_number(1),
        lambda: collective.all_gather_object("x"),
    )
    for call in calls:
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                call()
            except BaseException as error:
                os.write(writer, str(error).encode())
            os._exit(0)
        os.close(writer)
        os.waitpid(pid, 0)
        with os.fdopen(reader) as file:
            words = file.read()
        assert f"in a process that rank {collective.rank} has forked" in words
        assert "`fabric.global_rank`" in words
    collective.barrier()


def run_bodies(collective: Collective, seed: int) -> dict[str, str]:
    """What went wrong on this rank, by body."""
    failures = {}
    for body in EVERY_BODY:
        try:
            body(collective, random.Random(seed))
        except Exception:
            failures[body.__name__] = (
                f"rank {collective.rank} of {collective.size}, seed {seed}\n{traceback.format_exc()}"
            )
    return failures


def run_torch(world: World, seed: int) -> dict[str, str]:
    collective = TorchCollective(world, "gloo", device=torch.device("cpu"), timeout_seconds=20)
    collective.setup()
    failures = run_bodies(collective, seed)
    collective.teardown()
    collective.teardown()
    return failures


def run_single(seed: int) -> dict[str, str]:
    collective = SingleDeviceCollective()
    collective.setup()
    failures = run_bodies(collective, seed)
    collective.teardown()
    return failures


@pytest.fixture(scope="module", params=WORLDS)
def failures(request: pytest.FixtureRequest) -> list[dict[str, str]]:
    """What went wrong in one world, by rank and body."""
    kind, size = request.param.split("-")
    seed = random.randrange(2**32)
    if kind == "single":
        return [run_single(seed)]
    return run_threads(int(size), run_bodies, seed) if kind == "threads" else run_world(int(size), run_torch, seed)


@pytest.mark.parametrize("body", EVERY_BODY, ids=lambda body: body.__name__)
def test_every_collective_keeps_the_contract(failures: list[dict[str, str]], body: Body) -> None:
    of_body = [of_rank[body.__name__] for of_rank in failures if body.__name__ in of_rank]
    assert not of_body, "\n".join(of_body)


def forked_from_a_rank(world: World) -> None:
    collective = TorchCollective(world, "gloo", device=torch.device("cpu"), timeout_seconds=20)
    collective.setup()
    check_a_forked_process_is_no_rank(collective)
    collective.teardown()


def test_a_collective_in_a_forked_process_raises() -> None:
    run_world(2, forked_from_a_rank)
