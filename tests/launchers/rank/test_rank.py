"""What a process is like once it is a rank."""

from __future__ import annotations

import os
import random
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from processes import run
from worlds import run_world

from fabric.launchers import Topology, World, detect_world, join
from fabric.launchers.choose import choose_launcher
from fabric.launchers.start_methods import forkserver


def own_session(world: World) -> tuple[bool, bool]:
    return os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()


def test_a_rank_leads_its_own_session() -> None:
    assert run_world(2, own_session) == [(True, True)] * 2


def draws(world: World) -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(1))


def test_ranks_start_with_the_random_states_of_the_process_that_launched() -> None:
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    ranks = run_world(2, draws)
    assert ranks[0] == ranks[1] == draws(World())
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


def threads(world: World) -> tuple[int, str]:
    return torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]


def test_the_ranks_of_a_node_share_its_cores_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = len(os.sched_getaffinity(0))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for size in (1, 2, 4):
        share = max(1, cores // size)
        assert run_world(size, threads) == [(share, str(share))] * size
    for value, num_threads in (("3", 3), ("1,2", 1)):  # a number for each level of nesting
        monkeypatch.setenv("OMP_NUM_THREADS", value)
        assert run_world(2, threads) == [(num_threads, value)] * 2
    monkeypatch.setenv("OMP_NUM_THREADS", "")
    assert run_world(2, threads) == [(max(1, cores // 2), str(max(1, cores // 2)))] * 2


def surroundings(world: World) -> tuple[str, str | None, list[str]]:
    return os.getcwd(), os.environ.get("A_WORD_OF_THE_USER"), sys.argv


def test_a_rank_has_the_current_directory_environment_and_arguments(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run_world(1, surroundings)  # the server is older than what follows
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("A_WORD_OF_THE_USER", "now")
    assert run_world(1, surroundings) == [(str(tmp_path), "now", sys.argv)]


def write(world: World) -> None:
    os.write(1, b"from a rank\n")


def test_a_rank_writes_to_the_current_stdout_of_the_launching_process(capfd: pytest.CaptureFixture[str]) -> None:
    run_world(2, write)
    assert capfd.readouterr().out == "from a rank\n" * 2


def enter_again(world: World) -> bool:
    inner = choose_launcher("auto", Topology(num_processes=2), function=None, world=detect_world(os.environ))
    return inner.enter() == world


def test_a_second_launch_in_a_rank_is_the_same_world() -> None:
    assert run_world(2, enter_again) == [True, True]


def meet(world: World, launch: int) -> list[str]:
    store = join(world, 60, print)
    store.set(str(world.rank), str(launch))
    return [store.get(str(rank)).decode() for rank in range(world.size)]


def test_simultaneous_launches_do_not_connect_to_each_other() -> None:
    with ThreadPoolExecutor(4) as launches:
        results = list(launches.map(lambda launch: run_world(2, meet, launch), range(4)))
    assert results == [[[str(launch)] * 2] * 2 for launch in range(4)]


def processes_and_descriptors() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def test_a_launch_leaves_no_descriptor_and_no_thread_behind() -> None:
    launcher = forkserver(Topology(num_processes=2))
    launcher.launch(meet, 0)
    before = processes_and_descriptors()
    for launch in range(3):
        launcher.launch(meet, launch)
    assert processes_and_descriptors() == before


def test_a_launch_restores_the_signal_handlers() -> None:
    import signal

    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
    before = [signal.getsignal(number) for number in numbers], signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(before[1])
    run_world(1, own_session)
    after = [signal.getsignal(number) for number in numbers], signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(after[1])
    assert after == before


def gloo_interface(world: World) -> str | None:
    return os.environ.get("GLOO_SOCKET_IFNAME")


def test_ranks_of_one_node_communicate_over_loopback_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert run_world(2, gloo_interface) == ["lo", "lo"]
    name = socket.if_nameindex()[-1][1]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", name)
    assert run_world(2, gloo_interface) == [name, name]


USERS_OWN = """
import atexit, sys
from fabric.launchers import Topology, detect_world
from fabric.launchers.choose import choose_launcher
import os
def hook(kind, error, trace):
    sys.stdout.write("user's hook\\n")
sys.excepthook = hook
world = choose_launcher("fork", Topology(num_processes=1, num_nodes=1), function=None, world=None)
from fabric.launchers.fork import Fork
Fork(Topology(num_processes=2)).enter()
atexit.register(sys.stdout.write, "user's exit\\n")
raise ValueError("boom")
"""


@pytest.mark.slow
def test_a_rank_runs_the_users_own_hook_and_exit_functions(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(USERS_OWN)
    done = run([tmp_path / "program.py"])
    assert done.returncode == 1
    assert "user's hook" in done.stdout
    assert "user's exit" in done.stdout
    assert done.stderr.rstrip().endswith("ValueError: boom")
