"""The process that forks ranks on request."""

from __future__ import annotations

import multiprocessing
import time

import pytest

from fabric.launchers.supervision.fork_server import ForkServer


@pytest.mark.timeout(20)
def test_it_ends_with_its_client_also_while_a_process_runs_that_was_forked_from_the_client() -> None:
    server = ForkServer()
    worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))  # as a `DataLoader` has
    worker.start()
    try:
        server.close()
        assert not server.is_usable
    finally:
        worker.kill()
        worker.join()
