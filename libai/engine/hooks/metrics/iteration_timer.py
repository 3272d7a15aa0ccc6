"""How long an iteration takes and how much of it waits for data."""

from __future__ import annotations

import time

from libai.engine.events.throughput import Throughput
from libai.engine.hook_base import HookBase


class IterationTimer(HookBase):
    """Measures training time, window by window, and feeds a `Throughput`.

    The host runs ahead of the device, and whoever reads a tensor waits for it: a log point, a hook, the loader. So no
    part of an iteration tells its time, and a window is all the time from one log point to the next by the trainer's
    clock: data, updates, hooks, waiting. Evaluation, saving and a change of mode stop that clock. The first iteration
    after each start (compilation, first allocations) is kept apart in `first_seconds`; all windows and
    `first_seconds` together are the time of training.

    Args:
        samples_per_iter: of all ranks.
    """

    priority = 10

    def __init__(self, samples_per_iter: int):
        self.throughput = Throughput()
        self.first_seconds = 0.0
        self._samples = samples_per_iter
        self._train_start = self._start = self._data_seconds = 0.0
        self._iters = 0
        self._is_first = False

    def before_train(self) -> None:
        self._train_start = time.perf_counter()
        self._begin_window()

    def before_step(self) -> None:
        """Ends the time of a first iteration, in which its hooks count too, and begins that of the next."""
        if self._is_first:
            self._end_first()
        trainer = self.trainer
        if trainer.iter == trainer.start_iter:
            self.close_window()  # with the iterations before a change of mode
            self._is_first = True

    def after_step(self) -> None:
        trainer = self.trainer
        self._data_seconds += trainer.feed.seconds
        self._iters += 1
        if self._is_first:
            trainer.fetch_metrics()  # the only extra synchronisation: the next window begins with an idle device

    def after_train(self) -> None:
        """Ends the last window, of a run that was stopped between two log points for instance."""
        if self.trainer.status != "failed":
            self.trainer.loop.wait_for_device()
            self._end()

    def close_window(self) -> None:
        """Hand the time since the last call to the `Throughput`. Call it after the metrics have been fetched."""
        if self._is_first or not self._iters:
            return
        items, flops = self.trainer.feed.items_per_iter, self.trainer.loop.flops.of_update
        self.throughput.update(
            self._window_seconds(),
            samples=self._samples * self._iters,
            items=items and items * self._iters,
            flops=flops and flops * self._samples * self._iters,
            data_seconds=self._data_seconds,
            iters=self._iters,
        )
        self._begin_window()

    def _end(self) -> None:
        if self._is_first:
            self._end_first()
        self.close_window()
        self.throughput.prolong(self._window_seconds())  # by the hooks that ran after the last log point
        self._begin_window()

    def _end_first(self) -> None:
        self.first_seconds += self._window_seconds()
        self._is_first = False
        self._begin_window()

    def _window_seconds(self) -> float:
        return self.trainer.loop.clock.seconds - self._start

    def _begin_window(self) -> None:
        self._start, self._data_seconds, self._iters = self.trainer.loop.clock.seconds, 0.0, 0

    @property
    def total_seconds(self) -> float:
        """Since `before_train`, everything included."""
        return time.perf_counter() - self._train_start
