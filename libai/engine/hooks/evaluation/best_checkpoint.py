"""Keep the checkpoints with the best values of one metric."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from libai.engine.hooks.evaluation.eval_metric import MetricHook
from libai.engine.trainer.checkpointer import TrainerCheckpointer


class BestCheckpointHook(MetricHook):
    """After an evaluation with one of the best values of `metric` (`eval/<dataset>/<name>`) so far, saves a checkpoint.

    The metric is named, never guessed: a test set cannot choose the model by accident. A value that is not finite is
    never among the best.

    Args:
        checkpointer: where to; None only remembers the best value.
        mode: whether the smallest ("min") or the largest ("max") value is the best one.
        num_kept: so many of the best checkpoints are never pruned; the best one is also marked as such.

    Attributes: `metric`, `best`, its value, and `best_iter`, the updates made until then; None before there is one.
    """

    priority = 94

    def __init__(self, checkpointer: TrainerCheckpointer | None, metric: str, mode: str = "min", num_kept: int = 1):
        super().__init__(metric)
        self._checkpointer, self._num_kept = checkpointer, num_kept
        self._sign = 1.0 if mode == "min" else -1.0
        self._kept: list[tuple[float, int]] = []  # value and iteration, the best one first

    @property
    def best(self) -> float | None:
        """The best value so far."""
        return self._kept[0][0] if self._kept else None

    @property
    def best_iter(self) -> int | None:
        """The updates made when it was measured."""
        return self._kept[0][1] if self._kept else None

    def judge(self, value: float) -> None:
        if not math.isfinite(value):
            return
        new = (value, self.trainer.iter + 1)
        ranked = sorted([*self._kept, new], key=lambda each: self._sign * each[0])  # the earlier one of equal values
        self._kept = ranked[: self._num_kept]
        if self._checkpointer is not None and new in self._kept:
            best = (self.metric, value) if self._kept[0] == new else None
            self._checkpointer.save(best, keep=[iteration for _, iteration in self._kept])

    def state_dict(self) -> dict[str, Any]:
        kept = [list(each) for each in self._kept]
        return {"best": self.best, "best_iter": self.best_iter, "kept": kept, "last_iter": self._last_iter}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        only = [] if state["best"] is None else [(state["best"], state["best_iter"])]
        self._kept = [(value, iteration) for value, iteration in state.get("kept", only)][: self._num_kept]
        if self._checkpointer is not None:
            self._checkpointer.keep_best([iteration for _, iteration in self._kept])
        self._last_iter = state.get("last_iter")
