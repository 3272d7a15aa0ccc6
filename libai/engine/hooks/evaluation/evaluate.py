"""Evaluation every n iterations and once at the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from libai.engine.hook_base import HookBase, Period, is_due


class EvalHook(HookBase):
    """Runs `function() -> {tag: value}` every `period` iterations (or epoch) and after the last, never twice in one.

    `period=0`: only at the end. The values go to the event storage, where writers and the best-checkpoint hook find
    them. All ranks must run it: evaluation is collective.
    """

    priority = 40

    def __init__(self, period: Period, function: Callable[[], Mapping[str, float]]):
        self._period = period
        self._function = function
        self._last_evaluated = -1

    def after_step(self) -> None:
        """Evaluates when the period says so, and after the last iteration."""
        completed = self.trainer.iter + 1
        if completed == self.trainer.max_iter or is_due(self._period, completed):
            self._evaluate(completed)

    def after_train(self) -> None:
        """Evaluates the weights of a run that was stopped early."""
        if self.trainer.status == "stopped":
            self._evaluate(self.trainer.iter)

    def _evaluate(self, completed: int) -> None:
        if completed == self._last_evaluated:
            return
        self.trainer.check_finite()  # so that corrupted weights are reported as that, and not as a strange metric
        self.trainer.loop.call_hooks("before_eval")
        with self.trainer.loop.not_training():
            start = time.perf_counter()
            metrics = self._function()
            seconds = time.perf_counter() - start
        self._last_evaluated = completed
        self.trainer.storage.put_scalars(**metrics, **{"perf/eval_s": seconds})
        self.trainer.loop.call_hooks("after_eval")
