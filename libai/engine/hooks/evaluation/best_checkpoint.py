"""Keep the checkpoint with the best value of one metric."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from libai.engine.hooks.evaluation.eval_metric import latest_value
from libai.engine.loop.hook_base import HookBase
from libai.engine.trainer.checkpointer import TrainerCheckpointer


class BestCheckpointHook(HookBase):
    """After an evaluation with the best `metric` so far (`eval/<dataset>/<name>`), saves and marks that checkpoint.

    `mode`: "min" or "max". The marked checkpoint is never pruned. The metric is named, never guessed: a test set cannot
    choose the model by accident. A value that is not finite is never the best.
    """

    priority = 94

    def __init__(self, checkpointer: TrainerCheckpointer, metric: str, mode: str = "min"):
        self._checkpointer, self._metric, self._mode = checkpointer, metric, mode
        self.best: float | None = None
        self.best_iter: int | None = None
        self._last_iter: int | None = None

    def after_step(self) -> None:
        """Looks at the metric when it is new. Raises `UserError` when the evaluation does not give it."""
        found = latest_value(self.trainer.storage, self._metric)
        if found is None or found[1] == self._last_iter:
            return
        value, self._last_iter = found
        if not math.isfinite(value):
            return
        if self.best is None or (value < self.best if self._mode == "min" else value > self.best):
            self.best, self.best_iter = value, self.trainer.iter + 1
            self._checkpointer.save(best=(self._metric, value))

    def state_dict(self) -> dict[str, Any]:
        """See `HookBase.state_dict`."""
        return {"best": self.best, "best_iter": self.best_iter, "last_iter": self._last_iter}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `HookBase.load_state_dict`."""
        self.best, self.best_iter = state["best"], state["best_iter"]
        self._checkpointer.protect_best(self.best_iter)
        self._last_iter = state.get("last_iter")
