"""What the ranks measured in a window, by name; on rank 0 it is shown, logged, and written to `monitor.jsonl`.

Each line of the file is one JSON object, written at once: a run that is killed leaves a file of whole lines.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from time import time
from typing import Any, final

import torch
from torch import Tensor

from fabric.monitor.flops import device_name
from fabric.monitor.slow_rank import SlowRanks, unknown_in_words
from fabric.monitor.table import Table
from fabric.monitor.window import AS_MEASURED, MEMORY, NUM_LAST, PHASES, SAVING, WAITING, Gathered
from fabric.output.logger import log_metrics
from fabric.strategies.runtime import Runtime


@final
class Results:
    """Ranks: all make one, in `Fabric.monitor`. Rank 0 alone shows, logs and writes.

    Raises: OSError: on every rank, if rank 0 cannot write into the folder.
    """

    def __init__(
        self, runtime: Runtime, strategy: str, loggers: Sequence[Any], folder: Path | None, *, show: bool
    ) -> None:
        self._loggers, self._is_zero = loggers, runtime.world.is_global_zero
        self._file: Path | None = None
        self._table = Table() if show and self._is_zero else None
        self.peak: float | None = None
        """Floating-point operations of one rank's device per second, at most."""
        self.step_seconds = float("inf")
        """Of the latest window, on all ranks; not known before its end."""
        self.latest: dict[str, float] = {}
        self._slow = SlowRanks()
        self._rank_share = runtime.share.count / runtime.world.size  # of ranks that read the same data one counts
        error = self._open(folder) if folder is not None and self._is_zero else None
        error = runtime.collective.broadcast_object(error)
        if error is not None:
            raise OSError(error)
        world = {"num_ranks": runtime.world.size, "num_nodes": runtime.world.num_nodes, "torch": torch.__version__}
        device = device_name(runtime.device)
        self.write("start", strategy=strategy, precision=runtime.precision.name, device_name=device, **world)

    def _open(self, folder: Path) -> str | None:
        """Why there can be no file in the folder."""
        file = folder / "monitor.jsonl"
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("ab+") as opened:
                opened.seek(max(0, opened.tell() - 1))
                if opened.read(1) not in (b"", b"\n"):  # a killed run has left half a line
                    opened.write(b"\n")
        except OSError as error:
            written = f"`fabric.monitor({str(folder)!r})` writes `{file}`, and cannot"
            return f"{written}: {error}. Name a folder that can be written."
        self._file = file
        return None

    def write(self, kind: str, **content: Any) -> None:
        """Append a line, on rank 0, if there is a file."""
        if self._file is not None:
            line = json.dumps({"kind": kind, "time": time(), **content}) + "\n"
            with self._file.open("ab") as file:
                file.write(line.encode())

    def close(self) -> None:
        """Leave the table as it is, and restore the terminal."""
        if self._table is not None:
            self._table.close()

    def window(self, receive: Callable[[], Tensor], step: int, at: float) -> None:
        """Receive the rows of all ranks, and take them. Ranks: all."""
        gathered = Gathered(receive())
        self.step_seconds = fmean(each["seconds"] / each["num_steps"] for each in gathered.numbers)
        if not self._is_zero:
            return
        waits_rsp = gathered.waits()
        own_rsp = gathered.seconds_rsp - waits_rsp
        own_rsp[:, NUM_LAST] /= gathered.numbers[0].get("num_saves", 1.0)
        slow = self._slow.find(own_rsp, gathered.queued_rs, self.step_seconds)
        ranks = [self._of_rank(rank, gathered, waits_rsp[rank]) for rank in range(len(own_rsp))]
        metrics = self.latest = _of_all(ranks, self._rank_share)
        if slow is not None:
            metrics |= {"slow_rank": slow.rank, "slow_seconds": slow.seconds}
        unknown = unknown_in_words(own_rsp, gathered.queued_rs, self.step_seconds) if slow is None else ""
        found = {"metrics": metrics, "ranks": ranks, "slow": slow and asdict(slow), "unknown": unknown}
        self.write("window", time=at, step=step, num_steps=round(gathered.numbers[0]["num_steps"]), **found)
        log_metrics(self._loggers, {f"monitor/{name}": value for name, value in metrics.items()}, step)
        if self._table is not None:
            self._table.show(step, metrics, ranks, unknown if slow is None else slow.in_words())

    def _of_rank(self, rank: int, gathered: Gathered, waits_sp: Tensor) -> dict[str, float]:
        """The numbers of one rank; none that is not known."""
        numbers, num_steps = gathered.numbers[rank], gathered.numbers[rank]["num_steps"]
        own_p = torch.tensor([numbers[phase] for phase in PHASES], dtype=torch.float64) / num_steps
        last = waits_sp[:NUM_LAST].isfinite().all(1).nonzero()[:, 0]  # of the steps before, as large a share is waits
        waits_p = own_p * (waits_sp[last].sum(0) / gathered.seconds_rsp[rank, last].sum(0)).nan_to_num()
        waits_p[SAVING] = waits_sp[NUM_LAST, SAVING].nan_to_num() / num_steps
        own_p -= waits_p
        own_p[WAITING] = waits_p.sum()
        found = {"rank": rank, "step_seconds": float(own_p.sum())}
        found |= {f"{phase}_seconds": seconds for phase, seconds in zip(PHASES, own_p.tolist(), strict=True)}
        counts = {"steps": num_steps, **{name: numbers.get(name, 0) for name in ("samples", "tokens", "flops")}}
        found |= {f"{name}_per_second": count / numbers["seconds"] for name, count in counts.items() if count > 0}
        if self.peak is not None and "flops_per_second" in found:
            found["mfu"] = found["flops_per_second"] / self.peak
        return found | {name: numbers[name] for name in AS_MEASURED if name in numbers}


def _of_all(ranks: Sequence[dict[str, float]], rank_share: float) -> dict[str, float]:
    """The metrics of all ranks together: sums of rates, the greatest memory, and means. `rank_share`: of one rank's
    data, how much no other rank reads."""
    found = dict[str, float]()
    for name in ranks[0]:
        values = [each[name] for each in ranks if name in each]
        if name in ("samples_per_second", "tokens_per_second"):
            found[name] = sum(values) * rank_share
        elif name == "flops_per_second":
            found[name] = sum(values)
        elif name in (*MEMORY, "num_skipped_steps", "learning_rate"):  # the last two are the same on all ranks
            found[name] = max(values)
        elif name != "rank":
            found[name] = sum(values) / len(values)
    return found
