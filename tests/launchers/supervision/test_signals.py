"""What a rank makes of a signal is its own business; the supervisor only passes it on."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from processes import all_gone, running

PROGRAM = """
import os, signal, sys, threading
from fabric.launchers import Topology, detect_world
from fabric.launchers.choose import choose_launcher

def wait_and_save(world, number):
    arrived = []
    signal.signal(number, lambda number, frame: arrived.append(number))
    signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    os.write(1, b"ready\\n")
    signal.sigwait({number})
    return f"rank {world.rank} saved after {signal.Signals(number).name}"

def main():
    word, number = sys.argv[1], int(sys.argv[2])
    launcher = choose_launcher(word, Topology(num_processes=2), function=wait_and_save, world=detect_world(os.environ))
    sys.stdout.write(launcher.launch(wait_and_save, number) + "\\n")

if __name__ == "__main__":
    main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGINT])
@pytest.mark.parametrize("word", ["fork", "forkserver"])
def test_ranks_that_return_after_a_signal_give_their_result(tmp_path: Path, word: str, number: signal.Signals) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    with running([tmp_path / "program.py", word, str(int(number))]) as started:
        started.wait_for("ready", times=2)
        started.process.send_signal(number)
        started.wait_for(f"rank 0 saved after {number.name}")
        assert started.process.wait(30) == 0


IGNORING = """
import os, signal, sys
from fabric.launchers import Topology
from fabric.launchers.fork import Fork
signal.signal(signal.SIGHUP, signal.SIG_IGN)
world = Fork(Topology(num_processes=2)).enter()
sys.stdout.write(f"{signal.getsignal(signal.SIGHUP).name} ready\\n")
sys.stdout.flush()
signal.pause()
"""


@pytest.mark.slow
def test_a_signal_that_was_ignored_stays_ignored(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(IGNORING)
    with running([tmp_path / "program.py"]) as started:
        started.wait_for("SIG_IGN ready", times=2)
        started.process.send_signal(signal.SIGHUP)
        started.process.send_signal(signal.SIGTERM)
        assert started.process.wait(30) == -signal.SIGTERM


IN_A_THREAD = """
import os, signal
from concurrent.futures import ThreadPoolExecutor
from fabric.launchers import Topology
from fabric.launchers.start_methods import forkserver

def wait(world):
    os.write(1, b"ready\\n")
    signal.pause()

if __name__ == "__main__":
    with ThreadPoolExecutor(1) as pool:
        pool.submit(forkserver(Topology(num_processes=2)).launch, wait).result()
"""


@pytest.mark.slow
def test_ranks_that_a_thread_has_launched_end_with_the_process(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(IN_A_THREAD)
    with running([tmp_path / "program.py"]) as started:
        started.wait_for("ready", times=2)
        started.process.send_signal(signal.SIGTERM)
        assert started.process.wait(30) == -signal.SIGTERM
        assert all_gone(started) == {}
