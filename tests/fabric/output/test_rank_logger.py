"""A logger that logs on rank zero only, or on all ranks, with the rank in each record."""

import logging
from typing import Any

from devices import ACCELERATOR
from worlds import run_world

from fabric import Fabric
from fabric.launchers.world import World


class Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Any, ...]] = []
        self.formatter = logging.Formatter("%(rank)s: %(message)s", defaults={"rank": "-"})

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append((record.levelname, self.format(record), record.funcName))


def write(world: World) -> list[tuple[Any, ...]]:
    with Fabric(accelerator=ACCELERATOR, devices=world.size) as fabric:
        log, everywhere = fabric.get_logger("program"), fabric.get_logger("program", all_ranks=True)
        fabric.launch()
        records, plain = Records(), logging.getLogger("program")
        plain.addHandler(records)
        plain.setLevel("INFO")
        plain.propagate = False
        log.info("epoch %d", 3)
        log.debug("hidden")
        everywhere.warning("here", extra={"more": 1})
        plain.info("as before")
        assert log.isEnabledFor(logging.INFO) == fabric.is_global_zero
        assert not log.isEnabledFor(logging.DEBUG)
        return records.seen


def test_rank_zero_logs_and_others_only_on_request_and_records_have_their_rank() -> None:
    zero, one = run_world(2, write)
    assert zero == [
        ("INFO", "0: epoch 3", "write"),
        ("WARNING", "0: here", "write"),
        ("INFO", "-: as before", "write"),
    ]
    assert one == [("WARNING", "1: here", "write"), ("INFO", "-: as before", "write")]
