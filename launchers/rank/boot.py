"""The first lines of a rank that is a fresh interpreter. Run as a script: `boot.py ORDER_FD REPORT_FD PARENT`.

It stands outside the package until it knows where the package is, because the user's import path is part of its order.
"""

from __future__ import annotations

import pickle
import sys


def main(order_fd: int, report_fd: int, parent: int) -> None:
    """Become the rank that the order describes. What follows is the user's program."""
    with open(order_fd, "rb") as order:
        own_path, sys.path[:] = sys.path[:], pickle.load(order)
        from fabric.launchers.rank.task import run_task

        run_task(order, report_fd, parent, own_path)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
