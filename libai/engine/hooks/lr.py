"""Steps the schedules that follow a metric; the trainer itself steps all others after every update."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from libai.engine.hooks.evaluation.eval_metric import latest_value
from libai.engine.loop.hook_base import HookBase
from libai.scheduler import needs_metric
from libai.utils.errors import UserError


class LRHook(HookBase):
    """Steps the trainer's schedule, if it is one that wants a metric (`ReduceLROnPlateau`), once per evaluation.

    `metric` names it: `eval/<dataset>/<name>`, the same on all ranks. Does nothing for other schedules. Raises
    `UserError` before training when the schedule wants a metric and none is named, and after the first evaluation that
    does not give the one that is.
    """

    priority = 45

    def __init__(self, metric: str | None = None):
        self._metric = metric
        self._last_iter: int | None = None

    def before_train(self) -> None:
        """Refuses a schedule that would never be stepped."""
        scheduler = self.trainer.lr_scheduler  # type: ignore[attr-defined]
        self._is_needed = needs_metric(scheduler)
        if self._is_needed and self._metric is None:
            raise UserError(
                f"lr_scheduler={type(scheduler).__name__} lowers the rate by a metric, and this run measures none, so "
                'the rate would never change. Set train.evaluation.eval_metric="<dataset>/<name>" (for example '
                '"val/loss"), train.evaluation.eval_period and dataloader.test, or choose a schedule over iterations.'
            )

    def after_step(self) -> None:
        """Steps the schedule when an evaluation has just given its metric; the next update uses the new rate."""
        if not self._is_needed or self._metric is None:
            return
        found = latest_value(self.trainer.storage, self._metric)
        if found is not None and found[1] != self._last_iter:
            value, self._last_iter = found
            self.trainer.lr_scheduler.step(value)  # type: ignore[attr-defined]

    def state_dict(self) -> dict[str, Any]:
        return {} if self._last_iter is None else {"last_iter": self._last_iter}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._last_iter = state["last_iter"]
