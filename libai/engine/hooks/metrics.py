"""Hooks that measure iteration times, and that pass the numbers of a run from the event storage to
the writers.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Protocol

import numpy as np

from libai.engine.events.media import Media
from libai.engine.events.throughput import Throughput, memory_gb
from libai.engine.events.writers import LogRecord, Writer
from libai.engine.hook_base import EveryEpoch, HookBase, Period, is_due
from libai.patches.internals import wait_for_device
from libai.utils.distributed import all_reduce, is_main_process


class IterationTimer(HookBase):
    """Measures training time in windows and adds them to a `Throughput`.

    The host runs ahead of the device, and any code that reads a tensor waits for the device: a log
    point, a hook or the loader. Therefore parts of an iteration cannot be timed separately. A
    window is all the time from one log point to the next on the trainer's clock: data, updates,
    hooks and waiting. Evaluation, saving and a change of mode stop that clock. The first iteration
    after each start (compilation, first allocations) is counted separately in `first_seconds`. All
    windows and `first_seconds` together are the training time.

    Args:
        samples_per_iter: samples per iteration over all ranks.

    Attributes: `throughput`, `first_seconds`, and `start_iter`, the updates made before the latest
    `train`.
    """

    priority = 99  # the window of the first iteration includes the other hooks

    def __init__(self, samples_per_iter: int):
        self.throughput = Throughput()
        self.first_seconds = 0.0
        self.start_iter = 0
        self._samples = samples_per_iter
        self._train_start = self._start = self._data_seconds = 0.0
        self._from_iter = 0
        self._is_first = False

    def before_train(self) -> None:
        self._train_start = time.perf_counter()
        self.start_iter = self.trainer.start_iter
        self._end_window()

    def before_step(self) -> None:
        """Opens the window of a first iteration."""
        if self.trainer.iter == self.trainer.start_iter:
            self.close_window()  # the window of the iterations before a change of mode
            self._is_first = True

    def after_step(self) -> None:
        """Ends the window of a first iteration."""
        if self._is_first:
            # the only extra synchronization: the next window starts with an idle device
            self.trainer.fetch_metrics()
            self._end_first()

    def after_train(self) -> None:
        """Ends the last window, for example of a run that was stopped between two log points."""
        if self.trainer.status == "failed":
            return
        wait_for_device()
        if self._is_first:
            self._end_first()
        self.close_window()
        self.throughput.prolong(
            self._end_window()
        )  # add the time of hooks that ran after the last log point

    def close_window(self) -> None:
        """Add the time since the last call to the `Throughput`.

        Call it after the metrics have been fetched.
        """
        iters = self.trainer.completed_iters - self._from_iter
        if self._is_first or iters <= 0:
            return
        items, flops = self.trainer.feed.items_per_iter, self.trainer.loop.flops_per_sample
        data_seconds = self.trainer.feed.seconds - self._data_seconds
        self.throughput.update(
            self._end_window(),
            samples=self._samples * iters,
            items=items and items * iters,
            flops=flops and flops * self._samples * iters,
            data_seconds=data_seconds,
            iters=iters,
        )

    def _end_first(self) -> None:
        self.first_seconds += self._end_window()
        self._is_first = False

    def _end_window(self) -> float:
        """Begin a new window and return the seconds of the old one."""
        trainer = self.trainer
        now = trainer.loop.clock()
        seconds = now - self._start
        self._start = now
        self._data_seconds = trainer.feed.seconds
        self._from_iter = trainer.completed_iters
        return seconds

    @property
    def total_seconds(self) -> float:
        """Seconds since `before_train`, including everything."""
        return time.perf_counter() - self._train_start


class _Best(Protocol):
    """A hook that stores the best value of a metric."""

    metric: str

    def is_better(self, value: float) -> bool:
        """Return whether `value` is better than the best value so far."""


class WriterHook(HookBase):
    """Fetches the metrics at log points (the only regular synchronization of the loop) and writes
    them.

    The hook must be registered on all ranks, because metrics are reduced over ranks, but only rank
    0 has writers. The logged data time is the slowest rank's. The hook runs after all hooks that
    produce numbers. Before an evaluation it writes the numbers of the iteration.

    Args:
        writers: used on rank 0 only. They are opened when training starts and closed when it ends.
        period: iterations between log points, or every epoch.
        timer: source of the throughput numbers; None: log none.
        epoch: computes `train/epoch`; None leaves it out.
        best: hook that stores the best value of a metric; a record with a better value is marked.
    """

    priority = 80

    def __init__(
        self,
        writers: Sequence[Writer],
        period: Period,
        timer: IterationTimer | None = None,
        epoch: EveryEpoch | None = None,
        best: _Best | None = None,
    ):
        self._writers = list(writers) if is_main_process() else []
        self._timer, self._epoch = timer, epoch
        self.period = period
        self._best = best
        self._written: dict[str, int] = {}
        self._logged_at = 0
        self._has_evaluated = False

    def before_train(self) -> None:
        """Opens the writers and writes the results of an evaluation made before the first
        iteration.
        """
        start = self.trainer.start_iter
        self._logged_at = 0
        for writer in self._writers:
            writer.begin(start)
        # a resumed storage contains values that the earlier session has already written
        self._written.update(
            {tag: at for tag, (_, at) in self.trainer.storage.latest().items() if at < start}
        )
        self._write(start)
        if self._writers:
            self.trainer.storage.show_media_with(self._write_media)

    def _write_media(self, media: Media) -> None:
        for writer in self._writers:
            writer.write_media(media)

    def before_eval(self) -> None:
        """Writes the numbers of the iteration, if they are due, before its evaluation results."""
        self._has_evaluated = True
        self._log_if_due()

    def after_step(self) -> None:
        """Writes if a log point is due, after the last iteration, and after a new evaluation."""
        self._log_if_due()
        if self._has_evaluated:
            self._has_evaluated = False
            self._write(self.trainer.completed_iters)

    def _log_if_due(self) -> None:
        """Write the numbers of the latest iteration, once, if a log point is due or the run ends
        with it.
        """
        completed = self.trainer.completed_iters
        if self._logged_at != completed and is_due(self.period, self.trainer):
            self._logged_at = completed
            self._record_training()
            self._write(completed)

    def after_train(self) -> None:
        """Writes the evaluation of a run that was stopped early, and closes all writers even if one
        fails.
        """
        self.trainer.storage.show_media_with(None)
        with ExitStack() as stack:
            for writer in self._writers:
                stack.callback(writer.close)
            if self.trainer.status != "failed":
                self._write(self.trainer.iter)

    def write_after_training(self) -> None:
        """Write numbers that were measured after training, such as metrics of a test set."""
        trainer = self.trainer
        with ExitStack() as stack:
            for writer in self._writers:
                writer.begin(trainer.completed_iters)
                stack.callback(writer.close)
            self._write(trainer.completed_iters)

    def _record_training(self) -> None:
        """Put the numbers and the throughput of the iteration into the event storage."""
        trainer = self.trainer
        scalars = trainer.fetch_metrics()
        if self._timer is not None:
            self._timer.close_window()
            rates = self._timer.throughput.rates()
            if rates:
                rates["data_ms"] = float(all_reduce(np.array([rates["data_ms"]]), "max")[0])
            for name, value in {**rates, **memory_gb(trainer.loop.device)}.items():
                scalars[f"perf/{name}"] = value
        if self._epoch is not None:
            scalars["train/epoch"] = self._epoch.passes(trainer.completed_iters)
        trainer.storage.put_scalars(**scalars)

    def _write(self, completed: int) -> None:
        """Pass all new values of the event storage to the writers."""
        scalars = {}
        for tag, (value, iteration) in self.trainer.storage.latest().items():
            if self._written.get(tag) != iteration:
                self._written[tag] = iteration
                scalars[tag] = value
        if not scalars:
            return
        mean_loss = self.trainer.loop.metrics.mean_loss() if "train/loss" in scalars else None
        best = self._best
        if best and not (best.metric in scalars and best.is_better(scalars[best.metric])):
            best = None
        record = LogRecord(
            iter=completed,
            max_iter=self.trainer.max_iter,
            scalars=scalars,
            best=None if best is None else best.metric,
            mean_loss=mean_loss,
        )
        for writer in self._writers:
            writer.write(record)
