"""Entry point of a rank in a new interpreter. Run as a script: `boot.py TASK_FD REPORT_FD PARENT`.

It imports nothing of the package before it has read the user's import path, which is part of the task.
"""

import pickle
import sys


def main(task_fd: int, report_fd: int, parent: int) -> None:
    """Become the rank that the task describes, and run the user's program."""
    with open(task_fd, "rb") as file:
        sys.path[:] = pickle.load(file)
        from fabric.launchers.rank.task import run_task

        run_task(file, report_fd, parent)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
