"""Ranks meet, however late one comes, and a wait says for whom."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from processes import free_port
from worlds import run_world

from fabric.launchers import Rendezvous, WorkerError, World, join
from fabric.launchers.launcher import Topology
from fabric.launchers.process.network import require_interfaces
from fabric.launchers.rendezvous import join as rendezvous
from fabric.launchers.rendezvous.store_server import MeetingPoint


def world(rank: int, port: int, *, hosted: bool = True, size: int = 2) -> World:
    at = Rendezvous(address="127.0.0.1", port=port, hosted=hosted)
    return World(rank=rank, size=size, local_rank=rank, local_size=size, rendezvous=at)


@pytest.fixture
def point() -> MeetingPoint:
    point = MeetingPoint(Topology(num_processes=2))
    point.open()
    return point


def test_a_world_of_one_opens_no_port() -> None:
    store = join(World(), 1, print)
    store.set("key", "value")
    assert store.get("key") == b"value"


def test_each_rendezvous_has_keys_of_its_own(point: MeetingPoint) -> None:
    with ThreadPoolExecutor(2) as ranks:
        for number in range(3):
            stores = list(ranks.map(lambda rank: join(world(rank, point.port), 30, print), range(2)))
            assert not stores[0].check(["key"])
            stores[0].set("key", str(number))
            assert stores[1].get("key") == str(number).encode()


def test_after_the_timeout_the_missing_ranks_are_named(point: MeetingPoint) -> None:
    with pytest.raises(TimeoutError, match=r"Rank 0 of 3 waited 0.2 s for ranks 1, 2, which did not arrive"):
        join(world(0, point.port, size=3), 0.2, print)


@pytest.mark.slow
def test_missing_ranks_are_reported_until_they_arrive(point: MeetingPoint) -> None:
    messages: list[str] = []
    reported = threading.Event()

    def report(words: str) -> None:
        messages.append(words)
        reported.set()

    with ThreadPoolExecutor(2) as ranks:
        first = ranks.submit(join, world(0, point.port), 60, report)
        assert reported.wait(60)
        second = ranks.submit(join, world(1, point.port), 60, report)
        first.result()
        second.result()
    assert messages[0] == "rank 0 of 2 waits for rank 1"


def test_an_address_without_a_server_is_an_error_that_names_it() -> None:
    port = free_port()
    with pytest.raises(
        TimeoutError, match=rf"waited 0.2 s for rank 0 at 127.0.0.1:{port}: .* Check that rank 0 was started"
    ):
        join(world(1, port, hosted=False), 0.2, print)


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request"])
def test_an_address_at_which_another_program_listens_is_an_error_that_names_it(answer: bytes) -> None:
    """A MASTER_ADDR of an earlier job; torch would wait for one that is silent, whatever the timeout."""

    def serve() -> None:
        for _ in range(2):  # the first one only looks whether anybody listens
            connections.append(listener.accept()[0])
        connections[1].sendall(answer)

    connections: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as server:
        server.submit(serve)
        port = listener.getsockname()[1]
        with pytest.raises(TimeoutError, match=f"waited 0.2 s for rank 0 at 127.0.0.1:{port}: accepts connections"):
            join(world(1, port, hosted=False), 0.2, print)
    for connection in connections:
        connection.close()


def test_rank_zero_serves_the_store_whatever_address_it_was_given() -> None:
    """MASTER_ADDR may be of an earlier job: rank 0 says for whom it waits, and the others where they look for it."""
    at = Rendezvous(address="no-such-machine.invalid", port=free_port(), hosted=False)
    with pytest.raises(TimeoutError, match=r"Rank 0 of 2 waited 0.2 s for rank 1, which did not arrive"):
        join(World(size=2, local_size=2, rendezvous=at), 0.2, print)


def test_a_port_that_is_taken_is_an_error_that_names_it(point: MeetingPoint) -> None:
    with pytest.raises(RuntimeError, match=rf"Rank 0 cannot serve the rendezvous on port {point.port}: "):
        join(world(0, point.port, hosted=False), 1, print)
    with pytest.raises(RuntimeError, match=rf"Node 0 cannot serve the rendezvous on port {point.port}: "):
        MeetingPoint(Topology(num_processes=1, num_nodes=2, main_port=point.port))


def of_two_nodes(rank: int, port: int, *, attempt: int = 0) -> World:
    at = Rendezvous(address="127.0.0.1", port=port, hosted=True, attempt=attempt)
    return World(rank=rank, size=2, node_rank=rank, num_nodes=2, rendezvous=at)


def test_ranks_of_two_nodes_meet_although_their_agents_count_restarts_apart(point: MeetingPoint) -> None:
    with ThreadPoolExecutor(2) as ranks:
        for attempts in ((0, 0), (1, 0), (1, 2)):
            worlds = [of_two_nodes(rank, point.port, attempt=attempt) for rank, attempt in enumerate(attempts)]
            stores = list(ranks.map(lambda world: join(world, 30, print), worlds))
            assert not stores[0].check(["key"])
            stores[0].set("key", str(attempts))
            assert stores[1].get("key") == str(attempts).encode()


def test_a_rank_that_was_here_and_died_is_not_taken_for_the_one_that_came_in_its_place(point: MeetingPoint) -> None:
    for rank in range(2):
        with pytest.raises(WorkerError, match=f"Rank {rank} of 2 waited 0.2 s for rank {1 - rank}, which did not"):
            run_world(1, join_as, point.port, rank)
    assert run_world(2, join_as, point.port, None) == [b"from 1", b"from 0"]


def join_as(inner: World, port: int, alone: int | None) -> bytes:
    """Meet as a rank of two nodes: as `alone`, whom nobody meets, or as what this process is."""
    rank = inner.rank if alone is None else alone
    store = join(of_two_nodes(rank, port), 30 if alone is None else 0.2, print)
    store.set(str(rank), f"from {rank}")
    read = store.get(str(1 - rank))
    join(inner, 60, print)  # both stay until both have read
    return read


def meet_at_rank_zero(inner: World, port: int) -> list[bytes]:
    """Two meetings whose store rank 0 serves itself, as under srun; ours is only used to start the processes."""
    mine = world(inner.rank, port, hosted=False, size=inner.size)
    read = []
    for number in range(2):
        store = join(mine, 60, print)
        store.set(f"from {mine.rank}", str(number))
        read += [store.get(f"from {rank}") for rank in range(mine.size)]
    join(inner, 60, print)  # rank 0 stays until all have read
    return read


def test_rank_zero_hosts_the_store_if_no_agent_does() -> None:
    assert run_world(3, meet_at_rank_zero, free_port()) == [[b"0"] * 3 + [b"1"] * 3] * 3


def test_missing_ranks_are_reported_every_few_seconds() -> None:
    assert 1 <= rendezvous.SAY_EVERY_SECONDS <= 10


def test_an_interface_that_is_not_there_is_named_with_those_that_are() -> None:
    require_interfaces({})
    require_interfaces({"GLOO_SOCKET_IFNAME": "lo"})
    with pytest.raises(ValueError, match=r"`GLOO_SOCKET_IFNAME=lo,eth99`: .* no network interface 'eth99'. It has "):
        require_interfaces({"GLOO_SOCKET_IFNAME": "lo,eth99"})


ALONE = """
from fabric.launchers.launcher import Topology
from fabric.launchers.rendezvous.store_server import MeetingPoint

try:
    MeetingPoint(Topology(num_processes=2))
except RuntimeError as error:
    print(error)
"""


@pytest.mark.slow
def test_a_machine_without_a_loopback_is_an_error_before_ranks_start() -> None:
    done = subprocess.run(["unshare", "-rn", sys.executable, "-c", ALONE], capture_output=True, text=True, check=False)
    if done.returncode != 0 and "unshare" in done.stderr:
        pytest.skip("needs a network namespace of its own, which this machine refuses")
    assert "no loopback interface, or one that is down. Write `ip link set lo up`" in done.stdout, done.stderr
