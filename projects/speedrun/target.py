"""End a run as soon as an evaluation reaches a target, and report how long that took."""

from __future__ import annotations

import time

from libai.engine import HookBase, StopTraining


class StopAtTarget(HookBase):
    """Stop training at the first evaluation whose `metric` is at most `target`.

    The reported time is the time of the training loop. It includes evaluations and the first
    iteration, but not the start of the interpreter, building and data preparation.
    """

    priority = 75  # after the evaluation

    def __init__(self, target: float, metric: str = "eval/val/loss"):
        self._target, self._metric = target, metric
        self._start = 0.0

    def before_train(self) -> None:
        """Start the clock."""
        self._start = time.perf_counter()

    def after_step(self) -> None:
        """Check the newest evaluation, which is the same on every rank."""
        found = self.trainer.storage.get(self._metric)
        if found is not None and found[0] <= self._target:
            seconds = time.perf_counter() - self._start
            raise StopTraining(
                f"{self._metric} is {found[0]:.4f}, the target {self._target:g} is reached: "
                f"{self.trainer.iter + 1} iterations in {seconds:.1f} s"
            )
