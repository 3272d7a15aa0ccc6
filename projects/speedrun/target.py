"""Ends a run as soon as an evaluation reaches a target, and tells how long that took."""

from __future__ import annotations

import time

from libai.engine import HookBase, StopTraining


class StopAtTarget(HookBase):
    """Stops training at the first evaluation whose `metric` is at most `target`.

    The time is that of the training loop: building, data preparation and the interpreter's start do not count,
    evaluations and the first iteration do.
    """

    priority = 75  # after the evaluation

    def __init__(self, target: float, metric: str = "eval/val/loss"):
        self._target, self._metric = target, metric
        self._start = 0.0

    def before_train(self) -> None:
        """Starts the clock."""
        self._start = time.perf_counter()

    def after_step(self) -> None:
        """Looks at the newest evaluation; every rank sees the same one."""
        found = self.trainer.storage.get(self._metric)
        if found is not None and found[0] <= self._target:
            seconds = time.perf_counter() - self._start
            raise StopTraining(
                f"{self._metric} is {found[0]:.4f}, the target {self._target:g} is reached: "
                f"{self.trainer.iter + 1} iterations in {seconds:.1f} s"
            )
