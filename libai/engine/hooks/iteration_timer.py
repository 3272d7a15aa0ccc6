"""How long an iteration takes and how much of it waits for data."""

from __future__ import annotations

import time

from libai.engine.hook_base import HookBase
from libai.engine.throughput import Throughput


class IterationTimer(HookBase):
    """Measures training time, window by window, and feeds a `Throughput`.

    The host runs ahead of the device, so the time of one iteration alone means nothing. A window's time is what the
    host spent in its iterations plus what it waited for the device when the metrics were fetched; evaluation,
    checkpoints and writers are not in it. The first iteration (compilation, first allocations) is kept apart in
    `first_seconds`.

    Args:
        samples_per_iter: of all ranks.
        flops_per_iter: forward and backward of all ranks, for TFLOP/s.
    """

    priority = 10

    def __init__(self, samples_per_iter: int, flops_per_iter: float | None = None):
        self.throughput = Throughput()
        self.first_seconds = 0.0
        self._samples, self._flops = samples_per_iter, flops_per_iter
        self._train_start = self._start = self._seconds = self._data_seconds = 0.0
        self._iters = 0

    def before_train(self) -> None:
        """Starts the clock of the whole run."""
        self._train_start = time.perf_counter()

    def before_step(self) -> None:
        """Starts the clock of an iteration."""
        self._start = time.perf_counter()

    def after_step(self) -> None:
        """Stops it."""
        trainer = self.trainer
        self._seconds += time.perf_counter() - self._start
        self._data_seconds += trainer.data_seconds
        self._iters += 1
        if trainer.iter == trainer.start_iter:
            trainer.fetch_metrics()  # the only extra synchronisation: the next window begins with an idle device
            self.first_seconds = self._seconds + trainer.pop_wait_seconds()
            self._reset()

    def close_window(self) -> None:
        """Hand the time since the last call to the `Throughput`. Call it after the metrics have been fetched."""
        seconds = self._seconds + self.trainer.pop_wait_seconds()
        if self._iters:
            items = getattr(self.trainer, "items_per_iter", None)
            self.throughput.update(
                seconds,
                samples=self._samples * self._iters,
                items=items and items * self._iters,
                flops=self._flops and self._flops * self._iters,
                data_seconds=self._data_seconds,
                iters=self._iters,
            )
        self._reset()

    def _reset(self) -> None:
        self._seconds = self._data_seconds = 0.0
        self._iters = 0

    @property
    def total_seconds(self) -> float:
        """Since `before_train`, everything included."""
        return time.perf_counter() - self._train_start
