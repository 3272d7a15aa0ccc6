"""Stop when a metric has not improved for a number of evaluations."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from libai.engine.hooks.evaluation.eval_metric import MetricHook
from libai.engine.loop import StopTraining


class EarlyStopHook(MetricHook):
    """Ends training cleanly after `patience` evaluations without a better `metric` (`eval/<dataset>/<name>`).

    `mode`: "min" or "max". An improvement smaller than `min_delta` does not count. Every rank sees the same metric, so
    all ranks stop in the same iteration. A value that is not finite is no improvement.
    """

    priority = 70

    def __init__(self, metric: str, patience: int, mode: str = "min", min_delta: float = 0.0):
        super().__init__(metric)
        self._patience, self._min_delta = patience, min_delta
        self._sign = 1.0 if mode == "min" else -1.0
        self._best: float | None = None
        self._bad_evaluations = 0

    def judge(self, value: float) -> None:
        if math.isfinite(value) and (self._best is None or self._sign * (self._best - value) > self._min_delta):
            self._best, self._bad_evaluations = value, 0
            return
        self._bad_evaluations += 1
        if self._bad_evaluations >= self._patience:
            best = "no finite value" if self._best is None else f"{self._best:.6g}"
            raise StopTraining(f"{self.metric} has not improved on {best} for {self._bad_evaluations} evaluations")

    def state_dict(self) -> dict[str, Any]:
        return {"best": self._best, "bad_evaluations": self._bad_evaluations, "last_iter": self._last_iter}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._best, self._bad_evaluations = state["best"], state["bad_evaluations"]
        self._last_iter = state.get("last_iter")
