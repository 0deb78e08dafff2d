"""Entry point of a rank in a new interpreter. Run as a script: `boot.py ORDER_FD REPORT_FD PARENT`.

It imports nothing of the package before it has read the user's import path, which is part of the order.
"""

from __future__ import annotations

import pickle
import sys


def main(order_fd: int, report_fd: int, parent: int) -> None:
    """Become the rank that the order describes, and run the user's program."""
    with open(order_fd, "rb") as order:
        own_path, sys.path[:] = sys.path[:], pickle.load(order)
        from fabric.launchers.rank.task import run_task

        run_task(order, report_fd, parent, own_path)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
