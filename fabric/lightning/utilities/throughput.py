"""Throughput over a window of the latest updates, and the floating-point operations of a step."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from fabric.lightning.fabric import Fabric


@dataclass(frozen=True, slots=True, kw_only=True)
class _Update:
    time: float
    batches: int
    samples: int
    lengths: int | None
    flops: float | None


class Throughput:
    """Batches, samples, items and operations per second, of one device and of all.

    `available_flops`: the peak of one device; with it there is `device/mfu`, the fraction of it that is used.
    """

    def __init__(
        self, available_flops: float | None = None, world_size: int = 1, window_size: int = 100, separator: str = "/"
    ) -> None:
        if world_size < 1 or window_size < 2:
            raise ValueError(
                f"`Throughput(world_size={world_size}, window_size={window_size})`: write a `world_size` from 1, and "
                "a `window_size` from 2."
            )
        self.available_flops = available_flops
        self.world_size = world_size
        self.separator = separator
        self._window: deque[_Update] = deque(maxlen=window_size)

    def update(
        self, *, time: float, batches: int, samples: int, lengths: int | None = None, flops: float | None = None
    ) -> None:
        """Record the work of this device since the beginning; `flops`: since the latest update.

        Raises: ValueError: a count went down, or there are fewer samples than batches.
        """
        update = _Update(time=time, batches=batches, samples=samples, lengths=lengths, flops=flops)
        if samples < batches or (lengths is not None and lengths < samples):
            raise ValueError(
                f"`update(batches={batches}, samples={samples}, lengths={lengths})`: `samples` is at least `batches`, "
                "and `lengths` at least `samples`. Pass all counts since the beginning."
            )
        if self._window:
            for name in ("time", "batches", "samples", "lengths"):
                before, now = getattr(self._window[-1], name), getattr(update, name)
                if before is not None and now is not None and now < before:
                    raise ValueError(
                        f"`update({name}={now})` after {before}: counts are since the beginning, and grow. Call "
                        "`reset()` to begin again."
                    )
        self._window.append(update)

    def compute(self) -> dict[str, float]:
        """The metrics by name: counts, and rates per second once the window is full."""
        if not self._window:
            return {}
        first, last = self._window[0], self._window[-1]
        metrics: dict[str, float] = {"time": last.time, "batches": last.batches, "samples": last.samples}
        if last.lengths is not None:
            metrics["lengths"] = last.lengths
        seconds = last.time - first.time
        if len(self._window) < (self._window.maxlen or 0) or seconds <= 0:
            return metrics
        rates = {"batches_per_sec": (last.batches - first.batches) / seconds}
        rates["samples_per_sec"] = (last.samples - first.samples) / seconds
        if first.lengths is not None and last.lengths is not None:
            rates["items_per_sec"] = (last.lengths - first.lengths) / seconds
        done = [update.flops for update in list(self._window)[1:] if update.flops is not None]
        if done:
            rates["flops_per_sec"] = sum(done) / seconds
        for name, rate in rates.items():
            metrics[f"device{self.separator}{name}"] = rate
            if self.world_size > 1:
                metrics[name] = rate * self.world_size
        if done and self.available_flops is not None:
            metrics[f"device{self.separator}mfu"] = rates["flops_per_sec"] / self.available_flops
        return metrics

    def reset(self) -> None:
        """Reset all counts."""
        self._window.clear()


class ThroughputMonitor(Throughput):
    """`Throughput` that knows the number of ranks and the dense peak of the device (`fabric.monitor`), and logs. For a
    device that is not in the table, `device/mfu` needs `available_flops=`."""

    def __init__(self, fabric: "Fabric", **kwargs: Any) -> None:
        if kwargs.get("available_flops") is None:
            from fabric.monitor.flops import device_name, known_peak

            known = known_peak(device_name(fabric.device), fabric.core.precision.compute_dtype)
            kwargs["available_flops"] = None if known is None else known[0]
        super().__init__(world_size=fabric.world_size, **kwargs)
        self._fabric = fabric
        self.step = -1

    def compute_and_log(self, step: int | None = None, **kwargs: Any) -> dict[str, float]:
        """Compute the metrics and log them by `fabric.log_dict`."""
        self.step = self.step + 1 if step is None else step
        metrics = self.compute(**kwargs)
        self._fabric.log_dict(metrics, step=self.step)
        return metrics


def measure_flops(
    model: nn.Module,
    forward_fn: Callable[[], torch.Tensor],
    loss_fn: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> int:
    """Count the floating-point operations of a forward, and of backward if `loss_fn` is given.

    What activation checkpointing computes again is not counted, as in `fabric.monitor`. On the device "meta" nothing
    is computed.
    """
    from fabric.monitor.flops import ModelFlops

    counter = ModelFlops()
    counter.start()
    try:
        output = forward_fn()
        if loss_fn is not None:
            loss = loss_fn(output)
            counter.is_in_backward = True
            loss.backward()  # type: ignore[no-untyped-call]
    finally:
        flops = counter.stop()
    return flops
