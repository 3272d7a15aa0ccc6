"""Keep the checkpoint with the best value of one metric."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from libai.engine.checkpointer import TrainerCheckpointer
from libai.engine.hooks.evaluation.eval_metric import MetricHook


class BestCheckpointHook(MetricHook):
    """After an evaluation with the best value of `metric` (`eval/<dataset>/<name>`) so far, saves a checkpoint.

    The metric is named, never guessed: a test set cannot choose the model by accident. A value that is not finite is
    never the best.

    Args:
        checkpointer: where to; None only remembers the best value.
        mode: whether the smallest ("min") or the largest ("max") value is the best one.

    Attributes: `metric`, `best`, its value, and `best_iter`, the updates made until then; None before there is one.
    `best_metrics`: every metric of that evaluation, keyed `<dataset>/<name>`.
    """

    priority = 94

    def __init__(self, checkpointer: TrainerCheckpointer | None, metric: str, mode: str = "min"):
        super().__init__(metric)
        self._checkpointer = checkpointer
        self._sign = 1.0 if mode == "min" else -1.0
        self.best: float | None = None
        self.best_iter: int | None = None
        self.best_metrics: dict[str, float] = {}

    def judge(self, value: float) -> None:
        if not math.isfinite(value):
            return
        if self.best is not None and self._sign * value >= self._sign * self.best:
            return  # of equal values the earlier one stays
        self.best = value
        self.best_iter = self.trainer.iter + 1
        latest = self.trainer.storage.latest()
        self.best_metrics = {
            tag.removeprefix("eval/"): found
            for tag, (found, at) in latest.items()
            if tag.startswith("eval/") and at == self._last_iter
        }
        if self._checkpointer is not None:
            self._checkpointer.save(best=(self.metric, value))

    def state_dict(self) -> dict[str, Any]:
        metrics = {name: value for name, value in self.best_metrics.items() if math.isfinite(value)}
        return {
            "best": self.best,
            "best_iter": self.best_iter,
            "best_metrics": metrics,
            "last_iter": self._last_iter,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.best = state["best"]
        self.best_iter = state["best_iter"]
        self.best_metrics = dict(state["best_metrics"])
        if self._checkpointer is not None and self.best_iter is not None:
            self._checkpointer.keep_best(self.best_iter)
        self._last_iter = state.get("last_iter")
